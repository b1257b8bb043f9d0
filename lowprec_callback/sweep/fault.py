"""Whether an exception in the user's step is our own."""

from __future__ import annotations

from pathlib import Path

WATCHERS = ("measure", "engines")
"""Folders of this package whose code the user's step calls without knowing: hooks on modules, stand-ins for entries."""

ALSO = ("guard.py", "instrumented_step.py", "step_marks.py")
"""Files of this folder for which the same holds."""


def passed_through_us(error: BaseException) -> bool:
    """Whether it came out of a watcher of ours; what only drives the step, and so is in every traceback, is none."""
    here = Path(__file__).parent
    places = [here.parent / name for name in WATCHERS] + [here / name for name in ALSO]
    frame = error.__traceback__
    while frame is not None:
        file = Path(frame.tb_frame.f_code.co_filename)
        if any(place == file or place in file.parents for place in places):
            return True
        frame = frame.tb_next
    return False
