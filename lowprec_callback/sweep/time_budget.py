"""How much time the sweep has taken, has left, and will take, by the host's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Pace:
    """The sweep's own clock.

    Args:
        max_seconds: when its time is up; None for never.
        now: the host's clock, in seconds. Tests pass their own.
    """

    max_seconds: float | None = None
    now: Callable[[], float] = time.monotonic
    plain_s: float | None = None
    """Seconds of one step with nothing attached, once one was measured."""
    watched_s: float | None = None
    """Seconds of one step with all watchers attached, once one was measured."""
    _began: float | None = None

    def start(self) -> None:
        """The sweep begins."""
        self._began = self.now()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the sweep began."""
        return 0.0 if self._began is None else self.now() - self._began

    @property
    def left_s(self) -> float | None:
        """Seconds until the time is up, not below zero; None if it never is."""
        return None if self.max_seconds is None else max(0.0, self.max_seconds - self.elapsed_s)

    @property
    def watched_factor(self) -> float | None:
        """How many times as long a step with all watchers takes; None while that is not known."""
        return self.watched_s / self.plain_s if self.watched_s is not None and self.plain_s else None

    @property
    def up(self) -> bool:
        """Whether the time is up."""
        return self.left_s == 0.0


A_LIMIT = "None or a number of seconds above 0"
"""What a limit of time may be, in words."""


def is_limit(value: Any) -> bool:
    """Whether a value is a limit of time."""
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def in_words(seconds: float) -> str:
    """`0.4 s`, `8 s`, `3 min 20 s`, `1 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
