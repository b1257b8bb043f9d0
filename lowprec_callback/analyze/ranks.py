"""The summaries of all ranks, merged: median, slowest rank and spread, and ranks that hold the others up.

Summaries are read once, one after the other, and of each only medians are kept: memory grows by a few numbers for
each rank, recipe and round, whatever number of samples a summary has.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.statistics import Rounds, t_quantile
from lowprec_callback.recording import RankRecipe, RankSummary
from lowprec_callback.report import Figure, RankRow, RanksReport

SLOWER = 0.03
"""Share by which a rank must be slower than the others to be worth telling."""

FEW = 16
"""Below so many ranks, a rank is compared with the median of the others; from there on with that of all, in which one
rank counts for little."""

SCATTER = 6.0
"""From `FEW` ranks on, a straggler must also stand out from the others' scatter by so many standard deviations: of
thousands of ranks, a few are always the slowest by chance."""

LEAST_BLOCKS = 3
"""Blocks without which nothing is known of a rank's own noise."""

PROBLEMS_KEPT = 20

_Column = tuple["array[int]", "array[float]"]
"""(places of ranks, values)."""
_Key = TypeVar("_Key")

QUANTITIES = {
    "step": ("ms", max),
    "forward": ("ms", max),
    "GEMM benchmark": ("ms", max),
    "exposed communication": ("ms", max),
    "host": ("ms", max),
    "peak memory": ("GB", max),
    "SM clock": ("MHz", min),
    "coverage": ("1", min),
}
"""What is told of all ranks: its unit, and which end of it is the worst rank's."""

OWN = ("step", "forward", "GEMM benchmark")
"""Quantities that tell a straggler: what a rank does for itself. Its whole steps do so only where no rank waits for
another."""


@dataclass(frozen=True)
class Slowest:
    """The rank with the longest median step of one recipe."""

    rank: int
    host: str
    line: int
    rounds: Rounds
    ms: float


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others, beyond noise."""

    rank: int
    host: str
    quantity: str
    excess: float
    """By how much its time exceeds the others' [1], mean over blocks."""
    low: float
    """The lower end of its 95% interval."""
    ms: float
    """The excess in the baseline's step."""


