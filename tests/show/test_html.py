"""The HTML page: the console's words, nothing loaded, nothing unescaped, an origin behind each number."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.panel import Panel
from rich.text import Text

from lowprec_callback.recording import ROLES
from lowprec_callback.report import Figure, GemmRow, KernelRow, RecipeReport, Report, ScaleRow, Verdict, VerdictRow
from lowprec_callback.show import html, plots
from lowprec_callback.show.console import as_text
from lowprec_callback.show.html_blocks import blocks, hover
from lowprec_callback.show.plot_svg import svg
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections import recipes as recipes_

from . import samples
from .sample_parts import verdict
from .sample_strategies import reports
from .test_places import with_places

VOID = {"meta", "br"}
FILES = ("report.html", "report.json")


class Page(HTMLParser):
    """A page taken apart; raises AssertionError where an element is not closed as it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shared: list[str] = []
        """The texts that the console has too."""
        self.whole: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag != "span":
            self.shared.append(" ")
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        opened, _ = self.open.pop()
        assert opened == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if "body" not in tags:
            return
        self.whole.append(data)
        if not any("data-page" in attributes for _, attributes in self.open):
            self.shared.append(data)

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]


@cache
def sample_page(name: str) -> str:
    return html.as_html(samples.ALL[name](), FILES)


def words_of_console(report: Report) -> Counter[str]:
    text = as_text(report, html.WIDTH, FILES)
    return Counter(re.sub("[▏▎▍▌▋▊▉█─]", " ", text).split())


def words_of_page(report: Report) -> Counter[str]:
    """Of all that the console has too; without plots, which it has not, and which take long to draw."""
    with without_plots():
        return Counter("".join(Page(html.as_html(report, FILES)).shared).split())


def without_plots() -> AbstractContextManager[object]:
    return mock.patch.object(html, "PLOTS", {})


@pytest.mark.parametrize("name", samples.ALL)
def test_console_and_page_say_the_same_words(name: str) -> None:
    report = samples.ALL[name]()
    assert words_of_page(report) == words_of_console(report)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reports())
def test_whatever_is_missing_console_and_page_say_the_same_words(report: Report) -> None:
    assert words_of_page(report) == words_of_console(report)


@pytest.mark.parametrize("name", samples.ALL)
def test_every_sentence_stands_whole_on_the_page(name: str) -> None:
    report = samples.ALL[name]()
    page = " ".join("".join(Page(sample_page(name)).shared).split())
    reasons = [f"{recipe.name} not run: {recipe.refusal}" for recipe in report.recipes if recipe.refusal]
    verdicts = [recipe.verdict for recipe in report.recipes if recipe.verdict]
    told = [text for each in verdicts for text in (*each.disagreements, *each.slow_paths)]
    read = [re.sub(r"^(?:fp8_\w+|bf16): .", "", sentence) for sentence in report.reading]
    for sentence in (*report.headline, *read, *reasons, *told, *report.problems, report.plan, str(report.restored)):
        assert sentence in page


@pytest.mark.parametrize("name", samples.ALL)
def test_nothing_is_loaded_and_no_script_runs(name: str) -> None:
    text = sample_page(name)
    page = Page(text)
    loading = {"script", "link", "img", "iframe", "object", "embed", "base", "audio", "video", "form", "image", "a"}
    assert not loading & {tag for tag, _ in page.elements}
    assert not [attribute for _, attributes in page.elements for attribute in attributes if attribute.startswith("on")]
    for attribute in ("src", "href", "action", "poster", "data", "srcset", "formaction"):
        assert not page.attributes(attribute)
    assert all(target.startswith("#") for target in page.attributes("xlink:href"))
    assert set(re.findall(r"url\(([^#)]*)", text)) <= {""}
    assert "@import" not in text
    assert "http" not in text


@pytest.mark.parametrize("name", samples.ALL)
def test_ids_are_unique_and_every_reference_finds_its_own(name: str) -> None:
    text = sample_page(name)
    page = Page(text)
    ids = page.attributes("id")
    assert ids
    assert len(set(ids)) == len(ids)
    wanted = {target[1:] for target in page.attributes("xlink:href")} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert wanted | set(page.attributes("aria-labelledby")) <= set(ids)


