"""Whose exception it is: a library's, or the user's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowprec_callback.failures import in_words
from lowprec_callback.sweep.fault import raised_by_library


def product() -> None:
    _ = torch.ones(2, 3) @ torch.ones(2, 3)


def layer() -> None:
    nn.Linear(2, 3)(torch.ones(4, 4))


def not_in_bf16() -> None:
    torch.linalg.inv(torch.eye(2, dtype=torch.bfloat16))


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate")


def own() -> None:
    raise RuntimeError("the user's")


def own_assert() -> None:
    assert torch.ones(1).sum() == 2, "the user's"


def own_key() -> None:
    _ = {}["key"]  # type: ignore[var-annotated]


def raised_by(do: Callable[[], None]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        do()
    return caught.value


@pytest.mark.parametrize("do", [product, layer, not_in_bf16, out_of_memory])
def test_a_librarys(do: Callable[[], None]) -> None:
    assert raised_by_library(raised_by(do))


@pytest.mark.parametrize("do", [own, own_assert, own_key])
def test_the_users(do: Callable[[], None]) -> None:
    assert not raised_by_library(raised_by(do))


def test_what_ends_a_process_is_nobodys_fault() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        raise KeyboardInterrupt
    assert not raised_by_library(caught.value)
    assert not raised_by_library(RuntimeError("never raised"))


def test_in_words() -> None:
    assert in_words(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == "out of memory"
    assert in_words(ValueError("two\n  lines")) == "ValueError: two lines"
    assert in_words(ValueError()) == "ValueError"
    assert len(in_words(ValueError("x" * 1000))) < 330
