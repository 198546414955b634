"""Targets against the reference vectors; cached passes in every cut against whole sequences."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax import sharding
from dspark_jax.config import Rope, SlidingLayers, TargetConfig
from dspark_jax.flat import pack
from dspark_jax.io import hf
from dspark_jax.layers import argmax
from dspark_jax.targets import dense

QWEN3 = TargetConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    stop_token_ids=(1,),
)
LLAMA = dataclasses.replace(
    QWEN3, model_type="llama", tie_embeddings=True, rope=Rope(1e4, "llama3", 8.0, 1.0, 4.0, 16)
)
GEMMA4 = TargetConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=32,
    num_layers=6,
    num_heads=4,
    num_kv_heads=1,
    head_dim=12,
    rope=Rope(1e4, "proportional", rotated_part=0.5),
    model_type="gemma4",
    key_is_value=True,
    tie_embeddings=True,
    sliding=SlidingLayers((0, 1, 3, 4), 5, 2, 8, Rope(1e3)),
    logit_softcap=5.0,
)
GOLDEN = ["qwen3_target", "llama_target_tied", "llama_target_llama3rope", "gemma4_target"]


def table(cfg):
    return dense.make_angles(cfg, jnp.arange(512))


@functools.cache
def random_params(cfg):
    """Weights large enough for the layers to matter."""
    rng = np.random.default_rng(0)

    def draw(spec):
        return jnp.float32(rng.normal(size=spec.shape) * 0.2 + (len(spec.shape) < 2))

    params = jax.tree.map(draw, dense.specs(cfg))
    if not cfg.gemma:
        return params
    # Nothing scales its scores: the norms of queries do, or attention would be to one position.
    layers = tuple(layer.replace(q_norm=layer.q_norm / 4) for layer in params.layers)
    return params.replace(layers=layers)


@functools.cache
def load(golden, name):
    folder = golden / name
    return (
        *hf.load_target(folder),
        load_file(folder / "expected.safetensors"),
        json.loads((folder / "expected.json").read_text()),
    )


def close(found, expected, tolerance=2e-4):
    """Absolute plus relative to the largest value of the tensor."""
    bound = tolerance * (1 + np.abs(expected).max())
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_hidden_states_and_logits(golden, name):
    cfg, params, expected, _ = load(golden, name)
    taps = tuple(range(-1, cfg.num_layers - 1))

    @jax.jit
    def forward(params, tokens):
        hidden = dense.forward(params, tokens, cfg=cfg, taps=taps)
        return hidden, dense.logits(params, hidden.final)

    hidden, logits = forward(params, expected["input_ids"])
    states = np.split(np.asarray(hidden.features), len(taps), axis=-1)
    for tap, state in zip(taps, states, strict=True):
        close(state, expected[f"hf_hidden_states.{tap + 1}"])
    close(hidden.final, expected[f"hf_hidden_states.{cfg.num_layers}"])
    close(logits, expected["logits"])


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_greedy_continuation(golden, name):
    cfg, params, _, expected = load(golden, name)
    prompt, continuation = expected["prompt"], expected["greedy_continuation"]

    @functools.partial(jax.jit, donate_argnums=1)
    def step(tokens, cache, start):
        flat = pack(tokens, jnp.full(1, tokens.shape[1]), start, tokens.shape[1])
        hidden, cache = dense.extend(params, flat, cache, table(cfg), cfg=cfg)
        return argmax(dense.logits(params, hidden.final[-1:])), cache

    cache = dense.create_cache(cfg, 1, len(prompt) + len(continuation), jnp.float32)
    token, cache = step(jnp.array([prompt]), cache, jnp.array([0]))
    found = [int(token[0])]
    for position in range(len(prompt), len(prompt) + len(continuation) - 1):
        token, cache = step(token[:, None], cache, jnp.array([position]))
        found.append(int(token[0]))
    assert found == continuation


@pytest.mark.parametrize(
    ("cfg", "taps"),
    [(QWEN3, ()), (QWEN3, (2, -1, 0)), (LLAMA, (0,)), (LLAMA, (-1, 1)), (GEMMA4, (4, -1, 0))],
)
def test_stacked_layers_give_what_the_tuple_gives(cfg, taps):
    params = random_params(cfg)
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, (2, 9))
    forward = jax.jit(functools.partial(dense.forward, cfg=cfg, taps=taps))
    expected = forward(params, tokens)
    found = forward(dense.stack_layers(params, cfg), tokens)
    close(found.final, expected.final, 1e-5)
    if taps:
        close(found.features, expected.features, 1e-5)
        assert found.features.shape[-1] == len(taps) * cfg.hidden_size
    else:
        assert found.features is None
        assert expected.features is None


def test_a_tied_head_and_one_of_its_own():
    tied, own = random_params(LLAMA), dense.untie(random_params(LLAMA))
    hidden = jnp.float32(np.random.default_rng(1).normal(size=(3, LLAMA.hidden_size)))
    assert tied.lm_head is None
    np.testing.assert_array_equal(own.lm_head, tied.embed.T)
    close(dense.logits(own, hidden), dense.logits(tied, hidden), 1e-6)
    untied = random_params(QWEN3)
    assert dense.untie(untied) is untied


def test_taps_come_in_the_order_asked_for():
    params = random_params(QWEN3)
    tokens = jnp.arange(6)[None]

    def features(taps):
        return dense.forward(params, tokens, cfg=QWEN3, taps=taps).features

    both = features((2, 0))
    np.testing.assert_array_equal(both, jnp.concatenate([features((2,)), features((0,))], -1))
    np.testing.assert_array_equal(features((-1,))[0], params.embed[:6])


def test_forward_is_causal():
    params = random_params(QWEN3)
    tokens = jnp.arange(9)[None] * 5
    forward = jax.jit(functools.partial(dense.forward, cfg=QWEN3))
    changed = forward(params, tokens.at[0, 5].add(1)).final
    same = forward(params, tokens).final
    np.testing.assert_array_equal(changed[:, :5], same[:, :5])
    assert np.abs(changed[:, 5:] - same[:, 5:]).min(axis=-1).max() > 0


class Rows:
    """Cached rows that are extended by hand, recording the hidden state at each position."""

    def __init__(self, cfg, rows, length):
        self.cfg, self.params = cfg, random_params(cfg)
        self.cache = dense.create_cache(cfg, rows, length, jnp.float32)
        self.start = np.zeros(rows, int)
        self.final = np.full((rows, length, cfg.hidden_size), np.nan, np.float32)
        self.features = np.full((rows, length, 2 * cfg.hidden_size), np.nan, np.float32)

    def extend(self, tokens, counts, capacity):
        """Adds tokens [R, T], the first counts[r] of each row."""
        flat = pack(jnp.asarray(tokens), jnp.asarray(counts), jnp.asarray(self.start), capacity)
        hidden, self.cache = extend(self.params, flat, self.cache, table(self.cfg), cfg=self.cfg)
        offset = np.asarray(flat.offset)
        for r, count in enumerate(counts):
            places = slice(offset[r], offset[r] + count)
            positions = slice(self.start[r], self.start[r] + count)
            self.final[r, positions] = hidden.final[places]
            self.features[r, positions] = hidden.features[places]
        self.start = self.start + np.asarray(counts)

    def check(self, sequences):
        """Each row holds what a whole pass over its sequence gives."""
        whole = forward(self.params, jnp.asarray(sequences), cfg=self.cfg)
        for r, length in enumerate(self.start):
            close(self.final[r, :length], np.asarray(whole.final[r, :length]), 1e-5)
            close(self.features[r, :length], np.asarray(whole.features[r, :length]), 1e-5)


extend = jax.jit(functools.partial(dense.extend, taps=(0, 2)), static_argnames="cfg")
forward = jax.jit(functools.partial(dense.forward, taps=(0, 2)), static_argnames="cfg")


@pytest.fixture
def sequences():
    return np.random.default_rng(0).integers(0, 50, (3, 24))


@pytest.mark.parametrize("cfg", [QWEN3, LLAMA, GEMMA4], ids=["qwen3", "llama", "gemma4"])
def test_prefill_in_chunks_then_single_tokens(cfg, sequences):
    rows = Rows(cfg, 3, 24)
    for start in (0, 7, 14):
        rows.extend(sequences[:, start : start + 7], [7, 7, 7], 21)
    for position in (21, 22, 23):
        rows.extend(sequences[:, position : position + 1], [1, 1, 1], 3)
    rows.check(sequences)


@pytest.mark.parametrize("cfg", [QWEN3, GEMMA4], ids=["qwen3", "gemma4"])
@pytest.mark.parametrize("capacity", [12, 9], ids=["aligned", "close-packed"])
def test_ragged_rows(sequences, capacity, cfg):
    rows = Rows(cfg, 3, 28)
    for counts in ([4, 1, 2], [1, 4, 4], [0, 2, 4], [3, 3, 3], [4, 0, 1], [2, 4, 0]):
        window = [sequences[r, s : s + 4] for r, s in enumerate(rows.start)]
        rows.extend(np.stack(window), counts, capacity)
    assert rows.start.tolist() == [14, 14, 14]
    rows.check(sequences)


@pytest.mark.parametrize("cfg", [QWEN3, GEMMA4], ids=["qwen3", "gemma4"])
@pytest.mark.parametrize("capacity", [12, 9], ids=["aligned", "close-packed"])
def test_roll_back(sequences, capacity, cfg):
    rows = Rows(cfg, 3, 28)
    rows.extend(sequences[:, :4], [2, 4, 3], capacity)
    for accepted in ([1, 3, 2], [3, 1, 1], [2, 2, 2]):
        before = rows.start.copy()
        window = np.stack([sequences[r, s : s + 4] for r, s in enumerate(before)])
        for r, kept in enumerate(accepted):
            window[r, kept:] = (window[r, kept:] + 7) % 50  # drafted, and rejected
        rows.extend(window, [3, 3, 3], capacity)
        rows.start = before + accepted
    rows.extend(np.stack([sequences[r, s : s + 4] for r, s in enumerate(rows.start)]), [1] * 3, 9)
    rows.check(sequences)


def test_a_row_does_not_depend_on_its_neighbours(sequences):
    together, alone = Rows(QWEN3, 3, 28), Rows(QWEN3, 1, 28)
    for counts in ([4, 1, 2], [1, 4, 4], [3, 2, 4]):
        windows = [sequences[r, s : s + 4] for r, s in enumerate(together.start)]
        alone.extend(windows[1][None], [counts[1]], 4)
        together.extend(np.stack(windows), counts, 9)
    close(alone.final[0, :7], together.final[1, :7], 1e-5)


def test_logits_of_tied_embeddings():
    params, hidden = random_params(LLAMA), jnp.linspace(-1, 1, 72).reshape(3, 24)
    assert params.lm_head is None
    expected = np.asarray(hidden) @ np.asarray(params.embed).T
    close(dense.logits(params, hidden), expected, 1e-5)


def test_sliding_layers_see_their_window():
    """Four of them, of 5 positions each: 4 * 4 positions back, and no farther."""
    near = dataclasses.replace(GEMMA4.sliding, layers=(0, 1, 2, 3))
    cfg = dataclasses.replace(GEMMA4, num_layers=4, sliding=near)
    params, tokens = random_params(cfg), jnp.arange(24)[None]
    forward = jax.jit(functools.partial(dense.forward, cfg=cfg))
    changed, same = (forward(params, t).final for t in (tokens.at[0, 3].add(7), tokens))
    differs = np.abs(np.asarray(changed - same)[0]).max(-1) > 0
    np.testing.assert_array_equal(differs, [3 <= t <= 3 + 16 for t in range(24)])


def test_gemma4_by_hand_around_its_layers():
    """Scaled embeddings, a scalar at the end of each layer, logits within the soft-cap."""
    params, tokens = random_params(GEMMA4), jnp.arange(6)[None]
    layers = tuple(layer.replace(scalar=jnp.float32(0)) for layer in params.layers)
    forward = jax.jit(functools.partial(dense.forward, cfg=GEMMA4, taps=(-1, 0, 4)))
    features = np.asarray(forward(params.replace(layers=layers), tokens).features)
    np.testing.assert_allclose(features[0, :, :24], params.embed[:6] * 24**0.5, rtol=1e-6)
    np.testing.assert_array_equal(features[..., 24:], 0)
    hidden = jnp.linspace(-9, 9, 48).reshape(2, 24)
    plain = np.asarray(hidden) @ np.asarray(params.embed).T
    assert np.abs(plain).max() > 10
    close(dense.logits(params, hidden), 5 * np.tanh(plain / 5), 1e-5)


def test_caches_have_the_shapes_of_their_layers():
    shapes = [c.k.shape for c in dense.create_cache(GEMMA4, 3, 7, jnp.float32)]
    sliding, full = (3, 2, 7, 8), (3, 1, 7, 12)
    assert shapes == [sliding, sliding, full, sliding, sliding, full]


def test_split_over_devices():
    """Heads of sliding layers are split; the one head of the others is whole on both devices."""
    mesh = sharding.make_mesh(2, fsdp=1, tensor_parallel=2)
    params = random_params(GEMMA4)
    places = sharding.parameters(dense.specs(GEMMA4), mesh, sharding.DECODING)
    split = jax.device_put(params, places)
    whole = [layer.qkv.sharding.is_fully_replicated for layer in split.layers]
    assert whole == [False, False, True, False, False, True]
    tokens = jnp.arange(22).reshape(2, 11)
    close(
        jax.device_get(forward(split, tokens, cfg=GEMMA4).final),
        np.asarray(forward(params, tokens, cfg=GEMMA4).final),
        1e-5,
    )


def test_layers_are_stacked_by_their_place_in_the_period():
    params = random_params(GEMMA4)
    stacked = dense.stack_layers(params, GEMMA4)
    assert [layer.qkv.shape for layer in stacked.layers.period] == [
        (2, 24, 2, 4, 8), (2, 24, 2, 4, 8), (2, 24, 1, 5, 12),
    ]  # fmt: skip
    specs = dense.specs(GEMMA4, stacked=True)
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(lambda s: s.shape, specs)
    again = dense.unstack_layers(stacked)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_extend_writes_its_caches_in_place():
    params, length = random_params(QWEN3), 512
    cache = dense.create_cache(QWEN3, 2, length, jnp.float32)
    flat = pack(jnp.zeros((2, 1), int), jnp.array([1, 1]), jnp.array([0, 5]), 2)
    step = jax.jit(functools.partial(dense.extend, cfg=QWEN3), donate_argnums=2)
    memory = step.lower(params, flat, cache, table(QWEN3)).compile().memory_analysis()
    size = sum(a.nbytes for a in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / QWEN3.num_layers
