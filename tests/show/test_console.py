"""The console page: how it looks, that it says everything, and that it works wherever it is printed."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from lowprec_callback.report import Figure, RecipeReport, Report, Verdict
from lowprec_callback.show.console import Page, as_text, encodable, print_report
from lowprec_callback.show.sections import parts

from . import samples
from .sample_strategies import reports

FILES = ("report.json", "gemm_times.png", "gap_waterfall.png", "step_times.png")


class PageFile(SingleFileSnapshotExtension):
    """A text file a page, to be looked at as it is."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", samples.ALL)
def test_page(name: str, width: int, snapshot: SnapshotAssertion) -> None:
    page = as_text(samples.ALL[name](), width, FILES)
    assert max(map(cell_len, page.splitlines())) <= width
    assert page == snapshot(extension_class=PageFile, name=f"{name}-{width}")


def squeezed(text: str) -> str:
    """Without any white space: what wrapping does to a text does not count."""
    return re.sub(r"\s", "", text)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reports(), st.sampled_from([100, 160]))
def test_whatever_is_missing_the_page_renders_and_says_why(report: Report, width: int) -> None:
    page = as_text(report, width)
    assert not re.search(r"\b(None|nan|inf)\b", page)
    assert max(map(cell_len, page.splitlines())) <= width
    for recipe in report.recipes:
        assert recipe.name in page
        if recipe.refusal is not None:
            assert squeezed(f"{recipe.name} not run: {recipe.refusal}") in squeezed(page)
            continue
        for figure in (recipe.step_ms, recipe.peak_gb, recipe.host_ms, recipe.gemm_kernel_ms):
            if not figure.known and recipe.gemms:
                assert squeezed(figure.reason or "") in squeezed(page)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reports(), st.integers(40, 79))
def test_a_narrow_page_may_be_ugly_but_never_too_wide(report: Report, width: int) -> None:
    assert max(map(cell_len, as_text(report, width).splitlines())) <= width


@pytest.mark.parametrize("name", samples.ALL)
def test_colours_change_nothing_but_colours(name: str) -> None:
    report = samples.ALL[name]()
    out = io.StringIO()
    print_report(report, Console(file=out, width=100, force_terminal=True, color_system="standard", no_color=False))
    assert "\x1b[" in out.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert [line.rstrip() for line in plain.splitlines()] == as_text(report, 100).splitlines()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("name", samples.ALL)
def test_an_encoding_without_the_signs_keeps_the_columns(name: str, encoding: str) -> None:
    report = samples.ALL[name]()
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as file:
        console = Console(file=file, width=100, color_system=None, legacy_windows=False)
        console.print(Page(report))
        file.flush()
        lines = [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]
    wanted = as_text(report, 100).splitlines()
    assert len(lines) == len(wanted)
    for line, original in zip(lines, wanted, strict=True):
        assert squeezed(line[:28]) == squeezed(encodable(original, encoding)[:28])
    if encoding == "ascii":
        assert "819.2+-0.4" in "\n".join(lines) or name in ("seed", "cpu")
        assert "####" in "\n".join(lines)


def test_the_order_of_the_page() -> None:
    page = as_text(replace(samples.interrupted(), reading=("bf16: nothing to read.",)), 100)
    order = [
        "lowprec_callback",
        "This run was interrupted",
        "fp8_delayed makes a step 1.60x faster",
        "ran as asked",
        "GEMM promise against measured step",
        "Where 819.2 ms became 513.0 (fp8_delayed)",
        "One step's time, ms",
        "Delayed scaling of layers.0.mlp.fc1",
        "GEMM benchmark at the model's own shapes",
        "mxfp8 not run:",
        "How this was measured",
        "Problems",
        "Recording runs/interrupted/recording.jsonl",
    ]
    places = [page.index(text) for text in order]
    assert places == sorted(places)


def test_a_reason_is_text_and_not_markup() -> None:
    report = samples.codonfm()
    reason = "[bold]needs[/bold] sm_100 [see :rocket: docs] \\[x]"
    recipes = (*report.recipes[:-1], RecipeReport("nvfp4", "NVFP4", False, refusal=reason))
    assert f"nvfp4 not run: {reason}" in as_text(replace(report, recipes=recipes), 160)


