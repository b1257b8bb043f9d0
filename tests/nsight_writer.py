"""Writes small exports of Nsight Systems, with the tables and columns of three releases.

The column lists are those of real exports (schemas 3.11.1, 3.20.3 and 3.25.0), reduced to what the schema needs.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOMAIN = 1
TID = 0x3BA
AUTOGRAD = 0x3BB
PID = (1 << 48) | (77 << 24)
"""A globalPid above 2^53: no double holds it exactly when the thread's number is added."""

_KERNEL = "start end deviceId contextId {green} streamId correlationId globalPid demangledName shortName mangledName"
SCHEMAS = {
    "3.11.1": {
        "CUPTI_ACTIVITY_KIND_KERNEL": _KERNEL.format(green="") + " registersPerThread gridX graphNodeId",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
        "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId domainId "
        "uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText",
    },
    "3.20.3": {
        "CUPTI_ACTIVITY_KIND_KERNEL": _KERNEL.format(green="greenContextId") + " launchType gridX graphNodeId",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
        "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId domainId "
        "uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText binaryData",
    },
    # No payload columns and no mangled name: what is not written does not have to be there.
    "3.25.0": {
        "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId streamId correlationId globalPid demangledName shortName",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start end globalTid correlationId nameId",
        "NVTX_EVENTS": "start end eventType globalTid textId domainId text",
    },
}
SMALL = {
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId streamId correlationId globalPid bytes copyKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId streamId correlationId globalPid bytes",
    "TARGET_INFO_GPU": "id name smCount totalMemory computeMajor computeMinor",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name nameEnum value",
    "META_DATA_EXPORT": "name value",
    "DIAGNOSTIC_EVENT": "timestamp severity text",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end graphId",
}


@dataclass
class Export:
    """An export in the making. Times are nanoseconds."""

    schema: str = "3.20.3"
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)
    correlation: int = 100

    def __post_init__(self) -> None:
        self.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200", smCount=132, totalMemory=150109880320)
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2025.3.2.0")
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value=self.schema)
        self.add("NVTX_EVENTS", start=-5, eventType=75, text="lowprec", globalTid=PID | TID, domainId=DOMAIN)

    def add(self, table: str, **row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 10)

    def range(
        self,
        text: str,
        start: int,
        end: int | None,
        *,
        tid: int = TID,
        pid: int = PID,
        domain: int = 0,
        payload: int | None = None,
        registered: bool = False,
    ) -> None:
        name = {"textId": self.string(text)} if registered else {"text": text}
        self.add(
            "NVTX_EVENTS",
            start=start,
            end=end,
            eventType=59,
            globalTid=pid | tid,
            domainId=domain,
            uint64Value=payload,
            **name,
        )

    def ours(self, text: str, start: int, end: int | None, **more: Any) -> None:
        self.range(text, start, end, domain=DOMAIN, **more)

    def kernel(
        self,
        name: str,
        launch: int | None,
        start: int,
        length: int,
        *,
        tid: int = TID,
        pid: int = PID,
        stream: int = 7,
        device: int = 0,
        table: str = "KERNEL",
        call: str = "cudaLaunchKernel_v7000",
    ) -> None:
        """A kernel, and the call that launched it (`launch` None: not captured)."""
        self.correlation += 3
        if launch is not None:
            self.call(call, launch, tid=tid, pid=pid, correlation=self.correlation)
        named = {"demangledName": self.string(name), "shortName": self.string("kernel")} if table == "KERNEL" else {}
        self.add(
            f"CUPTI_ACTIVITY_KIND_{table}",
            start=start,
            end=start + length,
            deviceId=device,
            streamId=stream,
            correlationId=self.correlation,
            globalPid=pid,
            **named,
        )

    def call(self, name: str, start: int, *, tid: int = TID, pid: int = PID, correlation: int | None = None) -> None:
        if correlation is None:
            self.correlation += 3
            correlation = self.correlation
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=start + 10,
            globalTid=pid | tid,
            correlationId=correlation,
            nameId=self.string(name),
        )

    def write(self, path: Path, without: tuple[str, ...] = (), empty: tuple[str, ...] = ()) -> Path:
        """Write it. Tables exist only where they have rows, except those in `empty`; those in `without` do not."""
        columns = SCHEMAS[self.schema] | SMALL
        with sqlite3.connect(path) as db:
            if "StringIds" not in without:
                db.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
                db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, text) for text, n in self.strings.items()])
            for table in {*self.rows, *empty} - {*without}:
                names = columns[table].split()
                db.execute(_create(table, names))
                if table in empty:
                    continue
                marks = ", ".join("?" * len(names))
                # Columns of other releases are not there: what they would have held is lost.
                rows = [[row.get(name) for name in names] for row in self.rows[table]]
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        db.close()
        return path


def _create(table: str, names: list[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"CREATE TABLE {table} ({quoted})"


FP8_FORWARD = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_bias_TNT"
FP8_BACKWARD = "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT"
BF16 = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
CAST = "cast_transpose_optimized_kernel(const __nv_bfloat16 *, const float *, __nv_fp8_e4m3 *)"
ADAM = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>>(T1)"

US = 1000
STEP = 1000 * US


def training(
    export: Export, recipe: str, steps: int, begin: int = 0, *, backward: bool = True, slow: int = 0, number: int = 0
) -> int:
    """Steps of one layer `mlp.fc1` with our ranges, each a millisecond (and `slow` ns) long; returns where they end."""
    low = recipe.startswith("fp8")
    for index in range(steps):
        t = begin + index * (STEP + slow)
        export.ours(f"{recipe} step", t, t + STEP + slow, payload=number + index, registered=True)
        export.ours("forward", t + 10 * US, t + 300 * US)
        export.ours("module|forward|mlp.fc1", t + 20 * US, t + 200 * US)
        if low:
            export.kernel(CAST, t + 25 * US, t + 30 * US, 20 * US)
        export.ours("gemm|fprop|mlp.fc1", t + 50 * US, t + 100 * US)
        export.kernel(FP8_FORWARD if low else BF16, t + 60 * US, t + 70 * US, 100 * US)
        if backward:
            export.ours("backward", t + 300 * US, t + 700 * US)
            for role, at in (("dgrad", 350), ("wgrad", 500)):
                export.ours(f"gemm|{role}|mlp.fc1", t + at * US, t + (at + 90) * US, tid=AUTOGRAD)
                name = FP8_BACKWARD if low else BF16
                export.kernel(name, t + (at + 10) * US, t + (at + 20) * US, 100 * US, tid=AUTOGRAD)
        export.ours("optimizer", t + 700 * US, t + 900 * US)
        export.kernel(ADAM, t + 710 * US, t + 720 * US, 50 * US + index)
    return begin + steps * (STEP + slow)
