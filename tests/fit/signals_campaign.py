"""A campaign of signals: fits with a full small profile, each hit by one signal at a random moment.

    python -m tests.fit.signals_campaign --times 60 --seed 1

It is run by hand, not by pytest. Each try draws SIGINT, SIGTERM or SIGKILL, a part of the fit (the sweep, the making of
the report, the training after it) and a moment in it, all from the campaign's seed; the report gets half of the tries.
Some fits read their data by two workers, and some of their signals go to the whole group of processes, as Ctrl-C on a
terminal does. The fit is a process of its own, in a session of its own. What it shows is held against fits without us:

- the exit code and the last exception are those of a fit without us that got the same signal; -9 after SIGKILL;
- where training had not begun, the state that the first callback finds in `on_exception` (weights, gradients,
  optimizer, schedule, random generators, counters of the loops, hooks, environment, ...) is that of a fit without us
  which is stopped in the same hook; after SIGTERM in training, that of one stopped after the same step;
- every step that was trained has the loss and the state of that step without us;
- the Recording can be read and analysed, and its `End` says what happened; each file is whole or absent, and a
  temporary one is left behind by SIGKILL at most;
- the page is on standard output, whole; what standard error says about files and Recordings is true;
- nobody printed a traceback with our code in it, and no process is left.

One line for a try, then a table, and exit code 1 if anything was not as expected. `--only N` makes try N again alone.
Files of tries that failed are kept, in the folder that is named at the beginning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader

from lowprec_callback import LowPrecisionProfiler, load_report
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.files import SUFFIX
from lowprec_callback.recording import FILE_NAME, End, RecordingError, read
from lowprec_callback.sweep.session import Session
from tests.fit.models import BATCH, WIDTH, Rows, Tiny, profiler, trainer
from tests.fit.same import Case, differences, plain
from tests.fit.same import Rows as RowsLogger

ROOT = Path(__file__).parents[2]

BATCHES, EPOCHS = 40, 4
STEPS = BATCHES * EPOCHS

FILES = ("report.json", "gemm_times.png", "gap_waterfall.png", "step_times.png", "report.html")

SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")

PARTS = {"sweep": 0.3, "report": 0.5, "training": 0.2}
"""Parts of the fit, and the share of tries whose signal is meant for each."""

LONGEST = 240.0
"""Seconds that a fit may take to end after its signal; then it hangs."""


# -- the fit -------------------------------------------------------------------------------------------------------


class Noisy(Rows):
    """Rows that are changed by the global random numbers of whoever reads them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 0.1 * torch.randn(WIDTH) + random.random() + float(np.random.rand())


