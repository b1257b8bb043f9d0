"""Files are whole or not there: a write that fails anywhere leaves the old file, and no half of a new one."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from lowprec_callback import files, gemm_output
from lowprec_callback.files import replacing, why, write_bytes, write_text
from lowprec_callback.show import html, plots
from tests.gemm_recordings import both
from tests.show import samples

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is there already."""
    file = tmp_path / "file"
    file.write_text("old")
    return file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Broken(io.BytesIO):
    """A new file that fails at one method."""

    def __init__(self, at: str, error: BaseException) -> None:
        super().__init__()
        self._at, self._error = at, error

    def _do(self, what: str) -> None:
        if what == self._at:
            self._at = ""  # once: the object is closed again when it is thrown away
            raise self._error

    def write(self, data: Any) -> int:
        self._do("write")
        return super().write(data)

    def flush(self) -> None:
        self._do("flush")
        super().flush()

    def close(self) -> None:
        self._do("close")
        super().close()


def plant(monkeypatch: pytest.MonkeyPatch, at: str, error: BaseException) -> None:
    """Let the next write fail at opening, writing, flushing, closing or renaming."""

    def fail(*_: object) -> None:
        raise error

    if at == "replace":
        monkeypatch.setattr(os, "replace", fail)
        return
    real = Path.open

    def opened(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not path.name.endswith(files.SUFFIX):
            return real(path, mode, *rest, **named)
        if at == "open":
            raise error
        real(path, mode).close()
        return Broken(at, error)

    monkeypatch.setattr(Path, "open", opened)


STAGES = ("open", "write", "flush", "close", "replace")


def test_a_new_file_and_its_permissions(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"\x00\r\n")
        write_text(tmp_path / "b", "ünï \u2028\r\n")
    finally:
        os.umask(mask)
    assert (tmp_path / "a").read_bytes() == b"\x00\r\n"
    assert (tmp_path / "b").read_bytes() == "ünï \u2028\r\n".encode()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}
    assert names(tmp_path) == ["a", "b"]


def test_an_old_file_is_replaced(old: Path) -> None:
    write_text(old, "new")
    assert old.read_text() == "new"
    assert names(old.parent) == ["file"]


def test_until_the_end_the_old_file_is_there_and_the_new_one_is_hidden(old: Path) -> None:
    with replacing(old) as file:
        file.write(b"new")
        file.flush()
        assert old.read_text() == "old"
        (hidden,) = [name for name in names(old.parent) if name != "file"]
        assert hidden.startswith(".")
        assert hidden.endswith(".part")
        with replacing(old) as other:  # two writers do not meet
            other.write(b"other")
    assert old.read_text() == "new"


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "ctrl-c"])
@pytest.mark.parametrize("at", STAGES)
def test_what_fails_leaves_the_old_file_whole(
    at: str, error: BaseException, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, at, error)
    with pytest.raises(type(error)):
        write_text(old, "new")
    monkeypatch.undo()
    assert old.read_text() == "old"
    assert names(old.parent) == ["file"]


def test_the_writers_own_error_leaves_the_old_file_whole(old: Path) -> None:
    def half() -> None:
        with replacing(old) as file:
            file.write(b"ne")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert old.read_text() == "old"
    assert names(old.parent) == ["file"]


def test_a_link_stays_a_link(old: Path) -> None:
    link = old.with_name("link")
    link.symlink_to(old)
    write_text(link, "new")
    assert link.is_symlink()
    assert old.read_text() == "new"


def test_what_is_no_regular_file_keeps_its_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_kernels_own_refusal() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write_text(Path("/dev/full"), "text")


def test_a_folder_and_a_name_that_cannot_be_files(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "text")
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "nowhere" / "file", "text")
    longest = tmp_path / ("n" * 255)
    write_text(longest, "text")
    assert names(tmp_path) == [longest.name]


def test_text_that_is_no_unicode_becomes_an_escape(tmp_path: Path) -> None:
    write_text(tmp_path / "file", '"caf\udce9"')
    assert (tmp_path / "file").read_text() == '"caf\\udce9"'


def test_why() -> None:
    assert why(FULL) == "No space left on device"
    assert why(OSError("gone")) == "OSError: gone"
    assert why(ValueError("two\nlines")) == "ValueError: two lines"


# -- all that writes ---------------------------------------------------------------------------------------------


WRITERS = {
    "report.json": lambda path: samples.cpu().save(path),
    "report.html": lambda path: html.save(samples.cpu(), path),
    "step_times.png": lambda path: plots.save(plots.step_times(samples.cpu()), path),
    "gemm.json": lambda path: gemm_output.write_json(path, gemm_output.tables(both()), both()),
    "gemm.csv": lambda path: gemm_output.write_csv(path, gemm_output.tables(both())),
    "gemm.png": lambda path: gemm_output.write_plot(path, both()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_leaves_the_old_file_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text("old")
    plant(monkeypatch, "write", FULL)
    with pytest.raises(OSError, match="No space left"):
        WRITERS[name](tmp_path / name)
    monkeypatch.undo()
    assert (tmp_path / name).read_text() == "old"
    assert names(tmp_path) == [name]
