"""`lowprec gemm`: what its options mean, and what it refuses before anything runs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback import cli
from lowprec_callback.analyze.model_config import ModelConfig
from lowprec_callback.gemm_command import _precision, _shapes, add_parser
from lowprec_callback.gemm_plan import MODEL_FIELDS, SQUARES, GemmPlan, GemmPlanError, plan_from_args
from lowprec_callback.recipes import RecipeError
from lowprec_callback.recording import Gemm, Recorder, RecordingError, Role

TUTORIAL = (
    "--hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)
"""The command line of Transformer Engine's GEMM profiling tutorial."""

M, H, I = 15872, 4096, 16384  # noqa: E741
TABLE: list[tuple[str, Role, tuple[int, int, int]]] = [
    ("QKV", "fprop", (M, H, 3 * H)),
    ("attention out", "fprop", (M, H, H)),
    ("MLP up", "fprop", (M, H, I)),
    ("MLP down", "fprop", (M, I, H)),
    ("QKV", "dgrad", (M, 3 * H, H)),
    ("attention out", "dgrad", (M, H, H)),
    ("MLP up", "dgrad", (M, I, H)),
    ("MLP down", "dgrad", (M, H, I)),
    ("QKV", "wgrad", (H, M, 3 * H)),
    ("attention out", "wgrad", (H, M, H)),
    ("MLP up", "wgrad", (H, M, I)),
    ("MLP down", "wgrad", (I, M, H)),
]
"""The tutorial's twelve GEMMs, in its order."""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def parse(line: str | Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["gemm", *(shlex.split(line) if isinstance(line, str) else line)])


def plan(line: str | Sequence[str]) -> GemmPlan:
    return plan_from_args(parse(line))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- The tutorial's command line -------------------------------------------------------------------------


def test_the_tutorials_command_line() -> None:
    made = plan(f"{TUTORIAL} -o ./gemm_speedup.png")
    assert made.products() == TABLE
    assert {gemm.calls for gemm in made.gemms} == {24}
    assert made.layers == 24
    assert made.config == ModelConfig(4096, 16384, 32, 24, 31, 512)
    assert made.name == "model: hidden 4096, 24 layers, 15872 tokens (31 x 512)"
    assert (made.methods, made.modes) == (("role-true",), ("kernel", "autocast"))
    assert (made.recipes, made.without) == (None, ())
    assert made.plot == Path("gemm_speedup.png")
    assert made.notes == ()


def test_the_tutorials_command_line_pre_quantized() -> None:
    made = plan(f"{TUTORIAL} --pre-quantize")
    assert made.products() == TABLE
    assert made.modes == ("kernel",)
    assert made.plot == Path("gemm_benchmark.png")


def test_the_tutorials_command_line_on_hopper() -> None:
    made = plan(f"{TUTORIAL} --no-fp8 --no-fp4 -o ./gemm_speedup.png")
    assert made.products() == TABLE
    assert made.without == ("mxfp8", "nvfp4")
    assert made.notes == ("--no-fp8 skips MXFP8 only, as in benchmark_gemm.py",)
    names = [card.name for card in made.cards("transformer_engine", "bf16")]
    assert names == ["bf16", "fp8_delayed", "fp8_current", "fp8_block"]


def test_the_published_method() -> None:
    made = plan(f"{TUTORIAL} --method te-tutorial --num-warmup 0 --num-iters 30 --gpu-warmup 0")
    assert made.products() == TABLE
    assert (made.methods, made.modes) == (("te-tutorial",), ("autocast",))
    assert (made.warm_ups, made.iterations, made.gpu_warm_up_s) == (0, 30, 0.0)
    assert plan(f"{TUTORIAL} --method te-tutorial --pre-quantize").modes == ("kernel",)
    both = plan(f"{TUTORIAL} --method both")
    assert (both.methods, both.modes) == (("te-tutorial", "role-true"), ("kernel", "autocast"))


