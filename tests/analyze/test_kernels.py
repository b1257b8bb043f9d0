"""The kernel-name classifier, against names from public profiles, an H200, and the grammar itself."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.kernels import bucket_in_context, classify, normalise
from lowprec_callback.report import BUCKETS

DATA = Path(__file__).parent.parent / "data"
PRECISIONS = {
    "bf16", "fp8", "fp8-block", "mxfp8", "nvfp4", "fp16", "fp32", "tf32", "int8", "fp64", "unknown",
}  # fmt: skip

# --- The table of names from public profiles and from the libraries' symbols ------------------------------

CATEGORY = {"memcpy": "copy", "memset": "copy", "softmax-loss": "loss", "scale-swizzle": "scale"}
"""The table's categories that are not called as our buckets are."""

EXCEPTIONS = (
    (
        "copy_kernel_cuda",
        "elementwise",
        "copy",
        "torch's copies and casts: one bucket, whether memcpy, a kernel or a CPU operator makes the copy",
    ),
    (
        "triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0",
        "elementwise",
        "activation",
        "silu is among the operations; the table itself says 'SwiGLU backward-like'",
    ),
    ("triton__0d1d", "elementwise", "other", "the name says nothing of what it computes"),
    (
        "cub::DeviceRadixSort",
        "other",
        "elementwise",
        "cub's scans are elementwise in the table; the embedding's backward launches both",
    ),
    (
        "wgrad_alg0_engine<",
        "gemm",
        "other",
        "a convolution that names no product; the table has its sibling dgrad_engine in other",
    ),
)
"""(part of the name, the table's category, ours, why): rows of high confidence that we read differently."""

MEDIUM_AGREEMENT = 286
"""Of 304 rows. The rest: nine that compute or move scale factors (the table says amax or quantize), two casts
fused with GELU (quantize), four of an embedding's backward or of gradient clipping (other), a descriptor
update among TE's casts (other), types chosen at run time (fp8), and one name cut short (a scaling taken for
granted)."""


