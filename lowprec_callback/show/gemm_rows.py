"""The tables of `lowprec gemm` as flat rows, for JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from lowprec_callback.analyze.gemm_table import GemmTable
from lowprec_callback.analyze.gemms import speedup
from lowprec_callback.recording import ROLES
from lowprec_callback.report import Figure

COLUMNS = (
    "method",
    "mode",
    "operation",
    "role",
    "m",
    "k",
    "n",
    "groups",
    "calls",
    "recipe",
    "ms",
    "low_ms",
    "high_ms",
    "samples",
    "tflops",
    "speedup",
    "quantization_share",
    "launch_bound",
    "reason",
)
"""m, k, n are those of the layer's forward GEMM, whatever the role. The speedup is over the baseline."""


def rows(tables: Iterable[GemmTable]) -> list[dict[str, Any]]:
    """One row for each method, mode, operation, role and recipe; a row without a time has the reason."""
    found = []
    for table in tables:
        for cell in table.cells:
            for recipe in table.recipes:
                figure = cell.ms[recipe]
                values = (
                    table.method,
                    table.mode,
                    cell.operation,
                    cell.role,
                    cell.m,
                    cell.k,
                    cell.n,
                    cell.groups,
                    cell.calls,
                    recipe,
                    figure.value,
                    figure.low,
                    figure.high,
                    figure.n,
                    table.cell_rate(cell, recipe).value,
                    speedup(cell.ms[table.baseline], figure).value,
                    cell.quantize_share[recipe].value if table.mode == "autocast" else None,
                    recipe in cell.launch_bound,
                    figure.reason,
                )
                found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def sums(tables: Iterable[GemmTable]) -> list[dict[str, Any]]:
    """Role sums, layer and model of each recipe, with their speedups over the baseline; or why there are none."""
    return [
        {
            "method": table.method,
            "mode": table.mode,
            "recipe": recipe,
            "sum": name,
            "ms": figure.value,
            "low_ms": figure.low,
            "high_ms": figure.high,
            "speedup": factor.value,
            "low_speedup": factor.low,
            "high_speedup": factor.high,
            "reason": figure.reason,
        }
        for table in tables
        if table.has_layer
        for recipe in table.recipes
        for name, figure, base in _sums(table, recipe)
        for factor in [speedup(base, figure) if recipe != table.baseline else _itself(figure)]
    ]


def _itself(figure: Figure) -> Figure:
    """The baseline's speedup over itself is exactly 1, however wide its interval."""
    return Figure.missing("x", figure.reason or "missing") if figure.value is None else Figure(1.0, "x")


def _sums(table: GemmTable, recipe: str) -> Iterator[tuple[str, Figure, Figure]]:
    for role in ROLES:
        yield role, table.role_sum(recipe, role), table.role_sum(table.baseline, role)
    yield "layer", table.layer(recipe), table.layer(table.baseline)
    yield "model", table.model(recipe), table.model(table.baseline)


def as_csv(tables: Iterable[GemmTable]) -> str:
    """`rows` as CSV; a time that is missing is an empty field."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(tables))
    return out.getvalue()
