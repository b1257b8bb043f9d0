"""What is kept of one Python object, of each kind of object in its own way, and how it is put back.

An object that can change is a table of references: an attribute dict, the elements of a list, a variable that functions
share. The table is copied, not what is in it, and putting it back makes the object's own table equal to the copy, by
identity. Each `Kept...` here holds one object and its copy; which objects there are, `python_state` finds out.

Three things make that more than a copy:

- *No user code runs.* Attributes and elements are read and written by the methods of builtin types, never by what a
  user's class has put in their place.
- *What is this package's stays* (`is_own`): hooks and wrappers that it has put into the table meanwhile.
- *An iterator is a position.* It cannot be set back, so a second one at the same place takes its seat in the table
  (`second`).
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from lowprec_callback.failures import in_words
from lowprec_callback.sweep.kept_tensor import KeptTensor

MOST_NAMES = 5
"""Names that the message of `NotPutBack` gives in full."""


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


# -- what this package puts into user objects --------------------------------------------------------------------------

OWN = __name__.partition(".")[0]


def is_own(value: Any) -> bool:
    """Whether a value is this package's: a function of its code, however it calls itself, or an object of its classes.

    `functools.wraps` gives a wrapper the user's name and module; the globals that it runs with tell the truth.
    """
    cls = type(value)
    if cls is types.MethodType:
        value, cls = value.__func__, type(value.__func__)
    elif cls is functools.partial:
        value, cls = value.func, type(value.func)
    module = value.__globals__.get("__name__") if cls is types.FunctionType else cls.__dict__.get("__module__")
    return isinstance(module, str) and module.partition(".")[0] == OWN


# -- names -------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where an object was found, written out only when somebody asks."""

    before: Place | None
    how: str
    """`.` an attribute, `[` an element, nothing for a root."""
    key: Any

    def __str__(self) -> str:
        pieces: list[str] = []
        place: Place | None = self
        while place is not None:
            pieces.append(place._piece())
            place = place.before
        return "".join(reversed(pieces))

    def _piece(self) -> str:
        if self.how == "[":
            # Other keys may be anybody's objects, whose `__repr__` is not ours to call.
            return f"[{self.key!r}]" if type(self.key) in (str, int, bool) else "[...]"
        return f"{self.how}{self.key}" if isinstance(self.key, str) else ""

    def attribute(self, name: Any) -> Place:
        """That of an attribute of the object here."""
        return Place(self, ".", name)

    def element(self, key: Any) -> Place:
        """That of an element of the container here."""
        return Place(self, "[", key)


# -- iterators ---------------------------------------------------------------------------------------------------------

_MANY: list[Iterable[Any]] = [[], (), range(0), range(1 << 70), "", "é", b"", bytearray(), set(), collections.deque()]
_TABLE: dict[Any, Any] = {}
_VIEWS: list[Any] = [_TABLE, _TABLE.keys(), _TABLE.values(), _TABLE.items()]

SIMPLE_ITERATORS: frozenset[type] = frozenset(
    {
        *(type(iter(each)) for each in (*_MANY, *_VIEWS)),
        *(type(reversed(each)) for each in ([], range(0), collections.deque(), *_VIEWS)),
        *(itertools.count, itertools.repeat, itertools.product, itertools.permutations, itertools.combinations),
        type(itertools.tee(())[0]),
    }
)
"""Iterators whose position is all their own: `copy.copy` gives a second one at the same place."""

