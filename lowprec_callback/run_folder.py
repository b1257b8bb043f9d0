"""Where a run's files go: a folder of its own for each run, named by time and subject."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

ATTEMPTS = 100
"""Runs of one name in one second that find a folder."""


def run_folder(parent: Path, name: str) -> Path:
    """Where the folder of a run that begins now is, or would be."""
    return parent / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"


def new_run_folder(parent: Path, name: str) -> Path | None:
    """Make `parent/YYYYMMDD-HHMMSS-name`, numbered where that is taken; None if `ATTEMPTS` of them are.

    Raises:
        OSError: it cannot be made.
    """
    first = run_folder(parent, name)
    for attempt in range(ATTEMPTS):
        folder = first.with_name(f"{first.name}-{attempt}") if attempt else first
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    return None
