"""What `lowprec gemm` writes: tables, JSON, CSV and the plot, from Recordings with known numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lowprec_callback import gemm_output
from lowprec_callback.recording import ROLES, GemmTime, Recording
from lowprec_callback.show.gemm_rows import COLUMNS
from tests import gemm_recordings as made

WITH_HEAD = replace(made.CODONFM, vocab_size=32000)


def written(recording: Recording, folder: Path) -> Any:
    gemm_output.write_json(folder / "a.json", gemm_output.tables(recording), recording)
    return json.loads((folder / "a.json").read_text())


def sums(body: Any, recipe: str, mode: str = "autocast", method: str = "role-true") -> dict[str, Any]:
    return {
        row["sum"]: row for row in body["sums"] if (row["recipe"], row["mode"], row["method"]) == (recipe, mode, method)
    }


# --- Tables ----------------------------------------------------------------------------------------------


def test_the_published_method_comes_first_and_quantization_before_the_gemm_alone() -> None:
    order = [(table.method, table.mode) for table in gemm_output.tables(made.both())]
    assert order == [("te-tutorial", "autocast"), ("role-true", "autocast"), ("role-true", "kernel")]
    assert gemm_output.tables(Recording.from_facts(made.h200())) == []


def test_an_impossible_rate_is_in_no_table_and_in_no_sum() -> None:
    for table in gemm_output.tables(made.too_fast(made.role_true())):
        (cell,) = [cell for cell in table.cells if not cell.ms["fp8_delayed"].known]
        assert (cell.operation, cell.role) == ("MLP down", "wgrad")
        missing = [table.role_sum("fp8_delayed", "wgrad"), table.layer("fp8_delayed"), table.model("fp8_delayed")]
        assert all("TFLOP/s is impossible" in (figure.reason or "") for figure in missing)
        assert table.role_sum("fp8_delayed", "fprop").known
        assert table.layer("fp8_current").known


def test_peaks_are_told_once_with_their_source() -> None:
    recording = made.both()
    (line,) = gemm_output.rates(recording, gemm_output.tables(recording))
    assert line.startswith("dense peaks of the H200 SXM, TFLOP/s: bf16 989.5, fp8 1979 (NVIDIA H200 product page")


def test_without_shares_in_the_tables_no_peak_is_told() -> None:
    for recording in (made.te_tutorial(), made.listed()):
        assert gemm_output.rates(recording, gemm_output.tables(recording)) == []


def test_a_gpu_without_a_peak_says_so() -> None:
    recording = made.unknown_gpu()
    (line,) = gemm_output.rates(recording, gemm_output.tables(recording))
    assert line == "no share of a dense peak: the table of peaks does not know the device 'NVIDIA X9'"


# --- JSON ------------------------------------------------------------------------------------------------


def test_json_holds_rows_sums_runs_and_what_was_not_run(tmp_path: Path) -> None:
    body = written(made.role_true(WITH_HEAD), tmp_path)
    assert (body["device"], body["baseline"], body["tool_version"]) == ("NVIDIA H200", "bf16", "0.1.0")
    assert body["versions"]["transformer_engine"] == "2.20.2"
    assert body["not_run"] == {"mxfp8": made.NEEDS_10, "nvfp4": made.NEEDS_10}
    (run,) = body["runs"]
    assert (run["stopped"], run["widest"], run["cold_l2"], run["layers"]) == ("precise", 0.0081, False, 24)
    assert len(body["rows"]) == 2 * 5 * 3 * 4  # modes, operations, roles, recipes
    found = sums(body, "fp8_delayed")
    assert list(found) == [*ROLES, "layer", "model"]
    assert found["layer"]["ms"] == pytest.approx(14.932)
    assert found["layer"]["speedup"] == pytest.approx(25.89 / 14.932)
    assert found["layer"]["low_speedup"] < found["layer"]["speedup"] < found["layer"]["high_speedup"]
    assert found["model"]["ms"] == pytest.approx(24 * 14.932 + 27)
    assert sums(body, "bf16")["layer"]["speedup"] == 1
    assert sums(body, "bf16")["layer"]["low_speedup"] is None


def test_json_says_where_a_recipe_stops_to_pay(tmp_path: Path) -> None:
    body = written(made.b300(), tmp_path)
    assert [(row["recipe"], row["keep"], list(row["speedups"])) for row in body["break_even"]] == [
        ("fp8_current", "bf16", ["attention out"]),
        ("nvfp4", "fp8_delayed", ["attention out"]),
    ]


def test_json_withholds_every_sum_over_a_failed_shape(tmp_path: Path) -> None:
    body = written(made.failed(made.role_true()), tmp_path)
    for row in sums(body, "fp8_block").values():
        assert row["ms"] is row["speedup"] is None
        assert "out of memory" in row["reason"]
    assert all(row["reason"] is None for row in sums(body, "fp8_current").values())
    failed = [row for row in body["rows"] if row["reason"]]
    assert {(row["operation"], row["recipe"]) for row in failed} == {("MLP down", "fp8_block")}
    assert len(failed) == 6
    assert all(row["ms"] is row["tflops"] is row["speedup"] is None for row in failed)


def test_listed_shapes_have_rows_and_no_sums(tmp_path: Path) -> None:
    body = written(made.listed(), tmp_path)
    assert body["sums"] == []
    (row,) = [
        r for r in body["rows"] if (r["m"], r["role"], r["recipe"], r["mode"]) == (4096, "dgrad", "bf16", "kernel")
    ]
    assert row["tflops"] == pytest.approx(2 * 4096**3 / 0.202 / 1e9)


def test_json_of_nothing(tmp_path: Path) -> None:
    body = written(Recording.from_facts([]), tmp_path)
    assert (body["rows"], body["sums"], body["baseline"], body["device"]) == ([], [], None, None)


# --- CSV -------------------------------------------------------------------------------------------------


def test_csv_is_the_rows_of_the_json(tmp_path: Path) -> None:
    recording = made.failed(made.launch_bound(made.role_true(WITH_HEAD)))
    body = written(recording, tmp_path)
    gemm_output.write_csv(tmp_path / "a.csv", gemm_output.tables(recording))
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == list(COLUMNS)
    for line, row in zip(read, body["rows"], strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}
    assert b"\r" not in (tmp_path / "a.csv").read_bytes()


def test_csv_of_nothing_has_its_columns(tmp_path: Path) -> None:
    gemm_output.write_csv(tmp_path / "a.csv", [])
    assert (tmp_path / "a.csv").read_text() == ",".join(COLUMNS) + "\n"


# --- The plot --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [made.role_true, made.te_tutorial, made.both, made.b300, made.listed, lambda: made.failed(made.role_true())],
)
def test_a_plot_is_written(make: Callable[[], Recording], tmp_path: Path) -> None:
    assert gemm_output.write_plot(tmp_path / "a.png", make()) is None
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) > 300


@pytest.mark.parametrize(("suffix", "begin"), [(".pdf", b"%PDF"), (".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_the_plots_kind_is_that_of_its_name(suffix: str, begin: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"a{suffix}"
    assert gemm_output.write_plot(file, made.te_tutorial()) is None
    assert file.read_bytes().startswith(begin)


def plotted(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure that would be saved."""
    from lowprec_callback.show import plots

    saved: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, *_: saved.append(figure))
    assert gemm_output.write_plot(Path("never-written.png"), recording) is None
    return saved[0]


