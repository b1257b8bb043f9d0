"""Progress: lines that come when something begins, a bar that never breaks, and which of them when."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import tqdm

from lowprec_callback.sweep import progress
from lowprec_callback.sweep.progress import LineProgress, TqdmProgress, make_progress


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


def shown(terminal: Terminal, width: int = 200) -> list[str]:
    """What stands on the terminal, line by line, after all that was written to it."""
    lines = [[" "] * width for _ in range(20)]
    row = column = 0
    text = terminal.getvalue().replace("\x1b[A", "\v")
    for letter in text:
        if letter == "\v":
            row -= 1
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row, column = row + 1, 0
        else:
            lines[row][column] = letter
            column += 1
    return "\n".join("".join(line).rstrip() for line in lines).rstrip().split("\n")


class Other(tqdm.tqdm):
    """Another's bar, which stays when ours is closed."""

    monitor_interval = 0


def monitors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tqdm_monitor"]


@pytest.fixture(autouse=True)
def no_bar_is_left() -> Any:
    """And no thread of ours: Lightning's bars may have started tqdm's own before."""
    threads = set(monitors())
    yield
    assert set(monitors()) <= threads
    assert not [bar for bar in tqdm.tqdm._instances if (getattr(bar, "desc", None) or "").startswith("lowprec")]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update is drawn."""
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)


def test_a_bar_shows_where_it_is_and_goes_away(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    terminal = on_terminal(monkeypatch)
    bar = TqdmProgress()
    bar.update("warming up", 0, 80)
    assert shown(terminal)[0].startswith("lowprec:   0%|")
    assert shown(terminal)[0].endswith("| step 0/80, ? left, warming up")
    bar.update("bf16, round 1 of 3", 8, 80)
    assert shown(terminal)[0].startswith("lowprec:  10%|")
    assert shown(terminal)[0].endswith("| step 8/80, 00:00 left, bf16, round 1 of 3")
    bar.close()
    assert shown(terminal) == [""]
    assert terminal.getvalue().endswith("\r")
    bar.close()
    bar.update("too late", 80, 80)
    assert shown(terminal) == [""]


def test_the_total_may_change(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    terminal = on_terminal(monkeypatch)
    bar = TqdmProgress()
    bar.update("bf16", 10, 20)
    for done, total, text in [(10, 40, "25%"), (15, 30, "50%"), (31, 30, "100%"), (0, 0, "0%"), (1, 2, "50%")]:
        bar.update("bf16", done, total)
        assert text in shown(terminal)[0]
    bar.close()


def test_the_time_that_is_left_follows_the_steps(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    """A first step that compiles says 50 minutes; ten usual ones later it is far less."""
    terminal = on_terminal(monkeypatch)
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    bar = TqdmProgress()
    bar.update("bf16", 0, 101)
    now[0] += 30.0
    bar.update("bf16", 1, 101)
    assert ", 50:00 left," in shown(terminal)[0]
    for done in range(2, 22):
        now[0] += 1.0
        bar.update("bf16", done, 101)
    minutes, seconds = shown(terminal)[0].split(" left")[0].rsplit(" ", 1)[1].split(":")
    assert 80 <= 60 * int(minutes) + int(seconds) < 60 * 10
    bar.close()


def test_what_begins_is_shown_at_once_and_the_rest_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "REFRESH_S", 3600.0)
    bar = TqdmProgress()
    for done in range(50):
        bar.update(f"GEMM benchmark {done + 1}/50: bf16 {done}x64x64", 2, 80)
    bar.update("bf16, round 1 of 3", 2, 80)
    bar.update("bf16, round 1 of 3", 3, 80)
    written = terminal.getvalue()
    assert written.count("GEMM benchmark") == 1
    assert written.count("bf16, round 1") == 1
    bar.close()


def test_a_bar_stands_below_another_and_leaves_its_line_clean(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    terminal = on_terminal(monkeypatch)
    other = Other(total=10, desc="Epoch 0", position=0, file=terminal, mininterval=0)
    bar = TqdmProgress()
    bar.update("fp8_delayed, round 2 of 3", 3, 9)
    above, below = shown(terminal)
    assert above.startswith("Epoch 0:   0%")
    assert below.endswith("step 3/9, ? left, fp8_delayed, round 2 of 3")
    progress.say("lowprec: a line")
    line, above, below = shown(terminal)
    assert line == "lowprec: a line"
    assert above.startswith("Epoch 0:")
    assert below.startswith("lowprec:  33%")
    bar.close()
    assert len(shown(terminal)) == 2
    other.update()
    assert shown(terminal)[1].startswith("Epoch 0:  10%")
    other.close()


def test_a_bar_that_never_began_closes() -> None:
    TqdmProgress().close()


@pytest.mark.parametrize("what", ["my[/recipe], round 1", "{bar} {postfix}", "a[b] 1x2x3", "%s %d"])
def test_names_are_no_formats(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    terminal = on_terminal(monkeypatch)
    bar = TqdmProgress()
    bar.update(what, 1, 2)
    assert shown(terminal)[0].endswith(what)
    bar.close()


def test_a_name_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    bar = TqdmProgress()
    bar.update("two\nlines\r here", 1, 2)
    assert shown(terminal)[0].endswith("two lines here")
    bar.close()


def test_tqdm_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its documentation says: TQDM_DISABLE=1, which tqdm reads when it is imported."""
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_open_bar", lambda *_: Other(total=2, disable=True))
    bar = TqdmProgress()
    bar.update("bf16", 1, 2)
    bar.update("fp8", 2, 3)
    bar.close()
    assert terminal.getvalue() == ""


