"""Two Reports: the words, the refusals, and what noise allows to say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowprec_callback
from lowprec_callback.analyze import compare as module
from lowprec_callback.analyze.comparable import NotComparable, differences, shapes
from lowprec_callback.analyze.compare import Comparison, compare
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import GemmTime, Loss, Recording
from lowprec_callback.report import Figure, RecipeReport, Report, load_report

from .compared import recipe, report, rounds, with_recipe
from .recordings import gpu_facts

SWAPPED = {"faster": "slower", "slower": "faster", "higher": "lower", "lower": "higher"}


def word(a: Report, b: Report, metric: str = "step", name: str = "fp8_delayed", **more: Any) -> str:
    return compare(a, b, **more).change(metric, name).word


def test_it_is_public() -> None:
    assert lowprec_callback.compare is compare


# -- words -------------------------------------------------------------------------------------------------


def test_a_report_against_itself_is_the_same_in_all() -> None:
    found = compare(report(), report())
    assert {change.word for change in found.changes} == {"same"}
    assert found.recipes == ("bf16", "fp8_delayed")
    assert not found.remarks
    assert not found.allowed


@pytest.mark.parametrize("seed", range(20, 120, 20))
def test_the_same_measured_twice_is_the_same(seed: int) -> None:
    found = compare(report(1), report(seed))
    assert found.change("step", "bf16").word == "same"
    assert found.change("step", "fp8_delayed").word == "same"
    assert not {change.word for change in found.changes} & {"slower", "faster", "higher", "lower"}


@pytest.mark.parametrize("seed", range(20, 120, 20))
def test_a_planted_slowdown_of_3_percent_is_slower(seed: int) -> None:
    before, after = report(1), report(seed, fp8=80.0 * 1.03)
    change = compare(before, after).change("step", "fp8_delayed")
    assert change.word == "slower"
    assert change.ratio.low is not None
    assert change.ratio.high is not None
    assert change.ratio.low <= 1.03 <= change.ratio.high
    assert word(before, after, name="bf16") == "same"
    assert word(before, after, "speedup") == "lower"
    assert word(after, before) == "faster"


def test_noise_is_not_the_same() -> None:
    """The interval holds 1, and far more."""
    change = compare(report(1, noise=0.1), report(50, noise=0.1)).change("step", "fp8_delayed")
    assert change.word == "cannot tell"
    assert "holds no change and also one beyond the margin of 1%" in change.why


def test_a_wider_margin_calls_more_the_same() -> None:
    before, after = report(1), report(50, fp8=82.4)
    assert word(before, after, margin=0.01) == "slower"
    assert word(before, after, margin=0.10) == "same"


def test_rounds_that_differ_by_runs_of_the_same_seldom_look_different() -> None:
    """A/A with drift from round to round: at most about one in twenty may be called different."""
    count = Counter()
    for seed in range(0, 600, 3):
        sides = []
        for side in range(2):
            samples = rounds(80.0, 10_000 + 2 * seed + side, 0.002, count=4, drift=0.01)
            sides.append(replace(report(), recipes=(recipe("bf16", samples, samples),)))
        count[word(sides[0], sides[1], name="bf16")] += 1
    assert count["slower"] + count["faster"] <= 0.08 * 200
    assert count["same"] < 0.05 * 200, "a drift of 1% from round to round is too much to show equality within 1%"


def test_one_sample_tells_nothing() -> None:
    made = with_recipe(report(), "fp8_delayed", step_ms=Figure(80.0, "ms", "measured", n=1))
    change = compare(made, report()).change("step", "fp8_delayed")
    assert change.word == "cannot tell"
    assert "single sample" in change.why


def test_one_round_is_compared_and_said() -> None:
    one = rounds(100.0, 5, count=1)
    made = replace(report(), recipes=(recipe("bf16", one, one),))
    found = compare(made, report())
    assert found.change("step", "bf16").word == "same"
    assert found.change("step", "bf16").why == "one round in A: the interval holds no drift between rounds"


def test_a_missing_number_has_its_reason() -> None:
    made = with_recipe(report(), "fp8_delayed", step_ms=Figure.missing("ms", "stopped early"))
    change = compare(report(), made).change("step", "fp8_delayed")
    assert (change.word, change.why) == ("cannot tell", "B: stopped early")
    assert not change.ratio.known


def test_a_recipe_that_diverged_is_fast_for_nothing() -> None:
    after = with_recipe(report(30, fp8=40.0), "fp8_delayed", void="the loss became nan")
    found = compare(report(), after)
    mine = [change for change in found.changes if change.recipe == "fp8_delayed"]
    assert {change.word for change in mine} == {"cannot tell"}
    assert {change.why for change in mine} == {"in B the loss became nan: its numbers count for nothing"}
    assert not any(change.a.known or change.b.known for change in mine)


def test_what_is_counted_needs_no_interval() -> None:
    verdict = report().recipe("fp8_delayed").verdict
    assert verdict is not None
    after = with_recipe(
        report(),
        "fp8_delayed",
        verdict=replace(verdict, coverage=Figure(99.9, "%")),
        peak_gb=Figure(92.0, "GB", "measured"),
    )
    assert word(report(), after, "coverage") == "lower"
    assert word(report(), after, "peak") == "higher"
    slightly = with_recipe(report(), "fp8_delayed", peak_gb=Figure(90.5, "GB", "measured"))
    assert word(report(), slightly, "peak") == "same"


# -- buckets -----------------------------------------------------------------------------------------------


def of_work(seed: int, work: dict[str, float], **more: Any) -> Report:
    samples = rounds(100.0, seed)
    return replace(report(), recipes=(recipe("bf16", samples, samples, seed, work, **more),))


def test_a_bucket_that_grew() -> None:
    before, after = of_work(1, {"gemm": 60.0, "quantize": 8.0}), of_work(9, {"gemm": 60.0, "quantize": 9.0})
    assert word(before, after, "bucket.quantize", "bf16") == "slower"
    assert word(after, before, "bucket.quantize", "bf16") == "faster"
    assert word(before, after, "bucket.gemm", "bf16") == "same"


def test_work_that_is_new() -> None:
    before, after = of_work(1, {"gemm": 60.0}), of_work(9, {"gemm": 60.0, "copy": 1.0})
    change = compare(before, after).change("bucket.copy", "bf16")
    assert change.word == "slower"
    assert change.ratio.reason == "A has no such work, so a change has no percentage: give the limit in ms"


def test_a_change_that_is_nothing_to_the_step_is_the_same() -> None:
    """Three times as much, and 0.02 of 100 ms."""
    before, after = of_work(1, {"gemm": 60.0, "scale": 0.01}), of_work(9, {"gemm": 60.0, "scale": 0.03})
    assert word(before, after, "bucket.scale", "bf16") == "same"


def test_blocks_that_differ_make_buckets_uncertain() -> None:
    """Two traced steps agree well, but timed blocks differ by 5%: a bucket 4% longer may be just another block."""

    def made(seed: int, ms: float) -> Report:
        samples = rounds(100.0, seed, drift=0.05)
        return replace(report(), recipes=(recipe("bf16", samples, samples, seed, {"gemm": ms}),))

    assert word(made(3, 60.0), made(8, 62.4), "bucket.gemm", "bf16") == "cannot tell"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"complete": False, "complaints": ("12 kernels are missing",)}, "the ledger of B is incomplete: 12 kernels"),
        ({"steps": {}}, "analyse its Recording again"),
    ],
)
def test_a_ledger_that_cannot_tell(change: dict[str, Any], reason: str) -> None:
    ledger = report().recipe("fp8_delayed").ledger
    assert ledger is not None
    found = compare(report(), with_recipe(report(), "fp8_delayed", ledger=replace(ledger, **change)))
    told = found.change("bucket.gemm", "fp8_delayed")
    assert told.word == "cannot tell"
    assert reason in told.why
    assert found.change("bucket.gemm", "bf16").word == "same"


def test_no_ledger() -> None:
    found = compare(with_recipe(report(), "bf16", ledger=None, no_ledger="no traced step"), report())
    assert found.change("busy", "bf16").why == "no ledger in A: no traced step"


def test_single_traced_steps_have_no_scatter() -> None:
    def once(made: Report) -> Report:
        ledger = made.recipe("bf16").ledger
        assert ledger is not None
        return with_recipe(made, "bf16", ledger=replace(ledger, steps={k: v[:1] for k, v in ledger.steps.items()}))

    both = compare(once(report(1)), once(report(9))).change("bucket.gemm", "bf16")
    assert (both.word, both.why) == ("cannot tell", "one traced step a side: its scatter is not known")
    assert word(once(report(1)), report(9), "bucket.gemm", "bf16") == "same"


def test_one_round_a_side_says_nothing_of_blocks() -> None:
    def once(seed: int) -> Report:
        samples = rounds(100.0, seed, count=1)
        return replace(report(), recipes=(recipe("bf16", samples, samples, seed),))

    told = compare(once(1), once(2)).change("bucket.gemm", "bf16")
    assert told.word == "cannot tell"
    assert "how much blocks differ is not known" in told.why


# -- laws --------------------------------------------------------------------------------------------------

sizes = st.floats(0.5, 2.0)
noises = st.sampled_from([0.0, 0.001, 0.005, 0.05])


@settings(max_examples=30, deadline=None)
@given(sizes, sizes, noises, noises, st.integers(0, 99), st.sampled_from([0.003, 0.01, 0.2]))
def test_swapping_a_and_b_swaps_the_words_and_nothing_else(
    x: float, y: float, noise_a: float, noise_b: float, seed: int, margin: float
) -> None:
    a, b = report(seed, fp8=80 * x, noise=noise_a), report(seed + 100, fp8=80 * y, noise=noise_b)
    there, back = compare(a, b, margin), compare(b, a, margin)
    for one, other in zip(there.changes, back.changes, strict=True):
        assert other.word == SWAPPED.get(one.word, one.word)
        assert (one.a, one.b) == (other.b, other.a)


limits = st.tuples(st.floats(1, 100), st.floats(0, 0.3), st.floats(0, 0.3))


@given(limits, limits, st.floats(0.001, 0.5))
def test_words_follow_from_the_interval(a: Any, b: Any, margin: float) -> None:
    one, other = (
        Figure(value, "ms", "measured", value * (1 - below), value * (1 + above)) for value, below, above in (a, b)
    )
    change = module._by_ratio("r", "step", one, other, margin, ("faster", "slower"))
    low, high = change.ratio.low, change.ratio.high
    assert low is not None
    assert high is not None
    assert low <= (change.ratio.value or 0) * (1 + 1e-9)
    assert high >= (change.ratio.value or 0) * (1 - 1e-9)
    if change.word == "same":
        assert 1 / (1 + margin) <= low <= high <= 1 + margin
    elif change.word == "slower":
        assert low > 1
    elif change.word == "faster":
        assert high < 1
    else:
        assert low <= 1 <= high
        assert change.why


# -- what is not comparable --------------------------------------------------------------------------------


def other_shapes(made: Report) -> Report:
    gemms = made.recipe("bf16").gemms
    return with_recipe(made, "bf16", gemms=(replace(gemms[0], m=2048),))


UNLIKE: list[tuple[Report, str, str]] = [
    (replace(report(), device="NVIDIA B200"), "device", "NVIDIA H200 against NVIDIA B200"),
    (replace(report(), engine="imported"), "engine", "transformer_engine against imported"),
    (replace(report(), model="GPT-XL"), "model", "MiniGPT against GPT-XL"),
    (other_shapes(report()), "shapes", "4 x fprop 1024x256x512 against 4 x fprop 2048x256x512"),
    (with_recipe(report(), "bf16", gemms=()), "shapes", "known against not known"),
    (
        with_recipe(report(), "fp8_delayed", asked={**report().recipe("bf16").asked, "amax_history_len": "16"}),  # type: ignore[dict-item]
        "recipe.fp8_delayed",
        "amax_history_len=1024 against amax_history_len=16",
    ),
    (with_recipe(report(), "fp8_delayed", asked=None), "recipe.fp8_delayed", "known against not known"),
    *(
        (replace(report(), versions={**report().versions, name: "99"}), f"version.{name}", "against 99")
        for name in ("torch", "transformer_engine", "cuda", "driver", "cudnn")
    ),
    (replace(report(), versions={"torch": "2.11.0"}), "version.cudnn", "9.19 against absent"),
    (
        replace(report(), conditions={**(report().conditions or {}), "micro-batches": "4"}),
        "condition.micro-batches",
        "1 against 4",
    ),
    (
        replace(report(), conditions={**(report().conditions or {}), "NVTE_FUSED_ATTN": "0"}),
        "condition.NVTE_FUSED_ATTN",
        "absent against 0",
    ),
    (replace(report(), conditions=None), "conditions", "known against not known"),
]


@pytest.mark.parametrize(("after", "name", "sentence"), UNLIKE, ids=[each[1] for each in UNLIKE])
def test_what_differs_is_named_and_refused_unless_allowed(after: Report, name: str, sentence: str) -> None:
    with pytest.raises(NotComparable) as caught:
        compare(report(), after)
    names = [each.name for each in caught.value.differences]
    assert name in names
    assert sentence in str(caught.value)
    assert f"--allow '{','.join(names)}'" in str(caught.value)
    assert [each.name for each in compare(report(), after, allow=names).allowed] == names
    families = [each.partition(".")[0] for each in names]
    assert compare(report(), after, allow=families).changes
    with pytest.raises(NotComparable):
        compare(report(), after, allow=["device" if name != "device" else "model"])


def test_another_baseline() -> None:
    with pytest.raises(NotComparable, match="baseline: bf16 against fp8_delayed"):
        compare(report(), replace(report(), baseline="fp8_delayed"))


def test_what_was_never_recorded_is_not_taken_for_equal() -> None:
    unknown = replace(report(), device="unknown: no environment was recorded")
    assert [each.name for each in differences(unknown, unknown)] == ["device"]


def test_nothing_in_common_cannot_be_allowed() -> None:
    refused = replace(report(), recipes=tuple(RecipeReport(n, n, n == "bf16", "no GPU") for n in ("bf16", "mxfp8")))
    with pytest.raises(NotComparable, match="recipes: bf16, fp8_delayed against none ran"):
        compare(report(), refused, allow=["shapes", "recipe"])
    with pytest.raises(ValueError, match="'recipes' is no difference that can be allowed"):
        compare(report(), refused, allow=["recipes"])


@pytest.mark.parametrize("name", ["torch", "versions", "", "shape"])
def test_a_name_that_no_difference_has(name: str) -> None:
    with pytest.raises(ValueError, match="is no difference that can be allowed: there are device, engine"):
        compare(report(), report(), allow=[name])


@pytest.mark.parametrize("margin", [0.0, -0.1, 1.0, float("nan")])
def test_a_margin_that_is_none(margin: float) -> None:
    with pytest.raises(ValueError, match="the margin is a share between 0 and 1"):
        compare(report(), report(), margin)


def test_recipes_that_ran_on_one_side_are_remarked() -> None:
    fewer = replace(report(), recipes=report().recipes[:1])
    found = compare(report(), fewer)
    assert found.remarks == ("fp8_delayed ran in A only.",)
    with pytest.raises(KeyError, match="fp8_delayed is not in B"):
        found.change("step", "fp8_delayed")
    with pytest.raises(KeyError, match="bf16 has no speedup"):
        found.change("speedup", "bf16")


def test_a_baseline_that_moved_is_remarked() -> None:
    found = compare(report(1), report(50, ms=110, fp8=88))
    assert "The baseline bf16 is slower as well" in found.remarks[0]
    assert found.change("speedup", "fp8_delayed").word == "same"


def test_an_unfinished_run_is_remarked() -> None:
    assert "interrupted" in compare(report(), replace(report(), status="interrupted")).remarks[0]


# -- from Recordings ---------------------------------------------------------------------------------------


def analysed(**more: Any) -> Report:
    return analyze(Recording.from_facts(gpu_facts(**more)))


def test_a_recording_holds_all_that_is_asked_for(tmp_path: Any) -> None:
    made = analysed()
    found: Comparison = compare(made, made)
    assert {change.word for change in found.changes} == {"same"}
    assert made.recipe("fp8_delayed").asked is not None
    assert made.conditions == {"micro-batches": "1"}
    made.save(tmp_path / "report.json")
    again = compare(load_report(tmp_path), made)
    assert {change.word for change in again.changes} == {"same"}


def test_shapes_come_from_the_verdict_where_there_is_no_benchmark() -> None:
    made = analysed()
    without = analyze(Recording.from_facts([fact for fact in gpu_facts() if not isinstance(fact, GemmTime)]))
    assert not without.recipe("bf16").gemms
    assert shapes(without) == shapes(made)
    assert shapes(made)


def test_a_loss_that_is_not_finite_makes_void() -> None:
    facts = [replace(f, value=float("nan")) if isinstance(f, Loss) and f.recipe == "fp8_delayed" else f
             for f in gpu_facts()]  # fmt: skip
    diverged = analyze(Recording.from_facts(facts))
    assert diverged.recipe("fp8_delayed").void == "the loss became nan"
    assert word(analysed(), diverged) == "cannot tell"


def test_buckets_are_the_means_of_their_steps() -> None:
    ledger = analysed().recipe("fp8_delayed").ledger
    assert ledger is not None
    for name, figure in ledger.buckets.items():
        assert sum(ledger.steps[name]) / 2 == pytest.approx(figure.value)
