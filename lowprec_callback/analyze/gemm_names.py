"""What a GEMM kernel's name says about its operands.

cuBLASLt puts the types that it multiplies into a kernel's name, and Transformer Engine (TE) says nothing at
all, so the name is one of the witnesses of whether a recipe ran. On Hopper and Blackwell most are *nvjet*:

    nvjet_[sm90_]qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNT
          |      |     |       |     |   | |              |               |
          |      code  tile    K, stages | beta=0         scale modes     op(A), op(B): BLAS layout
          architecture (CUDA 13 spelling)

| letter | s    | h    | t    | q    | r    | o    | b    | d    |
|--------|------|------|------|------|------|------|------|------|
| format | fp32 | fp16 | bf16 | e4m3 | e5m2 | e2m1 | int8 | fp64 |

A code of three letters is (A and B, compute, D): `tst` is bf16 x bf16. One of five is (A, B, C, compute, D):
`qrtst` is e4m3 x e5m2, the gradient GEMMs of TE's HYBRID format. `sss_tf32` is fp32 on the TF32 tensor cores.

| suffix                          | scaling   | recipe                                                     |
|---------------------------------|-----------|------------------------------------------------------------|
| none, in a name that is whole   | tensor    | FP8, delayed or current scaling: the name does not tell    |
| `Ablk128`, `Avec128`, `Bvec128` | block-128 | FP8 block scaling on Hopper                                |
| `Avec32UE8M0_Bvec32UE8M0`       | mx-32     | MXFP8; also FP8 block scaling as emulated on Blackwell     |
| `Avec16UE4M3_Bvec16UE4M3`       | nvfp4-16  | NVFP4. UE4M3 is the type of the *scales*                   |
| `ovscale`                       | outer-vec | FP8 with a scale a row                                     |

Older and other libraries have grammars of their own; each decoder below states its own. Nothing here guesses:
what the name leaves open (types chosen at run time, a name cut short by a tool) is None.

Sources: the string pool of cuBLASLt 13.1, public profiles with known inputs, and profiles from an H200 in
which TE's recipe was known. The third layout letter, `h`/`v`, `coopA` and `algo2` are not understood, and not
used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

Operands = tuple[str, str]


@dataclass(frozen=True)
class GemmName:
    """What a name says about a GEMM; None where it says nothing."""

    operands: Operands | None
    """Formats of (A, B) in cuBLAS's order: for TE's fprop that is (weight, input)."""
    scaling: str | None
    layout: str | None
    rule: str
    helper: bool = False
    """A kernel that finishes the GEMM before it: it carries no precision of its own."""


_SCALED = frozenset({"e4m3", "e5m2", "e2m1"})
"""Formats too narrow to be used without a scale."""


def _plain(operands: Operands | None, otherwise: str | None = None) -> str | None:
    """Scaling "none" for formats that carry no scale, else `otherwise`."""
    if operands is None or not _SCALED.isdisjoint(operands):
        return otherwise
    return "none"


def _layout(match: re.Match[str] | None) -> str | None:
    return (match[1] + match[2]).upper() if match else None


# --- nvjet: cuBLASLt on sm_90 and newer ---------------------------------------------------------------------

_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]{5}|[a-z]{3})(_tf32)?(?=_|$)")
_NVJET_LETTERS = {
    "s": "fp32", "h": "fp16", "t": "bf16", "q": "e4m3", "r": "e5m2", "o": "e2m1", "b": "int8", "d": "fp64",
}  # fmt: skip
_NVJET_LAYOUT = re.compile(r"_([NT])([NT])[NT]{1,2}$")
# Only A and B: a `_D...` suffix says how the *output* is scaled.
_NVJET_SCALE = re.compile(r"_[AB]((?:vec|blk)\d+(?:UE8M0|UE4M3)?)(?=_|$)")
_NVJET_SCALES = {
    "vec128": "block-128",
    "blk128": "block-128",
    "vec32UE8M0": "mx-32",
    "vec16UE4M3": "nvfp4-16",
}


def _nvjet(name: str) -> GemmName | None:
    if not name.startswith("nvjet_"):
        return None
    match = _NVJET.match(name)
    layout = _layout(_NVJET_LAYOUT.search(name))
    if not match:
        return GemmName(None, None, layout, "nvjet GEMM whose type code is not of three or five letters")
    code, tf32 = match[1], match[2]
    pair = (code[0], code[1]) if len(code) == 5 else (code[0], code[0])
    if not all(letter in _NVJET_LETTERS for letter in pair):
        return GemmName(None, None, layout, f"nvjet GEMM with an unknown type letter in its code {code!r}")
    operands = (_NVJET_LETTERS[pair[0]], _NVJET_LETTERS[pair[1]])
    if tf32 and operands == ("fp32", "fp32"):
        operands = ("tf32", "tf32")
    whole = layout is not None and "..." not in name
    return GemmName(operands, _nvjet_scaling(name, operands, whole), layout, f"nvjet type code {code!r}")


def _nvjet_scaling(name: str, operands: Operands, whole: bool) -> str | None:
    if _SCALED.isdisjoint(operands):
        return "none"
    if "_ovscale" in name:
        return "outer-vec"
    suffixes = _NVJET_SCALE.findall(name)
    if suffixes:
        modes = {_NVJET_SCALES.get(suffix) for suffix in suffixes}
        return modes.pop() if len(modes) == 1 else None
    # The suffixes stand near the end: a name that was cut short may have lost them.
    return "tensor" if whole and "e2m1" not in operands else None


# --- xmma: cuBLAS and cuDNN, sm_80 to sm_90 -----------------------------------------------------------------

_XMMA_TYPES = {
    "bf16": "bf16", "tf32": "tf32", "e4m3": "e4m3", "e5m2": "e5m2", "f16": "fp16", "f32": "fp32",
    "f64": "fp64", "i8": "int8", "i32": "int32",
}  # fmt: skip
_XMMA_TYPE = re.compile("|".join(_XMMA_TYPES))
_XMMA_FIELD = f"(?:{_XMMA_TYPE.pattern})+"
_XMMA = re.compile(rf"_xmma_(?:[a-z]+_)*gemm_(?:[a-z]+_)*{_XMMA_FIELD}_({_XMMA_FIELD})_{_XMMA_FIELD}_")
_XMMA_LAYOUT = re.compile(r"_([nt])([nt])_n_")


def _xmma(name: str) -> GemmName | None:
    """`sm90_xmma_gemm_<A><D>_<math A>[<math B>]<accumulator>_<scalar>_<layout>_n_...`: the math decides."""
    if "_xmma_" not in name or "gemm" not in name:
        return None
    match = _XMMA.search(name)
    layout = _layout(_XMMA_LAYOUT.search(name))
    math = [_XMMA_TYPES[kind] for kind in _XMMA_TYPE.findall(match[1])][:-1] if match else []
    if len(math) not in (1, 2):
        return GemmName(None, None, layout, "xmma GEMM whose math field cannot be read")
    operands = (math[0], math[-1])
    # cuBLASLt's block scale modes exist only as nvjet or block-scaled CUTLASS kernels.
    return GemmName(operands, _plain(operands, "tensor"), layout, "xmma math field")


# --- CUTLASS 3 as named by cuBLASLt -------------------------------------------------------------------------

_CUTLASS3_TYPES = {
    "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "e4m3": "e4m3", "e5m2": "e5m2",
    "f4": "e2m1", "e2m1": "e2m1", "s8": "int8", "u8": "int8",
}  # fmt: skip
_CUTLASS3 = re.compile(r"(tf32|\dxbf16)?gemm_(?:block_scaled_)?((?:ue\dm\dx)?[a-z]+\d[a-z0-9]*)_([a-z0-9]+)")
_CUTLASS3_LAYOUT = re.compile(r"_([nt])([nt])[nt]_align")
_CUTLASS3_SCALES = {"ue4m3": "nvfp4-16", "ue8m0": "mx-32"}


def _cutlass3(name: str) -> GemmName | None:
    """`cutlass3x_sm100_..gemm_<A>_<B>_<accumulator>_<C>_<D>_...`; block-scaled, A is `<scale>x<type>`."""
    if "cutlass3x_" not in name:
        return None
    match = _CUTLASS3.search(name)
    layout = _layout(_CUTLASS3_LAYOUT.search(name))
    if not match:
        return GemmName(None, None, layout, "CUTLASS 3 GEMM whose operand fields cannot be read")
    a_type, a_scale = _cutlass3_operand(match[2])
    b_type, b_scale = _cutlass3_operand(match[3])
    if a_type is None or b_type is None:
        return GemmName(None, None, layout, "CUTLASS 3 GEMM whose operand types are chosen at run time or unknown")
    operands = (a_type, b_type)
    if match[1] == "tf32":
        operands = ("tf32", "tf32")
    scaling = a_scale if a_scale == b_scale else None
    if "block_scaled" not in name:
        scaling = _plain(operands, "tensor")
    return GemmName(operands, scaling, layout, "CUTLASS 3 operand fields")


def _cutlass3_operand(field: str) -> tuple[str | None, str | None]:
    """(format, scaling) of a field such as `bf16` or `ue8m0xe4m3`."""
    scale, _, kind = field.rpartition("x")
    if "ue4m3" in (scale, kind):
        # Also when the field was cut after its scale: UE4M3 scales nothing but FP4.
        return "e2m1", "nvfp4-16"
    return _CUTLASS3_TYPES.get(kind), _CUTLASS3_SCALES.get(scale)


# --- CUTLASS 2, and cuBLAS before it ------------------------------------------------------------------------

_CUTLASS2 = re.compile(
    r"(?:^|[_<])(?P<acc>s|h|d|i)(?P<mma>884|1688|8816|16816|16832|161616)(?P<inner>bf16|f16)?"
    r"(?P<what>gemm|fprop|dgrad|wgrad)(?P<rest>[a-z0-9_]*)"
)
_CUTLASS2_TYPE = re.compile(r"_(bf16|fp16|f16|tf32|s8|u8|int8|f64)(?=_|$)")
_CUTLASS2_TYPES = {"bf16": "bf16", "fp16": "fp16", "f16": "fp16", "tf32": "tf32", "s8": "int8", "u8": "int8",
                   "int8": "int8", "f64": "fp64"}  # fmt: skip
_CUTLASS2_UNTYPED = {"h": "fp16", "d": "fp64"}
_SIMT = re.compile(r"_(s|h|d|i|c|gc|z)gemm(?:Ex)?_|_(s)cudnn_")
_SIMT_TYPES = {"s": "fp32", "h": "fp16", "d": "fp64", "c": "fp32", "gc": "fp32", "z": "fp64"}
_LOWER_LAYOUT = re.compile(r"_([nt])([nt])(?=_align|_v\d|_stages|[>(]|$)")


def _cutlass2(name: str) -> GemmName | None:
    """`cutlass_80_tensorop_bf16_s16816gemm_bf16_...`, `ampere_sgemm_...`: accumulator, shape, then the type.

    Without a type, `s1688` is the TF32 instruction and `h` means FP16 throughout. `s1688bf16gemm` reads fp32
    and rounds it inside the kernel: its operands are fp32.
    """
    match = _CUTLASS2.search(name)
    layout = _layout(_LOWER_LAYOUT.search(name))
    if match:
        kind = _cutlass2_type(match)
        return GemmName((kind, kind) if kind else None, "none" if kind else None, layout, "tensor-op GEMM's type field")
    simt = _SIMT.search(name)
    if not simt:
        return None
    letter = simt[1] or simt[2]
    kind = "int8" if letter == "i" and "int8" in name else _SIMT_TYPES.get(letter)
    return GemmName((kind, kind) if kind else None, "none" if kind else None, layout, f"BLAS name {letter}gemm")


def _cutlass2_type(match: re.Match[str]) -> str | None:
    if match["inner"]:
        return "fp32"
    typed = _CUTLASS2_TYPE.search(match["rest"])
    if typed:
        return _CUTLASS2_TYPES[typed[1]]
    if match["acc"] == "s" and match["mma"] == "1688":
        return "tf32"
    return _CUTLASS2_UNTYPED.get(match["acc"])


# --- TensorRT-LLM, CuTe DSL, DeepGEMM -----------------------------------------------------------------------

_TRTLLM_TYPES = {
    "E2m1": "e2m1",
    "E4m3": "e4m3",
    "E5m2": "e5m2",
    "Bfloat16": "bf16",
    "Fp16": "fp16",
    "Fp32": "fp32",
}
_TRTLLM_TYPE = f"(?:Mx)?(?:{'|'.join(_TRTLLM_TYPES)})"
_TRTLLM = re.compile(rf"(?:^|[_:])b?(?:mm|gemm)_{_TRTLLM_TYPE}_({_TRTLLM_TYPE})({_TRTLLM_TYPE})_Fp32_")


def _trtllm(name: str) -> GemmName | None:
    """`bmm_<D>_<A><B>_<accumulator>_...`: the *output* comes first. `Ab16`, `Bb16`: scale blocks of 16."""
    match = _TRTLLM.search(name)
    if not match:
        return None
    fields = (match[1], match[2])
    operands = (_TRTLLM_TYPES[fields[0].removeprefix("Mx")], _TRTLLM_TYPES[fields[1].removeprefix("Mx")])
    scaling = None
    if all(field.startswith("Mx") for field in fields):
        scaling = "mx-32"
    elif operands == ("e2m1", "e2m1") and "_Ab16_Bb16" in name:
        scaling = "nvfp4-16"
    layout = _layout(re.search(r"_(T|N)(T|N)_", name))
    return GemmName(operands, _plain(operands, scaling), layout, "TensorRT-LLM operand fields")


_CUTE_TENSOR = re.compile(r"tensorptr(f4E2M1FN|f8E4M3FN|f8E5M2|f8E8M0FNU|bf16|f16|f32)")
_CUTE_TYPES = {
    "f4E2M1FN": "e2m1",
    "f8E4M3FN": "e4m3",
    "f8E5M2": "e5m2",
    "bf16": "bf16",
    "f16": "fp16",
    "f32": "fp32",
}


def _cute_dsl(name: str) -> GemmName | None:
    """`kernel_cutlass_..gemm.._tensorptr<A>.._tensorptr<B>.._tensorptr<scale>..`, in argument order."""
    if not name.startswith("kernel_cutlass_") or "gemm" not in name:
        return None
    tensors = _CUTE_TENSOR.findall(name)
    operands = tuple(_CUTE_TYPES.get(kind, "") for kind in tensors[:2])
    if len(operands) != 2 or not all(operands):
        return GemmName(None, None, None, "CuTe DSL GEMM whose operand tensors cannot be read")
    scaling = None
    if "f8E8M0FNU" in tensors[2:]:
        scaling = "mx-32"
    elif operands == ("e2m1", "e2m1") and "f8E4M3FN" in tensors[2:]:
        scaling = "nvfp4-16"
    pair = (operands[0], operands[1])
    return GemmName(pair, _plain(pair, scaling), None, "CuTe DSL tensor types")


_DEEP_GEMM = re.compile(r"sm\d+_(fp8|bf16|tf32)_(?:\w+_)?gemm_(?:\w+_)?impl")


def _deep_gemm(name: str) -> GemmName | None:
    """`deep_gemm::sm90_fp8_gemm_1d2d_impl`: DeepGEMM's FP8 kernels take e4m3, scaled in blocks of 128."""
    match = _DEEP_GEMM.search(name)
    if not match:
        return None
    kind = {"fp8": "e4m3"}.get(match[1], match[1])
    blocks = "block-128" if re.search(r"_gemm_1d[12]d_impl", name) else None
    return GemmName((kind, kind), _plain((kind, kind), blocks), None, "DeepGEMM name")


