"""Worlds in which it is known what every GEMM call ran in, and witnesses of them that lose, forget and look elsewhere.

    python -m tests.analyze.worlds --worlds 100000 --seed 1

A world is a model of a few linear layers, a recipe, and the formats that each call of a timed step really multiplied.
Its witnesses are facts as a run records them. Each of them may lose calls, kernels, labels or names, or have seen
another step than the timed one, in which other calls fell back. The verdict is made of the facts alone, and held
against the truth: the confirmed share is never above the true one, and equal to it where nothing was lost.

What no judge can find out is not in these worlds: kernels that nobody launched, layers that no recipe reaches running
in FP8, two scalings whose kernels bear one name (delayed and current), and a call that is lost to all witnesses at
once.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from lowprec_callback.analyze.library import LibraryWitness
from lowprec_callback.analyze.precision import Operands, same
from lowprec_callback.analyze.timed import spare_products, timed
from lowprec_callback.analyze.traceview import view
from lowprec_callback.analyze.verdict import NO_LIBRARY, Audit, verdict
from lowprec_callback.analyze.witnesses import SignatureBook
from lowprec_callback.recording import (
    ROLES,
    Card,
    Dispatch,
    Gemm,
    GemmTime,
    LibraryCall,
    LibraryLog,
    Operand,
    Product,
    Role,
    StepProducts,
)
from lowprec_callback.report import Verdict

from .recordings import (
    BF16_CARD,
    BLOCK_CARD,
    CARDS,
    DELAYED_CARD,
    NVFP4_CARD,
    UNKNOWN_GEMM,
    Kernel,
    kernel_name,
    operand,
    step_products,
    trace,
)

MX_CARD = replace(BLOCK_CARD, recipe="mxfp8", title="MXFP8", scaling="mx-32")
ASKED = (BF16_CARD, DELAYED_CARD, BLOCK_CARD, NVFP4_CARD)
RAN = (BF16_CARD, DELAYED_CARD, BLOCK_CARD, NVFP4_CARD, MX_CARD)
BMM = "nvjet_sm90_tst_128x128_64x4_2x1_v_bz_TNN"


@dataclass(frozen=True)
class Call:
    """One GEMM call of a step."""

    module: str
    role: Role
    m: int
    k: int
    n: int
    reachable: bool
    parent: str = ""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n


Formats = tuple[Operand, Operand]
Ran = list[tuple[Call, Formats]]
"""Every call of a step, in order of launch, and what it multiplied."""


@dataclass
class World:
    """A truth, its witnesses, and what they have lost."""

    card: Card
    compiled: bool
    truth: Ran
    gemms: list[Gemm] = field(default_factory=list)
    dispatches: list[Dispatch] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    steps: list[StepProducts] = field(default_factory=list)
    traces: list[Sequence[Kernel]] = field(default_factory=list)
    library: LibraryWitness = NO_LIBRARY
    times: list[GemmTime] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    @property
    def true_share(self) -> float:
        total = sum(call.flops for call, _ in self.truth)
        return sum(call.flops for call, ran in self.truth if self.as_asked(call, ran)) / total

    def as_asked(self, call: Call, ran: Formats) -> bool:
        if not call.reachable and not self.card.baseline:
            return False
        return same(Operands.asked(self.card, call.role), Operands.seen(*ran))

    @property
    def knowable(self) -> bool:
        """Whether any witness shows that each call was made."""
        made = Counter((call.module, call.role) for call, _ in self.truth)
        counts: list[Counter[tuple[str, str]]] = [Counter(), Counter(), Counter()]
        for gemm in self.gemms:
            counts[0][gemm.module, gemm.role] += gemm.calls
        for dispatch in self.dispatches:
            counts[1][dispatch.module, dispatch.role] += dispatch.calls
        for place, calls in self.library.found.items():
            counts[2][place] += sum(call.calls for call in calls)
        counts += [Counter((kernel.module, kernel.role) for kernel in kernels) for kernels in self.traces]
        if all(any(count[place] >= number for count in counts) for place, number in made.items()):
            return True
        whole = len(self.truth) + len(self.products)
        shown = [len(step.name) for step in self.steps] or [len(kernels) for kernels in self.traces]
        return any(number == whole for number in shown)

    def judged(self) -> Verdict:
        book = SignatureBook(self.times, CARDS)
        views = [view(trace(self.card.recipe, kernels, 1.0)) for kernels in self.traces]
        found = timed(self.steps, views, book, sum(gemm.calls for gemm in self.gemms))
        return verdict(
            list(enumerate(self.gemms)),
            list(enumerate(self.dispatches)),
            found,
            Audit(self.card, te=True, backward_override=None),
            library=self.library,
            spare=spare_products(self.products),
        )


def operands_of(card: Card, role: Role) -> Formats:
    """What a card asks of a role, as two operands."""
    formats = {"fprop": card.fprop, "dgrad": card.dgrad, "wgrad": card.wgrad}[role]
    first, second = (operand(form, card.scaling if form[0] == "e" else "none") for form in formats)
    return first, second


class Maker:
    """Draws worlds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def world(self) -> World:
        """A world in which the truth can be found out."""
        while True:
            world = self.drawn()
            if world.knowable:
                return world

    def drawn(self) -> World:
        r = self.random
        card = r.choice(ASKED)
        # The share of calls that run as asked, and how often a witness loses a thing; many worlds lose nothing.
        good, loss = r.choice((1.0, 0.9, 0.5, 0.0)), r.choice((0.0, 0.0, 0.05, 0.3, 0.7))
        calls = self.model(card)
        compiled = self.chance(0.35)
        truth = self.run(card, calls, good)
        world = World(card, compiled, truth)
        if compiled:
            world.lost.add("labels")
        world.gemms = self.captured(world, calls, loss if self.chance(0.3) else 0.0)
        attention = [Kernel(BMM, 1.0, "attention", "", "aten::bmm", "forward")] * r.choice((0, 0, 2))
        beside = Product(card.recipe, "attention", "aten::bmm", "forward", 4, 8, 8, 8, ("bf16", "bf16"), 1)
        world.products = [beside] * len(attention)
        if self.chance(0.85):
            seen = self.seen(world, calls, good, "operands")
            world.dispatches = self.dispatches(world, seen, loss if self.chance(0.4) else 0.0)
        if self.chance(0.5):
            seen = self.seen(world, calls, good, "library")
            world.library = self.logged(world, seen, loss if self.chance(0.4) else 0.0)
        for number in range(r.choice((0, 1, 2, 2))):
            kernels = self.kernels(world, truth, attention, loss if self.chance(0.5) else 0.0, ranged=False)
            world.steps.append(step_products(card.recipe, kernels, number, ("model",) if compiled else ()))
        for _ in range(r.choice((0, 1, 2))):
            seen = self.seen(world, calls, good, "ranges")
            world.traces.append(self.kernels(world, seen, attention, loss if self.chance(0.5) else 0.0, ranged=True))
        if not world.steps:
            world.lost.add("timed steps")
            if compiled:
                # The run says that it was compiled, and then a step with ranges is not taken for a timed one.
                world.traces = []
            else:
                # As in a capture: the step with ranges is the step that ran.
                world.traces = [
                    self.kernels(world, truth, attention, loss if self.chance(0.5) else 0.0, ranged=True)
                    for _ in world.traces
                ]
        if not world.traces:
            world.lost.add("ranges")
        if not world.dispatches:
            world.lost.add("operands")
        return world

    def model(self, card: Card) -> list[Call]:
        """The calls of one step, in order: forward by module, then backward the other way round."""
        r, layers = self.random, []
        for index in range(r.randint(1, 4)):
            m, k, n = (r.choice((1, 16, 64, 256)) for _ in range(3))
            reachable = not self.chance(0.2)
            if reachable and self.chance(0.2):
                layers.append([(f"mlp{index}.fc1", m, k, n, True, f"mlp{index}")])
                layers.append([(f"mlp{index}.fc2", m, n, k, True, f"mlp{index}")])
            else:
                layers.append([(f"layer{index}", m, k, n, reachable, "")] * r.choice((1, 1, 2, 3)))
        forward = [Call(name, "fprop", m, k, n, ok, up) for layer in layers for name, m, k, n, ok, up in layer]
        backward = [
            Call(name, role, m, k, n, ok, up)
            for layer in reversed(layers)
            for name, m, k, n, ok, up in layer
            for role in ROLES[1:]
        ]
        return forward + backward

    def run(self, card: Card, calls: Iterable[Call], good: float) -> Ran:
        """What each call multiplies in one step."""
        return [(call, self.ran(card, call, good)) for call in calls]

    def ran(self, card: Card, call: Call, good: float) -> Formats:
        if not call.reachable:
            return operands_of(BF16_CARD, call.role)
        if self.chance(good):
            return operands_of(card, call.role)
        other = self.random.choice(RAN)
        # Also the formats of another role: an fprop in E5M2, a dgrad in E4M3 x E4M3.
        return operands_of(other, self.random.choice(ROLES))

    def seen(self, world: World, calls: list[Call], good: float, who: str) -> Ran:
        """The step that a witness saw: the timed one, or another in which other calls fell back."""
        if self.chance(0.25):
            world.lost.add(f"step of {who}")
            return self.run(world.card, calls, good)
        return world.truth

    def kept(self, world: World, items: Ran, loss: float, what: str) -> Ran:
        found = [item for item in items if not self.chance(loss)]
        if len(found) < len(items):
            world.lost.add(what)
        return found

    def captured(self, world: World, calls: list[Call], loss: float) -> list[Gemm]:
        kept = [call for call in calls if not self.chance(loss)]
        if len(kept) < len(calls):
            world.lost.add("captured calls")
        counts: dict[Call, int] = {}
        for call in kept:
            counts[call] = counts.get(call, 0) + 1
        return [
            Gemm(c.module, c.role, c.m, c.k, c.n, number, "Linear" if c.reachable else "nn.Linear", c.reachable)
            for c, number in counts.items()
        ]

    def dispatches(self, world: World, seen: Ran, loss: float) -> list[Dispatch]:
        counts: dict[str, int] = {}
        keys: dict[str, tuple[Call, Formats]] = {}
        for call, ran in self.kept(world, seen, loss, "operands"):
            text = repr((call, ran))
            keys[text] = (call, ran)
            counts[text] = counts.get(text, 0) + 1
        return [
            Dispatch(
                world.card.recipe, call.module, call.role, call.m, call.k, call.n, counts[text], "", ran[0], ran[1],
                "", False, "generic_gemm" if call.reachable else "aten::mm",
                "Linear" if call.reachable else "nn.Linear",
            )
            for text, (call, ran) in keys.items()
        ]  # fmt: skip

    def logged(self, world: World, seen: Ran, loss: float) -> LibraryWitness:
        types = {"bf16": "R_16BF", "e4m3": "R_8F_E4M3", "e5m2": "R_8F_E5M2", "e2m1": "R_4F_E2M1"}
        modes = {"block-128": "VEC128_32F", "mx-32": "VEC32_UE8M0", "nvfp4-16": "VEC16_UE4M3"}
        calls = []
        for number, (call, ran) in enumerate(self.kept(world, seen, loss, "library")):
            first, second = ran
            calls.append(
                (
                    number,
                    LibraryCall(
                        world.card.recipe, call.module, call.role, call.m, call.k, call.n, "cuBLASLt", "cublasLtMatmul",
                        types[first.format], types[second.format], "R_16BF", call.m, call.k, call.n, 1,
                        modes.get(first.scaling, ""), modes.get(second.scaling, ""),
                    ),
                )
            )  # fmt: skip
        log = LibraryLog(world.card.recipe, ("cuBLASLt",), len(calls), len(calls))
        return LibraryWitness.of(calls, log)

    def kernels(self, world: World, seen: Ran, attention: list[Kernel], loss: float, *, ranged: bool) -> list[Kernel]:
        """One product kernel for each call; attention's between forward and backward."""
        what = self.random.choice(("kernels", "names", "labels", "roles", "directions")) if loss else ""
        found: list[Kernel] = []
        for call, ran in seen:
            name = kernel_name(*ran)
            module = (call.parent if call.parent and what == "labels" else call.module) if ranged else ""
            role = call.role if ranged and call.reachable else ""
            phase = "forward" if call.role == "fprop" else "backward"
            if world.compiled:
                module = role = ""
            if self.chance(loss):
                world.lost.add(what)
                if what == "kernels":
                    continue
                name = UNKNOWN_GEMM if what == "names" else name
                module = "" if what == "labels" else module
                role = "" if what in ("labels", "roles") else role
                phase = "" if what == "directions" else phase
            elif what == "labels" and call.parent:
                world.lost.add(what)
            found.append(Kernel(name, 1.0, module, role, "", phase))
        turn = sum(call.role == "fprop" for call, _ in seen)
        shown = attention if ranged else [replace(kernel, module="") for kernel in attention]
        return [*found[:turn], *shown, *found[turn:]]


