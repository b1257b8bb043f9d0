"""The engine for models of Transformer Engine (TE) layers. The only file that imports TE.

TE 2.8 and newer. `te.autocast(enabled=, recipe=)` is the name since 2.9; before it was
`te.fp8_autocast(enabled=, fp8_recipe=)`, which newer versions still carry with a deprecation warning.

Switching recipes on a live model needs care. A module keeps its quantizers as long as the *class* of the recipe
stays the same (TE issue #3157), and delayed scaling's rebuilt state inherits the old one's scales
(`RecipeState.inherit_state_from`). So `switch` takes each module's state away altogether; the module then builds
its state as it did on the first step of its life.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from lowprec_callback.engines import te_attention, te_state
from lowprec_callback.engines.base import (
    Around,
    Current,
    Engine,
    LinearLayer,
    NotRun,
    Region,
    Replay,
    Weight,
    class_name,
)
from lowprec_callback.engines.plain_torch import plain_linears
from lowprec_callback.engines.wrappers import named_modules, submodule
from lowprec_callback.failures import in_words
from lowprec_callback.measure.dispatch import Call, storages, watch_entries
from lowprec_callback.recipes import RecipeCard, static_refusal
from lowprec_callback.recording import AttentionBackend, Fact, Scales, UncachedWeights

PROBE_TOKENS = 128
"""M of the probe: a multiple of every alignment that a recipe asks for (NVFP4's fused path wants 64)."""

SCALED_MODULES = 2
"""Modules whose delayed-scaling state is recorded at the end of a block: the first and the last."""


@dataclass(frozen=True)
class Loaded:
    """The outcome of importing TE."""

    te: Any = None
    """`transformer_engine.pytorch`"""
    tex: Any = None
    """`transformer_engine_torch`, the compiled part"""
    recipes: Any = None
    """`transformer_engine.common.recipe`"""
    version: str | None = None
    reason: str | None = None
    """Why the import failed; any exception counts (see `load`)."""

    @property
    def ok(self) -> bool:
        """Whether TE is there."""
        return self.te is not None


@cache
def load() -> Loaded:
    """Import TE once. It can fail with RuntimeError, AssertionError, OSError, FileNotFoundError: all are reasons."""
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex
        from transformer_engine.common import recipe
    except Exception as error:
        return Loaded(reason=in_words(error))
    return Loaded(te, tex, recipe, version=str(getattr(transformer_engine, "__version__", "unknown")))


def gate(card: RecipeCard) -> str | None:
    """What TE itself says of a recipe: None if it is available, else TE's reason.

    The gates are `te.is_*_available(return_reason=True)`; older versions have them on `FP8GlobalStateManager` only.
    """
    loaded = load()
    if not loaded.ok:
        return f"Transformer Engine cannot be imported: {loaded.reason}"
    name = card.requires.te_gate
    if name is None:
        return None
    try:
        if hasattr(loaded.te, name):
            available, reason = getattr(loaded.te, name)(return_reason=True)
        else:
            available, reason = getattr(_state_manager(loaded), name)()
    except Exception as error:
        return f"te.{name} raised {in_words(error)}"
    return None if available else f"{reason or 'no reason given'} (te.{name})"


def _state_manager(loaded: Loaded) -> Any:
    for home in ("quantization", "fp8"):
        try:
            module = __import__(f"transformer_engine.pytorch.{home}", fromlist=["FP8GlobalStateManager"])
            return module.FP8GlobalStateManager
        except (ImportError, AttributeError):
            continue
    raise RuntimeError(f"Transformer Engine {loaded.version} has no FP8GlobalStateManager where we know it")


def build_recipe(card: RecipeCard) -> Any:
    """TE's recipe object for a card. Texts for enum arguments (`fp8_format = "HYBRID"`) become TE's enum members.

    Raises:
        ValueError: this TE has no such class, or refuses an argument.
    """
    recipes = load().recipes
    cls = getattr(recipes, card.te_class or "", None)
    if cls is None:
        raise ValueError(f"Transformer Engine {load().version} has no recipe class {card.te_class!r}")
    arguments = dict(card.arguments)
    try:
        for key in ("fp8_format", "fp4_format"):
            if isinstance(arguments.get(key), str):
                arguments[key] = getattr(recipes.Format, arguments[key])
        if isinstance(factory := arguments.get("qfactory"), str):
            arguments["qfactory"] = _imported(factory)
        return cls(**arguments)
    except (AttributeError, ImportError, TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"{card.te_class}({arguments}): {error}") from error


def _imported(place: str) -> Any:
    """The function at "package.module:function". Raises ImportError or AttributeError."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def is_te_module(module: nn.Module) -> bool:
    """Whether a module's class (or a base of it) is defined in TE; needs no import."""
    return any(cls.__module__.startswith("transformer_engine.") for cls in type(module).__mro__)


class TransformerEngineEngine(Engine):
    """Runs a recipe by TE's autocast region around `training_step`; `switch` has TE's per-module state rebuilt."""

    name: Literal["transformer_engine", "plain_torch"] = "transformer_engine"

    def __init__(self, model: nn.Module, device: torch.device, why: str) -> None:
        super().__init__(model, device, why)
        self._loaded = load()
        self._recipes: dict[tuple[str, bool], Any] = {}
        """TE's recipe objects by the card's name and whether they are for layers of our own."""
        self._alone = False
        """Whether layers of our own run now, which must not wait for other ranks."""
        self._asked: Any = None
        """TE's recipe object of the region opened last; None for a region that is switched off."""
        self._saved: _QuantizationState | None = None

    @property
    def default_baseline(self) -> str:
        """BF16, through the same TE layers."""
        return "bf16"

    def refusal(self, card: RecipeCard) -> NotRun | None:
        """TE's own gate first: its reason is the one that users will find in its documentation."""
        reason = gate(card)
        if reason is not None:
            return NotRun(reason, "Transformer Engine's own check")
        reason = static_refusal(
            card,
            engine=self.name,
            device_type=self.device.type,
            compute_capability=torch.cuda.get_device_capability(self.device),
            cuda_version=torch.version.cuda,
            te_version=self._loaded.version,
        )
        return NotRun(reason, "the recipe card's requirements") if reason else None

    def probe(self, card: RecipeCard) -> NotRun | None:
        """Run one layer of each of the model's feature sizes, forward and backward, inside the region.

        Before that: weights that are stored in one recipe's format run in no other.
        """
        sizes: dict[tuple[int, int], list[str]] = {}
        for layer in self.linear_layers():
            if layer.quantizable:
                for weight in layer.weights:
                    if weight.k and weight.n:  # a layer without inputs or outputs multiplies nothing
                        sizes.setdefault((weight.k, weight.n), []).append(layer.path + weight.suffix)
        if card.scaling != "none" and (reason := self._stored_otherwise(card)):
            return NotRun(reason, "Transformer Engine's own check of stored weights")
        with self.own_state():
            for (k, n), paths in sorted(sizes.items()):
                try:
                    reason = self._probe_one(card, k, n)
                except Exception as error:
                    reason = in_words(error)
                if reason:
                    # Tokens are not known yet; any card takes no tokens at all.
                    misfit = card.misfit(0, k, n)
                    size = f" ({misfit})" if misfit else ""
                    names = [path for path in paths if path]  # a model that is one layer has no path
                    where = f". Modules of this size{size}: {_some(names)}" if names else ""
                    return NotRun(f"a tiny te.Linear({k}, {n}) failed: {reason}{where}", "our probe")
        return None

    def _stored_otherwise(self, card: RecipeCard) -> str | None:
        """If weights are stored for another class of recipe (`quantized_model_init`): where, and for which.

        TE raises at the first forward of such a module, in the middle of training.
        """
        try:
            recipe = build_recipe(card)
        except ValueError:
            return None  # the probe says it
        found: dict[str, list[str]] = {}
        for path, module in named_modules(self.model):
            if not is_te_module(module):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                quantizer = getattr(parameter, "_quantizer", None)
                wanted = getattr(quantizer, "_get_compatible_recipe", lambda: None)()
                if wanted is not None and not isinstance(recipe, wanted):
                    found.setdefault(wanted.__name__, []).append(f"{path}.{name}")
        if not found:
            return None
        stored = "; ".join(f"{name}: {_some(paths)}" for name, paths in found.items())
        return (
            f"weights are stored for another recipe (quantized_model_init), so that none of fprop, dgrad and wgrad of "
            f"these modules can run in {type(recipe).__name__}: stored for {stored}"
        )

    def _probe_one(self, card: RecipeCard, k: int, n: int) -> str | None:
        generator = torch.Generator(device=self.device).manual_seed(0)
        layer = self.make_linear(k, n, bias=False)
        weight = next(layer.parameters())
        # TE takes no other type than the weight's outside of torch.autocast.
        x = torch.randn(PROBE_TOKENS, k, device=self.device, dtype=weight.dtype, generator=generator)
        grad = torch.randn(PROBE_TOKENS, n, device=self.device, dtype=weight.dtype, generator=generator)
        x.requires_grad_()
        with self.region(card):
            y = layer(x)
        y.backward(grad.to(y.dtype))
        for what, value in (("output", y), ("input gradient", x.grad), ("weight gradient", weight.grad)):
            if value is None:
                return f"there is no {what}"
            if not bool(torch.isfinite(value).all()):
                return f"the {what} is not finite"
            if not bool(value.any()):
                return f"the {what} is zero everywhere"
        return None

    def region(self, card: RecipeCard) -> AbstractContextManager[Any]:
        """TE's region for the card: switched off for a recipe that does not quantize.

        Inside `own_state` delayed scaling does not reduce amax over the ranks: each rank benchmarks at its own pace, so
        that calls of different ranks do not belong together, and a rank would wait for one that never comes.
        """
        enabled = card.scaling != "none"
        key = (card.name, self._alone and _several_ranks())
        if enabled and key not in self._recipes:
            recipe = build_recipe(card)
            own = key[1] and hasattr(recipe, "reduce_amax")
            self._recipes[key] = dataclasses.replace(recipe, reduce_amax=False) if own else recipe
        recipe = self._recipes.get(key)
        self._asked = recipe
        te = self._loaded.te
        if hasattr(te, "autocast"):
            return te.autocast(enabled=enabled, recipe=recipe)  # type: ignore[no-any-return]
        return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # type: ignore[no-any-return]

    def save(self) -> None:
        """See `Engine.save`."""
        self._saved = _QuantizationState.take(self.model, _state_manager(self._loaded))

    def switch(self) -> None:
        """See `Engine.switch` and the module's docstring."""
        _QuantizationState.clear(self.model, _state_manager(self._loaded))

    def restore(self) -> None:
        """See `Engine.restore`."""
        if self._saved is not None:
            _QuantizationState.clear(self.model, _state_manager(self._loaded))
            self._saved.put_back(_state_manager(self._loaded))
            self._saved = None
        self._recipes.clear()

    def scoped_modules(self) -> dict[str, nn.Module]:
        """Containers of te.ops too: they run their operations themselves, so hooks on those would never fire."""
        containers = {
            path: module
            for path, module in named_modules(self.model)
            if path and type(module).__module__.startswith("transformer_engine.pytorch.ops")
        }
        return {**super().scoped_modules(), **containers}

    def own_state(self) -> AbstractContextManager[None]:
        """See `Engine.own_state`."""
        return _OwnState(_state_manager(self._loaded), self._set_alone)

    def _set_alone(self, alone: bool) -> None:
        self._alone = alone

    def linear_layers(self) -> list[LinearLayer]:
        """TE modules that own two-dimensional weights, and the `nn.Linear`s beside them, which no recipe reaches."""
        layers: list[LinearLayer] = []
        for path, module in named_modules(self.model):
            # te.ops.Linear shows the weight of the basic operation inside it as its own: once is enough.
            inside = bool(layers) and path.startswith(f"{layers[-1].path}.")
            if is_te_module(module) and not inside and (weights := _weights(module)):
                layers.append(LinearLayer(path, class_name(module), weights, _has_bias(module), quantizable=True))
        return layers + plain_linears(self.model, quantizable=False)

    def watch(
        self,
        current: Current,
        calls: Callable[[Call], None] | None = None,
        around: Around | None = None,
        replay: Replay | None = None,
    ) -> AbstractContextManager[None]:
        """See `Engine.watch`."""
        owned = storages(self.model.parameters()) if calls is not None else ()
        custom = sys.modules.get("transformer_engine.pytorch.cpp_extensions.gemm")
        return watch_entries(self._loaded.tex, current, calls, around, replay, owned, custom)

    def region_of(self, path: str) -> Region:
        """TE notes on each module whether its last forward was quantized, and by which recipe."""
        try:
            module = submodule(self.model, path)
        except AttributeError:  # a call whose module is not known
            return Region()
        return te_state.region_of(module, self._asked)

    @contextmanager
    def observe(self, card: RecipeCard) -> Iterator[list[Fact]]:
        """Which attention backend TE chooses and why, and the modules that quantize their weight at every forward."""
        facts: list[Fact] = []
        with te_attention.choices() as chosen:
            yield facts
        facts += [AttentionBackend(card.name, choice.backend, choice.reasons) for choice in chosen]
        modules = tuple(path for path, module in named_modules(self.model) if te_state.uncached(module))
        if modules:
            facts.append(UncachedWeights(card.name, modules))

    def held(self) -> dict[str, Any]:
        """See `Engine.held`."""
        return te_state.held(self.model)

    def scales(self, card: RecipeCard) -> list[Scales]:
        """Scales and amax of the first and last module that has delayed-scaling state."""
        if card.scaling != "tensor-delayed":
            return []
        having = [
            (path, module)
            for path, module in named_modules(self.model)
            if hasattr(_state_of(module, "scaling_fwd"), "amax_history")
        ]
        chosen = having[:1] + having[1:][-(SCALED_MODULES - 1) :]
        directions: tuple[tuple[str, Literal["fwd", "bwd"]], ...] = (("scaling_fwd", "fwd"), ("scaling_bwd", "bwd"))
        return [
            fact
            for path, module in chosen
            for key, direction in directions
            if (fact := _scales_fact(card.name, path, direction, _state_of(module, key))) is not None
        ]

    def make_linear(self, k: int, n: int, bias: bool, groups: int = 1) -> nn.Module:
        """A `te.Linear` (or `te.GroupedLinear`) in BF16, or in the model's type if that is narrower than FP32."""
        dtype = self.dtype() if self.dtype() in (torch.bfloat16, torch.float16) else torch.bfloat16
        arguments = {"bias": bias, "params_dtype": dtype, "device": self.device}
        te = self._loaded.te
        made: nn.Module = te.Linear(k, n, **arguments) if groups == 1 else te.GroupedLinear(groups, k, n, **arguments)
        return made

    def copy_of(self, path: str) -> nn.Module:
        """See `Engine.copy_of`. To be called and used inside `own_state`.

        Raises whatever copying raises: a module that shares a communicator or stores weights quantized may refuse.
        ValueError for a module that is spread over ranks: its copy would wait for theirs, and each rank benchmarks at
        its own pace.
        """
        module = submodule(self.model, path)
        for each in module.modules():
            if any(_number(each, name) > 1 for name in ("tp_size", "tensor_parallel_size")):
                raise ValueError("it is spread over ranks (tensor parallel), and cannot be timed by itself")
        # Communicators are shared, not copied.
        held = [value for each in module.modules() for value in (*vars(each).values(), *_meta(each).values())]
        made = copy.deepcopy(module, {id(value): value for value in held if type(value).__name__ == "ProcessGroup"})
        for each in made.modules():
            for hooks in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks):
                hooks.clear()
            if getattr(each, "fuse_wgrad_accumulation", False):
                for parameter in each.parameters(recurse=False):
                    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        _QuantizationState.clear(made, _state_manager(self._loaded))
        return made


