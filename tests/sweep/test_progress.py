"""Progress: lines that come when something begins, a bar that never breaks, and which of them when."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from lowprec_callback.sweep import progress
from lowprec_callback.sweep.progress import BarProgress, LineProgress, make_progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """No fixture: pytest puts its own `sys.stderr` in place before a test's body."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_line_for_whatever_begins(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineProgress()
    for step, what in enumerate(["warming up", "capturing shapes", "bf16, round 1 of 3", "fp8_block, round 1 of 3"]):
        lines.update(what, step, 80)
    assert capsys.readouterr().err.splitlines() == [
        "lowprec: step 0/80, warming up",
        "lowprec: step 1/80, capturing shapes",
        "lowprec: step 2/80, bf16, round 1 of 3",
        "lowprec: step 3/80, fp8_block, round 1 of 3",
    ]


def test_few_lines_while_the_same_goes_on(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineProgress(every_s=10.0)
    for done in range(27):
        lines.update(f"GEMM benchmark {done + 1}/27: bf16 {done}x64x64", 2, 80)
        clock.now += 1.0
    lines.close()
    shown = capsys.readouterr().err.splitlines()
    assert [line.split()[5] for line in shown] == ["1/27:", "11/27:", "21/27:"]


def test_nothing_goes_to_standard_output(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    LineProgress().update("warming up", 0, 8)
    assert capsys.readouterr().out == ""


def test_a_bar_shows_where_it_is_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    bar = BarProgress()
    bar.update("warming up", 0, 80)
    bar.update("bf16, round 1 of 3", 7, 80)
    assert bar._bar is not None
    (task,) = bar._bar.tasks
    assert (task.completed, task.total, task.description) == (7, 80, "bf16, round 1 of 3")
    bar.close()
    assert bar._bar is None
    bar.close()
    assert "lowprec" in terminal.getvalue()


def test_a_bar_that_never_began_closes() -> None:
    BarProgress().close()


@pytest.mark.parametrize("what", ["my[/recipe], round 1", "[red]fp8[/blue]", "a[b] 1x2x3"])
def test_names_are_not_markup(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    terminal = on_terminal(monkeypatch)
    bar = BarProgress()
    bar.update(what, 1, 2)
    assert bar._bar is not None
    bar._bar.refresh()
    bar.close()
    assert what in terminal.getvalue()


@pytest.mark.parametrize(
    ("wanted", "other_bar", "is_terminal", "kind"),
    [
        (False, False, True, type(None)),
        (False, True, False, type(None)),
        (True, False, True, BarProgress),
        (True, True, True, LineProgress),
        (True, False, False, LineProgress),
        (True, True, False, LineProgress),
    ],
)
def test_a_bar_only_on_a_terminal_of_our_own(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, other_bar: bool, is_terminal: bool, kind: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if is_terminal else io.StringIO())
    assert type(make_progress(wanted, other_bar)) is kind
