"""What holds memory when it is fullest, by term and recipe; the terms add up to what was reserved."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import MEMORY_TERMS, Figure, MemoryMoment, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

SUM = "reserved"
ACTIVATIONS = "saved activations"

FRAGMENTED = "of it pieces of blocks in use"

PLACES = 2

INSTEAD = "backward"
"""Where nothing counts the peak (a CPU): all that can be named is there after backward."""

_Held = tuple[str, MemoryMoment]
"""A recipe's name and a moment of its watched step."""


def ledger(report: Report, width: int) -> list[RenderableType]:
    """Terms x recipes at the peak, and which moment that was; without counters, after backward, and what is unknown."""
    told = [(recipe.name, recipe.memory) for recipe in report.recipes if recipe.memory is not None]
    peaks = [(name, moment) for name, part in told if (moment := part.moment("peak"))]
    held = peaks or [(name, moment) for name, part in told if (moment := part.moment(INSTEAD))]
    if not held:
        return []
    unit = unit_of([figure for _, moment in held for figure in (*moment.terms.values(), moment.reserved)])
    notes = Notes()
    rows = _rows(held)
    tables: list[list[RenderableType]] = []
    for group in parts.side_by_side(held, lambda group: _table(group, rows, Notes(), unit), width):
        tables.append([parts.indented(_table(group, rows, notes, unit))])
    title = f"What holds memory at the peak, {unit}" if peaks else f"What holds memory after backward, {unit}"
    below = _moments(held) if peaks else _nothing_else(held)
    return [parts.heading(title), *parts.stacked(*tables), *notes.lines(), *below]


def unit_of(figures: Sequence[Figure]) -> str:
    """GB; MB or kB where no number has as much as one of the larger unit."""
    largest = max((abs(figure.value or 0.0) for figure in figures), default=0.0)
    return next((unit for unit, per in _PER_GB.items() if largest * per >= 1.0), "kB")


_PER_GB = {"GB": 1.0, "MB": 1e3, "kB": 1e6}


def cell(figure: Figure, notes: Notes, unit: str, signed: bool = False, places: int | None = None) -> Text:
    """Bytes in a table of this unit; with `places`, so many decimals in every row, so that they stand in line."""

    def write(known: Figure) -> str:
        scaled = known if unit == "GB" else known.scaled(_PER_GB[unit], unit)
        return words.number(scaled, places, signed) if scaled.value else "0"

    return notes.cell(figure, write)


def cell_or_dash(figure: Figure | None, notes: Notes, unit: str) -> Text:
    """A dash where this moment cannot have the term."""
    return Text("-", style=parts.DIM) if figure is None else cell(figure, notes, unit, places=PLACES)


def activations(moments: Sequence[MemoryMoment], notes: Notes, unit: str) -> list[tuple[str, list[Text]]]:
    """What the saved activations are made of: rows below theirs, which the sum holds already."""
    names = dict.fromkeys(name for moment in moments for name in moment.activations)
    return [(name, [cell_or_dash(moment.activations.get(name), notes, unit) for moment in moments]) for name in names]


def _rows(held: Sequence[_Held]) -> list[str]:
    """Terms that hold something in at least one recipe, or are missing where the sum is known."""
    counted = any(moment.reserved.known for _, moment in held)
    return [
        name
        for name in MEMORY_TERMS
        if any(
            figure.value or (counted and not figure.known)
            for _, moment in held
            if (figure := moment.terms.get(name)) is not None
        )
    ]


def _table(held: Sequence[_Held], rows: Sequence[str], notes: Notes, unit: str) -> Table:
    table = parts.table("", *(name for name, _ in held))
    moments = [moment for _, moment in held]
    for term in rows:
        table.add_row(Text(term), *(cell_or_dash(moment.terms.get(term), notes, unit) for moment in moments))
        if term == ACTIVATIONS:
            for name, cells in activations(moments, notes, unit):
                table.add_row(Text(f"  {name}"), *cells)
    if any(moment.reserved.known for _, moment in held):
        cells = [cell(moment.reserved, notes, unit, places=PLACES) for _, moment in held]
        for each in cells:
            each.stylize("bold")
        table.add_row(Text(SUM, style="bold"), *cells)
    return table


def _nothing_else(held: Sequence[_Held]) -> list[RenderableType]:
    """Without an allocator's counters: what cannot be told, and why."""
    reasons = dict.fromkeys(words.why_missing(moment.reserved) for _, moment in held if not moment.reserved.known)
    unknown = "saved activations, temporaries and what is reserved"
    return [parts.paragraph(f"Not known: {unknown} ({reason}).", style=parts.DIM) for reason in reasons]


def _moments(held: Sequence[_Held]) -> list[RenderableType]:
    """Where the peak was: one line if it was at the same place in all recipes."""
    places: dict[str, list[str]] = {}
    for name, moment in held:
        places.setdefault(moment.where, []).append(name)
    if len(places) == 1:
        return [parts.paragraph(f"The peak comes {next(iter(places))}.", style=parts.DIM)]
    each = "; ".join(f"{where} ({words.listed(names)})" for where, names in places.items())
    return [parts.paragraph(f"The peak comes {each}.", style=parts.DIM)]
