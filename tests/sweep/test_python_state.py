"""What user code keeps in Python objects: after `restore` it is as it was, in the same objects."""

from __future__ import annotations

import argparse
import array
import collections
import copy
import csv
import functools
import io
import itertools
import queue
import random
import socket
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from lowprec_callback.measure.scopes import ModuleScopes
from lowprec_callback.sweep import python_state
from lowprec_callback.sweep.python_state import NotPutBack, PythonState

CALLED: list[str] = []
"""User code that ran. It may not, and to raise would be no proof: what is odd is left out without a word."""


@pytest.fixture(autouse=True)
def no_user_code_runs() -> Iterator[None]:
    CALLED.clear()
    yield
    assert not CALLED


class Thing:
    """An object of user code."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Module(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def taken(tensors: bool = True, **roots: Any) -> PythonState:
    return PythonState.take(roots, tensors=tensors)


# -- attributes


@pytest.mark.parametrize("make", [Thing, Module], ids=["object", "module"])
def test_attributes_are_back_by_identity_and_in_order(make: type) -> None:
    token = object()
    thing = make(count=1, token=token, name="a", gone=None)
    before = list(vars(thing).items())
    state = taken(thing=thing)
    thing.count += 1
    thing.token = object()
    del thing.name
    thing.name = "b"
    del thing.gone
    thing.new = 3
    for _ in range(2):
        state.restore()
        assert list(vars(thing).items()) == before
        assert thing.token is token
        thing.new, thing.count = 4, 5


def test_attributes_of_every_module_of_the_tree_and_of_nothing_that_snapshot_keeps() -> None:
    model = Module(child=nn.Sequential(Module(calls=0), nn.Linear(2, 2)))
    parameters = model.child[1]._parameters
    state = taken(model=model)
    model.child[0].calls = 7
    model.child[0].eval()
    model.child[1].bias = None
    model.extra = nn.Linear(1, 1)
    model.register_buffer("late", torch.ones(1))
    state.restore()
    assert model.child[0].calls == 0
    assert model.child[0].training
    assert model.child[1]._parameters is parameters
    assert model.child[1].bias is None
    assert set(model._modules) == {"child", "extra"}
    assert set(model._buffers) == {"late"}


def test_what_is_noted_on_a_parameter() -> None:
    model = nn.Linear(2, 2)
    model.weight.seen = 1
    state = taken(model=model)
    model.weight.seen = 2
    model.bias.seen = 2
    state.restore()
    assert model.weight.seen == 1
    assert not hasattr(model.bias, "seen")


def test_hooks_that_a_step_registers_are_gone_and_removed_ones_are_back() -> None:
    calls: list[str] = []
    model = nn.Linear(1, 1)
    handle = model.register_forward_hook(lambda *_: calls.append("first"))
    state = taken(model=model)
    handle.remove()
    model.register_forward_hook(lambda *_: calls.append("second"), with_kwargs=False, always_call=True)
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.register_full_backward_hook(lambda *_: None)
    state.restore()
    model(torch.ones(1, 1))
    assert calls == ["first"]
    assert not model._forward_hooks_always_called
    assert not model._backward_hooks
    assert model._is_full_backward_hook is None
    handle.remove()
    assert not model._forward_hooks


def test_a_lazy_module_is_lazy_again() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    state = taken(model=model)
    model(torch.ones(2, 5))
    assert type(model[0]) is nn.Linear
    state.restore()
    assert type(model[0]) is nn.LazyLinear
    assert model[0].in_features == 0
    assert model[0]._initialize_hook.id in model[0]._forward_pre_hooks
    assert model[0]._load_hook.id in model[0]._load_state_dict_pre_hooks
    assert model[0]._initialize_hook.id in model[0]._forward_pre_hooks_with_kwargs


def test_of_an_optimizer_all_but_its_state_and_its_groups() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    hooks = optimizer._optimizer_step_pre_hooks
    state = taken(optimizer=optimizer)
    optimizer._numel_cache = 6
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.defaults["lr"] = 9.0
    optimizer.state[optimizer._params[0]]["func_evals"] = 3
    optimizer.param_groups[0]["lr"] = 9.0
    state.restore()
    assert optimizer._numel_cache is None
    assert optimizer._optimizer_step_pre_hooks is hooks
    assert not hooks
    assert optimizer.defaults["lr"] == 1
    assert optimizer.state
    assert optimizer.param_groups[0]["lr"] == 9.0


def test_an_optimizer_that_nobody_named_is_kept_whole() -> None:
    model = Module(layer=nn.Linear(2, 2))
    model.inner = torch.optim.SGD(model.layer.parameters(), lr=0.1, momentum=0.9)
    state = taken(model=model)
    model.layer(torch.ones(1, 2)).sum().backward()
    model.inner.step()
    model.inner.param_groups[0]["lr"] = 1.0
    state.restore()
    assert not model.inner.state
    assert model.inner.param_groups[0]["lr"] == 0.1


def test_schedulers_and_a_scaler() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 1)], [2]
    )
    scaler = torch.amp.GradScaler("cpu")
    before = copy.deepcopy(scheduler.state_dict())
    state = taken(scheduler=scheduler, scaler=scaler)
    optimizer.step()
    for _ in range(3):
        scheduler.step()
    scaler.scale(torch.ones(1))
    scaler._per_optimizer_states[3]["stage"] = "stepped"
    assert scheduler.state_dict() != before
    state.restore()
    assert scheduler.state_dict() == before
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert not scaler._per_optimizer_states


def test_a_scaler_of_another_part_of_torch() -> None:
    made = type("Sharded", (torch.amp.GradScaler,), {"__module__": "torch.distributed.fsdp.sharded_grad_scaler"})
    scaler = made("cpu")
    state = taken(scaler=scaler)
    scaler._growth_interval = 1
    state.restore()
    assert scaler._growth_interval == 2000


class Slotted:
    __slots__ = ("__weakref__", "count", "rows")

    def __init__(self) -> None:
        self.count, self.rows = 0, [1]


@dataclass(frozen=True, slots=True)
class Frozen:
    rows: list[int] = field(default_factory=list)


class SlottedChild(Slotted):
    """With attributes of its own besides."""


def test_slots() -> None:
    plain, child, frozen = Slotted(), SlottedChild(), Frozen([1])
    del child.count
    child.more = 1
    state = taken(model=Thing(all=[plain, child, frozen]))
    plain.count = 3
    plain.rows.append(2)
    plain.rows = []
    child.count = 1
    child.more = 2
    frozen.rows.clear()
    state.restore()
    assert (plain.count, plain.rows, frozen.rows, child.more) == (0, [1], [1], 1)
    assert not hasattr(child, "count")


def test_plain_holders_of_the_standard_library() -> None:
    thing = Thing(
        names=argparse.Namespace(a=1),
        space=types.SimpleNamespace(b=1),
        user=collections.UserDict(c=1),
    )
    state = taken(thing=thing)
    thing.names.a = thing.space.b = thing.user["c"] = 2
    state.restore()
    assert (thing.names.a, thing.space.b, thing.user["c"]) == (1, 1, 1)


# -- containers


def refuse(*_: Any, **__: Any) -> Any:
    CALLED.append("a method")
    raise AssertionError("user code")


class OddList(list):  # type: ignore[type-arg]
    __iter__ = __len__ = __getitem__ = __setitem__ = __reduce_ex__ = refuse  # type: ignore[assignment]


class OddDict(dict):  # type: ignore[type-arg]
    __iter__ = __len__ = __getitem__ = __setitem__ = __reduce_ex__ = refuse  # type: ignore[assignment]
    keys = values = items = copy = refuse


def test_every_container_in_place() -> None:
    made: dict[str, Any] = {
        "list": [1, [2], 3],
        "dict": {"b": 1, "a": {2: 3}},
        "ordered": collections.OrderedDict(x=1, y=2),
        "default": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("aab"),
        "set": {1, 2, 3},
        "deque": collections.deque([1, 2, 3], maxlen=3),
        "bytes": bytearray(b"abc"),
        "array": array.array("i", [1, 2]),
        "empty": [],
        "odd": OddList([1, 2]),
    }
    thing, before = Thing(**made), copy.deepcopy({k: v for k, v in made.items() if k != "odd"})
    state = taken(thing=thing)

    def change() -> None:
        thing.list[1].append(4)
        thing.list.reverse()
        del thing.dict["b"]
        thing.dict["a"][5] = 6
        thing.dict["b"] = 1
        thing.ordered.move_to_end("x")
        thing.ordered["z"] = 3
        thing.default["a"].append(1)
        thing.default["b"].append(2)
        thing.counter.update("abc")
        thing.set -= {1}
        thing.set.add(9)
        thing.deque.append(4)
        thing.bytes[0] = 0
        thing.bytes.extend(b"d")
        thing.array.append(3)
        thing.empty.append(1)
        list.append(thing.odd, 3)

    change()
    for _ in range(2):
        state.restore()
        assert {name: value for name, value in vars(thing).items() if name != "odd"} == before
        assert all(getattr(thing, name) is value for name, value in made.items())
        assert list(thing.dict) == ["b", "a"]
        assert list(thing.ordered) == ["x", "y"]
        assert list(reversed(thing.ordered)) == ["y", "x"]
        assert list(list.__iter__(thing.odd)) == [1, 2]
        assert thing.deque.maxlen == 3
        change()


def test_a_dict_whose_methods_are_somebody_elses() -> None:
    odd = OddDict(a=[1], b=2)
    odd.label = "x"
    state = taken(model=Thing(odd=odd))
    dict.__setitem__(odd, "c", 3)
    dict.__getitem__(odd, "a").append(2)
    odd.label = "y"
    state.restore()
    assert list(dict.items(odd)) == [("a", [1]), ("b", 2)]
    assert odd.label == "x"


def test_equal_keys_and_elements_are_told_apart() -> None:
    one, same = [1], [1]
    table, rows = {1: "a"}, [one]
    state = taken(thing=Thing(table=table, rows=rows))
    del table[1]
    table[True] = "a"
    rows[0] = same
    state.restore()
    assert [type(key) for key in table] == [int]
    assert rows[0] is one


def test_a_dict_that_is_its_own_attributes() -> None:
    class Attributes(dict):  # type: ignore[type-arg]
        def __init__(self, **values: Any) -> None:
            super().__init__(values)
            self.__dict__ = self

    settings = Attributes(a=1, rows=[1])
    state = taken(thing=Thing(settings=settings))
    settings.a = 2
    settings.rows.append(2)
    settings.c = 3
    state.restore()
    assert dict(settings) == {"a": 1, "rows": [1]}


def test_tuples_and_frozensets_are_looked_into() -> None:
    Pair = collections.namedtuple("Pair", "a b")
    inner, slotted = [1], Slotted()
    state = taken(thing=Thing(pair=Pair(inner, (2, {"c": inner})), frozen=frozenset([slotted])))
    inner.append(2)
    slotted.count = 1
    state.restore()
    assert inner == [1]
    assert slotted.count == 0


def test_cycles() -> None:
    thing = Thing(rows=[])
    thing.me, thing.count = thing, 0
    thing.rows.append(thing.rows)
    state = taken(thing=thing)
    thing.count = 1
    thing.rows.append(1)
    state.restore()
    assert thing.count == 0
    assert thing.rows == [thing.rows]


LEAVES = st.one_of(st.integers(-3, 3), st.text("ab", max_size=2), st.none(), st.booleans())
KEYS = st.one_of(st.text("abc", max_size=2), st.integers(0, 3))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.sets(LEAVES, max_size=4),
        st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3).map(lambda kw: Thing(**kw)),
    ),
    max_leaves=12,
)


def shape_of(value: Any) -> Any:
    """Types, identities and order of everything in a nested structure."""
    if isinstance(value, Thing):
        return "thing", id(value), [(key, shape_of(each)) for key, each in vars(value).items()]
    if isinstance(value, dict):
        return type(value), id(value), [(type(key), key, shape_of(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), id(value), [shape_of(each) for each in value]
    if isinstance(value, set):
        return set, id(value), sorted(repr(each) for each in value)
    return type(value), value


def containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Thing):
        value = vars(value)
    if isinstance(value, dict | list | set | collections.deque):
        yield value
    if isinstance(value, dict | list | tuple | collections.deque):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from containers_in(each)


def spoil(container: Any, how: int, value: Any) -> None:
    if isinstance(container, dict):
        keys = list(container)
        if how % 3 == 0 and keys:
            container[keys[how % len(keys)]] = value
        elif how % 3 == 1 and keys:
            again = keys[how % len(keys)]
            container[again] = container.pop(again)
        else:
            container[f"n{how}"] = value
    elif isinstance(container, set):
        container.discard(next(iter(container), None)) if how % 2 else container.add(how + 100)
    elif how % 3 == 0 or not container:
        container.append(value)
    elif how % 3 == 1:
        container.reverse()
    else:
        container.clear()


@given(tree=TREES, changes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), TREES), min_size=1, max_size=8))
def test_any_nested_structure_after_any_changes(tree: Any, changes: list[tuple[int, int, Any]]) -> None:
    root = Thing(tree=tree)
    before = shape_of(root)
    state = taken(root=root)
    for _ in range(2):
        for which, how, value in changes:
            found = list(containers_in(root))
            spoil(found[which % len(found)], how, copy.deepcopy(value))
        state.restore()
        assert shape_of(root) == before


# -- tensors and arrays


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_are_back_in_place_bit_for_bit() -> None:
    nan = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32)
    mean = {"layer": torch.ones(2, 3).t()}
    model = Module(nan=nan, mean=mean, rows=[torch.zeros(2, dtype=torch.bfloat16)], flag=torch.tensor(True))
    before = [bits(nan), bits(mean["layer"]), bits(model.rows[0]), bits(model.flag)]
    state = taken(model=model)
    kept = [nan, mean["layer"], model.rows[0], model.flag]
    for _ in range(2):
        nan.zero_()
        mean["layer"].mul_(0.9)
        model.rows[0] += 1
        model.flag.logical_not_()
        mean["layer"], model.nan = torch.ones(1), torch.ones(1)
        state.restore()
        now = [model.nan, mean["layer"], model.rows[0], model.flag]
        assert all(one is other for one, other in zip(now, kept, strict=True))
        assert [bits(each) for each in now] == before


def test_an_unchanged_tensor_is_not_written_to() -> None:
    model = Module(table=torch.randn(3))
    state = taken(model=model)
    version = model.table._version
    state.restore()
    assert model.table._version == version


def test_a_tensor_that_was_drawn_into_the_graph_is_out_of_it() -> None:
    weight = torch.ones(1, requires_grad=True)
    model = Module(total=torch.zeros(1), own=torch.ones(1, requires_grad=True))
    state = taken(model=model)
    model.total += weight
    model.own.requires_grad_(False)
    model.own.grad = torch.ones(1)
    assert model.total.requires_grad
    state.restore()
    assert not model.total.requires_grad
    assert model.total.is_leaf
    assert model.total.item() == 0
    assert model.own.requires_grad
    assert model.own.grad is None


def test_a_tensor_that_was_in_the_graph_is_in_it_still() -> None:
    weight = torch.ones(1, requires_grad=True)
    model = Module(last=weight * 2)
    state = taken(model=model)
    with torch.no_grad():
        model.last.mul_(3)
    state.restore()
    assert model.last.item() == 2
    assert model.last.grad_fn is not None


def test_the_sign_of_a_zero() -> None:
    model = Module(zero=torch.zeros(1), pair=torch.zeros(1, dtype=torch.complex64))
    state = taken(model=model)
    model.zero.neg_()
    model.pair.neg_()
    state.restore()
    assert not model.zero.signbit().any()
    assert not torch.view_as_real(model.pair).signbit().any()


def test_a_tensor_made_in_inference_mode() -> None:
    with torch.inference_mode():
        made = torch.zeros(2)
    model = Module(made=made)
    state = taken(model=model)
    with torch.inference_mode():
        made += 1
    state.restore()
    assert made.tolist() == [0, 0]


def test_a_tensor_that_was_resized_or_converted() -> None:
    model = Module(rows=torch.arange(3.0), kind=torch.arange(3.0))
    rows, kind = model.rows, model.kind
    state = taken(model=model)
    rows.data = torch.zeros(5)
    kind.data = kind.data.half()
    state.restore()
    assert model.rows is rows
    assert rows.tolist() == [0, 1, 2]
    assert kind.dtype == torch.float32


def test_tensors_that_have_nothing_to_keep_are_left() -> None:
    sparse = torch.eye(2).to_sparse()
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    model = Module(sparse=sparse, freed=freed, meta=torch.ones(2, device="meta"), spread=torch.ones(1).expand(4))
    state = taken(model=model)
    model.spread[0].fill_(5.0)
    model.sparse = None
    state.restore()
    assert model.sparse is sparse
    assert model.spread.tolist() == [1] * 4


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return refuse()


def test_a_subclass_that_redefines_operations() -> None:
    plain = torch.ones(2)
    loud = plain.as_subclass(Loud)
    state = taken(model=Thing(loud=loud))
    with torch._C.DisableTorchFunctionSubclass():
        loud.zero_()
    state.restore()
    assert plain.tolist() == [1, 1]


class Dispatching(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Dispatching:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return refuse()


def test_a_tensor_that_computes_for_itself_what_a_copy_is_is_held_as_it_is() -> None:
    thing = Thing(wrapper=Dispatching())
    held = thing.wrapper
    state = taken(thing=thing)
    thing.wrapper = None
    state.restore()
    assert thing.wrapper is held


def test_no_copy_of_parameters_nor_of_their_views() -> None:
    layer = nn.Linear(3, 3)
    layer.register_buffer("mask", torch.ones(3))
    layer(torch.ones(1, 3)).sum().backward()
    model = Module(layer=layer)
    model.alias = [layer.weight, layer.mask, layer.weight.detach().view(-1), layer.weight.grad, layer.weight[1]]
    state = taken(model=model)
    assert state.nbytes == 0
    with torch.no_grad():
        layer.weight.zero_()
    state.restore()
    assert not layer.weight.any()
    model.other = torch.ones(4)
    assert taken(model=model).nbytes == 16


def test_a_module_outside_of_the_tree_is_kept_whole() -> None:
    average = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = Module(hidden=[average])
    weight, before = average[0].weight, bits(average[0].weight)
    state = taken(model=model)
    with torch.no_grad():
        average[0].weight.mul_(2)
        average[1].num_batches_tracked += 1
    average[0].bias = None
    average.append(nn.ReLU())
    weight.requires_grad_(False)
    weight.grad = torch.ones(2, 2)
    state.restore()
    assert average[0].weight is weight
    assert bits(weight) == before
    assert weight.requires_grad
    assert weight.grad is None
    assert average[0].bias is not None
    assert average[1].num_batches_tracked == 0
    assert len(average) == 2


def test_arrays() -> None:
    plain, inner = np.array([1.0, np.nan]), [1]
    objects = np.empty(1, dtype=object)
    objects[0] = inner
    frozen = np.ones(2)
    frozen.flags.writeable = False
    thing = Thing(plain=plain, objects=objects, frozen=frozen, view=plain[1:], fortran=np.asfortranarray(np.eye(2)))
    state = taken(thing=thing)
    plain += 1
    thing.fortran[0, 1] = 7
    thing.plain = np.zeros(1)
    inner.append(2)
    objects[0] = None
    state.restore()
    assert thing.plain is plain
    assert plain[0] == 1
    assert objects[0] is inner
    assert inner == [1]
    assert (thing.fortran == np.eye(2)).all()


def test_a_file_in_memory_is_not_copied(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "rows", dtype=np.float32, mode="w+", shape=(4,))
    assert taken(thing=Thing(rows=mapped)).nbytes == 0


def test_an_array_that_was_resized() -> None:
    thing = Thing(rows=np.arange(4))
    state = taken(thing=thing)
    thing.rows.resize(2, refcheck=False)
    state.restore()
    assert thing.rows.tolist() == [0, 1, 2, 3]


def test_data_is_not_copied() -> None:
    images, labels = torch.ones(4), np.ones(4)
    dataset = TensorDataset(images)
    dataset.labels, dataset.reads = labels, 0
    for state in (taken(tensors=False, loader=DataLoader(dataset)), taken(model=Module(train=dataset))):
        assert state.nbytes == 0
        dataset.reads = 5
        dataset.tensors = ()
        state.restore()
        assert dataset.reads == 0
        assert dataset.tensors[0] is images


# -- random generators, files, functions


def draws(thing: Any) -> list[Any]:
    return [
        torch.rand(1, generator=thing.torch).item(),
        thing.numpy.random(),
        thing.numpy.normal(),
        np.random.Generator(thing.bits).random(),
        thing.old.normal(),
        thing.python.gauss(0, 1),
        thing.mine.random(),
        thing.draw(),
    ]


class MyRandom(random.Random):
    calls = 0

    getstate = setstate = refuse


@pytest.mark.parametrize("tensors", [True, False])
def test_generators_wherever_they_are(tensors: bool) -> None:
    thing = Thing(
        torch=torch.Generator().manual_seed(1),
        numpy=np.random.default_rng(1),
        bits=np.random.Philox(1),
        old=np.random.RandomState(1),
        python=random.Random(1),
        mine=MyRandom(1),
        draw=random.Random(2).random,
    )
    loader = DataLoader(range(4), generator=torch.Generator().manual_seed(3), shuffle=True)  # type: ignore[arg-type]
    draws(thing)  # now and then two values are drawn at once, and one is kept for later
    state = taken(tensors, thing=thing, loader=loader)
    expected, order = draws(thing), list(loader)
    for _ in range(2):
        draws(thing)
        thing.mine.calls += 1
        list(loader)
        state.restore()
        assert "calls" not in vars(thing.mine)
        assert draws(thing) == expected
        assert [each.tolist() for each in loader] == [each.tolist() for each in order]


def test_a_generator_in_a_dataset_gives_the_same_rows() -> None:
    class Noisy(Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return index + self.rng.random()

    dataset = Noisy()
    loader = DataLoader(dataset, batch_size=2)
    state = taken(tensors=False, train_dataloader=loader)
    first = [batch.tolist() for batch in loader]
    state.restore()
    assert [batch.tolist() for batch in loader] == first
    assert state.unkept == ()


def test_files_are_read_on_from_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("a\nb\nc\n")
    with path.open() as text, path.open("rb") as raw, io.BytesIO(b"abc") as memory, path.open() as closed:
        closed.close()
        thing = Thing(files=[text, raw, memory, closed], out=sys.stdout)
        text.readline(), raw.read(1), memory.read(1)
        state = taken(tensors=False, thing=thing)
        for _ in range(2):
            assert (text.readline(), raw.read(1), memory.read(1)) == ("b\n", b"\n", b"b")
            state.restore()
        text.close()
        state.restore()
        assert state.unkept == ()


def test_the_standard_streams_are_not_sought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w+") as out:
        monkeypatch.setattr(sys, "stdout", out)
        state = taken(thing=Thing(out=out))
        out.write("a line of the sweep's")
        state.restore()
        assert out.tell() > 0


def test_a_file_in_the_middle_of_a_loop_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("a\nb\n")

    class Remote(io.RawIOBase):
        tell = refuse

    with path.open() as file:
        next(file)
        state = taken(tensors=False, dataset=Thing(rows=file, remote=Remote()))
    assert state.unkept == ("dataset.rows (file)", "dataset.remote (file)")


def counting() -> tuple[Callable[[], int], Callable[[], tuple[int, list[int], bool]]]:
    """A function that counts in three ways, and one that reads the counters."""
    count, rows = 0, [0]

    def step() -> int:
        nonlocal count, late
        count += 1
        rows.append(count)
        late = count
        return count

    def read() -> tuple[int, list[int], bool]:
        try:
            return count, rows, bool(late)
        except NameError:
            return count, rows, False

    late: int
    if count:
        late = 0
    return step, read


FRESH = (0, [0], False)


def library_wrapper(function: Callable[[], int]) -> Callable[[], int]:
    """What a decorator of PyTorch's returns."""
    rows: list[int] = []

    def wrapper() -> int:
        rows.append(1)
        return function()

    made = types.FunctionType(wrapper.__code__, {"__name__": "torch.utils"}, closure=wrapper.__closure__)
    LIBRARYS.append(rows)
    return made


