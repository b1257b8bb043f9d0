"""Peaks and live bytes of the CUDA caching allocator, per recipe and phase. On a CPU nothing is recorded."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Literal

import torch

from lowprec_callback.recording import Memory

WatchedPhase = Literal["start", "forward", "backward", "optimizer"]
Phase = Literal[WatchedPhase, "step"]

NO_ROUND = -1
"""The round of what belongs to no timed block."""


@dataclass(frozen=True)
class Counters:
    """The allocator's counters at one moment [bytes]; see `recording.Memory`."""

    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    requested: int | None = None
    peak_requested: int | None = None
    inactive_split: int | None = None


def counters(device: torch.device) -> Counters | None:
    """The counters now; None on a CPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    # A block can be larger than what was asked for, by up to a MiB; not every allocator backend counts the latter.
    requested = stats.get("requested_bytes.all.current") or None
    return Counters(
        allocated=stats.get("allocated_bytes.all.current", 0),
        peak=stats.get("allocated_bytes.all.peak", 0),
        reserved=stats.get("reserved_bytes.all.current", 0),
        requested=requested,
        peak_requested=stats.get("requested_bytes.all.peak") if requested else None,
        inactive_split=stats.get("inactive_split_bytes.all.current"),
    )


def clean(device: torch.device) -> None:
    """Give cached blocks back, so that one recipe's fragmentation is not the next one's."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Begin a new peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read(device: torch.device, recipe: str, round_: int, phase: Phase) -> list[Memory]:
    """The allocator's counters now, as a fact; empty on a CPU."""
    now = counters(device)
    if now is None:
        return []
    return [
        Memory(
            recipe,
            round_,
            phase,
            allocated=now.allocated,
            peak=now.peak,
            reserved=now.reserved,
            requested=now.requested,
            inactive_split=now.inactive_split,
        )
    ]
