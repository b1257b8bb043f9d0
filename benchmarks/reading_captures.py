"""How long it takes to read and analyse a large capture, and how much memory.

    python benchmarks/reading_captures.py nsight                   (a million kernels in an Nsight Systems export)
    python benchmarks/reading_captures.py trace                    (200,000 kernels in a torch.profiler trace)
    python benchmarks/reading_captures.py nsight --kernels 100000 --keep /tmp/capture.sqlite

The captures are the small real ones of `tests/data/h200`, repeated in time with new correlation ids, so that every
repetition has the real one's kernels, launches, ranges and distances. `lowprec nsys` is then run on the file, in
processes of its own: first openings with an empty cache, then second looks. Prints each one's wall time and peak
resident memory (of the largest process), and the best of each; timings belong here and not in a test.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
H200 = ROOT / "tests" / "data" / "h200"
NSIGHT = H200 / "nsys_transformer_layer_fp8_delayed.sqlite.gz"
TRACE = H200 / "torch_trace_2048x12_fp8_current.json.gz"

SHIFTED = ("start", "end")
"""Columns of an export that are times in nanoseconds."""


def repeat_export(target: Path, kernels: int) -> None:
    """Write an export of at least `kernels` kernels: the real one, again and again."""
    target.write_bytes(gzip.decompress(NSIGHT.read_bytes()))
    with sqlite3.connect(target) as db:
        (each,) = db.execute("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
        (ids,) = db.execute("SELECT MAX(correlationId) + 1 FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()
        (length,) = db.execute("SELECT duration FROM ANALYSIS_DETAILS").fetchone()
        times = math.ceil(kernels / each)
        db.execute("PRAGMA journal_mode = OFF")
        for table in ("KERNEL", "RUNTIME", "MEMSET", "SYNCHRONIZATION"):
            _repeat_rows(db, f"CUPTI_ACTIVITY_KIND_{table}", times, length, ids)
        _repeat_rows(db, "NVTX_EVENTS", times, length, ids, "eventType = 59")
        db.execute("UPDATE ANALYSIS_DETAILS SET duration = duration * ?", (times,))


def _repeat_rows(db: sqlite3.Connection, table: str, times: int, length: int, ids: int, which: str = "1") -> None:
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    rows = db.execute(f"SELECT * FROM {table} WHERE {which} ORDER BY start").fetchall()
    moves = [length if name in SHIFTED else ids if name == "correlationId" else 0 for name in columns]

    def repeated() -> Iterator[list[Any]]:
        for turn in range(1, times):
            for row in rows:
                yield [
                    value + turn * move if move and value is not None else value
                    for value, move in zip(row, moves, strict=True)
                ]

    marks = ", ".join("?" * len(columns))
    db.executemany(f"INSERT INTO {table} VALUES ({marks})", repeated())


def repeat_trace(target: Path, kernels: int) -> None:
    """Write a torch.profiler trace of at least `kernels` kernels, printed as Kineto prints it."""
    events = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
    each = sum(event.get("cat") == "kernel" for event in events)
    ids = 1 + max(event["args"]["correlation"] for event in events if "correlation" in event.get("args", {}))
    first = min(event["ts"] for event in events)
    length = max(event["ts"] + event["dur"] for event in events) - first
    with target.open("w", encoding="utf-8") as out:
        out.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA H200",')
        out.write(' "totalGlobalMem": 150109880320,\n      "computeMajor": 9, "computeMinor": 0\n    }\n  ],\n')
        out.write('  "cuda_runtime_version": 13000,\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": 0,\n')
        out.write('  "traceEvents": [')
        separator = ""
        for turn in range(math.ceil(kernels / each)):
            for number, event in enumerate(events):
                args = dict(event.get("args", {}))
                if "correlation" in args:
                    args["correlation"] += turn * ids
                if event["cat"] == "cpu_op":
                    args |= {"External id": number, "Record function id": 0, "Ev Idx": number}
                elif event["cat"] == "kernel":
                    args |= {"External id": number, "device": 0, "context": 1, "grid": [132, 1, 1]}
                pairs = [f'"{key}": {json.dumps(value)}' for key, value in args.items()]
                out.write(
                    f'{separator}\n  {{\n    "ph": "X", "cat": "{event["cat"]}", "name": {json.dumps(event["name"])}, '
                    f'"pid": {0 if event["cat"].startswith("gpu") or event["cat"] == "kernel" else 401}, '
                    f'"tid": {event["tid"]},\n    "ts": {event["ts"] + turn * length:.3f}, "dur": {event["dur"]:.3f}'
                )
                out.write(',\n    "args": {\n      ' + ", ".join(pairs) + "\n    }\n  }" if pairs else "\n  }")
                separator = ","
        out.write('\n  ],\n  "traceName": "trace.json"\n}\n')


def run(file: Path, folder: Path, cache: Path) -> tuple[float, float, int]:
    """(seconds, peak MB of the largest process, exit code) of one `lowprec nsys`."""
    command = [sys.executable, "-m", "lowprec_callback.cli", "nsys", str(file), "--output-dir", str(folder)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    with tempfile.NamedTemporaryFile("w+") as text:
        begin = time.perf_counter()
        timed = ["/usr/bin/time", "-v", *command] if Path("/usr/bin/time").exists() else command
        done = subprocess.run(timed, env=environment, stdout=text, stderr=subprocess.PIPE, text=True, check=False)
        seconds = time.perf_counter() - begin
    found = re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)
    peak = int(found[1]) / 1000 if found else math.nan
    if done.returncode not in (0, 1):
        sys.exit(f"lowprec nsys failed with {done.returncode}:\n{done.stderr}")
    return seconds, peak, done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nsight", "trace"))
    parser.add_argument("--kernels", type=int, help="default: 1,000,000 for nsight, 200,000 for trace")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="where to make the capture, and to leave it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        suffix = ".sqlite" if args.what == "nsight" else ".json"
        file = args.keep or Path(scratch, f"capture{suffix}")
        if not file.exists():
            if args.what == "nsight":
                repeat_export(file, args.kernels or 1_000_000)
            else:
                repeat_trace(file, args.kernels or 200_000)
        print(f"{file}: {file.stat().st_size / 1e6:.0f} MB")
        _describe(file, args.what)
        first, second = [], []
        for turn in range(args.turns):
            cache, folder = Path(scratch, f"cache{turn}"), Path(scratch, f"runs{turn}")
            first.append(run(file, folder, cache))
            second.append(run(file, folder, cache))
        for what, found in (("first opening", first), ("second look", second)):
            times = ", ".join(f"{seconds:.2f} s {peak:.0f} MB" for seconds, peak, _ in found)
            print(f"{what}: best {min(found)[0]:.2f} s, peak {max(peak for _, peak, _ in found):.0f} MB  ({times})")


def _describe(file: Path, what: str) -> None:
    if what == "trace":
        begin = time.perf_counter()
        with file.open(encoding="utf-8") as text:
            events = json.load(text)["traceEvents"]
        seconds = time.perf_counter() - begin
        kernels = sum(event["cat"] == "kernel" for event in events)
        print(f"{len(events):,} events, {kernels:,} kernels; json.load alone takes {seconds:.2f} s")
        return
    with sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True) as db:
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
            print(f"{table}: {db.execute(f'SELECT COUNT(*) FROM {table}').fetchone()[0]:,} rows")


if __name__ == "__main__":
    main()
