"""Why the GPU ran nothing: the idle time of a step, split into causes that do not overlap and leave nothing out.

A traced step is idle in the gaps of the union of its kernels. Let a gap be [a, b), the kernel that ends it be launched
by the host at L (L = b where the host was later than that, L = a where it was earlier; the end of the step, if no
kernel follows). The GPU could not have run anything in [a, L), for the host had launched nothing; in [L, b) it could:

| cause             | which part of a gap                                                                          |
|-------------------|----------------------------------------------------------------------------------------------|
| `synchronization` | of [a, L), what the host spent blocked in a call that waits for the GPU or for a copy; and    |
|                   | the restart: from the wait's end to the next launch, because a host that does not wait runs  |
|                   | ahead, and the queue would have held the next kernels by then                                |
| `data`            | of the rest, what the host spent in the data phase; and its blocking copies of the batch     |
| `launch-starved`  | the rest of [a, L): the host was on its way, and late                                        |
| `other`           | [L, b): launched, but not started: launch latency, streams that wait for each other; and      |
|                   | gaps whose next kernel has no known launch                                                   |

What a wait costs later, until the host is ahead again, is found in `launch-starved`: `synchronization` is the least
that it costs. A wait that the GPU works through costs nothing, and is not in a gap.

**From the traced step to the timed one.** A traced step is idle for longer, for two reasons: the profiler slows the
host at each launch, and our own synchronize calls at its two ends empty the queue. So causes are not stretched alike,
and the timed step's idle is not simply shared out in proportion: fetching a batch, a wait for the GPU and the GPU's
latency take as long with a profiler as without. The excess E = traced idle - idle is taken

1. from the `boundary`: the idle after the last kernel in which the host was done already and we waited; and as much of
   the first gap as the GPU still worked after the host was done with the step. In a row of steps the host has that
   lead, and the GPU does not run dry while it fetches the next batch;
2. then from `launch-starved`;
3. then, in proportion, from the others.

What is left sums to the timed step's idle exactly. Where the timed idle is zero (the host is ahead throughout), all
parts are. The parts are estimates and say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lowprec_callback.analyze.traceview import TraceView, Wait
from lowprec_callback.report import IDLE_CAUSES, Figure

Floats = NDArray[np.float64]

STARVED, DATA, SYNC, OTHER = IDLE_CAUSES
BOUNDARY = "boundary"
CAUSES = (*IDLE_CAUSES, BOUNDARY)

UNKNOWN_TOLD = 0.01
"""Share of the traced idle that ends with a kernel of unknown launch, from which the split says so."""


@dataclass(frozen=True)
class IdleSplit:
    """The idle of one traced step [ms]."""

    parts: dict[str, float]
    """By cause, `boundary` among them; the sum is the step's idle."""
    unknown: float
    """What of `other` is there because the launch of the kernel that ended the gap is not known."""
    behind: tuple[tuple[Wait, float], ...] = ()
    """Each wait of the host and the idle time that it caused."""

    @property
    def total(self) -> float:
        """The step's idle."""
        return math.fsum(self.parts.values())


@dataclass(frozen=True)
class IdleParts:
    """The idle of the timed step by cause, and what there is to say about it."""

    figures: dict[str, Figure] = field(default_factory=dict)
    """Empty: there is no split, and `note` says why."""
    note: str = ""


def idle_parts(views: Sequence[TraceView], idle: Figure, on_cpu: bool) -> IdleParts:
    """Split the timed step's idle [ms] by cause; see the module's docstring.

    A cause that the Recording cannot tell apart has no entry (old ones hold no waits): its time is in
    `launch-starved`, and the note says so. So the entries always sum to `idle`.
    """
    if on_cpu:
        return IdleParts(note="idle on a CPU is time in no operator: nothing is launched, so it has no causes to split")
    if idle.value is None or not views:
        return IdleParts(note=f"the GPU's idle is not known: {idle.reason or 'no traced step was recorded'}")
    splits = [split_idle(view) for view in views]
    mean = {cause: math.fsum(split.parts[cause] for split in splits) / len(splits) for cause in CAUSES}
    times = _without_tracing(mean, idle.value)
    told, notes = list(IDLE_CAUSES), []
    if any(view.host.waits is None for view in views):
        told.remove(SYNC)
        notes.append("the trace holds no waits of the host: they are in launch-starved")
    if all(view.host.data_ms is None for view in views):
        told.remove(DATA)
        notes.append("the trace does not tell where its data phase is: it is in launch-starved")
    traced = math.fsum(mean.values())
    unknown = math.fsum(split.unknown for split in splits) / len(splits)
    if traced and unknown > UNKNOWN_TOLD * traced:
        notes.append(
            f"{unknown:.2f} ms of the {traced:.2f} ms of the traced step are in other because the launch of the kernel "
            "after them is not known"
        )
    facts = idle.facts
    figures = {cause: Figure(times[cause], "ms", "estimated", n=len(views), facts=facts) for cause in told}
    return IdleParts(figures, "; ".join(notes))


def _without_tracing(traced: dict[str, float], idle: float) -> dict[str, float]:
    """The timed step's idle by cause, from the traced step's, which is longer; they sum to `idle` exactly."""
    left = dict(traced)
    excess = max(math.fsum(traced.values()) - idle, 0.0)
    for cause in (BOUNDARY, STARVED):
        taken = min(left[cause], excess)
        left[cause] -= taken
        excess -= taken
    rest = math.fsum(left[cause] for cause in (DATA, SYNC, OTHER))
    scale = max(rest - excess, 0.0) / rest if rest else 1.0
    found = {STARVED: left[STARVED], DATA: left[DATA] * scale, SYNC: left[SYNC] * scale}
    # Idle that the traced step shows only at its ends has no cause that is known.
    found[OTHER] = max(idle - math.fsum(found.values()), 0.0)
    return found


