"""The numerics guard's reading of trials: distances, limits, what makes void, and what is only doubtful."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.numerics import GRADIENT_LIMIT, LIMIT, LIMIT_4_BIT, frozen_scales, numerics_reports
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import Plan, Recording, Scales, Trial
from lowprec_callback.report import NumericsReport
from lowprec_callback.show.console import as_text

from .recordings import BF16_CARD, CURRENT_CARD, NVFP4_CARD, gpu_facts

NAMES = ("embed.weight", "fc1.weight", "fc1.bias", "fc2.weight")
SIZES = (1000, 4000, 10, 4000)
CARDS = {card.recipe: card for card in (BF16_CARD, CURRENT_CARD, NVFP4_CARD)}
LOSSES = (4.0, 3.9, 3.8, 3.7)


def trial(recipe: str, step: int, loss: float | None, **more: Any) -> Trial:
    norms = (3.0, 2.0, 0.1, 1.0)
    made = Trial(
        recipe, step, 0, loss, 1, True, math.hypot(*norms), 4, sum(SIZES), names=NAMES, norms=norms, sizes=SIZES
    )
    return replace(made, **more)


def run(recipe: str, losses: Sequence[float | None] = LOSSES, **more: Any) -> list[Trial]:
    settle = trial(recipe, -1, math.nan, replayed=False, not_finite=("fc1.weight",))  # of that one nothing is compared
    return [settle, *(trial(recipe, step, loss, **more) for step, loss in enumerate(losses))]


def reports(
    *trials: Trial, scales: Sequence[Scales] = (), repeat: Sequence[float] | None = LOSSES
) -> dict[str, NumericsReport]:
    again = [replace(each, repeat=1) for each in run("bf16", repeat)] if repeat else []
    by_recipe: dict[str, list[tuple[int, Trial]]] = {}
    for line, fact in enumerate([*trials, *again], start=10):
        by_recipe.setdefault(fact.recipe, []).append((line, fact))
    names = list(dict.fromkeys(["bf16", *by_recipe]))
    by_scale = {"fp8_current": [(90 + i, fact) for i, fact in enumerate(scales)]}
    return numerics_reports(names, "bf16", by_recipe, by_scale, CARDS, "the fit was too short")


def report(losses: Sequence[float | None] = LOSSES, recipe: str = "fp8_current", **more: Any) -> NumericsReport:
    return reports(*run("bf16"), *run(recipe, losses, **more))[recipe]


def changed(recipe: str, step: int, **more: Any) -> list[Trial]:
    return [replace(each, **more) if each.step == step else each for each in run(recipe)]


# --- distance -------------------------------------------------------------------------------------------------------


def test_the_distance_is_relative_to_the_loss_and_the_way_it_went() -> None:
    found = report((4.0, 3.9, 3.82, 3.7))
    assert found.state == "ok"
    assert found.steps == 4
    # |3.82 - 3.8| / (3.8 + 0.1 + 0.1)
    assert found.distance.value == pytest.approx(100 * 0.02 / 4.0)
    assert (found.loss.value, found.loss_baseline.value) == (3.82, 3.8)
    assert found.limit.value == pytest.approx(LIMIT * 100)
    assert found.why == "the loss is 0.5% from bf16's after 2 updates on the same data"
    assert found.distance.facts == ("trial lines 11-14", "trial lines 16-19")
    assert (found.zero.value, found.not_finite.value, found.gradient_ratio.value) == (0, 0, 1.0)


def test_further_than_the_limit_is_far_and_speaks_of_its_first_cause() -> None:
    found = report((4.0, 3.9, 3.8, 3.5))
    assert found.state == "far"
    assert found.why == "the loss is 5% from bf16's after 3 updates on the same data (limit 1%)"


def test_four_bits_have_their_own_limit() -> None:
    losses = (4.0, 3.9, 3.8, 3.7 + 0.0125 * 4.0)
    assert report(losses).state == "far"
    found = report(losses, "nvfp4")
    assert (found.state, found.limit.value) == ("ok", LIMIT_4_BIT * 100)


def test_a_loss_near_zero_is_measured_by_its_way() -> None:
    base = (1.0, 0.1, 0.001, 0.0001)
    found = reports(*run("bf16", base), *run("fp8_current", (1.0, 0.1, 0.002, 0.0002)), repeat=base)
    assert found["fp8_current"].state == "ok"


WILD = (5.7, 7.2, 6.65, 6.07)
"""A fresh model at its full learning rate, as seen on an H200: its first update moves the loss by a quarter."""


def test_a_tenth_of_the_way_is_the_updates_own() -> None:
    found = reports(*run("bf16", WILD), *run("fp8_current", (5.7, 7.34, 6.7, 6.1)), repeat=WILD)["fp8_current"]
    assert found.distance.value == pytest.approx(100 * 0.14 / (7.2 + 1.5))
    assert found.distance.value > LIMIT * 100
    assert found.state == "ok"
    assert "within 10% of the way that bf16's own loss went" in found.why


@pytest.mark.parametrize("losses", [(5.7, 7.36, 6.7, 6.1), (5.78, 7.2, 6.65, 6.07)])
def test_more_than_a_tenth_or_before_any_update_is_far(losses: tuple[float, ...]) -> None:
    found = reports(*run("bf16", WILD), *run("fp8_current", losses), repeat=WILD)["fp8_current"]
    assert found.state == "far"


def test_negative_losses_are_losses() -> None:
    base = tuple(-x for x in LOSSES)
    found = reports(*run("bf16", base), *run("fp8_current", (-4.0, -3.9, -3.82, -3.7)), repeat=base)
    assert found["fp8_current"].distance.value == pytest.approx(0.5)


def test_a_loss_of_nothing() -> None:
    zeros = (0.0,) * 4
    found = reports(*run("bf16", zeros), *run("fp8_current", zeros), repeat=zeros)
    assert found["fp8_current"].state == "ok"
    found = reports(*run("bf16", zeros), *run("fp8_current", (0.0, 0.0, 0.0, 0.1)), repeat=zeros)
    assert found["fp8_current"].state == "unknown"
    assert "the baseline's loss is zero" in found["fp8_current"].why


finite = st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1e-3)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_the_distance_knows_no_unit(pairs: list[tuple[float, float]], factor: float) -> None:
    """Nats or bits, a sum or a mean over the batch: a factor on both sides changes nothing."""
    base, other = zip(*pairs, strict=True)
    one = reports(*run("bf16", base), *run("fp8_current", other), repeat=base)["fp8_current"]
    scaled = [tuple(x * factor for x in values) for values in (base, other)]
    two = reports(*run("bf16", scaled[0]), *run("fp8_current", scaled[1]), repeat=scaled[0])["fp8_current"]
    assert two.distance.value == pytest.approx(one.distance.value, rel=1e-6, abs=1e-9)
    assert one.distance.value is not None
    assert one.distance.value >= 0
    assert (one.distance.value == 0) == (base == other)


# --- the baseline ---------------------------------------------------------------------------------------------------


def test_the_baseline_is_held_against_its_own_repetition() -> None:
    base = reports(*run("bf16"))["bf16"]
    assert (base.state, base.distance.value) == ("ok", 0.0)
    assert base.why.endswith("its losses are the same to the last bit")
    noisy = reports(*run("bf16"), repeat=(4.0, 3.9, 3.8, 3.72))["bf16"]
    assert noisy.state == "ok"
    assert "0.5% away after 3 updates" in noisy.why


def test_without_the_repetition_recipes_are_still_compared() -> None:
    found = reports(*run("bf16"), *run("fp8_current"), repeat=None)
    assert found["fp8_current"].state == "ok"
    assert found["bf16"].state == "unknown"
    assert "it was not repeated" in found["bf16"].why


def test_a_baseline_that_does_not_repeat_is_no_yardstick() -> None:
    found = reports(*run("bf16"), *run("fp8_current", (4.0, 3.9, 3.8, 3.0)), repeat=(4.0, 3.9, 3.8, 3.2))
    assert found["bf16"].state == found["fp8_current"].state == "unknown"
    assert found["fp8_current"].why == "not compared: bf16 repeated is 12% away from itself"


def test_within_the_noise_of_the_limit_nothing_is_claimed() -> None:
    noisy = (4.0, 3.9, 3.8, 3.7 + 0.005 * 4.0)
    found = reports(*run("bf16"), *run("fp8_current", (4.0, 3.9, 3.8, 3.7 + 0.012 * 4.0)), repeat=noisy)
    assert found["fp8_current"].state == "unknown"
    assert "the limit within the noise of bf16 (0.5%)" in found["fp8_current"].why


# --- void -----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite() -> None:
    found = report((4.0, 3.9, math.inf, math.nan))
    assert (found.state, found.why) == ("not finite", "the loss is inf after 2 updates from the common state")
    assert found.distance.reason == "a loss is not finite"


def test_a_gradient_that_is_not_finite() -> None:
    bad = changed("fp8_current", 1, not_finite=("fc1.weight", "fc2.weight"), grad_norm=math.nan)
    found = reports(*run("bf16"), *bad)["fp8_current"]
    assert found.state == "not finite"
    assert found.why == "the gradients of fc1.weight, fc2.weight are not finite after 1 update from the common state"
    assert found.not_finite.value == 2


def test_what_a_loss_scaler_skips_ends_the_comparison() -> None:
    bad = changed("fp8_current", 1, not_finite=("fc1.weight",), loss_scale=65536.0)
    found = reports(*run("bf16"), *bad)["fp8_current"]
    assert (found.state, found.steps) == ("ok", 2)
    every = run("fp8_current", not_finite=("fc1.weight",), loss_scale=65536.0)
    found = reports(*run("bf16"), *every)["fp8_current"]
    assert found.state == "not finite"
    assert "skipped all 4 steps" in found.why


def test_every_gradient_zero() -> None:
    found = report(zero=NAMES)
    assert (found.state, found.why, found.zero.value) == ("zero gradients", "every gradient is zero", 4)


def test_gradients_that_the_baseline_has() -> None:
    found = report(zero=("fc1.weight",))
    assert found.state == "zero gradients"
    assert found.why == "the gradients of fc1.weight are zero in every step, and not in bf16 (44.4% of all elements)"
    few = report(zero=("fc1.bias",))
    assert few.state == "far"
    assert "(0.1% of all elements)" in few.why


def test_gradients_that_are_not_there() -> None:
    gone = run("fp8_current", names=NAMES[1:], norms=(2.0, 0.1, 1.0), sizes=SIZES[1:], parameters=3)
    found = reports(*run("bf16"), *gone)["fp8_current"]
    assert found.state == "zero gradients"
    assert "embed.weight are missing in every step" in found.why
    none = run("fp8_current", names=(), norms=(), elements=0, parameters=0, without=4, grad_norm=None)
    found = reports(*run("bf16"), *none)["fp8_current"]
    assert (found.state, found.why) == ("zero gradients", "no parameter has a gradient, where bf16 has 4")


def test_a_zero_that_is_the_models_own() -> None:
    zero = {"zero": ("fc1.weight",)}
    assert reports(*run("bf16", **zero), *run("fp8_current", **zero))["fp8_current"].state == "ok"
    once = [replace(each, zero=("fc1.weight",)) if each.step == 2 else each for each in run("bf16")]
    assert reports(*once, *run("fp8_current", **zero))["fp8_current"].state == "ok"
    some = [replace(each, zero=("fc1.weight",)) if each.step == 2 else each
            for each in run("fp8_current")]  # fmt: skip
    assert reports(*run("bf16"), *some)["fp8_current"].state == "ok"


def test_a_gradient_that_is_rounding_is_none() -> None:
    rounding = run("bf16", norms=(3.0, 1e-9, 0.1, 1.0))
    zero = {"zero": ("fc1.weight",)}
    assert reports(*rounding, *run("fp8_current", **zero))["fp8_current"].state == "ok"


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "state"), [(1.2, "ok"), (GRADIENT_LIMIT * 1.01, "far"), (0.9 / GRADIENT_LIMIT, "far")]
)
def test_the_length_of_the_gradient(factor: float, state: str) -> None:
    norms = (3.0, 2.0, 0.1, 1.0)
    found = report(norms=tuple(n * factor for n in norms), grad_norm=math.hypot(*norms) * factor)
    assert found.state == state
    assert found.gradient_ratio.value == pytest.approx(factor)
    if state == "far":
        told = "those of embed.weight, fc1.weight, fc2.weight and 1 more (100.0% of all elements)"
        assert f"{told} {factor:.3g}x in the median (limits 0.71x to 1.41x)" in found.why


def test_gradients_that_are_hidden_by_a_longer_one() -> None:
    """The embedding's, which no recipe reaches, is most of the whole."""
    norms = (3.0, 0.02, 0.001, 0.01)
    found = report(norms=norms, grad_norm=math.hypot(*norms))
    assert found.gradient_ratio.value is not None
    assert 1 / GRADIENT_LIMIT < found.gradient_ratio.value < 1
    assert found.state == "far"
    assert "those of fc1.weight, fc2.weight, fc1.bias (88.9% of all elements) 0.01x in the median" in found.why
    few = report(norms=(3.0, 2.0, 0.001, 1.0))
    assert few.state == "ok"  # a bias alone


