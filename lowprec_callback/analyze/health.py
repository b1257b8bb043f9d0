"""What a recipe's loss, scales, memory and clocks say: signs that it computes, and that it was measured
fairly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from lowprec_callback.analyze.provenance import lines_of
from lowprec_callback.recording import Clocks, Loss, Memory, Scales
from lowprec_callback.report import Figure, ScaleRow


def bad_loss(losses: Sequence[tuple[int, Loss]]) -> float | None:
    """The newest loss that is not finite, if there is one: it makes the recipe's speed void."""
    bad = [loss.value for _, loss in losses if not math.isfinite(loss.value)]
    return bad[-1] if bad else None


def last_loss(name: str, losses: Sequence[tuple[int, Loss]]) -> Figure:
    """The loss at the end of the last block [nats]."""
    if not losses:
        return Figure.missing("nats", f"no loss of {name} was recorded")
    line, last = losses[-1]
    if not math.isfinite(last.value):
        return Figure.missing("nats", f"the loss is {last.value}")
    return Figure(last.value, "nats", "measured", n=1, facts=lines_of("loss", [line]))


def numerics(losses: Sequence[tuple[int, Loss]], scales: Sequence[tuple[int, Scales]]) -> str | None:
    """Everything that is not finite, or zero where it should not be, in words; None if nothing is."""
    texts = []
    bad = bad_loss(losses)
    if bad is not None:
        texts.append(f"the loss became {bad}: the speed of this recipe is void")
    norm = losses[-1][1].grad_norm if losses else None
    if norm is not None and not math.isfinite(norm):
        texts.append(f"the gradient norm is {norm}")
    elif norm == 0:
        texts.append("every gradient is zero")
    strange = sorted({fact.module for _, fact in scales if not _all_finite(fact)})
    if strange:
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        texts.append(f"scales or amax values are not finite in {', '.join(strange[:5])}{more}")
    return "; ".join(texts) or None


def scale_rows(scales: Sequence[tuple[int, Scales]]) -> tuple[ScaleRow, ...]:
    """The newest state of each module and direction, a row a tensor; `numerics` tells what is not finite."""
    newest = {(fact.module, fact.direction): fact for _, fact in scales}
    return tuple(
        ScaleRow(fact.module, tensor, scale, amax, highest, fact.history_length)
        for fact in newest.values()
        for tensor, scale, amax, highest in zip(
            fact.tensors, fact.scale, fact.amax, fact.amax_history_max, strict=False
        )
        if math.isfinite(scale) and math.isfinite(amax) and math.isfinite(highest)
    )


def _all_finite(scales: Scales) -> bool:
    return all(math.isfinite(x) for x in (*scales.scale, *scales.amax, *scales.amax_history_max))


def peak(name: str, memory: Sequence[tuple[int, Memory]], on_cpu: bool) -> Figure:
    """The highest `peak` of phase `step` over all rounds [GB = 1e9 bytes]."""
    found = [(line, fact) for line, fact in memory if fact.phase == "step"]
    if not found:
        why = "memory is not recorded on a CPU" if on_cpu else f"no memory peak of {name} was recorded"
        return Figure.missing("GB", why)
    highest = max(fact.peak for _, fact in found)
    lines = lines_of("memory", (line for line, _ in found))
    return Figure(highest / 1e9, "GB", "measured", n=len(found), facts=lines)


def clocks_text(clocks: Sequence[Clocks]) -> str | None:
    """`1755 MHz, 642 W, 61 °C (medians of 3 blocks); throttled in 1: sw_power_cap`."""
    if not clocks:
        return None
    text = (
        f"{median(clock.sm_mhz for clock in clocks):.0f} MHz, "
        f"{median(clock.power_w for clock in clocks):.0f} W, "
        f"{median(clock.temperature_c for clock in clocks):.0f} °C "
        f"({f'medians of {len(clocks)} blocks' if len(clocks) > 1 else '1 block'})"
    )
    throttled = [clock for clock in clocks if clock.throttle]
    if throttled:
        words = dict.fromkeys(word for clock in throttled for word in clock.throttle)
        text += f"; throttled in {len(throttled)}: {', '.join(words)}"
    return text
