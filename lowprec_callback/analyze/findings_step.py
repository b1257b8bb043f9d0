"""Findings about the step around the GEMMs: communication, optimizer, attention, and its timing."""

from __future__ import annotations

import math
import re

from lowprec_callback.analyze.finding_case import Case, bucket, count, ms_text, rests_on, share, some, stands_out
from lowprec_callback.analyze.findings_idle import FUSED_OPTIMIZER
from lowprec_callback.analyze.gap import GEMMS, QUANTIZING, SLOWER
from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.numerics import DOUBTFUL
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.reading import launch_bound, proof, unexplained
from lowprec_callback.analyze.slow_paths import UNFUSED, attention_is_seen, unfused_attention
from lowprec_callback.analyze.statistics import is_different
from lowprec_callback.analyze.traceview import KernelGroup
from lowprec_callback.recording import AttentionBackend
from lowprec_callback.report import QUANTIZATION, Figure, Finding, Ledger, RecipeReport

EXPOSED = 0.02
OPTIMIZER = 0.10
BLIND = 0.25
"""Shares of the step from which exposed communication, the optimizer, or another bucket that no recipe reaches is
worth telling."""

EATEN = 0.20
"""Share of what GEMMs save that quantization must take back to be worth telling."""

CASTS = 0.02
"""Share of the step from which casts from FP32 to BF16 are worth telling."""

_TO_BF16 = re.compile(r"\bbfloat16_copy_kernel_cuda\b")
"""PyTorch's kernel that converts FP32 to BF16; a copy within one type has another name (ATen, cuda/Copy.cu)."""

LONGER = 1.001
"""By which factor another kind of time must be longer than what dominates; the two sums are rounded apart."""

_SOFTMAX = re.compile(r"(?i)softmax")
_LOSS = re.compile(r"(?i)log_?softmax|nll|cross_?entropy|loss|_ce_")

NOISY = 0.01
"""Half-width of a speedup that shows no difference, from which it is noise; below, the two steps are equally fast."""

BLIND_ADVICE = {
    "attention": "Shorten the attention itself (its kernel, the sequence length, packing), or expect no more than this "
    "ceiling",
    "norm": "Fuse it with the linear layer behind it (te.LayerNormLinear, te.LayerNormMLP), or compile it",
    "activation": "Fuse it with the linear layers around it (te.LayerNormMLP), or compile it",
    "loss": "Use a fused cross entropy, or compile the loss",
    "elementwise": "Fuse these operations (torch.compile, or Transformer Engine's fused layers)",
    "copy": "Find who copies by the operators in the trace; offloading to the host shows up here",
}
"""Buckets of GPU work that no recipe changes, and what would."""


def find_communication(case: Case) -> Finding | None:
    """Communication that no computation hides."""
    ledger = case.part.ledger
    ms = bucket(ledger, "communication")
    part = share(ms, case.wall)
    if ledger is None or ms is None or part is None or part < EXPOSED or not stands_out(ledger, ms):
        return None
    figure = ledger.buckets["communication"]

    def collective(group: KernelGroup) -> bool:
        return group.bucket == "communication"

    calls, before = case.launches(collective), count(case.base_views, collective)
    evidence = [
        rests_on(f"communication exposed {ms_text(ms)}, {part:.1%} of the step", figure),
        f"{calls:.0f} collective kernels a step",
    ]
    advice = (
        "Overlap it with backward (larger or fewer buckets, prefetch of shards), or send less: more micro-batches a "
    )
    advice += "step."
    more = calls - before if case.base.ledger is not None and case.base.ledger.complete else 0.0
    card = case.watched.card
    if case.base_views and not case.part.baseline and more >= 1:
        evidence.append(f"{case.base.name} has {before:.0f}: {more:.0f} more here")
        if card is not None and card.scaling == "tensor-delayed":
            advice += " Delayed scaling reduces amax over the ranks; a recipe without amax history does not."
    return case.found(
        "communication-exposed",
        figure,
        f"{ms_text(ms)} ({part:.1%}) of the step is communication that no computation hides.",
        evidence,
        advice,
    )