def _number(module: nn.Module, name: str) -> int:
    value = getattr(module, name, None)
    return value if isinstance(value, int) else 1


def _several_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _weights(module: nn.Module) -> tuple[Weight, ...]:
    """The weights of one TE module, by its own feature counts where it has them (its parameters may be split)."""
    own = [(name, p) for name, p in module.named_parameters(recurse=False) if p.dim() == 2 and "weight" in name]
    if not own:
        return ()
    if hasattr(module, "fc1_weight") and hasattr(module, "fc2_weight"):
        return tuple(
            Weight(f".{name}", getattr(module, f"{name}_weight").shape[1], getattr(module, f"{name}_weight").shape[0])
            for name in ("fc1", "fc2")
        )
    k, n = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(k, int) and isinstance(n, int):
        return (Weight("", k, n),)
    return tuple(Weight("", p.shape[1], p.shape[0]) for _, p in own[:1])


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _has_bias(module: nn.Module) -> bool:
    return any("bias" in name and p.numel() for name, p in module.named_parameters(recurse=False) if "norm" not in name)


def _meta(module: nn.Module) -> dict[str, Any]:
    meta = getattr(module, "fp8_meta", None)
    return meta if isinstance(meta, dict) else {}


def _state_of(module: nn.Module, key: str) -> Any:
    return _meta(module).get(key)


