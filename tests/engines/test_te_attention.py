"""TE's choice of attention is overheard, and its logger left as it was."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowprec_callback.engines.te_attention import HOME, LOGGER, Choice, choices


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The parts of TE that choose a backend: `choose(reasons, backend)` does, as TE does, if it must."""
    core, utils = ModuleType(f"{HOME}.dot_product_attention"), ModuleType(f"{HOME}.utils")
    cache: dict[str, Any] = {"backend_selection_requires_update": False}
    core._attention_backends = cache  # type: ignore[attr-defined]
    stream = logging.StreamHandler()
    levels = SimpleNamespace(_log_level=logging.WARNING, _stream_handler=stream)
    utils.AttentionLogging = levels  # type: ignore[attr-defined]

    def choose(reasons: list[str], backend: str) -> None:
        if not cache["backend_selection_requires_update"]:
            return
        logger = logging.getLogger(LOGGER)
        logger.setLevel(levels._log_level)
        if not logger.hasHandlers():
            logger.addHandler(stream)
        logger.debug("Running with config=%s", {"TOKEN": "secret"})
        for reason in reasons:
            logger.debug(reason)
        logger.debug("Selected backend = %s.", backend)

    for module in (core, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(choose=choose, cache=cache, levels=levels)


def test_the_choice_and_its_reasons(attention: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    why = ["Disabling FlashAttention 2 due to NVTE_FLASH_ATTN=0", "Disabling FusedAttention due to NVTE_FUSED_ATTN=0"]
    logger = logging.getLogger(LOGGER)
    before = logger.level, logger.propagate, list(logger.handlers)
    with choices() as found:
        attention.choose([*why, why[0]], "UnfusedDotProductAttention")
        attention.choose([], "FusedAttention (sub-backend 1)")
        attention.choose([], "FusedAttention (sub-backend 1)")
    assert found == [
        Choice("UnfusedDotProductAttention", tuple(why)),
        Choice("FusedAttention (sub-backend 1)", ()),
    ]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert attention.levels._log_level == logging.WARNING
    assert capsys.readouterr() == ("", "")


def test_an_exception_leaves_the_logger_as_it_was(attention: SimpleNamespace) -> None:
    logger = logging.getLogger(LOGGER)
    before = logger.level, logger.propagate, list(logger.handlers)
    with pytest.raises(KeyError), choices():
        raise KeyError
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_a_version_that_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (f"{HOME}.dot_product_attention", f"{HOME}.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with choices() as found:
        pass
    assert found == []
