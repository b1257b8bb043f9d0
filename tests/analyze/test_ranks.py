"""The summaries of many ranks, merged: the same whatever their order, of a size that does not grow with the ranks."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.finding_case import Case
from lowprec_callback.analyze.findings_ranks import find_straggler
from lowprec_callback.analyze.rank_summary import summarise
from lowprec_callback.analyze.ranks import FEW, PROBLEMS_KEPT, Merged, merge
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.recording import (
    Card,
    Clocks,
    Environment,
    Fact,
    ForwardTime,
    HostTime,
    Memory,
    Plan,
    Problem,
    RankRecipe,
    RankSummary,
    Recording,
    Refusal,
    StepTime,
)
from lowprec_callback.report import Figure, RankRow, RecipeReport, load_report
from lowprec_callback.show.console import as_text

RECIPES = ("bf16", "fp8_delayed")


def summary(
    rank: int,
    *,
    step: float = 100.0,
    forward: float = 30.0,
    gemm: float | None = 50.0,
    noise: float = 0.002,
    **more: Any,
) -> RankSummary:
    """One rank with 3 rounds of 4 steps a recipe; all times scatter by `noise`."""
    rng = random.Random(rank)

    def rounds(ms: float) -> tuple[tuple[int, tuple[float, ...]], ...]:
        return tuple((r, tuple(ms * (1 + rng.gauss(0, noise)) for _ in range(4))) for r in range(3))

    recipes = {
        name: RankRecipe(
            rounds=rounds(step / (1 + index)),
            forward=rounds(forward / (1 + index)),
            gemm_ms=None if gemm is None else gemm / (1 + index),
            **more,
        )
        for index, name in enumerate(RECIPES)
    }
    return RankSummary(rank, f"node-{rank // 8}", "GPU", recipes)


def merged(*summaries: RankSummary) -> Merged:
    return merge(enumerate(summaries, start=10))


def row(found: Merged, quantity: str, recipe: str = "bf16") -> RankRow:
    (one,) = [each for each in found.report(len(found.ranks)).rows[recipe] if each.quantity == quantity]
    return one


def test_median_worst_and_best_of_each_quantity() -> None:
    found = merged(
        *(
            summary(
                rank, step=ms, noise=0.0, peak_bytes=10**9 * (rank + 1), sm_mhz=(1900 - rank,), coverage=1 - rank / 10
            )
            for rank, ms in enumerate((101.0, 104.0, 100.0))
        )
    )
    step = row(found, "step")
    assert (step.median.value, step.worst.value, step.best.value) == (101.0, 104.0, 100.0)
    assert (step.worst_rank, step.worst_host) == (1, "node-0")
    assert step.worst.facts == ("rank_summary line 11",)
    assert step.median.facts == ("rank_summary lines 10-12",)
    peak, clock, coverage = row(found, "peak memory"), row(found, "SM clock"), row(found, "coverage")
    assert (peak.median.value, peak.worst.value, peak.worst_rank) == (2.0, 3.0, 2)
    assert (clock.worst.value, clock.worst_rank, clock.best.value) == (1898.0, 2, 1900.0)
    assert (coverage.worst.value, coverage.worst_rank) == (0.8, 2)


def test_what_no_rank_measured_is_absent_and_silent_ranks_are_told() -> None:
    found = merged(summary(0, gemm=None), summary(2, gemm=None))
    assert {each.quantity for each in found.report(4).rows["bf16"]} == {"step", "forward"}
    assert found.report(4).problems == ("2 of 4 ranks sent no summary",)
    assert found.report(2).problems == ()


def test_ranks_on_different_devices_are_told() -> None:
    other = dataclasses.replace(summary(1), device="B300")
    assert merged(summary(0), other, summary(2)).report(3).problems == (
        "the ranks run on different devices: B300 (rank 1), GPU (rank 0)",
    )


@given(st.permutations(range(6)))
def test_the_order_in_which_summaries_come_changes_nothing(order: list[int]) -> None:
    all_ = [summary(rank, step=100 + rank % 3) for rank in range(6)]
    usual = merge((10 + rank, each) for rank, each in enumerate(all_))
    other = merge((10 + rank, all_[rank]) for rank in order)
    assert other.report(6) == usual.report(6)
    assert other.slowest == usual.slowest
    assert other.stragglers("bf16") == usual.stragglers("bf16")


def test_a_slow_rank_is_found_by_what_it_does_before_it_waits() -> None:
    """Steps are equally long on all ranks: they wait for each other."""
    found = merged(*(summary(rank, forward=36.0 if rank == 3 else 30.0) for rank in range(8)))
    (straggler,) = found.stragglers("bf16")
    assert (straggler.rank, straggler.host, straggler.quantity) == (3, "node-0", "forward")
    assert straggler.excess == pytest.approx(0.2, abs=0.01)
    assert 0.18 < straggler.low < straggler.excess
    assert straggler.ms == pytest.approx(6.0, abs=0.2)


def test_two_ranks_are_enough() -> None:
    (straggler,) = merged(summary(0), summary(1, forward=33.0)).stragglers("bf16")
    assert (straggler.rank, straggler.quantity) == (1, "forward")


@pytest.mark.parametrize("count", [2, 8, FEW, 200])
def test_ranks_that_only_scatter_are_no_stragglers(count: int) -> None:
    assert merged(*(summary(rank, noise=0.02) for rank in range(count))).stragglers("bf16") == []


def test_one_rank_alone_is_no_straggler() -> None:
    assert merged(summary(0)).stragglers("bf16") == []
    assert merged().stragglers("bf16") == []


def test_a_slow_device_among_many_is_found_by_its_benchmark() -> None:
    def one(rank: int) -> RankSummary:
        made = summary(rank, forward=33.0 if rank == 77 else 30.0)
        if rank != 77:
            return made
        slow = {name: dataclasses.replace(part, gemm_ms=part.gemm_ms * 1.1) for name, part in made.recipes.items()}
        third = {**slow, "third": dataclasses.replace(slow["bf16"], gemm_ms=55.0)}
        return dataclasses.replace(made, recipes=third)

    found = merged(*(one(rank) for rank in range(300)))
    assert [(each.rank, each.host) for each in found.stragglers("bf16")] == [(77, "node-9")]


def test_thousands_of_ranks_are_read_once_and_leave_little() -> None:
    """Of each rank a few numbers are kept, and no sample but the slowest rank's; the report does not grow at all."""
    alive: list[int] = []

    def stream(count: int) -> Iterator[tuple[int, RankSummary]]:
        for rank in range(count):
            alive.append(rank)
            yield rank, summary(rank, noise=0.001)

    small, large = merge(stream(64)), merge(stream(512))
    assert alive == [*range(64), *range(512)]

    def size(found: Merged) -> int:
        return len(pickle.dumps(found.report(len(found.ranks)), protocol=5))

    assert size(large) < size(small) + 200
    samples = 512 * len(RECIPES) * 2 * 12
    kept = sum(len(values) for _, values in (*large._values.values(), *large._blocks.values()))
    assert kept == 512 * len(RECIPES) * (3 + 3 + 3 + 1)  # step, forward, benchmark; three rounds of two; the benchmark
    assert kept < samples
    assert len(large.slowest) == len(RECIPES)