def _scales_fact(recipe: str, path: str, direction: Literal["fwd", "bwd"], state: Any) -> Scales | None:
    """Read scale [T] and amax_history [L, T] of one module.

    Row 0 of the history is the live slot, zeroed at each update; row -1 is the newest finished one.
    """
    if state is None or not hasattr(state, "amax_history"):
        return None
    kinds = ("input", "weight", "output") if direction == "fwd" else ("grad_output", "grad_input")
    history = state.amax_history.detach().float().cpu()
    scale = state.scale.detach().float().cpu()
    count = scale.numel()
    return Scales(
        recipe=recipe,
        module=path,
        direction=direction,
        tensors=tuple(f"gemm{i // len(kinds)}.{kinds[i % len(kinds)]}" for i in range(count)),
        scale=tuple(scale.tolist()),
        amax=tuple(history[-1].tolist()),
        amax_history_max=tuple(history.max(dim=0).values.tolist()),
        history_length=history.shape[0],
    )


_FLAGS = ("fp8_initialized", "fp8_meta_tensors_initialized", "fp8", "fp8_calibration", "fp8_parameters")
"""Flags of TE's base module that say which state it has built."""

_STATE = ("fp8_meta", "quantizers", "_fp8_workspaces", "_fp8_metas", "_quantizers", "_module_groups")
"""The state itself: of TE's base module; of the operators of `te.ops`; and `te.ops.Sequential`'s fusions, which
remember the class of the recipe that their operators were last built for."""


