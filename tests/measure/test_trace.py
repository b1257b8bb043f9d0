"""The profiler's trace: every kernel finds its launch, its operator, its module, its role and its phase."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowprec_callback.measure.scopes import ModuleScopes, Scope
from lowprec_callback.measure.trace import (
    PREFIX,
    Tracer,
    _Places,
    gemm_range,
    module_range,
    phase_range,
    read_events,
    read_gemm_kernels,
    read_products,
    read_step_products,
    step_range,
)
from lowprec_callback.recording import Trace

H200 = Path(__file__).parents[1] / "data" / "h200" / "torch_trace_2048x12_fp8_current.json.gz"

MAIN, AUTOGRAD = 100, 200


def op(name: str, ts: float, dur: float, tid: Any = MAIN) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "tid": tid, "ts": ts, "dur": dur}


def range_(name: str, ts: float, dur: float, tid: Any = MAIN) -> dict[str, Any]:
    return {**op(PREFIX + name, ts, dur, tid), "cat": "user_annotation"}


def launch(correlation: int, ts: float, tid: Any = MAIN, cat: str = "cuda_runtime") -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": "cudaLaunchKernel", "tid": tid, "ts": ts, "dur": 1.0, "args": args}


def kernel(name: str, correlation: int, ts: float, dur: float, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    args = {"correlation": correlation, "stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "tid": stream, "ts": ts, "dur": dur, "args": args}


def rows(trace: Trace) -> list[dict[str, Any]]:
    """A trace's columns as one dict for each kernel."""
    return [
        {
            "name": trace.names[trace.name[i]],
            "start": trace.start_us[i],
            "duration": trace.duration_us[i],
            "stream": trace.stream[i],
            "launch": trace.launch_us[i],
            **{what: trace.labels[getattr(trace, what)[i]] for what in ("module", "role", "op", "phase")},
        }
        for i in range(len(trace.name))
    ]


# -- a small trace, by hand ------------------------------------------------------------------------------------------

TWO_STEPS = [
    range_("step|0", 1000, 100),
    range_("phase|data", 1000, 5),
    range_("phase|forward", 1005, 30),
    range_("module|forward|mlp", 1006, 20),
    op("_LayerNormMLP", 1007, 18),
    op("aten::empty", 1008, 1),
    range_("gemm|fprop|mlp.fc1", 1010, 6),
    launch(1, 1011),
    launch(2, 1018),
    launch(3, 1030),
    range_("phase|backward", 1040, 40),
    # Autograd runs the backward pass on a thread of its own.
    op("autograd::engine::evaluate_function: _LayerNormMLPBackward", 1045, 20, AUTOGRAD),
    range_("module|backward|mlp", 1046, 18, AUTOGRAD),
    op("_LayerNormMLPBackward", 1047, 16, AUTOGRAD),
    range_("gemm|dgrad|mlp.fc2", 1048, 4, AUTOGRAD),
    launch(4, 1049, AUTOGRAD),
    launch(5, 1055, AUTOGRAD, "cuda_driver"),
    range_("phase|optimizer", 1085, 10),
    op("Optimizer.step#AdamW.step", 1086, 8),
    launch(6, 1088),
    range_("step|1", 1100, 50),
    launch(7, 1105),
    # On the GPU, later and on two streams.
    kernel("nvjet_qqtst", 1, 1012, 8),
    kernel("cast", 2, 1020, 3),
    kernel("add", 3, 1031, 2),
    kernel("nvjet_qrtst", 4, 1050, 9, stream=8),
    kernel("cast", 5, 1059, 3, stream=8),
    kernel("adam", 6, 1089, 4),
    kernel("lost", 99, 1095, 1),
    kernel("Memset (Device)", 7, 1106, 1, cat="gpu_memset"),
    kernel("before", 7, 999.5, 1),
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "i", "name": "Iteration Start", "ts": 1000},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "lowprec|step|0", "tid": 7, "ts": 1012, "dur": 90},
]


