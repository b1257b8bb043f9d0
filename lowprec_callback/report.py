"""What a Report holds: the answers, each number with its spread, its origin and the facts behind it.

A Report is plain data. `analyze` makes it from a Recording, `show` renders it, and `report.json` is it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lowprec_callback.files import write_text
from lowprec_callback.recording import Role, finite

VERSION = 1
"""Schema version of `report.json`."""

FILE_NAME = "report.json"

Origin = Literal["measured", "derived", "estimated"]
_ORIGINS: tuple[Origin, ...] = ("measured", "derived", "estimated")

VerdictWord = Literal["confirmed", "fallback", "by_request", "outside", "emulated", "unproven"]

NumericsState = Literal["ok", "far", "frozen scales", "zero gradients", "not finite", "unknown"]

BUCKETS = (
    "gemm",
    "quantize",
    "amax",
    "hadamard",
    "scale",
    "attention",
    "norm",
    "activation",
    "loss",
    "optimizer",
    "elementwise",
    "communication",
    "copy",
    "other",
)
"""The disjoint kinds of GPU work. `gemm` holds linear layers' products, and convolutions; attention's batched ones are
`attention`."""

QUANTIZATION = ("quantize", "amax", "hadamard", "scale")
"""The buckets that exist only because a recipe quantizes."""


IDLE_CAUSES = ("launch-starved", "data", "synchronization", "other")
"""Why the GPU ran nothing; `analyze.idle` says what each means."""


class ReportError(ValueError):
    """A report file that cannot be read."""


@dataclass(frozen=True)
class Figure:
    """A number with its interval, its origin and the facts that it came from; or the reason why there is none.

    `low` and `high` bound the 95% interval where one is known. `facts` names what the number rests on
    ("step_time lines 40-63"). A Figure without a value has a `reason`, and so has every sum over it.
    """

    value: float | None
    unit: str
    origin: Origin = "derived"
    low: float | None = None
    high: float | None = None
    n: int | None = None
    facts: tuple[str, ...] = ()
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ValueError(f"a Figure without a value ({self.unit}) needs a reason")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a Figure must be finite, got {self.value} {self.unit}")

    @property
    def known(self) -> bool:
        """Whether there is a number."""
        return self.value is not None

    @property
    def half_width(self) -> float | None:
        """Half the interval's width, in the Figure's unit."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @staticmethod
    def missing(unit: str, reason: str) -> Figure:
        """No number, and why."""
        return Figure(None, unit, reason=reason)

    @staticmethod
    def total(figures: Iterable[Figure], unit: str) -> Figure:
        """The sum; missing as soon as one term is. Half-widths add in quadrature: terms are taken as independent."""
        terms = list(figures)
        for term in terms:
            if term.value is None:
                return Figure.missing(unit, f"a term of the sum is missing: {term.reason}")
        value = math.fsum(term.value for term in terms if term.value is not None)
        widths = [term.half_width for term in terms]
        low = high = None
        if terms and all(width is not None for width in widths):
            spread = math.sqrt(math.fsum(width**2 for width in widths if width is not None))
            low, high = value - spread, value + spread
        return Figure(value, unit, worst_origin(terms), low, high, facts=merge_facts(terms))

    def minus(self, other: Figure) -> Figure:
        """The difference, with half-widths added in quadrature; missing if either side is."""
        return Figure.total([self, other.scaled(-1.0)], self.unit)

    def scaled(self, factor: float, unit: str | None = None) -> Figure:
        """The Figure times an exact factor."""
        unit = unit or self.unit
        if self.value is None:
            return Figure.missing(unit, self.reason or "missing")
        bounds = (
            (None, None)
            if self.low is None or self.high is None
            else tuple(sorted((self.low * factor, self.high * factor)))
        )
        return Figure(self.value * factor, unit, worst_origin([self]), bounds[0], bounds[1], self.n, self.facts)


