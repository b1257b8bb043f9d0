"""The table of recipes, the recipes that did not run, and the signs that a recipe computes at all."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import Figure, RecipeReport, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes, Number


def overview(report: Report, width: int) -> list[RenderableType]:
    """A row a recipe: the step, the four speedups, memory, and whether it ran as asked."""
    wide = _overview(report, notes := Notes(), who=True)
    below: list[RenderableType] = []
    if not parts.fits(wide, width):
        wide = _overview(report, notes := Notes(), who=False)
        below = _who(report)
    absent = [recipe.name for recipe in report.recipes if recipe.refusal is not None]
    if absent:
        below.append(parts.paragraph(f"Not run: {words.listed(absent)} (reasons below).", style=parts.DIM))
    return [parts.indented(wide), *notes.lines(), *below]


def _overview(report: Report, notes: Notes, who: bool) -> Table:
    table = parts.table(
        "\nrecipe",
        "\nstep ms",
        f"against\n{report.baseline}",
        "GEMM\nonly",
        "+ quan-\ntization",
        "\nAmdahl",
        "peak\nGB",
        "\nran as asked" if who else "as\nasked",
    )
    table.columns[-1].justify = "left" if who else "right"
    for recipe in report.recipes:
        if recipe.refusal is None:
            table.add_row(
                Text(recipe.name, style="bold"),
                notes.cell(recipe.step_ms),
                *_speedups(recipe, notes, _void(report, recipe)),
                notes.cell(recipe.peak_gb, words.gb),
                _as_asked(recipe, notes, who),
            )
    return table


def _void(report: Report, recipe: RecipeReport) -> str | None:
    """Why a recipe's speed counts for nothing: it does not compute, or its baseline does not."""
    if recipe.void is not None:
        return f"void: {recipe.void}"
    base = next((part for part in report.recipes if part.baseline), None)
    return f"void: of {base.name}, {base.void}" if base is not None and base.void is not None else None


def _speedups(recipe: RecipeReport, notes: Notes, void: str | None) -> tuple[Text, Text, Text, Text]:
    """Measured step, kernel-only, autocast, Amdahl. The baseline is what the others are measured against."""
    if recipe.speedups is None:
        mark = notes.mark(recipe.step_ms.reason or f"there is no step of {recipe.name} and its baseline to compare")
        return (Text(mark), Text(mark), Text(mark), Text(mark))
    four = recipe.speedups
    if recipe.baseline:
        one = [notes.cell(figure, lambda _: "1") for figure in (four.step, four.kernel, four.autocast, four.amdahl)]
        return (one[0], one[1], one[2], one[3])
    doubtful = recipe.guard is not None and recipe.guard.state in ("far", "frozen scales")
    step = notes.cell(four.step, words.times)
    if void is not None:
        step = notes.cell(Figure.missing("x", void))
        step.stylize(f"not dim {parts.BAD}")
    elif doubtful:
        step.stylize(parts.WARN)
    elif four.step.value is not None and four.step.low is not None and four.step.high is not None:
        # Coloured only where the interval leaves no doubt.
        step.stylize(parts.GOOD if four.step.low > 1 else parts.BAD if four.step.high < 1 else "")
    bare = [
        notes.cell(figure, lambda f: words.bare(f, 2) + "x") for figure in (four.kernel, four.autocast, four.amdahl)
    ]
    return (step, bare[0], bare[1], bare[2])


def _as_asked(recipe: RecipeReport, notes: Notes, who: bool) -> Text:
    if recipe.verdict is None:
        return Text(notes.mark("no evidence of what ran: no traced step"), style=parts.DIM)
    if not recipe.verdict.coverage.known:
        return notes.cell(recipe.verdict.coverage)
    whole = words.share(recipe.verdict.coverage) == "100%"
    text = words.coverage(recipe.verdict) if who else words.share(recipe.verdict.coverage)
    return Number(text, recipe.verdict.coverage, style=parts.GOOD if whole else parts.BAD)


def _who(report: Report) -> list[RenderableType]:
    """On a narrow page, the witnesses stand below the table: recipes with the same ones together."""
    groups: dict[str, list[str]] = {}
    for recipe in report.recipes:
        if recipe.verdict is not None and recipe.verdict.coverage.known:
            groups.setdefault(words.witnesses(recipe.verdict), []).append(recipe.name)
    if not groups:
        return []
    said = "; ".join(f"{who} ({words.listed(names)})" for who, names in groups.items())
    return [parts.paragraph(f"As asked, by witness: {said}.", style=parts.DIM)]


def refusals(report: Report, _width: int) -> list[RenderableType]:
    """`mxfp8 not run: compute capability 9.0, needs 10.0`."""
    lines = [parts.paragraph(words.not_run(recipe)) for recipe in report.recipes if recipe.refusal is not None]
    return [parts.heading("Not run"), *lines] if lines else []


def signs(report: Report, _width: int) -> list[RenderableType]:
    """Host time, loss, clocks and numerics of each recipe: does it compute, and under equal conditions?"""
    ran = [recipe for recipe in report.recipes if recipe.refusal is None]
    if not ran:
        return []
    notes = Notes()
    table = parts.table("\nrecipe", "host ms to\nlaunch a step", "\nlast loss", "\nclocks")
    table.columns[-1].justify = "left"
    for recipe in ran:
        table.add_row(
            Text(recipe.name),
            notes.cell(recipe.host_ms),
            notes.cell(recipe.loss, lambda figure: words.bare(figure, 3)),
            Text(words.one_line(recipe.clocks or notes.mark("not recorded"))),
        )
    numerics: list[tuple[str, str | Text]] = [
        (recipe.name, words.one_line(recipe.numerics)) for recipe in ran if recipe.numerics
    ]
    return [
        parts.heading("Under what conditions"),
        parts.indented(table),
        *notes.lines(),
        *parts.entries(numerics),
    ]
