"""The Recording: what was measured, as facts, one JSON object a line, in the order in which they came.

A Recording is append-only. Every fact is written out and flushed as soon as it is known, so a run that is
killed at any moment leaves a readable Recording of all that it had measured; only its last line may be torn,
and the reader says so. Analysis reads a Recording and nothing else; neither torch nor Transformer Engine (TE)
is needed to do it.

The first line is a `Header`. `VERSION` changes when a fact changes its meaning; a Recording that is newer than
this package is refused with a sentence that says so.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, TypeVar

VERSION = 3
"""Version of the facts below. Raised when a fact is added, dropped or changes its meaning."""

FILE_NAME = "recording.jsonl"
"""The Recording's name inside a run folder."""

Role = Literal["fprop", "dgrad", "wgrad"]
ROLES: tuple[Role, ...] = ("fprop", "dgrad", "wgrad")
"""The three GEMMs of a linear layer: Y = X W^T, dX = dY W, dW = dY^T X."""


def role_shape(role: Role, m: int, k: int, n: int) -> tuple[int, int, int]:
    """(rows, length of the sum, columns) of one role's GEMM, for a layer of m tokens, k input and n output features."""
    return {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (k, m, n)}[role]


Mode = Literal["kernel", "autocast"]
MODES: tuple[Mode, ...] = ("kernel", "autocast")
"""kernel: the GEMM alone, operands already quantized. autocast: with all the quantization that training does."""


Method = Literal["role-true", "te-tutorial"]
"""role-true: what training does. te-tutorial: forward calls of a re-shaped layer, as Transformer Engine's published
benchmark_gemm.py times them."""


class RecordingError(ValueError):
    """A Recording that cannot be read: missing, corrupt before its last line, or newer than this package."""


@dataclass(frozen=True)
class Fact:
    """Something that was seen, once. Subclasses say what."""

    kind: ClassVar[str] = "fact"


@dataclass(frozen=True)
class Header(Fact):
    """The first line of every Recording."""

    kind: ClassVar[str] = "header"
    version: int
    tool_version: str
    created: str
    """Local time, ISO 8601 with offset."""


@dataclass(frozen=True)
class Environment(Fact):
    """Machine, libraries and the few environment variables on the allow-list (`measure.device`)."""

    kind: ClassVar[str] = "environment"
    device: str
    """GPU name as NVML gives it, or the CPU's model name."""
    device_type: Literal["cuda", "cpu"]
    compute_capability: tuple[int, int] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Library name to version: python, torch, lightning, transformer_engine, cuda, driver, cudnn, cublasLt."""
    facts: dict[str, str] = field(default_factory=dict)
    """Other named facts, as text: power limit, core count, memory, world size."""
    variables: dict[str, str] = field(default_factory=dict)
    """Allow-listed environment variables that were set."""


@dataclass(frozen=True)
class Model(Fact):
    """The model under test and the engine that runs it."""

    kind: ClassVar[str] = "model"
    name: str
    engine: Literal["transformer_engine", "plain_torch", "imported"]
    why_engine: str
    parameters: int
    """Of the whole model, on however many ranks."""
    parameter_bytes: int
    linear_modules: dict[str, str] = field(default_factory=dict)
    """Module path to class name, for each module that owns a linear-layer weight."""
    rank_bytes: int | None = None
    """Bytes of the parameters that this rank holds between steps, where they are spread over ranks."""


@dataclass(frozen=True)
class Card(Fact):
    """A recipe as it was asked for (see `recipes.RecipeCard`, which reads it from TOML)."""

    kind: ClassVar[str] = "card"
    recipe: str
    title: str
    fprop: tuple[str, str]
    """Formats of the two operands (weight, input) of fprop, e.g. ("e4m3", "e4m3")."""
    dgrad: tuple[str, str]
    """Formats of (weight, output gradient) of dgrad."""
    wgrad: tuple[str, str]
    """Formats of (input, output gradient) of wgrad."""
    scaling: str
    """How values are scaled: none, tensor-delayed, tensor-current, block-128, mx-32, nvfp4-16."""
    arguments: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False


@dataclass(frozen=True)
class Plan(Fact):
    """What the sweep set out to do."""

    kind: ClassVar[str] = "plan"
    recipes: tuple[str, ...]
    baseline: str
    rounds: int
    settle_steps: int
    timed_steps: int
    traced_steps: int
    seed: int
    micro_batches: int
    """Batches in one optimizer step (gradient accumulation)."""
    steps: int
    """Optimizer steps that the whole plan takes."""
    shrunk: str | None = None
    """If the fit was too short for what was asked: what was cut, and what that costs in certainty."""
    guard_steps: int = 0
    """Optimizer steps of the numerics guard that are compared, for each recipe."""
    no_guard: str | None = None
    """Why there are none, if not because of the fit's length."""


