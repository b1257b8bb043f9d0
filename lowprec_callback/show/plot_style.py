"""What all plots share: colours that colour-blind readers can tell apart, and a Figure without global state.

Plots use `matplotlib.figure.Figure` directly, never `pyplot`: no window, no backend to choose, and nothing
that outlives the call inside somebody's training run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas

from lowprec_callback.report import RecipeReport, Report
from lowprec_callback.show import words

BLUE, ORANGE, GREEN, SKY, PURPLE, VERMILION = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)
"""Okabe and Ito's colours. Yellow is left out: it is too pale on white."""

GREY, INK = "#7F7F7F", "#333333"
SAVES, COSTS = GREEN, VERMILION

DPI = 150


class NothingToPlot(Exception):
    """A Report without the data that a plot needs; the text says what is missing."""


def lighter(colour: str, amount: float) -> tuple[float, float, float]:
    """A colour mixed with white: 0 is the colour itself, 1 is white."""
    red, green, blue = (channel + (1 - channel) * amount for channel in to_rgb(colour))
    return red, green, blue


def canvas(width: float, height: float) -> Canvas:
    """A figure in inches that lays itself out."""
    return Canvas(figsize=(width, height), dpi=DPI, layout="constrained")


def plain(axes: Axes) -> None:
    """Axes without a box: what is left is the data's."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, length=3, labelsize=8.5)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(9)
    axes.set_axisbelow(True)


def frame(figure: Canvas, conclusion: str, report: Report, not_shown: Sequence[str] = ()) -> None:
    """The conclusion above; below, what is not shown and why, and what it was measured on."""
    inches = figure.get_figwidth()
    wrapped = textwrap.fill(words.one_line(conclusion), int(inches * 9.5))
    # parse_math=False: a "$" in a model's name is a dollar sign.
    figure.suptitle(wrapped, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK, parse_math=False)
    where = " · ".join(part for part in (report.model, report.device, words.versions(report)) if part)
    lines = [line for text in [*not_shown, where] for line in textwrap.wrap(words.one_line(text), int(inches * 15))]
    figure.set_figheight(figure.get_figheight() + 0.14 * (len(lines) - 1))
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color=GREY, parse_math=False)


Clarity = Literal["faster", "slower", "unclear", "unknown"]


def clarity(recipe: RecipeReport) -> Clarity:
    """What the interval of a recipe's step speedup allows to say; a title claims no more than that."""
    step = recipe.speedups.step if recipe.speedups else None
    if step is None or step.low is None or step.high is None:
        return "unknown"
    return "faster" if step.low > 1 else "slower" if step.high < 1 else "unclear"


def ran(report: Report) -> list[RecipeReport]:
    """The recipes that were not refused."""
    return [recipe for recipe in report.recipes if recipe.refusal is None]