def test_problems_of_other_ranks_are_told_but_not_all_of_thousands() -> None:
    found = merge((rank, RankSummary(rank, "a", "GPU", problems=("trace: lost",))) for rank in range(100))
    assert found.report(100).problems[0] == "rank 0 (a): trace: lost"
    assert len(found.report(100).problems) == PROBLEMS_KEPT


# -- one rank's own ----------------------------------------------------------------------------------------------------


def own(**world: str) -> list[Fact]:
    """A Recording of rank zero with two recipes."""
    facts: list[Fact] = [
        Environment("GPU", "cuda", facts={"world size": "2", **world}),
        Plan(RECIPES, "bf16", 2, 1, 2, 0, 0, 1, 20),
        *(Card(name, name, ("bf16", "bf16"), ("bf16", "bf16"), ("bf16", "bf16"), "none") for name in RECIPES),
        Card("mxfp8", "MXFP8", ("e4m3", "e4m3"), ("e4m3", "e4m3"), ("e4m3", "e4m3"), "mx-32"),
        Refusal("mxfp8", "needs 10.0", "TE"),
    ]
    for name, ms in zip(RECIPES, (10.0, 8.0), strict=True):
        for round_ in range(2):
            facts += [StepTime(name, round_, index, ms + index, ms) for index in range(2)]
            facts.append(StepTime(name, round_, 2, 500.0, 500.0, discarded="evaluation ran inside this step"))
            facts.append(ForwardTime(name, round_, (3.0, 3.5)))
            facts.append(HostTime(name, round_, 7.0 + round_))
            facts.append(Memory(name, round_, "step", 10, 2_000_000_000 + round_, 4_000_000_000))
            facts.append(Clocks(name, round_, 1900 + round_, 650.0, 60))
    return facts


