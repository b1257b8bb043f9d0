"""The numerics guard: did a recipe compute what the baseline does, or is it fast because it is wrong?

Every recipe took the same steps t = 0, 1, ... from the same state on the same data with the same random numbers
(`Trial` facts). The distance of its loss L(t) from the baseline's B(t), at the step where it is largest:

    d = max over t of |L(t) - B(t)| / (|B(t)| + |B(1) - B(0)| + ... + |B(t) - B(t-1)|)

Beside the size of the loss stands the way that the baseline's loss went: without it a loss near zero would make any
recipe look wrong. A loss with a large constant in it hides a difference, so gradients are compared too: r is the norm
of the recipe's gradient over that of the baseline's in step 0, where both have the same weights; for the whole model
and for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.recording import Card, Scales, Trial
from lowprec_callback.report import Figure, NumericsReport, NumericsState

LIMIT = 0.01
"""Largest distance [1] for 8 bits and wider. DeepSeek-V3 reports relative errors of the loss below 0.25% of FP8 against
BF16 (arXiv 2412.19437, 3.3), averaged over long runs; NVIDIA below 1% of NVFP4 against FP8 while the learning rate is
constant (arXiv 2509.25149, 3). Single steps scatter more than averages do, and one step of a loss that is stored in
BF16 is up to 0.8%."""

LIMIT_4_BIT = 0.015
"""The same for 4 bits: what NVIDIA reports towards the end of training (ibid.)."""

MOVED = 0.1
"""Part of the way that the baseline's loss has gone by its updates, within which a difference is the updates' own: a
value in E5M2 is up to 12.5% off, and so is what it moves. A fresh model at its full learning rate moves its loss by a
quarter in one update; what a few percent of that are says nothing of a recipe."""

GRADIENT_LIMIT = math.sqrt(2.0)
"""Largest r, and 1 / the smallest. Errors that are independent of the gradient add to its square: above sqrt(2) they
are larger than the gradient itself; below 1 / sqrt(2) more than half of its square was lost."""

LOST_SHARE = 0.01
"""Share of elements, from which gradients that are zero in all steps, but not in the baseline, make a recipe void.
Below it is doubtful only: an expert that no token was sent to."""

CHANGED_SHARE = 0.05
"""Share of elements, from which parameters whose own gradients leave the limits of r are told: embeddings and the head,
which no recipe reaches, can be most of the whole gradient's length and hide what became of the rest."""

NEGLIGIBLE = 1e-6
"""A gradient that is a smaller part than this of the whole gradient's norm is rounding (of a bias before a norm layer,
say, whose true gradient is zero): if it becomes zero, nothing is lost."""

VOID: tuple[NumericsState, ...] = ("not finite", "zero gradients")
"""States in which a recipe's speed counts for nothing."""

DOUBTFUL: tuple[NumericsState, ...] = ("far", "frozen scales")
"""States that are told before the speed, which stands."""

_NAMED = 3
"""Parameters that a sentence names."""

Numbered = Sequence[tuple[int, Trial]]


def numerics_reports(
    names: Sequence[str],
    baseline: str,
    trials: Mapping[str, Numbered],
    scales: Mapping[str, Sequence[tuple[int, Scales]]],
    cards: Mapping[str, Card],
    why_none: str,
) -> dict[str, NumericsReport]:
    """A report for each of the recipes that ran, the baseline's first.

    Args:
        names: recipes that ran.
        baseline: one of them.
        trials: the guard's steps of each recipe.
        scales: delayed scaling's state at the end of each recipe's blocks.
        cards: what each recipe asks for.
        why_none: why a recipe without trials has none.
    """
    runs = {name: _Run.of(trials.get(name, ())) for name in names}
    base = runs.get(baseline, _Run({}, {}))
    found = {}
    for name in names:
        own = runs[name]
        other = _Run(own.again, {}) if name == baseline else own
        report = _report(name, own, other, base, baseline, _limit(cards.get(name)), why_none)
        frozen, told = frozen_scales(scales.get(name, ()))
        report = replace(report, scales=told)
        if frozen and report.state in ("ok", "unknown"):
            report = replace(report, state="frozen scales", why=f"{told}; {report.why}" if own.steps else told or "")
        found[name] = report
    return found


