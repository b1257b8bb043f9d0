"""A Report as one self-contained HTML page: nothing is loaded, no script runs, and the words are the console's.

    from lowprec_callback.show.html import save

    save(report, Path("runs/mine/report.html"))

The page is made of the console's own sections (`console.SECTIONS`), read by `html_blocks`; around them stand what only
a page can show: plots as SVG, and folded away the origin of each number and the tables that the console shortens. What
stands only here is marked `data-page`. Jinja2 escapes every text; the plots are the only markup that is put in as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from lowprec_callback.failures import in_words
from lowprec_callback.files import write_text
from lowprec_callback.report import Report
from lowprec_callback.show import page_more, plots
from lowprec_callback.show.console import SECTIONS, Section
from lowprec_callback.show.html_blocks import Block, blocks
from lowprec_callback.show.plot_svg import svg
from lowprec_callback.show.sections import foot, gap, gemms, recipes, top

FILE_NAME = "report.html"

WIDTH = 10_000
"""Columns for the sections: nothing wraps or folds before the browser decides."""

PLOTS: dict[Section, str] = {
    gap.gaps: "gap_waterfall",
    gemms.benchmark: "gemm_times",
    recipes.signs: "step_times",
}
"""The section that a plot belongs to."""

PLOT_FIRST: tuple[Section, ...] = (gap.gaps,)
"""One waterfall over all recipes stands before the recipes' own tables; other plots stand after theirs."""


@dataclass(frozen=True)
class _Plot:
    name: str
    caption: str
    svg: Markup | None
    """None: there is nothing to plot, and the caption says why."""


@dataclass(frozen=True)
class _Fold:
    summary: str
    blocks: list[Block]


@dataclass(frozen=True)
class _Section:
    blocks: list[Block]
    plot: _Plot | None
    plot_first: bool
    folds: list[_Fold]


def save(report: Report, path: Path, files: Sequence[str] = ()) -> None:
    """Write the page, whole or not at all. `files` are named in its footer.

    Raises:
        OSError: it cannot be written. The file that was there is as it was.
    """
    write_text(path, as_html(report, files))


def as_html(report: Report, files: Sequence[str] = ()) -> str:
    """The page as text."""
    return _template().render(
        tool=top.TOOL,
        subject=top.subject(report),
        sections=[made for section in SECTIONS if (made := _section(report, section))],
        footer=blocks(foot.footer(report, files)),
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = resources("lowprec_callback.show").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def _section(report: Report, section: Section) -> _Section | None:
    body = blocks(section(report, WIDTH))
    plot = _plot(report, PLOTS[section]) if section in PLOTS and body else None
    more = page_more.MORE[section](report) if section in page_more.MORE else []
    # Within a fold a hover over a number is enough: every origin spelled out would double a long table.
    folds = [_Fold(fold.summary, [b for b in blocks(fold.inside) if b.kind != "sources"]) for fold in more]
    return _Section(body, plot, section in PLOT_FIRST, folds) if body or folds else None


def _plot(report: Report, name: str) -> _Plot:
    try:
        figure = plots.ALL[name](report)
        return _Plot(name, " ".join(figure.get_suptitle().split()), Markup(svg(figure, name)))
    except plots.NothingToPlot as nothing:
        return _Plot(name, f"No plot {name}: {nothing}", None)
    except Exception as error:  # a plot that fails takes only itself from the page
        return _Plot(name, f"No plot {name}: {in_words(error)}", None)
