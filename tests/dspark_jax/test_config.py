"""Every bad configuration is refused, in one line that says what was expected."""

import dataclasses
import math

import pytest

from dspark_jax.config import (
    DrafterConfig,
    Eagle3Config,
    InputError,
    MtpConfig,
    Rope,
    SlidingLayers,
    TargetConfig,
    TransformerConfig,
    require,
)

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}
DRAFT = {"block_size": 3, "mask_token_id": 5, "target_layer_ids": (0, 2), "num_target_layers": 4}


def refused(kind, **fields) -> str:
    with pytest.raises(InputError) as error:
        kind(**fields)
    message = str(error.value)
    assert "\n" not in message
    assert "expected" in message
    return message


def test_require():
    require(True, "unused")
    with pytest.raises(InputError, match=r"^what, where$"):
        require(False, "what, where")
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8"])
def test_sizes_are_whole_numbers_above_zero(name, value):
    message = refused(TransformerConfig, **{**SIZES, name: value})
    assert message == f"{name}={value!r}: expected a whole number above 0"


def test_a_slip_with_many_zeros():
    message = refused(TransformerConfig, **{**SIZES, "num_layers": 10**9})
    assert message == "num_layers=1000000000: expected at most 1024"


def test_heads_divide():
    message = refused(TransformerConfig, **{**SIZES, "num_kv_heads": 3})
    assert message.startswith("num_heads=4: expected a multiple of num_kv_heads=3")
    assert "even" in refused(TransformerConfig, **{**SIZES, "head_dim": 5})
    assert TransformerConfig(**SIZES).group_size == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": -3}, "block_size=-3"),
        ({"num_anchors": 0}, "num_anchors=0"),
        ({"mask_token_id": 32}, "mask_token_id=32: expected an id in 0..31"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (0, 3)}, "the last layer, 3, cannot be tapped"),
        ({"target_layer_ids": (0, 4)}, "target_layer_ids=[0, 4]"),
        ({"target_layer_ids": (-2,)}, "target_layer_ids=[-2]"),
        ({"target_layer_ids": (1, 1)}, "different layers in -1..2"),
        ({"head": "markov"}, "head='markov': expected one of none, vanilla, gated, rnn"),
        ({"markov_rank": 0, "confidence_head": False}, "markov_rank=0 with head='vanilla'"),
        ({"head": "none", "confidence_head": False}, "markov_rank=256 with head='none'"),
        ({"markov_rank": -1}, "markov_rank=-1"),
        ({"head": "none", "markov_rank": 0}, "markov_rank=0 with a confidence head"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0: expected a number in 1..31"),
        ({"draft_vocab_size": 32}, "draft_vocab_size=32"),
    ],
)
def test_bad_drafter(changes, said):
    assert said in refused(DrafterConfig, **{**SIZES, **DRAFT, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_layer_ids": (-1, 0, 1, 2)},
        {"block_size": 1},
        {"head": "rnn", "markov_rank": 1},
        {"head": "none", "markov_rank": 0, "confidence_head": False},
        {"head": "none", "markov_rank": 0, "confidence_with_markov": False},
        {"mask_token_id": 31},
    ],
)
def test_good_drafter(changes):
    cfg = DrafterConfig(**{**SIZES, **DRAFT, **changes})
    assert hash(cfg) == hash(dataclasses.replace(cfg))  # may be a static argument


def test_target_kinds():
    assert TargetConfig(**SIZES, model_type="qwen3").qk_norm
    assert not TargetConfig(**SIZES, model_type="llama").qk_norm


def test_for_target_takes_widths_heads_and_rope():
    target = TargetConfig(**SIZES, rope=Rope(theta=7.0), norm_eps=1e-3, tie_embeddings=True)
    settings = {"num_layers": 2, "block_size": 3, "mask_token_id": 5, "target_layer_ids": (0,)}
    cfg = DrafterConfig.for_target(target, **settings, intermediate_size=8)
    assert (cfg.num_layers, cfg.num_target_layers, cfg.intermediate_size) == (2, 4, 8)
    assert (cfg.hidden_size, cfg.vocab_size, cfg.rope, cfg.norm_eps) == (16, 32, Rope(7.0), 1e-3)
    cfg.check_fits(target)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hidden_size", {"hidden_size": 20}),
        ("vocab_size", {"vocab_size": 33}),
        ("num_target_layers", {"num_layers": 5}),
    ],
)
def test_check_fits(name, changes):
    cfg = DrafterConfig(**SIZES, **DRAFT)
    with pytest.raises(InputError) as error:
        cfg.check_fits(TargetConfig(**{**SIZES, **changes}))
    message = str(error.value)
    assert message.startswith("the drafter does not fit the target: ")
    assert name in message
    assert "\n" not in message


NEAR = SlidingLayers(layers=(0, 2), window=5, num_kv_heads=2, head_dim=6, rope=Rope(3.0))
GEMMA4 = {
    **SIZES,
    "model_type": "gemma4",
    "num_kv_heads": 1,
    "key_is_value": True,
    "sliding": NEAR,
}


