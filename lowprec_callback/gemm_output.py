"""What `lowprec gemm` makes of its timings: the tables with impossible rates refused, the page, and the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowprec_callback.analyze.gemm_rates import peaks_of, without_impossible
from lowprec_callback.analyze.gemm_table import GemmTable, gemm_table
from lowprec_callback.files import write_text
from lowprec_callback.recording import Environment, Gemm, GemmRun, GemmTime, Header, Recording, Refusal
from lowprec_callback.show.gemm_rows import as_csv, rows, sums


def tables(recording: Recording) -> list[GemmTable]:
    """Every (method, mode) that was timed, autocast before kernel-only, rates above the chip's peak refused."""
    timed = dict.fromkeys((fact.method, fact.mode) for fact in recording.of(GemmTime))
    order = sorted(timed, key=lambda pair: (pair[0] != "te-tutorial", pair[1] != "autocast"))
    possible, peaks = without_impossible(recording), peaks_of(recording)
    return [gemm_table(possible, method, mode, peaks) for method, mode in order]


def rates(recording: Recording, made: Iterable[GemmTable]) -> list[str]:
    """Where the dense peaks come from that the tables' percentages stand on, or why there are none."""
    with_shares = [table for table in made if table.mode == "kernel" and table.has_layer]
    shown = {recipe for table in with_shares for recipe in table.recipes}
    peaks = [peak for (recipe, role), peak in peaks_of(recording).items() if role == "fprop" and recipe in shown]
    known = {peak.column: peak for peak in peaks if peak.tflops is not None}
    unknown = dict.fromkeys(peak.reason for peak in peaks if peak.tflops is None)
    told = []
    if known:
        each = ", ".join(f"{column} {peak.tflops:g}" for column, peak in known.items())
        first = next(iter(known.values()))
        told.append(f"dense peaks of the {first.gpu}, TFLOP/s: {each} ({first.source})")
    return [*told, *(f"no share of a dense peak: {reason}" for reason in unknown)]


def write_json(path: Path, made: Iterable[GemmTable], recording: Recording) -> None:
    """Everything: rows, sums, where recipes stop to pay, how it was sampled, and what was not run."""
    made = list(made)
    environment, header = recording.last(Environment), recording.last(Header)
    body: dict[str, Any] = {
        "created": header.created if header else None,
        "tool_version": header.tool_version if header else None,
        "device": environment.device if environment else None,
        "versions": environment.versions if environment else {},
        "baseline": made[0].baseline if made else None,
        "not_run": {fact.recipe: fact.reason for fact in recording.of(Refusal)},
        "runs": [dataclasses.asdict(fact) for fact in recording.of(GemmRun)],
        "rows": rows(made),
        "sums": sums(made),
        "break_even": [
            {
                "method": table.method,
                "mode": table.mode,
                "recipe": found.recipe,
                "keep": found.keep,
                "speedups": {
                    name: {"value": gain.value, "low": gain.low, "high": gain.high}
                    for name, gain in found.gains.items()
                },
            }
            for table in made
            for found in table.break_even()
        ],
    }
    write_text(path, json.dumps(body, indent=1, allow_nan=False) + "\n")


def write_csv(path: Path, made: Iterable[GemmTable]) -> None:
    """All rows."""
    write_text(path, as_csv(made))


def write_plot(path: Path, recording: Recording) -> str | None:
    """The plot: bars of GEMM time by operation and role, or rates by shape where shapes were listed.

    Returns why there is none, if there is none.
    """
    from lowprec_callback.show.plot_style import NothingToPlot
    from lowprec_callback.show.plots import save

    try:
        figure = _listed(recording) if _is_listed(recording) else _model(recording)
    except NothingToPlot as error:
        return str(error)
    save(figure, path, path.suffix.removeprefix(".").lower())
    return None


def _is_listed(recording: Recording) -> bool:
    gemms = recording.of(Gemm)
    return bool(gemms) and all(gemm.layers == 0 for gemm in gemms)


def _listed(recording: Recording) -> Any:
    from lowprec_callback.show.plot_shapes import shape_rates

    environment = recording.last(Environment)
    return shape_rates(tables(recording), environment.device if environment else "unknown device")


def _model(recording: Recording) -> Any:
    from lowprec_callback.analyze.summary import analyze
    from lowprec_callback.show.plot_gemms import gemm_times

    possible = without_impossible(recording)
    methods = dict.fromkeys(fact.method for fact in possible.of(GemmTime))
    notes = []
    if "role-true" not in methods and methods:
        # The plot shows whatever method there is; the analysis of steps reads role-true times only.
        notes.append("Timed by the published method (te-tutorial).")
        facts = [replace(fact, method="role-true") if isinstance(fact, GemmTime) else fact for fact in possible]
        possible = Recording.from_facts(facts)
    elif len(methods) > 1:
        notes.append("Timed as training runs them (role-true); te-tutorial's times are in the tables.")
    return gemm_times(analyze(possible), notes)
