"""The GEMMs of a config: against tables worked out by hand, by property, and against a real model's linear layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples.mini_gpt.model import PRESETS, GPTConfig, MiniGPT
from lowprec_callback.analyze.gemms import operation
from lowprec_callback.analyze.hugging_face import FAMILIES, from_hugging_face
from lowprec_callback.analyze.model_config import ModelConfig, ModelConfigError
from lowprec_callback.analyze.shapes import (
    LM_HEAD,
    LayerGemm,
    as_facts,
    flops_of_layer,
    flops_of_model,
    from_facts,
    gemm_flops,
    layer_gemms,
)
from lowprec_callback.recording import ROLES, Gemm, role_shape

CODONFM = ModelConfig(
    hidden_size=4096,
    intermediate_size=16384,
    num_attention_heads=32,
    num_hidden_layers=24,
    micro_batch_size=31,
    sequence_length=512,
)
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "attention_bias": False,
    "max_position_embeddings": 8192,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def sizes(gemms: list[LayerGemm]) -> dict[str, tuple[int, int, int]]:
    return {gemm.operation: (gemm.m, gemm.k, gemm.n) for gemm in gemms}


def by_name(config: ModelConfig) -> dict[str, LayerGemm]:
    return {gemm.operation: gemm for gemm in layer_gemms(config)}


# --- Hand-computed tables (docs/gemm_shapes.md shows the same numbers) -----------------------------------


def test_codonfm_5b() -> None:
    gemms = layer_gemms(CODONFM)
    assert sizes(gemms) == {
        "QKV": (15872, 4096, 12288),
        "attention out": (15872, 4096, 4096),
        "MLP up": (15872, 4096, 16384),
        "MLP down": (15872, 16384, 4096),
    }
    assert {gemm.calls for gemm in gemms} == {24}
    assert not any(gemm.bias for gemm in gemms)
    assert flops_of_layer(gemms, ["fprop"]) == 6_390_911_336_448  # 2 x 15,872 x 201,326,592
    assert flops_of_layer(gemms) == 19_172_734_009_344
    assert flops_of_model(gemms) == 460_145_616_224_256


def test_llama_3_8b() -> None:
    gemms = layer_gemms(from_hugging_face(LLAMA_3_8B, micro_batch_size=1, sequence_length=8192))
    assert sizes(gemms) == {
        "QKV": (8192, 4096, 6144),
        "attention out": (8192, 4096, 4096),
        "MLP up": (8192, 4096, 28672),
        "MLP down": (8192, 14336, 4096),
        LM_HEAD: (8192, 4096, 128256),
    }
    assert [gemm.calls for gemm in gemms] == [32, 32, 32, 32, 1]
    assert flops_of_layer(gemms, ["fprop"]) == 3_573_412_790_272  # 2 x 8,192 x 218,103,808
    assert flops_of_model(gemms, ["fprop"]) == 122_956_323_749_888
    assert sum(gemm.calls * gemm.k * gemm.n for gemm in gemms) == 7_504_658_432  # weights of its 8.03 B parameters


def test_mixtral_8x7b() -> None:
    gemms = layer_gemms(from_hugging_face(MIXTRAL_8X7B, micro_batch_size=1, sequence_length=4096))
    assert sizes(gemms) == {
        "QKV": (4096, 4096, 6144),
        "attention out": (4096, 4096, 4096),
        "router": (4096, 4096, 8),
        "experts up": (8192, 4096, 28672),
        "experts down": (8192, 14336, 4096),
        LM_HEAD: (4096, 4096, 32000),
    }
    up, down = gemms[3], gemms[4]
    assert up.groups == down.groups == 8
    assert set(up.group_rows) == {1024}
    assert up.shape == "8192x4096x28672 in 8 groups"
    assert flops_of_layer(gemms, ["fprop"]) == 3_230_083_842_048  # 2 x 4,096 x 394,297,344
    assert flops_of_model(gemms, ["fprop"]) == 104_436_424_769_536
    # All experts have weights, whichever are visited: 46.6 B of Mixtral's 46.7 B parameters.
    weights = sum(gemm.calls * gemm.groups * gemm.k * gemm.n for gemm in gemms)
    assert weights == 46_571_454_464


@pytest.mark.parametrize(
    ("title", "config"),
    [
        ("CodonFM 5B", CODONFM),
        ("Llama 3 8B", from_hugging_face(LLAMA_3_8B, micro_batch_size=1, sequence_length=8192)),
        ("Mixtral 8x7B", from_hugging_face(MIXTRAL_8X7B, micro_batch_size=1, sequence_length=4096)),
    ],
)
def test_the_page_shows_these_numbers(title: str, config: ModelConfig) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gemm_shapes.md").read_text(encoding="utf-8")
    section = page.split(f"### {title}")[1].split("\n### ")[0].split("\n## ")[0]
    gemms = layer_gemms(config)
    for gemm in gemms:
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {gemm.operation} |"))
        assert f"| {gemm.m} x {gemm.k} x {gemm.n} |" in row
        assert f"{gemm.k * gemm.n:,} |" in row
        assert row.endswith(f"| {gemm.flops('fprop') / 1e12:.3f} |")
    (layer,) = (line for line in section.splitlines() if line.startswith("| **a layer** |"))
    assert f"| {sum(gemm.groups * gemm.k * gemm.n for gemm in gemms if gemm.per_layer):,} |" in layer
    assert layer.endswith(f"| **{flops_of_layer(gemms, ['fprop']) / 1e12:.3f}** |")
    model = flops_of_model(gemms, ["fprop"] if config.vocab_size else ROLES) / 1e12
    assert f" {model:.3f} TFLOP" in section or f" {model:.1f}." in section


def test_the_page_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gemm_shapes.md").read_text(encoding="utf-8")
    assert all(f"`{family}`" in page for family in FAMILIES)


def test_tensor_and_sequence_parallel_shapes() -> None:
    changes: dict[str, Any] = {"tensor_parallel": 4, "sequence_parallel": True}
    config = from_hugging_face(MIXTRAL_8X7B, micro_batch_size=1, sequence_length=4096, **changes)
    assert sizes(layer_gemms(config)) == {
        "QKV": (4096, 4096, 1536),
        "attention out": (4096, 1024, 4096),
        "router": (1024, 4096, 8),  # not split, so sequence parallelism shares its tokens
        "experts up": (8192, 4096, 7168),
        "experts down": (8192, 3584, 4096),
        LM_HEAD: (4096, 4096, 8000),
    }
    assert by_name(config)["QKV"].sizes_from[2].endswith("/ tensor_parallel")
    without = by_name(replace(config, sequence_parallel=False))
    assert without["router"].m == 4096


def test_a_model_with_shared_experts_and_dense_layers() -> None:
    config = ModelConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        num_hidden_layers=24,
        micro_batch_size=1,
        sequence_length=4096,
        gated_mlp=True,
        num_experts=60,
        experts_per_token=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        shared_expert_gate=True,
        num_dense_layers=3,
    )
    gemms = by_name(config)
    assert {name: gemm.calls for name, gemm in gemms.items()} == {
        "QKV": 24,
        "attention out": 24,
        "MLP up": 3,
        "MLP down": 3,
        "router": 21,
        "experts up": 21,
        "experts down": 21,
        "shared expert up": 21,
        "shared expert down": 21,
        "shared expert gate": 21,
    }
    assert (gemms["experts up"].m, gemms["experts up"].n) == (4 * 4096, 2 * 1408)
    assert (gemms["shared expert up"].m, gemms["shared expert up"].n) == (4096, 2 * 5632)
    assert gemms["shared expert gate"].n == 1
    # 16,384 rows over 60 experts: 273 each, and 4 experts with one more.
    assert Counter(gemms["experts up"].group_rows) == {273: 56, 274: 4}
    plain = {name for name, gemm in gemms.items() if not gemm.quantizable}
    assert plain == {"router", "shared expert gate"}
    assert gemms["router"].family == "nn.Linear"
    assert gemms["experts up"].family == "GroupedLinear"


def test_biases() -> None:
    def biased(config: ModelConfig) -> list[str]:
        return [gemm.operation for gemm in layer_gemms(config) if gemm.bias]

    assert biased(replace(CODONFM, bias=True, vocab_size=96)) == ["QKV", "attention out", "MLP up", "MLP down"]
    assert biased(replace(CODONFM, qkv_bias=True)) == ["QKV"]
    assert biased(replace(CODONFM, bias=True, mlp_bias=False, out_bias=False)) == ["QKV"]


def test_role_conventions() -> None:
    """Design section 3: dgrad is M x N x K and wgrad is K x M x N."""
    assert [role_shape(role, 7, 5, 3) for role in ROLES] == [(7, 5, 3), (7, 3, 5), (5, 7, 3)]
    assert gemm_flops(7, 5, 3) == 210


# --- Properties ------------------------------------------------------------------------------------------

size = st.integers(1, 40)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Models whose heads, MLP and vocabulary divide by 4."""
    kv_heads = 4 * draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    experts = draw(st.sampled_from([0, 0, 1, 4, 6]))
    layers = draw(st.integers(2, 9))
    return ModelConfig(
        hidden_size=heads * draw(size),
        intermediate_size=4 * draw(size),
        num_attention_heads=heads,
        num_hidden_layers=layers,
        micro_batch_size=draw(size),
        sequence_length=4 * draw(size),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.none() | size),
        gated_mlp=draw(st.booleans()),
        vocab_size=draw(st.none() | size.map(lambda n: 4 * n)),
        num_experts=experts,
        experts_per_token=draw(st.integers(1, experts)) if experts else 0,
        moe_intermediate_size=4 * draw(size) if experts else None,
        shared_expert_intermediate_size=4 * draw(st.integers(0, 9)) if experts else 0,
        num_dense_layers=draw(st.integers(0, layers - 1)) if experts else 0,
    )


