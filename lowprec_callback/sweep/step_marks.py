"""The ranges around a step and its phases: the profiler's in a step that is traced, NVTX ranges where those are on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lowprec_callback.measure.nvtx import Ranges
from lowprec_callback.measure.steps import synchronize
from lowprec_callback.measure.trace import own_range, phase_range, step_range


class StepMarks:
    """Opens and closes them in order; a phase ends where the next begins, or with its step.

    Args:
        device: waited for at the end of a traced step, so that its kernels lie inside.
        ranges: the NVTX ranges.
    """

    def __init__(self, device: torch.device, ranges: Ranges) -> None:
        self._device = device
        self._ranges = ranges
        self._step: AbstractContextManager[Any] | None = None
        self._phase: AbstractContextManager[Any] | None = None
        self._depth = 0
        """NVTX ranges that are open: the step's, and inside it the phase's."""
        self.traced: int | None = None
        """Number of the step to be traced next; None: it is not."""
        self.word = "step"
        """What the step is called in NVTX; one that does not count is called otherwise."""

    @property
    def on(self) -> bool:
        """Whether anything is marked."""
        return self.traced is not None or self._ranges.enabled

    def open(self, recipe: str | None, number: int) -> None:
        """A step begins: of which recipe, None for none of ours; and its number, as NVTX's payload."""
        if self.traced is not None:
            self._step = step_range(self.traced)
            self._step.__enter__()
        if self._ranges.enabled and recipe is not None:
            self._push(f"{recipe} {self.word}", number)

    def phase(self, name: str) -> None:
        """A phase begins, and the one before ends; the empty name begins none."""
        if self.traced is not None:
            if self._phase is not None:
                self._phase.__exit__(None, None, None)
                self._phase = None
            if name:
                self._phase = phase_range(name)
                self._phase.__enter__()
        if self._ranges.enabled:
            while self._depth > 1:
                self._pop()
            if name:
                self._push(name)

    def wait(self) -> None:
        """Before a traced step's last phase ends: wait for its kernels, and mark the wait as ours."""
        if self.traced is not None and self._step is not None:
            with own_range("synchronize"):
                synchronize(self._device)

    def close(self) -> None:
        """The step is over."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        self.traced = None
        while self._depth:
            self._pop()

    def _push(self, message: str, payload: int | None = None) -> None:
        self._ranges.push(message, payload)
        self._depth += 1

    def _pop(self) -> None:
        self._ranges.pop()
        self._depth -= 1
