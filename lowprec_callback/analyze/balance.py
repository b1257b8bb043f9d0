"""Do the GEMM kernels of a timed step balance with the GEMM calls that the model makes?

The verdict is about the timed steps, so its evidence is the kernels of a step that ran exactly as they did. Each GEMM
call of a linear layer launches one product kernel. Calls and kernels are matched at the finest label that a kernel
bears, and what is left goes on to the next:

| a kernel that bears    | is matched with the calls of           | such as                                      |
|------------------------|----------------------------------------|----------------------------------------------|
| module and role        | this module in this role               | TE's GEMMs, by ranges around each            |
| module and direction   | this module, forward or backward       | an `nn.Linear`                               |
| a direction            | all modules, forward or backward       | compiled code                                |
| nothing                | all modules                            | a capture without ranges                     |

A pool of calls that share a label is proven as a whole if every call has a kernel of the formats that the recipe asks
for, and no other kernel is left over. A pool of one GEMM can be proven in part: each kernel is one of its calls. In all
other pools nobody knows whose kernels they are, so nothing is proven.

Kernels of the step as timed bear no module. They get the labels of a step that was traced with ranges, if both
launched products of the same formats in the same order, and at least as many as there are calls: then the n-th product
of one is the n-th of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lowprec_callback.analyze.precision import BITS, UNKNOWN, Operands, kernel_fits
from lowprec_callback.recording import Role, direction_of

LINEAR = "gemm"
"""The bucket of a linear layer's product; attention's and the optimizer's are in theirs."""


class Kind(NamedTuple):
    """What a product kernel multiplied, as far as its name tells."""

    precision: str
    """`fp8`, `bf16`, ..., a mixture (`e4m3 x e2m1`), or `unknown`."""
    formats: tuple[str, str] | None = None
    """Sorted. None where the name does not tell."""

    @staticmethod
    def named(precision: str, operands: tuple[str, ...] | None) -> Kind:
        """As a kernel's name tells it; the order of the operands does not count."""
        if operands is None or len(operands) != 2:
            return Kind(precision)
        first, second = sorted(operands)
        return Kind(precision, (first, second))

    @staticmethod
    def of(operands: Operands) -> Kind:
        """The kind of kernel that multiplies these operands."""
        return Kind.named(operands.precision, operands.formats)

    @property
    def known(self) -> bool:
        """Whether the precision is known."""
        return self.precision != UNKNOWN

    def __str__(self) -> str:
        if self.formats is None or self.precision == UNKNOWN or self.precision == self.formats[0]:
            return self.precision
        product = " x ".join(self.formats)
        if " x " in self.precision:
            return self.precision
        return product if self.precision == "fp8" else f"{product}, {self.precision}"


class ProductKernel(NamedTuple):
    """One product kernel of a step."""

    kind: Kind
    module: str = ""
    role: str = ""
    direction: str = ""
    """forward, backward, or empty where it is not known."""
    bucket: str = LINEAR
    learned: bool = False
    """Whether the benchmark alone tells the precision of this name."""


@dataclass(frozen=True)
class Demand:
    """One GEMM of the model, and how often a step calls it."""

    module: str
    role: Role
    calls: int
    asked: Operands
    reachable: bool = True
    """Whether the recipe can reach it; else it multiplies in a type of its own, which is not judged."""
    parent: str = ""
    """The label that its kernels may bear instead of the module's: LayerNormMLP's, of its `.fc1` and `.fc2`."""
    recomputed: int = 0
    """Calls of an fprop that run in the backward pass, because a checkpoint recomputes them."""
    groups: int = 1
    """A grouped call may launch one kernel for each of its groups."""
    software: bool = False
    """Whether Python code multiplies, by as many products as it likes."""


@dataclass
class Balance:
    """What the kernels prove of one GEMM's calls."""

    calls: int
    """As many as were captured, or as have kernels under its own label, if that is more."""
    proven: int = 0
    """Calls that have a kernel of the formats asked for."""
    tf32: bool = False
    """Whether FP32 was multiplied in TF32."""
    learned: int = 0
    """Of these: calls whose kernels' names only the benchmark explains."""
    others: Counter[Kind] = field(default_factory=Counter)
    """Calls that have a kernel of another kind."""
    why: str = ""
    """Why the other calls are not proven."""

    @property
    def unseen(self) -> int:
        """Calls that no kernel was found for."""
        return self.calls - self.proven - self.others.total()


