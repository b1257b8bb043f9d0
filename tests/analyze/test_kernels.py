"""The kernel-name classifier, against names from public profiles, an H200, and the grammar itself."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback.analyze.kernels import KernelClass, bucket_in_context, classify, normalise
from lowprec_callback.analyze.precision import BITS, Operands, kernel_fits
from lowprec_callback.report import BUCKETS

DATA = Path(__file__).parent.parent / "data"
SINGLE = {"bf16", "fp8", "fp8-block", "mxfp8", "nvfp4", "fp16", "fp32", "tf32", "int8", "fp64"}
"""Precisions that one format or one recipe has; a mixture and what is not known must equal none of them."""
FORMATS = {"bf16", "fp16", "fp32", "tf32", "fp64", "int8", "int4", "uint4", "e4m3", "e5m2", "e2m1", "e2m3", "e3m2"}


def is_precision(text: str) -> bool:
    """One word, a mixture of two formats, or `unknown`."""
    mixed = text.split(" x ")
    return text in SINGLE | {"unknown"} or (len(mixed) == 2 and mixed[0] != mixed[1] and FORMATS.issuperset(mixed))


# --- The tables of names from public profiles and from the libraries' symbols and generators ---------------

TABLES = ("kernel_names.tsv", "kernel_names_libraries.tsv")
"""The first is the shared evidence, with the rows that were wrong corrected (their `note` begins so); the second holds
names of other libraries, of AMD's and of convolutions."""

CATEGORY = {"memcpy": "copy", "memset": "copy", "softmax-loss": "loss", "scale-swizzle": "scale"}
"""The tables' categories that are not called as our buckets are."""

NOT_TOLD = (
    ("nvjet_sm120_qqtst_mma_128x128x64_6_64x64x64_tmaAB_bz", "cut: a suffix for its scales may be gone"),
    ("nvjet_sm90_qqtst_128x160_128x5", "cut: a suffix for its scales may be gone"),
    (
        "void deep_gemm::sm100_fp8_gemm_1d1d_impl<(cute::UMMA::Major)0, (cute::UMMA::Major)0, (unsigned int)",
        "cut before its type arguments: in versions of 2026 they may name FP4",
    ),
    (
        "cutlass3x_sm100_tensorop_s64x64x32gemm_f8_f8_f32_f16_f16_64x64x128_0_nnn_align16_1sm_bias_f16_gelu_aux_f16"
        "_scalemax",
        "`f8` is E4M3 or E5M2, chosen at run time",
    ),
)
"""(name, why): precisions that a table knows from elsewhere and the name alone does not tell."""


def table() -> list[dict[str, str]]:
    rows = []
    for name in TABLES:
        with (DATA / name).open(encoding="utf-8", newline="") as file:
            rows += list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return rows


def disagreement(row: dict[str, str]) -> str | None:
    """How `classify` reads a row differently from the table; None when they agree."""
    kernel = classify(row["kernel_name"])
    bucket = CATEGORY.get(row["category"], row["category"])
    where = row["kernel_name"][:120]
    if kernel.bucket != bucket:
        return f"{where}: table {bucket}, we {kernel.bucket} ({kernel.rule})"
    if kernel.convolution != (bucket == "gemm" and ("convolution" in row["note"] or "cudnn" in row["kernel_name"])):
        return f"{where}: convolution is {kernel.convolution}, note {row['note']!r}"
    said = row["gemm_input_precision_or_dash"]
    if bucket == "gemm" and not precision_agrees(said, row, kernel):
        return f"{where}: table {said}, we {kernel.precision} {kernel.operands} ({kernel.rule})"
    return None


def precision_agrees(said: str, row: dict[str, str], kernel: KernelClass) -> bool:
    """The table writes `fp8:e4m3+e5m2` for family and formats, `bf16` where they are the same, `-` for no product.

    A row that says `unknown` must say why, as must `NOT_TOLD` for the others.
    """
    if said == "-":
        return kernel.gemm_helper and kernel.operands is None
    if kernel.gemm_helper:
        return False
    if said == "unknown":
        return kernel.precision == said and row["note"] not in ("", "convolution")
    if row["kernel_name"] in dict(NOT_TOLD):
        return kernel.precision == "unknown"
    if said == "fp4:nvfp4":
        return kernel.operands == ("e2m1", "e2m1") and kernel.precision == "nvfp4"
    family, _, formats = said.partition(":")
    return kernel.precision == family and (not formats or "+".join(dict.fromkeys(kernel.operands or ())) == formats)