def test_a_long_reason_is_wrapped_and_never_shortened() -> None:
    reason = " ".join(f"word{number}" for number in range(200))
    report = samples.codonfm()
    delayed = replace(report.recipe("fp8_delayed"), peak_gb=Figure.missing("GB", reason))
    page = as_text(replace(report, recipes=(report.recipes[0], delayed)), 80)
    assert squeezed(reason) in squeezed(page)
    assert "…" not in page


def test_zero_and_none_seen_differ_in_the_ledger() -> None:
    report = samples.codonfm()
    part = report.recipe("fp8_delayed")
    assert part.ledger is not None
    buckets = {**part.ledger.buckets, "copy": Figure(0.004, "ms"), "loss": Figure(0.0, "ms")}
    only = replace(part, ledger=replace(part.ledger, buckets=buckets))
    page = as_text(replace(report, recipes=(report.recipes[0], only)), 100)
    assert re.search(r"^ +copy +1\.9 +0\.0$", page, re.MULTILINE)
    assert re.search(r"^ +loss +3\.2 +-$", page, re.MULTILINE)
    assert re.search(r"^ +quantize +- +31\.8$", page, re.MULTILINE)


def test_an_incomplete_ledger_says_so_on_its_face() -> None:
    page = as_text(samples.interrupted(), 160)
    assert re.search(r"^ +incomplete$", page, re.MULTILINE)
    assert "incomplete: 61 of 288 GEMM kernels are missing from the trace; residual above 1%" in page


def test_no_verdict_details_where_everything_is_confirmed() -> None:
    assert "Asked against ran" not in as_text(samples.codonfm(), 100)


def test_verdict_details_collapse_modules_and_start_with_the_worst() -> None:
    page = as_text(samples.fallback(), 160)
    assert "layers.20-23.mlp.fc2 (4 modules), fprop, dgrad, wgrad: asked e4m3/e5m2, ran bf16 (4.2%" in page
    assert page.index("  fallback") < page.index("  unproven") < page.index("  outside")


def test_without_any_witness_the_rows_are_not_listed_one_by_one() -> None:
    report = samples.fallback()
    verdict = report.recipe("fp8_delayed").verdict
    assert verdict is not None
    blind = replace(verdict, coverage=Figure.missing("share", "no traced step"), summary="What ran is not known.")
    page = as_text(replace(report, recipes=(report.recipes[0], _with_verdict(report, blind))), 100)
    assert "What ran is not known." in page
    assert "unproven" not in page


def _with_verdict(report: Report, verdict: Verdict) -> RecipeReport:
    return replace(report.recipe("fp8_delayed"), verdict=verdict)


def test_a_benchmark_of_many_operations_says_what_it_leaves_out() -> None:
    report = samples.codonfm()
    base = report.recipes[0]
    row = base.gemms[0]
    many = tuple(replace(row, operation=f"expert{number}") for number in range(40))
    page = as_text(replace(report, recipes=(replace(base, gemms=many),)), 100)
    assert len(set(re.findall(r"expert\d+", page))) == 6
    assert squeezed("34 more operations are in report.json") in squeezed(page)


def test_launch_bound_times_are_marked() -> None:
    page = as_text(samples.seed(), 100)
    assert "*" in page
    assert "launch-bound: the host needs longer to launch it than the GPU to run it" in page
    assert "launch-bound: the host needs" not in as_text(samples.codonfm(), 100)


def test_nothing_at_all_was_measured() -> None:
    report = replace(
        samples.codonfm(),
        headline=(),
        reading=(),
        recipes=(),
        versions={},
        plan="",
        restored=None,
        recording=None,
        device="",
    )
    page = as_text(report, 80)
    assert "Recording not on disk" in page
    assert "nothing recorded as restored" in page
    assert "\n\n\n" not in page


@pytest.mark.parametrize(
    ("size", "text"),
    [(10, "██████████"), (5, "█████"), (0.0001, "▏"), (0, ""), (-10, "██████████"), (1.25, "█▎"), (1e-9, "")],
)
def test_bars_are_proportional_and_the_smallest_can_be_seen(size: float, text: str) -> None:
    assert parts.bar(size, 10, 10) == text
    assert parts.bar(size, 0, 10) == ""
