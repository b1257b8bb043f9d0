"""The second kind of fallback, of speed: work that ran as asked, on a path slower than it had to be.

Kernels tell what a slow path costs, in ms a step (durations, overlap not taken out). What no kernel tells by its name
comes from the watched step: why Transformer Engine (TE) chose its attention, which GEMMs ran again in backward, whose
weights are quantized again in each micro-batch, and which sizes are in the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowprec_callback.analyze import operator_names
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
"""Of TE's softmax kernels. A name alone is no evidence: `unfused_attention` looks for the batched products around."""

UNFUSED = "UnfusedDotProductAttention"
"""TE's name of the backend that runs attention as batched products and a softmax."""

_ATTENTION_WORD = re.compile(r"(?i)attention|attn|sdpa|scaled_dot_product|fmha|flash")
"""In the name of a kernel, an operator or a module: what runs there is attention."""

_BATCHED_OPERATIONS = frozenset({"bmm", "baddbmm", "addbmm"})
_BATCHED_KERNEL = re.compile(r"(?i)batched")
# A log-softmax is a loss's, also where the kernel says it by a template argument alone.
_LOG_SOFTMAX = re.compile(r"(?i)log_?softmax|nll|cross_?entropy|softmax_warp_\w+<[^<>]*?, ?(?:\(bool\))?(?:true|1),")

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


@dataclass(frozen=True)
class Unfused:
    """Attention that ran as batched products around a softmax. All numbers are those of a step, on average."""

    ms: float
    products: float
    softmaxes: float

    @property
    def text(self) -> str:
        """With its numbers."""
        kernels = f"{self.products:g} batched GEMMs and {self.softmaxes:g} softmax kernels"
        return f"attention ran unfused: {kernels}, {self.ms:.2f} ms a step"


def unfused_attention(views: Sequence[TraceView]) -> Unfused | None:
    """The batched products of the traced steps that run around a softmax; None if there are none.

    Attention without a fused kernel is softmax(Q K^T) V: a batched product, a softmax, a batched product, and the same
    again in backward. A softmax alone may be a router's, and a batched product alone an interaction of features. So
    both are needed, in this order, in one stretch of kernels that no linear layer, norm, loss or optimizer interrupts,
    and in one module where modules are known.
    """
    runs = [run for view in views for run in _unfused_runs(view)]
    if not runs:
        return None
    return Unfused(
        ms=sum(run.ms for run in runs) / len(views),
        products=sum(run.products for run in runs) / len(views),
        softmaxes=sum(run.softmaxes for run in runs) / len(views),
    )


def attention_is_seen(views: Sequence[TraceView]) -> bool:
    """Whether most of the bucket `attention` is attention: by the names of kernels, operators or modules, or unfused.

    The bucket also holds batched products and a softmax that belong to nothing else.
    """
    groups = [group for view in views for group in view.groups if group.bucket == "attention"]
    named = sum(g.ms for g in groups if any(map(_ATTENTION_WORD.search, (g.name, g.op, g.module))))
    unfused = sum(run.ms for view in views for run in _unfused_runs(view))
    return bool(groups) and named + unfused >= 0.5 * sum(group.ms for group in groups)


class _Run(NamedTuple):
    ms: float
    products: int
    softmaxes: int


class _Kernel(NamedTuple):
    """A kernel of a step, and what it may be in an attention."""

    part: str
    """product, softmax, inside (other work of attention), wall (work that no attention holds), or bare: a product of
    which nothing is known but its name."""
    group: KernelGroup
    ms: float


def _unfused_runs(view: TraceView) -> list[_Run]:
    """One for each stretch of kernels that is an attention, forward or backward."""
    parts = [_part_of(group) for group in view.groups]
    if "softmax" not in parts:
        return []
    made = []
    for before, stretch, after in _stretches(view, parts):
        run = _around_softmax(stretch) or _between_bare(before, stretch, after)
        if run is not None:
            made.append(run)
    return made


