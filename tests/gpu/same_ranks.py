"""What each of two processes with TE layers runs for `test_no_trace`: `-m tests.gpu.same_ranks RANK FOLDER PORT`.

With two GPUs each process has its own, and NCCL between them. With one GPU both share it, as two nodes of one GPU
each, and gloo carries the gradients: NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
# Two fits in one process, without the callback, differ where TE compiles its fused dropout by torch.compile.
os.environ.setdefault("NVTE_TORCH_COMPILE", "0")

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.fit.same import Case, differences, quick, record
from tests.gpu.test_no_trace import Te, gpu, sequences

PATIENCE = timedelta(seconds=120)


class Sharded(Te):
    """Each transformer layer sharded by itself, FSDP's second version."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (*self.layers, self.head):
            fully_shard(part, mesh=mesh)


def shared() -> bool:
    return torch.cuda.device_count() < 2


def backend() -> str:
    return "gloo" if shared() else "nccl"


def places() -> dict[str, Any]:
    nodes = {"devices": 1, "num_nodes": 2} if shared() else {"devices": 2}
    return {**nodes, "precision": "bf16-true"}


def ddp(c: Case) -> None:
    gpu(c, Te(), sequences(), strategy=DDPStrategy(process_group_backend=backend(), timeout=PATIENCE), **places())


def ddp_accumulates(c: Case) -> None:
    strategy = DDPStrategy(process_group_backend=backend(), timeout=PATIENCE)
    gpu(c, Te(), sequences(), strategy=strategy, accumulate_grad_batches=2, gradient_clip_val=0.5, **places())


def fsdp_2(c: Case) -> None:
    strategy = ModelParallelStrategy(2, 1, process_group_backend=backend(), timeout=PATIENCE)
    gpu(c, Sharded(), sequences(), strategy=strategy, **places())


CASES: tuple[Callable[[Case], None], ...] = (ddp, ddp_accumulates, fsdp_2)


def main() -> None:
    warnings.simplefilter("ignore")
    rank, folder, port = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    local = 0 if shared() else rank
    node = rank if shared() else 0
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=str(node), LOCAL_RANK=str(local))
    os.environ.update(GROUP_RANK=str(node), RANK=str(rank), WORLD_SIZE="2")
    torch.cuda.set_device(local)
    if shared():
        # A device mesh copies the options of its group's backend, which PyTorch cannot do for gloo on a GPU.
        dist.ProcessGroupGloo._Options.__deepcopy__ = lambda self, _: self
    found: dict[str, Any] = {}
    for run in CASES:
        place = folder / f"{run.__name__}-{rank}"
        callback = quick(place, gemm_benchmark=True)
        without = record(run, place / "without")
        again = record(run, place / "again")
        with_us = record(run, place / "with", callback)
        found[run.__name__] = {
            "by themselves": differences(without, again),
            "differences": differences(without, with_us),
            "compared": len(without),
            "raised": (without[" raised"], with_us[" raised"]),
            "why_not": callback.why_not,
            "report": callback.report is not None,
        }
    (folder / f"same-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
