"""Decoding: prefill, then rounds of draft -> schedule -> verify -> commit, on the device.

The state of all rows is one donated pytree; a call of `decode_rounds` runs many rounds in a device
loop whose carry holds the KV caches, which are written in place, and returns a log of what each
round did. Rows are of different length and finish on their own; a finished row idles.

Letters: R rows, K drafts a round, T rounds of a call, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import sampling as sampling_
from dspark_jax import scheduler, verify
from dspark_jax.config import DrafterConfig, TargetConfig, TransformerConfig, require
from dspark_jax.drafters import dspark
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.flat import pack
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import RopeAngles, rope_angles
from dspark_jax.sampling import Draft, Sampling, round_noise
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target


@struct.dataclass
class Models:
    """The target and its drafter (None for plain decoding)."""

    target: Target
    drafter: Drafter | None
    target_config: TargetConfig = struct.field(pytree_node=False)
    drafter_config: DrafterConfig | None = struct.field(pytree_node=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter_config.target_layer_ids if self.drafter_config else ()


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What is compiled in: each value of it is its own executable."""

    policy: scheduler.Policy = "fixed"
    threshold: float | None = None
    """Least confidence of a draft that is verified, for the policy `threshold`."""
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    """All rows have temperature 0: no distribution is ever made."""
    truncate: bool = True
    """Some row may use top-k, top-p or min-p."""
    trace: bool = False
    """Log confidences."""

    def check(self, models: Models) -> None:
        """Raises `InputError` when the models cannot be decoded like this."""
        drafter = models.drafter_config
        require(
            self.policy in ("none", "fixed", "threshold"),
            f"policy {self.policy!r}: decoding knows 'none', 'fixed' and 'threshold'",
        )
        require(
            self.policy == "none" or drafter is not None,
            f"policy {self.policy!r} needs a drafter; without one the policy is 'none'",
        )
        if self.policy == "threshold":
            require(
                drafter is not None and drafter.confidence_head,
                "policy 'threshold' needs a drafter with a confidence head",
            )
            require(
                self.threshold is not None and 0 <= self.threshold <= 1,
                f"confidence threshold {self.threshold}: expected a number in 0..1",
            )


@struct.dataclass
class DecodeState:
    """All rows between two rounds. The anchor is emitted, and in no cache yet."""

    anchor: jax.Array  # [R] last token of each row
    position: jax.Array  # [R] its position, and how many positions the caches hold
    remaining: jax.Array  # [R] tokens that may still be emitted
    active: jax.Array  # [R] bool
    sampling: Sampling
    key: jax.Array  # [R] typed key of each row
    target_cache: tuple[KVCache, ...]
    draft_cache: tuple[KVCache, ...]


@struct.dataclass
class RoundLog:
    """What each of T rounds did; rounds in which a row was idle have `emitted` 0."""

    tokens: jax.Array  # [T, R, K + 1] committed tokens, `emitted` of them
    emitted: jax.Array  # [T, R] after the cut at a stop token or the limit
    accepted: jax.Array  # [T, R] accepted drafts, before any cut
    verified: jax.Array  # [T, R] drafts sent to the target
    confidence_logits: jax.Array | None  # [T, R, K] float32


def create_state(
    models: Models, *, length: int, sampling: Sampling, key: jax.Array, limit: jax.Array
) -> DecodeState:
    """Empty rows, before `prefill`.

    Args:
      length: cache positions a row, at least `cache_length` of its prompt and limit.
      sampling: settings of the R rows.
      key: [R] typed keys; a row's draws depend on its own alone.
      limit: [R] most tokens to emit, at least 1.
    """
    rows, dtype = limit.shape[0], models.target.embed.dtype
    draft_cache: tuple[KVCache, ...] = ()
    if models.drafter_config is not None:
        draft_cache = dspark.create_cache(models.drafter_config, rows, length, dtype)
    return DecodeState(
        anchor=jnp.zeros(rows, jnp.int32),
        position=jnp.zeros(rows, jnp.int32),
        remaining=jnp.array(limit, jnp.int32),
        active=jnp.ones(rows, bool),
        sampling=jax.tree.map(jnp.array, sampling),  # the state is donated, the caller's stay
        key=jnp.array(key),
        target_cache=dense.create_cache(models.target_config, rows, length, dtype),
        draft_cache=draft_cache,
    )


def cache_length(prompt: int, limit: int, block_size: int) -> int:
    """Positions that a row may write: its tokens, and a block behind the last anchor."""
    return prompt + limit + block_size


