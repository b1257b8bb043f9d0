"""What silences a finding: an incomplete ledger, time of unknown kind, one sample a side, a bucket that it ignores."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lowprec_callback.analyze.finding_case import Case
from lowprec_callback.analyze.findings import findings
from lowprec_callback.recording import (
    AttentionBackend,
    Clocks,
    Dispatch,
    Environment,
    Fact,
    GemmTime,
    StepTime,
    Trace,
)
from lowprec_callback.report import Figure, Finding, Ledger, RecipeReport

from .recordings import (
    BF16,
    CARDS,
    DELAYED,
    FUSED_ATTENTION,
    GEMM_NAMES,
    NORM,
    Kernel,
    dispatch,
    gpu_facts,
    step_kernels,
    trace,
)
from .test_findings import (
    LINEARS,
    NCCL,
    PLAIN,
    changed,
    found,
    report_of,
    slower,
    throttled,
    with_kernels,
    without_te,
)
from .test_findings_catalogue import CODES, MADE, rows, wide_head

UNKNOWN = "void my_extension::convolve_kernel<c10::BFloat16, 128>(Params)"
"""A kernel that no rule knows."""
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>"
CONV = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_execute_kernel_cudnn"
BMM = Kernel(GEMM_NAMES["bf16"]["fprop"], 1000.0, op="aten::bmm")

FROM_THE_TRACE = {
    "launch-bound",
    "launch-starved",
    "host-stall",
    "data-wait",
    "synchronization",
    "communication-exposed",
    "optimizer-share",
    "casts-from-fp32",
    "*-dominates",
    "quantization-cost",
    "gemm-slower-in-step",
}
"""What is said of the kernels of the traced steps alone."""


def lost(fact: Fact) -> Fact:
    """A trace that shows fewer GEMM kernels than were called."""
    return replace(fact, expected_gemms=10**6) if isinstance(fact, Trace) else fact


def with_unknown(us: float) -> Callable[[Fact], Fact]:
    """A trace in which one more kernel ran, which no rule knows; the step was that much longer."""

    def change(fact: Fact) -> Fact:
        if isinstance(fact, StepTime):
            return replace(fact, ms=fact.ms + us / 1e3)
        if not isinstance(fact, Trace):
            return fact
        end = max(start + length for start, length in zip(fact.start_us, fact.duration_us, strict=True))
        columns = {name: (*getattr(fact, name), 0) for name in ("module", "role", "op", "phase")}
        return replace(
            fact,
            wall_ms=fact.wall_ms + us / 1e3,
            names=(*fact.names, UNKNOWN),
            name=(*fact.name, len(fact.names)),
            start_us=(*fact.start_us, end),
            duration_us=(*fact.duration_us, us),
            stream=(*fact.stream, 7),
            launch_us=(*fact.launch_us, end),
            **columns,
        )

    return change


def ledger_of(facts: Sequence[Fact], recipe: str) -> Ledger:
    ledger = report_of(facts).recipe(recipe).ledger
    assert ledger is not None
    return ledger


@pytest.mark.parametrize("code", CODES)
def test_a_trace_that_lost_kernels_gives_no_finding_and_no_cost(code: str) -> None:
    recipe, facts = MADE[code]
    one = found(changed(facts(), lost), code.replace("*", "attention"), recipe)
    assert (one is None) == (code in FROM_THE_TRACE)
    if one is not None:
        assert not any(fact.startswith("trace") for fact in one.ms.facts)


@pytest.mark.parametrize("code", sorted(FROM_THE_TRACE))
def test_kernels_of_unknown_kind_are_no_idle_time_but_may_be_any_work(code: str) -> None:
    """They are 4 to 20% of the step. What rests on idle time or names stands; what compares buckets does not."""
    recipe, facts = MADE[code]
    unknown = changed(facts(), with_unknown(1500.0))
    assert not ledger_of(unknown, recipe).complete
    by_bucket = {
        "communication-exposed", "optimizer-share", "*-dominates", "quantization-cost", "gemm-slower-in-step"
    }  # fmt: skip
    assert (found(unknown, code.replace("*", "attention"), recipe) is None) == (code in by_bucket)


# --- a bucket dominates -----------------------------------------------------------------------------------


def step_of(kernels: Sequence[Kernel], step_ms: float) -> list[Fact]:
    """A bf16 step of few and short linear layers, and these kernels."""
    linears = [Kernel(GEMM_NAMES["bf16"]["fprop"], 20.0, lin.module, "fprop") for lin in LINEARS for _ in range(3)]
    facts = gpu_facts(speeds={"bf16": replace(BF16, step_ms=step_ms)})
    made = trace("bf16", [*linears, *kernels], step_ms, expected=27)
    return changed(facts, lambda fact: made if isinstance(fact, Trace) else fact)


def dominating(facts: Sequence[Fact]) -> list[str]:
    return [each.code for each in report_of(facts).findings if each.code.endswith("-dominates")]


def test_gemms_are_not_free_where_convolutions_are_of_unknown_kind() -> None:
    """Seen on a GPU: a bf16 step of convolutions, in which `activation dominates` and GEMMs were free."""
    activation = Kernel(GELU, 1500.0)
    assert dominating(step_of([activation], 2.1)) == ["activation-dominates"]
    assert dominating(step_of([activation, Kernel(UNKNOWN, 3000.0)], 5.1)) == []
    assert dominating(step_of([activation, Kernel(UNKNOWN, 30.0)], 2.13)) == []  # the ledger is incomplete from 1% on
    assert dominating(step_of([activation, Kernel(UNKNOWN, 15.0)], 2.11)) == ["activation-dominates"]


def test_gemms_are_not_the_linear_layers_where_they_are_convolutions() -> None:
    products = [Kernel(CONV, 600.0, "conv1"), Kernel(CONV, 600.0, op="aten::cudnn_convolution")]
    facts = step_of([Kernel(GELU, 2000.0), *products], 3.8)
    assert ledger_of(facts, "bf16").complete
    assert dominating(facts) == []
    assert dominating(step_of([Kernel(GELU, 2000.0)], 2.6)) == ["activation-dominates"]


def test_a_ledger_that_leaves_as_much_open_as_the_gemms_take_names_no_ceiling() -> None:
    linears = [Kernel(GEMM_NAMES["bf16"]["fprop"], 1.0, lin.module, "fprop") for lin in LINEARS for _ in range(3)]

    def facts(unknown_us: float) -> list[Fact]:
        kernels = [*linears, Kernel(GELU, 5000.0), Kernel(UNKNOWN, unknown_us)]
        made = trace("bf16", kernels, 5.1, expected=27)
        run = gpu_facts(speeds={"bf16": replace(BF16, step_ms=5.1)})
        return changed(run, lambda fact: made if isinstance(fact, Trace) else fact)

    assert ledger_of(facts(40.0), "bf16").complete
    assert dominating(facts(40.0)) == []  # GEMMs take 0.027 ms
    assert dominating(facts(10.0)) == ["activation-dominates"]


@pytest.mark.parametrize(
    "longer",
    [[Kernel(NCCL, 2500.0)], [Kernel("void multi_tensor_adam::kernel", 2500.0)], []],
    ids=["communication", "the optimizer", "idle time"],
)
def test_nothing_dominates_beside_something_longer(longer: list[Kernel]) -> None:
    assert dominating(step_of([Kernel(GELU, 2000.0), *longer], 5.1)) == []
    assert dominating(step_of([Kernel(GELU, 3000.0), *longer], 3.6 + 2.5 * len(longer))) == ["activation-dominates"]


def test_batched_products_of_a_recommender_are_no_attention() -> None:
    """An interaction of features, forward and backward, with a router's softmax somewhere."""
    router = Kernel("void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false>", 100.0,
                    op="aten::_softmax")  # fmt: skip
    facts = step_of([BMM, Kernel(NORM, 50.0), router, Kernel(NORM, 50.0), BMM, BMM], 3.8)
    assert ledger_of(facts, "bf16").buckets["attention"].value == pytest.approx(3.1)
    assert dominating(facts) == []
    assert found(facts, "attention-unfused", "bf16") is None
    assert not any("attention" in text for text in report_of(facts).recipe("bf16").verdict.slow_paths)  # type: ignore[union-attr]
    assert dominating(step_of([Kernel(FUSED_ATTENTION, 3000.0)], 3.6)) == ["attention-dominates"]


