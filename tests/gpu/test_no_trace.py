"""On a GPU too, training with the callback is training without it: TE's layers, FP8 state, a loss scaler."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

# Before any kernel runs: kernels that add in the same order each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

from lowprec_callback.engines.transformer_engine import load
from tests.fit.same import Case, differences, quick, record
from tests.fit.test_no_trace import Net, batches
from tests.fit.test_ranks_in_fit import environment, launch

WIDTH = 256


class Sequences(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(64, WIDTH)


def sequences() -> DataLoader[torch.Tensor]:
    return DataLoader(Sequences(), batch_size=4, shuffle=True)


class Te(LightningModule):
    """Two transformer layers with dropout; `recipe`: train in FP8, whose scales live in TE's own state."""

    def __init__(self, recipe: str | None = None) -> None:
        super().__init__()
        te = load().te
        made = {"params_dtype": torch.bfloat16, "device": "cuda"}
        self.layers = nn.ModuleList(
            te.TransformerLayer(WIDTH, 512, 4, self_attn_mask_type="causal", hidden_dropout=0.1, **made)
            for _ in range(2)
        )
        self.head = te.Linear(WIDTH, WIDTH, **made)
        self.recipe = recipe

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = batch.to(torch.bfloat16).transpose(0, 1).contiguous()
        y = x
        for layer in self.layers:
            y = layer(y)
        loss = nn.functional.mse_loss(self.head(y).float(), x.float())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def gpu(c: Case, module: Any, *data: Any, **arguments: Any) -> None:
    c.fit(module, *data, **{"accelerator": "gpu", "max_epochs": 2, "deterministic": "warn", **arguments})
    c.record["random numbers of the GPU"] = torch.cuda.get_rng_state().tolist()


def te_layers(c: Case) -> None:
    saver = ModelCheckpoint(c.folder / "kept", every_n_train_steps=5, save_top_k=-1)
    gpu(c, Te(), sequences(), precision="bf16-true", callbacks=[saver], enable_checkpointing=True)


def te_layers_with_accumulation(c: Case) -> None:
    gpu(c, Te(), sequences(), precision="bf16-true", accumulate_grad_batches=2, gradient_clip_val=0.5)


def lightnings_plugin(c: Case) -> None:
    class Plain(Net):
        def layers(self) -> nn.Module:
            return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    gpu(c, Plain(), batches(8, batch_size=16, drop_last=True), precision="transformer-engine")


def plain_layers(c: Case) -> None:
    gpu(c, Net(), batches(7))


def mixed_bf16(c: Case) -> None:
    gpu(c, Net(), batches(7), precision="bf16-mixed")


def mixed_fp16(c: Case) -> None:
    gpu(c, Net(), batches(7), precision="16-mixed")


def true_bf16(c: Case) -> None:
    gpu(c, Net(), batches(7), precision="bf16-true")


CASES: tuple[Callable[[Case], None], ...] = (
    te_layers, te_layers_with_accumulation, lightnings_plugin, plain_layers, mixed_bf16, mixed_fp16, true_bf16,
)  # fmt: skip


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_training_with_the_callback_is_training_without_it(run: Callable[[Case], None], tmp_path: Path) -> None:
    callback = quick(tmp_path, gemm_benchmark=True)
    without = record(run, tmp_path / "without")
    again = record(run, tmp_path / "again")
    assert differences(without, again) == [], "these kernels are not deterministic"
    with_us = record(run, tmp_path / "with", callback)
    assert differences(without, with_us) == []
    assert without[" raised"] is None
    assert callback.why_not is None
    assert callback.report is not None
    assert callback.report.status == "finished"


@pytest.mark.timeout(500)
def test_nor_do_two_processes_with_te_layers_notice(tmp_path: Path) -> None:
    """DDP and FSDP 2, on each rank; on one GPU where there are no two."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        (["-m", "tests.gpu.same_ranks", str(rank), str(tmp_path), str(port)], environment(tmp_path))
        for rank in range(2)
    ]
    for done in launch(*ranks):
        assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"same-{rank}.json").read_text())
        assert len(found) == 3
        for name, outcome in found.items():
            assert (name, outcome["raised"]) == (name, [None, None])
            assert (name, outcome["by themselves"]) == (name, []), "these kernels are not deterministic"
            assert (name, outcome["differences"]) == (name, [])
            assert outcome["compared"] > 60
            assert (name, outcome["why_not"], outcome["report"]) == (name, None, rank == 0)
