"""The snapshot: after `restore` nobody can tell, bit for bit, that training went on in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torchmetrics import MeanMetric

from lowprec_callback.sweep.python_state import NotPutBack
from lowprec_callback.sweep.snapshot import Rng, Snapshot, rank_bytes, whole_size


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
        dense = value.to_dense() if value.is_sparse else value
        raw = dense.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
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


# -- whole trainings: with a sweep before them and without


@dataclass
class Training:
    """A model, how it is trained, and what it has computed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]
    scheduler: Any = None
    scaler: Any = None
    more: Callable[[], Any] = lambda: None
    losses: list[Any] = field(default_factory=list)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(bits(self.step()))
            if self.scheduler is not None:
                self.scheduler.step()

    def taken(self) -> Snapshot:
        return Snapshot.take(self.model, [self.optimizer], [self.scheduler] if self.scheduler else [], self.scaler)

    def result(self) -> Any:
        states = [bits(dict(entries)) for entries in self.optimizer.state.values()]
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        scaled = self.scaler.state_dict() if self.scaler is not None else None
        modules = [(name, type(module)) for name, module in self.model.named_modules()]
        return self.losses, all_of(self.model), states, bits(groups), scaled, modules, bits(self.more())


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[], torch.Tensor]) -> Any:
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.LazyConv2d(3, 2)
        self.first = nn.LazyLinear(6)
        self.norm = nn.LazyBatchNorm1d()
        self.last = nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(self.convolution(x).flatten(1))))
        return y


def lazy() -> Training:
    model = Lazy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return Training(model, optimizer, plain_step(model, optimizer, lambda: torch.randn(4, 1, 3, 3)))


def lbfgs() -> Training:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)

    def step() -> Any:
        x = torch.randn(5, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Training(model, optimizer, step)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(x)
        return y


def sparse() -> Training:
    model = Words()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    return Training(model, optimizer, plain_step(model, optimizer, lambda: torch.randint(0, 9, (4,))))


def scaled() -> Training:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    calls = 0

    def step() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(4, 3)).square().mean()
        scaler.scale(loss).backward()
        if calls == 4:
            model.weight.grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss

    model.training_step = step  # where a LightningModule has it
    return Training(model, optimizer, step, scaler=scaler)


class Counts(nn.Module):
    """Everything that people do in a `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls, self.losses = 0, []
        self.average = {"weight": self.layer.weight.detach().clone()}
        self.noise = np.random.default_rng(3)
        self.metric = MeanMetric()
        self.metric.persistent(False)
        self.cache: dict[int, torch.Tensor] = {}
        self.temperature = 1.0
        self.draw = self.drawing()

    @staticmethod
    def drawing() -> Callable[[], float]:
        seen = 0.0

        def draw() -> float:
            nonlocal seen
            seen += 0.25
            return seen

        return draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.temperature *= 0.9
        factor = self.cache.setdefault(self.calls // 3, torch.tensor(float(self.noise.random())))
        y: torch.Tensor = self.layer(x) * factor * self.temperature + self.draw()
        self.average["weight"].lerp_(self.layer.weight.detach(), 0.5)
        self.losses.append(y.detach().mean())
        self.metric.update(y.detach().mean())
        if self.calls == 3:
            self.layer.bias.requires_grad_(False)
        return y + 0.1 * torch.stack(self.losses).mean()


def counts() -> Training:
    model = Counts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=30)
    step = plain_step(model, optimizer, lambda: torch.randn(4, 3))
    return Training(
        model,
        optimizer,
        step,
        scheduler,
        more=lambda: [
            model.calls,
            model.losses,
            model.average,
            model.metric.compute(),
            model.metric._update_count,
            model.temperature,
            list(model.cache.values()),
            [parameter.requires_grad for parameter in model.parameters()],
        ],
    )


class Grows(nn.Module):
    """Registers, replaces and reorders parameters, buffers and modules in its first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            self.scale = nn.Parameter(torch.rand(3))
            self.register_buffer("shift", torch.rand(3))
        if self.calls == 2:
            first = self.first
            del self.first
            self.middle = nn.Linear(3, 3)
            self.first = first
            self.last.bias = None
        for module in self.children():
            x = module(x)
        return x * self.scale + self.shift


def grows() -> Training:
    model = Grows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, optimizer, plain_step(model, optimizer, lambda: torch.randn(4, 3)))