class Model(Tiny):
    """`Tiny` with more that a step leaves behind: a generator of its own, a list, rows for the logger."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = torch.Generator().manual_seed(3)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + 0.01 * torch.randn((), generator=self.mine))
        self.losses.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
        return loss

    def to_compare(self) -> Any:
        return self.steps, self.losses, self.mine.get_state(), sorted(vars(self))


class Fit(Case):
    """The fit of one process: what it shows goes to files in its folder, whatever ends it."""

    def __init__(self, folder: Path, ours: list[Callback]) -> None:
        super().__init__(folder, ours)
        self.logger = RowsLogger()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._marks, self._steps = (os.open(folder / name, flags) for name in ("marks", "steps"))

    def mark(self, name: str) -> None:
        """Something begins now."""
        os.write(self._marks, f"{name} {time.monotonic()}\n".encode())

    def step(self, run: Any, module: Any, loss: Any) -> None:
        """A step of the training is over."""
        text = json.dumps(self.seen(run, module), default=repr)
        line = [run.global_step, plain(loss), hashlib.sha256(text.encode()).hexdigest()]
        os.write(self._steps, f"{json.dumps(line, default=repr)}\n".encode())

    def seen(self, run: Any, module: Any) -> dict[str, Any]:
        """The whole state of the training, and of the process around it."""
        self.record = {}
        self._state("", run, module)
        others = [each for each in run.callbacks if each not in self.ours]
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return {
            **self.record,
            "global step": run.global_step,
            "should stop": run.should_stop,
            "callbacks": [type(each).__name__ for each in others],
            "loggers": [type(each).__name__ for each in run.loggers],
            "lightning's profiler": type(run.profiler).__name__,
            "rows": plain([list(row) for row in self.logger.rows]),
            "callback metrics": plain(dict(run.callback_metrics)),
            "patched": sorted(name for name in vars(run) if callable(getattr(type(run), name, None))),
            "hooks": sum(len(getattr(part, kind)) for part in module.modules() for kind in kinds),
            "environment": {name: value for name, value in sorted(os.environ.items()) if name != "TMPDIR"},
            "standard streams": [Path(os.readlink(f"/proc/self/fd/{number}")).name for number in (0, 1, 2)],
            "threads": sorted(each.name for each in threading.enumerate()),
            "profiler of PyTorch's": torch._C._autograd._profiler_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "modes": [torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()],
            "SIGTERM": type(signal.getsignal(signal.SIGTERM)).__name__,
        }

    def write(self, name: str, content: Any) -> None:
        (self.folder / name).write_text(json.dumps(content, default=repr))


class First(Callback):
    """Stands before ours."""

    def __init__(self, fit: Fit, number: int | None, at: int) -> None:
        self._fit, self._number, self._at, self._batches = fit, number, at, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._batches:
            self._fit.mark("sweep")
        if self._number is not None and self._batches == self._at:
            signal.raise_signal(self._number)
        self._batches += 1

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._fit.write("exception.json", self._fit.seen(trainer, pl_module))


class Last(Callback):
    """Stands after ours."""

    def __init__(self, fit: Fit) -> None:
        self._fit, self._begun = fit, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._begun:
            self._begun = True
            self._fit.mark("training")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._fit.mark("trained")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._fit.step(trainer, pl_module, outputs)


def marked(show: Callable[[Session], None], fit: Fit) -> Callable[[Session], None]:
    """`Session.show`, with marks before and after."""

    @wraps(show)
    def with_marks(session: Session) -> None:
        fit.mark("report")
        show(session)
        fit.mark("reported")

    return with_marks


def child(folder: Path, with_us: bool, workers: int, number: int | None, at: int) -> None:
    """One fit. `number`: a signal that it raises by itself when batch `at` begins."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without it
    torch.set_num_threads(1)
    seed_everything(11, verbose=False)
    ours: list[Callback] = []
    if with_us:
        ours.append(profiler(folder / "runs", gemm_benchmark=True, guard_steps=1))
    fit = Fit(folder, ours)
    Session.show = marked(Session.show, fit)  # type: ignore[method-assign, assignment]
    module = Model()
    data = DataLoader(Noisy(BATCHES * BATCH), batch_size=BATCH, shuffle=True, num_workers=workers)
    run = trainer(
        folder,
        First(fit, number, at),
        *ours,
        Last(fit),
        steps=STEPS,
        max_epochs=EPOCHS,
        logger=fit.logger,
        log_every_n_steps=1,
    )
    ended: BaseException | None = None
    fit.mark("fit")
    try:
        run.fit(module, data)
    except BaseException as error:
        ended = error
        raise
    finally:
        fit.mark("left")
        fit.write("left.json", {"exceptions": _chain(ended), "why not": [_why_not(each) for each in ours]})


def _chain(error: BaseException | None) -> list[str]:
    """The exception and the one in whose handling it was raised, ..."""
    return [] if error is None else [type(error).__name__, *_chain(error.__context__)]


def _why_not(ours: Callback) -> str | None:
    return ours.why_not if isinstance(ours, LowPrecisionProfiler) else None


