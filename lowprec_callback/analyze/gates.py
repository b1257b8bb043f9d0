"""Gates: limits that a comparison must keep, for CI.

    METRIC:RECIPE OP LIMIT           step:fp8_delayed<=2%

A gate holds only if the evidence shows it. Where the number has an interval, its unfavourable end counts: the upper
end for `<=`, the lower one for `>=`. What is counted (coverage, peak) has no interval and needs none. A number that is
missing, or sampled without an interval, is `missing` evidence: neither kept nor broken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lowprec_callback.analyze.compare import SPEEDUPS, TIMES, Change, Comparison
from lowprec_callback.report import BUCKETS, Figure

Op = Literal["<=", ">="]
State = Literal["holds", "broken", "missing"]

UNITS: dict[str, tuple[str, ...]] = {
    "step": ("%", "ms"),
    "busy": ("%", "ms"),
    "idle": ("ms",),
    "residual": ("%", "ms"),
    **{f"bucket.{name}": ("%", "ms") for name in BUCKETS},
    **dict.fromkeys(SPEEDUPS, ("x", "%")),
    "coverage": ("%",),
    "peak": ("GB", "%"),
    "numerics": ("%",),
}
"""Metric to the units that its limit may have."""

GRAMMAR = (
    "a gate is METRIC:RECIPE<=LIMIT or METRIC:RECIPE>=LIMIT, like step:fp8_delayed<=2%. "
    "step, busy, bucket.NAME: % (change of B against A) or ms (of B); idle: ms of B; residual: its size, in % of B's "
    "step or ms; speedup, speedup.kernel, speedup.autocast, speedup.amdahl: x (of B) or % (change); coverage: % (of "
    "B); peak: GB (of B) or % (change); numerics: % (distance of the loss from the baseline's, in B). "
    f"Buckets: {', '.join(BUCKETS)}"
)

_GATE = re.compile(
    r"(?P<metric>[a-z_.]+):(?P<recipe>[^\s<>=:]+)\s*(?P<op><=|>=)\s*"
    r"(?P<limit>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>%|ms|x|GB)"
)


class GateError(ValueError):
    """A gate that cannot be understood: what is wrong, and the grammar."""


@dataclass(frozen=True)
class Gate:
    """A limit for one number of one recipe."""

    metric: str
    recipe: str
    op: Op
    limit: float
    unit: str

    def __str__(self) -> str:
        return f"{self.metric}:{self.recipe}{self.op}{self.limit!r}".removesuffix(".0") + self.unit


@dataclass(frozen=True)
class GateResult:
    """Whether a gate holds, and by which evidence."""

    gate: Gate
    state: State
    why: str
    seen: Figure
    """The number that was held against the limit, in the limit's unit."""


def parse_gate(text: str) -> Gate:
    """Read a gate. Raises GateError with what is wrong and the grammar."""
    found = _GATE.fullmatch(text.strip())
    if found is None:
        raise GateError(f"{text!r} is no gate: {GRAMMAR}")
    metric, unit, limit = found["metric"], found["unit"], float(found["limit"])
    if metric not in UNITS:
        raise GateError(f"{text!r}: there is no metric {metric!r}: {GRAMMAR}")
    if unit not in UNITS[metric]:
        raise GateError(f"{text!r}: the limit of {metric} is in {' or '.join(UNITS[metric])}, not {unit}: {GRAMMAR}")
    if not math.isfinite(limit):
        raise GateError(f"{text!r}: the limit is not finite: {GRAMMAR}")
    op: Op = "<=" if found["op"] == "<=" else ">="
    return Gate(metric, found["recipe"], op, limit, unit)


def check(comparison: Comparison, gates: Iterable[Gate]) -> tuple[GateResult, ...]:
    """Each gate held against the comparison, in order."""
    return tuple(_check(comparison, gate) for gate in gates)


def _check(comparison: Comparison, gate: Gate) -> GateResult:
    if gate.metric == "numerics":
        return _check_numerics(comparison, gate)
    try:
        change = comparison.change(gate.metric, gate.recipe)
    except KeyError as error:
        lacking = Figure.missing(gate.unit, str(error.args[0]))
        return GateResult(gate, "missing", str(error.args[0]), lacking)
    doubt = _doubt(comparison, change)
    seen = Figure.missing(gate.unit, doubt) if doubt else _seen(comparison, change, gate)
    if seen.value is None:
        return GateResult(gate, "missing", seen.reason or "not known", seen)
    if not change.counted and (seen.low is None or seen.high is None):
        why = change.why or "it was sampled, and has no interval"
        return GateResult(gate, "missing", f"{_written(seen.value, gate.unit)} is no evidence: {why}", seen)
    return _held(gate, seen)


