"""Cards: what the built-in ones say, how a wrong one is refused, and how a user's own are found."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback import recipes, recording
from lowprec_callback.recipes import RecipeCard, RecipeError, load_cards, resolve, static_refusal

CARDS = load_cards()
TE_CARDS = [card for card in CARDS.values() if card.te_class is not None]
ROOT = Path(recipes.__file__).parents[1]


# --- The built-in cards ----------------------------------------------------------------------------------


def test_the_cards_are_listed_from_wide_to_narrow() -> None:
    assert tuple(CARDS) == recipes.ORDER
    assert [card.name for card in resolve(None, "transformer_engine")] == list(recipes.ORDER[1:])
    assert [card.name for card in resolve(None, "plain_torch")] == ["fp32", "bf16"]


def test_every_file_is_named_after_its_recipe() -> None:
    for file in recipes.built_in_folder().glob("*.toml"):
        assert recipes.read_card(file).name == file.stem


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_a_card_says_all_that_the_report_needs(card: RecipeCard) -> None:
    assert card.title
    assert card.sources
    assert bool(card.te_class) == (card.scaling != "none") == (card.requires.te_gate is not None)
    assert card.extra_work or card.name == "fp32"
    assert card.requires.device == ("cuda" if card.te_class else "any")


def test_bytes_of_an_element() -> None:
    """Value bytes plus the scale's share; two copies cost twice that, except in BF16, where one copy does."""
    per_element = {
        "fp8_delayed": 1.0,
        "fp8_current": 1.0,
        "fp8_block": 1 + 4 / 128,
        "mxfp8": 1 + 1 / 32,
        "nvfp4": 1 / 2 + 1 / 16,
    }
    for name, size in per_element.items():
        assert (CARDS[name].bytes_rowwise, CARDS[name].bytes_columnwise) == (size, 2 * size)
    assert CARDS["bf16"].bytes_columnwise == 2.0
    assert CARDS["fp32"].bytes_columnwise == 4.0


def test_a_card_becomes_a_fact() -> None:
    fact = CARDS["fp8_delayed"].to_fact(baseline=False)
    assert fact.wgrad == ("e4m3", "e5m2")
    assert fact.scaling == "tensor-delayed"
    assert fact.arguments["fp8_format"] == "HYBRID"
    assert '"baseline":true' in recording.encode(CARDS["bf16"].to_fact(baseline=True))


def test_sizes_that_do_not_fit_are_named() -> None:
    card = CARDS["fp8_delayed"]
    assert card.misfit(m=8192, k=768, n=3072) is None
    assert card.misfit(m=8, k=768, n=96) == "8 tokens, needs a multiple of 16"
    assert CARDS["mxfp8"].misfit(32, 48, 80) == (
        "48 input features, needs a multiple of 32; 80 output features, needs a multiple of 32"
    )
    assert CARDS["bf16"].misfit(1, 3, 7) is None


# --- Against Transformer Engine's real classes -----------------------------------------------------------


