"""Progress of the sweep for a person: a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from lowprec_callback.show.terminal import beside_bars, say

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["BarProgress", "LineProgress", "beside_bars", "make_progress", "say"]


class LineProgress:
    """One line whenever something new begins, at most one in a few seconds for the same thing."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._last: tuple[str, float] = ("", 0.0)

    def update(self, what: str, done: int, total: int) -> None:
        """See `sweep.Progress`."""
        begun = what.split(":", maxsplit=1)[0].rstrip("0123456789/ ")
        if begun == self._last[0] and time.monotonic() - self._last[1] < self._every_s:
            return
        self._last = (begun, time.monotonic())
        say(f"lowprec: step {done}/{total}, {what}")

    def close(self) -> None:
        """See `sweep.Progress`."""


class BarProgress:
    """A rich progress bar with the time that is left."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def update(self, what: str, done: int, total: int) -> None:
        """See `sweep.Progress`."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = (TextColumn("lowprec"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            what_runs = TextColumn("{task.description}", markup=False)  # a recipe's name may hold brackets
            self._bar = Progress(*columns, what_runs, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, description=what)

    def close(self) -> None:
        """See `sweep.Progress`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def make_progress(wanted: bool, other_bar: bool) -> LineProgress | BarProgress | None:
    """A bar if the terminal is ours alone, else lines: two live displays on one terminal break each other."""
    if not wanted:
        return None
    return BarProgress() if sys.stderr.isatty() and not other_bar else LineProgress()
