"""How far the parts of a ledger can be trusted: intervals from few traced steps, on both sides of a comparison.

A bucket is the mean over n traced steps, mostly two. Its half-width at 95% has two parts, added in quadrature:

    h = sqrt((t_w s / sqrt(n))^2 + (t_b q x)^2)                                                [ms]

s is the scatter of that bucket from one traced step to the next, pooled over both sides (it is the same work; two
steps alone would give a t of 12.7): s^2 = sum of squared deviations / degrees of freedom, t_w Student's quantile of
n_A + n_B - 2 degrees. Traced steps are neighbours in time and share a clock, so that s is too small by what blocks
differ as a whole. That is known from the timed steps: q^2 is the variance of the logarithms of their round medians,
pooled over both sides, t_b the quantile of its R_A + R_B - 2 degrees, and x the bucket's time. Where the host's
noise is in it (launch-bound steps), q is larger than the kernels' own, and h errs on the wide side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from lowprec_callback.analyze.statistics import t_quantile
from lowprec_callback.report import BUCKETS, Figure, Ledger, RecipeReport

Parts = dict[str, Figure]
"""`bucket.NAME`, `busy`, `idle`, `residual`."""


def with_intervals(one: RecipeReport, other: RecipeReport) -> tuple[Parts, Parts, str | None]:
    """The ledger's parts of two recipes that have one, with intervals; or without any, and the reason.

    `busy` is treated like a bucket. Idle and residual are what it leaves of the timed step, so that their
    half-widths are those of busy and step in quadrature.
    """
    left, right = one.ledger, other.ledger
    if left is None or right is None:
        raise ValueError("both recipes need a ledger")
    plain = _parts(left), _parts(right)
    rounds = [[median(times) for _, times in part.samples if times] for part in (one, other)]
    between = _pooled([[math.log(time) for time in medians] for medians in rounds])
    if between is None:
        return *plain, "one round of timed steps a side: how much blocks differ is not known"
    if any(not ledger.steps for ledger in (left, right)):
        return *plain, "the times of the single traced steps are not in the report: analyse its Recording again"
    if _pooled([ledger.steps[BUCKETS[0]] for ledger in (left, right)]) is None:
        return *plain, "one traced step a side: its scatter is not known"
    sides = []
    for part, ledger, parts in ((one, left, plain[0]), (other, right, plain[1])):
        made = {}
        for name in [*(f"bucket.{bucket}" for bucket in BUCKETS), "busy"]:
            within = _pooled([_series(each, name) for each in (left, right)])
            assert within is not None
            figure, n = parts[name], len(_series(ledger, name))
            made[name] = _around(figure, math.hypot(within / math.sqrt(n), between * (figure.value or 0.0)))
        widths = made["busy"].half_width, part.step_ms.half_width
        for name in ("idle", "residual"):
            known = widths[0] is not None and widths[1] is not None
            made[name] = _around(parts[name], math.hypot(widths[0] or 0.0, widths[1] or 0.0)) if known else parts[name]
        sides.append(made)
    return sides[0], sides[1], None


def _parts(ledger: Ledger) -> Parts:
    missing = Figure.missing("ms", "the ledger has no such bucket")
    buckets = {f"bucket.{name}": ledger.buckets.get(name, missing) for name in BUCKETS}
    return {**buckets, "busy": ledger.busy, "idle": ledger.idle, "residual": ledger.residual}


def _series(ledger: Ledger, name: str) -> Sequence[float]:
    """A bucket's time in each traced step, or all buckets' together [ms]."""
    if name == "busy":
        return [math.fsum(step) for step in zip(*ledger.steps.values(), strict=True)]
    return ledger.steps.get(name.removeprefix("bucket."), ())


def _pooled(groups: Sequence[Sequence[float]]) -> float | None:
    """t x pooled standard deviation of several groups around their own means; None without a degree of freedom."""
    degrees = sum(len(group) - 1 for group in groups if group)
    if degrees < 1:
        return None
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups if group for value in group)
    return t_quantile(degrees) * math.sqrt(squares / degrees)


def _around(figure: Figure, half: float) -> Figure:
    if figure.value is None:
        return figure
    return replace(figure, low=figure.value - half, high=figure.value + half)
