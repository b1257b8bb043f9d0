"""Timing work on the GPU without the host in it.

CUDA events around a call hold whatever the GPU waited for, and a small GEMM waits for the host. So a spinning kernel
holds the GPU until the host has launched a whole sample; the sample then runs back to back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from lowprec_callback.recording import Role

_T = TypeVar("_T")

TRIES = 4
"""Launches of one sample until the host kept ahead of the GPU."""

SPIN_HZ = 2.0e9
"""Cycles a second of the spinning kernel; a faster clock only makes it spin a little shorter."""


def ahead(launch: Callable[[], _T], host_s: float) -> _T:
    """Launch a sample while the GPU spins, so that it runs without waiting for the host.

    Whether the host kept ahead is checked: an event behind the spin must not have been reached when the launching is
    done. If it was, the sample is thrown away and launched again behind a longer spin; after `TRIES` the last one
    counts (its interval then holds some of the host's time, and the host time beside it says so).

    Args:
        launch: launches the sample; called once a try.
        host_s: about how long that takes the host, in seconds.
    """
    for attempt in range(TRIES):
        reached = torch.cuda.Event()
        seconds = min(max(host_s * 1.5 * 2**attempt, 5e-4), 0.5)
        torch.cuda._sleep(int(seconds * SPIN_HZ))
        reached.record()
        result = launch()
        if not reached.query():
            break
        torch.cuda.synchronize()
    return result


def device_ms(call: Callable[[], Any], calls: int, host_s: float, between: Callable[[], Any] | None = None) -> float:
    """Milliseconds of one call on the GPU, from `calls` calls that the host launched ahead.

    Args:
        call: makes the call.
        calls: how often.
        host_s: host time to launch one call, in seconds.
        between: launched before each call and not timed (it flushes the L2 cache). Then each call has two events of
            its own, which cost about a microsecond; without it there are two in all.
    """

    def event() -> Any:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def back_to_back() -> list[tuple[Any, Any]]:
        first = event()
        for _ in range(calls):
            call()
        return [(first, event())]

    def one_by_one() -> list[tuple[Any, Any]]:
        pairs = []
        for _ in range(calls):
            assert between is not None
            between()
            first = event()
            call()
            pairs.append((first, event()))
        return pairs

    pairs = ahead(back_to_back if between is None else one_by_one, calls * host_s)
    torch.cuda.synchronize()
    return float(sum(first.elapsed_time(last) for first, last in pairs)) / calls


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
