"""Findings about a step in which nothing runs: the batch is late, the host launches too slowly, or it waits."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from lowprec_callback.analyze.finding_case import Case, ms_text, rests_on, share
from lowprec_callback.analyze.findings_host import stalled
from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.idle import split_idle
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.reading import IDLE_LOW, launch_bound
from lowprec_callback.analyze.traceview import Wait
from lowprec_callback.report import Figure, Finding

WAIT = 0.10
"""Share of the step from which the time before the first forward kernel is worth telling: below it, the host's own
way through the training loop explains it."""

SYNCHRONIZED = 0.03
"""Share of the step from which idle time behind the host's waits is worth telling."""

WAITS_TOLD = 3
"""Places that wait which the evidence names."""

BESIDE = 0.005
"""Share of the step from which another cause of idle time is mentioned beside the one that a finding is about."""

FUSED_OPTIMIZER = re.compile(r"(?i)fused|adamfunctor|sgdfunctor")
"""Kernels of an optimizer that updates many parameters in one launch."""


def data_wait(case: Case) -> Figure:
    """What the batch costs the step [ms]: it is fetched and moved, and callbacks run.

    On a GPU, the ledger's idle time with that cause: work that was launched before may cover the rest. On a CPU, the
    time from the step's begin to the first operator of its forward pass, as a share of the traced step. With several
    micro-batches, only the first is seen.
    """
    return _first_forward(case) if case.on_cpu else idle_part(case, "data")


def idle_part(case: Case, cause: str) -> Figure:
    """The idle time of the GPU that has this cause [ms]; see `analyze.idle`."""
    ledger = case.part.ledger
    if ledger is None:
        return Figure.missing("ms", case.part.no_ledger or "no traced step was recorded")
    missing = Figure.missing("ms", ledger.idle_note or f"the idle time is not split into {cause} and others")
    if case.torn is not None:
        return Figure.missing("ms", case.torn)
    return ledger.idle_parts.get(cause, missing)


def _first_forward(case: Case) -> Figure:
    waits: list[float] = []
    for _, trace in case.traces:
        labels = trace.labels
        times = zip(trace.launch_us, trace.start_us, trace.phase, strict=False)
        found = [
            launch if math.isfinite(launch) else start for launch, start, phase in times if labels[phase] == "forward"
        ]
        if not found:
            return Figure.missing("ms", "a traced step does not tell where its forward pass began")
        waits.append(max(min(found), 0.0) / 1e3)
    ledger, scale = case.part.ledger, case.stretch
    if not waits or ledger is None or scale is None:
        return Figure.missing("ms", case.part.no_ledger or "no traced step was recorded")
    ms = math.fsum(waits) / len(waits) * scale
    facts = lines_of("trace", (line for line, _ in case.traces))
    return Figure(ms, "ms", "estimated", n=len(waits), facts=facts)


def find_data_wait(case: Case) -> Finding | None:
    """The GPU has nothing to do because the batch is late."""
    wait = data_wait(case)
    part = share(wait.value, case.wall)
    if part is None or wait.value is None or part < WAIT:
        return None
    took = f"{ms_text(wait.value)} ({part:.0%}) of the step"
    if case.on_cpu:
        sentence, seen = f"{took} pass before its forward pass begins", "first operator of the forward phase"
    else:
        sentence, seen = f"For {took} the GPU is idle before there is a batch", "idle while the host gets data (ledger)"
    return case.found(
        "data-wait",
        wait,
        f"{sentence}: the batch is fetched and moved there, and callbacks run.",
        [rests_on(seen, wait)],
        "Give the DataLoader more workers (num_workers, persistent_workers=True, pin_memory=True), and look at what "
        "callbacks do between batches. No precision recipe shortens this.",
    )


def find_launch_bound(case: Case) -> Finding | None:
    """The host cannot launch the step's kernels faster."""
    part = case.part
    if not launch_bound(part, case.on_cpu) or part.host_ms.value is None or not case.wall or part.ledger is None:
        return None
    idle, beside = part.ledger.idle, ""
    starved = idle_part(case, "launch-starved")
    if starved.value is not None:
        # What the host spends on the batch, in waits or on other work is no launching: see the other findings.
        stall = stalled(case, starved)
        if stall.value is not None:
            starved = replace(starved, value=starved.value - stall.value, low=None, high=None)
        if starved.value is None or starved.value < IDLE_LOW * case.wall:
            return None
        beside = _beside(case, stall)
        idle = starved
    evidence = [rests_on(f"host time of a step {ms_text(part.host_ms.value)} of {ms_text(case.wall)}", part.host_ms)]
    took = ms_text(idle.value or 0.0)
    evidence.append(rests_on(f"GPU idle {took} a step{beside}", idle))
    kernels, optimizer = case.launches(), case.launches(lambda group: group.bucket == "optimizer")
    if kernels:
        evidence.append(f"{kernels:.0f} kernels and copies a step")
    graphs = "te.make_graphed_callables" if case.te else "torch.cuda.make_graphed_callables"
    advice = [f"capture the layers as CUDA graphs ({graphs})", "or give each launch more work (a larger micro-batch)"]
    fused = any(FUSED_OPTIMIZER.search(g.name) for view in case.views for g in view.groups if g.bucket == "optimizer")
    if kernels and optimizer >= 0.1 * kernels and not fused:
        advice.append(f"or a fused optimizer ({optimizer:.0f} of {kernels:.0f} launches are the optimizer's)")
    return case.found(
        "launch-bound",
        idle,
        f"The host needs {ms_text(part.host_ms.value)} to launch a step that takes {ms_text(case.wall)}; "
        f"the GPU is idle for {took} of it{beside}. Faster kernels cannot help.",
        evidence,
        f"{advice[0][0].upper()}{', '.join(advice)[1:]}.",
    )


