"""`lowprec gemm`: the GEMMs of a model, timed by themselves under each recipe. Its options; the plan is `gemm_plan`.

All options of Transformer Engine's `benchmarks/gemm/benchmark_gemm.py` are here with their meanings, so its command
lines can be pasted. Every option may be written with underscores or hyphens.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from importlib import import_module
from typing import Any, NoReturn

from lowprec_callback.gemm_plan import BUDGET_S, ITERATIONS, PRECISION, WARM_UPS, GemmPlanError, option, plan_from_args

MODEL = "the model's sizes"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand `gemm`, for `lowprec_callback.cli`."""
    parser = subparsers.add_parser(
        "gemm",
        description="Time the GEMMs of a model by themselves, under each recipe: fprop, dgrad and wgrad as training "
        "runs them, with and without the quantization that they need.",
        epilog="Options may be written with underscores or hyphens. Without any, squares from 256 to 16384 are timed.",
        allow_abbrev=False,
    )
    _add_sources(parser)
    _add_model(parser.add_argument_group(MODEL, "For a model, all of the first six, or --config and two of them."))
    _add_recipes(parser.add_argument_group("recipes"))
    _add_method(parser.add_argument_group("how to time"))
    _add_output(parser.add_argument_group("output"))
    for name, instead in (
        ("profile", "run `nsys profile lowprec gemm --shapes 4096`, and make it small with --recipes and --budget"),
        ("profile-shape", "give the size to --shapes, and profile with `nsys profile lowprec gemm --shapes 4096`"),
    ):
        _add(parser, name, nargs="?", action=_Refused, instead=instead, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and measure; 2 with a sentence on standard error for options that make no plan."""
    try:
        plan = plan_from_args(args)
    except GemmPlanError as error:
        print(f"lowprec gemm: {error}", file=sys.stderr)
        return 2
    code: int = import_module("lowprec_callback.gemm_run").run(plan)
    return code


# --- Options ---------------------------------------------------------------------------------------------


def _add(group: argparse._ActionsContainer, name: str, short: str | None = None, **options: Any) -> None:
    """One option in both spellings; the help shows the one given."""
    dest = name.replace("-", "_")
    names = [f"--{name}"] if short is None else [short, f"--{name}"]
    group.add_argument(*names, dest=dest, **options)
    others = {dest, dest.replace("_", "-")} - {name}
    for other in sorted(others):
        group.add_argument(f"--{other}", dest=dest, **(options | {"help": argparse.SUPPRESS}))


def _add_sources(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "shapes",
        type=_shapes,
        metavar="LIST",
        help="shapes with commas between: 1024 for a square, or MxKxN (tokens x input x output features)",
    )
    _add(parser, "config", metavar="FILE", help="a Hugging Face config.json; options for sizes override it")
    _add(parser, "from-run", metavar="RUN", help="a run folder: time the shapes that its live model showed")


def _add_model(group: argparse._ArgumentGroup) -> None:
    for name, text in (
        ("hidden_size", "features of a token between the layers"),
        ("intermediate_size", "features inside the MLP"),
        ("num_attention_heads", "query heads"),
        ("num_hidden_layers", "transformer layers"),
        ("micro_batch_size", "sequences in a micro-batch"),
        ("sequence_length", "tokens of a sequence"),
        ("num_key_value_heads", "key and value heads (grouped-query attention); default: as many as query heads"),
        ("head_dim", "features of a head; default: hidden_size / num_attention_heads"),
        ("vocab_size", "output features of the LM head; default: no LM head"),
        ("num_experts", "routed experts of each mixture-of-experts layer"),
        ("experts_per_token", "routed experts that a token visits"),
        ("moe_intermediate_size", "features inside a routed expert; default: intermediate_size"),
        ("shared_expert_intermediate_size", "features inside the expert that every token visits"),
        ("num_dense_layers", "layers of a mixture-of-experts model that keep an ordinary MLP"),
        ("tensor_parallel", "GPUs that share each layer; the shapes are those of one of them"),
    ):
        _add(group, name, type=_whole(1), metavar="N", help=text)
    for name, text in (
        ("gated-mlp", "the up projection is two in one (SwiGLU, GeGLU)"),
        ("bias", "linear layers have a bias"),
        ("qkv-bias", "the QKV projection has a bias"),
        ("out-bias", "the attention's output projection has a bias"),
        ("mlp-bias", "the MLP has a bias"),
        ("shared-expert-gate", "the shared expert is weighted by a layer with one output feature"),
        ("sequence_parallel", "the GPUs of tensor_parallel share the tokens between the split layers"),
    ):
        _add(group, name, action="store_const", const=True, default=None, help=text)


def _add_recipes(group: argparse._ArgumentGroup) -> None:
    _add(group, "recipes", metavar="NAMES", help="recipes or cards, with commas between; default: all that can run")
    for name, recipe in (
        ("no-fp8-current", "fp8_current"),
        ("no-fp8-delayed", "fp8_delayed"),
        ("no-fp8-block", "fp8_block"),
        ("no-fp8", "mxfp8, and nothing else: the name is benchmark_gemm.py's"),
        ("no-fp4", "nvfp4"),
    ):
        _add(group, name, action="store_true", help=f"skip {recipe}")


def _add_method(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "method",
        choices=("role-true", "te-tutorial", "both"),
        default="role-true",
        help="role-true: what training does (default). te-tutorial: as benchmark_gemm.py times. both: side by side",
    )
    _add(
        group,
        "pre-quantize",
        action="store_true",
        help="only the GEMM, operands already quantized. Without it te-tutorial times the GEMM with its quantization, "
        "the other methods time both",
    )
    _add(
        group,
        "accumulate",
        type=_whole(1),
        metavar="N",
        help="micro-batches in an optimizer step: the weight is quantized once in them (default: 1)",
    )
    _add(
        group,
        "precision",
        type=_precision,
        metavar="SHARE",
        help=f"stop when each median's half-width is at most this share (default: {PRECISION * 100:g}%%; role-true)",
    )
    _add(
        group,
        "budget",
        type=_seconds,
        metavar="SECONDS",
        help=f"stop sampling after so many seconds (default: {BUDGET_S:g}; role-true)",
    )
    _add(group, "l2", choices=("hot", "cold"), default="hot", help="what a GEMM finds in the L2 cache (default: hot)")
    _add(
        group,
        "num-warmup",
        type=_whole(0),
        metavar="N",
        help=f"untimed calls of each GEMM (default: {WARM_UPS}; te-tutorial)",
    )
    _add(
        group,
        "num-iters",
        type=_whole(1),
        metavar="N",
        help=f"timed calls of each GEMM (default: {ITERATIONS}; te-tutorial)",
    )
    _add(
        group,
        "gpu-warmup",
        type=_seconds_or_none,
        default=5.0,
        metavar="SECONDS",
        help="seconds of products before the first timing, so that clocks settle; 0 for none (default: 5)",
    )
    _add(
        group,
        "timing",
        choices=("cuda-events", "profiler"),
        default="cuda-events",
        help="taken for benchmark_gemm.py's sake; times are CUDA events in either case",
    )
    _add(group, "seed", type=_whole(0), default=0, metavar="N", help="of the order of shapes and recipes (default: 0)")
    _add(group, "device", type=_device, default="auto", metavar="DEVICE", help="cpu, cuda or cuda:N (default: auto)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "output",
        short="-o",
        default="gemm_benchmark.png",
        metavar="FILE",
        help="the plot, as .png, .pdf or .svg (default: gemm_benchmark.png)",
    )
    _add(group, "json", metavar="FILE", help="write everything as JSON")
    _add(group, "csv", metavar="FILE", help="write the table as CSV")


class _Refused(argparse.Action):
    """An option of benchmark_gemm.py that is not taken, with what to do instead."""

    def __init__(self, instead: str, **options: Any) -> None:
        super().__init__(**options)
        self._instead = instead

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(f"{option(self.dest)} is not taken: {self._instead}")


# --- Values ----------------------------------------------------------------------------------------------


def _whole(least: int) -> Any:
    """A parser of whole numbers from `least`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return parse


def _shapes(text: str) -> list[tuple[int, int, int]]:
    """`1024,2048` or `8192x5120x10240,...`, mixed as one likes."""
    shapes = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        sizes = [part.strip() for part in item.lower().split("x")]
        good = all(re.fullmatch(r"\d+", size, re.ASCII) and int(size) > 0 for size in sizes)
        if not good or len(sizes) not in (1, 3):
            raise argparse.ArgumentTypeError(f"{item!r} is no shape: write 4096 for a square, or MxKxN")
        m, k, n = (int(size) for size in (sizes if len(sizes) == 3 else sizes * 3))
        shapes.append((m, k, n))
    if not shapes:
        raise argparse.ArgumentTypeError("no shape is named: write 1024,2048 or MxKxN,MxKxN")
    return shapes


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return value


def _seconds_or_none(text: str) -> float:
    return _number(text)


def _seconds(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 seconds leave no time for a single sample")
    return value


def _precision(text: str) -> float:
    """`1%` or `0.01`. A bare number above 0.2 is more likely a forgotten percent sign than a wish."""
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value <= 0.2:
        hint = f"; did you mean {text}%?" if not text.endswith("%") else ""
        raise argparse.ArgumentTypeError(f"{text!r} is no precision: give a share from above 0% to 20%, as 1%{hint}")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: give cpu, cuda, cuda:N or auto")
    return text
