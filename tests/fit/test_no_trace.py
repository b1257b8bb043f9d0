"""Training with the callback is, bit for bit, training without it: every kind of fit, held against itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from tests.fit.same import Case, differences, quick, record
from tests.fit.test_ranks_in_fit import environment, launch

WIDTH = 16
BATCH = 4


class Items(Dataset[torch.Tensor]):
    """Rows that are augmented by the global random numbers of whoever reads them."""

    def __init__(self, count: int, augment: bool = True) -> None:
        self.rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        return row + 0.1 * torch.randn(WIDTH) + random.random() + float(np.random.rand()) if self.augment else row


def batches(count: int, **arguments: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Items(count * BATCH), **{"batch_size": BATCH, "shuffle": True, **arguments})


class Net(LightningModule):
    """What a restore can forget: dropout, running statistics, buffers, counters, lists, metrics, a schedule."""

    def __init__(self, every: str = "step", kind: str = "StepLR") -> None:
        super().__init__()
        self.body = self.layers()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.seen: torch.Tensor
        self.every, self.kind = every, kind
        self.count, self.losses, self.total = 0, [], torch.zeros(2)
        self.mine = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(4)

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, WIDTH))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(batch), batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count += 1
        self.seen += 1
        self.total[0] += 1
        noise = torch.randn((), generator=self.mine) + self.numbers.random()
        loss = self.loss(batch) * (1 + 0.01 * noise) * (1 + 0.001 * self.count)
        self.losses.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
        self.logger.experiment.add_scalar("mine", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.kind == "none":
            return optimizer
        makers: dict[str, Callable[[], Any]] = {
            "StepLR": lambda: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9),
            "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20),
            "ReduceLROnPlateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        }
        schedule = {"scheduler": makers[self.kind](), "interval": self.every, "monitor": "val"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def to_compare(self) -> Any:
        state = repr(self.numbers.bit_generator.state)
        return self.count, self.losses, self.total, self.mine.get_state(), state, sorted(vars(self))


CASES: dict[str, Callable[[Case], None]] = {}


def case(run: Callable[[Case], None]) -> Callable[[Case], None]:
    CASES[run.__name__] = run
    return run


@case
def automatic(c: Case) -> None:
    c.fit(Net(), batches(7), max_epochs=3)


@case
def early_stopping_and_best_checkpoints_every_5_steps(c: Case) -> None:
    saver = ModelCheckpoint(c.folder / "best", monitor="val", save_top_k=2, save_last=True, filename="{step}-{val:.3f}")
    stopper = EarlyStopping("val", patience=2)
    c.fit(
        Net(),
        batches(12),
        batches(2, shuffle=False),
        max_epochs=3,
        val_check_interval=5,
        enable_checkpointing=True,
        callbacks=[saver, stopper],
    )


@case
def evaluation_in_every_step(c: Case) -> None:
    c.fit(Net(), batches(6), batches(1, shuffle=False), max_epochs=2, val_check_interval=1)


@case
def accumulation_and_clipping(c: Case) -> None:
    c.fit(Net(), batches(11), max_epochs=3, accumulate_grad_batches=4, gradient_clip_val=0.1)


@case
def more_accumulation_than_batches(c: Case) -> None:
    c.fit(Net(), batches(3), max_epochs=4, accumulate_grad_batches=8)


class Gan(LightningModule):
    """Manual optimization: two optimizers with a schedule each, toggled; the second one steps every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        noise = torch.randn_like(batch)
        self.toggle_optimizer(first)
        loss = -self.judge(self.maker(noise)).mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(second)
            judged = self.judge(self.maker(noise).detach()).mean() - self.judge(batch).mean()
            self.manual_backward(judged)
            self.clip_gradients(second, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            second.step()
            second.zero_grad()
            self.untoggle_optimizer(second)
            self.log("judge", judged)
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log("maker", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
        second = torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in (first, second)]
        return [first, second], schedules


@case
def manual_optimization_of_two(c: Case) -> None:
    c.fit(Gan(), batches(7), max_epochs=3)


@case
def bf16_mixed(c: Case) -> None:
    c.fit(Net(), batches(6), max_epochs=2, precision="bf16-mixed")


@case
def bf16_true(c: Case) -> None:
    class Stored(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.body(batch), batch)

    c.fit(Stored(), batches(6), max_epochs=2, precision="bf16-true")


@case
def a_loss_scaler(c: Case) -> None:
    """What `16-mixed` brings. On a CPU Lightning makes it BF16 without a scaler, so here it gets one by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)  # type: ignore[attr-defined]
    c.fit(Net(), batches(6), max_epochs=2, plugins=MixedPrecision("16-mixed", device="cpu", scaler=scaler))
    c.record["scaler"] = scaler.state_dict()


@case
def two_workers(c: Case) -> None:
    c.fit(Net(), batches(6, num_workers=2), max_epochs=2)


@case
def persistent_workers(c: Case) -> None:
    c.fit(Net(), batches(6, num_workers=2, persistent_workers=True), max_epochs=2)


class Stream(IterableDataset[torch.Tensor]):
    """Starts again with each reader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.count * BATCH):
            yield torch.full((WIDTH,), index / 10) + 0.1 * torch.randn(WIDTH)


