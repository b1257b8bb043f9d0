"""The numerics guard's parts: batches of any kind, kept and given again; and what is read of gradients."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.sweep.guard import Gradient, Kept, NotKept, NumericsGuard, gradient_of
from lowprec_callback.sweep.snapshot import Rng

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    ids: torch.Tensor
    label: int


class Own:
    """No container that anybody knows."""

    def __init__(self) -> None:
        self.inside = {"x": torch.arange(3)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.requires_grad == other.requires_grad and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return bool(one == other)


BATCHES: list[Any] = [
    torch.arange(6).view(2, 3),
    {"ids": torch.ones(2, dtype=torch.int32), "text": ["a", None], 3: (torch.zeros(()), 1.5)},
    OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
    Pair(torch.ones(2), [torch.ones(2, dtype=torch.bfloat16)]),
    Sample(torch.arange(4), 7),
    Own(),
    torch.randn(3).requires_grad_(),
    torch.ones(1, 4).expand(3, 4),
    torch.eye(3).to_sparse(),
    [],
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_batch_comes_back_as_it_was(batch: Any) -> None:
    args, kwargs = Kept.of((batch, 5), {"more": batch}).again()
    assert args[1] == 5
    if isinstance(batch, torch.Tensor) and batch.is_sparse:
        assert torch.equal(args[0].to_dense(), batch.to_dense())
        return
    assert same(batch, args[0])
    assert args[0] is kwargs["more"]  # what was one object is one again
    assert args[0] is not batch or batch == []


def test_copies_are_each_others_and_the_batchs_own() -> None:
    batch = {"x": torch.ones(3)}
    kept = Kept.of((batch,), {})
    batch["x"].zero_()
    (first,), _ = kept.again()
    first["x"].zero_()
    first.pop("x")
    (second,), _ = kept.again()
    assert torch.equal(second["x"], torch.ones(3))


def test_a_view_does_not_bring_all_of_its_tensor() -> None:
    data = torch.zeros(10_000, 8)
    kept = Kept.of((data[5:7],), {})
    assert kept.nbytes < 1000
    (rows,), _ = kept.again()
    assert rows.shape == (2, 8)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [(iter([1]), "iterator itself"), ({"f": lambda: 1}, "cannot be copied"), ([(x for x in ())], "cannot be copied")],
)
def test_what_cannot_be_kept_is_a_reason(batch: Any, reason: str) -> None:
    with pytest.raises(NotKept, match=reason):
        Kept.of((batch,), {})


def step(guard: NumericsGuard, number: int, keeps: bool, *batches: Any) -> tuple[list[Any], Any]:
    """One step of a loop; what each forward pass got, and the fact."""
    trial = guard.trial("r", number, keeps)
    got = []
    for batch in batches:
        trial.batch_begins()
        (seen,), _ = trial.inputs((batch,), {})
        got.append((seen, torch.rand(()).item()))
        trial.computed(torch.tensor(float(seen)))
    return got, trial.fact()


def test_batches_and_random_numbers_are_given_again() -> None:
    guard = NumericsGuard(nn.Linear(1, 1))
    one, first = step(guard, 0, True, 1, 2)
    torch.rand(7)
    two, second = step(guard, 0, False, 3, 4)
    assert one == two
    assert (first.loss, second.loss, first.micro_batches) == (1.5, 1.5, 2)
    assert first.replayed
    assert second.replayed
    fewer = step(guard, 0, False, 5)[1]
    assert not fewer.replayed
    assert "this step had 1 micro-batches and the baseline's 2" in (fewer.missing or "")


def test_the_step_before_the_first_gets_the_firsts_batches() -> None:
    guard = NumericsGuard(nn.Linear(1, 1))
    assert not step(guard, -1, False, 9)[1].replayed
    step(guard, 0, True, 1)
    assert step(guard, -1, False, 2)[0][0][0] == 1


def test_a_batch_whose_copy_fails_leaves_the_loops_own() -> None:
    class Fickle:
        def __reduce__(self) -> Any:
            return (fail, ())

    guard = NumericsGuard(nn.Linear(1, 1))
    trial = guard.trial("r", 0, True)
    trial.inputs((Fickle(),), {})
    again = guard.trial("r", 0, False)
    batch = object()
    assert again.inputs((batch,), {}) == ((batch,), {})
    fact = again.fact()
    assert not fact.replayed
    assert "a kept batch cannot be made again (ValueError: planted)" in (fact.missing or "")


def fail() -> None:
    raise ValueError("planted")


def test_a_loss_in_any_of_its_forms() -> None:
    guard = NumericsGuard(nn.Linear(1, 1))
    for output, loss in ((torch.tensor(2.0), 2.0), ({"loss": torch.tensor([3.0])}, 3.0), (None, None), ({}, None)):
        trial = guard.trial("r", 0, True)
        trial.inputs((1,), {})
        trial.computed(output)
        assert trial.fact().loss == loss
    trial = guard.trial("r", 0, True)
    trial.inputs((1,), {})
    trial.computed(torch.ones(2))
    assert "a loss of shape (2,)" in (trial.fact().missing or "")


def test_one_loss_that_is_not_finite_is_the_steps() -> None:
    _, fact = step(NumericsGuard(nn.Linear(1, 1)), 0, True, 1.0, math.inf, 3.0)
    assert fact.loss == math.inf


# --- gradients --------------------------------------------------------------------------------------------------


def read(*gradients: torch.Tensor | None, scale: float = 1.0, inside: bool = False) -> Any:
    class Scaler:
        def is_enabled(self) -> bool:
            return scale != 1.0

        def get_scale(self) -> float:
            return scale

    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(4, dtype=g.dtype if g is not None else None)) for g in gradients]
    )
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if inside:
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    trial = NumericsGuard(model, Scaler()).trial("r", 0, True)
    trial.gradients(optimizer)
    return trial.fact()


def test_norms_and_counts() -> None:
    fact = read(torch.tensor([3.0, 0, 0, 0]), torch.tensor([0, 4.0, 0, 0]), torch.zeros(4), None)
    assert fact.grad_norm == pytest.approx(5.0)
    assert (fact.parameters, fact.elements, fact.without) == (3, 12, 1)
    assert (fact.zero, fact.not_finite) == (("2",), ())
    assert (fact.names, fact.norms, fact.sizes) == (("0", "1", "2"), (3.0, 4.0, 0.0), (4, 4, 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_found(bad: float) -> None:
    fact = read(torch.tensor([0, bad, 0, 0]), torch.ones(4))
    assert fact.not_finite == ("0",)
    assert fact.zero == ()
    assert not math.isfinite(fact.grad_norm)


SIZES = [
    (dtype, size)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for size in (1e-30, 1e-7, 1.0, 6e4, 1e30)
    if dtype != torch.float16 or 1e-8 < size < 65504
]


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_neither_small_nor_large_gradients_are_misread(dtype: torch.dtype, size: float) -> None:
    gradient = torch.full((64,), size, dtype=dtype)
    found = Gradient.of(gradient, 1.0)
    assert found.norm == pytest.approx(8 * float(gradient[0]), rel=1e-5)
    assert found.largest == float(gradient[0])


def test_the_loss_scalers_scale_is_taken_out_once() -> None:
    gradient = torch.full((4,), 512.0)
    assert read(gradient, scale=1024.0, inside=True).grad_norm == pytest.approx(1.0)
    assert read(gradient, scale=1024.0).grad_norm == pytest.approx(1024.0)
    assert read(gradient, scale=1024.0).loss_scale == 1024.0
    assert read(gradient).loss_scale is None


def test_where_a_gradient_may_be() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert gradient_of(parameter) is None
    parameter.grad = torch.ones(3)
    assert gradient_of(parameter) is parameter.grad
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    parameter.main_grad = torch.full((3,), 2.0)  # type: ignore[attr-defined]
    assert torch.equal(gradient_of(parameter), torch.full((3,), 2.0))  # type: ignore[arg-type]
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert torch.equal(gradient_of(table.weight), torch.full((1, 2), 2.0))  # type: ignore[arg-type]


def test_of_an_optimizer_that_steps_twice_the_first_gradients_count() -> None:
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    trial = NumericsGuard(layer).trial("r", 0, True)
    for value in (2.0, 7.0):
        layer.weight.grad = torch.full((1, 1), value)
        trial.gradients(optimizer)
    assert trial.fact().grad_norm == 2.0


def test_generators_other_than_torchs_are_given_again() -> None:
    import random

    guard = NumericsGuard(nn.Linear(1, 1))
    drawn = []
    for keeps in (True, False):
        trial = guard.trial("r", 0, keeps)
        trial.inputs((1,), {})
        drawn.append(random.random())
    assert drawn[0] == drawn[1]
    assert isinstance(guard.randomness[0, 0], Rng)
