"""GEMM names of the libraries beside cuBLAS: TensorRT-LLM, CuTe DSL, DeepGEMM, CUTLASS templates, Triton, Tensile.

Each decoder states the grammar that it reads, and each reads the types of *both* operands. They follow one rule: a
type that a grammar does not know, or a name that was cut before its types, leaves the operands None. So a mixture
is named as one (`e4m3 x e2m1`), and what is not understood never passes for a format that is.

Where the same template serves several types, only its arguments tell: DeepGEMM's `sm100_fp8_fp4_gemm_1d1d_impl`
multiplies e4m3 x e4m3 in most models, and e4m3 x e2m1 in a few.

Sources: the name generators in the public repositories of DeepGEMM, Triton (`triton_kernels`), hipBLASLt and Tensile,
CUTLASS's collective builders, TensorRT-LLM's and FlashInfer's lists of kernels, and public profiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowprec_callback.analyze.gemm_grammar import (
    Arguments,
    Element,
    GemmName,
    arguments,
    base,
    blas_layout,
    common,
    element,
    function_of,
    plain,
    types_in,
    widened,
)


def _unknown(rule: str, layout: str | None = None) -> GemmName:
    return GemmName(None, None, layout, rule)


# --- TensorRT-LLM -------------------------------------------------------------------------------------------

_TRTLLM_TYPES = {
    "E2m1": "e2m1",
    "E4m3": "e4m3",
    "E5m2": "e5m2",
    "Bfloat16": "bf16",
    "Fp16": "fp16",
    "Fp32": "fp32",
    "Int4": "int4",
    "Int8": "int8",
}
_TRTLLM_TYPE = r"(?:Mx)?[A-Z][a-z]*\d+(?:m\d+)?"
_TRTLLM = re.compile(
    rf"(?:^|[_:])[Bb]?(?:mm|[Gg]emm)_{_TRTLLM_TYPE}_({_TRTLLM_TYPE})({_TRTLLM_TYPE})(_cast{_TRTLLM_TYPE})?_Fp32_"
)
_TRTLLM_NVFP4 = re.compile(r"_(?:Ab16_Bb|bA16_bB)16(?!\d)")


def trtllm(name: str) -> GemmName | None:
    """`bmm_<D>_<A><B>[_cast<type>]_<accumulator>_...`: the *output* comes first.

    `MxE4m3` is e4m3 with a scale for 32 elements, and `_castBfloat16` widens A inside the kernel. `Ab16_Bb16` are
    scale blocks of 16, and `dsFp8` is DeepSeek's scaling in blocks of 128. FP8 without any of these is scaled in a
    way that the name does not tell.
    """
    match = _TRTLLM.search(name)
    if not match:
        return None
    layout = blas_layout(re.search(r"_(T|N)(T|N)_", name))
    a, b = (_TRTLLM_TYPES.get(field.removeprefix("Mx")) for field in (match[1], match[2]))
    if a is None or b is None:
        return _unknown(f"TensorRT-LLM GEMM with an operand type that is not known: {match[1]}, {match[2]}", layout)
    if match[3] and not widened((a, b)):
        return _unknown(f"TensorRT-LLM GEMM that widens its operands{match[3].replace('_cast', ' to ')}", layout)
    scaling = None
    if match[1].startswith("Mx") and match[2].startswith("Mx"):
        scaling = "mx-32"
    elif (a, b) == ("e2m1", "e2m1") and _TRTLLM_NVFP4.search(name):
        scaling = "nvfp4-16"
    elif "_dsFp8" in name:
        scaling = "block-128"
    return GemmName((a, b), plain((a, b), scaling), layout, "TensorRT-LLM operand fields")


# --- CuTe DSL -----------------------------------------------------------------------------------------------

_CUTE_TENSOR = re.compile(r"tensorptr([a-z]+\d+(?:E\d+M\d+(?:FNUZ|FNU|FN)?)?)")
_CUTE_TYPES = {
    "f4E2M1FN": "e2m1",
    "f8E4M3FN": "e4m3",
    "f8E5M2": "e5m2",
    "f6E2M3FN": "e2m3",
    "f6E3M2FN": "e3m2",
    "bf16": "bf16",
    "f16": "fp16",
    "f32": "fp32",
}


def cute_dsl(name: str) -> GemmName | None:
    """`kernel_cutlass_..gemm.._tensorptr<A>.._tensorptr<B>.._tensorptr<scale>..`, in argument order."""
    if not name.startswith("kernel_cutlass_") or "gemm" not in name:
        return None
    tensors = _CUTE_TENSOR.findall(name)
    operands = [_CUTE_TYPES.get(kind) for kind in tensors[:2]]
    if len(operands) != 2 or operands[0] is None or operands[1] is None:
        return _unknown("CuTe DSL GEMM whose operand tensors cannot be read")
    pair = (operands[0], operands[1])
    scaling = None
    # Each operand has scales of its own; one tensor alone of the scales' type may be the output.
    if tensors[2:].count("f8E8M0FNU") >= 2:
        scaling = "mx-32"
    elif pair == ("e2m1", "e2m1") and tensors[2:].count("f8E4M3FN") >= 2:
        scaling = "nvfp4-16"
    return GemmName(pair, plain(pair, scaling), None, "CuTe DSL tensor types")


# --- DeepGEMM -----------------------------------------------------------------------------------------------

# Words between the type and `gemm` hold no digits: one that does is another type.
_DEEP_GEMM = re.compile(r"(?<![a-z0-9])(sm\d+)_(fp8_fp4|fp8|bf16|tf32)_(?:[a-z]+_)*gemm_((?:\w+_)?impl)")
_DEEP_GEMM_FIRST = re.compile(r"(?<!\w)deep_gemm::fp8_(?:wgrad_)?gemm_kernel(?!\w)")
_DEEP_GEMM_BLOCKS = {"128": "block-128", "32": "mx-32"}
_NOT_A_TYPE = re.compile(r"-?\d|true$|false$|\(|.*epilogue::")


def deep_gemm(name: str) -> GemmName | None:
    """`deep_gemm::sm90_fp8_gemm_1d2d_impl<...>`, by its type arguments where it has any for its operands.

    | kernel                              | type arguments | operands                    |
    |-------------------------------------|----------------|-----------------------------|
    | `fp8_gemm_kernel` (the first, sm90) | none           | e4m3 x e4m3, scales for 128 |
    | `sm90_fp8_gemm_1d1d`, `_1d2d`       | D              | e4m3 x e4m3, scales for 128 |
    | `sm100_fp8_gemm_1d1d` of 2025       | D              | e4m3 x e4m3, scales for 128 |
    | `sm100_fp8_gemm_1d1d` of 2026       | A, B, D        | as they say                 |
    | `sm100_fp8_fp4_gemm_1d1d`           | A, B, D        | as they say                 |

    Those with types for A and B also say, third and fourth, how many elements of each share a scale.
    """
    if _DEEP_GEMM_FIRST.search(name):
        return GemmName(("e4m3", "e4m3"), "block-128", None, "DeepGEMM's first FP8 kernels")
    match = _DEEP_GEMM.search(name)
    if not match:
        return None
    chip, said, rest = match[1], match[2], match[3]
    found = arguments(name, match[0]) or Arguments((), False)
    types = [value for value in found.values if not _NOT_A_TYPE.match(value)]
    blocks = "block-128" if re.match(r"1d[12]d_impl", rest) else None
    if len(types) == 3 and found.whole:
        a, b = element(types[0]).format, element(types[1]).format
        if a is None or b is None:
            return _unknown(f"DeepGEMM kernel with an operand type that is not known: {types[0]}, {types[1]}")
        grains = {_DEEP_GEMM_BLOCKS.get(value) for value in found.values[2:4]}
        scaling = grains.pop() if len(grains) == 1 else None
        return GemmName((a, b), plain((a, b), scaling), None, "DeepGEMM type arguments")
    if said == "fp8_fp4" or (said == "fp8" and chip != "sm90" and not (found.whole and len(types) == 1)):
        return _unknown("DeepGEMM kernel of several types, cut before the arguments that tell them")
    kind = "e4m3" if said == "fp8" else said
    return GemmName((kind, kind), plain((kind, kind), blocks), None, "DeepGEMM name")


# --- CUTLASS and cuBLAS templates ---------------------------------------------------------------------------

_ATOM = re.compile(r"_F32(TF32|BF16|F16|E4M3|E5M2|E2M1)(TF32|BF16|F16|E4M3|E5M2|E2M1)_")
_ATOM_TYPES = {"TF32": "tf32", "BF16": "bf16", "F16": "fp16", "E4M3": "e4m3", "E5M2": "e5m2", "E2M1": "e2m1"}


def collective_mma(name: str) -> GemmName | None:
    """`cutlass::device_kernel<..CollectiveMma<policy, tile, A, strides, B, strides, MMA instruction, ..>..>`.

    The policy tells scaling in blocks inside the main loop, whose size it does not tell. Without it, and without
    scales beside the elements, FP8 is scaled in the epilogue: once a tensor or once a row, here `tensor` for both.
    """
    found = arguments(name, "CollectiveMma")
    if found is None:
        return None
    if len(found.values) < 5:
        return _unknown("CUTLASS template, cut before its element types")
    a, b = element(found.values[2]), element(found.values[4])
    if a.format is None or b.format is None:
        return _unknown("CUTLASS template with an element type that is not known")
    operands = _multiplied((a.format, b.format), found.values[6] if len(found.values) > 6 else "")
    if operands is None:
        return _unknown("CUTLASS template that multiplies its elements in another type than it reads them in")
    scaling = common(a.scaling, b.scaling)
    if a.scaling is None and b.scaling is None and found.whole and "Block" not in base(found.values[0]):
        scaling = "tensor"
    return GemmName(operands, plain(operands, scaling), None, "CUTLASS element types")


def _multiplied(operands: tuple[str, str], instruction: str) -> tuple[str, str] | None:
    """The operands as the instruction takes them: FP32 is multiplied as TF32 on tensor cores, and only there.

    None: one format, but another in the instruction, or FP32 of which nobody says how it is multiplied.
    """
    atom = _ATOM.search(instruction)
    taken = (_ATOM_TYPES[atom[1]], _ATOM_TYPES[atom[2]]) if atom else None
    if operands == ("fp32", "fp32"):
        if "TF32" in instruction:
            return ("tf32", "tf32")
        return operands if "FMA" in instruction else None
    return operands if taken in (None, operands) else widened(operands)


_CUTLASS2_LOOP = re.compile(r"(?<!\w)(Mma(?:Multistage|Pipelined|Singlestage))<")
_ITERATOR = re.compile(r"(?:\w+::)*(Predicated\w*Iterator\w*)<")


def threadblock_mma(name: str) -> GemmName | None:
    """`cutlass::Kernel2<..MmaMultistage<.., PredicatedTileAccessIterator<shape, A, ..>, .., Predicated..<.., B, ..>>`.

    CUTLASS 2 spelled out. What multiplies FP32, it does not say plainly, so FP32 stays unknown.
    """
    loop = _CUTLASS2_LOOP.search(name)
    found = arguments(name, loop[1]) if loop else None
    if found is None:
        return None
    kinds = [_iterated(value) for value in found.values if _ITERATOR.match(value)][:2]
    if len(kinds) != 2 or kinds[0] is None or kinds[1] is None:
        return _unknown("CUTLASS 2 template whose element types cannot be read")
    operands = (kinds[0], kinds[1])
    if operands == ("fp32", "fp32"):
        return _unknown("CUTLASS 2 template over FP32, which it may multiply as TF32")
    return GemmName(operands, plain(operands), None, "CUTLASS 2 element types")


def _iterated(text: str) -> str | None:
    iterator = _ITERATOR.match(text)
    found = arguments(text, iterator[1]) if iterator else None
    return element(found.values[1]).format if found and len(found.values) > 1 else None


_VECTOR = re.compile(r"gemv|gemmk1_kernel|gemmSN_|(?<![a-z])dot_kernel|router_gemm_kernel|gemmEx_kernel")
_VECTOR_TENSOR = re.compile(r"cublasGemvTensor\w*<([^<>]*)>")


def matrix_vector(name: str) -> GemmName | None:
    """`gemv2T_kernel_val<int,int,A,x,y,accumulator,...>`: cuBLAS's paths for M or N = 1, and a few routers.

    The parameter block names its tensors in the same order, which is safer: `dot_kernel` starts with the
    accumulator, and its two tensors are the operands' and the result. A router starts with the type of both operands.
    """
    if not _VECTOR.search(name):
        return None
    found = arguments(name, function_of(name)) or Arguments((), False)
    kinds = types_in(found)
    tensors = [element(kind) for kind in _VECTOR_TENSOR.findall(name)]
    if "dot_kernel" in name:
        kinds = tensors[:1] * 2
    elif "router_gemm" in name:
        kinds = kinds[:1] * 2
    elif len(tensors) >= 2:
        kinds = tensors
    elif len(kinds) == 1 and not types_in(Arguments(found.values[-1:], False)):
        kinds = kinds * 2  # one type, and behind it something else, so that no second one was cut off
    a, b = (kind.format for kind in (*kinds, Element(None), Element(None))[:2])
    if a is None or b is None:
        return _unknown("matrix-vector kernel whose element types are not there or not known")
    return GemmName((a, b), plain((a, b)), None, "element types of a matrix-vector kernel")


# --- Triton -------------------------------------------------------------------------------------------------

_TRITON_MATMUL = re.compile(r"^_?(?:p_)?matmul(?:_[a-z]+)*_[NT]{3}_([a-z0-9]+)_\d+x\d+x\d+")
_TRITON_TYPES = {
    "bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp64": "fp64", "i8": "int8", "mxfp4": "e2m1",
    "fp8e4nv": "e4m3", "fp8e4b8": "e4m3", "fp8e5": "e5m2", "fp8e5b16": "e5m2",
}  # fmt: skip
_BLOCK_FP8 = re.compile(r"^_?w8a8_block_fp8_matmul(?:_|$)")


def triton(name: str) -> GemmName | None:
    """`_matmul_ogs_NNT_<Y>x<X>x<W>_<tile>`: the *output* comes first. Also `_w8a8_block_fp8_matmul`.

    `mxfp4` is e2m1 with a scale for 32 elements; whether an FP8 operand beside it has scales, the name does not say.
    Triton multiplies FP32 as TF32 unless told otherwise, which is not in the name either. vLLM's and SGLang's
    `_w8a8_block_fp8_matmul` takes e4m3 scaled in blocks of 128.
    """
    function = function_of(name)
    if _BLOCK_FP8.search(function):
        return GemmName(("e4m3", "e4m3"), "block-128", None, "Triton's kernel for FP8 in blocks")
    match = _TRITON_MATMUL.search(function)
    if not match:
        return None
    # An x separates types, but for the one in `mxfp4`.
    kinds = re.split(r"(?<!m)x", match[1])
    if len(kinds) != 3:
        return _unknown("Triton matmul whose type field cannot be read")
    a, b = (_TRITON_TYPES.get(kind) for kind in kinds[1:])
    if a is None or b is None:
        return _unknown(f"Triton matmul with an operand type that is not known: {kinds[1]}, {kinds[2]}")
    if (a, b) == ("fp32", "fp32"):
        return _unknown("Triton matmul over FP32, which it may multiply as TF32")
    scaling = "mx-32" if kinds[1:] == ["mxfp4", "mxfp4"] else None
    return GemmName((a, b), plain((a, b), scaling), None, "Triton matmul type field")


# --- Tensile: rocBLAS and hipBLASLt on AMD ------------------------------------------------------------------

_TENSILE = re.compile(r"^(?:Custom_)?C([a-z]{2,4})_A([a-z]+)_(?:C_)?B([a-z]+)_(?:C_)?([A-Za-z0-9_]+)")
_TENSILE_HELPER = re.compile(r"^(?:Custom_)?C[ijkl]{2,4}_(?!A)")
_TENSILE_TOKEN = re.compile(r"4xi8|I64|I8|E8M0|E5M3|[FB][468]N?|[SDCZHIXB]")
_TENSILE_TYPES = {
    "S": "fp32", "X": "tf32", "D": "fp64", "C": "fp32", "Z": "fp64", "H": "fp16", "B": "bf16", "I8": "int8",
    "4xi8": "int8", "F8": "e4m3", "F8N": "e4m3", "B8": "e5m2", "B8N": "e5m2", "F6": "e2m3", "B6": "e3m2",
    "F4": "e2m1",
}  # fmt: skip
_TENSILE_MX = re.compile(r"^MX[AB](E8M0|E5M3|F8)?B?(\d+)$")
_TENSILE_SCALES = {("", "32"): "mx-32", ("E8M0", "32"): "mx-32", ("F8", "16"): "nvfp4-16"}


def is_amd(name: str) -> bool:
    """Whether it is the name of a GEMM kernel of AMD's: its types are read, recipes are not known there."""
    return name.startswith("Cijk_")


