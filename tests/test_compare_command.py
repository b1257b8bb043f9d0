"""`lowprec compare A B`: from files, with exit codes for CI."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowprec_callback import cli, compare_command
from lowprec_callback.recording import Environment, Fact, Recorder
from tests.analyze.compared import report, with_recipe
from tests.analyze.recordings import BF16, DELAYED, gpu_facts

Capture = pytest.CaptureFixture[str]


def run_folder(folder: Path, fp8: float = 1.0, torch: str | None = None) -> str:
    """A run on an H200 whose FP8 step takes `fp8` times as long."""
    speeds = {"bf16": BF16, "fp8_delayed": replace(DELAYED, step_ms=DELAYED.step_ms * fp8)}
    facts: list[Fact] = gpu_facts(speeds=speeds)[1:]
    if torch:
        facts = [replace(f, versions={**f.versions, "torch": torch}) if isinstance(f, Environment) else f
                 for f in facts]  # fmt: skip
    with Recorder(folder / "recording.jsonl", "0.1.0", "2026-01-02T03:04:05+00:00") as recorder:
        recorder.add(*facts)
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("runs")
    made = {
        "a": run_folder(home / "a"),
        "again": run_folder(home / "again"),
        "slow": run_folder(home / "slow", 1.03),
        "upgrade": run_folder(home / "upgrade", 1.03, torch="2.12.0"),
    }
    # Reports alone, in a file and in a folder without a Recording.
    report(1).save(home / "one.json")
    (home / "folder").mkdir()
    report(50).save(home / "folder" / "report.json")
    lacking = with_recipe(report(50), "fp8_delayed", verdict=None)
    lacking.save(home / "lacking.json")
    return {
        **made, "one": str(home / "one.json"), "folder": str(home / "folder"), "lacking": str(home / "lacking.json")
    }  # fmt: skip


def compare(*words: str) -> int:
    return cli.main(["compare", *words, *([] if "--width" in words else ["--width", "100"])])


def test_the_same_twice_is_the_same(runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["again"]) == 0
    out, err = capsys.readouterr()
    assert "What changed from A to B" in out
    assert "slower\n" not in out
    assert err == ""


def test_a_planted_slowdown_is_slower_and_no_failure_by_itself(runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["slow"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  fp8_delayed")]
    assert "+3.0%" in row
    assert row.rstrip().endswith("slower")


@pytest.mark.parametrize(("a", "b"), [("one", "folder"), ("folder", "one")])
def test_reports_without_a_recording(a: str, b: str, runs: dict[str, str]) -> None:
    assert compare(runs[a], runs[b]) == 0


def test_a_recording_by_its_file(runs: dict[str, str]) -> None:
    assert compare(str(Path(runs["a"]) / "recording.jsonl"), runs["again"]) == 0


@pytest.mark.parametrize(
    ("gates", "code"),
    [
        (["step:fp8_delayed<=4%"], 0),
        (["step:fp8_delayed<=4%", "coverage:bf16>=99%", "speedup:fp8_delayed>=1.5x", "peak:bf16<=4GB"], 0),
        (["step:fp8_delayed<=2%"], 1),
        (["step:fp8_delayed<=4%", "step:fp8_delayed<=2%"], 1),
        (["step:nvfp4<=2%"], 3),
        (["step:fp8_delayed<=2%", "step:nvfp4<=2%"], 3),
        (["step:fp8_delayed<=4%", "step:fp8_delayed<2%"], 2),
    ],
)
def test_exit_codes(gates: list[str], code: int, runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["slow"], *(word for gate in gates for word in ("--gate", gate))) == code
    err = capsys.readouterr().err
    assert bool(err) == bool(code)
    assert err.count("\n") == (2 if len(gates) == 2 and code == 3 else bool(code))


def test_a_gate_that_does_not_hold_says_so_on_stderr(runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["slow"], "--gate", "step:fp8_delayed<=2%") == compare_command.BROKEN
    out, err = capsys.readouterr()
    assert err.startswith("lowprec compare: gate step:fp8_delayed<=2% does not hold: 3%, upper end of the 95% interval")
    assert "Gates\n  broken  step:fp8_delayed<=2%" in out


def test_missing_evidence_is_loud(runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["one"], runs["lacking"], "--gate", "coverage:fp8_delayed>=99%") == compare_command.MISSING
    err = capsys.readouterr().err
    assert "cannot be judged, its evidence is missing: B: there is no verdict" in err


def test_an_upgrade_is_refused_until_it_is_allowed(runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["upgrade"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "lowprec compare: not comparable: version.torch: 2.11.0 against 2.12.0. If a difference is what you ask "
        "about, allow it by name: --allow 'version.torch'\n"
    )
    for allow in ("version.torch", "version", "device, version.torch"):
        assert compare(runs["a"], runs["upgrade"], "--allow", allow) == 0
        assert "differs, as allowed: version.torch: 2.11.0 against 2.12.0" in capsys.readouterr().out


def test_json(runs: dict[str, str], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "compared.json"
    gate = "step:fp8_delayed<=2%"
    assert compare(runs["a"], runs["slow"], "--json", str(file), "--gate", gate) == 1
    body = json.loads(file.read_text())
    assert body["comparable"] is True
    assert (body["a"]["path"], body["b"]["path"], body["margin"]) == (runs["a"], runs["slow"], 0.01)
    (step,) = [each for each in body["changes"] if (each["metric"], each["recipe"]) == ("step", "fp8_delayed")]
    assert step["word"] == "slower"
    assert step["ratio"]["low"] < 1.03 < step["ratio"]["high"] < 1.04
    assert [(each["gate"], each["state"]) for each in body["gates"]] == [(gate, "broken")]
    capsys.readouterr()
    assert compare(runs["a"], runs["slow"], "--json", "-", "--gate", gate) == 1
    assert json.loads(capsys.readouterr().out) == body


def test_json_of_what_is_not_comparable(runs: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "compared.json"
    assert compare(runs["a"], runs["upgrade"], "--json", str(file)) == 2
    differences = [{"name": "version.torch", "a": "2.11.0", "b": "2.12.0"}]
    assert json.loads(file.read_text()) == {"comparable": False, "differences": differences}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gate", "step"], "a gate is METRIC:RECIPE<=LIMIT"),
        (["--allow", "torch"], "'torch' is no difference that can be allowed"),
    ],
)
def test_bad_input(words: list[str], sentence: str, runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["again"], *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_json_that_cannot_be_written_takes_no_page_away(runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["slow"], "--gate", "step:fp8_delayed<=1ms", "--json", "/dev/null/x.json") == 2
    out, err = capsys.readouterr()
    assert out.startswith("What changed from A to B")
    gate, refused = err.splitlines()
    assert "does not hold" in gate
    assert refused == "lowprec compare: /dev/null/x.json: cannot be written (Not a directory)"


def test_no_such_run(runs: dict[str, str], tmp_path: Path, capsys: Capture) -> None:
    for missing in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.json"):
        assert compare(runs["a"], str(missing)) == 2
        assert f"{missing}" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "share"), [("0.02", 0.02), ("2%", 0.02)])
def test_a_margin(text: str, share: float) -> None:
    assert compare_command._margin(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0", "100%", "-1%", "much", "nan", ""])
def test_a_margin_that_is_none(text: str, runs: dict[str, str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare(runs["a"], runs["again"], f"--margin={text}")
    assert stopped.value.code == 2
    assert "is no margin" in capsys.readouterr().err


def test_a_wide_margin_calls_it_the_same(runs: dict[str, str], capsys: Capture) -> None:
    assert compare(runs["a"], runs["slow"], "--margin", "5%") == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  fp8_delayed")]
    assert row.rstrip().endswith("same")