def test_each_plot_is_a_picture_with_its_caption() -> None:
    page = Page(sample_page("codonfm"))
    assert [tag for tag, _ in page.elements].count("svg") == 3
    assert "819.2 ms became 513.0 with fp8_delayed (1.60x)" in page.whole


def test_a_plot_without_data_says_why() -> None:
    report = samples.codonfm()
    recipes = tuple(replace(recipe, samples=()) for recipe in report.recipes)
    with mock.patch.object(html, "PLOTS", {recipes_.signs: "step_times"}):
        page = Page(html.as_html(replace(report, recipes=recipes)))
    assert "No plot step_times: no recipe has a timed step" in page.whole


def test_svg_does_not_touch_the_settings_of_others() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    assert svg(plots.step_times(samples.cpu()), "one").startswith("<svg viewBox=")
    assert dict(matplotlib.rcParams) == before


EVIL = "<script>alert('x')</script>\"&<b>"


def test_names_and_reasons_are_escaped_everywhere() -> None:
    report = samples.fallback()
    bf16, delayed, *others = report.recipes
    assert bf16.verdict is not None
    assert delayed.verdict is not None
    odd = replace(delayed.verdict.rows[0], module=EVIL, verdict="fallback", ran=EVIL, why=EVIL, witnesses={EVIL: EVIL})
    evil = replace(
        delayed,
        name=EVIL,
        peak_gb=Figure(1.0, EVIL, facts=(EVIL,)),
        host_ms=Figure.missing("ms", EVIL),
        verdict=replace(delayed.verdict, rows=(odd, *delayed.verdict.rows), slow_paths=(EVIL,), beside=(EVIL,)),
        gemms=tuple(replace(row, operation=EVIL) for row in delayed.gemms),
        gap=replace(delayed.gap, recipe=EVIL) if delayed.gap else None,
        scales=(ScaleRow(EVIL, EVIL, 1.0, 1.0, 1.0, 1),),
        clocks=EVIL,
    )
    report = replace(
        report,
        model=EVIL,
        device=EVIL,
        versions={"torch": EVIL},
        headline=(EVIL,),
        reading=(EVIL,),
        recipes=(bf16, evil, *others, RecipeReport("x", "x", False, refusal=EVIL)),
        problems=(EVIL,),
        plan=EVIL,
        recording=EVIL,
    )
    text = html.as_html(report, (EVIL,))
    page = Page(text)
    assert "<script" not in text
    assert "<b>" not in text
    assert {tag for tag, _ in page.elements} & {"script", "b"} == set()
    assert words_of_page(report) == words_of_console(report)


def test_every_number_of_the_tables_tells_its_origin() -> None:
    report = samples.codonfm()
    step = replace(report.recipe("fp8_delayed").step_ms, facts=("step_time lines 40-63",))
    recipes = tuple(replace(part, step_ms=step) if part.name == "fp8_delayed" else part for part in report.recipes)
    with without_plots():
        page = Page(html.as_html(replace(report, recipes=recipes)))
    said = "513 ms, measured, 95% interval 512.7 to 513.3, 24 samples, from step_time lines 40-63"
    assert said in page.attributes("title")
    ran = [recipe for recipe in report.recipes if recipe.refusal is None]
    seven = ["step ms", "against bf16", "GEMM only", "+ quantization", "Amdahl", "peak GB", "ran as asked"]
    for column in seven:
        assert page.whole.count(column) >= len(ran), column
    assert page.whole.count("step_time lines 40-63") == 1
    # Each gap with the baseline has a table of origins; those of the other pairs are folded away without.
    assert page.whole.count("measured difference") == 2 * (len(ran) - 1) + math.comb(len(ran) - 1, 2)


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (Figure(1.0, "x"), "1 x, derived"),
        (Figure(2.5, "ms", "measured", n=1), "2.5 ms, measured, 1 sample"),
        (Figure(2.5, "GB", "estimated", facts=("a", "b", "c", "d")), "2.5 GB, estimated, from a; b; c and 1 more"),
        (Figure.missing("ms", "no\ntrace"), "not known: no trace"),
    ],
)
def test_what_a_hover_tells(figure: Figure, text: str) -> None:
    assert hover(figure) == text


