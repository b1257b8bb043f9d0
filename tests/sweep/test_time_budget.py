"""The sweep's own clock, and a plan that is cut to fit into a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.sweep.plan import AS_TIMED, LEAD_STEPS, Settings, fit_time
from lowprec_callback.sweep.time_budget import Pace, in_words


def test_time_runs_from_the_start() -> None:
    at = 100.0
    pace = Pace(max_seconds=8.0, now=lambda: at)
    assert pace.elapsed_s == 0.0
    pace.start()
    at = 105.0
    assert (pace.elapsed_s, pace.left_s, pace.up) == (5.0, 3.0, False)
    at = 110.0
    assert (pace.left_s, pace.up) == (0.0, True)
    assert Pace(now=lambda: at).left_s is None
    assert not Pace(now=lambda: at).up


def test_in_words() -> None:
    assert [in_words(s) for s in (0.031, 0.4, 8.0, 9.94, 9.96, 99.0, 200.0, 3900.0, 7500.0)] == [
        *("0.031 s", "0.4 s", "8 s", "9.9 s", "10 s", "99 s", "3 min 20 s", "65 min 00 s", "2 h 05 min"),
    ]


@given(st.integers(1, 5), st.floats(0, 500), st.floats(0.01, 10), st.floats(1, 20))
def test_the_plan_fits_into_the_time_or_is_the_smallest(
    recipes: int, seconds: float, plain: float, times: float
) -> None:
    asked, watched = Settings(), plain * times
    fitted = fit_time(asked, recipes, seconds, plain, watched)
    smallest = Settings(rounds=1, settle_steps=1, timed_steps=2, traced_steps=0, guard_steps=0)
    assert fitted.settings.seconds(recipes, plain, watched) <= seconds or fitted.settings == smallest
    assert (fitted.shrunk is None) == (fitted.settings == asked)
    if fitted.shrunk:
        assert "What this costs: " in fitted.shrunk


def test_seconds_are_those_of_all_steps_after_the_lead() -> None:
    settings = Settings(rounds=2, settle_steps=1, timed_steps=3, traced_steps=1)
    assert settings.seconds(3, 1.0, 1.0) == settings.steps(3) - LEAD_STEPS
    assert settings.seconds(3, 0.0, 1.0) == 3 * (1 + 2 + AS_TIMED)
