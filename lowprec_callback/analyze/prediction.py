"""A recipe's step time before it runs: the baseline's ledger, with the modules' times exchanged.

What a recipe changes is what its modules do. So a step of the recipe is the baseline's, less what its modules took,
plus what they take under the recipe; for the GPU and for the host apart, and the slower of the two sets the pace:

    GPU_r  = GPU_0  + sum over kinds k and directions d of  S_kd (T_kd,r / T_kd,0 - 1)
    host_r = host_0 + sum over k and d of  n_k (h_kd,r - h_kd,0)  +  b (R_r - R_0)
    P      = mean over samples of host_0 of  max(GPU_r, host_r)                                            [ms]

S_kd: kernels of all modules of kind k in direction d in the baseline's traced step. T: one such module by itself
(`recording.ModuleTime`), recipes in turn; the ratio takes over by how much the module is slower in the step than on
the bench. T is not taken to one clock: at a power limit a recipe that draws less runs at a higher one, in the step as
well. n_k: modules of the kind times micro-batches b. h, R: the host's time for one module, and for a region and the
start of a backward pass. Where the baseline's GPU idles (`IDLE`), the host paces it: GPU_0 is its busy time and host_0
its step. Else GPU_0 is the step, and host_0 what launching one took from an idle GPU.

No step of the recipe itself enters, so the measured step is a test of the prediction, and of the ledger.

Without `ModuleTime`s (on a CPU, in an older Recording) the linear layers' benchmark takes their place:
P = W_0 - G_0 (1 - C_r / C_0), with G_0 the baseline's GEMM bucket and C the benchmark with quantization; nothing is
then known of fused casts, or of the host.

The naive reading of a GEMM benchmark is W_0 / s: the step sped up by the factor s of its GEMMs alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from lowprec_callback.analyze.gemms import GemmTotals, speedup
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.statistics import median_interval
from lowprec_callback.analyze.traceview import KernelGroup, TraceView
from lowprec_callback.recording import HostTime, ModuleTime, direction_of
from lowprec_callback.report import Figure, Ledger, Prediction, merge_facts

IDLE = 0.10
"""Share of the baseline's step from which the host sets its pace."""

SPREAD = 0.04
"""Half-width, relative to the predicted step, of what the formula leaves out: clocks that a recipe settles at, caches,
how evenly the host runs. From the errors in docs/prediction.md (benchmarks/prediction.py on an H200)."""

QUEUE = 900
"""Kernels in a step from which a full launch queue (1024) makes the host wait for the GPU, so that its time from an
idle GPU is only an upper bound, unless the GPU soon followed."""

FOLLOWED = 0.2
"""Share of the step that the GPU may still work after the host is done, for the host's time to be its own."""

REACH = 16
"""How far from the model's own tokens a break-even is looked for, down and up."""

STEPS_OF_REACH = 161

ROUNDED = 128
"""A break-even is given in multiples of so many tokens."""

DIRECTIONS = ("forward", "backward")

Key = tuple[str, str]
"""(path of the module that was copied, direction)."""


@dataclass(frozen=True)
class Side:
    """What is known of the baseline, or of a recipe."""

    name: str
    step: Figure
    """Of the recipe it is only what the prediction is held against."""
    bench: GemmTotals


@dataclass(frozen=True)
class Ground:
    """What all predictions of a Recording rest on."""

    base: Side
    ledger: Ledger | None
    no_ledger: str | None
    views: Sequence[TraceView]
    hosts: Sequence[tuple[int, HostTime]]
    modules: Sequence[tuple[int, ModuleTime]]
    micro_batches: int = 1


@dataclass(frozen=True)
class _Kind:
    """One kind of module under baseline and recipe, in one direction."""

    key: Key
    alike: int
    tokens: int
    spent: float
    """S: milliseconds in the baseline's step."""
    own: tuple[Figure, Figure]
    """T at the model's tokens: baseline, recipe."""
    trend: tuple[int, float, float] | None
    """Other tokens, and T there: baseline, recipe."""
    host: float
    """h_r - h_0."""


