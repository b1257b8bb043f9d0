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

Here is the walk from the roots. What kind of thing it comes to, `kinds` knows; one thing of each kind is kept and
put back in `kept_objects` and `kept_tensor`.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import Buffer
from torch.utils.data import DataLoader, Dataset

from lowprec_callback.failures import in_words
from lowprec_callback.sweep.kept_objects import (
    OWN,
    Kept,
    KeptArray,
    KeptAttributes,
    KeptBytes,
    KeptCell,
    KeptMapping,
    KeptPlainTensor,
    KeptSequence,
    KeptSlots,
    KeptState,
    NotPutBack,
    Place,
    Position,
    Restoring,
    attributes_of,
    cell_contents,
    either_tensor,
    is_own,
    items_of,
    make_equal,
    mapping_type,
    read_slot,
    second,
    slots_of,
    values_of,
)
from lowprec_callback.sweep.kept_tensor import KeptTensor, can_be_kept, is_lazy, local_part, span
from lowprec_callback.sweep.kinds import (
    ATOMS,
    LIGHTNING,
    Kind,
    is_followed,
    is_library,
    keeps_own_attributes,
    kind_of,
    package_of,
)

MOST_OBJECTS = 100_000
"""Objects below one root that are visited. Modules, empty containers, numbers and strings do not count."""

MOST_ELEMENTS = 10_000
"""A container with more elements is copied, but not descended into: what fills it is data, a list of paths say."""

DEEPEST = 8
"""References from a root, or from a module of its tree, to the deepest object that is visited."""

SNAPSHOTS = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of modules that `Snapshot` keeps."""

SNAPSHOTS_OF_OPTIMIZERS = frozenset({"state", "param_groups", "_scales"})
"""The same for optimizers; `_scales` belongs to Transformer Engine's FusedAdam."""


class _Found(NamedTuple):
    """An object to visit."""

    value: Any
    kind: Kind
    detail: Any
    depth: int
    place: Place
    root: str
    tensors: bool


