"""Which layers do not fit which recipe, and what size would."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_callback.analyze.alignment import AlignmentRow, Fix, check_alignment, next_multiple
from lowprec_callback.analyze.model_config import ModelConfig
from lowprec_callback.analyze.shapes import LM_HEAD, LayerGemm, layer_gemms
from lowprec_callback.recipes import RecipeCard, load_cards

CARDS = load_cards()
TE_CARDS = [card for card in CARDS.values() if card.te_class]
B200, HOPPER, RTX = (10, 0), (9, 0), (12, 0)


def check(m: int, k: int, n: int, *recipes: str, capability: tuple[int, int] | None = None) -> list[AlignmentRow]:
    gemm = LayerGemm("MLP up", m, k, n)
    return list(check_alignment([gemm], [CARDS[name] for name in recipes], capability))


def test_a_model_that_fits_everything() -> None:
    config = ModelConfig(4096, 16384, 32, 24, 31, 512)
    for capability in (None, HOPPER):
        assert check_alignment(layer_gemms(config), list(CARDS.values()), capability) == ()


def test_what_cannot_run_says_which_size_would() -> None:
    config = ModelConfig(768, 3000, 12, 4, 1, 100)
    rows = check_alignment(layer_gemms(config), [CARDS["fp8_delayed"]])
    assert [(row.operation, row.kind) for row in rows] == [
        ("QKV", "cannot run"),
        ("attention out", "cannot run"),
        ("MLP up", "cannot run"),
        ("MLP down", "cannot run"),
    ]
    assert rows[0].reason == "100 tokens, needs a multiple of 16"
    assert rows[2].fixes == (
        Fix("tokens", 100, 16, "micro_batch_size * sequence_length"),
        Fix("output features", 3000, 16, "intermediate_size"),
    )
    assert [fix.next_size for fix in rows[2].fixes] == [112, 3008]
    assert str(rows[2]) == (
        "MLP up 100x768x3000 in fp8_delayed: cannot run: 100 tokens, needs a multiple of 16; "
        "3000 output features, needs a multiple of 16; what works: "
        "tokens 100 -> 112 (micro_batch_size * sequence_length), output features 3000 -> 3008 (intermediate_size)"
    )


@pytest.mark.parametrize(
    ("recipe", "size", "works"),
    [
        ("fp8_delayed", 16, True),
        ("fp8_current", 24, False),
        ("fp8_block", 16, True),
        ("fp8_block", 8, False),
        ("mxfp8", 32, True),
        ("mxfp8", 48, False),
        ("nvfp4", 16, False),
        ("nvfp4", 32, True),
    ],
)
def test_each_recipe_has_its_own_multiple(recipe: str, size: int, works: bool) -> None:
    for m, k, n in ((size, 256, 256), (256, size, 256), (256, 256, size)):
        assert any(row.kind == "cannot run" for row in check(m, k, n, recipe)) != works


@given(
    st.sampled_from(TE_CARDS), st.integers(1, 700), st.integers(1, 700), st.integers(1, 700), st.sampled_from([1, 1, 4])
)
def test_the_sizes_that_are_offered_do_work(card: RecipeCard, m: int, k: int, n: int, groups: int) -> None:
    gemm = LayerGemm("MLP up", m * groups, k, n, groups=groups)
    for _ in range(2):  # one round for what cannot run, one for the slow paths
        for fix in (fix for row in check_alignment([gemm], [card], B200) for fix in row.fixes):
            if fix.what == "input features":
                assert fix.size == gemm.k
                gemm = replace(gemm, k=fix.next_size)
            elif fix.what == "output features":
                assert fix.size == gemm.n
                gemm = replace(gemm, n=fix.next_size)
            else:
                assert fix.size * groups == gemm.m
                gemm = replace(gemm, m=groups * fix.next_size)
    assert not any(row.fixes for row in check_alignment([gemm], [card], B200))


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_next_multiple(size: int, multiple: int) -> None:
    found = next_multiple(size, multiple)
    assert found % multiple == 0
    assert size <= found < size + multiple


# --- Slow paths ------------------------------------------------------------------------------------------


def test_bf16_off_multiples_of_eight() -> None:
    config = ModelConfig(768, 3072, 12, 12, 8, 1024, vocab_size=50257)
    (row,) = check_alignment(layer_gemms(config), [CARDS["bf16"], *TE_CARDS])
    assert (row.recipe, row.operation, row.kind) == ("bf16", LM_HEAD, "slow path")
    assert [str(fix) for fix in row.fixes] == ["output features 50257 -> 50264 (vocab_size)"]
    assert check_alignment(layer_gemms(config), [CARDS["fp32"]]) == ()


def test_nvfp4_beside_its_fused_casts() -> None:
    assert check(64, 128, 128, "nvfp4", capability=B200) == []
    for m, k, n, fix in (
        (96, 128, 128, "tokens 96 -> 128 (m)"),
        (64, 160, 128, "input features 160 -> 256 (k)"),
        (64, 128, 32, "output features 32 -> 128 (n)"),
    ):
        (row,) = check(m, k, n, "nvfp4", capability=B200)
        assert (row.kind, [str(each) for each in row.fixes]) == ("slow path", [fix])
        assert row.reason.startswith("Hadamard transform and cast are not fused")


def test_nvfp4_where_nothing_is_fused() -> None:
    (row,) = check(64, 128, 128, "nvfp4", capability=RTX)
    assert (row.reason, row.fixes) == ("Hadamard transform and cast are not fused on compute capability 12.0", ())


def test_nvfp4_without_its_remedies() -> None:
    plain = CARDS["nvfp4"].with_arguments({"disable_rht": True})
    gemm = LayerGemm("MLP up", 96, 160, 128)
    (row,) = check_alignment([gemm], [plain], B200)
    assert row.reason.startswith("cast and swizzle are not fused")
    assert [fix.what for fix in row.fixes] == ["input features"]
    plainest = plain.with_arguments({"disable_2d_quantization": True})
    assert check_alignment([gemm], [plainest], B200) == ()


def test_block_scaling_is_emulated_from_blackwell_on() -> None:
    assert check(256, 256, 256, "fp8_block", capability=HOPPER) == []
    assert check(256, 256, 256, "fp8_block") == []
    (row,) = check(256, 256, 256, "fp8_block", capability=B200)
    assert row.kind == "slow path"
    assert row.reason.startswith("on this GPU it runs as MXFP8")


def test_what_cannot_run_has_no_slow_path() -> None:
    (row,) = check(8, 256, 256, "fp8_block", capability=B200)
    assert row.kind == "cannot run"


# --- Experts, and layers outside -------------------------------------------------------------------------


def test_each_expert_must_fit() -> None:
    experts = LayerGemm("experts up", 2 * 100, 256, 256, groups=4)  # 50 rows each
    (row,) = check_alignment([experts], [CARDS["fp8_current"]])
    assert row.kind == "cannot run"
    assert row.reason == "of each expert: 50 tokens, needs a multiple of 16"
    assert [str(fix) for fix in row.fixes] == ["tokens of an expert 50 -> 64 (m / num_experts)"]


def test_experts_are_padded() -> None:
    experts = LayerGemm("experts up", 8192, 256, 256, groups=8)
    delayed = check_alignment([experts], [CARDS["fp8_delayed"]])
    assert [row.kind for row in delayed] == ["slow path", "note"]
    assert delayed[0].reason == "no grouped kernel: one GEMM an expert, on several streams"
    assert delayed[1].reason.endswith("padded to a multiple of 16, at most 120 rows in all beside 8192")
    assert [row.kind for row in check_alignment([experts], [CARDS["mxfp8"]])] == ["note"]
    assert check_alignment([experts], [CARDS["bf16"]]) == ()


def test_grouped_nvfp4_needs_more_rows() -> None:
    experts = LayerGemm("experts up", 8 * 64, 128, 128, groups=8)
    kinds = {row.kind: row for row in check_alignment([experts], [CARDS["nvfp4"]], B200)}
    assert [str(fix) for fix in kinds["slow path"].fixes] == ["tokens of an expert 64 -> 128 (m / num_experts)"]


def test_layers_outside_every_recipe() -> None:
    head = LayerGemm(LM_HEAD, 64, 128, 50257, per_layer=False, quantizable=False)
    assert check_alignment([head], TE_CARDS) == ()
    rows = check_alignment([head], TE_CARDS, outside_too=True)
    assert [row.recipe for row in rows] == [card.name for card in TE_CARDS]
    assert {row.fixes[0].next_size for row in rows} == {50272}


def test_a_card_of_the_users_own_counts() -> None:
    own = replace(CARDS["bf16"], name="own", align_k=256)
    (row,) = check_alignment([LayerGemm("MLP up", 1, 128, 8)], [own])
    assert (row.recipe, row.fixes[0].next_size) == ("own", 256)
