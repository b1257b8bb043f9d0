"""The page's section about memory: a recipe that held what it should, one that did not, and nothing measured."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console, Group
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from lowprec_callback.report import (
    MEMORY_TERMS,
    Figure,
    MemoryMoment,
    MemoryReport,
    MemoryTerm,
    RecipeReport,
    Report,
)
from lowprec_callback.show import html
from lowprec_callback.show.console import as_text
from lowprec_callback.show.sections.memory import memory

from . import samples


class SectionFile(SingleFileSnapshotExtension):
    """A text file a section, to be looked at as it is."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


def gb(value: float) -> Figure:
    return Figure(value, "GB", "measured")


def phases(*values: float) -> dict[str, Figure]:
    names = ("parameters", "start", "forward", "backward", "optimizer", "peak")
    return {name: gb(value) for name, value in zip(names, values, strict=True)}


def terms(*pairs: tuple[float, float], unread: str | None = None) -> tuple[MemoryTerm, ...]:
    names = ("copies of weights", "saved inputs", "forward, against bf16")
    return tuple(
        MemoryTerm(name, gb(should), Figure.missing("GB", unread) if unread else gb(seen))
        for name, (should, seen) in zip(names, pairs, strict=False)
    )


def moments(
    where: str, peak: float, reserved: float, made: tuple[float, float, float, float], told: bool = True
) -> tuple[MemoryMoment, ...]:
    """The ledger after forward and at the peak; `made` are copies, activations after forward, those at the peak, and
    temporaries. Without `told`, the allocator did not count what was asked for."""
    copies, saved, left, temporary = made
    always = {"parameters": 9.7, "optimizer state": 38.8, "buffers and scales": 0.02, "cuBLASLt workspace": 0.034}
    live = math.fsum(always.values()) + 9.7 + copies + saved + 0.1
    forward = {
        **always,
        "gradients": 9.7,
        "copies of weights": copies,
        "saved activations": saved,
        "not attributed": 0.1,
        "rounding": 0.004,
        "reserved but unused": reserved - live - 0.004,
    }
    full = {
        **always,
        "gradients": 4.1,
        "copies of weights": copies / 2,
        "saved activations": left,
        "temporaries": temporary,
        "not attributed": 0.1,
        "rounding": 0.004,
        "reserved but unused": reserved - peak,
    }

    def figures(terms: dict[str, float]) -> dict[str, Figure]:
        unknown = () if told else ("saved activations", "temporaries", "not attributed", "rounding")
        missing = Figure.missing("GB", "this allocator does not count what was asked for")
        return {name: missing if name in unknown else gb(terms[name]) for name in MEMORY_TERMS if name in terms}

    inside = {"inputs of linear layers": gb(19.2), "the rest of them": gb(left - 19.2)} if told else {}
    return (
        MemoryMoment("forward", "after forward", figures(forward), gb(reserved), fragmented=gb(0.3)),
        MemoryMoment("peak", where, figures(full), gb(reserved), inside),
    )


def part(name: str, memory: MemoryReport | None) -> RecipeReport:
    return RecipeReport(name, name, name == "bf16", memory=memory)


HEAD = "in backward, at head"
AGREES = "96 weights hold 1 B of data a value, as asked; after forward it held"


