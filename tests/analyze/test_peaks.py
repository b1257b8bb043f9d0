"""Dense peaks: where they come from, whom they are given to, and what they rule out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lowprec_callback.analyze import peaks
from lowprec_callback.analyze.peaks import (
    COLUMN,
    Peak,
    PeaksError,
    find_peak,
    known_gpus,
    rate,
    refuse_impossible,
    share_of_peak,
)
from lowprec_callback.recipes import load_cards

TABLE: dict[str, Any] = tomllib.loads(Path(peaks.__file__).with_name("peaks.toml").read_text(encoding="utf-8"))
COLUMNS = set(COLUMN.values())


@pytest.mark.parametrize("row", TABLE["gpu"], ids=lambda row: row["name"])
def test_every_row_is_whole(row: dict[str, Any]) -> None:
    assert set(row) - COLUMNS <= {"name", "names", "clock_mhz", "source"}
    assert row["source"].startswith("NVIDIA ")
    assert "https://" in row["source"]
    assert set(row) & COLUMNS
    assert all(isinstance(row[column], float) and row[column] > 0 for column in set(row) & COLUMNS)
    for pattern in row["names"]:
        re.compile(pattern)


@pytest.mark.parametrize("row", TABLE["gpu"], ids=lambda row: row["name"])
def test_narrower_formats_are_at_least_as_fast(row: dict[str, Any]) -> None:
    """And by no more than a factor that tensor cores have: a figure with sparsity would stand out."""
    if "bf16" not in row:
        return
    assert row.get("tf32", row["bf16"] / 2) / row["bf16"] == pytest.approx(0.5, rel=0.02)
    if "fp8" in row:
        assert row["fp8"] / row["bf16"] == pytest.approx(4 if row["name"].startswith("GeForce") else 2, rel=0.02)
    if "fp4" in row:
        assert row["fp4"] / row["fp8"] == pytest.approx(3 if row["name"] in ("B300", "GB300") else 2, rel=0.01)


@pytest.mark.parametrize(
    ("device", "gpu", "bf16", "fp8"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 312.0, None),
        ("NVIDIA A100-PCIE-40GB", "A100", 312.0, None),
        ("NVIDIA A100 80GB PCIe", "A100", 312.0, None),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4, 1978.9),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.5, 1513.0),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5, 1670.5),
        ("NVIDIA H200", "H200 SXM", 989.5, 1979.0),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5, 1670.5),
        ("NVIDIA GH200 480GB", "GH200", 990.0, 1979.0),
        ("NVIDIA L4", "L4", 121.0, 242.5),
        ("NVIDIA L40S", "L40S", 362.05, 733.0),
        ("NVIDIA B200", "B200", 2250.0, 4500.0),
        ("NVIDIA GB200", "GB200", 2500.0, 5000.0),
        ("NVIDIA B300 SXM6 AC", "B300", 2250.0, 4500.0),
        ("NVIDIA GB300", "GB300", 2500.0, 5000.0),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090", 165.2, 660.6),
        ("NVIDIA GeForce RTX 5090", "GeForce RTX 5090", 209.5, 838.0),
    ],
)
def test_the_names_that_drivers_give(device: str, gpu: str, bf16: float, fp8: float | None) -> None:
    found = find_peak(device, "bf16")
    assert (found.gpu, found.tflops, found.reason) == (gpu, bf16, None)
    assert found.source
    assert find_peak(device, "e4m3", "e5m2").tflops == fp8
    assert sum(peaks._named(row, device) for row in TABLE["gpu"]) == 1


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("NVIDIA H20", "no public NVIDIA datasheet"),
        ("NVIDIA H20-3e", "no public NVIDIA datasheet"),
        ("NVIDIA H800", "no public NVIDIA datasheet"),
        ("NVIDIA GeForce RTX 4090 D", "its rates are not those"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "its rates are not those"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "its rates are not those"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "a MIG slice"),
        ("Tesla T4", "the table of peaks does not know the device 'Tesla T4'"),
        ("NVIDIA H100", "the table of peaks does not know the device 'NVIDIA H100'"),
        ("AMD Instinct MI300X", "the table of peaks does not know"),
    ],
)
def test_no_figure_rather_than_a_guess(device: str, why: str) -> None:
    found = find_peak(device, "bf16")
    assert found.tflops is None
    assert found.reason is not None
    assert found.reason.startswith(why)
    assert share_of_peak(100.0, found) is None
    assert refuse_impossible(1e9, found) is None


def test_a_format_that_a_gpu_lacks() -> None:
    assert find_peak("NVIDIA A100-SXM4-80GB", "e4m3").reason == "no dense fp8 rate of it is sourced"
    assert find_peak("NVIDIA GB10", "bf16").reason == "no dense bf16 rate of it is sourced"
    assert find_peak("NVIDIA GB10", "e2m1").tflops == 500.0


def test_of_two_formats_the_slower_counts() -> None:
    assert find_peak("NVIDIA B200", "e2m1", "bf16").column == "bf16"
    assert find_peak("NVIDIA B200", "e4m3", "e2m1").tflops == 4500.0
    assert find_peak("NVIDIA H200", "e2m1", "bf16").tflops is None


def test_every_card_has_a_column() -> None:
    for card in load_cards().values():
        for operands in (card.fprop, card.dgrad, card.wgrad):
            assert find_peak("NVIDIA B200", *operands).tflops


@pytest.mark.parametrize("formats", [("e3m2",), ()])
def test_unknown_formats(formats: tuple[str, ...]) -> None:
    with pytest.raises(PeaksError, match=r"no peak for the format .*; known: fp32, tf32, bf16, "):
        find_peak("NVIDIA H200", *formats)


def test_known_gpus() -> None:
    assert len(known_gpus()) == len(set(known_gpus())) >= 18


# --- Rates -----------------------------------------------------------------------------------------------


def test_rate() -> None:
    """CodonFM 5B's layer on an H200: 19.17 TFLOP in 28.716 ms."""
    assert rate(15872, 4096, 12288, 2.0) == pytest.approx(798.9, abs=0.1)
    assert share_of_peak(494.75, find_peak("NVIDIA H200", "bf16")) == 0.5


