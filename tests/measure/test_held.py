"""Who holds what: real tensors counted on a CPU, and the fullest moment by a simulated allocator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.measure import held, memory
from lowprec_callback.measure.held import MemoryWatch, holding, storages
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recording import Holding, Memory, PeakHolding

CPU = torch.device("cpu")


def counted(value: Any) -> int:
    return sum(dict(storages(value, CPU)).values())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, bias=False)
        self.two = nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("view", self.one.weight.detach()[:2])


def test_a_real_step_by_owner() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.two(model.one(torch.randn(2, 8))).sum().backward()
    optimizer.step()
    found = holding("bf16", "backward", model, [optimizer], CPU, {})
    # The tied weight once, its view not again; two moments and the count of steps.
    expected = Holding("bf16", "backward", parameters=256, gradients=256, optimizer=2 * 256 + 4, buffers=12,
                       quantized=0, workspaces=0)  # fmt: skip
    assert found == expected
    optimizer.zero_grad()
    assert holding("bf16", "start", model, [optimizer], CPU, {}).gradients == 0


def test_scales_of_narrow_optimizer_states_and_gradients_that_a_gemm_adds_to() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters())
    optimizer._scales = {model.weight: {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}}
    model.weight.main_grad = torch.zeros(8, 8)
    found = holding("bf16", "start", model, [optimizer], CPU, {})
    assert (found.optimizer, found.gradients) == (8, 256)


def quantized(size: int) -> Any:
    """As TE's storages are: no tensor, its data and scales are attributes."""
    return SimpleNamespace(
        _quantizer=None,
        _data=torch.zeros(size, dtype=torch.uint8),
        _transpose=torch.zeros(size, dtype=torch.uint8),
        _scale_inv=torch.ones(1),
        _fp8_dtype="e4m3",
    )


def test_what_a_library_keeps() -> None:
    engine = {"quantized": [{"weight": quantized(64)}, None], "buffers": [torch.ones(5)], "workspaces": [torch.ones(8)]}
    found = holding("fp8_delayed", "forward", nn.Identity(), [], CPU, engine)
    assert (found.quantized, found.buffers, found.workspaces) == (132, 20, 32)


def test_what_has_no_storage_here_counts_nothing() -> None:
    assert counted([None, 3, "text", torch.empty(4, device="meta"), torch.empty(0)]) == 0
    wrapped = SimpleNamespace(_data=torch.empty(4, device="meta"))
    assert counted(wrapped) == 0


def test_views_and_lists_are_counted_once() -> None:
    base = torch.zeros(100)
    assert counted([base[:10], (base[50:], {"x": base.view(10, 10)})]) == 400


class Allocator:
    """The counters of a caching allocator that is told what is live."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.highest = 0
        monkeypatch.setattr(memory, "counters", lambda _device: self.read())
        monkeypatch.setattr(memory, "reset_peak", lambda _device: self.reset())

    def read(self) -> memory.Counters:
        return memory.Counters(self.live + 1, self.highest + 1, 10**6, self.live, self.highest, 5)

    def reset(self) -> None:
        self.highest = self.live

    def take(self, size: int) -> None:
        self.live += size
        self.highest = max(self.highest, self.live)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def watch(model: nn.Module) -> MemoryWatch:
    engine = SimpleNamespace(held=dict)
    return MemoryWatch("fp8_delayed", model, [], CPU, engine, ["0", "1"])


def test_the_fullest_moment_and_what_was_held_just_before(allocator: Allocator) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    seen = watch(model)
    allocator.take(100)
    facts = seen.start()
    seen.begins("forward")
    for name in ("0", "1"):
        seen.boundary(Scope(name, "forward"), True)
        allocator.take(50)
        seen.boundary(Scope(name, "forward"), False)
    facts += seen.ends("forward")
    seen.begins("backward")
    seen.boundary(Scope("1", "backward"), True)
    model[1].weight.grad = torch.zeros(4, 4)
    allocator.take(20)
    allocator.take(-30)
    seen.boundary(Scope("1", "backward"), False)
    seen.boundary(Scope("0", "backward"), True)
    allocator.take(70)
    allocator.take(-100)
    seen.boundary(Scope("0", "backward"), False)
    facts += seen.ends("backward")
    seen.begins("optimizer")
    facts += seen.ends("optimizer")
    (peak,) = seen.peak()
    assert peak == PeakHolding(
        "fp8_delayed",
        "backward",
        "0",
        peak=261,
        peak_requested=260,
        held=191,
        held_requested=190,
        gradients=64,
        open_layers=("0",),
    )
    phases = [(fact.phase, fact.requested, fact.peak) for fact in facts if isinstance(fact, Memory)]
    assert phases == [("start", 100, 101), ("forward", 200, 201), ("backward", 160, 261), ("optimizer", 160, 161)]
    assert [fact.phase for fact in facts if isinstance(fact, Holding)] == [name for name, _, _ in phases]


def test_gradients_set_to_none_between_forward_and_backward_are_gone(allocator: Allocator) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight.grad = torch.zeros(4, 4)
    seen = watch(model)
    allocator.take(100)
    seen.start()
    seen.begins("forward")
    seen.ends("forward")
    model.weight.grad = None
    allocator.take(-64)
    seen.begins("backward")
    allocator.take(500)
    seen.ends("backward")
    (peak,) = seen.peak()
    assert isinstance(peak, PeakHolding)
    assert (peak.gradients, peak.held_requested, peak.phase, peak.module) == (0, 36, "backward", "")


def test_another_micro_batch_opens_its_layers_anew(allocator: Allocator) -> None:
    seen = watch(nn.Identity())
    seen.start()
    for _ in range(2):
        seen.begins("forward")
        seen.boundary(Scope("0", "forward"), True)
        allocator.take(50)
        seen.boundary(Scope("0", "forward"), False)
        seen.boundary(Scope("elsewhere", "forward"), False)
        seen.boundary(Scope("1", "forward"), True)
        allocator.take(50)
    (peak,) = seen.peak() or [None]
    assert isinstance(peak, PeakHolding)
    assert peak.open_layers == ()  # the last new peak was found where "0" ended, for the second time
    assert peak.module == "0"


def test_a_cpu_has_no_peak_but_owners() -> None:
    seen = watch(nn.Linear(4, 4))
    facts = seen.start()
    seen.begins("forward")
    seen.boundary(Scope("0", "forward"), True)
    facts += seen.ends("forward")
    assert [type(fact) for fact in facts] == [Holding, Holding]
    assert seen.peak() == []


def test_the_owners_are_fields_of_the_fact() -> None:
    assert set(held.OWNERS) == set(Holding.__dataclass_fields__) - {"kind", "recipe", "phase"}
