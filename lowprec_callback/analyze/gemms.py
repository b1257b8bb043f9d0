"""From benchmarked shapes to what all linear-layer GEMMs of one step would take.

    T(recipe, mode) = sum over GEMMs g of a step: calls_g x median(samples of g's shape, role, family)   [ms]

A GPU at its power limit changes its clock from one sample to the next, so where clocks were measured beside the
samples, all times are given at one clock, the median over all samples of the benchmark (`recording.GemmTime.at`).

`mode` is kernel (operands already quantized) or autocast (with the quantization that training does). A GEMM
that no recipe can reach (a plain `nn.Linear` beside Transformer Engine) runs the same in every recipe, so
it enters every recipe's sum with the baseline's time. A sum with a missing term is missing, and names the
term."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.statistics import median_interval
from lowprec_callback.recording import MODES, Gemm, GemmTime, Method, Mode, Role
from lowprec_callback.report import Figure, GemmRow, merge_facts, worst_origin

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@lru_cache(maxsize=65536)
def operation(module: str) -> str:
    """A module path with its layer indices collapsed: `layers.3.mlp.fc1` -> `layers.*.mlp.fc1`."""
    return _INDEX.sub("*", module) or "(the model itself)"


@dataclass(frozen=True)
class GemmTotals:
    """One recipe's benchmark, joined with the calls of one step."""

    rows: tuple[GemmRow, ...]
    kernel: Figure
    autocast: Figure
    launch_bound: int
    """How many of the step's calls take the host longer to launch than the GPU to run (kernel-only)."""
    calls: int


PLAIN = "nn.Linear"
"""The family of a linear layer outside Transformer Engine; the TE classes share one GEMM for each shape."""


def clocks_of(times: Iterable[GemmTime], method: Method) -> list[float]:
    """The SM clocks [MHz] of all samples of a method."""
    return [mhz for time in times if time.method == method for mhz in time.clocks_mhz]


Key = tuple[str, Role, int, int, int, Mode]


