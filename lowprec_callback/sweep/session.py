"""One profiling session: from a live model to a finished Report, with no Trainer in sight.

`Session.open` decides what can run and writes down why the rest cannot; the `Sweep` runs; `close` restores,
analyses and shows. The Lightning callback is a thin layer over this, and so could be any other training loop.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import lowprec_callback
from lowprec_callback import recording, report
from lowprec_callback.analyze.verdict_summary import fallbacks
from lowprec_callback.engines.base import Engine, NotRun
from lowprec_callback.engines.choose import choose_engine
from lowprec_callback.engines.te_nvtx import TeRanges
from lowprec_callback.engines.transformer_engine import load
from lowprec_callback.failures import in_words
from lowprec_callback.measure.device import ClockReader, environment
from lowprec_callback.measure.nvtx import Ranges, under_nsys
from lowprec_callback.recipes import RecipeCard, RecipeError, load_cards, resolve
from lowprec_callback.recording import Environment, Model, Plan, Problem, Recorder, Refusal
from lowprec_callback.report import Report
from lowprec_callback.run_folder import new_run_folder
from lowprec_callback.sweep import plan
from lowprec_callback.sweep.plan import PlanError, Settings
from lowprec_callback.sweep.progress import beside_bars, make_progress
from lowprec_callback.sweep.progress import say as say_aloud
from lowprec_callback.sweep.rank_session import Found, agree, gather_summaries
from lowprec_callback.sweep.ranks import Alone, RankError, Ranks
from lowprec_callback.sweep.script import Sweep
from lowprec_callback.sweep.snapshot import Rng, Snapshot, rank_bytes, whole_size
from lowprec_callback.sweep.time_budget import Pace

Status = Literal["finished", "shortened", "interrupted", "failed"]


class ProfilerError(ValueError):
    """A request that cannot be met here, found before anything was touched."""


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
    restore: bool = True
    output_dir: str = "runs"
    nvtx: bool | None = None
    progress: bool = True
    keep_rank_recordings: bool = False
    recipe_arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_seconds: float | None = None


@dataclass(frozen=True)
class Training:
    """What the session needs to know of the run that it is a guest in."""

    model: nn.Module
    device: torch.device
    name: str
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any] = ()
    scaler: Any = None
    steps_left: int | None = None
    """Optimizer steps left in the fit; None if there is no end."""
    micro_batches: int = 1
    other_progress_bar: bool = False
    """Whether another live display owns the terminal."""
    speaks: bool = True
    """Whether this process prints and writes (rank zero does)."""
    processes: Ranks = field(default_factory=Alone)
    """Those that train together."""
    holder: nn.Module | None = None
    """The module that holds all parameters, where a strategy wraps the model in one of its own."""
    seconds_left: float | None = None
    """Seconds until the fit ends; None if no time is set for it."""
    steps_left_now: Callable[[], int | None] = lambda: None
    """Optimizer steps left, asked at the end of a step, when the first have shown what a step is."""
    averages: Sequence[nn.Module] = ()
    """Modules beside the model that follow its weights, and are restored with it."""


@dataclass
class Session:
    """A session that is open: its sweep is ready to start."""

    sweep: Sweep
    engine: Engine
    recorder: Recorder
    folder: Path
    cards: dict[str, RecipeCard]
    say: Callable[[str], None]
    speaks: bool
    processes: Ranks = field(default_factory=Alone)
    report: Report | None = None
    keep: bool = False
    """Whether the Recordings of ranks other than zero are kept."""
    te_ranges: TeRanges | None = None

    @staticmethod
    def open(options: Options, training: Training, te_ranges: TeRanges | None = None) -> Session:
        """Choose the engine, sort out recipes, fit the plan, and set the user's state aside.

        `te_ranges` comes from `early_ranges`, if the owner of the loop could call it before anything ran.

        Raises:
            ProfilerError: no plan fits, a recipe is unknown, or none of the recipes that were named can run.
        """
        say = say_aloud if training.speaks else _silent
        processes = training.processes
        ranges = Ranges(wants_nvtx(options))
        te_ranges = te_ranges or early_ranges(options)
        engine = choose_engine(training.model, training.device)
        try:
            (baseline, asked), answers = processes.together(
                lambda: _cards(options, engine),
                lambda cards: Found.of(
                    processes, engine, _sort_out(engine, cards[1]), training.steps_left, _why_no_trace(), ranges.enabled
                ),
            )
            agreed = agree(answers)
            able = [card for card in asked if card.name in agreed.able]
            refused = [(card, agreed.refused[card.name]) for card in asked if card.name in agreed.refused]
            _require(baseline, refused)
            if options.recipes is not None and len(able) == 1 and len(asked) > 1:
                reasons = "; ".join(f"{card.name}: {reason.reason}" for card, reason in refused)
                raise ProfilerError(f"none of the recipes that were asked for can run here. {reasons}")
            asked_for = replace(options.settings, traced_steps=0) if agreed.no_trace else options.settings
            if not agreed.nvtx:
                asked_for = replace(asked_for, nvtx_steps=0)
            if not options.restore:
                asked_for = replace(asked_for, guard_steps=0)
            fitted = plan.fit(asked_for, len(able), agreed.steps_left)
            folder, folder_problem = _run_folder(options.output_dir, training.name, processes)
        except (PlanError, RecipeError, RankError) as error:
            raise ProfilerError(str(error)) from error

        file = folder / (f"rank-{processes.rank}.jsonl" if processes.rank else recording.FILE_NAME)
        recorder = Recorder(file, lowprec_callback.__version__, on_disk=not processes.rank)
        device_type: Literal["cuda", "cpu"] = "cuda" if training.device.type == "cuda" else "cpu"
        recorder.add(environment(device_type, load().version))
        recorder.add(_model_fact(training, engine))
        recorder.add(*(card.to_fact(card is able[0]) for card in [*able, *(card for card, _ in refused)]))
        recorder.add(*(Refusal(card.name, reason.reason, reason.source) for card, reason in refused))
        sweep = Sweep(
            engine=engine,
            cards=able,
            settings=fitted.settings,
            recorder=recorder,
            snapshot=_take_snapshot(training) if options.restore else None,
            gemm_benchmark=options.gemm_benchmark,
            no_trace=agreed.no_trace,
            progress=make_progress(options.progress and training.speaks, training.other_progress_bar),
            ranges=ranges,
            clocks=ClockReader() if device_type == "cuda" else None,
            spare_steps=fitted.spare,
            scaler=training.scaler,
            processes=processes,
            optimizers=training.optimizers,
            pace=Pace(_shorter(options.max_seconds, training.seconds_left)),
            steps_left=training.steps_left_now,
            say=say,
        )
        no_guard = _why_no_guard(options, fitted.settings)
        recorder.add(_plan_fact(sweep, training.micro_batches, fitted.shrunk, no_guard))
        if folder_problem:
            recorder.add(Problem("output_dir", folder_problem))
        if te_ranges is not None and te_ranges.problem:
            recorder.add(Problem("nvtx", te_ranges.problem))
            say(f"lowprec: {te_ranges.problem}")
        cards = {c.name: c for c in [*able, *asked]}
        session = Session(sweep, engine, recorder, folder, cards, say, training.speaks, processes, te_ranges=te_ranges)
        session.keep = options.keep_rank_recordings
        session._announce(fitted.shrunk)
        return session

    def _announce(self, shrunk: str | None) -> None:
        names = ", ".join(card.name for card in self.sweep.cards)
        s = self.sweep.settings
        self.say(
            f"lowprec: profiling {names} on {self.engine.name} ({self.engine.why}) over the next "
            f"{self.sweep.total_steps} optimizer steps: {s.rounds} rounds x ({s.settle_steps} settled + "
            f"{s.timed_steps} timed), {s.traced_steps} traced and {s.guard_steps} compared a recipe"
        )
        if shrunk:
            self.say(f"lowprec: {shrunk}")
        for refusal in self.recorder.snapshot().of(Refusal):
            self.say(f"lowprec: {refusal.recipe} not run: {refusal.reason}")

    def start(self) -> None:
        """The next optimizer step is the sweep's."""
        self.sweep.start()

    def close(self, status: Status, reason: str | None = None, *, show: bool = True) -> None:
        """End the sweep, restore the user's state, and on the rank that speaks make and show the report. Idempotent."""
        if self.report is not None or self.recorder.closed:
            return
        in_order = status in ("finished", "shortened")
        if in_order and self.processes.size > 1:  # after an exception nobody can tell whether the other ranks come
            self.recorder.add(*gather_summaries(self.processes, self.recorder, _device(self.recorder)))
        self.sweep.finish(status, reason)
        if self.te_ranges is not None:
            self.te_ranges.close()
        if self.processes.rank and (self.keep or not in_order):
            self.recorder.write()
        self.recorder.close()
        if self.processes.rank:
            self.recorder.forget()
        if self.recorder.lost:
            self.say(f"lowprec: {self.recorder.lost}")
        if self.sweep.clocks is not None:
            self.sweep.clocks.close()
        if self.speaks and show:
            self._show()

    def raise_on_fallback(self) -> None:
        """Raise if the report names a GEMM with the verdict `fallback`, in any recipe, the baseline included.

        What was asked for (`by_request`), what no recipe reaches (`outside`), what is emulated and what is not known
        (`unproven`) does not count. The report is rank zero's; all ranks raise, or none.

        Raises:
            FallbackError: see there.
        """
        message = fallbacks(self.report) if self.report is not None else None
        if message := self.processes.from_zero(message):
            raise FallbackError(f"{message} The report is in {self.folder}.")
        if self.report is not None and not any(
            part.verdict is not None and part.verdict.coverage.known for part in self.report.recipes
        ):
            self.say("lowprec: fail_on_fallback could check nothing: no traced step was recorded")

    def _show(self) -> None:
        """Analyse and show. The measurements are safe on disk by now, so nothing here may hurt the training run."""
        try:
            from lowprec_callback.analyze.summary import analyze
            from lowprec_callback.show import html
            from lowprec_callback.show.console import print_report
            from lowprec_callback.show.plots import save_all

            self.report = analyze(self.recorder.snapshot())
            self.report.save(self.folder / report.FILE_NAME)
            plots = save_all(self.report, self.folder)
            files = [html.FILE_NAME, report.FILE_NAME, *(plot.path.name for plot in plots if plot.path)]
            html.save(self.report, self.folder / html.FILE_NAME, files)
            with beside_bars(sys.stdout):
                print_report(self.report, files=files)
        except Exception as error:
            self.say(
                f"lowprec: the report could not be finished ({in_words(error)}); all that was measured "
                f"is in {self.recorder.path}: show it with `lowprec report {self.folder}`"
            )


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
            card = resolve([recipe], engine.name)[0].with_arguments(options.recipe_arguments.get(recipe, {}))
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


