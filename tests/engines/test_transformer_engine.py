"""The engine for Transformer Engine, with a thin fake of it (`fake_te`)."""

from __future__ import annotations

import dataclasses
import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.engines import transformer_engine
from lowprec_callback.engines.base import NotRun, Region, Weight
from lowprec_callback.engines.transformer_engine import (
    TransformerEngineEngine,
    build_recipe,
    gate,
    is_te_module,
    load,
)
from lowprec_callback.measure.dispatch import Call
from lowprec_callback.measure.scopes import ModuleScopes
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.recipes import RecipeCard, load_cards
from lowprec_callback.recording import Stored
from tests.engines import fake_te
from tests.engines.fake_te import Fake

CARDS = load_cards()


def card(name: str, /, **changes: Any) -> RecipeCard:
    return dataclasses.replace(CARDS[name], **changes)


def engine(model: nn.Module) -> TransformerEngineEngine:
    return TransformerEngineEngine(model, torch.device("cpu"), "a test")


def step(engine: TransformerEngineEngine, card: RecipeCard, model: nn.Module, features: int = 8) -> torch.Tensor:
    x = torch.randn(4, features, requires_grad=True)
    with engine.region(card):
        y = model(x)
    y.sum().backward()
    return x


# -- importing ---------------------------------------------------------------------------------------------------


class Refusing(importlib.abc.MetaPathFinder):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "transformer_engine":
            raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Found empty `transformer-engine` meta package"), "RuntimeError: Found empty"),
        (AssertionError(), "AssertionError"),
        (OSError("libcuda.so.1: cannot open shared object file"), "OSError: libcuda.so.1"),
        (FileNotFoundError(2, "No such file", "libtransformer_engine.so"), "FileNotFoundError: [Errno 2] No such file"),
        (ImportError("one\n  line\tonly"), "ImportError: one line only"),
        (KeyError("anything"), "KeyError: 'anything'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_import_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    monkeypatch.setattr(sys, "meta_path", [Refusing(error), *sys.meta_path])
    loaded = load()
    assert not loaded.ok
    assert loaded.reason is not None
    assert loaded.reason.startswith(reason)
    assert gate(CARDS["bf16"]) == f"Transformer Engine cannot be imported: {loaded.reason}"


def test_what_is_imported(fake: Fake) -> None:
    loaded = load()
    assert loaded.ok
    assert (loaded.te, loaded.tex, loaded.recipes) == (fake.te, fake.tex, fake.recipes)
    assert loaded.version == "2.20.2"
    assert loaded.reason is None
    assert load() is loaded


def test_a_package_that_does_not_say_its_version(fake: Fake) -> None:
    del sys.modules["transformer_engine"].__version__
    assert load().version == "unknown"


# -- what TE says of a recipe --------------------------------------------------------------------------------------


def test_the_gates_of_new_versions(fake: Fake) -> None:
    assert gate(CARDS["bf16"]) is None
    assert gate(CARDS["fp8_delayed"]) is None
    assert gate(CARDS["mxfp8"]) == "too old (te.is_mxfp8_available)"


def test_the_gates_of_old_versions(old_fake: Fake) -> None:
    assert gate(CARDS["fp8_delayed"]) is None
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    assert gate(CARDS["mxfp8"]) == f"{reason} (te.is_mxfp8_available)"


def test_a_gate_without_a_reason(fake: Fake) -> None:
    fake.te.is_mxfp8_available = lambda return_reason: (False, "")
    assert gate(CARDS["mxfp8"]) == "no reason given (te.is_mxfp8_available)"


def test_a_gate_that_fails_is_a_reason(fake: Fake) -> None:
    def fail(return_reason: bool) -> Any:
        raise RuntimeError("no driver")

    fake.te.is_mxfp8_available = fail
    assert gate(CARDS["mxfp8"]) == "te.is_mxfp8_available raised RuntimeError: no driver"


def test_a_version_without_the_gate(old_fake: Fake) -> None:
    reason = gate(CARDS["nvfp4"])
    assert reason is not None
    assert "te.is_nvfp4_available raised AttributeError" in reason


def test_a_version_without_a_manager_where_we_know_it(fake: Fake) -> None:
    del sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    with pytest.raises(RuntimeError, match=r"2\.20\.2 has no FP8GlobalStateManager where we know it"):
        engine(nn.Linear(2, 2)).switch()


def test_refusals_say_who_says_so(fake: Fake) -> None:
    under_test = engine(fake_te.Linear(fake, 8, 8))
    assert under_test.refusal(CARDS["mxfp8"]) == NotRun(
        "too old (te.is_mxfp8_available)", "Transformer Engine's own check"
    )
    by_card = under_test.refusal(card("bf16", engines=("plain_torch",)))
    assert by_card is not None
    assert by_card.source == "the recipe card's requirements"
    assert under_test.refusal(CARDS["bf16"]) is None


# -- recipes and regions -------------------------------------------------------------------------------------------


def test_texts_become_members_of_tes_enums(fake: Fake) -> None:
    recipe = build_recipe(CARDS["fp8_delayed"])
    assert recipe == fake_te.DelayedScaling(fake_te.Format.HYBRID, amax_history_len=1024, amax_compute_algo="max")
    four = card("nvfp4", arguments={"fp4_format": "E2M1", "disable_rht": True})
    assert build_recipe(four) == fake_te.NVFP4BlockScaling(fake_te.Format.E2M1, disable_rht=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"te_class": "MXFP8BlockScaling"}, r"Transformer Engine 2\.20\.2 has no recipe class 'MXFP8BlockScaling'"),
        ({"te_class": "Float8CurrentScaling"}, r"Float8CurrentScaling\(.*unexpected keyword argument"),
        ({"arguments": {}, "te_class": None}, "has no recipe class None"),
    ],
)
def test_a_recipe_that_this_version_cannot_build(fake: Fake, changes: dict[str, Any], sentence: str) -> None:
    delayed = CARDS["fp8_delayed"]
    for name, value in changes.items():
        delayed = dataclasses.replace(delayed, arguments={}) if name == "te_class" and value is None else delayed
        delayed = copy_with(delayed, name, value)
    with pytest.raises(ValueError, match=sentence):
        build_recipe(delayed)


