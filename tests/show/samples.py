"""Reports to look at: what the product says about five runs. Made by hand, (a) and (b) with measured figures.

a  `codonfm`      a 5-billion-parameter model on an H200: FP8 pays, and the gap says where the rest went
b  `seed`         a small model on the same GPU: launch-bound, FP8 makes it slower
c  `cpu`          plain torch on a CPU: bf16 against fp32
d  `interrupted`  as (a), stopped early: some recipes have no trace, ledger or benchmark
e  `fallback`     some layers did not run in the precision asked for
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowprec_callback.analyze.finding_case import Case
from lowprec_callback.analyze.findings import findings
from lowprec_callback.report import Gap, GapTerm, RecipeReport, Report, Speedups, Verdict, VerdictWord

from .sample_codonfm import CODONFM_OPERATIONS, codonfm
from .sample_parts import TITLES, derived, gemm_rows, measured, missing, samples_around, verdict
from .sample_small import cpu, seed


def interrupted() -> Report:
    """Sample d."""
    whole = codonfm()
    stopped = "the run was interrupted before this recipe's traced step"
    no_gemm = "cublasLt refused the shape: CUBLAS_STATUS_NOT_SUPPORTED [kernel-only, wgrad]"
    bf16, delayed, current, block, *others = whole.recipes
    assert delayed.ledger is not None
    assert delayed.gap is not None
    assert delayed.speedups is not None
    delayed = replace(
        delayed,
        ledger=replace(
            delayed.ledger,
            complete=False,
            residual=missing("61 of 288 GEMM kernels are missing from the trace"),
            complaints=("61 of 288 GEMM kernels are missing from the trace", "residual above 1% of the step"),
            unknown_kernels=("void my_ext::fused_rope_kernel<c10::BFloat16, 128>(Params)",),
        ),
        gap=replace(
            delayed.gap,
            terms=(
                *delayed.gap.terms[:2],
                GapTerm("quantization", missing("the trace lost kernels"), "quantize, amax, scale"),
                *delayed.gap.terms[3:5],
                GapTerm("residual", missing("a term of the sum is missing: the trace lost kernels")),
            ),
        ),
    )
    current = replace(
        current,
        step_ms=measured(539.2, 4.1),
        samples=samples_around(539.2, 2.0, rounds=1, each=3),
        speedups=Speedups(missing(no_gemm, "x"), derived(1.656), missing(stopped, "x"), derived(1.519, 0.012)),
        ledger=None,
        no_ledger=stopped,
        gap=Gap("bf16", "fp8_current", bf16.step_ms, measured(539.2, 4.1), (), f"no ledger: {stopped}"),
        gemms=gemm_rows(CODONFM_OPERATIONS, None, (3.908, 1.398, 5.149, 5.183), no_gemm),
        gemm_kernel_ms=missing(f"a term of the sum is missing: {no_gemm}"),
        verdict=None,
        loss=missing("not recorded", "nats"),
    )
    block = RecipeReport(
        "fp8_block",
        TITLES["fp8_block"],
        False,
        step_ms=missing("the run was interrupted before its first timed step"),
        host_ms=missing("the run was interrupted before its first timed step"),
        no_ledger=stopped,
        gemm_kernel_ms=missing("the run was interrupted before its benchmark"),
        gemm_autocast_ms=missing("the run was interrupted before its benchmark"),
    )
    return replace(
        whole,
        status="interrupted",
        headline=(
            "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms, ±0.3).",
            "The run was interrupted (KeyboardInterrupt) after 61 of 128 steps; fp8_block was never timed.",
        ),
        reading=(),
        recipes=(bf16, delayed, current, block, *others),
        problems=(
            "sweep: KeyboardInterrupt in round 1; what was measured until then is kept",
            "trace of fp8_delayed: the profiler lost kernels at the start of its session",
        ),
        recording="runs/interrupted/recording.jsonl",
    )


def fallback() -> Report:
    """Sample e."""
    whole = codonfm()
    bf16, delayed, current, *_ = whole.recipes

    def odd(module: str, role: str) -> tuple[VerdictWord, str, str] | None:
        layer = int(module.split(".")[1])
        if module.endswith("mlp.fc2") and layer >= 20:
            why = "opened inside te.autocast(enabled=False) by the model itself"
            return ("fallback", "bf16", why)
        if module == "layers.0.attention.qkv":
            return ("outside", "bf16", "torch.nn.Linear: TE's recipe does not reach it")
        if module == "layers.7.mlp.fc1" and role == "wgrad":
            return ("unproven", "unknown", "no GEMM was seen in the traced steps")
        return None

    summary = "273 of 288 linear-layer GEMMs ran in FP8; 12 fell back, 3 are outside TE, 1 is unproven."
    delayed = replace(
        delayed,
        verdict=verdict(
            24,
            "e4m3/e5m2",
            odd,
            summary,
            disagreements=("layers.3.mlp.fc1 dgrad: operands say e4m3 x e5m2, kernel nvjet_tst_192x192 says bf16",),
            slow_paths=("attention runs unfused: TE loaded cuDNN 9.14 and torch ships 9.19; 9.6 ms a step",),
        ),
    )
    current = replace(
        current,
        verdict=Verdict(
            missing("no operand was seen: the witness could not be attached", "share"),
            missing("no operand was seen: the witness could not be attached", "share"),
            (),
            "Nothing is known about what ran.",
        ),
    )
    return replace(
        whole,
        headline=(
            "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms, ±0.3), but 5.6% of its FLOPs did not "
            "run as asked.",
        ),
        recipes=(bf16, delayed, current),
        recording="runs/fallback/recording.jsonl",
    )


def with_findings(report: Report) -> Report:
    """A sample with what the catalogue finds in its recipes; it has no Recording, so no kernels and no clocks."""
    ran = tuple(part for part in report.recipes if part.refusal is None)
    base = report.recipe(report.baseline)
    on_cpu, te = report.device == cpu().device, report.engine == "transformer_engine"
    return replace(report, findings=findings(Case(part, base, ran, te=te, on_cpu=on_cpu) for part in ran))


ALL: dict[str, Callable[[], Report]] = {
    "codonfm": lambda: with_findings(codonfm()),
    "seed": lambda: with_findings(seed()),
    "cpu": lambda: with_findings(cpu()),
    "interrupted": lambda: with_findings(interrupted()),
    "fallback": lambda: with_findings(fallback()),
}