def report_in(folder: Path) -> Report | None:
    """The report of a run that is over; None where it is no longer there or cannot be read."""
    try:
        return report.load_report(folder)
    except (OSError, ValueError):
        return None


def wants_nvtx(options: Options) -> bool:
    """Whether NVTX ranges are emitted: as asked, else while Nsight Systems is attached."""
    return under_nsys() if options.nvtx is None else options.nvtx


def early_ranges(options: Options) -> TeRanges | None:
    """Switch Transformer Engine's own NVTX ranges on, if ours are; to be called before any of its modules runs."""
    return TeRanges() if wants_nvtx(options) else None


def _cards(options: Options, engine: Engine) -> tuple[RecipeCard, list[RecipeCard]]:
    """(baseline, all recipes with the baseline first), with the user's arguments in place."""
    asked = resolve(options.recipes, engine.name)
    known = {**load_cards(), **{card.name: card for card in asked}}
    baseline = resolve([options.baseline or engine.default_baseline], engine.name)[0]
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
    return Snapshot.take(holder, training.optimizers, training.schedulers, training.scaler, training.averages)


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


FIT_MARGIN = 0.9
"""Share of the time until the fit ends by its own limit that the sweep counts on: the report wants some of it too."""


def _shorter(max_seconds: float | None, left: float | None) -> float | None:
    limits = [limit for limit in (max_seconds, None if left is None else FIT_MARGIN * left) if limit is not None]
    return min(limits) if limits else None


