"""Kernel name -> bucket and operand precision.

`classify` goes by the name alone; `bucket_in_context` adds where the kernel was launched. Both are pure.

The order of the rules is the point, because names mislead:

| name contains                       | looks like      | is                                                |
|-------------------------------------|-----------------|---------------------------------------------------|
| `row_col_rht_gemm_device`           | a GEMM          | Hadamard transform and FP4 cast: quantization     |
| `..._Avec16UE4M3_...`               | an FP8 operand  | the type of NVFP4's scales                        |
| `ncclDevKernel_..._f8e4m3`          | an FP8 GEMM     | the payload of a collective                       |
| `cutlass::device_kernel<flash::...` | a CUTLASS GEMM  | FlashAttention-3                                  |
| `matmul_fp8_detail::cast_...`       | a GEMM          | a cast: only the function's own name counts       |
| `multi_tensor_apply_kernel<...`     | the optimizer   | that, or TE's scale update: the functor decides   |
| `unary_kernel<..., identity, ...`   | an activation   | a cast; with `gelu` it is the activation          |
| `sm100_fp8_fp4_gemm_1d1d_impl<...`  | FP8 x FP4       | that, or FP8 x FP8: its type arguments decide     |
| `cutlass_tensorop_s1688fprop_...`   | a GEMM          | a convolution: `gemm`, marked as one              |

So the rules run: Hadamard, communication, attention, optimizer, scale, norm, fused activation, amax,
quantize, loss, GEMM (`gemm_names`), then what is left. Each is a row of `BEFORE_GEMM` or `AFTER_GEMM`, with
its reason.

Work that a recipe fuses into another kernel stays where the baseline has it, so that two ledgers compare like
with like: a norm that also casts is `norm`, a GELU that also casts is `activation`. One kernel escapes this:
`cast_transpose_fusion_kernel_optimized(CTDBiasDActParam<...>)`, which Transformer Engine (TE) runs under
delayed scaling. It is compiled at run time under one name, with and without the GELU gradient in it (on an
H200: two launches a layer, of which the MLP's carries the gradient). That name holds no activation functor,
so it is `quantize`, and under delayed scaling the bucket `activation` lacks the GELU gradient. The variant
compiled ahead of time, `cast_transpose_fused_kernel_notaligned`, names its functor, and is `activation` when
it has one.

`amax` is finding a maximum; `scale` is computing, updating or reordering scale factors, also from an amax.

Sources: TE 2.20's kernels; symbols of the torch, cuBLAS, NCCL and TE wheels; public profiles; profiles of
TE's recipes on an H200.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from . import gemm_names, operator_names


@dataclass(frozen=True)
class KernelClass:
    """What a kernel's name says."""

    bucket: str
    """One of `report.BUCKETS`."""
    operands: tuple[str, str] | None
    """GEMMs: formats of (A, B), such as ("e4m3", "e5m2"). None when the name does not say both, and else."""
    scaling: str | None
    """GEMMs: none, tensor, outer-vec, block-128, mx-32, nvfp4-16. None when the name does not say."""
    layout: str | None
    """GEMMs: BLAS layout (TN, NN, NT) when the name says."""
    rule: str
    """Which rule decided, in words."""
    gemm_helper: bool = False
    """Part of a GEMM, but no product and of no precision: a split-K sum or a bias gradient after it, or on a
    CPU an operator that calls the one that multiplies (`aten::linear`, `AddmmBackward0`)."""
    alarms: tuple[str, ...] = ()
    """Slow or emulated paths that the name gives away."""
    convolution: bool = False
    """A convolution, or a kernel that belongs to one. Its bucket is `gemm`, for it is a product on the tensor cores,
    but it is no linear layer's: a verdict on linear layers, or an inference from their kernels, leaves it out."""

    @property
    def is_product(self) -> bool:
        """Whether it may be a linear layer's product: no helper of one, and no convolution."""
        return self.bucket == "gemm" and not self.gemm_helper and not self.convolution

    @property
    def precision(self) -> str:
        """The GEMM's precision: one word, a mixture (`e4m3 x e2m1`, in the order of the operands), or "unknown".

        FP8 per tensor, FP8 in blocks and MXFP8 share their operands, so an FP8 or FP4 operand without a known
        scaling is unknown, and so is a format of no recipe (FP6, MXFP4). E4M3 x E5M2 is no mixture but FP8 as
        HYBRID recipes ask for it. A mixture equals no single-format word, so nothing that asks for one is
        satisfied by it.
        """
        if self.operands is None:
            return "unknown"
        formats = frozenset(self.operands)
        if formats <= {"e4m3", "e5m2"}:
            return _FP8_WORDS.get(self.scaling or "", "unknown")
        if len(formats) > 1:
            return " x ".join(self.operands)
        if formats == {"e2m1"}:
            return "nvfp4" if self.scaling == "nvfp4-16" else "unknown"
        return self.operands[0] if formats <= _WIDE else "unknown"


