"""A Report as a console page: the verdict first, the reason second, the evidence after it.

    from rich.console import Console
    from lowprec_callback.show.console import Page

    Console().print(Page(report))

The page is a rich renderable: it takes the console's width, and comes out plain where there is no terminal.
Where the output's encoding lacks a character (bars, ±), one of the same width stands in for it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment

from lowprec_callback.report import Gap, Report
from lowprec_callback.show.sections import (
    findings,
    foot,
    gap,
    gemms,
    ledger,
    memory,
    numerics,
    parts,
    places,
    prediction,
    ranks,
    recipes,
    top,
    verdict,
)

Section = Callable[[Report, int], list[RenderableType]]

SECTIONS: tuple[Section, ...] = (
    top.headline,
    recipes.overview,
    top.reading,
    gap.gaps,
    findings.findings,
    ledger.ledgers,
    places.places,
    prediction.prediction,
    ranks.ranks,
    verdict.verdicts,
    numerics.numerics,
    memory.memory,
    foot.scales,
    gemms.benchmark,
    recipes.refusals,
    recipes.signs,
    foot.plan,
    foot.problems,
)
"""Below the title and above the footer, in this order."""

_STAND_INS = dict(zip("±·─—–×µμ→█▏▎▍▌▋▊▉", "+|---xuu>#   ####", strict=True))
"""Of the characters that the page itself uses; the end of a bar is rounded to a whole cell or none."""


class Page:
    """The whole page about a Report. `files` are named in the footer (report.json, plots)."""

    def __init__(self, report: Report, files: Sequence[str] = ()) -> None:
        self.report = report
        self.files = tuple(files)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        body = parts.stacked(*(section(self.report, width) for section in SECTIONS))
        page = Group(*top.title(self.report, width), *body, *foot.footer(self.report, self.files))
        segments = console.render(page, options.update(highlight=False))
        yield from (segments if _encodes_all(options.encoding) else _encodable(segments, options.encoding))


class Gaps:
    """Gaps alone, one below the other."""

    def __init__(self, gaps: Sequence[Gap]) -> None:
        self.gaps = tuple(gaps)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        body = parts.stacked(*(gap.one_gap(each, options.max_width, named=True) for each in self.gaps))
        segments = console.render(Group(*body), options.update(highlight=False))
        yield from (segments if _encodes_all(options.encoding) else _encodable(segments, options.encoding))


def print_report(report: Report, console: Console | None = None, files: Sequence[str] = ()) -> None:
    """Print the page; without a console, to standard output."""
    (console or Console()).print(Page(report, files))


def as_text(report: Report, width: int = 100, files: Sequence[str] = ()) -> str:
    """The page as plain text, without colours and without blanks at the ends of lines."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(Page(report, files))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _encodes_all(encoding: str) -> bool:
    return encoding.startswith("utf")


def _encodable(segments: Iterator[Segment] | RenderResult, encoding: str) -> Iterator[Segment]:
    for segment in segments:
        if isinstance(segment, Segment):
            yield Segment(encodable(segment.text, encoding), segment.style, segment.control)


def encodable(text: str, encoding: str) -> str:
    """`text` in characters that `encoding` has, as wide as those that they stand in for: columns keep."""
    # A half-width always follows a blank: "819.2 ±0.4" becomes "819.2+-0.4".
    if not _can(encoding, "±"):
        text = text.replace(" ±", "+-")
    return "".join(char if _can(encoding, char) else _stand_in(char) for char in text)


def _stand_in(char: str) -> str:
    return _STAND_INS.get(char, "?" * cell_len(char))


def _can(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return char.isascii()
    return True
