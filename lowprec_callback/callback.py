"""The Lightning callback: hooks that call the sweep, and nothing else."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from lowprec_callback.engines.base import class_name
from lowprec_callback.loggers import log_report
from lowprec_callback.plan import Settings
from lowprec_callback.ranks import ranks_of, why_not
from lowprec_callback.recipes import RecipeError, resolve
from lowprec_callback.session import FallbackError, Options, ProfilerError, Session, Status, Training, early_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Callback, LightningModule, Trainer

    from lowprec_callback.engines.te_nvtx import TeRanges
    from lowprec_callback.report import Report
else:
    from lightning.pytorch import Callback

ANY_ENGINE = "transformer_engine"
"""Names of recipes are checked before the engine is known; `resolve` lets a named recipe through for any."""


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
            `lowprec_callback.loggers`.
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
        recipe_arguments: Transformer Engine's arguments by recipe, e.g. {"fp8_delayed": {"amax_history_len": 16}}.

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
            )
            for names in (recipes, baseline, continue_with):
                resolve(names, ANY_ENGINE)
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
            output_dir=output_dir,
            nvtx=nvtx,
            progress=progress,
            keep_rank_recordings=keep_rank_recordings,
            recipe_arguments=dict(recipe_arguments or {}),
        )
        self._continue_with = continue_with
        self._stop_after = stop_after
        self._log = log
        self._fail_on_fallback = fail_on_fallback
        self._patched: LightningModule | None = None
        self._step_of_batch = 0
        self._started = False
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
            self._started, self.why_not = True, refusal
            if trainer.is_global_zero:
                print(f"lowprec: {refusal}", file=sys.stderr, flush=True)
        else:
            self._te_ranges = early_ranges(self._options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is on its device and the optimizers exist: open the session."""
        if self._started:
            return
        self._started = True
        self.session = Session.open(self._options, _training(trainer, pl_module), self._te_ranges)
        self._patch(pl_module)
        self.session.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the optimizer's step, to see whether this batch completes one."""
        self._step_of_batch = trainer.global_step
        if (trial := self._trial) is not None:
            trial.batch_begins()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Backward begins."""
        if self._sweeping:
            self._sweep.phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward is over."""
        if self._sweeping:
            self._sweep.phase("")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The optimizer begins; its phase lasts to the end of the step. Gradients are not clipped yet."""
        if (trial := self._trial) is not None:
            trial.gradients(optimizer)
        if self._sweeping:
            self._sweep.phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """With gradient accumulation a step is several batches: it is over when the optimizer has stepped."""
        if not self._sweeping or trainer.global_step == self._step_of_batch:
            return
        if self._sweep.step_end(_loss_of(outputs)):
            self._complete(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation inside a step: its time is no training time."""
        if self._sweeping:
            self._sweep.contaminate("evaluation ran inside this step")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Likewise for a checkpoint."""
        if self._sweeping:
            self._sweep.contaminate("a checkpoint was written inside this step")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training is over; so is the sweep, complete or not."""
        if self._sweeping and self.session is not None:
            self.session.close("shortened", "training ended before the sweep did")
            self._tell_loggers(trainer)
            self._unpatch()
            self._check()
        self._unpatch()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit without a single step never came to `on_train_start`."""
        if not self._started and trainer.is_global_zero:
            self.why_not = "the fit had no training steps, so nothing was profiled"
            print(f"lowprec: {self.why_not}", flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The user's exception: take everything of ours away, keep what was measured, and let it pass."""
        self._unpatch()
        if isinstance(exception, ProfilerError) and not isinstance(exception, FallbackError):
            self.why_not = str(exception)
        self._close_te_ranges()
        if self.session is not None:
            name = type(exception).__name__
            status: Status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
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

    def _complete(self, trainer: Trainer) -> None:
        assert self.session is not None
        self.session.close("finished")
        self._tell_loggers(trainer)
        if self._continue_with is None or self._stop_after:
            self._unpatch()
        if self._stop_after:
            trainer.should_stop = True
        self._check()

    def _tell_loggers(self, trainer: Trainer) -> None:
        """Outside every timed step, in one call of each logger: what the user logs keeps its steps."""
        if self._log and self.session is not None:
            log_report(trainer.loggers, self.session.report, trainer.global_step, self.session.say)

    def _check(self) -> None:
        """What `fail_on_fallback` asks for; `on_exception` takes away what is left of ours."""
        if self._fail_on_fallback and self.session is not None:
            self.session.raise_on_fallback()

    @contextmanager
    def _region(self) -> Iterator[None]:
        assert self.session is not None
        if self._sweeping:
            with self._sweep.region():
                yield
            return
        card = self.session.cards.get(self._continue_with or "")
        if card is None:
            yield
            return
        with self.session.engine.region(card):
            yield

    def _patch(self, pl_module: LightningModule) -> None:
        """Wrap this module's `training_step`, innermost, so that the recipe wins over the precision plugin's region."""
        original: Callable[..., Any] = pl_module.training_step

        @wraps(original)  # Lightning reads from the signature whether the step takes a batch index
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if (trial := self._trial) is None:
                with self._region():
                    return original(*args, **kwargs)
            args, kwargs = trial.inputs(args, kwargs)
            with self._region():
                output = original(*args, **kwargs)
            trial.computed(output)
            return output

        self._own_step = pl_module.__dict__.get("training_step")
        self._patched = pl_module
        pl_module.__dict__["training_step"] = training_step

    def _unpatch(self) -> None:
        if self._patched is None:
            return
        if self._own_step is not None:
            self._patched.__dict__["training_step"] = self._own_step
        else:
            self._patched.__dict__.pop("training_step", None)
        self._patched = None


def _loss_of(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, dict) else outputs


def _training(trainer: Trainer, pl_module: LightningModule) -> Training:
    """Read from the Trainer what a session needs to know."""
    total = trainer.estimated_stepping_batches
    left = None if math.isinf(total) or total < 0 else int(total) - trainer.global_step
    return Training(
        model=pl_module,
        device=pl_module.device,
        name=str(getattr(pl_module, "profile_name", class_name(pl_module))),
        optimizers=trainer.optimizers,
        schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
        scaler=getattr(trainer.precision_plugin, "scaler", None),
        steps_left=left,
        micro_batches=trainer.accumulate_grad_batches,
        other_progress_bar=trainer.progress_bar_callback is not None,
        speaks=trainer.is_global_zero,
        processes=ranks_of(trainer.strategy, trainer.global_rank, trainer.world_size),
        holder=trainer.strategy.model,
    )