@pytest.mark.parametrize("more", ["", "--pre-quantize", "--no-fp8", "--pre-quantize --no-fp8 --no-fp4 --no-fp8-block"])
def test_a_pasted_line_of_the_script_means_the_same_by_its_own_method(more: str) -> None:
    script = f"python benchmarks/gemm/benchmark_gemm.py {TUTORIAL} -o model_config.png {more}"
    _, _, options = script.partition("benchmark_gemm.py ")
    made, published = plan(options), plan(f"{options} --method te-tutorial")
    assert made.products() == published.products() == TABLE
    assert made.plot == published.plot == Path("model_config.png")
    assert published.modes == (("kernel",) if "--pre-quantize" in more else ("autocast",))
    assert set(published.modes) <= set(made.modes)
    skipped = {"--no-fp8": "mxfp8", "--no-fp4": "nvfp4", "--no-fp8-block": "fp8_block"}
    left_out = {recipe for name, recipe in skipped.items() if name in more.split()}
    for each in (made, published):
        run = {card.name for card in each.cards("transformer_engine", "bf16")}
        assert run == {"bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"} - left_out
        assert (each.warm_ups, each.iterations) == (10, 100)


def test_every_skip_means_what_it_means_there() -> None:
    made = plan("--no-fp8-current --no-fp8-delayed --no-fp8-block --no-fp8 --no-fp4")
    assert set(made.without) == {"fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"}
    assert [card.name for card in made.cards("transformer_engine", "bf16")] == ["bf16"]


def test_defaults_are_those_of_benchmark_gemm() -> None:
    made = plan("")
    assert [(gemm.m, gemm.k, gemm.n) for gemm in made.operations] == [(size,) * 3 for size in SQUARES]
    assert (made.warm_ups, made.iterations, made.gpu_warm_up_s) == (10, 100, 5.0)
    assert (made.plot, made.json, made.csv) == (Path("gemm_benchmark.png"), None, None)
    assert (made.precision, made.budget_s, made.accumulate, made.cold_l2) == (0.01, 120.0, 1, False)
    assert (made.seed, made.device, made.layers, made.config) == (0, "auto", 1, None)


def test_timing_is_taken_but_changes_nothing() -> None:
    assert plan("--timing cuda-events").notes == ()
    (note,) = plan("--timing profiler").notes
    assert note.startswith("--timing profiler: times are CUDA events all the same")


def test_iterations_are_the_published_methods() -> None:
    (note,) = plan("--num-iters 30").notes
    assert note.startswith("--num-warmup and --num-iters belong to --method te-tutorial")
    assert plan("--num-iters 30 --method te-tutorial").notes == ()


# --- Spellings -------------------------------------------------------------------------------------------


def test_underscores_and_hyphens_are_the_same() -> None:
    underscores = f"{TUTORIAL} --pre_quantize --no_fp8 --gpu_warmup 1 --num_key_value_heads 8 --gated_mlp --csv a.csv"
    hyphens = re.sub(r"(?<=\w)_(?=\w)", "-", underscores)
    assert hyphens != underscores
    assert plan(hyphens) == plan(underscores)


def test_every_option_has_both_spellings() -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    add_parser(subparsers)
    known = {name for action in subparsers.choices["gemm"]._actions for name in action.option_strings}
    for name in known:
        if name.startswith("--"):
            assert "--" + name[2:].replace("-", "_") in known
            assert "--" + name[2:].replace("_", "-") in known


def test_every_size_of_a_model_has_an_option() -> None:
    assert {field.name for field in fields(ModelConfig)} == set(MODEL_FIELDS)
    assert set(vars(parse(""))) >= set(MODEL_FIELDS)


# --- Shapes ----------------------------------------------------------------------------------------------


