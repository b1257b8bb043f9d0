"""The Report: the arithmetic of its figures, and its file."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowprec_callback import report
from lowprec_callback.report import (
    Figure,
    Gap,
    GapTerm,
    GemmRow,
    Ledger,
    RecipeReport,
    Report,
    ReportError,
    ScaleRow,
    Speedups,
    Verdict,
    VerdictRow,
    load_report,
    merge_facts,
    worst_origin,
)

numbers = st.floats(-1e9, 1e9, allow_nan=False)
origins = st.sampled_from(report._ORIGINS)


@st.composite
def known_figures(draw: Any, unit: str = "ms") -> Figure:
    value = draw(numbers)
    width = draw(st.none() | st.floats(0, 1e6))
    low, high = (None, None) if width is None else (value - width, value + width)
    facts = draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, max_size=3))
    return Figure(value, unit, draw(origins), low, high, draw(st.none() | st.integers(1, 99)), tuple(facts))


missing_figures = st.text(min_size=1, max_size=8).map(lambda reason: Figure.missing("ms", reason))
figures = st.one_of(known_figures(), missing_figures)


# -- figures ---------------------------------------------------------------------------------------------------


@given(st.lists(known_figures(), max_size=5), missing_figures, st.integers(0, 5))
def test_a_sum_with_a_missing_term_is_missing(terms: list[Figure], hole: Figure, at: int) -> None:
    total = Figure.total([*terms[:at], hole, *terms[at:]], "ms")
    assert not total.known
    assert total.reason == f"a term of the sum is missing: {hole.reason}"
    assert total.low is None
    assert total.high is None


@given(st.lists(known_figures(), max_size=6))
def test_a_sum_of_known_terms_is_known(terms: list[Figure]) -> None:
    total = Figure.total(terms, "s")
    assert total.value == math.fsum(term.value or 0.0 for term in terms)
    assert total.unit == "s"
    assert total.origin == ("estimated" if any(t.origin == "estimated" for t in terms) else "derived")
    assert set(total.facts) == {fact for term in terms for fact in term.facts}
    widths = [term.half_width for term in terms]
    if terms and None not in widths:
        assert total.half_width == pytest.approx(math.hypot(*(w or 0.0 for w in widths)), rel=1e-6, abs=1e-6)
    else:
        assert total.half_width is None


@given(st.lists(figures, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_the_terms_does_not_matter(terms: list[Figure], random: Any) -> None:
    shuffled = random.sample(terms, len(terms))
    one, other = Figure.total(terms, "ms"), Figure.total(shuffled, "ms")
    assert (one.value, one.low, one.high, one.origin) == (other.value, other.low, other.high, other.origin)
    assert set(one.facts) == set(other.facts)


@given(figures, figures)
def test_a_difference(one: Figure, other: Figure) -> None:
    difference = one.minus(other)
    assert difference.known == (one.known and other.known)
    if one.value is not None and other.value is not None:
        assert difference.value == one.value - other.value
        assert difference.origin == worst_origin([one, other])
    if one.half_width is not None and other.half_width is not None:
        assert difference.half_width == pytest.approx(math.hypot(one.half_width, other.half_width), rel=1e-6, abs=1e-6)
    elif difference.known:
        assert difference.half_width is None


@given(known_figures())
def test_a_figure_less_itself_is_nothing_but_not_certain(figure: Figure) -> None:
    """Half-widths add: the two sides are taken as independent."""
    difference = figure.minus(figure)
    assert difference.value == 0
    if figure.half_width is not None:
        assert difference.half_width == pytest.approx(figure.half_width * math.sqrt(2), rel=1e-6, abs=1e-6)


@given(figures, st.floats(-1e3, 1e3, allow_nan=False))
def test_scaling(figure: Figure, factor: float) -> None:
    scaled = figure.scaled(factor)
    assert scaled.known == figure.known
    assert scaled.unit == "ms"
    assert figure.scaled(factor, "s").unit == "s"
    if figure.value is None:
        assert scaled.reason == figure.reason
        return
    assert scaled.value == figure.value * factor
    assert (scaled.n, scaled.facts) == (figure.n, figure.facts)
    assert scaled.origin == worst_origin([figure])
    if figure.half_width is None:
        assert scaled.half_width is None
    else:
        assert scaled.low is not None
        assert scaled.high is not None
        assert scaled.low <= scaled.high
        assert scaled.half_width == pytest.approx(abs(factor) * figure.half_width, rel=1e-6, abs=1e-3)


@given(known_figures())
def test_scaling_by_one_and_by_minus_one(figure: Figure) -> None:
    assert figure.scaled(1.0).value == figure.value
    twice = figure.scaled(-1.0).scaled(-1.0)
    assert (twice.value, twice.low, twice.high) == (figure.value, figure.low, figure.high)


def test_half_an_interval_is_none() -> None:
    assert Figure(1.0, "ms", low=0.5).half_width is None
    assert Figure.total([Figure(1.0, "ms", low=0.5), Figure(1.0, "ms", low=0.0, high=2.0)], "ms").low is None
    assert Figure(1.0, "ms", high=0.5).scaled(2.0).high is None


def test_the_empty_sum_is_zero() -> None:
    assert Figure.total([], "ms").value == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"a Figure must be finite, got .* ms"):
        Figure(value, "ms")


@pytest.mark.parametrize("reason", [None, ""])
def test_a_figure_without_a_value_has_a_reason(reason: str | None) -> None:
    with pytest.raises(ValueError, match=r"a Figure without a value \(ms\) needs a reason"):
        Figure(None, "ms", reason=reason)


def test_facts_are_merged_in_order_and_each_once() -> None:
    terms = [Figure(1.0, "ms", facts=("b", "a")), Figure(1.0, "ms", facts=("a", "c"))]
    assert merge_facts(terms) == ("b", "a", "c")
    assert Figure.total(terms, "ms").facts == ("b", "a", "c")


# -- the file --------------------------------------------------------------------------------------------------

few = {"max_size": 2}
texts = st.text(max_size=6)
whole = st.integers(0, 99)
verdict_rows = st.builds(
    VerdictRow,
    module=texts,
    why=texts,
    share=st.floats(0, 1),
    verdict=st.sampled_from(report.VerdictWord.__args__),
    witnesses=st.dictionaries(texts, texts, **few),
)
ledgers = st.builds(
    Ledger,
    wall=figures,
    buckets=st.dictionaries(st.sampled_from(report.BUCKETS), figures, **few),
    idle=figures,
    residual=figures,
    busy=figures,
    complaints=st.lists(texts, **few).map(tuple),
    traced_wall=st.none() | figures,
)
gaps = st.builds(
    Gap, start=figures, end=figures, terms=st.lists(st.builds(GapTerm, name=texts, ms=figures), **few).map(tuple)
)
recipes = st.builds(
    RecipeReport,
    name=texts,
    step_ms=figures,
    host_ms=figures,
    speedups=st.none() | st.builds(Speedups, figures, figures, figures, figures),
    samples=st.lists(st.tuples(whole, st.lists(numbers, **few).map(tuple)), **few).map(tuple),
    ledger=st.none() | ledgers,
    gap=st.none() | gaps,
    gemms=st.lists(st.builds(GemmRow, m=whole, kernel_ms=figures, autocast_ms=figures), **few).map(tuple),
    verdict=st.none()
    | st.builds(Verdict, coverage=figures, te_coverage=figures, rows=st.lists(verdict_rows, **few).map(tuple)),
    scales=st.lists(st.builds(ScaleRow, scale=numbers, amax=numbers, history_max=numbers), **few).map(tuple),
    loss=figures,
    clocks=st.none() | texts,
)
reports = st.builds(
    Report,
    version=st.just(report.VERSION),
    headline=st.lists(texts, **few).map(tuple),
    versions=st.dictionaries(texts, texts, **few),
    recipes=st.lists(recipes, max_size=1).map(tuple),
    shrunk=st.none() | texts,
)


def small(**changes: Any) -> Report:
    values = {
        "version": report.VERSION,
        "tool_version": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
        "model": "Tiny",
        "engine": "plain_torch",
        "why_engine": "no CUDA",
        "device": "CPU",
        "versions": {"torch": "2.6"},
        "headline": ("bf16 is 1.10x",),
        "reading": (),
        "baseline": "fp32",
        "recipes": (RecipeReport("fp32", "FP32", True), RecipeReport("bf16", "BF16", False)),
        "plan": "3 rounds",
    }
    return Report(**{**values, **changes})


@settings(max_examples=40)
@given(whole_report=reports)
def test_what_is_saved_is_what_is_loaded(tmp_path_factory: Any, whole_report: Report) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole_report.save(folder / report.FILE_NAME)
    assert load_report(folder) == whole_report
    assert load_report(str(folder / report.FILE_NAME)) == whole_report


@given(reports)
def test_a_report_is_plain_json(whole_report: Report) -> None:
    body = json.loads(whole_report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(body) == [field.name for field in dataclasses.fields(Report)]


def test_a_run_that_diverged_has_a_report_too(tmp_path: Path) -> None:
    row = ScaleRow("m", "gemm0.input", scale=math.inf, amax=math.nan, history_max=-math.inf, history_length=16)
    saved = small(recipes=(RecipeReport("bf16", "BF16", True, scales=(row,)),))
    saved.save(tmp_path / report.FILE_NAME)
    found = load_report(tmp_path).recipe("bf16").scales[0]
    assert found.scale == math.inf
    assert math.isnan(found.amax)
    assert found.history_max == -math.inf


def test_a_recipe_by_name() -> None:
    assert small().recipe("bf16").title == "BF16"
    with pytest.raises(KeyError, match="no recipe 'fp8' in this report; it has fp32, bf16"):
        small().recipe("fp8")


def test_what_was_not_measured_has_a_reason() -> None:
    part = RecipeReport("bf16", "BF16", False)
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Figure):
            assert not value.known
            assert value.reason


@pytest.mark.parametrize("name", ["", "missing", "missing.json"])
def test_a_missing_report(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReportError, match=r"cannot be read \(No such file or directory\)"):
        load_report(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "no report (it has no integer 'version')"),
        (b"null", "no report (it has no integer 'version')"),
        (b"{}", "no report (it has no integer 'version')"),
        (b'{"version": "1"}', "no report (it has no integer 'version')"),
        (b'{"version": 99}', "schema version 99, this package reads up to 1: upgrade lowprec_callback"),
        (b'{"version": 1}', "tool_version: Field required"),
    ],
)
def test_a_report_that_cannot_be_read(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / report.FILE_NAME
    file.write_bytes(content)
    with pytest.raises(ReportError) as caught:
        load_report(tmp_path)
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_figure_that_was_tampered_with(tmp_path: Path) -> None:
    body = json.loads(small().to_json())
    body["recipes"][0]["step_ms"] = {"value": None, "unit": "ms"}
    (tmp_path / report.FILE_NAME).write_text(json.dumps(body))
    with pytest.raises(ReportError, match=r"recipes\.0\.step_ms: .*needs a reason"):
        load_report(tmp_path)


@given(st.data())
def test_any_change_of_one_character_is_read_or_refused(tmp_path_factory: Any, data: st.DataObject) -> None:
    text = small().to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from('x"{}[]:,0-\n'))
    assume(text[at] != other)
    file = tmp_path_factory.mktemp("run") / report.FILE_NAME
    file.write_text(text[:at] + other + text[at + 1 :])
    try:
        load_report(file)
    except ReportError:
        return