def worst_origin(figures: Iterable[Figure]) -> Origin:
    """What a combination of figures is: `estimated` if any of them is, else `derived`."""
    return "estimated" if any(figure.origin == "estimated" for figure in figures) else "derived"


def merge_facts(figures: Iterable[Figure]) -> tuple[str, ...]:
    """The facts of several figures, each once, in order."""
    return tuple(dict.fromkeys(fact for figure in figures for fact in figure.facts))


@dataclass(frozen=True)
class VerdictRow:
    """Asked against ran for one module and role."""

    module: str
    role: Role
    m: int
    k: int
    n: int
    calls: int
    asked: str
    ran: str
    verdict: VerdictWord
    why: str
    witnesses: dict[str, str] = field(default_factory=dict)
    """Witness name to what it saw: operands, library, kernels, memory."""
    share: float = 0.0
    """Share of the step's linear-layer FLOPs."""


@dataclass(frozen=True)
class KernelRow:
    """Asked against ran for the GEMM kernels of one place in a capture, whose shapes are not known."""

    module: str
    """The empty text: not known."""
    where: str
    """The role; `forward` or `backward` where the role is not known, the empty text where that is not either."""
    asked: str
    ran: str
    verdict: VerdictWord
    why: str
    kernels: float
    """GEMM kernels a step, on average over all captured steps."""
    ms: float
    """Their time a step; overlap is not taken out."""


@dataclass(frozen=True)
class Verdict:
    """All rows, and coverage: the share of the step's linear-layer FLOPs that ran as asked."""

    coverage: Figure
    te_coverage: Figure
    """The same over the GEMMs that a recipe can reach."""
    rows: tuple[VerdictRow, ...]
    summary: str
    disagreements: tuple[str, ...] = ()
    slow_paths: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """Products of the step that belong to no linear layer (attention's), in which format, and their share."""
    kernels: tuple[KernelRow, ...] = ()
    """From a profiler's capture, instead of `rows`."""


@dataclass(frozen=True)
class PlaceTime:
    """The busy time of one place in the model and one kind of work, a step."""

    operation: str
    """Module path with its layer indices collapsed (`layers.*.mlp.fc1`); the empty text: in no module."""
    where: str
    """The role of a linear layer's GEMM, else the phase of the step; the empty text: not known."""
    bucket: str
    ms: Figure
    kernels: float
    """Kernels a traced step, on average; on a CPU stretches of operators."""


@dataclass(frozen=True)
class Ledger:
    """One step's wall time, split without gaps or overlaps: wall = sum of buckets + idle + residual (ms)."""

    wall: Figure
    buckets: dict[str, Figure]
    idle: Figure
    residual: Figure
    busy: Figure
    complete: bool
    complaints: tuple[str, ...] = ()
    traced_wall: Figure | None = None
    note: str | None = None
    unknown_kernels: tuple[str, ...] = ()
    """Names in the bucket `other`, longest time first."""
    steps: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Each bucket's time in each traced step [ms]; `buckets` are their means."""
    idle_parts: dict[str, Figure] = field(default_factory=dict)
    """`idle` by cause (of `IDLE_CAUSES`); the parts sum to it. Empty: `idle_note` says why there is no split."""
    places: tuple[PlaceTime, ...] = ()
    """`busy` by place and bucket, the most first: every instant belongs to one kernel, so they sum to `busy`."""
    hidden_communication: Figure | None = None
    """Communication that ran while computation did [ms]: no part of the sum, in which the bucket `communication` is
    what was exposed. None: no communication was seen."""
    idle_note: str = ""
    """What `idle_parts` leaves open, or why there are none."""


@dataclass(frozen=True)
class GapTerm:
    """One step on the way from the baseline's time to the recipe's, in ms; negative saves time."""

    name: str
    ms: Figure
    note: str = ""


