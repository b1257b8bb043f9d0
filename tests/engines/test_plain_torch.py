"""The engine without Transformer Engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowprec_callback.engines.base import LinearLayer, NotRun, Region, Weight
from lowprec_callback.engines.plain_torch import PlainTorchEngine, plain_linears
from lowprec_callback.recipes import load_cards

CARDS = load_cards()
CPU = torch.device("cpu")


def engine(model: nn.Module | None = None) -> PlainTorchEngine:
    return PlainTorchEngine(model or nn.Linear(8, 4), CPU, "a test")


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_eight_and_four_bits_are_refused_on_a_cpu(name: str) -> None:
    refusal = engine().refusal(CARDS[name])
    assert refusal == NotRun("needs a CUDA GPU, the device is cpu", "the recipe card's requirements")


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_runs_everywhere_is_not_refused(name: str) -> None:
    assert engine().refusal(CARDS[name]) is None


def test_fp32_is_refused_for_a_model_that_is_narrower() -> None:
    refusal = engine(nn.Linear(2, 2).bfloat16()).refusal(CARDS["fp32"])
    assert refusal is not None
    assert refusal.reason == "the model's parameters are torch.bfloat16: without autocast it cannot run in FP32"


@pytest.mark.parametrize(
    ("model", "baseline"),
    [
        (nn.Linear(2, 2), "fp32"),
        (nn.Linear(2, 2).bfloat16(), "bf16"),
        (nn.Identity(), "fp32"),
        (nn.ParameterList([nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)]), "fp32"),
    ],
)
def test_the_baseline_is_what_the_parameters_are(model: nn.Module, baseline: str) -> None:
    assert engine(model).default_baseline == baseline


def test_regions() -> None:
    model = nn.Linear(8, 4)
    under_test = engine(model)
    x = torch.ones(2, 8)
    assert model(x).dtype == torch.float32
    with under_test.region(CARDS["bf16"]):
        assert model(x).dtype == torch.bfloat16
        with under_test.region(CARDS["fp32"]):  # wins over a region around it
            assert model(x).dtype == torch.float32
        assert model(x).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_ends_with_an_exception() -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), engine().region(CARDS["bf16"]):
        fail()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_probe_that_passes(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8), nn.ReLU())
    assert engine(model).probe(CARDS[name]) is None
    assert all(parameter.grad is None for parameter in model.parameters())


class Broken(nn.Linear):
    """A layer whose gradients come back changed."""

    factor = 0.0
    which = "input"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (x if self.which == "input" else self.weight).register_hook(lambda grad: grad * self.factor)
        return super().forward(x)


@pytest.mark.parametrize("factor", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["input", "weight"])
def test_a_probe_finds_gradients_that_are_lost(monkeypatch: pytest.MonkeyPatch, factor: float, which: str) -> None:
    under_test = engine(nn.Linear(8, 4))
    layer = Broken(8, 4, bias=False)
    layer.factor, layer.which = factor, which
    monkeypatch.setattr(under_test, "make_linear", lambda *_, **__: layer)
    assert under_test.probe(CARDS["bf16"]) == NotRun(
        f"a linear layer 8 -> 4 gave a {which} gradient that is zero or not finite", "our probe"
    )


def test_a_probe_finds_gradients_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    under_test = engine(nn.Linear(8, 4))
    layer = nn.Linear(8, 4, bias=False).requires_grad_(False)
    monkeypatch.setattr(under_test, "make_linear", lambda *_, **__: layer)
    refusal = under_test.probe(CARDS["bf16"])
    assert refusal is not None
    assert "weight gradient that is zero or not finite" in refusal.reason


def test_a_probe_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> nn.Module:
        raise RuntimeError("no kernel")

    under_test = engine(nn.Linear(8, 4))
    monkeypatch.setattr(under_test, "make_linear", fail)
    assert under_test.probe(CARDS["bf16"]) == NotRun(
        "a linear layer 8 -> 4 failed: RuntimeError: no kernel", "our probe"
    )


def test_linear_layers() -> None:
    class Theirs(nn.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    model = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 2, bias=False)), Theirs(2, 2), nn.Conv1d(1, 1, 1))
    assert engine(model).linear_layers() == [
        LinearLayer("0", "nn.Linear", (Weight("", 8, 4),), bias=True, quantizable=True),
        LinearLayer("1.0", "nn.Linear", (Weight("", 4, 2),), bias=False, quantizable=True),
    ]
    assert not any(layer.quantizable for layer in plain_linears(model, quantizable=False))


def test_a_layer_that_is_used_twice_is_one_layer() -> None:
    shared = nn.Linear(4, 4)
    assert [layer.path for layer in engine(nn.Sequential(shared, shared)).linear_layers()] == ["0"]


def test_the_modules_to_follow() -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

    model = nn.Sequential(nn.Sequential(SelfAttention(), nn.LayerNorm(4)), nn.Linear(4, 4))
    assert set(engine(model).scoped_modules()) == {"0.0", "0.0.qkv", "0.1", "1"}


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_fresh_layers(k: int, n: int, bias: bool, dtype: torch.dtype) -> None:
    layer = engine(nn.Linear(2, 2, dtype=dtype)).make_linear(k, n, bias)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features, layer.bias is not None, layer.weight.dtype) == (k, n, bias, dtype)


def test_there_is_no_quantization_state_to_handle() -> None:
    under_test = engine()
    under_test.save()
    under_test.switch()
    under_test.restore()
    with under_test.watch(lambda: None, calls=lambda _call: pytest.fail("there is no entry to watch")):
        under_test.model(torch.ones(1, 8))
    assert under_test.region_of("") == Region()
    assert under_test.scales(CARDS["fp8_delayed"]) == []
