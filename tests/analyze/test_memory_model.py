"""The formulas for bytes: against TE's own shape functions, against published numbers, and by their laws."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.memory_model import (
    Held,
    Layer,
    held_after_forward,
    layers_of,
    needs_transposes,
    possible_increases,
    tensor_bytes,
    total,
)
from lowprec_callback.recording import ROLES, Card, Gemm, Stored

from .recordings import BF16_CARD, BLOCK_CARD, CURRENT_CARD, DELAYED_CARD, NVFP4_CARD, Linear, gemms, te_linears

MXFP8_CARD = Card("mxfp8", "MXFP8", ("e4m3", "e4m3"), ("e4m3", "e4m3"), ("e4m3", "e4m3"), "mx-32")
HOPPER, BLACKWELL = (9, 0), (10, 0)

# -- one tensor, against TE ----------------------------------------------------------------------------------------


class DType:
    """Stands in for torch's: only the bytes of an element matter."""

    uint8, float32 = 1, 4


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def tes_own(file: str, name: str, **settings: Any) -> Any:
    """TE's quantizer class, reduced to the methods that give shapes: they are plain arithmetic, its import is not."""
    try:
        path = Path(str(metadata.distribution("transformer_engine").locate_file(file)))
    except metadata.PackageNotFoundError:
        pytest.skip("transformer-engine is not installed (its Python files alone would do)")
    if not path.is_file():
        pytest.skip(f"the installed transformer-engine has no {file}")
    wanted = ("inner_tensor_specs", "get_scale_shape", "get_columnwise_shape", "convert_shape_for_fp4")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    found.bases = []
    tree.body = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0), found]
    space: dict[str, Any] = {
        "math": math,
        "torch": DType,
        "round_up_to_nearest_multiple": up,
        "MXFP8_BLOCK_SCALING_SIZE": 32,
        "NVFP4_BLOCK_SCALING_SIZE": 16,
        "is_non_tn_fp8_gemm_supported": lambda: settings.pop("non_tn"),
    }
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), space)
    quantizer = space[name]()
    for key, value in settings.items():
        setattr(quantizer, key, value)
    return quantizer


def bytes_by_te(quantizer: Any, shape: tuple[int, ...]) -> Stored:
    sizes = {name: prod(dims) * width for name, (dims, width) in quantizer.inner_tensor_specs(shape).items()}
    rowwise = sum(sizes.pop(name, 0) for name in ("_data", "_rowwise_data"))
    columnwise = sum(sizes.pop(name, 0) for name in ("_transpose", "_columnwise_data"))
    return Stored(rowwise, columnwise, sum(sizes.values()))


FILES = "transformer_engine/pytorch/tensor"
SHAPES = [(128, 256), (64, 96), (4096, 12288), (160, 32), (1056, 1056), (2, 512, 768)]


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("scaling", "form", "file", "name", "settings"),
    [
        ("mx-32", "e4m3", "mxfp8_tensor.py", "MXFP8Quantizer", {}),
        ("nvfp4-16", "e2m1", "nvfp4_tensor.py", "NVFP4Quantizer", {"row_scaled_nvfp4": False}),
        ("block-128", "e4m3", "float8_blockwise_tensor.py", "Float8BlockQuantizer", {"block_scaling_dim": 1}),
        ("block-128", "e4m3", "float8_blockwise_tensor.py", "Float8BlockQuantizer", {"block_scaling_dim": 2}),
        ("tensor-current", "e5m2", "float8_tensor.py", "Float8CurrentScalingQuantizer", {"non_tn": False}),
        ("tensor-current", "e4m3", "float8_tensor.py", "Float8CurrentScalingQuantizer", {"non_tn": True}),
    ],
)
def test_bytes_are_those_that_te_allocates(
    scaling: str, form: str, file: str, name: str, settings: dict[str, Any], shape: tuple[int, ...],
    rowwise: bool, columnwise: bool,
) -> None:  # fmt: skip
    usage = {"rowwise_usage": rowwise, "columnwise_usage": columnwise, "block_len": 128}
    quantizer = tes_own(f"{FILES}/{file}", name, **usage, **settings)
    found = tensor_bytes(
        form,
        scaling,
        prod(shape[:-1]),
        shape[-1],
        rowwise=rowwise,
        columnwise=columnwise,
        weight=settings.get("block_scaling_dim") == 2,
        transposes=not settings.get("non_tn", False),
    )
    assert found == bytes_by_te(quantizer, shape)


def test_bytes_a_value_of_large_tensors() -> None:
    """Both copies and their scales, as widely published for these formats."""
    values = 4096 * 4096
    for form, scaling, expected in (
        ("bf16", "none", 2.0),
        ("e4m3", "tensor-delayed", 2.0),
        ("e4m3", "block-128", 2.0625),
        ("e4m3", "mx-32", 2.0625),
        ("e2m1", "nvfp4-16", 1.125),
    ):
        assert total(tensor_bytes(form, scaling, 4096, 4096)) / values == pytest.approx(expected, rel=1e-6)
    assert total(tensor_bytes("e4m3", "block-128", 4096, 4096, weight=True)) / values == pytest.approx(2.0005, rel=1e-4)


