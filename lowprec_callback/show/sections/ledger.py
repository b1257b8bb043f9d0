"""The ledger: one step's wall time of each recipe, by kind of GPU work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import BUCKETS, IDLE_CAUSES, Figure, Ledger, RecipeReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

NONE_SEEN = "-"
"""No kernel of this bucket was seen. A time too short for the digits shown is `0.0` instead."""

CAUSES_TOLD = "Causes of idle: those of the traced steps, less what tracing adds."

IDLE_TOLD = 0.01
"""Share of the step from which idle time is worth a remark on what its split leaves open."""

_SUMS: tuple[tuple[str, Callable[[Ledger], Figure]], ...] = (
    ("busy", lambda ledger: ledger.busy),
    ("idle", lambda ledger: ledger.idle),
    ("residual", lambda ledger: ledger.residual),
    ("step", lambda ledger: ledger.wall),
)


def ledgers(report: Report, width: int) -> list[RenderableType]:
    """Buckets x recipes in ms a step. Below: incomplete ledgers with their complaints, and missing ones."""
    ran = [recipe for recipe in report.recipes if recipe.refusal is None]
    kept = [recipe for recipe in ran if recipe.ledger is not None]
    remarks = [pair for recipe in ran for pair in _remarks(recipe)]
    if not kept and not remarks:
        return []
    notes = Notes()
    tables: list[list[RenderableType]] = []
    for group in parts.side_by_side(kept, lambda group: _table(group, _rows(kept), Notes()), width):
        tables.append([parts.indented(_table(group, _rows(kept), notes))])
    return [
        parts.heading("One step's time, ms"),
        *parts.stacked(*tables),
        *notes.lines(),
        *_absent(kept),
        *_hidden(kept),
        *parts.entries(remarks),
    ]


def _rows(recipes: Sequence[RecipeReport]) -> list[str]:
    """The buckets that hold something in at least one recipe, in the order of the design."""
    return [bucket for bucket in _buckets(recipes) if any(_holds(recipe, bucket) for recipe in recipes)]


def _buckets(recipes: Sequence[RecipeReport]) -> list[str]:
    """The known buckets, then any that a newer analysis added."""
    present = dict.fromkeys(name for recipe in recipes if recipe.ledger for name in recipe.ledger.buckets)
    return [*BUCKETS, *(name for name in present if name not in BUCKETS)]


def _holds(recipe: RecipeReport, bucket: str) -> bool:
    """Whether the bucket has time in it, or should have: a missing Figure keeps its row and its reason."""
    figure = recipe.ledger.buckets.get(bucket) if recipe.ledger else None
    return figure is not None and (figure.value is None or figure.value != 0)


def _absent(recipes: Sequence[RecipeReport]) -> list[RenderableType]:
    absent = [bucket for bucket in BUCKETS if bucket not in _rows(recipes)]
    if not recipes or not absent:
        return []
    return [parts.paragraph(f"No work seen in: {', '.join(absent)}.", style=parts.DIM)]


def _hidden(recipes: Sequence[RecipeReport]) -> list[RenderableType]:
    found = [(r.name, r.ledger.hidden_communication) for r in recipes if r.ledger and r.ledger.hidden_communication]
    if not found:
        return []
    told = ", ".join(f"{name} {words.bare(figure)}" for name, figure in found)
    text = f"Communication hidden under computation, no part of the sum, ms: {told}."
    return [parts.paragraph(parts.Number(text, *(figure for _, figure in found), style=parts.DIM))]


def _table(recipes: Sequence[RecipeReport], rows: Sequence[str], notes: Notes) -> Table:
    table = parts.table("", *(recipe.name for recipe in recipes))
    kept = [recipe.ledger for recipe in recipes if recipe.ledger is not None]
    for bucket in rows:
        table.add_row(
            Text(bucket),
            *(_cell(ledger, ledger.buckets.get(bucket), notes, seen_only=True) for ledger in kept),
        )
    for name, pick in _SUMS:
        style = "bold" if name == "step" else ""
        table.add_row(Text(name, style=style), *(_cell(ledger, pick(ledger), notes, style) for ledger in kept))
        if name == "idle":
            for cause in _causes(kept):
                cells = (_cell(ledger, ledger.idle_parts.get(cause), notes, seen_only=True) for ledger in kept)
                table.add_row(Text(f"  {cause}"), *cells)
                notes.explain(CAUSES_TOLD)
    if not all(ledger.complete for ledger in kept):
        states = (Text("" if each.complete else "incomplete", style=parts.WARN) for each in kept)
        table.add_row(Text(""), *states)
    return table


def _causes(ledgers: Sequence[Ledger]) -> list[str]:
    """The causes of idle time that show in at least one of the ledgers."""
    return [cause for cause in IDLE_CAUSES if any(_shows(ledger, cause) for ledger in ledgers)]


def _shows(ledger: Ledger, cause: str) -> bool:
    part = ledger.idle_parts.get(cause)
    return (
        part is not None and bool(part.value) and float(words.fixed(part.value or 0, words.places_in(ledger.wall))) > 0
    )


def _cell(ledger: Ledger, figure: Figure | None, notes: Notes, style: str = "", seen_only: bool = False) -> Text:
    if figure is None or (seen_only and figure.value == 0):
        return Text(NONE_SEEN, style=parts.DIM)
    cell = notes.cell(figure, lambda known: words.bare(known, words.places_in(ledger.wall)))
    cell.stylize(style)
    return cell


def _remarks(recipe: RecipeReport) -> list[tuple[str, str | Text]]:
    ledger = recipe.ledger
    if ledger is None:
        if recipe.no_ledger is None and not recipe.step_ms.known:
            return []  # The table of recipes has said why.
        reason = words.one_line(recipe.no_ledger or "no reason was given")
        return [(recipe.name, Text(f"no ledger: {reason}", style=parts.WARN))]
    out: list[tuple[str, str | Text]] = []
    if not ledger.complete:
        complaints = "; ".join(words.one_line(text) for text in ledger.complaints) or "no reason was given"
        out.append((recipe.name, Text(f"incomplete: {complaints}", style=parts.WARN)))
    else:
        out.extend((recipe.name, words.one_line(text)) for text in ledger.complaints)
    if ledger.note:
        out.append((recipe.name, words.one_line(ledger.note)))
    if ledger.idle_note and not ledger.note and (ledger.idle.value or 0.0) > IDLE_TOLD * (ledger.wall.value or 0.0):
        out.append((recipe.name, words.one_line(f"idle: {ledger.idle_note}")))
    if ledger.unknown_kernels:
        out.append((recipe.name, f"largest in other: {_kernels(ledger.unknown_kernels)}"))
    return out


def _kernels(names: Sequence[str], most: int = 3) -> str:
    """The first few names whole, since half a kernel's name identifies nothing."""
    shown = ", ".join(words.one_line(name) for name in names[:most])
    rest = len(names) - most
    return shown if rest <= 0 else f"{shown}; {words.left_out(rest, 'name', 'report.json')}"
