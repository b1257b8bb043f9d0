"""Builders of synthetic Recordings: a small GPT of TE layers on an H200, or of `nn.Linear` on a CPU.

Kernel names are real (from profiles of an H200); times are made up, so that every answer is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowprec_callback.recording import (
    ROLES,
    Card,
    Clocks,
    Dispatch,
    End,
    Environment,
    Fact,
    Gemm,
    GemmTime,
    Header,
    HostTime,
    Loss,
    Memory,
    Model,
    Operand,
    Plan,
    Recording,
    Refusal,
    Restored,
    Role,
    Scales,
    StepProducts,
    StepTime,
    Trace,
)

BF16_CARD = Card("bf16", "BF16", ("bf16", "bf16"), ("bf16", "bf16"), ("bf16", "bf16"), "none", baseline=True)
DELAYED_CARD = Card(
    "fp8_delayed", "FP8, delayed scaling", ("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e4m3", "e5m2"), "tensor-delayed"
)
CURRENT_CARD = replace(DELAYED_CARD, recipe="fp8_current", title="FP8, current scaling", scaling="tensor-current")
BLOCK_CARD = Card("fp8_block", "FP8 blocks", ("e4m3", "e4m3"), ("e4m3", "e4m3"), ("e4m3", "e4m3"), "block-128")
NVFP4_CARD = Card("nvfp4", "NVFP4", ("e2m1", "e2m1"), ("e2m1", "e2m1"), ("e2m1", "e2m1"), "nvfp4-16")
FP32_CARD = Card("fp32", "FP32", ("fp32", "fp32"), ("fp32", "fp32"), ("fp32", "fp32"), "none", baseline=True)
CARDS = {card.recipe: card for card in (BF16_CARD, DELAYED_CARD, CURRENT_CARD, BLOCK_CARD, NVFP4_CARD, FP32_CARD)}

GEMM_NAMES: dict[str, dict[str, str]] = {
    "bf16": {
        "fprop": "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
        "dgrad": "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN",
        "wgrad": "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NTT",
    },
    "fp8_delayed": {
        "fprop": "nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_TNN",
        "dgrad": "nvjet_sm90_qrtst_144x128_128x6_1x2_h_bz_coopA_algo2_TNN",
        "wgrad": "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT",
    },
    "fp8_block": {
        "fprop": "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNN",
        "dgrad": "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNN",
        "wgrad": "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Avec128_Bvec128_TNT",
    },
    "mxfp8": dict.fromkeys(ROLES, "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT"),
}
GEMM_NAMES["fp8_current"] = GEMM_NAMES["fp8_delayed"]
GEMM_NAMES["nvfp4"] = dict.fromkeys(ROLES, "nvjet_sm100_ootst_128x192_128x6_2x1_2cta_h_bz_Avec16UE4M3_Bvec16UE4M3_TNT")
GEMM_NAMES["fp16"] = dict.fromkeys(ROLES, "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT")
GEMM_NAMES["fp32"] = dict.fromkeys(ROLES, "nvjet_sm90_sss_tf32_128x64_32x6_2x1_v_bz_TNN")
E4M3_NAME, E5M2_NAME = GEMM_NAMES["fp8_delayed"]["fprop"], GEMM_NAMES["fp8_delayed"]["wgrad"]
CAST = (
    "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*, __nv_fp8_e4m3*, float const*, "
    "float*, float*, unsigned long, unsigned long)"
)
NORM = (
    "void transformer_engine::normalization::ln_fwd_tuned_kernel<transformer_engine::normalization::Kernel_traits<"
    "__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, unsigned int, 4096u, 1u, 1u, 4u, 16u> >"
)
FUSED_ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_kernel0_0"
SOFTMAX = (
    "void transformer_engine::scaled_masked_softmax_warp_forward<__nv_bfloat16, __nv_bfloat16, float, 9>("
    "__nv_bfloat16*, __nv_bfloat16 const*, unsigned char const*, float, int, int, int)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false> >"
)
UNKNOWN_GEMM = "cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>"


@dataclass(frozen=True)
class Linear:
    """A linear layer of the model."""

    module: str
    m: int
    k: int
    n: int
    family: str = "Linear"
    quantizable: bool = True


def te_linears(layers: int = 2, tokens: int = 1024, hidden: int = 256) -> list[Linear]:
    """Four linears a layer, and a plain LM head."""
    found = []
    for i in range(layers):
        found += [
            Linear(f"layers.{i}.self_attention.layernorm_qkv", tokens, hidden, 3 * hidden, "LayerNormLinear"),
            Linear(f"layers.{i}.self_attention.proj", tokens, hidden, hidden),
            Linear(f"layers.{i}.layernorm_mlp.fc1", tokens, hidden, 4 * hidden, "LayerNormMLP"),
            Linear(f"layers.{i}.layernorm_mlp.fc2", tokens, 4 * hidden, hidden, "LayerNormMLP"),
        ]
    return [*found, Linear("lm_head", tokens, hidden, 96, "nn.Linear", quantizable=False)]


def gemms(linears: Iterable[Linear], calls: int = 1) -> list[Gemm]:
    """All roles of all linears."""
    return [
        Gemm(lin.module, role, lin.m, lin.k, lin.n, calls, lin.family, lin.quantizable)
        for lin in linears
        for role in ROLES
    ]


def gemm_times(
    recipe: str, linears: Iterable[Linear], kernel_ms: float, autocast_ms: float, names: bool = True
) -> list[GemmTime]:
    """The same time for each shape and role, with a little spread."""
    found = []
    for shape in dict.fromkeys((lin.m, lin.k, lin.n, lin.family) for lin in linears):
        for role in ROLES:
            for mode, ms in (("kernel", kernel_ms), ("autocast", autocast_ms)):
                found.append(
                    GemmTime(
                        recipe,
                        role,
                        *shape[:3],
                        mode,  # type: ignore[arg-type]
                        samples_ms=tuple(ms * factor for factor in (0.99, 1.0, 1.01, 1.0, 1.002)),
                        family=shape[3],
                        kernels=(GEMM_NAMES[recipe][role],) if names and recipe in GEMM_NAMES else (),
                    )
                )
    return found


def operand(form: str, scaling: str, storage: str = "Float8Tensor") -> Operand:
    return Operand("Tensor" if scaling == "none" else storage, form, scaling)


def dispatch(
    recipe: str, lin: Linear, role: Role, card: Card, calls: int = 1, in_region: bool | None = None
) -> Dispatch:
    """What a card asks for, as it would be seen at the GEMM's entry."""
    formats = {"fprop": card.fprop, "dgrad": card.dgrad, "wgrad": card.wgrad}[role]
    first, second = (operand(form, card.scaling if form[0] == "e" else "none") for form in formats)
    layout = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}[role]
    return Dispatch(
        recipe, lin.module, role, lin.m, lin.k, lin.n, calls, layout, first, second, "bf16", False, "generic_gemm",
        lin.family, in_region,
    )  # fmt: skip


