"""Lines for a person, also while a progress bar is on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


@contextmanager
def beside_bars(stream: IO[Any]) -> Iterator[None]:
    """What is printed inside stands on lines of its own, also while bars of tqdm are on the terminal.

    Those of rich take care of that themselves. Nothing is imported for it: where tqdm is not loaded, it has no bar.
    """
    module = sys.modules.get("tqdm")
    if module is None:
        yield
        return
    with module.tqdm.external_write_mode(file=stream):
        yield


def say(text: str) -> None:
    """A line for a person, on standard error. Where nobody can read it any more, nothing happens."""
    with suppress(OSError, ValueError), beside_bars(sys.stderr):
        print(text, file=sys.stderr, flush=True)
