from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.products import beside
from lowprec_callback.analyze.timed import timed
from lowprec_callback.analyze.traceview import view
from lowprec_callback.analyze.verdict import RECOMPUTED, Audit, verdict
from lowprec_callback.analyze.verdict_summary import fallbacks
from lowprec_callback.analyze.witnesses import SignatureBook
from lowprec_callback.recording import ROLES, Card, Dispatch, GemmTime, Operand, Product
from lowprec_callback.report import RecipeReport, Report, Verdict, VerdictRow

from .recordings import (
    BF16_CARD,
    BLOCK_CARD,
    CARDS,
    CURRENT_CARD,
    DELAYED_CARD,
    FP32_CARD,
    GEMM_NAMES,
    NVFP4_CARD,
    UNKNOWN_GEMM,
    Kernel,
    Linear,
    dispatch,
    dispatches,
    gemm_times,
    gemms,
    mirrored,
    step_kernels,
    te_linears,
    trace,
)

LINEARS = te_linears(layers=2)
TE_ONLY = [lin for lin in LINEARS if lin.quantizable]
ONE = [Linear("block.fc", 64, 64, 64)]


def judge(
    card: Card,
    linears: list[Linear],
    seen: list[Dispatch],
    kernels: list[Kernel] | None = None,
    *,
    times: list[GemmTime] = (),  # type: ignore[assignment]
    calls: int = 1,
    override: str | None = None,
    compiled: tuple[str, ...] = (),
) -> Verdict:
    """`kernels` of the step that ran as the timed ones; those of the operands seen, if nothing else is said."""
    book = SignatureBook(times, CARDS)
    shapes = gemms(linears, calls)
    ran = mirrored(seen) if kernels is None else kernels
    views = [view(trace(card.recipe, ran, 1.0))] if ran else []
    found = replace(timed([], views, book, sum(gemm.calls for gemm in shapes)), compiled=compiled)
    return verdict(
        list(enumerate(shapes, start=1)),
        list(enumerate(seen, start=50)),
        found,
        Audit(card, te=True, backward_override=override),
        book.contradictions.get(card.recipe, ()),
    )


def words(found: Verdict) -> dict[str, str]:
    return {row.role: row.verdict for row in found.rows}


def row(found: Verdict, role: str) -> VerdictRow:
    return next(row for row in found.rows if row.role == role)


def kernels_of(recipe: str, linears: list[Linear]) -> list[Kernel]:
    return [Kernel(GEMM_NAMES[recipe][role], 10.0, lin.module, role) for lin in linears for role in ROLES]


@pytest.mark.parametrize("card", [BF16_CARD, DELAYED_CARD, CURRENT_CARD, BLOCK_CARD])
def test_all_as_asked_by_both_witnesses(card: Card) -> None:
    found = judge(card, TE_ONLY, dispatches(card.recipe, TE_ONLY), kernels_of(card.recipe, TE_ONLY))
    assert set(words(found).values()) == {"confirmed"}
    assert found.coverage.value == pytest.approx(1.0)
    assert found.te_coverage.value == pytest.approx(1.0)
    assert set(found.rows[0].witnesses) == {"operands", "kernels"}
    assert found.disagreements == ()
    assert "2 layers x 4 linears x 3 roles" in found.summary
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)


def test_the_lm_head_is_outside_and_not_covered() -> None:
    found = judge(DELAYED_CARD, LINEARS, dispatches("fp8_delayed", LINEARS))
    head = [row for row in found.rows if row.module == "lm_head"]
    assert {row.verdict for row in head} == {"outside"}
    assert found.coverage.value == pytest.approx(1 - sum(row.share for row in head))
    assert found.te_coverage.value == pytest.approx(1.0)
    assert found.summary.startswith("All TE GEMMs ran in FP8: 2 layers x 4 linears x 3 roles.")
    assert "lm_head" in found.summary
    # The baseline is audited by the same rule, but a plain linear that runs in bf16 is what was asked.
    assert judge(BF16_CARD, LINEARS, dispatches("bf16", LINEARS)).coverage.value == pytest.approx(1.0)


