"""The sentences: verdict first, the reason second, each with the numbers that it rests on.

A sentence whose number is not known says why instead; none ever prints a number that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowprec_callback.analyze.statistics import is_different
from lowprec_callback.report import Figure, RecipeReport

HOST_ALONE = 0.90
"""Host time over step time from which a step is launch-bound, if the GPU is known to wait or nothing is
known of it."""

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
    def best(self) -> RecipeReport | None:
        """The fastest of them."""
        return max(self.measured, key=_step_speedup, default=None)


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
    best = scene.best
    fallback = _fallbacks(scene)
    if best is None:
        sentences += [_nothing_measured(scene), *fallback]
        if scene.imported and scene.baseline.verdict is not None and not scene.others:
            sentences = [scene.baseline.verdict.summary, *sentences]
    else:
        first, *rest = _about_best(best, scene)
        sentences += [first, *fallback, *rest]
        if best.verdict is not None and not any(best.name in text for text in fallback):
            sentences.append(best.verdict.summary)
    if scene.interrupted:
        sentences.append(scene.interrupted)
    if scene.imported:
        sentences.append("All steps were timed with the profiler attached, which slows the host.")
    return tuple(sentences)


def reading(scene: Scene) -> tuple[str, ...]:
    """The three-way reading, a sentence or a few for each recipe that was timed; then cautions."""
    told = [_read(part, scene) for part in scene.others if part.refusal is None]
    for part in (scene.baseline, *scene.others):
        if part.ledger is not None and not part.ledger.complete:
            told.append(f"{part.name}: its ledger is incomplete: {'; '.join(part.ledger.complaints)}.")
    return tuple(told)


def launch_bound(part: RecipeReport, on_cpu: bool = False) -> bool:
    """Whether the host, not the GPU, sets the pace of this recipe's step.

    True if host / step >= 0.90, or if host / step >= 0.75 and idle / step > 0.25; but never where the
    ledger shows idle / step < 0.10. host: launching one step from an idle GPU [ms]; step: timed median [ms]."""
    if on_cpu or part.host_ms.value is None or not part.step_ms.value:
        return False
    host = part.host_ms.value / part.step_ms.value
    idle = idle_share(part)
    if idle is None:
        return host >= HOST_ALONE
    if idle < IDLE_LOW:
        return False
    return host >= HOST_ALONE or (idle > IDLE_HIGH and host >= HOST_WITH_IDLE)


def idle_share(part: RecipeReport) -> float | None:
    """idle / wall of a recipe's ledger [1], where there is one."""
    if part.ledger is None or not part.ledger.wall.value or part.ledger.idle.value is None:
        return None
    return part.ledger.idle.value / part.ledger.wall.value


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
    sentences: list[str] = []
    if different is None:
        sentences.append(
            f"{best.name} ran a step at {_x(value)} of the speed of {scene.baseline.name} ({change}), but "
            f"one step a side has no spread: it shows neither a gain nor a loss."
        )
    elif not different:
        assert step.low is not None
        assert step.high is not None
        first = (
            f"Launch-bound, so {_subject(scene.measured)} does not make this step faster"
            if bound
            else f"No difference that these {step.n} steps can show"
        )
        sentences.append(
            f"{first}: {best.name} {_x(value)} ({change}; 95% interval {_x(step.low)} to {_x(step.high)})."
        )
    elif value > 1:
        sentences.append(f"{best.name} makes a step {_x(value)} faster ({change}).")
    else:
        which = f" with {best.name}, the best of {len(scene.measured)}" if len(scene.measured) > 1 else ""
        sentences.append(f"{_subject(scene.measured)} makes this step slower: {_x(value)} ({change}){which}.")
    if bound:
        sentences.append(_launch(best, scene.baseline))
    if different and value > 1:
        sentences.append(_promise(best, scene.on_cpu))
    elif not bound:
        costs = _costs(best)
        sentences.append(f"{_promise(best, scene.on_cpu)}{f' What the step pays: {costs}.' if costs else ''}")
    return sentences


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


def _promise(part: RecipeReport, on_cpu: bool) -> str:
    speedups = part.speedups
    assert speedups is not None
    kernel, autocast = speedups.kernel, speedups.autocast
    if kernel.value is None and autocast.value is None:
        text = f"What its GEMMs alone promised is not known: {kernel.reason}"
    else:
        cost = "casts" if on_cpu else "quantization"
        text = f"Its GEMMs promised {_known(kernel)} (kernels) and {_known(autocast)} (with {cost})"
    if speedups.amdahl.value is not None:
        text += f"; Amdahl allows {_x(speedups.amdahl.value)}"
    elif kernel.value is not None:
        text += f"; what Amdahl allows is not known: {speedups.amdahl.reason}"
    return f"{text}."


def _known(figure: Figure) -> str:
    return _x(figure.value) if figure.value is not None else f"an unknown factor ({figure.reason})"


