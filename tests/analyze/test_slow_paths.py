from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.slow_paths import Watched, attention_is_seen, slow_paths, unfused_attention
from lowprec_callback.analyze.traceview import view
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import AttentionBackend, Dispatch, UncachedWeights

from .recordings import (
    ADAM,
    CAST,
    CURRENT_CARD,
    FUSED_ATTENTION,
    GEMM_NAMES,
    NORM,
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


# --- unfused attention is a softmax between batched products ----------------------------------------------

SOFT = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*)"
LOG_SOFT = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*)"
SCALE = "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>(int)"
BMM = Kernel(BATCHED, 100.0, op="aten::bmm")
ROUTER = Kernel(SOFT, 50.0, op="aten::_softmax")
LINEAR = Kernel(BATCHED, 100.0, "layers.0.fc", "fprop")
PLAIN_LINEAR = Kernel(BATCHED, 100.0, "layers.0.fc", op="aten::addmm")


def at(module: str, *kernels: Kernel) -> list[Kernel]:
    return [replace(kernel, module=module) for kernel in kernels]


def unfused(kernels: Sequence[Kernel]) -> float | None:
    """Milliseconds of the unfused attention, if there is one."""
    found = unfused_attention([view(trace("bf16", kernels, 5.0))])
    return None if found is None else found.ms


