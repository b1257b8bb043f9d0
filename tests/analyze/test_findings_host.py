"""Findings about a host that is late in a part of the step, and about casts that nobody asked for."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.findings_host import LONG_MS, late_gaps
from lowprec_callback.analyze.idle import STARVED, split_idle
from lowprec_callback.analyze.traceview import view
from lowprec_callback.recording import Fact, HostPhases, HostWaits, Trace, decode

from .recordings import BF16, DELAYED, SEED_BF16, SEED_DELAYED, Kernel, gpu_facts, step_kernels, te_linears, trace
from .test_findings import PLAIN, changed, found, with_kernels

LINEARS = te_linears(2)
TO_BF16 = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda(float)#1}, std::array<char*, 2ul> >(int, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda(float)#1}, std::array<char*, 2ul>)"
)
SAME_TYPE = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_"
    "cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const"
)


def spaced(gap_us: Callable[[int, Kernel], float], step_ms: float, host_ms: float) -> list[Fact]:
    """fp8_delayed with gaps before its kernels, all launched at the last moment; the others as in `gpu_facts`."""
    made, now = [], 0.0
    for index, kernel in enumerate(step_kernels("fp8_delayed", LINEARS, 150.0, 20.0)):
        now += gap_us(index, kernel)
        made.append(replace(kernel, start=now, phase=kernel.phase or "forward"))
        now += kernel.us
    speeds = {"bf16": BF16, "fp8_delayed": replace(DELAYED, step_ms=step_ms, host_ms=host_ms)}
    new = trace("fp8_delayed", made, step_ms, expected=27)
    return changed(gpu_facts(speeds=speeds), lambda f: new if isinstance(f, Trace) and f.recipe == "fp8_delayed" else f)


def short(index: int, kernel: Kernel) -> float:
    return 60.0 if 0 < index <= 30 else 0.0


def before_the_optimizer(us: float) -> Callable[[int, Kernel], float]:
    return lambda index, kernel: us if kernel.phase == "optimizer" else 0.0


def test_a_part_of_the_step_waits_for_launches() -> None:
    """The forward pass is late and the backward pass is not: the host's whole step is far below the GPU's."""
    facts = spaced(short, 7.6, 4.6)
    one = found(facts, "launch-starved")
    assert one is not None
    assert one.ms.value == pytest.approx(1.5, abs=0.3)  # some launches are not recorded
    assert "in the forward phase" in one.sentence
    assert "te.make_graphed_callables" in one.advice
    assert found(facts, "launch-bound") is None
    assert found(facts, "host-stall") is None
    assert found(PLAIN, "launch-starved") is None


def test_where_the_whole_step_is_launch_bound_it_is_told_once() -> None:
    facts = spaced(short, 7.6, 7.5)
    assert found(facts, "launch-bound") is not None
    assert found(facts, "launch-starved") is None


def test_the_host_does_something_else_than_launching() -> None:
    facts = spaced(before_the_optimizer(9000.0), 15.0, 14.9)
    one = found(facts, "host-stall")
    assert one is not None
    assert one.ms.value == pytest.approx(9.0, rel=0.05)
    assert "in the optimizer phase" in one.sentence
    assert "offloaded" not in one.advice
    assert found(facts, "launch-bound") is None  # CUDA graphs would not help
    assert found(PLAIN, "host-stall") is None
    assert found(spaced(before_the_optimizer(1000.0 * LONG_MS - 1), 11.0, 10.9), "host-stall") is None


def test_an_offloaded_optimizer_is_named_by_its_copies() -> None:
    def offloaded(fact: Fact) -> Fact:
        if isinstance(fact, Trace) and fact.recipe == "fp8_delayed":
            names = tuple("Memcpy HtoD (Pinned -> Device)" if "Adam" in name else name for name in fact.names)
            return replace(fact, names=names)
        return fact

    one = found(changed(spaced(before_the_optimizer(9000.0), 15.0, 14.9), offloaded), "host-stall")
    assert one is not None
    assert "offloaded" in one.advice
    assert any("copies from the host" in row for row in one.evidence)


def test_a_long_gap_in_which_the_host_waits_or_loads_is_no_stall() -> None:
    facts = spaced(before_the_optimizer(9000.0), 15.0, 14.9)
    begin = next(f for f in facts if isinstance(f, Trace) and f.recipe == "fp8_delayed").start_us[-1] - 9000.0

    def waiting(fact: Fact) -> Fact:
        if not isinstance(fact, Trace) or fact.recipe != "fp8_delayed":
            return fact
        return replace(fact, waits=HostWaits(("cudaStreamSynchronize",), (0,), (begin,), (9000.0,), (0,), (0,), (0,)))

    def loading(fact: Fact) -> Fact:
        if not isinstance(fact, Trace) or fact.recipe != "fp8_delayed":
            return fact
        return replace(fact, phases=HostPhases(("data",), (begin,), (begin + 9000.0,)))

    assert found(changed(facts, waiting), "host-stall") is None
    assert found(changed(facts, loading), "host-stall") is None


def test_a_launch_bound_step_with_a_long_gap_tells_both_apart() -> None:
    seed = {"bf16": SEED_BF16, "fp8_delayed": SEED_DELAYED}
    before = found(gpu_facts(speeds=seed), "launch-bound")

    def later(fact: Fact) -> Fact:
        """The optimizer's kernel starts, and is launched, 8 ms later."""
        if not isinstance(fact, Trace) or fact.recipe != "fp8_delayed":
            return fact
        start, launch = (*fact.start_us[:-1], fact.start_us[-1] + 8000.0), fact.launch_us
        return replace(fact, start_us=start, launch_us=(*launch[:-1], start[-1]))

    facts = changed(gpu_facts(speeds=seed), later)
    bound, stall = found(facts, "launch-bound"), found(facts, "host-stall")
    assert before is not None
    assert bound is not None
    assert stall is not None
    assert stall.ms.value == pytest.approx(8.0, rel=0.01)
    assert bound.ms.value == pytest.approx((before.ms.value or 0.0) - 8.0, rel=0.01)
    assert "in which the host does something else" in bound.sentence


