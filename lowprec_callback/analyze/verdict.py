"""Asked against ran, for each module and role; unknown is `unproven`, never `confirmed`.

"Ran" is a word about the timed steps, so no GEMM is `confirmed` without kernels of a step that ran as they did
(`timed`), one for each of its calls (`balance`). Operands, the library's log and memory say why, which scaling it was,
and when something does not fit; what they say of a step that ran uncompiled is no proof of a compiled one.

Coverage is counted in FLOPs: a GEMM of M x K x N takes 2 M K N a call, and

    coverage = sum of 2 M K N calls over confirmed rows / the same over all linear-layer GEMMs of a step  [1].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowprec_callback.analyze.balance import Balance, Demand, Kind, balance, fits
from lowprec_callback.analyze.library import LibrarySight, LibraryWitness, converted, merged, remark
from lowprec_callback.analyze.precision import BITS, UNKNOWN, Operands, same, scaled_alike, shown
from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.analyze.stored_bytes import stored_witness
from lowprec_callback.analyze.timed import NOT_AS_TIMED, Timed
from lowprec_callback.analyze.verdict_summary import OPERANDS_ALONE, Told, summary
from lowprec_callback.analyze.witnesses import CUSTOM_ENTRY, OperandWitness, Outcome
from lowprec_callback.recording import Card, Dispatch, Gemm, LibraryCall, Role
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


NO_LIBRARY = LibraryWitness({})
"""Where the library's log was not recorded."""


def verdict(
    gemms: Sequence[tuple[int, Gemm]],
    dispatches: Sequence[tuple[int, Dispatch]],
    timed: Timed,
    audit: Audit,
    contradictions: Iterable[str] = (),
    slow_paths: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
    library: LibraryWitness = NO_LIBRARY,
    spare: Mapping[str, int] | None = None,
) -> Verdict:
    """One row for each GEMM of a step (two or more where its calls differed), and the coverage.

    Args:
        gemms: the captured shapes.
        dispatches: operands that reached the library in a watched step.
        timed: the product kernels of steps that ran as the timed ones.
        audit: what was asked for.
        contradictions: what the benchmark's kernels contradict.
        slow_paths: told beside the verdict.
        beside: products of no linear layer, in words.
        library: the library's own log of the watched step.
        spare: products of no linear layer: how many a step has in each precision.
    """
    listed = [gemm for _, gemm in gemms]
    strangers = _uncaptured(listed, [fact for _, fact in dispatches], library) if listed else []
    captured = [*listed, *strangers]
    shapes = Counter((gemm.module, gemm.role) for gemm in captured)
    witness = OperandWitness.of(fact for _, fact in dispatches)
    memory = stored_witness((fact for _, fact in dispatches), captured)
    eager = not timed.compiled

    def reached(gemm: Gemm, only_shape: bool) -> tuple[list[Outcome], LibrarySight | None]:
        """What was seen at the library's entry, and in the library's own log."""
        return witness.outcomes(gemm, only_shape), library.sight(gemm, only_shape)

    seen_in_watched = [reached(gemm, shapes[gemm.module, gemm.role] > 1) for gemm in captured]
    captured = [_as_often_as_seen(gemm, _either(*found)) for gemm, found in zip(captured, seen_in_watched, strict=True)]
    quantized_forward = {
        gemm.module
        for gemm in captured
        if gemm.role == "fprop" and any(outcome.operands.quantized for outcome in _either(*reached(gemm, False)))
    }
    demands = [_demand(gemm, audit, witness) for gemm in captured]
    balanced = [balance(demands, step, spare) for step in timed.steps]
    by_kernels: list[Balance | None] = [None] * len(captured)
    if balanced:
        by_kernels = [_least(steps) for steps in zip(*(each.rows for each in balanced), strict=True)]
    captured = [
        replace(gemm, calls=max(gemm.calls, kernels.calls if kernels else 0))
        for gemm, kernels in zip(captured, by_kernels, strict=True)
    ]
    total = math.fsum(flops(gemm) for gemm in captured)
    strays = max((each.strays for each in balanced), key=lambda found: found.total(), default=Counter())
    rows: list[VerdictRow] = []
    reachable: list[bool] = []
    learned = False
    disagreements = list(contradictions)
    for gemm, found, seen_by_kernels in zip(captured, seen_in_watched, by_kernels, strict=True):
        entered, logged = found if eager else ([], None)
        asked = Operands.asked(audit.card, gemm.role)
        clashes = [_clash(gemm, asked, entered, seen_by_kernels)]
        stored = memory.get((gemm.module, gemm.role)) if eager else None
        if stored is not None and clashes[0] is None:
            clashes.append(stored.misfit)
        by_library = bool(entered) and not any(outcome.software for outcome in entered)
        if logged is not None and by_library and (odds := logged.against(entered)) is not None:
            clashes.append(f"{gemm.module} {gemm.role}: {odds}")
        if not entered and logged is not None:
            clashes.append(_clash(gemm, asked, logged.outcomes, seen_by_kernels))
        disagreements += [clash for clash in clashes if clash]
        seen = Seen(
            entered,
            seen_by_kernels,
            any(clashes),
            gemm.module in quantized_forward,
            witness.lost_in_recomputation(gemm.module),
            logged,
            library.why_silent if eager else "",
            timed.silence or _compiled(timed.compiled),
        )
        for finding in _findings(gemm, seen, audit):
            if stored and "operands" in finding.witnesses:
                finding.witnesses["memory"] = stored.text
            rows.append(_row(gemm, finding, audit, total))
            reachable.append(gemm.quantizable)
        learned = learned or bool(seen_by_kernels and seen_by_kernels.learned)
    if strangers:
        places = sorted({(gemm.module, gemm.role) for gemm in strangers})
        names = ", ".join(f"{module or '(unknown module)'} {role}" for module, role in places[:3])
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        disagreements.append(f"GEMMs reached the library that the capture did not see: {names}{more}")
    over = _in_words(strays)
    if over:
        disagreements.append(f"the timed step ran {over} that belong to no linear layer that was captured")

    facts = (
        *lines_of("gemm", (n for n, _ in gemms)),
        *lines_of("dispatch", (n for n, _ in dispatches)),
        *lines_of("library_call", library.lines),
    )
    asked_for = Operands.asked(audit.card, "fprop")
    coverage, te_coverage = _coverage(
        rows, reachable, bool(dispatches or timed.steps or library.found), facts, audit.card.recipe, over
    )
    return Verdict(
        coverage=coverage,
        te_coverage=te_coverage,
        rows=tuple(rows),
        summary=summary(rows, reachable, coverage, shown(asked_for.precision), Told(audit.te, learned, over)),
        disagreements=tuple(dict.fromkeys(disagreements)),
        slow_paths=slow_paths,
        beside=beside,
    )


