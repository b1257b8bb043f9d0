"""How fast a GPU could multiply at most, from NVIDIA's datasheets (`peaks.toml`), and rates that no GPU can reach.

A GPU that is not in the table has no peak, with a reason: an estimate would make a percentage that looks measured.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lowprec_callback.analyze.shapes import gemm_flops

TOLERANCE = 1.03
"""A rate above the peak by more than this factor is refused: clocks are read once, events have a resolution."""

UNKNOWN_HEADROOM = 1.3
"""How far a GPU's clock may go above the one that its figures stand for, where either is not known.

An RTX 5090 was measured at 1.21 times its datasheet's BF16 rate (https://github.com/xzwgit/gpu-flops-bench)."""

COLUMN = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "bf16",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "fp8": "fp8",
    "e2m1": "fp4",
    "fp4": "fp4",
    "int8": "int8",
}
"""A format of a recipe card to the table's column."""


class PeaksError(ValueError):
    """A format that the table has no column for."""


@dataclass(frozen=True)
class Peak:
    """The dense peak of a GPU for one format; or why there is none."""

    gpu: str
    """The table's name of the GPU; the driver's where the table has none."""
    column: str
    """fp32, tf32, bf16, fp8, fp4, int8."""
    tflops: float | None = None
    """Without sparsity, at `clock_mhz`."""
    clock_mhz: int | None = None
    """The SM clock that the figure stands for; None: NVIDIA does not say."""
    source: str = ""
    reason: str | None = None
    """Why there is no figure."""


def find_peak(device: str, *formats: str) -> Peak:
    """The dense peak of a GPU for a product of these formats; of two, the slower one counts.

    Args:
        device: the GPU's name as NVML or torch gives it.
        formats: one or both operands' (`RecipeCard.fprop` and its like).

    Raises:
        PeaksError: a format that is not known.
    """
    unknown = [name for name in formats if name not in COLUMN]
    if unknown or not formats:
        raise PeaksError(f"no peak for the format {', '.join(unknown) or '(none)'}; known: {', '.join(COLUMN)}")
    found = [_find(device, column) for column in dict.fromkeys(COLUMN[name] for name in formats)]
    missing = [peak for peak in found if peak.tflops is None]
    return missing[0] if missing else min(found, key=lambda peak: peak.tflops or 0.0)


def _find(device: str, column: str) -> Peak:
    if re.search(r"\bMIG\b", device):
        return Peak(device, column, reason="a MIG slice has a share of its GPU that its name does not tell")
    for row in _table().get("gpu", []):
        if _named(row, device):
            name, source = row["name"], row["source"]
            if column not in row:
                return Peak(name, column, source=source, reason=f"no dense {column} rate of it is sourced")
            return Peak(name, column, float(row[column]), row.get("clock_mhz"), source)
    for row in _table().get("unsourced", []):
        if _named(row, device):
            return Peak(device, column, reason=row["reason"])
    return Peak(device, column, reason=f"the table of peaks does not know the device {device!r}")


def _named(row: dict[str, Any], device: str) -> bool:
    return any(re.fullmatch(pattern, device.strip()) for pattern in row["names"])


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))


def known_gpus() -> list[str]:
    """The table's names."""
    return [row["name"] for row in _table()["gpu"]]


def rate(rows: int, length: int, columns: int, ms: float) -> float:
    """TFLOP/s of one product: 2 * rows * length * columns / t, with t in ms."""
    return gemm_flops(rows, length, columns) / ms / 1e9


def share_of_peak(tflops: float, peak: Peak) -> float | None:
    """Rate over dense peak [1]; None without a peak. Above 1 is possible where the clock exceeds the figure's."""
    return None if peak.tflops is None else tflops / peak.tflops


def refuse_impossible(tflops: float, peak: Peak, max_sm_mhz: int | None = None) -> str | None:
    """Why a rate cannot be true, or None if it can (or if there is nothing to hold it against).

        ceiling = peak * max(1, max_sm_mhz / clock_mhz) * 1.03

    Args:
        tflops: the measured rate in TFLOP/s.
        peak: the GPU's, in the format of the operands.
        max_sm_mhz: the highest SM clock that the driver allows; None: not known, and 1.3 stands for the ratio.
    """
    if peak.tflops is None:
        return None
    if max_sm_mhz is None or peak.clock_mhz is None:
        headroom, clock = UNKNOWN_HEADROOM, f"with {UNKNOWN_HEADROOM - 1:.0%} for a higher clock"
    else:
        headroom = max(1.0, max_sm_mhz / peak.clock_mhz)
        clock = f"at {max(max_sm_mhz, peak.clock_mhz)} MHz, the highest clock"
    ceiling = peak.tflops * headroom
    if tflops <= ceiling * TOLERANCE:
        return None
    return (
        f"{tflops:.0f} TFLOP/s is impossible: the dense {peak.column} peak of the {peak.gpu} is {peak.tflops:g}, "
        f"{ceiling:.0f} {clock}; the GEMM did not do all its work, or the clock did not measure it"
    )
