"""Fault injection: an exception at every place of a fit, one fit a place.

In the user's hooks it must come out as without us, at the same step, with nothing of ours left behind and everything
measured so far in the Recording. In our own code it must not come out at all: the training goes on to the same weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.recording import FILE_NAME, End, Problem, Refusal, read
from tests.fit.models import BATCH, WIDTH, Rows, loader, short, trainer
from tests.fit.places import Mine, Planted, callback_hooks, module_hooks, planted_in
from tests.fit.test_sweep_in_fit import hooks_of

STEPS = 20
AT = 5
"""Calls of a hook that are let through, if it has more: the sweep is on by then."""

CALLED_IN_A_FIT = {"callback": 24, "module": 30}
"""How many of Lightning's hooks a fit comes through; fewer would mean that the walk has lost its way."""


class Small(nn.Module):
    """What the modules here are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def module_of() -> Any:
    from tests.fit.models import Validated

    torch.manual_seed(3)
    module = Validated()
    module.net = Small()  # type: ignore[assignment]
    return module


def profiler_of(folder: Path) -> LowPrecisionProfiler:
    """Two recipes x (1 round x (1 + 2) + 1 traced and what comes before it)."""
    return short(folder, rounds=1, progress=False)


def trainer_of(folder: Path, callbacks: list[Any]) -> Trainer:
    """With evaluation and checkpoints in the middle of the sweep."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=6)
    return trainer(
        folder,
        *callbacks,
        saver,
        steps=STEPS,
        enable_checkpointing=True,
        val_check_interval=6,
        limit_val_batches=1,
        num_sanity_val_steps=1,
        gradient_clip_val=1.0,
    )


def fit(folder: Path, module: Any, callbacks: list[Any]) -> Trainer:
    run = trainer_of(folder, callbacks)
    run.fit(module, loader(STEPS), torch.utils.data.DataLoader(Rows(BATCH), batch_size=BATCH))
    return run


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is not what is tested here, and takes most of the time."""
    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", lambda _self: None)


class NoTracer:
    """torch.profiler takes most of a short fit's time; that it is stopped, other tests show."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def products(self) -> list[Any]:
        return []


def nothing_left(module: Any, run: Trainer, callback: LowPrecisionProfiler, own: set[str]) -> None:
    """No patch, no hook, no snapshot."""
    assert set(vars(module)) & {"training_step", "backward"} <= own
    assert "save_checkpoint" not in vars(run)
    assert hooks_of(module) == 0
    if callback.session is not None:
        assert callback.session.recorder.closed
        assert callback.session.sweep.snapshot is None


def recorded(folder: Path) -> list[End]:
    return [end for run in folder.glob(f"*/{FILE_NAME}") for end in read(run).of(End)]


def walk(folder: Path, where: str) -> Iterator[tuple[str, int]]:
    """(hook, calls of it in a fit without an exception), for each that is called at all."""
    module, counter = module_of(), Mine()
    calls = planted_in(module)
    fit(folder / "clean", module, [profiler_of(folder / "clean"), counter])
    counts = counter.calls if where == "callback" else calls
    yield from sorted((name, counts[name]) for name in counts)