@dataclass(frozen=True)
class Sampled(Fact):
    """How many rounds of timed blocks ran, and why no more."""

    kind: ClassVar[str] = "sampled"
    rounds: int
    stopped: str
    """`planned`: no more were wanted; `precise`; `rounds`: the most that were asked for; `steps`: the fit has too few
    left; `seconds`: they had taken long enough."""
    widest: float | None = None
    """Half-width of the least certain recipe's step, relative to it, at 95%."""
    precision: float | None = None
    """The half-width at which it would have been enough."""


@dataclass(frozen=True)
class Refusal(Fact):
    """A recipe that was not run, and why."""

    kind: ClassVar[str] = "refusal"
    recipe: str
    reason: str
    source: str
    """Who says so: a TE gate, our probe's exception, the plan."""


@dataclass(frozen=True)
class Gemm(Fact):
    """One GEMM of one linear layer in one optimizer step of the baseline, as the live model ran it.

    `m`, `k`, `n` are tokens, input features and output features of the layer's *forward* GEMM, whatever the role.
    """

    kind: ClassVar[str] = "gemm"
    module: str
    """Module path; LayerNormMLP's two linears end in `.fc1` and `.fc2`."""
    role: Role
    m: int
    k: int
    n: int
    calls: int
    """Calls in one optimizer step (micro-batches, shared weights, recomputation)."""
    family: str
    """What ran it: the TE class (`Linear`, `LayerNormLinear`, `LayerNormMLP`, ...) or `nn.Linear`."""
    quantizable: bool
    """Whether a recipe can reach it: it goes through TE (or, in plain_torch, through autocast)."""
    bias: bool = False
    groups: int = 1
    """Number of GEMMs in a grouped call; `m` is then the sum over groups."""
    layers: int | None = None
    """Transformer layers that have it; 0: it stands outside of them (the LM head). None: nobody said."""


def at_clock(samples_ms: Sequence[float], clocks_mhz: Sequence[float], mhz: float | None) -> tuple[float, ...]:
    """Samples as they would be at one clock [ms]: sample x its own clock / `mhz`.

    For work that the SMs are busy with, time is cycles over clock. On an H200 at its power limit the samples of one
    shape scatter by 3 to 7%, and by 0.5 to 1.3% once each is taken at the same clock. Samples whose clock was not
    measured are left as they are.
    """
    if mhz is None or len(clocks_mhz) != len(samples_ms):
        return tuple(samples_ms)
    return tuple(ms * own / mhz for ms, own in zip(samples_ms, clocks_mhz, strict=True))


@dataclass(frozen=True)
class GemmTime(Fact):
    """The microbenchmark of one shape in one role under one recipe, or why there is none."""

    kind: ClassVar[str] = "gemm_time"
    recipe: str
    role: Role
    m: int
    k: int
    n: int
    mode: Mode
    samples_ms: tuple[float, ...] = ()
    """Milliseconds of one call; each sample is the mean of `calls_per_sample` back-to-back calls."""
    calls_per_sample: int = 1
    host_ms: float | None = None
    """Host time to launch one call. Above the device's time, the result is launch-bound."""
    launch_bound: bool = False
    failure: str | None = None
    family: str = "Linear"
    """The kind of layer that was timed (see `Gemm.family`)."""
    quantize_ms: tuple[float, ...] = ()
    """autocast only: the part of each sample that is quantization, where it could be told apart."""
    kernels: tuple[str, ...] = ()
    """Names of the kernels that the GEMM call launched (its helpers included): the signature book."""
    method: Method = "role-true"
    clocks_mhz: tuple[float, ...] = ()
    """SM clock during each sample, measured on the GPU beside it; empty where it was not."""

    def at(self, mhz: float | None) -> tuple[float, ...]:
        """The samples as they would be at one clock [ms]; see `at_clock`."""
        return at_clock(self.samples_ms, self.clocks_mhz, mhz)


