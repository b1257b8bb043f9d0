"""The plots of a Report as PNG files: `gemm_times`, `gap_waterfall` and `step_times`.

for plot in save_all(report, Path("runs/mine/plots")):
    print(plot.path or plot.reason)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from matplotlib.figure import Figure as Canvas

from lowprec_callback.report import Report
from lowprec_callback.show.plot_gap import gap_waterfall
from lowprec_callback.show.plot_gemms import gemm_times
from lowprec_callback.show.plot_steps import step_times
from lowprec_callback.show.plot_style import NothingToPlot

__all__ = ["ALL", "NothingToPlot", "Plot", "gap_waterfall", "gemm_times", "save", "save_all", "step_times"]

ALL: dict[str, Callable[[Report], Canvas]] = {
    "gemm_times": gemm_times,
    "gap_waterfall": gap_waterfall,
    "step_times": step_times,
}


class Plot(NamedTuple):
    """A plot that was written, or the reason why it was not; exactly one of the two is given."""

    name: str
    path: Path | None
    reason: str | None


def save(figure: Canvas, to: Path | IO[str], kind: str = "png", metadata: dict[str, None] | None = None) -> None:
    """Write a figure as PNG, or as another kind that matplotlib knows (pdf, svg)."""
    with warnings.catch_warnings():
        # A name may hold a character that the font lacks: it shows as a box, and that is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(to, format=kind, metadata=metadata)


def save_all(report: Report, folder: Path) -> list[Plot]:
    """Write all plots into `folder` (made if need be); one without data is left out, with its reason."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: list[Plot] = []
    for name, draw in ALL.items():
        try:
            figure = draw(report)
        except NothingToPlot as nothing:
            plots.append(Plot(name, None, f"{name}: {nothing}"))
            continue
        path = folder / f"{name}.png"
        save(figure, path)
        plots.append(Plot(name, path, None))
    return plots
