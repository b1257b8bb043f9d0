"""From Recording to Report: a pure function, whatever part of a run the Recording holds.

What the Recording does not hold is absent from the Report with a reason, so that the first lines of a
killed run make a Report as well as the whole of a finished one does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from lowprec_callback.analyze import kernel_rows
from lowprec_callback.analyze.conditions import asked, conditions
from lowprec_callback.analyze.finding_case import Case as FindingCase
from lowprec_callback.analyze.findings import findings
from lowprec_callback.analyze.gap import between
from lowprec_callback.analyze.gemm_rates import without_impossible
from lowprec_callback.analyze.gemms import Benchmark, GemmTotals, amdahl, speedup, totals
from lowprec_callback.analyze.health import bad_loss, clocks_text, last_loss, numerics, peak, scale_rows
from lowprec_callback.analyze.ledger import ledger
from lowprec_callback.analyze.library import LibraryWitness, not_taken
from lowprec_callback.analyze.memory_case import Ground, Subject
from lowprec_callback.analyze.memory_witness import Testimony, memory_witness
from lowprec_callback.analyze.numerics import DOUBTFUL, VOID, numerics_reports
from lowprec_callback.analyze.prediction import Ground as PredictionGround
from lowprec_callback.analyze.prediction import Side, predict
from lowprec_callback.analyze.products import beside
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.ranks import Slowest, merge
from lowprec_callback.analyze.reading import Scene, headline, reading
from lowprec_callback.analyze.slow_paths import Watched, slow_paths
from lowprec_callback.analyze.statistics import median_interval, ratio
from lowprec_callback.analyze.status import (
    import_text,
    plan_text,
    problems,
    restored_text,
    rounds_text,
    status_of,
    unfinished,
)
from lowprec_callback.analyze.timed import flaw as products_flaw
from lowprec_callback.analyze.timed import spare_products, timed
from lowprec_callback.analyze.traceview import TraceView, flaw, view
from lowprec_callback.analyze.verdict import NO_LIBRARY, Audit, verdict
from lowprec_callback.analyze.witnesses import SignatureBook
from lowprec_callback.recipes import RecipeCard, RecipeError, load_cards
from lowprec_callback.recording import (
    AttentionBackend,
    Card,
    Clocks,
    Dispatch,
    Environment,
    Fact,
    Gemm,
    GemmKernels,
    GemmTime,
    Header,
    Holding,
    HostTime,
    Imported,
    LibraryCall,
    LibraryLog,
    Loss,
    Memory,
    Model,
    ModuleTime,
    PeakHolding,
    Plan,
    Problem,
    Product,
    RankSummary,
    Recording,
    Refusal,
    Sampled,
    Scales,
    StepProducts,
    StepTime,
    Trace,
    Trial,
    UncachedWeights,
)
from lowprec_callback.report import (
    VERSION,
    Figure,
    Ledger,
    NumericsReport,
    RecipeReport,
    Report,
    Speedups,
    Verdict,
)

_F = TypeVar("_F", bound=Fact)
Numbered = list[tuple[int, _F]]
"""Facts with their line numbers."""


def analyze(recording: Recording) -> Report:
    """The whole answer. Raises nothing for a Recording that `recording.read` accepts, however short."""
    facts = _Facts(recording)
    measured = {name: _measure(name, facts) for name in facts.recipes}
    testimonies = _memory(facts)
    guards = _guards(facts)
    recipes = tuple(_report(name, facts, measured, testimonies.get(name), guards.get(name)) for name in facts.recipes)
    status, why = status_of(recording)
    base = next((part for part in recipes if part.baseline), None)
    if base is not None:
        recipes = tuple(_with_gap(part, base) for part in recipes)
    void = {part.name: part.void for part in recipes if part.void is not None}
    doubts = {part.name: part.guard.why for part in recipes if part.guard is not None and part.guard.state in DOUBTFUL}
    sentences: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    missing = unfinished(recording) if status in ("interrupted", "failed") else None
    if base is None:
        sentences = (f"Nothing was measured yet: {why or 'the Recording names no recipe'}.",)
    else:
        others = tuple(part for part in recipes if not part.baseline)
        scene = Scene(base, others, facts.on_cpu, void, missing, facts.imported is not None, doubts)
        sentences, read = headline(scene), reading(scene)
    header, model, environment, plan = (
        recording.last(Header),
        recording.last(Model),
        recording.last(Environment),
        recording.last(Plan),
    )
    return Report(
        version=VERSION,
        tool_version=header.tool_version if header else "unknown",
        created=header.created if header else "unknown",
        model=model.name if model else facts.imported.file if facts.imported else "unknown: no model was recorded",
        engine=model.engine if model else "imported" if facts.imported else "unknown",
        why_engine=model.why_engine if model else _why_no_engine(facts.imported),
        device=environment.device if environment else "unknown: no environment was recorded",
        versions=dict(environment.versions) if environment else {},
        headline=sentences,
        reading=read,
        baseline=facts.baseline or "unknown",
        recipes=recipes,
        plan=import_text(facts.imported)
        if facts.imported
        else plan_text(plan) + rounds_text(recording.last(Sampled), plan),
        shrunk=plan.shrunk if plan else None,
        problems=(*facts.flaws, *facts.unheard, *problems(recording, why)),
        restored=restored_text(recording),
        status=status,
        recording=str(recording.path) if recording.path else None,
        findings=findings(_cases(recipes, base, facts, measured, void)) if base is not None else (),
        conditions=conditions(environment, plan),
        ranks=facts.merged.report(facts.world) if facts.merged is not None else None,
    )


def _cases(
    recipes: Sequence[RecipeReport],
    base: RecipeReport,
    facts: _Facts,
    measured: dict[str, _Measured],
    void: dict[str, str],
) -> list[FindingCase]:
    """What the findings look at: every recipe that ran, unless its speed is void."""
    ran = tuple(part for part in recipes if part.refusal is None and part.name not in void)
    environment = facts.recording.last(Environment)
    base_views = measured[base.name].views
    return [
        FindingCase(
            part=part,
            base=base,
            everyone=ran,
            watched=facts.watched(part.name, facts.cards[part.name]) if part.name in facts.cards else Watched(),
            views=measured[part.name].views,
            traces=facts.traces.get(part.name, []),
            base_views=base_views,
            clocks=facts.clocks.get(part.name, []),
            bench_mhz=facts.benchmark.mhz,
            environment=environment.facts if environment else {},
            plan=facts.recording.last(Plan),
            te=facts.te,
            on_cpu=facts.on_cpu,
            ranks=facts.merged,
        )
        for part in ran
    ]


def _why_no_engine(imported: Imported | None) -> str:
    if imported is None:
        return "the Recording ends before the engine was chosen"
    return f"read from a capture of {imported.tool}"


class _Facts:
    """The Recording, sorted by what the analysis asks of it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        environment = recording.last(Environment)
        model = recording.last(Model)
        self.variables = environment.variables if environment else {}
        self.device_type = environment.device_type if environment else "cuda"
        self.on_cpu = self.device_type == "cpu"
        self.te = model is not None and model.engine == "transformer_engine"
        self.imported = recording.last(Imported)
        self.gemms: Numbered[Gemm] = _latest(recording.lines(Gemm))
        self.cards = {card.recipe: card for card in recording.of(Card)}
        self.refusals = {refusal.recipe: refusal for refusal in recording.of(Refusal)}
        self.benchmark = Benchmark(without_impossible(recording).lines(GemmTime))
        override = self.variables.get("NVTE_BACKWARD_OVERRIDE")
        self.book = SignatureBook(recording.of(GemmTime), self.cards, override)
        self.steps = _by_recipe(
            (line, step)
            for line, step in recording.lines(StepTime)
            if step.discarded is None and math.isfinite(step.ms) and step.ms > 0
        )
        self.hosts = _by_recipe(recording.lines(HostTime))
        self.losses = _by_recipe(recording.lines(Loss))
        self.memory = _by_recipe(recording.lines(Memory))
        self.holdings = _by_recipe(recording.lines(Holding))
        self.peaks = _by_recipe(recording.lines(PeakHolding))
        self.clocks = _by_recipe(recording.lines(Clocks))
        self.dispatches = _by_recipe(recording.lines(Dispatch))
        calls = _by_recipe(recording.lines(LibraryCall))
        self.library = {
            log.recipe: LibraryWitness.of(calls.get(log.recipe, []), log) for log in recording.of(LibraryLog)
        }
        self.scales = _by_recipe(recording.lines(Scales))
        self.products = _by_recipe(recording.lines(Product))
        self._watched: dict[str, Watched] = {}
        self._capability = environment.compute_capability if environment else None
        counted = [(line, fact, products_flaw(fact)) for line, fact in recording.lines(GemmKernels)]
        self.gemm_kernels = _by_recipe((line, fact) for line, fact, wrong in counted if wrong is None)
        stepped = [(line, fact, products_flaw(fact)) for line, fact in recording.lines(StepProducts)]
        self.step_products = _by_recipe((line, fact) for line, fact, wrong in stepped if wrong is None)
        traces = [(line, trace, flaw(trace)) for line, trace in recording.lines(Trace)]
        self.traces = _by_recipe((line, trace) for line, trace, wrong in traces if wrong is None)
        self.flaws = tuple(
            f"{what} of {fact.recipe} on line {line} cannot be used: {wrong}"
            for what, judged in (
                ("the trace", traces),
                ("the counted kernels", counted),
                ("the products of a step", stepped),
            )
            for line, fact, wrong in judged
            if wrong is not None
        )
        self.world = _world(environment)
        summaries = recording.lines(RankSummary)
        self.merged = merge(summaries) if summaries else None
        """What all ranks measured."""
        self.unheard = (
            (
                f"ranks: {self.world} processes trained, and the sweep ended before the others' measurements were "
                "gathered: these are rank 0's alone",
            )
            if self.world > 1 and self.merged is None
            else ()
        )
        self.recipes = self._names()
        self.baseline = self.recipes[0] if self.recipes else None

    def _names(self) -> tuple[str, ...]:
        """Every recipe that is mentioned, in the plan's order, the baseline first."""
        plan = self.recording.last(Plan)
        found = [*(plan.recipes if plan else ()), *self.cards, *self.steps, *self.refusals]
        baselines = [plan.baseline] if plan else [card.recipe for card in self.cards.values() if card.baseline]
        return tuple(dict.fromkeys([*baselines[:1], *found]))

    @cached_property
    def _built_in(self) -> dict[str, RecipeCard]:
        return load_cards()

    def watched(self, name: str, card: Card) -> Watched:
        """What the watched step of a recipe showed of slow paths."""
        if name not in self._watched:
            self._watched[name] = self._watch(name, card)
        return self._watched[name]

    def _watch(self, name: str, card: Card) -> Watched:
        plan = self.recording.last(Plan)
        return Watched(
            gemms=[gemm for _, gemm in self.gemms],
            dispatches=[fact for _, fact in self.dispatches.get(name, [])],
            backends=[fact for fact in self.recording.of(AttentionBackend) if fact.recipe == name],
            uncached=[fact for fact in self.recording.of(UncachedWeights) if fact.recipe == name],
            micro_batches=plan.micro_batches if plan else 1,
            card=_as_card(card, self._built_in),
            compute_capability=self._capability,
        )

    def refused(self, name: str) -> str | None:
        """Why a recipe has no steps at all; a recipe that was given up after some steps is not refused."""
        if name not in self.refusals or self.steps.get(name):
            return None
        refusal = self.refusals[name]
        return f"{refusal.reason} ({refusal.source})" if refusal.source else refusal.reason


