"""The second kind of fallback, of speed: work that ran as asked, on a path slower than it had to be.

Kernels tell what a slow path costs, in ms a step (durations, overlap not taken out). What no kernel tells by its name
comes from the watched step: why Transformer Engine (TE) chose its attention, which GEMMs ran again in backward, whose
weights are quantized again in each micro-batch, and which sizes are in the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowprec_callback.analyze.alignment import AlignmentRow, check_alignment
from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.shapes import LayerGemm
from lowprec_callback.analyze.traceview import KernelGroup, TraceView
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import AttentionBackend, Dispatch, Gemm, UncachedWeights

ALARMS = {
    "nvfp4-unfused-hadamard": "NVFP4's Hadamard transform ran on its own, not fused with the cast",
    "nvfp4-slow-quantize": "NVFP4 quantized with the general kernel, the slow one",
    "fp8-block-emulated-as-mxfp8": "FP8 block scales were rewritten for MXFP8's GEMM",
    "scales-unswizzled": "scale factors were put into the GEMM's order by kernels of their own: no cast wrote them so",
}
"""What the alarms of `kernels.KernelClass` mean. One that is not listed is shown as it is."""

_ATTENTION = "attention-unfused"
"""Told by `unfused_attention`, with the batched products that belong to it."""

UNFUSED = "UnfusedDotProductAttention"
"""TE's name of the backend that runs attention as batched products and a softmax."""

_FUSED = re.compile(r"(?i)sdpa|flash|fmha")
_FASTER = re.compile(r"FlashAttention|FusedAttention|all backends")


@dataclass(frozen=True)
class Watched:
    """What is known of one recipe's step besides its kernels."""

    gemms: Sequence[Gemm] = ()
    dispatches: Sequence[Dispatch] = ()
    backends: Sequence[AttentionBackend] = ()
    uncached: Sequence[UncachedWeights] = ()
    micro_batches: int = 1
    card: RecipeCard | None = None
    """The recipe's card, for the sizes that it wants; None where it is not known here."""
    compute_capability: tuple[int, int] | None = None

    def misaligned(self) -> list[AlignmentRow]:
        """The captured layers whose sizes put the recipe on a slow path; emulation is no matter of sizes."""
        if self.card is None:
            return []
        layers = {
            LayerGemm(
                operation=operation(gemm.module),
                m=gemm.m,
                k=gemm.k,
                n=gemm.n,
                quantizable=gemm.quantizable,
                groups=gemm.groups,
            ): None
            for gemm in self.gemms
            if gemm.role == "fprop"
        }
        rows = check_alignment(layers, [self.card], self.compute_capability)
        return [row for row in rows if row.kind == "slow path" and row.fixes]


def slow_paths(views: Sequence[TraceView], watched: Watched = Watched()) -> tuple[str, ...]:
    """Sentences, most expensive first; those whose cost the trace does not tell come last."""
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
    for path in (_attention(views, watched.backends), _recomputation(views, watched.dispatches)):
        if path is not None:
            found.append(path)
    told = [text for _, text in sorted(found, key=lambda item: (-item[0], item[1]))]
    return (*told, *_requantized(watched), *_misaligned(watched))


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


def _attention(views: Sequence[TraceView], backends: Sequence[AttentionBackend]) -> tuple[float, str] | None:
    """The same with TE's reasons, or by TE's word alone where no step was traced."""
    seen = unfused_attention(views)
    chosen = next((fact for fact in backends if fact.backend.startswith(UNFUSED)), None)
    if chosen is None:
        return seen
    ms, text = seen or (0.0, "attention ran unfused")
    reasons = [reason for reason in chosen.reasons if _FASTER.search(reason)] or ["it gave no reason"]
    return ms, f"{text}. Transformer Engine chose {chosen.backend}: {'; '.join(reasons)}"


def _recomputation(views: Sequence[TraceView], dispatches: Sequence[Dispatch]) -> tuple[float, str] | None:
    """Forward GEMMs that run again in backward: the price of activation checkpointing, in the format that it has."""
    again = [fact for fact in dispatches if fact.recomputed]
    if not again:
        return None
    calls = sum(fact.calls for fact in again)
    formats = " and ".join(dict.fromkeys(f"{fact.weight_or_input.format} x {fact.other.format}" for fact in again))
    groups = [g for view in views for g in view.groups if g.role == "fprop" and g.phase == "backward"]
    ms, _ = _per_step(groups, len(views)) if groups else (0.0, 0.0)
    cost = f"{ms:.2f} ms a step for the GEMMs alone" if groups else "what it costs was not traced"
    return ms, (
        f"recomputation: {calls} forward GEMM{'s' * (calls != 1)} of {_places(fact.module for fact in again)} "
        f"ran again in backward, in {formats}: {cost}"
    )


def _requantized(watched: Watched) -> list[str]:
    """Weights that are quantized more often than once a step."""
    modules = [module for fact in watched.uncached for module in fact.modules]
    if watched.micro_batches < 2 or not modules:
        return []
    what = f"the weights of {len(modules)} modules ({_places(modules)})"
    return [
        f"{what} are quantized again in each of {watched.micro_batches} micro-batches: pass is_first_microbatch to "
        "quantize them once a step (at the price of keeping them); kernels do not tell which casts are the weights'"
    ]


def _misaligned(watched: Watched) -> list[str]:
    """Sizes of the captured layers that put the recipe on a slow path."""
    by_reason: dict[str, list[AlignmentRow]] = {}
    for row in watched.misaligned():
        by_reason.setdefault(row.reason, []).append(row)
    return [f"misaligned: {reason}: {_some([_sizes(row) for row in found])}" for reason, found in by_reason.items()]


def _sizes(row: AlignmentRow) -> str:
    fixes = ", ".join(f"{fix.what} {fix.size} -> {fix.next_size}" for fix in row.fixes)
    return f"{row.operation} {row.m}x{row.k}x{row.n} ({fixes})"


def _places(modules: Iterable[str]) -> str:
    """Module paths, those that differ in their layer's index alone as one."""
    groups: dict[str, set[str]] = {}
    for module in modules:
        groups.setdefault(operation(module), set()).add(module)
    return _some(next(iter(found)) if len(found) == 1 else name for name, found in groups.items())


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _per_step(groups: Sequence[KernelGroup], steps: int) -> tuple[float, float]:
    return sum(group.ms for group in groups) / steps, sum(group.count for group in groups) / steps