def report(scale: float = 1.0) -> Report:
    """By hand: a 5-billion-parameter model on a B300; `scale` makes it a small one."""

    def of(*values: float) -> dict[str, Figure]:
        return phases(*(value * scale for value in values))

    def pairs(*found: tuple[float, float]) -> tuple[MemoryTerm, ...]:
        return terms(*((should * scale, seen * scale) for should, seen in found))

    def scaled(found: tuple[MemoryMoment, ...]) -> tuple[MemoryMoment, ...]:
        return tuple(
            replace(
                each,
                terms={name: figure.scaled(scale) for name, figure in each.terms.items()},
                reserved=each.reserved.scaled(scale),
            )
            for each in found
        )

    recipes = (
        part(
            "bf16",
            MemoryReport(
                "agrees",
                "96 weights hold 2 B of data a value, as asked",
                of(9.7, 58.1, 112.4, 67.9, 58.1, 114.0),
                pairs((0.0, 0.0), (21.84, 21.84)),
                moments=scaled(moments(HEAD, 114.0, 118.2, (0.0, 53.9, 54.0, 7.2))),
            ),
        ),
        part(
            "mxfp8",
            MemoryReport(
                "agrees",
                f"{AGREES} 2.34 GB more than bf16, as it should",
                of(9.7, 58.1, 114.7, 67.9, 58.1, 116.9),
                pairs((9.97, 9.97), (19.20, 19.20), (2.34, 2.34)),
                "mxfp8 holds 2.34 GB more after forward than bf16: copies of weights +9.97 GB, beside the parameters; "
                "saved inputs -2.64 GB. Expected, no fault.",
                scaled(moments(HEAD, 116.9, 121.0, (9.97, 46.3, 50.1, 9.1))),
            ),
        ),
        part(
            "nvfp4",
            MemoryReport(
                "contradicts",
                "nvfp4 held as many bytes as mxfp8: FP4 was never stored (after forward 2.34 GB more than bf16, should "
                "be 10.93 GB less)",
                of(9.7, 58.1, 114.7, 67.9, 58.1, 116.9),
                pairs((5.44, 9.97), (10.48, 19.20), (-10.93, 2.34)),
                moments=scaled(moments("in backward, at layers.23.mlp", 116.9, 121.0, (9.97, 46.3, 50.1, 9.1), False)),
            ),
        ),
        part(
            "fp8_block",
            MemoryReport(
                "silent",
                "no allocator counters of a watched step of fp8_block were recorded",
                {},
                terms(
                    *((should * scale, 0.0) for should in (9.67, 19.2, 2.04)),
                    unread="the bytes of its operands were not recorded",
                ),
            ),
        ),
    )
    return replace(samples.codonfm(), recipes=recipes)


def rendered(of: Report, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(Group(*memory(of, width)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_section(width: int, snapshot: SnapshotAssertion) -> None:
    text = rendered(report(), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert text == snapshot(extension_class=SectionFile, name=f"memory-{width}")


def test_a_small_model_is_told_in_megabytes() -> None:
    text = rendered(report(scale=0.004), 100)
    assert "Memory of one step, MB" in text
    assert "449.6" in text  # 112.4 GB x 0.004
    assert "What linear layers hold from forward to backward, MB" in text
    assert "+9.36" in text


def test_every_phase_is_on_the_page_below_the_section() -> None:
    page = html.as_html(report())
    assert "Memory at every phase, GB: mxfp8" in page
    assert "at the peak (in backward, at head)" in page
    assert "of it pieces of blocks in use" in page


def test_a_dash_is_where_a_moment_cannot_have_a_term_and_zero_rows_are_left_out() -> None:
    text = rendered(report(), 100)
    table = text[: text.index("Memory of one step")]
    (row,) = [line.split() for line in table.splitlines() if line.strip().startswith("temporaries")]
    assert row == ["temporaries", "7.20", "9.10", "[1]"]
    assert "activations and copies" not in table
    assert "[1]  this allocator does not count what was asked for" in table


def test_it_stands_on_the_page_below_the_verdict() -> None:
    page = as_text(report(), 100)
    assert page.index("Memory of one step, GB") < page.index("What linear layers hold")
    assert "nvfp4      contradicts: nvfp4 held as many bytes as mxfp8: FP4 was never stored" in page


def test_nothing_measured_is_one_line_and_an_old_report_says_nothing() -> None:
    missing = Figure.missing("GB", "a CPU has no allocator counters")
    silent = MemoryReport(
        "silent", "a CPU has no allocator counters", {"parameters": gb(9.7), "start": missing, "peak": missing}
    )
    cpu = replace(report(), recipes=(part("fp32", silent), part("bf16", silent)))
    assert rendered(cpu, 80) == "Memory\n  The memory witness is silent: a CPU has no allocator counters.\n"
    assert memory(replace(report(), recipes=(part("bf16", None),)), 80) == []