def test_layers_of_two_kinds():
    cfg = TargetConfig(**GEMMA4, rope=Rope(7.0))
    assert [cfg.window(i) for i in range(4)] == [5, None, 5, None]
    near, full = cfg.layer(2), cfg.layer(1)
    assert (near.num_kv_heads, near.group_size, near.head_dim, near.rope) == (2, 2, 6, Rope(3.0))
    assert (full.num_kv_heads, full.group_size, full.head_dim, full.rope) == (1, 4, 4, Rope(7.0))
    assert (near.key_is_value, full.key_is_value) == (False, True)
    assert cfg.layer(0) == near
    assert cfg.score_scale == 1
    assert cfg.embed_scale == 4
    plain = TargetConfig(**SIZES)
    assert plain.layer(3) == plain
    assert plain.window(3) is None
    assert plain.score_scale == 0.5
    assert plain.embed_scale == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (0, 4)}, "sliding layers [0, 4]: expected layers in 0..3"),
        ({"window": 0}, "sliding window 0: expected a number above 0"),
        ({"head_dim": 5}, "head_dim=5: expected an even number"),
        ({"num_kv_heads": 3}, "expected a multiple of num_kv_heads=3"),
    ],
)
def test_bad_sliding_layers(changes, said):
    sliding = dataclasses.replace(NEAR, **changes)
    assert said in refused(TargetConfig, **{**GEMMA4, "sliding": sliding})


def test_heads_of_both_kinds_where_values_have_a_matrix():
    message = refused(TargetConfig, **{**GEMMA4, "key_is_value": False})
    assert message.startswith("num_kv_heads=2 of sliding layers: expected 1")


def test_a_soft_cap_is_above_zero():
    assert "logit_softcap=0" in refused(TargetConfig, **SIZES, logit_softcap=0)


def test_drafters_are_like_the_layers_that_see_everything():
    settings = {"num_layers": 2, "block_size": 3, "mask_token_id": 5, "target_layer_ids": (0,)}
    target = TargetConfig(**GEMMA4, rope=Rope(7.0))
    cfg = DrafterConfig.for_target(target, **settings)
    assert (cfg.model_type, cfg.key_is_value, cfg.num_kv_heads) == ("gemma4", True, 1)
    cfg.check_fits(target)
    llama = TargetConfig(**SIZES, model_type="llama")
    other = DrafterConfig.for_target(llama, **settings)
    assert other.model_type == "qwen3"
    other.check_fits(llama)
    with pytest.raises(InputError, match="whether its layers are Gemma4's is False in the drafter"):
        other.check_fits(target)
    assert "model_type='llama'" in refused(DrafterConfig, **SIZES, **DRAFT, model_type="llama")


def test_proportional_frequencies():
    """Half of four pairs turn, as the first two of all do, half as fast."""
    rope = Rope(1e4, "proportional", 2.0, rotated_part=0.5)
    assert rope.frequencies(8) == pytest.approx([0.5, 0.05, 0, 0])


def test_default_frequencies():
    # theta^(-2i/H): 100^0, 100^(-1/2)
    assert Rope(theta=100.0).frequencies(4) == pytest.approx([1.0, 0.1])


def test_llama3_frequencies():
    rope = Rope(1e4, "llama3", 8.0, 1.0, 4.0, original_max_position=100)
    # Wavelengths of 1, 1e-1, 1e-2, 1e-3 radians a position against 100 positions: 15.9 turns
    # (kept), 1.59 (between), .159 and .0159 (divided by the factor).
    turns = 100 * 0.1 / (2 * math.pi)
    smooth = (turns - 1.0) / (4.0 - 1.0)
    between = (1 - smooth) * 0.1 / 8 + smooth * 0.1
    found = rope.frequencies(8)
    assert found == pytest.approx([1.0, between, 0.01 / 8, 0.001 / 8])
    assert 0.1 / 8 < between < 0.1


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (Eagle3Config, {"num_layers": 2}, "num_layers=2: expected 1"),
        (Eagle3Config, {"target_layer_ids": ()}, "target_layer_ids is empty"),
        (Eagle3Config, {"target_layer_ids": (3,)}, "the last layer, 3, cannot be tapped"),
        (Eagle3Config, {"block_size": 0}, "block_size=0"),
        (Eagle3Config, {"step_loss_decay": 0.0}, "step_loss_decay=0.0"),
        (Eagle3Config, {"step_loss_decay": 1.1}, "step_loss_decay=1.1"),
        (MtpConfig, {"num_layers": 2}, "num_layers=2: expected 1"),
        (MtpConfig, {"block_size": 2}, "block_size=2: expected 1"),
        (MtpConfig, {"target_layer_ids": (0,)}, "target_layer_ids=[0]: expected none"),
    ],
)
def test_bad_recurrent_drafters(kind, changes, said):
    fields = {**SIZES, "num_layers": 1, "num_target_layers": 4}
    fields |= {"block_size": 3, "target_layer_ids": (0, 2)} if kind is Eagle3Config else {}
    good = kind(**fields)
    assert (good.reads_tokens, good.least_context, good.output_size) == (True, 1, 32)
    assert kind(**fields, draft_vocab_size=9).output_size == 9
    assert said in refused(kind, **{**fields, **changes})
