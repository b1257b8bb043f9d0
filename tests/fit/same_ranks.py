"""What each of two processes of `test_no_trace` runs: `python -m tests.fit.same_ranks FOLDER [cuda]`.

Each strategy's fit without the callback and with it, and what is not equal between them, to FOLDER/same-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lowprec_callback import publish
from tests.fit.same import Case, differences, quick, record
from tests.fit.test_no_trace import BATCH, WIDTH, Items, Net


class Spare(Net):
    """With a layer that takes part only in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss + 0.1 * self.spare(batch).mean() if self.count % 2 else loss


class Sharded(Net):
    """Under FSDP's second version, which the model asks for itself."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, WIDTH))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.body[0], self.body[3], self.body):
            fully_shard(part, mesh=mesh)


class CpuFsdp(FSDPStrategy):
    """Lightning offers FSDP's first version on GPUs only, by the strategy's very class."""


def loader() -> DataLoader[torch.Tensor]:
    return DataLoader(Items(14 * BATCH), batch_size=BATCH, shuffle=True)


def ddp(c: Case) -> None:
    c.fit(Spare(), loader(), max_epochs=2, devices=2, strategy=DDPStrategy(find_unused_parameters=True))


def ddp_accumulates(c: Case) -> None:
    c.fit(Net(), loader(), max_epochs=2, devices=2, strategy="ddp", accumulate_grad_batches=3, gradient_clip_val=0.1)


def ddp_static_graph(c: Case) -> None:
    c.fit(Net(), loader(), max_epochs=2, devices=2, strategy=DDPStrategy(static_graph=True))


def fsdp_2(c: Case) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    c.fit(Sharded(), loader(), max_epochs=2, devices=2, strategy=strategy)


def fsdp_1(c: Case) -> None:
    strategy = CpuFsdp(auto_wrap_policy={nn.Linear}, use_orig_params=True)
    c.fit(Net(), loader(), max_epochs=2, devices=2, strategy=strategy)


def fsdp_1_flat(c: Case) -> None:
    strategy = CpuFsdp(auto_wrap_policy={nn.Linear}, use_orig_params=False)
    c.fit(Net(), loader(), max_epochs=2, devices=2, strategy=strategy)


CASES: tuple[Callable[[Case], None], ...] = (ddp, ddp_accumulates, ddp_static_graph, fsdp_2, fsdp_1, fsdp_1_flat)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ.get("LOCAL_RANK", "0"))
    original = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *arguments: Any, **named: Any) -> None:
        # FSDP's first version runs on a CPU if it is told so, which Lightning does not do.
        original(self, *arguments, **{**named, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
    publish.write_files = lambda *_: True  # type: ignore[assignment]  # plots take longer than all else here
    found: dict[str, Any] = {}
    for run in CASES:
        place = folder / f"{run.__name__}-{rank}"
        callback = quick(place)
        without = record(run, place / "without")
        with_us = record(run, place / "with", callback)
        found[run.__name__] = {
            "differences": differences(without, with_us),
            "compared": len(without),
            "raised": without[" raised"],
            "why_not": callback.why_not,
            "report": callback.report is not None,
        }
    (folder / f"same-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
