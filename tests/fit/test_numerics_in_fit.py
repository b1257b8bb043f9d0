"""The numerics guard inside a real `fit` on a CPU: it repeats steps exactly, and finds recipes that compute wrongly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.recording import Loss, Plan, Problem, Recording, StepTime, Trial
from lowprec_callback.report import NumericsReport, Report
from lowprec_callback.sweep.plan import GUARD_SETTLE, Settings
from tests.fit.models import Tiny, loader, profiler, trainer

SHORT: dict[str, Any] = {"rounds": 1, "traced_steps": 0, "guard_steps": 4}


def fit(
    folder: Path, module: Tiny, data: Any = None, *, steps: int = 40, accumulate: int = 1, **arguments: Any
) -> LowPrecisionProfiler:
    callback = profiler(folder, **{**SHORT, **arguments})
    run = trainer(folder, callback, steps=steps, accumulate_grad_batches=accumulate)
    run.fit(module, loader(steps * accumulate) if data is None else data)
    return callback


def facts_of(callback: LowPrecisionProfiler) -> Recording:
    assert callback.session is not None
    return callback.session.recorder.snapshot()


def trials(callback: LowPrecisionProfiler, recipe: str, repeat: int = 0) -> list[Trial]:
    return [fact for fact in facts_of(callback).of(Trial) if (fact.recipe, fact.repeat) == (recipe, repeat)]


def report_of(callback: LowPrecisionProfiler) -> Report:
    assert callback.report is not None
    return callback.report


def guard(callback: LowPrecisionProfiler, recipe: str) -> NumericsReport:
    found = report_of(callback).recipe(recipe).guard
    assert found is not None
    return found


def narrow() -> bool:
    """Whether the recipe of this step is bf16: what is planted is planted in that one alone."""
    return torch.is_autocast_enabled("cpu")


# --- sound ----------------------------------------------------------------------------------------------------------


def test_the_baseline_repeats_itself_to_the_last_bit_with_dropout(tmp_path: Path) -> None:
    """Between its two runs there are those of another recipe, other batches, and other random numbers."""
    callback = fit(tmp_path, Tiny())
    first, again = trials(callback, "fp32"), trials(callback, "fp32", repeat=1)
    assert [trial.step for trial in first] == list(range(-GUARD_SETTLE, 4))
    compared = range(GUARD_SETTLE, len(first))
    assert all(first[at].loss == again[at].loss for at in compared)
    assert all(first[at].grad_norm == again[at].grad_norm for at in compared)
    assert first[GUARD_SETTLE].norms == again[GUARD_SETTLE].norms
    assert len({trial.loss for trial in first[GUARD_SETTLE:]}) == 4  # four batches, four losses
    assert all(trial.replayed for trial in [*first, *again] if trial.step >= 0)
    base = guard(callback, "fp32")
    assert (base.state, base.distance.value, base.gradient_ratio.value) == ("ok", 0.0, 1.0)
    assert "the same to the last bit" in base.why


def test_a_sound_recipe_is_ok_and_not_equal(tmp_path: Path) -> None:
    callback = fit(tmp_path, Tiny())
    found = guard(callback, "bf16")
    assert found.state == "ok"
    assert found.steps == 4
    assert found.distance.value is not None
    assert 0 < found.distance.value < 1
    assert found.gradient_ratio.value == pytest.approx(1.0, abs=0.05)
    assert (found.zero.value, found.not_finite.value) == (0, 0)
    assert report_of(callback).recipe("bf16").void is None
    first, own = trials(callback, "fp32")[GUARD_SETTLE], trials(callback, "bf16")
    settle, second = own[0], own[GUARD_SETTLE]
    assert second.names == first.names == tuple(name for name, _ in Tiny().named_parameters())
    assert second.elements == sum(p.numel() for p in Tiny().parameters())
    # The updates of the steps in which scales settle were undone: a stateless recipe begins with the same loss again.
    assert settle.loss == second.loss


def test_a_step_is_all_of_its_micro_batches(tmp_path: Path) -> None:
    callback = fit(tmp_path, Tiny(), accumulate=3)
    first, again = trials(callback, "fp32"), trials(callback, "fp32", repeat=1)
    assert {trial.micro_batches for trial in first} == {3}
    assert [trial.loss for trial in first[GUARD_SETTLE:]] == [trial.loss for trial in again[GUARD_SETTLE:]]
    assert guard(callback, "bf16").state == "ok"


def test_timed_steps_know_nothing_of_it(tmp_path: Path) -> None:
    """No fact of the guard stands between timed steps, and the loop's own batches are the ones that they run on."""
    callback = fit(tmp_path, Tiny(), rounds=2)
    kinds = [type(fact) for fact in facts_of(callback)]
    assert kinds.index(Trial) > max(at for at, kind in enumerate(kinds) if kind is StepTime)


# --- batches of all kinds -------------------------------------------------------------------------------------------


