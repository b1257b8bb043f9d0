"""What the library logged, joined to the layers that had it run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.analyze.library import agree, operands_of
from lowprec_callback.analyze.precision import Operands
from lowprec_callback.engines.base import LinearLayer, Weight
from lowprec_callback.engines.plain_torch import plain_linears
from lowprec_callback.measure import cublaslt_log
from lowprec_callback.measure.library_lines import read_cublaslt
from lowprec_callback.measure.library_log import LibraryListener
from lowprec_callback.measure.scopes import ModuleScopes, Scope
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import ROLES, Fact, LibraryCall, LibraryLog, Role
from tests.measure.test_library_lines import messages

CUDA = torch.device("cuda")
M, K, N = 8, 32, 48


class FakeLt:
    """Stands in for `cublaslt_log.listen`: `run` is the library running a product on the calling thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listener: Callable[[str, str], None] | None = None
        monkeypatch.setattr(cublaslt_log, "listen", self.listen)

    @contextmanager
    def listen(self, listener: Callable[[str, str], None]) -> Iterator[None]:
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None

    def run(self, m: int, k: int, n: int, a: str = "R_8F_E4M3", b: str = "R_8F_E4M3", more: str = "") -> None:
        """Row-major (m x k) times (k x n), written as BLAS's column-major TN product."""
        assert self.listener is not None
        self.listener("cublasLtMatmul", "A=0X1 computeDesc=0X2")  # the API trace
        self.listener(
            "cublasLtMatmul",
            f"Adesc=[type={a} rows={k} cols={n} ld={k}] Bdesc=[type={b} rows={k} cols={m} ld={k}] "
            f"Ddesc=[type=R_16BF rows={n} cols={m} ld={n}] computeDesc=[computeType=COMPUTE_32F transa=OP_T{more}]",
        )


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    return FakeLt(monkeypatch)


def te_layers() -> list[LinearLayer]:
    mlp = (Weight(".fc1", K, N), Weight(".fc2", N, K))
    return [
        LinearLayer("block.mlp", "LayerNormMLP", mlp, bias=True, quantizable=True),
        LinearLayer("head", "nn.Linear", (Weight("", K, N),), bias=False, quantizable=False),
    ]


def split(facts: list[Fact]) -> tuple[LibraryLog, list[LibraryCall]]:
    log, *calls = facts
    assert isinstance(log, LibraryLog)
    assert all(isinstance(call, LibraryCall) for call in calls)
    return log, calls  # type: ignore[return-value]


def test_a_call_into_te_tells_module_and_role(lt: FakeLt) -> None:
    scope = Scope("block.mlp", "backward")
    listener = LibraryListener(CUDA)
    with listener.listen(lambda: scope):
        with listener.around(scope, "wgrad", (M, K, N)):  # dW = dY^T X: rows N, sum over M, columns K
            lt.run(N, M, K, a="R_8F_E4M3", b="R_8F_E5M2", more=" aScaleMode=VEC128_32F bScaleMode=BLK128x128_32F")
        with listener.around(scope, "dgrad", (M, N, K)):
            lt.run(M, K, N)
    log, calls = split(listener.facts("fp8", GemmLog(te_layers())))
    assert (log.products, log.joined, log.silent, log.libraries) == (2, 2, None, ("cuBLASLt",))
    first, second = calls
    assert (first.module, first.role, first.m, first.k, first.n) == ("block.mlp.fc1", "wgrad", M, K, N)
    assert (first.weight_or_input, first.other) == ("R_8F_E4M3", "R_8F_E5M2")
    assert (first.weight_or_input_scale, first.other_scale) == ("VEC128_32F", "BLK128x128_32F")
    assert (first.rows, first.inner, first.columns) == (N, M, K)
    assert (second.module, second.role) == ("block.mlp.fc2", "dgrad")


def test_the_transposed_product_has_its_operands_the_other_way_round(lt: FakeLt) -> None:
    listener = LibraryListener(CUDA)
    with listener.listen(lambda: None), listener.around(Scope("block.mlp", "backward"), "wgrad", (M, K, N)):
        lt.run(K, M, N, a="R_8F_E5M2", b="R_8F_E4M3")  # X^T dY
    _, (call,) = split(listener.facts("fp8", GemmLog(te_layers())))
    assert (call.weight_or_input, call.other) == ("R_8F_E4M3", "R_8F_E5M2")


