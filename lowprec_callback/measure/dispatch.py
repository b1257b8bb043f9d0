"""What reached the GEMM library: the witness "operands".

Two sources, both for untimed steps only:

* `watch_entries` replaces Transformer Engine's GEMM entries (`transformer_engine_torch.generic_gemm` and
  `te_general_grouped_gemm`). Every linear layer of TE goes through them by attribute, in forward and backward
  (replacing `general_gemm` would miss the modules that imported it by name). Operands of a custom recipe never
  come there: TE hands them to `custom_gemm`, which multiplies as the quantizer's own Python code says; it is watched
  where TE looks it up. TE itself is not imported here: the module objects come from the engine, and operands are
  described by the names of their classes.
* `product_of` reads the matrix products of PyTorch itself (`nn.Linear`, attention's batched products) from the
  profiler's operator events, which hold sizes and types. A dispatch mode would see the same, but it changes what it
  looks at: `torch.compile` gives up a frame for good when a mode is active, and TE's fused GELU then ran eagerly for
  the rest of the process (seen on an H200).

The layout tells the role. In TE's row-major reading A is the weight (N x K) and B the input (M x K):
TN = fprop (Y = X W^T), NN = dgrad (dX = dY W), NT = wgrad (dW = dY^T X, A = X, B = dY).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recording import Operand, Role, Stored

ENTRY = "generic_gemm"
GROUPED_ENTRIES = (
    "te_general_grouped_gemm",
    "te_general_grouped_gemm_for_grouped_tensor",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_discrete_out",
)

CUSTOM_ENTRY = "custom_gemm"
"""TE's GEMM for custom quantizers. Its arguments: A, B, ..., and at position 8 the layout as a text."""
_CUSTOM_LAYOUT, _CUSTOM_OUT_DTYPE, _CUSTOM_ACCUMULATE, _CUSTOM_BIAS = 8, 3, 7, 10

ROLE_OF_LAYOUT: dict[str, Role] = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}

_FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}

# TE's storage classes, by the start of their names: scaling, and the attribute that holds the element type.
_STORAGES = (
    ("Float8Blockwise", "block-128", "_fp8_dtype"),
    ("Float8Tensor", "tensor", "_fp8_dtype"),
    ("MXFP8", "mx-32", "_fp8_dtype"),
    ("NVFP4", "nvfp4-16", "_fp4_dtype"),
    ("CurrentScalingTensorRef", "tensor-current", "quant_dtype"),
)

_QUANTIZER_SCALING = {
    "Float8Quantizer": "tensor-delayed",
    "Float8CurrentScalingQuantizer": "tensor-current",
    "Float8BlockQuantizer": "block-128",
    "MXFP8Quantizer": "mx-32",
    "NVFP4Quantizer": "nvfp4-16",
}

# Flags worth recording, where a quantizer has them.
_FLAGS = (
    "with_rht",
    "stochastic_rounding",
    "with_2d_quantization",
    "block_scaling_dim",
    "force_pow_2_scales",
    "optimize_for_gemm",
)


Sizes = tuple[int, int, int] | None
"""(M, K, N) of a layer's forward GEMM, where it could be read."""


@dataclass(frozen=True)
class Call:
    """One GEMM call as it was made. `m`, `k`, `n` are those of the layer's forward GEMM."""

    scope: Scope | None
    role: Role
    m: int
    k: int
    n: int
    layout: str
    first: Operand
    second: Operand
    output: str
    accumulate: bool
    bias: bool
    groups: int
    entry: str
    recomputed: bool = False
    """A forward GEMM that runs while backward does: activation checkpointing makes it again."""


def format_of(dtype: torch.dtype) -> str:
    """Short name of an element type: bf16, fp32, e4m3, ..."""
    return _FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def describe(operand: Any) -> Operand:
    """Describe a GEMM operand, whichever class it has, without importing TE and without touching its data."""
    name = type(operand).__name__
    for start, scaling, attribute in _STORAGES:
        if name.startswith(start):
            element = getattr(operand, attribute, "")
            return _quantized(operand, getattr(operand, "_quantizer", None), scaling, element)
    if hasattr(operand, "logical_shape"):  # many matrices in one grouped tensor
        quantizer = operand.quantizer
        if quantizer is not None:
            return _quantized(operand, quantizer, "unknown", getattr(quantizer, "dtype", ""))
        return Operand(storage=name, format=format_of(operand.fake_dtype), scaling="none")
    if isinstance(operand, torch.Tensor):
        return Operand(storage=name, format=format_of(operand.dtype), scaling="none")
    return Operand(storage=name, format="unknown", scaling="unknown")