# --- C++ templates whose arguments name the element type ----------------------------------------------------

_C_TYPES = {"__nv_bfloat16": "bf16", "c10::BFloat16": "bf16", "cutlass::bfloat16_t": "bf16", "__half": "fp16",
            "c10::Half": "fp16", "cutlass::half_t": "fp16", "float": "fp32", "double": "fp64"}  # fmt: skip
_C_TYPE = "|".join(map(re.escape, _C_TYPES))
_TYPED_TEMPLATE = re.compile(r"gemv|gemmk1_kernel|gemmSN_|(?<![a-z])dot_kernel|router_gemm_kernel|gemmEx_kernel")
# A vector path's parameter block names A first. The plain template arguments come second, for `dot_kernel`'s
# start with the accumulator.
_C_ELEMENT = (
    re.compile(rf"cublasGemvTensor\w*<({_C_TYPE})>"),
    re.compile(rf"<(?:int,)*({_C_TYPE})[,>]"),
)


def _typed_template(name: str) -> GemmName | None:
    """`gemv2T_kernel_val<int,int,__nv_bfloat16,...>`: cuBLAS's paths for M or N = 1, and a few routers."""
    if not _TYPED_TEMPLATE.search(name):
        return None
    for pattern in _C_ELEMENT:
        match = pattern.search(name)
        if match:
            kind = _C_TYPES[match[1]]
            return GemmName((kind, kind), "none", None, "element type in the template arguments")
    return GemmName(None, None, None, "matrix-vector kernel that names no element type")


