"""What a session needs to know of the Trainer that it is a guest of, read without changing anything.

Written against Lightning's public attributes, and by names instead of classes: `lightning.pytorch` and
`pytorch_lightning` are two packages with the same code, and their classes are not the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from lowprec_callback.engines.base import class_name
from lowprec_callback.sweep.ranks import ranks_of
from lowprec_callback.sweep.session import Training
from lowprec_callback.trainer.step_window import StepWindow


def training_of(trainer: Any, module: Any, window: StepWindow) -> Training:
    """Everything about this fit that a session wants. `window` is the one that its batches will be counted in."""

    def left_now() -> int | None:
        batches = None if module.automatic_optimization else window.batches
        return steps_left(trainer, window.increments, batches)

    return Training(
        model=module,
        device=module.device,
        name=str(getattr(module, "profile_name", class_name(module))),
        optimizers=trainer.optimizers,
        schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
        scaler=getattr(trainer.precision_plugin, "scaler", None),
        steps_left=steps_left(trainer, per_step=1 if module.automatic_optimization else len(trainer.optimizers)),
        micro_batches=trainer.accumulate_grad_batches,
        other_progress_bar=trainer.progress_bar_callback is not None,
        speaks=trainer.is_global_zero,
        processes=ranks_of(trainer.strategy, trainer.global_rank, trainer.world_size),
        holder=trainer.strategy.model,
        averages=averages(trainer.callbacks),
        seconds_left=seconds_left(trainer),
        steps_left_now=left_now,
    )


def steps_left(trainer: Any, per_step: int = 1, batches_per_step: int | None = None) -> int | None:
    """Optimizer steps (as the sweep counts them) until the fit ends; None if no end is known.

    Args:
        trainer: at the end of a step, or before the first.
        per_step: what `global_step`, and with it `max_steps`, grows by in one of our steps.
        batches_per_step: batches in one of our steps; None for what the Trainer accumulates.
    """
    ends: list[int] = []
    if trainer.max_steps != -1:
        ends.append((trainer.max_steps - trainer.global_step) // max(1, per_step))
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if epochs is not None and epochs != -1 and not math.isinf(batches):
        if batches_per_step is None:
            # The last window of an epoch is shorter, and is a step all the same.
            total = math.ceil(batches / trainer.accumulate_grad_batches) * epochs
            ends.append(total - trainer.global_step // max(1, per_step))
        else:
            # fit_loop counts from -1: the index of the last batch over all epochs.
            done = trainer.fit_loop.total_batch_idx + 1
            ends.append((int(batches) * epochs - done) // max(1, batches_per_step))
    return max(0, min(ends)) if ends else None


def seconds_left(trainer: Any) -> float | None:
    """Seconds until `max_time` ends the fit; None where there is no such limit."""
    found = [
        left
        for callback in trainer.callbacks
        if callable(getattr(callback, "time_remaining", None)) and (left := callback.time_remaining()) is not None
    ]
    return min(found) if found else None


def refusal(trainer: Any, module: nn.Module) -> str | None:
    """Why this fit cannot be profiled as it stands, as a sentence; None if it can. Nothing was touched by then."""
    if getattr(trainer, "fast_dev_run", False):
        return "fast_dev_run runs too few steps to profile; nothing was profiled"
    if graphed := graphed_modules(module):
        more = f" and {len(graphed) - 1} more" if len(graphed) > 1 else ""
        return (
            f"{graphed[0] or 'the model'}{more} was captured in a CUDA graph (make_graphed_callables), which replays "
            f"the kernels of the recipe that it was captured in, whatever recipe is asked for; nothing was profiled: "
            f"profile before capturing"
        )
    every = trainer.val_check_batch if getattr(trainer, "enable_validation", False) else math.inf
    if (
        every <= trainer.accumulate_grad_batches
        and (trainer.check_val_every_n_epoch or 1) == 1
        and (trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined())
    ):
        return (
            "evaluation runs inside every optimizer step (val_check_interval), so that none could be timed without it; "
            "nothing was profiled: profile with a longer val_check_interval, or with limit_val_batches=0"
        )
    return None


def graphed_modules(model: nn.Module) -> list[str]:
    """Modules whose forward was replaced by `make_graphed_callables`, PyTorch's or Transformer Engine's.

    Both put a function of their own on the instance. Callables that were captured without being a module's forward
    (Transformer Engine's `_order`) leave no sign on the model.
    """
    return [
        path
        for path, module in model.named_modules()
        if "make_graphed" in getattr(vars(module).get("forward"), "__qualname__", "")
    ]


def averages(callbacks: Iterable[Any]) -> list[nn.Module]:
    """Modules that other callbacks keep beside the model (moving averages of its weights), which the sweep's steps
    would change.
    """
    return [value for callback in callbacks for value in vars(callback).values() if isinstance(value, nn.Module)]
