"""What the ranks of one session tell each other: at its start what each can run, at its end what each measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowprec_callback.engines.base import Engine, NotRun
from lowprec_callback.failures import in_words
from lowprec_callback.recipes import RecipeCard
from lowprec_callback.recording import RankSummary, Recorder, decode, encode
from lowprec_callback.sweep.ranks import RankError, Ranks, first_reason, name_of


@dataclass(frozen=True)
class Found:
    """What one rank finds when the session opens."""

    host: str
    engine: str
    why_engine: str
    able: list[str]
    refused: dict[str, tuple[str, str]]
    """Recipe to (reason, who says so)."""
    no_trace: str | None
    no_profiler: str | None
    nvtx: bool

    @staticmethod
    def of(
        ranks: Ranks,
        engine: Engine,
        sorted_out: tuple[list[RecipeCard], list[tuple[RecipeCard, NotRun]]],
        no_trace: str | None,
        no_profiler: str | None,
        nvtx: bool,
    ) -> dict[str, Any]:
        """As it travels to the other ranks."""
        able, refused = sorted_out
        reasons = {card.name: (reason.reason, reason.source) for card, reason in refused}
        names = [card.name for card in able]
        return asdict(Found(ranks.host, engine.name, engine.why, names, reasons, no_trace, no_profiler, nvtx))


@dataclass(frozen=True)
class Agreed:
    """What holds for all ranks."""

    able: list[str]
    """Recipes that every rank can run."""
    refused: dict[str, NotRun]
    no_trace: str | None
    """Why kernels are not traced."""
    no_profiler: str | None
    """Why no session of torch.profiler may be opened at all."""
    nvtx: bool


def agree(answers: Sequence[dict[str, Any]]) -> Agreed:
    """From what each rank found, in the order of ranks, the same on every rank.

    A recipe runs if it can on every rank; else its reason is that of the lowest rank that has one, and names it. There
    are no traced steps if one rank cannot trace.

    Raises:
        RankError: ranks run the model by different engines.
    """
    found = [Found(**answer) for answer in answers]
    hosts = [each.host for each in found]
    for rank, each in enumerate(found):
        if each.engine != found[0].engine:
            raise RankError(
                f"all ranks need the same engine, but {name_of(0, hosts[0])} has {found[0].engine} "
                f"({found[0].why_engine}) and {name_of(rank, each.host)} has {each.engine} ({each.why_engine})"
            )
    refused: dict[str, NotRun] = {}
    for name in [*found[0].able, *found[0].refused]:
        reason = first_reason([{key: text for key, (text, _) in each.refused.items()} for each in found], hosts, name)
        if reason is not None:
            source = next(each.refused[name][1] for each in found if name in each.refused)
            refused[name] = NotRun(reason, source)

    def first(reasons: Iterable[str | None]) -> str | None:
        return first_reason([{} if each is None else {"": each} for each in reasons], hosts, "")

    return Agreed(
        able=[name for name in found[0].able if name not in refused],
        refused=refused,
        no_trace=first(each.no_trace for each in found),
        no_profiler=first(each.no_profiler for each in found),
        nvtx=any(each.nvtx for each in found),
    )


def gather_summaries(ranks: Ranks, recorder: Recorder, device: str) -> list[RankSummary]:
    """Each rank's own measurements, on rank zero; empty on the others. Waits for all ranks."""
    from lowprec_callback.analyze.rank_summary import summarise

    try:
        own = summarise(recorder.snapshot(), ranks.rank, ranks.host, device)
    except Exception as error:  # the others wait for an answer, whatever happens here
        problem = f"its measurements could not be summed up ({in_words(error)})"
        own = RankSummary(ranks.rank, ranks.host, device, problems=(problem,))
    texts = ranks.gather(encode(own))
    if ranks.rank:
        return []
    return [fact for text in texts if isinstance(fact := decode(text), RankSummary)]