# --- What belongs to a GEMM, and what only says "GEMM" ------------------------------------------------------

_HELPER = re.compile(r"splitK_?reduce|ReduceSplitK|reduce_1Block_kernel|cublasLt::|globalKernelBgrad", re.IGNORECASE)


def _helper(name: str) -> GemmName | None:
    """Split-K sums, bias gradients and other epilogues that cuBLASLt launches after a GEMM."""
    if not _HELPER.search(name):
        return None
    return GemmName(None, None, None, "finishes the GEMM before it and carries no precision", helper=True)


_SAYS_GEMM = re.compile(r"(?:gemm|matmul|(?:^|_)(?:b|add|baddb)?mm)(?:_|\d|$)|Gemm")
_TEMPLATE_GEMM = re.compile(r"^cutlass::(?:device_)?[kK]ernel2?<.*gemm::")
# They prepare a GEMM's arguments; they multiply nothing.
_NO_GEMM = re.compile(r"setup|prepare|workspace|fbgemm")


def _says_gemm(name: str) -> GemmName | None:
    """A function called gemm, or a CUTLASS template over one. Namespaces (`fbgemm_gpu::`) do not count."""
    function = function_of(name)
    if _NO_GEMM.search(function):
        return None
    if not (_SAYS_GEMM.search(function) or _TEMPLATE_GEMM.search(name)):
        return None
    return GemmName(None, None, None, "says GEMM, and nothing of its operands")