def tensile(name: str) -> GemmName | None:
    """`[Custom_]Cijk_A<indices>_B<indices>_<types>_<flags>_MT128x128x64_...`, in some captures cut to 60 letters.

    Indices: i and j are C's, k the batch, l is summed over, and the fastest comes first. `Alik_Bljk` is TN,
    `Ailk_Bljk` NN, `Ailk_Bjlk` NT. Types are single letters, but for those of eight bits and fewer:

    | letter | S    | X    | D    | H    | B    | I8, 4xi8 | F8, F8N | B8, B8N | F6   | B6   | F4   |
    |--------|------|------|------|------|------|----------|---------|---------|------|------|------|
    | format | fp32 | tf32 | fp64 | fp16 | bf16 | int8     | e4m3    | e5m2    | e2m3 | e3m2 | e2m1 |

    (N: the encoding of MI300, without infinities and with one NaN.) They come as one of

    | field                    | operands                       | rest of the field                              |
    |--------------------------|--------------------------------|------------------------------------------------|
    | `BBS`, `F8BS`, `F8F8S`   | the first type, both           | D, computation                                 |
    | `F8B8BS`                 | the first two                  | D, computation                                 |
    | `B_BS`, `S`              | the first type, both           | D and computation in a field of their own      |
    | `F8H_HHS`                | the first two, as in memory    | the next field says what they are widened to   |
    | `HB`, `SB`, `HBH`        | the first type, both           | flags: beta (B), high precision (H)            |

    `S_MX` multiplies FP32 as TF32. `MXA32_MXB32` are scales for 32 elements, `SAB` is one scale a tensor, `SABV`
    one a row.
    """
    match = _TENSILE.match(name)
    if not match:
        return _tensile_helper(name)
    layout = _tensile_layout(match[1], match[2], match[3])
    fields = match[4].split("_")
    operands = _tensile_operands(fields)
    if operands is None:
        return _unknown(f"Tensile GEMM whose types are not known: {'_'.join(fields[:2])}", layout)
    return GemmName(operands, plain(operands, _tensile_scaling(fields, operands)), layout, "Tensile type field")