def test_operands_alone_confirm_nothing_and_are_called_that() -> None:
    found = judge(DELAYED_CARD, ONE, dispatches("fp8_delayed", ONE), [])
    assert set(words(found).values()) == {"unproven"}
    assert set(found.rows[0].witnesses) == {"operands"}
    assert found.rows[0].why == "by its operands alone: no step was traced as the timed ones ran"
    assert found.coverage.value == 0.0
    assert found.summary == "By their operands alone, the TE GEMMs were given FP8; no kernel of a timed step shows it."


def test_kernels_alone_confirm_the_format() -> None:
    found = judge(DELAYED_CARD, ONE, [], kernels_of("fp8_delayed", ONE))
    assert set(words(found).values()) == {"confirmed"}
    assert "does not tell delayed from current" in found.rows[0].why
    assert set(found.rows[0].witnesses) == {"kernels"}


def test_kernels_alone_find_a_fallback_and_an_unknown_proves_nothing() -> None:
    assert set(words(judge(DELAYED_CARD, ONE, [], kernels_of("bf16", ONE))).values()) == {"fallback"}
    assert set(words(judge(BLOCK_CARD, ONE, [], kernels_of("mxfp8", ONE))).values()) == {"emulated"}
    odd = [*kernels_of("fp8_delayed", ONE), Kernel(UNKNOWN_GEMM, 1.0, "block.fc", "fprop")]
    assert words(judge(DELAYED_CARD, ONE, [], odd))["fprop"] == "unproven"


@pytest.mark.parametrize(
    ("asked", "ran", "why"),
    [
        (DELAYED_CARD, BF16_CARD, "16 bits an element, not 8"),
        (NVFP4_CARD, DELAYED_CARD, "8 bits an element, not 4"),
        (BLOCK_CARD, DELAYED_CARD, "another recipe: e4m3 x e4m3, tensor-delayed"),
        (DELAYED_CARD, CURRENT_CARD, "another recipe: e4m3 x e4m3, tensor-current"),
        (BF16_CARD, DELAYED_CARD, "narrower than asked: 8 bits an element, not 16"),
    ],
)
def test_fallback(asked: Card, ran: Card, why: str) -> None:
    found = judge(asked, ONE, dispatches(asked.recipe, ONE, ran), kernels_of(ran.recipe, ONE))
    assert row(found, "fprop").verdict == "fallback"
    assert why in row(found, "fprop").why
    assert found.te_coverage.value == 0.0
    assert "0.0% of linear FLOPs ran as asked; fallback in block.fc" in found.summary


def test_one_role_falls_back() -> None:
    fallen = ("layers.1.layernorm_mlp.fc2", "dgrad")
    seen = [
        dispatch("fp8_delayed", lin, role, BF16_CARD if (lin.module, role) == fallen else DELAYED_CARD)
        for lin in TE_ONLY
        for role in ROLES
    ]
    found = judge(DELAYED_CARD, TE_ONLY, seen)
    bad = [row for row in found.rows if row.verdict == "fallback"]
    assert [(row.module, row.role, row.ran) for row in bad] == [("layers.1.layernorm_mlp.fc2", "dgrad", "bf16 x bf16")]
    assert found.coverage.value == pytest.approx(1 - bad[0].share)
    assert "fallback in layers.1.layernorm_mlp.fc2 (dgrad: bf16 x bf16)" in found.summary


def test_by_request() -> None:
    off = [dispatch("fp8_delayed", ONE[0], role, BF16_CARD, in_region=False) for role in ROLES]
    assert set(words(judge(DELAYED_CARD, ONE, off)).values()) == {"by_request"}
    backward = [dispatch("fp8_current", ONE[0], role, CURRENT_CARD if role == "fprop" else BF16_CARD) for role in ROLES]
    asked = judge(CURRENT_CARD, ONE, backward, override="NVTE_BACKWARD_OVERRIDE=high_precision")
    assert words(asked) == {"fprop": "confirmed", "dgrad": "by_request", "wgrad": "by_request"}
    assert "NVTE_BACKWARD_OVERRIDE" in row(asked, "dgrad").why
    assert words(judge(CURRENT_CARD, ONE, backward))["dgrad"] == "fallback"


