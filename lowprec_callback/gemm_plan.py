"""What `lowprec gemm` was asked to do: from parsed options to a plan that can be run.

Planning needs no GPU and no torch, so every mistake in the options is found before anything is measured.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.hugging_face import from_hugging_face
from lowprec_callback.analyze.model_config import ModelConfig, ModelConfigError
from lowprec_callback.analyze.shapes import LayerGemm, as_facts, from_facts, layer_gemms
from lowprec_callback.recipes import RecipeCard, resolve
from lowprec_callback.recording import MODES, ROLES, Gemm, Method, Mode, Role, read, role_shape

MODEL_FIELDS = tuple(field.name for field in fields(ModelConfig))
"""Options that say a model's sizes: every field of `ModelConfig` has one."""

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "micro_batch_size",
    "sequence_length",
)
"""What a model cannot do without; the six of Transformer Engine's benchmark_gemm.py."""

SQUARES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
"""Shapes where none are given: those of benchmark_gemm.py."""

SKIPPED_BY = {
    "no_fp8_current": "fp8_current",
    "no_fp8_delayed": "fp8_delayed",
    "no_fp8_block": "fp8_block",
    "no_fp8": "mxfp8",
    "no_fp4": "nvfp4",
}
"""Options of benchmark_gemm.py that skip a recipe. There, too, `--no-fp8` skips MXFP8 and nothing else."""

PRECISION = 0.01
BUDGET_S = 120.0
WARM_UPS = 10
ITERATIONS = 100


class GemmPlanError(ValueError):
    """Options that make no plan. The text is one sentence for the user."""


@dataclass(frozen=True)
class GemmPlan:
    """What to time, under which recipes, and how."""

    name: str
    """Where the sizes come from, in words."""
    operations: tuple[LayerGemm, ...]
    gemms: tuple[Gemm, ...]
    """The same as facts, one a role: what is timed, and with how many calls it enters the sums."""
    config: ModelConfig | None
    """The model's sizes; None for shapes that were listed or taken from a run."""
    layers: int
    """Transformer layers; 1 where that is not known."""
    methods: tuple[Method, ...]
    modes: tuple[Mode, ...]
    recipes: tuple[str, ...] | None
    """Names or places of cards as asked for; None: all that the engine has."""
    without: tuple[str, ...]
    """Recipes to leave out of that."""
    accumulate: int
    """Micro-batches in an optimizer step; the weight is quantized in the first of them only."""
    precision: float
    """Sampling stops when the half-width of each median is at most this share of it (role-true)."""
    budget_s: float
    """Or when so many seconds are spent (role-true)."""
    warm_ups: int
    """Untimed calls of each GEMM (te-tutorial)."""
    iterations: int
    """Timed calls of each GEMM, one after the other (te-tutorial)."""
    gpu_warm_up_s: float
    """Seconds of BF16 products before anything is timed; 0: none."""
    cold_l2: bool
    seed: int
    device: str
    """auto, cpu, cuda or cuda:N."""
    plot: Path | None
    json: Path | None
    csv: Path | None
    notes: tuple[str, ...] = ()
    """Sentences about options that mean something else here than in benchmark_gemm.py."""

    def cards(self, engine: str, baseline: str) -> list[RecipeCard]:
        """The recipes to run with an engine, the baseline first (it is there even if nobody asked for it).

        Raises:
            RecipeError: a recipe that is not known.
        """
        chosen = {card.name: card for card in resolve(self.recipes, engine) if card.name not in self.without}
        first = chosen.pop(baseline, None) or resolve([baseline], engine)[0]
        return [first, *chosen.values()]

    def products(self) -> list[tuple[str, Role, tuple[int, int, int]]]:
        """(operation, role, (rows, length of the sum, columns)) of every GEMM, in the order of TE's tables."""
        return [
            (gemm.module, role, role_shape(role, gemm.m, gemm.k, gemm.n))
            for role in ROLES
            for gemm in self.gemms
            if gemm.role == role
        ]


