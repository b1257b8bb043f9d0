"""The gap: from the baseline's step to the recipe's, a term a line, with a bar of its size."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import Figure, Gap, GapTerm, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Number

LONGEST_BAR, NARROWEST_NAME = 32, 24


def gaps(report: Report, width: int) -> list[RenderableType]:
    """One block a recipe that has a gap."""
    found = [recipe.gap for recipe in report.recipes if recipe.gap is not None and not recipe.baseline]
    return parts.stacked(*(_gap(gap, width) for gap in found))


def _gap(gap: Gap, width: int) -> list[RenderableType]:
    title = parts.heading(words.became(gap))
    if gap.missing is not None or not gap.terms:
        reason = words.one_line(gap.missing or "no reason was given")
        return [title, parts.paragraph(f"No terms: {reason}", style=parts.WARN)]
    lines: list[RenderableType] = [title]
    for figure, what in ((gap.start, gap.baseline), (gap.end, gap.recipe)):
        if not figure.known:
            reason = words.why_missing(figure)
            lines.append(parts.paragraph(f"Step of {what} not known: {reason}", style=parts.WARN))
    lines.append(parts.indented(_terms(gap, width)))
    if any(term.ms.known and term.ms.origin == "estimated" for term in gap.terms):
        lines.append(parts.paragraph(f"{words.ESTIMATED} an estimate", style=parts.DIM))
    return lines


def _terms(gap: Gap, width: int) -> Table:
    """Name, signed ms, and the bar with the note right behind it."""
    places = words.places_in(gap.start)
    largest = max((abs(term.ms.value) for term in gap.terms if term.ms.value is not None), default=0.0)
    bars = min(LONGEST_BAR, max(8, width // 4))

    grid = Table.grid(padding=(0, parts.GAP, 0, 0), pad_edge=False)
    grid.add_column(overflow="fold", max_width=max(NARROWEST_NAME, width * 3 // 10))
    grid.add_column(justify="right", overflow="fold")
    grid.add_column(overflow="fold")
    for term in gap.terms:
        grid.add_row(Text(term.name), _number(term.ms, places), _bar_and_note(term, largest, bars))
    difference = gap.end.minus(gap.start)
    if difference.known:
        number = _number(difference, places)
        number.stylize("bold")
        grid.add_row(Text("measured difference", style="bold"), number, Text())
    return grid


def _number(figure: Figure, places: int) -> Number:
    if figure.value is None:
        return Number("?", figure, style=parts.WARN)
    return Number(words.signed_ms(figure, places), figure)


def _bar_and_note(term: GapTerm, largest: float, bars: int) -> Text:
    note = words.one_line(term.note)
    if term.ms.value is None:
        reason = f"not known: {words.why_missing(term.ms)}" + (f" ({note})" if note else "")
        return Text(reason, style=parts.WARN)
    text = Text(parts.bar(term.ms.value, largest, bars), style=parts.GOOD if term.ms.value < 0 else parts.BAD)
    if note:
        text.append("  " if text else "").append(note, style=parts.DIM)
    return text
