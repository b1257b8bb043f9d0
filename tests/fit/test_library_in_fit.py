"""The CPU libraries' own logs inside a real `fit`: what they confirm, what they catch, and that they leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lowprec_callback import load_report
from lowprec_callback.measure import stdout_log
from lowprec_callback.recording import ROLES, LibraryCall, LibraryLog, Problem, Recording, read
from lowprec_callback.report import Report
from lowprec_callback.show import words
from tests.fit.models import WIDTH, Tiny, loader, profiler, trainer
from tests.fit.test_sweep_in_fit import recording_of

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch was built without MKL")


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    before = os.fstat(1).st_ino
    yield
    assert stdout_log._redirected is None
    assert os.fstat(1).st_ino == before


class Wide(nn.Module):
    """A layer that keeps itself out of the user's BF16 region, and says so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


class Planted(Tiny):
    """Its second linear runs in FP32 whatever is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), Wide())


def run_of(folder: Path) -> tuple[Recording, Report]:
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return read(run), load_report(run)


def test_fp32_is_confirmed_by_operands_library_and_operators(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, profiler(tmp_path)).fit(Tiny(), loader(60))
    facts, report = run_of(tmp_path)
    assert [(log.recipe, log.silent) for log in facts.of(LibraryLog)] == [("fp32", None), ("bf16", None)]
    heard = [call for call in facts.of(LibraryCall) if call.recipe == "fp32"]
    # The batch needs no gradient, so the first layer has no dgrad.
    places = {(f"net.{i}", role) for i in (0, 4) for role in ROLES} - {("net.0", "dgrad")}
    assert {(call.module, call.role) for call in heard} == places
    fp32 = report.recipe("fp32").verdict
    assert fp32 is not None
    assert words.coverage(fp32) == "100% (operands+library+kernels)"
    assert fp32.disagreements == ()
    said = capfd.readouterr().out
    assert "MKL_VERBOSE" not in said
    assert "onednn_verbose" not in said


def test_bf16_is_confirmed_by_the_library_only_where_the_library_ran_it(tmp_path: Path) -> None:
    """On a CPU with BF16 instructions oneDNN multiplies, elsewhere PyTorch by itself: no line, no word for it."""
    trainer(tmp_path, profiler(tmp_path)).fit(Tiny(), loader(60))
    facts, report = run_of(tmp_path)
    heard = [call for call in facts.of(LibraryCall) if call.recipe == "bf16"]
    assert {call.other for call in heard} <= {"bf16"}
    verdict = report.recipe("bf16").verdict
    assert verdict is not None
    assert verdict.disagreements == ()
    confirmed = {(row.module, row.role) for row in verdict.rows if "library" in row.witnesses}
    assert confirmed == {(call.module, call.role) for call in heard}
    silent = [row for row in verdict.rows if "library" not in row.witnesses]
    assert all("neither oneDNN nor MKL logged it" in row.why for row in silent)
    assert bool(verdict.slow_paths) == bool(silent)


def test_a_bf16_request_that_ran_in_fp32_is_caught_by_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, profiler(tmp_path)).fit(Planted(), loader(60))
    _, report = run_of(tmp_path)
    verdict = report.recipe("bf16").verdict
    assert verdict is not None
    caught = [row for row in verdict.rows if row.module == "net.2.linear"]
    assert {(row.role, row.verdict) for row in caught} == {(role, "fallback") for role in ROLES}
    for row in caught:
        assert row.witnesses["operands"] == "fp32 x fp32"
        assert row.witnesses["library"] in ("MKL: fp32 x fp32", "oneDNN: fp32 x fp32")
        assert row.why.startswith("ran wider than asked: 32 bits an element, not 16")
    assert {row.verdict for row in verdict.rows if row.module == "net.0"} == {"confirmed"}
    assert "fallback" in capsys.readouterr().out


def test_an_exception_while_the_log_is_on_is_the_users_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Mine(RuntimeError):
        pass

    def fail(_module: Tiny, _step: int) -> None:
        if stdout_log._redirected is not None:
            os.write(1, b"said just before\n")
            raise Mine("the user's")

    run = trainer(tmp_path, profiler(tmp_path), steps=5)
    run.fit(Tiny(fail), loader(60))
    assert run.global_step == 5  # the log is never on in training
    assert any("the user's" in problem.message for problem in recording_of(tmp_path).of(Problem))
    assert stdout_log._redirected is None
    torch.mm(torch.ones(16, 64), torch.ones(64, 32))
    said = capfd.readouterr().out
    assert "said just before\n" in said
    assert "_VERBOSE" not in said


def test_what_the_user_prints_in_every_step_arrives_once_and_in_order(tmp_path: Path) -> None:
    """In a process of its own, whose standard output is a pipe."""
    code = """if True:
        import sys
        from pathlib import Path
        from tests.fit.models import Tiny, loader, profiler, trainer
        folder = Path(sys.argv[1])
        number = iter(range(1, 10**6))
        module = Tiny(lambda *_: print(f"step {next(number)}"))
        trainer(folder, profiler(folder)).fit(module, loader(30))
    """
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environ)
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert steps == [f"step {i}" for i in range(1, len(steps) + 1)]
    assert len(steps) >= 30
    assert "_VERBOSE" not in done.stdout
    assert "onednn_verbose" not in done.stdout
