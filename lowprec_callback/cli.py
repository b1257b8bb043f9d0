"""The command `lowprec`.

Each subcommand lives in a module of its own that is imported only when it is asked for, so that
`lowprec --help` answers at once. Such a module has `add_parser(subparsers)`, which adds its parser and sets
the default `run`: a function from the parsed arguments to the exit code. To add a subcommand, add a line to
`COMMANDS`.

Exit codes: 0 done; 1 the command ran and its answer is no; 2 bad input, with one sentence on stderr; 3 the
evidence for an answer is missing (`compare`); 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from lowprec_callback import __version__

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

BAD_INPUT = 2


class Command(NamedTuple):
    """A subcommand: one line of help, and what adds its parser."""

    help: str
    add_parser: Callable[[Subparsers], None]


def _in(module: str) -> Callable[[Subparsers], None]:
    """`add_parser` of a module that is imported when it is called."""

    def add_parser(subparsers: Subparsers) -> None:
        import_module(module).add_parser(subparsers)

    return add_parser


COMMANDS: dict[str, Command] = {
    "compare": Command("compare two runs, and hold limits for CI", _in("lowprec_callback.compare_command")),
    "doctor": Command("what this machine can run, and why not the rest", _in("lowprec_callback.doctor")),
    "gemm": Command("time a model's GEMMs by themselves, under each recipe", _in("lowprec_callback.gemm_command")),
    "nsys": Command("read a capture of Nsight Systems or torch.profiler", _in("lowprec_callback.nsys_command")),
    "report": Command("show a run again, from its Recording alone", _in("lowprec_callback.show.command")),
}


def build_parser(wanted: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the wanted subcommand and only the help lines of the others."""
    parser = argparse.ArgumentParser(
        prog="lowprec",
        description="What each low-precision recipe really gains, and whether it really ran.",
    )
    parser.add_argument("--version", action="version", version=f"lowprec_callback {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        if name == wanted:
            command.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lowprec` with the given arguments (default: the process's own) and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(argv[0] if argv else None)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    from lowprec_callback.recipes import RecipeError
    from lowprec_callback.recording import RecordingError
    from lowprec_callback.report import ReportError

    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except (RecipeError, RecordingError, ReportError) as error:
        print(f"lowprec {args.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `lowprec report RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
