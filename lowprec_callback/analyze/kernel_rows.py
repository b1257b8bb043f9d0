"""Asked against ran from the GEMM kernels of a capture, which knows names and places but no shapes.

Without shapes there are no FLOPs, so there is no coverage: a row says how many kernels a step ran in what. A row is
`confirmed` only if every GEMM kernel there is of the precision (and, for FP8, of the operand formats) that the recipe
asks for. Where a capture marks the GEMM calls of linear layers, by ranges of Transformer Engine (TE) or of our own, a
GEMM kernel that was launched elsewhere is `outside`; in a capture without any marks, a wider kernel than asked for is
`unproven`, because it may be a layer that no recipe reaches. Attention's products are not counted.

Kernels must balance with calls here too: a marked call that the capture holds no kernel of is `unproven`, and so is
what a step lacks of the kernels that another step of the same recipe has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowprec_callback.analyze.balance import Kind, fits
from lowprec_callback.analyze.gemm_libraries import is_amd
from lowprec_callback.analyze.kernels import bucket_in_context, classify
from lowprec_callback.analyze.precision import UNKNOWN, Operands, shown
from lowprec_callback.analyze.verdict import other_kind
from lowprec_callback.recording import Card, GemmKernels, Imported, Role, direction_of
from lowprec_callback.report import Figure, KernelRow, Verdict, VerdictWord

SHARE = "share"
NO_SHAPES = "a capture holds no GEMM shapes, so shares of FLOPs are not known"


@dataclass
class _Group:
    """Kernels of one place and one kind of operands."""

    module: str
    where: str
    """A role, or the direction where the role is not known; empty where neither is."""
    library: bool
    kind: Kind
    count: int = 0
    us: float = 0.0


def kernel_verdict(
    facts: Sequence[tuple[int, GemmKernels]], card: Card, imported: Imported | None, override: str | None
) -> Verdict:
    """Rows by place, and one sentence; see the module's docstring for the words."""
    groups = _groups(facts)
    steps = sum(fact.steps for _, fact in facts)
    marked = any(group.library for group in groups)
    rows = [_row(group, card, steps, marked, override) for group in groups]
    rows += _unseen([fact for _, fact in facts], card, steps)
    missing = Figure.missing(SHARE, NO_SHAPES)
    inferred = imported is not None and imported.recipe_from == "kernels"
    return Verdict(
        coverage=missing,
        te_coverage=missing,
        rows=(),
        summary=_summary(rows, card, marked, imported.why_recipe if imported and inferred else None) + _amd(facts),
        kernels=tuple(rows),
    )


def _groups(facts: Sequence[tuple[int, GemmKernels]]) -> list[_Group]:
    found: dict[tuple[object, ...], _Group] = {}
    for _, fact in facts:
        for i in range(len(fact.name)):
            name = fact.names[fact.name[i]]
            module, role, op, phase = (
                fact.labels[column[i]] for column in (fact.module, fact.role, fact.op, fact.phase)
            )
            kernel = classify(name)
            bucket = bucket_in_context(name, op=op, module=module, role=role, phase=phase)
            if bucket != "gemm" or kernel.convolution:
                continue
            kind = Kind.named(kernel.precision, kernel.operands)
            key = (module, role or phase, fact.library[i], kind)
            group = found.setdefault(key, _Group(module, role or phase, fact.library[i], kind))
            group.count += fact.count[i]
            group.us += fact.total_us[i]
    return list(found.values())


def _unseen(facts: Sequence[GemmKernels], card: Card, steps: int) -> list[KernelRow]:
    """A row for the GEMM calls that the capture holds no kernel of, if there are any."""
    silent = sum(fact.silent_calls for fact in facts)
    why = "the capture marks these GEMM calls, and holds no kernel of theirs"
    if not silent and all(fact.calls is None for fact in facts):
        most = max((fact.most for fact in facts if fact.most is not None), default=0)
        silent = sum(max(0, most * fact.steps - _linear_kernels(fact)) for fact in facts if fact.most is not None)
        why = f"a step of this recipe has {most} GEMM kernels, and others have fewer: the capture has lost them"
    if not silent:
        return []
    asked = " or ".join(dict.fromkeys(str(operands) for operands in _asked(card, "")))
    return [KernelRow("", "", asked, UNKNOWN, "unproven", why, silent / max(steps, 1), 0.0)]


def _linear_kernels(fact: GemmKernels) -> int:
    return sum(group.count for group in _groups([(0, fact)]))


