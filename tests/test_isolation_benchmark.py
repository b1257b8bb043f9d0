"""What `benchmarks/isolation.py` calls the same and what different, on figures of an H200."""

from __future__ import annotations

import pytest

from benchmarks.isolation import Side, Sides, cells, spread, table

GB = 1e9


def side(step: float, half: float, busy: float, peak: float) -> Side:
    return Side(step, half, busy, peak * GB)


def test_a_step_that_the_host_decides_is_judged_by_the_gpus_busy_time_too() -> None:
    alone, inside = side(34.15, 6.06, 4.39, 1.348), side(28.09, 14.84, 4.40, 1.348)
    told, fine = cells(inside, alone, 0.455, 0.005)
    assert told[:4] == ["28.09 ±14.84", "34.15 ±6.06", "-17.7%", "same"]
    assert told[4:8] == ["4.40", "4.39", "+0.2%", "same"]
    assert told[8:] == ["1.348", "1.348", "+0.00%", "same"]
    assert fine
    told, fine = cells(side(28.09, 14.84, 4.50, 1.348), alone, 0.455, 0.005)
    assert (told[7], fine) == ("DIFFERS", False)


def test_the_sharper_of_both_times_is_judged() -> None:
    alone, inside = side(88.65, 1.95, 87.71, 16.121), side(88.82, 0.58, 84.43, 16.120)
    told, fine = cells(inside, alone, 0.024, 0.030)
    assert (told[3], told[7], fine) == ("same", "(step)", True)
    told, fine = cells(side(91.65, 0.58, 84.43, 16.120), alone, 0.024, 0.030)
    assert (told[3], fine) == ("DIFFERS", False)


@pytest.mark.parametrize(("step", "word"), [(26.70, "alike"), (10.0, "DIFFERS")])
def test_more_than_the_intervals_but_no_more_than_fresh_processes_differ_by(step: float, word: str) -> None:
    assert cells(side(step, 2.71, 4.28, 1.187), side(34.78, 3.68, 4.29, 1.186), 0.455, 0.005)[0][3] == word


def test_memory_that_leaks_differs() -> None:
    told, fine = cells(side(81.0, 1.0, 80.0, 15.96), side(81.0, 1.0, 80.0, 15.86), 0.02, 0.03)
    assert (told[11], fine) == ("DIFFERS", False)


def test_what_processes_differ_by() -> None:
    assert spread([100.0, 100.0, 100.0]) == 0.0
    # s = 1%, t with two degrees of freedom = 4.303
    assert spread([99.0, 100.0, 101.0]) == pytest.approx(4.303 * 2**0.5 * 0.01, rel=1e-3)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    bf16 = side(130.0, 1.0, 129.0, 15.29)
    sweep: Sides = {"bf16": bf16, "fp8_block": side(97.0, 1.0, 96.0, 17.26)}
    assert table({"one order": sweep, "another order": sweep}, {"fp8_block": sweep})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:-1]] == ["fp8_block", "fp8_block", "bf16", "bf16"]
    assert lines[-1].startswith("3 processes that measure bf16 differ in step by up to 0.0%")
    leaked = {**sweep, "fp8_block": side(101.0, 1.0, 96.0, 17.26)}
    assert not table({"one order": sweep, "another order": leaked}, {"fp8_block": sweep})
    with pytest.raises(KeyError, match="fp8_block"):
        table({"one order": sweep, "another order": {"bf16": bf16}}, {"fp8_block": sweep})
