"""The GEMM benchmark as a table: by operation and role, summed over roles, a layer and the model.

With t(g, recipe) the median time of one call of GEMM g [ms], c(g) its calls in one step of the model and L the number
of transformer layers:

    role sum    sum of t over a layer's GEMMs of that role
    layer       sum of t over a layer's GEMMs, all roles
    model       sum of c x t over all GEMMs, those that a model has once (the LM head) included

A sum with a missing term is missing, in that term's words. GEMMs that no recipe reaches enter every recipe's sums
with the baseline's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from lowprec_callback.analyze.gemms import Benchmark, speedup
from lowprec_callback.recording import ROLES, Card, Gemm, GemmRun, GemmTime, Method, Mode, Recording, Refusal, Role
from lowprec_callback.report import Figure

ONCE = "LM head"
"""The operation that a model has once, however few layers it has."""

PAYS = 1.05
"""Below this speedup over the recipe before it, a narrower recipe is not worth its risk for that operation."""


@dataclass(frozen=True)
class Cell:
    """One operation in one role."""

    operation: str
    role: Role
    m: int
    k: int
    n: int
    calls: int
    in_layer: bool
    """Whether a transformer layer has it; else the model has it once."""
    ms: dict[str, Figure]
    """One call, by recipe."""
    quantize_share: dict[str, Figure]
    """Share of that time which is quantization, by recipe; autocast only."""
    launch_bound: tuple[str, ...] = ()
    """Recipes in which the host needs longer to launch it than the GPU to run it."""


@dataclass(frozen=True)
class GemmTable:
    """The table of one method in one mode."""

    method: Method
    mode: Mode
    baseline: str
    recipes: tuple[str, ...]
    refused: dict[str, str]
    cells: tuple[Cell, ...]
    layers: int
    run: GemmRun | None

    def total(self, recipe: str, cells: Iterable[Cell], *, whole_model: bool = False) -> Figure:
        """The sum over some cells: one call each, or all the calls of a step of the model."""
        chosen = list(cells)
        if not chosen:
            return Figure.missing("ms", "no such GEMM")
        terms = [cell.ms[recipe].scaled(float(cell.calls) if whole_model else 1.0) for cell in chosen]
        missing = [term.reason for term in terms if term.value is None]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            return Figure.missing("ms", f"{missing[0]}{more}")
        return Figure.total(terms, "ms")

    def role_sum(self, recipe: str, role: Role) -> Figure:
        """One layer's GEMMs of one role."""
        return self.total(recipe, (cell for cell in self.cells if cell.in_layer and cell.role == role))

    def layer(self, recipe: str) -> Figure:
        """One layer's GEMMs."""
        return self.total(recipe, (cell for cell in self.cells if cell.in_layer))

    def model(self, recipe: str) -> Figure:
        """All GEMMs of the model."""
        return self.total(recipe, self.cells, whole_model=True)

    def operation(self, recipe: str, operation: str) -> Figure:
        """All roles of one operation, one call each."""
        return self.total(recipe, (cell for cell in self.cells if cell.operation == operation))

    def operations(self) -> list[str]:
        """Operations in order."""
        return list(dict.fromkeys(cell.operation for cell in self.cells))

    def share_of_quantization(self, recipe: str) -> Figure:
        """Share of a layer's autocast time that is quantization [1]."""
        parts = []
        for cell in self.cells:
            if not cell.in_layer:
                continue
            share, time = cell.quantize_share[recipe], cell.ms[recipe]
            if share.value is None or time.value is None:
                return Figure.missing("1", share.reason or time.reason or "missing")
            parts.append(share.value * time.value)
        whole = self.layer(recipe)
        if whole.value is None:
            return Figure.missing("1", whole.reason or "missing")
        return Figure(sum(parts) / whole.value, "1", facts=whole.facts)

    def against(self, recipe: str, other: str) -> Figure:
        """How many times faster `recipe` runs a layer's GEMMs than `other` does."""
        return speedup(self.layer(other), self.layer(recipe))

    def break_even(self) -> list[str]:
        """For each operation, which recipe to stop at: a sentence where a recipe gains too little, or loses."""
        told = []
        for name in self.operations():
            gains = {
                recipe: factor.value
                for recipe in self.recipes
                if recipe != self.baseline
                and (factor := speedup(self.operation(self.baseline, name), self.operation(recipe, name))).value
            }
            poor = {recipe: gain for recipe, gain in gains.items() if gain < PAYS}
            if not poor or any(not cell.in_layer for cell in self.cells if cell.operation == name):
                continue
            best = max(gains, key=lambda recipe: gains[recipe])
            keep = f"{best} gains {gains[best]:.2f}x" if gains[best] >= PAYS else f"keep it in {self.baseline}"
            told.append(f"{name}: " + ", ".join(f"{r} {g:.2f}x" for r, g in poor.items()) + f"; {keep}")
        return told


