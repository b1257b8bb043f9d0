"""What `lowprec gemm` makes of its timings: the tables with impossible rates refused, the page, and the files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from lowprec_callback.analyze.gemm_table import Cell, GemmTable, gemm_table
from lowprec_callback.analyze.peaks import Peak, find_peak, rate, refuse_impossible, share_of_peak
from lowprec_callback.analyze.shapes import gemm_flops
from lowprec_callback.recording import Card, Environment, GemmTime, Recording
from lowprec_callback.report import Figure
from lowprec_callback.show.gemm_page import as_csv, rows


def tables(recording: Recording) -> list[GemmTable]:
    """Every (method, mode) that was timed, autocast before kernel-only, rates above the chip's peak refused."""
    timed = dict.fromkeys((fact.method, fact.mode) for fact in recording.of(GemmTime))
    order = sorted(timed, key=lambda pair: (pair[0] != "te-tutorial", pair[1] != "autocast"))
    return [_possible(gemm_table(recording, method, mode), recording) for method, mode in order]


def _possible(table: GemmTable, recording: Recording) -> GemmTable:
    """The table without rates that the chip cannot reach: what was not measured right is missing, with the reason."""
    peaks, fastest = _peaks(recording)
    cells = []
    for cell in table.cells:
        checked = {recipe: _checked(cell, recipe, peaks, fastest) for recipe in cell.ms}
        cells.append(replace(cell, ms=checked))
    return replace(table, cells=tuple(cells))


def _checked(cell: Cell, recipe: str, peaks: Mapping[tuple[str, str], Peak], fastest: int | None) -> Figure:
    figure, peak = cell.ms[recipe], peaks.get((recipe, cell.role))
    if figure.value is None or peak is None or figure.value <= 0:
        return figure
    reason = refuse_impossible(rate(cell.m, cell.k, cell.n, figure.value), peak, fastest)
    where = f"{cell.operation} {cell.role} in {recipe}"
    return figure if reason is None else Figure.missing("ms", f"{where}: {reason}")


def _peaks(recording: Recording) -> tuple[dict[tuple[str, str], Peak], int | None]:
    """The dense peak for each recipe and role on the GPU of this Recording, and its highest SM clock [MHz]."""
    environment = recording.last(Environment)
    if environment is None or environment.device_type != "cuda":
        return {}, None
    peaks = {
        (card.recipe, role): find_peak(environment.device, *formats)
        for card in recording.of(Card)
        for role, formats in (("fprop", card.fprop), ("dgrad", card.dgrad), ("wgrad", card.wgrad))
    }
    clock = environment.facts.get("highest sm clock", "").split(" ")[0]
    return peaks, int(clock) if clock.isdigit() else None


def rates(recording: Recording, made: Iterable[GemmTable]) -> list[str]:
    """TFLOP/s of a layer's GEMMs in each recipe, and their share of the dense peak where the GPU's is known."""
    peaks, _ = _peaks(recording)
    told = []
    for table in made:
        if table.mode != "kernel":
            continue
        for recipe in table.recipes:
            layer = [cell for cell in table.cells if cell.in_layer]
            time = table.layer(recipe)
            if time.value is None or not layer:
                continue
            tflops = sum(gemm_flops(cell.m, cell.k, cell.n) for cell in layer) / time.value / 1e9
            peak = peaks.get((recipe, "fprop"))
            share = share_of_peak(tflops, peak) if peak else None
            if peak is not None and peak.tflops is not None and share is not None:
                beside = f", {share:.0%} of the dense {peak.column} peak {peak.tflops:g} ({peak.source})"
            else:
                beside = f" (no percentage: {peak.reason})" if peak is not None and peak.reason else ""
            told.append(f"{table.method}: a layer's GEMMs run at {tflops:.3g} TFLOP/s in {recipe}{beside}")
    return told


def write_json(path: Path, made: Iterable[GemmTable], recording: Recording) -> None:
    """All rows and how they came about."""
    environment = recording.last(Environment)
    body = {
        "device": environment.device if environment else None,
        "versions": environment.versions if environment else {},
        "rows": rows(made),
    }
    path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, made: Iterable[GemmTable]) -> None:
    """All rows."""
    path.write_text(as_csv(made), encoding="utf-8")


def write_plot(path: Path, recording: Recording) -> str | None:
    """The bars of GEMM time by operation and role; returns why there is no plot, if there is none."""
    from lowprec_callback.analyze.summary import analyze
    from lowprec_callback.show.plot_gemms import gemm_times
    from lowprec_callback.show.plot_style import NothingToPlot

    methods = {fact.method for fact in recording.of(GemmTime)}
    if methods == {"te-tutorial"}:
        # The plot shows whatever method there is; the analysis of steps reads role-true times only.
        facts = [replace(f, method="role-true") if isinstance(f, GemmTime) else f for f in recording]
        recording = Recording.from_facts(facts)
    try:
        figure = gemm_times(analyze(recording))
    except NothingToPlot as error:
        return str(error)
    figure.savefig(path, dpi=150)
    return None
