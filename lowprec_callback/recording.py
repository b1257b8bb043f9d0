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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

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
from lowprec_callback.facts.gemms import Gemm, GemmRun, GemmTime, ModuleTime, at_clock, role_shape
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
from lowprec_callback.facts.traces import GemmKernels, HostPhases, HostWaits, Trace

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
    "StepTime",
    "Stored",
    "Trace",
    "Trial",
    "UncachedWeights",
    "at_clock",
    "decode",
    "encode",
    "finite",
    "read",
    "role_shape",
]

VERSION = 3
"""Version of the facts. Raised when a fact is added, dropped or changes its meaning."""


FILE_NAME = "recording.jsonl"
"""The Recording's name inside a run folder."""


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
    """Appends facts to a file, each flushed at once. Use as a context manager, or call `close`.

    With `on_disk` false facts are kept in memory alone, until `write` is called or nobody wants them any more.
    """

    def __init__(self, path: Path, tool_version: str, created: str | None = None, on_disk: bool = True) -> None:
        self.path = path
        self._file: IO[str] | None = self._open() if on_disk else None
        self._lines: list[Line] = []
        self._closed = False
        self.lost: str | None = None
        """If the disk refused a fact (full, gone): a sentence. Facts then live on in memory."""
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
        if self._file is None:
            return
        try:
            self._file.write("".join(encode(fact) + "\n" for fact in facts))
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def snapshot(self) -> Recording:
        """All facts so far."""
        return Recording(self._lines, self.path)

    def write(self) -> None:
        """Put facts that were kept in memory on disk. A disk that refuses them harms nobody: see `lost`."""
        try:
            self._file = self._open()
        except OSError as error:
            self._lose(error)
            return
        facts = [line.fact for line in self._lines]
        self._lines.clear()
        self.add(*facts)

    def forget(self) -> None:
        """Drop facts that were kept in memory."""
        self._lines.clear()

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # "x": a Recording is never written over; two runs never share a file.
        # Text that is no Unicode (a file name in an error message) becomes an escape that JSON reads back.
        return self.path.open("x", encoding="utf-8", errors="backslashreplace")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._closed = True
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = f"{self.path}: {error.strerror or error}; later facts are only in memory"
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def __del__(self) -> None:
        """A session that never came to its end leaves no open file."""
        if getattr(self, "_file", None) is not None:
            self.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
