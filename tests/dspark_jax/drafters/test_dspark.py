"""The drafter: decoding and training agree, and both agree with the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.config import DrafterConfig, SlidingLayers, TargetConfig
from dspark_jax.drafters import confidence, dspark, heads
from dspark_jax.flat import pack
from dspark_jax.io import hf
from dspark_jax.layers import rope_angles
from dspark_jax.targets import dense

TARGET = TargetConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CFG = DrafterConfig.for_target(
    TARGET,
    num_layers=2,
    block_size=4,
    mask_token_id=49,
    target_layer_ids=(-1, 1),
    markov_rank=6,
)
GOLDEN = ["qwen3_vanilla", "qwen3_rnn", "qwen3_gated", "qwen3_dflash", "gemma4_vanilla"]


def random_like(specs):
    rng = np.random.default_rng(0)

    def draw(spec):
        return jnp.float32(rng.normal(size=spec.shape) * 0.2 + (len(spec.shape) == 1))

    return jax.tree.map(draw, specs)


@pytest.fixture(scope="module")
def models():
    return random_like(dense.specs(TARGET)), random_like(dspark.specs(CFG))


@pytest.fixture
def features():
    """Target features [R, S, L * D] of three rows."""
    return np.random.default_rng(1).normal(size=(3, 12, 48)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="cfg")
def train(drafter, target, anchor, position, features, cfg=CFG):
    angles = rope_angles(jnp.arange(features.shape[1])[None], cfg.rope, cfg.head_dim)
    weights = dspark.context_weights(drafter)
    context = dspark.context_key_values(drafter, weights, features, angles, cfg)
    return dspark.training_hidden(drafter, target, anchor, position, context, cfg=cfg)


TABLE = rope_angles(jnp.arange(20), CFG.rope, CFG.head_dim)
append = jax.jit(dspark.append_context, static_argnames="cfg")
draft = jax.jit(dspark.draft_hidden, static_argnames="cfg")


def extend(drafter, features, cache, start, counts, capacity):
    """Appends counts[r] of each row's features, from position start[r], as a flat buffer."""
    width = max(counts)
    flat = pack(jnp.zeros((3, width), int), jnp.array(counts), jnp.array(start), capacity)
    where = start[np.asarray(flat.row)] + np.asarray(flat.slot)
    values = features[np.asarray(flat.row), np.minimum(where, features.shape[1] - 1)]
    weights = dspark.context_weights(drafter)
    end = flat.start + flat.counts
    return append(drafter, None, weights, values, flat, end, cache, TABLE, cfg=CFG)


@pytest.mark.parametrize(
    "pieces",
    [
        [([2, 7, 4], 21)],  # at once, aligned
        [([2, 7, 4], 13)],  # at once, close-packed
        [([1, 3, 0], 4), ([1, 1, 3], 9), ([0, 3, 1], 5)],
    ],
    ids=["aligned", "close-packed", "pieces"],
)
def test_decoding_equals_training(models, features, pieces):
    target, drafter = models
    cache = dspark.create_cache(CFG, 3, 20, jnp.float32)
    start = np.zeros(3, int)
    for counts, capacity in pieces:
        cache = extend(drafter, features, cache, start, counts, capacity)
        start = start + counts
    anchor = jnp.array([5, 0, 31])
    found, _ = draft(drafter, target, anchor, jnp.asarray(start), cache, TABLE, cfg=CFG)
    expected = train(drafter, target, anchor[:, None], jnp.asarray(start)[:, None], features)
    np.testing.assert_allclose(found, expected[:, 0], atol=2e-5)


