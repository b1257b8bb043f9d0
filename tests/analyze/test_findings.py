"""The catalogue: each finding once where its condition holds, and not where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.finding_case import Case
from lowprec_callback.analyze.findings import CATALOGUE, findings
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import (
    AttentionBackend,
    Clocks,
    Dispatch,
    Environment,
    Fact,
    Gemm,
    GemmTime,
    HostWaits,
    Loss,
    Memory,
    Model,
    Plan,
    Recording,
    StepTime,
    Trace,
    UncachedWeights,
)
from lowprec_callback.report import Figure, Finding, RecipeReport, Report, load_report

from . import memory_steps
from .recordings import (
    ADAM,
    BF16,
    DELAYED,
    DELAYED_CARD,
    GEMM_NAMES,
    SEED_BF16,
    SEED_DELAYED,
    SOFTMAX,
    Kernel,
    Speeds,
    cpu_facts,
    dispatch,
    gpu_facts,
    step_kernels,
    te_linears,
    timed,
    trace,
)

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LINEARS = te_linears(2)
Change = Callable[[Fact], Fact | None]


PLAIN = tuple(gpu_facts())
"""A run in which nothing is wrong."""


@cache
def plain_report() -> Report:
    return analyze(Recording.from_facts(PLAIN))


def report_of(facts: Sequence[Fact]) -> Report:
    return plain_report() if facts is PLAIN else analyze(Recording.from_facts(facts))


def found(facts: Sequence[Fact], code: str, recipe: str = "fp8_delayed") -> Finding | None:
    """The finding of this code about this recipe; at most one."""
    same = [each for each in report_of(facts).findings if (each.code, each.recipe) == (code, recipe)]
    assert len(same) <= 1
    for each in same:
        assert each.sentence.endswith(".")
        assert each.advice.endswith(".")
        assert each.evidence
        assert "None" not in f"{each.sentence} {each.advice} {each.evidence}"
    return same[0] if same else None


def changed(facts: Sequence[Fact], change: Change) -> list[Fact]:
    """The facts with each replaced by what `change` makes of it, or dropped."""
    return [new for fact in facts if (new := change(fact)) is not None]


def with_kernels(more: Sequence[Kernel], recipe: str = "fp8_delayed", speeds: Speeds = DELAYED) -> list[Fact]:
    """A run in which one recipe's traced steps hold some more kernels, at their beginning."""
    kernels = [*more, *step_kernels(recipe, LINEARS, speeds.gemm_us, speeds.cast_us)]
    new = trace(recipe, kernels, speeds.step_ms * 1.3, expected=3 * len(LINEARS))
    facts = gpu_facts(speeds={"bf16": BF16, "fp8_delayed": DELAYED, recipe: speeds})
    return changed(facts, lambda fact: new if isinstance(fact, Trace) and fact.recipe == recipe else fact)


SEED = {"bf16": SEED_BF16, "fp8_delayed": SEED_DELAYED}


def test_a_run_with_nothing_wrong_has_no_finding() -> None:
    assert report_of(PLAIN).findings == ()


def test_launch_bound() -> None:
    one = found(gpu_facts(speeds=SEED), "launch-bound")
    assert one is not None
    ledger = report_of(gpu_facts(speeds=SEED)).recipe("fp8_delayed").ledger
    assert ledger is not None
    assert one.ms.value == ledger.idle.value
    assert "te.make_graphed_callables" in one.advice
    assert "fused optimizer" not in one.advice
    assert found(PLAIN, "launch-bound") is None


@pytest.mark.parametrize("code", ["quantization-cost", "gemm-slower-in-step"])
def test_gpu_time_is_not_at_stake_where_the_host_sets_the_pace(code: str) -> None:
    costly = replace(DELAYED, cast_us=80.0, gemm_us=180.0, step_ms=10.0)
    assert found(gpu_facts(speeds={"bf16": BF16, "fp8_delayed": costly}), code) is not None
    bound = replace(costly, step_ms=20.0, host_ms=19.5)
    assert found(gpu_facts(speeds={"bf16": BF16, "fp8_delayed": bound}), code) is None


