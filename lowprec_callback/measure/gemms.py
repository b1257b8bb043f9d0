"""The shape-level microbenchmark, on the shapes that the model showed, timing what training does.

A benchmark layer is the engine's own linear layer, run forward and backward inside the recipe's region, so every
role has its own layout, operand formats and quantizer flags, and each tensor is quantized once and used twice: X
for fprop and wgrad, W for fprop and dgrad, dY for dgrad and wgrad. Two modes:

autocast
    CUDA events cut each call where one role's GEMM ends: fprop runs from the beginning to the end of the forward
    pass and carries the quantization of X and W, the first backward GEMM carries that of dY, and the end of
    backward (delayed scaling's update) goes to the last. Their sum is what the layer costs a step.
kernel
    The very call into the GEMM library that training makes, with its operands, made again and again.

Before each sample a spinning kernel holds the GPU until the host has launched the whole sample. So event intervals
hold no waiting for the host, small shapes too; how long the host needs is measured beside them, and where it needs
longer than the GPU the result is marked launch-bound. Data are normal random numbers (zeros draw less power, and a
BF16 product ran 13% faster on them on an H200).
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from lowprec_callback.engines.base import Engine
from lowprec_callback.measure.dispatch import Sizes
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import MODES, ROLES, Gemm, GemmTime, Mode, Role

_T = TypeVar("_T")

ROUNDS = 3
SAMPLES_PER_ROUND = 3
SAMPLE_MS = 4.0
"""Calls are repeated until a sample is about this long, so that an event's own cost (about 1 us) does not show."""
MAX_CALLS = 16
"""Calls in one sample: a layer's forward and backward is some 25 launches, and the launch queue holds 1024."""
TRIES = 4
"""Launches of one sample until the host kept ahead of the GPU."""
SPIN_HZ = 2.0e9
"""Cycles a second of the spinning kernel; a faster clock only makes it spin a little shorter."""


@dataclass(frozen=True)
class Shape:
    """A linear layer to time: tokens, input and output features."""

    m: int
    k: int
    n: int
    bias: bool
    family: str
    quantizable: bool


@dataclass
class _Samples:
    """What was measured for one (recipe, shape): ms of one call, by role and mode."""

    times: dict[tuple[Role, Mode], list[float]] = field(default_factory=lambda: defaultdict(list))
    quantize: dict[Role, list[float]] = field(default_factory=lambda: defaultdict(list))
    host: dict[tuple[Role, Mode], float] = field(default_factory=dict)
    calls: int = 1
    failure: str | None = None


def shapes_of(gemms: Iterable[Gemm]) -> list[Shape]:
    """The distinct linear layers behind captured GEMMs, largest first."""
    shapes = {
        Shape(g.m, g.k, g.n, g.bias, "nn.Linear" if g.family == "nn.Linear" else "Linear", g.quantizable)
        for g in gemms
        if g.groups == 1
    }
    return sorted(shapes, key=lambda s: (-s.m * s.k * s.n, s.k, s.n, s.bias))