def _quantized(operand: Any, quantizer: Any, scaling: str, element: Any) -> Operand:
    quantizer_name = type(quantizer).__name__ if quantizer is not None else None
    scaling = _QUANTIZER_SCALING.get(quantizer_name or "", scaling)
    element_format = next((f for f in ("e4m3", "e5m2", "e2m1") if f.upper() in _name_of(element)), "unknown")
    if scaling == "nvfp4-16" and element_format == "unknown":
        element_format = "e2m1"
    return Operand(
        storage=type(operand).__name__,
        format=element_format,
        scaling=scaling,
        quantizer=quantizer_name,
        flags=_flags(operand, quantizer),
    )


def _flags(operand: Any, quantizer: Any) -> dict[str, Any]:
    flags = {name: getattr(quantizer, name) for name in _FLAGS if hasattr(quantizer, name)}
    if hasattr(operand, "_is_2D_scaled"):
        flags["is_2d_scaled"] = operand._is_2D_scaled
    return {name: value for name, value in flags.items() if isinstance(value, bool | int | str)}


def shape_of(operand: Any) -> tuple[int, int]:
    """(rows, columns) of an operand read as a matrix, leading dimensions folded into rows.

    TE's storages may hold only one of two copies. `Float8*._transpose`, block scaling's and NVFP4's column-wise
    data are stored transposed; NVFP4 packs two elements in a byte along the last dimension.

    Raises:
        ValueError: the storage holds no data that we know.
    """
    if isinstance(operand, torch.Tensor) and not hasattr(operand, "_quantizer"):
        return prod(operand.shape[:-1]), operand.shape[-1]
    original = getattr(operand, "original_shape", None)  # TE's reference quantizers keep it
    if original is not None:
        return prod(original[:-1]), original[-1]
    name = type(operand).__name__
    packed = 2 if name.startswith("NVFP4") else 1
    for attribute in ("_data", "_rowwise_data"):
        data = getattr(operand, attribute, None)
        if data is not None:
            return prod(data.shape[:-1]), data.shape[-1] * packed
    for attribute in ("_transpose", "_columnwise_data"):
        data = getattr(operand, attribute, None)
        if data is None:
            continue
        if name.startswith("MXFP8"):
            return prod(data.shape[:-1]), data.shape[-1]
        return prod(data.shape[1:]) * packed, data.shape[0]
    raise ValueError(f"{name} holds no data that this version knows")


_ROWWISE = ("_data", "_rowwise_data")
_COLUMNWISE = ("_transpose", "_columnwise_data")
_SCALES = ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")
"""The buffers of TE's storages by what they hold, over all classes."""


def stored(operands: Any, owned: Collection[int] = ()) -> Stored | None:
    """What an operand (or each of a group's, together) holds in memory; None if it has no buffer that we know.

    `owned` are the addresses of the storages of the model's parameters (see `storages`).
    """
    found = operands if isinstance(operands, list | tuple) else [operands]
    if not all(_buffers(each, (*_ROWWISE, *_COLUMNWISE)) for each in found):
        return None
    data = [buffer for each in found for buffer in _buffers(each, (*_ROWWISE, *_COLUMNWISE))]
    return Stored(
        rowwise=_bytes(found, _ROWWISE),
        columnwise=_bytes(found, _COLUMNWISE),
        scales=_bytes(found, _SCALES),
        parameter=bool(owned) and all(_address(buffer) in owned for buffer in data),
    )


def storages(tensors: Iterable[Any]) -> frozenset[int]:
    """The addresses of what these tensors hold their data in, quantized ones included.

    A tensor that has none of its own (a shard in a wrapper, a meta tensor) is left out.
    """
    found: set[int] = set()
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):
            found.update(_address(buffer) for buffer in _buffers(tensor, (*_ROWWISE, *_COLUMNWISE)))
    return frozenset(found - {0})