@functools.partial(jax.jit, static_argnames=("cfg", "chunk"), donate_argnames="state")
def prefill(
    models: Models,
    state: DecodeState,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    cfg: DecodeConfig,
    chunk: int,
) -> tuple[DecodeState, jax.Array]:
    """Reads the prompts, `chunk` positions at a time, and emits the first token of each row.

    One executable serves prompts of every length: the loop runs as often as the longest needs, and
    memory is that of a chunk.

    Args:
      tokens: [R, P] prompts, padded on the right with anything; P a multiple of `chunk`, at most
        the length of the caches.
      lengths: [R] their lengths, at least 1.
    Returns:
      The state, and the first tokens [R].
    """
    rows = tokens.shape[0]
    constants = _constants(models, state)
    last = jnp.zeros((rows, models.target.embed.shape[1]), models.target.embed.dtype)

    def read(i, carry):
        target_cache, draft_cache, last = carry
        start = jnp.full(rows, i * chunk, jnp.int32)
        piece = jax.lax.dynamic_slice(tokens, (0, i * chunk), (rows, chunk))
        flat = pack(piece, jnp.clip(lengths - start, 0, chunk), start, rows * chunk)
        hidden, target_cache = dense.extend(
            models.target,
            flat,
            target_cache,
            constants.target_angles,
            cfg=models.target_config,
            taps=models.taps,
        )
        draft_cache = _append_context(models, constants, hidden.features, flat, draft_cache)
        place = lengths - 1 - start
        ends = (place >= 0) & (place < chunk)
        final = flat.to_rows(hidden.final)[jnp.arange(rows), jnp.clip(place, 0, chunk - 1)]
        return target_cache, draft_cache, jnp.where(ends[:, None], final, last)

    chunks = (lengths.max() + chunk - 1) // chunk
    carry = (state.target_cache, state.draft_cache, last)
    target_cache, draft_cache, last = jax.lax.fori_loop(0, chunks, read, carry)
    flat = pack(state.anchor[:, None], jnp.ones(rows, jnp.int32), lengths - 1, rows)
    nothing = Draft(jnp.zeros((rows, 0), jnp.int32), None, None)
    logits = dense.logits(models.target, last)
    if cfg.greedy:
        verdict = verify.verify_greedy(logits, flat, nothing)
    else:
        noise = round_noise(state.key, lengths - 1, 1)
        verdict = verify.verify_sampled(
            logits, flat, nothing, state.sampling, noise, truncate=cfg.truncate
        )
    first = verdict.token
    remaining = state.remaining - 1
    state = dataclasses.replace(
        state,
        anchor=first,
        position=lengths.astype(jnp.int32),
        remaining=remaining,
        active=state.active & (remaining > 0) & ~_is_stop(first, cfg),
        target_cache=target_cache,
        draft_cache=draft_cache,
    )
    return state, first


@functools.partial(jax.jit, static_argnames=("cfg", "length"), donate_argnames="state")
def decode_rounds(
    models: Models, state: DecodeState, rounds: jax.Array, *, cfg: DecodeConfig, length: int
) -> tuple[DecodeState, RoundLog, jax.Array]:
    """Runs up to `rounds` rounds, fewer when no row is active any more.

    Args:
      rounds: how many, at most `length`; not compiled in.
      length: T, rounds that the log has room for.
    Returns:
      The state, the log, and how many rounds were run.
    """
    rows = state.anchor.shape[0]
    size = block_size(models, cfg)
    constants = _constants(models, state)
    log = RoundLog(
        tokens=jnp.zeros((length, rows, size + 1), jnp.int32),
        emitted=jnp.zeros((length, rows), jnp.int32),
        accepted=jnp.zeros((length, rows), jnp.int32),
        verified=jnp.zeros((length, rows), jnp.int32),
        confidence_logits=jnp.zeros((length, rows, size)) if cfg.trace else None,
    )

    def go_on(carry):
        t, state, _ = carry
        return (t < rounds) & state.active.any()

    def body(carry):
        t, state, log = carry
        state, entry = decode_round(models, constants, state, cfg=cfg)
        log = jax.tree.map(lambda all_, one: all_.at[t].set(one), log, entry)
        return t + 1, state, log

    done, state, log = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, log))
    return state, log, done


def block_size(models: Models, cfg: DecodeConfig) -> int:
    """K, drafts a round."""
    if cfg.policy == "none" or models.drafter_config is None:
        return 0
    return models.drafter_config.block_size


@struct.dataclass
class Constants:
    """What a loop over passes makes once, in front of it."""

    target_angles: RopeAngles  # [S, H/2] of all positions
    draft_angles: RopeAngles | None
    context_weights: jax.Array | None


def _constants(models: Models, state: DecodeState) -> Constants:
    def angles(cfg: TransformerConfig) -> RopeAngles:
        return rope_angles(jnp.arange(state.target_cache[0].length), cfg.rope, cfg.head_dim)

    if models.drafter is None or models.drafter_config is None:
        return Constants(angles(models.target_config), None, None)
    return Constants(
        angles(models.target_config),
        angles(models.drafter_config),
        dspark.context_weights(models.drafter),
    )


