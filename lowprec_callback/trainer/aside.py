"""What of a Trainer the sweep's steps would change, set aside; and what would see them, muted.

Written against Lightning's private attributes, all of which stand here, in `batches` and in `drive`. The loops'
`load_state_dict` is no way back: it marks them as resuming, which changes what the fit does next. So their attributes
and progress counters are copied and put back as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowprec_callback.sweep.patches import Patches
from lowprec_callback.trainer.parts import part


def _loops(loop: Any, cls: type) -> Iterator[Any]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, cls):
            yield from _loops(value, cls)


class _Loops:
    """The attributes of the fit's loops, nested ones too, and their progress counters."""

    def __init__(self, trainer: Any) -> None:
        loop, progress = part(trainer, "loops.loop", "_Loop"), part(trainer, "loops.progress", "_BaseProgress")
        self._kept = [(each, dict(vars(each))) for each in _loops(trainer.fit_loop, loop)]
        self._counters = [
            (value, copy.deepcopy(value))
            for _, attributes in self._kept
            for value in attributes.values()
            if isinstance(value, progress)
        ]

    def put_back(self) -> None:
        for loop, attributes in self._kept:
            vars(loop).clear()
            vars(loop).update(attributes)
        for counter, before in self._counters:
            counter.__dict__.update(copy.deepcopy(before.__dict__))


def muted_logger(trainer: Any, logger: Any) -> Any:
    """A logger that takes everything and keeps nothing, and names the folders of the one that it stands in for."""
    dummy = part(trainer, "loggers.logger", "DummyLogger")

    class Muted(dummy):  # type: ignore[misc, valid-type]
        @property
        def save_dir(self) -> Any:
            return getattr(logger, "log_dir", None) or logger.save_dir

        @property
        def log_dir(self) -> Any:
            return getattr(logger, "log_dir", None)

        @property
        def name(self) -> Any:
            return logger.name

        @property
        def version(self) -> Any:
            return logger.version

    return Muted()


def quiet_bar(bar: Any) -> Any:
    """The user's progress bar without its hooks: what draws it meanwhile (rich has a thread for that) asks for it."""
    hooks = [name for name in dir(type(bar)) if name.startswith("on_")]
    quiet = copy.copy(bar)
    quiet.__class__ = type(type(bar).__name__, (type(bar),), dict.fromkeys(hooks, lambda *_args, **_kwargs: None))
    return quiet


@contextmanager
def set_aside(trainer: Any, adapter: Any) -> Iterator[None]:
    """Inside, the Trainer has one callback that acts, `adapter`, no logger that keeps anything, and no checkpoints.

    Afterwards loops, results of `self.log`, metrics, and all that was taken away are as they were, whatever happened.
    """
    loops = _Loops(trainer)
    epoch, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    metrics = {name: copy.copy(value) for name, value in vars(connector).items() if name != "trainer"}
    names = ("should_stop", "callbacks", "loggers", "profiler")
    before = {name: getattr(trainer, name) for name in names}
    patches = Patches()
    try:
        epoch._results = type(epoch._results)(training=True)
        epoch.restarting = False
        bar = trainer.progress_bar_callback
        trainer.callbacks = [adapter] if bar is None else [adapter, quiet_bar(bar)]
        trainer.loggers = [muted_logger(trainer, logger) for logger in before["loggers"]]
        trainer.profiler = part(trainer, "profilers.base", "PassThroughProfiler")()
        patches.put(trainer, "save_checkpoint", lambda *_args, **_kwargs: None)
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)
        patches.undo()
        vars(connector).update(metrics)
        loops.put_back()
