"""The shape that a batch is compiled for: one that holds every request, and what it takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from dspark_jax import prefill
from dspark_jax.request import Request
from dspark_jax.state import Models, cache_length, places

FEW_TOKENS = 128
"""A pass over fewer spends much of its time on reading the weights."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The shape that everything is compiled for."""

    rows: int
    length: int
    """Cache positions a row."""
    chunk: int
    """Prompt positions that one step of the prefill reads."""

    @property
    def prompt_length(self) -> int:
        return self.length // self.chunk * self.chunk


def plan(models: Models, requests: Sequence[Request], slots: int) -> BatchShape:
    """The smallest shape that holds every request: cache lengths in steps of 16 positions.

    The longest prompt takes up to four steps of the prefill, so that short ones take fewer; a step
    of few rows is longer.
    """
    prompt = max(len(r.token_ids) for r in requests)
    longest = 1 << (prompt - 1).bit_length()
    block = models.drafter_config.block_size if models.drafter_config else 0
    most = max(cache_length(len(r.token_ids), r.max_new_tokens, block) for r in requests)
    chunk = min(256, max(16, longest // 4, min(longest, FEW_TOKENS // slots)))
    length = max(-(-most // 16) * 16, -(-prompt // chunk) * chunk)
    return BatchShape(rows=slots, length=length, chunk=chunk)


def bytes_per_row(models: Models, shape: BatchShape, *, lazy: bool) -> int:
    """Memory on a device of a row's caches, which is nearly all that a row takes.

    Args:
      lazy: as `state.is_lazy` says.
    """
    one = jax.eval_shape(
        functools.partial(prefill.create_reading, models, 1, shape.length, lazy=lazy)
    )
    if models.mesh is not None:
        local = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(place.shard_shape(x.shape), x.dtype),
            one,
            places(models.mesh, one),
        )
    else:
        local = one
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(local))
