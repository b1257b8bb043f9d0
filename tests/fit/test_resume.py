"""Checkpoints and resumed runs, fits that follow each other, and everything of a Trainer that is no fit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lowprec_callback.recording import FILE_NAME, End, read
from lowprec_callback.sweep.plan import Settings
from tests.fit.models import BATCH, Rows, Tiny, Validated, loader, short, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*ended before the epoch ended")  # which is so, and Lightning's own

PLANNED = Settings(2, 1, 2, 1, guard_steps=0).steps(2)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is wanted here, its plots are not, and take most of the time."""
    monkeypatch.setattr("lowprec_callback.show.plots.save_all", lambda *_: [])
    monkeypatch.setattr("lowprec_callback.show.html.save", lambda *_: None)


def runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{FILE_NAME}"))


class Saver(Callback):
    """Saves at one step. It has no state, about which Lightning would warn where it is missing."""

    def __init__(self, path: Path, at: int) -> None:
        self._path, self._at = path, at

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._at:
            trainer.save_checkpoint(self._path)


def saved(folder: Path, at: int, steps: int, **arguments: Any) -> tuple[Path, Any]:
    """A fit of so many steps with a checkpoint at step `at`, and its profiler."""
    callback = short(folder / "runs", **arguments)
    path = folder / "saved.ckpt"
    trainer(folder, callback, Saver(path, at), steps=steps).fit(Tiny(), loader(60))
    return path, callback


def test_a_checkpoint_holds_nothing_of_ours_and_loads_without_us(tmp_path: Path) -> None:
    path, callback = saved(tmp_path, at=2, steps=4)
    assert callback.report.status == "finished"
    held = torch.load(path, weights_only=True)
    assert held["global_step"] == 2
    assert not [key for key in held if "lowprec" in key]
    assert not held["callbacks"]

    module = Tiny()  # without us, and without a warning: those are errors here
    trainer(tmp_path, steps=6).fit(module, loader(60), ckpt_path=path, weights_only=True)
    assert module.steps == 4


def test_a_resumed_fit_is_profiled_before_its_first_batch(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, at=2, steps=4)
    module, callback = Tiny(), short(tmp_path / "again")
    resumed = trainer(tmp_path, callback, steps=6)
    resumed.fit(module, loader(60), ckpt_path=path, weights_only=True)
    assert (resumed.global_step, module.steps) == (6, 4)
    assert callback.report is not None
    assert callback.report.status == "finished"
    assert len(runs_in(tmp_path / "again")) == 1


@pytest.mark.parametrize("how", ["the first fit", "a second fit"])
def test_training_goes_on_in_the_recipe_that_was_asked_for(tmp_path: Path, how: str) -> None:
    seen: list[torch.dtype] = []
    callback = short(tmp_path / "runs", continue_with="bf16")
    if how == "a second fit":
        trainer(tmp_path, callback, steps=2).fit(Tiny(), loader(60))
    module = Tiny(lambda m, _step: seen.append(m.net(torch.zeros(BATCH, 32)).dtype))
    trainer(tmp_path, callback, steps=4).fit(module, loader(60))
    assert seen[-4:] == [torch.bfloat16] * 4
    assert "training_step" not in vars(module)
    assert len(runs_in(tmp_path / "runs")) == 1


def test_everything_that_is_no_fit_is_left_alone(tmp_path: Path) -> None:
    class Tested(Validated):
        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.net(batch)

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch)  # type: ignore[no-any-return]

    module, callback = Tested(), short(tmp_path)
    run = trainer(tmp_path, callback)
    data = DataLoader(Rows(BATCH), batch_size=BATCH)
    for do in (run.validate, run.test, run.predict):
        do(module, data)
        assert not vars(module).keys() & {"training_step", "backward"}
    assert callback.session is None
    assert callback.why_not is None
    assert not runs_in(tmp_path)
    # And still profiles when a fit comes, with evaluation afterwards.
    run.fit(module, loader(60), data)
    assert callback.report is not None
    run.validate(module, data)
    assert len(runs_in(tmp_path)) == 1


class Tunable(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(60 * BATCH), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore:.*Failed to compute suggestion")
def test_the_tuners_own_fits_are_not_profiled_and_the_one_behind_them_is(tmp_path: Path) -> None:
    module, callback = Tunable(), short(tmp_path / "runs")
    run = trainer(tmp_path, callback, steps=PLANNED)
    tuner = Tuner(run)
    tuner.lr_find(module, num_training=5)
    assert callback.session is None
    tuner.scale_batch_size(module, max_trials=2)
    assert callback.session is None
    assert not runs_in(tmp_path / "runs")
    run.fit(module)
    assert callback.report is not None
    assert read(runs_in(tmp_path / "runs")[0]).of(End) == [End("finished")]


@pytest.mark.filterwarnings("ignore:.*Failed to compute suggestion")
def test_a_callback_that_searches_first(tmp_path: Path) -> None:
    finder = LearningRateFinder(num_training_steps=5)
    callback = short(tmp_path / "runs")
    run: Trainer = trainer(tmp_path, finder, callback, steps=PLANNED)
    run.fit(Tunable())
    assert callback.report is not None
    assert callback.report.status == "finished"


def test_sigterm_ends_the_fit_as_without_us(tmp_path: Path) -> None:
    def kill(_module: Tiny, step: int) -> None:
        if step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    ends = []
    for callbacks in ([short(tmp_path / "runs")], []):
        module = Tiny(kill)
        run = trainer(tmp_path, *callbacks)
        with pytest.raises(SystemExit) as caught:  # Lightning's SIGTERMException is one
            run.fit(module, loader(60))
        ends.append((type(caught.value).__name__, caught.value.code))
        assert not vars(module).keys() & {"training_step", "backward"}
        # In the sweep no step of training was done yet, and everything is put back.
        assert (module.steps, run.global_step) == ((0, 0) if callbacks else (12, 12))
    assert ends[0] == ends[1]
    assert signal.getsignal(signal.SIGTERM) == before
    (run_folder,) = runs_in(tmp_path / "runs")
    (end,) = read(run_folder).of(End)
    assert end.status == "interrupted"
