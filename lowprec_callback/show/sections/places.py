"""The ledger by place: which module, in which role or phase, has the GPU's time under each recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.recording import ROLES
from lowprec_callback.report import Figure, Ledger, RecipeReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

SHOWN = 10
"""Places that the console shows one by one."""

NAME = 26
"""Columns of a module's path where the recipes would not stand side by side otherwise."""

NO_MODULE = "(no module)"
NONE_SEEN = "-"

Key = tuple[str, str, str]
"""Operation, role or phase, bucket."""


def places(report: Report, width: int) -> list[RenderableType]:
    """The most expensive places x recipes in ms a step, and the others in one line: the column's sum is `busy`."""
    return _section(report, width, SHOWN)


def all_places(report: Report) -> list[RenderableType]:
    """The whole table, without a heading. Its numbers have one origin, that of their sum, which alone tells it."""
    return _section(report, 10_000, None)[1:]


def count(report: Report) -> int:
    """How many places there are."""
    return len(_keys(_kept(report)))


def _section(report: Report, width: int, most: int | None) -> list[RenderableType]:
    kept = _kept(report)
    keys = _keys(kept)
    if not any(operation for operation, _, _ in keys):
        return []  # Where no module is known, this says no more than the ledger.
    notes = Notes()
    tables: list[list[RenderableType]] = []
    longest = width if parts.fits(_table(kept, keys, most, Notes(), width), width) else NAME
    for group in parts.side_by_side(kept, lambda group: _table(group, keys, most, Notes(), longest), width):
        tables.append([parts.indented(_table(group, keys, most, notes, longest))])
    return [parts.heading("Busy time by module, ms"), *parts.stacked(*tables), *notes.lines()]


def _kept(report: Report) -> list[RecipeReport]:
    return [part for part in report.recipes if part.refusal is None and part.ledger is not None and part.ledger.places]


def _keys(recipes: Sequence[RecipeReport]) -> list[Key]:
    """All places of all recipes, by the most time that one of them has there."""
    most: dict[Key, float] = {}
    for recipe in recipes:
        for key, figure in _times(recipe.ledger).items():
            most[key] = max(most.get(key, 0.0), figure.value or 0.0)
    return sorted(most, key=lambda key: (-round(most[key], 6), key))


def _times(ledger: Ledger | None) -> dict[Key, Figure]:
    return {(place.operation, place.where, place.bucket): place.ms for place in ledger.places} if ledger else {}


def _table(recipes: Sequence[RecipeReport], keys: Sequence[Key], most: int | None, notes: Notes, longest: int) -> Table:
    table = parts.table("", "", *(recipe.name for recipe in recipes), left=2)
    shown = keys if most is None or len(keys) <= most + 1 else keys[:most]
    rest = keys[len(shown) :]
    times = [_times(recipe.ledger) for recipe in recipes]
    steps = [recipe.ledger.wall for recipe in recipes if recipe.ledger is not None]

    def cells(of: Sequence[Figure | None], style: str = "") -> list[Text]:
        return [_cell(figure, step, notes, style) for figure, step in zip(of, steps, strict=True)]

    for key in shown:
        operation, where, bucket = key
        told = cells([found.get(key) for found in times])
        if most is None:
            told = [Text(cell.plain, cell.style) for cell in told]
        table.add_row(Text(_broken(operation, longest) or NO_MODULE), Text(_work(where, bucket)), *told)
    if rest:
        sums = [Figure.total([found[key] for key in rest if key in found], "ms") for found in times]
        table.add_row(Text(f"{len(rest)} other places", style=parts.DIM), Text(), *cells(sums))
    busy = [recipe.ledger.busy for recipe in recipes if recipe.ledger is not None]
    table.add_row(Text("busy", style="bold"), Text(), *cells(busy, "bold"))
    return table


def _broken(operation: str, longest: int) -> str:
    """A module's path on as many lines as it needs, broken behind its dots."""
    lines = [""]
    for piece in re.findall(r"[^.]*\.|[^.]+", operation):
        if lines[-1].strip() and len(lines[-1] + piece) > longest:
            lines.append(" ")
        lines[-1] += piece
    return "\n".join(lines)


def _work(where: str, bucket: str) -> str:
    """`fprop`, `backward quantize`, `optimizer`: a role is always a GEMM's, and nothing is said twice."""
    if (bucket == "gemm" and where in ROLES) or where == bucket:
        return where
    return f"{where} {bucket}".strip()


def _cell(figure: Figure | None, step: Figure, notes: Notes, style: str) -> Text:
    if figure is None:
        return Text(NONE_SEEN, style=parts.DIM)
    cell = notes.cell(figure, lambda known: words.bare(known, words.places_in(step)))
    cell.stylize(style)
    return cell
