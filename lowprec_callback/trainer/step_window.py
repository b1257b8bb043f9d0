"""Where one optimizer step ends and the next begins, in a loop that tells only of batches and of optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field

PATIENCE = 16
"""Batches after which an optimizer that has not stepped, while others have, is no longer waited for."""


@dataclass
class StepWindow:
    """The batches of the step that runs.

    With gradient accumulation a step is several batches: it ends with the batch in which the optimizer steps. With
    several optimizers it ends with the batch by which each of them has stepped at least once, so that all steps
    hold the same work, however often each optimizer steps and in whatever order. One that rests (a network that is
    trained later) is given up after `PATIENCE` batches.

    Args:
        optimizers: how many there are.
    """

    optimizers: int = 1
    batches: int = 0
    """Batches since the last boundary."""
    increments: int = 0
    """What `global_step` grew by in them: Lightning counts each optimizer's steps."""
    _stepped: set[int] = field(default_factory=set)
    _resting: set[int] = field(default_factory=set)
    _at: int = 0

    def batch_begins(self, global_step: int) -> None:
        """A batch begins."""
        self._at = global_step

    def optimizer_steps(self, which: int) -> None:
        """The optimizer with this index steps."""
        self._stepped.add(which)
        self._resting.discard(which)

    def batch_ends(self, global_step: int) -> bool:
        """A batch is over; whether it ends a step. Then `again` opens the next window."""
        self.batches += 1
        self.increments += global_step - self._at
        self._at = global_step
        if not self.increments and not self._stepped:
            return False
        if self.optimizers <= 1 or not self._stepped:
            return True
        missing = set(range(self.optimizers)) - self._stepped - self._resting
        if missing and self.batches >= PATIENCE:
            self._resting |= missing
            missing = set()
        return not missing

    def again(self) -> None:
        """The next step's window."""
        self.batches = self.increments = 0
        self._stepped.clear()
