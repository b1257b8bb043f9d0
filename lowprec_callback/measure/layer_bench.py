"""One linear layer of one shape under one recipe: its three GEMMs, timed as training runs them.

A benchmark layer is the engine's own, run forward and backward inside the recipe's region, so every role has its own
layout, operand formats and quantizer flags, and each tensor is quantized once and used twice: X for fprop and wgrad,
W for fprop and dgrad, dY for dgrad and wgrad. Two modes:

autocast
    CUDA events cut each call where one role's GEMM ends: fprop runs from the beginning to the end of the forward
    pass and carries the quantization of X and W, the first backward GEMM carries that of dY, and the end of
    backward (delayed scaling's update) goes to the last. Their sum is what the layer costs a step.
kernel
    The very call into the GEMM library that training makes, with its operands, made again and again.

Data are normal random numbers (zeros draw less power, and a BF16 product ran 13% faster on them on an H200).
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lowprec_callback.engines.base import Engine
from lowprec_callback.measure.dispatch import Sizes
from lowprec_callback.measure.gpu_clock import Launched, Pace, back_to_back, cut_calls, event, l2_flush
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import MODES, ROLES, Mode, Role

SAMPLE_MS = 10.0
"""A sample is the mean over calls that take about this long."""
LEAD_MS = 5.0
"""The same work, untimed, before a sample (see `gpu_clock`)."""
SHORT_LEAD_MS = 1.0
"""The same where work alike has just been running."""
MAX_CALLS = 16
"""Calls in one sample that the host has to launch ahead: a layer's forward and backward is some 40 launches, events
included, and the launch queue holds 1024."""
CHUNK_MS = 1.0
"""Short GEMMs are repeated between two events until they take this long, so that an event's own cost of about a
microsecond does not show."""
MAX_REPEATS = 50
LAUNCHES = 400
"""GEMMs in one sample at most, for the launch queue's sake."""
WARM_UPS = 2
CLOCKINGS = 3
"""Of a call's pace, unless a single call is as long as a sample."""

Reader = Callable[[], None]
"""Reads a sample that was launched, once the GPU has run it."""


class Bench(Protocol):
    """Times one layer of one shape under one recipe."""

    def visit(self, modes: Collection[Mode]) -> Reader:
        """Take one sample of each role in each of the modes; on a GPU only launch it."""


@dataclass(frozen=True)
class Shape:
    """A linear layer to time: tokens, input and output features."""

    m: int
    k: int
    n: int
    bias: bool
    family: str
    quantizable: bool
    groups: int = 1


@dataclass(frozen=True)
class Conditions:
    """What a call finds when it starts."""

    modes: tuple[Mode, ...] = MODES
    accumulate: int = 1
    """Micro-batches in a step: the weight is quantized in the first of them only. 1: at every call."""
    cold_l2: bool = False
    """Overwrite the L2 cache before each call, instead of finding there what the call before left."""


@dataclass
class Samples:
    """What was measured for one (recipe, shape): ms of one call, by role and mode."""

    times: dict[tuple[Role, Mode], list[float]] = field(default_factory=lambda: defaultdict(list))
    quantize: dict[Role, list[float]] = field(default_factory=lambda: defaultdict(list))
    clocks: dict[tuple[Role, Mode], list[float]] = field(default_factory=lambda: defaultdict(list))
    """SM clock of each sample, MHz; none on a CPU."""
    host: dict[tuple[Role, Mode], float] = field(default_factory=dict)
    calls: int = 1
    failure: str | None = None

    def totals(self, mode: Mode) -> list[float]:
        """The layer's three roles together, sample by sample; none if the call of one role was never seen.

        Milliseconds; on a GPU milliseconds x MHz, so that samples at different clocks can be compared.
        """
        return [sum(parts) for parts in zip(*(self._cycles(role, mode) for role in ROLES), strict=False)]

    def _cycles(self, role: Role, mode: Mode) -> list[float]:
        times, clocks = self.times.get((role, mode), []), self.clocks.get((role, mode), [])
        return [ms * mhz for ms, mhz in zip(times, clocks, strict=True)] if clocks else times


