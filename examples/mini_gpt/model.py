"""MiniGPT: a causal GPT as a LightningModule, from Transformer Engine's layers or from PyTorch's own.

    tokens -> token + position embedding -> layers x block -> LayerNorm -> linear head -> logits
    block:  x = x + out(attention(qkv(LayerNorm(x))));  x = x + fc2(gelu(fc1(LayerNorm(x))))

Both kinds of block compute the same function of the same parameters under two sets of names, so a checkpoint
has one set and loads into either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional

from examples.mini_gpt import precision
from examples.mini_gpt.data import VOCABULARY

INITIAL_SPREAD = 0.023
"""Standard deviation of fresh weights: Transformer Engine's own."""

Blocks = Literal["auto", "transformer_engine", "plain_torch"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model and of its training batch."""

    hidden: int
    """Features of a token between the blocks. A multiple of 16, as FP8 needs, and of `heads`."""
    heads: int
    """Attention heads of a block."""
    layers: int
    """Blocks."""
    ffn: int
    """Features inside a block's MLP. A multiple of 16."""
    sequence: int
    """Tokens that the model reads at once, and the length of a training sequence."""
    batch: int
    """Sequences in an optimizer step."""
    learning_rate: float
    """AdamW's at the first step, for the FP32 parameters of a CPU or the BF16 parameters of a GPU."""
    steps: int
    """Optimizer steps by default: enough to profile every recipe and then to learn the sequences."""
    vocabulary: int = VOCABULARY
    """Different tokens."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")


PRESETS = {
    "tiny": GPTConfig(hidden=256, heads=4, layers=4, ffn=1024, sequence=64, batch=16, learning_rate=1e-3, steps=300),
    "seed": GPTConfig(hidden=768, heads=12, layers=4, ffn=3072, sequence=256, batch=32, learning_rate=3e-4, steps=800),
    "medium": GPTConfig(
        hidden=2048, heads=16, layers=12, ffn=8192, sequence=512, batch=8, learning_rate=1e-4, steps=600
    ),
    "large": GPTConfig(
        hidden=4096, heads=32, layers=4, ffn=16384, sequence=512, batch=31, learning_rate=1e-4, steps=500
    ),
    "codonfm-5b": GPTConfig(
        hidden=4096, heads=32, layers=24, ffn=16384, sequence=512, batch=31, learning_rate=5e-5, steps=400
    ),
}
"""tiny is for two CPU cores; seed is launch-bound on a large GPU; large and codonfm-5b have CodonFM 5B's
layer, 4 and 24 times."""


class PlainBlock(nn.Module):
    """What te.TransformerLayer computes, from PyTorch's own layers. (batch, sequence, hidden) in and out."""

    def __init__(self, config: GPTConfig, **factory: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.hidden, **factory)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, **factory)
        self.out = nn.Linear(config.hidden, config.hidden, **factory)
        self.mlp_norm = nn.LayerNorm(config.hidden, **factory)
        self.fc1 = nn.Linear(config.hidden, config.ffn, **factory)
        self.fc2 = nn.Linear(config.ffn, config.hidden, **factory)
        for linear in (self.qkv, self.out, self.fc1, self.fc2):
            nn.init.normal_(linear.weight, std=INITIAL_SPREAD)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """One block further."""
        x = x + self.out(self._attention(self.qkv(self.attention_norm(x))))
        inner: Tensor = self.fc2(functional.gelu(self.fc1(self.mlp_norm(x)), approximate="tanh"))
        return x + inner

    def _attention(self, qkv: Tensor) -> Tensor:
        batch, sequence, features = qkv.shape
        # TE's order of the 3 * hidden output features: head by head, each with its query, key and value.
        qkv = qkv.view(batch, sequence, self.heads, 3, features // (3 * self.heads)).transpose(1, 2)
        query, key, value = qkv.unbind(dim=3)  # each (batch, heads, sequence, hidden / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, sequence, features // 3)


def _te_block(config: GPTConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """te.TransformerLayer of the same sizes; its own defaults are LayerNorm first, biases and tanh-GELU."""
    layer: nn.Module = precision.te().TransformerLayer(
        config.hidden,
        config.ffn,
        config.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        fuse_qkv_params=True,
        attn_input_format="bshd",
        params_dtype=dtype,
        device=device,
    )
    return layer


_TE_NAMES = {
    "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attention_norm.bias": "self_attention.layernorm_qkv.layer_norm_bias",
    "qkv.weight": "self_attention.layernorm_qkv.weight",
    "qkv.bias": "self_attention.layernorm_qkv.bias",
    "out.weight": "self_attention.proj.weight",
    "out.bias": "self_attention.proj.bias",
    "mlp_norm.weight": "layernorm_mlp.layer_norm_weight",
    "mlp_norm.bias": "layernorm_mlp.layer_norm_bias",
    "fc1.weight": "layernorm_mlp.fc1_weight",
    "fc1.bias": "layernorm_mlp.fc1_bias",
    "fc2.weight": "layernorm_mlp.fc2_weight",
    "fc2.bias": "layernorm_mlp.fc2_bias",
}
"""A parameter of PlainBlock to the same parameter of te.TransformerLayer."""


class MiniGPT(LightningModule):
    """The model, its loss and its optimizer.

    Args:
        config: sizes.
        blocks: "auto" takes Transformer Engine's where it and a CUDA device can be used.
        dtype: of the parameters, embeddings and head included.
        device: where the parameters are made.
        quantized: a TE recipe (`recipes/`) in whose format TE's linear weights are stored; None: in `dtype`.
        recipe_arguments: TE's arguments of that recipe.
        learning_rate: None: the config's.
        decay_steps: the learning rate falls linearly to 0 over so many; None: it is constant. At a constant rate
            the last steps' noise costs some of the 576 sequences their stride.
    """

    def __init__(
        self,
        config: GPTConfig,
        blocks: Blocks = "auto",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quantized: str | None = None,
        recipe_arguments: dict[str, Any] | None = None,
        learning_rate: float | None = None,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        if blocks == "auto":
            use_te = device.type == "cuda" and precision.te() is not None
            blocks = "transformer_engine" if use_te else "plain_torch"
        self.config = config
        self.block_kind: Blocks = blocks
        self.quantized = quantized
        self.learning_rate = config.learning_rate if learning_rate is None else learning_rate
        self.decay_steps = decay_steps
        self.region: precision.Region = nullcontext
        """Opened around each forward pass of training; `train.py --no-profile --recipe` sets it."""
        self.profile_name = "MiniGPT"
        """What LowPrecisionProfiler calls the model."""
        self.losses: list[Tensor] = []
        """One a training step, left on the device: reading a loss makes the CPU wait for the GPU."""

        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.token = nn.Embedding(config.vocabulary, config.hidden, **factory)
        self.position = nn.Embedding(config.sequence, config.hidden, **factory)
        with precision.quantized_weights(quantized, recipe_arguments) if quantized else nullcontext():
            self.blocks = nn.ModuleList(
                PlainBlock(config, **factory) if blocks == "plain_torch" else _te_block(config, **factory)
                for _ in range(config.layers)
            )
        self.norm = nn.LayerNorm(config.hidden, **factory)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False, **factory)
        for weight in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(weight, std=INITIAL_SPREAD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: (batch, sequence) int64 -> (batch, sequence, vocabulary)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        """Mean cross-entropy in nats, computed in FP32. batch: (batch, sequence + 1)."""
        with self.region():
            logits = self(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, whose rate falls to 0 in a straight line if `decay_steps` says over how many steps."""
        optimizer = self._adamw()
        if self.decay_steps is None:
            return optimizer
        steps = self.decay_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _adamw(self) -> torch.optim.Optimizer:
        """For weights stored in FP8, TE's with FP32 masters: FP8 alone cannot take a small update."""
        arguments: dict[str, Any] = {"lr": self.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.01}
        if self.quantized is not None:
            optimizer: torch.optim.Optimizer = precision.te().optimizers.FusedAdam(
                self.parameters(), master_weights=True, **arguments
            )
            return optimizer
        return torch.optim.AdamW(self.parameters(), fused=True, **arguments)

    # --- Checkpoints ---------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write config and parameters as one dict of plain values and tensors."""
        own = self.state_dict()
        state = {name: _high_precision(own[mine]).cpu() for name, mine in self._names()}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"config": asdict(self.config), "state": state}, path)

    @classmethod
    def load(cls, path: Path, blocks: Blocks = "auto", device: torch.device | str = "cpu") -> MiniGPT:
        """The model of a checkpoint, with either kind of block, in the dtype in which it was saved."""
        saved = torch.load(path, map_location=device, weights_only=True)
        state: dict[str, Tensor] = saved["state"]
        model = cls(GPTConfig(**saved["config"]), blocks, dtype=state["head.weight"].dtype, device=device)
        mine = {mine: state[name] for name, mine in model._names()}
        # TE's modules also ask for `_extra_state`: scales, which the next passes find again.
        missing, unexpected = model.load_state_dict(mine, strict=False)
        lost = [name for name in missing if not name.endswith("_extra_state")]
        if lost or unexpected or len(mine) != len(state):
            raise ValueError(f"{path} does not fit the model: missing {lost}, unexpected {unexpected}")
        return model

    def _names(self) -> Iterator[tuple[str, str]]:
        """Each parameter's name in a checkpoint (PlainBlock's) and in this model."""
        for name in ("token.weight", "position.weight", "norm.weight", "norm.bias", "head.weight"):
            yield name, name
        for layer in range(self.config.layers):
            for plain, of_te in _TE_NAMES.items():
                mine = of_te if self.block_kind == "transformer_engine" else plain
                yield f"blocks.{layer}.{plain}", f"blocks.{layer}.{mine}"


def _high_precision(tensor: Tensor) -> Tensor:
    """A TE tensor with quantized storage as an ordinary one of its own dtype."""
    return tensor.detach().dequantize() if hasattr(tensor, "_quantizer") else tensor.detach()
