"""What fails beside the user's hooks: a recipe, the benchmark, the disk, and memory."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lowprec_callback.measure import gemms
from lowprec_callback.recording import End, GemmTime, Problem, Refusal, Restored, StepTime, Trace
from lowprec_callback.sweep.script import Sweep
from lowprec_callback.sweep.session import NotPutBackError, Session
from lowprec_callback.sweep.snapshot import Snapshot
from tests.fit.models import WIDTH, Tiny, in_a_process_of_its_own, loader, short, trainer
from tests.fit.same import differences, quick, record
from tests.fit.test_no_trace import automatic
from tests.fit.test_sweep_in_fit import hooks_of, recording_of

SHOW = Session._show


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", lambda _self: None)


class NotInBf16(Tiny):
    """A step that PyTorch cannot do in BF16: in forward, by an operator that has no such kernel.

    Args:
        after: steps that go well in any type.
    """

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self._after = after

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.steps > self._after:
            loss = loss + 0 * torch.special.erfcx(self.net[0](batch)).sum()
        return loss


class _FailsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kind = x.dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.linalg.inv(grads[0][:8, :8]).sum() * 0 + grads[0] if ctx.kind == torch.bfloat16 else grads[0]


class NotBackInBf16(Tiny):
    """The same in backward."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        hidden = _FailsBack.apply(self.net[0](batch))
        return nn.functional.mse_loss(self.net[1:](hidden), batch)