class LayerBench:
    """Times one TE layer on a GPU (see the module's docstring)."""

    def __init__(
        self, engine: Engine, card: RecipeCard, shape: Shape, samples: Samples, conditions: Conditions
    ) -> None:
        self._engine, self._card, self._samples, self._conditions = engine, card, samples, conditions
        self._layer = engine.make_linear(shape.k, shape.n, shape.bias, shape.groups)
        dtype = next(self._layer.parameters()).dtype
        self._x = torch.randn(shape.m, shape.k, device=engine.device, dtype=dtype, requires_grad=True)
        # Gradients are small and spread over orders of magnitude, unlike activations.
        self._dy = torch.randn(shape.m, shape.n, device=engine.device, dtype=dtype) * 1e-3
        self._splits = splits_of(shape.m, shape.groups)
        self._flush = l2_flush(engine.device) if conditions.cold_l2 else None
        self._marks: list[tuple[str, Any]] = []
        self._count = 0
        for _ in range(max(WARM_UPS, conditions.accumulate)):
            self._call()
        self._pace = pace_of(self._call, engine.device)
        self._paces: dict[Role, Pace] = {}
        self._replayed: list[tuple[Role, int, Launched]] = []
        if "kernel" in conditions.modes:
            with engine.watch(lambda: None, replay=self._learn_pace):
                self._call()
        self._marks = []

    def visit(self, modes: Collection[Mode]) -> Reader:
        """Launch one sample in each of the modes."""
        readers: list[Reader] = []
        if "autocast" in modes:
            readers.append(self._autocast_sample())
        if "kernel" in modes:
            readers.append(self._kernel_sample())
        return partial(_read_all, readers)

    def _call(self) -> None:
        self._x.grad = None
        for parameter in self._layer.parameters():
            parameter.grad = None
        if self._flush is not None:
            self._flush()
        arguments: dict[str, Any] = {}
        if self._conditions.accumulate > 1:
            arguments["is_first_microbatch"] = self._count % self._conditions.accumulate == 0
        self._count += 1
        self._mark("begin")
        with self._engine.region(self._card):
            y = self._layer(self._x, *self._splits, **arguments)
        self._mark("forward")
        y.backward(self._dy)
        self._mark("end")

    def _mark(self, what: str) -> None:
        self._marks.append((what, event()))

    @contextmanager
    def _around(self, _scope: Scope | None, role: Role, _sizes: Sizes) -> Iterator[None]:
        self._mark(f"<{role}")
        yield
        self._mark(f">{role}")

    def _autocast_sample(self) -> Reader:
        window = self._conditions.accumulate
        # Whole accumulation windows only, so that the weight's quantization has its true share.
        self._count = 0
        calls = _whole(self._pace.calls(SAMPLE_MS, MAX_CALLS), window)
        lead = _whole(self._pace.calls(LEAD_MS, MAX_CALLS), window)
        with self._engine.watch(lambda: None, around=self._around):
            launched = back_to_back(self._call, calls, lead, self._pace, begin=self._forget_marks)
        marks, self._marks = self._marks, []
        self._samples.calls = max(self._samples.calls, calls)

        def read() -> None:
            self._pace.gpu_ms, mhz = launched.ms(), launched.mhz()
            sums: dict[Role, float] = defaultdict(float)
            gemm: dict[Role, float] = defaultdict(float)
            for role, took, alone in cut_calls(marks):
                sums[role] += took
                gemm[role] += alone
            for role, value in sums.items():
                self._samples.times[role, "autocast"].append(value / calls)
                self._samples.quantize[role].append((value - gemm[role]) / calls)
                self._samples.clocks[role, "autocast"].append(mhz)
                # The host launches a layer as a whole; a third each is as fair as any split.
                self._samples.host[role, "autocast"] = self._pace.host_ms / len(ROLES)

        return read

    def _forget_marks(self) -> None:
        self._marks = []

    def _learn_pace(self, role: Role, again: Callable[[], Any]) -> None:
        again()
        self._paces[role] = pace_of(again, self._engine.device)

    def _kernel_sample(self) -> Reader:
        self._replayed = []
        with self._engine.watch(lambda: None, replay=self._replay):
            self._call()
        replayed, self._marks = self._replayed, []

        def read() -> None:
            for role, repeats, launched in replayed:
                pace = self._paces[role]
                pace.gpu_ms = launched.ms() / repeats
                self._samples.times[role, "kernel"].append(pace.gpu_ms)
                self._samples.clocks[role, "kernel"].append(launched.mhz())
                self._samples.host[role, "kernel"] = pace.host_ms

        return read

    def _replay(self, role: Role, again: Callable[[], Any]) -> None:
        """Replay one GEMM call where it stands, inside the layer's own forward or backward."""
        lead = SHORT_LEAD_MS if self._replayed else LEAD_MS
        self._replayed.append((role, *_replay(again, self._paces[role], lead, self._flush)))