LIBRARYS: list[list[int]] = []
"""What belongs to the wrappers."""


def test_counters_in_closures() -> None:
    step, read = counting()
    state = taken(thing=Thing(collate_fn=step))
    for _ in range(2):
        assert step() == 1
        step()
        state.restore()
        assert read() == FRESH


def test_functions_behind_decorators_partials_and_methods() -> None:
    step, read = counting()
    other, read_other = counting()
    third, read_third = counting()
    fourth, read_fourth = counting()
    fifth, read_fifth = counting()

    class Owner:
        def __init__(self) -> None:
            self.calls = 0

        def collate(self) -> None:
            self.calls += 1

    owner, rows = Owner(), [1]
    guarded = torch.no_grad()(step)

    def noted() -> None:
        noted.calls += 1  # type: ignore[attr-defined]

    noted.calls = 0  # type: ignore[attr-defined]
    inner = [1]
    thing = Thing(
        guarded=guarded,
        partial=functools.partial(other, key=inner),
        method=owner.collate,
        builtin=rows.append,
        wrapped=functools.wraps(third)(lambda: third()),
        noted=noted,
        wrapper=library_wrapper(fourth),
        default=collections.defaultdict(fifth),
    )
    state = taken(thing=thing)
    guarded(), other(), third(), thing.method(), thing.builtin(2), noted(), thing.wrapper(), thing.default["new"]
    inner.append(2)
    thing.partial.keywords["new"] = 1
    state.restore()
    assert read() == read_other() == read_third() == read_fourth() == read_fifth() == FRESH
    assert LIBRARYS[-1] == [1]
    assert (owner.calls, rows, noted.calls, inner) == (0, [1], 0, [1])  # type: ignore[attr-defined]
    assert list(thing.partial.keywords) == ["key"]


