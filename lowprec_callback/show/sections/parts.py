"""What all sections are made of: headings, paragraphs, tables that fold, bars and footnotes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import Figure
from lowprec_callback.show import words

INDENT = 2
GAP = 2
"""Blank columns between the columns of a table."""

GOOD, BAD, DIM, WARN = "green", "red", "dim", "yellow"

EIGHTHS = " ▏▎▍▌▋▊▉"
FULL = "█"
DUST = 1e-6
"""Below this share of the largest, a term is what rounding leaves of zero, and gets no bar."""


class Heading(Text):
    """A section's title, told from other text by its type."""


class Entry(Table):
    """One `label  text` line, told from other tables by its type."""


class Number(Text):
    """Figures as text that still knows them: a page that can (HTML) tells their intervals, origins and facts."""

    def __init__(self, text: str, *figures: Figure, style: str = "") -> None:
        super().__init__(text, style=style)
        self.figures = figures


def heading(title: str) -> Heading:
    """A section's title."""
    return Heading(title, style="bold")


def indented(renderable: RenderableType, by: int = INDENT) -> Padding:
    """A renderable moved to the right."""
    return Padding(renderable, (0, 0, 0, by), expand=False)


def paragraph(text: str | Text, by: int = INDENT, style: str = "") -> Padding:
    """Text that wraps within the page's width and keeps its left edge."""
    # Text, never str: a reason may hold "[...]", which rich would take for markup.
    return indented(text if isinstance(text, Text) else Text(text, style=style), by)


def entry(label: str, text: str | Text, width: int, style: str = "") -> Table:
    """`label  text`, with the text's further lines hanging under its first; `width` aligns several."""
    grid = Entry.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(width=width, overflow="fold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), text if isinstance(text, Text) else Text(text, style=style))
    return grid


def entries(pairs: Sequence[tuple[str, str | Text]], by: int = INDENT, widest: int = 24) -> list[RenderableType]:
    """Several `entry` lines, aligned."""
    width = min(max((len(label) for label, _ in pairs), default=0), widest)
    return [indented(entry(label, text, width), by) for label, text in pairs]


def table(*headers: str, left: int = 1) -> Table:
    """A table without lines; the first `left` columns are names (left-aligned), the rest numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_edge=False)
    for index, header in enumerate(headers):
        # "fold", because rich's default shortens a cell with an ellipsis.
        made.add_column(Text(header), justify="left" if index < left else "right", overflow="fold", vertical="top")
    return made


def natural_width(renderable: RenderableType) -> int:
    """The width at which nothing has to wrap."""
    console = Console(width=10_000, color_system=None)
    return Measurement.get(console, console.options, renderable).maximum


def fits(renderable: RenderableType, width: int, by: int = INDENT) -> bool:
    """Whether a renderable needs no wrapping at this page width."""
    return natural_width(renderable) + by <= width


_Column = TypeVar("_Column")


def side_by_side(
    recipes: Sequence[_Column], build: Callable[[Sequence[_Column]], RenderableType], width: int
) -> list[list[_Column]]:
    """Recipes (or what stands for them) in groups whose tables fit the page: rather two tables than a squeezed one."""
    groups: list[list[_Column]] = []
    for recipe in recipes:
        if groups and fits(build([*groups[-1], recipe]), width):
            groups[-1].append(recipe)
        else:
            groups.append([recipe])
    return groups


def bar(size: float, largest: float, width: int) -> str:
    """A bar of |size| / |largest| * `width` cells, in eighths of a cell; the smallest is still visible."""
    if not largest or abs(size) <= DUST * abs(largest):
        return ""
    eighths = max(1, round(abs(size) / abs(largest) * width * 8))
    return FULL * (eighths // 8) + EIGHTHS[eighths % 8].strip()


class Notes:
    """Footnotes of a section: a cell without a number holds a mark, and the reason stands below the table."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._extra: list[str] = []

    def mark(self, reason: str) -> str:
        """The mark of a reason; the same reason gets the same mark."""
        reason = words.one_line(reason)
        if reason not in self._reasons:
            self._reasons.append(reason)
        return f"[{self._reasons.index(reason) + 1}]"

    def cell(self, figure: Figure, write: Callable[[Figure], str] = words.ms) -> Number:
        """A Figure for a table: its number, or the mark of the reason why there is none."""
        if figure.value is None:
            return Number(self.mark(words.why_missing(figure)), figure, style=DIM)
        if figure.origin == "estimated":
            self.explain(f"{words.ESTIMATED} an estimate")
        return Number(write(figure), figure)

    def explain(self, sentence: str) -> None:
        """A line below the table that explains a sign in it, once."""
        if sentence not in self._extra:
            self._extra.append(sentence)

    def lines(self, by: int = INDENT) -> list[RenderableType]:
        """The footnotes, to be put below the table."""
        numbered: list[tuple[str, str | Text]] = [
            (f"[{number}]", Text(reason, style=DIM)) for number, reason in enumerate(self._reasons, start=1)
        ]
        return [*entries(numbered, by), *(paragraph(text, by, DIM) for text in self._extra)]


def stacked(*groups: Iterable[RenderableType]) -> list[RenderableType]:
    """Groups one below the other with an empty line between those that hold anything."""
    out: list[RenderableType] = []
    for group in groups:
        members = list(group)
        if members and out:
            out.append(Text())
        out.extend(members)
    return out
