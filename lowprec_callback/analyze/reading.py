"""The sentences: verdict first, the reason second, each with the numbers that it rests on.

A sentence whose number is not known says why instead; none ever prints a number that is not there. And none says more
than its evidence: no speed is praised of a recipe that is not shown to have run (`proof`), no cause is named from a
ledger that is incomplete, and nothing is read from a difference that the timed steps do not show. docs/findings.md
lists what each sentence needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowprec_callback.analyze.gap import RESIDUAL
from lowprec_callback.analyze.ledger import OTHER_LIMIT, OTHER_LIMIT_CPU, RESIDUAL_LIMIT
from lowprec_callback.analyze.statistics import is_different
from lowprec_callback.report import Figure, KernelRow, Ledger, RecipeReport, VerdictRow

SHOWN = 0.5
"""Share of what a recipe can reach that must be shown to have run as asked before its speed is called its own."""

MOST = 0.5
"""Share of the GEMM calls that must be launch-bound before launching is the reason for what the benchmark says."""

HOST_ALONE = 0.90
"""Host time over step time from which a step is launch-bound, if the GPU is known to wait at all."""

HOST_WITH_IDLE, IDLE_HIGH = 0.75, 0.25
"""A smaller share of host time suffices where the GPU is idle for more than a quarter of the step."""

IDLE_LOW = 0.10
"""A GPU that is idle for less than this is not waiting for the host, however long the host took: on long
steps the launch queue fills up, and the host's time is then the GPU's."""

NEAR_ONE = 1.05
"""Below this the GEMMs themselves gain next to nothing."""

BELOW_ONE = 0.90
"""GEMM speedup up to which a recipe's GEMMs are called slower, not as fast."""

NEAR_STEP = 0.75
"""The step follows its GEMMs if it realizes this share of the gain that they promised."""


@dataclass(frozen=True)
class Scene:
    """What the sentences are about."""

    baseline: RecipeReport
    others: tuple[RecipeReport, ...]
    on_cpu: bool
    void: dict[str, str]
    """Recipes that do not compute, and why as a clause: `the loss became nan`."""
    interrupted: str | None = None
    """If the run did not come to its end: what is missing."""
    imported: bool = False
    """Whether the Recording was made from a profiler's capture."""
    doubts: dict[str, str] = field(default_factory=dict)
    """Recipes that may not compute what the baseline does, and why as a clause."""

    @property
    def measured(self) -> tuple[RecipeReport, ...]:
        """Recipes beside the baseline with a known speedup that means something."""
        if self.baseline.name in self.void:
            return ()
        return tuple(
            part
            for part in self.others
            if part.name not in self.void and part.speedups is not None and part.speedups.step.value is not None
        )

    @property
    def candidates(self) -> tuple[RecipeReport, ...]:
        """Those of them that are shown to have run; all of them where none is."""
        shown = tuple(part for part in self.measured if proof(part).shown)
        return shown or self.measured

    @property
    def best(self) -> RecipeReport | None:
        """The fastest of the candidates."""
        return max(self.candidates, key=_step_speedup, default=None)


@dataclass(frozen=True)
class Proof:
    """Whether a recipe is shown to have run, by its verdict."""

    why_not: str
    """What is not shown, as a sentence; empty if the recipe is shown to have run."""
    part: str = ""
    """`93.8% of its linear FLOPs`: what ran as asked, where that is not all that the recipe can reach."""

    @property
    def shown(self) -> bool:
        """Whether the recipe's steps may be called the recipe's."""
        return not self.why_not


def proof(part: RecipeReport) -> Proof:
    """What a recipe's verdict shows.

    Shown means: of what a recipe can reach, at least `SHOWN` is confirmed (by FLOPs; in a capture, which knows no
    shapes, by kernel time), and not most of its rows are unproven. A verdict without any coverage watched nothing.
    """
    verdict = part.verdict
    if verdict is None:
        return Proof("what ran was not watched.")
    rows: Sequence[VerdictRow | KernelRow] = verdict.rows
    share, whole, of = verdict.te_coverage.value, verdict.coverage.value, "linear FLOPs"
    if verdict.kernels and not verdict.rows:
        rows, of = verdict.kernels, "GEMM kernel time"
        share = whole = _confirmed_time(verdict.kernels)
    inside = [row for row in rows if row.verdict != "outside"]
    unproven = sum(row.verdict == "unproven" for row in inside)
    if whole is None and not verdict.kernels and not any(row.witnesses for row in verdict.rows):
        return Proof(f"what ran was not watched ({verdict.coverage.reason}).")
    if share is None or share < SHOWN or 2 * unproven > len(inside):
        return Proof(verdict.summary)
    if share >= 1 and not any(row.verdict == "fallback" for row in inside):
        return Proof("")
    return Proof("", f"{_percent(share if whole is None else whole)} of its {of}")


