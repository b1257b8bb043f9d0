"""How many steps of which kind, and what gives way where time is short."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowprec_callback.sweep.time_budget import A_LIMIT, in_words, is_limit

LEAD_STEPS = 3
"""One step to warm up (compilation, allocator), one whose time says how long the sweep will take, one to capture the
shapes."""

WITNESS_STEPS = 2
"""Before the traced steps of a recipe: one in which operands and memory are watched, and one under the new profiler
session, which can lose kernels at its start, and whose kernels do not count."""

AS_TIMED = 2
"""Steps under the kernel tracer that run exactly as the timed ones do: the evidence of the verdict. Two, so that a
kernel that the tracer loses in one is seen in the other."""

NVTX_SETTLE = 1
"""Before the steps of a recipe that are captured: one in which its state is built again."""

GUARD_SETTLE = 3
"""Before the compared steps of the numerics guard: those in which a recipe's scales settle; their updates are undone.
Delayed scaling begins at scale 1, where small gradients become zero; a layer behind another one in the same block sees
its first gradient one step later. On an H200 gradients were 0.64 times as long as BF16's after one such step."""

PROBE_NEEDS = 3
"""Settle steps from which one can be spared to measure the host's launch time: rebuild, probe, fill the queue again."""


SETTLING = 0.25
"""Share of `block_seconds` that settling may take; one step that is longer settles by itself."""

LEAST_TIMED = 3
"""Timed steps of a block, however long they are: one may be discarded, and two still have a middle."""


class PlanError(ValueError):
    """Settings that make no plan."""


