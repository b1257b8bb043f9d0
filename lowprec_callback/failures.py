"""An exception as one line of a report."""

from __future__ import annotations

LONGEST = 300
"""Characters of an exception's own text that are kept: a library's can be pages long."""


def in_words(error: BaseException) -> str:
    """The class, and what it says, without its line ends; `out of memory` for PyTorch's exception of that meaning.

    By name, so that it says so without PyTorch as well.
    """
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return "out of memory"
    text = " ".join(str(error).split())
    return f"{name}: {text[:LONGEST]}{'...' * (len(text) > LONGEST)}" if text else name
