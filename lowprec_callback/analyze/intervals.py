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
