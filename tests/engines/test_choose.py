"""Which engine runs a model, and the sentence that says why."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from lowprec_callback.engines.choose import choose_engine
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine
from tests.engines import fake_te
from tests.engines.fake_te import Fake

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_te(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)


def test_a_te_model_on_a_gpu(fake: Fake) -> None:
    model = nn.Sequential(fake_te.Linear(fake, 2, 2), fake_te.LayerNormMLP(fake, 2, 2), nn.Linear(2, 2))
    chosen = choose_engine(model, CUDA)
    assert isinstance(chosen, TransformerEngineEngine)
    assert chosen.why == "the model has 2 Transformer Engine modules, on a CUDA device"
    assert chosen.model is model
    assert chosen.device == CUDA


def test_one_module_is_no_plural(fake: Fake) -> None:
    why = choose_engine(fake_te.Linear(fake, 2, 2), CUDA).why
    assert why == "the model has 1 Transformer Engine module, on a CUDA device"


def test_without_a_gpu_te_is_not_even_imported(no_te: None) -> None:
    chosen = choose_engine(nn.Linear(2, 2), CPU)
    assert isinstance(chosen, PlainTorchEngine)
    assert chosen.why == "the model is on cpu: Transformer Engine needs a CUDA device"


def test_a_te_model_that_is_not_on_a_gpu(fake: Fake) -> None:
    chosen = choose_engine(fake_te.Linear(fake, 2, 2), CPU)
    assert isinstance(chosen, PlainTorchEngine)
    assert chosen.why == "the model is on cpu: Transformer Engine needs a CUDA device"


def test_a_model_without_te_layers(fake: Fake) -> None:
    chosen = choose_engine(nn.Linear(2, 2), CUDA)
    assert isinstance(chosen, PlainTorchEngine)
    assert chosen.why == "the model has no Transformer Engine layer"


def test_a_model_without_te_layers_where_te_is_missing(no_te: None) -> None:
    chosen = choose_engine(nn.Linear(2, 2), CUDA)
    assert isinstance(chosen, PlainTorchEngine)
    what, why = chosen.why.split(", and ")
    assert what == "the model has no Transformer Engine layer"
    assert why.startswith("Transformer Engine cannot be imported here (ModuleNotFoundError: ")


def test_a_te_model_where_the_import_fails(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fake_te.Linear(fake, 2, 2)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", None)
    chosen = choose_engine(model, CUDA)
    assert isinstance(chosen, PlainTorchEngine)
    assert chosen.why.startswith("Transformer Engine cannot be imported: ModuleNotFoundError: ")
