"""What the libraries' own logs say, read from lines that they really wrote."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.measure.library_lines import Product, read_cublaslt, read_mkl, read_onednn

EVIDENCE = Path(__file__).parents[1] / "data" / "h200" / "cublaslt_layernorm_mlp.log.gz"
"""cuBLASLt 13.1 on an H200: te.LayerNormMLP(512, 2048) on 1024 tokens, forward and backward, in bf16, fp8_delayed,
fp8_current and fp8_block, in that order; then an emulated NVFP4 layer."""

LINE = re.compile(r"\[[^]]*\]\[cublasLt\]\[\d+\]\[(\w+)\]\[(\w+)\] ?(.*)")


def messages() -> list[tuple[str, str]]:
    """(function, message) of every line in the log."""
    found = [LINE.match(line) for line in gzip.decompress(EVIDENCE.read_bytes()).decode().splitlines()]
    return [(match.group(2), match.group(3)) for match in found if match is not None]


def evidence() -> list[Product]:
    """Every product in the log, in order."""
    return [product for said in messages() if (product := read_cublaslt(*said)) is not None]


def test_every_line_of_the_log_is_read_and_only_the_performance_trace_tells_all() -> None:
    lines = gzip.decompress(EVIDENCE.read_bytes()).decode().splitlines()
    assert len(messages()) == len(lines) > 1000
    kinds = {match.group(1) for line in lines if (match := LINE.match(line)) and read_cublaslt(*match.groups()[1:])}
    assert kinds == {"Trace"}


E4, E5, BF = "R_8F_E4M3", "R_8F_E5M2", "R_16BF"
ROLES = [(1024, 512, 2048), (1024, 2048, 512), (1024, 512, 2048), (512, 1024, 2048), (1024, 2048, 512)]
"""(rows, inner, columns) of fc1 and fc2 in forward, then fc2's dgrad and wgrad, and fc1's dgrad; fc1's wgrad last."""
SIZES = [*ROLES, (2048, 1024, 512)]


@pytest.mark.parametrize(
    ("start", "forward", "backward"),
    [(0, BF, BF), (6, E4, E5), (12, E4, E5), (18, E4, E4)],
    ids=["bf16", "fp8_delayed", "fp8_current", "fp8_block"],
)
def test_each_recipe_shows_its_types_and_the_layers_sizes(start: int, forward: str, backward: str) -> None:
    found = evidence()[start : start + 6]
    assert [(p.rows, p.inner, p.columns) for p in found] == SIZES
    assert [p.left for p in found] == [forward] * 2 + [backward] * 4, "left: the input, then the output gradient"
    assert {p.right for p in found} == {forward}, "right: the weight or the saved input"
    assert {(p.output, p.compute, p.batch, p.function) for p in found} == {(BF, "COMPUTE_32F", 1, "cublasLtMatmul")}


def test_only_block_scaling_shows_scale_modes_and_the_weights_are_scaled_in_squares() -> None:
    found = evidence()
    assert {(p.left_scale, p.right_scale) for p in found[:18]} == {("", "")}
    modes = [(p.left_scale, p.right_scale) for p in found[18:24]]
    weight, saved = ("VEC128_32F", "BLK128x128_32F"), ("VEC128_32F", "VEC128_32F")
    assert modes == [weight, weight, weight, saved, weight, saved]


def test_only_bf16s_wgrads_read_the_output_gradient_transposed() -> None:
    assert [p.left_transposed for p in evidence()[:24]] == [False, False, False, True, False, True] + [False] * 18


def test_plain_cublas_is_in_the_log_too() -> None:
    functions = Counter(p.function for p in evidence()[24:])
    assert functions == {"cublasLtSSSMatmul": 226, "cublasLtTSTMatmul": 2}
    assert evidence()[24].left == "R_32F"