def te_file(path: str) -> Path:
    """A Python file of the installed TE; TE itself need not be importable."""
    try:
        file = Path(str(metadata.distribution("transformer_engine").locate_file(path)))
    except metadata.PackageNotFoundError:
        pytest.skip("transformer-engine is not installed (its Python files alone would do)")
    if not file.is_file():
        pytest.skip(f"the installed transformer-engine has no {path} (a source install?)")
    return file


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """TE's recipe module alone. It needs neither a GPU nor TE's libraries, only pydantic."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        monkeypatch.delenv(name)  # the classes take their defaults from the environment
    spec = importlib.util.spec_from_file_location(
        "te_recipe_alone", te_file("transformer_engine/common/recipe/__init__.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def te_recipe(te: ModuleType, card: RecipeCard) -> Any:
    arguments = dict(card.arguments)
    for name in {"fp8_format", "fp4_format"} & arguments.keys():
        arguments[name] = te.Format[arguments[name]]
    if isinstance(arguments.get("qfactory"), str):
        arguments["qfactory"] = print  # the engine would import it
    return getattr(te, str(card.te_class))(**arguments)


def test_sources_stand_where_the_cards_say() -> None:
    if metadata_version() != "2.20.2":
        pytest.skip("the cards cite line numbers of Transformer Engine 2.20.2")
    cited = 0
    for card in TE_CARDS:
        for source in card.sources:
            match = re.match(r"Transformer Engine 2\.20\.2, (\S+\.py):(\d+) \((\w+)\)", source)
            if match:
                line = te_file(f"transformer_engine/{match[1]}").read_text().splitlines()[int(match[2]) - 1]
                assert re.match(rf"(class|def) {match[3]}\b", line), source
                cited += 1
    assert cited >= 2 * len(TE_CARDS)


def metadata_version() -> str | None:
    try:
        return metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return None


PREDICATES = {
    "tensor-delayed": "delayed",
    "tensor-current": "float8_current_scaling",
    "block-128": "float8_block_scaling",
    "mx-32": "mxfp8",
    "nvfp4-16": "nvfp4",
}


@pytest.mark.parametrize("card", TE_CARDS, ids=lambda card: card.name)
def test_te_takes_the_card(te: ModuleType, card: RecipeCard) -> None:
    recipe = te_recipe(te, card)
    answers = {name: getattr(recipe, name)() for name in PREDICATES.values()}
    assert [name for name, answer in answers.items() if answer] == [PREDICATES[card.scaling]]
    assert getattr(recipe, "backward_override", None) is None


@pytest.mark.parametrize("card", TE_CARDS, ids=lambda card: card.name)
def test_operand_formats_are_those_of_te(te: ModuleType, card: RecipeCard) -> None:
    recipe = te_recipe(te, card)
    if card.scaling == "nvfp4-16":
        forward = backward = recipe.fp4_format.name.lower()
    else:
        # HYBRID's largest values are E4M3's forward and E5M2's backward.
        by_largest = {te.Format.E4M3.value.max_fwd: "e4m3", te.Format.E5M2.value.max_fwd: "e5m2"}
        forward = by_largest[recipe.fp8_format.value.max_fwd]
        backward = by_largest[recipe.fp8_format.value.max_bwd]
    assert card.fprop == (forward, forward)
    assert card.dgrad == card.wgrad == (forward, backward)


@pytest.mark.parametrize("card", TE_CARDS, ids=lambda card: card.name)
def test_the_cards_arguments_are_te_s_defaults(te: ModuleType, card: RecipeCard) -> None:
    """A card says its arguments in full, and what it says is the recipe that TE's users know by that name."""
    assert te_recipe(te, card) == getattr(te, str(card.te_class))()


def test_nvfp4_says_what_te_does_to_its_operands(te: ModuleType) -> None:
    recipe, work = te_recipe(te, CARDS["nvfp4"]), " / ".join(CARDS["nvfp4"].extra_work)
    weight, inputs, gradient = (
        recipe.fp4_quant_fwd_weight,
        recipe.fp4_quant_fwd_inp,
        recipe.fp4_quant_bwd_grad,
    )
    assert (inputs.random_hadamard_transform, gradient.random_hadamard_transform) == (True, True)
    assert not weight.random_hadamard_transform
    assert "Hadamard transform (16 x 16) of the column-wise copies of X and dY" in work
    assert (weight.stochastic_rounding, inputs.stochastic_rounding, gradient.stochastic_rounding) == (
        False,
        False,
        True,
    )
    assert "stochastic rounding of dY (" in work
    assert (weight.fp4_2d_quantization, inputs.fp4_2d_quantization) == (True, False)
    assert "one scale for 16 x 16 values of W" in work


@pytest.mark.parametrize("te_class", recipes.TE_ARGUMENTS)
def test_the_known_arguments_are_te_s(te: ModuleType, te_class: str) -> None:
    fields = {each.name for each in dataclasses.fields(getattr(te, te_class))}
    if metadata_version() == "2.20.2":
        assert set(recipes.TE_ARGUMENTS[te_class]) == fields
    else:
        assert set(recipes.TE_ARGUMENTS[te_class]) & fields


