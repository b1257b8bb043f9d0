"""The memory witness: what a recipe holds, by formula and as measured. It contradicts; it never confirms a GEMM.

Two measurements that do not know of each other:

* the buffers of the weights that reached the GEMMs: bytes of data a value, against the format asked for.
* the allocator's live bytes: what a forward pass adds, against what it adds in the baseline. All that is the same in
  both cancels. By formula this difference is

      copies of weights + saved inputs + state, minus the same of the baseline      [bytes]

  where an input that something else holds too counts once (see `memory_model.possible_increases`).

"NVFP4 takes as much memory as MXFP8" is the sign of FP4 that was never stored. An increase that the formulas
foretell is explained, and no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lowprec_callback.analyze.memory_case import Case, Ground, Subject, cases_of, expect, slack
from lowprec_callback.analyze.memory_model import WIDTHS, Held, Layer, possible_increases
from lowprec_callback.analyze.memory_report import compared, memory_report, nearest, no_counters, size
from lowprec_callback.analyze.precision import BITS, shown
from lowprec_callback.analyze.stored_bytes import close, data_widths, features
from lowprec_callback.report import MemoryReport

APART = 3.0
"""Two expectations can be told apart if they differ by more than this many times what they may be off."""

_OTHERS = {
    "bf16": ("bf16", "none"),
    "fp8": ("e4m3", "tensor-current"),
    "mxfp8": ("e4m3", "mx-32"),
    "nvfp4": ("e2m1", "nvfp4-16"),
}
"""What a recipe may have run as: format and scaling of all operands."""


@dataclass(frozen=True)
class Testimony:
    """What memory says of one recipe."""

    report: MemoryReport
    against: tuple[str, ...] = ()
    """What the allocator's counters hold against it; the operand witness does not know of them."""


def memory_witness(ground: Ground, subjects: Sequence[Subject], baseline: str) -> dict[str, Testimony]:
    """What memory says of each recipe. Differences are taken to the recipe `baseline`."""
    cases, layers = cases_of(ground, subjects, baseline)
    base = cases.get(baseline)
    others = [case for case in cases.values() if case is not base]
    for case in cases.values():
        _by_operands(case, layers, ground)
    for case in others:
        _by_allocator(case, base, layers, ground)
    if ground.rank_bytes is None:
        _by_pairs(others)
    return {
        name: Testimony(memory_report(case, base, ground, layers), tuple(case.by_allocator))
        for name, case in cases.items()
    }


def _by_operands(case: Case, layers: Sequence[Layer], ground: Ground) -> None:
    """Bytes of data a value of each layer's weight, against the format asked for."""
    card, sizes = case.subject.card, features(ground.gemms)
    asked = WIDTHS.get(card.fprop[0])
    reachable = {layer.module for layer in layers}
    seen: set[str] = set()
    odd: dict[str, float] = {}
    for _, fact in case.subject.dispatches:
        stored = fact.weight_or_input.stored
        if fact.role != "fprop" or stored is None or fact.module not in reachable or asked is None:
            continue
        if fact.in_region is False and card.scaling != "none":
            continue
        k, n, groups = sizes.get(fact.module, (fact.k, fact.n, 1))
        seen.add(fact.module)
        wrong = [width for width in data_widths(stored, groups * k * n) if not close(width, asked)]
        if wrong:
            odd[fact.module] = wrong[0]
    if odd:
        widths = list(odd.values())
        most = max(set(widths), key=widths.count)
        case.by_operands.append(
            f"{len(odd)} of {len(seen)} weights reached their GEMM with {most:g} B of data a value, "
            f"not {asked:g} as {shown(case.precision)} has{_never(case.precision, most * 8)}"
        )
    elif seen:
        case.agreements.append(f"{len(seen)} weights hold {asked:g} B of data a value, as asked")


def _never(precision: str, bits: float) -> str:
    """`: FP4 was never stored`, where something wider was."""
    asked = BITS.get(precision, 0)
    return f": FP{asked} was never stored" if asked in (4, 8) and bits > asked else ""


def _by_allocator(case: Case, base: Case | None, layers: Sequence[Layer], ground: Ground) -> None:
    """What the forward pass added more than in the baseline, against the formulas of this recipe and of others."""
    if ground.rank_bytes is not None and not ground.on_cpu:
        case.silences.append("the parameters are spread over ranks, and come and go within the forward pass")
        return
    if case.expected is None and not ground.on_cpu:
        case.silences.append(case.why_not or "there is no expectation")
        return
    if case.expected is None or base is None or base.expected is None or base.forward is None or case.forward is None:
        case.silences.append(no_counters(case, base, ground))
        return
    more = case.forward - base.forward
    off = slack(case, base)
    expected = possible_increases(case.expected, base.expected)
    like = [
        name
        for name, increases in _alternatives(case, base, base.expected, layers, ground)
        if _fits(more, increases, off)
    ]
    told, should = compared(more, base.name), compared(nearest(more, expected))
    if _fits(more, expected, off):
        if like:
            as_well = " and ".join(map(shown, like))
            case.silences.append(
                f"after forward it held {told}: so would {shown(case.precision)}, and so would {as_well}"
            )
        else:
            case.agreements.append(f"after forward it held {told}, as it should")
    elif like:
        wide = max(like, key=lambda name: BITS[name])
        named = base.name if wide == base.precision else wide
        text = f"{case.name} held as many bytes as {named}{_never(case.precision, BITS[wide])}"
        case.by_allocator.append(f"{text} (after forward {told}, should be {should})")
    else:
        case.silences.append(
            f"after forward it held {told}, should be {should}, and no recipe explains it: "
            "something that is not counted differs"
        )


def _alternatives(
    case: Case, base: Case, held: Held, layers: Sequence[Layer], ground: Ground
) -> Iterable[tuple[str, list[tuple[int, int]]]]:
    """What other precisions, wider or narrower than asked, would have added."""
    for name, (form, scaling) in _OTHERS.items():
        if BITS[name] == BITS.get(case.precision):
            continue
        if name == base.precision:
            # What ran as the baseline holds just what that does, shared or not.
            yield name, [(0, 0)]
            continue
        pair = (form, form)
        card = replace(case.subject.card, fprop=pair, dgrad=pair, wgrad=pair, scaling=scaling)
        yield name, possible_increases(expect(card, case.subject, base.subject, layers, ground), held)


def _by_pairs(cases: Sequence[Case]) -> None:
    """Two recipes of different width that added the same: the narrower one was never stored.

    What is shared with others, and all else that is not modelled, is the same in both.
    """
    for narrow in cases:
        for wide in cases:
            if narrow.by_allocator:  # once is enough
                break
            bits = BITS.get(wide.precision, 0)
            if not 0 < BITS.get(narrow.precision, 0) < bits or narrow.expected is None or wide.expected is None:
                continue
            if narrow.forward is None or wide.forward is None:
                continue
            off, should = slack(narrow, wide), wide.expected.total - narrow.expected.total
            if abs(should) > APART * off and abs(wide.forward - narrow.forward) <= off:
                text = f"{narrow.name} held as many bytes as {wide.name}{_never(narrow.precision, bits)}"
                less = f"it should hold {size(abs(should))} {'less' if should > 0 else 'more'}"
                narrow.by_allocator.append(f"{text} ({less})")


def _fits(more: float, ranges: Sequence[tuple[int, int]], off: float) -> bool:
    return any(low - off <= more <= high + off for low, high in ranges)
