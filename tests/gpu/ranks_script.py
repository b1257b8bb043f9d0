"""What each of two GPUs' processes runs for `test_ranks`: `torchrun ... -m tests.gpu.ranks_script STRATEGY FOLDER`.

Each rank writes what it found to FOLDER/outcome-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lowprec_callback.engines.transformer_engine import load
from tests.fit.models import profiler, trainer
from tests.fit.ranks_script import TRAINED, After, Before
from tests.gpu.test_transformer_engine import Block, batches


class Sharded(Block):
    """Each transformer layer sharded by itself, FSDP's second version."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (*self.layers, self.head):
            fully_shard(part, mesh=mesh)


def strategy(name: str) -> Any:
    if name == "ddp":
        return DDPStrategy()
    if name == "fsdp":
        return FSDPStrategy(auto_wrap_policy={load().te.TransformerLayer})
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def main() -> None:
    warnings.simplefilter("ignore")
    name, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    recipes = ["bf16", "fp8_delayed", "fp8_current"]
    callback = profiler(folder / "runs", recipes=recipes, rounds=2, settle_steps=3, timed_steps=4, gemm_benchmark=True)
    before = Before()
    after = After(before)
    module = Sharded() if name == "fsdp2" else Block()
    run = trainer(
        folder, before, callback, after, steps=TRAINED, accelerator="gpu", devices=2, strategy=strategy(name),
        precision="bf16-true",
    )  # fmt: skip
    run.fit(module, batches(2 * 10))
    assert callback.session is not None
    found = {"same": after.same, "done": callback.session.recorder.closed, "report": callback.report is not None}
    (folder / f"outcome-{rank}.json").write_text(json.dumps({**found, "steps": run.global_step}))


if __name__ == "__main__":
    main()
