"""A torch.profiler Chrome trace (`.json`, `.json.gz`), read into a `Capture`.

Such files are hundreds of megabytes. `json.load` would build a tree of all events first; here the list of events is
cut at the seams between events into pieces of a few megabytes, and each piece is parsed (by `pydantic_core`, which is
installed with pydantic) and turned into columns before the next. A seam inside of an event, which its text alone can
not rule out, makes the piece no JSON: then it is parsed together with the next. Large files are read by two
processes, a half each.

Times there are microseconds with three decimals, so nanoseconds are kept. (Older files count from 1970, too far for a
double to hold nanoseconds: their starts are exact to 0.25 us, their durations to a nanosecond.)
"""

from __future__ import annotations

import gc
import io
import json
import mmap
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_callback.capture import NONE, Capture, Ints, Ranges, Waits, Work, blocked, compact, join
from lowprec_callback.capture_error import CaptureError
from lowprec_callback.measure.host_calls import blocking

TABLE_OF = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"), "gpu"),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime", "Driver"), "launch"),
    **dict.fromkeys(("cpu_op", "user_annotation", "Operator"), "host"),
}
"""The categories of events that count, and the table that each goes to. Older releases wrote them with a capital."""

PIECE = 4 << 20
"""Bytes that are parsed at a time."""

TWO_PROCESSES = 64 << 20
"""Bytes from which a second process is worth its start."""

MOST_LISTS = 100
"""Lists after the last event that are looked at, from the file's end on, to find the end of the list of events."""

_SEAM = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|ts|args)")')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_DEVICE = re.compile(rb'"deviceProperties"\s*:\s*\[')

_COLUMNS = {
    "host": ("start", "end", "thread", "name"),
    "launch": ("start", "thread", "id"),
    "wait": ("start", "end", "thread", "id", "name"),
    "gpu": ("start", "end", "stream", "device", "id", "name"),
}


@dataclass
class _Part:
    """The columns of a part of a trace, as lists of whole numbers, and the texts that they point to."""

    rows: dict[str, list[list[Ints]]] = field(
        default_factory=lambda: {table: [[] for _ in names] for table, names in _COLUMNS.items()}
    )
    names: dict[str, int] = field(default_factory=dict)
    threads: dict[tuple[str, str], int] = field(default_factory=dict)
    """(process, thread)."""
    events: int = 0
    cut: bool = False
    """Whether the text ended within an event."""

    def add(self, events: Sequence[Any]) -> None:
        """Take in some events."""
        self.events += len(events)
        sorted_out: dict[str | None, list[Any]] = {table: [] for table in (None, *TABLE_OF.values())}
        append = {table: rows.append for table, rows in sorted_out.items()}
        table_of = TABLE_OF.get
        for event in _dicts(events):
            append[table_of(event.get("cat", ""))](event)
        ts, duration, pid, tid, name = _fields(sorted_out["host"], "ts", "dur", "pid", "tid", "name")
        self._keep("host", *_times(ts, duration), self._threads(pid, tid), _numbered(name, self.names))
        ts, pid, tid, args = _fields(sorted_out["launch"], "ts", "pid", "tid", "args")
        self._keep("launch", _times(ts, ts)[0], self._threads(pid, tid), _argument(args, "correlation", NONE))
        waiting = [event for event in sorted_out["launch"] if "dur" in event and blocking(event.get("name", ""))]
        ts, duration, pid, tid, args, name = _fields(waiting, "ts", "dur", "pid", "tid", "args", "name")
        called = _argument(args, "correlation", NONE)
        self._keep("wait", *_times(ts, duration), self._threads(pid, tid), called, _numbered(name, self.names))
        ts, duration, args, name = _fields(sorted_out["gpu"], "ts", "dur", "args", "name")
        told = [_argument(args, key, other) for key, other in (("stream", 0), ("device", 0), ("correlation", NONE))]
        self._keep("gpu", *_times(ts, duration), *told, _numbered(name, self.names))

    def _keep(self, table: str, *columns: Ints) -> None:
        for kept, column in zip(self.rows[table], columns, strict=True):
            kept.append(column)

    def _threads(self, pids: Sequence[Any], tids: Sequence[Any]) -> Ints:
        known: dict[Any, int] = {}
        found = _numbered(list(zip(pids, tids, strict=True)), known)
        numbers = [self.threads.setdefault((str(p), str(t)), len(self.threads)) for p, t in known]
        return np.array(numbers, dtype=np.int64)[found]

    def column(self, table: str, name: str) -> Ints:
        """One column of a table."""
        return np.concatenate([*self.rows[table][_COLUMNS[table].index(name)], np.zeros(0, dtype=np.int64)])

    def save(self, out: Any) -> None:
        """Write it for the process that asked for it."""
        columns = {f"{table}.{name}": self.column(table, name) for table, names in _COLUMNS.items() for name in names}
        texts = json.dumps([list(self.names), list(self.threads)]).encode()
        columns["texts"] = np.frombuffer(texts, dtype=np.uint8).astype(np.int64)
        columns["facts"] = np.array([self.events, self.cut], dtype=np.int64)
        np.savez(out, **columns)  # type: ignore[arg-type]

    def merge(self, saved: Any) -> None:
        """Take in what another process saved."""
        names, threads = json.loads(saved["texts"].astype(np.uint8).tobytes())
        name_of = _ints(self.names.setdefault(text, len(self.names)) for text in names)
        thread_of = _ints(self.threads.setdefault((p, t), len(self.threads)) for p, t in threads)
        for table, columns in _COLUMNS.items():
            found = {name: saved[f"{table}.{name}"] for name in columns}
            if "name" in found:
                found["name"] = name_of[found["name"]]
            if "thread" in found:
                found["thread"] = thread_of[found["thread"]]
            self._keep(table, *found.values())
        self.events += int(saved["facts"][0])
        self.cut = self.cut or bool(saved["facts"][1])


