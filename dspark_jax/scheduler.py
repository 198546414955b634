"""How many drafts of each row the target verifies.

`none`       nothing is drafted
`fixed`      every draft
`threshold`  the longest prefix in which every confidence reaches the threshold
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from dspark_jax.config import InputError

Policy = Literal["none", "fixed", "threshold"]


def schedule(
    confidence: jax.Array,
    *,
    policy: Policy,
    active: jax.Array | None = None,
    threshold: float | None = None,
) -> jax.Array:
    """Verified lengths [R] from confidences c_k [R, K] in [0, 1]; rows not `active` get 0."""
    rows, size = confidence.shape
    if policy == "threshold":
        if threshold is None:
            raise InputError("policy='threshold': expected a threshold")
        passes = confidence >= threshold
        lengths = jnp.cumprod(passes.astype(jnp.int32), axis=1).sum(axis=1)
    else:
        lengths = jnp.full(rows, size if policy == "fixed" else 0, jnp.int32)
    return lengths if active is None else jnp.where(active, lengths, 0)