def _buffers(operand: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Those buffers of an operand that there are; a plain tensor is its own, as if its name were `_data`."""
    if isinstance(operand, torch.Tensor) and not hasattr(operand, "_quantizer"):
        return [operand] if "_data" in names else []
    found = (getattr(operand, name, None) for name in names)
    return [buffer for buffer in found if isinstance(buffer, torch.Tensor)]


def _bytes(operands: Iterable[Any], names: tuple[str, ...]) -> int:
    return sum(buffer.numel() * buffer.element_size() for each in operands for buffer in _buffers(each, names))


def _address(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


@contextmanager
def watch_entries(
    tex: Any,
    current: Callable[[], Scope | None],
    sink: Callable[[Call], None] | None = None,
    around: Callable[[Scope | None, Role, Sizes], Any] | None = None,
    replay: Callable[[Role, Callable[[], Any]], None] | None = None,
    owned: Collection[int] = (),
    custom: Any = None,
) -> Iterator[None]:
    """Replace TE's GEMM entries while the context lasts.

    Args:
        tex: the module `transformer_engine_torch`.
        current: gives the module that runs on the calling thread.
        sink: gets each call. Its exceptions would reach the user's training step, so it must not raise.
        around: gives a context manager to enter around the call (a profiler range), from the module that runs, the
            role, and the forward GEMM's sizes.
        replay: gets the role and a function that makes the very same call again, before it is made for real: the
            benchmark times the GEMM alone that way, with the operands that training gave it.
        owned: the addresses of the storages of the model's parameters, to tell them from copies (see `storages`).
        custom: the module in which TE looks up `custom_gemm`, or None where this version has none.
    """
    entries = [(tex, name) for name in (ENTRY, *GROUPED_ENTRIES)] + [(custom, CUSTOM_ENTRY)]
    originals = [(owner, name, getattr(owner, name)) for owner, name in entries if hasattr(owner, name)]

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            scope = current()
            layout = _custom_layout(args, kwargs) if name == CUSTOM_ENTRY else _layout(args)
            role = ROLE_OF_LAYOUT.get(layout)
            if role is not None and sink is not None:
                if name == CUSTOM_ENTRY:
                    call = _read_custom_call(name, args, kwargs, scope, role, layout)
                else:
                    call = _read_call(name, args, kwargs, scope, role, layout, owned)
                if call is not None:
                    sink(call)
            if role is not None and replay is not None:
                replay(role, lambda: original(*args, **kwargs))
            if around is None or role is None:
                return original(*args, **kwargs)
            second = args[1] if name == CUSTOM_ENTRY else args[2]
            with around(scope, role, _sizes(args[0], second, role)):
                return original(*args, **kwargs)

        return entry

    for owner, name, original in originals:
        setattr(owner, name, wrap(name, original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _layout(args: tuple[Any, ...]) -> str:
    """ "TN" and the like from the two transpose flags, which are the second and fourth argument of every entry."""
    if len(args) < 4 or not isinstance(args[1], bool) or not isinstance(args[3], bool):
        return ""
    return f"{'T' if args[1] else 'N'}{'T' if args[3] else 'N'}"


def _custom_layout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    layout = args[_CUSTOM_LAYOUT] if len(args) > _CUSTOM_LAYOUT else kwargs.get("layout", "TN")
    return layout if isinstance(layout, str) and len(args) >= 2 else ""


def _sizes(first: Any, second: Any, role: Role) -> Sizes:
    """(M, K, N) of the forward GEMM, or None if this version of TE passes operands in a way that we do not know."""
    try:
        return sizes_of(role, first, second)
    except Exception:  # whatever it is, the call itself must go on
        return None


def _read_call(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    scope: Scope | None,
    role: Role,
    layout: str,
    owned: Collection[int],
) -> Call | None:
    """Read one call's operands; None if this version of TE passes them in a way that we do not know."""
    try:
        grouped = name != ENTRY
        m, k, n = sizes_of(role, args[0], args[2])
        output = _one_of(args[4]) if len(args) > 4 else None
        out_dtype = args[6] if not grouped and len(args) > 6 else kwargs.get("output_dtype")
        return Call(
            scope=scope,
            role=role,
            m=m,
            k=k,
            n=n,
            layout=layout,
            first=replace(describe(_one_of(args[0])), stored=stored(args[0], owned)),
            second=replace(describe(_one_of(args[2])), stored=stored(args[2], owned)),
            output=format_of(output.dtype) if isinstance(output, torch.Tensor) else _te_dtype(out_dtype),
            # The entries for grouped tensors pass a factor in device memory instead, which is not read.
            accumulate=bool(args[14]) if name in (ENTRY, GROUPED_ENTRIES[0]) and len(args) > 14 else False,
            bias=not grouped and len(args) > 7 and args[7] is not None,
            groups=_matrices(args[0])[0] if grouped else 1,
            entry=name,
            recomputed=role == "fprop" and _in_backward(),
        )
    except Exception:  # whatever it is, the call itself must go on
        return None


def _read_custom_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope | None, role: Role, layout: str
) -> Call | None:
    """The same for `custom_gemm`, whose arguments are those of TE's Python layer."""
    try:
        m, k, n = sizes_of(role, args[0], args[1])
        out_dtype = args[_CUSTOM_OUT_DTYPE] if len(args) > _CUSTOM_OUT_DTYPE else kwargs.get("out_dtype")
        return Call(
            scope=scope,
            role=role,
            m=m,
            k=k,
            n=n,
            layout=layout,
            first=describe(args[0]),
            second=describe(args[1]),
            output=format_of(out_dtype) if isinstance(out_dtype, torch.dtype) else "unknown",
            accumulate=bool(args[_CUSTOM_ACCUMULATE]) if len(args) > _CUSTOM_ACCUMULATE else False,
            bias=len(args) > _CUSTOM_BIAS and args[_CUSTOM_BIAS] is not None,
            groups=1,
            entry=name,
            recomputed=role == "fprop" and _in_backward(),
        )
    except Exception:  # whatever it is, the call itself must go on
        return None