# -- positions


def test_iterators_that_can_be_copied_go_on_from_where_they_were() -> None:
    words = ["a", "b", "c", "d"]
    shared = iter(words)

    def closed_over() -> Callable[[], int]:
        it = itertools.count(5)
        return lambda: next(it)

    thing = Thing(
        plain=iter(words),
        numbers=iter(range(9)),
        count=itertools.count(3, 2),
        cycle=itertools.cycle(words),
        pairs=zip(shared, shared, strict=False),
        shared=shared,
        listed=[enumerate(words)],
        keyed={"k": map(str.upper, itertools.islice(words, 3))},
        back=reversed(words),
        items=iter({"a": 1, "b": 2}.items()),
        chain=itertools.chain([1], [2, 3]),
        pooled=itertools.permutations("abc"),
        draw=closed_over(),
        spent=iter([]),
    )
    list(thing.spent)

    def advance() -> list[Any]:
        names = ("plain", "numbers", "count", "back", "items", "chain", "pooled")
        found = [next(getattr(thing, name)) for name in names]
        found += [next(thing.cycle) for _ in range(3)]
        found += [next(thing.pairs, None), next(thing.listed[0]), next(thing.keyed["k"]), thing.draw()]
        return [*found, next(thing.spent, "over")]

    advance()
    state = taken(tensors=False, thing=thing)
    assert state.unkept == ()
    expected, expected_after = advance(), next(thing.shared, "over")
    for _ in range(3):
        state.restore()
        assert advance() == expected
        assert next(thing.shared, "over") == expected_after


