"""Facts about the shapes of a model and what the benchmark measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from lowprec_callback.facts.base import Fact, Method, Mode, Role


def role_shape(role: Role, m: int, k: int, n: int) -> tuple[int, int, int]:
    """(rows, length of the sum, columns) of one role's GEMM, for a layer of m tokens, k input and n output features."""
    return {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (k, m, n)}[role]


def direction_of(role: str) -> str:
    """The pass that a role's GEMM runs in: forward for fprop, backward for dgrad and wgrad; empty for no role."""
    return {"fprop": "forward", "dgrad": "backward", "wgrad": "backward"}.get(role, "")


@dataclass(frozen=True)
class Gemm(Fact):
    """One GEMM of one linear layer in one optimizer step of the baseline, as the live model ran it.

    `m`, `k`, `n` are tokens, input features and output features of the layer's *forward* GEMM, whatever the role.
    """

    kind: ClassVar[str] = "gemm"
    module: str
    """Module path; LayerNormMLP's two linears end in `.fc1` and `.fc2`."""
    role: Role
    m: int
    k: int
    n: int
    calls: int
    """Calls in one optimizer step (micro-batches, shared weights, recomputation)."""
    family: str
    """What ran it: the TE class (`Linear`, `LayerNormLinear`, `LayerNormMLP`, ...) or `nn.Linear`."""
    quantizable: bool
    """Whether a recipe can reach it: it goes through TE (or, in plain_torch, through autocast)."""
    bias: bool = False
    groups: int = 1
    """Number of GEMMs in a grouped call; `m` is then the sum over groups."""
    layers: int | None = None
    """Transformer layers that have it; 0: it stands outside of them (the LM head). None: nobody said."""


def at_clock(samples_ms: Sequence[float], clocks_mhz: Sequence[float], mhz: float | None) -> tuple[float, ...]:
    """Samples as they would be at one clock [ms]: sample x its own clock / `mhz`.

    For work that the SMs are busy with, time is cycles over clock. On an H200 at its power limit the samples of one
    shape scatter by 3 to 7%, and by 0.5 to 1.3% once each is taken at the same clock. Samples whose clock was not
    measured are left as they are.
    """
    if mhz is None or len(clocks_mhz) != len(samples_ms):
        return tuple(samples_ms)
    return tuple(ms * own / mhz for ms, own in zip(samples_ms, clocks_mhz, strict=True))


@dataclass(frozen=True)
class GemmTime(Fact):
    """The microbenchmark of one shape in one role under one recipe, or why there is none."""

    kind: ClassVar[str] = "gemm_time"
    recipe: str
    role: Role
    m: int
    k: int
    n: int
    mode: Mode
    samples_ms: tuple[float, ...] = ()
    """Milliseconds of one call; each sample is the mean of `calls_per_sample` back-to-back calls."""
    calls_per_sample: int = 1
    host_ms: float | None = None
    """Host time to launch one call. Above the device's time, the result is launch-bound."""
    launch_bound: bool = False
    failure: str | None = None
    family: str = "Linear"
    """The kind of layer that was timed (see `Gemm.family`)."""
    quantize_ms: tuple[float, ...] = ()
    """autocast only: the part of each sample that is quantization, where it could be told apart."""
    kernels: tuple[str, ...] = ()
    """Names of the kernels that the GEMM call launched (its helpers included): the signature book."""
    method: Method = "role-true"
    clocks_mhz: tuple[float, ...] = ()
    """SM clock during each sample, measured on the GPU beside it; empty where it was not."""

    def at(self, mhz: float | None) -> tuple[float, ...]:
        """The samples as they would be at one clock [ms]; see `at_clock`."""
        return at_clock(self.samples_ms, self.clocks_mhz, mhz)


@dataclass(frozen=True)
class GemmRun(Fact):
    """One run of the microbenchmark: how it was sampled, and why it stopped."""

    kind: ClassVar[str] = "gemm_run"
    method: Method
    rounds: int
    """Visits to each (recipe, shape) that the longest-sampled pair had."""
    seconds: float
    stopped: str
    """`precise`, `budget`, `rounds`, `failed` (no shape ran), or `iterations` for the published method."""
    widest: float | None = None
    """The largest relative half-width of a layer's median that was left, at 95%."""
    precision: float | None = None
    budget_s: float | None = None
    cold_l2: bool = False
    accumulate: int = 1
    layers: int = 1
    """Transformer layers in the model; sums over one layer leave out what a model has once."""
    iterations: int | None = None


@dataclass(frozen=True)
class ModuleTime(Fact):
    """A copy of one of the model's own modules, run by itself in one direction under one recipe, or why it was not.

    Unlike a `GemmTime` it holds all that the module does: norm, activation and bias where they are its own, and casts
    that are fused into them. The time of one call, at the model's own number of tokens or at another.
    """

    kind: ClassVar[str] = "module_time"
    recipe: str
    module: str
    """Path of the module that was copied."""
    alike: tuple[str, ...]
    """Paths of all modules that it stands for, its own among them."""
    family: str
    tokens: int
    direction: Literal["forward", "backward"]
    samples_ms: tuple[float, ...] = ()
    """Milliseconds of one call on the GPU; each sample is the mean over `calls_per_sample` calls."""
    clocks_mhz: tuple[float, ...] = ()
    """SM clock during each sample (see `at_clock`)."""
    calls_per_sample: int = 1
    host_ms: float | None = None
    """Host time to launch one call inside a region that is open already."""
    region_ms: float | None = None
    """Host time that the region costs by itself: entering, leaving, and the recipe's update of scales."""
    own: bool = True
    """Whether `tokens` is what the model's step shows; else another number, from which the trend follows."""
    failure: str | None = None
