"""Recording -> page, report.json, plots, HTML: the one place that does it.

    publish(recorder, Path("runs/mine"), say=print)

The page comes first, because it is the answer and needs no disk; then the files, each whole or not there. Whatever
happens on the way ends in a sentence about what is where, and the sentence is checked before it is said. Neither torch
nor Lightning is needed.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from lowprec_callback.failures import in_words
from lowprec_callback.files import why
from lowprec_callback.recording import FILE_NAME, Recorder, Recording
from lowprec_callback.report import FILE_NAME as REPORT
from lowprec_callback.show.terminal import beside_bars

if TYPE_CHECKING:
    from lowprec_callback.report import Report
    from lowprec_callback.show.plots import Plot

Say = Callable[[str], None]

HTML = "report.html"
"""The page's name; `show.html`, which writes it, loads matplotlib, and is asked only then."""


def publish(source: Recorder | Recording, folder: Path, *, say: Say, stream: IO[str] | None = None) -> Report | None:
    """Analyse, print the page on `stream` (default: standard output), write the files into `folder`, and name them.

    No exception comes out of it, since the training of which it is a guest goes on; what fails is told through `say`.
    Ctrl-C reaches the caller, but only when the page is out: while the report is made or printed, the first Ctrl-C
    starts that once more and the second one ends it. After Ctrl-C no further file is begun.

    Returns:
        The report; None if the facts could not be analysed.
    """
    report: Report | None = None
    stopped: KeyboardInterrupt | None = None
    printed = False
    while not printed:
        try:
            with heeded():
                report = report or _analysed(source)
                _print(report, say, stream)
                printed = True
        except KeyboardInterrupt as interrupt:
            if printed:
                stopped = interrupt
                continue
            if stopped is not None:
                say(f"lowprec: stopped before the page was out; {whereabouts(source)}")
                raise
            stopped = interrupt
            say("lowprec: the page still comes, then this stops; Ctrl-C again stops at once")
        except Exception as error:
            say(f"lowprec: the report could not be finished ({in_words(error)}); {whereabouts(source)}")
            break
    if stopped is not None:
        if report is not None:
            say(f"lowprec: stopped before the files of the report were written; {whereabouts(source)}")
        raise stopped
    if report is not None:
        write_files(report, folder, say)
    return report


@contextmanager
def heeded() -> Iterator[Callable[[], None]]:
    """Inside, no Ctrl-C is lost. Gives a function that raises the KeyboardInterrupt of one that was; so does the end.

    Python drops what is raised inside the callback of a weak reference or inside `__del__`, and a library may make an
    error of its own of it. While matplotlib draws, that befalls about one Ctrl-C of a hundred. Where Ctrl-C does not
    raise KeyboardInterrupt by Python's own handler, it is left to whoever handles it.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    except Exception:
        check()  # the error may be what has become of it
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _analysed(source: Recorder | Recording) -> Report:
    from lowprec_callback.analyze.summary import analyze

    return analyze(source.snapshot() if isinstance(source, Recorder) else source)


def _print(report: Report, say: Say, stream: IO[str] | None) -> None:
    """Print the page. A stream that is closed does not keep the files from coming."""
    try:
        from rich.console import Console

        from lowprec_callback.show.console import print_report

        class Guest(Console):
            def on_broken_pipe(self) -> None:
                """Of rich: it would end the whole process where nobody reads the page any more."""
                raise  # the error itself, as of any stream

        stream = sys.stdout if stream is None else stream
        with beside_bars(stream):
            print_report(report, Guest(file=stream))
            stream.flush()
    except Exception as error:
        say(f"lowprec: the page could not be printed ({why(error)})")


def whereabouts(source: Recorder | Recording) -> str:
    """Where the facts are and how to see them, as a clause. It holds at this moment: the disk is asked, not memory."""
    if source.path is None:
        return "what was measured is not on disk"
    known = len(source.snapshot() if isinstance(source, Recorder) else source)
    kept = source.kept() if isinstance(source, Recorder) else known if source.path.is_file() else 0
    again = shlex.quote(str(source.path.parent if source.path.name == FILE_NAME else source.path))
    if not kept:
        reason = source.lost if isinstance(source, Recorder) else None
        return f"nothing of what was measured is on disk ({reason or f'{source.path} is gone'})"
    if kept < known:
        return (
            f"of what was measured, {source.path} holds only the first {kept} of {known} lines: show them with "
            f"`lowprec report {again}`"
        )
    return f"all that was measured is in {source.path}: show it with `lowprec report {again}`"


@dataclass
class _Written:
    """The files that are there, and by reason those that are not."""

    names: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def one(self, name: str, write: Callable[[], object]) -> None:
        """Write one file, and note how it went."""
        try:
            write()
        except Exception as error:
            self.refuse(name, error)
        else:
            self.names.append(name)

    def refuse(self, name: str, error: Exception) -> None:
        """Note why a file is not there."""
        self.refused.setdefault(why(error), []).append(name)


def write_files(report: Report, folder: Path, say: Say) -> bool:
    """Write report.json, the plots and the HTML page; then name those that are there, and say why others are not.

    A plot for which a report has no data is not missing: the HTML page says why there is none.

    Returns:
        Whether everything could be written.

    Raises:
        KeyboardInterrupt: it came meanwhile. What is there is named all the same.
    """
    written = _Written()
    end = ", then this was stopped"
    try:
        with heeded() as check:
            with suppress(OSError):  # each file will say so
                folder.mkdir(parents=True, exist_ok=True)
            written.one(REPORT, lambda: report.save(folder / REPORT))
            check()
            _write_plots(report, folder, written)
            check()
            written.one(HTML, lambda: _write_html(report, folder, written.names))
        end = ""
    finally:
        if written.names:
            say(f"lowprec: written in {folder}: {', '.join(written.names)}{end}")
        elif end:
            say(f"lowprec: stopped before a file of the report was written in {folder}")
        for reason, names in written.refused.items():
            say(f"lowprec: {', '.join(names)} could not be written in {folder} ({reason})")
    return not written.refused


def _write_plots(report: Report, folder: Path, written: _Written) -> None:
    done: list[Plot] = []
    try:
        from lowprec_callback.show.plots import save_all

        save_all(report, folder, done)
    except Exception as error:  # matplotlib cannot be loaded
        written.refuse("the plots", error)
    finally:
        for plot in done:
            if plot.path is not None:
                written.names.append(plot.path.name)
            elif plot.failed:
                name, _, reason = (plot.reason or plot.name).partition(": ")
                written.refused.setdefault(reason, []).append(f"{name}.png")


def _write_html(report: Report, folder: Path, others: Sequence[str]) -> None:
    from lowprec_callback.show import html

    html.save(report, folder / html.FILE_NAME, [html.FILE_NAME, *others])