def _confirmed_time(rows: Sequence[KernelRow]) -> float | None:
    """Share of the linear layers' GEMM kernel time whose kernels are those that the recipe asks for."""
    inside = [row for row in rows if row.verdict != "outside"]
    total = math.fsum(row.ms for row in inside)
    if total <= 0:
        return None
    return min(1.0, math.fsum(row.ms for row in inside if row.verdict == "confirmed") / total)


def _baseline_fell(base: RecipeReport) -> bool:
    """Whether most of the baseline is not shown to have run as asked: "faster" would be faster than nobody knows what.

    What the model itself decides (FP16 layers, a region that it switches off) counts as asked for.
    """
    verdict = base.verdict
    if verdict is None or verdict.coverage.value is None or not verdict.rows:
        return False
    total = math.fsum(row.share for row in verdict.rows)
    meant = math.fsum(row.share for row in verdict.rows if row.verdict in ("confirmed", "by_request", "outside"))
    return total > 0 and meant < SHOWN * total


def headline(scene: Scene) -> tuple[str, ...]:
    """Verdict first. At most a handful of sentences, most important first."""
    sentences = [
        f"{name}: {why}, so its speed is void: a step that computes nothing useful can be fast."
        for name, why in scene.void.items()
    ]
    sentences += [
        f"{name}: {why}. Look into that before you count on its speed."
        for name, why in scene.doubts.items()
        if name not in scene.void
    ]
    sentences += _verdict_first(scene)
    if scene.interrupted:
        sentences.append(scene.interrupted)
    if scene.imported:
        sentences.append("All steps were timed with the profiler attached, which slows the host.")
    return tuple(sentences)


def _verdict_first(scene: Scene) -> list[str]:
    """The best recipe, as far as it is shown to have run, and what did not run as asked."""
    best = scene.best
    if best is None:
        told = [_nothing_measured(scene), *_fallbacks(scene)]
        alone = scene.imported and not scene.others
        return [scene.baseline.verdict.summary, *told] if alone and scene.baseline.verdict is not None else told
    if not proof(best).shown:
        return [_not_shown(best, scene), *_fallbacks(scene, besides=[best])]
    faster = [part for part in scene.measured if _step_speedup(part) > _step_speedup(best)]
    unshown = [part for part in faster if not proof(part).shown]
    fallback = _fallbacks(scene, besides=unshown)
    first, *rest = [_against_unshown(best, scene)] if _baseline_fell(scene.baseline) else _about_best(best, scene)
    told = [first, *fallback, *rest]
    if best.verdict is not None and not any(text.startswith(_not_asked(best)) for text in fallback):
        told.append(best.verdict.summary)
    return [*told, *(_not_shown(part, scene) for part in unshown)]


def reading(scene: Scene) -> tuple[str, ...]:
    """The three-way reading, a sentence or a few for each recipe that was timed; then cautions."""
    told = [_read(part, scene) for part in scene.others if part.refusal is None]
    for part in (scene.baseline, *scene.others):
        if part.ledger is not None and not part.ledger.complete:
            told.append(f"{part.name}: its ledger is incomplete: {'; '.join(part.ledger.complaints)}.")
    return tuple(told)


def launch_bound(part: RecipeReport, on_cpu: bool = False) -> bool:
    """Whether the host, not the GPU, sets the pace of this recipe's step.

    True if idle / step >= 0.10, and host / step >= 0.90, or >= 0.75 where idle / step > 0.25. host: launching one step
    from an idle GPU [ms]; step: timed median [ms]. Without a ledger whose idle time counts, nobody knows: a host that
    waits for the GPU in each step (for a value that it logs, say) takes as long as the step too."""
    idle = idle_share(part)
    host = _host_share(part)
    if on_cpu or host is None or idle is None or idle < IDLE_LOW:
        return False
    return host >= HOST_ALONE or (idle > IDLE_HIGH and host >= HOST_WITH_IDLE)