class Nested(Tiny):
    """A batch of several kinds of containers, which the step takes apart."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch["rows"].pop()
        target = batch.pop("target")
        rows.mul_(2)
        return super().training_step(rows, batch_idx) + 0 * target.sum()


class Dicts:
    """Batches as dicts; each tensor a view of all of the data."""

    def __init__(self, batches: int) -> None:
        self.all = torch.randn(batches * 8, 32, generator=torch.Generator().manual_seed(1))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for rows in self.all.clone().split(8):
            yield {"rows": [rows], "target": rows[0], "names": ("a", None)}


def test_a_step_may_take_its_batch_apart(tmp_path: Path) -> None:
    callback = fit(tmp_path, Nested(), Dicts(60))
    assert guard(callback, "fp32").distance.value == 0.0
    assert guard(callback, "bf16").state == "ok"


class Opaque(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["make"](), batch_idx)


class Functions:
    """Batches that hold a function."""

    def __iter__(self) -> Iterator[dict[str, Callable[[], torch.Tensor]]]:
        for rows in loader(60):
            yield {"make": lambda rows=rows: rows}


def test_a_batch_that_cannot_be_copied_is_a_reason(tmp_path: Path) -> None:
    callback = fit(tmp_path, Opaque(), Functions())
    for name in ("fp32", "bf16"):
        found = guard(callback, name)
        assert found.state == "unknown"
        assert "a batch cannot be copied" in found.why
        assert (found.zero.value, found.not_finite.value) == (0, 0)  # what needs no comparison is known
    assert report_of(callback).recipe("bf16").void is None


class Iterated(Tiny):
    """Fetches its own batches."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_the_datas_iterator_cannot_be_given_again(tmp_path: Path) -> None:
    callback = fit(tmp_path, Iterated())
    found = guard(callback, "bf16")
    assert found.state == "unknown"
    assert "the data's iterator itself" in found.why
    assert found.not_finite.value == 0


class Closures(Tiny):
    """LBFGS: several forward passes over the same batch, each its own number."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_several_passes_over_one_batch_are_one_batch(tmp_path: Path) -> None:
    callback = fit(tmp_path, Closures())
    assert {trial.micro_batches for trial in trials(callback, "fp32")} == {1}
    assert guard(callback, "fp32").distance.value == 0.0
    assert guard(callback, "bf16").steps == 4


class Manual(Tiny):
    """Steps its optimizer itself, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_without_a_loss(tmp_path: Path) -> None:
    callback = fit(tmp_path, Manual())
    found = guard(callback, "bf16")
    assert found.state == "unknown"
    assert "training_step returned no loss" in found.why
    assert found.gradient_ratio.value == pytest.approx(1.0, abs=0.05)
    assert (found.zero.value, found.not_finite.value) == (0, 0)


SEEN = [0]
"""Steps that `Counting` has seen; a name of its module's, which nobody puts back."""


class Counting(Tiny):
    """Its loss depends on how many steps it has seen."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        SEEN[0] += 1
        return super().training_step(batch, batch_idx) * (1 + 0.05 * SEEN[0])


def test_a_loss_that_does_not_repeat_is_no_yardstick(tmp_path: Path) -> None:
    callback = fit(tmp_path, Counting())
    assert guard(callback, "fp32").state == "unknown"
    assert "something that is not put back decides it" in guard(callback, "fp32").why
    found = guard(callback, "bf16")
    assert found.state == "unknown"
    assert "fp32 repeated is" in found.why


# --- off ------------------------------------------------------------------------------------------------------------


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    callback = fit(tmp_path, Tiny(), guard_steps=0, stop_after=True)
    assert facts_of(callback).of(Plan)[0].steps == Settings(1, 1, 2, 0, guard_steps=0).steps(2)
    assert "switched off" in guard(callback, "bf16").why


def test_an_exception_in_it_costs_the_guard_alone(tmp_path: Path) -> None:
    def fail(module: Tiny, step: int) -> None:
        sweep = callback.session.sweep if callback.session is not None else None
        if sweep is not None and sweep.trial is not None and sweep.trial.step == 1:
            raise RuntimeError("the user's")

    module, callback = Tiny(fail), profiler(tmp_path, **SHORT)
    run = trainer(tmp_path, callback, steps=5)
    run.fit(module, loader(40))
    assert (run.global_step, module.steps) == (5, 5)
    facts = facts_of(callback)
    assert facts.of(Trial)
    assert facts.of(StepTime)
    assert {problem.where for problem in facts.of(Problem)} == {"numerics guard"}
    assert callback.session is not None
    assert callback.session.sweep.trial is None
    assert "training_step" not in module.__dict__


# --- planted --------------------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """Passes values through, and gradients times a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


