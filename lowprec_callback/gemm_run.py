"""Running the shape-level benchmark without a model: the shapes come from a config, a list, or an old Recording."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import nn

import lowprec_callback
from lowprec_callback import gemm_output, recording
from lowprec_callback.analyze.alignment import check_alignment
from lowprec_callback.analyze.gemm_table import GemmTable
from lowprec_callback.analyze.gemms import Benchmark, clocks_of
from lowprec_callback.engines import te_tutorial
from lowprec_callback.engines.base import Engine
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, load
from lowprec_callback.files import why
from lowprec_callback.gemm_plan import GemmPlan
from lowprec_callback.measure.device import ClockReader, environment
from lowprec_callback.measure.gemms import Course, Sampling, benchmark
from lowprec_callback.measure.layer_bench import Conditions
from lowprec_callback.recipes import RecipeCard, RecipeError
from lowprec_callback.recording import (
    End,
    Environment,
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
from lowprec_callback.show.gemm_page import GemmPage
from lowprec_callback.sweep.progress import make_progress

MOST_ROUNDS = 1000
"""Rounds at most: the precision or the budget ends the sampling long before."""

BESIDE = "torch.matmul"
"""Stands where a recipe's name stands, for the baseline's products made by PyTorch alone."""

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Order:
    """What to time, and how."""

    name: str
    gemms: tuple[Gemm, ...]
    cards: tuple[RecipeCard, ...]
    """The baseline first."""
    asked: bool = False
    """Whether the recipes were asked for by name: then the baseline alone is not worth running."""
    layers: int = 1
    methods: tuple[Method, ...] = ("role-true",)
    modes: tuple[Mode, ...] = ("kernel", "autocast")
    sampling: Sampling = field(default_factory=Sampling)
    warm_ups: int = 10
    iterations: int = 100
    """Of the published method."""
    warm_up_s: float = 1.0
    """Seconds of products before the first sample: a cold GPU runs faster than one that has reached its power limit."""
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
    recorder = Recorder(folder / recording.FILE_NAME, lowprec_callback.__version__)
    device_type: Literal["cuda", "cpu"] = "cuda" if engine.device.type == "cuda" else "cpu"
    recorder.add(environment(device_type, load().version))
    recorder.add(Model(order.name, engine.name, engine.why, parameters=0, parameter_bytes=0))
    able, refused = engine.sort_out(order.cards)
    baseline = order.cards[0]
    recorder.add(*(card.to_fact(card is baseline) for card in order.cards))
    recorder.add(*(Refusal(card.name, reason.reason, reason.source) for card, reason in refused))
    recorder.add(*order.gemms)
    clocks = ClockReader() if device_type == "cuda" else None
    try:
        if baseline not in able:
            recorder.add(End("failed", f"the baseline {baseline.name} cannot run here"))
            return recorder
        if order.asked and len(able) == 1 < len(order.cards):
            reasons = "; ".join(f"{card.name}: {reason.reason}" for card, reason in refused)
            recorder.add(End("failed", f"none of the recipes that were asked for can run here. {reasons}"))
            return recorder
        _warm_up(engine.device, order.warm_up_s)
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
        recorder.add(*_beside(order, engine, sampling, tell))
        return
    if not isinstance(engine, TransformerEngineEngine):
        recorder.add(Problem("te-tutorial", f"the published method needs Transformer Engine: {engine.why}"))
        return
    begin = datetime.now()
    recorder.add(*te_tutorial.times(engine, able, order.gemms, order.modes, order.warm_ups, order.iterations, tell))
    seconds = (datetime.now() - begin).total_seconds()
    recorder.add(GemmRun(method, 1, seconds, "iterations", layers=order.layers, iterations=order.iterations))


def _beside(order: Order, engine: Engine, sampling: Sampling, tell: Tell) -> list[GemmTime]:
    """The baseline's products by PyTorch alone, without Transformer Engine, as the recipe `BESIDE`."""
    baseline = order.cards[0]
    if not isinstance(engine, TransformerEngineEngine) or baseline.name != "bf16" or "kernel" not in order.modes:
        return []
    plain = PlainTorchEngine(nn.Linear(1, 1, dtype=torch.bfloat16), engine.device, "torch.matmul beside te.Linear")
    kernel = replace(sampling, conditions=replace(sampling.conditions, modes=("kernel",), accumulate=1))
    gemms = [gemm for gemm in order.gemms if gemm.groups == 1]
    times = benchmark(plain, [baseline], baseline.name, gemms, order.seed, tell, kernel)
    return [replace(time, recipe=BESIDE) for time in times]


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


def _warm_up(device: torch.device, seconds: float) -> None:
    if device.type != "cuda" or seconds <= 0:
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    elapsed = 0.0
    while elapsed < seconds * 1e3:
        for _ in range(50):
            a @ a
        last.record()
        torch.cuda.synchronize(device)
        elapsed = first.elapsed_time(last)