def plan_from_args(args: argparse.Namespace) -> GemmPlan:
    """Make the plan.

    Raises:
        GemmPlanError: options that contradict each other or lack something.
        RecipeError: a recipe that is not known.
        RecordingError: `--from-run` names no Recording.
    """
    try:
        name, operations, gemms, config, layers = _what(args)
    except ModelConfigError as error:
        raise GemmPlanError(str(error)) from error
    methods: tuple[Method, ...] = MODES_OF_METHOD[args.method][0]
    _check_method(args, methods, operations)
    modes: tuple[Mode, ...] = ("kernel",) if args.pre_quantize else MODES_OF_METHOD[args.method][1]
    recipes, without = _which(args)
    return GemmPlan(
        name=name,
        operations=tuple(operations),
        gemms=tuple(gemms),
        config=config,
        layers=layers,
        methods=methods,
        modes=modes,
        recipes=recipes,
        without=without,
        accumulate=args.accumulate or 1,
        precision=args.precision or PRECISION,
        budget_s=args.budget or BUDGET_S,
        warm_ups=WARM_UPS if args.num_warmup is None else args.num_warmup,
        iterations=args.num_iters or ITERATIONS,
        gpu_warm_up_s=args.gpu_warmup,
        cold_l2=args.l2 == "cold",
        seed=args.seed,
        device=args.device,
        plot=_file(args.output, "--output", (".png", ".pdf", ".svg")),
        json=_file(args.json, "--json"),
        csv=_file(args.csv, "--csv"),
        notes=tuple(_notes(args, methods)),
    )


MODES_OF_METHOD: dict[str, tuple[tuple[Method, ...], tuple[Mode, ...]]] = {
    "role-true": (("role-true",), MODES),
    "te-tutorial": (("te-tutorial",), ("autocast",)),
    "both": (("te-tutorial", "role-true"), MODES),
}
"""`--method` to the methods that run and to the modes in which they do; `--pre-quantize` leaves only kernel."""


# --- What is timed ---------------------------------------------------------------------------------------

What = tuple[str, list[LayerGemm], list[Gemm], ModelConfig | None, int]
"""Name, operations, facts, config, layers."""


def _what(args: argparse.Namespace) -> What:
    sizes = {name: getattr(args, name) for name in MODEL_FIELDS if getattr(args, name) is not None}
    given = {
        "--shapes": args.shapes is not None,
        "--from-run": args.from_run is not None,
        "--config": args.config is not None,
        "the model's sizes": bool(sizes),
    }
    sources = [name for name, is_given in given.items() if is_given]
    if len(sources) > 1 and sources != ["--config", "the model's sizes"]:
        which = f" ({', '.join(map(option, sizes))})" if sizes else ""
        raise GemmPlanError(f"{' and '.join(sources)}{which}: each says what to time; give one of them only")
    if args.from_run is not None:
        return _from_run(Path(args.from_run))
    if args.config is not None:
        return _of_model(_read_config(Path(args.config), sizes), Path(args.config).name, args)
    if sizes:
        missing = [option(name) for name in NEEDED if name not in sizes]
        if missing:
            raise GemmPlanError(
                f"the model's sizes are incomplete: missing {', '.join(missing)} (all of "
                f"{', '.join(map(option, NEEDED))} are needed, or --config FILE with the last two)"
            )
        return _of_model(ModelConfig(**sizes), "model", args)
    return _listed(args.shapes or [(size, size, size) for size in SQUARES], args)


def _of_model(config: ModelConfig, name: str, args: argparse.Namespace) -> What:
    gemms = layer_gemms(config)
    text = (
        f"{name}: hidden {config.hidden_size}, {config.num_hidden_layers} layers, "
        f"{config.tokens} tokens ({config.micro_batch_size} x {config.sequence_length})"
    )
    return text, gemms, as_facts(gemms, args.accumulate or 1), config, config.num_hidden_layers


def _read_config(file: Path, sizes: dict[str, Any]) -> ModelConfig:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise GemmPlanError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise GemmPlanError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise GemmPlanError(f"{file}: no config.json (a JSON object), but a {type(content).__name__}")
    missing = [name for name in ("micro_batch_size", "sequence_length") if name not in sizes]
    if missing:
        limit = content.get("max_position_embeddings")
        hint = f" (the model's limit is {limit} tokens)" if limit and "sequence_length" in missing else ""
        raise GemmPlanError(f"{file} does not say what you train with: give {' and '.join(map(option, missing))}{hint}")
    try:
        return from_hugging_face(content, **sizes)
    except ModelConfigError as error:
        raise GemmPlanError(f"{file}: {error}") from error


