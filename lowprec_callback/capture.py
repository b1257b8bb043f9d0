"""A capture of a profiler, in columns, and its kernels projected onto the ranges in which the host launched them.

A kernel finds its place through its launch: kernel --correlation--> launch call (thread, time) --> the ranges that were
open on that thread at that time. This holds for the backward pass too, which autograd launches on threads of its own.
Readers (`nsight`, `chrome_trace`) fill the columns; nothing here knows where they came from. A capture can hold
millions of rows, so all of this is done on whole columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lowprec_callback.measure.host_calls import blocking, plain_name
from lowprec_callback.range_names import Meaning, meaning

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NONE = -1
"""No launch call was found; no range was open."""


@dataclass(frozen=True)
class Work:
    """All kernels, copies and fills of a GPU, in columns of equal length. Times are nanoseconds."""

    start: Ints
    end: Ints
    stream: Ints
    device: Ints
    process: Ints
    name: Ints
    """Index into `Capture.work_names`."""
    launch: Ints
    """When the host launched it; `NONE` where no launch was found."""
    thread: Ints
    """Which host thread did (index into `Capture.processes`); `NONE` where no launch was found."""

    def __len__(self) -> int:
        return len(self.start)

    def where(self, which: Flags | Ints) -> Work:
        """Some of the rows."""
        return Work(**{name: column[which] for name, column in self.__dict__.items()})


@dataclass(frozen=True)
class Ranges:
    """The host's ranges and operators, in columns of equal length. On one thread they nest."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints
    """Index into `Capture.range_names`."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Waits:
    """Calls in which the host was blocked, in columns of equal length. Times are nanoseconds."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints
    """Index into `names`."""
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.start)


def blocked(calls: Waits, copy: Ints, work_end: Ints) -> Waits:
    """Those of `calls` in which the host really was blocked (see `host_calls.blocking`), without version suffixes.

    `copy` gives for each call the row of the GPU's work that it started, or `NONE`.
    """
    kinds = [blocking(name) for name in calls.names]
    always = np.array([kind == "always" for kind in kinds], dtype=bool)
    maybe = np.array([kind == "if it ends after its copy" for kind in kinds], dtype=bool)
    done = work_end[copy] if len(work_end) else copy
    kept = always[calls.name] | (maybe[calls.name] & (copy != NONE) & (calls.end >= done)) if len(calls) else always[:0]
    names = [plain_name(name) for name in calls.names]
    return Waits(calls.start[kept], calls.end[kept], calls.thread[kept], calls.name[kept], names)


@dataclass(frozen=True)
class Capture:
    """What one file of a profiler holds."""

    tool: str
    """`Nsight Systems 2025.3.2 (export schema 3.20.3)`, `torch.profiler`."""
    file: str
    work: Work
    work_names: Sequence[str]
    ranges: Ranges
    range_names: Sequence[tuple[str, str]]
    """(domain, text)."""
    processes: Ints
    """The process of each host thread."""
    numbers: Ints | None = None
    """The number that each range carries (its NVTX payload); negative for none."""
    knows_operators: bool = False
    """Whether the framework's operators are among the ranges."""
    device: str | None = None
    compute_capability: tuple[int, int] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Allow-listed environment variables, and no others."""
    complaints: tuple[str, ...] = ()
    """What is missing from the capture, and what that costs, as sentences."""
    waits: Waits | None = None
    """The host's waits. None: the capture does not hold them."""


@dataclass(frozen=True)
class Place:
    """What was going on where the host launched something."""

    module: str = ""
    role: str = ""
    direction: str = ""
    op: str = ""
    te_gemm: bool = False
    attention: bool = False


@dataclass(frozen=True)
class Projection:
    """The place of each row of `Capture.work`, and what the names mean."""

    places: Sequence[Place]
    place: Ints
    """Index into `places`."""
    phase: Ints
    """Index into `phases`."""
    phases: Sequence[str]
    meanings: Sequence[Meaning]
    """One for each of `Capture.range_names`."""
    wait_place: Ints
    """For each of `Capture.waits` an index into `places`, and below into `phases`."""
    wait_phase: Ints


def compact(column: Ints) -> tuple[Ints, Ints]:
    """(the distinct values in order, for each row the index of its value), as `np.unique` gives them, but faster.

    Sorting a million rows to find a few threads or names is a waste: few values are told apart by comparing with each,
    small whole numbers by a table.
    """
    if not len(column):
        return column, column
    low, high = int(column.min()), int(column.max())
    if low == high:
        return np.array([low], dtype=np.int64), np.zeros(len(column), dtype=np.int64)
    if high - low < 1 << 22:
        there = np.zeros(high - low + 1, dtype=bool)
        there[column - low] = True
        values = np.flatnonzero(there)
        table = np.cumsum(there, dtype=np.int64) - 1
        return values + low, table[column - low]
    found: list[int] = []
    left = column
    while len(left) and len(found) < 16:
        found.append(int(left[0]))
        left = left[left != left[0]]
    if len(left):
        values, index = np.unique(column, return_inverse=True)
        return values, index.astype(np.int64)
    values = np.array(sorted(found), dtype=np.int64)
    return values, np.searchsorted(values, column)