NESTED_ITERATORS: frozenset[type] = frozenset(
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


def second(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
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
        return tuple(second(each, memo) for each in value)
    if cls is list:
        return list(value)  # what `cycle` has seen so far
    if cls in SIMPLE_ITERATORS:
        made = copy.copy(value)
    elif cls in NESTED_ITERATORS:
        make, arguments, *state = value.__reduce__()
        made = make(*(second(each, memo) for each in arguments))
        if state and state[0] is not None:
            made.__setstate__(second(state[0], memo))
    elif has(cls, "__next__"):
        raise _CannotCopy
    else:
        return value
    memo[id(value)] = value, made
    return made


@dataclass(slots=True)
class Position:
    """Stands in a kept table for an iterator: a copy that nobody advances, of which each restore puts in a copy."""

    iterator: Any


# -- what is kept ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Restoring:
    """What one call of `restore` has to remember."""

    copies: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    hooks: set[int] = field(default_factory=set)
    """Keys of this package's hooks. PyTorch notes some of their settings in tables beside the hooks, by these keys."""

    def fresh(self, values: list[Any], moving: bool) -> list[Any]:
        """The values to put in, iterators copied."""
        if not moving:
            return values
        return [second(v.iterator, self.copies) if type(v) is Position else v for v in values]


class Kept(Protocol):
    """One object and what was kept of it."""

    @property
    def place(self) -> Place:
        """Where it was found."""

    def put_back(self, restoring: Restoring) -> None:
        """Make it what it was, in place. May be called again and again."""


def _nothing_left(_key: Any) -> bool:
    return False


@dataclass(slots=True)
class KeptMapping:
    """The keys, values and order of one dict, by identity."""

    target: dict[Any, Any]
    place: Place
    keys: list[Any]
    values: list[Any]
    moving: bool = False
    """Whether there are iterators among the values."""

    @staticmethod
    def of(target: dict[Any, Any], name: str = "") -> KeptMapping:
        """Copy the table, not what is in it."""
        base = mapping_type(target)
        return KeptMapping(target, Place(None, "", name), list(base.keys(target)), list(base.values(target)))

    def put_back(self, restoring: Restoring | None = None) -> None:
        """In place."""
        restoring = restoring or Restoring()
        make_equal(self.target, self.keys, restoring.fresh(self.values, self.moving), restoring)


def mapping_type(target: dict[Any, Any]) -> Any:
    """The builtin type whose methods are safe to use: an OrderedDict breaks if it is written to as a dict."""
    return collections.OrderedDict if collections.OrderedDict in type(target).__mro__ else dict


def make_equal(
    target: dict[Any, Any],
    keys: list[Any],
    values: list[Any],
    restoring: Restoring,
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
    base = mapping_type(target)
    same = dict.__len__(target) == len(keys) and all(map(is_, base.keys(target), keys))
    if same and all(map(is_, base.values(target), values)):
        return
    now = dict(zip(base.keys(target), base.values(target), strict=True))
    before = dict(zip(keys, values, strict=True))
    wanted: dict[Any, Any] = {}
    for key, value in before.items():
        if left(key) or is_own(value) or (tensors_left and either_tensor(value, now.get(key))):
            if key in now:
                wanted[key] = now[key]
        else:
            wanted[key] = value
    for key, value in now.items():
        own = is_own(value)
        if own and type(key) is int:
            restoring.hooks.add(key)
        of_own_hook = value is True and type(key) is int and key in restoring.hooks
        if own or (key not in before and (of_own_hook or left(key) or (tensors_left and either_tensor(value)))):
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


def either_tensor(*values: Any) -> bool:
    """Whether one of the values is a tensor."""
    return any(torch.Tensor in type(value).__mro__ for value in values)


@dataclass(slots=True)
class KeptAttributes:
    """An object's attribute dict, and a module's class (a lazy module takes another one when it first runs)."""

    owner: Any
    place: Place
    keys: list[str]
    values: list[Any]
    names_left: frozenset[str]
    tensors_left: bool
    cls: type | None
    moving: bool = False

    def put_back(self, restoring: Restoring) -> None:
        """See `Kept`."""
        if self.cls is not None and type(self.owner) is not self.cls:
            object.__setattr__(self.owner, "__class__", self.cls)
        target = attributes_of(self.owner)
        if target is not None:
            values = restoring.fresh(self.values, self.moving)
            make_equal(target, self.keys, values, restoring, self._left, self.tensors_left)

    def _left(self, key: Any) -> bool:
        """torch.compile's notes (`_dynamo_...`) belong to what it has compiled, which stays."""
        return isinstance(key, str) and (key in self.names_left or key.startswith("_dynamo"))


@dataclass(slots=True)
class KeptSlots:
    """Values of an object's `__slots__`."""

    owner: Any
    place: Place
    slots: list[types.MemberDescriptorType]
    values: list[Any]
    moving: bool = False

    def put_back(self, restoring: Restoring) -> None:
        """See `Kept`."""
        for slot, value in zip(self.slots, restoring.fresh(self.values, self.moving), strict=True):
            now = read_slot(slot, self.owner)
            if now is value:
                continue
            if value is _ABSENT:
                slot.__delete__(self.owner)
            else:
                slot.__set__(self.owner, value)


@dataclass(slots=True)
class KeptSequence:
    """The elements of a list, set or deque, by identity and in order."""

    target: Any
    place: Place
    base: Any
    values: list[Any]
    moving: bool = False

    def put_back(self, restoring: Restoring) -> None:
        """See `Kept`."""
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
class KeptBytes:
    """A bytearray or an `array.array`."""

    target: Any
    place: Place
    base: Any
    values: Any

    def put_back(self, _restoring: Restoring) -> None:
        """See `Kept`."""
        if memoryview(self.target) != memoryview(self.values):
            self.base.__setitem__(self.target, slice(None), self.values)


@dataclass(slots=True)
class KeptCell:
    """A variable that functions share (`nonlocal`)."""

    cell: types.CellType
    place: Place
    values: list[Any]
    """One value."""
    moving: bool = False

    def put_back(self, restoring: Restoring) -> None:
        """See `Kept`."""
        (value,) = restoring.fresh(self.values, self.moving)
        now = cell_contents(self.cell)
        if now is value or (now is not _ABSENT and is_own(now)):
            return
        if value is _ABSENT:
            del self.cell.cell_contents
        elif not is_own(value):
            self.cell.cell_contents = value


@dataclass(slots=True)
class KeptPlainTensor:
    """A tensor that is neither parameter nor buffer."""

    place: Place
    kept: KeptTensor

    def put_back(self, _restoring: Restoring) -> None:
        """See `Kept`."""
        # A user's subclass may have redefined what operations mean.
        with torch._C.DisableTorchFunctionSubclass():
            self.kept.put_back()


@dataclass(slots=True)
class KeptArray:
    """A NumPy array."""

    target: Any
    place: Place
    values: Any

    def put_back(self, _restoring: Restoring) -> None:
        """See `Kept`."""
        now, values = np.ndarray.view(self.target, np.ndarray), self.values
        if now.shape != values.shape:
            np.ndarray.resize(self.target, values.shape, refcheck=False)
            now = np.ndarray.view(self.target, np.ndarray)
        if now.tobytes() != values.tobytes():
            now[...] = values


@dataclass(slots=True)
class KeptState:
    """A random generator or a file: something that takes its state back through a function."""

    place: Place
    put: Callable[[Any], Any]
    state: Any

    def put_back(self, _restoring: Restoring) -> None:
        """See `Kept`."""
        self.put(self.state)


class _Absent:
    """Where there is no value: an empty cell, a slot that is not set."""


_ABSENT = _Absent()


def has(cls: type, name: str) -> bool:
    """Whether a class, or one that it is made from, defines a name."""
    return any(name in each.__dict__ for each in cls.__mro__)


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """`vars(obj)`, without any code that a class may have put in its way; None if it has none."""
    for cls in type(obj).__mro__:
        slot = cls.__dict__.get("__dict__")
        if slot is not None:
            builtin = type(slot) in (types.GetSetDescriptorType, types.MemberDescriptorType)
            found = slot.__get__(obj) if builtin else None
            return found if isinstance(found, dict) else None
    return None


def slots_of(cls: type) -> list[types.MemberDescriptorType]:
    """What reads and writes the `__slots__` of a class and of those that it is made from."""
    return [
        value
        for each in cls.__mro__
        if "__slots__" in each.__dict__
        for value in each.__dict__.values()
        if type(value) is types.MemberDescriptorType
    ]


def read_slot(slot: types.MemberDescriptorType, owner: Any) -> Any:
    """The value of a slot, or `_ABSENT`."""
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _ABSENT


def cell_contents(cell: types.CellType) -> Any:
    """The value of a variable that functions share, or `_ABSENT`."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def items_of(table: Any) -> list[tuple[Any, Any]]:
    """(key, value) of a dict; none of what is no dict."""
    return list(mapping_type(table).items(table)) if isinstance(table, dict) else []


def values_of(table: Any) -> list[Any]:
    """The values of a dict; none of what is no dict."""
    return [value for _, value in items_of(table)]
