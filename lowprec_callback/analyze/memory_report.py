"""What the memory witness found, as numbers and sentences for the Report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lowprec_callback.analyze.memory_case import Case, Ground, first, slack
from lowprec_callback.analyze.memory_ledger import GB, NO_COUNTERS, NOT_RECORDED, Ledger
from lowprec_callback.analyze.memory_model import Layer, possible_increases
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.recording import Memory
from lowprec_callback.report import Figure, MemoryReport, MemoryTerm

PHASES = ("start", "forward", "backward", "optimizer")


def memory_report(case: Case, base: Case | None, ground: Ground, layers: Sequence[Layer]) -> MemoryReport:
    """One recipe's part of the Report, once all that speaks for and against it is in `case`."""
    state: Literal["agrees", "contradicts", "silent"]
    if case.by_allocator or case.by_operands:
        state, texts = "contradicts", [*case.by_allocator, *case.by_operands]
    elif case.agreements:
        state, texts = "agrees", [*case.agreements, *case.silences]
    else:
        state, texts = "silent", case.silences or [_nothing(case, ground)]
    return MemoryReport(
        state=state,
        why="; ".join(dict.fromkeys(texts)),
        phases=_phases(case.subject.memory, ground),
        terms=_terms(case, base, ground),
        note=_note(case, base),
        moments=Ledger(
            case.subject.memory,
            case.subject.holdings,
            case.subject.peak,
            case.subject.dispatches,
            layers,
            ground.micro_batches,
            ground.on_cpu,
        ).moments(),
    )


def _nothing(case: Case, ground: Ground) -> str:
    if ground.on_cpu:
        return NO_COUNTERS
    return case.why_not or "no operand's bytes were recorded"


def no_counters(case: Case, base: Case | None, ground: Ground) -> str:
    """Why the allocator cannot speak of a recipe against its baseline."""
    if ground.on_cpu:
        return NO_COUNTERS
    if base is None:
        return "the baseline was not measured"
    if base.expected is None:
        return base.why_not or "there is no expectation of the baseline"
    without = " and ".join(each.name for each in (base, case) if each.forward is None)
    return f"no allocator counters of a watched step of {without} were recorded"


def _phases(memory: Sequence[tuple[int, Memory]], ground: Ground) -> dict[str, Figure]:
    lines = {id(fact): line for line, fact in memory}
    missing = Figure.missing("GB", NO_COUNTERS if ground.on_cpu else NOT_RECORDED)
    phases: dict[str, Figure] = {}
    if held := ground.rank_bytes or ground.parameter_bytes:
        phases["parameters"] = Figure(held / GB, "GB", "measured", facts=ground.parameter_facts)
    for name in PHASES:
        fact = first(memory, name)
        phases[name] = missing
        if fact is not None:
            source = lines_of("memory", [lines[id(fact)]])
            phases[name] = Figure(fact.allocated / GB, "GB", "measured", facts=source)
    watched = [(line, fact) for line, fact in memory if fact.round < 0 and fact.phase in PHASES]
    phases["peak"] = missing
    if watched:
        source = lines_of("memory", (line for line, _ in watched))
        phases["peak"] = Figure(max(fact.peak for _, fact in watched) / GB, "GB", "measured", facts=source)
    return phases


def _terms(case: Case, base: Case | None, ground: Ground) -> tuple[MemoryTerm, ...]:
    """Expected beside measured: copies of weights, saved inputs, and what the forward pass added in all."""
    should = case.expected
    no_formula = case.why_not or "there is no expectation"
    source = lines_of("dispatch", (line for line, _ in case.subject.dispatches))
    terms = [
        MemoryTerm(
            name,
            Figure.missing("GB", no_formula) if formula is None else Figure(formula / GB, "GB"),
            Figure.missing("GB", "the bytes of its operands were not recorded")
            if seen is None
            else Figure(seen / GB, "GB", "measured", facts=source),
        )
        for name, formula, seen in (
            ("copies of weights", should.weights if should else None, case.sums[0]),
            ("saved inputs", should.inputs if should else None, case.sums[1]),
        )
    ]
    if base is not None and base is not case:
        terms.append(_against(case, base, ground))
    return tuple(terms)


def _against(case: Case, base: Case, ground: Ground) -> MemoryTerm:
    more = _more(case, base)
    expected = Figure.missing("GB", case.why_not or base.why_not or "there is no expectation")
    if case.expected is not None and base.expected is not None:
        ranges = possible_increases(case.expected, base.expected)
        expected = Figure((ranges[0][0] if more is None else nearest(more, ranges)) / GB, "GB")
    measured = Figure.missing("GB", no_counters(case, base, ground))
    if more is not None:
        found = [line for each in (base, case) for line, fact in each.subject.memory if fact.round < 0]
        measured = Figure(more / GB, "GB", "measured", facts=lines_of("memory", sorted(found)))
    return MemoryTerm(f"forward, against {base.name}", expected, measured)


def _more(case: Case, base: Case) -> int | None:
    """What the forward pass added more than in the baseline [bytes]."""
    return None if case.forward is None or base.forward is None else case.forward - base.forward


def _note(case: Case, base: Case | None) -> str | None:
    """If a recipe should hold more than the baseline (and is not seen to do otherwise): of what."""
    if base is None or base.expected is None or case.expected is None or case is base:
        return None
    ranges = possible_increases(case.expected, base.expected)
    measured = _more(case, base)
    more = ranges[-1][1] if measured is None else nearest(measured, ranges)
    if more <= 0 or (measured is not None and abs(measured - more) > slack(case, base)):
        return None
    reasons = [f"copies of weights {signed(case.expected.weights - base.expected.weights)}, beside the parameters"]
    reasons.append(f"saved inputs {signed(case.expected.inputs - base.expected.inputs)}")
    if more > ranges[0][0]:
        reasons.append(f"inputs that {base.name} shares with other layers {signed(more - ranges[0][0])}")
    if case.expected.state:
        reasons.append(f"amax histories {signed(case.expected.state)}")
    holds = "may hold up to" if measured is None else "holds"
    text = f"{case.name} {holds} {size(more)} more after forward than {base.name}"
    return f"{text}: {'; '.join(reasons)}. Expected, no fault."


def nearest(value: float, ranges: Sequence[tuple[int, int]]) -> float:
    """The value in the ranges that is closest to the given one."""
    return min((min(max(value, low), high) for low, high in ranges), key=lambda inside: abs(inside - value))


def signed(number: float) -> str:
    """`+1.23 GB`, `-4.20 MB`."""
    return f"{'-' if number < 0 else '+'}{size(abs(number))}"


def compared(more: float, than: str | None = None) -> str:
    """`1.23 GB more than bf16`, `4.20 MB less`."""
    return f"{size(abs(more))} {'less' if more < 0 else 'more'}{f' than {than}' if than else ''}"


def size(number: float) -> str:
    """Bytes as `1.23 GB`, `4.20 MB`, `12 kB`: powers of ten."""
    if number >= 0.9995e9:
        return f"{number / 1e9:.2f} GB"
    return f"{number / 1e6:.2f} MB" if number >= 0.9995e6 else f"{number / 1e3:.0f} kB"
