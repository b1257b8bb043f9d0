"""The plots of a Report as PNG files: `gemm_times`, `gap_waterfall` and `step_times`.

for plot in save_all(report, Path("runs/mine/plots")):
    print(plot.path or plot.reason)
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from matplotlib.figure import Figure as Canvas

from lowprec_callback.files import why, write_bytes
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
    failed: bool = False
    """Whether it should be there and could not be drawn or written; else there is nothing to plot."""


def save(figure: Canvas, to: Path | IO[str], kind: str = "png", metadata: dict[str, None] | None = None) -> None:
    """Write a figure as PNG, or as another kind that matplotlib knows (pdf, svg).

    A file is whole or not there: the figure is drawn in memory first.

    Raises:
        OSError: it cannot be written. The file that was there is as it was.
    """
    out = io.BytesIO() if isinstance(to, Path) else to
    with warnings.catch_warnings():
        # A name may hold a character that the font lacks: it shows as a box, and that is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(out, format=kind, metadata=metadata)
    if isinstance(to, Path) and isinstance(out, io.BytesIO):
        write_bytes(to, out.getvalue())


def save_all(report: Report, folder: Path, done: list[Plot] | None = None) -> list[Plot]:
    """Draw all plots and write them into `folder` (made if need be). No plot keeps another one from being written.

    One without data, and one that fails, is left out with its reason. `done`, if given, is filled as plots come, for a
    caller who is interrupted and wants to know which are there.
    """
    plots: list[Plot] = [] if done is None else done
    for name, draw in ALL.items():
        path = folder / f"{name}.png"
        try:
            figure = draw(report)
            folder.mkdir(parents=True, exist_ok=True)
            save(figure, path)
        except NothingToPlot as nothing:
            plots.append(Plot(name, None, f"{name}: {nothing}"))
        except Exception as error:
            plots.append(Plot(name, None, f"{name}: {why(error)}", failed=True))
        else:
            plots.append(Plot(name, path, None))
    return plots