def heights(axes: Any) -> dict[str, float]:
    """Height of each recipe's stack."""
    names = [tick.get_text() for tick in axes.get_xticklabels()]
    found = dict.fromkeys(names, 0.0)
    for container in axes.containers:
        for bar in container:
            found[names[round(bar.get_x() + bar.get_width() / 2)]] += bar.get_height()
    return found


def test_bars_are_the_models_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plotted(made.role_true(WITH_HEAD), monkeypatch)
    kernel, autocast = figure.axes
    assert heights(autocast) == pytest.approx({recipe: 24 * sum(ms) + 27 for recipe, ms in made.ROLE_TRUE_H200.items()})
    assert heights(kernel)["fp8_current"] == pytest.approx(24 * 15.638 * 0.86 + 27)


def test_the_published_methods_bars_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plotted(made.te_tutorial(), monkeypatch)
    (axes,) = figure.axes  # a mode that nobody asked for has no empty panel
    assert axes.get_title(loc="left") == "with quantization"
    assert heights(axes) == pytest.approx({recipe: 24 * sum(ms) for recipe, ms in made.TUTORIAL_H200.items()})
    assert "Timed by the published method (te-tutorial)." in figure._supxlabel.get_text()
    both = plotted(made.both(), monkeypatch)
    assert "Timed as training runs them (role-true)" in both._supxlabel.get_text()
    assert heights(both.axes[1])["bf16"] == pytest.approx(24 * 25.89)


