"""Everything that user code may change in Python, set aside before the sweep and put back after it.

`Snapshot` keeps what PyTorch calls state: parameters, buffers, optimizer state. But a `training_step` is a program. It
counts in `self.seen += 1`, appends losses to a list, moves a moving average, draws from a generator of its own, reads
on in a file, replaces a layer. None of that is in a `state_dict`, and all of it shapes the steps that follow.

So we do what a garbage collector does: start at a few roots (the model, the optimizers, the data loaders) and follow
references. Each object that can change is copied *shallowly*: an attribute dict or a list is a table of references,
and putting the references back restores it, because the objects behind them are restored one by one in the same way.
Identity is kept: the list that was there is there again, with the elements that were there.

Four rules keep this safe:

- No user code runs. We read `__dict__` and the builtin containers by the methods of their builtin types, never by
  attribute lookup, `len()` or iteration that a user's class may have redefined.
- Libraries keep their own books. Their objects (a Trainer, a process group, a pandas frame, a logger's connection)
  stand for things outside of this process, and setting them back would break them. We hold references to them as
  they are and look no further.
- What this package has put into user objects meanwhile (a hook, a wrapper around `training_step`) stays: the sweep
  restores between its own steps, too, and takes its own things away itself.
- Nothing odd stops us. What cannot be kept is left out. What has a position that cannot be set back (a generator that
  is half way through its rows) is named in `unkept`, so that somebody can be told.
"""

from __future__ import annotations

import argparse
import array
import collections
import concurrent.futures
import copy
import enum
import functools
import io
import itertools
import logging
import multiprocessing.process
import queue
import random
import socket
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import Buffer, UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lowprec_callback.failures import in_words

MOST_OBJECTS = 100_000
"""Objects below one root that are visited. Modules, empty containers, numbers and strings do not count."""

MOST_ELEMENTS = 10_000
"""A container with more elements is copied, but not descended into: what fills it is data, a list of paths say."""

DEEPEST = 8
"""References from a root, or from a module of its tree, to the deepest object that is visited."""

MOST_NAMES = 5
"""Names that the message of `NotPutBack` gives in full."""

LIGHTNING = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
"""Lightning's packages. Modules, data modules and callbacks of theirs are followed; nothing else is."""

LIBRARIES = frozenset(
    """
    numpy pandas pyarrow PIL h5py datasets tokenizers transformer_engine transformer_engine_torch torchao scipy polars
    triton nvidia cupy jax jaxlib tensorflow cv2 av decord lmdb zarr tables nvtx pynvml
    wandb mlflow comet_ml neptune clearml aim tensorboard tensorboardX tqdm rich loguru matplotlib
    ray dask pyspark sqlalchemy boto3 botocore requests urllib3 httpx aiohttp grpc zmq fsspec s3fs gcsfs google azure
    """.split()  # noqa: SIM905
)
"""Packages whose objects hold what cannot be set back from here: native memory, connections, books of their own."""

ALSO_FOLDERS = frozenset({"datasets", "tokenizers"})
"""Of these, names that people give to folders of their own as well: a library only if it is installed as one."""

FOLLOWED_PARTS_OF_TORCH = ("torch.utils.data", "torch.nn", "torch.optim", "torch.amp")

OUTSIDE = frozenset({"Trainer", "Strategy", "Logger", "Accelerator", "Fabric", "Profiler", "CheckpointIO", "_Loop"})
"""Lightning's classes whose subclasses are not followed either, whoever wrote them."""

SNAPSHOTS = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of modules that `Snapshot` keeps."""

SNAPSHOTS_OF_OPTIMIZERS = frozenset({"state", "param_groups", "_scales"})
"""The same for optimizers; `_scales` belongs to Transformer Engine's FusedAdam."""


