"""Where a number came from, in words: `step_time lines 40-47, 60-67`."""

from __future__ import annotations

from collections.abc import Iterable


def lines_of(kind: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """One text for the lines of a Recording that a number rests on; empty if there are none."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if not runs:
        return ()
    spans = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return (f"{kind} {'line' if single else 'lines'} {spans}",)