def _host_share(part: RecipeReport) -> float | None:
    """host / step [1]: how much of the timed step the host needs to launch one."""
    if part.host_ms.value is None or not part.step_ms.value:
        return None
    return part.host_ms.value / part.step_ms.value


def idle_share(part: RecipeReport) -> float | None:
    """idle / wall of a recipe's ledger [1], where there is one and its trace is whole."""
    ledger = part.ledger
    if ledger is None or not ledger.wall.value or ledger.idle.value is None or not trace_is_whole(ledger):
        return None
    return ledger.idle.value / ledger.wall.value


def trace_is_whole(ledger: Ledger) -> bool:
    """Whether the traced steps show all kernels, at the speed that they have in a timed step.

    So it is of a complete ledger, and of one that complains of nothing but work of unknown kind: such a kernel is busy
    all the same, so what it takes is no idle time. Where kernels are missing, or took longer than in the timed step,
    neither idle time nor any kernel's time counts.
    """
    if ledger.complete:
        return True
    wall, other, residual = ledger.wall.value, ledger.buckets["other"].value, ledger.residual.value
    if not wall or other is None or residual is None or abs(residual) > RESIDUAL_LIMIT * wall:
        return False
    on_cpu = ledger.busy.origin == "estimated"
    unknown = other > (OTHER_LIMIT_CPU if on_cpu else OTHER_LIMIT) * wall
    return unknown and len(ledger.complaints) == 1


def unexplained(ledger: Ledger) -> float:
    """|residual| + the bucket `other` [ms]: time that may be of any kind; infinity where it is not known."""
    other, residual = ledger.buckets["other"].value, ledger.residual.value
    return math.inf if other is None or residual is None else other + abs(residual)


def other_products(base: RecipeReport) -> float:
    """Products in the ledger's bucket `gemm` under the name of a module that is no captured linear layer [ms].

    Convolutions mostly: they run on the same units, and no recipe reaches them."""
    layers = {row.operation for row in base.gemms}
    places = base.ledger.places if base.ledger is not None and layers else ()
    found = (
        place.ms.value or 0.0 for place in places if place.bucket == "gemm" and place.operation not in {*layers, ""}
    )
    return math.fsum(found)


def _no_amdahl(base: RecipeReport) -> str | None:
    """Why the GEMM time of the baseline's step, which Amdahl's ceiling rests on, is not known."""
    if _doubtful(base.ledger):
        return f"the ledger of {base.name} is incomplete"
    if base.ledger is not None and other_products(base) > OTHER_LIMIT * (base.ledger.wall.value or 0.0):
        return f"{_ms(other_products(base))} ms of the products in the {base.name} step are no linear layer's"
    return None


def _doubtful(ledger: Ledger | None) -> bool:
    """Whether there is a ledger that names no cause, because it is incomplete."""
    return ledger is not None and not ledger.complete


def _step_speedup(part: RecipeReport) -> float:
    assert part.speedups is not None
    assert part.speedups.step.value is not None
    return part.speedups.step.value


def _nothing_measured(scene: Scene) -> str:
    base = scene.baseline
    if not scene.others:
        where = "capture" if scene.imported else "Recording"
        return f"No recipe beside {base.name} is in this {where}, so there is nothing to compare."
    if base.name in scene.void:
        return f"No speedup means anything, because {base.name}, which recipes are compared with, does not compute."
    if base.step_ms.value is None:
        return f"No speedup is known, because the step of {base.name} was not timed: {base.step_ms.reason}."
    reasons = "; ".join(f"{part.name}: {_why_not(part)}" for part in scene.others if part.name not in scene.void)
    step = f"{base.name} takes {_ms(base.step_ms.value)} ms a step"
    return f"{step}; no other recipe's speed is known" + (f" ({reasons})." if reasons else ".")


def _why_not(part: RecipeReport) -> str:
    if part.refusal is not None:
        return part.refusal
    return part.step_ms.reason or "its speedup is not known"