def _part_of(group: KernelGroup) -> str:
    product = group.kernel.bucket == "gemm" and not group.kernel.gemm_helper
    batched = (
        group.bucket == "attention"
        or not _BATCHED_OPERATIONS.isdisjoint(map(operator_names.operation, (group.op, group.name)))
        or _BATCHED_KERNEL.search(group.name) is not None
    )
    if product and not group.role and batched:
        return "product"
    if product:
        return "wall" if group.role or group.op or group.module else "bare"
    if "softmax" in group.name.lower() and group.bucket in ("attention", "loss"):
        of_loss = _LOG_SOFTMAX.search(group.name) or _LOG_SOFTMAX.search(group.op)
        return "wall" if of_loss else "softmax"
    if group.bucket in ("norm", "optimizer", "loss"):
        return "wall"
    return "inside" if group.bucket == "attention" else ""


def _stretches(view: TraceView, parts: Sequence[str]) -> Iterator[tuple[_Kernel | None, list[_Kernel], _Kernel | None]]:
    """The kernels between two walls or bare products, by start, with both of these; a change of phase ends one too."""
    before: _Kernel | None = None
    stretch: list[_Kernel] = []
    phase = ""
    for row in np.argsort(view.start_ms, kind="stable").tolist():
        group = view.groups[view.group[row]]
        kernel = _Kernel(parts[view.group[row]], group, float(view.end_ms[row] - view.start_ms[row]))
        if not kernel.part:
            continue
        if phase and group.phase and group.phase != phase:
            yield before, stretch, None
            before, stretch = None, []
        phase = group.phase or phase
        if kernel.part in ("wall", "bare"):
            yield before, stretch, kernel
            before, stretch = kernel, []
        else:
            stretch.append(kernel)
    yield before, stretch, None


def _around_softmax(stretch: Sequence[_Kernel]) -> _Run | None:
    """The attention in a stretch: the products of the place of a softmax that has one before and one behind it."""
    places = []
    for index, kernel in enumerate(stretch):
        place = kernel.group.module
        if kernel.part == "softmax":
            sides = (stretch[:index], stretch[index + 1 :])
            if all(any(k.part == "product" and _same_place(k.group.module, place) for k in side) for side in sides):
                places.append(place)
    if not places:
        return None
    of_it = [k for k in stretch if any(_same_place(k.group.module, place) for place in places)]
    return _run_of(of_it)


def _between_bare(before: _Kernel | None, stretch: Sequence[_Kernel], after: _Kernel | None) -> _Run | None:
    """A capture may tell nothing of a product but its name: TE's softmax kernel between two of these is attention's."""
    tes = [k for k in stretch if k.part == "softmax" and _ATTENTION in k.group.kernel.alarms]
    if not tes or before is None or after is None or (before.part, after.part) != ("bare", "bare"):
        return None
    return _run_of([before, *stretch, after])


def _run_of(kernels: Sequence[_Kernel]) -> _Run:
    products = sum(kernel.part in ("product", "bare") for kernel in kernels)
    return _Run(sum(k.ms for k in kernels), products, sum(kernel.part == "softmax" for kernel in kernels))


def _same_place(one: str, other: str) -> bool:
    """Whether two modules may be one attention: equal, one in the other, side by side in a third, or not known."""
    if not one or not other or one == other or one.startswith(f"{other}.") or other.startswith(f"{one}."):
        return True
    parent = one.rpartition(".")[0]
    return bool(parent) and parent == other.rpartition(".")[0]


def _attention(views: Sequence[TraceView], backends: Sequence[AttentionBackend]) -> tuple[float, str] | None:
    """The same with TE's reasons, or by TE's word alone where no step was traced."""
    seen = unfused_attention(views)
    chosen = next((fact for fact in backends if fact.backend.startswith(UNFUSED)), None)
    if chosen is None:
        return (seen.ms, seen.text) if seen is not None else None
    ms, text = (seen.ms, seen.text) if seen is not None else (0.0, "attention ran unfused")
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