@dataclass
class _Measured:
    """One recipe's numbers that do not need another recipe's."""

    step: Figure
    rounds: dict[int, list[float]]
    host: Figure
    bench: GemmTotals
    views: list[TraceView] = field(default_factory=list)
    ledger: Ledger | None = None
    no_ledger: str | None = None
    bad_loss: float | None = None


def _world(environment: Environment | None) -> int:
    """How many processes trained."""
    text = environment.facts.get("world size", "1") if environment else "1"
    return int(text) if text.isdecimal() else 1


def _as_card(fact: Card, built_in: Mapping[str, RecipeCard]) -> RecipeCard | None:
    """The built-in card of this name with the arguments that ran; None for a card of the user's own."""
    card = built_in.get(fact.recipe)
    try:
        return card.with_arguments(fact.arguments) if card is not None else None
    except RecipeError:
        return None


def _latest(gemms: Numbered[Gemm]) -> Numbered[Gemm]:
    """Captured GEMMs, one for each module, role, shape and family: a later one replaces an earlier."""
    found = {(gemm.module, gemm.role, gemm.m, gemm.k, gemm.n, gemm.family): (line, gemm) for line, gemm in gemms}
    return list(found.values())


def _by_recipe(facts: Iterable[tuple[int, _F]]) -> dict[str, Numbered[_F]]:
    found: dict[str, Numbered[_F]] = {}
    for line, fact in facts:
        found.setdefault(fact.recipe, []).append((line, fact))  # type: ignore[attr-defined]
    return found