def test_every_row_of_the_tables() -> None:
    rows = table()
    wrong = [text for row in rows if (text := disagreement(row))]
    assert len(rows) > 700
    assert not wrong, "\n".join(wrong)


def test_what_a_name_does_not_tell_is_in_the_table_and_is_listed_once() -> None:
    names = {row["kernel_name"]: row["gemm_input_precision_or_dash"] for row in table()}
    for name, why in NOT_TOLD:
        assert why
        assert names[name] not in ("-", "unknown"), name
    assert len(dict(NOT_TOLD)) == len(NOT_TOLD)


def test_the_layout_of_tensile_names() -> None:
    rows = [row for row in table() if "Cijk_A" in row["kernel_name"]]
    assert len(rows) > 20
    for row in rows:
        assert classify(row["kernel_name"]).layout == row["note"].partition(";")[0], row["kernel_name"]


def test_every_name_of_the_table_reads_the_same_in_both_spellings() -> None:
    for row in table():
        name = row["kernel_name"]
        nsys = name.replace("(anonymous namespace)::", "<unnamed>::").replace(" const*", "*")
        nsys = re.sub(r"(?<=[<,] )(\d+)(?=[,>])", r"(int)\1", nsys)
        assert classify(nsys).bucket == classify(name).bucket, name
        assert classify(f"void {name.removeprefix('void ')}").operands == classify(name).operands, name


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
        ("nvfp4_expand_scale_to_fp8_kernel", "scale"),
        ("nvfp4_fused_scale_kernel", "scale"),
        ("nvfp4_multi_tensor_fused_scale_kernel", "scale"),
        ("void te::dispatch::nvfp4::quantize_ue5m3_kernel<__nv_bfloat16>(int)", "quantize"),
        ("_nvfp4_ue5m3_quantize_kernel", "quantize"),
        ("transposeGlobalKernel", "other"),
        ("void cudnn::cnn::kern_precompute_indices<false>(int*, int, int)", "other"),
        ("batched_transpose_32x32_half", "elementwise"),
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
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_Ablk128_TNT", ("e4m3", "e4m3"), None),
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_Avec64_Bvec64_TNT", ("e4m3", "e4m3"), None),
        ("nvjet_sm100_qqtst_128x128_128x6_2x1_v_bz_Avec16UE5M3_Bvec16UE5M3_TNT", ("e4m3", "e4m3"), None),
        ("nvjet_sm100_ootst_128x128_256x7_2x2_2cta_v_bz_Avec16UE5M3_Bvec16UE5M3_TNT", ("e2m1", "e2m1"), None),
        ("nvjet_sm100_ootst_128x128_256x7_2x2_2cta_v_bz_Avec16UE4M3_TNT", ("e2m1", "e2m1"), None),
        ("cutlass3x_sm100_bstensorop_s1gemm_block_scaled_ue4m3xe4m3_ue4m3xe4m3_f32_f16_f16_64x64", None, None),
        ("cutlass3x_sm100_bstensorop_s1gemm_block_scaled_ue5m3xe2m1_ue5m3xe2m1_f32", ("e2m1", "e2m1"), None),
        ("cutlass3x_sm100_bstensorop_s1gemm_block_scaled_ue8m0xe4m3_e4m3_f32", ("e4m3", "e4m3"), None),
        ("cutlass_80_tensorop_h16816gemm_e3m4_64x64_32x6_nn_align2", None, None),
        ("ampere_fp16_s1688gemm", None, None),  # cut: it would be TF32 if no type followed
        ("maxwell_fp16_sgemm_fp16_128x32_nn", None, None),
        ("void gemvNSP_kernel<cuComplex, cuComplex, float, float, 1, 32, 4, 1024>(int)", None, None),
        ("bmm_Bfloat16_E4m3E4m3_Fp32_t128x64x128_s8_rM_TN_sm100f", ("e4m3", "e4m3"), None),
        ("kernel_cutlass_gemm_tensorptri4_tensorptrf8E4M3FN_tensorptrf8E4M3FN_0", None, None),
        ("kernel_cutlass_gemm_tensorptrf4E2M1FN_tensorptrf4E2M1FN_tensorptrf8E4M3FN_0", ("e2m1", "e2m1"), None),
        ("_matmul_ogs_NNT_fp32xfp32xfp32_16x256x128x1", None, None),
        ("Cijk_Alik_Bljk_F8F8_HHS_BH_Bias_HA_S_SAB_SAV_MT128x128x64", None, None),  # widened to FP16
        ("Cijk_Alik_Bljk_F8B8_HHS_BH_Bias_HA_S_SAB_SAV_MT128x128x64", None, None),
        ("Cijk_Alik_Bljk_F8B8_F8B8BS_BH_Bias_HA_S_SABX_MT128x128x64", ("e4m3", "e5m2"), None),
        ("bmm_Bfloat16_E4m3E4m3_castBfloat16_Fp32_t128x64x128_s8_rM_TN_dsFp8_sm100f", None, None),
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
        assert operands is None or "scale" in kernel.rule