def test_a_grouped_call_is_as_many_products_as_it_has_groups(lt: FakeLt) -> None:
    listener = LibraryListener(CUDA)
    with listener.listen(lambda: None), listener.around(Scope("block.mlp", "forward"), "fprop", (M, K, N)):
        lt.run(M // 2, K, N)
        lt.run(M // 2, K, N)
    _, (call,) = split(listener.facts("fp8", GemmLog(te_layers())))
    assert (call.calls, call.m, call.rows) == (2, M, M // 2)


def test_threads_do_not_hear_each_other(lt: FakeLt) -> None:
    listener, barrier = LibraryListener(CUDA), threading.Barrier(2, timeout=30)

    def work(module: str, role: Role, kind: str) -> None:
        with listener.around(Scope(module, "forward"), role, (M, K, N)):
            barrier.wait()
            lt.run(M, K, N, a=kind, b=kind)
            barrier.wait()

    with listener.listen(lambda: None):
        threads = [
            threading.Thread(target=work, args=args)
            for args in (("block.mlp", "fprop", "R_8F_E4M3"), ("head", "fprop", "R_16BF"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    _, calls = split(listener.facts("fp8", GemmLog(te_layers())))
    assert {(call.module, call.other) for call in calls} == {("block.mlp.fc1", "R_8F_E4M3"), ("head", "R_16BF")}


def test_pytorchs_own_products_are_joined_by_module_and_sizes_or_left_alone(lt: FakeLt) -> None:
    running: list[Scope | None] = [Scope("head", "forward")]
    listener = LibraryListener(CUDA)
    with listener.listen(lambda: running[0]):
        lt.run(M, K, N, a="R_16BF", b="R_16BF")
        lt.run(M, K, N + 1)  # no product of this layer
        running[0] = Scope("attention", "forward")
        lt.run(M, K, N)
        running[0] = None
        lt.run(M, K, N)
    log, (call,) = split(listener.facts("bf16", GemmLog(te_layers())))
    assert (call.module, call.role, call.calls) == ("head", "fprop", 1)
    assert (log.products, log.joined) == (4, 1)


def test_a_forward_product_may_be_logged_as_its_transpose(lt: FakeLt) -> None:
    listener = LibraryListener(CUDA)
    with listener.listen(lambda: Scope("head", "forward")):
        lt.run(N, K, M, a="R_16BF", b="R_32F")  # W X^T
    _, (call,) = split(listener.facts("bf16", GemmLog(te_layers())))
    assert (call.module, call.role, call.m, call.k, call.n) == ("head", "fprop", M, K, N)
    assert (call.weight_or_input, call.other) == ("R_32F", "R_16BF"), "the weight is on the left"


def test_a_log_that_is_out_of_reach_says_why_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, ran = LibraryListener(CUDA), False
    monkeypatch.setattr(cublaslt_log, "loaded_libraries", lambda _stem: [])
    monkeypatch.delenv("CUBLASLT_LOG_LEVEL", raising=False)
    with listener.listen(lambda: None):
        ran = True
    log, calls = split(listener.facts("fp8", GemmLog([])))
    assert ran
    assert not calls
    assert log.silent is not None
    assert "no libcublasLt.so is loaded" in log.silent
    assert log.libraries == ()


def test_a_step_that_never_ended_was_not_listened_to() -> None:
    log, _ = split(LibraryListener(CUDA).facts("fp8", GemmLog([])))
    assert log.silent == "the step was not watched to its end"


# -- on a CPU, for real ----------------------------------------------------------------------------------------------

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch was built without MKL")


def heard(model: nn.Module, step: Callable[[], Any]) -> tuple[LibraryLog, list[LibraryCall]]:
    """One forward and backward as the sweep's watched step does it, without the profiler."""
    listener = LibraryListener(torch.device("cpu"))
    layers = plain_linears(model, quantizable=True)
    scopes: ModuleScopes
    scopes = ModuleScopes(dict(model.named_modules()), lambda s: listener.boundary(s), lambda s: listener.boundary(s))
    with listener.listen(scopes.current), scopes.installed():
        step()
    return split(listener.facts("fp32", GemmLog(layers)))


@needs_mkl
def test_every_fp32_product_of_a_cpu_is_heard_with_its_role(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N), "b": nn.Linear(N, K, bias=False)})
    x = torch.randn(M, K, requires_grad=True)
    log, calls = heard(model, lambda: model["b"](torch.relu(model["a"](x))).square().sum().backward())
    assert log.silent is None
    found = {(call.module, call.role): call for call in calls}
    assert set(found) == {(name, role) for name in "ab" for role in ROLES}
    assert {call.calls for call in calls} == {1}
    assert {(call.weight_or_input, call.other) for call in calls} == {("f32", "f32")}
    assert {(c.m, c.k, c.n) for c in calls if c.module == "a"} == {(M, K, N)}
    assert all(c.rows * c.inner * c.columns == M * K * N for c in calls)
    assert capfd.readouterr().out == ""


@needs_mkl
def test_an_fp32_layer_inside_a_bf16_region_is_heard_as_fp32() -> None:
    """What BF16 layers log depends on the CPU: nothing where PyTorch multiplies by itself. FP32 it never is."""

    class Planted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Linear(K, N), nn.Linear(N, K)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.narrow(x).float()
            with torch.autocast("cpu", enabled=False):
                return self.wide(y)

    model, x = Planted(), torch.randn(M, K, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.square().sum().backward()

    _, calls = heard(model, step)
    assert {(call.role, call.other) for call in calls if call.module == "wide"} == {(role, "f32") for role in ROLES}
    assert {call.other for call in calls if call.module == "narrow"} <= {"bf16"}


def test_a_failure_at_the_end_makes_the_witness_silent_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def broken(_listener: Callable[[str, str], None]) -> Iterator[None]:
        yield
        raise OSError("the library is gone")

    monkeypatch.setattr(cublaslt_log, "listen", broken)
    listener = LibraryListener(CUDA)
    with listener.listen(lambda: None):
        pass
    log, _ = split(listener.facts("fp8", GemmLog([])))
    assert log.silent == "OSError: the library is gone"
    with pytest.raises(ZeroDivisionError), LibraryListener(CUDA).listen(lambda: None):
        raise ZeroDivisionError


# -- what an H200 really logged --------------------------------------------------------------------------------------

ORDER: list[tuple[str, Role]] = [
    ("fc1", "fprop"),
    ("fc2", "fprop"),
    ("fc2", "dgrad"),
    ("fc2", "wgrad"),
    ("fc1", "dgrad"),
    ("fc1", "wgrad"),
]
"""How te.LayerNormMLP calls its GEMMs."""


@pytest.mark.parametrize(
    ("start", "recipe"), [(0, "bf16"), (6, "fp8_delayed"), (12, "fp8_current"), (18, "fp8_block")], ids=lambda v: str(v)
)
def test_the_log_of_an_h200_is_what_each_card_asks_for(lt: FakeLt, start: int, recipe: str) -> None:
    card = load_cards()[recipe].to_fact(baseline=recipe == "bf16")
    mlp = LinearLayer("mlp", "LayerNormMLP", (Weight(".fc1", 512, 2048), Weight(".fc2", 2048, 512)), True, True)
    traces = [said for said in messages() if read_cublaslt(*said) is not None][start : start + 6]
    listener = LibraryListener(CUDA)
    with listener.listen(lambda: None):
        for (name, role), said in zip(ORDER, traces, strict=True):
            sizes = (1024, 512, 2048) if name == "fc1" else (1024, 2048, 512)
            direction = "forward" if role == "fprop" else "backward"
            with listener.around(Scope("mlp", direction), role, sizes):
                assert lt.listener is not None
                lt.listener(*said)
    log, calls = split(listener.facts(recipe, GemmLog([mlp])))
    assert (log.products, log.joined) == (6, 6)
    assert [(call.module, call.role) for call in calls] == [(f"mlp.{name}", role) for name, role in ORDER]
    for call in calls:
        assert call.rows * call.inner * call.columns == call.m * call.k * call.n
        assert agree(Operands.asked(card, call.role), operands_of(call)), call
