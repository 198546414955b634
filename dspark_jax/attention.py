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


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Each position attends to itself and what is before: q [B,S,G,M,H], k, v [B,S,G,H]."""
    length = q.shape[1]
    scores = jnp.einsum("btgmh,bsgh->bgmts", q, k, preferred_element_type=_wide(q))
    visible = jnp.arange(length)[:, None] >= jnp.arange(length)
    weights = _softmax(scores * q.shape[-1] ** -0.5, visible).astype(v.dtype)
    return jnp.einsum("bgmts,bsgh->btgmh", weights, v)


def cached_attention(q: jax.Array, cache: KVCache, limit: jax.Array) -> jax.Array:
    """Query t of row r attends to cache positions below limit[r, t].

    Args:
      q: [R, T, G, M, H].
      cache: the keys and values, those of the queries themselves included.
      limit: [R, T] number of visible positions, at least 1.
    Returns:
      [R, T, G, M, H].
    """
    r, t, g, m, h = q.shape
    q = q.transpose(0, 2, 3, 1, 4).reshape(r, g, m * t, h)
    scores = jnp.einsum("rgqh,rgsh->rgqs", q, cache.k, preferred_element_type=_wide(q))
    visible = jnp.arange(cache.length) < jnp.tile(limit, (1, m))[:, None, :, None]
    scores = jnp.where(visible, scores * h**-0.5, -jnp.inf)
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
) -> jax.Array:
    """Blocks attend to the context before their anchor and to their own slots (paper, section 3).

    The two parts are joined in one softmax over [S + K] scores: no block ever has a row for the
    slots of another.

    Args:
      q: [B, A, K, G, M, H].
      context: k, v [B, S, G, H] of the target features.
      block: k, v [B, A, K, G, H] of the slots.
      anchors: [B, A] positions; a block sees context positions below its anchor.
    Returns:
      [B, A, K, G, M, H].
    """
    scale = q.shape[-1] ** -0.5
    wide = _wide(q)
    outer = jnp.einsum("baigmh,bsgh->bagmis", q, context[0], preferred_element_type=wide) * scale
    inner = jnp.einsum("baigmh,bajgh->bagmij", q, block[0], preferred_element_type=wide) * scale
    before = jnp.arange(context[0].shape[1]) < anchors[:, :, None]
    outer = jnp.where(before[:, :, None, None, None], outer, -jnp.inf)
    # A shift that is the same for both parts; the inner part always has finite scores.
    peak = jnp.maximum(outer.max(-1, keepdims=True), inner.max(-1, keepdims=True))
    peak = jax.lax.stop_gradient(peak)
    outer, inner = jnp.exp(outer - peak), jnp.exp(inner - peak)
    total = outer.sum(-1) + inner.sum(-1)
    out = jnp.einsum("bagmis,bsgh->baigmh", outer.astype(q.dtype), context[1])
    out = out + jnp.einsum("bagmij,bajgh->baigmh", inner.astype(q.dtype), block[1])
    return (out / total.transpose(0, 1, 4, 2, 3)[..., None]).astype(q.dtype)
