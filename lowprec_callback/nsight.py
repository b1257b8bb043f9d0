"""Nsight Systems: the command line to capture with, and an SQLite export read into a `Capture`.

What an export holds differs between releases: tables exist only when they have rows, columns come and go. So tables
and columns are looked for, and what is absent costs only what it would have told. Schemas seen: 3.11 (2024.2), 3.20
(2025.3), 3.25 (2026.2).

The three large tables are read by `sqlite_columns`, side by side; SQLite answers the small questions. The user's file
is opened read-only and immutable: nothing is ever written beside it.

An export holds the whole environment of the profiled process, tokens included. Only names on
`measure.device.ALLOWED_VARIABLES` are ever looked for in it.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from lowprec_callback import sqlite_columns
from lowprec_callback.capture import NONE, Capture, Ints, Ranges, Waits, Work, blocked, compact, join
from lowprec_callback.capture_error import CaptureError
from lowprec_callback.measure.device import ALLOWED_VARIABLES
from lowprec_callback.measure.host_calls import blocking
from lowprec_callback.sqlite_columns import Unusual

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX = "NVTX_EVENTS"
STRINGS = "StringIds"

PUSH_POP, DOMAIN_CREATE = 59, 75
"""`NVTX_EVENTS.eventType`: a range of one thread, and the event that names a domain."""

CHUNK = 8192
"""Rows that SQLite is asked for at a time."""

PROCESS_BITS = 24
"""A globalTid is a globalPid with the thread's number in its low 24 bits."""

CAPTURE_OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",
    "--env-var=NVTE_NVTX_ENABLED=1",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
)
"""Without the second and third a capture is gigabytes; without the last `nsys` ends the training with the capture.
Transformer Engine names its layers in ranges where the variable is set."""

SALVAGE = re.compile(r"malformed|not a database|disk I/O error|encrypted")


def capture_command(command: Sequence[str], output: str = "lowprec", *, whole: bool = False) -> list[str]:
    """The command line that captures `command` (`python train.py ...`) into `OUTPUT.nsys-rep`.

    The capture lasts from `torch.cuda.profiler.start()` to `stop()`; with `whole`, from the process's start to its end.
    """
    options = [option for option in CAPTURE_OPTIONS if not (whole and option.startswith("--capture-range"))]
    return ["nsys", "profile", *options, "--force-overwrite=true", f"--output={output}", *command]


@contextmanager
def exported(report: Path) -> Iterator[Path]:
    """The SQLite export of an `.nsys-rep` file, in a temporary folder.

    Raises:
        CaptureError: there is no `nsys`, or it cannot export the file.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        how = f"nsys export --type sqlite --output {report.stem}.sqlite {report.name}"
        raise CaptureError(
            f"{report}: reading an .nsys-rep needs `nsys`, which is not on the PATH; where it is, run `{how}` and give "
            "its result to this command"
        )
    with tempfile.TemporaryDirectory(prefix="lowprec-nsys-") as folder:
        target = Path(folder) / f"{report.stem}.sqlite"
        command = [nsys, "export", "--type", "sqlite", "--output", str(target), str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not target.exists():
            said = " ".join((done.stderr or done.stdout).split())[-300:] or "it said nothing"
            raise CaptureError(f"{report}: `nsys export` failed with exit code {done.returncode}: {said}")
        yield target


def read_export(file: Path) -> Capture:
    """Read an SQLite export.

    Raises:
        CaptureError: the file is no whole export, or holds no GPU kernel.
    """
    _refuse_what_is_cut_off(file)
    try:
        with closing(_connect(file)) as db:
            return _read(file, db)
    except sqlite3.DatabaseError as error:
        what = "is damaged" if SALVAGE.search(str(error)) else "cannot be read"
        raise CaptureError(
            f"{file}: {what} ({error}), and which rows are lost is not known, so nothing can be concluded from it; "
            "export the .nsys-rep again"
        ) from error


def _connect(file: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{quote(str(file.resolve()))}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return db


def _refuse_what_is_cut_off(file: Path) -> None:
    """An SQLite file says in its header how long it is; SQLite itself only calls a shorter one malformed."""
    try:
        size = file.stat().st_size
        with file.open("rb") as raw:
            header = raw.read(100)
    except OSError as error:
        raise CaptureError(f"{file}: cannot be read ({error.strerror})") from error
    if not header:
        raise CaptureError(f"{file}: is empty")
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise CaptureError(f"{file}: is no SQLite export of Nsight Systems (it does not begin like an SQLite file)")
    page = int.from_bytes(header[16:18], "big")
    whole = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    if size < whole:
        raise CaptureError(
            f"{file}: is cut off: {size:,} of {whole:,} bytes are there. Which rows are lost is not known, so nothing "
            "can be concluded from it; copy it again, or export the .nsys-rep again"
        )


class _Tables:
    """The tables and columns that an export has."""

    def __init__(self, db: sqlite3.Connection) -> None:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self._columns = {name: {row[1] for row in db.execute(f'PRAGMA table_info("{name}")')} for name in names}

    def __contains__(self, table: str) -> bool:
        return table in self._columns

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table is there with all of these columns."""
        return table in self._columns and self._columns[table].issuperset(columns)

    def column(self, table: str, *names: str) -> str | None:
        """The first of these columns that the table has."""
        return next((name for name in names if self.has(table, name)), None)