@dataclass(frozen=True)
class _Run:
    """One recipe's compared steps, each with its line; and those of the repetition."""

    steps: dict[int, tuple[int, Trial]]
    again: dict[int, tuple[int, Trial]]

    @staticmethod
    def of(trials: Numbered) -> _Run:
        compared = [(line, trial) for line, trial in trials if trial.step >= 0]
        return _Run(
            {trial.step: (line, trial) for line, trial in compared if not trial.repeat},
            {trial.step: (line, trial) for line, trial in compared if trial.repeat},
        )

    @property
    def trials(self) -> list[Trial]:
        return [trial for _, trial in self.steps.values()]

    def facts(self) -> tuple[str, ...]:
        return lines_of("trial", [line for line, _ in self.steps.values()])

    def always_zero(self) -> list[str]:
        """Parameters whose gradient is zero in every step."""
        rest = [set(trial.zero) for trial in self.trials[1:]]
        return [name for name in self.trials[0].zero if all(name in each for each in rest)] if self.steps else []

    def sizes(self) -> dict[str, int]:
        """Elements of each parameter with a gradient in step 0."""
        first = self.steps[0][1] if 0 in self.steps else None
        return dict(zip(first.names, first.sizes, strict=False)) if first is not None else {}

    def norms(self) -> dict[str, float]:
        """The norm of each parameter's gradient in step 0."""
        first = self.steps[0][1] if 0 in self.steps else None
        return dict(zip(first.names, first.norms, strict=False)) if first is not None else {}

    def share(self, names: Iterable[str]) -> float:
        """Part of all elements with a gradient that these parameters have [1]."""
        sizes = self.sizes()
        return sum(sizes.get(name, 0) for name in names) / max(sum(sizes.values()), 1)

    def real_gradients(self) -> set[str]:
        """Parameters whose gradient is more than rounding in step 0, and in no step zero."""
        zero = {name for trial in self.trials for name in trial.zero}
        floor = NEGLIGIBLE * math.hypot(*self.norms().values())
        return {name for name, norm in self.norms().items() if norm > floor} - zero


def _limit(card: Card | None) -> float:
    formats = [name for role in (card.fprop, card.dgrad, card.wgrad) for name in role] if card else []
    return LIMIT_4_BIT if any(name == "e2m1" for name in formats) else LIMIT


def _report(
    name: str, own: _Run, other: _Run, base: _Run, baseline: str, limit: float, why_none: str
) -> NumericsReport:
    """`other` is what is held against the baseline: the recipe's steps, or the baseline's own repetition."""
    bound = Figure(limit * 100, "%")
    if not own.steps:
        return _unknown(why_none, bound)
    length, cut = _common(base, other)
    distance, at = _distance(base, other, length, cut)
    ratio = _gradient_ratio(base, other)
    first = own.trials[0]
    report = NumericsReport(
        state="ok",
        why="",
        steps=length,
        loss_baseline=_loss(base, at, baseline),
        loss=_loss(own, at, name),
        distance=distance,
        limit=bound,
        gradient_ratio=ratio,
        zero=_count(len(own.always_zero()), own) if first.parameters else _missing("parameters", first.missing),
        not_finite=_count(len({bad for trial in own.trials for bad in trial.not_finite}), own)
        if first.parameters
        else _missing("parameters", first.missing),
    )
    state, why = (
        _not_finite(own) or _zero(own, base, baseline) or _compared(report, base, other, name == baseline, baseline, at)
    )
    return replace(report, state=state, why=why)


def _unknown(why: str, limit: Figure) -> NumericsReport:
    units = ("nats", "nats", "%", "x", "parameters", "parameters")
    base, loss, distance, ratio, zero, bad = (Figure.missing(unit, why) for unit in units)
    return NumericsReport("unknown", why, 0, base, loss, distance, limit, ratio, zero, bad)


def _missing(unit: str, why: str | None) -> Figure:
    return Figure.missing(unit, why or "it was not recorded")


def _count(number: int, run: _Run) -> Figure:
    return Figure(float(number), "parameters", "measured", n=len(run.steps), facts=run.facts())


# --- What makes void --------------------------------------------------------------------------------------


def _not_finite(run: _Run) -> tuple[NumericsState, str] | None:
    """The first loss or gradient that is not finite. What a loss scaler skips is how it finds its scale."""
    skipped = 0
    for trial in run.trials:
        if trial.loss is not None and not math.isfinite(trial.loss):
            return "not finite", f"the loss is {trial.loss} {_after(trial.step)} from the common state"
        if not trial.not_finite:
            continue
        of = f"gradients of {_some(trial.not_finite)} are not finite"
        if trial.loss_scale is None:
            return "not finite", f"the {of} {_after(trial.step)} from the common state"
        skipped += 1
        if skipped == len(run.trials):
            return "not finite", f"the loss scaler skipped all {skipped} steps: {of}"
    return None


