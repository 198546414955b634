"""The three uses of attention against one loop over queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.attention import anchor_attention, cached_attention, causal_attention
from dspark_jax.kv_cache import KVCache

G, M, H = 2, 3, 4


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32) * 2


def attend(q, k, v, scale=H**-0.5):
    """One query [G, M, H] over the keys and values [S, G, H] that it sees."""
    out = np.zeros_like(q)
    for g, m in np.ndindex(G, M):
        scores = np.array([q[g, m] @ k[s, g] for s in range(len(k))]) * scale
        weights = np.exp(scores - scores.max())
        out[g, m] = (weights / weights.sum()) @ v[:, g]
    return out


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_causal(rng, transform):
    q, k, v = normal(rng, 2, 6, G, M, H), normal(rng, 2, 6, G, H), normal(rng, 2, 6, G, H)
    found = transform(causal_attention)(q, k, v)
    for b, t in np.ndindex(2, 6):
        expected = attend(q[b, t], k[b, : t + 1], v[b, : t + 1])
        np.testing.assert_allclose(found[b, t], expected, atol=2e-6)


def test_causal_within_documents(rng):
    q, k, v = normal(rng, 2, 6, G, M, H), normal(rng, 2, 6, G, H), normal(rng, 2, 6, G, H)
    segments = np.array([[1, 1, 1, 2, 2, 0], [4, 3, 3, 3, 3, 3]])
    found = causal_attention(q, k, v, jnp.asarray(segments))
    for b, t in np.ndindex(2, 6):
        first = segments[b].tolist().index(segments[b, t])
        expected = attend(q[b, t], k[b, first : t + 1], v[b, first : t + 1])
        np.testing.assert_allclose(found[b, t], expected, atol=2e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_cached(rng, transform):
    q, k, v = normal(rng, 3, 2, G, M, H), normal(rng, 3, G, 9, H), normal(rng, 3, G, 9, H)
    limit = np.array([[1, 2], [9, 9], [5, 3]])
    found = transform(cached_attention)(q, KVCache(jnp.asarray(k), jnp.asarray(v)), limit)
    for r, t in np.ndindex(3, 2):
        seen = slice(limit[r, t])
        expected = attend(q[r, t], k[r, :, seen].swapaxes(0, 1), v[r, :, seen].swapaxes(0, 1))
        np.testing.assert_allclose(found[r, t], expected, atol=2e-6)


def test_cached_does_not_look_past_the_limit(rng):
    q, k, v = normal(rng, 2, 2, G, M, H), normal(rng, 2, G, 9, H), normal(rng, 2, G, 9, H)
    limit = np.array([[3, 4], [7, 1]])
    found = cached_attention(q, KVCache(jnp.asarray(k), jnp.asarray(v)), limit)
    k[0, :, 4:], v[0, :, 4:] = 1e6, -1e6
    k[1, :, 7:], v[1, :, 7:] = -1e6, 1e6
    again = cached_attention(q, KVCache(jnp.asarray(k), jnp.asarray(v)), limit)
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("window", [1, 3, 9])
def test_causal_within_a_window(rng, window):
    q, k, v = normal(rng, 2, 6, G, M, H), normal(rng, 2, 6, G, H), normal(rng, 2, 6, G, H)
    segments = np.array([[1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 3, 3]])
    found = causal_attention(q, k, v, jnp.asarray(segments), scale=0.3, window=window)
    for b, t in np.ndindex(2, 6):
        first = max(segments[b].tolist().index(segments[b, t]), t + 1 - window)
        expected = attend(q[b, t], k[b, first : t + 1], v[b, first : t + 1], 0.3)
        np.testing.assert_allclose(found[b, t], expected, atol=2e-6)


@pytest.mark.parametrize("window", [1, 3, 9])
def test_cached_within_a_window(rng, window):
    q, k, v = normal(rng, 3, 2, G, M, H), normal(rng, 3, G, 9, H), normal(rng, 3, G, 9, H)
    limit = np.array([[1, 2], [9, 9], [5, 3]])
    cache = KVCache(jnp.asarray(k), jnp.asarray(v))
    found = cached_attention(q, cache, limit, scale=0.3, window=window)
    for r, t in np.ndindex(3, 2):
        seen = slice(max(0, limit[r, t] - window), limit[r, t])
        expected = attend(q[r, t], k[r, :, seen].swapaxes(0, 1), v[r, :, seen].swapaxes(0, 1), 0.3)
        np.testing.assert_allclose(found[r, t], expected, atol=2e-6)


@pytest.fixture
def blocks(rng):
    """Two sequences of 7 positions, three blocks of 4 slots each; anchors may repeat."""
    a, s, slots = 3, 7, 4
    q = normal(rng, 2, a, slots, G, M, H)
    context = normal(rng, 2, s, G, H), normal(rng, 2, s, G, H)
    block = normal(rng, 2, a, slots, G, H), normal(rng, 2, a, slots, G, H)
    return q, context, block, np.array([[0, 3, 3], [6, 1, 2]])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_anchor(blocks, transform):
    q, context, block, anchors = blocks
    found = transform(anchor_attention)(q, context, block, anchors)
    for b, a, i in np.ndindex(*q.shape[:3]):
        before = anchors[b, a]
        k, v = (
            np.concatenate([c[b, :before], x[b, a]]) for c, x in zip(context, block, strict=True)
        )
        np.testing.assert_allclose(found[b, a, i], attend(q[b, a, i], k, v), atol=2e-6)


def test_anchor_sees_its_own_document(blocks):
    q, context, block, anchors = blocks
    first = np.array([[0, 3, 1], [6, 0, 1]])  # documents that begin before or at the anchor
    found = anchor_attention(q, context, block, anchors, first)
    for b, a, i in np.ndindex(*q.shape[:3]):
        seen = slice(first[b, a], anchors[b, a])
        k, v = (np.concatenate([c[b, seen], x[b, a]]) for c, x in zip(context, block, strict=True))
        np.testing.assert_allclose(found[b, a, i], attend(q[b, a, i], k, v), atol=2e-6)


def test_anchor_with_a_scale_of_its_own(blocks):
    q, context, block, anchors = blocks
    found = anchor_attention(q, context, block, anchors, scale=0.3)
    scaled = anchor_attention(q * 0.3 * H**0.5, context, block, anchors)
    np.testing.assert_allclose(found, scaled, atol=2e-6)


def test_anchor_sees_nothing_at_or_after_it_and_no_other_block(blocks):
    q, context, block, anchors = blocks
    found = anchor_attention(q, context, block, anchors)
    for b, a in np.ndindex(2, 3):
        others = np.arange(3) != a
        k, v = (x.copy() for x in context)
        k[b, anchors[b, a] :], v[b, anchors[b, a] :] = 1e5, -1e5
        block_k, block_v = (x.copy() for x in block)
        block_k[b, others], block_v[b, others] = 1e5, -1e5
        again = anchor_attention(q, (k, v), (block_k, block_v), anchors)
        np.testing.assert_array_equal(found[b, a], again[b, a])


def test_anchor_gradients_stay_before_the_anchor(blocks):
    q, context, block, anchors = blocks

    def one_block(context, block):
        return anchor_attention(q, context, block, anchors)[0, 1].sum()

    context_grads, block_grads = jax.jit(jax.grad(one_block, (0, 1)))(context, block)
    for grad in context_grads:
        assert np.abs(grad[0, :3]).min() > 0
        np.testing.assert_array_equal(grad[0, 3:], 0)
        np.testing.assert_array_equal(grad[1], 0)
    for grad in block_grads:
        assert np.abs(grad[0, 1]).min() > 0
        np.testing.assert_array_equal(grad[0, [0, 2]], 0)


def test_anchor_gradients_equal_those_of_one_plain_softmax(blocks):
    q, context, block, anchors = blocks

    def reference(q, context, block):
        """The dense form: every block beside the whole context, masked."""
        keys, values = (
            jnp.concatenate([jnp.broadcast_to(c[:, None], (2, 3, *c.shape[1:])), x], axis=2)
            for c, x in zip(context, block, strict=True)
        )
        scores = jnp.einsum("baigmh,basgh->bagmis", q, keys) * H**-0.5
        before = jnp.arange(7) < anchors[..., None]
        visible = jnp.concatenate([before, jnp.ones((2, 3, 4), bool)], axis=-1)
        scores = jnp.where(visible[:, :, None, None, None], scores, -jnp.inf)
        return jnp.einsum("bagmis,basgh->baigmh", jax.nn.softmax(scores), values)

    def grads(f):
        return jax.jit(jax.grad(lambda *x: jnp.sin(3 * f(*x)).sum(), (0, 1, 2)))

    with jax.enable_x64(True):  # in float32 some processors round by more than others
        arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (q, context, block))
        found = grads(lambda *x: anchor_attention(*x, anchors))(*arrays)
        expected = grads(reference)(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-13), found, expected)


def test_large_scores_stay_finite(blocks):
    q, context, block, anchors = blocks
    found = anchor_attention(q * 1e4, context, block, anchors)
    assert np.isfinite(found).all()


def test_bfloat16_in_and_out(blocks):
    q, context, block, anchors = jax.tree.map(lambda x: jnp.asarray(x), blocks)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, context, block))
    found = anchor_attention(*low, anchors)
    assert found.dtype == jnp.bfloat16
    exact = anchor_attention(q, context, block, anchors)
    np.testing.assert_allclose(found.astype(np.float32), exact, atol=0.2)
