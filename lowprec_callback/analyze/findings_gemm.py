"""Findings about the GEMMs themselves, the GPU's clock, and the sweep that measured them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median

from lowprec_callback.analyze.finding_case import Case, bucket, ms_text, rests_on, share, some, stands_out
from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.reading import launch_bound
from lowprec_callback.recording import Gemm
from lowprec_callback.report import Figure, Finding, GemmRow

OVER_BENCH = 0.05
"""Share of the benchmark's time by which the step's GEMMs must be slower to be worth telling."""

OUTSIDE = 0.02
"""Share of linear-layer FLOPs that no recipe reaches, from which it is worth telling."""

EXPLAINS = 0.2
"""Share of what GEMMs take more in the step, from which what did not run as asked is a reason for it."""

LOSS = 0.003
"""Share of the recipe's step, from which what layers lose by the recipe is worth telling."""

CLOCK = 0.02
"""Relative difference of two clocks that means something: NVML reads whole steps of 15 MHz."""

_NO_CAUSE = "Expect what the step shows, not the benchmark: the Recording holds no cause that could be removed"

_SLOWED = re.compile(r"(?i)power|thermal|hardware|board|voltage")
_THERMAL = re.compile(r"(?i)thermal")


def find_no_gain(case: Case) -> list[Finding]:
    """Layers that lose by the recipe: their GEMMs are no faster in it, or quantization costs more than they save.

    For an operation, with calls c and benchmark times (kernel k, autocast a) in recipe r and baseline 0, summed over
    its roles: it loses if sum c (a_r - a_0) > 0 with its whole interval; one sample a side has none, and shows no loss.
    Where sum c (k_r - k_0) >= 0 too, the kernels are to blame, else quantization. What is less than `LOSS` of the step
    in all, nobody gains by changing; without a timed step nobody knows how much that is.
    """
    if case.part.baseline or not case.wall:
        return []
    before = _by_operation(case.base.gemms)
    small: list[tuple[str, Figure]] = []
    slow: list[tuple[str, Figure]] = []
    bound = False
    for key, rows in _by_operation(case.part.gemms).items():
        if key not in before:
            continue
        loss = _total(rows, "autocast_ms").minus(_total(before[key], "autocast_ms"))
        kernels = _total(rows, "kernel_ms").minus(_total(before[key], "kernel_ms"))
        if loss.value is None or kernels.value is None or loss.low is None or loss.low <= 0:
            continue
        name, m, k, n = key
        bound = bound or any(row.launch_bound for row in (*rows, *before[key]))
        text = f"{name} {m}x{k}x{n}: kernels {kernels.value:+.3f} ms a step, with quantization {loss.value:+.3f} ms"
        (slow if kernels.value >= 0 else small).append((text, loss))
    how = "te.autocast(enabled=False) around them" if case.te else "torch.autocast(enabled=False) around them"
    found = []
    for code, members, why in (
        ("quantization-outweighs-gemm", small, "their quantization costs more than their GEMMs save"),
        ("gemm-not-faster", slow, "their GEMMs alone are no faster in it"),
    ):
        if not members:
            continue
        members.sort(key=lambda item: -(item[1].value or 0.0))
        total = Figure.total([figure for _, figure in members], "ms")
        if (total.value or 0.0) < LOSS * case.wall:
            continue
        names = some([text.split(" ")[0] for text, _ in members])
        evidence = [text for text, _ in members[:6]]
        evidence += _kernel_names(case, members[0][0].split(" ")[0]) if code == "gemm-not-faster" else []
        if bound:
            evidence.append("some of these calls take longer to launch than to run")
        advice = f"Keep these layers out of the recipe ({how})"
        if code == "quantization-outweighs-gemm":
            advice += ", or spread the quantization of their weights over more rows (a larger micro-batch)"
        else:
            advice += ", or run them in a recipe that is faster at these shapes"
        found.append(
            case.found(
                code,
                total,
                f"{case.part.name} makes {names} slower, by {ms_text(total.value or 0.0)} a step on the bench: {why}.",
                evidence,
                f"{advice}.",
            )
        )
    return found


def _kernel_names(case: Case, name: str) -> list[str]:
    """The kernels that the traced steps ran for an operation's GEMMs, in the recipe and in the baseline."""
    rows = []
    for recipe, views in ((case.part.name, case.views), (case.base.name, case.base_views)):
        groups = [g for view in views for g in view.groups if g.is_linear_gemm and operation(g.module) == name]
        if groups:
            kernels = some([group.name for group in sorted(groups, key=lambda group: -group.ms)], 3)
            rows.append(f"kernels of {name} in {recipe}: {kernels}")
    return rows


