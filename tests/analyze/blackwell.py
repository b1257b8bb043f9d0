"""Recordings as a Blackwell GPU would make them: real kernel names, TE's operand classes, bytes by hand.

No such GPU was at hand. Kernel names are those of public profiles and of the libraries (`kernel_names.tsv`); classes
are TE's; bytes a value are those of its formats, written down here once more so that nothing is checked against itself.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lowprec_callback.recording import (
    ROLES,
    Card,
    Dispatch,
    End,
    Environment,
    Fact,
    Memory,
    Model,
    Operand,
    Plan,
    Recording,
    Restored,
    Role,
    Stored,
)

from .recordings import (
    ADAM,
    BF16_CARD,
    BLOCK_CARD,
    FUSED_ATTENTION,
    HEADER,
    NVFP4_CARD,
    Kernel,
    Linear,
    gemms,
    te_linears,
    timed,
    trace,
)

MXFP8_CARD = Card("mxfp8", "MXFP8", ("e4m3", "e4m3"), ("e4m3", "e4m3"), ("e4m3", "e4m3"), "mx-32")
CARDS = {card.recipe: card for card in (BF16_CARD, MXFP8_CARD, NVFP4_CARD, BLOCK_CARD)}
B300 = Environment("NVIDIA B300", "cuda", (10, 3), {"torch": "2.11.0", "transformer_engine": "2.20.2"})

LINEARS = te_linears(layers=4, tokens=8192, hidden=1024)
"""Sizes are multiples of 512: no scale is padded, and the bytes a value are exact."""

TABLE = Path(__file__).parents[1] / "data" / "kernel_names.tsv"


def names(*parts: str, precision: str = "") -> list[str]:
    """Kernel names of the table that hold all these parts, of this GEMM precision."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = [
        row["kernel_name"]
        for row in rows
        if all(part in row["kernel_name"] for part in parts)
        and (row["gemm_input_precision_or_dash"] == precision or not precision)
    ]
    assert found, f"the table has no name with {parts} of precision {precision!r}"
    return found


@dataclass(frozen=True)
class Format:
    """What a recipe's GEMMs really ran in."""

    form: str
    scaling: str
    storage: str
    quantizer: str | None
    data: float
    """Bytes of data a value, one copy."""
    scales: float
    """Bytes of scales a value, one copy; of weights under block scaling there are 128 times fewer."""
    gemm: str
    """The GEMM's kernel."""
    helpers: tuple[str, ...] = ()
    """Kernels beside each GEMM: casts, amax, swizzle."""


BF16 = Format("bf16", "none", "Tensor", None, 2.0, 0.0, names("nvjet_sm100_tst_", precision="bf16")[-1])
MXFP8 = Format(
    "e4m3",
    "mx-32",
    "MXFP8TensorStorage",
    "MXFP8Quantizer",
    1.0,
    1 / 32,
    names("nvjet_sm100_qqtst", "Avec32UE8M0", precision="mxfp8:e4m3")[0],
    (names("quantize_mxfp8_kernel<")[0],),
)
NVFP4 = Format(
    "e2m1",
    "nvfp4-16",
    "NVFP4TensorStorage",
    "NVFP4Quantizer",
    0.5,
    1 / 16,
    names("nvjet_sm103_oo", "Avec16UE4M3", precision="fp4:nvfp4")[0],
    (
        names("HadamardAmaxTmaKernel<")[0],
        names("row_col_rht_gemm_device")[0],
        names("quantize_transpose_nvfp4_2D_kernel<")[0],
    ),
)
NVFP4_CUTLASS = replace(NVFP4, gemm=names("cutlass3x_sm100", "ue4m3xf4_ue4m3xf4", precision="fp4:nvfp4")[0])
NVFP4_UNFUSED = replace(
    NVFP4,
    helpers=(
        names("HadamardAmaxTmaKernel<")[0],
        names("HadamardTransformKernel<")[0],
        names("quantize_transpose_nvfp4_tuned_1D_kernel<")[0],
    ),
)
BLOCK = Format(
    "e4m3",
    "block-128",
    "Float8BlockwiseQTensorStorage",
    "Float8BlockQuantizer",
    1.0,
    4 / 128,
    MXFP8.gemm,
    (names("swizzle_block_scaling_1d_to_mxfp8")[0],),
)
"""On Blackwell, FP8 block scaling: its own operands, MXFP8's kernel."""


def operand(ran: Format, values: int, copies: int, *, weight: bool = False) -> Operand:
    """An operand with one or both copies (of BF16, one buffer serves both)."""
    scales = ran.scales / 128 if weight and ran.scaling == "block-128" else ran.scales
    data = round(values * ran.data)
    amax = 4 * copies if ran.scaling == "nvfp4-16" else 0
    stored = Stored(data, data if copies == 2 else 0, round(copies * values * scales) + amax)
    if ran.scaling == "none":
        return Operand(ran.storage, ran.form, "none", stored=Stored(data, 0, 0, parameter=weight))
    return Operand(ran.storage, ran.form, ran.scaling, ran.quantizer, stored=stored)