def test_a_cycle_remembers_what_it_has_seen() -> None:
    thing = Thing(cycle=itertools.cycle(iter("abc")))
    next(thing.cycle)
    state = taken(thing=thing)
    for _ in range(3):
        assert [next(thing.cycle) for _ in range(8)] == list("bcabcabc")
        state.restore()


def test_what_keeps_a_position_is_named_once() -> None:
    def rows() -> Iterator[int]:
        yield 1

    generator = rows()

    class Stream(Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.rows = generator
            self.again = [generator]
            self.lines = csv.reader(["a"])
            self.fixed = (iter([1]),)
            self.nested = zip(rows(), [1], strict=False)
            self.called = iter(list, None)
            self.cursor = sqlite3.connect(":memory:").cursor()
            self.socket = socket.socket()
            self.waiting = queue.Queue()
            self.next = functools.partial(next, itertools.count())
            self.counter = itertools.count().__next__

    dataset = Stream()
    loader = DataLoader(dataset, sampler=RandomSampler(range(3)))
    state = taken(tensors=False, train_dataloader=loader)
    dataset.socket.close()
    dataset.cursor.connection.close()
    place = "train_dataloader.dataset"
    assert set(state.unkept) == {
        f"{place}.rows (generator)",
        f"{place}.lines (iterator)",
        f"{place}.fixed[0] (iterator)",
        f"{place}.nested (iterator)",
        f"{place}.called (iterator)",
        f"{place}.cursor (cursor)",
        f"{place}.socket (socket)",
        f"{place}.waiting (queue)",
        f"{place}.next.args[0] (iterator)",
        f"{place}.counter (iterator)",
    }
    assert len(state.unkept) == 10


def test_an_iterator_in_python_keeps_its_position_in_its_attributes() -> None:
    class Endless:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.at += 1
            return self.at

    endless = Endless()
    state = taken(tensors=False, thing=Thing(rows=endless))
    next(endless)
    state.restore()
    assert state.unkept == ()
    assert next(endless) == 1


def test_iterators_of_loaders_are_left() -> None:
    loader = DataLoader(range(4))  # type: ignore[arg-type]
    running = iter(loader)
    next(running)
    thing = Thing(running=running)
    state = taken(tensors=False, thing=thing, loader=loader)
    assert state.unkept == ()
    next(running)
    state.restore()
    assert thing.running is running
    assert next(running).item() == 2


# -- where nobody looks


class Refusing:
    """Every way in but its `__dict__` is user code."""

    def __init__(self) -> None:
        self.__dict__["count"] = 0

    __getattribute__ = __setattr__ = __eq__ = __len__ = refuse  # type: ignore[assignment]
    __hash__ = __iter__ = __repr__ = __bool__ = refuse  # type: ignore[assignment]


class Hiding:
    """`__dict__` is a property."""

    __dict__ = property(refuse)  # type: ignore[assignment]


def test_no_user_code_runs() -> None:
    refusing = object.__new__(Refusing)
    attributes = object.__getattribute__(refusing, "__dict__")
    attributes["count"] = 0
    rows = [refusing, Hiding()]
    state = taken(thing=Thing(rows=rows, hash={"a": refusing}))
    attributes["count"] = 1
    rows.append(1)
    state.restore()
    assert attributes["count"] == 0
    assert len(rows) == 2


class MyTrainer(Trainer):
    pass


class MyLogger(Logger):
    name = version = None  # type: ignore[assignment]

    def log_metrics(self, *_: Any) -> None: ...

    def log_hyperparams(self, *_: Any) -> None: ...


class MyThread(threading.Thread):
    pass


def foreign(module: str, base: type = object, name: str = "Foreign", **attributes: Any) -> Any:
    """An object of a class that says that it is defined elsewhere."""
    made = type(name, (base,), {"__module__": module})()
    for key, value in attributes.items():
        vars(made)[key] = value
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: foreign("torch.distributed.device_mesh", rows=rows),
        lambda rows: foreign("torch._dynamo.eval_frame", rows=rows),
        lambda rows: foreign("lightning.pytorch.strategies.ddp", rows=rows),
        lambda rows: foreign("pandas.core.frame", rows=rows),
        lambda rows: foreign("wandb.sdk.run", rows=rows),
        lambda rows: foreign("mine.training", name="Trainer", rows=rows),
        lambda rows: foreign("logging.handlers", rows=rows),
        lambda rows: weakref.ref(Thing(rows=rows)),
        lambda rows: type("Class", (), {"rows": rows}),
    ],
)
def test_what_is_not_followed(make: Callable[[Any], Any]) -> None:
    rows = [1]
    thing = Thing(held=make(rows))
    held = thing.held
    state = taken(thing=thing)
    rows.append(2)
    thing.held = None
    state.restore()
    assert rows == [1, 2]
    assert thing.held is held
    assert state.unkept == ()


