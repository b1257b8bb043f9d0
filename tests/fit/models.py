"""Small LightningModules and Trainers for tests of the callback on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lowprec_callback import LowPrecisionProfiler

WIDTH = 32
BATCH = 8


class Rows(Dataset[torch.Tensor]):
    """Random rows, the same for the same index."""

    def __init__(self, count: int) -> None:
        self._rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Tiny(LightningModule):
    """Two linear layers with everything between them that a restore can forget: norm, dropout, a buffer, a schedule.

    Args:
        on_step: called at the start of each training step with (module, number of the call).
    """

    def __init__(self, on_step: Callable[[Tiny, int], None] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, WIDTH)
        )
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.seen: torch.Tensor
        self.steps = 0
        self._on_step = on_step

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        if self._on_step is not None:
            self._on_step(self, self.steps)
        self.seen += 1
        return nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Validated(Tiny):
    """The same with evaluation."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.net(batch)


def loader(steps: int) -> DataLoader[torch.Tensor]:
    """Batches for so many steps."""
    return DataLoader(Rows(steps * BATCH), batch_size=BATCH)


def trainer(folder: Path, *callbacks: Callback, steps: int = 60, **arguments: Any) -> Trainer:
    """A quiet Trainer on one CPU process."""
    defaults: dict[str, Any] = {
        "max_steps": steps,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**defaults, **arguments})


def profiler(folder: Path, **arguments: Any) -> LowPrecisionProfiler:
    """A profiler with a short plan: 2 recipes x (2 rounds x (1 + 2) + 1 traced) + lead."""
    defaults: dict[str, Any] = {
        "rounds": 2,
        "settle_steps": 1,
        "timed_steps": 2,
        "traced_steps": 1,
        "gemm_benchmark": False,
        "output_dir": str(folder),
        "max_rounds": 0,
    }
    return LowPrecisionProfiler(**{**defaults, **arguments})


def short(folder: Path, **arguments: Any) -> LowPrecisionProfiler:
    """The same without the numerics guard: 3 steps, then 2 recipes x (2 rounds x (1 + 2) + 1 traced, 2 before it)."""
    return profiler(folder, **{"guard_steps": 0, **arguments})


def in_a_process_of_its_own(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code that finds this package and its tests, with the folder as its argument."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