def dispatches(recipe: str, ran: Format, linears: Iterable[Linear] = LINEARS) -> list[Dispatch]:
    """Every GEMM with operands of one format; a layer that no recipe reaches in BF16."""
    return [dispatch(recipe, ran if lin.quantizable else BF16, lin, role) for lin in linears for role in ROLES]


def dispatch(recipe: str, ran: Format, lin: Linear, role: Role) -> Dispatch:
    weight = operand(ran, lin.n * lin.k, 2, weight=True)
    # Until fprop both copies of the input are there. LayerNormMLP keeps both, the others the column-wise one.
    saved = operand(ran, lin.m * lin.k, 2 if role == "fprop" or lin.family == "LayerNormMLP" else 1)
    grad = operand(ran, lin.m * lin.n, 2)
    first, other = {"fprop": (weight, saved), "dgrad": (weight, grad), "wgrad": (saved, grad)}[role]
    layout = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}[role]
    return Dispatch(
        recipe, lin.module, role, lin.m, lin.k, lin.n, 1, layout, first, other, "bf16", False, "generic_gemm",
        lin.family, True if lin.quantizable and ran is not BF16 else None,
    )  # fmt: skip


def held(ran: Format, attention_shares: bool = True) -> int:
    """Bytes that the reachable layers hold after forward, beside what is the same in every format."""
    found = 0.0
    for lin in (lin for lin in LINEARS if lin.quantizable):
        weights, inputs = lin.n * lin.k, lin.m * lin.k
        if ran is BF16:
            shared = attention_shares and lin.module.endswith("proj")
            found += 0 if shared else 2 * inputs
            continue
        copies = 2 if lin.family == "LayerNormMLP" else 1
        weight_scales = ran.scales / 128 if ran.scaling == "block-128" else ran.scales
        found += 2 * weights * (ran.data + weight_scales) + copies * inputs * (ran.data + ran.scales)
    return round(found)


ELSEWHERE = 3_000_000_000
"""Bytes of all that is the same in every recipe."""


def memory(recipe: str, ran: Format, *, attention_shares: bool = True, requested: bool = True) -> list[Memory]:
    """The allocator's phases of the watched step; blocks are larger than what was asked for."""
    after = ELSEWHERE + held(ran, attention_shares)
    live = {"start": ELSEWHERE - 10**9, "forward": after, "backward": ELSEWHERE, "optimizer": ELSEWHERE - 10**9}
    return [
        Memory(
            recipe, -1, phase, allocated=size + 300_000, peak=size + 10**8, reserved=10 * 10**9,  # type: ignore[arg-type]
            requested=size if requested else None,
        )
        for phase, size in live.items()
    ]  # fmt: skip


def kernels(ran: Format) -> list[Kernel]:
    """One step: each GEMM with its casts; attention and the optimizer."""
    found = []
    for lin in LINEARS:
        for role in ROLES:
            found += [Kernel(name, 20.0, lin.module) for name in (ran.helpers if lin.quantizable else ())]
            found.append(Kernel(ran.gemm if lin.quantizable else BF16.gemm, 100.0, lin.module, role))
    return [*found, Kernel(FUSED_ATTENTION, 200.0, "layers.0.self_attention.core"), Kernel(ADAM, 50.0)]


@dataclass(frozen=True)
class Ran:
    """One recipe as it was seen: by its operands, its kernels, and the allocator. None: that witness saw nothing."""

    operands: Format | None
    kernels: Format | None
    memory: Format | None

    @staticmethod
    def as_(ran: Format) -> Ran:
        return Ran(ran, ran, ran)


def recording(**recipes: Ran) -> Recording:
    """A finished run of BF16 and these recipes."""
    runs = {"bf16": Ran.as_(BF16), **recipes}
    facts: list[Fact] = [
        HEADER,
        B300,
        Model("MiniGPT", "transformer_engine", "the model holds TE modules", 10**8, 2 * 10**8),
        *(CARDS[name] for name in runs),
        Plan(tuple(runs), "bf16", 3, 2, 6, 1, 0, 1, 60),
        *gemms(LINEARS),
    ]
    for name, ran in runs.items():
        facts += timed(name, 100.0)
        facts += memory(name, ran.memory) if ran.memory else []
        facts += dispatches(name, ran.operands) if ran.operands else []
        facts += [trace(name, kernels(ran.kernels), 120.0, expected=3 * len(LINEARS))] if ran.kernels else []
    return Recording.from_facts([*facts, Restored(("module",), True), End("finished")])
