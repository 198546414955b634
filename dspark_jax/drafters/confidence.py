"""Confidence head: how likely the target is to accept slot k, given that it accepted those before.

    c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b)                         (paper, section 3.3)

It never sees x_k itself: a decision on a token may not depend on the token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import DraftingConfig
from dspark_jax.drafters.heads import Markov
from dspark_jax.params import spec


@struct.dataclass
class Confidence:
    """Weights on the hidden state and, where configured, on the embedding of the token before."""

    weight: jax.Array  # [D + r], or [D]
    bias: jax.Array  # []


def specs(cfg: DraftingConfig) -> Confidence | None:
    """Parameter specs, None when the drafter has no confidence head."""
    if not cfg.confidence_head:
        return None
    return Confidence(
        weight=spec((cfg.confidence_width,), (None,)),
        bias=spec((), (), jax.nn.initializers.zeros),
    )


def logits(
    params: Confidence, head: Markov | None, hidden: jax.Array, previous: jax.Array
) -> jax.Array:
    """Confidence logits [..., K] in float32 of `hidden` [..., K, D] and tokens before [..., K]."""
    width = hidden.shape[-1]
    z = hidden @ params.weight[:width]
    if head is not None and params.weight.shape[0] > width:
        # Projected before it is looked up: the gather fetches one number a token, not r.
        z = z + (head.w1 @ params.weight[width:])[previous]
    return (z + params.bias).astype(jnp.promote_types(z.dtype, jnp.float32))