Key = tuple[str, int, int, int]


def _by_operation(rows: Sequence[GemmRow]) -> dict[Key, list[GemmRow]]:
    found: dict[Key, list[GemmRow]] = {}
    for row in rows:
        found.setdefault((row.operation, row.m, row.k, row.n), []).append(row)
    return found


def _total(rows: Sequence[GemmRow], what: str) -> Figure:
    return Figure.total([getattr(row, what).scaled(float(row.calls)) for row in rows], "ms")


def find_requantized(case: Case) -> Finding | None:
    """Weights that are quantized in each micro-batch."""
    modules = [module for fact in case.watched.uncached for module in fact.modules]
    if case.watched.micro_batches < 2 or not modules:
        return None
    places = some([operation(module) for module in modules])
    return case.found(
        "weight-requantized",
        Figure.missing("ms", "kernels do not tell which casts are the weights'"),
        f"The weights of {len(modules)} module{'s' * (len(modules) != 1)} ({places}) are quantized again in each of "
        f"{case.watched.micro_batches} micro-batches.",
        [f"no is_first_microbatch reached {places}"],
        "Pass is_first_microbatch=True to the layers in the first micro-batch and False in the others: one "
        "quantization a step, at the price of keeping the quantized weights.",
    )


def find_outside(case: Case) -> list[Finding]:
    """Linear layers that no recipe reaches: the LM head (what stands outside of all layers), and others."""
    gemms = case.watched.gemms
    if not case.part.baseline or not case.te or not gemms:
        return []
    total = math.fsum(_flops(gemm) for gemm in gemms)
    heads = [gemm for gemm in gemms if not gemm.quantizable and _is_head(gemm)]
    others = [gemm for gemm in gemms if not gemm.quantizable and not _is_head(gemm)]
    found = []
    for code, members in (("head-outside", heads), ("layers-outside", others)):
        part = share(math.fsum(_flops(gemm) for gemm in members), total)
        if part is None or part < OUTSIDE:
            continue
        modules = {gemm.module for gemm in members}
        ms = case.kernels(lambda group, inside=modules: group.is_linear_gemm and group.module in inside)  # type: ignore[misc]
        names = some([operation(gemm.module) for gemm in members])
        families = some([gemm.family for gemm in members])
        if code == "head-outside":
            n = max(gemm.n for gemm in members)
            padded = f", with its {n} outputs padded to {-(-n // 16) * 16}" if n % 16 else ""
            advice = (
                f"If its precision allows it, make it a te.Linear{padded}; else take it off what you expect to gain."
            )
        else:
            advice = "Make them Transformer Engine layers (te.Linear): a recipe reaches nothing else."
        cost = f"{ms_text(ms.value)} of its step" if ms.value is not None else f"ms not known: {ms.reason}"
        what = "The LM head" if code == "head-outside" else "A part of the layers"
        found.append(
            case.found(
                code,
                ms,
                f"{what} ({names}, {families}) runs alike under every recipe, because none reaches it: {part:.1%} of "
                f"the linear-layer FLOPs, {cost}.",
                [rests_on(f"{names}: {part:.1%} of 2 M K N calls over all linear layers", ms)],
                advice,
            )
        )
    return found


def _flops(gemm: Gemm) -> float:
    return 2.0 * gemm.m * gemm.k * gemm.n * gemm.calls


def _is_head(gemm: Gemm) -> bool:
    """Outside of all layers; where nobody said, a path without a layer's index."""
    return gemm.layers == 0 if gemm.layers is not None else operation(gemm.module) == gemm.module


