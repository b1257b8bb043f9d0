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

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowprec_callback.engines.base import Engine
from lowprec_callback.measure.dispatch import Sizes
from lowprec_callback.measure.gpu_clock import ahead, cut_calls, device_ms, l2_flush
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import MODES, ROLES, Mode, Role

SAMPLES_PER_VISIT = 3
SAMPLE_MS = 4.0
"""Calls are repeated until a sample is about this long, so that an event's own cost (about 1 us) does not show."""
MAX_CALLS = 16
"""Calls in one sample: a layer's forward and backward is some 25 launches, and the launch queue holds 1024."""
WARM_UPS = 2


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
    host: dict[tuple[Role, Mode], float] = field(default_factory=dict)
    calls: int = 1
    failure: str | None = None

    def totals(self, mode: Mode) -> list[float]:
        """The layer's three roles together, sample by sample; none if the call of one role was never seen."""
        return [sum(parts) for parts in zip(*(self.times.get((role, mode), []) for role in ROLES), strict=False)]


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
        self._splits = _splits(shape)
        self._flush = l2_flush(engine.device) if conditions.cold_l2 else None
        self._marks: list[tuple[str, Any]] = []
        self._count = 0

    def run(self) -> None:
        """Warm up, settle the number of calls, then sample."""
        window = self._conditions.accumulate
        for _ in range(max(WARM_UPS, window)):
            self._call()
        host, wall = _clock(self._call, self._engine.device)
        calls = max(1, min(MAX_CALLS, int(SAMPLE_MS / 1e3 / max(wall, 1e-6))))
        # Whole accumulation windows only, so that the weight's quantization has its true share.
        calls = -(-calls // window) * window
        self._samples.calls = max(self._samples.calls, calls)
        if "autocast" in self._conditions.modes:
            for _ in range(SAMPLES_PER_VISIT):
                self._autocast_sample(calls, host)
        if "kernel" in self._conditions.modes:
            with self._engine.watch(lambda: None, replay=self._kernel_samples):
                self._call()
        torch.cuda.synchronize(self._engine.device)

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
        self._marks = []
        for role, value in sums.items():
            self._samples.times[role, "autocast"].append(value / calls)
            self._samples.quantize[role].append((value - gemm[role]) / calls)
            # The host launches a layer as a whole; a third each is as fair as any split.
            self._samples.host[role, "autocast"] = host_ms / len(ROLES)

    def _kernel_samples(self, role: Role, again: Callable[[], Any]) -> None:
        """Replay one GEMM call where it stands, inside the layer's own forward or backward."""
        again()
        host, wall = _clock(again, self._engine.device)
        calls = max(1, min(50, int(SAMPLE_MS / 1e3 / max(wall, 1e-6))))
        for _ in range(SAMPLES_PER_VISIT):
            self._samples.times[role, "kernel"].append(device_ms(again, calls, host, self._flush))
        self._samples.host[role, "kernel"] = host * 1e3


class PlainBench:
    """Times a layer's three products as PyTorch makes them, under `torch.autocast` or in the parameters' own type.

    For plain_torch's layers on any device, and on the GPU for the `nn.Linear`s that no recipe reaches. autocast here
    means: with the casts that autocast adds (X and W for fprop, dW back to the weight's type for wgrad).
    """

    def __init__(
        self, engine: Engine, card: RecipeCard, shape: Shape, samples: Samples, conditions: Conditions
    ) -> None:
        self._engine, self._card, self._shape, self._samples = engine, card, shape, samples
        self._conditions = conditions
        device, dtype = engine.device, engine.dtype()
        self._x = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
        self._w = torch.randn(shape.n, shape.k, device=device, dtype=dtype) * shape.k**-0.5
        self._b = torch.zeros(shape.n, device=device, dtype=dtype) if shape.bias else None
        self._flush = l2_flush(device) if conditions.cold_l2 and device.type == "cuda" else None

    def run(self) -> None:
        """Sample each role."""
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
                if key[1] in self._conditions.modes:
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
        host, wall = _clock(call, device)
        calls = max(1, min(200, int(SAMPLE_MS / 1e3 / max(wall, 1e-7))))
        for _ in range(SAMPLES_PER_VISIT):
            if device.type == "cuda":
                self._samples.times[key].append(device_ms(call, calls, host, self._flush))
            else:
                self._samples.times[key].append(_clock(call, device, calls)[1] * 1e3 / calls)
        if device.type == "cuda":
            self._samples.host[key] = host * 1e3
        self._samples.calls = max(self._samples.calls, calls)


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


def _splits(shape: Shape) -> tuple[Any, ...]:
    """The further argument of a grouped layer: rows of each group, spread as evenly as whole rows can be."""
    if shape.groups == 1:
        return ()
    each, rest = divmod(shape.m, shape.groups)
    return ([each + 1] * rest + [each] * (shape.groups - rest),)
