"""The sweep: which recipe runs on which optimizer step, and what is watched while it does.

The sweep knows no Trainer: it is a script that calls `step`, which runs one optimizer step of somebody else's loop and
returns its loss. While it runs, that loop opens `region` around each forward pass, calls `phase` where the step's
phases begin, and while there is a `trial`, what that asks for (`guard`). `run` runs the script, `finish` puts
everything back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from lowprec_callback.engines.base import Engine
from lowprec_callback.failures import in_words
from lowprec_callback.measure import batches, memory
from lowprec_callback.measure.batches import StepSizes
from lowprec_callback.measure.device import ClockReader
from lowprec_callback.measure.eager import compiled_graphs, compiled_modules, forget_compiled
from lowprec_callback.measure.gemms import Sampling, benchmark, expected_s, jobs_of
from lowprec_callback.measure.graphs import Replays, counted_replays
from lowprec_callback.measure.held import MemoryWatch
from lowprec_callback.measure.library_log import LibraryListener
from lowprec_callback.measure.module_bench import module_times
from lowprec_callback.measure.nvtx import Ranges, capture_window
from lowprec_callback.measure.scopes import ModuleScopes
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.measure.signatures import with_kernels
from lowprec_callback.measure.steps import ForwardClock, HostProbe, StepClock, synchronize
from lowprec_callback.measure.trace import Tracer
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import (
    End,
    Fact,
    Gemm,
    Loss,
    Plan,
    Problem,
    Recorder,
    Refusal,
    Restored,
    Sampled,
    StepTime,
)
from lowprec_callback.sweep.fault import passed_through_us
from lowprec_callback.sweep.guard import NumericsGuard, TrialStep
from lowprec_callback.sweep.instrumented_step import gemm_ranges, ranged_scopes, stop_quietly, watched_step
from lowprec_callback.sweep.plan import (
    AS_TIMED,
    GUARD_SETTLE,
    NVTX_SETTLE,
    PROBE_NEEDS,
    Fitted,
    Settings,
    fit_rest,
    fit_time,
    order_of_rounds,
)
from lowprec_callback.sweep.ranks import Alone, Ranks, first_reason
from lowprec_callback.sweep.rounds import Rounds, widest
from lowprec_callback.sweep.snapshot import Snapshot
from lowprec_callback.sweep.step_marks import StepMarks
from lowprec_callback.sweep.time_budget import Pace
from lowprec_callback.sweep.time_budget import in_words as time_in_words

CHANGING = 4
"""More steps that are captured, where batches change in size from step to step."""

TRIES = 4
"""Times that a watched step is looked at again, if it was no whole or usual one."""

TOLD = 1.5
"""How many times as long as the first look said the rest must take for it to be said again."""

BENCHMARK_SHARE = 0.3
"""Share of the time that is left which the GEMM benchmark may take, where there is a limit."""


class NeverClean(Exception):
    """Every step that was watched had something foreign in it, on one rank or another."""


class StepFailed(Exception):
    """The step of the loop that the sweep is a guest in raised; `cause` is what it raised."""

    def __init__(self, cause: Exception, recipe: str | None) -> None:
        super().__init__(in_words(cause))
        self.cause = cause
        self.recipe = recipe
        """The recipe that it ran in; None for none of ours."""

    @property
    def ours(self) -> bool:
        """Whether it came out of a function of this package that the step called without knowing."""
        return passed_through_us(self.cause)


class Progress(Protocol):
    """Tells a person how far the sweep is."""

    def update(self, what: str, done: int, total: int) -> None:
        """`done` of `total` steps are over; `what` runs now."""

    def close(self) -> None:
        """The sweep is over."""


@dataclass
class Sweep:
    """One sweep over one model.

    Args:
        engine: runs the model under recipes.
        cards: recipes that can run, the baseline first.
        settings: sizes.
        recorder: where facts go.
        snapshot: the state to restore at the end.
        step: one optimizer step of the loop that the sweep is a guest in; returns the loss, if it knows one.
        gemm_benchmark: whether to time the captured shapes.
        no_trace: why there are no traced steps, or None to trace.
        no_profiler: why no session of torch.profiler may be opened at all, not even for the shapes of a step; or None.
        progress: shows how far we are.
        ranges: NVTX ranges.
        clocks: reads the GPU's clock and power at the end of each block.
        scaler: the training's `torch.amp.GradScaler` or None.
        processes: those that train together; all run this sweep in lockstep.
        optimizers: whose state is counted when memory is watched.
        pace: the sweep's own clock, and when its time is up.
        say: a line for a person.
    """

    engine: Engine
    cards: list[RecipeCard]
    settings: Settings
    recorder: Recorder
    snapshot: Snapshot | None
    step: Callable[[], Any]
    gemm_benchmark: bool = True
    no_trace: str | None = None
    no_profiler: str | None = None
    progress: Progress | None = None
    ranges: Ranges = field(default_factory=lambda: Ranges(False))
    clocks: ClockReader | None = None
    scaler: Any = None
    processes: Ranks = field(default_factory=Alone)
    optimizers: Sequence[torch.optim.Optimizer] = ()
    pace: Pace = field(default_factory=Pace)
    say: Callable[[str], None] = lambda _text: None

    card: RecipeCard | None = None
    """The recipe that runs now; None outside the sweep."""
    inside: bool = False
    """Whether a forward pass runs now, in our region."""
    sizes: StepSizes = field(default_factory=StepSizes)
    """Told of every batch."""
    cut: str | None = None
    """Why parts of the plan were left out."""
    trial: TrialStep | None = None
    """In a step of the numerics guard: what to call around its forward passes and before its optimizer."""

    _clock: StepClock | None = None
    _forward: ForwardClock | None = None
    _steps_done: int = 0
    _what: str = "warming up"
    _loss: Any = None
    _memory: MemoryWatch | None = None
    _phase_name: str = ""
    _shapes: list[Gemm] = field(default_factory=list)
    _sampling: Rounds | None = None
    _shortened: set[str] = field(default_factory=set)
    """Recipes whose blocks have fewer steps than planned, because those are long."""
    _step_s: dict[str, float] = field(default_factory=dict)
    """Seconds of a step of each recipe, over its last block."""
    _saved_steps: int = 0
    """Steps of the plan that shorter blocks left out."""
    _autocast: torch.dtype | None = None
    """The type of the `torch.autocast` region that the user's step runs in."""
    _graphs: int = 0
    """Graphs that `torch.compile` had made before the sweep."""
    _ended: bool = False
    _dirty: str | None = None
    """Why the step that runs does not count."""
    not_put_back: str | None = None
    """What could not be put back at the end, and why: the training must not go on from there."""
    _memory_read: list[Fact] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._marks = StepMarks(self.engine.device, self.ranges)

    @property
    def baseline(self) -> RecipeCard:
        """The recipe that the others are compared with."""
        return self.cards[0]

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the plan, as far as it is known now."""
        more = self._sampling.extra_steps if self._sampling else 0
        return self.settings.steps(len(self.cards)) + more - self._saved_steps

    # -- what the loop's owner calls -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the script to its end. `finish` follows, whatever happened.

        Raises:
            StepFailed: the loop's own step fails in the baseline, with nothing of ours attached.
            Exception: with several ranks, whatever a step raised: the others wait for this one in the middle of it.
        """
        self.pace.start()
        self._graphs = compiled_graphs()
        self.engine.save()
        self._run()

    @contextmanager
    def region(self) -> Iterator[None]:
        """The context for one forward pass."""
        self.phase("forward")
        kind = self.engine.device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        timed = self._forward.forward() if self._forward is not None else nullcontext()
        with timed, self.engine.region(self.card) if self.card else nullcontext():
            self.inside = True
            try:
                yield
            finally:
                self.inside = False
        self.phase("")

    def phase(self, name: Literal["data", "forward", "backward", "optimizer", ""]) -> None:
        """A phase of the step begins (and the one before ends). Free when nothing watches."""
        if not self._marks.on and self._memory is None:
            return
        if self._memory is not None and name in ("", "optimizer"):
            self._read_phase_memory()
        self._marks.phase(name)
        self._phase_name = name
        if self._memory is not None:
            self._memory.begins(name)

    def contaminate(self, reason: str) -> None:
        """Something that is no part of training happened inside this step: its time does not count.

        A step that is watched is watched again.
        """
        self._dirty = self._dirty or reason
        if self._clock is not None:
            self._clock.discard(reason)

    def _note_size(self) -> None:
        elements, odd = self.sizes.step()
        if self._clock is not None and elements:
            self._clock.size(elements)
        if odd:
            self.contaminate("its batches have another size than those of most steps")

    def finish(
        self, status: Literal["finished", "shortened", "interrupted", "failed"], reason: str | None = None
    ) -> None:
        """End the sweep: restore, and write the last line. Idempotent. What cannot be restored: `not_put_back`."""
        if self._ended:
            return
        self._ended = True
        self.card, self._clock, self._forward, self._memory, self.trial = None, None, None, None, None
        # Whatever one of these meets (a broken CUDA context), the others are tried as well, and nothing is raised over
        # an exception that is on its way.
        for end, is_state in (
            (self._close_step, False),
            (partial(forget_compiled, self._graphs), False),
            (self.engine.restore, True),
            (self._put_back, True),
            (self._clean, False),
        ):
            try:
                end()
            except Exception as error:
                text = f"the state could not be put back: {in_words(error)}" if is_state else in_words(error)
                self._tell(Problem("restore", text))
                if is_state:
                    self.not_put_back = self.not_put_back or text
        self._loss, self.snapshot, self.step = None, None, _over  # a copy of the model, and the user's loop
        self._tell(End(status, reason))
        if self.progress is not None:
            self.progress.close()

    def _put_back(self) -> None:
        self._tell(Restored(parts=self._restore(), asked=True))

    def _clean(self) -> None:
        memory.clean(self.engine.device)
        memory.reset_peak(self.engine.device)  # the user's own look at the peak is not to find the sweep's

    def _tell(self, fact: Fact) -> None:
        """At the end, where nothing may come between: what cannot be recorded is not."""
        with suppress(Exception):
            self.recorder.add(fact)

    def _restore(self) -> tuple[str, ...]:
        assert self.snapshot is not None
        return self.snapshot.restore()

    # -- the script ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._use(self.baseline)
        self._step()
        self._first_look()
        if self.gemm_benchmark:
            self._try("GEMM benchmark", self._benchmark)
        self._fit_plan()
        self._rounds()
        if self.no_trace is not None:
            self.recorder.add(Problem("trace", self.no_trace))
        elif self.settings.traced_steps:
            for card in list(self.cards):
                self._part(f"trace of {card.name}", partial(self._traced, card), card)
        if self.settings.nvtx_steps:
            self._part("capture window", self._captured)
        if self.settings.guard_steps:
            self._part("numerics guard", self._guarded)

    def _step(self) -> None:
        """One optimizer step of the loop that we are a guest in."""
        self._open_step()
        try:
            loss = self.step()
        except Exception as error:
            self._marks.close()
            if self.processes.size > 1:
                raise
            raise StepFailed(error, self.card.name if self.card else None) from error
        # Detached: an undetached loss would keep its whole graph alive to the end of the block.
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._steps_done += 1
        self._note_size()
        self._close_step()
        if self._clock is None:  # nothing but the clock runs among timed steps
            self._show_progress()

    def _show_progress(self) -> None:
        if self.progress is not None:
            self.progress.update(self._what, self._steps_done, self.total_steps)

    def _part(self, what: str, do: Callable[[], None], card: RecipeCard | None = None, bare: bool = False) -> None:
        """One part of the script, if there is time for it. If its recipe or our own watching fails, the others go on.

        Of several ranks none goes on alone: what fails on one ends its process, as any failure does.

        Args:
            what: names it.
            do: does it.
            card: the recipe that it is about.
            bare: nothing of ours is attached to its steps: one that fails in the baseline fails without us too.

        Raises:
            StepFailed: such a step.
        """
        if (card is not None and card not in self.cards) or not self._has_time(what):
            return
        try:
            do()
            return
        except NeverClean as reason:  # all ranks come to this together
            self.recorder.add(Problem(what, str(reason)))
        except StepFailed as failure:
            ran = self._card_named(failure.recipe)
            if failure.ours or ran is None or (ran is self.baseline and not bare):
                self.recorder.add(Problem(what, str(failure)))
            elif ran is self.baseline:
                raise
            else:
                self._give_up(ran, str(failure))
        except Exception as error:
            if self.processes.size > 1:
                raise
            self.recorder.add(Problem(what, in_words(error)))
        # What the part has set, it did not live to take away; and a step that broke off has left half of its work.
        self.card, self.trial, self._clock, self._forward, self._memory = None, None, None, None, None
        self._marks.traced, self._marks.word = None, "step"
        if self.processes.size == 1:
            self._restore()
        memory.clean(self.engine.device)

    def _card_named(self, name: str | None) -> RecipeCard | None:
        return next((card for card in self.cards if card.name == name), None)

    def _try(self, what: str, do: Callable[[], None]) -> None:
        """Something of our own that takes no step: if it fails, it is missing, and memory is given back."""
        try:
            do()
        except Exception as error:
            if self.processes.size > 1:
                raise
            self.recorder.add(Problem(what, in_words(error)))
            memory.clean(self.engine.device)

    def _give_up(self, card: RecipeCard, why: str) -> None:
        """A recipe whose step raised. The next one begins from the state before the profile."""
        self.cards.remove(card)
        timed = any(fact.recipe == card.name for fact in self.recorder.snapshot().of(StepTime))
        reason = f"a step in it failed, where the baseline's do not: {why}"
        if timed:
            self.recorder.add(Problem(card.name, f"given up: {reason}"))
        else:
            self.recorder.add(Refusal(card.name, reason, "the model's own step"))
        self.say(f"lowprec: {card.name} is given up: {reason}")

    def _first_look(self) -> None:
        """A plain step of the baseline, for its time, and a watched one, for its shapes; then how long it will take."""
        now, device = self.pace.now, self.engine.device
        synchronize(device)
        begin = now()
        self._step()
        synchronize(device)
        self.pace.plain_s, begin = now() - begin, now()
        self._part("capture", self._capture)
        self._use(self.baseline)
        self.pace.watched_s = max(self.pace.plain_s, now() - begin)
        steps_s = self.settings.seconds(len(self.cards), self.pace.plain_s, self.pace.watched_s)
        bench_s = expected_s(jobs_of(self._shapes, self.cards, self.baseline.name)) if self.gemm_benchmark else 0.0
        also = f", the GEMM benchmark {time_in_words(bench_s)} of it" if bench_s else ""
        self.say(
            f"lowprec: a step takes about {time_in_words(self.pace.plain_s)}, so the rest of the sweep about "
            f"{time_in_words(steps_s + bench_s)}{also}"
        )

    def _fit_plan(self) -> None:
        """Shorten what is left of the plan, if time is short."""
        left, plain_s, watched_s = self.pace.left_s, self.pace.plain_s, self.pace.watched_s
        fitted = Fitted(self.settings, None)
        if left is not None and plain_s is not None and watched_s is not None:
            fitted = fit_time(self.settings, len(self.cards), left, plain_s, watched_s)
        self.settings, shrunk = self.processes.from_zero((fitted.settings, fitted.shrunk))
        if shrunk is not None:
            self._tell_plan(shrunk)

    def _fit_rest(self, sampling: Rounds, done: int) -> None:
        """Now that every recipe's pace is known: shorten what is left, if time is short, and say how long it takes.

        The first look knew the baseline's only, and a recipe may be many times as slow: BF16 on a CPU without
        instructions for it.
        """
        known = [self._step_s[card.name] for card in self.cards if card.name in self._step_s]
        watched = self.pace.watched_factor
        if len(known) < len(self.cards) or watched is None:
            return
        left, before = self.pace.left_s, self.settings
        # Where the time is up already, the next part will say so.
        fitted = fit_rest(before, done, known, watched, left) if left else Fitted(before, None)
        self.settings, shrunk = self.processes.from_zero((fitted.settings, fitted.shrunk))
        if shrunk is not None:
            sampling.planned = sampling.most = self.settings.rounds
            self._tell_plan(shrunk)
        rest_s = self.settings.seconds_after(done, known, watched)
        if rest_s > TOLD * self.settings.seconds_after(done, [known[0]] * len(known), watched):
            paces = ", ".join(f"{card.name} {time_in_words(self._step_s[card.name])}" for card in self.cards)
            self.say(f"lowprec: a step takes {paces}, so the rest of the sweep about {time_in_words(rest_s)}")

    def _tell_plan(self, shrunk: str) -> None:
        """The plan as it is now, and what was cut from it."""
        s, last = self.settings, self.recorder.snapshot().last(Plan)
        if last is None:
            return
        self.recorder.add(
            replace(
                last,
                **s.sizes(),
                no_guard="too little is left for it" if last.guard_steps and not s.guard_steps else last.no_guard,
                steps=self.total_steps,
                shrunk="; ".join(text for text in (last.shrunk, shrunk) if text),
            )
        )
        self.say(f"lowprec: {shrunk}")

    def _has_time(self, what: str) -> bool:
        """Whether `what` may begin. Of several ranks, zero decides."""
        up = self.pace.max_seconds is not None and self.processes.from_zero(self.pace.up)
        if up and self.cut is None:
            self.cut = "the time that the sweep may take (max_seconds, max_time) was up"
            self.recorder.add(Problem(what, f"left out, with all that would have followed: {self.cut}"))
            self.say(f"lowprec: {what} is left out, with all that would have followed: {self.cut}")
        return not up

    def _was_clean(self) -> bool:
        """Whether nothing foreign ran inside the step that is over, on any rank."""
        if self.processes.size == 1:
            return self._dirty is None
        return not any(self.processes.gather(self._dirty))

    def _use(self, card: RecipeCard, afresh: bool = False) -> None:
        """Switch to a recipe, from a clean state; with `afresh`, even if it is the one that runs."""
        if afresh or self.card is not card:
            self.engine.switch()
            memory.clean(self.engine.device)
        self.card = card

    def _capture(self) -> None:
        """One step of the baseline, observed: the shapes."""
        self._what = "capturing shapes"
        if compiled := compiled_modules(self.engine.model):
            names = f"{', '.join(compiled[:3])}{' and more' if len(compiled) > 3 else ''}"
            self.recorder.add(
                Problem(
                    "torch.compile", f"{names}: ran uncompiled in the steps that watch operands, compiled in others"
                )
            )
        if self.no_profiler is not None:
            self.recorder.add(Problem("capture", f"PyTorch's own products are not seen: {self.no_profiler}"))
        for _ in range(TRIES):
            log = GemmLog(self.engine.linear_layers(), self.engine.region_of)
            with counted_replays(lambda: self.inside) as replays:
                self._watched_step(log)
            if self._was_clean():
                break
        else:
            self.recorder.add(
                Problem("capture", f"in {TRIES} steps, one after another: {self._dirty or 'so it was on another rank'}")
            )
            return
        logs = [log]
        if self.processes.size == 1 and self.sizes.changing:
            for _ in range(CHANGING):
                logs.append(GemmLog(self.engine.linear_layers(), self.engine.region_of))
                self._watched_step(logs[-1])
            log, words = batches.middle(logs)
            self.recorder.add(Problem("capture", words))
        self._shapes, answers = self.processes.together(log.gemms, partial(self._misfits, replays))
        if not self._shapes and self.no_profiler is None:
            self.recorder.add(Problem("capture", "no linear-layer GEMM was seen in a whole step"))
        self.recorder.add(*self._shapes)
        for card in list(self.cards[1:]):
            reason = first_reason([said for said, _ in answers], [host for _, host in answers], card.name)
            if reason is not None:
                self.cards.remove(card)
                self.recorder.add(Refusal(card.name, reason, "the captured step"))

    def _misfits(self, replays: Replays, shapes: list[Gemm]) -> tuple[dict[str, str], str]:
        """Recipes that the captured step cannot run in, and why.

        Where CUDA graphs were replayed in it, that is all of them, though they would seem to run. Where tokens do not
        fit, the library would raise inside the user's step: features were probed before, but how many tokens a layer
        sees is only known now; of a grouped layer it is not known which group gets how many. Also the name of this
        machine, for the other ranks.
        """
        if replays.count:
            return {card.name: str(replays) for card in self.cards[1:]}, self.processes.host
        found: dict[str, str] = {}
        for card in self.cards[1:]:
            wrong = {
                f"{gemm.module} ({card.misfit(gemm.m, gemm.k, gemm.n)})": None
                for gemm in shapes
                if gemm.quantizable and gemm.groups == 1 and gemm.m % card.align_m
            }
            if wrong:
                names = list(wrong)
                more = f" and {len(names) - 3} more modules" if len(names) > 3 else ""
                found[card.name] = (
                    f"the model's tokens do not fit, and wgrad sums over them: {', '.join(names[:3])}{more}"
                )
        return found, self.processes.host

    def _benchmark(self) -> None:
        """Time the captured shapes under every recipe. The model waits; its gradients and activations are gone.

        Several ranks do it at the same time, each for itself: so the devices of a machine share power and heat as they
        do in training, and each rank waits at the end only as long as it was faster than the slowest (were one rank
        to work while the others wait, a long benchmark could outlast the process group's timeout). Each shows by its
        own times whether its device is a slow one.
        """
        memory.clean(self.engine.device)
        failure: str | None = None
        try:
            self._benchmark_here()
        except Exception as error:
            if self.processes.size == 1:
                raise
            failure = f"{self.processes.name}: {in_words(error)}"
            memory.clean(self.engine.device)
        for text in self.processes.gather(failure):
            if text is not None:
                self.recorder.add(Problem("GEMM benchmark", text))

    def _benchmark_here(self) -> None:

        def tell(what: str, done: int, total: int) -> None:
            if self.progress is not None:
                self.progress.update(f"benchmark {done + 1}/{total}: {what}", self._steps_done, self.total_steps)

        left = self.pace.left_s
        sampling = Sampling(budget_s=None if left is None else BENCHMARK_SHARE * left)
        cards, baseline, seed = self.cards, self.baseline.name, self.settings.seed
        shapes = batches.carrying(self._shapes)
        times: Any = benchmark(self.engine, cards, baseline, shapes, seed, tell, sampling)
        if self.no_trace is None:
            times = with_kernels(self.engine, self.cards, self.baseline.name, self._shapes, times)
        for fact in times:
            self.recorder.add(fact)
        memory.clean(self.engine.device)
        for module in module_times(self.engine, self.cards, self._shapes, self.settings.seed, tell, self._autocast):
            self.recorder.add(module)
        memory.clean(self.engine.device)

    def _rounds(self) -> None:
        """Blocks in turn, as many rounds as the plan has, and more where they are not enough (see `rounds`)."""
        by_name = {card.name: card for card in self.cards}
        most = max(self.settings.rounds, self.settings.max_rounds)
        self._sampling = Rounds(self.settings.rounds, most, self.settings.step_precision)
        orders = order_of_rounds(list(by_name), most, self.settings.seed)
        done = 0
        while not (why := self._why_stop(self._sampling, done)):
            for name in orders[done]:
                card = by_name[name]
                self._part(f"{name}, round {done + 1}", partial(self._block, card, done), card, bare=True)
            done += 1
            if done == 1:
                self._fit_rest(self._sampling, done)
        if words := batches.spread(self.recorder.snapshot().of(StepTime)):
            self.recorder.add(Problem("batches", words))
        self.recorder.add(Sampled(done, why, widest(self._sampling.medians), self.settings.step_precision))

    def _why_stop(self, sampling: Rounds, done: int) -> str:
        """See `Rounds.why_stop`. Of several ranks, zero decides for all, by its own steps and its own clock."""
        why = "seconds" if self.cut else sampling.why_stop(done, self.settings.round_steps(len(self.cards)))
        if done >= self.settings.rounds:
            why, sampling.extra_steps = self.processes.from_zero((why, sampling.extra_steps))
        return why

    def _block(self, card: RecipeCard, round_: int) -> None:
        """Settle, then timed steps with nothing attached but the clock."""
        self._use(card)
        of = f" of {self.settings.rounds}" if round_ < self.settings.rounds else ", beyond the plan"
        self._what = f"{card.name}, round {round_ + 1}{of}"
        device, begin = self.engine.device, self.pace.now()
        planned = self.settings.settle_steps, self.settings.timed_steps
        known = self._step_s.get(card.name)
        settled, timed = planned if known is None else self._fit_block(card, known)
        probe_at = settled - 2 if settled >= PROBE_NEEDS else None
        look_at = None if known is not None else probe_at if device.type == "cuda" else min(1, settled - 1)
        done = 0
        while done < settled:
            probe = HostProbe(device) if done == probe_at and device.type == "cuda" else None
            if probe:
                probe.start()
            start = self.pace.now()
            self._step()
            if probe and self._dirty is None:
                self.recorder.add(probe.stop(card.name, round_))
            if done == look_at:
                settled, timed = self._fit_block(card, None if self._dirty else self.pace.now() - start)
            done += 1
        self._saved_steps += sum(planned) - done - timed
        memory.reset_peak(device)
        self._clock = StepClock(device)
        self._forward = ForwardClock(device) if self.processes.size > 1 else None
        self._boundary()
        for _ in range(timed):
            self._step()
            self._boundary()
        clock, forward = self._clock, self._forward
        self._clock = self._forward = None
        steps = clock.read(card.name, round_)
        self._step_s[card.name] = (self.pace.now() - begin) / (done + timed)
        self.recorder.add(*steps)
        if forward is not None:
            self.recorder.add(forward.read(card.name, round_))
        assert self._sampling is not None
        self._sampling.add(card.name, [step.ms for step in steps if step.discarded is None])
        self.recorder.add(*memory.read(device, card.name, round_, "step"))
        if self.clocks is not None and (reading := self.clocks.read(card.name, round_)) is not None:
            self.recorder.add(reading)
        self._record_loss(card.name, round_)
        self.recorder.add(*self.engine.scales(card))

    def _fit_block(self, card: RecipeCard, step_s: float | None) -> tuple[int, int]:
        """(settled, timed) steps of the recipe's block, if a step takes `step_s` (None: that is not to be trusted).

        Of several ranks, zero decides for all.
        """
        planned = self.settings.settle_steps, self.settings.timed_steps
        step_s, sizes = self.processes.from_zero(
            (step_s, planned if step_s is None else self.settings.of_a_block(step_s))
        )
        if step_s is not None and sizes != planned and card.name not in self._shortened:
            self._shortened.add(card.name)
            self.recorder.add(
                Problem(
                    card.name,
                    f"a step takes about {time_in_words(step_s)}, so its blocks have {sizes[0]} settled and {sizes[1]} "
                    f"timed steps instead of {planned[0]} and {planned[1]} (block_seconds)",
                )
            )
        return sizes

    def _traced(self, card: RecipeCard) -> None:
        """A step that watches operands, the library's log and memory, then steps that only the profiler watches."""
        self._what = f"tracing {card.name}"
        device = self.engine.device
        for _ in range(TRIES):
            self._use(card, afresh=True)
            log, library = GemmLog(self.engine.linear_layers(), self.engine.region_of), LibraryListener(device)
            paths = (layer.path for layer in self.engine.linear_layers())
            held = MemoryWatch(card.name, self.engine.model, self.optimizers, device, self.engine, paths)
            self._memory_read = [*held.start()]
            self._memory = held
            with self.engine.observe(card) as notes:
                self._watched_step(log, library, held)
            self._memory = None
            if self._was_clean():
                break
        else:
            raise NeverClean(f"in {TRIES} steps, one after another: {self._dirty or 'so it was on another rank'}")
        self.recorder.add(*self._memory_read, *held.peak())
        self.recorder.add(*log.dispatches(card.name), *log.products(card.name), *notes)
        self.recorder.add(*library.facts(card.name, log))

        tracer = Tracer(device)
        bare: list[int] = []
        whole: list[int] = []
        with ExitStack() as stack:
            tracer.start()
            stack.callback(stop_quietly, tracer)
            self._step()  # a new session can lose kernels at its start
            # First as the timed steps ran, with the kernel tracer and nothing else: what ran in these is the verdict.
            self._trace_steps(range(AS_TIMED + TRIES), AS_TIMED, bare)
            scopes = ranged_scopes(self.engine)
            with scopes.installed(), self.engine.watch(scopes.current, around=gemm_ranges(log)):
                first = AS_TIMED + TRIES
                numbers = range(first, first + self.settings.traced_steps + TRIES)
                self._trace_steps(numbers, self.settings.traced_steps, whole, scopes.clear)
        try:
            # Of ranged steps a `Trace` holds the kernels; on a CPU it holds operators' own times, which are no calls.
            wanted = bare if device.type == "cuda" else [*bare, *whole]
            for products in tracer.step_products(card.name, compiled_modules(self.engine.model), wanted):
                ranged = products.step in whole
                number = (whole if ranged else bare).index(products.step)
                self.recorder.add(replace(products, step=number, ranged=ranged))
            traces = tracer.traces(card.name, log.calls or None, whole)
            self.recorder.add(*(replace(trace, step=whole.index(trace.step)) for trace in traces))
        except (OSError, ValueError, KeyError) as error:
            self.recorder.add(Problem(f"trace of {card.name}", in_words(error)))

    def _trace_steps(
        self, numbers: range, enough: int, whole: list[int], after: Callable[[], None] = lambda: None
    ) -> None:
        """Steps under the tracer, each called by its number, until `enough` clean ones are in `whole`."""
        for number in numbers:
            synchronize(self.engine.device)
            self._marks.traced = number
            self._step()
            after()
            if self._was_clean():
                whole.append(number)
            if len(whole) == enough:
                break

    def _captured(self) -> None:
        """Steps for another tool's trace: one capture window, and ranges down to the GEMM on whatever thread."""
        with capture_window(self.engine.device):
            for card in self.cards:
                self._use(card)
                self._what = f"NVTX ranges of {card.name}"
                self._marks.word = "settle"
                for _ in range(NVTX_SETTLE):
                    self._step()
                self._marks.word = "step"
                log = GemmLog(self.engine.linear_layers())
                scopes = ModuleScopes(self.engine.scoped_modules(), self.ranges.enter_module, self.ranges.leave_module)
                with scopes.installed(), self.engine.watch(scopes.current, around=self.ranges.gemms(log.module_of)):
                    for _ in range(self.settings.nvtx_steps):
                        self._step()

    def _guarded(self) -> None:
        """Every recipe takes the same steps from the snapshot on the same data; the baseline also after all others.

        Last of all: whatever a recipe does to the weights here, no measurement comes after it.
        """
        guard = NumericsGuard(self.engine.model, self.scaler)
        for card, repeat in [*((card, 0) for card in self.cards), (self.baseline, 1)]:
            self._use(card, afresh=True)
            self._what = f"numerics of {card.name}"
            for step in range(-GUARD_SETTLE, self.settings.guard_steps):
                if step in (-GUARD_SETTLE, 0):
                    self._restore()
                keeps = step >= 0 and card is self.baseline and not repeat
                self.trial = guard.trial(card.name, step, keeps, repeat)
                self._step()
                self.recorder.add(self.trial.fact(self._loss))
        self.trial = None
        for rank, reason in enumerate(self.processes.gather(guard.why_not_same)):
            if reason is not None and guard.why_not_same is None:
                self.recorder.add(Problem("numerics guard", f"rank {rank} could not give its batches again: {reason}"))

    def _watched_step(
        self, log: GemmLog, library: LibraryListener | None = None, held: MemoryWatch | None = None
    ) -> None:
        """One step that looks at every GEMM's operands. Modules that could not be followed to the end are told."""

        def broken(reason: str) -> None:
            self.recorder.add(Problem(self._what, f"modules could not be followed to the end: {reason}"))

        with watched_step(self.engine, log, broken, library, held, products=self.no_profiler is None):
            self._step()

    def _boundary(self) -> None:
        """Between two timed steps."""
        assert self._clock is not None
        self._clock.boundary()
        if self._forward is not None:
            self._forward.boundary()

    # -- small parts -----------------------------------------------------------------------------------------------

    def _open_step(self) -> None:
        self._dirty = None
        self._marks.open(self.card.name if self.card else None, self._steps_done)
        self.phase("data")

    def _close_step(self) -> None:
        self._marks.wait()
        self.phase("")
        self._marks.close()

    def _read_phase_memory(self) -> None:
        phases: tuple[memory.WatchedPhase, ...] = ("forward", "backward", "optimizer")
        for phase in phases:
            if self._memory is not None and self._phase_name == phase:
                self._memory_read += self._memory.ends(phase)

    def _record_loss(self, recipe: str, round_: int) -> None:
        if isinstance(self._loss, torch.Tensor) and self._loss.numel() == 1:
            self._loss = float(self._loss)
        if isinstance(self._loss, float | int):
            self.recorder.add(Loss(recipe, round_, value=float(self._loss)))
        known = isinstance(self._loss, float | int)
        broken = known and not math.isfinite(self._loss)
        if self.processes.any(broken):
            self._after_divergence(
                recipe, round_, f"the loss is {self._loss}" if broken else "another rank's loss broke"
            )

    def _after_divergence(self, recipe: str, round_: int, what: str) -> None:
        """All recipes share the weights: what one has broken would make the others look broken.

        Several ranks all start again, or none: their weights must stay equal.
        """
        self._restore()
        self.card = None  # its scales are broken as well: the next block begins from a clean state
        what += "; the recipes after it start again from the state before the profile"
        self.recorder.add(Problem(f"{recipe}, round {round_ + 1}", what))


def _over() -> None:
    raise RuntimeError("the sweep is over")
