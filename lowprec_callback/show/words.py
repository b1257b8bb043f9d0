"""How numbers and names are written: one place, so that every page says the same thing in the same way.

The rules:

- A number shows as many digits as its size deserves (0.503, 5.32, 819.2, 12345), its 95% half-width beside it
  (`819.2 ±0.4`), and a `~` before it when it is an estimate.
- A half-width that would round to zero is written as one unit of the last digit: nothing measured is exact. One
  above half of its number is written as `±>50%`: how much more does not matter (`report.json` has both ends).
- A number that is not there is written as the reason why (`not known: the run was interrupted`), never as a
  blank, a zero or a dash.
- Coverage is never rounded up to 100%, nor down to 0%.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lowprec_callback.report import Figure, Gap, RecipeReport, Report, Verdict, VerdictRow

ESTIMATED = "~"
"""Stands before a number whose origin is `estimated`."""


WIDE = 0.5
"""Share of a number from which its half-width is only said to be larger: the number is too noisy to use."""


def decimals(value: float) -> int:
    """How many decimals a number of this size deserves."""
    size = abs(value)
    if size >= 9999.95:
        return 0
    if size >= 9.995:
        return 1
    return 2 if size >= 0.9995 else 3


def fixed(value: float, places: int, signed: bool = False) -> str:
    """`value` with `places` decimals; never `-0.0`, never `nan`."""
    if not math.isfinite(value):
        return "not finite"
    text = f"{value:.{places}f}"
    if float(text) == 0:
        return text.lstrip("-")
    return f"+{text}" if signed and value > 0 else text


def spread(half_width: float, places: int) -> str:
    """A half-width at the decimals of its number: `±0.4`; at least one unit of the last digit shown."""
    return f"±{fixed(max(abs(half_width), 10.0**-places), places)}"


def why_missing(figure: Figure) -> str:
    """The reason of a Figure without a value, on one line."""
    return one_line(figure.reason or "no reason was given")


def number(figure: Figure, places: int | None = None, signed: bool = False, unit: str = "") -> str:
    """A Figure as text, with its half-width and its `~`; or the reason why there is no number."""
    if figure.value is None:
        return f"not known: {why_missing(figure)}"
    places = decimals(figure.value) if places is None else places
    mark = ESTIMATED if figure.origin == "estimated" else ""
    text = f"{mark}{fixed(figure.value, places, signed)}{unit}"
    if figure.half_width is not None:
        wide = figure.half_width > WIDE * abs(figure.value) and not signed
        text += f" ±>{WIDE:.0%}" if wide else f" {spread(figure.half_width, places)}"
    return text


def ms(figure: Figure) -> str:
    """`819.2 ±0.4`."""
    return number(figure)


def places_in(step: Figure) -> int:
    """Decimals for the parts of a step, so that a column lines up: tenths of a ms from 100 ms upwards."""
    size = abs(step.value) if step.value is not None else 0.0
    return 1 if size >= 99.95 else 2 if size >= 0.9995 else 3


def signed_ms(figure: Figure, places: int) -> str:
    """`-319.3 ±0.8`, `+37.1`."""
    return number(figure, places, signed=True)


def bare(figure: Figure, places: int | None = None) -> str:
    """The number alone, for sentences and tables that show no spread."""
    if figure.value is None:
        return number(figure)
    mark = ESTIMATED if figure.origin == "estimated" else ""
    return mark + fixed(figure.value, decimals(figure.value) if places is None else places)


def times(figure: Figure) -> str:
    """A speedup: `1.60x ±0.01`."""
    if figure.value is None:
        return number(figure)
    return number(figure, places=2 if abs(figure.value) < 99.995 else 0, unit="x")


def gb(figure: Figure) -> str:
    """Gigabytes: `89.5`; small models get more digits (`0.812`)."""
    return number(figure, places=1) if figure.value is not None and figure.value >= 9.95 else number(figure)


def percent(share: float) -> str:
    """A share of one: `100%` only if it is all, `0%` only if it is none, else rounded towards the middle."""
    if not math.isfinite(share):
        return "not finite"
    hundredths = share * 100
    if hundredths >= 100 - 1e-9:
        return "100%" if hundredths < 100.05 else f"{hundredths:.1f}%"
    if hundredths <= 0:
        return "0%"
    if hundredths < 0.1:
        return "<0.1%"
    return f"{min(round(hundredths, 1), 99.9):.1f}%"


def signed_percent(share: float) -> str:
    """A change as a share of one: `-38.7%`, `+0.2%`, `0.0%`."""
    return f"{fixed(share * 100, 1, signed=True)}%"


def share(figure: Figure) -> str:
    """A coverage Figure (unit `%`, or a share of one in any other unit) as `99.2%`, or why there is none."""
    if figure.value is None:
        return number(figure)
    mark = ESTIMATED if figure.origin == "estimated" else ""
    return mark + percent(figure.value / 100 if figure.unit == "%" else figure.value)


def witnesses(verdict: Verdict) -> str:
    """Who confirms it: `operands+kernels`; `operands+kernels 97.2%` if the second spoke for a part only."""
    confirmed = [row for row in verdict.rows if row.verdict == "confirmed"]
    names = dict.fromkeys(name for row in confirmed for name in row.witnesses)
    return "+".join(_witness(name, confirmed) for name in names) or "no witness"


def _witness(name: str, confirmed: Sequence[VerdictRow]) -> str:
    spoke = [row for row in confirmed if name in row.witnesses]
    if len(spoke) == len(confirmed):
        return name
    total = math.fsum(row.share for row in confirmed)
    return f"{name} {percent(math.fsum(row.share for row in spoke) / total if total else 0.0)}"


def coverage(verdict: Verdict) -> str:
    """`100% (operands+kernels)`: the share that ran as asked, and who says so."""
    return f"{share(verdict.coverage)} ({witnesses(verdict)})"


def not_run(recipe: RecipeReport) -> str:
    """`mxfp8 not run: compute capability 9.0, needs 10.0`."""
    return f"{recipe.name} not run: {one_line(recipe.refusal or 'no reason was given')}"


def became(gap: Gap, named: bool = False) -> str:
    """The title of a gap: `Where 819.2 ms became 513.0 (fp8_delayed)`; `named`: with both names."""
    way = f"from {gap.baseline} to {gap.recipe}" if named else gap.recipe
    if gap.start.known and gap.end.known:
        return f"Where {bare(gap.start)} ms became {bare(gap.end)} ({way})"
    return f"From {gap.baseline} to {gap.recipe}"


def left_out(count: int, what: str, where: str) -> str:
    """`3 more operations are in report.json.`"""
    return f"{count} more {what}{'s are' if count > 1 else ' is'} in {where}."


def versions(report: Report) -> str:
    """The libraries that matter to the reader, shortest first: `TE 2.20.2 · torch 2.11.0`."""
    shown = (("transformer_engine", "TE"), ("torch", "torch"))
    return " · ".join(f"{short} {report.versions[name]}" for name, short in shown if name in report.versions)


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def one_line(text: str) -> str:
    """Text with every run of white space and control characters made one space.

    Reasons are often texts of exceptions, which bring their own line ends, and escape sequences at times.
    """
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""A path component that is a number: the `3` of `layers.3.mlp`, but not that of `conv3`."""


