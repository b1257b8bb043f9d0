"""`lowprec nsys`: captures of every kind in, pages out, once read and then remembered."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lowprec_callback import nsys_command, report
from lowprec_callback.cli import main
from lowprec_callback.recording import Imported, read
from lowprec_callback.report import load_report
from lowprec_callback.report_types import rebuild
from tests.nsight_writer import Export, training

DATA = Path(__file__).parent / "data" / "h200"


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def two_recipes(tmp_path: Path) -> Path:
    export = Export()
    end = training(export, "bf16", 6, slow=400_000)
    training(export, "fp8_delayed", 6, end)
    (tmp_path / "in").mkdir()
    return export.write(tmp_path / "in" / "two.sqlite")


def page(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    assert main(["nsys", *arguments]) == code
    out, err = capsys.readouterr()
    return " ".join(out.split()), " ".join(err.split())


def test_two_recipes_and_the_gap_between_them(two_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = page([str(two_recipes), "--width", "100"], capsys)
    assert "fp8_delayed makes a step 1.40x faster (1.40 -> 1.00 ms)" in out
    assert "Where 1.400 ms became 1.000 (fp8_delayed)" in out or "Where 1.40 ms became 1.00 (fp8_delayed)" in out
    assert "By kernel names alone, all 3 linear-layer GEMM kernels a step ran in FP8" in out
    (folder,) = Path(nsys_command.OUTPUT_DIR).iterdir()
    found = load_report(folder)
    gap = found.recipe("fp8_delayed").gap
    assert gap is not None
    assert gap.missing is None
    ledger = found.recipe("fp8_delayed").ledger
    assert ledger is not None
    assert {name: round(figure.value or 0, 4) for name, figure in ledger.buckets.items() if figure.value} == {
        "gemm": 0.3,
        "quantize": 0.02,
        "optimizer": 0.05,
    }
    assert read(folder).of(Imported)[0].recipe_from == "ranges"


def test_a_second_look_reads_nothing(
    two_recipes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = page([str(two_recipes)], capsys)
    before = sorted(path.name for path in two_recipes.parent.iterdir())
    monkeypatch.setattr(nsys_command, "_import", lambda *_: pytest.fail("read again"))
    second, err = page([str(two_recipes)], capsys)
    assert second == first
    assert "was read before" in err
    assert sorted(path.name for path in two_recipes.parent.iterdir()) == before == ["two.sqlite"]


def folders() -> int:
    return len(list(Path(nsys_command.OUTPUT_DIR).iterdir()))


def test_what_makes_it_read_again(two_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page([str(two_recipes)], capsys)
    page([str(two_recipes), "--recipe", "fp8_delayed"], capsys)
    assert folders() == 2
    os.utime(two_recipes, ns=(1, 1))
    page([str(two_recipes)], capsys)
    assert folders() == 3
    (next(Path(nsys_command.OUTPUT_DIR).iterdir()) / "report.json").unlink()
    for _ in range(2):
        page([str(two_recipes)], capsys)
        page([str(two_recipes), "--output-dir", "elsewhere"], capsys)
    assert len(list(Path("elsewhere").iterdir())) == 1


def test_a_cache_that_cannot_be_written_or_read(
    two_recipes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    page([str(two_recipes)], capsys)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "torn"))
    page([str(two_recipes)], capsys)
    (note,) = (tmp_path / "torn").rglob("*.json")
    note.write_text("{", encoding="utf-8")
    page([str(two_recipes)], capsys)
    assert folders() == 3


@pytest.mark.parametrize(
    "name", ["nsys_transformer_layer_fp8_delayed.sqlite.gz", "torch_trace_2048x12_fp8_current.json.gz"]
)
def test_the_real_captures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / name
    if name.endswith(".sqlite.gz"):
        path = tmp_path / "layer.sqlite"
        path.write_bytes(gzip.decompress((DATA / name).read_bytes()))
    out, _ = page([str(path), "--width", "100"], capsys)
    asked = "fp8_delayed" if "delayed" in name else "fp8_current"
    kernels = 12 if "delayed" in name else 144
    assert f"By kernel names alone, all {kernels} linear-layer GEMM kernels a step ran in FP8" in out
    assert "(forward e4m3 x e4m3, backward e4m3 x e5m2)" in out
    assert f"{asked} is inferred" in out
    assert "slow path attention ran unfused" in out


def test_json(two_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nsys", str(two_recipes), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "imported"


def test_the_recipe_that_the_user_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = Export()
    training(export, "bf16", 3)
    path = export.write(tmp_path / "x.sqlite", without=("NVTX_EVENTS",))
    out, _ = page([str(path), "--recipe", "fp8_delayed", "--width", "100"], capsys)
    assert "0 of 9 GEMM kernels a step ran in FP8" in out
    assert "unproven" in out
    _, err = page([str(path), "--recipe", "fp9"], capsys, code=2)
    assert "no recipe 'fp9'" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one capture"),
        (["a", "b"], "give one capture"),
        (["nowhere.sqlite"], "there is no such file"),
        (["--command"], "needs a command line after two hyphens"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = page(arguments, capsys, code=2)
    assert says in err
    assert not out
    assert err.startswith("lowprec nsys: ")


@pytest.mark.parametrize(
    "content", [b"", b"SQLite format 3\0" + b"\0" * 200, b"\x1f\x8bnope", b'{"traceEvents": [', b"\xff\xfe"]
)
@pytest.mark.parametrize("suffix", [".sqlite", ".json", ".json.gz", ""])
def test_broken_files_get_a_sentence(
    content: bytes, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    out, err = page([str(path)], capsys, code=2)
    assert not out
    assert err.count("lowprec nsys: ") == 1
    assert not Path(nsys_command.OUTPUT_DIR).exists()


def test_a_folder_that_cannot_be_written(two_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file", encoding="utf-8")
    out, err = page([str(two_recipes), "--output-dir", "taken"], capsys, code=2)
    assert "taken: cannot be written" in err
    assert "fp8_delayed makes a step 1.40x faster" in out  # reading took long: the page is shown all the same
    assert "Recording not on disk" in out


def test_a_report_that_cannot_be_written_takes_no_page_away(
    two_recipes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    out, err = page([str(two_recipes), "--html"], capsys, code=2)
    assert "fp8_delayed makes a step 1.40x faster" in out
    (folder,) = Path(nsys_command.OUTPUT_DIR).iterdir()
    assert err == f"lowprec nsys: {folder / 'report.json'}: cannot be written (No space left on device)"
    assert [path.name for path in folder.iterdir()] == ["recording.jsonl"]
    monkeypatch.undo()


def test_a_recording_that_had_to_move_is_told(
    two_recipes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setattr(nsys_command, "new_run_folder", lambda *_: Path("/dev/null/run"))
    out, err = page([str(two_recipes)], capsys)
    (folder,) = elsewhere.iterdir()
    assert "fp8_delayed makes a step 1.40x faster" in out
    assert err.endswith(f"all facts are in {folder / 'recording.jsonl'}")
    assert sorted(path.name for path in folder.iterdir()) == ["recording.jsonl", "report.json"]


# -- capturing -------------------------------------------------------------------------------------------------------


def test_the_command_line_is_printed_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = page(["--command", "--name", "run 7", "--", "python", "train.py", "--lr", "3"], capsys)
    assert out.startswith("nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none")
    assert out.endswith("'--output=run 7' python train.py --lr 3")


def test_it_is_run_on_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nsys"
    tool.write_text('#!/bin/sh\necho "$@" > ran; touch lowprec.nsys-rep; exit 5\n', encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["nsys", "--command", "--run", "--whole", "--", "python", "train.py"]) == 5
    assert Path("ran").read_text(encoding="utf-8").split()[-2:] == ["python", "train.py"]
    assert "read it with `lowprec nsys lowprec.nsys-rep`" in capfd.readouterr().err


def test_running_needs_nsys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _, err = page(["--command", "--run", "--", "python"], capsys, code=2)
    assert "`nsys` is not on the PATH" in err


def test_neither_torch_nor_a_gpu_is_needed(two_recipes: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformer_engine'] = sys.modules['lightning'] = None\n"
        "from lowprec_callback.cli import main\n"
        f"sys.exit(main(['nsys', {str(two_recipes)!r}]))"
    )
    root = Path(nsys_command.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(root)})


def test_a_recipe_that_the_ranges_name_already(two_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = page([str(two_recipes), "--recipe", "mxfp8"], capsys)
    assert "--recipe mxfp8 was not needed" in out


# -- small parts -----------------------------------------------------------------------------------------------------


def test_a_report_is_rebuilt_as_it_was(two_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page([str(two_recipes)], capsys)
    (folder,) = Path(nsys_command.OUTPUT_DIR).iterdir()
    body: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    rebuilt = rebuild(report.Report, body)
    assert rebuilt == load_report(folder)
    assert dataclasses.asdict(rebuilt) == dataclasses.asdict(load_report(folder))
