"""The shapes that a training can have: what counts as a step, and what does not count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.recording import Dispatch, End, Gemm, Plan, Problem, Recording, Refusal, StepTime, Trace
from lowprec_callback.sweep.plan import Settings
from tests.fit.models import BATCH, WIDTH, Rows, Tiny, Validated, loader, short, trainer
from tests.fit.test_sweep_in_fit import hooks_of, recording_of

PLANNED = Settings(2, 1, 2, 1, guard_steps=0).steps(2)


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", lambda _self: None)


def profiled(folder: Path, module: Any, data: Any, *callbacks: Any, steps: int = 40, **arguments: Any) -> Recording:
    callback = short(folder, progress=False)
    run = trainer(folder, callback, *callbacks, steps=steps, **arguments)
    run.fit(module, data)
    assert hooks_of(module) == 0
    assert not vars(module).keys() & {"training_step", "backward"}
    assert "save_checkpoint" not in vars(run)
    return recording_of(folder)


def whole(facts: Recording) -> None:
    """A sweep that came to its end, of two recipes x two rounds x two timed steps."""
    assert facts.of(End) == [End("finished")]
    assert len(facts.of(StepTime)) == 8
    assert {trace.recipe for trace in facts.of(Trace)} == {"fp32", "bf16"}
    assert {dispatch.recipe for dispatch in facts.of(Dispatch)} == {"fp32", "bf16"}


class Gan(Tiny):
    """Two networks, two optimizers, each trained by hand.

    Args:
        every: the second optimizer steps in every so-and-so-many batch.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._every = every

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            loss = nn.functional.mse_loss(self.net(batch), batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            if index == 0 or self.steps % self._every == 0:
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.net[0], self.net[4])]


def test_with_manual_optimization_and_two_optimizers_a_batch_is_one_step(tmp_path: Path) -> None:
    module = Gan()
    facts = profiled(tmp_path, module, loader(40), steps=2 * PLANNED)
    whole(facts)
    assert facts.of(Plan)[-1].shrunk is None
    assert module.steps == PLANNED
    # Each network ran twice, and both phases were seen for what they are.
    assert {gemm.calls for gemm in facts.of(Gemm)} == {2}
    phases = {trace.labels[i] for trace in facts.of(Trace) for i in trace.phase}
    assert {"forward", "backward", "optimizer"} <= phases


def test_an_optimizer_that_steps_every_third_batch_makes_a_step_of_three(tmp_path: Path) -> None:
    module = Gan(every=3)
    facts = profiled(tmp_path, module, loader(100), steps=4 * PLANNED)
    whole(facts)
    assert module.steps == 3 * PLANNED
    assert {gemm.calls for gemm in facts.of(Gemm)} == {6}


class SkipsTheRest(Tiny):
    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def test_an_epoch_that_is_cut_off_costs_nothing(tmp_path: Path) -> None:
    module = SkipsTheRest()
    whole(profiled(tmp_path, module, loader(20), steps=30, max_epochs=20))
    assert module.steps == 30


class ReturnsNothing(Tiny):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.steps % 4 == 0 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_training_step_that_returns_nothing_does_not_count(tmp_path: Path) -> None:
    facts = profiled(tmp_path, ReturnsNothing(), loader(50))
    whole(facts)
    reasons = [fact.discarded for fact in facts.of(StepTime)]
    assert "training_step returned nothing, so that a part of this step is missing" in reasons
    assert None in reasons


def test_every_step_is_whole_although_an_epoch_does_not_end_with_one(tmp_path: Path) -> None:
    """Seven batches, three of them to a step: a pass of the sweep leaves out the seventh."""
    facts = profiled(tmp_path, Tiny(), loader(7), steps=4, max_epochs=20, accumulate_grad_batches=3)
    whole(facts)
    assert {fact.discarded for fact in facts.of(StepTime)} == {None}
    assert {gemm.calls for gemm in facts.of(Gemm)} == {3}
    assert {dispatch.calls for dispatch in facts.of(Dispatch)} == {3}


def test_an_epoch_shorter_than_a_window_is_one_step(tmp_path: Path) -> None:
    """As in training: Lightning steps at the end of an epoch, however few batches it has."""
    facts = profiled(tmp_path, Tiny(), loader(2), steps=4, max_epochs=20, accumulate_grad_batches=3)
    assert {gemm.calls for gemm in facts.of(Gemm)} == {2}


