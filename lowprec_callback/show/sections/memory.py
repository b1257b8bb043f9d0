"""What each recipe holds in memory, by formula and as measured, and what the memory witness says of it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import Figure, MemoryReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import memory_ledger, parts
from lowprec_callback.show.sections.parts import Notes

_Told = tuple[str, MemoryReport]
"""A recipe's name and its part."""

PHASES = {
    "parameters": "para-\nmeters",
    "start": "at the\nstart",
    "forward": "after\nforward",
    "backward": "after\nbackward",
}
PHASES |= {"optimizer": "after\noptimizer", "peak": "\npeak"}

_STYLES = {"agrees": parts.GOOD, "contradicts": parts.BAD, "silent": parts.DIM}


def memory(report: Report, width: int) -> list[RenderableType]:
    """What holds the peak, the phases of a step, what should be held beside what is, a sentence a recipe."""
    return [*parts.stacked(memory_ledger.ledger(report, width), _witness(report))]


def _witness(report: Report) -> list[RenderableType]:
    """The phases of a step, what should be held beside what is, a sentence a recipe; or why there is none."""
    told = [(recipe.name, recipe.memory) for recipe in report.recipes if recipe.memory is not None]
    if not told:
        return []
    counted = [(name, figure) for _, part in told for name, figure in part.phases.items() if figure.known]
    # The size of the model alone is no measurement of a recipe.
    phases = [figure for _, figure in counted] if any(name != "parameters" for name, _ in counted) else []
    terms = [figure for _, part in told for term in part.terms for figure in (term.expected, term.measured)]
    if not phases and not any(figure.known for figure in terms):
        reasons = dict.fromkeys(words.one_line(part.why) for _, part in told)
        return [parts.heading("Memory"), parts.paragraph(f"The memory witness is silent: {'; '.join(reasons)}.")]
    notes = Notes()
    lines: list[RenderableType] = []
    if phases:
        lines += [
            parts.heading(f"Memory of one step, {memory_ledger.unit_of(phases)}"),
            parts.indented(_phases(told, notes, phases)),
        ]
    if any(figure.known for figure in terms):
        title = f"What linear layers hold from forward to backward, {memory_ledger.unit_of(terms)}"
        lines += [
            *([Text()] if lines else []),
            parts.heading(title),
            parts.indented(_terms(told, report.baseline, notes, terms)),
        ]
    sentences = parts.entries([(name, _sentence(part)) for name, part in told])
    explained = [parts.paragraph(words.one_line(part.note)) for _, part in told if part.note]
    return [*lines, *notes.lines(), *sentences, *explained]


def _sentence(part: MemoryReport) -> Text:
    text = Text(part.state, style=_STYLES.get(part.state, ""))
    return text.append(f": {words.one_line(part.why)}", style="not dim")


def _phases(told: Sequence[_Told], notes: Notes, among: Sequence[Figure]) -> Table:
    """Live bytes of the watched step, from a clean state."""
    unit = memory_ledger.unit_of(among)
    table = parts.table("\nrecipe", *PHASES.values())
    for name, part in told:
        missing = Figure.missing("GB", "this phase was not recorded")
        table.add_row(
            Text(name), *(memory_ledger.cell(part.phases.get(phase, missing), notes, unit) for phase in PHASES)
        )
    return table


def _terms(told: Sequence[_Told], baseline: str, notes: Notes, among: Sequence[Figure]) -> Table:
    """Expected and measured side by side, for each term that a recipe has."""
    unit = memory_ledger.unit_of(among)
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
                row += [
                    memory_ledger.cell(term.expected, notes, unit, against),
                    memory_ledger.cell(term.measured, notes, unit, against),
                ]
        table.add_row(Text(recipe), *row)
    return table


def _short(name: str) -> str:
    """A term's name in two lines above its column."""
    first, _, rest = name.partition(", " if ", " in name else " ")
    return f"{first}\n{rest}"
