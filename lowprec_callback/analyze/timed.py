"""The product kernels of steps that ran as the timed ones did: from the facts to what `balance` weighs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowprec_callback.analyze.balance import LINEAR, Kind, ProductKernel, labelled
from lowprec_callback.analyze.kernels import bucket_in_context, classify
from lowprec_callback.analyze.precision import UNKNOWN, Operands
from lowprec_callback.analyze.traceview import TraceView
from lowprec_callback.analyze.witnesses import SignatureBook
from lowprec_callback.recording import GemmKernels, Product, StepProducts, direction_of

NOT_AS_TIMED = "no step was traced as the timed ones ran"
ON_A_CPU = "operators on a CPU do not tell a precision"
COMPILED = "its timed steps ran compiled, and no step was traced as they ran"


@dataclass(frozen=True)
class Timed:
    """What the kernel tracer saw of steps that ran as the timed ones."""

    steps: tuple[tuple[ProductKernel, ...], ...] = ()
    """The products of each step, in order of launch."""
    silence: str = ""
    """Why there is no such step."""
    compiled: tuple[str, ...] = ()
    """Modules that ran compiled in the timed steps: what operands said in an uncompiled step is no proof of those."""


def timed(
    facts: Iterable[StepProducts],
    views: Sequence[TraceView],
    book: SignatureBook,
    calls: int,
    *,
    on_cpu: bool = False,
    compiled: bool = False,
) -> Timed:
    """The evidence of the verdict.

    Args:
        facts: steps that were traced for it; a Recording of an older version has none.
        views: steps that were traced with ranges around modules and GEMMs.
        book: kernel names that the benchmark taught.
        calls: GEMM calls of linear layers in a step.
        on_cpu: then the views hold operators' own times, which are neither calls nor precisions.
        compiled: whether the timed steps ran compiled, where no fact of `facts` says so.
    """
    every = list(facts)
    ranged = [_of_fact(fact, book) for fact in every if fact.ranged]
    ranged += [] if on_cpu else [_of_view(view, book) for view in views]
    bare = [fact for fact in every if not fact.ranged]
    if not bare:
        if compiled:
            return Timed(silence=COMPILED)
        # Nothing was compiled, so ranges and hooks did not change what ran.
        silence = "" if ranged else ON_A_CPU if on_cpu and views else NOT_AS_TIMED
        return Timed(tuple(tuple(products) for products in ranged), silence)
    timed_steps = [_of_fact(fact, book) for fact in bare]
    # A step that holds fewer products than another one of this recipe has lost some, and nobody knows which.
    most = max(len(products) for products in (*timed_steps, *ranged))
    whole = [own for own in timed_steps if len(own) == most]
    if not whole:
        fewer = max(len(own) for own in timed_steps)
        lost = f"the steps traced as timed hold {fewer} GEMM kernels, and one traced with ranges holds {most}"
        return Timed(silence=lost, compiled=bare[0].compiled)
    steps = []
    for own in whole:
        found = (labelled(own, other, calls) for other in ranged)
        steps.append(tuple(next((products for products in found if products is not None), own)))
    return Timed(tuple(steps), compiled=bare[0].compiled)


def spare_products(facts: Iterable[Product]) -> Counter[str]:
    """How many products of each precision belong to no linear layer, in one step."""
    found: Counter[str] = Counter()
    for fact in facts:
        found[Operands(fact.formats, ("none", "none")).precision] += fact.calls
    return found


def flaw(fact: StepProducts | GemmKernels) -> str | None:
    """Why the fact cannot be read (unequal columns, an index out of range)."""
    labels, others = [fact.module, fact.role, fact.op, fact.phase], []
    if isinstance(fact, GemmKernels):
        others = [fact.library, fact.count, fact.total_us]
    else:
        labels.append(fact.formats)
    if any(len(column) != len(fact.name) for column in (*labels, *others)):
        return "its columns have unequal lengths"
    if any(not 0 <= index < len(fact.names) for index in fact.name):
        return "it points to a name that it does not hold"
    if any(not 0 <= index < len(fact.labels) for column in labels for index in column):
        return "it points to a label that it does not hold"
    return None


def _of_fact(fact: StepProducts, book: SignatureBook) -> list[ProductKernel]:
    rows = zip(fact.name, fact.module, fact.role, fact.op, fact.phase, fact.formats, strict=True)
    found = (_product(fact.names[name], *(fact.labels[label] for label in labels), book=book) for name, *labels in rows)
    return [product for product in found if product is not None]


def _of_view(view: TraceView, book: SignatureBook) -> list[ProductKernel]:
    made = [_product(g.name, g.module, g.role, g.op, g.phase, "", book=book) for g in view.groups]
    # By launch, where it is known: kernels of several streams may overtake each other, their launches do not.
    when = np.where(np.isnan(view.host.launch_ms), view.start_ms, view.host.launch_ms)
    found = (made[view.group[row]] for row in np.argsort(when, kind="stable"))
    return [product for product in found if product is not None]


def _product(
    name: str, module: str, role: str, op: str, phase: str, formats: str, *, book: SignatureBook
) -> ProductKernel | None:
    """The kernel as a product; None if it is none, or a convolution's."""
    kernel = classify(name)
    if not (kernel.is_product or formats or (kernel.bucket == "other" and book.knows(name))):
        return None
    bucket = bucket_in_context(name, op=op, module=module, role=role, phase=phase)
    kind, learned = Kind.named(kernel.precision, kernel.operands), False
    if formats:
        first, _, second = formats.partition(" x ")
        kind = Kind.of(Operands((first, second), ("none", "none")))
    elif not kind.known and kind.formats is None and (precision := book.precision(name)) != UNKNOWN:
        kind, learned = Kind(precision), True
    direction = direction_of(role) or (phase if phase in ("forward", "backward") else "")
    return ProductKernel(kind, module, role, direction, LINEAR if bucket == "other" else bucket, learned)
