"""The callback's arguments, looked at when it is constructed: each message names the argument and what is allowed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

from lowprec_callback.recipes import Engine, RecipeCard, RecipeError, load_cards, near, resolve
from lowprec_callback.sweep.time_budget import A_LIMIT, is_limit

ONE_RECIPE = ("baseline", "continue_with")
"""Arguments that name one recipe."""


def check(values: Mapping[str, Any]) -> None:
    """Look at those arguments that the plan does not look at itself.

    Args:
        values: arguments by name, each with an entry in `RULES`.

    Raises:
        ValueError: one of them has a value that it cannot have.
    """
    for name, value in values.items():
        allowed, holds = RULES[name]
        if not _holds(holds, value):
            raise ValueError(f"{name}={value!r}: must be {allowed}{_of_numpy(holds, value)}")
    known = dict(load_cards())
    for name in ("recipes", *ONE_RECIPE):
        value = values.get(name)
        try:
            cards = named([value] if name in ONE_RECIPE and value is not None else value)
        except RecipeError as error:
            raise ValueError(f"{name}: {error}") from error
        if name in ONE_RECIPE and value is not None and len(cards) != 1:
            found = ", ".join(card.name for card in cards)
            raise ValueError(f"{name}={value!r}: must be {RULES[name][0]}; this names {found}")
        known.update((card.name, card) for card in cards)
    for recipe, arguments in (values.get("recipe_arguments") or {}).items():
        if recipe not in known:
            nearest = near(recipe, known)
            instead = f"; did you mean {nearest!r}?" if nearest is not None else ""
            raise ValueError(f"recipe_arguments names {recipe!r}; known recipes: {', '.join(known)}{instead}")
        try:
            known[recipe].with_arguments(arguments)
        except RecipeError as error:
            raise ValueError(f"recipe_arguments[{recipe!r}]: {error}") from error


def named(names: Any) -> list[RecipeCard]:
    """The cards that are meant, whatever engine will run them: which one, nobody knows before there is a model.

    Raises:
        RecipeError: they are none for any engine.
    """
    cards: dict[str, RecipeCard] = {}
    errors: list[RecipeError] = []
    engines = get_args(Engine)
    for engine in engines:
        try:
            cards.update((card.name, card) for card in resolve(names, engine))
        except RecipeError as error:
            errors.append(error)
    if len(errors) == len(engines):
        raise errors[0]
    return list(cards.values())


def _holds(rule: Callable[[Any], bool], value: Any) -> bool:
    """A rule may stumble over a value: an integer beyond every float, say."""
    try:
        return rule(value)
    except Exception:
        return False


def _of_numpy(rule: Callable[[Any], bool], value: Any) -> str:
    """What to do about a number or a flag of NumPy's, or a tensor, that would do as one of Python's."""
    if getattr(value, "shape", None) != () or not _holds(lambda scalar: rule(scalar.item()), value):
        return ""
    kind = type(value)
    return f"; this is a {kind.__module__}.{kind.__qualname__}, whose .item() would do"


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_names(value: Any) -> bool:
    return _is_name(value) or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))


def _is_folder(value: Any) -> bool:
    """A folder, or where one can be made: no file stands there."""
    path = os.fspath(value)
    return isinstance(path, str) and bool(path.strip()) and "\0" not in path and not os.path.isfile(path)


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
    "output_dir": ("None or the path of a folder", lambda value: value is None or _is_folder(value)),
    "max_seconds": (A_LIMIT, is_limit),
    "recipe_arguments": ('None or arguments by recipe, like {"fp8_delayed": {"amax_history_len": 16}}', _is_table),
}
"""Argument to what it may be, in words and as a test."""
