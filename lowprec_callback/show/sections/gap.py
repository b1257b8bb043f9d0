"""The gap: from one recipe's step to another's, a term a line, with its share of the first and a bar of its size."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.analyze.gap import between, pairs
from lowprec_callback.report import Figure, Gap, GapTerm, RecipeReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Number

LONGEST_BAR, NARROWEST_NAME = 32, 24


OFTEN_ASKED = (("mxfp8", "nvfp4"),)
"""Pairs beside those with the baseline that the page shows by itself."""


def gaps(report: Report, width: int) -> list[RenderableType]:
    """One block a recipe that has a gap; then the pairs that people ask for, where both recipes ran."""
    found = [recipe.gap for recipe in report.recipes if recipe.gap is not None and not recipe.baseline]
    asked = [between(*pair) for pair in pairs(report) if _asked(pair)]
    blocks = [one_gap(gap, width) for gap in found], [one_gap(gap, width, named=True) for gap in asked]
    return parts.stacked(*blocks[0], *blocks[1])


def other_gaps(report: Report) -> list[Gap]:
    """The gaps of all pairs of recipes that `gaps` does not show."""
    return [between(*pair) for pair in pairs(report) if not pair[0].baseline and not _asked(pair)]


def _asked(pair: tuple[RecipeReport, RecipeReport]) -> bool:
    return (pair[0].name, pair[1].name) in OFTEN_ASKED and not pair[0].baseline


def one_gap(gap: Gap, width: int, named: bool = False) -> list[RenderableType]:
    """One gap as a block of its own; `named`: the title names the recipe that it begins with as well."""
    title = parts.heading(words.became(gap, named))
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
    """Name, signed ms, its share of the first step, and the bar with the note right behind it."""
    places = words.places_in(gap.start)
    largest = max((abs(term.ms.value) for term in gap.terms if term.ms.value is not None), default=0.0)
    bars = min(LONGEST_BAR, max(8, width // 5))

    grid = Table(box=None, pad_edge=False, padding=(0, parts.GAP, 0, 0), header_style="dim", show_edge=False)
    grid.add_column("", overflow="fold", max_width=max(NARROWEST_NAME, width * 3 // 10))
    grid.add_column(Text("ms"), justify="right", overflow="fold")
    grid.add_column(Text(f"of {gap.baseline}"), justify="right", overflow="fold")
    grid.add_column("", overflow="fold")
    for term in gap.terms:
        share = Text(_share(term.ms, gap.start), style=parts.DIM)
        grid.add_row(Text(term.name), _number(term.ms, places), share, _bar_and_note(term, largest, bars))
    difference = gap.end.minus(gap.start)
    if difference.known:
        number = _number(difference, places)
        number.stylize("bold")
        share = Text(_share(difference, gap.start), style="bold")
        grid.add_row(Text("measured difference", style="bold"), number, share, Text())
    return grid


def _share(part: Figure, whole: Figure) -> str:
    """`-38.7%`: a term as a share of the step that the gap begins with."""
    return words.signed_percent(part.value / whole.value) if part.value is not None and whole.value else ""


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