def test_what_the_engine_sums_after_a_node_is_of_the_nodes_module() -> None:
    """Gradients of a tensor that is used twice are added after the second node, when our range there is over."""
    engine = "autograd::engine::evaluate_function: "
    events = [
        range_("step|0", 1000, 100),
        op(f"{engine}SliceBackward0", 1010, 20, AUTOGRAD),
        range_("module|backward|self_attention", 1011, 5, AUTOGRAD),
        op("SliceBackward0", 1012, 3, AUTOGRAD),
        launch(1, 1013, AUTOGRAD),
        op("aten::add", 1018, 4, AUTOGRAD),
        launch(2, 1019, AUTOGRAD),
        launch(3, 1025, AUTOGRAD),
        # A node of no module: what follows it is nobody's.
        op(f"{engine}AddBackward0", 1032, 8, AUTOGRAD),
        op("aten::add", 1034, 4, AUTOGRAD),
        launch(4, 1035, AUTOGRAD),
        # A module's forward pass inside a node (recomputation) does not make the node that module's.
        op(f"{engine}CheckpointFunctionBackward", 1042, 20, AUTOGRAD),
        range_("module|forward|mlp", 1043, 5, AUTOGRAD),
        launch(5, 1044, AUTOGRAD),
        op("aten::add", 1050, 4, AUTOGRAD),
        launch(6, 1051, AUTOGRAD),
        *(kernel("k", number, 1050 + number, 1) for number in range(1, 7)),
    ]
    (trace,) = read_events(events, "bf16", on_gpu=True)
    assert [(row["module"], row["op"]) for row in rows(trace)] == [
        ("self_attention", "SliceBackward0"),
        ("self_attention", "aten::add"),
        ("self_attention", f"{engine}SliceBackward0"),
        ("", "aten::add"),
        ("mlp", f"{engine}CheckpointFunctionBackward"),
        ("", "aten::add"),
    ]


def test_the_kernels_inside_gemm_ranges() -> None:
    again = [launch(8, 1012), kernel("splitk", 8, 1021, 1), launch(9, 1013), kernel("nvjet_qqtst", 9, 1022, 8)]
    assert read_gemm_kernels([*again, *TWO_STEPS]) == {
        ("mlp.fc1", "fprop"): ("nvjet_qqtst", "splitk"),
        ("mlp.fc2", "dgrad"): ("nvjet_qrtst",),
    }
    assert read_gemm_kernels([]) == {}


def test_every_kernel_finds_its_place() -> None:
    first, second = read_events(TWO_STEPS, "fp8_current", on_gpu=True, expected_gemms=2)
    places = [tuple(row[what] for what in ("name", "module", "role", "op", "phase")) for row in rows(first)]
    backward = "_LayerNormMLPBackward"
    assert places == [
        ("nvjet_qqtst", "mlp.fc1", "fprop", "_LayerNormMLP", "forward"),
        ("cast", "mlp", "", "_LayerNormMLP", "forward"),
        ("add", "", "", "", "forward"),
        ("nvjet_qrtst", "mlp.fc2", "dgrad", backward, "backward"),
        ("cast", "mlp", "", backward, "backward"),
        ("adam", "", "", "Optimizer.step#AdamW.step", "optimizer"),
        ("lost", "", "", "", ""),
    ]
    assert [(row["name"], row["op"]) for row in rows(second)] == [("Memset (Device)", "")]
    assert (first.expected_gemms, second.expected_gemms) == (2, 2)


def test_what_may_be_a_product_stands_in_order_of_launch() -> None:
    """The second GEMM overtakes the first on another stream; copies and fills are no products."""
    overtaking = [{**event, "ts": 1009} if event.get("name") == "nvjet_qrtst" else event for event in TWO_STEPS]
    (first,) = read_step_products(overtaking, "fp8_current", on_gpu=True, steps=[0])
    columns = (first.module, first.role, first.phase)
    found = [
        (first.names[name], *(first.labels[i] for i in labels))
        for name, *labels in zip(first.name, *columns, strict=True)
    ]
    assert found == [
        ("nvjet_qqtst", "mlp.fc1", "fprop", "forward"),
        ("cast", "mlp", "", "forward"),
        ("add", "", "", "forward"),
        ("nvjet_qrtst", "mlp.fc2", "dgrad", "backward"),
        ("cast", "mlp", "", "backward"),
        ("adam", "", "", "optimizer"),
        ("lost", "", "", ""),
    ]
    assert set(first.formats) == {0}
    # A kernel is of the step that launched it.
    (second,) = read_step_products(TWO_STEPS, "fp8_current", on_gpu=True, steps=[1])
    assert (second.step, second.names) == (1, ("before",))


