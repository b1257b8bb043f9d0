"""Whether anything of one recipe leaks into the next: one sweep over all recipes against fresh processes with one each.

    python benchmarks/isolation.py --preset seed           (on a GPU)
    python benchmarks/isolation.py --preset large --recipes fp8_delayed,fp8_block
    python benchmarks/isolation.py --preset tiny --batch 1 --sequence 16         (on a CPU: fp32 and bf16)

Each side runs in a process of its own: a sweep over all recipes, the same with another order of them, and for each
recipe a sweep over it and the baseline alone. All train the same MiniGPT. Compared are the step's time, the time in
which the GPU was busy in a traced step (which the host's pace does not change), and the peak of memory. Two times a
(in the sweep) and b (alone) are the `same` if

    |a - b| <= max(sqrt(ha^2 + hb^2), 1% of b)                                                      [ms]

with ha, hb: half-widths of the step's 95% intervals; the busy time of few traced steps has none. They are `alike` if
fresh processes that measure one and the same thing, the baseline, differ as much by themselves:

    |a - b| <= t sqrt(2) s b

with s: standard deviation of the baseline over the P processes, divided by its mean [1]; t: 97.5% quantile of Student's
t with P - 1 degrees of freedom. An interval knows the scatter within its process only: where the host's pace decides,
a process may be faster than the next from beginning to end. The busy time is judged where it is known better than the
step: in a step that the host decides it is known to 1%, while in one that draws all the power that the GPU may take, a
few traced steps have whatever clock they happen to have, and the step's time tells more. Peak memory is the same within
half a per cent: the allocator's rounding depends on what was there before, what is held does not. Prints a table; exit
code 0 if nothing differs, 1 if something does, 2 if a side gave no result.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lowprec_callback.analyze.statistics import t_quantile

MARGIN = 0.01
"""Of a time [1]: what neighbouring runs of one thing differ by on a GPU whose clock nobody has fixed."""

MEMORY = 0.005
"""Of peak memory [1]."""


@dataclass(frozen=True)
class Side:
    """What one process measured of one recipe."""

    step_ms: float
    half_ms: float
    busy_ms: float | None
    """In kernels, per traced step; None on a CPU, where tracing stretches what it traces."""
    peak: float | None
    """Bytes; None on a CPU."""


Sides = dict[str, Side]
"""Recipe to what one process measured of it."""


def measured(options: argparse.Namespace, recipes: list[str] | None, seed: int, folder: str) -> Sides:
    """Run one side in a fresh process: recipe to what it measured, the baseline first; None for all that can run.

    Raises:
        RuntimeError: the process ended without a result; the text is the end of what it said.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--child", folder, "--seed", str(seed)]
    command += ["--preset", options.preset, *(["--recipes", ",".join(recipes)] if recipes else [])]
    for name in ("rounds", "settle", "timed", "traced", "batch", "sequence"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join((done.stderr or done.stdout).strip().splitlines()[-8:]))
    return {name: Side(*values) for name, values in json.loads(done.stdout.strip().splitlines()[-1]).items()}


def child(options: argparse.Namespace) -> None:
    """One fit with one sweep; the last line on standard output is the result."""
    import torch
    from lightning import Trainer, seed_everything

    from examples.mini_gpt.data import sequences
    from examples.mini_gpt.model import PRESETS, MiniGPT
    from lowprec_callback import LowPrecisionProfiler
    from lowprec_callback.recording import Memory

    warnings.simplefilter("ignore")
    seed_everything(0, verbose=False)
    sizes = {name: size for name in ("batch", "sequence") if (size := getattr(options, name))}
    on_gpu, config = torch.cuda.is_available(), replace(PRESETS[options.preset], **sizes)
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    profiler = LowPrecisionProfiler(
        recipes=options.recipes,
        rounds=options.rounds,
        settle_steps=options.settle,
        timed_steps=options.timed,
        traced_steps=options.traced,
        guard_steps=0,
        max_rounds=0,
        gemm_benchmark=False,
        stop_after=True,
        seed=options.seed,
        output_dir=options.child,
        progress=False,
    )
    trainer = Trainer(
        max_steps=1000,
        callbacks=[profiler],
        precision="bf16-true" if on_gpu else "32-true",
        accelerator="cuda" if on_gpu else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.child,
    )
    trainer.fit(MiniGPT(config, dtype=dtype, device=device), sequences(1000, config.batch, config.sequence, 0))
    assert profiler.session is not None
    if profiler.report is None:
        raise RuntimeError(f"no report: {profiler.why_not}")
    peaks: dict[str, int] = {}
    for fact in profiler.session.recorder.snapshot().of(Memory):
        if fact.phase == "step":
            peaks[fact.recipe] = max(fact.peak, peaks.get(fact.recipe, 0))
    found: dict[str, list[float | None]] = {}
    for part in profiler.report.recipes:
        if part.step_ms.value is not None:
            busy = part.ledger.busy.value if part.ledger is not None else None
            step = [part.step_ms.value, part.step_ms.half_width or 0.0]
            found[part.name] = [*step, busy if on_gpu else None, peaks.get(part.name)]
    print(json.dumps(found), flush=True)