def test_shapes() -> None:
    made = plan(["--shapes", "1024,88064x2560x10240, 2048X64x32,1024"])
    assert [gemm.operation for gemm in made.operations] == ["1024x1024x1024", "88064x2560x10240", "2048x64x32"]
    assert len(made.gemms) == 9
    assert made.gemms[3:6] == tuple(
        Gemm("88064x2560x10240", role, 88064, 2560, 10240, 1, "Linear", True, layers=0)
        for role in ("fprop", "dgrad", "wgrad")
    )
    published = plan("--shapes 88064x2560x10240 --method te-tutorial")
    assert published.products() == [("88064x2560x10240", "fprop", (88064, 2560, 10240))]


sizes = st.integers(1, 10**6)


@given(st.lists(sizes.map(lambda n: (n, n, n)) | st.tuples(sizes, sizes, sizes), min_size=1, max_size=5))
def test_shapes_are_read_as_they_are_written(shapes: list[tuple[int, int, int]]) -> None:
    text = ", ".join(str(m) if m == k == n else f"{m}x{k}x{n}" for m, k, n in shapes)
    assert _shapes(text) == shapes


# --- Models ----------------------------------------------------------------------------------------------


def test_what_real_models_have() -> None:
    line = f"{TUTORIAL} --num_key_value_heads 8 --head_dim 64 --gated-mlp --vocab_size 32000 --tensor_parallel 2 --bias"
    made = plan(f"{line} --sequence_parallel --accumulate 4")
    assert [(gemm.k, gemm.n, gemm.bias) for gemm in made.operations] == [
        (4096, 48 * 64 // 2, True),
        (32 * 64 // 2, 4096, True),
        (4096, 16384, True),
        (8192, 4096, True),
        (4096, 16000, False),
    ]
    assert [gemm.calls for gemm in made.gemms if gemm.role == "dgrad"] == [96, 96, 96, 96, 4]
    assert made.accumulate == 4


def test_experts() -> None:
    made = plan(f"{TUTORIAL} --num_experts 8 --experts_per_token 2 --moe_intermediate_size 1024")
    groups = {gemm.operation: gemm.groups for gemm in made.operations}
    assert groups == {"QKV": 1, "attention out": 1, "router": 1, "experts up": 8, "experts down": 8}
    assert {gemm.family for gemm in made.gemms if gemm.groups > 1} == {"GroupedLinear"}


def write(content: object) -> str:
    Path("config.json").write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return "--config config.json --micro_batch_size 1 --sequence_length 8192"


def test_config_file() -> None:
    made = plan(f"{write(LLAMA)} --num_hidden_layers 4 --tensor_parallel 8")
    assert made.config is not None
    assert (made.config.num_hidden_layers, made.config.tensor_parallel, made.config.kv_heads) == (4, 8, 8)
    assert made.operations[-1].n == 128256 // 8
    assert made.name == "config.json: hidden 4096, 4 layers, 8192 tokens (1 x 8192)"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: not JSON ("),
        ([1], "config.json: no config.json (a JSON object), but a list"),
        ({"model_type": "mamba"}, "config.json: model_type 'mamba' is not known (known: llama, "),
        ({"model_type": "gpt2", "n_embd": 8}, "config.json: model_type 'gpt2' needs n_head or num_attention_heads, "),
        (LLAMA | {"num_attention_heads": 30}, "config.json: hidden_size 4096 is not a multiple of"),
    ],
)
def test_a_config_file_that_cannot_be_used(content: object, message: str) -> None:
    with pytest.raises(GemmPlanError) as error:
        plan(write(content))
    assert str(error.value).startswith(message)


def test_a_config_file_does_not_say_what_one_trains_with() -> None:
    write(LLAMA)
    with pytest.raises(GemmPlanError) as error:
        plan("--config config.json")
    assert str(error.value) == (
        "config.json does not say what you train with: give --micro_batch_size and --sequence_length "
        "(the model's limit is 8192 tokens)"
    )
    with pytest.raises(GemmPlanError, match=r"nowhere.json: cannot be read \(No such file or directory\)"):
        plan("--config nowhere.json --micro_batch_size 1 --sequence_length 8")


# --- A run -----------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    with Recorder(tmp_path / "run" / "recording.jsonl", "0", "now") as recorder:
        for layer in range(3):
            for role in ("fprop", "dgrad", "wgrad"):
                if (layer, role) != (0, "wgrad"):  # a frozen first layer
                    recorder.add(Gemm(f"blocks.{layer}.qkv", role, 64, 32, 96, 2, "LayerNormLinear", True, bias=True))
        recorder.add(Gemm("head", "fprop", 64, 32, 80, 2, "nn.Linear", False))
    return tmp_path / "run"


def test_from_run(run_folder: Path) -> None:
    made = plan(["--from-run", str(run_folder)])
    assert made.gemms == (
        Gemm("blocks.*.qkv", "fprop", 64, 32, 96, 6, "LayerNormLinear", True, bias=True, layers=3),
        Gemm("blocks.*.qkv", "dgrad", 64, 32, 96, 6, "LayerNormLinear", True, bias=True, layers=3),
        Gemm("blocks.*.qkv", "wgrad", 64, 32, 96, 4, "LayerNormLinear", True, bias=True, layers=3),
        Gemm("head", "fprop", 64, 32, 80, 2, "nn.Linear", False, layers=0),
    )
    assert [(gemm.operation, gemm.calls) for gemm in made.operations] == [("blocks.*.qkv", 6), ("head", 2)]
    assert (made.layers, made.config) == (3, None)
    assert made.name == f"the GEMMs of {run_folder}"


def test_from_a_run_without_gemms(tmp_path: Path) -> None:
    Recorder(tmp_path / "recording.jsonl", "0", "now").close()
    with pytest.raises(GemmPlanError, match="holds no GEMMs"):
        plan(["--from-run", str(tmp_path)])
    with pytest.raises(RecordingError, match="cannot be read"):
        plan("--from-run nowhere")


# --- Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--shapes 1024 --hidden_size 64",
            "--shapes and the model's sizes (--hidden_size): each says what to time; give one of them only",
        ),
        ("--shapes 1024 --config c.json", "--shapes and --config: each says what to time"),
        ("--from-run run --vocab-size 96", "--from-run and the model's sizes (--vocab_size): each says what to time"),
        (
            "--hidden-size 64 --sequence_length 8 --num_hidden_layers 1 --num_attention_heads 2",
            "the model's sizes are incomplete: missing --intermediate_size, --micro_batch_size (all of --hidden_size, ",
        ),
        ("--bias", "the model's sizes are incomplete: missing --hidden_size, --intermediate_size, "),
        (TUTORIAL.replace("heads 32", "heads 30"), "hidden_size 4096 is not a multiple of num_attention_heads 30"),
        (f"{TUTORIAL} --num_experts 8", "experts_per_token is 0: with num_experts 8 give a number from 1 to 8"),
        (
            f"{TUTORIAL} --num_experts 8 --experts_per_token 2 --method both",
            "--method both: the published method has no grouped GEMMs (experts up, experts down); ",
        ),
        ("--method te-tutorial --device cpu", "--method te-tutorial times Transformer Engine, which has no CPU"),
        (
            "--method te-tutorial --accumulate 2 --precision 2% --budget 9 --l2 cold",
            "--accumulate, --precision, --budget, --l2 cold: the published method has no such thing; ",
        ),
        (
            "--recipes bf16,fp8_delayed --no-fp8-delayed",
            "--no-fp8-delayed and --recipes fp8_delayed contradict each other",
        ),
        ("-o plot.jpg", "--output plot.jpg: a plot is written as .png, .pdf, .svg; end the name in one of these"),
        ("--json nowhere/a.json", "--json nowhere/a.json: there is no folder nowhere"),
        ("--csv .", "--csv .: this is a folder; give the name of a file"),
    ],
)
def test_options_that_make_no_plan(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(line)
    with pytest.raises(GemmPlanError) as error:
        plan_from_args(args)
    assert str(error.value).startswith(message)
    assert args.run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"lowprec gemm: {error.value}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--profile", "--profile is not taken: run `nsys profile lowprec gemm"),
        ("--profile-shape 4096", "--profile-shape is not taken: give the size to --shapes"),
        ("--profile_shape 4096", "--profile-shape is not taken: give the size to --shapes"),
        ("--shapes 10x20", "'10x20' is no shape: write 4096 for a square, or MxKxN"),
        ("--shapes 0", "'0' is no shape"),
        ("--shapes 1x2x3x4", "'1x2x3x4' is no shape"),
        ("--shapes ,", "no shape is named"),
        ("--hidden_size -4", "'-4' is no whole number of at least 1"),
        ("--hidden_size 4e3", "'4e3' is no whole number of at least 1"),
        ("--accumulate 0", "'0' is no whole number of at least 1"),
        ("--num-iters 0", "'0' is no whole number of at least 1"),
        ("--precision 1", "'1' is no precision: give a share from above 0% to 20%, as 1%; did you mean 1%?"),
        ("--precision 0", "'0' is no precision"),
        ("--precision 30%", "'30%' is no precision: give a share from above 0% to 20%, as 1%"),
        ("--precision narrow", "'narrow' is no number from 0"),
        ("--budget 0", "0 seconds leave no time for a single sample"),
        ("--budget inf", "'inf' is no number from 0"),
        ("--gpu-warmup -1", "'-1' is no number from 0"),
        ("--device tpu", "'tpu' is no device: give cpu, cuda, cuda:N or auto"),
        ("--method both-of-them", "invalid choice: 'both-of-them'"),
        ("--l2 warm", "invalid choice: 'warm'"),
        ("--hidden 4096", "unrecognized arguments: --hidden 4096"),
    ],
)
def test_values_that_mean_nothing(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["gemm", *shlex.split(line)])
    assert end.value.code == cli.BAD_INPUT
    assert message in capsys.readouterr().err


