"""The captured GEMMs: which layer, which role, how often."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec_callback.engines.base import LinearLayer, Region, Weight
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.measure.dispatch import AtenProduct, Call
from lowprec_callback.measure.scopes import Direction, ModuleScopes, Scope
from lowprec_callback.measure.shapes import GemmLog, role_of
from lowprec_callback.measure.trace import Tracer, module_range
from lowprec_callback.recording import Dispatch, Gemm, Operand, Product, Role

FP8, WIDE = Operand("Float8TensorStorage", "e4m3", "tensor-current"), Operand("Tensor", "bf16", "none")

MLP = LinearLayer("block.mlp", "LayerNormMLP", (Weight(".fc1", 8, 32), Weight(".fc2", 32, 8)), True, True)
OUT = LinearLayer("block.out", "Linear", (Weight("", 8, 8),), False, True)
HEAD = LinearLayer("head", "nn.Linear", (Weight("", 8, 5),), False, False)
FUSED = (
    LinearLayer("ops.0", "Linear", (Weight("", 8, 16),), True, True),
    LinearLayer("ops.1.0", "Linear", (Weight("", 16, 8),), False, True),
)
LAYERS = [MLP, OUT, HEAD, *FUSED]

LAYOUTS: dict[Role, str] = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}


def call(path: str | None, role: Role, m: int, k: int, n: int, **changes: Any) -> Call:
    direction: Direction = "forward" if role == "fprop" else "backward"
    scope = None if path is None else Scope(path, direction)
    made = Call(scope, role, m, k, n, LAYOUTS[role], FP8, FP8, "bf16", False, False, 1, "generic_gemm")
    return replace(made, **changes)


def keys(gemms: list[Gemm]) -> list[tuple[str, str, int, int, int, int]]:
    return [(g.module, g.role, g.m, g.k, g.n, g.calls) for g in gemms]


# -- calls into the library --------------------------------------------------------------------------------------


def test_two_linears_in_one_module_are_told_apart_by_their_sizes() -> None:
    log = GemmLog(LAYERS)
    for role in ("fprop", "dgrad", "wgrad"):
        log.add_call(call("block.mlp", role, 6, 8, 32))
        log.add_call(call("block.mlp", role, 6, 32, 8))
    assert keys(log.gemms()) == [
        (f"block.mlp.{fc}", role, 6, k, n, 1)
        for fc, k, n in (("fc1", 8, 32), ("fc2", 32, 8))
        for role in ("fprop", "dgrad", "wgrad")
    ]
    assert {(g.family, g.bias, g.quantizable, g.groups) for g in log.gemms()} == {("LayerNormMLP", True, True, 1)}


def test_equal_calls_are_counted() -> None:
    """Gradient accumulation: four micro-batches, the first of which does not accumulate."""
    log = GemmLog(LAYERS)
    for micro_batch in range(4):
        log.add_call(call("block.out", "fprop", 6, 8, 8))
        log.add_call(call("block.out", "wgrad", 6, 8, 8, accumulate=micro_batch > 0))
    assert keys(log.gemms()) == [("block.out", "fprop", 6, 8, 8, 4), ("block.out", "wgrad", 6, 8, 8, 4)]
    assert log.calls == 8
    counted = {(d.role, d.accumulate): d.calls for d in log.dispatches("bf16")}
    assert counted == {("fprop", False): 4, ("wgrad", False): 1, ("wgrad", True): 3}


def test_other_token_counts_are_other_shapes() -> None:
    log = GemmLog(LAYERS)
    for m in (6, 6, 2):
        log.add_call(call("block.out", "fprop", m, 8, 8))
    assert keys(log.gemms()) == [("block.out", "fprop", 2, 8, 8, 1), ("block.out", "fprop", 6, 8, 8, 2)]


def test_modules_come_in_the_order_in_which_they_ran() -> None:
    log = GemmLog(LAYERS)
    for path in ("block.out", "head", "block.out"):
        layer = next(layer for layer in LAYERS if layer.path == path)
        log.add_call(call(path, "wgrad", 6, layer.weights[0].k, layer.weights[0].n))
        log.add_call(call(path, "fprop", 6, layer.weights[0].k, layer.weights[0].n))
    assert [(g.module, g.role) for g in log.gemms()] == [
        ("block.out", "fprop"),
        ("block.out", "wgrad"),
        ("head", "fprop"),
        ("head", "wgrad"),
    ]


def test_fused_operators_are_found_below_the_container_that_runs_them() -> None:
    log = GemmLog(LAYERS)
    log.add_call(call("ops", "fprop", 6, 8, 16))
    log.add_call(call("ops", "fprop", 6, 16, 8))
    assert [g.module for g in log.gemms()] == ["ops.0", "ops.1.0"]
    assert log.module_of(Scope("ops", "backward"), (6, 16, 8)) == "ops.1.0"


def test_a_weight_of_other_sizes_still_has_its_module() -> None:
    """Sharded over ranks, or several weights run as one."""
    log = GemmLog(LAYERS)
    log.add_call(call("block.out", "fprop", 6, 8, 24))
    log.add_call(call("block.mlp", "fprop", 6, 8, 64))  # of which of the two?
    log.add_call(call("ops", "fprop", 6, 3, 3))
    log.add_call(call("elsewhere", "fprop", 6, 3, 3))
    log.add_call(call(None, "fprop", 6, 3, 3))
    assert [(g.module, g.family) for g in log.gemms()] == [
        ("block.out", "Linear"),
        ("block.mlp", "unknown"),
        ("ops", "unknown"),
        ("elsewhere", "unknown"),
        ("(unknown module)", "unknown"),
    ]


def test_a_path_that_begins_alike_is_another_module() -> None:
    log = GemmLog([LinearLayer("a.bc.lin", "Linear", (Weight("", 8, 8),), False, True)])
    assert log.module_of(Scope("a.b", "forward"), (1, 8, 8)) == "a.b"
    assert log.module_of(Scope("a.bc", "forward"), (1, 8, 8)) == "a.bc.lin"


def test_the_module_of_a_call_where_little_is_known() -> None:
    log = GemmLog(LAYERS)
    assert log.module_of(Scope("block.mlp", "forward"), (6, 32, 8)) == "block.mlp.fc2"
    assert log.module_of(Scope("block.mlp", "forward"), None) == "block.mlp"
    assert log.module_of(None, (6, 32, 8)) == ""
    assert log.module_of(None, None) == ""


def test_what_reached_the_library() -> None:
    asked: list[str] = []

    def region(path: str) -> Region:
        asked.append(path)
        return Region(True, "DelayedScaling", "Float8CurrentScaling(fp8_format=E4M3)")

    log = GemmLog(LAYERS, region)
    log.add_call(call("block.mlp", "dgrad", 6, 32, 8, second=replace(FP8, format="e5m2"), recomputed=True))
    assert log.dispatches("fp8_current") == [
        Dispatch(
            recipe="fp8_current",
            module="block.mlp.fc2",
            role="dgrad",
            m=6,
            k=32,
            n=8,
            calls=1,
            layout="NN",
            weight_or_input=FP8,
            other=replace(FP8, format="e5m2"),
            output="bf16",
            accumulate=False,
            entry="generic_gemm",
            family="LayerNormMLP",
            in_region=True,
            other_recipe="DelayedScaling",
            stale_recipe="Float8CurrentScaling(fp8_format=E4M3)",
            recomputed=True,
        )
    ]
    assert asked == ["block.mlp"]


def test_grouped_calls_and_biases() -> None:
    log = GemmLog(LAYERS)
    log.add_call(call("block.out", "fprop", 60, 8, 8, groups=3, entry="te_general_grouped_gemm", bias=True))
    (gemm,) = log.gemms()
    assert (gemm.groups, gemm.bias, gemm.m) == (3, True, 60)


def test_calls_come_from_many_threads() -> None:
    log = GemmLog(LAYERS)
    product = AtenProduct(Scope("head", "forward"), "aten::mm", 1, 6, 8, 5, "fp32", "fp32")

    def work() -> None:
        for _ in range(100):
            log.add_call(call("block.out", "fprop", 6, 8, 8))
            log.add_product(product)
            log.add_product(replace(product, scope=None))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(g.calls for g in log.gemms()) == [400, 400]
    assert [(product.op, product.calls) for product in log.products("bf16")] == [("aten::mm", 400)]
    assert log.calls == 800


def test_nothing_seen() -> None:
    log = GemmLog(LAYERS)
    assert (log.gemms(), log.dispatches("bf16"), log.products("bf16"), log.calls) == ([], [], [], 0)


# -- PyTorch's products --------------------------------------------------------------------------------------------


def test_products_of_no_linear_layer_are_strays() -> None:
    log = GemmLog(LAYERS)
    attention = AtenProduct(Scope("block.core", "forward"), "aten::bmm", 4, 6, 8, 6, "fp32", "fp32")
    log.add_product(attention)
    log.add_product(attention)
    log.add_product(replace(attention, scope=None, op="aten::mm"))
    log.add_product(replace(attention, scope=Scope("head", "forward"), batch=1, columns=7))  # not this layer's sizes
    assert log.gemms() == []
    one = Product("r", "block.core", "aten::bmm", "forward", 4, 6, 8, 6, ("fp32", "fp32"), 2)
    assert log.products("r") == [
        one,
        replace(one, module="", op="aten::mm", direction="", calls=1),
        replace(one, module="head", batch=1, columns=7, calls=1),
    ]


@pytest.mark.parametrize(
    ("direction", "sizes", "transposed", "role"),
    [
        ("forward", (6, 8, 5), False, "fprop"),
        ("forward", (5, 8, 6), False, None),
        ("backward", (6, 5, 8), False, "dgrad"),
        ("backward", (8, 5, 6), True, "dgrad"),  # transposed, for an input that was a transposed view
        ("backward", (5, 6, 8), True, "wgrad"),
        ("backward", (8, 6, 5), True, "wgrad"),
        ("backward", (5, 5, 8), False, "dgrad"),  # as many tokens as features
        ("backward", (5, 5, 8), True, "wgrad"),
        ("backward", (8, 5, 5), True, "dgrad"),
        ("backward", (8, 8, 8), False, None),
    ],
)
def test_roles_by_sizes(direction: Direction, sizes: tuple[int, int, int], transposed: bool, role: Role | None) -> None:
    product = AtenProduct(Scope("head", direction), "aten::mm", 1, *sizes, "fp32", "fp32", transposed)
    assert role_of(product, Weight("", 8, 5)) == role
    assert role_of(replace(product, scope=None), Weight("", 8, 5)) is None
    assert role_of(replace(product, batch=2), Weight("", 8, 5)) is None


# -- a real step ---------------------------------------------------------------------------------------------------


def observed(model: nn.Module, run: Any) -> GemmLog:
    """What the sweep does in a watched step."""
    engine = PlainTorchEngine(model, torch.device("cpu"), "a test")
    opened: list[Any] = []

    def enter(scope: Scope) -> None:
        opened.append(module_range(scope))
        opened[-1].__enter__()

    scopes = ModuleScopes(engine.scoped_modules(), enter, lambda _scope: opened.pop().__exit__(None, None, None))
    tracer = Tracer(torch.device("cpu"), shapes=True)
    tracer.start()
    with scopes.installed():
        run()
    tracer.stop()
    log = GemmLog(engine.linear_layers())
    for product in tracer.products():
        log.add_product(product)
    return log


size = st.integers(1, 12)


@settings(max_examples=40)
@given(
    m=size,
    k=size,
    n=size,
    bias=st.booleans(),
    kind=st.sampled_from(["2d", "3d", "transposed"]),
    needs_grad=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_linear_layer_has_one_product_of_each_role(
    m: int, k: int, n: int, bias: bool, kind: str, needs_grad: bool, dtype: torch.dtype
) -> None:
    assume((m, n) != (1, 1))  # a number and its transpose look alike
    assume(not (kind == "transposed" and m == k == n))  # so do the products of three square matrices
    model = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype))
    x = torch.randn(k, m, dtype=dtype).t() if kind == "transposed" else torch.randn(m, k, dtype=dtype)
    x = (x.reshape(m, 1, k) if kind == "3d" else x).requires_grad_(needs_grad)
    weights = torch.randn(n, dtype=dtype)

    log = observed(model, lambda: (model(x) * weights).sum().backward())
    expected = [("0", role, m, k, n, 1) for role in ("fprop", "dgrad", "wgrad") if needs_grad or role != "dgrad"]
    assert keys(log.gemms()) == expected
    assert not log.products("bf16")
    (first, *_) = log.gemms()
    assert (first.family, first.quantizable, first.bias) == ("nn.Linear", True, bias)
    formats = {(d.weight_or_input.format, d.other.format) for d in log.dispatches("fp32")}
    assert formats == {("fp32", "fp32") if dtype == torch.float32 else ("bf16", "bf16")}


def test_autocast_is_seen_in_the_operands() -> None:
    model = nn.Sequential(nn.Linear(8, 4))

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(torch.randn(6, 8, requires_grad=True))
        y.float().square().sum().backward()

    seen = observed(model, run).dispatches("bf16")
    assert {(d.role, d.weight_or_input.format, d.other.format) for d in seen} == {
        ("fprop", "bf16", "bf16"),
        ("dgrad", "bf16", "bf16"),
        ("wgrad", "bf16", "bf16"),
    }
    assert {d.entry for d in seen} <= {"aten::mm", "aten::addmm"}
    assert {(d.layout, d.output, d.in_region) for d in seen} == {("", "", None)}


def test_accumulated_gradients_shared_weights_and_recomputation_are_counted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 6)
            self.again = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.again(self.again(self.first(x)).tanh())
            return checkpoint(self.again, x.tanh(), use_reentrant=False).square().sum()

    model = Model()

    def run() -> None:
        for _ in range(2):
            model(torch.randn(5, 8)).backward()

    assert keys(observed(model, run).gemms()) == [
        ("first", "fprop", 5, 8, 6, 2),
        ("first", "wgrad", 5, 8, 6, 2),
        ("again", "fprop", 5, 6, 6, 8),  # once more each time, computed again
        ("again", "dgrad", 5, 6, 6, 6),
        ("again", "wgrad", 5, 6, 6, 6),
    ]


def test_attention_is_no_linear_layer() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return (q @ k.transpose(1, 2)).softmax(-1) @ v

    model = nn.Sequential(Attention())
    log = observed(model, lambda: model(torch.randn(2, 3, 8, requires_grad=True)).square().sum().backward())
    assert [(g.module, g.role) for g in log.gemms()] == [("0.qkv", "fprop"), ("0.qkv", "dgrad"), ("0.qkv", "wgrad")]
    assert {(product.module, product.op) for product in log.products("fp32")} == {("0", "aten::bmm")}
    assert sum(product.calls for product in log.products("fp32")) == 6
