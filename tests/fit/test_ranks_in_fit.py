"""Two processes that train one model on a CPU (gloo), launched by Lightning, by torchrun, and as SLURM does it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lowprec_callback import load_report
from lowprec_callback.recording import (
    End,
    ForwardTime,
    Loss,
    Model,
    Plan,
    Problem,
    RankSummary,
    Recording,
    Refusal,
    StepTime,
    read,
)
from lowprec_callback.sweep.ranks import Alone
from lowprec_callback.sweep.script import Sweep
from lowprec_callback.trainer import facts as trainer_facts
from tests.fit.models import Tiny, loader, profiler, trainer
from tests.fit.ranks_script import TRAINED

ROOT = Path(__file__).parents[2]
PATIENCE = 240
"""Seconds for two processes on a busy machine; a process that hangs in a collective would wait for half an hour."""

pytestmark = pytest.mark.timeout(PATIENCE + 30)


def script(scenario: str, folder: Path) -> list[str]:
    return ["-m", "tests.fit.ranks_script", scenario, str(folder)]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's, without what launchers leave in one."""
    (folder / "tmp").mkdir(exist_ok=True)
    launched = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launched and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "PYTHONPATH": path, **more}


def launch(*commands: tuple[list[str], dict[str, str]]) -> list[subprocess.CompletedProcess[str]]:
    """All commands at once; each must end by itself."""
    running = [
        subprocess.Popen(
            [sys.executable, *arguments], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for arguments, env in commands
    ]
    try:
        told = [process.communicate(timeout=PATIENCE) for process in running]
    finally:
        for process in running:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(running, told, strict=True)
    ]


def torchrun(scenario: str, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.2"]
    (done,) = launch(([*arguments, *script(scenario, folder)], environment(folder)))
    return done


def slurm(scenario: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
    }
    shared |= {"SLURM_NODEID": "0", "SLURM_STEP_ID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return launch(
        *(
            (script(scenario, folder), environment(folder, **shared, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)))
            for rank in range(2)
        )
    )


def outcome(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"outcome-{rank}.json").read_text())


def run_folder(folder: Path) -> Path:
    """The only one: no rank but zero makes one of its own."""
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return run


def test_both_ranks_sweep_in_lockstep_and_rank_zero_reports(tmp_path: Path) -> None:
    (done,) = launch((script("sweep", tmp_path), environment(tmp_path)))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = outcome(tmp_path, rank)
        assert (found["same"], found["done"], found["patched"]) == (True, True, False)
        assert found["steps"] == TRAINED
        assert found["report"] == (rank == 0)
    assert outcome(tmp_path, 1)["kept"] == 0

    run = run_folder(tmp_path / "runs")
    facts, report = read(run), load_report(run)
    (plan,) = facts.of(Plan)
    assert plan.recipes == ("fp32", "bf16")
    assert plan.micro_batches == 2
    (refusal,) = facts.of(Refusal)
    assert refusal == Refusal("bf16_twin", f"rank 1 ({socket.gethostname()}): a reason of its own", "the test")
    assert facts.of(End) == [End("finished")]

    both = facts.of(RankSummary)
    assert [each.rank for each in both] == [0, 1]
    for each in both:
        assert list(each.recipes) == ["fp32", "bf16"]
        for part in each.recipes.values():
            # The third round is rank zero's decision, which rank 1 by itself would not have taken.
            assert [(number, len(samples)) for number, samples in part.rounds] == [(0, 2), (1, 2), (2, 2)]
            assert [(number, len(samples)) for number, samples in part.forward] == [(0, 2), (1, 2), (2, 2)]
            assert part.gemm_ms is not None
            assert part.coverage == 1.0
    own = {
        name: tuple(step.ms for step in facts.of(StepTime) if step.recipe == name and not step.round)
        for name in plan.recipes
    }
    assert {name: dict(part.rounds)[0] for name, part in both[0].recipes.items()} == own
    # Rank 1 sleeps in each of a step's two forward passes; rank 0 waits for it, so their steps are equally long.
    slow = [ms for fact in both[1].recipes.values() for _, samples in fact.forward for ms in samples]
    assert min(slow) >= 40
    assert len(facts.of(ForwardTime)) == 6

    ranks = report.ranks
    assert ranks is not None
    assert (ranks.world, ranks.heard, ranks.hosts) == (2, 2, 1)
    # Rank 1's loss broke once, and with it the weights of both: both began again, so rank zero's never broke.
    assert all(math.isfinite(loss.value) for loss in facts.of(Loss))
    again = "; the recipes after it start again from the state before the profile"
    (first,) = [problem for problem in facts.of(Problem) if "round 1" in problem.where]
    assert first.message == f"another rank's loss broke{again}"
    one = f"rank 1 ({socket.gethostname()})"
    # What goes wrong in one rank's benchmark stops nobody.
    (benchmark,) = [problem for problem in facts.of(Problem) if problem.where == "GEMM benchmark"]
    assert benchmark.message == f"{one}: RuntimeError: planted in the benchmark"
    assert ranks.problems == (
        f"{one}: GEMM benchmark: {benchmark.message}",
        f"{one}: {first.where}: the loss is nan{again}",
    )
    for part in report.recipes[:2]:
        steps = [[ms for _, samples in each.recipes[part.name].rounds for ms in samples] for each in both]
        medians = [median(samples) for samples in steps]
        assert part.step_ms.value == pytest.approx(max(medians))
        assert ranks.slowest[part.name].startswith(f"rank {medians.index(max(medians))} (")
        assert part.ledger is not None
        assert "rank 0, by its own trace" in (part.ledger.note or "")
    (straggler,) = [finding for finding in report.findings if finding.code == "straggler"]
    assert straggler.sentence.startswith(f"rank 1 ({socket.gethostname()}) is slower")

    assert done.stdout.count("lowprec_callback  ") == 1
    assert "2 ranks on 1 machine" in done.stdout
    assert done.stderr.count("lowprec: profiling") == 1
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("lowprec")]
    assert not list(run.glob("rank-*"))


