"""Nsight Systems' exports: every release's tables, what is missing in them, and nothing of the environment."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
import stat
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lowprec_callback import nsight
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.capture import NONE, Capture, project
from lowprec_callback.capture_error import CaptureError
from lowprec_callback.capture_facts import facts_of
from lowprec_callback.nsight import capture_command, exported, read_export, variables_in
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import Fact, GemmKernels, Imported, Problem, Recording, StepTime, Trace
from lowprec_callback.sqlite_columns import Unusual
from tests.nsight_writer import AUTOGRAD, BF16, CAST, FP8_FORWARD, PID, SCHEMAS, TID, US, Export, training

H200 = Path(__file__).parent / "data" / "h200" / "nsys_transformer_layer_fp8_delayed.sqlite.gz"


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("h200") / "layer.sqlite"
    path.write_bytes(gzip.decompress(H200.read_bytes()))
    return path


def facts(capture: Capture, recipe: str | None = None) -> Recording:
    return Recording.from_facts(facts_of(capture, load_cards(), recipe).facts)


def labels(trace: Trace, column: str) -> list[str]:
    return [trace.labels[index] for index in getattr(trace, column)]


# -- releases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_release_says_the_same(schema: str, tmp_path: Path) -> None:
    export = Export(schema)
    training(export, "fp8_delayed", 3)
    capture = read_export(export.write(tmp_path / "x.sqlite"))
    assert capture.tool == f"Nsight Systems 2025.3.2.0 (export schema {schema})"
    assert (capture.device, capture.facts["multiprocessors"]) == ("NVIDIA H200", "132")
    recording = facts(capture)
    assert [step.ms for step in recording.of(StepTime)] == [1.0, 1.0, 1.0]
    trace = recording.of(Trace)[0]
    assert [trace.names[i] for i in trace.name][:2] == [CAST, FP8_FORWARD]
    assert labels(trace, "role") == ["", "fprop", "dgrad", "wgrad", ""]
    assert labels(trace, "module") == ["mlp.fc1"] * 4 + [""]
    assert labels(trace, "phase") == ["forward", "forward", "backward", "backward", "optimizer"]
    assert not recording.of(Problem)


def test_the_payload_is_the_steps_number(tmp_path: Path) -> None:
    export = Export()
    training(export, "bf16", 2, number=40)
    assert [trace.step for trace in facts(read_export(export.write(tmp_path / "x.sqlite"))).of(Trace)] == [40, 41]


def test_nanoseconds_and_large_numbers_are_kept(tmp_path: Path) -> None:
    export = Export()
    far = 2**60 + 1  # above what a double can hold to a nanosecond
    export.ours("bf16 step", far, far + 1000)
    export.kernel("k", far + 1, far + 3, 7)
    capture = read_export(export.write(tmp_path / "x.sqlite"))
    assert (capture.work.start[0], capture.work.end[0], capture.work.launch[0]) == (far + 3, far + 10, far + 1)
    (trace,) = facts(capture, "bf16").of(Trace)
    assert (trace.start_us, trace.duration_us, trace.launch_us) == ((0.003,), (0.007,), (0.001,))


def test_either_way_of_reading_says_the_same(h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pages, or, where those are unusual, through SQLite."""

    def unusual(*_: object) -> None:
        raise Unusual("everything is")

    by_pages = read_export(h200)
    monkeypatch.setattr("lowprec_callback.sqlite_columns.Table.read", unusual)
    monkeypatch.setattr(nsight, "CHUNK", 7)
    through_sqlite = read_export(h200)
    for table in ("work", "ranges"):
        for name, column in vars(getattr(by_pages, table)).items():
            assert np.array_equal(column, getattr(getattr(through_sqlite, table), name)), name
    assert by_pages.range_names == through_sqlite.range_names
    assert by_pages.work_names == through_sqlite.work_names


def test_copies_and_fills_are_work_too(tmp_path: Path) -> None:
    export = Export()
    training(export, "bf16", 1)
    export.kernel("", 5 * US, 6 * US, US, table="MEMCPY", call="cudaMemcpyAsync_v3020")
    export.kernel("", 7 * US, 8 * US, US, table="MEMSET", call="cudaMemsetAsync_v3020")
    (trace,) = facts(read_export(export.write(tmp_path / "x.sqlite"))).of(Trace)
    assert [trace.names[i] for i in trace.name][:2] == ["[CUDA memcpy]", "[CUDA memset]"]


def test_a_name_with_the_separator_in_it(tmp_path: Path) -> None:
    export = Export()
    training(export, "bf16", 1)
    export.range("odd\x1fname, with a comma", 21 * US, 199 * US)
    (trace,) = facts(read_export(export.write(tmp_path / "x.sqlite"))).of(Trace)
    assert "odd\x1fname, with a comma" in labels(trace, "op")


