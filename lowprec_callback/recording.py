"""The Recording: what was measured, as facts, one JSON object a line, in the order in which they came.

A Recording is append-only. Every fact is written out and flushed as soon as it is known, so a run that is
killed at any moment leaves a readable Recording of all that it had measured; only its last line may be torn,
and the reader says so. Analysis reads a Recording and nothing else; neither torch nor Transformer Engine (TE)
is needed to do it.

The first line is a `Header`. `VERSION` changes when a fact changes its meaning; a Recording that is newer than
this package is refused with a sentence that says so.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lowprec_callback.facts.base import MODES, ROLES, Fact, Method, Mode, Role
from lowprec_callback.facts.dispatch import (
    AttentionBackend,
    Dispatch,
    LibraryCall,
    LibraryLog,
    Operand,
    Product,
    Scales,
    Stored,
    UncachedWeights,
)
from lowprec_callback.facts.gemms import Gemm, GemmRun, GemmTime, ModuleTime, at_clock, direction_of, role_shape
from lowprec_callback.facts.memory import Holding, Memory, PeakHolding
from lowprec_callback.facts.run import (
    Card,
    End,
    Environment,
    Header,
    Imported,
    Model,
    Plan,
    Problem,
    Refusal,
    Restored,
    Sampled,
)
from lowprec_callback.facts.steps import Clocks, ForwardTime, HostTime, Loss, RankRecipe, RankSummary, StepTime, Trial
from lowprec_callback.facts.traces import GemmKernels, HostPhases, HostWaits, StepProducts, Trace
from lowprec_callback.files import replacing, why

__all__ = [
    "FILE_NAME",
    "MODES",
    "ROLES",
    "VERSION",
    "AttentionBackend",
    "Card",
    "Clocks",
    "Dispatch",
    "End",
    "Environment",
    "Fact",
    "ForwardTime",
    "Gemm",
    "GemmKernels",
    "GemmRun",
    "GemmTime",
    "Header",
    "Holding",
    "HostPhases",
    "HostTime",
    "HostWaits",
    "Imported",
    "LibraryCall",
    "LibraryLog",
    "Line",
    "Loss",
    "Memory",
    "Method",
    "Mode",
    "Model",
    "ModuleTime",
    "Operand",
    "PeakHolding",
    "Plan",
    "Problem",
    "Product",
    "RankRecipe",
    "RankSummary",
    "Recorder",
    "Recording",
    "RecordingError",
    "Refusal",
    "Restored",
    "Role",
    "Sampled",
    "Scales",
    "StepProducts",
    "StepTime",
    "Stored",
    "Trace",
    "Trial",
    "UncachedWeights",
    "at_clock",
    "decode",
    "direction_of",
    "encode",
    "finite",
    "read",
    "role_shape",
]

VERSION = 4
"""Version of the facts. Raised when a fact is added, dropped or changes its meaning."""


FILE_NAME = "recording.jsonl"
"""The Recording's name inside a run folder."""


ANOTHER_FILE = "another file is in its place"
"""Why a Recorder leaves the file at its path alone."""


class RecordingError(ValueError):
    """A Recording that cannot be read: missing, corrupt before its last line, or newer than this package."""


_F = TypeVar("_F", bound=Fact)


@cache
def _registry() -> dict[str, type[Fact]]:
    return {cls.kind: cls for cls in Fact.__subclasses__()}


@cache
def _adapter(kind: str) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_registry()[kind])


def encode(fact: Fact) -> str:
    """One line of JSON for a fact, without the line's end.

    JSON has no NaN and no infinities: they become the texts "NaN", "Infinity" and "-Infinity".
    """
    body = {"fact": fact.kind, **vars(fact)}
    return json.dumps(finite(body), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode(text: str) -> Fact:
    """The fact of one line of this version.

    Raises:
        RecordingError: it holds none.
    """
    return _decode(text.encode(), Path("a fact"), 1, first=False)


def finite(value: Any) -> Any:
    """`value` with NaN and the two infinities replaced by text, which JSON can carry and `float` can read."""
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _AS_IT_IS else finite(item) for item in value]
    if dataclasses.is_dataclass(value):
        return finite(vars(value))
    return value


_AS_IT_IS = frozenset({int, str, bool})
"""What columns mostly hold; a trace has hundreds of thousands of them."""


@dataclass(frozen=True)
class Line:
    """A fact and the number of the line (from 1) that it stands on."""

    number: int
    fact: Fact


