"""The page comes first and in spite of everything; files are whole or not there; the sentence about them is true."""

from __future__ import annotations

import errno
import io
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure as Canvas

from lowprec_callback import recording
from lowprec_callback.publish import publish, whereabouts
from lowprec_callback.recording import End, Loss, Recorder, Recording, read
from lowprec_callback.report import Report, load_report
from lowprec_callback.show import plots
from tests.show import samples

FULL = OSError(errno.ENOSPC, "No space left on device")
PLOTS = [f"{name}.png" for name in plots.ALL]
FILES = ["report.json", *PLOTS, "report.html"]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    """A Recorder that was closed after three facts."""
    with Recorder(tmp_path / "run" / recording.FILE_NAME, "0.1.0", "2026-01-01T00:00:00+00:00") as made:
        made.add(Loss("bf16", 0, 1.5), End("finished"))
    return made


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def drawn(_report: Report) -> Canvas:
    canvas = Canvas(figsize=(1, 1))
    canvas.suptitle("A plot")
    return canvas


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An analysis that always answers with one sample, and plots of nothing."""
    fake = ModuleType("lowprec_callback.analyze.summary")
    fake.analyze = lambda facts: replace(samples.cpu(), recording=str(facts.path) if facts.path else None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lowprec_callback.analyze.summary", fake)
    for name in plots.ALL:
        monkeypatch.setitem(plots.ALL, name, drawn)
    return fake


class Said(list[str]):
    """What was said, and the page."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = io.StringIO()

    @property
    def pages(self) -> int:
        """How many whole pages came out, from the headline to the footer."""
        words = self.stream.getvalue().split()
        assert words.count("lowprec_callback") - words.count("by") == words.count("restored:")
        return words.count("restored:")


@pytest.fixture
def said() -> Said:
    return Said()


def published(recorder: Recorder | Recording, said: Said, folder: Path | None = None) -> Report | None:
    home = recorder.path
    assert home is not None
    return publish(recorder, folder or home.parent, say=said.append, stream=said.stream)


def there(folder: Path) -> set[str]:
    """The files of the report; hidden ones too."""
    return {path.name for path in folder.iterdir()} - {recording.FILE_NAME}


def test_page_and_files(recorder: Recorder, said: Said) -> None:
    report = published(recorder, said)
    folder = recorder.path.parent
    assert report is not None
    assert said.pages == 1
    assert there(folder) == set(FILES)
    assert load_report(folder) == report
    assert said == [f"lowprec: written in {folder}: {', '.join(FILES)}"]
    assert "report.json" not in said.stream.getvalue()
    assert " · ".join(["report.html", "report.json", *PLOTS]) in (folder / "report.html").read_text()


def test_the_page_is_out_before_anything_is_written(recorder: Recorder, said: Said) -> None:
    folder = recorder.path.parent

    class Watched(io.StringIO):
        def flush(self) -> None:
            seen.append(there(folder))

    seen: list[set[str]] = []
    said.stream = Watched()
    published(recorder, said)
    assert seen
    assert not any(seen)
    assert said.pages == 1