@dataclass(frozen=True)
class Settings:
    """The sweep's sizes, in optimizer steps."""

    rounds: int = 3
    """Blocks for each recipe."""
    settle_steps: int = 3
    """Steps at the start of a block that are not timed."""
    timed_steps: int = 8
    """Timed steps in a block."""
    traced_steps: int = 2
    """Traced steps for each recipe, apart from the timed ones; 0 for none."""
    seed: int = 0
    """Seed of the order of recipes."""
    nvtx_steps: int = 0
    """Steps for each recipe with NVTX ranges for modules and GEMMs, inside the capture window; 0 for none."""
    max_rounds: int = 0
    """Rounds at most, where the planned ones leave steps less precise than `step_precision`; `rounds` or less: none
    beyond the plan."""
    step_precision: float = 0.02
    """Half-width of a step's time, relative to it, at which no more rounds are taken."""
    guard_steps: int = 4
    """Steps that every recipe takes from the same state on the same data, for their losses and gradients to be
    compared, the baseline twice; 0 for none."""
    block_seconds: float | None = 20.0
    """About as long as a block may be [s], see `of_a_block`; None: `settle_steps` and `timed_steps`, however long."""

    def __post_init__(self) -> None:
        for name, least in (
            ("rounds", 1),
            ("settle_steps", 1),
            ("timed_steps", 2),
            ("traced_steps", 0),
            ("nvtx_steps", 0),
            ("max_rounds", 0),
            ("guard_steps", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(f"{name}={value!r}: must be a whole number of at least {least}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise PlanError(f"seed={self.seed!r}: must be a whole number")
        if not isinstance(self.step_precision, int | float) or not 0 < self.step_precision < 1:
            raise PlanError(f"step_precision={self.step_precision!r}: must be between 0 and 1 (0.02 is 2%)")
        if not is_limit(self.block_seconds):
            raise PlanError(f"block_seconds={self.block_seconds!r}: must be {A_LIMIT}")

    def sizes(self) -> dict[str, Any]:
        """Those sizes that a `recording.Plan` tells, by the names of its fields."""
        names = ("rounds", "settle_steps", "timed_steps", "traced_steps", "guard_steps")
        return {name: getattr(self, name) for name in names}

    def of_a_block(self, step_s: float) -> tuple[int, int]:
        """(settled, timed) steps of a block, for a recipe whose step takes `step_s` seconds.

        Many steps in a block are there for those that are short: the scatter of long ones is small, and what they need
        to settle (kernels to load, a queue to fill, a clock) is over within one. A block of b seconds settles in at
        most b / 4 and is timed for about 3 b / 4, but for at least `LEAST_TIMED` steps:

            settled = settle_steps if step_s <= b / 4, else 1
            timed = min(timed_steps, max(LEAST_TIMED, ceil(3 b / (4 step_s))))
        """
        if self.block_seconds is None or step_s <= 0:
            return self.settle_steps, self.timed_steps
        settled = self.settle_steps if step_s <= SETTLING * self.block_seconds else 1
        enough = math.ceil((1 - SETTLING) * self.block_seconds / step_s)
        return settled, min(self.timed_steps, max(LEAST_TIMED, enough))

    def round_steps(self, recipes: int) -> int:
        """Optimizer steps of one round of so many recipes."""
        return recipes * (self.settle_steps + self.timed_steps)

    def after_rounds(self) -> tuple[int, int, int]:
        """(watched and traced, captured, compared) optimizer steps of one recipe, after its blocks."""
        traced = WITNESS_STEPS + AS_TIMED + self.traced_steps if self.traced_steps else 0
        captured = self.nvtx_steps + NVTX_SETTLE if self.nvtx_steps else 0
        compared = self.guard_steps + GUARD_SETTLE if self.guard_steps else 0
        return traced, captured, compared

    def steps(self, recipes: int) -> int:
        """Optimizer steps that the plan takes for so many recipes."""
        traced, captured, compared = self.after_rounds()
        # The baseline's compared steps once more, at the end.
        more = recipes * (traced + captured) + (recipes + 1) * compared
        return LEAD_STEPS + self.rounds * self.round_steps(recipes) + more

    def seconds(self, recipes: int, plain_s: float, watched_s: float) -> float:
        """About what the steps after the first `LEAD_STEPS` take [s]: watched steps x watched_s + others x plain_s.

        plain_s: of a step with nothing attached; watched_s: of one with all watchers, which traced steps have too.
        """
        watched = recipes * self.after_rounds()[0]
        return watched * watched_s + (self.steps(recipes) - LEAD_STEPS - watched) * plain_s

    def seconds_after(self, done: int, steps_s: Sequence[float], watched: float) -> float:
        """About what is left after `done` rounds takes [s], by each recipe's own pace.

        Args:
            done: rounds that are over.
            steps_s: seconds of a step of each recipe, the baseline first; it takes the guard's steps twice.
            watched: how many times as long a step with all watchers takes.
        """
        traced, captured, compared = self.after_rounds()
        blocks = math.fsum(step_s * sum(self.of_a_block(step_s)) for step_s in steps_s)
        more = math.fsum(steps_s) * (traced * watched + captured + compared)
        return max(0, self.rounds - done) * blocks + more + steps_s[0] * compared


@dataclass(frozen=True)
class Fitted:
    """Settings that fit, and what was cut to make them."""

    settings: Settings
    shrunk: str | None


_FLOORS = (
    ("rounds", 2),
    ("timed_steps", 4),
    ("traced_steps", 1),
    ("guard_steps", 2),
    ("settle_steps", 2),
    ("nvtx_steps", 1),
    ("rounds", 1),
    ("timed_steps", 2),
    ("settle_steps", 1),
    ("nvtx_steps", 0),
    ("guard_steps", 0),
    ("traced_steps", 0),
)
"""What gives way, in this order, and down to what."""


def _shrink(asked: Settings, fits: Callable[[Settings], bool], floors: Sequence[tuple[str, int]] = _FLOORS) -> Settings:
    """The settings cut in the order of the floors until they fit, or to the last floor."""
    settings = asked
    for name, floor in floors:
        while getattr(settings, name) > floor and not fits(settings):
            settings = replace(settings, **{name: getattr(settings, name) - 1})
    return settings


def fit_time(asked: Settings, recipes: int, seconds: float, plain_s: float, watched_s: float) -> Fitted:
    """Shrink the plan until what is left of it after the lead fits into `seconds`, or to the smallest that there is.

    What goes first costs least: rounds down to 2 (fewer looks at clock drift), timed steps down to 4 (a wider
    interval), traced steps down to 1, the numerics guard down to 2 steps, settle steps down to 2, the last rounds, then
    the shortest block that still gives an interval, then the guard; tracing goes last, because without it there is no
    ledger and no verdict.

    Args:
        asked: the settings so far.
        recipes: how many recipes run.
        seconds: what is left.
        plain_s: one step with nothing attached [s].
        watched_s: one step with all watchers attached [s].
    """
    return _fit_seconds(asked, lambda settings: settings.seconds(recipes, plain_s, watched_s), seconds, _FLOORS)


def _fit_seconds(
    asked: Settings,
    takes: Callable[[Settings], float],
    left_s: float,
    floors: Sequence[tuple[str, int]],
    when: str = "",
    what: str = "the plan",
) -> Fitted:
    """Shrink the plan until what it `takes` [s] is at most `left_s`; `when` and `what` stand in the reason."""
    got = _shrink(asked, lambda settings: takes(settings) <= left_s, floors)
    if got == asked:
        return Fitted(asked, None)
    left = f"{in_words(left_s)} are left" if left_s else "no time is left"
    return Fitted(got, _explain(asked, got, f"{when}{left} and {what} takes about {in_words(takes(asked))}"))


def fit_rest(asked: Settings, done: int, steps_s: Sequence[float], watched: float, left_s: float) -> Fitted:
    """What is left of the plan after `done` rounds, shrunk until it fits into `left_s` seconds, or as far as it can be.

    Rounds give way first, then most of the guard and of tracing, then the capture window and the guard. One traced step
    a recipe is tried in any case: the time may be enough for some of them.
    """
    floors = (("rounds", done), ("guard_steps", 2), ("traced_steps", 1), ("nvtx_steps", 0), ("guard_steps", 0))
    return _fit_seconds(
        asked,
        lambda settings: settings.seconds_after(done, steps_s, watched),
        left_s,
        floors,
        when=f"after {_count(done, 'round')} ",
        what="the rest of the plan",
    )


def _explain(asked: Settings, got: Settings, why: str) -> str:
    names = ("rounds", "settle_steps", "timed_steps", "traced_steps", "nvtx_steps", "guard_steps")
    cuts = [f"{n} {getattr(asked, n)} -> {getattr(got, n)}" for n in names if getattr(asked, n) != getattr(got, n)]
    before, after = asked.rounds * asked.timed_steps, got.rounds * got.timed_steps
    costs = []
    if after < before:
        # Standard errors go with one over the square root of the number of samples.
        costs.append(
            f"{after} instead of {before} timed steps a recipe: intervals about "
            f"{(before / after) ** 0.5:.1f} times as wide"
        )
    if got.rounds == 1 < asked.rounds:
        costs.append("one round only: drift of the clock cannot be told from a difference between recipes")
    if got.settle_steps < asked.settle_steps:
        costs.append("less time to settle after each switch of the recipe")
    if got.settle_steps < PROBE_NEEDS <= asked.settle_steps:
        costs.append("the host's launch time is not measured")
    if got.traced_steps == 0 < asked.traced_steps:
        costs.append("no traced steps: no ledger, no gap and no verdict")
    elif got.traced_steps < asked.traced_steps:
        costs.append(f"the ledger rests on {_count(got.traced_steps, 'traced step')} a recipe")
    if got.guard_steps == 0 < asked.guard_steps:
        costs.append("no numerics guard: nothing compares the recipes' losses and gradients")
    elif got.guard_steps < asked.guard_steps:
        costs.append(f"the numerics guard compares {_count(got.guard_steps, 'step')} a recipe")
    if got.nvtx_steps == 0 < asked.nvtx_steps:
        costs.append("no steps inside the capture window")
    return f"{why}, so it was cut ({', '.join(cuts)}). What this costs: {'; '.join(costs)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def order_of_rounds(recipes: list[str], rounds: int, seed: int) -> list[list[str]]:
    """Each round's order of recipes: a shuffle by the seed, a new one each round."""
    generator = random.Random(seed)
    return [generator.sample(recipes, len(recipes)) for _ in range(rounds)]
