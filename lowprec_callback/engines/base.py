"""What an engine is: the one place that knows how to run this model under this recipe.

An engine knows the model and the libraries, and no Trainer. The sweep asks it in this order: can this recipe run
(`refusal`, then `probe`), `switch` to it, wrap each `training_step` in its `region`; and for the steps that are
watched: which modules to follow, and what reaches the GEMM library (`watch`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lowprec_callback.engines.wrappers import named_modules
from lowprec_callback.measure.dispatch import Call, Sizes
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import Fact, Role, Scales

Current = Callable[[], Scope | None]
Around = Callable[[Scope | None, Role, Sizes], AbstractContextManager[Any]]
Replay = Callable[[Role, Callable[[], Any]], None]


@dataclass(frozen=True)
class Weight:
    """One weight matrix of a module: N output features by K input features."""

    suffix: str
    """What to add to the module's path: empty, or `.fc1`, `.fc2` where a module owns two linears."""
    k: int
    n: int


@dataclass(frozen=True)
class LinearLayer:
    """A module that owns the weight of a linear layer."""

    path: str
    family: str
    """TE's class name, or `nn.Linear`."""
    weights: tuple[Weight, ...]
    bias: bool
    quantizable: bool
    """Whether a recipe reaches its GEMMs."""


@dataclass(frozen=True)
class Region:
    """What the quantized region around a module's last forward was; nothing is known where no engine has regions."""

    active: bool | None = None
    other: str | None = None
    """The region's recipe, if it is not the one that the engine runs."""
    stale: str | None = None
    """The recipe that the module's quantizers were built for, if it is not the region's."""


@dataclass(frozen=True)
class NotRun:
    """Why a recipe is not run, and who says so."""

    reason: str
    source: str


class Engine(ABC):
    """Runs one model under recipes. See the module's docstring for the order of calls."""

    name: Literal["transformer_engine", "plain_torch"]

    def __init__(self, model: nn.Module, device: torch.device, why: str) -> None:
        self.model = model
        self.device = device
        self.why = why
        """Why this engine was chosen, as a sentence for the report."""

    @property
    @abstractmethod
    def default_baseline(self) -> str:
        """The recipe that the others are compared with, unless the user names another."""

    @abstractmethod
    def refusal(self, card: RecipeCard) -> NotRun | None:
        """Why the card cannot run on this machine with these libraries, from what they say of themselves."""

    @abstractmethod
    def probe(self, card: RecipeCard) -> NotRun | None:
        """Prove it: a tiny forward and backward at the model's own feature sizes, gradients finite and not all zero."""

    def sort_out(self, cards: Iterable[RecipeCard]) -> tuple[list[RecipeCard], list[tuple[RecipeCard, NotRun]]]:
        """(able to run, refused with reasons). A recipe that says it is available is proven with a tiny run."""
        able: list[RecipeCard] = []
        refused: list[tuple[RecipeCard, NotRun]] = []
        for card in cards:
            reason = self.refusal(card) or self.probe(card)
            if reason is None:
                able.append(card)
            else:
                refused.append((card, reason))
        return able, refused

    @abstractmethod
    def region(self, card: RecipeCard) -> AbstractContextManager[Any]:
        """The context to run one `training_step` in."""

    @abstractmethod
    def switch(self) -> None:
        """Forget all quantization state of the recipe before, so that the next one begins as in a fresh process."""

    @abstractmethod
    def save(self) -> None:
        """Set the user's own quantization state aside; `switch` then no longer touches it."""

    @abstractmethod
    def restore(self) -> None:
        """Bring back what `save` set aside."""

    @abstractmethod
    def linear_layers(self) -> list[LinearLayer]:
        """Every linear layer of the model, whoever runs it."""

    def scoped_modules(self) -> dict[str, nn.Module]:
        """The modules to follow in captured and traced steps: linear layers, attention cores, and all leaves."""
        linear = {layer.path for layer in self.linear_layers()}
        return {
            path: module
            for path, module in named_modules(self.model)
            if path and (path in linear or not any(module.children()) or "Attention" in type(module).__name__)
        }

    def watch(
        self,
        current: Current,
        calls: Callable[[Call], None] | None = None,
        around: Around | None = None,
        replay: Replay | None = None,
    ) -> AbstractContextManager[None]:
        """See what reaches the GEMM library; without Transformer Engine there is no entry of its own to watch."""
        del current, calls, around, replay
        return nullcontext()

    def own_state(self) -> AbstractContextManager[None]:
        """For layers that are not the model's: what they register with the library stays apart from the model's.

        May be entered again and again (not within itself), and then finds what it left.
        """
        return nullcontext()

    def region_of(self, path: str) -> Region:
        """The quantized region that a module's last forward ran in."""
        del path
        return Region()

    def observe(self, card: RecipeCard) -> AbstractContextManager[list[Fact]]:
        """Around a watched step: the list holds, once it is over, what else tells why it may be slower than it could
        be."""
        del card
        return nullcontext([])

    def scales(self, card: RecipeCard) -> list[Scales]:
        """Delayed scaling's state, for a few modules; empty for recipes that have none."""
        del card
        return []

    def held(self) -> dict[str, Any]:
        """What a library keeps in memory beside the model's parameters, as nested containers of its objects.

        Keys: `quantized` (weights that stay quantized between micro-batches), `buffers` (scales, amax histories),
        `workspaces`.
        """
        return {}

    @abstractmethod
    def make_linear(self, k: int, n: int, bias: bool, groups: int = 1) -> nn.Module:
        """A fresh linear layer of this engine's own kind, K inputs to N outputs, in the model's parameter type.

        With more than one group, a grouped layer, whose forward takes the rows of each group as second argument.

        Raises:
            ValueError: this engine has no grouped layer.
        """

    def copy_of(self, path: str) -> nn.Module:
        """A copy of one of the model's modules, as it was before its first forward, without hooks.

        Raises:
            ValueError: this engine makes none.
        """
        raise ValueError(f"{self.name} makes no copies of modules, {path} among them")

    def dtype(self) -> torch.dtype:
        """The floating-point type of the model's first parameter."""
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
        return torch.float32


def class_name(module: nn.Module) -> str:
    """The name of a module's class as it was written: `fully_shard` puts one of its own (`FSDPLinear`) before it."""
    classes = type(module).__mro__
    return classes[2 if classes[1].__name__ == "FSDPModule" else 0].__name__