def test_the_known_defaults_are_te_s(te: ModuleType) -> None:
    recipe = te.Float8BlockScaling()
    assert {name: getattr(recipe, name) for name in recipes.BLOCK_DIMENSIONS} == recipes.BLOCK_DIMENSIONS


CUSTOM = recipes.read_card(Path(__file__).parents[1] / "examples" / "recipes" / "nvfp4_reference.toml")
BY_CLASS = {str(card.te_class): card for card in [*TE_CARDS, CUSTOM]}


class Scope(StrEnum):
    ALL = "all"


def twice(history: Any) -> Any:
    return history


VALUES: list[Any] = [
    *[None, True, False, np.True_, 0, 1, 2, 16, -6, 2**40, 0.0, 1.0, 16.0, 1.5, float("nan"), float("inf")],
    *[np.int64(16), np.float32(16.0), np.float64(1.5), np.arange(3), "16", "true", "no", "", b"true", (), [], {}],
    *["max", "most_recent", "median", "MAX", "high_precision", "dequantized", "none", Scope.ALL, "weights", "MAE"],
    *[twice, len, lambda history: history, functools.partial(twice), object(), Ellipsis, int],
    *[{"use_split_accumulator": True}, {"use_split_accumulator": False}, {"use_split_accumulator": "maybe"}],
]


def stricter(te_class: str, name: str, value: Any) -> bool:
    """What TE constructs and we refuse: a flag as a number, and what fails in the first step or trains in no format."""
    if "format" in name:
        return te_class not in ("NVFP4BlockScaling", "CustomRecipe") and value.name == "E2M1"
    numbers = ("margin", "amax_history_len", "scaling_dim", "alignment")
    if name.endswith(numbers) and isinstance(value, bool | np.bool_):
        return True
    return name == "amax_history_len" and value in (0, -6)


@pytest.mark.parametrize(
    ("te_class", "name"), [(te_class, name) for te_class, names in recipes.TE_ARGUMENTS.items() for name in names]
)
def test_what_te_takes_is_what_we_take(te: ModuleType, te_class: str, name: str) -> None:
    """Every argument with values of every kind, against TE's own class; and what we make of a value, TE takes."""
    if metadata_version() != "2.20.2":
        pytest.skip("the table is that of Transformer Engine 2.20.2")
    taken = 0
    formats = [] if "format" not in name else list(te.Format)
    base = {"qfactory": twice} if te_class == "CustomRecipe" else {}
    others = {"w_block_scaling_dim": 1} if name in ("x_block_scaling_dim", "grad_block_scaling_dim") else {}
    for value in [*VALUES, *formats, te.MMParams(use_split_accumulator=True), te.MMParams(use_split_accumulator=False)]:
        arguments = {**base, **others, name: value}
        try:
            theirs = getattr(getattr(te, te_class)(**arguments), name)
        except ValueError:  # pydantic's; TE's assertions are among them
            with pytest.raises(RecipeError, match=rf"^{name}="):
                BY_CLASS[te_class].with_arguments(arguments)
            continue
        if stricter(te_class, name, value):
            with pytest.raises(RecipeError, match=rf"^{name}="):
                BY_CLASS[te_class].with_arguments(arguments)
            continue
        card = BY_CLASS[te_class].with_arguments(arguments)
        assert getattr(te_recipe(te, card), name) == theirs, value
        recording.encode(card.to_fact(baseline=False))  # all of it is data
        taken += 1
    assert taken


def test_2d_blocks_go_together_as_in_te(te: ModuleType) -> None:
    for x in (1, 2):
        for w in (1, 2):
            for grad in (1, 2):
                arguments = {"x_block_scaling_dim": x, "w_block_scaling_dim": w, "grad_block_scaling_dim": grad}
                for left_out in ({}, {"w_block_scaling_dim"}, {"x_block_scaling_dim"}):
                    asked = {name: value for name, value in arguments.items() if name not in left_out}
                    try:
                        te.Float8BlockScaling(**asked)
                    except ValueError:
                        with pytest.raises(RecipeError, match=r"=2 and .*: TE multiplies no two operands"):
                            BY_CLASS["Float8BlockScaling"].with_arguments(asked)
                    else:
                        BY_CLASS["Float8BlockScaling"].with_arguments(asked)


