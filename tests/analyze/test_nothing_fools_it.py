"""Ways in which a verdict was fooled once, each with its right sentence; and worlds in which nothing fools it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lowprec_callback.analyze.balance import Demand, Kind, ProductKernel, balance, labelled
from lowprec_callback.analyze.precision import Operands
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.analyze.timed import COMPILED, Timed, flaw, spare_products, timed
from lowprec_callback.analyze.traceview import view
from lowprec_callback.analyze.verdict import Audit, verdict
from lowprec_callback.analyze.witnesses import SignatureBook
from lowprec_callback.recording import ROLES, Card, Dispatch, Gemm, Product, Recording, StepProducts
from lowprec_callback.report import Verdict

from .recordings import (
    BF16_CARD,
    BLOCK_CARD,
    CARDS,
    DELAYED_CARD,
    FP32_CARD,
    GEMM_NAMES,
    UNKNOWN_GEMM,
    Kernel,
    Linear,
    dispatch,
    dispatches,
    gemms,
    gpu_facts,
    step_products,
    te_linears,
    trace,
)
from .worlds import Maker, wrong

LINEARS = [lin for lin in te_linears(1) if lin.quantizable]
ONE = [Linear("block.fc", 64, 64, 64)]


def judge(
    card: Card,
    linears: Sequence[Linear] = LINEARS,
    *,
    steps: Sequence[StepProducts] = (),
    ranged: Sequence[Sequence[Kernel]] = (),
    seen: Sequence[Dispatch] | None = None,
    products: Sequence[Product] = (),
    calls: int = 1,
    extra: Sequence[Gemm] = (),
) -> Verdict:
    """The verdict where operands were all as asked (`seen`: what else), and kernels were these."""
    shapes = [*gemms(linears, calls), *extra]
    book = SignatureBook((), CARDS)
    evidence = timed(
        steps, [view(trace(card.recipe, kernels, 1.0)) for kernels in ranged], book, sum(g.calls for g in shapes)
    )
    reached = dispatches(card.recipe, linears, card) if seen is None else seen
    return verdict(
        list(enumerate(shapes)),
        list(enumerate(reached)),
        evidence,
        Audit(card, te=True, backward_override=None),
        spare=spare_products(products),
    )


def bare(recipe: str, linears: Sequence[Linear] = LINEARS, *, calls: int = 1) -> list[Kernel]:
    """A step's product kernels in order of launch, which bear a direction and nothing else."""
    forward = [Kernel(GEMM_NAMES[recipe]["fprop"], 1.0, phase="forward") for _ in linears for _ in range(calls)]
    backward = [
        Kernel(GEMM_NAMES[recipe][role], 1.0, phase="backward")
        for _ in linears
        for role in ROLES[1:]
        for _ in range(calls)
    ]
    return forward + backward


def marked(recipe: str, linears: Sequence[Linear] = LINEARS) -> list[Kernel]:
    """The same with the labels that ranges give."""
    places = [(lin.module, "fprop") for lin in linears]
    places += [(lin.module, role) for lin in linears for role in ROLES[1:]]
    return [replace(k, module=m, role=r) for k, (m, r) in zip(bare(recipe, linears), places, strict=True)]


def compiled(recipe: str, kernels: list[Kernel]) -> list[StepProducts]:
    return [step_products(recipe, kernels, number, compiled=("model",)) for number in range(2)]


# -- 1: compiled code ------------------------------------------------------------------------------------------------


def test_operands_of_an_uncompiled_step_prove_nothing_of_a_compiled_one() -> None:
    found = judge(DELAYED_CARD, steps=compiled("fp8_delayed", bare("bf16")), ranged=[bare("bf16")])
    assert {row.verdict for row in found.rows} == {"fallback"}
    assert found.coverage.value == 0.0
    assert found.summary.startswith("0.0% of linear FLOPs ran as asked; fallback in ")
    assert "model ran compiled, where what operands were in an uncompiled step is no proof" in found.rows[0].why


def test_fp8_that_really_ran_in_compiled_code_is_confirmed() -> None:
    found = judge(DELAYED_CARD, steps=compiled("fp8_delayed", bare("fp8_delayed")))
    assert found.coverage.value == pytest.approx(1.0)
    assert found.summary == "All TE GEMMs ran in FP8: 4 linears x 3 roles."
    assert all(row.why.startswith("by kernel names alone; model ran compiled") for row in found.rows)


