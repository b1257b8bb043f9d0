"""Rates of shapes that were listed one by one: TFLOP/s for each shape and recipe, a panel for each table.

    rate = 2 M K N R / (sum over the R roles that were timed of ms of one call)

Shapes that are no model's have no sum that means anything, and their times span orders of magnitude; rates can be
compared.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from lowprec_callback.analyze.gemm_table import GemmTable
from lowprec_callback.recording import Mode
from lowprec_callback.show import plot_style, words
from lowprec_callback.show.plot_style import NothingToPlot

NAMES: dict[Mode, str] = {"kernel": "GEMM only", "autocast": "with quantization"}
GROUP = 0.8
"""Width of a shape's bars together; the distance of two shapes is 1."""


def shape_rates(tables: Sequence[GemmTable], device: str) -> Canvas:
    """A panel for each method and mode, a group of bars for each shape, a bar for each recipe.

    What has no bar is named below with its reason, and so is the device.

    Raises:
        NothingToPlot: no shape has a time.
    """
    if not any(rate is not None for table in tables for recipe in table.recipes for rate in _rates(table, recipe)):
        raise NothingToPlot("no shape has a time")
    names = list(dict.fromkeys(recipe for table in tables for recipe in table.recipes))
    colours = {name: plot_style.PALETTE[place % len(plot_style.PALETTE)] for place, name in enumerate(names)}
    shapes = max(len(table.operations()) for table in tables)
    figure = plot_style.canvas(max(6.5, 1.5 + shapes * (0.3 + 0.16 * len(names))), 0.8 + 2.9 * len(tables))
    panels = figure.subplots(len(tables), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, table in zip(panels, tables, strict=True):
        _panel(axes, table, colours)
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside upper right", ncols=len(names), frameon=False, fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)
    below = [
        f"{name} in {recipe} not shown ({table.method}, {NAMES[table.mode]}): "
        f"{words.why_missing(table.operation(recipe, name))}"
        for table in tables
        for recipe in table.recipes
        for name in table.operations()
        if not table.operation(recipe, name).known
    ]
    bound = [name for name in names if any(name in cell.launch_bound for table in tables for cell in table.cells)]
    if bound:
        below.append(
            f"Some GEMMs are launch-bound in {words.listed(bound)}: the host needs longer to launch them than they run."
        )
    lines = [line for text in [*below, device] for line in textwrap.wrap(words.one_line(text), 110)]
    figure.set_figheight(figure.get_figheight() + 0.14 * (len(lines) - 1))
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color=plot_style.GREY, parse_math=False)
    return figure


def _rates(table: GemmTable, recipe: str) -> list[float | None]:
    """TFLOP/s of each shape, all its roles together."""
    found: list[float | None] = []
    for name in table.operations():
        time = table.operation(recipe, name).value
        flops = sum(cell.flops for cell in table.cells if cell.operation == name)
        found.append(flops / time / 1e9 if time else None)
    return found


def _panel(axes: Axes, table: GemmTable, colours: dict[str, str]) -> None:
    width = GROUP / len(colours)
    for place, (recipe, colour) in enumerate(colours.items()):
        rates = _rates(table, recipe) if recipe in table.recipes else []
        spots = [(shape, rate) for shape, rate in enumerate(rates) if rate is not None]
        left = (place + 0.5) * width - GROUP / 2
        axes.bar([shape + left for shape, _ in spots], [rate for _, rate in spots], width, color=colour, label=recipe)
    labels = [_label(table, name) for name in table.operations()]
    axes.set_xticks(range(len(labels)), labels, fontsize=8, rotation=30 if len(labels) > 4 else 0, parse_math=False)
    axes.set_ylabel("TFLOP/s")
    title = f"{table.method}, {NAMES[table.mode]}"
    axes.set_title(title, loc="left", fontsize=10, color=plot_style.INK)
    axes.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)
    plot_style.plain(axes)


def _label(table: GemmTable, name: str) -> str:
    """A square by its one size."""
    cell = next(cell for cell in table.cells if cell.operation == name)
    return str(cell.m) if cell.m == cell.k == cell.n else name
