"""The numerics guard on a real GPU: sound recipes are `ok`, and recipes that were made wrong on purpose are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from examples.mini_gpt.data import sequences
from examples.mini_gpt.model import GPTConfig, MiniGPT
from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.engines.transformer_engine import load
from lowprec_callback.recording import Scales, Trial
from lowprec_callback.report import NumericsReport
from lowprec_callback.sweep.guard import Kept
from lowprec_callback.sweep.plan import GUARD_SETTLE
from tests.fit.models import profiler, trainer
from tests.fit.ranks_script import After, Before

CONFIG = GPTConfig(hidden=256, heads=4, layers=2, ffn=1024, sequence=128, batch=8, learning_rate=3e-4, steps=100)
FP8 = ("fp8_delayed", "fp8_current", "fp8_block")
STEPS = 60


def fit(folder: Path, model: LightningModule, data: Any, **arguments: Any) -> LowPrecisionProfiler:
    short = {"rounds": 1, "traced_steps": 0, "guard_steps": 4, "stop_after": True, "progress": False}
    callback = profiler(folder, **{**short, **arguments})
    trainer(folder, callback, steps=STEPS, accelerator="gpu", precision="bf16-true").fit(model, data)
    return callback


def gpt(folder: Path, **arguments: Any) -> LowPrecisionProfiler:
    torch.manual_seed(0)
    model = MiniGPT(CONFIG, "transformer_engine", dtype=torch.bfloat16, device="cuda")
    return fit(folder, model, sequences(STEPS, CONFIG.batch, CONFIG.sequence), **arguments)


def guard(callback: LowPrecisionProfiler, recipe: str) -> NumericsReport:
    assert callback.report is not None
    found = callback.report.recipe(recipe).guard
    assert found is not None
    return found


def trials(callback: LowPrecisionProfiler, recipe: str, repeat: int = 0) -> list[Trial]:
    assert callback.session is not None
    facts = callback.session.recorder.snapshot().of(Trial)
    return [fact for fact in facts if (fact.recipe, fact.repeat) == (recipe, repeat) and fact.step >= 0]


def test_sound_recipes_are_ok(tmp_path: Path) -> None:
    callback = gpt(tmp_path, recipes=list(FP8))
    base = guard(callback, "bf16")
    assert base.state == "ok", base
    assert base.distance.value is not None
    assert base.distance.value < 0.1, base  # some kernels add in another order each time
    for name in FP8:
        found = guard(callback, name)
        assert found.state == "ok", (name, found)
        assert found.steps == 4
        assert found.distance.value is not None
        assert 0 < found.distance.value < 1, (name, found)  # another arithmetic: not equal to the last bit
        assert found.gradient_ratio.value == pytest.approx(1.0, abs=0.1), (name, found)
        assert (found.zero.value, found.not_finite.value) == (0, 0)
        assert [fact.loss for fact in trials(callback, name)] != [fact.loss for fact in trials(callback, "bf16")]
    assert callback.report is not None
    assert {part.void for part in callback.report.recipes if part.refusal is None} == {None}
    told = guard(callback, "fp8_delayed").scales
    assert told is not None
    assert "left 1" in told


def test_delayed_scaling_learns_its_scales_in_steps_that_are_undone(tmp_path: Path) -> None:
    """With scale 1, gradients of a mean over a thousand tokens are below E5M2's smallest number."""
    callback = gpt(tmp_path, recipes=["fp8_delayed"])
    assert callback.session is not None
    facts = [fact for fact in callback.session.recorder.snapshot().of(Trial) if fact.recipe == "fp8_delayed"]
    settle, first = facts[0], facts[GUARD_SETTLE]
    assert (settle.step, first.step) == (-GUARD_SETTLE, 0)
    assert first.zero == ()
    base = trials(callback, "bf16")[0]
    assert settle.loss == pytest.approx(base.loss, rel=0.05)  # the same weights, the same batch
    assert first.grad_norm == pytest.approx(base.grad_norm, rel=0.1)