def _replay(
    call: Callable[[], Any], pace: Pace, lead_ms: float, flush: Callable[[], Any] | None
) -> tuple[int, Launched]:
    """(calls between two events, the sample) of a single GEMM."""
    repeats = 1 if flush is not None else max(1, min(MAX_REPEATS, int(CHUNK_MS / max(pace.gpu_ms, 1e-6))))

    def chunk() -> None:
        for _ in range(repeats):
            call()

    of_chunk = Pace(pace.host_ms * repeats, pace.gpu_ms * repeats)
    most = max(1, LAUNCHES // repeats)
    calls, lead = of_chunk.calls(SAMPLE_MS, most), of_chunk.calls(lead_ms, most)
    return repeats, back_to_back(chunk, calls, lead, of_chunk, flush)


def _read_all(readers: list[Reader]) -> None:
    for read in readers:
        read()


def _whole(calls: int, window: int) -> int:
    """So many calls, rounded up to whole accumulation windows."""
    return -(-calls // window) * window


def pace_of(call: Callable[[], Any], device: torch.device) -> Pace:
    """What a call takes, from an idle device; the GPU's time is at most the wall time."""
    clocked = [_clock(call, device)]
    while len(clocked) < CLOCKINGS and clocked[-1][1] * 1e3 < SAMPLE_MS:
        clocked.append(_clock(call, device))
    return Pace(min(host for host, _ in clocked) * 1e3, min(wall for _, wall in clocked) * 1e3)


class PlainBench:
    """Times a layer's three products as PyTorch makes them, under `torch.autocast` or in the parameters' own type.

    For plain_torch's layers on any device, and on the GPU for the `nn.Linear`s that no recipe reaches. autocast here
    means: with the casts that autocast adds (X and W for fprop, dW back to the weight's type for wgrad).
    """

    def __init__(
        self, engine: Engine, card: RecipeCard, shape: Shape, samples: Samples, conditions: Conditions
    ) -> None:
        self._engine, self._card, self._shape, self._samples = engine, card, shape, samples
        device, dtype = engine.device, engine.dtype()
        # One X, W and b for each group; without a grouped GEMM PyTorch multiplies them one after the other.
        rows = [0, *itertools.accumulate(rows_of(shape.m, shape.groups))]
        x = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
        self._x = [x[first:last] for first, last in itertools.pairwise(rows)]
        self._w = [torch.randn(shape.n, shape.k, device=device, dtype=dtype) * shape.k**-0.5 for _ in self._x]
        self._b = torch.zeros(shape.n, device=device, dtype=dtype) if shape.bias else None
        self._flush = l2_flush(device) if conditions.cold_l2 and device.type == "cuda" else None
        self._paces: dict[tuple[Role, Mode], Pace] = {}
        self._work = self._products()

    def visit(self, modes: Collection[Mode]) -> Reader:
        """Take (on a GPU: launch) one sample of each role in each of the modes."""
        readers: list[Reader] = []
        with torch.no_grad():
            for key, call in self._work.items():
                if key[1] in modes:
                    sample = self._launch if self._engine.device.type == "cuda" else self._take
                    readers.append(sample(key, call, SHORT_LEAD_MS if readers else LEAD_MS))
        return partial(_read_all, readers)

    def _products(self) -> dict[tuple[Role, Mode], Callable[[], Any]]:
        """What is timed for each role and mode; the operands are made here, once."""
        low = self._low()
        xs, ws = [x.to(low) for x in self._x], [w.to(low) for w in self._w]
        dys = [(torch.randn(len(x), self._shape.n, device=x.device) * 1e-3).to(low) for x in xs]
        bias = None if self._b is None else self._b.to(low)
        own = self._w[0].dtype

        def forward() -> None:
            with self._region():
                for x, w in zip(self._x, self._w, strict=True):
                    nn.functional.linear(x, w, self._b)

        def fprop() -> None:
            for x, w in zip(xs, ws, strict=True):
                nn.functional.linear(x, w, bias)

        def dgrad() -> None:
            for dy, w in zip(dys, ws, strict=True):
                torch.mm(dy, w)

        def wgrad(dtype: torch.dtype) -> None:
            for dy, x in zip(dys, xs, strict=True):
                torch.mm(dy.t(), x).to(dtype)

        return {
            ("fprop", "autocast"): forward,
            ("dgrad", "autocast"): dgrad,
            ("wgrad", "autocast"): partial(wgrad, own),
            ("fprop", "kernel"): fprop,
            ("dgrad", "kernel"): dgrad,
            ("wgrad", "kernel"): partial(wgrad, low),
        }

    def _region(self) -> AbstractContextManager[Any]:
        return self._engine.region(self._card) if self._shape.quantizable else nullcontext()

    def _low(self) -> torch.dtype:
        """The type that this product has under the recipe: asked of PyTorch, not assumed (no autocast widens it)."""
        with torch.no_grad(), self._region():
            return nn.functional.linear(self._x[0][:1], self._w[0]).dtype

    def _launch(self, key: tuple[Role, Mode], call: Callable[[], Any], lead_ms: float) -> Reader:
        if key not in self._paces:
            call()
            self._paces[key] = pace_of(call, self._engine.device)
        pace = self._paces[key]
        repeats, launched = _replay(call, pace, lead_ms, self._flush)

        def read() -> None:
            pace.gpu_ms = launched.ms() / repeats
            self._samples.times[key].append(pace.gpu_ms)
            self._samples.clocks[key].append(launched.mhz())
            self._samples.host[key] = pace.host_ms
            self._samples.calls = max(self._samples.calls, repeats * len(launched.pairs))

        return read

    def _take(self, key: tuple[Role, Mode], call: Callable[[], Any], _lead_ms: float) -> Reader:
        """On a CPU: the host does the work, at once."""
        device = self._engine.device
        if key not in self._paces:
            call()
            self._paces[key] = pace_of(call, device)
        calls = self._paces[key].calls(SAMPLE_MS, MAX_REPEATS)
        ms = _clock(call, device, calls)[1] * 1e3 / calls
        self._samples.times[key].append(ms)
        self._samples.calls = max(self._samples.calls, calls)
        return lambda: None


def _clock(call: Callable[[], Any], device: torch.device, calls: int = 1) -> tuple[float, float]:
    """(host seconds, wall seconds) of some calls, from an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return host, time.perf_counter() - begin


def rows_of(tokens: int, groups: int) -> list[int]:
    """Rows of each group, spread as evenly as whole rows can be."""
    each, rest = divmod(tokens, groups)
    return [each + 1] * rest + [each] * (groups - rest)


def splits_of(tokens: int, groups: int) -> tuple[Any, ...]:
    """The further argument of a grouped layer."""
    return (rows_of(tokens, groups),) if groups > 1 else ()