@given(configs())
def test_the_three_roles_do_the_same_work(config: ModelConfig) -> None:
    for gemm in layer_gemms(config):
        fprop, dgrad, wgrad = (gemm.flops(role) for role in ROLES)
        assert fprop == dgrad == wgrad == 2 * gemm.m * gemm.k * gemm.n
        assert sum(gemm.group_rows) == gemm.m
        assert max(gemm.group_rows) - min(gemm.group_rows) <= 1


@given(configs(), st.sampled_from([2, 4]), st.booleans())
def test_tensor_parallel_divides_every_split_layer(config: ModelConfig, gpus: int, sequence: bool) -> None:
    split = by_name(replace(config, tensor_parallel=gpus, sequence_parallel=sequence))
    for name, whole in by_name(config).items():
        part = split[name]
        if name in ("router", "shared expert gate"):
            assert part.flops("fprop") * (gpus if sequence else 1) == whole.flops("fprop")
            continue
        assert part.flops("fprop") * gpus == whole.flops("fprop")
        assert part.m == whole.m
        # Column-parallel layers keep their input features, row-parallel ones their output features.
        row_parallel = name.endswith(("out", "down"))
        assert (
            (part.n, part.k * gpus) == (whole.n, whole.k)
            if row_parallel
            else (part.k, part.n * gpus)
            == (
                whole.k,
                whole.n,
            )
        )