def _demand(gemm: Gemm, audit: Audit, witness: OperandWitness) -> Demand:
    parent, _, last = gemm.module.rpartition(".")
    found = witness.found.get((gemm.module, gemm.role), ())
    return Demand(
        module=gemm.module,
        role=gemm.role,
        calls=gemm.calls,
        asked=Operands.asked(audit.card, gemm.role),
        reachable=gemm.quantizable or audit.card.baseline,
        # LayerNormMLP is one module that runs two linears; a capture's ranges may know the one only.
        parent=parent if last in ("fc1", "fc2") else "",
        recomputed=sum(dispatch.calls for dispatch in found if dispatch.recomputed),
        groups=gemm.groups,
        software=any(dispatch.entry == CUSTOM_ENTRY for dispatch in found),
    )


def _uncaptured(captured: Sequence[Gemm], dispatches: Sequence[Dispatch], library: LibraryWitness) -> list[Gemm]:
    """GEMMs that reached the library at places that the capture did not see: they are part of the step too."""
    found: dict[tuple[str, Role, int, int, int], Gemm] = {}
    known = {(gemm.module, gemm.role) for gemm in captured}

    def count(call: Dispatch | LibraryCall, family: str, quantizable: bool) -> None:
        if (call.module, call.role) not in known:
            key = (call.module, call.role, call.m, call.k, call.n)
            before = found.get(key) or Gemm(*key, calls=0, family=family, quantizable=quantizable)
            found[key] = replace(before, calls=before.calls + call.calls)

    for dispatch in dispatches:
        count(dispatch, dispatch.family, not dispatch.entry.startswith("aten::"))
    known |= {(gemm.module, gemm.role) for gemm in found.values()}
    for calls in library.found.values():
        for call in calls:
            count(call, "unknown", True)
    return list(found.values())


def _either(entered: Sequence[Outcome], logged: LibrarySight | None) -> Sequence[Outcome]:
    """What was seen at the library's entry; where nothing was, what its log says."""
    return entered or (logged.outcomes if logged else ())


