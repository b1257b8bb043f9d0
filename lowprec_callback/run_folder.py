"""Where a run's files go: a folder of its own for each run, named by time and subject."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

ATTEMPTS = 100
"""Runs of one name in one second that find a folder."""


def new_run_folder(parent: Path, name: str) -> Path | None:
    """Make `parent/YYYYMMDD-HHMMSS-name`, numbered where that is taken; None if `ATTEMPTS` of them are.

    Raises:
        OSError: it cannot be made.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(ATTEMPTS):
        folder = parent / f"{stamp}-{name}{f'-{attempt}' if attempt else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    return None