_FP8_WORDS = {"tensor": "fp8", "outer-vec": "fp8", "block-128": "fp8-block", "mx-32": "mxfp8"}
_WIDE = frozenset({"bf16", "fp16", "fp32", "tf32", "fp64", "int8"})
"""Formats whose name is also the word for a product of two of them."""


@dataclass(frozen=True)
class Rule:
    """One row: a kernel whose name (or function, see `where`) matches goes into the bucket, because `why`."""

    bucket: str
    pattern: re.Pattern[str]
    why: str
    where: Literal["name", "function"]
    """`function` leaves out namespaces, template arguments and parameters, which may name something else."""
    alarms: tuple[str, ...] = ()


def _name(bucket: str, pattern: str, why: str, *alarms: str) -> Rule:
    return Rule(bucket, re.compile(pattern), why, "name", alarms)


def _function(bucket: str, pattern: str, why: str) -> Rule:
    return Rule(bucket, re.compile(pattern, re.IGNORECASE), why, "function")


BEFORE_GEMM: tuple[Rule, ...] = (
    _name("hadamard", r"HadamardTransformKernel", "TE's Hadamard transform on its own", "nvfp4-unfused-hadamard"),
    _name("hadamard", r"[Hh]adamard", "a Hadamard transform, perhaps with the amax of its result"),
    _name(
        "communication",
        r"nccl(?:Dev|Symk|Kernel)|userbuffers|(?:deep|hybrid)_ep::|nvshmem|multimem_all",
        "a communication library's kernel; types in its name are the payload's",
    ),
    _name("communication", r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", "a collective"),
    _name("attention", r"scaled_(?:\w+_)?softmax", "TE's softmax of unfused attention", "attention-unfused"),
    _name(
        "attention",
        r"sdpa|fmha|flash_(?:fwd|bwd|attn)|flash::|FlashAttn|[Aa]ttention|_attn_|KVCacheKernel"
        r"|compute_dot_do_o|convert_dq_to_",
        "an attention kernel",
    ),
    _name(
        "attention",
        r"fused_attn::|kv_cache::|context_parallel::|multi_tensor_transpose_to_bhsd",
        "TE's helpers around attention",
    ),
    _name("scale", r"multi_tensor_apply_kernel<.*ComputeScale", "multi-tensor apply with TE's scale functor"),
    _name(
        "optimizer",
        r"multi_tensor_apply_kernel<.*(?:Functor|FusedOptimi)",
        "multi-tensor apply, by its functor",
    ),
    _name(
        "optimizer",
        r"multi_tensor_(?:l2norm|adam|sgd|scale)::|lpnorm_cleanup|(?i:adam|adagrad)",
        "an optimizer, or the gradient norm that clipping needs",
    ),
    _name(
        "scale",
        r"swizzle_block_scaling_\w*to_mxfp8",
        "FP8 block scales rewritten for MXFP8's GEMM",
        "fp8-block-emulated-as-mxfp8",
    ),
    _name(
        "scale",
        r"(?:_|^|::)(?:un)?swizzle_|_swizzle\w*_kernel",
        "scale factors put into the tensor cores' order",
        "scales-unswizzled",
    ),
    _name(
        "scale",
        r"amax_and_scale_update_impl|compute_scale_from_amax|update_tensor_scale_inv|nvfp4_scale_transpose"
        r"|nvfp4_(?:compute|per_tensor|expand|fused|multi_tensor_fused)\w*_?scale|compute_nvfp4\w*_scale",
        "computes, updates or converts scale factors",
    ),
    _function(
        "norm",
        r"^(?!.*gemm).*(?:(?:^|_)ln_(?:fwd|bwd)|rms_?norm|layer_?norm|batch_?norm|group_?norm|RowwiseMoments"
        r"|GammaBeta|^bn_(?:fw|bw)_)",
        "a normalization, also when it casts its output",
    ),
    _name(
        "activation",
        r"transformer_engine::d?(?:clamped_)?(?:q?gelu|s?relu|silu|swiglu|sigmoid)<",
        "a TE kernel with an activation functor, also when it casts its output",
    ),
    _function("activation", r"^(?:d?gated_act|unary_grad|scaled_(?:gated|unary)_\w+)_kernel", "TE's activations"),
    _function("amax", r"^(?!.*(?:quant|cast|gemm)).*amax", "finds or clears a maximum of magnitudes"),
    _name(
        "quantize",
        r"quantize_transpose_nvfp4::\S*block_scaled_1d_cast_transpose",
        "NVFP4's general quantization kernel, the slow one",
        "nvfp4-slow-quantize",
    ),
    _function("elementwise", r"reduce_dbias_kernel", "the sums of a bias gradient"),
    _name(
        "quantize",
        r"transformer_engine::dispatch::(?:fp8|mxfp8|nvfp4|fp8_blockwise)::|transformer_engine::unary_kernel",
        "TE's cast kernels",
    ),
    _function(
        "quantize",
        r"^(?!.*(?:gemm|matmul|mm_)).*(?:quant(?!ile|um)|cast_transpose|cast_\w*fp8|fp8\w*_to_|partial_cast"
        r"|block_scaled_[12]d_(?:rw|tma)|(?:^|_)transpose_(?:optimized|general|dbias)|nvfp4_transpose)",
        "casts to or from a quantized format, or transposes quantized data",
    ),
    _name("quantize", r"float8\w*_copy_kernel_cuda", "torch's cast to or from FP8"),
    _name(
        "other",
        r"fused_router::|moe::dev::",
        "routing in a mixture of experts, also its softmax and its loss",
    ),
    _function(
        "loss",
        r"cross_entropy|nll_loss|softmax|^_ce_(?:fwd|bwd)|^element_mul_kernel$|_loss(?:_|$)",
        "a loss, or a softmax whose use the name does not say",
    ),
)
"""First match wins. All of these must be out of the way before a name may be read as a GEMM."""

AFTER_GEMM: tuple[Rule, ...] = (
    _name(
        "copy",
        r"^Mem(?:cpy|set)|^\[CUDA mem|memset_kernel|copy_kernel_cuda",
        "a copy, also one that changes type or layout, or a memset",
    ),
    _name(
        "activation",
        r"(?i)gelu|silu|swiglu|[^a-z]glu_|_?relu|[^a-z]s?elu_kernel|sigmoid|tanh|hardswish|mish_kernel"
        r"|softplus|threshold_kernel|act_and_mul",
        "an activation function in the name",
    ),
    _name(
        "elementwise",
        r"elementwise|reduce_kernel|CatArray|rotary|rope_|(?:nchwToNhwc|nhwcToNchw)Kernel|^batched_transpose_"
        r"|^transpose_(?:NCHW2CNHW|CNHW2NCHW)|^SubTensorOpWith",
        "element by element, a reduction or a rearrangement, also around convolutions",
    ),
    _name(
        "elementwise",
        r"index\w*(?:Large|Small)Index|gather|scatter|embedding_backward_feature|compute_grad_weight"
        r"|krn_partial|compute_num_of_partial",
        "indexing; an embedding is that, forward and backward",
    ),
    _name(
        "elementwise",
        r"Device(?:\w*Scan|Reduce|Compact|UniqueByKey|RadixSort)\w*Kernel",
        "cub's scans, reductions and sorts",
    ),
    _name(
        "elementwise",
        r"dropout|bias_add|padding_kernel|(?:^|[_:])(?:un)?permute_kernel|sort_chunks|_copy_page"
        r"|(?:max|avg)_pool",
        "element by element",
    ),
)

_INDUCTOR = re.compile(r"(?:triton|cpp)_(?:[a-z]{3}_)?fused_(\w+?)(?:_\d+)?")
INDUCTOR: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"attention")),
    ("gemm", re.compile(r"(?:^|_)(?:b|add|baddb)?mm(?:_|$)")),
    ("norm", re.compile(r"(?:layer|rms|batch|group)_norm")),
    ("loss", re.compile(r"softmax|nll_loss|cross_entropy")),
    ("activation", re.compile(r"gelu|silu|relu|sigmoid|tanh|(?:^|_)erf(?:_|$)")),
    # A softmax takes an amax too, but then exponentials. Alone it is what a quantization needs.
    ("amax", re.compile(r"^(?!.*exp).*(?:^|_)amax(?:_|$)")),
    ("copy", re.compile(r"_?(?:to_copy|clone|copy)_?$")),
)
"""What a TorchInductor kernel mainly does, by the operations in its name; else it is `elementwise`."""