# -- running it ----------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """A fit that is over, and what it left in its folder."""

    folder: Path
    code: int
    hung: bool = False
    left_processes: bool = False
    sent: float | None = None
    """When the signal was sent."""
    robbed: bool = False
    """Whether SIGTERM went to its workers too. Of their death PyTorch makes a RuntimeError in the fit's process, unless
    Lightning ends the fit before; so it is without us."""

    @property
    def marks(self) -> dict[str, float]:
        lines = [line.split() for line in self._text("marks").splitlines()]
        return {name: float(when) for name, when in lines}

    @property
    def steps(self) -> list[Any]:
        """A line for each step; the last one may be torn by SIGKILL."""
        return [json.loads(line) for line in self._text("steps").splitlines(keepends=True) if line.endswith("\n")]

    @property
    def exception(self) -> dict[str, Any] | None:
        """The state in `on_exception`."""
        text = self._text("exception.json")
        return json.loads(text) if text else None

    @property
    def exceptions(self) -> list[str] | None:
        """What came out of `fit`, and what it was made of; None if the process never got there."""
        text = self._text("left.json")
        return json.loads(text)["exceptions"] if text else None

    @property
    def why_not(self) -> list[str | None]:
        text = self._text("left.json")
        return json.loads(text)["why not"] if text else []

    @property
    def out(self) -> str:
        return self._text("stdout")

    @property
    def err(self) -> str:
        return self._text("stderr")

    @property
    def phase(self) -> str:
        """What was going on when the signal was sent."""
        begun = [(when, name) for name, when in self.marks.items() if self.sent is not None and when <= self.sent]
        name = max(begun)[1] if begun else "fit"
        return {"fit": "start", "reported": "report", "trained": "over", "left": "over"}.get(name, name)

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else ""


def launch(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A fit in a session of its own, which nothing ties to this process but its files."""
    (folder / "temporary").mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["TMPDIR"] = str(folder / "temporary")
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fit.signals_campaign", "child", str(folder), *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def ended(process: subprocess.Popen[bytes], folder: Path, sent: float | None = None) -> Ran:
    """Wait for a fit, and for whatever it started."""
    hung = False
    try:
        process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        hung = True
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    until = time.monotonic() + 20  # a worker looks for its dead parent every 5 seconds
    while (left := alive(process.pid)) and time.monotonic() < until:
        time.sleep(0.1)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
    return Ran(folder, process.returncode, hung, left, sent)


def alive(group: int) -> bool:
    """Whether a process of the group runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class References:
    """Fits that no signal from outside hits, each made when it is first asked for."""

    folder: Path
    made: dict[tuple[Any, ...], Ran] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, workers: int, with_us: bool = False, name: str | None = None, at: int = 0) -> Ran:
        """A fit; `name`: the signal that it raises by itself when batch `at` begins."""
        key = (workers, with_us, name, at)
        with self.lock:
            if key not in self.made:
                folder = self.folder / "-".join(str(part) for part in key)
                arguments = ["--workers", str(workers), *(["--ours"] if with_us else [])]
                if name is not None:
                    arguments += ["--signal", name, "--at", str(at)]
                self.made[key] = ended(launch(folder, *arguments), folder)
            return self.made[key]


@dataclass(frozen=True)
class Try:
    """What is drawn for one try."""

    number: int
    name: str
    part: str
    share: float
    """How far into the part, 0 to 1."""
    workers: int
    group: bool
    """Whether all processes of the fit get the signal, or the fit's own alone."""

    @staticmethod
    def draw(seed: int, number: int) -> Try:
        numbers = random.Random(f"{seed} {number}")
        name = numbers.choice(SIGNALS)
        part = numbers.choices(list(PARTS), list(PARTS.values()))[0]
        share, workers = numbers.random(), numbers.choices([0, 2], [3, 1])[0]
        return Try(number, name, part, share, workers, workers > 0 and numbers.random() < 0.5)

    def run(self, folder: Path, references: References) -> Ran:
        """Start the fit, wait for the part, send the signal, wait for the end."""
        whole = references.of(self.workers, with_us=True).marks
        begin, end = {
            "sweep": (whole["sweep"], whole["report"]),
            "report": (whole["report"], whole["training"]),
            "training": (whole["training"], whole["left"]),
        }[self.part]
        process = launch(folder, "--ours", "--workers", str(self.workers))
        marks, until = Ran(folder, 0), time.monotonic() + LONGEST
        while self.part not in marks.marks and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(self.share * (end - begin))
        sent = time.monotonic()
        if process.poll() is None:
            number = signal.Signals[self.name]
            if self.group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        ran = ended(process, folder, sent)
        ran.robbed = self.group and self.name == "SIGTERM"
        return ran


