"""One profiling session: from a live model to a finished Report, with no Trainer in sight.

`Session.open` decides what can run and writes down why the rest cannot; `run` runs the `Sweep` and puts everything
back; `show` analyses and shows. The Lightning callback is a thin layer over this, and so is `profile` for any other
loop.
"""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import lowprec_callback
from lowprec_callback import recording
from lowprec_callback.analyze.verdict_summary import fallbacks
from lowprec_callback.engines.base import Engine, NotRun
from lowprec_callback.engines.choose import choose_engine
from lowprec_callback.engines.te_nvtx import TeRanges
from lowprec_callback.engines.transformer_engine import load
from lowprec_callback.failures import in_words
from lowprec_callback.files import why
from lowprec_callback.measure.device import ClockReader, environment
from lowprec_callback.measure.nvtx import Ranges, under_nsys
from lowprec_callback.publish import heeded, publish
from lowprec_callback.recipes import RecipeCard, RecipeError, load_cards, resolve
from lowprec_callback.recording import Environment, Model, Plan, Problem, Recorder, Refusal
from lowprec_callback.report import Report
from lowprec_callback.run_folder import new_run_folder, run_folder
from lowprec_callback.sweep.arguments import named
from lowprec_callback.sweep.kept_objects import NotPutBack
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.progress import make_progress
from lowprec_callback.sweep.progress import say as say_aloud
from lowprec_callback.sweep.python_state import PythonState
from lowprec_callback.sweep.rank_session import Found, agree, gather_summaries
from lowprec_callback.sweep.ranks import Alone, RankError, Ranks
from lowprec_callback.sweep.script import StepFailed, Sweep
from lowprec_callback.sweep.snapshot import Rng, Snapshot, rank_bytes, whole_size
from lowprec_callback.sweep.time_budget import Pace

Status = Literal["finished", "shortened", "interrupted", "failed"]


class ProfilerError(ValueError):
    """A request that cannot be met here, found before anything was touched."""


class NotPutBackError(RuntimeError):
    """After the sweep the user's state could not be put back, so that training must not go on from there."""


class FallbackError(ProfilerError):
    """A GEMM did not run in the precision that its recipe asks for, and the user asked to be stopped by that.

    Raised when the report is written and everything is restored. The message names modules, roles and causes.
    """


@dataclass(frozen=True)
class Options:
    """What the user asked for (see `LowPrecisionProfiler` for each)."""

    recipes: Sequence[str] | str | None = None
    baseline: str | None = None
    settings: Settings = field(default_factory=Settings)
    gemm_benchmark: bool = True
    output_dir: str | None = None
    """None: the folder that `Training.folder` names."""
    nvtx: bool | None = None
    progress: bool = True
    keep_rank_recordings: bool = False
    recipe_arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_seconds: float | None = None
    continue_with: str | None = None
    """In a fit. It is not profiled for that, but its card may be given arguments."""


@dataclass(frozen=True)
class Training:
    """What the session needs to know of the run that it is a guest in."""

    model: nn.Module
    device: torch.device
    name: str
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any] = ()
    scaler: Any = None
    micro_batches: int = 1
    batches: str | None = None
    """Which batches the sweep's steps use, in words."""
    rich_display: bool = False
    """Whether a live display of rich's owns the terminal."""
    folder: str = "."
    """Where run folders are made, unless the user says where."""
    no_profiler: str | None = None
    """Why no session of torch.profiler may be opened (the user's own is), or None."""
    speaks: bool = True
    """Whether this process prints and writes (rank zero does)."""
    processes: Ranks = field(default_factory=Alone)
    """Those that train together."""
    holder: nn.Module | None = None
    """The module that holds all parameters, where a strategy wraps the model in one of its own."""
    seconds_left: float | None = None
    """Seconds until the fit ends; None if no time is set for it."""