def test_on_a_cpu_products_tell_their_types() -> None:
    product = op("aten::mm", 10, 5)
    product["args"] = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [range_("step|3", 0, 100), range_("phase|forward", 5, 50), product, op("aten::add", 20, 5)]
    (step,) = read_step_products(events, "bf16", on_gpu=False, steps=[3])
    assert (step.step, [step.names[i] for i in step.name]) == (3, ["aten::mm"])
    assert [step.labels[i] for i in (*step.formats, *step.phase)] == ["bf16 x bf16", "forward"]


def test_times_count_from_the_beginning_of_the_step() -> None:
    first, second = read_events(TWO_STEPS, "fp8_current", on_gpu=True)
    assert (first.step, first.wall_ms, second.step, second.wall_ms) == (0, 0.1, 1, 0.05)
    assert first.start_us[:2] == (12.0, 20.0)
    assert first.duration_us[:2] == (8.0, 3.0)
    assert first.launch_us[:2] == (11.0, 18.0)
    assert math.isnan(first.launch_us[-1])
    assert set(first.stream) == {7, 8}
    assert second.launch_us == (5.0,)
    assert first.expected_gemms is None
    assert first.recipe == "fp8_current"


def test_names_and_labels_are_stored_once() -> None:
    (first, _) = read_events(TWO_STEPS, "x", on_gpu=True)
    assert len(set(first.names)) == len(first.names)
    assert len(set(first.labels)) == len(first.labels)
    assert first.labels[0] == ""
    columns = (first.start_us, first.duration_us, first.stream, first.launch_us, first.module, first.role, first.op)
    assert {len(column) for column in (*columns, first.phase)} == {len(first.name)}


def test_a_trace_without_steps_or_without_work() -> None:
    assert read_events([], "x", on_gpu=True) == []
    assert read_events([kernel("k", 1, 0, 1)], "x", on_gpu=True) == []
    (empty,) = read_events([range_("step|3", 0, 10)], "x", on_gpu=True)
    assert (empty.step, empty.name, empty.names, empty.labels) == (3, (), (), ("",))


def sync(name: str, ts: float, dur: float, tid: Any = MAIN, correlation: int = 50) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "tid": tid, "ts": ts, "dur": dur, "args": args}


def test_the_hosts_waits_and_phases_and_not_our_own_waits() -> None:
    more = [
        op("aten::item", 1019, 11),
        sync("cudaMemcpyAsync", 1020, 4, correlation=51),
        kernel("Memcpy DtoH (Device -> Pageable)", 51, 1021, 2, cat="gpu_memcpy"),
        sync("cudaStreamSynchronize", 1025, 4),
        sync("cudaMemcpyAsync", 1031, 1, correlation=52),
        kernel("Memcpy HtoD (Pinned -> Device)", 52, 1036, 2, cat="gpu_memcpy"),
        sync("cudaStreamSynchronize", 1060, 3, tid=999),
        sync("cudaStreamWaitEvent", 1062, 3),
        range_("own|synchronize", 1095, 4),
        sync("cudaDeviceSynchronize", 1096, 2.5),
    ]
    first, second = read_events([*TWO_STEPS, *more], "fp8_current", on_gpu=True)
    waits = first.waits
    assert waits is not None
    labels = first.labels
    assert [waits.names[name] for name in waits.name] == ["cudaMemcpyAsync", "cudaStreamSynchronize"]
    assert (waits.start_us, waits.duration_us) == ((20.0, 25.0), (4.0, 4.0))
    assert [labels[i] for i in waits.op] == ["aten::item", "aten::item"]
    assert [labels[i] for i in waits.module] == ["mlp", "mlp"]
    assert [labels[i] for i in waits.phase] == ["forward", "forward"]
    assert first.host_end_us == 95.0
    assert first.phases is not None
    assert first.phases.name == ("data", "forward", "backward", "optimizer")
    assert (first.phases.start_us, first.phases.end_us) == ((0.0, 5.0, 40.0, 85.0), (5.0, 35.0, 80.0, 95.0))
    assert second.waits is not None
    assert (second.waits.name, second.phases, second.host_end_us) == ((), None, None)
    (on_cpu, _) = read_events([*TWO_STEPS, *more], "fp32", on_gpu=False)
    assert on_cpu.waits is None


