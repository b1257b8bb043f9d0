"""Attributes of other people's objects that we stand in for, and how they were before."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """Replaced instance attributes. `undo` puts back what was there, and may be called again and again.

    What somebody else has put over ours since stays: taking it away would undo their work. They call ours, which by
    then does nothing but call the original.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Make `value` the instance's own attribute."""
        self._done.append((owner, name, owner.__dict__.get(name, _ABSENT), value))
        owner.__dict__[name] = value

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._done:
            owner, name, before, ours = self._done.pop()
            if owner.__dict__.get(name) is not ours:
                continue
            if before is _ABSENT:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = before
