"""Asked against ran, for each module and role; unknown is `unproven`, never `confirmed`.

Coverage is counted in FLOPs: a GEMM of M x K x N takes 2 M K N a call, and

    coverage = sum of 2 M K N calls over confirmed rows / the same over all linear-layer GEMMs of a step  [1].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowprec_callback.analyze.library import LibrarySight, LibraryWitness, converted, merged, remark
from lowprec_callback.analyze.precision import BITS, UNKNOWN, Operands, kernel_fits, same, scaled_alike, shown
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.stored_bytes import stored_witness
from lowprec_callback.analyze.verdict_summary import summary
from lowprec_callback.analyze.witnesses import KernelSight, OperandWitness, Outcome, Place, kernel_place
from lowprec_callback.recording import Card, Dispatch, Gemm
from lowprec_callback.report import Figure, Verdict, VerdictRow, VerdictWord

SHARE = "share"
"""Unit of coverage: a share of one."""

RECOMPUTED = (
    "recomputed in backward outside the quantized region, and its backward pass with it: reentrant "
    "torch.utils.checkpoint does that, te.checkpoint opens the region again"
)
BY_MODEL = ("bf16", "fp16")
"""(asked, ran) of a baseline that the model itself decides: without quantization a layer multiplies in its own type."""
IN_FP16 = "the model itself is in FP16, which is what its layers multiply in without quantization; its peak is BF16's"
SOFTWARE = "the custom quantizer's own code multiplies"


@dataclass(frozen=True)
class Audit:
    """What a verdict needs to know besides the witnesses."""

    card: Card
    te: bool
    """Whether Transformer Engine ran the model."""
    backward_override: str | None
    """Who asked for a wide backward pass (`NVTE_BACKWARD_OVERRIDE=high_precision`), if anyone did."""
    kernels_speak: bool
    """Whether names of kernels can tell a precision (on a CPU the trace holds operators, which cannot)."""


NO_LIBRARY = LibraryWitness({})
"""Where the library's log was not recorded."""


