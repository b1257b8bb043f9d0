"""Sample reports (b) and (c) of `samples`: small models, on a GPU and on a CPU."""

from __future__ import annotations

from dataclasses import replace

from lowprec_callback.report import Figure, GapTerm, RecipeReport, Report

from .sample_codonfm import codonfm
from .sample_parts import (
    NOT_ON_HOPPER,
    ONE,
    TITLES,
    gap,
    gemm_rows,
    ledger,
    measured,
    missing,
    refused,
    samples_around,
    speedups,
    verdict,
)

SEED_OPERATIONS = (
    ("attention.qkv", 8192, 768, 2304, 4),
    ("attention.proj", 8192, 768, 768, 4),
    ("mlp.fc1", 8192, 768, 3072, 4),
    ("mlp.fc2", 8192, 3072, 768, 4),
)
SEED_STEP = measured(27.0, 0.2)
SEED_IDLE = 15.2


def _seed_bf16() -> RecipeReport:
    ms = (0.231, 0.081, 0.301, 0.297)
    return RecipeReport(
        "bf16",
        TITLES["bf16"],
        True,
        step_ms=SEED_STEP,
        speedups=ONE,
        host_ms=measured(26.4),
        peak_gb=measured(3.41, unit="GB"),
        samples=samples_around(27.0, 0.3),
        ledger=ledger(
            27.0,
            0.0,
            SEED_IDLE,
            "gemm 4.31 attention 1.52 norm 0.91 activation 1.12 optimizer 1.84 "
            "loss 0.61 elementwise 1.36 copy 0.09 other 0.04",
        ),
        gemms=gemm_rows(SEED_OPERATIONS, ms, ms),
        gemm_kernel_ms=measured(3.64, 0.02),
        gemm_autocast_ms=measured(3.64, 0.02),
        verdict=verdict(4, "bf16"),
        loss=measured(0.412, unit="nats"),
    )


def _seed_fp8(name: str, step: float, host: float, idle: float, quantize: float, speedup: float) -> RecipeReport:
    end = measured(step, 0.3)
    # What is left over, so that the terms close to the measured difference.
    other = round(step - 27.0 - (-1.34 + quantize + idle - SEED_IDLE), 2)
    return RecipeReport(
        name,
        TITLES[name],
        False,
        step_ms=end,
        host_ms=measured(host),
        peak_gb=measured(3.52, unit="GB"),
        samples=samples_around(step, 0.5),
        speedups=speedups(1.58, 1.04, 1.05, speedup, 0.01),
        ledger=ledger(
            step,
            0.0,
            idle,
            f"gemm 2.97 quantize {quantize} attention 1.52 norm 0.93 activation 1.14 "
            f"optimizer 1.83 loss 0.61 elementwise 1.36 other 0.04",
        ),
        gap=gap(
            "bf16",
            name,
            SEED_STEP,
            end,
            ("GEMM kernels", -1.34, 0.02),
            ("quantization", quantize, 0.02, "cast, transpose and amax"),
            ("other GPU work", other, 0.1),
            ("idle", round(idle - SEED_IDLE, 2), 0.4, "the host cannot launch TE's kernels faster"),
        ),
        gemms=gemm_rows(SEED_OPERATIONS, (0.146, 0.051, 0.191, 0.188), (0.22, 0.09, 0.29, 0.28), launch_bound=True),
        gemm_kernel_ms=measured(2.30, 0.02),
        gemm_autocast_ms=measured(3.52, 0.05),
        verdict=verdict(4, "e4m3/e5m2"),
        loss=measured(0.42, unit="nats"),
    )


def seed() -> Report:
    """Sample b."""
    return replace(
        codonfm(),
        created="2026-03-14T11:02:40+00:00",
        model="seed",
        why_engine="the model has 16 TE modules and TE 2.20.2 can run here",
        headline=(
            "FP8 makes this step slower: 0.75x (27.0 -> 35.9 ms).",
            "The GPU is idle 69% of the time: the host needs 35.6 ms to launch one FP8 step (26.4 in bf16), "
            "whatever the kernels gain.",
            "Launch-bound.",
        ),
        reading=(
            "fp8_delayed: GEMM speedup near 1 (1.58x as kernels and 1.04x with their quantization), and the step "
            "at 0.75x. Quantization takes back what the kernels gain, so that the step has nothing to win.",
        ),
        recipes=(
            _seed_bf16(),
            _seed_fp8("fp8_delayed", 35.9, 35.6, 24.68, 0.82, 0.752),
            _seed_fp8("fp8_current", 36.2, 36.0, 24.79, 1.01, 0.746),
            _seed_fp8("fp8_block", 34.5, 34.1, 22.81, 1.29, 0.783),
            *NOT_ON_HOPPER,
        ),
        recording="runs/seed/recording.jsonl",
    )