def _lines(facts: Sequence[tuple[int, Fact]]) -> list[int]:
    return [line for line, _ in facts]


def _measure(name: str, facts: _Facts) -> _Measured:
    steps = facts.steps.get(name, [])
    rounds: dict[int, list[float]] = {}
    for _, step in steps:
        rounds.setdefault(step.round, []).append(step.ms)
    slowest = facts.merged.slowest.get(name) if facts.merged is not None else None
    if slowest is not None:
        # A step in which ranks wait for each other takes as long as the slowest of them.
        rounds = {number: list(samples) for number, samples in slowest.rounds.items()}
    if rounds:
        estimate = median_interval(rounds)
        source = lines_of("rank_summary", [slowest.line]) if slowest else lines_of("step_time", _lines(steps))
        step_ms = Figure(estimate.value, "ms", "measured", estimate.low, estimate.high, estimate.n, source)
    else:
        step_ms = Figure.missing("ms", facts.refused(name) or f"no timed step of {name} was recorded")
    views = [view(trace, line) for line, trace in facts.traces.get(name, [])]
    made, no_ledger = ledger(views, step_ms, facts.device_type)
    if made is not None and slowest is not None:
        made = replace(made, note=" ".join([*([made.note] if made.note else []), _whose(slowest)]))
    return _Measured(
        step=step_ms,
        rounds=rounds,
        host=_host(name, facts),
        bench=_bench(name, facts),
        views=views,
        ledger=made,
        no_ledger=no_ledger,
        bad_loss=bad_loss(facts.losses.get(name, [])),
    )


