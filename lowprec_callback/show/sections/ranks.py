"""What the processes that train together measured, each for itself: median, worst rank and spread."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from lowprec_callback.report import Figure, RankRow, RanksReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Number

UNITS = {"SM clock": 0}
"""Decimals, where the number's size does not say them."""


def ranks(report: Report, _width: int) -> list[RenderableType]:
    """A table a recipe: each quantity's median over the ranks, the worst rank's, and how far they lie apart."""
    told = report.ranks
    if told is None:
        return []
    table = parts.table("\nrecipe", "\nwhat", "median\nof ranks", "\nworst", "\nspread", "\nworst rank", left=2)
    table.columns[-1].justify = "left"
    for recipe, rows in told.rows.items():
        for index, row in enumerate(rows):
            table.add_row(Text("" if index else recipe), *_cells(row))
    notes = [
        "A recipe's step is that of its slowest rank. Kinds of work, coverage and memory in the other parts of this "
        "page are rank 0's. Spread: from the best rank to the worst, over the median."
    ]
    return [
        parts.heading(_title(told)),
        *([parts.indented(table)] if told.rows else []),
        *(parts.paragraph(text, style=parts.DIM) for text in notes),
        *(parts.paragraph(words.one_line(text), style=parts.WARN) for text in told.problems),
    ]


def _title(told: RanksReport) -> str:
    where = f"{told.hosts} machine{'' if told.hosts == 1 else 's'}"
    heard = "" if told.heard == told.world else f", {told.heard} heard"
    return f"{told.world} ranks on {where}{heard}"


def _cells(row: RankRow) -> tuple[Text, ...]:
    unit = "" if row.median.unit == "1" else f", {row.median.unit}"
    return (
        Text(f"{row.quantity}{unit}"),
        Number(_number(row, row.median), row.median),
        Number(_number(row, row.worst), row.worst),
        Text(_spread(row)),
        Text(f"{row.worst_rank} ({row.worst_host})" if _apart(row) else "all alike"),
    )


def _number(row: RankRow, figure: Figure) -> str:
    if figure.value is not None and row.median.unit == "1":
        return words.percent(figure.value)
    return words.bare(figure, UNITS.get(row.quantity))


def _apart(row: RankRow) -> float:
    return abs((row.worst.value or 0.0) - (row.best.value or 0.0))


def _spread(row: RankRow) -> str:
    if not _apart(row):
        return "0%"
    return words.percent(_apart(row) / abs(row.median.value)) if row.median.value else "not known: the median is zero"