def test_the_whole_gradient_alone() -> None:
    """Without the parts (none was recorded), the whole still tells."""
    found = report(names=(), norms=(), sizes=(), grad_norm=99.0)
    assert found.state == "far"
    assert "its gradient at the same weights is 26.4x as long as bf16's" in found.why


# --- absent ---------------------------------------------------------------------------------------------------------


def test_no_trials_are_a_reason() -> None:
    found = numerics_reports(["bf16", "fp8_current"], "bf16", {}, {}, CARDS, "the fit was too short")
    assert {each.state for each in found.values()} == {"unknown"}
    assert {each.why for each in found.values()} == {"the fit was too short"}
    assert found["fp8_current"].distance.reason == "the fit was too short"


def test_other_data_are_not_compared() -> None:
    found = report((4.0, 3.9, 3.0, 2.0), replayed=False, missing="a batch cannot be copied (TypeError: x)")
    assert (found.state, found.steps) == ("unknown", 0)
    assert found.why == "losses and gradients are finite; not compared: a batch cannot be copied (TypeError: x)"
    part = [
        replace(each, replayed=each.step < 2, loss=9.0 if each.step >= 2 else each.loss) for each in run("fp8_current")
    ]
    assert (reports(*run("bf16"), *part)["fp8_current"].steps) == 2


