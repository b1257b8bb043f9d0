"""Synthetic arithmetic sequences: a start, a stride in 1..6, modulo the vocabulary.

There are 96 x 6 = 576 of them. A model that has learned them knows the stride from the second token on, and
its loss falls from ln(96) = 4.564 to about ln(6) / sequence length: only that second token cannot be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 96
STRIDES = range(1, 7)


def arithmetic(start: int, stride: int, length: int) -> list[int]:
    """`length` tokens: start, start + stride, ... modulo the vocabulary."""
    return [(start + stride * step) % VOCABULARY for step in range(length)]


def stride_of(tokens: Sequence[int]) -> int | None:
    """The stride that all neighbours share, modulo the vocabulary; None if they share none."""
    strides = {(after - before) % VOCABULARY for before, after in pairwise(tokens)}
    return strides.pop() if len(strides) == 1 else None


class ArithmeticSequences(Dataset[Tensor]):
    """`length` sequences of `tokens` tokens; which one stands at an index depends on the seed alone.

    All different sequences stand in one table, and a batch is one `index_select` into it, so that making a
    batch takes tens of microseconds: the models here are timed, and some of them wait for the CPU anyway.
    """

    def __init__(self, length: int, tokens: int, seed: int = 0) -> None:
        self.table = torch.tensor(
            [arithmetic(start, stride, tokens) for start in range(VOCABULARY) for stride in STRIDES]
        )
        chance = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(len(self.table), (length,), generator=chance)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        """One sequence: (tokens,) int64."""
        return self.table[self.rows[index]]

    def __getitems__(self, indices: list[int]) -> Tensor:
        """A batch, which DataLoader asks for at once: (batch, tokens) int64."""
        return self.table[self.rows[indices]]


def _as_it_is(batch: Any) -> Any:  # a Tensor already, by `__getitems__`
    return batch


def sequences(batches: int, batch: int, sequence: int, seed: int = 0) -> DataLoader[Tensor]:
    """Loads `batches` batches of (batch, sequence + 1) tokens: inputs and, one further, targets."""
    return DataLoader(
        ArithmeticSequences(batches * batch, sequence + 1, seed),
        batch_size=batch,
        collate_fn=_as_it_is,
        # From pageable memory the copy to a GPU would wait for the step before it.
        pin_memory=torch.cuda.is_available(),
    )
