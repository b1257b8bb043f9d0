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
from dataclasses import dataclass, replace
from statistics import fmean, median

from lowprec_callback.analyze.statistics import t_quantile
from lowprec_callback.report import BUCKETS, Figure, Ledger, RecipeReport

Parts = dict[str, Figure]
"""`bucket.NAME`, `busy`, `idle`, `residual`."""


@dataclass(frozen=True)
class Noise:
    """How far the buckets of two ledgers can be trusted; see the module's docstring."""

    ledgers: tuple[Ledger, Ledger]
    between: float
    """t_b q [1]."""

    def half(self, ledger: Ledger, names: Sequence[str]) -> float | None:
        """Half-width of the sum of some buckets of one of the two ledgers [ms]; None where it is not known.

        The sum is one series: what the clock does, it does to all buckets alike. A ledger without any of them has no
        scatter to tell, and does not enter the pooled one.
        """
        total = math.fsum(ledger.buckets[name].value or 0.0 for name in names if name in ledger.buckets)
        if not total:
            return 0.0
        within = _pooled([series for each in self.ledgers if any(series := _series(each, names))])
        n = len(_series(ledger, names))
        return math.hypot(within / math.sqrt(n), self.between * total) if within is not None and n else None

    def left(self, ledger: Ledger, step: Figure) -> float | None:
        """Half-width of what the busy time of one of the two ledgers leaves of its step [ms]: both in quadrature."""
        busy = self.half(ledger, BUCKETS)
        return math.hypot(busy, step.half_width) if busy is not None and step.half_width is not None else None


def noise_of(one: RecipeReport, other: RecipeReport) -> Noise | str:
    """The noise of two recipes' ledgers, or why it is not known. Both need a ledger; else ValueError."""
    left, right = one.ledger, other.ledger
    if left is None or right is None:
        raise ValueError("both recipes need a ledger")
    rounds = [[median(times) for _, times in part.samples if times] for part in (one, other)]
    between = _pooled([[math.log(time) for time in medians if time > 0] for medians in rounds])
    if between is None:
        return "one round of timed steps a side: how much blocks differ is not known"
    if any(not ledger.steps for ledger in (left, right)):
        return "the times of the single traced steps are not in the report: analyse its Recording again"
    if _pooled([ledger.steps.get(BUCKETS[0], ()) for ledger in (left, right)]) is None:
        return "one traced step a side: its scatter is not known"
    return Noise((left, right), between)


def with_intervals(one: RecipeReport, other: RecipeReport) -> tuple[Parts, Parts, str | None]:
    """The ledger's parts of two recipes that have one, with intervals; or without any, and the reason.

    `busy` is treated like a bucket. Idle and residual are what it leaves of the timed step, so that their
    half-widths are those of busy and step in quadrature; see `rest_within`.
    """
    noise = noise_of(one, other)
    assert one.ledger is not None
    assert other.ledger is not None
    plain = _parts(one.ledger), _parts(other.ledger)
    if isinstance(noise, str):
        return *plain, noise
    sides = []
    for part, ledger, parts in ((one, one.ledger, plain[0]), (other, other.ledger, plain[1])):
        made = {f"bucket.{name}": around(parts[f"bucket.{name}"], noise.half(ledger, (name,))) for name in BUCKETS}
        made["busy"] = around(parts["busy"], noise.half(ledger, BUCKETS))
        made["idle"], made["residual"] = rest_within(ledger, noise.left(ledger, part.step_ms))
        sides.append(made)
    return sides[0], sides[1], None


def rest_within(ledger: Ledger, half: float | None) -> tuple[Figure, Figure]:
    """A ledger's idle time and residual, each `half` either way; as they are where `half` is not known.

    On a GPU idle time is never below zero, nor above what the traced steps showed: tracing slows the host and not the
    kernels, so that their idle time bounds that of the timed steps, however little is known of the length of those.
    On a CPU the traced step is scaled to the timed one: idle has its share of `half`, and there is no residual.
    """
    idle, wall, traced = ledger.idle.value, ledger.wall.value, ledger.traced_wall
    if half is None or idle is None:
        return ledger.idle, ledger.residual
    if ledger.busy.origin == "estimated":
        return around(ledger.idle, half * idle / wall if wall else None), around(ledger.residual, 0.0)
    low, high = idle - half, idle + half
    if traced is not None and traced.value is not None and ledger.busy.value is not None:
        low, high = max(low, 0.0), min(high, max(traced.value - ledger.busy.value, idle))
    return replace(ledger.idle, low=low, high=high), around(ledger.residual, half)


def around(figure: Figure, half: float | None) -> Figure:
    """The Figure with an interval of this half-width; as it is where the half-width or its value is not known."""
    if figure.value is None or half is None:
        return figure
    return replace(figure, low=figure.value - half, high=figure.value + half)


def _parts(ledger: Ledger) -> Parts:
    missing = Figure.missing("ms", "the ledger has no such bucket")
    buckets = {f"bucket.{name}": ledger.buckets.get(name, missing) for name in BUCKETS}
    return {**buckets, "busy": ledger.busy, "idle": ledger.idle, "residual": ledger.residual}


def _series(ledger: Ledger, names: Sequence[str]) -> Sequence[float]:
    """The sum of some buckets in each traced step [ms]."""
    columns = [ledger.steps[name] for name in names if name in ledger.steps]
    return [math.fsum(step) for step in zip(*columns, strict=True)]


def _pooled(groups: Sequence[Sequence[float]]) -> float | None:
    """t x pooled standard deviation of several groups around their own means; None without a degree of freedom."""
    degrees = sum(len(group) - 1 for group in groups if group)
    if degrees < 1:
        return None
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups if group for value in group)
    return t_quantile(degrees) * math.sqrt(squares / degrees)