def test_trainers_loggers_threads_and_modules_are_not_followed() -> None:
    model = LightningModule()
    model._trainer = object.__new__(MyTrainer)
    model.log_to, model.thread, model.lock, model.module = MyLogger(), MyThread(), threading.Lock(), types
    vars(model._trainer)["seen"] = vars(model.log_to)["seen"] = vars(model.thread)["seen"] = 1
    state = taken(model=model)
    for held in (model._trainer, model.log_to, model.thread):
        vars(held)["seen"] = 2
    state.restore()
    assert [vars(held)["seen"] for held in (model._trainer, model.log_to, model.thread)] == [2, 2, 2]


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.table = 0, torch.ones(2)


def test_a_users_lightning_classes_are_followed() -> None:
    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.save_hyperparameters({"width": 3, "rows": [1]})

    model, data = Lit(), Data()
    state = taken(model=model, datamodule=data)
    assert state.nbytes == 0
    model.losses.append(1.0)
    model.hparams["rows"].append(2)
    model.hparams.width = 4
    data.epoch = 1
    state.restore()
    assert model.losses == []
    assert dict(model.hparams) == {"width": 3, "rows": [1]}
    assert data.epoch == 0


def test_a_folder_of_the_users_that_is_called_like_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    own, installed = types.ModuleType("datasets"), types.ModuleType("datasets")
    own.__file__ = "/home/me/project/datasets/__init__.py"
    installed.__file__ = "/usr/lib/python3/site-packages/datasets/__init__.py"
    for module, expected in ((own, 0), (installed, 1)):
        monkeypatch.setitem(sys.modules, "datasets", module)
        rows = foreign("datasets.rows", count=0)
        state = taken(thing=Thing(rows=rows))
        rows.count = 1
        state.restore()
        assert rows.count == expected


