"""The modules that a model's author wrote, whatever a strategy has put around them.

FSDP's first version and activation checkpointing put a module around another, with a name of its own in every path
(`layers.0._fsdp_wrapped_module.mlp`). Paths here are those without: a model has the same ones however it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Under which name a wrapper holds what it wraps."""


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `nn.Module.named_modules`, without wrappers."""
    for path, module in model.named_modules():
        if not any(name in module._modules for name in INSIDE):
            yield ".".join(part for part in path.split(".") if part not in INSIDE), module


def submodule(model: nn.Module, path: str) -> nn.Module:
    """The module at a path of `named_modules`.

    Raises:
        AttributeError: there is none.
    """
    module = _inside(model)
    for part in path.split(".") if path else ():
        module = _inside(module.get_submodule(part))
    return module


def _inside(module: nn.Module) -> nn.Module:
    while (name := next((name for name in INSIDE if name in module._modules), None)) is not None:
        module = module.get_submodule(name)
    return module
