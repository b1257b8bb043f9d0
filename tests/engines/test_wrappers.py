"""Paths and names are those of the model's author, whatever a strategy has put around or before them."""

from __future__ import annotations

import pytest
from torch import nn

from lowprec_callback.engines.base import class_name
from lowprec_callback.engines.plain_torch import plain_linears
from lowprec_callback.engines.wrappers import named_modules, submodule


class Fsdp(nn.Module):
    """Holds another as FSDP's first version does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


class Checkpointed(nn.Module):
    """As PyTorch's wrapper for activation checkpointing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module


def wrapped() -> nn.Module:
    inner = nn.Sequential(Fsdp(nn.Linear(4, 4)), Fsdp(Checkpointed(nn.Sequential(nn.GELU(), Fsdp(nn.Linear(4, 2))))))
    return Fsdp(inner)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 2)))


def test_a_wrapped_model_has_the_paths_of_the_plain_one() -> None:
    found = {path: type(module) for path, module in named_modules(wrapped())}
    assert found == {path: type(module) for path, module in plain().named_modules()}
    assert [layer.path for layer in plain_linears(wrapped(), True)] == ["0", "1.1"]


@pytest.mark.parametrize("make", [wrapped, plain])
def test_every_path_leads_to_its_module(make: type) -> None:
    model = make()
    for path, module in named_modules(model):
        assert submodule(model, path) is module
    for path in ("2", "1.1.weight", "1.x"):
        with pytest.raises(AttributeError):
            submodule(model, path)


def test_a_class_of_fully_shard_keeps_the_name_before() -> None:
    layer = nn.Linear(2, 2)
    assert class_name(layer) == "Linear"
    layer.__class__ = type("FSDPLinear", (type("FSDPModule", (), {}), nn.Linear), {})
    assert class_name(layer) == "Linear"