def predict(ground: Ground, recipe: Side) -> Prediction:
    """See the module's docstring."""
    naive = _naive(ground.base.step, ground.base.bench, recipe.bench)
    whole, ledger = ground.base.step.value, ground.ledger
    if whole is None or ledger is None:
        why = ground.base.step.reason if whole is None else f"no ledger of {ground.base.name}: {ground.no_ledger}"
        return _told(Figure.missing("ms", why or "unknown"), recipe.step, naive)
    if not any(time.recipe == recipe.name for _, time in ground.modules):
        return _told(_from_gemms(ground.base, ledger, recipe.bench), recipe.step, naive, basis=FROM_GEMMS)
    try:
        kinds = _kinds(ground, recipe.name)
    except _Missing as error:
        return _told(Figure.missing("ms", str(error)), recipe.step, naive)

    paced = (ledger.idle.value or 0.0) >= IDLE * whole
    start = ledger.busy if paced else ground.base.step
    change = math.fsum(kind.spent * (_ratio(kind) - 1) for kind in kinds)
    facts = _facts(ground, recipe.name)
    gpu = Figure((start.value or 0.0) + change, "ms", "estimated", facts=facts)
    added, host = _host(ground, recipe.name, kinds, paced, whole)
    drawn = [max(gpu.value or 0.0, each + added) for each in host] or [gpu.value or 0.0]
    value = statistics.fmean(drawn)
    half = _half_width(ground.base.step, kinds, value, drawn)
    step = Figure(value, "ms", "estimated", value - half, value + half, facts=facts)
    host_ms = (
        Figure(statistics.median(host) + added, "ms", "estimated", facts=facts)
        if host
        else Figure.missing("ms", _why_no_host(ground))
    )
    bound = "host" if host_ms.value is not None and host_ms.value > (gpu.value or 0.0) else "GPU"
    tokens, words = _break_even(ground, ledger, kinds, (statistics.median(host), added) if host else None)
    return _told(step, recipe.step, naive, gpu, host_ms, bound, FROM_MODULES, tokens, words)


FROM_MODULES = "the baseline's ledger, each kind of module timed by itself, and the host's launch times"
FROM_GEMMS = "the baseline's ledger and the GEMM benchmark with quantization; nothing is known of the host"


class _Missing(Exception):
    """Why there is no prediction."""


def _told(
    step: Figure,
    measured: Figure,
    naive: Figure,
    gpu: Figure | None = None,
    host: Figure | None = None,
    bound: str = "",
    basis: str = "",
    pays_from: Figure | None = None,
    pays: str = "",
) -> Prediction:
    unknown = Figure.missing("ms", step.reason or "not told apart by this way of predicting")
    return Prediction(
        step_ms=step,
        error=_error(step, measured),
        naive_ms=naive,
        naive_error=_error(naive, measured),
        gpu_ms=gpu or unknown,
        host_ms=host or unknown,
        bound=bound,
        basis=basis,
        pays_from=pays_from or Figure.missing("tokens", step.reason or "modules were timed at one size only"),
        pays=pays,
    )


def _error(predicted: Figure, measured: Figure) -> Figure:
    """predicted / measured - 1 [1]."""
    for side in (predicted, measured):
        if side.value is None:
            return Figure.missing("1", side.reason or "missing")
    assert predicted.value is not None
    assert measured.value is not None
    value = predicted.value / measured.value - 1
    return Figure(value, "1", "estimated", facts=merge_facts((predicted, measured)))


def _naive(step: Figure, base: GemmTotals, recipe: GemmTotals) -> Figure:
    factor = speedup(base.kernel, recipe.kernel)
    if step.value is None or not factor.value:
        return Figure.missing("ms", step.reason or factor.reason or "missing")
    return Figure(step.value / factor.value, "ms", "estimated", facts=merge_facts((step, factor)))


def _from_gemms(base: Side, ledger: Ledger, recipe: GemmTotals) -> Figure:
    parts = (base.step, ledger.buckets["gemm"], base.bench.autocast, recipe.autocast)
    for part in parts:
        if part.value is None:
            return Figure.missing("ms", part.reason or "missing")
    whole, gemm, before, after = (part.value or 0.0 for part in parts)
    if before <= 0:
        return Figure.missing("ms", "the benchmark of the baseline took no time")
    value = whole - gemm * (1 - after / before)
    half = math.hypot(base.step.half_width or 0.0, SPREAD * value)
    return Figure(value, "ms", "estimated", value - half, value + half, facts=merge_facts(parts))


