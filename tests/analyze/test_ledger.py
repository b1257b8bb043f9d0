from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.ledger import PRIORITY, bucket_times, ledger
from lowprec_callback.analyze.traceview import TraceView, flaw, view
from lowprec_callback.report import BUCKETS, Figure, Ledger

from .recordings import ADAM, CAST, FUSED_ATTENTION, GEMM_NAMES, NORM, Kernel, step_kernels, te_linears, trace

GEMM = GEMM_NAMES["bf16"]["fprop"]
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MEMCPY = "Memcpy DtoD (Device -> Device)"
NAMES = (GEMM, CAST, NORM, FUSED_ATTENTION, ADAM, NCCL, MEMCPY, "who_knows_kernel")


def one(kernels: list[Kernel], wall_ms: float = 10.0, expected: int | None = None) -> TraceView:
    return view(trace("bf16", kernels, wall_ms, expected=expected), 17)


def made(views: list[TraceView], wall: float = 8.0, device: str = "cuda") -> Ledger:
    found, reason = ledger(views, Figure(wall, "ms", "measured", facts=("step_time line 3",)), device)
    assert found is not None
    assert reason is None
    return found


def total(found: Ledger) -> float:
    parts = [*found.buckets.values(), found.idle, found.residual]
    return math.fsum(part.value for part in parts if part.value is not None)


kernels = st.lists(
    st.builds(
        Kernel,
        name=st.sampled_from(NAMES),
        module=st.sampled_from(["", "layers.0.mlp", "layers.1.mlp", "head"]),
        role=st.sampled_from(["", "fprop", "wgrad"]),
        phase=st.sampled_from(["", "forward"]),
        us=st.floats(0, 3000),
        start=st.one_of(st.none(), st.floats(0, 9000)),
        stream=st.integers(0, 3),
    ),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(kernels, min_size=1, max_size=3),
    st.floats(0.1, 60),
    st.floats(0.1, 60),
    st.sampled_from(["cuda", "cpu"]),
)
def test_it_closes(steps: list[list[Kernel]], wall: float, traced: float, device: str) -> None:
    found = made([one(step, traced) for step in steps], wall, device)
    assert total(found) == pytest.approx(wall, rel=1e-9)
    assert tuple(found.buckets) == BUCKETS
    assert found.busy.value == pytest.approx(math.fsum(part.value or 0.0 for part in found.buckets.values()))
    assert found.idle.value is not None
    assert found.idle.value >= 0
    assert found.residual.value is not None
    if abs(found.residual.value) > 0.01 * wall:
        assert not found.complete
    assert math.fsum(place.ms.value or 0.0 for place in found.places) == pytest.approx(found.busy.value, abs=1e-9)
    assert len({(place.operation, place.where, place.bucket) for place in found.places}) == len(found.places)
    for bucket, figure in found.buckets.items():
        there = math.fsum(place.ms.value or 0.0 for place in found.places if place.bucket == bucket)
        assert there == pytest.approx(figure.value, abs=1e-9)
    if found.idle_parts:
        assert math.fsum(part.value or 0.0 for part in found.idle_parts.values()) == pytest.approx(found.idle.value)
    assert bool(found.idle_parts) is (device == "cuda")


def test_parts_of_a_plain_step() -> None:
    found = made(
        [one([Kernel(GEMM, 4000.0, "a", "fprop"), Kernel(NORM, 1000.0), Kernel(ADAM, 500.0, phase="optimizer")])]
    )
    values = {name: part.value for name, part in found.buckets.items() if part.value}
    assert values == pytest.approx({"gemm": 4.0, "norm": 1.0, "optimizer": 0.5})
    assert found.idle.value == pytest.approx(2.5)
    assert found.residual.value == pytest.approx(0.0)
    assert found.complete
    assert found.buckets["gemm"].facts == ("trace line 17",)
    assert found.buckets["hadamard"].value == 0.0


def test_buckets_are_means_over_the_traced_steps() -> None:
    found = made([one([Kernel(GEMM, 2000.0)]), one([Kernel(GEMM, 4000.0), Kernel(NORM, 1000.0)])])
    assert found.buckets["gemm"].value == pytest.approx(3.0)
    assert found.buckets["norm"].value == pytest.approx(0.5)
    assert found.busy.value == pytest.approx(3.5)


def test_hidden_communication_costs_nothing() -> None:
    found = made([one([Kernel(GEMM, 4000.0), Kernel(NCCL, 3000.0, start=2000.0, stream=20)])])
    assert found.buckets["gemm"].value == pytest.approx(4.0)
    assert found.buckets["communication"].value == pytest.approx(1.0)


def test_communication_that_computation_hides_is_told_beside_the_sum() -> None:
    gathers = [Kernel(NCCL, 3000.0, start=2000.0, stream=20), Kernel(NCCL, 2000.0, start=3000.0, stream=21)]
    found = made([one([Kernel(GEMM, 4000.0), *gathers]), one([Kernel(GEMM, 4000.0)])])
    # From 2 to 5 ms anything communicates: 2 ms of it behind the GEMM in one step of two.
    assert found.hidden_communication is not None
    assert found.hidden_communication.value == pytest.approx(1.0)
    assert found.buckets["communication"].value == pytest.approx(0.5)
    assert found.busy.value == pytest.approx(4.5)
    assert made([one([Kernel(GEMM, 4000.0)])]).hidden_communication is None


