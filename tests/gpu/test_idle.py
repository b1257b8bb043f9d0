"""Idle time of a real GPU finds its causes: a host that waits for it, a late batch, and our own waits that are none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lowprec_callback.analyze.idle import BOUNDARY, split_idle
from lowprec_callback.analyze.traceview import view
from lowprec_callback.recording import Trace
from lowprec_callback.report import IDLE_CAUSES, Ledger, Report
from lowprec_callback.sweep.session import Session

from .test_planted import BATCH, TOKENS, Stack, open_session, run, train

SIZES = (2048,) * 5
NAP_MS = 4.0


class Peeking(Stack):
    """Reads a value back from the GPU between its layers, and does something else before it goes on."""

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = super().block(index, x)
        if x.detach().float().abs().max().item() >= 0:
            time.sleep(NAP_MS / 1e3)
        return x


def traces(session: Session) -> list[Trace]:
    return session.recorder.snapshot().of(Trace)


def ledger(report: Report) -> Ledger:
    found = report.recipe("bf16").ledger
    assert found is not None
    return found


def part(found: Ledger, cause: str) -> float:
    assert tuple(found.idle_parts) == IDLE_CAUSES
    return found.idle_parts[cause].value or 0.0


def late_batches(session: Session, optimizer: torch.optim.Optimizer, nap_ms: float) -> Report:
    """`train`, with a DataLoader that takes its time."""
    model, sweep = session.engine.model, session.sweep

    def step() -> torch.Tensor:
        time.sleep(nap_ms / 1e3)
        x = torch.randn(BATCH, TOKENS, SIZES[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sweep.region():
            loss = model(x).float().square().mean()
        sweep.phase("backward")
        loss.backward()
        sweep.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run(session, step)


def test_a_host_that_waits_is_named(tmp_path: Path) -> None:
    session, optimizer = open_session(tmp_path, Peeking(sizes=SIZES), ["bf16"])
    report = train(session, optimizer)
    found = ledger(report)
    # The restart after each of four waits is at least the nap.
    assert part(found, "synchronization") >= 0.9 * 4 * NAP_MS
    (trace,) = traces(session)
    assert trace.waits is not None
    calls = {trace.waits.names[name] for name in trace.waits.name}
    assert calls & {"cudaStreamSynchronize", "cudaMemcpyAsync"}
    assert "cudaDeviceSynchronize" not in calls
    (finding,) = [each for each in report.findings if each.code == "synchronization"]
    assert "aten::" in finding.sentence
    assert ".item()" in finding.advice


def test_a_late_batch_is_data(tmp_path: Path) -> None:
    session, optimizer = open_session(tmp_path, Stack(sizes=SIZES), ["bf16"])
    report = late_batches(session, optimizer, nap_ms=40.0)
    found = ledger(report)
    assert part(found, "data") >= 0.5 * 40.0
    assert part(found, "synchronization") <= 0.05 * (found.wall.value or 0.0)
    assert [each.code for each in report.findings if each.code in ("data-wait", "synchronization")] == ["data-wait"]


def test_a_plain_step_has_no_waits_and_ours_are_not_among_them(tmp_path: Path) -> None:
    session, optimizer = open_session(tmp_path, Stack(sizes=SIZES), ["bf16"])
    found = ledger(train(session, optimizer))
    (trace,) = traces(session)
    assert trace.waits is not None
    assert trace.waits.name == ()
    assert trace.host_end_us is not None
    assert 0 < trace.host_end_us <= trace.wall_ms * 1e3
    assert trace.phases is not None
    assert trace.phases.name == ("data", "forward", "backward", "optimizer")
    split = split_idle(view(trace))
    assert split.parts["synchronization"] == 0.0
    assert split.parts[BOUNDARY] > 0.0
    total = sum(figure.value or 0.0 for figure in found.idle_parts.values())
    assert total == pytest.approx(found.idle.value, abs=1e-9)
    assert sum(place.ms.value or 0.0 for place in found.places) == pytest.approx(found.busy.value, abs=1e-9)
    assert any(place.operation.startswith("blocks.") and place.where == "fprop" for place in found.places)