def _read(file: Path, db: sqlite3.Connection) -> Capture:
    tables = _Tables(db)
    if STRINGS not in tables and KERNELS not in tables:
        raise CaptureError(f"{file}: is an SQLite file, but no export of Nsight Systems (it has no table {KERNELS})")
    if KERNELS not in tables:
        raise CaptureError(
            f"{file}: holds no GPU kernel (there is no table {KERNELS}). Either CUDA was not traced (capture with "
            "--trace=cuda,nvtx), or the capture window was over before the first kernel ran (is the code between "
            "torch.cuda.profiler.start() and stop() reached?). So nothing can be concluded"
        )
    if not tables.has(STRINGS, "id", "value"):
        raise CaptureError(f"{file}: the table {STRINGS} is missing, so no kernel has a name: nothing can be concluded")
    complaints: list[str] = []
    with ThreadPoolExecutor(max_workers=4) as pool:
        raw_work = pool.submit(_own, file, tables, _fetch_work)
        raw_calls = pool.submit(_own, file, tables, _fetch_calls)
        raw_ranges = pool.submit(_own, file, tables, _fetch_ranges)
        raw_waits = pool.submit(_own, file, tables, _fetch_waits)
        work, name_ids = raw_work.result()
        call_time, call_tid, call_id = raw_calls.result()
        ranges: _Ranges = raw_ranges.result()
        waits: _Waits | None = raw_waits.result()
    if not len(work["start"]):
        raise CaptureError(
            f"{file}: the capture window holds no GPU kernel (the table {KERNELS} is empty), so nothing can be "
            "concluded; was any work done between torch.cuda.profiler.start() and stop()?"
        )
    wait_tid = waits.tid if waits is not None else np.zeros(0, dtype=np.int64)
    threads, thread_of = compact(np.concatenate([call_tid, ranges.tid, wait_tid]))
    call_thread, range_thread, wait_thread = np.split(thread_of, np.cumsum([len(call_tid), len(ranges.tid)]))
    _, process_of = compact(np.concatenate([threads >> PROCESS_BITS, work["pid"] >> PROCESS_BITS]))
    of_threads, of_work = process_of[: len(threads)], process_of[len(threads) :]
    call = join(work["id"], of_work, call_id, of_threads[call_thread] if len(call_id) else call_id)
    if not len(call_id):
        complaints.append(
            "the export has no launch calls (no rows in CUPTI_ACTIVITY_KIND_RUNTIME), so no kernel can be put into a "
            "module or a phase; steps are cut by GPU time. Capture with --trace=cuda,nvtx"
        )
    linked = call != NONE
    texts = _strings(db, np.unique(np.concatenate([name_ids, ranges.ids[ranges.first]])))
    work_names = [_MEMORY.get(int(key)) or texts.get(int(key), f"kernel without a name ({key})") for key in name_ids]
    domains = _domains(db, tables, threads, of_threads)
    range_names = [
        (
            domains.get((int(ranges.domains[row]), int(of_threads[range_thread[row]])), ""),
            ranges.texts[ranges.number[row]] or texts.get(int(ranges.ids[row]), ""),
        )
        for row in ranges.first
    ]
    if not len(ranges.start):
        complaints.append(
            "the export has no NVTX range, so no kernel can be put into a module or a role: what is said rests on "
            "names and times of kernels alone. Capture with --trace=cuda,nvtx"
        )
    complaints += _hidden_graphs(db, tables)
    complaints += _diagnostics(db, tables)
    return Capture(
        tool=_tool(db, tables),
        file=file.name,
        work=Work(
            start=work["start"],
            end=work["end"],
            stream=work["stream"],
            device=work["device"],
            process=of_work,
            name=work["name"],
            launch=np.where(linked, call_time[call] if len(call_time) else NONE, NONE),
            thread=np.where(linked, call_thread[call] if len(call_time) else NONE, NONE),
        ),
        work_names=work_names,
        ranges=Ranges(ranges.start, ranges.end, range_thread, ranges.name),
        range_names=range_names,
        processes=of_threads,
        numbers=ranges.payloads,
        complaints=tuple(complaints),
        waits=None if waits is None else _blocked(waits, wait_thread, of_threads, (work["id"], of_work, work["end"])),
        **_gpu(db, tables),
        variables=_variables(db, tables),
    )


