"""Everything that a training step changes, set aside before the sweep and put back after it, bit for bit.

Copies live in host memory, so that they do not show in the memory that recipes are measured by. Values are copied
back into the objects that hold them (parameters, optimizer state), so that references which others keep stay good.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass
class _Kept:
    """A tensor's values on the host; for a tensor subclass that wraps others, those of its parts."""

    tensor: torch.Tensor
    values: torch.Tensor | None
    parts: dict[str, Any]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Kept:
        mine = _shard(tensor)
        if hasattr(mine, "_quantizer"):
            # Transformer Engine's quantized parameters: copying them through their own arithmetic would round
            # again, so their buffers and flags are kept as they are, and their quantizer by reference.
            parts = {
                name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in vars(mine).items()
                if isinstance(value, torch.Tensor | bool) or value is None or name == "_quantizer"
            }
            return _Kept(tensor, None, parts)
        return _Kept(tensor, _each_once(mine.detach()).to("cpu", copy=True), {})

    @torch.no_grad()
    def put_back(self) -> None:
        mine = _shard(self.tensor)
        if self.values is not None:
            _each_once(mine.detach()).copy_(self.values)
            return
        for name, value in self.parts.items():
            current = getattr(mine, name, None)
            if not isinstance(value, torch.Tensor):
                setattr(mine, name, value)
            elif isinstance(current, torch.Tensor) and current.shape == value.shape:
                current.copy_(value)
            else:
                setattr(mine, name, value.to(mine.device))


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is spread over ranks (a DTensor); any other tensor as it is.

    Each rank keeps and puts back its own part: nothing is gathered, and no rank waits for another.
    """
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


def whole_size(model: nn.Module) -> tuple[int, int]:
    """(parameters, bytes) of the whole model, on however many ranks its parameters are spread.

    A DTensor counts as the whole that it is a part of. Under FSDP's first version the parameters are views of this
    rank's part of a flat one, which knows its full size; padding is not counted.
    """
    flat = {id(p): p for m in model.modules() if (p := getattr(m, "_flat_param", None)) is not None}
    inside = {id(part) for p in flat.values() for part in getattr(p, "_params", None) or ()} | flat.keys()
    sizes = [(p._unpadded_unsharded_size.numel(), p.element_size()) for p in flat.values()]
    sizes += [(p.numel(), p.element_size()) for p in model.parameters() if id(p) not in inside]
    return sum(count for count, _ in sizes), sum(count * each for count, each in sizes)


def rank_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    return sum(part.numel() * part.element_size() for part in map(_shard, model.parameters()))


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions of an expanded one, which cannot be written to."""
    if tensor.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


_Table = dict[Any, dict[str, Any]]
"""An optimizer's entries by parameter and name."""


def _tables(optimizer: torch.optim.Optimizer) -> list[_Table]:
    """The optimizer's state; and the scales by which Transformer Engine's FusedAdam keeps narrow states."""
    scales = getattr(optimizer, "_scales", None)
    return [optimizer.state, *([scales] if isinstance(scales, dict) else [])]


@dataclass
class _KeptOptimizer:
    """One optimizer's state by parameter, and its groups' settings."""

    optimizer: torch.optim.Optimizer
    tables: list[_Table]
    groups: list[dict[str, Any]]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> _KeptOptimizer:
        tables = [
            {
                parameter: {
                    key: _Kept.of(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                    for key, value in entries.items()
                }
                for parameter, entries in table.items()
            }
            for table in _tables(optimizer)
        ]
        groups = [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for key, value in group.items()
                if key != "params"
            }
            for group in optimizer.param_groups
        ]
        return _KeptOptimizer(optimizer, tables, groups)

    def put_back(self) -> None:
        for current, kept_table in zip(_tables(self.optimizer), self.tables, strict=True):
            for parameter in [p for p in current if p not in kept_table]:
                del current[parameter]
            for parameter, entries in kept_table.items():
                target = current.setdefault(parameter, {})
                for key in [k for k in target if k not in entries]:
                    del target[key]
                for key, value in entries.items():
                    if not isinstance(value, _Kept):
                        target[key] = copy.deepcopy(value)
                    else:
                        value.put_back()
                        target[key] = value.tensor
        # A callback may have added groups since (parameters that it unfroze): they are the user's, and stay.
        for group, kept in zip(self.optimizer.param_groups, self.groups, strict=False):
            for key in [k for k in group if k not in kept and k != "params"]:
                # Some optimizers count their steps here, from the first step on. What is no count is somebody else's
                # (a schedule that another callback has put in since, and that needs its settings).
                if isinstance(group[key], int | torch.Tensor):
                    del group[key]
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.deepcopy(value)


