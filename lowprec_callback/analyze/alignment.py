"""Before anything runs: which layers cannot run in which recipe, or take a slow path, and what size would fix it.

What cannot run is the card's word (`RecipeCard.misfit`, from `align_m`, `align_k`, `align_n`). Slow paths are:

BF16
    Tensor cores read 16 bytes at a time: a feature count that is no multiple of 8 costs speed, on whatever GPU.
NVFP4
    Transformer Engine (TE) transforms and casts X (M x K) and dY (M x N) in one kernel if rows are a multiple of 64 and
    columns of 128; else in four, with a BF16 copy between them. W (N x K, without a transform) is cast together with
    its swizzle if both are multiples of 128. All of it only on compute capabilities 10.0 to 11.0.
FP8 block scaling
    From compute capability 10.0 on, every operand's scales are rewritten for MXFP8 before each GEMM.
FP8 delayed scaling of experts
    TE has no grouped kernel for it: one GEMM an expert, on several streams.

Sources: Transformer Engine, pytorch/csrc/quantizer.cpp (NVFP4Quantizer: fused paths), pytorch/csrc/extensions/gemm.cpp
(block scaling as MXFP8), pytorch/module/grouped_linear.py (which recipes have a grouped path);
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication (BF16).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lowprec_callback.analyze.shapes import LayerGemm
from lowprec_callback.recipes import RecipeCard

Kind = Literal["cannot run", "slow path", "note"]

BF16_MULTIPLE = 8
"""16 bytes of BF16."""
FUSED_ROWS = 64
"""Tokens that TE's fused Hadamard transform and cast handles at a time."""
FUSED_ROWS_GROUPED = 128
"""The same of each group in a grouped layer."""
FUSED_COLUMNS = 128
"""Features that it handles at a time."""
FUSED_UP_TO = (11, 0)
"""The highest compute capability that has it; below 10.0 there is no NVFP4 at all."""


@dataclass(frozen=True)
class Fix:
    """One size that is in the way, and the next one up that is not."""

    what: str
    """tokens, tokens of an expert, input features, output features."""
    size: int
    multiple: int
    comes_from: str
    """The size in the config's own names (`LayerGemm.sizes_from`)."""

    @property
    def next_size(self) -> int:
        """The smallest multiple above."""
        return next_multiple(self.size, self.multiple)

    def __str__(self) -> str:
        return f"{self.what} {self.size} -> {self.next_size} ({self.comes_from})"


@dataclass(frozen=True)
class AlignmentRow:
    """One linear layer that does not run well, or at all, in one recipe."""

    recipe: str
    operation: str
    m: int
    k: int
    n: int
    kind: Kind
    """cannot run: TE or cuBLAS refuses. slow path: it runs. note: it depends on what no config says."""
    reason: str
    fixes: tuple[Fix, ...] = ()
    """Empty where no size would help."""

    def __str__(self) -> str:
        fix = f"; what works: {', '.join(map(str, self.fixes))}" if self.fixes else ""
        return f"{self.operation} {self.m}x{self.k}x{self.n} in {self.recipe}: {self.kind}: {self.reason}{fix}"


