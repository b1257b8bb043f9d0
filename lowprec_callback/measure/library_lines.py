"""What the GEMM libraries write about a matrix product in their own logs, read into one form.

Three libraries, three grammars, none of which our operand witness has any part in:

* cuBLASLt, at the level of its performance trace, writes both operands' descriptors and the scale modes of every
  product (seen with 13.1 on an H200): `A=0X7F.. Adesc=[type=R_8F_E4M3 rows=512 cols=2048 ld=512] ... computeDesc=[
  computeType=COMPUTE_32F scaleType=R_32F transa=OP_T ... aScaleMode=BLK128x128_32F bScaleMode=VEC128_32F] ...`.
  What has its default value is left out. The plain cuBLAS of PyTorch's own products comes out here too, under
  names like `cublasLtTSTMatmul`.
* oneDNN, in verbose mode, writes a line a primitive: `onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx2,
  undef,src:f32::blocked:ab::f0 wei:f32::blocked:ba::f0 dst:f32::blocked:ab::f0,attr-scratchpad:user,,16x64:64x32,0.5`.
  Older versions write `src_f32` for `src:f32` and leave `v1` or `primitive` out.
* MKL, in verbose mode, writes a line a routine: `MKL_VERBOSE SGEMM(T,N,128,64,64,0x..,...) 313.89us ...`, with
  transposes and M, N, K in BLAS's column-major reading.

A column-major product D (m x n) = A B is the row-major product D^T (n x m) = B^T A^T, so that BLAS's A is the right
operand of the row-major product and B the left one. In that reading a linear layer's fprop is Y = X W^T: left X,
right W.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """One product as a library logged it, in its own words; row-major: (rows x inner) times (inner x columns)."""

    library: str
    function: str
    """Function, primitive or routine."""
    left: str
    right: str
    output: str
    rows: int
    inner: int
    columns: int
    left_scale: str = ""
    """Scale mode of the operand, as logged; empty where the line has none."""
    right_scale: str = ""
    compute: str = ""
    """The type that it multiplies or adds in, where the line tells one."""
    implementation: str = ""
    batch: int = 1
    left_transposed: bool = False
    """Whether the left operand lies in memory as its transpose."""


_DESCRIPTOR = re.compile(r"\b([ABCD]|compute)[dD]esc=\[([^\]]*)\]")
_FIELD = re.compile(r"(\w+)=(\S+)")


def read_cublaslt(function: str, message: str) -> Product | None:
    """Read a message of cuBLASLt's logger; None if it is none of the lines that describe a product in full.

    Only the performance trace spells the descriptors out; the API trace of the same call gives their addresses.
    """
    if not function.startswith("cublasLt") or not function.endswith("Matmul"):
        return None
    found = {name: dict(_FIELD.findall(body)) for name, body in _DESCRIPTOR.findall(message)}
    try:
        a, b, d, compute = found["A"], found["B"], found["D"], found["compute"]
        a_rows, a_columns = int(a["rows"]), int(a["cols"])
        return Product(
            library="cuBLASLt",
            function=function,
            left=b["type"],
            right=a["type"],
            output=d["type"],
            rows=int(d["cols"]),
            inner=a_rows if _transposed(compute, "transa") else a_columns,
            columns=int(d["rows"]),
            left_scale=compute.get("bScaleMode", ""),
            right_scale=compute.get("aScaleMode", ""),
            compute=compute.get("computeType", ""),
            batch=int(d.get("batchCount", 1)),
            left_transposed=_transposed(compute, "transb"),
        )
    except (KeyError, ValueError):
        return None


def _transposed(compute: dict[str, str], key: str) -> bool:
    return compute.get(key, "OP_N") != "OP_N"


_ONEDNN = re.compile(r"(?:onednn|dnnl)_verbose,(?:[^,]*,)*?exec,(?:cpu|gpu)[^,]*,(.*)")
_MEMORY = re.compile(r"\b((?:diff_)?(?:src|wei|dst))[:_]([a-z0-9_]+):")
_INNER_PRODUCT = re.compile(r"mb(\d+)ic(\d+)(?:i[dhw]\d+)*oc(\d+)")


def read_onednn(line: str) -> Product | None:
    """Read a line of oneDNN's verbose log; None if it is not the execution of a matrix product.

    The line's fields: engine, primitive, implementation, propagation kind, memory descriptors, attributes,
    auxiliary, problem, milliseconds.
    """
    match = _ONEDNN.match(line)
    fields = match.group(1).split(",") if match else []
    if len(fields) < 6 or fields[0] not in ("matmul", "inner_product"):
        return None
    primitive, implementation, propagation, memory = fields[:4]
    types = dict(_MEMORY.findall(memory))
    try:
        if primitive == "matmul":
            sizes, names = _matmul_sizes(fields[-2]), ("src", "wei", "dst")
        else:
            sizes, names = _inner_product_sizes(fields[-2], propagation)
        if sizes is None:
            return None
        batch, rows, inner, columns = sizes
        left, right, output = (types[name] for name in names)
    except (KeyError, ValueError):
        return None
    fast = re.search(r"attr-fpmath:([a-z0-9]+)", ",".join(fields[4:-2]))
    return Product(
        library="oneDNN",
        function=primitive,
        left=left,
        right=right,
        output=output,
        rows=rows,
        inner=inner,
        columns=columns,
        compute="" if fast is None or fast.group(1) == "strict" else fast.group(1),
        implementation=implementation,
        batch=batch,
        left_transposed=re.search(r"\bsrc[:_][a-z0-9_]+:[^ ]*blocked:ba:", memory) is not None,
    )


def _matmul_sizes(problem: str) -> tuple[int, int, int, int] | None:
    """(batch, rows, inner, columns) of `16x64:64x32` or `3x200x64:3x64x300`, the result's sizes left out.

    A batch of inputs times one matrix is one product with the batch folded into its rows.
    """
    source, weights = ([int(size) for size in each.split("x")] for each in problem.split(":")[:2])
    if len(source) < 2 or len(weights) < 2 or source[-1] != weights[-2]:
        return None
    batch = 1
    for size in source[:-2]:
        batch *= size
    if all(size == 1 for size in weights[:-2]):
        return 1, batch * source[-2], source[-1], weights[-1]
    return batch, source[-2], source[-1], weights[-1]


def _inner_product_sizes(
    problem: str, propagation: str
) -> tuple[tuple[int, int, int, int] | None, tuple[str, str, str]]:
    """Sizes as of `_matmul_sizes`, and which memories are the left, the right and the resulting matrix.

    forward: dst = src wei^T; backward_data: diff_src = diff_dst wei; backward_weights: diff_wei = diff_dst^T src.
    """
    match = _INNER_PRODUCT.match(problem)
    if match is None:
        return None, ("", "", "")
    tokens, k, n = (int(size) for size in match.groups())
    if propagation == "backward_data":
        return (1, tokens, n, k), ("diff_dst", "wei", "diff_src")
    if propagation.startswith("backward_weights"):
        return (1, n, tokens, k), ("diff_dst", "src", "diff_wei")
    return (1, tokens, k, n), ("src", "wei", "dst")


_MKL = re.compile(r"MKL_VERBOSE (?:CBLAS_)?([SD]GEMM|GEMM_(BF16|F16)\2F32)\(([NTC]),([NTC]),(\d+),(\d+),(\d+),", re.I)


def read_mkl(line: str) -> Product | None:
    """Read a line of MKL's verbose log; None if it is not one matrix product."""
    match = _MKL.match(line)
    if match is None:
        return None
    routine, narrow, _, b_transposed, m, n, k = match.groups()
    routine = routine.upper()
    element = narrow.lower() if narrow else {"S": "f32", "D": "f64"}[routine[0]]
    return Product(
        library="MKL",
        function=routine,
        left=element,
        right=element,
        output="f32" if narrow else element,
        rows=int(n),
        inner=int(k),
        columns=int(m),
        left_transposed=b_transposed.upper() != "N",
    )
