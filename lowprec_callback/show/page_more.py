"""What the HTML page holds beyond the console's: the whole of each table that the console shortens, folded away."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from lowprec_callback.recording import ROLES
from lowprec_callback.report import MEMORY_TERMS, MemoryMoment, RecipeReport, Report, VerdictRow
from lowprec_callback.show import gemm_sums, words
from lowprec_callback.show.sections import (
    foot,
    gap,
    gemms,
    ledger,
    memory,
    memory_ledger,
    parts,
    places,
    recipes,
    verdict,
)
from lowprec_callback.show.sections.parts import Notes


class More(NamedTuple):
    """What stands on the fold, and what is in it."""

    summary: str
    inside: list[RenderableType]


def _ran(report: Report) -> list[RecipeReport]:
    return [recipe for recipe in report.recipes if recipe.refusal is None]


def samples(report: Report) -> list[More]:
    """Every timed step, a row a round."""
    kept = [recipe for recipe in _ran(report) if recipe.samples]
    if not kept:
        return []
    table = parts.table("recipe", "round", "ms of each timed step", left=2)
    table.columns[-1].justify = "left"
    for recipe in kept:
        for number, times in recipe.samples:
            table.add_row(Text(recipe.name), Text(str(number)), Text("  ".join(f"{ms:.6g}" for ms in times)))
    count = sum(len(times) for recipe in kept for _, times in recipe.samples)
    return [More(f"All {count} timed steps", [table])]


def kernels(report: Report) -> list[More]:
    """Every kernel name in the bucket `other`."""
    return [
        More(
            f"All kernel names in other: {recipe.name} ({len(recipe.ledger.unknown_kernels)})",
            [parts.paragraph(words.one_line(name)) for name in recipe.ledger.unknown_kernels],
        )
        for recipe in _ran(report)
        if recipe.ledger is not None and recipe.ledger.unknown_kernels
    ]


def place_rows(report: Report) -> list[More]:
    """Every place of the ledger."""
    inside = places.all_places(report)
    title = f"Busy time by module, role and kind of work: all {places.count(report)} places"
    return [More(title, inside)] if inside else []


def verdict_rows(report: Report) -> list[More]:
    """Asked against ran for every module and role, also where everything is confirmed."""
    return [More(_verdict_title(recipe), _verdict(recipe)) for recipe in _ran(report) if recipe.verdict is not None]


def _verdict_title(recipe: RecipeReport) -> str:
    assert recipe.verdict is not None
    count = len(recipe.verdict.rows)
    return f"Asked against ran, module by module: {recipe.name} ({count} row{'' if count == 1 else 's'})"


def _verdict(recipe: RecipeReport) -> list[RenderableType]:
    made = recipe.verdict
    assert made is not None
    lines: list[RenderableType] = [parts.paragraph(words.one_line(made.summary))]
    lines += [parts.paragraph(words.one_line(text)) for text in made.beside]
    if made.rows:
        table = parts.table(
            "module", "role", "M x K x N", "calls", "asked", "ran", "verdict", "share", "witnesses", "why"
        )
        for column, name in zip(table.columns, _LEFT, strict=True):
            column.justify = "left" if name else "right"
        for row in made.rows:
            table.add_row(*map(Text, _row(row)))
        lines.append(table)
    return lines


_LEFT = (True, True, True, False, True, True, True, False, True, True)


def _row(row: VerdictRow) -> tuple[str, ...]:
    seen = ", ".join(f"{name}: {words.one_line(saw)}" for name, saw in row.witnesses.items())
    return (
        row.module,
        row.role,
        f"{row.m}x{row.k}x{row.n}",
        str(row.calls),
        row.asked,
        row.ran,
        row.verdict,
        words.percent(row.share),
        seen,
        words.one_line(row.why),
    )


def memory_moments(report: Report) -> list[More]:
    """The memory ledger at the end of every phase, and at the peak."""
    found = []
    for recipe in _ran(report):
        moments = recipe.memory.moments if recipe.memory is not None else ()
        counted = [moment for moment in moments if moment.reserved.known]
        if not counted:
            continue
        notes = Notes()
        unit = memory_ledger.unit_of([moment.reserved for moment in counted])
        table = parts.table("", *(_moment_title(moment) for moment in counted))
        for name in MEMORY_TERMS:
            figures = [moment.terms.get(name) for moment in counted]
            if any(figure is not None and figure.value != 0 for figure in figures):
                table.add_row(Text(name), *(memory_ledger.cell_or_dash(figure, notes, unit) for figure in figures))
            if name == memory_ledger.ACTIVATIONS:
                for part, cells in memory_ledger.activations(counted, notes, unit):
                    table.add_row(Text(f"  {part}"), *cells)
        table.add_row(
            Text(f"  {memory_ledger.FRAGMENTED}"),
            *(memory_ledger.cell_or_dash(m.fragmented if m.fragmented.known else None, notes, unit) for m in counted),
        )
        table.add_row(Text(memory_ledger.SUM), *(memory_ledger.cell_or_dash(m.reserved, notes, unit) for m in counted))
        found.append(More(f"Memory at every phase, {unit}: {recipe.name}", [table, *notes.lines()]))
    return found


def _moment_title(moment: MemoryMoment) -> str:
    return f"at the peak ({moment.where})" if moment.name == "peak" else moment.where


def scale_rows(report: Report) -> list[More]:
    """Scale and amax of every module that was recorded."""
    found = []
    for recipe in _ran(report):
        if recipe.scales:
            table = parts.table("module", "tensor", "scale", "newest amax", "largest amax", "history", left=2)
            for row in recipe.scales:
                table.add_row(Text(row.module), *foot.scale_cells(row))
            found.append(More(f"All recorded scales: {recipe.name} ({len(recipe.scales)} tensors)", [table]))
    return found


def gemm_rows(report: Report) -> list[More]:
    """One call of every operation in every role, under each recipe."""
    found = []
    for recipe in _ran(report):
        if not recipe.gemms:
            continue
        notes = Notes()
        table = parts.table("operation", "role", "M x K x N", "calls", "GEMM only", "with quantization", left=3)
        for operation in gemm_sums.operations(report):
            for row in sorted(gemm_sums.of_operation(recipe, operation), key=lambda row: ROLES.index(row.role)):
                kernel = notes.cell(row.kernel_ms)
                if row.launch_bound:
                    kernel.append(gemms.LAUNCH_BOUND)
                    notes.explain(gemms.EXPLAIN_LAUNCH_BOUND)
                table.add_row(
                    Text(row.operation),
                    Text(row.role),
                    Text(operation.shape),
                    Text(str(row.calls)),
                    kernel,
                    notes.cell(row.autocast_ms),
                )
        found.append(More(f"ms of one call, role by role: {recipe.name}", [table, *notes.lines()]))
    return found


def pair_gaps(report: Report) -> list[More]:
    """The gap between every two recipes that stands nowhere else."""
    return [
        More(f"From {found.baseline} to {found.recipe}", gap.one_gap(found, WIDE, named=True))
        for found in gap.other_gaps(report)
    ]


WIDE = 10_000
"""Columns: nothing wraps before the browser decides."""

MORE: dict[Callable[[Report, int], list[RenderableType]], Callable[[Report], list[More]]] = {
    recipes.signs: samples,
    gap.gaps: pair_gaps,
    ledger.ledgers: kernels,
    places.places: place_rows,
    verdict.verdicts: verdict_rows,
    memory.memory: memory_moments,
    foot.scales: scale_rows,
    gemms.benchmark: gemm_rows,
}
"""A section of the page, and what is folded away below it."""
