"""The error of a capture that cannot be used. It stands alone so that catching it imports nothing else."""

from __future__ import annotations


class CaptureError(ValueError):
    """A capture from which nothing can be concluded, with what is wrong with it and what to do."""
