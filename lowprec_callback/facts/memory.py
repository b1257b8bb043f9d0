"""Facts about what memory held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lowprec_callback.facts.base import Fact


@dataclass(frozen=True)
class Memory(Fact):
    """Bytes of the CUDA caching allocator (on a CPU: none are recorded)."""

    kind: ClassVar[str] = "memory"
    recipe: str
    round: int
    phase: Literal["start", "forward", "backward", "optimizer", "step"]
    """`start`: before the watched step of a recipe, from a clean state. `forward` and `backward` come once a
    micro-batch. `step`: at the end of a block of timed steps."""
    allocated: int
    """Live bytes at the end of the phase."""
    peak: int
    """Highest live bytes within the phase (`step`: within all steps of the block)."""
    reserved: int
    requested: int | None = None
    """Live bytes at the end of the phase as they were asked for, without the allocator's rounding."""
    inactive_split: int | None = None
    """Of what is reserved and not live: free pieces of blocks that are in use otherwise, fit for smaller requests
    only."""


@dataclass(frozen=True)
class Holding(Fact):
    """Who holds live bytes at the end of a phase of the watched step: sizes of storages, each counted once.

    What no owner claims (saved activations, temporaries, what others keep) is not in it.
    """

    kind: ClassVar[str] = "holding"
    recipe: str
    phase: Literal["start", "forward", "backward", "optimizer"]
    parameters: int
    gradients: int
    optimizer: int
    """The optimizer's state: moments, master weights, their scales."""
    buffers: int
    """The model's buffers; scales and amax histories of delayed scaling."""
    quantized: int
    """Quantized weights that modules keep from one micro-batch to the next, beside their parameters. What a forward
    pass keeps for its own backward pass is not among them."""
    workspaces: int
    """Transformer Engine's workspace for cuBLASLt."""


@dataclass(frozen=True)
class PeakHolding(Fact):
    """The fullest moment of the watched step, and what was held when the module began that ran at that moment."""

    kind: ClassVar[str] = "peak_holding"
    recipe: str
    phase: Literal["start", "forward", "backward", "optimizer"]
    module: str
    """The module at whose end (or, between modules, beginning) the new peak was found; empty where none was near."""
    peak: int
    """Highest live bytes of the step."""
    peak_requested: int | None
    """Highest live bytes as they were asked for."""
    held: int
    """Live bytes at the reading before: the boundary of a module or of a phase."""
    held_requested: int | None
    gradients: int
    """Bytes of gradients at that reading."""
    open_layers: tuple[str, ...] = ()
    """Modules with linear layers whose forward had run by then, and whose backward had not."""