class NotPutBack(RuntimeError):
    """Some things could not be put back, and all others were.

    Attributes:
        names: each thing that could not, and why.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        more = len(self.names) - MOST_NAMES
        rest = f"; and {more} more" if more > 0 else ""
        super().__init__(f"could not be put back: {'; '.join(self.names[:MOST_NAMES])}{rest}")


def attempt(failed: list[str], name: Callable[[], str], do: Callable[[], object]) -> None:
    """Put one thing back. If that fails, note its name, so that the others are put back as well."""
    try:
        do()
    except NotPutBack as error:
        failed.extend(error.names)
    except Exception as error:
        failed.append(f"{name()} ({in_words(error)})")


# -- tensors -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class KeptTensor:
    """One tensor object: its bits on the host, and what else can change of it. Values go back in place."""

    tensor: torch.Tensor
    values: torch.Tensor | None
    """None for a quantized tensor, and for one that is not initialized."""
    parts: dict[str, Any]
    """What a quantized tensor of Transformer Engine is made of."""
    form: tuple[type, torch.device, torch.dtype, torch.Size | None]
    """Class, device, type and shape (of a DTensor's local part). A lazy module's parameter has no shape yet."""
    leaf: bool
    requires_grad: bool
    gradient: KeptTensor | None

    @staticmethod
    def of(tensor: torch.Tensor) -> KeptTensor:
        """Copy to the host."""
        cls, mine = type(tensor), local_part(tensor)
        form: tuple[type, torch.device, torch.dtype, torch.Size | None]
        parts: dict[str, Any] = {}
        values: torch.Tensor | None = None
        gradient = tensor.grad if tensor.is_leaf else None
        if is_lazy(tensor):
            data = tensor.data
            form = (cls, data.device, data.dtype, None)
        elif hasattr(mine, "_quantizer"):
            # Copying a quantized tensor through its own arithmetic would round again, so its buffers and flags are
            # kept as they are, and its quantizer by reference.
            parts = {
                name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in vars(mine).items()
                if isinstance(value, torch.Tensor | bool) or value is None or name == "_quantizer"
            }
            form = (cls, mine.device, mine.dtype, mine.shape)
        else:
            values = _each_once(mine.detach()).to("cpu", copy=True)
            form = (cls, mine.device, mine.dtype, mine.shape)
        kept_gradient = None if gradient is None else KeptTensor.of(gradient)
        return KeptTensor(tensor, values, parts, form, tensor.grad_fn is None, tensor.requires_grad, kept_gradient)

    @property
    def nbytes(self) -> int:
        """Host memory that the copy takes, with its gradient's."""
        tensors = [self.values, *self.parts.values()]
        own = sum(_bytes_of(each) for each in tensors if isinstance(each, torch.Tensor))
        return own + (0 if self.gradient is None else self.gradient.nbytes)

    def put_back(self) -> None:
        """Values, gradient and `requires_grad`; a lazy module's parameter is without values again."""
        tensor, gradient = self.tensor, self.gradient
        with torch.no_grad():
            # A gradient must fit its parameter: what the steps left goes first.
            stale = tensor.grad if tensor.is_leaf else None
            if stale is not None and (gradient is None or stale is not gradient.tensor):
                tensor.grad = None
            if self.form[3] is None:
                self._make_lazy_again()
            elif self.values is not None:
                self._put_values(self.values)
            else:
                self._put_parts()
            if self.leaf and tensor.grad_fn is not None:
                tensor.detach_()  # `self.total += loss` on a plain tensor draws it into the graph
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad = self.requires_grad
            if gradient is not None:
                gradient.put_back()
                if tensor.grad is not gradient.tensor:
                    tensor.grad = gradient.tensor

    def _make_lazy_again(self) -> None:
        """The next forward gives it shape and values as the first one would have, from the same random numbers."""
        cls, device, dtype, _ = self.form
        if type(self.tensor) is not cls:
            self.tensor.__class__ = cls
            self.tensor.data = torch.empty(0, device=device, dtype=dtype)

    def _put_values(self, values: torch.Tensor) -> None:
        _, device, dtype, shape = self.form
        mine = local_part(self.tensor)
        if (mine.device, mine.dtype, mine.shape) != (device, dtype, shape) or _is_freed(mine, values):
            # Moved, converted or resized meanwhile: the object gets memory as it was.
            assert shape is not None
            again = values.to(device, copy=True)
            mine.data = again if again.shape == shape else again.expand(shape)
            return
        target = _each_once(mine.detach())
        if device.type == "cpu" and same_bits(target, values):
            return
        target.copy_(values)

    def _put_parts(self) -> None:
        mine = local_part(self.tensor)
        for name, value in self.parts.items():
            current = getattr(mine, name, None)
            if not isinstance(value, torch.Tensor):
                setattr(mine, name, value)
            elif isinstance(current, torch.Tensor) and current.shape == value.shape:
                current.copy_(value)
            else:
                setattr(mine, name, value.to(mine.device))


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer of a lazy module that has not run yet (`nn.LazyLinear`)."""
    mro = type(tensor).__mro__
    return UninitializedParameter in mro or UninitializedBuffer in mro


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is spread over ranks (a DTensor); any other tensor as it is.

    Each rank keeps and puts back its own part: nothing is gathered, and no rank waits for another.
    """
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits (NaNs and signed zeros too); False also where that cannot be told."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        if one.dtype.is_complex:
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        return torch.equal(one.view(whole), other.view(whole))
    except Exception:
        return False


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions of an expanded one, which cannot be written to."""
    if tensor.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_freed(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or not values.numel():
        return False
    return tensor.untyped_storage().nbytes() < values.element_size()


def _bytes_of(tensor: torch.Tensor) -> int:
    """Sparse tensors have no `nbytes`: what they hold is their indices and values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(storage, first byte, end) of the memory that a strided tensor lies in."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.untyped_storage().data_ptr(), start, start + elements * tensor.element_size()


# -- what this package puts into user objects --------------------------------------------------------------------------

_OWN = __name__.partition(".")[0]


def _is_own(value: Any) -> bool:
    """Whether a value is this package's: a function of its code, however it calls itself, or an object of its classes.

    `functools.wraps` gives a wrapper the user's name and module; the globals that it runs with tell the truth.
    """
    cls = type(value)
    if cls is types.MethodType:
        value, cls = value.__func__, type(value.__func__)
    elif cls is functools.partial:
        value, cls = value.func, type(value.func)
    module = value.__globals__.get("__name__") if cls is types.FunctionType else cls.__dict__.get("__module__")
    return isinstance(module, str) and module.partition(".")[0] == _OWN


# -- names -------------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where an object was found, written out only when somebody asks."""

    before: _Place | None
    how: str
    """`.` an attribute, `[` an element, nothing for a root."""
    key: Any

    def __str__(self) -> str:
        pieces: list[str] = []
        place: _Place | None = self
        while place is not None:
            pieces.append(place._piece())
            place = place.before
        return "".join(reversed(pieces))

    def _piece(self) -> str:
        if self.how == "[":
            # Other keys may be anybody's objects, whose `__repr__` is not ours to call.
            return f"[{self.key!r}]" if type(self.key) in (str, int, bool) else "[...]"
        return f"{self.how}{self.key}" if isinstance(self.key, str) else ""

    def attribute(self, name: Any) -> _Place:
        return _Place(self, ".", name)

    def element(self, key: Any) -> _Place:
        return _Place(self, "[", key)


# -- iterators ---------------------------------------------------------------------------------------------------------

_MANY: list[Iterable[Any]] = [[], (), range(0), range(1 << 70), "", "é", b"", bytearray(), set(), collections.deque()]
_TABLE: dict[Any, Any] = {}
_VIEWS: list[Any] = [_TABLE, _TABLE.keys(), _TABLE.values(), _TABLE.items()]

_SIMPLE_ITERATORS: frozenset[type] = frozenset(
    {
        *(type(iter(each)) for each in (*_MANY, *_VIEWS)),
        *(type(reversed(each)) for each in ([], range(0), collections.deque(), *_VIEWS)),
        *(itertools.count, itertools.repeat, itertools.product, itertools.permutations, itertools.combinations),
        type(itertools.tee(())[0]),
    }
)
"""Iterators whose position is all their own: `copy.copy` gives a second one at the same place."""

_NESTED_ITERATORS: frozenset[type] = frozenset(
    {
        enumerate,
        zip,
        map,
        filter,
        itertools.cycle,
        itertools.chain,
        itertools.islice,
        itertools.takewhile,
        itertools.dropwhile,
        itertools.starmap,
        itertools.filterfalse,
        itertools.accumulate,
        itertools.zip_longest,
        itertools.compress,
    }
)
"""Iterators that draw from others, whose copies must draw from copies of those."""


class _CannotCopy(Exception):
    """An iterator somewhere in this one has a position that nobody can copy."""


def _second(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    """A second iterator at the same position.

    Args:
        value: an iterator, or what an iterator's `__reduce__` says it is made of.
        memo: (original, copy) of what was copied already, by the id of the original: what two iterators share, their
            copies share too.

    Raises:
        Exception: it cannot be copied.
    """
    cls = type(value)
    if id(value) in memo:
        return memo[id(value)][1]
    if cls is tuple:
        return tuple(_second(each, memo) for each in value)
    if cls is list:
        return list(value)  # what `cycle` has seen so far
    if cls in _SIMPLE_ITERATORS:
        made = copy.copy(value)
    elif cls in _NESTED_ITERATORS:
        make, arguments, *state = value.__reduce__()
        made = make(*(_second(each, memo) for each in arguments))
        if state and state[0] is not None:
            made.__setstate__(_second(state[0], memo))
    elif _has(cls, "__next__"):
        raise _CannotCopy
    else:
        return value
    memo[id(value)] = value, made
    return made


@dataclass(slots=True)
class _Position:
    """Stands in a kept table for an iterator: a copy that nobody advances, of which each restore puts in a copy."""

    iterator: Any


# -- what is kept ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Restoring:
    """What one call of `restore` has to remember."""

    copies: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    hooks: set[int] = field(default_factory=set)
    """Keys of this package's hooks. PyTorch notes some of their settings in tables beside the hooks, by these keys."""

    def fresh(self, values: list[Any], moving: bool) -> list[Any]:
        """The values to put in, iterators copied."""
        if not moving:
            return values
        return [_second(v.iterator, self.copies) if type(v) is _Position else v for v in values]


class _Kept(Protocol):
    @property
    def place(self) -> _Place: ...

    def put_back(self, restoring: _Restoring) -> None: ...


def _nothing_left(_key: Any) -> bool:
    return False


@dataclass(slots=True)
class KeptMapping:
    """The keys, values and order of one dict, by identity."""

    target: dict[Any, Any]
    place: _Place
    keys: list[Any]
    values: list[Any]
    moving: bool = False
    """Whether there are iterators among the values."""

    @staticmethod
    def of(target: dict[Any, Any], name: str = "") -> KeptMapping:
        """Copy the table, not what is in it."""
        base = _mapping_type(target)
        return KeptMapping(target, _Place(None, "", name), list(base.keys(target)), list(base.values(target)))

    def put_back(self, restoring: _Restoring | None = None) -> None:
        """In place."""
        restoring = restoring or _Restoring()
        _make_equal(self.target, self.keys, restoring.fresh(self.values, self.moving), restoring)


def _mapping_type(target: dict[Any, Any]) -> Any:
    """The builtin type whose methods are safe to use: an OrderedDict breaks if it is written to as a dict."""
    return collections.OrderedDict if collections.OrderedDict in type(target).__mro__ else dict


def _make_equal(
    target: dict[Any, Any],
    keys: list[Any],
    values: list[Any],
    restoring: _Restoring,
    left: Callable[[Any], bool] = _nothing_left,
    tensors_left: bool = False,
) -> None:
    """Give a dict these keys and values in this order; nothing is written where nothing changed.

    Args:
        target: the dict.
        keys: as they were.
        values: theirs.
        restoring: see there.
        left: whether the entry of a key is left as it now is.
        tensors_left: whether entries that hold tensors, or held them, are.
    """
    base = _mapping_type(target)
    same = dict.__len__(target) == len(keys) and all(map(is_, base.keys(target), keys))
    if same and all(map(is_, base.values(target), values)):
        return
    now = dict(zip(base.keys(target), base.values(target), strict=True))
    before = dict(zip(keys, values, strict=True))
    wanted: dict[Any, Any] = {}
    for key, value in before.items():
        if left(key) or _is_own(value) or (tensors_left and _either_tensor(value, now.get(key))):
            if key in now:
                wanted[key] = now[key]
        else:
            wanted[key] = value
    for key, value in now.items():
        own = _is_own(value)
        if own and type(key) is int:
            restoring.hooks.add(key)
        of_own_hook = value is True and type(key) is int and key in restoring.hooks
        if own or (key not in before and (of_own_hook or left(key) or (tensors_left and _either_tensor(value)))):
            wanted[key] = value
    for key in [key for key in now if key not in wanted]:
        base.__delitem__(target, key)
    for key, value in wanted.items():
        if key not in now or now[key] is not value:
            base.__setitem__(target, key, value)
    # Equal keys need not be the same (1 and True), and their order is part of a dict.
    if not all(map(_same_key, base.keys(target), wanted)):
        base.clear(target)
        for key, value in wanted.items():
            base.__setitem__(target, key, value)


def _same_key(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is str and one == other)


def _either_tensor(*values: Any) -> bool:
    return any(torch.Tensor in type(value).__mro__ for value in values)


@dataclass(slots=True)
class _KeptAttributes:
    """An object's attribute dict, and a module's class (a lazy module takes another one when it first runs)."""

    owner: Any
    place: _Place
    keys: list[str]
    values: list[Any]
    names_left: frozenset[str]
    tensors_left: bool
    cls: type | None
    moving: bool = False

    def put_back(self, restoring: _Restoring) -> None:
        if self.cls is not None and type(self.owner) is not self.cls:
            object.__setattr__(self.owner, "__class__", self.cls)
        target = _attributes_of(self.owner)
        if target is not None:
            values = restoring.fresh(self.values, self.moving)
            _make_equal(target, self.keys, values, restoring, self._left, self.tensors_left)

    def _left(self, key: Any) -> bool:
        """torch.compile's notes (`_dynamo_...`) belong to what it has compiled, which stays."""
        return isinstance(key, str) and (key in self.names_left or key.startswith("_dynamo"))


@dataclass(slots=True)
class _KeptSlots:
    """Values of an object's `__slots__`."""

    owner: Any
    place: _Place
    slots: list[types.MemberDescriptorType]
    values: list[Any]
    moving: bool = False

    def put_back(self, restoring: _Restoring) -> None:
        for slot, value in zip(self.slots, restoring.fresh(self.values, self.moving), strict=True):
            now = _read_slot(slot, self.owner)
            if now is value:
                continue
            if value is _ABSENT:
                slot.__delete__(self.owner)
            else:
                slot.__set__(self.owner, value)


@dataclass(slots=True)
class _KeptSequence:
    """The elements of a list, set or deque, by identity and in order."""

    target: Any
    place: _Place
    base: Any
    values: list[Any]
    moving: bool = False

    def put_back(self, restoring: _Restoring) -> None:
        values, base = restoring.fresh(self.values, self.moving), self.base
        if base.__len__(self.target) == len(values) and all(map(is_, base.__iter__(self.target), values)):
            return
        if base is list:
            list.__setitem__(self.target, slice(None), values)
            return
        base.clear(self.target)
        for value in values:
            (set.add if base is set else collections.deque.append)(self.target, value)


@dataclass(slots=True)
class _KeptBytes:
    """A bytearray or an `array.array`."""

    target: Any
    place: _Place
    base: Any
    values: Any

    def put_back(self, _restoring: _Restoring) -> None:
        if memoryview(self.target) != memoryview(self.values):
            self.base.__setitem__(self.target, slice(None), self.values)


@dataclass(slots=True)
class _KeptCell:
    """A variable that functions share (`nonlocal`)."""

    cell: types.CellType
    place: _Place
    values: list[Any]
    """One value."""
    moving: bool = False

    def put_back(self, restoring: _Restoring) -> None:
        (value,) = restoring.fresh(self.values, self.moving)
        now = _cell_contents(self.cell)
        if now is value or (now is not _ABSENT and _is_own(now)):
            return
        if value is _ABSENT:
            del self.cell.cell_contents
        elif not _is_own(value):
            self.cell.cell_contents = value


@dataclass(slots=True)
class _KeptPlainTensor:
    """A tensor that is neither parameter nor buffer."""

    place: _Place
    kept: KeptTensor

    def put_back(self, _restoring: _Restoring) -> None:
        # A user's subclass may have redefined what operations mean.
        with torch._C.DisableTorchFunctionSubclass():
            self.kept.put_back()


@dataclass(slots=True)
class _KeptArray:
    """A NumPy array."""

    target: Any
    place: _Place
    values: Any

    def put_back(self, _restoring: _Restoring) -> None:
        now, values = np.ndarray.view(self.target, np.ndarray), self.values
        if now.shape != values.shape:
            np.ndarray.resize(self.target, values.shape, refcheck=False)
            now = np.ndarray.view(self.target, np.ndarray)
        if now.tobytes() != values.tobytes():
            now[...] = values


@dataclass(slots=True)
class _KeptState:
    """A random generator or a file: something that takes its state back through a function."""

    place: _Place
    put: Callable[[Any], Any]
    state: Any

    def put_back(self, _restoring: _Restoring) -> None:
        self.put(self.state)


class _Absent:
    """Where there is no value: an empty cell, a slot that is not set."""


_ABSENT = _Absent()


def _attributes_of(obj: Any) -> dict[str, Any] | None:
    """`vars(obj)`, without any code that a class may have put in its way; None if it has none."""
    for cls in type(obj).__mro__:
        slot = cls.__dict__.get("__dict__")
        if slot is not None:
            builtin = type(slot) in (types.GetSetDescriptorType, types.MemberDescriptorType)
            found = slot.__get__(obj) if builtin else None
            return found if isinstance(found, dict) else None
    return None


def _slots_of(cls: type) -> list[types.MemberDescriptorType]:
    return [
        value
        for each in cls.__mro__
        if "__slots__" in each.__dict__
        for value in each.__dict__.values()
        if type(value) is types.MemberDescriptorType
    ]


def _read_slot(slot: types.MemberDescriptorType, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _ABSENT


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


# -- what kind of thing a class makes ----------------------------------------------------------------------------------


class _Kind(enum.Enum):
    SKIPPED = enum.auto()
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    STATE = enum.auto()
    HAS_STATE = enum.auto()
    FILE = enum.auto()
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    BYTES = enum.auto()
    FIXED = enum.auto()
    CALLABLE = enum.auto()
    ITERATOR = enum.auto()
    UNKEPT = enum.auto()
    MODULE = enum.auto()
    OBJECT = enum.auto()


_CALLABLES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinMethodType,
    types.MethodWrapperType,
    functools.partial,
)

_NEVER: tuple[type, ...] = (
    types.ModuleType,
    type,
    BaseException,
    enum.Enum,
    threading.Thread,
    logging.Logger,
    logging.Handler,
    weakref.ref,
    subprocess.Popen,
    concurrent.futures.Executor,
    multiprocessing.process.BaseProcess,
)
"""Neither these nor a user's subclasses of them are followed."""

_PLAIN = (
    argparse.Namespace,
    types.SimpleNamespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)
"""Classes of the standard library that do nothing but hold values."""

_ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size}
)
"""Types of values that cannot change and lead nowhere."""

