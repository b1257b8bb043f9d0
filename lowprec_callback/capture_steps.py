"""The optimizer steps of a capture: where they are, what they are called, and which kernels are theirs.

A step's time is taken as the callback takes it with CUDA events: from boundary to boundary, where a boundary is passed
when the host is there *and* the GPU has done all that was launched before:

    t(h) = max(h, latest end of all kernels that were launched before h)          h: host time of the boundary [ns]

So a host that runs ahead of the GPU does not make a step look short. A kernel belongs to the step in which it was
launched; one whose launch was not captured, to the step in which it began.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowprec_callback.capture import NONE, Capture, Flags, Ints, Projection

PARTIAL = 0.9
"""A step at the capture's edge that has fewer kernels than this share of its neighbours' is taken as cut off."""


@dataclass(frozen=True)
class Steps:
    """Steps in order of time, in columns; times are nanoseconds."""

    recipe: tuple[str, ...]
    """As the ranges call it; the empty text where they do not."""
    number: Ints
    begin: Ints
    """When the boundary was passed; see the module's docstring."""
    end: Ints
    host: Ints
    """The host's own time from boundary to boundary."""
    of_work: Ints
    """For each row of `Capture.work` its step, or `NONE`."""
    found_by: str
    """How the steps were found, in words."""

    def __len__(self) -> int:
        return len(self.number)


def find_steps(capture: Capture, projection: Projection, mine: Flags) -> tuple[Steps, list[str]]:
    """The steps, and sentences about those that were left out. `mine` marks the kernels that are to be looked at.

    Steps are, in this order: our own step ranges; ranges that are called like a step and come at least twice; what
    lies between the ends of PyTorch's optimizer ranges; the whole window as one step.
    """
    ranges = capture.ranges
    meanings = projection.meanings
    process = int(capture.work.process[mine][0])
    here = capture.processes[ranges.thread] == process if len(ranges) else np.zeros(0, dtype=bool)

    def rows(flags: Sequence[bool]) -> Ints:
        which = np.flatnonzero(np.array(flags, dtype=bool)[ranges.name] & here) if len(flags) else np.zeros(0, int)
        return which[np.argsort(ranges.start[which], kind="stable")].astype(np.int64)

    ours = rows([found.step for found in meanings])
    if len(ours):
        names = tuple(meanings[ranges.name[row]].recipe for row in ours)
        numbers = [_number(capture, projection, int(row), index) for index, row in enumerate(ours)]
        bounds = (ranges.start[ours], ranges.end[ours])
        return _steps(capture, mine, names, np.array(numbers), bounds, "ranges in the NVTX domain lowprec"), []
    named = _iterations(capture, rows([found.iteration for found in meanings]))
    if named is not None:
        chosen, what = named
        numbers = [_number(capture, projection, int(row), index) for index, row in enumerate(chosen)]
        # From one beginning to the next: what runs between two such ranges belongs to training as well.
        start, end = ranges.start[chosen], ranges.end[chosen].copy()
        end[:-1] = start[1:]
        return _whole_ones(_steps(capture, mine, ("",) * len(chosen), np.array(numbers), (start, end), what))
    ends = rows([found.optimizer for found in meanings])
    if len(ends) >= 2:
        cuts = ranges.end[ends]
        first = int(min(_launched(capture, mine).min(), ranges.start[here].min()))
        start = np.concatenate([[first], cuts[:-1]])
        what = "cut where PyTorch's optimizer ranges end"
        return _whole_ones(_steps(capture, mine, ("",) * len(cuts), np.arange(len(cuts)), (start, cuts), what))
    return _window(capture, mine), []


def _number(capture: Capture, projection: Projection, row: int, index: int) -> int:
    if capture.numbers is not None and capture.numbers[row] >= 0:
        return int(capture.numbers[row])
    told = projection.meanings[capture.ranges.name[row]].number
    return index if told is None else told


