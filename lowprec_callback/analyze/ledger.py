"""One step's wall time, split without gaps or overlaps.

    wall = sum of buckets + idle + residual                      [ms, exact by construction]

`wall` comes from timed steps, with nothing attached; the buckets come from traced steps. On a GPU, tracing
slows the host but not the kernels, so the two can be put together. On a CPU the "kernels" are the host's
own operators, which tracing does stretch; there the split of the traced step is scaled to the timed one,
and says so.

Every instant in which something runs is owned by exactly one kernel (`intervals.owned_lengths`), so busy time can be
summed by bucket or by place in the model, and both sums are the same. What communication runs behind other work is
owned by that: it is told beside the sum, never in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.idle import idle_parts
from lowprec_callback.analyze.intervals import owned_lengths, union_length
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.traceview import TraceView
from lowprec_callback.report import BUCKETS, Figure, Ledger, Origin, PlaceTime

Floats = NDArray[np.float64]

RESIDUAL_LIMIT = 0.01
"""Share of the step's wall time above which a residual makes the ledger incomplete."""

OTHER_LIMIT = 0.01
"""Share of the step's wall time above which unknown kernels make the ledger incomplete."""

OTHER_LIMIT_CPU = 0.10
"""The same on a CPU, where `other` is views, allocation and the autograd engine: known work of no kind."""

UNKNOWN_SHOWN = 20
"""Unknown kernel names that a ledger lists."""

PRIORITY = (
    "gemm",
    "attention",
    "quantize",
    "amax",
    "hadamard",
    "scale",
    "norm",
    "activation",
    "loss",
    "optimizer",
    "elementwise",
    "other",
    "copy",
    "communication",
)
"""Who owns an instant in which several kernels run. Copies and communication come last: what computation
hides costs the step nothing, and only exposed communication is booked as such."""

_RANK = {bucket: rank for rank, bucket in enumerate(PRIORITY)}
assert set(PRIORITY) == set(BUCKETS)


def ledger(views: Sequence[TraceView], wall: Figure, device_type: str) -> tuple[Ledger | None, str | None]:
    """The ledger of one recipe's step, or None and the reason why there is none.

    For each traced step i the kernels' union is split by priority into buckets b_i,k [ms]; a bucket is the
    mean over the traced steps, so that busy = sum of buckets holds exactly (medians would not add up):

        bucket_k = mean_i b_i,k      busy = sum_k bucket_k      traced idle = mean_i(traced wall_i) - busy

    On a GPU the traced idle is an upper bound, because tracing only makes the host slower:

        idle = min(max(wall - busy, 0), traced idle)         residual = wall - busy - idle

    A negative residual: the kernels took longer while traced than the whole timed step. A positive one: time
    that neither kernels nor idle of the traced step account for, such as kernels that the tracer lost.

    On a CPU everything is scaled by f = wall / mean_i(traced wall_i): bucket_k = f mean_i b_i,k, idle = f
    traced idle (time in no operator: Python and the framework), and the residual is zero by construction.
    """
    if wall.value is None:
        return None, f"no step time to split: {wall.reason}"
    if not views:
        return None, "no traced step was recorded"
    traced_ms = math.fsum(view.wall_ms for view in views) / len(views)
    if wall.value <= 0 or traced_ms <= 0:
        return None, "the step's wall time is zero"

    on_cpu = device_type == "cpu"
    scale = wall.value / traced_ms if on_cpu else 1.0
    origin: Origin = "estimated" if on_cpu else "measured"
    derived: Origin = "estimated" if on_cpu else "derived"
    facts = lines_of("trace", (view.line for view in views))
    shares = [owned(view) for view in views]
    each = [_by_bucket(view, share) * scale for view, share in zip(views, shares, strict=True)]
    totals = np.sum(each, axis=0) / len(views)
    times = {bucket: float(totals[_RANK[bucket]]) for bucket in BUCKETS}

    busy = math.fsum(times.values())
    traced_idle = max(traced_ms * scale - busy, 0.0)
    idle = min(max(wall.value - busy, 0.0), traced_idle)
    residual = math.fsum([wall.value, *(-time for time in times.values()), -idle])
    complaints = [*_missing_gemms(views, on_cpu), *_too_much(residual, times["other"], wall.value, on_cpu)]
    note = None
    if on_cpu:
        note = (
            f"On a CPU tracing stretches the operators themselves: the traced step took {traced_ms:.1f} ms, "
            f"the timed one {wall.value:.1f} ms. So every part of the traced step is scaled by {scale:.3f}: "
            f"shares are measured, milliseconds estimated. Idle is time in no operator (Python, framework): "
            f"nothing is launched there, so it is not split."
        )
    both = (*facts, *wall.facts)
    idle_figure = Figure(idle, "ms", derived, facts=both)
    busy_figure = Figure(busy, "ms", origin, n=len(views), facts=facts)
    causes = idle_parts(views, idle_figure, on_cpu)
    return (
        Ledger(
            wall=wall,
            buckets={bucket: Figure(time, "ms", origin, n=len(views), facts=facts) for bucket, time in times.items()},
            idle=idle_figure,
            residual=Figure(residual, "ms", derived, facts=both),
            busy=busy_figure,
            complete=not complaints,
            complaints=tuple(complaints),
            traced_wall=Figure(traced_ms, "ms", "measured", n=len(views), facts=facts),
            note=note,
            unknown_kernels=_unknown(views),
            places=_places(views, shares, scale, busy_figure),
            hidden_communication=_hidden(views, shares, scale, busy_figure),
            idle_parts=causes.figures,
            idle_note=causes.note,
            steps={bucket: tuple(float(step[_RANK[bucket]]) for step in each) for bucket in BUCKETS},
        ),
        None,
    )