def _plan_fact(sweep: Sweep, micro_batches: int, shrunk: str | None, no_guard: str | None) -> Plan:
    s = sweep.settings
    return Plan(
        recipes=tuple(card.name for card in sweep.cards),
        baseline=sweep.baseline.name,
        **s.sizes(),
        seed=s.seed,
        micro_batches=micro_batches,
        steps=sweep.total_steps,
        shrunk=shrunk,
        no_guard=no_guard,
    )


def _why_no_guard(options: Options, fitted: Settings) -> str | None:
    if fitted.guard_steps:
        return None
    if not options.restore:
        return "the state is not kept (restore=False), so recipes cannot start from the same one"
    return "the fit is too short for it" if options.settings.guard_steps else "it was switched off (guard_steps=0)"


def _why_no_trace() -> str | None:
    if under_nsys():
        return "Nsight Systems is attached, and only one tool can trace the GPU: kernels are in its capture instead"
    return None


def _run_folder(output_dir: str, name: str, processes: Ranks) -> tuple[Path, str | None]:
    """(the folder of this run, a problem). Rank zero makes it, all know it.

    A folder that cannot be written gives way to a temporary one.
    """
    _, answers = processes.together(
        lambda: _make_folder(output_dir, name) if not processes.rank else None,
        lambda made: None if made is None else (str(made[0]), made[1]),
    )
    folder, problem = answers[0]
    return Path(folder), problem


def _make_folder(output_dir: str, name: str) -> tuple[Path, str | None]:
    parent = Path(output_dir)
    try:
        folder = new_run_folder(parent, "".join(c if c.isalnum() or c in "-_." else "-" for c in name))
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="lowprec-"))
        return other, f"{output_dir} cannot be written ({error.strerror}); this run is in {other} instead"
    if folder is not None:
        return folder, None
    raise ProfilerError(f"{parent}: a hundred runs of {name!r} in one second; give another output_dir")


def _device(recorder: Recorder) -> str:
    environment_ = recorder.snapshot().last(Environment)
    return environment_.device if environment_ else "unknown"


def _silent(_text: str) -> None:
    """Other ranks say nothing."""