def verdict(
    gemms: Sequence[tuple[int, Gemm]],
    dispatches: Sequence[tuple[int, Dispatch]],
    kernels: Mapping[Place, KernelSight],
    audit: Audit,
    contradictions: Iterable[str] = (),
    slow_paths: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
    library: LibraryWitness = NO_LIBRARY,
) -> Verdict:
    """One row for each captured GEMM (two or more where its calls differed), and the coverage."""
    captured = [gemm for _, gemm in gemms]
    witness = OperandWitness.of((fact for _, fact in dispatches), captured)
    memory = stored_witness((fact for _, fact in dispatches), captured)

    def outcomes_of(gemm: Gemm, only_shape: bool) -> Sequence[Outcome]:
        """What reached the library: seen at its entry, else by the library's log."""
        logged = library.sight(gemm, only_shape)
        return witness.outcomes(gemm, only_shape) or (logged.outcomes if logged else ())

    shapes = Counter((gemm.module, gemm.role) for gemm in captured)
    total = math.fsum(flops(gemm) for gemm in captured)
    quantized_forward = {
        gemm.module
        for gemm in captured
        if gemm.role == "fprop" and any(o.operands.quantized for o in outcomes_of(gemm, False))
    }
    # What reached the library where the kernels of several GEMMs bear one label.
    sharers: dict[Place, list[Sequence[Outcome]]] = {}
    for gemm in captured:
        sharers.setdefault(kernel_place(gemm, kernels), []).append(outcomes_of(gemm, False))
    rows: list[VerdictRow] = []
    reachable: list[bool] = []
    disagreements = list(contradictions)
    for gemm in captured:
        place = (gemm.module, gemm.role)
        entered = witness.outcomes(gemm, only_shape=shapes[place] > 1)
        logged = library.sight(gemm, only_shape=shapes[place] > 1)
        sight = kernels.get(kernel_place(gemm, kernels)) if audit.kernels_speak else None
        neighbours = [outcome for found in sharers[kernel_place(gemm, kernels)] for outcome in found]
        clashes = [_clash(gemm, Operands.asked(audit.card, gemm.role), neighbours, sight)]
        stored = memory.get(place)
        if stored is not None and clashes[0] is None:
            clashes.append(stored.misfit)
        by_library = bool(entered) and not any(outcome.software for outcome in entered)
        if logged is not None and by_library and (odds := logged.against(entered)) is not None:
            clashes.append(f"{gemm.module} {gemm.role}: {odds}")
        disagreements += [clash for clash in clashes if clash]
        seen = Seen(
            entered,
            sight,
            witness.steps,
            any(clashes),
            gemm.module in quantized_forward,
            witness.lost_in_recomputation(gemm.module),
            logged,
            library.why_silent,
        )
        for finding in _findings(gemm, seen, audit):
            if stored and "operands" in finding.witnesses:
                finding.witnesses["memory"] = stored.text
            rows.append(_row(gemm, finding, audit, total))
            reachable.append(gemm.quantizable)
    strangers = sorted({place for place in (*witness.found, *library.found) if place not in shapes})
    if strangers and captured:
        names = ", ".join(f"{module or '(unknown module)'} {role}" for module, role in strangers[:3])
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        disagreements.append(f"GEMMs reached the library that the capture did not see: {names}{more}")

    facts = (
        *lines_of("gemm", (n for n, _ in gemms)),
        *lines_of("dispatch", (n for n, _ in dispatches)),
        *lines_of("library_call", library.lines),
    )
    asked = Operands.asked(audit.card, "fprop")
    coverage, te_coverage = _coverage(
        rows, reachable, bool(dispatches or kernels or library.found), facts, audit.card.recipe
    )
    return Verdict(
        coverage=coverage,
        te_coverage=te_coverage,
        rows=tuple(rows),
        summary=summary(rows, reachable, coverage, shown(asked.precision), audit.te),
        disagreements=tuple(dict.fromkeys(disagreements)),
        slow_paths=slow_paths,
        beside=beside,
    )


def flops(gemm: Gemm) -> float:
    """2 M K N calls [FLOP], the same for all three roles. M of a grouped call sums over its groups."""
    return 2.0 * gemm.m * gemm.k * gemm.n * gemm.calls


@dataclass(frozen=True)
class Seen:
    """All that was seen of one GEMM."""

    outcomes: Sequence[Outcome]
    sight: KernelSight | None
    steps: float
    """Traced steps that `outcomes` cover."""
    clash: bool
    """Whether the witnesses contradict each other."""
    quantized_forward: bool
    """Whether the same module's forward GEMM ran quantized."""
    lost_in_recomputation: bool
    """Whether it ran quantized in forward, and wide when checkpointing made it again in backward."""
    library: LibrarySight | None = None
    library_silence: str = ""
    """Why the library's log may say nothing of it."""


@dataclass(frozen=True)
class Finding:
    """The verdict on a part of one GEMM's calls."""

    ran: str
    word: VerdictWord
    why: str
    witnesses: dict[str, str]
    part: float
    """Share of the GEMM's calls."""


def _row(gemm: Gemm, finding: Finding, audit: Audit, total: float) -> VerdictRow:
    return VerdictRow(
        module=gemm.module,
        role=gemm.role,
        m=gemm.m,
        k=gemm.k,
        n=gemm.n,
        calls=round(gemm.calls * finding.part),
        asked=str(Operands.asked(audit.card, gemm.role)),
        ran=finding.ran,
        verdict=finding.word,
        why=finding.why,
        witnesses=finding.witnesses,
        share=finding.part * flops(gemm) / total if total else 0.0,
    )