def table(confidence: str) -> list[dict[str, str]]:
    with (DATA / "kernel_names.tsv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file, delimiter="\t") if row["confidence"] == confidence]


def disagreement(row: dict[str, str]) -> str | None:
    """How `classify` reads a row differently from the table; None when they agree."""
    kernel = classify(row["kernel_name"])
    bucket = CATEGORY.get(row["category"], row["category"])
    if kernel.bucket != bucket:
        return f"{row['kernel_name'][:120]}: table {bucket}, we {kernel.bucket} ({kernel.rule})"
    said = row["gemm_input_precision_or_dash"]
    if bucket == "gemm" and not precision_agrees(said, kernel.precision, kernel.operands):
        return f"{row['kernel_name'][:120]}: table {said}, we {kernel.precision} {kernel.operands}"
    return None


def precision_agrees(said: str, precision: str, operands: tuple[str, str] | None) -> bool:
    """The table writes `fp8:e4m3+e5m2` for family and formats, `bf16` where they are the same."""
    if said == "-":
        return operands is None
    if said == "fp4:mxfp4+mxfp8:e4m3":  # no recipe's; the formats must still be told
        return operands == ("e2m1", "e4m3") and precision == "unknown"
    if said == "fp4:nvfp4":
        return operands == ("e2m1", "e2m1") and precision == "nvfp4"
    family, _, formats = said.partition(":")
    return precision == family and (not formats or "+".join(dict.fromkeys(operands or ())) == formats)


def exception(row: dict[str, str]) -> tuple[str, str, str, str] | None:
    for part, theirs, ours, why in EXCEPTIONS:
        if part in row["kernel_name"] and row["category"] == theirs:
            return part, theirs, ours, why
    return None


def test_table_of_high_confidence() -> None:
    rows = table("high")
    wrong = [text for row in rows if not exception(row) if (text := disagreement(row))]
    assert len(rows) > 300
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_needed_and_do_as_they_say() -> None:
    used = Counter[str]()
    for row in table("high"):
        entry = exception(row)
        if entry:
            used[entry[0]] += 1
            assert classify(row["kernel_name"]).bucket == entry[2], row["kernel_name"]
    assert set(used) == {part for part, *_ in EXCEPTIONS}


def test_table_of_medium_confidence() -> None:
    rows = table("medium")
    wrong = [text for row in rows if (text := disagreement(row))]
    assert len(rows) - len(wrong) >= MEDIUM_AGREEMENT, "\n".join(wrong)


def test_every_name_of_the_table_reads_the_same_in_both_spellings() -> None:
    for row in table("high") + table("medium"):
        name = row["kernel_name"]
        nsys = name.replace("(anonymous namespace)::", "<unnamed>::").replace(" const*", "*")
        nsys = re.sub(r"(?<=[<,] )(\d+)(?=[,>])", r"(int)\1", nsys)
        assert classify(nsys).bucket == classify(name).bucket, name
        assert classify(f"void {name}").operands == classify(name).operands, name


# --- Two training steps on an H200, four recipes, three sizes ---------------------------------------------

H200 = sorted((DATA / "h200").glob("kernels_*.json"))
LINEAR = {"bf16": "bf16", "fp8_delayed": "fp8", "fp8_current": "fp8", "fp8_block": "fp8-block"}
"""Recipe to the precision of its linear layers. Unfused attention adds bf16, the model's head fp32."""


def kernels_of(path: Path) -> list[tuple[str, float]]:
    """(name, microseconds); the rows `Optimizer.step#...` are ranges."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [(name, us) for name, _, us in rows if not name.startswith("Optimizer.")]


def test_all_recordings_are_there() -> None:
    assert len(H200) == 12


@pytest.mark.parametrize("path", H200, ids=lambda path: path.stem)
def test_h200(path: Path) -> None:
    kernels = kernels_of(path)
    recipe = path.stem.split("_", 2)[2]
    total = sum(us for _, us in kernels)
    other = sum(us for name, us in kernels if classify(name).bucket == "other")
    assert other < 0.01 * total
    gemms = {name: classify(name) for name, _ in kernels if classify(name).bucket == "gemm"}
    products = {name: kernel for name, kernel in gemms.items() if not kernel.gemm_helper}
    assert {kernel.precision for kernel in products.values()} == {LINEAR[recipe], "bf16", "fp32"}
    assert all(kernel.precision != "unknown" for name, kernel in products.items() if "nvjet" in name)
    # On sm_90 an FP8 product is TN in all three roles; in bf16 each role has its layout.
    layouts = {kernel.layout for kernel in products.values() if kernel.precision == LINEAR[recipe]}
    assert layouts == ({"TN", "NN", "NT"} if recipe == "bf16" else {"TN"})


@pytest.mark.parametrize("path", H200, ids=lambda path: path.stem)
def test_h200_quantization_only_where_a_recipe_quantizes(path: Path) -> None:
    buckets = {classify(name).bucket for name, _ in kernels_of(path)}
    expected = {
        "bf16": set(),
        "fp8_delayed": {"quantize", "scale"},
        "fp8_current": {"quantize", "scale", "amax"},
        "fp8_block": {"quantize", "scale"},
    }[path.stem.split("_", 2)[2]]
    assert buckets & {"quantize", "scale", "amax", "hadamard"} == expected


def test_hybrid_backward_is_e4m3_by_e5m2() -> None:
    operands = {classify(name).operands for name, _ in kernels_of(DATA / "h200" / "kernels_2048_fp8_current.json")}
    assert {("e4m3", "e4m3"), ("e4m3", "e5m2")} <= operands


def test_unfused_attention_is_told_by_its_softmax() -> None:
    alarms = {alarm for name, _ in kernels_of(H200[0]) for alarm in classify(name).alarms}
    assert alarms == {"attention-unfused"}


# --- Single names, each a trap ----------------------------------------------------------------------------

GELU = "&(float te::gelu<float, float>(float, te::Empty const&))"
IDENTITY = "&te::dispatch::fp8::detail::identity"


def full(name: str) -> str:
    """The lists below write `te::` for TE's namespace, to keep their lines short."""
    return re.sub(r"\bte::", "transformer_engine::", name)


@pytest.mark.parametrize(
    ("name", "bucket"),
    [
        ("void row_col_rht_gemm_device<64, 4>(int)", "hadamard"),
        ("group_row_col_rht_gemm_device_graph_safe", "hadamard"),
        ("ncclDevKernel_AllReduce_Sum_f8e4m3_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<2", "attention"),
        ("matmul_fp8_v4_detail::cast_bf16_to_fp8_e4m3_kernel(const __nv_bfloat16 *, long)", "quantize"),
        ("void fbgemm_gpu::_offsets_range_cuda_kernel<int>(long, long, int const*, int*)", "other"),
        ("void te::setup_grouped_gemm_kernel(int*)", "other"),
        ("multi_tensor_apply_kernel", "other"),
        ("kernel", "other"),
        ("device_kernel", "other"),
        ("void multi_tensor_apply_kernel<L<2>, te::compute_scale::ComputeScaleInvE8M0Functor>()", "scale"),
        ("void multi_tensor_apply_kernel<L<5>, te::AdamFunctorMaster<__nv_fp8_e4m3>>()", "optimizer"),
        (f"void te::unary_kernel<16, true, float, te::Empty, {GELU}, __nv_fp8_e4m3>(int)", "activation"),
        ("void te::unary_kernel<(int)16, (bool)1, float, &te::gelu<float, float>, float>", "activation"),
        (f"void te::unary_kernel<16, true, float, te::Empty, {IDENTITY}, __nv_fp8_e4m3>(int)", "quantize"),
        ("cast_transpose_fusion_kernel_optimized(te::CTDBiasDActParam<__nv_bfloat16>, long)", "quantize"),
        (f"void te::detail::cast_transpose_fused_kernel_notaligned<true, 2, {GELU}>(int)", "activation"),
        ("void te::detail::cast_transpose_fused_kernel_notaligned<true, 2, 0>(int)", "quantize"),
        ("void te::normalization::ln_fwd_tuned_kernel<te::Kernel_traits<__nv_fp8_e4m3> >()", "norm"),
        ("vllm::rms_norm_dynamic_per_token_quant_kernel", "norm"),
        ("te::(anonymous namespace)::compute_scale_from_amax_kernel(float const*, float*)", "scale"),
        ("te::(anonymous namespace)::zero_amax_kernel(float*, float const*)", "amax"),
        ("triton_poi_fused_add_mul_tanh_0", "activation"),
        ("triton_red_fused_add_mul_rsub_sum_tanh_0", "activation"),
        ("triton_poi_fused_add_0", "elementwise"),
        ("triton_red_fused_sum_0", "elementwise"),
        ("triton_per_fused_sum_1", "elementwise"),
        ("triton_poi_fused__to_copy_0", "copy"),
        ("triton_per_fused_native_layer_norm_3", "norm"),
        ("triton_red_fused_abs_amax_0", "amax"),
        ("triton_per_fused_amax_exp_sub_sum_0", "elementwise"),
        ("triton_tem_fused_addmm_0", "gemm"),
        ("[CUDA memcpy Device-to-Device]", "copy"),
        ("", "other"),
    ],
)  # fmt: skip
def test_single_names(name: str, bucket: str) -> None:
    assert classify(full(name)).bucket == bucket, classify(full(name))


@pytest.mark.parametrize(
    ("name", "alarm"),
    [
        ("void te::(anonymous namespace)::HadamardTransformKernel<float>()", "nvfp4-unfused-hadamard"),
        ("te::swizzle_block_scaling_1d_to_mxfp8_scaling_factors_kernel", "fp8-block-emulated-as-mxfp8"),
        ("te::quantize_transpose_nvfp4::block_scaled_1d_cast_transpose_kernel", "nvfp4-slow-quantize"),
        ("void te::scaled_masked_softmax_warp_forward<__nv_bfloat16>(int)", "attention-unfused"),
    ],
)  # fmt: skip
def test_alarms(name: str, alarm: str) -> None:
    assert classify(full(name)).alarms == (alarm,)


def test_fp8_block_quantization_shares_a_kernel_name_with_the_slow_nvfp4_one_but_not_its_alarm() -> None:
    name = full("void te::(anonymous namespace)::block_scaled_1d_cast_transpose_kernel<true, float>()")
    assert classify(name).bucket == "quantize"
    assert classify(name).alarms == ()


@pytest.mark.parametrize(
    ("name", "operands", "scaling"),
    [
        ("nvjet_sm90_qqtst_128x160_128x5", ("e4m3", "e4m3"), None),  # cut: its scale suffix may be gone
        ("nvjet_sm90_qqtst_128x128_128x6_..._ovscale_bias_TNT", ("e4m3", "e4m3"), "outer-vec"),
        ("nvjet_sm90_qqtst_128x128_..._bias_TNT", ("e4m3", "e4m3"), None),
        ("nvjet_sm100_ootst_128x128_256x7_2x2_2cta_v_bz_TNT", ("e2m1", "e2m1"), None),
        ("nvjet_sm90_xytst_128x128_128x6_2x1_v_bz_TNT", None, None),
        ("nvjet_sm90_tstq_128x128_128x6_2x1_v_bz_TNT", None, None),
        ("cutlass3x_sm100_tensorop_s64x64x32gemm_f8_f8_f32_f16_f16_64x64x128_0_nnn_align16_1sm", None, None),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int> >(int)", None, None),
        ("_w8a8_block_fp8_matmul", None, None),
        ("my_gemm_kernel", None, None),
    ],
)
def test_what_a_gemm_name_leaves_open_stays_open(
    name: str, operands: tuple[str, str] | None, scaling: str | None
) -> None:
    kernel = classify(name)
    assert (kernel.bucket, kernel.operands, kernel.scaling) == ("gemm", operands, scaling)
    if scaling is None:
        assert kernel.precision == "unknown"


@pytest.mark.parametrize(
    "name",
    [
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(cublasLt::cublasSplitKParams<float>)",
        "void cublasLt::epilogue::impl::globalKernelBgradAB_v2<8, 128, __nv_bfloat16>(int, int)",
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<__nv_bfloat16 const> >(int)",
        "aten::linear",
        "aten::matmul",
        "AddmmBackward0",
    ],
)
def test_what_is_part_of_a_gemm_is_no_product(name: str) -> None:
    kernel = classify(name)
    assert (kernel.bucket, kernel.gemm_helper, kernel.precision) == ("gemm", True, "unknown")


# --- Framework operators, which a CPU trace has instead of kernels ----------------------------------------


@pytest.mark.parametrize(
    ("name", "bucket"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::_scaled_mm", "gemm"),
        ("mkldnn::_linear_pointwise", "gemm"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "gemm"),
        ("aten::native_layer_norm", "norm"),
        ("aten::native_layer_norm_backward", "norm"),
        ("NativeLayerNormBackward0", "norm"),
        ("aten::_fused_rms_norm", "norm"),
        ("aten::gelu", "activation"),
        ("aten::gelu_backward", "activation"),
        ("GeluBackward0", "activation"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "attention"),
        ("aten::_softmax", "attention"),
        ("aten::_log_softmax", "loss"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("aten::nll_loss_forward", "loss"),
        ("NllLossBackward0", "loss"),
        ("aten::copy_", "copy"),
        ("aten::_to_copy", "copy"),
        ("aten::to", "copy"),
        ("ToCopyBackward0", "copy"),
        ("aten::embedding", "elementwise"),
        ("aten::embedding_dense_backward", "elementwise"),
        ("aten::add_", "elementwise"),
        ("aten::__and__", "elementwise"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_foreach_addcdiv_", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::view", "other"),
        ("aten::empty", "other"),
        ("torch::autograd::AccumulateGrad", "other"),
        ("autograd::engine::evaluate_function: TBackward0", "other"),
        ("CompiledFunctionBackward", "other"),
        ("_LayerNormMLPBackward", "other"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "other"),
        ("lowprec|gemm|fprop|attention.proj", "other"),
        ("c10d::allreduce_", "communication"),
    ],
)
def test_operators(name: str, bucket: str) -> None:
    assert classify(name).bucket == bucket
    assert classify(name).operands is None


# --- In context -------------------------------------------------------------------------------------------

GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(int)::{lambda()#3}>(int)"
FILL = "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16> >(int)"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*)"
SORT = "triton__0d1d2d"
CAST = "cast_transpose_optimized_kernel(__nv_bfloat16 const*)"


@pytest.mark.parametrize(
    ("name", "context", "bucket"),
    [
        (GEMM, {}, "gemm"),
        (GEMM, {"op": "aten::bmm"}, "attention"),
        (GEMM, {"op": "aten::baddbmm"}, "attention"),
        (GEMM, {"op": "autograd::engine::evaluate_function: BmmBackward0"}, "attention"),
        (GEMM, {"op": "aten::addmm"}, "gemm"),
        (GEMM, {"op": "_LayerNormLinear"}, "gemm"),
        (GEMM, {"op": "aten::bmm", "role": "fprop"}, "gemm"),
        (GEMM, {"op": "FusedAttnFunc"}, "attention"),
        (GEMM, {"op": "aten::_scaled_dot_product_attention_math"}, "attention"),
        (GEMM, {"module": "layers.0.self_attention.core_attention"}, "attention"),
        (GEMM, {"module": "layers.0.self_attention"}, "attention"),
        (GEMM, {"module": "layers.0.self_attention.proj"}, "gemm"),
        (GEMM, {"module": "h.0.attn.c_attn"}, "gemm"),
        (GEMM, {"module": "layers.0.self_attention", "role": "dgrad"}, "gemm"),
        (GEMM, {"phase": "optimizer", "op": "aten::mm"}, "optimizer"),
        ("aten::bmm", {}, "attention"),
        ("aten::bmm", {"role": "wgrad"}, "gemm"),
        ("aten::mm", {"op": "aten::mm", "role": "wgrad"}, "gemm"),
        ("bmm_Bfloat16_E2m1E2m1_Fp32_Ab16_Bb16_t128x8x512", {}, "gemm"),
        (COPY, {}, "copy"),
        (COPY, {"phase": "optimizer"}, "optimizer"),
        (FILL, {"phase": "optimizer"}, "optimizer"),
        (FILL, {"op": "UnfusedDotProductAttention"}, "attention"),
        (CAST, {"phase": "optimizer"}, "quantize"),
        (CAST, {"module": "layers.0.self_attention"}, "quantize"),
        (SOFTMAX, {}, "loss"),
        (SOFTMAX, {"op": "aten::_softmax"}, "attention"),
        (SOFTMAX, {"op": "aten::_log_softmax"}, "loss"),
        (SOFTMAX, {"module": "layers.0.self_attention.core_attention"}, "attention"),
        (FILL, {"op": "aten::nll_loss_backward"}, "loss"),
        (COPY, {"op": "aten::cross_entropy_loss"}, "loss"),
        (SORT, {"op": "aten::embedding_dense_backward"}, "elementwise"),
        (SORT, {"op": "aten::mm"}, "other"),
        ("Memcpy DtoD (Device -> Device)", {}, "copy"),
    ],
)  # fmt: skip
def test_context(name: str, context: dict[str, str], bucket: str) -> None:
    assert bucket_in_context(name, **context) == bucket


# --- Properties -------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from([
    "nvjet_", "qqtst", "oohsh", "sm90_", "xmma_gemm_", "e4m3f32_", "tst_", "<(", ")>", "::", "aten::",
    "Backward0", "cutlass3x_", "gemm_", "ue4m3xf4", "UE4M3", "_TNT", "bmm_", "E2m1", "rht_gemm_device",
    "ncclDevKernel", "triton_poi_fused_", "softmax", "amax", "quantize", "copy_", "void", "Avec16UE4M3",
    "deep_gemm", "tensorptr", "gemv", "<float,", "s16816gemm_", "bf16", "transformer_engine::",
    "multi_tensor_apply_kernel<",
])  # fmt: skip
NAMES = st.one_of(st.text(), st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=12).map("".join))