def test_launch_bound_advises_a_fused_optimizer_only_where_the_launches_are_the_optimizers() -> None:
    foreach = [Kernel("void multi_tensor_apply_kernel<TensorListMetadata<2>, Op>", 1.0, phase="optimizer")] * 200

    def change(fact: Fact) -> Fact:
        if isinstance(fact, Trace) and fact.recipe == "fp8_delayed":
            plain = [each for each in step_kernels("fp8_delayed", LINEARS, 150.0, 20.0) if each.name != ADAM]
            return trace("fp8_delayed", [*foreach, *plain], 46.0, expected=27)
        return fact

    one = found(changed(gpu_facts(speeds=SEED), change), "launch-bound")
    assert one is not None
    assert "fused optimizer (200 of" in one.advice


def test_nobody_is_launch_bound_without_a_trace() -> None:
    """A host that waits for the GPU in each step, to log a value, takes as long as the step too."""
    assert found(changed(gpu_facts(speeds=SEED), lambda f: None if isinstance(f, Trace) else f), "launch-bound") is None


def late(fact: Fact, us: float) -> Fact:
    """A trace whose forward pass begins so much later."""
    if not isinstance(fact, Trace):
        return fact
    labels = (*fact.labels, "forward")
    return replace(
        fact,
        labels=labels,
        phase=(len(labels) - 1,) * len(fact.phase),
        start_us=tuple(start + us for start in fact.start_us),
        launch_us=tuple(launch + us for launch in fact.launch_us),
    )


def test_data_wait() -> None:
    waiting = changed(gpu_facts(speeds=SEED), lambda fact: late(fact, 12_000.0))
    one = found(waiting, "data-wait")
    assert one is not None
    assert one.ms.value == pytest.approx(12.0)
    assert "DataLoader" in one.advice
    bound = found(waiting, "launch-bound")
    assert bound is not None
    assert bound.ms.value is not None
    both = report_of(waiting).recipe("fp8_delayed").ledger
    assert both is not None
    assert bound.ms.value + 12.0 == pytest.approx(both.idle.value)
    assert found(changed(gpu_facts(speeds=SEED), lambda fact: late(fact, 1000.0)), "data-wait") is None
    assert found(gpu_facts(speeds=SEED), "data-wait") is None


def test_a_step_that_waits_for_data_alone_is_not_launch_bound() -> None:
    waiting = changed(gpu_facts(speeds=SEED), lambda fact: late(fact, 29_000.0))
    assert found(waiting, "data-wait") is not None
    assert found(waiting, "launch-bound") is None


def test_a_wait_that_earlier_work_covers_costs_nothing() -> None:
    assert found(changed(gpu_facts(), lambda fact: late(fact, 5000.0)), "data-wait") is None


def waiting(fact: Fact, op: str = "aten::_local_scalar_dense", wait_us: float = 1000.0) -> Fact:
    """A trace whose host waits for the GPU at the end of its kernels, and goes on 5 ms later."""
    if not isinstance(fact, Trace):
        return fact
    end = max(start + length for start, length in zip(fact.start_us, fact.duration_us, strict=True))
    labels = (*fact.labels, "layers.1.mlp", "layers.2.mlp", op, "forward")
    module, again, at, phase = range(len(fact.labels), len(labels))
    waits = HostWaits(
        names=("cudaStreamSynchronize",),
        name=(0, 0),
        start_us=(end - 1.0, end + 4000.0),
        duration_us=(wait_us + 1.0, wait_us),
        module=(module, again),
        op=(at, at),
        phase=(phase, phase),
    )
    return replace(fact, labels=labels, waits=waits)


def test_synchronization() -> None:
    one = found(changed(gpu_facts(speeds=SEED), waiting), "synchronization")
    assert one is not None
    ledger = report_of(changed(gpu_facts(speeds=SEED), waiting)).recipe("fp8_delayed").ledger
    assert ledger is not None
    assert one.ms == ledger.idle_parts["synchronization"]
    assert "in aten::_local_scalar_dense (cudaStreamSynchronize) in layers.*.mlp, the forward phase." in one.sentence
    assert "behind 2 a step" in one.evidence[1]
    assert ".item()" in one.advice
    assert found(changed(gpu_facts(speeds=SEED), lambda fact: waiting(fact, "aten::nonzero")), "synchronization")
    bound = found(changed(gpu_facts(speeds=SEED), waiting), "launch-bound")
    assert bound is None or "behind waits of the host" in bound.sentence