@dataclass
class Session:
    """A session that is open: its sweep is ready to start."""

    sweep: Sweep
    engine: Engine
    recorder: Recorder
    """It knows where the files of the run go, or would go, and tries until the end."""
    folder: Path | None
    """Where the measurements are; None: in memory alone, as no disk takes them."""
    say: Callable[[str], None]
    speaks: bool
    processes: Ranks = field(default_factory=Alone)
    report: Report | None = None
    keep: bool = False
    """Whether the Recordings of ranks other than zero are kept."""
    te_ranges: TeRanges | None = None

    @staticmethod
    def open(
        options: Options, training: Training, step: Callable[[], Any], te_ranges: TeRanges | None = None
    ) -> Session:
        """Choose the engine, sort out recipes, and set the user's state aside.

        Args:
            options: what the user asked for.
            training: the run that the session is a guest in.
            step: runs one optimizer step of it.
            te_ranges: from `early_ranges`, if the owner of the loop could call it before anything ran.

        Raises:
            ProfilerError: a recipe is unknown, the baseline or none of the recipes that were named can run, or the
                state cannot be set aside; on all ranks, if on one.
        """
        say = say_aloud if training.speaks else _silent
        processes = training.processes
        ranges = Ranges(wants_nvtx(options))
        te_ranges = te_ranges or early_ranges(options)
        no_profiler = training.no_profiler or _why_no_profiler()
        try:
            engine, _ = processes.together(lambda: choose_engine(training.model, training.device))
            (baseline, asked), answers = processes.together(
                lambda: _cards(options, engine),
                lambda cards: Found.of(
                    processes,
                    engine,
                    _sort_out(engine, cards[1]),
                    no_profiler or _why_no_trace(),
                    no_profiler,
                    ranges.enabled,
                ),
            )
            agreed = agree(answers)
            able = [card for card in asked if card.name in agreed.able]
            refused = [(card, agreed.refused[card.name]) for card in asked if card.name in agreed.refused]
            _require(baseline, refused)
            if options.recipes is not None and len(able) == 1 and len(asked) > 1:
                reasons = "; ".join(f"{card.name}: {reason.reason}" for card, reason in refused)
                raise ProfilerError(f"none of the recipes that were asked for can run here. {reasons}")
            settings = replace(options.settings, traced_steps=0) if agreed.no_trace else options.settings
            if not agreed.nvtx:
                settings = replace(settings, nvtx_steps=0)
            snapshot, _ = processes.together(lambda: _take_snapshot(training))
            place = _place_of_run(options.output_dir or training.folder, training.name, processes)
        except (RecipeError, RankError) as error:
            raise ProfilerError(str(error)) from error

        file = place.folder / (f"rank-{processes.rank}.jsonl" if processes.rank else recording.FILE_NAME)
        recorder = Recorder(file, lowprec_callback.__version__, on_disk=not processes.rank)
        device_type: Literal["cuda", "cpu"] = "cuda" if training.device.type == "cuda" else "cpu"
        recorder.add(environment(device_type, load().version))
        recorder.add(_model_fact(training, engine))
        recorder.add(*(card.to_fact(card is able[0]) for card in [*able, *(card for card, _ in refused)]))
        recorder.add(*(Refusal(card.name, reason.reason, reason.source) for card, reason in refused))
        sweep = Sweep(
            engine=engine,
            cards=able,
            settings=settings,
            recorder=recorder,
            snapshot=snapshot,
            step=step,
            gemm_benchmark=options.gemm_benchmark,
            no_trace=agreed.no_trace,
            no_profiler=agreed.no_profiler,
            progress=make_progress(options.progress and training.speaks, training.rich_display),
            ranges=ranges,
            clocks=ClockReader() if device_type == "cuda" else None,
            scaler=training.scaler,
            processes=processes,
            optimizers=training.optimizers,
            pace=Pace(_shorter(options.max_seconds, training.seconds_left)),
            say=say,
        )
        recorder.add(_plan_fact(sweep, training))
        if place.problem:
            recorder.add(Problem("output_dir", place.problem))
        for name in snapshot.unkept:
            recorder.add(Problem("restore", _not_kept(name)))
        if te_ranges is not None and te_ranges.problem:
            recorder.add(Problem("nvtx", te_ranges.problem))
            say(f"lowprec: {te_ranges.problem}")
        folder = place.folder if place.made else None
        session = Session(sweep, engine, recorder, folder, say, training.speaks, processes, te_ranges=te_ranges)
        session.keep = options.keep_rank_recordings
        session._announce()
        return session

    def _announce(self) -> None:
        names = ", ".join(card.name for card in self.sweep.cards)
        s = self.sweep.settings
        plan_ = self.recorder.snapshot().last(Plan)
        batches = f", on {plan_.batches}" if plan_ is not None and plan_.batches else ""
        self.say(
            f"lowprec: profiling {names} on {self.engine.name} ({self.engine.why}) in about {self.sweep.total_steps} "
            f"steps of its own: {s.rounds} rounds x ({s.settle_steps} settled + {s.timed_steps} timed), "
            f"{s.traced_steps} traced and {s.guard_steps} compared a recipe{batches}. How long that takes is known "
            f"after the first of them; then training starts as if nothing had been"
        )
        for name in self.sweep.snapshot.unkept if self.sweep.snapshot is not None else ():
            self.say(f"lowprec: {_not_kept(name)}")
        for refusal in self.recorder.snapshot().of(Refusal):
            self.say(f"lowprec: {refusal.recipe} not run: {refusal.reason}")

    def run(self) -> None:
        """Run the sweep and put everything back. What fails of our own, or of a recipe, only ends the sweep.

        Raises:
            StepFailed: the user's own step raised; everything is put back.
            BaseException: Ctrl-C and the like; and with several ranks whatever a step raised, as the others wait for
                this one in the middle of it. Everything is put back.
            NotPutBackError: not everything could be put back.
        """
        status: Status = "failed"
        reason: str | None = None
        try:
            with heeded():
                self.sweep.run()
                if self.processes.size > 1:  # after an exception nobody can tell whether the other ranks come
                    self.recorder.add(*gather_summaries(self.processes, self.recorder, _device(self.recorder)))
            status, reason = ("shortened", self.sweep.cut) if self.sweep.cut else ("finished", None)
        except StepFailed as failure:
            who = "the profiler itself failed" if failure.ours else f"a step in {failure.recipe or 'no recipe'} failed"
            reason = f"{who} ({failure})"
            if not failure.ours:
                raise
        except Exception as error:
            if self.processes.size > 1:
                reason = in_words(error)
                raise
            reason = f"the profiler itself failed ({in_words(error)})"
        except BaseException as error:
            status, reason = _stopped(error)
            raise
        finally:
            self.close(status, reason)
        if self.sweep.not_put_back:
            where = "could not be written" if self.folder is None else f"are in {self.folder}"
            raise NotPutBackError(
                f"after the profile {self.sweep.not_put_back}. Training from here would not be yours, so it ends; the "
                f"measurements {where}"
            )

    def close(self, status: Status = "failed", reason: str | None = "it never began") -> None:
        """Put everything back and close the Recording. Idempotent; `run` does it."""
        with uninterrupted():
            self.sweep.finish(status, reason)
            if self.recorder.closed:
                return
            if self.te_ranges is not None:
                self.te_ranges.close()
            if self.processes.rank and (self.keep or status not in ("finished", "shortened")):
                self.recorder.write()
            self.recorder.close()
            if self.recorder.lost:
                self.say(f"lowprec: {self.recorder.lost}")
                self.folder = self.recorder.path.parent if self.recorder.kept() else None  # it may have moved
            if self.processes.rank:
                self.recorder.forget()
            if self.sweep.clocks is not None:
                self.sweep.clocks.close()

    def show(self) -> None:
        """On the rank that speaks: analyse and show. `run` is over."""
        if self.speaks:
            self._show()

    def raise_on_fallback(self) -> None:
        """Raise if the report names a GEMM with the verdict `fallback`, in any recipe, the baseline included.

        What was asked for (`by_request`), what no recipe reaches (`outside`), what is emulated and what is not known
        (`unproven`) does not count. The report is rank zero's; all ranks raise, or none.

        Raises:
            FallbackError: see there.
        """
        message = fallbacks(self.report) if self.report is not None else None
        if message:
            where = "has no folder: none could be written" if self.folder is None else f"is in {self.folder}"
            message = f"{message} The report {where}."
        if message := self.processes.from_zero(message):
            raise FallbackError(message)
        if self.report is not None and not any(
            part.verdict is not None and part.verdict.coverage.known for part in self.report.recipes
        ):
            self.say("lowprec: fail_on_fallback could check nothing: no traced step was recorded")

    def _show(self) -> None:
        """Analyse, print the page and write the files beside the Recording, wherever that is by now.

        Nothing that fails in it hurts the training run.
        """
        self.report = publish(self.recorder, self.recorder.path.parent, say=self.say)