def _in_backward() -> bool:
    """Whether autograd runs this thread just now (torch.utils.checkpoint asks the same way)."""
    return bool(torch._C._current_graph_task_id() != -1)


def _one_of(operands: Any) -> Any:
    return operands[0] if isinstance(operands, list | tuple) else operands


def _matrices(operand: Any) -> tuple[int, int, int]:
    """(how many matrices, their rows in all, their columns): of one, of a list, or of TE's grouped tensor."""
    if isinstance(operand, list | tuple):
        shapes = [shape_of(each) for each in operand]
        return len(shapes), sum(rows for rows, _ in shapes), shapes[0][1]
    if hasattr(operand, "logical_shape"):
        rows, columns = operand.logical_shape
        return operand.num_tensors, rows, columns
    return (1, *shape_of(operand))


def sizes_of(role: Role, first: Any, second: Any) -> tuple[int, int, int]:
    """(M, K, N) of the layer's forward GEMM from the operands of one of its three; M is summed over a group's."""
    groups, a_rows, a_columns = _matrices(first)
    others, b_rows, b_columns = _matrices(second)
    if groups != others:
        raise ValueError(f"{groups} matrices cannot meet {others}")
    if role == "wgrad":  # A = X (M x K), B = dY (M x N)
        return a_rows, a_columns, b_columns
    return b_rows, a_columns, a_rows // groups  # A = W (N x K), B = X (M x K) or dY (M x N)


def _name_of(value: Any) -> str:
    """Name of one of TE's element types, in capitals. They are integers to `str`: pybind enums before, IntEnums now."""
    return str(getattr(value, "name", value)).upper()


def _te_dtype(value: Any) -> str:
    text = _name_of(value)
    for mark, short in (
        ("BFLOAT16", "bf16"),
        ("FLOAT16", "fp16"),
        ("FLOAT32", "fp32"),
        ("E4M3", "e4m3"),
        ("E5M2", "e5m2"),
    ):
        if mark in text:
            return short
    return "unknown"


@dataclass(frozen=True)
class AtenProduct:
    """One matrix product of PyTorch: (rows x inner) times (inner x columns), `batch` of them. Types are short names."""

    scope: Scope | None
    op: str
    batch: int
    rows: int
    inner: int
    columns: int
    first: str
    second: str
    first_transposed: bool = False
    """Whether the first operand is a transposed view: dY^T of a wgrad is, dY of a dgrad is not."""


_FIRST_OPERAND = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""PyTorch's matrix products, and where their first matrix stands among the arguments."""

_PROFILER_TYPES = {
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "double": "fp64",
    "c10::Float8_e4m3fn": "e4m3",
    "c10::Float8_e5m2": "e5m2",
}
"""C++ type names in a profiler's trace."""


def product_of(event: dict[str, Any], scope: Scope | None) -> AtenProduct | None:
    """Read a matrix product from a profiler's operator event; None if it is another operator, or has no shapes."""
    position = _FIRST_OPERAND.get(event["name"])
    args = event.get("args", {})
    dims = args.get("Input Dims", [])
    if position is None or len(dims) < position + 2:
        return None
    a, b = dims[position], dims[position + 1]
    types = args.get("Input type", [])
    first, second = (
        (_PROFILER_TYPES.get(types[i], "unknown") if i < len(types) else "unknown") for i in (position, position + 1)
    )
    strides = args.get("Input Strides", [])
    stride = strides[position] if position < len(strides) else []
    if len(a) < 2 or len(b) < 2:
        return None
    return AtenProduct(
        scope=scope,
        op=event["name"],
        batch=a[0] if len(a) == 3 else 1,
        rows=a[-2],
        inner=a[-1],
        columns=b[-1],
        first=first,
        second=second,
        first_transposed=len(stride) >= 2 and stride[-2] == 1 and stride[-1] != 1,
    )
