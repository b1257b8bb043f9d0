"""Why the GPU is idle: every part of a gap has one cause, and nothing is left out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.idle import BOUNDARY, CAUSES, idle_parts, split_idle
from lowprec_callback.analyze.intervals import union_length
from lowprec_callback.analyze.traceview import TraceView, flaw, view
from lowprec_callback.recording import HostPhases, HostWaits, Trace
from lowprec_callback.report import IDLE_CAUSES, Figure

from .recordings import GEMM_NAMES, Kernel, trace

GEMM = GEMM_NAMES["bf16"]["fprop"]
NAN = math.nan


def step(
    kernels: list[tuple[float, float, float]],
    wall_ms: float = 10.0,
    waits: list[tuple[float, float]] | None = None,
    data: list[tuple[float, float]] | None = None,
    host_end: float | None = None,
    call: str = "cudaStreamSynchronize",
) -> Trace:
    """Kernels as (launch, start, duration), waits and data phases as (start, end): milliseconds."""
    made = trace("bf16", [Kernel(GEMM, 1e3 * length, start=1e3 * start) for _, start, length in kernels], wall_ms)
    waits, zeros = waits or [], (0,) * len(waits or [])
    starts, lengths = tuple(1e3 * a for a, _ in waits), tuple(1e3 * (b - a) for a, b in waits)
    return replace(
        made,
        launch_us=tuple(1e3 * launch for launch, _, _ in kernels),
        waits=HostWaits((call,), zeros, starts, lengths, zeros, zeros, zeros),
        phases=None
        if data is None
        else HostPhases(("data",) * len(data), tuple(1e3 * a for a, _ in data), tuple(1e3 * b for _, b in data)),
        host_end_us=None if host_end is None else 1e3 * host_end,
    )


def parts(made: Trace) -> dict[str, float]:
    """Of the traced step, without those that are zero."""
    return {name: round(ms, 9) for name, ms in split_idle(view(made)).parts.items() if ms}


def test_a_late_launch_is_starvation_and_what_follows_it_latency() -> None:
    assert parts(step([(0.0, 0.0, 4.0), (6.0, 6.5, 3.5)])) == {"launch-starved": 2.0, "other": 0.5}


def test_a_kernel_that_was_launched_in_time_waits_for_something_else() -> None:
    assert parts(step([(0.0, 0.0, 4.0), (1.0, 6.0, 4.0)])) == {"other": 2.0}


def test_a_launch_that_is_not_known_is_other_and_counted() -> None:
    found = split_idle(view(step([(0.0, 0.0, 4.0), (NAN, 6.0, 4.0)])))
    assert found.parts["other"] == pytest.approx(2.0)
    assert found.unknown == pytest.approx(2.0)


def test_the_data_phase() -> None:
    made = step([(3.0, 3.5, 4.0), (4.0, 7.5, 2.5)], data=[(0.0, 2.0)])
    assert parts(made) == {"data": 2.0, "launch-starved": 1.0, "other": 0.5}


def test_without_phases_data_is_what_comes_before_the_first_forward_launch() -> None:
    made = step([(3.0, 3.0, 7.0)])
    assert parts(made) == {"launch-starved": 3.0}
    labelled = replace(made, labels=("", "forward"), phase=(1,))
    assert parts(labelled) == {"data": 3.0}


def test_a_wait_and_the_restart_after_it() -> None:
    # The host waits from 1 to 4.5, the GPU is dry from 4 on; the next launch comes at 6.
    made = step([(0.0, 0.0, 4.0), (6.0, 6.1, 3.9)], waits=[(1.0, 4.5)])
    assert parts(made) == {"synchronization": 2.0, "other": 0.1}
    found = split_idle(view(made))
    assert [(wait.call, round(ms, 9)) for wait, ms in found.behind] == [("cudaStreamSynchronize", 2.0)]


def test_a_wait_that_the_gpu_works_through_costs_nothing() -> None:
    assert parts(step([(0.0, 0.0, 9.0), (3.0, 9.0, 1.0)], waits=[(1.0, 2.5)])) == {}


def test_a_restart_into_the_data_phase_is_data_and_a_wait_there_is_a_wait() -> None:
    made = step([(0.0, 0.0, 2.0), (8.0, 8.0, 2.0)], waits=[(1.0, 3.0), (5.0, 6.0)], data=[(3.0, 7.0)])
    assert parts(made) == {"synchronization": 3.0, "data": 3.0}
    copy = step([(0.0, 0.0, 2.0), (8.0, 8.0, 2.0)], waits=[(5.0, 6.0)], data=[(3.0, 7.0)], call="cudaMemcpyAsync")
    assert parts(copy) == {"launch-starved": 1.0, "data": 4.0, "synchronization": 1.0}


def test_what_only_our_own_waits_at_the_ends_make_is_kept_apart() -> None:
    # The host is done at 7 and the GPU at 9: in a row of steps it would be 2 ms into the next one by then.
    made = step([(3.0, 3.0, 6.0)], data=[(0.0, 2.5)], host_end=7.0)
    assert parts(made) == {BOUNDARY: 3.0, "data": 0.5, "launch-starved": 0.5}
    behind = step([(3.0, 3.0, 4.0)], data=[(0.0, 2.5)], host_end=9.0)
    assert parts(behind) == {BOUNDARY: 1.0, "data": 2.5, "launch-starved": 2.5}


times = st.floats(0, 12)
spans = st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair))), max_size=4)
kernels = st.lists(st.tuples(st.one_of(st.just(NAN), st.floats(-3, 12)), times, st.floats(0, 4)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(kernels, st.floats(0.1, 12), spans, st.none() | spans, st.none() | times, st.floats(0, 1))
def test_every_idle_instant_has_one_cause(
    run: list[tuple[float, float, float]],
    wall: float,
    waits: list[tuple[float, float]],
    data: list[tuple[float, float]] | None,
    host_end: float | None,
    share: float,
) -> None:
    made = view(step(run, wall, waits, data, host_end))
    found = split_idle(made)
    busy = union_length(made.start_ms.clip(0, wall), made.end_ms.clip(0, wall))
    assert tuple(found.parts) == CAUSES
    assert min(found.parts.values()) >= 0
    assert found.total == pytest.approx(wall - busy, abs=1e-9)
    assert math.fsum(ms for _, ms in found.behind) == pytest.approx(found.parts["synchronization"], abs=1e-9)
    assert found.unknown <= found.parts["other"] + 1e-9

    idle = Figure(share * found.total, "ms")
    told = idle_parts([made, made], idle, on_cpu=False).figures
    assert math.fsum(part.value or 0.0 for part in told.values()) == pytest.approx(idle.value, abs=1e-9)
    assert all(part.origin == "estimated" and (part.value or 0.0) >= 0 for part in told.values())


def shares(made: TraceView, idle: float) -> dict[str, float]:
    told = idle_parts([made], Figure(idle, "ms"), on_cpu=False).figures
    return {name: round(part.value or 0.0, 9) for name, part in told.items()}


def test_what_tracing_adds_is_taken_from_our_own_waits_then_from_launching_then_from_all() -> None:
    made = view(step([(3.0, 3.0, 4.0), (8.0, 8.5, 0.5)], data=[(0.0, 1.0)], host_end=9.0))
    assert parts(step([(3.0, 3.0, 4.0), (8.0, 8.5, 0.5)], data=[(0.0, 1.0)], host_end=9.0)) == {
        "data": 1.0,
        "launch-starved": 3.0,
        "other": 0.5,
        BOUNDARY: 1.0,
    }
    assert shares(made, 4.5) == {"launch-starved": 3.0, "data": 1.0, "synchronization": 0.0, "other": 0.5}
    assert shares(made, 2.5) == {"launch-starved": 1.0, "data": 1.0, "synchronization": 0.0, "other": 0.5}
    assert shares(made, 0.75) == {"launch-starved": 0.0, "data": 0.5, "synchronization": 0.0, "other": 0.25}
    assert set(shares(made, 0.0).values()) == {0.0}


def test_what_a_recording_cannot_tell_apart_has_no_entry_and_a_note() -> None:
    old = replace(step([(3.0, 3.0, 7.0)]), waits=None)
    told = idle_parts([view(old)], Figure(3.0, "ms"), on_cpu=False)
    assert {name: part.value for name, part in told.figures.items()} == {"launch-starved": 3.0, "other": 0.0}
    assert "holds no waits of the host" in told.note
    assert "data phase" in told.note
    whole = step([(3.0, 3.0, 7.0)], data=[])
    assert tuple(idle_parts([view(whole)], Figure(3.0, "ms"), on_cpu=False).figures) == IDLE_CAUSES


def test_unknown_launches_are_told_and_a_cpu_has_no_split() -> None:
    lost = view(step([(0.0, 0.0, 4.0), (NAN, 6.0, 4.0)], data=[]))
    assert "2.00 ms of the 2.00 ms" in idle_parts([lost], Figure(1.0, "ms"), on_cpu=False).note
    assert "nothing is launched" in idle_parts([lost], Figure(1.0, "ms"), on_cpu=True).note
    assert not idle_parts([lost], Figure(1.0, "ms"), on_cpu=True).figures
    assert not idle_parts([lost], Figure.missing("ms", "why"), on_cpu=False).figures


def test_malformed_host_columns_are_found_out() -> None:
    whole = step([(0.0, 0.0, 1.0)], waits=[(0.0, 1.0)], data=[(0.0, 1.0)])
    assert flaw(whole) is None
    assert whole.waits is not None
    assert whole.phases is not None
    for change, text in (
        ({"waits": replace(whole.waits, start_us=())}, "unequal"),
        ({"waits": replace(whole.waits, name=(3,))}, "name"),
        ({"waits": replace(whole.waits, op=(9,))}, "label"),
        ({"waits": replace(whole.waits, duration_us=(NAN,))}, "finite"),
        ({"phases": replace(whole.phases, end_us=())}, "unequal"),
        ({"phases": replace(whole.phases, end_us=(math.inf,))}, "finite"),
        ({"host_end_us": NAN}, "finite"),
        ({"launch_us": ()}, "unequal"),
    ):
        assert text in str(flaw(replace(whole, **change)))  # type: ignore[arg-type]
