"""The formulas for bytes against real tensors, real layers and a whole sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.analyze.memory_model import Layer, held_after_forward, possible_increases, tensor_bytes, total
from lowprec_callback.engines.transformer_engine import load
from lowprec_callback.measure import memory
from lowprec_callback.measure.dispatch import storages, stored
from lowprec_callback.measure.held import storages as bytes_by_address
from lowprec_callback.recording import Card, Dispatch, Holding, Memory, Model, PeakHolding, Recording
from lowprec_callback.report import MemoryReport

from .test_transformer_engine import BF16, HOPPER_RECIPES, Block, batches, cards, engine_for, gpu_trainer, profiler, te

M, K, N = 4096, 1024, 3072
FP8_RECIPES = HOPPER_RECIPES[1:]


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def transposes() -> bool:
    from lowprec_callback.analyze.memory_model import needs_transposes

    return needs_transposes(capability())


def quantizers() -> dict[str, tuple[str, str, bool, Any]]:
    """Name to (format, scaling, whether as for weights, quantizer), for what this GPU can quantize."""
    from transformer_engine.pytorch.tensor import (
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
    )

    e4m3 = load().tex.DType.kFloat8E4M3
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    both = {"rowwise": True, "columnwise": True}
    found: dict[str, tuple[str, str, bool, Any]] = {
        "delayed": ("e4m3", "tensor-delayed", False, Float8Quantizer(scale, amax, e4m3, **both)),
        "current": (
            "e4m3",
            "tensor-current",
            False,
            Float8CurrentScalingQuantizer(e4m3, device=torch.device("cuda"), **both),
        ),
        "block 1D": ("e4m3", "block-128", False, Float8BlockQuantizer(e4m3, block_scaling_dim=1, **both)),
        "block 2D": ("e4m3", "block-128", True, Float8BlockQuantizer(e4m3, block_scaling_dim=2, **both)),
    }
    if (10, 0) <= capability() < (12, 0):
        found["mxfp8"] = ("e4m3", "mx-32", False, MXFP8Quantizer(e4m3, **both))
    if capability() >= (10, 0):
        found["nvfp4"] = ("e2m1", "nvfp4-16", False, NVFP4Quantizer(**both))
    return found


@pytest.mark.parametrize("name", ["delayed", "current", "block 1D", "block 2D", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(128, 256), (1024, 512), (160, 1056), (4096, 3072)])
def test_tensors_hold_what_the_formulas_say(name: str, shape: tuple[int, int]) -> None:
    known = quantizers()
    if name not in known:
        pytest.skip(f"this GPU's compute capability {capability()} cannot quantize to {name}")
    form, scaling, weight, quantizer = known[name]
    tensor = quantizer(torch.randn(*shape, device="cuda", dtype=torch.bfloat16))
    expected = tensor_bytes(form, scaling, *shape, weight=weight, transposes=transposes())
    assert stored(tensor) == expected
    quantizer.set_usage(rowwise=True, columnwise=False)
    one = stored(quantizer(torch.randn(*shape, device="cuda", dtype=torch.bfloat16)))
    assert one == tensor_bytes(form, scaling, *shape, weight=weight, transposes=transposes(), columnwise=False)


LAYERS: dict[str, tuple[Layer, ...]] = {
    "Linear": (Layer("layer", "Linear", M, K, N, 1, True, True),),
    "LayerNormLinear": (Layer("layer", "LayerNormLinear", M, K, N, 1, True, True),),
    "LayerNormMLP": (
        Layer("layer.fc1", "LayerNormMLP", M, K, N, 1, True, True),
        Layer("layer.fc2", "LayerNormMLP", M, N, K, 1, True, True),
    ),
}


def held_by(engine: Any, recipe: Any, layer: nn.Module) -> int:
    """Bytes that one forward pass leaves allocated, in a process that has run such a step before."""
    device = torch.device("cuda")
    for measured in (False, True):
        engine.switch()
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        memory.clean(device)
        (start,) = memory.read(device, recipe.name, -1, "start")
        with engine.region(recipe):
            y = layer(x)
        (after,) = memory.read(device, recipe.name, -1, "forward")
        y.sum().backward()
        del x, y
        if measured:
            assert start.requested is not None
            assert after.requested is not None
            return after.requested - start.requested
    raise AssertionError


@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_layer_holds_what_the_formulas_say(kind: str) -> None:
    layer = getattr(te(), kind)(K, N, **BF16)
    engine = engine_for(nn.ModuleDict({"layer": layer}))
    engine.save()
    held = {card.name: held_by(engine, card, layer) for card in cards(*HOPPER_RECIPES)}
    expected = {
        card.name: held_after_forward(
            LAYERS[kind],
            Card(card.name, "", card.fprop, card.dgrad, card.wgrad, card.scaling, dict(card.arguments)),
            cast={},
            compute_capability=capability(),
        )
        for card in cards(*HOPPER_RECIPES)
    }
    engine.restore()
    for name in FP8_RECIPES:
        more = held[name] - held["bf16"]
        ways = possible_increases(expected[name], expected["bf16"])
        # The test holds x itself, so that the Linear's saved input is shared in BF16: the last of the ways.
        assert more == pytest.approx(ways[-1][1], abs=65536), (name, more, ways)


def test_a_parameter_is_told_from_its_copies() -> None:
    layer = te().Linear(K, N, **BF16)
    owned = storages(layer.parameters())
    found = stored(layer.weight, owned)
    assert found is not None
    assert found.parameter
    assert total(found) == 2 * N * K
    copy = stored(layer.weight.detach().clone(), owned)
    assert copy is not None
    assert not copy.parameter


def test_a_quantized_tensor_is_counted_by_its_parts() -> None:
    """Each of TE's tensors: what Python can name is what the operand witness reads of it."""
    device = torch.device("cuda")
    for name, (_, _, _, quantizer) in quantizers().items():
        tensor = quantizer(torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16))
        found = stored(tensor)
        assert found is not None
        size = sum(dict(bytes_by_address([tensor], device)).values())
        # A quantizer of delayed scaling may share its scale and amax with the tensor: a few bytes.
        assert size == pytest.approx(total(found), abs=16), name


