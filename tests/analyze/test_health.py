from __future__ import annotations

import math

from lowprec_callback.analyze.health import bad_loss, clocks_text, last_loss, numerics, peak, scale_rows
from lowprec_callback.recording import Clocks, Loss, Memory, Scales


def losses(*values: float, norm: float | None = 1.0) -> list[tuple[int, Loss]]:
    return [(10 + i, Loss("fp8", i, value, norm)) for i, value in enumerate(values)]


def scales(amax: float) -> tuple[int, Scales]:
    return (5, Scales("fp8", "layers.0.fc", "fwd", ("input", "weight"), (1.0, 2.0), (amax, 3.0), (4.0, 5.0), 16))


def test_loss() -> None:
    assert last_loss("fp8", losses(4.0, 3.0)).value == 3.0
    assert last_loss("fp8", losses(4.0, 3.0)).facts == ("loss line 11",)
    assert last_loss("fp8", []).reason == "no loss of fp8 was recorded"
    assert last_loss("fp8", losses(4.0, math.nan)).reason == "the loss is nan"
    assert bad_loss(losses(math.inf, 3.0)) == math.inf
    assert bad_loss(losses(3.0)) is None


def test_numerics() -> None:
    assert numerics(losses(3.0), [scales(1.0)]) is None
    text = numerics(losses(3.0, math.inf, norm=math.nan), [scales(math.inf)])
    assert text is not None
    assert "the loss became inf" in text
    assert "gradient norm is nan" in text
    assert "not finite in layers.0.fc" in text
    assert numerics(losses(3.0, norm=0.0), []) == "every gradient is zero"


def test_scales_keep_the_newest_and_only_what_is_finite() -> None:
    assert [row.tensor for row in scale_rows([scales(math.inf)])] == ["weight"]
    rows = scale_rows([scales(1.0), scales(2.0)])
    assert [(row.tensor, row.amax, row.history_max) for row in rows] == [("input", 2.0, 4.0), ("weight", 3.0, 5.0)]


def test_peak_is_of_whole_steps() -> None:
    facts = [
        (1, Memory("fp8", 0, "step", 1, 5 * 10**9, 1)),
        (2, Memory("fp8", 1, "step", 1, 6 * 10**9, 1)),
        (3, Memory("fp8", 1, "start", 1, 9 * 10**9, 1)),
    ]
    assert peak("fp8", facts, False).value == 6.0
    assert peak("fp8", facts[2:], False).reason == "no memory peak of fp8 was recorded"
    assert peak("fp8", [], True).reason == "memory is not recorded on a CPU"


def test_clocks() -> None:
    assert clocks_text([]) is None
    one = Clocks("fp8", 0, 1980, 651.2, 60)
    assert clocks_text([one]) == "1980 MHz, 651 W, 60 °C (1 block)"
    slow = Clocks("fp8", 1, 1500, 699.0, 70, ("sw_power_cap",))
    text = "1740 MHz, 675 W, 65 °C (medians of 2 blocks); throttled in 1: sw_power_cap"
    assert clocks_text([one, slow]) == text
