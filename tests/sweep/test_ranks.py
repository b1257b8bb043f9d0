"""Ranks decide together: every rank learns of every failure, and all come to the same decision."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from lowprec_callback import recording
from lowprec_callback.engines.base import NotRun
from lowprec_callback.recording import Loss, Recorder, RecordingError, decode, encode
from lowprec_callback.sweep import session
from lowprec_callback.sweep.rank_session import Agreed, Found, agree
from lowprec_callback.sweep.ranks import Alone, RankError, Ranks, StrategyRanks, first_reason, why_not
from tests.show.samples import cpu


class Hall:
    """A strategy for threads: what its collectives need to meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._slots: list[Any] = [None] * size

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        met = list(self._slots)
        self._barrier.wait()
        return met


class Seat:
    """The strategy of one of the threads."""

    root_device = torch.device("cpu")

    def __init__(self, hall: Hall, rank: int) -> None:
        self._hall, self._rank = hall, rank

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._hall.meet(self._rank, tensor))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._hall.meet(self._rank, obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        met = self._hall.meet(self._rank, decision)
        return sum(met) == len(met) if all else any(met)


def in_step(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returned or raised on each rank; every rank in a thread of its own."""
    hall, found = Hall(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(StrategyRanks(Seat(hall, rank), rank, size))
        except Exception as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def test_values_of_any_length_come_in_the_order_of_ranks() -> None:
    values = ["", {"a": [1, 2.5, None]}, "x" * 5000, "ünïcode \u2603"]
    assert in_step(4, lambda ranks: ranks.gather(values[ranks.rank])) == [values] * 4
    assert in_step(3, lambda ranks: ranks.from_zero(f"of {ranks.rank}")) == ["of 0"] * 3
    assert in_step(3, lambda ranks: ranks.any(ranks.rank == 1)) == [True] * 3
    assert in_step(3, lambda ranks: ranks.any(ranks.rank == 7)) == [False] * 3


def test_together_gives_every_rank_its_own_result_and_what_all_tell() -> None:
    found = in_step(3, lambda ranks: ranks.together(lambda: ranks.rank * 10, lambda ten: ten + 1))
    assert found == [(0, [1, 11, 21]), (10, [1, 11, 21]), (20, [1, 11, 21])]


@pytest.mark.parametrize("where", ["work", "tell"])
def test_a_failure_on_one_rank_stops_all_and_is_named(where: str) -> None:
    def fail(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise KeyError("its own")

    def both(ranks: Ranks) -> Any:
        if where == "work":
            return ranks.together(lambda: fail(ranks))
        return ranks.together(lambda: None, lambda _: fail(ranks))

    zero, one, two = in_step(3, both)
    assert isinstance(one, KeyError)
    for other in (zero, two):
        assert isinstance(other, RankError)
        assert str(other).startswith("rank 1 (")
        assert str(other).endswith("): KeyError: 'its own'")


def test_a_process_alone_waits_for_nobody() -> None:
    alone = Alone()
    assert (alone.gather(3), alone.from_zero("x"), alone.together(lambda: 5, lambda five: -five)) == (
        [3],
        "x",
        (5, [-5]),
    )
    with pytest.raises(ZeroDivisionError):
        alone.together(lambda: 1 // 0)


def made(kind: type) -> Any:
    """An instance without its constructor, which may need libraries that are not there."""
    return object.__new__(kind)


@pytest.mark.parametrize("kind", [SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy])
def test_lightnings_own_strategies_are_known_and_what_is_made_from_them(kind: type) -> None:
    assert why_not(made(kind)) is None
    assert why_not(made(type("Mine", (kind,), {}))) is None


def test_other_strategies_are_refused_by_name() -> None:
    assert "the strategy DeepSpeedStrategy is not supported: its engine owns" in str(why_not(made(DeepSpeedStrategy)))
    mine = type("MyDeepSpeed", (DeepSpeedStrategy,), {})
    assert str(why_not(made(mine))).startswith("the strategy MyDeepSpeed is not supported")
    megatron = type("MegatronStrategy", (DDPStrategy,), {})
    assert "pipeline" in str(why_not(made(megatron)))
    assert str(why_not(object())).startswith("the strategy object is not known (known are SingleDeviceStrategy,")


# -- what can run ------------------------------------------------------------------------------------------------------


def found(able: list[str], refused: dict[str, tuple[str, str]] | None = None, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "host": "a",
        "engine": "plain_torch",
        "why_engine": "no TE layer",
        "able": able,
        "refused": refused or {},
        "no_trace": None,
        "no_profiler": None,
        "nvtx": False,
    }
    return {**fields, **more}


def test_a_recipe_runs_only_where_all_can_run_it() -> None:
    agreed = agree(
        [
            found(["bf16", "fp8", "mxfp8"], {"nvfp4": ("needs 10.0", "TE")}),
            found(["bf16", "fp8"], {"mxfp8": ("crashes", "our probe"), "nvfp4": ("needs 10.0", "TE")}, host="b"),
            found(["bf16", "fp8"], {"mxfp8": ("no memory", "our probe"), "nvfp4": ("needs 10.0", "TE")}, host="c"),
        ]
    )
    assert agreed.able == ["bf16", "fp8"]
    assert agreed.refused == {
        "mxfp8": NotRun("rank 1 (b): crashes", "our probe"),
        "nvfp4": NotRun("needs 10.0", "TE"),
    }


def test_what_one_rank_may_not_attach_none_does() -> None:
    agreed = agree(
        [
            found(["bf16"]),
            found(["bf16"], host="b", no_trace="Nsight is attached", nvtx=True),
            found(["bf16"], host="c", no_trace="a profiler runs", no_profiler="a profiler runs"),
        ]
    )
    assert agreed == Agreed(["bf16"], {}, "rank 1 (b): Nsight is attached", "rank 2 (c): a profiler runs", True)


def test_ranks_with_different_engines_do_not_start() -> None:
    other = found(["bf16"], engine="transformer_engine", host="b", why_engine="4 TE modules")
    with pytest.raises(
        RankError, match=r"rank 0 \(a\) has plain_torch .* rank 1 \(b\) has transformer_engine \(4 TE modules\)"
    ):
        agree([found(["bf16"]), other])


NAMES = ["bf16", "fp8", "mxfp8", "nvfp4"]


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=5))
def test_able_and_refused_share_out_all_recipes(able_by_rank: list[set[str]]) -> None:
    agreed = agree(
        [
            found([n for n in NAMES if n in able], {n: (f"no {n}", "x") for n in NAMES if n not in able})
            for able in able_by_rank
        ]
    )
    assert set(agreed.able) == set.intersection(*able_by_rank)
    assert sorted([*agreed.able, *agreed.refused]) == sorted(NAMES)


def test_the_lowest_rank_with_a_reason_is_named() -> None:
    assert first_reason([{}, {}], ["a", "b"], "fp8") is None
    assert first_reason([{"fp8": "x"}, {"fp8": "x"}], ["a", "b"], "fp8") == "x"
    assert first_reason([{}, {"fp8": "x"}, {"fp8": "y"}], ["a", "b", "c"], "fp8") == "rank 1 (b): x"
    assert first_reason([{"fp8": "x"}, {}], ["a", "b"], "fp8") == "rank 0 (a): x"


def test_what_travels_is_what_is_found() -> None:
    fields = found(["bf16"], {"fp8": ("x", "y")})
    assert Found(**fields).refused["fp8"] == ("x", "y")


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", ["planted", None])
@pytest.mark.parametrize(
    ("folder", "where"), [(Path("runs/it"), "is in runs/it."), (None, "has no folder: none could be written.")]
)
def test_all_ranks_stop_for_a_fallback_in_rank_zeros_report_or_none(
    monkeypatch: pytest.MonkeyPatch, message: str | None, folder: Path | None, where: str
) -> None:
    """Else the others would train on and wait for one that is gone. Where the report is, zero knows."""
    monkeypatch.setattr(session, "fallbacks", lambda _report: message)

    def check(ranks: Ranks) -> None:
        made = object.__new__(session.Session)
        made.processes, made.folder, made.say = ranks, None if ranks.rank else folder, lambda _text: None
        made.report = None if ranks.rank else cpu()
        made.raise_on_fallback()

    found = in_step(3, check)
    if message is None:
        assert found == [None] * 3
    else:
        assert all(isinstance(error, session.FallbackError) for error in found)
        assert {str(error) for error in found} == {f"planted The report {where}"}


def test_training_goes_on_in_a_recipe_only_if_every_rank_can() -> None:
    def proceed(ranks: Ranks) -> session.Continuation:
        recipe = "bf16" if ranks.rank != 1 else "mxfp8"
        return session.Continuation.of(session.Options(), torch.nn.Linear(16, 16), torch.device("cpu"), recipe, ranks)

    found = in_step(3, proceed)
    assert all(isinstance(error, session.ProfilerError) for error in found)
    assert str(found[1]).startswith("continue_with: mxfp8 cannot run here")
    for other in (found[0], found[2]):
        assert "): ProfilerError: continue_with: mxfp8 cannot run here" in str(other)
    alone = session.Continuation.of(session.Options(), torch.nn.Linear(16, 16), torch.device("cpu"), "bf16")
    assert alone.card.name == "bf16"


# -- Recordings of the other ranks -------------------------------------------------------------------------------------


def test_a_recording_in_memory_leaves_nothing_until_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "run" / "rank-1.jsonl"
    with Recorder(file, "0.1.0", on_disk=False) as quiet:
        quiet.add(Loss("bf16", 0, 1.5))
        assert not file.parent.exists()
        quiet.write()
        quiet.add(Loss("bf16", 1, 1.25))
    assert recording.read(file).of(Loss) == [Loss("bf16", 0, 1.5), Loss("bf16", 1, 1.25)]
    assert quiet.lost is None


def test_a_recording_in_memory_that_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no folder")
    quiet = Recorder(tmp_path / "run" / "rank-1.jsonl", "0.1.0", on_disk=False)
    quiet.write()
    quiet.add(Loss("bf16", 0, 1.5))
    assert quiet.lost is not None
    assert len(quiet.snapshot()) == 2


def test_facts_travel_as_text() -> None:
    fact = Loss("bf16", 3, float("inf"))
    assert decode(encode(fact)) == fact
    with pytest.raises(RecordingError, match="unknown fact 'nothing'"):
        decode('{"fact": "nothing"}')
