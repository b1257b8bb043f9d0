from __future__ import annotations

from lowprec_callback.analyze.slow_paths import slow_paths
from lowprec_callback.analyze.traceview import view

from .recordings import FUSED_ATTENTION, GEMM_NAMES, SOFTMAX, Kernel, step_kernels, te_linears, trace

BATCHED = GEMM_NAMES["bf16"]["fprop"]
CORE = "layers.0.self_attention.core_attention"


def told(kernels: list[Kernel], steps: int = 1) -> tuple[str, ...]:
    return slow_paths([view(trace("bf16", kernels, 5.0)) for _ in range(steps)])


def test_unfused_attention() -> None:
    kernels = [
        Kernel(BATCHED, 1000.0, CORE, op="aten::bmm"),
        Kernel(SOFTMAX, 500.0, CORE),
        Kernel(BATCHED, 1000.0, CORE, op="aten::bmm"),
        Kernel(BATCHED, 300.0, "layers.0.self_attention.proj", "fprop"),
    ]
    text = "attention ran unfused: 2 batched GEMMs and 1 softmax kernels, 2.50 ms a step"
    assert told(kernels) == (text,)
    assert told(kernels, steps=3) == (text,)


def test_fused_attention_is_fine() -> None:
    assert told(step_kernels("bf16", te_linears(1), 10.0)) == ()
    assert told([Kernel(FUSED_ATTENTION, 10.0, CORE)]) == ()
    assert slow_paths([]) == ()


def test_alarms_are_told_most_expensive_first() -> None:
    swizzle = "void transformer_engine::swizzle_block_scaling_2d_to_mxfp8_kernel<float>(void*)"
    hadamard = "void transformer_engine::HadamardTransformKernel<__nv_bfloat16, 16>(void*)"
    found = told([Kernel(swizzle, 100.0), Kernel(hadamard, 300.0), Kernel(swizzle, 100.0)])
    assert found == (
        "NVFP4's Hadamard transform ran on its own, not fused with the cast: 1 kernels, 0.30 ms a step",
        "FP8 block scales were rewritten for MXFP8's GEMM: 2 kernels, 0.20 ms a step",
    )
