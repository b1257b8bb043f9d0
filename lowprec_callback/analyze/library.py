"""What the GEMM library's own log says of each module and role: the third witness, by itself.

The log tells operand types and scale modes. It does not tell delayed from current scaling: both are one FP32 factor
a tensor to the library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowprec_callback.analyze.precision import UNKNOWN, Operands, same, shown
from lowprec_callback.analyze.witnesses import Outcome, Place
from lowprec_callback.recording import Gemm, LibraryCall, LibraryLog

_FORMATS = {
    "R_64F": "fp64",
    "R_32F": "fp32",
    "R_16F": "fp16",
    "R_16BF": "bf16",
    "R_8F_E4M3": "e4m3",
    "R_8F_E5M2": "e5m2",
    "R_4F_E2M1": "e2m1",
    "R_8I": "int8",
    "f64": "fp64",
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "f8_e4m3": "e4m3",
    "f8_e5m2": "e5m2",
    "f4_e2m1": "e2m1",
    "s8": "int8",
}
"""cuBLAS's names (library_types.h, cudaDataType) and oneDNN's (dnnl_common_types.h), to ours."""

_SCALINGS = {
    "": "tensor",
    "SCALAR_32F": "tensor",
    "VEC128_32F": "block-128",
    "BLK128x128_32F": "block-128",
    "VEC32_UE8M0": "mx-32",
    "VEC16_UE4M3": "nvfp4-16",
    "OUTER_VEC_32F": "row",
}
"""cublasLt.h, cublasLtMatmulMatrixScale_t. A mode that has its default value, SCALAR_32F, is not logged."""

_FAST = {
    "COMPUTE_32F_FAST_TF32": "tf32",
    "COMPUTE_32F_FAST_16BF": "bf16",
    "COMPUTE_32F_FAST_16F": "fp16",
    "tf32": "tf32",
    "bf16": "bf16",
    "f16": "fp16",
}
"""Compute types that round FP32 operands before they are multiplied: cuBLAS's, and oneDNN's fast-math modes."""

EPSILON = 1e-6
"""Of one call: what rounding may leave when calls are counted by their FLOPs."""


def operands_of(call: LibraryCall) -> Operands:
    """Formats and scalings of the two operands, in our words. TF32 multiplies FP32 and is told apart as a note only."""
    formats = (
        _FORMATS.get(call.weight_or_input, UNKNOWN),
        _FORMATS.get(call.other, UNKNOWN),
    )
    fast = _FAST.get(call.compute)
    if fast not in (None, "tf32") and formats == ("fp32", "fp32"):
        formats = (fast, fast)
    modes = (call.weight_or_input_scale, call.other_scale)
    return Operands(formats, (_scaling(formats[0], modes[0]), _scaling(formats[1], modes[1])))


def _scaling(form: str, mode: str) -> str:
    if form == UNKNOWN:
        return UNKNOWN
    return _SCALINGS.get(mode, UNKNOWN) if form in ("e4m3", "e5m2", "e2m1") else "none"


@dataclass(frozen=True)
class LibrarySight:
    """What the library logged of one GEMM."""

    who: str
    """The library's name."""
    outcomes: Sequence[Outcome]
    """Kinds of operands, and the number of calls that got them."""
    tf32: bool

    @property
    def precisions(self) -> set[str]:
        """Precisions of the products that were logged."""
        return {outcome.operands.precision for outcome in self.outcomes}

    def heard_all(self, entry: Outcome) -> bool:
        """Whether as many calls were logged as there were with these operands."""
        return self._like(entry.operands) >= entry.calls - EPSILON

    def _like(self, operands: Operands) -> float:
        """The number of calls that were logged with operands that these can have been."""
        return math.fsum(outcome.calls for outcome in self.outcomes if agree(operands, outcome.operands))

    def against(self, seen: Sequence[Outcome]) -> str | None:
        """If this cannot be what was seen at the library's entry: a sentence that says so, without its subject."""
        entered = " and ".join(dict.fromkeys(str(entry.operands) for entry in seen))
        for outcome in self.outcomes:
            if not any(agree(entry.operands, outcome.operands) for entry in seen):
                return f"operands were {entered}, but {self.who} logged {outcome.operands}"
        # Every kind was seen. If the log is whole, each kind must be there as often as it was seen.
        whole = abs(math.fsum(o.calls for o in self.outcomes) - math.fsum(entry.calls for entry in seen)) <= EPSILON
        for entry in seen:
            if whole and not self.heard_all(entry):
                count = f"{self._like(entry.operands):.3g}"
                kind = f"operands were {entry.operands} in {entry.calls:.3g} calls"
                return f"{kind}, but {self.who} logged that kind in {count}"
        return None

    def __str__(self) -> str:
        return f"{self.who}: {' and '.join(str(outcome.operands) for outcome in self.outcomes)}"