class Benchmark:
    """All `GemmTime` facts of a Recording, found by recipe, role, shape and mode."""

    def __init__(self, times: Sequence[tuple[int, GemmTime]], method: Method = "role-true") -> None:
        clocks = clocks_of((time for _, time in times), method)
        self.mhz = statistics.median(clocks) if clocks else None
        """The clock that all times are given at: the median over all samples; None where clocks were not measured."""
        self._found: dict[Key, list[tuple[int, GemmTime]]] = {}
        self._figures: dict[tuple[Key, str], Figure] = {}
        for line, time in times:
            if time.method != method:
                continue
            key = (time.recipe, time.role, time.m, time.k, time.n, time.mode)
            self._found.setdefault(key, []).append((line, time))

    def has(self, recipe: str) -> bool:
        """Whether anything of this recipe was benchmarked, or tried."""
        return any(key[0] == recipe for key in self._found)

    def launch_bound(self, recipe: str, gemm: Gemm, mode: Mode) -> bool:
        """Whether one call of this GEMM takes the host longer to launch than the GPU to run."""
        return any(time.launch_bound for _, time in self._of(recipe, gemm, mode))

    def figure(self, recipe: str, gemm: Gemm, mode: Mode) -> Figure:
        """Milliseconds of one call of this GEMM: the median of its samples; or why there is none."""
        where = f"{recipe}, {gemm.role}, {gemm.m}x{gemm.k}x{gemm.n}, {mode}"
        key = (
            (recipe, gemm.role, gemm.m, gemm.k, gemm.n, mode),
            gemm.family if gemm.groups == 1 else "grouped",
        )
        if key not in self._figures:
            found = self._of(recipe, gemm, mode)
            near = self._nearest(recipe, gemm, mode) if not found and gemm.groups == 1 else None
            self._figures[key] = near or self._figure(found, where, gemm)
        return self._figures[key]

    def _nearest(self, recipe: str, gemm: Gemm, mode: Mode) -> Figure | None:
        """For a layer that was benchmarked with other numbers of tokens only: t(M) = t(M') M / M' [ms], estimated.

        M' is the nearest number of tokens of a layer of the same K and N; None if there is none. Where batches have
        many sizes, only the shapes that carry most of the FLOPs are benchmarked (`measure.batches`).
        """
        others = [
            m
            for name, role, m, k, n, kind in self._found
            if (name, role, k, n, kind) == (recipe, gemm.role, gemm.k, gemm.n, mode) and m > 0
        ]
        if not others or gemm.m <= 0:
            return None
        m = min(others, key=lambda other: (abs(math.log(other / gemm.m)), other))
        timed = self.figure(recipe, replace(gemm, m=m), mode)
        if timed.value is None:
            return None
        return Figure(timed.value * gemm.m / m, "ms", "estimated", n=timed.n, facts=timed.facts)

    def _of(self, recipe: str, gemm: Gemm, mode: Mode) -> list[tuple[int, GemmTime]]:
        """The facts of this shape: of the same kind of layer if there are any, else of any kind."""
        every = self._found.get((recipe, gemm.role, gemm.m, gemm.k, gemm.n, mode), [])
        same = [(line, time) for line, time in every if time.family == gemm.family]
        # A grouped call is many small GEMMs: the time of one large GEMM is not its time.
        if same or gemm.groups > 1:
            return same
        plain = gemm.family == PLAIN
        return [(line, time) for line, time in every if (time.family == PLAIN) == plain] or every

    def _figure(self, found: Sequence[tuple[int, GemmTime]], where: str, gemm: Gemm) -> Figure:
        timed = [(line, time) for line, time in found if time.samples_ms and not time.failure]
        samples = [sample for _, time in timed for sample in time.at(self.mhz) if math.isfinite(sample)]
        if samples:
            estimate = median_interval({0: samples}, resamples=1000)
            return Figure(
                estimate.value,
                "ms",
                "measured",
                estimate.low,
                estimate.high,
                estimate.n,
                lines_of("gemm_time", (line for line, _ in timed)),
            )
        failures = [time.failure for _, time in found if time.failure]
        if failures:
            return Figure.missing("ms", f"the benchmark of {where} failed: {failures[-1]}")
        grouped = f" as a call of {gemm.groups} groups" if gemm.groups > 1 else ""
        return Figure.missing("ms", f"{where} was not benchmarked{grouped}")


def totals(gemms: Sequence[tuple[int, Gemm]], benchmark: Benchmark, recipe: str, baseline: str) -> GemmTotals:
    """Rows by operation, role and shape, and the two sums over one step; see the module's docstring."""
    calls = sum(gemm.calls for _, gemm in gemms)
    if not gemms or not benchmark.has(recipe):
        why = "no linear-layer GEMM was captured" if not gemms else f"no GEMM benchmark of {recipe} was recorded"
        return GemmTotals((), Figure.missing("ms", why), Figure.missing("ms", why), 0, calls)

    rows: list[GemmRow] = []
    bound = 0
    for group in _groups(gemms):
        first = group[0][1]
        timed_as = recipe if first.quantizable else baseline
        per_mode = {mode: benchmark.figure(timed_as, first, mode) for mode in MODES}
        count = sum(gemm.calls for _, gemm in group)
        kernel_bound = benchmark.launch_bound(timed_as, first, "kernel")
        bound += count if kernel_bound else 0
        rows.append(
            GemmRow(
                operation=operation(first.module),
                role=first.role,
                m=first.m,
                k=first.k,
                n=first.n,
                calls=count,
                kernel_ms=per_mode["kernel"],
                autocast_ms=per_mode["autocast"],
                launch_bound=kernel_bound or benchmark.launch_bound(timed_as, first, "autocast"),
                kernel_launch_bound=kernel_bound,
            )
        )
    facts = lines_of("gemm", (line for line, _ in gemms))
    return GemmTotals(
        rows=tuple(rows),
        kernel=_sum([(row.kernel_ms, row.calls) for row in rows], facts),
        autocast=_sum([(row.autocast_ms, row.calls) for row in rows], facts),
        launch_bound=bound,
        calls=calls,
    )