_FILE = io.IOBase.__mro__[1]
"""What all files are made from; `io.IOBase` itself only registers the builtin ones."""

_CURSOR_METHODS = ("fetchone", "fetchmany")


def _has(cls: type, name: str) -> bool:
    return any(name in each.__dict__ for each in cls.__mro__)


def _package(cls: type) -> str:
    module = cls.__dict__.get("__module__", cls.__module__)
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_library(package: str) -> bool:
    if package not in LIBRARIES:
        return package == _OWN
    if package not in ALSO_FOLDERS:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def written_class(cls: type) -> type:
    """The class as it was written: FSDP's `fully_shard` puts one of its own (`FSDPLinear`) in front of it."""
    mro = cls.__mro__
    return mro[2] if len(mro) > 2 and mro[1].__name__ == "FSDPModule" else cls


def _is_followed(cls: type) -> bool:
    """Whether the attributes of an object of this class are kept: user code's are, a library's are not."""
    package, mro = _package(cls), cls.__mro__
    if cls.__name__ == "Trainer" or _is_library(package):
        return False
    if any(each.__name__ in OUTSIDE and _package(each) in LIGHTNING for each in mro):
        return False
    if torch.amp.GradScaler in mro:
        return True
    parts_of_training = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Dataset, Sampler, DataLoader)
    if package == "torch":
        name = cls.__module__
        if name.startswith(("torch.nn.parallel", "torch.distributed")):
            return False
        return name.startswith(FOLLOWED_PARTS_OF_TORCH) or any(each in mro for each in parts_of_training)
    if package in LIGHTNING:
        names = {each.__name__ for each in mro}
        wanted = {"LightningModule", "LightningDataModule", "Callback"}
        return bool(names & wanted) or any(each in mro for each in parts_of_training)
    if package in sys.stdlib_module_names:
        return cls in _PLAIN
    # Not a class of the user's that is a process group, a store or another of torch's native objects as well.
    return not any(each.__module__.startswith("torch._C") for each in mro)


