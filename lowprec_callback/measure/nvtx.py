"""NVTX ranges in a domain of our own, for Nsight Systems.

They nest as `RECIPE step` (the step's number as payload) > phase (data, forward, backward, optimizer) >
`module|DIRECTION|PATH` > `gemm|ROLE|PATH`, each on the thread that works. Those of recipe, step and phase are in every
step of the sweep; those of modules and GEMMs need hooks, so they are in the steps of the capture window alone. They
cost a few hundred nanoseconds each without a tool attached, and nothing at all when switched off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lowprec_callback.measure.dispatch import Sizes
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recording import Role

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

    @contextmanager
    def around(self, message: str) -> Iterator[None]:
        """A range for as long as the context lasts."""
        self.push(message)
        try:
            yield
        finally:
            self.pop()

    def enter_module(self, scope: Scope) -> None:
        """A module begins its forward or backward on the calling thread."""
        self.push(f"module|{scope.direction}|{scope.module}")

    def leave_module(self, _scope: Scope) -> None:
        """It ends."""
        self.pop()

    def gemms(
        self, module_of: Callable[[Scope | None, Sizes], str]
    ) -> Callable[[Scope | None, Role, Sizes], AbstractContextManager[Any]]:
        """Ranges for GEMM calls, as `Engine.watch` wants them; `module_of` names the linear layer of a call."""

        def around(scope: Scope | None, role: Role, sizes: Sizes) -> AbstractContextManager[Any]:
            return self.around(f"gemm|{role}|{module_of(scope, sizes)}")

        return around


@contextmanager
def capture_window(device: torch.device) -> Iterator[None]:
    """Between cudaProfilerStart and cudaProfilerStop: what `nsys profile --capture-range=cudaProfilerApi` captures.

    Without a tool attached, and on a CPU, it does nothing.
    """
    if device.type != "cuda":
        yield
        return
    runtime: Any = torch.cuda.cudart()
    torch.cuda.synchronize(device)
    runtime.cudaProfilerStart()
    try:
        yield
    finally:
        runtime.cudaProfilerStop()