@dataclass(frozen=True)
class GemmRun(Fact):
    """One run of the microbenchmark: how it was sampled, and why it stopped."""

    kind: ClassVar[str] = "gemm_run"
    method: Method
    rounds: int
    """Visits to each (recipe, shape) that the longest-sampled pair had."""
    seconds: float
    stopped: str
    """`precise`, `budget`, `rounds`, `failed` (no shape ran), or `iterations` for the published method."""
    widest: float | None = None
    """The largest relative half-width of a layer's median that was left, at 95%."""
    precision: float | None = None
    budget_s: float | None = None
    cold_l2: bool = False
    accumulate: int = 1
    layers: int = 1
    """Transformer layers in the model; sums over one layer leave out what a model has once."""
    iterations: int | None = None


@dataclass(frozen=True)
class ModuleTime(Fact):
    """A copy of one of the model's own modules, run by itself in one direction under one recipe, or why it was not.

    Unlike a `GemmTime` it holds all that the module does: norm, activation and bias where they are its own, and casts
    that are fused into them. The time of one call, at the model's own number of tokens or at another.
    """

    kind: ClassVar[str] = "module_time"
    recipe: str
    module: str
    """Path of the module that was copied."""
    alike: tuple[str, ...]
    """Paths of all modules that it stands for, its own among them."""
    family: str
    tokens: int
    direction: Literal["forward", "backward"]
    samples_ms: tuple[float, ...] = ()
    """Milliseconds of one call on the GPU; each sample is the mean over `calls_per_sample` calls."""
    clocks_mhz: tuple[float, ...] = ()
    """SM clock during each sample (see `at_clock`)."""
    calls_per_sample: int = 1
    host_ms: float | None = None
    """Host time to launch one call inside a region that is open already."""
    region_ms: float | None = None
    """Host time that the region costs by itself: entering, leaving, and the recipe's update of scales."""
    own: bool = True
    """Whether `tokens` is what the model's step shows; else another number, from which the trend follows."""
    failure: str | None = None


@dataclass(frozen=True)
class StepTime(Fact):
    """One optimizer step with nothing attached but clocks, boundary to boundary."""

    kind: ClassVar[str] = "step_time"
    recipe: str
    round: int
    index: int
    ms: float
    """CUDA events on a GPU, else the monotonic clock."""
    host_ms: float
    """The same interval on the host's monotonic clock."""
    discarded: str | None = None
    """Why this sample does not count (evaluation ran inside it, a checkpoint was written...)."""
    elements: int | None = None
    """Elements of all tensors in the step's batches; None where nobody looked."""
    attached: str | None = None
    """The profiler that watched this step after all, where the Recording was made from its capture: it slows the
    host, so that the step may be longer than it is without."""


@dataclass(frozen=True)
class HostTime(Fact):
    """Host time to launch one whole step, from an idle GPU, in a step that is neither timed nor traced.

    `drain_ms` is how long the GPU still worked after the host was done. Near zero, the GPU only followed the
    host, and the step cannot be shorter than `ms`: launch-bound. Well above zero, the host ran ahead, and `ms`
    is only an upper bound of what it needs, because a full launch queue makes it wait for the GPU.
    """

    kind: ClassVar[str] = "host_time"
    recipe: str
    round: int
    ms: float
    drain_ms: float = 0.0


@dataclass(frozen=True)
class ForwardTime(Fact):
    """The forward passes of the timed steps of one block, on one of several ranks.

    Steps of ranks that wait for each other all take as long as the slowest; what a rank does before it waits tells
    which one that is.
    """

    kind: ClassVar[str] = "forward_time"
    recipe: str
    round: int
    ms: tuple[float, ...]
    """A step each: all its `training_step` calls, by the step's own clock (CUDA events on a GPU)."""


