"""Arguments: from YAML, checked when constructed; and progress beside Lightning's own bars."""

from __future__ import annotations

import inspect
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI

from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.recording import Plan
from lowprec_callback.sweep.arguments import RULES
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.session import ProfilerError
from tests.fit.models import Tiny, loader, short, trainer
from tests.fit.test_sweep_in_fit import recording_of

ARGUMENTS: dict[str, Any] = {
    "recipes": ["bf16", "fp8_delayed"],
    "baseline": "fp32",
    "rounds": 2,
    "settle_steps": 1,
    "timed_steps": 2,
    "traced_steps": 1,
    "gemm_benchmark": False,
    "continue_with": "bf16",
    "stop_after": True,
    "seed": 7,
    "nvtx": False,
    "nvtx_steps": 1,
    "progress": False,
    "fail_on_fallback": False,
    "recipe_arguments": {"fp8_delayed": {"amax_history_len": 16, "fp8_format": "HYBRID"}},
    "max_seconds": 600.0,
    "guard_steps": 0,
    "log": False,
    "keep_rank_recordings": True,
    "max_rounds": 0,
    "step_precision": 0.5,
    "block_seconds": None,
}
"""Every argument, with another value than its default wherever the fit below can do with it."""


class Model(Tiny):
    """Brings its data along."""

    def train_dataloader(self) -> Any:
        return loader(60)


