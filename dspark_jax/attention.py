"""Attention in its three uses: whole sequences, cached rows, and anchor blocks in training.

Letters: B batch or R rows, S context positions, T queries, A anchors, K slots, G key/value heads,
M query heads a key/value head, H head size. Scores and softmax are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.kv_cache import KVCache


def _softmax(scores: jax.Array, visible: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)


def _wide(x: jax.Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def _scale(given: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if given is None else given


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Each position attends to itself and what is before: q [B,S,G,M,H], k, v [B,S,G,H].

    With `segments` [B, S] only what is before in its own document; see `segments`. Scores are
    multiplied by `scale`, H^-1/2 by default; of a `window` it sees the last positions, itself
    included.
    """
    b, s, g, m, h = q.shape
    q = q.transpose(0, 2, 3, 1, 4).reshape(b, g, m * s, h)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = jnp.einsum("bgqh,bgsh->bgqs", q, k, preferred_element_type=_wide(q))
    places = jnp.arange(s)
    visible = jnp.tile(places, m)[:, None] >= places
    if window is not None:
        visible = visible & (jnp.tile(places, m)[:, None] - places < window)
    if segments is not None:
        own = segments[:, :, None] == segments[:, None, :]
        visible = visible & jnp.tile(own, (1, m, 1))[:, None]
    weights = _softmax(scores * _scale(scale, h), visible).astype(v.dtype)
    out = jnp.einsum("bgqs,bgsh->bgqh", weights, v)
    return out.reshape(b, g, m, s, h).transpose(0, 3, 1, 2, 4)


def cached_attention(
    q: jax.Array,
    cache: KVCache,
    limit: jax.Array,
    *,
    first: int = 0,
    scale: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Query t of row r attends to cache positions first .. limit[r, t] - 1.

    Args:
      q: [R, T, G, M, H].
      cache: the keys and values, those of the queries themselves included.
      limit: [R, T] where the visible positions end, above `first`.
      first: where they begin.
      scale: what scores are multiplied with; default: H^-1/2.
      window: how many positions before the limit are visible; None: all.
    Returns:
      [R, T, G, M, H].
    """
    r, t, g, m, h = q.shape
    q = q.transpose(0, 2, 3, 1, 4).reshape(r, g, m * t, h)
    scores = jnp.einsum("rgqh,rgsh->rgqs", q, cache.k, preferred_element_type=_wide(q))
    places, limit = jnp.arange(cache.length), jnp.tile(limit, (1, m))[:, None, :, None]
    visible = places < limit
    if first:
        visible = visible & (places >= first)
    if window is not None:
        visible = visible & (places >= limit - window)
    scores = jnp.where(visible, scores * _scale(scale, h), -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    # Divided after the product: H numbers a query, where the weights are S.
    out = jnp.einsum("rgqs,rgsh->rgqh", weights.astype(cache.v.dtype), cache.v)
    out = (out / weights.sum(-1, keepdims=True)).astype(cache.v.dtype)
    return out.reshape(r, g, m, t, h).transpose(0, 3, 1, 2, 4)


def anchor_attention(
    q: jax.Array,
    context: tuple[jax.Array, jax.Array],
    block: tuple[jax.Array, jax.Array],
    anchors: jax.Array,
    first: jax.Array | None = None,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Blocks attend to the context before their anchor and to their own slots (paper, section 3).

    The two parts are joined in one softmax over [S + K] scores: no block ever has a row for the
    slots of another.

    Args:
      q: [B, A, K, G, M, H].
      context: k, v [B, S, G, H] of the target features.
      block: k, v [B, A, K, G, H] of the slots.
      anchors: [B, A] positions; a block sees context positions below its anchor.
      first: [B, A] the first context position that a block sees, where its document begins; None:
        the first of all.
      scale: what scores are multiplied with; default: H^-1/2.
    Returns:
      [B, A, K, G, M, H].
    """
    # Scores keep one order, [B, G, A, M K, ..], from product to product: they are the largest
    # arrays, and every other order costs a copy of them.
    b, a, n, g, m, h = q.shape
    scale, wide = _scale(scale, h), _wide(q)
    q = q.transpose(0, 3, 1, 4, 2, 5).reshape(b, g, a, m * n, h)
    k, v = (x.swapaxes(1, 2) for x in context)
    own_k, own_v = (x.transpose(0, 3, 1, 2, 4) for x in block)
    outer = jnp.einsum("bgaqh,bgsh->bgaqs", q, k, preferred_element_type=wide) * scale
    inner = jnp.einsum("bgaqh,bgajh->bgaqj", q, own_k, preferred_element_type=wide) * scale
    places = jnp.arange(k.shape[2])
    before = places < anchors[:, :, None]
    if first is not None:
        before = before & (places >= first[:, :, None])
    outer = jnp.where(before[:, None, :, None], outer, -jnp.inf)
    # A shift that is the same for both parts; the inner part always has finite scores.
    peak = jnp.maximum(outer.max(-1, keepdims=True), inner.max(-1, keepdims=True))
    peak = jax.lax.stop_gradient(peak)
    outer, inner = jnp.exp(outer - peak), jnp.exp(inner - peak)
    total = outer.sum(-1, keepdims=True) + inner.sum(-1, keepdims=True)
    out = jnp.einsum("bgaqs,bgsh->bgaqh", outer.astype(q.dtype), v)
    out = out + jnp.einsum("bgaqj,bgajh->bgaqh", inner.astype(q.dtype), own_v)
    out = (out / total).astype(q.dtype).reshape(b, g, a, m, n, h)
    return out.transpose(0, 2, 4, 1, 3, 5)