def test_a_real_trace_waits_once_at_its_end(h200: list[dict[str, Any]]) -> None:
    begin, end = h200[0]["ts"], max(event["ts"] + event.get("dur", 0) for event in h200 if event.get("ph") == "X")
    step = {"ph": "X", "cat": "user_annotation", "name": "lowprec|step|0", "tid": 533, "ts": begin, "dur": end - begin}
    (found,) = read_events([*h200, step], "fp8_current", on_gpu=True)
    assert found.waits is not None
    assert [found.waits.names[name] for name in found.waits.name] == ["cudaDeviceSynchronize"] * 2


def test_steps_come_in_order() -> None:
    events = [range_(f"step|{index}", 100 * index, 10) for index in (11, 2, 0)]
    assert [trace.step for trace in read_events(events, "x", on_gpu=True)] == [0, 2, 11]


def test_a_module_whose_path_has_a_bar_in_it() -> None:
    events = [range_("step|0", 0, 100), range_("module|forward|a|b", 1, 50), launch(1, 5), kernel("k", 1, 6, 1)]
    (trace,) = read_events(events, "x", on_gpu=True)
    assert rows(trace)[0]["module"] == "a|b"


def test_the_innermost_of_nested_modules() -> None:
    """Recomputation: a forward inside a backward."""
    events = [
        range_("step|0", 0, 100),
        range_("module|backward|block", 1, 90),
        range_("module|forward|block.lin", 10, 20),
        range_("module|backward|block.lin", 40, 20),
        *(launch(i, ts) for i, ts in enumerate((5, 15, 35, 45, 95))),
        *(kernel("k", i, 60 + i, 1) for i in range(5)),
    ]
    (trace,) = read_events(events, "x", on_gpu=True)
    assert [row["module"] for row in rows(trace)] == ["block", "block.lin", "block", "block.lin", ""]
    places = _Places([event for event in events if event["cat"] == "user_annotation"])
    assert [places.at(MAIN, ts).scope() for ts in (5, 15, 45, 95)] == [
        Scope("block", "backward"),
        Scope("block.lin", "forward"),
        Scope("block.lin", "backward"),
        None,
    ]


def test_ranges_that_do_not_nest_end_when_they_end() -> None:
    """A user's own range may begin in one and end in another."""
    events = [op("a", 0, 10), op("b", 5, 15), op("c", 8, 4)]
    places = _Places(events)
    assert [places.at(MAIN, ts).op for ts in (-1, 0, 6, 9, 11, 12, 19, 20, 99)] == [
        *("", "a", "b", "c", "c", "b", "b", "", ""),
    ]


def test_of_two_that_begin_together_the_longer_is_around_the_shorter() -> None:
    places = _Places([op("inner", 0, 5), op("outer", 0, 10)])
    assert [places.at(MAIN, ts).op for ts in (0, 4, 5, 9)] == ["inner", "inner", "outer", "outer"]


def test_an_instant_on_a_thread_that_was_never_seen() -> None:
    assert _Places([]).at(12345, 1.0).op == ""


def test_the_phase_is_known_on_every_thread() -> None:
    places = _Places([range_("phase|backward", 10, 10)])
    assert [places.at(AUTOGRAD, ts).phase for ts in (9.9, 10, 20, 20.1)] == ["", "backward", "backward", ""]


# -- own times -----------------------------------------------------------------------------------------------------