@pytest.mark.parametrize(
    "name",
    [
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(cublasLt::cublasSplitKParams<float>)",
        "void cublasLt::epilogue::impl::globalKernelBgradAB_v2<8, 128, __nv_bfloat16>(int, int)",
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<__nv_bfloat16 const> >(int)",
        "void cublasLt::epilogue::impl::globalKernel<8, 32, float, float, float, true, true, 1>(int, int)",
        "globalKernel",
        "Cijk_S_GA",
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
        ("aten::convolution", "gemm"),
        ("aten::cudnn_convolution", "gemm"),
        ("aten::_slow_conv2d_forward", "gemm"),
        ("ConvolutionBackward0", "gemm"),
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


@pytest.mark.parametrize("name", ["aten::conv2d", "aten::mkldnn_convolution", "ConvolutionBackward0"])
def test_a_convolution_operator_is_marked(name: str) -> None:
    assert classify(name).convolution
    assert not classify("aten::mm").convolution


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
    "multi_tensor_apply_kernel<", "Cijk_Alik_Bljk_", "F8", "BBS_", "MX", "_MT1x1x1", "CollectiveMma<", "wgrad_",
    "cutlass::float_e2m1_t,", "cute::tuple<", "_matmul_NNT_", "xmxfp4_1x1x1", "winograd",
    "sm100_fp8_fp4_gemm_1d1d_impl<",
])  # fmt: skip
NAMES = st.one_of(st.text(), st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=12).map("".join))


@given(NAMES, NAMES, st.sampled_from(["", "fprop"]), st.sampled_from(["", "optimizer"]))
def test_any_text_gets_a_known_bucket(name: str, op: str, role: str, phase: str) -> None:
    kernel = classify(name)
    assert kernel.bucket in BUCKETS
    assert is_precision(kernel.precision)
    assert kernel.rule
    no_product = kernel.operands is None and not kernel.gemm_helper and not kernel.convolution
    assert kernel.bucket == "gemm" or no_product
    assert bucket_in_context(name, op=op, module=op, role=role, phase=phase) in BUCKETS


@given(NAMES, NAMES)
def test_a_hadamard_kernel_is_never_a_gemm(before: str, after: str) -> None:
    name = f"{before}rht_gemm_device{after}"
    assert classify(name).bucket == "hadamard"
    assert bucket_in_context(name, role="fprop", phase="optimizer", op="aten::bmm") == "hadamard"


@given(NAMES, NAMES, st.sampled_from(["UE4M3", "ue4m3", "UE5M3", "ue5m3"]))
def test_the_scale_type_of_nvfp4_never_makes_an_fp8_gemm(before: str, after: str, scale: str) -> None:
    for name in (f"{before}{scale}{after}", f"nvjet_qqtst_{before}{scale}{after}_TNT"):
        assert classify(name).precision not in {"fp8", "fp8-block", "mxfp8"}


@given(st.sampled_from([row["kernel_name"] for row in table()]))
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


# --- Every grammar: the operands that are read are those that a name was made of ----------------------------


@dataclass(frozen=True)
class Grammar:
    """How a library names a GEMM of two operands."""

    name: Callable[[str, str], str]
    """The kernel's name, from the library's words for the types of A and B."""
    types: dict[str, str]
    """Word to format."""
    unknown: tuple[str, ...]
    """Words of the same look that no table has."""


