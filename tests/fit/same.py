"""Two fits held against each other, bit for bit: all that a training shows to anybody.

`record` runs a case and writes down every batch, loss, learning rate, counter, logged row, checkpoint and state;
`differences` names what is not equal between two such records.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers.logger import Logger
from torch import nn

from lowprec_callback import LowPrecisionProfiler
from tests.fit.models import profiler


class Rows(Logger):
    """Keeps every row that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.drawn: list[str] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> str:
        return "0"

    @property
    def experiment(self) -> Any:
        return self

    def add_scalar(self, name: str, *_: Any) -> None:
        """As of TensorBoard's writer: modules call it by themselves."""
        self.drawn.append(name)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def plain(value: Any) -> Any:
    """Anything as data that `==` compares exactly: tensors by type, shape and the hash of their bytes."""
    if isinstance(value, nn.parameter.UninitializedParameter):
        return "no size yet"
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        dense = local.detach().cpu().coalesce().to_dense() if local.is_sparse else local.detach().cpu()
        data = dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(dense.dtype), tuple(dense.shape), hashlib.sha256(data).hexdigest()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, str | int | bool):
        return value
    return repr(type(value))


class Spy(Callback):
    """Writes down what a callback sees at each batch and epoch; one stands before ours, one after."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("batch", batch_idx, plain(batch), trainer.global_step, trainer.current_epoch))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [plain(p.grad) for p in pl_module.parameters() if p.grad is not None]
        self.seen.append(("gradients", hashlib.sha256(repr(gradients).encode()).hexdigest()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.seen.append(("loss", batch_idx, plain(outputs), plain(rates), trainer.global_step))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("validated", trainer.global_step, plain(dict(trainer.callback_metrics))))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("epoch", trainer.current_epoch, trainer.global_step, plain(dict(trainer.callback_metrics))))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen.append(("exception", type(exception).__name__, str(exception)))


@dataclass
class Case:
    """A training. `run` is called with a function that makes a Trainer (with our callback in it or not) and fits."""

    folder: Path
    ours: list[Callback]
    record: dict[str, Any] = field(default_factory=dict)

    def fit(
        self, module: Any, *data: Any, name: str = "", fit: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Any:
        """One fit, and everything that can be seen of it. `fit`: arguments of `Trainer.fit`."""
        rows, before, after = Rows(), Spy(), Spy()
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": rows,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        callbacks = [before, *self.ours, *arguments.pop("callbacks", []), after]
        trainer = Trainer(**{**defaults, **arguments}, callbacks=callbacks)
        caught = None
        try:
            trainer.fit(module, *data, **(fit or {}))
        except Exception as error:
            caught = f"{type(error).__name__}: {error}"
        self.record[f"{name} raised"] = caught
        for kind, spy in (("before", before), ("after", after)):
            for number, entry in enumerate(spy.seen):
                self.record[f"{name} {kind} {number}"] = entry
            self.record[f"{name} {kind} events"] = len(spy.seen)
        self.record[f"{name} rows"] = plain([list(row) for row in rows.rows])
        self.record[f"{name} drawn"] = list(rows.drawn)
        self.record[f"{name} ended at"] = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx)
        self.record[f"{name} callback metrics"] = plain(dict(trainer.callback_metrics))
        self.record[f"{name} logged metrics"] = plain(dict(trainer.logged_metrics))
        self._state(name, trainer, module)
        self._files(name)
        return trainer

    def _state(self, name: str, trainer: Any, module: Any) -> None:
        for key, value in module.named_parameters():
            self.record[f"{name} weight {key}"] = plain(value)
        for key, value in module.named_buffers():
            self.record[f"{name} buffer {key}"] = plain(value)
        self.record[f"{name} training"] = [part.training for part in module.modules()]
        self.record[f"{name} trainable"] = [parameter.requires_grad for parameter in module.parameters()]
        self.record[f"{name} gradients"] = [plain(parameter.grad) for parameter in module.parameters()]
        for index, optimizer in enumerate(trainer.optimizers):
            self.record[f"{name} optimizer {index}"] = plain(optimizer.state_dict())
        for index, config in enumerate(trainer.lr_scheduler_configs):
            self.record[f"{name} scheduler {index}"] = plain(config.scheduler.state_dict())
        for callback in trainer.callbacks:
            if callback not in self.ours:
                self.record[f"{name} callback {type(callback).__name__}"] = self._without_folder(
                    plain(callback.state_dict())
                )
        self.record[f"{name} loops"] = plain(trainer.fit_loop.state_dict())
        python, numpy_ = random.getstate(), np.random.get_state()
        self.record[f"{name} random"] = [repr(python), repr(plain(list(numpy_))), plain(torch.get_rng_state())]
        extra = getattr(module, "to_compare", None)
        self.record[f"{name} of the module's own"] = plain(extra()) if extra is not None else None

    def _files(self, name: str) -> None:
        files = sorted(path.relative_to(self.folder) for path in self.folder.rglob("*.ckpt"))
        self.record[f"{name} files"] = [str(path) for path in files]
        for path in files:
            checkpoint = torch.load(self.folder / path, weights_only=False)
            self.record[f"{name} file {path}"] = self._without_folder(plain(checkpoint))

    def _without_folder(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._without_folder(key): self._without_folder(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._without_folder(item) for item in value]
        return value.replace(str(self.folder), "FOLDER") if isinstance(value, str) else value


def quick(folder: Path, **arguments: Any) -> LowPrecisionProfiler:
    """A short sweep that has every part but the benchmark."""
    return profiler(folder / "ours", **{"rounds": 1, "guard_steps": 1, "progress": False, **arguments})


def record(
    run: Callable[[Case], None], folder: Path, ours: LowPrecisionProfiler | None = None, seed: int = 11
) -> dict[str, Any]:
    """Everything that a training shows, with our callback or without."""
    folder.mkdir(parents=True)
    seed_everything(seed, verbose=False)
    case = Case(folder, [ours] if ours is not None else [])
    run(case)
    return case.record


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What is not equal, by name."""
    return [name for name in {**first, **second} if first.get(name, "absent") != second.get(name, "absent")]
