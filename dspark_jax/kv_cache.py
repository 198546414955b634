"""Key/value caches: one pair of arrays a layer, written in place, rolled back by forgetting.

A row's rows of a cache become visible only in the pass that writes them: attention is told how far
each query may look. Rejected tokens therefore need no clean-up; what they left behind is
overwritten before anything may look at it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class KVCache:
    """Keys (after norm and RoPE) and values of one layer: R rows, G heads, S positions."""

    k: jax.Array  # [R, G, S, H]
    v: jax.Array  # [R, G, S, H]

    @property
    def length(self) -> int:
        return self.k.shape[2]


def create(num_layers: int, shape: tuple[int, int, int, int], dtype) -> tuple[KVCache, ...]:
    """Empty caches of `num_layers` layers; `shape` is (R, G, S, H)."""
    return tuple(
        KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )


def append(cache: KVCache, k: jax.Array, v: jax.Array, start: jax.Array) -> KVCache:
    """Writes k, v [R, T, G, H] to positions start[r] .. start[r]+T-1 of each row.

    The caller keeps start + T <= S. Each row and head is one update of a window: nothing else
    moves. Rows alone would do, but XLA turns an update of a single row into one that it duplicates
    for the attention behind it, and copies the whole cache for that.
    """

    def update(buffer, new, start):  # [S, H], [T, H], []
        return jax.lax.dynamic_update_slice(buffer, new, (start, 0))

    def write(buffer, new):
        new = new.swapaxes(1, 2).astype(buffer.dtype)
        starts = jnp.broadcast_to(start[:, None], buffer.shape[:2])
        return jax.vmap(jax.vmap(update))(buffer, new, starts)

    return KVCache(write(cache.k, k), write(cache.v, v))
