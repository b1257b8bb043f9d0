"""The main figures of a Report, for whatever logger a training run has.

Names are `lowprec/<recipe>/<figure>`, the figures those of `FIGURES`; they do not change from one release to the next,
so that a dashboard made once keeps its lines. What is not known is not logged: a chart shows no point, never a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from lowprec_callback.failures import in_words
from lowprec_callback.report import QUANTIZATION, Figure, RecipeReport, Report

PREFIX = "lowprec"


class TakesMetrics(Protocol):
    """All that is asked of a logger."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Take some numbers at a step."""


Pick = Callable[[RecipeReport], Figure | None]


def _speedup(name: str) -> Pick:
    def pick(part: RecipeReport) -> Figure | None:
        if part.baseline:  # 1 by definition
            return None
        return getattr(part.speedups, name) if part.speedups is not None else None

    return pick


def _ledger(pick: Callable[[Mapping[str, Figure]], Figure | None]) -> Pick:
    def of(part: RecipeReport) -> Figure | None:
        if part.ledger is None:
            return None
        return pick({**part.ledger.buckets, "busy": part.ledger.busy, "idle": part.ledger.idle})

    return of


def _quantization(parts: Mapping[str, Figure]) -> Figure | None:
    return Figure.total([parts[name] for name in QUANTIZATION if name in parts], "ms")


def _share(part: RecipeReport) -> Figure | None:
    coverage = part.verdict.coverage if part.verdict is not None else None
    return coverage.scaled(0.01, "1") if coverage is not None and coverage.unit == "%" else coverage


FIGURES: dict[str, Pick] = {
    "step_ms": lambda part: part.step_ms,
    "host_ms": lambda part: part.host_ms,
    "step_speedup": _speedup("step"),
    "gemm_speedup": _speedup("kernel"),
    "gemm_quantize_speedup": _speedup("autocast"),
    "amdahl": _speedup("amdahl"),
    "coverage": _share,
    "peak_gb": lambda part: part.peak_gb,
    "loss": lambda part: part.loss,
    "busy_ms": _ledger(lambda parts: parts["busy"]),
    "idle_ms": _ledger(lambda parts: parts["idle"]),
    "gemm_ms": _ledger(lambda parts: parts.get("gemm")),
    "quantization_ms": _ledger(_quantization),
}
"""What is logged of each recipe that ran. Times are of one whole optimizer step [ms]; speedups are against the baseline
[1], as in the report's first table; `coverage` is the share of linear-layer FLOPs that ran as asked [1]; `peak_gb` is
in 1e9 bytes; `gemm_ms` and `quantization_ms` are the ledger's."""

AGAINST_BASELINE = ("step_speedup", "gemm_speedup", "gemm_quantize_speedup", "amdahl")
"""The four speedups; not logged of the baseline itself."""

WITH_INTERVAL = ("step_ms", "step_speedup")
"""Of these the ends of the 95% interval are logged as well, as `<figure>_low` and `<figure>_high`."""


def metrics(report: Report) -> dict[str, float]:
    """The report's main figures by name; only those that are known."""
    found: dict[str, float] = {}
    without_base = any(part.baseline and part.void is not None for part in report.recipes)
    for part in report.recipes:
        if part.refusal is not None:
            continue
        for name, pick in FIGURES.items():
            # A speed that counts for nothing (the loss is not finite) makes no line that climbs.
            if name in AGAINST_BASELINE and (part.void is not None or without_base):
                continue
            figure = pick(part)
            if figure is None or figure.value is None:
                continue
            found[f"{PREFIX}/{part.name}/{name}"] = figure.value
            if name in WITH_INTERVAL and figure.low is not None and figure.high is not None:
                found[f"{PREFIX}/{part.name}/{name}_low"] = figure.low
                found[f"{PREFIX}/{part.name}/{name}_high"] = figure.high
    return found


def log_report(loggers: Iterable[TakesMetrics], report: Report | None, step: int, say: Callable[[str], None]) -> None:
    """Give the figures to each logger at an optimizer step, in one call. A logger that raises never harms training.

    Args:
        loggers: any objects with `log_metrics(metrics, step)`.
        report: None (another rank's, or one that could not be made) logs nothing.
        step: optimizer steps done when the profile ended.
        say: told of a logger that did not take them.
    """
    found = metrics(report) if report is not None else {}
    if not found:
        return
    for logger in loggers:
        try:
            logger.log_metrics(dict(found), step=step)
        except Exception as error:
            say(
                f"lowprec: {type(logger).__name__} did not take the figures ({in_words(error)}); "
                "they are in report.json, and training goes on"
            )
