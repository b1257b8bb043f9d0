"""Operands as they reach the GEMM library, and the replaced entries through which they are seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.measure.dispatch import (
    ENTRY,
    GROUPED_ENTRIES,
    ROLE_OF_LAYOUT,
    AtenProduct,
    Call,
    describe,
    format_of,
    product_of,
    shape_of,
    sizes_of,
    storages,
    stored,
    watch_entries,
)
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recording import Operand, Role, Stored
from tests.engines import fake_te
from tests.engines.fake_te import (
    DType,
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    GroupedTensorStorage,
    MXFP8Quantizer,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4QuantizerRef,
    NVFP4TensorRef,
    NVFP4TensorStorage,
)

E4M3, E5M2, E2M1 = DType.kFloat8E4M3, DType.kFloat8E5M2, DType.kFloat4E2M1


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


class Pybind:
    """TE's element types before they were IntEnums: `str` gives "DType.kFloat8E4M3", and there is a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return "7"


# -- describe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "expected"),
    [
        (torch.ones(2, 2), Operand("Tensor", "fp32", "none")),
        (torch.ones(2, 2, dtype=torch.bfloat16), Operand("Tensor", "bf16", "none")),
        (torch.nn.Parameter(torch.ones(2, 2).half()), Operand("Parameter", "fp16", "none")),
        (torch.ones(2, 2).to(torch.float8_e5m2), Operand("Tensor", "e5m2", "none")),
        (
            Float8TensorStorage(None, Float8Quantizer(), _fp8_dtype=E4M3),
            Operand("Float8TensorStorage", "e4m3", "tensor-delayed", "Float8Quantizer"),
        ),
        (
            Float8TensorStorage(None, Float8CurrentScalingQuantizer(force_pow_2_scales=True), _fp8_dtype=E5M2),
            Operand(
                "Float8TensorStorage",
                "e5m2",
                "tensor-current",
                "Float8CurrentScalingQuantizer",
                {"force_pow_2_scales": True},
            ),
        ),
        (Float8TensorStorage(None, None, _fp8_dtype=E5M2), Operand("Float8TensorStorage", "e5m2", "tensor")),
        (Float8Tensor((4, 2), E4M3), Operand("Float8Tensor", "e4m3", "tensor")),
        (
            Float8BlockwiseQTensorStorage(
                None, Float8BlockQuantizer(block_scaling_dim=2), _fp8_dtype=E4M3, _is_2D_scaled=True
            ),
            Operand(
                "Float8BlockwiseQTensorStorage",
                "e4m3",
                "block-128",
                "Float8BlockQuantizer",
                {"block_scaling_dim": 2, "is_2d_scaled": True},
            ),
        ),
        (
            MXFP8TensorStorage(None, MXFP8Quantizer(optimize_for_gemm=False), _fp8_dtype=E5M2),
            Operand("MXFP8TensorStorage", "e5m2", "mx-32", "MXFP8Quantizer", {"optimize_for_gemm": False}),
        ),
        (
            NVFP4TensorStorage(
                None,
                NVFP4Quantizer(with_rht=True, stochastic_rounding=False, with_2d_quantization=object()),
                _fp4_dtype=E2M1,
            ),
            Operand(
                "NVFP4TensorStorage",
                "e2m1",
                "nvfp4-16",
                "NVFP4Quantizer",
                {"with_rht": True, "stochastic_rounding": False},
            ),
        ),
        (NVFP4TensorStorage(), Operand("NVFP4TensorStorage", "e2m1", "nvfp4-16")),
        (Float8TensorStorage(), Operand("Float8TensorStorage", "unknown", "tensor")),
        (Float8TensorStorage(_fp8_dtype=7), Operand("Float8TensorStorage", "unknown", "tensor")),
        (Float8TensorStorage(_fp8_dtype=Pybind("kFloat8E5M2")), Operand("Float8TensorStorage", "e5m2", "tensor")),
        (GroupedTensorStorage((6, 4), 3), Operand("GroupedTensorStorage", "bf16", "none")),
        (
            GroupedTensorStorage((6, 4), 3, MXFP8Quantizer(E5M2)),
            Operand("GroupedTensorStorage", "e5m2", "mx-32", "MXFP8Quantizer"),
        ),
        (
            NVFP4TensorRef(None, NVFP4QuantizerRef(), original_shape=(2, 2)),
            Operand("NVFP4TensorRef", "e2m1", "nvfp4-16", "NVFP4QuantizerRef"),
        ),
        (None, Operand("NoneType", "unknown", "unknown")),
        (object(), Operand("object", "unknown", "unknown")),
    ],
)
def test_operands_are_described_by_their_class(operand: Any, expected: Operand) -> None:
    assert describe(operand) == expected


