"""The model's own modules, each by itself, forward and backward, under every recipe.

A recipe changes more of a module than its GEMMs: a LayerNormLinear casts in its norm, a LayerNormMLP in its activation,
and the host launches other kernels for each. A bare linear layer of the same size shows none of this. So copies of the
model's own modules are run, one of each kind, at the number of tokens that the model's step showed, and at a quarter of
it, from which the trend with the batch follows (`analyze.prediction`).

The GPU's time is taken as in `gpu_clock`, between events around all forward and all backward passes of a call. The
host's is taken apart from it, from an idle GPU: what one module costs inside an open region and what the region and
the backward pass cost by themselves, so that many modules in one region can be added up.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch

from lowprec_callback.engines.base import Engine, LinearLayer
from lowprec_callback.engines.wrappers import submodule
from lowprec_callback.failures import in_words
from lowprec_callback.measure.gpu_clock import back_to_back, event
from lowprec_callback.measure.layer_bench import LEAD_MS, SAMPLE_MS, WARM_UPS, Reader, pace_of, splits_of
from lowprec_callback.measure.steps import synchronize
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import Gemm, ModuleTime

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

ROUNDS = 6
"""Samples of each (module, recipe) at the model's own tokens: below six there is no interval of the median."""

TREND_ROUNDS = 3
"""The same at a quarter of them."""

TREND = 4
"""By what the tokens are divided for the trend."""

TREND_MULTIPLE = 128
"""Tokens of the trend are a multiple of this, which is one of every alignment that a recipe asks for."""

COPIES = 4
"""Copies of a small module in one call, so that one region and one backward pass serve several, as in a model."""

SMALL_BYTES = 64 << 20
"""A module of fewer bytes, parameters and input, is small. What the host needs for a large one does not matter."""

LAUNCHES = 640
"""Kernels in one sample at most, for the launch queue's sake (it holds 1024), at some 40 a module."""

HOST_SAMPLES = 3
"""At each visit."""


@dataclass(frozen=True)
class Kind:
    """Modules that are alike."""

    layer: LinearLayer
    """The first of them."""
    alike: tuple[str, ...]
    tokens: int
    groups: int


def kinds_of(engine: Engine, gemms: Iterable[Gemm]) -> list[Kind]:
    """The kinds of module that recipes reach, each with the paths of all modules alike, in the model's order.

    Alike are modules of one class with equal weights, bias, activation, norm and tokens. A module that saw several
    numbers of tokens in the captured step counts with the one that it saw most often.
    """
    seen: dict[str, list[Gemm]] = {}
    for gemm in gemms:
        if gemm.role == "fprop" and gemm.quantizable:
            seen.setdefault(gemm.module, []).append(gemm)
    found: dict[tuple[Any, ...], list[tuple[LinearLayer, Gemm]]] = {}
    for layer in engine.linear_layers():
        calls = seen.get(layer.path + layer.weights[0].suffix)
        if not layer.quantizable or not calls:
            continue
        most = max(calls, key=lambda gemm: gemm.calls)
        module = submodule(engine.model, layer.path)
        manners = tuple(str(getattr(module, name, None)) for name in ("activation", "normalization"))
        key = (layer.family, layer.weights, layer.bias, most.m, most.groups, *manners)
        found.setdefault(key, []).append((layer, most))
    return [
        Kind(members[0][0], tuple(layer.path for layer, _ in members), members[0][1].m, members[0][1].groups)
        for members in found.values()
    ]


def module_times(
    engine: Engine,
    cards: list[RecipeCard],
    gemms: Iterable[Gemm],
    seed: int,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    autocast: torch.dtype | None = None,
) -> Iterator[ModuleTime]:
    """Time one module of each kind under every recipe, recipes interleaved; nothing on a CPU or without TE.

    Args:
        engine, cards: as in the sweep.
        gemms: of the captured step.
        seed: of the order of recipes.
        progress: told what is timed, and how far we are.
        autocast: the type of the `torch.autocast` region that the model's step ran in, or None.

    A module that fails under a recipe (out of memory, no copy can be made) is a fact with its reason.
    """
    if engine.device.type != "cuda" or engine.name != "transformer_engine":
        return
    kinds = kinds_of(engine, gemms)
    order = random.Random(seed)
    sizes = [(kind, tokens, tokens == kind.tokens) for kind in kinds for tokens in _tokens(kind)]
    for index, (kind, tokens, own) in enumerate(sizes):
        progress(f"{kind.layer.family} at {tokens} tokens", index, len(sizes))
        trials = [Trial(engine, card, kind, tokens, autocast) for card in cards]
        unread: Reader | None = None
        for _ in range(ROUNDS if own else TREND_ROUNDS):
            for trial in order.sample(trials, len(trials)):
                reader = trial.visit()
                if unread is not None:
                    unread()  # while the GPU works on what was just launched
                unread = reader
        if unread is not None:
            unread()
        for trial in trials:
            yield from trial.facts(own)
        del trials, trial, unread, reader  # their memory is the next kind's
        torch.cuda.empty_cache()