@dataclass(frozen=True)
class RankRecipe:
    """What one rank measured of one recipe."""

    rounds: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(round, ms of its timed steps)."""
    forward: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(round, ms of the forward passes of each); see `ForwardTime`."""
    host_ms: tuple[float, ...] = ()
    """`HostTime.ms`, a round each."""
    peak_bytes: int | None = None
    """Highest live bytes within timed steps; None on a CPU."""
    sm_mhz: tuple[int, ...] = ()
    power_w: tuple[float, ...] = ()
    """NVML's readings, a block each."""
    gemm_ms: float | None = None
    """All linear-layer GEMMs of one step by this rank's own kernel-only benchmark."""
    communication_ms: float | None = None
    """Exposed communication of a step, from this rank's own traced steps."""
    coverage: float | None = None
    """Share of its linear-layer FLOPs that ran as asked."""


@dataclass(frozen=True)
class RankSummary(Fact):
    """One rank's own measurements, gathered when the sweep was over. Rank zero's Recording holds those of all ranks."""

    kind: ClassVar[str] = "rank_summary"
    rank: int
    host: str
    device: str
    recipes: dict[str, RankRecipe] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What went wrong on this rank (on rank zero: see `Problem`)."""


@dataclass(frozen=True)
class Loss(Fact):
    """The loss that `training_step` returned at the end of a block (a sign that the recipe computes)."""

    kind: ClassVar[str] = "loss"
    recipe: str
    round: int
    value: float
    grad_norm: float | None = None


@dataclass(frozen=True)
class Trial(Fact):
    """One optimizer step of the numerics guard: every recipe takes the same ones, from the same state on the same data.

    Gradients are read after backward and before clipping and the optimizer. Parameters are named as
    `Module.named_parameters` does. With several processes, all of it is this process's own share.
    """

    kind: ClassVar[str] = "trial"
    recipe: str
    step: int
    """Optimizer steps since the common state; -1: a step before it, from the same state, in which scales settle. Of
    that one nothing is compared."""
    repeat: int = 0
    """1: the baseline once more, after all recipes: what differs then is no recipe's doing."""
    loss: float | None = None
    """What `training_step` returned, as mean over the micro-batches."""
    micro_batches: int = 0
    """Forward passes that it is the mean of."""
    replayed: bool = False
    """Whether the batches are those of the baseline's step (as the baseline's own are)."""
    grad_norm: float | None = None
    """Euclidean norm over all gradients that were read."""
    parameters: int = 0
    """Parameters with a gradient."""
    elements: int = 0
    """Their elements."""
    without: int = 0
    """Parameters that ask for a gradient and have none."""
    zero: tuple[str, ...] = ()
    """Parameters whose gradient is zero in every element."""
    not_finite: tuple[str, ...] = ()
    """Parameters with an element of the gradient that is infinite or no number."""
    names: tuple[str, ...] = ()
    """In step 0, where all recipes have the same weights: the parameters with a gradient."""
    norms: tuple[float, ...] = ()
    """The norm of each."""
    sizes: tuple[int, ...] = ()
    """The elements of each."""
    loss_scale: float | None = None
    """The loss scaler's scale, if there is one: what it finds not finite it skips. Norms are without it."""
    missing: str | None = None
    """Why a loss, a gradient or the same data is missing."""


@dataclass(frozen=True)
class Clocks(Fact):
    """NVML's reading at the end of a timed block."""

    kind: ClassVar[str] = "clocks"
    recipe: str
    round: int
    sm_mhz: int
    power_w: float
    temperature_c: int
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostWaits:
    """Calls in which the host was blocked until the GPU, or a copy, was done: in columns of equal length.

    Times are microseconds since the step began.
    """

    names: tuple[str, ...]
    """Distinct names of calls (`cudaStreamSynchronize`); `name` indexes it."""
    name: tuple[int, ...]
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    module: tuple[int, ...]
    """Index into the `labels` of the `Trace`, like `op` and `phase`: where the host waited."""
    op: tuple[int, ...]
    phase: tuple[int, ...]


@dataclass(frozen=True)
class HostPhases:
    """The phases of the step as the host went through them: in columns of equal length, by beginning.

    Times are microseconds since the step began. Between them the host is in none.
    """

    name: tuple[str, ...]
    """data, forward, backward, optimizer."""
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]