def test_calls_that_launch_nothing_are_not_read(tmp_path: Path) -> None:
    export = Export()
    training(export, "bf16", 1)
    for name in ("cudaStreamIsCapturing_v10000", "cuKernelGetName", "cudaEventRecord_v3020", "cudaMalloc_v3020"):
        export.call(name, 100 * US)
    capture = read_export(export.write(tmp_path / "x.sqlite"))
    assert not (capture.work.launch == NONE).any()


@pytest.mark.parametrize(
    "call",
    [
        "cudaLaunchKernel_v7000",
        "cuLaunchKernelEx",
        "cudaGraphLaunch_v10000",
        "cudaMemcpyAsync_v3020",
        "cuMemcpyDtoHAsync_v2",
        "cudaMemsetAsync_v3020",
        "cuMemsetD32Async",
        "cudaLaunchCooperativeKernel_v9000",
        "someNewLaunch_v20000",
    ],
)
def test_calls_that_launch_are(call: str) -> None:
    assert not nsight._IDLE_CALL.match(call)


# -- the real one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", sorted(SCHEMAS))
def test_the_hosts_waits(schema: str, tmp_path: Path) -> None:
    export = Export(schema)
    training(export, "bf16", 2)
    export.call("cudaStreamSynchronize_v3020", 40 * US)
    export.call("cudaEventQuery_v3020", 60 * US)
    export.kernel("", 150 * US, 150 * US + 4, 3, table="MEMCPY", call="cudaMemcpyAsync_v3020")
    export.kernel("", 160 * US, 170 * US, 3, table="MEMCPY", call="cudaMemcpyAsync_v3020")
    found = read_export(export.write(tmp_path / "x.sqlite")).waits
    assert found is not None
    assert [found.names[name] for name in found.name] == ["cudaStreamSynchronize", "cudaMemcpyAsync"]
    assert found.start.tolist() == [40 * US, 150 * US]
    assert (found.end - found.start).tolist() == [10, 10]
    bare = Export(schema)
    training(bare, "bf16", 2)
    without = read_export(bare.write(tmp_path / "y.sqlite", without=("CUPTI_ACTIVITY_KIND_RUNTIME",)))
    assert without.waits is None


def test_the_real_capture_finds_its_layers(h200: Path) -> None:
    capture = read_export(h200)
    assert (len(capture.work), len(capture.ranges)) == (312, 201)
    recording = facts(capture)
    (imported,) = recording.of(Imported)
    assert (imported.kernels, imported.placed, imported.recipe_from) == (312, 312, "kernels")
    assert "amax history" in imported.why_recipe
    assert len(recording.of(StepTime)) == 3
    (table,) = recording.of(GemmKernels)
    seen: Counter[tuple[str, str, str]] = Counter()
    for i, count in enumerate(table.count):
        if table.library[i]:
            seen[table.labels[table.module[i]], table.labels[table.role[i]], table.labels[table.phase[i]]] += count
    assert seen == {
        ("LayerNormLinear.qkv", "fprop", "forward"): 3,
        ("Linear.proj", "fprop", "forward"): 3,
        ("LayerNormMLP", "fprop", "forward"): 6,
        # Without a range of its own for each GEMM, the MLP's backward does not tell dgrad from wgrad.
        ("LayerNormMLP", "", "backward"): 12,
        ("Linear.proj", "dgrad", "backward"): 3,
        ("Linear.proj", "wgrad", "backward"): 3,
        ("LayerNormLinear.qkv", "dgrad", "backward"): 3,
        ("LayerNormLinear.qkv", "wgrad", "backward"): 3,
    }
    # Attention ran unfused: its products are not launched by TE's library, in the backward pass outside of any range.
    others = Counter(table.labels[table.op[i]] for i in range(len(table.count)) if not table.library[i])
    assert set(others) == {"DotProductAttention forward", "attention (around TE's softmax)"}


def test_the_file_is_not_touched(h200: Path) -> None:
    before = sorted((path.name, path.stat().st_size) for path in h200.parent.iterdir())
    h200.chmod(stat.S_IRUSR)
    read_export(h200)
    assert sorted((path.name, path.stat().st_size) for path in h200.parent.iterdir()) == before


# -- what is missing -------------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(CaptureError) as error:
        read_export(path)
    return str(error.value)