def copy_with(original: RecipeCard, name: str, value: Any) -> RecipeCard:
    """A card with a field that its own checks would not let through."""
    copied = dataclasses.replace(original)
    object.__setattr__(copied, name, value)
    return copied


@pytest.mark.parametrize("arguments", [{"fp8_format": "E5M2"}, {"fp8_format": "NONSENSE"}])
def test_an_argument_that_te_refuses(fake: Fake, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^DelayedScaling\(\{'fp8_format'"):
        build_recipe(copy_with(CARDS["fp8_delayed"], "arguments", arguments))


def test_a_region_is_on_for_what_quantizes_and_off_for_what_does_not(fake: Fake) -> None:
    under_test = engine(fake_te.Linear(fake, 8, 8))
    with under_test.region(CARDS["bf16"]):
        assert not fake.manager.quantization_state.fp8_enabled
    with under_test.region(CARDS["fp8_delayed"]):
        assert fake.manager.quantization_state.fp8_enabled
        with under_test.region(CARDS["bf16"]):
            assert not fake.manager.quantization_state.fp8_enabled
        assert fake.manager.quantization_state.fp8_enabled
    assert fake.regions == [(False, None), (True, build_recipe(CARDS["fp8_delayed"])), (False, None)]


def test_every_region_of_a_card_has_the_same_recipe_object(fake: Fake) -> None:
    under_test = engine(fake_te.Linear(fake, 8, 8))
    for _ in range(2):
        with under_test.region(CARDS["fp8_delayed"]):
            pass
    assert fake.regions[0][1] is fake.regions[1][1]


def test_the_region_of_old_versions_has_another_name(old_fake: Fake) -> None:
    assert not hasattr(old_fake.te, "autocast")
    under_test = engine(fake_te.Linear(old_fake, 8, 8))
    with under_test.region(CARDS["fp8_delayed"]):
        assert old_fake.manager.fp8_enabled
    with under_test.region(CARDS["bf16"]):
        assert not old_fake.manager.fp8_enabled
    assert old_fake.regions[0] == (True, build_recipe(CARDS["fp8_delayed"]))


# -- switching ---------------------------------------------------------------------------------------------------

FULL = card("nvfp4", arguments={"disable_rht": False})
PLAIN = card("nvfp4", name="plain", arguments={"disable_rht": True})


def test_the_fake_keeps_old_quantizers_as_the_real_one_does(fake: Fake) -> None:
    model = fake_te.Linear(fake, 8, 8)
    under_test = engine(model)
    step(under_test, FULL, model)
    step(under_test, PLAIN, model)
    assert model.quantizers["scaling_fwd"][0].with_rht is True  # TE issue #3157


def test_a_switch_makes_new_quantizers_for_other_flags_of_the_same_class(fake: Fake) -> None:
    model = fake_te.Linear(fake, 8, 8)
    under_test = engine(model)
    for recipe, rht in ((FULL, True), (PLAIN, False), (FULL, True)):
        under_test.switch()
        step(under_test, recipe, model)
        assert model.quantizers["scaling_fwd"][0].with_rht is rht


@pytest.mark.parametrize("old", [False, True])
def test_a_switch_forgets_scales_and_registrations(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    fake = fake_te.install(monkeypatch, old=old)
    model = nn.Sequential(fake_te.Linear(fake, 8, 8), fake_te.Linear(fake, 8, 8))
    under_test = engine(model)
    step(under_test, CARDS["fp8_delayed"], model)
    first = model[0].fp8_meta["scaling_fwd"]
    first.scale.fill_(5.0)
    assert len(fake.manager.state().global_amax_buffer["forward"]) == 2

    under_test.switch()
    assert fake.manager.state().global_amax_buffer == {}
    assert not model[0].fp8_initialized
    assert model[0].fp8_meta.keys() == {"fp8_checkpoint", "fp8_group"}

    step(under_test, CARDS["fp8_delayed"], model)
    again = model[0].fp8_meta["scaling_fwd"]
    assert again is not first
    assert again.scale.tolist() == [1.0, 1.0, 1.0]
    assert fake.manager.state().global_amax_buffer["forward"][0] is again.amax_history


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_the_users_own_state_comes_back_as_the_very_same_objects(
    monkeypatch: pytest.MonkeyPatch, old: bool, trained: bool
) -> None:
    fake = fake_te.install(monkeypatch, old=old)
    model = nn.Sequential(fake_te.Linear(fake, 8, 8), fake_te.LayerNormMLP(fake, 8, 16), nn.Linear(8, 8))
    te_modules = [model[0], model[1]]
    under_test = engine(model)
    if trained:
        step(under_test, CARDS["fp8_delayed"], model)
        model[0]._fp8_workspaces["weight"] = object()
        te_modules[0].fp8_meta["scaling_fwd"].scale.fill_(7.0)
    names = ("fp8", "fp8_initialized", "fp8_meta_tensors_initialized", "fp8_meta", "quantizers", "_fp8_workspaces")
    before = [{name: module.__dict__[name] for name in names} for module in te_modules]
    contents = [(dict(m.fp8_meta), dict(m.quantizers), dict(m._fp8_workspaces)) for m in te_modules]
    buffers = fake.manager.state().global_amax_buffer
    registered = {key: list(value) for key, value in buffers.items()}

    under_test.save()
    for recipe in (CARDS["bf16"], CARDS["fp8_current"], CARDS["fp8_delayed"], FULL):
        under_test.switch()
        step(under_test, recipe, model)
    under_test.restore()

    for module, kept in zip(te_modules, before, strict=True):
        for name, value in kept.items():
            assert module.__dict__[name] is value, name
    assert [(m.fp8_meta, m.quantizers, m._fp8_workspaces) for m in te_modules] == contents
    assert fake.manager.state().global_amax_buffer is buffers
    assert buffers.keys() == registered.keys()
    assert all(a is b for key in buffers for a, b in zip(buffers[key], registered[key], strict=True))
    if trained:
        assert te_modules[0].fp8_meta["scaling_fwd"].scale.tolist() == [7.0] * 3
        step(under_test, CARDS["fp8_delayed"], model)
        assert te_modules[0].fp8_meta["scaling_fwd"] is contents[0][0]["scaling_fwd"]


def test_restoring_twice_or_without_saving_does_nothing(fake: Fake) -> None:
    model = fake_te.Linear(fake, 8, 8)
    under_test = engine(model)
    under_test.restore()
    under_test.save()
    under_test.restore()
    step(under_test, CARDS["fp8_delayed"], model)
    meta = model.fp8_meta["scaling_fwd"]
    under_test.restore()
    assert model.fp8_meta["scaling_fwd"] is meta


def test_fused_operators_are_built_again_for_each_recipe(fake: Fake) -> None:
    """A fuser remembers the recipe's class; operators whose state was taken away would then have no quantizers."""
    model = fake_te.OpsSequential(fake, fake_te.OpsLinear(fake, 8, 8))
    under_test = engine(model)
    under_test.save()
    for recipe, rht in ((FULL, True), (PLAIN, False), (CARDS["bf16"], None), (PLAIN, False)):
        under_test.switch()
        step(under_test, recipe, model)
        quantizers = model._modules["0"].basic_ops[0]._quantizers
        assert (quantizers["forward"][0].with_rht if quantizers else None) is rht
    under_test.restore()
    step(under_test, PLAIN, model)  # the user's own training, fresh, in the class that ran last


def test_fused_operators_that_were_trained_come_back(fake: Fake) -> None:
    model = fake_te.OpsSequential(fake, fake_te.OpsLinear(fake, 8, 8))
    basic = model._modules["0"].basic_ops[0]
    under_test = engine(model)
    step(under_test, FULL, model)
    kept = basic._quantizers, basic._fp8_metas, model._module_groups
    under_test.save()
    for recipe in (CARDS["bf16"], CARDS["fp8_current"]):
        under_test.switch()
        step(under_test, recipe, model)
    under_test.restore()
    assert all(a is b for a, b in zip(kept, (basic._quantizers, basic._fp8_metas, model._module_groups), strict=True))
    step(under_test, FULL, model)
    assert basic._quantizers is kept[0]


@pytest.mark.parametrize("old", [False, True])
def test_layers_of_the_benchmark_leave_no_trace(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    fake = fake_te.install(monkeypatch, old=old)
    model = fake_te.Linear(fake, 8, 8)
    under_test = engine(model)
    step(under_test, CARDS["fp8_delayed"], model)
    buffers = fake.manager.state().global_amax_buffer

    def fail() -> None:
        assert fake.manager.state().global_amax_buffer == {}
        scratch = under_test.make_linear(8, 8, bias=False).float()
        step(under_test, CARDS["fp8_delayed"], scratch)
        assert len(fake.manager.state().global_amax_buffer["forward"]) == 1
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), under_test.own_state():
        fail()
    assert fake.manager.state().global_amax_buffer is buffers
    assert len(buffers["forward"]) == 1


def test_layers_of_our_own_wait_for_no_other_rank(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks benchmark at their own pace: an amax reduction of one would wait for another's that never comes."""
    monkeypatch.setattr(transformer_engine, "_several_ranks", lambda: True)
    under_test = engine(fake_te.Linear(fake, 8, 8))
    state = under_test.own_state()
    for _ in range(2):
        with state, under_test.region(CARDS["fp8_delayed"]):
            pass
        with under_test.region(CARDS["fp8_delayed"]):
            pass
        with state, under_test.region(CARDS["fp8_current"]):
            pass
    assert [recipe.reduce_amax for _, recipe in fake.regions if hasattr(recipe, "reduce_amax")] == [False, True] * 2
    monkeypatch.setattr(transformer_engine, "_several_ranks", lambda: False)
    with under_test.own_state(), under_test.region(CARDS["fp8_delayed"]):
        pass
    assert fake.regions[-1][1].reduce_amax


@pytest.mark.parametrize("name", ["tp_size", "tensor_parallel_size"])
def test_a_module_that_is_spread_over_ranks_is_not_timed_by_itself(fake: Fake, name: str) -> None:
    model = nn.Sequential(fake_te.Linear(fake, 8, 8), fake_te.Linear(fake, 8, 8))
    setattr(model[1], name, 2)
    under_test = engine(model)
    with pytest.raises(ValueError, match="spread over ranks"):
        under_test.copy_of("1")


def test_a_sharded_module_keeps_its_name(fake: Fake) -> None:
    """`fully_shard` gives each module a class of its own."""
    layer = fake_te.Linear(fake, 8, 8)
    sharded = type("FSDPModule", (), {})
    layer.__class__ = type("FSDPLinear", (sharded, type(layer)), {})
    (found,) = engine(nn.Sequential(layer)).linear_layers()
    assert found.family == "Linear"


# -- the probe ---------------------------------------------------------------------------------------------------


def test_a_probe_that_passes(fake: Fake) -> None:
    model = nn.Sequential(fake_te.Linear(fake, 32, 16), fake_te.Linear(fake, 16, 32), nn.Linear(32, 7))
    before = fake.manager.quantization_state
    assert engine(model).probe(CARDS["fp8_current"]) is None
    assert [enabled for enabled, _ in fake.regions] == [True, True]
    assert fake.manager.quantization_state is before


def broken(layout: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def gemm(a: torch.Tensor, b: torch.Tensor, called: str) -> torch.Tensor:
        result = fake_te.multiply(a, b, called)
        return change(result) if called == layout else result

    return gemm


@pytest.mark.parametrize(("layout", "what"), [("TN", "output"), ("NN", "input gradient"), ("NT", "weight gradient")])
@pytest.mark.parametrize(
    ("change", "how"),
    [
        (torch.zeros_like, "is zero everywhere"),
        (lambda x: torch.full_like(x, torch.nan), "is not finite"),
        (lambda x: torch.full_like(x, torch.inf), "is not finite"),
    ],
)
def test_a_probe_finds_what_rounds_away(fake: Fake, layout: str, what: str, change: Any, how: str) -> None:
    fake.gemm = broken(layout, change)
    refusal = engine(fake_te.Linear(fake, 32, 16)).probe(CARDS["fp8_current"])
    assert refusal == NotRun(f"a tiny te.Linear(32, 16) failed: the {what} {how}", "our probe")


def test_a_probe_that_fails_is_a_reason(fake: Fake) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("cuBLAS:\n  no algorithm")

    fake.gemm = fail
    before = fake.manager.quantization_state
    refusal = engine(fake_te.Linear(fake, 32, 16)).probe(CARDS["fp8_current"])
    assert refusal == NotRun("a tiny te.Linear(32, 16) failed: RuntimeError: cuBLAS: no algorithm", "our probe")
    assert fake.manager.quantization_state is before


def test_a_recipe_that_cannot_be_built_fails_the_probe(fake: Fake) -> None:
    refusal = engine(fake_te.Linear(fake, 32, 16)).probe(CARDS["mxfp8"])
    assert refusal is not None
    assert "has no recipe class 'MXFP8BlockScaling'" in refusal.reason


def test_the_probe_does_not_touch_the_model(fake: Fake) -> None:
    model = fake_te.Linear(fake, 32, 16)
    under_test = engine(model)
    under_test.probe(CARDS["fp8_delayed"])
    assert not model.fp8_initialized
    assert model.weight.grad is None


# -- layers --------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """One layer of each kind."""

    def __init__(self, fake: Fake) -> None:
        super().__init__()
        self.qkv = fake_te.Linear(fake, 8, 24)
        self.core = fake_te.DotProductAttention(fake)
        self.mlp = fake_te.LayerNormMLP(fake, 8, 32)
        self.nobias = fake_te.Linear(fake, 8, 8, bias=False)
        self.experts = fake_te.GroupedLinear(fake, 3, 8, 16)
        self.fused = fake_te.OpsSequential(fake, fake_te.OpsLinear(fake, 8, 16), fake_te.OpsLinear(fake, 16, 8))
        self.head = nn.Linear(8, 5)
        self.embedding = nn.Embedding(5, 8)


def test_every_kind_of_linear_layer(fake: Fake) -> None:
    layers = {layer.path: layer for layer in engine(Model(fake)).linear_layers()}
    assert {path: (layer.family, layer.weights) for path, layer in layers.items()} == {
        "qkv": ("Linear", (Weight("", 8, 24),)),
        "mlp": ("LayerNormMLP", (Weight(".fc1", 8, 32), Weight(".fc2", 32, 8))),
        "nobias": ("Linear", (Weight("", 8, 8),)),
        "experts": ("GroupedLinear", (Weight("", 8, 16),)),
        "fused.0": ("Linear", (Weight("", 8, 16),)),
        "fused.1": ("Linear", (Weight("", 16, 8),)),
        "head": ("nn.Linear", (Weight("", 8, 5),)),
    }
    assert [path for path, layer in layers.items() if layer.bias] == ["qkv", "mlp", "head"]
    assert [path for path, layer in layers.items() if not layer.quantizable] == ["head"]


def test_a_split_weight_is_one_layer(fake: Fake) -> None:
    """`te.LayerNormLinear(parameters_split=("query", "key", "value"))`"""
    layer = fake_te.Linear(fake, 8, 24, bias=False)
    del layer.weight
    for name in ("query", "key", "value"):
        layer.register_parameter(f"{name}_weight", nn.Parameter(torch.ones(8, 8)))
    (found,) = engine(nn.Sequential(layer)).linear_layers()
    assert found.weights == (Weight("", 8, 24),)


def test_te_modules_are_known_by_where_they_are_defined(fake: Fake) -> None:
    class Mine(fake_te.Linear):
        pass

    assert is_te_module(Mine(fake, 2, 2))
    assert is_te_module(fake_te.OpsSequential(fake))
    assert not is_te_module(nn.Linear(2, 2))
    assert not is_te_module(nn.Sequential(fake_te.Linear(fake, 2, 2)))


def test_containers_of_fused_operators_are_followed(fake: Fake) -> None:
    scoped = engine(Model(fake)).scoped_modules()
    assert {"fused", "fused.0", "core", "mlp", "head", "embedding"} <= scoped.keys()
    assert "" not in scoped


def watched(model: nn.Module, recipe: RecipeCard, x: torch.Tensor) -> GemmLog:
    under_test = engine(model)
    log = GemmLog(under_test.linear_layers(), under_test.region_of)
    scopes = ModuleScopes(under_test.scoped_modules())
    with scopes.installed(), under_test.watch(scopes.current, log.add_call):
        with under_test.region(recipe):
            y = model(x)
        y.sum().backward()
    return log


def test_a_watched_step_shows_what_each_operand_holds(fake: Fake) -> None:
    model = nn.Sequential(fake_te.Linear(fake, 8, 24))
    x = torch.randn(6, 8)
    for recipe, weight, grad in (
        ("bf16", Stored(4 * 24 * 8, 0, 0, parameter=True), Stored(4 * 6 * 24, 0, 0)),
        ("fp8_current", Stored(24 * 8, 0, 0), Stored(6 * 24, 0, 0)),
    ):
        found = {fact.role: fact for fact in watched(model, CARDS[recipe], x).dispatches(recipe)}
        assert found["fprop"].weight_or_input.stored == weight
        assert found["wgrad"].other.stored == grad


def test_a_watched_step_shows_every_gemm_with_its_layer(fake: Fake) -> None:
    model = nn.Sequential(
        fake_te.Linear(fake, 8, 24),
        fake_te.LayerNormMLP(fake, 24, 32),
        fake_te.OpsSequential(fake, fake_te.OpsLinear(fake, 24, 16), fake_te.OpsLinear(fake, 16, 8)),
    )
    log = watched(model, CARDS["fp8_current"], torch.randn(2, 3, 8).reshape(6, 8))
    seen = {(g.module, g.role, g.m, g.k, g.n) for g in log.gemms()}
    expected = set()
    for module, k, n in (("0", 8, 24), ("1.fc1", 24, 32), ("1.fc2", 32, 24), ("2.0", 24, 16), ("2.1", 16, 8)):
        expected |= {(module, role, 6, k, n) for role in ("fprop", "dgrad", "wgrad")}
    expected.discard(("0", "dgrad", 6, 8, 24))  # the input needs no gradient
    assert seen == expected
    assert log.calls == len(expected)
    formats = {(d.module, d.role): (d.weight_or_input.scaling, d.weight_or_input.format) for d in dispatches(log)}
    assert formats["0", "fprop"] == ("tensor-current", "e4m3")
    assert formats["1.fc2", "dgrad"] == ("tensor-current", "e4m3")
    assert formats["2.0", "wgrad"] == ("none", "fp32")


def dispatches(log: GemmLog) -> list[Any]:
    return log.dispatches("fp8_current")


def test_watching_leaves_the_entries_as_they_were(fake: Fake) -> None:
    before = dict(vars(fake.tex))
    calls: list[Call] = []

    def fail(model: nn.Module) -> None:
        model(torch.ones(1, 8))
        raise ValueError("mine")

    under_test = engine(fake_te.Linear(fake, 8, 8))
    with pytest.raises(ValueError, match="mine"), under_test.watch(lambda: None, calls.append):
        fail(under_test.model)
    assert vars(fake.tex) == before
    assert len(calls) == 1


def test_whether_a_module_ran_inside_the_region(fake: Fake) -> None:
    model = Model(fake)
    under_test = engine(model)
    step(under_test, CARDS["fp8_current"], model.qkv)
    assert under_test.region_of("qkv") == Region(True)
    step(under_test, CARDS["bf16"], model.qkv)
    assert under_test.region_of("qkv") == Region(False)
    assert under_test.region_of("head") == under_test.region_of("") == under_test.region_of("unknown") == Region()


def test_fresh_layers_have_the_models_narrow_type(fake: Fake) -> None:
    under_test = engine(fake_te.Linear(fake, 8, 8))
    assert under_test.default_baseline == "bf16"
    assert under_test.make_linear(8, 16, bias=True).weight.dtype == torch.bfloat16
    half = engine(fake_te.Linear(fake, 8, 8).half())
    layer = half.make_linear(8, 16, bias=False)
    assert layer.weight.dtype == torch.float16
    assert layer.weight.shape == (16, 8)
    assert layer.bias.numel() == 0


# -- delayed scaling's state --------------------------------------------------------------------------------------


def test_scales_of_the_first_and_the_last_module(fake: Fake) -> None:
    model = nn.Sequential(*(fake_te.Linear(fake, 8, 8) for _ in range(3)), fake_te.LayerNormMLP(fake, 8, 8))
    under_test = engine(model)
    assert under_test.scales(CARDS["fp8_delayed"]) == []
    step(under_test, CARDS["fp8_delayed"], model)
    state = model[3].fp8_meta["scaling_fwd"]
    state.scale.copy_(torch.arange(1.0, 7.0))
    state.amax_history[0].fill_(99.0)  # the live slot, which the update sets to zero
    state.amax_history[0].zero_()
    state.amax_history[-1].copy_(torch.arange(6.0))
    state.amax_history[5].fill_(2.5)
    facts = under_test.scales(CARDS["fp8_delayed"])
    assert [(fact.module, fact.direction) for fact in facts] == [("0", "fwd"), ("0", "bwd"), ("3", "fwd"), ("3", "bwd")]
    forward = facts[2]
    assert forward.recipe == "fp8_delayed"
    assert forward.tensors == tuple(f"gemm{i}.{what}" for i in range(2) for what in ("input", "weight", "output"))
    assert forward.scale == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert forward.amax == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert forward.amax_history_max == (2.5, 2.5, 2.5, 3.0, 4.0, 5.0)
    assert forward.history_length == 1024
    assert facts[3].tensors == tuple(f"gemm{i}.{what}" for i in range(2) for what in ("grad_output", "grad_input"))


def test_a_model_of_one_module_and_recipes_without_scales(fake: Fake) -> None:
    model = nn.Sequential(fake_te.Linear(fake, 8, 8))
    under_test = engine(model)
    step(under_test, CARDS["fp8_delayed"], model)
    assert [fact.module for fact in under_test.scales(CARDS["fp8_delayed"])] == ["0", "0"]
    assert under_test.scales(CARDS["fp8_current"]) == []
    under_test.switch()
    step(under_test, CARDS["fp8_current"], model)
    assert under_test.scales(CARDS["fp8_delayed"]) == []


def test_the_name_of_the_engine() -> None:
    assert transformer_engine.TransformerEngineEngine.name == "transformer_engine"
