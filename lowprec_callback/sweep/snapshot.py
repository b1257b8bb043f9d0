"""Everything that a training step changes, set aside before the sweep and put back after it, bit for bit.

Copies live in host memory, so that they do not show in the memory that recipes are measured by. Values are copied
back into the objects that hold them (parameters, optimizer state), so that references which others keep stay good.

Here is what PyTorch knows of: parameters, buffers, gradients, modules, optimizer state, random generators. Whatever
else user code keeps in Python objects is `python_state`'s.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lowprec_callback.sweep.kept_objects import KeptMapping, NotPutBack, attempt
from lowprec_callback.sweep.kept_tensor import KeptTensor, is_lazy, local_part
from lowprec_callback.sweep.python_state import SNAPSHOTS, PythonState, has_flat_parameters, modules_of

CHUNK = 1000
"""Values that are handed on as one list: one that is too long would not be descended into."""


def whole_size(model: nn.Module) -> tuple[int, int]:
    """(parameters, bytes) of the whole model, on however many ranks its parameters are spread.

    A DTensor counts as the whole that it is a part of. Under FSDP's first version the parameters are views of this
    rank's part of a flat one, which knows its full size; padding is not counted. Nor is what has no size before a lazy
    module's first forward.
    """
    flat = {id(p): p for m in model.modules() if (p := getattr(m, "_flat_param", None)) is not None}
    inside = {id(part) for p in flat.values() for part in getattr(p, "_params", None) or ()} | flat.keys()
    sizes = [(p._unpadded_unsharded_size.numel(), p.element_size()) for p in flat.values()]
    sizes += [(p.numel(), p.element_size()) for p in model.parameters() if id(p) not in inside and not is_lazy(p)]
    return sum(count for count, _ in sizes), sum(count * each for count, each in sizes)


def rank_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    parts = (local_part(parameter) for parameter in model.parameters() if not is_lazy(parameter))
    return sum(part.numel() * part.element_size() for part in parts)


@dataclass
class _KeptOptimizer:
    """One optimizer's state by parameter, and its groups' settings.

    Tensors are copied. Other values are kept by reference: numbers cannot change, and what lists and dicts hold (LBFGS
    keeps its last directions in lists) is `PythonState`'s, which gets `loose`.
    """

    optimizer: torch.optim.Optimizer
    name: str
    tables: dict[str, KeptMapping]
    """The optimizer's `state`; and the scales by which Transformer Engine's FusedAdam keeps narrow states."""
    entries: list[KeptMapping]
    """Each parameter's own table in these."""
    tensors: list[KeptTensor]
    groups: list[dict[str, Any]]
    loose: list[Any]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, name: str) -> _KeptOptimizer:
        kept = _KeptOptimizer(optimizer, name, {}, [], [], [], [])
        for table_name in ("state", "_scales"):
            table = vars(optimizer).get(table_name)
            if isinstance(table, dict):
                kept.tables[table_name] = KeptMapping.of(table)
                for entries in table.values():
                    if isinstance(entries, dict):
                        kept.entries.append(KeptMapping.of(entries))
                        kept._keep(entries.values())
                    else:
                        kept._keep([entries])
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            kept.groups.append(settings)
            kept._keep(settings.values())
        return kept

    def _keep(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.tensors.append(KeptTensor.of(value))
            else:
                self.loose.append(value)

    def put_back(self, failed: list[str]) -> None:
        for name, table in self.tables.items():
            if vars(self.optimizer).get(name) is not table.target:
                vars(self.optimizer)[name] = table.target
        for mapping in (*self.tables.values(), *self.entries):
            attempt(failed, lambda: f"the state of {self.name}", mapping.put_back)
        for tensor in self.tensors:
            attempt(failed, lambda: f"the state of {self.name}", tensor.put_back)
        attempt(failed, lambda: f"the groups of {self.name}", self._put_groups)

    def _put_groups(self) -> None:
        # A callback may have added groups since (parameters that it unfroze): they are the user's, and stay.
        for group, kept in zip(self.optimizer.param_groups, self.groups, strict=False):
            for key in [k for k in group if k not in kept and k != "params"]:
                # Some optimizers count their steps here, from the first step on. What is no count is somebody else's
                # (a schedule that another callback has put in since, and that needs its settings).
                if isinstance(group[key], int | torch.Tensor):
                    del group[key]
            group.update(kept)


@dataclass
class _KeptTables:
    """What one module has registered: its parameters, its buffers, its children."""

    module: nn.Module
    path: str
    tables: dict[str, KeptMapping]

    @staticmethod
    def of(module: nn.Module, path: str, flat: bool) -> _KeptTables:
        # The first version of FSDP takes parameters out of modules and puts them back as it needs them.
        names = SNAPSHOTS - {"_parameters"} if flat else SNAPSHOTS
        tables = {name: vars(module).get(name) for name in sorted(names)}
        return _KeptTables(module, path, {n: KeptMapping.of(t) for n, t in tables.items() if isinstance(t, dict)})

    def put_back(self) -> None:
        attributes = vars(self.module)
        for name, table in self.tables.items():
            if attributes.get(name) is not table.target:
                attributes[name] = table.target
            table.put_back()


@dataclass
class Snapshot:
    """The state of a model, its optimizers, schedulers, loss scaler and all random generators."""

    model: nn.Module
    tensors: dict[str, KeptTensor]
    """Parameters and buffers with their gradients, by name."""
    places: list[_KeptTables]
    """Where they are: a step may put another tensor there (`self.count = self.count + 1`), or another module."""
    optimizers: list[_KeptOptimizer]
    stateful: list[tuple[Any, dict[str, Any]]]
    """Schedulers and scalers of libraries whose attributes are not ours to copy."""
    training: list[tuple[nn.Module, bool]]
    python: PythonState
    rng: Rng

    @staticmethod
    def take(
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        schedulers: Iterable[Any] = (),
        scaler: Any = None,
    ) -> Snapshot:
        """Copy the state to the host.

        Args:
            model: all that it holds: parameters and buffers, persistent or not, modules, and any Python object.
            optimizers: PyTorch optimizers; of parameters, too, that are not in the model.
            schedulers: of any class; with `state_dict` and `load_state_dict` if it is a library's.
            scaler: a `torch.amp.GradScaler` or None.
        """
        rng = Rng.take()
        _reshard(model)
        modules = modules_of(model)
        flat = has_flat_parameters(module for _, module in modules)
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found.setdefault(id(tensor), (name, tensor))
        named = {f"optimizer {index}": optimizer for index, optimizer in enumerate(optimizers)}
        for name, optimizer in named.items():
            for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                found.setdefault(id(parameter), (f"parameter {index} of {name}", parameter))
        kept_optimizers = [_KeptOptimizer.of(optimizer, name) for name, optimizer in named.items()]
        helpers = {f"scheduler {index}": scheduler for index, scheduler in enumerate(schedulers)} | {"scaler": scaler}
        loose = {
            f"the state of {kept.name}": [kept.loose[at : at + CHUNK] for at in range(0, len(kept.loose), CHUNK)]
            for kept in kept_optimizers
        }
        return Snapshot(
            model=model,
            tensors={name: KeptTensor.of(tensor) for name, tensor in found.values()},
            places=[_KeptTables.of(module, path, flat) for path, module in modules],
            optimizers=kept_optimizers,
            stateful=[
                (helper, copy.deepcopy(helper.state_dict()))
                for helper in helpers.values()
                if helper is not None and not PythonState.follows(helper)
            ],
            training=[(module, module.training) for _, module in modules],
            python=PythonState.take({"model": model, **named, **helpers, **loose}),
            rng=rng,
        )

    @property
    def nbytes(self) -> int:
        """Host memory that the tensors take."""
        kept = [*self.tensors.values(), *(tensor for optimizer in self.optimizers for tensor in optimizer.tensors)]
        return sum(tensor.nbytes for tensor in kept) + self.python.nbytes

    @property
    def unkept(self) -> tuple[str, ...]:
        """See `PythonState`."""
        return self.python.unkept

    def restore(self) -> tuple[str, ...]:
        """Put everything back; returns what was put back, in words. May be called again and again.

        Raises:
            NotPutBack: names what could not be put back. All the rest is.
        """
        failed: list[str] = []
        attempt(failed, lambda: "FSDP's shards", lambda: _reshard(self.model))
        attempt(failed, lambda: "Python's state", self.python.restore)
        for tables in self.places:
            attempt(failed, lambda: f"the contents of {tables.path or 'the model'}", tables.put_back)  # noqa: B023
        for name, tensor in self.tensors.items():
            attempt(failed, lambda: name, tensor.put_back)  # noqa: B023
        for optimizer in self.optimizers:
            optimizer.put_back(failed)
        for helper, state in self.stateful:
            put: Callable[[], Any] = lambda: helper.load_state_dict(copy.deepcopy(state))  # noqa: B023, E731
            attempt(failed, lambda: f"the state of {type(helper).__name__}", put)  # noqa: B023
        for module, mode in self.training:
            if module.training is not mode:
                module.training = mode
        attempt(failed, lambda: "random generators", self.rng.restore)
        if failed:
            raise NotPutBack(failed)
        return ("parameters and buffers", "optimizer", "learning-rate schedulers and loss scaler", "random generators")


def _reshard(model: nn.Module) -> None:
    """Of modules under FSDP's `fully_shard`, let each rank hold its own part of the parameters only.

    After an evaluation, or a step that broke off, whole parameters stand in their place for a while. They are copies,
    which FSDP frees when it likes.
    """
    for _, module in modules_of(model):
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


@dataclass
class Rng:
    """Python's, NumPy's and PyTorch's generators, on the CPU and on every CUDA device in use."""

    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    torch_cuda: list[torch.Tensor]

    @staticmethod
    def take() -> Rng:
        """Copy the state of all generators."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return Rng(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    @staticmethod
    @contextmanager
    def kept() -> Iterator[None]:
        """What runs inside may draw random numbers; afterwards nobody can tell."""
        before = Rng.take()
        try:
            yield
        finally:
            before.restore()

    def restore(self) -> None:
        """Put all generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)


@contextmanager
def kept_environment() -> Iterator[None]:
    """What runs inside may set variables of the environment, as libraries do; afterwards they are as before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