def _zero(run: _Run, base: _Run, baseline: str) -> tuple[NumericsState, str] | None:
    """Gradients that the baseline has, and that are zero in every step, or not there at all."""
    first = run.trials[0]
    always = run.always_zero()
    if first.parameters and len(always) == first.parameters:
        return "zero gradients", "every gradient is zero"
    if 0 not in base.steps or 0 not in run.steps:
        return None
    had = base.steps[0][1]
    if not first.parameters and first.without and had.parameters:
        return "zero gradients", f"no parameter has a gradient, where {baseline} has {had.parameters}"
    # A gradient that is zero in the baseline as well, at times even, is the model's own matter.
    real = base.real_gradients()
    zero = [name for name in always if name in real]
    gone = [name for name in had.names if name in real and name not in first.names] if first.names else []
    if not zero and not gone:
        return None
    share = base.share([*zero, *gone])
    lost = "zero or missing" if zero and gone else "zero" if zero else "missing"
    told = f"the gradients of {_some([*zero, *gone])} are {lost} in every step, and not in {baseline}"
    return ("zero gradients" if share >= LOST_SHARE else "far"), f"{told} ({_share(share)} of all elements)"


# --- The distance -----------------------------------------------------------------------------------------


def _common(base: _Run, other: _Run) -> tuple[int, str | None]:
    """(how many steps both took on the same data with as many updates behind them, why no more)."""
    for step in range(max(len(base.steps), len(other.steps))):
        for run in (base, other):
            if step not in run.steps:
                return step, "it was not repeated" if run is other else "the baseline's steps are missing"
            trial = run.steps[step][1]
            if not trial.replayed or trial.loss is None:
                return step, trial.missing or "it was not recorded"
        if bool(base.steps[step][1].not_finite) != bool(other.steps[step][1].not_finite):
            return step + 1, "the loss scaler skipped a step of one and not of the other"
    return len(base.steps), None


def _distance(base: _Run, other: _Run, length: int, cut: str | None) -> tuple[Figure, int]:
    """(d [%], the step where it is largest)."""
    if not length:
        return _missing("%", cut), 0
    mine, theirs = ([_value(run, step) for step in range(length)] for run in (other, base))
    if not all(map(math.isfinite, [*mine, *theirs])):
        return Figure.missing("%", "a loss is not finite"), 0
    way, found = 0.0, []
    for step, (loss, of_base) in enumerate(zip(mine, theirs, strict=True)):
        way += abs(of_base - theirs[step - 1]) if step else 0.0
        size, apart = abs(of_base) + way, abs(loss - of_base)
        # Divided first, so that neither overflows.
        found.append(apart / size if size and math.isfinite(size) else 0.0 if not apart else math.inf)
    at = max(range(length), key=found.__getitem__)
    if not math.isfinite(found[at]):
        return Figure.missing("%", "the baseline's loss is zero, so there is nothing to hold a difference against"), at
    return Figure(found[at] * 100, "%", n=length, facts=(*base.facts(), *other.facts())), at


def _of_the_way(base: _Run, other: _Run, length: int, limit: float) -> bool:
    """Whether wherever d is beyond the limit [%], the losses differ by no more than `MOVED` of the baseline's way."""
    way = 0.0
    for step in range(length):
        loss, of_base = _value(other, step), _value(base, step)
        way += abs(of_base - _value(base, step - 1)) if step else 0.0
        apart = abs(loss - of_base)
        if apart > MOVED * way and apart * 100 > limit * (abs(of_base) + way):
            return False
    return True


def _value(run: _Run, step: int) -> float:
    loss = run.steps[step][1].loss
    assert loss is not None
    return loss


def _gradient_ratio(base: _Run, other: _Run) -> Figure:
    """r [1] in step 0."""
    pair = [run.steps.get(0) for run in (base, other)]
    norms = []
    for found in pair:
        if found is None or found[1].grad_norm is None:
            return _missing("x", found[1].missing if found else None)
        if not found[1].replayed:
            return _missing("x", found[1].missing)
        norms.append(found[1].grad_norm)
    if not all(map(math.isfinite, norms)):
        return Figure.missing("x", "a gradient is not finite")
    if not norms[0] or not math.isfinite(norms[1] / norms[0]):
        return Figure.missing("x", "the baseline's gradient is zero")
    lines = lines_of("trial", [found[0] for found in pair if found])
    return Figure(norms[1] / norms[0], "x", n=1, facts=lines)


