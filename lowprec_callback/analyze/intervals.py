"""Unions of intervals: how long a GPU was busy, and with what, each instant counted once.

Kernels of several streams overlap, so the sum of their durations can exceed the time that passed. Here every
instant belongs to at most one category: of all kernels that run in it, the one whose category has the highest
priority. The shares then add up to the union, by construction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def union_length(start: ArrayLike, end: ArrayLike) -> float:
    """Length of the union of the intervals [start, end), in their unit."""
    begins = np.asarray(start, dtype=np.float64)
    return float(split_by_priority(begins, end, np.zeros(begins.shape, dtype=np.intp), 1)[0])


def split_by_priority(
    start: ArrayLike, end: ArrayLike, rank: ArrayLike | Sequence[int], n_ranks: int
) -> NDArray[np.float64]:
    """Length of the union, split by category: element r is the time in which rank r ran and no lower rank
    did.

    Rank 0 has the highest priority. A sweep over all boundaries in time order cuts the axis into segments;
    open[r] counts the intervals of rank r that cover a segment, and a segment belongs to the lowest r with
    open[r] > 0. O(n log n) for the sort and O(n n_ranks) for the counts.

    Raises ValueError for an interval that ends before it begins, or a rank outside 0..n_ranks-1.
    """
    begins, ends = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    ranks = np.asarray(rank, dtype=np.intp)
    lengths = np.zeros(n_ranks)
    if begins.size == 0:
        return lengths
    if not bool(np.all(ends >= begins)):
        raise ValueError("an interval ends before it begins, or is not a number")
    if ranks.min() < 0 or ranks.max() >= n_ranks:
        raise ValueError(f"ranks must lie in 0..{n_ranks - 1}, got {ranks.min()}..{ranks.max()}")

    time = np.concatenate([begins, ends])
    order = np.argsort(time, kind="stable")
    time = time[order]
    change = np.concatenate([np.ones(begins.size, dtype=np.int32), np.full(begins.size, -1, dtype=np.int32)])[order]
    owner = np.concatenate([ranks, ranks])[order]

    taken = np.zeros(time.size - 1, dtype=bool)
    segments = np.diff(time)
    for r in np.unique(ranks):
        open_r = np.cumsum(np.where(owner == r, change, 0))[:-1] > 0
        lengths[r] = float(segments[open_r & ~taken].sum())
        taken |= open_r
    return lengths


def owned_lengths(start: ArrayLike, end: ArrayLike, rank: ArrayLike | Sequence[int]) -> NDArray[np.float64]:
    """Length of the union, split by interval: element i is the time that interval i owns.

    Every instant is owned by exactly one of the intervals that cover it: of those with the lowest rank, the one that
    began first (of equal ones, the first in order). So the lengths of one rank's intervals sum to its share of
    `split_by_priority`, and all of them to the union. Rank by rank, with U the union of all lower ranks:

        own part within the rank: [max(start_i, latest end of those before i), end_i)
        length_i = its length - its overlap with U          overlap from F(t), the measure of U before t

    O(n log n) for each rank that occurs. Raises ValueError as `split_by_priority` does.
    """
    begins, ends = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    ranks = np.asarray(rank, dtype=np.intp)
    if not bool(np.all(ends >= begins)):
        raise ValueError("an interval ends before it begins, or is not a number")
    lengths = np.zeros(begins.shape)
    taken = np.zeros((0, 2))
    for r in np.unique(ranks):
        rows = np.flatnonzero(ranks == r)
        rows = rows[np.argsort(begins[rows], kind="stable")]
        latest = np.concatenate([[-np.inf], np.maximum.accumulate(ends[rows])[:-1]])
        first = np.minimum(np.maximum(begins[rows], latest), ends[rows])
        lengths[rows] = ends[rows] - first - (_measure(taken, ends[rows]) - _measure(taken, first))
        taken = _union(np.concatenate([taken, np.column_stack([begins[rows], ends[rows]])]))
    # Rounding can leave a little less than nothing of an interval that others cover.
    return np.maximum(lengths, 0.0)


def _union(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """The union of spans (begin, end) as disjoint ones in order of time."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    latest = np.maximum.accumulate(spans[:, 1])
    opens = np.concatenate([[True], spans[1:, 0] > latest[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.column_stack([spans[opens, 0], latest[closes]])


def _measure(spans: NDArray[np.float64], instants: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of disjoint spans lies before each instant."""
    if not len(spans):
        return np.zeros(len(instants))
    before = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    at = np.searchsorted(spans[:, 0], instants, side="right") - 1
    inside = np.where(at >= 0, np.minimum(instants, spans[at, 1]) - spans[at, 0], 0.0)
    return np.asarray(np.where(at >= 0, before[at], 0.0) + inside, dtype=np.float64)
