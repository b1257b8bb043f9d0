"""try.py, as far as it can be tested without installing anything."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bootstrap() -> ModuleType:
    """The module, whose name is a keyword so that nothing imports it by mistake."""
    spec = spec_from_file_location("bootstrap", ROOT / "try.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes nothing; keeps a list of what would have been made and installed."""
    log: list[str] = []

    def create(self: object, inherits_pip: bool) -> None:
        log.append("made")
        self.python.parent.mkdir(parents=True)  # type: ignore[attr-defined]
        self.python.touch()  # type: ignore[attr-defined]

    monkeypatch.setattr(bootstrap.Environment, "_create", create)
    monkeypatch.setattr(bootstrap.Environment, "_install", lambda self, extra="": log.append(extra or "base"))
    return log


def test_an_environment_is_made_once(bootstrap: ModuleType, installed: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "venv"
    for extra in ("", "", "test", "test", ""):
        bootstrap.Environment(folder, gpu=False).prepare(extra)
    assert installed == ["made", "base", "test"]


def test_an_environment_made_for_something_else_is_made_again(
    bootstrap: ModuleType, installed: list[str], tmp_path: Path
) -> None:
    bootstrap.Environment(tmp_path / "venv", gpu=False).prepare()
    (tmp_path / "venv" / "old").touch()
    stamp = tmp_path / "venv" / bootstrap.STAMP
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "made_for": "another pyproject.toml"}))
    bootstrap.Environment(tmp_path / "venv", gpu=False).prepare()
    assert installed == ["made", "base"] * 2
    assert not (tmp_path / "venv" / "old").exists()


def test_an_interrupted_environment_is_made_again(
    bootstrap: ModuleType, installed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: object, extra: str = "") -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bootstrap.Environment, "_install", stopped)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.Environment(tmp_path / "venv", gpu=False).prepare()
    bootstrap.Environment(tmp_path / "venv", gpu=False).prepare()
    assert installed == ["made", "made", "base"]


def test_a_folder_of_somebody_else_is_left_alone(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("data")
    monkeypatch.setenv("LOWPREC_VENV", str(tmp_path))
    assert bootstrap.main([]) == 1
    assert "was not made by try.py" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "data"


def test_it_does_not_remove_the_environment_that_it_runs_in(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWPREC_VENV", sys.prefix)
    assert bootstrap.main(["test"]) == 1
    assert "run try.py with the one that it was made from" in capsys.readouterr().err


def test_the_checks_all_run_and_the_first_failure_is_the_exit_code(
    bootstrap: ModuleType, installed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {"ruff": 0, "mypy": 3, "pytest": 1}
    ran: list[list[str]] = []

    def run(python: Path, _m: str, *check: str, cwd: Path) -> int:
        ran.append(list(check))
        return codes[check[0]]

    monkeypatch.setattr(bootstrap, "run", run)
    monkeypatch.setattr(bootstrap, "gpu_seen", lambda: False)
    monkeypatch.setattr(bootstrap.Environment, "add_te_files", lambda self: None)
    monkeypatch.setenv("LOWPREC_VENV", str(tmp_path / "venv"))
    assert bootstrap.main(["test", "-k", "gap"]) == 3
    assert ran == [["ruff", "check", "."], ["mypy"], ["pytest", "-n", "2", "--dist", "loadfile", "-k", "gap"]]


@pytest.mark.parametrize(("there", "gpu", "asked"), [(False, False, True), (True, False, False), (False, True, False)])
def test_te_files_are_added_only_where_no_te_could_be_hurt(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, gpu: bool, asked: bool
) -> None:
    wanted: list[tuple[object, ...]] = []
    monkeypatch.setattr(bootstrap, "ask", lambda *_: SimpleNamespace(returncode=0 if there else 1))
    monkeypatch.setattr(bootstrap.Environment, "_pip", lambda self, *a, **_: wanted.append(a) is None)
    bootstrap.Environment(tmp_path, gpu).add_te_files()
    assert wanted == ([("--no-deps", "transformer-engine==2.20.2")] if asked else [])


def test_a_python_that_dies_while_importing_is_a_reason(bootstrap: ModuleType, tmp_path: Path) -> None:
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\necho undefined symbol: cudnnGetVersion >&2\nexit 127\n")
    dies.chmod(0o755)
    found = bootstrap.probe(dies)
    assert found == {"cuda": False, "te": False, "why": "exit code 127: undefined symbol: cudnnGetVersion"}


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_waits_for_the_command_to_end_in_its_own_way(
    bootstrap: ModuleType, tmp_path: Path, ctrl_c: None
) -> None:
    # The command interrupts this process and only then finishes its own work.
    work = f"import os, pathlib; os.kill({os.getpid()}, {int(signal.SIGINT)}); pathlib.Path('saved').touch()"
    with pytest.raises(KeyboardInterrupt):
        bootstrap.run(sys.executable, "-c", work, cwd=tmp_path)
    assert (tmp_path / "saved").exists()


def test_the_requirements_are_those_of_pyproject(bootstrap: ModuleType) -> None:
    assert any(text.startswith("torch") for text in bootstrap.requirements())
    assert any(text.startswith("pytest") for text in bootstrap.requirements("test"))
    assert any(text.startswith("transformer-engine") for text in bootstrap.requirements("te"))