def join(work_id: Ints, work_process: Ints, call_id: Ints, call_process: Ints) -> Ints:
    """For each kernel the row of the call that launched it, or `NONE`: equal correlation id, same process.

    All four columns are whole numbers from 0. Of several calls with one id the first in the table counts.
    """
    found = np.full(len(work_id), NONE, dtype=np.int64)
    if not len(work_id) or not len(call_id):
        return found
    many = int(max(work_id.max(), call_id.max())) + 1
    keys, wanted = call_process * many + call_id, work_process * many + work_id
    if not bool(np.all(keys[1:] >= keys[:-1])):
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
    else:
        order = np.arange(len(keys))
    position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    hit = (keys[position] == wanted) & (work_id >= 0)
    found[hit] = order[position[hit]]
    return found


def project(capture: Capture) -> Projection:
    """Find each kernel's place and phase.

    The phase is that of the training thread's range at the time of launch, on whatever thread the launch was; where
    there are no such ranges it is the direction of the module's range.
    """
    meanings = [meaning(text, domain) for domain, text in capture.range_names]
    distinct: dict[Meaning, int] = {}
    kind_of = np.array(
        [distinct.setdefault(replace(found, number=None), len(distinct)) for found in meanings], dtype=np.int64
    )
    kinds = list(distinct)
    tree = _Tree(capture.ranges, kind_of[capture.ranges.name] if len(meanings) else capture.ranges.name)
    work = capture.work
    place = tree.innermost(work.thread, work.launch)
    waits = capture.waits
    nobody = np.zeros(0, dtype=np.int64)
    wait_place = tree.innermost(waits.thread, waits.start) if waits is not None else nobody
    places = [_resolve(stack, kinds) for stack in tree.stacks]
    if not capture.knows_operators:
        places, place = _surround_attention(capture, kinds, kind_of, places, place)
    launched = _Instants(np.where(work.launch == NONE, NONE, work.process), work.launch, place)
    phases, phase = _phases(capture, kinds, kind_of, places, launched)
    wait_phase = nobody
    if waits is not None:
        waited = _Instants(capture.processes[waits.thread], waits.start, wait_place)
        _, wait_phase = _phases(capture, kinds, kind_of, places, waited)
    return Projection(places, place, phase, phases, meanings, wait_place, wait_phase)


def _resolve(stack: tuple[int, ...], kinds: Sequence[Meaning]) -> Place:
    """The innermost range that says something wins; what our own ranges say goes before what others do."""
    inner = [kinds[kind] for kind in reversed(stack)]
    ours, others = [found for found in inner if found.ours], [found for found in inner if not found.ours]

    def first(name: str, among: Sequence[Meaning]) -> str:
        return next((getattr(found, name) for found in among if getattr(found, name)), "")

    def ours_first(name: str) -> str:
        return first(name, ours) or first(name, others)

    call = any(found.te_gemm for found in others)
    direction, role = ours_first("direction"), ours_first("role")
    if call and not role and direction == "forward":
        role = "fprop"
    te_gemm = call or (bool(others) and others[0].te_node)
    attention = any(found.attention for found in others)
    return Place(ours_first("module"), role, direction, first("op", others), te_gemm, attention)


class _Tree:
    """The ranges of each thread as a tree, and the distinct stacks of kinds that occur in it.

    depth of a range = ranges of its thread that began before it - those that had ended by then; its parent is the last
    range before it that is one less deep. Both hold because ranges of one thread nest.
    """

    def __init__(self, ranges: Ranges, kind: Ints) -> None:
        self.stacks: list[tuple[int, ...]] = [()]
        self._threads: dict[int, tuple[Ints, Ints, Ints, Ints]] = {}
        known: dict[tuple[int, int], int] = {}
        for thread in np.unique(ranges.thread):
            rows = np.flatnonzero(ranges.thread == thread)
            start, end = ranges.start[rows], np.maximum(ranges.end[rows], ranges.start[rows] + 1)
            order = np.lexsort((-end, start))  # at equal times the longer range is the outer one
            start, end, own = start[order], end[order], kind[rows][order]
            parent = _parents(start, end)
            self._threads[int(thread)] = (start, end, parent, self._contexts(parent, own, known))

    def _contexts(self, parent: Ints, own: Ints, known: dict[tuple[int, int], int]) -> Ints:
        """For each range the index of its stack in `stacks`: level by level, since a parent's comes first."""
        context = np.zeros(len(parent) + 1, dtype=np.int64)  # the last one is the stack of nothing, for NONE
        width = int(own.max()) + 1 if len(own) else 1
        level = np.flatnonzero(parent == NONE)
        children = np.argsort(parent, kind="stable")
        sorted_parents = parent[children]
        while len(level):
            pairs = context[parent[level]] * width + own[level]
            distinct, inverse = np.unique(pairs, return_inverse=True)
            numbers = [self._number(int(pair) // width, int(pair) % width, known) for pair in distinct]
            context[level] = np.array(numbers, dtype=np.int64)[inverse]
            low, high = np.searchsorted(sorted_parents, level), np.searchsorted(sorted_parents, level, side="right")
            level = children[_spans(low, high)]
        stacks: Ints = context[:-1]
        return stacks

    def _number(self, outer: int, kind: int, known: dict[tuple[int, int], int]) -> int:
        if (outer, kind) not in known:
            known[outer, kind] = len(self.stacks)
            self.stacks.append((*self.stacks[outer], kind))
        return known[outer, kind]

    def innermost(self, thread: Ints, instant: Ints) -> Ints:
        """For each (thread, time) the index of the stack of ranges that were open then; 0 for none."""
        found = np.zeros(len(thread), dtype=np.int64)
        for number, (start, end, parent, context) in self._threads.items():
            rows = np.flatnonzero(thread == number)
            times = instant[rows]
            at = np.searchsorted(start, times, side="right") - 1
            while True:
                late = np.flatnonzero((at != NONE) & (end[at] < times))
                if not len(late):
                    break
                at[late] = parent[at[late]]
            found[rows] = np.where(at == NONE, 0, context[at])
        return found


def _parents(start: Ints, end: Ints) -> Ints:
    """Row of the enclosing range of each, or `NONE`; see `_Tree`. Rows are in order of time, outer ones first."""
    count = len(start)
    depth = np.arange(count) - np.searchsorted(np.sort(end), start, side="right")
    parent = np.full(count, NONE, dtype=np.int64)
    by_depth = np.argsort(depth, kind="stable")
    edges = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=0)) + 2))
    for level in range(1, len(edges) - 1):
        above, here = by_depth[edges[level - 1] : edges[level]], by_depth[edges[level] : edges[level + 1]]
        if len(above) and len(here):
            parent[here] = above[np.searchsorted(above, here) - 1]
    return parent