def collective(a: str, b: str) -> str:
    """CUTLASS 3: the operands are the third and the fifth argument."""
    return (
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
        "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm100TmaUmmaWarpSpecialized<3, 2, 1, "
        "cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> > >, cute::tuple<cute::C<256>, cute::C<128>, cute::C<64> >, "
        f"{a}, cute::tuple<long, cute::C<1>, long>, {b}, cute::tuple<long, cute::C<1>, long>, "
        "cute::TiledMMA<int>, cute::SM100_TMA_2SM_LOAD>, cutlass::epilogue::collective::CollectiveEpilogue<"
        "cutlass::epilogue::Sm100TmaWarpSpecialized<4, 2, 16>, cutlass::half_t, cutlass::half_t> > >(int)"
    )


def deep_gemm(a: str, b: str) -> str:
    """DeepGEMM: the types of A, B and D, before the epilogue."""
    numbers = "128u, 128u, 0u, 0u, 0u, 16u, 128u, 128u, 1u, 128u, 128u, 128u, 12u, 128u, 128u, 2u, true, 148u, true"
    return (
        "void deep_gemm::sm100_fp8_fp4_gemm_1d1d_impl<(cute::UMMA::Major)0, (cute::UMMA::Major)0, "
        f"{numbers}, (deep_gemm::GemmType)0, false, {a}, {b}, cutlass::bfloat16_t, "
        "deep_gemm::epilogue::transform::EpilogueIdentity>(int*, unsigned int, CUtensorMap_st)"
    )


def threadblock(a: str, b: str) -> str:
    """CUTLASS 2: the second argument of the two iterators over global memory."""
    iterator = "cutlass::transform::threadblock::PredicatedTileAccessIterator<cutlass::MatrixShape<128, 64>, "
    return (
        "void cutlass::Kernel2<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::threadblock::MmaMultistage<"
        f"cutlass::gemm::GemmShape<128, 256, 64>, {iterator}{a}, cutlass::layout::RowMajor, 1>, "
        f"cutlass::transform::threadblock::RegularTileAccessIterator<cutlass::MatrixShape<128, 64>, {a}>, "
        f"(cutlass::arch::CacheOperation::Kind)1, {iterator}{b}, cutlass::layout::ColumnMajor, 0>, float> > >(int)"
    )


def tensile(a: str, b: str) -> str:
    """Tensile: one type, or two narrow ones, or a field for the two in memory and one for what is multiplied."""
    narrow = re.fullmatch(r"[FB]\d\w*", a) and re.fullmatch(r"[FB]\d\w*", b)
    types = f"{a}BS" if a == b else f"{a}{b}BS" if narrow else f"{a}{b}_HHS"
    return f"Cijk_Alik_Bljk_{types}_BH_Bias_HA_S_SAV_UserArgs_MT128x128x64_MI16x16x1"


def gemv(a: str, b: str) -> str:
    """cuBLAS: the type arguments, and the same again in the parameter block."""
    tensors = f"cublasGemvTensorStridedBatched<{a} const>, cublasGemvTensorStridedBatched<{b} const>"
    return (
        f"void gemv2T_kernel_val<int, int, {a}, {b}, float, float, 128, 16, 4, 4, false, false, "
        f"cublasGemvParamsEx<int, {tensors}, cublasGemvTensorStridedBatched<float>, float> >(int)"
    )