def module_of(place: str, *bases: type, **attributes: Any) -> Any:
    made = type("Foreign", bases or (nn.Module,), {"__module__": place})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "place",
    [
        "torch.nn.parallel.distributed",
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "torch._dynamo.eval_frame",
        "transformer_engine.pytorch.module.linear",
    ],
)
def test_wrappers_and_te_modules_own_their_attributes_and_their_children_do_not(place: str) -> None:
    wrapper = module_of(place, calls=0, rows=[1], module=Module(calls=0))
    state = taken(model=wrapper)
    wrapper.calls = wrapper.module.calls = 1
    wrapper.rows.append(2)
    state.restore()
    assert (wrapper.calls, wrapper.rows, wrapper.module.calls) == (1, [1, 2], 0)


def test_a_subclass_of_a_te_module_is_the_engines_too() -> None:
    base = type(module_of("transformer_engine.pytorch.module.linear"))
    model = Module(layer=module_of("mine", base, quantizers={}))
    before = model.layer.quantizers
    state = taken(model=model)
    model.layer.quantizers = {"new": 1}
    state.restore()
    assert model.layer.quantizers is not before


def test_a_module_under_fully_shard_is_known_by_the_class_that_was_written() -> None:
    front = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"})
    mine = type("FSDPMine", (front, Module), {"__module__": "torch.distributed.fsdp"})(calls=0)
    state = taken(model=mine)
    mine.calls = 1
    state.restore()
    assert mine.calls == 0


