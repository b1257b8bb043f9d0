"""The Trainer's own loggers in a real fit: what they wrote is read back."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lowprec_callback.trainer.loggers import metrics
from tests.fit.models import Tiny, loader, short, trainer

STEPS = 30


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is made, printed and logged. Its plots and its HTML page took longest, and nobody looks at them."""
    monkeypatch.setattr("lowprec_callback.publish.write_files", lambda *_: True)


class Minimal(Logger):
    """A logger that can do no more than it must."""

    name, version = "minimal", 0

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[dict[str, float], int | None]] = []
        self._error = error

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))
        if self._error and any(key.startswith("lowprec/") for key in metrics):
            raise self._error

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Logs(Tiny):
    """A user's module that logs something in every step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", float(self.steps))
        return loss


def ours(calls: list[tuple[dict[str, float], int | None]]) -> list[tuple[dict[str, float], int | None]]:
    return [(found, step) for found, step in calls if any(key.startswith("lowprec/") for key in found)]


def test_a_csv_and_a_logger_that_can_do_little(tmp_path: Path) -> None:
    minimal = Minimal()
    logger = CSVLogger(str(tmp_path / "logs"))
    callback = short(tmp_path / "runs", log=True)
    fit = trainer(tmp_path, callback, steps=STEPS, logger=[logger, minimal], log_every_n_steps=1)
    fit.fit(Logs(), loader(STEPS))
    assert callback.report is not None
    expected = metrics(callback.report)
    assert "lowprec/bf16/step_speedup" in expected

    assert ours(minimal.calls) == [(expected, 0)]  # where training begins

    with (Path(logger.log_dir) / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    (row,) = [row for row in rows if row["lowprec/bf16/step_ms"]]
    assert {key: float(value) for key, value in row.items() if value and key.startswith("lowprec/")} == expected
    assert int(row["step"]) == 0
    # The user's own line is whole: every step, in order, none moved.
    mine = [(int(row["step"]), float(row["mine"])) for row in rows if row["mine"]]
    assert mine == [(step, float(step + 1)) for step in range(STEPS)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(str(tmp_path / "logs"))
    callback = short(tmp_path / "runs", log=True)
    trainer(tmp_path, callback, steps=STEPS, logger=logger, log_every_n_steps=1).fit(Logs(), loader(STEPS))
    assert callback.report is not None
    events = accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("lowprec/")]
    read = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    # Event files hold 32-bit numbers.
    assert read == {name: [(0, pytest.approx(value, rel=1e-6))] for name, value in metrics(callback.report).items()}
    assert [event.step for event in events.Scalars("mine")] == list(range(STEPS))


def test_a_logger_that_raises_does_not_harm_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = Minimal(ConnectionError("no route to the server")), Minimal()
    callback = short(tmp_path, log=True, traced_steps=0)
    fit = trainer(tmp_path, callback, steps=STEPS, logger=[bad, good], log_every_n_steps=1)
    fit.fit(Tiny(), loader(STEPS))
    assert fit.global_step == STEPS
    assert callback.report is not None
    assert ours(good.calls)
    assert "Minimal did not take the figures (ConnectionError: no route to the server)" in capsys.readouterr().err


def test_without_being_asked_nothing_is_logged(tmp_path: Path) -> None:
    off, callback = Minimal(), short(tmp_path, traced_steps=0)
    trainer(tmp_path, callback, steps=5, logger=off, log_every_n_steps=1).fit(Logs(), loader(STEPS))
    assert callback.report is not None
    assert off.calls
    assert not ours(off.calls)
