"""A watched step by a simulated allocator, whose owners are known, as the facts that a real one would leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowprec_callback.analyze.memory_ledger import Ledger
from lowprec_callback.analyze.memory_model import Layer
from lowprec_callback.recording import Dispatch, Fact, Holding, Memory, Operand, PeakHolding, Stored

WatchedPhase = Literal["start", "forward", "backward", "optimizer"]
LINEARS = ("layers.0.fc", "layers.1.fc", "head")
SHAPE, ENTRY = (64, 32, 16), "generic_gemm"
LAYERS = [Layer(name, "Linear", 64, 32, 16, 1, True, True) for name in LINEARS]


@dataclass(frozen=True)
class Step:
    """Bytes by owner. The peak is in backward, when the last layer's is over and the one before it runs."""

    parameters: int = 4000
    optimizer: int = 8000
    buffers: int = 40
    workspaces: int = 320
    others: int = 150
    """Live before the step, and nobody's."""
    copies: tuple[int, int, int] = (100, 200, 300)
    """Of each layer's weight, made in forward."""
    cached: bool = False
    """Whether modules keep the copies, in every micro-batch."""
    activations: tuple[int, int, int] = (1000, 2000, 3000)
    inputs: tuple[int, int, int] = (300, 500, 900)
    """Of the activations: what each layer saves for wgrad."""
    gradients: tuple[int, int, int] = (400, 500, 600)
    temporary: int = 700
    rounding: int = 5
    """A live block has so much more than was asked for, in all."""
    unused: int = 900
    fragmented: int = 30

    def __post_init__(self) -> None:
        assert len(self.copies) == len(self.activations) == len(self.gradients) == len(LINEARS)

    @property
    def base(self) -> int:
        kept = sum(self.copies) if self.cached else 0
        return self.parameters + self.optimizer + self.buffers + self.workspaces + self.others + kept

    @property
    def made(self) -> int:
        return 0 if self.cached else sum(self.copies)

    @property
    def after_forward(self) -> int:
        """Old gradients are still there."""
        return self.base + sum(self.gradients) + self.made + sum(self.activations)

    @property
    def before_peak(self) -> int:
        """Old gradients are gone, the last layer's new one is there, its activations and copy are not."""
        made = 0 if self.cached else sum(self.copies[:-1])
        return self.base + self.gradients[-1] + made + sum(self.activations[:-1])

    @property
    def peak(self) -> int:
        return self.before_peak + self.temporary


def facts(step: Step, recipe: str = "fp8_delayed", requested: bool = True) -> list[Fact]:
    """All facts about memory of one recipe's watched step. Without `requested`, the allocator does not count it."""
    live: dict[WatchedPhase, int] = {
        "start": step.base + sum(step.gradients),
        "forward": step.after_forward,
        "backward": step.base + sum(step.gradients),
        "optimizer": step.base + sum(step.gradients),
    }
    made: list[Fact] = []
    reserved = step.peak + step.rounding + step.unused + max(step.after_forward - step.peak, 0)
    for phase, size in live.items():
        made.append(
            Memory(
                recipe,
                -1,
                phase,
                allocated=size + step.rounding,
                peak=size + step.rounding,
                reserved=reserved,
                requested=size if requested else None,
                inactive_split=step.fragmented,
            )
        )
        made.append(
            Holding(
                recipe,
                phase,
                parameters=step.parameters,
                gradients=sum(step.gradients),
                optimizer=step.optimizer,
                buffers=step.buffers,
                quantized=sum(step.copies) if step.cached else 0,
                workspaces=step.workspaces,
            )
        )
    made.append(
        PeakHolding(
            recipe,
            "backward",
            LINEARS[1],
            peak=step.peak + step.rounding,
            peak_requested=step.peak if requested else None,
            held=step.before_peak + step.rounding,
            held_requested=step.before_peak if requested else None,
            gradients=step.gradients[-1],
            open_layers=LINEARS[:-1],
        )
    )
    return [*made, *dispatches(step, recipe)]


def dispatches(step: Step, recipe: str) -> list[Dispatch]:
    """What reached the GEMMs: in fprop the input has one more copy than what is saved."""
    found = []
    for name, copy, saved in zip(LINEARS, step.copies, step.inputs, strict=True):
        weight, grad = operand(Stored(copy, 0, 0)), operand(None)
        both, one = operand(Stored(saved, saved, 4)), operand(Stored(0, saved, 0))
        found.append(Dispatch(recipe, name, "fprop", *SHAPE, 1, "TN", weight, both, "bf16", False, ENTRY, "Linear"))
        found.append(Dispatch(recipe, name, "wgrad", *SHAPE, 1, "NT", one, grad, "bf16", False, ENTRY, "Linear"))
    return found


def operand(stored: Stored | None) -> Operand:
    return Operand("Float8Tensor", "e4m3", "tensor-delayed", stored=stored)


def ledger(of: list[Fact], on_cpu: bool = False) -> Ledger:
    """What the analysis makes of these facts."""
    lines = list(enumerate(of, start=1))
    return Ledger(
        [(n, fact) for n, fact in lines if isinstance(fact, Memory)],
        [(n, fact) for n, fact in lines if isinstance(fact, Holding)],
        next(((n, fact) for n, fact in lines if isinstance(fact, PeakHolding)), None),
        [(n, fact) for n, fact in lines if isinstance(fact, Dispatch)],
        LAYERS,
        1,
        on_cpu,
    )
