"""Whether anything of one recipe leaks into the next: one sweep over all recipes against fresh processes with one each.

    python benchmarks/isolation.py --preset seed           (on a GPU)
    python benchmarks/isolation.py --preset large --recipes fp8_delayed,fp8_block
    python benchmarks/isolation.py --preset tiny --batch 1 --sequence 16         (on a CPU: fp32 and bf16)

Each side runs in a process of its own: a sweep over all recipes, the same with another order of them, and for each
recipe a sweep over it and the baseline alone. All train the same MiniGPT. A recipe's step agrees if the 95% intervals
of both sides allow it,

    |a - b| <= max(sqrt(ha^2 + hb^2), margin x b)

a, b: medians of the step in the sweep and alone [ms]; ha, hb: their half-widths; margin: 1%, what neighbouring runs of
one thing differ by on a GPU whose clock nobody has fixed. Peak memory agrees within half a per cent: the allocator's
rounding depends on what was there before, what is held does not. Prints a table; exit code 0 if all agree, 1 if
something does not, 2 if a side gave no result.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MARGIN = 0.01
"""Of a step's time [1]."""

MEMORY = 0.005
"""Of peak memory [1]."""


@dataclass(frozen=True)
class Side:
    """What one process measured of one recipe."""

    step_ms: float
    half_ms: float
    peak: float | None
    """Bytes; None on a CPU."""


def measured(options: argparse.Namespace, recipes: list[str] | None, seed: int, folder: str) -> dict[str, Side]:
    """Run one side in a fresh process: recipe to what it measured, the baseline first; None for all that can run.

    Raises:
        RuntimeError: the process ended without a result; the text is the end of what it said.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--child", folder, "--seed", str(seed)]
    command += ["--preset", options.preset, *(["--recipes", ",".join(recipes)] if recipes else [])]
    for name in ("rounds", "settle", "timed", "batch", "sequence"):
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
        traced_steps=0,
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
            found[part.name] = [part.step_ms.value, part.step_ms.half_width or 0.0, peaks.get(part.name)]
    print(json.dumps(found), flush=True)


def row(what: str, name: str, inside: Side, alone: Side) -> tuple[str, bool]:
    """(a line of the table, whether both agree)."""
    difference, allowed = inside.step_ms - alone.step_ms, math.hypot(inside.half_ms, alone.half_ms)
    same = abs(difference) <= max(allowed, MARGIN * alone.step_ms)
    text = (
        f"{name:12} {what:14} {inside.step_ms:9.2f} ±{inside.half_ms:5.2f} {alone.step_ms:9.2f} ±{alone.half_ms:5.2f} "
        f"{difference / alone.step_ms:+8.2%}  {'same' if same else 'DIFFERS'}"
    )
    if inside.peak is None or alone.peak is None:
        return f"{text}   memory not counted here", same
    more = inside.peak / alone.peak - 1
    held = abs(more) <= MEMORY
    return f"{text}   {inside.peak / 1e9:7.3f} {alone.peak / 1e9:7.3f} {more:+8.3%}  {'same' if held else 'DIFFERS'}", (
        same and held
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="seed", help="of MiniGPT; %(default)s")
    parser.add_argument("--recipes", help="with commas, without the baseline; all that can run here")
    parser.add_argument("--batch", type=int, help="instead of the preset's")
    parser.add_argument("--sequence", type=int, help="instead of the preset's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=int, default=3)
    parser.add_argument("--timed", type=int, default=5)
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
            sides: dict[str, Any] = {"one order": measured(options, asked, options.seed, folder)}
            recipes = list(sides["one order"])[1:]
            sides["another order"] = measured(options, recipes, options.seed + 1, folder)
            alone = {name: measured(options, [name], options.seed, folder) for name in recipes}
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{options.preset}: {options.rounds} rounds x ({options.settle} settled + {options.timed} timed) steps a side"
    )
    print(
        f"{'recipe':12} {'sweep in':14} {'in the sweep, ms':>16} {'alone, ms':>16} {'':>8}{'':12}peak GB: sweep, alone"
    )
    agree = True
    for name in recipes:
        for what, inside in sides.items():
            if name not in inside or name not in alone[name]:
                print(f"{name:12} {what:14} was not measured on both sides", file=sys.stderr)
                return 2
            text, same = row(what, name, inside[name], alone[name][name])
            agree &= same
            print(text)
    baselines = [name for name in sides["one order"] if name not in recipes]
    for name in baselines:
        for recipe in recipes:
            text, same = row(f"beside {recipe}", name, sides["one order"][name], alone[recipe][name])
            agree &= same
            print(text)
        text, same = row("both orders", name, sides["one order"][name], sides["another order"][name])
        agree &= same
        print(text)
    print(f"{'all agree' if agree else 'something does not agree'}, {time.monotonic() - began:.0f} s")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
