"""Facts about a run as a whole: where, of what, by which plan, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from lowprec_callback.facts.base import Fact


@dataclass(frozen=True)
class Header(Fact):
    """The first line of every Recording."""

    kind: ClassVar[str] = "header"
    version: int
    tool_version: str
    created: str
    """Local time, ISO 8601 with offset."""


@dataclass(frozen=True)
class Environment(Fact):
    """Machine, libraries and the few environment variables on the allow-list (`measure.device`)."""

    kind: ClassVar[str] = "environment"
    device: str
    """GPU name as NVML gives it, or the CPU's model name."""
    device_type: Literal["cuda", "cpu"]
    compute_capability: tuple[int, int] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Library name to version: python, torch, lightning, transformer_engine, cuda, driver, cudnn, cublasLt."""
    facts: dict[str, str] = field(default_factory=dict)
    """Other named facts, as text: power limit, core count, memory, world size."""
    variables: dict[str, str] = field(default_factory=dict)
    """Allow-listed environment variables that were set."""


@dataclass(frozen=True)
class Model(Fact):
    """The model under test and the engine that runs it."""

    kind: ClassVar[str] = "model"
    name: str
    engine: Literal["transformer_engine", "plain_torch", "imported"]
    why_engine: str
    parameters: int
    """Of the whole model, on however many ranks."""
    parameter_bytes: int
    linear_modules: dict[str, str] = field(default_factory=dict)
    """Module path to class name, for each module that owns a linear-layer weight."""
    rank_bytes: int | None = None
    """Bytes of the parameters that this rank holds between steps, where they are spread over ranks."""


@dataclass(frozen=True)
class Card(Fact):
    """A recipe as it was asked for (see `recipes.RecipeCard`, which reads it from TOML)."""

    kind: ClassVar[str] = "card"
    recipe: str
    title: str
    fprop: tuple[str, str]
    """Formats of the two operands (weight, input) of fprop, e.g. ("e4m3", "e4m3")."""
    dgrad: tuple[str, str]
    """Formats of (weight, output gradient) of dgrad."""
    wgrad: tuple[str, str]
    """Formats of (input, output gradient) of wgrad."""
    scaling: str
    """How values are scaled: none, tensor-delayed, tensor-current, block-128, mx-32, nvfp4-16."""
    arguments: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False


@dataclass(frozen=True)
class Plan(Fact):
    """What the sweep set out to do."""

    kind: ClassVar[str] = "plan"
    recipes: tuple[str, ...]
    baseline: str
    rounds: int
    settle_steps: int
    timed_steps: int
    traced_steps: int
    seed: int
    micro_batches: int
    """Batches in one optimizer step (gradient accumulation)."""
    steps: int
    """Optimizer steps that the whole plan takes."""
    shrunk: str | None = None
    """If time was too short for what was asked (before 0.2 also: the fit): what was cut, and what that costs in
    certainty."""
    guard_steps: int = 0
    """Optimizer steps of the numerics guard that are compared, for each recipe."""
    no_guard: str | None = None
    """Why there are none, if not because time was short."""
    batches: str | None = None
    """Which batches the sweep's steps used, in words; None before 0.2, when they were the fit's own."""


@dataclass(frozen=True)
class Sampled(Fact):
    """How many rounds of timed blocks ran, and why no more."""

    kind: ClassVar[str] = "sampled"
    rounds: int
    stopped: str
    """`planned`: no more were wanted; `precise`; `rounds`: the most that were asked for; `seconds`: they had taken
    long enough; before 0.2 also `steps`: the fit had too few left."""
    widest: float | None = None
    """Half-width of the least certain recipe's step, relative to it, at 95%."""
    precision: float | None = None
    """The half-width at which it would have been enough."""


@dataclass(frozen=True)
class Refusal(Fact):
    """A recipe that was not run, and why."""

    kind: ClassVar[str] = "refusal"
    recipe: str
    reason: str
    source: str
    """Who says so: a TE gate, our probe's exception, the plan."""


@dataclass(frozen=True)
class Imported(Fact):
    """The capture of a profiler that this Recording was made from, instead of a live run."""

    kind: ClassVar[str] = "imported"
    tool: str
    """`Nsight Systems 2025.3.2 (export schema 3.20.3)`, `torch.profiler`."""
    file: str
    """The file's name, without its folder."""
    kernels: int
    """Kernels, copies and fills of the GPU that is reported."""
    placed: int
    """Those of them whose launch by the host was found."""
    steps: str
    """How the steps were found."""
    traced: str
    """Which steps became `Trace` facts, and by which rule."""
    recipe_from: Literal["ranges", "user", "kernels"]
    """Who says which recipe was asked for: our ranges, the user, or nobody, so that the kernels must tell."""
    why_recipe: str = ""


@dataclass(frozen=True)
class Restored(Fact):
    """What was put back after the sweep."""

    kind: ClassVar[str] = "restored"
    parts: tuple[str, ...]
    asked: bool
    verified: str | None = None


@dataclass(frozen=True)
class Problem(Fact):
    """Something that failed or was given up, and what that costs."""

    kind: ClassVar[str] = "problem"
    where: str
    message: str


@dataclass(frozen=True)
class End(Fact):
    """The last line of a Recording whose sweep came to an end in good order."""

    kind: ClassVar[str] = "end"
    status: Literal["finished", "shortened", "interrupted", "failed"]
    reason: str | None = None
