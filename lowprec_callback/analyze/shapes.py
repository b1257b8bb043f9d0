"""The GEMMs that a model config implies, as M x K x N, before any model exists.

A linear layer of M tokens, K input and N output features runs three GEMMs in training, of 2 M K N floating-point
operations each (M K N multiplications and as many additions):

    role    product        rows x length of the sum x columns
    fprop   Y  = X W^T     M x K x N
    dgrad   dX = dY W      M x N x K
    wgrad   dW = dY^T X    K x M x N  (written for X^T dY, as Transformer Engine's benchmark does)

With T = micro_batch_size * sequence_length tokens, H = hidden_size, I = intermediate_size, A = num_attention_heads,
G = num_key_value_heads, D = head_dim, E = num_experts, P = tensor_parallel, and 2 for a gated MLP's two halves:

    operation         M                        K          N
    QKV               T                        H          (A + 2 G) D / P
    attention out     T                        A D / P    H
    MLP up            T                        H          [2] I / P
    MLP down          T                        I / P      H
    router            T                        H          E
    experts up        T experts_per_token, in E groups, and so on as the MLP, with moe_intermediate_size
    LM head           T                        H          vocab_size / P

Sequence parallelism changes none of the split GEMMs (their input is gathered first); it divides the tokens of the two
that are not split, the router and the shared expert's gate. `docs/gemm_shapes.md` works three models through by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lowprec_callback.analyze.gemms import operation as collapsed
from lowprec_callback.analyze.model_config import ModelConfig
from lowprec_callback.recording import ROLES, Gemm, Role, role_shape

LM_HEAD = "LM head"
"""The operation that a model has once."""


def gemm_flops(rows: int, length: int, columns: int) -> int:
    """Floating-point operations of one product: 2 * rows * length * columns."""
    return 2 * rows * length * columns


@dataclass(frozen=True)
class LayerGemm:
    """One linear layer that a model has, once or once a transformer layer."""

    operation: str
    """What it is for: QKV, attention out, MLP up, MLP down, router, experts up, ..., LM head."""
    m: int
    """Tokens. Of a grouped GEMM: rows of all groups together."""
    k: int
    """Input features."""
    n: int
    """Output features."""
    calls: int = 1
    """Forward calls in one micro-batch of the whole model: the number of layers that have it."""
    per_layer: bool = True
    """Whether it belongs to a transformer layer (and so to the time of one layer), or to the model (the LM head)."""
    bias: bool = False
    quantizable: bool = True
    """Whether models run it in the recipe. LM head, router and gate are plain `nn.Linear`s: BF16 in every recipe."""
    groups: int = 1
    """GEMMs in a grouped call: the experts."""
    sizes_from: tuple[str, str, str] = ("m", "k", "n")
    """How each of m, k, n follows from the config, in the config's own names."""

    @property
    def shape(self) -> str:
        """`15872x4096x12288`, with the number of groups where there are several."""
        text = f"{self.m}x{self.k}x{self.n}"
        return f"{text} in {self.groups} groups" if self.groups > 1 else text

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Tokens of each group if they are spread as evenly as whole tokens can be: that is assumed, not measured.

        A trained router is less even than this. The work stays the same (its sum is over all rows), but a busy
        expert is a large GEMM and an idle one a small, slow one.
        """
        each, rest = divmod(self.m, self.groups)
        return (each + 1,) * rest + (each,) * (self.groups - rest)

    @property
    def family(self) -> str:
        """The kind of layer, as the Recording names it (`recording.Gemm.family`)."""
        if not self.quantizable:
            return "nn.Linear"
        return "GroupedLinear" if self.groups > 1 else "Linear"

    def flops(self, role: Role) -> int:
        """Floating-point operations of one call in one role, over all groups."""
        return sum(gemm_flops(*role_shape(role, rows, self.k, self.n)) for rows in self.group_rows)


def layer_gemms(config: ModelConfig) -> list[LayerGemm]:
    """Every linear layer of the model, in the order in which a forward pass meets them. See the module's docstring."""
    gemms = _attention(config)
    if config.dense_layers:
        gemms += _mlp(config, "MLP", "intermediate_size", config.intermediate_size, config.dense_layers)
    if config.moe_layers:
        gemms += _experts(config)
    if config.vocab_size:
        gemms.append(
            LayerGemm(
                LM_HEAD,
                config.tokens,
                config.hidden_size,
                config.vocab_size // config.tensor_parallel,
                per_layer=False,
                quantizable=False,
                sizes_from=(_TOKENS, "hidden_size", _split("vocab_size", config)),
            )
        )
    return gemms


_TOKENS = "micro_batch_size * sequence_length"


def _split(size: str, config: ModelConfig) -> str:
    return f"{size} / tensor_parallel" if config.tensor_parallel > 1 else size


def _own(own: bool | None, config: ModelConfig) -> bool:
    return config.bias if own is None else own


