"""The signature book's source, on a CPU: which calls are made under which label, and whose kernels a fact gets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from lowprec_callback.engines.base import Engine
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine
from lowprec_callback.measure import signatures
from lowprec_callback.measure.layer_bench import Shape
from lowprec_callback.measure.signatures import with_kernels
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import ROLES, Gemm, GemmTime, Role
from tests.engines import fake_te

CARDS = load_cards()
CPU = torch.device("cpu")
GEMMS = [Gemm("fc", role, 16, 32, 32, 1, "Linear", True) for role in ROLES] + [
    Gemm("head", role, 16, 32, 8, 1, "nn.Linear", False) for role in ROLES
]


class Tracer:
    """Launches a kernel named after label and role in each range."""

    ranges: list[tuple[str, Role]]

    def __init__(self, device: torch.device) -> None:
        self.started = self.stopped = False
        type(self).ranges = []

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        self.stopped = True

    def gemm_kernels(self) -> dict[tuple[str, Role], tuple[str, ...]]:
        assert self.started
        assert self.stopped
        return {(label, role): (f"kernel {label} {role}",) for label, role in self.ranges}


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> type[Tracer]:
    def gemm_range(label: str, role: Role) -> AbstractContextManager[Any]:
        Tracer.ranges.append((label, role))
        return nullcontext()

    monkeypatch.setattr(signatures, "Tracer", Tracer)
    monkeypatch.setattr(signatures, "gemm_range", gemm_range)
    return Tracer


def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = fake_te.install(monkeypatch)
    made = TransformerEngineEngine(torch.nn.Sequential(fake_te.Linear(fake, 32, 32)), CPU, "a test")
    monkeypatch.setattr(made, "make_linear", lambda k, n, bias, groups: fake_te.Linear(fake, k, n, bias))
    return made


def test_one_call_of_each_job_with_its_three_roles(monkeypatch: pytest.MonkeyPatch, tracer: type[Tracer]) -> None:
    jobs = [
        (CARDS["bf16"], Shape(16, 32, 32, True, "Linear", True)),
        (CARDS["fp8_current"], Shape(16, 32, 32, True, "Linear", True)),
        (CARDS["bf16"], Shape(16, 32, 8, False, "nn.Linear", False)),
    ]
    found = signatures.signatures(engine(monkeypatch), jobs)
    assert sorted(tracer.ranges) == sorted((str(index), role) for index in range(3) for role in ROLES)
    assert found["fp8_current", "wgrad", 16, 32, 32, "Linear"] == ("kernel 1 wgrad",)
    assert found["bf16", "dgrad", 16, 32, 8, "nn.Linear"] == ("kernel 2 dgrad",)
    assert len(found) == 9


def test_a_job_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tracer: type[Tracer]) -> None:
    under_test = engine(monkeypatch)
    whole = Shape(16, 32, 32, True, "Linear", True)
    make = under_test.make_linear

    def broken(k: int, n: int, bias: bool, groups: int = 1) -> Any:
        if k == 24:
            raise RuntimeError("cannot run")
        return make(k, n, bias, groups)

    monkeypatch.setattr(under_test, "make_linear", broken)
    jobs = [(CARDS["bf16"], Shape(16, 24, 32, True, "Linear", True)), (CARDS["bf16"], whole)]
    found = signatures.signatures(under_test, jobs)
    assert {key[3] for key in found} == {32}


def test_shapes_that_differ_in_their_bias_share_a_key(monkeypatch: pytest.MonkeyPatch, tracer: type[Tracer]) -> None:
    jobs = [(CARDS["bf16"], Shape(16, 32, 32, bias, "Linear", True)) for bias in (True, False)]
    found = signatures.signatures(engine(monkeypatch), jobs)
    assert found["bf16", "fprop", 16, 32, 32, "Linear"] == ("kernel 0 fprop", "kernel 1 fprop")


def test_a_cpu_launches_no_kernels() -> None:
    times = [GemmTime("bf16", role, 16, 32, 32, "kernel", (1.0,)) for role in ROLES]
    plain = PlainTorchEngine(torch.nn.Linear(32, 32), CPU, "a test")
    assert list(with_kernels(plain, [CARDS["bf16"]], "bf16", GEMMS, times)) == times


def test_facts_get_the_kernels_of_their_shape_and_failures_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, Shape]] = []

    def signatures_of(_engine: Any, jobs: list[tuple[Any, Shape]]) -> dict[Any, tuple[str, ...]]:
        made.extend((card.name, shape) for card, shape in jobs)
        return {("bf16", "fprop", 16, 32, 32, "Linear"): ("a",), ("fp8_current", "fprop", 16, 32, 32, "Linear"): ("b",)}

    monkeypatch.setattr(signatures, "signatures", signatures_of)
    under_test = PlainTorchEngine(torch.nn.Linear(32, 32), torch.device("cuda"), "a test")
    times = [
        GemmTime("bf16", "fprop", 16, 32, 32, "kernel", (1.0,)),
        GemmTime("bf16", "wgrad", 16, 32, 32, "kernel", (1.0,)),
        GemmTime("fp8_current", "fprop", 16, 32, 32, "kernel", failure="out of memory"),
        GemmTime("bf16", "fprop", 16, 32, 8, "kernel", (1.0,), family="nn.Linear"),
    ]
    cards = [CARDS["bf16"], CARDS["fp8_current"]]
    assert [fact.kernels for fact in with_kernels(under_test, cards, "bf16", GEMMS, times)] == [("a",), (), (), ()]
    # What failed is not tried again, and no recipe reaches the head.
    assert [(name, shape.n) for name, shape in made] == [("bf16", 32), ("bf16", 8)]