def _whose(slowest: Slowest) -> str:
    """Whose work a ledger shows, where several ranks train."""
    return (
        f"Kinds of work are those of rank 0, by its own trace; the step that they are part of is that of the slowest "
        f"rank, rank {slowest.rank} ({slowest.host})."
    )


def _bench(name: str, facts: _Facts) -> GemmTotals:
    if facts.imported is not None and not facts.gemms:
        missing = Figure.missing("ms", "a profiler's capture tells no GEMM shapes, so there is no benchmark of them")
        return GemmTotals((), missing, missing, 0, 0)
    return totals(facts.gemms, facts.benchmark, name, facts.baseline or name)


def _host(name: str, facts: _Facts) -> Figure:
    found = facts.hosts.get(name, [])
    by_round: dict[int, list[float]] = {}
    for _, host in found:
        if math.isfinite(host.ms):
            by_round.setdefault(host.round, []).append(host.ms)
    if not by_round:
        return Figure.missing("ms", f"no host time of {name} was recorded")
    estimate = median_interval(by_round)
    lines = lines_of("host_time", _lines(found))
    return Figure(estimate.value, "ms", "measured", estimate.low, estimate.high, estimate.n, lines)


def _report(
    name: str,
    facts: _Facts,
    measured: dict[str, _Measured],
    testimony: Testimony | None,
    guard: NumericsReport | None,
) -> RecipeReport:
    card = facts.cards.get(name)
    title = card.title if card else name
    is_baseline = name == facts.baseline
    refusal = facts.refused(name)
    if refusal is not None:
        return RecipeReport(name, title, is_baseline, refusal=refusal)
    part = measured[name]
    base = measured[facts.baseline or name]
    losses = facts.losses.get(name, [])
    return RecipeReport(
        name=name,
        title=title,
        baseline=is_baseline,
        step_ms=part.step,
        host_ms=part.host,
        speedups=_speedups(base, part, is_baseline),
        peak_gb=peak(name, facts.memory.get(name, []), facts.on_cpu),
        samples=tuple((number, tuple(times)) for number, times in sorted(part.rounds.items())),
        ledger=part.ledger,
        no_ledger=part.no_ledger,
        gemms=part.bench.rows,
        gemm_kernel_ms=part.bench.kernel,
        gemm_autocast_ms=part.bench.autocast,
        verdict=_verdict(name, facts, part, card, testimony),
        memory=testimony.report if testimony else None,
        scales=scale_rows(facts.scales.get(name, [])),
        loss=last_loss(name, losses),
        clocks=clocks_text([clock for _, clock in facts.clocks.get(name, [])]),
        numerics=numerics(losses, facts.scales.get(name, [])),
        guard=guard,
        void=_void(part.bad_loss, guard),
        prediction=None if is_baseline else predict(_ground(base, facts), Side(name, part.step, part.bench)),
        asked=asked(card) if card else None,
    )