def spread(values: Sequence[float]) -> float:
    """The difference of two processes that measure the same, as a share of it: t sqrt(2) s [1]."""
    s = statistics.stdev(values) / statistics.fmean(values)
    return t_quantile(len(values) - 1) * math.sqrt(2) * s


def word(a: float, b: float, allowed: float, processes: float) -> str:
    """`same`, `alike` or `DIFFERS`; `allowed` in the unit of a and b, `processes` a share of b."""
    difference = abs(a - b)
    if difference <= max(allowed, MARGIN * b):
        return "same"
    return "alike" if difference <= processes * b else "DIFFERS"


def cells(a: Side, b: Side, step_spread: float, busy_spread: float | None) -> tuple[list[str], bool]:
    """(the table's cells about two sides, whether nothing differs)."""
    known = math.hypot(a.half_ms, b.half_ms)
    words = [word(a.step_ms, b.step_ms, known, step_spread)]
    step = f"{a.step_ms:.2f} ±{a.half_ms:.2f}", f"{b.step_ms:.2f} ±{b.half_ms:.2f}", f"{a.step_ms / b.step_ms - 1:+.1%}"
    busy = memory = ("not counted here", "", "", "")
    if a.busy_ms is not None and b.busy_ms is not None and busy_spread is not None:
        sharper = max(MARGIN, busy_spread) < known / b.step_ms
        words += [word(a.busy_ms, b.busy_ms, 0.0, busy_spread)] if sharper else []
        told = words[-1] if sharper else "(step)"
        busy = f"{a.busy_ms:.2f}", f"{b.busy_ms:.2f}", f"{a.busy_ms / b.busy_ms - 1:+.1%}", told
    if a.peak is not None and b.peak is not None:
        words.append("same" if abs(a.peak / b.peak - 1) <= MEMORY else "DIFFERS")
        memory = f"{a.peak / 1e9:.3f}", f"{b.peak / 1e9:.3f}", f"{a.peak / b.peak - 1:+.2%}", words[-1]
    return [*step, words[0], *busy, *memory], "DIFFERS" not in words


def table(sweeps: dict[str, Sides], alone: dict[str, Sides]) -> bool:
    """Print what agrees and what does not; whether nothing differs.

    Raises:
        KeyError: a recipe has no step time on one of the sides.
    """
    baseline = next(iter(sweeps["one order"]))
    same = [side[baseline] for side in (*sweeps.values(), *alone.values())]
    steps = spread([side.step_ms for side in same])
    counted = [side.busy_ms for side in same if side.busy_ms is not None]
    busy = spread(counted) if len(counted) == len(same) else None
    pairs = [(name, what, sweep[name], alone[name][name]) for name in alone for what, sweep in sweeps.items()]
    first, second = sweeps.values()
    pairs += [(baseline, f"beside {name}", first[baseline], side[baseline]) for name, side in alone.items()]
    pairs += [(baseline, "both orders", first[baseline], second[baseline])]
    head = ["recipe", "sweep in", "step ms", "alone", "", "", "busy ms", "alone", "", "", "peak GB", "alone", "", ""]
    lines, agree = [head], True
    for name, what, a, b in pairs:
        told, fine = cells(a, b, steps, busy)
        lines.append([name, what, *told])
        agree &= fine
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    more = "" if busy is None else f", busy times by up to {busy:.1%}; (step): that is known better"
    print(f"{len(same)} processes that measure {baseline} differ in step by up to {steps:.1%}{more} (95%)")
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="seed", help="of MiniGPT; %(default)s")
    parser.add_argument("--recipes", help="with commas, without the baseline; all that can run here")
    parser.add_argument("--batch", type=int, help="instead of the preset's")
    parser.add_argument("--sequence", type=int, help="instead of the preset's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=int, default=3)
    parser.add_argument("--timed", type=int, default=5)
    parser.add_argument("--traced", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first order; the second is of the next seed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    began = time.monotonic()
    try:
        asked = options.recipes.split(",") if options.recipes else None
        with tempfile.TemporaryDirectory() as folder:
            sides: dict[str, Sides] = {"one order": measured(options, asked, options.seed, folder)}
            recipes = list(sides["one order"])[1:]
            sides["another order"] = measured(options, recipes, options.seed + 1, folder)
            alone = {name: measured(options, [name], options.seed, folder) for name in recipes}
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    plan = f"{options.settle} settled + {options.timed} timed"
    print(f"{options.preset}: {options.rounds} rounds x ({plan}) steps and {options.traced} traced a side")
    try:
        agree = table(sides, alone)
    except KeyError as error:
        print(f"{error} was not measured on both sides", file=sys.stderr)
        return 2
    print(f"{'nothing differs' if agree else 'something differs'}, {time.monotonic() - began:.0f} s")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
