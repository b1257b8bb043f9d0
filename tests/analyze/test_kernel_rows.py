"""Asked against ran by kernel names alone: a capture knows no shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowprec_callback.analyze.kernel_rows import kernel_verdict
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import GemmKernels, Imported, Recording, StepTime
from lowprec_callback.report import Verdict
from lowprec_callback.show.console import as_text

FORWARD = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_bias_TNT"
BACKWARD = "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT"
BF16 = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
MXFP8 = "nvjet_sm100_qqtst_128x128_128x6_2x1_v_bz_Avec32UE8M0_Bvec32UE8M0_TNT"
IMPORTED = Imported("Nsight Systems 2025.3", "x.sqlite", 100, 99, "ranges", "all", "ranges")

Row = tuple[str, str, str, str, str, bool, int]
"""(kernel, module, role, op, phase, library, count)."""


def table(*rows: Row, steps: int = 2, recipe: str = "fp8_delayed") -> GemmKernels:
    texts = ["", *dict.fromkeys(text for row in rows for text in row[1:5] if text)]
    names = list(dict.fromkeys(row[0] for row in rows))
    columns = [tuple(texts.index(row[i]) for row in rows) for i in range(1, 5)]
    return GemmKernels(
        recipe=recipe,
        steps=steps,
        names=tuple(names),
        labels=tuple(texts),
        name=tuple(names.index(row[0]) for row in rows),
        module=columns[0],
        role=columns[1],
        op=columns[2],
        phase=columns[3],
        library=tuple(row[5] for row in rows),
        count=tuple(row[6] for row in rows),
        total_us=tuple(10.0 * row[6] for row in rows),
    )


def judged(
    *rows: Row, recipe: str = "fp8_delayed", override: str | None = None, imported: Imported = IMPORTED
) -> Verdict:
    card = load_cards()[recipe].to_fact(False)
    return kernel_verdict([(1, table(*rows, recipe=recipe))], card, imported, override)


GOOD: tuple[Row, ...] = (
    (FORWARD, "a", "fprop", "", "forward", True, 4),
    (BACKWARD, "a", "dgrad", "", "backward", True, 4),
    (BACKWARD, "a", "wgrad", "", "backward", True, 4),
)


def test_all_as_asked() -> None:
    verdict = judged(*GOOD)
    assert [(row.where, row.ran, row.verdict, row.kernels, row.ms) for row in verdict.kernels] == [
        ("fprop", "e4m3 x e4m3", "confirmed", 2.0, 0.02),
        ("dgrad", "e4m3 x e5m2", "confirmed", 2.0, 0.02),
        ("wgrad", "e4m3 x e5m2", "confirmed", 2.0, 0.02),
    ]
    assert verdict.coverage.value is None
    assert verdict.summary == (
        "By kernel names alone, all 6 linear-layer GEMM kernels a step ran in FP8 (forward e4m3 x e4m3, backward "
        "e4m3 x e5m2). A capture holds no GEMM shapes, so shares of FLOPs are not known."
    )


@pytest.mark.parametrize(
    ("row", "recipe", "word"),
    [
        ((BF16, "a", "fprop", "", "forward", True, 1), "fp8_delayed", "fallback"),
        ((BF16, "a", "", "", "backward", True, 1), "fp8_delayed", "fallback"),
        ((BACKWARD, "a", "fprop", "", "forward", True, 1), "fp8_delayed", "fallback"),
        ((FORWARD, "a", "", "", "backward", True, 1), "fp8_delayed", "fallback"),
        ((BACKWARD, "a", "", "", "backward", True, 1), "fp8_delayed", "confirmed"),
        ((MXFP8, "a", "fprop", "", "forward", True, 1), "fp8_block", "emulated"),
        ((MXFP8, "a", "fprop", "", "forward", True, 1), "mxfp8", "confirmed"),
        ((BF16, "a", "fprop", "", "forward", True, 1), "bf16", "confirmed"),
        (
            ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "a", "fprop", "", "forward", True, 1),
            "fp8_delayed",
            "unproven",
        ),
        # Nothing shows TE at work: which layers a recipe would reach is not known.
        ((BF16, "head", "", "aten::mm", "forward", False, 1), "fp8_delayed", "unproven"),
        ((BF16, "", "", "", "", False, 1), "bf16", "confirmed"),
        ((FORWARD, "", "", "", "", False, 1), "fp8_delayed", "confirmed"),
    ],
)
def test_each_word(row: Row, recipe: str, word: str) -> None:
    (found,) = judged(row, recipe=recipe).kernels
    assert found.verdict == word


def test_what_te_did_not_launch_is_outside_where_te_is_seen() -> None:
    verdict = judged(*GOOD, (BF16, "", "", "aten::mm", "forward", False, 2))
    assert [row.verdict for row in verdict.kernels] == ["confirmed"] * 3 + ["outside"]
    assert "all 6 linear-layer GEMM kernels a step ran in FP8" in verdict.summary
    assert "; 1 more ran outside of these layers." in verdict.summary


def test_attentions_products_do_not_count() -> None:
    verdict = judged(*GOOD, (BF16, "DotProductAttention", "", "DotProductAttention forward", "forward", False, 9))
    assert len(verdict.kernels) == 3


def test_a_wide_backward_by_request() -> None:
    row = (BF16, "a", "dgrad", "", "backward", True, 1)
    assert judged(row, override="NVTE_BACKWARD_OVERRIDE=high_precision").kernels[0].verdict == "by_request"


def test_a_fallback_is_named_and_so_is_a_backward_that_is_missing() -> None:
    verdict = judged(GOOD[0], (BF16, "b", "fprop", "", "forward", True, 2))
    assert verdict.summary.startswith(
        "By kernel names alone, 2 of 3 linear-layer GEMM kernels a step ran in FP8 (b fprop: bf16, fallback); "
        "no GEMM of a backward pass was seen."
    )


def test_an_inferred_recipe_is_said_to_be_one() -> None:
    imported = replace(IMPORTED, recipe_from="kernels", why_recipe="GEMM kernels of precision fp8 ran")
    assert judged(*GOOD, imported=imported).summary.endswith(
        "Nothing in the capture says what was asked for: fp8_delayed is inferred (GEMM kernels of precision fp8 ran)."
    )


def test_no_gemm_at_all() -> None:
    verdict = kernel_verdict([(1, table())], load_cards()["bf16"].to_fact(True), IMPORTED, None)
    assert verdict.summary == "What ran is not known: no GEMM kernel of a linear layer is in the capture."


def test_the_report_leads_with_it() -> None:
    card = load_cards()["fp8_delayed"].to_fact(True)
    steps = [StepTime("fp8_delayed", 0, i, 10.0 + i / 10, 9.0, attached="Nsight Systems 2025.3") for i in range(5)]
    report = analyze(Recording.from_facts([card, IMPORTED, *steps, table(*GOOD)]))
    assert report.headline[0].startswith("By kernel names alone, all 6")
    assert report.headline[1] == "No recipe beside fp8_delayed is in this capture, so there is nothing to compare."
    assert (report.engine, report.model) == ("imported", "x.sqlite")
    assert "every step is timed, with the profiler attached" in report.plan
    page = " ".join(as_text(report, 100).split())
    assert "a fprop: asked e4m3 x e4m3, tensor-delayed, ran e4m3 x e4m3 (2 kernels, 0.02 ms a step)" in page


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": (1,)}, "its columns have unequal lengths"),
        ({"name": (0, 1, 9)}, "it points to a name that it does not hold"),
        ({"role": (0, 0, -1)}, "it points to a label that it does not hold"),
    ],
)
def test_a_fact_that_cannot_be_read_is_named(change: dict[str, tuple[int, ...]], says: str) -> None:
    card = load_cards()["fp8_delayed"].to_fact(True)
    report = analyze(Recording.from_facts([card, IMPORTED, replace(table(*GOOD), **change)]))  # type: ignore[arg-type]
    assert report.problems[0] == f"the counted kernels of fp8_delayed on line 3 cannot be used: {says}"


def test_marked_calls_without_a_kernel_are_unproven_and_nothing_is_called_all() -> None:
    card = load_cards()["fp8_delayed"].to_fact(False)
    whole = replace(table(*GOOD), calls=12, silent_calls=0, fewest=6, most=6)
    assert kernel_verdict([(1, whole)], card, IMPORTED, None).summary.startswith("By kernel names alone, all 6 ")
    found = kernel_verdict([(1, replace(whole, calls=20, silent_calls=8))], card, IMPORTED, None)
    assert found.summary.startswith(
        "By kernel names alone, 6 of 10 linear-layer GEMM kernels a step ran in FP8 (unknown module: unknown, unproven)"
    )
    assert found.kernels[-1].why == "the capture marks these GEMM calls, and holds no kernel of theirs"
    assert found.kernels[-1].kernels == 4


def test_a_step_with_fewer_kernels_than_another_has_lost_some() -> None:
    card = load_cards()["fp8_delayed"].to_fact(False)
    unmarked = [(*row[:5], False, row[6]) for row in GOOD]
    uneven = replace(table(*unmarked), fewest=4, most=8)
    found = kernel_verdict([(1, uneven)], card, IMPORTED, None)
    assert "all" not in found.summary.split(".")[0]
    assert found.kernels[-1].verdict == "unproven"
    assert found.kernels[-1].kernels == 2, "8 in each of the two steps, but 12 in both"


def test_an_amd_gpu_runs_types_and_no_recipe_that_is_known() -> None:
    bf16 = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1"
    found = judged((bf16, "", "", "aten::mm", "forward", False, 4), recipe="bf16")
    assert found.kernels[0].ran == "bf16"
    assert found.summary.endswith(
        "These are kernels of an AMD GPU: their types are read from their names, recipes are not known there."
    )
    assert "AMD" not in judged(*GOOD).summary