@given(NAMES, NAMES, st.sampled_from(["", "fprop"]), st.sampled_from(["", "optimizer"]))
def test_any_text_gets_a_known_bucket(name: str, op: str, role: str, phase: str) -> None:
    kernel = classify(name)
    assert kernel.bucket in BUCKETS
    assert kernel.precision in PRECISIONS
    assert kernel.rule
    assert kernel.bucket == "gemm" or (kernel.operands is None and not kernel.gemm_helper)
    assert bucket_in_context(name, op=op, module=op, role=role, phase=phase) in BUCKETS


@given(NAMES, NAMES)
def test_a_hadamard_kernel_is_never_a_gemm(before: str, after: str) -> None:
    name = f"{before}rht_gemm_device{after}"
    assert classify(name).bucket == "hadamard"
    assert bucket_in_context(name, role="fprop", phase="optimizer", op="aten::bmm") == "hadamard"


@given(NAMES, NAMES, st.sampled_from(["UE4M3", "ue4m3"]))
def test_the_scale_type_of_nvfp4_never_makes_an_fp8_gemm(before: str, after: str, scale: str) -> None:
    for name in (f"{before}{scale}{after}", f"nvjet_qqtst_{before}{scale}{after}_TNT"):
        assert classify(name).precision not in {"fp8", "fp8-block", "mxfp8"}


