"""The clock of Lightning's progress bars: the sweep takes no time by it."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from lowprec_callback.trainer import bar_clock


class Clock:
    """A time that only tests let pass, for tqdm, rich and us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(bar_clock, "time", SimpleNamespace(monotonic=self))

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tqdm_bar(clock: Clock, **options: Any) -> Any:
    bar = tqdm(total=100, file=io.StringIO(), smoothing=0, **options)
    bar._time = clock
    if not bar.disable:
        bar.start_t = bar.last_print_t = clock.now
    return bar


def of(bar: Any) -> SimpleNamespace:
    """A Trainer with this bar."""
    return SimpleNamespace(progress_bar_callback=bar)


def test_a_bar_of_tqdm_has_the_rate_that_it_would_have_without_the_sweep(clock: Clock) -> None:
    bar = tqdm_bar(clock)
    clock.now += 2  # the first batch is loaded
    with bar_clock.stopped(of(SimpleNamespace(train_progress_bar=bar))):
        clock.now += 600
        bar.refresh()
    assert bar.format_dict["elapsed"] == 2
    clock.now += 3
    bar.n = 10
    assert bar.format_dict["n"] / bar.format_dict["elapsed"] == 2
    bar.close()


def test_the_moving_average_of_a_users_own_bar_is_of_steps_alone(clock: Clock) -> None:
    bar = tqdm_bar(clock)
    bar.smoothing = 0.5
    bar.reset()
    with bar_clock.stopped(of(SimpleNamespace(train_progress_bar=bar))):
        clock.now += 600
    clock.now += 1
    assert bar.update(4)
    assert bar.format_dict["rate"] == 4
    bar.close()


def test_a_bar_of_richs_begins_anew(clock: Clock) -> None:
    progress = Progress(console=Console(file=io.StringIO()), get_time=clock, auto_refresh=False)
    other, mine = progress.add_task("another"), progress.add_task("training", total=100)
    callback = RichProgressBar()
    callback.progress, callback.train_progress_bar_id = progress, mine  # type: ignore[assignment]
    with bar_clock.stopped(of(callback)):
        clock.now += 600
    assert progress.tasks[mine].elapsed == 0
    assert progress.tasks[mine].total == 100
    assert progress.tasks[other].elapsed == 600


def not_begun(kind: type[Any]) -> Callable[[Clock], Any]:
    return lambda _clock: kind()


@pytest.mark.parametrize(
    "made",
    [
        lambda _clock: None,
        not_begun(TQDMProgressBar),
        not_begun(RichProgressBar),
        not_begun(ProgressBar),
        lambda clock: SimpleNamespace(train_progress_bar=tqdm_bar(clock, disable=True)),
        lambda _clock: SimpleNamespace(train_progress_bar=None),
        lambda _clock: SimpleNamespace(train_progress_bar=SimpleNamespace(start_t="noon", last_print_t=None)),
    ],
    ids=["none", "tqdm, not begun", "rich, not begun", "Lightning's base", "disabled", "no bar", "unknown"],
)
def test_what_has_no_clock_is_left_alone(made: Callable[[Clock], Any], clock: Clock) -> None:
    bar = made(clock)
    with bar_clock.stopped(of(bar)):
        clock.now += 600
    inner = getattr(vars(bar).get("train_progress_bar"), "start_t", None) if bar is not None else None
    assert inner in (None, "noon")


def test_an_exception_comes_out_and_the_clock_is_right_all_the_same(clock: Clock) -> None:
    bar = tqdm_bar(clock)

    def sweep() -> None:
        with bar_clock.stopped(of(SimpleNamespace(train_progress_bar=bar))):
            clock.now += 600
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert bar.format_dict["elapsed"] == 0
    bar.close()


def test_the_clock_is_a_real_one() -> None:
    bar = tqdm(total=100, file=io.StringIO())
    with bar_clock.stopped(of(SimpleNamespace(train_progress_bar=bar))):
        time.sleep(0.2)
    assert 0 <= bar.format_dict["elapsed"] < 0.1
    bar.close()
