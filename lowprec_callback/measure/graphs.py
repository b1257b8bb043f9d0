"""CUDA graphs that a forward pass replays, noticed as it does: not all of them leave a sign on the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Replays:
    """How many CUDA graphs were replayed."""

    def __init__(self) -> None:
        self.count = 0

    def __str__(self) -> str:
        one = self.count == 1
        return (
            f"training_step replays {'a CUDA graph' if one else f'{self.count} CUDA graphs'}, which "
            f"{'holds' if one else 'hold'} the kernels of the recipe that {'it was' if one else 'they were'} captured "
            f"in, whatever recipe is asked for: profile before capturing"
        )


@contextmanager
def counted_replays(when: Callable[[], bool]) -> Iterator[Replays]:
    """Count the calls of `torch.cuda.CUDAGraph.replay` for which `when()` holds.

    PyTorch's and Transformer Engine's graphed callables come through it, and so does a user's own replay.
    """
    found, original = Replays(), torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        found.count += bool(when())
        original(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]
