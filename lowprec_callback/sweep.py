"""The sweep: which recipe runs on which optimizer step, and what is watched while it does.

The sweep knows no Trainer. Whoever owns the loop calls `region` around each forward pass, `step_end` after each
optimizer step, `phase` where the step's phases begin, and `finish` or `abort` at the end; and while there is a `trial`,
what it asks for (`guard`). Inside, the sweep is one script, read from top to bottom: each `yield` is one optimizer step
of the user's loop.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from lowprec_callback.engines.base import Around, Engine
from lowprec_callback.guard import NumericsGuard, TrialStep
from lowprec_callback.measure import memory
from lowprec_callback.measure.device import ClockReader
from lowprec_callback.measure.dispatch import Sizes
from lowprec_callback.measure.gemms import benchmark
from lowprec_callback.measure.held import MemoryWatch
from lowprec_callback.measure.library_log import LibraryListener
from lowprec_callback.measure.module_bench import module_times
from lowprec_callback.measure.nvtx import Ranges, capture_window
from lowprec_callback.measure.scopes import ModuleScopes, Scope
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.measure.signatures import with_kernels
from lowprec_callback.measure.steps import ForwardClock, HostProbe, StepClock, synchronize
from lowprec_callback.measure.trace import Tracer, gemm_range, module_range, own_range, phase_range, step_range
from lowprec_callback.plan import GUARD_SETTLE, NVTX_SETTLE, PROBE_NEEDS, Settings, order_of_rounds
from lowprec_callback.ranks import Alone, Ranks, first_reason
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import End, Gemm, Loss, Problem, Recorder, Refusal, Restored, Role, Sampled
from lowprec_callback.rounds import Rounds, widest
from lowprec_callback.state import Snapshot

Steps = Generator[None, None, None]


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
        settings: sizes, already fitted to the length of the run.
        recorder: where facts go.
        snapshot: the state to restore at the end, or None to let the sweep's steps count as training.
        gemm_benchmark: whether to time the captured shapes.
        no_trace: why there is no tracing, or None to trace.
        progress: shows how far we are.
        ranges: NVTX ranges.
        clocks: reads the GPU's clock and power at the end of each block.
        spare_steps: optimizer steps that the fit has beyond the plan, for more rounds; None if it has no end.
        scaler: the training's `torch.amp.GradScaler` or None.
        processes: those that train together; all run this sweep in lockstep.
        optimizers: whose state is counted when memory is watched.
    """

    engine: Engine
    cards: list[RecipeCard]
    settings: Settings
    recorder: Recorder
    snapshot: Snapshot | None
    gemm_benchmark: bool = True
    no_trace: str | None = None
    progress: Progress | None = None
    ranges: Ranges = field(default_factory=lambda: Ranges(False))
    clocks: ClockReader | None = None
    spare_steps: int | None = 0
    scaler: Any = None
    processes: Ranks = field(default_factory=Alone)
    optimizers: Sequence[torch.optim.Optimizer] = ()

    done: bool = False
    card: RecipeCard | None = None
    """The recipe that runs now; None outside the sweep."""
    trial: TrialStep | None = None
    """In a step of the numerics guard: what to call around its forward passes and before its optimizer."""

    _script: Steps | None = None
    _clock: StepClock | None = None
    _forward: ForwardClock | None = None
    _steps_done: int = 0
    _what: str = "warming up"
    _loss: Any = None
    _step_range: AbstractContextManager[Any] | None = None
    _phase_range: AbstractContextManager[Any] | None = None
    _traced_step: int | None = None
    _memory: MemoryWatch | None = None
    _nvtx_depth: int = 0
    _step_word: str = "step"
    _phase_name: str = ""
    _shapes: list[Gemm] = field(default_factory=list)
    _sampling: Rounds | None = None
    _autocast: torch.dtype | None = None
    """The type of the `torch.autocast` region that the user's step runs in."""

    @property
    def baseline(self) -> RecipeCard:
        """The recipe that the others are compared with."""
        return self.cards[0]

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the plan."""
        return self.settings.steps(len(self.cards)) + (self._sampling.extra_steps if self._sampling else 0)

    # -- what the loop's owner calls -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin: the next optimizer step is the sweep's."""
        self.engine.save()
        self._script = self._run()
        next(self._script)
        self._open_step()

    @contextmanager
    def region(self) -> Iterator[None]:
        """The context for one forward pass."""
        self.phase("forward")
        kind = self.engine.device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        timed = self._forward.forward() if self._forward is not None else nullcontext()
        with timed, self.engine.region(self.card) if self.card else nullcontext():
            yield
        self.phase("")

    def phase(self, name: Literal["data", "forward", "backward", "optimizer", ""]) -> None:
        """A phase of the step begins (and the one before ends). Free when nothing watches."""
        if self._traced_step is None and not self.ranges.enabled and self._memory is None:
            return
        if self._memory is not None and name in ("", "optimizer"):
            self._read_phase_memory()
        if self._traced_step is not None:
            if self._phase_range is not None:
                self._phase_range.__exit__(None, None, None)
                self._phase_range = None
            if name:
                self._phase_range = phase_range(name)
                self._phase_range.__enter__()
        if self.ranges.enabled:
            while self._nvtx_depth > 1:
                self._pop()
            if name:
                self._push(name)
        self._phase_name = name
        if self._memory is not None:
            self._memory.begins(name)

    def contaminate(self, reason: str) -> None:
        """Something that is no part of training happened inside this step: its time does not count."""
        if self._clock is not None:
            self._clock.discard(reason)

    def step_end(self, loss: Any = None) -> bool:
        """An optimizer step is over. Returns whether the sweep is."""
        if self._script is None or self.done:
            return True
        # Detached: an undetached loss would keep its whole graph alive to the end of the block.
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._steps_done += 1
        self._close_step()
        try:
            next(self._script)
        except StopIteration:
            self.done = True
        if self.progress is not None:
            self.progress.update(self._what, self._steps_done, self.total_steps)
        if not self.done:
            self._open_step()
        return self.done

    def finish(
        self, status: Literal["finished", "shortened", "interrupted", "failed"], reason: str | None = None
    ) -> None:
        """End the sweep: take every watcher away, restore, and write the last line. Idempotent."""
        if self._script is None:
            return
        script, self._script = self._script, None
        self.done, self.card, self._clock, self._forward, self.trial = True, None, None, None, None
        self._memory = None
        # A broken CUDA context cannot be waited for, and must not raise over the user's own exception.
        with suppress(RuntimeError):
            self._close_step()
        # Closing the script runs the exits of every `with` it stands in: hooks and patches go.
        script.close()
        self.engine.restore()
        try:
            parts = self.snapshot.restore() if self.snapshot is not None else ()
            self.recorder.add(Restored(parts=parts, asked=self.snapshot is not None))
            memory.clean(self.engine.device)
        except RuntimeError as error:
            # A broken CUDA context takes the model with it; the user's own exception matters more than this one.
            self.recorder.add(Problem("restore", f"the state could not be put back: {error}"))
        self.snapshot, self._loss = None, None
        self.recorder.add(End(status, reason))
        if self.progress is not None:
            self.progress.close()

    # -- the script ------------------------------------------------------------------------------------------------

    def _run(self) -> Steps:
        self._use(self.baseline)
        yield
        yield from self._capture()
        if self.gemm_benchmark:
            self._benchmark()
        yield from self._rounds()
        if self.settings.traced_steps and self.no_trace is None:
            for card in self.cards:
                yield from self._traced(card)
        elif self.no_trace is not None:
            self.recorder.add(Problem("trace", self.no_trace))
        if self.settings.nvtx_steps:
            yield from self._captured()
        if self.settings.guard_steps and self.snapshot is not None:
            yield from self._guarded(self.snapshot)

    def _use(self, card: RecipeCard, afresh: bool = False) -> None:
        """Switch to a recipe, from a clean state; with `afresh`, even if it is the one that runs."""
        if afresh or self.card is not card:
            self.engine.switch()
            memory.clean(self.engine.device)
        self.card = card

    def _capture(self) -> Steps:
        """One step of the baseline, observed: the shapes."""
        self._what = "capturing shapes"
        log = GemmLog(self.engine.linear_layers(), self.engine.region_of)
        yield from self._watched_step(log)
        self._shapes, answers = self.processes.together(log.gemms, self._misfits)
        if not self._shapes:
            self.recorder.add(Problem("capture", "no linear-layer GEMM was seen in a whole step"))
        self.recorder.add(*self._shapes)
        for card in list(self.cards[1:]):
            reason = first_reason([said for said, _ in answers], [host for _, host in answers], card.name)
            if reason is not None:
                self.cards.remove(card)
                self.recorder.add(Refusal(card.name, reason, "the captured step"))

    def _misfits(self, shapes: list[Gemm]) -> tuple[dict[str, str], str]:
        """Recipes that the captured tokens cannot run in, and why: the library would raise inside the user's step.

        Features were probed before; how many tokens a layer sees is only known now. Of a grouped layer it is not
        known which group gets how many. Also the name of this machine, for the other ranks.
        """
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
            failure = f"{self.processes.name}: {type(error).__name__}: {' '.join(str(error).split())}"
            memory.clean(self.engine.device)
        for text in self.processes.gather(failure):
            if text is not None:
                self.recorder.add(Problem("GEMM benchmark", text))

    def _benchmark_here(self) -> None:

        def tell(what: str, done: int, total: int) -> None:
            if self.progress is not None:
                self.progress.update(f"benchmark {done + 1}/{total}: {what}", self._steps_done, self.total_steps)

        times = benchmark(self.engine, self.cards, self.baseline.name, self._shapes, self.settings.seed, tell)
        if self.no_trace is None:
            times = with_kernels(self.engine, self.cards, self.baseline.name, self._shapes, times)
        for fact in times:
            self.recorder.add(fact)
        memory.clean(self.engine.device)
        for module in module_times(self.engine, self.cards, self._shapes, self.settings.seed, tell, self._autocast):
            self.recorder.add(module)
        memory.clean(self.engine.device)

    def _rounds(self) -> Steps:
        """Blocks in turn, as many rounds as the plan has, and more where they are not enough (see `rounds`)."""
        by_name = {card.name: card for card in self.cards}
        most = max(self.settings.rounds, self.settings.max_rounds)
        self._sampling = Rounds(self.settings.rounds, most, self.settings.step_precision, self.spare_steps)
        orders = order_of_rounds(list(by_name), most, self.settings.seed)
        done = 0
        while not (why := self._why_stop(self._sampling, done)):
            for name in orders[done]:
                yield from self._block(by_name[name], done)
            done += 1
        self.recorder.add(Sampled(done, why, widest(self._sampling.medians), self.settings.step_precision))

    def _why_stop(self, sampling: Rounds, done: int) -> str:
        """See `Rounds.why_stop`. Of several ranks, zero decides for all, by its own steps and its own clock."""
        why = sampling.why_stop(done, self.settings.round_steps(len(self.cards)))
        if done >= self.settings.rounds:
            why, sampling.extra_steps = self.processes.from_zero((why, sampling.extra_steps))
        return why

    def _block(self, card: RecipeCard, round_: int) -> Steps:
        """Settle, then timed steps with nothing attached but the clock."""
        self._use(card)
        of = f" of {self.settings.rounds}" if round_ < self.settings.rounds else ", beyond the plan"
        self._what = f"{card.name}, round {round_ + 1}{of}"
        device = self.engine.device
        probe_at = self.settings.settle_steps - 2 if self.settings.settle_steps >= PROBE_NEEDS else None
        for index in range(self.settings.settle_steps):
            probe = HostProbe(device) if index == probe_at and device.type == "cuda" else None
            if probe:
                probe.start()
            yield
            if probe:
                self.recorder.add(probe.stop(card.name, round_))
        memory.reset_peak(device)
        self._clock = StepClock(device)
        self._forward = ForwardClock(device) if self.processes.size > 1 else None
        self._boundary()
        for _ in range(self.settings.timed_steps):
            yield
            self._boundary()
        clock, forward = self._clock, self._forward
        self._clock = self._forward = None
        steps = clock.read(card.name, round_)
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

    def _traced(self, card: RecipeCard) -> Steps:
        """A step that watches operands, the library's log and memory, then steps that only the profiler watches."""
        self._use(card, afresh=True)
        self._what = f"tracing {card.name}"
        device = self.engine.device
        log, library = GemmLog(self.engine.linear_layers(), self.engine.region_of), LibraryListener(device)
        paths = (layer.path for layer in self.engine.linear_layers())
        held = MemoryWatch(card.name, self.engine.model, self.optimizers, device, self.engine, paths)
        self.recorder.add(*held.start())
        self._memory = held
        with self.engine.observe(card) as notes:
            yield from self._watched_step(log, library, held)
        self._memory = None
        self.recorder.add(*held.peak())
        self.recorder.add(*log.dispatches(card.name), *log.products(card.name), *notes)
        self.recorder.add(*library.facts(card.name, log))

        tracer = Tracer(device)
        with ExitStack() as stack:
            tracer.start()
            stack.callback(_stop_quietly, tracer)
            yield  # a new session can lose kernels at its start
            scopes = self._ranged_scopes()
            with scopes.installed(), self.engine.watch(scopes.current, around=_gemm_ranges(log)):
                for index in range(self.settings.traced_steps):
                    synchronize(device)
                    self._traced_step = index
                    yield
                    scopes.clear()
        try:
            self.recorder.add(*tracer.traces(card.name, log.calls or None))
        except (OSError, ValueError, KeyError) as error:
            self.recorder.add(Problem(f"trace of {card.name}", f"{type(error).__name__}: {error}"))

    def _captured(self) -> Steps:
        """Steps for another tool's trace: one capture window, and ranges down to the GEMM on whatever thread."""
        with capture_window(self.engine.device):
            for card in self.cards:
                self._use(card)
                self._what = f"NVTX ranges of {card.name}"
                self._step_word = "settle"
                for _ in range(NVTX_SETTLE):
                    yield
                self._step_word = "step"
                log = GemmLog(self.engine.linear_layers())
                scopes = ModuleScopes(self.engine.scoped_modules(), self.ranges.enter_module, self.ranges.leave_module)
                with scopes.installed(), self.engine.watch(scopes.current, around=self.ranges.gemms(log.module_of)):
                    for _ in range(self.settings.nvtx_steps):
                        yield

    def _guarded(self, snapshot: Snapshot) -> Steps:
        """Every recipe takes the same steps from the snapshot on the same data; the baseline also after all others.

        Last of all: whatever a recipe does to the weights here, no measurement comes after it.
        """
        guard = NumericsGuard(self.engine.model, self.scaler)
        for card, repeat in [*((card, 0) for card in self.cards), (self.baseline, 1)]:
            self._use(card, afresh=True)
            self._what = f"numerics of {card.name}"
            for step in range(-GUARD_SETTLE, self.settings.guard_steps):
                if step in (-GUARD_SETTLE, 0):
                    snapshot.restore()
                keeps = step >= 0 and card is self.baseline and not repeat
                self.trial = guard.trial(card.name, step, keeps, repeat)
                yield
                self.recorder.add(self.trial.fact(self._loss))
        self.trial = None
        for rank, reason in enumerate(self.processes.gather(guard.why_not_same)):
            if reason is not None and guard.why_not_same is None:
                self.recorder.add(Problem("numerics guard", f"rank {rank} could not give its batches again: {reason}"))

    def _watched_step(
        self, log: GemmLog, library: LibraryListener | None = None, held: MemoryWatch | None = None
    ) -> Steps:
        """One step that looks at every GEMM's operands: the library's at its entry, PyTorch's by the profiler.

        With `library`, at what the library's own log says of them too; with `held`, at memory.
        """

        def boundary(scope: Scope, enters: bool) -> None:
            if library is not None:
                library.boundary(scope)
            if held is not None:
                held.boundary(scope, enters)

        scopes = self._ranged_scopes(boundary)
        tracer = Tracer(self.engine.device, shapes=True)
        with ExitStack() as stack:
            tracer.start()
            stack.callback(_stop_quietly, tracer)
            if library is not None:
                stack.enter_context(library.listen(scopes.current))
            # The ranges mark the products inside a call, which are no further ones (TE's reference GEMMs are such).
            around = _both(_gemm_ranges(log), library.around) if library else _gemm_ranges(log)
            with scopes.installed(), self.engine.watch(scopes.current, log.add_call, around):
                yield
        for product in tracer.products():
            log.add_product(product)

    def _ranged_scopes(self, boundary: Callable[[Scope, bool], None] | None = None) -> ModuleScopes:
        """The model's modules, each with a profiler range around its forward and backward.

        `boundary` is told of every module that begins (True) or ends (False).
        """
        enter, leave = _module_ranges(boundary)
        return ModuleScopes(self.engine.scoped_modules(), enter, leave)

    def _boundary(self) -> None:
        """Between two timed steps."""
        assert self._clock is not None
        self._clock.boundary()
        if self._forward is not None:
            self._forward.boundary()

    # -- small parts -----------------------------------------------------------------------------------------------

    def _open_step(self) -> None:
        if self._traced_step is not None:
            self._step_range = step_range(self._traced_step)
            self._step_range.__enter__()
        if self.ranges.enabled and self.card is not None:
            self._push(f"{self.card.name} {self._step_word}", self._steps_done)
        self.phase("data")

    def _close_step(self) -> None:
        if self._traced_step is not None and self._step_range is not None:
            with own_range("synchronize"):
                synchronize(self.engine.device)
        self.phase("")
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None
        self._traced_step = None
        while self._nvtx_depth:
            self._pop()

    def _push(self, message: str, payload: int | None = None) -> None:
        self.ranges.push(message, payload)
        self._nvtx_depth += 1

    def _pop(self) -> None:
        self.ranges.pop()
        self._nvtx_depth -= 1

    def _read_phase_memory(self) -> None:
        phases: tuple[memory.WatchedPhase, ...] = ("forward", "backward", "optimizer")
        for phase in phases:
            if self._memory is not None and self._phase_name == phase:
                self.recorder.add(*self._memory.ends(phase))

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
        if self.snapshot is not None:
            self.snapshot.restore()
            self.card = None  # its scales are broken as well: the next block begins from a clean state
            what += "; the recipes after it start again from the state before the profile"
        self.recorder.add(Problem(f"{recipe}, round {round_ + 1}", what))