TRAININGS = [lazy, lbfgs, sparse, scaled, counts, grows]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("make", TRAININGS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("warm", [0, 2])
def test_a_training_is_the_same_with_and_without_a_sweep_before_it(make: Callable[[], Training], warm: int) -> None:
    def seeded() -> Training:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        return make()

    alone = seeded()
    alone.run(warm + 6)

    swept = seeded()
    swept.run(warm)
    snapshot, losses = swept.taken(), list(swept.losses)
    for steps in (1, 5, 2):
        swept.run(steps)
        snapshot.restore()
    swept.losses = losses
    swept.run(6)
    assert swept.result() == alone.result()
    assert snapshot.unkept == ()


def test_the_promise_needs_the_snapshot() -> None:
    """That the comparison above sees something: without `restore` all of them differ."""
    for make in TRAININGS:
        if make is lazy:
            continue
        results = []
        for extra in (0, 3):
            torch.manual_seed(0), np.random.seed(0)
            training = make()
            training.run(extra)
            training.losses.clear()
            training.run(2)
            results.append(training.result())
        assert results[0] != results[1]


# -- lazy modules


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_parameters_have_no_shape_again() -> None:
    model = Lazy().to(torch.bfloat16)
    model.first.weight.requires_grad_ = None  # nobody may call it: a lazy parameter refuses
    optimizer = torch.optim.Adam(model.parameters())
    parameters = list(model.parameters())
    snapshot = Snapshot.take(model, [optimizer])
    for _ in range(2):
        model(torch.randn(4, 1, 3, 3, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        assert type(model.first) is nn.Linear
        snapshot.restore()
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert all(type(p) is UninitializedParameter and p.data.dtype == torch.bfloat16 for p in parameters)
        assert all(p.grad is None and p.requires_grad for p in parameters)
        assert type(model.norm.running_mean) is UninitializedBuffer
        assert type(model.norm) is nn.LazyBatchNorm1d
        assert not optimizer.state
        assert optimizer.param_groups[0]["params"][0] is parameters[0]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_has_no_size_yet_counts_nothing() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    assert whole_size(model) == (6, 24)
    assert rank_bytes(model) == 24
    assert Snapshot.take(model, []).nbytes == 24


# -- modules, parameters, optimizers


def test_what_a_step_registers_and_replaces_is_as_it_was_in_place(net: Net) -> None:
    tables = {id(module): (module._parameters, module._buffers, module._modules) for module in net.modules()}
    before = [[(key, id(value)) for key, value in table.items()] for three in tables.values() for table in three]
    modules = list(net.modules())
    snapshot = Snapshot.take(net, [])
    net.first.weight = nn.Parameter(torch.zeros(6, 4))
    net.first.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    net.last = nn.Linear(1, 1)
    net.add_module("new", nn.ReLU())
    net.drop = net.__dict__["_modules"].pop("drop")  # now the last one
    net.register_buffer("more", torch.zeros(1))
    net._buffers = dict(net._buffers)
    net.norm.register_forward_hook(lambda *_: None)
    snapshot.restore()
    assert list(net.modules()) == modules
    for module in modules:
        for now, then in zip((module._parameters, module._buffers, module._modules), tables[id(module)], strict=True):
            assert now is then
    after = [[(key, id(value)) for key, value in table.items()] for three in tables.values() for table in three]
    assert after == before
    assert not net.norm._forward_hooks


def test_under_the_first_fsdp_parameters_are_where_fsdp_puts_them() -> None:
    net = nn.Linear(2, 2)
    net._handle = type("FlatParamHandle", (), {})()
    snapshot = Snapshot.take(net, [])
    moved = net._parameters.pop("weight")
    net.register_buffer("late", torch.zeros(1))
    snapshot.restore()
    assert list(net._parameters) == ["bias"]
    assert moved.shape == (2, 2)
    assert not net._buffers


def test_what_trains(net: Net) -> None:
    snapshot = Snapshot.take(net, [])
    net.first.requires_grad_(False)
    net.frozen.requires_grad_(True)
    snapshot.restore()
    assert net.first.weight.requires_grad
    assert not net.frozen.weight.requires_grad


def test_a_buffer_that_was_drawn_into_the_graph(net: Net) -> None:
    snapshot = Snapshot.take(net, [])
    net.scratch += net.low.sum()
    snapshot.restore()
    assert not net.scratch.requires_grad
    assert net.scratch.grad_fn is None


def test_a_parameter_whose_data_was_exchanged_has_data_as_it_was(net: Net) -> None:
    weight, before = net.first.weight, bits([net.first.weight, net.low])
    net(torch.randn(8, 4)).sum().backward()
    gradient = bits(weight.grad)
    snapshot = Snapshot.take(net, [])
    weight.grad = None
    weight.data = torch.zeros(2, 2)
    net.low.data = net.low.data.double()
    net.last.weight.untyped_storage().resize_(0)
    last = bits(snapshot.tensors["last.weight"].values)
    snapshot.restore()
    assert net.first.weight is weight
    assert bits([weight, net.low]) == before
    assert bits(weight.grad) == gradient
    assert bits(net.last.weight) == last


def test_parameters_that_only_the_optimizer_knows() -> None:
    net, hidden = nn.Linear(1, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*net.parameters(), hidden], lr=1.0)
    snapshot = Snapshot.take(net, [optimizer])
    hidden.grad = torch.ones(2)
    optimizer.step()
    snapshot.restore()
    assert hidden.tolist() == [1, 1]
    assert hidden.grad is None


def test_an_optimizer_that_loads_a_state_in_a_step(net: Net) -> None:
    optimizer = adamw(net)
    train(net, optimizer, 2)
    table, before = optimizer.state, bits(optimizer.state_dict())
    order = list(table)
    snapshot = Snapshot.take(net, [optimizer])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, 1)
    snapshot.restore()
    assert optimizer.state is table
    assert all(one is other for one, other in zip(table, order, strict=True))
    assert bits(optimizer.state_dict()) == before


def test_state_in_lists_is_the_same_lists_again() -> None:
    training = lbfgs()
    training.run(3)
    (entries,) = training.optimizer.state.values()
    directions, before = entries["old_dirs"], bits(entries["old_dirs"])
    held = list(directions)
    snapshot = training.taken()
    for direction in directions:
        direction.zero_()
    training.run(2)
    training.optimizer._numel_cache = -1
    snapshot.restore()
    assert entries["old_dirs"] is directions
    assert all(one is other for one, other in zip(directions, held, strict=True))
    assert bits(directions) == before
    assert training.optimizer._numel_cache == 21


def test_what_schedulers_and_optimizers_note_on_themselves(net: Net) -> None:
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    snapshot = Snapshot.take(net, [optimizer], [scheduler])
    assert not hasattr(optimizer, "_opt_called")
    train(net, optimizer, 2, scheduler)
    snapshot.restore()
    assert not hasattr(optimizer, "_opt_called")
    assert (scheduler._step_count, scheduler.last_epoch) == (1, 0)
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # as it says in a fresh run
        scheduler.step()


def test_a_scaler_whose_step_broke_off() -> None:
    training = scaled()
    snapshot = training.taken()
    scaler, optimizer, model = training.scaler, training.optimizer, training.model
    for warm in range(2):
        table, scale, tracker = scaler._per_optimizer_states, scaler._scale, scaler._growth_tracker
        before = scaler.state_dict()
        scaler.scale(model(torch.randn(4, 3)).mean()).backward()
        scaler.unscale_(optimizer)  # the step ends here: a second `unscale_` would raise
        snapshot.restore()
        assert (scaler._scale, scaler._growth_tracker) == (scale, tracker)
        assert scaler._per_optimizer_states is table
        assert not table
        assert scaler.state_dict() == before
        training.run(1)
        if not warm:
            assert scaler._scale is not None
            snapshot = training.taken()


def test_a_scheduler_of_a_library_goes_by_its_state_dict(net: Net) -> None:
    cls = type("Schedule", (Scaler,), {"__module__": "pandas.schedules"})
    scheduler = cls()
    snapshot = Snapshot.take(net, [], [scheduler])
    scheduler.scale, scheduler.tracker[0] = 1.0, 5
    snapshot.restore()
    assert (scheduler.scale, scheduler.tracker) == (65536.0, [0])


def test_what_cannot_be_put_back_is_passed_on(net: Net) -> None:
    def rows() -> Iterator[int]:
        yield 1

    net.rows = rows()
    assert Snapshot.take(net, []).unkept == ("model.rows (generator)",)


def test_if_one_thing_fails_the_others_are_put_back(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = adamw(net)
    train(net, optimizer, 1)
    net.locked = bytearray(b"a")
    before = all_of(net, optimizer)
    snapshot = Snapshot.take(net, [optimizer])
    train(net, optimizer, 2)
    net.locked.append(1)
    view = memoryview(net.locked)

    def refuse() -> None:
        raise RuntimeError("no memory")

    broken = snapshot.tensors["first.bias"]
    values, broken.values = broken.values, torch.ones(7, 7, 7)
    monkeypatch.setattr(snapshot.optimizers[0], "_put_groups", refuse)
    with pytest.raises(NotPutBack) as caught:
        snapshot.restore()
    assert [name.partition(" (")[0] for name in caught.value.names] == [
        "model.locked",
        "first.bias",
        "the groups of optimizer 0",
    ]
    broken.values = values
    broken.put_back()
    assert all_of(net, optimizer) == before
    view.release()


def test_the_mode_of_a_module_whose_attributes_are_a_librarys() -> None:
    net = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch"})(1, 1)
    snapshot = Snapshot.take(net, [])
    net.eval()
    snapshot.restore()
    assert net.training


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_under_fully_shard_each_rank_keeps_its_own_part() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].calls = 0
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with torch.no_grad():
        net(torch.randn(2, 4))  # an evaluation leaves the root's parameters whole
    snapshot = Snapshot.take(net, [optimizer])
    parameters, before = list(net.parameters()), [bits(p.to_local()) for p in net.parameters()]
    for broken in (True, False, True, False):
        net[0].calls += 1
        loss = net(torch.randn(2, 4)).sum()
        if not broken:
            loss.backward()
            optimizer.step()
        snapshot.restore()
        assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
        assert [bits(p.to_local()) for p in net.parameters()] == before
        assert all(p.grad is None for p in net.parameters())
        assert not optimizer.state
        assert net[0].calls == 0