def function_of(name: str) -> str:
    """The function's own name, without return type, namespaces, template arguments and parameters."""
    head = re.split(r"[<(]", name, maxsplit=1)[0]
    return head.rpartition("::")[2].strip()


DECODERS: tuple[Callable[[str], GemmName | None], ...] = (
    _helper, _nvjet, _xmma, _cutlass3, _trtllm, _cute_dsl, _deep_gemm, _typed_template, _cutlass2, _says_gemm,
)  # fmt: skip
"""Tried in order: helpers first, for their template arguments may name a GEMM; the vaguest last."""


def decode(name: str) -> GemmName | None:
    """What a GEMM kernel's name says, or None for a name of no GEMM. Raises nothing.

    `name` is in the normal spelling of `kernels.normalise`. The caller must have taken out first what only
    looks like a GEMM: communication, attention and TE's `*_rht_gemm_device`, which are Hadamard transforms.
    """
    for decoder in DECODERS:
        found = decoder(name)
        if found is not None:
            return _without_scale_type(found, name)
    return None


def _without_scale_type(found: GemmName, name: str) -> GemmName:
    """UE4M3 is the type of NVFP4's scales: beside an FP8 operand it makes the scaling unknown."""
    if "ue4m3" in name.lower() and found.operands and not {"e4m3", "e5m2"}.isdisjoint(found.operands):
        return replace(found, scaling=None, rule=f"{found.rule}; UE4M3 beside an FP8 operand is not understood")
    return found
