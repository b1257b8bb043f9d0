from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lowprec_callback.analyze.gap import closes
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import (
    Card,
    Dispatch,
    End,
    Environment,
    Fact,
    GemmTime,
    Loss,
    Plan,
    Problem,
    Recorder,
    Recording,
    Refusal,
    StepTime,
    Trace,
    read,
)
from lowprec_callback.report import Report, load_report

from .recordings import BF16, BF16_CARD, SEED_BF16, SEED_DELAYED, cpu_facts, dispatches, gpu_facts, te_linears

FACTS = gpu_facts()
REPORT = analyze(Recording.from_facts(FACTS))


def report_of(facts: list[Fact]) -> Report:
    return analyze(Recording.from_facts(facts))


def check(report: Report) -> None:
    """What holds for every Report, however much was measured."""
    report.to_json()
    for text in (*report.headline, *report.reading, *report.problems, report.plan):
        assert not re.search(r"\bNone\b", text), text
    assert report.headline
    for part in report.recipes:
        if part.gap is not None and part.gap.terms:
            assert closes(part.gap)
        if part.gap is not None and not part.gap.terms:
            assert part.gap.missing
        if part.refusal is None:
            assert (part.ledger is None) == (part.no_ledger is not None)
        if part.ledger is not None:
            ledger = part.ledger
            parts = [*ledger.buckets.values(), ledger.idle, ledger.residual]
            total = math.fsum(figure.value for figure in parts if figure.value is not None)
            assert total == pytest.approx(ledger.wall.value, rel=1e-9)


def test_a_whole_run() -> None:
    check(REPORT)
    assert [part.name for part in REPORT.recipes] == ["bf16", "fp8_delayed", "nvfp4"]
    assert (REPORT.status, REPORT.engine, REPORT.device) == ("finished", "transformer_engine", "NVIDIA H200")
    assert REPORT.restored == "yes: module, optimizer, rng (bit-identical)"
    assert REPORT.problems == ()
    fast = REPORT.recipe("fp8_delayed")
    assert fast.speedups is not None
    assert fast.speedups.step.value == pytest.approx(10 / 6.4, rel=1e-3)
    assert fast.speedups.kernel.value == pytest.approx((27 * 0.29) / (24 * 0.145 + 3 * 0.29))
    assert fast.peak_gb.value == pytest.approx(3.000000002)
    assert fast.loss.value == pytest.approx(3.8)
    assert fast.step_ms.n == 18
    assert fast.step_ms.facts[0].startswith("step_time lines ")
    assert [number for number, _ in fast.samples] == [0, 1, 2]
    assert fast.clocks is not None
    assert "sw_power_cap" in fast.clocks
    assert [row.tensor for row in fast.scales] == ["input", "weight"]
    assert fast.verdict is not None
    assert fast.verdict.te_coverage.value == pytest.approx(1.0)
    assert "kernels" in fast.verdict.rows[0].witnesses
    assert fast.ledger is not None
    assert fast.ledger.complete
    assert REPORT.recipe("nvfp4").refusal == "compute capability 9.0, needs 10.0 (te.is_nvfp4_available)"
    assert REPORT.headline[0] == "fp8_delayed makes a step 1.56x faster (10.0 -> 6.40 ms)."
    assert "2 layers x 4 linears x 3 roles" in REPORT.headline[2]


def test_the_baseline_compares_with_itself_as_one() -> None:
    base = REPORT.recipe("bf16")
    assert base.baseline
    assert base.gap is None
    assert base.speedups is not None
    assert [f.value for f in vars(base.speedups).values()] == [1.0] * 4
    assert base.verdict is not None
    assert base.verdict.coverage.value == pytest.approx(1.0)


def test_a_launch_bound_run_says_so_first() -> None:
    report = report_of(gpu_facts({"bf16": SEED_BF16, "fp8_delayed": SEED_DELAYED}))
    check(report)
    assert report.headline[0] == "FP8 makes this step slower: 0.75x (27.0 -> 35.9 ms)."
    assert "the host needs 35.6 ms to launch one FP8 step (26.4 in bf16)" in report.headline[1]
    assert "Launch-bound." in report.headline[1]


