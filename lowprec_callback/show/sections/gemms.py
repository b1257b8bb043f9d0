"""The GEMM benchmark: what the linear layers of one step take alone, with and without quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.analyze.gemms import speedup
from lowprec_callback.recording import Mode
from lowprec_callback.report import Figure, RecipeReport, Report
from lowprec_callback.show import gemm_sums, words
from lowprec_callback.show.gemm_sums import Operation
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

MOST_OPERATIONS = 6
"""In each of the two modes: twelve rows in all."""

TITLES: tuple[tuple[Mode, str], ...] = (("kernel", "GEMM only"), ("autocast", "with quantization"))
LAUNCH_BOUND = "*"
EXPLAIN_LAUNCH_BOUND = f"{LAUNCH_BOUND} launch-bound: the host needs longer to launch it than the GPU to run it"

Shapes = Literal["column", "beside", "below"]
"""Where M x K x N stands: in a column of its own, beside the operation's name, or below it, once."""


@dataclass(frozen=True)
class _Layout:
    """What the table shows, and how; the page's width decides."""

    report: Report
    shown: Sequence[Operation]
    shapes: Shapes

    def table(self, recipes: Sequence[RecipeReport], notes: Notes) -> Table:
        """Two blocks of rows, a mode each; every block ends with the sum over all operations."""
        names = {
            "column": ("operation", "M x K x N"),
            "beside": ("operation, M x K x N",),
            "below": ("operation",),
        }[self.shapes]
        table = parts.table(*names, *(recipe.name for recipe in recipes), left=len(names))
        blank = [Text()] * (len(names) - 1)
        for mode, title in TITLES:
            table.add_row(Text(title, style="italic"))
            for operation in self.shown:
                cells = [_cell(self.report, recipe, operation, mode, notes) for recipe in recipes]
                table.add_row(*self._names(operation, mode), *cells)
            sums = [_sum(recipe, mode, notes) for recipe in recipes]
            table.add_row(Text(" all operations", style="bold"), *blank, *sums)
        return table

    def _names(self, operation: Operation, mode: Mode) -> list[Text]:
        name = Text(f" {operation.name}")
        if self.shapes == "column":
            return [name, Text(operation.shape)]
        if self.shapes == "beside":
            return [name.append(f" {operation.shape}")]
        return [name.append(f"\n  {operation.shape}" if mode == TITLES[0][0] else "")]


def benchmark(report: Report, width: int) -> list[RenderableType]:
    """A row an operation: ms a step over all roles, and the speedup, for each recipe."""
    ran = [recipe for recipe in report.recipes if recipe.gemms]
    if not ran:
        return []
    operations = gemm_sums.operations(report)
    rest = len(operations) - MOST_OPERATIONS
    left_out = words.left_out(rest, "operation", "report.json, and in the sums here") if rest > 0 else ""
    layout = _layout(report, ran, operations[:MOST_OPERATIONS], width)
    notes = Notes()
    groups = parts.side_by_side(ran, lambda group: layout.table(group, Notes()), width)
    tables = [[parts.indented(layout.table(group, notes))] for group in groups]
    sentence = f"fprop + dgrad + wgrad of one step, ms, and the speedup over {report.baseline}. {left_out}"
    return [
        parts.heading("GEMM benchmark at the model's own shapes"),
        parts.paragraph(sentence.rstrip(), style=parts.DIM),
        *parts.stacked(*tables),
        *notes.lines(),
    ]


def _layout(report: Report, recipes: Sequence[RecipeReport], shown: Sequence[Operation], width: int) -> _Layout:
    """The roomiest layout that shows all recipes side by side; the tightest where none does."""
    choices: tuple[Shapes, ...] = ("column", "beside", "below")
    layouts = [_Layout(report, shown, shapes) for shapes in choices]
    for layout in layouts:
        if parts.fits(layout.table(recipes, Notes()), width):
            return layout
    return layouts[-1]


def _cell(report: Report, recipe: RecipeReport, operation: Operation, mode: Mode, notes: Notes) -> Text:
    base = next((each for each in report.recipes if each.name == report.baseline), None)
    rows = gemm_sums.of_operation(recipe, operation)
    figure = gemm_sums.per_step(rows, mode)
    text = notes.cell(figure, lambda known: words.bare(known, _places(recipe)))
    if figure.value is None:
        return text
    if any(row.launch_bound for row in rows):
        text.append(LAUNCH_BOUND)
        notes.explain(EXPLAIN_LAUNCH_BOUND)
    if base is not None and not recipe.baseline:
        reference = gemm_sums.per_step(gemm_sums.of_operation(base, operation), mode)
        text.append(_ratio(reference, figure))
        text.figures += (speedup(reference, figure),)
    return text


def _places(recipe: RecipeReport) -> int:
    """Decimals of a recipe's column, after its sum with quantization, or without where there is none."""
    return words.places_in(recipe.gemm_autocast_ms if recipe.gemm_autocast_ms.known else recipe.gemm_kernel_ms)


def _ratio(baseline: Figure, recipe: Figure) -> str:
    """The speedup of one operation, padded so that a column lines up; empty without a baseline."""
    if not baseline.value or not recipe.value:
        return ""
    return f" {baseline.value / recipe.value:5.2f}x"


def _sum(recipe: RecipeReport, mode: Mode, notes: Notes) -> Text:
    figure = recipe.gemm_kernel_ms if mode == "kernel" else recipe.gemm_autocast_ms
    text = notes.cell(figure, lambda known: words.bare(known, _places(recipe)))
    if recipe.speedups is not None and not recipe.baseline and figure.known:
        factor = recipe.speedups.kernel if mode == "kernel" else recipe.speedups.autocast
        if factor.value is not None:
            text.append(f" {words.fixed(factor.value, 2):>5}x")
            text.figures += (factor,)
    text.stylize("bold")
    return text
