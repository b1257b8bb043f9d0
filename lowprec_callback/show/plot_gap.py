"""The gap as a waterfall: from the baseline's step, term by term, to the recipe's measured step."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from lowprec_callback.report import Gap, GapTerm, Report
from lowprec_callback.show import plot_style, words
from lowprec_callback.show.plot_style import NothingToPlot

HEIGHT = 0.66
ROW_INCHES, PANEL_INCHES, WIDTH = 0.27, 0.85, 8.5


def gap_waterfall(report: Report) -> Canvas:
    """A panel a recipe, read from top to bottom.

    A term that is not known has no bar; the bars after it start where the last known one ended, and the panel
    says that they do not close. The last bar is always the measured step.

    Raises:
        NothingToPlot: no recipe has a gap with terms.
    """
    gaps = [recipe.gap for recipe in plot_style.ran(report) if recipe.gap is not None and not recipe.baseline]
    shown = [gap for gap in gaps if gap.terms and gap.start.known and gap.end.known]
    if not shown:
        reasons = "; ".join(f"{gap.recipe}: {_why(gap)}" for gap in gaps)
        raise NothingToPlot(reasons or "no recipe has a gap")
    rows = [len(gap.terms) + 2 for gap in shown]
    figure = plot_style.canvas(WIDTH, 0.9 + sum(ROW_INCHES * count + PANEL_INCHES for count in rows))
    panels = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": rows}, sharex=True)[:, 0]
    for axes, gap in zip(panels, shown, strict=True):
        _panel(axes, gap)
    panels[-1].set_xlabel("ms of one step  (green saves time, orange costs it)")
    # One scale for all panels, with room for the numbers at the right.
    panels[-1].set_xlim(0, max(axes.dataLim.x1 for axes in panels) * 1.2 or 1.0)
    not_shown = [f"{gap.recipe} not shown: {_why(gap)}" for gap in gaps if gap not in shown]
    not_shown += [
        f"{gap.recipe}, {term.name} not known: {words.why_missing(term.ms)}"
        for gap in shown
        for term in gap.terms
        if not term.ms.known
    ]
    plot_style.frame(figure, _conclusion(report, shown), report, not_shown)
    return figure


def _why(gap: Gap) -> str:
    """Why a gap has no panel."""
    for step, name in ((gap.start, gap.baseline), (gap.end, gap.recipe)):
        if not step.known:
            return f"the step of {name} is not known: {words.why_missing(step)}"
    return words.one_line(gap.missing or "it has no terms")


def _panel(axes: Axes, gap: Gap) -> None:
    assert gap.start.value is not None
    assert gap.end.value is not None
    names = [f"{gap.baseline} step", *(term.name for term in gap.terms), f"{gap.recipe} step"]
    last = len(names) - 1
    axes.barh(0, gap.start.value, HEIGHT, color=plot_style.GREY, label="start")
    _value(axes, 0, gap.start.value, f"{words.ms(gap.start)} ms")
    level = gap.start.value
    for row, term in enumerate(gap.terms, start=1):
        chained = row == len(gap.terms) or gap.terms[row].ms.known
        level = _term(axes, row, term, level, words.places_in(gap.start), chained)
    axes.barh(last, gap.end.value, HEIGHT, color=plot_style.BLUE, label="end")
    _value(axes, last, gap.end.value, f"{words.ms(gap.end)} ms")
    axes.set_yticks(range(len(names)), [textwrap.fill(name, 30) for name in names], fontsize=8.5, parse_math=False)
    axes.set_ylim(last + 0.6, -0.6)
    axes.xaxis.grid(True, color="#E5E5E5", linewidth=0.7)
    axes.set_title(_title(gap), loc="left", fontsize=10, color=plot_style.INK, parse_math=False)
    plot_style.plain(axes)


def _term(axes: Axes, row: int, term: GapTerm, level: float, places: int, chained: bool) -> float:
    """Draw one term, and return the level at which the next one starts."""
    if term.ms.value is None:
        _value(axes, row, 0.0, "not known (see below)", style="italic")
        return level
    after = level + term.ms.value
    colour = plot_style.SAVES if term.ms.value < 0 else plot_style.COSTS
    axes.barh(row, term.ms.value, HEIGHT, left=level, color=colour, label=term.name)
    if chained:
        # A thin line carries the eye from the end of this bar to the start of the next, if there is a next.
        axes.plot([after, after], [row - HEIGHT / 2, row + 1 + HEIGHT / 2], color=plot_style.GREY, linewidth=0.7)
    _value(axes, row, max(level, after), words.signed_ms(term.ms, places))
    return after


def _value(axes: Axes, row: int, at: float, text: str, style: str = "normal") -> None:
    axes.annotate(
        text,
        (at, row),
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=plot_style.INK,
        fontstyle=style,
        parse_math=False,
    )


def _title(gap: Gap) -> str:
    """`fp8_delayed.  GEMM kernels: -297.8 ms;  quantization: +37.1 ms`: the largest term on either side."""
    known = [(term.ms.value, term.name) for term in gap.terms if term.ms.value is not None]
    told: list[str] = []
    if known:
        places = words.places_in(gap.start)
        (saved, saver), (lost, loser) = min(known), max(known)
        if saved < 0:
            told.append(f"{saver}: {words.fixed(saved, places, signed=True)} ms")
        if lost > 0:
            told.append(f"{loser}: {words.fixed(lost, places, signed=True)} ms")
    unknown = len(gap.terms) - len(known)
    if unknown:
        told.append(f"{unknown} of {len(gap.terms)} terms not known, so they do not close")
    return textwrap.fill(f"{gap.recipe}.  {';  '.join(told) or 'nothing changed'}", 92)


def _conclusion(report: Report, gaps: list[Gap]) -> str:
    """About the fastest recipe that has a gap."""
    best = min(gaps, key=lambda gap: gap.end.value or 0.0)
    recipe = report.recipe(best.recipe)
    step = recipe.speedups.step.value if recipe.speedups else None
    factor = f" ({words.fixed(step, 2)}x)" if step is not None else ""
    told = f"{words.bare(best.start)} ms became {words.bare(best.end)} with {best.recipe}{factor}"
    before = {"slower": "No recipe is faster: ", "unclear": "No clear difference: "}
    return before.get(plot_style.clarity(recipe), "") + told