def _findings(gemm: Gemm, seen: Seen, audit: Audit) -> list[Finding]:
    """One finding for each kind of operands that its calls got, and one for calls that were not seen."""
    asked, sight, logged = Operands.asked(audit.card, gemm.role), seen.sight, seen.library
    kernels = {"kernels": str(sight)} if sight is not None and sight.known else {}
    outcomes = seen.outcomes or (logged.outcomes if logged else ())
    if not outcomes:
        ran, word, why = _by_kernels_alone(gemm, asked, sight, audit)
        return [Finding(ran, word, _joined(why, seen.library_silence), kernels, 1.0)]

    watched = math.fsum(outcome.calls for outcome in outcomes)
    due = max(gemm.calls * seen.steps, watched, 1.0)
    emulated = converted(asked.precision, logged) or (
        asked.precision == "fp8-block" and sight is not None and "mxfp8" in sight.known
    )
    found: list[Finding] = []
    for entered in outcomes:
        # What Python code multiplies instead, it may do by products of the library's: they are not the GEMM asked for.
        heard = logged is not None and not entered.software and logged.heard_all(entered)
        outcome = replace(entered, operands=merged(entered.operands, logged)) if logged and heard else entered
        ran = str(outcome.operands)
        if seen.clash:
            word, why = "unproven", "the witnesses disagree"
        elif outcome.software:
            ran, word, why = _by_software(asked, outcome, sight, audit)
        elif emulated and outcome.operands.precision in ("fp8-block", "mxfp8"):
            ran += "" if outcome.operands.precision == "mxfp8" else ", run as mxfp8"
            word, why = "emulated", "block scales were converted before the product, which ran as MXFP8"
        elif (
            kernels
            and gemm.quantizable
            and len(outcomes) == 1
            and scaled_alike(asked, outcome.operands)
            and not _cause(outcome)
        ):
            _, word, why = _by_kernels_alone(gemm, asked, sight, audit)
            why = "kernel names tell the format, operands the scaling" if word == "confirmed" else why
        else:
            word, why = _judge(gemm, asked, outcome, audit, seen)
            why = _joined(
                "" if seen.outcomes else "by the library's log alone",
                why,
                _tf32(sight) if kernels else _silence(sight, audit),
                remark(logged, entered) if logged else seen.library_silence,
            )
        witnesses = {"operands": str(entered.operands)} if seen.outcomes else {}
        if logged is not None and (seen.clash or heard):
            witnesses["library"] = str(logged)
        found.append(Finding(ran, word, why, {**witnesses, **kernels}, outcome.calls / due))
    unseen = 1.0 - watched / due
    if unseen > 1e-9:
        what = "reached no function that was watched" if seen.outcomes else "are not in the library's log"
        why = f"{unseen:.0%} of the calls {what}"
        found.append(Finding(UNKNOWN, "unproven", why, {}, unseen))
    return _merged(found)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Calls that differ only in what made no difference (a forward and its sound recomputation) as one finding."""
    parts: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.ran, finding.word, finding.why)
        before = parts.get(key)
        parts[key] = finding if before is None else replace(before, part=before.part + finding.part)
    return list(parts.values())


def _clash(gemm: Gemm, asked: Operands, outcomes: Sequence[Outcome], sight: KernelSight | None) -> str | None:
    """If kernels ran that cannot have multiplied the operands that were seen: a sentence that says so."""
    if sight is None or any(outcome.software for outcome in outcomes):
        return None  # Python code multiplies as it likes: `_by_software` says what it did
    seen = [outcome.operands for outcome in outcomes if outcome.operands.precision != UNKNOWN]
    if not seen:
        return None
    text = " and ".join(dict.fromkeys(str(operands) for operands in seen))
    for precision in sight.known:
        emulation = precision == "mxfp8" and any(o.precision == "fp8-block" for o in seen)
        if not emulation and not any(kernel_fits(operands, precision) for operands in seen):
            return f"{gemm.module} {gemm.role}: operands were {text}, but a kernel of precision {precision} ran"
    formats = {tuple(sorted(operands.formats)) for operands in seen}
    strange = [pair for pair in sorted(sight.operands) if pair not in formats]
    # Only FP8's two formats can differ within one precision; other names are checked by precision above.
    if strange and asked.precision == "fp8" and all(form in ("e4m3", "e5m2") for form in strange[0]):
        return f"{gemm.module} {gemm.role}: operands were {text}, but a kernel for {' x '.join(strange[0])} ran"
    return None


def _judge(gemm: Gemm, asked: Operands, outcome: Outcome, audit: Audit, seen: Seen) -> tuple[VerdictWord, str]:
    """The verdict on calls whose operands were seen and that no kernel contradicts."""
    ran = outcome.operands
    if same(asked, ran) and (gemm.quantizable or audit.card.baseline):
        if outcome.other_recipe or outcome.stale_recipe:
            return "fallback", _cause(outcome)
        note = "the operands do not tell delayed from current scaling" if "tensor" in ran.scalings else ""
        return "confirmed", note
    if not gemm.quantizable:
        return "outside", f"no recipe reaches it ({gemm.family})"
    if ran.precision == UNKNOWN:
        return "unproven", "the operands' format is not known"
    if asked.precision == "fp8-block" and ran.precision == "mxfp8":
        return "emulated", "block scaling ran as MXFP8"
    if audit.card.baseline and (asked.precision, ran.precision) == BY_MODEL:
        return "by_request", IN_FP16
    wider = BITS[ran.precision] > BITS.get(asked.precision, 0)
    fell = _how_it_fell(asked.precision, ran.precision, str(ran))
    if wider and seen.lost_in_recomputation and (outcome.recomputed or gemm.role != "fprop"):
        return "fallback", f"{RECOMPUTED}: {fell}"
    if wider and outcome.in_region is False and audit.card.scaling != "none":
        return "by_request", "the module ran outside the quantized region (a region that the model switches off)"
    if wider and gemm.role != "fprop" and audit.backward_override and seen.quantized_forward:
        return "by_request", f"{audit.backward_override} asks for a wide backward pass"
    return "fallback", "; ".join(text for text in (_cause(outcome), fell) if text)


def _cause(outcome: Outcome) -> str:
    """Why these operands are not the recipe's, where the engine can tell."""
    if outcome.other_recipe:
        return f"the model opens a region of its own, with {outcome.other_recipe}, inside the recipe's"
    if outcome.stale_recipe:
        return (
            f"its quantizers were built for {outcome.stale_recipe}: Transformer Engine keeps them as long as the "
            "class of the recipe stays the same (its issue 3157)"
        )
    return ""