def find_optimizer(case: Case) -> Finding | None:
    """A large share of the baseline's step is the optimizer, which no recipe changes."""
    ledger = case.part.ledger
    ms = bucket(ledger, "optimizer")
    part = share(ms, case.wall)
    if not case.part.baseline or ledger is None or ms is None or part is None or part < OPTIMIZER:
        return None
    if not stands_out(ledger, ms):
        return None
    groups = [group for view in case.views for group in view.groups if group.bucket == "optimizer"]
    launches = case.launches(lambda group: group.bucket == "optimizer")
    fused = any(FUSED_OPTIMIZER.search(group.name) for group in groups)
    advice = "Accumulate more micro-batches a step, so that it runs less often a token."
    if groups and not fused and not case.on_cpu:
        advice = "Use a fused optimizer (fused=True, or te.optimizers.FusedAdam); no kernel of a fused one was seen."
    what = f" in {launches:.0f} {'operators' if case.on_cpu else 'kernels'}" if groups else ""
    return case.found(
        "optimizer-share",
        ledger.buckets["optimizer"],
        f"The optimizer takes {ms_text(ms)} ({part:.0%}) of the {case.part.name} step; no recipe shortens it.",
        [rests_on(f"optimizer {ms_text(ms)}{what}", ledger.buckets["optimizer"])],
        advice,
    )


def find_blind(case: Case) -> Finding | None:
    """A bucket that no recipe reaches dominates the baseline's step: the ceiling is Amdahl's.

    ceiling = wall / (wall - G), with G the GEMM bucket: the step's speedup if linear layers took no time at all.
    Nothing dominates a step whose ledger is incomplete, or leaves as much open as the bucket or the GEMMs take; nor one
    in which the GPU is idle, or another bucket runs, for longer.
    """
    ledger, wall = case.part.ledger, case.wall
    gemm = bucket(ledger, "gemm")
    if not case.part.baseline or ledger is None or not wall or gemm is None or gemm >= wall:
        return None
    if launch_bound(case.part, case.on_cpu):
        return None  # idle dominates, and a GPU that does less has more of it
    known = {name: ms for name in BLIND_ADVICE if (ms := bucket(ledger, name)) is not None}
    name = max(known, key=lambda each: known[each], default=None)
    if name is None or known[name] < EXPOSED * wall or (known[name] < gemm and known[name] < BLIND * wall):
        return None
    ms, ceiling = known[name], wall / (wall - gemm)
    no_layers = case.no_layers
    if unexplained(ledger) + no_layers >= min(ms, gemm - no_layers) or _largest_other(ledger) > LONGER * ms:
        return None
    if not _is_what_it_is_called(case, name):
        return None
    figures = (ledger.buckets[name], ledger.buckets["gemm"])
    return case.found(
        f"{name}-dominates",
        figures[0],
        f"{name} takes {ms_text(ms)} ({ms / wall:.0%}) of the {case.part.name} step and linear layers "
        f"{ms_text(gemm)} ({gemm / wall:.0%}): were their GEMMs free, the step would be {ceiling:.2f}x as fast.",
        [rests_on(f"{name} {ms_text(ms)}, gemm {ms_text(gemm)} of {ms_text(wall)}", *figures)],
        f"{BLIND_ADVICE[name]}.",
    )


def _largest_other(ledger: Ledger) -> float:
    """The longest of what is neither a GEMM nor in `BLIND_ADVICE`: idle time, optimizer, communication, ... [ms]."""
    others = [figure for name, figure in ledger.buckets.items() if name != "gemm" and name not in BLIND_ADVICE]
    return max((figure.value or 0.0 for figure in (ledger.idle, *others)), default=0.0)


def _is_what_it_is_called(case: Case, name: str) -> bool:
    """Whether the traced steps show that most of a bucket is what its name says.

    Batched products and a softmax may belong to something else than attention, and a softmax to something else than a
    loss. Of unfused attention `find_unfused` tells, whose advice is to fuse it.
    """
    if name == "attention":
        if not case.on_cpu and (unfused_attention(case.views) is not None or _chosen_unfused(case) is not None):
            return False
        return not case.views or attention_is_seen(case.views)
    if name == "loss":
        groups = [group for view in case.views for group in view.groups if group.bucket == "loss"]
        vague = [g for g in groups if _SOFTMAX.search(g.name) and not g.op and not _LOSS.search(g.name)]
        return 2 * math.fsum(group.ms for group in vague) <= math.fsum(group.ms for group in groups)
    return True


def _chosen_unfused(case: Case) -> AttentionBackend | None:
    """Transformer Engine's own word that it ran attention unfused."""
    return next((fact for fact in case.watched.backends if fact.backend.startswith(UNFUSED)), None)


