"""Facts about what reached the libraries: operands, calls, scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from lowprec_callback.facts.base import Fact, Role


@dataclass(frozen=True)
class Stored:
    """Bytes in the buffers of one operand, at the moment when it reached the GEMM; summed over a group's matrices."""

    rowwise: int
    """Of the row-wise copy, or of the only one."""
    columnwise: int
    """Of the column-wise (transposed) copy."""
    scales: int
    """Of the scales and amax values of all copies."""
    parameter: bool = False
    """Whether the buffers are those of a parameter of the model: then the operand takes no memory of its own."""


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM as the library got it."""

    storage: str
    """Class of the object: Tensor, Float8Tensor, Float8BlockwiseQTensorStorage, NVFP4TensorStorage, ..."""
    format: str
    """bf16, fp16, fp32, e4m3, e5m2, e2m1, ..."""
    scaling: str
    """none, tensor-delayed, tensor-current, tensor (which is not known), block-128, mx-32, nvfp4-16."""
    quantizer: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    stored: Stored | None = None
    """What it holds in memory; None where that was not read (products of PyTorch's own, grouped tensors)."""


@dataclass(frozen=True)
class Dispatch(Fact):
    """What reached the GEMM library for one module and role in one traced step, and how often."""

    kind: ClassVar[str] = "dispatch"
    recipe: str
    module: str
    role: Role
    m: int
    k: int
    n: int
    calls: int
    layout: str
    """BLAS layout as called: TN, NN, NT; empty where the entry has none."""
    weight_or_input: Operand
    """The weight for fprop and dgrad, the saved input for wgrad."""
    other: Operand
    """The input for fprop, the output gradient for dgrad and wgrad."""
    output: str
    accumulate: bool
    entry: str
    """The function that was watched: `generic_gemm`, `te_general_grouped_gemm`, `aten::mm`, ..."""
    family: str
    in_region: bool | None = None
    """Whether TE's quantized region was active when the module's forward ran; None where there is none."""
    other_recipe: str | None = None
    """The recipe of that region, if it is not the one that was asked for: a region that the model opens itself."""
    stale_recipe: str | None = None
    """The recipe that the module's quantizers were built for, if it is not the region's (TE issue #3157)."""
    recomputed: bool = False
    """Whether the call was made while backward ran: a forward GEMM that activation checkpointing makes again."""


@dataclass(frozen=True)
class Product(Fact):
    """A matrix product that belongs to no linear layer (attention's, mostly), as one step ran it."""

    kind: ClassVar[str] = "product"
    recipe: str
    module: str
    """The innermost module that was followed; empty where none was."""
    op: str
    """PyTorch's operator: `aten::bmm`, `aten::baddbmm`, `aten::mm`, ..."""
    direction: str
    """forward, backward, or empty where no module ran."""
    batch: int
    """Products in one call, each (rows x inner) times (inner x columns)."""
    rows: int
    inner: int
    columns: int
    formats: tuple[str, str]
    calls: int


@dataclass(frozen=True)
class AttentionBackend(Fact):
    """Which attention backend TE chose in a watched step, and why not another, in its own words."""

    kind: ClassVar[str] = "attention_backend"
    recipe: str
    backend: str
    """`FusedAttention (sub-backend 1)`, `FlashAttention (...)`, `UnfusedDotProductAttention`, `NoBackend`."""
    reasons: tuple[str, ...] = ()
    """TE's sentences ("Disabling ..."), in order."""


@dataclass(frozen=True)
class UncachedWeights(Fact):
    """Modules whose weight is quantized again in every micro-batch, because none is told which comes first."""

    kind: ClassVar[str] = "uncached_weights"
    recipe: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class LibraryLog(Fact):
    """Whether the GEMM library's own log was listened to in one traced step, and how much of it found its place."""

    kind: ClassVar[str] = "library_log"
    recipe: str
    libraries: tuple[str, ...]
    """Who was listened to: cuBLASLt; on a CPU oneDNN and MKL."""
    products: int
    """Matrix products that they logged, attention's batched ones among them."""
    joined: int
    """Those that were found to be of a linear layer's GEMM: the sum of `calls` over `LibraryCall` facts."""
    silent: str | None = None
    """Why nobody listened."""


@dataclass(frozen=True)
class LibraryCall(Fact):
    """What the library itself logged of one module and role in one traced step, equal lines counted together.

    Types, scale modes and the compute type are the library's own words. `m`, `k`, `n` are those of the layer's
    forward GEMM, from the call that the line was joined to; `rows`, `inner`, `columns` are the product as logged,
    row-major.
    """

    kind: ClassVar[str] = "library_call"
    recipe: str
    module: str
    role: Role
    m: int
    k: int
    n: int
    library: str
    """cuBLASLt, oneDNN or MKL."""
    function: str
    """What the line is of: `cublasLtMatmul`, `matmul`, `SGEMM`, ..."""
    weight_or_input: str
    """Type of the weight for fprop and dgrad, of the saved input for wgrad: `R_8F_E4M3`, `bf16`, ..."""
    other: str
    """Type of the input for fprop, of the output gradient for dgrad and wgrad."""
    output: str
    rows: int
    inner: int
    columns: int
    calls: int
    weight_or_input_scale: str = ""
    """Scale mode as logged (`BLK128x128_32F`); empty where the line has none, which is the library's default."""
    other_scale: str = ""
    compute: str = ""
    """`COMPUTE_32F` and the like; oneDNN's fast-math mode."""
    implementation: str = ""
    """oneDNN: what ran the primitive (`brg_matmul:avx2`)."""


@dataclass(frozen=True)
class Scales(Fact):
    """Delayed scaling's state of one module at the end of a block."""

    kind: ClassVar[str] = "scales"
    recipe: str
    module: str
    direction: Literal["fwd", "bwd"]
    tensors: tuple[str, ...]
    scale: tuple[float, ...]
    amax: tuple[float, ...]
    """Newest finished row of the amax history (row -1: row 0 is the live slot and is zeroed at each update)."""
    amax_history_max: tuple[float, ...]
    history_length: int
