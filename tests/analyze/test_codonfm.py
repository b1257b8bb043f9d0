"""The profile of CodonFM 5B on an H200, as docs/codonfm-5b tells it: what is said there follows from its Recording."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import pytest

from lowprec_callback import recording
from lowprec_callback.analyze.gap import between, closes
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.report import Report

FOLDER = Path(__file__).parents[2] / "docs" / "codonfm-5b"
FP8 = ("fp8_delayed", "fp8_current", "fp8_block")


@cache
def report() -> Report:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / recording.FILE_NAME
        file.write_bytes(gzip.decompress((FOLDER / "recording.jsonl.gz").read_bytes()))
        return analyze(recording.read(file))


def test_the_ledgers_are_complete() -> None:
    for name in ("bf16", *FP8):
        ledger = report().recipe(name).ledger
        assert ledger is not None
        assert ledger.complete, ledger.complaints
        assert ledger.wall.value is not None
        assert ledger.residual.value is not None
        assert abs(ledger.residual.value) < 0.01 * ledger.wall.value
        assert ledger.buckets["other"].value == 0
        assert ledger.unknown_kernels == ()


def test_every_gap_closes() -> None:
    recipes = [report().recipe(name) for name in ("bf16", *FP8)]
    for one in recipes:
        for other in recipes:
            if one is not other:
                assert closes(between(one, other)), (one.name, other.name)


def test_every_gemm_of_te_ran_as_asked_by_four_witnesses() -> None:
    for name in FP8:
        verdict = report().recipe(name).verdict
        assert verdict is not None
        assert verdict.te_coverage.value == pytest.approx(1.0)
        assert verdict.disagreements == ()
        rows = [row for row in verdict.rows if row.module != "head"]
        assert len(rows) == 24 * 4 * 3
        assert {row.verdict for row in rows} == {"confirmed"}
        assert all({"operands", "library", "kernels"} <= set(row.witnesses) for row in rows)
        memory = report().recipe(name).memory
        assert memory is not None
        assert memory.state == "agrees"


@pytest.mark.parametrize(("name", "error"), [("fp8_delayed", -0.006), ("fp8_current", -0.002), ("fp8_block", 0.013)])
def test_the_prediction(name: str, error: float) -> None:
    made = report().recipe(name).prediction
    assert made is not None
    assert made.error.value == pytest.approx(error, abs=0.001)
    assert made.bound == "GPU"
    assert made.naive_error.value is not None
    assert made.naive_error.value < -0.13


def test_memory_adds_up() -> None:
    for name in ("bf16", *FP8):
        part = report().recipe(name)
        assert part.peak_gb.value is not None
        assert 89 < part.peak_gb.value < 100


def test_what_the_page_quotes() -> None:
    text = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").replace("\n> ", " ").split())
    for sentence in report().headline:
        assert " ".join(sentence.split()) in text, sentence
    for name in ("bf16", *FP8):
        step = report().recipe(name).step_ms
        assert f"{step.value:.1f} ±{step.half_width:.1f}" in text
