"""The snapshot: after `restore` nobody can tell, bit for bit, that training went on in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowprec_callback.sweep.snapshot import Rng, Snapshot


class Net(nn.Module):
    """Parameters in two types, buffers of every kind, dropout, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("absent", None)
        self.register_buffer("expanded", torch.ones(1, 3).expand(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept += 1
        self.scratch.mul_(0.5).add_(1)
        self.replaced = self.replaced + 1
        self.absent = torch.ones(1)
        return self.frozen(self.last(self.drop(self.norm(self.first(x))))) + self.low.float().sum()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS = pytest.mark.parametrize("make", [adamw, sgd])


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        random.random()
        np.random.rand()


def bits(value: Any) -> Any:
    """A value with every tensor as its bytes, so that NaNs compare too."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def all_of(net: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    return bits(
        {
            "parameters": dict(net.named_parameters()),
            "buffers": {n: b.clone() for n, b in net.named_buffers()},
            "grads": [p.grad for p in net.parameters()],
            "modes": [m.training for m in net.modules()],
            "optimizers": [o.state_dict() for o in optimizers],
            "rng": [random.getstate(), list(np.random.get_state()[1]), torch.get_rng_state()],
        }
    )


@OPTIMIZERS
@pytest.mark.parametrize("warm", [0, 3])
def test_everything_is_back_bit_for_bit(net: Net, make: Callable[..., torch.optim.Optimizer], warm: int) -> None:
    optimizer = make(net)
    train(net, optimizer, warm)
    optimizer.zero_grad()
    net.drop.eval()
    before = copy.deepcopy(all_of(net, optimizer))
    snapshot = Snapshot.take(net, [optimizer])

    net.drop.train()
    train(net, optimizer, 4)
    net.eval()
    assert all_of(net, optimizer) != before

    assert snapshot.restore() == (
        "parameters and buffers",
        "optimizer",
        "learning-rate schedulers and loss scaler",
        "random generators",
    )
    assert all_of(net, optimizer) == before
    assert (net.absent is None) == (warm == 0)


@OPTIMIZERS
def test_a_fresh_optimizer_is_fresh_again(net: Net, make: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = make(net)
    snapshot = Snapshot.take(net, [optimizer])
    train(net, optimizer, 2)
    assert optimizer.state
    snapshot.restore()
    assert not optimizer.state


@OPTIMIZERS
@pytest.mark.parametrize("warm", [0, 2])
def test_training_goes_on_as_if_nothing_had_happened(
    net: Net, make: Callable[..., torch.optim.Optimizer], warm: int
) -> None:
    twin = copy.deepcopy(net)
    optimizer, other = make(net), make(twin)
    random_state = Rng.take()
    train(twin, other, warm)
    train(twin, other, 3)
    random_state.restore()

    train(net, optimizer, warm)
    snapshot = Snapshot.take(net, [optimizer])
    train(net, optimizer, 5)
    snapshot.restore()
    train(net, optimizer, 3)
    assert all_of(net, optimizer) == all_of(twin, other)


def test_references_that_others_hold_stay_good(net: Net) -> None:
    optimizer = adamw(net)
    train(net, optimizer, 1)
    weight, buffer, replaced = net.first.weight, net.kept, net.replaced
    moment = optimizer.state[weight]["exp_avg"]
    group = optimizer.param_groups[0]
    view = net.last.weight.detach().view(-1)
    expected = bits([weight, buffer, replaced, moment, view])
    snapshot = Snapshot.take(net, [optimizer])
    train(net, optimizer, 3)
    assert net.replaced is not replaced
    snapshot.restore()
    assert net.first.weight is weight
    assert net.kept is buffer
    assert net.replaced is replaced
    assert optimizer.state[weight]["exp_avg"] is moment
    assert optimizer.param_groups[0] is group
    assert bits([weight, buffer, replaced, moment, view]) == expected


def test_state_that_was_thrown_away_comes_back(net: Net) -> None:
    optimizer = adamw(net)
    train(net, optimizer, 2)
    before = bits(optimizer.state_dict())
    snapshot = Snapshot.take(net, [optimizer])
    optimizer.state.clear()
    snapshot.restore()
    assert bits(optimizer.state_dict()) == before


def test_a_snapshot_can_be_restored_twice(net: Net) -> None:
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(net, optimizer, 1, scheduler)
    optimizer.zero_grad()
    before = copy.deepcopy(all_of(net, optimizer))
    snapshot = Snapshot.take(net, [optimizer], [scheduler])
    for _ in range(2):
        train(net, optimizer, 2, scheduler)
        snapshot.restore()
        assert all_of(net, optimizer) == before


def test_nan_payloads_and_signed_zeros_survive() -> None:
    net = nn.Linear(2, 2)
    patterns = torch.tensor([[0x7FC00001, 0x7F800123], [-0x7FFFFF, -0x80000000]], dtype=torch.int32)
    half = torch.tensor([0x7F81, 0x7FFF, -0x8000, 0x0001], dtype=torch.int16)
    net.register_buffer("low", half.view(torch.bfloat16).clone())
    with torch.no_grad():
        net.weight.copy_(patterns.view(torch.float32))
    assert net.weight.isnan().any()
    before = bits([net.weight, net.low])
    snapshot = Snapshot.take(net, [])
    with torch.no_grad():
        net.weight.zero_()
        net.low.zero_()
    snapshot.restore()
    assert bits([net.weight, net.low]) == before


def test_learning_rates_and_schedulers(net: Net) -> None:
    optimizer = sgd(net)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ]
    train(net, optimizer, 2, schedulers[0])
    before = [copy.deepcopy(s.state_dict()) for s in schedulers]
    rate = optimizer.param_groups[0]["lr"]
    snapshot = Snapshot.take(net, [optimizer], schedulers)
    train(net, optimizer, 3, schedulers[0])
    schedulers[1].step(1.0)
    schedulers[1].step(2.0)
    assert optimizer.param_groups[0]["lr"] != rate
    snapshot.restore()
    assert optimizer.param_groups[0]["lr"] == rate
    assert [s.state_dict() for s in schedulers] == before


def test_a_learning_rate_in_a_tensor_stays_the_same_tensor(net: Net) -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    snapshot = Snapshot.take(net, [optimizer])
    rate.mul_(0.5)
    snapshot.restore()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.1)


def test_an_optimizer_that_counts_its_steps_in_the_group(net: Net) -> None:
    """As Transformer Engine's FusedAdam does: the key appears with the first step, and corrects the bias."""
    optimizer = sgd(net)
    snapshot = Snapshot.take(net, [optimizer])
    optimizer.param_groups[0]["step"] = 7
    snapshot.restore()
    assert "step" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["params"] == list(net.parameters())

    optimizer.param_groups[0]["step"] = 7
    snapshot = Snapshot.take(net, [optimizer])
    optimizer.param_groups[0]["step"] += 1
    snapshot.restore()
    assert optimizer.param_groups[0]["step"] == 7


def test_the_scales_of_narrow_optimizer_states(net: Net) -> None:
    """FusedAdam keeps FP16 and FP8 moments with a scale in a table of its own."""
    optimizer = sgd(net)
    scale = torch.tensor([3.0])
    optimizer._scales = {net.low: {"exp_avg": scale}}
    snapshot = Snapshot.take(net, [optimizer])
    scale.fill_(9.0)
    optimizer._scales[net.first.weight] = {"exp_avg": torch.ones(1)}
    snapshot.restore()
    assert list(optimizer._scales) == [net.low]
    assert optimizer._scales[net.low]["exp_avg"] is scale
    assert scale.item() == 3.0


def test_a_group_that_the_user_added_meanwhile_stays(net: Net) -> None:
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1)
    snapshot = Snapshot.take(net, [optimizer])
    optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 0.5})
    optimizer.param_groups[0]["lr"] = 1.0
    snapshot.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