def _stop_quietly(tracer: Tracer) -> None:
    """Stopping a session that an exception interrupted can itself fail; the first exception is the one that counts."""
    try:
        tracer.stop()
    except RuntimeError:
        return


def _gemm_ranges(log: GemmLog) -> Around:
    """Puts a profiler range around each GEMM call, with the name of its linear layer."""

    def around(scope: Scope | None, role: Role, sizes: Sizes) -> AbstractContextManager[Any]:
        return gemm_range(log.module_of(scope, sizes), role)

    return around


def _both(outer: Around, inner: Around) -> Around:
    """Two contexts around each GEMM call, one inside the other."""

    @contextmanager
    def around(scope: Scope | None, role: Role, sizes: Sizes) -> Iterator[None]:
        with outer(scope, role, sizes), inner(scope, role, sizes):
            yield

    return around


def _module_ranges(
    boundary: Callable[[Scope, bool], None] | None = None,
) -> tuple[Callable[[Scope], None], Callable[[Scope], None]]:
    """Listeners that put a profiler range around each module, on whatever thread runs it, and tell `boundary`."""
    opened: dict[int, list[AbstractContextManager[Any]]] = {}

    def enter(scope: Scope) -> None:
        entered = module_range(scope)
        entered.__enter__()
        opened.setdefault(threading.get_ident(), []).append(entered)
        if boundary is not None:
            boundary(scope, True)

    def leave(scope: Scope) -> None:
        if boundary is not None:
            boundary(scope, False)
        stack = opened.get(threading.get_ident())
        if stack:
            stack.pop().__exit__(None, None, None)

    return enter, leave
