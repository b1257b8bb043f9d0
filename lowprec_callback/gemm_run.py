"""Running the shape-level benchmark without a model: the shapes come from a config, a list, or an old Recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import lowprec_callback
from lowprec_callback import recording
from lowprec_callback.engines import te_tutorial
from lowprec_callback.engines.base import Engine, NotRun
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, load
from lowprec_callback.measure.device import ClockReader, environment
from lowprec_callback.measure.gemms import Course, Sampling, benchmark
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import (
    End,
    Gemm,
    GemmRun,
    GemmTime,
    Method,
    Mode,
    Model,
    Problem,
    Recorder,
    Refusal,
)

WARM_UP_S = 1.0
"""Seconds of products before the first sample: a cold GPU runs faster than one that has reached its power limit."""

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Order:
    """What to time, and how."""

    name: str
    gemms: tuple[Gemm, ...]
    cards: tuple[RecipeCard, ...]
    """The baseline first."""
    layers: int = 1
    methods: tuple[Method, ...] = ("role-true",)
    modes: tuple[Mode, ...] = ("kernel", "autocast")
    sampling: Sampling = field(default_factory=Sampling)
    warm_ups: int = 10
    iterations: int = 100
    """Of the published method."""
    seed: int = 0


def engine_for_shapes(device: torch.device) -> Engine:
    """An engine with no model: it only makes benchmark layers."""
    if device.type != "cuda":
        return PlainTorchEngine(nn.Module(), device, f"the benchmark runs on {device.type}")
    if not load().ok:
        why = f"Transformer Engine cannot be imported: {load().reason}"
        return PlainTorchEngine(nn.Module(), device, why)
    return TransformerEngineEngine(nn.Module(), device, "Transformer Engine is installed and there is a CUDA device")


def execute(order: Order, engine: Engine, folder: Path, tell: Tell = lambda *_: None) -> Recorder:
    """Time everything that was ordered. Facts are on disk as they come; a shape that fails keeps its row."""
    created = datetime.now().astimezone().isoformat("T", "seconds")
    recorder = Recorder(folder / recording.FILE_NAME, lowprec_callback.__version__, created)
    device_type: Literal["cuda", "cpu"] = "cuda" if engine.device.type == "cuda" else "cpu"
    recorder.add(environment(device_type, load().version))
    recorder.add(Model(order.name, engine.name, engine.why, parameters=0, parameter_bytes=0))
    able, refused = _sort_out(order.cards, engine)
    baseline = order.cards[0]
    recorder.add(*(card.to_fact(card is baseline) for card in order.cards))
    recorder.add(*(Refusal(card.name, reason.reason, reason.source) for card, reason in refused))
    recorder.add(*order.gemms)
    clocks = ClockReader() if device_type == "cuda" else None
    try:
        if baseline not in able:
            recorder.add(End("failed", f"the baseline {baseline.name} cannot run here"))
            return recorder
        _warm_up(engine.device)
        for method in order.methods:
            _run(method, order, engine, able, recorder, tell)
            if clocks is not None and (reading := clocks.read(f"{method} benchmark", 0)) is not None:
                recorder.add(reading)
        recorder.add(End("finished"))
    except KeyboardInterrupt:
        recorder.add(End("interrupted", "KeyboardInterrupt"))
        raise
    finally:
        recorder.close()
        if clocks is not None:
            clocks.close()
    return recorder


def _run(method: Method, order: Order, engine: Engine, able: list[RecipeCard], recorder: Recorder, tell: Tell) -> None:
    course = Course()
    sampling = replace(order.sampling, conditions=replace(order.sampling.conditions, modes=order.modes))
    if method == "role-true":
        if sampling.conditions.cold_l2 and engine.device.type != "cuda":
            recorder.add(Problem("l2", "the L2 cache is only overwritten on a GPU; this run's caches were left alone"))
            sampling = replace(sampling, conditions=replace(sampling.conditions, cold_l2=False))
        times = benchmark(engine, able, order.cards[0].name, order.gemms, order.seed, tell, sampling, course)
        recorder.add(*times)
        recorder.add(_run_fact(order, sampling, course))
        return
    if not isinstance(engine, TransformerEngineEngine):
        recorder.add(Problem("te-tutorial", f"the published method needs Transformer Engine: {engine.why}"))
        return
    begin = datetime.now()
    recorder.add(*te_tutorial.times(engine, able, order.gemms, order.modes, order.warm_ups, order.iterations, tell))
    seconds = (datetime.now() - begin).total_seconds()
    recorder.add(GemmRun(method, 1, seconds, "iterations", layers=order.layers, iterations=order.iterations))


def _run_fact(order: Order, sampling: Sampling, course: Course) -> GemmRun:
    return GemmRun(
        method="role-true",
        rounds=course.rounds,
        seconds=course.seconds,
        stopped=course.stopped,
        widest=course.widest,
        precision=sampling.precision,
        budget_s=sampling.budget_s,
        cold_l2=sampling.conditions.cold_l2,
        accumulate=sampling.conditions.accumulate,
        layers=order.layers,
    )


def _sort_out(cards: Sequence[RecipeCard], engine: Engine) -> tuple[list[RecipeCard], list[tuple[RecipeCard, NotRun]]]:
    able: list[RecipeCard] = []
    refused: list[tuple[RecipeCard, NotRun]] = []
    for card in cards:
        reason = engine.refusal(card) or engine.probe(card)
        if reason is None:
            able.append(card)
        else:
            refused.append((card, reason))
    return able, refused


def _warm_up(device: torch.device) -> None:
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    elapsed = 0.0
    while elapsed < WARM_UP_S * 1e3:
        for _ in range(50):
            a @ a
        last.record()
        torch.cuda.synchronize(device)
        elapsed = first.elapsed_time(last)


def times_of(recorder: Recorder) -> list[GemmTime]:
    """All timings of a run."""
    return recorder.snapshot().of(GemmTime)


def three_roles(shapes: Iterable[tuple[str, int, int, int, int]]) -> tuple[Gemm, ...]:
    """The three GEMMs of each (operation, m, k, n, calls), for shapes that were named one by one."""
    return tuple(
        Gemm(operation, role, m, k, n, calls, "Linear", quantizable=True)
        for operation, m, k, n, calls in shapes
        for role in recording.ROLES
    )