def _own(file: Path, tables: _Tables, fetch: Callable[[Path, sqlite3.Connection, _Tables], Any]) -> Any:
    """Fetch with a connection of one's own, for a thread of one's own."""
    with closing(_connect(file)) as db:
        return fetch(file, db, tables)


# --- Columns ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Only:
    """A condition on rows: a column that has one of these values, or (`keep` false) none of them."""

    column: str
    values: tuple[int, ...]
    keep: bool = True


def _columns(
    file: Path,
    db: sqlite3.Connection,
    table: str,
    numbers: Sequence[str],
    only: _Only | None = None,
    text: str | None = None,
) -> tuple[list[Ints], Ints, list[str]]:
    """Columns of whole numbers (NULL becomes -1) in the table's own order, and one column of text.

    Returns the numbers, for each row the index of its text, and the distinct texts.
    """
    (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone()
    info = list(db.execute(f'PRAGMA table_info("{table}")'))
    position = {row[1]: row[0] for row in info}
    condition = None if only is None else (position[only.column], only.values, only.keep)
    try:
        if any(row[5] for row in info):
            raise Unusual("a column may be the row's number")
        columns, index, texts = sqlite_columns.Table(file, root).read(
            [position[name] for name in numbers], None if text is None else position[text], condition
        )
    except (Unusual, IndexError, ValueError):
        return _through_sqlite(db, table, numbers, only, text)
    return columns, index, [raw.decode("utf-8", "replace") for raw in texts]


def _through_sqlite(
    db: sqlite3.Connection, table: str, numbers: Sequence[str], only: _Only | None, text: str | None
) -> tuple[list[Ints], Ints, list[str]]:
    """As `_columns`, a row at a time."""
    where = "1"
    if only is not None:
        values = ", ".join(str(value) for value in only.values)
        where = f'"{only.column}" {"" if only.keep else "NOT "}IN ({values})'
    names = ", ".join([*(f'ifnull("{name}", -1)' for name in numbers), f"ifnull(\"{text}\", '')" if text else "0"])
    cursor = db.execute(f'SELECT {names} FROM "{table}" WHERE {where} ORDER BY rowid')
    known: dict[str, int] = {}
    pieces: list[Ints] = []
    while rows := cursor.fetchmany(CHUNK):
        plain = [(*row[:-1], known.setdefault(row[-1], len(known)) if text else 0) for row in rows]
        pieces.append(np.array(plain, dtype=np.int64))
    columns = np.concatenate(pieces).T if pieces else np.zeros((len(numbers) + 1, 0), dtype=np.int64)
    return [np.ascontiguousarray(column) for column in columns[:-1]], columns[-1], list(known)


_MEMORY = {-2: "[CUDA memcpy]", -3: "[CUDA memset]"}
"""Names of what is no kernel."""


def _fetch_work(file: Path, db: sqlite3.Connection, tables: _Tables) -> tuple[dict[str, Ints], Ints]:
    """Kernels, copies and fills together; and the string ids of the distinct names, which `name` indexes."""
    pieces: list[dict[str, Ints]] = []
    for table, name in ((KERNELS, None), (COPIES[0], -2), (COPIES[1], -3)):
        if not tables.has(table, "start", "end"):
            continue
        wanted = {"start": "start", "end": "end", "stream": "streamId", "device": "deviceId"}
        wanted |= {"pid": "globalPid", "id": "correlationId"}
        if name is None:
            # The demangled name: the short one leaves out namespaces and template arguments, which tell kernels apart.
            wanted["name"] = tables.column(table, "demangledName", "mangledName", "shortName") or "demangledName"
        there = {key: column for key, column in wanted.items() if tables.has(table, column)}
        columns, *_ = _columns(file, db, table, list(there.values()))
        piece = dict(zip(there, columns, strict=True))
        absent = {"stream": 0, "device": 0, "pid": 0, "id": NONE, "name": NONE if name is None else name}
        piece |= {key: np.full(len(columns[0]), value) for key, value in absent.items() if key not in piece}
        piece["end"] = np.maximum(piece["end"], piece["start"])
        pieces.append(piece)
    work = {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
    ids, work["name"] = compact(work["name"])
    return work, ids


def _fetch_calls(file: Path, db: sqlite3.Connection, tables: _Tables) -> tuple[Ints, Ints, Ints]:
    """(start, globalTid, correlation id) of the launch calls."""
    nothing = np.zeros(0, dtype=np.int64)
    if not tables.has(CALLS, "start", "globalTid", "correlationId"):
        return nothing, nothing, nothing
    only = None
    if tables.has(CALLS, "nameId") and tables.has(STRINGS, "id", "value"):
        # Half of the calls launch nothing. A call of a name that is not known is read rather than missed.
        only = _Only("nameId", tuple(key for key, name in _call_names(db) if _IDLE_CALL.match(name)), keep=False)
    (start, tid, correlation), *_ = _columns(file, db, CALLS, ["start", "globalTid", "correlationId"], only)
    return start, tid, correlation


@dataclass(frozen=True)
class _Waits:
    """Calls in which the host may be blocked."""

    start: Ints
    end: Ints
    tid: Ints
    id: Ints
    name: Ints
    """Index into `names`."""
    names: list[str]


def _fetch_waits(file: Path, db: sqlite3.Connection, tables: _Tables) -> _Waits | None:
    """None: the export does not hold them."""
    wanted = ["start", "end", "globalTid", "correlationId", "nameId"]
    if not tables.has(CALLS, *wanted) or not tables.has(STRINGS, "id", "value"):
        return None
    names = {key: name for key, name in _call_names(db) if blocking(name)}
    nothing = np.zeros(0, dtype=np.int64)
    if not names:
        return _Waits(nothing, nothing, nothing, nothing, nothing, [])
    (start, end, tid, called, name), *_ = _columns(file, db, CALLS, wanted, _Only("nameId", tuple(names)))
    values, index = compact(name)
    return _Waits(start, np.maximum(end, start), tid, called, index, [names[int(value)] for value in values])


def _blocked(waits: _Waits, thread: Ints, processes: Ints, work: tuple[Ints, Ints, Ints]) -> Waits:
    """`work` is the correlation id, the process and the end of everything that the GPU did."""
    work_id, work_process, work_end = work
    copy = join(waits.id, processes[thread] if len(thread) else thread, work_id, work_process)
    return blocked(Waits(waits.start, waits.end, thread, waits.name, waits.names), copy, work_end)


_IDLE_CALL = re.compile(
    r"cu(?:da)?(?:Kernel|Func|Module|Library|Device|Ctx|Event|Pointer|Mem(?:Get|Alloc|Free|Pool|Host|Create|Map)|Malloc"
    r"|Free|Host|Get|Peek|Occupancy|Profiler|ThreadExchange|Stream(?:Is|Get|Create|Destroy|Wait|Synchronize|Query))"
)
"""Calls of the CUDA API that start no work on the GPU."""


def _call_names(db: sqlite3.Connection) -> list[tuple[int, str]]:
    query = f"SELECT id, value FROM {STRINGS} WHERE substr(value, 1, 2) = 'cu'"
    return [(int(key), str(name)) for key, name in db.execute(query)]


@dataclass(frozen=True)
class _Ranges:
    """Push-pop ranges that have an end."""

    start: Ints
    end: Ints
    tid: Ints
    name: Ints
    first: Ints
    """For each distinct name the first row that bears it."""
    ids: Ints
    """String ids of registered names, by row; -1: the name is a text of its own."""
    domains: Ints
    number: Ints
    """Index of each row's text in `texts`."""
    texts: list[str]
    payloads: Ints
    """The whole number that a range carries; negative for none."""


PAYLOADS = ("uint64Value", "int64Value", "uint32Value", "int32Value")


def _fetch_ranges(file: Path, db: sqlite3.Connection, tables: _Tables) -> _Ranges:
    nothing = np.zeros(0, dtype=np.int64)
    if not tables.has(NVTX, "start", "end", "globalTid", "eventType"):
        return _Ranges(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, [], nothing)
    optional = [name for name in ("textId", "domainId", *PAYLOADS) if tables.has(NVTX, name)]
    text = "text" if tables.has(NVTX, "text") else None
    wanted = ["start", "end", "globalTid", *optional]
    columns, number, texts = _columns(file, db, NVTX, wanted, _Only("eventType", (PUSH_POP,)), text)
    found = dict(zip(wanted, columns, strict=True))
    ended = found["end"] != -1  # NULL: the capture was over before the range was
    if not ended.all():
        found = {name: column[ended] for name, column in found.items()}
        number = number[ended] if text else number
    count = len(found["start"])
    ids = found.get("textId", np.full(count, -1))
    domains = found.get("domainId", np.zeros(count, dtype=np.int64))
    number = number if text else np.zeros(count, dtype=np.int64)
    # A name is (domain, process, registered string or text); the domain's number is its process's own.
    name, width = np.zeros(count, dtype=np.int64), 1
    for column in (domains, found["globalTid"] >> PROCESS_BITS, ids, number):
        values, index = compact(column)
        name, width = name * len(values) + index, width * len(values)
    packed, name = compact(name)
    first = np.zeros(len(packed), dtype=np.int64)
    first[name[::-1]] = np.arange(count)[::-1]
    payloads = np.full(count, NONE, dtype=np.int64)
    for column_name in PAYLOADS:
        payloads = np.where(payloads < 0, found.get(column_name, payloads), payloads)
    return _Ranges(
        found["start"], found["end"], found["globalTid"], name, first, ids, domains, number, texts or [""], payloads
    )


def _domains(db: sqlite3.Connection, tables: _Tables, threads: Ints, processes: Ints) -> dict[tuple[int, int], str]:
    """(domain's number, process) to its name."""
    if not tables.has(NVTX, "domainId", "eventType", "globalTid"):
        return {}
    text = "n.text" if tables.has(NVTX, "text") else "NULL"
    registered = "LEFT JOIN StringIds s ON s.id = n.textId" if tables.has(NVTX, "textId") else ""
    value = f"coalesce(s.value, {text})" if registered else text
    query = f"SELECT n.domainId, n.globalTid, {value} FROM {NVTX} n {registered} WHERE n.eventType = {DOMAIN_CREATE}"
    process_of = {int(tid) >> PROCESS_BITS: int(process) for tid, process in zip(threads, processes, strict=True)}
    found: dict[tuple[int, int], str] = {}
    for domain, tid, name in db.execute(query):
        if domain is not None and tid is not None and name and int(tid) >> PROCESS_BITS in process_of:
            found[int(domain), process_of[int(tid) >> PROCESS_BITS]] = str(name)
    return found


# --- Small tables -------------------------------------------------------------------------------------------


def _strings(db: sqlite3.Connection, ids: Ints) -> dict[int, str]:
    """The strings that kernels and ranges point to, and no others: the table also holds the environment's."""
    wanted = [int(key) for key in ids if key >= 0]
    found: dict[int, str] = {}
    for begin in range(0, len(wanted), 500):
        some = wanted[begin : begin + 500]
        marks = ", ".join("?" * len(some))
        found.update(db.execute(f"SELECT id, value FROM {STRINGS} WHERE id IN ({marks})", some))
    return found


def _tool(db: sqlite3.Connection, tables: _Tables) -> str:
    meta: dict[str, str] = {}
    if tables.has("META_DATA_EXPORT", "name", "value"):
        query = (
            "SELECT name, value FROM META_DATA_EXPORT WHERE name IN ('EXPORT_PRODUCT_VERSION', 'EXPORT_SCHEMA_VERSION')"
        )
        meta = dict(db.execute(query))
    product = meta.get("EXPORT_PRODUCT_VERSION", "of an unknown version")
    schema = meta.get("EXPORT_SCHEMA_VERSION")
    return f"Nsight Systems {product}" + (f" (export schema {schema})" if schema else "")


def _gpu(db: sqlite3.Connection, tables: _Tables) -> dict[str, Any]:
    """Name, compute capability and size of the first GPU, where the export tells them."""
    table = "TARGET_INFO_GPU"
    if not tables.has(table, "name"):
        return {}
    wanted = ("name", "smCount", "totalMemory", "computeMajor", "computeMinor", "smMajor", "smMinor")
    columns = [name for name in wanted if tables.has(table, name)]
    order = " ORDER BY id" if tables.has(table, "id") else ""
    row = db.execute(f"SELECT {', '.join(columns)} FROM {table}{order} LIMIT 1").fetchone()
    if row is None:
        return {}
    told = dict(zip(columns, row, strict=True))
    major = told.get("computeMajor", told.get("smMajor"))
    minor = told.get("computeMinor", told.get("smMinor"))
    facts = {}
    if told.get("smCount"):
        facts["multiprocessors"] = str(told["smCount"])
    if told.get("totalMemory"):
        facts["memory"] = f"{told['totalMemory'] / 2**30:.1f} GiB"
    capability = (int(major), int(minor)) if major is not None and minor is not None else None
    return {"device": told["name"], "compute_capability": capability, "facts": facts}


def _hidden_graphs(db: sqlite3.Connection, tables: _Tables) -> list[str]:
    if GRAPHS not in tables:
        return []
    (count,) = db.execute(f"SELECT COUNT(*) FROM {GRAPHS}").fetchone()
    if not count:
        return []
    return [
        f"{count} launches of CUDA graphs were captured as wholes, so the kernels in them are missing here, and the "
        "GPU seems idle while they ran; capture with --cuda-graph-trace=node"
    ]


def _diagnostics(db: sqlite3.Connection, tables: _Tables) -> list[str]:
    """Nsight's own warnings that events were lost. Its other messages can quote the command line: they stay there."""
    if not tables.has("DIAGNOSTIC_EVENT", "text"):
        return []
    lost = re.compile(r"(?i)not all (\w+) events might have been collected|(\w+) events? (?:were|was) (?:lost|dropped)")
    found = []
    for (text,) in db.execute("SELECT text FROM DIAGNOSTIC_EVENT"):
        match = lost.search(str(text or ""))
        if match:
            found.append(f"Nsight Systems says: {match[0]}")
    return list(dict.fromkeys(found))


_VALUE = re.compile(r"[\w.:+/-]+(?:,[\w.:+/-]+(?![\w.:+/=-]))*(?!=)")
"""What a value on the allow-list can look like: no blanks, no `=`, so that no second variable is swept in."""


def _variables(db: sqlite3.Connection, tables: _Tables) -> dict[str, str]:
    """Allow-listed variables of the environment that the export holds, and nothing else of it."""
    found: dict[str, str] = {}
    for table in ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE"):
        for column in ("value", "valueId"):
            if not tables.has(table, column):
                continue
            text = column if column == "value" else f"(SELECT value FROM {STRINGS} WHERE id = valueId)"
            for (value,) in db.execute(f"SELECT {text} FROM {table} WHERE {text} LIKE '%=%'"):
                found |= variables_in(str(value))
    return {name: found[name] for name in ALLOWED_VARIABLES if name in found}


def variables_in(text: str) -> dict[str, str]:
    """The allow-listed variables in a text such as `A=1;B=2`, whatever separates them."""
    found: dict[str, str] = {}
    for name in ALLOWED_VARIABLES:
        match = re.search(rf"(?<![\w-]){name}=(?P<value>{_VALUE.pattern})", text)
        if match:
            found[name] = match["value"]
    return found