class OnwardStream(Stream):
    """Keeps its own position: what was read is gone."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.count * BATCH:
            self.at += 1
            yield torch.full((WIDTH,), self.at / 10) + 0.1 * torch.randn(WIDTH)


class SizedStream(OnwardStream):
    """The same, and knows how long it is: Lightning then fetches nothing ahead."""

    def __len__(self) -> int:
        return self.count * BATCH


@case
def a_stream(c: Case) -> None:
    c.fit(Net(), DataLoader(Stream(6), batch_size=BATCH), max_epochs=2)


@case
def a_stream_that_cannot_be_restarted(c: Case) -> None:
    c.fit(Net(), DataLoader(OnwardStream(12), batch_size=BATCH), max_steps=9)


@case
def a_sized_stream_that_cannot_be_restarted(c: Case) -> None:
    c.fit(Net(), DataLoader(SizedStream(12), batch_size=BATCH), max_steps=9)


@case
def a_stream_of_one_batch(c: Case) -> None:
    c.fit(Net(), DataLoader(OnwardStream(1), batch_size=BATCH), max_epochs=1)


@case
def a_stream_with_workers(c: Case) -> None:
    c.fit(Net(), DataLoader(Stream(5), batch_size=BATCH, num_workers=2), max_epochs=2)


@case
def a_generator_as_loader(c: Case) -> None:
    c.fit(Net(), (torch.randn(BATCH, WIDTH) for _ in range(30)), max_steps=9)


class OwnLoader:
    """No DataLoader: gives the same batches in each epoch."""

    def __init__(self) -> None:
        self.batches = [torch.randn(BATCH, WIDTH) for _ in range(5)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)


@case
def a_loader_whose_batches_the_step_changes(c: Case) -> None:
    class Changes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            batch.mul_(0.9)
            return super().training_step(batch, batch_idx)

    c.fit(Changes(), OwnLoader(), max_epochs=3)


class OwnNumbers(Items):
    """Draws from generators of its own, counts, and holds an index that it shuffles."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.drawn = np.random.default_rng(1)
        self.python = random.Random(2)
        self.torch = torch.Generator().manual_seed(3)
        self.reads = 0
        self.order = list(range(count))

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.python.shuffle(self.order)
        noise = torch.randn(WIDTH, generator=self.torch) * float(self.drawn.random()) + self.reads / 100
        return self.rows[self.order[index]] + noise


@case
def a_dataset_with_generators_of_its_own(c: Case) -> None:
    data = OwnNumbers(6 * BATCH)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(8))
    drawn = np.random.default_rng(9)

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) * float(drawn.random())

    c.fit(Net(), DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=collate), max_epochs=3)
    c.record["the dataset's own"] = (
        data.reads,
        data.order,
        repr(data.drawn.bit_generator.state),
        data.torch.get_state().tolist(),
    )