@pytest.mark.filterwarnings("ignore:[\\s\\S]*(Jsonargparse|was deprecated in v4)")  # Lightning's own use of it
def test_every_argument_comes_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    import yaml

    arguments = {**ARGUMENTS, "output_dir": str(tmp_path / "runs")}
    signature = inspect.signature(LowPrecisionProfiler).parameters
    assert set(arguments) == set(signature)
    config = {
        "model": {"class_path": "tests.fit.test_configuration.Model"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 40,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "callbacks": [{"class_path": "lowprec_callback.LowPrecisionProfiler", "init_args": arguments}],
        },
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    made: list[dict[str, Any]] = []
    construct = LowPrecisionProfiler.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(dict(inspect.signature(construct).bind(self, *args, **kwargs).arguments))
        construct(self, *args, **kwargs)

    noted.__signature__ = inspect.signature(construct)  # type: ignore[attr-defined]
    noted.__doc__ = construct.__doc__
    monkeypatch.setattr(LowPrecisionProfiler, "__init__", noted)
    monkeypatch.setattr(sys, "argv", ["train"])
    cli = LightningCLI(
        save_config_callback=None,
        subclass_mode_model=True,
        seed_everything_default=0,
        args=["fit", "--config", str(file)],
    )
    got = {name: value for name, value in made[-1].items() if name in arguments}
    assert {**got, "recipe_arguments": {k: dict(v) for k, v in got["recipe_arguments"].items()}} == arguments
    (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, LowPrecisionProfiler)]
    assert callback.report is not None
    assert cli.trainer.global_step == 1  # stop_after
    assert recording_of(tmp_path / "runs").of(Plan)[-1].seed == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipes": 3}, "recipes=3: must be None, or names, paths of TOML cards or folders of them: one, or a list"),
        ({"recipes": ["bf16", None]}, "recipes=['bf16', None]: must be None, or names"),
        ({"recipes": []}, "recipes: no recipe is named"),
        ({"recipes": ["bf17"]}, "recipes: no recipe 'bf17'"),
        ({"baseline": ["bf16"]}, "baseline=['bf16']: must be None or one recipe"),
        ({"baseline": "fp23"}, "baseline: no recipe 'fp23'"),
        ({"continue_with": True}, "continue_with=True: must be None or one recipe"),
        ({"gemm_benchmark": 1}, "gemm_benchmark=1: must be True or False"),
        ({"stop_after": None}, "stop_after=None: must be True or False"),
        ({"progress": "rich"}, "progress='rich': must be True or False"),
        ({"fail_on_fallback": 0}, "fail_on_fallback=0: must be True or False"),
        ({"nvtx": "yes"}, "nvtx='yes': must be True, False or None"),
        ({"output_dir": ""}, "output_dir='': must be None or the path of a folder"),
        ({"max_seconds": 0}, "max_seconds=0: must be None or a number of seconds above 0"),
        ({"max_seconds": float("nan")}, "max_seconds=nan: must be None or a number of seconds above 0"),
        ({"max_seconds": "60"}, "max_seconds='60': must be None or a number of seconds above 0"),
        ({"recipe_arguments": ["fp8_delayed"]}, "recipe_arguments=['fp8_delayed']: must be None or arguments by"),
        ({"recipe_arguments": {"fp8_delayed": 16}}, "recipe_arguments={'fp8_delayed': 16}: must be None or arguments"),
        ({"recipe_arguments": {"fp8": {}}}, "recipe_arguments names 'fp8'; known recipes: fp32, bf16"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_allowed(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProfilerError) as caught:
        LowPrecisionProfiler(**arguments)
    assert str(caught.value).startswith(f"LowPrecisionProfiler: {sentence}")


def test_every_argument_is_looked_at() -> None:
    """By the plan or by the rules; one without either would fail in the middle of a fit."""
    signature = set(inspect.signature(LowPrecisionProfiler).parameters)
    assert set(RULES) | set(Settings.__dataclass_fields__) >= signature - {"max_rounds"}


@pytest.mark.parametrize("role", ["recipes", "baseline", "continue_with"])
def test_a_card_of_ones_own_may_be_given_arguments_wherever_it_is_named(role: str, tmp_path: Path) -> None:
    card = tmp_path / "mine.toml"
    card.write_text('name = "mine"\nbased_on = "bf16"\n', encoding="utf-8")
    named: dict[str, Any] = {role: str(card), "recipe_arguments": {"mine": {}}}
    callback = short(tmp_path / "runs", rounds=1, traced_steps=0, progress=False, **named)
    trainer(tmp_path, callback, steps=2).fit(Tiny(), loader(2))
    assert callback.why_not is None
    assert callback.report is not None
    assert ("mine" in {part.name for part in callback.report.recipes}) is (role != "continue_with")


def test_a_path_is_a_path(tmp_path: Path) -> None:
    assert LowPrecisionProfiler(output_dir=tmp_path)._options.output_dir == str(tmp_path)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*ipywidgets")
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lines_of_ours_stand_by_themselves_beside_lightnings_bars(
    bar: type[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowprec_callback.show.plots.save_all", lambda *_: [])
    monkeypatch.setattr("lowprec_callback.show.html.save", lambda *_: None)
    torch.manual_seed(0)
    callback = short(tmp_path)
    run = trainer(tmp_path, callback, bar(refresh_rate=1), steps=30, enable_progress_bar=True)
    run.fit(Tiny(), loader(30))
    said = capfd.readouterr()
    lines = [line for line in re.split(r"[\n\r]", said.out + said.err) if "lowprec" in line]
    assert len([line for line in lines if line.startswith("lowprec: step ")]) > 3
    # Nothing of a bar stands before or behind our words on a line.
    assert not [line for line in lines if "it/s" in line or "Epoch" in line or "━" in line]
    assert callback.report is not None
    assert run.global_step == 30
    if bar is TQDMProgressBar:
        assert re.search(r"30/\d+|30it", said.err + said.out)


@pytest.mark.filterwarnings("ignore:.*ipywidgets")
@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_clock_of_lightnings_bar_does_not_count_the_sweep(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback before ours and one behind it read the bar's clock and their own, in the batch of the sweep."""

    class Reads(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            shown = bar.train_progress_bar
            elapsed = shown.format_dict["elapsed"] if kind is TQDMProgressBar else shown.elapsed
            read.append((elapsed, time.monotonic()))

    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", lambda _self: time.sleep(0.5))
    read: list[tuple[float, float]] = []
    bar, callback = kind(), short(tmp_path, rounds=1, traced_steps=0, progress=False)
    run = trainer(tmp_path, bar, Reads(), callback, Reads(), steps=1, enable_progress_bar=True)
    run.fit(Tiny(), loader(1))
    assert callback.why_not is None
    (before, began), (after, ended) = read
    assert ended - began > 0.5
    assert after - before < 0.1
