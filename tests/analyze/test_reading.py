from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lowprec_callback.analyze.reading import Scene, headline, idle_share, launch_bound, reading
from lowprec_callback.report import BUCKETS, Figure, Gap, GapTerm, Ledger, RecipeReport, Speedups, Verdict, VerdictRow


def ms(value: float) -> Figure:
    return Figure(value, "ms")


def book(wall: float, idle: float, gemm: float) -> Ledger:
    parts = {name: ms(0.0) for name in BUCKETS}
    parts["gemm"], parts["other"] = ms(gemm), ms(0.0)
    return Ledger(ms(wall), parts, ms(idle), ms(wall - idle - gemm), ms(gemm), True)


def verdict(word: str = "confirmed", summary: str = "All TE GEMMs ran in FP8: 24 layers x 4 x 3.") -> Verdict:
    row = VerdictRow("a", "fprop", 1, 1, 1, 1, "fp8", "fp8", word, "why")  # type: ignore[arg-type]
    return Verdict(Figure(1.0, "share"), Figure(1.0, "share"), (row,), summary)


def part(
    name: str,
    step: float,
    speed: float = 1.0,
    kernel: float | None = 1.92,
    autocast: float | None = 1.73,
    amdahl: float | None = 1.64,
    host: float | None = None,
    idle: float | None = None,
    gemm: float = 0.0,
    half: float | None = 0.01,
    terms: dict[str, float] | None = None,
    **other: object,
) -> RecipeReport:
    def factor(value: float | None) -> Figure:
        return Figure.missing("x", "not benchmarked") if value is None else Figure(value, "x")

    measured = (
        Figure(speed, "x", n=16) if half is None else Figure(speed, "x", low=speed - half, high=speed + half, n=16)
    )
    made = RecipeReport(
        name,
        name,
        name == "bf16",
        step_ms=ms(step),
        host_ms=Figure.missing("ms", "no host time") if host is None else ms(host),
        speedups=Speedups(factor(kernel), factor(autocast), factor(amdahl), measured),
        ledger=None if idle is None else book(step, idle, gemm),
        gap=Gap("bf16", name, ms(100.0), ms(step), tuple(GapTerm(k, ms(v)) for k, v in (terms or {}).items())),
        verdict=verdict(),
    )
    return replace(made, **other)  # type: ignore[arg-type]


def scene(*others: RecipeReport, base: RecipeReport | None = None, **more: object) -> Scene:
    base = base or part("bf16", 819.2, idle=12.4, gemm=666.9, host=300.0)
    return Scene(base, others, **{"on_cpu": False, "void": {}, **more})  # type: ignore[arg-type]


CODONFM = part("fp8_delayed", 513.0, 1.597, host=320.0, idle=10.0, gemm=347.6)
SEED_BASE = part("bf16", 27.0, idle=12.0, gemm=8.0, host=26.4)
SEED = part("fp8_delayed", 35.9, 0.752, host=35.6, idle=16.2, gemm=5.0, terms={"idle": 4.2, "quantization": 6.0})


def test_codonfm() -> None:
    found = headline(scene(CODONFM, part("fp8_block", 625.2, 1.31)))
    assert found == (
        "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms).",
        "Its GEMMs promised 1.92x (kernels) and 1.73x (with quantization); Amdahl allows 1.64x.",
        "All TE GEMMs ran in FP8: 24 layers x 4 x 3.",
    )
    assert "the step follows its GEMMs" in reading(scene(CODONFM))[0]
    assert "GEMMs are 81% of the bf16 step" in reading(scene(CODONFM))[0]


def test_seed_is_launch_bound() -> None:
    found = headline(scene(SEED, base=SEED_BASE))
    assert found[:2] == (
        "FP8 makes this step slower: 0.75x (27.0 -> 35.9 ms).",
        "The GPU is idle 45% of the time: the host needs 35.6 ms to launch one FP8 step (26.4 in bf16), whatever the "
        "kernels gain. Launch-bound.",
    )
    text = reading(scene(SEED, base=SEED_BASE))[0]
    assert "GEMM speedup far above the step's" in text
    assert "launch-bound" in text
    assert "the step pays quantization +6.00 ms, idle +4.20 ms" in text