def _iterations(capture: Capture, rows: Ints) -> tuple[Ints, str] | None:
    """The family of equally called ranges (but for a number) that takes most time, if it comes twice at least."""
    families: dict[str, list[int]] = {}
    for row in rows:
        text = re.sub(r"\d+", "N", capture.range_names[capture.ranges.name[row]][1])
        families.setdefault(text, []).append(int(row))
    spans = capture.ranges.end - capture.ranges.start
    best = max((f for f in families.items() if len(f[1]) > 1), key=lambda f: int(spans[f[1]].sum()), default=None)
    if best is None:
        return None
    chosen = np.array(best[1], dtype=np.int64)
    return chosen, f"ranges called {best[0]!r}, each from its beginning to the next one's"


def _launched(capture: Capture, mine: Flags) -> Ints:
    work = capture.work
    return np.where(work.launch[mine] == NONE, work.start[mine], work.launch[mine])


def _steps(
    capture: Capture, mine: Flags, names: tuple[str, ...], numbers: Ints, host: tuple[Ints, Ints], found_by: str
) -> Steps:
    """Steps with these host times; see the module's docstring for their boundaries on the GPU."""
    work = capture.work
    rows = np.flatnonzero(mine)
    launched = rows[work.launch[rows] != NONE]
    launched = launched[np.argsort(work.launch[launched], kind="stable")]
    latest = np.maximum.accumulate(work.end[launched]) if len(launched) else np.zeros(0, dtype=np.int64)

    def passed(instants: Ints) -> Ints:
        before = np.searchsorted(work.launch[launched], instants) - 1
        return np.maximum(instants, np.where(before >= 0, latest[before], instants)) if len(latest) else instants

    start, end = host
    begin, finish = passed(start), passed(end)
    of_work = np.full(len(work), NONE, dtype=np.int64)
    of_work[launched] = _inside(work.launch[launched], start, end)
    strays = rows[work.launch[rows] == NONE]
    of_work[strays] = _inside(work.start[strays], begin, finish)
    return Steps(names, numbers.astype(np.int64), begin, finish, end - start, of_work, found_by)


def _inside(instants: Ints, start: Ints, end: Ints) -> Ints:
    at = np.searchsorted(start, instants, side="right") - 1
    return np.where((at >= 0) & (instants < end[at]), at, NONE)


def _window(capture: Capture, mine: Flags) -> Steps:
    work = capture.work
    begin, end = int(_launched(capture, mine).min()), int(work.end[mine].max())
    host = (np.array([begin]), np.array([end]))
    what = "the whole capture as one step: no range tells where steps begin"
    steps = _steps(capture, mine, ("",), np.zeros(1, dtype=np.int64), host, what)
    return Steps(steps.recipe, steps.number, steps.begin, steps.end, steps.host, np.where(mine, 0, NONE), what)


def _whole_ones(steps: Steps) -> tuple[Steps, list[str]]:
    """Without the first or the last step, where it has clearly fewer kernels than the others have in the median."""
    counts = np.bincount(steps.of_work[steps.of_work != NONE], minlength=len(steps))
    kept = np.ones(len(steps), dtype=bool)
    if len(steps) > 1:
        for edge in (0, len(steps) - 1):
            others = np.delete(counts, edge)
            kept[edge] = counts[edge] >= PARTIAL * float(np.median(others))
    if kept.all():
        return steps, []
    if not kept.any():
        return steps, []
    renumber = np.where(kept, np.cumsum(kept) - 1, NONE)
    of_work = np.where(steps.of_work == NONE, NONE, renumber[steps.of_work])
    which = " and ".join(word for word, keep in (("first", kept[0]), ("last", kept[-1])) if not keep)
    left = Steps(
        tuple(name for name, keep in zip(steps.recipe, kept, strict=True) if keep),
        steps.number[kept],
        steps.begin[kept],
        steps.end[kept],
        steps.host[kept],
        of_work,
        steps.found_by,
    )
    return left, [f"the {which} step was cut off by the capture's edge, and does not count"]
