"""The grammar of range names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.measure.trace import gemm_range, module_range, phase_range, step_range
from lowprec_callback.range_names import DOMAIN, PREFIX, Meaning, meaning


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fp8_delayed step", Meaning(ours=True, step=True, recipe="fp8_delayed")),
        ("step0", Meaning(ours=True, step=True, number=0)),
        ("step 12", Meaning(ours=True, step=True, number=12)),
        ("step|3", Meaning(ours=True, step=True, number=3)),
        ("backward", Meaning(ours=True, phase="backward")),
        ("bwd", Meaning(ours=True, phase="backward")),
        ("phase|optimizer", Meaning(ours=True, phase="optimizer")),
        ("module|backward|layers.3.mlp", Meaning(ours=True, module="layers.3.mlp", direction="backward")),
        (
            "gemm|wgrad|layers.3.mlp.fc1",
            Meaning(ours=True, role="wgrad", module="layers.3.mlp.fc1", direction="backward"),
        ),
        ("gemm|fprop|a|b", Meaning(ours=True, role="fprop", module="a|b", direction="forward")),
        ("gemm|nothing|x", Meaning(ours=True)),
        ("fp8_delayed settle", Meaning(ours=True)),
        ("something new", Meaning(ours=True)),
    ],
)
def test_our_own(text: str, found: Meaning) -> None:
    assert meaning(text, DOMAIN) == found
    assert meaning(PREFIX + text) == found


@pytest.mark.parametrize(
    ("text", "module", "role", "direction"),
    [
        ("transformer_engine._LayerNormLinear.forward.qkv.gemm", "LayerNormLinear.qkv", "fprop", "forward"),
        ("transformer_engine._Linear.backward.proj.dgrad_gemm", "Linear.proj", "dgrad", "backward"),
        ("transformer_engine._Linear.backward.wgrad_gemm", "Linear", "wgrad", "backward"),
        ("transformer_engine._Linear.backward", "Linear", "", "backward"),
        ("transformer_engine._Linear.forward.proj.input_cast_comm", "Linear.proj", "", "forward"),
        ("transformer_engine._Linear.forward.layers.1.proj", "Linear.layers.1.proj", "", "forward"),
        ("LayerNormMLP forward", "LayerNormMLP", "", "forward"),
        ("_LayerNormMLP_backward", "LayerNormMLP", "", "backward"),
        ("_GroupedLinear_wgrad", "GroupedLinear", "wgrad", "backward"),
        ("_LayerNormLinearBackward", "LayerNormLinear", "", "backward"),
        ("_Linear", "Linear", "", "forward"),
    ],
)
def test_transformer_engines_layers(text: str, module: str, role: str, direction: str) -> None:
    found = meaning(text)
    assert (found.module, found.role, found.direction, found.ours) == (module, role, direction, False)
    assert not found.attention


@pytest.mark.parametrize(
    "text",
    [
        "DotProductAttention forward",
        "nvte_scaled_softmax_backward",
        "nvte_fused_attn_fwd",
        "transformer_engine.FusedAttnFunc.forward",
        "FusedAttnFunc.backward",
    ],
)
def test_attention(text: str) -> None:
    assert meaning(text).attention


@pytest.mark.parametrize(
    "text", ["nvte_cublas_gemm_v2", "nvte_multi_tensor_gemm", "nvte_grouped_gemm_with_discrete_out"]
)
def test_calls_of_the_gemm_library(text: str) -> None:
    assert meaning(text).te_gemm


@pytest.mark.parametrize("text", ["nvte_quantize_v2", "nvte_gelu", "aten::mm", "my range", "matrix forward"])
def test_others_are_operations(text: str) -> None:
    assert meaning(text) == Meaning(op=text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("ProfilerStep#7", 7),
        ("iteration 12", 12),
        ("Iter_3", 3),
        ("train_step", None),
        ("training step 4", 4),
        ("batch", None),
        ("[pl][profile]run_training_batch", None),
        ("optimizer step 2", 2),
    ],
)
def test_what_is_called_like_a_step(text: str, number: int | None) -> None:
    found = meaning(text)
    assert (found.iteration, found.number, found.step) == (True, number, False)


def test_pytorchs_own() -> None:
    assert meaning("Optimizer.step#AdamW.step").optimizer
    assert not meaning("Optimizer.zero_grad#AdamW.zero_grad").optimizer
    assert meaning("aten::addmm, seq = 12, op_id = 7, sizes = [[8, 8]]").op == "aten::addmm"
    assert meaning("autograd::engine::evaluate_function: MmBackward0").direction == "backward"


def test_it_reads_what_the_package_writes() -> None:
    from lowprec_callback.measure.scopes import Scope

    written = [
        (step_range(3), Meaning(ours=True, step=True, number=3)),
        (phase_range("forward"), Meaning(ours=True, phase="forward")),
        (module_range(Scope("a.b", "backward")), Meaning(ours=True, module="a.b", direction="backward")),
        (gemm_range("a.b", "dgrad"), Meaning(ours=True, module="a.b", role="dgrad", direction="backward")),
    ]
    for range_, found in written:
        assert meaning(range_.name) == found  # type: ignore[attr-defined]


@given(st.text(), st.sampled_from(["", DOMAIN, "other"]))
def test_any_name_is_understood_or_an_operation(text: str, domain: str) -> None:
    found = meaning(text, domain)
    assert found.ours == (domain == DOMAIN or text.strip().startswith(PREFIX))