@pytest.mark.parametrize("every", [2, 3])
def test_evaluation_is_never_in_what_is_watched(tmp_path: Path, every: int) -> None:
    """It has batches of its own size, and layers that it alone runs."""
    facts = profiled_with_evaluation(tmp_path, Evaluated(), val_check_interval=every)
    assert facts.of(End) == [End("finished")]
    assert {gemm.m for gemm in facts.of(Gemm)} == {BATCH}
    assert {gemm.module for gemm in facts.of(Gemm)} == {"net.0", "net.4"}
    assert {dispatch.m for dispatch in facts.of(Dispatch)} == {BATCH}
    assert {trace.recipe for trace in facts.of(Trace)} == {"fp32", "bf16"}
    for trace in facts.of(Trace):
        assert "only" not in {trace.labels[i] for i in trace.module}
        assert trace.step == 0


class Evaluated(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.only(self.net(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=1e-2)


def profiled_with_evaluation(folder: Path, module: Any, **arguments: Any) -> Recording:
    fit_with_evaluation(folder, module, **arguments)
    return recording_of(folder)


def fit_with_evaluation(folder: Path, module: Any, steps: int = 60, **arguments: Any) -> LowPrecisionProfiler:
    callback = short(folder, progress=False)
    run = trainer(folder, callback, steps=steps, num_sanity_val_steps=0, **arguments)
    run.fit(module, loader(60), DataLoader(Rows(9), batch_size=3))
    return callback


def test_one_batch_again_and_again(tmp_path: Path) -> None:
    whole(profiled(tmp_path, Tiny(), loader(60), overfit_batches=1))


class Stream(IterableDataset[torch.Tensor]):
    """Nobody knows how long it is."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self._rows):
            yield torch.randn(WIDTH, generator=generator)


@pytest.mark.parametrize(("rows", "status"), [(40 * BATCH, "finished"), (3 * BATCH, "finished")])
def test_a_stream_of_unknown_length(tmp_path: Path, rows: int, status: str) -> None:
    data = DataLoader(Stream(rows), batch_size=BATCH)
    facts = profiled(tmp_path, Tiny(), data, steps=-1, max_epochs=1)
    assert facts.of(Plan)[-1].shrunk is None
    assert "copies of" in str(facts.of(Plan)[-1].batches)
    assert "Stream, an iterable dataset" in str(facts.of(Plan)[-1].batches)
    assert facts.of(End)[0].status == status


def first_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: value.detach() for name, value in Tiny().named_parameters()}


@pytest.mark.filterwarnings("ignore:.*SWA")
@pytest.mark.filterwarnings("ignore:.*Swapping scheduler")
def test_a_schedule_that_another_callback_puts_in_during_the_sweep_keeps_its_settings(tmp_path: Path) -> None:
    averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    whole(profiled(tmp_path, Tiny(), loader(10), averaging, steps=40, max_epochs=4))


class Checkpointed(Tiny):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        hidden = checkpoint(self.net[:4], batch, use_reentrant=False)
        return nn.functional.mse_loss(self.net[4](hidden), batch)


def test_activation_checkpointing_and_clipping(tmp_path: Path) -> None:
    facts = profiled(tmp_path, Checkpointed(), loader(60), gradient_clip_val=0.1)
    whole(facts)
    assert {(g.module, g.role, g.calls) for g in facts.of(Gemm)} >= {("net.0", "fprop", 2), ("net.4", "fprop", 1)}
    assert not facts.of(Problem)


def test_a_fast_dev_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, callback = Tiny(), short(tmp_path)
    trainer(tmp_path, callback, fast_dev_run=True).fit(module, loader(4))
    assert module.steps == 1
    assert callback.why_not == "fast_dev_run runs too few steps to profile; nothing was profiled"
    assert callback.why_not in capsys.readouterr().err


def test_a_captured_graph_is_refused(tmp_path: Path) -> None:
    """By its sign: PyTorch and Transformer Engine both put a function of this name on the module."""

    def make_graphed_forward(module: nn.Linear) -> Any:
        forward = module.forward

        def new_fwd(*args: Any) -> Any:
            return forward(*args)

        return new_fwd

    module, callback = Tiny(), short(tmp_path)
    module.net[4].forward = make_graphed_forward(module.net[4])
    trainer(tmp_path, callback, steps=4).fit(module, loader(4))
    assert callback.why_not is not None
    assert callback.why_not.startswith("net.4 was captured in a CUDA graph (make_graphed_callables)")
    assert module.steps == 4
    assert not list(tmp_path.glob("*/recording.jsonl"))


class Replaying(Tiny):
    """Replays two graphs in each forward pass, and a third where no recipe matters."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        torch.cuda.CUDAGraph.replay(1)  # type: ignore[arg-type]
        torch.cuda.CUDAGraph.replay(2)  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        torch.cuda.CUDAGraph.replay(3)  # type: ignore[arg-type]


def test_graphs_without_a_sign_are_noticed_when_they_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Any] = []

    def replay(graph: Any) -> None:
        replayed.append(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    module = Replaying()
    facts = profiled(tmp_path, module, loader(40))
    assert torch.cuda.CUDAGraph.replay is replay
    assert replayed == [1, 2, 3] * (len(replayed) // 3)
    assert len(replayed) > 3 * module.steps
    assert [fact.recipe for fact in facts.of(Refusal)] == ["bf16"]
    assert facts.of(Refusal)[0].reason.startswith("training_step replays 2 CUDA graphs, which hold the kernels of")
    assert facts.of(End) == [End("finished")]
    assert {fact.recipe for fact in facts.of(StepTime)} == {"fp32"}


@pytest.mark.parametrize("what", ["a part", "the whole"])
def test_compiled_modules_are_watched_uncompiled_and_run_compiled(tmp_path: Path, what: str) -> None:
    runs: list[bool] = []

    class Noted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(torch.compiler.is_compiling())
            return x

    module = Tiny()
    module.net = nn.Sequential(nn.Linear(WIDTH, 48), Noted(), nn.GELU(), nn.Linear(48, WIDTH))
    given: Any = module
    if what == "a part":
        module.net = torch.compile(module.net, backend="eager")  # type: ignore[assignment]
    else:
        module.forward = module.net.forward  # type: ignore[method-assign]
        given = torch.compile(module, backend="eager")
    facts = profiled(tmp_path, given, loader(60)) if what == "a part" else profiled_whole(tmp_path, given, module)
    whole(facts)
    linear = {gemm.module.rsplit(".", 1)[1] for gemm in facts.of(Gemm)}
    assert linear == {"0", "3"}
    (problem,) = facts.of(Problem)
    assert problem.where == "torch.compile"
    assert "ran uncompiled in the steps that watch operands" in problem.message


def profiled_whole(folder: Path, compiled: Any, module: Any) -> Recording:
    """Lightning takes the compiled module apart again, so the checks are on the one inside."""
    trainer(folder, short(folder, progress=False), steps=40).fit(compiled, loader(60))
    assert hooks_of(module) == 0
    return recording_of(folder)


class Lengths(Dataset[torch.Tensor]):
    """Batches of sequences whose length changes from one to the next, or only now and then."""

    def __init__(self, count: int, lengths: list[int]) -> None:
        self._count, self._lengths = count, lengths

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self._lengths[index % len(self._lengths)], WIDTH, generator=generator)


class OverSequences(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))


def test_lengths_that_change_are_captured_step_by_step_and_their_spread_is_stated(tmp_path: Path) -> None:
    data = DataLoader(Lengths(200, [16, 40, 24, 48, 32, 8, 64]), batch_size=1)
    facts = profiled(tmp_path, OverSequences(), data, steps=60)
    whole(facts)
    sizes = {fact.elements for fact in facts.of(StepTime)}
    assert len(sizes) > 3
    assert not any(fact.discarded for fact in facts.of(StepTime))
    words = {problem.where: problem.message for problem in facts.of(Problem)}
    assert (
        "the linear-layer FLOPs of 5 captured steps are 0.25 to 2.00 times those of the middle one" in words["capture"]
    )
    assert "times the median size (elements of their tensors)" in words["batches"]
    # The third step and the four after it: 24, 48, 32, 8, 64 tokens.
    assert {gemm.m for gemm in facts.of(Gemm)} == {32}


def test_a_length_that_is_rare_does_not_count(tmp_path: Path) -> None:
    data = DataLoader(Lengths(200, [16, 16, 16, 16, 16, 24]), batch_size=1)
    facts = profiled(tmp_path, OverSequences(), data, steps=60)
    whole(facts)
    assert {fact.elements for fact in facts.of(StepTime) if not fact.discarded} == {16 * WIDTH}
    assert {fact.discarded for fact in facts.of(StepTime) if fact.elements == 24 * WIDTH} == {
        "its batches have another size than those of most steps"
    }
    assert {dispatch.m for dispatch in facts.of(Dispatch)} == {16}
    assert not facts.of(Problem)
