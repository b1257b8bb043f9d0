"""The signature book's source: which kernels a GEMM of known precision launches, for each shape, role and recipe.

The benchmark chose the precision, so a kernel that it launches carries it, whatever its name says or leaves open. One
call of each (recipe, shape) is made under one profiler session, apart from all timing; the kernels are those that were
launched inside the call into the GEMM library, told by a range of ours around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowprec_callback.engines.base import Engine
from lowprec_callback.measure.dispatch import Sizes
from lowprec_callback.measure.gemms import jobs_of
from lowprec_callback.measure.layer_bench import Shape, splits_of
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.measure.steps import synchronize
from lowprec_callback.measure.trace import Tracer, gemm_range
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import Gemm, GemmTime, Role

Kernels = dict[tuple[str, Role, int, int, int, str], tuple[str, ...]]
"""(recipe, role, m, k, n, family) to the names of the kernels, each once, in order."""


def with_kernels(
    engine: Engine, cards: list[RecipeCard], baseline: str, gemms: Iterable[Gemm], times: Iterable[GemmTime]
) -> Iterator[GemmTime]:
    """The benchmark's facts with `GemmTime.kernels` filled in; as they are on a CPU, which launches none.

    Args:
        engine, cards, baseline, gemms: as `gemms.benchmark` got them.
        times: what it gave.
    """
    facts = list(times)
    failed = {(fact.recipe, fact.m, fact.k, fact.n, fact.family) for fact in facts if fact.failure}
    jobs = [
        (card, shape)
        for card, shape in jobs_of(gemms, cards, baseline)
        if (card.name, shape.m, shape.k, shape.n, shape.family) not in failed
    ]
    found = signatures(engine, jobs) if engine.device.type == "cuda" and jobs else {}
    for fact in facts:
        key = (fact.recipe, fact.role, fact.m, fact.k, fact.n, fact.family)
        yield replace(fact, kernels=found.get(key, ())) if not fact.failure else fact


def signatures(engine: Engine, jobs: list[tuple[RecipeCard, Shape]]) -> Kernels:
    """Make one call of each job under a profiler, and read which kernels it launched. A job that fails has none."""
    tracer = Tracer(engine.device)
    tracer.start()
    try:
        # A new session can lose kernels at its start.
        warm = torch.ones(64, 64, device=engine.device)
        (warm @ warm).sum().item()
        for index, (card, shape) in enumerate(jobs):
            _call(engine, card, shape, str(index))
        synchronize(engine.device)
    finally:
        tracer.stop()
    found: Kernels = {}
    for (label, role), names in tracer.gemm_kernels().items():
        card, shape = jobs[int(label)]
        key = (card.name, role, shape.m, shape.k, shape.n, shape.family)
        # Shapes that differ in their bias alone have one key: the kernels of both.
        found[key] = tuple(dict.fromkeys((*found.get(key, ()), *names)))
    return found


def _call(engine: Engine, card: RecipeCard, shape: Shape, label: str) -> None:
    """One forward and backward of one layer, its GEMM calls inside ranges that carry the label."""
    try:
        with engine.own_state(), torch.random.fork_rng(devices=_devices(engine)):
            if shape.quantizable and engine.name == "transformer_engine":
                _library_call(engine, card, shape, label)
            else:
                _plain_call(engine, card, shape, label)
    except Exception:  # the benchmark has told why such a shape fails; a book without it is the poorer, no more
        synchronize(engine.device)


def _devices(engine: Engine) -> list[torch.device]:
    return [engine.device] if engine.device.type == "cuda" else []


def _library_call(engine: Engine, card: RecipeCard, shape: Shape, label: str) -> None:
    def around(_scope: Scope | None, role: Role, _sizes: Sizes) -> AbstractContextManager[Any]:
        return gemm_range(label, role)

    layer = engine.make_linear(shape.k, shape.n, shape.bias, shape.groups)
    dtype = next(layer.parameters()).dtype
    x = torch.randn(shape.m, shape.k, device=engine.device, dtype=dtype, requires_grad=True)
    with engine.watch(lambda: None, around=around):
        with engine.region(card):
            y = layer(x, *splits_of(shape.m, shape.groups))
        y.backward(torch.randn_like(y))


def _plain_call(engine: Engine, card: RecipeCard, shape: Shape, label: str) -> None:
    dtype = engine.dtype()
    x = torch.randn(shape.m, shape.k, device=engine.device, dtype=dtype)
    w = torch.randn(shape.n, shape.k, device=engine.device, dtype=dtype)
    b = torch.zeros(shape.n, device=engine.device, dtype=dtype) if shape.bias else None
    with torch.no_grad(), engine.region(card) if shape.quantizable else nullcontext():
        with gemm_range(label, "fprop"):
            y = nn.functional.linear(x, w, b)
        x, w = x.to(y.dtype), w.to(y.dtype)
        with gemm_range(label, "dgrad"):
            torch.mm(y, w)
        with gemm_range(label, "wgrad"):
            torch.mm(y.t(), x)