def test_a_switched_off_region_does_not_excuse_the_baseline() -> None:
    seen = [dispatch("bf16", ONE[0], role, BF16_CARD, in_region=False) for role in ROLES]
    assert set(words(judge(BF16_CARD, ONE, seen)).values()) == {"confirmed"}


def test_a_baseline_in_the_models_own_fp16_is_no_fallback() -> None:
    half = replace(BF16_CARD, fprop=("fp16", "fp16"), dgrad=("fp16", "fp16"), wgrad=("fp16", "fp16"))
    seen = [dispatch("bf16", ONE[0], role, half) for role in ROLES]
    found = judge(BF16_CARD, ONE, seen)
    assert set(words(found).values()) == {"by_request"}
    assert "the model itself is in FP16" in row(found, "fprop").why
    kernels = [Kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", 10.0, ONE[0].module, role) for role in ROLES]
    alone = judge(BF16_CARD, ONE, [], kernels)
    assert set(words(alone).values()) == {"by_request"}
    assert row(alone, "fprop").ran == "fp16"
    both = judge(BF16_CARD, ONE, seen, kernels)
    assert set(words(both).values()) == {"by_request"}
    # FP8 that ran in FP16 fell back, whatever the model is in; so did FP16 that was not the baseline's to decide.
    assert set(words(judge(DELAYED_CARD, ONE, [dispatch("fp8_delayed", ONE[0], r, half) for r in ROLES])).values()) == {
        "fallback"
    }


def test_emulated() -> None:
    mx = replace(BLOCK_CARD, scaling="mx-32")
    assert set(words(judge(BLOCK_CARD, ONE, dispatches("fp8_block", ONE, mx))).values()) == {"emulated"}
    by_kernel = judge(BLOCK_CARD, ONE, dispatches("fp8_block", ONE), kernels_of("mxfp8", ONE))
    assert set(words(by_kernel).values()) == {"emulated"}
    assert by_kernel.disagreements == ()
    assert by_kernel.coverage.value == 0.0


def test_witnesses_that_disagree_prove_nothing() -> None:
    found = judge(DELAYED_CARD, ONE, dispatches("fp8_delayed", ONE), kernels_of("bf16", ONE))
    assert set(words(found).values()) == {"unproven"}
    assert len(found.disagreements) == 3
    assert "operands were e4m3 x e4m3, tensor-delayed, but a kernel of precision bf16 ran" in found.disagreements[0]
    # HYBRID's gradients are E5M2: a kernel for E4M3 x E4M3 cannot have read them.
    wrong = kernels_of("fp8_delayed", ONE)
    wrong[1] = replace(wrong[1], name=GEMM_NAMES["fp8_delayed"]["fprop"])
    formats = judge(DELAYED_CARD, ONE, dispatches("fp8_delayed", ONE), wrong)
    assert words(formats) == {"fprop": "confirmed", "dgrad": "unproven", "wgrad": "confirmed"}


def test_unknown_is_unproven() -> None:
    strange = [replace(fact, other=Operand("Weird", "unknown", "tensor")) for fact in dispatches("fp8_delayed", ONE)]
    assert set(words(judge(DELAYED_CARD, ONE, strange)).values()) == {"unproven"}
    nothing = judge(DELAYED_CARD, ONE, [])
    assert set(words(nothing).values()) == {"unproven"}
    assert nothing.coverage.value is None
    assert "no traced step of fp8_delayed was recorded" in (nothing.coverage.reason or "")
    assert "not known" in nothing.summary
    uncaptured = judge(DELAYED_CARD, [], dispatches("fp8_delayed", ONE))
    assert uncaptured.coverage.reason == "no linear-layer GEMM was captured"


def test_kernels_tell_the_format_where_operands_tell_only_the_scaling() -> None:
    strange = [
        replace(
            fact,
            weight_or_input=replace(fact.weight_or_input, format="unknown"),
            other=replace(fact.other, format="unknown"),
        )
        for fact in dispatches("fp8_delayed", ONE)
    ]
    found = judge(DELAYED_CARD, ONE, strange, kernels_of("fp8_delayed", ONE))
    assert set(words(found).values()) == {"confirmed"}
    assert found.rows[0].why == "kernel names tell the format, operands the scaling"
    assert set(words(judge(CURRENT_CARD, ONE, strange, kernels_of("fp8_delayed", ONE))).values()) == {"unproven"}
    assert set(words(judge(DELAYED_CARD, ONE, strange)).values()) == {"unproven"}
    # E4M3 x E4M3 kernels in the backward pass are not what HYBRID asks for.
    e4m3 = [Kernel(GEMM_NAMES["fp8_delayed"]["fprop"], 1.0, "block.fc", role) for role in ROLES]
    assert words(judge(DELAYED_CARD, ONE, strange, e4m3)) == {
        "fprop": "confirmed",
        "dgrad": "fallback",
        "wgrad": "fallback",
    }


MLP = [Linear("mlp.fc1", 64, 64, 256, "LayerNormMLP"), Linear("mlp.fc2", 64, 256, 64, "LayerNormMLP")]


def test_the_two_linears_of_a_layernorm_mlp_share_their_kernels_label() -> None:
    labelled = [replace(kernel, module="mlp") for kernel in kernels_of("fp8_delayed", MLP)]
    found = judge(DELAYED_CARD, MLP, dispatches("fp8_delayed", MLP), labelled)
    assert {row.verdict for row in found.rows} == {"confirmed"}
    assert all("kernels" in row.witnesses for row in found.rows)
    # One of the two fell back. Operands say which, but of a step that was not the timed one: kernels of both precisions
    # under one label do not show that it was the same one there.
    mixed = labelled[:3] + [replace(k, module="mlp") for k in kernels_of("bf16", MLP[1:])]
    seen = [*dispatches("fp8_delayed", MLP[:1]), *dispatches("fp8_delayed", MLP[1:], BF16_CARD)]
    split = judge(DELAYED_CARD, MLP, seen, mixed)
    assert {(row.module, row.verdict) for row in split.rows} == {("mlp.fc1", "unproven"), ("mlp.fc2", "fallback")}
    assert split.disagreements == ()
    # Without operands nothing says which of them it was.
    alone = judge(DELAYED_CARD, MLP, [], mixed)
    assert {row.verdict for row in alone.rows} == {"unproven"}
    assert alone.rows[0].why == (
        "the GEMM kernels of mlp fprop do not balance: 1 e4m3 x e4m3 kernel for 2 calls, and 1 of bf16; whose they are "
        "is not known"
    )
    # Both claim FP8 and a bf16 kernel ran: a contradiction, wherever it was.
    clash = judge(DELAYED_CARD, MLP, dispatches("fp8_delayed", MLP), mixed)
    assert {row.verdict for row in clash.rows} == {"unproven"}


@pytest.mark.parametrize(
    ("linears", "extent"),
    [
        (TE_ONLY, "2 layers x 4 linears x 3 roles"),
        (LINEARS, "(2 layers x 4 linears and lm_head) x 3 roles"),
        (ONE, "1 linear x 3 roles"),
        (LINEARS[:5], "5 modules, 15 GEMMs"),
    ],
)
def test_the_extent_in_the_summary(linears: list[Linear], extent: str) -> None:
    plain = [replace(lin, quantizable=True) for lin in linears]
    assert judge(BF16_CARD, plain, dispatches("bf16", plain)).summary == f"All TE GEMMs ran in BF16: {extent}."


def test_tensor_scaling_of_an_unknown_kind_matches_with_a_note() -> None:
    vague = replace(DELAYED_CARD, scaling="tensor")
    found = judge(DELAYED_CARD, ONE, dispatches("fp8_delayed", ONE, vague), kernels_of("fp8_delayed", ONE))
    assert set(words(found).values()) == {"confirmed"}
    assert "do not tell delayed from current" in found.rows[0].why


def test_calls_that_differ_are_split_into_rows() -> None:
    wide = [dispatch("fp8_delayed", ONE[0], role, BF16_CARD, calls=1) for role in ROLES]
    narrow = [dispatch("fp8_delayed", ONE[0], role, DELAYED_CARD, calls=3) for role in ROLES]
    found = judge(DELAYED_CARD, ONE, [*narrow, *wide], calls=4)
    assert [(row.verdict, row.calls) for row in found.rows if row.role == "fprop"] == [
        ("confirmed", 3),
        ("fallback", 1),
    ]
    assert found.coverage.value == pytest.approx(0.75)


def test_calls_that_reached_no_watched_function_are_unproven() -> None:
    two = [Linear("a", 64, 64, 64), Linear("b", 64, 64, 64)]
    seen = [dispatch("bf16", two[0], role, BF16_CARD, calls=4) for role in ROLES]
    seen += [dispatch("bf16", two[1], role, BF16_CARD, calls=1) for role in ROLES]
    found = judge(BF16_CARD, two, seen, calls=2)
    assert {(row.module, row.verdict) for row in found.rows} == {
        ("a", "confirmed"),
        ("b", "confirmed"),
        ("b", "unproven"),
    }
    # `a` was called four times, whatever the capture saw, and `b` twice.
    assert found.coverage.value == pytest.approx((4 + 1) / (4 + 2))


def test_the_signature_book_knows_names_that_say_nothing() -> None:
    unknown = [Kernel(UNKNOWN_GEMM, 1.0, "block.fc", role) for role in ROLES]
    taught = [replace(t, kernels=(UNKNOWN_GEMM,)) for t in gemm_times("fp8_block", ONE, 1, 1)]
    assert set(words(judge(BLOCK_CARD, ONE, [], unknown)).values()) == {"unproven"}
    # BF16 might launch the same name, if it was not benchmarked.
    assert set(words(judge(BLOCK_CARD, ONE, [], unknown, times=taught)).values()) == {"unproven"}
    learned = [*taught, *gemm_times("bf16", ONE, 1, 1)]
    found = judge(BLOCK_CARD, ONE, [], unknown, times=learned)
    assert set(words(found).values()) == {"confirmed"}
    assert found.summary == (
        "Every one of the TE GEMMs ran in FP8 with block scales, by kernel names that only the benchmark explains: "
        "1 linear x 3 roles."
    )
    assert set(words(judge(NVFP4_CARD, ONE, [], unknown, times=learned)).values()) == {"fallback"}
    # A name that the benchmark saw in two precisions tells neither.
    both = [*learned, *(replace(t, kernels=(UNKNOWN_GEMM,)) for t in gemm_times("bf16", ONE, 1, 1))]
    assert set(words(judge(BLOCK_CARD, ONE, [], unknown, times=both)).values()) == {"unproven"}


def test_a_benchmark_that_ran_something_else_is_a_disagreement() -> None:
    wrong = [replace(t, kernels=(GEMM_NAMES["bf16"]["fprop"],)) for t in gemm_times("fp8_block", ONE, 1, 1)]
    found = judge(BLOCK_CARD, ONE, dispatches("fp8_block", ONE), times=wrong)
    assert "the benchmark of fp8_block fprop 64x64x64 ran a bf16 kernel" in found.disagreements[0]


def test_the_book_decides_where_the_grammar_knows_no_gemm() -> None:
    odd = "brand_new_kernel_of_2027"
    learned = [replace(t, kernels=(odd, "memset_kernel")) for t in gemm_times("fp8_block", ONE, 1, 1)]
    learned += gemm_times("bf16", ONE, 1, 1)
    ran = [Kernel(odd, 1.0, "block.fc", role) for role in ROLES]
    assert set(words(judge(BLOCK_CARD, ONE, [], ran)).values()) == {"unproven"}
    assert set(words(judge(BLOCK_CARD, ONE, [], ran, times=learned)).values()) == {"confirmed"}
    # Beside a product that the grammar knows, an unknown name is a helper, and two unknown names tell nothing.
    for names in ((odd, GEMM_NAMES["fp8_block"]["fprop"]), (odd, "another_new_kernel")):
        taught = [replace(t, kernels=names) for t in gemm_times("fp8_block", ONE, 1, 1)]
        assert set(words(judge(BLOCK_CARD, ONE, [], ran, times=taught)).values()) == {"unproven"}


def test_the_book_does_not_take_a_wide_backward_pass_by_request_for_the_recipes_own() -> None:
    card = replace(CURRENT_CARD, arguments={"backward_override": "high_precision"})
    wide = [replace(t, kernels=(GEMM_NAMES["bf16"]["fprop"],)) for t in gemm_times("fp8_current", ONE, 1, 1)]
    book = SignatureBook([t for t in wide if t.role != "fprop"], {"fp8_current": card})
    assert book.contradictions == {}
    assert book.precision(GEMM_NAMES["bf16"]["fprop"]) == "unknown"


# --- why it fell ----------------------------------------------------------------------------------------------------


def seen_as(card: Card, asked: Card, **changes: Any) -> list[Dispatch]:
    return [replace(dispatch(asked.recipe, ONE[0], role, card, in_region=True), **changes) for role in ROLES]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"other_recipe": "DelayedScaling"}, "the model opens a region of its own, with DelayedScaling"),
        ({"stale_recipe": "X(a=1)"}, "its quantizers were built for X(a=1): Transformer Engine keeps them"),
    ],
)
def test_a_cause_that_is_known_is_told_even_where_formats_agree(changes: dict[str, str], why: str) -> None:
    for ran in (CURRENT_CARD, DELAYED_CARD):
        found = judge(CURRENT_CARD, ONE, seen_as(ran, CURRENT_CARD, **changes))
        assert set(words(found).values()) == {"fallback"}
        assert all(row.why.startswith(why) for row in found.rows)


