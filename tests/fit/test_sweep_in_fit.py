"""The whole session inside a real `fit` on a CPU: what it records, what it leaves behind, how it ends early."""

from __future__ import annotations

import copy
import gc
import math
import pkgutil
import random
import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lowprec_callback import load_report
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.measure import memory
from lowprec_callback.recording import (
    Dispatch,
    End,
    Gemm,
    GemmTime,
    Holding,
    Loss,
    Memory,
    Plan,
    Problem,
    Recording,
    Refusal,
    Restored,
    Sampled,
    StepTime,
    Trace,
    read,
)
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.session import FallbackError, ProfilerError
from tests.fit.models import BATCH, Rows, Tiny, in_a_process_of_its_own, loader, profiler, short, trainer


def recording_of(folder: Path) -> Recording:
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return read(run)


class State(Callback):
    """Everything that the sweep must give back, read before the profiler's first hook and after its last step."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = state_of(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.after = state_of(trainer, pl_module)


def state_of(trainer: Any, module: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {f"parameter {n}": p.detach().clone() for n, p in module.named_parameters()}
    found |= {f"buffer {n}": b.clone() for n, b in module.named_buffers()}
    (optimizer,) = trainer.optimizers
    names = {p: n for n, p in module.named_parameters()}
    for parameter, entries in optimizer.state.items():
        found |= {f"{names[parameter]} {k}": v.clone() for k, v in entries.items()}
    found["lr"] = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    found["scheduler"] = torch.tensor(trainer.lr_scheduler_configs[0].scheduler.last_epoch)
    found["torch"] = torch.get_rng_state()
    found["numpy"] = torch.tensor(np.random.get_state()[1].astype(np.int64))
    found["python"] = torch.tensor(random.getstate()[1])
    return found


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    differing = [name for name in before if not torch.equal(before[name], after[name])]
    assert not differing


def hooks_of(module: torch.nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in module.modules() for kind in kinds)


def test_a_whole_sweep_records_every_kind_of_fact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback, module = profiler(tmp_path, gemm_benchmark=True), Tiny()
    trainer(tmp_path, callback).fit(module, loader(60))

    facts = recording_of(tmp_path)
    (plan,) = facts.of(Plan)
    assert plan.recipes == ("fp32", "bf16")
    assert plan.baseline == "fp32"
    assert plan.steps == Settings(2, 1, 2, 1).steps(2)
    assert len(facts.of(StepTime)) == 2 * 2 * 2
    assert {(fact.recipe, fact.step) for fact in facts.of(Trace)} == {("fp32", 0), ("bf16", 0)}
    assert len(facts.of(Loss)) == 4
    assert facts.of(End) == [End("finished")]

    assert facts.of(Sampled) == [Sampled(2, "planned", facts.of(Sampled)[0].widest, 0.02)]

    shapes = {(gemm.module, gemm.role): (gemm.m, gemm.k, gemm.n, gemm.calls) for gemm in facts.of(Gemm)}
    assert shapes == {
        ("net.0", "fprop"): (8, 32, 48, 1),
        ("net.0", "wgrad"): (8, 32, 48, 1),  # the first layer's input needs no gradient
        ("net.4", "fprop"): (8, 48, 32, 1),
        ("net.4", "dgrad"): (8, 48, 32, 1),
        ("net.4", "wgrad"): (8, 48, 32, 1),
    }
    times = facts.of(GemmTime)
    assert len(times) == 2 * 2 * 3 * 2  # recipes, shapes, roles, modes
    assert all(fact.failure is None and fact.samples_ms for fact in times)
    held = [fact for fact in facts.of(Holding) if fact.recipe == "bf16"]
    assert [fact.phase for fact in held] == ["start", "forward", "backward", "optimizer"]
    parameters = sum(each.numel() for each in module.parameters())
    for fact in held:
        assert fact.parameters == fact.gradients == 4 * parameters
        # Two moments and a count of steps for each parameter.
        assert fact.optimizer == 2 * 4 * parameters + 4 * len(list(module.parameters()))
        assert fact.buffers == sum(each.numel() * each.element_size() for each in module.buffers())
        assert fact.quantized == fact.workspaces == 0
    ran = {(fact.recipe, fact.other.format) for fact in facts.of(Dispatch)}
    assert ran == {("fp32", "fp32"), ("bf16", "bf16")}

    page = " ".join(capsys.readouterr().out.split())
    assert "plain_torch" in page
    assert "What holds memory after backward, kB" in page
    assert "optimizer state 26.01 26.01" in page
    assert "Not known: saved activations, temporaries and what is reserved (a CPU has no allocator counters)." in page
    assert "bf16" in page
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert load_report(run) == callback.report
    assert {path.name for path in run.iterdir()} >= {
        "recording.jsonl",
        "report.html",
        "report.json",
        "gap_waterfall.png",
    }


def test_the_gap_closes_and_the_recording_alone_gives_the_same_report(tmp_path: Path) -> None:
    callback = profiler(tmp_path, gemm_benchmark=True)
    trainer(tmp_path, callback).fit(Tiny(), loader(60))
    report = callback.report
    assert report is not None
    gap = report.recipe("bf16").gap
    assert gap is not None
    assert gap.missing is None
    total = math.fsum(term.ms.value for term in gap.terms)
    assert total == pytest.approx(gap.end.value - gap.start.value, rel=1e-9, abs=1e-9)
    again = analyze(recording_of(tmp_path))
    assert again.recipes == report.recipes
    assert again.headline == report.headline


# --- ends before its time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 6, 9, 14, 16, 18])
def test_an_exception_in_the_users_step_is_the_users(tmp_path: Path, at: int) -> None:
    """Raised while warming up, capturing, settling, timing, watching, tracing and comparing: training comes to it."""

    class Mine(RuntimeError):
        pass

    def fail(_module: Tiny, step: int) -> None:
        if step == at:
            raise Mine("the user's")

    module = Tiny(fail)
    run = trainer(tmp_path, profiler(tmp_path))
    with pytest.raises(Mine, match="the user's"):
        run.fit(module, loader(60))
    assert run.global_step == at - 1
    assert hooks_of(module) == 0
    assert "training_step" not in module.__dict__
    facts = recording_of(tmp_path)
    (end,) = facts.of(End)
    told = [
        str(end.reason),
        *(problem.message for problem in facts.of(Problem)),
        *(r.reason for r in facts.of(Refusal)),
    ]
    assert any("Mine: the user's" in text for text in told)
    assert facts.of(Restored)
    # A fresh backward after it all runs as if nothing had ever been attached.
    module.net(torch.randn(8, 32)).sum().backward()


class AtException(Callback):
    """Reads the state after the profiler has seen the exception."""

    def __init__(self, watcher: State) -> None:
        self._watcher = watcher

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._watcher.after = state_of(trainer, pl_module)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupt(_module: Tiny, step: int) -> None:
        if step == 10:
            raise KeyboardInterrupt

    module = Tiny(interrupt)
    watcher = State()
    run = trainer(tmp_path)
    run.callbacks = [watcher, profiler(tmp_path), AtException(watcher)]
    handler = signal.getsignal(signal.SIGINT)
    try:
        # Lightning ends the process after a clean shutdown.
        with pytest.raises(SystemExit):
            run.fit(module, loader(60))
    finally:
        signal.signal(signal.SIGINT, handler)
    same(watcher.before, watcher.after)
    assert hooks_of(module) == 0
    facts = recording_of(tmp_path)
    assert facts.of(End)[0].status == "interrupted"
    assert len(facts.of(StepTime)) >= 2
    assert "interrupted" in analyze(facts).status


class Around(Callback):
    """Reads before the profiler's hook, and at an exception, what the sweep has to put back besides weights."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before = self._of(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.after = self._of(trainer, pl_module)

    def _of(self, trainer: Any, module: Any) -> dict[str, Any]:
        return {
            "loops": copy.deepcopy(trainer.fit_loop.state_dict()),
            "attributes": [sorted(vars(owner)) for owner in (trainer, module)],
            "callbacks": list(trainer.callbacks),
            "data": list(trainer.train_dataloader.dataset.read),
            "random": [repr(random.getstate()), repr(torch.get_rng_state())],
        }