def _beside(case: Case, stall: Figure) -> str:
    """`, beside 12.0 ms in which the batch is late`: what else the GPU is idle for."""
    told = []
    for part, what in (
        (idle_part(case, "data"), "in which the batch is late"),
        (idle_part(case, "synchronization"), "behind waits of the host"),
        (stall, "in which the host does something else"),
    ):
        if part.value and case.wall and part.value >= BESIDE * case.wall:
            told.append(f"{ms_text(part.value)} {what}")
    return f", beside {' and '.join(told)}" if told else ""


def find_synchronization(case: Case) -> Finding | None:
    """The host waits for the GPU in the middle of the step, and the GPU then for the host."""
    idle = idle_part(case, "synchronization")
    part = share(idle.value, case.wall)
    if part is None or idle.value is None or part < SYNCHRONIZED:
        return None
    places = _waits(case)
    if not places:
        return None
    (wait, _, _), others = places[0], len(places) - 1
    told = [
        f"{ms:.2f} ms of idle behind {number:.3g} a step of {_call(each)} {_place(each)}"
        for each, ms, number in places[:WAITS_TOLD]
    ]
    more = [f"and {others + 1 - WAITS_TOLD} more places"] if others >= WAITS_TOLD else []
    also = f" Of {others + 1} places that wait it is the costliest." if others else ""
    return case.found(
        "synchronization",
        idle,
        f"For {ms_text(idle.value)} ({part:.0%}) of the step the GPU is idle because the host had waited for it, above "
        f"all in {_call(wait)} {_place(wait)}.{also}",
        [
            rests_on(f"idle behind waits of the host {ms_text(idle.value)} (ledger)", idle),
            *(f"{text}, in the traced steps" for text in told),
            *more,
        ],
        _advice_against(wait),
    )


def _waits(case: Case) -> list[tuple[Wait, float, float]]:
    """(a wait of this place, idle ms a traced step behind it, calls a step), the costliest first."""
    found: dict[tuple[str, ...], tuple[Wait, float, int]] = {}
    for view in case.views:
        for wait, ms in split_idle(view).behind:
            key = (wait.call, wait.op, operation(wait.module) if wait.module else "", wait.phase)
            _, before, number = found.get(key, (wait, 0.0, 0))
            found[key] = (wait, before + ms, number + 1)
    steps = max(len(case.views), 1)
    rows = [(wait, ms / steps, number / steps) for wait, ms, number in found.values() if ms > 0]
    return sorted(rows, key=lambda row: -row[1])


def _call(wait: Wait) -> str:
    """`aten::_local_scalar_dense (cudaStreamSynchronize)`."""
    return f"{wait.op} ({wait.call})" if wait.op else wait.call


def _place(wait: Wait) -> str:
    phase = f"the {wait.phase} phase" if wait.phase else "no phase of the step"
    where = {"forward": "training_step", "data": "the data phase, between steps"}.get(wait.phase, phase)
    return f"in {operation(wait.module)}, {phase}" if wait.module else f"in {where}, outside of the model's modules"


_VALUE_READ = re.compile(r"aten::(?:item|_local_scalar_dense|is_nonzero|equal)")
_SIZE_READ = re.compile(r"aten::(?:nonzero\w*|masked_select|index\w*|unique\w*|repeat_interleave|bincount)")
_MOVE = re.compile(r"aten::(?:_?to(?:_copy)?|copy_|cpu|pin_memory|cuda)")


def _advice_against(wait: Wait) -> str:
    if _VALUE_READ.fullmatch(wait.op):
        return (
            "A value is read back from the GPU there (.item(), float(), print, an if on a tensor): keep it a tensor, "
            "and log it detached and every n-th step only."
        )
    if _SIZE_READ.fullmatch(wait.op):
        return (
            "The size of a result depends on values there (a boolean mask as index, nonzero, unique), so the host must "
            "know them: use torch.where or fixed sizes."
        )
    if _MOVE.fullmatch(wait.op) or "memcpy" in wait.call.lower():
        return (
            "Data is copied between host and GPU there: pin its memory and copy with non_blocking=True, and read "
            "results back after the step."
        )
    if "Free" in wait.call:
        return (
            "Memory is given back to the driver there, which waits for the GPU: avoid torch.cuda.empty_cache() in the "
            "step, and leave the allocator room."
        )
    return "Take the synchronize call out of the step, or call it every n-th step only."