@given(configs())
def test_grouped_queries_shrink_qkv_only(config: ModelConfig) -> None:
    full = by_name(replace(config, num_key_value_heads=None))
    for name, gemm in by_name(config).items():
        if name != "QKV":
            assert gemm == full[name]
        else:
            assert gemm.n <= full[name].n
            assert (gemm.n == full[name].n) == (config.kv_heads == config.num_attention_heads)
            assert full[name].n - gemm.n == 2 * (config.num_attention_heads - config.kv_heads) * config.head_size


@given(configs())
def test_a_gate_doubles_the_up_projections_only(config: ModelConfig) -> None:
    plain, gated = (by_name(replace(config, gated_mlp=gate)) for gate in (False, True))
    for name, gemm in plain.items():
        factor = 2 if name.endswith("up") else 1
        assert (gated[name].m, gated[name].k, gated[name].n) == (gemm.m, gemm.k, factor * gemm.n)


@given(configs(), st.integers(1, 5))
def test_layers_scale_the_sum(config: ModelConfig, times: int) -> None:
    dense = config.num_dense_layers
    more = replace(config, num_hidden_layers=times * config.num_hidden_layers, num_dense_layers=times * dense)
    head = sum(gemm.flops("fprop") for gemm in layer_gemms(config) if not gemm.per_layer)
    once, often = (flops_of_model(layer_gemms(each), ["fprop"]) - head for each in (config, more))
    assert often == times * once
    assert flops_of_layer(layer_gemms(more)) == flops_of_layer(layer_gemms(config))


