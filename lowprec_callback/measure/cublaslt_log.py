"""cuBLASLt's own log, in process: every product that the library runs, in its own words, as it runs it.

`cublasLtLoggerSetCallback`, `cublasLtLoggerSetLevel` and `cublasLtLoggerSetFile` (cublasLt.h, "Experimental: Logger")
switch the log on and off in a running process: no environment variable, no restart. The library calls back on the
thread that runs the product, autograd's threads among them, and holds no lock meanwhile (seen with 12.8, 13.1 and
13.10), so waiting for Python's lock there cannot lock anything up.

A logger that somebody else set cannot be read back. If the user's environment asks for one (`CUBLASLT_LOG_LEVEL`,
`CUBLASLT_LOG_MASK`) it is left alone, and we say that we did not listen.
"""

from __future__ import annotations

import _thread
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from lowprec_callback.measure.libraries import loaded_libraries

LEVEL = 5
"""The level that was seen to bring the performance trace on an H200; it brings the API trace with it."""

TRACE = 2
"""Level of the messages that describe a product in full."""

_CALLBACK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)

Listener = Callable[[str, str], None]
"""Gets (function, message), on the thread that runs the product."""


class LogUnavailable(RuntimeError):
    """The library's log cannot be listened to; the text says why."""


_listener: Listener | None = None
_interrupted = False


def _on_message(level: int, function: bytes | None, message: bytes | None) -> None:
    """What cuBLASLt calls. Nothing may leave it: an exception here has nobody to go to."""
    global _interrupted
    try:
        listener = _listener
        if level == TRACE and listener is not None:
            listener((function or b"").decode(errors="replace"), (message or b"").decode(errors="replace"))
    except KeyboardInterrupt:
        _interrupted = True  # `listen` passes it on
    except BaseException:  # the listener's own affair; the user's training goes on
        return


_CALLBACK = _CALLBACK_TYPE(_on_message)
"""Kept for the life of the process: a product on another thread may still be calling it while we take it out."""


@contextmanager
def listen(listener: Listener, paths: Sequence[Path] | None = None) -> Iterator[None]:
    """Give every product's message to `listener` while the context lasts; then the library is silent again.

    Args:
        listener: may be called on any thread, also on several at once.
        paths: the loaded library files; found in this process's memory map if not given. There can be several.

    Raises:
        LogUnavailable: no cuBLASLt is loaded, it has no logger, or somebody else listens.
    """
    global _listener, _interrupted
    asked = [name for name in ("CUBLASLT_LOG_LEVEL", "CUBLASLT_LOG_MASK") if os.environ.get(name, "0") not in ("", "0")]
    if asked:
        raise LogUnavailable(f"{asked[0]} is set, and the log that it asks for was left alone")
    if _listener is not None:
        raise LogUnavailable("this process listens to cuBLASLt's log already")
    libraries = [_Logger(path) for path in (loaded_libraries("cublasLt") if paths is None else paths)]
    if not libraries:
        raise LogUnavailable("no libcublasLt.so is loaded in this process (PyTorch may have it linked in)")
    _listener = listener
    try:
        for library in libraries:
            library.start()
        yield
    finally:
        for library in libraries:
            library.stop()
        _listener = None
        if _interrupted:
            _interrupted = False
            _thread.interrupt_main()


class _Logger:
    """The logger of one loaded library file.

    Raises:
        LogUnavailable: it has none, or C's streams are out of reach.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))  # already loaded: this gives the same one
            self._set_callback = library.cublasLtLoggerSetCallback
            self._set_level = library.cublasLtLoggerSetLevel
            self._set_file = library.cublasLtLoggerSetFile
        except (OSError, AttributeError) as error:
            raise LogUnavailable(f"{path} has no logger that we know: {error}") from error
        self._set_callback.argtypes = [ctypes.c_void_p]
        self._set_file.argtypes = [ctypes.c_void_p]
        self._set_level.argtypes = [ctypes.c_int]
        self._null, self._stdout = _files()
        self._path = path

    def start(self) -> None:
        """Log to our callback and to no file.

        Raises:
            LogUnavailable: the library refused.
        """
        for what, status in (
            ("file", self._set_file(self._null)),  # else it would print every message to stdout as well
            ("callback", self._set_callback(ctypes.cast(_CALLBACK, ctypes.c_void_p))),
            ("level", self._set_level(LEVEL)),
        ):
            if status != 0:
                raise LogUnavailable(f"{self._path}: setting the logger's {what} gave cuBLAS status {status}")

    def stop(self) -> None:
        """As a process finds it: level 0, no callback, messages to stdout."""
        self._set_level(0)
        self._set_callback(None)
        self._set_file(self._stdout)


@cache
def _files() -> tuple[Any, Any]:
    """C's streams for /dev/null and stdout. The first stays open: the library may write to it until it has changed.

    Raises:
        LogUnavailable: there are no such streams here.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        libc.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        null = libc.fopen(os.devnull.encode(), b"w")
        stdout = ctypes.c_void_p.in_dll(libc, "stdout").value
    except (OSError, AttributeError, ValueError, TypeError) as error:
        raise LogUnavailable(f"the C library's streams cannot be reached: {error}") from error
    if not null or not stdout:
        raise LogUnavailable(f"{os.devnull} cannot be opened to write the log away")
    return null, stdout
