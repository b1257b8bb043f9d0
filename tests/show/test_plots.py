"""The plots: that they draw the Report's figures, and nothing that is not in it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from lowprec_callback.recording import ROLES, Mode
from lowprec_callback.report import Figure, GemmRow, Report
from lowprec_callback.show import gemm_sums, plot_style, plots
from lowprec_callback.show.plot_gemms import REST
from lowprec_callback.show.plots import NothingToPlot

from . import samples
from .sample_strategies import reports

PNG = b"\x89PNG\r\n\x1a\n"


def bars(axes: Axes) -> list[BarContainer]:
    return [container for container in axes.containers if isinstance(container, BarContainer)]


def ticks(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def footnote(figure: Canvas) -> str:
    """All text at the bottom, with its line breaks taken out."""
    return " ".join(figure.get_supxlabel().split())


@pytest.mark.parametrize("name", ["codonfm", "seed", "cpu"])
def test_bars_stack_up_to_the_figures_of_the_report(name: str) -> None:
    report = samples.ALL[name]()
    ran = [recipe for recipe in report.recipes if recipe.refusal is None]
    panels = plots.gemm_times(report).axes
    modes: tuple[Mode, Mode] = ("kernel", "autocast")
    for axes, mode in zip(panels, modes, strict=True):
        assert ticks(axes) == [recipe.name for recipe in ran]
        drawn = {}
        for container in bars(axes):
            (patch,) = container.patches
            place = round(patch.get_x() + patch.get_width() / 2)
            drawn[ran[place].name, container.get_label()] = patch.get_height()
        for recipe in ran:
            for operation in gemm_sums.operations(report):
                for role in ROLES:
                    rows = gemm_sums.of_role(gemm_sums.of_operation(recipe, operation), role)
                    wanted = sum(row.calls * (gemm_sums.per_call(row, mode).value or 0.0) for row in rows)
                    assert drawn.pop((recipe.name, f"{operation.name} {role}")) == pytest.approx(wanted)
        assert not drawn


def test_operations_beyond_the_colours_share_one_bar_a_role() -> None:
    report = samples.codonfm()
    ms = Figure(2.0, "ms")
    rows = tuple(GemmRow(f"layers.{i}", role, 64, 32, 16, 3, ms, ms) for i in range(20) for role in ROLES)
    recipes = tuple(replace(recipe, gemms=rows) if recipe.gemms else recipe for recipe in report.recipes)
    axes = plots.gemm_times(replace(report, recipes=recipes)).axes[0]
    found = [(str(bar.get_label()), bar.patches[0].get_height()) for bar in bars(axes)][: len(bars(axes)) // 4]
    few = len(plot_style.PALETTE)
    assert len(found) == (few + 1) * len(ROLES)
    assert [height for _, height in found[:-3]] == pytest.approx([6.0] * few * 3)
    assert [label for label, _ in found[-3:]] == [f"{REST} {role}" for role in ROLES]
    assert [height for _, height in found[-3:]] == pytest.approx([6.0 * (20 - few)] * 3)


def test_the_speedup_stands_over_each_bar() -> None:
    kernel, autocast = plots.gemm_times(samples.codonfm()).axes
    texts = [text.get_text() for text in kernel.texts]
    assert texts == ["baseline\n621.4 ms", "1.92x\n323.6 ms", "1.92x\n323.6 ms", "1.53x\n405.7 ms"]
    assert [text.get_text().split("\n")[0] for text in autocast.texts] == ["baseline", "1.73x", "1.66x", "1.39x"]


def test_a_recipe_without_a_benchmark_has_no_bar_but_a_reason() -> None:
    figure = plots.gemm_times(samples.interrupted())
    kernel, autocast = figure.axes
    assert ticks(kernel) == ["bf16", "fp8_delayed"]
    assert ticks(autocast) == ["bf16", "fp8_delayed", "fp8_current"]
    assert all(patch.get_height() > 0 for axes in figure.axes for bar in bars(axes) for patch in bar.patches)
    assert "fp8_current not shown (GEMM only): a term of the sum is missing: cublasLt" in footnote(figure)
    assert "fp8_block not shown: the run was interrupted before its benchmark" in footnote(figure)


def test_launch_bound_bars_are_named() -> None:
    assert "launch-bound in fp8_delayed, fp8_current and fp8_block" in footnote(plots.gemm_times(samples.seed()))


def waterfall(axes: Axes) -> tuple[list[tuple[str, float, float]], list[str]]:
    """(label, from, to) of all bars, and the names of the rows."""
    found = []
    for container in bars(axes):
        (patch,) = container.patches
        found.append((str(container.get_label()), patch.get_x(), patch.get_x() + patch.get_width()))
    return found, [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]


@pytest.mark.parametrize("name", ["codonfm", "seed", "cpu"])
def test_the_waterfall_leads_from_step_to_step(name: str) -> None:
    report = samples.ALL[name]()
    gaps = [recipe.gap for recipe in report.recipes if recipe.gap is not None]
    panels = plots.gap_waterfall(report).axes
    for axes, gap in zip(panels, gaps, strict=True):
        drawn, rows = waterfall(axes)
        assert rows == [f"{gap.baseline} step", *(term.name for term in gap.terms), f"{gap.recipe} step"]
        assert drawn[0] == ("start", 0, gap.start.value)
        assert drawn[-1] == ("end", 0, gap.end.value)
        level = gap.start.value
        for (label, start, end), term in zip(drawn[1:-1], gap.terms, strict=True):
            assert label == term.name
            assert start == pytest.approx(level)
            assert end - start == pytest.approx(term.ms.value)
            level = end
        assert level == pytest.approx(gap.end.value)


def test_a_missing_term_has_a_row_and_a_reason_but_no_bar() -> None:
    figure = plots.gap_waterfall(samples.interrupted())
    (axes,) = figure.axes
    drawn, rows = waterfall(axes)
    assert "quantization" in rows
    assert "quantization" not in [label for label, _, _ in drawn]
    assert drawn[-1] == ("end", 0, 513.0)
    assert "not close" in axes.get_title(loc="left")
    assert "fp8_delayed, quantization not known: the trace lost kernels" in footnote(figure)
    assert "fp8_current not shown: no ledger: the run was interrupted" in footnote(figure)


def test_every_step_is_a_dot_and_the_median_a_line() -> None:
    report = samples.codonfm()
    left, right = plots.step_times(report).axes
    lines = {str(line.get_label()): line for line in left.get_lines() if isinstance(line, Line2D)}
    medians = [line.get_xdata()[0] for line in left.get_lines() if line.get_label() == "median"]
    ran = [recipe for recipe in report.recipes if recipe.samples]
    assert medians == [recipe.step_ms.value for recipe in ran]
    relative = {str(line.get_label()): line for line in right.get_lines()}
    for recipe in ran:
        assert recipe.step_ms.value is not None
        for number, times in recipe.samples:
            label = f"{recipe.name} round {number}"
            assert tuple(lines[label].get_xdata()) == times
            percent = [(ms / recipe.step_ms.value - 1) * 100 for ms in times]
            assert list(relative[label].get_xdata()) == pytest.approx(percent)


def test_a_recipe_that_was_never_timed_is_named() -> None:
    figure = plots.step_times(samples.interrupted())
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["bf16", "fp8_delayed", "fp8_current"]
    assert "fp8_block not shown: the run was interrupted before its first timed step" in footnote(figure)


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        (
            "codonfm",
            (
                "Best speedup of the GEMMs: 1.92x alone, 1.73x with quantization (fp8_delayed)",
                "819.2 ms became 513.0 with fp8_delayed (1.60x)",
                "Shortest step with fp8_delayed: median 513.0 ms against 819.2 (bf16)",
            ),
        ),
        (
            "seed",
            (
                "Best speedup of the GEMMs: 1.58x alone, 1.04x with quantization (fp8_delayed)",
                "No recipe is faster: 27.0 ms became 34.5 with fp8_block (0.78x)",
                "Shortest step with bf16: median 27.0 ms against 34.5 (fp8_block)",
            ),
        ),
    ],
)
def test_titles_are_conclusions(name: str, titles: tuple[str, ...]) -> None:
    report = samples.ALL[name]()
    drawn = [draw(report).get_suptitle().replace("\n", " ") for draw in plots.ALL.values()]
    assert drawn == list(titles)


@pytest.mark.parametrize(
    ("speedup", "gap", "steps"),
    [
        (
            Figure(1.24, "x", low=0.9, high=1.6),
            "No clear difference: 48.3 ms became 39.0 with bf16 (1.24x)",
            "No clear difference: bf16 median 39.0 ms against 48.3 (fp32)",
        ),
        (
            Figure(1.24, "x"),
            "48.3 ms became 39.0 with bf16 (1.24x)",
            "Steps with bf16: median 39.0 ms against 48.3 (fp32)",
        ),
    ],
)
def test_titles_claim_no_more_than_the_interval_allows(speedup: Figure, gap: str, steps: str) -> None:
    report = samples.cpu()
    fp32, bf16, *others = report.recipes
    assert bf16.speedups is not None
    vague = replace(bf16, speedups=replace(bf16.speedups, step=speedup))
    report = replace(report, recipes=(fp32, vague, *others))
    assert plots.gap_waterfall(report).get_suptitle() == gap
    assert plots.step_times(report).get_suptitle() == steps


@pytest.mark.parametrize("name", samples.ALL)
def test_axes_carry_units(name: str) -> None:
    report = samples.ALL[name]()
    assert "ms" in plots.gemm_times(report).axes[0].get_ylabel()
    assert "ms" in plots.gap_waterfall(report).axes[-1].get_xlabel()
    assert [axes.get_xlabel()[-2:] for axes in plots.step_times(report).axes] == ["ms", " %"]


def test_save_all_writes_the_files(tmp_path: Path) -> None:
    saved = plots.save_all(samples.codonfm(), tmp_path / "new")
    assert [plot.name for plot in saved] == ["gemm_times", "gap_waterfall", "step_times"]
    for plot in saved:
        assert plot.path == tmp_path / "new" / f"{plot.name}.png"
        assert plot.path.read_bytes().startswith(PNG)
        assert plot.reason is None


def bare(report: Report) -> Report:
    """Nothing but names."""
    missing = Figure.missing("ms", "the run died")
    return replace(
        report,
        recipes=tuple(
            replace(
                recipe,
                step_ms=missing,
                samples=(),
                gemms=(),
                gemm_kernel_ms=missing,
                gemm_autocast_ms=missing,
                gap=None,
                speedups=None,
            )
            for recipe in report.recipes
        ),
    )


def test_a_plot_without_data_is_left_out_with_its_reason(tmp_path: Path) -> None:
    saved = plots.save_all(bare(samples.codonfm()), tmp_path)
    assert [plot.path for plot in saved] == [None, None, None]
    assert [plot.reason for plot in saved] == [
        "gemm_times: no recipe has a complete GEMM benchmark",
        "gap_waterfall: no recipe has a gap",
        "step_times: no recipe has a timed step",
    ]
    assert list(tmp_path.iterdir()) == []


def test_names_are_text_and_not_formulas_and_may_need_other_fonts(tmp_path: Path) -> None:
    report = replace(samples.cpu(), model="$x^{2$ 模型")
    assert all(plot.path for plot in plots.save_all(report, tmp_path))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reports())
def test_whatever_is_missing_each_plot_is_drawn_or_says_why_not(report: Report) -> None:
    for draw in plots.ALL.values():
        why = ""
        try:
            draw(report).draw_without_rendering()
        except NothingToPlot as nothing:
            why = str(nothing) or "no reason"
        assert why != "no reason"


def test_no_global_state() -> None:
    script = (
        "import sys; from lowprec_callback.show import plots; "
        "sys.exit(sum(name in sys.modules for name in ('matplotlib.pyplot', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0


def test_steps_of_no_length_have_an_axis_all_the_same() -> None:
    report = samples.cpu()
    fp32, bf16, *others = report.recipes
    assert bf16.gap is not None
    zero = Figure(0.0, "ms")
    terms = tuple(replace(term, ms=zero) for term in bf16.gap.terms)
    nothing = replace(bf16, gap=replace(bf16.gap, start=zero, end=zero, terms=terms))
    figure = plots.gap_waterfall(replace(report, recipes=(fp32, nothing, *others)))
    assert figure.axes[0].get_xlim() == (0.0, 1.0)
