"""The shape-level microbenchmark: every shape under every recipe, in shuffled, interleaved rounds.

`layer_bench` times one shape under one recipe; here stands in which order, how often, and when it is enough.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from lowprec_callback.engines.base import Engine
from lowprec_callback.measure.layer_bench import Conditions, LayerBench, PlainBench, Samples, Shape
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import MODES, ROLES, Gemm, GemmTime

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Sampling:
    """When it is enough."""

    rounds: int = 3
    """Visits to each (recipe, shape); with a `precision`, at most so many."""
    precision: float | None = None
    """Stop visiting a pair when the half-width of its layer's median, relative to it, is at most this (0.01: 1%)."""
    budget_s: float | None = None
    """Start no new round after so many seconds."""
    conditions: Conditions = field(default_factory=Conditions)


@dataclass
class Course:
    """How the sampling went; filled in while it goes."""

    rounds: int = 0
    seconds: float = 0.0
    stopped: str = ""
    """Why it stopped: `precise`, `budget`, `rounds`, or `failed` where no shape ran."""
    widest: float | None = None
    """The largest relative half-width that is left; None while an interval is missing."""


def shapes_of(gemms: Iterable[Gemm]) -> list[Shape]:
    """The distinct linear layers behind captured GEMMs, largest first."""
    shapes = {Shape(g.m, g.k, g.n, g.bias, _family(g), g.quantizable, g.groups) for g in gemms}
    return sorted(shapes, key=lambda s: (-s.m * s.k * s.n, s.k, s.n, s.bias, s.family, s.quantizable, s.groups))


def _family(gemm: Gemm) -> str:
    """TE's classes share one GEMM for each shape; a plain layer and a grouped one have their own."""
    return gemm.family if gemm.family in ("nn.Linear", "GroupedLinear") else "Linear"


def benchmark(
    engine: Engine,
    cards: list[RecipeCard],
    baseline: str,
    gemms: Iterable[Gemm],
    seed: int,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    sampling: Sampling | None = None,
    course: Course | None = None,
) -> Iterator[GemmTime]:
    """Time every shape under every recipe that can reach it, in shuffled, interleaved rounds.

    A shape that fails (out of memory, unsupported, misaligned) keeps its place with the reason.
    """
    sampling, course = sampling or Sampling(), course or Course()
    jobs = [(card, shape) for shape in shapes_of(gemms) for card in cards if shape.quantizable or card.name == baseline]
    results: dict[tuple[str, Shape], Samples] = {(card.name, shape): Samples() for card, shape in jobs}
    order = random.Random(seed)
    begin = time.perf_counter()
    while True:
        left = [job for job in jobs if not _enough(results[job[0].name, job[1]], sampling)]
        course.stopped = _why_stop(left, course, sampling)
        if course.stopped == "precise" and all(samples.failure for samples in results.values()):
            course.stopped = "failed"
        if course.stopped:
            break
        for index, (card, shape) in enumerate(order.sample(left, len(left))):
            done = course.rounds * len(jobs) + index
            progress(f"{card.name} {shape.m}x{shape.k}x{shape.n}", done, max(len(jobs) * sampling.rounds, done + 1))
            _visit(engine, card, shape, results[card.name, shape], sampling.conditions)
        course.rounds += 1
        course.seconds = time.perf_counter() - begin
    widths = [_width(samples, sampling) for samples in results.values() if samples.failure is None]
    known = [width for width in widths if width is not None]
    course.widest = max(known) if known and len(known) == len(widths) else None
    for card, shape in jobs:
        yield from _facts(card.name, shape, results[card.name, shape], sampling)


def _enough(samples: Samples, sampling: Sampling) -> bool:
    if samples.failure is not None:
        return True
    if sampling.precision is None:
        return False
    width = _width(samples, sampling)
    return width is not None and width <= sampling.precision


def _width(samples: Samples, sampling: Sampling) -> float | None:
    """The widest relative half-width over the modes, of the layer's three roles together."""
    widths = [half_width(samples.totals(mode)) for mode in sampling.conditions.modes]
    return None if any(width is None for width in widths) else max(width for width in widths if width is not None)


def _why_stop(left: list[tuple[RecipeCard, Shape]], course: Course, sampling: Sampling) -> str:
    if not left:
        return "precise"
    if course.rounds >= sampling.rounds:
        return "rounds"
    if sampling.budget_s is not None and course.rounds and course.seconds >= sampling.budget_s:
        return "budget"
    return ""


def half_width(samples: list[float]) -> float | None:
    """Half the width of the median's interval over the median [1], without assuming a distribution.

    The interval runs from the j-th smallest to the j-th largest sample, j the largest number for which
    P(Bin(n, 1/2) < j) <= (1 - 0.95) / 2 (Conover, Practical Nonparametric Statistics, section 3.2). Below six samples
    no j does: None.
    """
    ordered, n = sorted(samples), len(samples)
    below, j = 0.0, 0
    while j < n:
        below += math.comb(n, j) / 2**n
        if below > (1 - CONFIDENCE) / 2:
            break
        j += 1
    if j == 0:
        return None
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return (ordered[n - j] - ordered[j - 1]) / 2 / middle


def _visit(engine: Engine, card: RecipeCard, shape: Shape, samples: Samples, conditions: Conditions) -> None:
    """One visit: build the layer, warm up, take samples. Failures become a reason, memory is given back."""
    own_state = getattr(engine, "own_state", nullcontext)
    on_gpu = engine.device.type == "cuda"
    plain = not on_gpu or not shape.quantizable or engine.name == "plain_torch"
    bench = PlainBench if plain else LayerBench
    try:
        with own_state(), torch.random.fork_rng(devices=[engine.device] if on_gpu else []):
            torch.manual_seed(0)
            bench(engine, card, shape, samples, conditions).run()
    except torch.OutOfMemoryError:
        samples.failure = "out of memory"
    except Exception as error:
        samples.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if samples.failure and on_gpu:
        torch.cuda.empty_cache()


def _facts(recipe: str, shape: Shape, samples: Samples, sampling: Sampling) -> Iterator[GemmTime]:
    for mode in MODES:
        if mode not in sampling.conditions.modes:
            continue
        for role in ROLES:
            times = samples.times.get((role, mode), [])
            host = samples.host.get((role, mode))
            failure = samples.failure or (None if times else "the call was not seen")
            late = not failure and host is not None and host > sorted(times)[len(times) // 2]
            yield GemmTime(
                recipe=recipe,
                role=role,
                m=shape.m,
                k=shape.k,
                n=shape.n,
                mode=mode,
                samples_ms=() if failure else tuple(times),
                calls_per_sample=samples.calls,
                host_ms=host,
                launch_bound=late,
                failure=failure,
                family=shape.family,
                quantize_ms=tuple(samples.quantize.get(role, ())) if mode == "autocast" and not failure else (),
            )
