"""Recipe cards: what each recipe is, what it needs, and what it costs besides its GEMMs.

A card is a TOML file whose keys are the fields of `RecipeCard` below. The built-in ones stand in `recipes/`
at the root of the repository (in a wheel: `lowprec_callback/_recipes`), with comments that say why a number
is what it is. A user's own card is either a whole card like those, or a variant of a known one:

    name = "fp8_delayed_short"
    based_on = "fp8_delayed"
    title = "FP8, delayed scaling with a history of 16"
    [arguments]
    amax_history_len = 16

A recipe of the user's own making is TE's `CustomRecipe`, whose factory of quantizers a card names as
"package.module:function" (`examples/recipes/nvfp4_reference.toml` is such a card):

    te_class = "CustomRecipe"
    [arguments]
    qfactory = "transformer_engine.pytorch.custom_recipes.reference_nvfp4:nvfp4_ref_rht_2d_factory"

A card of the same name takes the built-in one's place. Reading cards needs neither torch nor Transformer
Engine (TE): the engine turns `te_class` and `arguments` into TE's recipe object.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from lowprec_callback import recording

ORDER = ("fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
"""The order in which recipes are listed, from wide to narrow; a user's own come after, by name."""

Engine = Literal["transformer_engine", "plain_torch"]
Format = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1"]
Scaling = Literal["none", "tensor-delayed", "tensor-current", "block-128", "mx-32", "nvfp4-16"]

GRADIENT_FORMAT: dict[str, Format] = {"HYBRID": "e5m2", "E4M3": "e4m3"}
"""TE's `fp8_format` to the format of output gradients; weights and inputs are E4M3 in both."""

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Where a custom recipe's factory is, as entry points of packages are written."""

_RECORDED_FUNCTION = re.compile(r"<function \S+>")
"""How a Recording names a function that was an argument, see `RecipeCard.to_fact`."""


class RecipeError(ValueError):
    """A recipe that is not known, or a card that cannot be read. The text names what is allowed instead."""


# --- Transformer Engine's arguments ----------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """What one argument of a TE recipe class may be."""

    allowed: str
    """In words, to stand behind "must be"."""
    plain: Callable[[Any], Any]
    """From a value that TE takes to the same as plain data, the way cards and Recordings carry it. Raises ValueError
    or TypeError where TE refuses the value, or takes it and fails in the first step."""
    names: tuple[str, ...] = ()
    """Texts that are allowed, for a misspelling to be set right."""


def _flag(value: Any) -> bool:
    """TE's classes are pydantic's, so 0, 1, "true" and "no" are flags as well."""
    return bool(_adapter(bool).validate_python(value))


def _integer(value: Any) -> int:
    """As pydantic reads it: 16.0, "16" and NumPy's integers too. TE reads True as 1; we take it for a mistake."""
    if type(value).__name__ in ("bool", "bool_"):  # Python's or NumPy's
        raise ValueError("a flag is no number")
    return int(_adapter(int).validate_python(value))


def _integer_from(least: int) -> Argument:
    def plain(value: Any) -> int:
        number = _integer(value)
        if number < least:
            raise ValueError("too small")
        return number

    return Argument(f"a whole number of at least {least}", plain)


def _dimensions(value: Any) -> int:
    number = _integer(value)
    if number not in (1, 2):
        raise ValueError("neither 1 nor 2")
    return number


def _name_of(names: tuple[str, ...], value: Any) -> str:
    """One of the names. TE's enum `Format` is read by the names of its members."""
    text = value.name if isinstance(value, Enum) and not isinstance(value, str) else value
    text = str.__str__(_adapter(str).validate_python(text))
    if text not in names:
        raise ValueError("another name")
    return text


def _one_of(*names: str, what: str = "", none: bool = False) -> Argument:
    def plain(value: Any) -> str | None:
        return None if none and value is None else _name_of(names, value)

    return Argument(f"{'None or ' if none else ''}{what}{' or '.join(map(repr, names))}", plain, names)