class Scaler:
    """Like `torch.amp.GradScaler`, which does nothing without a GPU."""

    def __init__(self) -> None:
        self.scale, self.tracker = 65536.0, [0]

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "tracker": self.tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.tracker = state["scale"], state["tracker"]


def test_a_loss_scaler(net: Net) -> None:
    scaler = Scaler()
    snapshot = Snapshot.take(net, [], scaler=scaler)
    scaler.scale /= 2
    scaler.tracker[0] = 5
    snapshot.restore()
    assert (scaler.scale, scaler.tracker) == (65536.0, [0])


def test_gradients_that_were_there_are_there_again(net: Net) -> None:
    optimizer = sgd(net)
    net(torch.randn(8, 4)).sum().backward()
    before = [p.grad for p in net.parameters()]
    values = bits(before)
    assert net.frozen.weight.grad is None
    snapshot = Snapshot.take(net, [optimizer])
    train(net, optimizer, 2)
    net.frozen.weight.grad = torch.ones(4, 4)
    snapshot.restore()
    assert all(p.grad is grad for p, grad in zip(net.parameters(), before, strict=True))
    assert bits(before) == values


def test_the_bytes_that_a_snapshot_takes() -> None:
    net = nn.Linear(8, 4, bias=False)
    optimizer = adamw(net)
    assert Snapshot.take(net, [optimizer]).nbytes == 8 * 4 * 4
    net(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert Snapshot.take(net, [optimizer]).nbytes == 4 * (8 * 4 * 4) + 4  # weight, gradient, two moments, step


class Quantized(torch.Tensor):
    """As Transformer Engine's `Float8Tensor`: no values of its own, copies would go through its arithmetic."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, requires_grad=True)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._data = torch.randint(0, 255, shape, dtype=torch.uint8)
        self._transpose = self._data.t().contiguous()
        self._transpose_invalid = False
        self._scale_inv = torch.ones(1)
        self._columnwise = None
        self._quantizer = object()
        self._fp8_dtype = 7

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} would go through the quantized tensor's own arithmetic")


def test_a_quantized_parameter_is_restored_part_by_part() -> None:
    net = nn.Module()
    weight = Quantized((4, 2))
    net._parameters["weight"] = weight
    data, scale, quantizer = weight._data, weight._scale_inv, weight._quantizer
    before = bits([weight._data, weight._transpose, weight._scale_inv])
    snapshot = Snapshot.take(net, [])
    assert snapshot.nbytes == 8 + 8 + 4

    weight._data.fill_(1)  # requantized in place by the optimizer
    weight._scale_inv.mul_(2)
    weight._transpose = None
    weight._transpose_invalid = True
    weight._columnwise = torch.ones(3)
    weight._quantizer = object()
    snapshot.restore()

    assert bits([weight._data, weight._transpose, weight._scale_inv]) == before
    assert weight._data is data
    assert weight._scale_inv is scale
    assert weight._quantizer is quantizer
    assert weight._transpose_invalid is False
    assert weight._columnwise is None


def test_a_part_whose_shape_changed_is_put_back_as_it_was() -> None:
    net = nn.Module()
    weight = Quantized((4, 2))
    net._parameters["weight"] = weight
    before = bits(weight._data)
    snapshot = Snapshot.take(net, [])
    weight._data = torch.zeros(1, dtype=torch.uint8)
    snapshot.restore()
    assert bits(weight._data) == before


def test_generators_are_kept_through_an_exception() -> None:
    torch.manual_seed(1)
    before = Rng.take()

    def draw() -> None:
        torch.rand(3), np.random.rand(), random.random()
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), Rng.kept():
        draw()
    assert random.getstate() == before.python
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before.numpy, strict=True))
    assert torch.equal(torch.get_rng_state(), before.torch_cpu)