@case
def the_loaders_own_generator(c: Case) -> None:
    c.fit(Net(), batches(6, generator=torch.Generator().manual_seed(8)), max_epochs=3)


@case
def several_loaders(c: Case) -> None:
    class Two(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            rows = batch if isinstance(batch, torch.Tensor) else torch.cat([batch["long"], batch["short"]])
            return super().loss(rows)

    c.fit(Two(), {"long": batches(6), "short": batches(2)}, max_epochs=2)


@case
def loaders_side_by_side(c: Case) -> None:
    class Both(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(torch.cat(list(batch)))

    c.fit(Both(), CombinedLoader([batches(3), batches(4)], "min_size"), max_epochs=2)


@case
def a_step_that_takes_the_iterator(c: Case) -> None:
    class Takes(Net):
        def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    c.fit(Takes(), batches(6), max_epochs=2)


@case
def loaders_made_anew_each_epoch(c: Case) -> None:
    class Reloads(Net):
        def train_dataloader(self) -> Any:
            return batches(5 + self.current_epoch)

    c.fit(Reloads(), max_epochs=3, reload_dataloaders_every_n_epochs=1)


@case
def learning_rate_on_plateau(c: Case) -> None:
    c.fit(Net("epoch", "ReduceLROnPlateau"), batches(5), batches(1, shuffle=False), max_epochs=4)


@case
def a_schedule_as_long_as_the_fit(c: Case) -> None:
    c.fit(Net("step", "OneCycleLR"), batches(10), max_steps=20)


@case
def stochastic_weight_averaging(c: Case) -> None:
    c.fit(Net(), batches(5), max_epochs=4, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=2)])


@case
def moving_averages_of_weights(c: Case) -> None:
    c.fit(Net(), batches(5), max_epochs=3, callbacks=[EMAWeightAveraging(decay=0.9)])


@case
def twenty_steps(c: Case) -> None:
    c.fit(Net(), batches(30), max_steps=20)


@case
def one_epoch_of_seven_batches(c: Case) -> None:
    c.fit(Net(), batches(7), max_epochs=1)


@case
def a_last_batch_of_another_size(c: Case) -> None:
    c.fit(Net(), DataLoader(Items(5 * BATCH + 2), batch_size=BATCH, shuffle=True), max_epochs=2)


@case
def resumed_from_a_checkpoint(c: Case) -> None:
    ours, c.ours = c.ours, []
    saver = ModelCheckpoint(c.folder / "first", every_n_train_steps=9, save_top_k=-1)
    c.fit(Net(), batches(7), max_epochs=2, enable_checkpointing=True, callbacks=[saver], name="first")
    c.ours = ours
    (file,) = (c.folder / "first").glob("*.ckpt")
    c.fit(Net(), batches(7), max_epochs=4, name="second", fit={"ckpt_path": str(file), "weights_only": False})


@case
def two_fits(c: Case) -> None:
    module = Net()
    c.fit(module, batches(5), max_epochs=1, name="first")
    c.fit(module, batches(5), max_epochs=2, name="second")


