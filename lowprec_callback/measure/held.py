"""Who holds the live bytes of a watched step: parameters, gradients, optimizer, quantized copies, and the peak.

Tensors are counted by the storages behind them, each once, whoever names it first in the order of `OWNERS`: tied
weights, views of one buffer and a quantized tensor's parts come out right. What the allocator holds beyond them
(saved activations, temporaries) is for the analysis to work out.

Nothing here touches the GPU: it is read from Python objects and from the allocator's counters, on the host. It takes
host time at every module of the step, so it is attached to watched steps only, never to timed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lowprec_callback.measure import memory
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recording import Fact, Holding, PeakHolding

OWNERS = ("parameters", "gradients", "optimizer", "buffers", "quantized", "workspaces")
"""`Holding`'s fields, in the order in which they claim storages."""


def holding(
    recipe: str,
    phase: memory.WatchedPhase,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    engines: Mapping[str, Any],
) -> Holding:
    """Bytes by owner now, on this device. `engines` are what a library keeps beside: see `Engine.held`."""
    parameters = list(model.parameters())
    values: dict[str, Any] = {
        "parameters": parameters,
        "gradients": gradients_of(parameters),
        # TE's FusedAdam keeps the scales of narrow states in a table of its own.
        "optimizer": [[each.state, getattr(each, "_scales", None)] for each in optimizers],
        "buffers": [*model.buffers(), engines.get("buffers")],
        "quantized": engines.get("quantized"),
        "workspaces": engines.get("workspaces"),
    }
    claimed: set[int] = set()
    counted: dict[str, int] = {}
    for owner in OWNERS:
        found = {address: size for address, size in storages(values[owner], device) if address not in claimed}
        claimed |= found.keys()
        counted[owner] = sum(found.values())
    return Holding(recipe=recipe, phase=phase, **counted)


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that there are; `main_grad` is where a GEMM adds a weight gradient to by itself."""
    return [
        grad
        for parameter in parameters
        for grad in (parameter.grad, getattr(parameter, "main_grad", None))
        if isinstance(grad, torch.Tensor)
    ]


def storages(value: Any, device: torch.device) -> Iterator[tuple[int, int]]:
    """(address, bytes) of every storage on this device behind the tensors in nested containers."""
    if value is None or isinstance(value, str | int | float):
        return
    if isinstance(value, Mapping):
        for item in value.values():
            yield from storages(item, device)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from storages(item, device)
    elif isinstance(value, torch.Tensor) and not hasattr(value, "_quantizer"):
        inner = getattr(value, "_local_tensor", None)
        if isinstance(inner, torch.Tensor):  # a shard in its wrapper
            yield from storages(inner, device)
        elif value.device.type == device.type:
            # Meta and wrapper tensors have no storage of their own.
            with suppress(RuntimeError, NotImplementedError):
                storage = value.untyped_storage()
                if storage.data_ptr():
                    yield storage.data_ptr(), storage.nbytes()
    else:
        # A quantized tensor of Transformer Engine, or its storage, which is no tensor: data, scales and amax are
        # its attributes.
        for part in list(getattr(value, "__dict__", {}).values()):
            if isinstance(part, torch.Tensor):
                yield from storages(part, device)


class MemoryWatch:
    """Follows the allocator through one watched step: its phases, and what was held when it was fullest.

    Args:
        recipe: that runs.
        model: whose parameters, gradients and buffers are counted.
        optimizers: whose state is.
        device: where. On a CPU there are no counters: phases tell what Python holds, and there is no peak.
        engine: `Engine.held`, asked at each phase.
        linears: paths of modules that own linear layers.
    """

    def __init__(
        self,
        recipe: str,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        engine: Any,
        linears: Iterable[str],
    ) -> None:
        self._recipe = recipe
        self._model = model
        self._parameters = list(model.parameters())
        self._optimizers = optimizers
        self._device = device
        self._engine = engine
        self._linears = frozenset(linears)
        self._phase: memory.WatchedPhase = "start"
        self._open: dict[str, None] = {}
        """Linear layers whose forward has run and whose backward has not."""
        self._before = memory.Counters()
        self._gradients = 0
        self._peak: PeakHolding | None = None

    def start(self) -> list[Fact]:
        """Before the step, from a clean state."""
        memory.reset_peak(self._device)
        found = self._facts("start")
        self._sample(None)
        return found

    def begins(self, phase: str) -> None:
        """A phase begins; what happened since the last reading (gradients set to none) is over."""
        if phase in ("forward", "backward", "optimizer"):
            self._sample(None)
            self._phase = phase  # type: ignore[assignment]
            if phase == "forward":
                self._open.clear()

    def boundary(self, scope: Scope, enters: bool) -> None:
        """A module begins or ends, forward or backward."""
        self._sample(scope)
        if not enters and scope.module in self._linears:
            if scope.direction == "forward":
                self._open[scope.module] = None
            else:
                self._open.pop(scope.module, None)

    def ends(self, phase: memory.WatchedPhase) -> list[Fact]:
        """A phase is over: counters and owners; a new peak begins."""
        self._sample(None)
        found = self._facts(phase)
        memory.reset_peak(self._device)
        return found

    def peak(self) -> list[Fact]:
        """What was held at the fullest moment; empty on a CPU."""
        return [self._peak] if self._peak is not None else []

    def _facts(self, phase: memory.WatchedPhase) -> list[Fact]:
        who = holding(self._recipe, phase, self._model, self._optimizers, self._device, self._engine.held())
        return [*memory.read(self._device, self._recipe, memory.NO_ROUND, phase), who]

    def _sample(self, scope: Scope | None) -> None:
        """If the allocator was fuller than ever since the last reading, remember what it held at that reading."""
        now = memory.counters(self._device)
        if now is None:
            return
        if now.peak > (self._peak.peak if self._peak is not None else 0):
            self._peak = PeakHolding(
                recipe=self._recipe,
                phase=self._phase,
                module=scope.module if scope else "",
                peak=now.peak,
                peak_requested=now.peak_requested,
                held=self._before.allocated,
                held_requested=self._before.requested,
                gradients=self._gradients,
                open_layers=tuple(self._open),
            )
        self._before = now
        # Gradients change in backward only, or where a phase begins.
        if scope is None or scope.direction == "backward":
            self._gradients = sum(dict(storages(gradients_of(self._parameters), self._device)).values())
