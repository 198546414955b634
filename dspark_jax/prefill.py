"""Prompts into caches: of all rows of a new batch, or of one newcomer beside a running batch.

A prompt is read a chunk of positions at a time, so that one executable serves every length and
memory is that of a chunk. A newcomer is read in a cache of its own while the others go on; `seat`
then copies it into its row.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import plans, rounds, verify
from dspark_jax.drafters.kinds import Memory
from dspark_jax.flat import pack
from dspark_jax.kv_cache import KVCache
from dspark_jax.rounds import Seen
from dspark_jax.sampling import Draft, Sampling
from dspark_jax.state import (
    Backlog,
    DecodeConfig,
    DecodeState,
    Models,
    create_backlog,
    create_caches,
    pinned,
)
from dspark_jax.targets import dense


@struct.dataclass
class Reading:
    """N prompts of which some chunks have been read."""

    target_cache: tuple[KVCache, ...]
    draft_cache: Memory
    last: jax.Array  # [N, D] final hidden state of each last token, once it has been read
    backlog: Backlog | None = None


@struct.dataclass
class First:
    """What the prefill emits: the first token of each row."""

    token: jax.Array  # [N]
    logprob: jax.Array | None  # [N] float32


def create_reading(models: Models, rows: int, length: int, *, lazy: bool = False) -> Reading:
    """Nothing read yet, with caches of `length` positions; `lazy` as for `state.create_state`."""
    embed = models.target.embed
    target_cache, draft_cache = create_caches(models, rows, length)
    reading = Reading(
        target_cache=target_cache,
        draft_cache=draft_cache,
        last=jnp.zeros((rows, embed.shape[1]), embed.dtype),
        backlog=create_backlog(models, rows, length) if lazy else None,
    )
    return pinned(models, reading)


@functools.partial(jax.jit, static_argnames=("cfg", "chunk"), donate_argnames="state")
def prefill(
    models: Models,
    state: DecodeState,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    cfg: DecodeConfig,
    chunk: int,
) -> tuple[DecodeState, First]:
    """Reads the prompts of all rows and emits the first token of each.

    Args:
      tokens: [R, P] prompts, padded on the right with anything; P a multiple of `chunk`, at most
        the length of the caches.
      lengths: [R] their lengths, at least 1.
      chunk: positions that are read at a time.
    """
    last = jnp.zeros((tokens.shape[0], models.target.embed.shape[1]), models.target.embed.dtype)
    reading = Reading(state.target_cache, state.draft_cache, last, state.backlog)
    reading = _read(models, reading, tokens, lengths, 0, _chunks(lengths, chunk), chunk)
    return _emit_first(models, state, reading, lengths, cfg)


@functools.partial(jax.jit, static_argnames="chunk", donate_argnames="reading")
def read(
    models: Models,
    reading: Reading,
    tokens: jax.Array,
    lengths: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    chunk: int,
) -> Reading:
    """Reads chunks start .. stop - 1 of the prompts; arguments as for `prefill`."""
    return _read(models, reading, tokens, lengths, start, stop, chunk)


@functools.partial(jax.jit, donate_argnames="reading")
def catch_up(models: Models, reading: Reading, lengths: jax.Array) -> Reading:
    """The drafter takes in prompts that have been read, before rows of them draft."""
    constants = rounds.make_constants(models, reading.target_cache)
    cache, backlog = rounds.take_backlog(
        models, constants, reading.draft_cache, reading.backlog, lengths
    )
    return pinned(models, dataclasses.replace(reading, draft_cache=cache, backlog=backlog))


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def seat(
    models: Models,
    state: DecodeState,
    reading: Reading,
    row: jax.Array,
    lengths: jax.Array,
    sampling: Sampling,
    key: jax.Array,
    limit: jax.Array,
    scale: jax.Array | None = None,
    *,
    cfg: DecodeConfig,
) -> tuple[DecodeState, First]:
    """Puts a prompt that has been read in a row, whatever was there, and emits its first token.

    `reading` stays as it is: several rows may go on from the same prompt, each with its own key.

    Args:
      reading: of one prompt, all read. A lazy drafter without caches in it has yet to take it in.
      row: where to.
      lengths: [1] its length.
      sampling, key, limit, scale: [1], [1], [1], [1, K] as for `state.create_state`.
    """
    newcomer = DecodeState(
        anchor=jnp.zeros(1, jnp.int32),
        position=jnp.zeros(1, jnp.int32),
        remaining=limit,
        active=jnp.ones(1, bool),
        sampling=sampling,
        key=key,
        target_cache=reading.target_cache,
        draft_cache=reading.draft_cache,
        scale=scale,
        backlog=reading.backlog,
    )
    newcomer, first = _emit_first(models, newcomer, reading, lengths, cfg)
    backlog = newcomer.backlog
    if backlog is not None and reading.draft_cache == ():
        backlog = dataclasses.replace(backlog, taken=jnp.zeros_like(backlog.taken))
        newcomer = dataclasses.replace(newcomer, backlog=backlog)

    def put(rows, one):
        return jax.lax.dynamic_update_slice_in_dim(rows, one, row, axis=0)

    outlook = state.outlook
    state = jax.tree.map(put, dataclasses.replace(state, outlook=None), newcomer)
    if outlook is not None:
        outlook = plans.forget_rows(outlook, jnp.arange(len(state.anchor)) == row)
    return pinned(models, dataclasses.replace(state, outlook=outlook)), first


def _chunks(lengths: jax.Array, chunk: int) -> jax.Array:
    return (lengths.max() + chunk - 1) // chunk


def _read(models: Models, reading: Reading, tokens, lengths, start, stop, chunk: int) -> Reading:
    rows = tokens.shape[0]
    constants = rounds.make_constants(models, reading.target_cache)
    if reading.backlog is not None:
        taken = jnp.where(start == 0, 0, reading.backlog.taken)
        reading = dataclasses.replace(
            reading, backlog=dataclasses.replace(reading.backlog, taken=taken)
        )

    def one_chunk(i, reading: Reading) -> Reading:
        begin = jnp.full(rows, i * chunk, jnp.int32)
        piece = jax.lax.dynamic_slice(tokens, (0, i * chunk), (rows, chunk))
        counts = jnp.clip(lengths - begin, 0, chunk)
        flat = pack(piece, counts, begin, rows * chunk)
        hidden, target_cache = rounds.target_pass(models, constants, flat, reading.target_cache)
        draft_cache, backlog = reading.draft_cache, reading.backlog
        seen = Seen(flat, hidden.seen)
        if backlog is None:
            draft_cache = rounds.append_context(
                models, constants, seen, begin + counts, draft_cache
            )
        else:
            backlog = rounds.put_off(backlog, seen)
        place = lengths - 1 - begin
        ends = (place >= 0) & (place < chunk)
        final = flat.to_rows(hidden.final)[jnp.arange(rows), jnp.clip(place, 0, chunk - 1)]
        last = jnp.where(ends[:, None], final, reading.last)
        return Reading(target_cache, draft_cache, last, backlog)

    return pinned(models, jax.lax.fori_loop(start, stop, one_chunk, reading))


def _emit_first(
    models: Models, state: DecodeState, reading: Reading, lengths: jax.Array, cfg: DecodeConfig
) -> tuple[DecodeState, First]:
    """The state behind prompts that have been read: their first tokens are the anchors."""
    rows = len(lengths)
    flat = pack(state.anchor[:, None], jnp.ones(rows, jnp.int32), lengths - 1, rows)
    nothing = Draft(jnp.zeros((rows, 0), jnp.int32), None, None)
    logits = dense.logits(models.target, reading.last)
    token = rounds.judge(models, logits, flat, nothing, state, cfg).token
    remaining = state.remaining - 1
    state = dataclasses.replace(
        state,
        anchor=token,
        position=lengths.astype(jnp.int32),
        remaining=remaining,
        active=state.active & (remaining > 0) & ~rounds.is_stop(token, cfg),
        target_cache=reading.target_cache,
        draft_cache=reading.draft_cache,
        backlog=reading.backlog,
    )
    logprob = verify.logprobs(logits, token, jnp.arange(rows)) if cfg.logprobs else None
    return pinned(models, state), First(token, logprob)
