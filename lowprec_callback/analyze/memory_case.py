"""What is known of each recipe's memory: what its layers should hold, and what the allocator counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.memory_model import Held, Layer, held_after_forward, layers_of
from lowprec_callback.analyze.precision import Operands
from lowprec_callback.analyze.stored_bytes import held_sums
from lowprec_callback.recording import Card, Dispatch, Gemm, Holding, Memory, PeakHolding

TOLERANCE = {True: 0.005, False: 0.01}
"""Of all bytes that the formulas add up for two recipes: what measured and expected differences may differ by; more
where only the allocator's rounded blocks are known, not what was asked for."""

ROUNDING = {True: 1 << 16, False: 1 << 21}
"""And bytes on top."""


@dataclass(frozen=True)
class Subject:
    """One recipe's facts, as far as memory is concerned."""

    card: Card
    memory: Sequence[tuple[int, Memory]]
    dispatches: Sequence[tuple[int, Dispatch]]
    override: str | None = None
    """Who asked for a wide backward pass, if anyone did."""
    holdings: Sequence[tuple[int, Holding]] = ()
    peak: tuple[int, PeakHolding] | None = None


@dataclass(frozen=True)
class Ground:
    """What holds for all recipes of a Recording."""

    gemms: Sequence[Gemm]
    micro_batches: int
    te: bool
    on_cpu: bool
    compute_capability: tuple[int, int] | None
    parameters: int = 0
    """Of the model; 0 if not known."""
    parameter_bytes: int = 0
    rank_bytes: int | None = None
    """See `recording.Model`."""
    parameter_facts: tuple[str, ...] = ()


@dataclass
class Case:
    """One recipe with all that is worked out about it, and what speaks for and against it."""

    subject: Subject
    forward: int | None
    """Bytes that the forward pass of the watched step added."""
    exact: bool
    """Whether these are bytes as asked for, or the allocator's rounded ones."""
    expected: Held | None
    why_not: str | None
    """Why there is no expectation."""
    sums: tuple[int | None, int | None]
    """Measured bytes of weights' copies and of saved inputs."""
    by_allocator: list[str] = field(default_factory=list)
    """Contradictions by the allocator's counters."""
    by_operands: list[str] = field(default_factory=list)
    """Contradictions by the operands' bytes."""
    agreements: list[str] = field(default_factory=list)
    silences: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The recipe's."""
        return self.subject.card.recipe

    @property
    def precision(self) -> str:
        """What was asked of its forward GEMMs."""
        return Operands.asked(self.subject.card, "fprop").precision


def cases_of(ground: Ground, subjects: Sequence[Subject], baseline: str) -> tuple[dict[str, Case], list[Layer]]:
    """A case for each recipe, and the layers that they are about."""
    layers, why_not = layers_of(ground.gemms, ground.micro_batches)
    if not ground.te:
        why_not = "the formulas are those of Transformer Engine's layers, and it did not run this model"
    elif not layers and why_not is None:
        why_not = "no linear layer that a recipe can reach was captured"
    base = next((subject for subject in subjects if subject.card.recipe == baseline), None)
    return {each.card.recipe: _case(each, base, layers, why_not, ground) for each in subjects}, layers


def _case(subject: Subject, base: Subject | None, layers: Sequence[Layer], why_not: str | None, ground: Ground) -> Case:
    why_not = why_not or _other_shapes(subject, ground)
    if why_not is None and subject.override and subject.card.scaling != "none":
        why_not = f"{subject.override} changes what is saved"
    expected = None
    if why_not is None:
        try:
            expected = expect(subject.card, subject, base, layers, ground)
        except ValueError as error:
            why_not = str(error)
    forward, exact = _added(subject.memory)
    return Case(
        subject, forward, exact, expected, why_not, held_sums(subject.dispatches, layers, max(ground.micro_batches, 1))
    )


def _added(memory: Sequence[tuple[int, Memory]]) -> tuple[int | None, bool]:
    """(bytes that the first forward pass of the watched step added, whether as asked for)."""
    start, forward = first(memory, "start"), first(memory, "forward")
    if start is None or forward is None:
        return None, False
    if start.requested is not None and forward.requested is not None:
        return forward.requested - start.requested, True
    return forward.allocated - start.allocated, False


def first(memory: Sequence[tuple[int, Memory]], phase: str) -> Memory | None:
    """The first fact of a phase of the watched step; facts of timed blocks come before its `start`."""
    seen = False
    for _, fact in memory:
        seen = seen or fact.phase == "start"
        if seen and fact.phase == phase:
            return fact
    return None


def _other_shapes(subject: Subject, ground: Ground) -> str | None:
    """If the watched step had other sizes than the captured one, from which expectations come: a sentence."""
    captured = {(gemm.module, gemm.role, gemm.m, gemm.k, gemm.n) for gemm in ground.gemms}
    for _, fact in subject.dispatches:
        if (fact.module, fact.role, fact.m, fact.k, fact.n) not in captured:
            size = f"{fact.module} {fact.role} {fact.m}x{fact.k}x{fact.n}"
            return f"the watched step of {subject.card.recipe} had a shape that was not captured: {size}"
    return None


def expect(card: Card, subject: Subject, base: Subject | None, layers: Sequence[Layer], ground: Ground) -> Held:
    """What the layers should hold under `card`, given what the operands tell of the model's parameters.

    Raises:
        ValueError: there is no formula for the card's formats or scaling.
    """
    wide, cast = "bf16", {}
    for _, fact in base.dispatches if base is not None else ():
        weight = fact.weight_or_input
        if fact.role == "fprop" and weight.stored is not None and weight.scaling == "none":
            wide, cast[fact.module] = weight.format, not weight.stored.parameter
    if not cast and ground.parameters:
        # Where no operand tells FP32 parameters from BF16 ones, their average size does.
        cast = {layer.module: ground.parameter_bytes / ground.parameters > 3.0 for layer in layers}
    forward = [fact for _, fact in subject.dispatches if fact.role == "fprop"]
    weights = [(fact.module, fact.weight_or_input) for fact in forward if fact.weight_or_input.scaling != "none"]
    return held_after_forward(
        layers,
        card,
        cast=cast,
        compute_capability=ground.compute_capability,
        wide=wide,
        unquantized=frozenset(fact.module for fact in forward if fact.in_region is False),
        primary=frozenset(name for name, weight in weights if weight.stored is not None and weight.stored.parameter),
        operation={layer.module: operation(layer.module) for layer in layers},
    )


def slack(one: Case, other: Case) -> float:
    """By how many bytes the difference of two recipes may be off. Both must have an expectation.

    Delayed scaling's state is allowed for once more: attention modules keep some too, and are not counted.
    """
    assert one.expected is not None
    assert other.expected is not None
    exact = one.exact and other.exact
    parts = TOLERANCE[exact] * (one.expected.total + other.expected.total)
    return parts + ROUNDING[exact] + one.expected.state + other.expected.state