@dataclass(frozen=True)
class Trace(Fact):
    """One traced step: every GPU kernel (on a CPU: every operator's own time), in columns of equal length.

    Times are microseconds since the step began. A kernel's `module` and `role` are those of the range of ours
    in which the host launched it, `op` is the innermost framework operator there.
    """

    kind: ClassVar[str] = "trace"
    recipe: str
    step: int
    wall_ms: float
    """The traced step from its first to its last boundary, synchronized at both; tracing slows the host."""
    names: tuple[str, ...]
    """Distinct kernel names; `name` indexes it."""
    labels: tuple[str, ...]
    """Distinct texts; `module`, `role`, `op`, `phase` index it. Label 0 is the empty text: not known."""
    name: tuple[int, ...]
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    stream: tuple[int, ...]
    launch_us: tuple[float, ...]
    """Host time of the launch since the step began; NaN where no launch was found."""
    module: tuple[int, ...]
    role: tuple[int, ...]
    op: tuple[int, ...]
    phase: tuple[int, ...]
    expected_gemms: int | None = None
    """Linear-layer GEMM calls that the operand witness counted in an equal step."""
    source: str = "torch.profiler"
    waits: HostWaits | None = None
    """The user's own waits, without ours at the step's ends. None: not recorded."""
    phases: HostPhases | None = None
    """None: not recorded."""
    host_end_us: float | None = None
    """When the host was done with the step, and only our own wait for the GPU was left. None: we did not wait."""


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
class Imported(Fact):
    """The capture of a profiler that this Recording was made from, instead of a live run."""

    kind: ClassVar[str] = "imported"
    tool: str
    """`Nsight Systems 2025.3.2 (export schema 3.20.3)`, `torch.profiler`."""
    file: str
    """The file's name, without its folder."""
    kernels: int
    """Kernels, copies and fills of the GPU that is reported."""
    placed: int
    """Those of them whose launch by the host was found."""
    steps: str
    """How the steps were found."""
    traced: str
    """Which steps became `Trace` facts, and by which rule."""
    recipe_from: Literal["ranges", "user", "kernels"]
    """Who says which recipe was asked for: our ranges, the user, or nobody, so that the kernels must tell."""
    why_recipe: str = ""


@dataclass(frozen=True)
class GemmKernels(Fact):
    """All GEMM kernels of a capture's steps of one recipe, counted by name and place, in columns of equal length.

    `Trace` facts hold every kernel of a few steps; this covers the GEMMs of all.
    """

    kind: ClassVar[str] = "gemm_kernels"
    recipe: str
    steps: int
    names: tuple[str, ...]
    """Distinct kernel names; `name` indexes it."""
    labels: tuple[str, ...]
    """Distinct texts; `module`, `role`, `op`, `phase` index it. Label 0 is the empty text: not known."""
    name: tuple[int, ...]
    module: tuple[int, ...]
    role: tuple[int, ...]
    op: tuple[int, ...]
    phase: tuple[int, ...]
    """A phase of the step, or the direction of the module's range."""
    library: tuple[bool, ...]
    """Whether Transformer Engine's GEMM library launched it, or a GEMM range of ours was open."""
    count: tuple[int, ...]
    total_us: tuple[float, ...]


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
class Memory(Fact):
    """Bytes of the CUDA caching allocator (on a CPU: none are recorded)."""

    kind: ClassVar[str] = "memory"
    recipe: str
    round: int
    phase: Literal["start", "forward", "backward", "optimizer", "step"]
    """`start`: before the watched step of a recipe, from a clean state. `forward` and `backward` come once a
    micro-batch. `step`: at the end of a block of timed steps."""
    allocated: int
    """Live bytes at the end of the phase."""
    peak: int
    """Highest live bytes within the phase (`step`: within all steps of the block)."""
    reserved: int
    requested: int | None = None
    """Live bytes at the end of the phase as they were asked for, without the allocator's rounding."""
    inactive_split: int | None = None
    """Of what is reserved and not live: free pieces of blocks that are in use otherwise, fit for smaller requests
    only."""


@dataclass(frozen=True)
class Holding(Fact):
    """Who holds live bytes at the end of a phase of the watched step: sizes of storages, each counted once.

    What no owner claims (saved activations, temporaries, what others keep) is not in it.
    """

    kind: ClassVar[str] = "holding"
    recipe: str
    phase: Literal["start", "forward", "backward", "optimizer"]
    parameters: int
    gradients: int
    optimizer: int
    """The optimizer's state: moments, master weights, their scales."""
    buffers: int
    """The model's buffers; scales and amax histories of delayed scaling."""
    quantized: int
    """Quantized weights that modules keep from one micro-batch to the next, beside their parameters. What a forward
    pass keeps for its own backward pass is not among them."""
    workspaces: int
    """Transformer Engine's workspace for cuBLASLt."""