def test_under_the_first_fsdp_tensors_in_modules_are_left() -> None:
    handle = type("FlatParamHandle", (), {"__module__": "torch.distributed.fsdp"})()
    inner = Module(calls=0, rows=[1])
    vars(inner)["weight"] = torch.ones(2)
    model = Module(inner=inner, _handle=handle)
    state = taken(model=model)
    inner.calls = 1
    inner.rows.append(2)
    view = vars(inner)["weight"] = torch.zeros(2)
    vars(inner)["bias"] = torch.zeros(1)
    state.restore()
    assert (inner.calls, inner.rows) == (0, [1])
    assert inner.weight is view
    assert "bias" in vars(inner)
    assert state.nbytes == 0


# -- what the sweep itself has put there


def own_function(name: str = "training_step", **names: Any) -> Any:
    """A function that runs in this package, whatever it is called."""
    names["__name__"] = "lowprec_callback.trainer.drive"
    exec(f"def {name}(*_): return None", names)
    names[name].__module__ = "mine"
    return names[name]


def test_what_this_package_has_put_in_stays_until_it_takes_it_away() -> None:
    user = lambda: 1  # noqa: E731
    model = nn.Sequential(Module(), nn.Linear(2, 2))
    model.validation_step = user
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = taken(model=model, optimizer=optimizer)
    wrapper = own_function()
    vars(model)["training_step"] = vars(model)["validation_step"] = wrapper
    hook = optimizer.register_step_post_hook(own_function())
    with ModuleScopes({"1": model[1]}).installed():
        state.restore()
        assert model.training_step is wrapper
        assert model.validation_step is wrapper
        assert len(optimizer._optimizer_step_post_hooks) == 1
        for table in ("_hooks", "_pre_hooks", "_hooks_with_kwargs", "_pre_hooks_with_kwargs", "_hooks_always_called"):
            assert len(getattr(model[1], f"_forward{table}")) == 1
        model[1](torch.ones(1, 2))
    hook.remove()
    del model.training_step
    model.validation_step = user
    state.restore()
    assert model.validation_step is user
    assert not model[1]._forward_hooks