@pytest.mark.parametrize(("spoil", "why"), [(made.too_fast, "impossible"), (made.failed, "out of memory")])
def test_what_has_no_sum_has_no_bar_but_a_reason(
    spoil: Callable[[Recording], Recording], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = plotted(spoil(made.role_true()), monkeypatch)
    recipe = "fp8_delayed" if spoil is made.too_fast else "fp8_block"
    for axes in figure.axes:
        assert set(heights(axes)) == set(made.ROLE_TRUE_H200) - {recipe}
    below = " ".join(figure._supxlabel.get_text().split())
    assert f"{recipe} not shown" in below
    assert why in below


def test_listed_shapes_are_plotted_as_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = made.changed(
        made.listed(),
        lambda t: (
            replace(t, samples_ms=(), quantize_ms=(), failure="no luck")
            if (t.recipe, t.m, t.role) == ("fp8_delayed", 1024, "dgrad")
            else t
        ),
    )
    figure = plotted(broken, monkeypatch)
    autocast, kernel = figure.axes
    assert [tick.get_text() for tick in kernel.get_xticklabels()] == ["1024", "4096"]
    bf16, delayed = ([bar.get_height() for bar in container] for container in autocast.containers)
    assert bf16 == pytest.approx([3 * 2 * size**3 / ms / 1e9 for size, ms in ((1024, 0.018), (4096, 0.606))])
    assert delayed == pytest.approx([3 * 2 * 4096**3 / 0.363 / 1e9])
    below = " ".join(figure._supxlabel.get_text().split())
    assert "1024x1024x1024 in fp8_delayed not shown (role-true, with quantization)" in below
    assert "no luck" in below
    assert below.endswith("NVIDIA H200")


def test_launch_bound_shapes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plotted(made.launch_bound(made.listed()), monkeypatch)
    assert "Some GEMMs are launch-bound in fp8_delayed:" in figure._supxlabel.get_text()
    assert "launch-bound" not in plotted(made.listed(), monkeypatch)._supxlabel.get_text()


def test_losing_recipes_are_not_called_the_best_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = made.changed(
        made.te_tutorial(),
        lambda t: t if t.recipe == "bf16" else replace(t, samples_ms=tuple(4 * ms for ms in t.samples_ms)),
    )
    figure = plotted(slow, monkeypatch)
    assert figure._suptitle.get_text() == "No recipe makes the GEMMs faster: at best 0.43x (fp8_delayed)"


@pytest.mark.parametrize("make", [made.role_true, made.listed])
def test_no_times_no_plot_but_a_reason(make: Callable[[], Recording], tmp_path: Path) -> None:
    nothing = made.changed(make(), lambda t: replace(t, samples_ms=(), quantize_ms=(), failure="out of memory"))
    reason = gemm_output.write_plot(tmp_path / "a.png", nothing)
    assert reason in ("no recipe has a complete GEMM benchmark", "no shape has a time")
    assert not (tmp_path / "a.png").exists()


def test_the_recording_is_left_as_it_was() -> None:
    recording = made.too_fast(made.te_tutorial())
    before = list(recording)
    gemm_output.tables(recording)
    assert list(recording) == before
    assert {fact.method for fact in recording.of(GemmTime)} == {"te-tutorial"}


def test_times_of_what_is_no_recipe_make_no_column_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline's products by PyTorch alone stand in the Recording without a card."""
    recording = made.role_true()
    beside = [replace(f, recipe="torch.matmul") for f in recording.of(GemmTime) if f.recipe == "bf16"]
    with_them = Recording.from_facts([*recording, *beside])
    assert all("torch.matmul" not in table.recipes for table in gemm_output.tables(with_them))
    assert set(heights(plotted(with_them, monkeypatch).axes[1])) == set(made.ROLE_TRUE_H200)


def test_times_are_at_one_clock_in_tables_and_bars_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the recipes' samples ran at half the clock and took twice as long: no recipe is slower for it."""

    def slowed(time: GemmTime) -> GemmTime:
        slow = time.recipe in ("fp8_current", "fp8_block")
        return replace(
            time,
            samples_ms=tuple(ms * (2 if slow else 1) for ms in time.samples_ms),
            quantize_ms=tuple(ms * (2 if slow else 1) for ms in time.quantize_ms),
            clocks_mhz=(750.0 if slow else 1500.0,) * len(time.samples_ms),
        )

    recording = made.changed(made.role_true(), slowed)
    tables = gemm_output.tables(recording)
    for recipe, sums_ in made.ROLE_TRUE_H200.items():
        assert tables[0].against(recipe, "bf16").value == pytest.approx(25.89 / sum(sums_), rel=1e-3)
        assert tables[0].share_of_quantization(recipe).value == pytest.approx(made.QUANTIZATION[recipe])
    bars = heights(plotted(recording, monkeypatch).axes[1])
    for recipe in tables[0].recipes:
        assert bars[recipe] == pytest.approx(tables[0].model(recipe).value)