def decode_round(
    models: Models, constants: Constants, state: DecodeState, *, cfg: DecodeConfig
) -> tuple[DecodeState, RoundLog]:
    """One round of all rows; the log entry has no leading T."""
    rows, size = state.anchor.shape[0], block_size(models, cfg)
    noise = None if cfg.greedy else round_noise(state.key, state.position, max(size, 1))
    with jax.named_scope("draft"):
        draft, draft_cache = _draft(models, constants, state, noise, cfg)
    with jax.named_scope("schedule"):
        if draft.confidence_logits is None:
            confidence = jnp.ones((rows, size))
        else:
            confidence = jax.nn.sigmoid(draft.confidence_logits)
        lengths = scheduler.schedule(
            confidence, policy=cfg.policy, active=state.active, threshold=cfg.threshold
        )
    with jax.named_scope("verify"):
        tokens = jnp.concatenate([state.anchor[:, None], draft.tokens], axis=1)
        flat = pack(tokens, 1 + lengths, state.position, rows * (1 + size))
        hidden, target_cache = dense.extend(
            models.target,
            flat,
            state.target_cache,
            constants.target_angles,
            cfg=models.target_config,
            taps=models.taps,
        )
        logits = dense.logits(models.target, hidden.final)
        if noise is None:
            verdict = verify.verify_greedy(logits, flat, draft)
        else:
            verdict = verify.verify_sampled(
                logits, flat, draft, state.sampling, noise, truncate=cfg.truncate
            )
    with jax.named_scope("commit"):
        if size:
            draft_cache = _append_context(models, constants, hidden.features, flat, draft_cache)
        state = dataclasses.replace(state, target_cache=target_cache, draft_cache=draft_cache)
        state, committed, emitted = _commit(state, draft, verdict, cfg)
    z = draft.confidence_logits if cfg.trace else None
    if cfg.trace and z is None:
        z = jnp.zeros((rows, size))
    return state, RoundLog(committed, emitted, verdict.accepted, lengths, z)


def _draft(
    models: Models,
    constants: Constants,
    state: DecodeState,
    noise: jax.Array | None,
    cfg: DecodeConfig,
) -> tuple[Draft, tuple[KVCache, ...]]:
    table = constants.draft_angles
    if cfg.policy == "none" or models.drafter is None or models.drafter_config is None:
        rows = state.anchor.shape[0]
        return Draft(jnp.zeros((rows, 0), jnp.int32), None, None), state.draft_cache
    hidden, cache = dspark.draft_hidden(
        models.drafter,
        models.target,
        state.anchor,
        state.position,
        state.draft_cache,
        table,
        cfg=models.drafter_config,
    )
    draft = sampling_.draft_block(
        models.drafter,
        dense.logits(models.target, hidden),
        hidden,
        state.anchor,
        None if noise is None else state.sampling,
        None if noise is None else noise[sampling_.DRAFT],
        truncate=cfg.truncate,
    )
    return draft, cache


def _append_context(
    models: Models, constants: Constants, features, flat, cache
) -> tuple[KVCache, ...]:
    weights, table = constants.context_weights, constants.draft_angles
    if models.drafter is None or models.drafter_config is None or weights is None or table is None:
        return cache
    return dspark.append_context(
        models.drafter, weights, features, flat, cache, table, cfg=models.drafter_config
    )


def _is_stop(tokens: jax.Array, cfg: DecodeConfig) -> jax.Array:
    stops = jnp.array(cfg.stop_token_ids, jnp.int32)
    return (tokens[..., None] == stops).any(-1)


def _commit(
    state: DecodeState, draft: Draft, verdict: verify.Verdict, cfg: DecodeConfig
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Appends accepted drafts and the target's token; a stop token or the limit cuts them.

    Returns the state, the tokens [R, K + 1] and how many of them were emitted [R].
    """
    slots = jnp.arange(draft.tokens.shape[1] + 1)
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(slots == verdict.accepted[:, None], verdict.token[:, None], tokens)
    gained = verdict.accepted + 1
    stops = _is_stop(tokens, cfg)
    until_stop = jnp.min(jnp.where(stops, slots + 1, len(slots) + 1), axis=1)
    emitted = jnp.minimum(jnp.minimum(gained, until_stop), state.remaining)
    emitted = jnp.where(state.active, emitted, 0)
    remaining = state.remaining - emitted
    active = state.active & (remaining > 0) & (until_stop > gained)
    state = dataclasses.replace(
        state,
        anchor=jnp.where(active, verdict.token, state.anchor),
        position=jnp.where(active, state.position + gained, state.position),
        remaining=remaining,
        active=active,
    )
    return state, tokens, emitted
