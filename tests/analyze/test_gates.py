"""Gates: their grammar, and what evidence each needs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.compare import compare
from lowprec_callback.analyze.gates import UNITS, Gate, GateError, GateResult, check, parse_gate
from lowprec_callback.report import Figure, NumericsReport, Report

from .compared import report, with_recipe


def result(text: str, before: Report, after: Report) -> GateResult:
    (found,) = check(compare(before, after), [parse_gate(text)])
    return found


# -- grammar -----------------------------------------------------------------------------------------------

PAIRS = [(metric, unit) for metric, units in UNITS.items() for unit in units]
gates = st.builds(
    lambda pair, recipe, op, limit: Gate(pair[0], recipe, op, limit, pair[1]),
    st.sampled_from(PAIRS),
    st.from_regex(r"[A-Za-z][A-Za-z0-9_.\-]{0,12}", fullmatch=True),
    st.sampled_from(["<=", ">="]),
    st.floats(-1e12, 1e12, allow_nan=False) | st.integers(-999, 999).map(float),
)


@given(gates)
def test_what_is_written_is_read(gate: Gate) -> None:
    assert parse_gate(str(gate)) == gate


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("step:fp8_delayed<=2%", Gate("step", "fp8_delayed", "<=", 2.0, "%")),
        (" step:fp8_delayed <= 515 ms ", Gate("step", "fp8_delayed", "<=", 515.0, "ms")),
        ("speedup:fp8_delayed>=1.5x", Gate("speedup", "fp8_delayed", ">=", 1.5, "x")),
        ("speedup.kernel:my-card>=-2%", Gate("speedup.kernel", "my-card", ">=", -2.0, "%")),
        ("coverage:fp8_block>=99%", Gate("coverage", "fp8_block", ">=", 99.0, "%")),
        ("peak:fp8_current<=93GB", Gate("peak", "fp8_current", "<=", 93.0, "GB")),
        ("bucket.quantize:fp8_delayed<=5%", Gate("bucket.quantize", "fp8_delayed", "<=", 5.0, "%")),
        ("numerics:fp8_delayed<=0.5%", Gate("numerics", "fp8_delayed", "<=", 0.5, "%")),
        ("residual:bf16<=.5%", Gate("residual", "bf16", "<=", 0.5, "%")),
    ],
)
def test_examples(text: str, gate: Gate) -> None:
    assert parse_gate(text) == gate


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is no gate"),
        ("step<=2%", "is no gate"),
        ("step:fp8_delayed<2%", "is no gate"),
        ("step:fp8_delayed=2%", "is no gate"),
        ("step:fp8_delayed<=2", "is no gate"),
        ("step:fp8_delayed<=2s", "is no gate"),
        ("step:fp8_delayed<=two%", "is no gate"),
        ("step:<=2%", "is no gate"),
        ("speed:fp8_delayed<=2%", "there is no metric 'speed'"),
        ("bucket.cast:fp8_delayed<=2%", "there is no metric 'bucket.cast'"),
        ("step:fp8_delayed<=2x", "the limit of step is in % or ms, not x"),
        ("coverage:fp8_delayed>=1x", "the limit of coverage is in %, not x"),
        ("idle:fp8_delayed<=2%", "the limit of idle is in ms, not %"),
        ("step:fp8_delayed<=1e999%", "the limit is not finite"),
    ],
)
def test_what_is_no_gate_is_told_with_the_grammar(text: str, sentence: str) -> None:
    with pytest.raises(GateError) as caught:
        parse_gate(text)
    assert sentence in str(caught.value)
    assert "a gate is METRIC:RECIPE<=LIMIT" in str(caught.value)


# -- evidence ----------------------------------------------------------------------------------------------

BEFORE = report(1)
AFTER = report(50, fp8=80.0 * 1.03)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("step:fp8_delayed<=2%", "broken"),
        ("step:fp8_delayed<=4%", "holds"),
        ("step:fp8_delayed>=2%", "holds"),
        ("step:fp8_delayed>=4%", "broken"),
        ("step:bf16<=1%", "holds"),
        ("step:fp8_delayed<=84ms", "holds"),
        ("step:fp8_delayed<=80ms", "broken"),
        ("speedup:fp8_delayed>=1.2x", "holds"),
        ("speedup:fp8_delayed>=1.25x", "broken"),
        ("speedup:fp8_delayed>=-1%", "broken"),
        ("speedup.kernel:fp8_delayed>=1.85x", "holds"),
        ("coverage:fp8_delayed>=99%", "holds"),
        ("coverage:fp8_delayed>=100%", "holds"),
        ("peak:fp8_delayed<=93GB", "holds"),
        ("peak:fp8_delayed<=89GB", "broken"),
        ("peak:fp8_delayed<=0%", "holds"),
        ("bucket.quantize:fp8_delayed<=5%", "holds"),
        ("bucket.quantize:fp8_delayed<=7ms", "broken"),
        ("bucket.hadamard:fp8_delayed<=0%", "holds"),
        ("busy:fp8_delayed<=80ms", "holds"),
        ("idle:bf16<=30ms", "holds"),
        ("idle:bf16<=5ms", "broken"),
        ("residual:bf16<=2%", "holds"),
        ("residual:bf16<=2ms", "holds"),
    ],
)
def test_gates(text: str, state: str) -> None:
    found = result(text, BEFORE, AFTER)
    assert found.state == state, found.why
    assert found.why


def test_the_unfavourable_end_counts_and_is_named() -> None:
    change = compare(BEFORE, AFTER).change("step", "fp8_delayed").ratio
    assert change.value is not None
    assert change.high is not None
    between = ((change.value + change.high) / 2 - 1) * 100
    found = result(str(Gate("step", "fp8_delayed", "<=", between, "%")), BEFORE, AFTER)
    assert found.state == "broken"
    assert "upper end of the 95% interval" in found.why
    assert "it may be kept, but is not shown to be" in found.why
    assert "the whole interval is beyond the limit" in result("step:fp8_delayed<=0%", BEFORE, AFTER).why


def test_bytes_are_counted() -> None:
    assert result("peak:bf16<=90GB", BEFORE, AFTER).why == "90 GB, counted"


ledger = BEFORE.recipe("fp8_delayed").ledger
assert ledger is not None
LACKING: list[tuple[str, dict[str, Any], str]] = [
    ("step:fp8_delayed<=2%", {"step_ms": Figure.missing("ms", "stopped early")}, "B: stopped early"),
    (
        "step:fp8_delayed<=99ms",
        {"step_ms": Figure(80.0, "ms", "measured", n=1)},
        "80 ms is no evidence: a single sample has no interval",
    ),
    ("speedup:fp8_delayed>=1x", {"speedups": None}, "no speedup was computed"),
    ("coverage:fp8_delayed>=1%", {"verdict": None}, "there is no verdict"),
    ("peak:fp8_delayed<=999GB", {"peak_gb": Figure.missing("GB", "not recorded on a CPU")}, "not recorded on a CPU"),
    ("bucket.gemm:fp8_delayed<=99%", {"ledger": None, "no_ledger": "not traced"}, "no ledger in B: not traced"),
    ("bucket.gemm:fp8_delayed<=99%", {"ledger": replace(ledger, steps={})}, "analyse its Recording again"),
    (
        "bucket.gemm:fp8_delayed<=99%",
        {"ledger": replace(ledger, complete=False, complaints=("kernels were lost",))},
        "the ledger of B is incomplete: kernels were lost",
    ),
    ("step:fp8_delayed<=2%", {"void": "the loss became nan"}, "in B the loss became nan"),
    ("step:fp8_delayed<=2%", {"refusal": "no GPU"}, "fp8_delayed did not run in B: no GPU"),
]


@pytest.mark.parametrize(("text", "change", "reason"), LACKING)
def test_missing_evidence_neither_holds_nor_breaks(text: str, change: dict[str, Any], reason: str) -> None:
    found = result(text, BEFORE, with_recipe(BEFORE, "fp8_delayed", **change))
    assert found.state == "missing"
    assert reason in found.why


def test_a_recipe_that_is_nowhere() -> None:
    found = result("step:fp9<=2%", BEFORE, AFTER)
    assert (found.state, found.seen.known) == ("missing", False)
    assert "fp9 is not in A (it has bf16, fp8_delayed)" in found.why


def test_the_residual_of_an_incomplete_ledger_can_be_held() -> None:
    assert ledger is not None
    lost = replace(ledger, complete=False, residual=Figure(-4.0, "ms"), complaints=("the residual is -4 ms",))
    after = with_recipe(BEFORE, "fp8_delayed", ledger=lost)
    assert result("residual:fp8_delayed<=1%", BEFORE, after).state == "broken"
    assert result("residual:fp8_delayed<=9%", BEFORE, after).state == "holds"


@given(st.floats(-10, 10), st.sampled_from(["step", "speedup", "bucket.gemm", "busy"]))
def test_a_limit_is_not_kept_from_both_sides_unless_it_is_the_number(limit: float, metric: str) -> None:
    states = [
        result(str(Gate(metric, "fp8_delayed", op, limit, "%")), BEFORE, AFTER).state  # type: ignore[arg-type]
        for op in ("<=", ">=")
    ]
    assert states.count("holds") <= 1


def test_a_looser_limit_holds_where_a_tighter_one_does() -> None:
    states = [result(f"step:fp8_delayed<={limit}%", BEFORE, AFTER).state for limit in range(-5, 10)]
    assert [key for key, _ in itertools.groupby(states)] == ["broken", "holds"]


# -- numerics ------------------------------------------------------------------------------------------------

NEAR = NumericsReport("ok", "the loss is 0.3% from bf16's", distance=Figure(0.3, "%"))


@pytest.mark.parametrize(
    ("change", "state", "why"),
    [
        ({"guard": NEAR}, "holds", "0.3%, counted"),
        ({"guard": replace(NEAR, distance=Figure(0.7, "%"))}, "broken", "0.7%, counted"),
        ({"guard": replace(NEAR, state="far", why="its gradient is short")}, "broken", "in B: its gradient is short"),
        ({"guard": NEAR, "void": "every gradient is zero"}, "broken", "in B every gradient is zero"),
        ({"guard": NumericsReport("unknown", "no", distance=Figure.missing("%", "cut"))}, "missing", "cut"),
        ({"guard": replace(NEAR, state="unknown", why="not repeatable")}, "missing", "not repeatable"),
        ({"guard": None}, "missing", "B has no numerics guard"),
        ({"refusal": "no GPU"}, "missing", "fp8_delayed did not run in B: no GPU"),
    ],
)
def test_numerics(change: dict[str, Any], state: str, why: str) -> None:
    found = result("numerics:fp8_delayed<=0.5%", BEFORE, with_recipe(BEFORE, "fp8_delayed", **change))
    assert (found.state, found.why) == (state, why)