def test_nothing_was_read() -> None:
    found = report(
        (None,) * 4, parameters=0, elements=0, grad_norm=None, names=(), norms=(), missing="no loss, no gradient"
    )
    assert found.state == "unknown"
    assert found.zero.reason == "no loss, no gradient"
    assert found.not_finite.reason == "no loss, no gradient"


# --- scales ---------------------------------------------------------------------------------------------------------


def state(scale: tuple[float, ...], amax: tuple[float, ...] = (0.0, 0.0), module: str = "fc1") -> Scales:
    return Scales("fp8_current", module, "fwd", ("input", "weight"), scale, amax, amax, 16)


def test_scales_that_never_move() -> None:
    found = reports(*run("bf16"), *run("fp8_current"), scales=[state((1.0, 1.0))] * 3)["fp8_current"]
    assert found.state == "frozen scales"
    assert found.why.startswith("every scale stayed at 1 and every amax at 0 in fc1 at the end of every block")
    seen = frozen_scales([(1, state((1.0, 1.0), (3.0, 4.0)))])
    assert seen[0]
    assert "although amax values were seen" in (seen[1] or "")
    worse = reports(*run("bf16"), *run("fp8_current", (9.0,) * 4), scales=[state((1.0, 1.0))])["fp8_current"]
    assert worse.state == "far"
    assert "every scale stayed at 1" in (worse.scales or "")


