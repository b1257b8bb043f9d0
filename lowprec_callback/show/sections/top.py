"""The first lines: what was measured where, and the answer in a few sentences."""

from __future__ import annotations

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts

TOOL = "lowprec_callback"


def subject(report: Report) -> str:
    """`codonfm-5b · NVIDIA H200 · TE 2.20.2 · torch 2.11`."""
    return " · ".join(part for part in (report.model, report.device, words.versions(report)) if part)


def title(report: Report, width: int) -> list[RenderableType]:
    """`lowprec_callback        codonfm-5b · NVIDIA H200 · TE 2.20.2 · torch 2.11`, and a rule."""
    where = Text(subject(report))
    name = Text(TOOL, style="bold")
    line: RenderableType
    if name.cell_len + where.cell_len + 2 * parts.INDENT <= width:
        grid = Table.grid(expand=True)
        grid.add_column()
        grid.add_column(justify="right")
        grid.add_row(name, where)
        line = grid
    else:
        line = Text("\n").join([name, where])
    return [line, Rule(style=parts.DIM, characters="─")]


def headline(report: Report, _width: int) -> list[RenderableType]:
    """The verdict: the first sentence in bold. A run that did not finish says so before anything else."""
    text = Text()
    for number, sentence in enumerate(report.headline):
        text.append("  " if number else "")
        text.append(words.one_line(sentence), style="" if number else "bold")
    lines: list[RenderableType] = []
    if report.status != "finished":
        how = "failed" if report.status == "failed" else f"was {report.status}"
        sentence = f"This run {how}: the page shows what was measured."
        lines.append(parts.paragraph(sentence, style=parts.WARN))
    if text:
        lines.append(parts.paragraph(text))
    return lines


def reading(report: Report, _width: int) -> list[RenderableType]:
    """What the GEMMs promised against what the step gained, in words; each recipe's under its name."""
    if not report.reading:
        return []
    named: list[tuple[str, str | Text]] = []
    others: list[RenderableType] = []
    for sentence in map(words.one_line, report.reading):
        name, colon, rest = sentence.partition(": ")
        if colon and any(recipe.name == name for recipe in report.recipes):
            named.append((name, rest[:1].upper() + rest[1:]))
        else:
            others.append(parts.paragraph(sentence))
    return [parts.heading("GEMM promise against measured step"), *parts.entries(named), *others]