def test_a_checkpoint_that_loses_the_region() -> None:
    first, *rest = seen_as(CURRENT_CARD, CURRENT_CARD)
    lost = [replace(fact, in_region=False) for fact in seen_as(BF16_CARD, CURRENT_CARD)]
    lost[0] = replace(lost[0], recomputed=True)
    found = judge(CURRENT_CARD, ONE, [first, *lost], calls=2)
    by_word = {(row.role, row.verdict) for row in found.rows}
    assert by_word >= {("fprop", "confirmed"), ("fprop", "fallback")}
    assert {row.verdict for row in found.rows if row.role != "fprop"} <= {"fallback", "unproven"}
    assert all(row.why.startswith(RECOMPUTED) for row in found.rows if row.verdict == "fallback")
    # A recomputation that keeps the region is no other call than the first.
    sound = judge(CURRENT_CARD, ONE, [first, replace(first, recomputed=True), *rest])
    assert set(words(sound).values()) <= {"confirmed", "unproven"}
    assert [row.verdict for row in sound.rows if row.role == "fprop"] == ["confirmed"]


def test_what_a_custom_quantizer_multiplies_in_is_told_by_kernels_alone() -> None:
    seen = seen_as(NVFP4_CARD, NVFP4_CARD, entry="custom_gemm")
    wide = kernels_of("bf16", ONE)
    found = judge(NVFP4_CARD, ONE, seen, wide)
    assert set(words(found).values()) == {"fallback"}
    assert found.disagreements == ()
    assert found.rows[0].ran == "e2m1 x e2m1, nvfp4-16, multiplied in bf16"
    assert found.rows[0].why == "no NVFP4 kernel ran: the custom quantizer's own code multiplies in BF16"
    assert set(words(judge(NVFP4_CARD, ONE, seen, [])).values()) == {"unproven"}
    unknown = [Kernel(UNKNOWN_GEMM, 1.0, "block.fc", role) for role in ROLES]
    assert set(words(judge(NVFP4_CARD, ONE, seen, unknown)).values()) == {"unproven"}
    # Operands that meet a kernel of their own precision are what was asked, whoever launched it.
    native = seen_as(BLOCK_CARD, BLOCK_CARD, entry="custom_gemm")
    assert set(words(judge(BLOCK_CARD, ONE, native, kernels_of("fp8_block", ONE))).values()) == {"confirmed"}


