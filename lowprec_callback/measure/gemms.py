"""The shape-level microbenchmark: every shape under every recipe, in shuffled, interleaved rounds.

`layer_bench` times one shape under one recipe; here stands in which order, how often, and when it is enough.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from lowprec_callback.engines.base import Engine
from lowprec_callback.failures import in_words
from lowprec_callback.measure.layer_bench import (
    LEAD_MS,
    SAMPLE_MS,
    Bench,
    Conditions,
    LayerBench,
    PlainBench,
    Reader,
    Samples,
    Shape,
)
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import MODES, ROLES, Gemm, GemmTime, Mode

CONFIDENCE = 0.95

LEAST_ROUNDS = 12
"""Rounds that a precision of 1% usually takes, to tell how long it will be before anything is known."""

FREE = 0.3
"""Benchmark layers are kept from one round to the next while this share of the GPU's memory is free."""

Job = tuple[str, Shape]
"""(recipe, shape)."""


@dataclass(frozen=True)
class Sampling:
    """When it is enough."""

    rounds: int = 6
    """Visits to each (recipe, shape), each of which gives one sample; with a `precision`, at most so many. Below six
    samples there is no interval of the median."""
    precision: float | None = None
    """Stop visiting a pair when the half-width of its layer's median, relative to it, is at most this (0.01: 1%)."""
    budget_s: float | None = None
    """After the first round, take no sample after so many seconds."""
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


def jobs_of(gemms: Iterable[Gemm], cards: list[RecipeCard], baseline: str) -> list[tuple[RecipeCard, Shape]]:
    """Every shape under every recipe that can reach it; what no recipe reaches runs in the baseline alone."""
    return [(card, shape) for shape in shapes_of(gemms) for card in cards if shape.quantizable or card.name == baseline]


def expected_s(jobs: Sequence[tuple[RecipeCard, Shape]], sampling: Sampling | None = None) -> float:
    """About what `benchmark` takes [s], by what its samples are meant to take; making the layers is not in it.

    jobs x rounds x modes x 3 roles x (a sample and what runs before it).
    """
    sampling = sampling or Sampling()
    samples = len(jobs) * sampling.rounds * len(sampling.conditions.modes) * len(ROLES)
    return samples * (SAMPLE_MS + LEAD_MS) / 1e3


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
    jobs = jobs_of(gemms, cards, baseline)
    results: dict[Job, Samples] = {(card.name, shape): Samples() for card, shape in jobs}
    benches = Benches(engine, results, sampling.conditions)
    order = random.Random(seed)
    begin = time.perf_counter()
    done = 0
    while True:
        left = [job for job in jobs if _wanting(results[job[0].name, job[1]], sampling)]
        course.widest = _widest(results.values(), sampling)
        course.stopped = _why_stop(left, course, sampling)
        if course.stopped == "precise" and all(samples.failure for samples in results.values()):
            course.stopped = "failed"
        if course.stopped:
            break
        total = done + len(left) * _rounds_to_go(course, sampling)
        for card, shape in order.sample(left, len(left)):
            # The first round is always whole: a pair without a single sample is of no use.
            if course.rounds and _over(sampling, time.perf_counter() - begin):
                break
            progress(f"{card.name} {shape.m}x{shape.k}x{shape.n}", done, total)
            benches.visit(card, shape, _wanting(results[card.name, shape], sampling))
            done += 1
        benches.read()
        course.rounds += 1
        course.seconds = time.perf_counter() - begin
    benches.close()
    for card, shape in jobs:
        yield from _facts(card.name, shape, results[card.name, shape], sampling)


def _wanting(samples: Samples, sampling: Sampling) -> list[Mode]:
    """The modes in which another sample is wanted."""
    if samples.failure is not None:
        return []
    return [mode for mode in sampling.conditions.modes if not _precise(samples, mode, sampling.precision)]


def _precise(samples: Samples, mode: Mode, precision: float | None) -> bool:
    width = half_width(samples.totals(mode))
    return precision is not None and width is not None and width <= precision


def _width(samples: Samples, sampling: Sampling) -> float | None:
    """The widest relative half-width over the modes, of the layer's three roles together."""
    widths = [half_width(samples.totals(mode)) for mode in sampling.conditions.modes]
    return None if any(width is None for width in widths) else max(width for width in widths if width is not None)