def test_several_slower_recipes() -> None:
    found = headline(scene(SEED, part("fp8_block", 34.5, 0.78, host=34.0, idle=15.0), base=SEED_BASE))
    assert found[0] == "FP8 makes this step slower: 0.78x (27.0 -> 34.5 ms) with fp8_block, the best of 2."
    mixed = headline(scene(SEED, part("nvfp4", 40.0, 0.67), base=SEED_BASE))
    assert mixed[0].startswith("Every low-precision recipe makes this step slower: 0.75x")


def test_slower_without_a_slow_host_names_the_costs() -> None:
    slow = part(
        "fp8_current", 110.0, 0.91, kernel=1.3, autocast=0.95, terms={"quantization": 25.0, "GEMM kernels": -9.0}
    )
    found = headline(scene(slow, base=part("bf16", 100.0)))
    assert found[1].endswith("What the step pays: quantization +25.0 ms.")
    assert "GEMM speedup near 1" in reading(scene(slow))[0]
    assert "Quantization takes back what the kernels gain" in reading(scene(slow))[0]


def test_a_gain_that_the_benchmark_does_not_explain() -> None:
    odd = part("fp8_current", 80.0, 1.25, kernel=1.3, autocast=0.95)
    assert "the benchmark does not explain that gain" in reading(scene(odd, base=part("bf16", 100.0)))[0]


def test_no_difference_that_can_be_shown() -> None:
    found = headline(scene(part("fp8_delayed", 810.0, 1.01, half=0.03)))
    assert found[0] == (
        "No difference that these 16 steps can show: fp8_delayed 1.01x (819.2 -> 810.0 ms; "
        "95% interval 0.98x to 1.04x)."
    )
    same = part("fp8_block", 26.5, 1.002, half=0.1, host=29.9, idle=21.0)
    bound = headline(scene(same, base=part("bf16", 26.5, idle=20.0, gemm=2.1, host=27.5)))
    assert bound[0].startswith(
        "Launch-bound, so FP8 does not make this step faster: fp8_block 1.002x (26.5 -> 26.5 ms;"
    )
    single = headline(scene(part("fp8_delayed", 700.0, 1.17, half=None)))
    assert "no spread" in single[0]


def test_a_loss_that_is_not_finite_comes_first_and_does_not_lead() -> None:
    found = headline(scene(CODONFM, part("fp8_block", 300.0, 2.7), void={"fp8_block": "the loss became nan"}))
    assert found[0].startswith("fp8_block: the loss became nan, so its speed is void")
    assert found[1].startswith("fp8_delayed makes a step 1.60x faster")
    assert (
        "no reading, because the loss became nan"
        in reading(scene(part("fp8_block", 1.0), void={"fp8_block": "the loss became nan"}))[0]
    )
    alone = headline(scene(part("fp8_block", 300.0, 2.7), void={"fp8_block": "the loss became nan"}))
    assert "no other recipe's speed is known" in alone[1]


def test_a_fallback_is_the_second_sentence() -> None:
    fallen = replace(CODONFM, verdict=verdict("fallback", "90.0% of linear FLOPs ran as asked; fallback in a."))
    found = headline(scene(fallen))
    assert found[1] == "Not what was asked, in fp8_delayed: 90.0% of linear FLOPs ran as asked; fallback in a."
    assert sum("fallback in a" in text for text in found) == 1