def test_a_message_that_does_not_tell_all_is_no_product() -> None:
    api = "A=0X7F6120800000 Adesc=0X14C7B780 B=0X7F6101A00000 Bdesc=0X14790780 computeDesc=0X14D02190 algo=0X7FFC"
    assert read_cublaslt("cublasLtMatmul", api) is None
    whole = "Adesc=[type=R_16BF rows=8 cols=4] Bdesc=[type=R_16BF rows=8 cols=2] Ddesc=[type=R_32F rows=4 cols=2] "
    whole += "computeDesc=[computeType=COMPUTE_32F transa=OP_T]"
    assert read_cublaslt("cublasLtMatmul", whole) is not None
    assert read_cublaslt("cublasLtMatmulAlgoGetHeuristic", whole) is None
    assert read_cublaslt("cublasLtMatmul", whole.replace("rows=8", "rows=many")) is None


def test_a_batched_product_says_so() -> None:
    desc = "type=R_16BF rows=64 cols=64 ld=64 batchCount=96 stridedBatchOffset=4096"
    message = f"Adesc=[{desc}] Bdesc=[{desc}] Cdesc=[{desc}] Ddesc=[{desc}] computeDesc=[computeType=COMPUTE_32F]"
    product = read_cublaslt("cublasLtTSTMatmul", message)
    assert product is not None
    assert product.batch == 96


# Lines of oneDNN 3.12 as PyTorch 2.13 has it printed, with the types of a CPU with BF16 where named so.
INNER = (
    "onednn_verbose,v1,primitive,exec,cpu,inner_product,brg_matmul:avx2,forward_training,src:f32:a:blocked:ab::f0 "
    "wei:f32:a:blocked:ab::f0 bia:undef::undef::: dst:f32:a:blocked:ab::f0,attr-scratchpad:user,,mb16ic64oc32,0.053"
)
MATMUL = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_amx,undef,src:bf16::blocked:ab::f0 "
    "wei:bf16::blocked:ba::f0 dst:bf16::blocked:ab::f0,attr-scratchpad:user,,16x64:64x32,0.52417"
)
OLD = (
    "onednn_verbose,exec,cpu,matmul,brg:avx512_core_bf16,undef,src_bf16::blocked:ba:f0 wei_bf16::blocked:ab:f0 "
    "dst_bf16::blocked:ab:f0,attr-scratchpad:user ,,16x64:64x32:16x32,0.5"
)


def test_onednns_matrix_products() -> None:
    product = Product(
        "oneDNN", "matmul", "bf16", "bf16", "bf16", 16, 64, 32, implementation="brg_matmul:avx512_core_amx"
    )
    assert read_onednn(MATMUL) == product
    assert read_onednn(OLD) == replace(product, implementation="brg:avx512_core_bf16", left_transposed=True)
    inner = replace(product, function="inner_product", left="f32", right="f32", output="f32")
    assert read_onednn(INNER) == replace(inner, implementation="brg_matmul:avx2")


def test_onednns_inner_product_in_backward() -> None:
    data = (
        INNER.replace("forward_training", "backward_data").replace(" dst:", " diff_dst:").replace(",src:", ",diff_src:")
    )
    found = read_onednn(data)
    assert found is not None
    assert (found.rows, found.inner, found.columns) == (16, 32, 64)
    weights = INNER.replace("forward_training", "backward_weights").replace(" dst:f32", " diff_dst:bf16")
    found = read_onednn(weights.replace(" wei:", " diff_wei:"))
    assert found is not None
    assert (found.rows, found.inner, found.columns) == (32, 16, 64)
    assert (found.left, found.right) == ("bf16", "f32"), "dY^T and X"


