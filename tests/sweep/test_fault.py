"""Whether an exception in the user's step is our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.failures import in_words
from lowprec_callback.measure.scopes import ModuleScopes
from lowprec_callback.sweep.fault import passed_through_us


def caught_from(do: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        do()
    return caught.value


def test_a_hook_of_ours_on_the_users_module_is_ours() -> None:
    def fail(_scope: Any) -> None:
        raise RuntimeError("planted in a listener")

    module = nn.ModuleDict({"layer": nn.Linear(2, 3)})
    scopes = ModuleScopes({"layer": module["layer"]}, fail, lambda _scope: None)
    with scopes.installed():
        error = caught_from(lambda: module["layer"](torch.ones(1, 2)))
    assert "planted" in str(error)
    assert passed_through_us(error)


@pytest.mark.parametrize("do", [lambda: torch.ones(2, 3) @ torch.ones(2, 3), lambda: {}["key"]])
def test_the_users_own_and_a_librarys_are_not(do: Callable[[], Any]) -> None:
    assert not passed_through_us(caught_from(do))
    assert not passed_through_us(RuntimeError("never raised"))


def test_in_words() -> None:
    assert in_words(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == "out of memory"
    assert in_words(ValueError("two\n  lines")) == "ValueError: two lines"
    assert in_words(ValueError()) == "ValueError"
    assert len(in_words(ValueError("x" * 1000))) < 330
