from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.reading import Scene, headline, idle_share, launch_bound, proof, reading, trace_is_whole
from lowprec_callback.report import (
    BUCKETS,
    Figure,
    Gap,
    GapTerm,
    GemmRow,
    KernelRow,
    Ledger,
    PlaceTime,
    RecipeReport,
    Speedups,
    Verdict,
    VerdictRow,
    VerdictWord,
)


def ms(value: float) -> Figure:
    return Figure(value, "ms")


def book(wall: float, idle: float, gemm: float) -> Ledger:
    parts = {name: ms(0.0) for name in BUCKETS}
    parts["gemm"], parts["elementwise"] = ms(gemm), ms(wall - idle - gemm)
    return Ledger(ms(wall), parts, ms(idle), ms(0.0), ms(wall - idle), True)


def verdict(summary: str = "All TE GEMMs ran in FP8: 24 layers x 4 x 3.", **words: float) -> Verdict:
    """Rows by verdict and their share of the FLOPs; all that is not outside can be reached."""
    words = words or {"confirmed": 1.0}
    rows = tuple(
        VerdictRow(name, "fprop", 1, 1, 1, 1, "fp8", "fp8", name, "why", {"operands": "e4m3"}, share)  # type: ignore[arg-type]
        for name, share in words.items()
    )
    good, reach = words.get("confirmed", 0.0), 1 - words.get("outside", 0.0)
    reached = Figure(good / reach, "share") if reach > 0 else Figure.missing("share", "nothing that a recipe can reach")
    return Verdict(Figure(good, "share"), reached, rows, summary)


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
    summary = "90.0% of linear FLOPs ran as asked; fallback in a."
    found = headline(scene(replace(CODONFM, verdict=verdict(summary, confirmed=0.9, fallback=0.1))))
    assert (
        found[0] == "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms), with 90.0% of its linear FLOPs in FP8."
    )
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
        # A host that waits for the GPU in each step takes as long as the step too: idle time tells them apart.
        (35.6, 35.9, None, False),
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
    assert SEED.speedups is not None
    weak = replace(SEED, speedups=replace(SEED.speedups, kernel=Figure(1.75, "x"), autocast=Figure(0.94, "x")))
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


# --- no praise for what is not shown ----------------------------------------------------------------------

SLOW = "0.63 of bf16's time (819.2 -> 513.0 ms)"


def fallen(summary: str = "6.2% of linear FLOPs ran as asked; fallback in b.") -> Verdict:
    return verdict(summary, confirmed=0.062, fallback=0.938)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (fallen(), "6.2% of linear FLOPs ran as asked; fallback in b."),
        (verdict("0.0% ran as asked; unproven in b.", unproven=1.0), "0.0% ran as asked; unproven in b."),
        (verdict("0.0% ran as asked; emulated in b.", emulated=1.0), "0.0% ran as asked; emulated in b."),
        (verdict("Nothing to reach.", outside=1.0), "Nothing to reach."),
        (None, "what ran was not watched."),
        (
            Verdict(*[Figure.missing("share", "no traced step of fp8_delayed was recorded")] * 2, (), "Not known."),
            "what ran was not watched (no traced step of fp8_delayed was recorded).",
        ),
    ],
    ids=["fallback", "unproven", "emulated", "nothing to reach", "no verdict", "no traced step"],
)
def test_a_speed_of_what_is_not_shown_to_have_run_is_not_praised(seen: Verdict | None, told: str) -> None:
    unshown = replace(CODONFM, verdict=seen)
    for on_cpu in (False, True):
        found = headline(scene(unshown, on_cpu=on_cpu))
        assert found[0] == f"fp8_delayed is not shown to have run: {told} Its steps took {SLOW}, whatever they ran in."
        assert not any("faster" in text or "promised" in text for text in found)
        assert reading(scene(unshown, on_cpu=on_cpu)) == (
            f"fp8_delayed: no reading, because it is not shown to have run: {told}",
        )


def test_steps_that_show_no_difference_say_so_beside_what_is_not_shown() -> None:
    same = part("fp8_delayed", 810.0, 1.01, half=0.03, verdict=fallen())
    assert headline(scene(same))[0].endswith(
        "Its steps took 0.99 of bf16's time (819.2 -> 810.0 ms; no difference that these 16 steps can show), whatever "
        "they ran in."
    )
    single = part("fp8_delayed", 700.0, 1.17, half=None, verdict=fallen())
    assert "one step a side has no spread), whatever they ran in." in headline(scene(single))[0]


def test_what_is_not_shown_is_told_once() -> None:
    found = headline(scene(replace(CODONFM, verdict=fallen())))
    assert sum("fallback in b" in text for text in found) == 1


