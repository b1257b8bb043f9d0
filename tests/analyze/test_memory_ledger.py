"""The memory ledger against a simulated step whose owners are known: it finds them, and it adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.memory_ledger import NO_COUNTERS, NOT_ASKED
from lowprec_callback.recording import Dispatch, Fact, Holding, Memory, PeakHolding
from lowprec_callback.report import MEMORY_TERMS, MemoryMoment

from .memory_steps import Step, facts, ledger

SIZES = st.integers(0, 10**11)
THREE = st.tuples(SIZES, SIZES, SIZES)
STEPS = st.builds(
    Step,
    parameters=SIZES,
    optimizer=SIZES,
    buffers=SIZES,
    workspaces=SIZES,
    others=SIZES,
    copies=THREE,
    cached=st.booleans(),
    activations=THREE,
    gradients=THREE,
    temporary=SIZES,
    rounding=SIZES,
    unused=SIZES,
)


def in_bytes(moment: MemoryMoment) -> dict[str, int | None]:
    return {name: None if fig.value is None else round(fig.value * 1e9) for name, fig in moment.terms.items()}


def moments(of: list[Fact], on_cpu: bool = False) -> dict[str, MemoryMoment]:
    return {moment.name: moment for moment in ledger(of, on_cpu).moments()}


@given(STEPS)
def test_the_terms_add_up_to_what_was_reserved(step: Step) -> None:
    found = moments(facts(step))
    assert list(found) == ["start", "forward", "backward", "optimizer", "peak"]
    for moment in found.values():
        assert set(moment.terms) <= set(MEMORY_TERMS)
        assert moment.sum.value is not None
        assert moment.reserved.value == pytest.approx(moment.sum.value, rel=1e-9, abs=1e-9)
        assert all((figure.value or 0.0) >= -1e-9 for figure in moment.terms.values())


@given(STEPS)
def test_every_owner_is_found_at_the_peak(step: Step) -> None:
    assert in_bytes(moments(facts(step))["peak"]) == {
        "parameters": step.parameters,
        "gradients": step.gradients[-1],
        "optimizer state": step.optimizer,
        "buffers and scales": step.buffers,
        "cuBLASLt workspace": step.workspaces,
        "copies of weights": sum(step.copies if step.cached else step.copies[:-1]),
        "saved activations": sum(step.activations[:-1]),
        "temporaries": step.temporary,
        "not attributed": step.others,
        "rounding": step.rounding,
        "reserved but unused": step.unused + max(step.after_forward - step.peak, 0),
    }


@given(STEPS)
def test_every_owner_is_found_at_the_ends_of_phases(step: Step) -> None:
    found = moments(facts(step))
    kept = sum(step.copies) if step.cached else 0
    for name in ("start", "backward", "optimizer"):
        told = in_bytes(found[name])
        assert told["gradients"] == sum(step.gradients)
        assert told["copies of weights"] == kept
        assert told["not attributed"] == step.others
        assert "saved activations" not in told
    told = in_bytes(found["forward"])
    assert told["saved activations"] == sum(step.activations)
    assert told["copies of weights"] == sum(step.copies)
    assert told["not attributed"] == step.others


def test_each_term_says_where_it_comes_from() -> None:
    peak = moments(facts(Step()))["peak"]
    origins = {name: figure.origin for name, figure in peak.terms.items()}
    assert {name for name, origin in origins.items() if origin == "measured"} == {
        "parameters",
        "gradients",
        "optimizer state",
        "buffers and scales",
        "cuBLASLt workspace",
        "copies of weights",
    }
    assert {name for name, origin in origins.items() if origin == "estimated"} == {"rounding"}
    assert peak.where == "in backward, at layers.1.fc"
    # By line of the Recording: Memory and Holding of four phases, the peak, two dispatches of each layer.
    assert peak.terms["parameters"].facts == ("holding line 4",)
    assert peak.terms["gradients"].facts == ("peak_holding line 9",)
    assert peak.terms["copies of weights"].facts == ("dispatch lines 10-15",)
    assert set(peak.terms["saved activations"].facts) >= {"peak_holding line 9", "holding line 4", "memory line 1"}
    assert peak.reserved.facts == ("memory lines 1, 3, 5, 7",)


def test_saved_activations_are_split_in_inputs_of_linear_layers_and_the_rest() -> None:
    found = moments(facts(Step()))

    def split(name: str) -> dict[str, int]:
        return {part: round((fig.value or 0.0) * 1e9) for part, fig in found[name].activations.items()}

    assert split("forward") == {"inputs of linear layers": 1700, "the rest of them": 4300}
    assert split("peak") == {"inputs of linear layers": 800, "the rest of them": 2200}
    assert split("start") == split("backward") == {}


def test_inputs_that_are_shared_may_come_to_more_than_there_is() -> None:
    found = moments(facts(Step(inputs=(3000, 3000, 3000))))["forward"]
    assert found.activations["inputs of linear layers"].value == pytest.approx(9e-6)
    assert "share" in str(found.activations["the rest of them"].reason)
    assert found.sum.value == pytest.approx(found.reserved.value)


def test_without_the_copies_two_terms_become_one() -> None:
    of = [fact for fact in facts(Step()) if not isinstance(fact, Dispatch)]
    found = moments(of)
    for name in ("forward", "peak"):
        assert "saved activations" not in found[name].terms
        assert found[name].sum.value == pytest.approx(found[name].reserved.value)
    assert in_bytes(found["peak"])["activations and copies"] == 300 + 3000


def test_a_term_that_cannot_be_known_takes_the_sum_with_it() -> None:
    peak = moments(facts(Step(), requested=False))["peak"]
    for name in ("saved activations", "temporaries", "rounding", "not attributed"):
        assert NOT_ASKED in str(peak.terms[name].reason)
    assert peak.terms["parameters"].known
    assert peak.terms["reserved but unused"].known
    assert NOT_ASKED in str(peak.sum.reason)
    assert peak.reserved.known


def test_less_than_nothing_is_not_a_number() -> None:
    def lie(fact: Fact) -> Fact:
        return replace(fact, parameters=10**9) if isinstance(fact, Holding) else fact

    found = moments([lie(fact) for fact in facts(Step())])
    for moment in found.values():
        figure = moment.terms["not attributed"]
        assert "exceeds what the allocator counts, by 1e+03 MB" in str(figure.reason)
        assert not moment.sum.known


def test_a_peak_in_the_optimizer_has_no_activations() -> None:
    step = Step()
    live = step.base + sum(step.gradients)

    def moved(fact: Fact) -> Fact:
        if not isinstance(fact, PeakHolding):
            return fact
        size = {"peak": live + 905, "peak_requested": live + 900, "held": live + 5, "held_requested": live}
        return replace(fact, phase="optimizer", module="", open_layers=(), gradients=sum(step.gradients), **size)

    peak = moments([moved(fact) for fact in facts(step)])["peak"]
    told = in_bytes(peak)
    assert peak.where == "in optimizer"
    assert "saved activations" not in told
    assert told["temporaries"] == 900
    assert told["not attributed"] == step.others


def test_timed_blocks_are_not_the_watched_step() -> None:
    block = Memory("fp8_delayed", 0, "step", allocated=1, peak=10**15, reserved=10**15)
    assert in_bytes(moments([block, *facts(Step())])["peak"]) == in_bytes(moments(facts(Step()))["peak"])


def test_a_cpu_tells_what_python_holds_and_why_not_the_rest() -> None:
    found = moments([fact for fact in facts(Step()) if isinstance(fact, Holding)], on_cpu=True)
    assert list(found) == ["start", "forward", "backward", "optimizer"]
    terms = found["backward"].terms
    assert {name for name, figure in terms.items() if figure.known} == {
        "parameters",
        "gradients",
        "optimizer state",
        "buffers and scales",
        "copies of weights",
        "cuBLASLt workspace",
    }
    assert all(NO_COUNTERS in str(figure.reason) for figure in terms.values() if not figure.known)
    assert NO_COUNTERS in str(found["backward"].reserved.reason)


def test_an_older_recording_has_none() -> None:
    assert moments([fact for fact in facts(Step()) if not isinstance(fact, Holding)]) == {}