def next_multiple(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def check_alignment(
    gemms: Iterable[LayerGemm],
    cards: Sequence[RecipeCard],
    compute_capability: tuple[int, int] | None = None,
    *,
    outside_too: bool = False,
) -> tuple[AlignmentRow, ...]:
    """Every layer and recipe that does not go well together, layer by layer.

    Args:
        gemms: the model's linear layers.
        cards: the recipes.
        compute_capability: of the GPU, for the slow paths that depend on it; None: those are left out.
        outside_too: check also the layers that models keep out of every recipe (`LayerGemm.quantizable`), as if they
            were TE layers. Without it they are checked for BF16 alone, which is what they run in.
    """
    rows: list[AlignmentRow] = []
    for gemm in gemms:
        for card in cards:
            if card.te_class is not None and not gemm.quantizable and not outside_too:
                continue
            blocked = _cannot_run(gemm, card)
            rows += [blocked] if blocked else _slow_paths(gemm, card, compute_capability)
    return tuple(rows)


def _cannot_run(gemm: LayerGemm, card: RecipeCard) -> AlignmentRow | None:
    """The card's own check. Of a grouped layer, each group must fit."""
    for rows in sorted(set(gemm.group_rows)):
        reason = card.misfit(rows, gemm.k, gemm.n)
        if reason:
            each = "of each expert: " if gemm.groups > 1 else ""
            fixes = _fixes(gemm, rows, (card.align_m, card.align_k, card.align_n))
            return _row(gemm, card, "cannot run", each + reason, fixes)
    return None


def _slow_paths(gemm: LayerGemm, card: RecipeCard, capability: tuple[int, int] | None) -> Iterator[AlignmentRow]:
    """Of a layer that can run."""
    if card.scaling == "none" and "bf16" in card.fprop:
        fixes = _fixes(gemm, gemm.m, (1, BF16_MULTIPLE, BF16_MULTIPLE))
        if fixes:
            yield _row(gemm, card, "slow path", f"BF16 GEMMs are slower off multiples of {BF16_MULTIPLE}", fixes)
    if card.scaling == "nvfp4-16":
        yield from _unfused(gemm, card, capability)
    if card.emulated_from is not None and capability is not None and capability >= card.emulated_from:
        reason = "on this GPU it runs as MXFP8, with a kernel for each operand's scales before each GEMM"
        yield _row(gemm, card, "slow path", reason)
    if gemm.groups > 1 and card.te_class is not None:
        if card.te_class == "DelayedScaling":
            yield _row(gemm, card, "slow path", "no grouped kernel: one GEMM an expert, on several streams")
        reason = (
            f"a router spreads tokens unevenly: each expert's are padded to a multiple of {card.align_m}, "
            f"at most {gemm.groups * (card.align_m - 1)} rows in all beside {gemm.m}"
        )
        if card.align_m > 1:
            yield _row(gemm, card, "note", reason)


def _unfused(gemm: LayerGemm, card: RecipeCard, capability: tuple[int, int] | None) -> Iterator[AlignmentRow]:
    """NVFP4's casts that TE cannot fuse."""
    transformed = not card.arguments.get("disable_rht", False)
    if not transformed and card.arguments.get("disable_2d_quantization", False):
        return  # plain casts of single rows, which have nothing to fuse
    work = "Hadamard transform and cast" if transformed else "cast and swizzle"
    if capability is not None and capability > FUSED_UP_TO:
        yield _row(
            gemm, card, "slow path", f"{work} are not fused on compute capability {'.'.join(map(str, capability))}"
        )
        return
    rows = FUSED_ROWS_GROUPED if gemm.groups > 1 else FUSED_ROWS
    needs = (rows if transformed else 1, FUSED_COLUMNS, FUSED_COLUMNS)
    for tokens in sorted(set(gemm.group_rows)):
        fixes = _fixes(gemm, tokens, needs)
        if fixes:
            reason = f"{work} are not fused: several kernels and a BF16 copy instead of one kernel"
            yield _row(gemm, card, "slow path", reason, fixes)
            return


def _fixes(gemm: LayerGemm, rows: int, multiples: tuple[int, int, int]) -> tuple[Fix, ...]:
    tokens = "tokens of an expert" if gemm.groups > 1 else "tokens"
    m_from, k_from, n_from = gemm.sizes_from
    if gemm.groups > 1:
        m_from = f"{m_from} / num_experts"
    sizes = ((tokens, rows, m_from), ("input features", gemm.k, k_from), ("output features", gemm.n, n_from))
    return tuple(
        Fix(what, size, multiple, comes_from)
        for (what, size, comes_from), multiple in zip(sizes, multiples, strict=True)
        if size % multiple
    )


def _row(gemm: LayerGemm, card: RecipeCard, kind: Kind, reason: str, fixes: tuple[Fix, ...] = ()) -> AlignmentRow:
    return AlignmentRow(card.name, gemm.operation, gemm.m, gemm.k, gemm.n, kind, reason, fixes)
