"""Every hook of Lightning's that a fit comes through, and every step of our own: places where an exception can come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

NO_HOOKS = {"on_gpu", "on_load_checkpoint"}
"""Names that look like hooks: a property; and what runs only where a checkpoint is loaded."""

STEPS = (
    "training_step",
    "validation_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "setup",
    "teardown",
    "configure_model",
    "transfer_batch_to_device",
)
"""Methods of a LightningModule that Lightning calls, besides those that begin with `on_`."""


class Planted(Exception):
    """Raised where a test says."""


def callback_hooks() -> list[str]:
    """Every hook that Lightning's Callback declares."""
    names = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown", "state_dict")]
    return sorted(set(names) - NO_HOOKS)


def module_hooks() -> list[str]:
    """Every hook that a LightningModule may override."""
    declared = {name for owner in (ModelHooks, DataHooks, CheckpointHooks, LightningModule) for name in vars(owner)}
    return sorted({name for name in declared if name.startswith("on_") or name in STEPS} - NO_HOOKS)


class Mine(Callback):
    """A user's callback, which raises in one hook.

    Args:
        hook: its name; None only to count.
        at: how many calls of it are let through.
    """

    def __init__(self, hook: str | None = None, at: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        for name in callback_hooks():
            setattr(self, name, counting(getattr(self, name), name, self.calls, at if name == hook else None))


def planted_in(module: LightningModule, hook: str | None = None, at: int = 0) -> Counter[str]:
    """Make one hook of a LightningModule raise; gives the number of calls of each hook, as it grows."""
    calls: Counter[str] = Counter()
    for name in module_hooks():
        original = getattr(module, name, None)
        if callable(original):
            module.__dict__[name] = counting(original, name, calls, at if name == hook else None)
    return calls


def counting(original: Callable[..., Any], name: str, calls: Counter[str], at: int | None) -> Callable[..., Any]:
    """`original`, counted; raises instead of being called for the (at + 1)-th time."""

    def hook(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if at is not None and calls[name] == at + 1:
            raise Planted(f"in {name}")
        return original(*args, **kwargs)

    return hook