@pytest.mark.parametrize("factory", [None, "a.b", "a.b:", ":f", "a b:f", "a.b:f()", 3])
def test_a_custom_recipe_needs_its_factory_or_its_place(factory: Any) -> None:
    assert CUSTOM.te_class == "CustomRecipe"
    with pytest.raises(RecipeError, match=r"^qfactory=.*: must be a function of quantizers, or its place"):
        CUSTOM.with_arguments({"qfactory": factory})
    with pytest.raises(RecipeError, match=r"^qfactory is missing"):
        dataclasses.replace(CUSTOM, arguments={})


def test_delayed_scaling_cannot_be_built_with_a_backward_override(te: ModuleType) -> None:
    """What doctor says of NVTE_BACKWARD_OVERRIDE."""
    with pytest.raises(ValueError, match="only supports backward_override=None"):
        te.DelayedScaling(backward_override="high_precision")
    assert te.Float8CurrentScaling(backward_override="high_precision").backward_override == "high_precision"


# --- Arguments -------------------------------------------------------------------------------------------


def test_gradients_follow_fp8_format() -> None:
    narrow = CARDS["fp8_delayed"].with_arguments({"fp8_format": "E4M3", "amax_history_len": 16})
    assert narrow.dgrad == narrow.wgrad == ("e4m3", "e4m3")
    assert narrow.arguments == {"fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "max"}
    assert CARDS["mxfp8"].with_arguments({"fp8_format": "HYBRID"}).wgrad == ("e4m3", "e5m2")
    assert CARDS["fp8_delayed"].dgrad == ("e4m3", "e5m2")


def test_the_scales_format_of_nvfp4_is_no_operand_format() -> None:
    assert CARDS["nvfp4"].with_arguments({"fp8_format": "E4M3"}).dgrad == ("e2m1", "e2m1")


def test_a_backward_override_leaves_what_is_asked() -> None:
    card = CARDS["fp8_current"].with_arguments({"backward_override": "high_precision"})
    assert card.dgrad == ("e4m3", "e5m2")


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("fp8_delayed", {"amax_histroy_len": 16}, "did you mean 'amax_history_len'"),
        ("fp8_current", {"disable_rht": True}, "Float8CurrentScaling takes no argument 'disable_rht'"),
        ("bf16", {"margin": 1}, "a recipe without te_class takes no argument 'margin'"),
        ("fp8_delayed", {"fp8_format": "E5M2"}, "fp8_format='E5M2': must be 'HYBRID' or 'E4M3'"),
        ("fp8_delayed", {"fp8_format": "hybird"}, "must be 'HYBRID' or 'E4M3'; did you mean 'HYBRID'?"),
        ("nvfp4", {"fp8_format": "HYBRID"}, "fp8_format='HYBRID': must be 'E4M3'"),
        ("fp8_delayed", {"amax_history_len": "many"}, "amax_history_len='many': must be a whole number of at least 1"),
        ("fp8_delayed", {"amax_history_len": True}, "amax_history_len=True: must be a whole number of at least 1"),
        ("fp8_delayed", {"margin": 1.5}, "margin=1.5: must be a whole number"),
        ("fp8_delayed", {"amax_compute_algo": "median"}, "must be 'max', 'most_recent' or a function"),
        ("fp8_delayed", {"amax_compute_algo": "most_rcent"}, "did you mean 'most_recent'?"),
        ("fp8_delayed", {"amax_compute_algo": "a.b:f"}, "amax_compute_algo='a.b:f': must be 'max'"),
        ("fp8_delayed", {"backward_override": "dequantized"}, "must be None (delayed scaling has no other"),
        ("fp8_current", {"backward_override": "high"}, "must be None or 'high_precision' or 'dequantized'"),
        ("fp8_current", {"use_power_2_scales": "maybe"}, "use_power_2_scales='maybe': must be True or False"),
        ("fp8_current", {"fp8_gemm_fprop": {"use_split_acumulator": 1}}, "must be a table like"),
        ("fp8_block", {"fp8_dpa": True}, "fp8_dpa=True: must be False (block scaling has no FP8 attention)"),
        ("nvfp4", {"disable_rht": np.zeros((50, 50))}, "...: must be True or False"),
    ],
)
def test_wrong_arguments(recipe: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        CARDS[recipe].with_arguments(arguments)


def test_arguments_become_plain_data() -> None:
    """One run of 16 and one of "16" compare as equal, and the Recording holds no object of NumPy's."""
    card = CARDS["fp8_delayed"].with_arguments({"amax_history_len": np.int64(16), "reduce_amax": "no", "margin": "3"})
    assert {name: card.arguments[name] for name in ("amax_history_len", "reduce_amax", "margin")} == {
        "amax_history_len": 16,
        "reduce_amax": False,
        "margin": 3,
    }
    assert type(card.arguments["amax_history_len"]) is int


def test_a_function_is_recorded_by_its_name_and_read_back() -> None:
    card = CARDS["fp8_delayed"].with_arguments(
        {"amax_compute_algo": twice, "scaling_factor_compute_algo": lambda *_: 1}
    )
    assert card.arguments["amax_compute_algo"] is twice
    fact = card.to_fact(baseline=False)
    assert fact.arguments["amax_compute_algo"] == f"<function {__name__}.twice>"
    read = recording.decode(recording.encode(fact))
    assert isinstance(read, recording.Card)
    assert CARDS["fp8_delayed"].with_arguments(read.arguments).to_fact(baseline=False) == fact


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __index__(self) -> int:
        raise RuntimeError("no")


def test_a_value_that_raises_is_refused_as_any_other() -> None:
    with pytest.raises(RecipeError, match=r"^margin=an object of Hostile: must be a whole number$"):
        CARDS["fp8_delayed"].with_arguments({"margin": Hostile()})


def test_cards_need_no_torch() -> None:
    code = (
        "import sys; from lowprec_callback.recipes import load_cards;"
        "load_cards()['fp8_delayed'].with_arguments({'margin': 1});"
        "sys.exit(bool({'torch', 'transformer_engine', 'lightning'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- Reading a user's cards ------------------------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_variant_takes_the_rest_from_its_base(tmp_path: Path) -> None:
    write(
        tmp_path,
        "short",
        'name = "short"\nbased_on = "fp8_delayed"\n[arguments]\namax_history_len = 16\nfp8_format = "E4M3"\n',
    )
    card = load_cards(tmp_path)["short"]
    assert card.arguments == {"fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "max"}
    assert card.wgrad == ("e4m3", "e4m3")
    assert card.requires == CARDS["fp8_delayed"].requires
    assert list(load_cards(tmp_path))[-1] == "short"


def test_a_users_card_replaces_the_built_in_one(tmp_path: Path) -> None:
    text = (recipes.built_in_folder() / "bf16.toml").read_text().replace('title = "BF16"', 'title = "Mine"')
    cards = load_cards(write(tmp_path, "mine", text))
    assert cards["bf16"].title == "Mine"
    assert tuple(cards) == recipes.ORDER


def test_two_cards_of_one_name_in_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name, 'name = "same"\nbased_on = "bf16"\n')
    with pytest.raises(RecipeError, match=r"b\.toml: the second card with the name 'same'"):
        load_cards(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "fp8_delayed"', "", "key name: is missing"),
        ("align_m = 16", 'align_m = "wide"', "key align_m: is 'wide'; input should be a valid integer"),
        ("align_m = 16", "align_m = 0", "align_m, align_k and align_n are whole numbers from 1"),
        ("bytes_rowwise = 1.0", "bytes_rowwise = -1", "are numbers above 0"),
        (
            'fprop = ["e4m3", "e4m3"]',
            'fprop = ["e4m3", "fp8"]',
            "key fprop.1: is 'fp8'; input should be 'fp32'",
        ),
        ('fprop = ["e4m3", "e4m3"]', 'fprop = ["e4m3"]', "key fprop"),
        ('scaling = "tensor-delayed"', 'scaling = "delayed"', "key scaling: is 'delayed'; input should be"),
        ('engines = ["transformer_engine"]', 'engines = ["te"]', "or 'plain_torch'"),
        ('te_class = "DelayedScaling"', 'te_class = "Delayed"', "did you mean 'DelayedScaling'"),
        (
            'device = "cuda"',
            'device = "gpu"',
            "key requires.device: is 'gpu'; input should be 'any' or 'cuda'",
        ),
        ("te_min", "te_minimum", "key requires.te_minimum: is not known; did you mean 'te_min'?"),
        ("sources = [", "source = [", "key source: is not known; did you mean 'sources'?"),
        ('fp8_format = "HYBRID"', 'fp8_format = "E4M3"', "makes output gradients e4m3, the card says e5m2"),
        ("amax_history_len", "history", "DelayedScaling takes no argument 'history'"),
        ('name = "fp8_delayed"', "name = ", "not a recipe card in TOML"),
    ],
)
def test_a_wrong_card_is_refused_with_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (recipes.built_in_folder() / "fp8_delayed.toml").read_text()
    assert old in text
    file = write(tmp_path, "wrong", text.replace(old, new, 1))
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        recipes.read_card(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('based_on = "bf61"\nname = "x"\n', "key based_on: no recipe 'bf61'; did you mean 'bf16'?"),
        ('based_on = "bf16"\n', "key name: is missing"),
        ('based_on = "bf16"\nname = "x"\narguments = 3\n', "key arguments: is 3, wanted a table"),
        ('based_on = ["bf16"]\nname = "x"\n', "key based_on: no recipe ['bf16']"),
        (
            'based_on = "fp8_block"\nname = "x"\n[arguments]\nmargin = 1\n',
            "Float8BlockScaling takes no argument",
        ),
    ],
)
def test_a_wrong_variant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_cards(write(tmp_path, "variant", text))


