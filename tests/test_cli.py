"""The command line: what it loads, what it refuses, and with which exit code."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowprec_callback import __version__, cli
from lowprec_callback.recipes import RecipeError
from lowprec_callback.recording import RecordingError
from lowprec_callback.report import ReportError

HEAVY = ("torch", "transformer_engine", "lightning", "pydantic", "rich", "numpy", "matplotlib", "pynvml")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from lowprec_callback import cli\n"
        "try:\n"
        "    cli.main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.help in done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: lowprec {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lowprec_callback {__version__}\n"


def test_no_command_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: lowprec" in captured.err


@pytest.mark.parametrize("argv", [["dcotor"], ["doctor", "--jsno"], ["report"], ["report", "run", "--width", "twelve"]])
def test_bad_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == cli.BAD_INPUT
    assert "error: " in capsys.readouterr().err


Runs = Callable[[Callable[[argparse.Namespace], int]], None]


@pytest.fixture
def report_runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Put a function in the place of what `lowprec report` runs."""

    def put(run: Callable[[argparse.Namespace], int]) -> None:
        def add_parser(subparsers: Any) -> None:
            parser = subparsers.add_parser("report")
            parser.add_argument("path")
            parser.set_defaults(run=run)

        monkeypatch.setitem(cli.COMMANDS, "report", cli.Command("show a run again", add_parser))

    return put


def test_report_shows_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere"
    assert cli.main(["report", str(missing)]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"lowprec report: {missing}: cannot be read")


def test_a_command_says_how_it_ended(report_runs: Runs) -> None:
    report_runs(lambda args: 1)
    assert cli.main(["report", "run"]) == 1


@pytest.mark.parametrize("error", [RecipeError, RecordingError, ReportError])
def test_bad_input_is_one_sentence_and_exit_code_2(
    error: type[ValueError], report_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error(f"{args.path}: cannot be read")

    report_runs(run)
    assert cli.main(["report", "nowhere"]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "lowprec report: nowhere: cannot be read\n"


def test_a_bug_is_not_dressed_up_as_bad_input(report_runs: Runs) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ValueError("a bug")

    report_runs(run)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["report", "run"])


def test_an_interrupt_is_130(report_runs: Runs) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    report_runs(run)
    assert cli.main(["report", "run"]) == 130


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`lowprec report RUN | head -1`."""
    code = (
        "import sys\n"
        "from lowprec_callback import cli\n"
        "def add_parser(subparsers):\n"
        "    parser = subparsers.add_parser('report')\n"
        "    parser.set_defaults(run=lambda args: print('line\\n' * 100_000) or 0)\n"
        "cli.COMMANDS['report'] = cli.Command('', add_parser)\n"
        "sys.exit(cli.main(['report']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