def test_what_the_console_shortens_is_whole_on_the_page() -> None:
    report = samples.codonfm()
    page = Page(sample_page("codonfm"))
    delayed = report.recipe("fp8_delayed")
    assert delayed.verdict is not None
    for row in delayed.verdict.rows:
        assert page.whole.count(row.module) >= len(ROLES)
    assert "layers.23.mlp.fc1" in page.whole
    assert "All 96 timed steps" in page.whole
    assert "layers.23.mlp.fc1" not in as_text(report, html.WIDTH)


def test_a_verdict_from_a_capture_is_shown() -> None:
    report = samples.codonfm()
    row = KernelRow("", "forward", "e4m3", "bf16", "fallback", "the kernel's name says bf16", 24, 8.1)
    unknown = Figure.missing("share", "a capture tells no shapes")
    seen = Verdict(unknown, unknown, (), "Told by kernels.", kernels=(row,))
    report = replace(report, recipes=(report.recipes[0], replace(report.recipe("fp8_delayed"), verdict=seen)))
    with without_plots():
        assert "unknown module forward" in Page(html.as_html(report)).whole
    assert words_of_page(report) == words_of_console(report)


def test_whatever_a_section_holds_is_shown() -> None:
    (block,) = blocks([Panel(Text("something new"))])
    assert block.kind == "pre"
    assert "something new" in block.runs[0].text


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 10))
def test_a_bar_keeps_its_length(size: float) -> None:
    (block,) = blocks([parts.paragraph(Text(parts.bar(size, 10, 32), style="green").append("  note", "dim"))])
    bar, note = block.runs
    assert bar.bar == pytest.approx(size / 10 * 32, abs=1 / 8)
    assert (bar.classes, bar.text) == ("good", "")
    assert (note.text, note.classes) == ("  note", "good dim")


def test_a_page_of_nothing() -> None:
    report = replace(samples.codonfm(), headline=(), reading=(), recipes=(), versions={}, plan="", recording=None)
    assert words_of_page(report) == words_of_console(report)


def large() -> Report:
    """As large as a 5-billion-parameter model's: 97 linear layers, each an operation of its own, four recipes."""
    report = with_places(samples.codonfm(), 120)
    names = [f"layers.{i}.{name}" for i in range(24) for name in ("qkv", "proj", "fc1", "fc2")] + ["head"]
    lines = "; ".join(f"gemm_time lines {10 * i}-{10 * i + 5}" for i in range(4))
    ms = Figure(1.234567, "ms", "measured", 1.2, 1.3, 30, (lines,))
    gemms = tuple(GemmRow(name, role, 15872, 4096, 16384, 1, ms, ms) for name in names for role in ROLES)
    assert len(gemms) == 291
    witnesses = dict.fromkeys(("operands", "library", "kernels"), "e4m3 x e5m2 -> bf16, nvjet_sm90_qrtst_128x256_64x4")
    why = "three witnesses agree on every call of the watched step"
    made = verdict(24, "e4m3/e5m2")
    rows: list[VerdictRow] = [replace(row, why=why, witnesses=witnesses) for row in made.rows]
    scales = tuple(ScaleRow(name, tensor, 1.0, 2.0, 3.0, 1024) for name in names for tensor in ("x", "w", "dy"))
    recipes = tuple(
        replace(recipe, gemms=gemms, verdict=replace(made, rows=tuple(rows)), scales=scales)
        if recipe.refusal is None
        else recipe
        for recipe in report.recipes
    )
    return replace(report, recipes=recipes)


def test_the_page_of_a_large_model_is_under_2_megabytes() -> None:
    report = large()
    text = html.as_html(report, FILES)
    assert len(text.encode()) < 2_000_000
    assert Counter("".join(Page(text).shared).split()) == words_of_console(report)


def test_the_page_is_written_as_utf_8(tmp_path: Path) -> None:
    with without_plots():
        html.save(samples.codonfm(), tmp_path / "report.html", FILES)
        whole = html.as_html(samples.codonfm(), FILES)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text == whole
    assert "±" in text
    assert text.startswith("<!DOCTYPE html>")


def test_the_same_report_makes_the_same_page() -> None:
    """Plots too: nothing in them is random or tells the time."""
    assert html.as_html(samples.ALL["cpu"](), FILES) == sample_page("cpu")