@dataclass(frozen=True)
class PeakHolding(Fact):
    """The fullest moment of the watched step, and what was held when the module began that ran at that moment."""

    kind: ClassVar[str] = "peak_holding"
    recipe: str
    phase: Literal["start", "forward", "backward", "optimizer"]
    module: str
    """The module at whose end (or, between modules, beginning) the new peak was found; empty where none was near."""
    peak: int
    """Highest live bytes of the step."""
    peak_requested: int | None
    """Highest live bytes as they were asked for."""
    held: int
    """Live bytes at the reading before: the boundary of a module or of a phase."""
    held_requested: int | None
    gradients: int
    """Bytes of gradients at that reading."""
    open_layers: tuple[str, ...] = ()
    """Modules with linear layers whose forward had run by then, and whose backward had not."""


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


@dataclass(frozen=True)
class Restored(Fact):
    """What was put back after the sweep."""

    kind: ClassVar[str] = "restored"
    parts: tuple[str, ...]
    asked: bool
    verified: str | None = None


@dataclass(frozen=True)
class Problem(Fact):
    """Something that failed or was given up, and what that costs."""

    kind: ClassVar[str] = "problem"
    where: str
    message: str


@dataclass(frozen=True)
class End(Fact):
    """The last line of a Recording whose sweep came to an end in good order."""

    kind: ClassVar[str] = "end"
    status: Literal["finished", "shortened", "interrupted", "failed"]
    reason: str | None = None


_F = TypeVar("_F", bound=Fact)


@cache
def _registry() -> dict[str, type[Fact]]:
    return {cls.kind: cls for cls in Fact.__subclasses__()}


@cache
def _adapter(kind: str) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_registry()[kind])


def encode(fact: Fact) -> str:
    """One line of JSON for a fact, without the line's end.

    JSON has no NaN and no infinities: they become the texts "NaN", "Infinity" and "-Infinity".
    """
    body = {"fact": fact.kind, **vars(fact)}
    return json.dumps(finite(body), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode(text: str) -> Fact:
    """The fact of one line of this version.

    Raises:
        RecordingError: it holds none.
    """
    return _decode(text.encode(), Path("a fact"), 1, first=False)


def finite(value: Any) -> Any:
    """`value` with NaN and the two infinities replaced by text, which JSON can carry and `float` can read."""
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _AS_IT_IS else finite(item) for item in value]
    if dataclasses.is_dataclass(value):
        return finite(vars(value))
    return value


_AS_IT_IS = frozenset({int, str, bool})
"""What columns mostly hold; a trace has hundreds of thousands of them."""


@dataclass(frozen=True)
class Line:
    """A fact and the number of the line (from 1) that it stands on."""

    number: int
    fact: Fact


