"""NVTX ranges, and whether Nsight Systems is attached."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import nvtx
import pytest
import torch

from lowprec_callback.measure.nvtx import DOMAIN, Ranges, capture_window, under_nsys
from lowprec_callback.measure.scopes import Scope


class Domain:
    """A domain that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def get_event_attributes(self, message: str, payload: int | None) -> tuple[str, int | None]:
        return message, payload

    def push_range(self, attributes: Any) -> None:
        self.events.append(attributes)

    def pop_range(self) -> None:
        self.events.append("pop")


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> Domain:
    domain = Domain()

    def get_domain(name: str) -> Domain:
        assert name == DOMAIN == "lowprec"
        return domain

    monkeypatch.setattr(nvtx, "get_domain", get_domain)
    return domain


def test_ranges_are_pushed_and_popped(domain: Domain) -> None:
    ranges = Ranges(True)
    assert ranges.enabled
    ranges.push("bf16 step", 7)
    ranges.push("forward")
    ranges.pop()
    ranges.pop()
    assert domain.events == [("bf16 step", 7), ("forward", None), "pop", "pop"]


def test_modules_and_gemms_nest(domain: Domain) -> None:
    ranges = Ranges(True)
    scope = Scope("block.fc", "backward")
    around = ranges.gemms(lambda scope, sizes: f"{scope.module if scope else ''}{sizes}")
    ranges.enter_module(scope)
    with around(scope, "wgrad", (2, 3, 4)):
        pass
    ranges.leave_module(scope)
    names = [event if event == "pop" else event[0] for event in domain.events]
    assert names == ["module|backward|block.fc", "gemm|wgrad|block.fc(2, 3, 4)", "pop", "pop"]


def test_the_capture_window_opens_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Runtime:
        def cudaProfilerStart(self) -> None:
            told.append("start")

        def cudaProfilerStop(self) -> None:
            told.append("stop")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    with capture_window(torch.device("cuda")):
        assert told == ["start"]
    assert told == ["start", "stop"]
    with pytest.raises(KeyError), capture_window(torch.device("cuda")):
        raise KeyError
    assert told == ["start", "stop"] * 2
    with capture_window(torch.device("cpu")):
        pass
    assert told == ["start", "stop"] * 2


def test_off_means_nothing_at_all(domain: Domain) -> None:
    ranges = Ranges(False)
    assert not ranges.enabled
    ranges.push("bf16 step", 7)
    ranges.pop()
    assert domain.events == []


def test_off_does_not_even_import_nvtx() -> None:
    code = (
        "import sys; sys.modules['nvtx'] = None\n"
        "from lowprec_callback.measure.nvtx import Ranges\n"
        "Ranges(False).push('x'); Ranges(False).pop()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_real_library_without_a_tool() -> None:
    ranges = Ranges(True)
    ranges.push("step", 2**40)
    ranges.push("no payload")
    ranges.pop()
    ranges.pop()


@pytest.mark.parametrize(
    ("variables", "attached"),
    [
        ({}, False),
        ({"NSYS_PROFILING_SESSION_ID": "17"}, True),
        ({"CUDA_INJECTION64_PATH": "/opt/nvidia/nsight-systems/2025.3/libToolsInjection64.so"}, True),
        ({"CUDA_INJECTION64_PATH": "/opt/nvidia/nsight-compute/2025.3/libInjection.so"}, False),
        ({"CUDA_INJECTION64_PATH": "/opt/NSYS/lib.so"}, True),
        ({"CUDA_INJECTION64_PATH": "/usr/lib/libother.so"}, False),
        ({"CUDA_INJECTION64_PATH": ""}, False),
    ],
)
def test_whether_nsight_systems_is_attached(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], attached: bool
) -> None:
    for name in ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert under_nsys() is attached
