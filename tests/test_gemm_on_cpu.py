"""`lowprec gemm` on a CPU, from the command line to its files: no clock's speed matters, only what is said."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lowprec_callback import cli
from lowprec_callback.recording import Gemm, Recorder

MODEL = (
    "--hidden_size 16 --intermediate_size 64 --num_attention_heads 2 --num_hidden_layers 3 --micro_batch_size 2 "
    "--sequence_length 8"
)
TOO_LARGE = f"8x{2**50}x8"
QUICK = "--budget 0.001 --device cpu"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 40,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("COLUMNS", "100")


def run(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    """Page and standard error, white space squeezed."""
    assert cli.main(["gemm", *line.split()]) == code
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), " ".join(captured.err.split())


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path("a.json").read_text())["rows"]
    return found


def test_a_model_in_fp32_and_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = run(f"{MODEL} {QUICK} -o a.png --json a.json --csv a.csv", capsys)
    assert page.startswith("model: hidden 16, 3 layers, 16 tokens (2 x 8)")
    for said in (
        "role-true, with the casts of autocast",
        "role-true, GEMM only",
        "fprop sum",
        "wgrad sum",
        "model, 3 layers",
        "the budget of 0.001 s was spent",
        "hot L2",
    ):
        assert said in page, said
    found = rows()
    assert {(row["recipe"], row["mode"], row["role"]) for row in found} == {
        (recipe, mode, role)
        for recipe in ("fp32", "bf16")
        for mode in ("kernel", "autocast")
        for role in ("fprop", "dgrad", "wgrad")
    }
    assert [(row["operation"], row["m"], row["k"], row["n"]) for row in found[::6][:4]] == [
        ("QKV", 16, 16, 48),
        ("attention out", 16, 16, 16),
        ("MLP up", 16, 16, 64),
        ("MLP down", 16, 64, 16),
    ]
    assert all(row["ms"] > 0 and row["tflops"] > 0 and row["reason"] is None for row in found)
    body = json.loads(Path("a.json").read_text())
    assert {row["sum"] for row in body["sums"]} == {"fprop", "dgrad", "wgrad", "layer", "model"}
    with Path("a.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 1 + len(found)
    with Image.open("a.png") as image:
        assert image.format == "PNG"


def test_one_mode_only(capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = run(f"{MODEL} {QUICK} --pre-quantize --json a.json", capsys)
    assert "autocast" not in page
    assert {row["mode"] for row in rows()} == {"kernel"}
    assert Path("gemm_benchmark.png").exists()


def test_listed_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = run(f"--shapes 8,16x8x24 {QUICK} --json a.json", capsys)
    assert page.startswith("2 shapes")
    assert "ms of one call, TFLOP/s, and the speedup over fp32" in page
    assert "layer" not in page.replace("every layer's", "")
    assert json.loads(Path("a.json").read_text())["sums"] == []


@pytest.mark.parametrize("content", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_a_config_file(content: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(content))
    page, _ = run(f"--config config.json --micro_batch_size 2 --sequence_length 8 {QUICK} --json a.json", capsys)
    assert page.startswith("config.json: hidden 16, 2 layers, 16 tokens (2 x 8)")
    assert page.index("outside the layers") < page.index("LM head fprop") < page.index("model, 2 layers")
    (qkv,) = {(row["k"], row["n"]) for row in rows() if row["operation"] == "QKV"}
    assert qkv == (16, (4 + 2 * 2) * 4)
    groups = {row["operation"]: row["groups"] for row in rows()}
    assert groups.get("experts up", 4) == 4


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(Path("run") / "recording.jsonl", "0", "now") as recorder:
        for layer in range(2):
            for role in ("fprop", "dgrad", "wgrad"):
                recorder.add(Gemm(f"blocks.{layer}.qkv", role, 16, 8, 24, 1, "nn.Linear", True))
        recorder.add(Gemm("head", "fprop", 16, 8, 32, 1, "nn.Linear", True))
    page, _ = run(f"--from-run run {QUICK} --json a.json", capsys)
    assert page.startswith("the GEMMs of run")
    assert "blocks.*.qkv" in page
    assert "model, 2 layers" in page
    assert page.count("head fprop") == 2
    assert "head dgrad" not in page  # a head whose input is frozen has none


def test_slow_alignment_is_told_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    page, err = run(f"--shapes 8x8x12 {QUICK} --recipes bf16", capsys)
    misfit = (
        "8x8x12 8x8x12 in bf16: slow path: BF16 GEMMs are slower off multiples of 8; "
        "what works: output features 12 -> 16 (n)"
    )
    assert misfit in page
    assert err.index(misfit) < err.index("lowprec: step")


def test_a_cold_cache_is_a_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = run(f"--shapes 8 {QUICK} --l2 cold", capsys)
    assert "l2: the L2 cache is only overwritten on a GPU; this run's caches were left alone" in page
    assert "cold L2" not in page


def test_a_gpus_recipe_has_no_place_here(capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = run(f"{MODEL} {QUICK} --recipes bf16,fp8_delayed --json a.json", capsys)
    assert page.count("fp8_delayed not run: needs a CUDA GPU, the device is cpu") == 1
    assert {row["recipe"] for row in rows()} == {"fp32", "bf16"}
    assert list(json.loads(Path("a.json").read_text())["not_run"]) == ["fp8_delayed"]


def test_without_a_recipe_that_can_run_nothing_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    page, err = run(f"{MODEL} {QUICK} --recipes fp8_delayed --json a.json", capsys, code=2)
    assert page == ""
    assert "fp8_delayed: needs a CUDA GPU, the device is cpu" in err
    assert not Path("a.json").exists()


def test_the_tutorials_own_method_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(f"{MODEL} --method te-tutorial --device cpu", capsys, code=2)
    assert "--method te-tutorial times Transformer Engine, which has no CPU" in err


def test_a_shape_too_large_keeps_its_rows_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Its operands are 2^55 bytes each, more than any machine can address."""
    page, _ = run(f"--shapes 8,{TOO_LARGE} {QUICK} --json a.json", capsys)
    failed = [row for row in rows() if row["reason"]]
    assert {row["operation"] for row in failed} == {TOO_LARGE}
    assert all(row["ms"] is None for row in failed)
    assert all(row["ms"] > 0 for row in rows() if row not in failed)
    assert "failed: " in page


def test_nothing_that_can_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    page, err = run(f"--shapes {TOO_LARGE} {QUICK}", capsys, code=1)
    assert "no shape ran" in page
    assert "no plot: no shape has a time" in err
