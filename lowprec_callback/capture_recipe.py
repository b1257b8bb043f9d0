"""Which recipe a capture shows, where neither ranges nor the user say what was asked for.

What ran is all that there is to go by, so a verdict against an inferred recipe says only whether the layers agree with
each other. FP8 with a delayed and with a current scale run the same GEMM kernels; the kernels beside them tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lowprec_callback.analyze.gemm_libraries import is_amd
from lowprec_callback.analyze.kernels import classify
from lowprec_callback.capture import Capture, Flags
from lowprec_callback.recipes import RecipeCard

FP8 = "fp8"
"""The recipe's name where it is delayed or current scaling, and nothing tells which."""

NARROW = 0.02
"""Share of the GEMM time from which a narrow precision makes the recipe: the rest is layers that were left wide."""

WIDE = ("bf16", "tf32", "fp32")

_DELAYED = re.compile(r"delayed_scaling_recipe|amax_and_scale_update")
_CURRENT = re.compile(r"compute_scale_from_amax")
_EMULATED = re.compile(r"swizzle_block_scaling\w*to_mxfp8")
_PLAIN = {"nvfp4": "nvfp4", "fp8-block": "fp8_block", "bf16": "bf16", "fp32": "fp32", "tf32": "fp32"}


def infer(capture: Capture, mine: Flags) -> tuple[str, str]:
    """(recipe, the evidence in words); `unknown` where no GEMM's name tells its precision."""
    work = capture.work
    size = len(capture.work_names)
    time = np.bincount(work.name[mine], weights=(work.end - work.start)[mine], minlength=size)
    count = np.bincount(work.name[mine], minlength=size)
    kernels = {name: int(count[i]) for i, name in enumerate(capture.work_names) if count[i]}
    by_precision: dict[str, float] = {}
    for index, name in enumerate(capture.work_names):
        kernel = classify(name)
        if count[index] and kernel.is_product:
            by_precision[kernel.precision] = by_precision.get(kernel.precision, 0.0) + float(time[index])
    total = sum(by_precision.values())
    amd = any(is_amd(name) for name in kernels)
    for precision in ("nvfp4", "mxfp8", "fp8-block", "fp8", "bf16", "tf32", "fp32"):
        if by_precision.get(precision, 0.0) > NARROW * total:
            if precision in WIDE and (why := _something_else(by_precision, total)):
                return "unknown", why
            if amd and precision not in WIDE:
                return "unknown", f"{precision} GEMM kernels of an AMD GPU ran, where recipes are not known"
            return _named(precision, kernels)
    return "unknown", "no GEMM kernel's name tells a precision that a recipe asks for"


def _something_else(by_precision: Mapping[str, float], total: float) -> str:
    """Why the layers that ran wide are no baseline: others ran in what no recipe asks for, or nobody knows in what."""
    mixed = {name: ms for name, ms in by_precision.items() if " x " in name}
    if sum(mixed.values()) > NARROW * total:
        return f"GEMM kernels of {max(mixed, key=lambda name: mixed[name])} ran, which no recipe asks for"
    unknown = by_precision.get("unknown", 0.0)
    if unknown > NARROW * total:
        return f"the names of kernels of {unknown / total:.0%} of the GEMM time tell no precision"
    return ""


def _named(precision: str, kernels: Mapping[str, int]) -> tuple[str, str]:
    seen = f"GEMM kernels of precision {precision} ran"
    if precision in _PLAIN:
        return _PLAIN[precision], seen

    def launches(pattern: re.Pattern[str]) -> int:
        return sum(count for name, count in kernels.items() if pattern.search(name))

    if precision == "mxfp8":
        if launches(_EMULATED):
            return "fp8_block", f"{seen}, and kernels that rewrite FP8 block scales for them"
        return "mxfp8", seen
    # A model that ran with delayed scaling before can go on updating its scales, a few kernels a step.
    delayed, current = launches(_DELAYED), launches(_CURRENT)
    if current > delayed:
        return "fp8_current", f"{seen}, and kernels that compute a scale from the tensor's own amax"
    if delayed > current:
        return "fp8_delayed", f"{seen}, and kernels that update scales from an amax history"
    return FP8, f"{seen}; whether their scales were delayed or current, the other kernels do not tell"


def fp8_card(delayed: RecipeCard) -> RecipeCard:
    """A card for FP8 with one scale a tensor, where nobody says how it comes about."""
    title = "FP8, one scale a tensor (from where is not known)"
    return replace(delayed, name=FP8, title=title, te_class=None, arguments={})