@given(configs())
def test_tokens_scale_everything_but_the_weights(config: ModelConfig) -> None:
    twice = by_name(replace(config, micro_batch_size=2 * config.micro_batch_size))
    for name, gemm in by_name(config).items():
        assert (twice[name].m, twice[name].k, twice[name].n) == (2 * gemm.m, gemm.k, gemm.n)


# --- Against real linear layers --------------------------------------------------------------------------


def config_of(gpt: GPTConfig) -> ModelConfig:
    return ModelConfig(
        hidden_size=gpt.hidden,
        intermediate_size=gpt.ffn,
        num_attention_heads=gpt.heads,
        num_hidden_layers=gpt.layers,
        micro_batch_size=gpt.batch,
        sequence_length=gpt.sequence,
        vocab_size=gpt.vocabulary,
        bias=True,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_the_config_agrees_with_mini_gpt(preset: str) -> None:
    """Every nn.Linear of the plain model, the LM head included, and nothing else."""
    gpt = PRESETS[preset]
    model = MiniGPT(gpt, "plain_torch", device="meta")
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    found = Counter((linear.in_features, linear.out_features, linear.bias is not None) for linear in linears)
    expected: Counter[tuple[int, int, bool]] = Counter()
    for gemm in layer_gemms(config_of(gpt)):
        assert gemm.m == gpt.batch * gpt.sequence
        expected[gemm.k, gemm.n, gemm.bias] += gemm.calls
    assert found == expected


class GatedLayer(nn.Module):
    """The linear layers of a Llama-shaped transformer layer, fused as TE fuses them."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=True)
        self.out = nn.Linear(heads * head_dim, hidden, bias=False)
        self.fc1 = nn.Linear(hidden, 2 * inner, bias=False)
        self.fc2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(x)[..., : self.out.in_features])
        gate, up = self.fc1(x).chunk(2, dim=-1)
        mlp: torch.Tensor = self.fc2(nn.functional.silu(gate) * up)
        return x + mlp


def test_the_config_agrees_with_the_flops_that_torch_counts() -> None:
    """PyTorch's own counter over forward and backward of a Qwen-shaped model on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    layers = [GatedLayer(64, 96, 4, 2, 24).to("meta") for _ in range(3)]
    head = nn.Linear(64, 80, bias=False, device="meta")
    x = torch.randn(2, 8, 64, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        head(nn.Sequential(*layers)(x)).sum().backward()
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_hidden_layers": 3,
        "vocab_size": 80,
    }
    gemms = layer_gemms(from_hugging_face(config, micro_batch_size=2, sequence_length=8))
    assert counter.get_total_flops() == flops_of_model(gemms)


# --- To and from a Recording -----------------------------------------------------------------------------


def test_as_facts() -> None:
    gemms = layer_gemms(replace(CODONFM, vocab_size=96, bias=True))
    facts = as_facts(gemms, accumulate=2)
    assert len(facts) == 15
    assert facts[0] == Gemm("QKV", "fprop", 15872, 4096, 12288, 48, "Linear", True, bias=True, layers=24)
    assert facts[-1] == Gemm(LM_HEAD, "wgrad", 15872, 4096, 96, 2, "nn.Linear", False, layers=0)
    assert all(operation(fact.module) == fact.module for fact in facts)
    assert [fact.role for fact in as_facts(gemms, roles=["dgrad"])] == ["dgrad"] * 5


def test_from_facts() -> None:
    facts = [
        Gemm(f"blocks.{layer}.qkv", role, 64, 32, 96, 2, "LayerNormLinear", True, bias=True)
        for layer in range(3)
        for role in ROLES
        if (layer, role) != (0, "dgrad")
    ]
    facts.append(Gemm("head", "fprop", 64, 32, 80, 2, "nn.Linear", False))
    assert from_facts(facts) == [
        LayerGemm("blocks.*.qkv", 64, 32, 96, calls=6, bias=True),
        LayerGemm("head", 64, 32, 80, calls=2, per_layer=False, quantizable=False),
    ]


# --- Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 30},
            "hidden_size 4096 is not a multiple of num_attention_heads 30: "
            "change one of them, or give head_dim if a head's size is independent of them",
        ),
        (
            {"num_key_value_heads": 5},
            "num_attention_heads 32 is not a multiple of num_key_value_heads 5: "
            "each key and value head serves the same number of query heads",
        ),
        ({"hidden_size": 0}, "hidden_size is 0: give a whole number of at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0: give a whole number of at least 1"),
        ({"num_experts": -1}, "num_experts is -1: give a whole number of at least 0"),
        ({"sequence_length": 1.5}, "sequence_length is 1.5: give a whole number of at least 1"),
        ({"micro_batch_size": True}, "micro_batch_size is True: give a whole number of at least 1"),
        ({"bias": 1}, "bias is 1: give true or false"),
        ({"tensor_parallel": 3}, "num_attention_heads 32 is not a multiple of tensor_parallel 3"),
        (
            {"tensor_parallel": 16, "num_key_value_heads": 8},
            "num_key_value_heads 8 is not a multiple of tensor_parallel 16",
        ),
        ({"tensor_parallel": 2, "intermediate_size": 5}, "intermediate_size 5 is not a multiple of tensor_parallel 2"),
        (
            {"tensor_parallel": 4, "vocab_size": 50257},
            "vocab_size 50257 is not a multiple of tensor_parallel 4: pad it to 50260",
        ),
        (
            {"sequence_parallel": True},
            "sequence_parallel shares tokens among the GPUs of tensor_parallel, which is 1: give that too",
        ),
        (
            {"sequence_parallel": True, "tensor_parallel": 4, "sequence_length": 510},
            "sequence_length 510 is not a multiple of tensor_parallel 4, which sequence_parallel shares it among",
        ),
        ({"experts_per_token": 2}, "experts_per_token without num_experts: give the number of experts too"),
        (
            {"num_experts": 8},
            "experts_per_token is 0: with num_experts 8 give a number from 1 to 8",
        ),
        ({"num_experts": 8, "experts_per_token": 9}, "experts_per_token is 9: with num_experts 8 give a number from"),
        (
            {"num_experts": 8, "experts_per_token": 2, "num_dense_layers": 24},
            "num_dense_layers 24 leaves no layer of 24 for the 8 experts: drop num_experts for a dense model",
        ),
        (
            {"num_experts": 8, "experts_per_token": 2, "shared_expert_gate": True},
            "shared_expert_gate without shared_expert_intermediate_size: there is nothing to gate",
        ),
        (
            {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 1407, "tensor_parallel": 2},
            "moe_intermediate_size 1407 is not a multiple of tensor_parallel 2",
        ),
    ],
)
def test_sizes_that_make_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        replace(CODONFM, **changes)
    assert str(error.value).startswith(message)


