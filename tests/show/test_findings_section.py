"""The findings on the console page."""

from __future__ import annotations

from dataclasses import replace

from lowprec_callback.report import Figure, Finding
from lowprec_callback.show.console import as_text
from lowprec_callback.show.sections.findings import MOST

from . import samples


def finding(code: str, recipe: str, ms: float | None, advice: str = "Do this.") -> Finding:
    figure = Figure.missing("ms", "nobody traced it") if ms is None else Figure(ms, "ms")
    return Finding(code, recipe, f"Sentence of {code}.", ("a row",), figure, advice)


def page(*found: Finding) -> str:
    text = as_text(replace(samples.codonfm(), findings=found), 160)
    return text[text.index("What to do") :].split("\n\n")[0] if "What to do" in text else ""


def test_no_finding_no_section() -> None:
    assert page() == ""


def test_a_number_that_is_not_known_is_a_reason() -> None:
    text = page(finding("recompute", "mxfp8", None))
    assert "ms not known: nobody traced it" in text
    assert "0 ms" not in text


def test_the_same_advice_for_several_recipes_is_told_once() -> None:
    text = page(finding("padding", "mxfp8", 3.0), finding("padding", "nvfp4", 2.0), finding("padding", "bf16", None))
    assert text.count("Do this.") == 1
    assert "Likewise nvfp4 (2.00 ms) and bf16." in text
    assert page(finding("padding", "a", 3.0), finding("padding", "b", 2.0, "Do that.")).count("Do th") == 2


def test_what_does_not_fit_is_counted() -> None:
    text = page(*(finding(f"code-{i}", "mxfp8", 20.0 - i) for i in range(MOST + 2)))
    assert f"code-{MOST - 1}" in text
    assert f"code-{MOST}" not in text
    assert "2 more findings are in report.json." in text
