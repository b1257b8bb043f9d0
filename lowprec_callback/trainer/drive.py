"""One optimizer step of a fit, on call: the Trainer's own loop, driven for one batch after another.

`epoch_loop.advance` runs a batch through everything that is Lightning's: transfer, hooks of the module, precision
plugin, accumulation, automatic or manual optimization, clipping, schedulers, wrappers of DDP and FSDP. So a step of the
sweep is a whole step of the user's training. What lies around it (evaluation, checkpoints, epochs, the end of the fit)
hangs on other functions and on callbacks, and is never reached.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from lowprec_callback.sweep.patches import Patches
from lowprec_callback.sweep.script import Sweep
from lowprec_callback.trainer.batches import Source
from lowprec_callback.trainer.parts import part
from lowprec_callback.trainer.step_window import StepWindow
from lowprec_callback.trainer.te_plugin import take_region_over

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from lightning.pytorch import Callback

MOST_BATCHES = 1000
"""Batches in which an optimizer must have stepped at least once."""

EMPTY_PASSES = 3
"""Passes over the data, one after another, that may end without a batch."""


class NoStep(Exception):
    """The loop runs, and no optimizer step comes of it."""


class Adapter(Callback):
    """Stands in for all callbacks while the sweep runs, and tells it where the phases of a step begin."""

    def __init__(self) -> None:
        self.sweep: Sweep | None = None
        self.outputs: Any = None
        """What the last batch's `training_step` gave."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch begins."""
        if self.sweep is not None:
            self.sweep.sizes.batch(batch)
            if self.sweep.trial is not None:
                self.sweep.trial.batch_begins()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """The loss is there."""
        if self.sweep is not None:
            self.sweep.phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gradients are there."""
        if self.sweep is not None:
            self.sweep.phase("")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The optimizer's phase lasts to the end of the step. Gradients are not clipped yet."""
        if self.sweep is not None:
            if self.sweep.trial is not None:
                self.sweep.trial.gradients(optimizer)
            self.sweep.phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is over; with gradient accumulation a step is several."""
        self.outputs = outputs
        if self.sweep is not None and not outputs and pl_module.automatic_optimization:
            self.sweep.contaminate("training_step returned nothing, so that a part of this step is missing")


class _Schedules:
    """Learning-rate schedules, put back to where the fit begins as often as needed to keep them within its length.

    One that is made for the fit's twenty steps (OneCycleLR) raises in its twenty-first. Learning rates do not change
    what a step costs.
    """

    def __init__(self, trainer: Any, steps: int | None) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._optimizers = list(trainer.optimizers)
        self._steps = steps
        self._taken = 0
        if self._schedulers and steps is not None:
            self._states = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
            self._groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in self._optimizers]

    def before_step(self) -> None:
        if not self._schedulers or self._steps is None:
            return
        if self._taken >= max(1, self._steps):
            self._taken = 0
            for scheduler, state in zip(self._schedulers, self._states, strict=True):
                scheduler.load_state_dict(copy.deepcopy(state))
            for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
                for group, settings in zip(optimizer.param_groups, groups, strict=False):
                    group.update(copy.deepcopy(settings))
        self._taken += 1


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What schedules set: numbers, and tuples of them (betas). Not what an optimizer counts in tensors."""
    return {key: value for key, value in group.items() if key != "params" and isinstance(value, float | tuple)}


class Driver:
    """Runs optimizer steps of a fit, inside its first `on_train_batch_start`.

    Args:
        trainer: everything of it is set aside.
        module: the user's.
        adapter: its only callback.
        source: where batches come from.
        steps: optimizer steps that the fit itself has; None if it has no end.
    """

    def __init__(self, trainer: Any, module: Any, adapter: Adapter, source: Source, steps: int | None) -> None:
        self._trainer, self._module, self._adapter, self._source = trainer, module, adapter, source
        self._loop = trainer.fit_loop.epoch_loop
        self._window = StepWindow(len(trainer.optimizers))
        self._schedules = _Schedules(trainer, steps)
        self._begun = False
        self._sigterm = part(trainer, "utilities.exceptions", "SIGTERMException")

    def step(self) -> Any:
        """Run batches until the optimizer has stepped; of several, until each has (see `StepWindow`).

        Returns:
            The loss of the last batch, as `training_step` returned it; None if it returned none.

        Raises:
            NoStep: none came.
            Exception: what the user's code raised; the next step begins a new pass.
        """
        try:
            self._schedules.before_step()
            return self._run()
        except BaseException:
            self._begun = False
            self._window.again()
            raise

    def _run(self) -> Any:
        sweep, trainer = self._adapter.sweep, self._trainer
        empty = ran = 0
        while ran < max(MOST_BATCHES, 2 * trainer.accumulate_grad_batches):
            if not self._begun or self._source.over:
                self._begin()
            self._window.batch_begins(trainer.global_step)
            try:
                self._loop.advance(self._source.fetcher)
            except StopIteration:
                self._begun = False
                empty += 1
                if empty >= EMPTY_PASSES:
                    raise NoStep(f"{empty} passes over the data, one after another, ended without a batch") from None
                continue
            if trainer.received_sigterm:
                raise self._sigterm
            empty, ran = 0, ran + 1
            if self._window.batch_ends(trainer.global_step):
                batches = self._window.batches
                self._window.again()
                expected = self._source.window
                if sweep is not None and self._module.automatic_optimization and batches != expected:
                    sweep.contaminate(f"micro-batches in this step: {batches}, not {expected}")
                return _loss_of(self._adapter.outputs)
            if sweep is not None:
                sweep.phase("data")
        raise NoStep(f"no optimizer stepped in {ran} batches")

    def _begin(self) -> None:
        self._source.begin()
        self._loop.batch_progress.reset_on_run()
        self._begun = True

    @contextmanager
    def attached(self, sweep: Sweep) -> Iterator[None]:
        """Inside, the sweep's region stands around `training_step`, innermost, and it is told of phases.

        Innermost, so that the recipe wins over the precision plugin's region and over what wraps the module; no hook of
        Lightning's lies there, which is why the method itself is wrapped.
        """
        module, patches, hooks = self._module, Patches(), []
        step: Callable[..., Any] = module.training_step

        @wraps(step)  # Lightning reads from the signature whether the step takes a batch index
        def training_step(*args: Any, **kwargs: Any) -> Any:
            trial = sweep.trial
            if trial is not None:
                args, kwargs = trial.inputs(args, kwargs)
            with sweep.region():
                output = step(*args, **kwargs)
            if trial is not None:
                trial.computed(output)
            return output

        try:
            patches.put(module, "training_step", training_step)
            take_region_over(self._trainer.precision_plugin, patches)
            if not module.automatic_optimization:
                for index, optimizer in enumerate(self._trainer.optimizers):
                    hooks.append(optimizer.register_step_post_hook(self._after_step(sweep, index)))
            self._adapter.sweep = sweep
            yield
        finally:
            self._adapter.sweep = self._adapter.outputs = None
            for hook in hooks:
                hook.remove()
            patches.undo()

    def _after_step(self, sweep: Sweep, index: int) -> Callable[..., None]:
        """With manual optimization, steps lie inside `training_step`, and more of it follows them."""

        def hook(*_: Any) -> None:
            self._window.optimizer_steps(index)
            if sweep.inside:
                sweep.phase("forward")

        return hook


def _loss_of(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
