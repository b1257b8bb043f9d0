"""The plan: what fits into the time there is, what gives way when it does not, and what the user is told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.sweep.plan import (
    AS_TIMED,
    GUARD_SETTLE,
    LEAD_STEPS,
    LEAST_TIMED,
    SETTLING,
    Fitted,
    PlanError,
    Settings,
    fit_rest,
    fit_time,
    order_of_rounds,
)

SIZES = ("rounds", "settle_steps", "timed_steps", "traced_steps", "guard_steps")
SMALLEST = Settings(rounds=1, settle_steps=1, timed_steps=2, traced_steps=0, guard_steps=0)

settings_of_any_size = st.builds(
    Settings,
    rounds=st.integers(1, 6),
    settle_steps=st.integers(1, 8),
    timed_steps=st.integers(2, 20),
    traced_steps=st.integers(0, 5),
    guard_steps=st.integers(0, 5),
)


def fit(asked: Settings, recipes: int, steps: int) -> Fitted:
    """Into as many seconds as so many steps take, each of them one second long."""
    return fit_time(asked, recipes, steps - LEAD_STEPS, 1.0, 1.0)


@given(settings_of_any_size, st.integers(1, 6), st.integers(3, 1500))
def test_a_plan_fits_or_is_the_smallest(asked: Settings, recipes: int, available: int) -> None:
    fitted = fit(asked, recipes, available)
    got = fitted.settings
    assert got.steps(recipes) <= available or got == replace(SMALLEST, seed=asked.seed, max_rounds=asked.max_rounds)
    assert all(getattr(got, name) <= getattr(asked, name) for name in SIZES)
    assert got.seed == asked.seed
    assert (fitted.shrunk is None) == (got == asked)
    for name in SIZES:
        if getattr(got, name) < getattr(asked, name):
            assert f"{name} {getattr(asked, name)} -> {getattr(got, name)}" in (fitted.shrunk or "")
        else:
            assert f"{name} " not in (fitted.shrunk or "")
    if fitted.shrunk:
        _, _, costs = fitted.shrunk.partition("What this costs: ")
        assert costs


@given(settings_of_any_size, st.integers(1, 6), st.integers(0, 300))
def test_more_time_never_makes_a_smaller_plan(asked: Settings, recipes: int, available: int) -> None:
    available = max(available, SMALLEST.steps(recipes))
    fewer = fit(asked, recipes, available).settings
    more = fit(asked, recipes, available + 1).settings
    assert more.steps(recipes) >= fewer.steps(recipes)
    assert fit(asked, recipes, asked.steps(recipes)) == Fitted(asked, None)


def test_the_steps_of_a_plan_are_those_of_its_parts() -> None:
    plain = Settings(rounds=3, settle_steps=3, timed_steps=8, traced_steps=2, guard_steps=0)
    assert plain.steps(4) == 3 + 4 * (3 * 11 + 2 + AS_TIMED + 2)
    # The baseline twice, and for each the steps before.
    assert replace(plain, guard_steps=4).steps(4) == plain.steps(4) + 5 * (GUARD_SETTLE + 4)
    assert SMALLEST.steps(1) == 3 + 3


def test_what_is_cut_first_costs_least() -> None:
    asked = Settings()
    full = asked.steps(2)
    assert fit(asked, 2, full - 1).settings == replace(asked, rounds=2)
    assert fit(asked, 2, replace(asked, rounds=2).steps(2) - 1).settings == replace(asked, rounds=2, timed_steps=7)
    assert fit(asked, 2, SMALLEST.steps(2)).settings == SMALLEST


@pytest.mark.parametrize(
    ("available", "sentence"),
    [
        (90, "16 instead of 24 timed steps a recipe: intervals about 1.2 times as wide"),
        (19, "the ledger rests on 1 traced step a recipe"),
        (15, "the host's launch time is not measured"),
        (15, "no numerics guard: nothing compares the recipes' losses and gradients"),
        (40, "the numerics guard compares 2 steps a recipe"),
        (15, "less time to settle after each switch of the recipe"),
        (15, "one round only: drift of the clock cannot be told from a difference between recipes"),
        (9, "no traced steps: no ledger, no gap and no verdict"),
    ],
)
def test_each_cut_has_its_price(available: int, sentence: str) -> None:
    shrunk = fit(Settings(), 2, available).shrunk
    assert shrunk is not None
    assert sentence in shrunk


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 0),
        ("rounds", 1.0),
        ("rounds", True),
        ("settle_steps", 0),
        ("settle_steps", "3"),
        ("timed_steps", 1),
        ("timed_steps", None),
        ("traced_steps", -1),
        ("guard_steps", -1),
        ("seed", 0.5),
        ("seed", None),
        ("seed", True),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Settings(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "whole number" in str(caught.value)


@given(settings_of_any_size, st.integers(1, 6), st.lists(st.floats(0.01, 60), min_size=1, max_size=4), st.floats(1, 3))
def test_what_is_left_is_cut_until_it_fits_or_cannot_be_cut(
    asked: Settings, done: int, steps_s: list[float], watched: float
) -> None:
    whole = asked.seconds_after(done, steps_s, watched)
    assert fit_rest(asked, done, steps_s, watched, whole).settings == asked
    assert fit_rest(asked, done, steps_s, watched, whole + 1).shrunk is None
    for share in (0.7, 0.3, 0.0):
        fitted = fit_rest(asked, done, steps_s, watched, share * whole)
        got = fitted.settings
        if got.seconds_after(done, steps_s, watched) > share * whole:
            assert got.rounds == min(asked.rounds, done)
            assert (got.guard_steps, got.nvtx_steps) == (0, 0)
            assert got.traced_steps == min(asked.traced_steps, 1)
        assert (got.settle_steps, got.timed_steps) == (asked.settle_steps, asked.timed_steps)
        assert (fitted.shrunk is None) == (got == asked)


def test_what_is_left_takes_each_recipes_own_time() -> None:
    asked = Settings(rounds=3, settle_steps=1, timed_steps=2, traced_steps=1, guard_steps=1)
    # Two rounds of 3 steps, a traced step and four before it that take twice as long, and 4 of the guard, the first
    # recipe's again.
    assert asked.seconds_after(1, [1.0, 2.0], 2.0) == pytest.approx((2 * 3 + 5 * 2 + 4) * (1 + 2) + 4)
    assert asked.seconds_after(3, [1.0, 2.0], 2.0) == pytest.approx((5 * 2 + 4) * (1 + 2) + 4)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "20"])
def test_a_bad_length_of_a_block_is_named(value: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Settings(block_seconds=value)
    assert str(caught.value) == f"block_seconds={value!r}: must be None or a number of seconds above 0"


@pytest.mark.parametrize(
    ("step_s", "sizes"),
    [(0.0, (3, 8)), (0.5, (3, 8)), (1.9, (3, 8)), (3.0, (3, 5)), (5.0, (3, 3)), (6.5, (1, 3)), (60.0, (1, 3))],
)
def test_a_block_of_long_steps_is_short(step_s: float, sizes: tuple[int, int]) -> None:
    assert Settings().of_a_block(step_s) == sizes
    assert Settings(block_seconds=None).of_a_block(step_s) == (3, 8)


@given(settings_of_any_size, st.floats(0, 1e4), st.floats(1e-3, 1e5))
def test_a_block_is_never_longer_than_planned_and_long_only_for_its_least_steps(
    asked: Settings, step_s: float, bound: float
) -> None:
    asked = replace(asked, block_seconds=bound)
    settled, timed = asked.of_a_block(step_s)
    assert 1 <= settled <= asked.settle_steps
    assert min(LEAST_TIMED, asked.timed_steps) <= timed <= asked.timed_steps
    assert timed <= LEAST_TIMED or (timed - 1) * step_s <= (1 - SETTLING) * bound + 1e-9 * bound
    assert settled == 1 or step_s <= SETTLING * bound


@given(st.integers(1, 6), st.integers(1, 6), st.integers())
def test_each_round_runs_each_recipe_once(recipes: int, rounds: int, seed: int) -> None:
    names = [f"recipe{i}" for i in range(recipes)]
    orders = order_of_rounds(names, rounds, seed)
    assert len(orders) == rounds
    assert all(sorted(order) == names for order in orders)
    assert orders == order_of_rounds(names, rounds, seed)


def test_orders_differ_between_rounds_and_seeds() -> None:
    names = ["bf16", "fp8_delayed", "fp8_current", "fp8_block"]
    orders = order_of_rounds(names, 6, seed=0)
    assert len({tuple(order) for order in orders}) > 1
    assert orders != order_of_rounds(names, 6, seed=1)
