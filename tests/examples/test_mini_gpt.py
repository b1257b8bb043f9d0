"""MiniGPT learns, its two kinds of block agree, and its commands say what happened."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `examples` is no part of the installed package

from examples.mini_gpt import generate, precision, train  # noqa: E402
from examples.mini_gpt.data import ArithmeticSequences, arithmetic, sequences, stride_of  # noqa: E402
from examples.mini_gpt.model import _TE_NAMES, PRESETS, GPTConfig, MiniGPT  # noqa: E402

SMALL = GPTConfig(hidden=64, heads=2, layers=2, ffn=128, sequence=32, batch=16, learning_rate=3e-3, steps=120)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


# --- Data ---------------------------------------------------------------------------------------------


def test_arithmetic_wraps_at_the_vocabulary() -> None:
    assert arithmetic(90, 3, 5) == [90, 93, 0, 3, 6]


@pytest.mark.parametrize(
    ("tokens", "stride"),
    [([90, 93, 0, 3], 3), ([5, 8, 11, 15], None), ([5], None), ([], None), ([1, 2], 1)],
)
def test_stride_of(tokens: list[int], stride: int | None) -> None:
    assert stride_of(tokens) == stride


def test_every_sequence_is_arithmetic_and_fixed_by_the_seed() -> None:
    data = ArithmeticSequences(200, 17, seed=1)
    again, other = ArithmeticSequences(200, 17, seed=1), ArithmeticSequences(200, 17, seed=2)
    for index in range(200):
        assert stride_of(data[index].tolist()) in range(1, 7)
        assert torch.equal(data[index], again[index])
    assert not torch.equal(data.rows, other.rows)
    assert len(data.table.unique(dim=0)) == 576


def test_a_batch_is_the_sequences_of_its_indices() -> None:
    data = ArithmeticSequences(64, 9, seed=1)
    batches = list(sequences(batches=4, batch=16, sequence=8, seed=1))
    assert [batch.shape for batch in batches] == [(16, 9)] * 4
    assert torch.equal(torch.cat(batches), torch.stack([data[index] for index in range(64)]))


# --- Model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_fp8(name: str) -> None:
    config = PRESETS[name]
    assert config.hidden % config.heads == 0
    assert config.hidden % 16 == 0
    assert config.ffn % 16 == 0
    assert config.batch * config.sequence % 16 == 0  # wgrad sums over the tokens


def test_heads_must_divide_hidden() -> None:
    with pytest.raises(ValueError, match="hidden 64 is not a multiple of heads 3"):
        replace(SMALL, heads=3)


def test_logits_have_one_score_for_each_token_of_the_vocabulary() -> None:
    assert MiniGPT(SMALL)(torch.zeros(3, 20, dtype=torch.long)).shape == (3, 20, 96)


def test_a_later_token_changes_no_earlier_logits() -> None:
    model = MiniGPT(SMALL).eval()
    tokens = torch.randint(96, (2, 32))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 96
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=0)
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_an_untrained_model_guesses() -> None:
    model = MiniGPT(SMALL)
    loss = model.training_step(next(iter(sequences(1, 16, 32))), 0)
    assert loss.item() == pytest.approx(math.log(96), abs=0.1)


@pytest.fixture(scope="module")
def trained() -> MiniGPT:
    """SMALL after 120 steps; about 2 s."""
    torch.manual_seed(0)
    model = MiniGPT(SMALL)
    optimizer = model.configure_optimizers()
    for batch in sequences(SMALL.steps, SMALL.batch, SMALL.sequence):
        model.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_it_learns(trained: MiniGPT) -> None:
    assert trained.losses[0].item() == pytest.approx(math.log(96), abs=0.1)
    assert trained.losses[-1].item() < 1.0


def test_it_continues_a_prompt_with_its_stride(trained: MiniGPT) -> None:
    assert generate.continue_prompt(trained, [5, 8, 11, 14], 24) == arithmetic(5, 3, 24)


def test_the_prompt_must_fit(trained: MiniGPT) -> None:
    for prompt, length in (([], 8), ([1, 2], 33), ([1, 2, 3], 2)):
        with pytest.raises(ValueError, match="cannot be continued"):
            generate.continue_prompt(trained, prompt, length)


# --- Checkpoints and generate.py ----------------------------------------------------------------------


def test_a_checkpoint_gives_the_same_model_back(trained: MiniGPT, tmp_path: Path) -> None:
    trained.save(tmp_path / "new" / "model.pt")
    loaded = MiniGPT.load(tmp_path / "new" / "model.pt")
    assert loaded.config == trained.config
    mine, theirs = trained.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_generate_says_that_the_stride_stays(
    trained: MiniGPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.save(tmp_path / "model.pt")
    assert generate.main([str(tmp_path / "model.pt"), "--start", "93", "--stride", "2", "--length", "8"]) == 0
    assert capsys.readouterr().out == "93 95 1 3 | 5 7 9 11\nthe stride stays 2\n"


def test_generate_says_where_the_stride_breaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MiniGPT(SMALL)
    with torch.no_grad():  # whatever it reads, it answers 42
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.head.weight.zero_()
        model.head.weight[42] = 1.0
    model.save(tmp_path / "model.pt")
    assert generate.main([str(tmp_path / "model.pt"), "--length", "6"]) == 1
    assert capsys.readouterr().out == "5 8 11 14 | 42 42\nthe stride breaks at token 5: 42 instead of 17\n"


@pytest.mark.parametrize("arguments", [["--length", "99"], ["--prompt", "0"], ["--recipe", "fp9"]])
def test_generate_refuses_with_a_sentence(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MiniGPT(SMALL).save(tmp_path / "model.pt")
    assert generate.main([str(tmp_path / "model.pt"), *arguments]) == 2
    assert generate.main([str(tmp_path / "missing.pt")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


# --- train.py -----------------------------------------------------------------------------------------

TRAIN_SMALL = ["--no-profile", "--preset", "small", "--precision", "32-true"]


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "small", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("small_preset")
def test_train_prints_the_loss_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "model.pt"
    assert train.main([*TRAIN_SMALL, "--steps", "3", "--checkpoint", str(saved)]) == 0
    first, loss, last = capsys.readouterr().out.splitlines()
    assert first.endswith("32-true; 3 steps of 16 x 32 tokens")
    assert "at step 3; guessing is ln(96) = 4.564" in loss
    assert last == f"saved {saved}"
    assert MiniGPT.load(saved).config == SMALL


@pytest.mark.usefixtures("small_preset")
def test_the_same_seed_gives_the_same_losses() -> None:
    runs = []
    for seed in ("7", "7", "8"):
        options = train.parser().parse_args([*TRAIN_SMALL, "--steps", "2", "--seed", seed])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train.logging.getLogger("lightning.pytorch"), "level", train.logging.ERROR)
            runs.append([loss.item() for loss in train.train(options).losses])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.usefixtures("small_preset")
def test_the_learning_rate_falls_to_zero_over_the_steps() -> None:
    model = train.train(train.parser().parse_args([*TRAIN_SMALL, "--steps", "4", "--lr", "1.0"]))
    schedule = model.lr_schedulers()
    assert schedule.get_last_lr() == [0.0]
    assert [schedule.lr_lambdas[0](step) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.usefixtures("small_preset")
def test_a_recipe_runs_without_the_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*TRAIN_SMALL, "--steps", "2", "--recipe", "bf16"]) == 0
    assert train.main([*TRAIN_SMALL, "--steps", "2", "--recipe", "fp32"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("small_preset")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recipe", "fp8_delayed"], "recipe fp8_delayed needs Transformer Engine"),
        (["--quantized-init", "mxfp8"], "recipe mxfp8 needs Transformer Engine"),
        (["--recipe", "fp9"], "no recipe 'fp9'; known: "),
    ],
)
def test_a_recipe_that_cannot_run_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*TRAIN_SMALL, "--steps", "2", *arguments]) == 2
    assert capsys.readouterr().err.startswith(sentence)


PROFILE = ("--rounds", "1", "--settle-steps", "1", "--timed-steps", "2", "--traced-steps", "0", "--guard-steps", "1")


@pytest.mark.usefixtures("small_preset")
def test_the_profile_leaves_the_losses_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # They take longer than all else here.
    monkeypatch.setattr("lowprec_callback.sweep.session.Session._show", lambda _self: None)
    monkeypatch.setattr("lowprec_callback.sweep.script.Sweep._benchmark", lambda _self: None)
    small = [*TRAIN_SMALL[1:], "--steps", "3"]
    alone = train.train(train.parser().parse_args(["--no-profile", *small]))
    profiled = train.train(
        train.parser().parse_args([*small, *PROFILE, "--recipes", "fp32", "--output-dir", str(tmp_path)])
    )
    assert list(tmp_path.glob("*/recording.jsonl"))
    assert len(profiled.losses) == 3
    assert [loss.item() for loss in profiled.losses] == [loss.item() for loss in alone.losses]


@pytest.mark.usefixtures("small_preset")
def test_a_profile_that_was_all_and_is_none_has_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--recipes", "fp8_delayed", "--steps", "2", "--output-dir", str(tmp_path)]
    assert train.main([*TRAIN_SMALL[1:], "--profile-only", *arguments]) == 2
    assert capsys.readouterr().err.count("none of the recipes that were asked for can run here") == 1
    assert train.main([*TRAIN_SMALL[1:], *arguments]) == 0  # the training is not the profile's to end


def test_options_reach_transformer_engines_recipes() -> None:
    options = train.parser().parse_args(["--fp8-format", "E4M3", "--amax-history-len", "16"])
    assert train.recipe_arguments(options) == {
        "fp8_delayed": {"fp8_format": "E4M3", "amax_history_len": 16},
        "fp8_current": {"fp8_format": "E4M3"},
    }
    assert train.recipe_arguments(train.parser().parse_args([])) == {}


@pytest.mark.parametrize("script", ["train.py", "generate.py"])
def test_the_scripts_start_by_their_path_from_anywhere(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "mini_gpt" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert script in done.stdout


# --- Transformer Engine, faked ------------------------------------------------------------------------


class FakeLayer(torch.nn.Module):
    """Has te.TransformerLayer's parameters, and the extra state that its modules add to a state dict."""

    def __init__(self, hidden: int, ffn: int, heads: int, **arguments: object) -> None:
        super().__init__()
        self.arguments = {"hidden": hidden, "ffn": ffn, "heads": heads, **arguments}
        shapes = {
            "self_attention.layernorm_qkv.weight": (3 * hidden, hidden),
            "self_attention.layernorm_qkv.bias": (3 * hidden,),
            "self_attention.proj.weight": (hidden, hidden),
            "layernorm_mlp.fc1_weight": (ffn, hidden),
            "layernorm_mlp.fc1_bias": (ffn,),
            "layernorm_mlp.fc2_weight": (hidden, ffn),
        }
        for name in _TE_NAMES.values():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, torch.nn.Parameter(torch.randn(shapes.get(name, (hidden,)))))

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class FakeTE(ModuleType):
    """Writes down what it was asked for."""

    TransformerLayer = FakeLayer

    def __init__(self, old_names: bool) -> None:
        super().__init__("transformer_engine.pytorch")
        self.log: list[tuple[str, object]] = []
        names = ("fp8_autocast", "fp8_model_init") if old_names else ("autocast", "quantized_model_init")
        for name in names:
            setattr(self, name, self._context(name))
        self.optimizers = SimpleNamespace(FusedAdam=self._adam)

    def _context(self, name: str) -> object:
        @contextmanager
        def region(**arguments: object) -> Iterator[None]:
            self.log.append((name, arguments))
            yield

        return region

    def _adam(self, parameters: object, **arguments: object) -> torch.optim.Optimizer:
        self.log.append(("FusedAdam", arguments))
        return torch.optim.SGD(parameters)  # type: ignore[arg-type]


