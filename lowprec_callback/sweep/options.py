"""What a user may ask of a profile: the arguments that the callback and `profile` share, looked at and put together.

Each default stands in one place: those of sizes in `Settings`, the others in `Options`, and here the one in which the
two differ. The callback's signature and `options_of` take them from there.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lowprec_callback.recipes import RecipeError
from lowprec_callback.sweep import arguments
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.session import Options, ProfilerError

NVTX_STEPS = 2
"""`nvtx_steps`, unless the user says how many. `Settings` has none by default, as a plan without NVTX has none."""

CALLBACKS_OWN = {"stop_after", "log", "fail_on_fallback"}
"""Arguments that mean something in a fit alone, and that the callback itself acts on: here they are only looked at."""

_SIZES = {each.name for each in fields(Settings)}
_OTHERS = {each.name for each in fields(Options)} - {"settings"}


def options_of(owner: str, **given: Any) -> Options:
    """The options, each as `LowPrecisionProfiler` describes it; what is not given is as by default.

    Raises:
        ProfilerError: an argument is out of range, or a recipe is unknown. The message begins with `owner`.
        TypeError: there is no such argument.
    """
    for name in given.keys() - _SIZES - _OTHERS - CALLBACKS_OWN:
        raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
    sizes: dict[str, Any] = {"nvtx_steps": NVTX_STEPS}
    sizes.update((name, value) for name, value in given.items() if name in _SIZES)
    if sizes.get("max_rounds") is None:
        rounds = sizes.get("rounds", Settings.rounds)
        sizes["max_rounds"] = 4 * rounds if isinstance(rounds, int) and rounds > 1 else 0
    others = {name: value for name, value in given.items() if name not in _SIZES}
    try:
        settings = Settings(**sizes)
        arguments.check(others)
        if others.get("fail_on_fallback") and not settings.traced_steps:
            raise ValueError("fail_on_fallback needs traced_steps: without them nothing tells what ran")
    except (RecipeError, ValueError) as error:
        raise ProfilerError(f"{owner}: {error}") from error
    chosen = {name: value for name, value in others.items() if name in _OTHERS}
    if chosen.get("output_dir") is not None:
        chosen["output_dir"] = str(chosen["output_dir"])
    chosen["recipe_arguments"] = dict(chosen.get("recipe_arguments") or {})
    return Options(settings=settings, **chosen)
