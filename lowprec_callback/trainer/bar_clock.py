"""The clock of the Trainer's own progress bar, for which the sweep takes no time.

Lightning starts the bar of an epoch before that epoch's first batch, and so before the sweep. Its rate is an average
since then: after a sweep of a minute it would be wrong for the whole epoch, and with it the time left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.progress import Task
from tqdm import tqdm


@contextmanager
def stopped(trainer: Any) -> Iterator[None]:
    """Inside, time does not count for the bar of training.

    A bar that is disabled or of another kind is left alone, and nothing that is wrong with one raises.
    """
    begin = time.monotonic()
    try:
        yield
    finally:
        with suppress(Exception):
            _forget(trainer.progress_bar_callback, time.monotonic() - begin)


def _forget(callback: Any, seconds: float) -> None:
    """Take the last seconds away from the clock of a bar.

    Raises:
        Exception: there is no bar, or it has not begun.
    """
    bar = callback.train_progress_bar
    if isinstance(bar, tqdm):
        # Not `unpause`, which would forget the time before the sweep as well: that of the first batch's loading.
        bar.start_t += seconds
        bar.last_print_t += seconds
    elif isinstance(bar, Task):
        # rich's takes no number of seconds, but it can begin anew. Its rate is one of steps alone, and needs no help.
        callback.progress.reset(callback.train_progress_bar_id)