@pytest.mark.parametrize("where", ["callback", "module"])
def test_an_exception_in_any_hook_of_the_users_is_the_users(
    tmp_path: Path,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for where_used in ("script", "instrumented_step"):
        monkeypatch.setattr(f"lowprec_callback.sweep.{where_used}.Tracer", NoTracer)
    names = callback_hooks() if where == "callback" else module_hooks()
    tried = []
    for hook, count in walk(tmp_path, where):
        folder = tmp_path / hook
        at = AT if count > AT else 0
        module, callback = module_of(), profiler_of(folder)
        mine = Mine(hook if where == "callback" else None, at)
        calls = planted_in(module, hook if where == "module" else None, at)
        own = set(vars(module))
        run = trainer_of(folder, [callback, mine])
        with pytest.raises(Planted, match=hook):
            run.fit(module, loader(STEPS), torch.utils.data.DataLoader(Rows(BATCH), batch_size=BATCH))
        nothing_left(module, run, callback, own)
        # As often as without us: what the sweep's steps counted is put back.
        assert (mine.calls if where == "callback" else calls)[hook] == at + 1, hook
        if callback.session is not None:
            (end,) = recorded(folder)
            problems = [problem.message for problem in callback.session.recorder.snapshot().of(Problem)]
            refusals = [refusal.reason for refusal in callback.session.recorder.snapshot().of(Refusal)]
            planted = any("Planted" in text for text in (str(end.reason), *problems, *refusals))
            assert end.status == "finished" or planted, (hook, end)
            assert where == "module" or not planted, hook  # callbacks do not see the sweep
        tried.append(hook)
    record_property("places", len(tried))
    record_property("hooks that a fit does not call", ", ".join(sorted(set(names) - set(tried))))
    with capsys.disabled():
        print(f"\n{len(tried)} places in the {where}: {', '.join(tried)}")
    assert len(tried) >= CALLED_IN_A_FIT[where]


OURS = (
    "sweep.session.choose_engine",
    "sweep.session.environment",
    "sweep.session.Snapshot.take",
    "sweep.session.make_progress",
    "engines.plain_torch.PlainTorchEngine.probe",
    "engines.plain_torch.PlainTorchEngine.linear_layers",
    "engines.plain_torch.PlainTorchEngine.switch",
    "engines.plain_torch.PlainTorchEngine.save",
    "engines.base.Engine.observe",
    "engines.base.Engine.watch",
    "engines.base.Engine.scales",
    "recording.Recorder.add",
    "measure.memory.clean",
    "measure.memory.read",
    "measure.memory.reset_peak",
    "measure.held.MemoryWatch.start",
    "measure.held.MemoryWatch.begins",
    "measure.held.MemoryWatch.boundary",
    "measure.held.MemoryWatch.ends",
    "measure.held.MemoryWatch.peak",
    "measure.batches.StepSizes.batch",
    "measure.batches.StepSizes.step",
    "sweep.script.compiled_modules",
    "sweep.rounds.Rounds.add",
    "sweep.rounds.Rounds.why_stop",
    "measure.shapes.GemmLog.gemms",
    "measure.shapes.GemmLog.add_product",
    "measure.shapes.GemmLog.dispatches",
    "measure.shapes.GemmLog.products",
    "measure.scopes.ModuleScopes.install",
    "measure.library_log.LibraryListener.listen",
    "measure.library_log.LibraryListener.facts",
    "measure.steps.StepClock.boundary",
    "measure.steps.StepClock.read",
    "measure.trace.Tracer.start",
    "measure.trace.Tracer.stop",
    "measure.trace.Tracer.products",
    "measure.trace.Tracer.traces",
    "sweep.script.benchmark",
    "sweep.script.synchronize",
    "sweep.script.order_of_rounds",
    "sweep.script.Sweep.phase",
    "sweep.script.Sweep._step",
    "sweep.script.Sweep.region",
    "sweep.time_budget.Pace.start",
    "sweep.python_state.PythonState.take",
    "trainer.bar_clock._forget",
    "trainer.facts.training_of",
    "trainer.facts.folder_of",
    "trainer.batches.Passes.begin",
    "trainer.drive.take_region_over",
    "trainer.drive.Driver.step",
    "callback.set_aside",
    "callback.source_of",
    "callback.reason_for_copies",
)
"""Functions of ours that a fit comes through; a name that is not called fails the test."""


WITHOUT_US: dict[str, dict[str, torch.Tensor]] = {}
"""The weights after the same fit without the callback, once they are known."""


def owner_of(path: str) -> tuple[Any, str]:
    """The module or class that holds a function of ours, and its name there."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(f"lowprec_callback.{'.'.join(parts[:cut])}")
        except ModuleNotFoundError:
            continue
        for name in parts[cut:-1]:
            owner = getattr(owner, name)
        return owner, parts[-1]
    raise LookupError(path)


@pytest.mark.parametrize("path", OURS)
def test_a_failure_of_our_own_ends_the_sweep_and_not_the_training(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = owner_of(path)
    original = vars(owner)[name]
    calls = 0

    def fail(*_: object, **__: object) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError("planted in ours")

    monkeypatch.setattr(owner, name, staticmethod(fail) if isinstance(original, staticmethod) else fail)
    module, callback = module_of(), short(tmp_path, rounds=1, progress=False, gemm_benchmark="benchmark" in path)
    run = fit(tmp_path, module, [callback])
    monkeypatch.undo()
    if torch._C._autograd._profiler_enabled():  # a session that could not be stopped, because of what is planted
        torch._C._autograd._disable_profiler()
    assert calls, f"{path} was never called"
    assert run.global_step == STEPS
    nothing_left(module, run, callback, set())
    if "weights" not in WITHOUT_US:
        alone = module_of()
        fit(tmp_path / "alone", alone, [])
        WITHOUT_US["weights"] = {name: value.clone() for name, value in alone.state_dict().items()}
    assert all(torch.equal(value, WITHOUT_US["weights"][name]) for name, value in module.state_dict().items())
    module.net(torch.randn(4, WIDTH)).sum().backward()
