"""Running the shape-level benchmark on a CPU: which facts come, whatever happens, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback import gemm_run, recording
from lowprec_callback.cli import main
from lowprec_callback.engines.base import NotRun
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.gemm_run import Order, engine_for_shapes, execute
from lowprec_callback.measure.gemms import Sampling
from lowprec_callback.measure.layer_bench import Conditions
from lowprec_callback.recipes import RecipeCard, load_cards
from lowprec_callback.recording import (
    ROLES,
    Card,
    End,
    Environment,
    Gemm,
    GemmRun,
    GemmTime,
    Model,
    Problem,
    Refusal,
)

CARDS = load_cards()
CPU = torch.device("cpu")
GEMMS = tuple(Gemm("QKV", role, 8, 16, 24, calls=1, family="Linear", quantizable=True) for role in ROLES)


def order(**changes: Any) -> Order:
    values: dict[str, Any] = {
        "name": "a test",
        "gemms": GEMMS,
        "cards": (CARDS["fp32"], CARDS["bf16"]),
        "sampling": Sampling(rounds=2),
        **changes,
    }
    return Order(**values)


class Engine(PlainTorchEngine):
    """Refuses what it is told to."""

    def __init__(self, refused: str = "") -> None:
        super().__init__(nn.Module(), CPU, "a test")
        self.refused = refused

    def refusal(self, card: RecipeCard) -> NotRun | None:
        return NotRun("not today", "a test") if card.name == self.refused else super().refusal(card)


def test_the_facts_of_a_run(tmp_path: Path) -> None:
    execute(order(), Engine(), tmp_path)
    facts = recording.read(tmp_path)
    kinds = [type(fact) for fact in facts]
    assert kinds[1:5] == [Environment, Model, Card, Card]
    assert facts.of(Gemm) == list(GEMMS)
    times = facts.of(GemmTime)
    assert {(t.recipe, t.role, t.mode) for t in times} == {
        (recipe, role, mode) for recipe in ("fp32", "bf16") for role in ROLES for mode in recording.MODES
    }
    assert all(len(t.samples_ms) == 2 and t.failure is None for t in times)
    (run,) = facts.of(GemmRun)
    assert (run.method, run.rounds, run.stopped, run.cold_l2) == ("role-true", 2, "rounds", False)
    assert facts.last(End) == End("finished")
    assert kinds[-1] is End


def test_without_its_baseline_nothing_is_timed(tmp_path: Path) -> None:
    facts = execute(order(), Engine("fp32"), tmp_path).snapshot()
    assert facts.of(GemmTime) == []
    assert facts.of(Refusal) == [Refusal("fp32", "not today", "a test")]
    assert facts.last(End) == End("failed", "the baseline fp32 cannot run here")


def test_a_refused_recipe_leaves_the_others(tmp_path: Path) -> None:
    facts = execute(order(), Engine("bf16"), tmp_path).snapshot()
    assert {time.recipe for time in facts.of(GemmTime)} == {"fp32"}
    assert facts.last(End) == End("finished")


def test_an_interrupt_leaves_a_closed_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm_run, "benchmark", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(order(), Engine(), tmp_path)
    assert recording.read(tmp_path).last(End) == End("interrupted", "KeyboardInterrupt")


def test_a_cpu_has_no_l2_to_overwrite_and_says_so(tmp_path: Path) -> None:
    sampling = Sampling(rounds=1, conditions=Conditions(cold_l2=True))
    facts = execute(order(sampling=sampling), Engine(), tmp_path).snapshot()
    (run,) = facts.of(GemmRun)
    assert run.cold_l2 is False
    assert [problem.where for problem in facts.of(Problem)] == ["l2"]


def test_the_published_method_needs_transformer_engine(tmp_path: Path) -> None:
    facts = execute(order(methods=("te-tutorial",)), Engine(), tmp_path).snapshot()
    assert facts.of(GemmTime) == []
    (problem,) = facts.of(Problem)
    assert "needs Transformer Engine" in problem.message


def test_only_transformer_engine_has_torch_beside_it(tmp_path: Path) -> None:
    facts = execute(order(), Engine(), tmp_path).snapshot()
    assert gemm_run.BESIDE not in {time.recipe for time in facts.of(GemmTime)}


def test_the_engine_for_shapes_on_a_cpu() -> None:
    engine = engine_for_shapes(CPU)
    assert (engine.name, engine.why) == ("plain_torch", "the benchmark runs on cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_callback.measure.layer_bench.SAMPLE_MS", 0.0)
    monkeypatch.setattr(gemm_run, "MOST_ROUNDS", 6)


def test_the_command_from_options_to_files(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("out.json", "out.csv", "out.png")}
    arguments = ["gemm", "--shapes", "32,16x8x24", "--device", "cpu", "--json", str(files["out.json"])]
    assert main([*arguments, "--csv", str(files["out.csv"]), "-o", str(files["out.png"])]) == 0
    assert all(file.stat().st_size > 0 for file in files.values())
    rows = json.loads(files["out.json"].read_text())["rows"]
    assert {row["recipe"] for row in rows} == {"fp32", "bf16"}
    assert "16x8x24" in capsys.readouterr().out


def test_a_machine_without_a_gpu_that_is_asked_for_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gemm", "--shapes", "32", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_recipe_that_this_engine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["gemm", "--shapes", "32", "--device", "cpu", "--recipes", "fp8_current"]) == 2
    assert "fp8_current: needs a CUDA GPU, the device is cpu" in capsys.readouterr().err