def test_a_rank_sums_up_what_it_measured() -> None:
    facts = Recording.from_facts([*own(), Problem("trace of bf16", "lost")])
    found = summarise(facts, 3, "node-a", "GPU")
    assert (found.rank, found.host, found.device) == (3, "node-a", "GPU")
    assert list(found.recipes) == list(RECIPES)
    part = found.recipes["bf16"]
    assert part.rounds == ((0, (10.0, 11.0)), (1, (10.0, 11.0)))
    assert part.forward == ((0, (3.0, 3.5)), (1, (3.0, 3.5)))
    assert part.host_ms == (7.0, 8.0)
    assert part.peak_bytes == 2_000_000_001
    assert part.sm_mhz == (1900, 1901)
    assert part.gemm_ms is None
    assert part.coverage is None
    assert found.problems == ("trace of bf16: lost",)
    assert summarise(facts, 0, "node-a", "GPU").problems == ()  # they are in rank zero's own Recording


def two_ranks() -> Recording:
    facts = own()
    first = summarise(Recording.from_facts(facts), 0, "node-a", "GPU")
    slow = {
        name: dataclasses.replace(part, rounds=tuple((r, tuple(ms * 1.5 for ms in times)) for r, times in part.rounds))
        for name, part in first.recipes.items()
    }
    return Recording.from_facts([*facts, first, RankSummary(1, "node-b", "GPU", slow)])


def test_a_step_is_that_of_the_slowest_rank() -> None:
    report = analyze(two_ranks())
    bf16 = report.recipe("bf16")
    assert bf16.step_ms.value == pytest.approx(10.5 * 1.5)
    ((line, _),) = [each for each in two_ranks().lines(RankSummary) if each[1].rank == 1]
    assert bf16.step_ms.facts == (f"rank_summary line {line}",)
    assert bf16.samples == ((0, (15.0, 16.5)), (1, (15.0, 16.5)))
    assert report.recipe("fp8_delayed").speedups is not None
    assert report.recipe("fp8_delayed").speedups.step.value == pytest.approx(10.5 / 8.5)
    assert report.ranks is not None
    assert report.ranks.slowest == dict.fromkeys(RECIPES, "rank 1 (node-b)")
    assert not [text for text in report.problems if "rank 0" in text]


def test_without_the_others_it_is_said_whose_numbers_these_are() -> None:
    report = analyze(Recording.from_facts(own()))
    assert report.ranks is None
    assert any(text.startswith("ranks: 2 processes trained, and the sweep ended before") for text in report.problems)
    alone = analyze(Recording.from_facts(own(**{"world size": "1"})))
    assert not any("processes" in text for text in alone.problems)


def test_a_report_with_ranks_comes_back_as_it_was(tmp_path: Any) -> None:
    report = analyze(two_ranks())
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path) == report


def test_the_page_shows_the_ranks(snapshot: Any) -> None:
    page = as_text(analyze(two_ranks()), width=100)
    start = page.index("2 ranks on 2 machines")
    assert page[start : page.index("\n\n", start)] == snapshot


# -- the finding -------------------------------------------------------------------------------------------------------


def case(found: Merged | None, baseline: bool = True) -> Case:
    part = RecipeReport("bf16", "BF16", baseline, step_ms=Figure(100.0, "ms", "measured"))
    return Case(part=part, base=part, ranks=found)


def test_the_finding_names_rank_host_and_time() -> None:
    found = merged(*(summary(rank, forward=36.0 if rank == 3 else 30.0) for rank in range(8)))
    told = find_straggler(case(found))
    assert told is not None
    assert (told.code, told.recipe) == ("straggler", "")
    assert told.sentence.startswith("rank 3 (node-0) is slower than the others: ")
    assert told.ms.value == pytest.approx(6.0, abs=0.2)
    assert told.ms.origin == "estimated"
    assert "its data" in told.advice
    assert len(told.evidence) == 1
    assert find_straggler(case(found, baseline=False)) is None
    assert find_straggler(case(None)) is None
    assert find_straggler(case(merged(*(summary(rank) for rank in range(8))))) is None


def test_a_slow_device_gets_another_advice() -> None:
    def one(rank: int) -> RankSummary:
        made = summary(rank, gemm=60.0 if rank in (1, 5) else 50.0)
        return dataclasses.replace(made, recipes={**made.recipes, "third": made.recipes["bf16"]})

    told = find_straggler(case(merged(*(one(rank) for rank in range(8)))))
    assert told is not None
    assert told.sentence.startswith("rank 1 (node-0), rank 5 (node-0) are slower than the others")
    assert "nvidia-smi" in told.advice
    assert told.ms.value is not None
    assert math.isclose(told.ms.value, 10.0)