def test_everything_rounded_to_zero_is_void(tmp_path: Path) -> None:
    """A margin of 2^40: every weight and input is zero in FP8, and the GEMMs are as fast as ever."""
    callback = gpt(tmp_path, recipes=["fp8_delayed"], recipe_arguments={"fp8_delayed": {"margin": 40}})
    found = guard(callback, "fp8_delayed")
    assert found.state == "zero gradients", found
    assert "are zero in every step, and not in bf16" in found.why
    assert "weight" in found.why
    assert callback.report is not None
    assert callback.report.recipe("fp8_delayed").void == found.why
    assert callback.report.headline[0].startswith("fp8_delayed: the gradients of ")
    assert not any("faster" in text for text in callback.report.headline)


def test_saturated_operands_are_far(tmp_path: Path) -> None:
    """A margin of 2^-6: what is above a 64th of the largest value becomes the largest that FP8 has."""
    callback = gpt(tmp_path, recipes=["fp8_delayed"], recipe_arguments={"fp8_delayed": {"margin": -6}})
    found = guard(callback, "fp8_delayed")
    assert found.state == "far", found
    assert callback.report is not None
    assert callback.report.headline[0].startswith("fp8_delayed: ")
    assert callback.report.headline[0].endswith("Look into that before you count on its speed.")


def test_scales_that_are_never_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowprec_callback.engines.transformer_engine import _state_manager

    manager = _state_manager(load())
    monkeypatch.setattr(manager, "reduce_and_update_fp8_tensors", classmethod(lambda cls, forward=True: None))
    callback = gpt(tmp_path, recipes=["fp8_delayed"])
    found = guard(callback, "fp8_delayed")
    assert found.scales is not None
    assert found.scales.startswith("every scale stayed at 1"), found
    assert found.state != "ok"
    assert callback.session is not None
    assert callback.session.recorder.snapshot().of(Scales)


class Dropped(LightningModule):
    """Much dropout: other random numbers make another loss."""

    def __init__(self) -> None:
        super().__init__()
        te, kind = load().te, {"params_dtype": torch.bfloat16, "device": "cuda"}
        self.layers = nn.Sequential(
            te.Linear(256, 512, **kind), nn.Dropout(0.5), te.Linear(512, 512, **kind), nn.Dropout(0.5),
            te.Linear(512, 256, **kind),
        )  # fmt: skip

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.layers(batch) - batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_recipe_draws_the_same_random_numbers(tmp_path: Path, accumulate: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(STEPS * accumulate * 64, 256).bfloat16()
    callback = profiler(tmp_path, recipes=list(FP8), rounds=1, traced_steps=0, guard_steps=4, progress=False)
    run = trainer(
        tmp_path, callback, steps=STEPS, accelerator="gpu", precision="bf16-true", accumulate_grad_batches=accumulate
    )
    run.fit(Dropped(), DataLoader(rows, batch_size=64))
    base = guard(callback, "bf16")
    assert base.distance.value is not None
    assert base.distance.value < 0.01, base
    for name in FP8:
        assert guard(callback, name).state == "ok", (name, guard(callback, name))
    assert {fact.micro_batches for fact in trials(callback, "bf16")} == {accumulate}


def test_a_batch_waits_on_the_host_and_comes_back_to_its_gpu() -> None:
    batch = {"x": torch.arange(4, device="cuda"), "y": torch.ones(2)}
    kept = Kept.of((batch,), {})
    assert {values.device.type for values, _, _ in kept.tensors} == {"cpu"}
    (again,), _ = kept.again()
    assert again["x"].device == batch["x"].device
    assert again["y"].device.type == "cpu"
    assert torch.equal(again["x"], batch["x"])


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, before = MiniGPT(CONFIG, "transformer_engine", dtype=torch.bfloat16, device="cuda"), Before()
    callback, after = profiler(tmp_path, recipes=["fp8_block"], rounds=1, traced_steps=0, progress=False), After(before)
    run = trainer(tmp_path, before, callback, after, steps=1, accelerator="gpu", precision="bf16-true")
    run.fit(model, sequences(STEPS, CONFIG.batch, CONFIG.sequence))
    assert callback.report is not None
    assert before.held
    assert after.same