@dataclass
class _QuantizationState:
    """All quantization state of a model's TE modules and of TE's global manager, by reference.

    Nothing is copied: the sweep's recipes get new objects, and these are put back as they are.
    """

    modules: list[tuple[nn.Module, dict[str, Any]]]
    globals_: dict[str, Any]

    @staticmethod
    def take(model: nn.Module, manager: Any) -> _QuantizationState:
        """Remember the state of every TE module, and TE's global state."""
        modules = [
            (module, {name: module.__dict__[name] for name in (*_FLAGS, *_STATE) if name in module.__dict__})
            for module in model.modules()
            if is_te_module(module)
        ]
        return _QuantizationState(modules, _take_globals(manager))

    @staticmethod
    def clear(model: nn.Module, manager: Any) -> None:
        """Leave every TE module as it was before its first forward, and TE's global state empty."""
        for module in model.modules():
            if not is_te_module(module):
                continue
            attributes = module.__dict__
            for flag in ("fp8_initialized", "fp8_meta_tensors_initialized"):
                if flag in attributes:
                    attributes[flag] = False
            if isinstance(attributes.get("fp8_meta"), dict):
                # "fp8_checkpoint", "fp8_group" and their like are the module's own and are set at each forward.
                kept = {k: v for k, v in attributes["fp8_meta"].items() if k in ("fp8_checkpoint", "fp8_group")}
                attributes["fp8_meta"] = kept
            if isinstance(attributes.get("quantizers"), dict):
                attributes["quantizers"] = {key: [] for key in attributes["quantizers"]}
            if isinstance(attributes.get("_fp8_workspaces"), dict):
                attributes["_fp8_workspaces"] = {}
            if "_fp8_metas" in attributes:  # te.ops
                attributes["_fp8_metas"] = None
                attributes["_quantizers"] = None
            if "_module_groups" in attributes:  # te.ops.Sequential makes them again
                attributes["_module_groups"] = None
        manager.reset()

    def put_back(self, manager: Any) -> None:
        """Give every module and the manager what `take` remembered."""
        for module, state in self.modules:
            module.__dict__.update(state)
        _put_globals(manager, self.globals_)


class _OwnState:
    """A quantization state of TE's global manager beside the one that is there, kept from one entry to the next."""

    def __init__(self, manager: Any, alone: Callable[[bool], None]) -> None:
        self._manager = manager
        self._alone = alone
        """Told when it is entered and left."""
        self._own: dict[str, Any] | None = None
        self._outer: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._alone(True)
        self._outer = _take_globals(self._manager)
        if self._own is None:
            self._manager.reset()
        else:
            _put_globals(self._manager, self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _take_globals(self._manager)
        _put_globals(self._manager, self._outer)
        self._alone(False)


def _take_globals(manager: Any) -> dict[str, Any]:
    """TE's global state: one object since 2.16 or so, attributes of the class before."""
    if hasattr(manager, "quantization_state"):
        return {"quantization_state": manager.quantization_state}
    return {
        name: value
        for name, value in vars(manager).items()
        if not name.startswith("__") and not callable(value) and not isinstance(value, classmethod | staticmethod)
    }


def _put_globals(manager: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(manager, name, value)