SCALE = torch.zeros(4)


@pytest.mark.parametrize(
    ("operand", "expected"),
    [
        (torch.ones(2, 3, dtype=torch.bfloat16), Stored(12, 0, 0)),
        (Float8TensorStorage(_data=bytes_of(4, 2), _transpose=bytes_of(2, 4), _scale_inv=SCALE[:1]), Stored(8, 8, 4)),
        (Float8TensorStorage(_data=None, _transpose=bytes_of(2, 4), _scale_inv=SCALE[:1]), Stored(0, 8, 4)),
        (Float8Tensor((4, 2)), Stored(8, 0, 0)),
        (
            NVFP4TensorStorage(
                _rowwise_data=bytes_of(4, 8), _columnwise_data=bytes_of(16, 2), _rowwise_scale_inv=bytes_of(128, 4),
                _columnwise_scale_inv=bytes_of(128, 4), _amax_rowwise=SCALE[:1], _amax_columnwise=SCALE[:1],
            ),
            Stored(32, 32, 2 * 128 * 4 + 8),
        ),
        (MXFP8TensorStorage(_rowwise_data=None, _columnwise_data=None), None),
        ([torch.ones(2, 3), torch.ones(1, 3)], Stored(36, 0, 0)),
        ([torch.ones(2, 3), Float8TensorStorage()], None),
        (GroupedTensorStorage((6, 4), 3), None),
        (None, None),
    ],
)  # fmt: skip
def test_what_an_operand_holds_in_memory(operand: Any, expected: Stored | None) -> None:
    assert stored(operand) == expected


def test_a_parameter_is_told_from_a_copy_of_it() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 6))
    quantized = Float8Tensor((4, 2))
    owned = storages([weight, quantized, torch.empty(0), torch.ones(3, device="meta")])
    assert len(owned) == 2
    for operand, expected in (
        (weight, True),
        (weight.detach()[:2], True),  # a view, as where several parameters are used as one
        (weight.bfloat16(), False),
        (quantized, True),
        (Float8TensorStorage(_data=quantized._data, _transpose=bytes_of(2, 4)), False),
    ):
        found = stored(operand, owned)
        assert found is not None
        assert found.parameter is expected


def test_every_type_has_a_name() -> None:
    assert [format_of(t) for t in (torch.float64, torch.int8, torch.uint8, torch.complex64)] == [
        "fp64",
        "int8",
        "uint8",
        "complex64",
    ]


