"""Sums of the GEMM benchmark: the published ones, their laws, and what a missing term does to them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.gemm_table import PAYS, GemmTable, gemm_table
from lowprec_callback.recording import ROLES, Gemm, GemmRun, GemmTime, Mode, Recording
from tests import gemm_recordings as made

from .recordings import BF16_CARD, DELAYED_CARD


def test_the_tutorials_sums_on_an_h200() -> None:
    table = gemm_table(made.te_tutorial(), "te-tutorial", "autocast")
    assert table.baseline == "bf16"
    for recipe, sums in made.TUTORIAL_H200.items():
        for role, ms in zip(ROLES, sums, strict=True):
            assert table.role_sum(recipe, role).value == pytest.approx(ms)
        assert table.layer(recipe).value == pytest.approx(sum(sums))
        assert table.model(recipe).value == pytest.approx(24 * sum(sums))
    speedups = {recipe: table.against(recipe, "bf16").value for recipe in table.recipes}
    assert speedups == pytest.approx({"bf16": 1, "fp8_delayed": 1.70, "fp8_current": 1.58, "fp8_block": 1.41}, abs=6e-3)
    assert table.against("fp8_current", "fp8_delayed").value == pytest.approx(16.863 / 18.174)
    assert table.layer_rate("bf16").value == pytest.approx(667.7, abs=0.1)  # 19.173 TFLOP in 28.716 ms


def test_a_layer_as_training_runs_it_on_an_h200() -> None:
    table = gemm_table(made.role_true(), "role-true", "autocast")
    speedups = {recipe: table.against(recipe, "bf16").value for recipe in table.recipes}
    assert speedups == pytest.approx({"bf16": 1, "fp8_delayed": 1.73, "fp8_current": 1.66, "fp8_block": 1.39}, abs=6e-3)
    assert table.operation("fp8_block", "attention out").value == pytest.approx(1.607)
    for recipe, share in made.QUANTIZATION.items():
        assert table.share_of_quantization(recipe).value == pytest.approx(share)
    alone = gemm_table(made.role_true(), "role-true", "kernel")
    assert alone.layer("fp8_current").value == pytest.approx(0.86 * 15.638)


# --- Laws ------------------------------------------------------------------------------------------------

times = st.floats(1e-3, 1e3)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """A few operations of a few layers, and perhaps a head that no recipe reaches; any times."""
    layers = draw(st.integers(1, 40))
    accumulate = draw(st.integers(1, 4))
    gemms: list[Gemm] = []
    facts: list[GemmTime] = []
    for index in range(draw(st.integers(1, 4))):
        k = 64 * (index + 1)
        for role in ROLES:
            gemms.append(Gemm(f"op {index}", role, 128, k, 64, layers * accumulate, "Linear", True, layers=layers))
            for recipe in ("bf16", "fp8_delayed"):
                facts.append(GemmTime(recipe, role, 128, k, 64, "autocast", (draw(times),)))
    if draw(st.booleans()):
        for role in ROLES:
            gemms.append(Gemm("head", role, 128, 64, 999, accumulate, "nn.Linear", False, layers=0))
            facts.append(GemmTime("bf16", role, 128, 64, 999, "autocast", (draw(times),), family="nn.Linear"))
    run = GemmRun("role-true", 1, 1.0, "rounds", layers=layers, accumulate=accumulate)
    return Recording.from_facts([BF16_CARD, DELAYED_CARD, *gemms, *facts, run])


def table_of(recording: Recording, mode: Mode = "autocast") -> GemmTable:
    return gemm_table(recording, "role-true", mode)


def value(number: float | None) -> float:
    assert number is not None
    return number


@given(recordings())
def test_roles_and_operations_add_up_to_the_layer_and_layers_to_the_model(recording: Recording) -> None:
    table = table_of(recording)
    assert table.run is not None
    inside = dict.fromkeys(cell.operation for cell in table.cells if cell.in_layer)
    for recipe in table.recipes:
        layer = value(table.layer(recipe).value)
        assert layer == pytest.approx(sum(value(table.role_sum(recipe, role).value) for role in ROLES))
        assert layer == pytest.approx(sum(value(table.operation(recipe, name).value) for name in inside))
        outside = sum(value(cell.ms[recipe].value) for cell in table.cells if not cell.in_layer)
        whole = table.run.accumulate * (table.layers * layer + outside)
        assert value(table.model(recipe).value) == pytest.approx(whole)
        assert value(table.against(recipe, recipe).value) == pytest.approx(1)


@given(recordings())
def test_what_no_recipe_reaches_takes_the_same_time_in_all(recording: Recording) -> None:
    for cell in table_of(recording).cells:
        if not cell.quantizable:
            assert cell.ms["fp8_delayed"] == cell.ms["bf16"]
            assert value(cell.quantize_share["fp8_delayed"].value) == 0


@given(recordings(), st.floats(0.01, 100))
def test_a_recipe_that_is_so_many_times_faster_is_said_to_be(recording: Recording, factor: float) -> None:
    bf16 = {(t.role, t.k, t.n): t.samples_ms[0] for t in recording.of(GemmTime) if t.recipe == "bf16"}
    scaled = made.changed(
        recording,
        lambda t: replace(t, samples_ms=(bf16[t.role, t.k, t.n] / factor,)) if t.recipe == "fp8_delayed" else t,
    )
    table = table_of(scaled)
    assert value(table.against("fp8_delayed", "bf16").value) == pytest.approx(factor)
    rates = [value(table.layer_rate(recipe).value) for recipe in ("fp8_delayed", "bf16")]
    assert rates[0] / rates[1] == pytest.approx(factor)
    poor = {name for found in table.break_even() for name in found.gains}
    if not math.isclose(factor, PAYS):
        assert poor == ({cell.operation for cell in table.cells if cell.quantizable} if factor < PAYS else set())


@given(recordings(), st.data())
def test_every_sum_over_a_missing_time_is_missing_with_its_reason(recording: Recording, data: st.DataObject) -> None:
    victims = [t for t in recording.of(GemmTime) if t.family != "nn.Linear"]
    victim = data.draw(st.sampled_from(victims))
    holed = made.changed(recording, lambda t: replace(t, samples_ms=(), failure="planted") if t == victim else t)
    table = table_of(holed)
    other = next(recipe for recipe in table.recipes if recipe != victim.recipe)
    assert table.layer(other).known
    assert table.model(other).known
    missing = [
        table.layer(victim.recipe),
        table.model(victim.recipe),
        table.role_sum(victim.recipe, victim.role),
        table.share_of_quantization(victim.recipe),
        table.against(victim.recipe, other),
        table.against(other, victim.recipe),
        table.layer_rate(victim.recipe),
    ]
    assert all("planted" in (figure.reason or "") for figure in missing), missing
    for role in ROLES:
        assert table.role_sum(victim.recipe, role).known == (role != victim.role)
    broken = next(cell.operation for cell in table.cells if cell.k == victim.k and cell.quantizable)
    assert not any(broken in found.gains for found in table.break_even())


# --- What makes a layer ----------------------------------------------------------------------------------


def test_the_head_stands_outside_the_layers() -> None:
    with_head = table_of(made.role_true(replace(made.CODONFM, vocab_size=32000)))
    without = table_of(made.role_true())
    assert with_head.layer("fp8_delayed") == replace(
        without.layer("fp8_delayed"), facts=with_head.layer("fp8_delayed").facts
    )
    assert value(with_head.model("fp8_delayed").value) == pytest.approx(24 * 14.932 + 27)
    assert with_head.has_layer


def test_one_layer_and_a_head_are_told_apart() -> None:
    """Both are called once; only the Recording knows."""
    config = replace(made.CODONFM, num_hidden_layers=1, vocab_size=4096)
    table = table_of(made.role_true(config, replace(made.ROLE_TRUE_RUN, layers=1)))
    assert [cell.operation for cell in table.cells if not cell.in_layer] == ["LM head"] * 3


def test_layers_that_are_not_alike_have_no_sum_but_the_model_has() -> None:
    table = table_of(made.unlike_layers())
    why = (
        "layers are not alike, so there is no time of one layer (QKV, attention out in 24; "
        "router, experts up, experts down in 23; MLP up, MLP down in 1)"
    )
    assert table.layer("bf16").reason == why
    assert table.role_sum("bf16", "wgrad").reason == why
    assert table.model("bf16").value == pytest.approx(30 * (24 * 2 + 23 * 3 + 1 * 2))


def test_listed_shapes_make_no_layer() -> None:
    table = table_of(made.listed())
    assert not table.has_layer
    assert table.layer("bf16").reason == "no GEMM stands in a transformer layer"
    assert table.cell_rate(table.cells[-1], "bf16").value == pytest.approx(2 * 4096**3 / 0.202 / 1e9)


def test_a_recording_that_does_not_say() -> None:
    silent = [replace(fact, layers=None) if isinstance(fact, Gemm) else fact for fact in made.role_true()]
    table = table_of(Recording.from_facts(silent))
    assert table.layer("bf16").reason == "the Recording does not say which GEMMs make a layer"
    assert table.model("bf16").known


# --- Where recipes stop to pay ---------------------------------------------------------------------------


def test_attention_out_is_kept_in_fp8_on_a_b300() -> None:
    """Published: BF16 0.307, current 0.317, delayed 0.231, MXFP8 0.269 and NVFP4 0.256 ms."""
    table = gemm_table(made.b300(), "te-tutorial", "autocast")
    found = {(poor.recipe, poor.keep): poor.gains for poor in table.break_even()}
    assert set(found) == {("fp8_current", "bf16"), ("nvfp4", "fp8_delayed")}
    assert {name: gain.value for name, gain in found["nvfp4", "fp8_delayed"].items()} == {
        "attention out": pytest.approx(0.231 / 0.256)
    }
    assert found["fp8_current", "bf16"]["attention out"].value == pytest.approx(0.307 / 0.317)


def test_without_a_wider_recipe_there_is_nothing_to_keep() -> None:
    facts = [fact for fact in made.b300() if getattr(fact, "recipe", "bf16") == "bf16"]
    assert gemm_table(Recording.from_facts(facts), "te-tutorial", "autocast").break_even() == []


# --- What is in the table --------------------------------------------------------------------------------


def test_the_published_method_has_no_place_for_a_plain_linear() -> None:
    recording = made.role_true(replace(made.CODONFM, vocab_size=32000))
    tutorial = [replace(f, method="te-tutorial") if isinstance(f, GemmTime) else f for f in recording]
    table = gemm_table(Recording.from_facts(tutorial), "te-tutorial", "autocast")
    assert "LM head" not in table.operations()


def test_a_refused_recipe_has_no_column_but_a_reason() -> None:
    table = table_of(made.role_true())
    assert table.recipes == ("bf16", "fp8_delayed", "fp8_current", "fp8_block")
    assert table.refused == {"mxfp8": made.NEEDS_10, "nvfp4": made.NEEDS_10}


def test_nothing_was_timed() -> None:
    facts = [fact for fact in made.role_true() if not isinstance(fact, GemmTime)]
    table = table_of(Recording.from_facts(facts))
    assert table.recipes == ()
    assert not table.quantizes
    assert table.break_even() == []


def test_a_recipe_that_failed_everywhere_for_one_reason_has_no_column_but_the_reason() -> None:
    def fail(time: GemmTime) -> GemmTime:
        return replace(time, samples_ms=(), quantize_ms=(), failure="no kernel") if time.recipe == "fp8_block" else time

    table = gemm_table(made.changed(made.role_true(), fail), "role-true", "kernel")
    assert table.left_out == {"fp8_block": "no kernel"}
    assert "fp8_block" not in table.recipes
    assert "fp8_delayed" in table.recipes


def test_a_recipe_that_failed_for_several_reasons_keeps_its_column() -> None:
    def fail(time: GemmTime) -> GemmTime:
        return (
            replace(time, samples_ms=(), quantize_ms=(), failure=f"no {time.role}")
            if time.recipe == "fp8_block"
            else time
        )

    table = gemm_table(made.changed(made.role_true(), fail), "role-true", "kernel")
    assert table.left_out == {}
    assert "fp8_block" in table.recipes
