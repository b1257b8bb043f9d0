"""The second kind of fallback, of speed: work that ran as asked, on a path slower than it had to be."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_callback.analyze.traceview import KernelGroup, TraceView


def slow_paths(views: Sequence[TraceView]) -> tuple[str, ...]:
    """Sentences, most expensive first; milliseconds are sums of kernel durations, averaged over the traced steps."""
    if not views:
        return ()
    found: list[tuple[float, str]] = []
    alarms: dict[str, list[KernelGroup]] = {}
    for view in views:
        for group in view.groups:
            for alarm in group.kernel.alarms:
                alarms.setdefault(alarm, []).append(group)
    for alarm, groups in alarms.items():
        ms, count = _per_step(groups, len(views))
        found.append((ms, f"{alarm}: {count:g} kernels, {ms:.2f} ms a step"))
    unfused = unfused_attention(views)
    if unfused:
        found.append(unfused)
    return tuple(text for _, text in sorted(found, key=lambda item: (-item[0], item[1])))


def unfused_attention(views: Sequence[TraceView]) -> tuple[float, str] | None:
    """(ms, sentence) if attention ran as batched products and softmax kernels instead of one fused kernel."""
    inside = [group for view in views for group in view.groups if group.bucket == "attention"]
    products = [group for group in inside if group.kernel.bucket == "gemm" and not group.kernel.gemm_helper]
    softmax = [group for group in inside if "softmax" in group.name.lower()]
    if not softmax and not products:
        return None
    ms, _ = _per_step(inside, len(views))
    _, gemms = _per_step(products, len(views))
    _, others = _per_step(softmax, len(views))
    return ms, f"attention ran unfused: {gemms:g} batched GEMMs and {others:g} softmax kernels, {ms:.2f} ms a step"


def _per_step(groups: Sequence[KernelGroup], steps: int) -> tuple[float, float]:
    return sum(group.ms for group in groups) / steps, sum(group.count for group in groups) / steps
