"""Every timed step: the whole distribution of each recipe, its rounds told apart, and its median."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from lowprec_callback.report import RecipeReport, Report
from lowprec_callback.show import plot_style, words
from lowprec_callback.show.plot_style import NothingToPlot

MARKERS = "osD^vP"
ROUND_COLOURS = (plot_style.BLUE, plot_style.ORANGE, plot_style.GREEN, plot_style.PURPLE, plot_style.SKY)
MEDIAN = "#000000"
WIDTH = 9.5
SPREAD = 0.5
"""Height of a recipe's strip, in rows: its rounds lie one below the other in it."""


def step_times(report: Report) -> Canvas:
    """Left: all steps in ms. Right: the same, as deviation from the recipe's own median in percent.

    Recipes differ by a factor, steps of one recipe by a percent: no single axis shows both.

    Raises:
        NothingToPlot: no recipe has a timed step.
    """
    recipes = [recipe for recipe in plot_style.ran(report) if recipe.samples and recipe.step_ms.known]
    if not recipes:
        raise NothingToPlot("no recipe has a timed step")
    absent = [recipe for recipe in plot_style.ran(report) if recipe not in recipes]
    reasons = [f"{recipe.name} not shown: {words.why_missing(recipe.step_ms)}" for recipe in absent]
    figure = plot_style.canvas(WIDTH, 1.7 + 0.62 * len(recipes))
    left, right = figure.subplots(1, 2, sharey=True)
    for row, recipe in enumerate(recipes):
        median = recipe.step_ms.value
        assert median is not None
        _strip(left, row, recipe, 0.0, 1.0)
        _strip(right, row, recipe, median, 100 / median if median else 1.0)
        left.plot([median, median], [row - 0.36, row + 0.36], color=MEDIAN, linewidth=1.6, label="median")
    right.axvline(0, color=MEDIAN, linewidth=1.2)
    for axes in (left, right):
        axes.xaxis.grid(True, color="#E5E5E5", linewidth=0.7)
        plot_style.plain(axes)
    left.set_yticks(range(len(recipes)), [recipe.name for recipe in recipes], parse_math=False)
    left.set_ylim(len(recipes) - 0.4, -0.75)
    left.margins(x=0.2)
    left.set_xlim(left=max(0.0, left.get_xlim()[0]))
    for row, recipe in enumerate(recipes):
        _number(left, row, recipe)
    low, high = right.get_xlim()
    right.set_xlim(min(low, -0.5), max(high, 0.5))
    left.set_xlabel("step, ms")
    right.set_xlabel("difference from the recipe's median, %")
    _legend(figure, recipes)
    plot_style.frame(figure, _conclusion(recipes), report, reasons)
    return figure


def _strip(axes: Axes, row: int, recipe: RecipeReport, origin: float, scale: float) -> None:
    """All samples of a recipe as dots at (ms - origin) * scale, a line of dots for each round."""
    lines = len(recipe.samples)
    for line, (number, samples) in enumerate(recipe.samples):
        y = row + (line - (lines - 1) / 2) * SPREAD / max(lines - 1, 1)
        axes.plot(
            [(ms - origin) * scale for ms in samples],
            [y] * len(samples),
            linestyle="none",
            marker=MARKERS[number % len(MARKERS)],
            color=ROUND_COLOURS[number % len(ROUND_COLOURS)],
            markersize=4.5,
            alpha=0.65,
            markeredgewidth=0,
            label=f"{recipe.name} round {number}",
        )


def _number(axes: Axes, row: int, recipe: RecipeReport) -> None:
    """The median and its half-width above the recipe's strip; near an edge of the axes, turned inwards."""
    assert recipe.step_ms.value is not None
    low, high = axes.get_xlim()
    place = (recipe.step_ms.value - low) / (high - low)
    axes.annotate(
        f"{words.ms(recipe.step_ms)} ms",
        (recipe.step_ms.value, row - 0.36),
        (0, 1),
        textcoords="offset points",
        ha="left" if place < 0.15 else "right" if place > 0.85 else "center",
        va="bottom",
        fontsize=8,
        color=plot_style.INK,
    )


def _legend(figure: Canvas, recipes: list[RecipeReport]) -> None:
    rounds = sorted({number for recipe in recipes for number, _ in recipe.samples})
    handles = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=MARKERS[number % len(MARKERS)],
            color=ROUND_COLOURS[number % len(ROUND_COLOURS)],
            label=f"round {number + 1}",
        )
        for number in rounds
    ]
    handles.append(Line2D([], [], color=MEDIAN, linewidth=1.6, label="median"))
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8)


def _conclusion(recipes: list[RecipeReport]) -> str:
    """`Shortest step with fp8_delayed: median 513.0 ms against 819.2 (bf16)`, if the interval allows it."""
    best, *others = sorted(recipes, key=lambda recipe: recipe.step_ms.value or 0.0)
    if not others:
        return f"{best.name}: median {words.bare(best.step_ms)} ms a step"
    rival = next((recipe for recipe in others if recipe.baseline), others[0])
    medians = f"median {words.bare(best.step_ms)} ms against {words.bare(rival.step_ms)} ({rival.name})"
    # Speedups are told against the baseline, which is one of the two.
    clarity = plot_style.clarity(rival if best.baseline else best)
    if clarity == "unclear":
        return f"No clear difference: {best.name} {medians}"
    if clarity == "unknown":
        return f"Steps with {best.name}: {medians}"
    return f"Shortest step with {best.name}: {medians}"
