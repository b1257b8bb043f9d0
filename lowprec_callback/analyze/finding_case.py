"""What the findings are made from: one recipe's part of the Report, and the facts that it leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.ranks import Merged
from lowprec_callback.analyze.reading import trace_is_whole, unexplained
from lowprec_callback.analyze.slow_paths import Watched
from lowprec_callback.analyze.traceview import KernelGroup, TraceView
from lowprec_callback.recording import Clocks, Plan, Trace
from lowprec_callback.report import Figure, Finding, Ledger, RecipeReport, merge_facts

FACTS_SHOWN = 3
"""Sources that a row of evidence names; the Figure of the finding has all of its own."""


@dataclass(frozen=True)
class Case:
    """One recipe, looked at for findings."""

    part: RecipeReport
    base: RecipeReport
    everyone: tuple[RecipeReport, ...] = ()
    """All recipes of the run whose speed means something."""
    watched: Watched = field(default_factory=Watched)
    views: Sequence[TraceView] = ()
    traces: Sequence[tuple[int, Trace]] = ()
    base_views: Sequence[TraceView] = ()
    clocks: Sequence[tuple[int, Clocks]] = ()
    """NVML's readings at the ends of this recipe's blocks."""
    bench_mhz: float | None = None
    """The SM clock that the GEMM benchmark's times are given at."""
    environment: dict[str, str] = field(default_factory=dict)
    """`Environment.facts`."""
    plan: Plan | None = None
    te: bool = True
    on_cpu: bool = False
    ranks: Merged | None = None
    """All ranks' summaries, where several processes trained."""

    @property
    def wall(self) -> float | None:
        """The timed step [ms]."""
        return self.part.step_ms.value

    def found(
        self, code: str, ms: Figure, sentence: str, evidence: Sequence[str], advice: str, recipe: str | None = None
    ) -> Finding:
        """A finding about this recipe."""
        return Finding(code, self.part.name if recipe is None else recipe, sentence, tuple(evidence), ms, advice)

    def kernels(self, keep: Callable[[KernelGroup], bool]) -> Figure:
        """Time of some kernels a step, overlap not taken out [ms]; on a CPU scaled to the timed step.

        Missing where no step was traced, where the trace has none of them, and where it is not whole: a sum with a
        missing term is itself missing.
        """
        if (torn := self.torn) is not None:
            return Figure.missing("ms", torn)
        groups = [group for view in self.views for group in view.groups if keep(group)]
        if not groups:
            why = "the trace shows none of its kernels" if self.views else "no traced step was recorded"
            return Figure.missing("ms", why)
        scale = self.stretch
        if scale is None:
            return Figure.missing("ms", self.part.no_ledger or "the traced step cannot be held against a timed one")
        ms = math.fsum(group.ms for group in groups) / len(self.views) * scale
        facts = lines_of("trace", (view.line for view in self.views))
        return Figure(ms, "ms", "estimated" if self.on_cpu else "measured", n=len(self.views), facts=facts)

    def launches(self, keep: Callable[[KernelGroup], bool] = lambda _: True) -> float:
        """Kernels a traced step."""
        return count(self.views, keep)

    @property
    def torn(self) -> str | None:
        """Why the times of the traced steps' kernels do not count, if they do not; see `trace_is_whole`."""
        ledger = self.part.ledger
        if ledger is None or trace_is_whole(ledger):
            return None
        return f"the traced steps of {self.part.name} do not show all kernels as they ran in the timed ones"

    @property
    def no_layers(self) -> float:
        """Matrix products in the ledger's bucket `gemm` that are no captured linear layer's [ms a step].

        Convolutions, and what bears the name of another module. Products without a module are taken as a layer's:
        backward and compiled code may not tell.
        """
        modules = {gemm.module for gemm in self.watched.gemms}

        def foreign(group: KernelGroup) -> bool:
            other = bool(modules) and bool(group.module) and group.module not in modules and not group.role
            return group.bucket == "gemm" and (other or group.kernel.convolution)

        return self.kernels(foreign).value or 0.0

    @property
    def stretch(self) -> float | None:
        """Timed step over traced step on a CPU, where tracing stretches the work itself; 1 on a GPU."""
        if not self.on_cpu:
            return 1.0
        ledger = self.part.ledger
        if ledger is None or not ledger.wall.value or ledger.traced_wall is None or not ledger.traced_wall.value:
            return None
        return ledger.wall.value / ledger.traced_wall.value


def count(views: Sequence[TraceView], keep: Callable[[KernelGroup], bool] = lambda _: True) -> float:
    """Kernels a step."""
    return sum(group.count for view in views for group in view.groups if keep(group)) / max(len(views), 1)


def bucket(ledger: Ledger | None, name: str) -> float | None:
    """Milliseconds of a bucket, where they are known: an incomplete ledger knows none of them."""
    if ledger is None or not ledger.complete:
        return None
    figure = ledger.buckets.get(name)
    return figure.value if figure is not None else None


def stands_out(ledger: Ledger | None, ms: float) -> bool:
    """Whether the ledger leaves less open (unknown work and the residual) than what a finding is about."""
    return ledger is not None and unexplained(ledger) < ms


def share(part: float | None, whole: float | None) -> float | None:
    """part / whole [1]; None where either is not known or the whole is zero."""
    return part / whole if part is not None and whole else None


def rests_on(text: str, *figures: Figure) -> str:
    """A row of evidence: the text, and the facts that its numbers came from."""
    facts = merge_facts(figures)
    more = f"; and {len(facts) - FACTS_SHOWN} more" if len(facts) > FACTS_SHOWN else ""
    return f"{text} [{'; '.join(facts[:FACTS_SHOWN])}{more}]" if facts else text


def ms_text(value: float) -> str:
    """Milliseconds with digits that suit their size."""
    size = abs(value)
    return f"{value:.1f} ms" if size >= 9.995 else f"{value:.2f} ms" if size >= 0.9995 else f"{value:.3f} ms"


def some(names: Sequence[str], most: int = 4) -> str:
    """`a, b and 3 more`."""
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