def _about_best(best: RecipeReport, scene: Scene) -> list[str]:
    speedups = best.speedups
    assert speedups is not None
    step = speedups.step
    value = _step_speedup(best)
    change = _change(scene.baseline, best)
    different = is_different(step.low, step.high)
    bound = launch_bound(best, scene.on_cpu)
    shown = proof(best).part
    much = f", with {shown} {_in(best)}" if shown else ""
    sentences: list[str] = []
    if different is None:
        sentences.append(
            f"{best.name} ran a step at {_x(value)} of the speed of {scene.baseline.name} ({change}){much}, but "
            f"one step a side has no spread: it shows neither a gain nor a loss."
        )
    elif not different:
        assert step.low is not None
        assert step.high is not None
        first = (
            f"Launch-bound, so {_subject(scene)} does not make this step faster"
            if bound
            else f"No difference that these {step.n} steps can show"
        )
        sentences.append(
            f"{first}: {best.name} {_x(value)} ({change}; 95% interval {_x(step.low)} to {_x(step.high)}){much}."
        )
    elif value > 1:
        sentences.append(f"{best.name} makes a step {_x(value)} faster ({change}){much}.")
    else:
        count = len(scene.candidates)
        which = f" with {best.name}, the best of {count}" if count > 1 else ""
        sentences.append(f"{_subject(scene)} makes this step slower: {_x(value)} ({change}){which}{much}.")
    if bound:
        sentences.append(_launch(best, scene.baseline))
    elif not scene.on_cpu and idle_share(best) is None and (_host_share(best) or 0.0) >= HOST_ALONE:
        sentences.append(_launch_unknown(best))
    if different and value > 1:
        sentences.append(_promise(best, scene))
    elif not bound:
        costs = _costs(best, scene.baseline) if different is not None else ""
        sentences.append(f"{_promise(best, scene)}{f' What the step pays: {costs}.' if costs else ''}")
    return sentences


def _in(part: RecipeReport) -> str:
    """`in FP8`; of a recipe whose name tells no format `as asked`."""
    family = _family(part.name)
    return f"in {family}" if family != part.name else "as asked"


def _took(part: RecipeReport, base: RecipeReport) -> str:
    """`0.60 of bf16's time (804.2 -> 508.0 ms)`, and what the steps cannot show."""
    assert part.speedups is not None
    step = part.speedups.step
    text = f"{1 / _step_speedup(part):.2f} of {base.name}'s time ({_change(base, part)}"
    different = is_different(step.low, step.high)
    if different is None:
        return f"{text}; one step a side has no spread)"
    return f"{text})" if different else f"{text}; no difference that these {step.n} steps can show)"


def _not_shown(part: RecipeReport, scene: Scene) -> str:
    """What is not shown comes first, then the time that the steps took."""
    took = _took(part, scene.baseline)
    return f"{part.name} is not shown to have run: {proof(part).why_not} Its steps took {took}, whatever they ran in."


def _against_unshown(part: RecipeReport, scene: Scene) -> str:
    """Where it is the baseline that is not shown to have run."""
    base = scene.baseline
    assert base.verdict is not None
    return (
        f"{base.name} is not shown to have run: {base.verdict.summary} The steps of {part.name} took "
        f"{_took(part, base)}, whatever {base.name}'s ran in."
    )


def _change(base: RecipeReport, part: RecipeReport) -> str:
    if base.step_ms.value is None or part.step_ms.value is None:
        return "step times not known"
    return f"{_ms(base.step_ms.value)} -> {_ms(part.step_ms.value)} ms"


def _launch(part: RecipeReport, base: RecipeReport) -> str:
    """`The GPU is idle 45% of the time: the host needs 35.6 ms to launch one FP8 step (26.4 in bf16) ...`."""
    assert part.host_ms.value is not None
    idle = idle_share(part)
    before = f"The GPU is idle {idle:.0%} of the time: the" if idle is not None else "The"
    beside = f" ({_ms(base.host_ms.value)} in {base.name})" if base.host_ms.value is not None else ""
    family = _family(part.name)
    return (
        f"{before} host needs {_ms(part.host_ms.value)} ms to launch one {family} step{beside}, whatever the "
        f"kernels gain. Launch-bound."
    )


def _launch_unknown(part: RecipeReport) -> str:
    """The host needs nearly all of the step, and whether the GPU waits for it is not known."""
    assert part.host_ms.value is not None
    why = part.no_ledger or "its ledger is incomplete"
    return (
        f"The host needs {_ms(part.host_ms.value)} ms to launch one {_family(part.name)} step; whether the GPU waits "
        f"for it is not known: {why}."
    )