@dataclass(frozen=True)
class Balanced:
    """All GEMMs of a step against all its products."""

    rows: Sequence[Balance]
    strays: Counter[Kind]
    """Products of no GEMM that is known. Those that the recipe asks for count only where they could be a known GEMM's,
    for a layer that was not captured and ran as asked makes the confirmed share larger, not smaller."""


def fits(asked: Operands, kind: Kind) -> bool:
    """Whether a kernel of this kind can have multiplied what was asked for. TF32 multiplies FP32."""
    if not kernel_fits(asked, kind.precision):
        return False
    return kind.formats is None or kind.precision == "tf32" or tuple(sorted(asked.formats)) == kind.formats


def balance(
    demands: Sequence[Demand], products: Sequence[ProductKernel], spare: Mapping[str, int] | None = None
) -> Balanced:
    """Match calls with kernels, from the finest label to none.

    Args:
        demands: every GEMM of one step.
        products: the product kernels of one step.
        spare: products that belong to no linear layer, as a step showed them: how many of each precision.
    """
    rows = [Balance(demand.calls) for demand in demands]
    left = [_Left(demand) for demand in demands]
    pools: dict[tuple[str, str, str], list[ProductKernel]] = {}
    for product in products:
        if product.bucket == LINEAR:
            key = (product.module, product.role if product.module else "", product.direction)
            pools.setdefault(key if not key[1] else (key[0], key[1], ""), []).append(product)
    strays: list[ProductKernel] = []
    for key in sorted(pools, key=_fineness):
        members = [i for i, demand in enumerate(demands) if left[i].of(key[2]) and _shares(demand, key)]
        strays += _settle(key, pools[key], members, demands, rows, left)
    over = Counter(product.kind for product in strays)
    # Products of attention that were told apart by their place are no strays, and excuse none.
    spared = Counter(spare or {})
    spared.subtract(product.kind.precision for product in products if product.bucket not in (LINEAR, "optimizer"))
    spared = +spared
    for kind in list(over):
        taken = min(over[kind], spared[kind.precision])
        over[kind] -= taken
        spared[kind.precision] -= taken
    over = +over
    for row, demand in zip(rows, demands, strict=True):
        if row.unseen and not row.why:
            row.why = f"no kernel was found for {_of(row.unseen, demand.calls)}"
    return Balanced(rows, over)


class _Left:
    """Calls of one GEMM that have no kernel yet, by direction."""

    def __init__(self, demand: Demand) -> None:
        first = direction_of(demand.role)
        again = min(demand.recomputed, demand.calls) if first == "forward" else 0
        self.by = Counter({first: demand.calls - again, "backward": again} if again else {first: demand.calls})

    def of(self, direction: str) -> int:
        return self.by[direction] if direction else self.by.total()

    def take(self, count: int, direction: str) -> None:
        for where in [direction] if direction else list(self.by):
            taken = min(count, self.by[where])
            self.by[where] -= taken
            count -= taken


def _fineness(key: tuple[str, str, str]) -> tuple[int, tuple[str, str, str]]:
    module, role, direction = key
    return (0 if module and role else 1 if module and direction else 2 if module else 3 if direction else 4, key)


def _shares(demand: Demand, key: tuple[str, str, str]) -> bool:
    """Whether kernels with this label can be this GEMM's."""
    module, role, _ = key
    if role and role != demand.role:
        return False
    return not module or module in (demand.module, demand.parent)


