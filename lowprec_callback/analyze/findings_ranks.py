"""Findings about the processes that train together."""

from __future__ import annotations

import math

from lowprec_callback.analyze.finding_case import Case, ms_text, some
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.ranks import Straggler
from lowprec_callback.report import Figure, Finding

WHAT = {
    "step": "its whole steps, so the ranks do not wait for each other in each step",
    "forward": "its own forward passes, before it waits for others",
    "GEMM benchmark": "the same GEMMs on its own device, with nobody to wait for",
}
"""By what a rank was found to be slow."""


def find_straggler(case: Case) -> Finding | None:
    """One rank is slower than the others beyond noise: where ranks wait for each other, all pay for it."""
    if case.ranks is None or not case.part.baseline:
        return None
    found = case.ranks.stragglers(case.part.name)
    if not found:
        return None
    first = found[0]
    ms = (
        Figure(first.ms, "ms", "estimated", facts=lines_of("rank_summary", case.ranks.lines))
        if math.isfinite(first.ms) and first.ms > 0
        else Figure.missing("ms", f"the {first.quantity} of {case.part.name} was not measured on all ranks")
    )
    by_device = any(each.quantity == "GEMM benchmark" for each in found)
    advice = (
        "Look at that device's clocks, power limit, temperature and neighbours (`nvidia-smi -q -d CLOCK,PERFORMANCE`)"
        if by_device
        else "Look at what that rank does besides: its data (longer sequences, a slower disk), the load of its host, "
        "and its device's clocks and temperature"
    )
    return case.found(
        "straggler",
        ms,
        f"{_subject(found)} slower than the others: {first.excess:.1%} in {WHAT[first.quantity]} "
        f"({'+' if first.ms >= 0 else ''}{ms_text(first.ms)} in {case.part.name}). In a synchronous step all ranks "
        "wait for the slowest.",
        [_row(each) for each in found[:5]],
        f"{advice}.",
        recipe="",
    )


def _subject(found: list[Straggler]) -> str:
    told = some([f"rank {each.rank} ({each.host})" for each in found])
    return f"{told} is" if len(found) == 1 else f"{told} are"


def _row(straggler: Straggler) -> str:
    return (
        f"rank {straggler.rank} ({straggler.host}): {straggler.quantity} {straggler.excess:+.1%} against the median of "
        f"the others, at least {straggler.low:+.1%} at 95%"
    )
