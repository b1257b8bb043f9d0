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

Older names of cuBLAS's and cuDNN's are read here too; those of other libraries in `gemm_libraries`. Each decoder
states its grammar. Nothing here guesses: what the name leaves open (types chosen at run time, a type or a kind of
scales that the grammar does not know, a name cut short by a tool) is None. Types count for both operands, so that a
product of two formats is named as one.

A convolution is a product too, on the same tensor cores and with the same names, but of no linear layer. It is decoded
like the rest and marked.

Sources: the string pool of cuBLASLt 13.1, public profiles with known inputs, and profiles from an H200 in
which TE's recipe was known. The third layout letter, `h`/`v`, `coopA` and `algo2` are not understood, and not
used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from lowprec_callback.analyze import gemm_libraries
from lowprec_callback.analyze.gemm_grammar import (
    SCALED,
    GemmName,
    Operands,
    arguments,
    blas_layout,
    function_of,
    plain,
    types_in,
)

# --- nvjet: cuBLASLt on sm_90 and newer ---------------------------------------------------------------------

# The tile comes next: another word there may say another type, as `tf32` does.
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]{5}|[a-z]{3})(_tf32)?(?=_\d|_mma)")
_NVJET_LETTERS = {
    "s": "fp32", "h": "fp16", "t": "bf16", "q": "e4m3", "r": "e5m2", "o": "e2m1", "b": "int8", "d": "fp64",
}  # fmt: skip
_NVJET_LAYOUT = re.compile(r"_([NT])([NT])[NT]{1,2}$")
# Only A and B: a `_D...` suffix says how the *output* is scaled.
_NVJET_SCALE = re.compile(r"_([AB])((?:vec|blk)[A-Za-z0-9]*)(?=_|$)")
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
    layout = blas_layout(_NVJET_LAYOUT.search(name))
    if not match:
        return GemmName(None, None, layout, "nvjet GEMM whose type code cannot be read")
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
    if SCALED.isdisjoint(operands):
        return "none"
    if "_ovscale" in name:
        return "outer-vec"
    suffixes = dict(_NVJET_SCALE.findall(name))
    if suffixes:
        # Of a kind of scales that is not known, or known of one operand only, nothing follows.
        modes = {_NVJET_SCALES.get(suffixes.get(operand, "")) for operand in "AB"}
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
    layout = blas_layout(_XMMA_LAYOUT.search(name))
    math = [_XMMA_TYPES[kind] for kind in _XMMA_TYPE.findall(match[1])][:-1] if match else []
    if len(math) not in (1, 2):
        return GemmName(None, None, layout, "xmma GEMM whose math field cannot be read")
    operands = (math[0], math[-1])
    # cuBLASLt's block scale modes exist only as nvjet or block-scaled CUTLASS kernels.
    return GemmName(operands, plain(operands, "tensor"), layout, "xmma math field")


# --- CUTLASS 3 as named by cuBLASLt -------------------------------------------------------------------------

_CUTLASS3_TYPES = {
    "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "e4m3": "e4m3", "e5m2": "e5m2",
    "f4": "e2m1", "e2m1": "e2m1", "e2m3": "e2m3", "e3m2": "e3m2", "s8": "int8", "u8": "int8",
}  # fmt: skip
_CUTLASS3 = re.compile(r"(tf32|\dxbf16)?gemm_(?:block_scaled_)?((?:ue\dm\dx)?[a-z]+\d[a-z0-9]*)_([a-z0-9]+)")
_CUTLASS3_LAYOUT = re.compile(r"_([nt])([nt])[nt]_align")
_CUTLASS3_SCALES = {"ue4m3": "nvfp4-16", "ue8m0": "mx-32"}


def _cutlass3(name: str) -> GemmName | None:
    """`cutlass3x_sm100_..gemm_<A>_<B>_<accumulator>_<C>_<D>_...`; block-scaled, A is `<scale>x<type>`."""
    if "cutlass3x_" not in name:
        return None
    match = _CUTLASS3.search(name)
    layout = blas_layout(_CUTLASS3_LAYOUT.search(name))
    if not match:
        return GemmName(None, None, layout, "CUTLASS 3 GEMM whose operand fields cannot be read")
    a_type, a_scale = _cutlass3_operand(match[2])
    b_type, b_scale = _cutlass3_operand(match[3])
    if a_type is None or b_type is None:
        return GemmName(None, None, layout, "CUTLASS 3 GEMM whose operand types are chosen at run time or unknown")
    operands = (a_type, b_type)
    if match[1] == "tf32" and operands == ("fp32", "fp32"):
        operands = ("tf32", "tf32")
    scaling = _CUTLASS3_SCALES.get(a_scale) if a_scale == b_scale else None
    if "block_scaled" not in name and not a_scale and not b_scale:
        scaling = "tensor"
    return GemmName(operands, plain(operands, scaling), layout, "CUTLASS 3 operand fields")


