"""From the baseline's step to the recipe's, term by term; the terms sum to the measured difference exactly.

With G the GEMM bucket of a step's ledger, B the kernel-only benchmark of the same GEMMs, and 0 / r for
baseline and recipe, all in ms per step:

    GEMM kernels                            B_r - B_0
    GEMMs slower in the step than on bench  (G_r - B_r) - (G_0 - B_0)
    quantization                            (quantize + amax + hadamard + scale)_r - the same_0
    one term for each other bucket          bucket_r - bucket_0
    idle                                    idle_r - idle_0
    residual                                residual_r - residual_0

The first two add up to G_r - G_0, so the sum telescopes to wall_r - wall_0, whatever the benchmark says. "Baseline"
and "recipe" may be any two recipes of a Report, such as MXFP8 and NVFP4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lowprec_callback.analyze.bucket_noise import Noise, around, noise_of, rest_within
from lowprec_callback.analyze.gemms import GemmTotals
from lowprec_callback.report import (
    BUCKETS,
    IDLE_CAUSES,
    QUANTIZATION,
    Figure,
    Gap,
    GapTerm,
    Ledger,
    RecipeReport,
    Report,
)

SMALL = 0.0005
"""Share of the baseline's step below which a bucket's change joins `other GPU work`."""

GEMMS = "GEMM kernels"
SLOWER = "GEMMs slower in the step than on the bench"
QUANTIZING = "quantization"
OTHER = "other GPU work"
IDLE = "idle"
RESIDUAL = "residual"

_NAMES = {"communication": "communication (exposed)"}


def between(one: RecipeReport, other: RecipeReport) -> Gap:
    """The gap from one recipe's step to another's, of any two recipes of a Report, loaded or just made.

    The terms' intervals come from the spread of the traced steps, of the rounds and of the benchmark: half-widths of
    the two sides in quadrature, see `bucket_noise`. They are left out where that spread is not known.
    """
    noise = noise_of(one, other) if one.ledger is not None and other.ledger is not None else None
    return gap(
        one.name,
        other.name,
        one.step_ms,
        other.step_ms,
        (one.ledger, other.ledger),
        (_why_no_ledger(one), _why_no_ledger(other)),
        (_bench(one), _bench(other)),
        on_cpu=any(part.ledger is not None and part.ledger.busy.origin == "estimated" for part in (one, other)),
        noise=noise if isinstance(noise, Noise) else None,
    )


def pairs(report: Report) -> list[tuple[RecipeReport, RecipeReport]]:
    """All pairs of recipes that ran and have a ledger, in the report's order; the first is the earlier one."""
    ran = [part for part in report.recipes if part.refusal is None and part.ledger is not None]
    return list(combinations(ran, 2))


def _why_no_ledger(part: RecipeReport) -> str | None:
    return part.no_ledger or (f"it did not run: {part.refusal}" if part.refusal else part.step_ms.reason)


def _bench(part: RecipeReport) -> GemmTotals:
    bound = sum(row.calls for row in part.gemms if row.kernel_launch_bound)
    calls = sum(row.calls for row in part.gemms)
    return GemmTotals(part.gemms, part.gemm_kernel_ms, part.gemm_autocast_ms, bound, calls)


def gap(
    baseline: str,
    recipe: str,
    start: Figure,
    end: Figure,
    ledgers: tuple[Ledger | None, Ledger | None],
    reasons: tuple[str | None, str | None],
    bench: tuple[GemmTotals, GemmTotals],
    on_cpu: bool = False,
    noise: Noise | None = None,
) -> Gap:
    """The gap between two steps. `ledgers`, `reasons` and `bench` hold the baseline's, then the recipe's."""
    before, after = ledgers
    missing = None
    if before is None:
        missing = f"no ledger of {baseline}: {reasons[0] or 'unknown'}"
    elif after is None:
        missing = f"no ledger of {recipe}: {reasons[1] or 'unknown'}"
    if before is None or after is None:
        return Gap(baseline, recipe, start, end, (), missing)

    change = _Change(before, after, noise)
    terms = _gemm_terms(change, bench, (baseline, recipe))
    quantization = change.of(QUANTIZATION)
    if quantization.value or not on_cpu:
        terms.append(GapTerm(QUANTIZING, quantization, "amax, cast, transpose, Hadamard, scales"))
    terms += _other_terms(change, SMALL * (start.value or 0.0), on_cpu)
    idle_note = "time in no operator: Python and the framework" if on_cpu else "the GPU runs nothing"
    idle_note += _causes(before, after, SMALL * (start.value or 0.0))
    idle, residual = change.rest(start, end)
    terms.append(GapTerm(IDLE, idle, idle_note))
    terms.append(GapTerm(RESIDUAL, residual, "what the ledgers leave unexplained"))
    return Gap(baseline, recipe, start, end, tuple(terms))