def test_attention_that_te_says_is_unfused_does_not_dominate_too() -> None:
    facts = [*step_of([Kernel(FUSED_ATTENTION, 3000.0)], 3.6), AttentionBackend("bf16", "UnfusedDotProductAttention")]
    assert dominating(facts) == []
    assert found(facts, "attention-unfused", "bf16") is not None


def test_a_softmax_whose_use_is_not_known_is_no_loss() -> None:
    softmax = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*)"
    assert dominating(step_of([Kernel(softmax, 3000.0)], 3.6)) == []
    assert dominating(step_of([Kernel(softmax, 3000.0, op="aten::_log_softmax")], 3.6)) == ["loss-dominates"]
    assert dominating(step_of([Kernel("_ce_fwd_kernel", 3000.0)], 3.6)) == ["loss-dominates"]


# --- the other findings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["quantization-outweighs-gemm", "gemm-not-faster"])
def test_one_sample_a_side_shows_no_loss(code: str) -> None:
    recipe, facts = MADE[code]

    def single(fact: Fact) -> Fact:
        return replace(fact, samples_ms=fact.samples_ms[:1]) if isinstance(fact, GemmTime) else fact

    assert found(changed(facts(), single), code, recipe) is None


def test_a_loss_on_the_bench_is_not_told_without_a_step_that_it_is_a_share_of() -> None:
    facts = changed(slower("proj", 0.2, 0.4), lambda fact: None if isinstance(fact, StepTime) else fact)
    assert found(facts, "quantization-outweighs-gemm") is None