def test_a_wait_that_the_gpu_works_through_is_no_finding() -> None:
    def early(fact: Fact) -> Fact:
        made = waiting(fact)
        if not isinstance(made, Trace) or made.waits is None:
            return made
        return replace(made, waits=replace(made.waits, start_us=(100.0, 300.0), duration_us=(100.0, 100.0)))

    assert found(changed(gpu_facts(speeds=SEED), early), "synchronization") is None
    assert found(gpu_facts(speeds=SEED), "synchronization") is None
    assert found(changed(cpu_facts(), waiting), "synchronization", "fp32") is None


@pytest.mark.parametrize(
    ("op", "advice"),
    [("aten::nonzero", "torch.where"), ("aten::copy_", "non_blocking=True"), ("", "every n-th step")],
)
def test_the_advice_against_a_wait_fits_the_operator(op: str, advice: str) -> None:
    one = found(changed(gpu_facts(speeds=SEED), lambda fact: waiting(fact, op)), "synchronization")
    assert one is not None
    assert advice in one.advice


def test_data_wait_on_a_cpu_is_scaled_to_the_timed_step() -> None:
    one = found(changed(cpu_facts(), lambda fact: late(fact, 30_000.0)), "data-wait", "fp32")
    assert one is not None
    assert one.ms.value == pytest.approx(30.0 * 100 / 150, rel=1e-3)
    assert one.ms.origin == "estimated"


def test_communication_exposed() -> None:
    one = found(with_kernels([Kernel(NCCL, 20.0)] * 20), "communication-exposed")
    assert one is not None
    assert one.ms.value == pytest.approx(0.4)
    assert "20 more here" in " ".join(one.evidence)
    assert "amax" in one.advice
    hidden = [Kernel(NCCL, 20.0, stream=20, start=2000.0)]
    assert found(with_kernels(hidden), "communication-exposed") is None


def test_optimizer_share() -> None:
    more = with_kernels([Kernel(ADAM, 1500.0, phase="optimizer")], "bf16", replace(BF16, step_ms=11.0))
    one = found(more, "optimizer-share", "bf16")
    assert one is not None
    assert one.ms.value == pytest.approx(2.0)
    assert "micro-batches" in one.advice
    assert found(PLAIN, "optimizer-share", "bf16") is None
    foreach = [Kernel("void multi_tensor_apply_kernel<TensorListMetadata<2>, Op>", 20.0, phase="optimizer")] * 75
    plain = [*foreach, *(each for each in step_kernels("bf16", LINEARS, 250.0) if each.name != ADAM)]
    unfused = changed(
        gpu_facts(),
        lambda f: trace("bf16", plain, 13.0, expected=27) if isinstance(f, Trace) and f.recipe == "bf16" else f,
    )
    one = found(unfused, "optimizer-share", "bf16")
    assert one is not None
    assert "fused=True" in one.advice


def attention_heavy(us: float) -> list[Fact]:
    def change(fact: Fact) -> Fact:
        if isinstance(fact, Trace) and fact.recipe == "bf16":
            return trace("bf16", step_kernels("bf16", LINEARS, 100.0, rest_us=us), 13.0, expected=27)
        return fact

    return changed(gpu_facts(), change)


def test_a_bucket_that_no_recipe_reaches_dominates() -> None:
    one = found(attention_heavy(2800.0), "attention-dominates", "bf16")
    assert one is not None
    assert one.ms.value == pytest.approx(2.8)
    assert f"{10 / (10 - 2.7):.2f}x" in one.sentence
    assert found(attention_heavy(1000.0), "attention-dominates", "bf16") is None


CORE = "layers.0.self_attention.core_attention"


def unfused_core(us: float) -> list[Kernel]:
    """A forward attention without a fused kernel."""
    product = Kernel(GEMM_NAMES["bf16"]["fprop"], 2 * us / 7, CORE, op="aten::bmm")
    return [product, Kernel(SOFTMAX, 3 * us / 7, CORE), product]