# -- what is expected ----------------------------------------------------------------------------------------------


def problems_of(tried: Try | None, ran: Ran, references: References, workers: int) -> list[str]:
    """All that is not as expected; `tried` is None for a fit that got no signal."""
    name = tried.name if tried is not None else None
    found: list[str] = []
    if ran.hung:
        return [f"hung: not over {LONGEST:.0f} s after the signal"]
    if ran.left_processes:
        found.append("processes are left")
    whole = references.of(workers)
    if ran.steps != whole.steps[: len(ran.steps)]:
        first = next(i for i, (a, b) in enumerate(zip(ran.steps, whole.steps, strict=False)) if a != b)
        found.append(f"step {first} is another one than without us")
    found += _ends(name, ran, references, workers)
    if name != "SIGKILL":
        found += _state(name, ran, references, workers)
        found += _page(name, ran)
        found += _said(name, ran)
        left = sorted(path.name for path in (ran.folder / "temporary").iterdir())
        # A worker that is killed leaves one: those of the fit may be, where its process ends; ours only with them.
        of_workers = [each for each in left if each.startswith("pymp-")][: 2 * workers if ran.robbed else workers]
        found += [f"left in the temporary folder: {each}" for each in left if each not in of_workers]
    found += _files(name, ran)
    return found


DROPPED = re.compile(
    r"^Exception ignored in.*\nTraceback \(most recent call last\):\n(?:(?: .*)?\n)+KeyboardInterrupt: ?\n",
    re.MULTILINE,
)
"""What Python prints where it drops a KeyboardInterrupt: in the callback of a weak reference, in `__del__`."""


def _ends(name: str | None, ran: Ran, references: References, workers: int) -> list[str]:
    """The exit, and what was printed about it."""
    found: list[str] = []
    if ran.robbed and ran.code == 1 and "RuntimeError" in (ran.exceptions or []):
        return found
    printed = DROPPED.sub("", ran.err + ran.out) if name == "SIGINT" else ran.err + ran.out
    ours = re.findall(r'File "[^"]*/lowprec_callback/[^"]*", line \d+, in \w+', printed)
    if ours and not ran.robbed:
        found.append(f"a traceback through {ours[-1]}")
    late = ran.phase == "over" or (len(ran.steps) == STEPS and name != "SIGINT")
    if "Traceback" in printed and not late and not workers:
        found.append("a traceback was printed")
    if name == "SIGKILL":
        return found + ([f"exit code {ran.code}"] if ran.code != -signal.SIGKILL and not late else [])
    # In training nothing of ours heeds Ctrl-C, and what Python drops (in a loader's `__del__`) it drops without us too.
    dropped = name == "SIGINT" and ran.phase == "training" and DROPPED.search(ran.err) and len(ran.steps) == STEPS
    expected = references.of(workers, name=None if dropped else name)
    if late:  # the training was done: the signal came at its end or at that of the process, where nothing of ours is
        wanted = {0, expected.code} | ({-signal.Signals[name]} if name is not None else set())
        return found + ([f"exit code {ran.code}"] if ran.code not in wanted else [])
    if ran.code != expected.code:
        found.append(f"exit code {ran.code}, without us {expected.code}")
    if ran.exceptions != expected.exceptions:
        found.append(f"out of fit came {ran.exceptions}, without us {expected.exceptions}")
    if any(ran.why_not) and not ran.robbed:
        found.append(f"why_not: {ran.why_not}")
    return found


def _state(name: str | None, ran: Ran, references: References, workers: int) -> list[str]:
    """What the first callback found in `on_exception`."""
    steps, state = len(ran.steps), ran.exception
    if name is None or "trained" in ran.marks:
        return []
    if state is None:
        return ["on_exception was not called"]
    if "training" not in ran.marks:  # training had not begun: the hook in which we are is where it was stopped
        expected = references.of(workers, name="SIGINT").exception
    elif name == "SIGTERM" and not ran.robbed:  # which Lightning looks for after each step
        expected = references.of(workers, name="SIGTERM", at=steps - 1).exception
    else:  # in the middle of a step, wherever that was
        return []
    assert expected is not None
    return [f"another state than without us: {each}" for each in differences(expected, state)]


