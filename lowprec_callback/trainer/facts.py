"""What a session needs to know of the Trainer that it is a guest of, read without changing anything.

Written against Lightning's public attributes, and by names instead of classes: `lightning.pytorch` and
`pytorch_lightning` are two packages with the same code, and their classes are not the same.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import emit_nvtx

from lowprec_callback.engines.base import class_name
from lowprec_callback.sweep.ranks import Ranks, ranks_of
from lowprec_callback.sweep.session import Training


def training_of(trainer: Any, module: Any, batches: str, folder: str) -> Training:
    """Everything about this fit that a session wants.

    Args:
        trainer: its Trainer.
        module: its LightningModule.
        batches: those that the sweep's steps use, in words.
        folder: from `folder_of`.
    """
    return Training(
        model=module,
        device=module.device,
        name=str(getattr(module, "profile_name", class_name(module))),
        optimizers=trainer.optimizers,
        schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
        scaler=getattr(trainer.precision_plugin, "scaler", None),
        micro_batches=trainer.accumulate_grad_batches,
        batches=batches,
        rich_display="Rich" in type(trainer.progress_bar_callback).__name__,
        folder=folder,
        no_profiler=profiler_of(trainer),
        speaks=trainer.is_global_zero,
        processes=processes_of(trainer),
        holder=trainer.strategy.model,
        seconds_left=seconds_left(trainer),
    )


def processes_of(trainer: Any) -> Ranks:
    """Those that train together."""
    return ranks_of(trainer.strategy, trainer.global_rank, trainer.world_size)


def folder_of(trainer: Any) -> str:
    """Where run folders go, as with Lightning's own profilers: below the logger's folder, else the Trainer's root.

    Every rank must call it: Lightning asks rank zero.
    """
    return str(Path(trainer.log_dir or trainer.default_root_dir) / "lowprec")


def profiler_of(trainer: Any) -> str | None:
    """Which profiler of PyTorch's the user has attached, as a reason to open none beside it; None if none."""
    profiler = trainer.profiler
    if any(cls.__name__ == "PyTorchProfiler" for cls in type(profiler).__mro__):
        return "Lightning's PyTorchProfiler is attached, and a second session beside it would break both"
    for owner in (*trainer.callbacks, trainer.lightning_module, trainer.datamodule):
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, torch.profiler.profile | torch.autograd.profiler.profile | emit_nvtx):
                kind = type(value).__name__
                return (
                    f"{type(owner).__name__}.{name} is a {kind} of PyTorch's, and a second session beside it would "
                    f"break both"
                )
    return None


def steps_of_fit(trainer: Any, per_step: int = 1) -> int | None:
    """Optimizer steps (as the sweep counts them) from here until the fit ends; None if no end is known.

    Args:
        trainer: before its first step.
        per_step: what `global_step`, and with it `max_steps`, grows by in one of our steps.
    """
    ends: list[int] = []
    if trainer.max_steps != -1:
        ends.append((trainer.max_steps - trainer.global_step) // max(1, per_step))
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if epochs is not None and epochs != -1 and not math.isinf(batches):
        # The last window of an epoch is shorter, and is a step all the same.
        total = math.ceil(batches / trainer.accumulate_grad_batches) * epochs
        ends.append(total - trainer.global_step // max(1, per_step))
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