def costly() -> dict[str, object]:
    return {"bf16": BF16, "fp8_delayed": DELAYED, "fp8_current": replace(DELAYED, cast_us=80.0, step_ms=8.0)}


def test_a_recipe_that_is_not_shown_to_have_run_is_not_preferred() -> None:
    facts = gpu_facts(speeds=costly())  # type: ignore[arg-type]
    one = found(facts, "quantization-cost", "fp8_current")
    assert one is not None
    assert one.advice.startswith("Prefer fp8_delayed")

    def fallen(fact: Fact) -> Fact | None:
        if isinstance(fact, Dispatch) and fact.recipe == "fp8_delayed":
            lin = next(lin for lin in LINEARS if lin.module == fact.module)
            return dispatch("fp8_delayed", lin, fact.role, CARDS["bf16"])
        return None if type(fact).__name__ == "StepProducts" else fact

    unshown = found(changed(facts, fallen), "quantization-cost", "fp8_current")
    assert unshown is not None
    assert "Prefer" not in unshown.advice


def test_a_clock_at_its_highest_was_not_held_down() -> None:
    def limited(mhz: float) -> Finding | None:
        highest = Environment("NVIDIA H200", "cuda", (9, 0), facts={"highest sm clock": "1980 MHz"})

        def clocked(fact: Fact) -> Fact:
            return replace(fact, sm_mhz=mhz) if isinstance(fact, Clocks) else fact

        return found([*changed(throttled("power cap", 3), clocked), highest], "throttled")

    assert limited(1755) is not None
    assert limited(1980) is None
    assert limited(1965) is None


@pytest.mark.parametrize(("capability", "told"), [((9, 0), True), ((8, 9), True), ((8, 0), False), (None, False)])
def test_no_te_layers_are_advised_where_nothing_below_16_bits_runs(
    capability: tuple[int, int] | None, told: bool
) -> None:
    def change(fact: Fact) -> Fact:
        return replace(fact, compute_capability=capability) if isinstance(fact, Environment) else fact

    assert (found(changed(without_te(), change), "no-te-layers", "bf16") is not None) == told


