"""A traced step, read: its kernels sorted into groups that share name and context, each classified once."""

from __future__ import annotations

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
        """A matrix product of a linear layer (not the helper that reduces its split sums)."""
        return self.bucket == "gemm" and self.kernel.bucket == "gemm" and not self.kernel.gemm_helper


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


def flaw(trace: Trace) -> str | None:
    """Why a `Trace` cannot be read (unequal columns, an index out of range, a time that is no number)."""
    columns = (trace.name, trace.duration_us, trace.module, trace.role, trace.op, trace.phase)
    if any(len(column) != len(trace.start_us) for column in columns):
        return "its columns have unequal lengths"
    labels = (*trace.module, *trace.role, *trace.op, *trace.phase)
    if any(not 0 <= index < len(trace.names) for index in trace.name):
        return "it points to a name that it does not hold"
    if any(not 0 <= index < len(trace.labels) for index in labels):
        return "it points to a label that it does not hold"
    if not np.isfinite([*trace.start_us, *trace.duration_us, trace.wall_ms]).all():
        return "a time in it is not finite"
    return None


def view(trace: Trace, line: int = 0) -> TraceView:
    """Group and classify a `Trace`. Times become milliseconds."""
    start = np.asarray(trace.start_us, dtype=np.float64) / 1e3
    duration = np.maximum(np.asarray(trace.duration_us, dtype=np.float64), 0.0) / 1e3
    index: dict[tuple[int, ...], int] = {}
    columns = zip(trace.name, trace.module, trace.role, trace.op, trace.phase, strict=True)
    group = np.array([index.setdefault(key, len(index)) for key in columns], dtype=np.intp)
    counts = np.bincount(group, minlength=len(index))
    times = np.bincount(group, weights=duration, minlength=len(index))
    groups = []
    for key, position in index.items():
        name = trace.names[key[0]]
        module, role, op, phase = (trace.labels[label] for label in key[1:])
        groups.append(
            KernelGroup(
                name=name,
                module=module,
                role=role,
                op=op,
                phase=phase,
                kernel=classify(name),
                bucket=bucket_in_context(name, op=op, module=module, role=role, phase=phase),
                count=int(counts[position]),
                ms=float(times[position]),
            )
        )
    return TraceView(trace.wall_ms, start, start + duration, group, tuple(groups), trace.expected_gemms, line)