def test_a_head_size_of_its_own_lifts_the_rule_on_hidden_size() -> None:
    config = replace(CODONFM, num_attention_heads=30, head_dim=128)
    assert by_name(config)["QKV"].n == 3 * 30 * 128
    assert by_name(config)["attention out"].k == 30 * 128


# --- Hugging Face ----------------------------------------------------------------------------------------


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return from_hugging_face(config, micro_batch_size=2, sequence_length=1024, **changes)


def test_gpt2() -> None:
    small = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None, "vocab_size": 50257}
    gemms = layer_gemms(read(small))
    assert sizes(gemms) == {
        "QKV": (2048, 768, 2304),
        "attention out": (2048, 768, 768),
        "MLP up": (2048, 768, 3072),
        "MLP down": (2048, 3072, 768),
        LM_HEAD: (2048, 768, 50257),
    }
    assert [gemm.bias for gemm in gemms] == [True, True, True, True, False]
    assert read(small | {"n_inner": 1000}).intermediate_size == 1000


def test_gpt_neox() -> None:
    pythia = {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "vocab_size": 50304,
    }
    config = read(pythia)
    assert not config.gated_mlp
    assert [gemm.bias for gemm in layer_gemms(config)] == [True, True, True, True, False]
    assert read(pythia | {"attention_bias": False}).qkv_bias is False


