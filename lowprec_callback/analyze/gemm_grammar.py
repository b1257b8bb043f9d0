"""What the name of a GEMM can say, and how C++ writes the types of its operands.

`GemmName` is what every grammar fills in. The rest reads template arguments, for the libraries whose kernels are
C++ templates and so carry the types of their operands as `cutlass::float_e4m3_t` or `__nv_bfloat16`:

| format | CUTLASS                                  | CUDA, HIP                                  | torch               |
|--------|------------------------------------------|--------------------------------------------|---------------------|
| e4m3   | `float_e4m3_t`                           | `__nv_fp8_e4m3`, `__hip_fp8_e4m3[_fnuz]`   | `Float8_e4m3fn[uz]` |
| e5m2   | `float_e5m2_t`                           | `__nv_fp8_e5m2`, `__hip_fp8_e5m2[_fnuz]`   | `Float8_e5m2[fnuz]` |
| e2m1   | `float_e2m1_t`, `float_e2m1_unpacksmem_t`| `__nv_fp4_e2m1`                            | `Float4_e2m1fn_x2`  |
| bf16   | `bfloat16_t`                             | `__nv_bfloat16`, `__hip_bfloat16`          | `BFloat16`          |
| fp16   | `half_t`                                 | `__half`, `_Float16`                       | `Half`              |
| tf32   | `tfloat32_t`                             |                                            |                     |

A type may come with the type of its scales: `cute::tuple<float_e2m1_t,float_ue4m3_t>`, or as a word for both,
`nv_float4_t<float_e2m1_t>`. Types that begin with `ue` are unsigned: they hold scales, never operands.

| element                                            | scaling   |
|----------------------------------------------------|-----------|
| `mx_float8_t<X>`, `tuple<X,float_ue8m0_t>`         | mx-32     |
| `nv_float4_t<float_e2m1_t>`, `tuple<float_e2m1_t,float_ue4m3_t>` | nvfp4-16 |

What is not in these tables is not known: the operand is None, and so is the precision of the whole product.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

Operands = tuple[str, str]


@dataclass(frozen=True)
class GemmName:
    """What a name says about a GEMM; None where it says nothing."""

    operands: Operands | None
    """Formats of (A, B), in the order of the name. In cuBLAS's, A is the weight in TE's fprop and B the input."""
    scaling: str | None
    layout: str | None
    rule: str
    helper: bool = False
    """A kernel that finishes the GEMM before it: it carries no precision of its own."""
    convolution: bool = False
    """A convolution, or a kernel that belongs to one: no product of a linear layer."""


SCALED = frozenset({"e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "int4", "uint4"})
"""Formats too narrow to be used without a scale."""


def plain(operands: Operands | None, otherwise: str | None = None) -> str | None:
    """Scaling "none" for formats that carry no scale, else `otherwise`."""
    if operands is None or not SCALED.isdisjoint(operands):
        return otherwise
    return "none"


def widened(operands: Operands) -> Operands | None:
    """What can be said of operands that the kernel widens before it multiplies them.

    A mixture keeps its name, for it claims no format. Two operands of one format (or of FP8's two) would pass for a
    product in it, which this is not: None.
    """
    return None if operands[0] == operands[1] or {"e4m3", "e5m2"}.issuperset(operands) else operands


def blas_layout(match: re.Match[str] | None) -> str | None:
    """`TN` of a match whose first two groups are the letters of A and B."""
    return (match[1] + match[2]).upper() if match else None


def function_of(name: str) -> str:
    """The function's own name, without return type, namespaces, template arguments and parameters."""
    head = re.split(r"[<(]", name, maxsplit=1)[0]
    return head.rpartition("::")[2].strip()


# --- Template arguments -------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """The template arguments of one name, outermost level only."""

    values: tuple[str, ...]
    whole: bool
    """Whether the closing bracket is there. If it is not, the name was cut, and what it was cut in is left out."""


def arguments(name: str, of: str) -> Arguments | None:
    """The arguments of the first `of<...>` in a name, `of` being a whole word; None if it has none."""
    found = re.search(rf"(?<!\w){re.escape(of)}<", name)
    return split(name[found.end() :]) if found else None


def split(text: str) -> Arguments:
    """The arguments in a text that begins behind their opening bracket."""
    values: list[str] = []
    depth = start = 0
    for at, char in enumerate(text):
        if char in "<({[":
            depth += 1
        elif char in ">)}]":
            if depth == 0:
                return Arguments((*values, text[start:at].strip()), True)
            depth -= 1
        elif char == "," and depth == 0:
            values.append(text[start:at].strip())
            start = at + 1
    return Arguments(tuple(values), False)


class Element(NamedTuple):
    """One operand's type: its format, None if that is not known, and the scaling that the type implies."""

    format: str | None
    scaling: str | None = None


_TYPES = {
    "float_e4m3_t": "e4m3", "float_e5m2_t": "e5m2", "float_e2m1_t": "e2m1", "float_e2m1_unpacksmem_t": "e2m1",
    "float_e2m3_t": "e2m3", "float_e2m3_unpacksmem_t": "e2m3", "float_e3m2_t": "e3m2",
    "float_e3m2_unpacksmem_t": "e3m2", "bfloat16_t": "bf16", "half_t": "fp16", "tfloat32_t": "tf32",
    "int8_t": "int8", "signed char": "int8", "int4b_t": "int4", "uint4b_t": "uint4",
    "__nv_fp8_e4m3": "e4m3", "__nv_fp8_e5m2": "e5m2", "__nv_fp4_e2m1": "e2m1", "__nv_fp6_e2m3": "e2m3",
    "__nv_fp6_e3m2": "e3m2", "__nv_bfloat16": "bf16", "nv_bfloat16": "bf16", "__half": "fp16", "half": "fp16",
    "__hip_fp8_e4m3": "e4m3", "__hip_fp8_e4m3_fnuz": "e4m3", "__hip_fp8_e5m2": "e5m2",
    "__hip_fp8_e5m2_fnuz": "e5m2", "__hip_bfloat16": "bf16", "hip_bfloat16": "bf16", "_Float16": "fp16",
    "Float8_e4m3fn": "e4m3", "Float8_e4m3fnuz": "e4m3", "Float8_e5m2": "e5m2", "Float8_e5m2fnuz": "e5m2",
    "Float4_e2m1fn_x2": "e2m1", "BFloat16": "bf16", "Half": "fp16", "float": "fp32", "double": "fp64",
}  # fmt: skip
_MX_SCALES = frozenset({"float_ue8m0_t", "Float8_e8m0fnu", "__nv_fp8_e8m0"})
_WITH_SCALE = re.compile(r"(?:\w+::)*(mx|nv)_float[468]_t<(.*)>")
_TUPLE = re.compile(r"(?:\w+::)*tuple<(.*>)")


def element(text: str) -> Element:
    """The format of a type as C++ writes it, namespaces and pointers aside. Not in the table: None."""
    text = text.strip("*& ")
    with_scale = _WITH_SCALE.fullmatch(text)
    if with_scale:
        kind = element(with_scale[2]).format
        return Element(kind, "mx-32" if with_scale[1] == "mx" else _nvfp4(kind))
    pair = _TUPLE.fullmatch(text)
    if pair:
        parts = split(pair[1]).values
        kind = element(parts[0]).format
        scale = base(parts[1]) if len(parts) == 2 else ""
        return Element(kind, "mx-32" if scale in _MX_SCALES else _nvfp4(kind) if scale == "float_ue4m3_t" else None)
    return Element(_TYPES.get(base(text)))


def _nvfp4(kind: str | None) -> str | None:
    """UE4M3 scales nothing but FP4."""
    return "nvfp4-16" if kind == "e2m1" else None


def types_in(found: Arguments | None) -> list[Element]:
    """The arguments that are element types, those not known among them; no numbers, flags and parameter blocks.

    Integers are the types of indices, so they do not count.
    """
    values = found.values if found else ()
    kinds = [(value, element(value)) for value in values if value not in _NO_ELEMENTS]
    return [kind for value, kind in kinds if kind.format or _IDENTIFIER.fullmatch(value)]


_NO_ELEMENTS = frozenset({"true", "false", "int", "unsigned int", "long", "unsigned long", "bool", "void"})
_IDENTIFIER = re.compile(r"(?:\w+::)*[A-Za-z_]\w*")


def base(text: str) -> str:
    """A type without namespaces and pointers; of a template, without its arguments."""
    return re.split("<", text.strip("*& "), maxsplit=1)[0].rpartition("::")[2]


def common(first: str | None, second: str | None) -> str | None:
    """One scaling for a product whose operands may have one each; None unless they agree."""
    return first if first == second else None
