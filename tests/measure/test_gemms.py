"""The GEMM benchmark: what is timed and in which order, never how fast it is."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, load
from lowprec_callback.measure import gemms, gpu_clock, layer_bench
from lowprec_callback.measure.gemms import Course, Sampling, benchmark, half_width, shapes_of
from lowprec_callback.measure.gpu_clock import TRIES, Launched, Pace, back_to_back, cut_calls
from lowprec_callback.measure.layer_bench import Conditions, LayerBench, Samples, Shape
from lowprec_callback.recipes import RecipeCard, load_cards
from lowprec_callback.recording import MODES, ROLES, Gemm, GemmTime, Role
from tests.engines import fake_te

CARDS = load_cards()
CPU = torch.device("cpu")


# -- cutting a call into its roles -----------------------------------------------------------------------------------


class Mark:
    """A CUDA event that was reached at some millisecond."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: Mark) -> float:
        return other.at - self.at


@st.composite
def marks(draw: Any) -> list[tuple[str, Mark]]:
    """Some calls of a layer: GEMMs of forward, then of backward, with anything in between, at rising whole times."""
    now = 0
    found: list[tuple[str, Mark]] = []

    def mark(what: str) -> None:
        nonlocal now
        now += draw(st.integers(0, 1000))
        found.append((what, Mark(now)))

    for _ in range(draw(st.integers(1, 3))):
        mark("begin")
        for role in draw(st.sampled_from([["fprop"], ["fprop"] * 3, []])):
            mark(f"<{role}")
            mark(f">{role}")
        mark("forward")
        for role in draw(st.sampled_from([["dgrad", "wgrad"], ["wgrad", "dgrad"], ["wgrad"], ["dgrad", "wgrad"] * 2])):
            mark(f"<{role}")
            mark(f">{role}")
        mark("end")
    return found


@given(marks())
def test_the_roles_share_a_call_without_gap_or_overlap(found: list[tuple[str, Mark]]) -> None:
    cut = list(cut_calls(found))
    begins = [mark.at for what, mark in found if what == "begin"]
    ends = [mark.at for what, mark in found if what == "end"]
    assert sum(whole for _, whole, _ in cut) == sum(ends) - sum(begins)
    assert [role for role, _, _ in cut] == [what[1:] for what, _ in found if what.startswith(">")]
    opened = [mark.at for what, mark in found if what.startswith("<")]
    closed = [mark.at for what, mark in found if what.startswith(">")]
    assert [alone for _, _, alone in cut] == [b - a for a, b in zip(opened, closed, strict=True)]
    assert all(whole >= alone >= 0 for _, whole, alone in cut)


def test_what_each_role_carries() -> None:
    times = {"begin": 0, "<fprop": 3, ">fprop": 10, "forward": 11, "<dgrad": 15, ">dgrad": 25, "<wgrad": 27}
    found = [(what, Mark(at)) for what, at in {**times, ">wgrad": 40, "end": 42}.items()]
    assert list(cut_calls(found)) == [("fprop", 11, 7), ("dgrad", 14, 10), ("wgrad", 17, 13)]


def test_no_marks_no_roles() -> None:
    assert list(cut_calls([])) == []
    assert list(cut_calls([("begin", Mark(0)), ("forward", Mark(1)), ("end", Mark(2))])) == []


# -- a GPU that is played ------------------------------------------------------------------------------------------


PROBE_MS = 0.25


