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
from lowprec_callback.resume import KEY
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


def first_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: value.clone() for name, value in Tiny().state_dict().items()}


def test_a_checkpoint_from_inside_the_sweep_holds_the_users_state_and_loads_without_us(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, callback = saved(tmp_path, at=12, steps=PLANNED + 4)
    assert callback.report.status == "finished"
    held = torch.load(path, weights_only=True)
    for name, value in first_weights().items():
        assert torch.equal(held["state_dict"][name], value), name
    assert held["optimizer_states"][0]["state"] == {}  # as before its first step
    assert held[KEY] == {"sweep": "running", "run_folder": str(callback.session.folder.absolute())}
    assert not held["callbacks"]

    module = Tiny()  # without us, and without a warning: those are errors here
    trainer(tmp_path, steps=16).fit(module, loader(60), ckpt_path=path, weights_only=True)
    assert module.steps == 4


def test_a_fit_that_resumes_inside_the_sweep_runs_it_anew(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, at=12, steps=PLANNED + 1)
    callback = short(tmp_path / "again")
    trainer(tmp_path, callback, steps=12 + PLANNED).fit(Tiny(), loader(60), ckpt_path=path, weights_only=True)
    assert callback.report is not None
    assert callback.report.status == "finished"
    assert callback.report.shrunk is None


def test_a_fit_that_resumes_behind_the_sweep_neither_repeats_it_nor_loses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, first = saved(tmp_path, at=PLANNED + 2, steps=PLANNED + 3)
    (run,) = runs_in(tmp_path / "runs")
    before = (run / FILE_NAME).read_bytes()

    module, callback = Tiny(), short(tmp_path / "runs")
    resumed = trainer(tmp_path, callback, steps=PLANNED + 6)
    resumed.fit(module, loader(60), ckpt_path=path, weights_only=True)
    assert module.steps == 4
    assert runs_in(tmp_path / "runs") == [run]
    assert (run / FILE_NAME).read_bytes() == before
    assert callback.session is None
    assert callback.report == first.report
    assert callback.why_not == f"the sweep was over before this checkpoint: it is not repeated, see {run}"
    assert callback.why_not in capsys.readouterr().err
    # And so it is in the checkpoints of the resumed run.
    resumed.save_checkpoint(tmp_path / "later.ckpt")
    assert torch.load(tmp_path / "later.ckpt", weights_only=True)[KEY]["sweep"] == "over"


def test_a_run_folder_that_is_gone_gives_no_report(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, at=PLANNED + 2, steps=PLANNED + 3)
    (run,) = runs_in(tmp_path / "runs")
    run.rename(tmp_path / "moved")
    callback = short(tmp_path / "runs")
    trainer(tmp_path, callback, steps=PLANNED + 4).fit(Tiny(), loader(60), ckpt_path=path, weights_only=True)
    assert callback.report is None


@pytest.mark.parametrize("how", ["a second fit", "resumed"])
def test_training_goes_on_in_the_recipe_that_was_asked_for(tmp_path: Path, how: str) -> None:
    seen: list[torch.dtype] = []
    path, callback = saved(tmp_path, at=PLANNED + 2, steps=PLANNED + 3, continue_with="bf16")
    module = Tiny(lambda m, _step: seen.append(m.net(torch.zeros(BATCH, 32)).dtype))
    if how == "resumed":
        callback = short(tmp_path / "runs", continue_with="bf16")
        run = trainer(tmp_path, callback, steps=PLANNED + 6)
        run.fit(module, loader(60), ckpt_path=path, weights_only=True)
    else:
        trainer(tmp_path, callback, steps=4).fit(module, loader(60))
    assert set(seen) == {torch.bfloat16}
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
        ends.append((type(caught.value).__name__, caught.value.code, module.steps, run.global_step))
        assert not vars(module).keys() & {"training_step", "backward"}
    assert ends[0] == ends[1]
    assert signal.getsignal(signal.SIGTERM) == before
    (run_folder,) = runs_in(tmp_path / "runs")
    (end,) = read(run_folder).of(End)
    assert end.status == "interrupted"
