"""What the sweep costs: it says how long it will take, keeps to `max_seconds`, and costs nothing when it is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.recording import End, Plan, Problem, StepTime, Trace
from lowprec_callback.sweep.script import Sweep
from lowprec_callback.sweep.time_budget import Pace
from tests.fit.models import Tiny, loader, profiler, short, trainer
from tests.fit.test_sweep_in_fit import hooks_of, recording_of


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", lambda _self: None)


class Clock:
    """A step takes as long as the test says, however long it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self.at = 0.0
        self.step_s = step_s
        post_init = Pace.__init__

        def construct(pace: Pace, *args: Any, **kwargs: Any) -> None:
            post_init(pace, *args, **kwargs)
            pace.now = lambda: self.at

        monkeypatch.setattr(Pace, "__init__", construct)

    def step(self, _module: Tiny, _number: int) -> None:
        self.at += self.step_s


def test_the_plan_and_its_time_are_told_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch, 2.0)
    trainer(tmp_path, short(tmp_path, progress=False)).fit(Tiny(clock.step), loader(60))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowprec: ")]
    assert said[0].startswith("lowprec: profiling fp32, bf16")
    assert "in about 25 steps of its own: 2 rounds x (1 settled + 2 timed), 1 traced" in said[0]
    assert said[0].endswith("then training starts as if nothing had been")
    # Twenty-two steps are left, of two seconds each.
    assert "lowprec: a step takes about 2 s, so the rest of the sweep about 44 s" in said
    assert recording_of(tmp_path).of(End) == [End("finished")]


def test_max_seconds_shortens_the_plan_and_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 2.0)
    callback = short(tmp_path, progress=False, max_seconds=40.0, stop_after=True)
    trainer(tmp_path, callback).fit(Tiny(clock.step), loader(60))
    facts = recording_of(tmp_path)
    asked, got = facts.of(Plan)
    assert (asked.rounds, got.rounds, got.traced_steps) == (2, 1, 1)
    assert got.shrunk is not None
    assert got.shrunk.startswith("34 s are left and the plan takes about 44 s, so it was cut (rounds 2 -> 1)")
    assert facts.of(End) == [End("finished")]
    assert callback.session is not None
    assert callback.session.sweep.pace.elapsed_s <= 40.0


def test_steps_that_grow_longer_still_keep_to_max_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)

    def step(_module: Tiny, number: int) -> None:
        clock.at += 1.0 if number <= 5 else 10.0

    callback = short(tmp_path, progress=False, max_seconds=30.0, stop_after=True)
    trainer(tmp_path, callback).fit(Tiny(step), loader(60))
    facts = recording_of(tmp_path)
    (end,) = facts.of(End)
    assert end == End("shortened", "the time that the sweep may take (max_seconds, max_time) was up")
    (problem,) = facts.of(Problem)
    assert problem.message.startswith("left out, with all that would have followed")
    assert facts.of(StepTime)
    # No part begins when the time is up; the one that runs then ends.
    assert callback.session is not None
    assert callback.session.sweep.pace.elapsed_s < 30.0 + 3 * 10.0


class SlowBf16:
    """FP32 takes a second a step, BF16 twenty-five."""

    def __init__(self, clock: Clock, callback: LowPrecisionProfiler) -> None:
        self._clock, self._callback = clock, callback

    def __call__(self, _module: Tiny, _number: int) -> None:
        session = self._callback.session
        card = session.sweep.card if session is not None else None
        self._clock.at += 25.0 if card is not None and card.name == "bf16" else 1.0


def test_the_time_is_told_again_when_a_recipe_turns_out_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, callback = Clock(monkeypatch, 1.0), short(tmp_path, progress=False)
    trainer(tmp_path, callback).fit(Tiny(SlowBf16(clock, callback)), loader(60))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowprec: a step takes")]
    # The second round is 3 steps of each recipe, and the trace 5 more.
    assert said == [
        "lowprec: a step takes about 1 s, so the rest of the sweep about 22 s",
        "lowprec: a step takes fp32 1 s, bf16 25 s, so the rest of the sweep about 3 min 28 s",
    ]
    assert recording_of(tmp_path).of(End) == [End("finished")]


def test_a_slow_recipe_is_fitted_into_max_seconds_after_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the baseline's pace all would fit; by BF16's only what matters most does: its trace, not more rounds."""
    clock = Clock(monkeypatch, 1.0)
    callback = profiler(tmp_path, progress=False, max_seconds=200.0, rounds=6, guard_steps=4, stop_after=True)
    trainer(tmp_path, callback, steps=120).fit(Tiny(SlowBf16(clock, callback)), loader(120))
    facts = recording_of(tmp_path)
    plan = facts.of(Plan)[-1]
    assert (plan.rounds, plan.traced_steps, plan.guard_steps) == (1, 1, 0)
    assert plan.no_guard == "too little is left for it"
    assert plan.shrunk is not None
    assert plan.shrunk.startswith("after 1 round 1 min 59 s are left and the rest of the plan takes about ")
    assert "(rounds 6 -> 1, guard_steps 4 -> 0)" in plan.shrunk
    assert facts.of(End) == [End("finished")]
    assert {trace.recipe for trace in facts.of(Trace)} == {"fp32", "bf16"}
    assert {step.round for step in facts.of(StepTime)} == {0}
    assert callback.session is not None
    assert callback.session.sweep.pace.elapsed_s <= 200.0


def test_max_time_of_the_trainer_counts_as_well(tmp_path: Path) -> None:
    callback = short(tmp_path, progress=False, max_seconds=7200.0)
    trainer(tmp_path, callback, steps=30, max_time={"hours": 1}).fit(Tiny(), loader(30))
    assert callback.session is not None
    limit = callback.session.sweep.pace.max_seconds
    assert limit is not None
    assert 800 < limit <= 0.25 * 3600
    assert recording_of(tmp_path).of(End) == [End("finished")]


def test_when_the_sweep_is_over_nothing_of_ours_is_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By structure, since times of a step say little here: no patch, no hook, no object of ours that a step calls."""
    over: list[int] = []
    callback = short(tmp_path, progress=False)

    def look(module: Tiny, number: int) -> None:
        if callback.session is None or callback.session.sweep.snapshot is not None:
            return
        over.append(number)
        assert hooks_of(module) == 0
        assert not vars(module).keys() & {"training_step", "backward", "forward"}
        assert "save_checkpoint" not in vars(run)
        assert "train_step_context" not in vars(run.precision_plugin)
        (optimizer,) = run.optimizers
        assert not getattr(optimizer, "_optimizer_step_post_hooks", {})
        assert not torch.is_autocast_enabled("cpu")

    module = Tiny(look)
    run = trainer(tmp_path, callback, steps=30)
    for name in ("region", "phase", "_step", "contaminate"):
        original = getattr(Sweep, name)

        def counted(sweep: Sweep, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            assert not over, "called although the sweep is over"
            return _original(sweep, *args, **kwargs)

        monkeypatch.setattr(Sweep, name, counted)
    run.fit(module, loader(30))
    assert len(over) == 30
