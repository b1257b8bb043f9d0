"""A profile of any training loop, without Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from lowprec_callback.engines.base import class_name
from lowprec_callback.report import Report
from lowprec_callback.sweep.options import options_of
from lowprec_callback.sweep.patches import Patches
from lowprec_callback.sweep.python_state import PythonState
from lowprec_callback.sweep.script import StepFailed, Sweep
from lowprec_callback.sweep.session import ProfilerError, Session, Training, put_back
from lowprec_callback.sweep.snapshot import Rng, kept_environment

OWNER = "profile"


def profile(
    step: Callable[[Any], Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batches: Iterable[Any],
    scheduler: Any | Sequence[Any] = (),
    scaler: Any = None,
    **options: Any,
) -> Report | None:
    """Measure what each low-precision recipe gains for a training loop of one's own; then all is as it was before.

        def step(batch):
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        report = profile(step, model=model, optimizer=optimizer, batches=loader)

    Each recipe's region stands around the model's forward pass, and backward lies outside of it, as Transformer Engine
    wants; so open none of its regions in `step`. The steps of the profile leave nothing behind: model, optimizer,
    schedulers, scaler, random generators and Python's own state, as far as `step` and `batches` reach, are put back.

    Args:
        step: runs one whole optimizer step on a batch (forward, backward, optimizer), and returns the loss, if it
            likes: then the numerics guard compares it.
        model: called in `step`; its device is where the profile runs.
        optimizer: the one that steps, or all of them.
        batches: a DataLoader, a list: anything that can be iterated again and again, as often as needed.
        scheduler: what `step` steps besides, one or several; put back afterwards.
        scaler: a `torch.amp.GradScaler`, or None.
        options: those of `LowPrecisionProfiler` that concern the profile itself: `recipes`, `baseline`, `rounds`,
            `max_seconds`, `output_dir` (default: `lowprec` in the working directory), ...

    Returns:
        The report; None if it could not be made.

    Raises:
        ProfilerError: an option is out of range, `batches` cannot be iterated again or is empty, or the baseline cannot
            run here.
        NotPutBackError: the state from before could not be put back.
        Exception: what `step` raised in the baseline, with everything put back.
    """
    wanted = options_of(OWNER, **options)
    if isinstance(batches, Iterator):
        raise ProfilerError(
            f"{OWNER}: batches is an iterator, which can be read once: give a DataLoader or a list, for example "
            f"list(itertools.islice(batches, 8))"
        )
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    schedulers = list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
    driver = _Driver(step, model, optimizers, batches)
    training = Training(
        model=model,
        device=next((parameter.device for parameter in model.parameters()), torch.device("cpu")),
        name=str(getattr(model, "profile_name", class_name(model))),
        optimizers=optimizers,
        schedulers=schedulers,
        scaler=scaler,
        batches="the batches given, from their beginning and again",
        folder="lowprec",
    )
    outside = PythonState.take({"step": step, "batches": batches}, tensors=False)
    with Rng.kept(), kept_environment():
        session = Session.open(wanted, training, driver.step)
        try:
            with driver.attached(session.sweep):
                session.run()
        except StepFailed as failure:
            raise failure.cause from None
        finally:
            session.close()
            put_back(outside)
            session.show()
    return session.report


class _Driver:
    """Runs the user's step on one batch after another, and tells the sweep where its phases begin."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        batches: Iterable[Any],
    ) -> None:
        self._step, self._model, self._optimizers, self._batches = step, model, optimizers, batches
        self._reader: Iterator[Any] | None = None
        self._sweep: Sweep | None = None

    def step(self) -> Any:
        """One step. Raises ProfilerError where there is no batch."""
        batch, sweep = self._next(), self._sweep
        assert sweep is not None
        sweep.sizes.batch(batch)
        trial = sweep.trial
        if trial is not None:
            trial.batch_begins()
            (batch,), _ = trial.inputs((batch,), {})
        loss = self._step(batch)
        if trial is not None:
            trial.computed(loss)
        return loss

    def _next(self) -> Any:
        for _ in range(2):
            if self._reader is None:
                self._reader = iter(self._batches)
            try:
                return next(self._reader)
            except StopIteration:
                self._reader = None
        raise ProfilerError(f"{OWNER}: batches is empty")

    @contextmanager
    def attached(self, sweep: Sweep) -> Iterator[None]:
        """Inside, the sweep's region stands around the model's forward, and optimizers tell of their steps."""
        self._sweep = sweep
        forward = self._model.forward

        @wraps(forward)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with sweep.region():
                output = forward(*args, **kwargs)
            sweep.phase("backward")
            return output

        def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if sweep.trial is not None:
                sweep.trial.gradients(optimizer)
            sweep.phase("optimizer")

        patches = Patches()
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.callback(optimizer.register_step_pre_hook(begins).remove)
            stack.callback(patches.undo)
            patches.put(self._model, "forward", in_region)
            try:
                yield
            finally:
                self._sweep = self._reader = None
