"""Two GPUs that train one model of Transformer Engine over NCCL: lockstep, gathered measurements, restore of shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowprec_callback import load_report
from lowprec_callback.recording import End, GemmTime, RankSummary, Refusal, read
from tests.fit.ranks_script import TRAINED
from tests.fit.test_ranks_in_fit import ROOT, environment, run_folder

RECIPES = ["bf16", "fp8_delayed", "fp8_current"]

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, here are {torch.cuda.device_count()}"),
    pytest.mark.timeout(400),
]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_two_gpus_sweep_in_lockstep_and_get_everything_back(tmp_path: Path, strategy: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.gpu.ranks_script", strategy, str(tmp_path)],
        env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=360,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"outcome-{rank}.json").read_text())
        assert found == {"same": True, "done": True, "report": rank == 0, "steps": TRAINED}

    run = run_folder(tmp_path / "runs")
    facts, report = read(run), load_report(run)
    assert facts.of(End) == [End("finished")]
    assert not facts.of(Refusal)
    assert not [fact for fact in facts.of(GemmTime) if fact.failure]
    both = facts.of(RankSummary)
    assert [each.rank for each in both] == [0, 1]
    for each in both:
        assert list(each.recipes) == RECIPES
        assert not each.problems
        for part in each.recipes.values():
            assert [len(samples) for _, samples in part.rounds] == [4, 4]
            assert [len(samples) for _, samples in part.forward] == [4, 4]
            assert part.peak_bytes
            assert part.sm_mhz
            assert part.host_ms
            assert part.gemm_ms
            assert part.communication_ms is not None
    assert report.ranks is not None
    assert (report.ranks.world, report.ranks.heard, report.ranks.hosts) == (2, 2, 1)
    for part in report.recipes:
        # Both wait for each other in every step, so their steps are equally long.
        (step,) = [row for row in report.ranks.rows[part.name] if row.quantity == "step"]
        assert step.best.value == pytest.approx(step.worst.value, rel=0.1)
        assert part.step_ms.value == pytest.approx(step.worst.value)
        assert part.ledger is not None
        assert part.ledger.buckets["communication"].value is not None
        assert part.verdict is not None
        assert part.verdict.te_coverage.value == pytest.approx(1.0), part.verdict.summary
    # NCCL's kernels were seen at all.
    assert any(part.communication_ms for part in both[0].recipes.values())