def test_attention_unfused() -> None:
    kernels = unfused_core(350.0)
    reasons = ("Disabling FusedAttention as cuDNN 9.1 is too old",)
    backend = AttentionBackend("fp8_delayed", "UnfusedDotProductAttention", reasons)
    one = found([*with_kernels(kernels), backend], "attention-unfused")
    assert one is not None
    assert one.ms.value == pytest.approx(0.35)
    assert reasons[0] in one.evidence
    assert "cuDNN" in one.advice
    other = found(with_kernels(kernels), "attention-unfused")
    assert other is not None
    assert "cuDNN" not in other.advice
    assert "NVTE_DEBUG=1" in other.advice
    untraced = changed([*gpu_facts(), backend], lambda f: None if isinstance(f, Trace) else f)
    unknown = found(untraced, "attention-unfused")
    assert unknown is not None
    assert unknown.ms.reason == "no traced step was recorded"
    assert found(PLAIN, "attention-unfused") is None
    # TE's word is evidence by itself; what a fused kernel of the same step takes is not what it costs.
    alone = found([*PLAIN, backend], "attention-unfused")
    assert alone is not None
    assert alone.ms.reason == "the trace shows none of its kernels"


def test_a_softmax_is_no_unfused_attention() -> None:
    assert found(with_kernels([Kernel(SOFTMAX, 300.0, CORE)]), "attention-unfused") is None
    products = [Kernel(GEMM_NAMES["bf16"]["fprop"], 200.0, op="aten::bmm")] * 2
    assert found(with_kernels(products), "attention-unfused") is None
    assert found(with_kernels([*products, Kernel(SOFTMAX, 300.0)]), "attention-unfused") is None


def test_recompute() -> None:
    again = replace(dispatch("fp8_delayed", LINEARS[0], "fprop", DELAYED_CARD), recomputed=True)
    kernel = Kernel(
        "nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_TNN", 140.0, LINEARS[0].module, "fprop", "", "backward"
    )
    one = found([*with_kernels([kernel]), again], "recompute")
    assert one is not None
    assert one.ms.value == pytest.approx(0.14)
    assert "te.checkpoint" not in one.advice
    unplaced = found([*gpu_facts(), again], "recompute")
    assert unplaced is not None
    assert unplaced.ms.value is None
    wide = replace(again, weight_or_input=replace(again.weight_or_input, format="bf16", scaling="none"),
                   other=replace(again.other, format="bf16", scaling="none"))  # fmt: skip
    one = found([*gpu_facts(), wide], "recompute")
    assert one is not None
    assert "te.checkpoint" in one.advice
    assert found(PLAIN, "recompute") is None


def test_quantization_cost() -> None:
    costly = replace(DELAYED, cast_us=80.0, step_ms=8.0)
    one = found(gpu_facts(speeds={"bf16": BF16, "fp8_delayed": costly}), "quantization-cost")
    assert one is not None
    assert one.ms.value == pytest.approx(24 * 0.08)
    assert "Prefer" not in one.advice
    assert found(PLAIN, "quantization-cost") is None


def test_quantization_cost_names_a_recipe_that_is_faster_because_it_pays_less() -> None:
    costly = replace(DELAYED, cast_us=80.0, step_ms=8.0)
    one = found(gpu_facts(speeds={"bf16": BF16, "fp8_delayed": DELAYED, "fp8_current": costly}),
                "quantization-cost", "fp8_current")  # fmt: skip
    assert one is not None
    assert one.advice == "Prefer fp8_delayed here: its step takes 6.40 ms."


def slower(operation: str, kernel: float, autocast: float) -> list[Fact]:
    """The benchmark of one shape under fp8_delayed, made slower."""
    shape = next((lin.m, lin.k, lin.n) for lin in LINEARS if lin.module.endswith(operation))

    def change(fact: Fact) -> Fact:
        if isinstance(fact, GemmTime) and fact.recipe == "fp8_delayed" and (fact.m, fact.k, fact.n) == shape:
            ms = kernel if fact.mode == "kernel" else autocast
            return replace(fact, samples_ms=tuple(ms * f for f in (0.99, 1.0, 1.01, 1.0, 1.002)))
        return fact

    return changed(gpu_facts(), change)


def test_quantization_outweighs_a_small_gemm() -> None:
    facts = slower("proj", 0.2, 0.4)
    one = found(facts, "quantization-outweighs-gemm")
    assert one is not None
    assert "layers.*.self_attention.proj" in one.sentence
    assert "fc1" not in one.sentence
    assert one.ms.value == pytest.approx(6 * (0.4 - 0.29))
    assert found(facts, "gemm-not-faster") is None
    assert found(PLAIN, "quantization-outweighs-gemm") is None