def test_a_place_without_cards(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="holds no recipe card"):
        load_cards(tmp_path)
    with pytest.raises(RecipeError, match=r"none\.toml: cannot be read"):
        load_cards(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not a recipe card in TOML"):
        load_cards(tmp_path)


# --- Choosing --------------------------------------------------------------------------------------------


def names(asked: Any, engine: str = "transformer_engine") -> list[str]:
    return [card.name for card in resolve(asked, engine)]


def test_names_keep_their_order_and_come_once() -> None:
    assert names(["mxfp8", "bf16", "mxfp8"]) == ["mxfp8", "bf16"]
    assert names("fp8_block, bf16") == ["fp8_block", "bf16"]


def test_a_named_recipe_of_another_engine_is_returned_and_then_refused() -> None:
    [card] = resolve("fp8_delayed", "plain_torch")
    assert refusal(card, engine="plain_torch", device_type="cpu") == "needs a CUDA GPU, the device is cpu"


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'fp8_delay'; did you mean 'fp8_delayed'\? known: fp32, bf16"):
        resolve(["fp8_delay"], "transformer_engine")
    with pytest.raises(RecipeError, match=r"no recipe 'zzz'; known: fp32"):
        resolve(["zzz"], "transformer_engine")


@pytest.mark.parametrize("asked", ["", [], ["bf16", ""], "bf16,"])
def test_no_name(asked: Any) -> None:
    with pytest.raises(RecipeError, match="no recipe is named"):
        resolve(asked, "plain_torch")


def test_folders_and_files_by_path(tmp_path: Path) -> None:
    write(tmp_path, "a", 'name = "mine"\nbased_on = "fp8_block"\n')
    wide = write(tmp_path, "b", 'name = "wide"\nbased_on = "fp32"\n')
    assert names(["bf16", str(tmp_path)]) == ["bf16", "mine"]
    assert names([str(tmp_path), "bf16"], "plain_torch") == ["wide", "bf16"]
    assert names([str(wide)]) == ["wide"], "a file that is named is returned, whatever its engine"
    assert names(["wide", str(tmp_path)]) == ["wide", "mine"], "a card of the folder can also be named"
    wide.unlink()
    with pytest.raises(RecipeError, match="holds no card for the engine plain_torch"):
        resolve(str(tmp_path), "plain_torch")


def test_two_places_with_one_name_are_refused(tmp_path: Path) -> None:
    """Else one of them would not run, and nobody would know which."""
    (tmp_path / "other").mkdir()
    one = str(write(tmp_path, "one", 'name = "short"\nbased_on = "fp8_delayed"\narguments = {margin = 1}\n'))
    two = str(write(tmp_path / "other", "two", 'name = "short"\nbased_on = "fp8_delayed"\narguments = {margin = 2}\n'))
    assert names([one, one, str(tmp_path)]) == ["short"], "the same card, however often"
    with pytest.raises(RecipeError, match=r"two\.toml: holds another card with the name 'short' than .*one\.toml"):
        names([one, two])


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "a/\0.toml"])
def test_what_no_file_system_takes_is_no_recipe(name: str) -> None:
    with pytest.raises(RecipeError):
        names([name])