class Gpu:
    """Time passes when a GEMM or a quantizer says so; whether the host kept ahead is decided beforehand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead_at: int = 0) -> None:
        self.now, self.holds, self.ahead_at, self.waits = 0.0, [], ahead_at, 0
        gpu = self

        class Event(Mark):
            def __init__(self, enable_timing: bool = False) -> None:
                super().__init__(math.nan)

            def record(self) -> None:
                self.at = gpu.now

            def query(self) -> bool:
                """Whether the GPU is held no more: the host was too slow."""
                return (len(gpu.holds) - 1) % TRIES < gpu.ahead_at

            def synchronize(self) -> None:
                gpu.waits += 1

        def wait(*_: Any) -> None:
            gpu.waits += 1

        def probe(_cycles: int) -> None:
            gpu.now += PROBE_MS

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", probe)
        monkeypatch.setattr(gpu_clock, "hold", self.holds.append)
        monkeypatch.setattr(torch.cuda, "synchronize", wait)


def take(gpu: Gpu, ms: float, pace: Pace, **options: Any) -> Launched:
    def call() -> None:
        gpu.now += ms

    return back_to_back(call, options.pop("calls", 3), options.pop("lead", 2), pace, **options)


@pytest.mark.parametrize("late", range(TRIES + 1))
def test_a_sample_that_the_host_launched_too_late_is_launched_again(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    gpu = Gpu(monkeypatch, ahead_at=late)
    begun: list[float] = []
    launched = take(gpu, 2.5, Pace(host_ms=1.0, gpu_ms=1.0), begin=lambda: begun.append(gpu.now))
    tries = min(late + 1, TRIES)
    assert len(begun) == tries
    assert gpu.holds == [pytest.approx(3 * 1.5 * 2**attempt) for attempt in range(tries)]
    start = begun[-1] + PROBE_MS
    assert [(first.at, last.at) for first, last in launched.pairs] == [
        (start + 2.5 * i, start + 2.5 * (i + 1)) for i in range(3)
    ]


def test_a_host_that_keeps_ahead_needs_no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    take(gpu, 2.5, Pace(host_ms=0.7, gpu_ms=1.0))
    assert gpu.holds == []


def test_the_clock_comes_from_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    launched = take(gpu, 2.5, Pace(0.1, 1.0))
    assert launched.mhz() == pytest.approx(gpu_clock.PROBE_CYCLES / (PROBE_MS * 1e3))


def test_the_lead_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    launched = take(gpu, 2.5, Pace(0.1, 1.0), calls=7, lead=4)
    assert gpu.waits == 0  # reading waits, launching does not
    assert launched.pairs[0][0].at == 10.0 + PROBE_MS
    assert launched.ms() == 2.5
    assert gpu.waits == 1


def test_what_happens_between_calls_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    order: list[str] = []

    def pass_(what: str, ms: float) -> Callable[[], None]:
        def run() -> None:
            order.append(what)
            gpu.now += ms

        return run

    assert back_to_back(pass_("call", 2.5), 3, 1, Pace(0.1, 1.0), between=pass_("flush", 100.0)).ms() == 2.5
    assert order == ["call", *["flush", "call"] * 3]


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.integers(1, 50))
def test_calls_come_near_to_the_time_unless_there_are_too_many(host: float, gpu: float, ms: float, most: int) -> None:
    calls = Pace(host, gpu).calls(ms, most)
    assert 1 <= calls <= most
    longer = max(host, gpu)
    assert calls == most or (calls + 0.5) * longer >= ms * 0.999999
    assert calls == 1 or (calls - 0.5) * longer <= ms * 1.000001


# -- a layer of Transformer Engine ---------------------------------------------------------------------------------

GEMM_MS, QUANTIZE_MS = 3.0, 1.0
VISITS = 2


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_te.Fake]:
    yield fake_te.install(monkeypatch)
    load.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fake: fake_te.Fake) -> Gpu:
    """Each GEMM and each quantization of the fake TE takes its time; the host needs a millisecond for anything."""
    gpu = Gpu(monkeypatch)
    quantize = fake_te.Quantizer.__call__

    def gemm(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
        gpu.now += GEMM_MS
        return fake_te.multiply(a, b, layout)

    def quantized(self: fake_te.Quantizer, x: torch.Tensor) -> Any:
        gpu.now += QUANTIZE_MS
        return quantize(self, x)

    fake.gemm = gemm
    monkeypatch.setattr(fake_te.Quantizer, "__call__", quantized)
    ticks = iter(range(10**6))
    monkeypatch.setattr(layer_bench.time, "perf_counter", lambda: next(ticks) * 1e-3)
    return gpu


def layer_samples(fake: fake_te.Fake, card: RecipeCard, conditions: Conditions) -> tuple[Samples, fake_te.Linear]:
    engine = TransformerEngineEngine(fake_te.Linear(fake, 16, 8), CPU, "a test")
    layers: list[fake_te.Linear] = []
    original = fake.te.Linear

    def make(*args: Any, **options: Any) -> fake_te.Linear:
        layers.append(original(*args, **options))
        return layers[-1]

    fake.te.Linear = make
    samples = Samples()
    bench = LayerBench(engine, card, Shape(32, 16, 8, False, "Linear", True), samples, conditions)
    for _ in range(VISITS):
        bench.visit(conditions.modes)()
    (layer,) = layers
    return samples, layer


def test_each_role_carries_the_quantization_that_it_needs_first(fake: fake_te.Fake, gpu: Gpu) -> None:
    samples, _ = layer_samples(fake, CARDS["fp8_current"], Conditions())
    assert {key: set(values) for key, values in samples.times.items()} == {
        ("fprop", "autocast"): {GEMM_MS + 2 * QUANTIZE_MS},  # X and W
        ("dgrad", "autocast"): {GEMM_MS + QUANTIZE_MS},  # dY
        ("wgrad", "autocast"): {GEMM_MS},  # both are there already
        ("fprop", "kernel"): {GEMM_MS},
        ("dgrad", "kernel"): {GEMM_MS},
        ("wgrad", "kernel"): {GEMM_MS},
    }
    assert {role: set(values) for role, values in samples.quantize.items()} == {
        "fprop": {2 * QUANTIZE_MS},
        "dgrad": {QUANTIZE_MS},
        "wgrad": {0.0},
    }
    assert {len(values) for values in samples.times.values()} == {VISITS}
    assert samples.host.keys() == {(role, mode) for role in ROLES for mode in MODES}
    assert samples.calls == 5  # of two milliseconds each by the host's first clock, for a sample of ten
    assert samples.failure is None


def test_the_baseline_quantizes_nothing(fake: fake_te.Fake, gpu: Gpu) -> None:
    samples, _ = layer_samples(fake, CARDS["bf16"], Conditions())
    assert {value for values in samples.times.values() for value in values} == {GEMM_MS}
    assert {value for values in samples.quantize.values() for value in values} == {0.0}


@pytest.mark.parametrize("mode", MODES)
def test_one_mode_alone(fake: fake_te.Fake, gpu: Gpu, mode: Any) -> None:
    samples, _ = layer_samples(fake, CARDS["fp8_current"], Conditions(modes=(mode,)))
    assert samples.times.keys() == {(role, mode) for role in ROLES}


def test_accumulation_windows_are_whole(fake: fake_te.Fake, gpu: Gpu) -> None:
    samples, layer = layer_samples(fake, CARDS["fp8_current"], Conditions(modes=("autocast",), accumulate=3))
    assert samples.calls == 6
    firsts = [index for index, first in enumerate(layer.microbatches) if first]
    # Warm-up and pacing end where they end; each sample begins a new window, and its lead is whole windows too.
    sampled = layer.microbatches[-VISITS * 6 :] if len(firsts) else []
    assert sampled == [index % 3 == 0 for index in range(len(sampled))]


def test_without_accumulation_the_layer_is_not_told_of_micro_batches(fake: fake_te.Fake, gpu: Gpu) -> None:
    _, layer = layer_samples(fake, CARDS["fp8_current"], Conditions())
    assert set(layer.microbatches) == {None}


def test_the_entries_of_te_are_as_they_were(fake: fake_te.Fake, gpu: Gpu) -> None:
    before = dict(vars(fake.tex))
    layer_samples(fake, CARDS["fp8_current"], Conditions())
    assert vars(fake.tex) == before


# -- shapes --------------------------------------------------------------------------------------------------------


def gemm(m: int, k: int, n: int, role: Role = "fprop", family: str = "nn.Linear", **changes: Any) -> Gemm:
    values: dict[str, Any] = {"calls": 1, "quantizable": True, "bias": False, "groups": 1, **changes}
    return Gemm("layer", role, m, k, n, family=family, **values)


def test_equal_shapes_are_timed_once_and_the_largest_first() -> None:
    found = shapes_of(
        [
            *(gemm(8, 16, 4, role) for role in ROLES),
            gemm(64, 64, 64, family="LayerNormLinear"),
            gemm(64, 64, 64, family="Linear"),
            gemm(64, 64, 64, family="GroupedLinear", groups=4),
            gemm(8, 16, 4, bias=True),
            gemm(8, 16, 4, calls=9),
        ]
    )
    assert found == [
        Shape(64, 64, 64, False, "GroupedLinear", True, 4),
        Shape(64, 64, 64, False, "Linear", True),
        Shape(8, 16, 4, False, "nn.Linear", True),
        Shape(8, 16, 4, True, "nn.Linear", True),
    ]


families = st.sampled_from(["nn.Linear", "Linear", "LayerNormMLP", "GroupedLinear"])
any_gemm = st.builds(
    gemm,
    st.sampled_from([8, 16]),
    st.sampled_from([8, 16]),
    st.sampled_from([8, 16]),
    st.sampled_from(ROLES),
    families,
    quantizable=st.booleans(),
    bias=st.booleans(),
    groups=st.sampled_from([1, 2]),
)


@given(st.lists(any_gemm, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_the_shapes_does_not_depend_on_that_of_the_gemms(
    found: list[Gemm], shuffle: random.Random
) -> None:
    shapes = shapes_of(found)
    assert shapes == shapes_of(shuffle.sample(found, len(found)))
    assert len(set(shapes)) == len(shapes)
    keys = [dataclasses.astuple(shape) for shape in shapes]
    # Whatever a set gives first, equal keys of the order mean equal shapes.
    assert len({(-m * k * n, k, n, *rest) for m, k, n, *rest in keys}) == len(keys)


# -- the benchmark on a CPU ----------------------------------------------------------------------------------------

MODEL = nn.Linear(8, 4)
SHAPES = [gemm(6, 8, 4, bias=True), gemm(6, 4, 8), gemm(6, 8, 5, quantizable=False)]
TWO = [CARDS["fp32"], CARDS["bf16"]]


def engine() -> PlainTorchEngine:
    return PlainTorchEngine(MODEL, CPU, "a test")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a sample."""
    monkeypatch.setattr(layer_bench, "SAMPLE_MS", 0.0)


