"""What the console shows, as plain data for the HTML page: the same words, and behind each number its origin.

The sections are written once, as rich renderables. `blocks` reads them: headings, paragraphs, lists and tables come
out as they are, whatever the section. A `parts.Number` brings its Figures along.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lowprec_callback.report import Figure
from lowprec_callback.show import words
from lowprec_callback.show.sections.parts import EIGHTHS, FULL, Entry, Heading, Number

CLASSES = {"bold": "bold", "italic": "italic", "dim": "dim", "green": "good", "red": "bad", "yellow": "warn"}
"""A word of a rich style, and the page's class for it."""

FACTS_IN_TITLE = 3
"""A hover text names the first few facts; the table of origins names them all."""

_BAR = re.compile(f"[{EIGHTHS.strip()}{FULL}]+")


@dataclass(frozen=True)
class Run:
    """A stretch of text in one style; or a bar, then `bar` is its length in cells and the text is empty."""

    text: str
    classes: str = ""
    bar: float | None = None


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, how it is aligned, and what a hover over it tells."""

    runs: tuple[Run, ...]
    numeric: bool = False
    title: str = ""

    @property
    def text(self) -> str:
        """Without its styles."""
        return "".join(run.text for run in self.runs)


@dataclass(frozen=True)
class Source:
    """The origin of one number of a table, each part as text."""

    row: str
    column: str
    value: str
    interval: str
    samples: str
    origin: str
    facts: str


@dataclass(frozen=True)
class Block:
    """One piece of a section. `kind` says which of the fields hold it."""

    kind: str
    """heading, paragraph, entries, table, sources or pre"""
    runs: tuple[Run, ...] = ()
    pairs: tuple[tuple[Cell, Cell], ...] = ()
    head: tuple[Cell, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    sources: tuple[Source, ...] = ()


def blocks(renderables: Iterable[RenderableType]) -> list[Block]:
    """A section's renderables as blocks; entries that follow each other become one list.

    The origins of a table's numbers follow what stands below it (footnotes), before the next table or heading.
    """
    found: list[Block] = []
    waiting: list[Block] = []
    for renderable in renderables:
        block = _block(renderable)
        if block is None:
            continue
        if block.kind in ("heading", "table"):
            found += waiting
            waiting = []
        if block.sources:
            waiting = [Block("sources", sources=block.sources)]
            block = replace(block, sources=())
        if block.kind == "entries" and found and found[-1].kind == "entries":
            block = Block("entries", pairs=(*found.pop().pairs, *block.pairs))
        found.append(block)
    return [*found, *waiting]


def _block(renderable: RenderableType) -> Block | None:
    if isinstance(renderable, Padding):
        renderable = renderable.renderable
    if isinstance(renderable, Heading):
        return Block("heading", runs=(Run(renderable.plain),))
    if isinstance(renderable, Text):
        return Block("paragraph", runs=_runs(renderable)) if renderable.plain.strip() else None
    if isinstance(renderable, Entry):
        label, text = (_cell(next(iter(column.cells)), numeric=False) for column in renderable.columns)
        return Block("entries", pairs=((label, text),))
    if isinstance(renderable, Table):
        return _table(renderable)
    if isinstance(renderable, Rule):
        return None
    return Block("pre", runs=(Run(_printed(renderable)),))


def _printed(renderable: RenderableType) -> str:
    """Whatever else a section may hold, as the console writes it."""
    out = io.StringIO()
    Console(file=out, width=100, color_system=None, legacy_windows=False).print(renderable)
    return out.getvalue()


def _table(table: Table) -> Block:
    numeric = [column.justify == "right" for column in table.columns]
    head = tuple(_cell(column.header, right) for column, right in zip(table.columns, numeric, strict=True))
    columns = [list(column.cells) for column in table.columns]
    raw = list(zip(*columns, strict=True))
    rows = tuple(tuple(_cell(cell, right) for cell, right in zip(row, numeric, strict=True)) for row in raw)
    sources: list[Source] = []
    group = ""
    for row in raw:
        name = _name(_plain(row[0]))
        if not any(_plain(cell).strip() for cell in row[1:]):
            group = name  # A line that names the rows below it.
            continue
        for cell, heading in zip(row, head, strict=True):
            if isinstance(cell, Number):
                full = f"{group}, {name}" if group else name
                sources += [_source(full, _name(heading.text), figure) for figure in cell.figures]
    return Block("table", head=head if table.show_header else (), rows=rows, sources=tuple(sources))


def _name(text: str) -> str:
    """A cell's text on one line; a word that was broken for the width is whole again."""
    return words.one_line(text.replace("-\n", "\n" if "\n-" in text else ""))


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _cell(cell: RenderableType, numeric: bool) -> Cell:
    text = cell if isinstance(cell, Text) else Text(str(cell))
    title = "\n".join(hover(figure) for figure in text.figures) if isinstance(text, Number) else ""
    return Cell(_runs(text), numeric, title)


def _runs(text: Text) -> tuple[Run, ...]:
    """The stretches of a text between which its style changes."""
    edges = sorted({0, len(text.plain), *(edge for span in text.spans for edge in (span.start, span.end))})
    found: list[Run] = []
    for start, end in pairwise(edges):
        styles = [str(text.style), *(str(span.style) for span in text.spans if span.start <= start < span.end)]
        found += _with_bars(text.plain[start:end], _classes(styles))
    return tuple(found)


def _classes(styles: Sequence[str]) -> str:
    """Class names of styles that lie one over the other: `dim`, then `not dim`, is nothing."""
    kept: dict[str, None] = {}
    for style in styles:
        negated = False
        for word in style.split():
            if word == "not":
                negated = True
                continue
            if word in CLASSES:
                if negated:
                    kept.pop(CLASSES[word], None)
                else:
                    kept[CLASSES[word]] = None
            negated = False
    return " ".join(kept)


def _with_bars(text: str, classes: str) -> Iterator[Run]:
    """Block characters become bars of the same length, which have no gaps in any font."""
    at = 0
    for match in _BAR.finditer(text):
        if match.start() > at:
            yield Run(text[at : match.start()], classes)
        bar = match.group()
        yield Run("", classes, bar.count(FULL) + sum(EIGHTHS.index(char) for char in bar if char != FULL) / 8)
        at = match.end()
    if at < len(text):
        yield Run(text[at:], classes)


def _source(row: str, column: str, figure: Figure) -> Source:
    if figure.value is None:
        return Source(row, column, "not known", "", "", "", words.why_missing(figure))
    return Source(
        row,
        column,
        f"{figure.value:.6g} {figure.unit}",
        _interval(figure),
        str(figure.n) if figure.n is not None else "",
        figure.origin,
        "; ".join(figure.facts),
    )


def _interval(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"{figure.low:.6g} to {figure.high:.6g}"


def hover(figure: Figure) -> str:
    """A Figure's origin in one line: `513.012 ms, measured, 95% interval 512.7 to 513.3, 24 samples, from ...`."""
    if figure.value is None:
        return f"not known: {words.why_missing(figure)}"
    said = [f"{figure.value:.6g} {figure.unit}", figure.origin]
    if interval := _interval(figure):
        said.append(f"95% interval {interval}")
    if figure.n is not None:
        said.append(f"{figure.n} sample{'' if figure.n == 1 else 's'}")
    if figure.facts:
        rest = len(figure.facts) - FACTS_IN_TITLE
        more = f" and {rest} more" if rest > 0 else ""
        said.append(f"from {'; '.join(figure.facts[:FACTS_IN_TITLE])}{more}")
    return ", ".join(said)
