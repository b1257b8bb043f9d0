"""Laws of the sums that the page of a Report and the plot share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.recording import MODES, ROLES
from lowprec_callback.report import Figure, GemmRow, RecipeReport, Report
from lowprec_callback.show import gemm_sums
from lowprec_callback.show.gemm_sums import Operation

from . import samples
from .sample_strategies import reports


@st.composite
def rows(draw: st.DrawFn) -> list[GemmRow]:
    """The three roles of a few operations, with any times and calls."""
    times = st.floats(1e-3, 1e3)
    return [
        GemmRow(
            f"op {index}",
            role,
            64,
            32 * (index + 1),
            16,
            draw(st.integers(1, 100)),
            Figure(draw(times), "ms"),
            Figure(draw(times), "ms"),
            False,
        )
        for index in range(draw(st.integers(1, 4)))
        for role in ROLES
    ]


@given(rows(), st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_roles_add_up_to_the_step_in_any_order(found: list[GemmRow], mode: str, shuffle: object) -> None:
    assert mode in MODES
    whole = gemm_sums.per_step(found, mode).value
    assert whole == pytest.approx(sum(row.calls * (gemm_sums.per_call(row, mode).value or 0) for row in found))
    by_role = [gemm_sums.per_step(gemm_sums.of_role(found, role), mode).value or 0 for role in ROLES]
    assert whole == pytest.approx(sum(by_role))
    mixed = list(found)
    shuffle.shuffle(mixed)  # type: ignore[attr-defined]
    assert gemm_sums.per_step(mixed, mode).value == pytest.approx(whole)


@given(rows(), st.data())
def test_a_missing_row_makes_its_sums_missing_with_its_reason(found: list[GemmRow], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(found) - 1))
    gone = found[at]
    missing = Figure.missing("ms", "planted")
    found[at] = GemmRow(gone.operation, gone.role, gone.m, gone.k, gone.n, gone.calls, missing, gone.autocast_ms, False)
    assert "planted" in (gemm_sums.per_step(found, "kernel").reason or "")
    assert gemm_sums.per_step(found, "autocast").known
    for role in ROLES:
        assert gemm_sums.per_step(gemm_sums.of_role(found, role), "kernel").known == (role != gone.role)


def test_no_rows_are_no_zero() -> None:
    assert gemm_sums.per_step([], "kernel").reason == "not in the benchmark"


@given(reports())
def test_every_row_belongs_to_one_operation(report: Report) -> None:
    operations = gemm_sums.operations(report)
    assert len(set(operations)) == len(operations)
    for recipe in report.recipes:
        shared = [row for operation in operations for row in gemm_sums.of_operation(recipe, operation)]
        assert sorted(map(repr, shared)) == sorted(map(repr, recipe.gemms))


def length(recipe: RecipeReport, operation: Operation) -> float:
    return gemm_sums.per_step(gemm_sums.of_operation(recipe, operation), "autocast").value or 0.0


def test_the_longest_operation_of_the_baseline_comes_first() -> None:
    report = samples.ALL["codonfm"]()
    base = next(recipe for recipe in report.recipes if recipe.name == report.baseline)
    lengths = [length(base, operation) for operation in gemm_sums.operations(report)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert gemm_sums.operations(report)[0].shape.count("x") == 2