def test_what_was_this_packages_when_it_was_taken_does_not_come_back() -> None:
    model = Module()
    vars(model)["training_step"] = own_function()
    state = taken(model=model)
    del model.training_step
    state.restore()
    assert "training_step" not in vars(model)


def test_the_compilers_notes_stay() -> None:
    model = nn.Linear(1, 1)
    state = taken(model=model)
    model.weight._dynamo_static_input_type = "guarded"
    state.restore()
    assert model.weight._dynamo_static_input_type == "guarded"


# -- limits and failures


def test_a_long_container_is_copied_but_not_descended_into() -> None:
    inner = [1]
    rows: list[Any] = [inner] * (python_state.MOST_ELEMENTS + 1)
    state = taken(thing=Thing(rows=rows))
    inner.append(2)
    rows.pop()
    rows[0] = None
    state.restore()
    assert rows[0] is inner
    assert len(rows) == python_state.MOST_ELEMENTS + 1
    assert inner == [1, 2]
    assert state.unkept == ()


def test_too_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_state, "MOST_OBJECTS", 4)
    rows = [[each] for each in range(5)]
    state = taken(model=Thing(rows=rows), other=Thing(rows=[1], empty=[[]] * 9))
    for row in rows:
        row.append(0)
    state.restore()
    assert [len(row) for row in rows] == [1, 1, 2, 2, 2]
    assert state.unkept == ("model: more than 4 objects; what lies deeper was not kept",)


def test_the_limit_as_a_person_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{python_state.MOST_OBJECTS:,}" == "100,000"


def test_too_deep() -> None:
    deepest: list[Any] = [1]
    nested: Any = deepest
    for _ in range(python_state.DEEPEST - 1):
        nested = [nested]
    state = taken(thing=Thing(rows=nested))
    deepest.append(2)
    state.restore()
    assert deepest == [1]
    assert state.unkept == ()

    state = taken(thing=Thing(rows=[nested]))
    deepest.append(2)
    state.restore()
    assert deepest == [1, 2]
    assert state.unkept == ("thing: more than 8 levels deep; what lies deeper was not kept",)


def test_the_module_tree_has_no_depth() -> None:
    innermost = model = Module(calls=0)
    for _ in range(3 * python_state.DEEPEST):
        model = nn.Sequential(model)
    state = taken(model=model)
    innermost.calls = 1
    state.restore()
    assert innermost.calls == 0
    assert state.unkept == ()


def test_if_one_thing_fails_the_others_are_put_back() -> None:
    thing = Thing(locked=bytearray(b"ab"), rng=np.random.default_rng(0), rows=[1])
    expected = thing.rng.random()
    thing.rng = np.random.default_rng(0)
    state = taken(thing=thing)
    thing.locked.append(1)
    thing.rng.random()
    thing.rows.append(2)
    view = memoryview(thing.locked)
    with pytest.raises(NotPutBack, match=r"could not be put back: thing\.locked \(BufferError: .*\)$") as caught:
        state.restore()
    assert len(caught.value.names) == 1
    assert thing.rows == [1]
    assert thing.rng.random() == expected
    view.release()
    state.restore()
    assert thing.locked == b"ab"


def test_the_message_names_a_few() -> None:
    error = NotPutBack(f"thing {number}" for number in range(9))
    assert str(error).endswith("thing 3; thing 4; and 4 more")
    assert len(error.names) == 9


def test_nothing_odd_raises() -> None:
    class Meta(type):
        def __getattr__(cls, name: str) -> Any:
            raise RuntimeError(name)

    class Odd(metaclass=Meta):
        __module__ = 7  # type: ignore[assignment]

    odd = Odd()
    thing = Thing(odd=odd, system=random.SystemRandom(), cls=Odd, code=(lambda: 1).__code__, count=0)
    state = taken(thing=thing, nothing=None, number=3)
    odd.count = 1
    thing.count = 1
    state.restore()
    assert thing.count == 0