@dataclass(frozen=True)
class Continuation:
    """Training in one recipe, with no sweep around it."""

    engine: Engine
    card: RecipeCard

    @staticmethod
    def of(
        options: Options, model: nn.Module, device: torch.device, recipe: str, processes: Ranks | None = None
    ) -> Continuation:
        """Prepare, and prove that it can be done, on every rank.

        Raises:
            ProfilerError: the recipe is unknown, or cannot run here, or on another rank.
        """
        try:
            made, _ = (processes or Alone()).together(lambda: Continuation._here(options, model, device, recipe))
        except RankError as error:
            raise ProfilerError(str(error)) from error
        return made

    @staticmethod
    def _here(options: Options, model: nn.Module, device: torch.device, recipe: str) -> Continuation:
        engine = choose_engine(model, device)
        try:
            card = resolve([recipe], engine.name)[0]
            card = card.with_arguments(options.recipe_arguments.get(card.name, {}))
        except RecipeError as error:
            raise ProfilerError(f"continue_with: {error}") from error
        with Rng.kept():
            reason = engine.refusal(card) or engine.probe(card)
        if reason is not None:
            raise ProfilerError(f"continue_with: {card.name} cannot run here: {reason.reason} ({reason.source})")
        return Continuation(engine, card)

    def region(self) -> AbstractContextManager[Any]:
        """The context for one forward pass."""
        return self.engine.region(self.card)


