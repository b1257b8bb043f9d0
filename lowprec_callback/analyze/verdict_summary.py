"""The verdict in one sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowprec_callback.analyze.gemms import operation
from lowprec_callback.recording import ROLES
from lowprec_callback.report import Figure, Report, VerdictRow

OPERANDS_ALONE = "by its operands alone"
"""How the reason of a row begins whose operands are as asked and whose kernels nobody saw."""


@dataclass(frozen=True)
class Told:
    """What the sentence must tell besides the rows."""

    te: bool
    """Whether Transformer Engine ran the model."""
    learned: bool = False
    """Whether the names of kernels had to be looked up in what the benchmark launched."""
    over: str = ""
    """GEMM kernels of the timed step that belong to no captured layer, in words."""


def summary(rows: Sequence[VerdictRow], reachable: Sequence[bool], coverage: Figure, asked: str, told: Told) -> str:
    """One sentence: all as asked, or how much was and what was not.

    "All" is said only where kernels of a timed step confirm every call of every row.
    """
    inside = [row for row, reach in zip(rows, reachable, strict=True) if reach]
    whole = bool(inside) and all(row.verdict == "confirmed" for row in inside)
    gemms = f"{'TE' if told.te else 'linear'} GEMMs"
    if coverage.value is None and not (told.over and inside):
        return f"What ran is not known: {coverage.reason}."
    if coverage.value is None:
        captured = f"ran in {asked} ({_extent(inside)})" if whole else f"did not all run as asked: {_odd(inside)}"
        return f"The captured {gemms} {captured}. There are more: {coverage.reason}."
    outside = [row for row in rows if row.verdict == "outside"]
    tail = ""
    if outside:
        names = ", ".join(dict.fromkeys(operation(row.module) for row in outside))
        share = math.fsum(row.share for row in outside)
        tail = f" Outside ({f'{share:.1%}' if share >= 0.001 else '<0.1%'} of linear FLOPs): {names}."
    if whole:
        if told.learned:
            taught = "by kernel names that only the benchmark explains"
            return f"Every one of the {gemms} ran in {asked}, {taught}: {_extent(inside)}.{tail}"
        return f"All {gemms} ran in {asked}: {_extent(inside)}.{tail}"
    alone = [row for row in inside if row.verdict == "unproven" and row.why.startswith(OPERANDS_ALONE)]
    if inside and len(alone) == len(inside):
        return f"By their operands alone, the {gemms} were given {asked}; no kernel of a timed step shows it.{tail}"
    return f"{_floor_percent(coverage.value)} of linear FLOPs ran as asked; {_odd(inside)}.{tail}"


def _odd(rows: Sequence[VerdictRow]) -> str:
    """What did not run as asked: the word, where, and the counts that do not balance."""
    kinds: dict[str, list[VerdictRow]] = {}
    for row in rows:
        if row.verdict != "confirmed":
            kinds.setdefault(row.verdict, []).append(row)
    said = "; ".join(f"{word.replace('_', ' ')} in {_places(found)}" for word, found in kinds.items())
    return f"{said}{_one_reason(rows)}"


def _one_reason(rows: Sequence[VerdictRow]) -> str:
    """The reason, if all that is unproven has the same: counts that do not balance are told in the sentence."""
    reasons = {row.why for row in rows if row.verdict == "unproven"}
    reason = reasons.pop() if len(reasons) == 1 else ""
    return f" ({reason})" if reason and len(reason) < 300 else ""


def fallbacks(report: Report, most: int = 5) -> str:
    """What did not run as asked, as sentences: recipe, modules, roles, formats and cause. Empty if all did."""
    found: dict[tuple[str, str, str, str, str], list[VerdictRow]] = {}
    for part in report.recipes:
        for row in part.verdict.rows if part.verdict is not None else ():
            if row.verdict == "fallback":
                key = (part.name, operation(row.module), row.asked, row.ran, row.why)
                found.setdefault(key, []).append(row)
    if not found:
        return ""
    told = []
    for (recipe, name, asked, ran, why), rows in list(found.items())[:most]:
        modules = list(dict.fromkeys(row.module for row in rows))
        where = modules[0] if len(modules) == 1 else f"{name} ({len(modules)} modules)"
        roles = in_order(row.role for row in rows)
        told.append(f"{recipe}: {where}, {roles}: asked {asked}, ran {ran}: {why}")
    more = f"; and {len(found) - most} more like these" if len(found) > most else ""
    return f"Not every GEMM ran in the precision that was asked for. {'; '.join(told)}{more}."


def in_order(roles: Iterable[str]) -> str:
    """`fprop, dgrad, wgrad`, each that is there, once."""
    found = set(roles)
    return ", ".join(role for role in ROLES if role in found)


def _floor_percent(share: float) -> str:
    """A share in percent, rounded down: 99.97% is never called 100%."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f}%"


def _extent(rows: Sequence[VerdictRow]) -> str:
    """`24 layers x 4 linears x 3 roles`, with `and head` if there is more; `97 modules` if it is less regular."""
    roles: dict[str, set[str]] = {}
    for row in rows:
        roles.setdefault(row.module, set()).add(row.role)
    kinds = Counter(operation(module) for module in roles)
    repeated = {name: count for name, count in kinds.items() if count > 1}
    single = [name for name in kinds if name not in repeated]
    each = len(next(iter(roles.values())))
    odd = len(set(repeated.values())) > 1 or (repeated and any("*" in name for name in single))
    if odd or len({frozenset(found) for found in roles.values()}) > 1:
        return f"{len(roles)} modules, {sum(len(found) for found in roles.values())} GEMMs"
    if not repeated:
        return f"{_count(len(single), 'linear')} x {_count(each, 'role')}"
    layers = f"{next(iter(repeated.values()))} layers x {_count(len(repeated), 'linear')}"
    if not single:
        return f"{layers} x {_count(each, 'role')}"
    more = single[0] if len(single) == 1 else f"{len(single)} more"
    return f"({layers} and {more}) x {_count(each, 'role')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _places(rows: Sequence[VerdictRow]) -> str:
    """`layers.*.mlp.fc2 (dgrad, wgrad: bf16 x bf16)` and how many more."""
    grouped: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for row in rows:
        roles, modules = grouped.setdefault((operation(row.module), row.ran), ([], []))
        roles.append(row.role)
        modules.append(row.module)
    texts = [
        f"{modules[0] if len(set(modules)) == 1 else name} ({in_order(roles)}: {ran})"
        for (name, ran), (roles, modules) in grouped.items()
    ]
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more
