"""The published method: what it calls, how often and in which order; never how fast it is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.engines import te_tutorial
from lowprec_callback.engines.te_tutorial import copies_quantized, times
from lowprec_callback.engines.transformer_engine import TransformerEngineEngine, load
from lowprec_callback.recipes import load_cards
from lowprec_callback.recording import ROLES, Gemm, GemmTime, Role
from tests.engines import fake_te

CARDS = load_cards()
CPU = torch.device("cpu")
M, K, N = 32, 16, 48


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_te.Fake]:
    yield fake_te.install(monkeypatch)
    load.cache_clear()


class Played:
    """A GPU on which every product takes a millisecond; it counts the events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls = 0
        self.between: list[int] = []
        """Products between the two events of each sample."""
        self.before: list[int] = []
        """Products before its first event, since the sample before."""
        played = self
        opened: list[int] = []
        last = [0]

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = played.now
                if opened:
                    played.between.append(played.calls - opened.pop())
                    last[0] = played.calls
                else:
                    played.before.append(played.calls - last[0])
                    opened.append(played.calls)

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def product(self, *_: Any, **__: Any) -> torch.Tensor:
        self.now += 1.0
        self.calls += 1
        return torch.zeros(1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fake: fake_te.Fake) -> Played:
    played = Played(monkeypatch)
    fake.gemm = lambda a, b, layout: (played.product(), fake_te.multiply(a, b, layout))[1]
    fake.te.cpp_extensions = SimpleNamespace(general_gemm=played.product)
    monkeypatch.setattr(te_tutorial.torch, "matmul", played.product)
    return played


def gemm(role: Role, m: int = M, k: int = K, n: int = N, **changes: Any) -> Gemm:
    values: dict[str, Any] = {"calls": 1, "family": "Linear", "quantizable": True, **changes}
    return Gemm("QKV", role, m, k, n, **values)


def timed(fake: fake_te.Fake, recipes: list[str], gemms: list[Gemm], modes: Any = ("autocast",)) -> list[GemmTime]:
    engine = TransformerEngineEngine(fake_te.Linear(fake, 16, 16), CPU, "a test")
    return list(times(engine, [CARDS[name] for name in recipes], gemms, modes, warm_ups=3, iterations=5))


def test_one_pair_of_events_around_the_iterations(fake: fake_te.Fake, gpu: Played) -> None:
    (fact,) = timed(fake, ["bf16"], [gemm("fprop")])
    assert fact.samples_ms == (1.0,)
    assert (fact.calls_per_sample, fact.method, fact.mode) == (5, "te-tutorial", "autocast")
    assert gpu.between == [5]
    assert gpu.before == [3 + 1]  # the warm-ups, and the leading call that hides the launch of the rest


def test_every_gemm_is_a_forward_of_its_own_sizes(
    fake: fake_te.Fake, gpu: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int, bool]] = []
    original = fake.te.Linear

    def make(k: int, n: int, **options: Any) -> Any:
        made.append((k, n, options["bias"]))
        return original(k, n, **options)

    monkeypatch.setattr(fake.te, "Linear", make)
    timed(fake, ["fp8_current"], [gemm(role) for role in ROLES])
    assert made == [(K, N, False), (N, K, False), (M, N, False)]


def test_each_shape_is_run_under_every_recipe_before_the_next(fake: fake_te.Fake, gpu: Played) -> None:
    facts = timed(fake, ["bf16", "fp8_delayed", "fp8_current"], [gemm("fprop"), gemm("dgrad")])
    assert [(fact.role, fact.recipe) for fact in facts] == [
        (role, recipe) for role in ("fprop", "dgrad") for recipe in ("bf16", "fp8_current", "fp8_delayed")
    ]


def test_equal_products_are_timed_once_and_those_outside_not_at_all(fake: fake_te.Fake, gpu: Played) -> None:
    gemms = [gemm("fprop"), gemm("fprop"), gemm("fprop", quantizable=False), gemm("fprop", 64, groups=4)]
    assert len(timed(fake, ["bf16"], gemms)) == 1


def test_pre_quantized_calls_the_gemm_alone(fake: fake_te.Fake, gpu: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[Any] = []

    def general_gemm(*operands: Any, **options: Any) -> Any:
        layouts.append(options["layout"])
        return gpu.product()

    fake.te.cpp_extensions = SimpleNamespace(general_gemm=general_gemm)
    monkeypatch.setattr(te_tutorial, "_quantizer", lambda *_: lambda x: x)
    facts = timed(fake, ["fp8_current"], [gemm(role) for role in ROLES], ("kernel",))
    assert [fact.samples_ms for fact in facts] == [(1.0,)] * 3
    assert set(layouts) == {"NT"}  # whatever the role


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block"])
def test_what_the_script_leaves_out_pre_quantized_is_left_out_with_the_reason(
    fake: fake_te.Fake, gpu: Played, recipe: str
) -> None:
    (fact,) = timed(fake, [recipe], [gemm("fprop")], ("kernel",))
    assert fact.samples_ms == ()
    assert fact.failure == te_tutorial.LEFT_OUT[CARDS[recipe].scaling]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("20 GiB"), "out of memory"),
        (RuntimeError("no\n  such GEMM"), "RuntimeError: no such GEMM"),
    ],
)
def test_a_shape_that_fails_keeps_its_row(
    fake: fake_te.Fake, gpu: Played, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(te_tutorial.torch, "matmul", fail)
    facts = timed(fake, ["bf16", "fp8_current"], [gemm("fprop")])
    assert [(fact.recipe, fact.failure) for fact in facts] == [("bf16", reason), ("fp8_current", None)]


def test_elements_quantized_in_a_layer_of_codonfm_5b() -> None:
    """3,978 against 2,483 million: counted by hand from the shapes of the published tables."""
    m, h, i = 31 * 512, 4096, 16384
    layers = [(m, h, 3 * h), (m, h, h), (m, h, i), (m, i, h)]
    published, training = (sum(side) for side in zip(*(copies_quantized(*shape) for shape in layers), strict=True))
    assert round(published / 1e6) == 3978
    assert round(training / 1e6) == 2483


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**5))
def test_the_published_method_never_quantizes_less(m: int, k: int, n: int) -> None:
    published, training = copies_quantized(m, k, n)
    assert training == 2 * (m * k + n * k + m * n)  # X, W and dY, row- and column-wise
    assert training <= published <= 2 * training