def _check_numerics(comparison: Comparison, gate: Gate) -> GateResult:
    """Of B alone: each run is held against its own baseline. What makes a recipe void breaks every limit."""
    part = next((each for each in comparison.b.recipes if each.name == gate.recipe), None)
    if part is None or part.refusal is not None:
        why = f"{gate.recipe} did not run in B" + (f": {part.refusal}" if part is not None else "")
        return GateResult(gate, "missing", why, Figure.missing(gate.unit, why))
    if part.void is not None:
        return GateResult(gate, "broken", f"in B {part.void}", Figure.missing(gate.unit, part.void))
    seen = part.guard.distance if part.guard is not None else Figure.missing("%", "B has no numerics guard")
    if seen.value is None or part.guard is None or part.guard.state == "unknown":
        why = seen.reason or (part.guard.why if part.guard is not None else "not known")
        return GateResult(gate, "missing", why, Figure.missing(gate.unit, why))
    if part.guard.state != "ok":
        # Gradients or scales may be wrong where the loss is not yet.
        return GateResult(gate, "broken", f"in B: {part.guard.why}", seen)
    return _held(gate, seen)


def _doubt(comparison: Comparison, change: Change) -> str | None:
    """Why the ledger's parts cannot be believed, although they are there."""
    if change.metric not in TIMES and not change.metric.startswith("bucket."):
        return None
    for side, report in (("A", comparison.a), ("B", comparison.b)):
        ledger = report.recipe(change.recipe).ledger
        # A gate on the residual itself asks just how incomplete the ledger is.
        if ledger is not None and not ledger.complete and change.metric != "residual":
            return f"the ledger of {side} is incomplete: {'; '.join(ledger.complaints)}"
    return None


def _seen(comparison: Comparison, change: Change, gate: Gate) -> Figure:
    """The number that the gate speaks of, in its unit."""
    if change.b.value is None:
        return Figure.missing(gate.unit, change.why or f"B: {change.b.reason}")
    if gate.metric == "coverage":
        return change.b.scaled(100.0, "%")
    if gate.metric == "residual":
        size = _size(change.b)
        if gate.unit == "ms":
            return size
        step = comparison.b.recipe(gate.recipe).step_ms
        if step.value is None or step.value <= 0:
            return Figure.missing("%", step.reason or "the step takes no time")
        return size.scaled(100.0 / step.value, "%")
    if gate.unit != "%":
        return change.b
    ratio = change.ratio
    if ratio.value is None:
        return Figure.missing("%", ratio.reason or "no ratio")
    low, high = (None if end is None else (end - 1) * 100 for end in (ratio.low, ratio.high))
    return Figure((ratio.value - 1) * 100, "%", ratio.origin, low, high, facts=ratio.facts)


def _size(figure: Figure) -> Figure:
    """The absolute value; an interval that holds zero begins there."""
    if figure.value is None or figure.low is None or figure.high is None:
        return figure if figure.value is None else Figure(abs(figure.value), figure.unit, figure.origin)
    ends = abs(figure.low), abs(figure.high)
    low = 0.0 if figure.low <= 0 <= figure.high else min(ends)
    return Figure(abs(figure.value), figure.unit, figure.origin, low, max(ends), figure.n, figure.facts)


def _held(gate: Gate, seen: Figure) -> GateResult:
    assert seen.value is not None
    counts, best, end = (seen.high, seen.low, "upper") if gate.op == "<=" else (seen.low, seen.high, "lower")
    against = seen.value if counts is None else counts
    holds = against <= gate.limit if gate.op == "<=" else against >= gate.limit
    shown = _written(seen.value, gate.unit)
    if counts is None or best is None:
        return GateResult(gate, "holds" if holds else "broken", f"{shown}, counted", seen)
    text = f"{shown}, {end} end of the 95% interval {_written(counts, gate.unit)}"
    if holds:
        return GateResult(gate, "holds", text, seen)
    possible = best <= gate.limit if gate.op == "<=" else best >= gate.limit
    text += ": it may be kept, but is not shown to be" if possible else ": the whole interval is beyond the limit"
    return GateResult(gate, "broken", text, seen)


def _written(value: float, unit: str) -> str:
    value = round(value, 9) + 0.0  # neither -1.8e-13 nor -0
    return f"{value:.4g}{'' if unit in ('%', 'x') else ' '}{unit}"