@case
def lbfgs(c: Case) -> None:
    class Closures(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    c.fit(Closures(), batches(5), max_epochs=2)


@case
def sparse_and_dense_by_hand(c: Case) -> None:
    class Sparse(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.table = nn.Embedding(20, WIDTH, sparse=True)
            self.head = nn.Linear(WIDTH, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.head(self.table((batch.abs() * 10).long() % 20)).square().mean()
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SparseAdam(self.table.parameters()), torch.optim.Adam(self.head.parameters())

    c.fit(Sparse(), batches(5), max_epochs=2)


@case
def lazy_layers(c: Case) -> None:
    class Lazy(Net):
        def layers(self) -> nn.Module:
            return nn.Sequential(nn.LazyLinear(24), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(WIDTH))

        def __init__(self) -> None:
            super().__init__("step", "none")
            self.never = nn.LazyLinear(3)

        def to_compare(self) -> Any:
            return [type(part).__name__ for part in self.modules()]

    c.fit(Lazy(), batches(5), max_epochs=2)


@case
def layers_without_inputs_or_outputs(c: Case) -> None:
    class Empty(Net):
        def layers(self) -> nn.Module:
            return nn.ModuleDict(
                {"first": nn.Linear(WIDTH, WIDTH), "none": nn.Linear(0, 4), "nowhere": nn.Linear(4, 0)}
            )

        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.body["first"](batch), batch)

    with pytest.warns(UserWarning, match="zero-element"):
        module = Empty()
    c.fit(module, batches(5), max_epochs=2)


@case
def parts_that_are_frozen_on_the_way(c: Case) -> None:
    class Freezes(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.count == 8:
                self.body[0].weight.requires_grad_(False)
                self.body[3].eval()

    c.fit(Freezes(), batches(6), max_epochs=3)


@case
def epochs_that_are_cut_short(c: Case) -> None:
    class Skips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

    c.fit(Skips(), batches(8), max_epochs=3)


@case
def a_step_that_returns_nothing_now_and_then(c: Case) -> None:
    class Nothing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 3 else loss

    c.fit(Nothing(), batches(6), max_epochs=2)


@case
def a_step_that_stops_the_fit(c: Case) -> None:
    class Stops(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step >= 6:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    c.fit(Stops(), batches(6), max_epochs=5)


@case
def a_step_that_raises(c: Case) -> None:
    class Raises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.count == 9:
                raise ValueError("a record that cannot be")
            return loss

    c.fit(Raises(), batches(6), max_epochs=3)


@case
def lightnings_simple_profiler(c: Case) -> None:
    c.fit(Net(), batches(5), max_epochs=2, profiler="simple")


@case
def lightnings_pytorch_profiler(c: Case) -> None:
    from lightning.pytorch.profilers import PyTorchProfiler

    profiler = PyTorchProfiler(c.folder, "profile", export_to_chrome=False)
    c.fit(Net(), batches(5), batches(1, shuffle=False), max_epochs=2, profiler=profiler)


TRACED = {
    "automatic",
    "accumulation_and_clipping",
    "manual_optimization_of_two",
    "bf16_mixed",
    "a_loss_scaler",
    "a_sized_stream_that_cannot_be_restarted",
    "lazy_layers",
    "sparse_and_dense_by_hand",
    "a_step_that_raises",
    "lightnings_pytorch_profiler",
}
"""Cases whose sweep has traced steps too; to read a trace takes most of a short sweep's time."""


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots and HTML are drawn elsewhere, and take most of a short sweep's time."""
    monkeypatch.setattr("lowprec_callback.publish.write_files", lambda *_: True)


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_training_with_the_callback_is_training_without_it(name: str, tmp_path: Path) -> None:
    profiler = quick(tmp_path, traced_steps=int(name in TRACED))
    without = record(CASES[name], tmp_path / "without")
    with_us = record(CASES[name], tmp_path / "with", profiler)
    assert differences(without, with_us) == []
    assert len(without) > 20
    if "raises" not in name:
        assert [value for key, value in without.items() if key.endswith(" raised") and value] == []
        assert profiler.why_not is None
        assert profiler.report is not None
        assert profiler.report.status == "finished"


@pytest.mark.timeout(270)
def test_nor_do_two_processes_notice(tmp_path: Path) -> None:
    """DDP and both versions of FSDP, on each rank."""
    (done,) = launch((["-m", "tests.fit.same_ranks", str(tmp_path)], environment(tmp_path)))
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"same-{rank}.json").read_text())
        assert len(found) == 6
        for name, outcome in found.items():
            assert (name, outcome["differences"], outcome["raised"]) == (name, [], None)
            assert outcome["compared"] > 60
            assert (name, outcome["why_not"], outcome["report"]) == (name, None, rank == 0)