# --- Streams that fail -----------------------------------------------------------------------------------


class Failing(Terminal):
    """A terminal that fails after a number of calls: one that was closed, a full disk, a pipe that nobody reads."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self.error, self.left = error, after

    def _count(self) -> None:
        if self.left <= 0:
            raise type(self.error)(*self.error.args)  # a new one: an exception keeps the frames that it passed
        self.left -= 1

    def write(self, text: str) -> int:
        self._count()
        return super().write(text)

    def flush(self) -> None:
        self._count()
        super().flush()


ERRORS = [
    BrokenPipeError(32, "Broken pipe"),
    OSError(5, "Input/output error"),
    OSError(28, "No space left"),
    ValueError("closed"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error).replace(" ", "_"))
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8])
def test_a_stream_that_fails_hurts_nobody(
    monkeypatch: pytest.MonkeyPatch, at_once: None, error: Exception, after: int
) -> None:
    monkeypatch.setattr(sys, "stderr", Failing(error, after))
    bar = make_progress(True)
    assert isinstance(bar, TqdmProgress)
    for done in range(4):
        bar.update("bf16", done, 9)
    bar.close()
    assert lock_is_free()


def lock_is_free() -> bool:
    """Asked from another thread: the lock is one that its own thread may take again."""
    found: list[bool] = []

    def ask() -> None:
        lock = tqdm.tqdm.get_lock()
        for part in lock.locks:
            found.append(part.acquire(False))
            if found[-1]:
                part.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return all(found)


def test_a_stream_that_is_closed_between_two_updates(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    terminal = on_terminal(monkeypatch)
    bar = TqdmProgress()
    bar.update("bf16", 1, 9)
    terminal.close()
    bar.update("bf16", 2, 9)
    bar.close()
    assert lock_is_free()


def test_a_bar_that_breaks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    opened: list[Any] = []

    def broken(*_: Any) -> Any:
        opened.append(1)
        raise RuntimeError("no widget")

    monkeypatch.setattr(progress, "_open_bar", broken)
    bar = TqdmProgress(notebook=True)
    bar.update("bf16", 1, 9)
    bar.update("bf16", 2, 9)
    bar.close()
    assert opened == [1]


# --- Which one -------------------------------------------------------------------------------------------


class Closed:
    def isatty(self) -> bool:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize(
    ("wanted", "rich_display", "stream", "kind"),
    [
        (False, False, Terminal(), type(None)),
        (False, True, io.StringIO(), type(None)),
        (True, False, Terminal(), TqdmProgress),
        (True, True, Terminal(), LineProgress),
        (True, False, io.StringIO(), LineProgress),
        (True, True, io.StringIO(), LineProgress),
        (True, False, None, LineProgress),
        (True, False, Closed(), LineProgress),
    ],
)
def test_a_bar_on_a_terminal_that_rich_does_not_own(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, rich_display: bool, stream: Any, kind: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert type(make_progress(wanted, rich_display)) is kind


class ZMQInteractiveShell:
    """A notebook's shell in an old IPython, which has no traits to ask for."""


class ColabShell:
    def has_trait(self, name: str) -> bool:
        return name == "kernel"


class TerminalShell:
    def has_trait(self, name: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("shell", "notebook"),
    [(ZMQInteractiveShell(), True), (ColabShell(), True), (TerminalShell(), False), (object(), False), (None, False)],
)
def test_a_notebook_is_known_by_its_shell(monkeypatch: pytest.MonkeyPatch, shell: Any, notebook: bool) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    made = make_progress(True, rich_display=True)
    assert type(made) is (TqdmProgress if notebook else LineProgress)


def test_ipython_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = "IPython" in sys.modules
    on_terminal(monkeypatch)
    make_progress(True)
    assert ("IPython" in sys.modules) == loaded


def test_text_in_a_notebook_needs_no_cursor(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    """Without ipywidgets: a notebook's output knows carriage returns, and nothing that moves the cursor up."""
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda *_: None)
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    other = Other(total=10, desc="Epoch 0", position=0, file=io.StringIO())
    bar = TqdmProgress(notebook=True)
    bar.update("bf16, round 1 of 3", 1, 9)
    bar.update("bf16, round 1 of 3", 2, 9)
    bar.close()
    other.close()
    assert "step 2/9" in output.getvalue()
    assert "\n" not in output.getvalue()
    assert "\x1b" not in output.getvalue()


class Widget(Other):
    """The parts of tqdm's notebook bar that a change of the total and an early end meet."""

    red = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.container = SimpleNamespace(children=[None, SimpleNamespace(max=self.total), None])

    def close(self) -> None:
        Widget.red = bool(self.total and self.n < self.total)  # as tqdm.notebook decides it
        super().close()


def test_a_widget_follows_the_total_and_is_not_left_in_red(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda *_: object())
    monkeypatch.setattr(progress.importlib, "import_module", lambda name: SimpleNamespace(tqdm=Widget))
    bar = TqdmProgress(notebook=True)
    bar.update("bf16", 1, 9)
    container = bar._bar.container
    bar.update("bf16", 2, 20)
    assert container.children[1].max == 20
    bar.close()
    assert not Widget.red