def find_casts(case: Case) -> Finding | None:
    """PyTorch converts FP32 to BF16 in the passes of the baseline: weights or inputs are not held in BF16."""
    if case.on_cpu or not case.part.baseline or case.part.name == "fp32":
        return None

    def cast(group: KernelGroup) -> bool:
        return group.phase != "optimizer" and _TO_BF16.search(group.name) is not None

    ms = case.kernels(cast)
    part = share(ms.value, case.wall)
    if ms.value is None or part is None or part < CASTS:
        return None
    groups = [group for view in case.views for group in view.groups if cast(group)]
    places = some([operation(group.module) for group in sorted(groups, key=lambda group: -group.ms) if group.module])
    return case.found(
        "casts-from-fp32",
        ms,
        f"PyTorch converts FP32 to BF16 for {ms_text(ms.value)} ({part:.1%}) of the {case.part.name} step.",
        [
            rests_on(f"{case.launches(cast):.0f} kernels bfloat16_copy_kernel_cuda, {ms_text(ms.value)} a step", ms),
            f"launched in {places or 'no module that was followed'}",
        ],
        "Look for weights or inputs in FP32 there, and for a torch.autocast around layers that have a precision of "
        "their own; weights can be held in BF16 if the optimizer keeps FP32 master weights.",
    )


def find_unfused(case: Case) -> Finding | None:
    """Attention ran as batched products around a softmax (see `unfused_attention`), or TE says that it did."""
    if case.on_cpu:
        return None
    seen, chosen = unfused_attention(case.views), _chosen_unfused(case)
    if seen is None and chosen is None:
        return None
    ms = Figure.missing("ms", case.torn or "the trace shows none of its kernels")
    if not case.views:
        ms = Figure.missing("ms", "no traced step was recorded")
    elif seen is not None and case.torn is None:
        facts = lines_of("trace", (view.line for view in case.views))
        ms = Figure(seen.ms, "ms", "measured", n=len(case.views), facts=facts)
    evidence = [rests_on(seen.text, ms)] if seen is not None else []
    advice = "Use a fused attention (torch's scaled_dot_product_attention, te.DotProductAttention)."
    if chosen is not None:
        evidence.append(f"Transformer Engine chose {chosen.backend}")
        evidence += chosen.reasons
        advice = (
            "Lift what Transformer Engine names as its reasons."
            if chosen.reasons
            else "Run once with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2: Transformer Engine then prints why it disabled each "
            "faster backend."
        )
        if any("cudnn" in reason.lower() for reason in chosen.reasons):
            advice += " It sees a cuDNN that is too old: let it load the one that torch ships."
    elif case.te:
        advice += " With Transformer Engine's, NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 makes it print its choice and why."
    cost = f"{ms_text(ms.value)} a step" if ms.value is not None else f"what it costs is not known ({ms.reason})"
    return case.found("attention-unfused", ms, f"Attention ran unfused: {cost}.", evidence, advice)


def find_recompute(case: Case) -> Finding | None:
    """Forward GEMMs that run again in backward."""
    again = [fact for fact in case.watched.dispatches if fact.recomputed]
    if not again:
        return None
    places = list(dict.fromkeys(operation(fact.module) for fact in again))
    ms = case.kernels(lambda group: group.role == "fprop" and group.phase == "backward")
    formats = list(dict.fromkeys(f"{fact.weight_or_input.format} x {fact.other.format}" for fact in again))
    calls = sum(fact.calls for fact in again)
    cost = f"at least {ms_text(ms.value)} a step" if ms.value is not None else f"cost not known ({ms.reason})"
    advice = "Recompute only what memory requires: attention alone, or fewer layers."
    card = case.watched.card
    if card is not None and card.scaling != "none":
        wide = [fact for fact in again if fact.weight_or_input.scaling == "none" and fact.other.scaling == "none"]
        if wide and any(
            fact.weight_or_input.scaling != "none"
            for fact in case.watched.dispatches
            if not fact.recomputed and fact.role == "fprop" and fact.module in {each.module for each in wide}
        ):
            advice += " The repeated forward pass is not quantized though the first is: te.checkpoint keeps the recipe."
    return case.found(
        "recompute",
        ms,
        f"Activation checkpointing runs {calls} forward GEMM{'s' * (calls != 1)} of {', '.join(places[:3])} again in "
        f"backward, in {' and '.join(formats)}: {cost}, for the GEMMs alone.",
        [rests_on(f"{calls} forward GEMM calls while backward ran (operands)", ms)],
        advice,
    )