def test_products_beside_the_linear_layers() -> None:
    one = Product("bf16", "layers.0.core", "aten::bmm", "forward", 4, 8, 16, 8, ("bf16", "bf16"), 2)
    both = [(1, one), (2, replace(one, module="layers.1.core")), (3, replace(one, module="", formats=("fp32", "fp32")))]
    linear = gemms([Linear("fc", 32, 16, 8)])
    size, whole = 2 * 4 * 8 * 16 * 8 * 2, 3 * 2 * 32 * 16 * 8
    first, second = beside(both, linear)
    share = 2 * size / (3 * size + whole)
    assert first == (
        f"layers.*.core: 4 calls of aten::bmm a step in bf16 x bf16, {share:.1%} of the FLOPs of all products; "
        "no recipe reaches them"
    )
    assert second.startswith("no module that was followed: 2 calls of aten::bmm a step in fp32 x fp32")
    assert beside([], linear) == ()


def test_fallbacks_in_words() -> None:
    other = judge(CURRENT_CARD, TE_ONLY, dispatches("fp8_current", TE_ONLY, DELAYED_CARD))
    parts = (
        RecipeReport("bf16", "BF16", True, verdict=judge(BF16_CARD, TE_ONLY, dispatches("bf16", TE_ONLY))),
        RecipeReport("fp8_current", "FP8", False, verdict=other),
        RecipeReport("nvfp4", "NVFP4", False, refusal="no such GPU"),
    )
    report = Report(1, "0", "now", "m", "te", "", "GPU", {}, (), (), "bf16", parts, "plan")
    text = fallbacks(report)
    assert text.startswith("Not every GEMM ran in the precision that was asked for. fp8_current: ")
    assert "(2 modules), fprop: asked e4m3 x e4m3, tensor-current, ran e4m3 x e4m3, tensor-delayed" in text
    assert text.endswith("and 3 more like these.")
    assert fallbacks(replace(report, recipes=parts[:1])) == ""


