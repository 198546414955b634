"""From logits to tokens: warping and sampling, of drafts and of the target's own tokens.

A row is warped in the same way wherever it is sampled or verified, so that the distribution a token
was drawn from is exactly the array that acceptance later divides by. Letters: R rows, K slots,
V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.layers import argmax


@struct.dataclass
class Sampling:
    """How each row is sampled; greedy rows have temperature 0 and ignore the rest."""

    temperature: jax.Array  # [R] float32, 0 = greedy
    top_k: jax.Array  # [R] int32, 0 = off
    top_p: jax.Array  # [R] float32, 1 = off
    min_p: jax.Array  # [R] float32, 0 = off


def warp(logits: jax.Array, sampling: Sampling, *, truncate: bool = True) -> jax.Array:
    """Probabilities that a row samples from: temperature, then top-k, top-p and min-p.

    Every truncation keeps the tokens at or above a threshold, so equal probabilities stay or go
    together. Greedy rows get the one-hot of their argmax: nothing is divided by 0, and rejection
    sampling against it is comparison.

    Args:
      logits: [R, ..., V].
      sampling: settings of the R rows.
      truncate: False promises that no row truncates, and saves the search for thresholds.
    Returns:
      [R, ..., V] float32 (float64 of float64 logits), summing to 1.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    rows = jax.tree.map(
        lambda x: x.reshape(-1, *[1] * (logits.ndim - 1)).astype(
            logits.dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        ),
        sampling,
    )
    greedy = rows.temperature == 0
    # Shifted before the division: a tiny temperature must not make inf - inf.
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(shifted / jnp.where(greedy, 1, rows.temperature))
    probs = weights / weights.sum(axis=-1, keepdims=True)
    if truncate:
        probs = _truncate(probs, rows)
    one_hot = argmax(logits)[..., None] == jnp.arange(logits.shape[-1])
    return jnp.where(greedy, one_hot.astype(probs.dtype), probs)


def _truncate(probs: jax.Array, rows: Sampling) -> jax.Array:
    def keep(probs, holds):
        # The best token always stays: top_p may be so small that nothing is enough for it.
        least = jnp.minimum(_largest_threshold(probs, holds), probs.max(-1, keepdims=True))
        probs = jnp.where(probs >= least, probs, 0)
        return probs / probs.sum(-1, keepdims=True)

    top_k = jnp.where(rows.top_k > 0, rows.top_k, probs.shape[-1])
    probs = keep(probs, lambda kept: kept.sum(-1, keepdims=True) >= top_k)
    mass = lambda kept: jnp.where(kept, probs, 0).sum(-1, keepdims=True)  # noqa: E731
    probs = keep(probs, lambda kept: (mass(kept) >= rows.top_p) & (rows.top_p < 1))
    probs = jnp.where(probs >= rows.min_p * probs.max(-1, keepdims=True), probs, 0)
    return probs / probs.sum(-1, keepdims=True)


def _largest_threshold(probs: jax.Array, holds) -> jax.Array:
    """Largest float32 t for which `holds(probs >= t)`, given that it holds for all smaller ones.

    Non-negative floats are ordered like their bits: 31 halvings find t exactly, in plain
    reductions, where a sort of the vocabulary would be the slowest part of a round. Where nothing
    holds t is 0, which keeps everything.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        ok = holds(probs >= jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    low = jnp.zeros((*probs.shape[:-1], 1), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def sample(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """Tokens [...] drawn in proportion to `weights` [..., V] by inversion of their sum.

    One uniform number in [0, 1) a draw, where Gumbel noise takes V. The sum is inverted in two
    levels, blocks and then one block, about sqrt(V) numbers each. A weight of 0 is never drawn.
    """
    vocab = weights.shape[-1]
    size = int(vocab**0.5)
    blocks = -(-vocab // size)
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, blocks * size - vocab)])
    padded = padded.reshape(*weights.shape[:-1], blocks, size)
    totals = padded.sum(-1)
    point = noise * totals.sum(-1)
    block, point = _invert(totals, point)
    inside = jnp.take_along_axis(padded, block[..., None, None], axis=-2)[..., 0, :]
    token, _ = _invert(inside, point)
    return block * size + token


def _invert(weights: jax.Array, point: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index at which the running sum passes `point`, and what of the point is left there.

    Sums are rounded, and not in the same order everywhere: they may rise at a weight of 0, or stay
    below the point to the end. So only weights above 0 can be found, the last one when none is.
    """
    sums = jnp.cumsum(weights, axis=-1)
    indices = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(weights > 0, indices, 0), axis=-1, keepdims=True)
    found = (sums > point[..., None]) & (weights > 0)
    index = jnp.min(jnp.where(found, indices, last), axis=-1)
    before = jnp.where(indices < index[..., None], weights, 0).sum(-1)
    return index, point - before


DRAFT, ACCEPT, RESIDUAL = range(3)


def round_noise(key: jax.Array, position: jax.Array, slots: int) -> jax.Array:
    """Uniform numbers [3, R, slots] of one round: for DRAFT, ACCEPT and RESIDUAL.

    They depend on the row's key, the round's anchor position and the slot alone: an anchor position
    never comes twice, so a token that is drafted again meets fresh noise.
    """

    def row(key, position):
        return jax.random.uniform(jax.random.fold_in(key, position), (slots, 3))

    return jnp.moveaxis(jax.vmap(row)(key, position), -1, 0)


@struct.dataclass
class Draft:
    """A drafted block of each row."""

    tokens: jax.Array  # [R, K] int32
    probs: jax.Array | None  # [R, K, V] what each token was drawn from; None when all are greedy
    confidence_logits: jax.Array | None  # [R, K] float32; None without a confidence head


def choose(
    scores: jax.Array, sampling: Sampling | None, noise: jax.Array | None, *, truncate: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Tokens [R] and what they were drawn from [R, V]: no distribution where all are greedy.

    Args:
      scores: [R, V].
      sampling: settings of the rows; None: all are greedy.
      noise: [R] uniform, needed with `sampling`.
    """
    if sampling is None or noise is None:
        return argmax(scores), None
    probs = warp(scores, sampling, truncate=truncate)
    return sample(probs, noise), probs