def _by_software(
    asked: Operands, outcome: Outcome, sight: KernelSight | None, audit: Audit
) -> tuple[str, VerdictWord, str]:
    """(ran, verdict, why) of operands that a custom quantizer's own code multiplied: kernels alone tell in what."""
    operands = str(outcome.operands)
    if sight is None or not sight.known:
        return operands, "unproven", f"{SOFTWARE}, and {_silence(sight, audit)}"
    multiplied = " and ".join(sight.known)
    strange = [precision for precision in sight.known if not kernel_fits(asked, precision)]
    if not strange and UNKNOWN not in sight.counts and same(asked, outcome.operands):
        return operands, "confirmed", ""
    ran = f"{operands}, multiplied in {multiplied}"
    if not strange:
        return ran, "unproven", f"{SOFTWARE}, and not every kernel name is known"
    worst = max(strange, key=lambda precision: BITS.get(precision, 0))
    return ran, "fallback", f"no {shown(asked.precision)} kernel ran: {SOFTWARE} in {shown(worst)}"


def _how_it_fell(asked: str, ran: str, text: str) -> str:
    asked_bits, ran_bits = BITS.get(asked, 0), BITS[ran]
    if ran_bits > asked_bits:
        return f"ran wider than asked: {ran_bits} bits an element, not {asked_bits}"
    if ran_bits < asked_bits:
        return f"ran narrower than asked: {ran_bits} bits an element, not {asked_bits}"
    return f"ran another recipe: {text}"


