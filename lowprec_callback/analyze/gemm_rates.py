"""Benchmarked rates held against the GPU's dense peaks: what no GPU can reach was not measured, and says so."""

from __future__ import annotations

import statistics
from dataclasses import replace

from lowprec_callback.analyze.peaks import Peak, find_peak, rate, refuse_impossible
from lowprec_callback.recording import Card, Environment, GemmTime, Recording, Role

Peaks = dict[tuple[str, Role], Peak]


def peaks_of(recording: Recording) -> Peaks:
    """The dense peak for each recipe and role on the Recording's GPU, or why there is none; nothing on a CPU."""
    environment = recording.last(Environment)
    if environment is None or environment.device_type != "cuda":
        return {}
    found: Peaks = {}
    for card in recording.of(Card):
        found[card.recipe, "fprop"] = find_peak(environment.device, *card.fprop)
        found[card.recipe, "dgrad"] = find_peak(environment.device, *card.dgrad)
        found[card.recipe, "wgrad"] = find_peak(environment.device, *card.wgrad)
    return found


def highest_clock(recording: Recording) -> int | None:
    """The highest SM clock [MHz] that the driver allows; None where it was not recorded."""
    environment = recording.last(Environment)
    text = environment.facts.get("highest sm clock", "").split(" ")[0] if environment else ""
    return int(text) if text.isdigit() else None


def without_impossible(recording: Recording) -> Recording:
    """The same Recording, in which a time that means an impossible rate is a failure with that reason.

    So every table, sum and plot made of it lacks that time, and says why.
    """
    peaks, clock = peaks_of(recording), highest_clock(recording)
    if not peaks:
        return recording
    return Recording.from_facts([_checked(f, peaks, clock) if isinstance(f, GemmTime) else f for f in recording])


def _checked(time: GemmTime, peaks: Peaks, clock: int | None) -> GemmTime:
    peak = peaks.get((time.recipe, time.role))
    ms = statistics.median(time.samples_ms) if time.samples_ms else 0.0
    if peak is None or ms <= 0 or time.failure:
        return time
    reason = refuse_impossible(rate(time.m, time.k, time.n, ms), peak, clock)
    return time if reason is None else replace(time, samples_ms=(), quantize_ms=(), launch_bound=False, failure=reason)
