"""`lowprec report RUN`: the page from the Recording alone."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lowprec_callback.recording import End, Environment, Header, Model, Recorder, Recording, encode
from lowprec_callback.report import Report, ReportError
from lowprec_callback.show import command
from lowprec_callback.show.console import as_text
from lowprec_callback.show.html import as_html

from . import samples


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that was stopped right after it began."""
    folder = tmp_path / "run"
    with Recorder(folder / "recording.jsonl", "0.1.0", "2026-01-01T00:00:00+00:00") as recorder:
        recorder.add(
            Environment("a CPU", "cpu", versions={"torch": "2.11.0"}),
            Model("tiny", "plain_torch", "no TE here", 10, 40),
            End("interrupted", "KeyboardInterrupt"),
        )
    return folder


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An analysis that always answers with sample a."""
    fake = ModuleType("lowprec_callback.analyze.summary")

    def analyze(recording: Recording) -> Report:
        assert isinstance(recording, Recording)
        return samples.codonfm()

    fake.analyze = analyze  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lowprec_callback.analyze.summary", fake)
    return fake


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lowprec")
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["report", *words])


def main(*words: str) -> int:
    args = parse(*words)
    code: int = args.run(args)
    return code


@pytest.mark.usefixtures("summary")
def test_the_page(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(run_folder), "--width", "100") == 0
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines()] == as_text(samples.codonfm(), 100).splitlines()
    assert err == ""


@pytest.mark.usefixtures("summary")
def test_a_recording_may_be_named_by_its_file(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(run_folder / "recording.jsonl")) == 0
    assert "codonfm-5b" in capsys.readouterr().out


@pytest.mark.usefixtures("summary")
def test_arguments_without_plots_are_enough(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(path=str(run_folder), json=False, width=None)
    assert command.run(args) == 0
    assert "codonfm-5b" in capsys.readouterr().out


@pytest.mark.usefixtures("summary")
def test_json_is_the_report(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(run_folder), "--json") == 0
    assert capsys.readouterr().out == samples.codonfm().to_json()


@pytest.mark.usefixtures("summary")
def test_json_survives_an_output_that_only_knows_ascii(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(str(run_folder), "--json") == 0
        out.flush()
        assert json.loads(raw.getvalue()) == json.loads(samples.codonfm().to_json())
        monkeypatch.undo()


@pytest.mark.usefixtures("summary")
def test_plots_are_written_beside_the_recording_and_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(run_folder), "--plots", "--width", "160") == 0
    names = ["gap_waterfall.png", "gemm_times.png", "step_times.png"]
    assert sorted(path.name for path in run_folder.glob("*.png")) == names
    out, err = capsys.readouterr()
    assert "codonfm-5b" in out
    assert sorted(err.splitlines()) == [str(run_folder / name) for name in names]


@pytest.mark.usefixtures("summary")
def test_with_json_the_plots_are_named_on_stderr(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(run_folder), "--plots", "--json") == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err.splitlines() == [
        str(run_folder / f"{name}.png") for name in ("gemm_times", "gap_waterfall", "step_times")
    ]


@pytest.mark.usefixtures("summary")
def test_the_html_page_is_written_beside_the_recording_and_named(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(str(run_folder), "--html", "--json") == 0
    assert capsys.readouterr().err == f"{run_folder / 'report.html'}\n"
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    assert "codonfm-5b" in page
    assert str(run_folder / "report.html") in page


@pytest.mark.usefixtures("summary")
def test_a_page_that_cannot_be_written(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "report.html").mkdir()
    assert main(str(run_folder), "--html") == 2
    assert "the page cannot be written (Is a directory)" in one_sentence(capsys, page=True)


@pytest.mark.usefixtures("summary")
def test_what_cannot_be_written_takes_nothing_else_with_it(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replaced(source: Path, target: Path) -> None:
        if target.name in ("gap_waterfall.png", "report.html"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    assert main(str(run_folder), "--html", "--plots") == 2
    out, err = capsys.readouterr()
    assert "codonfm-5b" in out
    assert err.splitlines() == [
        str(run_folder / "gemm_times.png"),
        str(run_folder / "step_times.png"),
        f"lowprec report: {run_folder}: plots cannot be written: gap_waterfall: No space left on device; "
        f"{run_folder / 'report.html'}: the page cannot be written (No space left on device)",
    ]
    assert not [path.name for path in run_folder.iterdir() if path.name.startswith(".")]


def one_sentence(capsys: pytest.CaptureFixture[str], page: bool = False) -> str:
    """What was said on standard error; the page comes before it, or there is none."""
    out, err = capsys.readouterr()
    assert ("codonfm-5b" in out) if page else out == ""
    assert err.startswith("lowprec report: ")
    assert err.count("\n") == 1
    return err


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(tmp_path / "nowhere")) == 2
    assert "cannot be read" in one_sentence(capsys)


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(tmp_path)) == 2
    assert "recording.jsonl" in one_sentence(capsys)


def test_a_corrupt_recording(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_folder / "recording.jsonl"
    file.write_text(file.read_text().replace('"fact":"model"', '"fact":"mod'))
    assert main(str(run_folder)) == 2
    assert "line 3: corrupt" in one_sentence(capsys)


def test_a_newer_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recording.jsonl"
    file.write_text(encode(Header(999, "9.0.0", "2030-01-01T00:00:00+00:00")) + "\n")
    assert main(str(file)) == 2
    assert "upgrade lowprec_callback" in one_sentence(capsys)


def test_an_analysis_that_refuses(run_folder: Path, summary: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(recording: Recording) -> Report:
        raise ReportError("nothing\nto report")

    summary.analyze = refuse  # type: ignore[attr-defined]
    assert main(str(run_folder)) == 2
    assert one_sentence(capsys) == "lowprec report: nothing to report\n"


def test_a_saved_report_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples.seed().save(tmp_path / "report.json")
    assert main(str(tmp_path / "report.json"), "--width", "80") == 0
    page = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert page == as_text(samples.seed(), 80).splitlines()


def test_a_saved_report_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text("[]")
    assert main(str(tmp_path / "report.json")) == 2
    assert "no report" in one_sentence(capsys)


@pytest.mark.usefixtures("summary")
def test_plots_that_cannot_be_written(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "gemm_times.png").mkdir()
    assert main(str(run_folder), "--plots") == 2
    out, err = capsys.readouterr()
    assert "codonfm-5b" in out
    assert err.splitlines()[-1] == f"lowprec report: {run_folder}: plots cannot be written: gemm_times: Is a directory"
    assert (run_folder / "gap_waterfall.png").is_file()


@pytest.mark.parametrize("width", ["39", "-80", "wide", "8.5", "²"])
def test_a_width_that_is_none(width: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("run", f"--width={width}")
    assert stopped.value.code == 2
    assert "at least 40" in capsys.readouterr().err


def test_torch_is_not_imported(run_folder: Path) -> None:
    """With the real analysis, in a process of its own."""
    script = (
        "import argparse, sys\n"
        "from lowprec_callback.show import command\n"
        "parser = argparse.ArgumentParser()\n"
        "command.add_parser(parser.add_subparsers())\n"
        "args = parser.parse_args(['report', sys.argv[1], '--plots'])\n"
        "assert args.run(args) == 0\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('torch', 'transformer_engine')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run_folder)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stdout


def with_pairs() -> Report:
    """Sample a on a GPU that runs MXFP8 and NVFP4."""
    report = samples.codonfm()
    renamed = {"fp8_delayed": "mxfp8", "fp8_block": "nvfp4"}
    kept = [part for part in report.recipes if part.refusal is None]
    recipes = []
    for part in kept:
        name = renamed.get(part.name, part.name)
        recipes.append(replace(part, name=name, gap=replace(part.gap, recipe=name) if part.gap else None))
    return replace(report, recipes=(*recipes, replace(report.recipes[-1], name="fp4_extra")))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    with_pairs().save(tmp_path / "report.json")
    return str(tmp_path / "report.json")


def test_the_gap_between_two_recipes(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(saved, "--gap", "mxfp8:fp8_current", "--gap", "bf16:nvfp4", "--width", "80") == 0
    out = capsys.readouterr().out
    assert out.startswith("Where 513.0 ms became 539.2 (from mxfp8 to fp8_current)\n")
    assert "of mxfp8" in out
    assert "(from bf16 to nvfp4)" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "What to do" not in out


def test_the_gap_as_json(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(saved, "--gap", "mxfp8:nvfp4", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["baseline"], found["recipe"]) == ("mxfp8", "nvfp4")
    total = sum(term["ms"]["value"] for term in found["terms"])
    assert total == pytest.approx(found["end"]["value"] - found["start"]["value"])


@pytest.mark.parametrize(
    ("pair", "says"),
    [("mxfp8:fp8", "no recipe 'fp8' in this report; it has bf16"), ("fp4_extra:mxfp8", "fp4_extra did not run: ")],
)
def test_a_gap_that_cannot_be(saved: str, pair: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(saved, "--gap", pair) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


@pytest.mark.parametrize("pair", ["mxfp8", "a:b:c", "mxfp8:", "mxfp8:mxfp8"])
def test_a_pair_is_two_names(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("run", "--gap", pair)
    assert stop.value.code == 2
    assert "mxfp8" in capsys.readouterr().err or pair == "a:b:c"


def test_the_page_shows_mxfp8_against_nvfp4_and_folds_the_other_pairs() -> None:
    page = as_text(with_pairs(), 100)
    assert "(from mxfp8 to nvfp4)" in page
    assert "from mxfp8 to fp8_current" not in page
    html = as_html(with_pairs())
    assert "<summary>From mxfp8 to fp8_current</summary>" in html
    assert "<summary>From mxfp8 to nvfp4</summary>" not in html
    assert "(from mxfp8 to fp8_current)" in html
    assert "(from mxfp8 to nvfp4)" not in as_text(samples.codonfm(), 100)
