"""Recordings of `lowprec gemm` with known answers: CodonFM 5B on an H200 and a B300, as published, and changed copies.

Published are role sums (te-tutorial) and layers' sums (role-true), in ms; they are shared out over the operations or
the roles by their floating-point operations, which leaves every published sum as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lowprec_callback.analyze.model_config import ModelConfig
from lowprec_callback.analyze.shapes import LayerGemm, as_facts, layer_gemms
from lowprec_callback.recording import (
    ROLES,
    Card,
    Environment,
    Fact,
    GemmRun,
    GemmTime,
    Header,
    Model,
    Recording,
    Refusal,
)
from tests.analyze.recordings import BF16_CARD, BLOCK_CARD, CURRENT_CARD, DELAYED_CARD, NVFP4_CARD

MXFP8_CARD = Card("mxfp8", "MXFP8", ("e4m3", "e4m3"), ("e4m3", "e4m3"), ("e4m3", "e4m3"), "mx-32")
CODONFM = ModelConfig(4096, 16384, 32, 24, 31, 512)
NAME = "model: hidden 4096, 24 layers, 15872 tokens (31 x 512)"

TUTORIAL_H200 = {
    "bf16": (9.500, 9.725, 9.491),
    "fp8_delayed": (5.544, 5.589, 5.730),
    "fp8_current": (5.805, 6.144, 6.225),
    "fp8_block": (6.621, 6.846, 6.844),
}
"""The published script on an H200, autocast: fprop, dgrad and wgrad sums of a layer."""

ROLE_TRUE_H200 = {
    "bf16": (6.345, 2.064, 8.798, 8.683),
    "fp8_delayed": (3.677, 1.292, 4.936, 5.027),
    "fp8_current": (3.908, 1.398, 5.149, 5.183),
    "fp8_block": (4.590, 1.607, 6.197, 6.258),
}
"""QKV, attention out, MLP up and MLP down, all roles, forward and backward on an H200."""

TUTORIAL_B300 = {
    "bf16": (1.071, 0.307, 1.393, 1.426),
    "fp8_current": (0.605, 0.317, 0.924, 1.033),
    "fp8_delayed": (0.503, 0.231, 0.850, 0.901),
    "mxfp8": (0.579, 0.269, 0.924, 1.076),
    "nvfp4": (0.392, 0.256, 0.635, 0.649),
}
"""QKV, attention out, MLP up and MLP down, fprop only, autocast on a B300."""

NEEDS_10 = "compute capability 9.0, needs 10.0"
SPREAD = (0.996, 1.0, 1.004, 0.998, 1.002, 1.0)
"""Samples around a median of 1."""


def h200(*facts: Fact) -> list[Fact]:
    """The beginning of each Recording."""
    return [
        Header(1, "0.1.0", "2025-06-07T12:00:00+00:00"),
        Environment(
            "NVIDIA H200",
            "cuda",
            (9, 0),
            versions={"torch": "2.11.0+cu130", "transformer_engine": "2.20.2"},
            facts={"highest sm clock": "1980 MHz"},
        ),
        Model(NAME, "transformer_engine", "Transformer Engine is installed and there is a CUDA device", 0, 0),
        *facts,
    ]


def cards(*more: Card) -> list[Fact]:
    return [BF16_CARD, DELAYED_CARD, CURRENT_CARD, BLOCK_CARD, *more]


def role_sums(recipe: str, sums: Sequence[float], gemms: Iterable[LayerGemm]) -> list[GemmTime]:
    """te-tutorial, autocast: a role's sum shared out over the operations; one sample, as that method takes."""
    chosen = [gemm for gemm in gemms if gemm.quantizable]
    whole = sum(gemm.k * gemm.n for gemm in chosen)
    return [
        GemmTime(
            recipe,
            role,
            gemm.m,
            gemm.k,
            gemm.n,
            "autocast",
            (total * gemm.k * gemm.n / whole,),
            calls_per_sample=30,
            method="te-tutorial",
        )
        for role, total in zip(ROLES, sums, strict=True)
        for gemm in chosen
    ]


def operation_sums(
    recipe: str, sums: Sequence[float], gemms: Sequence[LayerGemm], quantization: float = 0.0
) -> list[GemmTime]:
    """role-true: an operation's time shared out evenly over the roles; without its quantization in the other mode."""
    found = []
    for gemm, total in zip(gemms, sums, strict=True):
        for role in ROLES:
            whole = tuple(total / 3 * factor for factor in SPREAD)
            alone = tuple(sample * (1 - quantization) for sample in whole)
            own = tuple(a - b for a, b in zip(whole, alone, strict=True))
            place = (recipe, role, gemm.m, gemm.k, gemm.n)
            found.append(GemmTime(*place, "autocast", whole, 8, 0.1, quantize_ms=own, family=gemm.family))
            found.append(GemmTime(*place, "kernel", alone, 8, 0.1, family=gemm.family))
    return found


QUANTIZATION = {"bf16": 0.0, "fp8_delayed": 0.10, "fp8_current": 0.14, "fp8_block": 0.12}
"""Shares of each autocast time; made up."""

