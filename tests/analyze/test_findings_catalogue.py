"""Every code of the catalogue once by a run that has it and once by one that has not; and the page that lists them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lowprec_callback.analyze.findings import CATALOGUE
from lowprec_callback.recording import (
    ROLES,
    AttentionBackend,
    Dispatch,
    Fact,
    Gemm,
    GemmTime,
    Memory,
    Plan,
    Scales,
    Trace,
    UncachedWeights,
)
from lowprec_callback.report import Finding

from . import memory_steps
from .recordings import ADAM, BF16, BF16_CARD, DELAYED, DELAYED_CARD, Kernel, dispatch, gpu_facts, step_kernels, trace
from .test_findings import (
    LINEARS,
    NCCL,
    PLAIN,
    SEED,
    attention_heavy,
    changed,
    found,
    late,
    report_of,
    slower,
    steps,
    throttled,
    waiting,
    with_kernels,
    without_te,
)
from .test_findings_host import TO_BF16, before_the_optimizer, short, spaced
from .test_ranks import summary

DOCUMENT = Path(__file__).parents[2] / "docs" / "findings.md"
CODES = [code for key in CATALOGUE for code in key.split(", ")]


def planned(**changes: object) -> list[Fact]:
    return changed(PLAIN, lambda fact: replace(fact, **changes) if isinstance(fact, Plan) else fact)  # type: ignore[arg-type]


def outside(fact: Fact) -> Fact:
    inside = isinstance(fact, Gemm) and fact.module == "layers.1.layernorm_mlp.fc2"
    return replace(fact, quantizable=False, family="nn.Linear") if inside and isinstance(fact, Gemm) else fact


def wide_head(fact: Fact) -> Fact:
    return replace(fact, n=50257) if isinstance(fact, Gemm) and fact.module == "lm_head" else fact


def odd(fact: Fact) -> Fact:
    return replace(fact, n=90) if isinstance(fact, Gemm | GemmTime | Dispatch) and fact.n == 96 else fact


def more_memory(fact: Fact) -> Fact:
    up = isinstance(fact, Memory) and fact.recipe == "fp8_delayed"
    return replace(fact, peak=4 * 10**9) if up and isinstance(fact, Memory) else fact


def scales(gradient: float) -> list[Fact]:
    """Of the first module: what its input and its output gradient are scaled by."""
    module = LINEARS[0].module
    forward = Scales("fp8_delayed", module, "fwd", ("gemm0.input",), (16.0,), (3.0,), (4.0,), 1024)
    backward = Scales("fp8_delayed", module, "bwd", ("gemm0.grad_output",), (gradient,), (0.1,), (0.2,), 1024)
    return [*PLAIN, forward, backward]


RECOMPUTED = replace(dispatch("fp8_delayed", LINEARS[0], "fprop", DELAYED_CARD), recomputed=True)
MADE: dict[str, tuple[str, Callable[[], Sequence[Fact]]]] = {
    "launch-bound": ("fp8_delayed", lambda: gpu_facts(speeds=SEED)),
    "launch-starved": ("fp8_delayed", lambda: spaced(short, 7.6, 4.6)),
    "host-stall": ("fp8_delayed", lambda: spaced(before_the_optimizer(9000.0), 15.0, 14.9)),
    "data-wait": ("fp8_delayed", lambda: changed(gpu_facts(speeds=SEED), lambda fact: late(fact, 12_000.0))),
    "synchronization": ("fp8_delayed", lambda: changed(gpu_facts(speeds=SEED), waiting)),
    "straggler": ("", lambda: [*PLAIN, *(summary(rank, forward=36.0 if rank == 3 else 30.0) for rank in range(8))]),
    "communication-exposed": ("fp8_delayed", lambda: with_kernels([Kernel(NCCL, 20.0)] * 20)),
    "optimizer-share": (
        "bf16",
        lambda: with_kernels([Kernel(ADAM, 1500.0, phase="optimizer")], "bf16", replace(BF16, step_ms=11.0)),
    ),
    "casts-from-fp32": ("bf16", lambda: with_kernels([Kernel(TO_BF16, 400.0, phase="forward")], "bf16", BF16)),
    "*-dominates": ("bf16", lambda: attention_heavy(2800.0)),
    "attention-unfused": (
        "fp8_delayed",
        lambda: [*PLAIN, AttentionBackend("fp8_delayed", "UnfusedDotProductAttention")],
    ),
    "recompute": ("fp8_delayed", lambda: [*PLAIN, RECOMPUTED]),
    "quantization-cost": (
        "fp8_delayed",
        lambda: gpu_facts(speeds={"bf16": BF16, "fp8_delayed": replace(DELAYED, cast_us=80.0, step_ms=8.0)}),
    ),
    "quantization-outweighs-gemm": ("fp8_delayed", lambda: slower("proj", 0.2, 0.4)),
    "gemm-not-faster": ("fp8_delayed", lambda: slower("proj", 0.35, 0.4)),
    "weight-requantized": (
        "fp8_delayed",
        lambda: [*planned(micro_batches=4), UncachedWeights("fp8_delayed", ("layers.0.fc1",))],
    ),
    "head-outside": ("bf16", lambda: changed(PLAIN, wide_head)),
    "layers-outside": ("bf16", lambda: changed(PLAIN, outside)),
    "no-te-layers": ("bf16", without_te),
    "gemm-slower-in-step": (
        "fp8_delayed",
        lambda: gpu_facts(speeds={"bf16": BF16, "fp8_delayed": replace(DELAYED, gemm_us=180.0, step_ms=7.0)}),
    ),
    "throttled": ("fp8_delayed", lambda: throttled("power cap", 3)),
    "padding": ("bf16", lambda: changed(PLAIN, odd)),
    "memory-up": ("fp8_delayed", lambda: changed(PLAIN, more_memory)),
    "gradient-scales-frozen": ("fp8_delayed", lambda: scales(1.0)),
    "noise": ("fp8_delayed", lambda: steps({"bf16": 10.0, "fp8_delayed": 9.9}, 0.2)),
    "sweep-too-short": ("", lambda: planned(shrunk="the fit has 20 training steps and the full plan takes 40")),
}
"""The recipe that each finding is about, and a run that has it. `PLAIN`, in which nothing is wrong, has none."""


def test_every_code_has_a_run_that_has_it() -> None:
    assert sorted(MADE) == sorted(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_found_where_it_is_and_not_where_it_is_not(code: str) -> None:
    recipe, facts = MADE[code]
    named = code.replace("*", "attention")
    one = found(facts(), named, recipe)
    assert one is not None
    assert one.ms.value is None or one.ms.value > 0
    assert named not in {each.code for each in report_of(PLAIN).findings}


def test_gradient_scales_that_stand_still() -> None:
    one = found(scales(1.0), "gradient-scales-frozen")
    assert one is not None
    assert LINEARS[0].module in one.sentence
    assert "inputs by 16" in one.evidence[0]
    assert one.ms.value is None
    assert found(scales(128.0), "gradient-scales-frozen") is None
    # Where nothing moved at all, the numerics guard says it.
    still = [replace(f, scale=(1.0,) * len(f.scale)) if isinstance(f, Scales) else f for f in scales(1.0)]
    assert found(still, "gradient-scales-frozen") is None


def test_the_kernels_of_a_slow_shape_are_named() -> None:
    one = found(slower("proj", 0.35, 0.4), "gemm-not-faster")
    assert one is not None
    assert any("in fp8_delayed: nvjet_sm90_q" in row for row in one.evidence)
    assert any("in bf16: nvjet_sm90_tst" in row for row in one.evidence)


def test_gemms_that_did_not_run_as_asked_are_the_reason_for_being_slower_than_on_the_bench() -> None:
    ran = {(lin.module, role): dispatch("fp8_delayed", lin, role, BF16_CARD) for lin in LINEARS for role in ROLES}
    wide = trace("fp8_delayed", step_kernels("bf16", LINEARS, 300.0), 13.0, expected=27)

    def fallen(fact: Fact) -> Fact:
        if isinstance(fact, Dispatch) and fact.recipe == "fp8_delayed":
            return ran[fact.module, fact.role]
        return wide if isinstance(fact, Trace) and fact.recipe == "fp8_delayed" else fact

    slow = {"bf16": BF16, "fp8_delayed": replace(DELAYED, step_ms=10.0)}
    one = found(changed(gpu_facts(speeds=slow), fallen), "gemm-slower-in-step")
    assert one is not None
    assert "98% of their FLOPs ran in another precision" in one.sentence
    assert f"explains about {24 * (0.29 - 0.145):.2f} ms" in one.sentence
    assert "no cause" not in one.advice
    hot = found(MADE["gemm-slower-in-step"][1](), "gemm-slower-in-step")
    assert hot is not None
    assert "another precision" not in hot.sentence


def test_no_bucket_dominates_a_step_that_waits_for_the_host() -> None:
    short = replace(BF16, gemm_us=10.0, kernel_ms=0.01, autocast_ms=0.01, step_ms=1.6)
    assert found(gpu_facts(speeds={"bf16": replace(short, host_ms=1.0)}), "attention-dominates", "bf16") is not None
    idle = replace(short, step_ms=12.0)
    assert found(gpu_facts(speeds={"bf16": replace(idle, host_ms=11.9)}), "attention-dominates", "bf16") is None
    # Nor one that waits for anything else: 0.5 ms of attention do not dominate 10 ms in which nothing runs.
    assert found(gpu_facts(speeds={"bf16": idle}), "attention-dominates", "bf16") is None


def test_memory_that_is_still_held_after_backward() -> None:
    def told(more: memory_steps.Step) -> Finding | None:
        watched = [*memory_steps.facts(memory_steps.Step(), "bf16"), *memory_steps.facts(more, "fp8_delayed")]
        return found(
            [*changed(PLAIN, more_memory), *(fact for fact in watched if not isinstance(fact, Dispatch))], "memory-up"
        )

    kept = told(memory_steps.Step(others=10**9))
    assert kept is not None
    assert kept.advice.startswith("It is still held when backward is over")
    assert any(row.startswith("not attributed after backward: +1 GB") for row in kept.evidence)
    passing = told(memory_steps.Step(temporary=10**9))
    assert passing is not None
    assert "still held" not in passing.advice


def test_quantization_is_told_with_its_kernels() -> None:
    one = found(MADE["quantization-cost"][1](), "quantization-cost")
    assert one is not None
    assert "24 kernels a step do it" in one.evidence


# --- The page ---------------------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    text = DOCUMENT.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_page_lists_exactly_the_catalogues_codes() -> None:
    table = rows("The catalogue")
    assert [row[0].strip("`") for row in table] == CODES
    assert all(len(row) == 4 and all(row) for row in table)


def test_the_page_names_no_finding_that_is_not_there() -> None:
    table = rows("Reports of users")
    assert len(table) > 50
    named = [code for row in table for code in re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", row[-1])]
    dominates = {code for code in named if code.endswith("-dominates")}
    assert named
    assert set(named) - dominates <= set(CODES)
    assert all(len(row) == 3 and all(row) for row in table)
    assert all(re.search(r"https://", row[1]) for row in table)
