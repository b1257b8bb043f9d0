"""The finding about scales; whether a recipe computes at all is the numerics guard's matter (`analyze.numerics`)."""

from __future__ import annotations

from lowprec_callback.analyze.finding_case import Case, some
from lowprec_callback.report import Figure, Finding

NEVER_MOVED = 1.0
"""Delayed scaling starts from this scale; the largest value of the format over an amax is never exactly it."""


def find_frozen_gradients(case: Case) -> Finding | None:
    """The scales of a module's output gradients stayed at 1, while those of its inputs moved.

    Where no scale at all moved the numerics guard says so, before the speed.
    """
    forward, backward = _scales(case, ".input"), _scales(case, ".grad_output")
    frozen = {
        module: found
        for module, found in backward.items()
        if all(scale == NEVER_MOVED for scale, _ in found)
        and any(scale != NEVER_MOVED for scale, _ in forward.get(module, ()))
    }
    if not frozen:
        return None
    evidence = []
    for module, found in frozen.items():
        highest = max(amax for _, amax in found)
        evidence.append(
            f"{module}: output gradients scaled by 1 (largest amax in its history {highest:.3g}), inputs by "
            f"{', '.join(f'{scale:.3g}' for scale, _ in forward[module])}"
        )
    return case.found(
        "gradient-scales-frozen",
        Figure.missing("ms", "a scale that stands still costs accuracy, not time"),
        f"The scales of the output gradients of {some(list(frozen))} stayed at 1, although those of the inputs moved: "
        f"{case.part.name} rounds small gradients to zero there.",
        evidence,
        "Look at what runs their backward pass: scales are updated by the region that the forward pass opened, which a "
        "checkpoint of another kind than te.checkpoint may lose; fp8_current keeps no such scales.",
    )


def _scales(case: Case, kind: str) -> dict[str, list[tuple[float, float]]]:
    """(scale, largest amax of the history) of a module's tensors of one kind."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in case.part.scales:
        if f".{row.tensor}".endswith(kind):
            found.setdefault(row.module, []).append((row.scale, row.history_max))
    return found