def dispatches(recipe: str, linears: Iterable[Linear], card: Card | None = None) -> list[Dispatch]:
    """Everything as the recipe asks; a layer that no recipe reaches runs in bf16."""
    card = card or CARDS[recipe]
    return [
        dispatch(recipe, lin, role, card if lin.quantizable else BF16_CARD, in_region=None)
        for lin in linears
        for role in ROLES
    ]


def kernel_name(first: Operand, other: Operand) -> str:
    """The kernel that multiplies such operands."""
    if "unknown" in (first.format, other.format):
        return UNKNOWN_GEMM
    scaled = {"block-128": "fp8_block", "mx-32": "mxfp8", "nvfp4-16": "nvfp4"}
    if first.scaling in scaled:
        return GEMM_NAMES[scaled[first.scaling]]["fprop"]
    if first.scaling != "none":
        return E5M2_NAME if "e5m2" in (first.format, other.format) else E4M3_NAME
    return GEMM_NAMES[first.format]["fprop"]


def mirrored(seen: Iterable[Dispatch], us: float = 10.0) -> list[Kernel]:
    """The kernels of a step in which the operands are those that were seen."""
    return [
        Kernel(kernel_name(fact.weight_or_input, fact.other), us, fact.module, fact.role)
        for fact in seen
        for _ in range(fact.calls)
    ]


@dataclass(frozen=True)
class Kernel:
    """A kernel to put into a trace."""

    name: str
    us: float
    module: str = ""
    role: str = ""
    op: str = ""
    phase: str = ""
    stream: int = 7
    start: float | None = None
    """None: right after the kernel before it."""