def _widest(results: Iterable[Samples], sampling: Sampling) -> float | None:
    """The widest relative half-width of what runs at all; None while one is missing."""
    widths = [_width(samples, sampling) for samples in results if samples.failure is None]
    known = [width for width in widths if width is not None]
    return max(known) if known and len(known) == len(widths) else None


def _rounds_to_go(course: Course, sampling: Sampling) -> int:
    """How many rounds are probably left: an interval narrows with the square root of its samples."""
    most = max(1, sampling.rounds - course.rounds)
    if sampling.precision is None:
        return most
    needed = LEAST_ROUNDS
    if course.widest is not None:
        needed = max(needed, math.ceil(course.rounds * (course.widest / sampling.precision) ** 2))
    go = max(1, needed - course.rounds)
    if sampling.budget_s is not None and course.rounds and course.seconds > 0:
        left = (sampling.budget_s - course.seconds) / (course.seconds / course.rounds)
        go = min(go, max(1, math.ceil(left)))
    return min(go, most)


def _why_stop(left: list[tuple[RecipeCard, Shape]], course: Course, sampling: Sampling) -> str:
    if not left:
        return "precise"
    if course.rounds >= sampling.rounds:
        return "rounds"
    if course.rounds and _over(sampling, course.seconds):
        return "budget"
    return ""


def _over(sampling: Sampling, seconds: float) -> bool:
    return sampling.budget_s is not None and seconds >= sampling.budget_s


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


class Benches:
    """The benchmark layers. They live from round to round where there is memory for them: the GPU then goes from one
    to the next without a pause, at the clock of continuous work.
    """

    def __init__(self, engine: Engine, results: dict[Job, Samples], conditions: Conditions) -> None:
        self._engine, self._results, self._conditions = engine, results, conditions
        self._on_gpu = engine.device.type == "cuda"
        self._kept: dict[Job, tuple[AbstractContextManager[None], Bench]] = {}
        self._unread: tuple[Job, Reader] | None = None

    def visit(self, card: RecipeCard, shape: Shape, modes: list[Mode]) -> None:
        """One sample of a pair in each of the modes, launched; the visit before is read while the GPU works.

        A failure becomes the pair's reason. Out of memory, the other layers give way first.
        """
        job = (card.name, shape)
        reader = None
        try:
            reader = self._launch(card, shape, modes)
        except torch.OutOfMemoryError:
            self._give_way()
            try:
                reader = self._launch(card, shape, modes)
            except torch.OutOfMemoryError:
                self._fail(job, "out of memory")
            except Exception as error:
                self._fail(job, in_words(error))
        except Exception as error:
            self._fail(job, in_words(error))
        self.read()
        if reader is not None:
            self._unread = (job, reader)
        if self._on_gpu and not _roomy(self._engine.device):
            self._give_way()

    def read(self) -> None:
        """Read the last visit."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        job, reader = unread
        try:
            reader()
        except Exception as error:
            self._fail(job, in_words(error))

    def close(self) -> None:
        """Give all memory back."""
        self.read()
        self._kept.clear()

    def _launch(self, card: RecipeCard, shape: Shape, modes: list[Mode]) -> Reader:
        job = (card.name, shape)
        state, bench = self._kept.get(job, (None, None))
        state = state or self._engine.own_state()
        with state, torch.random.fork_rng(devices=[self._engine.device] if self._on_gpu else []):
            if bench is None:
                torch.manual_seed(0)
                plain = not self._on_gpu or not shape.quantizable or self._engine.name == "plain_torch"
                make = PlainBench if plain else LayerBench
                bench = make(self._engine, card, shape, self._results[job], self._conditions)
                self._kept[job] = (state, bench)
            return bench.visit(modes)

    def _fail(self, job: Job, reason: str) -> None:
        self._results[job].failure = reason
        self._kept.pop(job, None)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _give_way(self) -> None:
        self.close()
        torch.cuda.empty_cache()


def _roomy(device: torch.device) -> bool:
    """Whether enough memory is free, blocks that the caching allocator holds unused included."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + unused) / total >= FREE


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
                clocks_mhz=() if failure else tuple(samples.clocks.get((role, mode), ())),
                calls_per_sample=samples.calls,
                host_ms=host,
                launch_bound=late,
                failure=failure,
                family=shape.family,
                quantize_ms=tuple(samples.quantize.get(role, ())) if mode == "autocast" and not failure else (),
            )