def agree(entered: Operands, logged: Operands) -> bool:
    """Whether operands seen at the entry can be those that the library logged.

    What either does not know is no contradiction. Block scales that were converted on the way to MXFP8 (on
    Blackwell) are none either: that is the verdict `emulated`.
    """
    if entered.precision == "fp8-block" and logged.precision == "mxfp8":
        return entered.formats == logged.formats
    known = Operands(
        (_known(logged.formats[0], entered.formats[0]), _known(logged.formats[1], entered.formats[1])),
        (_known(logged.scalings[0], entered.scalings[0]), _known(logged.scalings[1], entered.scalings[1])),
    )
    return same(entered, known) or same(known, entered)


def _known(logged: str, entered: str) -> str:
    return entered if UNKNOWN in (logged, entered) else logged


@dataclass(frozen=True)
class LibraryWitness:
    """All `LibraryCall` facts of one recipe."""

    found: Mapping[Place, Sequence[LibraryCall]]
    lines: Sequence[int] = ()
    """Where the facts stand in the Recording."""
    log: LibraryLog | None = None

    @staticmethod
    def of(calls: Iterable[tuple[int, LibraryCall]], log: LibraryLog | None = None) -> LibraryWitness:
        """Sort the facts, which come with their line numbers, by place."""
        found: dict[Place, list[LibraryCall]] = {}
        lines = []
        for line, call in calls:
            lines.append(line)
            found.setdefault((call.module, call.role), []).append(call)
        return LibraryWitness(found, lines, log)

    def sight(self, gemm: Gemm, only_shape: bool) -> LibrarySight | None:
        """What was logged of this GEMM's calls; None if nothing. With `only_shape`, of this shape only.

        Calls are counted in FLOPs, logged ones over those of the call that they were joined to: a grouped call is
        one product in the log for each of its groups.
        """
        counts: dict[Operands, float] = {}
        names: dict[str, None] = {}
        tf32 = False
        for call in self.found.get((gemm.module, gemm.role), ()):
            shape = (call.m, call.k, call.n)
            if (only_shape and shape != (gemm.m, gemm.k, gemm.n)) or not math.prod(shape):
                continue
            operands = operands_of(call)
            done = call.calls * call.rows * call.inner * call.columns / math.prod(shape)
            counts[operands] = counts.get(operands, 0.0) + done
            names[call.library] = None
            tf32 = tf32 or (_FAST.get(call.compute) == "tf32" and operands.precision == "fp32")
        if not counts:
            return None
        outcomes = [Outcome(operands, None, calls) for operands, calls in counts.items()]
        return LibrarySight(" and ".join(names), outcomes, tf32)

    @property
    def why_silent(self) -> str:
        """Why the log says nothing of a GEMM; empty if no log was recorded at all."""
        if self.log is None:
            return ""
        if self.log.silent is not None:
            return "the library's log was not listened to"
        if len(self.log.libraries) > 1:
            return f"neither {' nor '.join(self.log.libraries)} logged it, so other code ran it"
        return f"{' and '.join(self.log.libraries)} logged no product of it"


def not_taken(name: str, gemms: Iterable[Gemm], witnesses: Mapping[str, LibraryWitness]) -> tuple[str, ...]:
    """A slow path of a recipe on a CPU: GEMMs that no library ran, while one ran the same GEMMs of another recipe.

    PyTorch multiplies what oneDNN and MKL do not take by code of its own: BF16, on a CPU without BF16 instructions.
    """
    mine = witnesses.get(name)
    if mine is None or mine.log is None or len(mine.log.libraries) < 2:
        return ()
    missed = [gemm for gemm in gemms if (gemm.module, gemm.role) not in mine.found]
    for other, theirs in witnesses.items():
        ran = {call.library for gemm in missed for call in theirs.found.get((gemm.module, gemm.role), ())}
        count = sum((gemm.module, gemm.role) in theirs.found for gemm in missed)
        if other != name and count:
            libraries = " nor ".join(mine.log.libraries)
            return (
                f"neither {libraries} ran {count} of the linear-layer GEMMs, PyTorch's own code did; "
                f"those of {other} were run by {' and '.join(sorted(ran))}",
            )
    return ()


def merged(entered: Operands, sight: LibrarySight) -> Operands:
    """What both together tell: what the entry did not know, by the log, if it tells one thing only."""
    if len(sight.outcomes) != 1:
        return entered
    logged = sight.outcomes[0].operands
    formats, scalings = (
        (_first_known(mine[0], theirs[0]), _first_known(mine[1], theirs[1]))
        for mine, theirs in ((entered.formats, logged.formats), (entered.scalings, logged.scalings))
    )
    return Operands(formats, scalings)


def _first_known(first: str, second: str) -> str:
    return second if first == UNKNOWN else first


def converted(asked: str, sight: LibrarySight | None) -> bool:
    """Whether block-scaled operands ran as MXFP8, by the log."""
    return asked == "fp8-block" and sight is not None and "mxfp8" in sight.precisions


def remark(sight: LibrarySight, entry: Outcome) -> str:
    """What the log adds to a verdict, in words."""
    if not sight.heard_all(entry):
        return f"{sight.who} logged a part of the calls only"
    return f"{sight.who} multiplies in {shown('tf32')}" if sight.tf32 else ""