def _ground(base: _Measured, facts: _Facts) -> PredictionGround:
    plan, name = facts.recording.last(Plan), facts.baseline or ""
    return PredictionGround(
        base=Side(name, base.step, base.bench),
        ledger=base.ledger,
        no_ledger=base.no_ledger,
        views=base.views,
        hosts=facts.hosts.get(name, []),
        modules=facts.recording.lines(ModuleTime),
        micro_batches=plan.micro_batches if plan else 1,
    )


def _with_gap(part: RecipeReport, base: RecipeReport) -> RecipeReport:
    return part if part.baseline or part.refusal is not None else replace(part, gap=between(base, part))


def _void(bad_loss: float | None, guard: NumericsReport | None) -> str | None:
    """Why the speed counts for nothing. The guard's word comes first: it starts every recipe from the same state."""
    if guard is not None and guard.state in VOID:
        return guard.why
    if bad_loss is None:
        return None
    if guard is not None and guard.state == "ok":
        return f"the loss became {bad_loss} in its timed steps, though it is sound from the state before the profile"
    return f"the loss became {bad_loss}"


def _guards(facts: _Facts) -> dict[str, NumericsReport]:
    """The numerics guard of every recipe that ran; empty for a Recording that knows none."""
    plan = facts.recording.last(Plan)
    trials = _by_recipe(facts.recording.lines(Trial))
    if plan is None or not (plan.guard_steps or plan.no_guard or trials):
        return {}
    why = plan.no_guard or f"the run ended before it ({status_of(facts.recording)[1] or 'it was cut short'})"
    names = [name for name in facts.recipes if facts.refused(name) is None]
    return numerics_reports(names, facts.baseline or "", trials, facts.scales, facts.cards, why)