def _cutlass3_operand(field: str) -> tuple[str | None, str]:
    """(format, type of the scales) of a field such as `bf16` or `ue8m0xe4m3`."""
    scale, _, kind = field.rpartition("x")
    if (scale, kind) in (("", "ue4m3"), ("ue4m3", "")):
        # Cut behind its scale: UE4M3 scales nothing but FP4.
        return "e2m1", "ue4m3"
    found = _CUTLASS3_TYPES.get(kind)
    return (None if scale == "ue4m3" and found != "e2m1" else found), scale


# --- CUTLASS 2, and cuBLAS before it ------------------------------------------------------------------------

_CUTLASS2 = re.compile(
    r"(?:^|[_<])(?P<acc>s|h|d|i)(?P<mma>884|1688|8816|16816|16832|161616)(?P<inner>bf16|f16)?"
    r"(?P<what>gemm|fprop|dgrad|wgrad|cudnn)(?P<rest>[A-Za-z0-9_]*)"
)
# The types stand between words without digits (`_relu`) and the tile. Where no tile follows, the name was cut.
_CUTLASS2_FIELDS = re.compile(r"^(?:_[A-Za-z]+(?=_))*((?:_[a-z]+\d[a-z0-9]*)*)(?:_[A-Za-z]+(?=_))*(?=_\d)")
_CUTLASS2_TYPES = {"bf16": "bf16", "fp16": "fp16", "f16": "fp16", "tf32": "tf32", "s8": "int8", "u8": "int8",
                   "int8": "int8", "f64": "fp64"}  # fmt: skip
_CUTLASS2_UNTYPED = {"h": "fp16", "d": "fp64"}
_SIMT = re.compile(r"(?:^|_)(?P<letter>s|h|d|i|c|gc|z)gemm(?:Ex)?_(?P<rest>\w*)|_(?P<conv>s)cudnn_")
_SIMT_TYPES = {"s": "fp32", "h": "fp16", "d": "fp64", "c": "fp32", "gc": "fp32", "z": "fp64"}
_SIMT_STORED = re.compile(r"^([a-z]+\d+[a-z0-9]*)(?:_|$)")
_LOWER_LAYOUT = re.compile(r"_([nt])([nt])(?=_align|_v\d|_stages|[>(]|$)")


def _cutlass2(name: str) -> GemmName | None:
    """`cutlass_80_tensorop_bf16_s16816gemm_bf16_...`, `ampere_sgemm_...`: accumulator, shape, then the type.

    Without a type, `s1688` is the TF32 instruction and `h` means FP16 throughout. `s1688bf16gemm` reads fp32
    and rounds it inside the kernel: its operands are fp32. `sgemm` multiplies FP32 without tensor cores; where it
    names another type (`sgemm_fp16`), it reads that and widens it, which is neither of the two.
    """
    match = _CUTLASS2.search(name)
    layout = blas_layout(_LOWER_LAYOUT.search(name))
    if match:
        operands = _cutlass2_operands(match)
        rule = "tensor-op GEMM's type field" if operands else "tensor-op GEMM whose type is not known"
        return GemmName(operands, plain(operands), layout, rule)
    simt = _SIMT.search(name)
    if not simt:
        return None
    letter, rest = simt["letter"] or simt["conv"], simt["rest"] or ""
    kind = _SIMT_TYPES.get(letter)
    stored = _SIMT_STORED.match(rest)
    if stored:
        kind = {("i", "int8"): "int8", ("s", "f32"): "fp32"}.get((letter, stored[1]))
    return GemmName((kind, kind) if kind else None, "none" if kind else None, layout, f"BLAS name {letter}gemm")


def _cutlass2_operands(match: re.Match[str]) -> Operands | None:
    if match["inner"]:
        return ("fp32", "fp32")
    fields = _CUTLASS2_FIELDS.match(match["rest"])
    if not fields:
        return None
    kinds = [_CUTLASS2_TYPES.get(field) for field in fields[1].split("_")[1:]]
    if not kinds:
        tf32 = match["acc"] == "s" and match["mma"] == "1688"
        kinds = ["tf32" if tf32 else _CUTLASS2_UNTYPED.get(match["acc"])]
    first, second = kinds[0], kinds[-1]
    return (first, second) if first and second and len(kinds) <= 2 else None


# --- Convolutions -------------------------------------------------------------------------------------------

