"""Precision that is lost on purpose, on a thin fake of Transformer Engine: the verdict names module, role and cause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec_callback.analyze.summary import analyze
from lowprec_callback.analyze.verdict import RECOMPUTED
from lowprec_callback.engines import te_state
from lowprec_callback.engines.base import NotRun, Region
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, build_recipe
from lowprec_callback.measure.library_log import LibraryListener
from lowprec_callback.recipes import RecipeCard, load_cards, read_card
from lowprec_callback.recording import (
    Dispatch,
    Environment,
    Fact,
    Model,
    Recorder,
    Recording,
    StepProducts,
    UncachedWeights,
)
from lowprec_callback.report import Report, VerdictRow
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.script import Sweep
from lowprec_callback.sweep.snapshot import Snapshot
from tests.analyze.recordings import mirrored, step_products
from tests.engines import fake_te
from tests.engines.fake_te import Fake, Float8CurrentScaling, Format

CARDS = load_cards()
CURRENT = CARDS["fp8_current"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_library_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake multiplies in FP32 whatever it was asked for, and the CPU's library would say so."""
    monkeypatch.setattr(LibraryListener, "listen", lambda *_: nullcontext())


class Stack(nn.Module):
    """Four layers of TE and a head of PyTorch's; `around` gives the context that a layer runs in."""

    def __init__(self, fake: Fake, around: Callable[[int], AbstractContextManager[Any]] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(fake_te.Linear(fake, 32, 32, bias=False) for _ in range(4))
        self.head = nn.Linear(32, 8, bias=False)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self.around is None:
                x = block(x)
            else:
                with self.around(index):
                    x = block(x)
        return self.head(x)


def audit(folder: Path, model: nn.Module, *cards: RecipeCard, kept: bool = False, gpu: bool = True) -> Report:
    """A short sweep over the cards, bf16 first.

    `kept`: the engine does not rebuild TE's state at a switch. `gpu`: with the kernels that a GPU would have launched
    for these operands; else as the fake ran it, on a CPU, in FP32.
    """
    engine = TransformerEngineEngine(model, torch.device("cpu"), "a test")
    if kept:
        engine.switch = lambda: None  # type: ignore[method-assign]
    chosen = [CARDS["bf16"], *cards]
    with Recorder(folder / "recording.jsonl", "test") as recorder:
        recorder.add(Environment("CPU", "cpu"))
        recorder.add(Model("stack", "transformer_engine", "a test", 0, 0))
        recorder.add(*(card.to_fact(card.name == "bf16") for card in chosen))

        def step() -> None:
            with sweep.region():
                y = model(torch.randn(32, 32, requires_grad=True))
            y.square().sum().backward()

        settings = Settings(1, 1, 2, 1, guard_steps=0)
        sweep = Sweep(engine, chosen, settings, recorder, Snapshot.take(model, []), step, gemm_benchmark=False)
        sweep.run()
        sweep.finish("finished")
    found = recorder.snapshot()
    return analyze(on_a_gpu(found, [card.name for card in chosen]) if gpu else found)


def on_a_gpu(recording: Recording, recipes: list[str]) -> Recording:
    """The Recording with kernels for what reached the library, instead of the operators of the fake."""
    facts: list[Fact] = []
    for recipe in recipes:
        kernels = [
            replace(kernel, phase="forward" if fact.role == "fprop" and not fact.recomputed else "backward")
            for fact in recording.of(Dispatch)
            if fact.recipe == recipe
            for kernel in mirrored([fact])
        ]
        facts += [step_products(recipe, kernels), step_products(recipe, kernels, ranged=True)]
    return Recording.from_facts([*(fact for fact in recording.of(Fact) if not isinstance(fact, StepProducts)), *facts])


def rows(report: Report, recipe: str, word: str) -> dict[tuple[str, str], VerdictRow]:
    verdict = report.recipe(recipe).verdict
    assert verdict is not None
    return {(row.module, row.role): row for row in verdict.rows if row.verdict == word}


def places(modules: list[str], roles: tuple[str, ...] = ("fprop", "dgrad", "wgrad")) -> set[tuple[str, str]]:
    return {(module, role) for module in modules for role in roles}


BLOCKS = [f"blocks.{index}" for index in range(4)]


def test_a_sound_model_is_confirmed_but_for_its_head(fake: Fake, tmp_path: Path) -> None:
    report = audit(tmp_path, Stack(fake), CURRENT)
    assert set(rows(report, "fp8_current", "confirmed")) == places(BLOCKS)
    outside = rows(report, "fp8_current", "outside")
    assert set(outside) == places(["head"])
    assert outside["head", "dgrad"].why.startswith("no recipe reaches it (nn.Linear)")
    verdict = report.recipe("fp8_current").verdict
    assert verdict is not None
    assert verdict.te_coverage.value == pytest.approx(1.0)


def test_what_the_fake_multiplies_in_is_no_fp8(fake: Fake, tmp_path: Path) -> None:
    """Its operands say FP8, and the operators of a step that ran as timed say FP32."""
    verdict = audit(tmp_path, Stack(fake), CURRENT, gpu=False).recipe("fp8_current").verdict
    assert verdict is not None
    assert {row.verdict for row in verdict.rows if row.module in BLOCKS} == {"unproven"}
    assert verdict.coverage.value == 0.0
    assert any("but a kernel of precision fp32 ran" in text for text in verdict.disagreements)


def test_blocks_in_a_region_that_is_switched_off(fake: Fake, tmp_path: Path) -> None:
    model = Stack(fake, lambda index: fake.te.autocast(enabled=index not in (1, 3), recipe=build_recipe(CURRENT)))
    report = audit(tmp_path, model, CURRENT)
    found = rows(report, "fp8_current", "by_request")
    assert set(found) == places(["blocks.1", "blocks.3"])
    assert "a region that the model switches off" in found["blocks.1", "wgrad"].why
    assert set(rows(report, "fp8_current", "confirmed")) == places(["blocks.0", "blocks.2"])


def test_a_region_of_the_models_own_with_another_recipe(fake: Fake, tmp_path: Path) -> None:
    report = audit(tmp_path, Stack(fake, lambda _index: fake.te.autocast(recipe=fake_te.DelayedScaling())), CURRENT)
    for recipe in ("fp8_current", "bf16"):  # the baseline is audited as well
        found = rows(report, recipe, "fallback")
        assert places(BLOCKS) <= set(found)
        why = found["blocks.2", "dgrad"].why
        assert why.startswith("the model opens a region of its own, with DelayedScaling, inside the recipe's")
        assert "tensor-delayed" in found["blocks.2", "dgrad"].ran


def test_a_region_of_the_models_own_with_other_flags(fake: Fake, tmp_path: Path) -> None:
    own = Float8CurrentScaling(fp8_format=Format.E4M3)
    report = audit(tmp_path, Stack(fake, lambda _index: fake.te.autocast(recipe=own)), CURRENT)
    found = rows(report, "fp8_current", "fallback")
    assert set(found) == places(BLOCKS)  # fprop too: formats are as asked there, the recipe is not
    assert "Float8CurrentScaling(fp8_format=E4M3)" in found["blocks.0", "fprop"].why


def test_flags_changed_on_a_live_model(fake: Fake, tmp_path: Path) -> None:
    """TE keeps quantizers as long as the recipe's class stays; the sweep has them built again."""
    narrow = read_text(tmp_path, 'name = "narrow"\nbased_on = "fp8_current"\n[arguments]\nfp8_format = "E4M3"\n')
    sound = audit(tmp_path / "sound", Stack(fake), CURRENT, narrow)
    assert set(rows(sound, "narrow", "confirmed")) == places(BLOCKS)
    report = audit(tmp_path / "kept", Stack(fake), CURRENT, narrow, kept=True)
    found = rows(report, "narrow", "fallback")
    assert set(found) == places(BLOCKS)
    assert found["blocks.0", "wgrad"].why.startswith(
        "its quantizers were built for Float8CurrentScaling(fp8_format=HYBRID): Transformer Engine keeps them"
    )


def test_a_backward_pass_that_was_asked_to_be_wide(fake: Fake, tmp_path: Path) -> None:
    card = CURRENT.with_arguments({"backward_override": "high_precision"})
    report = audit(tmp_path, Stack(fake), card)
    found = rows(report, "fp8_current", "by_request")
    assert set(found) == places(BLOCKS, ("dgrad", "wgrad"))
    assert found["blocks.0", "dgrad"].why.startswith("backward_override=high_precision asks for a wide backward pass")
    assert set(rows(report, "fp8_current", "confirmed")) == places(BLOCKS, ("fprop",))


class Checkpointed(Stack):
    """Block 1 is computed again in backward; `inside` gives the region that it opens then, as te.checkpoint does."""

    def __init__(self, fake: Fake, inside: bool) -> None:
        super().__init__(fake)
        self.fake, self.inside = [fake], inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.fake[0].manager.state()
        enabled, recipe = state.fp8_enabled, state.fp8_recipe

        def block(x: torch.Tensor) -> torch.Tensor:
            if not self.inside:
                return self.blocks[1](x)
            with self.fake[0].te.autocast(enabled=enabled, recipe=recipe):
                return self.blocks[1](x)

        x = checkpoint(block, self.blocks[0](x), use_reentrant=True)
        return self.head(self.blocks[3](self.blocks[2](x)))


def test_a_reentrant_checkpoint_loses_the_region(fake: Fake, tmp_path: Path) -> None:
    report = audit(tmp_path, Checkpointed(fake, inside=False), CURRENT)
    found = rows(report, "fp8_current", "fallback")
    assert set(found) == places(["blocks.1"])
    assert all(row.why.startswith(RECOMPUTED) for row in found.values())
    confirmed = rows(report, "fp8_current", "confirmed")
    assert set(confirmed) == {*places(["blocks.0", "blocks.2", "blocks.3"]), ("blocks.1", "fprop")}
    assert confirmed["blocks.1", "fprop"].calls == found["blocks.1", "fprop"].calls == 1


def test_a_checkpoint_that_opens_the_region_again_is_sound(fake: Fake, tmp_path: Path) -> None:
    report = audit(tmp_path, Checkpointed(fake, inside=True), CURRENT)
    confirmed = rows(report, "fp8_current", "confirmed")
    assert set(confirmed) == places(BLOCKS)
    assert confirmed["blocks.1", "fprop"].calls == 2


def test_the_reference_of_nvfp4_is_seen_and_not_taken_for_fp4(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = read_card(ROOT / "examples" / "recipes" / "nvfp4_reference.toml")
    card = card.with_arguments({"qfactory": "tests.engines.fake_te:nvfp4_ref_factory"})
    before = fake.extensions.custom_gemm
    report = audit(tmp_path, Stack(fake), card, gpu=False)
    assert fake.extensions.custom_gemm == before
    found = rows(report, "nvfp4_reference", "fallback")
    assert set(found) == places(BLOCKS)
    row = found["blocks.1", "wgrad"]
    assert (row.m, row.k, row.n) == (32, 32, 32)
    assert row.ran == "e2m1 x e2m1, nvfp4-16, multiplied in fp32"
    assert row.why == "no NVFP4 kernel ran: the custom quantizer's own code multiplies in FP32"


@pytest.mark.parametrize("place", ["no.such:thing", "tests.engines.fake_te:nothing"])
def test_a_factory_that_is_not_there(fake: Fake, place: str) -> None:
    card = read_card(ROOT / "examples" / "recipes" / "nvfp4_reference.toml").with_arguments({"qfactory": place})
    with pytest.raises(ValueError, match=place.split(":", maxsplit=1)[0]):
        build_recipe(card)


def test_weights_that_are_stored_for_another_recipe(fake: Fake) -> None:
    model = Stack(fake)
    for block in model.blocks:
        block.weight._quantizer = fake_te.Float8CurrentScalingQuantizer()  # type: ignore[union-attr, assignment]
    engine = TransformerEngineEngine(model, torch.device("cpu"), "a test")
    refusal = engine.probe(CARDS["fp8_delayed"])
    assert refusal is not None
    assert "none of fprop, dgrad and wgrad of these modules can run in DelayedScaling" in refusal.reason
    assert "Float8CurrentScaling: blocks.0.weight, blocks.1.weight, blocks.2.weight and 1 more" in refusal.reason
    assert engine.probe(CURRENT) is None
    assert engine.probe(CARDS["bf16"]) is None


def test_features_that_do_not_fit_are_named_with_their_modules(fake: Fake) -> None:
    model = nn.ModuleDict({"good": fake_te.Linear(fake, 32, 32), "bad": fake_te.Linear(fake, 24, 32)})

    def refuse(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
        if a.shape[-1] % 16:
            raise ValueError("FP8 execution requires the last dimension to be divisible by 16")
        return fake_te.multiply(a, b, layout)

    fake.gemm = refuse
    refusal = TransformerEngineEngine(model, torch.device("cpu"), "a test").probe(CURRENT)
    assert refusal == NotRun(
        "a tiny te.Linear(24, 32) failed: ValueError: FP8 execution requires the last dimension to be divisible by 16. "
        "Modules of this size (24 input features, needs a multiple of 16): bad",
        "our probe",
    )


def test_tokens_that_do_not_fit_are_refused_before_they_raise(fake: Fake, tmp_path: Path) -> None:
    class Odd(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:12])

    report = audit(tmp_path, Odd(fake), CURRENT, CARDS["fp8_delayed"])
    for name in ("fp8_current", "fp8_delayed"):
        refusal = report.recipe(name).refusal
        assert refusal is not None
        assert "blocks.0 (12 tokens, needs a multiple of 16), blocks.1" in refusal
        assert refusal.endswith("and 1 more modules (the captured step)")
    # FP32 parameters in a recipe that is called bf16: the baseline's region is off anyway, which excuses nothing.
    baseline = rows(report, "bf16", "fallback")
    assert set(baseline) == places(BLOCKS)
    assert baseline["blocks.0", "fprop"].why.startswith("ran wider than asked: 32 bits an element, not 16")
    assert report.status == "finished"


def test_modules_that_quantize_their_weight_at_every_forward(fake: Fake) -> None:
    model = nn.ModuleDict({"fc": fake_te.Linear(fake, 32, 32), "core": fake_te.DotProductAttention(fake)})
    engine = TransformerEngineEngine(model, torch.device("cpu"), "a test")

    def observed(card: RecipeCard) -> list[Any]:
        with engine.observe(card) as facts, engine.region(card):
            model["fc"](torch.ones(16, 32))
            model["core"](torch.ones(16, 32))
        return facts

    assert observed(CARDS["bf16"]) == []
    assert observed(CURRENT) == [UncachedWeights("fp8_current", ("fc",))]
    model["fc"]._fp8_workspaces["weight"] = torch.empty(0)  # told which micro-batch is the first, TE keeps it
    assert observed(CURRENT) == []
    model["fc"]._fp8_workspaces.clear()
    model["fc"].weight._quantizer = fake_te.Float8CurrentScalingQuantizer()  # stored quantized
    assert observed(CURRENT) == []


def test_only_what_quantizers_are_built_from_makes_them_stale(fake: Fake) -> None:
    delayed = fake_te.DelayedScaling
    meta = {"recipe": delayed(amax_history_len=16), "scaling_fwd": fake_te.RecipeState(delayed(), 3)}
    module = fake_te.Linear(fake, 8, 8)
    module.fp8, module.fp8_meta = True, meta
    assert te_state.region_of(module, meta["recipe"]) == Region(True)
    meta["recipe"] = delayed(fp8_format=Format.E4M3)
    assert te_state.region_of(module, meta["recipe"]).stale == "DelayedScaling(fp8_format=HYBRID)"
    assert te_state.region_of(module, None).other == "DelayedScaling"


def read_text(folder: Path, text: str) -> RecipeCard:
    file = folder / "card.toml"
    file.write_text(text, encoding="utf-8")
    return read_card(file, CARDS)