TINY_OPERATIONS = (
    ("attn.qkv", 512, 128, 384, 2),
    ("attn.proj", 512, 128, 128, 2),
    ("mlp.fc1", 512, 128, 512, 2),
    ("mlp.fc2", 512, 512, 128, 2),
    ("head", 512, 128, 96, 1),
)
TINY_STEP = measured(48.31, 0.62)
TINY_MODULES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
NO_BYTES = missing("the CPU's allocator keeps no count", "GB")


def _cpu_fp32() -> RecipeReport:
    ms = (2.9, 1.0, 3.6, 3.5, 0.7)
    return RecipeReport(
        "fp32",
        TITLES["fp32"],
        True,
        step_ms=TINY_STEP,
        speedups=ONE,
        host_ms=TINY_STEP,
        peak_gb=NO_BYTES,
        samples=samples_around(48.31, 1.2, rounds=2),
        ledger=replace(
            ledger(
                48.31,
                0.1,
                2.6,
                "gemm 21.4 attention 6.1 norm 3.0 activation 4.2 loss 0.9 "
                "optimizer 6.8 elementwise 2.9 copy 0.3 other 0.01",
                "estimated",
            ),
            note="On a CPU tracing stretches the operators: the split of the traced step is scaled.",
        ),
        gemms=gemm_rows(TINY_OPERATIONS, ms, ms),
        gemm_kernel_ms=measured(22.7, 0.3),
        gemm_autocast_ms=measured(22.7, 0.3),
        verdict=verdict(2, "fp32", prefix="blocks", modules=TINY_MODULES, witnesses=("operands",)),
        loss=measured(3.91, unit="nats"),
    )


def _cpu_bf16() -> RecipeReport:
    end = measured(39.02, 0.71)
    closing = gap(
        "fp32",
        "bf16",
        TINY_STEP,
        end,
        ("GEMM kernels", -9.5, 0.4),
        ("casts", 3.52, 0.1, "autocast converts weights and inputs in every step"),
        ("other work", -3.21, 0.3),
        ("residual", 0.1, 0.9, "0.3% of the step"),
    )
    idle = GapTerm("idle", Figure(-0.2, "ms", "estimated"))
    return RecipeReport(
        "bf16",
        TITLES["bf16"],
        False,
        step_ms=end,
        host_ms=end,
        peak_gb=NO_BYTES,
        samples=samples_around(39.02, 1.3, rounds=2),
        speedups=speedups(1.71, 1.38, 1.15, 1.238, 0.028),
        ledger=ledger(
            39.02,
            0.2,
            2.4,
            "gemm 11.9 attention 4.8 norm 3.1 activation 2.6 loss 1.0 optimizer 6.8 elementwise 2.4 copy 3.82",
            "estimated",
        ),
        gap=replace(closing, terms=(*closing.terms[:3], idle, closing.terms[3])),
        gemms=gemm_rows(TINY_OPERATIONS, (1.7, 0.6, 2.1, 2.0, 0.4), (2.1, 0.8, 2.6, 2.5, 0.6)),
        gemm_kernel_ms=measured(13.2, 0.3),
        gemm_autocast_ms=measured(16.6, 0.3),
        verdict=verdict(2, "bf16", prefix="blocks", modules=TINY_MODULES, witnesses=("operands",)),
        loss=measured(3.92, unit="nats"),
    )


def cpu() -> Report:
    """Sample c."""
    no_gpu = "no NVIDIA GPU here, and Transformer Engine is not installed"
    return replace(
        codonfm(),
        created="2026-03-14T12:00:00+00:00",
        model="tiny",
        engine="plain_torch",
        why_engine="import transformer_engine.pytorch failed: ModuleNotFoundError: No module named "
        "'transformer_engine'",
        device="AMD EPYC 9R14",
        versions={"python": "3.11.9", "torch": "2.13.0+cpu", "lightning": "2.6.6"},
        headline=(
            "bf16 makes a step 1.24x faster (48.3 -> 39.0 ms, ±0.7).",
            "Its GEMMs promised 1.71x (kernels) and 1.38x (with casts); Amdahl allows 1.15x.",
        ),
        reading=("bf16: GEMM speedup far above the step's. GEMMs are 44% of the fp32 step.",),
        baseline="fp32",
        recipes=(
            _cpu_fp32(),
            _cpu_bf16(),
            *(refused(name, no_gpu) for name in ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")),
        ),
        plan="2 rounds x (1 settle + 8 timed) steps of 2 recipes, shuffled (seed 0); 1 traced step each: 38",
        shrunk="the fit has 40 steps and 3 rounds need 56: 2 were run; intervals are about 1.2x as wide",
        recording="runs/tiny/recording.jsonl",
    )
