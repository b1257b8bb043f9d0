"""What the callback costs the steps that it times: a loop with it against the same loop without.

    python benchmarks/watching_cost.py --preset large          (on a GPU)
    python benchmarks/watching_cost.py --preset tiny           (on a CPU)
    python benchmarks/watching_cost.py --preset tiny --batch 1 --sequence 16 --threads 1 --turns 40

What watching costs is the same number of milliseconds however long the step is, and the noise of a shared CPU is a
share of the step. So the last line, with a step an eighth as long, bounds that number much more tightly.

Both sides train the same MiniGPT on the same batches in the same precision and take turns (bare, watched, watched,
bare, ...), so that drift hits both alike. The bare side has only a clock of its own: one CUDA event (or one reading of
the monotonic clock) at each batch end. Prints both medians, their ratio, and the geometric mean of the
neighbouring pairs' ratios with its standard error; timings belong here and not in a test. The watched side's steps
are the sweep's own, before the fit's first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from examples.mini_gpt.data import sequences
from examples.mini_gpt.model import PRESETS, MiniGPT
from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.recording import StepTime
from lowprec_callback.sweep.plan import LEAD_STEPS


class BareClock(Callback):
    """Step times without anything of ours: events on a GPU, the monotonic clock on a CPU."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def times_ms(self, last: int) -> list[float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        else:
            times = [(b - a) * 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return times[-last:]


def fit(model: LightningModule, callback: Callback, steps: int, folder: str) -> None:
    config = model.config
    trainer = Trainer(
        max_steps=steps,
        callbacks=[callback],
        precision="bf16-true" if torch.cuda.is_available() else "32-true",
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, sequences(steps, config.batch, config.sequence, 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="large" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--turns", type=int, default=4, help="pairs of one bare and one watched fit, 2 or more")
    parser.add_argument("--timed", type=int, default=12, help="timed steps a turn")
    parser.add_argument("--batch", type=int, help="instead of the preset's")
    parser.add_argument("--sequence", type=int, help="instead of the preset's")
    parser.add_argument("--threads", type=int, help="of PyTorch on the CPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = {name: size for name in ("batch", "sequence") if (size := getattr(options, name))}
    config = replace(PRESETS[options.preset], **sizes)
    warnings.simplefilter("ignore")

    on_gpu = torch.cuda.is_available()
    baseline = "bf16" if on_gpu else "fp32"
    device = "cuda" if on_gpu else "cpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    settle = 3
    steps = LEAD_STEPS + settle + options.timed
    bare: list[list[float]] = []
    watched: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 * options.turns):
            # A new model each turn: one that has learned all there is has denormal gradients, which CPUs are slow at.
            seed_everything(0, verbose=False)
            model = MiniGPT(config, dtype=dtype, device=device)
            if turn % 4 in (0, 3):
                clock = BareClock()
                fit(model, clock, steps, folder)
                bare.append(clock.times_ms(options.timed))
            else:
                profiler = LowPrecisionProfiler(
                    recipes=baseline,
                    baseline=baseline,
                    rounds=1,
                    settle_steps=settle,
                    timed_steps=options.timed,
                    traced_steps=0,
                    guard_steps=0,
                    gemm_benchmark=False,
                    stop_after=True,
                    output_dir=folder,
                    progress=False,
                )
                fit(model, profiler, steps, folder)
                assert profiler.session is not None
                watched.append([fact.ms for fact in profiler.session.recorder.snapshot().of(StepTime)])
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    all_bare, all_watched = list(itertools.chain(*bare)), list(itertools.chain(*watched))
    a, b = statistics.median(all_bare), statistics.median(all_watched)
    print(f"{options.preset} on {where}: {len(all_bare)} bare steps, median {a:.3f} ms")
    print(f"{len(all_watched)} watched steps, median {b:.3f} ms; watched / bare = {b / a:.4f}")
    logs = [math.log(statistics.median(w) / statistics.median(p)) for p, w in zip(bare, watched, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    print(f"geometric mean of the {len(logs)} neighbouring pairs {math.exp(mean):.4f}, standard error {error:.4f}:")
    print(f"watching costs {math.expm1(mean) * a:.3f} ms a step, standard error {error * a:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