@pytest.mark.parametrize(
    ("capability", "needed"),
    [
        ((8, 9), True),
        ((9, 0), True),
        ((10, 0), False),
        ((11, 0), False),
        ((12, 0), True),
        ((13, 0), False),
        (None, True),
    ],
)
def test_transposes_are_kept_where_fp8_multiplies_in_one_layout_only(
    capability: tuple[int, int] | None, needed: bool
) -> None:
    assert needs_transposes(capability) is needed


def test_no_formula_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="no formula for the bytes of format 'unknown'"):
        tensor_bytes("unknown", "none", 1, 1)
    with pytest.raises(ValueError, match="scaling 'log-8'"):
        tensor_bytes("e4m3", "log-8", 1, 1)


# -- one tensor, by law --------------------------------------------------------------------------------------------

sizes = st.integers(1, 64).map(lambda blocks: 32 * blocks)
kinds = st.sampled_from(
    [("bf16", "none"), ("e4m3", "tensor-current"), ("e4m3", "block-128"), ("e4m3", "mx-32"), ("e2m1", "nvfp4-16")]
)


@given(kinds, sizes, sizes, sizes, st.booleans())
def test_more_values_never_take_fewer_bytes(
    kind: tuple[str, str], rows: int, columns: int, more: int, weight: bool
) -> None:
    small = tensor_bytes(*kind, rows, columns, weight=weight)
    for large in (
        tensor_bytes(*kind, rows + more, columns, weight=weight),
        tensor_bytes(*kind, rows, columns + more, weight=weight),
    ):
        assert large.rowwise > small.rowwise
        assert large.scales >= small.scales
        assert total(large) > total(small)


@given(sizes.map(lambda n: 4 * n), sizes.map(lambda n: 4 * n), st.booleans())
def test_the_narrower_format_takes_less_in_one_direction(rows: int, columns: int, rowwise: bool) -> None:
    one = {"rowwise": rowwise, "columnwise": not rowwise}
    nvfp4 = total(tensor_bytes("e2m1", "nvfp4-16", rows, columns, **one))
    mxfp8 = total(tensor_bytes("e4m3", "mx-32", rows, columns, **one))
    bf16 = total(tensor_bytes("bf16", "none", rows, columns, **one))
    assert nvfp4 < mxfp8 < bf16


@given(kinds.filter(lambda kind: not kind[1].startswith(("none", "tensor"))), sizes, sizes, st.booleans())
def test_two_copies_take_what_each_takes(kind: tuple[str, str], rows: int, columns: int, weight: bool) -> None:
    row = tensor_bytes(*kind, rows, columns, weight=weight, columnwise=False)
    column = tensor_bytes(*kind, rows, columns, weight=weight, rowwise=False)
    both = tensor_bytes(*kind, rows, columns, weight=weight)
    assert (both.rowwise, both.columnwise) == (row.rowwise, column.columnwise)
    assert total(both) == total(row) + total(column)


@given(kinds, sizes, sizes)
def test_a_transposed_tensor_of_both_copies_takes_the_same(kind: tuple[str, str], rows: int, columns: int) -> None:
    assert total(tensor_bytes(*kind, rows, columns)) == total(tensor_bytes(*kind, columns, rows))


# -- a model -------------------------------------------------------------------------------------------------------


def held(layers: list[Layer], card: Card, **options: Any) -> Held:
    arguments = {"cast": {}, "compute_capability": HOPPER, **options}
    return held_after_forward(layers, card, **arguments)


def test_a_linear_layer_as_te_documents_it() -> None:
    """TE's documentation measures `te.Linear(1024, 1024)` on Hopper, input 1024 x 1024, after forward: 6.00 MB in
    BF16 and 6.02 MB with FP8 (delayed scaling, no gradient of the input): the parameter and the output, 2 MB each,
    and what the layer holds."""
    layer = Layer("linear", "Linear", 1024, 1024, 1024, 1, dgrad=False, wgrad=True)
    mib = 2**20
    assert 4 + held([layer], BF16_CARD).total / mib == 6.0
    assert round(4 + held([layer], DELAYED_CARD).total / mib, 2) == 6.02


def test_what_each_kind_of_layer_holds_on_hopper() -> None:
    m, k, n = 512, 256, 1024
    kinds = {
        "qkv": ("LayerNormLinear", 1),
        "proj": ("Linear", 1),
        "mlp.fc1": ("LayerNormMLP", 2),  # both copies
        "mlp.fc2": ("LayerNormMLP", 1),  # of per-tensor FP8 the row-wise one
    }
    for module, (family, copies) in kinds.items():
        layer = Layer(module, family, m, k, n, 1, dgrad=True, wgrad=True)
        assert held([layer], CURRENT_CARD) == Held(2 * n * k + 4, copies * m * k + 4), module
    both = held([Layer("mlp.fc2", "LayerNormMLP", m, k, n, 1, True, True)], NVFP4_CARD)
    assert both.inputs == total(tensor_bytes("e2m1", "nvfp4-16", m, k))