def trace(recipe: str, kernels: Sequence[Kernel], wall_ms: float, step: int = 0, expected: int | None = None) -> Trace:
    """Kernels one after the other, from time zero."""
    names: dict[str, int] = {}
    labels: dict[str, int] = {"": 0}
    now = 0.0
    starts: list[float] = []
    for kernel in kernels:
        starts.append(now if kernel.start is None else kernel.start)
        now = max(now, starts[-1] + kernel.us)
    columns: dict[str, Any] = {
        field: tuple(labels.setdefault(getattr(kernel, field), len(labels)) for kernel in kernels)
        for field in ("module", "role", "op", "phase")
    }
    return Trace(
        recipe=recipe,
        step=step,
        wall_ms=wall_ms,
        names=tuple(dict.fromkeys(kernel.name for kernel in kernels)),
        name=tuple(names.setdefault(kernel.name, len(names)) for kernel in kernels),
        labels=tuple(labels),
        start_us=tuple(starts),
        duration_us=tuple(kernel.us for kernel in kernels),
        stream=tuple(kernel.stream for kernel in kernels),
        launch_us=tuple(math.nan if index % 7 == 3 else start for index, start in enumerate(starts)),
        expected_gemms=expected,
        **columns,
    )


def step_products(
    recipe: str,
    kernels: Sequence[Kernel],
    step: int = 0,
    compiled: tuple[str, ...] = (),
    on_cpu: bool = False,
    ranged: bool = False,
) -> StepProducts:
    """A step that ran as the timed ones do: its kernels bear no module. On a CPU: operators, which tell their types.

    `ranged`: one with ranges, whose kernels do.
    """
    names: dict[str, int] = {}
    labels: dict[str, int] = {"": 0}

    def column(texts: Iterable[str]) -> tuple[int, ...]:
        return tuple(labels.setdefault(text, len(labels)) for text in texts)

    nothing = (0,) * len(kernels)
    told = [kernel.name if on_cpu else "" for kernel in kernels]
    return StepProducts(
        recipe, step, ranged,
        name=tuple(names.setdefault("aten::mm" if on_cpu else kernel.name, len(names)) for kernel in kernels),
        module=column(kernel.module for kernel in kernels) if ranged else nothing,
        role=column(kernel.role for kernel in kernels) if ranged else nothing,
        op=column(kernel.op for kernel in kernels),
        phase=column(kernel.phase for kernel in kernels),
        formats=column(told),
        names=tuple(names),
        labels=tuple(labels),
        compiled=compiled,
    )  # fmt: skip


def step_kernels(
    recipe: str, linears: Iterable[Linear], gemm_us: float, cast_us: float = 0.0, rest_us: float = 500.0
) -> list[Kernel]:
    """One step: all GEMMs, casts before them, then attention, norm and optimizer."""
    found: list[Kernel] = []
    for lin in linears:
        for role in ROLES:
            if cast_us and lin.quantizable:
                found.append(Kernel(CAST, cast_us, lin.module))
            name = GEMM_NAMES[recipe if lin.quantizable else "bf16"][role]
            found.append(Kernel(name, gemm_us, lin.module, role))
    found.append(Kernel(FUSED_ATTENTION, rest_us, "layers.0.self_attention.core_attention"))
    found.append(Kernel(NORM, rest_us / 2, "layers.0.self_attention.layernorm_qkv"))
    found.append(Kernel(ADAM, rest_us, phase="optimizer"))
    return found


def timed(recipe: str, ms: float, rounds: int = 3, steps: int = 6, spread: float = 0.002) -> list[StepTime]:
    """Step times around `ms`, the same every time."""
    return [
        StepTime(recipe, number, index, ms * (1 + spread * math.sin(7 * index + 3 * number)), ms)
        for number in range(rounds)
        for index in range(steps)
    ]


HEADER = Header(1, "0.1.0", "2026-01-02T03:04:05+01:00")
H200 = Environment(
    "NVIDIA H200", "cuda", (9, 0), {"torch": "2.11.0", "transformer_engine": "2.20.2", "python": "3.11.9"}
)
NVFP4_REFUSAL = Refusal("nvfp4", "compute capability 9.0, needs 10.0", "te.is_nvfp4_available")


@dataclass(frozen=True)
class Speeds:
    """One recipe's made-up times: the timed step, its GEMM kernels, casts and the rest in it, and the benchmark."""

    step_ms: float
    gemm_us: float
    cast_us: float
    kernel_ms: float
    autocast_ms: float
    host_ms: float


BF16 = Speeds(step_ms=10.0, gemm_us=300.0, cast_us=0.0, kernel_ms=0.29, autocast_ms=0.29, host_ms=4.0)
DELAYED = Speeds(step_ms=6.4, gemm_us=150.0, cast_us=20.0, kernel_ms=0.145, autocast_ms=0.17, host_ms=5.0)


