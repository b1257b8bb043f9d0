"""cuBLASLt's own log on a real GPU: joined call by call, in the formats of the card, and silent before and after."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.analyze.library import agree, operands_of
from lowprec_callback.analyze.precision import Operands
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.measure import cublaslt_log
from lowprec_callback.measure.libraries import loaded_libraries
from lowprec_callback.measure.library_lines import read_cublaslt
from lowprec_callback.measure.library_log import LibraryListener
from lowprec_callback.measure.scopes import ModuleScopes
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.measure.trace import Tracer
from lowprec_callback.recording import LibraryCall, LibraryLog
from tests.fit.models import profiler
from tests.gpu.test_transformer_engine import (
    BF16,
    HOPPER_RECIPES,
    Block,
    K,
    M,
    N,
    batches,
    build,
    cards,
    engine_for,
    gpu_trainer,
    inputs,
    te,
)

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLASLT_LOG_LEVEL", "CUBLASLT_LOG_MASK"):
        monkeypatch.delenv(name, raising=False)


def watched(
    engine: Any, card: Any, step: Callable[[], torch.Tensor]
) -> tuple[GemmLog, LibraryLog, list[LibraryCall], Any]:
    """One forward and backward as the sweep's watched step does it: operands and the library's log."""
    log, library = GemmLog(engine.linear_layers()), LibraryListener(CUDA)
    scopes = ModuleScopes(engine.scoped_modules(), library.boundary, library.boundary)
    tracer = Tracer(CUDA, shapes=True)
    with ExitStack() as stack:
        tracer.start()
        stack.callback(tracer.stop)
        stack.enter_context(library.listen(scopes.current))
        with scopes.installed(), engine.watch(scopes.current, log.add_call, library.around):
            with engine.region(card):
                loss = step()
            loss.backward()
    for product in tracer.products():
        log.add_product(product)
    about, *calls = library.facts(card.name, log)
    return log, about, calls, engine  # type: ignore[return-value]


def run_quietly() -> None:
    """A product whose log nobody wants."""
    a = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.linear(a, a, a[0])
    torch.cuda.synchronize()


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "TransformerLayer", "ops"])
def test_every_entry_call_has_its_line_in_the_formats_of_its_operands(
    kind: str, recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    layer, step = build(kind)
    model = nn.ModuleDict({"layer": layer})
    (card,) = cards(recipe)
    log, about, calls, _ = watched(engine_for(model), card, step)
    assert about.silent is None, about
    assert about.libraries == ("cuBLASLt",)
    dispatches = log.dispatches(recipe)
    entered = Counter({(d.module, d.role): d.calls for d in dispatches if not d.entry.startswith("aten::")})
    heard = Counter()
    for call in calls:
        heard[call.module, call.role] += call.calls
    assert heard == entered, "as many lines as calls, each at its place"
    assert sum(entered.values()) == log.calls == sum(call.calls for call in calls)
    by_place = {(d.module, d.role): Operands.seen(d.weight_or_input, d.other) for d in dispatches}
    for call in calls:
        assert call.rows * call.inner * call.columns == call.m * call.k * call.n, call
        assert agree(by_place[call.module, call.role], operands_of(call)), (call, by_place[call.module, call.role])
        assert operands_of(call).formats == {"fprop": card.fprop, "dgrad": card.dgrad, "wgrad": card.wgrad}[call.role]
        assert call.function == "cublasLtMatmul"
    run_quietly()
    assert "cublasLt" not in capfd.readouterr().out


def test_block_scaling_shows_its_scale_modes() -> None:
    layer, step = build("Linear")
    (card,) = cards("fp8_block")
    _, _, calls, _ = watched(engine_for(nn.ModuleDict({"layer": layer})), card, step)
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("block scaling is emulated with MXFP8 here")
    modes = {call.role: (call.weight_or_input_scale, call.other_scale) for call in calls}
    square, vector = "BLK128x128_32F", "VEC128_32F"
    assert modes == {"fprop": (square, vector), "dgrad": (square, vector), "wgrad": (vector, vector)}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_a_grouped_layer_is_heard_group_by_group_or_not_at_all(recipe: str) -> None:
    """TE may hand groups to CUTLASS, which cuBLASLt's log knows nothing of."""
    layer, step = build("GroupedLinear")
    (card,) = cards(recipe)
    _, about, calls, _ = watched(engine_for(nn.ModuleDict({"layer": layer})), card, step)
    assert about.silent is None
    for call in calls:
        assert call.calls * call.rows * call.inner * call.columns == call.m * call.k * call.n, call