def _keeps_own_attributes(cls: type) -> bool:
    """Whether a module's own attributes are kept; those of wrappers and of Transformer Engine's modules are theirs.

    The engine restores Transformer Engine's modules. Their subclasses count as well: quantizers are among the
    attributes, and must not come back in the middle of a sweep.
    """
    if torch.jit.ScriptModule in cls.__mro__ or any(_package(each) == "transformer_engine" for each in cls.__mro__):
        return False
    return not written_class(cls).__module__.startswith(("torch.distributed", "torch.nn.parallel", "torch._dynamo"))


def _kind_of(cls: type) -> tuple[_Kind, Any]:
    """(what to do with objects of this class, a detail that depends on it)."""
    mro = cls.__mro__
    if any(each in mro for each in _NEVER) or _BaseDataLoaderIter in mro:
        return _Kind.SKIPPED, None
    if torch.Tensor in mro:
        return _Kind.TENSOR, None
    if np.ndarray in mro:
        return _Kind.ARRAY, None
    if (how := next((how for base, how in _STATEFUL.items() if base in mro), None)) is not None:
        return (_Kind.HAS_STATE if _is_followed(cls) else _Kind.STATE), how
    if cls in _CALLABLES or functools.partial in mro:
        return _Kind.CALLABLE, None
    if cls in _SIMPLE_ITERATORS or cls in _NESTED_ITERATORS:
        return _Kind.ITERATOR, None
    if any(each in mro for each in (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return _Kind.UNKEPT, "generator"
    if any(each.__module__ in ("queue", "_queue", "multiprocessing.queues") for each in mro) or queue.Queue in mro:
        return _Kind.UNKEPT, "queue"
    if socket.socket in mro:
        return _Kind.UNKEPT, "socket"
    if _FILE in mro:
        return _Kind.FILE, None
    return _kind_of_holder(cls)


def _kind_of_holder(cls: type) -> tuple[_Kind, Any]:
    """The same for containers and for objects with attributes."""
    mro, followed = cls.__mro__, _is_followed(cls)
    for base, kind in (
        (dict, _Kind.MAPPING),
        (list, _Kind.SEQUENCE),
        (set, _Kind.SEQUENCE),
        (collections.deque, _Kind.SEQUENCE),
        (bytearray, _Kind.BYTES),
        (array.array, _Kind.BYTES),
        (tuple, _Kind.FIXED),
        (frozenset, _Kind.FIXED),
    ):
        if base in mro:
            return (_Kind.SKIPPED, None) if _is_library(_package(cls)) else (kind, base)
    if nn.Module in mro:
        return _Kind.MODULE, None
    cursor = cls.__name__.lower().endswith("cursor")
    if cursor and (not followed or any(_has(cls, name) for name in _CURSOR_METHODS)):
        return _Kind.UNKEPT, "cursor"
    if followed:
        return _Kind.OBJECT, None  # an iterator's position, too, is among its attributes if its class is in Python
    return (_Kind.UNKEPT, "iterator") if _has(cls, "__next__") and _package(cls) != _OWN else (_Kind.SKIPPED, None)


def _torch_generator(generator: torch.Generator) -> tuple[Callable[[Any], Any], Any]:
    return generator.set_state, torch.Generator.get_state(generator)


def _bit_generator(generator: np.random.BitGenerator) -> tuple[Callable[[Any], Any], Any]:
    return functools.partial(setattr, generator, "state"), copy.deepcopy(generator.state)


def _numpy_generator(generator: np.random.Generator) -> tuple[Callable[[Any], Any], Any]:
    return _bit_generator(generator.bit_generator)


def _random_state(generator: np.random.RandomState) -> tuple[Callable[[Any], Any], Any]:
    state = np.random.RandomState.get_state(generator, legacy=False)
    return functools.partial(np.random.RandomState.set_state, generator), copy.deepcopy(state)


def _python_random(generator: random.Random) -> tuple[Callable[[Any], Any], Any]:
    return functools.partial(random.Random.setstate, generator), random.Random.getstate(generator)


_STATEFUL: dict[type, Callable[[Any], tuple[Callable[[Any], Any], Any]]] = {
    torch.Generator: _torch_generator,
    np.random.BitGenerator: _bit_generator,
    np.random.Generator: _numpy_generator,
    np.random.RandomState: _random_state,
    random.Random: _python_random,
}
"""Random generators: from one of them to (the function that takes its state, its state)."""


# -- the walk ----------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """An object to visit."""

    value: Any
    kind: _Kind
    detail: Any
    depth: int
    place: _Place
    root: str
    tensors: bool


class _Walk:
    """Follows references breadth first, so that each object is found on a shortest way and by a short name."""

    def __init__(self, roots: Mapping[str, Any], tensors: bool) -> None:
        self.kept: list[_Kept] = []
        self.empty: list[tuple[Any, Any]] = []
        """Containers without anything in them, and their builtin type. A module has a dozen."""
        self.unkept: dict[str, None] = {}
        self._unkept_objects: dict[int, Any] = {}
        self._kinds: dict[type, tuple[_Kind, Any]] = {}
        self._seen: dict[int, Any] = {}
        """What was met, by id. Holding it keeps the ids good."""
        self._waiting: collections.deque[_Found] = collections.deque()
        self._visited: collections.Counter[str] = collections.Counter()
        self._positions: dict[int, tuple[Any, _Position | None]] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._root_optimizers = {id(root) for root in roots.values() if torch.optim.Optimizer in type(root).__mro__}
        self._tree: dict[int, bool] = {}
        """Modules of the roots' trees: whether FSDP's first version holds their parameters, and puts views in them."""
        self._owned: dict[int, torch.Tensor] = {}
        """Parameters and buffers of the roots, and their gradients."""
        self._spans: dict[int, list[tuple[int, int]]] | None = None
        for root in roots.values():
            if nn.Module in type(root).__mro__:
                self._plant(root)
        for name, root in roots.items():
            self._meet(root, 0, _Place(None, "", name), name, tensors)
        while self._waiting:
            self._visit(self._waiting.popleft())

    def _plant(self, root: nn.Module) -> None:
        """Note the modules of a root's tree, and what `Snapshot` keeps of them."""
        modules = [module for _, module in modules_of(root)]
        views = _with_views(modules)
        for module in modules:
            self._tree[id(module)] = views is None or id(module) in views
            attributes = _attributes_of(module) or {}
            for table in ("_parameters", "_buffers"):
                tensors = [each for each in _values(attributes.get(table)) if torch.Tensor in type(each).__mro__]
                with torch._C.DisableTorchFunctionSubclass():
                    gradients = [each.grad for each in tensors if each.is_leaf and each.grad is not None]
                self._owned.update((id(each), each) for each in (*tensors, *gradients))

    # -- meeting an object: what is worth a visit waits in line

    def _kind(self, cls: type) -> tuple[_Kind, Any]:
        found = self._kinds.get(cls)
        if found is None:
            try:
                found = _kind_of(cls)
            except Exception:  # a class whose metaclass is odd
                found = _Kind.SKIPPED, None
            self._kinds[cls] = found
        return found

    def _meet(self, value: Any, depth: int, place: _Place, root: str, tensors: bool) -> None:
        cls = type(value)
        if cls in _ATOMS or id(value) in self._seen:
            return
        kind, detail = self._kind(cls)
        if kind is _Kind.SKIPPED or (kind in (_Kind.TENSOR, _Kind.ARRAY) and not tensors):
            return
        if kind in (_Kind.UNKEPT, _Kind.ITERATOR):  # an iterator that is not in a table cannot be exchanged
            self._note(value, place, detail or "iterator")
            return
        if kind in (_Kind.MAPPING, _Kind.SEQUENCE) and not detail.__len__(value) and cls in (
            dict, list, set, collections.OrderedDict, collections.deque,
        ):  # fmt: skip
            self._seen[id(value)] = value
            self.empty.append((value, detail))
            return
        if depth > DEEPEST:
            self.unkept.setdefault(f"{root}: more than {DEEPEST} levels deep; what lies deeper was not kept")
            return
        if kind is not _Kind.MODULE:
            if self._visited[root] >= MOST_OBJECTS:
                self.unkept.setdefault(f"{root}: more than {MOST_OBJECTS:,} objects; what lies deeper was not kept")
                return
            self._visited[root] += 1
        self._seen[id(value)] = value
        self._waiting.append(_Found(value, kind, detail, depth, place, root, tensors))

    def _note(self, value: Any, place: _Place, what: str) -> None:
        if id(value) not in self._unkept_objects:
            self._unkept_objects[id(value)] = value
            self.unkept.setdefault(f"{place} ({what})")

    def _meet_all(self, found: _Found, keys: Iterable[Any], values: list[Any], attributes: bool) -> bool:
        """Meet the values of a table. Iterators among them are exchanged for their positions.

        Returns:
            Whether there are any.
        """
        moving = False
        below = found.depth + 1
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            cls = type(value)
            if cls in _ATOMS:
                continue
            place = found.place.attribute(key) if attributes else found.place.element(key)
            if self._kind(cls)[0] is _Kind.ITERATOR:
                position = self._position(value)
                if position is not None:
                    values[index] = position
                    moving = True
                    continue
            self._meet(value, below, place, found.root, found.tensors)
        return moving

    def _position(self, iterator: Any) -> _Position | None:
        if id(iterator) not in self._positions:
            position = None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Python 3.12 and 3.13: copying itertools' objects will end
                    position = _Position(_second(iterator, self._copies))
            except Exception:
                position = None
            self._positions[id(iterator)] = iterator, position
        return self._positions[id(iterator)][1]

    # -- visiting an object: keep it, and meet what it refers to

    def _visit(self, found: _Found) -> None:
        try:
            self._VISITS[found.kind](self, found)
        except Exception:
            return  # an odd object: what could be kept of it is

    def _visit_mapping(self, found: _Found) -> None:
        value, base = found.value, _mapping_type(found.value)
        kept = KeptMapping(value, found.place, list(base.keys(value)), list(base.values(value)))
        self.kept.append(kept)
        if len(kept.keys) <= MOST_ELEMENTS:
            kept.moving = self._meet_all(found, kept.keys, kept.values, attributes=False)
        if collections.defaultdict in type(value).__mro__:
            factory = collections.defaultdict.__dict__["default_factory"].__get__(value)
            self._meet(factory, found.depth + 1, found.place.attribute("default_factory"), found.root, found.tensors)
        self._visit_subclass(found, dict)

    def _visit_sequence(self, found: _Found) -> None:
        value, base = found.value, found.detail
        kept = _KeptSequence(value, found.place, base, list(base.__iter__(value)))
        self.kept.append(kept)
        if len(kept.values) <= MOST_ELEMENTS:
            kept.moving = self._meet_all(found, range(len(kept.values)), kept.values, attributes=False)
        self._visit_subclass(found, base)

    def _visit_subclass(self, found: _Found, base: type) -> None:
        """The attributes of a container whose class is a user's."""
        if type(found.value) is not base and _is_followed(type(found.value)):
            self._visit_object(found)

    def _visit_bytes(self, found: _Found) -> None:
        base = found.detail
        self.kept.append(_KeptBytes(found.value, found.place, base, base.__getitem__(found.value, slice(None))))

    def _visit_fixed(self, found: _Found) -> None:
        values = list(found.detail.__iter__(found.value))
        if len(values) <= MOST_ELEMENTS:
            for index, value in enumerate(values):
                self._meet(value, found.depth + 1, found.place.element(index), found.root, found.tensors)
        self._visit_subclass(found, found.detail)

    def _visit_tensor(self, found: _Found) -> None:
        tensor: torch.Tensor = found.value
        if id(tensor) in self._owned:
            return
        with torch._C.DisableTorchFunctionSubclass():
            if not _can_be_kept(tensor) or (not is_lazy(tensor) and self._lies_in_owned(local_part(tensor))):
                return
            self.kept.append(_KeptPlainTensor(found.place, KeptTensor.of(tensor)))
        self._visit_tensor_attributes(found, tensor)

    def _visit_tensor_attributes(self, found: _Found, tensor: torch.Tensor) -> None:
        """What user code has noted on a tensor (`weight.seen = 3`)."""
        attributes = _attributes_of(tensor)
        if attributes is not None and (type(tensor) in (torch.Tensor, nn.Parameter, Buffer) or is_lazy(tensor)):
            self._keep_attributes(found._replace(value=tensor), attributes, frozenset(), False, None)

    def _lies_in_owned(self, tensor: torch.Tensor) -> bool:
        """Whether it is a view of a parameter or buffer, with which it goes back."""
        if self._spans is None:
            self._spans = {}
            for owned in self._owned.values():
                part = owned if is_lazy(owned) else local_part(owned)
                if not is_lazy(owned) and _can_be_kept(part) and not hasattr(part, "_quantizer"):
                    storage, start, end = _span(part)
                    self._spans.setdefault(storage, []).append((start, end))
        if hasattr(tensor, "_quantizer") or not tensor.numel():
            return False
        storage, start, end = _span(tensor)
        return any(first <= start and end <= last for first, last in self._spans.get(storage, ()))

    def _visit_array(self, found: _Found) -> None:
        array_ = found.value
        plain = np.ndarray.view(array_, np.ndarray)
        if np.memmap in type(array_).__mro__ or not plain.flags.writeable:
            return
        self.kept.append(_KeptArray(array_, found.place, plain.copy()))
        if plain.dtype.hasobject and plain.size <= MOST_ELEMENTS and plain.dtype == object:
            for index, value in enumerate(plain.flat):
                self._meet(value, found.depth + 1, found.place.element(index), found.root, found.tensors)

    def _visit_state(self, found: _Found) -> None:
        put, state = found.detail(found.value)
        self.kept.append(_KeptState(found.place, put, state))

    def _visit_has_state(self, found: _Found) -> None:
        """A user's own class of random generator."""
        self._visit_object(found)
        self._visit_state(found)

    def _visit_file(self, found: _Found) -> None:
        file = found.value
        methods = [next(c for c in type(file).__mro__ if name in c.__dict__) for name in ("tell", "seek", "seekable")]
        if not all(_package(each) in sys.stdlib_module_names for each in methods):
            self._note(file, found.place, "file")  # a user's, or a library's that reads over the network
            return
        if file.closed or _is_standard_stream(file):
            return
        try:
            position = file.tell() if file.seekable() else None
        except (OSError, ValueError):  # in the middle of `for line in file`
            position = None
        if position is not None:
            self.kept.append(_KeptState(found.place, functools.partial(_seek, file), position))
        elif file.readable():
            self._note(file, found.place, "file")

    def _visit_callable(self, found: _Found) -> None:
        value, cls = found.value, type(found.value)
        if _is_own(value):
            return
        if cls is types.FunctionType:
            self._visit_function(found)
        elif functools.partial in cls.__mro__:
            members = functools.partial.__dict__
            for name in ("func", "args", "keywords"):
                inner = members[name].__get__(value)
                place = found.place if name == "func" else found.place.attribute(name)
                self._meet(inner, found.depth + 1, place, found.root, found.tensors)
            self._visit_object(found)
        else:
            owner = value.__self__
            self._meet(owner, found.depth + 1, found.place, found.root, found.tensors)
            if cls is types.MethodType:
                self._meet(value.__func__, found.depth + 1, found.place, found.root, found.tensors)

    def _visit_function(self, found: _Found) -> None:
        function = found.value
        package = str(function.__globals__.get("__name__", "")).partition(".")[0]
        # A library's wrapper is the library's; what it wraps may be the user's.
        foreign = package in sys.stdlib_module_names or package == "torch" or package in LIGHTNING
        foreign = foreign or _is_library(package)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            values, place = [_cell_contents(cell)], found.place.attribute(name)
            if foreign:
                if self._kind(type(values[0]))[0] is _Kind.CALLABLE:
                    self._meet(values[0], found.depth + 1, place, found.root, found.tensors)
            elif id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                moving = self._meet_all(found, [name], values, attributes=True)
                self.kept.append(_KeptCell(cell, place, values, moving))
        attributes = _attributes_of(function)
        if attributes is not None and not foreign:
            self._keep_attributes(found, attributes, frozenset(), False, None)
        elif attributes:
            for key, value in list(attributes.items()):
                if self._kind(type(value))[0] is _Kind.CALLABLE:
                    self._meet(value, found.depth + 1, found.place.attribute(key), found.root, found.tensors)

    def _visit_module(self, found: _Found) -> None:
        module, attributes = found.value, _attributes_of(found.value)
        if attributes is None or not _is_module_to_visit(type(module)):
            return
        planted = id(module) in self._tree
        # The module tree itself has no depth: a child is as near as its parent.
        for name, child in list(_items(attributes.get("_modules"))):
            place = found.place.attribute(name)
            self._meet(child, found.depth, place, found.root, found.tensors)
        flattened = self._tree[id(module)] if planted else _has_flat_parameter(module)
        sharded = any(each.__name__ == "FSDPModule" for each in type(module).__mro__)
        if not planted and not flattened and not sharded:
            for name in ("_parameters", "_buffers", "_modules"):
                self._meet(attributes.get(name), found.depth + 1, found.place, found.root, found.tensors)
        if not _keeps_own_attributes(type(module)):
            return
        if planted and not flattened:
            for name, tensor in _items(attributes.get("_parameters")):
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen[id(tensor)] = tensor
                    self._visit_tensor_attributes(found._replace(place=found.place.attribute(name)), tensor)
        self._keep_attributes(found, attributes, SNAPSHOTS, flattened, type(module))

    def _visit_object(self, found: _Found) -> None:
        value, cls = found.value, type(found.value)
        mro = cls.__mro__
        if any(each in mro for each in (Dataset, DataLoader)) or any(c.__name__ == "LightningDataModule" for c in mro):
            found = found._replace(tensors=False)  # it may hold gigabytes, and no step writes to it
        attributes = _attributes_of(value)
        if attributes is not None and attributes is not value:
            left = SNAPSHOTS_OF_OPTIMIZERS if id(value) in self._root_optimizers else frozenset()
            self._keep_attributes(found, attributes, left, False, None)
        slots = _slots_of(cls)
        if slots:
            kept = _KeptSlots(value, found.place, slots, [_read_slot(slot, value) for slot in slots])
            self.kept.append(kept)
            kept.moving = self._meet_all(found, [slot.__name__ for slot in slots], kept.values, attributes=True)

    def _keep_attributes(
        self,
        found: _Found,
        attributes: dict[str, Any],
        left: frozenset[str],
        tensors_left: bool,
        cls: type | None,
    ) -> None:
        keys, values = list(attributes), list(attributes.values())
        kept = _KeptAttributes(found.value, found.place, keys, values, left, tensors_left, cls)
        self.kept.append(kept)
        followed = [
            None if key in left or (tensors_left and _either_tensor(value)) else value
            for key, value in zip(keys, values, strict=True)
        ]
        kept.moving = self._meet_all(found, keys, followed, attributes=True)
        if kept.moving:
            kept.values = [new if type(new) is _Position else old for new, old in zip(followed, values, strict=True)]

    _VISITS: ClassVar[Mapping[_Kind, Callable[[_Walk, _Found], None]]] = {
        _Kind.MAPPING: _visit_mapping,
        _Kind.SEQUENCE: _visit_sequence,
        _Kind.BYTES: _visit_bytes,
        _Kind.FIXED: _visit_fixed,
        _Kind.TENSOR: _visit_tensor,
        _Kind.ARRAY: _visit_array,
        _Kind.STATE: _visit_state,
        _Kind.HAS_STATE: _visit_has_state,
        _Kind.FILE: _visit_file,
        _Kind.CALLABLE: _visit_callable,
        _Kind.MODULE: _visit_module,
        _Kind.OBJECT: _visit_object,
    }


def modules_of(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) of a module's tree, each module once, without a method of a user's class."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((path, module))
        children = _items((_attributes_of(module) or {}).get("_modules"))
        below = [(f"{path}.{name}" if path else str(name), child) for name, child in children]
        waiting.extend(pair for pair in reversed(below) if nn.Module in type(pair[1]).__mro__)
    return found


def has_flat_parameters(modules: Iterable[nn.Module]) -> bool:
    """Whether the first version of FSDP holds the parameters of one of these, and puts views of them in modules."""
    return any(map(_has_flat_parameter, modules))


def _with_views(modules: Iterable[nn.Module]) -> set[int] | None:
    """The modules, by id, whose parameters FSDP's first version holds; None if it does not say of which.

    Its flat parameter lists them. In these, tensors come and go as attributes; in all others tensors are the user's.
    """
    found: set[int] = set()
    for module in modules:
        if not _has_flat_parameter(module):
            continue
        attributes = _attributes_of(module) or {}
        registered = dict(_items(attributes.get("_parameters"))).get("_flat_param")
        flat = getattr(attributes.get("_handle"), "flat_param", registered)
        if flat is None:
            return None
        for name in ("_param_infos", "_shared_param_infos"):
            found.update(id(info.module) for info in getattr(flat, name, ()))
    return found


def _has_flat_parameter(module: nn.Module) -> bool:
    attributes = _attributes_of(module) or {}
    if "_flat_param" in attributes or any(name == "_flat_param" for name, _ in _items(attributes.get("_parameters"))):
        return True
    return type(attributes.get("_handle")).__name__ == "FlatParamHandle"


def _is_module_to_visit(cls: type) -> bool:
    return cls.__name__ != "Trainer" and _package(cls) != _OWN


def _items(table: Any) -> list[tuple[Any, Any]]:
    return list(_mapping_type(table).items(table)) if isinstance(table, dict) else []


def _values(table: Any) -> list[Any]:
    return [value for _, value in _items(table)]


def _can_be_kept(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that is copied and written plainly."""
    if is_lazy(tensor):
        return True
    part = local_part(tensor)
    if hasattr(part, "_quantizer"):
        return True
    cls = type(part)
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False  # a subclass that computes for itself what a copy is
    if part.layout is not torch.strided or part.device.type == "meta":
        return False
    return part.untyped_storage().size() > 0


def _is_standard_stream(file: Any) -> bool:
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    if any(file is stream or file is getattr(stream, "buffer", stream) for stream in streams):
        return True
    try:
        return bool(file.fileno() <= 2)
    except (OSError, ValueError):
        return False


def _seek(file: Any, position: int) -> None:
    if not file.closed:
        file.seek(position)


class PythonState:
    """What user code may change in Python, reachable from a few roots, as it was when it was taken."""

    def __init__(self, kept: list[_Kept], empty: list[tuple[Any, Any]], unkept: Iterable[str]) -> None:
        self._kept = kept
        self._empty = empty
        self.unkept: tuple[str, ...] = tuple(unkept)
        """What keeps a position of its own that cannot be put back, by name: `model.rows (generator)`."""

    @staticmethod
    def take(roots: Mapping[str, Any], *, tensors: bool = True) -> PythonState:
        """Follow references from the roots, and keep what can change.

        Args:
            roots: name to object, such as `{"model": module, "optimizer 0": optimizer}`. Parameters and buffers of
                modules among them, and the state and groups of optimizers among them, are `Snapshot`'s.
            tensors: whether to copy the values of other tensors and of arrays. A dataset may hold gigabytes of them.
        """
        walk = _Walk(roots, tensors)
        return PythonState(walk.kept, walk.empty, walk.unkept)

    @staticmethod
    def follows(value: Any) -> bool:
        """Whether the attributes of such an object are kept, or whether it belongs to a library."""
        return _kind_of(type(value))[0] in (_Kind.OBJECT, _Kind.MODULE)

    @property
    def nbytes(self) -> int:
        """Host memory that copies of tensors and arrays take."""
        tensors = sum(each.kept.nbytes for each in self._kept if isinstance(each, _KeptPlainTensor))
        return tensors + sum(int(each.values.nbytes) for each in self._kept if isinstance(each, _KeptArray))

    def restore(self) -> None:
        """Put everything back, in place. May be called again and again.

        Raises:
            NotPutBack: names what could not be put back. All the rest is.
        """
        restoring, failed = _Restoring(), list[str]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kept in self._kept:
                try:
                    kept.put_back(restoring)
                except Exception as error:
                    failed.append(f"{kept.place} ({in_words(error)})")
            for target, base in self._empty:
                if not base.__len__(target):
                    continue
                if base is dict:
                    _make_equal(target, [], [], restoring)
                else:
                    base.clear(target)
        if failed:
            raise NotPutBack(failed)
