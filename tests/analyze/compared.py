"""Small Reports to compare, made by hand: all that `compare` reads, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowprec_callback.analyze.statistics import median_interval, ratio
from lowprec_callback.report import (
    BUCKETS,
    VERSION,
    Figure,
    GemmRow,
    Ledger,
    RecipeReport,
    Report,
    Speedups,
    Verdict,
)

Rounds = Mapping[int, Sequence[float]]
ASKED = {"fprop": "e4m3 x e4m3", "scaling": "tensor-delayed", "amax_history_len": "1024"}
WORK = {"gemm": 60.0, "quantize": 8.0, "attention": 10.0}


def rounds(ms: float, seed: int, noise: float = 0.002, count: int = 3, each: int = 8, drift: float = 0.0) -> Rounds:
    """Step times around `ms`, with relative noise from step to step and drift from round to round."""
    rng = np.random.default_rng(seed)
    levels = ms * (1 + drift * rng.normal(size=count))
    return {number: [float(level * (1 + noise * rng.normal())) for _ in range(each)] for number, level in
            enumerate(levels)}  # fmt: skip


def step(samples: Rounds) -> Figure:
    made = median_interval(samples, 400)
    return Figure(made.value, "ms", "measured", made.low, made.high, made.n)


def ledger(wall: Figure, work: Mapping[str, float], seed: int, traced: int = 2, noise: float = 0.0003) -> Ledger:
    rng = np.random.default_rng(seed)
    times = dict.fromkeys(BUCKETS, 0.0) | dict(work)
    steps = {name: tuple(float(ms * (1 + noise * rng.normal())) for _ in range(traced)) for name, ms in times.items()}
    means = {name: math.fsum(each) / traced for name, each in steps.items()}
    busy = math.fsum(means.values())
    assert wall.value is not None
    return Ledger(
        wall=wall,
        buckets={name: Figure(ms, "ms", "measured", n=traced) for name, ms in means.items()},
        idle=Figure(max(wall.value - busy, 0.0), "ms"),
        residual=Figure(min(wall.value - busy, 0.0), "ms"),
        busy=Figure(busy, "ms", "measured", n=traced),
        complete=True,
        steps=steps,
    )


def recipe(
    name: str, samples: Rounds, base: Rounds, seed: int = 0, work: Mapping[str, float] = WORK, **more: Any
) -> RecipeReport:
    wall = step(samples)
    one = Figure(1.0, "x")
    made = ratio(base, samples, 400)
    gained = one if base is samples else Figure(made.value, "x", "derived", made.low, made.high)
    kernel = Figure(1.9, "x", "derived", 1.895, 1.905)
    part = RecipeReport(
        name,
        name,
        base is samples,
        step_ms=wall,
        speedups=Speedups(kernel, kernel, kernel, gained),
        peak_gb=Figure(90.0, "GB", "measured", n=3),
        samples=tuple((number, tuple(times)) for number, times in samples.items()),
        ledger=ledger(wall, work, seed),
        gemms=(GemmRow("layers.*.fc", "fprop", 1024, 256, 512, 4, Figure(1.0, "ms"), Figure(1.0, "ms")),),
        verdict=Verdict(Figure(1.0, "share"), Figure(1.0, "share"), (), "all as asked"),
        asked=ASKED,
    )
    return replace(part, **more)


def report(seed: int = 0, ms: float = 100.0, fp8: float = 80.0, noise: float = 0.002, **more: Any) -> Report:
    """bf16 and fp8_delayed."""
    base, fast = rounds(ms, seed, noise), rounds(fp8, seed + 1, noise)
    made = Report(
        VERSION,
        "0.1.0",
        "2026-01-02T03:04:05+00:00",
        "MiniGPT",
        "transformer_engine",
        "the model has TE modules",
        "NVIDIA H200",
        {"torch": "2.11.0", "transformer_engine": "2.20.2", "cuda": "13.0", "driver": "580.1", "cudnn": "9.19"},
        (),
        (),
        "bf16",
        (recipe("bf16", base, base, seed + 2), recipe("fp8_delayed", fast, base, seed + 3)),
        "3 rounds",
        conditions={"micro-batches": "1", "power limit": "700 W", "world size": "1"},
    )
    return replace(made, **more)


def with_recipe(made: Report, name: str, **more: Any) -> Report:
    """The same report with one recipe changed."""
    return replace(made, recipes=tuple(replace(part, **more) if part.name == name else part for part in made.recipes))