def _tensile_helper(name: str) -> GemmName | None:
    """`Cijk_SS_PostGSU4`, `Cijk_S_GA`: sums the parts of a product that was split, or multiplies C by beta."""
    if not _TENSILE_HELPER.match(name):
        return None
    return GemmName(None, None, None, "Tensile's kernel before or after a GEMM, which multiplies nothing", helper=True)


def _tensile_layout(c: str, a: str, b: str) -> str | None:
    """The index that is not C's is summed over: an operand in which it comes first is transposed as A, not as B."""
    summed = (set(a) & set(b)) - set(c)
    if len(summed) != 1:
        return None
    last = summed.pop()
    if a[0] not in (c[0], last) or b[0] not in (c[1], last):
        return None
    return ("T" if a[0] == last else "N") + ("N" if b[0] == last else "T")


def _tokens(field: str) -> list[str]:
    """The types that a field consists of; empty if it is no field of types."""
    found = _TENSILE_TOKEN.findall(field)
    return found if "".join(found) == field else []


def _tensile_operands(fields: Sequence[str]) -> tuple[str, str] | None:
    if len(fields) < 2 or not fields[1]:
        return None  # the name was cut, and what is left of its field of types may be only a part
    kinds, after = _tokens(fields[0]), _tokens(fields[1])
    if not 1 <= len(kinds) <= 4:
        return None
    # Two types and no more are those in memory, if the next field says what is multiplied; or a narrow pair.
    told = len(kinds) == 2 and (len(after) >= 3 or (len(after) == 1 and len(_tokens("".join(fields[2:3]))) == 2))
    narrow = len(kinds) == 2 and len(fields) > 2 and len(after) != 1 and all(map(_narrow, kinds))
    pair = told or narrow or len(kinds) == 4
    if len(kinds) == 2 and not pair and (kinds[1] != "B" or _narrow(kinds[0]) or after):
        return None  # neither a pair nor one type with the flag of beta, or the next field was cut
    operands = _tensile_formats(kinds[0], kinds[1] if pair else kinds[0])
    if operands is None:
        return None
    if told and operands != _tensile_formats(after[0], after[1] if len(after) == 4 else after[0]):
        return widened(operands)
    if operands == ("fp32", "fp32") and re.match(r"M(?![TI]\d)", fields[1]):
        return ("tf32", "tf32") if fields[1] == "MX" else None
    return operands


def _tensile_formats(first: str, second: str) -> tuple[str, str] | None:
    a, b = _TENSILE_TYPES.get(first), _TENSILE_TYPES.get(second)
    return None if a is None or b is None else (a, b)


def _narrow(token: str) -> bool:
    return token[0] in "FB" and token[1:2].isdigit()


def _tensile_scaling(fields: Sequence[str], operands: tuple[str, str]) -> str | None:
    blocks = [match for field in fields if (match := _TENSILE_MX.match(field))]
    if blocks:
        found = {_TENSILE_SCALES.get((match[1] or "", match[2])) for match in blocks}
        scaling = found.pop() if len(blocks) == 2 and len(found) == 1 else None
        return scaling if scaling != "nvfp4-16" or operands == ("e2m1", "e2m1") else None
    # All that tells the scaling stands before the tile: a name that was cut there may have lost it.
    whole = any(re.match(r"MT\d+x|shortname\d|gfx\d", field) for field in fields)
    if not whole or not {"e4m3", "e5m2"}.issuperset(operands):
        return None
    by = [field for field in fields if field.startswith("SAB")]
    return {"SAB": "tensor", "SABV": "outer-vec"}.get(by[0]) if by else "tensor"