def _by_kernels_alone(
    gemm: Gemm, asked: Operands, sight: KernelSight | None, audit: Audit
) -> tuple[str, VerdictWord, str]:
    """(ran, verdict, why) where no operand was seen."""
    outside = not gemm.quantizable and not audit.card.baseline
    if sight is None or not sight.known:
        if outside:
            return UNKNOWN, "outside", f"no recipe reaches it ({gemm.family}); what it ran in was not seen"
        names = _silence(sight, audit)
        return UNKNOWN, "unproven", f"its operands were not seen, and {names or 'no kernel was'}"
    ran = " and ".join(sight.known)
    if outside:
        return ran, "outside", f"no recipe reaches it ({gemm.family})"
    if UNKNOWN in sight.counts:
        return (
            f"{ran} and unknown",
            "unproven",
            "its operands were not seen, and not every kernel name is known",
        )
    strange = [precision for precision in sight.known if not kernel_fits(asked, precision)]
    if strange and len(sight.known) > 1 and (gemm.module, gemm.role) != sight.place:
        return ran, "unproven", f"the kernels of {sight.place[0]} differ, and which are its own is not known"
    formats = sight.operands - {tuple(sorted(asked.formats))}
    if not strange and formats and asked.precision == "fp8":
        text = " x ".join(sorted(formats)[0])
        return text, "fallback", f"ran another recipe: a kernel for {text} (by kernel names alone)"
    if not strange:
        note = "; a kernel name does not tell delayed from current scaling" if asked.precision == "fp8" else ""
        return ran, "confirmed", f"by kernel names alone{note}"
    if asked.precision == "fp8-block" and strange == ["mxfp8"]:
        return ran, "emulated", "block scaling ran as MXFP8 (by kernel names alone)"
    worst = max(strange, key=lambda precision: BITS.get(precision, 0))
    if worst not in BITS:
        return ran, "unproven", f"a kernel of precision {worst} ran"
    if audit.card.baseline and (asked.precision, worst) == BY_MODEL:
        return ran, "by_request", f"{IN_FP16} (by kernel names alone)"
    wider = BITS[worst] > BITS.get(asked.precision, 0)
    if wider and gemm.role != "fprop" and audit.backward_override:
        return ran, "by_request", f"{audit.backward_override} asks for a wide backward pass"
    return ran, "fallback", f"{_how_it_fell(asked.precision, worst, worst)} (by kernel names alone)"


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _tf32(sight: KernelSight | None) -> str:
    return "its kernels multiply in TF32" if sight is not None and "tf32" in sight.known else ""


def _silence(sight: KernelSight | None, audit: Audit) -> str:
    """Why the kernels say nothing."""
    if not audit.kernels_speak:
        return "operators on a CPU do not tell a precision"
    if sight is None:
        return "no kernel of this module and role was traced"
    return "its kernels' names tell no precision"


def _coverage(
    rows: Sequence[VerdictRow],
    reachable: Sequence[bool],
    witnessed: bool,
    facts: tuple[str, ...],
    recipe: str,
) -> tuple[Figure, Figure]:
    if not rows:
        missing = Figure.missing(SHARE, "no linear-layer GEMM was captured")
        return missing, missing
    if not witnessed:
        missing = Figure.missing(SHARE, f"no traced step of {recipe} was recorded, so nothing says what ran")
        return missing, missing
    # A clamp for rounding only: the shares sum to one.
    whole = Figure(min(1.0, math.fsum(_confirmed(rows))), SHARE, "derived", facts=facts)
    inside = [row for row, reach in zip(rows, reachable, strict=True) if reach]
    below = math.fsum(row.share for row in inside)
    if below <= 0:
        return whole, Figure.missing(SHARE, "the model has no GEMM that a recipe can reach")
    return whole, Figure(min(1.0, math.fsum(_confirmed(inside)) / below), SHARE, "derived", facts=facts)


def _confirmed(rows: Iterable[VerdictRow]) -> list[float]:
    return [row.share for row in rows if row.verdict == "confirmed"]