@pytest.fixture(params=[False, True], ids=["names since 2.9", "names before 2.9"])
def fake_te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTE:
    """TE can be imported; its recipe classes keep their arguments."""
    module = FakeTE(old_names=request.param)
    recipe = ModuleType("transformer_engine.common.recipe")
    recipe.Format = {name: f"Format.{name}" for name in ("HYBRID", "E4M3")}  # type: ignore[attr-defined]
    recipe.DelayedScaling = lambda **arguments: ("DelayedScaling", arguments)  # type: ignore[attr-defined]
    for name, part in {
        "transformer_engine": ModuleType("transformer_engine"),
        "transformer_engine.pytorch": module,
        "transformer_engine.common": ModuleType("transformer_engine.common"),
        "transformer_engine.common.recipe": recipe,
    }.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setattr(precision, "_find_te", lambda: (module, ""))
    return module


@pytest.mark.usefixtures("fake_te")
def test_te_layers_are_causal_and_fused() -> None:
    model = MiniGPT(SMALL, "transformer_engine", dtype=torch.bfloat16)
    layer = model.blocks[1]
    assert isinstance(layer, FakeLayer)
    assert layer.arguments == {
        "hidden": 64,
        "ffn": 128,
        "heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "self_attn_mask_type": "causal",
        "fuse_qkv_params": True,
        "attn_input_format": "bshd",
        "params_dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }


@pytest.mark.usefixtures("fake_te")
def test_auto_takes_plain_blocks_on_a_cpu() -> None:
    assert MiniGPT(SMALL).block_kind == "plain_torch"


@pytest.mark.usefixtures("fake_te")
def test_a_checkpoint_loads_into_either_kind_of_block(tmp_path: Path) -> None:
    plain = MiniGPT(SMALL, "plain_torch")
    plain.save(tmp_path / "plain.pt")
    of_te = MiniGPT.load(tmp_path / "plain.pt", "transformer_engine")
    qkv = of_te.state_dict()["blocks.1.self_attention.layernorm_qkv.weight"]
    assert torch.equal(qkv, plain.state_dict()["blocks.1.qkv.weight"])
    of_te.save(tmp_path / "te.pt")
    back = MiniGPT.load(tmp_path / "te.pt", "plain_torch").state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in plain.state_dict().items())


