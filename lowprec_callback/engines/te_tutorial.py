"""Transformer Engine's published GEMM benchmark, reproduced, so that its tables can be compared with ours.

The method of TE's `benchmarks/gemm/benchmark_gemm.py` (since v2.17): each of a layer's twelve GEMMs is timed as the
*forward* product of its own sizes, rows x length x columns, many times back to back between two events.

autocast
    BF16 is `torch.matmul`. A recipe is the forward of a `te.Linear(length, columns, bias=False)` on an input that
    needs no gradient, inside one region. So both operands of every GEMM are quantized at every call, no gradient
    quantizer ever runs, and delayed scaling's update is not timed.
kernel ("pre-quantized")
    One `generic_gemm` in the layout NT, whatever the role, on operands from TE's quantizers with their defaults.
    Delayed scaling and block scaling are left out there.

Only forward calls are timed, so the whole of it says how the published numbers came about, not what training costs;
`layer_bench` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, load
from lowprec_callback.failures import in_words
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import Gemm, GemmTime, Mode, role_shape

QUANTIZERS = {
    "tensor-current": "Float8CurrentScalingQuantizer",
    "mx-32": "MXFP8Quantizer",
    "nvfp4-16": "NVFP4Quantizer",
}
"""TE's quantizer classes by scaling; the script builds them with their defaults."""

LEFT_OUT = {
    "tensor-delayed": "the published method leaves delayed scaling out when pre-quantized",
    "block-128": "the published method leaves block scaling out when pre-quantized: its quantizers scale both operands "
    "in blocks of 128 x 128, and the library multiplies no two of these",
}
"""Scalings that have no pre-quantized time there, and why."""


ORDER = ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
"""The script runs every recipe on one shape before the next shape, always in this order; what ran before sets the
clock that a GPU at its power limit starts at."""


def copies_quantized(m: int, k: int, n: int) -> tuple[int, int]:
    """(elements that the published method writes, elements that training writes) for one layer's three GEMMs.

    The input of each timed forward is written row-wise and column-wise, its weight row-wise only. With X = M x K,
    W = N x K and dY = M x N, the three GEMMs write 2 MK + NK, 2 MN + NK and 2 MK + MN; training writes each of X, W
    and dY both ways, once.
    """
    published = 4 * m * k + 3 * m * n + 2 * k * n
    return published, 2 * (m * k + m * n + k * n)


class _LeftOutError(ValueError):
    """The published method does not time this recipe in this mode."""


def times(
    engine: TransformerEngineEngine,
    cards: list[RecipeCard],
    gemms: Iterable[Gemm],
    modes: Iterable[Mode],
    warm_ups: int,
    iterations: int,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[GemmTime]:
    """Time every GEMM by the published method, one sample each: that is all it takes."""
    timed = list(dict.fromkeys((g.role, g.m, g.k, g.n) for g in gemms if g.groups == 1 and g.quantizable))
    in_order = sorted(cards, key=lambda card: ORDER.index(card.name) if card.name in ORDER else len(ORDER))
    jobs = [(card, mode, gemm) for mode in modes for gemm in timed for card in in_order]
    for index, (card, mode, (role, m, k, n)) in enumerate(jobs):
        progress(f"te-tutorial {card.name} {role} {m}x{k}x{n}", index, len(jobs))
        samples: tuple[float, ...] = ()
        failure: str | None = None
        try:
            with engine.own_state():
                samples = (_time(engine, card, mode, role_shape(role, m, k, n), warm_ups, iterations),)
        except _LeftOutError as error:
            failure = str(error)
        except Exception as error:
            failure = in_words(error)
        yield GemmTime(
            recipe=card.name,
            role=role,
            m=m,
            k=k,
            n=n,
            mode=mode,
            samples_ms=samples,
            calls_per_sample=iterations,
            failure=failure,
            method="te-tutorial",
        )


def _time(
    engine: TransformerEngineEngine,
    card: RecipeCard,
    mode: Mode,
    product: tuple[int, int, int],
    warm_ups: int,
    iterations: int,
) -> float:
    """Milliseconds of one call: one pair of events around `iterations` calls, a leading call before them."""
    region, call = _call(engine, card, mode, product)
    with torch.no_grad() if mode == "kernel" else nullcontext(), region:
        for _ in range(warm_ups):
            call()
        torch.cuda.synchronize()
        call()  # the script's leading kernel: it hides the launch of those that follow
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(iterations):
            call()
        last.record()
        torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / iterations


def _call(
    engine: TransformerEngineEngine, card: RecipeCard, mode: Mode, product: tuple[int, int, int]
) -> tuple[AbstractContextManager[Any], Callable[[], Any]]:
    rows, length, columns = product
    te = load().te
    options: dict[str, Any] = {"device": engine.device, "dtype": torch.bfloat16}
    if card.scaling == "none":
        a, b = torch.randn(rows, length, **options), torch.randn(length, columns, **options)
        return nullcontext(), lambda: torch.matmul(a, b)
    if mode == "autocast":
        layer = te.Linear(length, columns, bias=False, params_dtype=torch.bfloat16, device=engine.device)
        x = torch.randn(rows, length, **options)
        return engine.region(card), lambda: layer(x)
    if card.scaling not in QUANTIZERS:
        raise _LeftOutError(LEFT_OUT.get(card.scaling, f"the published method has no quantizer for {card.scaling}"))
    quantizer = _quantizer(te, card, engine.device)
    first = quantizer(torch.randn(length, rows, **options))
    second = quantizer(torch.randn(length, columns, **options))
    general_gemm = te.cpp_extensions.general_gemm
    return nullcontext(), lambda: general_gemm(first, second, out_dtype=torch.bfloat16, layout="NT")


def _quantizer(te: Any, card: RecipeCard, device: torch.device) -> Any:
    cls = getattr(te, QUANTIZERS[card.scaling])
    if card.scaling == "nvfp4-16":
        return cls()
    e4m3 = load().tex.DType.kFloat8E4M3
    if card.scaling == "tensor-current":
        return cls(e4m3, device=device)
    return cls(e4m3, rowwise=True, columnwise=True)
