"""Whether two Reports may be compared: everything in which they must not differ, one by one, each with a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowprec_callback.report import RecipeReport, Report

PLAIN = ("device", "engine", "baseline", "model", "shapes", "recipes", "conditions")
"""Names of differences that stand by themselves."""

FAMILIES = ("version", "recipe", "condition")
"""Names with a second part: `version.torch`, `recipe.fp8_delayed`, `condition.power limit`. The first part alone allows
all of them."""

UNKNOWN = "not known"
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """Something in which two runs differ, or may differ, although they must not."""

    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.name}: {self.a} against {self.b}"


class NotComparable(ValueError):
    """Two runs differ in what they must share; `differences` names each."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = tuple(differences)
        names = ",".join(each.name for each in differences if each.name not in NEVER)
        super().__init__(
            f"not comparable: {'; '.join(map(str, differences))}"
            + (f". If a difference is what you ask about, allow it by name: --allow '{names}'" if names else "")
        )


NEVER = ("recipes",)
"""What no `allow` helps against: there is nothing to compare."""


def differences(a: Report, b: Report) -> tuple[Difference, ...]:
    """All differences that make two Reports not comparable, in a fixed order.

    Device, engine (a profiler's capture is slower than a run with nothing attached), baseline, model and the GEMM
    shapes of the baseline's step; of recipes that ran on both sides what was asked of them; all library versions;
    the conditions of `Report.conditions`. What is not known on a side counts as a difference.
    """
    found = [
        Difference(name, str(left), str(right))
        for name, left, right in (
            ("device", a.device, b.device),
            ("engine", a.engine, b.engine),
            ("baseline", a.baseline, b.baseline),
            ("model", a.model, b.model),
        )
        # A device, engine or model that was never recorded is written `unknown: ...`.
        if left != right or left.startswith("unknown")
    ]
    found += _shapes(a, b)
    common = ran_on_both(a, b)
    if not common:
        found.append(Difference("recipes", _ran(a), _ran(b)))
    found += [each for one, other in common for each in _asked(one, other)]
    found += _unlike("version", a.versions, b.versions)
    if a.conditions is None or b.conditions is None:
        found.append(
            Difference("conditions", *(UNKNOWN if c is None else "known" for c in (a.conditions, b.conditions)))
        )
    else:
        found += _unlike("condition", a.conditions, b.conditions)
    return tuple(found)


def refuse_unless_allowed(a: Report, b: Report, allow: Sequence[str] = ()) -> tuple[Difference, ...]:
    """The differences that `allow` names.

    Raises:
        ValueError: `allow` holds a name that no difference has.
        NotComparable: there are differences that it does not name.
    """
    for name in allow:
        if (name not in PLAIN and name.partition(".")[0] not in FAMILIES) or name in NEVER:
            raise ValueError(
                f"{name!r} is no difference that can be allowed: there are "
                f"{', '.join(each for each in PLAIN if each not in NEVER)}, and {', '.join(FAMILIES)} for all of a "
                "kind or with a name (version.torch)"
            )
    found = differences(a, b)
    wrong = [each for each in found if each.name not in allow and each.name.partition(".")[0] not in allow]
    if wrong:
        raise NotComparable(wrong)
    return found


def ran_on_both(a: Report, b: Report) -> list[tuple[RecipeReport, RecipeReport]]:
    """Recipes that ran in both, in A's order."""
    right = {part.name: part for part in b.recipes if part.refusal is None}
    return [(part, right[part.name]) for part in a.recipes if part.refusal is None and part.name in right]


def _ran(report: Report) -> str:
    return ", ".join(part.name for part in report.recipes if part.refusal is None) or "none ran"


Shapes = Counter[tuple[str, int, int, int]]


def shapes(report: Report) -> Shapes | None:
    """Calls in one step of the baseline by (role, m, k, n); None if no GEMM was captured.

    From the GEMM benchmark's rows or, without a benchmark, from the verdict's: both are of the captured GEMMs.
    Module names do not count: a layer that is renamed computes the same.
    """
    for part in report.recipes:
        if part.name == report.baseline:
            rows = part.gemms or (part.verdict.rows if part.verdict else ())
            counted: Shapes = Counter()
            for row in rows:
                counted[row.role, row.m, row.k, row.n] += row.calls
            return counted or None
    return None


def _shapes(a: Report, b: Report) -> list[Difference]:
    left, right = shapes(a), shapes(b)
    if left is None or right is None:
        return [Difference("shapes", *(UNKNOWN if side is None else "known" for side in (left, right)))]
    if left == right:
        return []
    only = [", ".join(_shape(key, count) for key, count in sorted((one - other).items())[:3]) or "no more"
            for one, other in ((left, right), (right, left))]  # fmt: skip
    return [Difference("shapes", only[0], only[1])]


def _shape(key: tuple[str, int, int, int], count: int) -> str:
    role, m, k, n = key
    return f"{count} x {role} {m}x{k}x{n}"


def _asked(one: RecipeReport, other: RecipeReport) -> list[Difference]:
    name = f"recipe.{one.name}"
    if one.asked is None or other.asked is None:
        return [Difference(name, *(UNKNOWN if part.asked is None else "known" for part in (one, other)))]
    unlike = _unlike("", one.asked, other.asked)
    if not unlike:
        return []
    return [Difference(name, *(", ".join(f"{d.name[1:]}={getattr(d, side)}" for d in unlike) for side in ("a", "b")))]


def _unlike(family: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    return [
        Difference(f"{family}.{name}", a.get(name, ABSENT), b.get(name, ABSENT))
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    ]
