"""What a user may ask of a profile: the arguments that the callback and `profile` share, looked at and put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowprec_callback.recipes import RecipeError
from lowprec_callback.sweep import arguments
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.session import Options, ProfilerError

CALLBACKS_OWN = {"continue_with", "stop_after", "log", "fail_on_fallback"}
"""Arguments that mean something in a fit alone."""


def options_of(
    owner: str,
    *,
    recipes: Sequence[str] | str | None = None,
    baseline: str | None = None,
    rounds: int = 3,
    settle_steps: int = 3,
    timed_steps: int = 8,
    traced_steps: int = 2,
    gemm_benchmark: bool = True,
    output_dir: str | None = None,
    seed: int = 0,
    nvtx: bool | None = None,
    nvtx_steps: int = 2,
    guard_steps: int = 4,
    progress: bool = True,
    keep_rank_recordings: bool = False,
    recipe_arguments: Mapping[str, Mapping[str, Any]] | None = None,
    max_rounds: int | None = None,
    step_precision: float = 0.02,
    block_seconds: float | None = 20.0,
    max_seconds: float | None = None,
    **others: Any,
) -> Options:
    """The options, each as `LowPrecisionProfiler` describes it; `others`: the callback's own arguments, only looked at.

    Raises:
        ProfilerError: an argument is out of range, or a recipe is unknown. The message begins with `owner`.
        TypeError: there is no such argument.
    """
    for name in others.keys() - CALLBACKS_OWN:
        raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
    try:
        most = max_rounds if max_rounds is not None else 4 * rounds if isinstance(rounds, int) and rounds > 1 else 0
        settings = Settings(
            rounds,
            settle_steps,
            timed_steps,
            traced_steps,
            seed,
            nvtx_steps,
            max_rounds=most,
            step_precision=step_precision,
            guard_steps=guard_steps,
            block_seconds=block_seconds,
        )
        arguments.check(
            {
                "recipes": recipes,
                "baseline": baseline,
                "gemm_benchmark": gemm_benchmark,
                "progress": progress,
                "keep_rank_recordings": keep_rank_recordings,
                "nvtx": nvtx,
                "output_dir": output_dir,
                "max_seconds": max_seconds,
                "recipe_arguments": recipe_arguments,
                **others,
            }
        )
        if others.get("fail_on_fallback") and not traced_steps:
            raise ValueError("fail_on_fallback needs traced_steps: without them nothing tells what ran")
    except (RecipeError, ValueError) as error:
        raise ProfilerError(f"{owner}: {error}") from error
    return Options(
        recipes=recipes,
        baseline=baseline,
        settings=settings,
        gemm_benchmark=gemm_benchmark,
        output_dir=None if output_dir is None else str(output_dir),
        nvtx=nvtx,
        progress=progress,
        keep_rank_recordings=keep_rank_recordings,
        recipe_arguments=dict(recipe_arguments or {}),
        max_seconds=max_seconds,
    )