def _speedups(base: _Measured, part: _Measured, is_baseline: bool) -> Speedups:
    kernel = speedup(base.bench.kernel, part.bench.kernel)
    gemm_in_step = (
        base.ledger.buckets["gemm"]
        if base.ledger is not None
        else Figure.missing("ms", f"no ledger of the baseline: {base.no_ledger}")
    )
    allowed = amdahl(base.step, gemm_in_step, kernel)
    autocast = speedup(base.bench.autocast, part.bench.autocast)
    if is_baseline:
        # Against itself every ratio is 1 exactly; two samples of the same noise would only blur that.
        exact = [
            Figure(1.0, "x", facts=figure.facts) if figure.value is not None else figure
            for figure in (kernel, autocast, allowed)
        ]
        step = Figure(1.0, "x", facts=base.step.facts) if base.step.known else _no_ratio(base.step)
        return Speedups(exact[0], exact[1], exact[2], step)
    if not base.rounds or not part.rounds:
        return Speedups(kernel, autocast, allowed, _no_ratio(part.step if base.rounds else base.step))
    estimate = ratio(base.rounds, part.rounds)
    source = (*base.step.facts, *part.step.facts)
    step = Figure(estimate.value, "x", "derived", estimate.low, estimate.high, estimate.n, source)
    return Speedups(kernel, autocast, allowed, step)


def _no_ratio(missing: Figure) -> Figure:
    return Figure.missing("x", missing.reason or "no step was timed")


def _override(facts: _Facts, card: Card) -> str | None:
    """Who asked for a wide backward pass, if anyone did."""
    variable = facts.variables.get("NVTE_BACKWARD_OVERRIDE")
    argument = card.arguments.get("backward_override")
    if variable:
        return f"NVTE_BACKWARD_OVERRIDE={variable}"
    return f"backward_override={argument}" if argument else None


def _memory(facts: _Facts) -> dict[str, Testimony]:
    """The memory witness on every recipe that ran."""
    environment, model = facts.recording.last(Environment), facts.recording.last(Model)
    plan = facts.recording.last(Plan)
    ground = Ground(
        gemms=[gemm for _, gemm in facts.gemms],
        micro_batches=plan.micro_batches if plan else 1,
        te=facts.te,
        on_cpu=facts.on_cpu,
        compute_capability=environment.compute_capability if environment else None,
        parameters=model.parameters if model else 0,
        parameter_bytes=model.parameter_bytes if model else 0,
        rank_bytes=model.rank_bytes if model else None,
        parameter_facts=lines_of("model", [line for line, _ in facts.recording.lines(Model)][-1:]),
    )
    subjects = [
        Subject(
            card,
            facts.memory.get(name, []),
            facts.dispatches.get(name, []),
            _override(facts, card),
            facts.holdings.get(name, []),
            next(iter(facts.peaks.get(name, [])[-1:]), None),
        )
        for name, card in facts.cards.items()
        if facts.refused(name) is None
    ]
    return memory_witness(ground, subjects, facts.baseline or "")


def _verdict(
    name: str, facts: _Facts, part: _Measured, card: Card | None, testimony: Testimony | None
) -> Verdict | None:
    if card is None:
        return None
    override = _override(facts, card)
    if name == facts.baseline and not card.baseline:
        card = Card(**{**card.__dict__, "baseline": True})
    counted = facts.gemm_kernels.get(name, [])
    if counted and not facts.gemms:
        told = kernel_rows.kernel_verdict(counted, card, facts.imported, override)
        return replace(told, slow_paths=slow_paths(part.views, facts.watched(name, card)))
    products = [fact for _, fact in facts.products.get(name, [])]
    evidence = timed(
        [fact for _, fact in facts.step_products.get(name, [])],
        part.views,
        facts.book,
        sum(gemm.calls for _, gemm in facts.gemms),
        on_cpu=facts.on_cpu,
        compiled=any(problem.where == "torch.compile" for problem in facts.recording.of(Problem)),
    )
    found = verdict(
        facts.gemms,
        facts.dispatches.get(name, []),
        evidence,
        Audit(card, facts.te, override),
        facts.book.contradictions.get(name, ()),
        not_taken(name, [gemm for _, gemm in facts.gemms], facts.library)
        if facts.on_cpu
        else slow_paths(part.views, facts.watched(name, card)),
        beside(facts.products.get(name, []), [gemm for _, gemm in facts.gemms]),
        facts.library.get(name, NO_LIBRARY),
        spare_products(products),
    )
    against = testimony.against if testimony and any(row.verdict == "confirmed" for row in found.rows) else ()
    return replace(found, disagreements=(*found.disagreements, *(f"memory: {text}" for text in against)))
