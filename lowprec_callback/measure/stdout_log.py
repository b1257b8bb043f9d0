"""The logs that CPU libraries print: oneDNN's and MKL's verbose lines, taken out of the process's standard output.

Both are switched on and off in process by PyTorch (`torch.backends.mkldnn.verbose`, `torch.backends.mkl.verbose`),
and both print to C's stdout, file descriptor 1, with no other choice. So for one watched step descriptor 1 leads to a
temporary file. What else was printed meanwhile, by whatever thread, is written to the real stdout when the step is
over, in its order.

A line does not say which layer it is of. But between two module boundaries on the host, only the module between them
runs, and the length of the file at each boundary cuts the log accordingly.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from lowprec_callback.measure.cublaslt_log import LogUnavailable
from lowprec_callback.measure.scopes import Scope

_LINE = re.compile(rb"(?:onednn_verbose|dnnl_verbose|MKL_VERBOSE)[, ][^\n]*\n?")
"""A library's line. It may begin anywhere: a progress bar leaves the line open on which it stands."""

_ASKED = ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE")
"""Environment variables by which a user asks for the same lines."""


@dataclass
class StdoutLog:
    """The lines that oneDNN and MKL printed while `listen` lasted, each with the module that ran.

    Args:
        current: gives the module that runs on the calling thread.
    """

    current: Callable[[], Scope | None]
    libraries: tuple[str, ...] = ()
    """Which libraries were listened to."""
    lines: list[tuple[Scope | None, str]] = field(default_factory=list)
    """(module, line), in order, once `listen` is over."""
    _marks: list[tuple[int, Scope | None]] = field(default_factory=list)
    _capture: _Capture | None = None

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Listen while the context lasts.

        Raises:
            LogUnavailable: neither library is there, the user listens already, or stdout cannot be redirected.
        """
        asked = [name for name in _ASKED if os.environ.get(name, "0").lower() not in ("", "0", "none")]
        if asked:
            raise LogUnavailable(f"{asked[0]} is set, and the lines that it asks for were left alone")
        with ExitStack() as verbose:
            # Redirected first and brought back last, so that no line reaches the terminal.
            capture = _Capture()
            capture.start()
            try:
                self.libraries = _switch_on(verbose)
                self._capture, self._marks = capture, [(capture.length(), None)]
                yield
            finally:
                self._capture = None
                with suppress(Exception):
                    verbose.close()
                self._sort(*capture.stop())

    def boundary(self, _scope: Scope | None = None) -> None:
        """A module begins or ends, on any thread."""
        if self._capture is not None:
            self._marks.append((self._capture.length(), self.current()))

    def _sort(self, content: bytes, spans: list[tuple[int, int]]) -> None:
        """Give each line the module that ran when it was written."""
        marks = iter([*self._marks[1:], (len(content) + 1, None)])
        owner = self._marks[0][1] if self._marks else None
        position, following = next(marks)
        for begin, end in spans:
            while begin >= position:
                owner = following
                position, following = next(marks, (len(content) + 1, None))
            self.lines.append((owner, content[begin:end].decode(errors="replace").rstrip("\n")))


def _switch_on(stack: ExitStack) -> tuple[str, ...]:
    """Make both libraries verbose until the stack closes; the names of those that are."""
    on, refused = [], []
    candidates: tuple[tuple[str, Any], ...] = (("oneDNN", torch.backends.mkldnn), ("MKL", torch.backends.mkl))
    for name, backend in candidates:
        if not backend.is_available():
            refused.append(f"PyTorch was built without {name}")
            continue
        try:
            verbose: AbstractContextManager[Any] = backend.verbose(backend.VERBOSE_ON)
            stack.enter_context(verbose)
            on.append(name)
        except (AssertionError, RuntimeError) as error:
            refused.append(f"{name}: {error}")
    if not on:
        raise LogUnavailable("; ".join(refused))
    return tuple(on)


_redirected: _Capture | None = None
_lock = threading.Lock()


class _Capture:
    """File descriptor 1, redirected to a temporary file."""

    def __init__(self) -> None:
        if os.name != "posix":
            raise LogUnavailable("standard output can be redirected under POSIX only")
        self._saved = -1

    def start(self) -> None:
        """Redirect.

        Raises:
            LogUnavailable: stdout is closed, redirected already by us, or there is no room for a file.
        """
        global _redirected
        with _lock:
            if _redirected is not None:
                raise LogUnavailable("standard output is redirected already")
            try:
                _flush()
                self._saved = os.dup(1)  # first: were stdout closed, the file would become descriptor 1
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
                os.dup2(self._file.fileno(), 1)
            except OSError as error:
                if self._saved >= 0:
                    os.close(self._saved)
                raise LogUnavailable(f"standard output cannot be redirected: {error}") from error
            _redirected = self

    def length(self) -> int:
        """Bytes written so far."""
        _libc().fflush(None)
        return os.fstat(self._file.fileno()).st_size

    def stop(self) -> tuple[bytes, list[tuple[int, int]]]:
        """Bring stdout back, and write there what is not a library's. Gives all that was caught, and the lines in it.

        Returns:
            The bytes, and (begin, end) of each library's line in them.
        """
        global _redirected
        with _lock:
            _flush()
            os.dup2(self._saved, 1)
            os.close(self._saved)
            _redirected = None
        self._file.seek(0)
        content = self._file.read()
        self._file.close()
        spans = [match.span() for match in _LINE.finditer(content)]
        with suppress(OSError):  # a reader that went away is the user's affair
            _write(_LINE.sub(b"", content))
        return content, spans

    def forget(self) -> None:
        """In a forked child (a data loader's worker): its stdout is the real one again, at once."""
        global _redirected
        with suppress(OSError):
            os.dup2(self._saved, 1)
        _redirected = None


def _after_fork() -> None:
    if _redirected is not None:
        _redirected.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _libc() -> Any:
    """The C library, whose streams the libraries write to."""
    return ctypes.CDLL(None)


def _flush() -> None:
    """Write out what Python and C hold back."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    _libc().fflush(None)


def _write(rest: bytes) -> None:
    while rest:
        rest = rest[os.write(1, rest) :]