def wants_nvtx(options: Options) -> bool:
    """Whether NVTX ranges are emitted: as asked, else while Nsight Systems is attached."""
    return under_nsys() if options.nvtx is None else options.nvtx


def early_ranges(options: Options) -> TeRanges | None:
    """Switch Transformer Engine's own NVTX ranges on, if ours are; to be called before any of its modules runs."""
    return TeRanges() if wants_nvtx(options) else None


def _cards(options: Options, engine: Engine) -> tuple[RecipeCard, list[RecipeCard]]:
    """(baseline, all recipes with the baseline first), with the user's arguments in place."""
    asked = resolve(options.recipes, engine.name)
    baseline = resolve([options.baseline or engine.default_baseline], engine.name)[0]
    # A card that is named here wins over the built-in one of its name, and one that runs over one that does not.
    further = [] if options.continue_with is None else named([options.continue_with])
    known = {**load_cards(), **{card.name: card for card in (*further, baseline, *asked)}}
    for name, arguments in options.recipe_arguments.items():
        if name not in known:
            raise RecipeError(f"recipe_arguments names {name!r}; known recipes: {', '.join(known)}")
        known[name] = known[name].with_arguments(arguments)
    names = dict.fromkeys([baseline.name, *(card.name for card in asked)])
    cards = [known.get(name, baseline) for name in names]
    if options.recipes is None and engine.name == "plain_torch":
        # Without being asked: what is narrower than the baseline, or cannot be the baseline here.
        cards = [card for card in cards if card.name == baseline.name or card.autocast_dtype is not None]
    return cards[0], cards


def _sort_out(engine: Engine, cards: Iterable[RecipeCard]) -> tuple[list[RecipeCard], list[tuple[RecipeCard, NotRun]]]:
    with Rng.kept():  # the probes draw random numbers
        return engine.sort_out(cards)


def _require(baseline: RecipeCard, refused: Iterable[tuple[RecipeCard, NotRun]]) -> None:
    """Without the baseline there is nothing to compare with."""
    for card, reason in refused:
        if card.name == baseline.name:
            raise ProfilerError(f"the baseline {card.name} cannot run here: {reason.reason} ({reason.source})")


def _take_snapshot(training: Training) -> Snapshot:
    holder = training.holder or training.model
    try:
        return Snapshot.take(holder, training.optimizers, training.schedulers, training.scaler)
    except Exception as error:
        raise ProfilerError(f"the state cannot be set aside ({in_words(error)})") from error


