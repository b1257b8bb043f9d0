"""Peaks and live bytes of the CUDA caching allocator, per recipe and phase. On a CPU nothing is recorded."""

from __future__ import annotations

import gc
from typing import Literal

import torch

from lowprec_callback.recording import Memory

Phase = Literal["start", "forward", "backward", "optimizer", "step"]


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
    """The allocator's counters now; empty on a CPU."""
    if device.type != "cuda":
        return []
    # A block can be larger than what was asked for, by up to a MiB; not every allocator backend counts the latter.
    requested = torch.cuda.memory_stats(device).get("requested_bytes.all.current")
    return [
        Memory(
            recipe,
            round_,
            phase,
            allocated=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            requested=requested or None,
        )
    ]