def collapse(paths: Iterable[str], among: Iterable[str] = ()) -> list[tuple[str, int]]:
    """Module paths that differ only in an index, taken together: `("layers.*.mlp.fc1", 24)`, in order.

    `*` stands for every index there is. Where `among` (all paths of the model) holds more than were given,
    the indices are written out: `layers.20-23.mlp.fc2`. An index that is the same in all of them stays.
    """
    everything = _grouped(among)
    return [
        (_pattern(members, whole=len(everything.get(pattern, members)) == len(members)), len(members))
        for pattern, members in _grouped(paths).items()
    ]


def modules(paths: Iterable[str], among: Iterable[str] = ()) -> str:
    """`layers.*.mlp.fc1 (24 modules), head`."""
    return ", ".join(name if count == 1 else f"{name} ({count} modules)" for name, count in collapse(paths, among))


def _grouped(paths: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        groups.setdefault(_INDEX.sub("*", path), []).append(path)
    return groups


def _pattern(paths: Sequence[str], whole: bool) -> str:
    columns = list(zip(*(path.split(".") for path in paths), strict=True))
    varying = [index for index, parts in enumerate(columns) if len(set(parts)) > 1]
    names = [parts[0] if len(set(parts)) == 1 else "*" for parts in columns]
    if len(varying) == 1 and not whole:
        names[varying[0]] = ranges(int(part) for part in columns[varying[0]])
    return ".".join(names)


def ranges(numbers: Iterable[int]) -> str:
    """`0,4-7,23`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def significant(value: float, digits: int = 4) -> str:
    """A number of any size in a few significant digits (scales and amaxes span many powers of two)."""
    return f"{value:.{digits}g}" if math.isfinite(value) else "not finite"