def gemm_table(recording: Recording, method: Method, mode: Mode) -> GemmTable:
    """Make the table from a Recording of `lowprec gemm` (or of a sweep)."""
    times = recording.lines(GemmTime)
    bench = Benchmark(times, method)
    gemms = recording.of(Gemm)
    cards = recording.of(Card)
    refused = {fact.recipe: fact.reason for fact in recording.of(Refusal)}
    recipes = tuple(card.recipe for card in cards if card.recipe not in refused and bench.has(card.recipe))
    baseline = next((card.recipe for card in cards if card.baseline), recipes[0] if recipes else "")
    run = next((fact for fact in recording.of(GemmRun) if fact.method == method), None)
    layers = run.layers if run else 1
    shares = _shares(times, method)
    cells = tuple(
        _cell(gemm, bench, recipes, baseline, mode, layers, shares)
        for gemm in gemms
        if method == "role-true" or (gemm.quantizable and gemm.groups == 1)
    )
    return GemmTable(method, mode, baseline, recipes, refused, cells, layers, run)


ShareKey = tuple[str, Role, int, int, int]


def _shares(times: Iterable[tuple[int, GemmTime]], method: Method) -> dict[ShareKey, Figure]:
    """Median over samples of quantization over the whole call, by recipe, role and shape."""
    found: dict[ShareKey, Figure] = {}
    for line, time in times:
        if time.method != method or time.mode != "autocast" or not time.quantize_ms:
            continue
        parts = [part / whole for part, whole in zip(time.quantize_ms, time.samples_ms, strict=True) if whole > 0]
        if parts:
            key = (time.recipe, time.role, time.m, time.k, time.n)
            found[key] = Figure(
                statistics.median(parts), "1", "measured", n=len(parts), facts=(f"gemm_time line {line}",)
            )
    return found


def _cell(
    gemm: Gemm,
    bench: Benchmark,
    recipes: tuple[str, ...],
    baseline: str,
    mode: Mode,
    layers: int,
    shares: dict[ShareKey, Figure],
) -> Cell:
    timed_as = {recipe: recipe if gemm.quantizable else baseline for recipe in recipes}
    no_share = Figure.missing("1", "quantization was not told apart")
    none = Figure(0.0, "1", "measured")
    return Cell(
        operation=gemm.module,
        role=gemm.role,
        m=gemm.m,
        k=gemm.k,
        n=gemm.n,
        calls=gemm.calls,
        in_layer=gemm.calls >= layers and gemm.module != ONCE,
        ms={recipe: bench.figure(name, gemm, mode) for recipe, name in timed_as.items()},
        quantize_share={
            recipe: shares.get((name, gemm.role, gemm.m, gemm.k, gemm.n), no_share) if gemm.quantizable else none
            for recipe, name in timed_as.items()
        },
        launch_bound=tuple(r for r, name in timed_as.items() if bench.launch_bound(name, gemm, mode)),
    )


def roles_of(table: GemmTable) -> list[tuple[Role, list[Cell]]]:
    """The cells by role, in the order fprop, dgrad, wgrad."""
    return [(role, [cell for cell in table.cells if cell.role == role]) for role in ROLES]
