"""Columns: every kernel finds the ranges that were open where it was launched; and the steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.capture import NONE, Capture, Ranges, Waits, Work, blocked, compact, join, project
from lowprec_callback.capture_error import CaptureError
from lowprec_callback.capture_facts import TRACED_STEPS, facts_of
from lowprec_callback.capture_steps import find_steps
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import GemmKernels, HostPhases, Imported, Problem, Recording, StepTime, Trace

numbers = st.lists(st.integers(-3, 40), max_size=60)


@given(st.lists(st.integers(-(2**62), 2**62), max_size=60) | numbers | st.lists(st.sampled_from([0, 2**50])))
def test_compact_is_unique(values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    found, index = compact(column)
    assert found.tolist() == sorted(set(values))
    assert found[index].tolist() == values


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=30), st.data())
def test_join_finds_the_first_call_with_the_id(calls: list[tuple[int, int]], data: Any) -> None:
    work = data.draw(st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 2)), max_size=30))
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for rows in (work, calls) for i in (0, 1)]
    expected = [calls.index(each) if each in calls else NONE for each in work]
    assert join(*columns).tolist() == expected


@st.composite
def nested(draw: Any, low: int = 0, high: int = 60, depth: int = 0) -> list[tuple[int, int, str]]:
    """Ranges that nest: (start, end, name)."""
    found: list[tuple[int, int, str]] = []
    at = low
    while at < high - 1 and draw(st.booleans()):
        start = draw(st.integers(at, high - 2))
        end = draw(st.integers(start + 1, high - 1))
        found.append((start, end, draw(st.sampled_from("abc"))))
        if depth < 3:
            found += draw(nested(start, end, depth + 1))
        at = end + 1
    return found


@given(
    st.lists(nested(), min_size=1, max_size=3), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=20)
)
def test_the_innermost_range_on_the_launching_thread(threads: list[Any], launches: list[tuple[int, int]]) -> None:
    rows = [(start, end, thread, name) for thread, ranges in enumerate(threads) for start, end, name in ranges]
    found = project(capture([("k", at, at + 1, at, thread) for thread, at in launches], rows, threads=3))
    for (thread, at), place in zip(launches, found.place, strict=True):
        open_then = [row for row in rows if row[2] == thread and row[0] <= at <= row[1]]
        # Of ranges that are open at the same time the last to begin is inside the others; of equal ones either.
        inner = {row[3] for row in open_then if row[0] == max(r[0] for r in open_then)}
        shortest = min((row[1] for row in open_then if row[3] in inner), default=None)
        names = {row[3] for row in open_then if row[1] == shortest} or {""}
        assert found.places[place].op in names | inner


def capture(
    work: list[tuple[str, int, int, int, int]], ranges: list[tuple[int, int, int, str]], threads: int = 2, **more: Any
) -> Capture:
    """`work`: (name, start, end, launch, thread). `ranges`: (start, end, thread, text)."""
    names = sorted({row[0] for row in work})
    texts = sorted({row[3] for row in ranges})

    def column(values: list[int]) -> Any:
        return np.array(values, dtype=np.int64)

    zeros = column([0] * len(work))
    return Capture(
        tool="test",
        file="x",
        work=Work(
            start=column([row[1] for row in work]),
            end=column([row[2] for row in work]),
            stream=zeros,
            device=zeros,
            process=zeros,
            name=column([names.index(row[0]) for row in work]),
            launch=column([row[3] for row in work]),
            thread=column([row[4] if row[3] != NONE else NONE for row in work]),
        ),
        work_names=names,
        ranges=Ranges(
            column([row[0] for row in ranges]),
            column([row[1] for row in ranges]),
            column([row[2] for row in ranges]),
            column([texts.index(row[3]) for row in ranges]),
        ),
        range_names=[("lowprec", text[1:]) if text.startswith("!") else ("", text) for text in texts],
        processes=column([0] * threads),
        knows_operators=True,
        **more,
    )


def waits(names: list[str], rows: list[tuple[int, int, int, int]]) -> Waits:
    """(start, end, thread, index of the name)."""
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(4)]
    return Waits(*columns, names)


def test_a_copy_blocks_the_host_if_its_call_ends_after_it() -> None:
    names = ["cudaStreamSynchronize_v3020", "cudaMemcpyAsync_v3020", "cudaLaunchKernel_v7000"]
    rows = [(0, 5, 0, 0), (10, 20, 0, 1), (30, 35, 0, 1), (40, 60, 0, 1), (70, 80, 0, 2)]
    copy = np.array([NONE, 0, 1, NONE, 2])
    kept = blocked(waits(names, rows), copy, np.array([20, 40, 75]))
    assert kept.start.tolist() == [0, 10]
    assert [kept.names[i] for i in kept.name] == ["cudaStreamSynchronize", "cudaMemcpyAsync"]
    assert len(blocked(waits([], []), copy[:0], copy[:0])) == 0


def test_waits_and_phases_of_a_step() -> None:
    ranges = [
        (0, 1000, 0, "!bf16 step"),
        (0, 100, 0, "!data"),
        (100, 400, 0, "!forward"),
        (150, 300, 0, "!module|forward|mlp"),
        (1000, 2000, 0, "!bf16 step"),
        (1000, 1100, 0, "!data"),
    ]
    made = capture([("k", 120, 220, 110, 0), ("k", 1120, 1220, 1110, 0)], ranges)
    made = replace(
        made, waits=waits(["cudaStreamSynchronize"], [(200, 260, 0, 0), (210, 260, 1, 0), (900, 1050, 0, 0)])
    )
    first, second = facts(made).of(Trace)
    assert first.waits is not None
    assert (first.waits.start_us, first.waits.duration_us) == ((0.2, 0.9), (0.06, 0.15))
    assert [first.labels[i] for i in first.waits.module] == ["mlp", ""]
    assert [first.labels[i] for i in first.waits.phase] == ["forward", ""]
    assert first.phases == HostPhases(("data", "forward"), (0.0, 0.1), (0.1, 0.4))
    assert second.waits is not None
    assert second.waits.start_us == (-0.1,)
    assert second.phases == HostPhases(("data",), (0.0,), (0.1,))
    assert first.host_end_us is None
    silent = facts(capture([("k", 120, 220, 110, 0)], [(0, 1000, 0, "!bf16 step")])).of(Trace)[0]
    assert (silent.waits, silent.phases) == (None, None)


def facts(found: Capture, recipe: str | None = None) -> Recording:
    return Recording.from_facts(facts_of(found, load_cards(), recipe).facts)


BF16, FP8 = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT"

# -- attention's backward --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False])
def test_what_surrounds_attention_is_guessed_only_where_our_ranges_name_no_module(ours: bool) -> None:
    ranges = [
        (0, 10, 1, "_LinearBackward"),
        (20, 25, 1, "nvte_fused_attn_bwd"),
        (40, 50, 1, "_LayerNormLinearBackward"),
    ]
    if ours:
        ranges.append((1, 9, 1, "!module|backward|blocks.0.proj"))
    work = [("residual", 15, 16, 15, 1), ("attention", 22, 23, 22, 1)]
    found = project(replace(capture(work, ranges), knows_operators=False))
    beside, attention = (found.places[place] for place in found.place)
    assert attention.attention
    assert beside.attention is not ours


# -- steps -----------------------------------------------------------------------------------------------------------


def test_a_host_that_runs_ahead_does_not_make_a_step_short() -> None:
    """The boundary is passed when the GPU has done what was launched before, as a CUDA event would have it."""
    work = [("k", 10, 110, 5, 0), ("k", 110, 210, 15, 0), ("k", 210, 310, 25, 0)]
    found = capture(work, [(0, 10, 0, "!bf16 step"), (10, 20, 0, "!bf16 step"), (20, 30, 0, "!bf16 step")])
    steps, _ = find_steps(found, project(found), np.ones(3, dtype=bool))
    assert (steps.begin.tolist(), steps.end.tolist()) == ([0, 110, 210], [110, 210, 310])
    assert steps.host.tolist() == [10, 10, 10]
    assert steps.of_work.tolist() == [0, 1, 2]


def test_steps_of_others_go_from_beginning_to_beginning() -> None:
    work = [("k", at + 2, at + 3, at + 1, 0) for at in (0, 100, 200)]
    found = capture(work, [(at, at + 60, 0, f"iteration {at // 100}") for at in (0, 100, 200)])
    steps, left_out = find_steps(found, project(found), np.ones(3, dtype=bool))
    assert steps.begin.tolist() == [0, 100, 200]
    assert steps.end.tolist() == [100, 200, 260]
    assert steps.number.tolist() == [0, 1, 2]
    assert not left_out


def test_a_single_range_called_like_a_step_is_no_family() -> None:
    found = capture([("k", 2, 30, 1, 0)], [(0, 60, 0, "train step")])
    steps, _ = find_steps(found, project(found), np.ones(1, dtype=bool))
    assert "the whole capture as one step" in steps.found_by
    assert (steps.begin.tolist(), steps.end.tolist()) == ([1], [30])


def test_steps_end_with_the_optimizer_and_the_cut_off_one_does_not_count() -> None:
    adam = "Optimizer.step#AdamW.step"
    kernels = [(0, 1), (30, 1), *((100 + i, 1) for i in range(8)), *((200 + i, 1) for i in range(8))]
    work = [("k", at + 1, at + 2, at, 0) for at, _ in kernels]
    found = capture(work, [(40, 50, 0, adam), (140, 150, 0, adam), (240, 250, 0, adam)])
    steps, left_out = find_steps(found, project(found), np.ones(len(work), dtype=bool))
    assert steps.end.tolist() == [150, 250]
    assert left_out == ["the first step was cut off by the capture's edge, and does not count"]
    assert np.bincount(steps.of_work[steps.of_work >= 0]).tolist() == [8, 8]


def test_no_kernel_within_a_step() -> None:
    found = capture([("k", 100, 110, 90, 0)], [(0, 10, 0, "!bf16 step")])
    with pytest.raises(CaptureError, match="none of its 1 kernels was launched within a step"):
        facts(found)


# -- facts -----------------------------------------------------------------------------------------------------------


def many_steps(count: int) -> Capture:
    """Steps of 100 ns and then some: the i-th takes i ns more."""
    work, ranges, at = [], [], 0
    for i in range(count):
        ranges.append((at, at + 100 + i, 0, "!fp8_delayed step"))
        work.append((FP8, at + 5, at + 90, at + 1, 0))
        at += 100 + i
    return capture(work, ranges)


def test_every_step_is_timed_and_the_typical_ones_are_traced() -> None:
    recording = facts(many_steps(41))
    assert len(recording.of(StepTime)) == 41
    traces = recording.of(Trace)
    assert len(traces) == TRACED_STEPS
    assert {round(trace.wall_ms * 1e6) for trace in traces} <= set(range(116, 125))
    (table,) = recording.of(GemmKernels)
    assert (table.steps, table.count) == (41, (41,))
    assert f"{TRACED_STEPS} of 41 of fp8_delayed" in recording.of(Imported)[0].traced
    assert all(step.attached == "test" for step in recording.of(StepTime))


def test_a_new_round_begins_where_the_recipe_changes() -> None:
    ranges = [(i * 10, i * 10 + 10, 0, f"!{name} step") for i, name in enumerate(["bf16", "bf16", "fp8_block", "bf16"])]
    work = [(BF16, i * 10 + 2, i * 10 + 5, i * 10 + 1, 0) for i in range(4)]
    recording = facts(capture(work, ranges))
    assert [(s.recipe, s.round, s.index) for s in recording.of(StepTime)] == [
        ("bf16", 0, 0),
        ("bf16", 0, 1),
        ("fp8_block", 0, 0),
        ("bf16", 1, 0),
    ]
    assert recording.of(Imported)[0].recipe_from == "ranges"


def test_a_recipe_without_a_card_is_named() -> None:
    recording = facts(capture([(BF16, 2, 5, 1, 0)], [(0, 10, 0, "!my_own step")]))
    assert recording.of(Problem)[0].message == "no recipe card is called 'my_own': its verdict needs --recipe"


@pytest.mark.parametrize(
    ("names", "recipe"),
    [
        ([BF16], "bf16"),
        ([FP8, BF16], "fp8"),
        ([FP8, "transformer_engine::delayed_scaling_recipe::amax_and_scale_update_impl::kernel_bulk()"], "fp8_delayed"),
        ([FP8, "transformer_engine::compute_scale_from_amax_kernel(float const*)"], "fp8_current"),
        (["nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_Ablk128_Bvec128_TNT"], "fp8_block"),
        (["nvjet_sm100_qqtst_128x128_128x6_2x1_v_bz_Avec32UE8M0_Bvec32UE8M0_TNT"], "mxfp8"),
        (["nvjet_sm100_ootst_128x128_256x6_2x1_v_bz_Avec16UE4M3_Bvec16UE4M3_TNT"], "nvfp4"),
        (["what is this"], "unknown"),
        # BF16 beside a mixture, or beside GEMMs that tell nothing, is no BF16 run.
        ([BF16, "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_Ab32_Bb32_Cb32_t128x64x256_s4_et128x64_m128x64x32"], "unknown"),
        ([BF16, "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>"], "unknown"),
        # AMD: types are read, recipes are not known.
        (["Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN"], "bf16"),
        (["Cijk_Alik_Bljk_F8BS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN"], "unknown"),
    ],
)
def test_the_recipe_is_inferred_from_kernels(names: list[str], recipe: str) -> None:
    work = [(name, i * 10 + 2, i * 10 + 9, i * 10 + 1, 0) for i, name in enumerate(names)]
    recording = facts(capture(work, [(0, 100, 0, "!step 0")]))
    assert recording.of(Trace)[0].recipe == recipe
    assert recording.of(Imported)[0].recipe_from == "kernels"


def test_what_the_user_says_was_asked_for_goes_before() -> None:
    recording = facts(capture([(BF16, 2, 5, 1, 0)], [(0, 10, 0, "!step 0")]), "fp8_delayed")
    assert (recording.of(Trace)[0].recipe, recording.of(Imported)[0].recipe_from) == ("fp8_delayed", "user")
