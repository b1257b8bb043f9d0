"""The Recording: what is written is what is read, and no state of the file or the disk ends in a traceback."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
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
    with pytest.raises(FileExistsError):
        recorder(written)
    assert (written / recording.FILE_NAME).read_bytes() == before


def test_folders_are_made(tmp_path: Path) -> None:
    recorder(tmp_path / "a" / "b").close()
    assert len(read(tmp_path / "a" / "b")) == 1


def test_a_fact_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    file = recorder(tmp_path)
    for index in range(3):
        file.add(step(index))
        assert len(read(tmp_path)) == index + 2
    file.close()


class FullDisk:
    """A file that takes some bytes and then none."""

    def __init__(self, room: int, strerror: str | None = "No space left on device", closes: bool = True) -> None:
        self.room, self.closes, self.closed, self.text = room, closes, False, ""
        self.error = OSError(28, strerror) if strerror else OSError("gone")

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        if len(self.text) > self.room:
            raise self.error

    def close(self) -> None:
        self.closed = True
        if not self.closes:
            raise self.error


@pytest.mark.parametrize(
    ("disk", "why"),
    [
        (FullDisk(100), "No space left on device"),
        (FullDisk(100, closes=False), "No space left on device"),
        (FullDisk(0, strerror=None), "gone"),
    ],
)
def test_a_full_disk_does_no_harm(tmp_path: Path, disk: FullDisk, why: str) -> None:
    file = recorder(tmp_path)
    file.close()
    file._file = disk  # type: ignore[assignment]
    for index in range(5):
        file.add(step(index))
    assert file.lost == f"{tmp_path / recording.FILE_NAME}: {why}; later facts are only in memory"
    assert disk.closed
    assert disk.text.count("\n") < 5
    assert file.snapshot().of(StepTime) == [step(index) for index in range(5)]
    file.close()


def test_a_disk_that_is_full_at_the_end(tmp_path: Path) -> None:
    file = recorder(tmp_path)
    file.close()
    file._file = FullDisk(0, closes=False)  # type: ignore[assignment]
    file.close()
    assert file.closed
    assert file.lost is not None
    assert "No space left" in file.lost


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_real_full_disk(tmp_path: Path) -> None:
    file = recorder(tmp_path)
    file.close()
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        file._file = full
        file.add(step())
    assert file.lost is not None
    assert "No space left on device" in file.lost
    file.close()


def test_closing_is_idempotent_and_facts_live_on_in_memory(tmp_path: Path) -> None:
    with recorder(tmp_path) as file:
        assert not file.closed
    file.close()
    assert file.closed
    file.add(step())
    assert file.lost is None
    assert file.snapshot().of(StepTime) == [step()]
    assert read(tmp_path).of(StepTime) == []
