"""The sizes of a transformer that decide its GEMMs, checked against each other.

Names are those of a Hugging Face `config.json` and of Transformer Engine's (TE) `benchmark_gemm.py`, so that a number
can be carried over without a dictionary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


class ModelConfigError(ValueError):
    """Sizes that make no model. The text is one sentence that says which sizes, and what would do instead."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder or encoder made of equal transformer layers, as one GPU sees it in one micro-batch."""

    hidden_size: int
    """Features of a token between the layers."""
    intermediate_size: int
    """Features inside the MLP: the length of its down projection's sum, gated or not."""
    num_attention_heads: int
    """Query heads."""
    num_hidden_layers: int
    """Transformer layers of the whole model."""
    micro_batch_size: int
    """Sequences that go through the model at once. Not the batch of an optimizer step that accumulates gradients."""
    sequence_length: int
    """Tokens of a sequence."""
    num_key_value_heads: int | None = None
    """Key and value heads under grouped-query attention; None: as many as query heads."""
    head_dim: int | None = None
    """Features of a head; None: hidden_size / num_attention_heads."""
    gated_mlp: bool = False
    """Whether the MLP multiplies two up projections (SwiGLU, GeGLU), which then run as one GEMM of twice the width."""
    vocab_size: int | None = None
    """Output features of the LM head; None: no LM head."""
    bias: bool = False
    """Whether the linear layers of a transformer layer have a bias. A bias changes no shape; it adds an epilogue."""
    qkv_bias: bool | None = None
    """The same for the QKV projection alone; None: as `bias`."""
    out_bias: bool | None = None
    """The same for the attention's output projection alone; None: as `bias`."""
    mlp_bias: bool | None = None
    """The same for the MLP and the experts alone; None: as `bias`."""
    num_experts: int = 0
    """Routed experts of a mixture-of-experts layer on this GPU's data-parallel rank; 0: a dense model."""
    experts_per_token: int = 0
    """Routed experts that each token visits (top-k)."""
    moe_intermediate_size: int | None = None
    """Features inside one routed expert; None: intermediate_size."""
    shared_expert_intermediate_size: int = 0
    """Features inside the expert that every token visits, summed over such experts; 0: there is none."""
    shared_expert_gate: bool = False
    """Whether the shared expert's output is weighted by a linear layer with one output feature (Qwen2-MoE)."""
    num_dense_layers: int = 0
    """Layers of a mixture-of-experts model that keep an ordinary MLP of `intermediate_size`."""
    tensor_parallel: int = 1
    """GPUs that share each layer: QKV, up projections and LM head are split by output, the others by input features."""
    sequence_parallel: bool = False
    """Whether those GPUs also share the tokens between the split layers. The split GEMMs still see all tokens."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_attention()
        self._check_experts()
        self._check_parallel()

    # --- What follows from the sizes ---------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch: M of every GEMM that sees all of them."""
        return self.micro_batch_size * self.sequence_length

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Key heads, which are as many as value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def expert_size(self) -> int:
        """Features inside one routed expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.num_dense_layers if self.num_experts else self.num_hidden_layers

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_hidden_layers - self.dense_layers

    # --- Checks ------------------------------------------------------------------------------------------

    def _check_numbers(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("bool"):  # annotations are text in this module
                if not isinstance(value, bool | None):
                    raise ModelConfigError(f"{field.name} is {value!r}: give true or false")
                continue
            least = 0 if field.default == 0 else 1
            if value is None and field.default is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ModelConfigError(f"{field.name} is {value!r}: give a whole number of at least {least}")

    def _check_attention(self) -> None:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.head_dim is None and hidden % heads:
            raise ModelConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: "
                "change one of them, or give head_dim if a head's size is independent of them"
            )
        if heads % self.kv_heads:
            raise ModelConfigError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {self.kv_heads}: "
                "each key and value head serves the same number of query heads"
            )

    def _check_experts(self) -> None:
        if not self.num_experts:
            given = [
                name
                for name in (
                    "experts_per_token",
                    "moe_intermediate_size",
                    "shared_expert_intermediate_size",
                    "shared_expert_gate",
                    "num_dense_layers",
                )
                if getattr(self, name)
            ]
            if given:
                raise ModelConfigError(f"{' and '.join(given)} without num_experts: give the number of experts too")
            return
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelConfigError(
                f"experts_per_token is {self.experts_per_token}: with num_experts {self.num_experts} "
                f"give a number from 1 to {self.num_experts}"
            )
        if self.num_dense_layers >= self.num_hidden_layers:
            raise ModelConfigError(
                f"num_dense_layers {self.num_dense_layers} leaves no layer of {self.num_hidden_layers} for the "
                f"{self.num_experts} experts: drop num_experts for a dense model"
            )
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ModelConfigError(
                "shared_expert_gate without shared_expert_intermediate_size: there is nothing to gate"
            )

    def _check_parallel(self) -> None:
        size = self.tensor_parallel
        split = {"num_attention_heads": self.num_attention_heads, "num_key_value_heads": self.kv_heads}
        if self.dense_layers:
            split["intermediate_size"] = self.intermediate_size
        if self.moe_layers:
            name = "moe_intermediate_size" if self.moe_intermediate_size else "intermediate_size"
            split[name] = self.expert_size
            split["shared_expert_intermediate_size"] = self.shared_expert_intermediate_size
        if self.vocab_size:
            split["vocab_size"] = self.vocab_size
        for name, value in split.items():
            if value % size:
                pad = f": pad it to {-(-value // size) * size}" if name == "vocab_size" else ""
                raise ModelConfigError(f"{name} {value} is not a multiple of tensor_parallel {size}{pad}")
        if not self.sequence_parallel:
            return
        if size == 1:
            raise ModelConfigError(
                "sequence_parallel shares tokens among the GPUs of tensor_parallel, which is 1: give that too"
            )
        if self.sequence_length % size:
            raise ModelConfigError(
                f"sequence_length {self.sequence_length} is not a multiple of tensor_parallel {size}, "
                "which sequence_parallel shares it among"
            )
