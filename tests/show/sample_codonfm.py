"""Sample report (a) of `samples`: a large model on a GPU."""

from __future__ import annotations

from lowprec_callback.report import RecipeReport, Report, ScaleRow

from .sample_parts import (
    NOT_ON_HOPPER,
    ONE,
    TITLES,
    gap,
    gemm_rows,
    ledger,
    measured,
    samples_around,
    speedups,
    verdict,
)

HOPPER_VERSIONS = {
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "transformer_engine": "2.20.2",
    "lightning": "2.6.1",
    "cudnn": "9.19.0",
}
PLAN = "3 rounds x (2 settle + 8 timed) steps of 4 recipes, shuffled (seed 0); 2 traced steps each: 128 steps"
RESTORED = "module, optimizer and RNG, bit for bit"

CODONFM_OPERATIONS = (
    ("attention.qkv", 15872, 4096, 12288, 24),
    ("attention.proj", 15872, 4096, 4096, 24),
    ("mlp.fc1", 15872, 4096, 16384, 24),
    ("mlp.fc2", 15872, 16384, 4096, 24),
)
CODONFM_STEP = measured(819.2, 0.4)

PROMISED = "kernel-only benchmark"
SLOWER = "GEMMs slower in the step than on the bench"
IN_STEP = "GEMM kernels in the step, less what the benchmark promised"
FUSED = "TE fuses the cast into LayerNorm and GELU"


def _codonfm_bf16() -> RecipeReport:
    ms = (6.345, 2.064, 8.798, 8.683)
    return RecipeReport(
        "bf16",
        TITLES["bf16"],
        True,
        step_ms=CODONFM_STEP,
        speedups=ONE,
        host_ms=measured(91.4),
        peak_gb=measured(89.5, unit="GB"),
        samples=samples_around(819.2, 0.8),
        ledger=ledger(
            819.2,
            0.1,
            12.3,
            "gemm 666.9 attention 20.0 norm 21.4 activation 30.3 optimizer 25.9 "
            "loss 3.2 elementwise 36.8 copy 1.9 other 0.4",
        ),
        gemms=gemm_rows(CODONFM_OPERATIONS, ms, ms),
        gemm_kernel_ms=measured(621.4, 0.6),
        gemm_autocast_ms=measured(621.4, 0.6),
        verdict=verdict(24, "bf16"),
        loss=measured(1.512, unit="nats"),
        clocks="1965 MHz, 688 W, no throttling",
    )


def _codonfm_delayed() -> RecipeReport:
    end = measured(513.0, 0.3)
    return RecipeReport(
        "fp8_delayed",
        TITLES["fp8_delayed"],
        False,
        step_ms=end,
        host_ms=measured(118.2),
        peak_gb=measured(92.9, unit="GB"),
        samples=samples_around(513.0, 0.7),
        speedups=speedups(1.92, 1.734, 1.644, 1.597),
        ledger=ledger(
            513.0,
            0.0,
            4.1,
            "gemm 347.6 quantize 31.8 amax 3.4 scale 1.9 attention 20.3 "
            "norm 15.2 activation 22.8 optimizer 26.7 loss 3.2 elementwise 33.6 "
            "copy 2.0 other 0.4",
        ),
        gap=gap(
            "bf16",
            "fp8_delayed",
            CODONFM_STEP,
            end,
            ("GEMM kernels", -297.8, 0.7, PROMISED),
            (SLOWER, -21.5, 0.8, IN_STEP),
            ("quantization", 37.1, 0.2, "quantize 31.8, amax 3.4, scale 1.9"),
            ("norm", -6.2, 0.2, FUSED),
            ("activation", -7.5, 0.2, FUSED),
            ("attention", 0.3, 0.1),
            ("optimizer", 0.8, 0.1),
            ("other GPU work", -3.1, 0.2),
            ("idle", -8.2, 0.5),
            ("residual", -0.1, 0.6, "0.0% of the step"),
        ),
        gemms=gemm_rows(CODONFM_OPERATIONS, (3.315, 1.081, 4.560, 4.528), (3.677, 1.292, 4.936, 5.027)),
        gemm_kernel_ms=measured(323.6, 0.4),
        gemm_autocast_ms=measured(358.4, 0.6),
        verdict=verdict(24, "e4m3/e5m2"),
        scales=(
            ScaleRow("layers.0.mlp.fc1", "input", 112.0, 3.84, 4.0, 1024),
            ScaleRow("layers.0.mlp.fc1", "weight", 3584.0, 0.118, 0.121, 1024),
            ScaleRow("layers.0.mlp.fc1", "grad_output", 2.68e8, 1.9e-4, 2.1e-4, 1024),
            ScaleRow("layers.23.mlp.fc1", "input", 28.0, 15.2, 15.9, 1024),
        ),
        loss=measured(1.517, unit="nats"),
        clocks="1980 MHz, 655 W, no throttling",
    )


