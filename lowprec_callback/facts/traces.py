"""Facts about the kernels of traced steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowprec_callback.facts.base import Fact

ENGINE = "autograd::engine::evaluate_function: "
"""How the autograd engine's ranges begin among the operators of a trace. One is around a node, its hooks, and the sums
of its gradients with others of the same tensor."""


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
class StepProducts(Fact):
    """What a step launched that may be a matrix product, in order of launch, in columns of equal length.

    Of a GPU every kernel, of a CPU PyTorch's matrix products. This is the evidence of the verdict: where `ranged` is
    False, nothing but the kernel tracer was attached, and the step ran exactly as the timed ones do.
    """

    kind: ClassVar[str] = "step_products"
    recipe: str
    step: int
    ranged: bool
    """Whether hooks and ranges marked modules; without them `module` and `role` are empty."""
    names: tuple[str, ...]
    """Distinct names of kernels or operators; `name` indexes it."""
    labels: tuple[str, ...]
    """Distinct texts; `module`, `role`, `op`, `phase`, `formats` index it. Label 0 is the empty text: not known."""
    name: tuple[int, ...]
    module: tuple[int, ...]
    role: tuple[int, ...]
    op: tuple[int, ...]
    """The innermost framework operator that launched it."""
    phase: tuple[int, ...]
    """forward, backward, optimizer, data."""
    formats: tuple[int, ...]
    """Types of the operator's two matrices (`bf16 x bf16`), where the profiler tells: on a CPU."""
    compiled: tuple[str, ...] = ()
    """Modules that ran compiled, as `torch.compile` or `Module.compile` made them."""


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
    calls: int | None = None
    """GEMM calls that ranges mark in these steps. None: nothing marks them, or an older version read the capture."""
    silent_calls: int = 0
    """Of these: calls in which no product kernel was launched that the capture holds."""
    fewest: int | None = None
    """Product kernels of the step that holds the fewest, and the most. None: not counted."""
    most: int | None = None
