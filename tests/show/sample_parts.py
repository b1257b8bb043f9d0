"""Builders for the sample reports: figures, rows, ledgers and verdicts in few words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lowprec_callback.recording import ROLES
from lowprec_callback.report import (
    BUCKETS,
    Figure,
    Gap,
    GapTerm,
    GemmRow,
    Ledger,
    Origin,
    RecipeReport,
    Speedups,
    Verdict,
    VerdictRow,
    VerdictWord,
)

TITLES = {
    "bf16": "BF16",
    "fp32": "FP32",
    "fp8_delayed": "FP8, delayed scaling",
    "fp8_current": "FP8, current scaling",
    "fp8_block": "FP8, block scaling",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}

HOPPER = "compute capability 9.0, needs 10.0"


def measured(value: float, half: float | None = None, unit: str = "ms") -> Figure:
    """A measured number with its 95% interval."""
    if half is None:
        return Figure(value, unit, "measured")
    return Figure(value, unit, "measured", value - half, value + half, 24)


def derived(value: float, half: float | None = None, unit: str = "x") -> Figure:
    """A number computed from measured ones."""
    return replace(measured(value, half, unit), origin="derived")


def missing(reason: str, unit: str = "ms") -> Figure:
    return Figure.missing(unit, reason)


Samples = tuple[tuple[int, tuple[float, ...]], ...]


def samples_around(median: float, width: float, rounds: int = 3, each: int = 8) -> Samples:
    """Step times that look measured, with a slow first step and a slight drift, yet always the same."""
    pattern = (0.9, -0.3, 0.1, -0.6, 0.4, 0.0, -0.1, 0.3)

    def around(number: int, index: int) -> float:
        return round(median + width * (pattern[(index + number) % 8] + 0.4 * (number - 1)), 3)

    return tuple((number, tuple(around(number, i) for i in range(each))) for number in range(rounds))


def gemm_rows(
    operations: Sequence[tuple[str, int, int, int, int]],
    kernel: Sequence[float] | None,
    autocast: Sequence[float] | None,
    why: str = "",
    launch_bound: bool = False,
) -> tuple[GemmRow, ...]:
    """Rows of all roles, given ms of one call of all three together, and split among them as measured."""
    parts = {"fprop": 0.331, "dgrad": 0.339, "wgrad": 0.330}
    return tuple(
        GemmRow(
            name,
            role,
            m,
            k,
            n,
            calls,
            measured(round(kernel[i] * parts[role], 4), 0.002) if kernel else missing(why),
            measured(round(autocast[i] * parts[role], 4), 0.003) if autocast else missing(why),
            launch_bound,
        )
        for i, (name, m, k, n, calls) in enumerate(operations)
        for role in ROLES
    )


def verdict(
    layers: int,
    asked: str,
    odd: Callable[[str, str], tuple[VerdictWord, str, str] | None] = lambda module, role: None,
    summary: str = "",
    modules: Sequence[str] = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"),
    prefix: str = "layers",
    witnesses: Sequence[str] = ("operands", "kernels"),
    **more: tuple[str, ...],
) -> Verdict:
    """Rows for `layers` layers. `odd(module, role)` gives (verdict, ran, why) of those not confirmed."""
    rows = []
    names = [f"{prefix}.{layer}.{module}" for layer in range(layers) for module in modules]
    share = 1 / (len(names) * len(ROLES))
    for module in names:
        for role in ROLES:
            word, ran, why = odd(module, role) or ("confirmed", asked, "")
            saw = {} if word == "unproven" else dict.fromkeys(witnesses, ran)
            rows.append(VerdictRow(module, role, 15872, 4096, 4096, 1, asked, ran, word, why, saw, share))
    covered = sum(row.share for row in rows if row.verdict == "confirmed")
    reach = sum(row.share for row in rows if row.verdict != "outside")
    return Verdict(
        derived(min(1.0, covered), unit="share"),
        derived(min(1.0, covered / reach), unit="share"),
        tuple(rows),
        summary or f"All {len(rows)} linear-layer GEMMs ran in {asked}.",
        **more,
    )


def ledger(wall: float, residual: float, idle: float, buckets: str, origin: Origin = "derived") -> Ledger:
    """A complete ledger; `buckets` is "gemm 666.9 attention 20.0"."""
    words = buckets.split()
    seen = {name: Figure(float(value), "ms", origin) for name, value in zip(words[::2], words[1::2], strict=True)}
    return Ledger(
        wall=measured(wall, 0.5),
        buckets=dict.fromkeys(BUCKETS, measured(0.0)) | seen,
        idle=Figure(idle, "ms", origin),
        residual=Figure(residual, "ms", origin),
        busy=Figure(wall - idle - residual, "ms", origin),
        complete=True,
    )


Term = tuple[str, float, float] | tuple[str, float, float, str]
"""Name, ms, half-width and perhaps a note."""


def gap(baseline: str, recipe: str, start: Figure, end: Figure, *terms: Term) -> Gap:
    """A gap with every term known."""
    return Gap(
        baseline,
        recipe,
        start,
        end,
        tuple(GapTerm(name, derived(value, half, "ms"), *note) for name, value, half, *note in terms),
    )


def speedups(kernel: float, autocast: float, amdahl: float, step: float, half: float = 0.002) -> Speedups:
    """The four."""
    return Speedups(derived(kernel, 0.01), derived(autocast, 0.006), derived(amdahl, 0.004), derived(step, half))


ONE = Speedups(derived(1.0), derived(1.0), derived(1.0), derived(1.0))
"""The baseline against itself."""


def refused(name: str, reason: str) -> RecipeReport:
    """A recipe that did not run."""
    return RecipeReport(name, TITLES[name], False, refusal=reason)


NOT_ON_HOPPER = (
    refused("mxfp8", f"{HOPPER} (te.is_mxfp8_available)"),
    refused("nvfp4", f"{HOPPER} (te.is_nvfp4_available)"),
)