@st.composite
def nested(draw: Any, depth: int = 3) -> list[dict[str, Any]]:
    """Operators that nest as calls do, with whole times; some share their beginning or end, some take none."""
    events: list[dict[str, Any]] = []

    def fill(begin: int, end: int, level: int) -> None:
        at = begin
        for _ in range(draw(st.integers(0, 3)) if level < depth else 0):
            start = draw(st.integers(at, end))
            stop = draw(st.integers(start, end))
            events.append(op(f"op{level}", start, stop - start))
            fill(start, stop, level + 1)
            at = stop

    fill(0, 60, 0)
    return events


def union_of(events: list[dict[str, Any]]) -> float:
    covered = {t for event in events for t in range(int(event["ts"]), int(event["ts"] + event["dur"]))}
    return len(covered)


@given(nested(), st.booleans())
def test_own_times_add_up_to_the_time_in_which_any_operator_ran(events: list[dict[str, Any]], ranges: bool) -> None:
    around = [range_("step|0", 0, 60), range_("module|forward|m", 0, 60)] if ranges else []
    work = list(_Places([*around, *events]).own_times())
    assert sum(item.duration for item in work) == union_of(events)
    spans = sorted((item.start, item.start + item.duration) for item in work)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(item.module == ("m" if ranges else "") for item in work)


@given(nested())
def test_own_time_is_the_innermost_operators(events: list[dict[str, Any]]) -> None:
    for item in _Places(list(events)).own_times():
        inside = [e for e in events if e["ts"] <= item.start and item.start + item.duration <= e["ts"] + e["dur"]]
        assert item.name == max(inside, key=lambda e: e["name"])["name"]  # the deepest level has the highest name


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_own_times_add_up_even_if_ranges_do_not_nest(spans: list[tuple[int, int]]) -> None:
    events = [op(f"op{index}", ts, dur) for index, (ts, dur) in enumerate(spans)]
    assert sum(item.duration for item in _Places(events).own_times()) == union_of(events)


def test_threads_do_not_mix() -> None:
    work = list(_Places([op("a", 0, 10), op("b", 2, 4, AUTOGRAD), op("c", 3, 1, "Spans")]).own_times())
    assert {(item.name, item.duration, item.stream) for item in work} == {
        ("a", 10, MAIN),
        ("b", 4, AUTOGRAD),
        ("c", 1, 0),
    }


def test_on_a_cpu_operators_are_the_work() -> None:
    events = [
        range_("step|0", 0, 50),
        range_("module|forward|lin", 5, 30),
        op("aten::linear", 10, 20),
        op("aten::addmm", 12, 15),
    ]
    (trace,) = read_events(events, "bf16", on_gpu=False)
    assert [(row["name"], row["duration"], row["module"]) for row in rows(trace)] == [
        ("aten::linear", 2.0, "lin"),
        ("aten::addmm", 15.0, "lin"),
        ("aten::linear", 3.0, "lin"),
    ]
    assert trace.launch_us == trace.start_us


# -- a real trace of an H200 ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h200() -> list[dict[str, Any]]:
    """Two training steps of twelve `te.TransformerLayer` in FP8 with current scaling."""
    return json.loads(gzip.decompress(H200.read_bytes()))["traceEvents"]


@pytest.fixture(scope="module")
def real(h200: list[dict[str, Any]]) -> Trace:
    whole = range_("step|0", 0, max(event["ts"] + event["dur"] for event in h200), h200[0]["tid"])
    (trace,) = read_events([*h200, whole], "fp8_current", on_gpu=True)
    return trace


def test_no_kernel_is_lost_and_every_one_finds_its_launch(h200: list[dict[str, Any]], real: Trace) -> None:
    assert len(real.name) == sum(event["cat"] in ("kernel", "gpu_memset", "gpu_memcpy") for event in h200) == 3116
    assert not any(math.isnan(instant) for instant in real.launch_us)
    late = [start - launched for start, launched in zip(real.start_us, real.launch_us, strict=True)]
    assert min(late) > 0


def test_every_kernel_but_two_finds_an_operator(real: Trace) -> None:
    without = [row["name"] for row in rows(real) if not row["op"]]
    assert len(without) == 2
    assert all("delayed_scaling_recipe" in name for name in without)