def _settle(
    key: tuple[str, str, str],
    products: Sequence[ProductKernel],
    members: Sequence[int],
    demands: Sequence[Demand],
    rows: Sequence[Balance],
    left: Sequence[_Left],
) -> list[ProductKernel]:
    """One pool: give its kernels to its GEMMs' calls if they balance. Returns the kernels that are nobody's."""
    direction = key[2]
    inside = [i for i in members if demands[i].reachable]
    outside = [i for i in members if not demands[i].reachable]
    if not members:
        # A layer that nobody captured: what it ran in is as asked if it is what others are asked for in this role.
        way = direction_of(key[1]) or key[2]
        asked_for = {
            demand.asked
            for demand in demands
            if demand.reachable and way in ("", direction_of(demand.role)) and key[1] in ("", demand.role)
        }
        enough = any if way else all
        return [product for product in products if not enough(fits(asked, product.kind) for asked in asked_for)]
    due = {i: left[i].of(direction) for i in members}
    kinds = Counter(product.kind for product in products)
    learned = {product.kind for product in products if product.learned}
    own = key[0] and key[0] == demands[members[0]].module
    if len(inside) == 1 and not outside and (own or len(products) <= due[inside[0]]):
        return _settle_one(inside[0], kinds, learned, direction, demands, rows, left)

    asked = {demands[i].asked for i in inside}
    good = {operands: _fitting(kinds, [operands]).total() for operands in asked}
    want = {operands: sum(due[i] for i in inside if demands[i].asked == operands) for operands in asked}
    others = kinds - _fitting(kinds, asked)
    wide_due = sum(due[i] for i in outside)
    # Two roles may ask for the same formats, or for formats that a name does not tell apart: then they share kernels.
    classes = _classes(asked, kinds)
    balanced = all(_fitting(kinds, group).total() == sum(want[each] for each in group) for group in classes)
    known = all(kind.known for kind in others)
    # Without a direction, an fprop in the backward pass's formats and a dgrad in the forward pass's would balance.
    told_apart = len(classes) < 2 or bool(direction or key[1])
    if balanced and told_apart and known and others.total() <= wide_due:
        for i in inside:
            rows[i].proven += due[i]
            rows[i].tf32 |= _in_tf32(demands[i].asked, kinds)
            rows[i].learned += due[i] if any(fits(demands[i].asked, kind) for kind in learned) else 0
            left[i].take(due[i], direction)
        for i in outside:
            taken = min(due[i], others.total())
            _give(rows[i], others, taken)
            left[i].take(due[i], direction)
        return []
    if inside and not any(good.values()) and known and others.total() >= sum(due.values()):
        # Not one kernel of the formats asked for, and enough of others for every call.
        surplus = others.total() - sum(due.values())
        kind = max(others, key=lambda k: (others[k], str(k)))
        for i in members:
            rows[i].others[kind] += due[i]
            left[i].take(due[i], direction)
        return [product for product in products if product.kind == kind][:surplus]
    if not inside:
        for i in outside:
            taken = min(due[i], others.total())
            _give(rows[i], others, taken)
            left[i].take(taken, direction)
        return [ProductKernel(kind) for kind, n in others.items() for _ in range(n)]
    why = _unbalanced(key, want, good, others, wide_due)
    for i in inside:
        rows[i].why = rows[i].why or why
        left[i].take(due[i], direction)
    for i in outside:
        left[i].take(due[i], direction)
    # More kernels than calls: some are of layers that nobody captured, and which ones is not known.
    excess = max(0, len(products) - sum(due.values()))
    return sorted(products, key=lambda product: any(fits(operands, product.kind) for operands in asked))[:excess]


def _settle_one(
    i: int,
    kinds: Counter[Kind],
    learned: set[Kind],
    direction: str,
    demands: Sequence[Demand],
    rows: Sequence[Balance],
    left: Sequence[_Left],
) -> list[ProductKernel]:
    """A pool of one GEMM: each kernel is one of its calls."""
    demand, due = demands[i], left[i].of(direction)
    good = _fitting(kinds, [demand.asked]).total()
    others = kinds - _fitting(kinds, [demand.asked])
    total = good + others.total()
    if demand.groups > 1:
        return _settle_grouped(i, good, others, due, demand, rows, left)
    if demand.software and total > due:
        # Its products are no calls; they tell what its calls multiplied in.
        others = Counter(dict.fromkeys(sorted(others, key=_width)[-1:], due))
        good = 0 if others else due
    elif total > due:
        # It is called more often than the capture saw.
        rows[i].calls += total - due
    rows[i].proven += good
    rows[i].tf32 |= _in_tf32(demand.asked, kinds)
    rows[i].learned += good if any(fits(demand.asked, kind) for kind in learned) else 0
    rows[i].others += others
    left[i].take(min(total, due), direction)
    return []


