"""The memory ledger: all that the allocator took from the GPU at one moment, split by what it is, without overlaps.

    reserved = parameters + gradients + optimizer state + buffers and scales + copies of weights + workspaces
             + saved activations + temporaries + not attributed + rounding + reserved but unused       [bytes]

Measured are the allocator's counters, and the storages of whatever Python can name, each once (`Holding`). The rest is
by difference, so that the terms add up to what was measured:

- not attributed: live bytes before the step that nobody named, N = requested(start) - named(start). It stays through
  the step (input buffers, libraries' workspaces, what a model keeps beside its buffers).
- saved activations, after forward: A = requested - named - copies - N. Copies of weights that a forward pass makes for
  its backward pass are those that reached the GEMMs (`Dispatch`), for all layers or, at the peak, for those whose
  backward had not run by then.
- temporaries, at the peak: peak_requested - held_requested, what came on top of the live bytes at the boundary of a
  module just before; new gradients of that module among them.
- rounding: live bytes less those that were asked for. At the peak both are the highest of the step, which need not have
  been at the same moment: an estimate.
- reserved but unused: reserved less live bytes. At the peak, the most that was reserved in the step.

After backward and after the optimizer's step activations are gone, and everything that is not named is not attributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lowprec_callback.analyze.memory_model import Layer
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.stored_bytes import saved_inputs, weight_copies
from lowprec_callback.recording import Dispatch, Holding, Memory, PeakHolding
from lowprec_callback.report import MEMORY_TERMS, Figure, MemoryMoment

GB = 1e9
NO_COUNTERS = "a CPU has no allocator counters"
NOT_RECORDED = "this phase was not recorded"
NOT_ASKED = "this allocator does not count what was asked for"

(
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    BUFFERS,
    COPIES,
    WORKSPACE,
    ACTIVATIONS,
    MIXED,
    TEMPORARY,
    OTHER,
    ROUNDING,
    UNUSED,
) = MEMORY_TERMS

INPUTS, REST = "inputs of linear layers", "the rest of them"

NAMED = {
    PARAMETERS: "parameters",
    OPTIMIZER: "optimizer",
    BUFFERS: "buffers",
    WORKSPACE: "workspaces",
}
"""Terms that are a field of `Holding`, whatever the moment; gradients and copies of weights come and go."""

BEFORE = {"start": "start", "forward": "start", "backward": "forward", "optimizer": "backward"}
"""The reading before a phase, whose owners are still there when the phase is fullest."""


class Ledger:
    """One recipe's watched step."""

    def __init__(
        self,
        memory: Sequence[tuple[int, Memory]],
        holdings: Sequence[tuple[int, Holding]],
        peak: tuple[int, PeakHolding] | None,
        dispatches: Sequence[tuple[int, Dispatch]],
        layers: Sequence[Layer],
        micro_batches: int,
        on_cpu: bool,
    ) -> None:
        self._why = NO_COUNTERS if on_cpu else NOT_RECORDED
        self._memory: dict[str, tuple[int, Memory]] = {}
        # Facts of timed blocks come before those of the watched step, and have a round.
        for line, fact in memory:
            if fact.round < 0:
                self._memory.setdefault(fact.phase, (line, fact))
        self._all = [(line, fact) for line, fact in memory if fact.round < 0]
        self._holdings: dict[str, tuple[int, Holding]] = {}
        for line, holding in holdings:
            self._holdings.setdefault(holding.phase, (line, holding))
        self._peak = peak
        self._copies = weight_copies(dispatches, layers, micro_batches)
        self._inputs = saved_inputs(dispatches, layers, micro_batches)
        self._operand_facts = lines_of("dispatch", (line for line, _ in dispatches))

    def moments(self) -> tuple[MemoryMoment, ...]:
        """The ends of phases in order, and after them the peak; empty where nobody counted owners."""
        found = [self._phase(name) for name in ("start", "forward", "backward", "optimizer") if name in self._holdings]
        if self._peak is not None and found:
            found.append(self._fullest(*self._peak))
        return tuple(found)

    # -- readings --------------------------------------------------------------------------------------------------

    def _counter(self, phase: str, name: str) -> Figure:
        entry = self._memory.get(phase)
        if entry is None:
            return Figure.missing("GB", self._why)
        value = getattr(entry[1], name)
        return _counted(value, "memory", entry[0])

    def _owner(self, phase: str, name: str) -> Figure:
        entry = self._holdings.get(phase)
        if entry is None:
            return Figure.missing("GB", NOT_RECORDED)
        return _counted(getattr(entry[1], name), "holding", entry[0])

    def _named(self, phase: str) -> dict[str, Figure]:
        return {term: self._owner(phase, field) for term, field in NAMED.items()}

    def _kept(self, phase: str) -> Figure:
        """Quantized weights that modules keep between micro-batches."""
        return self._owner(phase, "quantized")

    def _not_attributed(self) -> Figure:
        start = {
            **self._named("start"),
            GRADIENTS: self._owner("start", "gradients"),
            COPIES: self._kept("start"),
        }
        return difference(self._counter("start", "requested"), start.values())

    def _copied(self, phase: str, among: Sequence[str] | None = None) -> Figure | None:
        """Copies of weights while activations are saved; None if what reached the GEMMs was not read.

        What modules keep is among what reached their GEMMs, so the larger of the two is all of it.
        """
        if self._copies is None:
            return None
        made = sum(size for module, size in self._copies.items() if among is None or _owned(module, among))
        kept = self._kept(phase)
        if kept.value is not None and kept.value * GB >= made:
            return kept
        return Figure(made / GB, "GB", "measured", facts=self._operand_facts)

    def _of_activations(self, terms: Mapping[str, Figure], among: Sequence[str] | None = None) -> dict[str, Figure]:
        """Saved activations, split in what linear layers saved for wgrad and all else, where operands were read."""
        whole = terms.get(ACTIVATIONS)
        if whole is None or self._inputs is None:
            return {}
        size = sum(each for module, each in self._inputs.items() if among is None or _owned(module, among))
        inputs = Figure(size / GB, "GB", "measured", facts=self._operand_facts)
        rest = difference(whole, [inputs])
        if whole.known and not rest.known:
            rest = Figure.missing(
                "GB", "inputs that layers share are counted for each, and come to more than the whole"
            )
        return {INPUTS: inputs, REST: rest}

    # -- moments ---------------------------------------------------------------------------------------------------

    def _phase(self, name: str) -> MemoryMoment:
        requested, allocated = self._counter(name, "requested"), self._counter(name, "allocated")
        reserved = self._counter(name, "reserved")
        terms = {**self._named(name), GRADIENTS: self._owner(name, "gradients")}
        if name == "forward":
            terms |= self._saved(requested, terms, self._copied(name), self._kept(name))
        else:
            terms[COPIES] = self._kept(name)
            terms[OTHER] = difference(requested, terms.values())
        terms[ROUNDING] = difference(allocated, [requested])
        terms[UNUSED] = difference(reserved, [allocated])
        split = self._counter(name, "inactive_split")
        inside = self._of_activations(terms) if name == "forward" else {}
        where = {"start": "before the step"}.get(name, f"after {name}")
        return MemoryMoment(name, where, _ordered(terms), reserved, inside, split)

    def _saved(
        self, requested: Figure, named: Mapping[str, Figure], copies: Figure | None, kept: Figure
    ) -> dict[str, Figure]:
        """Copies of weights, saved activations and what is not attributed, while activations are saved."""
        other = self._not_attributed()
        if copies is not None:
            return {COPIES: copies, OTHER: other, ACTIVATIONS: difference(requested, [*named.values(), copies, other])}
        return {COPIES: kept, OTHER: other, MIXED: difference(requested, [*named.values(), kept, other])}

    def _fullest(self, line: int, fact: PeakHolding) -> MemoryMoment:
        before = BEFORE[fact.phase]
        held = _counted(fact.held_requested, "peak_holding", line)
        peak = _counted(fact.peak, "peak_holding", line)
        peak_requested = _counted(fact.peak_requested, "peak_holding", line)
        terms = {**self._named(before), GRADIENTS: _counted(fact.gradients, "peak_holding", line)}
        if fact.phase == "optimizer":
            terms[COPIES] = self._kept(before)
            terms[OTHER] = difference(held, terms.values())
        else:
            terms |= self._saved(held, terms, self._copied(before, fact.open_layers), self._kept(before))
        terms[TEMPORARY] = difference(peak_requested, [held])
        rounding = difference(peak, [peak_requested])
        terms[ROUNDING] = replace(rounding, origin="estimated") if rounding.known else rounding
        reserved = Figure.missing("GB", self._why)
        if self._all:
            most = max(entry.reserved for _, entry in self._all)
            reserved = Figure(most / GB, "GB", "measured", facts=lines_of("memory", (n for n, _ in self._all)))
        terms[UNUSED] = difference(reserved, [peak])
        where = f"in {fact.phase}" if fact.phase != "start" else "before forward"
        where += f", at {fact.module}" if fact.module else ""
        return MemoryMoment("peak", where, _ordered(terms), reserved, self._of_activations(terms, fact.open_layers))


def difference(whole: Figure, parts: Iterable[Figure]) -> Figure:
    """What is left of a whole; missing where less than nothing would be."""
    left = whole.minus(Figure.total(parts, "GB"))
    if left.value is not None and left.value * GB < -0.5:
        more = -left.value * GB / 1e6
        return Figure.missing("GB", f"what was counted one by one exceeds what the allocator counts, by {more:.3g} MB")
    return left


def _counted(value: int | None, kind: str, line: int) -> Figure:
    if value is None:
        return Figure.missing("GB", NOT_ASKED)
    return Figure(value / GB, "GB", "measured", facts=lines_of(kind, [line]))


def _owned(module: str, paths: Sequence[str]) -> bool:
    """Whether a captured module is one of these, or one of the two linears that one of these owns."""
    return module in paths or (module.endswith((".fc1", ".fc2")) and module[:-4] in paths)


def _ordered(terms: Mapping[str, Figure]) -> dict[str, Figure]:
    return {name: terms[name] for name in MEMORY_TERMS if name in terms}