def _spans(low: Ints, high: Ints) -> Ints:
    """The whole numbers of all [low, high), one after the other."""
    length = high - low
    ends = np.cumsum(length)
    found: Ints = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(low - (ends - length), length)
    return found


def _surround_attention(
    capture: Capture, kinds: Sequence[Meaning], kind_of: Ints, places: list[Place], place: Ints
) -> tuple[list[Place], Ints]:
    """Unfused attention's backward has no range of its own: PyTorch runs its products around TE's softmax kernel.

    So what one thread launches outside of every range, after one of TE's modules ended and before the next began, is
    attention's if a softmax or another attention kernel of TE is among it. Where our own ranges name the modules, they
    tell attention's work from its neighbours', and nothing is guessed.
    """
    if any(kind.ours and kind.module for kind in kinds):
        return places, place
    ranges, work = capture.ranges, capture.work
    modules = np.array([bool(kind.module) and not kind.ours and not kind.attention for kind in kinds], dtype=bool)
    attention = np.array([found.attention for found in places], dtype=bool)
    bare = np.array([not (found.module or found.op) for found in places], dtype=bool)
    if not attention.any() or not modules.any():
        return places, place
    in_module = modules[kind_of[ranges.name]]
    changed = place.copy()
    added: dict[int, int] = {}
    for thread in np.unique(ranges.thread[in_module]):
        begins = np.sort(ranges.start[in_module & (ranges.thread == thread)])
        rows = np.flatnonzero(work.thread == thread)
        gap = np.searchsorted(begins, work.launch[rows], side="right")
        attended = np.unique(gap[attention[place[rows]]])
        hits = rows[np.isin(gap, attended) & bare[place[rows]]]
        for index in np.unique(place[hits]):
            number = added.setdefault(int(index), len(places) + len(added))
            changed[hits[place[hits] == index]] = number
    op = "attention (around TE's softmax)"
    return [*places, *(replace(places[index], op=op, attention=True) for index in added)], changed


@dataclass(frozen=True)
class _Instants:
    """Instants of the host: of a process (`NONE`: of no process that is known), and the place that was found."""

    process: Ints
    time: Ints
    place: Ints


def _phases(
    capture: Capture, kinds: Sequence[Meaning], kind_of: Ints, places: Sequence[Place], instants: _Instants
) -> tuple[list[str], Ints]:
    ranges = capture.ranges
    names = ["", *dict.fromkeys([kind.phase for kind in kinds if kind.phase] + ["forward", "backward"])]
    number = {name: index for index, name in enumerate(names)}
    direction = np.array([number[found.direction] for found in places], dtype=np.int64)
    phase = direction[instants.place]
    told = np.array([number[kind.phase] for kind in kinds], dtype=np.int64)
    rows = np.flatnonzero(told[kind_of[ranges.name]] > 0) if len(kinds) else np.zeros(0, dtype=np.int64)
    rows = rows[np.argsort(ranges.start[rows], kind="stable")]
    for process in np.unique(capture.processes[ranges.thread[rows]]):
        mine = rows[capture.processes[ranges.thread[rows]] == process]
        here = np.flatnonzero(instants.process == process)
        at = np.searchsorted(ranges.start[mine], instants.time[here], side="right") - 1
        inside = (at >= 0) & (instants.time[here] <= ranges.end[mine[at]])
        phase[here[inside]] = told[kind_of[ranges.name[mine[at[inside]]]]]
    return names, phase
