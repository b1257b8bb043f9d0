"""One rank's own measurements in short, to be sent to rank zero: a pure function of its Recording."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import (
    Clocks,
    Fact,
    ForwardTime,
    HostTime,
    Memory,
    Problem,
    RankRecipe,
    RankSummary,
    Recording,
)
from lowprec_callback.report import Figure, RecipeReport

_F = TypeVar("_F", bound=Fact)


def summarise(recording: Recording, rank: int, host: str, device: str) -> RankSummary:
    """What this rank measured of each recipe that ran."""
    report = analyze(recording)
    return RankSummary(
        rank=rank,
        host=host,
        device=device,
        recipes={part.name: _recipe(part, recording) for part in report.recipes if part.refusal is None},
        problems=tuple(f"{problem.where}: {problem.message}" for problem in recording.of(Problem)) if rank else (),
    )


def _recipe(part: RecipeReport, recording: Recording) -> RankRecipe:
    clocks = _of(part.name, recording.of(Clocks))
    peaks = [fact.peak for fact in _of(part.name, recording.of(Memory)) if fact.phase == "step"]
    communication = part.ledger.buckets["communication"] if part.ledger is not None else None
    return RankRecipe(
        rounds=part.samples,
        forward=tuple((fact.round, fact.ms) for fact in _of(part.name, recording.of(ForwardTime)) if fact.ms),
        host_ms=tuple(fact.ms for fact in _of(part.name, recording.of(HostTime)) if math.isfinite(fact.ms)),
        peak_bytes=max(peaks, default=None),
        sm_mhz=tuple(fact.sm_mhz for fact in clocks),
        power_w=tuple(fact.power_w for fact in clocks),
        gemm_ms=_value(part.gemm_kernel_ms),
        communication_ms=_value(communication),
        coverage=_value(part.verdict.coverage) if part.verdict is not None else None,
    )


def _of(recipe: str, facts: Iterable[_F]) -> list[_F]:
    return [fact for fact in facts if getattr(fact, "recipe", None) == recipe]


def _value(figure: Figure | None) -> float | None:
    return figure.value if figure is not None else None
