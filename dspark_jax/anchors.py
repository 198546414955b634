"""Anchors: where in a sequence blocks are drafted during training, and what their slots predict.

Letters: B batch, S sequence, A anchors, K slots of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


def sample_anchors(
    key: jax.Array, loss_mask: jax.Array, num_anchors: int
) -> tuple[jax.Array, jax.Array]:
    """Draws anchors uniformly, without replacement, from each sequence (paper, section 3).

    A position a can be one when a and a + 1 are both in the loss mask, so that at least slot 1 has
    something to learn. What a sequence lacks is made up by dummies at position 0.

    Args:
      key: typed key.
      loss_mask: [B, S].
      num_anchors: A; may exceed S.
    Returns:
      (positions [B, A] int32, valid [B, A] bool, False for dummies).
    """
    batch, length = loss_mask.shape
    inside = loss_mask.astype(bool)
    possible = inside & jnp.pad(inside[:, 1:], ((0, 0), (0, 1)))
    scores = jnp.where(possible, jax.random.uniform(key, (batch, length)), -1.0)
    best, positions = jax.lax.top_k(scores, min(num_anchors, length))
    missing = ((0, 0), (0, num_anchors - best.shape[1]))
    valid = jnp.pad(best, missing, constant_values=-1.0) >= 0
    return jnp.where(valid, jnp.pad(positions, missing), 0).astype(jnp.int32), valid


@struct.dataclass
class Slots:
    """What the slots of the anchored blocks predict; slot k of anchor a predicts token a + k."""

    labels: jax.Array  # [B, A, K] tokens a+1 .. a+K, clipped to the sequence
    previous: jax.Array  # [B, A, K] tokens a .. a+K-1: x_0 .. x_{K-1}
    counted: jax.Array  # [B, A, K] bool: a prefix of the slots of valid anchors


def slot_labels(
    tokens: jax.Array,
    loss_mask: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    block_size: int,
) -> Slots:
    """Labels of the slots of all blocks.

    Slot k counts while a+1 .. a+k all lie inside the sequence and the loss mask.

    Args:
      tokens, loss_mask: [B, S].
      positions, valid: [B, A] from `sample_anchors`.
      block_size: K.
    """
    batch, length = tokens.shape
    index = positions[..., None] + jnp.arange(block_size + 1)
    clipped = jnp.minimum(index, length - 1).reshape(batch, -1)
    inside = jnp.take_along_axis(loss_mask.astype(bool), clipped, axis=1).reshape(index.shape)
    near = jnp.take_along_axis(tokens, clipped, axis=1).reshape(index.shape)
    predicted = (inside & (index < length))[..., 1:] & valid[..., None]
    counted = jnp.cumprod(predicted.astype(jnp.int32), axis=-1).astype(bool)
    return Slots(labels=near[..., 1:], previous=near[..., :-1], counted=counted)
