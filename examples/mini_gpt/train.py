"""Profile low-precision recipes on MiniGPT while it learns arithmetic sequences.

    python -m examples.mini_gpt.train --preset tiny
    python -m examples.mini_gpt.train --preset large --recipes fp8_delayed,fp8_block --profile-only
    python -m examples.mini_gpt.train --recipe bf16 --no-profile --checkpoint runs/mini_gpt.pt

Parameters are BF16 on a GPU and FP32 on a CPU (`--precision`).
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run by its path: then Python looks beside this file instead of in the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from lightning import Trainer, seed_everything

from examples.mini_gpt import precision
from examples.mini_gpt.data import VOCABULARY, sequences
from examples.mini_gpt.model import PRESETS, MiniGPT
from lowprec_callback.recipes import RecipeError
from lowprec_callback.sweep.session import ProfilerError

if TYPE_CHECKING:
    from lowprec_callback import LowPrecisionProfiler

PLAN = ("rounds", "settle_steps", "timed_steps", "traced_steps", "guard_steps")
"""Arguments of LowPrecisionProfiler that pass through; where one is not given, its own default holds."""


def parser() -> argparse.ArgumentParser:
    """The command line. What is not given and depends on other things is None."""
    cuda = torch.cuda.is_available()
    p = argparse.ArgumentParser(
        prog="train.py", description="Profile low-precision recipes on MiniGPT while it learns arithmetic."
    )
    say = {"preset": "seed" if cuda else "tiny", "precision": "bf16-true" if cuda else "32-true"}
    p.add_argument("--preset", choices=PRESETS, default=say["preset"], help="sizes; here %(default)s")
    p.add_argument(
        "--steps",
        type=_positive,
        metavar="N",
        help="optimizer steps of training, after those of the profile; the preset's own",
    )
    p.add_argument("--lr", type=float, help="AdamW's learning rate; the preset's own")
    p.add_argument("--seed", type=int, default=0, help="of weights, data and order of recipes; %(default)s")
    p.add_argument(
        "--precision",
        choices=("32-true", "bf16-true", "bf16-mixed"),
        default=say["precision"],
        help="Lightning's; -true is the parameters' dtype too; here %(default)s",
    )
    p.add_argument("--checkpoint", type=Path, help="write the trained model here, for generate.py")

    profile = p.add_argument_group("profile")
    how_much = profile.add_mutually_exclusive_group()
    how_much.add_argument("--no-profile", action="store_true", help="train only")
    how_much.add_argument("--profile-only", action="store_true", help="stop after the profile, which one step follows")
    profile.add_argument(
        "--recipes", type=_names, metavar="NAMES", help="to compare, with commas; all that can run here"
    )
    profile.add_argument("--output-dir", default="runs", help="the run folder is made in it; %(default)s")
    for name in PLAN:
        profile.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="see LowPrecisionProfiler")

    recipe = p.add_argument_group("recipe")
    recipe.add_argument("--recipe", help="train in it (after the profile, if any); what --precision says")
    recipe.add_argument("--quantized-init", metavar="RECIPE", help="store TE's weights in its format only")
    recipe.add_argument("--fp8-format", choices=("HYBRID", "E4M3"), help="of fp8_delayed and fp8_current")
    recipe.add_argument("--amax-history-len", type=_positive, metavar="N", help="of fp8_delayed, in steps")
    return p


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return number


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def recipe_arguments(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Recipe name to those of Transformer Engine's arguments that the command line sets."""
    arguments: dict[str, dict[str, Any]] = {}
    if options.fp8_format is not None:
        for name in ("fp8_delayed", "fp8_current"):
            arguments[name] = {"fp8_format": options.fp8_format}
    if options.amax_history_len is not None:
        arguments.setdefault("fp8_delayed", {})["amax_history_len"] = options.amax_history_len
    return arguments


class NoProfileError(Exception):
    """There was to be a profile and nothing else, and there is none; the callback has said why."""


def profiler(options: argparse.Namespace) -> LowPrecisionProfiler:
    """The callback that this example is about."""
    from lowprec_callback import LowPrecisionProfiler

    plan = {name: getattr(options, name) for name in PLAN if getattr(options, name) is not None}
    return LowPrecisionProfiler(
        recipes=options.recipes,
        continue_with=options.recipe,
        stop_after=options.profile_only,
        output_dir=options.output_dir,
        seed=options.seed,
        recipe_arguments=recipe_arguments(options),
        **plan,
    )


def build(options: argparse.Namespace) -> MiniGPT:
    """The model that the command line asks for, on the GPU if there is one."""
    arguments = recipe_arguments(options)
    model = MiniGPT(
        PRESETS[options.preset],
        dtype=torch.bfloat16 if options.precision == "bf16-true" else torch.float32,
        device="cuda" if torch.cuda.is_available() else "cpu",
        quantized=options.quantized_init,
        recipe_arguments=arguments.get(options.quantized_init),
        learning_rate=options.lr,
        decay_steps=options.steps or PRESETS[options.preset].steps,
    )
    model.profile_name = f"MiniGPT {options.preset}"
    if options.no_profile and options.recipe is not None:
        model.region = precision.region(options.recipe, model, arguments.get(options.recipe))
    return model


def train(options: argparse.Namespace) -> MiniGPT:
    """Build, fit, save; says in a line each what runs and what was learned."""
    # Sequences come from a table in memory: worker processes would only delay them.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")  # Lightning's own use of torch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(options.seed, workers=True, verbose=False)
    model = build(options)
    config, steps = model.config, options.steps or model.config.steps
    kind = "Transformer Engine's" if model.block_kind == "transformer_engine" else "plain PyTorch"
    why = f" ({precision.why_plain()})" if precision.why_plain() else ""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"MiniGPT {options.preset}: {parameters / 1e6:,.1f} million parameters, {kind} blocks{why}, "
        f"{options.precision}; {steps} steps of {config.batch} x {config.sequence} tokens",
        flush=True,
    )
    callback = None if options.no_profile else profiler(options)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cuda" if model.head.weight.is_cuda else "cpu",
        devices=1,
        precision=options.precision,
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,  # it reads the loss, and so waits for the GPU, at every step that it shows
        enable_model_summary=False,
    )
    began = time.monotonic()
    trainer.fit(model, sequences(steps, config.batch, config.sequence, options.seed))
    if callback is not None and options.profile_only and callback.report is None:
        raise NoProfileError
    if not options.profile_only:
        print(f"{learned(model)}, {time.monotonic() - began:.0f} s", flush=True)
    if options.checkpoint is not None:
        model.save(options.checkpoint)
        print(f"saved {options.checkpoint}", flush=True)
    return model


def learned(model: MiniGPT) -> str:
    """The first and the last loss beside that of guessing."""
    first, last = model.losses[0].item(), model.losses[-1].item()
    return (
        f"loss {first:.3f} at step 1, {last:.3f} at step {len(model.losses)}; "
        f"guessing is ln({VOCABULARY}) = {math.log(VOCABULARY):.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2, with a sentence, for a recipe that cannot be used, or no profile where that was all; 130 after Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        train(options)
    except (RecipeError, ProfilerError) as error:
        print(error, file=sys.stderr)
        return 2
    except NoProfileError:
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