def _ints(values: Iterable[Any]) -> Ints:
    return np.array(list(values), dtype=np.int64)


_ABSENT: dict[str, Any] = {"pid": 0, "tid": 0, "args": None}
"""What an event may leave out, and what is then taken."""


def _dicts(events: Sequence[Any]) -> list[dict[str, Any]]:
    return [event for event in events if isinstance(event, dict)]


def _fields(events: Sequence[dict[str, Any]], *names: str) -> list[Sequence[Any]]:
    """Columns of the complete events (`ph` is X); in the usual case, where all have all, at the speed of C."""
    pick = itemgetter("ph", *names)
    try:
        rows = list(map(pick, events))
    except KeyError:
        whole = [_ABSENT | event for event in events]
        rows = [pick(event) for event in whole if event.keys() >= {"ph", *names}]
    columns = list(zip(*rows, strict=True)) or [()] * (1 + len(names))
    if columns[0].count("X") != len(columns[0]):
        rows = [row for row in rows if row[0] == "X"]
        columns = list(zip(*rows, strict=True)) or [()] * (1 + len(names))
    return list(columns[1:])


def _numbered(values: Sequence[Any], known: dict[Any, int]) -> Ints:
    """The number of each value in `known`, which grows."""
    for value in dict.fromkeys(values):
        known.setdefault(value, len(known))
    return np.fromiter(map(known.__getitem__, values), dtype=np.int64, count=len(values))


def _argument(args: Sequence[Any], key: str, otherwise: int) -> Ints:
    found = [(each or {}).get(key, otherwise) for each in args]
    return _ints(otherwise if value is None else value for value in found)


def _times(start: Sequence[Any], duration: Sequence[Any]) -> tuple[Ints, Ints]:
    """(start, end) in nanoseconds, from microseconds."""
    begin, length = (np.rint(np.array(v, dtype=np.float64) * 1e3).astype(np.int64) for v in (start, duration))
    return begin, begin + length


