"""The page's section about the numerics guard: sound recipes, wrong ones, and nothing known."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console, Group
from syrupy.assertion import SnapshotAssertion

from lowprec_callback.report import Figure, NumericsReport, NumericsState, RecipeReport, Report
from lowprec_callback.show import html
from lowprec_callback.show.console import as_text
from lowprec_callback.show.sections.numerics import numerics

from . import samples
from .test_memory_section import SectionFile


def guard(state: NumericsState, why: str, loss: float | None, away: float | None, **more: object) -> NumericsReport:
    made = NumericsReport(
        state,
        why,
        4,
        Figure(6.2345, "nats", "measured"),
        Figure.missing("nats", "the loss is nan") if loss is None else Figure(loss, "nats", "measured"),
        Figure.missing("%", "a loss is not finite") if away is None else Figure(away, "%"),
        Figure(1.0, "%"),
        Figure(1.004, "x"),
        Figure(0.0, "parameters", "measured"),
        Figure(0.0, "parameters", "measured"),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def part(name: str, made: NumericsReport | None) -> RecipeReport:
    return RecipeReport(name, name, name == "bf16", guard=made)


LOST = "the gradients of blocks.0.mlp.fc1.weight, blocks.1.mlp.fc1.weight are zero in every step, and not in bf16"
FAR = "the loss is 10% from bf16's after 3 updates on the same data (limit 1%)"


def report() -> Report:
    """By hand: one recipe of each kind."""
    return replace(
        samples.codonfm(),
        recipes=(
            part("bf16", guard("ok", "repeated", 6.2345, 0.0)),
            part("fp8_delayed", guard("ok", "near", 6.2351, 0.0096, scales="12 scales left 1")),
            part("fp8_current", guard("far", FAR, 6.858, 10.0)),
            part("fp8_block", guard("zero gradients", f"{LOST} (30.2% of all elements)", 6.2301, 0.07,
                                    zero=Figure(2.0, "parameters", "measured"))),
            part("mxfp8", guard("not finite", "the loss is nan after 2 updates from the common state", None, None,
                                not_finite=Figure(48.0, "parameters", "measured"))),
            part("nvfp4", guard("frozen scales", "every scale stayed at 1", 6.24, 0.09,
                                scales="every scale stayed at 1")),
            part("my_recipe", None),
        ),
    )  # fmt: skip


def rendered(report: Report, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(Group(*numerics(report, width)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_section(width: int, snapshot: SnapshotAssertion) -> None:
    text = rendered(report(), width)
    assert text == snapshot(extension_class=SectionFile)
    assert not [line for line in text.splitlines() if cell_len(line) > width]


def test_a_sound_recipe_needs_no_sentence() -> None:
    text = rendered(replace(report(), recipes=report().recipes[:1]), 100)
    assert "repeated" not in text
    assert text.rstrip().endswith("ok")


def test_what_was_not_looked_at_is_one_line() -> None:
    nothing = Figure.missing("%", "switched off")
    made = NumericsReport("unknown", "it was switched off (guard_steps=0)", zero=nothing, not_finite=nothing)
    text = rendered(replace(report(), recipes=(part("bf16", made), part("fp8_block", made))), 100)
    assert text == "Numerics guard\n  Not known: it was switched off (guard_steps=0).\n"


def test_an_older_report_has_no_section() -> None:
    assert numerics(samples.codonfm(), 80) == []


def test_console_and_page_say_it_in_the_same_words() -> None:
    page, console = html.as_html(report()), as_text(report(), html.WIDTH)
    for text in ("zero gradients", "frozen scales", "10% from bf16", "blocks.0.mlp.fc1.weight"):
        assert text in console
        assert text in page
