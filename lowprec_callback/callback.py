"""The Lightning callback: its arguments, and the hook in which the sweep runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from lowprec_callback.failures import in_words
from lowprec_callback.sweep.options import NVTX_STEPS, options_of
from lowprec_callback.sweep.patches import Patches
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.progress import say
from lowprec_callback.sweep.python_state import PythonState
from lowprec_callback.sweep.ranks import RankError, why_not
from lowprec_callback.sweep.script import StepFailed
from lowprec_callback.sweep.session import (
    Continuation,
    FallbackError,
    NotPutBackError,
    Options,
    ProfilerError,
    Session,
    Training,
    early_ranges,
    put_back,
    uninterrupted,
)
from lowprec_callback.sweep.snapshot import Rng, kept_environment
from lowprec_callback.trainer import bar_clock, facts
from lowprec_callback.trainer.aside import set_aside
from lowprec_callback.trainer.batches import FirstBatch, NoBatches, Source, reason_for_copies, source_of
from lowprec_callback.trainer.drive import Adapter, Driver
from lowprec_callback.trainer.loggers import log_report
from lowprec_callback.trainer.te_plugin import take_region_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Callback, LightningModule, Trainer

    from lowprec_callback.engines.te_nvtx import TeRanges
    from lowprec_callback.report import Report
else:
    from lightning.pytorch import Callback


class LowPrecisionProfiler(Callback):
    """Measure, before the first step of `fit`, what each low-precision recipe gains for this model on this machine.

    A guest: the sweep runs steps of its own in the first `on_train_batch_start` and puts everything back, so that the
    training is, bit for bit, the one without it. All arguments are plain values.

    Args:
        recipes: names ("fp8_delayed"), paths of TOML cards, or folders of them; None for every recipe that can
            run here.
        baseline: the recipe that the others are compared with; None for bf16 with Transformer Engine and for fp32
            (or bf16, if the model is stored so) without.
        rounds: blocks for each recipe, in a new order each round, so that clock drift hits all alike.
        settle_steps: optimizer steps at the start of a block that are not timed.
        timed_steps: timed optimizer steps in a block.
        traced_steps: traced optimizer steps for each recipe, apart from the timed ones; 0 for no ledger.
        gemm_benchmark: time the model's own GEMM shapes under each recipe as well.
        continue_with: the recipe to train on with after the sweep; None for the user's own precision.
        stop_after: stop `fit` when the sweep is over, after one batch of training.
        output_dir: where run folders are made; None for `lowprec` in the logger's folder (`trainer.log_dir`), else in
            `default_root_dir`.
        seed: of the order of recipes.
        nvtx: emit NVTX ranges in the domain "lowprec", and switch on Transformer Engine's own; None for only when
            Nsight Systems is attached.
        nvtx_steps: with NVTX, optimizer steps for each recipe that also have ranges for modules and GEMMs, all of them
            inside one capture window (`nsys profile --capture-range=cudaProfilerApi`); 0 for none.
        guard_steps: optimizer steps that every recipe takes from the same state on the same data, so that their losses
            and gradients can be compared with the baseline's (which takes them twice); 0 for none.
        log: give the main figures to the Trainer's loggers when the sweep is over, under the names in
            `lowprec_callback.trainer.loggers`; without being asked, no row of ours is among the training's.
        progress: show a progress bar (plain lines where another bar owns the terminal).
        keep_rank_recordings: where several processes train, keep the Recordings of ranks other than zero as well, as
            `rank-N.jsonl` in the run folder, each on its own machine. After an exception they are kept in any case.
        fail_on_fallback: raise `FallbackError` after the sweep if a GEMM ran in another precision than its recipe asks
            for (the verdict `fallback`), in any recipe, the baseline included. The report is written and everything
            restored by then. Needs traced steps: without them nothing is known, and nothing is raised.
        max_rounds: rounds at most, where `rounds` leave a step less precise than `step_precision`; those beyond the
            plan take no more than a minute. `rounds` or less: none beyond the plan. None: four times `rounds`, and none
            beyond the plan where that is 1.
        step_precision: relative half-width of the 95% interval of a step's time at which no more rounds are taken.
        block_seconds: about as long as one block may be. Of a recipe whose steps are long, a block has fewer than
            `settle_steps` and `timed_steps`, but at least one and three; the report says so. None: all of them, however
            long they take.
        recipe_arguments: Transformer Engine's arguments by recipe, e.g. {"fp8_delayed": {"amax_history_len": 16}}.
        max_seconds: time that the sweep may take. It is shortened to fit as soon as the first steps have shown how
            long a step takes, and the report says by how much. None for as long as it needs; of a Trainer's `max_time`
            it takes at most a quarter of what is left.

    The report calls the model by its attribute `profile_name`, if it has one, else by its class.

    Raises:
        ProfilerError: an argument is out of range, or a recipe is unknown; from `fit` only if `continue_with` names a
            recipe that cannot run here.
        FallbackError: from `fit`, see `fail_on_fallback`.
        NotPutBackError: from `fit`, if the state from before the sweep could not be put back.

    Attributes:
        report: the Report once the sweep is over, else None. Of several ranks, zero has it.
        why_not: why there is no report, as a sentence, once that is known.
        session: the running or finished session.
    """

    def __init__(
        self,
        recipes: Sequence[str] | str | None = None,
        baseline: str | None = None,
        rounds: int = Settings.rounds,
        settle_steps: int = Settings.settle_steps,
        timed_steps: int = Settings.timed_steps,
        traced_steps: int = Settings.traced_steps,
        gemm_benchmark: bool = Options.gemm_benchmark,
        continue_with: str | None = None,
        stop_after: bool = False,
        output_dir: str | None = None,
        seed: int = Settings.seed,
        nvtx: bool | None = None,
        nvtx_steps: int = NVTX_STEPS,
        guard_steps: int = Settings.guard_steps,
        log: bool = False,
        progress: bool = Options.progress,
        keep_rank_recordings: bool = Options.keep_rank_recordings,
        fail_on_fallback: bool = False,
        recipe_arguments: Mapping[str, Mapping[str, Any]] | None = None,
        max_rounds: int | None = None,
        step_precision: float = Settings.step_precision,
        block_seconds: float | None = Settings.block_seconds,
        max_seconds: float | None = None,
    ) -> None:
        super().__init__()
        self._options = options_of(
            "LowPrecisionProfiler",
            recipes=recipes,
            baseline=baseline,
            rounds=rounds,
            settle_steps=settle_steps,
            timed_steps=timed_steps,
            traced_steps=traced_steps,
            gemm_benchmark=gemm_benchmark,
            output_dir=output_dir,
            seed=seed,
            nvtx=nvtx,
            nvtx_steps=nvtx_steps,
            guard_steps=guard_steps,
            progress=progress,
            keep_rank_recordings=keep_rank_recordings,
            recipe_arguments=recipe_arguments,
            max_rounds=max_rounds,
            step_precision=step_precision,
            block_seconds=block_seconds,
            max_seconds=max_seconds,
            continue_with=continue_with,
            stop_after=stop_after,
            log=log,
            fail_on_fallback=fail_on_fallback,
        )
        self._stop_after = stop_after
        self._log = log
        self._fail_on_fallback = fail_on_fallback
        self._patches = Patches()
        self._started = False
        self._first: FirstBatch | None = None
        self._continuation: Continuation | None = None
        self._te_ranges: TeRanges | None = None
        self.session: Session | None = None
        self.why_not: str | None = None

    @property
    def report(self) -> Report | None:
        """The finished report."""
        return self.session.report if self.session else None

    # -- fit -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before anything of the model ran, the sanity check included: the time for what is read only once."""
        if stage != "fit" or self._started:
            return
        if refusal := why_not(trainer.strategy):
            self._started = True
            self._say_why_not(trainer, refusal)
        else:
            self._te_ranges = early_ranges(self._options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is on its device and the optimizers exist: see whether `continue_with` can be had."""
        if (recipe := self._options.continue_with) is not None and not self._stop_after:
            ranks = facts.processes_of(trainer)
            self._continuation = Continuation.of(self._options, pl_module, pl_module.device, recipe, ranks)
        if self._started:
            self._continue(trainer, pl_module)
            return
        try:
            if (reason := reason_for_copies(trainer.fit_loop._combined_loader)) is not None:
                self._first = FirstBatch.watch(trainer.fit_loop._data_fetcher, reason)
        except Exception as error:  # Lightning's private attributes, and the user's own loaders
            self._started = True
            self._say_why_not(trainer, f"the profile cannot read the training data ({in_words(error)})")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first batch of the fit is at hand, and all start hooks have run: the sweep, then training."""
        if self._started:
            return
        self._started = True
        first, self._first = self._first, None
        if first is not None:
            first.leave()
        with bar_clock.stopped(trainer):
            self._profile(trainer, pl_module, first)
        if self._stop_after:
            trainer.should_stop = True
        else:
            self._continue(trainer, pl_module)
        if self._fail_on_fallback and self.session is not None:
            self.session.raise_on_fallback()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training is over, in whatever recipe."""
        self._patches.undo()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit without a single batch never came to `on_train_batch_start`."""
        if not self._started:
            self._say_why_not(trainer, "the fit had no training steps, so nothing was profiled")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """An exception that ends the fit: take everything of ours away, and let it pass."""
        if isinstance(exception, ProfilerError) and not isinstance(exception, FallbackError):
            self.why_not = str(exception)
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Whatever happened, nothing of ours stays."""
        self._leave()

    def _leave(self) -> None:
        self._patches.undo()
        if self._first is not None:
            self._first.leave()
            self._first = None
        if self._te_ranges is not None:
            self._te_ranges.close()

    # -- the sweep -------------------------------------------------------------------------------------------------

    def _profile(self, trainer: Trainer, module: LightningModule, first: FirstBatch | None) -> None:
        """The sweep, with everything set aside before it and put back after it; then its page."""
        try:
            with ExitStack() as last, Rng.kept(), kept_environment():
                self._sweep(trainer, module, first, last)
        finally:
            if self.session is not None and not self.session.sweep.not_put_back:
                with Rng.kept():
                    self.session.show()
        if self._log and self.session is not None:
            with Rng.kept():
                log_report(trainer.loggers, self.session.report, trainer.global_step, self.session.say)

    def _sweep(self, trainer: Trainer, module: LightningModule, first: FirstBatch | None, last: ExitStack) -> None:
        """Nothing of ours ends a training that would run without us: what fails is said in one sentence.

        With several ranks, what one cannot prepare, all leave out; an exception in the middle of a step ends the
        process, as in training, because the others wait for this one there.
        """
        try:
            folder = facts.folder_of(trainer)
            prepared, _ = facts.processes_of(trainer).together(lambda: _prepare(trainer, module, first, folder))
            self._drive(trainer, prepared, last)
        except NotPutBackError:
            raise
        except StepFailed as failure:
            reason = (
                f"a step of the profile failed ({failure}), and the profile ends there. If it was your code, training "
                f"comes to it by itself"
            )
        except (ProfilerError, RankError) as error:
            reason = str(error)
        except _Refused as error:
            self._say_why_not(trainer, str(error))
            return
        except Exception as error:
            if trainer.world_size > 1:
                raise
            reason = f"the profiler itself failed ({in_words(error)})"
        else:
            return
        goes_on = "" if self._stop_after else "; training goes on as without the profile"
        self._say_why_not(trainer, f"{reason}{goes_on}")

    def _drive(self, trainer: Trainer, prepared: _Prepared, last: ExitStack) -> None:
        """Run the session inside the Trainer's own loop. Then Ctrl-C waits until all is put back, when `last` ends."""
        try:
            with set_aside(trainer, prepared.adapter):
                self.session = Session.open(self._options, prepared.training, prepared.driver.step, self._te_ranges)
                try:
                    with prepared.driver.attached(self.session.sweep):
                        try:
                            self.session.run()
                        finally:
                            last.enter_context(uninterrupted())
                finally:
                    self.session.close()
        finally:
            with suppress(Exception):
                prepared.source.close()
            put_back(prepared.data)

    def _say_why_not(self, trainer: Trainer, sentence: str) -> None:
        self.why_not = sentence
        if trainer.is_global_zero:
            say(f"lowprec: {sentence}")

    def _continue(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on in `continue_with`: after the sweep, and in a second fit."""
        continuation = self._continuation
        if continuation is None:
            return
        original: Callable[..., Any] = pl_module.training_step

        @wraps(original)  # Lightning reads from the signature whether the step takes a batch index
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with continuation.region():
                return original(*args, **kwargs)

        self._patches.put(pl_module, "training_step", training_step)
        take_region_over(trainer.precision_plugin, self._patches)


class _Refused(Exception):
    """A fit that cannot be profiled as it stands."""


@dataclass(frozen=True)
class _Prepared:
    """What the sweep needs of a fit."""

    source: Source
    training: Training
    driver: Driver
    adapter: Adapter
    data: PythonState
    """Of what reads the training data."""


def _prepare(trainer: Any, module: Any, first: FirstBatch | None, folder: str) -> _Prepared:
    """Changes nothing of the fit.

    Raises:
        _Refused: it cannot be profiled.
    """
    if refusal := facts.refusal(trainer, module):
        raise _Refused(refusal)
    try:
        source = source_of(trainer, first, on_cpu=module.device.type == "cpu")
    except NoBatches as error:
        raise _Refused(f"nothing was profiled: {error}") from error
    training = facts.training_of(trainer, module, source.words, folder)
    steps = facts.steps_of_fit(trainer, 1 if module.automatic_optimization else max(1, len(trainer.optimizers)))
    adapter = Adapter()
    driver = Driver(trainer, module, adapter, source, steps)
    loaders = trainer.fit_loop._combined_loader.flattened
    names = [f"train_dataloader {index}" if len(loaders) > 1 else "train_dataloader" for index in range(len(loaders))]
    owners = {**dict(zip(names, loaders, strict=True)), "datamodule": trainer.datamodule}
    return _Prepared(source, training, driver, adapter, PythonState.take(owners, tensors=False))
