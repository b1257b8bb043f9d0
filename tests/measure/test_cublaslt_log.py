"""cuBLASLt's logger, with a stand-in for the library that calls back as the real one does, and the real one if here."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowprec_callback.measure import cublaslt_log
from lowprec_callback.measure.cublaslt_log import LogUnavailable, listen

FILE = Path("libcublasLt.so.13")


class Library:
    """Keeps what was set, and calls the callback by its address, as C does."""

    def __init__(self, refuse: str = "") -> None:
        self.callback, self.level, self.file, self.refuse = 0, 0, -1, refuse
        self.calls: list[str] = []
        self.cublasLtLoggerSetCallback = self._setter("callback")
        self.cublasLtLoggerSetLevel = self._setter("level")
        self.cublasLtLoggerSetFile = self._setter("file")

    def _setter(self, what: str) -> Any:
        def setter(value: Any) -> int:
            self.calls.append(what)
            if what == self.refuse and value:
                return 7
            setattr(self, what, (value.value if isinstance(value, ctypes.c_void_p) else value) or 0)
            return 0

        return Function(setter)

    def run(self, function: str = "cublasLtMatmul", message: str = "A=0X0", level: int = 2) -> None:
        if self.level and self.callback:
            kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
            kind(self.callback)(level, function.encode(), message.encode())

    @property
    def silent(self) -> bool:
        return (self.callback, self.level) == (0, 0) and self.file == cublaslt_log._files()[1]


class Function:
    """A function that takes attributes, as ctypes' functions do."""

    argtypes: Any = None

    def __init__(self, function: Callable[[Any], int]) -> None:
        self._function = function

    def __call__(self, value: Any) -> int:
        return self._function(value)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return install(monkeypatch, Library())


def install(monkeypatch: pytest.MonkeyPatch, library: Any) -> Any:
    real = ctypes.CDLL
    cublaslt_log._files()
    monkeypatch.setattr(cublaslt_log.ctypes, "CDLL", lambda name: library if name == str(FILE) else real(name))
    for name in ("CUBLASLT_LOG_LEVEL", "CUBLASLT_LOG_MASK"):
        monkeypatch.delenv(name, raising=False)
    return library


def test_traces_are_heard_on_every_thread_and_then_the_library_is_silent_again(library: Library) -> None:
    heard: list[tuple[str, str, int]] = []
    with listen(lambda function, message: heard.append((function, message, threading.get_ident())), [FILE]):
        assert library.level == 5
        assert library.file not in (-1, 0, cublaslt_log._files()[1])
        library.run(message="on main")
        library.run(message="an API trace", level=5)
        thread = threading.Thread(target=library.run, kwargs={"message": "elsewhere"})
        thread.start()
        thread.join()
    assert [message for _, message, _ in heard] == ["on main", "elsewhere"]
    assert heard[0][2] == threading.get_ident() != heard[1][2]
    assert library.silent
    library.run()
    assert len(heard) == 2


def test_the_file_is_set_before_the_level_so_that_nothing_is_printed(library: Library) -> None:
    with listen(lambda *_: None, [FILE]):
        pass
    assert library.calls == ["file", "callback", "level", "level", "callback", "file"]


def test_an_exception_of_the_step_passes_and_leaves_nothing(library: Library) -> None:
    with pytest.raises(ZeroDivisionError), listen(lambda *_: None, [FILE]):
        raise ZeroDivisionError
    assert library.silent
    with listen(lambda *_: None, [FILE]):
        assert library.level == 5


def test_an_exception_of_the_listener_reaches_nobody(library: Library, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(_function: str, _message: str) -> None:
        raise ValueError

    with listen(broken, [FILE]):
        library.run()
    assert library.silent
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_inside_the_listener_is_not_lost(library: Library, ctrl_c: None) -> None:
    def interrupted(_function: str, _message: str) -> None:
        raise KeyboardInterrupt

    def step() -> None:
        with listen(interrupted, [FILE]):
            library.run()
        for _ in range(100):  # the interpreter raises it at one of the next instructions
            time.sleep(0)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert library.silent


def test_one_listener_at_a_time(library: Library) -> None:
    with listen(lambda *_: None, [FILE]):
        with pytest.raises(LogUnavailable, match="already"), listen(lambda *_: None, [FILE]):
            pass
        assert library.level == 5
    assert library.silent


def test_the_users_own_log_is_left_alone(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLASLT_LOG_LEVEL", "2")
    with pytest.raises(LogUnavailable, match="CUBLASLT_LOG_LEVEL is set"), listen(lambda *_: None, [FILE]):
        pass
    assert not library.calls
    monkeypatch.setenv("CUBLASLT_LOG_LEVEL", "0")
    with listen(lambda *_: None, [FILE]):
        assert library.level == 5


@pytest.mark.parametrize("what", ["file", "callback", "level"])
def test_a_library_that_refuses_is_named_and_left_silent(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, Library(refuse=what))
    with pytest.raises(LogUnavailable, match=f"{FILE}: setting the logger's {what}"), listen(lambda *_: None, [FILE]):
        pass
    assert library.level == 0
    assert library.callback == 0


def test_no_library_and_no_logger_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, object())
    with pytest.raises(LogUnavailable, match="has no logger that we know"), listen(lambda *_: None, [FILE]):
        pass
    with pytest.raises(LogUnavailable, match=r"no libcublasLt\.so is loaded"), listen(lambda *_: None, []):
        pass


def real_library() -> Path | None:
    """cuBLASLt from a wheel beside this Python; it loads, and logs, without a GPU."""
    folders = [Path(path) for path in filter(None, os.environ.get("LOWPREC_TEST_CUBLASLT", "").split(os.pathsep))]
    spec = importlib.util.find_spec("nvidia")
    folders += [Path(path) for path in (spec.submodule_search_locations or [])] if spec else []
    return next((file for folder in folders for file in sorted(folder.rglob("libcublasLt.so.*"))), None)


def test_the_real_library_logs_to_us_and_prints_nothing() -> None:
    """In a process of its own: half a gigabyte that this one need not carry."""
    file = real_library()
    if file is None:
        pytest.skip("no cuBLASLt wheel is installed")
    code = """
        import ctypes, sys
        from pathlib import Path
        from lowprec_callback.measure import cublaslt_log
        library, heard = ctypes.CDLL(sys.argv[1]), []
        cublaslt_log.TRACE = 5  # without a GPU there are API traces only
        def call():
            layout = ctypes.c_void_p()
            size = ctypes.c_uint64(16)
            library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), 28, size, size, ctypes.c_int64(16))
        with cublaslt_log.listen(lambda *said: heard.append(said)):
            call()
        call()
        # Flushed: the library's own lines go through C's buffer, which is another.
        print(heard[0][0], "type=R_8F_E4M3 rows=16 cols=16" in heard[0][1], flush=True)
        print("MatrixLayoutCreate" in str(heard[1:]), flush=True)
        library.cublasLtLoggerSetLevel(5)
        call()
        library.cublasLtLoggerSetLevel(0)
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUBLASLT_LOG")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(file)],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    said = done.stdout.splitlines()
    assert said[:2] == ["cublasLtMatrixLayoutCreate True", "False"]
    assert "cublasLtMatrixLayoutCreate" in said[2], "whoever asks for the log afterwards finds it on stdout again"
