"""The GEMM benchmark's rows, summed to what a step takes: shared by the console's table and the plot.

    ms of an operation in a step  =  sum over its rows (roles) of  calls x ms of one call

A sum with a missing term is missing, with that term's reason (`Figure.total`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lowprec_callback.recording import ROLES, Mode, Role
from lowprec_callback.report import Figure, GemmRow, RecipeReport, Report


class Operation(NamedTuple):
    """A linear layer of the model by its place and its forward shape."""

    name: str
    m: int
    k: int
    n: int

    @property
    def shape(self) -> str:
        """`15872x4096x12288`."""
        return f"{self.m}x{self.k}x{self.n}"


def per_call(row: GemmRow, mode: Mode) -> Figure:
    """One call's time in a mode."""
    return row.kernel_ms if mode == "kernel" else row.autocast_ms


def per_step(rows: Iterable[GemmRow], mode: Mode) -> Figure:
    """The time of all calls of these rows in one optimizer step; missing where there are no rows."""
    terms = [per_call(row, mode).scaled(row.calls) for row in rows]
    return Figure.total(terms, "ms") if terms else Figure.missing("ms", "not in the benchmark")


def of_operation(recipe: RecipeReport, operation: Operation) -> list[GemmRow]:
    """A recipe's rows of one operation, in the order of the roles."""
    rows = [row for row in recipe.gemms if (row.operation, row.m, row.k, row.n) == operation]
    return sorted(rows, key=lambda row: ROLES.index(row.role))


def of_role(rows: Iterable[GemmRow], role: Role) -> list[GemmRow]:
    """The rows of one role."""
    return [row for row in rows if row.role == role]


def operations(report: Report) -> list[Operation]:
    """All operations of all recipes, the longest in the baseline first; those without a time there last."""
    found = dict.fromkeys(
        Operation(row.operation, row.m, row.k, row.n) for recipe in report.recipes for row in recipe.gemms
    )
    base = next((recipe for recipe in report.recipes if recipe.name == report.baseline), None)

    def length(operation: Operation) -> float:
        if base is None:
            return 0.0
        rows = of_operation(base, operation)
        autocast, kernel = per_step(rows, "autocast"), per_step(rows, "kernel")
        return (autocast.value if autocast.value is not None else kernel.value) or 0.0

    return sorted(found, key=lambda operation: -length(operation))
