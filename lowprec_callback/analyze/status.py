"""How a run went: whether it came to its end, what is missing if it did not, and what went wrong on the
way."""

from __future__ import annotations

from collections import Counter

from lowprec_callback.recording import (
    Dispatch,
    End,
    Gemm,
    GemmTime,
    Imported,
    LibraryLog,
    Plan,
    Problem,
    Recording,
    Refusal,
    Restored,
    Sampled,
    StepTime,
    Trace,
    Trial,
)


def status_of(recording: Recording) -> tuple[str, str | None]:
    """(one word, the reason): `finished`, `shortened`, `interrupted` or `failed`. No `End`: interrupted."""
    end = recording.last(End)
    if end is None:
        return "interrupted", "the Recording has no end: the run was killed, or is still going"
    return end.status, end.reason


def unfinished(recording: Recording) -> str:
    """What an interrupted run did not get to, as a sentence."""
    status, reason = status_of(recording)
    start = f"The run {'failed' if status == 'failed' else 'was interrupted'}{f' ({reason})' if reason else ''}"
    plan = recording.last(Plan)
    if plan is None:
        return f"{start} before it had a plan."
    refused = {refusal.recipe for refusal in recording.of(Refusal)}
    missing: list[str] = []
    if not recording.of(Gemm):
        missing.append("the capture of GEMMs")
    elif not recording.of(GemmTime):
        missing.append("the GEMM benchmark")
    timed = Counter(step.recipe for step in recording.of(StepTime))
    planned = plan.rounds * plan.timed_steps
    short = [name for name in plan.recipes if name not in refused and timed[name] < planned]
    if short:
        counts = ", ".join(f"{name} {timed[name]} of {planned}" for name in short)
        missing.append(f"timed steps ({counts})")
    traced = Counter(trace.recipe for trace in recording.of(Trace))
    untraced = [name for name in plan.recipes if name not in refused and traced[name] < plan.traced_steps]
    if untraced:
        counts = ", ".join(f"{name} {traced[name]} of {plan.traced_steps}" for name in untraced)
        missing.append(f"traced steps ({counts})")
    watched = {dispatch.recipe for dispatch in recording.of(Dispatch)}
    unseen = [name for name in plan.recipes if name not in refused and name not in watched]
    if unseen and plan.traced_steps:
        missing.append(f"the operand witness ({', '.join(unseen)})")
    compared = {trial.recipe for trial in recording.of(Trial) if trial.step == plan.guard_steps - 1}
    unguarded = [name for name in plan.recipes if name not in refused and name not in compared]
    if unguarded and plan.guard_steps:
        missing.append(f"the numerics guard ({', '.join(unguarded)})")
    if not missing:
        return f"{start}; every measurement of the plan was taken before."
    return f"{start}. Missing: {'; '.join(missing)}."


def problems(recording: Recording, why: str | None) -> tuple[str, ...]:
    """Everything that went wrong, in order, each as a sentence."""
    found = [f"{problem.where}: {problem.message}" for problem in recording.of(Problem)]
    unheard: dict[str, list[str]] = {}
    for log in recording.of(LibraryLog):
        if log.silent is not None:
            unheard.setdefault(log.silent, []).append(log.recipe)
    for reason, recipes in unheard.items():
        found.append(f"the GEMM library's own log was not listened to ({', '.join(recipes)}): {reason}")
    timed = {step.recipe for step in recording.of(StepTime) if step.discarded is None}
    for refusal in recording.of(Refusal):
        if refusal.recipe in timed:
            found.append(f"{refusal.recipe} was given up after some steps: {refusal.reason} ({refusal.source})")
    discarded = Counter((step.recipe, step.discarded) for step in recording.of(StepTime) if step.discarded)
    for (recipe, reason), count in discarded.items():
        found.append(f"{count} timed step{'s' if count > 1 else ''} of {recipe} do not count: {reason}")
    if why:
        found.append(why)
    if recording.torn:
        found.append(recording.torn)
    return tuple(dict.fromkeys(found))


def restored_text(recording: Recording) -> str | None:
    """What was put back, in words."""
    restored = recording.last(Restored)
    if restored is None:
        return None
    if not restored.asked:
        return "no, as asked"
    text = f"yes: {', '.join(restored.parts)}" if restored.parts else "yes"
    return f"{text} ({restored.verified})" if restored.verified else text


def import_text(imported: Imported) -> str:
    """Where an imported capture's numbers come from, in one line."""
    who = {
        "ranges": "recipes as its ranges name them",
        "user": "recipe as given by the user",
        "kernels": f"recipe inferred: {imported.why_recipe}",
    }[imported.recipe_from]
    return (
        f"a capture of {imported.tool}: {imported.placed:,} of {imported.kernels:,} kernels and copies with their "
        f"launch; steps: {imported.steps}; {who}; every step is timed, with the profiler attached; time by kind of "
        f"work {imported.traced}"
    )


_STOPPED = {
    "precise": "then every step was known well enough",
    "rounds": "the most that were asked for",
    "steps": "the fit has no more steps to spare",
    "seconds": "more of them had taken a minute",
}


def rounds_text(sampled: Sampled | None, plan: Plan | None) -> str:
    """What became of the plan's rounds, as a clause; empty where they were as planned."""
    if sampled is None or plan is None or (sampled.rounds == plan.rounds and sampled.stopped in ("planned", "precise")):
        return ""
    width = f"; the least certain step is known to ±{sampled.widest:.1%}" if sampled.widest is not None else ""
    ran = f"{sampled.rounds} rounds ran: " if sampled.rounds > plan.rounds else "no more rounds ran: "
    return f"; {ran}{_STOPPED.get(sampled.stopped, sampled.stopped)}{width}"


def plan_text(plan: Plan | None) -> str:
    """The plan in one line."""
    if plan is None:
        return "unknown: the Recording ends before the plan was made"
    batches = f"{plan.micro_batches} micro-batches a step; " if plan.micro_batches > 1 else ""
    guard = f"numerics guard of {_count(plan.guard_steps, 'step')} a recipe; " if plan.guard_steps else ""
    return (
        f"{_count(plan.rounds, 'round')} of {', '.join(plan.recipes)} in shuffled order (seed {plan.seed}), "
        f"each {plan.settle_steps} settling and {plan.timed_steps} timed steps; "
        f"{_count(plan.traced_steps, 'traced step')} a recipe; "
        f"{guard}{batches}{_count(plan.steps, 'optimizer step')} in all{f', on {plan.batches}' if plan.batches else ''}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
