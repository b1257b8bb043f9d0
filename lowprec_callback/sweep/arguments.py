"""The callback's arguments, looked at when it is constructed: each message names the argument and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from lowprec_callback.recipes import RecipeError, load_cards, resolve
from lowprec_callback.sweep.time_budget import A_LIMIT, is_limit

ANY_ENGINE = "transformer_engine"
"""Names of recipes are checked before the engine is known; `resolve` lets a named recipe through for any."""

RECIPES = ("recipes", "baseline", "continue_with")
"""Arguments that name recipes."""


def check(values: Mapping[str, Any]) -> None:
    """Look at those arguments that the plan does not look at itself.

    Args:
        values: arguments by name, each with an entry in `RULES`.

    Raises:
        ValueError: one of them has a value that it cannot have.
    """
    for name, value in values.items():
        allowed, holds = RULES[name]
        if not holds(value):
            raise ValueError(f"{name}={value!r}: must be {allowed}")
    known = dict(load_cards())
    for name in RECIPES:
        try:
            known.update((card.name, card) for card in resolve(values.get(name), ANY_ENGINE))
        except RecipeError as error:
            raise ValueError(f"{name}: {error}") from error
    for recipe in values.get("recipe_arguments") or ():
        if recipe not in known:
            raise ValueError(f"recipe_arguments names {recipe!r}; known recipes: {', '.join(known)}")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_names(value: Any) -> bool:
    return _is_name(value) or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))


def _is_path(value: Any) -> bool:
    return isinstance(value, str | PathLike) and bool(str(value))


def _is_table(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments)
        for name, arguments in value.items()
    )


_FLAG = ("True or False", _is_flag)
_ONE = ("None or one recipe: its name, or the path of a TOML card", _is_name)

RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "recipes": ("None, or names, paths of TOML cards or folders of them: one, or a list", _are_names),
    "baseline": _ONE,
    "continue_with": _ONE,
    "gemm_benchmark": _FLAG,
    "stop_after": _FLAG,
    "progress": _FLAG,
    "log": _FLAG,
    "keep_rank_recordings": _FLAG,
    "fail_on_fallback": _FLAG,
    "nvtx": ("True, False or None", lambda value: value is None or _is_flag(value)),
    "output_dir": ("None or the path of a folder", lambda value: value is None or _is_path(value)),
    "max_seconds": (A_LIMIT, is_limit),
    "recipe_arguments": ('None or arguments by recipe, like {"fp8_delayed": {"amax_history_len": 16}}', _is_table),
}
"""Argument to what it may be, in words and as a test."""
