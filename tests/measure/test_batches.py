"""The sizes of batches: the usual one, none that is usual, and which shapes are worth a benchmark."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.measure.batches import CARRIED, MOST_SHAPES, StepSizes, carrying, flops, shapes_in, spread
from lowprec_callback.recording import Gemm, StepTime


def test_shapes_of_whatever_a_loader_gives() -> None:
    x, y = torch.zeros(4, 3), torch.zeros(4)
    assert shapes_in(x) == ((4, 3),)
    assert shapes_in((x, [y, {"a": x}])) == ((4, 3), (4,), (4, 3))
    assert shapes_in({"ids": x, "text": "words", "none": None}) == ((4, 3),)
    assert shapes_in(iter([x])) == ()


def odd_steps(lengths: list[int]) -> tuple[StepSizes, list[bool]]:
    sizes, odd = StepSizes(), []
    for length in lengths:
        sizes.batch(torch.zeros(2, length))
        elements, other = sizes.step()
        assert elements == 2 * length
        odd.append(other)
    return sizes, odd


def test_a_size_that_most_steps_have_is_the_usual_one() -> None:
    sizes, odd = odd_steps([8, 8, 8, 8, 3, 8])
    assert odd == [False, False, False, False, True, False]
    assert not sizes.changing


def test_where_no_size_is_usual_all_steps_count() -> None:
    sizes, odd = odd_steps([8, 5, 8, 7, 3, 6])
    assert not any(odd)
    assert sizes.changing


def test_batches_without_tensors_are_all_alike() -> None:
    sizes = StepSizes()
    sizes.batch("text")
    assert sizes.step() == (0, False)
    assert not sizes.changing


def gemm(m: int, calls: int = 1, **other: Any) -> Gemm:
    return Gemm("net", "fprop", m, 64, 64, calls, "Linear", True, **other)


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 4)), min_size=1, max_size=80))
def test_the_shapes_that_are_benchmarked_carry_most_of_the_flops(shapes: list[tuple[int, int]]) -> None:
    gemms = [gemm(m, calls) for m, calls in shapes]
    kept = carrying(gemms)
    distinct = {each.m for each in gemms}
    assert flops(kept) >= CARRIED * flops(gemms)
    if len(distinct) <= MOST_SHAPES:
        assert kept == gemms
    else:
        # And none of them could be left out.
        left = math.fsum(flops([each]) for each in kept) - min(
            flops(each for each in kept if each.m == m) for m in {each.m for each in kept}
        )
        assert left < CARRIED * flops(gemms) * (1 + 1e-9)


def test_the_spread_names_each_recipes_share() -> None:
    def step(recipe: str, elements: int | None, discarded: str | None = None) -> StepTime:
        return StepTime(recipe, 0, 0, 1.0, 1.0, discarded, elements)

    words = spread([step("bf16", 80), step("bf16", 100), step("fp8", 100), step("fp8", 150), step("fp8", 999, "odd")])
    assert words is not None
    assert "0.80 to 1.50 times the median size" in words
    assert "bf16 0.90, fp8 1.25" in words
    assert spread([step("bf16", 80), step("fp8", 80)]) is None
    assert spread([step("bf16", None)]) is None
