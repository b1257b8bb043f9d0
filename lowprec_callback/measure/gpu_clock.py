"""Timing work on the GPU without the host in it, and at the clock that the work itself settles to.

Two things spoil a sample. CUDA events around a call hold whatever the GPU waited for, and a small GEMM waits for the
host. And a GPU at its power limit picks its clock by what it ran in the last tens of milliseconds: after a pause, or
after work that draws less, the same GEMM runs faster than it does in training (on an H200 by 2 to 5% in the first 30
ms, with no trend after 60 ms). So every sample is led by the same work, untimed, and where the host cannot keep ahead
of the GPU by itself, a spinning kernel holds the GPU until the host has launched the whole sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowprec_callback.recording import Role

Pair = tuple[Any, Any]
"""The CUDA events before and after something."""

TRIES = 4
"""Launches of one sample until the host kept ahead of the GPU."""

SPIN_HZ = 2.0e9
"""Cycles a second of the spinning kernel; a faster clock only makes it spin a little shorter."""

KEEPS_AHEAD = 0.8
"""Below this share of the GPU's time for a call, the host needs no help to keep ahead."""


@dataclass
class Pace:
    """How long one call takes, in milliseconds: the host to launch it from an idle device, and the GPU to run it."""

    host_ms: float
    gpu_ms: float

    def calls(self, ms: float, most: int) -> int:
        """How many calls fill so many milliseconds: at least one."""
        return max(1, min(most, math.ceil(ms / max(self.host_ms, self.gpu_ms, 1e-6))))


def event() -> Any:
    """A CUDA event, recorded now."""
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


def back_to_back(
    call: Callable[[], Any],
    calls: int,
    lead: int,
    pace: Pace,
    between: Callable[[], Any] | None = None,
    begin: Callable[[], Any] = lambda: None,
) -> list[Pair]:
    """Launch `lead` calls that do not count and `calls` that do; waits for nothing.

    Whether the host kept ahead is checked: the event before a call must not have been reached when the call is
    launched whole. If it was, all of it is launched again behind a spinning kernel, then behind a longer one; after
    `TRIES` the last one counts (it then holds some of the host's time, and the host time beside it says so).

    Args:
        call: makes the call.
        calls: how many are timed.
        lead: how many go before.
        pace: what a call takes.
        between: launched before each timed call and not timed (it flushes the L2 cache).
        begin: called when the lead has been launched.

    Returns:
        The events around each timed call. A call's last event is the next one's first, unless there is a `between`.
    """
    pairs: list[Pair] = []
    for attempt in range(TRIES):
        for _ in range(lead):
            call()
        if attempt or pace.host_ms > KEEPS_AHEAD * pace.gpu_ms:
            seconds = min(max(pace.host_ms * 1e-3 * calls * 1.5 * 2**attempt, 5e-4), 0.5)
            torch.cuda._sleep(int(seconds * SPIN_HZ))
        begin()
        pairs, late = [], False
        for _ in range(calls):
            if between is not None:
                between()
            first = pairs[-1][1] if pairs and between is None else event()
            call()
            late = late or bool(first.query())
            pairs.append((first, event()))
        if not late:
            break
    return pairs


def mean_ms(pairs: list[Pair]) -> float:
    """Mean of the times between two events; waits for the last."""
    pairs[-1][1].synchronize()
    return float(sum(first.elapsed_time(last) for first, last in pairs)) / len(pairs)


def l2_flush(device: torch.device) -> Callable[[], Any]:
    """A function that overwrites twice the L2 cache, so that the next call finds none of its operands there."""
    size = 2 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer.zero_


def cut_calls(marks: list[tuple[str, Any]]) -> Iterator[tuple[Role, float, float]]:
    """(role, ms in all, ms of the GEMM alone) for each GEMM between each `begin` and `end`.

    Marks are (what, event), `<role` and `>role` around each GEMM. The time between two GEMMs belongs to the later one
    (it prepares its operands), except that what follows the last GEMM of forward still belongs to it, and what
    follows the last of backward to that one.
    """
    previous: Any = None
    opened: Any = None
    pending: tuple[Role, float, float, Any] | None = None
    for what, event in marks:
        if what == "begin":
            previous = event
        elif what.startswith("<"):
            if pending is not None:
                yield pending[:3]
                previous, pending = pending[3], None
            opened = event
        elif what.startswith(">"):
            role: Role = what[1:]  # type: ignore[assignment]
            pending = (role, previous.elapsed_time(event), opened.elapsed_time(event), event)
        elif pending is not None:  # "forward" or "end"
            role, whole, alone, since = pending
            yield role, whole + since.elapsed_time(event), alone
            previous, pending = event, None