def find_slower_in_step(case: Case) -> Finding | None:
    """The step's GEMM kernels take longer than the benchmark says: clock, or something that shares the GPU.

    over = G - B, with G the ledger's GEMM bucket, less the products in it that are no captured layer's, and B the
    kernel-only benchmark of the same calls.
    """
    ledger, bench = case.part.ledger, case.part.gemm_kernel_ms
    if case.part.baseline or case.on_cpu or ledger is None or not bench.value or not case.wall:
        return None
    # Where the host sets the pace, the step does not get shorter by what the GPU no longer does.
    if launch_bound(case.part):
        return None
    if not ledger.complete:
        return None
    over = Figure.total([ledger.buckets["gemm"], bench.scaled(-1.0), Figure(-case.no_layers, "ms")], "ms")
    if over.value is None or over.value < OVER_BENCH * bench.value or over.value < 0.01 * case.wall:
        return None
    if not stands_out(ledger, over.value):
        return None
    evidence = [
        rests_on(f"GEMM kernels {ms_text(over.value + bench.value)} in the step, {ms_text(bench.value)} on the bench")
    ]
    reasons, advice = [], []
    rows = case.part.verdict.rows if case.part.verdict is not None else ()
    other = math.fsum(row.share for row in rows if row.verdict == "fallback")
    if other > OUTSIDE:
        evidence.append(f"{other:.1%} of the linear-layer FLOPs did not run as asked (verdict)")
        by_width = min(_by_precision(case), over.value)
        if by_width >= EXPLAINS * over.value:
            reasons.append(
                f"{other:.0%} of their FLOPs ran in another precision than was benchmarked, which explains about "
                f"{ms_text(by_width)}"
            )
            advice.append("See first to the layers that the verdict names: the recipe did not reach them")
    mhz = _mhz(case)
    if mhz and case.bench_mhz:
        evidence.append(f"SM clock {mhz:.0f} MHz in the steps, {case.bench_mhz:.0f} MHz on the bench")
        if mhz < (1 - CLOCK) * case.bench_mhz:
            by_clock = min(bench.value * (case.bench_mhz / mhz - 1), over.value)
            reasons.append(f"the lower clock explains about {ms_text(by_clock)}")
            advice.append(_power_advice(case) or "The promise at the step's clock is lower by this much")
    beside = "no communication was seen beside them"
    shared = bucket(ledger, "communication")
    collectives = case.kernels(lambda group: group.bucket == "communication")
    if collectives.value is not None and shared is not None and collectives.value > shared:
        hidden = collectives.value - shared
        evidence.append(rests_on(f"{ms_text(hidden)} of communication ran beside computation", collectives))
        beside = f"the communication beside them ({ms_text(hidden)}) is too short to explain it"
        if hidden >= EXPLAINS * over.value:
            reasons.append("communication that runs beside them takes SMs and bandwidth")
            advice.append("Leave collectives fewer SMs, or overlap them with something else")
    known = "the clock does not explain it" if mhz and case.bench_mhz else "no clock was measured beside both"
    told = f": {'; '.join(reasons)}" if reasons else f"; {known}, and {beside}"
    return case.found(
        "gemm-slower-in-step",
        over,
        f"GEMMs take {ms_text(over.value)} ({over.value / bench.value:.0%}) more in the step than on the bench{told}.",
        evidence,
        f"{'. '.join(advice or [_NO_CAUSE])}.",
    )


def _by_precision(case: Case) -> float:
    """What GEMMs cost that ran as in the baseline instead of as asked [ms a step]: sum of calls x (k_0 - k_r).

    k are the kernel-only times of the benchmark in the baseline and in the recipe; 0 where they are not known.
    """
    if case.part.verdict is None or case.base.verdict is None:
        return 0.0
    ran = {(row.module, row.role): row.ran for row in case.base.verdict.rows}
    times: list[dict[tuple[str, str, int, int, int], float]] = [
        {(row.operation, row.role, row.m, row.k, row.n): row.kernel_ms.value or 0.0 for row in part.gemms}
        for part in (case.base, case.part)
    ]
    more = 0.0
    for row in case.part.verdict.rows:
        key = (operation(row.module), row.role, row.m, row.k, row.n)
        base, own = (found.get(key, 0.0) for found in times)
        if row.verdict == "fallback" and row.ran == ran.get((row.module, row.role)) and base and own:
            more += row.calls * (base - own)
    return more


def _mhz(case: Case) -> float | None:
    found = [clock.sm_mhz for _, clock in case.clocks if clock.sm_mhz > 0]
    return float(median(found)) if found else None


def _number(text: str | None) -> float | None:
    """The number at the start of a text like `700 W`."""
    found = re.match(r"\d+(\.\d+)?", text or "")
    return float(found[0]) if found else None


def _power_advice(case: Case) -> str | None:
    """If the power limit is below its default."""
    limit, default = (_number(case.environment.get(name)) for name in ("power limit", "default power limit"))
    if limit is None or default is None or limit >= default:
        return None
    return f"The power limit is {limit:.0f} W, its default {default:.0f} W: raise it (nvidia-smi -pl {default:.0f})"