def test_a_folder_of_the_same_name_does_not_hide_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bf16").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names("bf16") == ["bf16"]


def refusal(card: RecipeCard, **changes: Any) -> str | None:
    """On an H200 with a current TE, unless changed."""
    machine: dict[str, Any] = {
        "engine": "transformer_engine",
        "device_type": "cuda",
        "compute_capability": (9, 0),
        "cuda_version": "13.0",
        "te_version": "2.20.2+abc",
    }
    return static_refusal(card, **{**machine, **changes})


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        ("bf16", {}, None),
        ("fp8_delayed", {}, None),
        ("fp8_block", {}, None),
        ("mxfp8", {}, "compute capability 9.0, needs 10.0"),
        ("nvfp4", {}, "compute capability 9.0, needs 10.0"),
        ("mxfp8", {"compute_capability": (10, 3)}, None),
        ("mxfp8", {"compute_capability": (12, 0)}, "compute capability 12.0, needs one below 12.0"),
        ("nvfp4", {"compute_capability": (12, 0)}, None),
        ("fp8_current", {"compute_capability": (8, 6)}, "compute capability 8.6, needs 8.9"),
        ("bf16", {"compute_capability": (7, 5)}, "compute capability 7.5, needs 8.0"),
        ("fp8_block", {"cuda_version": "12.8"}, "CUDA 12.8, needs 12.9"),
        ("fp8_block", {"cuda_version": "12.10"}, None),
        ("fp8_current", {"te_version": "2.7"}, "Transformer Engine 2.7, needs 2.8"),
        ("fp8_current", {"te_version": None, "cuda_version": None, "compute_capability": None}, None),
        (
            "fp8_current",
            {"engine": "plain_torch"},
            "needs the engine transformer_engine, this run uses plain_torch",
        ),
        ("fp32", {}, "needs the engine plain_torch, this run uses transformer_engine"),
        (
            "bf16",
            {"engine": "plain_torch", "device_type": "cpu", "compute_capability": None, "cuda_version": None},
            None,
        ),
        ("nvfp4", {"device_type": "mps"}, "needs a CUDA GPU, the device is mps"),
    ],
)
def test_static_refusals(recipe: str, changes: dict[str, Any], expected: str | None) -> None:
    assert refusal(CARDS[recipe], **changes) == expected


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.sampled_from(["", "+cu130", ".dev0", "rc1"]))
def test_version_tuple_reads_the_leading_numbers(numbers: list[int], rest: str) -> None:
    assert recipes.version_tuple(".".join(map(str, numbers)) + rest) == tuple(numbers)


# --- Packaging -------------------------------------------------------------------------------------------


def test_every_package_ships() -> None:
    """pyproject.toml names each package: the mapping of the cards rules out automatic discovery."""
    project = ROOT / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not in a checkout")
    named = tomllib.loads(project.read_text())["tool"]["setuptools"]["packages"]
    on_disk = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "lowprec_callback").rglob("__init__.py")
    }
    assert set(named) == on_disk | {"lowprec_callback._recipes"}
