"""The sizes of batches: whether steps hold the same work, and what to do where they do not.

A batch is looked at from outside, by the shapes of its tensors. Most trainings have one size and now and then another
(the last batch of an epoch); then the others do not count. Where every batch has its own size (sequences of many
lengths) all count, and the spread is stated.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.recording import Gemm, StepTime

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of one batch's tensors, in order; of a step, those of all its batches."""

USUAL = 0.6
"""Share of all steps above which a size is the usual one."""

MOST_SHAPES = 24
"""Layer shapes that are benchmarked in any case; of more, only those that carry `CARRIED` of the FLOPs."""

CARRIED = 0.95


def shapes_in(batch: Any) -> Shapes:
    """The shapes of all tensors in nested tuples, lists and mappings; nothing for what is anything else."""
    if isinstance(batch, torch.Tensor):
        return (tuple(batch.shape),)
    if isinstance(batch, Mapping):
        return tuple(shape for value in batch.values() for shape in shapes_in(value))
    if isinstance(batch, list | tuple):
        return tuple(shape for value in batch for shape in shapes_in(value))
    return ()


@dataclass
class StepSizes:
    """Counts the sizes of steps."""

    _seen: Counter[Shapes] = field(default_factory=Counter)
    _open: list[tuple[int, ...]] = field(default_factory=list)

    def batch(self, batch: Any) -> None:
        """A batch of the step that runs."""
        self._open += shapes_in(batch)

    def step(self) -> tuple[int, bool]:
        """The step is over: (elements of all its tensors, whether it has another size than most steps have)."""
        shapes, self._open = tuple(self._open), []
        self._seen[shapes] += 1
        usual = self.usual
        return sum(math.prod(shape) for shape in shapes), usual is not None and shapes != usual

    @property
    def usual(self) -> Shapes | None:
        """The size that most steps have; None where there is none, or only one step was seen."""
        (shapes, count), *_ = self._seen.most_common(1) or [((), 0)]
        return shapes if count >= 2 and count > USUAL * self._seen.total() else None

    @property
    def changing(self) -> bool:
        """Whether steps were seen to differ, with no usual size."""
        return len(self._seen) > 1 and self.usual is None


def flops(gemms: Iterable[Gemm]) -> float:
    """2 M K N, summed over all calls of a step."""
    return math.fsum(2.0 * gemm.m * gemm.k * gemm.n * gemm.calls for gemm in gemms)


def middle(steps: Sequence[GemmLog]) -> tuple[GemmLog, str]:
    """Of several captured steps the one whose linear-layer FLOPs are the median, and the spread in words."""
    work = {id(step): flops(step.gemms()) for step in steps}
    ordered = sorted(steps, key=lambda step: work[id(step)])
    chosen = ordered[len(ordered) // 2]
    low, mid, high = (max(work[id(step)], 1.0) for step in (ordered[0], chosen, ordered[-1]))
    return chosen, (
        f"batches change in size from step to step: the linear-layer FLOPs of {len(steps)} captured steps are "
        f"{low / mid:.2f} to {high / mid:.2f} times those of the middle one, which stands for all"
    )


def carrying(gemms: Sequence[Gemm]) -> list[Gemm]:
    """Those to benchmark: all, or of many shapes the ones that carry most of the FLOPs."""
    work: dict[tuple[int, int, int, int], float] = defaultdict(float)
    for gemm in gemms:
        work[gemm.m, gemm.k, gemm.n, gemm.groups] += flops([gemm])
    if len(work) <= MOST_SHAPES:
        return list(gemms)
    total, so_far = math.fsum(work.values()), 0.0
    kept = set()
    for shape in sorted(work, key=lambda shape: (-work[shape], shape)):
        if so_far >= CARRIED * total:
            break
        kept.add(shape)
        so_far += work[shape]
    return [gemm for gemm in gemms if (gemm.m, gemm.k, gemm.n, gemm.groups) in kept]


def spread(steps: Iterable[StepTime]) -> str | None:
    """How much the timed steps that count differ in size, and each recipe's share of it; None where they do not."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        if step.discarded is None and step.elements:
            sizes[step.recipe].append(step.elements)
    every = sorted(size for own in sizes.values() for size in own)
    if not every or every[0] == every[-1]:
        return None
    mid = statistics.median(every)
    each = ", ".join(f"{name} {statistics.median(own) / mid:.2f}" for name, own in sizes.items())
    return (
        f"timed steps hold batches of {every[0] / mid:.2f} to {every[-1] / mid:.2f} times the median size (elements of "
        f"their tensors); each recipe's median step: {each}. Their times differ for that reason too"
    )