def test_te_keeps_weights_scales_and_a_workspace_where_they_are_looked_for() -> None:
    """`is_first_microbatch` makes a layer keep its quantized weight between micro-batches."""
    layer = te().Linear(K, N, **BF16)
    engine = engine_for(nn.ModuleDict({"layer": layer}))
    engine.save()
    device = torch.device("cuda")
    for card in cards("fp8_delayed", "fp8_current", "fp8_block"):
        engine.switch()
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with engine.region(card):
            y = layer(x, is_first_microbatch=True)
        kept = {name: sum(dict(bytes_by_address(value, device)).values()) for name, value in engine.held().items()}
        y.sum().backward()
        print(card.name, kept)
        # One copy or two of a byte a value, and scales: never less than one, never more than three.
        assert K * N <= kept["quantized"] <= 3 * K * N, card.name
        assert kept["workspaces"] >= 4 * 1024 * 1024, card.name
        assert bool(kept["buffers"]) == (card.name == "fp8_delayed"), card.name
    engine.restore()


def test_memory_agrees_with_every_recipe_of_a_sweep(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    callback = profiler(tmp_path, rounds=1, settle_steps=2, timed_steps=2, traced_steps=1)
    gpu_trainer(tmp_path, callback, 120).fit(Block(), batches(120))
    report = callback.report
    assert report is not None
    facts = callback.session.recorder.snapshot()  # type: ignore[union-attr]
    assert all(fact.weight_or_input.stored and fact.other.stored for fact in facts.of(Dispatch) if fact.in_region)
    phases = [(fact.recipe, fact.phase) for fact in facts.of(Memory) if fact.round < 0]
    for part in report.recipes:
        if part.refusal is not None:
            continue
        assert [(part.name, phase) for phase in ("start", "forward", "backward", "optimizer")] == [
            pair for pair in phases if pair[0] == part.name
        ]
        assert part.memory is not None
        told = f"{part.name}: {part.memory.state}: {part.memory.why} {part.memory.terms} {part.memory.note}"
        print(told)
        assert part.memory.state == "agrees", told
        check_ledger(part.name, part.memory, facts, before)
        assert "something that is not counted" not in part.memory.why, told
        for term in part.memory.terms:
            assert term.measured.value == pytest.approx(term.expected.value, rel=0.02, abs=1e-3), told
        assert part.verdict is not None
        assert not part.verdict.disagreements
        reached = [row for row in part.verdict.rows if row.module != "head"]
        assert all("memory" in row.witnesses for row in reached)


def check_ledger(name: str, part: MemoryReport, facts: Recording, before: int) -> None:
    """All terms are known, none is less than nothing, and they add up to what the allocator reserved.

    `before` is what other tests left behind [bytes].
    """
    assert [moment.name for moment in part.moments] == ["start", "forward", "backward", "optimizer", "peak"]
    for moment in part.moments:
        told = f"{name} {moment.where}: " + ", ".join(f"{term} {fig.value}" for term, fig in moment.terms.items())
        print(told, "reserved", moment.reserved.value, moment.activations)
        assert all(figure.known for figure in moment.terms.values()), (told, moment)
        assert moment.sum.value == pytest.approx(moment.reserved.value, rel=1e-9), told
    (peak,) = [fact for fact in facts.of(PeakHolding) if fact.recipe == name]
    # The fullest phase by the allocator's own peaks is the one that was followed.
    watched = [fact for fact in facts.of(Memory) if fact.recipe == name and fact.round < 0]
    assert peak.peak == max(fact.peak for fact in watched)
    print(name, "peak", peak.phase, peak.module, peak.open_layers)
    (start,) = [fact for fact in facts.of(Holding) if fact.recipe == name and fact.phase == "start"]
    model = facts.of(Model)[0]
    assert start.parameters == model.parameter_bytes
    # Adam's moments: two for each parameter, in its own type (and counts of steps).
    assert start.optimizer == pytest.approx(2 * start.parameters, rel=0.01, abs=4096)
    assert start.gradients in (0, start.parameters)
    # What nobody claims before a step is small: workspaces of PyTorch's own, the random generators' state.
    (first,) = [moment for moment in part.moments if moment.name == "start"]
    assert (first.terms["not attributed"].value or 0.0) < before / 1e9 + 0.2, first
    forward = part.moment("forward")
    assert forward is not None
    rest = forward.activations["the rest of them"]
    assert rest.known, rest.reason


def test_watching_memory_holds_nothing_itself(tmp_path: Path) -> None:
    """Before and after a sweep the same is live: neither the counting nor what it found keeps a tensor."""
    before = torch.cuda.memory_allocated()
    callback = profiler(tmp_path, rounds=1, settle_steps=2, timed_steps=2, traced_steps=1, recipes=["fp8_delayed"])
    gpu_trainer(tmp_path, callback, 60).fit(Block(), batches(60))
    (start, *_), (again, *_) = (
        [fact for fact in callback.session.recorder.snapshot().of(Memory) if fact.recipe == name and fact.round < 0]  # type: ignore[union-attr]
        for name in ("bf16", "fp8_delayed")
    )
    # The state of delayed scaling comes on top, once modules have run: the recipe's start is before that.
    assert again.allocated == pytest.approx(start.allocated, rel=0.01, abs=2**21)
    assert torch.cuda.memory_allocated() < before + 2**30
