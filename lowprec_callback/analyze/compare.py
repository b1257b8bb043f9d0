"""Two Reports: what became faster, slower, stayed the same, or cannot be told, and by which evidence.

Each number is compared by its 95% interval, never by its value alone. With a margin m (default 1%), and for what is
a time or a ratio r = B / A with the interval [low, high]:

    same         1 / (1 + m) <= low  and  high <= 1 + m     (an equivalence test: two one-sided tests at 2.5% each)
    slower       otherwise, low > 1
    faster       otherwise, high < 1
    cannot tell  otherwise, and where there is no interval

So noisy runs are not "the same": only an interval that fits the margin is. Limits of r = b / a come from those of a
and b by the method of Zou and Donner ("Construction of confidence limits about effect measures", Statistics in
Medicine 27, 2008: MOVER), on logarithms; of a difference d = b - a directly:

    low = d - sqrt((b - b_low)^2 + (a_high - a)^2),     high = d + sqrt((b_high - b)^2 + (a - a_low)^2).

It takes the sides as independent, which two runs are: `statistics.ratio`, which pairs blocks that are neighbours
in time, is for recipes of one run. An interval holds what differs between the rounds of a run. What differs
between runs (another day, another GPU of the same name) no single run shows.

Swapping A and B swaps the words and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lowprec_callback.analyze.bucket_noise import with_intervals
from lowprec_callback.analyze.comparable import Difference, ran_on_both, refuse_unless_allowed
from lowprec_callback.analyze.statistics import is_different
from lowprec_callback.report import BUCKETS, Figure, RecipeReport, Report, merge_facts, worst_origin

MARGIN = 0.01
"""Change of a time by which two runs still count as the same."""

SMALL = 0.1
"""The part of the margin of a whole step within which a bucket's change does not matter: 0.1% of the step at 1%."""

Word = Literal["faster", "slower", "lower", "higher", "same", "cannot tell"]

SPEEDUPS = {"speedup": "step", "speedup.kernel": "kernel", "speedup.autocast": "autocast", "speedup.amdahl": "amdahl"}
"""Metric to the field of `Speedups`."""

TIMES = ("busy", "idle", "residual")
"""Parts of the ledger besides its buckets."""


@dataclass(frozen=True)
class Change:
    """One number of one recipe in A and in B."""

    recipe: str
    metric: str
    """`step`, `busy`, `idle`, `residual`, `bucket.NAME`, `speedup`, `speedup.kernel`, `speedup.autocast`,
    `speedup.amdahl`, `coverage`, `peak`."""
    a: Figure
    b: Figure
    """With the intervals that were used."""
    ratio: Figure
    """B / A [1]; missing where A is zero, and for what may be zero or below (`idle`, `residual`)."""
    difference: Figure
    """B - A, in the unit of both."""
    word: Word
    """`faster` and `slower` of times, `lower` and `higher` of the rest, and of the residual, which is no work."""
    why: str = ""
    """Of `cannot tell`: the reason. Of other words: what to bear in mind, if anything."""
    counted: bool = False
    """Counted, not sampled (bytes of an allocator, FLOPs): exact, so that it needs no interval."""
    noisy: bool = False
    """`cannot tell` because the interval is too wide, and for no other reason."""


@dataclass(frozen=True)
class Comparison:
    """What became of each recipe from A to B."""

    a: Report
    b: Report
    margin: float
    changes: tuple[Change, ...]
    allowed: tuple[Difference, ...] = ()
    """In what the runs differ although they must not, which was allowed by name."""
    remarks: tuple[str, ...] = ()

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes that were compared, in A's order."""
        return tuple(dict.fromkeys(change.recipe for change in self.changes))

    def change(self, metric: str, recipe: str) -> Change:
        """One number's change. Raises KeyError, with a sentence, if it was not compared."""
        for change in self.changes:
            if (change.metric, change.recipe) == (metric, recipe):
                return change
        raise KeyError(f"{metric} of {recipe} was not compared: {self.why_not(metric, recipe)}")

    def why_not(self, metric: str, recipe: str) -> str:
        """Why a number is not among the changes."""
        if recipe in self.recipes:
            return f"{recipe} has no {metric}"
        for side, report in (("A", self.a), ("B", self.b)):
            parts = {part.name: part for part in report.recipes}
            if recipe not in parts:
                return f"{recipe} is not in {side} (it has {', '.join(parts)})"
            if parts[recipe].refusal is not None:
                return f"{recipe} did not run in {side}: {parts[recipe].refusal}"
        return f"{recipe} is in neither"