def test_a_loss_too_small_to_gain_by_is_not_told() -> None:
    assert found(slower("proj", 0.2, 0.2925), "quantization-outweighs-gemm") is None
    assert found(slower("proj", 0.2, 0.32), "quantization-outweighs-gemm") is not None


def test_a_gemm_that_is_not_faster_even_alone() -> None:
    facts = slower("proj", 0.35, 0.4)
    one = found(facts, "gemm-not-faster")
    assert one is not None
    assert "layers.*.self_attention.proj" in one.sentence
    assert found(facts, "quantization-outweighs-gemm") is None
    assert found(PLAIN, "gemm-not-faster") is None


def test_a_layer_whose_benchmark_is_missing_is_not_judged() -> None:
    def change(fact: Fact) -> Fact | None:
        lost = isinstance(fact, GemmTime) and fact.recipe == "fp8_delayed" and fact.role == "wgrad"
        return None if lost and isinstance(fact, GemmTime) and fact.mode == "kernel" else fact

    facts = changed(slower("proj", 0.2, 0.4), change)
    assert found(facts, "quantization-outweighs-gemm") is None


def test_weight_requantized_each_micro_batch() -> None:
    uncached = UncachedWeights("fp8_delayed", ("layers.0.fc1", "layers.1.fc1"))
    accumulating = changed(gpu_facts(), lambda f: replace(f, micro_batches=4) if isinstance(f, Plan) else f)
    one = found([*accumulating, uncached], "weight-requantized")
    assert one is not None
    assert "layers.*.fc1" in one.sentence
    assert one.ms.value is None
    assert "is_first_microbatch=True" in one.advice
    assert found([*gpu_facts(), uncached], "weight-requantized") is None
    assert found(accumulating, "weight-requantized") is None


def test_the_head_is_outside() -> None:
    def wide(fact: Fact) -> Fact:
        return replace(fact, n=50257) if isinstance(fact, Gemm) and fact.module == "lm_head" else fact

    one = found(changed(gpu_facts(), wide), "head-outside", "bf16")
    assert one is not None
    assert one.ms.value == pytest.approx(0.9)
    assert "padded to 50272" in one.advice
    assert found(PLAIN, "head-outside", "bf16") is None


def without_te(misfit: bool = False) -> list[Fact]:
    """The same run by PyTorch's own layers; with `misfit`, one whose outputs no FP8 GEMM takes."""

    def plain(fact: Fact) -> Fact:
        if isinstance(fact, Model):
            return replace(fact, engine="plain_torch")
        if isinstance(fact, Gemm):
            fact = replace(fact, family="nn.Linear", quantizable=True)
            return replace(fact, n=fact.n + 1) if misfit and fact.module == "lm_head" else fact
        return fact

    return changed(gpu_facts(), plain)


def test_a_model_without_te_layers_is_told_what_their_replacement_would_cover() -> None:
    one = found(without_te(), "no-te-layers", "bf16")
    assert one is not None
    assert one.ms.known
    assert "100.0% of the linear-layer FLOPs" in one.sentence
    assert 'precision="transformer-engine"' in one.advice
    part = found(without_te(misfit=True), "no-te-layers", "bf16")
    assert part is not None
    assert "lm_head would stay: 8 must divide input and 16 output features." in part.sentence
    assert "100.0%" not in part.sentence
    assert found(PLAIN, "no-te-layers", "bf16") is None


def test_layers_inside_that_no_recipe_reaches() -> None:
    def plain(fact: Fact) -> Fact:
        inside = isinstance(fact, Gemm) and fact.module == "layers.1.layernorm_mlp.fc2"
        return replace(fact, quantizable=False, family="nn.Linear") if inside and isinstance(fact, Gemm) else fact

    one = found(changed(gpu_facts(), plain), "layers-outside", "bf16")
    assert one is not None
    assert one.ms.value == pytest.approx(0.9)
    assert "layers.*.layernorm_mlp.fc2" in one.sentence
    assert found(PLAIN, "layers-outside", "bf16") is None


