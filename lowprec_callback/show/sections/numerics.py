"""The numerics guard: a line a recipe, and a sentence for what is not in order."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from lowprec_callback.report import Figure, NumericsReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

_STYLES = {
    "ok": parts.GOOD,
    "far": parts.WARN,
    "frozen scales": parts.WARN,
    "zero gradients": parts.BAD,
    "not finite": parts.BAD,
    "unknown": parts.DIM,
}


def numerics(report: Report, _width: int) -> list[RenderableType]:
    """Loss, distance, gradients and the word for each recipe; or why none of it is known."""
    told = [(recipe.name, recipe.guard) for recipe in report.recipes if recipe.guard is not None]
    if not told:
        return []
    if all(guard.state == "unknown" and not guard.steps and not guard.zero.known for _, guard in told):
        reasons = dict.fromkeys(words.one_line(guard.why) for _, guard in told)
        return [parts.heading("Numerics guard"), parts.paragraph(f"Not known: {'; '.join(reasons)}.")]
    steps = max(guard.steps for _, guard in told)
    notes = Notes()
    table = parts.table(
        "\nrecipe", "\nloss", f"from\n{report.baseline}", "\nlimit", "gradient\nnorm", "zero\ngradients", "not\nfinite",
        "\nnumerics",
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for name, guard in told:
        table.add_row(
            Text(name),
            notes.cell(guard.loss, lambda figure: words.significant(figure.value or 0.0, 5)),
            notes.cell(guard.distance, _percent),
            notes.cell(guard.limit, _percent),
            notes.cell(guard.gradient_ratio, lambda figure: words.bare(figure, 3) + "x"),
            notes.cell(guard.zero, _count),
            notes.cell(guard.not_finite, _count),
            Text(guard.state, style=_STYLES.get(guard.state, "")),
        )
    title = f"Numerics guard: {steps} step{'' if steps == 1 else 's'} from the same state on the same data"
    lines = [parts.heading(title), parts.indented(table), *notes.lines()]
    said = [(name, _sentence(guard)) for name, guard in told]
    return [*lines, *parts.entries([(name, text) for name, text in said if text])]


def _sentence(guard: NumericsReport) -> str | Text:
    """What is not in order, and what delayed scaling's scales did."""
    why = "" if guard.state == "ok" else words.one_line(guard.why)
    scales = guard.scales if guard.scales and guard.scales not in guard.why else None
    return "; ".join(text for text in (why, words.one_line(scales or "")) if text)


def _percent(figure: Figure) -> str:
    """Two digits: a distance is no precise thing."""
    value = figure.value or 0.0
    return "0%" if value == 0 else "<0.001%" if value < 0.001 else f"{value:.2g}%"


def _count(figure: Figure) -> str:
    return f"{figure.value:.0f}"