def _function(value: Any) -> Any:
    """A function stays what it is: `RecipeCard.to_fact` gives the Recording its name."""
    if callable(value) or (isinstance(value, str) and _RECORDED_FUNCTION.fullmatch(value)):
        return value
    raise TypeError("no function")


def _function_or(*names: str) -> Argument:
    def plain(value: Any) -> Any:
        try:
            return _function(value)
        except TypeError:
            return _name_of(names, value)

    return Argument(f"{', '.join(map(repr, names))} or a function", plain, names)


def _factory(value: Any) -> Any:
    return value if isinstance(value, str) and _FACTORY.fullmatch(value) else _function(value)


def _accumulator(value: Any) -> dict[str, bool]:
    """TE's `MMParams`, or the same as a table, which is what it becomes: TE takes both."""
    if not isinstance(value, Mapping):
        return {"use_split_accumulator": _flag(value.use_split_accumulator)}
    if value.keys() - {"use_split_accumulator"}:  # TE would ignore a misspelled key
        raise ValueError("another key")
    return {"use_split_accumulator": _flag(value.get("use_split_accumulator", True))}


def _split_accumulator(value: Any) -> dict[str, bool]:
    options = _accumulator(value)
    if not options["use_split_accumulator"]:
        raise ValueError("not split")
    return options


def _off(value: Any) -> bool:
    if _flag(value):
        raise ValueError("on")
    return False


def _nothing(value: Any) -> None:
    if value is not None:
        raise ValueError("something")


_FLAG = Argument("True or False", _flag)
_INTEGER = Argument("a whole number", _integer)
_DIMENSIONS = Argument("1 or 2", _dimensions)
_TRAINED = _one_of(*GRADIENT_FORMAT)
_SCOPE = _one_of("none", "weights", "activations", "all")
_MM_PARAMS = Argument('a table like {"use_split_accumulator": True}, or TE\'s MMParams', _accumulator)
_SPLIT = Argument('{"use_split_accumulator": True} (block scaling needs it)', _split_accumulator)
_NO_ATTENTION = Argument("False (block scaling has no FP8 attention)", _off)

_EVERY: dict[str, Argument] = {
    "fp8_format": _TRAINED,
    "fp8_dpa": _FLAG,
    "fp8_mha": _FLAG,
    "backward_override": _one_of("high_precision", "dequantized", none=True),
}

TE_ARGUMENTS: dict[str, dict[str, Argument]] = {
    "DelayedScaling": {
        **_EVERY,
        "backward_override": Argument("None (delayed scaling has no other backward pass)", _nothing),
        "margin": _INTEGER,
        "amax_history_len": _integer_from(1),
        "amax_compute_algo": _function_or("max", "most_recent"),
        "scaling_factor_compute_algo": Argument(
            "None or a function", lambda value: None if value is None else _function(value)
        ),
        "reduce_amax": _FLAG,
    },
    "Float8CurrentScaling": {
        **_EVERY,
        "use_power_2_scales": _FLAG,
        "fp8_gemm_fprop": _MM_PARAMS,
        "fp8_gemm_dgrad": _MM_PARAMS,
        "fp8_gemm_wgrad": _MM_PARAMS,
    },
    "Float8BlockScaling": {
        **_EVERY,
        "fp8_dpa": _NO_ATTENTION,
        "fp8_mha": _NO_ATTENTION,
        "use_f32_scales": _FLAG,
        "x_block_scaling_dim": _DIMENSIONS,
        "w_block_scaling_dim": _DIMENSIONS,
        "grad_block_scaling_dim": _DIMENSIONS,
        "fp8_gemm_fprop": _SPLIT,
        "fp8_gemm_dgrad": _SPLIT,
        "fp8_gemm_wgrad": _SPLIT,
    },
    "MXFP8BlockScaling": {**_EVERY, "margin": _INTEGER, "enable_2d_quantization": _FLAG},
    "NVFP4BlockScaling": {
        **_EVERY,
        "fp8_format": _one_of("E4M3"),  # of the scales
        "fp4_format": _one_of("E2M1"),
        "disable_rht": _FLAG,
        "disable_stochastic_rounding": _FLAG,
        "disable_2d_quantization": _FLAG,
        "row_scaled_activation": _FLAG,
        "nvfp4_4over6": _SCOPE,
        "nvfp4_4over6_e4m3_use_256": _SCOPE,
        "nvfp4_4over6_err_mode": _one_of("MAE", "MSE"),
    },
    "CustomRecipe": {
        **_EVERY,
        "fp8_format": _one_of("HYBRID", "E4M3", "E5M2", "E2M1"),  # the factory decides, TE only reads it
        "qfactory": Argument('a function of quantizers, or its place as "package.module:function"', _factory),
        "quantization_alignment": _integer_from(1),
    },
}
"""TE's recipe classes, their arguments, and what each may be (TE 2.20.2; a test compares).

It stands here because a wrong argument is to be refused when the profiler is constructed, on machines without TE as
well. A name that is not here is refused: a card with an argument of unknown meaning could not say which operand
formats it asks for.
"""