def _from_run(place: Path) -> What:
    facts = read(place).of(Gemm)
    if not facts:
        raise GemmPlanError(f"{place}: its Recording holds no GEMMs (the run ended before it had captured any)")
    calls: Counter[Gemm] = Counter()
    modules: dict[str, set[str]] = {}
    for fact in facts:
        place_in_layer = operation(fact.module)
        calls[replace(fact, module=place_in_layer, calls=1)] += fact.calls
        modules.setdefault(place_in_layer, set()).add(fact.module)
    gemms = [
        replace(gemm, calls=count, layers=len(modules[gemm.module]) if "*" in gemm.module else 0)
        for gemm, count in calls.items()
    ]
    return f"the GEMMs of {place}", from_facts(facts), gemms, None, max(map(len, modules.values()))


def _listed(shapes: Iterable[tuple[int, int, int]], args: argparse.Namespace) -> What:
    """Shapes that were named one by one. The published method times just these products, ours a layer's three GEMMs."""
    gemms = [LayerGemm(f"{m}x{k}x{n}", m, k, n, per_layer=False) for m, k, n in dict.fromkeys(shapes)]
    roles: tuple[Role, ...] = ("fprop",) if args.method == "te-tutorial" else ROLES
    return f"{len(gemms)} shapes", gemms, as_facts(gemms, args.accumulate or 1, roles), None, 1


# --- How -------------------------------------------------------------------------------------------------


def _check_method(args: argparse.Namespace, methods: tuple[Method, ...], gemms: Iterable[LayerGemm]) -> None:
    if "te-tutorial" in methods:
        grouped = [gemm.operation for gemm in gemms if gemm.groups > 1]
        if grouped:
            raise GemmPlanError(
                f"--method {args.method}: the published method has no grouped GEMMs ({', '.join(grouped)}); "
                "time a model with experts by --method role-true"
            )
        if args.device == "cpu":
            raise GemmPlanError(f"--method {args.method} times Transformer Engine, which has no CPU: drop --device cpu")
    if "role-true" not in methods:
        own = ("accumulate", "precision", "budget")
        useless = [option(name) for name in own if getattr(args, name) is not None]
        if args.l2 == "cold":
            useless.append("--l2 cold")
        if useless:
            raise GemmPlanError(
                f"{', '.join(useless)}: the published method has no such thing; it makes --num-iters calls in a row "
                "that each quantize the weight, with a warm L2 cache. Use --method role-true or both"
            )


def _which(args: argparse.Namespace) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """(recipes asked for, recipes left out)."""
    skipped = {recipe: option(name) for name, recipe in SKIPPED_BY.items() if getattr(args, name)}
    if args.recipes is None:
        return None, tuple(skipped)
    asked = tuple(name.strip() for name in args.recipes.split(","))
    contradicted = [f"{skipped[name]} and --recipes {name}" for name in asked if name in skipped]
    if contradicted:
        raise GemmPlanError(f"{', '.join(contradicted)} contradict each other")
    resolve(asked, "transformer_engine")  # raises for a name that is not known
    return asked, tuple(skipped)


def _file(text: str | None, name: str, suffixes: tuple[str, ...] = ()) -> Path | None:
    """A file to write, found out to be writable before anything is measured."""
    if text is None:
        return None
    file = Path(text)
    if suffixes and file.suffix.lower() not in suffixes:
        raise GemmPlanError(f"{name} {text}: a plot is written as {', '.join(suffixes)}; end the name in one of these")
    if not file.parent.is_dir():
        raise GemmPlanError(f"{name} {text}: there is no folder {file.parent}")
    if file.is_dir():
        raise GemmPlanError(f"{name} {text}: this is a folder; give the name of a file")
    return file


def _notes(args: argparse.Namespace, methods: tuple[Method, ...]) -> Iterable[str]:
    if args.timing == "profiler":
        yield (
            "--timing profiler: times are CUDA events all the same; summing kernels by name counts NVFP4's Hadamard "
            "casts as GEMMs. --pre-quantize times the GEMM alone"
        )
    if "te-tutorial" not in methods and (args.num_warmup is not None or args.num_iters is not None):
        yield (
            "--num-warmup and --num-iters belong to --method te-tutorial; role-true samples until --precision or "
            "--budget is reached"
        )
    if args.no_fp8:
        yield "--no-fp8 skips MXFP8 only, as in benchmark_gemm.py"


def option(name: str) -> str:
    """An option as a user types it."""
    return f"--{name}" if name in MODEL_FIELDS else f"--{name.replace('_', '-')}"