def test_context_by_hand(models):
    """One norm behind the projection, none at a layer's input; keys are normed and rotated."""
    _, drafter = models
    features = np.random.default_rng(2).normal(size=(5, 48)).astype(np.float32)
    angles = rope_angles(jnp.arange(5) + 3, CFG.rope, CFG.head_dim)
    weights = dspark.context_weights(drafter)
    found = dspark.context_key_values(drafter, weights, features, angles, CFG)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean() + CFG.norm_eps) * weight

    frequencies = np.array(CFG.rope.frequencies(CFG.head_dim))
    for n, layer in enumerate(drafter.layers):
        for t, g in np.ndindex(5, CFG.num_kv_heads):
            h = norm(features[t] @ np.asarray(drafter.fc), np.asarray(drafter.context_norm))
            key = norm(h @ np.asarray(layer.qkv[:, g, -2]), np.asarray(layer.k_norm))
            pairs = (key[:4] + 1j * key[4:]) * np.exp(1j * (t + 3) * frequencies)
            key = np.concatenate([pairs.real, pairs.imag])
            np.testing.assert_allclose(found[n][0][t, g], key, atol=1e-5)
            value = h @ np.asarray(layer.qkv[:, g, -1])
            np.testing.assert_allclose(found[n][1][t, g], value, atol=1e-5)


def test_a_draft_leaves_no_trace(models, features):
    """The slots of a round are overwritten: the next round is as if there had been none."""
    target, drafter = models
    fresh = dspark.create_cache(CFG, 3, 20, jnp.float32)
    first, second = [3, 1, 2], [1, 2, 1]
    start = np.zeros(3, int)
    used = extend(drafter, features, fresh, start, first, 9)
    quiet = used
    start = start + first
    tokens = jnp.array([5, 0, 31])
    _, used = draft(drafter, target, tokens, jnp.asarray(start), used, TABLE, cfg=CFG)
    used, quiet = (extend(drafter, features, c, start, second, 5) for c in (used, quiet))
    start = start + second
    anchor = jnp.array([7, 8, 9])
    found, _ = draft(drafter, target, anchor, jnp.asarray(start), used, TABLE, cfg=CFG)
    expected, _ = draft(drafter, target, anchor, jnp.asarray(start), quiet, TABLE, cfg=CFG)
    np.testing.assert_array_equal(found, expected)


def test_a_block_sees_only_what_is_before_its_anchor(models, features):
    target, drafter = models
    anchor, position = jnp.array([[1, 2], [3, 4], [5, 6]]), jnp.array([[4, 9], [0, 6], [11, 2]])
    expected = train(drafter, target, anchor, position, features)
    for r, a in np.ndindex(3, 2):
        changed = features.copy()
        changed[r, position[r, a] :] += 100
        changed[np.arange(3) != r] += 100
        found = train(drafter, target, anchor, position, changed)
        np.testing.assert_array_equal(found[r, a], expected[r, a])
        changed[r, : position[r, a]] += 1
        found = train(drafter, target, anchor, position, changed)
        assert position[r, a] == 0 or np.abs(found[r, a] - expected[r, a]).max() > 1e-3


def test_attention_inside_a_block_goes_both_ways(models, features):
    target, drafter = models
    position = jnp.array([[4], [4], [4]])
    expected = train(drafter, target, jnp.array([[1], [2], [3]]), position, features)
    masks = target.embed.at[CFG.mask_token_id].add(1.0)
    changed = train(
        drafter,
        dataclasses.replace(target, embed=masks),
        jnp.array([[1], [2], [3]]),
        position,
        features,
    )
    # Only the later slots' inputs have changed, and the anchor's slot feels it.
    assert np.abs(changed[:, 0, 0] - expected[:, 0, 0]).max() > 1e-3


