"""The page of `lowprec compare`: how it looks, and that no number is cut."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from lowprec_callback.analyze.compare import compare
from lowprec_callback.analyze.gates import check, parse_gate
from lowprec_callback.report import Figure, Report
from lowprec_callback.show.compare_page import ComparePage
from tests.analyze.compared import report, with_recipe

GATES = [
    "step:fp8_delayed<=2%",
    "speedup:fp8_delayed>=1.2x",
    "coverage:fp8_delayed>=99%",
    "bucket.quantize:fp8_delayed<=5%",
    "step:mxfp8<=2%",
]


def sparse() -> Report:
    """B stopped early: no trace, no verdict, one sample, and more."""
    made = with_recipe(
        report(50),
        "fp8_delayed",
        ledger=None,
        no_ledger="the run was interrupted before this recipe's traced step",
        verdict=None,
        step_ms=Figure(80.4, "ms", "measured", n=1),
        speedups=None,
        peak_gb=Figure.missing("GB", "no memory peak of fp8_delayed was recorded"),
    )
    return with_recipe(replace(made, status="interrupted"), "bf16", void="the loss became nan")


SAMPLES: dict[str, Callable[[], tuple[Report, Report]]] = {
    "same": lambda: (report(1), report(50)),
    "slower": lambda: (report(1), report(50, fp8=82.4)),
    "noisy": lambda: (report(1, noise=0.1), report(50, noise=0.1)),
    "machine": lambda: (report(1), report(50, ms=110.0, fp8=88.0)),
    "sparse": lambda: (report(1), sparse()),
    "upgrade": lambda: (report(1), replace(report(50, fp8=70.0), versions={**report().versions, "torch": "2.12.0"})),
}


def page(name: str, width: int = 100) -> str:
    before, after = SAMPLES[name]()
    comparison = compare(before, after, allow=["version.torch"])
    gates = [parse_gate(text) for text in GATES] if name in ("slower", "sparse") else []
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    console.print(ComparePage(comparison, check(comparison, gates), ("runs/before", "runs/after")))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


class PageFile(SingleFileSnapshotExtension):
    """A text file a page, to be looked at as it is."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", SAMPLES)
def test_page(name: str, width: int, snapshot: SnapshotAssertion) -> None:
    assert page(name, width) == snapshot(extension_class=PageFile, name=f"{name}-{width}")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("name", SAMPLES)
def test_no_line_is_too_wide_and_no_number_is_cut(name: str, width: int) -> None:
    text = page(name, width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    assert not re.search(r"\b(None|inf)\b", text)


@pytest.mark.parametrize("name", ["noisy", "sparse"])
def test_every_word_that_is_uncertain_has_its_interval_or_its_reason(name: str) -> None:
    text = page(name, 160)
    rows = [line for line in text.splitlines() if "cannot tell" in line and "cannot tell:" not in line]
    assert rows
    for row in rows:
        marks = re.findall(r"\[\d+\]", row)
        assert marks or re.search(r"-[\d.]+%? to \+[\d.]+%? ", row), row
        assert all(f"\n  {mark}  " in text for mark in marks)