def _as_often_as_seen(gemm: Gemm, outcomes: Sequence[Outcome]) -> Gemm:
    """A GEMM that reached the library more often than the capture saw is called that often."""
    return replace(gemm, calls=max(gemm.calls, round(math.fsum(outcome.calls for outcome in outcomes))))


def _least(steps: Sequence[Balance]) -> Balance:
    """Of several timed steps the one that proves least: all must have run as asked. With the most calls of any."""
    calls = max(found.calls for found in steps)
    return min((replace(found, calls=calls) for found in steps), key=lambda found: found.proven)


def _compiled(modules: Sequence[str]) -> str:
    if not modules:
        return ""
    more = f" and {len(modules) - 2} more" if len(modules) > 2 else ""
    return f"{' and '.join(modules[:2])}{more} ran compiled, where what operands were in an uncompiled step is no proof"


def _in_words(kinds: Counter[Kind]) -> str:
    """`3 GEMM kernels (bf16)`; empty for none."""
    if not kinds.total():
        return ""
    names = ", ".join(sorted({str(kind) for kind in kinds}))
    return f"{kinds.total()} GEMM kernel{'s' * (kinds.total() != 1)} ({names})"


def flops(gemm: Gemm) -> float:
    """2 M K N calls [FLOP], the same for all three roles. M of a grouped call sums over its groups."""
    return 2.0 * gemm.m * gemm.k * gemm.n * gemm.calls


