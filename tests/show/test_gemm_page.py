"""The page of `lowprec gemm`: how it looks, and that it says everything once."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from rich.cells import cell_len
from rich.console import Console
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from lowprec_callback import gemm_output
from lowprec_callback.analyze.gemm_table import GemmTable
from lowprec_callback.recording import Environment, GemmRun, GemmTime, Recording
from lowprec_callback.show.gemm_page import GemmPage, sampled
from tests import gemm_recordings as made

WITH_HEAD = replace(made.CODONFM, vocab_size=32000)
COLD = replace(made.ROLE_TRUE_RUN, stopped="budget", seconds=121.3, rounds=9, widest=0.0234, cold_l2=True, accumulate=4)


def only_kernel() -> Recording:
    """`--pre-quantize`."""
    return Recording.from_facts([f for f in made.role_true() if not (isinstance(f, GemmTime) and f.mode == "autocast")])


SAMPLES: dict[str, Callable[[], Recording]] = {
    "role-true": lambda: made.role_true(WITH_HEAD),
    "te-tutorial": made.te_tutorial,
    "both": made.both,
    "failed": lambda: made.failed(made.role_true()),
    "launch-bound": lambda: made.launch_bound(only_kernel()),
    "cold": lambda: made.role_true(run=COLD),
    "impossible": lambda: made.too_fast(made.role_true()),
    "listed": made.listed,
    "unknown-gpu": made.unknown_gpu,
    "unlike-layers": made.unlike_layers,
    "b300": made.b300,
}


@cache
def sample(name: str) -> tuple[Recording, list[GemmTable]]:
    """A sample's intervals are resampled once, however often it is printed."""
    recording = SAMPLES[name]()
    return recording, gemm_output.tables(recording)


def page(of: str | Recording, width: int = 100) -> str:
    """As `lowprec gemm` prints it."""
    recording, tables = sample(of) if isinstance(of, str) else (of, gemm_output.tables(of))
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    place = recording.last(Environment)
    assert place is not None
    console.print(GemmPage(made.NAME, tables, place.device, gemm_output.rates(recording, tables)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def words(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


class PageFile(SingleFileSnapshotExtension):
    """A text file a page, to be looked at as it is."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


@pytest.mark.parametrize("name", SAMPLES)
def test_page(name: str, snapshot: SnapshotAssertion) -> None:
    assert page(name) == snapshot(extension_class=PageFile, name=name)


@pytest.mark.parametrize("width", [80, 140])
def test_page_at_other_widths(width: int, snapshot: SnapshotAssertion) -> None:
    assert page("role-true", width) == snapshot(extension_class=PageFile, name=f"role-true-{width}")


@pytest.mark.parametrize("width", [72, 80, 100, 140])
@pytest.mark.parametrize("name", SAMPLES)
def test_no_line_is_too_wide_and_no_number_is_cut(name: str, width: int) -> None:
    text = page(name, width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    assert not re.search(r"\b(None|nan|inf)\b", text)


def test_a_refusal_is_said_once_however_many_tables_lack_the_recipe() -> None:
    assert words(page("both")).count("mxfp8 and nvfp4 not run: compute capability 9.0, needs 10.0") == 1


def test_a_failed_shape_keeps_its_row_and_withholds_every_sum_with_the_reason() -> None:
    lines = page(made.failed(only_kernel())).splitlines()
    for row in ("   MLP down ", "   fprop sum ", "   dgrad sum ", "   wgrad sum ", "  layer ", "  model, 24 layers "):
        found = [line for line in lines if line.startswith(row)]
        assert found, row
        assert all(re.search(r"\[\d\]$", line) for line in found), found
    text = words("\n".join(lines))
    assert "the benchmark of fp8_block, fprop, 15872x16384x4096, kernel failed: out of memory" in text
    assert "fp8_block against" not in text


def test_launch_bound_is_marked_and_explained_once() -> None:
    text = page("launch-bound")
    (row, *_) = [line for line in text.splitlines() if "attention out" in line]
    assert row.count("*") == 3
    assert words(text).count("* launch-bound: the host needs longer to launch it than the GPU to run it") == 1


def test_advice_is_given_once_of_what_comes_nearest_to_training() -> None:
    slow = made.changed(
        made.both(),
        lambda t: replace(t, samples_ms=tuple(3 * ms for ms in t.samples_ms)) if t.recipe == "fp8_block" else t,
    )
    text = page(slow)
    assert text.count("break-even") == 1
    assert text.index("role-true, with quantization") < text.index("break-even") < text.index("role-true, GEMM only")
    assert "keep it in fp8_delayed: " not in text
    assert "keep these in bf16" in words(text)


def test_nothing_was_timed() -> None:
    text = page(Recording.from_facts([fact for fact in made.role_true() if not isinstance(fact, GemmTime)]))
    assert text.splitlines()[:2] == [made.NAME, "NVIDIA H200"]


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (
            made.ROLE_TRUE_RUN,
            "4 shuffled rounds in 31.4 s, stopped because every layer's median is known to ±1.0%; "
            "hot L2 (as the call before left it)",
        ),
        (
            COLD,
            "9 shuffled rounds in 121.3 s, stopped because the budget of 120 s was spent; widest interval left ±2.3%; "
            "cold L2 (overwritten before each call); weights quantized once in 4 micro-batches",
        ),
        (
            GemmRun("role-true", 1, 130.0, "budget", budget_s=120.0),
            "1 round in 130.0 s, stopped because the budget of 120 s was spent; too few samples for an interval; "
            "hot L2 (as the call before left it)",
        ),
        (
            GemmRun("role-true", 3, 2.0, "rounds", widest=0.1),
            "3 shuffled rounds in 2.0 s, stopped because all rounds were done; widest interval left ±10.0%; "
            "hot L2 (as the call before left it)",
        ),
        (
            GemmRun("role-true", 1, 2.0, "failed"),
            "1 round in 2.0 s, stopped because no shape ran; hot L2 (as the call before left it)",
        ),
        (
            made.TUTORIAL_RUN,
            "one pair of events around 30 calls, so no interval; 9.2 s; hot L2 (as the call before left it)",
        ),
    ],
)
def test_how_it_was_sampled(run: GemmRun, sentence: str) -> None:
    assert sampled(run) == sentence