def test_an_unknown_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="did you mean 'fp8_block'"):
        plan("--recipes bf16,fp8_blok")
    assert cli.main(["gemm", "--recipes", "fp8_blok"]) == cli.BAD_INPUT
    assert "no recipe 'fp8_blok'; did you mean 'fp8_block'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.01", 0.01), ("0.5%", 0.005), ("20%", 0.2), ("2.5%", 0.025)]
)
def test_precision(text: str, share: float) -> None:
    assert _precision(text) == pytest.approx(share)


def test_recipes() -> None:
    assert [card.name for card in plan("--recipes nvfp4,fp8_block").cards("transformer_engine", "bf16")] == [
        "bf16",
        "nvfp4",
        "fp8_block",
    ]
    assert [card.name for card in plan("").cards("plain_torch", "fp32")] == ["fp32", "bf16"]


# --- Running ---------------------------------------------------------------------------------------------


def test_running_hands_the_plan_on(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    def run(made: GemmPlan) -> int:
        got.append(made)
        return 1

    stand_in = ModuleType("lowprec_callback.gemm_run")
    stand_in.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lowprec_callback.gemm_run", stand_in)
    line = f"{TUTORIAL} --seed 3 --device cuda:1 --l2 cold --json a.json --csv b.csv --budget 20 --precision 2%"
    assert cli.main(["gemm", *shlex.split(line)]) == 1
    (made,) = got
    assert made == plan(line)
    assert (made.seed, made.device, made.cold_l2, made.json, made.csv) == (
        3,
        "cuda:1",
        True,
        Path("a.json"),
        Path("b.csv"),
    )
    assert (made.budget_s, made.precision) == (20.0, 0.02)