CUTLASS = {
    "cutlass::float_e4m3_t": "e4m3", "cutlass::float_e5m2_t": "e5m2", "cutlass::float_e2m1_t": "e2m1",
    "cutlass::detail::float_e2m1_unpacksmem_t": "e2m1", "cutlass::bfloat16_t": "bf16", "cutlass::half_t": "fp16",
    "cutlass::tfloat32_t": "tf32", "cutlass::int4b_t": "int4", "__nv_fp8_e4m3": "e4m3", "__nv_fp4_e2m1": "e2m1",
    "__nv_bfloat16": "bf16", "__half": "fp16", "c10::Float8_e5m2": "e5m2", "c10::BFloat16": "bf16",
}  # fmt: skip
STRANGE = ("cutlass::float_e3m4_t", "cutlass::float_ue4m3_t", "cutlass::type_erased_dynamic_float8_t", "cuComplex")
SCALED = {
    "cutlass::mx_float8_t<cutlass::float_e4m3_t>": "e4m3",
    "cutlass::nv_float4_t<cutlass::float_e2m1_t>": "e2m1",
    "cute::tuple<cutlass::float_e5m2_t, cutlass::float_ue8m0_t>": "e5m2",
    "cute::tuple<cutlass::float_e2m1_t, cutlass::float_ue4m3_t>": "e2m1",
}
GRAMMARS = {
    "nvjet": Grammar(
        lambda a, b: f"nvjet_sm100_{a}{b}tst_128x256_128x6_2x1_2cta_v_bz_TNT",
        {"s": "fp32", "h": "fp16", "t": "bf16", "q": "e4m3", "r": "e5m2", "o": "e2m1", "b": "int8", "d": "fp64"},
        ("x", "u", "z"),
    ),
    "xmma": Grammar(
        lambda a, b: f"sm90_xmma_gemm_{a}bf16_{a if a == b else a + b}f32_f32_tn_n_tilesize128x128x128_kernel",
        {"e4m3": "e4m3", "e5m2": "e5m2", "bf16": "bf16", "f16": "fp16", "tf32": "tf32"},
        ("e3m4", "e2m1x", "u4"),
    ),
    "cutlass3x": Grammar(
        lambda a, b: f"cutlass3x_sm100_tensorop_s64x64x32gemm_{a}_{b}_f32_f16_f16_64x64x128_0_ntn_align16_1sm",
        {"e4m3": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1", "bf16": "bf16", "f16": "fp16", "s8": "int8"},
        ("f8", "e3m4", "ue4m3xe4m3"),
    ),
    "cutlass2": Grammar(
        lambda a, b: f"cutlass_80_tensorop_s16816gemm_{a if a == b else f'{a}_{b}'}_128x128_32x5_nn_align8",
        {"bf16": "bf16", "f16": "fp16", "s8": "int8"},
        ("e4m3", "s4"),
    ),
    "trtllm": Grammar(
        lambda a, b: f"bmm_Bfloat16_{a}{b}_Fp32_Ab16_Bb16_t128x16x256u2_s3_et128x16_rM_TN_transOut_sm100f",
        {"E2m1": "e2m1", "E4m3": "e4m3", "MxE2m1": "e2m1", "MxE4m3": "e4m3", "MxInt4": "int4", "Bfloat16": "bf16",
         "Fp16": "fp16", "E5m2": "e5m2"},
        ("E3m4", "MxE2m3", "Xyz8"),
    ),
    "cute": Grammar(
        lambda a, b: f"kernel_cutlass__gemm_kernel_tensorptr{a}gmemo1_tensorptr{b}gmemo5_tensorptrbf16gmem_0",
        {"f4E2M1FN": "e2m1", "f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "bf16": "bf16", "f16": "fp16"},
        ("f8E3M4", "i4", "f8E4M3B11FNUZ"),
    ),
    "triton": Grammar(
        lambda a, b: f"_matmul_ogs_NNT_bf16x{a}x{b}_32x256x128x1_swiglu",
        {"bf16": "bf16", "fp16": "fp16", "fp8e4nv": "e4m3", "fp8e5": "e5m2", "mxfp4": "e2m1", "i8": "int8"},
        ("fp8", "nvfp4", "fp8e4b15"),
    ),
    "deep_gemm": Grammar(deep_gemm, CUTLASS, STRANGE),
    "collective": Grammar(collective, CUTLASS | SCALED, STRANGE),
    "threadblock": Grammar(threadblock, CUTLASS, STRANGE),
    "gemv": Grammar(gemv, CUTLASS | {"float": "fp32", "double": "fp64"}, STRANGE),
    "tensile": Grammar(
        tensile,
        {"H": "fp16", "B": "bf16", "D": "fp64", "S": "fp32", "X": "tf32", "I8": "int8", "F8": "e4m3", "F8N": "e4m3",
         "B8": "e5m2", "B8N": "e5m2", "F4": "e2m1", "F6": "e2m3", "B6": "e3m2"},
        ("Q8", "U4", "E5M3", "I64"),
    ),
}  # fmt: skip


@st.composite
def words(draw: st.DrawFn) -> tuple[Grammar, str, str, str]:
    """A grammar, two of its types and one that it does not know."""
    grammar = GRAMMARS[draw(st.sampled_from(sorted(GRAMMARS)))]
    kind = st.sampled_from(sorted(grammar.types))
    return grammar, draw(kind), draw(kind), draw(st.sampled_from(grammar.unknown))


@given(words())
@settings(max_examples=200)
def test_the_operands_are_those_that_a_name_was_made_of(made: tuple[Grammar, str, str, str]) -> None:
    grammar, a, b, _ = made
    kernel, formats = classify(grammar.name(a, b)), (grammar.types[a], grammar.types[b])
    assert (kernel.bucket, kernel.operands) == ("gemm", formats), grammar.name(a, b)
    assert not kernel.gemm_helper
    if formats[0] != formats[1] and not {"e4m3", "e5m2"}.issuperset(formats):
        assert kernel.precision == " x ".join(formats)


@given(words())
@settings(max_examples=200)
def test_another_type_for_one_operand_is_never_one_format(made: tuple[Grammar, str, str, str]) -> None:
    grammar, a, b, _ = made
    for name in (grammar.name(a, b), grammar.name(b, a)):
        precision = classify(name).precision
        fp8 = {"e4m3", "e5m2"}.issuperset((grammar.types[a], grammar.types[b]))
        assert grammar.types[a] == grammar.types[b] or fp8 or precision not in SINGLE, name


@given(words())
@settings(max_examples=200)
def test_a_type_that_is_not_known_makes_the_product_unknown(made: tuple[Grammar, str, str, str]) -> None:
    grammar, a, _, strange = made
    for name in (grammar.name(a, strange), grammar.name(strange, a), grammar.name(strange, strange)):
        kernel = classify(name)
        assert (kernel.bucket, kernel.operands, kernel.precision) == ("gemm", None, "unknown"), name


@given(words(), st.integers(1, 400))
@settings(max_examples=200)
def test_a_name_that_was_cut_says_nothing_else(made: tuple[Grammar, str, str, str], length: int) -> None:
    """Nsight's tables and some profilers cut names: what is left may say less than the whole, but nothing else."""
    grammar, a, b, _ = made
    whole = classify(grammar.name(a, b))
    kernel = classify(grammar.name(a, b)[:length])
    assert kernel.operands in (None, whole.operands)
    assert kernel.precision in ("unknown", whole.precision)


@given(st.sampled_from([row["kernel_name"] for row in table()]), st.integers(1, 400))
@settings(max_examples=200)
def test_a_name_of_the_tables_that_was_cut_says_nothing_else(name: str, length: int) -> None:
    whole, kernel = classify(name), classify(name[:length])
    assert kernel.operands in (None, whole.operands), name[:length]
    assert kernel.precision in ("unknown", whole.precision), name[:length]


@pytest.mark.parametrize(
    ("a", "b", "instruction", "operands"),
    [
        ("cutlass::float_e4m3_t", "cutlass::float_e5m2_t", "F32E4M3E5M2", ("e4m3", "e5m2")),
        ("cutlass::float_e4m3_t", "cutlass::float_e4m3_t", "F32BF16BF16", None),
        ("cutlass::float_e4m3_t", "cutlass::float_e5m2_t", "F32BF16BF16", None),
        ("cutlass::int4b_t", "cutlass::bfloat16_t", "F32BF16BF16", ("int4", "bf16")),
        ("float", "float", "F32TF32TF32", ("tf32", "tf32")),
        ("float", "float", "F32BF16BF16", None),
    ],
)
def test_what_the_instruction_takes_counts(a: str, b: str, instruction: str, operands: tuple[str, str] | None) -> None:
    atom = f"cute::TiledMMA<cute::MMA_Atom<cute::SM90::GMMA::MMA_64x128x16_{instruction}_SS<0> > >"
    assert classify(collective(a, b).replace("cute::TiledMMA<int>", atom)).operands == operands


def test_a_mixture_satisfies_no_recipe_and_looks_up_no_bits() -> None:
    """What the verdicts do with a precision: compare it, and look up its bits with a default."""
    asked = [Operands(pair, (scaling,) * 2) for pair in (("e4m3", "e4m3"), ("e4m3", "e5m2")) for scaling in SCALINGS]
    asked += [Operands((form, form), ("none", "none")) for form in ("bf16", "fp16", "fp32")]
    asked += [Operands(("e2m1", "e2m1"), ("nvfp4-16", "nvfp4-16"))]
    for row in table():
        precision = classify(row["kernel_name"]).precision
        if " x " in precision or precision == "unknown":
            assert precision not in BITS
            assert not any(kernel_fits(operands, precision) for operands in asked)


SCALINGS = ("tensor", "outer-vec", "block-128", "mx-32")
