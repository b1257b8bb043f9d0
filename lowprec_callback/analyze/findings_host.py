"""Findings about a host that is late in a part of the step: by many launches, or by other work between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowprec_callback.analyze.finding_case import Case, ms_text, rests_on, share
from lowprec_callback.analyze.reading import IDLE_LOW, launch_bound
from lowprec_callback.analyze.traceview import TraceView
from lowprec_callback.report import Figure, Finding

LONG_MS = 5.0
"""A gap from which it is no launching: the longest in which the host was late in the recorded steps of CodonFM 5B on an
H200 (docs/codonfm-5b) is 0.55 ms, with a profiler that slows each launch."""

STALLED = 0.05
"""Share of the step from which such gaps are worth telling."""

_COPY_BACK = "Memcpy HtoD"


@dataclass(frozen=True)
class Late:
    """A gap in which the GPU could run nothing, because the host had launched nothing."""

    phase: str
    """Of the kernel that ends it; empty: not known."""
    ms: float
    """Without what the host spent in waits for the GPU or in the data phase: these are other findings'."""


def late_gaps(view: TraceView) -> list[Late]:
    """The gaps between two kernels of a traced step in which the host was late.

    A gap [a, b) whose next kernel was launched at L counts from a to L, clipped to the gap. What precedes the first
    kernel and follows the last is not counted: the ends of a traced step are ours.
    """
    order = np.argsort(view.start_ms, kind="stable")
    start, launch, group = view.start_ms[order], view.host.launch_ms[order], view.group[order]
    busy_until = np.maximum.accumulate(view.end_ms[order])
    spans = [(wait.start_ms, wait.end_ms) for wait in view.host.waits or ()] + list(view.host.data_ms or ())
    found = []
    for index in np.flatnonzero(start[1:] > busy_until[:-1]) + 1:
        begin, end = float(busy_until[index - 1]), float(min(launch[index], start[index]))
        if not end > begin:  # launched in time; or NaN: its launch is not known
            continue
        ms = end - begin - _covered(spans, begin, end)
        if ms > 0:
            found.append(Late(view.groups[group[index]].phase, ms))
    return found


def _covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How much of [begin, end) the spans cover; they may overlap."""
    covered, at = 0.0, begin
    for first, last in sorted(spans):
        first, last = max(first, at), min(last, end)
        if last > first:
            covered, at = covered + last - first, last
    return covered


def stalled(case: Case, starved: Figure) -> Figure:
    """What of the launch-starved idle [ms a step] long gaps are: the host did something else than launching.

    Missing where the trace shows none.
    """
    long = [gap for view in case.views for gap in late_gaps(view) if gap.ms >= LONG_MS]
    if starved.value is None or not long:
        return Figure.missing("ms", starved.reason or "the trace shows no long gap")
    return _at_most(starved, sum(gap.ms for gap in long) / len(case.views), len(case.views))


def _at_most(starved: Figure, ms: float, n: int) -> Figure:
    """Tracing makes gaps longer: they cost no more than what the ledger says of the timed step."""
    return Figure(min(ms, starved.value or 0.0), "ms", "estimated", n=n, facts=starved.facts)


def find_host_stall(case: Case) -> Finding | None:
    """The host does something else than launching, for long, and the GPU runs dry."""
    ms = stalled(case, _starved(case))
    part = share(ms.value, case.wall)
    if ms.value is None or part is None or part < STALLED:
        return None
    long = [gap for view in case.views for gap in late_gaps(view) if gap.ms >= LONG_MS]
    phase = _main_phase(long)
    copies = case.kernels(lambda group: group.phase == "optimizer" and _COPY_BACK in group.name)
    evidence = [
        rests_on(f"idle in gaps of {LONG_MS:g} ms or more {ms_text(ms.value)} a step (ledger, traced step)", ms),
        f"{len(long) / len(case.views):.3g} of them a step, the longest {ms_text(max(gap.ms for gap in long))}, "
        f"{phase or 'in no phase that is known'}",
    ]
    advice = "Look at what the host does there between two launches (Python, a callback, logging, a file)"
    if copies.value is not None and phase.endswith("in the optimizer phase"):
        evidence.append(rests_on(f"copies from the host in the optimizer phase {ms_text(copies.value)}", copies))
        advice = (
            "Values are copied from the host to the GPU there, as an optimizer does that runs on the CPU: if it is "
            "offloaded, keep it on the GPU"
        )
    return case.found(
        "host-stall",
        ms,
        f"For {ms_text(ms.value)} ({part:.0%}) of the step the GPU is idle because the host does something else than "
        f"launching{', ' + phase if phase else ''}.",
        evidence,
        f"{advice}. Neither a recipe nor graphs of the layers shorten this.",
    )


def find_launch_starved(case: Case) -> Finding | None:
    """A part of the step waits for launches, though the host keeps pace with the step as a whole."""
    starved = _starved(case)
    if starved.value is None or not case.wall or launch_bound(case.part, case.on_cpu):
        return None  # of the whole step `find_launch_bound` tells
    short = [gap for view in case.views for gap in late_gaps(view) if gap.ms < LONG_MS]
    if not short:
        return None
    stall = stalled(case, starved).value or 0.0
    rest = replace(starved, value=max(starved.value - stall, 0.0), low=None, high=None)
    ms = _at_most(rest, sum(gap.ms for gap in short) / len(case.views), len(case.views))
    part = share(ms.value, case.wall)
    if ms.value is None or part is None or part < IDLE_LOW:
        return None
    phase = _main_phase(short)
    evidence = [
        rests_on(f"idle until the next launch {ms_text(ms.value)} a step (ledger)", ms),
        f"{len(short) / len(case.views):.0f} gaps a traced step, {phase or 'in no phase that is known'}",
    ]
    host = case.part.host_ms
    if host.value is not None:
        evidence.append(rests_on(f"host time of a step {ms_text(host.value)} of {ms_text(case.wall)}", host))
    graphs = "te.make_graphed_callables" if case.te else "torch.cuda.make_graphed_callables"
    return case.found(
        "launch-starved",
        ms,
        f"A part of the step is launch-bound: for {ms_text(ms.value)} ({part:.0%}) of it the GPU waits for the next "
        f"launch{', ' + phase if phase else ''}.",
        evidence,
        f"Capture the layers as CUDA graphs ({graphs}), or give each launch more work (a larger micro-batch).",
    )


def _starved(case: Case) -> Figure:
    ledger = case.part.ledger
    if ledger is None or case.on_cpu:
        return Figure.missing("ms", case.part.no_ledger or "nothing is launched on a CPU")
    if case.torn is not None:
        return Figure.missing("ms", case.torn)
    return ledger.idle_parts.get("launch-starved", Figure.missing("ms", ledger.idle_note or "idle is not split"))


def _main_phase(gaps: Sequence[Late]) -> str:
    """`in the forward phase`, or `92% of it in the forward phase`; empty where it is not known."""
    by_phase: dict[str, float] = {}
    for gap in gaps:
        by_phase[gap.phase] = by_phase.get(gap.phase, 0.0) + gap.ms
    name = max(by_phase, key=lambda each: by_phase[each])
    part = by_phase[name] / sum(by_phase.values())
    if not name or part < 0.5:
        return ""
    return f"in the {name} phase" if part > 0.995 else f"{part:.0%} of it in the {name} phase"
