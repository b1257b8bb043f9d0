"""Medians with honest intervals, and whether a difference is real.

Step times come in blocks (rounds). Samples of one block share a clock frequency, a temperature and a memory
layout, so they are not independent, and an interval that takes them as independent is too narrow. The
intervals here resample blocks first and samples within them second (a hierarchical bootstrap: Davison and
Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8; for benchmarks: Kalibera and Jones,
"Rigorous benchmarking in reasonable time", 2013). With one block only its samples are resampled; such an
interval says nothing about how the next block would differ, and `Estimate.n_rounds` is then 1.

Everything is deterministic: the resampling is drawn from a generator with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 20250607

LARGE = 500
"""Samples of a single block from which its resampled medians are drawn at once; see `_resampled_medians`."""

MOST_DRAWN = 4_000_000
"""Samples that are drawn at a time: 32 MB."""

Rounds = Mapping[int, Sequence[float]]
"""Samples by round."""

_Z = 1.959964
"""97.5% quantile of the normal distribution."""

_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5% quantiles of Student's t by degrees of freedom; above: 1.96 + 2.4/df, off by less than 0.02."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval. One sample has no interval: `low` and `high` are then None."""

    value: float
    low: float | None
    high: float | None
    n: int
    """Number of samples; of a ratio, in its numerator and denominator together."""
    n_rounds: int


def median_interval(rounds: Rounds, resamples: int = RESAMPLES) -> Estimate:
    """The median of all samples [same unit as they], with its 95% interval.

    1. Draw R rounds out of R with replacement, then from each as many of its samples as it has, with
       replacement; take the median of them all. Repeat B times: m*_1 ... m*_B.
    2. q_lo, q_hi = the 2.5% and 97.5% quantiles of m*.
    3. low = m - c (m - q_lo), high = m + c (q_hi - m), with m the median and c the `stretch` for few rounds.

    Raises ValueError if there is no sample.
    """
    blocks = _blocks(rounds)
    value = float(np.median(np.concatenate(blocks)))
    n = sum(len(block) for block in blocks)
    if n == 1:
        return Estimate(value, None, None, 1, 1)
    rng = np.random.default_rng(SEED)
    drawn = _pooled_medians(blocks, _draw_rounds(len(blocks), resamples, rng), rng)
    low, high = _quantiles(drawn)
    c = stretch([float(np.median(block)) for block in blocks], [_median_variance(block, rng) for block in blocks])
    return Estimate(value, value - c * max(value - low, 0.0), value + c * max(high - value, 0.0), n, len(blocks))


def ratio(baseline: Rounds, recipe: Rounds, resamples: int = RESAMPLES) -> Estimate:
    """Speedup s = median(baseline) / median(recipe) [1], with its 95% interval, paired by round.

    Drift hits neighbouring blocks alike, so a resample draws the *same* rounds on both sides and what they
    share cancels. Otherwise as `median_interval`, on log s: both ends of the interval stay above zero, and
    2x faster and 2x slower are equally far from 1. Without two rounds in common, all samples of each side
    are resampled as one block.

    Raises ValueError if a side has no sample, or one that is not positive.
    """
    top, bottom = _blocks(baseline), _blocks(recipe)
    pooled = [np.concatenate(top)], [np.concatenate(bottom)]
    if min(pooled[0][0].min(), pooled[1][0].min()) <= 0:
        raise ValueError("a ratio of times needs times above zero")
    log_value = math.log(float(np.median(pooled[0][0]))) - math.log(float(np.median(pooled[1][0])))
    n = len(pooled[0][0]) + len(pooled[1][0])
    common = sorted(key for key in baseline if baseline[key] and recipe.get(key))
    if len(common) >= 2:
        top, bottom = [_array(baseline[key]) for key in common], [_array(recipe[key]) for key in common]
    else:
        top, bottom = pooled
    if min(len(pooled[0][0]), len(pooled[1][0])) == 1:
        return Estimate(math.exp(log_value), None, None, n, len(top))
    rng = np.random.default_rng(SEED)
    choice = _draw_rounds(len(top), resamples, rng)
    drawn = np.log(_pooled_medians(top, choice, rng)) - np.log(_pooled_medians(bottom, choice, rng))
    low, high = _quantiles(drawn)
    c = stretch(
        [math.log(float(np.median(a))) - math.log(float(np.median(b))) for a, b in zip(top, bottom, strict=True)],
        [_median_variance(np.log(a), rng) + _median_variance(np.log(b), rng) for a, b in zip(top, bottom, strict=True)],
    )
    below, above = c * max(log_value - low, 0.0), c * max(high - log_value, 0.0)
    return Estimate(math.exp(log_value), math.exp(log_value - below), math.exp(log_value + above), n, len(top))


