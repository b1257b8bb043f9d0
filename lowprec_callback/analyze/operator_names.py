"""Framework operators and ranges: what a CPU trace has instead of kernels, and what launched a GPU kernel.

Three spellings name the same operator:

    aten::native_layer_norm_backward                          the operator
    NativeLayerNormBackward0                                  its node in the autograd graph
    autograd::engine::evaluate_function: NativeLayerNormBackward0   the engine around the node

`operation` reduces all three to `native_layer_norm`, and `bucket` looks that up. None says a precision.
"""

from __future__ import annotations

import re
from functools import cache

from lowprec_callback.facts.traces import ENGINE

_NAMESPACES = "aten|prims?|mkldnn|mkl|onednn|quantized|c10d|torch::autograd|te_softmax"
_OPERATOR = re.compile(rf"(?:{_NAMESPACES})::([A-Za-z0-9_.]+)")
# Autograd nodes are CamelCase, which tells them from kernels such as `cunn_SoftMaxBackward`.
_NODE = re.compile(r"(_?[A-Z][A-Za-z0-9_]*?)Backward\d*")
_RANGES = re.compile(
    r"lowprec|enumerate\(DataLoader\)|ProfilerStep#|(?:\[[^]]*\])?[Dd]ata_?[Ll]oader|## Call Compiled"
    r"|TorchDynamo|Torch-Compiled Region|AOTDispatcher"
)
"""Ranges that enclose work of all kinds; their own time belongs to no bucket."""

CONVOLUTION = r"(?:\w+_)?(?:convolution\w*|conv_?(?:transpose|depthwise)?[123]d)(?:_\w+)?"
"""`conv2d`, `cudnn_convolution`, `mkldnn_convolution_transpose`, `thnn_conv2d`, ..."""

OPERATORS: tuple[tuple[str, str], ...] = (
    ("optimizer", r"_?fused_(?:adamw?|sgd|adagrad)|_?foreach_\w+|_?amp_\w+"),
    ("loss", r"nll_loss\w*|\w*cross_entropy\w*|log_softmax|\w+_loss|kl_div"),
    # torch's losses call log_softmax; a plain softmax in training is attention's, or at worst a router's.
    ("attention", r"\w*(?:scaled_dot_product|attention|softmax)\w*"),
    (
        "gemm",
        r"addmm\w*|b?mm|baddbmm|addbmm|matmul|(?:mkldnn_|mkl_)?linear(?:_pointwise)?|addmv|mv|v?dot|addr"
        r"|(?:scaled|int|grouped|scaled_grouped)_mm",
    ),
    # Products on the same units, but of no linear layer: `is_convolution` tells them apart.
    ("gemm", CONVOLUTION),
    ("norm", r"\w*(?:layer|rms|batch|group|instance)_norm"),
    (
        "activation",
        r"\w*gelu|silu|relu6?|leaky_relu|s?elu|celu|prelu|glu|sigmoid|tanh|threshold|mish|softplus"
        r"|hard(?:swish|sigmoid|tanh)",
    ),
    ("quantize", r"(?:de)?quantize\w*|fake_quantize\w*|\w*choose_qparams\w*"),
    ("copy", r"to_copy|to|copy|copy_from|clone|contiguous|to_mkldnn|to_dense|reorder\w*|type_as"),
    (
        "elementwise",
        r"add|sub|rsub|mul|div|neg|abs|sign|exp|expm1|log|log1p|log2|pow|sqrt|rsqrt|reciprocal|square|erf"
        r"|sin|cos|clamp\w*|maximum|minimum|fmod|remainder|floor\w*|ceil|round|lerp|addcmul|addcdiv|isnan|isfinite"
        r"|nan_to_num|where|masked_fill|fill|zero|zeros\w*|ones\w*|full\w*|arange|linspace|eq|ne|lt|le|gt|ge"
        r"|logical_\w+|bitwise_\w+|and|or|xor|sum|mean|var|var_mean|std|norm|linalg_vector_norm|max|min|amax"
        r"|amin|aminmax|argmax|argmin|all|any|cumsum|cumprod|prod|cat|stack|index\w*|gather|scatter\w*"
        r"|embedding\w*|one_hot|tril|triu|dropout|native_dropout|bernoulli|rand\w*|normal|uniform|exponential|multinomial"
        r"|repeat\w*|flip|roll|pad|constant_pad_nd",
    ),
)
"""(bucket, pattern of the whole operation), in order. What is not listed (views, allocation) is `other`."""

_PATTERNS = tuple((bucket, re.compile(pattern)) for bucket, pattern in OPERATORS)
_CONVOLUTION = re.compile(CONVOLUTION)
# `_forward` and the like name a direction or a device, not another operation.
_DIRECTION = re.compile(r"(?:_(?:forward|backward|data|dense|for_cpu|nd|default)|\.\w+)+$")


def is_operator(name: str) -> bool:
    """Whether a name is a framework operator, an autograd node or a range rather than a kernel."""
    return (
        name.startswith((ENGINE, "Optimizer.", "record_param_comms", "gloo:", "nccl:"))
        or _RANGES.match(name) is not None
        or _OPERATOR.fullmatch(name) is not None
        or _NODE.fullmatch(name) is not None
    )


def operation(name: str) -> str:
    """The operation behind a name: `LogSoftmaxBackward0` and `aten::_log_softmax` are both `log_softmax`."""
    name = name.removeprefix(ENGINE)
    node = _NODE.fullmatch(name)
    if node:
        # A word begins at a capital before a small letter (NLLLoss -> nll_loss), or after a small letter.
        name = re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z0-9])(?=[A-Z])", "_", node[1]).lower()
    else:
        match = _OPERATOR.fullmatch(name)
        name = match[1] if match else name
    return _DIRECTION.sub("", name.strip("_")).strip("_")


def is_wrapper(name: str) -> bool:
    """Whether an operator leaves the work to others that it calls, so that its own time is only overhead."""
    node = name.startswith(ENGINE) or _NODE.fullmatch(name) is not None
    return node or re.fullmatch(r"linear|matmul|conv[123]d", operation(name)) is not None


@cache
def is_convolution(name: str) -> bool:
    """Whether an operator or node is a convolution, which no linear layer calls."""
    return _CONVOLUTION.fullmatch(operation(name)) is not None


@cache
def bucket(name: str) -> str:
    """The bucket of an operator, node or range; `other` when its name says nothing. Raises nothing."""
    if name.startswith("Optimizer."):
        return "optimizer"
    if name.startswith(("c10d::", "gloo:", "nccl:", "record_param_comms")):
        return "communication"
    if _RANGES.match(name):
        return "other"
    what = operation(name)
    for found, pattern in _PATTERNS:
        if pattern.fullmatch(what):
            return found
    return "other"
