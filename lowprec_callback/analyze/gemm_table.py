"""The GEMM benchmark as a table: by operation and role, summed over roles, a layer and the model.

With t(g, recipe) the median time of one call of GEMM g [ms] and c(g) its calls in one step of the model:

    role sum    sum of t over a layer's GEMMs of that role
    layer       sum of t over a layer's GEMMs, all roles
    model       sum of c x t over all GEMMs, those that stand outside the layers (the LM head) included

Which GEMMs make a layer is the Recording's word (`Gemm.layers`). Where layers are not alike (some with an MLP, some
with experts) there is no time of "a layer", and its sums are missing with that reason.

A sum with a missing term is missing, in that term's words. GEMMs that no recipe reaches enter every recipe's sums
with the baseline's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowprec_callback.analyze.gemms import Benchmark, speedup
from lowprec_callback.analyze.peaks import Peak
from lowprec_callback.recording import ROLES, Card, Gemm, GemmRun, GemmTime, Method, Mode, Recording, Refusal, Role
from lowprec_callback.report import Figure

PAYS = 1.05
"""Below this speedup over the fastest wider recipe, a narrower one is not worth its risk for that operation."""

BITS = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4}
"""Width of a recipe's operands, by format."""


@dataclass(frozen=True)
class Cell:
    """One operation in one role."""

    operation: str
    role: Role
    m: int
    k: int
    n: int
    calls: int
    layers: int | None
    """Transformer layers that have it (`Gemm.layers`); 0: it stands outside of them; None: not known."""
    ms: dict[str, Figure]
    """One call, by recipe."""
    quantize_share: dict[str, Figure]
    """Share of that time which is quantization, by recipe; autocast only."""
    quantizable: bool = True
    """Whether a recipe reaches it; else it has the baseline's time in all of them."""
    groups: int = 1
    """GEMMs in a grouped call (experts); `m` is the sum over them."""
    launch_bound: tuple[str, ...] = ()
    """Recipes in which the host needs longer to launch it than the GPU to run it."""

    @property
    def in_layer(self) -> bool:
        """Whether a transformer layer has it."""
        return bool(self.layers)

    @property
    def flops(self) -> int:
        """Floating-point operations of one call, the same in every role: 2 M K N."""
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class BreakEven:
    """Operations in which a recipe gains too little over the fastest of the wider recipes."""

    recipe: str
    keep: str
    """The wider recipe to stay with."""
    gains: dict[str, Figure]
    """t(keep) / t(recipe) by operation, all roles together; each below `PAYS`."""


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
    left_out: dict[str, str] = field(default_factory=dict)
    """Recipes that have no time in this table, all for one reason, and that reason."""
    cards: dict[str, Card] = field(default_factory=dict)
    peaks: dict[str, Peak] = field(default_factory=dict)
    """The dense peak of the GPU in each recipe's format, or why there is none; empty on a CPU."""

    @property
    def has_layer(self) -> bool:
        """Whether these GEMMs are a model's, rather than shapes that were listed one by one."""
        return any(cell.layers != 0 for cell in self.cells)

    @property
    def quantizes(self) -> bool:
        """Whether any recipe does."""
        return any(self.cards[recipe].scaling != "none" for recipe in self.recipes if recipe in self.cards)

    def why_no_layer(self) -> str | None:
        """Why there is no time of "a layer", or None if there is one."""
        if any(cell.layers is None for cell in self.cells):
            return "the Recording does not say which GEMMs make a layer"
        kinds: dict[int, dict[str, None]] = {}
        for cell in self.cells:
            if cell.layers:
                kinds.setdefault(cell.layers, {})[cell.operation] = None
        if not kinds:
            return "no GEMM stands in a transformer layer"
        if len(kinds) == 1:
            return None
        told = "; ".join(f"{', '.join(names)} in {layers}" for layers, names in sorted(kinds.items(), reverse=True))
        return f"layers are not alike, so there is no time of one layer ({told})"

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
        return self._of_layer(recipe, [cell for cell in self.cells if cell.in_layer and cell.role == role])

    def layer(self, recipe: str) -> Figure:
        """One layer's GEMMs."""
        return self._of_layer(recipe, [cell for cell in self.cells if cell.in_layer])

    def _of_layer(self, recipe: str, cells: Sequence[Cell]) -> Figure:
        why = self.why_no_layer()
        return Figure.missing("ms", why) if why else self.total(recipe, cells)

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
        whole = self.layer(recipe)
        if whole.value is None:
            return Figure.missing("1", whole.reason or "missing")
        parts = []
        for cell in self.cells:
            if not cell.in_layer:
                continue
            share, time = cell.quantize_share[recipe], cell.ms[recipe]
            if share.value is None or time.value is None:
                return Figure.missing("1", share.reason or time.reason or "missing")
            parts.append(share.value * time.value)
        return Figure(sum(parts) / whole.value, "1", facts=whole.facts)

    def against(self, recipe: str, other: str) -> Figure:
        """How many times faster `recipe` runs a layer's GEMMs than `other` does."""
        return speedup(self.layer(other), self.layer(recipe))

    def layer_rate(self, recipe: str) -> Figure:
        """TFLOP/s of a layer's GEMMs: 2 * (sum of M K N) / t, with t in ms."""
        time = self.layer(recipe)
        if time.value is None:
            return Figure.missing("TFLOP/s", time.reason or "missing")
        flops = sum(cell.flops for cell in self.cells if cell.in_layer)
        return _rate(flops, time)

    def cell_rate(self, cell: Cell, recipe: str) -> Figure:
        """TFLOP/s of one GEMM."""
        return _rate(cell.flops, cell.ms[recipe])

    def break_even(self) -> list[BreakEven]:
        """Where each recipe gains too little to be worth its narrower format, or loses.

        A recipe is held against the fastest of those with wider operands: NVFP4 against the best FP8 recipe (or BF16),
        FP8 against BF16. Operations with a time missing on either side are left out, and so are those that no recipe
        reaches.
        """
        found: dict[tuple[str, str], dict[str, Figure]] = {}
        reached = dict.fromkeys(cell.operation for cell in self.cells if cell.quantizable)
        for recipe in self.recipes:
            wider = [other for other in self.recipes if self._bits(other) > self._bits(recipe)]
            for name in reached:
                times = {other: self.operation(other, name).value for other in wider}
                known = {other: time for other, time in times.items() if time is not None}
                if not known:
                    continue
                keep = min(known, key=lambda other: known[other])
                gain = speedup(self.operation(keep, name), self.operation(recipe, name))
                if gain.value is not None and gain.value < PAYS:
                    found.setdefault((recipe, keep), {})[name] = gain
        return [BreakEven(recipe, keep, gains) for (recipe, keep), gains in found.items()]

    def _bits(self, recipe: str) -> int:
        card = self.cards.get(recipe)
        return min((BITS.get(name, 0) for name in card.fprop), default=0) if card else 0