def test_each_eight_bit_product_was_launched_by_the_layer_that_needs_it(real: Trace) -> None:
    """Twelve layers, two steps: a product in forward, two in backward; LayerNormMLP has two linears."""
    seen = Counter(
        (row["name"].split("_")[2], row["op"]) for row in rows(real) if row["name"].startswith("nvjet_sm90_q")
    )
    assert seen == {
        ("qqtst", "_LayerNormLinear"): 24,
        ("qqtst", "_Linear"): 24,
        ("qqtst", "_LayerNormMLP"): 48,
        ("qrtst", "_LayerNormLinearBackward"): 48,
        ("qrtst", "_LinearBackward"): 48,
        ("qrtst", "_LayerNormMLPBackward"): 96,
    }


def test_attentions_products_are_batched(real: Trace) -> None:
    wide = Counter(row["op"] for row in rows(real) if row["name"].startswith("nvjet_sm90_tst"))
    assert wide == {"aten::bmm": 120, "aten::baddbmm": 24}


def test_the_hosts_own_times_are_those_of_its_operators(h200: list[dict[str, Any]]) -> None:
    host = [dict(event) for event in h200 if event["cat"] in ("cpu_op", "user_annotation")]
    own = math.fsum(item.duration for item in _Places(host).own_times())
    union = 0.0
    for thread in {event["tid"] for event in host}:
        last = -math.inf
        for event in sorted((e for e in host if e["tid"] == thread), key=lambda e: e["ts"]):
            end = event["ts"] + event["dur"]
            union += max(0.0, end - max(event["ts"], last))
            last = max(last, end)
    assert own == pytest.approx(union, rel=1e-9)


# -- a real session ------------------------------------------------------------------------------------------------


def test_a_session_on_a_cpu() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    opened: list[Any] = []

    def enter(scope: Scope) -> None:
        opened.append(module_range(scope))
        opened[-1].__enter__()

    scopes = ModuleScopes(dict(model.named_children()), enter, lambda _scope: opened.pop().__exit__(None, None, None))
    tracer = Tracer(torch.device("cpu"))
    tracer.start()
    with scopes.installed():
        for index in range(2):
            with step_range(index):
                with phase_range("forward"):
                    loss = model(torch.ones(4, 16)).sum()
                with phase_range("backward"):
                    loss.backward()
                with gemm_range("special", "wgrad"):
                    torch.ones(3).exp()
    tracer.stop()
    traces = tracer.traces("fp32", expected_gemms=None)
    assert [trace.step for trace in traces] == [0, 1]
    for trace in traces:
        found = {(row["name"], row["module"], row["role"], row["phase"]) for row in rows(trace)}
        assert ("aten::addmm", "0", "", "forward") in found
        assert ("aten::mm", "0", "", "backward") in found
        assert ("aten::exp", "special", "wgrad", "") in found
        assert any(module == "1" and phase == "backward" for _, module, _, phase in found)
        assert not any(name.startswith(PREFIX) for name in trace.names)
        assert sum(trace.duration_us) <= trace.wall_ms * 1e3 + 1e-6


def test_a_session_with_shapes_gives_products() -> None:
    tracer = Tracer(torch.device("cpu"), shapes=True)
    tracer.start()
    with module_range(Scope("lin", "backward")):
        torch.ones(2, 3) @ torch.ones(3, 4)
    torch.ones(5, 2, 3).bfloat16() @ torch.ones(5, 3, 4).bfloat16()
    tracer.stop()
    inside, outside = tracer.products()
    assert (inside.scope, inside.op, inside.batch) == (Scope("lin", "backward"), "aten::mm", 1)
    assert (inside.rows, inside.inner, inside.columns, inside.first) == (2, 3, 4, "fp32")
    assert (outside.scope, outside.op, outside.batch, outside.second) == (None, "aten::bmm", 5, "bf16")


def test_products_need_shapes() -> None:
    assert read_products([op("aten::mm", 0, 1)]) == []


def test_sessions_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer(torch.device("cpu"))
    tracer.start()
    torch.ones(1)
    tracer.stop()
    assert capfd.readouterr() == ("", "")