def _row(group: _Group, card: Card, steps: int, marked: bool, override: str | None) -> KernelRow:
    asked = _asked(card, group.where)
    word, why = _judge(group, asked, marked, override)
    return KernelRow(
        module=group.module,
        where=group.where,
        asked=" or ".join(dict.fromkeys(str(operands) for operands in asked)),
        ran=str(group.kind),
        verdict=word,
        why=why,
        kernels=group.count / max(steps, 1),
        ms=group.us / 1e3 / max(steps, 1),
    )


def _asked(card: Card, where: str) -> list[Operands]:
    """What the recipe asks for there: of each role that it may be."""
    possible: dict[str, tuple[Role, ...]] = {
        "fprop": ("fprop",),
        "dgrad": ("dgrad",),
        "wgrad": ("wgrad",),
        "forward": ("fprop",),
        "backward": ("dgrad", "wgrad"),
    }
    return [Operands.asked(card, role) for role in possible.get(where, ("fprop", "dgrad", "wgrad"))]


def _judge(group: _Group, asked: Sequence[Operands], marked: bool, override: str | None) -> tuple[VerdictWord, str]:
    if marked and not group.library:
        return "outside", "launched outside of the GEMM calls that Transformer Engine or our ranges mark"
    if not group.kind.known:
        return "unproven", "its kernels' names tell no precision"
    if any(fits(operands, group.kind) for operands in asked):
        fp8 = group.kind.precision == "fp8"
        return "confirmed", "a kernel's name does not tell delayed from current scaling" if fp8 else ""
    narrow = any(operands.quantized for operands in asked)
    alike = any(operands.precision == group.kind.precision for operands in asked)
    emulated = group.kind.precision == "mxfp8" and any(operands.precision == "fp8-block" for operands in asked)
    if not marked and narrow and not alike and not emulated:
        return "unproven", "whether a recipe reaches this layer, a capture without ranges does not tell"
    role = "fprop" if group.where in ("fprop", "forward", "") else "wgrad"
    return other_kind(role, asked[0], group.kind, baseline=False, override=override)


def _summary(rows: Sequence[KernelRow], card: Card, marked: bool, inferred: str | None) -> str:
    asked = shown(Operands.asked(card, "fprop").precision)
    if not rows:
        return "What ran is not known: no GEMM kernel of a linear layer is in the capture."
    inside = [row for row in rows if row.verdict != "outside"]
    count = sum(row.kernels for row in inside)
    what = "linear-layer GEMM kernels" if marked else "GEMM kernels"
    good = [row for row in inside if row.verdict == "confirmed"]
    told = sum(row.kernels for row in good)
    if inside and len(good) == len(inside):
        text = f"By kernel names alone, all {count:.0f} {what} a step ran in {asked} ({_formats(good)})"
    else:
        text = f"By kernel names alone, {told:.0f} of {count:.0f} {what} a step ran in {asked}"
        others = [row for row in inside if row.verdict != "confirmed"]
        places = "; ".join(f"{_place(row)}: {row.ran}, {row.verdict.replace('_', ' ')}" for row in others[:3])
        text += f" ({places}{f'; and {len(others) - 3} more' if len(others) > 3 else ''})"
    outside = sum(row.kernels for row in rows if row.verdict == "outside")
    text += f"; {outside:.0f} more ran outside of these layers" if outside else ""
    backward = any(row.where in ("dgrad", "wgrad", "backward") for row in rows)
    if not backward and any(row.where for row in rows):
        text += "; no GEMM of a backward pass was seen"
    text += f". {NO_SHAPES[0].upper()}{NO_SHAPES[1:]}."
    if inferred:
        text += f" Nothing in the capture says what was asked for: {card.recipe} is inferred ({inferred})."
    return text


def _amd(facts: Sequence[tuple[int, GemmKernels]]) -> str:
    """What a reader of an AMD GPU's capture must know."""
    if not any(is_amd(name) for _, fact in facts for name in fact.names):
        return ""
    return " These are kernels of an AMD GPU: their types are read from their names, recipes are not known there."


def _place(row: KernelRow) -> str:
    return " ".join(part for part in (row.module or "unknown module", row.where) if part)


def _formats(rows: Sequence[KernelRow]) -> str:
    """`forward e4m3 x e4m3, backward e4m3 x e5m2`."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        way = direction_of(row.where) or row.where or "direction unknown"
        found.setdefault(way, {})[row.ran] = None
    return ", ".join(f"{way} {' and '.join(sorted(ran))}" for way, ran in sorted(found.items(), reverse=True))
