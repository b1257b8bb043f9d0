"""oneDNN's and MKL's lines are taken out of the standard output; everything else arrives there."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from lowprec_callback.measure import stdout_log
from lowprec_callback.measure.cublaslt_log import LogUnavailable
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.measure.stdout_log import StdoutLog

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch was built without MKL")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert stdout_log._redirected is None


def product() -> None:
    torch.mm(torch.ones(16, 64), torch.ones(64, 32))


def say(text: str) -> None:
    os.write(1, text.encode())


def lines(log: StdoutLog, start: str) -> list[str]:
    return [line for _, line in log.lines if line.startswith(start)]


@needs_mkl
def test_mkls_lines_are_caught_and_the_rest_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    log = StdoutLog(lambda: None)
    say("before\n")
    with log.listen():
        say("one\n")
        product()
        say("two, a line left open: ")
        product()
        say("three\n")
    say("after\n")
    product()
    assert len(lines(log, "MKL_VERBOSE SGEMM(")) == 2
    assert "MKL" in log.libraries
    assert capfd.readouterr().out == "before\none\ntwo, a line left open: three\nafter\n"


@needs_onednn
def test_onednns_lines_are_caught(capfd: pytest.CaptureFixture[str]) -> None:
    log = StdoutLog(lambda: None)
    with log.listen():
        torch._C._nn.mkldnn_linear(torch.ones(16, 64).to_mkldnn(), torch.ones(32, 64).to_mkldnn())
    (line,) = [line for line in lines(log, "onednn_verbose") if ",inner_product," in line and "exec," in line]
    assert "src:f32" in line or "src_f32" in line
    assert capfd.readouterr().out == ""


@needs_mkl
def test_each_line_has_the_module_that_ran() -> None:
    running: list[Scope | None] = [None]
    log = StdoutLog(lambda: running[0])
    with log.listen():
        product()
        for name in ("a", "b"):
            running[0] = Scope(name, "forward")
            log.boundary()
            product()
            running[0] = None
            log.boundary()
        product()
    owners = [scope.module if scope else None for scope, line in log.lines if "SGEMM(" in line]
    assert owners == [None, "a", "b", None]


@needs_mkl
def test_after_an_exception_stdout_is_back_and_nothing_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    log = StdoutLog(lambda: None)
    before = os.fstat(1).st_ino

    def step() -> None:
        say("said before it failed\n")
        product()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), log.listen():
        step()
    assert os.fstat(1).st_ino == before
    product()
    assert capfd.readouterr().out == "said before it failed\n"
    assert len(lines(log, "MKL_VERBOSE SGEMM(")) == 1


def test_no_file_descriptor_is_left_open() -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/dev/fd"))

    with StdoutLog(lambda: None).listen():
        pass
    before = descriptors()
    for _ in range(3):
        with StdoutLog(lambda: None).listen():
            pass
    assert len(descriptors()) == len(before)


def test_what_other_threads_say_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with StdoutLog(lambda: None).listen():
        threads = [threading.Thread(target=say, args=(f"thread {i}\n",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(capfd.readouterr().out.splitlines()) == [f"thread {i}" for i in range(4)]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_data_loaders_worker_forked_meanwhile_keeps_the_real_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    worker = multiprocessing.get_context("fork").Process(target=say, args=("from the worker\n",))
    with StdoutLog(lambda: None).listen():
        worker.start()
        worker.join()
        say("from us\n")
    assert capfd.readouterr().out == "from the worker\nfrom us\n"
    assert worker.exitcode == 0


@pytest.mark.parametrize("name", ["ONEDNN_VERBOSE", "MKL_VERBOSE"])
def test_the_users_own_log_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(LogUnavailable, match=f"{name} is set"), StdoutLog(lambda: None).listen():
        pass
    monkeypatch.setenv(name, "0")
    with StdoutLog(lambda: None).listen():
        pass


def test_two_at_once_are_refused() -> None:
    log = StdoutLog(lambda: None)
    with log.listen(), pytest.raises(LogUnavailable, match="redirected already"), StdoutLog(lambda: None).listen():
        pass


def test_without_either_library_stdout_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.fstat(1).st_ino
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(LogUnavailable, match="built without oneDNN; PyTorch was built without MKL"):  # noqa: SIM117
        with StdoutLog(lambda: None).listen():
            pass
    assert os.fstat(1).st_ino == before


def test_a_closed_stdout_is_said() -> None:
    code = (
        "import os\nfrom lowprec_callback.measure.stdout_log import StdoutLog\nos.close(1)\n"
        "try:\n    with StdoutLog(lambda: None).listen(): pass\n"
        "except RuntimeError as error:\n    os.write(2, str(error).encode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "standard output cannot be redirected" in done.stderr