@dataclass(frozen=True)
class Gap:
    """From the baseline's step to the recipe's: the terms sum to the measured difference exactly."""

    baseline: str
    recipe: str
    start: Figure
    end: Figure
    terms: tuple[GapTerm, ...]
    missing: str | None = None
    """Why there are no terms, when there are none."""


@dataclass(frozen=True)
class GemmRow:
    """One operation of the model (equal shapes in the same kind of place taken together), one role, one recipe."""

    operation: str
    role: Role
    m: int
    k: int
    n: int
    calls: int
    """Calls in one optimizer step."""
    kernel_ms: Figure
    """One call, the GEMM alone."""
    autocast_ms: Figure
    """One call, with its share of the quantization that training does for it."""
    launch_bound: bool = False
    kernel_launch_bound: bool = False
    """Whether that is so of `kernel_ms`."""


@dataclass(frozen=True)
class Speedups:
    """The four, always together; all against the baseline."""

    kernel: Figure
    autocast: Figure
    amdahl: Figure
    step: Figure


@dataclass(frozen=True)
class Prediction:
    """A recipe's step time from what was known before it ran (see `analyze.prediction`), beside what was measured."""

    step_ms: Figure
    """The predicted step, with its own interval."""
    error: Figure
    """predicted / measured - 1."""
    naive_ms: Figure
    """The baseline's step divided by the GEMM speedup: what one would expect of a GEMM benchmark alone."""
    naive_error: Figure
    gpu_ms: Figure
    """What the GPU needs for the predicted step."""
    host_ms: Figure
    """What the host needs to launch it."""
    bound: str
    """`GPU` or `host`: which of the two sets the pace; empty where that is not told apart."""
    basis: str
    """What it rests on, in words."""
    pays_from: Figure
    """Tokens a micro-batch from which the recipe's step is shorter than the baseline's."""
    pays: str
    """The same as a sentence; empty where it is not known."""


@dataclass(frozen=True)
class ScaleRow:
    """Delayed scaling's scale and amax of one tensor of one module."""

    module: str
    tensor: str
    scale: float
    amax: float
    history_max: float
    history_length: int


@dataclass(frozen=True)
class MemoryTerm:
    """Something that a recipe holds in memory: what it should be by formula, and what was measured [GB = 1e9 bytes]."""

    name: str
    expected: Figure
    measured: Figure


MEMORY_TERMS = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers and scales",
    "copies of weights",
    "cuBLASLt workspace",
    "saved activations",
    "activations and copies",
    "temporaries",
    "not attributed",
    "rounding",
    "reserved but unused",
)
"""The terms of the memory ledger (`analyze.memory_ledger`), disjoint. `activations and copies` stands for two that
could not be told apart."""


@dataclass(frozen=True)
class MemoryMoment:
    """All that the allocator took from the GPU at one moment of the watched step: terms that add up to `reserved`."""

    name: str
    """start, forward, backward, optimizer (the ends of these phases), or peak."""
    where: str
    """In words: `in backward, at layers.3.mlp`."""
    terms: dict[str, Figure]
    """By name (of `MEMORY_TERMS`) [GB]; a term that this moment cannot have is not in it."""
    reserved: Figure
    activations: dict[str, Figure] = field(default_factory=dict)
    """What `saved activations` are made of [GB]: inputs of linear layers, and the rest."""
    fragmented: Figure = Figure(None, "GB", reason="not counted at this moment")
    """Of `reserved but unused`: pieces of blocks that are in use otherwise, fit for smaller requests only [GB]."""

    @property
    def sum(self) -> Figure:
        """All terms together; missing as soon as one of them is."""
        return Figure.total(self.terms.values(), "GB")


