"""Where a step ends: one optimizer, several, and one that rests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.trainer.step_window import PATIENCE, StepWindow


def steps_of(window: StepWindow, batches: list[list[int]]) -> list[int]:
    """Batches in each step, for the optimizers that step in each batch."""
    found, at = [], 0
    for steps in batches:
        window.batch_begins(at)
        for which in steps:
            window.optimizer_steps(which)
        at += len(steps)
        if window.batch_ends(at):
            found.append(window.batches)
            window.again()
    return found


@given(st.integers(1, 5), st.integers(1, 6))
def test_with_accumulation_a_step_is_as_many_batches(accumulate: int, steps: int) -> None:
    batches = ([[]] * (accumulate - 1) + [[0]]) * steps
    assert steps_of(StepWindow(1), batches) == [accumulate] * steps


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([[0, 1]] * 3, [1, 1, 1]),
        ([[0], [1]] * 3, [2, 2, 2]),
        ([[0], [0], [0], [0, 1]] * 2, [4, 4]),
        ([[], [0, 1]] * 2, [2, 2]),
        ([[]] * 5, []),
    ],
)
def test_with_several_optimizers_a_step_ends_when_each_has_stepped(batches: list[list[int]], found: list[int]) -> None:
    assert steps_of(StepWindow(2), batches) == found


def test_an_optimizer_that_rests_is_given_up_and_welcomed_back() -> None:
    assert steps_of(StepWindow(2), [[0]] * (PATIENCE + 2)) == [PATIENCE, 1, 1]
    assert steps_of(StepWindow(2), [[0]] * PATIENCE + [[1], [0], [0, 1], [0]]) == [PATIENCE, 2, 1]


def test_steps_that_only_the_global_step_shows_count_too() -> None:
    """An optimizer without hooks: Lightning's counter is all that there is."""
    window = StepWindow(2)
    window.batch_begins(7)
    assert window.batch_ends(9)
    assert window.increments == 2
