"""The second kind of fallback, of speed: work that ran as asked, on a path slower than it had to be."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowprec_callback.analyze.traceview import KernelGroup, TraceView

ALARMS = {
    "nvfp4-unfused-hadamard": "NVFP4's Hadamard transform ran on its own, not fused with the cast",
    "nvfp4-slow-quantize": "NVFP4 quantized with the general kernel, the slow one",
    "fp8-block-emulated-as-mxfp8": "FP8 block scales were rewritten for MXFP8's GEMM",
}
"""What the alarms of `kernels.KernelClass` mean. One that is not listed is shown as it is."""

_ATTENTION = "attention-unfused"
"""Told by `unfused_attention`, with the batched products that belong to it."""

_FUSED = re.compile(r"(?i)sdpa|flash|fmha")


def slow_paths(views: Sequence[TraceView]) -> tuple[str, ...]:
    """Sentences, most expensive first; ms are kernel durations a traced step, overlap not taken out."""
    if not views:
        return ()
    found: list[tuple[float, str]] = []
    alarms: dict[str, list[KernelGroup]] = {}
    for view in views:
        for group in view.groups:
            for alarm in group.kernel.alarms:
                if alarm == _ATTENTION:
                    continue
                alarms.setdefault(alarm, []).append(group)
    for alarm, groups in alarms.items():
        ms, count = _per_step(groups, len(views))
        found.append((ms, f"{ALARMS.get(alarm, alarm)}: {count:g} kernels, {ms:.2f} ms a step"))
    unfused = unfused_attention(views)
    if unfused:
        found.append(unfused)
    return tuple(text for _, text in sorted(found, key=lambda item: (-item[0], item[1])))


def unfused_attention(views: Sequence[TraceView]) -> tuple[float, str] | None:
    """(ms, sentence) if attention ran as batched products and softmax kernels instead of one fused kernel."""
    inside = [group for view in views for group in view.groups if group.bucket == "attention"]
    products = [group for group in inside if group.kernel.bucket == "gemm" and not group.kernel.gemm_helper]
    softmax = [group for group in inside if "softmax" in group.name.lower()]
    fused = any(_FUSED.search(group.name) for group in inside)
    if not softmax and (fused or not products):
        return None
    ms, _ = _per_step(inside, len(views))
    _, gemms = _per_step(products, len(views))
    _, others = _per_step(softmax, len(views))
    kernels = f"{gemms:g} batched GEMMs and {others:g} softmax kernels"
    return ms, f"attention ran unfused: {kernels}, {ms:.2f} ms a step"


def _per_step(groups: Sequence[KernelGroup], steps: int) -> tuple[float, float]:
    return sum(group.ms for group in groups) / steps, sum(group.count for group in groups) / steps
