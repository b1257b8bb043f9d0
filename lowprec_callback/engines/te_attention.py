"""Which attention backend Transformer Engine (TE) chooses, and why, in TE's own words.

TE says so in its log, to whoever set NVTE_DEBUG and NVTE_DEBUG_LEVEL before the import, and only when it chooses anew.
For a watched step we have it choose anew, listen to its logger, and leave everything as it was.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

HOME = "transformer_engine.pytorch.attention.dot_product_attention"
LOGGER = "DotProductAttention"

_SELECTED = "Selected backend = "
_REASON = "Disabling "


@dataclass(frozen=True)
class Choice:
    """One choice of TE's."""

    backend: str
    reasons: tuple[str, ...]
    """Why not another, in order."""


class _Listener(logging.Handler):
    """Keeps TE's reasons and choices; its other messages (the run's whole configuration) are let go."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.chosen: list[Choice] = []
        self._reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One message."""
        try:
            text = " ".join(record.getMessage().split())
        except (TypeError, ValueError):  # a message that does not fit its arguments is TE's own affair
            return
        if text.startswith(_REASON):
            self._reasons.append(text)
        elif text.startswith(_SELECTED):
            choice = Choice(text.removeprefix(_SELECTED).rstrip("."), tuple(dict.fromkeys(self._reasons)))
            self._reasons.clear()
            if choice not in self.chosen:
                self.chosen.append(choice)


@contextmanager
def choices() -> Iterator[list[Choice]]:
    """The distinct choices that TE makes while the context lasts; none where this version logs none."""
    cache = getattr(sys.modules.get(f"{HOME}.dot_product_attention"), "_attention_backends", None)
    levels: Any = getattr(sys.modules.get(f"{HOME}.utils"), "AttentionLogging", None)
    listener = _Listener()
    if not isinstance(cache, dict) or not hasattr(levels, "_log_level"):
        yield listener.chosen
        return
    logger = logging.getLogger(LOGGER)
    before = levels._log_level, logger.level, logger.propagate, list(logger.handlers)
    # TE sets the logger's level from this attribute at each choice.
    levels._log_level = logging.DEBUG
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers[:] = [listener]
    cache["backend_selection_requires_update"] = True
    try:
        yield listener.chosen
    finally:
        levels._log_level, level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(level)
