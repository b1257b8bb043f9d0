"""The Lightning callback: hooks that call the sweep, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowprec_callback import resume
from lowprec_callback.failures import in_words
from lowprec_callback.recipes import RecipeError
from lowprec_callback.sweep import arguments
from lowprec_callback.sweep.fault import passed_through_us
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.progress import say
from lowprec_callback.sweep.ranks import ranks_of, why_not
from lowprec_callback.sweep.session import (
    Continuation,
    FallbackError,
    Options,
    ProfilerError,
    Session,
    Status,
    early_ranges,
    report_in,
)
from lowprec_callback.sweep.snapshot import forget_gradients
from lowprec_callback.trainer import facts as trainer_facts
from lowprec_callback.trainer.loggers import log_report
from lowprec_callback.trainer.patches import Patches
from lowprec_callback.trainer.step_window import StepWindow
from lowprec_callback.trainer.te_plugin import take_region_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Callback, LightningModule, Trainer

    from lowprec_callback.engines.te_nvtx import TeRanges
    from lowprec_callback.report import Report
else:
    from lightning.pytorch import Callback


class LowPrecisionProfiler(Callback):
    """Measure, over the first steps of `fit`, what each low-precision recipe gains for this model on this machine.

    All arguments are plain values.

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
        stop_after: stop `fit` when the sweep is over.
        restore: put parameters, optimizer, schedulers and random generators back to where they were before the
            sweep. The batches that it used stay used, and its steps count towards `max_steps`.
        output_dir: where run folders are made.
        seed: of the order of recipes.
        nvtx: emit NVTX ranges in the domain "lowprec", and switch on Transformer Engine's own; None for only when
            Nsight Systems is attached.
        nvtx_steps: with NVTX, optimizer steps for each recipe that also have ranges for modules and GEMMs, all of them
            inside one capture window (`nsys profile --capture-range=cudaProfilerApi`); 0 for none.
        guard_steps: optimizer steps that every recipe takes from the same state on the same data, so that their losses
            and gradients can be compared with the baseline's (which takes them twice); 0 for none. Needs `restore`.
        log: give the main figures to the Trainer's loggers when the sweep is over, under the names in
            `lowprec_callback.trainer.loggers`.
        progress: show a progress bar (plain lines where another bar owns the terminal).
        keep_rank_recordings: where several processes train, keep the Recordings of ranks other than zero as well, as
            `rank-N.jsonl` in the run folder, each on its own machine. After an exception they are kept in any case.
        fail_on_fallback: raise `FallbackError` after the sweep if a GEMM ran in another precision than its recipe asks
            for (the verdict `fallback`), in any recipe, the baseline included. The report is written and everything
            restored by then. Needs traced steps: without them nothing is known, and nothing is raised.
        max_rounds: rounds at most, where `rounds` leave a step less precise than `step_precision`; of the steps that
            the fit has beyond the plan they take at most a quarter, and no more than a minute. `rounds` or less: none
            beyond the plan. None: four times `rounds`, and none beyond the plan where that is 1.
        step_precision: relative half-width of the 95% interval of a step's time at which no more rounds are taken.
        block_seconds: about as long as one block may be. Of a recipe whose steps are long, a block has fewer than
            `settle_steps` and `timed_steps`, but at least one and three; the report says so. None: all of them, however
            long they take.
        recipe_arguments: Transformer Engine's arguments by recipe, e.g. {"fp8_delayed": {"amax_history_len": 16}}.
        max_seconds: time that the sweep may take. It is shortened to fit as soon as the first steps have shown how
            long a step takes, and the report says by how much. None for as long as it needs; a Trainer's `max_time`
            bounds it in any case.

    The report calls the model by its attribute `profile_name`, if it has one, else by its class.

    Raises:
        ProfilerError: an argument is out of range, or a recipe is unknown.
        FallbackError: from `fit`, see `fail_on_fallback`.

    Attributes:
        report: the Report once the sweep is over, else None. Of several ranks, zero has it.
        why_not: why there is no report, as a sentence, once that is known.
        session: the running or finished session.
    """

    def __init__(
        self,
        recipes: Sequence[str] | str | None = None,
        baseline: str | None = None,
        rounds: int = 3,
        settle_steps: int = 3,
        timed_steps: int = 8,
        traced_steps: int = 2,
        gemm_benchmark: bool = True,
        continue_with: str | None = None,
        stop_after: bool = False,
        restore: bool = True,
        output_dir: str = "runs",
        seed: int = 0,
        nvtx: bool | None = None,
        nvtx_steps: int = 2,
        guard_steps: int = 4,
        log: bool = True,
        progress: bool = True,
        keep_rank_recordings: bool = False,
        fail_on_fallback: bool = False,
        recipe_arguments: Mapping[str, Mapping[str, Any]] | None = None,
        max_rounds: int | None = None,
        step_precision: float = 0.02,
        block_seconds: float | None = 20.0,
        max_seconds: float | None = None,
    ) -> None:
        super().__init__()
        try:
            most = max_rounds if max_rounds is not None else 4 * rounds if isinstance(rounds, int) and rounds > 1 else 0
            settings = Settings(
                rounds,
                settle_steps,
                timed_steps,
                traced_steps,
                seed,
                nvtx_steps,
                max_rounds=most,
                step_precision=step_precision,
                guard_steps=guard_steps,
                block_seconds=block_seconds,
            )
            arguments.check(
                {
                    "recipes": recipes,
                    "baseline": baseline,
                    "continue_with": continue_with,
                    "gemm_benchmark": gemm_benchmark,
                    "stop_after": stop_after,
                    "restore": restore,
                    "log": log,
                    "progress": progress,
                    "keep_rank_recordings": keep_rank_recordings,
                    "fail_on_fallback": fail_on_fallback,
                    "nvtx": nvtx,
                    "output_dir": output_dir,
                    "max_seconds": max_seconds,
                    "recipe_arguments": recipe_arguments,
                }
            )
            if fail_on_fallback and not traced_steps:
                raise ValueError("fail_on_fallback needs traced_steps: without them nothing tells what ran")
        except (RecipeError, ValueError) as error:
            raise ProfilerError(f"LowPrecisionProfiler: {error}") from error
        self._options = Options(
            recipes=recipes,
            baseline=baseline,
            settings=settings,
            gemm_benchmark=gemm_benchmark,
            restore=restore,
            output_dir=str(output_dir),
            nvtx=nvtx,
            progress=progress,
            keep_rank_recordings=keep_rank_recordings,
            recipe_arguments=dict(recipe_arguments or {}),
            max_seconds=max_seconds,
        )
        self._continue_with = continue_with
        self._stop_after = stop_after
        self._log = log
        self._fail_on_fallback = fail_on_fallback
        self._patches = Patches()
        self._window = StepWindow()
        self._micro_batches = 1
        self._step_hooks: list[Any] = []
        self._started = False
        self._continuation: Continuation | None = None
        self._te_ranges: TeRanges | None = None
        self._finished_before: Path | None = None
        self.session: Session | None = None
        self.why_not: str | None = None

    @property
    def report(self) -> Report | None:
        """The finished report; after resuming from a checkpoint behind the sweep, the one in its run folder."""
        if self._finished_before is not None:
            return report_in(self._finished_before)
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
        """Everything is on its device and the optimizers exist: open the session."""
        if self._continue_with is not None and not self._stop_after:
            ranks = ranks_of(trainer.strategy, trainer.global_rank, trainer.world_size)
            self._continuation = Continuation.of(self._options, pl_module, pl_module.device, self._continue_with, ranks)
        if not self._started:
            self._started = True
            if refusal := trainer_facts.refusal(trainer, pl_module):
                self._say_why_not(trainer, refusal)
            else:
                self._open(trainer, pl_module)
        if not self._sweeping:
            self._continue(trainer, pl_module)

    def _open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._ours(trainer):
            self._window, self._micro_batches = StepWindow(len(trainer.optimizers)), trainer.accumulate_grad_batches
            training = trainer_facts.training_of(trainer, pl_module, self._window)
            self.session = Session.open(self._options, training, self._te_ranges)
            self._patch(trainer, pl_module)
            self.session.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the optimizer's step, to see whether this batch completes one."""
        if self._sweeping:
            self._window.batch_begins(trainer.global_step)
            with self._ours(trainer):
                self._sweep.sizes.batch(batch)
        if (trial := self._trial) is not None:
            trial.batch_begins()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Backward begins."""
        if self._sweeping:
            with self._ours(trainer):
                self._sweep.phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward is over."""
        if self._sweeping:
            with self._ours(trainer):
                self._sweep.phase("")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The optimizer begins; its phase lasts to the end of the step. Gradients are not clipped yet."""
        if self._sweeping:
            with self._ours(trainer):
                if (trial := self._trial) is not None:
                    trial.gradients(optimizer)
                self._sweep.phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """With gradient accumulation a step is several batches: it is over when the optimizer has stepped."""
        if not self._sweeping:
            return
        done = False
        with self._ours(trainer):
            if not outputs and pl_module.automatic_optimization:
                self._sweep.contaminate("training_step returned nothing, so that a part of this step is missing")
            if self._window.batch_ends(trainer.global_step):
                batches = self._window.batches
                if pl_module.automatic_optimization and batches != self._micro_batches:
                    self._sweep.contaminate(f"micro-batches in this step: {batches}, not {self._micro_batches}")
                done = self._sweep.step_end(_loss_of(outputs))
                self._window.again()
            else:
                self._sweep.phase("data")
        if done:
            self._complete(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation inside a step: its time is no training time."""
        if self._sweeping:
            with self._ours(trainer):
                self._sweep.contaminate("evaluation ran inside this step")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note in the checkpoint whether the sweep is over. What it holds else, see `_save_checkpoint`."""
        with self._ours(trainer):
            if self._finished_before is not None:
                resume.note(checkpoint, True, self._finished_before)
            elif self.session is not None:
                if self._sweeping:
                    self._sweep.contaminate("a checkpoint was written inside this step")
                resume.note(checkpoint, self.session.sweep.done, self.session.folder)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A fit that is resumed behind the sweep does not repeat it."""
        folder = resume.finished_run(checkpoint)
        if self._started or folder is None or trainer.state.fn != "fit":
            return
        self._started, self._finished_before = True, folder
        self._say_why_not(trainer, f"the sweep was over before this checkpoint: it is not repeated, see {folder}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training is over; so is the sweep, complete or not."""
        if self._sweeping and self.session is not None:
            with self._ours(trainer):
                self.session.close("shortened", "training ended before the sweep did")
                self._tell_loggers(trainer)
            self._unpatch()
            self._check()
        self._unpatch()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit without a single step never came to `on_train_start`."""
        if not self._started:
            self._say_why_not(trainer, "the fit had no training steps, so nothing was profiled")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The user's exception: take everything of ours away, keep what was measured, and let it pass."""
        self._unpatch()
        if isinstance(exception, ProfilerError) and not isinstance(exception, FallbackError):
            self.why_not = str(exception)
        with self._ours(trainer):
            self._close_te_ranges()
            if self.session is not None:
                stopped = isinstance(exception, KeyboardInterrupt) or type(exception).__name__ == "SIGTERMException"
                status: Status = "interrupted" if stopped else "failed"
                name = type(exception).__name__
                self.session.close(status, f"{name}: {exception}" if str(exception) else name)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Whatever happened, nothing of ours stays."""
        self._unpatch()
        self._close_te_ranges()

    def _close_te_ranges(self) -> None:
        if self._te_ranges is not None:
            self._te_ranges.close()

    # -- the sweep -------------------------------------------------------------------------------------------------

    @property
    def _sweeping(self) -> bool:
        return self.session is not None and not self.session.sweep.done

    @property
    def _sweep(self) -> Any:
        assert self.session is not None
        return self.session.sweep

    @property
    def _trial(self) -> Any:
        return self._sweep.trial if self._sweeping else None

    @contextmanager
    def _ours(self, trainer: Trainer) -> Iterator[None]:
        """Around everything of our own: if it fails, the sweep ends, and the training goes on as without us.

        Not with several ranks: the others would wait in the sweep for one that goes on alone.
        """
        try:
            yield
        except ProfilerError:
            raise
        except Exception as error:
            if trainer.world_size > 1:
                raise
            reason = f"the profiler itself failed ({in_words(error)})"
            self._unpatch()
            if self.session is not None:
                with suppress(Exception):
                    self.session.close("failed", reason)
            self._say_why_not(trainer, f"{reason}; the training goes on without it")

    def _say_why_not(self, trainer: Trainer, sentence: str) -> None:
        self.why_not = sentence
        if trainer.is_global_zero:
            say(f"lowprec: {sentence}")

    def _complete(self, trainer: Trainer) -> None:
        assert self.session is not None
        with self._ours(trainer):
            cut = self._sweep.cut
            self.session.close("shortened" if cut else "finished", cut)
            self._tell_loggers(trainer)
        self._unpatch()
        if self._stop_after:
            trainer.should_stop = True
        else:
            self._continue(trainer, trainer.lightning_module)
        self._check()

    def _tell_loggers(self, trainer: Trainer) -> None:
        """Outside every timed step, in one call of each logger: what the user logs keeps its steps."""
        if self._log and self.session is not None:
            log_report(trainer.loggers, self.session.report, trainer.global_step, self.session.say)

    def _check(self) -> None:
        """What `fail_on_fallback` asks for; `on_exception` takes away what is left of ours."""
        if self._fail_on_fallback and self.session is not None:
            self.session.raise_on_fallback()

    def _continue(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on in `continue_with`: after the sweep, in a second fit, and after resuming behind the sweep."""
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

    def _patch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stand in for what the sweep must be around; `_unpatch` takes it away again.

        `training_step` is wrapped innermost, so that the recipe wins over the precision plugin's region.
        """
        step: Callable[..., Any] = pl_module.training_step
        backward: Callable[..., Any] = pl_module.backward
        save: Callable[..., Any] = trainer.save_checkpoint

        @wraps(step)  # Lightning reads from the signature whether the step takes a batch index
        def training_step(*args: Any, **kwargs: Any) -> Any:
            trial = self._trial
            if trial is not None:
                with self._ours(trainer):
                    args, kwargs = trial.inputs(args, kwargs)
            try:
                with self._region(trainer):
                    output = step(*args, **kwargs)
            except Exception as error:
                if not self._excused(trainer, error):
                    raise
            else:
                if trial is not None:
                    with self._ours(trainer):
                        trial.computed(output)
                return output
            with self._region(trainer):  # the baseline's, now; none, if the sweep had to end
                return step(*args, **kwargs)

        def backward_(*args: Any, **kwargs: Any) -> Any:
            try:
                return backward(*args, **kwargs)
            except Exception as error:
                if not self._excused(trainer, error):
                    raise
                forget_gradients(pl_module)

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if self._sweeping:
                with self._ours(trainer):
                    self._sweep.step_aside("a checkpoint was written inside this step")
            try:
                return save(*args, **kwargs)
            finally:
                if self._sweeping:
                    with self._ours(trainer):
                        self._sweep.step_back()

        self._patches.put(pl_module, "training_step", training_step)
        self._patches.put(pl_module, "backward", backward_)
        self._patches.put(trainer, "save_checkpoint", save_checkpoint)
        take_region_over(trainer.precision_plugin, self._patches)
        if not pl_module.automatic_optimization:
            self._step_hooks = [
                optimizer.register_step_post_hook(self._after_step(trainer, index))
                for index, optimizer in enumerate(trainer.optimizers)
            ]

    def _excused(self, trainer: Trainer, error: Exception) -> bool:
        """Whether an exception in the user's step is not the user's: the recipe is given up then, or the sweep."""
        if not self._sweeping:
            return False
        if self._sweep.blame(error):
            return True
        if trainer.world_size > 1 or not passed_through_us(error):
            return False
        with self._ours(trainer):
            raise error
        return True

    def _after_step(self, trainer: Trainer, index: int) -> Callable[..., None]:
        """With manual optimization, steps lie inside `training_step`, and more of it follows them."""

        def hook(*_: Any) -> None:
            if self._sweeping:
                self._window.optimizer_steps(index)
                with self._ours(trainer):
                    if self._sweep.inside:
                        self._sweep.phase("forward")

        return hook

    @contextmanager
    def _region(self, trainer: Trainer) -> Iterator[None]:
        """The sweep's region, while it runs. One that cannot even be entered is the recipe's fault, or else ours."""
        with ExitStack() as stack:
            if self._sweeping:
                with self._ours(trainer):
                    try:
                        stack.enter_context(self._sweep.region())
                    except Exception as error:
                        if not self._sweep.blame(error):
                            raise
                        stack.enter_context(self._sweep.region())
            yield

    def _unpatch(self) -> None:
        self._patches.undo()
        while self._step_hooks:
            self._step_hooks.pop().remove()


def _loss_of(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