def test_scales_that_move() -> None:
    moving = [state((64.0, 1.0), (7.0, 0.0)), state((128.0, 1.0), (3.5, 0.0))]
    found = reports(*run("bf16"), *run("fp8_current"), scales=moving)["fp8_current"]
    assert found.state == "ok"
    assert found.scales == "the scale of 1 tensor left 1, and changed from block to block in 1"
    assert frozen_scales([]) == (False, None)


# --- in the whole Report --------------------------------------------------------------------------------------------

FACTS = [replace(fact, guard_steps=4) if isinstance(fact, Plan) else fact for fact in gpu_facts()]


def whole(*trials: Trial) -> Any:
    again = [replace(each, repeat=1) for each in run("bf16")]
    return analyze(Recording.from_facts([*FACTS[:-1], *run("bf16"), *trials, *again, FACTS[-1]]))


def test_void_comes_first_and_the_recipe_wins_nothing() -> None:
    made = whole(*run("fp8_delayed", zero=NAMES))
    assert made.headline[0].startswith("fp8_delayed: every gradient is zero, so its speed is void")
    assert made.recipe("fp8_delayed").void == "every gradient is zero"
    assert not any("faster" in text for text in made.headline)
    assert "no reading, because every gradient is zero" in made.reading[0]


def test_a_doubt_comes_before_the_speed() -> None:
    made = whole(*run("fp8_delayed", (4.4, 4.3, 4.2, 4.1)))
    assert made.headline[0] == (
        "fp8_delayed: the loss is 10% from bf16's before the first update on the same data (limit 1%). Look into that "
        "before you count on its speed."
    )
    assert made.headline[1] == "fp8_delayed makes a step 1.56x faster (10.0 -> 6.40 ms)."
    assert made.recipe("fp8_delayed").void is None


