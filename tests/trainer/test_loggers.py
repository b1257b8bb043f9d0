"""Figures for loggers: stable names, only what is known, and no harm to training."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from lowprec_callback.report import Figure, Report
from lowprec_callback.trainer.loggers import FIGURES, WITH_INTERVAL, log_report, metrics
from tests.show import samples
from tests.show.sample_strategies import reports

NAMES = {
    "step_ms",
    "step_ms_low",
    "step_ms_high",
    "host_ms",
    "step_speedup",
    "step_speedup_low",
    "step_speedup_high",
    "gemm_speedup",
    "gemm_quantize_speedup",
    "amdahl",
    "coverage",
    "peak_gb",
    "loss",
    "busy_ms",
    "idle_ms",
    "gemm_ms",
    "quantization_ms",
}
"""Dashboards are made with these: a name may be added, but none may change or go."""


def every_name() -> set[str]:
    return {*FIGURES, *(f"{name}_{end}" for name in WITH_INTERVAL for end in ("low", "high"))}


class Fake:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []
        self._error = error

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))
        if self._error:
            raise self._error


def test_names_are_pinned_and_the_page_about_them_lists_them_all() -> None:
    assert every_name() == NAMES
    page = (Path(__file__).parents[2] / "docs" / "loggers.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == NAMES


def test_a_report_by_hand() -> None:
    found = metrics(samples.codonfm())
    assert found["lowprec/bf16/step_ms"] == 819.2
    assert found["lowprec/bf16/step_ms_low"] == pytest.approx(818.8)
    assert found["lowprec/fp8_delayed/step_ms"] == 513.0
    assert found["lowprec/fp8_delayed/step_speedup"] == pytest.approx(1.597, abs=0.001)
    assert found["lowprec/bf16/gemm_ms"] == 666.9
    assert 0.9 < found["lowprec/fp8_delayed/coverage"] <= 1
    assert found["lowprec/fp8_delayed/quantization_ms"] > 1
    assert {name.split("/")[1] for name in found} == {"bf16", "fp8_delayed", "fp8_current", "fp8_block"}
    assert not [name for name in found if name.startswith("lowprec/bf16/") and "speedup" in name]


@pytest.mark.parametrize("name", samples.ALL)
def test_samples_log_known_figures_under_known_names(name: str) -> None:
    found = metrics(samples.ALL[name]())
    assert found
    assert {key.split("/")[2] for key in found} <= NAMES


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reports())
def test_only_what_is_known_is_logged(report: Report) -> None:
    found = metrics(report)
    for part in report.recipes:
        step = f"lowprec/{part.name}/step_ms"
        assert (step in found) == (part.refusal is None and part.step_ms.known)
        assert part.refusal is None or not [key for key in found if key.startswith(f"lowprec/{part.name}/")]


def test_a_missing_figure_leaves_no_number_behind() -> None:
    report = samples.codonfm()
    without = replace(
        report.recipe("fp8_delayed"),
        peak_gb=Figure.missing("GB", "not read"),
        ledger=None,
        speedups=None,
        verdict=None,
    )
    recipes = tuple(without if part.name == without.name else part for part in report.recipes)
    found = metrics(replace(report, recipes=recipes))
    mine = {key.split("/")[2] for key in found if "/fp8_delayed/" in key}
    assert mine == {"step_ms", "step_ms_low", "step_ms_high", "host_ms", "loss"}


def test_a_void_speed_is_no_speedup() -> None:
    report = samples.codonfm()

    def with_void(name: str) -> dict[str, float]:
        recipes = tuple(replace(part, void="the loss is nan") if part.name == name else part for part in report.recipes)
        return metrics(replace(report, recipes=recipes))

    one, base = with_void("fp8_delayed"), with_void("bf16")
    assert "lowprec/fp8_delayed/step_ms" in one
    assert "lowprec/fp8_delayed/step_speedup" not in one
    assert "lowprec/fp8_block/step_speedup" in one
    assert not [key for key in base if "speedup" in key or "amdahl" in key]


def test_one_call_each_and_an_error_is_told() -> None:
    said: list[str] = []
    bad, good = Fake(OSError("the disk is full")), Fake()
    log_report([bad, good], samples.codonfm(), 47, said.append)
    assert good.calls == [(metrics(samples.codonfm()), 47)]
    (line,) = said
    assert line.startswith("lowprec: Fake did not take the figures (OSError: the disk is full)")


def test_nothing_to_log_is_no_call() -> None:
    fake = Fake()
    said: list[Any] = []
    log_report([fake], None, 1, said.append)
    log_report([fake], replace(samples.codonfm(), recipes=()), 1, said.append)
    assert not fake.calls
    assert not said
