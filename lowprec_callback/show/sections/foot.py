"""The end of the page: delayed scaling's state, how it was measured, what went wrong, where the files are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.rule import Rule
from rich.text import Text

from lowprec_callback.report import RecipeReport, Report, ScaleRow
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts


def scales(report: Report, _width: int) -> list[RenderableType]:
    """Scale and amax of one layer under each recipe that scales with a delay."""
    return parts.stacked(*(_scales(recipe) for recipe in report.recipes if recipe.scales))


def _scales(recipe: RecipeReport) -> list[RenderableType]:
    """The first module's rows; the others are of the same kind, and in report.json."""
    module = recipe.scales[0].module
    rows = [row for row in recipe.scales if row.module == module]
    others = len({row.module for row in recipe.scales}) - 1
    table = parts.table("tensor", "scale", "newest amax", "largest amax", "history")
    for row in rows:
        table.add_row(*scale_cells(row))
    more = [parts.paragraph(words.left_out(others, "module", "report.json"), style=parts.DIM)] if others else []
    return [parts.heading(f"Delayed scaling of {module} ({recipe.name})"), parts.indented(table), *more]


def scale_cells(row: ScaleRow) -> tuple[Text, ...]:
    """Tensor, scale, newest and largest amax, length of the history."""
    steps = f"{row.history_length} step{'' if row.history_length == 1 else 's'}"
    numbers = (words.significant(value) for value in (row.scale, row.amax, row.history_max))
    return (Text(row.tensor), *(Text(text) for text in numbers), Text(steps))


def plan(report: Report, _width: int) -> list[RenderableType]:
    """How it was measured, and by which engine."""
    engine = f"{report.engine}: {words.one_line(report.why_engine)}" if report.why_engine else report.engine
    pairs: list[tuple[str, str | Text]] = [("engine", engine), ("plan", words.one_line(report.plan))]
    if report.shrunk:
        pairs.append(("shrunk", Text(words.one_line(report.shrunk), style=parts.WARN)))
    libraries = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    pairs += [
        ("versions", libraries),
        ("made", f"{report.created} by lowprec_callback {report.tool_version}"),
    ]
    return [parts.heading("How this was measured"), *parts.entries([pair for pair in pairs if str(pair[1])])]


def problems(report: Report, _width: int) -> list[RenderableType]:
    """What failed or was given up."""
    if not report.problems:
        return []
    lines = [parts.paragraph(words.one_line(text), style=parts.WARN) for text in report.problems]
    return [parts.heading("Problems"), *lines]


def footer(report: Report, files: Sequence[str]) -> list[RenderableType]:
    """Recording, files written from it, and what was put back."""
    said = [f"Recording {report.recording}" if report.recording else "Recording not on disk", *files]
    restored = f"restored: {words.one_line(report.restored)}" if report.restored else "nothing recorded as restored"
    line = Text(" · ".join([*said, restored]), style=parts.DIM)
    return [Rule(style=parts.DIM, characters="─"), parts.paragraph(line)]