def test_a_sound_recipe_leaves_the_headline_alone() -> None:
    made = whole(*run("fp8_delayed"))
    assert made.headline[0] == "fp8_delayed makes a step 1.56x faster (10.0 -> 6.40 ms)."
    assert made.recipe("fp8_delayed").guard.state == "ok"
    assert made.recipe("nvfp4").guard is None  # it was refused


def test_an_older_recording_has_no_guard() -> None:
    made = analyze(Recording.from_facts(gpu_facts()))
    assert {part.guard for part in made.recipes} == {None}


def test_a_run_that_ended_before_it() -> None:
    made = analyze(Recording.from_facts(FACTS[:-1]))
    guard = made.recipe("fp8_delayed").guard
    assert guard is not None
    assert guard.why.startswith("the run ended before it (the Recording has no end")


def test_with_a_baseline_that_does_not_compute_nothing_is_compared() -> None:
    broken = run("bf16", (math.nan,) * 4)
    made = analyze(Recording.from_facts([*FACTS[:-1], *broken, *run("fp8_delayed"), FACTS[-1]]))
    assert made.headline[0].startswith("bf16: the loss is nan before the first update")
    assert made.headline[1].startswith("No speedup means anything, because bf16")
    assert not any("faster" in text for text in made.headline)
    page = as_text(made)
    assert "void: of bf16, the loss is nan before the first update" in page
    assert re.search(r"fp8_delayed +6.40 ±0.0\d +\[1\] ", page)


def test_a_void_speed_is_not_in_the_table() -> None:
    page = as_text(whole(*run("fp8_delayed", zero=NAMES)))
    assert "void: every gradient is zero" in page
    assert re.search(r"fp8_delayed +6.40 ±0.0\d +\[1\] ", page)
