"""The page of `lowprec gemm`: what GEMMs of these shapes take in each recipe, alone or with quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lowprec_callback.analyze.gemm_table import BreakEven, Cell, GemmTable, roles_of
from lowprec_callback.analyze.gemms import speedup
from lowprec_callback.analyze.peaks import share_of_peak
from lowprec_callback.recording import GemmRun, Mode, role_shape
from lowprec_callback.report import Figure
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

TITLES: dict[Mode, str] = {"autocast": "with quantization (autocast)", "kernel": "GEMM only (pre-quantized)"}
LAUNCH_BOUND = "*"
PLAIN_TITLES: dict[Mode, str] = {"autocast": "with the casts of autocast", "kernel": "GEMM only"}
"""Where nothing is quantized."""


class GemmPage:
    """One table by role and operation for each (method, mode); what holds for all of them stands below, once."""

    def __init__(self, title: str, tables: Iterable[GemmTable], device: str, remarks: Iterable[str] = ()) -> None:
        self._title, self._tables, self._device, self._remarks = title, list(tables), device, list(remarks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Title, tables, how they were sampled, which recipes are not in them, remarks."""
        width = options.max_width
        yield Text(self._title, style="bold")
        yield Text(self._device, style=parts.DIM)
        judged = min(self._tables, key=_distance_from_training, default=None)
        for table in self._tables:
            yield Text()
            yield from _table(table, width)
            if table is judged:
                yield from (parts.paragraph(break_even(found)) for found in table.break_even())
        closing = [*_sampling(self._tables), *_not_run(self._tables), *self._remarks]
        if closing:
            yield Text()
            yield from (parts.paragraph(line, 0) for line in closing)


def _distance_from_training(table: GemmTable) -> tuple[bool, bool]:
    """Where recipes stop to pay is told once, of the table that comes nearest to what training does."""
    return (table.mode != "autocast", table.method != "role-true")


def _sampling(tables: Sequence[GemmTable]) -> Iterable[str]:
    """A sentence a method: its modes were sampled together."""
    runs = {table.method: table.run for table in tables if table.run is not None}
    for method, run in runs.items():
        yield f"{method}: {sampled(run)}"


def _not_run(tables: Sequence[GemmTable]) -> Iterable[str]:
    """A sentence a reason: which recipes no table has."""
    reasons: dict[str, list[str]] = {}
    for table in tables:
        for recipe, reason in table.refused.items():
            if recipe not in reasons.setdefault(reason, []):
                reasons[reason].append(recipe)
    for reason, recipes in reasons.items():
        yield f"{words.listed(recipes)} not run: {words.one_line(reason)}"


# --- One table -------------------------------------------------------------------------------------------


def _table(table: GemmTable, width: int) -> Iterable[RenderableType]:
    title = TITLES[table.mode] if table.quantizes else PLAIN_TITLES[table.mode]
    yield parts.heading(f"{table.method}, {title}")
    left_out = [parts.paragraph(f"{name} is not in this table: {why}") for name, why in table.left_out.items()]
    if not table.recipes:
        yield parts.paragraph("nothing was timed")
        yield from left_out
        return
    unit = "ms of one call" if table.has_layer else "ms of one call, TFLOP/s"
    yield parts.paragraph(f"{unit}, and the speedup over {table.baseline}", style=parts.DIM)
    groups = parts.side_by_side(table.recipes, lambda group: _grid(table, group, Notes()), width)
    notes = Notes()
    grids = [[parts.indented(_grid(table, group, notes))] for group in groups]
    yield from parts.stacked(*grids)
    yield from notes.lines()
    yield from left_out
    yield from (parts.paragraph(line) for line in _pairs(table))


def _grid(table: GemmTable, recipes: Sequence[str], notes: Notes) -> Table:
    """Rows by role, each role ending with its sum; then what stands outside the layers, and the sums of all."""
    grid = parts.table("operation", "M x K x N", *recipes, left=2)
    outside = [cell for cell in table.cells if not cell.in_layer] if table.has_layer else []
    for role, cells in roles_of(table):
        inside = [cell for cell in cells if cell not in outside]
        of_role = partial(table.role_sum, role=role)
        if not inside:
            continue
        grid.add_row(Text(role, style="italic"))
        for cell in inside:
            _operation(grid, table, cell, f" {cell.operation}", recipes, notes)
        if table.has_layer:
            _total(grid, table, f" {role} sum", of_role, recipes, notes)
    if not table.has_layer:
        return grid
    _total(grid, table, "layer", table.layer, recipes, notes)
    _rates(grid, table, recipes, notes)
    if table.mode == "autocast" and table.method == "role-true" and table.quantizes:
        shares = [notes.cell(table.share_of_quantization(recipe), words.share) for recipe in recipes]
        grid.add_row(Text("quantization's share"), Text(), *shares)
    if outside:
        grid.add_row(Text("outside the layers", style="italic"))
        for cell in outside:
            _operation(grid, table, cell, f" {cell.operation} {cell.role}", recipes, notes)
    if table.layers > 1 or outside:
        name = f"model, {table.layers} layers" if table.layers > 1 else "model"
        _total(grid, table, name, table.model, recipes, notes)
    return grid


