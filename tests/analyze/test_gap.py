from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.gap import GEMMS, OTHER, SLOWER, closes, gap
from lowprec_callback.analyze.gemms import GemmTotals
from lowprec_callback.report import BUCKETS, Figure, Gap, Ledger

UNKNOWN = Figure.missing("ms", "shape 1x2x3 failed")


def bench(kernel: float | None, launch_bound: int = 0) -> GemmTotals:
    figure = UNKNOWN if kernel is None else Figure(kernel, "ms")
    return GemmTotals((), figure, figure, launch_bound, 12)


def book(wall: float, buckets: dict[str, float], idle: float = 0.0) -> Ledger:
    values = {name: Figure(buckets.get(name, 0.0), "ms", "measured") for name in BUCKETS}
    residual = math.fsum([wall, -idle, *(-value for value in buckets.values())])
    busy = Figure(math.fsum(buckets.values()), "ms")
    return Ledger(Figure(wall, "ms"), values, Figure(idle, "ms"), Figure(residual, "ms"), busy, True)


def between(before: Ledger | None, after: Ledger | None, *benches: GemmTotals) -> Gap:
    walls = [ledger.wall if ledger else Figure.missing("ms", "not run") for ledger in (before, after)]
    return gap(
        "bf16",
        "fp8",
        walls[0],
        walls[1],
        (before, after),
        ("no trace", "not traced"),
        benches or (bench(None),) * 2,  # type: ignore[arg-type]
    )


def terms(found: Gap) -> dict[str, float]:
    return {term.name: term.ms.value or 0.0 for term in found.terms}


BEFORE = book(100.0, {"gemm": 80.0, "attention": 5.0, "norm": 4.0, "elementwise": 2.0}, idle=9.0)
AFTER = book(
    70.0,
    {"gemm": 45.0, "quantize": 4.0, "amax": 1.0, "scale": 0.5, "attention": 5.1, "norm": 3.0, "elementwise": 2.01},
    idle=8.0,
)


def test_with_a_benchmark() -> None:
    found = between(BEFORE, AFTER, bench(78.0), bench(41.0))
    assert found.missing is None
    assert terms(found) == pytest.approx(
        {
            GEMMS: -37.0,
            SLOWER: 2.0,
            "quantization": 5.5,
            "attention": 0.1,
            "norm": -1.0,
            OTHER: 0.01,
            "idle": -1.0,
            "residual": 1.39,
        }
    )
    assert closes(found)
    assert found.terms[1].note == "over the bench: bf16 +2.0 ms, fp8 +4.0 ms"
    assert "elementwise" in next(term.note for term in found.terms if term.name == OTHER)


def test_without_a_complete_benchmark_there_is_one_term_and_a_note() -> None:
    found = between(BEFORE, AFTER, bench(78.0), bench(None))
    assert terms(found)[GEMMS] == pytest.approx(-35.0)
    assert SLOWER not in terms(found)
    assert "shape 1x2x3 failed" in found.terms[0].note
    assert closes(found)


def test_short_calls_are_noted() -> None:
    found = between(BEFORE, AFTER, bench(78.0), bench(41.0, launch_bound=7))
    assert "7 of 12 calls take longer to launch than to run" in found.terms[0].note


def test_a_missing_ledger_is_a_reason() -> None:
    assert between(None, AFTER).missing == "no ledger of bf16: no trace"
    assert between(BEFORE, None).missing == "no ledger of fp8: not traced"
    assert not closes(between(BEFORE, None))


values = st.dictionaries(st.sampled_from(BUCKETS), st.floats(0, 500))
maybe = st.one_of(st.none(), st.floats(0, 1000))


@given(st.floats(0.1, 1000), st.floats(0.1, 1000), values, values, st.floats(0, 90), maybe, maybe)
def test_it_closes_whatever_the_numbers(
    start: float, end: float, a: dict[str, float], b: dict[str, float], idle: float, k0: float | None, k1: float | None
) -> None:
    found = between(book(start, a, idle), book(end, b), bench(k0), bench(k1))
    assert math.fsum(terms(found).values()) == pytest.approx(end - start, rel=1e-9, abs=1e-9 * 5000)
    assert len(terms(found)) == len(found.terms)
