"""Transformer Engine's own NVTX ranges, switched on for a profiling session.

TE asks NVTE_NVTX_ENABLED once, when the first of its modules runs, and remembers the answer. So it must be asked by us
before that, with the variable set; afterwards the variable is as it was.
"""

from __future__ import annotations

import os
import sys
from typing import Any

VARIABLE = "NVTE_NVTX_ENABLED"
HOME = "transformer_engine.pytorch.utils"


class TeRanges:
    """Switched on when made, if it is early enough; `close` makes TE ask again, so that its ranges end with ours.

    Nothing happens where TE was not imported: then no TE module can run.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why TE's ranges stay off, and what to do about it."""
        self._asks: Any = None
        home = sys.modules.get(HOME)
        if home is None:
            return
        asks: Any = getattr(home, "_nvtx_enabled", None)
        if not hasattr(asks, "cache_info"):
            self.problem = (
                f"Transformer Engine's own NVTX ranges stay as they are: this version reads {VARIABLE} otherwise"
            )
        elif asks.cache_info().currsize:
            if not asks():
                self.problem = (
                    "Transformer Engine's own NVTX ranges stay off: one of its modules ran before the profiler could "
                    f"switch them on, and {VARIABLE} is read only once. Set {VARIABLE}=1 before training starts"
                )
        else:
            before = os.environ.get(VARIABLE)
            os.environ[VARIABLE] = "1"
            try:
                asks()
            finally:
                if before is None:
                    del os.environ[VARIABLE]
                else:
                    os.environ[VARIABLE] = before
            self._asks = asks

    def close(self) -> None:
        """TE's ranges are the user's affair again. Idempotent."""
        if self._asks is not None:
            self._asks.cache_clear()
            self._asks = None
