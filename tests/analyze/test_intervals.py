from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.intervals import owned_lengths, split_by_priority, union_length

Piece = tuple[int, int, int]
pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(0, 3)), max_size=14)
"""(start, length, rank), in whole units so that a count of cells is the answer."""


def split(found: list[Piece], shift: float = 0.0) -> np.ndarray:
    start = np.array([piece[0] for piece in found], dtype=float) + shift
    return split_by_priority(start, start + [piece[1] for piece in found], [piece[2] for piece in found], 4)


def brute_force(found: list[Piece]) -> list[int]:
    lengths = [0, 0, 0, 0]
    for cell in range(60):
        running = [rank for start, length, rank in found if start <= cell < start + length]
        if running:
            lengths[min(running)] += 1
    return lengths


@given(pieces)
def test_it_is_the_count_of_cells(found: list[Piece]) -> None:
    assert split(found).tolist() == brute_force(found)


@given(pieces)
def test_the_categories_sum_to_the_union(found: list[Piece]) -> None:
    ends = [start + length for start, length, _ in found]
    assert split(found).sum() == union_length([start for start, _, _ in found], ends)


@given(pieces, st.randoms(use_true_random=False), st.integers(-1000, 1000))
def test_order_and_origin_do_not_matter(found: list[Piece], random: object, shift: int) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert split(shuffled, float(shift)).tolist() == split(found).tolist()


def test_overlap_goes_to_the_higher_priority() -> None:
    # Communication (2) under a GEMM (0) is hidden; only what sticks out counts.
    assert split_by_priority([0.0, 4.0], [10.0, 12.0], [0, 2], 3).tolist() == [10.0, 0.0, 2.0]


def test_nothing_and_nonsense() -> None:
    assert split_by_priority([], [], [], 3).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="ends before"):
        union_length([2.0], [1.0])
    with pytest.raises(ValueError, match="ranks must lie"):
        split_by_priority([0.0], [1.0], [3], 3)


def test_fifty_thousand_kernels_are_quick() -> None:
    rng = np.random.default_rng(0)
    start = np.cumsum(rng.random(50_000))
    begun = time.perf_counter()
    split_by_priority(start, start + 2 * rng.random(50_000), rng.integers(0, 14, 50_000), 14)
    # 0.02 s on a laptop; the bound leaves room for a busy machine.
    assert time.perf_counter() - begun < 1.0


ranked = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5), st.integers(0, 3)), max_size=15)


@given(ranked)
def test_what_each_interval_owns_sums_to_its_ranks_share(rows: list[tuple[float, float, int]]) -> None:
    start, end = [a for a, _, _ in rows], [a + length for a, length, _ in rows]
    rank = [r for _, _, r in rows]
    owned = owned_lengths(start, end, rank)
    shares = split_by_priority(start, end, rank, 4)
    for r, share in enumerate(shares):
        assert math.fsum(owned[[i for i, each in enumerate(rank) if each == r]]) == pytest.approx(share, abs=1e-9)
    assert (owned >= 0).all()
    assert (owned <= np.array(end) - np.array(start) + 1e-9).all()


def test_of_one_rank_the_first_to_begin_owns_the_overlap() -> None:
    assert owned_lengths([0, 2, 1], [3, 6, 2], [1, 1, 0]).tolist() == [2, 3, 1]
    assert owned_lengths([0, 0], [2, 2], [0, 0]).tolist() == [2, 0]
    with pytest.raises(ValueError, match="ends before"):
        owned_lengths([1], [0], [0])
