"""The Recording: what is written is what is read, and no state of the file or the disk ends in a traceback."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lowprec_callback import recording
from lowprec_callback.recording import (
    End,
    Fact,
    Header,
    Loss,
    Operand,
    Problem,
    Recorder,
    Recording,
    RecordingError,
    StepTime,
    Trace,
    encode,
    read,
)

CREATED = "2026-01-02T03:04:05+00:00"
KINDS = sorted(Fact.__subclasses__(), key=lambda cls: cls.kind)

any_float = st.floats()
plain = st.one_of(
    st.text(max_size=8), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, width=32)
)
finite_plain = plain.filter(lambda value: not isinstance(value, float) or math.isfinite(value))


def of_type(cls: type, hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, in the words of its class's module; `Any` is what TOML and flags can hold."""
    if hint == "dict[str, Any]":
        return st.dictionaries(st.text(max_size=6), finite_plain, max_size=3)
    if hint == "dict[str, str]":
        return st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3)
    return st.from_type(eval(hint, vars(sys.modules[cls.__module__])))


st.register_type_strategy(
    Operand,
    st.builds(
        Operand,
        storage=st.text(max_size=6),
        format=st.text(max_size=6),
        scaling=st.text(max_size=6),
        quantizer=st.none() | st.text(max_size=6),
        flags=of_type(Operand, "dict[str, Any]"),
    ),
)


def facts_of(cls: type[Fact]) -> st.SearchStrategy[Fact]:
    return st.builds(cls, **{field.name: of_type(cls, field.type) for field in dataclasses.fields(cls)})


def same(a: Any, b: Any) -> bool:
    """Equality in which a NaN is equal to a NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def recorder(folder: Path) -> Recorder:
    return Recorder(folder / recording.FILE_NAME, "0.1.0", CREATED)


def step(index: int = 0, ms: float = 1.5) -> StepTime:
    return StepTime("bf16", 0, index, ms, ms)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run folder whose Recording has five lines."""
    with recorder(tmp_path) as file:
        file.add(step(0), step(1), Problem("a", "line\nbreak, \u2028 and ünï"))
        file.add(End("finished"))
    return tmp_path


# -- round trip ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.kind)
@settings(max_examples=15)
@given(data=st.data())
def test_every_kind_of_fact_comes_back_as_it_was(cls: type[Fact], data: st.DataObject) -> None:
    fact = data.draw(facts_of(cls))
    line = encode(fact)
    assert "\n" not in line
    body = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert body.pop("fact") == cls.kind
    assert same(TypeAdapter(cls).validate_python(body), fact)


def test_kinds_have_names_of_their_own() -> None:
    assert len({cls.kind for cls in KINDS}) == len(KINDS)
    assert all(cls.__doc__ for cls in KINDS)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    trace = Trace(
        recipe="bf16",
        step=0,
        wall_ms=1.0,
        names=("k",),
        labels=("", "m"),
        name=(0, 0),
        start_us=(0.0, 1.0),
        duration_us=(1.0, 2.5),
        stream=(7, 7),
        launch_us=(math.nan, -3.125),
        module=(1, 0),
        role=(0, 0),
        op=(0, 0),
        phase=(0, 0),
    )
    facts = [
        trace,
        Loss("bf16", 0, math.nan),
        Loss("bf16", 1, math.inf),
        Loss("bf16", 2, -math.inf, grad_norm=math.nan),
    ]
    with recorder(tmp_path) as file:
        file.add(*facts)
        kept = file.snapshot()
    found = read(tmp_path)
    assert all(same(a, b) for a, b in zip(found, [Header(recording.VERSION, "0.1.0", CREATED), *facts], strict=True))
    assert all(same(a, b) for a, b in zip(found, kept, strict=True))
    assert found.torn is None
    assert found.path == tmp_path / recording.FILE_NAME


def test_a_run_folder_or_its_file(written: Path) -> None:
    assert list(read(written)) == list(read(written / recording.FILE_NAME)) == list(read(str(written)))


def test_facts_know_their_lines(written: Path) -> None:
    found = read(written)
    assert len(found) == 5
    assert [number for number, _ in found.lines(StepTime)] == [2, 3]
    assert found.of(StepTime) == [step(0), step(1)]
    assert found.last(StepTime) == step(1)
    assert found.last(Loss) is None
    assert found.of(Problem)[0].message == "line\nbreak, \u2028 and ünï"


def test_facts_that_were_never_on_disk() -> None:
    found = Recording.from_facts([step(0), step(1)])
    assert found.lines(StepTime) == [(1, step(0)), (2, step(1))]
    assert found.path is None