def compare(a: Report, b: Report, margin: float = MARGIN, allow: Sequence[str] = ()) -> Comparison:
    """What changed from A to B, for every recipe that ran in both.

    `margin` is the relative change that still counts as the same. `allow` names differences (`version.torch`,
    `version`, `recipe.fp8_delayed`, ...) that do not matter, or whose effect is the question.

    Raises:
        NotComparable: the runs differ in what they must share; it names all of it.
        ValueError: `margin` is not between 0 and 1, or `allow` holds a name that no difference has.
    """
    if not 0 < margin < 1:
        raise ValueError(f"the margin is a share between 0 and 1 (0.01 for 1%), got {margin}")
    allowed = refuse_unless_allowed(a, b, allow)
    changes = tuple(change for one, other in ran_on_both(a, b) for change in _changes(one, other, margin))
    return Comparison(a, b, margin, changes, allowed, tuple(_remarks(a, b, changes)))


# --- One recipe ------------------------------------------------------------------------------------------


def _changes(one: RecipeReport, other: RecipeReport, margin: float) -> list[Change]:
    void = " and ".join(f"in {side} {part.void}" for side, part in (("A", one), ("B", other)) if part.void)
    found = [_step(one, other, margin)]
    if not one.baseline:
        found += [_speedup(one, other, metric, margin) for metric in SPEEDUPS]
    found += [_coverage(one, other), _peak(one, other, margin), *_ledger(one, other, margin)]
    if not void:
        return found
    # A recipe that does not compute is fast for nothing.
    why = f"{void}: its numbers count for nothing"
    nothing = {unit: Figure.missing(unit, why) for unit in ("ms", "x", "GB", "share")}
    return [
        replace(each, word="cannot tell", why=why, a=nothing[each.a.unit], b=nothing[each.b.unit],
                ratio=nothing["x"], difference=nothing[each.a.unit], noisy=False)
        for each in found
    ]  # fmt: skip


def _step(one: RecipeReport, other: RecipeReport, margin: float) -> Change:
    change = _by_ratio(one.name, "step", one.step_ms, other.step_ms, margin, ("faster", "slower"))
    few = [side for side, part in (("A", one), ("B", other)) if len(part.samples) == 1]
    if few and change.word != "cannot tell":
        return replace(change, why=f"one round in {' and '.join(few)}: the interval holds no drift between rounds")
    return change


def _speedup(one: RecipeReport, other: RecipeReport, metric: str, margin: float) -> Change:
    a, b = (
        getattr(part.speedups, SPEEDUPS[metric]) if part.speedups else Figure.missing("x", "no speedup was computed")
        for part in (one, other)
    )
    return _by_ratio(one.name, metric, a, b, margin, ("lower", "higher"))


def _coverage(one: RecipeReport, other: RecipeReport) -> Change:
    a, b = (
        part.verdict.coverage if part.verdict else Figure.missing("share", "there is no verdict")
        for part in (one, other)
    )
    change = _counted(one.name, "coverage", _as_share(a), _as_share(b))
    return _with_word(change, 1e-6)


def _as_share(figure: Figure) -> Figure:
    return figure.scaled(0.01 if figure.unit == "%" else 1.0, "share")


def _peak(one: RecipeReport, other: RecipeReport, margin: float) -> Change:
    change = _counted(one.name, "peak", one.peak_gb, other.peak_gb)
    return _with_word(change, margin * max(change.a.value or 0.0, change.b.value or 0.0) / (1 + margin))


def _counted(recipe: str, metric: str, a: Figure, b: Figure) -> Change:
    return Change(recipe, metric, a, b, _ratio(a, b), b.minus(a), "cannot tell", _lacking(a, b), counted=True)


def _with_word(change: Change, limit: float) -> Change:
    """The word for what was counted: a difference is a difference, above `limit`."""
    if change.difference.value is None:
        return change
    far = abs(change.difference.value) > limit
    return replace(change, word=("higher" if change.difference.value > 0 else "lower") if far else "same")