def _groups(gemms: Sequence[tuple[int, Gemm]]) -> list[list[tuple[int, Gemm]]]:
    """GEMMs that share operation, role, shape and kind of layer, in order of first appearance."""
    found: dict[tuple[object, ...], list[tuple[int, Gemm]]] = {}
    for line, gemm in gemms:
        place = (operation(gemm.module), gemm.role, gemm.m, gemm.k, gemm.n)
        found.setdefault((*place, gemm.family, gemm.quantizable, gemm.groups), []).append((line, gemm))
    return list(found.values())


def _sum(terms: Sequence[tuple[Figure, int]], facts: tuple[str, ...]) -> Figure:
    """Sum of calls x milliseconds; the first missing term makes it missing, in that term's words."""
    missing = [figure.reason for figure, _ in terms if figure.value is None]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return Figure.missing("ms", f"{missing[0]}{more}")
    total = Figure.total([figure.scaled(float(calls)) for figure, calls in terms], "ms")
    return Figure(total.value, "ms", "derived", total.low, total.high, facts=(*facts, *total.facts))


def speedup(baseline: Figure, recipe: Figure) -> Figure:
    """s = baseline / recipe [1]; relative half-widths add in quadrature (independent sides)."""
    for side in (baseline, recipe):
        if side.value is None:
            return Figure.missing("x", side.reason or "missing")
    assert baseline.value is not None
    assert recipe.value is not None
    if recipe.value <= 0 or baseline.value <= 0:
        return Figure.missing("x", "a time of zero has no ratio")
    value = baseline.value / recipe.value
    low = high = None
    if baseline.half_width is not None and recipe.half_width is not None:
        spread = value * math.hypot(baseline.half_width / baseline.value, recipe.half_width / recipe.value)
        low, high = value - spread, value + spread
    both = (baseline, recipe)
    return Figure(value, "x", worst_origin(both), low, high, facts=merge_facts(both))


def amdahl(wall: Figure, gemm_in_step: Figure, kernel_speedup: Figure) -> Figure:
    """The step's speedup if only its GEMM time changed, by the kernel-only factor [1].

        S = wall / (wall - G + G / s)

    wall: the baseline's timed step [ms]; G: GEMM kernels in the baseline's step, from its ledger [ms]; s:
    kernel-only speedup of the benchmark's totals [1]. CodonFM 5B on an H200: wall 819.2, G 666.9, s 1.92 ->
    1.64. The interval is that of s carried through (S grows with s); the spread of wall and G is left out.
    """
    parts = (wall, gemm_in_step, kernel_speedup)
    for part in parts:
        if part.value is None:
            return Figure.missing("x", part.reason or "missing")
    assert wall.value is not None
    assert gemm_in_step.value is not None
    assert kernel_speedup.value is not None
    total, gemm = wall.value, gemm_in_step.value

    def step(s: float) -> float:
        return total / (total - gemm + gemm / s)

    if total <= 0 or kernel_speedup.value <= 0 or total - gemm + gemm / kernel_speedup.value <= 0:
        return Figure.missing("x", "the GEMM time in the traced step exceeds the timed step")
    low = high = None
    ends = (kernel_speedup.low, kernel_speedup.high)
    if ends[0] is not None and ends[1] is not None and ends[0] > 0 and total - gemm + gemm / ends[1] > 0:
        low, high = step(ends[0]), step(ends[1])
    return Figure(step(kernel_speedup.value), "x", worst_origin(parts), low, high, facts=merge_facts(parts))
