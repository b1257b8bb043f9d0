"""Under which conditions a run was made, as text: what two runs must share to be compared."""

from __future__ import annotations

import json

from lowprec_callback.recording import Card, Environment, Plan

PASSING = frozenset(
    {"gpus", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVTE_FRAMEWORK", "NVTE_DEBUG_LEVEL", "NVTE_LOG_LEVEL"}
)
"""Facts and variables that no step of ours depends on."""


def asked(card: Card) -> dict[str, str]:
    """What a card asked for: formats of each role's two operands, scaling, and Transformer Engine's arguments."""
    formats = {role: " x ".join(getattr(card, role)) for role in ("fprop", "dgrad", "wgrad")}
    arguments = {name: _text(value) for name, value in sorted(card.arguments.items())}
    return {**formats, "scaling": card.scaling, **arguments}


def conditions(environment: Environment | None, plan: Plan | None) -> dict[str, str] | None:
    """Facts of the machine, allow-listed variables that were set, and micro-batches; None if nothing is known."""
    found: dict[str, str] = {}
    if environment is not None:
        found |= {name: text for name, text in environment.facts.items() if name not in PASSING}
        found |= environment.variables
    if plan is not None:
        found["micro-batches"] = str(plan.micro_batches)
    return found if environment is not None or plan is not None else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
