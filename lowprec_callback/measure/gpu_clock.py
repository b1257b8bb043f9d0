"""Timing work on the GPU without the host in it, and with the clock that it ran at beside it.

Two things spoil a sample. CUDA events around a call hold whatever the GPU waited for, and a small GEMM waits for the
host. So every sample is led by the same work, untimed, and where the host cannot keep ahead of the GPU by itself, large
matrix products hold the GPU until the host has launched the whole sample. (A spinning kernel would hold it as well,
but draws so little power that the clock rises, and the sample begins at a clock that it cannot keep.)

And a GPU at its power limit changes its clock all the time, by what it ran in the last tenth of a second and by
itself: on an H200 the same GEMM's time wanders by 5% from one moment to the next. So each sample brings the SM clock
that it ran at, measured on the GPU: a kernel that spins for a known number of cycles, timed before and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowprec_callback.recording import Role

Pair = tuple[Any, Any]
"""The CUDA events before and after something."""

TRIES = 4
"""Launches of one sample until the host kept ahead of the GPU."""

HOLD_SIZE = 4096
"""M = K = N of the products that hold the GPU: some 0.2 ms each on an H200, for a few microseconds of the host."""

MOST_HOLDS = 500
"""Of these in one sample, for the launch queue's sake."""

PROBE_CYCLES = 300_000
"""Cycles that a clock probe spins for: about 0.2 ms, against an event's resolution of half a microsecond."""

KEEPS_AHEAD = 0.8
"""Below this share of the GPU's time for a call, the host needs no help to keep ahead."""


@dataclass
class Pace:
    """How long one call takes, in milliseconds: the host to launch it from an idle device, and the GPU to run it."""

    host_ms: float
    gpu_ms: float

    def calls(self, ms: float, most: int) -> int:
        """How many calls come nearest to so many milliseconds: at least one."""
        return max(1, min(most, round(ms / max(self.host_ms, self.gpu_ms, 1e-6))))


def event() -> Any:
    """A CUDA event, recorded now."""
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


@dataclass(frozen=True)
class Launched:
    """A sample under way."""

    pairs: list[Pair]
    """The events around each timed call. A call's last event is the next one's first, unless something was between."""
    probes: tuple[Pair, Pair]
    """The events around the clock probes before and after all of them."""

    def ms(self) -> float:
        """Mean time of a call; waits for the last."""
        self.probes[1][1].synchronize()
        return float(sum(first.elapsed_time(last) for first, last in self.pairs)) / len(self.pairs)

    def mhz(self) -> float:
        """The SM clock, mean of before and after [MHz]."""
        self.probes[1][1].synchronize()
        before, after = (PROBE_CYCLES / (first.elapsed_time(last) * 1e3) for first, last in self.probes)
        return float(before + after) / 2


def back_to_back(
    call: Callable[[], Any],
    calls: int,
    lead: int,
    pace: Pace,
    between: Callable[[], Any] | None = None,
    begin: Callable[[], Any] = lambda: None,
) -> Launched:
    """Launch `lead` calls that do not count and `calls` that do; waits for nothing.

    Whether the host kept ahead is checked: the event before a call must not have been reached when the call is
    launched whole. If it was, all of it is launched again while the GPU is held, then while it is held longer; after
    `TRIES` the last one counts (it then holds some of the host's time, and the host time beside it says so).

    Args:
        call: makes the call.
        calls: how many are timed.
        lead: how many go before.
        pace: what a call takes.
        between: launched before each timed call and not timed (it flushes the L2 cache).
        begin: called when the lead has been launched.
    """
    for attempt in range(TRIES):
        for _ in range(lead):
            call()
        if attempt or pace.host_ms > KEEPS_AHEAD * pace.gpu_ms:
            hold(pace.host_ms * calls * 1.5 * 2**attempt)
        begin()
        before = _probe()
        pairs: list[Pair] = []
        late = False
        for _ in range(calls):
            if between is not None:
                between()
            first = pairs[-1][1] if pairs and between is None else event()
            call()
            late = late or bool(first.query())
            pairs.append((first, event()))
        made = Launched(pairs, (before, _probe()))
        if not late:
            break
    return made


def hold(ms: float) -> None:
    """Keep the GPU busy, at full power, for about so many milliseconds."""
    a, each_ms = _holder(torch.cuda.current_device())
    for _ in range(max(1, min(MOST_HOLDS, math.ceil(ms / each_ms)))):
        torch.mm(a, a)


@cache
def _holder(device: int) -> tuple[torch.Tensor, float]:
    """(a matrix to multiply by itself, milliseconds that this takes)."""
    with torch.random.fork_rng(devices=[device]):
        a = torch.randn(HOLD_SIZE, HOLD_SIZE, device=f"cuda:{device}", dtype=torch.bfloat16)
    for _ in range(3):
        torch.mm(a, a)
    first = event()
    for _ in range(10):
        torch.mm(a, a)
    last = event()
    last.synchronize()
    return a, max(float(first.elapsed_time(last)) / 10, 1e-3)


def _probe() -> Pair:
    first = event()
    torch.cuda._sleep(PROBE_CYCLES)
    return first, event()


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