H200 = find_peak("NVIDIA H200", "bf16")


@pytest.mark.parametrize(
    ("tflops", "max_sm_mhz", "possible"),
    [
        (790, 1980, True),
        (989.5, 1980, True),
        (1070, 1980, True),  # 989.5 x 1980 / 1830
        (1102, 1980, True),  # and 3%
        (1104, 1980, False),
        (1019, 1830, True),
        (1020, 1830, False),
        (1020, 1500, False),  # a locked clock lowers nothing: the figure is still NVIDIA's
        (1324, None, True),
        (1326, None, False),
    ],
)
def test_what_is_impossible_on_an_h200(tflops: float, max_sm_mhz: int | None, possible: bool) -> None:
    assert (refuse_impossible(tflops, H200, max_sm_mhz) is None) == possible


def test_the_refusal_says_why() -> None:
    assert refuse_impossible(2500.4, H200, 1980) == (
        "2500 TFLOP/s is impossible: the dense bf16 peak of the H200 SXM is 989.5, 1071 at 1980 MHz, the highest "
        "clock; the GEMM did not do all its work, or the clock did not measure it"
    )
    assert "1286 with 30% for a higher clock" in (refuse_impossible(2500, H200) or "")


def test_rates_that_were_seen_are_possible() -> None:
    """Measured above the datasheet, at clocks above its own (https://github.com/xzwgit/gpu-flops-bench)."""
    for device, operand, tflops in (
        ("NVIDIA GeForce RTX 5090", "bf16", 254.03),
        ("NVIDIA GeForce RTX 5090", "e4m3", 773.52),
        ("NVIDIA H200 NVL", "bf16", 853.29),
    ):
        assert refuse_impossible(tflops, find_peak(device, operand)) is None


def test_a_peak_with_an_unknown_clock() -> None:
    assert refuse_impossible(3012, find_peak("NVIDIA B200", "bf16"), 1965) is None
    assert refuse_impossible(3013, find_peak("NVIDIA B200", "bf16"), 1965) is not None


def test_a_peak_is_plain_data() -> None:
    assert Peak("x", "bf16", reason="none").tflops is None
