"""NVTX ranges in a domain of our own, for Nsight Systems.

Ranges recipe / step / phase / module and role, the step's number as payload. They cost a few hundred
nanoseconds each without a tool attached, and nothing at all when switched off.
"""

from __future__ import annotations

import os
from typing import Any

DOMAIN = "lowprec"


def under_nsys() -> bool:
    """Whether Nsight Systems is attached to this process (it sets these variables; seen with 2024.2 and 2025.3)."""
    injected = os.environ.get("CUDA_INJECTION64_PATH", "").lower()
    return "NSYS_PROFILING_SESSION_ID" in os.environ or "nsys" in injected or "nsight-systems" in injected


class Ranges:
    """Push and pop ranges on the calling thread; every method does nothing when off."""

    def __init__(self, enabled: bool) -> None:
        self._domain: Any = None
        if enabled:
            import nvtx

            self._domain = nvtx.get_domain(DOMAIN)

    @property
    def enabled(self) -> bool:
        """Whether ranges are emitted."""
        return self._domain is not None

    def push(self, message: str, payload: int | None = None) -> None:
        """Open a range."""
        if self._domain is not None:
            attributes = self._domain.get_event_attributes(message=message, payload=payload)
            self._domain.push_range(attributes)

    def pop(self) -> None:
        """Close the range opened last on this thread."""
        if self._domain is not None:
            self._domain.pop_range()