def test_what_is_missing_is_told_with_its_reason() -> None:
    bare = part("fp8_delayed", 513.0, 1.6, kernel=None, autocast=None, amdahl=None)
    assert "What its GEMMs alone promised is not known: not benchmarked." in headline(scene(bare))
    assert "what its GEMMs alone gain is not known: not benchmarked" in reading(scene(bare))[0]
    half = part("fp8_delayed", 513.0, 1.6, amdahl=None)
    assert "what Amdahl allows is not known: not benchmarked" in headline(scene(half))[1]
    refused = RecipeReport("nvfp4", "NVFP4", False, refusal="needs 10.0")
    assert headline(scene(refused)) == (
        "bf16 takes 819.2 ms a step; no other recipe's speed is known (nvfp4: needs 10.0).",
    )
    assert reading(scene(refused)) == ()
    unrun = RecipeReport("bf16", "BF16", True, step_ms=Figure.missing("ms", "killed"))
    assert "was not timed: killed" in headline(scene(refused, base=unrun))[0]
    assert "nothing to compare" in headline(scene())[0]


def test_an_interrupted_run_says_what_is_missing() -> None:
    assert headline(scene(CODONFM, interrupted="The run was interrupted."))[-1] == "The run was interrupted."


@pytest.mark.parametrize(
    ("host", "step", "idle", "bound"),
    [
        (35.6, 35.9, 16.0, True),
        (35.6, 35.9, None, True),
        (28.0, 35.9, 16.0, True),
        (28.0, 35.9, 5.0, False),
        (28.0, 35.9, None, False),
        (20.0, 35.9, 16.0, False),
        # A long step fills the launch queue: the host waits for the GPU, and its time is the GPU's.
        (810.0, 819.2, 12.0, False),
        (None, 35.9, 16.0, False),
    ],
)
def test_launch_bound(host: float | None, step: float, idle: float | None, bound: bool) -> None:
    found = part("fp8_delayed", step, host=host, idle=idle)
    assert launch_bound(found) is bound
    assert not launch_bound(found, on_cpu=True)
    assert idle_share(found) == (None if idle is None else pytest.approx(idle / step))


def test_gemms_that_are_slower_are_called_so() -> None:
    case = scene(part("bf16", 136.4, 0.23, kernel=0.07, autocast=0.07), base=part("fp32", 31.4), on_cpu=True)
    text = reading(case)[0]
    assert text.startswith("bf16: GEMMs slower than the baseline's (0.07x as kernels and 0.07x with their casts)")
    assert "The kernels themselves are slower at these shapes on this CPU." in text


def test_a_launch_bound_step_is_called_so_in_every_reading() -> None:
    weak = replace(SEED, speedups=Speedups(*(Figure(x, "x") for x in (1.75, 0.94, 1.05, 0.75))))
    text = reading(scene(weak, base=SEED_BASE))[0]
    assert "GEMM speedup near 1" in text
    assert text.endswith("Launch-bound.")


def test_on_a_cpu_casts_are_called_casts() -> None:
    case = scene(part("bf16", 116.0, 1.01, kernel=4.46, autocast=1.02), base=part("fp32", 117.2), on_cpu=True)
    assert "(with casts)" in headline(case)[1]
    assert "Casting takes back what the kernels gain" in reading(case)[0]


def test_incomplete_ledgers_are_mentioned() -> None:
    assert CODONFM.ledger is not None
    torn = replace(CODONFM, ledger=replace(CODONFM.ledger, complete=False, complaints=("kernels are missing",)))
    assert reading(scene(torn))[-1] == "fp8_delayed: its ledger is incomplete: kernels are missing."


def test_no_sentence_prints_none_or_nan() -> None:
    cases = [
        scene(replace(CODONFM, gap=None, ledger=None, verdict=None)),
        scene(part("x", 1.0, 0.9, kernel=None, autocast=1.5, amdahl=None)),
        scene(part("x", 1.0, 0.9, kernel=1.01, autocast=None, amdahl=None)),
        scene(RecipeReport("x", "x", False)),
        scene(replace(CODONFM, speedups=None)),
    ]
    for case in cases:
        for text in (*headline(case), *reading(case)):
            assert not re.search(r"\b(None|nan)\b", text), text