def test_most_rows_unproven_is_not_shown_however_many_flops_one_has() -> None:
    rows = (
        VerdictRow("head", "fprop", 1, 1, 1, 1, "fp8", "fp8", "confirmed", "", {"operands": "e4m3"}, 0.6),
        *(VerdictRow(f"l.{i}", "fprop", 1, 1, 1, 1, "fp8", "unknown", "unproven", "", {}, 0.2) for i in range(2)),
    )
    assert not proof(replace(CODONFM, verdict=Verdict(Figure(0.6, "share"), Figure(0.6, "share"), rows, "s."))).shown
    assert proof(replace(CODONFM, verdict=Verdict(Figure(0.6, "share"), Figure(0.6, "share"), rows[:2], "s."))).shown


def test_the_best_is_the_fastest_of_those_that_are_shown() -> None:
    unshown = part("nvfp4", 400.0, 2.05, verdict=verdict("0.0% ran as asked; unproven in b.", unproven=1.0))
    found = headline(scene(CODONFM, unshown))
    assert found[0] == "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms)."
    assert found[-1] == (
        "nvfp4 is not shown to have run: 0.0% ran as asked; unproven in b. Its steps took 0.49 of bf16's time "
        "(819.2 -> 400.0 ms), whatever they ran in."
    )
    none = headline(scene(replace(CODONFM, verdict=fallen()), unshown))
    assert none[0].startswith("nvfp4 is not shown to have run:")
    assert none[1] == "Not what was asked, in fp8_delayed: 6.2% of linear FLOPs ran as asked; fallback in b."


def test_all_is_said_of_those_that_are_shown_alone() -> None:
    """Two recipes are slower; a third, which is not shown to have run, is faster."""
    unshown = part("mxfp8", 20.0, 1.35, verdict=verdict("0.0% ran as asked.", unproven=1.0))
    found = headline(scene(SEED, part("nvfp4", 40.0, 0.67, verdict=verdict()), unshown, base=SEED_BASE))
    assert found[0] == (
        "Every low-precision recipe that is shown to have run makes this step slower: 0.75x (27.0 -> 35.9 ms) with "
        "fp8_delayed, the best of 2."
    )
    assert found[-1].startswith("mxfp8 is not shown to have run")


def test_a_part_that_ran_as_asked_is_named_in_the_same_sentence() -> None:
    much = replace(CODONFM, verdict=verdict("93.8% ran as asked.", confirmed=0.9384, outside=0.03, unproven=0.0316))
    assert headline(scene(much))[0] == (
        "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms), with 93.8% of its linear FLOPs in FP8."
    )
    nearly = replace(CODONFM, verdict=verdict("s.", confirmed=0.99999, fallback=0.00001))
    assert "with 99.9% of its linear FLOPs in FP8." in headline(scene(nearly))[0]
    own = replace(part("my_recipe", 513.0, 1.6), verdict=verdict("s.", confirmed=0.7, fallback=0.3))
    assert "with 70.0% of its linear FLOPs as asked." in headline(scene(own))[0]
    # What no recipe can reach is told by the verdict's own sentence.
    head = replace(CODONFM, verdict=verdict("s.", confirmed=0.9, outside=0.1))
    assert headline(scene(head))[0] == "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms)."
    slower = replace(SEED, verdict=verdict("s.", confirmed=0.7, fallback=0.3))
    assert headline(scene(slower, base=SEED_BASE))[0] == (
        "FP8 makes this step slower: 0.75x (27.0 -> 35.9 ms), with 70.0% of its linear FLOPs in FP8."
    )


def captured(*rows: tuple[VerdictWord, float]) -> Verdict:
    missing = Figure.missing("share", "a capture holds no GEMM shapes")
    kernels = tuple(KernelRow("", "fprop", "fp8", "fp8", word, "", 1.0, ms) for word, ms in rows)
    return Verdict(missing, missing, (), "By kernel names alone.", kernels=kernels)


def test_a_capture_is_judged_by_the_time_of_its_kernels() -> None:
    def first(*rows: tuple[VerdictWord, float]) -> str:
        return headline(scene(replace(CODONFM, verdict=captured(*rows)), imported=True))[0]

    faster = "fp8_delayed makes a step 1.60x faster (819.2 -> 513.0 ms)"
    assert first(("confirmed", 3.0), ("outside", 9.0)) == f"{faster}."
    assert first(("confirmed", 3.0), ("fallback", 1.0)) == f"{faster}, with 75.0% of its GEMM kernel time in FP8."
    for rows in ([("confirmed", 1.0), ("fallback", 3.0)], [("outside", 1.0)], [("unproven", 1.0)]):
        assert first(*rows).startswith("fp8_delayed is not shown to have run: By kernel names alone. Its")


