"""A Transformer Engine to test with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowprec_callback.engines import transformer_engine
from tests.engines import fake_te


@pytest.fixture(autouse=True)
def imported_afresh() -> Iterator[None]:
    """Whether TE can be imported is asked once in a process; each test here asks anew."""
    transformer_engine.load.cache_clear()
    torch.manual_seed(0)
    yield
    transformer_engine.load.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_te.Fake:
    """TE 2.20 as far as our engine sees it."""
    return fake_te.install(monkeypatch)


@pytest.fixture
def old_fake(monkeypatch: pytest.MonkeyPatch) -> fake_te.Fake:
    """TE 2.8: other names, and the global state in attributes of a class."""
    return fake_te.install(monkeypatch, old=True)