def run(plan: GemmPlan) -> int:
    """Carry out a plan of `lowprec gemm`: announce, time, show, write. Returns the exit code.

    0: done. 1: nothing could be timed. 2: the plan cannot be met on this machine.
    """
    device = _device(plan.device)
    if isinstance(device, str):
        print(f"lowprec gemm: {device}", file=sys.stderr)
        return 2
    engine = engine_for_shapes(device)
    try:
        cards = plan.cards(engine.name, engine.default_baseline)
    except RecipeError as error:
        print(f"lowprec gemm: {error}", file=sys.stderr)
        return 2
    order = Order(
        name=plan.name,
        gemms=plan.gemms,
        cards=tuple(cards),
        asked=plan.recipes is not None,
        layers=plan.layers,
        methods=plan.methods,
        modes=plan.modes,
        sampling=Sampling(
            rounds=MOST_ROUNDS,
            precision=plan.precision,
            budget_s=plan.budget_s,
            conditions=Conditions(accumulate=plan.accumulate, cold_l2=plan.cold_l2),
        ),
        warm_ups=plan.warm_ups,
        iterations=plan.iterations,
        warm_up_s=plan.gpu_warm_up_s,
        seed=plan.seed,
    )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    misfits = [str(row) for row in check_alignment(plan.operations, cards, capability)]
    for line in (*plan.notes, *misfits):
        print(f"lowprec gemm: {line}", file=sys.stderr)
    progress = make_progress(True)
    folder = Path(tempfile.mkdtemp(prefix="lowprec-gemm-"))
    try:
        recorder = execute(order, engine, folder, progress.update if progress else lambda *_: None)
    finally:
        if progress:
            progress.close()
    facts = recorder.snapshot()
    end = facts.last(End)
    if end is not None and end.status == "failed" and not facts.of(GemmTime):
        print(f"lowprec gemm: {end.reason}", file=sys.stderr)
        return 2
    if recorder.lost:
        print(f"lowprec gemm: {recorder.lost}", file=sys.stderr)
    return _show(plan, facts, misfits)


def _show(plan: GemmPlan, facts: recording.Recording, misfits: list[str]) -> int:
    """The page on standard output, and the files that were asked for."""
    made = gemm_output.tables(facts)
    place = facts.last(Environment)
    remarks = [
        *_clock(facts),
        *_torch_beside(facts, made),
        *gemm_output.rates(facts, made),
        *_overcount(plan),
        *misfits,
    ]
    remarks += [f"{problem.where}: {problem.message}" for problem in facts.of(Problem)]
    remarks += [f"{r.recipe} not run: {r.reason}" for r in facts.of(Refusal)] if not made else []
    remarks.append(f"Recording {facts.path or 'not on disk'}")
    Console().print(GemmPage(plan.name, made, place.device if place else "", remarks))
    sys.stdout.flush()  # it is read before what follows on standard error
    written = [
        _written(plan.json, lambda path: gemm_output.write_json(path, made, facts)),
        _written(plan.csv, lambda path: gemm_output.write_csv(path, made)),
        _written(plan.plot, lambda path: gemm_output.write_plot(path, facts)),
    ]
    if not all(written):
        return 2
    return 0 if any(time.samples_ms for time in facts.of(GemmTime)) else 1


def _written(path: Path | None, write: Callable[[Path], str | None]) -> bool:
    """Whether a file was written that was asked for, or has nothing to show; if not, the reason is said."""
    try:
        if path and (reason := write(path)):
            print(f"lowprec gemm: no plot: {reason}", file=sys.stderr)
    except OSError as error:
        print(f"lowprec gemm: {path}: cannot be written ({why(error)})", file=sys.stderr)
        return False
    return True


def _clock(facts: recording.Recording) -> list[str]:
    """The clock that the times are given at."""
    clocks = sorted(clocks_of(facts.of(GemmTime), "role-true"))
    if not clocks:
        return []
    return [
        f"role-true: times are given at an SM clock of {statistics.median(clocks):.0f} MHz, the median over all "
        f"samples; they ran at {clocks[0]:.0f} to {clocks[-1]:.0f} MHz, each measured beside its sample"
    ]


def _torch_beside(facts: recording.Recording, made: list[GemmTable]) -> list[str]:
    """What a layer's products take without Transformer Engine."""
    table = next((table for table in made if (table.method, table.mode) == ("role-true", "kernel")), None)
    bench = Benchmark(facts.lines(GemmTime))
    if table is None or not bench.has(BESIDE):
        return []
    layer = {(cell.operation, cell.role) for cell in table.cells if cell.in_layer}
    times = [bench.figure(BESIDE, g, "kernel") for g in facts.of(Gemm) if (g.module, g.role) in layer]
    missing = next((time.reason for time in times if time.value is None), None)
    own, ours = sum(time.value or 0.0 for time in times), table.layer(table.baseline)
    if missing or not times:
        return [f"{BESIDE} beside te.Linear: no sum over a layer, because {missing or 'nothing was timed'}"]
    beside = f" (te.Linear's, GEMM only: {ours.value:.4g} ms)" if ours.value is not None else ""
    return [f"{BESIDE}: a layer's products take {own:.4g} ms by PyTorch alone in {table.baseline}{beside}"]


def _overcount(plan: GemmPlan) -> list[str]:
    """In one line: how many times as much the published method quantizes as training does."""
    if "te-tutorial" not in plan.methods:
        return []
    layers = [gemm for gemm in plan.operations if gemm.quantizable and gemm.groups == 1]
    counts = [te_tutorial.copies_quantized(gemm.m, gemm.k, gemm.n) for gemm in layers]
    published, training = (sum(side) for side in zip(*counts, strict=True)) if counts else (0, 0)
    if not training:
        return []
    return [
        f"te-tutorial quantizes {published / 1e6:,.0f} million elements a layer where training quantizes "
        f"{training / 1e6:,.0f}: {published / training:.2f} times as many (row- and column-wise copies counted)"
    ]


def _device(asked: str) -> torch.device | str:
    """The device, or why it cannot be used."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.startswith("cuda") and not torch.cuda.is_available():
        return f"--device {asked}: this machine has no CUDA device that torch can use"
    return torch.device(asked)
