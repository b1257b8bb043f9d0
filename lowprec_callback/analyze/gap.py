"""From the baseline's step to the recipe's, term by term; the terms sum to the measured difference exactly.

With G the GEMM bucket of a step's ledger, B the kernel-only benchmark of the same GEMMs, and 0 / r for
baseline and recipe, all in ms per step:

    GEMM kernels                            B_r - B_0
    GEMMs slower in the step than on bench  (G_r - B_r) - (G_0 - B_0)
    quantization                            (quantize + amax + hadamard + scale)_r - the same_0
    one term for each other bucket          bucket_r - bucket_0
    idle                                    idle_r - idle_0
    residual                                residual_r - residual_0

The first two add up to G_r - G_0, so the sum telescopes to wall_r - wall_0, whatever the benchmark says.
"""

from __future__ import annotations

import math

from lowprec_callback.analyze.gemms import GemmTotals
from lowprec_callback.report import BUCKETS, QUANTIZATION, Figure, Gap, GapTerm, Ledger

SMALL = 0.0005
"""Share of the baseline's step below which a bucket's change joins `other GPU work`."""

GEMMS = "GEMM kernels"
SLOWER = "GEMMs slower in the step than on the bench"
QUANTIZING = "quantization"
OTHER = "other GPU work"
IDLE = "idle"
RESIDUAL = "residual"

_NAMES = {"communication": "communication (exposed)"}


def gap(
    baseline: str,
    recipe: str,
    start: Figure,
    end: Figure,
    ledgers: tuple[Ledger | None, Ledger | None],
    reasons: tuple[str | None, str | None],
    bench: tuple[GemmTotals, GemmTotals],
    on_cpu: bool = False,
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

    terms = _gemm_terms(before, after, bench, (baseline, recipe))
    quantization = Figure.total([after.buckets[name].minus(before.buckets[name]) for name in QUANTIZATION], "ms")
    if quantization.value or not on_cpu:
        terms.append(GapTerm(QUANTIZING, quantization, "amax, cast, transpose, Hadamard, scales"))
    terms += _other_terms(before, after, SMALL * (start.value or 0.0), on_cpu)
    idle_note = "time in no operator: Python and the framework" if on_cpu else "the GPU runs nothing"
    terms.append(GapTerm(IDLE, after.idle.minus(before.idle), idle_note))
    terms.append(GapTerm(RESIDUAL, after.residual.minus(before.residual), "what the ledgers leave unexplained"))
    return Gap(baseline, recipe, start, end, tuple(terms))


def _gemm_terms(
    before: Ledger, after: Ledger, bench: tuple[GemmTotals, GemmTotals], names: tuple[str, str]
) -> list[GapTerm]:
    in_step = after.buckets["gemm"].minus(before.buckets["gemm"])
    missing = next((side.kernel.reason for side in bench if side.kernel.value is None), None)
    if missing is not None:
        return [GapTerm(GEMMS, in_step, f"as they ran in the step; no complete kernel-only benchmark: {missing}")]
    promised = bench[1].kernel.minus(bench[0].kernel)
    slower = Figure.total([in_step, promised.scaled(-1.0)], "ms")
    return [
        GapTerm(GEMMS, promised, f"kernel-only benchmark{_short_calls(bench)}"),
        GapTerm(SLOWER, slower, _over_bench((before, after), bench, names)),
    ]


def _over_bench(ledgers: tuple[Ledger, Ledger], bench: tuple[GemmTotals, GemmTotals], names: tuple[str, str]) -> str:
    """`over the bench: bf16 +51.5 ms, fp8_delayed +30.2 ms`: G - B on each side, whose difference is the term."""
    told = []
    for name, ledger, side in zip(names, ledgers, bench, strict=True):
        over = ledger.buckets["gemm"].minus(side.kernel)
        if over.value is not None:
            told.append(f"{name} {over.value:+.1f} ms")
    return f"over the bench: {', '.join(told)}"


def _short_calls(bench: tuple[GemmTotals, GemmTotals]) -> str:
    side = max(bench, key=lambda totals: totals.launch_bound)
    return f"; {side.launch_bound} of {side.calls} calls take longer to launch than to run" if side.launch_bound else ""


def _other_terms(before: Ledger, after: Ledger, small: float, on_cpu: bool) -> list[GapTerm]:
    """One term a bucket; those too small to show, and the bucket `other`, are added up in one."""
    shown: list[GapTerm] = []
    rest: list[tuple[str, Figure]] = []
    for bucket in BUCKETS:
        if bucket == "gemm" or bucket in QUANTIZATION:
            continue
        change = after.buckets[bucket].minus(before.buckets[bucket])
        if bucket == "other" or abs(change.value or 0.0) < small:
            rest.append((bucket, change))
        else:
            shown.append(GapTerm(_NAMES.get(bucket, bucket), change))
    changed = [bucket for bucket, change in rest if change.value and bucket != "other"]
    note = f"small changes of {', '.join(changed)}" if changed else ""
    name = "other operators" if on_cpu else OTHER
    return [*shown, GapTerm(name, Figure.total([change for _, change in rest], "ms"), note)]


def closes(gap: Gap) -> bool:
    """Whether the terms sum to the measured difference, to rounding."""
    values = [term.ms.value for term in gap.terms]
    if gap.start.value is None or gap.end.value is None or any(value is None for value in values):
        return False
    total = math.fsum(value for value in values if value is not None)
    return math.isclose(total, gap.end.value - gap.start.value, rel_tol=1e-9, abs_tol=1e-9 * gap.start.value)
