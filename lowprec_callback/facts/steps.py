"""Facts about whole steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lowprec_callback.facts.base import Fact


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