def test_a_cpu_run() -> None:
    report = report_of(cpu_facts())
    check(report)
    part = report.recipe("bf16")
    assert report.headline[0] == "bf16 makes a step 1.25x faster (100.0 -> 80.0 ms)."
    assert part.verdict is not None
    assert part.verdict.coverage.value == pytest.approx(1.0)
    assert set(part.verdict.rows[0].witnesses) == {"operands", "kernels"}
    assert part.peak_gb.reason == "memory is not recorded on a CPU"
    assert part.gap is not None
    assert part.gap.terms
    assert part.ledger is not None
    assert part.ledger.note is not None


@pytest.mark.parametrize("facts", [FACTS, cpu_facts()], ids=["gpu", "cpu"])
def test_every_prefix_makes_a_report(facts: list[Fact]) -> None:
    for length in range(1, len(facts) + 1):
        report = report_of(facts[:length])
        check(report)
        assert report.status == ("finished" if length == len(facts) else "interrupted")


def test_any_facts_may_be_missing() -> None:
    rng = random.Random(0)
    for _ in range(60):
        kept = [fact for fact in FACTS[1:] if rng.random() < rng.choice((0.2, 0.7, 0.95))]
        check(report_of([FACTS[0], *kept]))
    kinds = {type(fact) for fact in FACTS[1:]}
    for kind in kinds:
        check(report_of([fact for fact in FACTS if type(fact) is not kind]))


def test_an_interrupted_run_says_what_is_missing() -> None:
    upto = next(i for i, fact in enumerate(FACTS) if isinstance(fact, StepTime) and fact.round == 1)
    report = report_of(FACTS[: upto + 1])
    assert report.status == "interrupted"
    assert "Missing: timed steps (bf16 7 of 18, fp8_delayed 6 of 18)" in report.headline[-1]
    assert any("the run was killed" in text for text in report.problems)


def test_status_problems_and_torn_lines() -> None:
    facts = [*FACTS[:-1], Problem("trace", "kernels were lost"), End("shortened", "fit ended early")]
    report = analyze(Recording(Recording.from_facts(facts)._lines, torn="line 9: cut off"))
    assert report.status == "shortened"
    assert report.problems == ("trace: kernels were lost", "fit ended early", "line 9: cut off")
    failed = report_of([*FACTS[:-1], End("failed", "out of memory")])
    assert "The run failed (out of memory)" in failed.headline[-1]


def test_discarded_steps_do_not_count() -> None:
    odd = StepTime("fp8_delayed", 0, 99, 9999.0, 9999.0, discarded="a checkpoint was written")
    report = report_of([*FACTS[:-1], odd, FACTS[-1]])
    assert report.recipe("fp8_delayed").step_ms.n == 18
    assert report.problems == ("1 timed step of fp8_delayed do not count: a checkpoint was written",)


def test_a_recipe_given_up_midway_keeps_what_it_measured() -> None:
    report = report_of([*FACTS[:-1], Refusal("fp8_delayed", "out of memory", "round 2"), FACTS[-1]])
    assert report.recipe("fp8_delayed").refusal is None
    assert "fp8_delayed was given up after some steps: out of memory (round 2)" in report.problems


def test_a_loss_that_is_not_finite_voids_the_speed() -> None:
    facts = [replace(f, value=math.nan) if isinstance(f, Loss) and f.recipe == "fp8_delayed" else f for f in FACTS]
    report = report_of(facts)
    check(report)
    assert report.headline[0].startswith("fp8_delayed: the loss became nan, so its speed is void")
    assert report.recipe("fp8_delayed").loss.reason == "the loss is nan"


