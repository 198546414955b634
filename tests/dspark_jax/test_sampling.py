"""Warping, sampling, noise and block drafting against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gammaincc

from dspark_jax.config import HEADS
from dspark_jax.drafters.dspark import draft_block
from dspark_jax.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    Sampling,
    round_noise,
    sample,
    warp,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def settings(*rows):
    """`Sampling` of rows (temperature, top_k, top_p, min_p)."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return Sampling(
        jnp.array(temperature, jnp.float32),
        jnp.array(top_k, jnp.int32),
        jnp.array(top_p, jnp.float32),
        jnp.array(min_p, jnp.float32),
    )


def warp_reference(logits, temperature, top_k, top_p, min_p):
    """One row by sorting, in float64."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if 0 < top_k < len(probs):
        probs[probs < np.sort(probs)[-top_k]] = 0
        probs /= probs.sum()
    if top_p < 1:
        falling = np.sort(probs)[::-1]
        smallest_set = np.argmax(np.cumsum(falling) >= top_p)
        probs[probs < falling[smallest_set]] = 0
        probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


ROWS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.7, 4, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (0.0, 3, 0.5, 0.2),
    (1.0, 0, 1.0, 0.15),
    (0.7, 8, 0.9, 0.05),
    (1.2, 1, 1.0, 0.0),
    (1.0, 100, 0.01, 1.0),
]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_warp_is_the_sorting_reference_row_by_row(ties, jit):
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(len(ROWS), 3, 40)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    run = jax.jit(warp) if jit else warp
    probs = np.asarray(run(logits, settings(*ROWS)))
    pairs = zip(logits, ROWS, strict=True)
    expected = np.array([[warp_reference(x, *row) for x in xs] for xs, row in pairs])
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, rtol=2e-5, atol=1e-7)


jit_warp = jax.jit(warp, static_argnames="truncate")


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ((1, 2, 1, 0), [4, 3, 0, 0]),
        ((1, 0, 0.65, 0), [4, 3, 0, 0]),
        ((1, 0, 0.75, 0), [4, 3, 2, 0]),
        ((1, 0, 0.3, 0), [4, 0, 0, 0]),
        ((1, 0, 1, 0.6), [4, 3, 0, 0]),
        ((1, 2, 0.5, 0), [4, 0, 0, 0]),  # 4/7 of what top-k left
        ((1, 3, 0.95, 0.6), [4, 3, 0, 0]),
    ],
)
def test_warp_by_hand(row, kept):
    probs = jit_warp(jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]])), settings(row))
    np.testing.assert_allclose(probs[0], np.array(kept) / sum(kept), rtol=1e-5)


def test_top_k_keeps_equals_together():
    probs = jit_warp(jnp.array([[2.0, 1.0, 1.0, 1.0, 0.0]]), settings((1, 2, 1, 0)))
    np.testing.assert_array_equal(probs[0] > 0, [True, True, True, True, False])


def test_without_truncation_the_search_can_be_left_out():
    logits = np.random.default_rng(1).normal(size=(2, 30)).astype(np.float32)
    rows = settings((0.8, 0, 1, 0), (0, 0, 1, 0))
    without = jit_warp(logits, rows, truncate=False)
    np.testing.assert_allclose(without, jit_warp(logits, rows), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_greedy_rows_are_one_hot_and_nothing_is_nan(dtype):
    logits = jnp.array([[-jnp.inf, 3.0, 60.0, 60.0], [1e30, -1e30, 0.0, 5.0]], dtype)
    for truncate in (False, True):
        rows = settings((0, 0, 1, 0), (0, 2, 0.5, 0.5))
        probs = jit_warp(logits, rows, truncate=truncate)
        assert probs.dtype == jnp.float32
        np.testing.assert_array_equal(probs, [[0, 0, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-37, 2e-38])
def test_tiny_temperatures_do_not_overflow(temperature):
    logits = jnp.array([[50.0, 20.0, 60.0]])
    for truncate in (False, True):
        probs = jit_warp(logits, settings((temperature, 0, 1, 0)), truncate=truncate)
        np.testing.assert_array_equal(probs, [[0, 0, 1]])


def invert(weights, noise):
    """First token at which the running sum passes the point, in float64."""
    sums = np.cumsum(weights, dtype=np.float64)
    return np.searchsorted(sums, np.float64(noise) * sums[-1], side="right")


@pytest.mark.parametrize("vocab", [1, 2, 5, 16, 50])
def test_sample_inverts_the_sum_exactly(vocab):
    """Whole weights whose sum is a power of 2: every boundary is a float."""
    rng = np.random.default_rng(vocab)
    total = 256
    weights = rng.integers(0, 5, vocab) * rng.integers(0, 2, vocab)
    weights[rng.integers(vocab)] += total - weights.sum()
    edges = np.arange(total, dtype=np.float32) / total
    noise = np.concatenate([edges, np.nextafter(edges, 1), np.nextafter(edges[1:], 0), [BELOW_ONE]])
    tiled = np.broadcast_to(np.float32(weights), (len(noise), vocab))
    tokens = np.asarray(jax.jit(sample)(tiled, noise))
    np.testing.assert_array_equal(tokens, [invert(weights, u) for u in noise])
    assert set(tokens) == set(np.flatnonzero(weights))


@pytest.mark.parametrize("vocab", [5, 16, 100, 1000])
def test_zero_weights_are_never_drawn(vocab):
    """Noise at and beside the boundaries, where the rounding of sums could let one slip in."""
    rng = np.random.default_rng(0)
    rows = np.arange(4000)
    weights = rng.random((len(rows), vocab)).astype(np.float32)
    weights[rng.random(weights.shape) < 0.6] = 0
    weights[:, vocab // 2] = 0.1
    sums = np.cumsum(weights, axis=1)
    edge = np.minimum(sums[rows, rng.integers(0, vocab, len(rows))] / sums[:, -1], BELOW_ONE)
    run = jax.jit(sample)
    beside = (np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(2)))
    for noise in (np.zeros_like(edge), np.full_like(edge, BELOW_ONE), edge, *beside):
        tokens = np.asarray(run(weights, np.minimum(noise, BELOW_ONE)))
        assert (weights[rows, tokens] > 0).all()


def test_sampled_frequencies():
    rng = np.random.default_rng(3)
    weights = np.where(rng.random(50) < 0.3, 0, rng.random(50)).astype(np.float32)
    noise = jax.random.uniform(jax.random.key(0), (100_000,))
    tokens = jax.jit(sample)(jnp.broadcast_to(weights, (len(noise), 50)), noise)
    counts = np.bincount(tokens, minlength=50)
    expected = len(noise) * weights / weights.sum()
    assert counts[weights == 0].sum() == 0
    some = expected > 0
    statistic = ((counts[some] - expected[some]) ** 2 / expected[some]).sum()
    assert gammaincc((some.sum() - 1) / 2, statistic / 2) > 1e-3


def test_round_noise_of_a_slot_does_not_depend_on_how_many_there_are():
    keys, positions = jax.random.split(jax.random.key(0), 5), jnp.arange(5)
    run = jax.jit(round_noise, static_argnums=2)
    wide = run(keys, positions, 7)
    assert wide.shape == (3, 5, 7)
    for slots in (1, 4):
        np.testing.assert_array_equal(run(keys, positions, slots), wide[:, :, :slots])


def test_round_noise_is_fresh_for_each_key_position_purpose_and_slot():
    assert sorted((DRAFT, ACCEPT, RESIDUAL)) == [0, 1, 2]
    keys = jax.random.split(jax.random.key(0), 8)
    run = jax.jit(jax.vmap(lambda position: round_noise(keys, jnp.full(8, position), 7)))
    noise = np.asarray(run(jnp.arange(100)))  # [positions, purposes, rows, slots]
    assert ((noise >= 0) & (noise < 1)).all()
    # Of n floats on a grid of 2^-23 about n^2 / 2^24 pairs agree by chance.
    repeats = noise.size - len(np.unique(noise))
    assert repeats < 5 + 2 * noise.size**2 / 2**24
    for axis in range(4):
        size = noise.shape[axis] - 1
        first, second = np.take(noise, range(size), axis), np.take(noise, range(1, size + 1), axis)
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


def test_round_noise_of_a_row_does_not_depend_on_its_neighbours():
    keys, positions = jax.random.split(jax.random.key(1), 4), jnp.array([3, 9, 9, 50])
    run = jax.jit(round_noise, static_argnums=2)
    together = run(keys, positions, 4)
    for row in range(4):
        alone = run(keys[row : row + 1], positions[row : row + 1], 4)
        np.testing.assert_array_equal(alone[:, 0], together[:, row])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def draft_loop(kind, params, logits, hidden, anchor, choose):
    """One row, slot by slot; `choose(k, scores)` gives the token. Returns tokens and scores."""
    head = None if params.head is None else jax.tree.map(np.float64, params.head)
    rank = 0 if head is None else head.w1.shape[1]
    state, previous, tokens, all_scores = np.zeros(rank), anchor, [], []
    for k, (scores, h) in enumerate(zip(np.float64(logits), np.float64(hidden), strict=True)):
        match kind:
            case "vanilla":
                scores = scores + head.w1[previous] @ head.w2
            case "gated":
                token = head.w1[previous]
                gate = sigmoid(np.concatenate([h, token]) @ head.gate + head.gate_bias)
                scores = scores + (gate * token) @ head.w2
            case "rnn":
                joint = np.concatenate([state, head.w1[previous], h]) @ head.joint
                gate, candidate, out = np.split(joint + head.joint_bias, 3)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
                scores = scores + np.tanh(out) @ head.w2
        previous = choose(k, scores)
        tokens.append(previous)
        all_scores.append(scores)
    return tokens, np.array(all_scores)


BLOCK_ROWS = [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.5, 6, 0.9, 0.05)] * 4


@pytest.fixture(scope="module", params=HEADS)
def block(request, tiny_pair):
    """(kind, drafter, U, h, anchor, noise) of 16 rows and 5 slots."""
    rng = np.random.default_rng(5)
    rows = len(BLOCK_ROWS)
    return (
        request.param,
        tiny_pair(request.param).drafter,
        rng.normal(size=(rows, 5, 32)).astype(np.float32),
        rng.normal(size=(rows, 5, 16)).astype(np.float32),
        rng.integers(0, 32, rows).astype(np.int32),
        rng.random((rows, 5)).astype(np.float32),
    )


jit_draft_block = jax.jit(draft_block)


@pytest.mark.parametrize("run", [jit_draft_block, draft_block], ids=["jit", "no jit"])
def test_drafted_blocks_are_those_of_a_loop(block, run):
    kind, params, logits, hidden, anchor, noise = block
    draft = run(params, logits, hidden, anchor, settings(*BLOCK_ROWS), noise)
    assert draft.tokens.dtype == jnp.int32
    assert draft.probs.dtype == jnp.float32
    for r, row in enumerate(BLOCK_ROWS):

        def choose(k, scores, r=r, row=row):
            return invert(warp_reference(scores, *row), noise[r, k])

        tokens, scores = draft_loop(kind, params, logits[r], hidden[r], anchor[r], choose)
        np.testing.assert_array_equal(draft.tokens[r], tokens)
        expected = [warp_reference(s, *row) for s in scores]
        np.testing.assert_allclose(draft.probs[r], expected, rtol=1e-4, atol=1e-6)


def test_greedy_blocks_are_those_of_a_loop(block):
    kind, params, logits, hidden, anchor, noise = block
    draft = jit_draft_block(params, logits, hidden, anchor)
    assert draft.probs is None
    for r in range(len(anchor)):
        tokens, _ = draft_loop(
            kind, params, logits[r], hidden[r], anchor[r], lambda k, scores: np.argmax(scores)
        )
        np.testing.assert_array_equal(draft.tokens[r], tokens)
    rows = settings(*[(0, 0, 1, 0)] * len(anchor))
    sampled = jit_draft_block(params, logits, hidden, anchor, rows, noise)
    np.testing.assert_array_equal(sampled.tokens, draft.tokens)


def test_confidence_reads_the_token_before_each_slot(block):
    _, params, logits, hidden, anchor, noise = block
    draft = jit_draft_block(params, logits, hidden, anchor, settings(*BLOCK_ROWS), noise)
    weight = np.float64(params.confidence.weight)
    inputs = hidden
    if params.head is not None:
        previous = np.concatenate([anchor[:, None], draft.tokens[:, :-1]], axis=1)
        inputs = np.concatenate([hidden, np.asarray(params.head.w1)[previous]], axis=-1)
    expected = inputs @ weight + np.float64(params.confidence.bias)
    np.testing.assert_allclose(draft.confidence_logits, expected, rtol=1e-4, atol=1e-5)


def test_probs_are_what_was_sampled_from_to_the_bit(tiny_pair):
    """Sampling again from the returned array, with the same noise, gives the same tokens."""
    params, rng, rows = tiny_pair("rnn").drafter, np.random.default_rng(6), 400
    logits = jnp.asarray(rng.normal(size=(rows, 4, 32)), jnp.bfloat16)
    hidden = jnp.asarray(rng.normal(size=(rows, 4, 16)), jnp.float32)
    noise = jnp.asarray(rng.random((rows, 4)), jnp.float32)
    row = settings(*[(0.9, 12, 0.95, 0.02), (1.3, 0, 1.0, 0.0)] * (rows // 2))
    draft = jit_draft_block(params, logits, hidden, jnp.zeros(rows, jnp.int32), row, noise)
    assert draft.probs.dtype == jnp.float32
    np.testing.assert_allclose(draft.probs.sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(sample(draft.probs, noise), draft.tokens)
    # Noise at the edge of the drawn token's interval would find any other array out.
    drawn = draft.tokens[..., None]
    below = jnp.where(jnp.arange(32) < drawn, draft.probs, 0).sum(-1)
    at = jnp.take_along_axis(draft.probs, drawn, axis=-1)[..., 0]
    assert ((below - 1e-6 <= noise) & (noise <= below + at + 1e-6)).all()


def test_a_block_without_confidence_head_has_no_confidences(tiny_pair):
    params = tiny_pair("vanilla").drafter.replace(confidence=None)
    draft = draft_block(params, jnp.zeros((1, 3, 32)), jnp.zeros((1, 3, 16)), jnp.zeros(1, int))
    assert draft.confidence_logits is None