def test_text_that_is_no_unicode(tmp_path: Path) -> None:
    message = "cannot open 'caf\udce9.bin'"
    with recorder(tmp_path) as file:
        file.add(Problem("a", message))
        assert file.lost is None
    assert read(tmp_path).of(Problem)[0].message == message


def test_keys_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    lines = [encode(Header(recording.VERSION, "9", CREATED)), encode(step())[:-1] + ',"new":[1]}']
    (tmp_path / recording.FILE_NAME).write_text("\n".join(lines) + "\n")
    assert read(tmp_path).of(StepTime) == [step()]


# -- files that are not as they should be ---------------------------------------------------------------------------


def spoil(folder: Path, change: Any) -> None:
    file = folder / recording.FILE_NAME
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_no_error(written: Path, cut: int) -> None:
    spoil(written, lambda raw: raw[:-cut])
    found = read(written)
    assert len(found) == 4
    assert found.last(End) is None
    assert found.torn is not None
    assert "line 5: cut off while it was being written; all before it is whole" in found.torn


@given(st.integers(0, 600))
def test_a_file_cut_anywhere_gives_all_whole_lines_or_a_sentence(tmp_path_factory: Any, length: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    with recorder(folder) as file:
        file.add(step(0), Problem("a", "ünï"), step(1))
    raw = (folder / recording.FILE_NAME).read_bytes()
    spoil(folder, lambda raw: raw[:length])
    whole = raw[:length].count(b"\n")
    if whole:
        found = read(folder)
        assert len(found) == whole
        assert (found.torn is None) == (length >= len(raw) or raw[:length].endswith(b"\n"))
    else:
        with pytest.raises(RecordingError, match="holds no complete line"):
            read(folder)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"\x00\xff\xfe", "line 3: corrupt"),
        (b"", "line 3: corrupt"),
        (b"[1, 2]", "line 3: corrupt"),
        (b"17", "line 3: corrupt"),
        (b'{"facts": 1}', "line 3: corrupt"),
        (b'{"fact": "step_time"', "line 3: corrupt"),
        (b'{"fact": "nonsense"}', "line 3: unknown fact 'nonsense'; known: "),
        (b'{"fact": ["step_time"]}', "line 3: unknown fact"),
        (b'{"fact": "step_time", "recipe": "bf16"}', "line 3: fact 'step_time', field round: Field required"),
        (b'{"fact":"step_time","recipe":"a","round":0,"index":0,"ms":"x","host_ms":1}', "field ms: Input should be"),
    ],
)
def test_a_corrupt_line_in_the_middle_is_named(written: Path, line: bytes, sentence: str) -> None:
    spoil(written, lambda raw: b"\n".join([*raw.split(b"\n")[:2], line, *raw.split(b"\n")[3:]]))
    with pytest.raises(RecordingError) as caught:
        read(written)
    assert sentence in str(caught.value)
    assert str(written / recording.FILE_NAME) in str(caught.value)


def test_a_newer_recording_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "new.jsonl"
    file.write_text('{"fact":"header","version":99,"tool_version":"7.0","surprise":1}\n{"fact":"unheard_of"}\n')
    with pytest.raises(RecordingError) as caught:
        read(file)
    assert str(caught.value) == (
        f"{file}, line 1: written as version 99 by lowprec_callback 7.0; "
        f"this one reads up to version {recording.VERSION}: upgrade lowprec_callback to open it"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no complete line, so it is no Recording"),
        (b"{", "holds no complete line, so it is no Recording"),
        (b"\n", "line 1: not a Recording"),
        (b"once upon a time\n", "line 1: not a Recording"),
        (b"\x89PNG\r\n\x1a\n", "line 1: not a Recording"),
        (b'{"version": 1}\n', "line 1: not a Recording"),
        (b'{"fact": "end", "status": "finished"}\n', "line 1: a Recording begins with a header, found 'end'"),
        (b'{"fact": "header", "version": "one"}\n', "line 1: fact 'header', field version"),
    ],
)
def test_what_is_no_recording_is_said_to_be_none(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(RecordingError) as caught:
        read(file)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["", "missing", "missing.jsonl"])
def test_a_missing_file_says_what_to_give(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordingError, match=r"cannot be read \(No such file or directory\); give a run folder or its"):
        read(tmp_path / name)


# -- writing ---------------------------------------------------------------------------------------------------


def test_a_recording_is_never_written_over(written: Path) -> None:
    before = (written / recording.FILE_NAME).read_bytes()
    file = recorder(written)
    assert file.lost == f"{written / recording.FILE_NAME}: File exists; later facts are only in memory"
    file.add(step(7))
    file.close()
    assert (written / recording.FILE_NAME).read_bytes() == before
    assert file.path.parent != written
    assert read(file.path).of(StepTime) == [step(7)]
    shutil.rmtree(file.path.parent)