def test_a_baseline_that_is_not_shown_to_have_run_is_no_measure() -> None:
    base = part("bf16", 819.2, idle=12.4, gemm=666.9, verdict=verdict("0.0% ran in BF16.", fallback=1.0))
    found = headline(scene(CODONFM, base=base))
    assert found[0] == (
        f"bf16 is not shown to have run: 0.0% ran in BF16. The steps of fp8_delayed took {SLOW}, "
        "whatever bf16's ran in."
    )
    assert not any("faster" in text for text in found)
    assert "Not what was asked, in bf16: 0.0% ran in BF16." in found
    assert reading(scene(CODONFM, base=base))[0] == "fp8_delayed: no reading, because bf16 is not shown to have run."
    by_model = replace(base, verdict=verdict("The model is in FP16.", by_request=1.0))
    assert "faster" in headline(scene(CODONFM, base=by_model))[0]


WORDS = ("confirmed", "fallback", "by_request", "outside", "emulated", "unproven")


@given(
    st.lists(st.tuples(st.sampled_from(WORDS), st.floats(0.001, 1.0)), max_size=6),
    st.none() | st.floats(0.0, 1.0),
    st.floats(0.2, 5.0),
    st.none() | st.floats(0.001, 0.5),
    st.booleans(),
)
def test_faster_is_said_only_of_what_is_shown(
    words: list[tuple[VerdictWord, float]], share: float | None, speed: float, half: float | None, on_cpu: bool
) -> None:
    figure = Figure.missing("share", "not counted") if share is None else Figure(share, "share")
    rows = tuple(
        VerdictRow(f"l.{i}", "fprop", 1, 1, 1, 1, "fp8", "fp8", word, "", {"operands": "x"}, each)
        for i, (word, each) in enumerate(words)
    )
    made = part("fp8_delayed", 100.0 / speed, speed, half=half, verdict=Verdict(figure, figure, rows, "summary."))
    found = headline(scene(made, base=part("bf16", 100.0), on_cpu=on_cpu))
    inside = [word for word, _ in words if word != "outside"]
    shown = share is not None and share >= 0.5 and 2 * inside.count("unproven") <= len(inside)
    first = found[0]
    if not shown:
        assert first.startswith("fp8_delayed is not shown to have run: ")
        assert not any("faster" in text or "slower" in text for text in found)
    elif "faster (" in first:
        assert half is not None
        assert speed > 1
        assert ("% of its linear FLOPs" in first) == (share != 1.0 or "fallback" in inside)
    if half is None or abs(speed - 1) < half:
        assert "faster (" not in first
        assert "slower:" not in first


# --- ledgers that are incomplete --------------------------------------------------------------------------


def torn(ledger: Ledger | None, **changes: object) -> Ledger:
    assert ledger is not None
    return replace(ledger, **{"complete": False, "complaints": ("kernels are missing",), **changes})  # type: ignore[arg-type]


BASE = part("bf16", 819.2, idle=12.4, gemm=666.9, host=300.0)


def test_what_amdahl_allows_is_not_known_of_a_ledger_that_is_incomplete() -> None:
    """Convolutions in the bucket `other` once made the GEMMs look free."""
    base = replace(BASE, ledger=torn(BASE.ledger))
    (_, promise, *_) = headline(scene(CODONFM, base=base))
    assert promise.endswith("; what Amdahl allows is not known: the ledger of bf16 is incomplete.")
    assert "GEMMs are" not in reading(scene(CODONFM, base=base))[0]
    far = part("fp8_delayed", 745.0, 1.1, idle=10.0, gemm=347.6)
    assert "GEMMs are 81% of the bf16 step, so Amdahl allows" in reading(scene(far, base=BASE))[0]
    assert reading(scene(far, base=base))[0].endswith(
        "Where the gain went is not known: the ledger of bf16 is incomplete."
    )


def test_convolutions_are_no_part_of_what_amdahl_allows() -> None:
    """The bucket `gemm` holds them too; they bear the names of modules that hold no captured linear layer."""
    assert BASE.ledger is not None

    def based(*places: tuple[str, float]) -> RecipeReport:
        assert BASE.ledger is not None
        times = tuple(PlaceTime(name, "forward", "gemm", ms(each), 1.0) for name, each in places)
        layers = (GemmRow("fc", "fprop", 1, 1, 1, 1, ms(1.0), ms(1.0)),)
        return replace(BASE, gemms=layers, ledger=replace(BASE.ledger, places=times))

    convolved = based(("fc", 66.9), ("conv.*", 500.0), ("stem", 100.0))
    assert headline(scene(CODONFM, base=convolved))[1].endswith(
        "; what Amdahl allows is not known: 600.0 ms of the products in the bf16 step are no linear layer's."
    )
    assert "GEMMs are" not in reading(scene(CODONFM, base=convolved))[0]
    for fine in (based(("fc", 666.9)), based(("fc", 600.0), ("", 66.9)), based(("fc", 664.9), ("stem", 2.0))):
        assert headline(scene(CODONFM, base=fine))[1].endswith("Amdahl allows 1.64x.")


