"""Arguments that the plan does not look at: what is refused, in which words, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowprec_callback.sweep.arguments import RULES, check


def refused(**values: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the tests look at the text)
        check(values)
    return str(caught.value)


def write(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.fixture
def short(tmp_path: Path) -> str:
    return write(tmp_path / "card.toml", 'name = "short"\nbased_on = "fp8_delayed"\narguments = {margin = 1}\n')


def test_no_argument_is_needed() -> None:
    check({})
    check({**dict.fromkeys(RULES), "gemm_benchmark": True, **dict.fromkeys(FLAGS, False)})


FLAGS = ("gemm_benchmark", "stop_after", "progress", "log", "keep_rank_recordings", "fail_on_fallback")


# --- recipe_arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"fp8_delayed": {"amax_histroy_len": 16}},
            "recipe_arguments['fp8_delayed']: DelayedScaling takes no argument 'amax_histroy_len'; "
            "did you mean 'amax_history_len'? known: fp8_format, ",
        ),
        (
            {"fp8_current": {}, "fp8_delayed": {"margin": 1, "amax_history_len": "many"}},
            "recipe_arguments['fp8_delayed']: amax_history_len='many': must be a whole number of at least 1",
        ),
        (
            {"fp8_delayed": {"amax_history_len": 0}},
            "recipe_arguments['fp8_delayed']: amax_history_len=0: must be a whole",
        ),
        (
            {"fp8_delayed": {"amax_history_len": True}},
            "recipe_arguments['fp8_delayed']: amax_history_len=True: must be a",
        ),
        ({"fp8_delayed": {"margin": 1.5}}, "recipe_arguments['fp8_delayed']: margin=1.5: must be a whole number"),
        ({"mxfp8": {"fp8_format": "E9M9"}}, "recipe_arguments['mxfp8']: fp8_format='E9M9': must be 'HYBRID' or 'E4M3'"),
        (
            {"fp8_delayed": {"amax_compute_algo": "median"}},
            "recipe_arguments['fp8_delayed']: amax_compute_algo='median': ",
        ),
        (
            {"nvfp4": {"disable_rht": object}},
            "recipe_arguments['nvfp4']: disable_rht=<class 'object'>: must be True or",
        ),
        (
            {"fp8_block": {"x_block_scaling_dim": 2}},
            "recipe_arguments['fp8_block']: x_block_scaling_dim=2 and w_block_",
        ),
        ({"bf16": {"margin": 1}}, "recipe_arguments['bf16']: a recipe without te_class takes no argument 'margin'"),
        ({"fp8_delaid": {}}, "recipe_arguments names 'fp8_delaid'; known recipes: fp32, bf16, fp8_delayed, "),
        ({"fp8_delayed": None}, "recipe_arguments={'fp8_delayed': None}: must be None or arguments by recipe"),
        ({"fp8_delayed": {1: 2}}, "recipe_arguments={'fp8_delayed': {1: 2}}: must be None or arguments by recipe"),
        ([("fp8_delayed", {})], "recipe_arguments=[('fp8_delayed', {})]: must be None or arguments by recipe"),
    ],
)
def test_what_a_recipe_does_not_take_is_refused(arguments: Any, sentence: str) -> None:
    assert refused(recipe_arguments=arguments).startswith(sentence)


def test_a_misspelled_recipe_gets_a_suggestion() -> None:
    assert refused(recipe_arguments={"FP8-delayed": {}}).endswith("; did you mean 'fp8_delayed'?")
    assert "did you mean" not in refused(recipe_arguments={"zzz": {}})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"fp8_delayed": {}},
        {"bf16": {}},
        {"fp8_delayed": {"amax_history_len": 16.0, "margin": -6, "amax_compute_algo": lambda history: history[0]}},
        {"fp8_delayed": {"scaling_factor_compute_algo": print, "reduce_amax": 0}},
        {"fp8_current": {"backward_override": None, "fp8_gemm_fprop": {"use_split_accumulator": True}}},
        {"fp8_delayed": {"amax_history_len": np.int64(16)}, "nvfp4": {"fp4_format": "E2M1"}},
        {"fp8_block": {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1}},
    ],
)
def test_what_it_takes_is_not(arguments: Any) -> None:
    check({"recipe_arguments": arguments})


@pytest.mark.parametrize("role", ["recipes", "baseline", "continue_with"])
def test_a_users_card_is_known_wherever_it_is_named(role: str, short: str) -> None:
    check({role: short, "recipe_arguments": {"short": {"amax_history_len": 16}}})
    assert refused(**{role: short}, recipe_arguments={"short": {"amax_history_len": 0}}).startswith(
        "recipe_arguments['short']: amax_history_len=0"
    )
    assert refused(recipe_arguments={"short": {}}).startswith("recipe_arguments names 'short'")


def test_the_baseline_may_have_arguments() -> None:
    check({"baseline": "fp8_delayed", "recipe_arguments": {"fp8_delayed": {"margin": 1}}})
    assert "margin=None: must be" in refused(baseline="fp8_delayed", recipe_arguments={"fp8_delayed": {"margin": None}})


# --- Recipes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", " ", [], (), [""], ["bf16", " "], "bf16,"])
def test_no_name_is_no_recipe(value: Any) -> None:
    assert refused(recipes=value).startswith("recipes: no recipe is named")


@pytest.mark.parametrize(
    "value", [0, True, {"bf16"}, {"bf16": 1}, b"bf16", ["bf16", 1], [["bf16"]], Path("a.toml"), np.array(["bf16"])]
)
def test_recipes_are_text(value: Any) -> None:
    assert "must be None, or names, paths" in refused(recipes=value)


@pytest.mark.parametrize(
    "value", [None, "bf16", "bf16, mxfp8", ["bf16", "bf16"], ("bf16", "fp8_delayed"), np.str_("bf16")]
)
def test_recipes_by_name_each_once(value: Any) -> None:
    check({"recipes": value})


@pytest.mark.parametrize("role", ["baseline", "continue_with"])
@pytest.mark.parametrize("value", ["", " ", "bf16,fp8_delayed", "bf16,", "bf17", "no.toml", ["bf16"], True, 0, ()])
def test_one_recipe_is_one(role: str, value: Any) -> None:
    assert refused(**{role: value}).startswith(
        (f"{role}: no recipe", f"{role}: no.toml", f"{role}={value!r}: must be None or")
    )


@pytest.mark.parametrize("role", ["baseline", "continue_with"])
def test_a_folder_of_several_is_not_one_recipe(role: str, short: str, tmp_path: Path) -> None:
    check({role: str(tmp_path)})
    write(tmp_path / "other.toml", 'name = "wide"\nbased_on = "fp32"\n')
    assert refused(**{role: str(tmp_path)}).endswith(
        "must be None or one recipe: its name, or the path of a TOML card; this names short, wide"
    )


def test_a_folder_for_either_engine_is_one(tmp_path: Path) -> None:
    """Before there is a model, nobody knows the engine."""
    write(tmp_path / "other.toml", 'name = "wide"\nbased_on = "fp32"\n')
    check({"recipes": str(tmp_path), "recipe_arguments": {"wide": {}}})


def test_a_card_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    wrong = write(tmp_path / "wrong.toml", 'name = "x"\nbased_on = "fp8_delayed"\narguments = {margin = "wide"}\n')
    assert refused(recipes=wrong) == f"recipes: {wrong}: margin='wide': must be a whole number"
    assert refused(recipes="x" * 5000).startswith("recipes: no recipe 'xxx")


# --- The others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "", "yes", 1.0, []])
def test_a_flag_is_a_flag(name: str, value: Any) -> None:
    assert refused(**{name: value}) == f"{name}={value!r}: must be True or False"


def test_a_scalar_of_numpy_or_torch_is_named() -> None:
    assert "must be True or False; this is a numpy.bool" in refused(log=np.True_)
    assert refused(max_seconds=np.int64(60)).endswith("above 0; this is a numpy.int64, whose .item() would do")
    assert refused(max_seconds=torch.tensor(60.0)).endswith("above 0; this is a torch.Tensor, whose .item() would do")
    assert refused(max_seconds=np.int64(0)).endswith("above 0")
    assert refused(max_seconds=np.ones(2)).endswith("above 0")
    check({"max_seconds": np.float64(60.0)})


@pytest.mark.parametrize("value", [0, -1, 0.0, True, False, "60", "", float("nan"), float("inf"), 10**400, [60], 1j])
def test_a_limit_is_a_number_above_zero(value: Any) -> None:
    assert "must be None or a number of seconds above 0" in refused(max_seconds=value)


@pytest.mark.parametrize("value", [None, 1, 0.5, 86400])
def test_limits(value: Any) -> None:
    check({"max_seconds": value})


@pytest.mark.parametrize("value", ["", " ", 0, True, b"runs", ["runs"], "a\0b"])
def test_a_folder_is_a_path(value: Any) -> None:
    assert refused(output_dir=value) == f"output_dir={value!r}: must be None or the path of a folder"


def test_output_dir_is_a_folder_or_where_one_can_be(tmp_path: Path) -> None:
    for value in (None, "runs", str(tmp_path), tmp_path, tmp_path / "new" / "er"):
        check({"output_dir": value})
    file = write(tmp_path / "file", "")
    assert refused(output_dir=file).endswith("must be None or the path of a folder")
    assert not (tmp_path / "new").exists(), "looking makes nothing"