class Recording:
    """Facts in memory, with the lines that they came from.

    `of(Kind)` gives the facts of one kind in order; `lines(Kind)` gives them with their line numbers, which is
    how a Report says where a number came from.
    """

    def __init__(self, lines: Sequence[Line], path: Path | None = None, torn: str | None = None) -> None:
        self._lines = tuple(lines)
        self.path = path
        self.torn = torn
        """If the last line was cut off (the process was killed while writing): a sentence that says so."""

    @classmethod
    def from_facts(cls, facts: Sequence[Fact]) -> Recording:
        """A Recording of facts that were never on disk, numbered from 1."""
        return cls([Line(i, fact) for i, fact in enumerate(facts, start=1)])

    def __iter__(self) -> Iterator[Fact]:
        return (line.fact for line in self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def lines(self, kind: type[_F]) -> list[tuple[int, _F]]:
        """All facts of one kind as (line number, fact)."""
        return [(line.number, line.fact) for line in self._lines if isinstance(line.fact, kind)]

    def of(self, kind: type[_F]) -> list[_F]:
        """All facts of one kind, in the order in which they were recorded."""
        return [line.fact for line in self._lines if isinstance(line.fact, kind)]

    def last(self, kind: type[_F]) -> _F | None:
        """The newest fact of one kind, or None."""
        found = self.of(kind)
        return found[-1] if found else None


class Recorder:
    """Appends facts to a file, each on disk at once. Use as a context manager, or call `close`.

    The disk never harms the run that is measured: no method raises an OSError. All facts are in memory as well, `close`
    writes what the disk refused or lost once more, and `lost` says what is where.

    With `on_disk` false facts are kept in memory alone, until `write` is called or nobody wants them any more.
    A process that is forked off (a worker that loads data) has a copy of this object and of the open file, but the file
    is not its own: there nothing is written, and nothing is closed.
    """

    def __init__(self, path: Path, tool_version: str, created: str | None = None, on_disk: bool = True) -> None:
        self.path = path
        """Where the file is, or would be. `close` may move it: see there."""
        self.lost: str | None = None
        """If a fact is not in the file (disk full, folder gone): a sentence that says what is where."""
        self._wanted = on_disk
        self._lines: list[Line] = []
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file that holds our facts: another file may come to stand at `path`."""
        self._size = 0
        self._written = 0
        """How many facts, from the first, are in the file as whole lines: `_size` bytes of it."""
        self._torn = False
        """Whether bytes beyond `_size` may be in the file: a write was begun and has not ended."""
        self._why: str | None = None
        """Why the disk takes no more facts."""
        self._closed = False
        self._process = os.getpid()
        if on_disk:
            self._open()
        self.add(
            Header(
                version=VERSION,
                tool_version=tool_version,
                created=created or datetime.now().astimezone().isoformat("T", "seconds"),
            )
        )

    def add(self, *facts: Fact) -> None:
        """Append facts. A disk that refuses them never harms the training run: see `lost`."""
        for fact in facts:
            self._lines.append(Line(len(self._lines) + 1, fact))
        self._write_rest()

    def snapshot(self) -> Recording:
        """All facts so far. When the Recorder is closed, the snapshot has a path only if facts are there."""
        return Recording(self._lines, None if self._closed and not self.kept() else self.path)

    def write(self) -> None:
        """Put facts that were kept in memory on disk. A disk that refuses them harms nobody: see `lost`."""
        self._wanted = True
        self._open()
        self._write_rest()

    def forget(self) -> None:
        """Drop facts that were kept in memory."""
        self._lines.clear()
        self._written = 0

    def kept(self) -> int:
        """How many facts, from the first, are on disk at `path`; asked of the disk, at this moment."""
        return self._written if self._trouble() is None else 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the file, and see to it that all facts are in one. Idempotent.

        If the disk refused facts, or the file is no longer at `path` (removed, or another one put there), all facts are
        written again from memory: to `path`, or if that fails to a folder for temporary files, and `path` follows.
        A file of somebody else is never written over. `lost` says how it ended.
        """
        if self._closed:
            return
        self._write_rest()
        self._closed = True
        if not self._wanted or self._is_a_copy():
            return
        self._shut()  # which also frees a file descriptor, if there are no others
        if (trouble := self._why or self._trouble()) is not None:
            self._rescue(trouble)

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # O_EXCL: a Recording is never written over; two runs never share a file.
            # A bare descriptor, without a buffer: what is not on disk must be known, and never be written later.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.path, flags, 0o666)
            self._know(os.fstat(self._file))
        except OSError as error:
            self._refused(error)

    def _know(self, file: os.stat_result) -> None:
        self._identity = (file.st_dev, file.st_ino)

    def _write_rest(self) -> None:
        """Write the facts that are not in the file yet.

        Only whole lines stay in the file. After a refusal the torn one is cut off at once; after an interruption
        (Ctrl-C between two pieces) by the next call, which then writes those facts again.
        """
        if self._file is None or self._closed or self._is_a_copy():
            return
        rest = self._lines[self._written :]
        data = b"".join(_line(line.fact) for line in rest)
        done = 0
        try:
            if self._torn:
                os.ftruncate(self._file, self._size)
            self._torn = True
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            whole = data.rfind(b"\n", 0, done) + 1
            with suppress(OSError):
                os.ftruncate(self._file, self._size + whole)
            self._size += whole
            self._written += data.count(b"\n", 0, whole)
            self._refused(error)
            return
        self._size += done
        self._written += len(rest)
        self._torn = False

    def _refused(self, error: OSError) -> None:
        self._why = f"the disk refused ({why(error)})"
        self.lost = f"{self.path}: {why(error)}; later facts are only in memory"
        self._shut()

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                os.close(file)
            except OSError as error:  # a network disk may refuse only now
                self._why = self._why or f"the disk refused ({why(error)})"

    def _trouble(self) -> str | None:
        """What is wrong with the file at `path`, if it is not the one that our facts were written to."""
        try:
            file = os.stat(self.path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                return f"it cannot be reached ({why(error)})"
            return "the file was removed" if self.path.parent.is_dir() else "the run folder was removed"
        if (file.st_dev, file.st_ino) != self._identity:
            return ANOTHER_FILE
        return "the file was cut short" if file.st_size < self._size else None

    def _rescue(self, trouble: str) -> None:
        """Write all facts again, and say what is where."""
        first, kept = self.path, self.kept()
        # True until it is done, and if it is interrupted.
        self.lost = f"{first}: {trouble}: {f'nothing after line {kept}' if kept else 'nothing of it'} is on disk"
        if self._trouble() != ANOTHER_FILE and self._rewritten(first):
            self.lost = f"{first}: {trouble}; all facts are written there now"
            return
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="lowprec-"))
            if self._rewritten(folder / first.name):
                self.path = folder / first.name
                self.lost = f"{first}: {trouble}; all facts are in {self.path}"
            else:
                folder.rmdir()

    def _rewritten(self, path: Path) -> bool:
        """Whether all facts are in a new file at `path`, which has replaced ours if that was still there."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size = 0
            with replacing(path) as file:
                for line in self._lines:
                    size += file.write(_line(line.fact))
            self._know(os.stat(path))
        except OSError:
            return False
        self._size, self._written, self._why = size, len(self._lines), None
        return True

    def _is_a_copy(self) -> bool:
        """Whether this is a process that was forked off from the one that measures."""
        return os.getpid() != self._process

    def __del__(self) -> None:
        """A session that never came to its end leaves no open file."""
        if getattr(self, "_file", None) is not None and not self._is_a_copy():
            self._shut()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(fact: Fact) -> bytes:
    # Text that is no Unicode (a file name in an error message) becomes an escape that JSON reads back.
    return f"{encode(fact)}\n".encode("utf-8", "backslashreplace")


def read(path: Path | str) -> Recording:
    """Read a Recording, given its file or the run folder that holds it.

    Raises:
        RecordingError: the file is missing, is no Recording, is newer than this package, or is corrupt before
            its last line. A torn last line is not an error: see `Recording.torn`.
    """
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise RecordingError(
            f"{file}: cannot be read ({error.strerror}); give a run folder or its {FILE_NAME}"
        ) from error
    pieces = raw.split(b"\n")
    whole, rest = pieces[:-1], pieces[-1]
    lines: list[Line] = []
    for number, piece in enumerate(whole, start=1):
        lines.append(Line(number, _decode(piece, file, number, first=number == 1)))
    if not lines:
        raise RecordingError(f"{file}: holds no complete line, so it is no Recording (or its run died at once)")
    torn = (
        f"{file}, line {len(whole) + 1}: cut off while it was being written; all before it is whole" if rest else None
    )
    return Recording(lines, file, torn)


def _decode(piece: bytes, file: Path, number: int, first: bool) -> Fact:
    where = f"{file}, line {number}"
    try:
        body = json.loads(piece)
        kind = body.pop("fact")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        what = "not a Recording" if first else "corrupt"
        raise RecordingError(f"{where}: {what} (expected a JSON object with a key 'fact'): {error}") from error
    if first and kind != Header.kind:
        raise RecordingError(f"{where}: a Recording begins with a header, found {kind!r}")
    if first and isinstance(body.get("version"), int) and body["version"] > VERSION:
        raise RecordingError(
            f"{where}: written as version {body['version']} by lowprec_callback {body.get('tool_version', '?')}; "
            f"this one reads up to version {VERSION}: upgrade lowprec_callback to open it"
        )
    if not isinstance(kind, str) or kind not in _registry():
        raise RecordingError(f"{where}: unknown fact {kind!r}; known: {', '.join(sorted(_registry()))}")
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(body)  # type: ignore[no-any-return]
    except ValidationError as error:
        first_error = error.errors()[0]
        field_name = ".".join(str(part) for part in first_error["loc"])
        raise RecordingError(f"{where}: fact {kind!r}, field {field_name}: {first_error['msg']}") from error