def _kinds(ground: Ground, recipe: str) -> list[_Kind]:
    """Raises `_Missing` where a kind was not timed under both recipes."""
    times: dict[tuple[str, Key, bool], tuple[int, ModuleTime]] = {}
    for line, time in ground.modules:
        times[time.recipe, (time.module, time.direction), time.own] = (line, time)
    spent = _spent(ground.views, {time.module: time.alike for _, time in ground.modules})
    found = []
    for key in dict.fromkeys((time.module, time.direction) for _, time in ground.modules):
        both = [times.get((name, key, True)) for name in (ground.base.name, recipe)]
        figures = [_figure(each, key, name) for each, name in zip(both, (ground.base.name, recipe), strict=True)]
        (_, before), (_, after) = [each for each in both if each is not None]
        others = [times.get((name, key, False)) for name in (ground.base.name, recipe)]
        found.append(
            _Kind(
                key=key,
                alike=len(before.alike),
                tokens=before.tokens,
                spent=spent[key],
                own=(figures[0], figures[1]),
                trend=_trend(others, key),
                host=(after.host_ms or 0.0) - (before.host_ms or 0.0),
            )
        )
    return found


def _figure(found: tuple[int, ModuleTime] | None, key: Key, recipe: str) -> Figure:
    where = f"{key[0]} {key[1]} under {recipe}"
    if found is None:
        raise _Missing(f"{where} was not timed by itself")
    line, time = found
    samples = [ms for ms in time.samples_ms if math.isfinite(ms) and ms > 0]
    if time.failure or not samples:
        raise _Missing(f"{where} could not be timed by itself: {time.failure or 'no sample'}")
    estimate = median_interval({0: samples}, resamples=1000)
    lines = lines_of("module_time", [line])
    return Figure(estimate.value, "ms", "measured", estimate.low, estimate.high, estimate.n, lines)


def _trend(found: Sequence[tuple[int, ModuleTime] | None], key: Key) -> tuple[int, float, float] | None:
    if any(each is None for each in found):
        return None
    try:
        values = [_figure(each, key, "").value or 0.0 for each in found]
    except _Missing:
        return None
    first = found[0]
    assert first is not None
    return first[1].tokens, values[0], values[1]


def _spent(views: Sequence[TraceView], alike: Mapping[str, Sequence[str]]) -> dict[Key, float]:
    """Kernel milliseconds a step of all modules of each kind, by direction; overlap is not taken out."""
    kind_of = {path: module for module, paths in alike.items() for path in paths}
    spent: dict[Key, float] = dict.fromkeys(product(alike, DIRECTIONS), 0.0)
    for view in views:
        for group in view.groups:
            module = kind_of.get(group.module) or kind_of.get(group.module.rpartition(".")[0])
            direction = _direction(group)
            if module is not None and direction:
                spent[module, direction] += group.ms / len(views)
    return spent


def _direction(group: KernelGroup) -> str:
    """The phase says it; where none is known, a GEMM's role does. What activation checkpointing runs again counts as
    backward, in which it runs."""
    if group.phase in DIRECTIONS:
        return group.phase
    return direction_of(group.role)


def _ratio(kind: _Kind) -> float:
    before, after = kind.own
    return (after.value or 0.0) / (before.value or 1.0)


def _facts(ground: Ground, recipe: str) -> tuple[str, ...]:
    used = [line for line, time in ground.modules if time.recipe in (ground.base.name, recipe)]
    trace = lines_of("trace", (view.line for view in ground.views))
    hosts = lines_of("host_time", (line for line, _ in ground.hosts))
    return (*ground.base.step.facts, *trace, *lines_of("module_time", used), *hosts)


def _host(ground: Ground, recipe: str, kinds: Sequence[_Kind], paced: bool, whole: float) -> tuple[float, list[float]]:
    """(what the recipe adds to the host's step, samples of the baseline's) [ms]; no samples where it is not known."""
    added = ground.micro_batches * math.fsum(kind.alike * kind.host for kind in kinds)
    added += ground.micro_batches * (_region(ground, recipe) - _region(ground, ground.base.name))
    if paced:
        return added, [whole]
    if _why_no_host(ground):
        return added, []
    return added, [min(host.ms, whole) for _, host in ground.hosts if math.isfinite(host.ms)]


