"""The TE engine on a real GPU: what is seen of every kind of layer, and that switching and restoring are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, load
from lowprec_callback.measure.gemms import benchmark
from lowprec_callback.measure.scopes import ModuleScopes
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.measure.trace import Tracer, module_range
from lowprec_callback.recipes import RecipeCard, load_cards
from lowprec_callback.recording import Dispatch, End, Gemm, GemmTime, HostTime, Memory, Scales, Trace
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.session import Options, Session, Training
from tests.fit.models import profiler, trainer
from tests.fit.ranks_script import After, Before

HOPPER_RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_block")
M, K, N = 256, 512, 768


def te() -> Any:
    return load().te


def engine_for(model: nn.Module) -> TransformerEngineEngine:
    return TransformerEngineEngine(model, torch.device("cuda"), "a test")


def cards(*names: str) -> list[RecipeCard]:
    known = load_cards()
    return [known[name] for name in names]


def watched(engine: TransformerEngineEngine, card: RecipeCard, step: Callable[[], torch.Tensor]) -> GemmLog:
    """Run one forward and backward as the sweep's watched step does."""
    log = GemmLog(engine.linear_layers(), engine.region_of)
    ranges: list[Any] = []

    def enter(scope: Any) -> None:
        ranges.append(module_range(scope))
        ranges[-1].__enter__()

    scopes = ModuleScopes(engine.scoped_modules(), enter, lambda _scope: ranges.pop().__exit__(None, None, None))
    tracer = Tracer(torch.device("cuda"), shapes=True)
    with ExitStack() as stack:
        tracer.start()
        stack.callback(tracer.stop)
        with scopes.installed(), engine.watch(scopes.current, log.add_call):
            with engine.region(card):
                loss = step()
            loss.backward()
    for product in tracer.products():
        log.add_product(product)
    return log


def shapes(log: GemmLog) -> set[tuple[str, str, int, int, int]]:
    return {(gemm.module, gemm.role, gemm.m, gemm.k, gemm.n) for gemm in log.gemms()}


def three(module: str, m: int, k: int, n: int) -> set[tuple[str, str, int, int, int]]:
    return {(module, role, m, k, n) for role in ("fprop", "dgrad", "wgrad")}


def inputs(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16, requires_grad=True)


BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Linear", three("layer", M, K, N)),
        ("LayerNormLinear", three("layer", M, K, N)),
        ("LayerNormMLP", three("layer.fc1", M, K, N) | three("layer.fc2", M, N, K)),
        (
            "TransformerLayer",
            three("layer.self_attention.layernorm_qkv", M, K, 3 * K)
            | three("layer.self_attention.proj", M, K, K)
            | three("layer.layernorm_mlp.fc1", M, K, N)
            | three("layer.layernorm_mlp.fc2", M, N, K),
        ),
        ("GroupedLinear", three("layer", M, K, N)),
        ("ops", three("layer.0", M, K, N)),
    ],
)
def test_every_kind_of_layer_shows_its_gemms_in_the_formats_of_the_card(
    kind: str, expected: set[tuple[str, str, int, int, int]], recipe: str
) -> None:
    layer, step = build(kind)
    model = nn.ModuleDict({"layer": layer})
    (card,) = cards(recipe)
    engine = engine_for(model)
    log = watched(engine, card, step)
    assert shapes(log) == expected
    asked = {"fprop": card.fprop, "dgrad": card.dgrad, "wgrad": card.wgrad}
    for fact in log.dispatches(recipe):
        assert (fact.weight_or_input.format, fact.other.format) == asked[fact.role], fact
        assert (fact.weight_or_input.scaling, fact.other.scaling) == (card.scaling, card.scaling), fact
        assert fact.in_region in (card.scaling != "none", None)