def _model_fact(training: Training, engine: Engine) -> Model:
    holder = training.holder or training.model
    parameters, nbytes = whole_size(holder)
    here = rank_bytes(holder)
    return Model(
        name=training.name,
        engine=engine.name,
        why_engine=engine.why,
        parameters=parameters,
        parameter_bytes=nbytes,
        linear_modules={layer.path: layer.family for layer in engine.linear_layers()},
        rank_bytes=here if here < nbytes else None,
    )


FIT_SHARE = 0.25
"""Share of the time until the fit ends by its own limit (`max_time`) that the sweep may take."""


def _shorter(max_seconds: float | None, left: float | None) -> float | None:
    limits = [limit for limit in (max_seconds, None if left is None else FIT_SHARE * left) if limit is not None]
    return min(limits) if limits else None


def _not_kept(name: str) -> str:
    """A sentence about something of `Snapshot.unkept`."""
    return name if name.endswith("not kept") else f"{name} keeps a position of its own, which cannot be put back"


def _plan_fact(sweep: Sweep, training: Training) -> Plan:
    s = sweep.settings
    return Plan(
        recipes=tuple(card.name for card in sweep.cards),
        baseline=sweep.baseline.name,
        **s.sizes(),
        seed=s.seed,
        micro_batches=training.micro_batches,
        steps=sweep.total_steps,
        no_guard=None if s.guard_steps else "it was switched off (guard_steps=0)",
        batches=training.batches,
    )


def _why_no_trace() -> str | None:
    if under_nsys():
        return "Nsight Systems is attached, and only one tool can trace the GPU: kernels are in its capture instead"
    return None


def _why_no_profiler() -> str | None:
    if torch._C._autograd._profiler_enabled():
        return "a profiler of PyTorch's is running already, and a second session would break both"
    return None


def _stopped(error: BaseException) -> tuple[Status, str]:
    stopped = isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SIGTERMException"
    name = type(error).__name__
    return "interrupted" if stopped else "failed", f"{name}: {error}" if str(error) else name


def put_back(outside: PythonState) -> None:
    """What the snapshot of the model does not hold: data and the user's own objects.

    Raises:
        NotPutBackError: some of it could not be.
    """
    try:
        with uninterrupted():
            outside.restore()
    except NotPutBack as error:
        raise NotPutBackError(
            f"after the profile {error}; training from here would not be yours, so it ends"
        ) from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C waits: what is being put back is put back whole. Afterwards it comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, Any]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])


@dataclass(frozen=True)
class _Place:
    """Where the files of a run go."""

    folder: Path
    made: bool = True
    """Whether it is there. Else it is the folder that was asked for."""
    problem: str | None = None
    """Why it is not there, or not where the user wanted it."""


def _place_of_run(output_dir: str, name: str, processes: Ranks) -> _Place:
    """Rank zero makes the folder of this run, all know it."""
    _, answers = processes.together(
        lambda: _make_place(output_dir, name) if not processes.rank else None,
        lambda place: None if place is None else (str(place.folder), place.made, place.problem),
    )
    folder, made, problem = answers[0]
    return _Place(Path(folder), made, problem)


def _make_place(output_dir: str, name: str) -> _Place:
    """A folder that cannot be written gives way to a temporary one.

    Raises:
        ProfilerError: all names are taken.
    """
    parent, clean = Path(output_dir), "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    try:
        folder = new_run_folder(parent, clean)
    except OSError as error:
        refused = f"{output_dir} cannot be written ({why(error)})"
        try:
            other = Path(tempfile.mkdtemp(prefix="lowprec-"))
        except OSError:
            nowhere = f"{refused}, nor can a temporary folder: what is measured is kept in memory"
            return _Place(run_folder(parent, clean), made=False, problem=nowhere)
        return _Place(other, problem=f"{refused}; this run is in {other} instead")
    if folder is not None:
        return _Place(folder)
    raise ProfilerError(f"{parent}: a hundred runs of {name!r} in one second; give another output_dir")


def _device(recorder: Recorder) -> str:
    environment_ = recorder.snapshot().last(Environment)
    return environment_.device if environment_ else "unknown"


def _silent(_text: str) -> None:
    """Other ranks say nothing."""