def find_throttled(case: Case) -> Finding | None:
    """The clock was held down by power or temperature at the end of at least half of a recipe's blocks.

    at stake = GEMM time in the step x (1 - clock / highest clock): what GEMMs would save at the highest clock. Missing
    where the power limit is the default one: then this is the GPU at full load, and there is nothing to win.
    """
    slowed = [(line, clock) for line, clock in case.clocks if any(_SLOWED.search(word) for word in clock.throttle)]
    if not slowed or 2 * len(slowed) < len(case.clocks):
        return None
    words = list(dict.fromkeys(word for _, clock in slowed for word in clock.throttle if _SLOWED.search(word)))
    mhz, highest = _mhz(case), _number(case.environment.get("highest sm clock"))
    if mhz is not None and highest and mhz > (1 - CLOCK) * highest:
        return None  # whatever held it down, it ran at its highest clock
    gemm = bucket(case.part.ledger, "gemm")
    source = lines_of("clocks", (line for line, _ in slowed))
    ms = Figure.missing("ms", "the highest clock, or the GEMM time of the step, is not known")
    if mhz is not None and highest and gemm is not None and highest >= mhz:
        ms = Figure(gemm * (1 - mhz / highest), "ms", "estimated", facts=source)
    power, heat = median(clock.power_w for _, clock in slowed), median(clock.temperature_c for _, clock in slowed)
    reading = f"{mhz:.0f} MHz, " if mhz is not None else ""
    evidence = [f"{reading}{power:.0f} W, {heat:.0f} °C (medians) [{'; '.join(source)}]"]
    limits = ("power limit", "default power limit", "highest sm clock")
    evidence += [f"{name}: {case.environment[name]}" for name in limits if name in case.environment]
    if any(_THERMAL.search(word) for word in words):
        advice = "Cool the GPU: it slows itself down by temperature."
    elif (power_advice := _power_advice(case)) is not None:
        advice = f"{power_advice}."
    else:
        advice = "No limit below the default was seen: this is the GPU at full load. Expect its GEMMs at this clock."
        if limits[0] in case.environment and limits[1] in case.environment:
            ms = Figure.missing("ms", "the power limit is the default one")
    blocks = f"{len(slowed)} of {len(case.clocks)} block{'s' * (len(case.clocks) != 1)}"
    at = f" at {mhz:.0f} MHz" if mhz is not None else ""
    below = f", of {highest:.0f} at most" if highest and mhz is not None else ""
    return case.found(
        "throttled", ms, f"The clock was held down by {', '.join(words)} in {blocks}{at}{below}.", evidence, advice
    )


def find_padding(case: Case) -> Finding | None:
    """Sizes that are no multiple of what the recipe's kernels want."""
    card = case.watched.card
    if card is None or (case.on_cpu and card.scaling == "none"):
        return None
    rows = case.watched.misaligned()
    if not rows:
        return None
    keys = {(row.operation, row.m, row.k, row.n) for row in rows}
    own = [row for row in case.part.gemms if (row.operation, row.m, row.k, row.n) in keys]
    ms = _total(own, "autocast_ms") if own else Figure.missing("ms", "these GEMMs were not benchmarked")
    cost = f", {ms_text(ms.value)} a step by the benchmark" if ms.value is not None else ""
    sizes = [", ".join(f"{fix.what} {fix.size} -> {fix.next_size}" for fix in row.fixes) for row in rows]
    return case.found(
        "padding",
        ms,
        f"{some([row.operation for row in rows])} have sizes off what {case.part.name}'s kernels want{cost}: "
        f"{rows[0].reason}.",
        [f"{row.operation} {row.m}x{row.k}x{row.n}: {row.reason}" for row in rows[:6]],
        f"Pad to the next multiple: {some(sizes)}.",
    )


def find_short(case: Case) -> Finding | None:
    """The fit was too short for the plan: once for the whole run."""
    plan = case.plan
    if not case.part.baseline or plan is None or not plan.shrunk:
        return None
    return case.found(
        "sweep-too-short",
        Figure.missing("ms", "this costs certainty, not time"),
        f"The sweep is shorter than asked: {plan.shrunk}.",
        [f"plan: {plan.rounds} rounds of {plan.timed_steps} timed steps, {plan.traced_steps} traced"],
        "Train for as many steps as the full plan takes, or name fewer recipes.",
        recipe="",
    )
