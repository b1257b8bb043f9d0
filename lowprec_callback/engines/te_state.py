"""What Transformer Engine (TE) notes on its modules: which recipe their last forward ran in, and what they keep of it.

Nothing here imports TE; modules and recipes are read by the names of their attributes.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowprec_callback.engines.base import Region

READ_LATE = frozenset(
    {
        "amax_compute_algo",
        "amax_history_len",
        "backward_override",
        "fp8_dpa",
        "fp8_mha",
        "margin",
        "qfactory",
        "reduce_amax",
        "scaling_factor_compute_algo",
    }
)
"""Arguments that TE reads from the region's recipe when it needs them. All others it builds into quantizers, which a
module keeps as long as the *class* of the recipe stays the same (TE issue #3157). `qfactory` cannot be compared: a
custom recipe's quantizers are built again for another recipe object."""


def region_of(module: nn.Module, asked: Any) -> Region:
    """The quantized region of a module's last forward, against the recipe `asked` (None: no quantized region)."""
    active = getattr(module, "fp8", None)
    if isinstance(active, bool):
        meta = getattr(module, "fp8_meta", None)
        if not active or not isinstance(meta, dict):
            return Region(active)
        recipe = meta.get("recipe")
        return Region(True, _unlike(recipe, asked), _stale(meta, recipe))
    if not type(module).__module__.startswith("transformer_engine.pytorch.ops"):
        return Region()
    operation = next((each for each in module.modules() if "_fp8_metas" in each.__dict__), module)
    metas = getattr(operation, "_fp8_metas", None)
    if metas is None:
        return Region(False)
    forward = metas.get("forward") or metas
    recipe = forward.get("recipe")
    return Region(True, _unlike(recipe, asked), _stale(forward, recipe))


def uncached(module: nn.Module) -> bool:
    """Whether a module's last forward quantized its weight for that call alone.

    Told `is_first_microbatch`, a TE module keeps the quantized weight in `_fp8_workspaces` for the other micro-batches
    of the step; a weight that is stored in the recipe's format needs no cast at all.
    """
    workspaces = getattr(module, "_fp8_workspaces", None)
    if getattr(module, "fp8", None) is not True or not isinstance(workspaces, dict) or workspaces:
        return False
    weights = [p for name, p in module.named_parameters(recurse=False) if p.dim() == 2 and "weight" in name]
    return bool(weights) and not any(hasattr(weight, "_quantizer") for weight in weights)


def held(model: nn.Module) -> dict[str, Any]:
    """What TE keeps on its modules and for itself: see `Engine.held`."""
    modules = [each for each in model.modules() if type(each).__module__.startswith("transformer_engine")]
    metas = [getattr(each, name, None) for each in modules for name in ("fp8_meta", "_fp8_metas")]
    return {
        "quantized": [each.__dict__.get("_fp8_workspaces") for each in modules],
        "buffers": [list(_states(meta)) for meta in metas],
        "workspaces": _workspaces(),
    }


def _states(meta: Any) -> Iterator[Any]:
    """Scales and amax histories of a module's `fp8_meta`, or of an operator's, which has one for each direction."""
    for value in list(meta.values()) if isinstance(meta, dict) else []:
        if isinstance(value, dict):
            yield from _states(value)
        else:
            yield from (getattr(value, name, None) for name in ("scale", "amax_history"))


def _workspaces() -> list[Any]:
    """TE's workspaces for cuBLASLt, if it has made them: `get_cublas_workspace` keeps its results (`lru_cache`)."""
    gemm = sys.modules.get("transformer_engine.pytorch.cpp_extensions.gemm")
    make = getattr(gemm, "get_cublas_workspace", None)
    if not hasattr(make, "cache_info"):
        return []
    # The cache offers no view of what is in it, but it refers to its table of results, whose keys are arguments.
    tables = [each for each in gc.get_referents(make) if isinstance(each, dict) and "__wrapped__" not in each]
    return [made for table in tables for made in table.values()]


def recipe_text(recipe: Any, beside: Any = None) -> str:
    """`Float8CurrentScaling`, or beside another of its class `Float8CurrentScaling(fp8_format=E4M3)`."""
    name = type(recipe).__name__
    if type(recipe) is not type(beside) or not dataclasses.is_dataclass(recipe):
        return name
    changed = ", ".join(f"{field}={_value(getattr(recipe, field))}" for field in _differing(recipe, beside))
    return f"{name}({changed})" if changed else name


def _unlike(recipe: Any, asked: Any) -> str | None:
    """The recipe in words if it is another than asked."""
    if recipe is None or recipe is asked or recipe == asked:
        return None
    return recipe_text(recipe, asked)


def _stale(meta: dict[str, Any], recipe: Any) -> str | None:
    """The recipe that a module's quantizers were built for, if it would build others now."""
    for key in ("scaling_fwd", "scaling_bwd"):
        built = getattr(meta.get(key), "recipe", None)
        if built is None or built is recipe or type(built) is not type(recipe):
            continue
        if dataclasses.is_dataclass(built) and set(_differing(built, recipe)) - READ_LATE:
            return recipe_text(built, recipe)
    return None


def _differing(one: Any, other: Any) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(one)
        if field.compare and getattr(one, field.name, None) != getattr(other, field.name, None)
    ]


def _value(value: Any) -> str:
    return str(getattr(value, "name", value))