def test_an_exception_on_one_rank_ends_the_run_with_that_exception(tmp_path: Path) -> None:
    done = torchrun("raises", tmp_path)
    assert done.returncode != 0
    assert "ValueError: the user's own exception" in done.stderr
    run = run_folder(tmp_path / "runs")
    kept = facts_so_far(run)
    assert not kept.of(RankSummary)
    # What rank 1 had measured is kept beside, because it failed.
    other = read(run / "rank-1.jsonl")
    assert other.of(End) == [End("failed", "ValueError: the user's own exception")]
    assert [step.recipe for step in other.of(StepTime)] == [step.recipe for step in kept.of(StepTime)]
    assert other.of(StepTime)


def test_a_rank_that_dies_while_the_other_waits_for_it_in_our_collective(tmp_path: Path) -> None:
    zero, one = slurm("dies", tmp_path)
    assert one.returncode == -9
    assert zero.returncode not in (0, -9), zero.stderr
    run = run_folder(tmp_path / "runs")
    facts = facts_so_far(run)
    (end,) = facts.of(End)
    assert end.status == "failed"
    assert "in gather" in zero.stderr
    assert any("2 processes trained" in problem for problem in load_report(run).problems)


def test_sharded_parameters_are_put_back_bit_for_bit(tmp_path: Path) -> None:
    done = torchrun("sharded", tmp_path)
    assert done.returncode == 0, done.stderr
    for version in ("two", "one", "static"):
        for rank in range(2):
            found = outcome(tmp_path, rank)[version]
            assert (found["same"], found["done"], found["patched"]) == (True, True, False), version
        run = run_folder(tmp_path / version)
        assert load_report(run).status == "finished"
        assert not read(run).of(Refusal)
    for version in ("two", "one"):
        run = run_folder(tmp_path / version)
        assert [path.name for path in run.glob("rank-*")] == (["rank-1.jsonl"] if version == "two" else [])
        (model,) = read(run).of(Model)
        assert model.parameters == sum(parameter.numel() for parameter in Tiny().parameters())
        assert model.parameter_bytes == 4 * model.parameters
        assert list(model.linear_modules) == ["net.0", "net.4"]
        assert model.rank_bytes is not None
        assert 2 * model.parameters <= model.rank_bytes < 2.2 * model.parameters  # half of them, and padding
        report = load_report(run)
        assert report.ranks is not None
        assert report.ranks.heard == 2


def facts_so_far(run: Path) -> Recording:
    facts = read(run)
    assert facts.of(Plan)
    return facts


class Two(Alone):
    """The only one of two that is there."""

    size = 2


def test_a_part_that_all_ranks_leave_out_together_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ranks a failure of ours ends the process, unless all know of it: here no step is ever clean."""
    monkeypatch.setattr(trainer_facts, "ranks_of", lambda *_: Two())
    monkeypatch.setattr(Sweep, "_was_clean", lambda _sweep: False)
    callback, module = profiler(tmp_path / "runs", guard_steps=0), Tiny()
    run = trainer(tmp_path, callback, steps=45)
    run.fit(module, loader(45))
    assert run.global_step == 45
    facts = read(run_folder(tmp_path / "runs"))
    assert facts.of(End) == [End("finished")]
    left_out = {problem.where: problem.message for problem in facts.of(Problem)}
    assert {"capture", "trace of fp32", "trace of bf16"} <= set(left_out)
    assert left_out["trace of bf16"] == "in 4 steps, one after another: so it was on another rank"
    assert {step.recipe for step in facts.of(StepTime)} == {"fp32", "bf16"}


class XLAStrategy(SingleDeviceStrategy):
    """By name one that is refused."""


def test_training_goes_on_as_without_us_under_a_strategy_that_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback, module = profiler(tmp_path / "runs"), Tiny()
    run = trainer(tmp_path, callback, steps=3, strategy=XLAStrategy(torch.device("cpu")))
    run.fit(module, loader(3))
    assert (run.global_step, module.steps) == (3, 3)
    assert callback.session is None
    assert callback.report is None
    assert str(callback.why_not).startswith("the strategy XLAStrategy is not supported: its steps are traced")
    assert not (tmp_path / "runs").exists()
    assert "training_step" not in module.__dict__
    said = capsys.readouterr()
    assert said.err.count("lowprec: the strategy XLAStrategy") == 1
    assert "lowprec" not in said.out
