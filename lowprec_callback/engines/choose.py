"""Which engine runs this model on this device, and why."""

from __future__ import annotations

import torch
from torch import nn

from lowprec_callback.engines.base import Engine
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, is_te_module, load


def choose_engine(model: nn.Module, device: torch.device) -> Engine:
    """Pick by what the model contains and what the machine can do; never fails."""
    te_modules = sum(is_te_module(module) for module in model.modules())
    if device.type != "cuda":
        why = f"the model is on {device.type}: Transformer Engine needs a CUDA device"
        return PlainTorchEngine(model, device, why)
    loaded = load()
    if te_modules == 0:
        why = "the model has no Transformer Engine layer"
        if not loaded.ok:
            why += f", and Transformer Engine cannot be imported here ({loaded.reason})"
        return PlainTorchEngine(model, device, why)
    if not loaded.ok:
        return PlainTorchEngine(model, device, f"Transformer Engine cannot be imported: {loaded.reason}")
    why = f"the model has {te_modules} Transformer Engine module{'s' * (te_modules > 1)}, on a CUDA device"
    return TransformerEngineEngine(model, device, why)