def test_block_inputs(models):
    target, _ = models
    found = dspark.block_inputs(target, jnp.array([3, 4]), block_size=3, mask_id=49)
    np.testing.assert_array_equal(found, target.embed[jnp.array([[3, 49, 49], [4, 49, 49]])])
    alone = dspark.block_inputs(target, jnp.array([3]), block_size=1, mask_id=49)
    np.testing.assert_array_equal(alone, target.embed[jnp.array([[3]])])


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_logits_and_confidences(golden, name):
    folder = golden / f"dspark_{name}"
    cfg, drafter = hf.load_drafter(folder)
    target_cfg, target = hf.load_target(golden / f"{name.split('_')[0]}_target")
    cfg.check_fits(target_cfg)
    want = load_file(folder / "expected_train.safetensors")
    anchors = want["anchor_positions"]
    tokens = np.take_along_axis(want["input_ids"], anchors, axis=1)

    @jax.jit
    def outputs(drafter, target):
        hidden = train(drafter, target, tokens, anchors, want["target_hidden_states"], cfg=cfg)
        logits = dense.logits(target, hidden)
        previous = jnp.concatenate([tokens[..., None], want["target_ids"][..., :-1]], axis=-1)
        if drafter.head is not None:
            logits = logits + heads.teacher_forced(drafter.head, hidden, previous)
        scores = None
        if drafter.confidence is not None:
            scores = confidence.logits(drafter.confidence, drafter.head, hidden, previous)
        return logits, scores

    logits, scores = outputs(drafter, target)
    used = (want["eval_mask"] * want["block_keep_mask"][..., None]).astype(bool)
    assert used.sum() > 20
    bound = 5e-4 * (1 + np.abs(want["draft_logits"][used]).max())
    np.testing.assert_allclose(logits[used], want["draft_logits"][used], rtol=0, atol=bound)
    assert (scores is None) == (name == "qwen3_dflash")
    if scores is not None:
        expected = want["confidence_logits"][used]
        bound = 5e-4 * (1 + np.abs(expected).max())
        np.testing.assert_allclose(scores[used], expected, rtol=0, atol=bound)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("count", "chosen"), [(1, [3]), (2, [0, 3]), (3, [0, 2, 3])])
def test_layers_of_the_target_to_start_from(models, stacked, count, chosen):
    """Evenly spaced; whatever the target's layout, and as copies."""
    target, _ = models
    cfg = dataclasses.replace(CFG, num_layers=count)
    drawn = random_like(dspark.specs(cfg))
    given = dense.stack_layers(target, TARGET) if stacked else target
    found = dspark.start_from_target(drawn, given, cfg)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, drawn)
    for layer, index in zip(found.layers, chosen, strict=True):
        for mine, its in zip(
            jax.tree.leaves(layer), jax.tree.leaves(target.layers[index]), strict=True
        ):
            np.testing.assert_array_equal(mine, its)
    np.testing.assert_array_equal(found.norm, target.norm)
    features = np.random.default_rng(2).normal(size=(5, 2, 24)).astype(np.float32)
    np.testing.assert_allclose(features.reshape(5, 48) @ found.fc, features.mean(1), rtol=1e-5)
    assert found.head is drawn.head
    assert found.confidence is drawn.confidence


def test_layers_of_a_target_with_sliding_ones_to_start_from():
    """Those that are alike: the third and the sixth."""
    target_cfg = dataclasses.replace(
        TARGET,
        model_type="gemma4",
        num_layers=6,
        num_kv_heads=1,
        key_is_value=True,
        sliding=SlidingLayers((0, 1, 3, 4), 4, 2, 6, TARGET.rope),
    )
    settings = {"num_layers": 2, "block_size": 3, "mask_token_id": 5, "target_layer_ids": (0,)}
    cfg = DrafterConfig.for_target(target_cfg, **settings, markov_rank=4)
    target = random_like(dense.specs(target_cfg))
    drawn = random_like(dspark.specs(cfg))
    for given in (target, dense.stack_layers(target, target_cfg)):
        found = dspark.start_from_target(drawn, given, cfg)
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, drawn)
        for layer, index in zip(found.layers, (2, 5), strict=True):
            jax.tree.map(np.testing.assert_array_equal, layer, target.layers[index])


def test_a_target_without_norms_of_its_heads_to_start_from():
    """Llama: they are ones. In bfloat16 the masters are float32."""
    plain = dataclasses.replace(TARGET, model_type="llama")
    target = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_like(dense.specs(plain)))
    found = dspark.start_from_target(random_like(dspark.specs(CFG)), target, CFG)
    np.testing.assert_array_equal(found.layers[0].q_norm, np.ones(8))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
