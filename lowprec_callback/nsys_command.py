"""`lowprec nsys`: a profiler's capture as a Recording and a report; and the command line to capture with.

A capture is read once. Which run folder was made of which file (by path, size and time of change) is noted in the
user's cache folder, so that a second look shows the report that is there. Nothing is written beside the capture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lowprec_callback.files import why, write_text
from lowprec_callback.run_folder import new_run_folder

if TYPE_CHECKING:
    from lowprec_callback.capture import Capture
    from lowprec_callback.recording import Recorder
    from lowprec_callback.report import Report

OUTPUT_DIR = "runs"
"""Where run folders are made; the callback's default as well."""


class _Failure(Exception):
    """Bad input, as one sentence."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand `nsys`, for `lowprec_callback.cli`."""
    from lowprec_callback.show.command import page_width

    parser = subparsers.add_parser(
        "nsys",
        usage="lowprec nsys [options] CAPTURE\n       lowprec nsys --command [--run] [--whole] -- python train.py ...",
        description="Read a capture of Nsight Systems or torch.profiler: make a Recording of it and show its report.",
        epilog="A second look at the same file shows the report that the first one made.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CAPTURE",
        help="an SQLite export of nsys, an .nsys-rep (where nsys is on the PATH), or a torch.profiler trace (.json or "
        ".json.gz)",
    )
    parser.add_argument("--recipe", metavar="NAME", help="what was asked for (a recipe or a card), if no range says it")
    parser.add_argument(
        "--output-dir",
        default=OUTPUT_DIR,
        metavar="FOLDER",
        help=f"where the run folder is made (default: {OUTPUT_DIR})",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of the page")
    parser.add_argument("--width", type=page_width, metavar="N", help="columns of the page (default: the terminal's)")
    parser.add_argument("--plots", action="store_true", help="write the plots as PNG beside the Recording")
    parser.add_argument("--html", action="store_true", help="write the page as report.html beside the Recording")
    group = parser.add_argument_group("capturing")
    group.add_argument(
        "--command", dest="capture_command", action="store_true", help="print the command line that captures a command"
    )
    group.add_argument("--run", dest="run_it", action="store_true", help="with --command: run it as well")
    group.add_argument(
        "--whole", action="store_true", help="capture from start to end, not from cudaProfilerStart to cudaProfilerStop"
    )
    group.add_argument(
        "--name", default="lowprec", metavar="NAME", help="the capture's file, NAME.nsys-rep (default: lowprec)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read and show, or capture; 2 with a sentence on standard error where that cannot be."""
    from lowprec_callback.capture_error import CaptureError
    from lowprec_callback.show.command import ShowError

    try:
        return _capture(args) if args.capture_command or args.run_it else _read(args)
    except (_Failure, CaptureError, ShowError) as error:
        print(f"lowprec nsys: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


# --- Capturing ----------------------------------------------------------------------------------------------


def _capture(args: argparse.Namespace) -> int:
    from lowprec_callback.nsight import capture_command

    if not args.words:
        raise _Failure("--command needs a command line after two hyphens: `lowprec nsys --command -- python train.py`")
    command = capture_command(args.words, args.name, whole=args.whole)
    print(shlex.join(command))
    if not args.run_it:
        return 0
    if shutil.which(command[0]) is None:
        raise _Failure("`nsys` is not on the PATH: install Nsight Systems, or run the command line where it is")
    sys.stdout.flush()
    code = subprocess.run(command, check=False).returncode
    report = Path(f"{args.name}.nsys-rep")
    if report.exists():
        print(f"lowprec nsys: read it with `lowprec nsys {shlex.quote(str(report))}`", file=sys.stderr)
    return code


# --- Reading ------------------------------------------------------------------------------------------------


def _read(args: argparse.Namespace) -> int:
    if len(args.words) != 1:
        raise _Failure("give one capture: an .sqlite export, an .nsys-rep or a torch.profiler trace")
    from lowprec_callback.report import FILE_NAME
    from lowprec_callback.show.command import print_it, show, write

    file = Path(args.words[0])
    if not file.is_file():
        raise _Failure(f"{file}: there is no such file")
    output = Path(args.output_dir)
    note = _note(file, output, args.recipe)
    folder = _known(note)
    if folder is not None:
        print(f"lowprec nsys: {file.name} was read before, into {folder}", file=sys.stderr)
        show(_own_report(folder), folder, json=args.json, width=args.width, plots=args.plots, html=args.html)
        return 0
    report, recorder, problem = _import(file, output, args.recipe)
    print_it(report, json=args.json, width=args.width)
    folder = recorder.path.parent
    if problem is None and recorder.kept() < len(recorder.snapshot()):
        problem = recorder.lost
    if problem is not None:
        raise _Failure(problem)
    if recorder.lost:  # but it is all in another place
        print(f"lowprec nsys: {recorder.lost}", file=sys.stderr)
    try:
        report.save(folder / FILE_NAME)
    except OSError as error:
        raise _Failure(f"{folder / FILE_NAME}: cannot be written ({why(error)})") from error
    _remember(note, folder)
    write(report, folder, plots=args.plots, html=args.html)
    return 0


def _own_report(folder: Path) -> Report:
    """The report of an earlier look. It was written by this very version, so it is not checked again."""
    from lowprec_callback.report import FILE_NAME, Report
    from lowprec_callback.report_types import rebuild

    report: Report = rebuild(Report, json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
    return report


def _import(file: Path, output: Path, recipe: str | None) -> tuple[Report, Recorder, str | None]:
    """Read a capture, and make its run folder with the Recording.

    The report, the closed Recorder, and why there is no folder: reading takes long, so the page is shown all the same.
    """
    import lowprec_callback
    from lowprec_callback import recording
    from lowprec_callback.analyze.summary import analyze
    from lowprec_callback.capture_facts import facts_of
    from lowprec_callback.recipes import RecipeError, load_cards, resolve

    cards = load_cards()
    name = None
    if recipe is not None:
        try:
            (card,) = resolve([recipe], "transformer_engine")
        except (RecipeError, ValueError) as error:
            raise _Failure(f"--recipe: {error}") from error
        cards[card.name], name = card, card.name
    found = facts_of(_open(file), cards, name)
    folder, problem = _new_folder(output, file.name.split(".")[0])
    home = (folder or output) / recording.FILE_NAME
    recorder = recording.Recorder(home, lowprec_callback.__version__, on_disk=folder is not None)
    with recorder:
        recorder.add(*found.facts)
    return analyze(recorder.snapshot()), recorder, problem


def _open(file: Path) -> Capture:
    """Read the file with the reader for its kind: by its first bytes, since names mislead."""
    from lowprec_callback import nsight

    if file.suffix in (".nsys-rep", ".qdrep"):
        with nsight.exported(file) as export:
            return nsight.read_export(export)
    try:
        with file.open("rb") as raw:
            start = raw.read(16)
    except OSError as error:
        raise _Failure(f"{file}: cannot be read ({error.strerror})") from error
    if start.startswith(b"SQLite format 3") or file.suffix in (".sqlite", ".sqlite3", ".db"):
        return nsight.read_export(file)
    from lowprec_callback.chrome_trace import read_trace

    return read_trace(file)


def _new_folder(output: Path, name: str) -> tuple[Path | None, str | None]:
    """A run folder, or why there is none."""
    clean = "".join(char if char.isalnum() or char in "-_" else "-" for char in name) or "capture"
    try:
        folder = new_run_folder(output, clean)
    except OSError as error:
        return None, f"{output}: cannot be written ({why(error)}); give another --output-dir"
    if folder is not None:
        return folder, None
    return None, f"{output}: a hundred runs of {name!r} in one second; give another --output-dir"


# --- What was read before -----------------------------------------------------------------------------------


def _note(file: Path, output: Path, recipe: str | None) -> Path | None:
    """Where it is noted which run folder was made of this file; None where there is no cache folder."""
    import lowprec_callback
    from lowprec_callback import recording, report

    versions = (lowprec_callback.__version__, recording.VERSION, report.VERSION)
    card = Path(recipe) if recipe else None
    state = file.stat()
    changed = card.stat().st_mtime_ns if card and card.is_file() else 0
    key = [str(file.resolve()), state.st_size, state.st_mtime_ns, str(output.resolve()), recipe, changed, *versions]
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    return cache / "lowprec_callback" / "captures" / f"{digest}.json"


def _known(note: Path | None) -> Path | None:
    """The run folder, if it is still whole."""
    from lowprec_callback import recording, report

    try:
        folder = Path(json.loads(note.read_text(encoding="utf-8"))["folder"]) if note else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = folder is not None and all((folder / name).is_file() for name in (recording.FILE_NAME, report.FILE_NAME))
    return folder if whole else None


def _remember(note: Path | None, folder: Path) -> None:
    """Note it. A cache that cannot be written costs the next look its speed, and nothing else."""
    if note is None:
        return
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps({"folder": str(folder.resolve())}))