def test_gemms_slower_in_the_step_than_on_the_bench() -> None:
    hot = gpu_facts(speeds={"bf16": BF16, "fp8_delayed": replace(DELAYED, gemm_us=180.0, step_ms=7.0)})
    one = found(hot, "gemm-slower-in-step")
    assert one is not None
    ledger_gemm = 24 * 0.18 + 3 * 0.18
    assert one.ms.value == pytest.approx(ledger_gemm - (24 * 0.145 + 3 * 0.29), abs=1e-6)
    assert "no clock was measured beside both" in one.sentence
    assert found(gpu_facts(speeds={"bf16": BF16, "fp8_delayed": DELAYED}), "gemm-slower-in-step") is None

    def clocked(fact: Fact) -> Fact:
        return replace(fact, clocks_mhz=(1950.0,) * 5) if isinstance(fact, GemmTime) else fact

    limits = Environment("NVIDIA H200", "cuda", (9, 0), facts={"power limit": "500 W", "default power limit": "700 W"})
    one = found([*changed(hot, clocked), limits], "gemm-slower-in-step")
    assert one is not None
    assert "the lower clock explains about" in one.sentence
    assert "nvidia-smi -pl 700" in one.advice


def throttled(word: str, blocks: int) -> list[Fact]:
    def change(fact: Fact) -> Fact:
        if isinstance(fact, Clocks):
            return replace(fact, throttle=(word,) if fact.round < blocks else ())
        return fact

    return changed(gpu_facts(), change)


def test_throttled() -> None:
    highest = Environment("NVIDIA H200", "cuda", (9, 0), facts={"highest sm clock": "1980 MHz"})
    one = found([*throttled("power cap", 3), highest], "throttled")
    assert one is not None
    assert one.ms.value == pytest.approx(27 * 0.15 * (1 - 1755 / 1980))
    assert one.ms.origin == "estimated"
    assert "3 of 3 blocks" in one.sentence
    assert "nvidia-smi" not in one.advice
    limits = {"highest sm clock": "1980 MHz", "power limit": "700 W", "default power limit": "700 W"}
    full = found([*throttled("power cap", 3), replace(highest, facts=limits)], "throttled")
    assert full is not None
    assert full.ms.reason == "the power limit is the default one"  # there is nothing to win
    assert "full load" in full.advice
    unknown = found(throttled("thermal slowdown (hardware)", 2), "throttled")
    assert unknown is not None
    assert unknown.ms.value is None
    assert "Cool the GPU" in unknown.advice
    assert found(throttled("power cap", 1), "throttled") is None
    assert found(throttled("application clocks", 3), "throttled") is None


def test_padding() -> None:
    def odd(fact: Fact) -> Fact:
        if isinstance(fact, Gemm | GemmTime | Dispatch) and fact.n == 96:
            return replace(fact, n=90)
        return fact

    one = found(changed(gpu_facts(), odd), "padding", "bf16")
    assert one is not None
    assert one.ms.value == pytest.approx(3 * 0.29)
    assert "output features 90 -> 96" in one.advice
    assert found(PLAIN, "padding", "bf16") is None


def test_memory_up() -> None:
    def more(fact: Fact) -> Fact:
        up = isinstance(fact, Memory) and fact.recipe == "fp8_delayed"
        return replace(fact, peak=4 * 10**9) if up and isinstance(fact, Memory) else fact

    one = found(changed(gpu_facts(), more), "memory-up")
    assert one is not None
    assert "33%" in one.sentence
    assert one.ms.value is None
    assert found(PLAIN, "memory-up") is None
    without = changed(changed(gpu_facts(), more), lambda f: None if isinstance(f, Memory) and f.recipe == "bf16" else f)
    assert found(without, "memory-up") is None


def test_memory_up_says_why_by_the_memory_ledger() -> None:
    """The peaks of the timed steps differ; the watched ones tell which terms do."""

    def larger(fact: Fact) -> Fact:
        up = isinstance(fact, Memory) and fact.recipe == "fp8_delayed" and fact.round >= 0
        return replace(fact, peak=4 * 10**9) if up and isinstance(fact, Memory) else fact

    watched = [
        *memory_steps.facts(memory_steps.Step(copies=(0, 0, 0)), "bf16"),
        *memory_steps.facts(memory_steps.Step(copies=(10**9, 10**8, 0), temporary=10**7), "fp8_delayed"),
    ]
    told = [fact for fact in watched if not isinstance(fact, Dispatch)]
    one = found([*changed(gpu_facts(), larger), *told], "memory-up")
    assert one is not None
    assert "activations and copies +1.1 GB" in one.sentence
    assert "temporaries +0.01 GB" not in one.sentence  # under a hundredth of what changed
    assert any(row.startswith("activations and copies: +1.1 GB at the peak [") for row in one.evidence)
    assert one.advice == "Recompute activations, or take a smaller micro-batch."