def benchmark(
    engine: Engine,
    cards: list[RecipeCard],
    baseline: str,
    gemms: Iterable[Gemm],
    seed: int,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[GemmTime]:
    """Time every shape under every recipe that can reach it, in shuffled, interleaved rounds.

    A shape that fails (out of memory, unsupported, misaligned) keeps its place with the reason.
    """
    jobs = [(card, shape) for shape in shapes_of(gemms) for card in cards if shape.quantizable or card.name == baseline]
    results: dict[tuple[str, Shape], _Samples] = {(card.name, shape): _Samples() for card, shape in jobs}
    order = random.Random(seed)
    done, total = 0, len(jobs) * ROUNDS
    for _ in range(ROUNDS):
        for card, shape in order.sample(jobs, len(jobs)):
            progress(f"{card.name} {shape.m}x{shape.k}x{shape.n}", done, total)
            samples = results[card.name, shape]
            if samples.failure is None:
                _visit(engine, card, shape, samples)
            done += 1
    for card, shape in jobs:
        yield from _facts(card.name, shape, results[card.name, shape])


def _visit(engine: Engine, card: RecipeCard, shape: Shape, samples: _Samples) -> None:
    """One visit: build the layer, warm up, take samples. Failures become a reason, memory is given back."""
    own_state = getattr(engine, "own_state", nullcontext)
    try:
        with own_state(), torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
            torch.manual_seed(0)
            if engine.device.type != "cuda" or not shape.quantizable or engine.name == "plain_torch":
                _PlainBench(engine, card, shape, samples).run()
            else:
                _LayerBench(engine, card, shape, samples).run()
    except torch.OutOfMemoryError:
        samples.failure = "out of memory"
    except Exception as error:
        samples.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if samples.failure and engine.device.type == "cuda":
        torch.cuda.empty_cache()


def _facts(recipe: str, shape: Shape, samples: _Samples) -> Iterator[GemmTime]:
    for mode in MODES:
        for role in ROLES:
            times = samples.times.get((role, mode), [])
            host = samples.host.get((role, mode))
            failure = samples.failure or (None if times else "the call was not seen")
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
                launch_bound=bool(times and host is not None and host > sorted(times)[len(times) // 2]),
                failure=failure,
                family=shape.family,
                quantize_ms=tuple(samples.quantize.get(role, ())) if mode == "autocast" and not failure else (),
            )


class _LayerBench:
    """Times one TE layer of one shape under one recipe (see the module's docstring)."""

    def __init__(self, engine: Engine, card: RecipeCard, shape: Shape, samples: _Samples) -> None:
        self._engine, self._card, self._shape, self._samples = engine, card, shape, samples
        self._layer = engine.make_linear(shape.k, shape.n, shape.bias)
        dtype = next(self._layer.parameters()).dtype
        self._x = torch.randn(shape.m, shape.k, device=engine.device, dtype=dtype, requires_grad=True)
        # Gradients are small and spread over orders of magnitude, unlike activations.
        self._dy = torch.randn(shape.m, shape.n, device=engine.device, dtype=dtype) * 1e-3
        self._marks: list[tuple[str, Any]] = []

    def run(self) -> None:
        """Warm up, settle the number of calls, then sample both modes."""
        for _ in range(3):
            self._call()
        torch.cuda.synchronize(self._engine.device)
        begin = time.perf_counter()
        self._call()
        host = time.perf_counter() - begin
        torch.cuda.synchronize(self._engine.device)
        wall = time.perf_counter() - begin
        calls = max(1, min(MAX_CALLS, int(SAMPLE_MS / 1e3 / max(wall, 1e-6))))
        self._samples.calls = max(self._samples.calls, calls)
        for _ in range(SAMPLES_PER_ROUND):
            self._autocast_sample(calls, host)
        with self._engine.watch(lambda: None, replay=self._kernel_sample):
            self._call()
        torch.cuda.synchronize(self._engine.device)

    def _call(self) -> None:
        self._x.grad = None
        for parameter in self._layer.parameters():
            parameter.grad = None
        self._mark("begin")
        with self._engine.region(self._card):
            y = self._layer(self._x)
        self._mark("forward")
        y.backward(self._dy)
        self._mark("end")

    def _mark(self, what: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((what, event))

    @contextmanager
    def _around(self, _scope: Scope | None, role: Role, _sizes: Sizes) -> Iterator[None]:
        self._mark(f"<{role}")
        yield
        self._mark(f">{role}")

    def _autocast_sample(self, calls: int, host_s: float) -> None:
        def launch() -> float:
            self._marks = []
            begin = time.perf_counter()
            for _ in range(calls):
                self._call()
            return (time.perf_counter() - begin) * 1e3 / calls

        with self._engine.watch(lambda: None, around=self._around):
            host_ms = ahead(launch, calls * host_s)
        torch.cuda.synchronize(self._engine.device)
        sums: dict[Role, float] = defaultdict(float)
        gemm: dict[Role, float] = defaultdict(float)
        for role, whole, alone in cut_calls(self._marks):
            sums[role] += whole
            gemm[role] += alone
        for role, value in sums.items():
            self._samples.times[role, "autocast"].append(value / calls)
            self._samples.quantize[role].append((value - gemm[role]) / calls)
            # The host launches a layer as a whole; a third each is as fair as any split.
            self._samples.host[role, "autocast"] = host_ms / len(ROLES)

    def _kernel_sample(self, role: Role, again: Callable[[], Any]) -> None:
        """Replay one GEMM call where it stands, inside the layer's own forward or backward."""
        again()
        torch.cuda.synchronize(self._engine.device)
        begin = time.perf_counter()
        again()
        host = time.perf_counter() - begin
        torch.cuda.synchronize(self._engine.device)
        wall = time.perf_counter() - begin
        calls = max(1, min(50, int(SAMPLE_MS / 1e3 / max(wall, 1e-6))))
        for _ in range(SAMPLES_PER_ROUND):
            self._samples.times[role, "kernel"].append(device_ms(again, calls, host))
        self._samples.host[role, "kernel"] = host * 1e3


def cut_calls(marks: list[tuple[str, Any]]) -> Iterator[tuple[Role, float, float]]:
    """(role, ms in all, ms of the GEMM alone) for each GEMM between each `begin` and `end`.

    The time between two GEMMs belongs to the later one (it prepares its operands), except that what follows the
    last GEMM of forward still belongs to it, and what follows the last of backward to that one.
    """
    previous: Any = None
    opened: Any = None
    pending: tuple[Role, float, float, Any] | None = None
    for what, event in marks:
        if what == "begin":
            previous = event
        elif what.startswith("<"):
            if pending is not None:
                yield pending[:3]
                previous, pending = pending[3], None
            opened = event
        elif what.startswith(">"):
            role: Role = what[1:]  # type: ignore[assignment]
            pending = (role, previous.elapsed_time(event), opened.elapsed_time(event), event)
        elif pending is not None:  # "forward" or "end"
            role, whole, alone, since = pending
            yield role, whole + since.elapsed_time(event), alone
            previous, pending = event, None


def ahead(launch: Callable[[], _T], host_s: float) -> _T:
    """Launch a sample while the GPU spins, so that it runs without waiting for the host.

    Whether the host kept ahead is checked: an event behind the spin must not have been reached when the launching is
    done. If it was, the sample is thrown away and launched again behind a longer spin; after `TRIES` the last one
    counts (its interval then holds some of the host's time, and the host time beside it says so).

    Args:
        launch: launches the sample; called once a try.
        host_s: about how long that takes the host, in seconds.
    """
    for attempt in range(TRIES):
        reached = torch.cuda.Event()
        seconds = min(max(host_s * 1.5 * 2**attempt, 5e-4), 0.5)
        torch.cuda._sleep(int(seconds * SPIN_HZ))
        reached.record()
        result = launch()
        if not reached.query():
            break
        torch.cuda.synchronize()
    return result


def device_ms(call: Callable[[], Any], calls: int, host_s: float) -> float:
    """Milliseconds of one call on the GPU, from `calls` back-to-back calls that the host launched ahead."""

    def launch() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            call()
        last.record()
        return first, last

    first, last = ahead(launch, calls * host_s)
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / calls


class _PlainBench:
    """Times a layer's three products as PyTorch makes them, under `torch.autocast` or in the parameters' own type.

    For plain_torch's layers on any device, and on the GPU for the `nn.Linear`s that no recipe reaches. autocast here
    means: with the casts that autocast adds (X and W for fprop, dW back to the weight's type for wgrad).
    """

    def __init__(self, engine: Engine, card: RecipeCard, shape: Shape, samples: _Samples) -> None:
        self._engine, self._card, self._shape, self._samples = engine, card, shape, samples
        device, dtype = engine.device, engine.dtype()
        self._x = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
        self._w = torch.randn(shape.n, shape.k, device=device, dtype=dtype) * shape.k**-0.5
        self._b = torch.zeros(shape.n, device=device, dtype=dtype) if shape.bias else None

    def run(self) -> None:
        """Sample each role in both modes."""
        low = self._low()
        x, w = self._x.to(low), self._w.to(low)
        dy = (torch.randn(self._shape.m, self._shape.n, device=x.device) * 1e-3).to(low)
        bias = None if self._b is None else self._b.to(low)
        own = self._w.dtype

        def forward() -> None:
            with self._region():
                nn.functional.linear(self._x, self._w, self._b)

        work: dict[tuple[Role, Mode], Callable[[], Any]] = {
            ("fprop", "autocast"): forward,
            ("dgrad", "autocast"): lambda: torch.mm(dy, w),
            ("wgrad", "autocast"): lambda: torch.mm(dy.t(), x).to(own),
            ("fprop", "kernel"): lambda: nn.functional.linear(x, w, bias),
            ("dgrad", "kernel"): lambda: torch.mm(dy, w),
            ("wgrad", "kernel"): lambda: torch.mm(dy.t(), x),
        }
        with torch.no_grad():
            for key, call in work.items():
                self._sample(key, call)

    def _region(self) -> AbstractContextManager[Any]:
        return self._engine.region(self._card) if self._shape.quantizable else nullcontext()

    def _low(self) -> torch.dtype:
        """The type that this product has under the recipe: asked of PyTorch, not assumed (no autocast widens it)."""
        with torch.no_grad(), self._region():
            return nn.functional.linear(self._x[:1], self._w).dtype

    def _sample(self, key: tuple[Role, Mode], call: Callable[[], Any]) -> None:
        device = self._engine.device
        call()
        host, wall = self._clock(call, 1)
        calls = max(1, min(200, int(SAMPLE_MS / 1e3 / max(wall, 1e-7))))
        for _ in range(SAMPLES_PER_ROUND):
            if device.type == "cuda":
                self._samples.times[key].append(device_ms(call, calls, host))
            else:
                self._samples.times[key].append(self._clock(call, calls)[1] * 1e3 / calls)
        if device.type == "cuda":
            self._samples.host[key] = host * 1e3
        self._samples.calls = max(self._samples.calls, calls)

    def _clock(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        """(host seconds, wall seconds) of some calls."""
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - begin
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return host, time.perf_counter() - begin