class Recording:
    """Facts in memory, with the lines that they came from.

    `of(Kind)` gives the facts of one kind in order; `lines(Kind)` gives them with their line numbers, which is
    how a Report says where a number came from.
    """

    def __init__(self, lines: Sequence[Line], path: Path | None = None, torn: str | None = None) -> None:
        self._lines = tuple(lines)
        self.path = path
        self.torn = torn
        """If the last line was cut off (the process was killed while writing): a sentence that says so."""

    @classmethod
    def from_facts(cls, facts: Sequence[Fact]) -> Recording:
        """A Recording of facts that were never on disk, numbered from 1."""
        return cls([Line(i, fact) for i, fact in enumerate(facts, start=1)])

    def __iter__(self) -> Iterator[Fact]:
        return (line.fact for line in self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def lines(self, kind: type[_F]) -> list[tuple[int, _F]]:
        """All facts of one kind as (line number, fact)."""
        return [(line.number, line.fact) for line in self._lines if isinstance(line.fact, kind)]

    def of(self, kind: type[_F]) -> list[_F]:
        """All facts of one kind, in the order in which they were recorded."""
        return [line.fact for line in self._lines if isinstance(line.fact, kind)]

    def last(self, kind: type[_F]) -> _F | None:
        """The newest fact of one kind, or None."""
        found = self.of(kind)
        return found[-1] if found else None


class Recorder:
    """Appends facts to a file, each flushed at once. Use as a context manager, or call `close`.

    With `on_disk` false facts are kept in memory alone, until `write` is called or nobody wants them any more.
    """

    def __init__(self, path: Path, tool_version: str, created: str | None = None, on_disk: bool = True) -> None:
        self.path = path
        self._file: IO[str] | None = self._open() if on_disk else None
        self._lines: list[Line] = []
        self._closed = False
        self.lost: str | None = None
        """If the disk refused a fact (full, gone): a sentence. Facts then live on in memory."""
        self.add(
            Header(
                version=VERSION,
                tool_version=tool_version,
                created=created or datetime.now().astimezone().isoformat("T", "seconds"),
            )
        )

    def add(self, *facts: Fact) -> None:
        """Append facts. A disk that refuses them never harms the training run: see `lost`."""
        for fact in facts:
            self._lines.append(Line(len(self._lines) + 1, fact))
        if self._file is None:
            return
        try:
            self._file.write("".join(encode(fact) + "\n" for fact in facts))
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def snapshot(self) -> Recording:
        """All facts so far."""
        return Recording(self._lines, self.path)

    def write(self) -> None:
        """Put facts that were kept in memory on disk. A disk that refuses them harms nobody: see `lost`."""
        try:
            self._file = self._open()
        except OSError as error:
            self._lose(error)
            return
        facts = [line.fact for line in self._lines]
        self._lines.clear()
        self.add(*facts)

    def forget(self) -> None:
        """Drop facts that were kept in memory."""
        self._lines.clear()

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # "x": a Recording is never written over; two runs never share a file.
        # Text that is no Unicode (a file name in an error message) becomes an escape that JSON reads back.
        return self.path.open("x", encoding="utf-8", errors="backslashreplace")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._closed = True
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = f"{self.path}: {error.strerror or error}; later facts are only in memory"
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def __del__(self) -> None:
        """A session that never came to its end leaves no open file."""
        if getattr(self, "_file", None) is not None:
            self.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path | str) -> Recording:
    """Read a Recording, given its file or the run folder that holds it.

    Raises:
        RecordingError: the file is missing, is no Recording, is newer than this package, or is corrupt before
            its last line. A torn last line is not an error: see `Recording.torn`.
    """
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise RecordingError(
            f"{file}: cannot be read ({error.strerror}); give a run folder or its {FILE_NAME}"
        ) from error
    pieces = raw.split(b"\n")
    whole, rest = pieces[:-1], pieces[-1]
    lines: list[Line] = []
    for number, piece in enumerate(whole, start=1):
        lines.append(Line(number, _decode(piece, file, number, first=number == 1)))
    if not lines:
        raise RecordingError(f"{file}: holds no complete line, so it is no Recording (or its run died at once)")
    torn = (
        f"{file}, line {len(whole) + 1}: cut off while it was being written; all before it is whole" if rest else None
    )
    return Recording(lines, file, torn)


def _decode(piece: bytes, file: Path, number: int, first: bool) -> Fact:
    where = f"{file}, line {number}"
    try:
        body = json.loads(piece)
        kind = body.pop("fact")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        what = "not a Recording" if first else "corrupt"
        raise RecordingError(f"{where}: {what} (expected a JSON object with a key 'fact'): {error}") from error
    if first and kind != Header.kind:
        raise RecordingError(f"{where}: a Recording begins with a header, found {kind!r}")
    if first and isinstance(body.get("version"), int) and body["version"] > VERSION:
        raise RecordingError(
            f"{where}: written as version {body['version']} by lowprec_callback {body.get('tool_version', '?')}; "
            f"this one reads up to version {VERSION}: upgrade lowprec_callback to open it"
        )
    if not isinstance(kind, str) or kind not in _registry():
        raise RecordingError(f"{where}: unknown fact {kind!r}; known: {', '.join(sorted(_registry()))}")
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(body)  # type: ignore[no-any-return]
    except ValidationError as error:
        first_error = error.errors()[0]
        field_name = ".".join(str(part) for part in first_error["loc"])
        raise RecordingError(f"{where}: fact {kind!r}, field {field_name}: {first_error['msg']}") from error
