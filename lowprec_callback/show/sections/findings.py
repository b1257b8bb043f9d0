"""What to do: the findings, those with the most ms at stake first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from lowprec_callback.report import Finding, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts

MOST = 8
"""Findings that the page shows; the same advice for several recipes counts once."""


def findings(report: Report, _width: int) -> list[RenderableType]:
    """A finding an entry: ms at stake, what was found, what to do, and the evidence."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.code, finding.advice), []).append(finding)
    if not groups:
        return []
    shown = list(groups.values())[:MOST]
    left = len(groups) - len(shown)
    more = [parts.paragraph(words.left_out(left, "finding", "report.json"), style=parts.DIM)] if left else []
    return [
        parts.heading("What to do, by ms at stake"),
        *parts.entries([(_ms(group[0]), _entry(group)) for group in shown]),
        parts.paragraph("Findings may be about the same time: their ms do not add up.", style=parts.DIM),
        *more,
    ]


def _ms(finding: Finding) -> str:
    return f"{words.bare(finding.ms)} ms" if finding.ms.known else "?"


def _entry(group: Sequence[Finding]) -> Text:
    """The first of a group in full, the others by recipe and ms."""
    first, *others = group
    text = Text().append(first.code, style="bold")
    text.append(f" ({first.recipe})" if first.recipe else "")
    text.append(f"  {words.one_line(first.sentence)}")
    if others:
        also = (f"{other.recipe} ({_ms(other)})" if other.ms.known else other.recipe or "?" for other in others)
        text.append(f" Likewise {words.listed(list(also))}.")
    text.append(f"\n{words.one_line(first.advice)}", style=parts.GOOD)
    evidence = [words.one_line(each) for each in first.evidence]
    if not first.ms.known:
        evidence.append(f"ms not known: {words.why_missing(first.ms)}")
    return text.append(f"\nevidence: {'; '.join(evidence)}", style=parts.DIM) if evidence else text