_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^void |^std::enable_if<.*?>::type "), ""),
    (re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::"), ""),
    (re.compile(r" ?\bconst\b ?"), ""),
    (re.compile(r"\((?:unsigned )?(?:int|long|bool)\)(?=\d)"), ""),
    (re.compile(r"(?<![\w.])(\d+)(?:ul|u|l)(?!\w)"), r"\1"),
    (re.compile(r"\s*([*&<>,])\s*"), r"\1"),
    (re.compile(r"operator \(\)"), "operator()"),
)


def normalise(name: str) -> str:
    """One spelling for a kernel's name, whether Nsight Systems or torch.profiler printed it.

    Return types, `const` and unnamed namespaces go, for they decide nothing here; so do casts and suffixes of
    numbers (`(int)4` and `4u` are `4`) and spaces around punctuation. Raises nothing.
    """
    name = name.strip()
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def _class(bucket: str, rule: str, alarms: tuple[str, ...] = ()) -> KernelClass:
    return KernelClass(bucket, None, None, None, rule, alarms=alarms)


@cache
def classify(name: str) -> KernelClass:
    """Bucket, operand formats and alarms of a kernel, by its name alone. Raises nothing.

    Names of framework operators and ranges (what a CPU trace holds) are understood too; see `operator_names`.
    It never guesses: a name that says nothing is `other`, and a GEMM that hides its types has operands None.
    """
    if "rht_gemm_device" in name:
        # Before all else: every other rule could take its `gemm` at its word.
        return _class("hadamard", "TE's random Hadamard transform fused with the FP4 cast; no GEMM")
    if operator_names.is_operator(name):
        return _operator(name)
    plain = normalise(name)
    function = gemm_names.function_of(plain)
    inductor = _INDUCTOR.fullmatch(function)
    if inductor:
        return _inductor(inductor[1])
    found = _first(BEFORE_GEMM, plain, function)
    if found:
        return found
    gemm = gemm_names.decode(plain)
    if gemm:
        return KernelClass(
            "gemm", gemm.operands, gemm.scaling, gemm.layout, gemm.rule, gemm.helper, convolution=gemm.convolution
        )
    return _first(AFTER_GEMM, plain, function) or _class("other", "no rule knows this name")


