"""Precision lost on purpose, on a real GPU: each loss is named with module, role and cause, and a clean model has none.

Small models in short sweeps without a Trainer; seconds each.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lowprec_callback.analyze.summary import analyze
from lowprec_callback.analyze.verdict import RECOMPUTED
from lowprec_callback.engines.transformer_engine import build_recipe, load
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import AttentionBackend, End, GemmTime, Problem, Trace, UncachedWeights
from lowprec_callback.report import Report, Verdict, VerdictRow
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.session import FallbackError, Options, ProfilerError, Session, Training
from tests.fit.models import profiler, trainer

ROOT = Path(__file__).parents[2]
HIDDEN, TOKENS, BATCH = 256, 128, 4
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
ROLES = ("fprop", "dgrad", "wgrad")
Around = Callable[[int], AbstractContextManager[Any]]


def te() -> Any:
    return load().te


def recipe(name: str, **arguments: Any) -> Any:
    return build_recipe(load_cards()[name].with_arguments(arguments))


class Stack(nn.Module):
    """Four `te.Linear`s and a head of PyTorch's; `around` gives the context that a layer runs in."""

    def __init__(self, around: Around = lambda _index: nullcontext(), sizes: tuple[int, ...] = (HIDDEN,) * 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(te().Linear(k, n, bias=False, **BF16) for k, n in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 96, bias=False, dtype=torch.bfloat16, device="cuda")
        self.around = around

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        with self.around(index):
            return self.blocks[index](x)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for index in range(len(self.blocks)):
            x = self.block(index, x)
        return self.head(x)


BLOCKS = [f"blocks.{index}" for index in range(4)]


class Transformer(nn.Module):
    """Two `te.TransformerLayer`s."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            te().TransformerLayer(
                HIDDEN, 4 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd",
                fuse_qkv_params=True, **BF16,
            )
            for _ in range(2)
        )  # fmt: skip

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **options)
        return x


class TwoPaths(nn.Module):
    """A `te.Linear` whose compiled path multiplies by PyTorch instead, in whatever type its weight has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = te().Linear(HIDDEN, HIDDEN, bias=False, **BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return nn.functional.linear(x, self.linear.weight)
        return self.linear(x)  # type: ignore[no-any-return]


class Compiled(nn.Module):
    """Four layers, compiled one by one, and a head of PyTorch's."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, 96, bias=False, dtype=torch.bfloat16, device="cuda")
        for block in self.blocks:
            block.compile()

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.gelu(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def open_session(
    folder: Path,
    model: nn.Module,
    recipes: Any,
    *,
    baseline: str | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    benchmark: bool = False,
    micro_batches: int = 1,
) -> tuple[Session, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = Options(
        recipes=recipes,
        baseline=baseline,
        settings=Settings(rounds=1, settle_steps=1, timed_steps=2, traced_steps=1),
        gemm_benchmark=benchmark,
        output_dir=str(folder),
        progress=False,
        recipe_arguments=arguments or {},
    )
    training = Training(model, torch.device("cuda"), "planted", [optimizer], micro_batches=micro_batches)
    return Session.open(options, training, lambda: None), optimizer  # `run` puts its step there


def run(session: Session, step: Callable[[], Any]) -> Report:
    """The whole sweep with these optimizer steps; no page, whose plots take seconds."""
    session.sweep.step = step
    session.run()
    facts = session.recorder.snapshot()
    # What fails of ours, or in a recipe, raises nothing.
    assert facts.of(End) == [End("finished")], facts.of(Problem)
    return analyze(facts)


def train(session: Session, optimizer: torch.optim.Optimizer, micro_batches: int = 1, first: bool = False) -> Report:
    """Go through the sweep as a plain loop does. `first`: TE is told which micro-batch of a step is the first."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    model, sweep = session.engine.model, session.sweep
    features = next(p.shape[-1] for p in model.parameters() if p.dim() == 2)

    def step() -> torch.Tensor:
        for index in range(micro_batches):
            x = torch.randn(BATCH, TOKENS, features, device="cuda", dtype=torch.bfloat16, generator=generator)
            options = {"is_first_microbatch": index == 0} if first else {}
            with sweep.region():
                loss = model(x.requires_grad_(), **options).float().square().mean()
            sweep.phase("backward")
            loss.backward()
            sweep.phase("")
        sweep.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run(session, step)


def profile(folder: Path, model: nn.Module, recipes: Any, **options: Any) -> Report:
    return train(*open_session(folder, model, recipes, **options))


def verdict(report: Report, name: str) -> Verdict:
    found = report.recipe(name).verdict
    assert found is not None
    return found


def rows(report: Report, name: str, word: str) -> dict[tuple[str, str], VerdictRow]:
    return {(row.module, row.role): row for row in verdict(report, name).rows if row.verdict == word}


def places(modules: list[str], roles: tuple[str, ...] = ROLES) -> set[tuple[str, str]]:
    return {(module, role) for module in modules for role in roles}


def told(report: Report, name: str) -> str:
    """All rows, for a failing assertion."""
    found = verdict(report, name)
    lines = [f"{r.module} {r.role} x{r.calls}: {r.verdict}: {r.ran}: {r.why} {r.witnesses}" for r in found.rows]
    return "\n".join([*lines, *found.disagreements])


# --- the clean model ------------------------------------------------------------------------------------------------


def test_a_clean_model_is_confirmed_whole_and_its_benchmark_fills_the_signature_book(tmp_path: Path) -> None:
    session, optimizer = open_session(tmp_path, Transformer(), None, benchmark=True)
    report = train(session, optimizer)
    facts = session.recorder.snapshot()
    for name in ("bf16", "fp8_delayed", "fp8_current", "fp8_block"):
        assert report.recipe(name).refusal is None
        found = verdict(report, name)
        assert found.te_coverage.value == pytest.approx(1.0), told(report, name)
        assert found.coverage.value == pytest.approx(1.0), told(report, name)
        assert not found.disagreements
        assert all({"operands", "kernels"} <= set(row.witnesses) for row in found.rows), told(report, name)
        times = [time for time in facts.of(GemmTime) if time.recipe == name and not time.failure]
        assert times
        assert all(time.kernels for time in times), [time for time in times if not time.kernels]
        ledger = report.recipe(name).ledger
        assert ledger is not None
        assert not any("were lost" in text for text in ledger.complaints)
    assert all(trace.expected_gemms == 2 * 4 * 3 for trace in facts.of(Trace))


# --- losses ---------------------------------------------------------------------------------------------------------


def test_two_blocks_outside_the_region_and_a_plain_head(tmp_path: Path) -> None:
    off = {1, 2}
    model = Stack(lambda index: te().autocast(enabled=False) if index in off else nullcontext())
    report = profile(tmp_path, model, ["fp8_current"])
    found = rows(report, "fp8_current", "by_request")
    assert set(found) == places(["blocks.1", "blocks.2"]), told(report, "fp8_current")
    assert all("outside the quantized region" in row.why for row in found.values())
    assert all(row.ran == "bf16 x bf16" for row in found.values())
    outside = rows(report, "fp8_current", "outside")
    assert set(outside) == places(["head"])
    assert all("nn.Linear" in row.why for row in outside.values())
    assert set(rows(report, "fp8_current", "confirmed")) == places(["blocks.0", "blocks.3"])
    assert set(rows(report, "bf16", "confirmed")) == places([*BLOCKS, "head"])


def test_a_wide_backward_pass_by_override(tmp_path: Path) -> None:
    arguments = {"fp8_current": {"backward_override": "high_precision"}}
    report = profile(tmp_path, Stack(), ["fp8_current"], arguments=arguments, benchmark=True)
    found = rows(report, "fp8_current", "by_request")
    assert set(found) == places(BLOCKS, ("dgrad", "wgrad")), told(report, "fp8_current")
    assert all("backward_override=high_precision" in row.why for row in found.values())
    assert set(rows(report, "fp8_current", "confirmed")) == places(BLOCKS, ("fprop",))
    assert not verdict(report, "fp8_current").disagreements


@pytest.mark.parametrize(
    ("own", "named"),
    [("fp8_block", "Float8BlockScaling"), ("fp8_current", "Float8CurrentScaling(fp8_format=E4M3)")],
    ids=["another class", "other flags"],
)
def test_a_region_of_the_models_own(tmp_path: Path, own: str, named: str) -> None:
    theirs = recipe(own, **({"fp8_format": "E4M3"} if own == "fp8_current" else {}))
    model = Stack(lambda index: te().autocast(enabled=True, recipe=theirs) if index == 2 else nullcontext())
    report = profile(tmp_path, model, ["fp8_current"])
    found = rows(report, "fp8_current", "fallback")
    assert set(found) == places(["blocks.2"]), told(report, "fp8_current")
    assert all(f"a region of its own, with {named}" in row.why for row in found.values()), told(report, "fp8_current")
    # The baseline is audited by the same rule: there the model's own region quantizes what should be BF16.
    baseline = rows(report, "bf16", "fallback")
    assert set(baseline) == places(["blocks.2"]), told(report, "bf16")
    assert any("Not what was asked, in bf16" in text for text in report.headline)


class Checkpointed(Stack):
    """Block 1 is computed again in backward."""

    def __init__(self, again: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.again = again

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.blocks[1], x) if index == 1 else self.blocks[index](x)


def test_a_reentrant_checkpoint_of_torch(tmp_path: Path) -> None:
    model = Checkpointed(lambda layer, x: checkpoint(layer, x, use_reentrant=True))
    report = profile(tmp_path, model, ["fp8_current"])
    found = rows(report, "fp8_current", "fallback")
    assert set(found) == places(["blocks.1"]), told(report, "fp8_current")
    assert all(row.why.startswith(RECOMPUTED) for row in found.values()), told(report, "fp8_current")
    confirmed = rows(report, "fp8_current", "confirmed")
    assert ("blocks.1", "fprop") in confirmed  # the first time
    assert confirmed["blocks.1", "fprop"].calls == found["blocks.1", "fprop"].calls == 1
    assert any(text.startswith("recomputation: 1 forward GEMM of blocks.1") for text in slow(report, "fp8_current"))


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed"])
def test_the_checkpoint_of_te_is_sound(tmp_path: Path, name: str) -> None:
    report = profile(tmp_path, Checkpointed(lambda layer, x: te().checkpoint(layer, x)), [name])
    confirmed = rows(report, name, "confirmed")
    assert set(confirmed) == places(BLOCKS), told(report, name)
    assert confirmed["blocks.1", "fprop"].calls == 2
    assert any("recomputation: 1 forward GEMM of blocks.1" in text for text in slow(report, name)), slow(report, name)
    assert any("ms a step" in text for text in slow(report, name) if "recomputation" in text), slow(report, name)


def test_flags_changed_on_a_live_model(tmp_path: Path) -> None:
    """The sweep has TE build its quantizers again; left to itself TE keeps those of the recipe's class."""
    card = tmp_path / "narrow.toml"
    card.write_text('name = "narrow"\ntitle = "E4M3"\nbased_on = "fp8_current"\n[arguments]\nfp8_format = "E4M3"\n')
    recipes = ["fp8_current", str(card)]
    sound = profile(tmp_path / "sound", Stack(), recipes)
    for name in ("fp8_current", "narrow"):
        assert set(rows(sound, name, "confirmed")) == places(BLOCKS), told(sound, name)
    session, optimizer = open_session(tmp_path / "kept", Stack(), recipes)
    session.engine.switch = lambda: None  # type: ignore[method-assign]
    report = train(session, optimizer)
    stale = [name for name in ("fp8_current", "narrow") if rows(report, name, "fallback")]
    assert len(stale) == 1, told(report, "narrow")
    found = rows(report, stale[0], "fallback")
    assert set(found) == places(BLOCKS), told(report, stale[0])
    assert all("its quantizers were built for Float8CurrentScaling(fp8_format=" in row.why for row in found.values())


def test_the_reference_of_nvfp4_runs_no_fp4_kernel(tmp_path: Path) -> None:
    report = profile(tmp_path, Stack(), str(ROOT / "examples" / "recipes" / "nvfp4_reference.toml"))
    part = report.recipe("nvfp4_reference")
    assert part.refusal is None, part.refusal
    found = rows(report, "nvfp4_reference", "fallback")
    assert set(found) == places(BLOCKS), told(report, "nvfp4_reference")
    for row in found.values():
        assert row.ran.startswith("e2m1 x e2m1, nvfp4-16, multiplied in "), row
        assert row.why.startswith("no NVFP4 kernel ran: the custom quantizer's own code multiplies"), row


def test_weights_that_are_stored_for_another_recipe(tmp_path: Path) -> None:
    init = getattr(te(), "quantized_model_init", None) or te().fp8_model_init
    with init(enabled=True, recipe=recipe("fp8_current")):
        model = Stack()
    assert any(hasattr(p, "_quantizer") for p in model.parameters())
    with pytest.raises(ProfilerError) as caught:
        open_session(tmp_path, model, ["fp8_block"], baseline="fp8_current")
    assert "stored for Float8CurrentScaling: blocks.0.weight, blocks.1.weight" in str(caught.value)
    assert "none of fprop, dgrad and wgrad of these modules can run in Float8BlockScaling" in str(caught.value)
    with pytest.raises(RuntimeError, match="Recipe mismatch"), te().autocast(enabled=True, recipe=recipe("fp8_block")):
        model(torch.randn(32, HIDDEN, device="cuda", dtype=torch.bfloat16))


def test_features_that_no_multiple_of_16_divides(tmp_path: Path) -> None:
    report = profile(tmp_path, Stack(sizes=(HIDDEN, HIDDEN, 200, HIDDEN)), None)
    for name in ("fp8_delayed", "fp8_current", "fp8_block"):
        refusal = report.recipe(name).refusal
        assert refusal is not None, name
        assert "200 input features, needs a multiple of 16): blocks.2" in refusal, refusal
    assert verdict(report, "bf16").te_coverage.value == pytest.approx(1.0), told(report, "bf16")


def test_tokens_that_no_multiple_of_16_divides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 102)  # 4 x 102 = 8 x 51
    report = profile(tmp_path, Stack(), None)
    for name in ("fp8_delayed", "fp8_current", "fp8_block"):
        refusal = report.recipe(name).refusal
        assert refusal is not None, name
        assert "blocks.0 (408 tokens, needs a multiple of 16)" in refusal, refusal
    assert verdict(report, "bf16").te_coverage.value == pytest.approx(1.0), told(report, "bf16")
    model = Stack()
    with te().autocast(enabled=True, recipe=recipe("fp8_current")):
        y = model(torch.randn(408, HIDDEN, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):  # it would have come out of the user's own step
        y.sum().backward()


# --- slow paths -----------------------------------------------------------------------------------------------------


def slow(report: Report, name: str) -> tuple[str, ...]:
    return verdict(report, name).slow_paths


def test_attention_made_unfused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    dot_product_attention._attention_backends["backend_selection_requires_update"] = True
    session, optimizer = open_session(tmp_path, Transformer(), ["fp8_current"])
    report = train(session, optimizer)
    dot_product_attention._attention_backends["backend_selection_requires_update"] = True
    for name in ("bf16", "fp8_current"):
        text = next(text for text in slow(report, name) if text.startswith("attention ran unfused"))
        assert "ms a step" in text
        assert "Disabling FusedAttention due to NVTE_FUSED_ATTN=0" in text, text
        beside = verdict(report, name).beside
        assert any("attention" in text and "bf16 x bf16" in text for text in beside), beside
        assert verdict(report, name).te_coverage.value == pytest.approx(1.0), told(report, name)
    chosen = session.recorder.snapshot().of(AttentionBackend)
    assert {fact.backend for fact in chosen} == {"UnfusedDotProductAttention"}


@pytest.mark.parametrize("first", [False, True], ids=["again each time", "once a step"])
def test_weights_quantized_in_each_micro_batch(tmp_path: Path, first: bool) -> None:
    session, optimizer = open_session(tmp_path, Transformer(), ["fp8_current"], micro_batches=2)
    report = train(session, optimizer, micro_batches=2, first=first)
    again = [text for text in slow(report, "fp8_current") if "quantized again in each of 2 micro-batches" in text]
    assert len(again) == (0 if first else 1), slow(report, "fp8_current")
    assert bool(session.recorder.snapshot().of(UncachedWeights)) is not first
    assert verdict(report, "fp8_current").te_coverage.value == pytest.approx(1.0), told(report, "fp8_current")


# --- what the callback makes of it ----------------------------------------------------------------------------------


class OwnRegion(LightningModule):
    """Its training step opens a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te().autocast(enabled=True, recipe=recipe("fp8_block")):
            return self.stack(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def test_a_fallback_fails_the_fit_when_all_is_restored(tmp_path: Path) -> None:
    callback = profiler(tmp_path, recipes=["fp8_current"], rounds=1, fail_on_fallback=True)
    model, original = OwnRegion(), load().tex.generic_gemm
    before = {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
    rows_ = torch.randn(60 * BATCH, TOKENS, HIDDEN).bfloat16()
    with pytest.raises(FallbackError) as caught:
        trainer(tmp_path, callback, steps=60, accelerator="gpu", precision="bf16-true").fit(
            model, DataLoader(rows_, batch_size=BATCH)
        )
    message = str(caught.value)
    assert "bf16: stack.blocks.* (4 modules), fprop, dgrad, wgrad: asked bf16 x bf16, ran e4m3 x e4m3" in message
    assert "fp8_current: stack.blocks.* (4 modules), fprop: asked e4m3 x e4m3, tensor-current" in message
    assert "a region of its own, with Float8BlockScaling" in message
    assert load().tex.generic_gemm is original
    assert "training_step" not in model.__dict__
    assert callback.report is not None
    for name, value in model.named_parameters():
        assert torch.equal(value.detach().cpu(), before[name]), name


class Domain:
    """An NVTX domain that keeps the path of each range, by thread."""

    def __init__(self) -> None:
        self.open: dict[int, list[str]] = {}
        self.paths: list[tuple[int, tuple[str, ...]]] = []

    def get_event_attributes(self, message: str, payload: int | None) -> str:
        return message

    def push_range(self, message: str) -> None:
        stack = self.open.setdefault(threading.get_ident(), [])
        stack.append(message)
        self.paths.append((threading.get_ident(), tuple(stack)))

    def pop_range(self) -> None:
        self.open[threading.get_ident()].pop()


def test_nvtx_ranges_down_to_the_gemm_on_autograds_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nvtx
    from transformer_engine.pytorch import utils

    domain = Domain()
    monkeypatch.setattr(nvtx, "get_domain", lambda _name: domain)
    monkeypatch.delenv("NVTE_NVTX_ENABLED", raising=False)
    utils._nvtx_enabled.cache_clear()  # as if no TE module had run
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = Options(
        recipes=["fp8_current"],
        settings=Settings(rounds=1, settle_steps=1, timed_steps=2, traced_steps=0, nvtx_steps=1),
        gemm_benchmark=False,
        output_dir=str(tmp_path),
        progress=False,
        nvtx=True,
    )
    session = Session.open(options, Training(model, torch.device("cuda"), "planted", [optimizer]), lambda: None)
    assert utils._nvtx_enabled()
    train(session, optimizer)
    assert not utils._nvtx_enabled()
    assert not any(domain.open.values())
    main = threading.get_ident()
    forward = ("fp8_current step", "forward", "module|forward|blocks.1", "gemm|fprop|blocks.1")
    assert (main, forward) in domain.paths
    for role in ("dgrad", "wgrad"):
        backward = [path for thread, path in domain.paths if path[-1] == f"gemm|{role}|blocks.1" and thread != main]
        assert backward == [("module|backward|blocks.1", f"gemm|{role}|blocks.1")] * 2  # of both recipes


# -- compiled code ---------------------------------------------------------------------------------------------------


def test_compiled_code_that_runs_no_fp8_is_named(tmp_path: Path) -> None:
    report = profile(tmp_path, Compiled([TwoPaths() for _ in range(4)]), ["bf16", "fp8_current"])
    found = verdict(report, "fp8_current")
    inside = [row for row in found.rows if row.module != "head"]
    assert {row.verdict for row in inside} == {"fallback"}, found.summary
    assert {row.ran for row in inside} == {"bf16"}
    assert found.te_coverage.value == 0.0
    assert not found.summary.startswith("All ")
    assert not any("faster" in sentence for sentence in report.headline[:1])
    assert verdict(report, "bf16").te_coverage.value == pytest.approx(1.0), verdict(report, "bf16").summary


def test_fp8_that_really_runs_in_compiled_code_is_confirmed(tmp_path: Path) -> None:
    layers: list[nn.Module] = [te().Linear(HIDDEN, HIDDEN, bias=False, **BF16) for _ in range(4)]
    report = profile(tmp_path, Compiled(layers), ["bf16", "fp8_current"])
    for name in ("bf16", "fp8_current"):
        found = verdict(report, name)
        assert found.te_coverage.value == pytest.approx(1.0), (name, found.summary, found.rows[0].why)
        assert found.summary.startswith("All ")
        assert "ran compiled" in found.rows[0].why
