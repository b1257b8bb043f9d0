"""When rounds are enough: precision, time."""

from __future__ import annotations

import math

import pytest

from lowprec_callback.sweep.rounds import MOST_SECONDS, Rounds, half_width, widest

QUIET, NOISY = [100.0, 100.4, 99.8], [60.0, 100.0, 80.0]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def rounds(most: int = 12, clock: Clock | None = None) -> Rounds:
    return Rounds(3, most, 0.02, clock or Clock())


def fill(made: Rounds, **medians: list[float]) -> Rounds:
    for name, each in medians.items():
        for median in each:
            made.add(name, [median - 1.0, median, median + 1.0])
    return made


def test_the_half_width_is_students() -> None:
    assert half_width([100.0]) is None
    assert half_width([99.0, 101.0]) == pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2) / 100)
    assert half_width([98.0, 100.0, 102.0]) == pytest.approx(4.303 * 2 / math.sqrt(3) / 100)


def test_the_widest_is_of_all_and_unknown_where_one_is() -> None:
    assert widest({}) is None
    assert widest({"a": QUIET, "b": [1.0]}) is None
    assert widest({"a": QUIET, "b": NOISY}) == half_width(NOISY)


def test_the_plans_rounds_always_run() -> None:
    made = fill(rounds(), a=QUIET)
    assert [made.why_stop(done, 10) for done in range(3)] == ["", "", ""]
    assert made.extra_steps == 0


def test_known_well_enough() -> None:
    made = fill(rounds(), a=QUIET, b=QUIET)
    assert made.why_stop(3, 10) == "precise"


def test_more_rounds_until_the_most() -> None:
    made = fill(rounds(most=5), a=QUIET, b=NOISY)
    assert [made.why_stop(done, 10) for done in (3, 4, 5)] == ["", "", "rounds"]
    assert made.extra_steps == 20


def test_none_are_wanted_beyond_the_plan() -> None:
    assert fill(rounds(most=0), a=NOISY).why_stop(3, 10) == "planned"


def test_a_block_without_a_step_that_counts_leaves_its_recipe_unknown() -> None:
    made = fill(rounds(), a=QUIET)
    made.add("b", [])
    assert made.medians.keys() == {"a"}


def test_time_ends_them() -> None:
    clock = Clock()
    made = fill(rounds(clock=clock), a=NOISY)
    assert made.why_stop(3, 10) == ""
    clock.seconds = MOST_SECONDS - 1
    assert made.why_stop(4, 10) == ""
    clock.seconds = MOST_SECONDS
    assert made.why_stop(5, 10) == "seconds"
