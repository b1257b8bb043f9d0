"""What to do about it: a catalogue of findings, each with its condition, its evidence, and the ms at stake.

A finding is made only of what the Recording holds: where the evidence is missing, so is the finding. Its ms are the
time that it is about, an upper bound of what the advice can save; where they are not known the finding says why and
comes last, and never as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lowprec_callback.analyze import (
    findings_gemm,
    findings_host,
    findings_idle,
    findings_memory,
    findings_numerics,
    findings_plain,
    findings_ranks,
    findings_step,
)
from lowprec_callback.analyze.finding_case import Case
from lowprec_callback.report import Finding

Found = Finding | list[Finding] | None

CATALOGUE: dict[str, Callable[[Case], Found]] = {
    "launch-bound": findings_idle.find_launch_bound,
    "launch-starved": findings_host.find_launch_starved,
    "host-stall": findings_host.find_host_stall,
    "data-wait": findings_idle.find_data_wait,
    "synchronization": findings_idle.find_synchronization,
    "straggler": findings_ranks.find_straggler,
    "communication-exposed": findings_step.find_communication,
    "optimizer-share": findings_step.find_optimizer,
    "casts-from-fp32": findings_step.find_casts,
    "*-dominates": findings_step.find_blind,
    "attention-unfused": findings_step.find_unfused,
    "recompute": findings_step.find_recompute,
    "quantization-cost": findings_step.find_quantization,
    "quantization-outweighs-gemm, gemm-not-faster": findings_gemm.find_no_gain,
    "weight-requantized": findings_gemm.find_requantized,
    "head-outside, layers-outside": findings_gemm.find_outside,
    "no-te-layers": findings_plain.find_replaceable,
    "gemm-slower-in-step": findings_gemm.find_slower_in_step,
    "throttled": findings_gemm.find_throttled,
    "padding": findings_gemm.find_padding,
    "memory-up": findings_memory.find_memory,
    "gradient-scales-frozen": findings_numerics.find_frozen_gradients,
    "noise": findings_step.find_noise,
    "sweep-too-short": findings_gemm.find_short,
}
"""Codes, and the function that looks for them; its docstring is the condition."""


def findings(cases: Iterable[Case]) -> tuple[Finding, ...]:
    """All findings about all recipes, the most ms at stake first, those with unknown ms last."""
    found: list[Finding] = []
    for case in cases:
        for look in CATALOGUE.values():
            made = look(case)
            found += made if isinstance(made, list) else [made] if made is not None else []
    return tuple(sorted(found, key=_order))


def _order(finding: Finding) -> tuple[bool, float]:
    """Python's sort keeps the order of equals: that of the recipes, then of the catalogue."""
    return finding.ms.value is None, -(finding.ms.value or 0.0)