def split_idle(view: TraceView) -> IdleSplit:
    """The idle of one traced step by cause. The parts sum to wall - union of the kernels within [0, wall]."""
    gaps, launch = _gaps(view)
    late_until = np.where(np.isnan(launch), gaps[:, 0], np.clip(launch, gaps[:, 0], gaps[:, 1]))
    waits = view.host.waits or ()
    blocked, restart = _blocked(waits, view.host.launch_ms, view.wall_ms)
    data, ends = _pairs(view.host.data_ms or ()), _ends(view, gaps)

    # Cut the gaps wherever something changes: each piece has one cause.
    edges = [gaps.ravel(), late_until, *(pairs.ravel() for pairs in (blocked, restart, data, ends))]
    cuts = np.unique(np.clip(np.concatenate(edges), 0.0, view.wall_ms))
    middle, length = (cuts[:-1] + cuts[1:]) / 2, np.diff(cuts)
    gap = _which(gaps, middle)
    middle, length, gap = middle[gap >= 0], length[gap >= 0], gap[gap >= 0]

    waiting, restarting, loading = _which(blocked, middle), _which(restart, middle), _which(data, middle) >= 0
    copies = np.array([*("memcpy" in wait.call.lower() for wait in waits), False])  # the last stands for no wait: -1
    waits_for_gpu = (waiting >= 0) & ~(loading & copies[waiting])
    cause = np.select(
        [_which(ends, middle) >= 0, middle >= late_until[gap], waits_for_gpu, loading, restarting >= 0],
        [CAUSES.index(name) for name in (BOUNDARY, OTHER, SYNC, DATA, SYNC)],
        CAUSES.index(STARVED),
    )
    times = np.bincount(cause, weights=length, minlength=len(CAUSES))
    behind = np.zeros(len(waits))
    hit = cause == CAUSES.index(SYNC)
    np.add.at(behind, np.where(waits_for_gpu, waiting, restarting)[hit], length[hit])
    unknown = length[(cause == CAUSES.index(OTHER)) & np.isnan(launch[gap])].sum()
    parts = {name: float(time) for name, time in zip(CAUSES, times, strict=True)}
    return IdleSplit(parts, float(unknown), tuple(zip(waits, behind.tolist(), strict=True)))


def _pairs(spans: Sequence[tuple[float, float]]) -> Floats:
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _which(spans: Floats, instants: Floats) -> NDArray[np.intp]:
    """The row of the span [begin, end) that each instant is in, or -1. Spans are in order of time and disjoint."""
    if not len(spans):
        return np.full(len(instants), -1, dtype=np.intp)
    at = np.searchsorted(spans[:, 0], instants, side="right") - 1
    return np.where((at >= 0) & (instants < spans[at, 1]), at, -1)


def _gaps(view: TraceView) -> tuple[Floats, Floats]:
    """(begin, end) of what no kernel covers of the step, and when the kernel that ends it was launched (NaN: unknown).

    What follows the last kernel is ended by none; it counts as launched at the step's end.
    """
    order = np.argsort(view.start_ms, kind="stable")
    start, end, launch = view.start_ms[order], view.end_ms[order], view.host.launch_ms[order]
    covered = np.concatenate([[0.0], np.maximum(np.maximum.accumulate(end), 0.0)])
    begin, finish = covered, np.concatenate([start, [view.wall_ms]])
    launch = np.concatenate([launch, [view.wall_ms]])
    kept = np.minimum(finish, view.wall_ms) > begin
    spans = np.column_stack([begin[kept], np.minimum(finish[kept], view.wall_ms)])
    return spans, launch[kept]


def _blocked(waits: Sequence[Wait], launch: Floats, wall: float) -> tuple[Floats, Floats]:
    """For each wait when the host was blocked in it, and the restart after it; each of them disjoint.

    Of two threads that wait at once, the one that began first has the time. A restart ends with the next launch, with
    the next wait, or with the step.
    """
    spans = _pairs([(wait.start_ms, wait.end_ms) for wait in waits])
    if not len(spans):
        return spans, spans
    before = np.concatenate([[-np.inf], np.maximum.accumulate(spans[:-1, 1])])
    begin = np.maximum(spans[:, 0], before)
    blocked = np.column_stack([begin, np.maximum(spans[:, 1], begin)])
    known = np.sort(launch[np.isfinite(launch)])
    after = np.concatenate([known, [wall]])[np.searchsorted(known, blocked[:, 1])]
    until = np.minimum(after, np.concatenate([blocked[1:, 0], [max(wall, blocked[-1, 1])]]))
    return blocked, np.column_stack([blocked[:, 1], np.maximum(until, blocked[:, 1])])


def _ends(view: TraceView, gaps: Floats) -> Floats:
    """The parts of the first and of the last gap that are there only because we wait at the ends of a traced step."""
    done, wall = view.host.end_ms, view.wall_ms
    if done is None or not len(view.end_ms):
        return _pairs(())
    last = float(view.end_ms.max())
    spans = []
    if len(gaps) and gaps[0, 0] == 0.0 and last > done:
        spans.append((0.0, min(last - done, float(gaps[0, 1]))))
    if max(last, done) < wall:
        spans.append((max(last, done), wall))
    return _pairs(spans)