def _attention(config: ModelConfig) -> list[LayerGemm]:
    heads, layers, split = config.num_attention_heads, config.num_hidden_layers, config.tensor_parallel
    return [
        LayerGemm(
            "QKV",
            config.tokens,
            config.hidden_size,
            (heads + 2 * config.kv_heads) * config.head_size // split,
            calls=layers,
            bias=_own(config.qkv_bias, config),
            sizes_from=(
                _TOKENS,
                "hidden_size",
                _split("(num_attention_heads + 2 * num_key_value_heads) * head_dim", config),
            ),
        ),
        LayerGemm(
            "attention out",
            config.tokens,
            heads * config.head_size // split,
            config.hidden_size,
            calls=layers,
            bias=_own(config.out_bias, config),
            sizes_from=(_TOKENS, _split("num_attention_heads * head_dim", config), "hidden_size"),
        ),
    ]


def _mlp(config: ModelConfig, name: str, size_name: str, size: int, layers: int, groups: int = 1) -> list[LayerGemm]:
    """Up and down projection of an MLP, of a shared expert, or (grouped) of the routed experts."""
    visits = config.experts_per_token if groups > 1 else 1
    rows = f"{_TOKENS} * experts_per_token" if groups > 1 else _TOKENS
    inner, halves = size // config.tensor_parallel, 2 if config.gated_mlp else 1
    widened = f"2 * {size_name}" if config.gated_mlp else size_name
    bias = _own(config.mlp_bias, config)
    up = LayerGemm(
        f"{name} up",
        config.tokens * visits,
        config.hidden_size,
        halves * inner,
        calls=layers,
        bias=bias,
        groups=groups,
        sizes_from=(rows, "hidden_size", _split(widened, config)),
    )
    down = LayerGemm(
        f"{name} down",
        config.tokens * visits,
        inner,
        config.hidden_size,
        calls=layers,
        bias=bias,
        groups=groups,
        sizes_from=(rows, _split(size_name, config), "hidden_size"),
    )
    return [up, down]


def _experts(config: ModelConfig) -> list[LayerGemm]:
    layers = config.moe_layers
    shards = config.tensor_parallel if config.sequence_parallel else 1
    own_tokens = f"{_TOKENS} / tensor_parallel" if shards > 1 else _TOKENS
    own = config.tokens // shards

    def plain(name: str, features: int, features_from: str) -> LayerGemm:
        sizes_from = (own_tokens, "hidden_size", features_from)
        return LayerGemm(
            name, own, config.hidden_size, features, calls=layers, quantizable=False, sizes_from=sizes_from
        )

    size_name = "moe_intermediate_size" if config.moe_intermediate_size else "intermediate_size"
    gemms = [plain("router", config.num_experts, "num_experts")]
    gemms += _mlp(config, "experts", size_name, config.expert_size, layers, groups=config.num_experts)
    if config.shared_expert_intermediate_size:
        size = config.shared_expert_intermediate_size
        gemms += _mlp(config, "shared expert", "shared_expert_intermediate_size", size, layers)
    if config.shared_expert_gate:
        gemms.append(plain("shared expert gate", 1, "1"))
    return gemms


# --- Sums, and the way to and from a Recording -----------------------------------------------------------


def flops_of_layer(gemms: Iterable[LayerGemm], roles: Sequence[Role] = ROLES) -> int:
    """Floating-point operations of one transformer layer that has all of these (those `per_layer`), once each."""
    return sum(gemm.flops(role) for gemm in gemms for role in roles if gemm.per_layer)


def flops_of_model(gemms: Iterable[LayerGemm], roles: Sequence[Role] = ROLES) -> int:
    """Floating-point operations of all linear layers of the model in one micro-batch."""
    return sum(gemm.calls * gemm.flops(role) for gemm in gemms for role in roles)


def as_facts(gemms: Iterable[LayerGemm], accumulate: int = 1, roles: Sequence[Role] = ROLES) -> list[Gemm]:
    """The same as facts of a Recording, which is what the benchmark times and `analyze.gemms.totals` sums.

    Args:
        gemms: linear layers of a config.
        accumulate: micro-batches in one optimizer step.
        roles: the GEMMs of each layer that run. In a whole model all three do: even the first layer's input needs a
            gradient, for the embedding.
    """
    return [
        Gemm(
            module=gemm.operation,
            role=role,
            m=gemm.m,
            k=gemm.k,
            n=gemm.n,
            calls=gemm.calls * accumulate,
            family=gemm.family,
            quantizable=gemm.quantizable,
            bias=gemm.bias,
            groups=gemm.groups,
            layers=gemm.calls if gemm.per_layer else 0,
        )
        for gemm in gemms
        for role in roles
    ]


def from_facts(facts: Iterable[Gemm]) -> list[LayerGemm]:
    """The linear layers that a live model showed, equal ones in the same kind of place taken together.

    Calls are those of the whole optimizer step in the role that ran most often (a frozen layer has no wgrad, a
    recomputed one runs fprop twice). Where a single role matters, use the facts themselves.
    """
    calls: dict[LayerGemm, dict[Role, int]] = {}
    for fact in facts:
        gemm = LayerGemm(
            collapsed(fact.module),
            fact.m,
            fact.k,
            fact.n,
            per_layer="*" in collapsed(fact.module),
            bias=fact.bias,
            quantizable=fact.quantizable,
            groups=fact.groups,
        )
        of_role = calls.setdefault(gemm, {})
        of_role[fact.role] = of_role.get(fact.role, 0) + fact.calls
    return [replace(gemm, calls=max(of_role.values())) for gemm, of_role in calls.items()]