@dataclass(frozen=True)
class MemoryReport:
    """The memory witness of one recipe."""

    state: Literal["agrees", "contradicts", "silent"]
    why: str
    """What it saw, or why it says nothing, as a sentence."""
    phases: dict[str, Figure] = field(default_factory=dict)
    """`parameters` of the model, and live bytes of the allocator in the watched step [GB]: at its `start` (parameters,
    optimizer state, what is left of gradients) and at the end of `forward`, `backward` and `optimizer`; `peak` is that
    step's."""
    terms: tuple[MemoryTerm, ...] = ()
    note: str | None = None
    """If the recipe should hold more than the baseline: what, and that it is no fault."""
    moments: tuple[MemoryMoment, ...] = ()
    """The memory ledger at the end of each phase, and last at the peak (on a CPU without it)."""

    def moment(self, name: str) -> MemoryMoment | None:
        """The ledger at one moment, if it was recorded."""
        return next((moment for moment in self.moments if moment.name == name), None)


@dataclass(frozen=True)
class NumericsReport:
    """The numerics guard of one recipe: steps from the same state on the same data as the baseline's.

    Of the baseline, `loss`, `distance` and `gradient_ratio` are those of its own repetition against it.
    """

    state: NumericsState
    """`ok`; `far`: further from the baseline than the limit; `frozen scales`; `zero gradients` and `not finite`, which
    make the speed void; `unknown`."""
    why: str
    """What was seen, as a clause."""
    steps: int = 0
    """Optimizer steps that were compared."""
    loss_baseline: Figure = Figure(None, "nats", reason="not recorded")
    """At the step where the two losses are furthest apart."""
    loss: Figure = Figure(None, "nats", reason="not recorded")
    distance: Figure = Figure(None, "%", reason="not recorded")
    """Of the losses (`analyze.numerics`)."""
    limit: Figure = Figure(None, "%", reason="not recorded")
    gradient_ratio: Figure = Figure(None, "x", reason="not recorded")
    """Norm of the gradient over the baseline's, at the same weights."""
    zero: Figure = Figure(None, "parameters", reason="not recorded")
    """Parameters whose gradient is zero in all steps."""
    not_finite: Figure = Figure(None, "parameters", reason="not recorded")
    """Parameters with a gradient that is not finite in some step."""
    scales: str | None = None
    """What delayed scaling's scales did. None: there are none, or none were recorded."""


@dataclass(frozen=True)
class RecipeReport:
    """Everything about one recipe."""

    name: str
    title: str
    baseline: bool
    refusal: str | None = None
    """Why it did not run; then nothing below is known."""
    step_ms: Figure = Figure(None, "ms", reason="not run")
    host_ms: Figure = Figure(None, "ms", reason="not run")
    speedups: Speedups | None = None
    peak_gb: Figure = Figure(None, "GB", reason="not run")
    samples: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(round, step times in ms) for the plot of distributions."""
    ledger: Ledger | None = None
    no_ledger: str | None = None
    gap: Gap | None = None
    gemms: tuple[GemmRow, ...] = ()
    gemm_kernel_ms: Figure = Figure(None, "ms", reason="not run")
    """All linear-layer GEMMs of one step, kernel-only benchmark."""
    gemm_autocast_ms: Figure = Figure(None, "ms", reason="not run")
    verdict: Verdict | None = None
    memory: MemoryReport | None = None
    scales: tuple[ScaleRow, ...] = ()
    loss: Figure = Figure(None, "nats", reason="not recorded")
    clocks: str | None = None
    numerics: str | None = None
    guard: NumericsReport | None = None
    """Whether it computes what the baseline does. None: a report that is older than the guard."""
    void: str | None = None
    """Why this recipe's speed counts for nothing: its loss or a gradient is not finite, or gradients are zero."""
    prediction: Prediction | None = None
    """None for the baseline, and for a recipe that did not run."""
    asked: dict[str, str] | None = None
    """What its card asked for, as text: formats by role, scaling, Transformer Engine's arguments. None: unknown."""


