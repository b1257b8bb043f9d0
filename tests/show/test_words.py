"""How numbers and names are written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.report import Figure, Verdict
from lowprec_callback.show import words

from . import samples
from .sample_parts import verdict


def figure(value: float, half: float | None = None, unit: str = "ms", origin: str = "measured") -> Figure:
    low, high = (None, None) if half is None else (value - half, value + half)
    return Figure(value, unit, origin, low, high)  # type: ignore[arg-type]


MISSING = Figure.missing("ms", "the run was\n  interrupted")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5031, "0.503"),
        (0.9996, "1.00"),
        (5.324, "5.32"),
        (9.996, "10.0"),
        (27.04, "27.0"),
        (819.24, "819.2"),
        (9999.96, "10000"),
        (12345.6, "12346"),
        (0.0, "0.000"),
        (-0.0001, "0.000"),
    ],
)
def test_a_number_shows_the_digits_that_its_size_deserves(value: float, text: str) -> None:
    assert words.ms(figure(value)) == text


@pytest.mark.parametrize(
    ("half", "text"),
    [(0.4, "819.2 ±0.4"), (12.0, "819.2 ±12.0"), (0.02, "819.2 ±0.1"), (0.0, "819.2 ±0.1"), (None, "819.2")],
)
def test_a_half_width_has_the_decimals_of_its_number_and_is_never_zero(half: float | None, text: str) -> None:
    assert words.ms(figure(819.2, half)) == text


def test_an_estimate_is_marked() -> None:
    assert words.ms(figure(3.2, origin="estimated")) == "~3.20"
    assert words.times(figure(1.5, unit="x", origin="estimated")) == "~1.50x"


def test_speedups() -> None:
    assert words.times(figure(1.597, 0.002, "x")) == "1.60x ±0.01"
    assert words.times(figure(0.752, 0.013, "x")) == "0.75x ±0.01"
    assert words.times(figure(1234.0, unit="x")) == "1234x"


def test_memory() -> None:
    assert words.gb(figure(89.52, unit="GB")) == "89.5"
    assert words.gb(figure(0.8123, unit="GB")) == "0.812"
    assert words.gb(figure(141.5, unit="GB")) == "141.5"


@pytest.mark.parametrize("write", [words.ms, words.times, words.gb, words.bare, words.share, words.number])
def test_a_missing_number_is_its_reason_on_one_line(write: object) -> None:
    assert callable(write)
    assert write(MISSING) == "not known: the run was interrupted"


def test_signed_terms_line_up_with_the_step_that_they_are_part_of() -> None:
    step = figure(819.2)
    assert words.signed_ms(figure(-319.31, 0.82), words.places_in(step)) == "-319.3 ±0.8"
    assert words.signed_ms(figure(0.04), words.places_in(step)) == "0.0"
    assert words.signed_ms(figure(9.5), words.places_in(figure(27.0))) == "+9.50"
    assert words.signed_ms(MISSING, 1) == "not known: the run was interrupted"
    assert words.places_in(MISSING) == 3


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "100%"),
        (1 - 1e-12, "100%"),
        (0.99999, "99.9%"),
        (0.944, "94.4%"),
        (0.0004, "<0.1%"),
        (0.0, "0%"),
        (1.2, "120.0%"),
        (math.nan, "not finite"),
    ],
)
def test_coverage_is_never_rounded_to_all_or_nothing(share: float, text: str) -> None:
    assert words.percent(share) == text


def test_coverage_may_come_in_percent() -> None:
    assert words.share(figure(94.4, unit="%")) == words.share(figure(0.944, unit="share")) == "94.4%"


def _silent(made: Verdict, witness: str, module: str) -> Verdict:
    """The same verdict with one witness silent on one module."""
    rows = []
    for row in made.rows:
        saw = {name: text for name, text in row.witnesses.items() if (name, row.module) != (witness, module)}
        rows.append(type(row)(**{**row.__dict__, "witnesses": saw}))
    return Verdict(made.coverage, made.te_coverage, tuple(rows), made.summary)


def test_coverage_names_the_witnesses() -> None:
    assert words.coverage(verdict(2, "e4m3")) == "100% (operands+kernels)"
    assert words.coverage(verdict(2, "e4m3", witnesses=("operands",))) == "100% (operands)"
    assert words.coverage(verdict(2, "e4m3", witnesses=())) == "100% (no witness)"


def test_a_witness_that_was_silent_on_a_part_is_not_credited_with_the_whole() -> None:
    partly = _silent(verdict(2, "e4m3"), "kernels", "layers.1.mlp.fc1")
    assert words.coverage(partly) == "100% (operands+kernels 87.5%)"


def test_sentences() -> None:
    report = samples.codonfm()
    gap = report.recipe("fp8_delayed").gap
    assert gap is not None
    assert words.became(gap) == "Where 819.2 ms became 513.0 (fp8_delayed)"
    assert words.not_run(report.recipe("mxfp8")) == (
        "mxfp8 not run: compute capability 9.0, needs 10.0 (te.is_mxfp8_available)"
    )
    assert words.versions(report) == "TE 2.20.2 · torch 2.11.0+cu130"
    assert words.versions(samples.cpu()) == "torch 2.13.0+cpu"


def test_left_out() -> None:
    assert words.left_out(1, "kernel", "report.json") == "1 more kernel is in report.json."
    assert words.left_out(2, "kernel", "report.json") == "2 more kernels are in report.json."


def test_listed() -> None:
    assert words.listed([]) == ""
    assert words.listed(["a"]) == "a"
    assert words.listed(["a", "b", "c"]) == "a, b and c"


def test_one_line_takes_the_bite_out_of_an_exception() -> None:
    assert words.one_line("boom\n\tat \x1b[31mline\x1b[0m 3\r\n") == "boom at [31mline [0m 3"


LAYERS = [f"layers.{layer}.{name}" for layer in range(24) for name in ("mlp.fc1", "mlp.fc2")]


def test_modules_that_differ_in_an_index_are_one_pattern() -> None:
    assert words.collapse(LAYERS) == [("layers.*.mlp.fc1", 24), ("layers.*.mlp.fc2", 24)]
    assert words.modules([*LAYERS[:4], "head"]) == ("layers.*.mlp.fc1 (2 modules), layers.*.mlp.fc2 (2 modules), head")


def test_only_a_part_of_the_layers_is_told_by_number() -> None:
    some = [f"layers.{layer}.mlp.fc2" for layer in (0, 20, 21, 22, 23)]
    assert words.collapse(some, LAYERS) == [("layers.0,20-23.mlp.fc2", 5)]
    assert words.collapse(LAYERS, LAYERS)[0] == ("layers.*.mlp.fc1", 24)


def test_an_index_that_is_always_the_same_stays() -> None:
    paths = ["stages.0.layers.1.fc1", "stages.0.layers.2.fc1"]
    assert words.collapse(paths) == [("stages.0.layers.*.fc1", 2)]
    assert words.collapse(["layers.3.conv2"]) == [("layers.3.conv2", 1)]


@given(st.lists(st.integers(0, 40)))
def test_ranges_hold_exactly_the_numbers(numbers: list[int]) -> None:
    found: list[int] = []
    for part in filter(None, words.ranges(numbers).split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    assert found == sorted(set(numbers))


@given(st.floats(-1e12, 1e12), st.none() | st.floats(0, 1e6))
def test_no_number_is_ever_written_as_nan_or_negative_zero(value: float, half: float | None) -> None:
    text = words.ms(figure(value, half))
    assert "nan" not in text
    assert "-0.0 " not in f"{text} "
    assert float(text.split()[0]) == pytest.approx(value, rel=1e-2, abs=5e-4)
    if half is not None and half <= abs(value) / 2:
        assert float(text.split("±")[1]) > 0


def test_a_hopeless_interval_is_said_to_be_one() -> None:
    assert words.ms(figure(111.8, 1397.9)) == "111.8 ±>50%"
    assert words.ms(figure(111.8, 55.9)) == "111.8 ±55.9"
    assert words.signed_ms(figure(-1.2, 30.0), 1) == "-1.2 ±30.0"  # a difference may be smaller than its spread


def test_significant_digits_of_scales() -> None:
    assert words.significant(2.68435456e8) == "2.684e+08"
    assert words.significant(0.00019) == "0.00019"
    assert words.significant(math.inf) == "not finite"