def test_casts_from_fp32() -> None:
    place = "layers.0.self_attention.proj"
    one = found(
        with_kernels([Kernel(TO_BF16, 50.0, place, phase="forward")] * 8, "bf16", BF16), "casts-from-fp32", "bf16"
    )
    assert one is not None
    assert one.ms.value == pytest.approx(0.4)
    assert "layers.*.self_attention.proj" in one.evidence[1]
    assert found(PLAIN, "casts-from-fp32", "bf16") is None
    few = with_kernels([Kernel(TO_BF16, 50.0, place, phase="forward")] * 3, "bf16", BF16)
    assert found(few, "casts-from-fp32", "bf16") is None
    plain = with_kernels([Kernel(SAME_TYPE, 50.0, place, phase="forward")] * 8, "bf16", BF16)
    assert found(plain, "casts-from-fp32", "bf16") is None
    masters = with_kernels([Kernel(TO_BF16, 50.0, phase="optimizer")] * 8, "bf16", BF16)
    assert found(masters, "casts-from-fp32", "bf16") is None


def test_launches_of_a_real_step_are_far_from_a_long_gap() -> None:
    """CodonFM 5B on an H200: the host runs ahead; where it is late, it is so by less than a millisecond."""
    text = gzip.decompress((Path(__file__).parents[2] / "docs" / "codonfm-5b" / "recording.jsonl.gz").read_bytes())
    traces = [decode(line) for line in text.decode().splitlines() if line.startswith('{"fact":"trace"')]
    assert traces
    gaps = [gap for made in traces if isinstance(made, Trace) for gap in late_gaps(view(made))]
    assert len(gaps) > 20
    assert 0.1 < max(gap.ms for gap in gaps) < 0.2 * LONG_MS


GAPS = st.lists(st.tuples(st.floats(0.0, 9000.0), st.floats(1.0, 500.0), st.floats(-2000.0, 2000.0)), max_size=12)


@given(GAPS, st.lists(st.tuples(st.floats(0.0, 20_000.0), st.floats(1.0, 8000.0)), max_size=4))
def test_gaps_are_no_longer_than_the_idle_that_launches_explain(
    rows: list[tuple[float, float, float]], loads: list[tuple[float, float]]
) -> None:
    """Between kernels a late host is what the idle split calls launch-starved, whatever kernels, launches and loads."""
    kernels, launches, now = [], [], 0.0
    for gap, us, early in rows:
        now += gap
        kernels.append(Kernel("k", us, start=now))
        launches.append(now - early)
        now += us
    phases = HostPhases(
        ("data",) * len(loads), tuple(sorted(a for a, _ in loads)), tuple(a + us for a, us in sorted(loads))
    )
    made = replace(trace("bf16", kernels, now / 1e3 + 1.0), launch_us=tuple(launches), phases=phases)
    gaps = late_gaps(view(made))
    assert all(gap.ms > 0 for gap in gaps)
    assert sum(gap.ms for gap in gaps) <= split_idle(view(made)).parts[STARVED] + 1e-6