def test_folders_are_made(tmp_path: Path) -> None:
    recorder(tmp_path / "a" / "b").close()
    assert len(read(tmp_path / "a" / "b")) == 1


def test_a_fact_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    file = recorder(tmp_path)
    for index in range(3):
        file.add(step(index))
        assert len(read(tmp_path)) == index + 2
    file.close()


FULL = OSError(errno.ENOSPC, "No space left on device")


class Disk:
    """The disk under one Recorder: it takes some bytes and then none, and new files only where it is told to.

    `moods` are what the next `replacing` of the Recorder do: None goes well, an error is raised.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Recorder) -> None:
        self.room: int | None = None
        self.error: BaseException = FULL
        self.moods: list[BaseException] = []
        real_write, real_replacing, number = os.write, recording.replacing, file._file

        def write(fd: int, data: bytes) -> int:
            if fd != number or self.room is None:
                return real_write(fd, data)
            if not self.room:
                raise self.error
            done = real_write(fd, data[: self.room])
            self.room -= done
            return done

        def replacing(path: Path) -> Any:
            if self.moods:
                raise self.moods.pop(0)
            return real_replacing(path)

        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(recording, "replacing", replacing)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Recorder:
    """An open Recorder with two facts: the header and one step."""
    file = recorder(tmp_path / "run")
    file.add(step(0))
    return file


def test_a_full_disk_does_no_harm_and_leaves_whole_lines(run: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, run)
    disk.room = len(encode(step(1))) + 10
    run.add(step(1), step(2), step(3))
    assert run.lost == f"{run.path}: No space left on device; later facts are only in memory"
    assert list(read(run.path)) == list(run.snapshot())[:3]
    assert read(run.path).torn is None
    assert run.kept() == 3
    run.add(step(4))
    assert run.snapshot().of(StepTime) == [step(index) for index in range(5)]
    disk.moods = [FULL, FULL]
    run.close()
    assert run.lost == f"{run.path}: the disk refused (No space left on device): nothing after line 3 is on disk"
    assert len(read(run.path)) == run.kept() == 3


def test_what_a_full_disk_refused_is_written_when_there_is_room_again(
    run: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, run).room = 5
    run.add(step(1), step(2))
    run.close()
    assert run.lost == (f"{run.path}: the disk refused (No space left on device); all facts are written there now")
    assert list(read(run.path)) == list(run.snapshot())
    assert run.kept() == 4


def test_what_a_full_disk_refused_is_written_elsewhere(
    run: Recorder, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, first = Disk(monkeypatch, run), run.path
    disk.room, disk.moods = 0, [FULL]
    run.add(step(1))
    run.close()
    assert run.path.parent.parent == temporary
    assert run.path.name == recording.FILE_NAME
    assert run.lost == f"{first}: the disk refused (No space left on device); all facts are in {run.path}"
    assert list(read(run.path)) == list(run.snapshot())
    assert run.snapshot().path == run.path
    assert len(read(first)) == 2


def test_an_error_without_words_is_told_by_its_name(run: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, run)
    disk.room, disk.error = 0, OSError("gone")
    run.add(step(1))
    assert run.lost == f"{run.path}: OSError: gone; later facts are only in memory"


def test_a_disk_that_refuses_only_when_the_file_is_closed(run: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    number, close = run._file, os.close

    def refuse(fd: int) -> None:
        close(fd)
        if fd == number:
            raise FULL

    monkeypatch.setattr(os, "close", refuse)
    run.close()
    assert run.closed
    assert run.lost is not None
    assert "the disk refused (No space left on device); all facts are written there now" in run.lost
    assert len(read(run.path)) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_real_full_disk(run: Recorder) -> None:
    assert run._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, run._file)
    os.close(full)
    run.add(step(1))
    assert run.lost is not None
    assert "No space left on device" in run.lost
    run.close()
    assert list(read(run.path)) == list(run.snapshot())


def test_ctrl_c_while_a_fact_is_written_tears_no_line(run: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, run)
    disk.room, disk.error = 20, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run.add(step(1))
    disk.room = None
    run.add(step(2))
    run.close()
    assert run.lost is None
    assert list(read(run.path)) == list(run.snapshot())
    assert read(run.path).of(StepTime) == [step(index) for index in range(3)]


# -- a file that goes away ---------------------------------------------------------------------------------------


def removed(file: Recorder) -> str:
    shutil.rmtree(file.path.parent)
    return "the run folder was removed"


def unlinked(file: Recorder) -> str:
    file.path.unlink()
    return "the file was removed"


def shortened(file: Recorder) -> str:
    os.truncate(file.path, 10)
    return "the file was cut short"


@pytest.mark.parametrize("go", [removed, unlinked, shortened])
def test_a_file_that_went_away_is_written_again(go: Callable[[Recorder], str], run: Recorder) -> None:
    trouble = go(run)
    assert run.kept() == 0
    run.add(step(1))
    run.close()
    assert run.lost == f"{run.path}: {trouble}; all facts are written there now"
    assert list(read(run.path)) == list(run.snapshot())
    assert run.kept() == 3
    assert [path.name for path in run.path.parent.iterdir()] == [recording.FILE_NAME]


def test_a_folder_that_cannot_be_made_again_gives_way_to_a_temporary_one(run: Recorder, temporary: Path) -> None:
    first = run.path
    shutil.rmtree(first.parent)
    first.parent.write_text("in the way")
    run.close()
    assert run.path.parent.parent == temporary
    assert run.lost == f"{first}: the run folder was removed; all facts are in {run.path}"
    assert list(read(run.path)) == list(run.snapshot())


def test_nothing_is_on_disk_where_no_disk_takes_it(
    run: Recorder, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run.path.parent)
    Disk(monkeypatch, run).moods = [FULL, FULL]
    run.close()
    assert run.lost == f"{run.path}: the run folder was removed: nothing of it is on disk"
    assert run.kept() == 0
    assert run.snapshot().path is None
    assert list(temporary.iterdir()) == []


def test_the_file_of_somebody_else_is_left_alone(run: Recorder, temporary: Path) -> None:
    first = run.path
    first.unlink()
    first.write_text("theirs")
    run.close()
    assert first.read_text() == "theirs"
    assert run.path.parent.parent == temporary
    assert run.lost == f"{first}: another file is in its place; all facts are in {run.path}"


def test_ctrl_c_while_all_is_written_again_leaves_a_true_sentence(
    run: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run.path.parent)
    Disk(monkeypatch, run).moods = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert run.lost == f"{run.path}: the run folder was removed: nothing of it is on disk"


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_folder_that_cannot_be_written_raises_nothing(tmp_path: Path, temporary: Path, on_disk: bool) -> None:
    (tmp_path / "run").write_text("no folder")
    file = Recorder(tmp_path / "run" / recording.FILE_NAME, "0.1.0", CREATED, on_disk=on_disk)
    file.add(step())
    assert (file.lost is None) is not on_disk
    file.close()
    assert file.kept() == (2 if on_disk else 0)
    assert len(list(temporary.iterdir())) == on_disk


NO_DESCRIPTORS = """
    import os, resource, sys
    from pathlib import Path
    from lowprec_callback.recording import Loss, Recorder, read
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    folder = Path(sys.argv[1])
    early = Recorder(folder / "early" / "recording.jsonl", "0", "now")
    taken = []
    try:
        while True:
            taken.append(os.dup(1))
    except OSError:
        pass
    late = Recorder(folder / "late" / "recording.jsonl", "0", "now")
    for recorder in (early, late):
        recorder.add(Loss("bf16", 0, 1.0))
    late.close()
    early_went = early._file is not None
    early.close()
    for number in taken:
        os.close(number)
    print(early.lost)
    print(late.lost)
    print(len(read(folder / "early")), early.kept(), len(late.snapshot()), late.kept(), early_went)
"""


def test_no_file_descriptors_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NO_DESCRIPTORS), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    late = tmp_path / "late" / "recording.jsonl"
    assert done.stdout.splitlines() == [
        "None",
        f"{late}: the disk refused (Too many open files): nothing of it is on disk",
        "2 2 2 0 True",
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_was_forked_off_writes_and_closes_nothing(run: Recorder) -> None:
    pid = os.fork()
    if not pid:
        run.add(step(8))
        shutil.rmtree(run.path.parent)
        run.close()
        os._exit(run.lost is not None or run.path.exists())
    assert os.waitpid(pid, 0)[1] == 0
    assert run.kept() == 0
    run.close()
    assert list(read(run.path)) == list(run.snapshot())
    assert read(run.path).of(StepTime) == [step(0)]


def test_closing_is_idempotent_and_facts_live_on_in_memory(tmp_path: Path) -> None:
    with recorder(tmp_path) as file:
        assert not file.closed
    file.close()
    assert file.closed
    file.add(step())
    assert file.lost is None
    assert file.snapshot().of(StepTime) == [step()]
    assert read(tmp_path).of(StepTime) == []