# -- shape_of and sizes_of ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "shape"),
    [
        (torch.ones(6, 4), (6, 4)),
        (torch.ones(2, 3, 4), (6, 4)),
        (torch.ones(4), (1, 4)),
        (torch.ones(0, 4), (0, 4)),
        (Float8Tensor((6, 4)), (6, 4)),
        (Float8TensorStorage(_data=bytes_of(2, 3, 4), _transpose=bytes_of(4, 2, 3)), (6, 4)),
        (Float8TensorStorage(_data=None, _transpose=bytes_of(4, 2, 3)), (6, 4)),
        (Float8TensorStorage(_data=None, _transpose=bytes_of(4, 6)), (6, 4)),
        (MXFP8TensorStorage(_rowwise_data=bytes_of(6, 4), _columnwise_data=None), (6, 4)),
        (MXFP8TensorStorage(_rowwise_data=None, _columnwise_data=bytes_of(2, 3, 4)), (6, 4)),
        (Float8BlockwiseQTensorStorage(_rowwise_data=bytes_of(6, 4), _columnwise_data=bytes_of(4, 6)), (6, 4)),
        (Float8BlockwiseQTensorStorage(_rowwise_data=None, _columnwise_data=bytes_of(4, 6)), (6, 4)),
        (NVFP4TensorStorage(_rowwise_data=bytes_of(6, 2), _columnwise_data=None), (6, 4)),
        (NVFP4TensorStorage(_rowwise_data=bytes_of(2, 3, 2), _columnwise_data=None), (6, 4)),
        (NVFP4TensorStorage(_rowwise_data=None, _columnwise_data=bytes_of(4, 3)), (6, 4)),
        (NVFP4TensorStorage(_rowwise_data=None, _columnwise_data=bytes_of(4, 2, 2)), (8, 4)),
        (NVFP4TensorRef(original_shape=(2, 3, 4)), (6, 4)),
    ],
)
def test_shapes_of_all_copies(operand: Any, shape: tuple[int, int]) -> None:
    assert shape_of(operand) == shape


@pytest.mark.parametrize(
    "operand", [None, 3, Float8TensorStorage(), MXFP8TensorStorage(_rowwise_data=None, _columnwise_data=None)]
)
def test_a_storage_without_data_has_no_shape(operand: Any) -> None:
    with pytest.raises(ValueError, match="holds no data that this version knows"):
        shape_of(operand)


side = st.integers(1, 64)


