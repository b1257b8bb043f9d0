"""The library's own log as a third witness: alone, with the others, and against them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.library import LibraryWitness, agree, operands_of
from lowprec_callback.analyze.precision import Operands
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.analyze.timed import timed
from lowprec_callback.analyze.traceview import view
from lowprec_callback.analyze.verdict import Audit, verdict
from lowprec_callback.analyze.witnesses import SignatureBook
from lowprec_callback.recording import (
    ROLES,
    Card,
    Dispatch,
    Fact,
    LibraryCall,
    LibraryLog,
    Operand,
    Recording,
    Role,
    role_shape,
)
from lowprec_callback.report import Verdict, VerdictRow
from lowprec_callback.show import words

from .recordings import (
    BF16_CARD,
    BLOCK_CARD,
    CARDS,
    CURRENT_CARD,
    DELAYED_CARD,
    FP32_CARD,
    GEMM_NAMES,
    Kernel,
    Linear,
    cpu_facts,
    dispatch,
    dispatches,
    gemms,
    gpu_facts,
    kernel_name,
    mirrored,
    operand,
    te_linears,
)
from .recordings import trace as trace_of

TYPES = {"bf16": "R_16BF", "fp32": "R_32F", "e4m3": "R_8F_E4M3", "e5m2": "R_8F_E5M2", "e2m1": "R_4F_E2M1"}
MODES = {"block-128": "VEC128_32F", "mx-32": "VEC32_UE8M0", "nvfp4-16": "VEC16_UE4M3"}
LISTENED = LibraryLog("", ("cuBLASLt",), 0, 0)
TE_ONLY = [lin for lin in te_linears(1) if lin.quantizable]
ONE = [Linear("block.fc", 64, 128, 256)]


def logged(lin: Linear, role: Role, card: Card, calls: int = 1, groups: int = 1, **changes: Any) -> LibraryCall:
    """What cuBLASLt logs of a GEMM that ran as the card asks."""
    formats = {"fprop": card.fprop, "dgrad": card.dgrad, "wgrad": card.wgrad}[role]
    modes = [MODES.get(card.scaling, "") if form[0] == "e" else "" for form in formats]
    rows, inner, columns = role_shape(role, lin.m, lin.k, lin.n)
    call = LibraryCall(
        recipe=card.recipe, module=lin.module, role=role, m=lin.m, k=lin.k, n=lin.n, library="cuBLASLt",
        function="cublasLtMatmul", weight_or_input=TYPES[formats[0]], other=TYPES[formats[1]], output="R_16BF",
        rows=rows // groups, inner=inner, columns=columns, calls=calls * groups, weight_or_input_scale=modes[0],
        other_scale=modes[1], compute="COMPUTE_32F",
    )  # fmt: skip
    return replace(call, **changes)


def all_logged(linears: Iterable[Linear], card: Card) -> list[LibraryCall]:
    return [logged(lin, role, card) for lin in linears for role in ROLES]


def judge(
    card: Card,
    linears: list[Linear],
    seen: Iterable[Dispatch] = (),
    log: Iterable[LibraryCall] | None = (),
    kernels: Iterable[Kernel] | None = None,
    *,
    calls: int = 1,
    about: LibraryLog | None = LISTENED,
) -> Verdict:
    """`kernels` of the step that ran as timed; those of the operands seen, or else logged, if nothing else is said."""
    seen, log, shapes = list(seen), list(log or ()), gemms(linears, calls)
    ran = list(kernels) if kernels is not None else mirrored(seen) or mirrored_log(log, seen)
    views = [view(trace_of(card.recipe, ran, 1.0))] if ran else []
    return verdict(
        list(enumerate(shapes, start=1)),
        list(enumerate(seen, start=50)),
        timed([], views, SignatureBook((), CARDS), sum(gemm.calls for gemm in shapes)),
        Audit(card, te=True, backward_override=None),
        library=LibraryWitness.of(enumerate(log, start=90), about),
    )


def mirrored_log(log: Iterable[LibraryCall], seen: Iterable[Dispatch]) -> list[Kernel]:
    """The kernels of a step in which the operands are those that were logged."""
    found = []
    for call in log:
        formats, scalings = operands_of(call).formats, operands_of(call).scalings
        first, other = (operand(form, scaling) for form, scaling in zip(formats, scalings, strict=True))
        found += [Kernel(kernel_name(first, other), 1.0, call.module, call.role)] * call.calls
    return found


def kernels_of(recipe: str, linears: Iterable[Linear]) -> list[Kernel]:
    return [Kernel(GEMM_NAMES[recipe][role], 10.0, lin.module, role) for lin in linears for role in ROLES]


def row(found: Verdict, role: str) -> VerdictRow:
    return next(row for row in found.rows if row.role == role)


@pytest.mark.parametrize("card", [BF16_CARD, DELAYED_CARD, CURRENT_CARD, BLOCK_CARD], ids=lambda card: card.recipe)
def test_a_clean_model_is_confirmed_by_three_witnesses(card: Card) -> None:
    name = card.recipe
    found = judge(card, TE_ONLY, dispatches(name, TE_ONLY), all_logged(TE_ONLY, card), kernels_of(name, TE_ONLY))
    assert {each.verdict for each in found.rows} == {"confirmed"}
    assert {tuple(each.witnesses) for each in found.rows} == {("operands", "library", "kernels")}
    assert found.coverage.value == pytest.approx(1.0)
    assert "library_call lines 90-101" in found.coverage.facts
    assert words.coverage(found) == "100% (operands+library+kernels)"
    assert not found.disagreements


def test_the_log_tells_formats_and_scaling_but_not_delayed_from_current() -> None:
    found = judge(DELAYED_CARD, ONE, dispatches("fp8_delayed", ONE), all_logged(ONE, DELAYED_CARD))
    assert row(found, "wgrad").witnesses["library"] == "cuBLASLt: e4m3 x e5m2, tensor"
    assert row(found, "wgrad").ran == "e4m3 x e5m2, tensor-delayed", "operands know more"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight_or_input": "R_16BF", "other": "R_16BF"}, "but cuBLASLt logged bf16 x bf16"),
        ({"other": "R_8F_E4M3"}, "but cuBLASLt logged e4m3 x e4m3, tensor"),
        (
            {"weight_or_input_scale": "BLK128x128_32F", "other_scale": "VEC128_32F"},
            "but cuBLASLt logged e4m3 x e5m2, block-128",
        ),
        ({"other_scale": "OUTER_VEC_32F"}, "but cuBLASLt logged e4m3 x e5m2, tensor x row"),
    ],
)
def test_a_log_that_contradicts_the_operands_leaves_the_row_unproven(changes: dict[str, str], text: str) -> None:
    log = [logged(ONE[0], role, CURRENT_CARD, **(changes if role == "dgrad" else {})) for role in ROLES]
    found = judge(CURRENT_CARD, ONE, dispatches("fp8_current", ONE), log, kernels_of("fp8_current", ONE))
    assert {each.role: each.verdict for each in found.rows} == {
        "fprop": "confirmed",
        "dgrad": "unproven",
        "wgrad": "confirmed",
    }
    assert row(found, "dgrad").why == "the witnesses disagree"
    assert set(row(found, "dgrad").witnesses) == {"operands", "library", "kernels"}, "all that was said is kept"
    assert found.disagreements == (f"block.fc dgrad: operands were e4m3 x e5m2, tensor-current, {text}",)
    assert found.coverage.value == pytest.approx(2 / 3)


def test_block_scales_against_tensor_scales_are_a_contradiction_too() -> None:
    log = [replace(call, weight_or_input_scale="", other_scale="") for call in all_logged(ONE, BLOCK_CARD)]
    found = judge(BLOCK_CARD, ONE, dispatches("fp8_block", ONE), log)
    assert {each.verdict for each in found.rows} == {"unproven"}
    assert len(found.disagreements) == 3


def test_block_scales_that_ran_as_mxfp8_are_emulated() -> None:
    mx = {"weight_or_input_scale": "VEC32_UE8M0", "other_scale": "VEC32_UE8M0"}
    log = [replace(call, **mx) for call in all_logged(ONE, BLOCK_CARD)]
    found = judge(BLOCK_CARD, ONE, dispatches("fp8_block", ONE), log, kernels_of("mxfp8", ONE))
    assert {each.verdict for each in found.rows} == {"emulated"}
    assert not found.disagreements
    alone = judge(BLOCK_CARD, ONE, (), log)
    assert {each.verdict for each in alone.rows} == {"emulated"}


def test_the_log_alone_confirms_where_no_operand_was_seen() -> None:
    found = judge(CURRENT_CARD, ONE, (), all_logged(ONE, CURRENT_CARD))
    assert {each.verdict for each in found.rows} == {"confirmed"}
    assert {tuple(each.witnesses) for each in found.rows} == {("library", "kernels")}
    assert row(found, "fprop").why.startswith("by the library's log alone; ")
    assert "delayed from current" in row(found, "fprop").why
    unshown = judge(CURRENT_CARD, ONE, (), all_logged(ONE, CURRENT_CARD), ())
    assert {each.verdict for each in unshown.rows} == {"unproven"}, "no kernel of a timed step shows it"


def test_the_log_alone_catches_a_fallback_and_kernels_can_contradict_it() -> None:
    wide = [logged(ONE[0], role, BF16_CARD) for role in ROLES]
    found = judge(CURRENT_CARD, ONE, (), wide)
    assert {each.verdict for each in found.rows} == {"fallback"}
    assert row(found, "fprop").ran == "bf16 x bf16"
    against = judge(CURRENT_CARD, ONE, (), wide, kernels_of("fp8_current", ONE))
    assert {each.verdict for each in against.rows} == {"unproven"}
    assert len(against.disagreements) == 3


def test_a_part_of_the_calls_that_is_missing_in_the_log_is_not_confirmed_by_it() -> None:
    seen = [dispatch("fp8_current", ONE[0], role, CURRENT_CARD, calls=4) for role in ROLES]
    log = [logged(ONE[0], role, CURRENT_CARD, calls=3 if role == "fprop" else 4) for role in ROLES]
    found = judge(CURRENT_CARD, ONE, seen, log, calls=4)
    assert {each.verdict for each in found.rows} == {"confirmed"}, "the operands saw all"
    assert set(row(found, "fprop").witnesses) == {"operands", "kernels"}
    assert "cuBLASLt logged a part of the calls only" in row(found, "fprop").why
    assert words.coverage(found) == "100% (operands+kernels+library 66.7%)"
    alone = judge(CURRENT_CARD, ONE, (), log, calls=4)
    assert [(each.verdict, each.calls) for each in alone.rows if each.role == "fprop"] == [
        ("confirmed", 3),
        ("unproven", 1),
    ]
    assert alone.coverage.value == pytest.approx(11 / 12)


def test_calls_of_two_kinds_must_be_as_many_in_the_log_as_at_the_entry() -> None:
    seen = [dispatch("fp8_current", ONE[0], "fprop", card) for card in (CURRENT_CARD, BF16_CARD)]
    both = [logged(ONE[0], "fprop", card) for card in (CURRENT_CARD, BF16_CARD)]
    agreed = judge(CURRENT_CARD, ONE, seen, both, calls=2)
    assert not agreed.disagreements
    assert {each.ran for each in agreed.rows if each.role == "fprop"} == {"e4m3 x e4m3, tensor-current", "bf16 x bf16"}
    two = judge(CURRENT_CARD, ONE, seen, [logged(ONE[0], "fprop", CURRENT_CARD, calls=2)], calls=2)
    assert two.disagreements == (
        "block.fc fprop: operands were bf16 x bf16 in 1 calls, but cuBLASLt logged that kind in 0",
    )


def test_a_grouped_call_is_one_call_whatever_its_groups() -> None:
    log = [logged(ONE[0], role, CURRENT_CARD, groups=4) for role in ROLES]
    found = judge(CURRENT_CARD, ONE, dispatches("fp8_current", ONE), log)
    assert {tuple(each.witnesses) for each in found.rows} == {("operands", "library", "kernels")}


def test_the_log_tells_the_format_of_operands_that_do_not() -> None:
    unknown = Operand("Float8Tensor", "unknown", "tensor-current")
    seen = [replace(dispatch("fp8_current", ONE[0], role, CURRENT_CARD), weight_or_input=unknown) for role in ROLES]
    found = judge(CURRENT_CARD, ONE, seen, all_logged(ONE, CURRENT_CARD), kernels_of("fp8_current", ONE))
    assert {each.verdict for each in found.rows} == {"confirmed"}
    assert row(found, "wgrad").ran == "e4m3 x e5m2, tensor-current"
    silent = judge(CURRENT_CARD, ONE, seen)
    assert {each.verdict for each in silent.rows} == {"unproven"}
    twice = [replace(fact, calls=2) for fact in seen]
    part = judge(CURRENT_CARD, ONE, twice, all_logged(ONE, CURRENT_CARD), calls=2)
    assert {each.verdict for each in part.rows} == {"unproven"}, "half of the calls speak for themselves only"


@pytest.mark.parametrize(
    ("about", "text"),
    [
        (LISTENED, "cuBLASLt logged no product of it"),
        (LibraryLog("", (), 0, 0, "CUBLASLT_LOG_LEVEL is set"), "the library's log was not listened to"),
        (replace(LISTENED, libraries=("oneDNN", "MKL")), "neither oneDNN nor MKL logged it, so other code ran it"),
    ],
)
def test_silence_has_a_reason_and_confirms_nothing(about: LibraryLog, text: str) -> None:
    found = judge(BF16_CARD, ONE, dispatches("bf16", ONE), about=about)
    assert {tuple(each.witnesses) for each in found.rows} == {("operands", "kernels")}
    assert all(text in each.why for each in found.rows)
    nothing = judge(BF16_CARD, ONE, kernels=[Kernel("elementwise", 1.0)], about=about)
    assert {each.verdict for each in nothing.rows} == {"unproven"}
    assert all(text in each.why for each in nothing.rows)
    older = judge(BF16_CARD, ONE, dispatches("bf16", ONE), about=None)
    assert not any("log" in each.why for each in older.rows), "a Recording from before the log was listened to"


def test_tf32_multiplies_fp32_and_is_told() -> None:
    log = [replace(call, compute="COMPUTE_32F_FAST_TF32") for call in all_logged(ONE, FP32_CARD)]
    found = judge(FP32_CARD, ONE, dispatches("fp32", ONE, FP32_CARD), log)
    assert {each.verdict for each in found.rows} == {"confirmed"}
    assert "cuBLASLt multiplies in TF32" in row(found, "fprop").why


def test_fast_math_that_rounds_fp32_to_bf16_is_a_contradiction() -> None:
    log = [replace(call, library="oneDNN", compute="bf16") for call in all_logged(ONE, FP32_CARD)]
    found = judge(FP32_CARD, ONE, dispatches("fp32", ONE, FP32_CARD), log)
    assert {each.verdict for each in found.rows} == {"unproven"}
    assert found.disagreements[0].endswith("operands were fp32 x fp32, but oneDNN logged bf16 x bf16")


def test_products_at_places_that_the_capture_did_not_see_are_named() -> None:
    stranger = logged(Linear("adapter", 64, 8, 8), "fprop", BF16_CARD)
    found = judge(BF16_CARD, ONE, dispatches("bf16", ONE), [*all_logged(ONE, BF16_CARD), stranger])
    assert found.disagreements == ("GEMMs reached the library that the capture did not see: adapter fprop",)


FORMATS = st.sampled_from([*TYPES, "unknown"])
SCALINGS = st.sampled_from(["none", "tensor", "tensor-delayed", "tensor-current", "block-128", "mx-32", "nvfp4-16"])
OPERANDS = st.builds(Operands, st.tuples(FORMATS, FORMATS), st.tuples(SCALINGS, SCALINGS))


@given(OPERANDS)
def test_whatever_was_seen_agrees_with_itself(operands: Operands) -> None:
    assert agree(operands, operands)


@given(st.sampled_from(list(CARDS.values())), st.sampled_from(ROLES), st.sampled_from(list(CARDS.values())))
def test_what_a_card_asks_for_agrees_with_its_own_log_and_with_no_other_precisions(
    card: Card, role: Role, other: Card
) -> None:
    mine, theirs = Operands.asked(card, role), operands_of(logged(ONE[0], role, other))
    if card.recipe == other.recipe:
        assert agree(mine, theirs)
    elif mine.precision != theirs.precision and (mine.precision, theirs.precision) != ("fp8-block", "mxfp8"):
        assert not agree(mine, theirs)


# -- in a whole Recording --------------------------------------------------------------------------------------------


def with_log(facts: list[Fact], linears: list[Linear], cards: dict[str, Card], log: LibraryLog) -> Recording:
    more: list[Fact] = []
    for name, card in cards.items():
        calls = [] if log.silent else all_logged(linears, card)
        more += [replace(log, recipe=name), *calls]
    return Recording.from_facts([*facts[:-1], *more, facts[-1]])


def test_a_report_says_who_confirms_and_when_the_log_was_out_of_reach() -> None:
    linears = [lin for lin in te_linears() if lin.quantizable]
    cards = {"bf16": BF16_CARD, "fp8_delayed": DELAYED_CARD}
    report = analyze(with_log(gpu_facts(), linears, cards, LISTENED))
    delayed = report.recipes[1].verdict
    assert delayed is not None
    assert all("library" in each.witnesses for each in delayed.rows if each.module != "lm_head")
    silent = LibraryLog("", (), 0, 0, "no libcublasLt.so is loaded")
    report = analyze(with_log(gpu_facts(), linears, cards, silent))
    told = "the GEMM library's own log was not listened to (bf16, fp8_delayed): no libcublasLt.so is loaded"
    assert told in report.problems


def test_bf16_that_no_cpu_library_takes_is_a_slow_path() -> None:
    linears = [replace(lin, family="nn.Linear", quantizable=True) for lin in te_linears(1)]
    on_cpu = LibraryLog("", ("oneDNN", "MKL"), 0, 0)
    facts = cpu_facts()
    mkl = [
        replace(call, library="MKL", weight_or_input="f32", other="f32", compute="")
        for call in all_logged(linears, FP32_CARD)
    ]
    logs: list[Fact] = [replace(on_cpu, recipe="fp32"), *mkl, replace(on_cpu, recipe="bf16")]
    report = analyze(Recording.from_facts([*facts[:-1], *logs, facts[-1]]))
    fp32, bf16 = (recipe.verdict for recipe in report.recipes)
    assert fp32 is not None
    assert bf16 is not None
    assert words.coverage(fp32) == "100% (operands+library+kernels)"
    assert words.coverage(bf16) == "100% (operands+kernels)"
    assert fp32.slow_paths == ()
    assert bf16.slow_paths == (
        "neither oneDNN nor MKL ran 15 of the linear-layer GEMMs, PyTorch's own code did; "
        "those of fp32 were run by MKL",
    )