def test_places_are_operations_in_a_role_or_a_phase() -> None:
    layers = [Kernel(GEMM, 100.0, f"layers.{i}.mlp", "fprop", phase="forward") for i in range(3)]
    casts = [Kernel(CAST, 10.0, f"layers.{i}.mlp", phase="forward") for i in range(3)]
    found = made([one([*layers, *casts, Kernel(ADAM, 50.0, phase="optimizer")])])
    rows = [(place.operation, place.where, place.bucket, place.kernels) for place in found.places]
    assert rows == [
        ("layers.*.mlp", "fprop", "gemm", 3.0),
        ("", "optimizer", "optimizer", 1.0),
        ("layers.*.mlp", "forward", "quantize", 3.0),
    ]
    assert [place.ms.value for place in found.places] == pytest.approx([0.3, 0.05, 0.03])
    assert found.places[0].ms.facts == ("trace line 17",)


def test_priority_is_gemm_first_then_copies_and_communication_last() -> None:
    assert PRIORITY[0] == "gemm"
    assert PRIORITY[-2:] == ("copy", "communication")
    assert sorted(PRIORITY) == sorted(BUCKETS)


def test_kernels_longer_than_the_timed_step_are_a_negative_residual() -> None:
    found = made([one([Kernel(GEMM, 9000.0)])], wall=8.0)
    assert found.idle.value == 0.0
    assert found.residual.value == pytest.approx(-1.0)
    assert not found.complete
    assert "-1.00 ms, 12.5% of the step" in found.complaints[0]


def test_idle_is_never_more_than_the_traced_step_shows() -> None:
    found = made([one([Kernel(GEMM, 4000.0)], wall_ms=5.0)], wall=8.0)
    assert found.idle.value == pytest.approx(1.0)
    assert found.residual.value == pytest.approx(3.0)
    assert "+3.00 ms" in found.complaints[0]


def test_missing_kernels_make_it_incomplete() -> None:
    found = made([one(step_kernels("bf16", te_linears(1), 100.0), expected=16)])
    assert not found.complete
    assert "shows 15 linear-layer GEMM kernels, but 16 calls were counted" in found.complaints[0]
    assert made([one(step_kernels("bf16", te_linears(1), 100.0), expected=15)]).complete


def test_unknown_kernels_make_it_incomplete_and_are_named() -> None:
    odd = [Kernel(GEMM, 7000.0), Kernel("who_knows_kernel", 100.0), Kernel("another_riddle", 200.0)]
    found = made([one(odd)])
    assert found.unknown_kernels == ("another_riddle", "who_knows_kernel")
    assert not found.complete
    assert "0.30 ms, 3.7% of the step" in found.complaints[0]


def test_a_cpu_ledger_is_scaled_and_says_so() -> None:
    found = made(
        [one([Kernel("aten::mm", 6000.0, "a", "fprop"), Kernel("aten::copy_", 2000.0)])], wall=5.0, device="cpu"
    )
    assert found.buckets["gemm"].value == pytest.approx(3.0)
    assert found.buckets["copy"].value == pytest.approx(1.0)
    assert found.idle.value == pytest.approx(1.0)
    assert found.residual.value == pytest.approx(0.0, abs=1e-12)
    assert found.buckets["gemm"].origin == "estimated"
    assert found.note is not None
    assert "scaled by 0.500" in found.note
    assert found.complete


def test_views_and_allocation_on_a_cpu_are_not_unknown_kernels() -> None:
    found = made([one([Kernel("aten::mm", 6000.0, "a", "fprop"), Kernel("aten::view", 500.0)])], device="cpu")
    assert found.complete
    assert found.buckets["other"].value == pytest.approx(0.4)
    assert found.unknown_kernels == ("aten::view",)
    assert not made([one([Kernel("aten::view", 2000.0)])], device="cpu").complete


def test_without_a_trace_or_a_step_there_is_a_reason() -> None:
    assert ledger([], Figure(1.0, "ms"), "cuda") == (None, "no traced step was recorded")
    found, reason = ledger([one([])], Figure.missing("ms", "not run"), "cuda")
    assert found is None
    assert reason == "no step time to split: not run"


def test_an_empty_trace_is_all_idle() -> None:
    found = made([one([], wall_ms=9.0)])
    assert found.idle.value == 8.0
    assert bucket_times(one([])).sum() == 0.0


def test_a_malformed_trace_is_found_out() -> None:
    whole = trace("bf16", [Kernel(GEMM, 1.0)], 1.0)
    values = dict(whole.__dict__)
    assert flaw(whole) is None
    for change, text in (
        ({"duration_us": (1.0, 2.0)}, "unequal"),
        ({"name": (4,)}, "name"),
        ({"op": (9,)}, "label"),
        ({"start_us": (math.inf,)}, "finite"),
    ):
        assert text in str(flaw(type(whole)(**{**values, **change})))
