"""Lightning's precisions, and both of its packages."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn
from torch.utils.data import DataLoader

from lowprec_callback.engines.transformer_engine import TransformerEngineEngine
from lowprec_callback.measure.library_log import LibraryListener
from lowprec_callback.recording import Dispatch, End, Plan, StepTime
from lowprec_callback.sweep.patches import Patches
from lowprec_callback.trainer.te_plugin import has_region, take_region_over
from tests.engines import fake_te
from tests.fit.models import BATCH, WIDTH, Rows, Tiny, Validated, loader, short, trainer
from tests.fit.test_sweep_in_fit import recording_of


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", lambda _self: None)


@pytest.mark.parametrize(
    ("precision", "recipes"),
    [
        ("32-true", ("fp32", "bf16")),
        ("bf16-true", ("bf16",)),  # a model that is stored in BF16 cannot run in FP32
        ("bf16-mixed", ("fp32", "bf16")),
    ],
)
def test_each_precision_and_its_own_region_afterwards(tmp_path: Path, precision: str, recipes: tuple[str, ...]) -> None:
    seen: list[torch.dtype] = []
    module = Tiny(lambda m, _step: seen.append(m.net(torch.zeros(BATCH, WIDTH, dtype=m.net[0].weight.dtype)).dtype))
    trainer(tmp_path, short(tmp_path, progress=False), steps=30, precision=precision).fit(module, loader(30))
    facts = recording_of(tmp_path)
    assert facts.of(End) == [End("finished")]
    assert facts.of(Plan)[-1].recipes == recipes
    # Inside, the recipe wins over the plugin's region; behind it, the plugin has it back.
    ran = {(fact.recipe, fact.other.format) for fact in facts.of(Dispatch)}
    assert ran == {(name, name) for name in recipes}
    assert seen[-1] == (torch.float32 if precision == "32-true" else torch.bfloat16)


def test_a_loss_scaler_is_restored(tmp_path: Path) -> None:
    """What `16-mixed` brings. On a CPU Lightning makes it BF16 without a scaler, so here it gets one by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    plugin._desired_input_dtype = torch.bfloat16
    module = Tiny()
    callback = short(tmp_path, progress=False, stop_after=True)
    trainer(tmp_path, callback, steps=40, plugins=plugin).fit(module, loader(40))
    assert recording_of(tmp_path).of(End) == [End("finished")]
    assert module.steps == 1
    assert scaler.get_scale() == 4.0  # it would have grown every second step
    assert int(scaler._growth_tracker) == 1  # type: ignore[attr-defined]


class TransformerEnginePrecision(Precision):
    """Lightning's plugin of this name with its three contexts, over the fake of the library."""

    precision: Any = "transformer-engine"

    def __init__(self, fake: fake_te.Fake) -> None:
        self.fake = fake
        self.recipe = fake_te.DelayedScaling()
        self.weights_dtype = torch.float32
        self.fallback_compute_dtype = torch.float32

    def tensor_init_context(self) -> Any:
        return nullcontext()

    def forward_context(self) -> Any:
        stack = ExitStack()
        stack.enter_context(self.fake.te.autocast(enabled=True, recipe=self.recipe))
        return stack


DEPTHS: list[tuple[str, int, Any]] = []
"""Of all steps. Not an attribute of the module's, which would be put back."""


class OnFakes(Validated):
    """Two layers of the fake library's; notes the regions that its steps run in."""

    def __init__(self, fake: fake_te.Fake) -> None:
        super().__init__()
        self.fake = fake
        self.net = nn.Sequential(  # type: ignore[assignment]
            fake_te.Linear(fake, WIDTH, 48, bias=False), fake_te.Linear(fake, 48, WIDTH, bias=False)
        )

    def note(self, where: str) -> None:
        state = self.fake.manager.state()
        name = type(state.fp8_recipe).__name__ if state.fp8_enabled else "off"
        DEPTHS.append((where, state.autocast_depth, name))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.note("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("evaluate")
        super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_plugins_region_is_taken_over_for_the_sweep_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_te.install(monkeypatch)
    monkeypatch.setattr(LibraryListener, "listen", lambda *_: nullcontext())
    monkeypatch.setattr(
        "lowprec_callback.sweep.session.choose_engine",
        lambda model, device: TransformerEngineEngine(model, device, "a fake"),
    )
    monkeypatch.setattr(TransformerEngineEngine, "refusal", lambda *_: None)
    monkeypatch.setattr(TransformerEngineEngine, "probe", lambda *_: None)
    DEPTHS.clear()
    module, plugin = OnFakes(fake), TransformerEnginePrecision(fake)
    callback = short(tmp_path, recipes=["bf16", "fp8_current"], progress=False)
    run = trainer(
        tmp_path,
        callback,
        steps=30,
        plugins=plugin,
        val_check_interval=8,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    fits = 32  # tokens that FP8 can sum over
    run.fit(module, DataLoader(Rows(30 * fits), batch_size=fits), DataLoader(Rows(fits), batch_size=fits))
    facts = recording_of(tmp_path)
    assert facts.of(End) == [End("finished")]
    planned = facts.of(Plan)[-1].steps
    trained = [entry for entry in DEPTHS if entry[0] == "train"]
    # One region deep, ours alone: that of the baseline, which is off, or the recipe's.
    assert {entry[1:] for entry in trained[:planned]} == {(1, "off"), (1, "Float8CurrentScaling")}
    assert {entry[1:] for entry in trained[planned:]} == {(1, "DelayedScaling")}
    # Evaluation is the user's all the time.
    assert {entry[1:] for entry in DEPTHS if entry[0] == "evaluate"} == {(1, "DelayedScaling")}
    assert "train_step_context" not in vars(plugin)
    assert fake.manager.state().autocast_depth == 0


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_an_exception_gives_the_plugins_region_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, patches = TransformerEnginePrecision(fake_te.install(monkeypatch)), Patches()
    assert has_region(plugin)
    assert not has_region(Precision())
    take_region_over(Precision(), patches)
    take_region_over(plugin, patches)
    take_region_over(plugin, patches)
    with plugin.train_step_context():
        assert plugin.fake.manager.state().autocast_depth == 0
    with plugin.val_step_context():
        assert plugin.fake.manager.state().autocast_depth == 1
    patches.undo()
    with plugin.train_step_context():
        assert plugin.fake.manager.state().autocast_depth == 1


class OfTheOtherPackage(pytorch_lightning.LightningModule):
    """The same model for `pytorch_lightning`, whose classes are others than `lightning.pytorch`'s."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_the_trainer_of_pytorch_lightning_accepts_it(tmp_path: Path) -> None:
    module, callback = OfTheOtherPackage(), short(tmp_path, progress=False)
    run = pytorch_lightning.Trainer(
        max_steps=30,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    run.fit(module, loader(30))
    facts = recording_of(tmp_path)
    assert facts.of(End) == [End("finished")]
    assert len(facts.of(StepTime)) == 8
    assert {fact.recipe for fact in facts.of(Dispatch)} == {"fp32", "bf16"}
    assert not vars(module).keys() & {"training_step", "backward"}
