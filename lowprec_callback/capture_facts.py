"""From a capture to the facts of a Recording.

Every step's time becomes a `StepTime`, and the GEMM kernels of all steps a `GemmKernels`. A `Trace`, which holds every
kernel of a step, is made of a few steps only: those of each recipe whose time is nearest to the recipe's median, at
most `TRACED_STEPS`, and fewer where they would hold more than `TRACED_KERNELS` kernels. `Imported` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lowprec_callback.analyze.kernels import bucket_in_context, classify
from lowprec_callback.capture import NONE, Capture, Flags, Ints, Place, Projection, compact, project
from lowprec_callback.capture_error import CaptureError
from lowprec_callback.capture_recipe import FP8, fp8_card, infer
from lowprec_callback.capture_steps import Steps, find_steps
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import (
    End,
    Environment,
    Fact,
    GemmKernels,
    HostPhases,
    HostWaits,
    Imported,
    Problem,
    StepTime,
    Trace,
    direction_of,
)

TRACED_STEPS = 8
TRACED_KERNELS = 12_000
"""Of one recipe, in all its traced steps; a single step may hold more."""

WINDOW_KERNELS = 50_000
"""Of a capture without steps, which is one long step, so many kernels in its middle are looked at."""


@dataclass(frozen=True)
class Found:
    """The facts of a capture, and whether they conclude anything."""

    facts: tuple[Fact, ...]
    recipes: tuple[str, ...]


def facts_of(capture: Capture, cards: Mapping[str, RecipeCard], recipe: str | None = None) -> Found:
    """All facts but the header. `recipe` is what the user says was asked for, where the ranges do not say it.

    Raises:
        CaptureError: no step holds a kernel.
    """
    projection = project(capture)
    mine, complaints = _one_gpu(capture, projection)
    steps, left_out = find_steps(capture, projection, mine)
    steps = _middle(capture, steps, mine)
    inside = steps.of_work != NONE
    if not inside.any():
        raise CaptureError(
            f"{capture.file}: none of its {int(mine.sum())} kernels was launched within a step ({steps.found_by}), so "
            "nothing can be concluded; is the capture window longer than the steps?"
        )
    steps, source, why = _name_recipes(capture, steps, mine, recipe)
    names = tuple(dict.fromkeys(steps.recipe))
    chosen = {name: _nearest_to_median(steps, name) for name in names}
    facts: list[Fact] = [
        Environment(
            device=capture.device or "unknown GPU (the capture does not name it)",
            device_type="cuda",
            compute_capability=capture.compute_capability,
            versions=dict(capture.versions),
            facts=dict(capture.facts),
            variables=dict(capture.variables),
        )
    ]
    if FP8 in names and FP8 not in cards and "fp8_delayed" in cards:
        cards = {**cards, FP8: fp8_card(cards["fp8_delayed"])}
    facts += [cards[name].to_fact(name == _baseline(names)) for name in names if name in cards]
    counts = ", ".join(f"{len(rows)} of {steps.recipe.count(name)} of {name}" for name, rows in chosen.items())
    facts.append(
        Imported(
            tool=capture.tool,
            file=capture.file,
            kernels=int(mine.sum()),
            placed=int((mine & (capture.work.launch != NONE)).sum()),
            steps=steps.found_by,
            traced=f"of each recipe the steps nearest to its median time ({counts})",
            recipe_from=source,
            why_recipe=why,
        )
    )
    facts += _step_times(steps, capture.tool)
    facts += [_trace(capture, projection, steps, row, name) for name, rows in chosen.items() for row in rows]
    tables = [_gemm_kernels(capture, projection, steps, name) for name in names]
    facts += tables
    complaints += [*capture.complaints, *left_out]
    if recipe is not None and source == "ranges":
        complaints.append(f"--recipe {recipe} was not needed: the capture's ranges name the recipe of every step")
    complaints += [
        f"no recipe card is called {name!r}: its verdict needs --recipe" for name in names if name not in cards
    ]
    complaints += [text for table in tables for text in _one_sided(table)]
    facts += [Problem("capture", text) for text in dict.fromkeys(complaints)]
    facts.append(End("finished"))
    return Found(tuple(facts), names)


def _baseline(names: Sequence[str]) -> str:
    """What the other recipes are compared with: the widest."""
    return next((name for name in ("bf16", "fp32") if name in names), names[0])


def _one_gpu(capture: Capture, projection: Projection) -> tuple[Flags, list[str]]:
    """Which kernels are looked at: those of one GPU of one process, with our steps if there are any."""
    work, ranges = capture.work, capture.ranges
    devices, device = compact(work.device)
    owners, owner = compact(work.process * len(devices) + device)
    if len(owners) == 1:
        return np.ones(len(work), dtype=bool), []
    time = np.bincount(owner, weights=work.end - work.start)
    step_names = np.array([found.step for found in projection.meanings], dtype=bool)
    if len(ranges) and step_names.any():
        with_steps = np.unique(capture.processes[ranges.thread[step_names[ranges.name]]])
        has = np.isin(owners // len(devices), with_steps)
        time = np.where(has, time, -1.0) if has.any() else time
    best = int(np.argmax(time))
    text = (
        f"the capture holds {len(owners)} GPUs of {len(np.unique(owners // len(devices)))} processes; this is the "
        f"busiest of them alone (device {int(devices[owners[best] % len(devices)])}, {int((owner == best).sum())} of "
        f"{len(work)} kernels)"
    )
    return owner == best, [text]


def _middle(capture: Capture, steps: Steps, mine: Flags) -> Steps:
    """A capture without steps can be very long: look at its middle."""
    rows = np.flatnonzero(mine)
    if len(steps) > 1 or len(rows) <= WINDOW_KERNELS or (steps.of_work != NONE).sum() < len(rows):
        return steps
    work = capture.work
    rows = rows[np.argsort(work.start[rows], kind="stable")]
    first = (len(rows) - WINDOW_KERNELS) // 2
    rows = rows[first : first + WINDOW_KERNELS]
    of_work = np.full(len(work), NONE, dtype=np.int64)
    of_work[rows] = 0
    begin, end = np.array([work.start[rows[0]]]), np.array([work.end[rows].max()])
    found_by = f"{steps.found_by}; of it the {WINDOW_KERNELS} kernels in the middle"
    return replace(steps, begin=begin, end=end, host=end - begin, of_work=of_work, found_by=found_by)


def _name_recipes(
    capture: Capture, steps: Steps, mine: Flags, given: str | None
) -> tuple[Steps, Literal["ranges", "user", "kernels"], str]:
    """The steps with a recipe each, who named it, and the reason where nobody did."""
    if all(steps.recipe):
        return steps, "ranges", ""
    if given is not None:
        return replace(steps, recipe=tuple(name or given for name in steps.recipe)), "user", ""
    inferred, why = infer(capture, mine)
    return replace(steps, recipe=tuple(name or inferred for name in steps.recipe)), "kernels", why


def _nearest_to_median(steps: Steps, name: str) -> Ints:
    rows = np.flatnonzero(np.array([recipe == name for recipe in steps.recipe]))
    kernels = np.bincount(steps.of_work[steps.of_work != NONE], minlength=len(steps))
    rows = rows[kernels[rows] > 0]
    time = (steps.end - steps.begin)[rows].astype(np.float64)
    order = rows[np.argsort(np.abs(time - np.median(time)), kind="stable")] if len(rows) else rows
    few = order[:TRACED_STEPS]
    within = np.cumsum(kernels[few]) <= TRACED_KERNELS
    within[:1] = True
    return np.sort(few[within])


def _step_times(steps: Steps, tool: str) -> list[Fact]:
    """A new round begins wherever the recipe changes; a recipe's rounds are numbered from 0."""
    facts: list[Fact] = []
    rounds: dict[str, int] = {}
    index, before = 0, None
    times = ((steps.end - steps.begin) / 1e6).tolist()
    hosts = (steps.host / 1e6).tolist()
    attached = tool.split(" (")[0]
    for recipe, ms, host_ms in zip(steps.recipe, times, hosts, strict=True):
        if recipe != before:
            rounds[recipe] = rounds.get(recipe, -1) + 1
            index, before = 0, recipe
        facts.append(StepTime(recipe, rounds[recipe], index, ms, host_ms, attached=attached))
        index += 1
    return facts