def row(fact: GemmTime) -> tuple[str, str, str, int, int, int]:
    return fact.recipe, fact.role, fact.mode, fact.m, fact.k, fact.n


def test_one_row_for_each_recipe_role_mode_and_shape(short: None) -> None:
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))
    expected = {
        (recipe, role, mode, *shape)
        for recipe, shapes in (("fp32", [(6, 8, 4), (6, 4, 8), (6, 8, 5)]), ("bf16", [(6, 8, 4), (6, 4, 8)]))
        for shape in shapes
        for role in ROLES
        for mode in MODES
    }
    assert {row(fact) for fact in facts} == expected
    assert len(facts) == len(expected)
    for fact in facts:
        assert fact.failure is None
        assert len(fact.samples_ms) == Sampling().rounds
        assert all(sample > 0 for sample in fact.samples_ms)
        assert (fact.calls_per_sample, fact.family, fact.host_ms, fact.launch_bound) == (1, "nn.Linear", None, False)
        assert fact.quantize_ms == ()


def test_nothing_to_time() -> None:
    course = Course()
    assert list(benchmark(engine(), TWO, "fp32", [], seed=0, course=course)) == []
    assert course.rounds == 0
    assert course.widest is None


def test_a_cpu_multiplies_in_the_type_of_the_recipe(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    types: set[tuple[str, torch.dtype]] = set()
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: types.add((a.dtype, b.dtype)) or original(a, b))
    list(benchmark(engine(), [CARDS["bf16"]], "fp32", SHAPES[:1], seed=0))
    assert types == {(torch.bfloat16, torch.bfloat16)}