def wrong(world: World) -> str:
    """What is wrong with the verdict on a world; empty if nothing is."""
    found = world.judged()
    claimed, true = found.coverage.value, world.true_share
    if claimed is not None and claimed > true + 1e-9:
        return f"{claimed:.4f} confirmed, {true:.4f} true"
    if found.summary.startswith(("All ", "Every ")) and not all(
        world.as_asked(call, ran) for call, ran in world.truth if call.reachable or world.card.baseline
    ):
        return f"says {found.summary!r}"
    if not world.lost and (claimed is None or abs(claimed - true) > 1e-9):
        return f"nothing was lost, and {claimed} confirmed where {true:.4f} is true"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    bad, whole, claims = 0, 0, 0.0
    for number in range(options.worlds):
        world = Maker(options.seed * 1_000_003 + number).world()
        whole += not world.lost
        claims += world.judged().coverage.value or 0.0 if number % 10 == 0 else 0.0
        if text := wrong(world):
            bad += 1
            if bad <= 10:
                print(f"world {number}: {text}; lost {sorted(world.lost)}; compiled {world.compiled}")
    print(f"{options.worlds} worlds, {whole} of them lost nothing; {bad} verdicts are wrong")
    print(f"mean confirmed share of every tenth: {10 * claims / options.worlds:.3f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
