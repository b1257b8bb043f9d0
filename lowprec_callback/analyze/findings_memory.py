"""The finding about memory: a recipe's peak is higher than the baseline's, and why, by the memory ledger."""

from __future__ import annotations

import math

from lowprec_callback.analyze.finding_case import Case, rests_on
from lowprec_callback.analyze.memory_ledger import UNUSED
from lowprec_callback.report import Figure, Finding, MemoryReport

MORE_MEMORY = 0.02
"""Share of the baseline's peak by which a recipe's must be higher to be worth telling."""

NAMED = 3
"""Terms of the memory ledger that the sentence names; the evidence has all that changed."""

CHANGED = 0.01
"""Share of all changes (their sizes added up) from which a term is said to have changed."""

_ADVICE = {
    "copies of weights": "Quantized weights stand beside the parameters: te.quantized_model_init keeps them alone.",
    "saved activations": "Recompute activations (te.checkpoint), or take a smaller micro-batch.",
    "activations and copies": "Recompute activations, or take a smaller micro-batch.",
    "temporaries": "It is one module's own work (the memory section names it): a smaller micro-batch makes it smaller.",
    "gradients": "Let the optimizer set gradients to none (zero_grad(set_to_none=True)).",
}
"""What to do about the term that grew most, where the formulas do not explain it."""


UNCLAIMED = "not attributed"
"""The term of the memory ledger for live bytes that no owner claims."""

_KEPT = (
    "It is still held when backward is over, so it is no activation: look for tensors that a module, a list or the ctx "
    "of an autograd function keeps."
)


def find_memory(case: Case) -> Finding | None:
    """The recipe's peak is higher than the baseline's."""
    peak, before = case.part.peak_gb.value, case.base.peak_gb.value
    if case.part.baseline or peak is None or not before or peak < (1 + MORE_MEMORY) * before:
        return None
    report = case.part.memory
    evidence = [
        rests_on(f"peak {peak:.3g} GB, {before:.3g} GB in {case.base.name}", case.part.peak_gb, case.base.peak_gb)
    ]
    why, advice = "why is not known", "Look in the memory table for the phase in which it is held."
    if report is None or not any(figure.known for name, figure in report.phases.items() if name != "parameters"):
        advice = "Let the sweep trace a step (traced_steps), which tells in which phase it is held."
    terms = {term.name: term.measured for term in report.terms} if report is not None else {}
    changed = _changes(report, case.base.memory)
    evidence += [rests_on(f"{name}: {figure.value:+.3g} GB at the peak", figure) for name, figure in changed]
    if not changed:
        evidence += [
            rests_on(f"{name}: {figure.value:{'+' if 'against' in name else ''}.3g} GB measured", figure)
            for name, figure in terms.items()
            if figure.value is not None
        ]
    if changed:
        grown = [(name, figure) for name, figure in changed if (figure.value or 0.0) > 0]
        why = ", ".join(f"{name} {figure.value:+.3g} GB" for name, figure in changed[:NAMED])
        advice = _ADVICE.get(grown[0][0], advice) if grown else advice
    if report is not None and report.note is not None:
        why = f"{why} at the peak. {report.note.rstrip('.')}" if changed else report.note.rstrip(".")
        advice = "Expected: plan for it, or recompute activations."
        weights = terms.get("copies of weights")
        if weights is not None and weights.value and case.te:
            advice += (
                " te.quantized_model_init keeps weights in the recipe's format alone; the optimizer then needs its own "
                "master weights."
            )
    kept = _kept(report, case.base.memory)
    if changed and changed[0][0] == UNCLAIMED and (kept.value or 0.0) > MORE_MEMORY * before:
        # Whatever else is expected: this is more, and formulas know nothing of it.
        evidence.append(rests_on(f"{UNCLAIMED} after backward: {kept.value:+.3g} GB", kept))
        advice = _KEPT
    return case.found(
        "memory-up",
        Figure.missing("ms", "memory costs no time by itself"),
        f"The peak of {case.part.name} is {peak - before:.3g} GB ({peak / before - 1:.0%}) above that of "
        f"{case.base.name}: {why}.",
        evidence,
        advice,
    )


def _kept(part: MemoryReport | None, base: MemoryReport | None) -> Figure:
    """What no owner claims at the end of backward, more than in the baseline [GB]."""
    mine = part.moment("backward") if part is not None else None
    theirs = base.moment("backward") if base is not None else None
    absent = Figure.missing("GB", "the end of backward was not recorded")
    if mine is None or theirs is None:
        return absent
    return mine.terms.get(UNCLAIMED, absent).minus(theirs.terms.get(UNCLAIMED, absent))


def _changes(part: MemoryReport | None, base: MemoryReport | None) -> list[tuple[str, Figure]]:
    """What the recipe's peak holds more (or less) than the baseline's, by term of the memory ledger, most first."""
    mine = part.moment("peak") if part is not None else None
    theirs = base.moment("peak") if base is not None else None
    if mine is None or theirs is None:
        return []
    absent = Figure(0.0, "GB")
    # What is reserved and not live is no part of the peak.
    names = [name for name in dict.fromkeys((*mine.terms, *theirs.terms)) if name != UNUSED]
    if not all(moment.terms.get(name, absent).known for moment in (mine, theirs) for name in names):
        return []
    more = [(name, mine.terms.get(name, absent).minus(theirs.terms.get(name, absent))) for name in names]
    whole = math.fsum(abs(figure.value or 0.0) for _, figure in more)
    kept = [(name, figure) for name, figure in more if abs(figure.value or 0.0) > CHANGED * whole]
    return sorted(kept, key=lambda pair: -abs(pair[1].value or 0.0))