def read_trace(file: Path) -> Capture:
    """Read a Chrome trace of torch.profiler.

    Raises:
        CaptureError: the file is no such trace, or holds no GPU kernel.
    """
    with _text(file) as raw:
        begin = _first_event(file, raw)
        try:
            part, cut = _read_all(file, raw, begin)
        except (TypeError, ValueError, OverflowError) as error:
            raise CaptureError(f"{file}: has an event that is none of torch.profiler's ({error})") from error
        header = bytes(raw[: min(begin, 1 << 20)])
    complaints = []
    if cut:
        complaints.append(
            f"the file is cut off after {part.events:,} events: what came later is missing, so that the last step may "
            "be incomplete; what is said rests on the events before"
        )
    gpu = {name: part.column("gpu", name) for name in _COLUMNS["gpu"]}
    host = {name: part.column("host", name) for name in _COLUMNS["host"]}
    launch = {name: part.column("launch", name) for name in _COLUMNS["launch"]}
    wait = {name: part.column("wait", name) for name in _COLUMNS["wait"]}
    if not len(gpu["start"]):
        lost = " before it was cut off" if cut else ""
        raise CaptureError(
            f"{file}: holds {part.events:,} events{lost} and no GPU kernel among them, so nothing can be concluded; "
            "trace with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], and give the profiler a step to see"
        )
    if not len(launch["start"]):
        complaints.append(
            "the trace has no launch calls (categories cuda_runtime and cuda_driver), so no kernel can be put into a "
            "module or a phase; trace the CPU as well (ProfilerActivity.CPU)"
        )
    names = list(part.names)
    work_values, work_name = compact(gpu["name"])
    range_values, range_name = compact(host["name"])
    nobody = np.zeros(len(gpu["id"]), dtype=np.int64)
    call = join(gpu["id"], nobody, launch["id"], np.zeros(len(launch["id"]), dtype=np.int64))
    linked = call != NONE
    called = join(wait["id"], np.zeros(len(wait["id"]), dtype=np.int64), gpu["id"], nobody)
    wait_values, wait_name = compact(wait["name"])
    calls = Waits(wait["start"], wait["end"], wait["thread"], wait_name, [names[value] for value in wait_values])
    time, thread = (launch[name] if len(call) and linked.any() else np.full(1, NONE) for name in ("start", "thread"))
    return Capture(
        tool="torch.profiler",
        file=file.name,
        work=Work(
            start=gpu["start"],
            end=gpu["end"],
            stream=gpu["stream"],
            device=gpu["device"],
            process=nobody,
            name=work_name,
            launch=np.where(linked, time[call], NONE),
            thread=np.where(linked, thread[call], NONE),
        ),
        work_names=[names[value] for value in work_values],
        ranges=Ranges(host["start"], host["end"], host["thread"], range_name),
        range_names=[("", names[value]) for value in range_values],
        processes=np.zeros(len(part.threads), dtype=np.int64),
        knows_operators=True,
        complaints=tuple(complaints),
        waits=blocked(calls, called, gpu["end"]) if len(launch["start"]) else None,
        **_gpu(header),
    )


@contextmanager
def _text(file: Path) -> Iterator[Any]:
    """The file's bytes, unpacked if they are packed: a map of the file, or bytes."""
    try:
        with file.open("rb") as raw:
            start = raw.read(2)
            if start == b"\x1f\x8b":
                yield _unpacked(file)
            elif not start:
                raise CaptureError(f"{file}: is empty")
            else:
                with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as view:
                    yield view
    except OSError as error:
        raise CaptureError(f"{file}: cannot be read ({error.strerror or error})") from error


def _unpacked(file: Path) -> bytes:
    """All that can be unpacked: of a file that is cut off, what is there."""
    pieces: list[bytes] = []
    unpacker = zlib.decompressobj(wbits=31)
    with file.open("rb") as packed:
        while piece := packed.read(PIECE):
            try:
                pieces.append(unpacker.decompress(piece))
                while unpacker.unused_data:  # files that were packed one by one and then joined
                    piece, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)
                    pieces.append(unpacker.decompress(piece))
            except zlib.error as error:
                if not any(pieces):
                    raise CaptureError(f"{file}: cannot be unpacked ({error})") from error
                break
    return b"".join(pieces)


def _first_event(file: Path, raw: Any) -> int:
    """Where the list of events begins."""
    found = _EVENTS.search(raw)
    if found:
        return found.end()
    start = bytes(raw[:256]).lstrip()
    if start.startswith(b"["):  # the trace format's other form: nothing but the list
        return int(raw.find(b"[")) + 1
    if start.startswith(b"{"):
        raise CaptureError(f'{file}: is no Chrome trace, or is cut off before its events (it has no "traceEvents")')
    raise CaptureError(f"{file}: is no Chrome trace of torch.profiler: it is not JSON")


