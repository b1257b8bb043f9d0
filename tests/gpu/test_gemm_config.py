"""The GEMMs that a config.json implies are those that a model of these sizes runs, called as often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from examples.mini_gpt.model import GPTConfig, MiniGPT
from lowprec_callback.analyze.hugging_face import from_hugging_face
from lowprec_callback.analyze.model_config import ModelConfig
from lowprec_callback.analyze.shapes import as_facts, layer_gemms
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.recording import Gemm
from tests.gpu.test_transformer_engine import BF16, cards, engine_for, te, watched

MICRO_BATCH, SEQUENCE = 2, 64
SIZES = {"micro_batch_size": MICRO_BATCH, "sequence_length": SEQUENCE}

# No two sizes are equal that could be taken for each other: tokens, features and their sums all differ.
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 2, "n_inner": 1024, "vocab_size": 336}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 336,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 128}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

Counted = Counter[tuple[Any, ...]]


def counted(gemms: Iterable[Gemm]) -> Counted:
    """Calls of each GEMM, whatever module made them."""
    found: Counted = Counter()
    for gemm in gemms:
        place = (gemm.role, gemm.m, gemm.k, gemm.n, gemm.groups, gemm.quantizable, gemm.bias)
        found[place] += gemm.calls
    return found


def implied(config: ModelConfig) -> Counted:
    return counted(as_facts(layer_gemms(config)))


class Decoder(nn.Module):
    """Embedding, layers and LM head, as Hugging Face's models have them."""

    def __init__(self, config: ModelConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device="cuda")
        self.layers = nn.ModuleList(layers)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16, device="cuda")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A Mixtral layer: attention of TE, a router that is a plain linear, and grouped SwiGLU experts.

    Tokens are dealt out evenly, as `lowprec gemm` takes them to be; the router's word only weights them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.expert_size
        self.attention = te().MultiheadAttention(
            hidden,
            config.num_attention_heads,
            attention_dropout=0.0,
            num_gqa_groups=config.num_key_value_heads,
            input_layernorm=True,
            normalization="RMSNorm",
            bias=False,
            fuse_qkv_params=True,
            qkv_format="bshd",
            **BF16,
        )
        self.norm = te().RMSNorm(hidden, dtype=torch.bfloat16, device="cuda")
        self.router = nn.Linear(hidden, config.num_experts, bias=False, dtype=torch.bfloat16, device="cuda")
        self.up = te().GroupedLinear(config.num_experts, hidden, 2 * inner, bias=False, **BF16)
        self.down = te().GroupedLinear(config.num_experts, inner, hidden, bias=False, **BF16)
        self.experts, self.visits = config.num_experts, config.experts_per_token

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        tokens = self.norm(x).flatten(0, 1)
        weight = self.router(tokens).softmax(-1).amax(-1, keepdim=True)
        rows = tokens.repeat(self.visits, 1)
        splits = [len(rows) // self.experts] * self.experts
        gate, up = self.up(rows, splits).chunk(2, dim=-1)
        out = self.down(functional.silu(gate) * up, splits).view(self.visits, *tokens.shape).sum(0)
        return x + (weight * out).view_as(x)


def layer(config: ModelConfig, **options: Any) -> nn.Module:
    """te.TransformerLayer of a config's sizes."""
    made: nn.Module = te().TransformerLayer(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        num_gqa_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        **options,
        **BF16,
    )
    return made


LLAMA_LAYER = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}


def captured(model: nn.Module, vocabulary: int, recipe: str = "bf16") -> GemmLog:
    """One step, watched as the sweep watches it."""
    tokens = torch.randint(vocabulary, (MICRO_BATCH, SEQUENCE), device="cuda")
    (card,) = cards(recipe)
    return watched(engine_for(model), card, lambda: model(tokens).float().square().mean())


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_mini_gpt(recipe: str) -> None:
    sizes = GPTConfig(
        hidden=256, heads=4, layers=3, ffn=1024, sequence=SEQUENCE, batch=MICRO_BATCH, learning_rate=0, steps=1
    )
    model = MiniGPT(sizes, "transformer_engine", dtype=torch.bfloat16, device="cuda")
    config = ModelConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        bias=True,
        **SIZES,
    )
    assert counted(captured(model, sizes.vocabulary, recipe).gemms()) == implied(config)


def test_a_gpt2() -> None:
    config = from_hugging_face(GPT2, **SIZES)
    model = Decoder(config, (layer(config, fuse_qkv_params=True) for _ in range(2)))
    assert counted(captured(model, GPT2["vocab_size"]).gemms()) == implied(config)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("content", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_a_llama_with_grouped_queries_and_a_gated_mlp(content: dict[str, Any], fused: bool, recipe: str) -> None:
    """Also with QKV's parameters apart (TE's default), which run as one GEMM all the same; and with a wide head."""
    config = from_hugging_face(content, **SIZES)
    model = Decoder(config, (layer(config, fuse_qkv_params=fused, **LLAMA_LAYER) for _ in range(2)))
    assert counted(captured(model, content["vocab_size"], recipe).gemms()) == implied(config)


def test_a_mixtral() -> None:
    config = from_hugging_face(MIXTRAL, **SIZES)
    model = Decoder(config, (Experts(config) for _ in range(2)))
    log = captured(model, MIXTRAL["vocab_size"])
    assert counted(log.gemms()) == implied(config)


def test_attentions_own_products_are_no_linear_layers() -> None:
    """What the config leaves out is left out of the capture, too, by name and not by luck."""
    config = from_hugging_face(LLAMA, **SIZES)
    model = Decoder(config, (layer(config, fuse_qkv_params=True, **LLAMA_LAYER) for _ in range(2)))
    log = captured(model, LLAMA["vocab_size"])
    assert {gemm.family for gemm in log.gemms()} == {"LayerNormLinear", "Linear", "LayerNormMLP", "nn.Linear"}
    places = [product.module for product in log.products("bf16")]
    assert not any("layernorm" in place or "proj" in place or "lm_head" in place for place in places), places