@pytest.mark.parametrize("module", [NotInBf16(), NotBackInBf16()], ids=["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recipe_that_fails_in_the_users_step_is_given_up_and_the_others_go_on(
    tmp_path: Path, module: Tiny, accumulate: int
) -> None:
    module = type(module)()
    first = {name: value.clone() for name, value in module.state_dict().items()}
    callback = short(tmp_path, progress=False, stop_after=True)
    run = trainer(tmp_path, callback, steps=40, accumulate_grad_batches=accumulate)
    run.fit(module, loader(80))
    facts = recording_of(tmp_path)
    assert facts.of(End) == [End("finished")]
    (refusal,) = facts.of(Refusal)
    assert refusal.recipe == "bf16"
    assert "a step in it failed, where the baseline's do not" in refusal.reason
    assert "Error: " in refusal.reason
    assert {fact.recipe for fact in facts.of(StepTime)} == {"fp32"}
    assert len(facts.of(StepTime)) == 4
    assert {trace.recipe for trace in facts.of(Trace)} == {"fp32"}
    assert facts.of(Restored)
    # One batch of training followed, and with it a step, unless that takes two.
    assert torch.equal(module.state_dict()["net.0.weight"], first["net.0.weight"]) == (accumulate == 2)
    assert hooks_of(module) == 0
    assert not vars(module).keys() & {"training_step", "backward"}


def test_a_recipe_that_fails_later_keeps_what_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = NotInBf16(after=8)  # 3 steps of the lead, then bf16 x 3, fp32 x 3, ...
    trainer(tmp_path, short(tmp_path, progress=False)).fit(module, loader(60))
    facts = recording_of(tmp_path)
    assert not facts.of(Refusal)
    (problem,) = facts.of(Problem)
    assert problem.where == "bf16"
    assert problem.message.startswith("given up: a step in it failed")
    assert [fact.recipe for fact in facts.of(StepTime)].count("bf16") == 2
    assert {trace.recipe for trace in facts.of(Trace)} == {"fp32"}
    assert "lowprec: bf16 is given up" in capsys.readouterr().err


def test_what_fails_in_the_baseline_ends_the_sweep_and_comes_again_in_training(tmp_path: Path) -> None:
    class Wrong(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[:, :3] if self.steps == 1 else batch, batch_idx)

    module, callback = Wrong(), short(tmp_path, progress=False)
    run = trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run.fit(module, loader(60))
    assert run.global_step == 1
    facts = recording_of(tmp_path)
    assert facts.of(End)[0].status == "failed"
    assert "shapes cannot be multiplied" in str(callback.why_not)
    assert not facts.of(Refusal)
    assert not [problem for problem in facts.of(Problem) if "given up" in problem.message]


class Profiled(Tiny):
    """Opens a profiler of its own in each step: ours cannot run beside it, whichever was first."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with torch.autograd.profiler.profile(use_kineto=True):
            return super().training_step(batch, batch_idx)


def test_a_profiler_inside_the_step_costs_only_the_parts_that_trace(tmp_path: Path) -> None:
    callback, module = short(tmp_path, progress=False), Profiled()
    run = trainer(tmp_path, callback, steps=5)
    run.fit(module, loader(60))
    assert (run.global_step, module.steps) == (5, 5)
    facts = recording_of(tmp_path)
    assert facts.of(End) == [End("finished")]
    assert {fact.recipe for fact in facts.of(StepTime)} == {"fp32", "bf16"}
    assert not facts.of(Trace)
    assert {problem.where for problem in facts.of(Problem)} >= {"capture", "trace of fp32"}


@pytest.mark.parametrize("kind", ["a callback's profiler", "a running one"])
def test_no_second_profiler_beside_the_users(tmp_path: Path, kind: str) -> None:
    class Holds(Callback):
        def __init__(self) -> None:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    callback, module = short(tmp_path, progress=False), Tiny()
    if kind == "a running one":
        run = trainer(tmp_path, callback, steps=5)
        with torch.autograd.profiler.profile(use_kineto=True):
            run.fit(module, loader(60))
    else:
        run = trainer(tmp_path, Holds(), callback, steps=5)
        run.fit(module, loader(60))
    assert run.global_step == 5
    facts = recording_of(tmp_path)
    assert facts.of(End) == [End("finished")]
    assert {fact.recipe for fact in facts.of(StepTime)} == {"fp32", "bf16"}
    assert not facts.of(Trace)
    reasons = {problem.where: problem.message for problem in facts.of(Problem)}
    assert "break both" in reasons["trace"]
    assert "break both" in reasons["capture"]


def test_training_does_not_go_on_from_a_state_that_could_not_be_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(_snapshot: Snapshot) -> tuple[str, ...]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Snapshot, "restore", dead)
    with pytest.raises(NotPutBackError, match=r"could not be put back: .*the device is gone"):
        trainer(tmp_path, short(tmp_path, progress=False)).fit(Tiny(), loader(60))


def test_out_of_memory_in_the_benchmark_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gemms.PlainBench
    freed: list[str] = []

    def bench(engine: Any, card: Any, shape: Any, *rest: Any) -> Any:
        if card.name == "bf16" and shape.k == WIDTH:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return made(engine, card, shape, *rest)

    monkeypatch.setattr(gemms, "PlainBench", bench)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("freed"))
    module = Tiny()
    trainer(tmp_path, short(tmp_path, progress=False, gemm_benchmark=True)).fit(module, loader(60))
    facts = recording_of(tmp_path)
    assert facts.of(End) == [End("finished")]
    failed = [time for time in facts.of(GemmTime) if time.failure]
    assert {(time.recipe, time.k, time.failure) for time in failed} == {("bf16", WIDTH, "out of memory")}
    assert {(time.recipe, time.k) for time in facts.of(GemmTime) if time.samples_ms} == {
        *(("fp32", WIDTH), ("fp32", 48), ("bf16", 48)),
    }
    assert freed
    assert len(facts.of(StepTime)) == 8


SMALL_FILES = """
    import json, resource, signal, sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    from lowprec_callback.recording import End, Problem, StepTime
    from tests.fit.models import Tiny, loader, profiler, trainer
    # No file can grow beyond 2 kB: the kernel's own refusal, as on a full disk. Pipes are no files.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    folder, module = Path(sys.argv[1]), Tiny()
    callback = profiler(folder, progress=False)
    trainer(folder, callback, steps=60).fit(module, loader(60))
    kept = callback.session.recorder.snapshot()
    told = [problem.message for problem in kept.of(Problem) if problem.where == "capture"]
    print("told:" + json.dumps([module.steps, len(kept.of(End)), len(kept.of(StepTime)), told]))
"""


def test_a_disk_that_fills_up_takes_nothing_from_the_training(tmp_path: Path) -> None:
    """In a process of its own: the limit holds for every file that a process writes, also one for its output."""
    done = in_a_process_of_its_own(SMALL_FILES, tmp_path)
    assert done.returncode == 0, done.stderr
    # Nor is there room elsewhere: the limit holds in the folder for temporary files too.
    assert "the disk refused (File too large): nothing after line" in done.stderr
    assert "report.html could not be written" in done.stderr
    assert done.stdout.count("lowprec_callback  ") == 1  # the page needs no disk
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("told:")]
    steps, ends, timed, told = json.loads(line.removeprefix("told:"))
    assert (steps, ends, timed) == (60, 1, 8)
    # The profiler's own file of a trace found no room either: that part is missing, and the rest went on.
    assert "Error: [Errno" in told[0]
    facts = recording_of(tmp_path)  # what had room is whole, but for its last line
    assert len(facts) > 1
    assert not facts.of(End)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that cannot be made; nor can a temporary one."""

    def full(*_: object, **__: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    (tmp_path / "file").touch()
    return tmp_path / "file" / "runs"


def test_no_folder_at_all_takes_nothing_from_the_training(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", SHOW)
    monkeypatch.setattr("lowprec_callback.show.plots.save_all", lambda *_: [])
    module, callback = Tiny(), short(nowhere, traced_steps=0, progress=False)
    trainer(nowhere.parents[1], callback, steps=30).fit(module, loader(30))
    assert module.steps == 30
    assert callback.session is not None
    assert callback.session.folder is None
    assert callback.session.recorder.snapshot().of(End) == [End("finished")]
    told = callback.session.recorder.snapshot().of(Problem)
    (problem,) = [problem for problem in told if problem.where == "output_dir"]
    assert problem.message.startswith(f"{nowhere} cannot be written (")
    assert problem.message.endswith("), nor can a temporary folder: what is measured is kept in memory")
    # Every sentence names the folder that was asked for, and says that nothing is there. The page needs no disk.
    said = capsys.readouterr()
    assert re.search(rf"{nowhere}.*/recording\.jsonl: the disk refused \(.*\): nothing of it is on disk", said.err)
    assert re.search(rf"report\.json, report\.html could not be written in {nowhere}", said.err)
    assert "written in" not in said.err.replace("could not be written in", "")
    assert said.out.count("lowprec_callback  ") == 1
    assert "dev/null" not in said.out + said.err + str(callback.session.recorder.path)
    assert [path.name for path in nowhere.parents[1].iterdir()] == ["file"]


def test_what_found_no_folder_is_written_where_it_was_asked_for_if_there_is_room_at_the_end(nowhere: Path) -> None:
    def room(_module: Tiny, steps: int) -> None:
        if nowhere.parent.is_file():
            nowhere.parent.unlink()

    callback = short(nowhere, traced_steps=0, progress=False)
    trainer(nowhere.parents[1], callback, steps=1).fit(Tiny(on_step=room), loader(30))
    assert recording_of(nowhere).of(End) == [End("finished")]
    assert callback.session is not None
    assert callback.session.folder is not None
    assert callback.session.folder.parent == nowhere


def test_what_could_be_neither_put_back_nor_written_is_told_so(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(_snapshot: Snapshot) -> tuple[str, ...]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Snapshot, "restore", dead)
    with pytest.raises(NotPutBackError, match=r"so it ends; the measurements could not be written$"):
        trainer(nowhere.parents[1], short(nowhere, progress=False)).fit(Tiny(), loader(60))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place", ["phase", "_note_size", "_boundary", "_close_step"])
def test_an_error_of_ours_leaves_the_training_of_a_fit_without_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The sweep breaks off in the middle: what follows is the training that the user would have had, to the bit."""
    original, calls = getattr(Sweep, place), [0]

    def broken(sweep: Sweep, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("planted in ours")
        return original(sweep, *args)

    without = record(automatic, tmp_path / "without")
    assert without[" raised"] is None
    monkeypatch.setattr(Sweep, place, broken)
    callback = quick(tmp_path)
    assert differences(without, record(automatic, tmp_path / "with", callback)) == []
    assert calls[0] >= 3
    (end,) = recording_of(tmp_path / "ours").of(End)
    told = [str(end.reason), *(problem.message for problem in recording_of(tmp_path / "ours").of(Problem))]
    assert any("planted in ours" in text for text in told)