class Drawn(Rows):
    """Draws random numbers, and counts what is read."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return super().__getitem__(index) + random.random() + torch.randn(())


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "where",
    [
        "lowprec_callback.sweep.patches.Patches.undo",
        "lowprec_callback.trainer.aside._Loops.put_back",
        "lowprec_callback.trainer.batches.Passes.close",
        "lowprec_callback.callback.put_back",
    ],
)
def test_ctrl_c_waits_until_everything_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    watcher, callback, pressed = Around(), short(tmp_path), []
    real = pkgutil.resolve_name(where)

    def press(*given: Any) -> Any:
        if not pressed and callback.session is not None and callback.session.recorder.closed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(where, press)
    monkeypatch.setattr("lowprec_callback.publish.write_files", lambda *_: True)
    run = trainer(tmp_path, watcher, callback)
    with pytest.raises(SystemExit):
        run.fit(Tiny(), DataLoader(Drawn(60 * BATCH), batch_size=BATCH))
    assert pressed
    assert run.global_step == 0
    assert watcher.after == watcher.before
    assert recording_of(tmp_path).of(End) == [End("finished")]
    assert callback.report is not None


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_that_is_lost_in_the_sweep_comes_at_its_end(tmp_path: Path) -> None:
    """As in the callback of a weak reference, where Python drops what is raised."""

    def lose(_module: Tiny, step: int) -> None:
        if step == 10:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    module, watcher = Tiny(lose), State()
    run = trainer(tmp_path)
    run.callbacks = [watcher, short(tmp_path), AtException(watcher)]
    with pytest.raises(SystemExit):
        run.fit(module, loader(60))
    same(watcher.before, watcher.after)
    assert recording_of(tmp_path).of(End) == [End("interrupted", "KeyboardInterrupt")]


def test_a_killed_process_leaves_a_recording_that_opens(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        from tests.fit.models import Tiny, loader, profiler, trainer
        def kill(module, step):
            if step == 12:
                os.kill(os.getpid(), signal.SIGKILL)
        folder = Path(sys.argv[1])
        trainer(folder, profiler(folder)).fit(Tiny(kill), loader(60))
    """
    done = in_a_process_of_its_own(script, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    facts = recording_of(tmp_path)
    assert facts.of(Gemm)
    assert facts.of(StepTime)
    assert not facts.of(End)
    report = analyze(facts)
    assert report.status == "interrupted"
    assert report.recipe("fp32").step_ms.known or report.recipe("bf16").step_ms.known


@pytest.mark.parametrize("steps", [1, 8])
def test_a_short_fit_gets_the_whole_plan(tmp_path: Path, steps: int) -> None:
    callback, module = profiler(tmp_path), Tiny()
    run = trainer(tmp_path, callback, steps=steps)
    run.fit(module, loader(steps))
    (plan,) = recording_of(tmp_path).of(Plan)
    assert plan.steps == Settings(2, 1, 2, 1).steps(2)
    assert plan.shrunk is None
    assert plan.batches == "a second reading of the training data from its beginning"
    assert callback.report is not None
    assert callback.report.status == "finished"
    assert callback.report.plan.endswith(f"optimizer steps in all, on {plan.batches}")
    assert (run.global_step, module.steps) == (steps, steps)


def test_a_fit_of_no_steps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = profiler(tmp_path)
    trainer(tmp_path, callback, steps=0).fit(Tiny(), loader(1))
    assert callback.report is None
    assert callback.why_not == "the fit had no training steps, so nothing was profiled"
    assert callback.why_not in capsys.readouterr().err


# --- what is asked for ------------------------------------------------------------------------------------------


def test_fp8_on_a_machine_without_cuda_is_a_sentence_and_training_goes_on(tmp_path: Path) -> None:
    callback = profiler(tmp_path, recipes="fp8_delayed")
    run = trainer(tmp_path, callback, steps=4)
    run.fit(Tiny(), loader(60))
    assert run.global_step == 4
    assert callback.report is None
    assert re.match(r"none of the recipes.*can run here.*fp8_delayed: .*CUDA", str(callback.why_not))


def test_fp8_beside_a_recipe_that_runs_is_reported_as_not_run(tmp_path: Path) -> None:
    callback = profiler(tmp_path, recipes=["bf16", "fp8_delayed"])
    trainer(tmp_path, callback).fit(Tiny(), loader(60))
    assert callback.report is not None
    refusal = callback.report.recipe("fp8_delayed").refusal
    assert refusal is not None
    assert "CUDA" in refusal


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipes": "fp8_delaid"}, r"no recipe 'fp8_delaid'.*fp8_delayed"),
        ({"continue_with": "int3"}, r"no recipe 'int3'"),
        ({"rounds": 0}, r"rounds=0: must be a whole number of at least 1"),
        ({"timed_steps": 1}, r"timed_steps=1"),
        ({"settle_steps": True}, r"settle_steps=True"),
        ({"traced_steps": -1}, r"traced_steps=-1"),
        ({"traced_steps": 0, "fail_on_fallback": True}, r"fail_on_fallback needs traced_steps"),
    ],
)
def test_bad_arguments_are_refused_when_constructed(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProfilerError, match=sentence):
        profiler(Path("unused"), **arguments)