def _codonfm_current() -> RecipeReport:
    end = measured(539.2, 0.5)
    return RecipeReport(
        "fp8_current",
        TITLES["fp8_current"],
        False,
        step_ms=end,
        host_ms=measured(125.0),
        peak_gb=measured(92.9, unit="GB"),
        samples=samples_around(539.2, 0.9),
        speedups=speedups(1.92, 1.656, 1.644, 1.519),
        ledger=ledger(
            539.2,
            0.2,
            6.1,
            "gemm 347.4 quantize 33.1 amax 11.9 attention 20.3 norm 21.5 "
            "activation 30.4 optimizer 26.0 loss 3.2 elementwise 36.7 copy 2.0 "
            "other 0.4",
        ),
        gap=gap(
            "bf16",
            "fp8_current",
            CODONFM_STEP,
            end,
            ("GEMM kernels", -297.8, 0.7, PROMISED),
            (SLOWER, -21.7, 0.8, IN_STEP),
            ("quantization", 45.0, 0.2, "quantize 33.1, amax 11.9"),
            ("attention", 0.3, 0.1),
            ("optimizer", 0.1, 0.1),
            ("other GPU work", 0.2, 0.2),
            ("idle", -6.2, 0.5),
            ("residual", 0.1, 0.6, "0.0% of the step"),
        ),
        gemms=gemm_rows(CODONFM_OPERATIONS, (3.315, 1.083, 4.558, 4.529), (3.908, 1.398, 5.149, 5.183)),
        gemm_kernel_ms=measured(323.6, 0.4),
        gemm_autocast_ms=measured(375.3, 0.6),
        verdict=verdict(24, "e4m3/e5m2"),
        loss=measured(1.513, unit="nats"),
        clocks="1980 MHz, 662 W, no throttling",
    )


def _codonfm_block() -> RecipeReport:
    end = measured(625.2, 0.6)
    return RecipeReport(
        "fp8_block",
        TITLES["fp8_block"],
        False,
        step_ms=end,
        host_ms=measured(131.7),
        peak_gb=measured(99.7, unit="GB"),
        samples=samples_around(625.2, 1.1),
        speedups=speedups(1.532, 1.388, 1.394, 1.310),
        ledger=ledger(
            625.2,
            0.3,
            25.1,
            "gemm 435.4 quantize 51.0 attention 19.6 norm 21.4 activation 30.1 "
            "optimizer 25.7 loss 3.2 elementwise 11.0 copy 2.0 other 0.4",
        ),
        gap=gap(
            "bf16",
            "fp8_block",
            CODONFM_STEP,
            end,
            ("GEMM kernels", -215.8, 0.7, PROMISED),
            (SLOWER, -15.7, 0.8, IN_STEP),
            ("quantization", 51.0, 0.2, "quantize 51.0"),
            ("attention", -0.4, 0.1),
            ("other GPU work", -25.9, 0.2),
            ("idle", 12.8, 0.5),
        ),
        gemms=gemm_rows(CODONFM_OPERATIONS, (4.135, 1.352, 5.744, 5.674), (4.590, 1.607, 6.197, 6.258)),
        gemm_kernel_ms=measured(405.7, 0.5),
        gemm_autocast_ms=measured(447.6, 0.7),
        verdict=verdict(24, "e4m3"),
        loss=measured(1.515, unit="nats"),
        clocks="1980 MHz, 671 W, no throttling",
    )


def codonfm() -> Report:
    """Sample a."""
    return Report(
        version=1,
        tool_version="0.1.0",
        created="2026-03-14T10:21:07+00:00",
        model="codonfm-5b",
        engine="transformer_engine",
        why_engine="the model has 96 TE modules and TE 2.20.2 can run here",
        device="NVIDIA H200",
        versions=HOPPER_VERSIONS,
        headline=(
            "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms, ±0.3).",
            "Its GEMMs promised 1.92x (kernels) and 1.73x (with quantization); Amdahl allows 1.64x.",
            "All TE GEMMs ran in FP8: 24 layers x 4 x 3.",
        ),
        reading=(
            "fp8_delayed: the step follows its GEMMs. They gain 1.92x as kernels and 1.73x with their "
            "quantization, the step 1.60x; GEMMs are 81% of the bf16 step.",
            "fp8_current: the step follows its GEMMs. They gain 1.92x as kernels and 1.66x with their "
            "quantization, the step 1.52x; GEMMs are 81% of the bf16 step.",
            "fp8_block: the step follows its GEMMs. They gain 1.53x as kernels and 1.39x with their "
            "quantization, the step 1.31x; GEMMs are 81% of the bf16 step.",
        ),
        baseline="bf16",
        recipes=(_codonfm_bf16(), _codonfm_delayed(), _codonfm_current(), _codonfm_block(), *NOT_ON_HOPPER),
        plan=PLAN,
        restored=RESTORED,
        recording="runs/codonfm-5b/recording.jsonl",
    )