def _ledger(one: RecipeReport, other: RecipeReport, margin: float) -> list[Change]:
    """Buckets, busy, idle and residual, by their differences: some are zero, so that ratios would not do.

    A bucket is the same if its change fits margin x bucket, or `SMALL` x margin x step where that is more. Idle and
    residual are what the buckets leave of the step and share its noise: for them it is margin x step.
    """
    names = [*(f"bucket.{name}" for name in BUCKETS), *TIMES]
    missing = [
        f"no ledger in {side}: {part.no_ledger or 'no traced step'}"
        for side, part in (("A", one), ("B", other))
        if part.ledger is None
    ]
    if one.ledger is None or other.ledger is None:
        lacking = Figure.missing("ms", "; ".join(missing))
        ratio = Figure.missing("x", "; ".join(missing))
        return [
            Change(one.name, name, lacking, lacking, ratio, lacking, "cannot tell", "; ".join(missing))
            for name in names
        ]
    left, right, silent = with_intervals(one, other)
    steps = [part.step_ms.value for part in (one, other) if part.step_ms.value is not None]
    floor = SMALL * margin * math.fsum(steps) / max(len(steps), 1)
    # An incomplete ledger cannot say that a bucket grew: the kernels may have been lost on the other side.
    doubt = [
        f"the ledger of {side} is incomplete: {'; '.join(part.ledger.complaints)}"
        for side, part in (("A", one), ("B", other))
        if part.ledger is not None and not part.ledger.complete
    ]
    found = []
    for name in names:
        a, b = left[name], right[name]
        size = max(abs(a.value or 0.0), abs(b.value or 0.0)) / (1 + margin)
        limit = floor / SMALL if name in ("idle", "residual") else max(margin * size, floor)
        change = _by_difference(one.name, name, a, b, limit, silent)
        found.append(replace(change, word="cannot tell", why="; ".join(doubt), noisy=False) if doubt else change)
    return found


# --- From two Figures to a word --------------------------------------------------------------------------


def _by_ratio(recipe: str, metric: str, a: Figure, b: Figure, margin: float, words: tuple[Word, Word]) -> Change:
    ratio = _ratio(a, b)
    word: Word = "cannot tell"
    noisy = False
    why = _lacking(a, b) or ("" if ratio.low is not None else "a single sample has no interval")
    if ratio.low is not None and ratio.high is not None:
        if 1 / (1 + margin) <= ratio.low and ratio.high <= 1 + margin:
            word = "same"
        elif is_different(ratio.low, ratio.high):
            word = words[1] if ratio.low > 1 else words[0]
        else:
            noisy = True
            beyond = f"one beyond the margin of {margin * 100:.3g}%"
            why = f"the interval, {_percents(ratio)}, holds no change and also {beyond}"
    return Change(recipe, metric, a, b, ratio, _difference(a, b), word, why, noisy=noisy)


def _by_difference(recipe: str, metric: str, a: Figure, b: Figure, limit: float, silent: str | None) -> Change:
    """The word for a part of a step, in ms."""
    difference = _difference(a, b)
    word: Word = "cannot tell"
    noisy = False
    words: tuple[Word, Word] = ("lower", "higher") if metric == "residual" else ("faster", "slower")
    why = _lacking(a, b) or ("" if difference.low is not None else silent or "no interval")
    if difference.low is not None and difference.high is not None:
        if -limit <= difference.low and difference.high <= limit:
            word = "same"
        elif is_different(difference.low, difference.high, 0.0):
            word = words[1] if difference.low > 0 else words[0]
        else:
            noisy = True
            interval = f"{difference.low:+.3g} to {difference.high:+.3g} ms"
            why = f"the interval, {interval}, holds no change and also one beyond {limit:.3g} ms"
    if metric in ("idle", "residual"):
        ratio = Figure.missing("x", f"{metric} may be zero: compare it in ms")
    else:
        ratio = _linear_ratio(a, b)
    return Change(recipe, metric, a, b, ratio, difference, word, why, noisy=noisy)


def _lacking(a: Figure, b: Figure) -> str:
    return "; ".join(f"{side}: {figure.reason}" for side, figure in (("A", a), ("B", b)) if figure.value is None)


