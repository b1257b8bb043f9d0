"""The page of `lowprec gemm`: what GEMMs of these shapes take in each recipe, alone or with quantization."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lowprec_callback.analyze.gemm_table import Cell, GemmTable, roles_of
from lowprec_callback.analyze.gemms import speedup
from lowprec_callback.recording import GemmRun, Mode, role_shape
from lowprec_callback.report import Figure

TITLES: dict[Mode, str] = {"autocast": "with quantization (autocast)", "kernel": "GEMM only (pre-quantized)"}


class GemmPage:
    """One table by role and operation for each (method, mode), then what follows from it."""

    def __init__(self, title: str, tables: Iterable[GemmTable], peak: str, remarks: Iterable[str] = ()) -> None:
        self._title, self._tables, self._peak, self._remarks = title, list(tables), peak, list(remarks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Title, tables, remarks."""
        yield Text(self._title, style="bold")
        yield Text(self._peak, style="dim")
        for table in self._tables:
            yield Text()
            yield from _table(table)
        if self._remarks:
            yield Text()
            yield from (Text(remark) for remark in self._remarks)


def _table(table: GemmTable) -> Iterable[RenderableType]:
    yield Text(
        f"{table.method}, {TITLES[table.mode]}: ms of one call, and the speedup over {table.baseline}", style="bold"
    )
    if not table.recipes:
        yield Text("  nothing was timed")
        return
    notes: dict[str, str] = {}
    grid = Table(box=None, pad_edge=True, header_style="bold")
    grid.add_column("operation")
    grid.add_column("M x K x N")
    for recipe in table.recipes:
        grid.add_column(recipe, justify="right")
    for role, cells in roles_of(table):
        if not cells:
            continue
        grid.add_row(Text(role, style="italic"))
        for cell in cells:
            shape = "x".join(map(str, role_shape(cell.role, cell.m, cell.k, cell.n)))
            grid.add_row(f" {cell.operation}", shape, *(_cell(table, cell, recipe, notes) for recipe in table.recipes))
        sums = [
            _sum(table.role_sum(recipe, role), table.role_sum(table.baseline, role), notes) for recipe in table.recipes
        ]
        grid.add_row(Text(f" {role} sum", style="bold"), "", *sums)
    base = table.baseline
    grid.add_row(
        Text("layer", style="bold"), "", *(_sum(table.layer(r), table.layer(base), notes) for r in table.recipes)
    )
    if table.layers > 1 or any(not cell.in_layer for cell in table.cells):
        name = f"model, {table.layers} layers" if table.layers > 1 else "model"
        grid.add_row(
            Text(name, style="bold"),
            "",
            *(_sum(table.model(r), table.model(base), notes) for r in table.recipes),
        )
    if table.mode == "autocast" and table.method == "role-true":
        grid.add_row(
            "quantization's share", "", *(_share(table.share_of_quantization(r), notes) for r in table.recipes)
        )
    yield grid
    yield from (Text(f"  {mark} {reason}") for reason, mark in notes.items())
    yield from (Text(f"  {line}") for line in _lines(table))


def _cell(table: GemmTable, cell: Cell, recipe: str, notes: dict[str, str]) -> Text:
    figure = cell.ms[recipe]
    if figure.value is None:
        return Text(_mark(figure, notes))
    bound = "*" if recipe in cell.launch_bound else ""
    if bound:
        notes.setdefault("launch-bound: the host needs longer to launch it than the GPU to run it", "*")
    factor = speedup(cell.ms[table.baseline], figure)
    beside = "" if recipe == table.baseline or factor.value is None else f"  {factor.value:.2f}x"
    return Text(f"{_ms(figure.value)}{bound}{beside}")


def _sum(figure: Figure, base: Figure, notes: dict[str, str]) -> Text:
    if figure.value is None:
        return Text(_mark(figure, notes), style="bold")
    factor = speedup(base, figure)
    beside = "" if figure is base or factor.value is None or figure.value == base.value else f"  {factor.value:.2f}x"
    return Text(f"{_ms(figure.value)}{beside}", style="bold")


def _share(figure: Figure, notes: dict[str, str]) -> Text:
    return Text(_mark(figure, notes) if figure.value is None else f"{figure.value:.1%}")


def _mark(figure: Figure, notes: dict[str, str]) -> str:
    reason = figure.reason or "missing"
    numbered = sum(mark.startswith("[") for mark in notes.values())
    return notes.setdefault(reason, f"[{numbered + 1}]")


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def _lines(table: GemmTable) -> Iterable[str]:
    """Recipe against recipe, where each stops to pay, how it was sampled, and what was not run."""
    others = [recipe for recipe in table.recipes if recipe != table.baseline]
    pairs = [
        f"{narrow} against {wide} {factor.value:.2f}x"
        for index, narrow in enumerate(others)
        for wide in others[:index]
        if (factor := table.against(narrow, wide)).value is not None
    ]
    if pairs:
        yield f"layer: {', '.join(pairs)}"
    if table.method == "role-true":
        yield from (f"break-even: {line}" for line in table.break_even())
    if table.run is not None:
        yield sampled(table.run)
    yield from (f"{recipe} not run: {reason}" for recipe, reason in table.refused.items())


def sampled(run: GemmRun) -> str:
    """How the run was sampled, in a sentence."""
    cache = "cold L2 (overwritten before each call)" if run.cold_l2 else "hot L2 (as the call before left it)"
    if run.method == "te-tutorial":
        return f"one pair of events around {run.iterations} calls, no interval; {run.seconds:.1f} s"
    why = {
        "precise": f"every layer's median is known to ±{run.precision:.1%}" if run.precision else "precise",
        "budget": f"the budget of {run.budget_s} s was spent",
        "rounds": "all rounds were done",
        "failed": "no shape ran",
    }.get(run.stopped, run.stopped)
    left = "" if run.widest is None else f"; the widest interval left is ±{run.widest:.1%}"
    window = f"; weights quantized once in {run.accumulate} micro-batches" if run.accumulate > 1 else ""
    return f"{run.rounds} shuffled rounds in {run.seconds:.1f} s, stopped because {why}{left}; {cache}{window}"


def rows(tables: Iterable[GemmTable]) -> list[dict[str, Any]]:
    """Flat rows for JSON and CSV: one for each method, mode, operation, role and recipe; a gap has a reason."""
    return [
        {
            "method": table.method,
            "mode": table.mode,
            "operation": cell.operation,
            "role": cell.role,
            "m": cell.m,
            "k": cell.k,
            "n": cell.n,
            "calls": cell.calls,
            "recipe": recipe,
            "ms": cell.ms[recipe].value,
            "low_ms": cell.ms[recipe].low,
            "high_ms": cell.ms[recipe].high,
            "samples": cell.ms[recipe].n,
            "quantization_share": cell.quantize_share[recipe].value,
            "launch_bound": recipe in cell.launch_bound,
            "reason": cell.ms[recipe].reason,
        }
        for table in tables
        for cell in table.cells
        for recipe in table.recipes
    ]


def as_csv(tables: Iterable[GemmTable]) -> str:
    """`rows` as CSV."""
    out = io.StringIO()
    flat = rows(tables)
    writer = csv.DictWriter(out, fieldnames=list(flat[0]) if flat else ["method"])
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