def _fallbacks(scene: Scene) -> list[str]:
    """One sentence for all recipes in which something did not run as asked (the baseline included)."""
    told = []
    for part in (scene.baseline, *scene.others):
        if part.verdict is None or not any(row.verdict == "fallback" for row in part.verdict.rows):
            continue
        told.append(f"Not what was asked, in {part.name}: {part.verdict.summary}")
    return told


def _costs(part: RecipeReport, most: int = 2) -> str:
    """The largest terms that cost time: `quantization +5.1 ms, idle +8.0 ms`."""
    if part.gap is None or part.gap.start.value is None:
        return ""
    floor = 0.005 * part.gap.start.value
    terms = [
        (term.ms.value, term.name) for term in part.gap.terms if term.ms.value is not None and term.ms.value > floor
    ]
    return ", ".join(f"{name} +{_ms(value)} ms" for value, name in sorted(terms, reverse=True)[:most])


def _read(part: RecipeReport, scene: Scene) -> str:
    name, speedups = part.name, part.speedups
    if speedups is None or speedups.step.value is None:
        reason = speedups.step.reason if speedups is not None else part.step_ms.reason
        return f"{name}: no reading, because its speedup is not known: {reason or 'no step was timed'}."
    if name in scene.void:
        return f"{name}: no reading, because {scene.void[name]}."
    step = speedups.step.value
    promised = speedups.autocast if speedups.autocast.value is not None else speedups.kernel
    if promised.value is None:
        costs = _costs(part)
        paid = f" The step pays: {costs}." if costs else ""
        unknown = f"what its GEMMs alone gain is not known: {promised.reason}"
        return f"{name}: the step runs at {_x(step)}; {unknown}.{paid}"
    gains = _x(promised.value)
    if speedups.kernel.value is not None and speedups.autocast.value is not None:
        cost = "casts" if scene.on_cpu else "quantization"
        gains = f"{_known(speedups.kernel)} as kernels and {_known(speedups.autocast)} with their {cost}"
    near_one = "GEMM speedup near 1" if promised.value > BELOW_ONE else "GEMMs slower than the baseline's"
    if promised.value < NEAR_ONE <= step:
        more = "the benchmark does not explain that gain; the gap says where it is"
        return f"{name}: {near_one} ({gains}), and yet the step runs at {_x(step)}: {more}."
    if promised.value < NEAR_ONE:
        near = f"{name}: {near_one} ({gains}), and the step at {_x(step)}. {_why_near_one(part, scene)}"
        return f"{near} {_launch(part, scene.baseline)}" if launch_bound(part, scene.on_cpu) else near
    if step - 1 >= NEAR_STEP * (promised.value - 1):
        share = _gemm_share(scene.baseline)
        weight = f"; GEMMs are {share:.0%} of the {scene.baseline.name} step" if share is not None else ""
        return f"{name}: the step follows its GEMMs. They gain {gains}, the step {_x(step)}{weight}."
    far = f"{name}: GEMM speedup far above the step's. They gain {gains}, the step {_x(step)}."
    return f"{far} {_why_far(part, scene)}"


def _why_near_one(part: RecipeReport, scene: Scene) -> str:
    assert part.speedups is not None
    kernel = part.speedups.kernel.value
    if kernel is not None and kernel >= 1.10:
        cost = "Casting" if scene.on_cpu else "Quantization"
        return f"{cost} takes back what the kernels gain, so that the step has nothing to win."
    bound = sum(row.calls for row in part.gemms if row.launch_bound)
    if bound:
        calls = sum(row.calls for row in part.gemms)
        return f"{bound} of {calls} GEMM calls are shorter than their launch: the shapes are too small to gain."
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
    costs = _costs(part, most=3)
    if costs:
        reasons.append(f"the step pays {costs}")
    if launch_bound(part, scene.on_cpu):
        assert part.host_ms.value is not None
        reasons.append(f"the host needs {_ms(part.host_ms.value)} ms to launch it (launch-bound)")
    if not reasons:
        why = part.gap.missing if part.gap is not None and part.gap.missing else part.no_ledger
        return f"Where the gain went is not known: {why or 'no term of the gap stands out'}."
    text = "; ".join(reasons)
    return f"{text[0].upper()}{text[1:]}."


def _gemm_share(base: RecipeReport) -> float | None:
    if base.ledger is None or not base.ledger.wall.value:
        return None
    gemm = base.ledger.buckets["gemm"].value
    return None if gemm is None else gemm / base.ledger.wall.value


def _family(name: str) -> str:
    """`FP8` of fp8_delayed, `NVFP4` of nvfp4."""
    word = name.split("_", 1)[0]
    return word.upper() if word in ("fp8", "mxfp8", "nvfp4", "bf16", "fp16", "fp32") else name


def _subject(parts: Sequence[RecipeReport]) -> str:
    families = {_family(part.name) for part in parts}
    return families.pop() if len(families) == 1 else "Every low-precision recipe"


def _ms(value: float) -> str:
    """Milliseconds with digits that suit their size."""
    size = abs(value)
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def _x(value: float) -> str:
    """A factor; one that would round to 1.00 shows a third digit."""
    return f"{value:.2f}x" if abs(value - 1) >= 0.005 or value == 1 else f"{value:.3f}x"
