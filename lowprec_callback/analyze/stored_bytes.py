"""What operands hold in memory, as they reached their GEMMs (`Operand.stored`), module by module and role by role.

Bytes of data a value are exact: 2 in BF16, 1 in FP8, 0.5 in FP4, whatever the class of the operand is called. So they
can contradict what the class says, and what was asked; scales come on top and are only told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowprec_callback.analyze.memory_model import WIDTHS, Layer, total
from lowprec_callback.analyze.witnesses import Place
from lowprec_callback.recording import Dispatch, Gemm, Operand, Stored


@dataclass(frozen=True)
class StoredSight:
    """What the operands of one module and role hold."""

    text: str
    """`weight 1.125, input 0.562 B a value`: all copies and scales."""
    misfit: str | None = None
    """If an operand's data are not those of the format that its class names: a sentence."""


def stored_witness(dispatches: Iterable[Dispatch], gemms: Iterable[Gemm]) -> dict[Place, StoredSight]:
    """By module and role, what the operands hold, where that was read.

    Features (K, N) are those of the capture: an operand's own shape is read from the very bytes that are in question.
    """
    sizes = features(gemms)
    found: dict[Place, list[StoredSight]] = {}
    for dispatch in dispatches:
        texts, misfits = [], []
        for name, operand, values in _operands(dispatch, sizes):
            if operand.stored is None or not values:  # of an empty batch nothing can be said
                continue
            texts.append(f"{name} {total(operand.stored) / values:.3f}")
            width = WIDTHS.get(operand.format)
            odd = next((each for each in data_widths(operand.stored, values) if width and not close(each, width)), None)
            if odd is not None:
                held = f"{operand.format} by its class, but it holds {odd:g} B of data a value, not {width:g}"
                misfits.append(f"{dispatch.module} {dispatch.role}: the {name} is {held}")
        if texts:
            sight = StoredSight(f"{', '.join(texts)} B a value", misfits[0] if misfits else None)
            found.setdefault((dispatch.module, dispatch.role), []).append(sight)
    return {
        place: StoredSight(
            " or ".join(dict.fromkeys(sight.text for sight in sights)),
            next((sight.misfit for sight in sights if sight.misfit), None),
        )
        for place, sights in found.items()
    }


def features(gemms: Iterable[Gemm]) -> dict[str, tuple[int, int, int]]:
    """(K, N, groups) of each captured module; one that has several is left out."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for gemm in gemms:
        found.setdefault(gemm.module, set()).add((gemm.k, gemm.n, gemm.groups))
    return {module: next(iter(sizes)) for module, sizes in found.items() if len(sizes) == 1}


def _operands(dispatch: Dispatch, sizes: Mapping[str, tuple[int, int, int]]) -> list[tuple[str, Operand, int]]:
    """(name, operand, number of values) of both."""
    k, n, groups = sizes.get(dispatch.module, (dispatch.k, dispatch.n, 1))
    first, second, m = dispatch.weight_or_input, dispatch.other, dispatch.m
    if dispatch.role == "fprop":
        return [("weight", first, groups * n * k), ("input", second, m * k)]
    if dispatch.role == "dgrad":
        return [("weight", first, groups * n * k), ("gradient", second, m * n)]
    return [("input", first, m * k), ("gradient", second, m * n)]


def data_widths(stored: Stored, values: int) -> list[float]:
    """Bytes of data a value, of each copy that there is."""
    return [copy / values for copy in (stored.rowwise, stored.columnwise) if copy and values]


def close(one: float, other: float) -> bool:
    """Whether two widths are the same; a group's rows that are padded up to the next tile are."""
    return abs(one - other) <= 0.1 * other


def weight_copies(
    dispatches: Sequence[tuple[int, Dispatch]], layers: Sequence[Layer], micro_batches: int
) -> dict[str, int] | None:
    """Measured bytes of the copies of each layer's weight in one micro-batch, the parameter itself apart (as read in
    fprop); None where a layer's was not read."""
    wanted = {layer.module for layer in layers}
    found: dict[str, int] = {}
    for _, fact in dispatches:
        weight = fact.weight_or_input.stored
        # A forward pass that is run again in backward makes its copies again: they are not there twice.
        if fact.module in wanted and fact.role == "fprop" and weight is not None and not fact.recomputed:
            found[fact.module] = found.get(fact.module, 0) + fact.calls * total(weight) * (not weight.parameter)
    if not wanted or found.keys() < wanted:
        return None
    return {module: size // max(micro_batches, 1) for module, size in found.items()}


def saved_inputs(
    dispatches: Sequence[tuple[int, Dispatch]], layers: Sequence[Layer], micro_batches: int
) -> dict[str, int] | None:
    """Measured bytes of each layer's input that is saved for wgrad, in one micro-batch; None where one was not read.

    The smaller of what fprop got and what wgrad got: one copy may be dropped between the two, or made only then. An
    input that two layers share counts for each.
    """
    saving = {layer.module for layer in layers if layer.wgrad}
    found: dict[str, list[int]] = {}
    for _, fact in dispatches:
        saved = {"fprop": fact.other, "wgrad": fact.weight_or_input}.get(fact.role)
        if fact.module in saving and saved is not None and saved.stored is not None:
            both = found.setdefault(fact.module, [0, 0])
            both[fact.role == "wgrad"] += fact.calls * total(saved.stored)
    if not saving or any(not all(found.get(module, (0, 0))) for module in saving):
        return None
    return {module: min(both) // max(micro_batches, 1) for module, both in found.items()}


def held_sums(
    dispatches: Sequence[tuple[int, Dispatch]], layers: Sequence[Layer], micro_batches: int
) -> tuple[int | None, int | None]:
    """Measured bytes of (weights' copies, saved inputs) in one micro-batch; None where an operand was not read.

    A weight is read in fprop. A saved input is the smaller of what fprop got and what wgrad got: one copy may be
    dropped between the two, or made only then.
    """
    wanted = {layer.module: layer for layer in layers}
    weights: dict[str, int] = {}
    inputs: dict[str, list[int]] = {}
    for _, fact in dispatches:
        if fact.module not in wanted:
            continue
        weight = fact.weight_or_input.stored
        if fact.role == "fprop" and weight is not None:
            weights[fact.module] = weights.get(fact.module, 0) + fact.calls * total(weight) * (not weight.parameter)
        saved = {"fprop": fact.other, "wgrad": fact.weight_or_input}.get(fact.role)
        if saved is not None and saved.stored is not None:
            both = inputs.setdefault(fact.module, [0, 0])
            both[fact.role == "wgrad"] += fact.calls * total(saved.stored)
    saving = {module for module, layer in wanted.items() if layer.wgrad}
    known = [min(both) for module, both in inputs.items() if module in saving and all(both)]
    return (
        sum(weights.values()) // micro_batches if wanted and weights.keys() >= wanted.keys() else None,
        sum(known) // micro_batches if wanted and len(known) == len(saving) else None,
    )
