"""Each recipe's step as it was predicted before the recipe ran, beside what was measured."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from lowprec_callback.report import Figure, Prediction, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

_Told = tuple[str, Prediction, Figure]
"""A recipe's name, its prediction, its measured step."""


def prediction(report: Report, _width: int) -> list[RenderableType]:
    """Predicted, measured and naive, a row a recipe; from how many tokens each pays."""
    told: list[_Told] = [
        (part.name, part.prediction, part.step_ms) for part in report.recipes if part.prediction is not None
    ]
    if not told:
        return []
    if not any(made.step_ms.known for _, made, _ in told):
        reasons = dict.fromkeys(words.one_line(words.why_missing(made.step_ms)) for _, made, _ in told)
        return [parts.heading("Predicted"), parts.paragraph(f"Nothing could be predicted: {'; '.join(reasons)}.")]
    notes = Notes()
    columns = ("\npredicted", "\nmeasured", "\noff by", "naive\nreading", "\noff by", "set by\nthe")
    table = parts.table("\nrecipe", *columns)
    table.columns[-1].justify = "left"
    for name, made, measured in told:
        table.add_row(
            Text(name, style="bold"),
            notes.cell(made.step_ms),
            notes.cell(measured),
            notes.cell(made.error, _percent),
            notes.cell(made.naive_ms),
            notes.cell(made.naive_error, _percent),
            Text(made.bound),
        )
    notes.explain(f"naive reading: the {report.baseline} step divided by the speedup of its GEMMs alone")
    bases = dict.fromkeys(made.basis for _, made, _ in told if made.basis)
    pays = [(name, made.pays) for name, made, _ in told if made.pays]
    return [
        parts.heading("Predicted before it ran, ms of a step"),
        parts.indented(table),
        *notes.lines(),
        *(parts.paragraph(f"Predicted from {basis}.", style=parts.DIM) for basis in bases),
        *parts.entries(pays),
    ]


def _percent(figure: Figure) -> str:
    return f"{100 * (figure.value or 0.0):+.1f}%"
