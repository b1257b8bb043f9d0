"""The GEMMs that the live model really runs, from the calls that were seen in one step.

`GemmLog` collects calls into Transformer Engine's entries and PyTorch's own matrix products, finds the linear layer
that each belongs to, and turns them into `Gemm` facts (the shapes) and `Dispatch` facts (what reached the library).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lowprec_callback.engines.base import LinearLayer, Region, Weight
from lowprec_callback.measure.dispatch import AtenProduct, Call, Sizes
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recording import ROLES, Dispatch, Gemm, Operand, Product, Role

_ROLE_ORDER = {role: index for index, role in enumerate(ROLES)}


@dataclass(frozen=True)
class _Seen:
    """One GEMM of one linear layer, with everything that tells two such calls apart."""

    module: str
    role: Role
    m: int
    k: int
    n: int
    family: str
    quantizable: bool
    layout: str
    first: Operand
    second: Operand
    output: str
    accumulate: bool
    bias: bool
    groups: int
    entry: str
    region: Region
    recomputed: bool

    def shape_key(self) -> tuple[str, int, int, int, int]:
        """What a `Gemm` fact is counted by."""
        return (self.module, _ROLE_ORDER[self.role], self.m, self.k, self.n)


class GemmLog:
    """Collects calls from any thread; read it when the step is over.

    Args:
        layers: the model's linear layers.
        region: gives the quantized region of a module's last forward; asked at each call, because a later forward
            (of a checkpoint that recomputes, of a shared module) may find another.
    """

    def __init__(self, layers: list[LinearLayer], region: Callable[[str], Region] = lambda _path: Region()) -> None:
        self._layers = {layer.path: layer for layer in layers}
        self._region = region
        self._lock = threading.Lock()
        self._seen: list[_Seen] = []
        self._strays: Counter[AtenProduct] = Counter()

    def add_call(self, call: Call) -> None:
        """A call into Transformer Engine."""
        path = call.scope.module if call.scope else ""
        found = self._find(path, call.k, call.n)
        layer, weight = found if found else (None, None)
        with self._lock:
            self._seen.append(
                _Seen(
                    module=(layer.path + weight.suffix) if layer and weight else (path or "(unknown module)"),
                    role=call.role,
                    m=call.m,
                    k=call.k,
                    n=call.n,
                    family=layer.family if layer else "unknown",
                    quantizable=True,
                    layout=call.layout,
                    first=call.first,
                    second=call.second,
                    output=call.output,
                    accumulate=call.accumulate,
                    bias=call.bias or bool(layer and layer.bias),
                    groups=call.groups,
                    entry=call.entry,
                    region=self._region(layer.path if layer else path),
                    recomputed=call.recomputed,
                )
            )

    def add_product(self, product: AtenProduct) -> None:
        """A matrix product of PyTorch's own."""
        place = self.place_of(product)
        if place is None:
            with self._lock:
                self._strays[product] += 1
            return
        layer, role, (m, k, n) = place
        operands = [Operand("Tensor", element, "none") for element in (product.first, product.second)]
        with self._lock:
            self._seen.append(
                _Seen(
                    module=layer.path,
                    role=role,
                    m=m,
                    k=k,
                    n=n,
                    family=layer.family,
                    quantizable=layer.quantizable,
                    layout="",
                    first=operands[1] if role == "dgrad" else operands[0],
                    second=operands[0] if role == "dgrad" else operands[1],
                    output="",
                    accumulate=False,
                    bias=layer.bias,
                    groups=1,
                    entry=product.op,
                    region=Region(),
                    recomputed=False,
                )
            )

    def place_of(self, product: AtenProduct) -> tuple[LinearLayer, Role, tuple[int, int, int]] | None:
        """The linear layer that a product belongs to, which of its GEMMs it is, and M, K, N; None if there is none."""
        layer = self._layers.get(product.scope.module) if product.scope else None
        role = role_of(product, layer.weights[0]) if layer else None
        if layer is None or role is None:
            return None
        k, n = layer.weights[0].k, layer.weights[0].n
        outer = product.columns if role == "dgrad" and product.columns != k else product.rows
        return layer, role, (product.inner if role == "wgrad" else outer, k, n)

    def module_of(self, scope: Scope | None, sizes: Sizes) -> str:
        """The path of the linear layer that a call of these sizes belongs to, as `Gemm.module` names it."""
        path = scope.module if scope else ""
        found = self._find(path, sizes[1], sizes[2]) if sizes else None
        return found[0].path + found[1].suffix if found else path

    def _find(self, path: str, k: int, n: int) -> tuple[LinearLayer, Weight] | None:
        """The layer at `path`, or below it (operators fused by te.ops), that owns a weight of K x N."""
        exact = self._layers.get(path)
        candidates = [exact] if exact else [v for p, v in self._layers.items() if p.startswith(f"{path}.")]
        for layer in candidates:
            for weight in layer.weights:
                if (weight.k, weight.n) == (k, n):
                    return layer, weight
        # A sharded or concatenated weight: the module is right even if its feature counts are not these.
        return (exact, exact.weights[0]) if exact and len(exact.weights) == 1 else None

    @property
    def calls(self) -> int:
        """Linear-layer GEMM calls so far, Transformer Engine's and PyTorch's: what the trace must show again."""
        return len(self._seen)

    def products(self, recipe: str) -> list[Product]:
        """The matrix products that belong to no linear layer, equal ones counted together."""
        return [
            Product(
                recipe=recipe,
                module=product.scope.module if product.scope else "",
                op=product.op,
                direction=product.scope.direction if product.scope else "",
                batch=product.batch,
                rows=product.rows,
                inner=product.inner,
                columns=product.columns,
                formats=(product.first, product.second),
                calls=calls,
            )
            for product, calls in self._strays.items()
        ]

    def gemms(self) -> list[Gemm]:
        """The shapes of one step, with their number of calls, in the order of first appearance of their module."""
        counts = Counter(seen.shape_key() for seen in self._seen)
        first = {seen.shape_key(): seen for seen in reversed(self._seen)}
        order = {module: i for i, module in enumerate(dict.fromkeys(seen.module for seen in self._seen))}
        return [
            Gemm(
                module=seen.module,
                role=seen.role,
                m=seen.m,
                k=seen.k,
                n=seen.n,
                calls=counts[key],
                family=seen.family,
                quantizable=seen.quantizable,
                bias=seen.bias,
                groups=seen.groups,
            )
            for key, seen in sorted(first.items(), key=lambda item: (order[item[1].module], item[0][1:]))
        ]

    def dispatches(self, recipe: str) -> list[Dispatch]:
        """What reached the library, equal calls counted together."""
        counts: dict[str, tuple[_Seen, int]] = {}
        for seen in self._seen:
            key = repr(seen)
            counts[key] = (seen, counts.get(key, (seen, 0))[1] + 1)
        return [
            Dispatch(
                recipe=recipe,
                module=seen.module,
                role=seen.role,
                m=seen.m,
                k=seen.k,
                n=seen.n,
                calls=calls,
                layout=seen.layout,
                weight_or_input=seen.first,
                other=seen.second,
                output=seen.output,
                accumulate=seen.accumulate,
                entry=seen.entry,
                family=seen.family,
                in_region=seen.region.active,
                other_recipe=seen.region.other,
                stale_recipe=seen.region.stale,
                recomputed=seen.recomputed,
            )
            for seen, calls in counts.values()
        ]


def role_of(product: AtenProduct, weight: Weight) -> Role | None:
    """Which of a linear layer's three GEMMs a product is, by its sizes; None if it is none of them.

    In forward, (M x K)(K x N). In backward, wgrad is dY^T X, (N x M)(M x K), or its transpose; dgrad is dY W,
    (M x N)(N x K), or its transpose where the input was a transposed view. If M happens to equal N the sizes of
    dgrad and wgrad are the same, and the transposed first operand tells wgrad.
    """
    if product.scope is None or product.batch != 1:
        return None
    k, n = weight.k, weight.n
    if product.scope.direction == "forward":
        return "fprop" if (product.inner, product.columns) == (k, n) else None
    looks_dgrad = product.inner == n and k in (product.rows, product.columns)
    looks_wgrad = {product.rows, product.columns} == {k, n}
    if looks_dgrad and looks_wgrad:
        return "wgrad" if product.columns == k and product.first_transposed else "dgrad"
    if looks_dgrad:
        return "dgrad"
    return "wgrad" if looks_wgrad else None
