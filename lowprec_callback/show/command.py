"""`lowprec report RUN`: a Recording, analysed and shown again, without torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from lowprec_callback.files import why
from lowprec_callback.recording import finite
from lowprec_callback.report import FILE_NAME, Gap, Report, ReportError, load_report

NARROWEST = 40


class ShowError(Exception):
    """Something that the user must hear about in one sentence."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand `report`, for `lowprec_callback.cli`."""
    parser = subparsers.add_parser("report", description="Show a run again, from its Recording alone.")
    parser.add_argument("path", metavar="RUN", help=f"a run folder, its recording.jsonl, or a {FILE_NAME}")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of the page")
    parser.add_argument("--width", type=page_width, metavar="N", help="columns of the page (default: the terminal's)")
    parser.add_argument("--plots", action="store_true", help="write the plots as PNG beside the Recording")
    parser.add_argument("--html", action="store_true", help="write the page as report.html beside the Recording")
    parser.add_argument(
        "--gap",
        metavar="A:B",
        action="append",
        type=two_recipes,
        help="print only where the time between recipe A's step and recipe B's goes (may be given more than once)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the report; 0, or 2 with a sentence on standard error."""
    path = Path(args.path)
    try:
        plots, html = getattr(args, "plots", False), getattr(args, "html", False)
        report = _report(path)
        if getattr(args, "gap", None):
            _print_gaps([_gap(report, *names) for names in args.gap], json=args.json, width=args.width)
            return 0
        show(report, path, json=args.json, width=args.width, plots=plots, html=html)
    except ShowError as failure:
        print(f"lowprec report: {' '.join(str(failure).split())}", file=sys.stderr)
        return 2
    return 0


def show(report: Report, path: Path, *, json: bool, width: int | None, plots: bool, html: bool) -> None:
    """Print the page (or the JSON) of a report; then write its plots and its HTML page beside `path`.

    Standard error names each file that is there, and says why a plot is not.

    Raises:
        ShowError: plots or the page cannot be written. The others are there.
    """
    print_it(report, json=json, width=width)
    write(report, path if path.is_dir() else path.parent, plots=plots, html=html)


def print_it(report: Report, *, json: bool, width: int | None) -> None:
    """Print the page, or the JSON; it is out before anything follows on standard error."""
    if json:
        _print_json(report)
    else:
        _print_page(report, width)
    sys.stdout.flush()


def write(report: Report, folder: Path, *, plots: bool, html: bool) -> None:
    """Write the plots and the HTML page of a report into a folder, and name them on standard error.

    Raises:
        ShowError: some cannot be written. The others are there.
    """
    files: list[str] = []
    said: list[str] = []
    failed: list[str] = []
    if plots:
        from lowprec_callback.show.plots import save_all

        made = save_all(report, folder)
        files += [str(plot.path) for plot in made if plot.path]
        said += [f"no plot {plot.reason}" for plot in made if not plot.path and not plot.failed]
        broken = [plot.reason or plot.name for plot in made if plot.failed]
        failed += [f"{folder}: plots cannot be written: {', '.join(broken)}"] if broken else []
    if html:
        from lowprec_callback.show import html as page

        file = folder / page.FILE_NAME
        try:
            page.save(report, file, [str(file), *files, *said])
            files.insert(0, str(file))
        except OSError as error:
            failed.append(f"{file}: the page cannot be written ({why(error)})")
    for text in (*files, *said):
        print(text, file=sys.stderr)
    if failed:
        raise ShowError("; ".join(failed))


def _report(path: Path) -> Report:
    """The Report of a Recording, made now; or that of a report file, as it was saved."""
    from lowprec_callback.recording import RecordingError, read

    try:
        if path.suffix == ".json":
            return load_report(path)
        recording = read(path)
        from lowprec_callback.analyze.summary import analyze

        return analyze(recording)
    except (RecordingError, ReportError) as error:
        raise ShowError(str(error)) from error


def _gap(report: Report, first: str, second: str) -> Gap:
    """The gap between two recipes of a report.

    Raises:
        ShowError: one of them is not in the report, or did not run.
    """
    from lowprec_callback.analyze.gap import between

    sides = []
    for name in (first, second):
        try:
            part = report.recipe(name)
        except KeyError as error:
            raise ShowError(f"--gap: {error.args[0]}") from error
        if part.refusal is not None:
            raise ShowError(f"--gap: {name} did not run: {part.refusal}")
        sides.append(part)
    return between(*sides)


def _print_gaps(gaps: list[Gap], *, json: bool, width: int | None) -> None:
    if json:
        _print_json_text(as_json([finite(dataclasses.asdict(gap)) for gap in gaps]))
        return
    from rich.console import Console

    from lowprec_callback.show.console import Gaps

    Console(width=width).print(Gaps(gaps))


def _print_json(report: Report) -> None:
    _print_json_text(report.to_json())


def as_json(value: object) -> str:
    """Plain data as JSON text, as a report is saved."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _print_json_text(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), indent=1) + "\n"
    sys.stdout.write(text)


def _print_page(report: Report, width: int | None) -> None:
    from rich.console import Console

    from lowprec_callback.show.console import print_report

    print_report(report, Console(width=width))


def two_recipes(text: str) -> tuple[str, str]:
    """`mxfp8:nvfp4`; argparse turns the exception into a sentence and exit code 2."""
    first, _, second = text.partition(":")
    if not first or not second or ":" in second:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of recipes: write two names, as in mxfp8:nvfp4")
    if first == second:
        raise argparse.ArgumentTypeError(f"{text!r} names one recipe twice: a gap is between two")
    return first, second


def page_width(text: str) -> int:
    """A page width; argparse turns the exception into a sentence and exit code 2."""
    if not text.isascii() or not text.isdigit() or int(text) < NARROWEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no width: give a whole number of at least {NARROWEST}")
    return int(text)