PAGE_ENDS = "restored: "
"""In the last sentence of the page, which is wrapped somewhere."""


def _page(name: str | None, ran: Ran) -> list[str]:
    """It is there once; twice at most where Ctrl-C came while it was printed."""
    pages = " ".join(ran.out.split()).count(PAGE_ENDS)
    if not pages or pages > (2 if name == "SIGINT" else 1):
        return [f"{pages} pages on standard output"]
    return []


def _said(name: str | None, ran: Ran) -> list[str]:
    """Sentences on standard error that promise something."""
    found: list[str] = []
    for line in ran.err.splitlines():
        if not line.startswith("lowprec: "):
            continue
        if written := re.match(r"lowprec: written in (.*?): (.*?)(, then this was stopped)?$", line):
            for each in written[2].split(", "):
                if not (Path(written[1]) / each).is_file():
                    found.append(f"{each} is not there, but standard error says so")
        elif there := re.search(r"all that was measured is in (.*?): show it with `lowprec report (.*?)`", line):
            (again,) = shlex.split(there[2])
            if not Path(there[1]).is_file() or not Path(again).exists():
                found.append(f"this is not so: {line}")
        elif (missing := re.match(r"lowprec: (.*) could not be written in (.*) \(", line)) and name == "SIGINT":
            # A library has made an error of the KeyboardInterrupt.
            found += [
                f"this is not so: {line}" for each in missing[1].split(", ") if (Path(missing[2]) / each).exists()
            ]
        elif re.search(r"could not|failed|on disk|only the first", line) and not ran.robbed:
            found.append(f"unexpected: {line}")
    return found


def _files(name: str | None, ran: Ran) -> list[str]:
    """The run's folder: the Recording, and whole files or none."""
    folders = [path for path in (ran.folder / "runs").glob("*") if path.is_dir()]
    if name is not None and not folders and "report" not in ran.marks:
        return []  # it was over before there was one
    if len(folders) != 1:
        return [f"{len(folders)} run folders"]
    (folder,) = folders
    found = _recording(name, ran, folder)
    there = {path.name for path in folder.iterdir()}
    strange = there - {FILE_NAME, *FILES}
    if name == "SIGKILL":
        strange -= {each for each in strange if each.startswith(".") and each.endswith(SUFFIX)}
    found += [f"left in the run's folder: {each}" for each in sorted(strange)]
    if (name is None or "training" in ran.marks) and set(FILES) - there and not ran.robbed:
        found.append(f"missing: {', '.join(sorted(set(FILES) - there))}")
    for path in folder.iterdir():
        if path.name in FILES:
            try:
                whole = _whole(path)
            except Exception as error:
                found.append(f"{path.name} cannot be read: {error}")
            else:
                found += [] if whole else [f"{path.name} is not whole"]
    return found


def _whole(path: Path) -> bool:
    data = path.read_bytes()
    if path.suffix == ".png":
        return data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    if path.suffix == ".html":
        return data.rstrip().endswith(b"</html>")
    return load_report(path.parent) is not None


def _recording(name: str | None, ran: Ran, folder: Path) -> list[str]:
    """Readable, whole but for the last line after SIGKILL, and its end says what happened."""
    try:
        facts = read(folder)
        if len(facts) > 1:
            analyze(facts)
    except RecordingError as error:
        # Killed before the first line was written out.
        empty = name == "SIGKILL" and not (folder / FILE_NAME).exists()
        return [] if empty else [f"the Recording cannot be read: {error}"]
    except Exception as error:
        return [f"the Recording cannot be analysed: {type(error).__name__}: {error}"]
    found = [f"the Recording is torn: {facts.torn}"] if facts.torn is not None and name != "SIGKILL" else []
    ends = [end.status for end in facts.of(End)]
    if "reported" in ran.marks or "report" in ran.marks:
        in_sweep = ran.phase == "sweep" and ran.sent is not None
        allowed = [["finished"], *([["interrupted"]] if in_sweep else []), *([["failed"]] if ran.robbed else [])]
    else:
        allowed = [[], ["finished"], ["interrupted"]] if name == "SIGKILL" else []
    if ends not in allowed:
        found.append(f"the Recording's end says {ends}")
    return found


