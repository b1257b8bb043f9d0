"""A traced step, read: its kernels sorted into groups that share name and context, each classified once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowprec_callback.analyze.kernels import KernelClass, bucket_in_context, classify
from lowprec_callback.recording import Trace


@dataclass(frozen=True)
class KernelGroup:
    """All kernels of one traced step that share name, module, role, operator and phase."""

    name: str
    module: str
    role: str
    op: str
    phase: str
    kernel: KernelClass
    bucket: str
    """The bucket in this context: a batched product inside attention is attention's, not a linear layer's."""
    count: int
    ms: float
    """Sum of durations; overlap is not taken out."""

    @property
    def is_linear_gemm(self) -> bool:
        """A matrix product of a linear layer: no convolution, and not the helper that reduces its split sums."""
        return self.bucket == "gemm" and self.kernel.is_product


@dataclass(frozen=True)
class Wait:
    """A call in which the host was blocked."""

    call: str
    module: str
    op: str
    phase: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class HostView:
    """What the host did in a traced step. Times are milliseconds since it began."""

    launch_ms: NDArray[np.float64]
    """When each kernel was launched; NaN: not known."""
    waits: tuple[Wait, ...] | None
    """By beginning. None: not recorded."""
    data_ms: tuple[tuple[float, float], ...] | None
    """From when to when the host was in the data phase. None: not known."""
    end_ms: float | None
    """When the host was done and only waited for the GPU because the step was traced; None: it did not."""


@dataclass(frozen=True)
class TraceView:
    """One traced step: its groups, and which group each kernel belongs to."""

    wall_ms: float
    start_ms: NDArray[np.float64]
    end_ms: NDArray[np.float64]
    group: NDArray[np.intp]
    groups: tuple[KernelGroup, ...]
    expected_gemms: int | None
    line: int
    """Line of the Recording."""
    host: HostView


def flaw(trace: Trace) -> str | None:
    """Why a `Trace` cannot be read (unequal columns, an index out of range, a time that is no number)."""
    columns = (trace.name, trace.duration_us, trace.launch_us, trace.module, trace.role, trace.op, trace.phase)
    if any(len(column) != len(trace.start_us) for column in columns):
        return "its columns have unequal lengths"
    if not _within(trace.name, len(trace.names)):
        return "it points to a name that it does not hold"
    if not all(_within(column, len(trace.labels)) for column in (trace.module, trace.role, trace.op, trace.phase)):
        return "it points to a label that it does not hold"
    if not np.isfinite(np.concatenate([trace.start_us, trace.duration_us, [trace.wall_ms]])).all():
        return "a time in it is not finite"
    return _host_flaw(trace)


def _within(indices: tuple[int, ...], length: int) -> bool:
    return not indices or (min(indices) >= 0 and max(indices) < length)


def _host_flaw(trace: Trace) -> str | None:
    waits, phases = trace.waits, trace.phases
    times: list[float] = [] if trace.host_end_us is None else [trace.host_end_us]
    if waits is not None:
        columns = (waits.name, waits.duration_us, waits.module, waits.op, waits.phase)
        if any(len(column) != len(waits.start_us) for column in columns):
            return "the columns of the host's waits have unequal lengths"
        if any(not 0 <= index < len(waits.names) for index in waits.name):
            return "a wait of the host points to a name that it does not hold"
        if any(not 0 <= index < len(trace.labels) for index in (*waits.module, *waits.op, *waits.phase)):
            return "a wait of the host points to a label that it does not hold"
        times += [*waits.start_us, *waits.duration_us]
    if phases is not None:
        if not len(phases.name) == len(phases.start_us) == len(phases.end_us):
            return "the columns of the host's phases have unequal lengths"
        times += [*phases.start_us, *phases.end_us]
    return None if np.isfinite(times).all() else "a time of the host in it is not finite"


def view(trace: Trace, line: int = 0) -> TraceView:
    """Group and classify a `Trace`. Times become milliseconds."""
    start = np.asarray(trace.start_us, dtype=np.float64) / 1e3
    duration = np.maximum(np.asarray(trace.duration_us, dtype=np.float64), 0.0) / 1e3
    group, firsts = _grouped([trace.name, trace.module, trace.role, trace.op, trace.phase])
    counts = np.bincount(group, minlength=len(firsts)).tolist()
    times = np.bincount(group, weights=duration, minlength=len(firsts)).tolist()
    groups = []
    for position, row in enumerate(firsts):
        name = trace.names[trace.name[row]]
        module, role, op, phase = (
            trace.labels[column[row]] for column in (trace.module, trace.role, trace.op, trace.phase)
        )
        groups.append(
            KernelGroup(
                name=name,
                module=module,
                role=role,
                op=op,
                phase=phase,
                kernel=classify(name),
                bucket=bucket_in_context(name, op=op, module=module, role=role, phase=phase),
                count=counts[position],
                ms=times[position],
            )
        )
    end = start + duration
    return TraceView(trace.wall_ms, start, end, group, tuple(groups), trace.expected_gemms, line, _host(trace))


def _grouped(columns: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.intp], list[int]]:
    """(for each row the number of its combination of values, by first appearance; the row where each first appears)."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    first = np.zeros(0, dtype=np.intp)
    for column in columns:
        values = np.asarray(column, dtype=np.int64)
        # Numbered anew after each column, so that the product stays small.
        _, first, number = np.unique(
            number * (int(values.max(initial=0)) + 1) + values, return_index=True, return_inverse=True
        )
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    return place[number], first[order].tolist()


def _host(trace: Trace) -> HostView:
    waits = None
    if trace.waits is not None:
        w = trace.waits
        labels, rows = trace.labels, zip(w.name, w.module, w.op, w.phase, w.start_us, w.duration_us, strict=True)
        found = [
            Wait(w.names[name], labels[module], labels[op], labels[phase], us / 1e3, (us + max(length, 0.0)) / 1e3)
            for name, module, op, phase, us, length in rows
        ]
        waits = tuple(sorted(found, key=lambda wait: wait.start_ms))
    launch = np.asarray(trace.launch_us, dtype=np.float64) / 1e3
    end = trace.host_end_us
    return HostView(launch, waits, _data(trace), end / 1e3 if end is not None else None)


def _disjoint(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        start = max(start, found[-1][1]) if found else start
        if end > start:
            found.append((start, end))
    return tuple(found)


def _data(trace: Trace) -> tuple[tuple[float, float], ...] | None:
    """The data phases; where phases were not recorded, what comes before the first launch of the forward pass."""
    if trace.phases is not None:
        rows = zip(trace.phases.name, trace.phases.start_us, trace.phases.end_us, strict=True)
        return _disjoint((start / 1e3, end / 1e3) for name, start, end in rows if name == "data")
    forward = [index for index, label in enumerate(trace.labels) if label == "forward"]
    launched = np.asarray(trace.launch_us, dtype=np.float64)[np.isin(np.asarray(trace.phase, dtype=np.intp), forward)]
    launched = launched[np.isfinite(launched)]
    return ((0.0, max(float(launched.min()), 0.0) / 1e3),) if len(launched) else None