def bucket_times(view: TraceView) -> Floats:
    """Milliseconds of each bucket in one traced step, in the order of `PRIORITY`; they sum to the union."""
    return _by_bucket(view, owned(view))


def owned(view: TraceView) -> Floats:
    """Milliseconds of a traced step that each kernel owns: of several at once, the first of the first bucket."""
    return owned_lengths(view.start_ms, view.end_ms, _ranks(view))


def _ranks(view: TraceView) -> NDArray[np.intp]:
    of_group = np.array([_RANK.get(group.bucket, _RANK["other"]) for group in view.groups], dtype=np.intp)
    return of_group[view.group] if len(view.groups) else view.group


def _by_bucket(view: TraceView, share: Floats) -> Floats:
    return np.asarray(np.bincount(_ranks(view), weights=share, minlength=len(PRIORITY)), dtype=np.float64)


def _places(views: Sequence[TraceView], shares: Sequence[Floats], scale: float, like: Figure) -> tuple[PlaceTime, ...]:
    """The busy time by operation, role (else phase) and bucket: means over the traced steps, in ms as `like`."""
    times: dict[tuple[str, str, str], float] = {}
    kernels: dict[tuple[str, str, str], int] = {}
    for view, share in zip(views, shares, strict=True):
        per_group = np.bincount(view.group, weights=share, minlength=len(view.groups))
        for group, ms in zip(view.groups, per_group.tolist(), strict=True):
            bucket = group.bucket if group.bucket in _RANK else "other"
            key = (operation(group.module) if group.module else "", group.role or group.phase, bucket)
            times[key] = times.get(key, 0.0) + ms
            kernels[key] = kernels.get(key, 0) + group.count
    made = [
        PlaceTime(*key, replace(like, value=ms * scale / len(views)), kernels[key] / len(views))
        for key, ms in times.items()
    ]
    return tuple(
        sorted(made, key=lambda place: (-round(place.ms.value or 0.0, 9), place.operation, place.where, place.bucket))
    )


def _costliest_first(place: PlaceTime) -> tuple[float, str, str, str]:
    """Rounded, so that what rounding leaves of equal times decides nothing."""
    return -round(place.ms.value or 0.0, 9), place.operation, place.where, place.bucket


def _hidden(views: Sequence[TraceView], shares: Sequence[Floats], scale: float, like: Figure) -> Figure | None:
    """Union of the communication kernels less what of it is exposed: mean over the traced steps, in ms as `like`."""
    found, seen = 0.0, False
    for view, share in zip(views, shares, strict=True):
        rows = _ranks(view) == _RANK["communication"]
        seen = seen or bool(rows.any())
        found += max(union_length(view.start_ms[rows], view.end_ms[rows]) - float(share[rows].sum()), 0.0)
    return replace(like, value=found * scale / len(views)) if seen else None


def _missing_gemms(views: Sequence[TraceView], on_cpu: bool) -> list[str]:
    """Traced steps that show fewer GEMM kernels than the operand witness counted calls."""
    complaints = []
    for view in views:
        if view.expected_gemms is None:
            continue
        found = sum(group.count for group in view.groups if group.is_linear_gemm)
        if found < view.expected_gemms:
            what = "operators" if on_cpu else "kernels"
            complaints.append(
                f"a traced step (line {view.line}) shows {found} linear-layer GEMM {what}, but "
                f"{view.expected_gemms} calls were counted in it: {what} were lost, or not recognised"
            )
    return complaints


def _too_much(residual: float, other: float, wall: float, on_cpu: bool) -> list[str]:
    complaints = []
    limit = OTHER_LIMIT_CPU if on_cpu else OTHER_LIMIT
    if abs(residual) > RESIDUAL_LIMIT * wall:
        side = (
            "the kernels took longer while traced than the whole timed step"
            if residual < 0
            else "neither kernels nor idle of the traced step account for it"
        )
        complaints.append(
            f"the residual is {residual:+.2f} ms, {abs(residual) / wall:.1%} of the step "
            f"(limit {RESIDUAL_LIMIT:.0%}): {side}"
        )
    if other > limit * wall:
        complaints.append(f"unknown work takes {other:.2f} ms, {other / wall:.1%} of the step (limit {limit:.0%})")
    return complaints


def _unknown(views: Sequence[TraceView]) -> tuple[str, ...]:
    times: dict[str, float] = {}
    for view in views:
        for group in view.groups:
            if _RANK.get(group.bucket, _RANK["other"]) == _RANK["other"]:
                times[group.name] = times.get(group.name, 0.0) + group.ms
    return tuple(sorted(times, key=lambda name: (-times[name], name))[:UNKNOWN_SHOWN])
