"""NVTX ranges of a whole sweep, on whatever thread: they nest, and are all closed at the end."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import nvtx
import pytest

from lowprec_callback.sweep.plan import NVTX_SETTLE, Settings
from tests.fit.models import Tiny, loader, profiler, trainer


class Domain:
    """Keeps, for each thread, the open ranges, and the path of each that was ever opened."""

    def __init__(self) -> None:
        self.open: dict[int, list[str]] = defaultdict(list)
        self.paths: list[tuple[str, ...]] = []
        self.payloads: list[int] = []

    def get_event_attributes(self, message: str, payload: int | None) -> tuple[str, int | None]:
        return message, payload

    def push_range(self, attributes: tuple[str, int | None]) -> None:
        stack = self.open[threading.get_ident()]
        stack.append(attributes[0])
        self.paths.append(tuple(stack))
        if attributes[1] is not None:
            self.payloads.append(attributes[1])

    def pop_range(self) -> None:
        self.open[threading.get_ident()].pop()


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> Domain:
    domain = Domain()
    monkeypatch.setattr(nvtx, "get_domain", lambda _name: domain)
    return domain


def test_recipe_step_phase_and_module_nest(tmp_path: Path, domain: Domain) -> None:
    trainer(tmp_path, profiler(tmp_path, nvtx=True, nvtx_steps=2)).fit(Tiny(), loader(60))
    assert not any(domain.open.values())
    steps = [path[0] for path in domain.paths if len(path) == 1]
    planned = Settings(2, 1, 2, 1, nvtx_steps=2).steps(2)
    assert len(steps) == planned
    assert domain.payloads == list(range(planned))  # the step's number
    assert {path[0] for path in domain.paths} == {"fp32 step", "bf16 step", "fp32 settle", "bf16 settle"}
    assert {path[1] for path in domain.paths if len(path) == 2} == {"data", "forward", "backward", "optimizer"}
    modules = [path for path in domain.paths if path[-1].startswith("module|")]
    for recipe in ("fp32 step", "bf16 step"):
        assert modules.count((recipe, "forward", "module|forward|net.0")) == 2
        backward = [path for path in modules if path[:2] == (recipe, "backward")]
        assert {path[-1] for path in backward} >= {"module|backward|net.0", "module|backward|net.4"}
    assert not any("settle" in path[0] for path in modules)


def test_off_means_no_ranges_and_no_steps_for_them(tmp_path: Path, domain: Domain) -> None:
    callback = profiler(tmp_path, nvtx=False, nvtx_steps=5, stop_after=True)
    trainer(tmp_path, callback).fit(Tiny(), loader(60))
    assert domain.paths == []
    assert callback.session is not None
    assert callback.session.sweep._steps_done == Settings(2, 1, 2, 1).steps(2)


def test_ranges_without_a_capture_window(tmp_path: Path, domain: Domain) -> None:
    callback = profiler(tmp_path, nvtx=True, nvtx_steps=0, stop_after=True)
    trainer(tmp_path, callback).fit(Tiny(), loader(60))
    assert not any(path[-1].startswith("module|") for path in domain.paths)
    assert callback.session is not None
    assert callback.session.sweep._steps_done == Settings(2, 1, 2, 1).steps(2)


def test_an_exception_closes_every_range(tmp_path: Path, domain: Domain) -> None:
    last = Settings(2, 1, 2, 1, nvtx_steps=2).steps(2)

    def fail(_module: Tiny, step: int) -> None:
        if step == last:
            raise ValueError("planted")

    def fit(**arguments: Any) -> None:
        trainer(tmp_path, profiler(tmp_path, nvtx=True, nvtx_steps=2, **arguments)).fit(Tiny(fail), loader(60))

    with pytest.raises(ValueError, match="planted"):
        fit()
    assert not any(domain.open.values())


def test_the_plan_counts_the_steps_of_the_capture_window() -> None:
    assert Settings(nvtx_steps=3).steps(4) == Settings().steps(4) + 4 * (3 + NVTX_SETTLE)
    with pytest.raises(ValueError, match="nvtx_steps=-1"):
        Settings(nvtx_steps=-1)