def test_compiled_code_that_ran_in_part_is_unproven_with_its_counts() -> None:
    kernels = bare("fp8_delayed")
    kernels[1] = replace(kernels[1], name=GEMM_NAMES["bf16"]["fprop"])
    found = judge(DELAYED_CARD, steps=compiled("fp8_delayed", kernels))
    assert {row.role: row.verdict for row in found.rows} == {
        "fprop": "unproven",
        "dgrad": "confirmed",
        "wgrad": "confirmed",
    }
    why = (
        "the GEMM kernels of the forward pass do not balance: 3 e4m3 x e4m3 kernels for 4 calls, and 1 of bf16; whose "
        "they are is not known"
    )
    assert why in found.summary
    assert found.summary.startswith("66.6% of linear FLOPs ran as asked; unproven in ")


def test_on_a_cpu_the_operators_of_a_compiled_step_tell_their_types() -> None:
    bf16 = replace(BF16_CARD, baseline=False)
    for ran, share in (("fp32", 0.0), ("bf16", 1.0)):
        told = [replace(kernel, name=f"{ran} x {ran}") for kernel in bare("bf16")]
        step = step_products("bf16", told, compiled=("model",), on_cpu=True)
        found = judge(bf16, steps=[step], seen=dispatches("bf16", LINEARS, bf16))
        assert found.coverage.value == pytest.approx(share)
        assert ("All TE GEMMs ran in BF16" in found.summary) == (share == 1.0)
    assert FP32_CARD.baseline


def test_a_recording_that_was_compiled_and_knows_no_step_as_timed_proves_nothing() -> None:
    book = SignatureBook((), CARDS)
    views = [view(trace("fp8_delayed", marked("fp8_delayed"), 1.0))]
    assert timed([], views, book, 12, compiled=True) == Timed(silence=COMPILED)


# -- 2: kernels without a label --------------------------------------------------------------------------------------


def test_bf16_kernels_without_a_label_contradict_fp8_operands() -> None:
    found = judge(DELAYED_CARD, ranged=[[replace(kernel, phase="") for kernel in bare("bf16")]])
    assert {row.verdict for row in found.rows} == {"unproven"}
    assert found.coverage.value == 0.0
    assert found.disagreements[0].endswith(
        "operands were e4m3 x e4m3, tensor-delayed, but a kernel of precision bf16 ran"
    )


# -- 3: two under one label ------------------------------------------------------------------------------------------


def test_two_calls_of_one_gemm_and_kernels_of_one_kind() -> None:
    seen = [dispatch("fp8_delayed", ONE[0], role, card) for role in ROLES for card in (DELAYED_CARD, BF16_CARD)]
    wide = [Kernel(GEMM_NAMES["bf16"][role], 1.0, "block.fc", role) for role in ROLES for _ in range(2)]
    found = judge(DELAYED_CARD, ONE, seen=seen, ranged=[wide], calls=2)
    assert {row.verdict for row in found.rows} == {"unproven"}
    assert found.disagreements[0] == (
        "block.fc fprop: operands were e4m3 x e4m3, tensor-delayed in 1 calls, but 0 kernels for them ran"
    )


def test_two_gemms_under_one_label_and_kernels_of_one_kind() -> None:
    both = [Linear("mlp.fc1", 64, 64, 256), Linear("mlp.fc2", 64, 256, 64)]
    seen = [*dispatches("fp8_delayed", both[:1]), *dispatches("fp8_delayed", both[1:], BF16_CARD)]
    wide = [Kernel(GEMM_NAMES["bf16"][role], 1.0, "mlp", role) for role in ROLES for _ in both]
    found = judge(DELAYED_CARD, both, seen=seen, ranged=[wide])
    assert {(row.module, row.verdict) for row in found.rows} == {("mlp.fc1", "unproven"), ("mlp.fc2", "fallback")}
    assert found.coverage.value == 0.0


# -- 4: counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seen", "confirmed"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_kernels_count(seen: int, confirmed: float) -> None:
    kernels = [Kernel(GEMM_NAMES["fp8_delayed"][role], 1.0, "block.fc", role) for role in ROLES for _ in range(seen)]
    found = judge(DELAYED_CARD, ONE, seen=(), ranged=[kernels], calls=4)
    assert found.coverage.value == pytest.approx(confirmed)
    assert found.summary.startswith("All ") == (seen == 4)
    if seen < 4:
        assert f"no kernel was found for {4 - seen} of 4 calls" in found.summary