def test_a_plain_linear_beside_te_is_joined_by_its_sizes() -> None:
    model = nn.Sequential(te().Linear(K, N, **BF16), nn.Linear(N, 96, bias=False, dtype=torch.bfloat16, device="cuda"))
    (card,) = cards("fp8_current")
    _, about, calls, _ = watched(engine_for(model), card, lambda: model(inputs(M, K)).sum())
    plain = [call for call in calls if call.module == "1"]
    print(about, plain)
    assert {operands_of(call).formats for call in plain} <= {("bf16", "bf16")}
    assert {call.role for call in calls if call.module == "0"} == {"fprop", "dgrad", "wgrad"}


def test_plain_torch_under_autocast_is_heard_on_a_gpu_too() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).cuda()
    (card,) = cards("bf16")
    engine = PlainTorchEngine(model, CUDA, "a test")
    x = torch.randn(M, K, device="cuda", requires_grad=True)
    _, about, calls, _ = watched(engine, card, lambda: model(x).float().square().sum())
    print(about, calls)
    assert about.silent is None
    assert {operands_of(call).formats for call in calls} <= {("bf16", "bf16")}


def test_a_planted_bf16_layer_is_logged_as_bf16() -> None:
    class Planted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = te().Linear(K, N, **BF16), te().Linear(N, K, **BF16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.narrow(x)
            with te().autocast(enabled=False):
                out: torch.Tensor = self.wide(y)
            return out

    model = Planted()
    (card,) = cards("fp8_delayed")
    _, _, calls, _ = watched(engine_for(model), card, lambda: model(inputs(M, K)).sum())
    formats = {call.module: operands_of(call).formats for call in calls if call.role == "fprop"}
    assert formats == {"narrow": ("e4m3", "e4m3"), "wide": ("bf16", "bf16")}


def test_nothing_is_heard_or_printed_after_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[tuple[str, str]] = []

    def step() -> None:
        with cublaslt_log.listen(lambda *said: heard.append(said)):  # type: ignore[arg-type]
            run_quietly()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert any(read_cublaslt(*said) is not None for said in heard)
    before = len(heard)
    run_quietly()
    assert len(heard) == before
    assert "cublasLt" not in capfd.readouterr().out


def test_the_performance_trace_alone_would_do(capfd: pytest.CaptureFixture[str]) -> None:
    """Mask 2 should bring the same lines as level 5 without the API trace; if so, it could replace it."""
    heard: list[tuple[str, str]] = []
    libraries = [ctypes.CDLL(str(path)) for path in loaded_libraries("cublasLt")]
    with cublaslt_log.listen(lambda *said: heard.append(said)):  # type: ignore[arg-type]
        run_quietly()
        at_five = len(heard)
        for library in libraries:
            library.cublasLtLoggerSetMask(2)
        run_quietly()
    assert at_five > 0
    assert len(heard) == 2 * at_five
    assert "cublasLt" not in capfd.readouterr().out


def test_backward_on_autograds_thread_and_a_second_thread_are_kept_apart() -> None:
    layers = nn.ModuleDict({"a": te().Linear(K, N, **BF16), "b": te().Linear(K, N, **BF16)})
    engine = engine_for(layers)
    (card,) = cards("bf16")

    def step() -> torch.Tensor:
        outputs: dict[str, torch.Tensor] = {}

        def run(name: str) -> None:
            outputs[name] = layers[name](inputs(M, K)).sum()

        threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outputs["a"] + outputs["b"]

    _, _, calls, _ = watched(engine, card, step)
    assert Counter((call.module, call.role) for call in calls) == {
        (name, role): 1 for name in "ab" for role in ("fprop", "dgrad", "wgrad")
    }


def test_a_clean_models_report_has_three_witnesses_for_all_its_te_flops(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = profiler(tmp_path, rounds=1, traced_steps=1, recipes=list(HOPPER_RECIPES))
    gpu_trainer(tmp_path, callback, 60).fit(Block(), batches(60))
    assert callback.report is not None
    facts = callback.session.recorder.snapshot()  # type: ignore[union-attr]
    assert {log.recipe: log.silent for log in facts.of(LibraryLog)} == dict.fromkeys(HOPPER_RECIPES)
    for recipe in callback.report.recipes:
        verdict = recipe.verdict
        assert verdict is not None, recipe.name
        assert verdict.disagreements == (), recipe.name
        assert verdict.te_coverage.value == pytest.approx(1.0), verdict.summary
        for row in verdict.rows:
            if row.module != "head":
                assert {"operands", "library", "kernels"} <= set(row.witnesses), (recipe.name, row)
    said = capfd.readouterr().out
    assert "[cublasLt]" not in said
    print(said, facts.of(LibraryLog), [call for call in facts.of(LibraryCall) if call.module == "head"])