def steps(ms: dict[str, float], spread: float) -> list[Fact]:
    plain = changed(gpu_facts(), lambda f: None if isinstance(f, StepTime) else f)
    return [*plain, *(step for name, each in ms.items() for step in timed(name, each, spread=spread))]


def test_noise() -> None:
    one = found(steps({"bf16": 10.0, "fp8_delayed": 9.9}, 0.2), "noise")
    assert one is not None
    assert one.ms.value is not None
    assert one.ms.value > 0.1
    assert "rounds=12 instead of 3" in one.advice
    assert found(steps({"bf16": 10.0, "fp8_delayed": 6.4}, 0.2), "noise") is None
    assert found(steps({"bf16": 10.0, "fp8_delayed": 10.0}, 0.001), "noise") is None
    single = found(
        changed(gpu_facts(), lambda f: None if isinstance(f, StepTime) and (f.round or f.index) else f), "noise"
    )
    assert single is not None
    assert single.ms.value is None


def test_sweep_too_short() -> None:
    cut = "the fit has 20 training steps and the full plan takes 40"
    one = found(
        changed(gpu_facts(), lambda f: replace(f, shrunk=cut) if isinstance(f, Plan) else f), "sweep-too-short", ""
    )
    assert one is not None
    assert cut in one.sentence
    assert one.ms.value is None
    assert found(PLAIN, "sweep-too-short", "") is None


def test_a_void_recipe_has_no_findings() -> None:
    broken = changed(
        gpu_facts(speeds=SEED),
        lambda f: replace(f, value=math.nan) if isinstance(f, Loss) and f.recipe == "fp8_delayed" else f,
    )
    assert {each.recipe for each in report_of(broken).findings} == {"bf16"}


def test_every_code_is_in_the_catalogue() -> None:
    codes = {code for key in CATALOGUE for code in key.split(", ")}
    for facts in (gpu_facts(speeds=SEED), slower("proj", 0.2, 0.4), throttled("power cap", 3), attention_heavy(2800.0)):
        for each in report_of(facts).findings:
            assert each.code in codes or (each.code.endswith("-dominates") and "*-dominates" in codes)


def test_the_report_carries_them_through_json(tmp_path: Path) -> None:
    report = report_of(gpu_facts(speeds=SEED))
    assert report.findings
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path).findings == report.findings


FIGURES = st.none() | st.floats(0.01, 100.0)


@given(st.lists(st.tuples(FIGURES, st.sampled_from(["a", "b"])), max_size=12))
def test_ms_at_stake_sorts_and_what_is_missing_comes_last(parts: list[tuple[float | None, str]]) -> None:
    """Recipes whose host is slow, with and without a ledger that knows the idle time."""
    base = RecipeReport("bf16", "BF16", True)
    step, host = Figure(100.0, "ms"), Figure(99.0, "ms")
    cases = []
    for ms, name in parts:
        case = Case(RecipeReport(name, name, False, step_ms=step, host_ms=host, no_ledger="no trace"), base)
        if ms is not None:
            ledger = report_of(PLAIN).recipe("bf16").ledger
            assert ledger is not None
            idle = replace(ledger, wall=step, idle=Figure(ms, "ms"), idle_parts={"launch-starved": Figure(ms, "ms")})
            case = replace(case, part=replace(case.part, ledger=idle))
        cases.append(case)
    made = findings(cases)
    values = [each.ms.value for each in made]
    known = [value for value in values if value is not None]
    assert values[: len(known)] == sorted(known, reverse=True)
    assert all(value is None for value in values[len(known) :])
    assert 0.0 not in values
    # Launch-bound: from an idle time of a tenth of the step on.
    assert len(values) == len(known) == sum(ms is not None and ms >= 10.0 for ms, _ in parts)


@settings(max_examples=15)
@given(st.integers(1, len(gpu_facts(speeds=SEED))))
def test_a_run_that_was_cut_anywhere_has_findings_with_evidence_or_none(lines: int) -> None:
    for each in report_of(gpu_facts(speeds=SEED)[:lines]).findings:
        assert each.evidence
        assert each.ms.value is None or each.ms.value > 0
