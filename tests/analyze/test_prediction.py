"""A step predicted from the baseline's ledger and its modules' times: closed forms, and what must not matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.prediction import FROM_GEMMS, FROM_MODULES, SPREAD
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import Fact, HostTime, ModuleTime, Recording, StepTime, Trace
from lowprec_callback.report import Prediction
from tests.analyze.recordings import SEED_BF16, SEED_DELAYED, gpu_facts, gpu_recording, te_linears

RECIPES = ("bf16", "fp8_delayed")
TOKENS = 1024

KINDS = {
    "layers.0.self_attention.layernorm_qkv": ("LayerNormLinear", "self_attention.layernorm_qkv"),
    "layers.0.self_attention.proj": ("Linear", "self_attention.proj"),
    "layers.0.layernorm_mlp": ("LayerNormMLP", "layernorm_mlp"),
}
"""Path of the copied module to its class, and to the end of the paths of all alike."""


def module_times(
    forward: float = 0.5,
    backward: float = 0.6,
    host: float = 0.0,
    region: float = 0.0,
    trend: tuple[float, float] | None = None,
) -> list[ModuleTime]:
    """Every module takes 1 ms and 2 ms in the baseline, and these shares of it under FP8, which costs the host `host`
    milliseconds more a module and direction. `trend`: both recipes' share of their time at a quarter of the tokens."""
    found = []
    for path, (family, end) in KINDS.items():
        alike = tuple(f"layers.{layer}.{end}" for layer in range(2))
        for recipe, shares in zip(RECIPES, ((1.0, 1.0), (forward, backward)), strict=True):
            for direction, ms, share in zip(("forward", "backward"), (1.0, 2.0), shares, strict=True):
                made = ModuleTime(
                    recipe,
                    path,
                    alike,
                    family,
                    TOKENS,
                    direction,  # type: ignore[arg-type]
                    samples_ms=(ms * share,) * 6,
                    host_ms=0.2 + (host if recipe != "bf16" else 0.0),
                    region_ms=0.05 + (region if recipe != "bf16" else 0.0),
                )
                found.append(made)
                if trend is not None:
                    there = (ms * share * trend[RECIPES.index(recipe)],) * 3
                    found.append(replace(made, tokens=TOKENS // 4, samples_ms=there, own=False))
    return found


def predicted(facts: Sequence[Fact]) -> Prediction:
    made = analyze(Recording.from_facts(facts)).recipe("fp8_delayed").prediction
    assert made is not None
    return made


def with_modules(facts: Sequence[Fact], modules: Sequence[ModuleTime]) -> list[Fact]:
    at = next(index for index, fact in enumerate(facts) if isinstance(fact, StepTime))
    return [*facts[:at], *modules, *facts[at:]]


def test_each_modules_time_in_the_step_is_exchanged_in_proportion() -> None:
    """8 linears of 3 roles and 0.3 ms each: 2.4 ms forward and 4.8 backward, which become 0.5 and 0.6 of it."""
    base = analyze(gpu_recording()).recipe("bf16").step_ms.value
    assert base is not None
    made = predicted(with_modules(gpu_facts(), module_times()))
    # The norm belongs to a module too, but the trace of these made-up steps tells no direction of it.
    expected = base - 2.4 * 0.5 - 4.8 * 0.4
    assert made.step_ms.value == pytest.approx(expected)
    assert made.gpu_ms.value == pytest.approx(expected)
    assert made.bound == "GPU"
    assert made.basis == FROM_MODULES
    assert made.step_ms.half_width is not None
    assert made.step_ms.half_width >= SPREAD * expected


def test_the_error_and_the_naive_reading() -> None:
    report = analyze(Recording.from_facts(with_modules(gpu_facts(), module_times())))
    part, base = report.recipe("fp8_delayed"), report.recipe("bf16")
    made = part.prediction
    assert made is not None
    assert part.speedups is not None
    assert made.step_ms.value is not None
    assert part.step_ms.value is not None
    assert made.error.value == pytest.approx(made.step_ms.value / part.step_ms.value - 1)
    assert base.step_ms.value is not None
    assert part.speedups.kernel.value is not None
    assert made.naive_ms.value == pytest.approx(base.step_ms.value / part.speedups.kernel.value)
    assert made.naive_error.value == pytest.approx(made.naive_ms.value / part.step_ms.value - 1)
    assert base.prediction is None


def test_a_host_that_sets_the_pace_gets_slower_by_its_launches() -> None:
    """27 ms, of which the GPU is busy for 8.5: 6 modules of 0.4 ms more a direction, a region of 0.1 more in each."""
    facts = gpu_facts({"bf16": SEED_BF16, "fp8_delayed": SEED_DELAYED})
    base = analyze(Recording.from_facts(facts)).recipe("bf16").step_ms.value
    assert base is not None
    made = predicted(with_modules(facts, module_times(host=0.4, region=0.1)))
    assert made.bound == "host"
    assert made.step_ms.value == pytest.approx(base + 6 * 2 * 0.4 + 2 * 0.1)
    assert made.gpu_ms.value is not None
    assert made.gpu_ms.value < 9.0


def test_where_the_gpu_sets_the_pace_the_host_counts_once_it_is_the_slower_one() -> None:
    made = predicted(with_modules(gpu_facts(), module_times(host=1.0)))
    assert made.bound == "host"
    assert made.step_ms.value == pytest.approx(4.0 + 6 * 2 * 1.0)


def test_a_full_launch_queue_tells_nothing_of_the_host() -> None:
    facts: list[Fact] = []
    for fact in with_modules(gpu_facts(layers=40), module_times()):
        facts.append(replace(fact, ms=9.9, drain_ms=5.0) if isinstance(fact, HostTime) else fact)
    traces = [fact for fact in facts if isinstance(fact, Trace) and fact.recipe == "bf16"]
    assert len(traces[0].start_us) < 900  # else the next lines would prove nothing
    assert predicted(facts).host_ms.known
    facts = [
        replace(fact, ms=9.9, drain_ms=5.0) if isinstance(fact, HostTime) else fact for fact in gpu_facts(layers=80)
    ]
    made = predicted(with_modules(facts, module_times()))
    assert not made.host_ms.known
    assert made.bound == "GPU"
    assert "launch queue" in (made.host_ms.reason or "")


def test_the_recipes_own_steps_do_not_enter() -> None:
    facts = with_modules(gpu_facts(), module_times())
    slow: list[Fact] = []
    for fact in facts:
        if isinstance(fact, StepTime | HostTime) and fact.recipe == "fp8_delayed":
            slow.append(replace(fact, ms=fact.ms * 3))
        elif not (isinstance(fact, Trace) and fact.recipe == "fp8_delayed"):
            slow.append(fact)
    one, other = predicted(facts), predicted(slow)
    assert one.step_ms.value == other.step_ms.value
    assert one.error.value != other.error.value


def test_without_modules_the_gemm_benchmark_takes_their_place() -> None:
    report = analyze(gpu_recording())
    base, part = report.recipe("bf16"), report.recipe("fp8_delayed")
    made = part.prediction
    assert made is not None
    assert base.ledger is not None
    whole, gemm = base.step_ms.value, base.ledger.buckets["gemm"].value
    before, after = base.gemm_autocast_ms.value, part.gemm_autocast_ms.value
    assert None not in (whole, gemm, before, after)
    assert made.step_ms.value == pytest.approx(whole - gemm * (1 - after / before))  # type: ignore[operator]
    assert made.basis == FROM_GEMMS
    assert not made.host_ms.known


@pytest.mark.parametrize("failure", ["out of memory", None])
def test_a_module_that_could_not_be_timed_is_the_reason(failure: str | None) -> None:
    modules = module_times()
    modules = [
        replace(time, failure=failure, samples_ms=()) if time.family == "LayerNormMLP" and failure else time
        for time in modules
        if failure or (time.family, time.recipe) != ("LayerNormMLP", "bf16")
    ]
    made = predicted(with_modules(gpu_facts(), modules))
    assert made.step_ms.value is None
    assert "layers.0.layernorm_mlp forward under bf16" in (made.step_ms.reason or "")
    assert (failure or "was not timed by itself") in (made.step_ms.reason or "")
    assert made.error.value is None


def test_without_a_ledger_there_is_no_prediction() -> None:
    facts = [fact for fact in with_modules(gpu_facts(), module_times()) if not isinstance(fact, Trace)]
    made = predicted(facts)
    assert "no ledger of bf16" in (made.step_ms.reason or "")


def test_the_break_even_where_lines_cross() -> None:
    """Baseline: T = x; FP8: T = 0.5 x + 0.3 (in modules' milliseconds over tokens' share): they cross at x = 0.6."""
    modules = module_times(forward=0.8, backward=0.8, trend=(0.25, (0.5 / 4 + 0.3) / 0.8))
    made = predicted(with_modules(gpu_facts(), modules))
    assert made.pays_from.value == pytest.approx(0.6 * TOKENS, rel=0.2)
    assert made.pays.startswith("it pays from about 640 tokens a micro-batch (now 1,024)")


@pytest.mark.parametrize(
    ("forward", "trend", "words"),
    [
        (1.2, (0.25, 0.25), "it does not pay up to 16,384 tokens a micro-batch (now 1,024)"),
        (0.5, (0.25, 0.25), "it pays from fewer than 64 tokens a micro-batch (now 1,024)"),
    ],
)
def test_it_never_pays_or_always(forward: float, trend: tuple[float, float], words: str) -> None:
    facts = [replace(fact, ms=0.01) if isinstance(fact, HostTime) else fact for fact in gpu_facts()]
    made = predicted(with_modules(facts, module_times(forward, forward, trend=trend)))
    assert made.pays == words
    assert made.pays_from.known == ("fewer" in words)


@settings(max_examples=15)
@given(st.floats(0.2, 3.0), st.floats(0.2, 3.0))
def test_slower_modules_predict_a_slower_step(one: float, other: float) -> None:
    facts = gpu_facts(rounds=1)
    steps = [predicted(with_modules(facts, module_times(share, share))).step_ms.value or 0.0 for share in (one, other)]
    assert (steps[0] <= steps[1]) == (one <= other) or steps[0] == pytest.approx(steps[1])


def test_the_linears_of_these_tests_are_those_of_the_kinds() -> None:
    """Otherwise the closed forms above would rest on modules that no kernel belongs to."""
    paths = {linear.module for linear in te_linears() if linear.quantizable}
    for _, end in KINDS.values():
        assert any(end in path for path in paths)
