"""The options of a profile: what is not given is as by default, wherever the options come from."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec_callback import LowPrecisionProfiler
from lowprec_callback.engines.plain_torch import PlainTorchEngine
from lowprec_callback.recipes import RecipeError
from lowprec_callback.sweep.options import CALLBACKS_OWN, options_of
from lowprec_callback.sweep.plan import Settings
from lowprec_callback.sweep.session import Options, ProfilerError, _cards

# --- Defaults --------------------------------------------------------------------------------------------


def test_the_callback_and_profile_have_the_same_defaults() -> None:
    assert options_of("profile") == LowPrecisionProfiler()._options


def test_defaults_are_those_of_settings_and_options() -> None:
    found = options_of("profile")
    assert found == Options(settings=Settings(nvtx_steps=2, max_rounds=4 * Settings.rounds))


def test_the_callback_takes_every_option_and_none_besides() -> None:
    names = {each.name for owner in (Settings, Options) for each in fields(owner)} - {"settings"}
    assert set(inspect.signature(LowPrecisionProfiler).parameters) == names | CALLBACKS_OWN


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, 12),
        ({"rounds": 2}, 8),
        ({"rounds": 1}, 0),
        ({"rounds": 2, "max_rounds": None}, 8),
        ({"rounds": 2, "max_rounds": 5}, 5),
        ({"max_rounds": 0}, 0),
    ],
)
def test_rounds_at_most(given: dict[str, Any], most: int) -> None:
    assert options_of("profile", **given).settings.max_rounds == most


def test_what_is_given_arrives(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "recipes": ["bf16"],
        "baseline": "fp32",
        "gemm_benchmark": False,
        "nvtx": False,
        "progress": False,
        "keep_rank_recordings": True,
        "recipe_arguments": {"fp8_delayed": {"margin": 1}},
        "max_seconds": 60,
        "continue_with": "bf16",
    }
    sizes: dict[str, Any] = {
        "rounds": 5,
        "settle_steps": 2,
        "timed_steps": 3,
        "traced_steps": 1,
        "seed": 9,
        "nvtx_steps": 1,
        "max_rounds": 6,
        "step_precision": 0.5,
        "guard_steps": 1,
        "block_seconds": None,
    }
    found = options_of("profile", **given, **sizes, output_dir=tmp_path, stop_after=True)
    assert found == Options(settings=Settings(**sizes), output_dir=str(tmp_path), **given)


def test_what_is_wrong_is_told_with_the_owners_name() -> None:
    with pytest.raises(ProfilerError, match=r"^mine: rounds=0: must be a whole number of at least 1"):
        options_of("mine", rounds=0)
    with pytest.raises(ProfilerError, match=r"^mine: rounds='2'"):
        options_of("mine", rounds="2")
    with pytest.raises(ProfilerError, match=r"^mine: fail_on_fallback needs traced_steps"):
        options_of("mine", fail_on_fallback=True, traced_steps=0)
    with pytest.raises(TypeError, match=r"^mine\(\) got an unexpected keyword argument 'settings'"):
        options_of("mine", settings=Settings())


# --- Arguments of recipes --------------------------------------------------------------------------------


@pytest.fixture
def engine() -> PlainTorchEngine:
    return PlainTorchEngine(torch.nn.Linear(16, 16), torch.device("cpu"), "a test")


def card(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("based_on", ["bf16", "fp8_delayed"])
def test_a_card_that_only_continue_with_names_may_be_given_arguments(
    based_on: str, tmp_path: Path, engine: PlainTorchEngine
) -> None:
    """Also a card for another engine, which matters where `stop_after` leaves nothing to continue."""
    file = card(tmp_path / "mine.toml", f'name = "mine"\nbased_on = "{based_on}"\n')
    arguments: dict[str, Any] = {"mine": {} if based_on == "bf16" else {"margin": 1}}
    baseline, cards = _cards(Options(continue_with=file, recipe_arguments=arguments), engine)
    assert [each.name for each in cards] == ["fp32", "bf16"], "it is not profiled for that"
    assert baseline is cards[0]
    with pytest.raises(RecipeError, match="recipe_arguments names 'mine'; known recipes: fp32, bf16"):
        _cards(Options(recipe_arguments=arguments), engine)


def test_the_card_that_runs_wins_over_one_that_only_training_continues_with(
    tmp_path: Path, engine: PlainTorchEngine
) -> None:
    runs = card(tmp_path / "runs.toml", 'name = "mine"\nbased_on = "bf16"\n')
    other = card(tmp_path / "other.toml", 'name = "mine"\nbased_on = "fp8_delayed"\n')
    _, cards = _cards(Options(recipes=[runs], continue_with=other, recipe_arguments={"mine": {}}), engine)
    assert [each.autocast_dtype for each in cards if each.name == "mine"] == ["bfloat16"]
