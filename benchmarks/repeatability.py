"""Whether two sweeps of one model say the same, and whether a planted slowdown is seen. Needs a GPU with TE.

    python benchmarks/repeatability.py --output-dir runs/repeatability
    python benchmarks/repeatability.py --preset seed --slower 0.05

Three sweeps in one process: A, the same again, and with every optimizer step made longer by a share of what it took
in A (a kernel that spins). Prints what `lowprec compare` says of A against each of the others, and whether every
speedup of the two equal ones agrees within the stated intervals; exit code 1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from lightning import Trainer, seed_everything

from examples.mini_gpt.data import sequences
from examples.mini_gpt.model import PRESETS, MiniGPT
from lowprec_callback import LowPrecisionProfiler, Report, compare
from lowprec_callback.measure.gpu_clock import event


def sweep(options: argparse.Namespace, name: str, longer: dict[str, float] | None = None) -> Report:
    """One sweep over a fresh model; `longer`: milliseconds that each recipe's step is made longer by."""
    seed_everything(0, verbose=False)
    config = PRESETS[options.preset]
    model = MiniGPT(config, dtype=torch.bfloat16, device="cuda", decay_steps=2000)
    model.profile_name = f"MiniGPT {options.preset}"
    whole = name == "A"
    callback = LowPrecisionProfiler(
        rounds=options.rounds,
        step_precision=options.precision,
        guard_steps=4 if whole else 0,
        gemm_benchmark=whole,
        traced_steps=2 if whole else 0,
        stop_after=True,
        output_dir=str(options.output_dir / name),
        progress=False,
    )
    if longer is not None:
        _spin(model, callback, longer)
    trainer = Trainer(
        max_steps=4000,
        accelerator="cuda",
        devices=1,
        precision="bf16-true",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, sequences(4000, config.batch, config.sequence, 0))
    assert callback.report is not None
    return callback.report


def _spin(model: MiniGPT, callback: LowPrecisionProfiler, longer: dict[str, float]) -> None:
    original = model.training_step
    cycles_per_ms = _cycles_per_ms()

    def training_step(*arguments: Any) -> Any:
        card = callback.session.sweep.card if callback.session is not None else None
        if card is not None:
            torch.cuda._sleep(int(longer.get(card.name, 0.0) * cycles_per_ms))
        return original(*arguments)

    model.__dict__["training_step"] = training_step


def _cycles_per_ms() -> float:
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    first = event()
    torch.cuda._sleep(cycles)
    last = event()
    last.synchronize()
    return float(cycles / first.elapsed_time(last))


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="A/A and a planted slowdown")
    parser.add_argument("--preset", choices=PRESETS, default="large")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--precision", type=float, default=0.005, help="of a step, at which rounds are enough")
    parser.add_argument("--margin", type=float, default=0.02, help="that still counts as the same")
    parser.add_argument("--slower", type=float, default=0.03, help="the planted slowdown")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/repeatability"))
    options = parser.parse_args()
    first = sweep(options, "A")
    again = sweep(options, "again")
    steps = {part.name: part.step_ms.value for part in first.recipes}
    longer = {name: options.slower * ms for name, ms in steps.items() if ms is not None}
    planted = sweep(options, "planted", longer)
    failed = False
    for name, other, wanted in (("again", again, "same"), ("planted", planted, "slower")):
        for change in compare(first, other, options.margin).changes:
            if change.metric != "step":
                continue
            ratio = f"{(change.b.value or 0.0) / (change.a.value or 1.0):.4f}"
            right = change.word == wanted
            failed = failed or not right
            print(f"{name:8} {change.recipe:12} step {change.a.value:.2f} -> {change.b.value:.2f} ms ({ratio}): "
                  f"{change.word}{'' if right else f', not {wanted}'}")  # fmt: skip
    for part in first.recipes:
        one, two = part.speedups, again.recipe(part.name).speedups
        if part.baseline or one is None or two is None or one.step.low is None or two.step.low is None:
            continue
        agree = one.step.low <= (two.step.high or 0.0) and two.step.low <= (one.step.high or 0.0)
        failed = failed or not agree
        print(f"speedup  {part.name:12} {one.step.value:.4f} [{one.step.low:.4f}, {one.step.high:.4f}] and "
              f"{two.step.value:.4f} [{two.step.low:.4f}, {two.step.high:.4f}]: "
              f"{'agree' if agree else 'do not agree'}")  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
