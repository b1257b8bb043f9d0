"""GEMM time of one step, stacked by operation and role, for each recipe: alone, and with quantization."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from lowprec_callback.recording import ROLES, Mode, Role
from lowprec_callback.report import Figure, RecipeReport, Report
from lowprec_callback.show import gemm_sums, plot_style, words
from lowprec_callback.show.gemm_sums import Operation
from lowprec_callback.show.plot_style import NothingToPlot

MODES: tuple[tuple[Mode, str], ...] = (("kernel", "GEMM only"), ("autocast", "with quantization"))
LIGHTEN: dict[Role, float] = {"fprop": 0.0, "dgrad": 0.55, "wgrad": 0.55}
HATCH: dict[Role, str] = {"fprop": "", "dgrad": "", "wgrad": "////"}
REST = "other operations"
BAR = 0.68
LEGEND_CHARACTERS = 44


def gemm_times(report: Report, notes: Sequence[str] = ()) -> Canvas:
    """Panels with the same axis, one a mode that was timed, a bar a recipe; over each bar the speedup.

    `notes` are written below, with what is not shown.

    Raises:
        NothingToPlot: no recipe has a complete GEMM benchmark.
    """
    recipes = plot_style.ran(report)
    drawn = {mode: [recipe for recipe in recipes if _total(recipe, mode).known] for mode, _ in MODES}
    if not any(drawn.values()):
        raise NothingToPlot("no recipe has a complete GEMM benchmark")
    colours = _colours(report)
    shown = [(mode, name) for mode, name in MODES if drawn[mode] or _tried(recipes, mode)]
    bars = max(len(found) for found in drawn.values())
    legend = max(len(line) for operation in colours for line in _legend_text(operation).split("\n"))
    width = max(2.75 * len(shown), 1.0 + len(shown) * 0.95 * bars) + 0.6 + 0.075 * legend
    figure = plot_style.canvas(max(width, 6.5), 5.2)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (mode, name) in zip(panels, shown, strict=True):
        _panel(axes, drawn[mode], mode, colours)
        axes.set_title(name, loc="left", fontsize=10, color=plot_style.INK)
    panels[0].set_ylabel("linear-layer GEMMs of one step, ms")
    _legend(figure, colours)
    plot_style.frame(
        figure, _conclusion(report), report, [*notes, *_not_shown(recipes, shown), *_launch_bound(recipes)]
    )
    return figure


def _tried(recipes: list[RecipeReport], mode: Mode) -> bool:
    """Whether a mode has any times at all, be they too few for a bar; a mode that nobody asked for has no panel."""
    return any(gemm_sums.per_call(row, mode).known for recipe in recipes for row in recipe.gemms)


def _not_shown(recipes: list[RecipeReport], shown: Sequence[tuple[Mode, str]]) -> list[str]:
    """A line a recipe and mode without a bar; one line where both miss it for the same reason."""
    lines: list[str] = []
    for recipe in recipes:
        reasons = {
            name: words.why_missing(_total(recipe, mode)) for mode, name in shown if not _total(recipe, mode).known
        }
        if len(reasons) == len(shown) and len(set(reasons.values())) == 1:
            lines.append(f"{recipe.name} not shown: {next(iter(reasons.values()))}")
        else:
            lines += [f"{recipe.name} not shown ({name}): {reason}" for name, reason in reasons.items()]
    return lines


def _launch_bound(recipes: list[RecipeReport]) -> list[str]:
    """Whose bars show the host's time rather than the GEMM's."""
    names = [recipe.name for recipe in recipes if any(row.launch_bound for row in recipe.gemms)]
    if not names:
        return []
    return [
        f"Some GEMMs are launch-bound in {words.listed(names)}: the host needs longer to launch them than they run."
    ]


def _total(recipe: RecipeReport, mode: Mode) -> Figure:
    """The height of a bar; a recipe without rows has none, whatever its sum says."""
    if not recipe.gemms:
        return Figure.missing("ms", (recipe.gemm_kernel_ms.reason or "not in the benchmark"))
    return recipe.gemm_kernel_ms if mode == "kernel" else recipe.gemm_autocast_ms


def _speedup(recipe: RecipeReport, mode: Mode) -> Figure | None:
    if recipe.speedups is None or recipe.baseline:
        return None
    return recipe.speedups.kernel if mode == "kernel" else recipe.speedups.autocast


def _colours(report: Report) -> dict[Operation, str]:
    """A colour an operation, the longest first; when the colours run out, grey for all others."""
    operations = gemm_sums.operations(report)
    few = len(plot_style.PALETTE)
    return {
        operation: plot_style.PALETTE[place] if place < few else plot_style.GREY
        for place, operation in enumerate(operations)
    }


def _panel(axes: Axes, recipes: list[RecipeReport], mode: Mode, colours: dict[Operation, str]) -> None:
    few = len(plot_style.PALETTE)
    named = list(colours.items())[:few]
    stacks = [(operation.name, colour, [operation]) for operation, colour in named]
    if rest := list(colours)[few:]:
        # One bar a role for all that are grey: hundreds of slivers would tell nothing, and take seconds to draw.
        stacks.append((REST, plot_style.GREY, rest))
    for place, recipe in enumerate(recipes):
        bottom = 0.0
        for name, colour, operations in stacks:
            found = [gemm_sums.of_operation(recipe, operation) for operation in operations]
            for role in ROLES:
                times = [gemm_sums.per_step(gemm_sums.of_role(rows, role), mode).value for rows in found]
                ms = math.fsum(time for time in times if time is not None)
                if all(time is None for time in times):
                    continue
                axes.bar(
                    place,
                    ms,
                    BAR,
                    bottom,
                    color=plot_style.lighter(colour, LIGHTEN[role]),
                    hatch=HATCH[role],
                    edgecolor="white" if not HATCH[role] else colour,
                    linewidth=0.4,
                    label=f"{name} {role}",
                )
                bottom += ms
        _label(axes, place, bottom, recipe, mode)
    names = [recipe.name for recipe in recipes]
    axes.set_xticks(range(len(names)), names, fontsize=9 if len(names) <= 4 else 8, parse_math=False)
    axes.set_xlim(-0.6, max(len(names), 1) - 0.4)
    axes.margins(y=0.14)
    axes.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)
    plot_style.plain(axes)


def _label(axes: Axes, place: int, top: float, recipe: RecipeReport, mode: Mode) -> None:
    speedup = _speedup(recipe, mode)
    text = words.bare(_total(recipe, mode)) + " ms"
    if speedup is not None and speedup.value is not None:
        text = f"{words.fixed(speedup.value, 2)}x\n{text}"
    elif recipe.baseline:
        text = f"baseline\n{text}"
    axes.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8.5)


def _legend_text(operation: Operation) -> str:
    """Name and shape, on one line if they are short."""
    text = f"{operation.name}  {operation.shape}"
    if len(text) <= LEGEND_CHARACTERS:
        return text
    return "\n".join([*textwrap.wrap(operation.name, LEGEND_CHARACTERS), operation.shape])


def _legend(figure: Canvas, colours: dict[Operation, str]) -> None:
    """Operations by colour, roles by shade."""
    shown = list(colours.items())[: len(plot_style.PALETTE)]
    handles = [Patch(color=colour, label=_legend_text(operation)) for operation, colour in shown]
    if len(colours) > len(shown):
        handles.append(Patch(color=plot_style.GREY, label=f"{REST} ({len(colours) - len(shown)})"))
    for role in ROLES:
        colour = plot_style.lighter(plot_style.INK, LIGHTEN[role])
        handles.append(Patch(facecolor=colour, edgecolor=plot_style.INK, linewidth=0.4, hatch=HATCH[role], label=role))
    for text in figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)


def _conclusion(report: Report) -> str:
    """`Best speedup of the GEMMs: 1.92x alone, 1.73x with quantization (fp8_delayed)`."""
    best: dict[str, tuple[float, str]] = {}
    for mode, _ in MODES:
        for recipe in plot_style.ran(report):
            speedup = _speedup(recipe, mode)
            if speedup is not None and speedup.value is not None and _total(recipe, mode).known:
                best[mode] = max(best.get(mode, (0.0, "")), (speedup.value, recipe.name))
    if not best:
        return f"Linear-layer GEMMs of one step: {report.baseline} has nothing to compare with"
    names = {name for _, name in best.values()}
    if all(value <= 1 for value, _ in best.values()):
        least = max(best.values())
        return f"No recipe makes the GEMMs faster: at best {words.fixed(least[0], 2)}x ({least[1]})"
    told = []
    for mode, text in (("kernel", "alone"), ("autocast", "with quantization")):
        if mode in best:
            value, name = best[mode]
            who = f" ({name})" if len(names) > 1 else ""
            told.append(f"{words.fixed(value, 2)}x {text}{who}")
    whose = f" ({names.pop()})" if len(names) == 1 else ""
    return f"Best speedup of the GEMMs: {', '.join(told)}{whose}"