class _Labels:
    """Distinct texts and their numbers; the empty text is 0."""

    def __init__(self, *texts: str) -> None:
        self.known: dict[str, int] = {text: number for number, text in enumerate(texts)}

    def __call__(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))

    def of(self, texts: Sequence[str], rows: Ints) -> tuple[int, ...]:
        """Numbers of `texts[row]` for each row; only texts that occur get a number."""
        values, index = compact(rows)
        numbers = np.array([self(texts[value]) for value in values], dtype=np.int64)
        return tuple(numbers[index].tolist()) if len(rows) else ()

    def texts(self) -> tuple[str, ...]:
        return tuple(self.known)


def _trace(capture: Capture, projection: Projection, steps: Steps, step: int, recipe: str) -> Trace:
    work, places = capture.work, projection.places
    rows = np.flatnonzero(steps.of_work == step)
    rows = rows[np.argsort(work.start[rows], kind="stable")]
    begin = int(steps.begin[step])
    names, labels = _Labels(), _Labels("")
    place = projection.place[rows]
    launch = np.where(work.launch[rows] == NONE, np.nan, (work.launch[rows] - begin) / 1e3)
    host = _Host(begin, int(steps.end[step]), int(work.process[rows[0]]) if len(rows) else NONE)
    return Trace(
        recipe=recipe,
        step=int(steps.number[step]),
        wall_ms=float(steps.end[step] - begin) / 1e6,
        name=names.of(capture.work_names, work.name[rows]),
        start_us=tuple(((work.start[rows] - begin) / 1e3).tolist()),
        duration_us=tuple(((work.end[rows] - work.start[rows]) / 1e3).tolist()),
        stream=tuple(work.stream[rows].tolist()),
        launch_us=tuple(launch.tolist()),
        module=labels.of([found.module for found in places], place),
        role=labels.of([found.role for found in places], place),
        op=labels.of([found.op for found in places], place),
        phase=labels.of(projection.phases, projection.phase[rows]),
        names=names.texts(),
        waits=_waits(capture, projection, host, labels),
        phases=_host_phases(capture, projection, host),
        labels=labels.texts(),
        source=capture.tool,
    )


