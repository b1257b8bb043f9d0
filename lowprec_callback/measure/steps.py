"""The whole-step clock.

On a GPU a boundary is a CUDA event, recorded on the current stream and read when the block is over: nothing
waits for the GPU inside timed steps. Between two boundaries lies everything that the user's loop does for one
optimizer step, waiting for data included. On a CPU a boundary is a reading of the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lowprec_callback.recording import ForwardTime, HostTime, StepTime


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class StepClock:
    """Boundaries of one block of timed steps.

    Args:
        device: whose time is taken.
        now: the host's clock, in seconds. Tests pass their own.
    """

    device: torch.device
    now: Callable[[], float] = time.perf_counter
    _events: list[Any] = field(default_factory=list)
    _host: list[float] = field(default_factory=list)
    _marks: dict[int, str] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def boundary(self) -> None:
        """Mark the end of one step and the beginning of the next."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._events.append(event)
        self._host.append(self.now())

    def size(self, elements: int) -> None:
        """How much data the step that runs holds."""
        self._sizes[len(self._host) - 1] = elements

    def discard(self, reason: str) -> None:
        """The step that runs now does not count."""
        self._marks.setdefault(len(self._host) - 1, reason)

    def read(self, recipe: str, round_: int) -> list[StepTime]:
        """The steps between the boundaries so far, in ms. Waits for the last event."""
        synchronize(self.device)
        host = [(b - a) * 1e3 for a, b in zip(self._host, self._host[1:], strict=False)]
        own = [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)] or host
        return [
            StepTime(
                recipe,
                round_,
                index,
                ms=own[index],
                host_ms=host[index],
                discarded=self._marks.get(index),
                elements=self._sizes.get(index),
            )
            for index in range(len(host))
        ]


@dataclass
class ForwardClock:
    """The forward passes of one block of timed steps, where several ranks train (see `recording.ForwardTime`).

    On a GPU two more events a forward pass; nothing waits for them.

    Args:
        device: whose time is taken.
        now: the host's clock, in seconds. Tests pass their own.
    """

    device: torch.device
    now: Callable[[], float] = time.perf_counter
    _steps: list[list[tuple[Any, Any]]] = field(default_factory=list)

    def boundary(self) -> None:
        """A step begins."""
        self._steps.append([])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward pass."""
        begin = self._mark()
        yield
        if self._steps:
            self._steps[-1].append((begin, self._mark()))

    def read(self, recipe: str, round_: int) -> ForwardTime:
        """The steps so far, in ms. Waits for the last event."""
        synchronize(self.device)
        return ForwardTime(recipe, round_, tuple(sum(self._ms(*pair) for pair in step) for step in self._steps if step))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @staticmethod
    def _ms(begin: Any, end: Any) -> float:
        return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


@dataclass
class HostProbe:
    """How long the host needs to launch one step, measured from an idle device (see `recording.HostTime`)."""

    device: torch.device
    now: Callable[[], float] = time.perf_counter
    _begin: float = 0.0

    def start(self) -> None:
        """At the boundary before the step."""
        synchronize(self.device)
        self._begin = self.now()

    def stop(self, recipe: str, round_: int) -> HostTime:
        """At the boundary after the step."""
        launched = self.now()
        synchronize(self.device)
        drained = self.now()
        return HostTime(recipe, round_, ms=(launched - self._begin) * 1e3, drain_ms=(drained - launched) * 1e3)
