"""The whole-step clock, with clocks that are played: no test here measures time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.measure import memory, steps
from lowprec_callback.measure.steps import ForwardClock, HostProbe, StepClock
from lowprec_callback.recording import ForwardTime, HostTime, Memory, StepTime

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def ticking(*instants: float) -> Callable[[], float]:
    """A clock that shows one instant after the other, in seconds."""
    return iter(instants).__next__


class Gpu:
    """A GPU whose events are reached at given milliseconds, and which counts how often it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *instants: float) -> None:
        self.instants, self.waits, self.streams = list(instants), 0, []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                gpu.streams.append(stream)
                self.at = gpu.instants.pop(0)

            def elapsed_time(self, other: Any) -> float:
                assert gpu.waits, "an event was read before it was reached"
                return other.at - self.at

        def wait(device: Any) -> None:
            gpu.waits += 1

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(torch.cuda, "synchronize", wait)


@given(st.lists(st.integers(0, 10**6), max_size=9))
def test_steps_lie_between_boundaries(durations: list[int]) -> None:
    instants = [0.0]
    for duration in durations:
        instants.append(instants[-1] + duration)
    clock = StepClock(CPU, now=ticking(*instants))
    for _ in instants:
        clock.boundary()
    times = clock.read("bf16", 2)
    assert [time.ms for time in times] == [1e3 * duration for duration in durations]
    assert [time.index for time in times] == list(range(len(durations)))
    assert all(time.host_ms == time.ms and time.recipe == "bf16" and time.round == 2 for time in times)
    assert not any(time.discarded for time in times)


def test_no_boundaries_no_steps() -> None:
    assert StepClock(CPU, now=ticking()).read("bf16", 0) == []
    clock = StepClock(CPU, now=ticking(1.0))
    clock.boundary()
    assert clock.read("bf16", 0) == []


def test_a_step_that_does_not_count_keeps_its_time_and_the_first_reason() -> None:
    clock = StepClock(CPU, now=ticking(0.0, 1.0, 2.0, 3.0))
    clock.discard("before the first boundary: no step of ours")
    clock.boundary()
    clock.boundary()
    clock.discard("evaluation")
    clock.discard("a checkpoint")
    clock.boundary()
    clock.boundary()
    clock.discard("after the last step")
    assert [(time.ms, time.discarded) for time in clock.read("bf16", 0)] == [
        (1000.0, None),
        (1000.0, "evaluation"),
        (1000.0, None),
    ]


def test_reading_does_not_end_the_block() -> None:
    clock = StepClock(CPU, now=ticking(0.0, 1.0, 3.0))
    clock.boundary()
    clock.boundary()
    assert len(clock.read("bf16", 0)) == 1
    clock.boundary()
    assert [time.ms for time in clock.read("bf16", 0)] == [1000.0, 2000.0]


def test_on_a_gpu_events_are_read_after_one_wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, 100.0, 108.5, 120.0)
    clock = StepClock(CUDA, now=ticking(0.0, 0.001, 0.003))
    for _ in range(3):
        clock.boundary()
    assert gpu.waits == 0
    assert clock.read("fp8_delayed", 1) == [
        StepTime("fp8_delayed", 1, 0, ms=8.5, host_ms=1.0),
        StepTime("fp8_delayed", 1, 1, ms=11.5, host_ms=2.0),
    ]
    assert gpu.waits == 1
    assert gpu.streams == ["stream of cuda"] * 3


def test_the_host_probe_on_a_cpu() -> None:
    probe = HostProbe(CPU, now=ticking(1.0, 1.25, 1.25))
    probe.start()
    assert probe.stop("fp32", 0) == HostTime("fp32", 0, ms=250.0, drain_ms=0.0)


def test_the_host_probe_begins_and_ends_with_an_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    waits_at: list[int] = []
    instants = ticking(1.0, 1.5, 1.75)

    def now() -> float:
        waits_at.append(gpu.waits)
        return instants()

    probe = HostProbe(CUDA, now=now)
    probe.start()
    assert probe.stop("bf16", 3) == HostTime("bf16", 3, ms=500.0, drain_ms=250.0)
    assert waits_at == [1, 1, 2]


def test_nothing_is_waited_for_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    steps.synchronize(CPU)
    assert gpu.waits == 0


# -- memory --------------------------------------------------------------------------------------------------------


def test_no_memory_is_recorded_on_a_cpu() -> None:
    memory.clean(CPU)
    memory.reset_peak(CPU)
    assert memory.read(CPU, "fp32", 0, "step") == []


def test_the_allocators_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append("reset"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    memory.clean(CUDA)
    memory.reset_peak(CUDA)
    assert called == ["empty", "reset"]
    stats = {
        "allocated_bytes.all.current": 10,
        "allocated_bytes.all.peak": 30,
        "reserved_bytes.all.current": 40,
        "requested_bytes.all.current": 9,
        "inactive_split_bytes.all.current": 7,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    expected = Memory("bf16", 1, "forward", allocated=10, peak=30, reserved=40, requested=9, inactive_split=7)
    assert memory.read(CUDA, "bf16", 1, "forward") == [expected]
    stats.clear()  # an allocator that does not count what was asked for
    assert memory.read(CUDA, "bf16", 1, "forward")[0].requested is None


# -- forward passes ----------------------------------------------------------------------------------------------------


def forwards(clock: ForwardClock, *passes: int) -> None:
    """Steps of so many forward passes each, and the boundary after the last."""
    clock.boundary()
    for count in passes:
        for _ in range(count):
            with clock.forward():
                pass
        clock.boundary()


def test_the_forward_passes_of_a_step_are_added_up() -> None:
    clock = ForwardClock(CPU, now=ticking(1.0, 1.25, 2.0, 2.5, 4.0, 5.0))
    forwards(clock, 2, 1)
    assert clock.read("bf16", 3) == ForwardTime("bf16", 3, (750.0, 1000.0))


def test_a_step_without_a_forward_pass_is_no_sample() -> None:
    clock = ForwardClock(CPU, now=ticking(1.0, 2.0))
    forwards(clock, 0, 1, 0)
    assert clock.read("bf16", 0).ms == (1000.0,)


def test_forward_passes_on_a_gpu_lie_between_events_that_are_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, 0.0, 3.0, 10.0, 14.0)
    clock = ForwardClock(CUDA)
    forwards(clock, 1, 1)
    assert gpu.waits == 0
    assert gpu.streams == ["stream of cuda"] * 4
    assert clock.read("bf16", 0).ms == (3.0, 4.0)
    assert gpu.waits == 1


def test_a_forward_pass_that_raises_is_no_sample() -> None:
    clock = ForwardClock(CPU, now=ticking(1.0, 2.0, 3.0))
    clock.boundary()
    with pytest.raises(ZeroDivisionError), clock.forward():
        raise ZeroDivisionError
    with clock.forward():
        pass
    assert clock.read("bf16", 0).ms == (1000.0,)