@dataclass(frozen=True)
class _Host:
    """One step of one process [ns]."""

    begin: int
    end: int
    process: int

    def us(self, times: Ints) -> tuple[float, ...]:
        """Microseconds since the step began."""
        return tuple(((times - self.begin) / 1e3).tolist())


def _waits(capture: Capture, projection: Projection, host: _Host, labels: _Labels) -> HostWaits | None:
    """The host's waits that reach into the step, on threads that launch something. `labels` grows."""
    waits = capture.waits
    if waits is None:
        return None
    here = (capture.processes[waits.thread] == host.process) & np.isin(waits.thread, np.unique(capture.work.thread))
    rows = np.flatnonzero(here & (waits.start < host.end) & (waits.end > host.begin))
    rows = rows[np.argsort(waits.start[rows], kind="stable")]
    names, place = _Labels(), projection.wait_place[rows]
    return HostWaits(
        name=names.of(waits.names, waits.name[rows]),
        names=names.texts(),
        start_us=host.us(waits.start[rows]),
        duration_us=tuple(((waits.end[rows] - waits.start[rows]) / 1e3).tolist()),
        module=labels.of([found.module for found in projection.places], place),
        op=labels.of([found.op for found in projection.places], place),
        phase=labels.of(projection.phases, projection.wait_phase[rows]),
    )


def _host_phases(capture: Capture, projection: Projection, host: _Host) -> HostPhases | None:
    """The ranges of phases that reach into the step; None if the capture has none at all."""
    ranges = capture.ranges
    told = np.array([bool(found.phase) for found in projection.meanings], dtype=bool)
    if not len(ranges) or not told.any():
        return None
    here = told[ranges.name] & (capture.processes[ranges.thread] == host.process)
    rows = np.flatnonzero(here & (ranges.start < host.end) & (ranges.end > host.begin))
    rows = rows[np.argsort(ranges.start[rows], kind="stable")]
    return HostPhases(
        name=tuple(projection.meanings[ranges.name[row]].phase for row in rows),
        start_us=host.us(ranges.start[rows]),
        end_us=host.us(ranges.end[rows]),
    )


