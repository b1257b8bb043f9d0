"""FP4 judged without a GPU that has it: whole Recordings through `analyze`, with real kernel names.

What is planted is known, so what must come out is: FP4 that ran, FP4 that ran as something else, and witnesses that
contradict each other, memory among them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.memory_case import Ground, Subject, expect
from lowprec_callback.analyze.memory_model import layers_of
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import Dispatch, Environment, Memory, Model, Recording, Stored, encode, read
from lowprec_callback.report import RecipeReport, VerdictRow, load_report
from lowprec_callback.show.console import as_text

from .blackwell import (
    BF16,
    BLOCK,
    ELSEWHERE,
    MXFP8,
    NVFP4,
    NVFP4_CUTLASS,
    NVFP4_UNFUSED,
    Format,
    Ran,
    held,
    recording,
)
from .recordings import BF16_CARD, Linear, cpu_facts, gemms


def judged(recipe: str = "nvfp4", **recipes: Ran) -> RecipeReport:
    return analyze(recording(**recipes)).recipe(recipe)


def reachable(part: RecipeReport) -> list[VerdictRow]:
    assert part.verdict is not None
    return [row for row in part.verdict.rows if row.module != "lm_head"]


def words(part: RecipeReport) -> set[str]:
    return {row.verdict for row in reachable(part)}


@pytest.mark.parametrize("ran", [NVFP4, NVFP4_CUTLASS])
def test_fp4_that_ran_is_confirmed_and_memory_agrees(ran: Format) -> None:
    part = judged(nvfp4=Ran.as_(ran), mxfp8=Ran.as_(MXFP8))
    assert part.verdict is not None
    assert words(part) == {"confirmed"}
    assert part.verdict.te_coverage.value == pytest.approx(1.0)
    assert all({"operands", "kernels", "memory"} == set(row.witnesses) for row in reachable(part))
    assert part.verdict.disagreements == ()
    assert part.verdict.slow_paths == ()
    assert part.memory is not None
    assert part.memory.state == "agrees"
    assert "16 weights hold 0.5 B of data a value, as asked" in part.memory.why
    # One FP8 buffer for both directions takes about as much as two of FP4 with their scales: not told apart, and said.
    assert "so would NVFP4, and so would FP8" in part.memory.why
    for term in part.memory.terms:
        assert term.measured.value == pytest.approx(term.expected.value, rel=1e-5), term.name
    row = next(row for row in reachable(part) if row.role == "wgrad" and row.module.endswith("proj"))
    assert row.witnesses["memory"] == "input 0.563, gradient 1.125 B a value"


def test_fp4_that_ran_as_mxfp8() -> None:
    part = judged(nvfp4=Ran.as_(MXFP8), mxfp8=Ran.as_(MXFP8))
    assert words(part) == {"fallback"}
    assert "8 bits an element, not 4" in reachable(part)[0].why
    assert part.memory is not None
    assert part.memory.state == "contradicts"
    assert "nvfp4 held as many bytes as mxfp8: FP4 was never stored" in part.memory.why
    assert "16 of 16 weights reached their GEMM with 1 B of data a value, not 0.5 as NVFP4 has" in part.memory.why
    # All witnesses say the same, against what was asked: they do not disagree.
    assert part.verdict is not None
    assert part.verdict.disagreements == ()
    assert judged("mxfp8", nvfp4=Ran.as_(MXFP8), mxfp8=Ran.as_(MXFP8)).memory.state == "agrees"  # type: ignore[union-attr]


def test_fp4_that_ran_as_mxfp8_is_found_without_an_mxfp8_run() -> None:
    part = judged(nvfp4=Ran.as_(MXFP8))
    assert part.memory is not None
    assert "nvfp4 held as many bytes as mxfp8: FP4 was never stored" in part.memory.why


def test_fp4_that_ran_as_bf16() -> None:
    part = judged(nvfp4=Ran.as_(BF16))
    assert words(part) == {"fallback"}
    assert "16 bits an element, not 4" in reachable(part)[0].why
    assert part.memory is not None
    assert part.memory.state == "contradicts"
    assert "nvfp4 held as many bytes as bf16: FP4 was never stored" in part.memory.why
    assert "2 B of data a value" in part.memory.why


def test_fp4_with_the_unfused_hadamard_path_is_fp4_on_a_slow_path() -> None:
    part = judged(nvfp4=Ran.as_(NVFP4_UNFUSED))
    assert words(part) == {"confirmed"}
    assert part.verdict is not None
    assert any("Hadamard transform ran on its own" in text for text in part.verdict.slow_paths)
    assert part.memory is not None
    assert part.memory.state == "agrees"


def test_fp8_blocks_on_blackwell_are_emulated_and_stored_as_fp8() -> None:
    part = judged("fp8_block", fp8_block=Ran.as_(BLOCK))
    assert words(part) == {"emulated"}
    assert part.verdict is not None
    assert part.verdict.te_coverage.value == 0.0
    assert any("rewritten for MXFP8" in text for text in part.verdict.slow_paths)
    assert part.memory is not None
    assert part.memory.state == "agrees"


@pytest.mark.parametrize(
    ("ran", "word"), [(NVFP4, "confirmed"), (NVFP4_CUTLASS, "confirmed"), (MXFP8, "fallback"), (BF16, "fallback")]
)
def test_kernel_names_alone_are_enough(ran: Format, word: str) -> None:
    part = judged(nvfp4=Ran(None, ran, None))
    assert words(part) == {word}
    assert all("by kernel names alone" in row.why for row in reachable(part))


def test_memory_alone_confirms_nothing() -> None:
    part = judged("mxfp8", mxfp8=Ran(None, None, MXFP8))
    assert words(part) == {"unproven"}
    assert part.memory is not None
    assert part.memory.state == "agrees"
    assert part.memory.why.endswith("than bf16, as it should")
    against = judged(nvfp4=Ran(None, None, MXFP8))
    assert words(against) == {"unproven"}
    assert against.memory is not None
    assert against.memory.state == "contradicts"


@pytest.mark.parametrize(("ran", "like"), [(MXFP8, "mxfp8"), (BF16, "bf16")])
def test_memory_that_contradicts_the_other_witnesses_is_a_disagreement(ran: Format, like: str) -> None:
    part = judged(nvfp4=Ran(NVFP4, NVFP4, ran))
    assert part.verdict is not None
    assert len(part.verdict.disagreements) == 1
    sentence = f"memory: nvfp4 held as many bytes as {like}: FP4 was never stored"
    assert part.verdict.disagreements[0].startswith(sentence)
    assert part.memory is not None
    assert part.memory.state == "contradicts"


def test_two_recipes_that_hold_the_same_are_told_even_if_something_uncounted_hides_the_rest() -> None:
    facts = list(recording(nvfp4=Ran(NVFP4, NVFP4, MXFP8), mxfp8=Ran.as_(MXFP8)))
    hidden = 123_456_789  # something that both quantized recipes hold, and no formula knows
    facts = [
        replace(fact, allocated=fact.allocated + hidden, requested=(fact.requested or 0) + hidden)
        if isinstance(fact, Memory) and fact.recipe != "bf16" and fact.phase == "forward"
        else fact
        for fact in facts
    ]
    report = analyze(Recording.from_facts(facts))
    wide, narrow = report.recipe("mxfp8").memory, report.recipe("nvfp4").memory
    assert wide is not None
    assert narrow is not None
    assert "something that is not counted differs" in wide.why
    assert narrow.state == "contradicts"
    assert "nvfp4 held as many bytes as mxfp8: FP4 was never stored (it should hold" in narrow.why


def test_an_operand_whose_bytes_are_not_those_of_its_class_proves_nothing() -> None:
    facts = list(recording(nvfp4=Ran.as_(NVFP4)))
    wrong = ("layers.1.layernorm_mlp.fc2", "dgrad")
    for index, fact in enumerate(facts):
        if isinstance(fact, Dispatch) and fact.recipe == "nvfp4" and (fact.module, fact.role) == wrong:
            byte_a_value = Stored(fact.n * fact.k, fact.n * fact.k, 1024)
            facts[index] = replace(fact, weight_or_input=replace(fact.weight_or_input, stored=byte_a_value))
    part = analyze(Recording.from_facts(facts)).recipe("nvfp4")
    assert part.verdict is not None
    odd = [row for row in reachable(part) if row.verdict != "confirmed"]
    assert [(row.module, row.role, row.verdict, row.why) for row in odd] == [
        (*wrong, "unproven", "the witnesses disagree")
    ]
    assert part.verdict.disagreements == (
        "layers.1.layernorm_mlp.fc2 dgrad: the weight is e2m1 by its class, but it holds 1 B of data a value, not 0.5",
    )


def test_rounded_counters_are_enough_for_a_large_model() -> None:
    facts = [
        replace(fact, requested=None) if isinstance(fact, Memory) else fact
        for fact in recording(nvfp4=Ran(None, None, MXFP8), mxfp8=Ran(None, None, MXFP8))
    ]
    report = analyze(Recording.from_facts(facts))
    assert report.recipe("mxfp8").memory.state == "agrees"  # type: ignore[union-attr]
    assert report.recipe("nvfp4").memory.state == "contradicts"  # type: ignore[union-attr]


@pytest.mark.parametrize("attention_shares", [True, False])
def test_an_input_that_attention_holds_too_counts_once(attention_shares: bool) -> None:
    facts = list(recording(nvfp4=Ran.as_(NVFP4)))
    base = ELSEWHERE + held(BF16, attention_shares)
    facts = [
        replace(fact, requested=base)
        if isinstance(fact, Memory) and fact.recipe == "bf16" and fact.phase == "forward"
        else fact
        for fact in facts
    ]
    memory = analyze(Recording.from_facts(facts)).recipe("nvfp4").memory
    assert memory is not None
    assert memory.state == "agrees"
    against = memory.terms[-1]
    assert against.name == "forward, against bf16"
    assert against.measured.value == pytest.approx((held(NVFP4) - held(BF16, attention_shares)) / 1e9)
    assert against.expected.value == pytest.approx(against.measured.value, rel=1e-5)


def test_an_increase_that_the_formulas_foretell_is_explained_and_no_fault() -> None:
    part = judged("mxfp8", mxfp8=Ran.as_(MXFP8))
    assert part.memory is not None
    assert part.memory.state == "agrees"
    more = held(MXFP8) - held(BF16)
    assert more > 0
    assert part.memory.note is not None
    assert part.memory.note.startswith(
        f"mxfp8 holds {more / 1e6:.2f} MB more after forward than bf16: copies of weights +"
    )
    assert "inputs that bf16 shares with other layers +" in part.memory.note
    assert part.memory.note.endswith("Expected, no fault.")
    less = judged(nvfp4=Ran.as_(NVFP4)).memory
    assert less is not None
    assert less.note is None


def test_the_phases_are_those_of_the_watched_step() -> None:
    part = judged(nvfp4=Ran.as_(NVFP4))
    assert part.memory is not None
    phases = {name: figure.value for name, figure in part.memory.phases.items()}
    after = (ELSEWHERE + held(NVFP4)) / 1e9
    assert phases == pytest.approx(
        {
            "parameters": 0.2,
            "start": 2.0003,
            "forward": after + 0.0003,
            "backward": 3.0003,
            "optimizer": 2.0003,
            "peak": after + 0.1,
        }
    )
    assert all(figure.facts for figure in part.memory.phases.values())


def test_nothing_measured_is_silent_with_the_reason() -> None:
    facts = list(recording(nvfp4=Ran(None, NVFP4, None)))
    silent = analyze(Recording.from_facts(facts)).recipe("nvfp4").memory
    assert silent is not None
    assert (silent.state, silent.why) == (
        "silent",
        "no allocator counters of a watched step of nvfp4 were recorded",
    )
    on_cpu = [Environment("Some CPU", "cpu") if isinstance(fact, Environment) else fact for fact in facts]
    cpu = analyze(Recording.from_facts(on_cpu)).recipe("nvfp4").memory
    assert cpu is not None
    assert (cpu.state, cpu.why) == ("silent", "a CPU has no allocator counters")
    real = analyze(Recording.from_facts(cpu_facts()))
    assert {part.memory.why for part in real.recipes if part.memory} == {"a CPU has no allocator counters"}
    assert "The memory witness is silent: a CPU has no allocator counters." in as_text(real, 100)


def test_where_parameters_are_spread_over_ranks_the_allocator_is_no_witness() -> None:
    """They are gathered within the forward pass, which no formula of ours knows."""
    facts = list(recording(nvfp4=Ran(None, None, MXFP8), mxfp8=Ran(None, None, MXFP8)))
    spread = [replace(fact, rank_bytes=100_000_000) if isinstance(fact, Model) else fact for fact in facts]
    whole, part = (analyze(Recording.from_facts(each)).recipe("nvfp4").memory for each in (facts, spread))
    assert whole is not None
    assert part is not None
    assert whole.state == "contradicts"
    assert part.state == "silent"
    assert part.why == "the parameters are spread over ranks, and come and go within the forward pass"
    assert (whole.phases["parameters"].value, part.phases["parameters"].value) == (0.2, 0.1)


def test_parameters_in_fp32_are_cast_for_bf16() -> None:
    captured = gemms([Linear("qkv", 512, 256, 1024, "LayerNormLinear")])
    layers, _ = layers_of(captured, 1)
    subject = Subject(BF16_CARD, [], [])
    for bytes_each, expected in ((4, 2 * 256 * 1024), (2, 0)):
        ground = Ground(captured, 1, True, False, (10, 0), parameters=10, parameter_bytes=10 * bytes_each)
        assert expect(BF16_CARD, subject, subject, layers, ground).weights == expected


def test_the_memory_witness_survives_the_file(tmp_path: Path) -> None:
    facts = list(recording(nvfp4=Ran.as_(MXFP8)))
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(encode(fact) + "\n" for fact in facts), encoding="utf-8")
    report = analyze(read(path))
    assert read(path).of(Dispatch) == [fact for fact in facts if isinstance(fact, Dispatch)]
    assert read(path).of(Memory) == [fact for fact in facts if isinstance(fact, Memory)]
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path).recipe("nvfp4").memory == report.recipe("nvfp4").memory
    # Recordings from before operands' bytes and what was asked of the allocator were recorded.
    old = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for body in old:
        body.pop("requested", None)
        for name in ("weight_or_input", "other"):
            body.get(name, {}).pop("stored", None)
    path.write_text("".join(json.dumps(body) + "\n" for body in old), encoding="utf-8")
    part = analyze(read(path)).recipe("nvfp4")
    assert words(part) == {"fallback"}
    assert all("memory" not in row.witnesses for row in reachable(part))
    assert part.memory is not None
    assert part.memory.state == "contradicts"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_part_of_a_run_there_is_memory_is_judged_or_silent_with_a_reason(data: st.DataObject) -> None:
    ran = st.builds(Ran, *(st.sampled_from([None, BF16, MXFP8, NVFP4, BLOCK]) for _ in range(3)))
    facts = list(recording(nvfp4=data.draw(ran), mxfp8=data.draw(ran)))
    kept = facts[: data.draw(st.integers(1, len(facts)))]
    for part in analyze(Recording.from_facts(kept)).recipes:
        if part.memory is not None:
            assert part.memory.state in ("agrees", "contradicts", "silent")
            assert part.memory.why
            if part.verdict is not None and part.memory.state == "agrees":
                assert not any(text.startswith("memory:") for text in part.verdict.disagreements)
        seen = {row.verdict for row in part.verdict.rows if set(row.witnesses) <= {"memory"}} if part.verdict else set()
        assert "confirmed" not in seen


def test_a_shape_that_was_not_captured_and_a_wide_backward_pass_silence_the_counters() -> None:
    facts = list(recording(nvfp4=Ran.as_(NVFP4)))
    longer = [replace(fact, m=fact.m + 32) if isinstance(fact, Dispatch) else fact for fact in facts]
    why = analyze(Recording.from_facts(longer)).recipe("nvfp4").memory.why  # type: ignore[union-attr]
    assert "had a shape that was not captured: layers.0.self_attention.layernorm_qkv fprop 8224x1024x3072" in why
    wide = [
        replace(fact, variables={"NVTE_BACKWARD_OVERRIDE": "high_precision"}) if isinstance(fact, Environment) else fact
        for fact in facts
    ]
    why = analyze(Recording.from_facts(wide)).recipe("nvfp4").memory.why  # type: ignore[union-attr]
    assert "NVTE_BACKWARD_OVERRIDE=high_precision changes what is saved" in why


def test_another_engine_is_silent() -> None:
    facts = [
        replace(fact, engine="plain_torch") if isinstance(fact, Model) else fact
        for fact in recording()
        if not isinstance(fact, Dispatch)
    ]
    memory = analyze(Recording.from_facts(facts)).recipe("bf16").memory
    assert memory is not None
    assert memory.state == "silent"
    assert "and it did not run this model" in memory.why