@dataclass
class Merged:
    """All summaries, as far as they have been read."""

    ranks: array[int] = field(default_factory=lambda: array("q"))
    hosts: list[str] = field(default_factory=list)
    lines: array[int] = field(default_factory=lambda: array("q"))
    slowest: dict[str, Slowest] = field(default_factory=dict)
    """By recipe."""
    devices: dict[str, int] = field(default_factory=dict)
    """Names of devices, each with the lowest rank that has it."""
    problems: list[str] = field(default_factory=list)
    _values: dict[tuple[str, str], _Column] = field(default_factory=dict)
    """By (recipe, quantity)."""
    _blocks: dict[tuple[str, str, int], _Column] = field(default_factory=dict)
    """By (quantity, recipe, round), for `OWN`."""

    def add(self, line: int, summary: RankSummary) -> None:
        """One more rank."""
        place = len(self.ranks)
        self.ranks.append(summary.rank)
        self.hosts.append(summary.host)
        self.lines.append(line)
        self.devices[summary.device] = min(summary.rank, self.devices.get(summary.device, summary.rank))
        for recipe, part in summary.recipes.items():
            self._add(place, recipe, part)
        for text in summary.problems[: PROBLEMS_KEPT - len(self.problems)]:
            self.problems.append(f"rank {summary.rank} ({summary.host}): {text}")

    def _add(self, place: int, recipe: str, part: RankRecipe) -> None:
        steps = [ms for _, samples in part.rounds for ms in samples]
        forward = [ms for _, samples in part.forward for ms in samples]
        values = {
            "step": median(steps) if steps else None,
            "forward": median(forward) if forward else None,
            "GEMM benchmark": part.gemm_ms,
            "exposed communication": part.communication_ms,
            "host": median(part.host_ms) if part.host_ms else None,
            "peak memory": part.peak_bytes / 1e9 if part.peak_bytes is not None else None,
            "SM clock": float(median(part.sm_mhz)) if part.sm_mhz else None,
            "coverage": part.coverage,
        }
        for quantity, value in values.items():
            if value is not None and math.isfinite(value):
                _put(self._values, (recipe, quantity), place, value)
        blocks = [("step", *block) for block in part.rounds] + [("forward", *block) for block in part.forward]
        if part.gemm_ms is not None:
            blocks.append(("GEMM benchmark", 0, (part.gemm_ms,)))
        for quantity, round_, samples in blocks:
            if samples and (middle := median(samples)) > 0:
                _put(self._blocks, (quantity, recipe, round_), place, middle)
        ms, before = values["step"], self.slowest.get(recipe)
        # Of equals the lowest rank, whatever the order in which they come.
        if ms is not None and (before is None or (ms, -self.ranks[place]) > (before.ms, -before.rank)):
            rounds = dict(part.rounds)
            self.slowest[recipe] = Slowest(self.ranks[place], self.hosts[place], self.lines[place], rounds, ms)

    def report(self, world: int) -> RanksReport:
        """What is told of the ranks."""
        recipes = dict.fromkeys(recipe for recipe, _ in self._values)
        silent = world - len(self.ranks)
        kinds = ", ".join(f"{device} (rank {rank})" for device, rank in sorted(self.devices.items())[:PROBLEMS_KEPT])
        return RanksReport(
            world=world,
            heard=len(self.ranks),
            hosts=len(set(self.hosts)),
            slowest={recipe: f"rank {each.rank} ({each.host})" for recipe, each in self.slowest.items()},
            rows={recipe: tuple(self._rows(recipe)) for recipe in recipes},
            problems=(
                *([f"{silent} of {world} ranks sent no summary"] if silent else []),
                *([f"the ranks run on different devices: {kinds}"] if len(self.devices) > 1 else []),
                *self.problems,
            ),
        )

    def _rows(self, recipe: str) -> Iterable[RankRow]:
        for quantity, (unit, worst) in QUANTITIES.items():
            if (recipe, quantity) not in self._values:
                continue
            places, values = self._values[recipe, quantity]
            ordered = sorted(zip(values, (self.ranks[place] for place in places), places, strict=True))
            first, last = (ordered[0], ordered[-1]) if worst is min else (ordered[-1], ordered[0])
            # Of equals the lowest rank.
            first = min((row for row in ordered if row[0] == first[0]), key=lambda row: row[1])
            facts = lines_of("rank_summary", (self.lines[place] for place in places))
            of_worst = lines_of("rank_summary", [self.lines[first[2]]])
            yield RankRow(
                quantity=quantity,
                median=Figure(median(values), unit, "measured", n=len(values), facts=facts),
                worst=Figure(first[0], unit, "measured", n=1, facts=of_worst),
                worst_rank=first[1],
                worst_host=self.hosts[first[2]],
                best=Figure(last[0], unit, "measured", n=1, facts=facts),
            )

    def stragglers(self, baseline: str) -> list[Straggler]:
        """Ranks that are slower than the others beyond noise, the slowest first.

        Of each block b (a recipe's round) let x_rb be the median of rank r's samples and m_rb the median over the other
        ranks. The excess of r is the mean over its blocks of ln(x_rb / m_rb), with Student's interval from the scatter
        of its own blocks. Each quantity of `OWN` is looked at by itself; the first that shows an excess is told.
        """
        found: dict[int, Straggler] = {}
        for quantity in OWN:
            for straggler in self._stragglers(quantity, baseline):
                found.setdefault(straggler.rank, straggler)
        return sorted(found.values(), key=lambda each: (-each.excess, each.rank))

    def _stragglers(self, quantity: str, baseline: str) -> Iterable[Straggler]:
        count = len(self.ranks)
        columns = [column for (name, _, _), column in self._blocks.items() if name == quantity]
        if count < 2 or len(columns) < LEAST_BLOCKS:
            return
        excess = np.full((count, len(columns)), np.nan)
        for index, (places, values) in enumerate(columns):
            excess[places, index] = _against_others(np.log(np.asarray(values)))
        known = np.isfinite(excess).sum(axis=1)
        rows = np.flatnonzero(known >= LEAST_BLOCKS)
        if not len(rows):
            return
        means = np.nanmean(excess[rows], axis=1)
        errors = np.nanstd(excess[rows], axis=1, ddof=1) / np.sqrt(known[rows])
        lows = means - np.array([t_quantile(int(n) - 1) for n in known[rows]]) * errors
        suspect = (lows > 0) & (means > math.log1p(SLOWER))
        if count >= FEW:
            middle = float(np.median(means))
            scatter = 1.4826 * float(np.median(np.abs(means - middle)))
            suspect &= means - middle > SCATTER * scatter
        typical = self._values.get((baseline, quantity))
        usual = median(typical[1]) if typical else math.nan
        for row in np.flatnonzero(suspect).tolist():
            place = int(rows[row])
            yield Straggler(
                rank=self.ranks[place],
                host=self.hosts[place],
                quantity=quantity,
                excess=math.expm1(float(means[row])),
                low=math.expm1(float(lows[row])),
                ms=self._excess_ms(place, quantity, baseline, usual),
            )

    def _excess_ms(self, place: int, quantity: str, baseline: str, usual: float) -> float:
        places, values = self._values.get((baseline, quantity), (array("q"), array("d")))
        others = [value for at, value in zip(places, values, strict=True) if at != place]
        own = next((value for at, value in zip(places, values, strict=True) if at == place), math.nan)
        if len(self.ranks) < FEW and others:
            usual = median(others)
        return own - usual


def merge(summaries: Iterable[tuple[int, RankSummary]]) -> Merged:
    """All ranks' summaries with their line numbers, read once, in any order."""
    merged = Merged()
    for line, summary in summaries:
        merged.add(line, summary)
    return merged


def _put(table: dict[_Key, _Column], key: _Key, place: int, value: float) -> None:
    places, values = table.setdefault(key, (array("q"), array("d")))
    places.append(place)
    values.append(value)


def _against_others(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each value less the median of the others; from `FEW` on, less that of all."""
    if len(logs) >= FEW:
        return np.asarray(logs - np.median(logs))
    if len(logs) < 2:
        return np.full(len(logs), np.nan)
    return np.array([value - np.median(np.delete(logs, index)) for index, value in enumerate(logs)])


def names(stragglers: Sequence[Straggler], most: int = 4) -> str:
    """`rank 3 (node-b), rank 7 (node-b)`."""
    told = ", ".join(f"rank {each.rank} ({each.host})" for each in stragglers[:most])
    return f"{told} and {len(stragglers) - most} more" if len(stragglers) > most else told