def _percents(ratio: Figure) -> str:
    assert ratio.low is not None
    assert ratio.high is not None
    return f"{ratio.low - 1:+.2%} to {ratio.high - 1:+.2%}"


def _difference(a: Figure, b: Figure) -> Figure:
    """B - A with its interval by MOVER; see the module's docstring."""
    if a.value is None or b.value is None:
        return Figure.missing(a.unit, _lacking(a, b))
    low, high = _mover((a.value, a.low, a.high), (b.value, b.low, b.high))
    return Figure(b.value - a.value, a.unit, worst_origin([a, b]), low, high, facts=merge_facts([a, b]))


def _ratio(a: Figure, b: Figure) -> Figure:
    """B / A with its interval by MOVER on logarithms; an end at or below zero leaves none."""
    if a.value is None or b.value is None:
        return Figure.missing("x", _lacking(a, b))
    if a.value <= 0 or b.value <= 0:
        return Figure.missing("x", "a ratio needs two numbers above zero")
    low, high = _mover(_logs(a), _logs(b))
    return Figure(
        b.value / a.value,
        "x",
        worst_origin([a, b]),
        None if low is None else math.exp(low),
        None if high is None else math.exp(high),
        facts=merge_facts([a, b]),
    )


def _linear_ratio(a: Figure, b: Figure) -> Figure:
    """B / A where B may be zero: half-widths h by the delta method, h = sqrt((r h_a)^2 + h_b^2) / a."""
    if a.value is None or b.value is None:
        return Figure.missing("x", _lacking(a, b))
    if a.value <= 0:
        if b.value == 0:
            # No such work on either side, each time that one looked: no change.
            return Figure(1.0, "x", worst_origin([a, b]), 1.0, 1.0, facts=merge_facts([a, b]))
        return Figure.missing("x", "A has no such work, so a change has no percentage: give the limit in ms")
    value = b.value / a.value
    if a.half_width is None or b.half_width is None:
        return Figure(value, "x", worst_origin([a, b]), facts=merge_facts([a, b]))
    half = math.hypot(value * a.half_width, b.half_width) / a.value
    return Figure(value, "x", worst_origin([a, b]), value - half, value + half, facts=merge_facts([a, b]))


Limits = tuple[float, float | None, float | None]
"""Value, low, high."""


def _logs(figure: Figure) -> Limits:
    assert figure.value is not None
    if figure.low is None or figure.high is None or figure.low <= 0:
        return math.log(figure.value), None, None
    return math.log(figure.value), math.log(figure.low), math.log(figure.high)


def _mover(a: Limits, b: Limits) -> tuple[float | None, float | None]:
    (mid_a, low_a, high_a), (mid_b, low_b, high_b) = a, b
    if low_a is None or high_a is None or low_b is None or high_b is None:
        return None, None
    d = mid_b - mid_a
    return d - math.hypot(mid_b - low_b, high_a - mid_a), d + math.hypot(high_b - mid_b, mid_a - low_a)


# --- Remarks ---------------------------------------------------------------------------------------------


def _remarks(a: Report, b: Report, changes: Sequence[Change]) -> list[str]:
    found = []
    names = dict.fromkeys(part.name for report in (a, b) for part in report.recipes)
    ran = [{part.name for part in report.recipes if part.refusal is None} for report in (a, b)]
    for name in names:
        if (name in ran[0]) != (name in ran[1]):
            side, lacks = ("A", b) if name in ran[0] else ("B", a)
            reason = next((part.refusal for part in lacks.recipes if part.name == name), None)
            found.append(f"{name} ran in {side} only{f' ({reason})' if reason else ''}.")
    words = {change.recipe: change.word for change in changes if change.metric == "step"}
    if words.get(a.baseline) in ("faster", "slower"):
        found.append(
            f"The baseline {a.baseline} is {words[a.baseline]} as well: what moves all recipes alike is the machine, "
            "a library or the model, not a recipe. The speedups are free of it."
        )
    for side, report in (("A", a), ("B", b)):
        if report.status not in ("finished", "shortened"):
            found.append(f"The run of {side} did not finish ({report.status}): what it had not measured is missing.")
    return found