class _Walk:
    """Follows references breadth first, so that each object is found on a shortest way and by a short name."""

    def __init__(self, roots: Mapping[str, Any], tensors: bool) -> None:
        self.kept: list[Kept] = []
        self.empty: list[tuple[Any, Any]] = []
        """Containers without anything in them, and their builtin type. A module has a dozen."""
        self.unkept: dict[str, None] = {}
        self._unkept_objects: dict[int, Any] = {}
        self._kinds: dict[type, tuple[Kind, Any]] = {}
        self._seen: dict[int, Any] = {}
        """What was met, by id. Holding it keeps the ids good."""
        self._waiting: collections.deque[_Found] = collections.deque()
        self._visited: collections.Counter[str] = collections.Counter()
        self._positions: dict[int, tuple[Any, Position | None]] = {}
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
            self._meet(root, 0, Place(None, "", name), name, tensors)
        while self._waiting:
            self._visit(self._waiting.popleft())

    def _plant(self, root: nn.Module) -> None:
        """Note the modules of a root's tree, and what `Snapshot` keeps of them."""
        modules = [module for _, module in modules_of(root)]
        views = _with_views(modules)
        for module in modules:
            self._tree[id(module)] = views is None or id(module) in views
            attributes = attributes_of(module) or {}
            for table in ("_parameters", "_buffers"):
                tensors = [each for each in values_of(attributes.get(table)) if torch.Tensor in type(each).__mro__]
                with torch._C.DisableTorchFunctionSubclass():
                    gradients = [each.grad for each in tensors if each.is_leaf and each.grad is not None]
                self._owned.update((id(each), each) for each in (*tensors, *gradients))

    # -- meeting an object: what is worth a visit waits in line

    def _kind(self, cls: type) -> tuple[Kind, Any]:
        found = self._kinds.get(cls)
        if found is None:
            try:
                found = kind_of(cls)
            except Exception:  # a class whose metaclass is odd
                found = Kind.SKIPPED, None
            self._kinds[cls] = found
        return found

    def _meet(self, value: Any, depth: int, place: Place, root: str, tensors: bool) -> None:
        cls = type(value)
        if cls in ATOMS or id(value) in self._seen:
            return
        kind, detail = self._kind(cls)
        if kind is Kind.SKIPPED or (kind in (Kind.TENSOR, Kind.ARRAY) and not tensors):
            return
        if kind in (Kind.UNKEPT, Kind.ITERATOR):  # an iterator that is not in a table cannot be exchanged
            self._note(value, place, detail or "iterator")
            return
        if kind in (Kind.MAPPING, Kind.SEQUENCE) and not detail.__len__(value) and cls in (
            dict, list, set, collections.OrderedDict, collections.deque,
        ):  # fmt: skip
            self._seen[id(value)] = value
            self.empty.append((value, detail))
            return
        if depth > DEEPEST:
            self.unkept.setdefault(f"{root}: more than {DEEPEST} levels deep; what lies deeper was not kept")
            return
        if kind is not Kind.MODULE:
            if self._visited[root] >= MOST_OBJECTS:
                self.unkept.setdefault(f"{root}: more than {MOST_OBJECTS:,} objects; what lies deeper was not kept")
                return
            self._visited[root] += 1
        self._seen[id(value)] = value
        self._waiting.append(_Found(value, kind, detail, depth, place, root, tensors))

    def _note(self, value: Any, place: Place, what: str) -> None:
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
            if cls in ATOMS:
                continue
            place = found.place.attribute(key) if attributes else found.place.element(key)
            if self._kind(cls)[0] is Kind.ITERATOR:
                position = self._position(value)
                if position is not None:
                    values[index] = position
                    moving = True
                    continue
            self._meet(value, below, place, found.root, found.tensors)
        return moving

    def _position(self, iterator: Any) -> Position | None:
        if id(iterator) not in self._positions:
            position = None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Python 3.12 and 3.13: copying itertools' objects will end
                    position = Position(second(iterator, self._copies))
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
        value, base = found.value, mapping_type(found.value)
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
        kept = KeptSequence(value, found.place, base, list(base.__iter__(value)))
        self.kept.append(kept)
        if len(kept.values) <= MOST_ELEMENTS:
            kept.moving = self._meet_all(found, range(len(kept.values)), kept.values, attributes=False)
        self._visit_subclass(found, base)

    def _visit_subclass(self, found: _Found, base: type) -> None:
        """The attributes of a container whose class is a user's."""
        if type(found.value) is not base and is_followed(type(found.value)):
            self._visit_object(found)

    def _visit_bytes(self, found: _Found) -> None:
        base = found.detail
        self.kept.append(KeptBytes(found.value, found.place, base, base.__getitem__(found.value, slice(None))))

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
            if not can_be_kept(tensor) or (not is_lazy(tensor) and self._lies_in_owned(local_part(tensor))):
                return
            self.kept.append(KeptPlainTensor(found.place, KeptTensor.of(tensor)))
        self._visit_tensor_attributes(found, tensor)

    def _visit_tensor_attributes(self, found: _Found, tensor: torch.Tensor) -> None:
        """What user code has noted on a tensor (`weight.seen = 3`)."""
        attributes = attributes_of(tensor)
        if attributes is not None and (type(tensor) in (torch.Tensor, nn.Parameter, Buffer) or is_lazy(tensor)):
            self._keep_attributes(found._replace(value=tensor), attributes, frozenset(), False, None)

    def _lies_in_owned(self, tensor: torch.Tensor) -> bool:
        """Whether it is a view of a parameter or buffer, with which it goes back."""
        if self._spans is None:
            self._spans = {}
            for owned in self._owned.values():
                part = owned if is_lazy(owned) else local_part(owned)
                if not is_lazy(owned) and can_be_kept(part) and not hasattr(part, "_quantizer"):
                    storage, start, end = span(part)
                    self._spans.setdefault(storage, []).append((start, end))
        if hasattr(tensor, "_quantizer") or not tensor.numel():
            return False
        storage, start, end = span(tensor)
        return any(first <= start and end <= last for first, last in self._spans.get(storage, ()))

    def _visit_array(self, found: _Found) -> None:
        array_ = found.value
        plain = np.ndarray.view(array_, np.ndarray)
        if np.memmap in type(array_).__mro__ or not plain.flags.writeable:
            return
        self.kept.append(KeptArray(array_, found.place, plain.copy()))
        if plain.dtype.hasobject and plain.size <= MOST_ELEMENTS and plain.dtype == object:
            for index, value in enumerate(plain.flat):
                self._meet(value, found.depth + 1, found.place.element(index), found.root, found.tensors)

    def _visit_state(self, found: _Found) -> None:
        put, state = found.detail(found.value)
        self.kept.append(KeptState(found.place, put, state))

    def _visit_has_state(self, found: _Found) -> None:
        """A user's own class of random generator."""
        self._visit_object(found)
        self._visit_state(found)

    def _visit_file(self, found: _Found) -> None:
        file = found.value
        methods = [next(c for c in type(file).__mro__ if name in c.__dict__) for name in ("tell", "seek", "seekable")]
        if not all(package_of(each) in sys.stdlib_module_names for each in methods):
            self._note(file, found.place, "file")  # a user's, or a library's that reads over the network
            return
        if file.closed or _is_standard_stream(file):
            return
        try:
            position = file.tell() if file.seekable() else None
        except (OSError, ValueError):  # in the middle of `for line in file`
            position = None
        if position is not None:
            self.kept.append(KeptState(found.place, functools.partial(_seek, file), position))
        elif file.readable():
            self._note(file, found.place, "file")

    def _visit_callable(self, found: _Found) -> None:
        value, cls = found.value, type(found.value)
        if is_own(value):
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
        foreign = foreign or is_library(package)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            values, place = [cell_contents(cell)], found.place.attribute(name)
            if foreign:
                if self._kind(type(values[0]))[0] is Kind.CALLABLE:
                    self._meet(values[0], found.depth + 1, place, found.root, found.tensors)
            elif id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                moving = self._meet_all(found, [name], values, attributes=True)
                self.kept.append(KeptCell(cell, place, values, moving))
        attributes = attributes_of(function)
        if attributes is not None and not foreign:
            self._keep_attributes(found, attributes, frozenset(), False, None)
        elif attributes:
            for key, value in list(attributes.items()):
                if self._kind(type(value))[0] is Kind.CALLABLE:
                    self._meet(value, found.depth + 1, found.place.attribute(key), found.root, found.tensors)

    def _visit_module(self, found: _Found) -> None:
        module, attributes = found.value, attributes_of(found.value)
        if attributes is None or not _is_module_to_visit(type(module)):
            return
        planted = id(module) in self._tree
        # The module tree itself has no depth: a child is as near as its parent.
        for name, child in list(items_of(attributes.get("_modules"))):
            place = found.place.attribute(name)
            self._meet(child, found.depth, place, found.root, found.tensors)
        flattened = self._tree[id(module)] if planted else _has_flat_parameter(module)
        sharded = any(each.__name__ == "FSDPModule" for each in type(module).__mro__)
        if not planted and not flattened and not sharded:
            for name in ("_parameters", "_buffers", "_modules"):
                self._meet(attributes.get(name), found.depth + 1, found.place, found.root, found.tensors)
        if not keeps_own_attributes(type(module)):
            return
        if planted and not flattened:
            for name, tensor in items_of(attributes.get("_parameters")):
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen[id(tensor)] = tensor
                    self._visit_tensor_attributes(found._replace(place=found.place.attribute(name)), tensor)
        self._keep_attributes(found, attributes, SNAPSHOTS, flattened, type(module))

    def _visit_object(self, found: _Found) -> None:
        value, cls = found.value, type(found.value)
        mro = cls.__mro__
        if any(each in mro for each in (Dataset, DataLoader)) or any(c.__name__ == "LightningDataModule" for c in mro):
            found = found._replace(tensors=False)  # it may hold gigabytes, and no step writes to it
        attributes = attributes_of(value)
        if attributes is not None and attributes is not value:
            left = SNAPSHOTS_OF_OPTIMIZERS if id(value) in self._root_optimizers else frozenset()
            self._keep_attributes(found, attributes, left, False, None)
        slots = slots_of(cls)
        if slots:
            kept = KeptSlots(value, found.place, slots, [read_slot(slot, value) for slot in slots])
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
        kept = KeptAttributes(found.value, found.place, keys, values, left, tensors_left, cls)
        self.kept.append(kept)
        followed = [
            None if key in left or (tensors_left and either_tensor(value)) else value
            for key, value in zip(keys, values, strict=True)
        ]
        kept.moving = self._meet_all(found, keys, followed, attributes=True)
        if kept.moving:
            kept.values = [new if type(new) is Position else old for new, old in zip(followed, values, strict=True)]

    _VISITS: ClassVar[Mapping[Kind, Callable[[_Walk, _Found], None]]] = {
        Kind.MAPPING: _visit_mapping,
        Kind.SEQUENCE: _visit_sequence,
        Kind.BYTES: _visit_bytes,
        Kind.FIXED: _visit_fixed,
        Kind.TENSOR: _visit_tensor,
        Kind.ARRAY: _visit_array,
        Kind.STATE: _visit_state,
        Kind.HAS_STATE: _visit_has_state,
        Kind.FILE: _visit_file,
        Kind.CALLABLE: _visit_callable,
        Kind.MODULE: _visit_module,
        Kind.OBJECT: _visit_object,
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
        children = items_of((attributes_of(module) or {}).get("_modules"))
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
        attributes = attributes_of(module) or {}
        registered = dict(items_of(attributes.get("_parameters"))).get("_flat_param")
        flat = getattr(attributes.get("_handle"), "flat_param", registered)
        if flat is None:
            return None
        for name in ("_param_infos", "_shared_param_infos"):
            found.update(id(info.module) for info in getattr(flat, name, ()))
    return found


def _has_flat_parameter(module: nn.Module) -> bool:
    attributes = attributes_of(module) or {}
    if "_flat_param" in attributes or any(name == "_flat_param" for name, _ in items_of(attributes.get("_parameters"))):
        return True
    return type(attributes.get("_handle")).__name__ == "FlatParamHandle"


def _is_module_to_visit(cls: type) -> bool:
    return cls.__name__ != "Trainer" and package_of(cls) != OWN


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

    def __init__(self, kept: list[Kept], empty: list[tuple[Any, Any]], unkept: Iterable[str]) -> None:
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
        return kind_of(type(value))[0] in (Kind.OBJECT, Kind.MODULE)

    @property
    def nbytes(self) -> int:
        """Host memory that copies of tensors and arrays take."""
        tensors = sum(each.kept.nbytes for each in self._kept if isinstance(each, KeptPlainTensor))
        return tensors + sum(int(each.values.nbytes) for each in self._kept if isinstance(each, KeptArray))

    def restore(self) -> None:
        """Put everything back, in place. May be called again and again.

        Raises:
            NotPutBack: names what could not be put back. All the rest is.
        """
        restoring, failed = Restoring(), list[str]()
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
                    make_equal(target, [], [], restoring)
                else:
                    base.clear(target)
        if failed:
            raise NotPutBack(failed)
