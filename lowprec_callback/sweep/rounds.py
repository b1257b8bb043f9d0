"""When the rounds of timed blocks are enough.

The plan's rounds always run. If the steps are not known well enough then, more rounds follow. Where the GPU paces the
step three rounds mostly do; where the host does, its pace changes from second to second (on one machine the same
launch-bound step took 40 and 68 ms within ten seconds), and only more blocks in turn tell recipes apart.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lowprec_callback.analyze.statistics import t_quantile

MOST_SECONDS = 60.0
"""More rounds end with the one in which so much time has gone into them."""


def half_width(medians: Sequence[float]) -> float | None:
    """Half the 95% interval of a step's time, relative to it, from the medians of R rounds [1]; None below two.

    t s / (sqrt(R) m), with m their mean, s their standard deviation, and t Student's quantile of R - 1 degrees.
    """
    if len(medians) < 2:
        return None
    spread = statistics.stdev(medians)
    return t_quantile(len(medians) - 1) * spread / math.sqrt(len(medians)) / statistics.fmean(medians)


def widest(medians: Mapping[str, Sequence[float]]) -> float | None:
    """The widest of all recipes; None while one is not known, or where there is none."""
    widths = [half_width(each) for each in medians.values()]
    known = [width for width in widths if width is not None]
    return max(known) if known and len(known) == len(widths) else None


@dataclass
class Rounds:
    """Counts rounds and says when to stop.

    Args:
        planned: rounds that run in any case.
        most: rounds at most.
        precision: stop when every recipe's step is known to this relative half-width.
        now: the clock, in seconds. Tests pass their own.
    """

    planned: int
    most: int
    precision: float
    now: Callable[[], float] = time.perf_counter
    medians: dict[str, list[float]] = field(default_factory=dict)
    """Recipe to the median of each of its rounds so far [ms]."""
    extra_steps: int = 0
    """Optimizer steps that rounds beyond the plan took."""
    _since: float | None = None

    def add(self, recipe: str, times_ms: Sequence[float]) -> None:
        """The timed steps of one block that count."""
        if times_ms:
            self.medians.setdefault(recipe, []).append(statistics.median(times_ms))

    def why_stop(self, done: int, steps_a_round: int) -> str:
        """Empty while another round should run, else why none should: `planned`, `precise`, `rounds`,
        `seconds`. A round beyond the plan that should run is counted as taken.
        """
        if done < self.planned:
            return ""
        if self.most <= self.planned:
            return "planned"
        width = widest(self.medians)
        if width is not None and width <= self.precision:
            return "precise"
        if done >= self.most:
            return "rounds"
        if self._since is None:
            self._since = self.now()
        elif self.now() - self._since >= MOST_SECONDS:
            return "seconds"
        self.extra_steps += steps_a_round
        return ""
