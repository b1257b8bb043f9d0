from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.statistics import is_different, median_interval, ratio, stretch

times = st.floats(0.5, 1000.0)
rounds = st.dictionaries(st.integers(0, 6), st.lists(times, min_size=1, max_size=8), min_size=1, max_size=4)
few = settings(max_examples=40, deadline=None)


def test_known_answers() -> None:
    known = median_interval({0: [1.0, 2.0, 9.0], 1: [3.0, 4.0]})
    assert (known.value, known.n, known.n_rounds) == (3.0, 5, 2)
    same = median_interval({0: [5.0] * 4, 1: [5.0] * 4})
    assert (same.value, same.low, same.high) == (5.0, 5.0, 5.0)


def test_one_sample_has_no_interval() -> None:
    one = median_interval({3: [7.0]})
    assert (one.value, one.low, one.high, one.n, one.n_rounds) == (7.0, None, None, 1, 1)
    quotient = ratio({0: [4.0]}, {0: [2.0, 2.0]})
    assert (quotient.value, quotient.low) == (pytest.approx(2.0), None)
    assert is_different(quotient.low, quotient.high) is None


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval({0: []})
    with pytest.raises(ValueError, match="above zero"):
        ratio({0: [1.0, 0.0]}, {0: [1.0, 1.0]})


@few
@given(rounds)
def test_the_interval_holds_the_median_and_is_deterministic(samples: dict[int, list[float]]) -> None:
    estimate = median_interval(samples, 300)
    assert estimate == median_interval(samples, 300)
    assert estimate.value == pytest.approx(np.median(np.concatenate(list(samples.values()))))
    if estimate.low is not None and estimate.high is not None:
        assert estimate.low <= estimate.value <= estimate.high


@few
@given(rounds, st.floats(0.1, 50.0), st.floats(-200.0, 200.0))
def test_shift_and_scale(samples: dict[int, list[float]], scale: float, shift: float) -> None:
    plain = median_interval(samples, 300)
    moved = median_interval({key: [scale * x + shift for x in value] for key, value in samples.items()}, 300)
    size = 1e-6 * (abs(shift) + 1000 * scale)
    assert moved.value == pytest.approx(scale * plain.value + shift, abs=size)
    if plain.low is not None and plain.high is not None:
        # The stretch divides by the variance of the medians, which rounding can make of nothing.
        assert moved.low == pytest.approx(scale * plain.low + shift, rel=1e-3, abs=1e-3 * scale + size)
        assert moved.high == pytest.approx(scale * plain.high + shift, rel=1e-3, abs=1e-3 * scale + size)


@few
@given(rounds, rounds, st.floats(0.1, 50.0))
def test_a_ratio_ignores_the_unit(a: dict[int, list[float]], b: dict[int, list[float]], scale: float) -> None:
    plain = ratio(a, b, 300)
    scaled = ratio(*({k: [scale * x for x in v] for k, v in side.items()} for side in (a, b)), 300)  # type: ignore[misc]
    assert scaled.value == pytest.approx(plain.value)
    if plain.low is not None and plain.high is not None:
        assert 0 < plain.low <= plain.value <= plain.high


def test_more_samples_give_narrower_intervals_on_average() -> None:
    rng = np.random.default_rng(0)

    def width(count: int) -> float:
        found = []
        for _ in range(30):
            estimate = median_interval({r: list(rng.normal(100, 1, count)) for r in range(3)}, 300)
            assert estimate.low is not None
            assert estimate.high is not None
            found.append(estimate.high - estimate.low)
        return float(np.mean(found))

    assert width(40) < width(10) < width(3)


@pytest.mark.parametrize(("count", "between"), [(2, 0.0), (2, 3.0), (3, 0.0), (3, 2.0), (5, 1.0)])
def test_the_interval_covers_the_truth(count: int, between: float) -> None:
    """Also where rounds differ more than samples within them: there a plain bootstrap covers 50 to 80%."""
    rng = np.random.default_rng(count)
    hits = 0
    for _ in range(120):
        drawn = {r: list(100 + rng.normal(0, 1) * between + rng.normal(0, 1, 8)) for r in range(count)}
        estimate = median_interval(drawn, 300)
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= 100 <= estimate.high
    assert hits / 120 > 0.84


def test_pairing_by_round_takes_out_what_the_rounds_share() -> None:
    rng = np.random.default_rng(3)
    drift = {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.05}
    base = {r: list(100 * f * (1 + 0.001 * rng.normal(size=8))) for r, f in drift.items()}
    fast = {r: list(50 * f * (1 + 0.001 * rng.normal(size=8))) for r, f in drift.items()}
    paired = ratio(base, fast)
    assert paired.low is not None
    assert paired.high is not None
    # The rounds differ by 20%; the ratio does not.
    assert paired.high - paired.low < 0.25
    assert paired.low <= 2.0 <= paired.high


def test_stretch() -> None:
    assert stretch([3.0], [0.0]) == 1.0
    assert stretch([3.0, 3.0], [0.0, 0.0]) == 1.0
    assert stretch([1.0, 1.1, 0.9], [1.0, 1.0, 1.0]) == 1.0
    assert stretch([1.0, 2.0], [0.0, 0.0]) == pytest.approx(12.706 / 1.959964 * 2**0.5)
    assert stretch(list(range(100)), [0.0] * 100) == pytest.approx(1.0, abs=0.03)


def test_is_different() -> None:
    assert is_different(1.1, 1.3) is True
    assert is_different(0.9, 1.1) is False
    assert is_different(0.7, 0.8) is True
    assert is_different(None, 1.0) is None


def test_many_samples_of_one_block_are_resampled_without_drawing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same interval either way, but for the chance of a finite number of resamples."""
    from lowprec_callback.analyze import statistics

    rng = np.random.default_rng(3)
    for n in (601, 600):
        samples = {0: rng.gamma(4.0, 1.0, n).tolist()}
        fast = median_interval(samples)
        monkeypatch.setattr(statistics, "LARGE", 10**9)
        slow = median_interval(samples)
        monkeypatch.undo()
        assert fast.value == slow.value
        assert fast.low is not None
        assert fast.high is not None
        assert slow.low is not None
        assert slow.high is not None
        width = slow.high - slow.low
        assert abs(fast.low - slow.low) < 0.15 * width
        assert abs(fast.high - slow.high) < 0.15 * width


def test_drawing_a_few_rows_at_a_time_changes_the_draws_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowprec_callback.analyze import statistics

    rounds = {number: np.random.default_rng(number).normal(10, 1, 30).tolist() for number in range(3)}
    whole = median_interval(rounds)
    monkeypatch.setattr(statistics, "MOST_DRAWN", 30 * 3 * 7)
    parts = median_interval(rounds)
    assert whole.value == parts.value
    assert whole.low == pytest.approx(parts.low, abs=0.2)
    assert whole.high == pytest.approx(parts.high, abs=0.2)