def test_standard_output_is_the_default(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    publish(recorder, recorder.path.parent, say=lambda _: None)
    assert "restored: " in capsys.readouterr().out


def test_a_recording_that_was_read(recorder: Recorder, said: Said) -> None:
    assert published(read(recorder.path), said) is not None
    assert there(recorder.path.parent) == set(FILES)


# -- the disk ----------------------------------------------------------------------------------------------------


def refuse(names: list[str], error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last step of writing some files fail."""
    real = os.replace

    def renamed(source: Any, target: Any) -> None:
        if Path(target).name in names:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", renamed)


@pytest.mark.parametrize("name", FILES)
def test_one_file_that_is_refused_takes_no_other_with_it(
    name: str, recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorder.path.parent
    (folder / name).write_text("old")
    refuse([name], FULL, monkeypatch)
    assert published(recorder, said) is not None
    assert said.pages == 1
    assert (folder / name).read_text() == "old"
    assert there(folder) == set(FILES)
    others = [each for each in FILES if each != name]
    assert said == [
        f"lowprec: written in {folder}: {', '.join(others)}",
        f"lowprec: {name} could not be written in {folder} (No space left on device)",
    ]
    if name != "report.html":
        assert name not in (folder / "report.html").read_text().split("Recording ")[-1]


def test_a_full_disk_is_one_sentence(recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(FILES, FULL, monkeypatch)
    folder = recorder.path.parent
    assert published(recorder, said) is not None
    assert said.pages == 1
    assert said == [f"lowprec: {', '.join(FILES)} could not be written in {folder} (No space left on device)"]
    assert there(folder) == set()


def test_a_folder_that_was_removed_is_made_again(recorder: Recorder, said: Said) -> None:
    folder = recorder.path.parent
    shutil.rmtree(folder)
    assert published(recorder, said) is not None
    assert said.pages == 1
    assert "Recording not on disk" in said.stream.getvalue()
    assert there(folder) == set(FILES)


def test_a_folder_that_cannot_be_written(recorder: Recorder, said: Said) -> None:
    folder = recorder.path.parent / "file"
    folder.write_text("in the way")
    assert published(recorder, said, folder) is not None
    assert said.pages == 1
    reasons = " ".join(said)
    assert "written in" in reasons
    assert all(name in reasons for name in FILES)
    assert "Not a directory" in reasons or "File exists" in reasons
    assert not [line for line in said if line.startswith("lowprec: written")]


NO_DESCRIPTORS = """
    import os, resource, sys
    from pathlib import Path
    from lowprec_callback.publish import publish
    from lowprec_callback.recording import End, Recorder
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    recorder = Recorder(Path(sys.argv[1]) / "recording.jsonl", "0", "now")
    recorder.add(End("finished"))
    try:
        while True:
            os.dup(1)
    except OSError:
        pass
    recorder.close()
    if sys.argv[2] == "none":
        os.dup(1)  # the one that the Recorder gave back
    publish(recorder, Path(sys.argv[1]), say=lambda text: print(text, file=sys.stderr))
"""


@pytest.mark.parametrize("left", ["one", "none"])
def test_no_file_descriptors_left(left: str, tmp_path: Path) -> None:
    """The one that the Recorder gives back is enough for the page; with none at all nothing can even be imported."""
    code = textwrap.dedent(NO_DESCRIPTORS)
    if left == "none":  # in a process that has imported all of it
        code = "import lowprec_callback.analyze.summary, lowprec_callback.show.html\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), left],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "restored" in done.stdout
    assert "Traceback" not in done.stderr
    if left == "none":
        assert (
            f"report.json, report.html could not be written in {tmp_path / 'run'} (Too many open files)" in done.stderr
        )
        assert there(tmp_path / "run") == set()
    else:
        assert (tmp_path / "run" / "report.json").is_file()


# -- what fails --------------------------------------------------------------------------------------------------


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("name", plots.ALL)
def test_a_plot_that_fails_takes_no_other_with_it(
    name: str, recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plots.ALL, name, failing(ValueError("planted")))
    published(recorder, said)
    folder = recorder.path.parent
    assert there(folder) == set(FILES) - {f"{name}.png"}
    assert said[1] == f"lowprec: {name}.png could not be written in {folder} (ValueError: planted)"
    assert f"No plot {name}: ValueError: planted" in (folder / "report.html").read_text()


def test_a_plot_without_data_is_not_missing(recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plots.ALL, "gap_waterfall", failing(plots.NothingToPlot("no gap")))
    published(recorder, said)
    assert len(said) == 1
    assert "gap_waterfall" not in said[0]


def test_without_matplotlib_there_is_a_report(recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plots", "html"):
        monkeypatch.setitem(sys.modules, f"lowprec_callback.show.{name}", None)
        monkeypatch.delattr(f"lowprec_callback.show.{name}", raising=False)
    assert published(recorder, said) is not None
    assert said.pages == 1
    assert there(recorder.path.parent) == {"report.json"}
    assert said[0].endswith(": report.json")
    assert "the plots could not be written" in said[1]


@pytest.mark.parametrize("error", [ValueError("I/O operation on closed file"), BrokenPipeError(32, "Broken pipe")])
def test_where_nobody_reads_the_page_the_files_come(error: Exception, recorder: Recorder, said: Said) -> None:
    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise error

    said.stream = Closed()
    assert published(recorder, said) is not None
    assert said[0].startswith("lowprec: the page could not be printed (")
    assert there(recorder.path.parent) == set(FILES)


def test_an_analysis_that_fails_says_where_the_facts_are(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    quick.analyze = failing(KeyError("planted"))  # type: ignore[attr-defined]
    assert published(recorder, said) is None
    assert said == [
        "lowprec: the report could not be finished (KeyError: 'planted'); all that was measured is in "
        f"{recorder.path}: show it with `lowprec report {recorder.path.parent}`"
    ]
    assert there(recorder.path.parent) == set()


def test_the_sentence_is_true_where_the_file_is_gone(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    quick.analyze = failing(KeyError("planted"))  # type: ignore[attr-defined]
    shutil.rmtree(recorder.path.parent)
    published(recorder, said)
    assert said[0].endswith(f"nothing of what was measured is on disk ({recorder.path} is gone)")


def test_whereabouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whereabouts(Recording.from_facts([End("finished")])) == "what was measured is not on disk"
    file = Recorder(tmp_path / "a run" / recording.FILE_NAME, "0.1.0")
    file.add(Loss("bf16", 0, 1.0))
    write, number = os.write, file._file
    monkeypatch.setattr(os, "write", lambda fd, data: failing(FULL)() if fd == number else write(fd, data))
    file.add(Loss("bf16", 1, 1.0), End("finished"))
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(recording, "replacing", failing(FULL))
    file.close()
    assert whereabouts(file) == (
        f"of what was measured, {file.path} holds only the first 2 of 4 lines: show them with "
        f"`lowprec report '{file.path.parent}'`"
    )
    kept = read(file.path)
    shutil.rmtree(file.path.parent)
    assert whereabouts(file) == f"nothing of what was measured is on disk ({file.lost})"
    assert whereabouts(kept) == f"nothing of what was measured is on disk ({file.path} is gone)"
    other = Recorder(tmp_path / "run" / "rank-1.jsonl", "0.1.0")
    other.close()
    assert whereabouts(other).endswith(f"`lowprec report {other.path}`")


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


class Once:
    """Ctrl-C at the first call, or at the first `times` calls; then what stood there before."""

    def __init__(self, real: Callable[..., Any], times: int = 1) -> None:
        self._real, self._times = real, times

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self._times:
            self._times -= 1
            raise KeyboardInterrupt
        return self._real(*given, **named)


def interrupted(recorder: Recorder, said: Said) -> None:
    with pytest.raises(KeyboardInterrupt):
        published(recorder, said)
    assert not [name for name in there(recorder.path.parent) if name.startswith(".")]


def test_ctrl_c_in_the_analysis(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    quick.analyze = Once(quick.analyze)  # type: ignore[attr-defined]
    interrupted(recorder, said)
    assert said.pages == 1
    assert there(recorder.path.parent) == set()
    assert said == [
        "lowprec: the page still comes, then this stops; Ctrl-C again stops at once",
        "lowprec: stopped before the files of the report were written; all that was measured is in "
        f"{recorder.path}: show it with `lowprec report {recorder.path.parent}`",
    ]


def test_ctrl_c_twice_in_the_analysis(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    quick.analyze = Once(quick.analyze, 2)  # type: ignore[attr-defined]
    interrupted(recorder, said)
    assert said.pages == 0
    assert said[-1].startswith("lowprec: stopped before the page was out; all that was measured is in ")


def test_ctrl_c_is_not_lost_in_an_analysis_that_fails(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    quick.analyze = Once(failing(KeyError("planted")))  # type: ignore[attr-defined]
    interrupted(recorder, said)
    assert "could not be finished (KeyError: 'planted'); all that was measured is in " in said[-1]


@pytest.mark.usefixtures("ctrl_c")
def test_the_signal_itself(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    analyze, pressed = quick.analyze, []

    def press(facts: Recording) -> Any:
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return analyze(facts)

    quick.analyze = press  # type: ignore[attr-defined]
    interrupted(recorder, said)
    assert said.pages == 1


def test_ctrl_c_while_the_page_is_printed(recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowprec_callback.show import console

    monkeypatch.setattr(console, "print_report", Once(console.print_report))
    interrupted(recorder, said)
    assert said.pages == 1
    assert there(recorder.path.parent) == set()


@pytest.mark.parametrize(
    ("where", "written"),
    [
        ("lowprec_callback.report.Report.to_json", []),
        ("lowprec_callback.show.plots.save", ["report.json"]),
        ("lowprec_callback.show.plots.save_all", ["report.json"]),
        ("lowprec_callback.show.html.as_html", FILES[:-1]),
        ("lowprec_callback.show.html.save", FILES[:-1]),
    ],
)
def test_ctrl_c_while_files_are_made(
    where: str, written: list[str], recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, failing(KeyboardInterrupt()))
    interrupted(recorder, said)
    folder = recorder.path.parent
    assert said.pages == 1
    assert there(folder) == set(written)
    if written:
        assert said == [f"lowprec: written in {folder}: {', '.join(written)}, then this was stopped"]
    else:
        assert said == [f"lowprec: stopped before a file of the report was written in {folder}"]


class Lost:
    """Ctrl-C whose exception never comes out, as in the callback of a weak reference; then what stood there before."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real, self._pressed = real, False

    def __call__(self, *given: Any, **named: Any) -> Any:
        if not self._pressed:
            self._pressed = True
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return self._real(*given, **named)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("where", "written"),
    [
        ("lowprec_callback.publish._analysed", []),
        ("lowprec_callback.show.console.print_report", []),
        ("lowprec_callback.report.Report.save", ["report.json"]),
        ("lowprec_callback.show.plots.save", FILES[:-1]),
        ("lowprec_callback.show.html.as_html", FILES),
    ],
)
def test_ctrl_c_that_python_or_a_library_loses(
    where: str, written: list[str], recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(pkgutil.resolve_name(where))
    monkeypatch.setattr(where, lambda *given, **named: lost(*given, **named))
    interrupted(recorder, said)
    folder = recorder.path.parent
    assert said.pages == 1
    assert there(folder) == set(written)
    if written:
        assert said == [f"lowprec: written in {folder}: {', '.join(written)}, then this was stopped"]
    else:
        assert len(said) == 1
        assert said[0].startswith("lowprec: stopped before the files of the report were written; all that was measured")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_of_which_a_library_makes_an_error(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    quick.analyze = Lost(failing(ValueError("Invalid bounding box")))  # type: ignore[attr-defined]
    interrupted(recorder, said)
    assert said[0] == "lowprec: the page still comes, then this stops; Ctrl-C again stops at once"
    assert "could not be finished (ValueError: Invalid bounding box); all that was measured is in " in said[1]


@pytest.mark.usefixtures("ctrl_c")
def test_a_handler_of_the_users_own_keeps_ctrl_c(recorder: Recorder, said: Said, quick: ModuleType) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    quick.analyze = Lost(quick.analyze)  # type: ignore[attr-defined]
    assert published(recorder, said) is not None
    assert seen == [signal.SIGINT]
    assert there(recorder.path.parent) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_ctrl_c_while_a_file_takes_its_name(
    name: str, recorder: Recorder, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorder.path.parent
    (folder / name).write_text("old")
    refuse([name], KeyboardInterrupt(), monkeypatch)
    interrupted(recorder, said)
    assert said.pages == 1
    assert (folder / name).read_text() == "old"
    assert there(folder) == {*FILES[: FILES.index(name)], name}
    assert f", {name}" not in said[0]