def test_onednns_fast_math_and_batches() -> None:
    fast = read_onednn(MATMUL.replace("attr-scratchpad:user", "attr-scratchpad:user attr-fpmath:bf16"))
    assert fast is not None
    assert fast.compute == "bf16"
    folded = read_onednn(MATMUL.replace("16x64:64x32", "4x16x64:1x64x32"))
    assert folded is not None
    assert (folded.batch, folded.rows, folded.inner, folded.columns) == (1, 64, 64, 32)
    batched = read_onednn(MATMUL.replace("16x64:64x32", "4x16x64:4x64x32"))
    assert batched is not None
    assert (batched.batch, batched.rows) == (4, 16)


@pytest.mark.parametrize(
    "line",
    [
        "onednn_verbose,v1,info,cpu,isa:Intel AVX2",
        "onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind",
        MATMUL.replace(",exec,", ",create_nested:cache_miss,"),
        MATMUL.replace(",matmul,", ",reorder,"),
        MATMUL.replace("16x64:64x32", "16x64:63x32"),
        MATMUL.replace("16x64:64x32", "*x64:64x32"),
        INNER.replace("mb16ic64oc32", "ic64oc32"),
        "MKL_VERBOSE SGEMM(T,N,128,64,64,0x7f,0x5,64,0x5,64,0x7f,0x5,128) 313.89us",
        "",
    ],
)
def test_what_is_no_matrix_product_of_onednn(line: str) -> None:
    assert read_onednn(line) is None


def test_mkls_matrix_products() -> None:
    """PyTorch 2.13 on a CPU with AVX2: wgrad of nn.Linear(64, 128) on 64 tokens, and a product inside attention."""
    line = (
        "MKL_VERBOSE SGEMM(N,T,64,128,32,0x7ffd,0x5621,64,0x56217b,128,0x7ffd31d,0x56217be,64) 39.61us CNR:OFF NThr:2"
    )
    assert read_mkl(line) == Product("MKL", "SGEMM", "f32", "f32", "f32", 128, 32, 64, left_transposed=True)
    half = read_mkl("MKL_VERBOSE GEMM_F16F16F32(T,N,64,32,16,0x7f,0x5,32,0x5,64,0x7,0x5,64) 9.91us CNR:OFF Dyn:1")
    assert half == Product("MKL", "GEMM_F16F16F32", "f16", "f16", "f32", 32, 16, 64)
    assert read_mkl("MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture") is None
    assert read_mkl("MKL_VERBOSE SGEMV(T,64,128,0x7ffd,0x5621,64) 1us") is None


@given(st.text(), st.sampled_from([MATMUL, INNER, OLD]), st.integers(0, 200), st.integers(0, 200))
def test_no_text_makes_a_reader_raise(text: str, line: str, begin: int, end: int) -> None:
    damaged = line[:begin] + text + line[end:]
    for read in (read_onednn, read_mkl, lambda each: read_cublaslt("cublasLtMatmul", each)):
        assert read(text) is None
        found = read(damaged)
        assert found is None or min(found.rows, found.inner, found.columns) >= 0


@given(st.lists(st.integers(1, 4096), min_size=3, max_size=3), st.booleans(), st.booleans())
def test_every_product_is_read_back_row_major(sizes: list[int], turn_a: bool, turn_b: bool) -> None:
    rows, inner, columns = sizes
    a = (inner, columns) if turn_a else (columns, inner)
    b = (rows, inner) if turn_b else (inner, rows)
    flags = " transa=OP_T" * turn_a + " transb=OP_T" * turn_b
    message = (
        f"Adesc=[type=R_8F_E4M3 rows={a[0]} cols={a[1]} ld={a[0]}] Bdesc=[type=R_8F_E5M2 rows={b[0]} cols={b[1]}] "
        f"Ddesc=[type=R_16BF rows={columns} cols={rows}] computeDesc=[computeType=COMPUTE_32F{flags}]"
    )
    found = read_cublaslt("cublasLtMatmul", message)
    assert found is not None
    assert (found.rows, found.inner, found.columns, found.left_transposed) == (rows, inner, columns, turn_b)
    assert (found.left, found.right) == ("R_8F_E5M2", "R_8F_E4M3")