def test_a_region_opens_te_with_the_cards_recipe(fake_te: FakeTE) -> None:
    region = precision.region("fp8_delayed", MiniGPT(SMALL), {"fp8_format": "E4M3", "amax_history_len": 16})
    with region(), region():
        pass
    (name, first), (_, second) = fake_te.log
    recipe = first["recipe" if name == "autocast" else "fp8_recipe"]  # type: ignore[index]
    assert recipe == (
        "DelayedScaling",
        {"fp8_format": "Format.E4M3", "amax_history_len": 16, "amax_compute_algo": "max"},
    )
    assert first["enabled"] is True  # type: ignore[index]
    assert next(iter(reversed(first.values()))) is next(iter(reversed(second.values())))  # type: ignore[attr-defined]


def test_weights_stored_in_fp8_train_with_fp32_masters(fake_te: FakeTE) -> None:
    model = MiniGPT(SMALL, "transformer_engine", quantized="fp8_delayed")
    model.configure_optimizers()
    names = [name for name, _ in fake_te.log]
    assert names in (["quantized_model_init", "FusedAdam"], ["fp8_model_init", "FusedAdam"])
    assert fake_te.log[1][1]["master_weights"] is True  # type: ignore[index]


@pytest.mark.usefixtures("fake_te")
def test_a_recipe_that_this_te_lacks_is_refused() -> None:
    with pytest.raises(precision.RecipeError, match="has no NVFP4BlockScaling"):
        precision.te_recipe("nvfp4")


def test_a_broken_te_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_name: str) -> ModuleType:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(precision, "import_module", broken)
    precision._find_te.cache_clear()
    try:
        assert precision.te() is None
        assert precision.why_plain().endswith("OSError: libcudnn.so.9: cannot open shared object file")
    finally:
        precision._find_te.cache_clear()
