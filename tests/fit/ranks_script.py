"""What two processes of `test_ranks_in_fit` run: `python -m tests.fit.ranks_script SCENARIO FOLDER`.

Each rank writes what it found to FOLDER/outcome-RANK.json.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lowprec_callback.engines.base import NotRun
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.show import html, plots
from lowprec_callback.sweep import script as sweep_module
from lowprec_callback.sweep.plan import LEAD_STEPS, Settings
from lowprec_callback.sweep.rounds import Rounds
from tests.fit.models import Tiny, loader, profiler, trainer

SLOW = 0.02
"""Seconds that rank 1 loses in each forward pass of the scenario `sweep`."""

STEPS = Settings(2, 1, 2, 1, guard_steps=1)

LAST_OF_A_BLOCK = LEAD_STEPS + STEPS.settle_steps + STEPS.timed_steps - 1
"""The step, counted from zero, whose loss is that of the first block."""


class Unused(Tiny):
    """With a layer that takes part only in every second step, and one rank that is slow, and loses its way once."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 32)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_rank == 1:
            time.sleep(SLOW)
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and self.trainer.global_step == LAST_OF_A_BLOCK:
            loss = loss * math.nan  # by the gradients, the weights of both are lost
        return loss + self.spare(batch).mean() if batch_idx % 2 else loss


class Sharded(Tiny):
    """Under FSDP's second version, which the model asks for itself."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.net[0], self.net[4], self.net):
            fully_shard(part, mesh=mesh)


class CpuFsdp(FSDPStrategy):
    """Lightning offers FSDP's first version on GPUs only, by the strategy's very class."""


class Before(Callback):
    """This rank's parameters, optimizer state and random numbers, as they were before the sweep."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.held = tensors(trainer)


class After(Callback):
    """Behind the profiler in the list of callbacks: whether the sweep left everything as it was before."""

    def __init__(self, before: Before) -> None:
        self._before = before
        self.same: bool | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.same is None:
            before, after = self._before.held, tensors(trainer)
            self.same = len(after) == len(before) and all(map(torch.equal, before, after))


def tensors(trainer: Any) -> list[torch.Tensor]:
    held = [*trainer.strategy.model.parameters(), *trainer.strategy.model.buffers()]
    held += [v for o in trainer.optimizers for e in o.state.values() for v in e.values() if isinstance(v, torch.Tensor)]
    return [getattr(t.detach(), "_local_tensor", t.detach()).clone() for t in (*held, torch.get_rng_state())]


TRAINED = 3
"""Steps of a fit."""


def fitted(
    folder: Path, module: Tiny, strategy: Any, *first: Callback, batches: int = 1, **arguments: Any
) -> dict[str, Any]:
    """One short fit, with a sweep before it; what this rank found."""
    callback, before = profiler(folder, guard_steps=STEPS.guard_steps, **arguments), Before()
    after = After(before)
    run = trainer(folder, *first, before, callback, after, strategy=strategy, devices=2, steps=TRAINED)
    run.accumulate_grad_batches = batches
    run.fit(module, loader(2 * batches * 12))
    assert callback.session is not None
    return {
        "rank": run.global_rank,
        "same": after.same,
        "done": callback.session.recorder.closed and callback.session.sweep.snapshot is None,
        "report": callback.report is not None,
        "patched": "training_step" in module.__dict__,
        "kept": len(callback.session.recorder.snapshot()),
        "steps": run.global_step,
    }


def sweep(folder: Path) -> dict[str, Any]:
    """The whole sweep under DDP, by Lightning's own launcher.

    Rank 1 cannot run one of the recipes, fails in the benchmark, is slow, and by itself would take no more rounds than
    planned.
    """
    refused, why_stop = PlainTorchEngine.refusal, Rounds.why_stop
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def refusal(engine: PlainTorchEngine, card: Any) -> NotRun | None:
        if card.name == "bf16_twin" and local_rank == 1:
            return NotRun("a reason of its own", "the test")
        return refused(engine, card)

    def stop_early(rounds: Rounds, done: int, steps_a_round: int) -> str:
        return "seconds" if local_rank == 1 and done >= rounds.planned else why_stop(rounds, done, steps_a_round)

    def fail(*_: Any) -> Any:
        raise RuntimeError("planted in the benchmark")

    if local_rank == 1:
        sweep_module.module_times = fail  # type: ignore[assignment]
    PlainTorchEngine.refusal = refusal  # type: ignore[method-assign]
    Rounds.why_stop = stop_early  # type: ignore[method-assign]
    twin = folder / "bf16_twin.toml"
    text = (Path(__file__).parents[2] / "recipes" / "bf16.toml").read_text()
    if local_rank == 0:  # which launches the other
        twin.write_text(text.replace('name = "bf16"', 'name = "bf16_twin"'))
    strategy = DDPStrategy(find_unused_parameters=True)
    return fitted(
        folder / "runs",
        Unused(),
        strategy,
        recipes=["fp32", "bf16", str(twin)],
        gemm_benchmark=True,
        max_rounds=3,
        step_precision=1e-9,
        batches=2,
    )


class Fails(Tiny):
    """Rank 1 raises in the middle of the sweep."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 6:
            raise ValueError("the user's own exception")
        return super().training_step(batch, batch_idx)


def raises(folder: Path) -> dict[str, Any]:
    """Rank 1's exception, after both kept a little of what they had."""
    return fitted(folder / "runs", Fails(), "ddp")


def dies(folder: Path) -> dict[str, Any]:
    """By SLURM's variables: nobody looks after the processes.

    Rank 1 is gone, without a word, just before the ranks tell each other what they captured.
    """
    if os.environ["SLURM_PROCID"] == "1":
        sweep_module.Sweep._misfits = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    return fitted(folder / "runs", Tiny(), "ddp")


def sharded(folder: Path) -> dict[str, Any]:
    """FSDP's second version, then its first, then DDP that takes its first graph for all, in the same processes."""
    # FSDP's first version runs on a CPU if it is told so, which Lightning does not do.
    original = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **{**named, "device_id": torch.device("cpu")})

    two = fitted(
        folder / "two",
        Sharded(),
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        keep_rank_recordings=True,
    )
    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = fitted(folder / "one", Tiny(), CpuFsdp(auto_wrap_policy={nn.Linear}, use_orig_params=False))
    static = fitted(folder / "static", Tiny(), DDPStrategy(static_graph=True))
    return {"rank": two["rank"], "two": two, "one": one, "static": static}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    # They take longer than all else here.
    plots.save_all = lambda *_: []
    html.save = lambda *_: None
    found = {"sweep": sweep, "raises": raises, "dies": dies, "sharded": sharded}[scenario](folder)
    (folder / f"outcome-{found['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