def _tokens(kind: Kind) -> list[int]:
    fewer = max(TREND_MULTIPLE, kind.tokens // TREND // TREND_MULTIPLE * TREND_MULTIPLE)
    return [kind.tokens, fewer] if fewer < kind.tokens and kind.groups == 1 else [kind.tokens]


@dataclass
class Trial:
    """One kind of module under one recipe."""

    engine: Engine
    card: RecipeCard
    kind: Kind
    tokens: int
    autocast: torch.dtype | None
    failure: str | None = None
    _state: AbstractContextManager[None] | None = None
    _bench: ModuleBench | None = None
    _times: dict[Direction, list[float]] = field(default_factory=lambda: {name: [] for name in DIRECTIONS})
    _clocks: list[float] = field(default_factory=list)
    _hosts: list[Host] = field(default_factory=list)

    def visit(self) -> Reader | None:
        """Launch one sample; None if this fails. The reader reads it."""
        if self.failure is not None:
            return None
        try:
            self._state = self._state or self.engine.own_state()
            with self._state, torch.random.fork_rng(devices=[self.engine.device]):
                if self._bench is None:
                    torch.manual_seed(0)
                    self._bench = ModuleBench(self.engine, self.card, self.kind, self.tokens, self.autocast)
                self._hosts.append(self._bench.host())
                return partial(self._read, self._bench.sample())
        except Exception as error:
            self._fail(error)
            return None

    def _read(self, sample: Callable[[], tuple[float, float, float]]) -> None:
        try:
            forward, backward, mhz = sample()
        except Exception as error:
            self._fail(error)
            return
        self._times["forward"].append(forward)
        self._times["backward"].append(backward)
        self._clocks.append(mhz)

    def _fail(self, error: Exception) -> None:
        self.failure = in_words(error)
        self._bench = None
        torch.cuda.empty_cache()

    def facts(self, own: bool) -> Iterator[ModuleTime]:
        """What was measured, a fact for each direction."""
        bench = self._bench if self.failure is None else None
        for direction in DIRECTIONS:
            yield ModuleTime(
                recipe=self.card.name,
                module=self.kind.layer.path,
                alike=self.kind.alike,
                family=self.kind.layer.family,
                tokens=self.tokens,
                direction=direction,
                samples_ms=tuple(self._times[direction]) if bench else (),
                clocks_mhz=tuple(self._clocks) if bench else (),
                calls_per_sample=bench.calls_per_sample if bench else 1,
                host_ms=statistics.median(host.module[direction] for host in self._hosts) if bench else None,
                region_ms=statistics.median(host.region[direction] for host in self._hosts) if bench else None,
                own=own,
                failure=self.failure,
            )


@dataclass(frozen=True)
class Host:
    """Milliseconds of the host, by direction."""

    module: dict[Direction, float]
    """To launch one module."""
    region: dict[Direction, float]
    """For what comes once, however many modules there are: the region, and the start of a backward pass."""


class ModuleBench:
    """A few copies of one module, forward in one region and backward in one pass."""

    def __init__(self, engine: Engine, card: RecipeCard, kind: Kind, tokens: int, autocast: torch.dtype | None) -> None:
        self._engine, self._card, self._autocast = engine, card, autocast
        first = engine.copy_of(kind.layer.path)
        parameters = list(first.parameters())
        dtype = autocast or parameters[0].dtype
        features = kind.layer.weights[0].k
        taken = sum(p.numel() * p.element_size() for p in parameters) + tokens * features * dtype.itemsize
        copies = COPIES if taken < SMALL_BYTES else 1
        self._modules = [first, *(engine.copy_of(kind.layer.path) for _ in range(copies - 1))]
        self._arguments = splits_of(tokens, kind.groups)
        self._xs = [
            torch.randn(tokens, features, device=engine.device, dtype=dtype, requires_grad=True) for _ in self._modules
        ]
        self._dys: list[list[torch.Tensor]] = []
        self._marks: list[Any] = []
        for _ in range(WARM_UPS):
            self._call()
        self._most = max(1, LAUNCHES // (40 * copies))
        self._pace = pace_of(self._call, engine.device)
        self.calls_per_sample = copies
        self._marks = []

    def sample(self) -> Callable[[], tuple[float, float, float]]:
        """Launch a sample. What is returned gives (forward ms, backward ms, SM MHz) of one module, and waits for it."""
        calls, lead = self._pace.calls(SAMPLE_MS, self._most), self._pace.calls(LEAD_MS, self._most)
        launched = back_to_back(self._call, calls, lead, self._pace, begin=self._forget)
        marks, self._marks = self._marks, []
        self.calls_per_sample = calls * len(self._modules)

        def read() -> tuple[float, float, float]:
            self._pace.gpu_ms, mhz = launched.ms(), launched.mhz()
            forward = sum(begin.elapsed_time(middle) for begin, middle, _ in marks)
            backward = sum(middle.elapsed_time(end) for _, middle, end in marks)
            return forward / self.calls_per_sample, backward / self.calls_per_sample, mhz

        return read

    def _forget(self) -> None:
        self._marks = []

    def _call(self) -> None:
        self._clear()
        begin = event()
        with self._region(), self._cast():
            outputs = [self._forward(index) for index in range(len(self._modules))]
        middle = event()
        self._backward(outputs)
        self._marks.append((begin, middle, event()))

    def _clear(self) -> None:
        for x, module in zip(self._xs, self._modules, strict=True):
            x.grad = None
            for parameter in module.parameters():
                parameter.grad = None

    def _region(self) -> AbstractContextManager[Any]:
        return self._engine.region(self._card)

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=self._autocast) if self._autocast is not None else nullcontext()

    def _forward(self, index: int) -> list[torch.Tensor]:
        """The outputs that have a gradient: some modules also return their norm's output, or a bias to add later."""
        made = self._modules[index](self._xs[index], *self._arguments)
        outputs = [y for y in (made if isinstance(made, tuple) else (made,)) if _has_gradient(y)]
        if index == len(self._dys):
            # Gradients are small and spread over orders of magnitude, unlike activations.
            self._dys.append([torch.randn_like(y) * 1e-3 for y in outputs])
        return outputs

    def _backward(self, outputs: list[list[torch.Tensor]]) -> None:
        flat = [y for each in outputs for y in each]
        torch.autograd.backward(flat, [dy for each in self._dys[: len(outputs)] for dy in each])

    def host(self) -> Host:
        """What the host needs, from an idle GPU, so that no full launch queue makes it wait; medians of a few calls.

        A host changes its pace by the second, so that recipes can be compared only visit by visit.
        """
        one = self._clock_host(1)
        count = len(self._modules)
        if count == 1:
            return Host({"forward": one[1], "backward": one[3]}, {"forward": one[0] + one[2], "backward": 0.0})
        many = self._clock_host(count)
        backward = max((many[3] - one[3]) / (count - 1), 0.0)
        return Host(
            {"forward": many[1] / count, "backward": backward},
            {"forward": many[0] + many[2], "backward": max(one[3] - backward, 0.0)},
        )

    def _clock_host(self, count: int) -> list[float]:
        """Median milliseconds of entering the region, of so many forwards, of leaving it, and of their backward."""
        taken: list[list[float]] = []
        for _ in range(HOST_SAMPLES):
            self._clear()
            synchronize(self._engine.device)
            ticks = [time.perf_counter()]
            with self._region(), self._cast():
                ticks.append(time.perf_counter())
                outputs = [self._forward(index) for index in range(count)]
                ticks.append(time.perf_counter())
            ticks.append(time.perf_counter())
            self._backward(outputs)
            ticks.append(time.perf_counter())
            taken.append([(b - a) * 1e3 for a, b in pairwise(ticks)])
        return [statistics.median(column) for column in zip(*taken, strict=True)]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