# -- the campaign --------------------------------------------------------------------------------------------------


def campaign(times: int, seed: int, only: int | None, jobs: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix="signals-"))
    print(f"tries are in {folder}; those that are as expected are removed", flush=True)
    references = References(folder)
    failures = sum(_without_a_signal(references, workers) for workers in (0, 2))
    tries: Counter[tuple[str, str]] = Counter()
    failed: dict[tuple[str, str], list[int]] = {}

    def make(number: int) -> tuple[Try, str, str, list[str]]:
        tried = Try.draw(seed, number)
        ran = tried.run(folder / f"try-{number}", references)
        found = problems_of(tried, ran, references, tried.workers)
        phase, told = ran.phase, f"exit {ran.code:3}, {len(ran.steps):3} steps"
        if not found:
            shutil.rmtree(ran.folder)
        return tried, phase, told, found

    with ThreadPoolExecutor(jobs) as pool:
        for tried, phase, told, found in pool.map(make, range(times) if only is None else [only]):
            tries[tried.name, phase] += 1
            if found:
                failed.setdefault((tried.name, phase), []).append(tried.number)
            to = f"{tried.workers} workers, {'all' if tried.group else 'main'}" if tried.workers else "no workers"
            print(
                f"try {tried.number:3} {tried.name:7} at {f'{tried.part} {tried.share:.3f}':14} came in {phase:8} "
                f"{to:15} {told}: {'; '.join(found) or 'as expected'}",
                flush=True,
            )
    print(f"\n{'signal':8} {'came in':9} {'tries':>5} {'as expected':>11}  failed (seed {seed})")
    for key in sorted(tries):
        bad = failed.get(key, [])
        numbers = ", ".join(f"--only {number}" for number in bad)
        print(f"{key[0]:8} {key[1]:9} {tries[key]:5} {tries[key] - len(bad):11}  {numbers or 'none'}")
    failures += sum(map(len, failed.values()))
    print(f"{'all':18} {tries.total():5} {tries.total() - sum(map(len, failed.values())):11}")
    if not failures:
        shutil.rmtree(folder)
    return min(failures, 1)


def _without_a_signal(references: References, workers: int) -> bool:
    """Whether a fit with us that gets no signal is not as expected; tells what is expected, too."""
    whole = references.of(workers, with_us=True)
    found = problems_of(None, whole, references, workers)
    parts = ", ".join(
        f"{name} {whole.marks[end] - whole.marks[name]:.1f} s"
        for name, end in (("sweep", "report"), ("report", "training"), ("training", "left"))
    )
    print(f"without a signal, {workers} workers: {parts}: {'; '.join(found) or 'as expected'}", flush=True)
    for name in ("SIGINT", "SIGTERM"):
        stopped = references.of(workers, name=name)
        print(f"  without us, {name}: exit code {stopped.code}, {stopped.exceptions}", flush=True)
    return bool(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--times", type=int, default=60, help="tries")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--only", type=int, default=None, help="the number of a single try")
    parser.add_argument("--jobs", type=int, default=1, help="fits at a time")
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("child", help="one fit, as a try starts it")
    one.add_argument("folder", type=Path)
    one.add_argument("--ours", action="store_true", help="with the profiler")
    one.add_argument("--workers", type=int, default=0)
    one.add_argument("--signal", choices=SIGNALS, default=None, help="raised by the fit itself")
    one.add_argument("--at", type=int, default=0, help="at the beginning of which batch")
    given = parser.parse_args()
    if given.command == "child":
        number = None if given.signal is None else int(signal.Signals[given.signal])
        child(given.folder, given.ours, given.workers, number, given.at)
        return 0
    return campaign(given.times, given.seed, given.only, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