def test_tf32_is_told() -> None:
    name = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"
    found = judge(FP32_CARD, ONE, dispatches("fp32", ONE), [Kernel(name, 1.0, "block.fc", "fprop")])
    assert row(found, "fprop").verdict == "confirmed"
    assert "TF32" in row(found, "fprop").why


def test_gemms_that_were_not_captured_are_reported() -> None:
    found = judge(BF16_CARD, ONE, dispatches("bf16", [*ONE, Linear("surprise", 8, 8, 8)]))
    assert "capture did not see: surprise dgrad, surprise fprop, surprise wgrad" in found.disagreements[0]


cards = st.sampled_from([BF16_CARD, DELAYED_CARD, CURRENT_CARD, BLOCK_CARD, NVFP4_CARD])


@settings(max_examples=60, deadline=None)
@given(cards, st.lists(st.one_of(st.none(), cards), min_size=27, max_size=27), st.booleans(), st.booleans())
def test_coverage_is_the_share_of_confirmed_rows(
    asked: Card, ran: list[Card | None], region: bool, traced: bool
) -> None:
    places = [(lin, role) for lin in LINEARS for role in ROLES]
    seen = [
        dispatch(asked.recipe, lin, role, card, in_region=region)
        for (lin, role), card in zip(places, ran, strict=True)
        if card is not None
    ]
    kernels = step_kernels("fp8_delayed", LINEARS, 1.0) if traced else []
    found = judge(asked, LINEARS, seen, kernels)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    if found.coverage.value is not None:
        confirmed = sum(row.share for row in found.rows if row.verdict == "confirmed")
        assert found.coverage.value == pytest.approx(confirmed)
    for row in found.rows:
        if row.verdict == "confirmed":
            assert row.witnesses
        assert row.asked
        assert row.ran
        assert row.why or row.verdict == "confirmed"
