"""Tests that need an NVIDIA GPU and Transformer Engine; elsewhere they are skipped with the reason."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `examples` is no part of the installed package


@functools.cache
def missing() -> str | None:
    """Why the tests cannot run here."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    from lowprec_callback.engines.transformer_engine import load

    return None if load().ok else f"Transformer Engine: {load().reason}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # Warnings of Lightning, TE and torch on that machine are not ours to fix.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if (reason := missing()) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