ROLE_TRUE_RUN = GemmRun("role-true", 4, 31.4, "precise", 0.0081, 0.01, 120.0, layers=24)
TUTORIAL_RUN = GemmRun("te-tutorial", 1, 9.2, "iterations", layers=24, iterations=30)
REFUSED = (Refusal("mxfp8", NEEDS_10, "card"), Refusal("nvfp4", NEEDS_10, "card"))


def role_true(config: ModelConfig = CODONFM, run: GemmRun = ROLE_TRUE_RUN) -> Recording:
    """Both modes; with a vocabulary, also the LM head, in BF16 only, 9 ms in each role."""
    gemms = layer_gemms(config)
    facts = h200(*cards(MXFP8_CARD, NVFP4_CARD), *REFUSED, *as_facts(gemms))
    for recipe, sums in ROLE_TRUE_H200.items():
        facts += operation_sums(recipe, sums, gemms[:4], QUANTIZATION[recipe])
    for head in gemms[4:]:
        facts += operation_sums("bf16", [27.0], [head])
    return Recording.from_facts([*facts, run])


def te_tutorial() -> Recording:
    """The tutorial's command line: the published method with quantization."""
    gemms = layer_gemms(CODONFM)
    facts = h200(*cards(), *as_facts(gemms))
    for recipe, sums in TUTORIAL_H200.items():
        facts += role_sums(recipe, sums, gemms)
    return Recording.from_facts([*facts, TUTORIAL_RUN])


def both() -> Recording:
    """`--method both`."""
    times = [fact for fact in te_tutorial() if isinstance(fact, GemmTime | GemmRun)]
    return Recording.from_facts([*role_true(), *times])


def b300() -> Recording:
    """fprop alone, under every recipe: where NVFP4 stops to pay."""
    gemms = layer_gemms(CODONFM)
    facts = [
        Environment("NVIDIA B300 SXM6 AC", "cuda", (10, 3)),
        *(BF16_CARD, CURRENT_CARD, DELAYED_CARD, MXFP8_CARD, NVFP4_CARD),
        *as_facts(gemms, roles=["fprop"]),
    ]
    for recipe, sums in TUTORIAL_B300.items():
        facts += [
            GemmTime(recipe, "fprop", gemm.m, gemm.k, gemm.n, "autocast", (ms,), method="te-tutorial")
            for gemm, ms in zip(gemms, sums, strict=True)
        ]
    return Recording.from_facts([*facts, TUTORIAL_RUN])


def changed(recording: Recording, change: Callable[[GemmTime], GemmTime]) -> Recording:
    """A copy with changed times."""
    return Recording.from_facts([change(fact) if isinstance(fact, GemmTime) else fact for fact in recording])


def failed(recording: Recording, why: str = "out of memory") -> Recording:
    """MLP down fails in fp8_block: all its roles, in both modes."""

    def fail(time: GemmTime) -> GemmTime:
        hit = time.recipe == "fp8_block" and (time.k, time.n) == (16384, 4096)
        return replace(time, samples_ms=(), quantize_ms=(), failure=why) if hit else time

    return changed(recording, fail)


def launch_bound(recording: Recording) -> Recording:
    """Every GEMM of attention out is, outside BF16."""
    return changed(
        recording,
        lambda time: replace(time, launch_bound=True) if time.n == time.k and time.recipe != "bf16" else time,
    )


def too_fast(recording: Recording, recipe: str = "fp8_delayed") -> Recording:
    """wgrad of MLP down takes a tenth of its time in one recipe: that no H200 can."""

    def hasten(time: GemmTime) -> GemmTime:
        hit = time.recipe == recipe and time.role == "wgrad" and (time.k, time.n) == (16384, 4096)
        if not hit:
            return time
        samples, quantize = ([ms / 10 for ms in part] for part in (time.samples_ms, time.quantize_ms))
        return replace(time, samples_ms=tuple(samples), quantize_ms=tuple(quantize))

    return changed(recording, hasten)


def unknown_gpu() -> Recording:
    """A GPU that the table of peaks does not have."""
    return Recording.from_facts(
        [replace(fact, device="NVIDIA X9") if isinstance(fact, Environment) else fact for fact in role_true()]
    )


def listed() -> Recording:
    """Two shapes that are no model's."""
    gemms = [LayerGemm(f"{n}x{n}x{n}", n, n, n, per_layer=False) for n in (1024, 4096)]
    facts = h200(BF16_CARD, DELAYED_CARD, *as_facts(gemms))
    for recipe, sums in {"bf16": (0.018, 0.606), "fp8_delayed": (0.024, 0.363)}.items():
        facts += operation_sums(recipe, sums, gemms, 0.2 if recipe != "bf16" else 0.0)
    return Recording.from_facts([*facts, replace(ROLE_TRUE_RUN, layers=1)])


def unlike_layers() -> Recording:
    """A mixture of experts with one ordinary MLP: no two kinds of layer take the same time."""
    config = replace(CODONFM, num_experts=4, experts_per_token=1, moe_intermediate_size=1024, num_dense_layers=1)
    gemms = layer_gemms(config)
    facts = h200(BF16_CARD, *as_facts(gemms))
    facts += operation_sums("bf16", [30.0] * len(gemms), gemms)
    return Recording.from_facts([*facts, ROLE_TRUE_RUN])
