from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.bucket_noise import rest_within
from lowprec_callback.analyze.gap import GEMMS, OTHER, SLOWER, closes, gap, pairs
from lowprec_callback.analyze.gap import between as gap_between
from lowprec_callback.analyze.gemms import GemmTotals
from lowprec_callback.report import BUCKETS, IDLE_CAUSES, Figure, Gap, GemmRow, Ledger, RecipeReport, load_report

from .compared import recipe, report, rounds
from .recordings import BF16, DELAYED, gpu_recording

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


# -- any two recipes of a report -------------------------------------------------------------------------------------

BASE = rounds(100.0, 1)
MX = recipe("mxfp8", rounds(70.0, 2), BASE, seed=2, work={"gemm": 45.0, "quantize": 12.0, "attention": 10.0})
NV = recipe("nvfp4", rounds(60.0, 3), BASE, seed=3, work={"gemm": 30.0, "quantize": 16.0, "attention": 10.1})


def with_bench(part: RecipeReport, kernel: float, bound: bool = False) -> RecipeReport:
    figure = Figure(kernel, "ms", "derived", kernel - 0.1, kernel + 0.1)
    row = GemmRow("layers.*.fc", "fprop", 8, 8, 8, 12, Figure(1.0, "ms"), Figure(1.0, "ms"), True, bound)
    return replace(part, gemm_kernel_ms=figure, gemm_autocast_ms=figure, gemms=(row,))


def test_between_two_recipes_it_closes_with_intervals() -> None:
    found = gap_between(with_bench(MX, 44.0), with_bench(NV, 29.0, bound=True))
    assert (found.baseline, found.recipe) == ("mxfp8", "nvfp4")
    assert closes(found)
    by_name = {term.name: term.ms for term in found.terms}
    assert by_name[GEMMS].value == pytest.approx(-15.0)
    assert by_name["quantization"].value == pytest.approx(4.0, abs=0.05)
    assert "12 of 12 calls" in found.terms[0].note
    for term in found.terms:
        assert term.ms.low is not None
        assert term.ms.high is not None
        assert term.ms.low <= (term.ms.value or 0.0) <= term.ms.high
    # The residual is what busy leaves of two steps: no narrower than the steps themselves.
    assert (by_name["residual"].half_width or 0.0) >= (found.start.half_width or 0.0)


def test_it_is_the_same_the_other_way_round() -> None:
    there, back = gap_between(MX, NV), gap_between(NV, MX)
    values = [{term.name: term.ms for term in found.terms} for found in (there, back)]
    for name in ("quantization", "idle", "residual"):
        assert values[0][name].value == pytest.approx(-(values[1][name].value or 0.0))
        assert values[0][name].half_width == pytest.approx(values[1][name].half_width)


def test_idle_lies_between_none_and_what_the_traced_steps_showed() -> None:
    """However wide the step's interval is; the residual keeps all of that."""
    ledger = MX.ledger
    assert ledger is not None
    busy, idle = ledger.busy.value or 0.0, ledger.idle.value or 0.0
    showed = replace(ledger, traced_wall=Figure(busy + idle + 0.3, "ms"))
    wide, rest = rest_within(showed, 50.0)
    assert rest.half_width == pytest.approx(50.0)
    assert (wide.value, wide.low, wide.high) == (idle, 0.0, pytest.approx(idle + 0.3))
    narrow, _ = rest_within(showed, 0.1)
    assert (narrow.low, narrow.high) == (pytest.approx(max(idle - 0.1, 0.0)), pytest.approx(idle + 0.1))
    # Less than the timed step had (its kernels were the shorter ones): the value itself is the most.
    assert rest_within(replace(ledger, traced_wall=Figure(busy, "ms")), 50.0)[0].high == pytest.approx(idle)
    assert rest_within(replace(ledger, traced_wall=None), 50.0)[0].half_width == pytest.approx(50.0)
    assert rest_within(showed, None) == (showed.idle, showed.residual)
    # On a CPU the traced step is scaled to the timed one, which leaves no residual.
    scaled, none = rest_within(replace(showed, busy=replace(ledger.busy, origin="estimated")), 50.0)
    assert scaled.half_width == pytest.approx(50.0 * idle / (ledger.wall.value or 0.0))
    assert none.half_width == 0.0

    bounded = replace(MX, ledger=replace(showed, traced_wall=Figure(busy + idle, "ms"))), NV
    terms = [{term.name: term.ms for term in gap_between(*sides).terms} for sides in ((MX, NV), bounded)]
    assert (terms[1]["idle"].half_width or 0.0) < (terms[0]["idle"].half_width or 0.0)
    assert terms[1]["residual"] == terms[0]["residual"]


def test_without_a_spread_there_is_no_interval() -> None:
    assert MX.ledger is not None
    once = {name: times[:1] for name, times in MX.ledger.steps.items()}
    assert NV.ledger is not None
    single = [replace(part, ledger=replace(part.ledger, steps=once)) for part in (MX, NV) if part.ledger]
    terms = {term.name: term.ms for term in gap_between(*single).terms}
    assert terms["quantization"].half_width is None
    assert terms["idle"].half_width is None


def test_a_bucket_of_one_side_alone_has_that_sides_scatter() -> None:
    plain = recipe("bf16", BASE, BASE, work={"gemm": 80.0, "attention": 10.0})
    terms = {term.name: term.ms for term in gap_between(plain, MX).terms}
    assert (terms["quantization"].half_width or 0.0) > 0.0


def test_a_loaded_report_gives_the_gaps_of_the_one_that_was_saved(tmp_path: Path) -> None:
    from lowprec_callback.analyze.summary import analyze

    made = analyze(gpu_recording(speeds={"bf16": BF16, "fp8_delayed": DELAYED, "fp8_block": DELAYED}))
    made.save(tmp_path / "report.json")
    loaded = load_report(tmp_path)
    assert [(a.name, b.name) for a, b in pairs(loaded)] == [
        ("bf16", "fp8_delayed"),
        ("bf16", "fp8_block"),
        ("fp8_delayed", "fp8_block"),
    ]
    for one, other in pairs(loaded):
        found = gap_between(one, other)
        assert closes(found)
        assert found == gap_between(made.recipe(one.name), made.recipe(other.name))
    assert loaded.recipe("fp8_block").gap == gap_between(loaded.recipe("bf16"), loaded.recipe("fp8_block"))


def test_a_recipe_that_did_not_run_has_no_gap_and_a_reason() -> None:
    refused = RecipeReport("nvfp4", "NVFP4", False, refusal="compute capability 9.0, needs 10.0")
    assert gap_between(MX, refused).missing == (
        "no ledger of nvfp4: it did not run: compute capability 9.0, needs 10.0"
    )
    assert pairs(replace(report(1), recipes=(MX, refused))) == []


def test_the_idle_term_says_which_cause_changed() -> None:
    sides = []
    for part, starved in ((MX, 1.0), (NV, 4.0)):
        assert part.ledger is not None
        causes = {
            cause: Figure(starved if cause == "launch-starved" else 0.0, "ms", "estimated") for cause in IDLE_CAUSES
        }
        sides.append(replace(part, ledger=replace(part.ledger, idle_parts=causes)))
    term = next(term for term in gap_between(*sides).terms if term.name == "idle")
    assert term.note == "the GPU runs nothing; estimated: launch-starved +3.00 ms"
