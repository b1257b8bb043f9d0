"""Busy time by place: the most expensive places one by one, the others in one line that keeps the sum."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lowprec_callback.report import Figure, PlaceTime, Report
from lowprec_callback.show.console import as_text
from lowprec_callback.show.html import as_html
from lowprec_callback.show.sections.places import NO_MODULE, SHOWN

from . import samples


def with_places(report: Report, number: int, name: str = "layers.*.module_") -> Report:
    """Each recipe's busy time in places: the n-th takes 1/n as much as the first."""
    made = []
    for recipe in report.recipes:
        if recipe.ledger is None or recipe.ledger.busy.value is None:
            made.append(recipe)
            continue
        weights = [1 / (n + 1) for n in range(number)]
        busy = recipe.ledger.busy.value
        rows = tuple(
            PlaceTime(
                f"{name}{n}" if n else "",
                ("forward", "fprop", "backward")[n % 3],
                "gemm",
                Figure(busy * weight / sum(weights), "ms", "measured"),
                24.0,
            )
            for n, weight in enumerate(weights)
        )
        made.append(replace(recipe, ledger=replace(recipe.ledger, places=rows)))
    return replace(report, recipes=tuple(made))


def tables(page: str) -> list[list[str]]:
    """The lines of each of the section's tables, without their heads."""
    lines = page.splitlines()
    start = lines.index("Busy time by module, ms") + 1
    found: list[list[str]] = []
    while lines[start].startswith("  "):
        end = lines.index("", start)
        found.append(lines[start + 1 : end])
        start = end + 1
    return found


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("long", [False, True])
def test_the_columns_sum_to_busy(width: int, long: bool) -> None:
    report = with_places(
        samples.codonfm(), 30, "layers.*.self_attention.layernorm_qkv_" if long else "layers.*.module_"
    )
    page = as_text(report, width)
    assert max(map(len, page.splitlines())) <= width
    found = tables(page)
    assert len(found) == (2 if long and width == 80 else 1)
    for lines in found:
        rows = [line for line in lines if re.search(r"\d\.\d", line)]
        assert len(rows) == SHOWN + 2
        assert rows[0].split()[0] == NO_MODULE.split()[0]
        assert rows[SHOWN].split()[:3] == [str(30 - SHOWN), "other", "places"]
        columns = [re.findall(r"(?<!\S)\d+\.\d(?!\S)", row) for row in rows]
        for column in zip(*columns, strict=True):
            *parts, busy = map(float, column)
            assert sum(parts) == pytest.approx(busy, abs=0.06 * len(parts))


def test_the_page_holds_them_all() -> None:
    page = as_html(with_places(samples.codonfm(), 30))
    assert "Busy time by module, role and kind of work: all 30 places" in page
    assert page.count("layers.*.module_29") > 0
    assert "layers.*.module_29" not in as_text(with_places(samples.codonfm(), 30), 100)


def test_where_no_module_is_known_it_is_left_out() -> None:
    page = as_text(with_places(samples.codonfm(), 1), 100)
    assert "Busy time by module" not in page
    assert "Busy time by module" not in as_text(samples.codonfm(), 100)
