"""The page of `lowprec doctor`: findings, then recipes. Plain ASCII, so that any terminal can show it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lowprec_callback.doctor import Diagnosis, Finding, Level, RecipeFinding

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "cyan"),
    "warning": ("WARN", "bold yellow"),
    "absent": ("-", "dim"),
}
"""Level to its mark on the page and the mark's style."""


def page(diagnosis: Diagnosis) -> RenderableType:
    """The whole page."""
    title = Text.assemble(("lowprec doctor", "bold"), f" - lowprec_callback {diagnosis.tool_version}")
    return Group(
        title,
        Rule(characters="-", style="dim"),
        _findings(diagnosis.findings),
        Text(),
        _recipes(diagnosis.recipes),
        Text(),
        Text(_what_yes_means(diagnosis.recipes), style="dim"),
    )


def _findings(findings: tuple[Finding, ...]) -> Table:
    table = _grid("", "subject", "found")
    for finding in findings:
        mark, style = _MARKS[finding.level]
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="italic")
        table.add_row(Text(mark, style=style), Text(finding.subject, style="bold"), text)
    return table


def _recipes(recipes: tuple[RecipeFinding, ...]) -> Table:
    table = _grid("runs", "recipe", "how, or why not")
    table.show_header = True
    for recipe in recipes:
        yes = Text("yes", style="green") if recipe.runs else Text("no", style="dim")
        how = [", ".join(recipe.engines), recipe.reason] if recipe.runs else [recipe.reason]
        table.add_row(yes, Text(recipe.recipe, style="bold"), Text("; ".join(filter(None, how))))
    return table


def _grid(*columns: str) -> Table:
    """A table without lines whose last column wraps."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table


def _what_yes_means(recipes: tuple[RecipeFinding, ...]) -> str:
    if not any("transformer_engine" in recipe.engines for recipe in recipes):
        return "The profiler compares the recipes that run; on a CPU the baseline is fp32, on a GPU bf16."
    return (
        "A yes is the word of the card and of Transformer Engine. The profiler takes neither on trust: it "
        "runs a tiny forward and backward in each recipe first, at the model's own sizes."
    )