def _promise(part: RecipeReport, scene: Scene) -> str:
    speedups = part.speedups
    on_cpu = scene.on_cpu
    assert speedups is not None
    kernel, autocast = speedups.kernel, speedups.autocast
    if kernel.value is None and autocast.value is None:
        text = f"What its GEMMs alone promised is not known: {kernel.reason}"
    else:
        cost = "casts" if on_cpu else "quantization"
        text = f"Its GEMMs promised {_known(kernel)} (kernels) and {_known(autocast)} (with {cost})"
    why = _no_amdahl(scene.baseline)
    if why is not None and kernel.value is not None:
        text += f"; what Amdahl allows is not known: {why}"
    elif why is None and speedups.amdahl.value is not None:
        text += f"; Amdahl allows {_x(speedups.amdahl.value)}"
    elif kernel.value is not None:
        text += f"; what Amdahl allows is not known: {speedups.amdahl.reason}"
    return f"{text}."


def _known(figure: Figure) -> str:
    return _x(figure.value) if figure.value is not None else f"an unknown factor ({figure.reason})"


def _fallbacks(scene: Scene, besides: Sequence[RecipeReport] = ()) -> list[str]:
    """One sentence for each recipe in which something did not run as asked (the baseline included)."""
    told = []
    for part in (scene.baseline, *scene.others):
        if part.verdict is None or any(part.name == other.name for other in besides):
            continue
        if any(row.verdict == "fallback" for row in part.verdict.rows):
            told.append(f"{_not_asked(part)} {part.verdict.summary}")
    return told


def _not_asked(part: RecipeReport) -> str:
    return f"Not what was asked, in {part.name}:"


def _costs(part: RecipeReport, base: RecipeReport, most: int = 2) -> str:
    """The largest terms that cost time: `quantization +5.1 ms, idle +8.0 ms`.

    None where a ledger of the two is incomplete; and no term that is smaller than what the ledgers leave open, or that
    may as well be zero.
    """
    if part.gap is None or part.gap.start.value is None or _doubtful(part.ledger) or _doubtful(base.ledger):
        return ""
    open_ms = sum(unexplained(each.ledger) for each in (part, base) if each.ledger is not None)
    floor = max(0.005 * part.gap.start.value, open_ms)
    terms = [
        (term.ms.value, term.name)
        for term in part.gap.terms
        if term.name != RESIDUAL
        and term.ms.value is not None
        and term.ms.value > floor
        and (term.ms.low is None or term.ms.low > 0)
    ]
    return ", ".join(f"{name} +{_ms(value)} ms" for value, name in sorted(terms, reverse=True)[:most])


def _read(part: RecipeReport, scene: Scene) -> str:
    name, speedups = part.name, part.speedups
    if speedups is None or speedups.step.value is None:
        reason = speedups.step.reason if speedups is not None else part.step_ms.reason
        return f"{name}: no reading, because its speedup is not known: {reason or 'no step was timed'}."
    if name in scene.void:
        return f"{name}: no reading, because {scene.void[name]}."
    if not proof(part).shown:
        return f"{name}: no reading, because it is not shown to have run: {proof(part).why_not}"
    if _baseline_fell(scene.baseline):
        return f"{name}: no reading, because {scene.baseline.name} is not shown to have run."
    step = speedups.step.value
    low, high = speedups.step.low, speedups.step.high
    if low is None or high is None:
        return f"{name}: no reading, because one step a side has no spread (the step runs at {_x(step)})."
    promised = speedups.autocast if speedups.autocast.value is not None else speedups.kernel
    if promised.value is None:
        costs = _costs(part, scene.baseline)
        paid = f" The step pays: {costs}." if costs else ""
        unknown = f"what its GEMMs alone gain is not known: {promised.reason}"
        return f"{name}: the step runs at {_x(step)}; {unknown}.{paid}"
    gains = _x(promised.value)
    if speedups.kernel.value is not None and speedups.autocast.value is not None:
        cost = "casts" if scene.on_cpu else "quantization"
        gains = f"{_known(speedups.kernel)} as kernels and {_known(speedups.autocast)} with their {cost}"
    near_one = "GEMM speedup near 1" if promised.value > BELOW_ONE else "GEMMs slower than the baseline's"
    if promised.value < NEAR_ONE <= step and low > 1:
        more = "the benchmark does not explain that gain; the gap says where it is"
        return f"{name}: {near_one} ({gains}), and yet the step runs at {_x(step)}: {more}."
    if promised.value < NEAR_ONE:
        near = f"{name}: {near_one} ({gains}), and the step at {_x(step)}. {_why_near_one(part, scene)}"
        return f"{near} {_launch(part, scene.baseline)}" if launch_bound(part, scene.on_cpu) else near
    if step - 1 >= NEAR_STEP * (promised.value - 1) and low > 1:
        share = _gemm_share(scene.baseline)
        weight = f"; GEMMs are {share:.0%} of the {scene.baseline.name} step" if share is not None else ""
        return f"{name}: the step follows its GEMMs. They gain {gains}, the step {_x(step)}{weight}."
    if high >= promised.value or step - 1 >= NEAR_STEP * (promised.value - 1):
        shown = f"the step, as far as these {speedups.step.n} show, between {_x(low)} and {_x(high)}"
        return f"{name}: no reading. Its GEMMs gain {gains}; {shown}."
    far = f"{name}: GEMM speedup far above the step's. They gain {gains}, the step {_x(step)}."
    return f"{far} {_why_far(part, scene)}"