ATTENTIONS: dict[str, list[Kernel]] = {
    "eager, in no module": [BMM, ROUTER, BMM],
    "in TE's module": at(CORE, BMM, replace(ROUTER, name=SOFTMAX, op=""), BMM),
    "its softmax is a module of its own": [*at("l.0.attn", BMM), *at("l.0.attn.softmax", ROUTER), *at("l.0.attn", BMM)],
    "each of its parts is a module": [
        *at("l.0.attn.qk", BMM),
        *at("l.0.attn.softmax", ROUTER),
        *at("l.0.attn.pv", BMM),
    ],
    "scaled, masked, and with a bias in the product": [
        replace(BMM, op="aten::baddbmm"),
        Kernel(SCALE, 10.0, op="aten::mul"),
        ROUTER,
        Kernel(SCALE, 10.0, op="aten::native_dropout"),
        BMM,
    ],
    "backward": [BMM, BMM, replace(ROUTER, op="aten::_softmax_backward_data"), BMM, BMM],
    "compiled": [BMM, Kernel("triton_per_fused__softmax_mul_0", 50.0), BMM],
    "cuBLAS says batched": [
        Kernel("void gemmSN_NN_kernel_64addr_batched<float>", 100.0),
        Kernel(SOFT, 50.0),
        Kernel("void gemmSN_TN_kernel_64addr_batched<float>", 100.0),
    ],
    "a capture that tells names alone": [Kernel(BATCHED, 100.0), Kernel(SOFTMAX, 50.0), Kernel(BATCHED, 100.0)],
}
NO_ATTENTIONS: dict[str, list[Kernel]] = {
    "a softmax alone": [Kernel(SOFTMAX, 50.0, CORE)],
    "a router": [LINEAR, ROUTER, BMM, BMM],
    "an interaction of features, and a router behind it": [BMM, BMM, ROUTER, LINEAR],
    "an interaction, a layer, a gate, a mixture": [BMM, LINEAR, ROUTER, BMM],
    "the same by layers of PyTorch": [BMM, PLAIN_LINEAR, ROUTER, BMM],
    "an interaction, a norm, a gate, a mixture": [BMM, Kernel(NORM, 10.0), ROUTER, BMM],
    "a loss's softmax between forward and backward": [BMM, Kernel(LOG_SOFT, 50.0, op="aten::_log_softmax"), BMM],
    "the same where the operator is not known": [BMM, Kernel(LOG_SOFT, 50.0), BMM],
    "a softmax between the passes": [
        replace(BMM, phase="forward"),
        replace(ROUTER, phase="forward"),
        replace(BMM, phase="backward"),
    ],
    "three modules that have nothing to do with each other": [
        *at("interaction", BMM),
        *at("gate", ROUTER),
        *at("mixture", BMM),
    ],
    "products of one GEMM after the other": [BMM, BMM, BMM],
    "a softmax between products of which nothing is known": [
        Kernel(BATCHED, 1.0),
        Kernel(SOFT, 1.0),
        Kernel(BATCHED, 1.0),
    ],
    "a step later": [BMM, ROUTER, Kernel(ADAM, 10.0, phase="optimizer"), BMM],
    "an optimizer's products": [replace(BMM, phase="optimizer"), Kernel(ADAM, 1.0), replace(BMM, phase="optimizer")],
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_softmax_between_batched_products_is_unfused_attention(name: str) -> None:
    kernels = ATTENTIONS[name]
    own = sum(kernel.us for kernel in kernels if kernel.name != SCALE) / 1e3
    assert unfused(kernels) == pytest.approx(own)
    assert unfused([LINEAR, *kernels, LINEAR]) == pytest.approx(own) or name == "a capture that tells names alone"
    (text,) = told(kernels)
    assert text.startswith("attention ran unfused: ")


@pytest.mark.parametrize("name", NO_ATTENTIONS)
def test_a_name_alone_is_no_unfused_attention(name: str) -> None:
    """A recommender has a softmax, or batched products, and no attention."""
    assert unfused(NO_ATTENTIONS[name]) is None
    assert told(NO_ATTENTIONS[name]) == ()


PIECES = st.sampled_from([LINEAR, PLAIN_LINEAR, Kernel(NORM, 10.0), Kernel(SCALE, 5.0), ROUTER, BMM, Kernel(CAST, 3.0)])


@given(st.lists(PIECES, max_size=12), st.lists(PIECES, max_size=12))
def test_unfused_attention_is_found_wherever_it_is_and_needs_all_three(
    before: list[Kernel], after: list[Kernel]
) -> None:
    assert unfused([*before, *ATTENTIONS["eager, in no module"], *after]) is not None
    whole = [*before, *after]
    for missing in (BMM, ROUTER):
        assert unfused([kernel for kernel in whole if kernel != missing]) is None
    if unfused(whole) is not None:
        # Between two walls: a product, then a softmax, then a product.
        stretches: list[list[Kernel]] = [[]]
        for kernel in whole:
            if kernel in (LINEAR, PLAIN_LINEAR) or kernel.name == NORM:
                stretches.append([])
            else:
                stretches[-1].append(kernel)
        assert any(
            stretch[index] == ROUTER and BMM in stretch[:index] and BMM in stretch[index:]
            for stretch in stretches
            for index in range(len(stretch))
        )


def test_what_attention_costs_is_that_of_its_own_kernels() -> None:
    fused = Kernel(FUSED_ATTENTION, 1000.0, "layers.1.self_attention.core_attention")
    assert unfused([fused, LINEAR, *ATTENTIONS["eager, in no module"], LINEAR, BMM]) == pytest.approx(0.25)


def test_batched_products_are_not_attention_by_themselves() -> None:
    def seen(*kernels: Kernel) -> bool:
        return attention_is_seen([view(trace("bf16", kernels, 5.0))])

    assert not seen(BMM, LINEAR, BMM)
    assert not seen(BMM, LINEAR, ROUTER)
    assert not seen(LINEAR)
    assert seen(Kernel(FUSED_ATTENTION, 100.0))
    assert seen(Kernel(FUSED_ATTENTION, 100.0), LINEAR, BMM)
    assert not seen(Kernel(FUSED_ATTENTION, 90.0), LINEAR, BMM)
    assert seen(BMM, ROUTER, BMM)
    assert seen(*at("layers.0.attention", BMM))
    assert seen(Kernel("aten::bmm", 10.0, op="aten::_scaled_dot_product_attention_math"))


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
    product = Kernel(BATCHED, 500.0, CORE, op="aten::bmm")
    kernels = [product, Kernel(SOFTMAX, 500.0, CORE), product]
    (text,) = slow_paths([view(trace("bf16", kernels, 5.0))], Watched(backends=[chosen]))
    assert text == (
        "attention ran unfused: 2 batched GEMMs and 1 softmax kernels, 1.50 ms a step. Transformer Engine chose "
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