def test_layers_outside_run_alike_whatever_they_run_in() -> None:
    one = found(changed(PLAIN, wide_head), "head-outside", "bf16")
    assert one is not None
    assert "runs alike under every recipe, because none reaches it" in one.sentence


def test_products_of_no_captured_layer_are_not_held_against_the_bench() -> None:
    hot = {"bf16": BF16, "fp8_delayed": replace(DELAYED, step_ms=8.0)}
    foreign = Kernel(GEMM_NAMES["bf16"]["fprop"], 600.0, "router", op="aten::mm", phase="forward")

    def more(fact: Fact) -> Fact:
        kernels = [foreign, *step_kernels("fp8_delayed", LINEARS, 150.0, 20.0)]
        new = trace("fp8_delayed", kernels, 10.4, expected=27)
        return new if isinstance(fact, Trace) and fact.recipe == "fp8_delayed" else fact

    facts = changed(gpu_facts(speeds=hot), more)
    assert ledger_of(facts, "fp8_delayed").buckets["gemm"].value == pytest.approx(27 * 0.15 + 0.6)
    assert found(facts, "gemm-slower-in-step") is None


def test_a_little_hidden_communication_is_no_reason_for_slow_gemms() -> None:
    def told(us: float) -> str:
        speeds = replace(DELAYED, gemm_us=180.0, step_ms=7.0)
        kernels = [*step_kernels("fp8_delayed", LINEARS, 180.0, 20.0), Kernel(NCCL, us, stream=20, start=100.0)]
        new = trace("fp8_delayed", kernels, 9.1, expected=27)
        facts = gpu_facts(speeds={"bf16": BF16, "fp8_delayed": speeds})
        facts = changed(facts, lambda fact: new if isinstance(fact, Trace) and fact.recipe == "fp8_delayed" else fact)
        one = found(facts, "gemm-slower-in-step")
        assert one is not None
        return one.sentence

    assert "communication that runs beside them takes SMs" in told(500.0)
    assert told(20.0).endswith(
        "; no clock was measured beside both, and the communication beside them (0.020 ms) is too short to explain it."
    )


def test_more_collectives_than_in_a_baseline_whose_trace_lost_some_are_not_counted() -> None:
    facts = with_kernels([Kernel(NCCL, 20.0)] * 20)
    one = found(changed(facts, lambda fact: lost(fact) if getattr(fact, "recipe", "") == "bf16" else fact),
                "communication-exposed")  # fmt: skip
    assert one is not None
    assert "more here" not in " ".join(one.evidence)


def test_communication_that_the_ledger_leaves_open_is_not_told() -> None:
    ledger = ledger_of(with_kernels([Kernel(NCCL, 20.0)] * 20), "fp8_delayed")
    part = RecipeReport("a", "a", False, step_ms=ledger.wall, ledger=ledger)
    base = RecipeReport("bf16", "BF16", True)
    assert [each.code for each in findings([Case(part, base)])] == ["communication-exposed"]
    for name in ("residual", "other"):
        open_ms = Figure(-0.45 if name == "residual" else 0.45, "ms")
        vague = (
            replace(ledger, residual=open_ms)
            if name == "residual"
            else replace(ledger, buckets={**ledger.buckets, "other": open_ms})
        )
        assert findings([Case(replace(part, ledger=vague), base)]) == ()


# --- the page ---------------------------------------------------------------------------------------------


def test_the_page_says_of_each_finding_what_it_needs_and_what_silences_it() -> None:
    table = rows("What each finding needs")
    assert [row[0].strip("`") for row in table] == CODES
    assert all(len(row) == 3 and all(row) for row in table)
    for code, _, silenced in table:
        if code.strip("`") in FROM_THE_TRACE:
            assert re.search("trace|ledger", silenced), code


def test_the_page_says_what_each_sentence_needs() -> None:
    table = rows("What each sentence of headline and reading needs")
    assert len(table) > 10
    assert all(len(row) == 3 and all(row) for row in table)