class WithoutIndex(Tiny):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_a_step_that_takes_no_batch_index(tmp_path: Path) -> None:
    trainer(tmp_path, profiler(tmp_path)).fit(WithoutIndex(), loader(60))
    assert recording_of(tmp_path).of(End) == [End("finished")]


class Wide(Tiny):
    """The last layer runs in FP32 whatever the recipe says."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.net[:-1](batch)
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.mse_loss(self.net[-1](x.float()), batch)


def test_a_fallback_can_fail_the_fit(tmp_path: Path) -> None:
    callback, module = profiler(tmp_path, recipes=["bf16"], fail_on_fallback=True), Wide()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(FallbackError) as caught:
        trainer(tmp_path, callback).fit(module, loader(60))
    assert isinstance(caught.value, ProfilerError)
    message = str(caught.value)
    assert "bf16: net.4, fprop, dgrad, wgrad: asked bf16 x bf16, ran fp32 x fp32: ran wider than asked" in message
    assert callback.session is not None
    assert (callback.session.folder / "report.json").is_file()
    assert str(callback.session.folder) in message
    assert callback.report is not None
    assert callback.report.status == "finished"
    assert callback.why_not is None
    assert "training_step" not in module.__dict__
    assert hooks_of(module) == 0
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_fallback_fails_nothing_unless_asked_and_a_sound_model_never(tmp_path: Path) -> None:
    trainer(tmp_path, profiler(tmp_path, recipes=["bf16"])).fit(Wide(), loader(60))
    trainer(tmp_path, profiler(tmp_path, recipes=["bf16"], fail_on_fallback=True)).fit(Tiny(), loader(60))


def test_more_rounds_where_steps_are_not_known_well_enough(tmp_path: Path) -> None:
    """No step is known to a millionth."""
    callback = profiler(tmp_path, max_rounds=4, step_precision=1e-6, guard_steps=0)
    trainer(tmp_path, callback, steps=4).fit(Tiny(), loader(60))
    (sampled,) = recording_of(tmp_path).of(Sampled)
    assert (sampled.rounds, sampled.stopped) == (4, "rounds")
    assert Counter((step.recipe, step.round) for step in recording_of(tmp_path).of(StepTime)) == {
        (name, round_): 2 for name in ("fp32", "bf16") for round_ in range(4)
    }
    assert callback.report is not None
    assert "4 rounds ran: the most that were asked for" in callback.report.plan


def test_blocks_of_long_steps_are_short(tmp_path: Path) -> None:
    """Any step is longer than a microsecond: the first block of a recipe shows it in its second step."""
    arguments: dict[str, Any] = {"settle_steps": 3, "timed_steps": 5, "rounds": 3, "guard_steps": 0}
    callback, module = profiler(tmp_path, block_seconds=1e-6, stop_after=True, **arguments), Tiny()
    trainer(tmp_path, callback, steps=80).fit(module, loader(80))
    facts = recording_of(tmp_path)
    assert Counter((step.recipe, step.round) for step in facts.of(StepTime)) == {
        (name, round_): 3 for name in ("fp32", "bf16") for round_ in range(3)
    }
    told = [problem for problem in facts.of(Problem) if "block_seconds" in problem.message]
    assert {problem.where for problem in told} == {"fp32", "bf16"}
    assert len(told) == 2
    assert "1 settled and 3 timed steps instead of 3 and 5" in told[0].message
    # 3 to begin with; of each recipe a block of 2 + 3 steps, two of 1 + 3, and 1 traced step with 4 before it.
    assert callback.session is not None
    assert callback.session.sweep.total_steps == 3 + 2 * (5 + 4 + 4 + 5)
    assert module.steps == 1


def test_blocks_keep_their_steps_where_nothing_bounds_them(tmp_path: Path) -> None:
    trainer(tmp_path, profiler(tmp_path, timed_steps=5, block_seconds=None)).fit(Tiny(), loader(60))
    facts = recording_of(tmp_path)
    assert set(Counter((step.recipe, step.round) for step in facts.of(StepTime)).values()) == {5}
    assert not [problem for problem in facts.of(Problem) if "block_seconds" in problem.message]


def test_stop_after_ends_the_fit(tmp_path: Path) -> None:
    module = Tiny()
    trainer(tmp_path, profiler(tmp_path, stop_after=True)).fit(module, loader(60))
    assert module.steps == 1


def test_training_goes_on_in_the_recipe_that_was_asked_for(tmp_path: Path) -> None:
    types = []

    def note(module: Tiny, step: int) -> None:
        types.append(module.net(torch.zeros(8, 32)).dtype)

    module = Tiny(note)
    trainer(tmp_path, profiler(tmp_path, continue_with="bf16", guard_steps=0), steps=45).fit(module, loader(45))
    assert set(types[-5:]) == {torch.bfloat16}
    assert "training_step" not in module.__dict__


def test_an_unwritable_folder_gives_way_to_a_temporary_one(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    callback = profiler(blocked / "runs")
    trainer(tmp_path, callback).fit(Tiny(), loader(60))
    assert callback.report is not None
    assert any("cannot be written" in problem for problem in callback.report.problems)


# --- steps ----------------------------------------------------------------------------------------------------------


def test_a_step_is_an_optimizer_step(tmp_path: Path) -> None:
    callback = profiler(tmp_path)
    module = Tiny()
    trainer(tmp_path, callback, steps=40, accumulate_grad_batches=3).fit(module, loader(120))
    facts = recording_of(tmp_path)
    (plan,) = facts.of(Plan)
    assert plan.micro_batches == 3
    assert {gemm.calls for gemm in facts.of(Gemm)} == {3}
    assert len(facts.of(StepTime)) == 8
    assert {dispatch.calls for dispatch in facts.of(Dispatch)} == {3}
    # Each micro-batch is fetched, and runs forward and backward; the optimizer steps once.
    for trace in facts.of(Trace):
        assert trace.phases is not None
        assert Counter(trace.phases.name) == {"data": 3, "forward": 3, "backward": 3, "optimizer": 1}


def test_the_second_fit_is_left_alone(tmp_path: Path) -> None:
    callback = profiler(tmp_path)
    run = trainer(tmp_path, callback, steps=40)
    module = Tiny()
    run.fit(module, loader(60))
    run.fit_loop.epoch_loop.max_steps = 60
    run.fit(module, loader(60))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_nothing_of_the_sweep_stays_in_memory(tmp_path: Path) -> None:
    from lowprec_callback.measure.scopes import ModuleScopes
    from lowprec_callback.sweep.snapshot import Snapshot

    def alive() -> int:
        gc.collect()
        return sum(type(thing) in (ModuleScopes, Snapshot) for thing in gc.get_objects())

    before = alive()
    trainer(tmp_path, profiler(tmp_path), steps=30).fit(Tiny(), loader(30))
    assert alive() == before


def test_a_report_that_cannot_be_made_does_not_hurt_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_recording: Recording) -> None:
        raise ValueError("planted")

    monkeypatch.setattr("lowprec_callback.analyze.summary.analyze", broken)
    module = Tiny()
    trainer(tmp_path, profiler(tmp_path), steps=40).fit(module, loader(40))
    assert module.steps == 40
    assert "planted" in capsys.readouterr().err
    assert not [fact for fact in recording_of(tmp_path).of(Problem) if "planted" in fact.message]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_phases_of_memory_are_read_in_the_watched_step_of_each_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """A CPU has no counters; made-up ones show when they are read, and that each recipe begins from a clean state."""
    events: list[str] = []

    def read(_device: torch.device, recipe: str, round_: int, phase: memory.Phase) -> list[Memory]:
        events.append(phase)
        return [Memory(recipe, round_, phase, allocated=1, peak=2, reserved=3)]

    monkeypatch.setattr(memory, "read", read)
    monkeypatch.setattr(memory, "reset_peak", lambda _device: events.append("reset"))
    monkeypatch.setattr(memory, "clean", lambda _device: events.append("clean"))
    run = trainer(tmp_path, profiler(tmp_path), steps=40, accumulate_grad_batches=accumulate)
    run.fit(Tiny(), loader(40 * accumulate))
    watched = [fact for fact in recording_of(tmp_path).of(Memory) if fact.round == -1]
    one = ["start", *["forward", "backward"] * accumulate, "optimizer"]
    assert [(fact.recipe, fact.phase) for fact in watched] == [
        (recipe, phase) for recipe in ("fp32", "bf16") for phase in one
    ]
    text = " ".join(events)
    assert text.count("clean reset " + " ".join(["start", *(f"{phase} reset" for phase in one[1:])])) == 2
