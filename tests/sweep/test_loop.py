"""`profile`: any training loop, without Lightning; then all is as it was before."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowprec_callback
from lowprec_callback.recording import End, Gemm, Plan, StepTime, Trace, Trial, read
from lowprec_callback.sweep.session import ProfilerError

SHORT = {
    "rounds": 1, "settle_steps": 1, "timed_steps": 2, "traced_steps": 1, "guard_steps": 1, "gemm_benchmark": False,
    "progress": False,
}  # fmt: skip


class Loop:
    """A training with everything that a profile could leave a trace in."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        rows = torch.randn(40, 16)
        self.loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
        self.count, self.losses = 0, []

    def step(self, batch: Any) -> torch.Tensor:
        (rows,) = batch
        self.count += 1
        loss = nn.functional.mse_loss(self.model(rows + 0.1 * torch.randn_like(rows)), rows) * (1 + random.random())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        return loss

    def profile(self, folder: Path, **options: Any) -> Any:
        return lowprec_callback.profile(
            self.step, model=self.model, optimizer=self.optimizer, scheduler=self.schedule, batches=self.loader,
            output_dir=str(folder), **{**SHORT, **options},
        )  # fmt: skip

    def train(self) -> tuple[list[float], list[torch.Tensor], int, list[float]]:
        for _ in range(2):
            for batch in self.loader:
                self.step(batch)
        return (
            self.losses,
            [p.detach().clone() for p in self.model.parameters()],
            self.count,
            self.schedule.get_last_lr(),
        )


def test_training_after_a_profile_is_training_without_it(tmp_path: Path) -> None:
    without = Loop().train()
    loop, variables = Loop(), dict(os.environ)
    report = loop.profile(tmp_path)
    assert dict(os.environ) == variables
    with_it = loop.train()
    assert (with_it[0], with_it[2:]) == (without[0], without[2:])
    assert all(map(torch.equal, with_it[1], without[1]))
    assert [part.name for part in report.recipes if part.refusal is None] == ["fp32", "bf16"]
    assert "forward" not in vars(loop.model)
    assert not loop.optimizer._optimizer_step_pre_hooks

    (run,) = tmp_path.iterdir()
    facts = read(run)
    assert facts.of(End) == [End("finished")]
    assert len(facts.of(StepTime)) == 2 * 2
    assert {fact.recipe for fact in facts.of(Trace)} == {"fp32", "bf16"}
    assert {gemm.module for gemm in facts.of(Gemm)} == {"0", "3"}
    assert {trial.recipe for trial in facts.of(Trial) if trial.grad_norm and trial.loss and trial.replayed} == {
        "fp32", "bf16",
    }  # fmt: skip
    (plan,) = facts.of(Plan)
    assert plan.batches == "the batches given, from their beginning and again"


def raising(loop: Loop) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        if loop.count == 3:
            raise ZeroDivisionError("the user's own")
        return loop.step(batch)

    return step


def test_an_exception_of_the_steps_comes_out_with_everything_put_back(tmp_path: Path) -> None:
    loop = Loop()
    before = [p.detach().clone() for p in loop.model.parameters()]
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        lowprec_callback.profile(
            raising(loop), model=loop.model, optimizer=loop.optimizer, scheduler=loop.schedule, batches=loop.loader,
            output_dir=str(tmp_path), **{**SHORT, "recipes": "fp32"},
        )  # fmt: skip
    assert all(map(torch.equal, before, loop.model.parameters()))
    assert loop.count == 0
    (run,) = tmp_path.iterdir()
    (end,) = read(run).of(End)
    assert end.status == "failed"
    assert "the user's own" in str(end.reason)


def test_batches_that_can_be_read_once_are_refused(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(ProfilerError, match="batches is an iterator, which can be read once"):
        lowprec_callback.profile(loop.step, model=loop.model, optimizer=loop.optimizer, batches=iter([1]))
    with pytest.raises(ProfilerError, match="batches is empty"):
        lowprec_callback.profile(
            loop.step, model=loop.model, optimizer=loop.optimizer, batches=[], output_dir=str(tmp_path), **SHORT
        )
    with pytest.raises(ProfilerError, match="profile: rounds=0"):
        loop.profile(tmp_path, rounds=0)
    with pytest.raises(TypeError, match="restore"):
        loop.profile(tmp_path, restore=True)


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shortened = code.replace('output_dir="runs")', f'output_dir="runs", **{SHORT})')
    assert shortened != code
    done = subprocess.run(
        [sys.executable, "-c", shortened + "\nassert report.status == 'finished'"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fp32" in done.stdout