@dataclass(frozen=True)
class RankRow:
    """One quantity of one recipe over all ranks."""

    quantity: str
    """`step`, `forward`, `GEMM benchmark`, `exposed communication`, `host`, `peak memory`, `SM clock`, `coverage`."""
    median: Figure
    """Over the ranks, of each rank's own median."""
    worst: Figure
    """The slowest rank's; of clocks and coverage the lowest, of memory the highest."""
    worst_rank: int
    worst_host: str
    best: Figure


@dataclass(frozen=True)
class RanksReport:
    """The processes that trained together. All else in the Report is rank zero's, but for the times of steps."""

    world: int
    heard: int
    """Ranks whose measurements were gathered."""
    hosts: int
    rows: dict[str, tuple[RankRow, ...]] = field(default_factory=dict)
    """By recipe."""
    slowest: dict[str, str] = field(default_factory=dict)
    """Recipe to the rank whose step is the recipe's step time: `rank 3 (node-b)`."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something that costs time, memory or certainty, and what to do about it."""

    code: str
    """Which of the catalogue (`analyze.findings.CATALOGUE`): `launch-bound`, `data-wait`, ..."""
    recipe: str
    """The recipe in whose step it was found; empty where it is about the whole run."""
    sentence: str
    """What was found, with its numbers."""
    evidence: tuple[str, ...]
    """What it rests on, each with the facts of the Recording that it came from where they are few."""
    ms: Figure
    """The time per step that it is about: an upper bound of what the advice can save. Findings may be about the same
    time, so these do not add up. Missing where it is not known, or no matter of time."""
    advice: str


@dataclass(frozen=True)
class Report:
    """The whole answer."""

    version: int
    tool_version: str
    created: str
    model: str
    engine: str
    why_engine: str
    device: str
    versions: dict[str, str]
    headline: tuple[str, ...]
    """Verdict first: a sentence or a few."""
    reading: tuple[str, ...]
    """GEMM promise against measured step, in words, with the evidence."""
    baseline: str
    recipes: tuple[RecipeReport, ...]
    plan: str
    shrunk: str | None = None
    problems: tuple[str, ...] = ()
    restored: str | None = None
    status: str = "finished"
    recording: str | None = None
    findings: tuple[Finding, ...] = ()
    """What to do, by ms at stake; those whose ms are not known come last."""
    conditions: dict[str, str] | None = None
    """What else a step's time depends on: micro-batches, world size, power limit, the CPU, environment variables of
    the Recording's allow-list. None: unknown."""
    ranks: RanksReport | None = None
    """None: one process trained."""

    def recipe(self, name: str) -> RecipeReport:
        """The part about one recipe. Raises KeyError with the known names."""
        for part in self.recipes:
            if part.name == name:
                return part
        raise KeyError(f"no recipe {name!r} in this report; it has {', '.join(part.name for part in self.recipes)}")

    def to_json(self) -> str:
        """The report as JSON text. What is not finite (an amax, in a run that diverged) is a text: see `recording`."""
        return json.dumps(finite(dataclasses.asdict(self)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: Path) -> None:
        """Write `report.json`, whole or not at all.

        Raises:
            OSError: it cannot be written. The file that was there is as it was.
        """
        write_text(path, self.to_json())


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Report)


def load_report(path: Path | str) -> Report:
    """Read a `report.json`, given its file or its run folder.

    Raises:
        ReportError: missing, corrupt, or written by a newer version.
    """
    from pydantic import ValidationError

    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ReportError(f"{file}: not JSON ({error})") from error
    version = body.get("version") if isinstance(body, dict) else None
    if not isinstance(version, int):
        raise ReportError(f"{file}: no report (it has no integer 'version')")
    if version > VERSION:
        raise ReportError(
            f"{file}: schema version {version}, this package reads up to {VERSION}: upgrade lowprec_callback"
        )
    try:
        return _adapter().validate_python(body)  # type: ignore[no-any-return]
    except ValidationError as error:
        first = error.errors()[0]
        raise ReportError(f"{file}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