def _operator(name: str) -> KernelClass:
    bucket, what = operator_names.bucket(name), operator_names.operation(name)
    rule = f"framework operator or range: {what!r}"
    helper = bucket == "gemm" and operator_names.is_wrapper(name)
    convolution = operator_names.is_convolution(name)
    return KernelClass(bucket, None, None, None, rule, gemm_helper=helper, convolution=convolution)


def _first(rules: tuple[Rule, ...], name: str, function: str) -> KernelClass | None:
    for rule in rules:
        if rule.pattern.search(name if rule.where == "name" else function):
            return _class(rule.bucket, rule.why, rule.alarms)
    return None


def _inductor(operations: str) -> KernelClass:
    for bucket, pattern in INDUCTOR:
        match = pattern.match(operations) if bucket == "copy" else pattern.search(operations)
        if match:
            return _class(bucket, f"TorchInductor kernel; {bucket} is among its operations: {operations}")
    return _class("elementwise", f"TorchInductor kernel of pointwise operations or sums: {operations}")


_BATCHED = frozenset({"bmm", "baddbmm", "addbmm"})
_ATTENTION_OP = re.compile(r"(?i)attention|attn|sdpa|scaled_dot_product")
# The innermost module must itself be the attention: `attention.proj` is a linear layer, GPT-2's `c_attn` too.
_ATTENTION_MODULE = re.compile(r"(?i)(?!c_attn$)\w*(?:attention|attn|sdpa|mha)(?:_\d+)?")
_REFINABLE = frozenset({"elementwise", "copy", "loss", "other"})
"""Kernels that serve any purpose, so that the place of launch decides. All others keep their bucket."""


@lru_cache(maxsize=65536)
def bucket_in_context(name: str, *, op: str = "", module: str = "", role: str = "", phase: str = "") -> str:
    """The bucket of a kernel, given where it was launched: columns of `recording.Trace`, "" where not known.

    - A GEMM with a `role` is a linear layer's. Without one it is `attention` if it is a batched product
      (`aten::bmm`, `aten::baddbmm`) or was launched by an attention operator or module, and `optimizer` in
      that phase (Muon).
    - A softmax, copy or elementwise kernel launched by an attention operator or module is `attention`; under
      a loss operator it is `loss`; in the optimizer's phase it is `optimizer`.
    - A kernel whose name says nothing takes the bucket of the operator that launched it, unless that is a
      GEMM: a library's unnamed helper must not be counted as a product.

    It changes nothing of what `classify` says about precision. Raises nothing.
    """
    bucket = classify(name).bucket
    launched_by = operator_names.bucket(op) if op else "other"
    attention = (
        launched_by == "attention"
        or _ATTENTION_OP.search(op) is not None
        or _ATTENTION_MODULE.fullmatch(module.rpartition(".")[2]) is not None
    )
    if bucket == "gemm":
        if role:
            return "gemm"
        if phase == "optimizer":
            return "optimizer"
        batched = not _BATCHED.isdisjoint({operator_names.operation(op), operator_names.operation(name)})
        return "attention" if attention or batched else "gemm"
    if bucket not in _REFINABLE:
        return bucket
    if attention:
        return "attention"
    if launched_by == "loss":
        return "loss"
    if phase == "optimizer":
        return "optimizer"
    return launched_by if bucket == "other" and launched_by != "gemm" else bucket
