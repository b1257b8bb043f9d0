"""Lightning's precision plugin "transformer-engine" on a GPU: its region is ours for the sweep, and its own after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.recording import Dispatch, End, GemmTime, Plan, read

WIDTH, ROWS = 256, 128


REGIONS: list[tuple[int, str]] = []
"""Of all steps. Not an attribute of the module's, which would be put back."""


class Plain(LightningModule):
    """PyTorch's layers, which the plugin replaces; notes whether, and by which recipe, its steps are quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        state = FP8GlobalStateManager.quantization_state
        name = type(state.fp8_recipe).__name__ if state.fp8_enabled else "off"
        REGIONS.append((state.autocast_depth, name))
        (x,) = batch
        return nn.functional.mse_loss(self.net(x).float(), x.float())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("precision", ["transformer-engine", "transformer-engine-float16"])
def test_the_plugins_region_is_taken_over_and_given_back(tmp_path: Path, precision: str) -> None:
    REGIONS.clear()
    module = Plain()
    callback = LowPrecisionProfiler(
        recipes=["fp8_delayed", "fp8_current"],
        rounds=1,
        settle_steps=1,
        timed_steps=2,
        traced_steps=1,
        guard_steps=0,
        progress=False,
        output_dir=str(tmp_path),
    )
    trainer = Trainer(
        max_steps=40,
        accelerator="cuda",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = TensorDataset(torch.randn(40 * ROWS, WIDTH))
    trainer.fit(module, DataLoader(data, batch_size=ROWS))
    assert callback.session is not None, callback.why_not
    facts = read(callback.session.folder)
    assert facts.of(End) == [End("finished")]
    planned = facts.of(Plan)[-1].steps
    assert {layer.__class__.__module__.split(".")[0] for layer in (module.net[0], module.net[2])} == {
        "transformer_engine"
    }
    # One region deep: ours. The baseline's is off.
    assert set(REGIONS[:planned]) == {(1, "off"), (1, "DelayedScaling"), (1, "Float8CurrentScaling")}
    assert set(REGIONS[planned:]) == {(1, "DelayedScaling")}  # the plugin's own
    assert "train_step_context" not in vars(trainer.precision_plugin)
    ran = {(fact.recipe, fact.other.format) for fact in facts.of(Dispatch) if fact.role == "fprop"}
    narrow = "fp16" if precision.endswith("float16") else "bf16"
    assert ran == {("bf16", narrow), ("fp8_delayed", "e4m3"), ("fp8_current", "e4m3")}
    assert callback.report is not None
    assert not [fact for fact in facts.of(GemmTime) if fact.failure]
    baseline, *others = callback.report.recipes
    assert baseline.verdict is not None
    assert {row.verdict for row in baseline.verdict.rows} == {"confirmed" if narrow == "bf16" else "by_request"}
    for part in others:
        assert part.verdict is not None
        assert {row.verdict for row in part.verdict.rows} == {"confirmed"}, part.verdict.summary
