"""The page's section about memory: a recipe that held what it should, one that did not, and nothing measured."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console, Group
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from lowprec_callback.report import Figure, MemoryReport, MemoryTerm, RecipeReport, Report
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


def part(name: str, memory: MemoryReport | None) -> RecipeReport:
    return RecipeReport(name, name, name == "bf16", memory=memory)


AGREES = "96 weights hold 1 B of data a value, as asked; after forward it held"


def report(scale: float = 1.0) -> Report:
    """By hand: a 5-billion-parameter model on a B300; `scale` makes it a small one."""

    def of(*values: float) -> dict[str, Figure]:
        return phases(*(value * scale for value in values))

    def pairs(*found: tuple[float, float]) -> tuple[MemoryTerm, ...]:
        return terms(*((should * scale, seen * scale) for should, seen in found))

    recipes = (
        part(
            "bf16",
            MemoryReport(
                "agrees",
                "96 weights hold 2 B of data a value, as asked",
                of(9.7, 58.1, 112.4, 67.9, 58.1, 114.0),
                pairs((0.0, 0.0), (21.84, 21.84)),
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
