"""Rates that no GPU can reach are refused, wherever they would have been shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowprec_callback.analyze.gemm_rates import highest_clock, peaks_of, without_impossible
from lowprec_callback.recording import Environment, GemmTime, Recording
from tests import gemm_recordings as made


def on(recording: Recording, **changes: object) -> Recording:
    """On another device."""
    return Recording.from_facts(
        [replace(f, **changes) if isinstance(f, Environment) else f for f in recording]  # type: ignore[arg-type]
    )


def refused(recording: Recording) -> list[tuple[str, str, str]]:
    return [(t.recipe, t.role, t.mode) for t in without_impossible(recording).of(GemmTime) if t.failure]


def test_peaks_of_an_h200() -> None:
    peaks = peaks_of(made.role_true())
    assert {key: peak.tflops for key, peak in peaks.items() if key[1] == "dgrad"} == {
        ("bf16", "dgrad"): 989.5,
        ("fp8_delayed", "dgrad"): 1979.0,
        ("fp8_current", "dgrad"): 1979.0,
        ("fp8_block", "dgrad"): 1979.0,
        ("mxfp8", "dgrad"): 1979.0,
        ("nvfp4", "dgrad"): None,
    }
    assert highest_clock(made.role_true()) == 1980


def test_published_times_are_possible() -> None:
    for recording in (made.role_true(), made.te_tutorial(), made.b300()):
        possible = without_impossible(recording)
        assert list(possible) == list(recording)


def test_an_impossible_time_is_a_failure_with_the_reason() -> None:
    recording = made.too_fast(made.role_true())
    assert refused(recording) == [("fp8_delayed", "wgrad", "autocast"), ("fp8_delayed", "wgrad", "kernel")]
    (fact, _) = [t for t in without_impossible(recording).of(GemmTime) if t.failure]
    assert fact.samples_ms == fact.quantize_ms == ()
    assert fact.failure is not None
    assert fact.failure.startswith("12713 TFLOP/s is impossible: the dense fp8 peak of the H200 SXM is 1979, 2141 at ")


def test_line_numbers_stay() -> None:
    recording = made.too_fast(made.role_true())
    pairs = zip(without_impossible(recording).lines(GemmTime), recording.lines(GemmTime), strict=True)
    assert all(new[0] == old[0] for new, old in pairs)


@pytest.mark.parametrize(("ms", "possible"), [(0.13, True), (0.125, True), (0.124, False), (0.06, False)])
def test_the_ceiling_is_the_peak_at_the_highest_clock(ms: float, possible: bool) -> None:
    """BF16, 4096 cubed: 137.4 GFLOP; 989.5 x 1980 / 1830 x 1.03 = 1103 TFLOP/s -> 0.1246 ms."""
    facts = [
        replace(f, samples_ms=(ms,), quantize_ms=()) if isinstance(f, GemmTime) else f
        for f in made.listed()
        if not isinstance(f, GemmTime) or (f.m, f.recipe) == (4096, "bf16")
    ]
    assert (refused(Recording.from_facts(facts)) == []) == possible


def test_a_plain_linear_is_held_against_the_peak_of_what_it_ran_in() -> None:
    """In BF16, which is half of the FP8 peak, though it stands in every recipe's sum."""
    fast = made.changed(
        made.role_true(replace(made.CODONFM, vocab_size=32000)),
        lambda t: replace(t, samples_ms=(3.0,), quantize_ms=()) if t.family == "nn.Linear" else t,
    )
    assert set(refused(fast)) == {("bf16", role, mode) for role in ("fprop", "dgrad", "wgrad") for mode in MODES}


MODES = ("autocast", "kernel")


def test_without_a_peak_nothing_can_be_refused() -> None:
    fast = made.too_fast(made.role_true())
    assert refused(on(fast, device="NVIDIA X9")) == []
    assert refused(on(fast, device="AMD EPYC", device_type="cpu")) == []
    assert peaks_of(on(fast, device_type="cpu")) == {}
    assert refused(Recording.from_facts([f for f in fast if not isinstance(f, Environment)])) == []


@pytest.mark.parametrize(("text", "clock"), [("1980 MHz", 1980), ("", None), ("unknown", None)])
def test_a_clock_that_was_not_recorded_is_none(text: str, clock: int | None) -> None:
    assert highest_clock(on(made.role_true(), facts={"highest sm clock": text} if text else {})) == clock


def test_failures_stay_what_they_were() -> None:
    recording = made.failed(made.role_true())
    assert {t.failure for t in without_impossible(recording).of(GemmTime)} == {None, "out of memory"}
