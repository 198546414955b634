"""How many drafts of each row the target verifies.

`none`       nothing is drafted
`fixed`      every draft
`threshold`  the longest prefix in which every confidence reaches the threshold
`causal`     the drafts most likely to survive, for as long as one more raises tokens a second
             (paper, Algorithm 1)
`delayed`    the drafts most likely to survive, as many as a capacity has room for that was chosen
             from earlier rounds (`best_capacity`)

A row's anchor is always verified; what is scheduled is its drafts. Letters: R rows, K drafts,
M = R K candidates, B tokens of a pass, anchors included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from dspark_jax.config import InputError, require

Policy = Literal["none", "fixed", "threshold", "causal", "delayed"]


def schedule(
    confidence: jax.Array,
    sps: jax.Array | None = None,
    *,
    policy: Policy,
    active: jax.Array | None = None,
    threshold: float | None = None,
    capacity: jax.Array | int | None = None,
    capacities: Sequence[int] | None = None,
) -> jax.Array:
    """Verified lengths of one round.

    Lossless by construction: whether draft j of a row is verified never depends on draft j or on
    anything behind it, only on candidates that are at least as likely to survive.

    Args:
      confidence: c [R, K], probabilities that a draft is accepted when all before it are.
      sps: [>= R (1 + K) + 1] rounds a second by B, for `causal`; `sps[0]` is not used.
      policy: one of the above.
      active: [R] bool; other rows get 0 and take no part. Default: all.
      threshold: for `threshold`.
      capacity: for `delayed`, the most tokens of the pass.
      capacities: for `causal`, the ascending sizes of the executables that exist: what is left in
        the one that will run is filled with the next candidates, which costs nothing.
    Returns:
      [R] int32, 0..K.
    Raises:
      InputError: the policy lacks what it needs, or the table or the capacities are too short.
    """
    rows, size = confidence.shape
    if active is None:
        active = jnp.ones(rows, bool)
    match policy:
        case "none" | "fixed":
            lengths = jnp.full(rows, size if policy == "fixed" else 0, jnp.int32)
        case "threshold":
            if threshold is None:
                raise InputError("policy='threshold': expected a threshold")
            passes = confidence >= threshold
            lengths = jnp.cumprod(passes.astype(jnp.int32), axis=1).sum(axis=1)
        case "causal":
            if sps is None:
                raise InputError("policy='causal': expected a cost table")
            chances = jnp.where(active[:, None], survival(confidence), 0)
            gains = _descending(chances)
            anchors = active.sum(dtype=jnp.int32)
            admitted = _algorithm_1(gains, anchors, _checked(sps, rows, size))
            if capacities is not None:
                admitted = executable(anchors + admitted, capacities) - anchors
            lengths = _lengths(chances, gains, admitted)
        case "delayed":
            if capacity is None:
                raise InputError("policy='delayed': expected a capacity")
            chances = jnp.where(active[:, None], survival(confidence), 0)
            room = capacity - active.sum(dtype=jnp.int32)
            lengths = _lengths(chances, _descending(chances), room)
        case _:
            raise InputError(f"policy={policy!r}: expected one of {', '.join(get_args(Policy))}")
    return jnp.where(active, lengths, 0)


def survival(confidence: jax.Array) -> jax.Array:
    """Chances a_j = c_1 .. c_j [R, K] float32 that the first j drafts are all accepted.

    Multiplied from left to right, so that rounding never makes a later one the larger.
    """
    chance, chances = jnp.ones(confidence.shape[0]), []
    for k in range(confidence.shape[1]):
        chance = chance * confidence[:, k].astype(jnp.float32)
        chances.append(chance)
    return jnp.stack(chances, axis=1) if chances else jnp.zeros(confidence.shape)


def best_capacity(chances: jax.Array, sps: jax.Array, active: jax.Array) -> jax.Array:
    """Tokens B of a pass at which tokens a second are most, over all B: for a later round.

    Not for the round that `chances` are of: how many are admitted would then depend on drafts
    that are admitted (paper, section 4.2).

    Args:
      chances: survival [R, K], of earlier rounds.
      sps: as for `schedule`.
      active: [R] rows of the pass.
    Returns:
      The smallest such B, an int32 in active rows .. active rows * (1 + K).
    """
    sps = _checked(sps, *chances.shape)
    gains = _descending(jnp.where(active[:, None], chances, 0))
    anchors = active.sum(dtype=jnp.int32)
    tokens = anchors + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])
    places = anchors + jnp.arange(len(tokens), dtype=jnp.int32)
    possible = jnp.concatenate([jnp.ones(1, bool), gains > 0])
    return places[jnp.argmax(jnp.where(possible, tokens * sps[places], -1))]


def executable(tokens: jax.Array, capacities: Sequence[int]) -> jax.Array:
    """The smallest of the ascending `capacities` that holds `tokens`, or the largest of all."""
    sizes = jnp.array(capacities, jnp.int32)
    return sizes[jnp.minimum(jnp.searchsorted(sizes, tokens), len(capacities) - 1)]


def _descending(chances: jax.Array) -> jax.Array:
    """Chances of all candidates [M], the largest first."""
    return -jnp.sort(-chances.reshape(-1))


def _algorithm_1(gains: jax.Array, anchors: jax.Array, sps: jax.Array) -> jax.Array:
    """How many candidates are admitted: best first, each because it raises tokens a second."""
    tokens = anchors + jnp.cumsum(gains) - gains
    places = anchors + jnp.arange(len(gains), dtype=jnp.int32)
    now, then = sps[places], sps[places + 1]
    # (tokens + gain) * then > tokens * now, without the sum in which a small gain is lost.
    raises = (gains > 0) & (gains * then > tokens * (now - then))
    return jnp.cumprod(raises.astype(jnp.int32)).sum()


def _lengths(chances: jax.Array, gains: jax.Array, count: jax.Array) -> jax.Array:
    """Lengths [R] when the `count` best candidates are admitted; one of no chance never is.

    Chances never rise along a row, so that the best of all are always a prefix of each row. Ties
    are broken by row and then position: no candidate behind another is asked. A sort of values and
    a comparison do that, for less than a sort of indices.
    """
    if not len(gains):
        return jnp.zeros(len(chances), jnp.int32)
    flat = chances.reshape(-1)
    least = gains[jnp.clip(count - 1, 0, len(gains) - 1)]
    above, ties = flat > least, flat == least
    room = count - above.sum(dtype=jnp.int32)
    admitted = above | (ties & (jnp.cumsum(ties, dtype=jnp.int32) <= room))
    admitted &= (flat > 0) & (count > 0)
    return admitted.reshape(chances.shape).sum(axis=1, dtype=jnp.int32)


def _checked(sps: jax.Array, rows: int, size: int) -> jax.Array:
    most = rows * (1 + size)
    require(
        len(sps) > most,
        f"a cost table of up to {len(sps) - 1} tokens: expected {most}, {rows} rows of {1 + size}",
    )
    return jnp.asarray(sps, jnp.float32)
