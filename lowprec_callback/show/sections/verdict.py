"""Asked against ran, told only where there is something to tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from lowprec_callback.report import KernelRow, RecipeReport, Report, Verdict, VerdictRow
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts

_Group = tuple[str, str, str, str]
"""verdict, asked, ran, why: rows that agree in these are shown as one."""

_LOUDEST_FIRST = ("fallback", "unproven", "outside", "emulated", "by_request", "confirmed")


def verdicts(report: Report, _width: int) -> list[RenderableType]:
    """A block for each recipe that did not run as asked, took a slow path, or has witnesses at odds."""
    return parts.stacked(*(_block(recipe) for recipe in report.recipes if recipe.refusal is None))


def _block(recipe: RecipeReport) -> list[RenderableType]:
    verdict = recipe.verdict
    if verdict is None:
        return []
    odd = [row for row in verdict.rows if row.verdict != "confirmed"]
    unknown = not verdict.coverage.known
    if not (odd or unknown or verdict.disagreements or verdict.slow_paths):
        return []
    lines: list[RenderableType] = [parts.heading(f"Asked against ran: {recipe.name}")]
    if odd or unknown:
        lines.append(parts.paragraph(words.one_line(verdict.summary)))
    if odd and not unknown:
        # Without evidence every row is unproven for the same reason, which the summary has told.
        lines.append(parts.paragraph(_coverage(verdict)))
        lines += _groups(odd, [row.module for row in verdict.rows])
    lines += _kernels(verdict.kernels)
    said: list[tuple[str, str | Text]] = [
        *(("witnesses disagree", words.one_line(text)) for text in verdict.disagreements),
        *(("beside them", words.one_line(text)) for text in verdict.beside),
        *(("slow path", words.one_line(text)) for text in verdict.slow_paths),
    ]
    return [*lines, *parts.entries(said)]


def _coverage(verdict: Verdict) -> str:
    whole = words.share(verdict.coverage)
    reachable = words.share(verdict.te_coverage)
    return f"Coverage: {whole} of linear-layer FLOPs; of those that a recipe can reach: {reachable}."


def _kernels(rows: Sequence[KernelRow]) -> list[RenderableType]:
    """What a capture's kernels say, the loudest first: places with the same verdict and formats as one entry."""
    groups: dict[tuple[str, str, str, str], list[KernelRow]] = {}
    for row in rows:
        groups.setdefault((row.verdict, row.asked, row.ran, words.one_line(row.why)), []).append(row)
    loudest = sorted(groups.items(), key=lambda item: (_rank(item[0][0]), -sum(row.ms for row in item[1])))
    return parts.entries([(group[0], _kernel_sentence(group, members)) for group, members in loudest])


def _kernel_sentence(group: tuple[str, str, str, str], rows: Sequence[KernelRow]) -> Text:
    _, asked, ran, why = group
    places: dict[str, list[str]] = {}
    for row in rows:
        places.setdefault(row.module or "unknown module", []).append(row.where)
    text = Text(
        "; ".join(f"{name} {', '.join(dict.fromkeys(w for w in where if w))}".strip() for name, where in places.items())
    )
    text.stylize("bold")
    count, ms = sum(row.kernels for row in rows), sum(row.ms for row in rows)
    text.append(f": asked {asked}, ran {ran} ({count:.4g} kernel{'' if count == 1 else 's'}, {ms:.3g} ms a step)")
    return text.append(f": {why}" if why else "")


def _groups(rows: Sequence[VerdictRow], among: Sequence[str]) -> list[RenderableType]:
    """Rows with the same verdict, formats and reason as one entry, with their modules collapsed."""
    groups: dict[_Group, list[VerdictRow]] = {}
    for row in rows:
        groups.setdefault((row.verdict, row.asked, row.ran, words.one_line(row.why)), []).append(row)
    loudest = sorted(groups.items(), key=lambda item: (_rank(item[0][0]), -_share(item[1])))
    return parts.entries([(group[0], _sentence(group, members, among)) for group, members in loudest])


def _rank(verdict: str) -> int:
    return _LOUDEST_FIRST.index(verdict) if verdict in _LOUDEST_FIRST else len(_LOUDEST_FIRST)


def _share(rows: Sequence[VerdictRow]) -> float:
    return math.fsum(row.share for row in rows)


def _sentence(group: _Group, rows: Sequence[VerdictRow], among: Sequence[str]) -> Text:
    _, asked, ran, why = group
    roles = ", ".join(dict.fromkeys(row.role for row in rows))
    text = Text(words.modules((row.module for row in rows), among))
    text.stylize("bold")
    text.append(f", {roles}: asked {asked}, ran {ran} ({words.percent(_share(rows))} of the FLOPs)")
    return text.append(f": {why}" if why else "")
