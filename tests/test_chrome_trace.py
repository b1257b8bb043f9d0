"""torch.profiler's traces: whole, packed, old, cut off, and in two halves."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowprec_callback import chrome_trace
from lowprec_callback.capture import NONE, Capture, project
from lowprec_callback.capture_error import CaptureError
from lowprec_callback.capture_facts import facts_of
from lowprec_callback.chrome_trace import read_trace
from lowprec_callback.measure.trace import read_events
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import GemmKernels, Imported, Problem, Recording, StepTime, Trace
from tests.measure.test_trace import TWO_STEPS

H200 = Path(__file__).parent / "data" / "h200" / "torch_trace_2048x12_fp8_current.json.gz"


def write(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({**more, "traceEvents": events, "traceName": "x"}), encoding="utf-8")
    return path


def facts(capture: Capture, recipe: str | None = None) -> Recording:
    return Recording.from_facts(facts_of(capture, load_cards(), recipe).facts)


@pytest.fixture(scope="module")
def h200() -> Capture:
    return read_trace(H200)


def columns(capture: Capture) -> dict[str, list[Any]]:
    work, ranges, waits = capture.work, capture.ranges, capture.waits
    assert waits is not None
    names = [capture.work_names[i] for i in work.name]
    told = [
        (capture.range_names[i], int(s), int(e)) for i, s, e in zip(ranges.name, ranges.start, ranges.end, strict=True)
    ]
    return {
        "work": sorted(zip(names, work.start, work.end, work.launch, work.stream, strict=True)),
        "ranges": sorted(told),
        "waits": sorted(
            (waits.names[i], int(s), int(e)) for i, s, e in zip(waits.name, waits.start, waits.end, strict=True)
        ),
    }


def test_the_real_trace(h200: Capture) -> None:
    assert (len(h200.work), len(h200.ranges)) == (3116, 12476)
    assert not (h200.work.launch == NONE).any()
    recording = facts(h200)
    (imported,) = recording.of(Imported)
    assert imported.recipe_from == "kernels"
    assert "own amax" in imported.why_recipe
    assert {step.recipe for step in recording.of(StepTime)} == {"fp8_current"}
    assert len(recording.of(StepTime)) == 2
    assert not recording.of(Problem)
    (table,) = recording.of(GemmKernels)
    seen: Counter[tuple[str, str]] = Counter()
    for i, count in enumerate(table.count):
        if table.library[i]:
            seen[table.labels[table.module[i]], table.labels[table.role[i]] or table.labels[table.phase[i]]] += count
    # 12 layers, 2 steps, four linears of which the MLP has two, each with one product forward and two backward.
    assert seen == {
        ("LayerNormLinear", "forward"): 24,
        ("Linear", "forward"): 24,
        ("LayerNormMLP", "forward"): 48,
        ("LayerNormLinear", "backward"): 48,
        ("Linear", "backward"): 48,
        ("LayerNormMLP", "backward"): 96,
    }


def test_the_hosts_waits(h200: Capture, tmp_path: Path) -> None:
    assert h200.waits is not None
    assert [h200.waits.names[name] for name in h200.waits.name] == ["cudaDeviceSynchronize"] * 2
    assert sorted((h200.waits.end - h200.waits.start).tolist()) == [3_939, 1_890_154]
    loader = {"ph": "X", "cat": "user_annotation", "tid": 100, "ts": 1000, "dur": 4}
    loader["name"] = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    called = {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "tid": 100, "ts": 1020, "dur": 9}
    events = [event for event in TWO_STEPS if "phase|" not in event.get("name", "")]
    made = facts(read_trace(write(tmp_path / "t.json", [*events, loader, called])), "fp8_current").of(Trace)[0]
    assert made.waits is not None
    assert (made.waits.names, made.waits.duration_us) == (("cudaStreamSynchronize",), (9.0,))
    assert made.phases is not None
    assert (made.phases.name, made.phases.end_us[0] - made.phases.start_us[0]) == (("data",), 4.0)


def test_it_places_kernels_as_the_reader_inside_the_process_does(tmp_path: Path) -> None:
    """Our own ranges: one step after the other, kernel by kernel."""
    # A kernel that begins before its launch is none: the two readers need not agree on it.
    events = [event for event in TWO_STEPS if event["name"] != "before"]
    (first, second) = read_events(events, "fp8_current", on_gpu=True)
    capture = read_trace(write(tmp_path / "x.json", events))
    traces = facts(capture, "fp8_current").of(Trace)

    def rows(trace: Trace, name: str) -> list[str]:
        texts = trace.names if name == "name" else trace.labels
        return [texts[index] for index in getattr(trace, name)]

    for here, there in zip(traces, (first, second), strict=True):
        for name in ("name", "module", "role", "op", "phase"):
            assert rows(here, name) == rows(there, name)
        assert here.duration_us == there.duration_us


def test_short_kernels_are_not_rounded_away(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.0},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "pid": 1, "tid": 1, "ts": 6.0, "dur": 5.0},
    ]
    for correlation, ts in ((1, 2.0), (2, 7.0)):
        events.append(_event("cuda_runtime", "cudaLaunchKernel", 1, ts, 0.1, correlation=correlation))
        events.append(_event("kernel", "k", 7, ts + 0.5, 0.001, correlation=correlation, stream=7))
    capture = read_trace(write(tmp_path / "x.json", events))
    assert list(capture.work.end - capture.work.start) == [1, 1]
    recording = facts(capture, "bf16")
    assert [trace.duration_us for trace in recording.of(Trace)] == [(0.001,), (0.001,)]
    assert [trace.step for trace in recording.of(Trace)] == [4, 5]


def _event(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def test_packed_and_plain_are_the_same(h200: Capture, tmp_path: Path) -> None:
    plain = tmp_path / "x.json"
    plain.write_bytes(gzip.decompress(H200.read_bytes()))
    assert columns(read_trace(plain)) == columns(h200)


@pytest.mark.parametrize("piece", [64, 1000, 100_000])
def test_where_it_is_cut_into_pieces_makes_no_difference(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seams inside of an event: texts like an event's begin in the arguments.
    trap = [_event("cpu_op", 'a "quoted", }, {"ph": name', 1, 0.0, 2000.0, inner=[{"ph": 1}, {"ph": 2}, {"ts": 3}])]
    path = write(tmp_path / "x.json", [*trap, *TWO_STEPS, *trap])
    whole = columns(read_trace(path))
    monkeypatch.setattr(chrome_trace, "PIECE", piece)
    assert columns(read_trace(path)) == whole
    assert len(whole["work"]) == 9


def test_two_processes_read_what_one_does(h200: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_trace, "TWO_PROCESSES", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert columns(read_trace(H200)) == columns(h200)


def test_the_other_form_is_a_bare_list(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(TWO_STEPS), encoding="utf-8")
    assert len(read_trace(path).work) == 9


def test_categories_of_older_releases(tmp_path: Path) -> None:
    old = {"kernel": "Kernel", "cuda_runtime": "Runtime", "cpu_op": "Operator", "gpu_memset": "Memset"}
    events = [event | {"cat": old.get(event.get("cat", ""), event.get("cat"))} for event in TWO_STEPS]
    capture = read_trace(write(tmp_path / "x.json", events))
    assert len(capture.work) == 9


def test_the_gpu_is_named_before_the_events(tmp_path: Path) -> None:
    gpu = {"id": 0, "name": "NVIDIA B200", "computeMajor": 10, "computeMinor": 0, "numSms": 148}
    capture = read_trace(write(tmp_path / "x.json", TWO_STEPS, schemaVersion=1, deviceProperties=[gpu]))
    assert (capture.device, capture.compute_capability) == ("NVIDIA B200", (10, 0))
    assert capture.facts == {"multiprocessors": "148"}


# -- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_is_cut_off_tells_what_came_before(packed: bool, tmp_path: Path) -> None:
    raw = gzip.decompress(H200.read_bytes())
    half = raw[: len(raw) * 3 // 4]
    path = tmp_path / "x.json"
    path.write_bytes(gzip.compress(raw)[: 3 * len(gzip.compress(raw)) // 4] if packed else half)
    capture = read_trace(path)
    assert "the file is cut off after" in capture.complaints[0]
    assert 1000 < len(capture.work) < 3116


def refused(path: Path) -> str:
    with pytest.raises(CaptureError) as error:
        read_trace(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("hello", "it is not JSON"),
        ('{"schemaVersion": 1, "deviceProp', "is cut off before its events"),
        ('{"other": []}', 'it has no "traceEvents"'),
        ('{"traceEvents": []}', "holds 0 events and no GPU kernel"),
        ('{"traceEvents": [{"ph": "X", "cat": "ker', "before it was cut off"),
        ('{"traceEvents": [1, "two", null, [3]]}', "no GPU kernel"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "x", "dur": 1}]}',
            "none of torch.profiler's",
        ),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1}]}', "holds 1 events and no GPU kernel"),
    ],
)
def test_nothing_can_be_concluded(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    assert says in refused(path)


def test_a_trace_of_the_cpu_alone(tmp_path: Path) -> None:
    assert "ProfilerActivity.CUDA" in refused(
        write(tmp_path / "x.json", [e for e in TWO_STEPS if e.get("cat") == "cpu_op"])
    )


def test_a_trace_of_the_gpu_alone(tmp_path: Path) -> None:
    events = [event for event in TWO_STEPS if event.get("cat") in ("kernel", "gpu_memset")]
    capture = read_trace(write(tmp_path / "x.json", events))
    assert "no launch calls" in capture.complaints[0]
    assert (capture.work.launch == NONE).all()
    found = project(capture)
    assert set(np.array([place.module for place in found.places])[found.place]) == {""}
