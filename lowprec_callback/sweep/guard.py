"""The numerics guard: every recipe takes the same few steps from the same state on the same data, and is looked at.

The sweep puts the state back; this keeps the baseline's batches and gives them to the others, gives each forward pass
the random numbers that the baseline's had, and reads losses and gradients. Whoever owns the loop calls, in every step
for which the sweep has a `trial`:

    trial.batch_begins()                           a batch (micro-batch) begins
    args, kwargs = trial.inputs(args, kwargs)      right before `training_step`, whose arguments they are
    trial.computed(output)                         right after it
    trial.gradients(optimizer)                     after backward, before gradients are clipped and the optimizer steps

Batches are kept on the host, so that they take no memory from the model. They are kept as pickle keeps them, which
knows any nesting of any objects and is how data loaders hand them from process to process; what a model changes in
its batch is therefore undone as well. Nothing here ever raises into the user's step: what cannot be done is a reason.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowprec_callback.failures import in_words
from lowprec_callback.recording import Trial
from lowprec_callback.sweep.snapshot import Rng

NO_BATCHES = "the loop does not hand over its batches, so that each recipe saw other data"
OUTSIDE = "a parameter outside of the model"


class NotKept(ValueError):
    """A batch that cannot be kept, and why."""


@dataclass(frozen=True)
class Kept:
    """The arguments of one call, their tensors apart on the host."""

    body: bytes
    tensors: tuple[tuple[torch.Tensor, torch.device, bool], ...]
    """Values, the device that they were on, and whether they asked for a gradient."""

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept:
        """Keep copies. Raises NotKept."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Iterator):
                raise NotKept("training_step takes the data's iterator itself, whose batches cannot be given again")
        out = io.BytesIO()
        pickler = _Pickler(out)
        try:
            pickler.dump((args, kwargs))
        except Exception as error:
            raise NotKept(f"a batch cannot be copied ({in_words(error)})") from error
        return Kept(out.getvalue(), tuple(pickler.tensors))

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh copies, on the devices that they were on."""
        args, kwargs = _Unpickler(io.BytesIO(self.body), self.tensors).load()
        return args, kwargs

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return len(self.body) + sum(values.nbytes for values, _, _ in self.tensors)


class _Pickler(pickle.Pickler):
    """Leaves tensors out: pickled, a view would bring the whole tensor that it is a view of."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[torch.Tensor, torch.device, bool]] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """A tensor's place in the list; the same tensor has the same place."""
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self.tensors.append((obj.detach().to("cpu", copy=True), obj.device, obj.requires_grad))
        return self._places[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Reads only what `_Pickler` wrote in this process."""

    def __init__(self, file: io.BytesIO, tensors: tuple[tuple[torch.Tensor, torch.device, bool], ...]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: int) -> torch.Tensor:
        """The tensor at a place, the same one each time."""
        if pid not in self._made:
            values, device, wants_gradient = self._tensors[pid]
            self._made[pid] = values.to(device, copy=True).requires_grad_(wants_gradient)
        return self._made[pid]


@dataclass
class NumericsGuard:
    """What is common to all trials: the baseline's batches and random numbers.

    Args:
        model: whose gradients are read.
        scaler: a `torch.amp.GradScaler` or None.
    """

    model: nn.Module
    scaler: Any = None
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    """By step and micro-batch."""
    randomness: dict[tuple[int, int], Rng] = field(default_factory=dict)
    why_not_same: str | None = None
    """Why recipes do not see the same data."""

    def trial(self, recipe: str, step: int, keeps: bool, repeat: int = 0) -> TrialStep:
        """One step. `keeps`: its batches are to be the others'. The step before the first (-1) gets its batches."""
        return TrialStep(self, recipe, step, repeat, keeps)

    @property
    def scale(self) -> float | None:
        """The loss scaler's scale, if there is one that is switched on."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        return float(self.scaler.get_scale())


@dataclass
class TrialStep:
    """One optimizer step of one recipe. See the module's docstring for the order of calls."""

    guard: NumericsGuard
    recipe: str
    step: int
    repeat: int
    keeps: bool

    _batch: int = -1
    _begun: bool = False
    _counts_batches: bool = False
    _given: int = 0
    """Batches that were kept, or were given from what was kept."""
    _losses: dict[int, torch.Tensor] = field(default_factory=dict)
    _gradients: dict[str, Gradient] = field(default_factory=dict)
    _without: set[str] = field(default_factory=set)
    _scale: float | None = None
    _missing: list[str] = field(default_factory=list)

    def batch_begins(self) -> None:
        """The next call of `training_step` has another batch; further calls have the same one (closures, LBFGS)."""
        self._counts_batches = self._begun = True

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for `training_step`: these, or copies of the baseline's; and its random numbers."""
        again = self._counts_batches and not self._begun
        self._begun = False
        if not again:
            self._batch += 1
        key = (max(self.step, 0), self._batch)
        if self.keeps and not again:
            self._keep(key, args, kwargs)
        if self.keeps or (kept := self.guard.kept.get(key)) is None:
            return args, kwargs
        try:
            copies = kept.again()
        except Exception as error:  # the batch's own classes take part in this
            self._say(f"a kept batch cannot be made again ({in_words(error)})")
            return args, kwargs
        if not again:
            self._given += 1
            self.guard.randomness[key].restore()
        return copies

    def _keep(self, key: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.guard.why_not_same is not None:
            return
        try:
            self.guard.kept[key] = Kept.of(args, kwargs)
            self.guard.randomness[key] = Rng.take()
            self._given += 1
        except (NotKept, RuntimeError) as error:
            self.guard.why_not_same = str(error)
            self.guard.kept.clear()

    def computed(self, output: Any) -> None:
        """What `training_step` returned: the loss, or a dict that holds it."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Kept on the device: reading it would make the host wait.
            self._losses.setdefault(self._batch, loss.detach().clone())
        elif isinstance(loss, torch.Tensor):
            self._say(f"training_step returned a loss of shape {tuple(loss.shape)}")

    @torch.no_grad()
    def gradients(self, optimizer: Any) -> None:
        """Read the gradients of this optimizer's parameters. Of one that steps more than once, the first are kept."""
        scale = self._scale = self.guard.scale
        # Where the optimizer takes the scale out by itself, nobody has done so before.
        left_in = scale if scale and getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0
        names = {parameter: name for name, parameter in self.guard.model.named_parameters()}
        try:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = names.get(parameter, OUTSIDE)
                gradient = gradient_of(parameter)
                if gradient is not None and name not in self._gradients:
                    self._gradients[name] = Gradient.of(gradient, left_in)
                elif gradient is None and parameter.requires_grad:
                    self._without.add(name)
        except RuntimeError as error:
            self._say(f"gradients could not be read ({in_words(error)})")

    def fact(self, loss: Any = None) -> Trial:
        """At the end of the step, with all that was seen. `loss`: of a loop that did not call `computed`."""
        if not self._losses:
            self.computed(loss)
        read = self._gradients
        of_step_0 = list(read.items()) if self.step == 0 else []
        losses = [float(value) for value in self._losses.values()]
        same = self._same()
        if self.step >= 0:
            if not losses:
                self._say("training_step returned no loss")
            if not read:
                self._say("no gradient was read before an optimizer step")
            if same is not None:
                self._say(same)
        return Trial(
            recipe=self.recipe,
            step=self.step,
            repeat=self.repeat,
            loss=sum(losses) / len(losses) if losses else None,
            micro_batches=len(losses),
            replayed=same is None,
            grad_norm=math.hypot(*(gradient.norm for gradient in read.values())) if read else None,
            parameters=len(read),
            elements=sum(gradient.elements for gradient in read.values()),
            without=len(self._without - read.keys()),
            zero=tuple(name for name, gradient in read.items() if gradient.largest == 0),
            not_finite=tuple(name for name, gradient in read.items() if not math.isfinite(gradient.largest)),
            names=tuple(name for name, _ in of_step_0),
            norms=tuple(gradient.norm for _, gradient in of_step_0),
            sizes=tuple(gradient.elements for _, gradient in of_step_0),
            loss_scale=self._scale,
            missing="; ".join(self._missing) or None,
        )

    def _same(self) -> str | None:
        """Why this step's batches are not the baseline's; None if they are."""
        if self.guard.why_not_same is not None:
            return self.guard.why_not_same
        if self._batch < 0:
            return NO_BATCHES
        baseline = sum(step == max(self.step, 0) for step, _ in self.guard.kept)
        seen = self._batch + 1
        if seen != baseline:
            return f"this step had {seen} micro-batches and the baseline's {baseline} (an epoch ended in one of them)"
        return None if self._given == seen else "not every batch of this step could be given again"

    def _say(self, reason: str) -> None:
        if reason not in self._missing:
            self._missing.append(reason)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient as a plain dense tensor; of one that is spread over processes, this one's part.

    Layers that add to a gradient buffer of their own (`fuse_wgrad_accumulation`) keep it in `main_grad`.
    """
    added = getattr(parameter, "grad_added_to_main_grad", False)
    gradient = getattr(parameter, "main_grad", None) if added else parameter.grad
    if gradient is None:
        return None
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    dense: torch.Tensor = local.coalesce().values() if local.is_sparse else local
    return dense if dense.numel() else None


@dataclass(frozen=True)
class Gradient:
    """What is read of one parameter's gradient g, without the loss scaler's scale."""

    largest: float
    """max |g|; not a number if one element is none."""
    norm: float
    """Euclidean."""
    elements: int

    @staticmethod
    def of(gradient: torch.Tensor, scale: float) -> Gradient:
        """`scale`: the loss scaler's, where the gradient still has it."""
        largest = float(torch.linalg.vector_norm(gradient, math.inf))
        # In half precision the sum of squares would be one too; the kernel widens each element as it reads it.
        wide = torch.float32 if gradient.dtype in (torch.bfloat16, torch.float16) else None
        norm = float(torch.linalg.vector_norm(gradient, dtype=wide))
        if 0 < largest < math.inf and not 0 < norm < math.inf:
            # Squares of less than 1e-23 or more than 1e19 leave the range of FP32.
            norm = float(torch.linalg.vector_norm(gradient.double() / largest)) * largest
        return Gradient(largest / scale, norm / scale, gradient.numel())
