"""Lightning's precision plugin "transformer-engine": its own region, taken over and given back.

The plugin opens three contexts around `training_step`: a default dtype, `torch.autocast` as a fallback for what
Transformer Engine does not run, and Transformer Engine's region with the plugin's recipe. The sweep opens regions of
its own inside; the last of the three would then still be entered and left at every step, and reduce the scales of a
recipe that does not run. So while a recipe of ours runs, `training_step` gets the first two only. Evaluation keeps
all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowprec_callback.sweep.patches import Patches

PLUGIN = "TransformerEnginePrecision"
"""The class, in `lightning` as in `pytorch_lightning`."""


def has_region(plugin: Any) -> bool:
    """Whether a precision plugin opens a region of Transformer Engine's."""
    return any(base.__name__ == PLUGIN for base in type(plugin).__mro__)


def take_region_over(plugin: Any, patches: Patches) -> None:
    """Leave the plugin's own region out of `training_step`, until `patches` are undone."""
    if not has_region(plugin) or "train_step_context" in vars(plugin):
        return

    @contextmanager
    def train_step_context() -> Iterator[None]:
        fallback = torch.autocast(device_type="cuda", dtype=plugin.fallback_compute_dtype)
        with plugin.tensor_init_context(), fallback:
            yield

    patches.put(plugin, "train_step_context", train_step_context)