def _region(ground: Ground, recipe: str) -> float:
    """Host milliseconds for a region and the start of a backward pass: the median over the kinds that were timed."""
    by_kind: dict[str, float] = {}
    for _, time in ground.modules:
        if time.recipe == recipe and time.own and time.region_ms is not None:
            by_kind[time.module] = by_kind.get(time.module, 0.0) + time.region_ms
    return statistics.median(by_kind.values()) if by_kind else 0.0


def _why_no_host(ground: Ground) -> str:
    if not ground.hosts:
        return f"no host time of {ground.base.name} was recorded"
    kernels = statistics.fmean(len(view.start_ms) for view in ground.views) if ground.views else 0.0
    whole = ground.base.step.value or 0.0
    if kernels >= QUEUE and any(host.drain_ms > FOLLOWED * whole for _, host in ground.hosts):
        return "the step fills the launch queue, so that the host's own time for it is not known; it waits for the GPU"
    return ""


def _half_width(step: Figure, kinds: Sequence[_Kind], value: float, drawn: Sequence[float]) -> float:
    """In quadrature: the baseline's step, each kind's ratio, the host's scatter, and `SPREAD`."""
    parts = [step.half_width or 0.0, SPREAD * value]
    for kind in kinds:
        widths = [figure.half_width for figure in kind.own]
        if all(width is not None for width in widths):
            relative = math.hypot(*((w or 0.0) / (f.value or 1.0) for w, f in zip(widths, kind.own, strict=True)))
            parts.append(kind.spent * _ratio(kind) * relative)
    if len(drawn) > 1:
        parts.append(2 * statistics.stdev(drawn) / math.sqrt(len(drawn)))
    return math.hypot(*parts)


def _break_even(
    ground: Ground, ledger: Ledger, kinds: Sequence[_Kind], host: tuple[float, float] | None
) -> tuple[Figure, str]:
    """From how many tokens a micro-batch the recipe's step is the shorter one, and the same as a sentence.

    With x tokens in place of the model's M: T(x) is the straight line through the two sizes that were timed; the
    optimizer and the host stay as they are; all other work goes with x / M. x is looked for on a geometric grid from
    M / 16 to 16 M; below and above the sizes that were timed the line is an extrapolation.
    """
    if any(kind.trend is None for kind in kinds):
        return Figure.missing("tokens", "modules were not timed at a second number of tokens"), ""
    tokens = max(kinds, key=lambda kind: kind.spent).tokens
    fixed = ledger.buckets["optimizer"].value or 0.0
    rest = (ledger.busy.value or 0.0) - fixed - math.fsum(kind.spent for kind in kinds)

    def step(share: float, side: int) -> float:
        modules = math.fsum(kind.spent * _line(kind, share, side) / (kind.own[0].value or 1.0) for kind in kinds)
        gpu = fixed + max(rest, 0.0) * share + modules
        return max(gpu, host[0] + side * host[1]) if host is not None else gpu

    grid = [REACH ** (2 * i / (STEPS_OF_REACH - 1) - 1) for i in range(STEPS_OF_REACH)]
    pays = [step(share, 1) < step(share, 0) for share in grid]
    first = len(pays)
    while first and pays[first - 1]:
        first -= 1
    facts = _facts(ground, "")
    if first == len(pays):
        most = _tokens(tokens * REACH)
        why = f"it does not pay up to {most} tokens a micro-batch"
        return Figure.missing("tokens", why), f"{why} (now {_tokens(tokens)})"
    if first == 0:
        least = tokens / REACH
        return Figure(least, "tokens", "estimated", facts=facts), (
            f"it pays from fewer than {_tokens(least)} tokens a micro-batch (now {_tokens(tokens)})"
        )
    found = max(ROUNDED, ROUNDED * round(tokens * grid[first] / ROUNDED))
    return Figure(float(found), "tokens", "estimated", facts=facts), (
        f"it pays from about {_tokens(found)} tokens a micro-batch (now {_tokens(tokens)})"
    )


def _line(kind: _Kind, share: float, side: int) -> float:
    """T at `share` of the model's tokens [ms], never below zero."""
    assert kind.trend is not None
    there, *values = kind.trend
    own = kind.own[side].value or 0.0
    slope = (own - values[side]) / (kind.tokens - there)
    return max(own + slope * kind.tokens * (share - 1), 0.0)


def _tokens(number: float) -> str:
    return f"{round(number):,}"