def build(kind: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    x = inputs(M, K)
    if kind == "Linear":
        layer = te().Linear(K, N, **BF16)
    elif kind == "LayerNormLinear":
        layer = te().LayerNormLinear(K, N, **BF16)
    elif kind == "LayerNormMLP":
        layer = te().LayerNormMLP(K, N, **BF16)
    elif kind == "TransformerLayer":
        layer = te().TransformerLayer(K, N, 8, attn_input_format="bshd", fuse_qkv_params=True, **BF16)
        x = inputs(2, M // 2, K)
    elif kind == "GroupedLinear":
        layer = te().GroupedLinear(2, K, N, **BF16)
        return layer, lambda: layer(x, [M // 2, M // 2]).sum()
    else:
        layer = te().ops.Sequential(te().ops.Linear(K, N, device="cuda", dtype=torch.bfloat16))
    return layer, lambda: layer(x).sum()


def test_plain_linears_beside_te_are_seen_and_marked_out_of_reach() -> None:
    model = nn.Sequential(te().Linear(K, N, **BF16), nn.Linear(N, 96, bias=False, dtype=torch.bfloat16, device="cuda"))
    (card,) = cards("fp8_current")
    log = watched(engine_for(model), card, lambda: model(inputs(M, K)).sum())
    found = {(gemm.module, gemm.role): gemm.quantizable for gemm in log.gemms()}
    assert found == {(path, role): path == "0" for path in ("0", "1") for role in ("fprop", "dgrad", "wgrad")}
    plain = [fact for fact in log.dispatches("fp8_current") if fact.module == "1"]
    assert {fact.other.format for fact in plain} == {"bf16"}


def test_what_can_run_here_is_proven_and_the_rest_refused_with_tes_reason() -> None:
    engine = engine_for(nn.Sequential(te().Linear(K, N, **BF16)))
    major, _ = torch.cuda.get_device_capability()
    for card in cards("bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"):
        refusal = engine.refusal(card)
        if card.name in ("mxfp8", "nvfp4") and major < 10:
            assert refusal is not None
            assert "10.0" in refusal.reason
        else:
            assert refusal is None
            assert engine.probe(card) is None


def test_a_probe_that_fails_is_a_reason() -> None:
    engine = engine_for(nn.Sequential(te().Linear(24, 40, **BF16)))
    (card,) = cards("fp8_current")
    refusal = engine.probe(card)
    assert refusal is not None
    assert "te.Linear(24, 40)" in refusal.reason


def test_switching_makes_new_quantizers_for_other_flags_of_the_same_class() -> None:
    """On a live model TE keeps the old quantizers when only flags change (its issue 3157)."""
    model = nn.Sequential(te().Linear(K, N, **BF16))
    engine = engine_for(model)
    engine.save()
    hybrid = load_cards()["fp8_current"]
    narrow = hybrid.with_arguments({"fp8_format": "E4M3"})
    seen = []
    for card in (hybrid, narrow):
        engine.switch()
        engine._recipes.clear()
        log = watched(engine, card, lambda: model(inputs(M, K)).sum())
        backward = [fact for fact in log.dispatches("r") if fact.role != "fprop"]
        seen.append({fact.other.format for fact in backward})
    assert seen == [{"e5m2"}, {"e4m3"}]
    engine.restore()


def test_delayed_scaling_begins_afresh_at_each_switch() -> None:
    model = nn.Sequential(te().Linear(K, N, **BF16))
    engine = engine_for(model)
    (card,) = cards("fp8_delayed")
    engine.save()
    for _ in range(2):
        engine.switch()
        for _ in range(3):
            with engine.region(card):
                y = model(inputs(M, K))
            y.sum().backward()
        state = model[0].fp8_meta["scaling_fwd"]
        used = int((state.amax_history != 0).any(dim=1).sum())
        assert used == 3  # three steps since the switch, not six
    engine.restore()


def test_the_users_own_quantization_state_comes_back() -> None:
    model = nn.Sequential(te().Linear(K, N, **BF16))
    engine = engine_for(model)
    delayed, block = cards("fp8_delayed", "fp8_block")
    with engine.region(delayed):
        y = model(inputs(M, K))
    y.sum().backward()
    before = model[0].fp8_meta["scaling_fwd"]
    scale, history = before.scale.clone(), before.amax_history.clone()
    engine.save()
    engine.switch()
    with engine.region(block):
        y = model(inputs(M, K))
    y.sum().backward()
    engine.restore()
    after = model[0].fp8_meta["scaling_fwd"]
    assert after is before
    assert torch.equal(after.scale, scale)
    assert torch.equal(after.amax_history, history)


def test_the_benchmark_times_every_role_of_every_recipe_and_leaves_no_state() -> None:
    model = nn.Sequential(te().Linear(K, N, **BF16), nn.Linear(N, 96, bias=False, dtype=torch.bfloat16, device="cuda"))
    engine = engine_for(model)
    chosen = cards(*HOPPER_RECIPES)
    gemms = [Gemm("0", role, M, K, N, 1, "Linear", True, bias=True) for role in ("fprop", "dgrad", "wgrad")]
    gemms += [Gemm("1", role, M, N, 96, 1, "nn.Linear", False) for role in ("fprop", "dgrad", "wgrad")]
    original = load().tex.generic_gemm
    times = list(benchmark(engine, chosen, "bf16", gemms, seed=0))
    assert load().tex.generic_gemm is original
    assert all(time.failure is None for time in times), [time for time in times if time.failure]
    counted = Counter((time.recipe, time.n, time.mode) for time in times)
    assert counted == {(r, N, mode): 3 for r in HOPPER_RECIPES for mode in ("kernel", "autocast")} | {
        ("bf16", 96, mode): 3 for mode in ("kernel", "autocast")
    }
    assert all(min(time.samples_ms) > 0 for time in times)


def test_a_shape_that_cannot_run_keeps_its_row_with_the_reason() -> None:
    engine = engine_for(nn.Sequential(te().Linear(K, N, **BF16)))
    gemms = [Gemm("0", role, M, 24, 40, 1, "Linear", True) for role in ("fprop", "dgrad", "wgrad")]
    times = list(benchmark(engine, cards("bf16", "fp8_current"), "bf16", gemms, seed=0))
    failed = [time for time in times if time.recipe == "fp8_current"]
    assert len(failed) == 6
    assert all(time.failure and not time.samples_ms for time in failed)
    assert all(time.failure is None for time in times if time.recipe == "bf16")


# --- a whole sweep --------------------------------------------------------------------------------------------------


class Block(LightningModule):
    """Two `te.TransformerLayer`s and a head that TE does not own."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            te().TransformerLayer(
                512,
                2048,
                8,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                fuse_qkv_params=True,
                **BF16,
            )
            for _ in range(2)
        )
        self.head = nn.Linear(512, 96, bias=False, dtype=torch.bfloat16, device="cuda")
        self._fail_at, self._calls = fail_at, 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._calls += 1
        if self._calls == self._fail_at:
            raise RuntimeError("planted")
        x = batch
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def batches(count: int) -> DataLoader[torch.Tensor]:
    rows = torch.randn(count * 4, 256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def gpu_trainer(folder: Path, callback: Any, steps: int) -> Any:
    return trainer(folder, callback, steps=steps, accelerator="gpu", precision="bf16-true")


def test_a_sweep_confirms_every_te_gemm_in_every_recipe(tmp_path: Path) -> None:
    callback = profiler(tmp_path, rounds=2, settle_steps=3, timed_steps=3, traced_steps=2, gemm_benchmark=True)
    model = Block()
    original = load().tex.generic_gemm
    gpu_trainer(tmp_path, callback, 120).fit(model, batches(120))
    assert load().tex.generic_gemm is original

    report = callback.report
    assert report is not None
    facts = callback.session.recorder.snapshot()  # type: ignore[union-attr]
    assert facts.of(End)[0].status == "finished"
    for part in report.recipes:
        if part.refusal is not None:
            continue
        assert part.verdict is not None
        assert part.verdict.te_coverage.value == pytest.approx(1.0), part.verdict.summary
        assert not part.verdict.disagreements
        rows = [row for row in part.verdict.rows if row.verdict == "confirmed"]
        assert all({"operands", "kernels"} <= set(row.witnesses) for row in rows if row.module != "head"), rows
        assert part.ledger is not None
        assert part.ledger.buckets["other"].value < 0.01 * part.ledger.wall.value
        for trace in facts.of(Trace):
            assert trace.expected_gemms == 2 * 4 * 3 + 3  # the head's three are PyTorch's
    assert {fact.recipe for fact in facts.of(HostTime)} == set(HOPPER_RECIPES)
    assert {fact.recipe for fact in facts.of(Memory) if fact.phase == "forward"} == set(HOPPER_RECIPES)
    assert facts.of(Scales)
    assert facts.of(GemmTime)
    assert facts.of(Dispatch)


def test_after_a_sweep_everything_is_bit_identical(tmp_path: Path) -> None:
    callback, before = profiler(tmp_path, rounds=1, settle_steps=1, timed_steps=2, traced_steps=1), Before()
    after = After(before)
    run = trainer(tmp_path, before, callback, after, steps=1, accelerator="gpu", precision="bf16-true")
    run.fit(Block(), batches(60))
    assert callback.report is not None
    assert before.held
    assert after.same


def test_weights_stored_in_fp8_come_back_bit_for_bit(tmp_path: Path) -> None:
    from lowprec_callback.engines.transformer_engine import build_recipe

    (card,) = cards("fp8_current")
    init = getattr(te(), "quantized_model_init", None) or te().fp8_model_init
    with init(enabled=True, recipe=build_recipe(card)):
        model = Block()
    stored = [p for p in model.parameters() if hasattr(p, "_quantizer")]
    assert stored
    before = [p.dequantize().cpu() for p in stored]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = Options(
        recipes="fp8_current",
        baseline="fp8_current",
        settings=Settings(rounds=1, settle_steps=1, timed_steps=2, traced_steps=1),
        output_dir=str(tmp_path),
        progress=False,
    )
    data, changed = enumerate(batches(60)), []

    def step() -> torch.Tensor:
        index, batch = next(data)
        with session.sweep.region():
            loss = model.training_step(batch.cuda(), index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if index == 1:
            pairs = zip(stored, before, strict=True)
            changed.append(any(not torch.equal(p.dequantize().cpu(), values) for p, values in pairs))
        return loss

    session = Session.open(options, Training(model, torch.device("cuda"), "stored", [optimizer]), step)
    session.run()
    session.show()
    assert changed == [True]
    assert session.report is not None
    for parameter, values in zip(stored, before, strict=True):
        assert torch.equal(parameter.dequantize().cpu(), values)


@pytest.mark.parametrize("at", [1, 2, 6, 10, 14])
def test_an_exception_leaves_nothing_of_ours(tmp_path: Path, at: int) -> None:
    """The sweep meets it first; then training comes to it by its own count."""
    model = Block(fail_at=at)
    original = load().tex.generic_gemm
    callback = profiler(tmp_path, rounds=1, recipes=["fp8_delayed"])
    run = gpu_trainer(tmp_path, callback, 60)
    with pytest.raises(RuntimeError, match="planted"):
        run.fit(model, batches(60))
    assert run.global_step == at - 1
    assert load().tex.generic_gemm is original
    assert "training_step" not in model.__dict__
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_watching_does_not_turn_off_torch_compile(tmp_path: Path) -> None:
    """TE's fused GELU is compiled; a dispatch mode while watching would make it run eagerly for good."""
    callback = profiler(tmp_path, rounds=1, recipes=["fp8_block"], traced_steps=1)
    gpu_trainer(tmp_path, callback, 60).fit(Block(), batches(60))
    for trace in callback.session.recorder.snapshot().of(Trace):  # type: ignore[union-attr]
        forward = [
            trace.names[name]
            for name, phase in zip(trace.name, trace.phase, strict=True)
            if trace.labels[phase] == "forward"
        ]
        if trace.recipe == "bf16":
            assert any(name.startswith("triton_") and "tanh" in name for name in forward)