def _rate(flops: int, time: Figure) -> Figure:
    """Floating-point operations over a time in ms, as TFLOP/s; the shortest time is the highest rate."""
    if not time.value:
        return Figure.missing("TFLOP/s", time.reason or "a time of zero has no rate")
    low = high = None
    if time.low is not None and time.high is not None and time.low > 0:
        low, high = flops / time.high / 1e9, flops / time.low / 1e9
    return Figure(flops / time.value / 1e9, "TFLOP/s", low=low, high=high, facts=time.facts)


def gemm_table(
    recording: Recording, method: Method, mode: Mode, peaks: dict[tuple[str, Role], Peak] | None = None
) -> GemmTable:
    """Make the table from a Recording of `lowprec gemm`; `peaks` are those of `gemm_rates.peaks_of`."""
    times = recording.lines(GemmTime)
    bench = Benchmark(times, method)
    cards = recording.of(Card)
    refused = {fact.recipe: fact.reason for fact in recording.of(Refusal)}
    timed = [card.recipe for card in cards if card.recipe not in refused and bench.has(card.recipe)]
    left_out = _left_out(fact for _, fact in times if (fact.method, fact.mode) == (method, mode))
    recipes = tuple(recipe for recipe in timed if recipe not in left_out)
    baseline = next((card.recipe for card in cards if card.baseline), recipes[0] if recipes else "")
    run = next((fact for fact in recording.of(GemmRun) if fact.method == method), None)
    shares = _shares(times, method)
    cells = tuple(
        _cell(gemm, bench, recipes, baseline, mode, shares)
        for gemm in recording.of(Gemm)
        if method == "role-true" or (gemm.quantizable and gemm.groups == 1)
    )
    return GemmTable(
        method=method,
        mode=mode,
        baseline=baseline,
        recipes=recipes,
        refused=refused,
        left_out={recipe: left_out[recipe] for recipe in timed if recipe in left_out},
        cells=cells,
        layers=run.layers if run else 1,
        run=run,
        cards={card.recipe: card for card in cards},
        peaks={recipe: peak for (recipe, role), peak in (peaks or {}).items() if role == "fprop"},
    )


def _left_out(times: Iterable[GemmTime]) -> dict[str, str]:
    """Recipes that failed on every shape (of two or more) for one and the same reason, and the reason."""
    failures: dict[str, list[str | None]] = {}
    for time in times:
        failures.setdefault(time.recipe, []).append(time.failure)
    return {
        recipe: found[0]
        for recipe, found in failures.items()
        if len(found) > 1 and found[0] is not None and len(set(found)) == 1
    }


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
        layers=gemm.layers,
        ms={recipe: bench.figure(name, gemm, mode) for recipe, name in timed_as.items()},
        quantize_share={
            recipe: shares.get((name, gemm.role, gemm.m, gemm.k, gemm.n), no_share) if gemm.quantizable else none
            for recipe, name in timed_as.items()
        },
        quantizable=gemm.quantizable,
        groups=gemm.groups,
        launch_bound=tuple(r for r, name in timed_as.items() if bench.launch_bound(name, gemm, mode)),
    )


def roles_of(table: GemmTable) -> list[tuple[Role, list[Cell]]]:
    """The cells by role, in the order fprop, dgrad, wgrad."""
    return [(role, [cell for cell in table.cells if cell.role == role]) for role in ROLES]