@dataclass
class Snapshot:
    """The state of a model, its optimizers, schedulers, loss scaler and all random generators."""

    tensors: list[_Kept]
    places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]]
    """Where modules hold their buffers: a step may put another tensor there (`self.count = self.count + 1`)."""
    gradients: list[tuple[torch.Tensor, _Kept | None]]
    optimizers: list[_KeptOptimizer]
    stateful: list[tuple[Any, dict[str, Any]]]
    training: list[tuple[nn.Module, bool]]
    rng: Rng

    @staticmethod
    def take(
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        schedulers: Iterable[Any] = (),
        scaler: Any = None,
        averages: Iterable[nn.Module] = (),
    ) -> Snapshot:
        """Copy the state to the host.

        Args:
            model: its parameters and buffers, persistent or not.
            optimizers: PyTorch optimizers.
            schedulers: anything with `state_dict` and `load_state_dict`.
            scaler: a `torch.amp.GradScaler` or None.
            averages: modules beside the model that follow its weights.
        """
        owners = (model, *averages)
        found = {id(t): t for owner in owners for t in (*owner.parameters(), *owner.buffers())}
        tensors = [_Kept.of(t) for t in found.values()]
        stateful = [(s, copy.deepcopy(s.state_dict())) for s in (*schedulers, scaler) if s is not None]
        return Snapshot(
            tensors=tensors,
            places=[
                (module._buffers, name, tensor)
                for module in model.modules()
                for name, tensor in module._buffers.items()
            ],
            gradients=[(p, None if p.grad is None else _Kept.of(p.grad)) for p in model.parameters()],
            optimizers=[_KeptOptimizer.of(optimizer) for optimizer in optimizers],
            stateful=stateful,
            training=[(module, module.training) for module in model.modules()],
            rng=Rng.take(),
        )

    def again(self) -> Snapshot:
        """A copy of the present state of the same objects."""
        return Snapshot(
            tensors=[_Kept.of(kept.tensor) for kept in self.tensors],
            places=[(holder, name, holder.get(name)) for holder, name, _ in self.places],
            gradients=[(p, None if p.grad is None else _Kept.of(p.grad)) for p, _ in self.gradients],
            optimizers=[_KeptOptimizer.of(kept.optimizer) for kept in self.optimizers],
            stateful=[(owner, copy.deepcopy(owner.state_dict())) for owner, _ in self.stateful],
            training=[(module, module.training) for module, _ in self.training],
            rng=Rng.take(),
        )

    @property
    def nbytes(self) -> int:
        """Host memory that the tensors take."""
        states = (v for o in self.optimizers for table in o.tables for e in table.values() for v in e.values())
        kept = [*self.tensors, *(gradient for _, gradient in self.gradients), *states]
        return sum(
            k.values.nbytes if k.values is not None else sum(getattr(v, "nbytes", 0) for v in k.parts.values())
            for k in kept
            if isinstance(k, _Kept)
        )

    def restore(self) -> tuple[str, ...]:
        """Put everything back; returns what was put back, in words."""
        for kept in self.tensors:
            kept.put_back()
        for holder, name, tensor in self.places:
            holder[name] = tensor
        for parameter, gradient in self.gradients:
            if gradient is not None:
                gradient.put_back()
            parameter.grad = None if gradient is None else gradient.tensor
        for optimizer in self.optimizers:
            optimizer.put_back()
        for stateful, state in self.stateful:
            stateful.load_state_dict(copy.deepcopy(state))
        for module, mode in self.training:
            module.training = mode
        self.rng.restore()
        return ("parameters and buffers", "optimizer", "learning-rate schedulers and loss scaler", "random generators")


def forget_gradients(model: nn.Module) -> None:
    """After a backward that broke off: the optimizer finds gradients, as it must, and they change nothing.

    A loss scaler insists on at least one gradient; so where there are none, all become zero.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    having = [parameter for parameter in trained if parameter.grad is not None]
    for parameter in having or trained:
        parameter.grad = torch.zeros_like(parameter)


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