@dataclass(frozen=True)
class _Change:
    """From one ledger to another, with intervals where the noise is known."""

    before: Ledger
    after: Ledger
    noise: Noise | None

    def of(self, names: Sequence[str]) -> Figure:
        """The change of the sum of some buckets."""
        changes = [_bucket(self.after, name).minus(_bucket(self.before, name)) for name in names]
        return around(Figure.total(changes, "ms"), self._half(names))

    def rest(self, start: Figure, end: Figure) -> tuple[Figure, Figure]:
        """The changes of idle time and of the residual; see `rest_within`."""
        sides = ((self.before, start), (self.after, end))
        (idle, residual), (idle_after, residual_after) = (
            rest_within(ledger, self.noise.left(ledger, step) if self.noise else None) for ledger, step in sides
        )
        return idle_after.minus(idle), residual_after.minus(residual)

    def _half(self, names: Sequence[str]) -> float | None:
        sides = [self.noise.half(ledger, names) if self.noise else None for ledger in (self.before, self.after)]
        known = [half for half in sides if half is not None]
        return math.hypot(*known) if len(known) == len(sides) else None


def _bucket(ledger: Ledger, name: str) -> Figure:
    return ledger.buckets.get(name, Figure.missing("ms", f"the ledger has no bucket {name}"))


def _gemm_terms(change: _Change, bench: tuple[GemmTotals, GemmTotals], names: tuple[str, str]) -> list[GapTerm]:
    in_step = change.of(("gemm",))
    missing = next((side.kernel.reason for side in bench if side.kernel.value is None), None)
    if missing is not None:
        return [GapTerm(GEMMS, in_step, f"as they ran in the step; no complete kernel-only benchmark: {missing}")]
    promised = bench[1].kernel.minus(bench[0].kernel)
    slower = Figure.total([in_step, promised.scaled(-1.0)], "ms")
    return [
        GapTerm(GEMMS, promised, f"kernel-only benchmark{_short_calls(bench)}"),
        GapTerm(SLOWER, slower, _over_bench((change.before, change.after), bench, names)),
    ]


def _causes(before: Ledger, after: Ledger, small: float) -> str:
    """`; launch-starved +3.1 ms, data -0.2 ms`: what of the change of idle has which cause."""
    told = []
    for cause in IDLE_CAUSES:
        sides = [ledger.idle_parts.get(cause) for ledger in (after, before)]
        change = sides[0].minus(sides[1]) if sides[0] is not None and sides[1] is not None else None
        if change is not None and change.value is not None and abs(change.value) >= max(small, 0.005):
            told.append(f"{cause} {change.value:+.2f} ms")
    return f"; estimated: {', '.join(told)}" if told else ""


def _over_bench(ledgers: tuple[Ledger, Ledger], bench: tuple[GemmTotals, GemmTotals], names: tuple[str, str]) -> str:
    """`over the bench: bf16 +51.5 ms, fp8_delayed +30.2 ms`: G - B on each side, whose difference is the term."""
    told = []
    for name, ledger, side in zip(names, ledgers, bench, strict=True):
        over = _bucket(ledger, "gemm").minus(side.kernel)
        if over.value is not None:
            told.append(f"{name} {over.value:+.1f} ms")
    return f"over the bench: {', '.join(told)}"


def _short_calls(bench: tuple[GemmTotals, GemmTotals]) -> str:
    side = max(bench, key=lambda totals: totals.launch_bound)
    return f"; {side.launch_bound} of {side.calls} calls take longer to launch than to run" if side.launch_bound else ""


def _other_terms(change: _Change, small: float, on_cpu: bool) -> list[GapTerm]:
    """One term a bucket; those too small to show, and the bucket `other`, are added up in one."""
    shown: list[GapTerm] = []
    rest: list[str] = []
    changed: list[str] = []
    for bucket in BUCKETS:
        if bucket == "gemm" or bucket in QUANTIZATION:
            continue
        figure = change.of((bucket,))
        if bucket == "other" or abs(figure.value or 0.0) < small:
            rest.append(bucket)
            if figure.value and bucket != "other":
                changed.append(bucket)
        else:
            shown.append(GapTerm(_NAMES.get(bucket, bucket), figure))
    note = f"small changes of {', '.join(changed)}" if changed else ""
    return [*shown, GapTerm("other operators" if on_cpu else OTHER, change.of(rest), note)]


def closes(gap: Gap) -> bool:
    """Whether the terms sum to the measured difference, to rounding."""
    values = [term.ms.value for term in gap.terms]
    if gap.start.value is None or gap.end.value is None or any(value is None for value in values):
        return False
    total = math.fsum(value for value in values if value is not None)
    return math.isclose(total, gap.end.value - gap.start.value, rel_tol=1e-9, abs_tol=1e-9 * gap.start.value)
