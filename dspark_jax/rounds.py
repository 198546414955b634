"""One round of all rows: draft -> schedule -> verify -> commit.

`propose` and `settle` are its halves; `take_in` then tells the drafter what the target saw.

Letters: R rows, K drafts a round, T rounds of a log, C flat tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import plans, scheduler, sharding, verify, vocabulary
from dspark_jax.drafters.kinds import Memory, kind_of
from dspark_jax.flat import FlatTokens, pack
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import RopeAngles, rope_angles
from dspark_jax.plans import Plan
from dspark_jax.sampling import DRAFT, Draft, round_noise
from dspark_jax.state import (
    STRETCH,
    Backlog,
    DecodeConfig,
    DecodeState,
    Models,
    logs_confidences,
    pinned,
    plans_of,
)
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Hidden


@struct.dataclass
class RoundLog:
    """What each of T rounds did, K drafts each; where a row was idle `emitted` is 0."""

    tokens: jax.Array  # [T, R, K + 1] committed tokens, `emitted` of them
    emitted: jax.Array  # [T, R] after the cut at a stop token or the limit
    accepted: jax.Array  # [T, R] accepted drafts, before any cut
    verified: jax.Array  # [T, R] drafts sent to the target
    drafts: jax.Array | None  # [T, R, K] drafted tokens, with `trace`
    confidence_logits: jax.Array | None  # [T, R, K] float32; see `logs_confidences`
    logprobs: jax.Array | None  # [T, R, K + 1] float32, of `tokens`


@struct.dataclass
class Constants:
    """What a loop over passes makes once, in front of it."""

    target_angles: dense.Angles  # [S, H/2] of all positions
    draft_angles: RopeAngles | None
    context_weights: jax.Array | None


def make_constants(models: Models, cache: tuple[KVCache, ...]) -> Constants:
    """The constants of a loop over passes that append to `cache`, the target's."""

    positions, drafter = jnp.arange(cache[0].length), models.drafter_config
    angles = dense.make_angles(models.target_config, positions)
    if models.drafter is None or drafter is None:
        return Constants(angles, None, None)
    return Constants(
        angles,
        rope_angles(positions, drafter.rope, drafter.head_dim),
        kind_of(drafter).context_weights(models.drafter),
    )


@struct.dataclass
class Proposal:
    """What a round drafted, and how much of it is to be verified."""

    draft: Draft
    lengths: jax.Array  # [R]


@struct.dataclass
class Seen:
    """What a target pass saw, and the drafter has yet to take in."""

    flat: FlatTokens
    features: jax.Array  # [C, F], see `Hidden.seen`


def decode_round(
    models: Models, constants: Constants, state: DecodeState, *, cfg: DecodeConfig, plan: Plan
) -> tuple[DecodeState, RoundLog, Seen]:
    """One round of all rows up to `take_in`; the log entry has no leading T."""
    state, proposal = propose(models, constants, state, cfg=cfg, plan=plan)
    return settle(models, constants, state, proposal, cfg=cfg, capacity=plan.capacity)


def propose(
    models: Models,
    constants: Constants,
    state: DecodeState,
    *,
    cfg: DecodeConfig,
    plan: Plan,
    sps: jax.Array | None = None,
) -> tuple[DecodeState, Proposal]:
    """Draft and schedule."""
    rows, size = state.anchor.shape[0], plan.drafts
    choices = plans_of(models, cfg, rows)
    with jax.named_scope("draft"):
        noise = _noise(state.key, state.position, size, cfg)
        draft, draft_cache = _draft(models, constants, state, noise, cfg, size)
    with jax.named_scope("schedule"):
        confidence = jnp.ones((rows, size))
        if draft.confidence_logits is not None:
            z = draft.confidence_logits
            confidence = jax.nn.sigmoid(z if state.scale is None else z / state.scale[:, :size])
        lengths = scheduler.schedule(
            confidence,
            sps,
            policy=cfg.policy if size else "none",
            active=state.active,
            threshold=cfg.threshold,
            capacity=plan.capacity,
            capacities=plans.capacities(choices, size),
        )
        outlook = state.outlook
        if outlook is not None:
            outlook = plans.look_ahead(outlook, choices, state.active)
            outlook = plans.observe(outlook, confidence, state.active)
    state = dataclasses.replace(state, draft_cache=draft_cache, outlook=outlook)
    return state, Proposal(draft, lengths)


def settle(
    models: Models,
    constants: Constants,
    state: DecodeState,
    proposal: Proposal,
    *,
    cfg: DecodeConfig,
    capacity: int,
) -> tuple[DecodeState, RoundLog, Seen]:
    """Verify and commit; the log entry has no leading T."""
    draft, lengths = proposal.draft, proposal.lengths
    size = draft.tokens.shape[1]
    with jax.named_scope("verify"):
        tokens = jnp.concatenate([state.anchor[:, None], draft.tokens], axis=1)
        flat = pack(tokens, pass_counts(state, proposal), state.position, capacity)
        hidden, target_cache = target_pass(models, constants, flat, state.target_cache)
        logits = dense.logits(models.target, hidden.final)
        verdict = judge(models, logits, flat, draft, state, cfg)
    with jax.named_scope("commit"):
        state = dataclasses.replace(state, target_cache=target_cache)
        state, committed, emitted = _commit(state, draft, verdict, cfg)
    z = None
    if logs_confidences(models, cfg):
        z = draft.confidence_logits if size else jnp.zeros(draft.tokens.shape)
    logprobs = None
    if cfg.logprobs:
        places = jnp.minimum(flat.offset[:, None] + jnp.arange(size + 1), len(flat.tokens) - 1)
        logprobs = verify.logprobs(logits, committed, places)
    drafts = draft.tokens if cfg.trace else None
    log = RoundLog(committed, emitted, verdict.accepted, lengths, drafts, z, logprobs)
    return state, log, Seen(flat, hidden.seen)


