"""What each recipe holds in memory, by formula and as measured, and what the memory witness says of it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import Figure, MemoryReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

_Told = tuple[str, MemoryReport]
"""A recipe's name and its part."""

PHASES = {"start": "at the\nstart", "forward": "after\nforward", "backward": "after\nbackward"}
PHASES |= {"optimizer": "after\noptimizer", "peak": "\npeak"}

_STYLES = {"agrees": parts.GOOD, "contradicts": parts.BAD, "silent": parts.DIM}


def memory(report: Report, _width: int) -> list[RenderableType]:
    """The phases of a step, what should be held beside what is, a sentence a recipe; or why there is nothing to tell."""
    told = [(recipe.name, recipe.memory) for recipe in report.recipes if recipe.memory is not None]
    if not told:
        return []
    figures = [figure for _, part in told for figure in _figures(part) if figure.value is not None]
    if not figures:
        reasons = dict.fromkeys(words.one_line(part.why) for _, part in told)
        return [parts.heading("Memory"), parts.paragraph(f"The memory witness is silent: {'; '.join(reasons)}.")]
    small = max(abs(figure.value or 0.0) for figure in figures) < 1.0
    notes = Notes()
    lines: list[RenderableType] = [parts.heading(f"Memory of one step, {'MB' if small else 'GB'}")]
    if any(figure.known for _, part in told for figure in part.phases.values()):
        lines.append(parts.indented(_phases(told, notes, small)))
    if any(part.terms for _, part in told):
        lines += [Text(), parts.indented(_terms(told, report.baseline, notes, small))]
    explained = [parts.paragraph(words.one_line(part.note)) for _, part in told if part.note]
    return [*lines, *notes.lines(), *parts.entries([(name, _sentence(part)) for name, part in told]), *explained]


def _figures(part: MemoryReport) -> list[Figure]:
    terms = [figure for term in part.terms for figure in (term.expected, term.measured)]
    return [*part.phases.values(), *terms]


def _sentence(part: MemoryReport) -> Text:
    text = Text(part.state, style=_STYLES.get(part.state, ""))
    return text.append(f": {words.one_line(part.why)}", style="not dim")


def _phases(told: Sequence[_Told], notes: Notes, small: bool) -> Table:
    """Live bytes of the watched step, from a clean state."""
    table = parts.table("\nrecipe", *PHASES.values())
    for name, part in told:
        missing = Figure.missing("GB", "it was not recorded")
        table.add_row(Text(name), *(_cell(part.phases.get(phase, missing), notes, small) for phase in PHASES))
    return table


def _terms(told: Sequence[_Told], baseline: str, notes: Notes, small: bool) -> Table:
    """Expected and measured side by side, for each term that a recipe has."""
    names = list(dict.fromkeys(term.name for _, part in told for term in part.terms))
    table = parts.table(
        "\n\nrecipe", *(f"{_short(name)}\n{what}" for name in names for what in ("expected", "measured"))
    )
    for recipe, part in told:
        terms = {term.name: term for term in part.terms}
        row: list[Text] = []
        for name in names:
            term, against = terms.get(name), "against" in name
            if term is None:
                row += [Text("" if recipe == baseline else notes.mark("no such part of it is known"))] * 2
            else:
                row += [_cell(term.expected, notes, small, against), _cell(term.measured, notes, small, against)]
        table.add_row(Text(recipe), *row)
    return table


def _short(name: str) -> str:
    """A term's name in two lines above its column."""
    first, _, rest = name.partition(", " if ", " in name else " ")
    return f"{first}\n{rest}"


def _cell(figure: Figure, notes: Notes, small: bool, signed: bool = False) -> Text:
    def write(known: Figure) -> str:
        scaled = known.scaled(1000.0, "MB") if small else known
        return words.number(scaled, signed=signed) if scaled.value else "0"

    return notes.cell(figure, write)
