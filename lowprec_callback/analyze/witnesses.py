"""What the witnesses of a recipe saw, for each module and role.

Here: the operands that reached the GEMM library (`Dispatch`), and a signature book of kernel names, learned from the
benchmark (`GemmTime.kernels`), whose precision is known because the benchmark chose it. The kernels themselves are in
`timed` and `balance`, the library's own log in `library`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowprec_callback.analyze.kernels import classify
from lowprec_callback.analyze.precision import UNKNOWN, Operands, kernel_fits
from lowprec_callback.recording import Card, Dispatch, Gemm, GemmTime

Place = tuple[str, str]
"""(module, role)."""

CUSTOM_ENTRY = "custom_gemm"
"""The entry (`Dispatch.entry`) where TE hands operands to a custom quantizer's own Python code."""


@dataclass(frozen=True)
class Outcome:
    """Calls of one module and role that got the same operands."""

    operands: Operands
    in_region: bool | None
    calls: float
    other_recipe: str | None = None
    stale_recipe: str | None = None
    recomputed: bool = False
    software: bool = False
    """Whether Python code of a custom quantizer multiplied, not a GEMM of the library."""

    @property
    def wide(self) -> bool:
        """Whether an operand was not quantized."""
        return not self.operands.quantized


@dataclass(frozen=True)
class OperandWitness:
    """All `Dispatch` facts of one recipe."""

    found: Mapping[Place, Sequence[Dispatch]]

    @staticmethod
    def of(dispatches: Iterable[Dispatch]) -> OperandWitness:
        """Sort the facts by place."""
        found: dict[Place, list[Dispatch]] = {}
        for dispatch in dispatches:
            found.setdefault((dispatch.module, dispatch.role), []).append(dispatch)
        return OperandWitness(found)

    def outcomes(self, gemm: Gemm, only_shape: bool) -> list[Outcome]:
        """What this GEMM's calls got. With `only_shape`, calls with another shape do not count."""
        calls: dict[Outcome, int] = {}
        for dispatch in self.found.get((gemm.module, gemm.role), ()):
            if only_shape and (dispatch.m, dispatch.k, dispatch.n) != (gemm.m, gemm.k, gemm.n):
                continue
            key = Outcome(
                operands=Operands.seen(dispatch.weight_or_input, dispatch.other),
                in_region=dispatch.in_region,
                calls=0,
                other_recipe=dispatch.other_recipe,
                stale_recipe=dispatch.stale_recipe,
                recomputed=dispatch.recomputed,
                software=dispatch.entry == CUSTOM_ENTRY,
            )
            calls[key] = calls.get(key, 0) + dispatch.calls
        return [replace(outcome, calls=count) for outcome, count in calls.items()]

    def lost_in_recomputation(self, module: str) -> bool:
        """Whether a module's forward ran quantized, and its recomputation in backward did not."""
        forwards = [
            (dispatch.recomputed, Operands.seen(dispatch.weight_or_input, dispatch.other).quantized)
            for dispatch in self.found.get((module, "fprop"), ())
        ]
        return (False, True) in forwards and (True, False) in forwards


class SignatureBook:
    """Kernel names that the benchmark launched, and the precisions that it launched them in."""

    def __init__(
        self, times: Iterable[GemmTime], cards: Mapping[str, Card], backward_override: str | None = None
    ) -> None:
        """`backward_override`: what the environment asked of every recipe (NVTE_BACKWARD_OVERRIDE), if anything."""
        self._precisions: dict[str, set[str]] = {}
        self.contradictions: dict[str, list[str]] = {}
        """By recipe: benchmarks whose kernel names say another precision than they were asked to run."""
        for time in times:
            card = cards.get(time.recipe)
            if card is None or time.failure:
                continue
            asked = Operands.asked(card, time.role)
            override = card.arguments.get("backward_override", backward_override)
            if time.role != "fprop" and override and card.scaling not in ("none", "tensor-delayed"):
                continue  # the call multiplied wide operands by request: which, the card does not say
            for name in _products(time.kernels):
                kernel = classify(name)
                self._precisions.setdefault(name, set()).add(asked.precision)
                emulated = asked.precision == "fp8-block" and kernel.precision == "mxfp8"
                if kernel.precision != UNKNOWN and not emulated and not kernel_fits(asked, kernel.precision):
                    shape = f"{time.m}x{time.k}x{time.n}"
                    bench = f"the benchmark of {time.recipe} {time.role} {shape}"
                    text = f"{bench} ran a {kernel.precision} kernel: {name}"
                    self.contradictions.setdefault(time.recipe, []).append(text)

    def knows(self, name: str) -> bool:
        """Whether the benchmark launched this kernel as a product."""
        return name in self._precisions

    def precision(self, name: str) -> str:
        """The one precision that the benchmark launched this kernel in; `unknown` if none or several.

        Also `unknown` if the benchmark ran one precision only: then another might launch the same name.
        """
        found = self._precisions.get(name, set())
        tried = set().union(*self._precisions.values())
        return next(iter(found)) if len(found) == 1 and len(tried) > 1 else UNKNOWN


def _products(kernels: Sequence[str]) -> list[str]:
    """The products among the kernels of one GEMM call: what the grammar calls one, else the only unknown name."""
    known = [(name, classify(name)) for name in dict.fromkeys(kernels)]
    gemms = [name for name, kernel in known if kernel.is_product]
    unknown = [name for name, kernel in known if kernel.bucket == "other"]
    return gemms or (unknown if len(unknown) == 1 else [])
