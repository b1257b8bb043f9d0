"""The bytes that a recipe should hold: of one tensor in each format, and of a model's linear layers between the
forward and the backward pass.

Formulas are Transformer Engine's own allocation rules (release 2.20.2, paths below `transformer_engine/pytorch/`), to
the byte; a test holds them against the shape functions of its quantizers, and one on a GPU against real tensors. What a
layer keeps for the backward pass is read from `module/linear.py` and its like. Not modelled: what is the same in
every recipe (parameters, gradients, optimizer, attention, norms, outputs), and workspaces. So only differences
between recipes can be compared with an allocator's counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from lowprec_callback.recording import Card, Gemm, Stored

WIDTHS = {"e2m1": 0.5, "e4m3": 1.0, "e5m2": 1.0, "int8": 1.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp64": 8.0}
"""Bytes of one value's data by format. `e2m1` packs two values in a byte."""

MAKES_ITS_INPUT = ("LayerNormLinear", "LayerNormMLP")
"""Layers whose GEMM's input is their own work (a norm's output, an activation's), so that nobody else holds it."""

TENSORS_OF_A_GEMM = 5
"""Delayed scaling keeps a scale and an amax history for each: input, weight, output; output and input gradient
(csrc/common.h: GEMM1_INPUT, ...)."""

AMAX_HISTORY = 1024
"""Length of delayed scaling's amax history unless the card says otherwise (common/recipe/__init__.py:173)."""

FP32 = 4
"""Bytes of a scale, an amax."""


def needs_transposes(compute_capability: tuple[int, int] | None) -> bool:
    """Whether FP8 products run in the TN layout only, so that per-tensor FP8 keeps a transposed copy beside the first.

    No from 10.0 to below 12.0, and from 13.0 (utils.py: is_non_tn_fp8_gemm_supported). Not known counts as yes.
    """
    if compute_capability is None:
        return True
    return not ((10, 0) <= compute_capability < (12, 0) or compute_capability >= (13, 0))