@dataclass(frozen=True)
class Seen:
    """All that was seen of one GEMM."""

    outcomes: Sequence[Outcome]
    kernels: Balance | None
    """What the kernels of a timed step prove; None if no such step was traced."""
    clash: bool
    """Whether the witnesses contradict each other."""
    quantized_forward: bool
    """Whether the same module's forward GEMM ran quantized."""
    lost_in_recomputation: bool
    """Whether it ran quantized in forward, and wide when checkpointing made it again in backward."""
    library: LibrarySight | None = None
    library_silence: str = ""
    """Why the library's log may say nothing of it."""
    silence: str = ""
    """Why kernels, or operands, may say nothing of it."""

    def kernels_text(self, asked: Operands) -> dict[str, str]:
        """The kernels' word as a witness; empty where their names tell nothing."""
        if self.kernels is None:
            return {}
        counts = Counter({str(kind): n for kind, n in self.kernels.others.items() if kind.known})
        if self.kernels.proven:
            counts[str(Kind.of(asked))] += self.kernels.proven
        learned = ", by names that the benchmark taught" if self.kernels.learned else ""
        text = ", ".join(f"{name} ({n} kernel{'s' * (n != 1)})" for name, n in sorted(counts.items()))
        return {"kernels": text + learned} if text else {}


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
    """One finding for each kind of operands that its calls got, and one for calls that nothing shows."""
    asked, logged = Operands.asked(audit.card, gemm.role), seen.library
    kernels = seen.kernels_text(asked)
    outcomes = _either(seen.outcomes, logged)
    if not outcomes:
        return _merged(_by_kernels_alone(gemm, asked, seen, audit))

    watched = math.fsum(outcome.calls for outcome in outcomes)
    due = max(gemm.calls, watched, 1.0)
    mx = seen.kernels is not None and any(kind.precision == "mxfp8" for kind in seen.kernels.others)
    as_blocks = seen.kernels is not None and seen.kernels.proven > 0
    emulated = converted(asked.precision, logged) or (asked.precision == "fp8-block" and mx)
    emulated = emulated and not as_blocks
    found: list[Finding] = []
    word: VerdictWord
    for entered in outcomes:
        # What Python code multiplies instead, it may do by products of the library's: they are not the GEMM asked for.
        heard = logged is not None and not entered.software and logged.heard_all(entered)
        outcome = replace(entered, operands=merged(entered.operands, logged)) if logged and heard else entered
        ran = str(outcome.operands)
        if seen.clash:
            word, why = "unproven", "the witnesses disagree"
        elif outcome.software:
            ran, word, why = _by_software(asked, outcome, seen)
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
            found += [
                replace(
                    finding,
                    why="kernel names tell the format, operands the scaling"
                    if finding.word == "confirmed"
                    else finding.why,
                    witnesses={"operands": str(entered.operands), **finding.witnesses},
                    part=finding.part * outcome.calls / due,
                )
                for finding in _by_kernels_alone(gemm, asked, seen, audit)
            ]
            continue
        else:
            word, why = _judge(gemm, asked, outcome, audit, seen)
            why = _joined(
                "" if seen.outcomes else "by the library's log alone",
                why,
                _tf32(seen.kernels),
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
    return _merged(_shown_by_kernels(found, seen))


def _shown_by_kernels(findings: Sequence[Finding], seen: Seen) -> list[Finding]:
    """Only so many calls are confirmed as have kernels of their own in a timed step."""
    confirmed = math.fsum(finding.part for finding in findings if finding.word == "confirmed")
    shown_part = seen.kernels.proven / seen.kernels.calls if seen.kernels and seen.kernels.calls else 0.0
    if confirmed <= shown_part + 1e-9:
        return list(findings)
    why = (seen.kernels.why if seen.kernels else "") or seen.silence or NOT_AS_TIMED
    kept: list[Finding] = []
    for finding in findings:
        if finding.word != "confirmed":
            kept.append(finding)
            continue
        part = finding.part * shown_part / confirmed
        if part > 0:
            kept.append(replace(finding, part=part))
        alone = {name: text for name, text in finding.witnesses.items() if name != "kernels"}
        kept.append(Finding(finding.ran, "unproven", f"{OPERANDS_ALONE}: {why}", alone, finding.part - part))
    return kept


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Calls that differ only in what made no difference (a forward and its sound recomputation) as one finding."""
    parts: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.ran, finding.word, finding.why)
        before = parts.get(key)
        parts[key] = finding if before is None else replace(before, part=before.part + finding.part)
    return list(parts.values())


def _clash(gemm: Gemm, asked: Operands, outcomes: Sequence[Outcome], kernels: Balance | None) -> str | None:
    """If the kernels cannot have multiplied the operands that were seen: a sentence that says so.

    Both ways: a kernel that fits no operands, and operands in more calls than there are kernels that fit them.
    """
    if kernels is None or any(outcome.software for outcome in outcomes):
        return None  # Python code multiplies as it likes: `_by_software` says what it did
    seen = [outcome for outcome in outcomes if outcome.operands.precision != UNKNOWN]
    if not seen:
        return None
    text = " and ".join(dict.fromkeys(str(outcome.operands) for outcome in seen))
    ran = Counter({kind: n for kind, n in kernels.others.items() if kind.known})
    if kernels.proven:
        ran[Kind.of(asked)] += kernels.proven
    where = f"{gemm.module} {gemm.role}"
    for kind in sorted(ran, key=str):
        emulation = kind.precision == "mxfp8" and any(outcome.operands.precision == "fp8-block" for outcome in seen)
        if not emulation and not any(fits(outcome.operands, kind) for outcome in seen):
            shape = f"of precision {kind.precision}" if kind.precision != asked.precision else f"for {kind}"
            return f"{where}: operands were {text}, but a kernel {shape} ran"
    if kernels.unseen or len(seen) != len(outcomes) or any(kind.precision == "mxfp8" for kind in ran):
        return None
    for outcome in seen:
        due, have = outcome.calls, sum(n for kind, n in ran.items() if fits(outcome.operands, kind))
        if have < due - 1e-9 and len(seen) > 1:
            return f"{where}: operands were {outcome.operands} in {due:.3g} calls, but {have} kernels for them ran"
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


def _by_software(asked: Operands, outcome: Outcome, seen: Seen) -> tuple[str, VerdictWord, str]:
    """(ran, verdict, why) of operands that a custom quantizer's own code multiplied: kernels alone tell in what."""
    operands = str(outcome.operands)
    kernels = seen.kernels
    known = [kind for kind in kernels.others if kind.known] if kernels is not None else []
    if kernels is None or not (kernels.proven or known):
        why = kernels.why if kernels is not None else seen.silence
        return operands, "unproven", f"{SOFTWARE}, and {why or 'the names of its kernels tell no precision'}"
    if kernels.proven == kernels.calls and same(asked, outcome.operands):
        return operands, "confirmed", ""
    names = sorted({kind.precision for kind in known} | ({asked.precision} if kernels.proven else set()))
    ran = f"{operands}, multiplied in {' and '.join(names)}"
    if not known:
        return ran, "unproven", f"{SOFTWARE}, and not every kernel was seen, or its name is not known"
    worst = max(known, key=lambda kind: BITS.get(kind.precision, 0))
    return ran, "fallback", f"no {shown(asked.precision)} kernel ran: {SOFTWARE} in {shown(worst.precision)}"


def _how_it_fell(asked: str, ran: str, text: str) -> str:
    asked_bits, ran_bits = BITS.get(asked, 0), BITS[ran]
    if ran_bits > asked_bits:
        return f"ran wider than asked: {ran_bits} bits an element, not {asked_bits}"
    if ran_bits < asked_bits:
        return f"ran narrower than asked: {ran_bits} bits an element, not {asked_bits}"
    return f"ran another recipe: {text}"


def _by_kernels_alone(gemm: Gemm, asked: Operands, seen: Seen, audit: Audit) -> list[Finding]:
    """What the kernels of a timed step say by themselves: a finding for each kind that its calls ran in."""
    kernels, told = seen.kernels, seen.kernels_text(asked)
    outside = not gemm.quantizable and not audit.card.baseline
    others = [kind for kind in kernels.others if kind.known] if kernels is not None else []
    if outside:
        ran = " and ".join(sorted(str(kind) for kind in others)) or UNKNOWN
        unseen = "" if others else "; what it ran in was not seen"
        return [Finding(ran, "outside", f"no recipe reaches it ({gemm.family}){unseen}", told, 1.0)]
    if kernels is None or not kernels.calls:
        why = seen.silence or NOT_AS_TIMED if kernels is None else "a step calls it zero times"
        return [Finding(UNKNOWN, "unproven", f"its operands were not seen, and {why}", {}, 1.0)]
    found: list[Finding] = []
    because = _joined("by kernel names alone", seen.silence)
    if kernels.proven:
        note = "; a kernel name does not tell delayed from current scaling" if asked.precision == "fp8" else ""
        tf32 = _tf32(kernels)
        why = f"{because}{note}{'; ' + tf32 if tf32 else ''}"
        found.append(Finding(str(Kind.of(asked)), "confirmed", why, told, kernels.proven / kernels.calls))
    for kind, count in sorted(kernels.others.items(), key=lambda item: str(item[0])):
        word, why = other_kind(gemm.role, asked, kind, baseline=audit.card.baseline, override=audit.backward_override)
        found.append(Finding(str(kind), word, f"{why} ({because})", told, count / kernels.calls))
    if kernels.unseen:
        why = _joined(kernels.why or "no kernel was found for its calls", seen.library_silence)
        found.append(Finding(UNKNOWN, "unproven", why, told, kernels.unseen / kernels.calls))
    return found


def other_kind(
    role: str, asked: Operands, kind: Kind, *, baseline: bool, override: str | None
) -> tuple[VerdictWord, str]:
    """The verdict on calls whose kernels are of a kind that was not asked for, and why."""
    if not kind.known:
        return "unproven", "its kernels' names tell no precision"
    if kind.precision == asked.precision or kind.precision not in BITS:
        return "fallback", f"ran another recipe: a kernel for {kind}"
    if asked.precision == "fp8-block" and kind.precision == "mxfp8":
        return "emulated", "block scaling ran as MXFP8"
    if baseline and (asked.precision, kind.precision) == BY_MODEL:
        return "by_request", IN_FP16
    if BITS[kind.precision] > BITS.get(asked.precision, 0) and role != "fprop" and override:
        return "by_request", f"{override} asks for a wide backward pass"
    return "fallback", _how_it_fell(asked.precision, kind.precision, kind.precision)


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _tf32(kernels: Balance | None) -> str:
    tf32 = kernels is not None and (kernels.tf32 or any(kind.precision == "tf32" for kind in kernels.others))
    return "its kernels multiply in TF32" if tf32 else ""


def _coverage(
    rows: Sequence[VerdictRow],
    reachable: Sequence[bool],
    witnessed: bool,
    facts: tuple[str, ...],
    recipe: str,
    over: str,
) -> tuple[Figure, Figure]:
    why = ""
    if not rows:
        why = "no linear-layer GEMM was captured"
    elif not witnessed:
        why = f"no traced step of {recipe} was recorded, so nothing says what ran"
    elif math.fsum(row.share for row in rows) <= 0:
        why = "the captured GEMMs multiply nothing (M is 0)"
    elif over and _confirmed(rows):
        why = f"the timed step ran {over} of no captured layer: what share of its FLOPs they are is not known"
    if why:
        missing = Figure.missing(SHARE, why)
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