def test_a_share_of_gemms_that_the_ledger_leaves_open_is_not_told() -> None:
    assert BASE.ledger is not None
    parts = {**BASE.ledger.buckets, "gemm": ms(5.0), "other": ms(4.0)}
    base = replace(BASE, ledger=replace(BASE.ledger, buckets=parts, residual=ms(-2.0)))
    assert "GEMMs are" not in reading(scene(CODONFM, base=base))[0]


def test_what_the_step_pays_is_not_told_of_a_ledger_that_is_incomplete() -> None:
    slow = part(
        "fp8_current", 110.0, 0.91, kernel=1.3, autocast=0.95, terms={"quantization": 25.0}, idle=5.0, gemm=50.0
    )
    base = part("bf16", 100.0, idle=5.0, gemm=60.0)
    assert "What the step pays" in headline(scene(slow, base=base))[1]
    assert "What the step pays" not in headline(scene(replace(slow, ledger=torn(slow.ledger)), base=base))[1]
    assert "What the step pays" not in headline(scene(slow, base=replace(base, ledger=torn(base.ledger))))[1]
    assert slow.ledger is not None
    vague = replace(slow.ledger, residual=ms(-26.0))
    assert "What the step pays" not in headline(scene(replace(slow, ledger=vague), base=base))[1]
    assert slow.gap is not None
    noisy = replace(slow.gap, terms=(GapTerm("quantization", Figure(25.0, "ms", low=-1.0, high=51.0)),))
    assert "What the step pays" not in headline(scene(replace(slow, gap=noisy), base=base))[1]
    left = replace(slow.gap, terms=(GapTerm("residual", ms(25.0)),))
    assert "What the step pays" not in headline(scene(replace(slow, gap=left), base=base))[1]


def test_kernels_of_unknown_kind_are_busy_all_the_same() -> None:
    assert SEED.ledger is not None
    other = {**SEED.ledger.buckets, "other": ms(5.0), "elementwise": ms(9.7)}
    unknown = torn(SEED.ledger, buckets=other, complaints=("unknown work takes 5.00 ms",))
    assert trace_is_whole(unknown)
    assert launch_bound(replace(SEED, ledger=unknown))
    for broken in (
        torn(SEED.ledger),
        torn(unknown, complaints=("unknown work takes 5.00 ms", "kernels are missing")),
        torn(unknown, residual=ms(-3.0)),
        torn(unknown, residual=Figure.missing("ms", "lost")),
    ):
        assert not trace_is_whole(broken)
        assert not launch_bound(replace(SEED, ledger=broken))
        found = headline(scene(replace(SEED, ledger=broken), base=SEED_BASE))
        assert found[1] == (
            "The host needs 35.6 ms to launch one FP8 step; whether the GPU waits for it is not known: its ledger is "
            "incomplete."
        )


# --- differences that are not shown -----------------------------------------------------------------------


def test_one_step_a_side_is_not_read() -> None:
    single = part("fp8_delayed", 513.0, 1.6, half=None, terms={"quantization": 25.0})
    assert reading(scene(single))[0] == (
        "fp8_delayed: no reading, because one step a side has no spread (the step runs at 1.60x)."
    )
    assert not any("pays" in text for text in headline(scene(single)))


def test_an_interval_that_holds_both_readings_gives_none() -> None:
    wide = part("fp8_delayed", 513.0, 1.2, half=0.6)
    assert reading(scene(wide))[0].endswith("the step, as far as these 16 show, between 0.60x and 1.80x.")
    follows = part("fp8_delayed", 513.0, 1.6, half=0.7)
    assert "no reading" in reading(scene(follows))[0]
    yet = part("fp8_current", 80.0, 1.06, kernel=1.3, autocast=0.95, half=0.1)
    assert "and yet" not in reading(scene(yet, base=part("bf16", 100.0)))[0]


def test_one_short_call_of_many_is_no_reason() -> None:
    def rows(bound: int, calls: int) -> tuple[GemmRow, ...]:
        row = GemmRow("a", "fprop", 1, 1, 1, calls - bound, ms(1.0), ms(1.0))
        return (row, replace(row, calls=bound, launch_bound=True))

    near = part("fp8_delayed", 810.0, 0.97, kernel=1.02, autocast=1.0)
    assert "hardly faster" in reading(scene(replace(near, gemms=rows(1, 100))))[0]
    assert "90 of 100 GEMM calls are shorter" in reading(scene(replace(near, gemms=rows(90, 100))))[0]
    costly = part("fp8_delayed", 810.0, 0.97, kernel=1.3, autocast=0.9, gemms=rows(90, 100))
    assert "Quantization takes back" not in reading(scene(costly))[0]