def gpu_facts(
    speeds: dict[str, Speeds] | None = None, layers: int = 2, end: bool = True, rounds: int = 3
) -> list[Fact]:
    """A finished run on an H200: bf16, fp8_delayed, and nvfp4 refused."""
    speeds = speeds or {"bf16": BF16, "fp8_delayed": DELAYED}
    linears = te_linears(layers)
    names = tuple(speeds)
    facts: list[Fact] = [
        HEADER,
        H200,
        Model("MiniGPT", "transformer_engine", "the model holds TE modules", 1000, 2000),
        *(CARDS[name] for name in names),
        NVFP4_CARD,
        NVFP4_REFUSAL,
        Plan((*names, "nvfp4"), "bf16", rounds, 2, 6, 2, 0, 1, 40),
        *gemms(linears),
    ]
    for name, s in speeds.items():
        reached = [lin for lin in linears if lin.quantizable or name == "bf16"]
        facts += gemm_times(name, reached, s.kernel_ms, s.autocast_ms)
    for number in range(rounds):
        for name, s in speeds.items():
            facts += [step for step in timed(name, s.step_ms, rounds) if step.round == number]
            facts += [
                HostTime(name, number, s.host_ms),
                Loss(name, number, 4.0 - 0.1 * number, 1.0),
                Clocks(name, number, 1755, 640.0, 61, ("sw_power_cap",) if number == 1 else ()),
                Memory(name, number, "forward", 10**9, 2 * 10**9, 4 * 10**9),
                Memory(name, number, "step", 10**9, 3 * 10**9 + number, 4 * 10**9),
            ]
            if name == "fp8_delayed":
                facts.append(
                    Scales(
                        name, linears[0].module, "fwd", ("input", "weight"), (16.0, 32.0), (3.0, 1.0), (4.0, 2.0), 1024
                    )
                )
    for name, s in speeds.items():
        for step in range(2):
            kernels = step_kernels(name, linears, s.gemm_us, s.cast_us)
            facts.append(trace(name, kernels, s.step_ms * 1.3, step, expected=3 * len(linears)))
        facts += dispatches(name, linears)
    facts.append(Restored(("module", "optimizer", "rng"), True, "bit-identical"))
    if end:
        facts.append(End("finished"))
    return facts


def gpu_recording(**arguments: Any) -> Recording:
    return Recording.from_facts(gpu_facts(**arguments))


SEED_BF16 = Speeds(step_ms=27.0, gemm_us=300.0, cast_us=0.0, kernel_ms=0.29, autocast_ms=0.29, host_ms=26.4)
SEED_DELAYED = Speeds(step_ms=35.9, gemm_us=150.0, cast_us=20.0, kernel_ms=0.145, autocast_ms=0.17, host_ms=35.6)
"""The launch-bound case: FP8 kernels are faster, and the step is slower."""


def cpu_facts() -> list[Fact]:
    """fp32 against bf16 on a CPU: operators in the trace, no kernels, no memory."""
    linears = [replace(lin, family="nn.Linear", quantizable=True) for lin in te_linears(1)]
    bf16 = replace(BF16_CARD, baseline=False)
    facts: list[Fact] = [
        HEADER,
        Environment("Some CPU", "cpu"),
        Model("MiniGPT", "plain_torch", "no GPU", 1000, 4000),
        FP32_CARD,
        bf16,
        Plan(("fp32", "bf16"), "fp32", 2, 1, 4, 1, 0, 1, 14),
        *gemms(linears),
        *gemm_times("fp32", linears, 3.0, 3.0, names=False),
        *gemm_times("bf16", linears, 2.0, 2.5, names=False),
        *timed("fp32", 100.0, rounds=2, steps=4),
        *timed("bf16", 80.0, rounds=2, steps=4),
        Loss("fp32", 0, 3.0),
        Loss("bf16", 0, 3.0),
    ]
    for name, card, us in (("fp32", FP32_CARD, 4000.0), ("bf16", bf16, 3000.0)):
        operators = [Kernel("aten::mm", us, lin.module, role) for lin in linears for role in ROLES]
        operators += [Kernel("aten::add_", 5000.0, op="aten::add_"), Kernel("aten::copy_", 3000.0, op="aten::copy_")]
        facts.append(trace(name, operators, 150.0, expected=len(operators) - 2))
        facts += [replace(fact, entry="aten::mm") for fact in dispatches(name, linears, card)]
        products = [
            Kernel(" x ".join(getattr(card, role)), us, phase="forward" if role == "fprop" else "backward")
            for lin in linears
            for role in ROLES
        ]
        facts += [step_products(name, products, number, on_cpu=True) for number in range(2)]
    return [*facts, Restored(("module",), True), End("finished")]