BLOCK_DIMENSIONS = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
"""TE's defaults. Of two operands of a GEMM, TE multiplies no two whose blocks have two dimensions."""


def _plain(te_class: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as plain data.

    Raises:
        RecipeError: one that the class does not take, by its name or its value, or two that exclude each other.
    """
    known = _te_arguments(te_class)
    found = {}
    for name, value in arguments.items():
        if name not in known:
            owner = te_class or "a recipe without te_class"
            raise RecipeError(f"{owner} takes no argument {name!r}{_instead(name, known)}")
        argument = known[name]
        try:
            found[name] = argument.plain(value)
        except Exception as error:  # whatever the value's own methods raise
            instead = _near(value, argument.names) if isinstance(value, str) else ""
            raise RecipeError(f"{name}={_in_short(value)}: must be {argument.allowed}{instead}") from error
    if te_class == "CustomRecipe" and "qfactory" not in found:
        raise RecipeError(f"qfactory is missing: must be {known['qfactory'].allowed}")
    if te_class == "Float8BlockScaling":
        two = [f"{name}=2" for name, usual in BLOCK_DIMENSIONS.items() if found.get(name, usual) == 2]
        if len(two) > 1:
            raise RecipeError(f"{' and '.join(two)}: TE multiplies no two operands with blocks of two dimensions")
    return found


def _in_short(value: Any) -> str:
    """A value on one line, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"an object of {type(value).__qualname__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _recorded(value: Any) -> Any:
    """An argument as a Recording can hold it: a function by its name, which `with_arguments` reads back as it is."""
    if not callable(value):
        return value
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"<function {owner.__module__}.{owner.__qualname__}>"


# --- Cards -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requires:
    """What a recipe needs to run. None: nothing is asked."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    device: Literal["any", "cuda"] = "any"
    compute_capability_min: tuple[int, int] | None = None
    """Of an NVIDIA GPU. A CPU has none and is not asked."""
    compute_capability_below: tuple[int, int] | None = None
    """The first compute capability that is too new."""
    cuda_min: str | None = None
    """CUDA runtime that torch was built with."""
    te_min: str | None = None
    te_gate: str | None = None
    """TE's own function that says whether the recipe is available here, e.g. `is_mxfp8_available`."""


@dataclass(frozen=True)
class RecipeCard:
    """One recipe."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    title: str
    engines: tuple[Engine, ...]
    fprop: tuple[Format, Format]
    """Formats of (weight, input)."""
    dgrad: tuple[Format, Format]
    """Formats of (weight, output gradient)."""
    wgrad: tuple[Format, Format]
    """Formats of (input, output gradient)."""
    scaling: Scaling
    align_m: int
    """Tokens must be a multiple of this (they are the length of wgrad's sum)."""
    align_k: int
    """Input features must be a multiple of this."""
    align_n: int
    """Output features must be a multiple of this."""
    bytes_rowwise: float
    """Bytes of one element, scales included, in one copy."""
    bytes_columnwise: float
    """Bytes of one element where row-wise and column-wise use are both served (on Hopper: two copies)."""
    extra_work: tuple[str, ...]
    """What a step does besides the GEMMs, in words."""
    sources: tuple[str, ...]
    requires: Requires
    te_class: str | None = None
    """Class in `transformer_engine.common.recipe`; None for a recipe outside every quantized region."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `te_class`, as plain data where they can be. Formats are names ("HYBRID"); the engine turns
    them into TE's enum."""
    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    """plain_torch: the dtype of torch.autocast; None for no autocast."""
    emulated_from: tuple[int, int] | None = None
    """From this compute capability on, TE runs it in another format."""

    def __post_init__(self) -> None:
        if min(self.align_m, self.align_k, self.align_n) < 1:
            raise RecipeError("align_m, align_k and align_n are whole numbers from 1")
        if min(self.bytes_rowwise, self.bytes_columnwise) <= 0:
            raise RecipeError("bytes_rowwise and bytes_columnwise are numbers above 0")
        object.__setattr__(self, "arguments", _plain(self.te_class, self.arguments))
        gradient = _gradient_format(self.te_class, self.arguments)
        if gradient and {self.dgrad[1], self.wgrad[1]} != {gradient}:
            raise RecipeError(
                f"fp8_format {self.arguments['fp8_format']!r} makes output gradients {gradient}, "
                f"the card says {self.dgrad[1]} in dgrad and {self.wgrad[1]} in wgrad"
            )

    def with_arguments(self, arguments: Mapping[str, Any]) -> RecipeCard:
        """The same recipe with some of TE's arguments changed; operand formats follow `fp8_format`.

        `backward_override` leaves the formats as they are: they are what the recipe asks for, and a backward
        pass in BF16 is then a difference from it that the verdict books as by request.

        Raises:
            RecipeError: an argument, or a value, that the TE class does not take; the text says what is allowed.
        """
        merged = _plain(self.te_class, {**self.arguments, **arguments})
        gradient = _gradient_format(self.te_class, merged)
        if gradient is None:
            return replace(self, arguments=merged)
        return replace(self, arguments=merged, dgrad=(self.dgrad[0], gradient), wgrad=(self.wgrad[0], gradient))

    def misfit(self, m: int, k: int, n: int) -> str | None:
        """Why a layer of m tokens, k input and n output features cannot run in this recipe, or None."""
        sizes = (
            ("tokens", m, self.align_m),
            ("input features", k, self.align_k),
            ("output features", n, self.align_n),
        )
        wrong = [f"{size} {what}, needs a multiple of {unit}" for what, size, unit in sizes if size % unit]
        return "; ".join(wrong) or None

    def to_fact(self, baseline: bool) -> recording.Card:
        """The card as a fact of the Recording."""
        return recording.Card(
            recipe=self.name,
            title=self.title,
            fprop=self.fprop,
            dgrad=self.dgrad,
            wgrad=self.wgrad,
            scaling=self.scaling,
            arguments={name: _recorded(value) for name, value in self.arguments.items()},
            baseline=baseline,
        )


def _te_arguments(te_class: str | None) -> Mapping[str, Argument]:
    if te_class is None:
        return {}
    if te_class not in TE_ARGUMENTS:
        raise RecipeError(f"no te_class {te_class!r}{_instead(te_class, TE_ARGUMENTS)}")
    return TE_ARGUMENTS[te_class]


def _gradient_format(te_class: str | None, arguments: Mapping[str, Any]) -> Format | None:
    """Format of FP8 output gradients; None where `fp8_format` does not decide it (NVFP4, a custom one)."""
    name = arguments.get("fp8_format")
    return None if name is None or te_class in ("NVFP4BlockScaling", "CustomRecipe") else GRADIENT_FORMAT[name]


def near(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelled one is nearest to, whatever its case, if any is near."""
    folded = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1)
    return folded[found[0]] if found else None


def _near(name: str, known: Iterable[str]) -> str:
    found = near(name, known)
    return f"; did you mean {found!r}?" if found is not None else ""


def _instead(name: str, known: Iterable[str]) -> str:
    """What to write instead of a name that is not known: the nearest one, and all of them."""
    known = list(known)
    return f"{_near(name, known) or ';'} known: {', '.join(known) or 'none'}"


# --- Reading ---------------------------------------------------------------------------------------------


def built_in_folder() -> Path:
    """Where the built-in cards are: inside an installed package, else in the checkout around it.

    The package's own copy comes first: in site-packages, a folder `recipes` beside the package is another's.
    """
    package = Path(__file__).parent
    places = (package / "_recipes", package.parent / "recipes")
    for folder in places:
        if folder.is_dir():
            return folder
    raise RecipeError(f"the built-in recipe cards are missing: no folder {places[0]} and none {places[1]}")


def load_cards(*places: Path | str) -> dict[str, RecipeCard]:
    """All built-in cards, then those of the user's files and folders, which win by name.

    Raises:
        RecipeError: a file that is missing or no card; the text names file, key and what is allowed.
    """
    built_in = _load(built_in_folder(), {}).values()
    cards = {card.name: card for card in sorted(built_in, key=lambda card: ORDER.index(card.name))}
    for place in places:
        cards.update(_load(Path(place), cards))
    return cards


def _load(place: Path, known: Mapping[str, RecipeCard]) -> dict[str, RecipeCard]:
    """The cards of one file or folder, by name. `known` is what `based_on` may name."""
    files = sorted(place.glob("*.toml")) if os.path.isdir(place) else [place]
    if not files:
        raise RecipeError(f"{place}: holds no recipe card (*.toml)")
    cards: dict[str, RecipeCard] = {}
    for file in files:
        card = read_card(file, known)
        if card.name in cards:
            raise RecipeError(f"{file}: the second card with the name {card.name!r} in this folder")
        cards[card.name] = card
    return cards


def read_card(file: Path, known: Mapping[str, RecipeCard] | None = None) -> RecipeCard:
    """Read one card. `known` holds the cards that it may be based on.

    Raises:
        RecipeError: with file, key and what is allowed.
    """
    try:
        body = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # TOML that does not parse, or a file that is not UTF-8
        raise RecipeError(f"{file}: not a recipe card in TOML ({error})") from error
    try:
        return _validate(_on_its_base(body, known or {}))
    except RecipeError as error:
        raise RecipeError(f"{file}: {error}") from error


def _on_its_base(body: dict[str, Any], known: Mapping[str, RecipeCard]) -> dict[str, Any]:
    """A card's keys, with those of the card that it is based on under them."""
    if "based_on" not in body:
        return body
    base = body.pop("based_on")
    if not isinstance(base, str) or base not in known:
        raise RecipeError(f"key based_on: no recipe {base!r}{_instead(str(base), known)}")
    if "name" not in body:
        raise RecipeError("key name: is missing; a variant needs a name of its own")
    arguments = body.pop("arguments", {})
    if not isinstance(arguments, dict):
        raise RecipeError(f"key arguments: is {arguments!r}, wanted a table")
    return {**dataclasses.asdict(known[base].with_arguments(arguments)), **body}


def _validate(body: dict[str, Any]) -> RecipeCard:
    from pydantic import ValidationError

    try:
        return _adapter(RecipeCard).validate_python(body)  # type: ignore[no-any-return]
    except ValidationError as error:
        # A key that is not known comes first: spelled right, it is often the one that is missing.
        first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
        keys = [str(part) for part in first["loc"]]
        if first["type"] == "value_error":  # ours, from __post_init__
            raise RecipeError(str(first["ctx"]["error"])) from error
        if first["type"] == "missing":
            raise RecipeError(f"key {'.'.join(keys)}: is missing") from error
        if first["type"] == "unexpected_keyword_argument":
            owner = Requires if keys[:-1] == ["requires"] else RecipeCard
            names = [each.name for each in dataclasses.fields(owner)]
            raise RecipeError(f"key {'.'.join(keys)}: is not known{_instead(keys[-1], names)}") from error
        raise RecipeError(f"key {'.'.join(keys)}: is {first['input']!r}; {first['msg'].lower()}") from error


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# --- Choosing --------------------------------------------------------------------------------------------


def resolve(names: Sequence[str] | str | None, engine: str) -> list[RecipeCard]:
    """The cards that a user asked for, each once, in the order asked.

    Args:
        names: recipe names, paths of `.toml` cards, folders of cards; one text may hold several, with commas
            between. None: every built-in recipe of the engine, from wide to narrow. A folder gives those of
            its cards that are for the engine.
        engine: the engine that will run them. A recipe that is named is returned even if it belongs to
            another engine: `static_refusal` then says so, beside the recipes that do run.

    Raises:
        RecipeError: an unknown name, a card that cannot be read, a folder with no card for the engine, two places with
            different cards of one name.
    """
    if names is None:
        return [card for card in load_cards().values() if engine in card.engines]
    asked = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    if not asked or not all(asked):
        raise RecipeError("no recipe is named; give names, paths of cards, or nothing for all that can run")
    cards = load_cards()
    at_place: dict[str, list[RecipeCard]] = {}
    first_place: dict[str, str] = {}
    for name in asked:
        if name not in cards and _is_place(name):
            own = _load(Path(name), cards)
            for card in own.values():
                if (first := first_place.setdefault(card.name, name)) != name and cards[card.name] != card:
                    raise RecipeError(f"{name}: holds another card with the name {card.name!r} than {first}")
            cards.update(own)
            folder = os.path.isdir(name)
            at_place[name] = [card for card in own.values() if engine in card.engines or not folder]
            if not at_place[name]:
                raise RecipeError(f"{name}: holds no card for the engine {engine}")
    chosen: dict[str, RecipeCard] = {}
    for name in asked:
        if name not in at_place and name not in cards:
            raise RecipeError(f"no recipe {name!r}{_instead(name, cards)}")
        chosen.update((card.name, card) for card in at_place.get(name) or [cards[name]])
    return list(chosen.values())


def _is_place(name: str) -> bool:
    return name.endswith(".toml") or "/" in name or "\\" in name or os.path.isdir(name)


def static_refusal(
    card: RecipeCard,
    *,
    engine: str,
    device_type: str,
    compute_capability: tuple[int, int] | None,
    cuda_version: str | None,
    te_version: str | None,
) -> str | None:
    """Why a recipe cannot run here, by its card alone, with what was found and what it needs; None if it may.

    What is not known (None) is not held against the recipe: TE's own gate and the probe come after this.
    """
    needs = card.requires
    if needs.device == "cuda" and device_type != "cuda":
        return f"needs a CUDA GPU, the device is {device_type}"
    if device_type == "cuda" and compute_capability is not None:
        least, below = needs.compute_capability_min, needs.compute_capability_below
        found = f"compute capability {_dotted(compute_capability)}"
        if least is not None and compute_capability < least:
            return f"{found}, needs {_dotted(least)}"
        if below is not None and compute_capability >= below:
            return f"{found}, needs one below {_dotted(below)}"
    if engine not in card.engines:
        return f"needs the engine {' or '.join(card.engines)}, this run uses {engine}"
    if device_type == "cuda" and _older(cuda_version, needs.cuda_min):
        return f"CUDA {cuda_version}, needs {needs.cuda_min}"
    if engine == "transformer_engine" and _older(te_version, needs.te_min):
        return f"Transformer Engine {te_version}, needs {needs.te_min}"
    return None


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.20.2+cu13" becomes (2, 20, 2)."""
    match = re.match(r"\d+(\.\d+)*", text.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _older(found: str | None, needed: str | None) -> bool:
    return bool(found and needed) and version_tuple(found or "") < version_tuple(needed or "")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
