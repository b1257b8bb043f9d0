"""Transformer Engine (TE) and its recipes: the only file of the example that imports TE.

TE is found at run time. Where it cannot be used, `why_plain()` keeps the reason, and MiniGPT is built from
PyTorch's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lowprec_callback.recipes import RecipeError, load_cards

Region = Callable[[], AbstractContextManager[Any]]
"""Opens the region in which a forward pass runs in a recipe; one call a forward pass."""


@cache
def _find_te() -> tuple[Any, str]:
    if not torch.cuda.is_available():
        return None, "no CUDA device"
    try:
        return import_module("transformer_engine.pytorch"), ""
    except Exception as error:  # a broken TE raises RuntimeError, OSError, AssertionError: whatever it met
        return None, f"transformer_engine.pytorch does not import: {type(error).__name__}: {error}"


def te() -> Any:
    """The module `transformer_engine.pytorch`, or None."""
    return _find_te()[0]


def why_plain() -> str:
    """Why TE is not used here; empty where it is."""
    return _find_te()[1]


def te_recipe(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """TE's recipe object for one of the cards in `recipes/`.

    Args:
        name: of the card, e.g. "fp8_delayed".
        arguments: TE's keyword arguments that differ from the card's; formats as text, e.g. "HYBRID".

    Raises:
        RecipeError: TE cannot be used here, has no such recipe, or the card names none.
    """
    card = load_cards()[name].with_arguments(arguments or {})
    if te() is None:
        raise RecipeError(f"recipe {name} needs Transformer Engine, which cannot be used here: {why_plain()}")
    module = import_module("transformer_engine.common.recipe")
    if card.te_class is None or not hasattr(module, card.te_class):
        raise RecipeError(f"recipe {name}: this Transformer Engine has no {card.te_class or 'class for it'}")
    formats = {key: module.Format[value] for key, value in card.arguments.items() if key.endswith("_format")}
    return getattr(module, card.te_class)(**{**card.arguments, **formats})


def region(name: str, model: nn.Module, arguments: Mapping[str, Any] | None = None) -> Region:
    """What a forward pass of the model has to run in so that it uses a recipe.

    Raises:
        RecipeError: the recipe is not known, or cannot run here; the text says why.
    """
    cards = load_cards()
    if name not in cards:
        raise RecipeError(f"no recipe {name!r}; known: {', '.join(cards)}")
    parameter = next(model.parameters())
    if name == str(parameter.dtype).replace("torch.float", "fp").replace("torch.bfloat", "bf"):
        return nullcontext
    if name == "fp32":
        raise RecipeError(f"recipe fp32 needs FP32 parameters, the model has {parameter.dtype}")
    if name == "bf16":
        return lambda: torch.autocast(parameter.device.type, dtype=torch.bfloat16)
    # One object for all regions: TE keeps the scales of delayed scaling by recipe.
    recipe = te_recipe(name, arguments)
    if hasattr(te(), "autocast"):
        return lambda: te().autocast(enabled=True, recipe=recipe)
    return lambda: te().fp8_autocast(enabled=True, fp8_recipe=recipe)  # before 2.9


def quantized_weights(name: str, arguments: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
    """TE layers that are built inside keep their weights in the recipe's format only."""
    recipe = te_recipe(name, arguments)
    enter = getattr(te(), "quantized_model_init", None) or te().fp8_model_init  # the name before 2.9
    return enter(enabled=True, recipe=recipe)  # type: ignore[no-any-return]
