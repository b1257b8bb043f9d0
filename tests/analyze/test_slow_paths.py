from __future__ import annotations

from dataclasses import replace

from lowprec_callback.analyze.slow_paths import Watched, slow_paths
from lowprec_callback.analyze.traceview import view
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import AttentionBackend, Dispatch, UncachedWeights

from .recordings import (
    CURRENT_CARD,
    FUSED_ATTENTION,
    GEMM_NAMES,
    SOFTMAX,
    Kernel,
    Linear,
    dispatch,
    gemms,
    step_kernels,
    te_linears,
    trace,
)

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


# --- what the watched step tells ------------------------------------------------------------------------------------


def again(module: str, recomputed: bool = True) -> Dispatch:
    return replace(dispatch("fp8_current", Linear(module, 64, 64, 64), "fprop", CURRENT_CARD), recomputed=recomputed)


def test_tes_reasons_for_its_attention() -> None:
    why = ("Disabling FusedAttention due to NVTE_FUSED_ATTN=0", "Disabling UnfusedDotProductAttention for thd")
    chosen = AttentionBackend("bf16", "UnfusedDotProductAttention", why)
    kernels = [Kernel(BATCHED, 1000.0, CORE, op="aten::bmm"), Kernel(SOFTMAX, 500.0, CORE)]
    (text,) = slow_paths([view(trace("bf16", kernels, 5.0))], Watched(backends=[chosen]))
    assert text == (
        "attention ran unfused: 1 batched GEMMs and 1 softmax kernels, 1.50 ms a step. Transformer Engine chose "
        "UnfusedDotProductAttention: Disabling FusedAttention due to NVTE_FUSED_ATTN=0"
    )
    # Without a trace TE's word stands alone; a fused backend is no slow path.
    assert slow_paths([], Watched(backends=[replace(chosen, reasons=())])) == (
        "attention ran unfused. Transformer Engine chose UnfusedDotProductAttention: it gave no reason",
    )
    assert slow_paths([], Watched(backends=[replace(chosen, backend="FusedAttention (sub-backend 1)")])) == ()


def test_recomputation_and_what_it_costs() -> None:
    seen = [again(f"layers.{index}.fc") for index in range(3)] + [again("layers.0.fc", recomputed=False)]
    kernels = [
        Kernel(GEMM_NAMES["fp8_current"]["fprop"], 700.0, "layers.0.fc", "fprop", phase="backward"),
        Kernel(GEMM_NAMES["fp8_current"]["fprop"], 700.0, "layers.0.fc", "fprop", phase="forward"),
    ]
    (text,) = slow_paths([view(trace("fp8_current", kernels, 5.0))], Watched(dispatches=seen))
    assert text == (
        "recomputation: 3 forward GEMMs of layers.*.fc ran again in backward, in e4m3 x e4m3: "
        "0.70 ms a step for the GEMMs alone"
    )
    (text,) = slow_paths([], Watched(dispatches=seen[:1]))
    assert text.startswith("recomputation: 1 forward GEMM of layers.0.fc ran again")
    assert text.endswith("what it costs was not traced")


def test_weights_are_quantized_again_only_where_steps_have_micro_batches() -> None:
    fact = UncachedWeights("fp8_current", ("layers.0.fc", "layers.1.fc", "head"))
    (text,) = slow_paths([], Watched(uncached=[fact], micro_batches=4))
    assert text.startswith(
        "the weights of 3 modules (layers.*.fc, head) are quantized again in each of 4 micro-batches"
    )
    assert "is_first_microbatch" in text
    assert slow_paths([], Watched(uncached=[fact], micro_batches=1)) == ()
    assert slow_paths([], Watched(micro_batches=4)) == ()


def test_sizes_that_are_in_the_way() -> None:
    card = load_cards()["bf16"]
    odd = gemms([Linear("layers.0.fc", 64, 60, 64), Linear("layers.1.fc", 64, 60, 64), Linear("even", 64, 64, 64)])
    (text,) = slow_paths([], Watched(gemms=odd, card=card))
    assert text == (
        "misaligned: BF16 GEMMs are slower off multiples of 8: layers.*.fc 64x60x64 (input features 60 -> 64)"
    )
    assert slow_paths([], Watched(gemms=odd)) == ()
    nvfp4 = load_cards()["nvfp4"]
    (text,) = slow_paths([], Watched(gemms=gemms([Linear("fc", 96, 128, 128)]), card=nvfp4, compute_capability=(10, 0)))
    assert "Hadamard transform and cast are not fused" in text
    assert "tokens 96 -> 128" in text


def test_scales_swizzled_apart() -> None:
    name = "void transformer_engine::(anonymous namespace)::swizzle_scaling_kernel<int4, 128, 4>(void*)"
    assert told([Kernel(name, 200.0)]) == (
        "scale factors were put into the GEMM's order by kernels of their own: no cast wrote them so: "
        "1 kernels, 0.20 ms a step",
    )