# -- 5: mixtures -----------------------------------------------------------------------------------------------------


def test_a_mixture_is_no_block_scaled_fp8() -> None:
    name = (
        "void deep_gemm::sm100_fp8_fp4_gemm_1d1d_impl<(cute::UMMA::Major)0, (cute::UMMA::Major)0, 128u, 128u, 0u, 0u, "
        "0u, 1u, 128u, 128u, 128u, 2u, cutlass::float_e4m3_t, cutlass::detail::float_e2m1_unpacksmem_t, float>(int)"
    )
    kernels = [Kernel(name, 1.0, "block.fc", role) for role in ROLES]
    found = judge(BLOCK_CARD, ONE, seen=(), ranged=[kernels])
    assert "confirmed" not in {row.verdict for row in found.rows}
    assert found.coverage.value == 0.0


# -- 6: what the capture did not see ---------------------------------------------------------------------------------


def test_a_wide_layer_that_was_not_captured_counts_where_it_reached_the_library() -> None:
    large = Linear("adapter", 4096, 4096, 4096)
    seen = [*dispatches("fp8_delayed", LINEARS), *dispatches("fp8_delayed", [large], BF16_CARD)]
    wide = [Kernel(GEMM_NAMES["bf16"][role], 1.0, "adapter", role) for role in ROLES]
    found = judge(DELAYED_CARD, seen=seen, ranged=[[*marked("fp8_delayed"), *wide]])
    assert found.coverage.value == pytest.approx(sum(row.share for row in found.rows if row.module != "adapter"))
    assert (found.coverage.value or 1.0) < 0.05
    assert {row.verdict for row in found.rows if row.module == "adapter"} == {"fallback"}
    assert "fallback in adapter (fprop, dgrad, wgrad: bf16 x bf16)" in found.summary


def test_kernels_of_no_captured_layer_leave_the_share_unknown() -> None:
    stray = Kernel(GEMM_NAMES["bf16"]["fprop"], 50.0, "adapter", "fprop")
    found = judge(DELAYED_CARD, ranged=[[*marked("fp8_delayed"), stray]])
    assert {row.verdict for row in found.rows} == {"confirmed"}
    assert found.coverage.value is None
    assert found.summary == (
        "The captured TE GEMMs ran in FP8 (4 linears x 3 roles). There are more: the timed step ran 1 GEMM "
        "kernel (bf16) of no captured layer: what share of its FLOPs they are is not known."
    )
    # A product that a step showed, and that is no linear layer's, is accounted for.
    known = Product("fp8_delayed", "adapter", "aten::mm", "forward", 1, 8, 8, 8, ("bf16", "bf16"), 1)
    assert judge(DELAYED_CARD, ranged=[[*marked("fp8_delayed"), stray]], products=[known]).coverage.value == 1.0


# -- 7: words --------------------------------------------------------------------------------------------------------


def test_nothing_to_multiply_is_not_all() -> None:
    empty = [replace(lin, m=0) for lin in ONE]
    found = judge(DELAYED_CARD, empty, ranged=[marked("fp8_delayed", empty)])
    assert found.coverage.value is None
    assert found.summary == "What ran is not known: the captured GEMMs multiply nothing (M is 0)."


def test_a_name_that_only_the_benchmark_knows_is_not_called_all() -> None:
    unknown = [Kernel(UNKNOWN_GEMM, 1.0, "block.fc", role) for role in ROLES]
    found = judge(DELAYED_CARD, ONE, ranged=[unknown])
    assert found.coverage.value == 0.0
    assert not found.summary.startswith("All ")


# -- the step as timed and the step with ranges ----------------------------------------------------------------------


def test_an_eager_step_takes_its_labels_from_a_step_with_ranges() -> None:
    fallen = [
        replace(k, name=GEMM_NAMES["bf16"]["fprop"]) if i == 1 else k for i, k in enumerate(marked("fp8_delayed"))
    ]
    steps = [step_products("fp8_delayed", [replace(k, module="", role="") for k in fallen])]
    seen = [
        dispatch("fp8_delayed", lin, role, BF16_CARD if (i, role) == (1, "fprop") else DELAYED_CARD)
        for i, lin in enumerate(LINEARS)
        for role in ROLES
    ]
    found = judge(DELAYED_CARD, steps=steps, ranged=[fallen], seen=seen)
    (bad,) = [row for row in found.rows if row.verdict != "confirmed"]
    assert (bad.module, bad.role, bad.verdict) == (LINEARS[1].module, "fprop", "fallback")
    assert found.disagreements == ()


