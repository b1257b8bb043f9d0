"""`lowprec compare A B`: faster, slower, same, or cannot tell; and gates for CI.

Exit codes: 0 compared, and every gate holds; 1 a gate does not hold; 2 not comparable, or bad input; 3 the evidence
that a gate needs is missing (before 1, if both are so).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowprec_callback.files import why, write_text

if TYPE_CHECKING:
    from lowprec_callback.analyze.compare import Comparison
    from lowprec_callback.analyze.gates import GateResult
    from lowprec_callback.report import Report

BROKEN, BAD_INPUT, MISSING = 1, 2, 3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand `compare`, for `lowprec_callback.cli`."""
    from lowprec_callback.analyze.compare import MARGIN
    from lowprec_callback.analyze.gates import GRAMMAR
    from lowprec_callback.show.command import page_width

    parser = subparsers.add_parser(
        "compare",
        description="Compare two runs: what became faster, slower, stayed the same, or cannot be told, by intervals.",
        epilog=f"Gates: {GRAMMAR}. Exit codes: 0 compared, and every gate holds; 1 a gate does not hold; 2 not "
        "comparable, or bad input; 3 the evidence that a gate needs is missing.".replace("%", "%%"),
        allow_abbrev=False,
    )
    what = "a run folder, its recording.jsonl, or a report.json"
    parser.add_argument("a", metavar="A", help=f"the run before: {what}")
    parser.add_argument("b", metavar="B", help="the run after")
    parser.add_argument(
        "--margin",
        type=_margin,
        default=MARGIN,
        metavar="SHARE",
        help=f"change that still counts as the same, like 0.01 or 1%% (default: {MARGIN:.0%}%)",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME,...",
        help="differences between the runs that do not matter, or whose effect is the question: version.torch, "
        "version, recipe.fp8_delayed, device, ...",
    )
    parser.add_argument(
        "--gate", action="append", default=[], metavar="GATE", help="a limit that B must keep (may be repeated)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the comparison as JSON (-: print it, not the page)")
    parser.add_argument("--width", type=page_width, metavar="N", help="columns of the page (default: the terminal's)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, show, and answer with the exit code of the module's docstring."""
    from lowprec_callback.analyze.comparable import NotComparable
    from lowprec_callback.analyze.compare import compare
    from lowprec_callback.analyze.gates import check, parse_gate

    allow = [name.strip() for names in args.allow for name in names.split(",") if name.strip()]
    try:
        gates = [parse_gate(text) for text in args.gate]
        comparison = compare(opened(Path(args.a)), opened(Path(args.b)), args.margin, allow)
    except NotComparable as error:
        differences = [dataclasses.asdict(each) for each in error.differences]
        lost = _written(args.json, {"comparable": False, "differences": differences})
        return _refuse(f"{error}. {lost}" if lost else str(error))
    except ValueError as error:  # a gate, a margin, a name, a Recording or a report that cannot be read
        return _refuse(str(error))
    results = check(comparison, gates)
    if args.json != "-":
        _print(comparison, results, (args.a, args.b), args.width)
        sys.stdout.flush()
    lost = _written(args.json, as_dict(comparison, results, (args.a, args.b)))
    for result in results:
        if result.state != "holds":
            said = "does not hold" if result.state == "broken" else "cannot be judged, its evidence is missing"
            print(f"lowprec compare: gate {result.gate} {said}: {' '.join(result.why.split())}", file=sys.stderr)
    if lost:
        return _refuse(lost)
    states = {result.state for result in results}
    return MISSING if "missing" in states else BROKEN if "broken" in states else 0


def opened(path: Path) -> Report:
    """The Report of a Recording, made now (so that both sides have the same analysis); else that of a report file.

    Raises:
        RecordingError, ReportError: it cannot be read.
    """
    from lowprec_callback import recording, report

    only_a_report = path.is_dir() and not (path / recording.FILE_NAME).exists() and (path / report.FILE_NAME).exists()
    if path.suffix == ".json" or only_a_report:
        return report.load_report(path)
    facts = recording.read(path)
    from lowprec_callback.analyze.summary import analyze

    return analyze(facts)


def as_dict(comparison: Comparison, results: Sequence[GateResult], names: tuple[str, str]) -> dict[str, Any]:
    """The comparison as plain data: what was compared, every change, every gate."""
    sides = {
        side: {
            "path": name,
            "created": report.created,
            "tool_version": report.tool_version,
            "model": report.model,
            "device": report.device,
            "versions": report.versions,
        }
        for side, name, report in zip("ab", names, (comparison.a, comparison.b), strict=True)
    }
    return {
        "comparable": True,
        **sides,
        "margin": comparison.margin,
        "differences": [dataclasses.asdict(each) for each in comparison.allowed],
        "changes": [dataclasses.asdict(each) for each in comparison.changes],
        "gates": [{**dataclasses.asdict(each), "gate": str(each.gate)} for each in results],
        "remarks": list(comparison.remarks),
    }


def _written(file: str | None, body: dict[str, Any]) -> str | None:
    """Write JSON where it was asked for; None, or why it could not be."""
    if file is None:
        return None
    text = json.dumps(body, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return None
    try:
        write_text(Path(file), text)
    except OSError as error:
        return f"{file}: cannot be written ({why(error)})"
    return None


def _print(comparison: Comparison, results: Sequence[GateResult], names: tuple[str, str], width: int | None) -> None:
    from rich.console import Console

    from lowprec_callback.show.compare_page import ComparePage

    Console(width=width, highlight=False).print(ComparePage(comparison, results, names))


def _margin(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no margin: give a share between 0 and 1, like 0.01 or 1%")
    return value


def _refuse(sentence: str) -> int:
    print(f"lowprec compare: {' '.join(sentence.split())}", file=sys.stderr)
    return BAD_INPUT