class Planted(Tiny):
    """In bf16 alone, what comes out of the network is changed, or the loss is."""

    def __init__(
        self, loss: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, inside: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.change = loss
        if inside is not None:
            self.net.insert(3, inside)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.change(loss) if narrow() else loss


class Gradient(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.factor) if narrow() else x


def test_every_gradient_zero_is_void_and_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = fit(tmp_path, Planted(lambda loss: Scaled.apply(loss, 0.0)))
    found, report = guard(callback, "bf16"), report_of(callback)
    assert (found.state, found.why, found.zero.value) == ("zero gradients", "every gradient is zero", 6)
    assert report.recipe("bf16").void == "every gradient is zero"
    assert report.headline[0].startswith("bf16: every gradient is zero, so its speed is void")
    assert not any("faster" in text or "slower" in text for text in report.headline)
    assert guard(callback, "fp32").state == "ok"
    page = capsys.readouterr().out
    assert page.index("every gradient is zero") < page.index("step ms")
    assert "zero gradients" in page


def test_gradients_that_only_the_baseline_has_are_named(tmp_path: Path) -> None:
    """The first layers get none, the last does: not every gradient is zero."""
    callback = fit(tmp_path, Planted(inside=Gradient(0.0)))
    found = guard(callback, "bf16")
    assert found.state == "zero gradients"
    assert "net.0.weight" in found.why
    assert "net.5" not in found.why
    assert report_of(callback).recipe("bf16").void == found.why


def test_a_loss_that_is_not_finite_is_void_and_harms_no_other(tmp_path: Path) -> None:
    """Its NaN gets into the weights that all recipes share."""
    callback = fit(tmp_path, Planted(lambda loss: loss * float("nan")), rounds=2)
    report = report_of(callback)
    assert guard(callback, "bf16").state == "not finite"
    assert guard(callback, "bf16").why == "the loss is nan before the first update from the common state"
    assert report.headline[0].startswith("bf16: the loss is nan")
    assert report.recipe("bf16").void is not None
    assert guard(callback, "fp32").state == "ok"
    assert report.recipe("fp32").void is None
    losses = facts_of(callback).of(Loss)
    assert all((fact.value == fact.value) == (fact.recipe == "fp32") for fact in losses)
    assert any(
        "start again from the state before the profile" in fact.message for fact in facts_of(callback).of(Problem)
    )


def test_gradients_that_are_not_finite_are_void(tmp_path: Path) -> None:
    callback = fit(tmp_path, Planted(inside=Gradient(float("inf"))))
    found = guard(callback, "bf16")
    assert found.state == "not finite"
    assert found.why.startswith(
        "the gradients of net.0.weight, net.0.bias, net.1.weight and 1 more are not finite before"
    )
    assert trials(callback, "bf16")[GUARD_SETTLE].not_finite == (
        "net.0.weight",
        "net.0.bias",
        "net.1.weight",
        "net.1.bias",
    )


def test_a_loss_that_is_a_tenth_off_is_far_and_told_before_the_speed(tmp_path: Path) -> None:
    callback = fit(tmp_path, Planted(lambda loss: loss * 1.1))
    found, report = guard(callback, "bf16"), report_of(callback)
    assert found.state == "far"
    assert found.distance.value is not None
    assert 5 < found.distance.value < 11
    assert report.recipe("bf16").void is None  # its speed stands
    assert report.headline[0].startswith("bf16: the loss is ")
    assert "Look into that before you count on its speed." in report.headline[0]
    assert any("bf16" in text.lower() and " ms" in text for text in report.headline[1:])


def test_gradients_four_times_as_long_are_far_although_the_loss_is_near(tmp_path: Path) -> None:
    """Adam does not mind the length, and neither does the loss."""
    callback = fit(tmp_path, Planted(inside=Gradient(4.0)))
    found = guard(callback, "bf16")
    assert found.state == "far"
    assert "at the same weights, gradients are not as long as fp32's: those of net.0.weight" in found.why
    factor = re.search(r"([\d.]+)x in the median", found.why)
    assert factor is not None
    assert float(factor[1]) == pytest.approx(4.0, rel=0.05)


# --- a loss scaler --------------------------------------------------------------------------------------------------


def test_norms_are_without_the_loss_scalers_scale(tmp_path: Path) -> None:
    """Whoever takes the scale out, the precision plugin or the optimizer itself."""
    norms = {}
    for fused in (False, True):

        class Own(Tiny):
            def configure_optimizers(self, fused: bool = fused) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=fused)

        from lightning.pytorch.plugins.precision import MixedPrecision

        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        torch.manual_seed(0)
        callback = profiler(tmp_path / str(fused), **SHORT)
        trainer(tmp_path, callback, steps=40, plugins=[plugin]).fit(Own(), loader(40))
        first = trials(callback, "fp32")[1]
        assert first.loss_scale == 1024.0
        norms[fused] = first.grad_norm
    plain = fit(tmp_path / "plain", seeded())
    assert norms[False] == pytest.approx(trials(plain, "fp32")[1].grad_norm, rel=1e-3)
    assert norms[True] == pytest.approx(norms[False], rel=1e-3)


def seeded() -> Tiny:
    torch.manual_seed(0)
    return Tiny()