@given(st.sampled_from([row["kernel_name"] for row in table("high")]))
def test_normalising_twice_changes_nothing(name: str) -> None:
    assert normalise(normalise(name)) == normalise(name)


LETTERS = {
    "s": "fp32",
    "h": "fp16",
    "t": "bf16",
    "q": "e4m3",
    "r": "e5m2",
    "o": "e2m1",
    "b": "int8",
    "d": "fp64",
}
SUFFIXES = {
    "": "tensor",
    "_ovscale": "outer-vec",
    "_Ablk128_Bvec128": "block-128",
    "_Avec128_Bblk128": "block-128",
    "_Avec128_Bvec128": "block-128",
    "_Avec32UE8M0_Bvec32UE8M0": "mx-32",
}
WORDS = {"tensor": "fp8", "outer-vec": "fp8", "block-128": "fp8-block", "mx-32": "mxfp8", "nvfp4-16": "nvfp4"}


@st.composite
def nvjet(draw: st.DrawFn) -> tuple[str, tuple[str, str], str, str]:
    """A name by the grammar, and what it was built from: operands, scaling, layout."""
    a = draw(st.sampled_from("shtqrobd"))
    b = draw(st.sampled_from("qr")) if a in "qr" else a
    code = a + draw(st.sampled_from(["st", "ss", "sh", "hh", "ii"]))
    if a in "qro" or draw(st.booleans()):
        code = a + b + draw(st.sampled_from(["tst", "hsh", "sss", "tso"]))
    scaling, suffix = "none", ""
    if a in "qr":
        suffix, scaling = draw(st.sampled_from(sorted(SUFFIXES.items())))
    elif a == "o":
        suffix, scaling = "_Avec16UE4M3_Bvec16UE4M3", "nvfp4-16"
    size = st.integers(1, 512)
    layout = draw(st.sampled_from(["TN", "NN", "NT"]))
    parts = [
        draw(st.sampled_from(["", "sm90_", "sm100_", "sm103_"])) + code,
        f"{draw(size)}x{draw(size)}",
        f"{draw(size)}x{draw(size)}",
        f"{draw(st.integers(1, 4))}x{draw(st.integers(1, 4))}" + draw(st.sampled_from(["", "_2cta"])),
        draw(st.sampled_from("hv")),
        draw(st.sampled_from(["bz", "badd", "bx"])) + draw(st.sampled_from(["", "_coopA", "_coopB", "_splitK"])),
    ]
    extra = draw(st.sampled_from(["", "_algo2"])) + draw(st.permutations([suffix, "_bias"]).map("".join))
    name = f"nvjet_{'_'.join(parts)}{extra}_{layout}{draw(st.sampled_from('NT'))}"
    return name, (LETTERS[a], LETTERS[b]), scaling, layout


@given(nvjet())
def test_an_nvjet_name_is_read_back(built: tuple[str, tuple[str, str], str, str]) -> None:
    name, operands, scaling, layout = built
    kernel = classify(name)
    assert (kernel.bucket, kernel.operands, kernel.scaling, kernel.layout) == (
        "gemm",
        operands,
        scaling,
        layout,
    )
    assert kernel.precision == WORDS.get(scaling, operands[0])