def _why_near_one(part: RecipeReport, scene: Scene) -> str:
    assert part.speedups is not None
    kernel = part.speedups.kernel.value
    bound, calls = sum(row.calls for row in part.gemms if row.launch_bound), sum(row.calls for row in part.gemms)
    if bound > MOST * calls:
        return f"{bound} of {calls} GEMM calls are shorter than their launch: the shapes are too small to gain."
    if kernel is not None and kernel >= 1.10:
        cost = "Casting" if scene.on_cpu else "Quantization"
        return f"{cost} takes back what the kernels gain, so that the step has nothing to win."
    where = "CPU" if scene.on_cpu else "GPU"
    slower = kernel is not None and kernel <= BELOW_ONE
    return f"The kernels themselves are {'slower' if slower else 'hardly faster'} at these shapes on this {where}."


def _why_far(part: RecipeReport, scene: Scene) -> str:
    """Amdahl's share, what the gap says was paid, and the host."""
    assert part.speedups is not None
    reasons = []
    share, amdahl = _gemm_share(scene.baseline), part.speedups.amdahl.value
    if share is not None and amdahl is not None:
        reasons.append(f"GEMMs are {share:.0%} of the {scene.baseline.name} step, so Amdahl allows {_x(amdahl)}")
    costs = _costs(part, scene.baseline, most=3)
    if costs:
        reasons.append(f"the step pays {costs}")
    if launch_bound(part, scene.on_cpu):
        assert part.host_ms.value is not None
        reasons.append(f"the host needs {_ms(part.host_ms.value)} ms to launch it (launch-bound)")
    if not reasons:
        torn = [each.name for each in (scene.baseline, part) if _doubtful(each.ledger)]
        why = part.gap.missing if part.gap is not None and part.gap.missing else part.no_ledger
        if torn:
            why = f"the ledger of {' and of '.join(torn)} is incomplete"
        why = why or _no_amdahl(scene.baseline)
        return f"Where the gain went is not known: {why or 'no term of the gap stands out'}."
    text = "; ".join(reasons)
    return f"{text[0].upper()}{text[1:]}."


def _gemm_share(base: RecipeReport) -> float | None:
    """GEMMs over the baseline's step [1]; None where its ledger does not tell, or leaves as much open as they take."""
    ledger = base.ledger
    if ledger is None or not ledger.wall.value or _no_amdahl(base) is not None:
        return None
    gemm = ledger.buckets["gemm"].value
    return None if gemm is None or gemm <= unexplained(ledger) else gemm / ledger.wall.value


def _family(name: str) -> str:
    """`FP8` of fp8_delayed, `NVFP4` of nvfp4."""
    word = name.split("_", 1)[0]
    return word.upper() if word in ("fp8", "mxfp8", "nvfp4", "bf16", "fp16", "fp32") else name


def _subject(scene: Scene) -> str:
    """Whom a sentence about all candidates is about; a recipe that is not shown to have run is none of them."""
    families = {_family(part.name) for part in scene.candidates}
    if len(families) == 1:
        return families.pop()
    shown = " that is shown to have run" if len(scene.candidates) < len(scene.measured) else ""
    return f"Every low-precision recipe{shown}"


def _percent(share: float) -> str:
    """A share in percent, rounded down: 99.97% is never called 100%."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f}%"


def _ms(value: float) -> str:
    """Milliseconds with digits that suit their size."""
    size = abs(value)
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def _x(value: float) -> str:
    """A factor; one that would round to 1.00 shows a third digit."""
    return f"{value:.2f}x" if abs(value - 1) >= 0.005 or value == 1 else f"{value:.3f}x"