def take_in(
    models: Models, constants: Constants, state: DecodeState, seen: Seen, *, drafting: bool
) -> DecodeState:
    """The drafter's caches take in what the target saw, or its backlog does if it isn't drafting.

    Its first round with drafts comes behind `take_backlog`.
    """
    backlog = state.backlog
    with jax.named_scope("context"):
        if backlog is not None and not drafting:
            return dataclasses.replace(state, backlog=put_off(backlog, seen))
        cache = append_context(models, constants, seen, state.position, state.draft_cache)
    if backlog is not None:
        backlog = dataclasses.replace(backlog, taken=state.position)
    return dataclasses.replace(state, draft_cache=cache, backlog=backlog)


def put_off(backlog: Backlog, seen: Seen) -> Backlog:
    """The drafter will take in later what the target saw."""
    flat = seen.flat
    write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))
    features = write(backlog.features, flat.to_rows(seen.features), flat.start, 0)
    tokens = backlog.tokens
    if tokens is not None:
        tokens = write(tokens, flat.to_rows(flat.tokens), flat.start, 0)
    return dataclasses.replace(backlog, features=features, tokens=tokens)


def take_backlog(
    models: Models,
    constants: Constants,
    cache: Memory,
    backlog: Backlog,
    held: jax.Array,
) -> tuple[Memory, Backlog]:
    """The drafter takes in what it has put off, so that its caches hold `held` [R] positions."""
    rows = held.shape[0]
    take = jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, STRETCH))

    def stretch(carry):
        cache, taken = carry
        counts = jnp.clip(held - taken, 0, STRETCH)
        tokens = jnp.zeros((rows, STRETCH), jnp.int32)
        if backlog.tokens is not None:
            tokens = take(backlog.tokens, taken)
        flat = pack(tokens, counts, taken, rows * STRETCH)
        features = take(backlog.features, taken).reshape(rows * STRETCH, -1)
        seen, taken = Seen(flat, features), taken + counts
        return append_context(models, constants, seen, taken, cache), taken

    cache, taken = jax.lax.while_loop(
        lambda carry: (carry[1] < held).any(), stretch, (cache, backlog.taken)
    )
    return cache, dataclasses.replace(backlog, taken=taken)


def target_pass(
    models: Models, constants: Constants, flat: FlatTokens, cache: tuple[KVCache, ...]
) -> tuple[Hidden, tuple[KVCache, ...]]:
    """Adds flat tokens to the target's caches; hidden states with the taps of the drafter."""
    return dense.extend(
        models.target,
        flat,
        cache,
        constants.target_angles,
        cfg=models.target_config,
        taps=models.taps,
    )


def judge(
    models: Models,
    logits: jax.Array,
    flat: FlatTokens,
    draft: Draft,
    state: DecodeState,
    cfg: DecodeConfig,
) -> verify.Verdict:
    """What the target's logits [C, V] say of the drafts behind anchors at `flat.start`."""
    noise = _noise(state.key, flat.start, draft.tokens.shape[1], cfg)
    if noise is None:
        verdict = verify.verify_greedy(logits, flat, draft)
    else:
        verdict = verify.verify_sampled(
            pinned(models, logits), flat, draft, state.sampling, noise, truncate=cfg.truncate
        )
    return sharding.agreed(verdict, models.mesh)


def _noise(key: jax.Array, position: jax.Array, size: int, cfg: DecodeConfig) -> jax.Array | None:
    return None if cfg.greedy else round_noise(key, position, max(size, 1))


def pass_counts(state: DecodeState, proposal: Proposal) -> jax.Array:
    """Tokens [R] of each row in the pass, its anchor included."""
    return jnp.where(state.active, 1 + proposal.lengths, 0)


def _draft(
    models: Models,
    constants: Constants,
    state: DecodeState,
    noise: jax.Array | None,
    cfg: DecodeConfig,
    size: int,
) -> tuple[Draft, Memory]:
    table = constants.draft_angles
    if size == 0 or models.drafter is None or models.drafter_config is None:
        rows = state.anchor.shape[0]
        return Draft(jnp.zeros((rows, 0), jnp.int32), None, None), state.draft_cache
    draft, cache = kind_of(models.drafter_config).draft(
        models.drafter,
        vocabulary.reader(models.drafter.vocabulary, models.target),
        state.anchor,
        state.position,
        state.draft_cache,
        table,
        None if noise is None else state.sampling,
        None if noise is None else noise[DRAFT],
        cfg=dataclasses.replace(models.drafter_config, block_size=size),
        truncate=cfg.truncate,
        mesh=models.mesh,
    )
    draft = vocabulary.widened(draft, models.drafter.vocabulary, models.target_config.vocab_size)
    told = sharding.agreed((draft.tokens, draft.confidence_logits), models.mesh)
    return dataclasses.replace(draft, tokens=told[0], confidence_logits=told[1]), cache


def append_context(
    models: Models, constants: Constants, seen: Seen, position: jax.Array, cache: Memory
) -> Memory:
    """The drafter's caches with what the target saw, where there is a drafter.

    `position` [R] is how many positions of each row count from now on.
    """
    weights, table = constants.context_weights, constants.draft_angles
    if models.drafter is None or models.drafter_config is None or weights is None or table is None:
        return cache
    return kind_of(models.drafter_config).append_context(
        models.drafter,
        models.target,
        weights,
        seen.features,
        seen.flat,
        position,
        cache,
        table,
        cfg=models.drafter_config,
    )


def is_stop(tokens: jax.Array, cfg: DecodeConfig) -> jax.Array:
    """Which of the tokens end a row."""
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
    stops = is_stop(tokens, cfg)
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
