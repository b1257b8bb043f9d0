"""Captures taken on a real GPU: what torch.profiler and Nsight Systems saw of TE's layers is what ran."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowprec_callback.cli import main
from lowprec_callback.engines.transformer_engine import load
from lowprec_callback.report import RecipeReport, Report, Verdict, load_report
from tests.gpu.test_planted import open_session, run

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from lowprec_callback.engines.transformer_engine import load
te = load().te
from transformer_engine.common.recipe import Float8CurrentScaling
model = torch.nn.Sequential(*(te.Linear(512, 512, params_dtype=torch.bfloat16) for _ in range(2)))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
autocast = getattr(te, "autocast", None)
def region():
    recipe = Float8CurrentScaling()
    return autocast(enabled=True, recipe=recipe) if autocast else te.fp8_autocast(enabled=True, fp8_recipe=recipe)
def step():
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    with region():
        y = model(x)
    y.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(3):
    step()
torch.cuda.synchronize()
if sys.argv[1] == "profiler":
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    p.export_chrome_trace(sys.argv[2])
else:
    import nvtx
    torch.cuda.profiler.start()
    for i in range(4):
        with nvtx.annotate("fp8_current step", domain="lowprec", payload=i):
            step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
"""


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")


def verdict_of(file: str) -> Verdict:
    assert main(["nsys", file, "--output-dir", "out"]) == 0
    (folder,) = Path("out").iterdir()
    found = load_report(folder).recipe("fp8_current")
    assert found.ledger is not None
    assert found.verdict is not None
    return found.verdict


def check(verdict: Verdict) -> None:
    """Two layers, each with one product forward and two backward (the first needs no dgrad), all in FP8."""
    inside = [row for row in verdict.kernels if row.verdict != "outside"]
    assert {row.verdict for row in inside} == {"confirmed"}
    assert sum(row.kernels for row in inside) in (5, 6)
    assert {row.ran for row in inside} == {"e4m3 x e4m3", "e4m3 x e5m2"}


def test_torch_profiler(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "script.py", "profiler", "trace.json"], check=True)
    check(verdict_of("trace.json"))


def test_nsight_systems(tmp_path: Path) -> None:
    if shutil.which("nsys") is None:
        pytest.skip("nsys is not on the PATH")
    assert main(["nsys", "--command", "--run", "--", sys.executable, "script.py", "nsys"]) == 0
    verdict = verdict_of("lowprec.nsys-rep")
    check(verdict)
    assert {row.where for row in verdict.kernels if row.verdict == "confirmed"} <= {"fprop", "dgrad", "wgrad"}


def test_the_callbacks_own_ranges_under_nsight_systems(tmp_path: Path) -> None:
    """A profile under nsys: every recipe is found by its ranges, each GEMM in its module and role, and as asked."""
    if shutil.which("nsys") is None:
        pytest.skip("nsys is not on the PATH")
    train = str(ROOT / "examples" / "mini_gpt" / "train.py")
    options = ["--preset", "seed", "--profile-only", "--rounds", "1", "--recipes", "fp8_delayed,fp8_current"]
    assert main(["nsys", "--command", "--run", "--", sys.executable, train, *options]) == 0
    assert main(["nsys", "lowprec.nsys-rep", "--output-dir", "out"]) == 0
    (folder,) = Path("out").iterdir()
    report = load_report(folder)
    assert {part.name for part in report.recipes} == {"bf16", "fp8_delayed", "fp8_current"}
    for part in report.recipes:
        assert part.verdict is not None
        assert part.ledger is not None
        inside = [
            row for row in part.verdict.kernels if row.where in ("fprop", "dgrad", "wgrad") and "head" not in row.module
        ]
        assert {row.verdict for row in inside} == {"confirmed"}
        assert {row.where for row in inside} == {"fprop", "dgrad", "wgrad"}
        # Each layer under its own path, not under its class.
        assert len({row.module for row in inside}) > 4
        assert part.gap is None or part.gap.missing is None


RECORDED = ROOT / "tests" / "data" / "h200" / "nsys_transformer_layer_fp8_delayed.sqlite.gz"
"""Three steps of one `te.TransformerLayer` (1024 / 4096 / 16 heads, 8 x 512 tokens, attention unfused), recorded on an
H200 on another day, with no optimizer in them."""


def imported(folder: Path) -> RecipeReport:
    (folder / "export.sqlite").write_bytes(gzip.decompress(RECORDED.read_bytes()))
    assert main(["nsys", str(folder / "export.sqlite"), "--output-dir", str(folder / "imported")]) == 0
    (run,) = (folder / "imported").iterdir()
    return load_report(run).recipe("fp8_delayed")


def in_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The same model under the sweep, in a loop without an optimizer; gradients are added to those that are there."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layer = load().te.TransformerLayer(
        1024, 4096, 16, fuse_qkv_params=True, attn_input_format="bshd", params_dtype=torch.bfloat16, device="cuda",
        **dropout,
    )  # fmt: skip
    session, _ = open_session(folder / "runs", layer, ["fp8_delayed"])
    x = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> torch.Tensor:
        with session.sweep.region():
            loss = layer(x).sum()
        session.sweep.phase("backward")
        loss.backward()
        session.sweep.phase("")
        return loss

    return run(session, step)


def test_the_recorded_export_says_what_a_trace_in_process_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the export was recorded on an H200: another GPU takes other times")
    export, own = imported(tmp_path), in_process(tmp_path, monkeypatch).recipe("fp8_delayed")
    assert export.ledger is not None
    assert export.verdict is not None
    assert own.ledger is not None
    assert own.verdict is not None

    assert {row.verdict for row in export.verdict.kernels} == {row.verdict for row in own.verdict.rows} == {"confirmed"}
    assert sum(row.kernels for row in export.verdict.kernels) == sum(row.calls for row in own.verdict.rows) == 12
    # A name does not tell how values were scaled; operands do.
    assert {f"{row.ran}, tensor-delayed" for row in export.verdict.kernels} == {row.ran for row in own.verdict.rows}
    assert any("unfused" in path for path in export.verdict.slow_paths)
    assert any("unfused" in path for path in own.verdict.slow_paths)

    times = {name: (figure.value, own.ledger.buckets[name].value) for name, figure in export.ledger.buckets.items()}
    print("export, in process [ms]:", times)
    assert {name for name, (there, _) in times.items() if there} >= {"gemm", "quantize", "scale", "attention", "norm"}
    for name, (there, here) in times.items():
        assert here == pytest.approx(there, rel=0.15, abs=0.01), name
