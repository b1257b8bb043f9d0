from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.gemms import Benchmark, amdahl, operation, speedup, totals
from lowprec_callback.recording import ROLES, Gemm, GemmTime
from lowprec_callback.report import Figure

from .recordings import Linear, gemm_times, gemms, te_linears

LINEARS = te_linears(layers=3)
TE_ONLY = [lin for lin in LINEARS if lin.quantizable]


def bench(*facts: list[GemmTime]) -> Benchmark:
    return Benchmark([(i, fact) for i, fact in enumerate((f for group in facts for f in group), start=100)])


def captured(linears: list[Linear], calls: int = 1) -> list[tuple[int, Gemm]]:
    return list(enumerate(gemms(linears, calls), start=1))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("layers.3.mlp.fc1", "layers.*.mlp.fc1"),
        ("model.stages.0.blocks.12.proj", "model.stages.*.blocks.*.proj"),
        ("conv3.linear", "conv3.linear"),
        ("0", "*"),
        ("", "(the model itself)"),
    ],
)
def test_operation(module: str, name: str) -> None:
    assert operation(module) == name


def test_totals_are_calls_times_medians() -> None:
    found = totals(captured(TE_ONLY, calls=2), bench(gemm_times("bf16", TE_ONLY, 0.3, 0.5)), "bf16", "bf16")
    assert found.kernel.value == pytest.approx(3 * 4 * 3 * 2 * 0.3)
    assert found.autocast.value == pytest.approx(3 * 4 * 3 * 2 * 0.5)
    assert len(found.rows) == 4 * len(ROLES)
    assert {row.calls for row in found.rows} == {6}
    assert found.rows[0].operation == "layers.*.self_attention.layernorm_qkv"
    assert found.kernel.low is not None
    assert found.kernel.low < (found.kernel.value or 0)
    assert found.kernel.facts[0] == "gemm lines 1-36"


def test_what_no_recipe_reaches_keeps_the_baselines_time() -> None:
    both = bench(gemm_times("bf16", LINEARS, 1.0, 1.0), gemm_times("fp8_delayed", TE_ONLY, 0.5, 0.6))
    base, fast = (totals(captured(LINEARS), both, name, "bf16") for name in ("bf16", "fp8_delayed"))
    assert base.kernel.value == pytest.approx(36 + 3)
    assert fast.kernel.value == pytest.approx(18 + 3)
    assert fast.autocast.value == pytest.approx(36 * 0.6 + 3)


def test_one_missing_shape_makes_the_sum_missing_and_is_named() -> None:
    times = gemm_times("fp8_delayed", TE_ONLY, 0.5, 0.6)
    holes = [time for time in times if not (time.role == "wgrad" and time.n == 1024 and time.mode == "kernel")]
    found = totals(captured(TE_ONLY), bench(holes), "fp8_delayed", "bf16")
    assert found.kernel.value is None
    assert found.kernel.reason == "fp8_delayed, wgrad, 1024x256x1024, kernel was not benchmarked"
    assert found.autocast.known


def test_a_failure_is_told_in_its_own_words() -> None:
    times = [
        replace(time, samples_ms=(), failure="out of memory") if time.role == "dgrad" else time
        for time in gemm_times("bf16", TE_ONLY, 0.5, 0.6)
    ]
    found = totals(captured(TE_ONLY), bench(times), "bf16", "bf16")
    assert found.kernel.reason is not None
    assert found.kernel.reason.startswith("the benchmark of bf16, dgrad, 1024x256x768, kernel failed: out of memory")
    assert "(and 3 more)" in found.kernel.reason
    assert any(not row.kernel_ms.known for row in found.rows)


def test_no_benchmark_and_no_capture() -> None:
    assert "no GEMM benchmark of bf16" in (totals(captured(TE_ONLY), bench(), "bf16", "bf16").kernel.reason or "")
    nothing = totals([], bench(gemm_times("bf16", TE_ONLY, 1, 1)), "bf16", "bf16")
    assert nothing.kernel.reason == "no linear-layer GEMM was captured"


def test_a_plain_linear_of_the_same_shape_does_not_stand_in() -> None:
    te, plain = Linear("a", 64, 64, 64), Linear("b", 64, 64, 64, "nn.Linear", quantizable=False)
    both = bench(gemm_times("bf16", [te], 1.0, 1.0), gemm_times("bf16", [plain], 9.0, 9.0))
    found = totals(captured([replace(te, family="LayerNormLinear"), plain]), both, "bf16", "bf16")
    assert [row.kernel_ms.value for row in found.rows] == [1.0, 1.0, 1.0, 9.0, 9.0, 9.0]


def test_a_grouped_call_needs_its_own_benchmark() -> None:
    grouped = Gemm("experts", "fprop", 1024, 64, 64, 1, "GroupedLinear", True, groups=8)
    times = gemm_times("bf16", [Linear("a", 1024, 64, 64)], 1.0, 1.0)
    found = totals([(1, grouped)], bench(times), "bf16", "bf16")
    assert found.kernel.reason is not None
    assert "as a call of 8 groups" in found.kernel.reason


def test_launch_bound_calls_are_counted() -> None:
    times = [replace(time, launch_bound=True) for time in gemm_times("bf16", TE_ONLY[:1], 0.01, 0.01)]
    found = totals(captured(TE_ONLY[:1], calls=5), bench(times), "bf16", "bf16")
    assert (found.launch_bound, found.calls) == (15, 15)
    assert all(row.launch_bound for row in found.rows)


def test_speedup() -> None:
    known = speedup(Figure(10.0, "ms", low=9.9, high=10.1), Figure(5.0, "ms", low=4.95, high=5.05))
    assert known.value == 2.0
    assert known.half_width == pytest.approx(2 * 2**0.5 * 0.01)
    assert speedup(Figure(1.0, "ms"), Figure.missing("ms", "why")).reason == "why"
    assert "zero" in (speedup(Figure(1.0, "ms"), Figure(0.0, "ms")).reason or "")


def test_amdahl_on_published_numbers() -> None:
    """CodonFM 5B on an H200: step 819.2 ms, GEMM kernels in it 666.9 ms, kernel-only 1.92x -> 1.64x."""
    found = amdahl(Figure(819.2, "ms"), Figure(666.9, "ms"), Figure(1.92, "x", low=1.9, high=1.94))
    assert found.value == pytest.approx(1.64, abs=0.005)
    assert found.low is not None
    assert found.high is not None
    assert found.low < (found.value or 0) < found.high


@given(st.floats(1, 1000), st.floats(0, 1), st.floats(1, 10))
def test_amdahl_lies_between_nothing_and_the_kernels(wall: float, share: float, s: float) -> None:
    found = amdahl(Figure(wall, "ms"), Figure(share * wall, "ms"), Figure(s, "x")).value
    assert found is not None
    assert 1 - 1e-9 <= found <= s * (1 + 1e-9)


def test_amdahl_is_missing_with_any_part() -> None:
    whole = (Figure(10.0, "ms"), Figure(5.0, "ms"), Figure(2.0, "x"))
    for position in range(3):
        parts = list(whole)
        parts[position] = Figure.missing("ms", f"part {position}")
        assert amdahl(*parts).reason == f"part {position}"
    assert "exceeds" in (amdahl(Figure(1.0, "ms"), Figure(9.0, "ms"), Figure(4.0, "x")).reason or "")