def test_qwen2_has_a_bias_that_no_key_tells() -> None:
    qwen = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
    }
    gemms = by_name(read(qwen))
    assert gemms["QKV"].n == (28 + 8) * 128
    assert [name for name, gemm in gemms.items() if gemm.bias] == ["QKV"]


def test_qwen3_has_a_head_size_of_its_own() -> None:
    qwen = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
    }
    gemms = by_name(read(qwen))
    assert (gemms["QKV"].k, gemms["QKV"].n) == (1024, 4096)
    assert (gemms["attention out"].k, gemms["attention out"].n) == (2048, 1024)
    del qwen["head_dim"]
    with pytest.raises(ModelConfigError, match="model_type 'qwen3' needs head_dim; found hidden_size, "):
        read(qwen)


def test_llama_biases() -> None:
    config = read(LLAMA_3_8B | {"attention_bias": True, "mlp_bias": True})
    assert all(gemm.bias for gemm in layer_gemms(config) if gemm.per_layer)
    assert not any(gemm.bias for gemm in layer_gemms(read(LLAMA_3_8B)))
    assert read(LLAMA_3_8B | {"num_key_value_heads": None}).kv_heads == 32


def test_mistral_with_a_head_size_of_its_own() -> None:
    nemo = LLAMA_3_8B | {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128}
    assert by_name(read(nemo))["attention out"].k == 4096
    assert read(LLAMA_3_8B | {"model_type": "mistral", "head_dim": None}).head_size == 128


def test_qwen_experts() -> None:
    qwen2 = {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 24,
        "vocab_size": 151936,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
    }
    config = read(qwen2)
    assert (config.num_dense_layers, config.moe_layers, config.shared_expert_gate) == (0, 24, True)
    assert [gemm.operation for gemm in layer_gemms(config) if gemm.bias] == ["QKV"]
    # Layers 0, 2, 4, ... are off the step; layer 1 is listed.
    assert read(qwen2 | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).num_dense_layers == 13

    qwen3 = {key: value for key, value in qwen2.items() if not key.startswith("shared")}
    qwen3 |= {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    config = read(qwen3)
    assert config.shared_expert_intermediate_size == 0
    assert not any(gemm.bias for gemm in layer_gemms(config))
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in qwen3.items()}
    assert read(renamed) == config


def test_starcoder2() -> None:
    config = read(LLAMA_3_8B | {"model_type": "starcoder2", "use_bias": True})
    assert not config.gated_mlp
    assert by_name(config)["MLP up"].n == 14336
    assert by_name(config)["MLP down"].bias


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_names_all_that_is_missing(family: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        read({"model_type": family, "torch_dtype": "bfloat16", "use_cache": True})
    assert str(error.value).startswith(f"model_type '{family}' needs ")
    assert "vocab_size" in str(error.value)
    assert str(error.value).endswith("; found no sizes at all")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"d_model": 512, "n_layers": 4},
            "no key 'model_type', which says how to read the sizes; found d_model, n_layers",
        ),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not known (known: llama, mistral, "),
        ({"model_type": "llava", "text_config": {}}, "this is the config of a model of several parts"),
        (
            {key: value for key, value in MIXTRAL_8X7B.items() if key not in ("hidden_size", "num_local_experts")},
            "model_type 'mixtral' needs hidden_size, num_local_experts; found intermediate_size, num_attention_heads, ",
        ),
        (LLAMA_3_8B | {"hidden_size": "4096"}, "hidden_size is '4096': give a whole number of at least 1"),
        (LLAMA_3_8B | {"attention_bias": "no"}, "qkv_bias is 'no': give true or false"),
    ],
)
def test_a_config_that_cannot_be_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        read(config)
    assert str(error.value).startswith(message)


def test_changes_count_instead_of_the_file() -> None:
    config = read(LLAMA_3_8B, num_hidden_layers=2, tensor_parallel=8, vocab_size=None)
    assert (config.num_hidden_layers, config.tensor_parallel, config.vocab_size) == (2, 8, None)
