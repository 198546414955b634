"""Lossless verification: accept a prefix of the draft, then one token of the target's own.

Draft token x_k is accepted with probability min(1, p_t(x_k) / p_d(x_k)), left to right; at the
first rejection the new token is drawn from max(p_t - p_d, 0), and when all verified drafts are
accepted from p_t behind them. What comes out has the target's distribution exactly, whatever the
drafter proposes (Leviathan et al. 2023; Chen et al. 2023).

Letters: R rows, K drafts, C flat tokens, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.flat import FlatTokens
from dspark_jax.layers import argmax
from dspark_jax.sampling import ACCEPT, RESIDUAL, Draft, Sampling, sample, warp


@struct.dataclass
class Verdict:
    """What a target pass decided about each row's draft."""

    accepted: jax.Array  # [R] accepted drafts, at most the row's verified length
    token: jax.Array  # [R] the target's token behind them: correction or bonus


def accepts(p: jax.Array, q: jax.Array, u: jax.Array) -> jax.Array:
    """u < min(1, p / q) without the division, for u in [0, 1): a token with p = 0 never passes."""
    return u * q < p


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """Weights [..., V] of the token after a rejection; all of p where rounding leaves nothing."""
    rest = jnp.maximum(p - q, 0)
    return jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p)


def verify_greedy(logits: jax.Array, flat: FlatTokens, draft: Draft) -> Verdict:
    """All rows greedy: a draft is accepted when it is the target's argmax; logits [C, V]."""
    best = argmax(logits)
    index, verified = _draft_places(flat, draft)
    accepted = _leading((draft.tokens == best[index]) & verified)
    return Verdict(accepted, best[flat.offset + accepted])


def verify_sampled(
    logits: jax.Array,
    flat: FlatTokens,
    draft: Draft,
    sampling: Sampling,
    noise: jax.Array,
    *,
    truncate: bool = True,
) -> Verdict:
    """Rejection sampling of drafts with `draft.probs`; rows at temperature 0 compare.

    Args:
      logits: [C, V] of the flat tokens.
      flat: which row and slot each is of; slot j judges draft j + 1.
      draft: tokens and the distributions they were drawn from.
      sampling: settings of the rows.
      noise: [3, R, >= max(K, 1)] from `round_noise`.
    """
    of_token = jax.tree.map(lambda x: x[flat.row], sampling)
    p = warp(logits, of_token, truncate=truncate)
    index, verified = _draft_places(flat, draft)
    size = draft.tokens.shape[1]
    p_x = p[index, draft.tokens]
    q = draft.probs
    if q is None:
        q = jnp.zeros((len(flat.offset), 0, p.shape[-1]), p.dtype)
    q_x = jnp.take_along_axis(q, draft.tokens[..., None], axis=-1)[..., 0]
    accepted = _leading(accepts(p_x, q_x, noise[ACCEPT, :, :size]) & verified)
    # Only the distribution at the first rejected place is needed; behind the last draft q is 0.
    p_next = p[flat.offset + accepted]
    rejected = accepted < flat.counts - 1
    if size:
        q_next = jnp.take_along_axis(q, jnp.minimum(accepted, size - 1)[:, None, None], axis=1)
        p_next = jnp.where(rejected[:, None], residual(p_next, q_next[:, 0]), p_next)
    return Verdict(accepted, sample(p_next, noise[RESIDUAL, :, 0]))


def logprobs(logits: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Natural logarithms of the target's probabilities of tokens, before any warping; float32.

    Args:
      logits: [C, V].
      tokens: [...].
      places: [...] which of the C distributions each token is of.
    """
    logits = logits.astype(jnp.float32)
    return logits[places, tokens] - jax.nn.logsumexp(logits, axis=-1)[places]


def _draft_places(flat: FlatTokens, draft: Draft) -> tuple[jax.Array, jax.Array]:
    """Flat index [R, K] of the token that judges each draft, and whether it was sent at all."""
    slots = jnp.arange(draft.tokens.shape[1])
    index = jnp.minimum(flat.offset[:, None] + slots, len(flat.tokens) - 1)
    return index, slots < flat.counts[:, None] - 1


def _leading(flags: jax.Array) -> jax.Array:
    """How many flags [R, K] hold before the first that does not."""
    return jnp.cumprod(flags.astype(jnp.int32), axis=1).sum(axis=1)