def _compared(
    report: NumericsReport, base: _Run, other: _Run, is_baseline: bool, baseline: str, at: int
) -> tuple[NumericsState, str]:
    """ok, far or unknown, from the distance, the gradient, and how far the baseline is from itself."""
    d, limit = report.distance.value, report.limit.value
    assert limit is not None
    if d is None:
        why = report.distance.reason or ""
        return "unknown", f"losses and gradients are finite; {'' if is_baseline else 'not compared: '}{why}"
    when = _after(at)
    if is_baseline:
        away = f"its loss is {_percent(d)} away {when}" if d else "its losses are the same to the last bit"
        told = f"repeated from the same state on the same data, {away}"
        if d <= limit:
            return "ok", told
        return "unknown", f"{told}: something that is not put back decides it, so no recipe can be compared"
    steps, cut = _common(base, _Run(base.again, {}))
    noise, _ = _distance(base, _Run(base.again, {}), steps, cut)
    if noise.value is not None and noise.value > limit:
        return "unknown", f"not compared: {baseline} repeated is {_percent(noise.value)} away from itself"
    lost = _gradient_lost(report.gradient_ratio, base, other, baseline)
    told = f"the loss is {_percent(d)} from {baseline}'s {when} on the same data"
    if not lost and d > limit and _of_the_way(base, other, report.steps, limit):
        return "ok", f"{told}, but within {MOVED:.0%} of the way that {baseline}'s own loss went by these updates"
    if d > limit + (noise.value or 0.0):
        also = f"; {lost}" if lost else ""
        return "far", f"{told} (limit {_percent(limit)}){also}"
    if lost:
        return "far", f"{told}, but {lost}"
    if d > limit:
        return "unknown", f"{told}, which is the limit within the noise of {baseline} ({_percent(noise.value or 0.0)})"
    return "ok", told


def _gradient_lost(ratio: Figure, base: _Run, other: _Run, baseline: str) -> str | None:
    """What is wrong with the gradient in step 0: of all parameters together, or of too many of them by themselves."""
    if ratio.value is None:
        return None
    own, norms, real = other.norms(), base.norms(), base.real_gradients()
    ratios = {name: own[name] / norms[name] for name in norms if name in own and name in real}
    changed = [name for name, value in ratios.items() if not _fits(value)]
    share = base.share(changed)
    bounds = f"limits {1 / GRADIENT_LIMIT:.2f}x to {GRADIENT_LIMIT:.2f}x"
    if share >= CHANGED_SHARE:
        worst = sorted(changed, key=lambda name: -abs(own[name] ** 2 - norms[name] ** 2))
        typical = median(ratios[name] for name in changed)
        those = f"those of {_some(worst)} ({_share(share)} of all elements) {typical:.3g}x in the median"
        return f"at the same weights, gradients are not as long as {baseline}'s: {those} ({bounds})"
    if not _fits(ratio.value):
        return f"its gradient at the same weights is {ratio.value:.3g}x as long as {baseline}'s ({bounds})"
    return None


def _fits(ratio: float) -> bool:
    return 1 / GRADIENT_LIMIT <= ratio <= GRADIENT_LIMIT


def _loss(run: _Run, step: int, name: str) -> Figure:
    if step not in run.steps:
        return Figure.missing("nats", f"no such step of {name} was recorded")
    line, trial = run.steps[step]
    if trial.loss is None:
        return _missing("nats", trial.missing)
    if not math.isfinite(trial.loss):
        return Figure.missing("nats", f"the loss is {trial.loss}")
    return Figure(trial.loss, "nats", "measured", n=trial.micro_batches, facts=lines_of("trial", [line]))


# --- Scales -----------------------------------------------------------------------------------------------


def frozen_scales(scales: Sequence[tuple[int, Scales]]) -> tuple[bool, str | None]:
    """(whether no scale ever moved, what the scales did in words). (False, None) where there are none to look at.

    Delayed scaling starts from scale 1 and an empty history; a recipe in use leaves both in its first step.
    """
    if not scales:
        return False, None
    facts = [fact for _, fact in scales]
    moved = {(fact.module, tensor, value) for fact in facts for tensor, value in _at(fact, fact.scale) if value != 1.0}
    seen = any(value != 0.0 for fact in facts for value in fact.amax_history_max)
    where = f"in {_some(fact.module for fact in facts)} at the end of every block"
    if not moved and not seen:
        return True, f"every scale stayed at 1 and every amax at 0 {where}: they were never updated"
    if not moved:
        return True, f"every scale stayed at 1 {where}, although amax values were seen: they were never updated"
    tensors = {(module, tensor) for module, tensor, _ in moved}
    values = {key: {v for m, t, v in moved if (m, t) == key} for key in tensors}
    several = sum(len(found) > 1 for found in values.values())
    many = f"scales of {len(tensors)} tensors" if len(tensors) > 1 else "scale of 1 tensor"
    return False, f"the {many} left 1, and changed from block to block in {several}"


def _at(fact: Scales, values: Iterable[float]) -> list[tuple[str, float]]:
    return [(f"{fact.direction}.{tensor}", value) for tensor, value in zip(fact.tensors, values, strict=False)]


# --- Words ------------------------------------------------------------------------------------------------


def _after(step: int) -> str:
    return f"after {step} update{'' if step == 1 else 's'}" if step else "before the first update"


def _percent(value: float) -> str:
    """A distance that is given in percent."""
    return "0%" if value == 0 else "<0.001%" if value < 0.001 else f"{value:.2g}%"


def _share(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 else "<0.1%"


def _some(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