def test_a_fallback_of_all_is_the_first_sentence() -> None:
    bf16 = [replace(d, recipe="fp8_delayed") for d in dispatches("bf16", te_linears(1), BF16_CARD)]
    kept = [f for f in FACTS if not (isinstance(f, Dispatch) and f.recipe == "fp8_delayed")]
    kept = [f for f in kept if not (isinstance(f, Trace) and f.recipe == "fp8_delayed")]
    report = report_of([*kept, *bf16])
    assert report.headline[0].startswith("fp8_delayed is not shown to have run: ")
    assert "layers.0.self_attention.layernorm_qkv" in report.headline[0]


def test_backward_override_from_the_environment() -> None:
    wide = [
        replace(d, weight_or_input=other.weight_or_input, other=other.other) if d.role != "fprop" else d
        for d, other in zip(
            dispatches("fp8_delayed", te_linears(2)), dispatches("fp8_delayed", te_linears(2), BF16_CARD), strict=True
        )
    ]
    facts = [
        replace(f, variables={"NVTE_BACKWARD_OVERRIDE": "dequantized"}) if isinstance(f, Environment) else f
        for f in FACTS
        if not (isinstance(f, (Dispatch, Trace)) and f.recipe == "fp8_delayed")
    ]
    found = report_of([*facts, *wide]).recipe("fp8_delayed").verdict
    assert found is not None
    assert {row.verdict for row in found.rows if row.role != "fprop" and row.module != "lm_head"} == {"by_request"}


def test_a_malformed_trace_is_left_out_with_a_word() -> None:
    facts = [replace(f, stream=(), start_us=()) if isinstance(f, Trace) else f for f in FACTS]
    report = report_of(facts)
    check(report)
    assert report.recipe("bf16").no_ledger == "no traced step was recorded"
    assert "cannot be used: its columns have unequal lengths" in report.problems[0]


def test_only_a_header() -> None:
    report = report_of(FACTS[:1])
    check(report)
    assert report.recipes == ()
    assert report.headline[0].startswith("Nothing was measured yet")


def test_no_plan_and_a_baseline_by_its_card() -> None:
    report = report_of([fact for fact in FACTS if not isinstance(fact, (Plan, GemmTime))])
    assert report.baseline == "bf16"
    part = report.recipe("fp8_delayed")
    assert part.speedups is not None
    assert part.speedups.kernel.reason == "no GEMM benchmark of bf16 was recorded"
    assert part.gap is not None
    assert "no complete kernel-only benchmark" in part.gap.terms[0].note


def test_the_report_survives_its_file_and_the_recordings(tmp_path: Path) -> None:
    with Recorder(tmp_path / "recording.jsonl", "0.1.0", FACTS[0].created) as recorder:  # type: ignore[attr-defined]
        recorder.add(*FACTS[1:])
    again = analyze(read(tmp_path))
    assert replace(again, recording=None) == REPORT
    again.save(tmp_path / "report.json")
    assert load_report(tmp_path) == again


def test_it_is_deterministic() -> None:
    assert report_of(FACTS) == REPORT
    assert isinstance(FACTS[3], Card)
    assert BF16.step_ms == 10.0


def test_neither_torch_nor_te_is_imported() -> None:
    code = (
        "import sys; import lowprec_callback.analyze.summary; "
        "print([name for name in ('torch', 'transformer_engine') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_time_that_no_gpu_can_reach_promises_nothing() -> None:
    """A hundredth of a microsecond for a GEMM: the sum that it is in is missing, with that reason."""
    facts = [
        replace(fact, samples_ms=(1e-5,) * 6) if isinstance(fact, GemmTime) and fact.recipe == "fp8_delayed" else fact
        for fact in gpu_facts()
    ]
    part = analyze(Recording.from_facts(facts)).recipe("fp8_delayed")
    assert part.gemm_kernel_ms.value is None
    assert "peak" in (part.gemm_kernel_ms.reason or "")
    assert part.speedups is not None
    assert part.speedups.kernel.value is None