def _gemm_kernels(capture: Capture, projection: Projection, steps: Steps, recipe: str) -> GemmKernels:
    """Count the GEMM kernels of all steps of a recipe by name, place and phase."""
    work, places = capture.work, projection.places
    of_recipe = np.array([name == recipe for name in steps.recipe])
    is_gemm = np.array([classify(name).is_product for name in capture.work_names])
    rows = np.flatnonzero((steps.of_work != NONE) & is_gemm[work.name])
    rows = rows[of_recipe[steps.of_work[rows]]]
    key = (work.name[rows] * len(places) + projection.place[rows]) * len(projection.phases) + projection.phase[rows]
    keys, index = compact(key)
    count = np.bincount(index, minlength=len(keys))
    time = np.bincount(index, weights=work.end[rows] - work.start[rows], minlength=len(keys)) / 1e3
    names, labels = _Labels(), _Labels("")
    name = keys // (len(projection.phases) * len(places))
    place, phase = keys // len(projection.phases) % len(places), keys % len(projection.phases)
    library = np.array([found.te_gemm or found.role != "" for found in places], dtype=bool)
    which = zip(name.tolist(), place.tolist(), phase.tolist(), strict=True)
    linear = np.array(
        [_is_linear(capture.work_names[text], places[at], projection.phases[then]) for text, at, then in which],
        dtype=bool,
    )
    per_step = np.bincount(steps.of_work[rows[linear[index]]], minlength=len(steps))[of_recipe]
    calls, silent = _marked_calls(capture, projection, steps, of_recipe, rows)
    return GemmKernels(
        recipe=recipe,
        steps=int(of_recipe.sum()),
        name=names.of(capture.work_names, name),
        module=labels.of([found.module for found in places], place),
        role=labels.of([found.role for found in places], place),
        op=labels.of([found.op for found in places], place),
        phase=labels.of(projection.phases, phase),
        library=tuple(library[place].tolist()),
        count=tuple(count.tolist()),
        total_us=tuple(time.tolist()),
        names=names.texts(),
        labels=labels.texts(),
        calls=calls,
        silent_calls=silent,
        fewest=int(per_step.min()) if len(per_step) else None,
        most=int(per_step.max()) if len(per_step) else None,
    )


def _is_linear(name: str, place: Place, phase: str) -> bool:
    return bucket_in_context(name, op=place.op, module=place.module, role=place.role, phase=phase) == "gemm"


def _marked_calls(
    capture: Capture, projection: Projection, steps: Steps, of_recipe: Flags, products: Ints
) -> tuple[int | None, int]:
    """(GEMM calls that ranges mark in the recipe's steps, those of them without a product kernel).

    Our own ranges around a call go before those of TE's library, and these before those of TE's Python code: the
    coarser ones may hold several calls.
    """
    ranges, work = capture.ranges, capture.work
    meanings = projection.meanings
    levels = (
        [found.ours and found.role != "" for found in meanings],
        [found.te_gemm for found in meanings],
        [found.role != "" for found in meanings],
    )
    begin, end = steps.begin[of_recipe], steps.begin[of_recipe] + steps.host[of_recipe]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    for level in levels:
        if not any(level):
            continue
        rows = np.flatnonzero(np.array(level, dtype=bool)[ranges.name])
        at = np.searchsorted(begin, ranges.start[rows], side="right") - 1
        inside = (at >= 0) & (ranges.start[rows] < end[np.maximum(at, 0)])
        rows = rows[inside]
        if not len(rows):
            continue
        silent = 0
        for thread in np.unique(ranges.thread[rows]):
            mine = rows[ranges.thread[rows] == thread]
            launched = np.sort(work.launch[products[work.thread[products] == thread]])
            first = np.searchsorted(launched, ranges.start[mine], side="left")
            last = np.searchsorted(launched, ranges.end[mine], side="right")
            silent += int((last <= first).sum())
        return len(rows), silent
    return None, 0


def _one_sided(table: GemmKernels) -> list[str]:
    """Say it where the forward pass was seen and the backward pass was not, or the other way round."""
    seen: set[str] = set()
    for i in range(len(table.name)):
        module, role, op, phase = (
            table.labels[column[i]] for column in (table.module, table.role, table.op, table.phase)
        )
        if bucket_in_context(table.names[table.name[i]], op=op, module=module, role=role, phase=phase) == "gemm":
            seen.add(direction_of(role) or phase)
    both = seen & {"forward", "backward"}
    if len(both) != 1 or "" in seen:
        return []
    lost = ({"forward", "backward"} - both).pop()
    roles = "dgrad and wgrad" if lost == "backward" else "fprop"
    return [
        f"{table.recipe}: no GEMM of a {lost} pass is in the capture, so nothing is known of {roles}, and its steps "
        f"are no whole training steps; the capture window may have ended too early, or the thread that ran the {lost} "
        "pass was not traced"
    ]
