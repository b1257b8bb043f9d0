"""Recording -> page, report.json, plots, HTML: the one place that does it.

    publish(recorder, Path("runs/mine"), say=print)

The page comes first, because it is the answer and needs no disk; then the files, each whole or not there. Whatever
happens on the way ends in a sentence about what is where, and the sentence is checked before it is said. Neither torch
nor Lightning is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from lowprec_callback.failures import in_words
from lowprec_callback.files import why
from lowprec_callback.recording import FILE_NAME, Recorder, Recording
from lowprec_callback.show.terminal import beside_bars

if TYPE_CHECKING:
    from lowprec_callback.report import Report

Say = Callable[[str], None]


def publish(source: Recorder | Recording, folder: Path, *, say: Say, stream: IO[str] | None = None) -> Report | None:
    """Analyse, print the page on `stream` (default: standard output), write the files into `folder`, and name them.

    No exception comes out of it, since the training of which it is a guest goes on; what fails is said by `say`. Ctrl-C
    is the user's word to the caller and goes on to it, but only when the page is out: a first Ctrl-C while the report is
    made begins that again, a second one ends it. After Ctrl-C no further file is begun.

    Returns:
        The report; None if the facts could not be analysed.
    """
    try:
        report, stopped = _on_the_terminal(source, say, stream)
    except KeyboardInterrupt:
        say(f"lowprec: stopped before the report was made; {whereabouts(source)}")
        raise
    except Exception as error:
        say(f"lowprec: the report could not be finished ({in_words(error)}); {whereabouts(source)}")
        return None
    if stopped is not None:
        say(f"lowprec: stopped before the files of the report were written; {whereabouts(source)}")
        raise stopped
    write_files(report, folder, say)
    return report


def _on_the_terminal(
    source: Recorder | Recording, say: Say, stream: IO[str] | None
) -> tuple[Report, KeyboardInterrupt | None]:
    """The report, when its page has been printed, and the interrupt that came meanwhile.

    Raises:
        KeyboardInterrupt: a second one came.
        Exception: the analysis failed.
    """
    report: Report | None = None
    stopped: KeyboardInterrupt | None = None
    while True:
        try:
            if report is None:
                report = _analysed(source)
            _print(report, say, stream)
            return report, stopped
        except KeyboardInterrupt as interrupt:
            if stopped is not None:
                raise
            stopped = interrupt
            say("lowprec: the page still comes, then this stops; Ctrl-C again stops at once")


def _analysed(source: Recorder | Recording) -> Report:
    from lowprec_callback.analyze.summary import analyze

    if isinstance(source, Recording):
        return analyze(source)
    facts = source.snapshot()
    # The page names the Recording's file: only one that is there.
    return analyze(facts if source.kept() else Recording(facts.numbered, None))


def _print(report: Report, say: Say, stream: IO[str] | None) -> None:
    """Print the page. A stream that is closed, or lacks what the page needs, does not keep the files from coming."""
    import sys

    try:
        from rich.console import Console

        from lowprec_callback.show.console import print_report

        with beside_bars(stream or sys.stdout):
            print_report(report, Console(file=stream))
            (stream or sys.stdout).flush()
    except Exception as error:
        say(f"lowprec: the page could not be printed ({why(error)})")


@dataclass
class _Written:
    """Which files are there, and which are not, by reason."""

    names: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def one(self, name: str, write: Callable[[], object]) -> None:
        """Write one file and note how it went."""
        try:
            write()
        except Exception as error:
            self.refuse(name, why(error))
        else:
            self.names.append(name)

    def refuse(self, name: str, reason: str) -> None:
        self.refused.setdefault(reason, []).append(name)


def write_files(report: Report, folder: Path, say: Say) -> bool:
    """Write report.json, the plots and the HTML page, then name those that are there, and say why others are not.

    Returns whether all could be written; a plot that has nothing to show is none of them.

    Raises:
        KeyboardInterrupt: it came meanwhile. What is there is named all the same.
    """
    written = _Written()
    try:
        _write_all(report, folder, written)
    except BaseException:
        say(_named(written.names, folder) + ", then this was stopped")
        raise
    finally:
        for reason, names in written.refused.items():
            say(f"lowprec: {_listed(names)} could not be written in {folder} ({reason})")
    if written.names:
        say(_named(written.names, folder))
    return not written.refused


def _write_all(report: Report, folder: Path, written: _Written) -> None:
    from lowprec_callback.report import FILE_NAME as REPORT

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass  # each file says so
    written.one(REPORT, lambda: report.save(folder / REPORT))
    _write_plots(report, folder, written)
    page = "report.html"

    def write_page() -> None:
        from lowprec_callback.show import html

        html.save(report, folder / page, [page, *written.names])

    written.one(page, write_page)


def _write_plots(report: Report, folder: Path, written: _Written) -> None:
    """Write the plots; those that are there when Ctrl-C comes are noted as well."""
    done: list[Plot] = []
    try:
        from lowprec_callback.show import plots
    except Exception as error:  # matplotlib cannot be loaded
        written.refuse("the plots", why(error))
        return
    try:
        done = list(plots.save_all(report, folder, done))