_CONVOLUTION = re.compile(
    r"_xmma_(?:[a-z]+_)*(?:fprop|dgrad|wgrad)_"
    r"|\d(?:bf16|f16)?(?:fprop|dgrad|wgrad|cudnn)_"
    r"|(?<![a-z])[dw]grad\w*_engine|(?<![a-z])(?:(?:[dw]grad|conv)[23]d_\w*kernel|conv_depthwise[23]d_)|winograd|_convolve_|convolve_common"
    r"|[sh]cudnn_|cudnn::cnn::(?!kern_precompute)|cutlass\w*_cudnn|cudnn_generated\w*_?[cC]onv"
    r"|cutlass::conv::|ImplicitGemmConv|igemm_(?:fwd|bwd|wrw)_gtc|naive_conv_|miopenSp3AsmConv|kernel_grouped_conv",
    re.IGNORECASE,
)
"""cuDNN's, CUTLASS's and MIOpen's names of convolutions; `transformer_engine`'s `wgrad` is none."""
_WINOGRAD_TRANSFORM = re.compile(r"winograd\w*(?:Data|Filter|Output)\d|generateWinogradTiles")
_MIOPEN = re.compile(r"igemm_(?:fwd|bwd|wrw)_gtc[a-z0-9]*_(?:nhwc|nchw)_([a-z0-9]+)_")
_MIOPEN_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "int8": "int8"}


def _miopen(name: str) -> GemmName | None:
    """`igemm_fwd_gtcx3_nhwc_bf16_...`: MIOpen's convolutions, the `i` being for implicit and not for integers."""
    match = _MIOPEN.search(name)
    if not match:
        return None
    kind = _MIOPEN_TYPES.get(match[1])
    return GemmName((kind, kind) if kind else None, "none" if kind else None, None, "MIOpen's type field")


def _convolution(name: str) -> GemmName | None:
    """A convolution that no grammar of GEMMs reads: `dgrad_engine<float, ...>`.

    Of a Winograd convolution in parts, the transforms multiply nothing; the product between them is named as a GEMM.
    """
    if not _CONVOLUTION.search(name):
        return None
    if _WINOGRAD_TRANSFORM.search(name):
        return GemmName(None, None, None, "a transform before or after a Winograd convolution's product", helper=True)
    function = function_of(name)
    found = arguments(name, function)
    kinds = {kind.format for kind in types_in(found)} if found and found.whole else set()
    kind = kinds.pop() if len(kinds) == 1 else None
    # `implicit_convolve_sgemm<__half, ...>` reads one type and multiplies in another.
    if kind is None or (kind != "fp32" and "sgemm" in function):
        return GemmName(None, None, None, "a convolution whose operand types the name does not tell")
    return GemmName((kind, kind), plain((kind, kind)), None, "a convolution's type arguments")


# --- What belongs to a GEMM, and what only says "GEMM" ------------------------------------------------------

_HELPER = re.compile(r"(?i:splitK_?reduce|ReduceSplitK|reduce_1Block_kernel|cublasLt::)|(?<!\w)globalKernel")


def _helper(name: str) -> GemmName | None:
    """Split-K sums, bias gradients and other epilogues (`globalKernel`) that cuBLASLt launches after a GEMM."""
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


DECODERS: tuple[Callable[[str], GemmName | None], ...] = (
    _helper, _nvjet, _xmma, _cutlass3,
    gemm_libraries.trtllm, gemm_libraries.cute_dsl, gemm_libraries.deep_gemm, gemm_libraries.tensile,
    gemm_libraries.triton, gemm_libraries.collective_mma, gemm_libraries.threadblock_mma,
    gemm_libraries.matrix_vector, _miopen, _cutlass2, _convolution, _says_gemm,
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
            found = _scaling_told(found, name)
            # What a convolution's letters say of layouts is about images, not about transposed matrices.
            return replace(found, layout=None, convolution=True) if _CONVOLUTION.search(name) else found
    return None


_SCALE_TYPE = re.compile(r"ue\d+m\d+", re.IGNORECASE)


def _scaling_told(found: GemmName, name: str) -> GemmName:
    """Scales that belong to no scaling known of these operands make it unknown; the rule says where it is.

    UE8M0 is MXFP8's type of scales, and UE4M3 is NVFP4's; it scales no FP8. All others (UE5M3, which TE 2.21's
    prototype gives to NVFP4) belong to no recipe that is known here.
    """
    if found.operands is None or SCALED.isdisjoint(found.operands):
        return found
    known = {"ue8m0"} if not {"e4m3", "e5m2"}.isdisjoint(found.operands) else {"ue8m0", "ue4m3"}
    strange = {kind.lower() for kind in _SCALE_TYPE.findall(name)} - known
    if not strange:
        told = found.scaling is not None
        return found if told else replace(found, rule=f"{found.rule}; how they are scaled, it does not tell")
    what = " and ".join(sorted(strange)).upper()
    return replace(found, scaling=None, rule=f"{found.rule}; what {what} scales here is not understood")


__all__ = ["DECODERS", "GemmName", "decode", "function_of"]