def test_blackwell_needs_one_buffer_of_per_tensor_fp8() -> None:
    layer = Layer("qkv", "LayerNormLinear", 512, 256, 1024, 1, True, True)
    assert held([layer], CURRENT_CARD, compute_capability=BLACKWELL) == Held(1024 * 256 + 4, 512 * 256 + 4)


def test_bf16_holds_its_inputs_and_casts_of_wider_parameters() -> None:
    layers = [
        Layer("qkv", "LayerNormLinear", 512, 256, 1024, 1, True, True),
        Layer("0.proj", "Linear", 512, 256, 256, 2, True, True),
        Layer("frozen", "Linear", 512, 256, 256, 1, True, False),
    ]
    found = held(layers, BF16_CARD, cast={"qkv": True}, operation={"0.proj": "*.proj"})
    assert found == Held(2 * 1024 * 256, 2 * 512 * 256 * 3, 0, (("*.proj", 2 * 2 * 512 * 256),))


def test_a_layer_outside_the_region_holds_what_bf16_does_and_a_quantized_parameter_no_copy() -> None:
    layer = Layer("qkv", "LayerNormLinear", 512, 256, 1024, 1, True, True)
    assert held([layer], CURRENT_CARD, unquantized=frozenset({"qkv"})) == held([layer], BF16_CARD)
    assert held([layer], CURRENT_CARD, primary=frozenset({"qkv"})).weights == 0


def test_groups_pad_their_own_scales() -> None:
    one = Layer("experts", "GroupedLinear", 256, 128, 128, 1, True, True)
    found = held([replace(one, groups=4)], MXFP8_CARD)
    assert found.weights == 4 * held([one], MXFP8_CARD).weights
    assert found.inputs == 4 * total(tensor_bytes("e4m3", "mx-32", 64, 128, rowwise=False))


CARDS = st.sampled_from([BF16_CARD, DELAYED_CARD, CURRENT_CARD, BLOCK_CARD, MXFP8_CARD, NVFP4_CARD])


@given(CARDS, st.integers(1, 4), st.integers(1, 3), st.sampled_from([HOPPER, BLACKWELL]))
def test_a_model_holds_the_sum_of_its_layers(card: Card, count: int, calls: int, capability: tuple[int, int]) -> None:
    layers, why_not = layers_of(gemms(te_linears(count), calls * 2), micro_batches=2)
    assert why_not is None
    assert len(layers) == 4 * count
    assert {layer.calls for layer in layers} == {calls}
    whole = held(layers, card, compute_capability=capability)
    each = [held([layer], card, compute_capability=capability) for layer in layers]
    assert whole.weights == sum(part.weights for part in each)
    assert whole.inputs == sum(part.inputs for part in each)
    assert whole.total == sum(part.total for part in each)
    assert dict(whole.shareable) == {name: size for part in each for name, size in part.shareable}


ONE = [Linear("fc", 64, 64, 64)]


@pytest.mark.parametrize(
    ("captured", "batches", "why"),
    [
        (gemms(ONE)[1:], 1, "no forward GEMM of fc"),
        ([replace(gemms(ONE)[0], calls=2), *gemms(ONE)[1:]], 1, "it is recomputed, not saved"),
        (gemms(ONE, 3), 2, "3 forward calls of fc do not divide among 2 micro-batches"),
    ],
)
def test_what_cannot_be_foretold(captured: list[Gemm], batches: int, why: str) -> None:
    layers, why_not = layers_of(captured, batches)
    assert layers == []
    assert why_not is not None
    assert why in why_not


def test_layers_that_no_recipe_reaches_are_left_out_and_missing_roles_are_noted() -> None:
    assert layers_of(gemms([Linear("head", 64, 64, 64, "nn.Linear", quantizable=False)]), 1) == ([], None)
    captured = [gemm for gemm in gemms(ONE) if gemm.role != "dgrad"]
    (layer,), _ = layers_of(captured, 1)
    assert (layer.dgrad, layer.wgrad) == (False, True)
    assert {gemm.role for gemm in gemms(ONE)} == set(ROLES)


def test_each_operation_shares_all_or_nothing() -> None:
    base = Held(0, 100, 0, (("a", 10), ("b", 40)))
    assert possible_increases(Held(30, 50), base) == [(-20, -20), (-10, -10), (20, 20), (30, 30)]
    # A layer that is the same in both shares the same in both.
    assert possible_increases(Held(30, 60, 0, (("a", 10),)), base) == [(-10, -10), (30, 30)]
    assert possible_increases(base, base) == [(0, 0)]
    many = Held(0, 100, 0, tuple((str(i), 10) for i in range(9)))
    assert possible_increases(Held(30, 50), many) == [(-20, 70)]


@given(st.lists(st.integers(0, 1000), max_size=10), st.integers(0, 5000))
def test_the_range_is_from_nothing_shared_to_all(shares: list[int], weights: int) -> None:
    base = Held(0, sum(shares), 0, tuple((str(i), size) for i, size in enumerate(shares)))
    ranges = possible_increases(Held(weights), base)
    assert min(low for low, _ in ranges) == weights - sum(shares)
    assert max(high for _, high in ranges) == weights
