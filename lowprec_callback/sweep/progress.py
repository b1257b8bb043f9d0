"""Progress of the sweep for a person: a bar of tqdm on a terminal and in a notebook, plain lines elsewhere.

The bar is tqdm's because Lightning's is, by default: two bars of tqdm know each other's lines, and stand one below the
other. A live display of rich knows nothing of them; where it owns the terminal, there are lines.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from contextlib import suppress
from typing import Any

from lowprec_callback.show.terminal import say

__all__ = ["LineProgress", "TqdmProgress", "make_progress", "say"]


class LineProgress:
    """One line whenever something new begins, at most one in a few seconds for the same thing."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._last: tuple[str, float] = ("", 0.0)

    def update(self, what: str, done: int, total: int) -> None:
        """See `sweep.Progress`."""
        begun = _begun(what)
        if begun == self._last[0] and time.monotonic() - self._last[1] < self._every_s:
            return
        self._last = (begun, time.monotonic())
        say(f"lowprec: step {done}/{total}, {what}")

    def close(self) -> None:
        """See `sweep.Progress`."""


class TqdmProgress:
    """A bar of tqdm, below those that are there: what runs, how far we are, and how long it takes yet.

        lowprec:  45%|████▌     | step 36/80, 00:15 left, fp8_delayed, round 2 of 3

    The time left is what the last ten or so updates give (`SMOOTHING`): a first step that compiles for a minute says
    little about the others. It is for a person only, so whatever goes wrong with it is passed over in silence.

    Args:
        notebook: whether a notebook shows it: a widget where ipywidgets is installed, as Lightning has it, else text.
    """

    def __init__(self, notebook: bool = False) -> None:
        self._notebook = notebook
        self._bar: Any = None
        self._what = ""
        self._over = False

    def update(self, what: str, done: int, total: int) -> None:
        """See `sweep.Progress`."""
        if self._over:
            return
        try:
            self._update(" ".join(what.split()), done, max(done, total, 1))
        except Exception:  # a terminal or a notebook that is gone
            self.close()

    def _update(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar, self._what = _open_bar(self._notebook, what, done, total), what
        bar, begins = self._bar, _begun(what) != _begun(self._what)
        self._what = what
        if total != bar.total:
            bar.total = total
            if (container := getattr(bar, "container", None)) is not None:
                container.children[-2].max = total  # the widget has a copy, for which tqdm has no setter
        bar.set_postfix_str(what, refresh=False)
        shown = bar.update(done - bar.n)
        if begins and not shown:  # however soon: its first step may be a long one
            bar.refresh()

    def close(self) -> None:
        """See `sweep.Progress`. The bar's line is empty then, and the cursor where it was before."""
        bar, self._bar, self._over = self._bar, None, True
        if bar is None:
            return
        with suppress(Exception):
            bar.total = bar.n  # a widget that is closed before its end stays, in red
            bar.close()


SMOOTHING = 0.1
"""Weight of the latest update in tqdm's estimate of the time left."""

REFRESH_S = 0.2
"""Seconds between two drawings of the bar, at least."""

FORMAT = "{l_bar}{bar}| step {n_fmt}/{total_fmt}, {remaining} left{postfix}"


def _open_bar(notebook: bool, what: str, done: int, total: int) -> Any:
    widgets = notebook and importlib.util.find_spec("ipywidgets") is not None
    tqdm: Any = importlib.import_module("tqdm.auto" if widgets else "tqdm").tqdm
    tqdm.get_lock()  # of all bars; asked for by our class first, it would be of ours alone
    # No thread watches over it: an update is shown when it comes, or with the next.
    kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    return kind(
        desc="lowprec",
        total=total,
        initial=done,
        postfix=what,
        file=_Unbreakable(sys.stderr),
        leave=False,
        dynamic_ncols=True,
        miniters=0,  # an update may come without a step, while GEMMs are timed
        mininterval=REFRESH_S,
        smoothing=SMOOTHING,
        bar_format=FORMAT,
        # In a notebook's output nothing moves the cursor up again, and Lightning's bar is in another output.
        position=0 if notebook else None,
    )


class _Unbreakable:
    """A stream that takes everything, also where the one behind it is closed, full or broken.

    tqdm holds a lock of all its bars while it writes, and keeps it if that raises.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        """As tqdm asks whether a line is written to the stream that a bar is on."""
        return bool(self._stream == (other._stream if isinstance(other, _Unbreakable) else other))

    def __hash__(self) -> int:
        return hash(self._stream)


def _begun(what: str) -> str:
    """What has begun, without how far it is: "benchmark 3/27: bf16 64x64x64" is as "benchmark 4/27: ..."."""
    return what.split(":", maxsplit=1)[0].rstrip("0123456789/ ")


def make_progress(wanted: bool, rich_display: bool = False) -> LineProgress | TqdmProgress | None:
    """A bar in a notebook and on a terminal, else lines, which also a log file can hold.

    Args:
        wanted: whether there is to be any progress.
        rich_display: whether a live display of rich (Lightning's RichProgressBar) is on the terminal. It and a bar of
            tqdm would write over each other, so there are lines then.
    """
    if not wanted:
        return None
    if _in_notebook():
        return TqdmProgress(notebook=True)
    return TqdmProgress() if _on_terminal() and not rich_display else LineProgress()


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # there is none (pythonw), or it is closed
        return False


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter's, or of Colab's, runs us: then IPython is loaded, and its shell has the kernel."""
    try:
        shell = sys.modules["IPython"].get_ipython()
        return type(shell).__name__ == "ZMQInteractiveShell" or bool(shell.has_trait("kernel"))
    except Exception:  # no IPython, no shell, or one of another kind
        return False
