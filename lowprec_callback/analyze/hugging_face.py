"""A Hugging Face `config.json` as a `ModelConfig`.

The file says sizes, but not the architecture: that an MLP is gated, or that Qwen2's QKV has a bias, stands in the code
of its `model_type`. So each family is written out below, after its `modeling_*.py` in huggingface/transformers, and a
`model_type` that is not here is refused: to take it for a Llama would be a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowprec_callback.analyze.model_config import ModelConfig, ModelConfigError

Sizes = dict[str, Any]
"""Fields of a `ModelConfig`."""


class _Keys:
    """Reads keys of a config and remembers which were missing, so that the error can name them all at once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.missing: list[str] = []

    def need(self, *names: str) -> Any:
        """The value of the first of these keys that is there; the first is the one to ask for."""
        for name in names:
            if self._config.get(name) is not None:
                return self._config[name]
        self.missing.append(" or ".join(names))
        return 1  # stands in until `from_hugging_face` has found out that something is missing

    def get(self, name: str, default: Any) -> Any:
        """The value of a key that may be absent or null."""
        value = self._config.get(name)
        return default if value is None else value

    def core(self) -> Sizes:
        """The four sizes that nearly every family gives under the same names, and the vocabulary."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        return {name: self.need(name) for name in names}


def _gated(keys: _Keys) -> Sizes:
    """Llama and what follows it: SwiGLU, grouped-query attention, biases only where asked for."""
    bias = keys.get("attention_bias", False)
    return keys.core() | {
        "num_key_value_heads": keys.get("num_key_value_heads", None),
        "head_dim": keys.get("head_dim", None),
        "gated_mlp": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": keys.get("mlp_bias", False),
    }


def _grouped_query(keys: _Keys) -> Sizes:
    """As Llama, but without its default of as many key and value heads as query heads."""
    return _gated(keys) | {"num_key_value_heads": keys.need("num_key_value_heads")}


def _own_head_dim(keys: _Keys) -> Sizes:
    """Qwen3 and Gemma: a head's size does not follow from the others."""
    return _grouped_query(keys) | {"head_dim": keys.need("head_dim")}


def _qwen2(keys: _Keys) -> Sizes:
    """QKV has a bias, which no key says; the output projection has none."""
    return _grouped_query(keys) | {"qkv_bias": True, "out_bias": False}


def _starcoder2(keys: _Keys) -> Sizes:
    """A plain MLP, and one key for all biases."""
    bias = keys.get("use_bias", True)
    return _grouped_query(keys) | {"gated_mlp": False, "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


def _mixtral(keys: _Keys) -> Sizes:
    """Every layer has experts; `intermediate_size` is an expert's."""
    return _grouped_query(keys) | {
        "num_experts": keys.need("num_local_experts"),
        "experts_per_token": keys.need("num_experts_per_tok"),
    }


def _qwen_experts(keys: _Keys) -> Sizes:
    """What Qwen2-MoE and Qwen3-MoE share. Layer i (from 0) keeps an ordinary MLP if it is listed, or off the step."""
    layers, step = keys.need("num_hidden_layers"), keys.get("decoder_sparse_step", 1)
    listed = keys.get("mlp_only_layers", [])
    dense = [i for i in range(layers) if i in listed or (i + 1) % step] if isinstance(layers, int) else []
    return {
        "num_experts": keys.need("num_experts", "num_local_experts"),
        "experts_per_token": keys.need("num_experts_per_tok"),
        "moe_intermediate_size": keys.need("moe_intermediate_size"),
        "num_dense_layers": len(dense),
    }


def _qwen2_moe(keys: _Keys) -> Sizes:
    shared = keys.need("shared_expert_intermediate_size")
    attention = {"qkv_bias": keys.get("qkv_bias", True), "out_bias": False}
    shared_expert = {"shared_expert_intermediate_size": shared, "shared_expert_gate": True}
    return _grouped_query(keys) | _qwen_experts(keys) | attention | shared_expert


def _qwen3_moe(keys: _Keys) -> Sizes:
    return _grouped_query(keys) | _qwen_experts(keys)


def _gpt2(keys: _Keys) -> Sizes:
    """Its own names; `n_inner` null means four times the hidden size. Every layer has a bias."""
    hidden = keys.need("n_embd", "hidden_size")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.get("n_inner", 4 * hidden),
        "num_attention_heads": keys.need("n_head", "num_attention_heads"),
        "num_hidden_layers": keys.need("n_layer", "num_hidden_layers"),
        "vocab_size": keys.need("vocab_size"),
        "bias": True,
    }


def _gpt_neox(keys: _Keys) -> Sizes:
    """A plain MLP with biases."""
    bias = keys.get("attention_bias", True)
    return keys.core() | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": True}


FAMILIES: dict[str, Callable[[_Keys], Sizes]] = {
    "llama": _gated,
    "mistral": _grouped_query,
    "qwen2": _qwen2,
    "qwen3": _own_head_dim,
    "gemma": _own_head_dim,
    "gemma2": _own_head_dim,
    "phi3": _gated,
    "olmo2": _gated,
    "granite": _gated,
    "starcoder2": _starcoder2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""`model_type` to the function that reads it."""


def from_hugging_face(
    config: Mapping[str, Any], *, micro_batch_size: int, sequence_length: int, **changes: Any
) -> ModelConfig:
    """The sizes in a `config.json`, for one micro-batch.

    Args:
        config: the file's content.
        micro_batch_size: sequences in a micro-batch; no config says it.
        sequence_length: tokens of a sequence. `max_position_embeddings` is a limit, not what one trains with.
        changes: fields of `ModelConfig` that count instead of what the file says, e.g. `tensor_parallel=2`.

    Raises:
        ModelConfigError: an unknown family, missing keys, or sizes that make no model; the text names what is missing
            and what was found.
    """
    kind = config.get("model_type")
    if "text_config" in config:
        raise ModelConfigError(
            f"this is the config of a model of several parts (model_type {kind!r}): "
            "save its key 'text_config', the language model, as a file of its own and give that"
        )
    if kind is None:
        raise ModelConfigError(f"no key 'model_type', which says how to read the sizes; {_found(config)}")
    if kind not in FAMILIES:
        raise ModelConfigError(
            f"model_type {kind!r} is not known (known: {', '.join(FAMILIES)}): give the sizes as options instead, "
            "or write the model_type of the family that it follows into a copy of the file"
        )
    keys = _Keys(config)
    sizes = FAMILIES[kind](keys)
    missing = list(dict.fromkeys(keys.missing))
    if missing:
        raise ModelConfigError(f"model_type {kind!r} needs {', '.join(missing)}; {_found(config)}")
    batch = {"micro_batch_size": micro_batch_size, "sequence_length": sequence_length}
    return ModelConfig(**(sizes | batch | changes))


def _found(config: Mapping[str, Any]) -> str:
    """The keys that hold a whole number: sizes, whatever they are called."""
    sizes = [key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]
    return f"found {', '.join(sizes)}" if sizes else "found no sizes at all"
