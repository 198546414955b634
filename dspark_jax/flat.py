"""The flat buffer of one target pass: the tokens of all rows, one after the other.

Dense layers, LM head and sampling run on C flat tokens, whatever the rows' lengths; attention and
the caches need to know which row a token is of, and ask `to_rows` and `to_flat`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class FlatTokens:
    """Tokens of R rows in a buffer of capacity C; row r holds slots 0 .. counts[r]-1.

    When the capacity is R * T every row has its T places and changing shape costs nothing;
    otherwise the rows lie close together and what is left at the end belongs to no row.
    """

    tokens: jax.Array  # [C]
    row: jax.Array  # [C]
    slot: jax.Array  # [C]
    offset: jax.Array  # [R] flat index of each row's slot 0
    counts: jax.Array  # [R] tokens of each row
    start: jax.Array  # [R] position of each row's slot 0
    width: int = struct.field(pytree_node=False)  # T, the most tokens a row can have

    @property
    def positions(self) -> jax.Array:
        """[C] position of each token in its row."""
        return self.start[self.row] + self.slot

    @property
    def row_positions(self) -> jax.Array:
        """[R, T] positions of all slots, those past a row's count included."""
        return self.start[:, None] + jnp.arange(self.width)

    @property
    def _aligned(self) -> bool:
        return self.tokens.shape[0] == self.start.shape[0] * self.width

    def to_rows(self, x: jax.Array) -> jax.Array:
        """x [C, ...] as [R, T, ...]; slots past a row's count hold anything finite."""
        if self._aligned:
            return x.reshape(self.start.shape[0], self.width, *x.shape[1:])
        index = self.offset[:, None] + jnp.arange(self.width)
        return x[jnp.minimum(index, x.shape[0] - 1)]

    def to_flat(self, x: jax.Array) -> jax.Array:
        """x [R, T, ...] as [C, ...]."""
        if self._aligned:
            return x.reshape(-1, *x.shape[2:])
        return x[self.row, self.slot]


def pack(tokens: jax.Array, counts: jax.Array, start: jax.Array, capacity: int) -> FlatTokens:
    """Packs the first counts[r] tokens of each row of `tokens` [R, T] into `capacity` places.

    The caller keeps sum(counts) <= capacity; `start` [R] is the position of each row's slot 0.
    """
    rows, width = tokens.shape
    places = jnp.arange(capacity, dtype=jnp.int32)
    if capacity == rows * width:
        offset = jnp.arange(rows, dtype=jnp.int32) * width
        row, slot = places // width, places % width
        flat = tokens.reshape(-1)
    else:
        ends = jnp.cumsum(counts)
        offset = ends - counts
        row = jnp.minimum((places[:, None] >= ends).sum(-1), rows - 1)
        slot = jnp.minimum(places - offset[row], width - 1)
        flat = tokens[row, slot]
    return FlatTokens(flat, row, slot, offset, counts, start, width)