def stretch(block_medians: Sequence[float], within_variances: Sequence[float]) -> float:
    """By how much a bootstrap over R rounds falls short when R is small [1].

    With s2 the variance of the R block medians and v the mean of their sampling variances within a block,
    the share of the rounds' scatter that the samples do not explain is

        rho = max(0, 1 - v / s2).

    For that share, R rounds drawn from R understate the variance by (R-1)/R, and a normal quantile z takes
    the place of Student's t with R-1 degrees of freedom. Both are repaired in proportion to rho:

        c = sqrt(1 + rho ((t/z)^2 R/(R-1) - 1)).

    c is 1 for a single round and where rounds differ no more than their samples would make them. Two rounds
    that disagree give c = 9: two rounds say very little about a third."""
    count = len(block_medians)
    if count < 2:
        return 1.0
    between = float(np.var(np.asarray(block_medians, dtype=np.float64), ddof=1))
    if between <= 0:
        return 1.0
    rho = max(0.0, 1.0 - float(np.mean(within_variances)) / between)
    degrees = count - 1
    t = t_quantile(degrees)
    return math.sqrt(1.0 + rho * ((t / _Z) ** 2 * count / degrees - 1.0))


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t with this many degrees of freedom, at least 1."""
    return _T.get(degrees, 1.96 + 2.4 / degrees)


def is_different(low: float | None, high: float | None, reference: float = 1.0) -> bool | None:
    """Whether a 95% interval leaves `reference` out: the difference is real, at one error in twenty.

    None where there is no interval: a single sample shows no difference and no equality.
    """
    if low is None or high is None:
        return None
    return not low <= reference <= high


def _array(samples: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(samples, dtype=np.float64)


def _blocks(rounds: Rounds) -> list[NDArray[np.float64]]:
    blocks = [_array(rounds[key]) for key in sorted(rounds) if len(rounds[key])]
    if not blocks:
        raise ValueError("no samples")
    return blocks


def _draw_rounds(count: int, resamples: int, rng: np.random.Generator) -> NDArray[np.intp]:
    return rng.integers(0, count, size=(resamples, count))


def _pooled_medians(
    blocks: Sequence[NDArray[np.float64]], choice: NDArray[np.intp], rng: np.random.Generator
) -> NDArray[np.float64]:
    """For each row of `choice` (indices of blocks): the median of samples drawn from those blocks."""
    lengths = np.array([len(block) for block in blocks])
    longest = int(lengths.max())
    if len(blocks) == 1 and longest > LARGE:
        return _resampled_medians(blocks[0], len(choice), rng)
    rows = max(1, MOST_DRAWN // (choice.shape[1] * longest))
    if rows < len(choice):  # a few rows at a time, for the memory's sake
        parts = [_pooled_medians(blocks, choice[i : i + rows], rng) for i in range(0, len(choice), rows)]
        return np.concatenate(parts)
    padded = np.full((len(blocks), longest), np.nan)
    for index, block in enumerate(blocks):
        padded[index, : len(block)] = block
    size = lengths[choice]  # (B, R): how many samples each drawn block gives
    pick = (rng.random((*choice.shape, longest)) * size[..., None]).astype(np.intp)
    samples = padded[choice[..., None], pick]
    samples[np.arange(longest) >= size[..., None]] = np.nan
    # Sorting puts NaN last, so that each row's median stands at half its own count.
    ordered = np.sort(samples.reshape(len(choice), -1), axis=1)
    count = size.sum(axis=1)
    row = np.arange(len(choice))
    upper, lower = ordered[row, count // 2], ordered[row, (count - 1) // 2]
    return np.asarray((lower + upper) / 2, dtype=np.float64)


def _resampled_medians(block: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """`count` medians of n samples drawn from the n of `block` with replacement, without drawing them.

    Of n uniform draws on [0, 1) the k-th smallest has the distribution Beta(k, n - k + 1), and the draw u picks sample
    floor(n u) in order of size. With n odd the median is the draw k = (n + 1) / 2. With n even it lies between the
    draws k = n / 2 and k + 1; the latter is u + (1 - u) w with w of Beta(1, n - k), the smallest of the n - k above.
    """
    ordered, n = np.sort(block), len(block)
    k = (n + 1) // 2
    lower = rng.beta(k, n - k + 1, count)
    upper = lower if n % 2 else lower + (1 - lower) * rng.beta(1, n - k, count)
    first, second = (ordered[np.minimum((u * n).astype(np.intp), n - 1)] for u in (lower, upper))
    return np.asarray((first + second) / 2, dtype=np.float64)


def _median_variance(block: NDArray[np.float64], rng: np.random.Generator) -> float:
    """Sampling variance of one block's median, by bootstrap."""
    if len(block) < 2:
        return 0.0
    drawn = block[rng.integers(0, len(block), size=(200, len(block)))]
    return float(np.var(np.median(drawn, axis=1)))


def _quantiles(drawn: NDArray[np.float64]) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)
