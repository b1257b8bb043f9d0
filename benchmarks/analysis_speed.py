"""How long the analysis of a large Recording takes, and how large its page becomes.

    python benchmarks/analysis_speed.py                      (24 layers, 4 recipes, 2 traced steps of 3,000 and 20,000)
    python benchmarks/analysis_speed.py --kernels 50000 --profile

The Recording is made up: the layers of CodonFM 5B with all their GEMMs, dispatches, library calls, scales and step
times, and traced steps of real kernel names (`tests/data/kernel_names.tsv`) with launches, phases and waits of the
host. Prints the best CPU time of several runs; timings belong here and not in a test.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lowprec_callback.analyze.summary import analyze  # noqa: E402
from lowprec_callback.recording import (  # noqa: E402
    ROLES,
    Fact,
    HostPhases,
    HostWaits,
    LibraryCall,
    LibraryLog,
    Recorder,
    Recording,
    Scales,
    Trace,
    read,
)
from lowprec_callback.report import Report, load_report  # noqa: E402
from lowprec_callback.show.console import as_text  # noqa: E402
from lowprec_callback.show.html import as_html  # noqa: E402
from tests.analyze.recordings import BF16, DELAYED, GEMM_NAMES, Kernel, gpu_facts, te_linears, trace  # noqa: E402

RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_block")
LAYERS = 24
MICRO_BATCH = 3_000
"""Kernels of a micro-batch: a step with more has several."""

GAP_US = 0.4
"""Between two kernels."""


def recording(kernels: int, layers: int = LAYERS) -> Recording:
    """A finished run of four recipes, with two traced steps of each of so many kernels."""
    speeds = {name: replace(DELAYED if name != "bf16" else BF16) for name in RECIPES}
    facts: list[Fact] = []
    for fact in gpu_facts(speeds=speeds, layers=layers, rounds=5):
        facts.append(_step(fact.recipe, fact.step, kernels, layers) if isinstance(fact, Trace) else fact)
    linears = te_linears(layers)
    more: list[Fact] = []
    for name in RECIPES:
        more += [Scales(name, lin.module, "fwd", ("input", "weight"), (1.0, 2.0), (3.0, 4.0), (3.0, 4.0), 1024)
                 for lin in linears if name == "fp8_delayed"]  # fmt: skip
        more += [
            LibraryCall(name, lin.module, role, lin.m, lin.k, lin.n, "cuBLASLt", "cublasLtMatmul", "R_8F_E4M3",
                        "R_8F_E4M3", "R_16BF", lin.m, lin.k, lin.n, 1)
            for lin in linears for role in ROLES
        ]  # fmt: skip
        calls = len(linears) * len(ROLES)
        more.append(LibraryLog(name, ("cuBLASLt",), calls, calls))
    return Recording.from_facts([*facts[:-1], *more, facts[-1]])


def _step(recipe: str, index: int, count: int, layers: int) -> Trace:
    """One traced step of micro-batches: each linear layer's GEMM beside the other work of its layer."""
    table = (ROOT / "tests" / "data" / "kernel_names.tsv").read_text(encoding="utf-8").splitlines()
    names = [line.split("\t")[0] for line in table[1:] if line and not line.startswith("#")]
    linears = te_linears(layers)
    gemms = [(lin, role) for lin in linears for role in ROLES]
    kernels: list[Kernel] = []
    for i in range(count):
        at = i % MICRO_BATCH
        lin, role = gemms[at * len(gemms) // MICRO_BATCH]
        phase = "forward" if at < MICRO_BATCH // 3 else "backward" if i < count * 9 // 10 else "optimizer"
        first = at == 0 or (at - 1) * len(gemms) // MICRO_BATCH != at * len(gemms) // MICRO_BATCH
        start = i * (20 + GAP_US)
        if first:
            name = GEMM_NAMES[recipe if lin.quantizable else "bf16"][role]
            kernels.append(Kernel(name, 20.0, lin.module, role, "te_gemm", phase, start=start))
        else:
            op = f"aten::op_{at % 37}"
            kernels.append(Kernel(names[at % len(names)], 20.0, lin.module, "", op, phase, 7 + i % 3, start=start))
    made = trace(recipe, kernels, count * (20 + GAP_US) / 1e3 + 5.0, index, expected=len(gemms))
    end = count * (20 + GAP_US)
    starts = tuple(end * (n + 1) / 60 for n in range(50))
    zeros = (0,) * len(starts)
    return replace(
        made,
        launch_us=tuple(max(start - 15.0 + 14.9 * math.sin(n), 0.0) for n, start in enumerate(made.start_us)),
        waits=HostWaits(("cudaStreamSynchronize",), zeros, starts, (30.0,) * len(starts), zeros, zeros, zeros),
        phases=HostPhases(("data", "forward"), (0.0, 100.0), (100.0, end / 3)),
        host_end_us=end - 500.0,
    )


def best(times: int, run: Callable[[], object]) -> float:
    """The least CPU time of several runs [s]: one core does it all, and other work on the machine changes it little."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return min(found)


def measure(kernels: int, times: int, profile: bool) -> None:
    """Print one line of times."""
    made = recording(kernels)
    if profile:
        watch = cProfile.Profile()
        watch.runcall(analyze, made)
        pstats.Stats(watch).sort_stats("cumulative").print_stats(30)
    report: Report = analyze(made)
    page = as_html(report)
    drawn = best(1, lambda: as_html(report))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.jsonl"
        with Recorder(path, "0") as recorder:
            recorder.add(*list(made)[1:])
        size = path.stat().st_size
        reading = best(times, lambda: read(path))
        report.save(Path(folder) / "report.json")
        saved = (Path(folder) / "report.json").stat().st_size
        loading = best(times, lambda: load_report(folder))
    analysed, console = best(times, lambda: analyze(made)), best(times, lambda: as_text(report))
    print(f"{kernels:,} kernels a step, {len(made):,} facts: {size / 1e6:.1f} MB read in {reading:.2f} s")
    print(f"  analysed in {analysed:.2f} s, report.json {saved / 1e6:.2f} MB loaded in {loading:.2f} s")
    print(f"  console in {console:.2f} s, report.html {len(page.encode()) / 1e6:.2f} MB in {drawn:.2f} s")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, action="append", help="kernels in a traced step (3,000 and 20,000)")
    parser.add_argument("--times", type=int, default=3, help="runs, of which the best counts")
    parser.add_argument("--profile", action="store_true", help="print where the analysis spends its time")
    args = parser.parse_args()
    for kernels in args.kernels or (3_000, 20_000):
        measure(kernels, args.times, args.profile)


if __name__ == "__main__":
    main()