def _read_all(file: Path, raw: Any, begin: int) -> tuple[_Part, bool]:
    """(everything, whether the file is cut off)."""
    middle = None
    if len(raw) - begin >= TWO_PROCESSES and (os.cpu_count() or 1) > 1:
        seam = _SEAM.search(raw, begin + (len(raw) - begin) // 2)
        middle = seam.end() if seam else None
    if middle is None:
        part = parse(raw, begin, len(raw))
        return part, part.cut
    command = [sys.executable, "-m", "lowprec_callback.chrome_trace", str(file), str(middle)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as helper:
        first = parse(raw, begin, middle)
        out, _ = helper.communicate()
    if first.cut or helper.returncode:  # the seam was none after all, or there is no second process to be had
        part = parse(raw, begin, len(raw))
        return part, part.cut
    with np.load(io.BytesIO(out)) as saved:
        first.merge(saved)
    return first, first.cut


def parse(raw: Any, begin: int, end: int) -> _Part:
    """The events from byte `begin`, which is at an event's first, to `end`."""
    part = _Part()
    collects = gc.isenabled()
    gc.disable()  # millions of small objects come and go, none in a cycle: looking for some costs half of the time
    try:
        _parse(part, raw, begin, end)
    finally:
        if collects:
            gc.enable()
    return part


def _parse(part: _Part, raw: Any, position: int, end: int) -> None:
    while position < end:
        size, seam = PIECE, _SEAM.search(raw, min(position + PIECE, end), end)
        while True:
            text = bytes(raw[position : seam.start() + 1 if seam else end])
            events = _events(text) if seam else _last_events(text)
            if events is not None or seam is None:
                break
            size *= 2
            seam = _SEAM.search(raw, min(position + size, end), end)
        if events is None:
            part.cut = True
            events = _before_the_cut(text)
        part.add(events)
        position = seam.end() if seam else end


def _events(text: bytes) -> list[Any] | None:
    """The events in a piece of the list; None if it is not a whole number of them."""
    from pydantic_core import from_json

    try:
        found: list[Any] = from_json(b"[" + text + b"]", cache_strings="all")
    except ValueError:
        return None
    return found


def _last_events(text: bytes) -> list[Any] | None:
    """The events of the last piece, which ends with a comma (a first half) or with the list's end and what follows."""
    stripped = text.rstrip()
    if stripped.endswith(b","):
        return _events(stripped[:-1])
    close = len(text)
    for _ in range(MOST_LISTS):
        close = text.rfind(b"]", 0, close)
        if close < 0:
            return None
        found = _events(text[:close])
        if found is not None:
            return found
    return None


def _before_the_cut(text: bytes) -> list[Any]:
    """The whole events in a piece that ends within one."""
    for seam in reversed(list(_SEAM.finditer(text))):
        found = _events(text[: seam.start() + 1])
        if found is not None:
            return found
    return []


def _gpu(header: bytes) -> dict[str, Any]:
    """Name, compute capability and size of the first GPU, from what stands before the events."""
    from pydantic_core import from_json

    found = _DEVICE.search(header)
    if not found:
        return {}
    close = header.find(b"]", found.end())
    try:
        first = from_json(header[found.end() - 1 : close + 1])[0]
    except (ValueError, IndexError):
        return {}
    facts = {}
    if first.get("numSms"):
        facts["multiprocessors"] = str(first["numSms"])
    if first.get("totalGlobalMem"):
        facts["memory"] = f"{first['totalGlobalMem'] / 2**30:.1f} GiB"
    major, minor = first.get("computeMajor"), first.get("computeMinor")
    return {
        "device": first.get("name"),
        "compute_capability": (int(major), int(minor)) if major is not None and minor is not None else None,
        "facts": facts,
    }


def main(argv: list[str]) -> None:
    """The second process: parse a file from a byte to its end, and write the columns to standard output."""
    with _text(Path(argv[0])) as raw:
        parse(raw, int(argv[1]), len(raw)).save(sys.stdout.buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
