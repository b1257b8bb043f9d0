"""What a checkpoint tells of the sweep, so that a resumed run neither repeats nor loses it.

One entry of its own at the top of the checkpoint, with nothing in it but texts: Lightning ignores entries that it
does not know, so that the checkpoint loads without this package, with `weights_only=True` too, and without a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

KEY = "lowprec_callback"
"""Of the entry."""


def note(checkpoint: dict[str, Any], done: bool, folder: Path) -> None:
    """Write the entry: whether the sweep is over, and where its run folder is."""
    checkpoint[KEY] = {"sweep": "over" if done else "running", "run_folder": str(folder.absolute())}


def finished_run(checkpoint: dict[str, Any]) -> Path | None:
    """The run folder of a sweep that was over when the checkpoint was written; None where there was none, or it ran."""
    entry = checkpoint.get(KEY)
    if not isinstance(entry, dict) or entry.get("sweep") != "over":
        return None
    return Path(str(entry.get("run_folder", "")))