def _settle_grouped(
    i: int,
    good: int,
    others: Counter[Kind],
    due: int,
    demand: Demand,
    rows: Sequence[Balance],
    left: Sequence[_Left],
) -> list[ProductKernel]:
    """A grouped call launches one kernel, or one for each of its groups: whole, or nothing is proven."""
    total = good + others.total()
    if total not in (due, due * demand.groups):
        rows[i].why = f"{total} kernels for {due} grouped calls of {demand.groups} GEMMs"
    elif not others:
        rows[i].proven += due
    elif not good:
        rows[i].others[max(others, key=_width)] += due
    else:
        rows[i].why = f"of the {total} kernels of its grouped calls, {_counts(others)}"
    left[i].take(due, "")
    return []


def _width(kind: Kind) -> tuple[int, str]:
    return BITS.get(kind.precision, 0), str(kind)


def _in_tf32(asked: Operands, kinds: Iterable[Kind]) -> bool:
    return any(kind.precision == "tf32" and fits(asked, kind) for kind in kinds)


def _fitting(kinds: Counter[Kind], asked: Iterable[Operands]) -> Counter[Kind]:
    """Those that can have multiplied any of what was asked for."""
    wanted = list(asked)
    return Counter({kind: n for kind, n in kinds.items() if any(fits(operands, kind) for operands in wanted)})


def _classes(asked: Iterable[Operands], kinds: Iterable[Kind]) -> list[list[Operands]]:
    """What is asked for, in groups that share no kind of kernel."""
    groups: list[tuple[list[Operands], set[Kind]]] = []
    every = list(kinds)
    for operands in sorted(asked, key=str):
        fitting = {kind for kind in every if fits(operands, kind)}
        joined = [group for group in groups if group[1] & fitting]
        groups = [group for group in groups if not group[1] & fitting]
        merged = [operands, *(other for group in joined for other in group[0])]
        groups.append((merged, fitting.union(*(group[1] for group in joined))))
    return [group for group, _ in groups]


def _give(row: Balance, kinds: Counter[Kind], count: int) -> None:
    for kind in sorted(kinds, key=str):
        taken = min(count, kinds[kind])
        if taken:
            row.others[kind] += taken
            kinds[kind] -= taken
            count -= taken


def _unbalanced(
    key: tuple[str, str, str],
    want: Mapping[Operands, int],
    good: Mapping[Operands, int],
    others: Counter[Kind],
    outside: int,
) -> str:
    where = {"forward": "of the forward pass", "backward": "of the backward pass"}.get(key[2], "of the step")
    where = f"of {key[0]}{' ' + key[1] if key[1] else ''}" if key[0] else where
    told = "; ".join(
        f"{good[operands]} {' x '.join(operands.formats)} kernel{'s' * (good[operands] != 1)} for {want[operands]} "
        f"call{'s' * (want[operands] != 1)}"
        for operands in sorted(want, key=str)
    )
    text = f"the GEMM kernels {where} do not balance: {told}"
    if others:
        beside = f" beside {outside} call{'s' * (outside != 1)} of layers that no recipe reaches" if outside else ""
        text += f", and {_counts(others)}{beside}"
    return f"{text}; whose they are is not known"


def _counts(kinds: Counter[Kind]) -> str:
    return " and ".join(f"{n} of {kind}" for kind, n in sorted(kinds.items(), key=lambda item: str(item[0])) if n)


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole} calls" if whole != part else f"{'its call' if whole == 1 else f'its {whole} calls'}"


def labelled(timed: Sequence[ProductKernel], ranged: Sequence[ProductKernel], calls: int) -> list[ProductKernel] | None:
    """The products of a step as timed, with the labels of one that was traced with ranges.

    None if the two did not launch products of the same kinds in the same order, or fewer than there are `calls`: then
    the n-th product of one need not be the n-th of the other.
    """
    if [product.kind for product in timed] != [product.kind for product in ranged]:
        return None
    found = [replace_labels(product, other) for product, other in zip(timed, ranged, strict=True)]
    return found if sum(product.bucket == LINEAR for product in found) >= calls else None


def replace_labels(product: ProductKernel, other: ProductKernel) -> ProductKernel:
    """`product` with the module, role and bucket of `other`, and its direction where it has none."""
    return product._replace(
        module=other.module, role=other.role, bucket=other.bucket, direction=product.direction or other.direction
    )