def find_quantization(case: Case) -> Finding | None:
    """Quantization takes back much of what GEMMs save in the step.

    The saving is that of the step, G_0 - G_r (the ledger's GEMM buckets), and the cost the gap's quantization term.
    """
    gap = case.part.gap
    if any(each.ledger is not None and not each.ledger.complete for each in (case.part, case.base)):
        return None
    # Where the host sets the pace, the step does not get shorter by what the GPU no longer does.
    if gap is None or not gap.terms or launch_bound(case.part, case.on_cpu):
        return None
    terms = {term.name: term.ms for term in gap.terms}
    cost = terms.get(QUANTIZING)
    saved = [terms[name].value for name in (GEMMS, SLOWER) if name in terms]
    if cost is None or cost.value is None or cost.value <= 0 or any(value is None for value in saved):
        return None
    saving = -math.fsum(value for value in saved if value is not None)
    if not case.wall or cost.value < EXPOSED * case.wall or cost.value < EATEN * max(saving, 0.0):
        return None
    if any(each.ledger is not None and unexplained(each.ledger) >= cost.value for each in (case.part, case.base)):
        return None
    taken = f"of the {ms_text(saving)} that its GEMMs save" if saving > 0 else "while its GEMMs save nothing"
    ledger = case.part.ledger
    kinds = sorted(((bucket(ledger, name) or 0.0, name) for name in QUANTIZATION), reverse=True)
    said = ", ".join(f"{name} {ms_text(ms)}" for ms, name in kinds if ms)
    launches = case.launches(lambda group: group.bucket in QUANTIZATION)
    faster = [
        other
        for other in case.everyone
        if not other.baseline
        and other.name != case.part.name
        and other.step_ms.high is not None
        and case.part.step_ms.low is not None
        and other.step_ms.high < case.part.step_ms.low
        and _quantizing(other) < cost.value
        and proof(other).shown
        and (other.guard is None or other.guard.state not in DOUBTFUL)
    ]
    if faster:
        best = min(faster, key=lambda other: other.step_ms.value or math.inf)
        advice = f"Prefer {best.name} here: its step takes {ms_text(best.step_ms.value or 0.0)}."
    else:
        advice = "A larger micro-batch spreads the quantization of the weights over more rows."
    return case.found(
        "quantization-cost",
        cost,
        f"Quantization takes {ms_text(cost.value)} a step, {taken}.",
        [
            rests_on(f"in the traced step: {said}" if said else "gap", cost),
            *([f"{launches:.0f} kernels a step do it"] if launches else []),
        ],
        advice,
    )


def _quantizing(part: RecipeReport) -> float:
    """A recipe's quantization term of the gap [ms]; infinity where it is not known."""
    for term in part.gap.terms if part.gap is not None else ():
        if term.name == QUANTIZING and term.ms.value is not None:
            return term.ms.value
    return math.inf


def find_noise(case: Case) -> Finding | None:
    """The steps show no difference, and could not show a small one."""
    speedups, gap = case.part.speedups, case.part.gap
    if case.part.baseline or speedups is None or speedups.step.value is None or gap is None:
        return None
    step = speedups.step
    different = is_different(step.low, step.high)
    half = step.half_width
    if different or (half is not None and half < NOISY):
        return None
    spread = gap.end.minus(gap.start).half_width
    if half is None or spread is None:
        ms = Figure.missing("ms", "one step a side has no spread")
        text = f"{case.part.name} was timed with too few steps to have a spread: its speedup cannot be called."
    else:
        ms = Figure(spread, "ms", "derived", facts=(*gap.start.facts, *gap.end.facts))
        text = (
            f"The speedup's 95% interval is {step.low:.3f}x to {step.high:.3f}x: the noise hides any difference "
            f"up to about {ms_text(spread)} a step."
        )
    ran = len(case.part.samples)
    rounds = f" (rounds={4 * ran} instead of {ran} about halves the interval)" if ran else ""
    return case.found(
        "noise",
        ms,
        text,
        [rests_on(f"{step.n} timed steps", gap.start, gap.end)],
        f"Take more rounds{rounds}, on a machine that nobody else uses.",
    )