def test_a_step_with_ranges_that_ran_other_kernels_gives_no_labels() -> None:
    """Another GEMM fell back in the timed step than in the one with ranges: nobody knows which."""
    other, fallen = marked("fp8_delayed"), bare("fp8_delayed")
    other[2] = replace(other[2], name=GEMM_NAMES["bf16"]["fprop"])
    fallen[1] = replace(fallen[1], name=GEMM_NAMES["bf16"]["fprop"])
    found = judge(DELAYED_CARD, steps=[step_products("fp8_delayed", fallen)], ranged=[other])
    assert {row.verdict for row in found.rows if row.role == "fprop"} == {"unproven"}
    assert {row.verdict for row in found.rows if row.role != "fprop"} == {"confirmed"}


def test_fewer_kernels_than_calls_give_no_labels_either() -> None:
    kernels = [ProductKernel(Kind("fp8", ("e4m3", "e4m3")), "a", "fprop", "forward")] * 3
    unmarked = [kernel._replace(module="", role="") for kernel in kernels]
    assert labelled(unmarked, kernels, 3) == kernels
    assert labelled(unmarked, kernels, 4) is None
    assert labelled(unmarked[:2], kernels, 2) is None


def test_a_step_that_has_lost_kernels_is_no_evidence() -> None:
    whole, short = bare("fp8_delayed"), bare("fp8_delayed")[1:]
    one = [step_products("fp8_delayed", kernels, n) for n, kernels in enumerate((short, whole))]
    assert judge(DELAYED_CARD, steps=one).coverage.value == pytest.approx(1.0), "the other step is whole"
    found = judge(DELAYED_CARD, steps=one[:1], ranged=[marked("fp8_delayed")])
    assert found.coverage.value == 0.0
    assert found.rows[0].why == (
        "by its operands alone: the steps traced as timed hold 11 GEMM kernels, and one traced with ranges holds 12"
    )


def test_without_a_direction_two_kinds_of_gemms_are_not_told_apart() -> None:
    narrow, mixed = Operands.asked(DELAYED_CARD, "fprop"), Operands.asked(DELAYED_CARD, "dgrad")
    demands = [Demand("a", "fprop", 1, narrow), Demand("a", "dgrad", 1, mixed), Demand("a", "wgrad", 1, mixed)]
    kernels = [ProductKernel(Kind.of(demand.asked)) for demand in demands]
    assert [row.proven for row in balance(demands, kernels).rows] == [0, 0, 0]
    directed = [kernel._replace(direction="backward" if i else "forward") for i, kernel in enumerate(kernels)]
    assert [row.proven for row in balance(demands, directed).rows] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"phase": (0,)}, "unequal lengths"),
        ({"name": (9,) * 12}, "a name that it does not hold"),
        ({"formats": (-1,) * 12}, "a label that it does not hold"),
    ],
)
def test_a_fact_that_cannot_be_read_is_named(change: dict[str, tuple[int, ...]], says: str) -> None:
    sound = step_products("fp8_delayed", bare("fp8_delayed"))
    assert flaw(sound) is None
    broken = replace(sound, **change)
    assert says in (flaw(broken) or "")
    report = analyze(Recording.from_facts([*gpu_facts(), broken]))
    assert any(says in problem for problem in report.problems)


@pytest.mark.parametrize("total", [0, 1, 2, 3, 4, 8])
def test_a_grouped_call_is_one_kernel_or_one_for_each_group(total: int) -> None:
    asked = Operands.asked(DELAYED_CARD, "fprop")
    grouped = Demand("experts", "fprop", 2, asked, groups=4)
    kernel = ProductKernel(Kind.of(asked), "experts", "fprop", "forward")
    (row,) = balance([grouped], [kernel] * total).rows
    assert row.proven == (2 if total in (2, 8) else 0)


def test_worlds() -> None:
    """Of the 100,000 that `python -m tests.analyze.worlds` makes, some."""
    whole = 0
    for number in range(3000):
        world = Maker(number).world()
        assert (number, wrong(world)) == (number, "")
        whole += not world.lost
    assert whole > 100