def visits(seed: int, sampling: Sampling | None = None) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    list(benchmark(engine(), TWO, "fp32", SHAPES, seed, lambda *what: told.append(what), sampling))
    return told


def test_the_order_is_that_of_the_seed(short: None) -> None:
    first = visits(3)
    assert first == visits(3)
    assert first != visits(4)
    assert [done for _, done, _ in first] == list(range(30))
    assert {total for _, _, total in first} == {30}
    rounds = [sorted(what for what, _, _ in first[start : start + 5]) for start in range(0, 30, 5)]
    everything = sorted(["fp32 6x8x4", "bf16 6x8x4", "fp32 6x4x8", "bf16 6x4x8", "fp32 6x8x5"])
    assert rounds == [everything] * 6


def test_random_numbers_are_left_alone(short: None) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in MODEL.parameters())


class FakeBench:
    """Takes samples that are given, and fails where it is told to."""

    fails: dict[tuple[str, int], list[Exception | None]] = {}  # noqa: RUF012
    """(recipe, k) to what each visit does."""
    host = 0.0
    visits = 0
    sample: Callable[[int], float] = staticmethod(lambda _visit: 1.0)
    roles: tuple[Role, ...] = ROLES

    def __init__(self, _engine: Any, card: RecipeCard, shape: Shape, samples: Samples, conditions: Conditions) -> None:
        self.what = FakeBench.fails.get((card.name, shape.k), [])
        self.samples, self.conditions = samples, conditions

    def visit(self, modes: Any) -> Callable[[], None]:
        FakeBench.visits += 1
        error = self.what.pop(0) if self.what else None
        if error is not None:
            raise error
        taken = FakeBench.sample(FakeBench.visits)

        def read() -> None:
            for mode in modes:
                for role in FakeBench.roles:
                    self.samples.times[role, mode].append(taken)
                    self.samples.host[role, mode] = FakeBench.host

        return read


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    class Fresh(FakeBench):
        pass

    for name, value in (("fails", {}), ("host", 0.0), ("visits", 0), ("roles", ROLES)):
        monkeypatch.setattr(FakeBench, name, value)
    monkeypatch.setattr(FakeBench, "sample", staticmethod(lambda _visit: 1.0))
    monkeypatch.setattr(gemms, "PlainBench", FakeBench)
    return FakeBench


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "out of memory"),
        (RuntimeError("shape '[7, 3]'\n   is misaligned"), "RuntimeError: shape '[7, 3]' is misaligned"),
        (AssertionError(), "AssertionError"),
        (ValueError("x" * 500), "ValueError: " + "x" * 300 + "..."),
    ],
)
def test_a_shape_that_fails_keeps_its_rows_with_the_reason(bench: Any, error: Exception, reason: str) -> None:
    again = error if isinstance(error, torch.OutOfMemoryError) else None
    bench.fails = {("bf16", 4): [None, error, again]}  # at its second visit
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))
    failed = [fact for fact in facts if fact.failure is not None]
    assert {row(fact) for fact in failed} == {("bf16", role, mode, 6, 4, 8) for role in ROLES for mode in MODES}
    assert {fact.failure for fact in failed} == {reason}
    assert all(fact.samples_ms == () and not fact.launch_bound for fact in failed)
    assert all(len(fact.samples_ms) == 6 for fact in facts if fact.failure is None)
    tries = 3 if reason == "out of memory" else 2  # out of memory: once more, when the other layers have given way
    assert bench.visits == 4 * 6 + tries


