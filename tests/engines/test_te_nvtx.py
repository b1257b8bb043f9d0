"""Transformer Engine's own NVTX ranges: on if it is early enough, and the user told if not."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from lowprec_callback.engines.te_nvtx import HOME, VARIABLE, TeRanges


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """`transformer_engine.pytorch.utils._nvtx_enabled`"""
    home = ModuleType(HOME)

    @functools.cache
    def _nvtx_enabled() -> bool:
        return bool(int(os.getenv(VARIABLE, "0")))

    home._nvtx_enabled = _nvtx_enabled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HOME, home)
    monkeypatch.delenv(VARIABLE, raising=False)
    return _nvtx_enabled


def test_early_enough(asks: Callable[[], bool]) -> None:
    ranges = TeRanges()
    assert ranges.problem is None
    assert VARIABLE not in os.environ
    assert asks() is True
    ranges.close()
    ranges.close()
    assert asks() is False


def test_too_late_is_told(asks: Callable[[], bool]) -> None:
    assert asks() is False  # a TE module ran
    ranges = TeRanges()
    assert ranges.problem is not None
    assert "Set NVTE_NVTX_ENABLED=1 before training starts" in ranges.problem
    ranges.close()
    assert asks() is False


def test_the_users_own_choice_stays(asks: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert asks() is True
    ranges = TeRanges()
    assert ranges.problem is None
    ranges.close()
    monkeypatch.setenv(VARIABLE, "0")
    assert asks() is True  # still what TE remembered


def test_a_variable_that_was_set_is_set_again(asks: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    TeRanges()
    assert os.environ[VARIABLE] == "0"
    assert asks() is True


def test_without_te_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, HOME, raising=False)
    assert TeRanges().problem is None


def test_a_version_that_reads_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HOME, ModuleType(HOME))
    assert "this version reads NVTE_NVTX_ENABLED otherwise" in (TeRanges().problem or "")