def operands_of(role: Role, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    w, x, dy = torch.ones(n, k), torch.ones(m, k), torch.ones(m, n)
    return {"fprop": (w, x), "dgrad": (w, dy), "wgrad": (x, dy)}[role]


@given(st.sampled_from(["fprop", "dgrad", "wgrad"]), side, side, side)
def test_sizes_are_those_of_the_forward_gemm(role: Role, m: int, k: int, n: int) -> None:
    assert sizes_of(role, *operands_of(role, m, k, n)) == (m, k, n)


@given(st.sampled_from(["fprop", "dgrad", "wgrad"]), st.lists(st.integers(0, 9), min_size=1, max_size=4), side, side)
def test_sizes_of_a_group_add_up(role: Role, tokens: list[int], k: int, n: int) -> None:
    firsts, seconds = zip(*(operands_of(role, m, k, n) for m in tokens), strict=True)
    assert sizes_of(role, list(firsts), list(seconds)) == (sum(tokens), k, n)
    groups, m = len(tokens), sum(tokens)
    w, x, dy = (GroupedTensorStorage(shape, groups) for shape in ((groups * n, k), (m, k), (m, n)))
    grouped = {"fprop": (w, x), "dgrad": (w, dy), "wgrad": (x, dy)}[role]
    assert sizes_of(role, *grouped) == (m, k, n)
    if role != "wgrad":
        assert sizes_of(role, list(firsts), grouped[1]) == (m, k, n)  # weights one by one


def test_groups_that_do_not_fit_are_not_read() -> None:
    with pytest.raises(ValueError, match="2 matrices cannot meet 1"):
        sizes_of("fprop", [torch.ones(2, 2)] * 2, [torch.ones(2, 2)])


# -- watch_entries -----------------------------------------------------------------------------------------------


class Tex(ModuleType):
    """The compiled module: entries that return what they got."""

    def __init__(self, *names: str) -> None:
        super().__init__("transformer_engine_torch")
        self.calls: list[str] = []
        for name in names:
            setattr(self, name, self._entry(name))

    def _entry(self, name: str) -> Any:
        def entry(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return (name, args, kwargs)

        return entry


@pytest.fixture
def tex() -> Tex:
    return Tex(ENTRY, *GROUPED_ENTRIES)


def arguments(
    first: Any,
    transa: bool,
    second: Any,
    transb: bool,
    *,
    out: Any = None,
    dtype: Any = DType.kBFloat16,
    bias: Any = None,
) -> tuple[Any, ...]:
    """The sixteen arguments of `generic_gemm`; it accumulates if there is an output."""
    accumulate = out is not None
    workspace = torch.empty(1)
    return (
        first, transa, second, transb, out, None, dtype, bias, dtype, False, None, False, workspace, 1, accumulate,
        True,
    )  # fmt: skip


SCOPE = Scope("mlp", "forward")
W, X, DY = torch.ones(5, 4), torch.ones(2, 3, 4).bfloat16(), torch.ones(6, 5)


def test_a_call_is_seen_and_goes_through_unchanged(tex: Tex) -> None:
    seen: list[Call] = []
    args = arguments(W, True, X, False, bias=torch.ones(5))
    expected = getattr(tex, ENTRY)(*args, alpha=1.0)
    with watch_entries(tex, lambda: SCOPE, seen.append):
        result = tex.generic_gemm(*args, alpha=1.0)
    assert result[0] == expected[0]
    assert all(a is b for a, b in zip(result[1], args, strict=True))
    assert result[2] == {"alpha": 1.0}
    assert seen == [
        Call(
            scope=SCOPE,
            role="fprop",
            m=6,
            k=4,
            n=5,
            layout="TN",
            first=Operand("Tensor", "fp32", "none", stored=Stored(80, 0, 0)),
            second=Operand("Tensor", "bf16", "none", stored=Stored(48, 0, 0)),
            output="bf16",
            accumulate=False,
            bias=True,
            groups=1,
            entry=ENTRY,
        )
    ]


@pytest.mark.parametrize(
    ("args", "role", "accumulate", "output"),
    [
        (arguments(W, True, X, False), "fprop", False, "bf16"),
        (arguments(W, False, DY, False, dtype=DType.kFloat32), "dgrad", False, "fp32"),
        (arguments(X, False, DY, True, dtype=DType.kFloat16), "wgrad", False, "fp16"),
        (arguments(X, False, DY, True, out=torch.ones(5, 4)), "wgrad", True, "fp32"),
        (arguments(W, True, X, False, dtype=DType.kFloat8E4M3), "fprop", False, "e4m3"),
        (arguments(W, True, X, False, dtype=DType.kFloat8E5M2), "fprop", False, "e5m2"),
        (arguments(W, True, X, False, dtype=Pybind("kBFloat16")), "fprop", False, "bf16"),
        (arguments(W, True, X, False, dtype=None), "fprop", False, "unknown"),
    ],
)
def test_roles_outputs_and_accumulation(
    tex: Tex, args: tuple[Any, ...], role: Role, accumulate: bool, output: str
) -> None:
    seen: list[Call] = []
    with watch_entries(tex, lambda: None, seen.append):
        tex.generic_gemm(*args)
    (call,) = seen
    assert (call.role, call.m, call.k, call.n) == (role, 6, 4, 5)
    assert (call.accumulate, call.output, call.scope, call.bias) == (accumulate, output, None, False)


def test_a_list_of_matrices_in_one_call(tex: Tex) -> None:
    """`te_general_grouped_gemm`: the type of the output stands before the sizes of the groups."""
    seen: list[Call] = []
    weights, inputs = [torch.ones(5, 4)] * 2, [torch.ones(3, 4), torch.ones(0, 4)]
    outs = [torch.ones(3, 5).bfloat16()]
    args = (
        weights, True, inputs, False, outs, DType.kBFloat16, [3, 0], [], DType.kBFloat16, True, [], False, [], 1, True,
        False, 132,
    )  # fmt: skip
    with watch_entries(tex, lambda: SCOPE, seen.append):
        tex.te_general_grouped_gemm(*args)
    (call,) = seen
    assert (call.role, call.m, call.k, call.n, call.groups) == ("fprop", 3, 4, 5, 2)
    assert (call.entry, call.output, call.accumulate, call.bias) == (GROUPED_ENTRIES[0], "bf16", True, False)


@pytest.mark.parametrize("name", GROUPED_ENTRIES[1:])
def test_grouped_tensors_in_one_call(tex: Tex, name: str) -> None:
    seen: list[Call] = []
    weights: Any = [W] * 3 if name.endswith("discrete_in") else GroupedTensorStorage((15, 4), 3)
    x, y = GroupedTensorStorage((7, 4), 3, NVFP4Quantizer(E2M1)), GroupedTensorStorage((7, 5), 3)
    dw: Any = [W] * 3 if name.endswith("discrete_out") else GroupedTensorStorage((15, 4), 3)
    fprop = (weights, True, x, False, y)
    wgrad = (x, False, y, True, dw)
    rest = (None, None, torch.ones(1), torch.zeros(1), torch.empty(1), torch.empty(1), True, 132)
    with watch_entries(tex, lambda: SCOPE, seen.append):
        for args in (fprop, wgrad):
            getattr(tex, name)(*args, *rest)
    assert [(c.role, c.m, c.k, c.n, c.groups) for c in seen] == [("fprop", 7, 4, 5, 3), ("wgrad", 7, 4, 5, 3)]
    assert seen[0].second.scaling == "nvfp4-16"
    assert not any(call.accumulate or call.bias for call in seen)


class Hostile:
    """An operand that fails however it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


@pytest.mark.parametrize(
    "args",
    [
        (),
        (W,),
        (W, 1, X, 0),
        (W, "T", X, "N"),
        (None, True, None, False),
        (Hostile(), True, Hostile(), False),
        (W, True, torch.tensor(1.0), False),
        ([], True, [], False),
        (W, True, X, False),
        (W, True, X, False, None, None, None, None, None, None, None, None, None, None, torch.ones(2)),
        (W, True, X, True),
        (torch.ones(()), True, torch.ones(()), False),
    ],
)
@pytest.mark.parametrize("name", [ENTRY, GROUPED_ENTRIES[0], GROUPED_ENTRIES[1]])
def test_arguments_that_are_not_known_go_through(tex: Tex, name: str, args: tuple[Any, ...]) -> None:
    around: list[Any] = []

    @contextmanager
    def note(*what: Any) -> Iterator[None]:
        around.append(what)
        yield

    with watch_entries(tex, lambda: None, lambda _call: None, note):
        result = getattr(tex, name)(*args, extra=1)
    assert result[0] == name
    assert all(a is b for a, b in zip(result[1], args, strict=True))
    assert tex.calls == [name]


def test_the_entries_come_back(tex: Tex) -> None:
    before = dict(vars(tex))
    with watch_entries(tex, lambda: None):
        assert all(getattr(tex, name) is not before[name] for name in (ENTRY, *GROUPED_ENTRIES))
    assert vars(tex) == before


def test_the_entries_come_back_after_an_exception(tex: Tex) -> None:
    before = dict(vars(tex))

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watch_entries(tex, lambda: None):
        fail()
    assert vars(tex) == before


def test_a_version_with_fewer_entries() -> None:
    tex = Tex(ENTRY)
    with watch_entries(tex, lambda: None):
        assert not hasattr(tex, GROUPED_ENTRIES[0])
    assert not hasattr(tex, GROUPED_ENTRIES[0])


def test_watchers_can_be_nested(tex: Tex) -> None:
    before = dict(vars(tex))
    outer: list[Call] = []
    inner: list[Call] = []
    with watch_entries(tex, lambda: None, outer.append):
        with watch_entries(tex, lambda: None, inner.append):
            tex.generic_gemm(*arguments(W, True, X, False))
        tex.generic_gemm(*arguments(W, False, DY, False))
    assert ([c.role for c in inner], [c.role for c in outer]) == (["fprop"], ["fprop", "dgrad"])
    assert vars(tex) == before


def test_what_the_library_raises_is_raised(tex: Tex) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("cuBLAS")

    tex.generic_gemm = fail
    left: list[str] = []

    @contextmanager
    def note(*_: Any) -> Iterator[None]:
        try:
            yield
        finally:
            left.append("left")

    with watch_entries(tex, lambda: None, around=note), pytest.raises(RuntimeError, match="cuBLAS"):
        tex.generic_gemm(*arguments(W, True, X, False))
    assert left == ["left"]


def test_around_is_entered_with_what_is_known(tex: Tex) -> None:
    order: list[Any] = []

    @contextmanager
    def note(*what: Any) -> Iterator[None]:
        order.append(what)
        yield
        order.append(len(tex.calls))

    with watch_entries(tex, lambda: SCOPE, around=note):
        tex.generic_gemm(*arguments(X, False, DY, True))
        tex.generic_gemm(*arguments(None, True, X, False))
        tex.generic_gemm(*arguments(W, True, X, True))  # no role
    assert order == [(SCOPE, "wgrad", (6, 4, 5)), 1, (SCOPE, "fprop", None), 2]


def test_replay_makes_the_very_same_call_again(tex: Tex) -> None:
    args = arguments(W, True, X, False)
    replayed: list[Any] = []

    def replay(role: Role, again: Any) -> None:
        assert tex.calls == []  # before the call itself
        replayed.append((role, again(), again()))

    with watch_entries(tex, lambda: None, replay=replay):
        tex.generic_gemm(*args, beta=0.0)
    ((role, *results),) = replayed
    assert role == "fprop"
    assert all(r[1] == args and r[2] == {"beta": 0.0} for r in results)
    assert len(tex.calls) == 3


def test_calls_from_many_threads(tex: Tex) -> None:
    seen: list[Call] = []
    scopes = {}

    def work(index: int) -> None:
        scopes[threading.get_ident()] = Scope(str(index), "backward")
        barrier.wait(30)
        for _ in range(50):
            tex.generic_gemm(*arguments(torch.ones(5, index + 1), True, torch.ones(3, index + 1), False))

    barrier = threading.Barrier(4)
    with watch_entries(tex, lambda: scopes[threading.get_ident()], seen.append):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == len(tex.calls) == 200
    assert all(call.scope is not None and call.k == int(call.scope.module) + 1 for call in seen)


@given(st.sampled_from(sorted(ROLE_OF_LAYOUT)), side, side, side)
def test_the_layout_gives_the_role(layout: str, m: int, k: int, n: int) -> None:
    """With the operands of a role, the library's product has the shape of that role's result."""
    role = ROLE_OF_LAYOUT[layout]
    a, b = operands_of(role, m, k, n)
    shape = {"fprop": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[role]
    assert tuple(fake_te.multiply(a, b, layout).shape) == shape


# -- PyTorch's own products ------------------------------------------------------------------------------------------


def event(name: str, dims: list[Any], types: list[str], strides: list[Any] | None = None) -> dict[str, Any]:
    args = {"Input Dims": dims, "Input type": types, "Input Strides": strides or []}
    return {"name": name, "args": args, "ts": 0.0, "dur": 1.0, "tid": 1}


def test_products_are_read_from_events() -> None:
    mm = event("aten::mm", [[6, 4], [4, 5]], ["float", "float"], [[4, 1], [1, 4]])
    assert product_of(mm, SCOPE) == AtenProduct(SCOPE, "aten::mm", 1, 6, 4, 5, "fp32", "fp32", first_transposed=False)
    addmm = event("aten::addmm", [[5], [6, 4], [4, 5], [], []], ["float", *["c10::BFloat16"] * 2, "Scalar", "Scalar"])
    assert product_of(addmm, None) == AtenProduct(None, "aten::addmm", 1, 6, 4, 5, "bf16", "bf16")
    bmm = event("aten::bmm", [[8, 6, 4], [8, 4, 5]], ["c10::Half", "c10::Half"], [[24, 4, 1], [20, 5, 1]])
    assert product_of(bmm, None) == AtenProduct(None, "aten::bmm", 8, 6, 4, 5, "fp16", "fp16")


def test_a_transposed_view_is_seen() -> None:
    product = product_of(event("aten::mm", [[5, 6], [6, 4]], ["double"] * 2, [[1, 5], [4, 1]]), None)
    assert product is not None
    assert product.first_transposed
    assert product.first == "fp64"


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "aten::add", "args": {"Input Dims": [[2, 2], [2, 2]]}},
        {"name": "aten::mm"},
        {"name": "aten::mm", "args": {}},
        {"name": "aten::mm", "args": {"Input Dims": [[], []]}},
        {"name": "aten::mm", "args": {"Input Dims": [[4], [4]]}},
        {"name": "aten::mm", "args": {"Input Dims": [[4, 4]]}},
        {"name": "aten::addmm", "args": {"Input Dims": []}},
    ],
)
def test_events_that_are_no_product(wrong: dict[str, Any]) -> None:
    assert product_of(wrong, None) is None


def test_types_that_are_not_known() -> None:
    product = product_of({"name": "aten::mm", "args": {"Input Dims": [[2, 3], [3, 4]], "Input type": ["what"]}}, None)
    assert product is not None
    assert (product.first, product.second, product.first_transposed) == ("unknown", "unknown", False)


# -- custom recipes, and what runs again in backward -----------------------------------------------------------------


@pytest.mark.parametrize(("layout", "role"), [("TN", "fprop"), ("NN", "dgrad"), ("NT", "wgrad"), ("TT", None)])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_custom_gemm_is_seen_and_goes_through_unchanged(layout: str, role: Role | None, by_name: bool) -> None:
    home, seen, entered = ModuleType("gemm"), list[Any](), list[Any]()
    home.custom_gemm = lambda *args, **kwargs: (args, kwargs)  # type: ignore[attr-defined]
    original = home.custom_gemm
    shapes = {"TN": ((5, 4), (6, 4)), "NN": ((5, 4), (6, 5)), "NT": ((6, 4), (6, 5)), "TT": ((5, 4), (4, 6))}[layout]
    a, b = (NVFP4TensorRef(None, NVFP4QuantizerRef(), original_shape=shape) for shape in shapes)

    @contextmanager
    def around(*what: Any) -> Iterator[None]:
        entered.append(what)
        yield

    scope = Scope("fc", "forward")
    args: tuple[Any, ...] = (a, b, None, torch.bfloat16)
    kwargs = {"layout": layout} if by_name else {}
    if not by_name:
        args = (*args, None, False, None, True, layout, None, None, False, False)
    with watch_entries(ModuleType("tex"), lambda: scope, seen.append, around, custom=home):
        assert home.custom_gemm(*args, **kwargs) == (args, kwargs)
    assert home.custom_gemm is original
    if role is None:
        assert (seen, entered) == ([], [])
        return
    (call,) = seen
    assert (call.role, call.m, call.k, call.n, call.layout) == (role, 6, 4, 5, layout)
    assert (call.entry, call.output, call.accumulate, call.bias) == ("custom_gemm", "bf16", not by_name, False)
    assert (call.first.format, call.second.scaling, call.recomputed) == ("e2m1", "nvfp4-16", False)
    assert entered == [(scope, role, (6, 4, 5))]


def test_a_custom_gemm_with_operands_that_are_not_known_goes_through() -> None:
    home, seen = ModuleType("gemm"), list[Any]()
    home.custom_gemm = lambda *args, **_: len(args)  # type: ignore[attr-defined]
    with watch_entries(ModuleType("tex"), lambda: None, seen.append, custom=home):
        assert home.custom_gemm(object(), object(), None) == 3
    assert seen == []


def test_a_forward_gemm_inside_backward_is_recomputed(tex: Tex) -> None:
    seen: list[Any] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            tex.generic_gemm(*arguments(torch.ones(5, 4), True, torch.ones(6, 4), False))
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            tex.generic_gemm(*arguments(torch.ones(5, 4), True, torch.ones(6, 4), False))
            tex.generic_gemm(*arguments(torch.ones(6, 4), False, torch.ones(6, 5), True))
            return grad

    with watch_entries(tex, lambda: None, seen.append):
        Again.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert [(call.role, call.recomputed) for call in seen] == [("fprop", False), ("fprop", True), ("wgrad", False)]