def test_an_interrupt_is_no_failure_of_a_shape(bench: Any) -> None:
    bench.fails = {("fp32", 4): [KeyboardInterrupt()]}
    with pytest.raises(KeyboardInterrupt):
        list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))


def test_a_role_whose_call_was_never_seen(bench: Any) -> None:
    """An emulated recipe multiplies by other means than the library."""
    bench.roles = ("fprop", "wgrad")
    course = Course()
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0, course=course))
    assert {fact.role for fact in facts if fact.failure == "the call was not seen"} == {"dgrad"}
    assert {fact.role for fact in facts if fact.failure is None} == {"fprop", "wgrad"}
    assert course.widest is None


@pytest.mark.parametrize(("host", "bound"), [(0.5, False), (1.0, False), (1.5, True)])
def test_launch_bound_means_that_the_host_needs_longer(bench: Any, host: float, bound: bool) -> None:
    bench.host = host
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))
    assert {(fact.host_ms, fact.launch_bound) for fact in facts} == {(host, bound)}


def test_failures_are_not_launch_bound(bench: Any) -> None:
    bench.host = 5.0
    bench.fails = {("fp32", 4): [None, None, RuntimeError("late")]}
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))
    assert not any(fact.launch_bound for fact in facts if fact.failure)


def test_one_mode_has_rows_of_one_mode(bench: Any) -> None:
    sampling = Sampling(conditions=Conditions(modes=("kernel",)))
    assert {fact.mode for fact in benchmark(engine(), TWO, "fp32", SHAPES, seed=0, sampling=sampling)} == {"kernel"}


def test_sampling_stops_when_the_interval_is_narrow_enough(bench: Any) -> None:
    course = Course()
    sampling = Sampling(rounds=9, precision=0.01)
    list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0, sampling=sampling, course=course))
    assert (course.stopped, course.rounds, course.widest) == ("precise", 6, 0.0)  # six samples make an interval


def test_sampling_stops_after_its_rounds(bench: Any) -> None:
    bench.sample = staticmethod(lambda visit: 1.0 + visit % 7)
    course = Course()
    sampling = Sampling(rounds=7, precision=0.001)
    list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0, sampling=sampling, course=course))
    assert (course.stopped, course.rounds) == ("rounds", 7)
    assert course.widest is not None
    assert course.widest > 0.001