def tensor_bytes(
    form: str,
    scaling: str,
    rows: int,
    columns: int,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    weight: bool = False,
    transposes: bool = True,
) -> Stored:
    """Bytes of one tensor of R x C values. Symbols: w bytes of a value, up(x, n) x rounded up to a multiple of n.

    - `none`: R C w, in one buffer that serves both directions.
    - `tensor-*` (tensor/float8_tensor.py: inner_tensor_specs): R C row-wise and R C transposed, and one FP32 scale.
      Where FP8 products run in any layout, one buffer serves both directions.
    - `block-128` (tensor/float8_blockwise_tensor.py: get_scale_shape): R C a copy, and FP32 scales. Weights, one for
      128 x 128 values: ceil(R/128) up(ceil(C/128), 4), and ceil(C/128) up(ceil(R/128), 4) column-wise. All others,
      one for 128 values: ceil(C/128) up(R, 4), and ceil(R/128) up(C, 4).
    - `mx-32` (tensor/mxfp8_tensor.py: get_scale_shape): R C a copy, and E8M0 scales of a byte in tiles of 128 x 4:
      up(R, 128) up(C/32, 4), and up(R/32, 4) up(C, 128).
    - `nvfp4-16` (tensor/nvfp4_tensor.py: get_scale_shape, inner_tensor_specs): R C / 2 a copy, E4M3 scales of a byte
      in tiles of 128 x 4: up(R, 128) up(ceil(C/16), 4), and up(C, 128) up(ceil(R/16), 4); and an FP32 amax a copy.

    Raises:
        ValueError: a format or a scaling without a formula.
    """
    if form not in WIDTHS:
        raise ValueError(f"no formula for the bytes of format {form!r}; there is one for {', '.join(WIDTHS)}")
    one_copy = round(rows * columns * WIDTHS[form])
    if scaling == "none":
        return Stored(one_copy if rowwise or columnwise else 0, 0, 0)
    if scaling.startswith("tensor"):
        if not transposes:
            return Stored(one_copy, 0, FP32)
        return Stored(one_copy * rowwise, one_copy * columnwise, FP32)
    if scaling == "block-128":
        down, across = ceil(rows / 128), ceil(columns / 128)
        if weight:
            scales = (down * _up(across, 4) * FP32, across * _up(down, 4) * FP32)
        else:
            scales = (across * _up(rows, 4) * FP32, down * _up(columns, 4) * FP32)
    elif scaling == "mx-32":
        scales = (_up(rows, 128) * _up(columns // 32, 4), _up(rows // 32, 4) * _up(columns, 128))
    elif scaling == "nvfp4-16":
        scales = (
            _up(rows, 128) * _up(ceil(columns / 16), 4) + FP32,
            _up(columns, 128) * _up(ceil(rows / 16), 4) + FP32,
        )
    else:
        raise ValueError(f"no formula for the bytes of scaling {scaling!r}")
    return Stored(one_copy * rowwise, one_copy * columnwise, scales[0] * rowwise + scales[1] * columnwise)


def _up(number: int, multiple: int) -> int:
    return ceil(number / multiple) * multiple


def total(stored: Stored) -> int:
    """All bytes of an operand: its copies and their scales."""
    return stored.rowwise + stored.columnwise + stored.scales


@dataclass(frozen=True)
class Layer:
    """One linear layer in the forward pass of one micro-batch."""

    module: str
    family: str
    m: int
    k: int
    n: int
    calls: int
    """Forward calls in one micro-batch; each quantizes its weight anew and saves its own input."""
    dgrad: bool
    """Whether the backward pass multiplies with the weight."""
    wgrad: bool
    """Whether it multiplies with the input: then the input is saved."""
    groups: int = 1


def layers_of(gemms: Iterable[Gemm], micro_batches: int) -> tuple[list[Layer], str | None]:
    """The layers that a recipe reaches; and why what they hold cannot be foretold, if so."""
    found: dict[tuple[str, int, int, int, str], dict[str, Gemm]] = {}
    for gemm in gemms:
        if gemm.quantizable:
            found.setdefault((gemm.module, gemm.m, gemm.k, gemm.n, gemm.family), {})[gemm.role] = gemm
    layers = []
    for (module, m, k, n, family), roles in found.items():
        forward = roles.get("fprop")
        if forward is None:
            return [], f"no forward GEMM of {module} at {m}x{k}x{n} was captured"
        if any(gemm.calls < forward.calls for role, gemm in roles.items() if role != "fprop"):
            return (
                [],
                f"the forward GEMM of {module} runs more often than its backward ones: it is recomputed, not saved",
            )
        if forward.calls % max(micro_batches, 1):
            return [], f"{forward.calls} forward calls of {module} do not divide among {micro_batches} micro-batches"
        calls = forward.calls // max(micro_batches, 1)
        layers.append(Layer(module, family, m, k, n, calls, "dgrad" in roles, "wgrad" in roles, max(forward.groups, 1)))
    return layers, None


def saved_copies(layer: Layer, scaling: str) -> tuple[bool, bool]:
    """(row-wise, column-wise): the copies of its quantized input that a layer keeps for the backward pass.

    wgrad needs the column-wise copy only, and the layers drop the other (`update_usage(rowwise_usage=False)`:
    module/linear.py:712, layernorm_linear.py:487, grouped_linear.py:919). `LayerNormMLP` drops nothing: both copies of
    fc1's input; of fc2's too, except that per-tensor FP8 makes the transposed one in the backward pass only
    (module/layernorm_mlp.py:2503).
    """
    if layer.family != "LayerNormMLP":
        return False, True
    return True, not (layer.module.endswith(".fc2") and scaling.startswith("tensor"))


@dataclass(frozen=True)
class Held:
    """Bytes that linear layers hold between the forward and the backward pass, in one micro-batch."""

    weights: int = 0
    """Copies of weights: quantized ones, or casts of parameters of another type; not the parameters."""
    inputs: int = 0
    """Inputs saved for wgrad."""
    state: int = 0
    """Scales and amax histories of delayed scaling."""
    shareable: tuple[tuple[str, int], ...] = ()
    """Of `inputs`: bytes by operation that something else may hold too (attention its output, a neighbour the same
    input), so that they may count once or not at all."""

    @property
    def total(self) -> int:
        """All of it, nothing shared."""
        return self.weights + self.inputs + self.state


def held_after_forward(
    layers: Sequence[Layer],
    card: Card,
    *,
    cast: Mapping[str, bool],
    compute_capability: tuple[int, int] | None,
    wide: str = "bf16",
    unquantized: frozenset[str] = frozenset(),
    primary: frozenset[str] = frozenset(),
    operation: Mapping[str, str] | None = None,
) -> Held:
    """What the layers hold under a recipe, by what Transformer Engine saves (module/linear.py, _linear_forward_impl).

    A layer that quantizes: its weight N x K, row-wise for fprop and column-wise for dgrad (`LayerNorm*` makes the
    latter always), beside the parameter; of its input M x K the copies of `saved_copies`. The input in high precision
    is not kept by the layer itself.

    A layer that does not: its input, M K w; and the weight's cast, N K w, where the parameter has another type.

    A group's rows are taken as evenly split.

    Args:
        layers: see `layers_of`.
        card: the recipe; `wide` formats in it are not quantized.
        cast: by module, whether its weight is cast for an unquantized product (a parameter in FP32); False if absent.
        compute_capability: of the GPU, see `needs_transposes`.
        wide: the format of unquantized operands.
        unquantized: modules that do not follow the recipe.
        primary: modules whose parameters are quantized already, so that there is no copy of them.
        operation: by module, the operation that it is one of many of; else each module is its own.
    """
    weights = inputs = state = 0
    shareable: dict[str, int] = {}
    transposes = needs_transposes(compute_capability)
    for layer in layers:
        each = layer.groups * layer.calls
        rows = ceil(layer.m / layer.groups)
        if card.scaling == "none" or layer.module in unquantized:
            if cast.get(layer.module, False):
                weights += each * total(tensor_bytes(wide, "none", layer.n, layer.k))
            saved = layer.calls * total(tensor_bytes(wide, "none", layer.m, layer.k)) if layer.wgrad else 0
            inputs += saved
            if saved and layer.family not in MAKES_ITS_INPUT:
                name = (operation or {}).get(layer.module, layer.module)
                shareable[name] = shareable.get(name, 0) + saved
            continue
        if layer.module not in primary:
            weights += each * total(
                tensor_bytes(
                    card.fprop[0],
                    card.scaling,
                    layer.n,
                    layer.k,
                    columnwise=layer.dgrad or layer.family in MAKES_ITS_INPUT,
                    weight=True,
                    transposes=transposes,
                )
            )
        if layer.wgrad:
            rowwise, columnwise = saved_copies(layer, card.scaling)
            inputs += each * total(
                tensor_bytes(
                    card.wgrad[0],
                    card.scaling,
                    rows,
                    layer.k,
                    rowwise=rowwise,
                    columnwise=columnwise,
                    transposes=transposes,
                )
            )
        if card.scaling == "tensor-delayed":
            asked = card.arguments.get("amax_history_len")
            length = asked if isinstance(asked, int) else AMAX_HISTORY
            state += layer.groups * TENSORS_OF_A_GEMM * (length + 1) * FP32
    return Held(weights, inputs, state, tuple(shareable.items()))


def possible_increases(recipe: Held, baseline: Held, most: int = 8) -> list[tuple[int, int]]:
    """By how much a recipe may hold more than the baseline [bytes], as ranges, one for each way of sharing.

    What the baseline shares with others, it does not hold itself, so that the recipe's copy comes on top. Each
    operation shares all of its inputs or none, which gives 2^n single values for n operations; above `most` operations,
    one range over all of them.
    """
    least = recipe.total - baseline.total
    alone, kept = dict(baseline.shareable), dict(recipe.shareable)
    # What both may share (a layer that does not follow the recipe) cancels.
    sizes = [alone.get(name, 0) - kept.get(name, 0) for name in dict.fromkeys((*alone, *kept))]
    sizes = [size for size in sizes if size]
    if len(sizes) > most:
        return [(least + sum(min(size, 0) for size in sizes), least + sum(max(size, 0) for size in sizes))]
    sums = {0}
    for size in sizes:
        sums |= {total + size for total in sums}
    return [(least + extra, least + extra) for extra in sorted(sums)]