def _operation(grid: Table, table: GemmTable, cell: Cell, name: str, recipes: Sequence[str], notes: Notes) -> None:
    shape = "x".join(map(str, role_shape(cell.role, cell.m, cell.k, cell.n)))
    if cell.groups > 1:
        name += f", {cell.groups} groups"
    grid.add_row(Text(name), Text(shape), *(_cell(table, cell, recipe, notes) for recipe in recipes))


def _cell(table: GemmTable, cell: Cell, recipe: str, notes: Notes) -> Text:
    figure = cell.ms[recipe]
    text = notes.cell(figure, words.bare)
    if figure.value is None:
        return text
    if recipe in cell.launch_bound:
        text.append(LAUNCH_BOUND)
        notes.explain(f"{LAUNCH_BOUND} launch-bound: the host needs longer to launch it than the GPU to run it")
    if not table.has_layer:
        text.append(f" {_tflops(table.cell_rate(cell, recipe)):>6}")
    return text.append(_factor(table, recipe, cell.ms[table.baseline], figure))


def _total(
    grid: Table,
    table: GemmTable,
    name: str,
    of: Callable[[str], Figure],
    recipes: Sequence[str],
    notes: Notes,
) -> None:
    texts = []
    for recipe in recipes:
        figure = of(recipe)
        text = notes.cell(figure, words.bare)
        texts.append(text.append(_factor(table, recipe, of(table.baseline), figure)) if figure.known else text)
    grid.add_row(Text(name), Text(), *texts, style="bold")


def _factor(table: GemmTable, recipe: str, base: Figure, figure: Figure) -> str:
    """The speedup over the baseline, padded so that a column lines up; empty without one."""
    factor = speedup(base, figure)
    if recipe == table.baseline or factor.value is None:
        return ""
    # A CPU without BF16 units can be hundreds of times slower in it: that is not 0.00x.
    return f" {words.fixed(factor.value, 2 if factor.value >= 0.095 else 3):>5}x"


def _rates(grid: Table, table: GemmTable, recipes: Sequence[str], notes: Notes) -> None:
    """Of the GEMMs alone: with quantization, work is in the time that is not in the operations."""
    if table.mode != "kernel":
        return
    found = [table.layer_rate(recipe) for recipe in recipes]
    if not any(figure.known for figure in found):
        return
    grid.add_row(Text("TFLOP/s"), Text(), *(notes.cell(figure, _tflops) for figure in found))
    if not any(peak.tflops for peak in table.peaks.values()):
        return
    shares: list[Text] = []
    for recipe, figure in zip(recipes, found, strict=True):
        peak = table.peaks.get(recipe)
        if figure.value is None or peak is None or peak.tflops is None:
            why = figure.reason or (peak.reason if peak else None) or "its dense peak is not known"
            shares.append(notes.cell(Figure.missing("1", why)))
        else:
            shares.append(Text(words.percent(share_of_peak(figure.value, peak) or 0.0)))
    grid.add_row(Text("of the dense peak"), Text(), *shares)


def _tflops(figure: Figure) -> str:
    """A rate of any size: a CPU's is a thousandth of a GPU's."""
    if figure.value is None:
        return words.number(figure)
    return words.fixed(figure.value, 0) if figure.value >= 100 else words.significant(figure.value, 3)


# --- Sentences -------------------------------------------------------------------------------------------


def _pairs(table: GemmTable) -> Iterable[str]:
    """The layer in recipe against recipe, the baseline left out: that stands in the table."""
    others = [recipe for recipe in table.recipes if recipe != table.baseline]
    told = [
        f"{narrow} against {wide} {words.times(factor)}"
        for index, narrow in enumerate(others)
        for wide in others[:index]
        if (factor := table.against(narrow, wide)).known
    ]
    if told:
        yield f"layer: {', '.join(told)}"


def break_even(found: BreakEven) -> str:
    """`break-even: attention out gains 1.03x from fp8_current: keep it in bf16`."""
    if len(found.gains) == 1:
        ((name, gain),) = found.gains.items()
        return f"break-even: {name} gains {words.times(gain)} from {found.recipe}: keep it in {found.keep}"
    each = words.listed([f"{name} {words.times(gain)}" for name, gain in found.gains.items()])
    return f"break-even: {found.recipe} gains too little over {found.keep} for {each}: keep these in {found.keep}"


def sampled(run: GemmRun) -> str:
    """How the run was sampled, in a sentence."""
    cache = "cold L2 (overwritten before each call)" if run.cold_l2 else "hot L2 (as the call before left it)"
    took = f"{words.fixed(run.seconds, 1)} s"
    if run.method == "te-tutorial":
        return f"one pair of events around {run.iterations} calls, so no interval; {took}; {cache}"
    why = {
        "precise": f"every layer's median is known to {_share(run.precision)}",
        "budget": f"the budget of {run.budget_s or 0:g} s was spent",
        "rounds": "all rounds were done",
        "failed": "no shape ran",
    }.get(run.stopped, run.stopped)
    left = "; too few samples for an interval" if run.widest is None else f"; widest interval left {_share(run.widest)}"
    left = "" if run.stopped in ("precise", "failed") else left
    window = f"; weights quantized once in {run.accumulate} micro-batches" if run.accumulate > 1 else ""
    rounds = "1 round" if run.rounds == 1 else f"{run.rounds} shuffled rounds"
    return f"{rounds} in {took}, stopped because {why}{left}; {cache}{window}"


def _share(half_width: float | None) -> str:
    return "what was asked" if half_width is None else f"±{words.percent(half_width)}"