def test_a_budget_ends_a_round_before_its_end_but_not_the_first(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sample(_visit: int) -> float:
        nonlocal now
        now += 10.0
        return 1.0

    bench.sample = staticmethod(sample)
    monkeypatch.setattr(gemms.time, "perf_counter", lambda: now)
    course = Course()
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, 0, sampling=Sampling(9, budget_s=75.0), course=course))
    assert course.stopped == "budget"
    assert sorted({len(fact.samples_ms) for fact in facts}) == [1, 2]  # 5 visits, then 3 more
    assert bench.visits == 8


def test_groups_are_multiplied_one_after_the_other(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    shapes: set[tuple[int, ...]] = set()
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.add((*a.shape, *b.shape)) or original(a, b))
    facts = list(benchmark(engine(), TWO[:1], "fp32", [gemm(7, 8, 4, family="GroupedLinear", groups=2)], seed=0))
    assert all(fact.failure is None for fact in facts)
    assert shapes == {(4, 4, 4, 8), (3, 4, 4, 8), (4, 4, 4, 8), (4, 3, 3, 8)}


def test_each_layer_has_a_state_of_its_own(bench: Any) -> None:
    entered: dict[int, int] = {}

    class Stateful(PlainTorchEngine):
        def own_state(self) -> Any:
            number = len(entered)
            entered[number] = 0

            @contextmanager
            def state() -> Iterator[None]:
                entered[number] += 1
                yield

            class Again:
                def __enter__(self) -> None:
                    self.inside = state()
                    self.inside.__enter__()

                def __exit__(self, *_: object) -> None:
                    self.inside.__exit__(None, None, None)

            return Again()

    list(benchmark(Stateful(MODEL, CPU, ""), TWO, "fp32", SHAPES, seed=0))
    assert entered == dict.fromkeys(range(5), 6)


def test_out_of_memory_the_other_layers_give_way_and_it_is_tried_again(bench: Any) -> None:
    bench.fails = {("bf16", 4): [None, torch.OutOfMemoryError("full")]}
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))
    assert all(fact.failure is None and len(fact.samples_ms) == 6 for fact in facts)


def test_a_sample_that_cannot_be_read_is_a_failure(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def visit(self: Any, _modes: Any) -> Callable[[], None]:
        def read() -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        return read

    monkeypatch.setattr(bench, "visit", visit)
    facts = list(benchmark(engine(), TWO, "fp32", SHAPES, seed=0))
    assert {fact.failure for fact in facts} == {"RuntimeError: CUDA error: an illegal memory access"}


@pytest.mark.parametrize(
    ("course", "sampling", "rounds"),
    [
        (Course(), Sampling(rounds=6), 6),
        (Course(rounds=4), Sampling(rounds=6), 2),
        (Course(), Sampling(rounds=1000, precision=0.01), gemms.LEAST_ROUNDS),
        (Course(rounds=12, seconds=6.0, widest=0.02), Sampling(rounds=1000, precision=0.01), 36),
        (Course(rounds=12, seconds=6.0, widest=0.02), Sampling(rounds=1000, precision=0.01, budget_s=10.0), 8),
        (Course(rounds=12, seconds=6.0, widest=0.02), Sampling(rounds=15, precision=0.01), 3),
        (Course(rounds=12, seconds=60.0), Sampling(rounds=1000, precision=0.01, budget_s=10.0), 1),
    ],
)
def test_how_many_rounds_are_left(course: Course, sampling: Sampling, rounds: int) -> None:
    assert gemms._rounds_to_go(course, sampling) == rounds


# -- the interval of a median ----------------------------------------------------------------------------------------

positive = st.floats(0.5, 100.0)


@given(st.lists(positive, max_size=5))
def test_few_samples_make_no_interval(samples: list[float]) -> None:
    assert half_width(samples) is None


@given(st.lists(positive, min_size=6, max_size=40), st.randoms(use_true_random=False))
def test_the_interval_of_a_median(samples: list[float], shuffle: random.Random) -> None:
    width = half_width(samples)
    assert width is not None
    middle = sorted(samples)[len(samples) // 2]
    assert 0 <= width <= (max(samples) - min(samples)) / min(samples)
    assert width == half_width(shuffle.sample(samples, len(samples)))
    assume(middle > 0)
    assert half_width([2 * sample for sample in samples]) == pytest.approx(width)


def test_six_samples_span_the_interval() -> None:
    assert half_width([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx(2.5 / 3.5)
    assert half_width([1.0, *[2.0] * 30, 50.0]) == 0.0  # outliers are outside it
