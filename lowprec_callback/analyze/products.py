"""The matrix products of a step that belong to no linear layer: attention's, mostly."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lowprec_callback.analyze.gemms import operation
from lowprec_callback.recording import Gemm, Product


def product_flops(product: Product) -> float:
    """2 batch rows inner columns calls [FLOP]."""
    return 2.0 * product.batch * product.rows * product.inner * product.columns * product.calls


def beside(products: Iterable[tuple[int, Product]], gemms: Iterable[Gemm]) -> tuple[str, ...]:
    """A sentence for each kind of place and format, with its share of all of the step's matrix products.

    `gemms` are the linear layers' GEMMs of one step. A fused attention kernel multiplies too, but makes no product
    that could be seen here.
    """
    linear = math.fsum(2.0 * gemm.m * gemm.k * gemm.n * gemm.calls for gemm in gemms)
    found: dict[tuple[str, str, str], list[Product]] = {}
    for _, product in products:
        where = operation(product.module) if product.module else "no module that was followed"
        found.setdefault((where, product.op, " x ".join(product.formats)), []).append(product)
    total = linear + math.fsum(product_flops(each) for group in found.values() for each in group)
    sized = [(math.fsum(product_flops(each) for each in group), key, group) for key, group in found.items()]
    return tuple(
        f"{where}: {sum(each.calls for each in group)} calls of {op} a step in {formats}, "
        f"{size / total if total else 0.0:.1%} of the FLOPs of all products; no recipe reaches them"
        for size, (where, op, formats), group in sorted(sized, key=lambda item: (-item[0], item[1]))
    )