def test_a_file_that_is_cut_off(h200: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(h200.read_bytes()[:100_000])
    assert "is cut off: 100,000 of 266,240 bytes are there" in refused(cut)


def test_a_damaged_file(h200: Path, tmp_path: Path) -> None:
    raw = bytearray(h200.read_bytes())
    raw[4096:200_000] = b"\xff" * (200_000 - 4096)
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(raw)
    assert "nothing can be concluded" in refused(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"short", "is no SQLite export"), (b"{" * 200, "is no SQLite export")],
)
def test_no_sqlite_at_all(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    assert says in refused(path)


def test_another_programs_database(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as db:
        db.execute("CREATE TABLE songs (name)")
    db.close()
    assert "no export of Nsight Systems" in refused(tmp_path / "x.sqlite")


def test_without_kernels(tmp_path: Path) -> None:
    export = Export()
    training(export, "bf16", 1)
    says = refused(export.write(tmp_path / "a.sqlite", without=("CUPTI_ACTIVITY_KIND_KERNEL",)))
    assert "holds no GPU kernel" in says
    assert "--trace=cuda,nvtx" in says
    says = refused(export.write(tmp_path / "b.sqlite", empty=("CUPTI_ACTIVITY_KIND_KERNEL",)))
    assert "the capture window holds no GPU kernel" in says


def test_without_strings(tmp_path: Path) -> None:
    export = Export()
    training(export, "bf16", 1)
    assert "no kernel has a name" in refused(export.write(tmp_path / "x.sqlite", without=("StringIds",)))


def test_without_launches(tmp_path: Path) -> None:
    export = Export()
    training(export, "fp8_delayed", 3)
    capture = read_export(export.write(tmp_path / "x.sqlite", without=("CUPTI_ACTIVITY_KIND_RUNTIME",)))
    recording = facts(capture)
    assert "no launch calls" in recording.of(Problem)[0].message
    assert [len(trace.name) for trace in recording.of(Trace)] == [5, 5, 5]
    assert set(labels(recording.of(Trace)[0], "module")) == {""}
    assert all(np.isnan(recording.of(Trace)[0].launch_us))


def test_without_ranges(tmp_path: Path) -> None:
    export = Export()
    training(export, "fp8_delayed", 3)
    capture = read_export(export.write(tmp_path / "x.sqlite", without=("NVTX_EVENTS",)))
    recording = facts(capture)
    assert "no NVTX range" in recording.of(Problem)[0].message
    (imported,) = recording.of(Imported)
    assert "the whole capture as one step" in imported.steps
    assert len(recording.of(Trace)[0].name) == 15


def test_a_capture_that_lost_its_backward(tmp_path: Path) -> None:
    export = Export()
    training(export, "fp8_delayed", 3, backward=False)
    messages = [problem.message for problem in facts(read_export(export.write(tmp_path / "x.sqlite"))).of(Problem)]
    assert any(
        "no GEMM of a backward pass is in the capture, so nothing is known of dgrad and wgrad" in m for m in messages
    )


def test_graphs_that_hide_their_kernels_and_lost_events(tmp_path: Path) -> None:
    export = Export()
    training(export, "bf16", 1)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=2, graphId=3)
    export.add("DIAGNOSTIC_EVENT", text="Not all NVTX events might have been collected.")
    export.add("DIAGNOSTIC_EVENT", text="Command: HF_TOKEN=hunter2 python train.py")
    complaints = read_export(export.write(tmp_path / "x.sqlite")).complaints
    assert any("--cuda-graph-trace=node" in text for text in complaints)
    assert "Nsight Systems says: Not all NVTX events might have been collected" in complaints
    assert "hunter2" not in repr(complaints)


def test_a_range_that_never_ends_is_left_out(tmp_path: Path) -> None:
    export = Export()
    end = training(export, "bf16", 2)
    export.ours("bf16 step", end, None)
    export.kernel(BF16, end + US, end + 2 * US, US)
    assert len(facts(read_export(export.write(tmp_path / "x.sqlite"))).of(StepTime)) == 2


# -- several processes and GPUs --------------------------------------------------------------------------------------


def test_equal_correlation_ids_of_two_processes(tmp_path: Path) -> None:
    other = PID + (1 << 24)
    export = Export()
    training(export, "bf16", 2)
    first = export.correlation
    export.correlation = 100
    export.add("NVTX_EVENTS", start=-5, eventType=75, text="lowprec", globalTid=other | TID, domainId=1)
    for index in range(2):
        t = index * 1000 * US
        export.kernel(FP8_FORWARD, t + 70 * US, t + 80 * US, 5 * US, pid=other, device=1)
    assert export.correlation <= first
    recording = facts(read_export(export.write(tmp_path / "x.sqlite")))
    assert recording.of(Imported)[0].kernels == 8
    assert "2 GPUs of 2 processes" in recording.of(Problem)[0].message
    assert FP8_FORWARD not in recording.of(Trace)[0].names


def test_the_autograd_threads_launches_find_their_own_ranges(tmp_path: Path) -> None:
    export = Export()
    export.ours("bf16 step", 0, 1000)
    export.ours("module|forward|main", 0, 900)
    export.ours("module|backward|other", 100, 200, tid=AUTOGRAD)
    export.kernel(BF16, 150, 160, 10)
    export.kernel(BF16, 150, 170, 10, tid=AUTOGRAD)
    export.kernel(BF16, 250, 260, 10, tid=AUTOGRAD)
    capture = read_export(export.write(tmp_path / "x.sqlite"))
    found = project(capture)
    assert [found.places[i].module for i in found.place] == ["main", "other", ""]


# -- the environment -------------------------------------------------------------------------------------------------

SECRETS = "HF_TOKEN=hf_secret1;AWS_SECRET_ACCESS_KEY=secret2;NVTE_FP8_TOKEN=secret3"


@pytest.mark.parametrize("separator", [";", "\n", "\0", " ", ",", '","'])
def test_only_allowed_variables_are_found(separator: str) -> None:
    text = separator.join(
        ["A_TOKEN=secret0", "CUDA_VISIBLE_DEVICES=0,1", "SECRET=secret1", "NVTE_FLASH_ATTN=0", "X=secret2"]
    )
    assert variables_in(text) == {"NVTE_FLASH_ATTN": "0", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_name_that_contains_an_allowed_one_is_another() -> None:
    assert variables_in("MY_CUDA_VISIBLE_DEVICES=secret;NVTE_DEBUG_TOKEN=secret") == {}


def test_the_recording_holds_no_secret(tmp_path: Path) -> None:
    export = Export()
    training(export, "fp8_delayed", 2)
    environment = f"{SECRETS};NVTE_BACKWARD_OVERRIDE=high_precision;PASSWORD=secret4"
    export.add("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value=environment)
    export.string(f"API_KEY=secret5;{SECRETS}")
    capture = read_export(export.write(tmp_path / "x.sqlite"))
    assert capture.variables == {"NVTE_BACKWARD_OVERRIDE": "high_precision"}
    found: list[Fact] = list(facts(capture))
    assert "secret" not in repr(found)


# -- nsys itself -----------------------------------------------------------------------------------------------------


def test_the_command_line() -> None:
    command = capture_command(["python", "train.py"], "run7")
    assert command[:2] == ["nsys", "profile"]
    assert command[-2:] == ["python", "train.py"]
    for option in ("--sample=none", "--cpuctxsw=none", "--trace=cuda,nvtx", "--capture-range=cudaProfilerApi"):
        assert option in command
    assert "--capture-range-end=stop" in command
    assert "--output=run7" in command
    assert not [text for text in capture_command(["x"], whole=True) if "capture-range" in text]


def fake_nsys(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    tool = folder / "nsys"
    tool.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_report_is_exported_first(h200: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # nsys export --type sqlite --output TARGET REPORT
    fake_nsys(tmp_path / "bin", f'test "$1 $2 $3" = "export --type sqlite" && cp "{h200}" "$5"', monkeypatch)
    report = tmp_path / "x.nsys-rep"
    report.write_bytes(b"a report")
    with exported(report) as export:
        assert len(read_export(export).work) == 312
        assert export.parent != tmp_path
    assert not export.exists()


def test_a_report_that_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nsys(tmp_path / "bin", "echo 'The report is from the future' >&2; exit 3", monkeypatch)
    with (
        pytest.raises(CaptureError, match="exit code 3: The report is from the future"),
        exported(tmp_path / "x.nsys-rep"),
    ):
        pass


def test_a_report_without_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(CaptureError, match=r"not on the PATH.*nsys export --type sqlite"),
        exported(tmp_path / "x.nsys-rep"),
    ):
        pass


def test_a_capture_that_has_lost_gemm_kernels_does_not_say_all(h200: Path, tmp_path: Path) -> None:
    whole = facts(read_export(h200)).of(GemmKernels)[0]
    assert (whole.calls, whole.silent_calls, whole.fewest, whole.most) == (36, 0, 12, 12)
    said = analyze(facts(read_export(h200))).recipes[0].verdict
    assert said is not None
    assert said.summary.startswith("By kernel names alone, all 12 linear-layer GEMM kernels a step ran in FP8")

    path = tmp_path / "lost.sqlite"
    shutil.copy(h200, path)
    with closing(sqlite3.connect(path)) as export:
        ids = "SELECT id FROM StringIds WHERE value LIKE 'nvjet%'"
        rows = export.execute(
            f"SELECT rowid FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE demangledName IN ({ids}) ORDER BY start"
        ).fetchall()
        export.executemany("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid = ?", rows[::2])
        export.commit()
    lost = facts(read_export(path))
    (counted,) = lost.of(GemmKernels)
    assert counted.calls == 36
    assert counted.silent_calls > 10
    found = analyze(lost).recipes[0].verdict
    assert found is not None
    assert " all " not in found.summary.split(".")[0]
    assert "unknown module: unknown, unproven" in found.summary
