"""A finding about models without any Transformer Engine layer: what would be reached if their layers were replaced."""

from __future__ import annotations

import math

from lowprec_callback.analyze.finding_case import Case, ms_text, rests_on, share, some
from lowprec_callback.analyze.gemms import PLAIN, operation
from lowprec_callback.recording import Gemm
from lowprec_callback.report import Finding

INPUTS, OUTPUTS = 8, 16
"""Lightning's precision plugin "transformer-engine" replaces an `nn.Linear` whose input features are a multiple of the
first and whose output features are one of the second (`lightning/fabric/plugins/precision/transformer_engine.py`,
`_convert_layers`)."""


FP8_FROM = (8, 9)
"""Compute capability from which a GPU has FP8 tensor cores (Ada)."""


def find_replaceable(case: Case) -> Finding | None:
    """On a GPU that multiplies FP8: all linear layers are PyTorch's own, and Lightning's plugin would replace some.

    covered = (FLOPs of the GEMMs whose layer would be replaced) / (FLOPs of all linear-layer GEMMs).
    """
    gemms = case.watched.gemms
    plain = [gemm for gemm in gemms if gemm.family == PLAIN]
    if not case.part.baseline or case.te or case.on_cpu or not gemms or len(plain) < len(gemms):
        return None
    fitting = [gemm for gemm in plain if not gemm.k % INPUTS and not gemm.n % OUTPUTS]
    capability = case.watched.compute_capability
    if capability is None or capability < FP8_FROM:
        return None  # the advice would not help: nothing below 16 bits runs there
    covered = share(math.fsum(_flops(gemm) for gemm in fitting), math.fsum(_flops(gemm) for gemm in plain))
    if not covered:
        return None
    inside = {gemm.module for gemm in fitting}
    left = [operation(gemm.module) for gemm in plain if gemm.module not in inside]
    ms = case.kernels(lambda group: group.is_linear_gemm and group.module in inside)
    cost = f"{ms_text(ms.value)} of its step" if ms.value is not None else f"ms not known: {ms.reason}"
    but = f" {some(left)} would stay: {INPUTS} must divide input and {OUTPUTS} output features." if left else ""
    return case.found(
        "no-te-layers",
        ms,
        f"The model has no Transformer Engine layer, so that no recipe below 16 bits can reach it. Lightning's "
        f'precision="transformer-engine" would replace {len(inside)} of its '
        f"{len({gemm.module for gemm in plain})} linear layers: {covered:.1%} of the linear-layer FLOPs, {cost}.{but}",
        [rests_on(f"{some([operation(gemm.module) for gemm in fitting])}: {covered:.1%} of 2 M K N calls", ms)],
        'Profile again with Trainer(precision="transformer-engine"), or make the layers te.Linear.',
    )


def _flops(gemm: Gemm) -> float:
    return 2.0 * gemm.m * gemm.k * gemm.n * gemm.calls
