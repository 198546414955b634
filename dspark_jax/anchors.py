"""Anchors: where in a sequence blocks are drafted during training, and what their slots predict.

Letters: B batch, S sequence, A anchors of a row, K slots of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.segments import document_positions, document_starts


def sample_anchors(
    key: jax.Array,
    loss_mask: jax.Array,
    num_anchors: int,
    segments: jax.Array | None = None,
    *,
    documents: int = 1,
    least: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Draws anchors uniformly, without replacement, from each document (paper, section 3).

    A position a can be one when a and a + 1 are both in the loss mask of one document, so that at
    least slot 1 has something to learn. What a row lacks is made up by dummies at position 0, which
    come last.

    Args:
      key: typed key.
      loss_mask: [B, S].
      num_anchors: of each document at most; may exceed S.
      segments: [B, S] documents of the rows; None: a row is one.
      documents: of a row, that there is room for all anchors of; more share the room evenly.
      least: positions between the start of a document and its first anchor.
    Returns:
      (positions [B, A] int32, valid [B, A] bool, False for dummies), A = num_anchors * documents.
    """
    batch, length = loss_mask.shape
    inside = loss_mask.astype(bool)
    if segments is None:
        segments = jnp.zeros((batch, length), jnp.int32)
    next_inside = inside[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    possible = inside & jnp.pad(next_inside, ((0, 0), (0, 1)))
    if least:
        possible = possible & (document_positions(length, segments) >= least)
    scores = jnp.where(possible, jax.random.uniform(key, (batch, length)), -1.0)
    # Sorted by document, then by score: a document stays where it is, and the places in it are
    # the ranks of its scores.
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    starts = document_starts(segments)
    _, scores, places = jax.lax.sort((starts, -scores, places), num_keys=2)
    ranks = document_positions(length, segments)
    drawn = jnp.where((scores <= 0) & (ranks < num_anchors), length - ranks, 0)
    count = num_anchors * documents
    best, order = jax.lax.top_k(drawn, min(count, length))
    missing = ((0, 0), (0, count - best.shape[1]))
    valid = jnp.pad(best, missing) > 0
    positions = jnp.pad(jnp.take_along_axis(places, order, axis=1), missing)
    return jnp.where(valid, positions, 0), valid


@struct.dataclass
class Slots:
    """What the slots of the anchored blocks predict; slot k of anchor a predicts token a + k."""

    labels: jax.Array  # [B, A, K] tokens a+1 .. a+K, clipped to the row
    previous: jax.Array  # [B, A, K] tokens a .. a+K-1: x_0 .. x_{K-1}
    counted: jax.Array  # [B, A, K] bool: a prefix of the slots of valid anchors


def slot_labels(
    tokens: jax.Array,
    loss_mask: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    block_size: int,
    segments: jax.Array | None = None,
) -> Slots:
    """Labels of the slots of all blocks.

    Slot k counts while a+1 .. a+k all lie inside the anchor's document and the loss mask.

    Args:
      tokens, loss_mask: [B, S].
      positions, valid: [B, A] from `sample_anchors`.
      block_size: K.
      segments: [B, S] documents of the rows; None: a row is one.
    """
    batch, length = tokens.shape
    index = positions[..., None] + jnp.arange(block_size + 1)
    clipped = jnp.minimum(index, length - 1).reshape(batch, -1)

    def near(row: jax.Array) -> jax.Array:
        return jnp.take_along_axis(row, clipped, axis=1).reshape(index.shape)

    predicted = (near(loss_mask.astype(bool)) & (index < length))[..., 1:] & valid[..., None]
    if segments is not None:
        around = near(segments)
        predicted = predicted & (around[..., 1:] == around[..., :1])
    counted = jnp.cumprod(predicted.astype(jnp.int32), axis=-1).astype(bool)
    text = near(tokens)
    return Slots(labels=text[..., 1:], previous=text[..., :-1], counted=counted)
