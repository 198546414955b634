"""Decoding: many rounds in one call, in a loop on the device.

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

from dspark_jax import plans
from dspark_jax.plans import Outlook, Plan, whole
from dspark_jax.rounds import (
    Proposal,
    RoundLog,
    decode_round,
    make_constants,
    pass_counts,
    propose,
    settle,
    take_backlog,
    take_in,
)
from dspark_jax.state import (
    DecodeConfig,
    DecodeState,
    Models,
    block_size,
    logs_confidences,
    pinned,
    plans_of,
    put_back,
    set_aside,
)

ROUNDS_PER_CALL = 64
"""Room of a log, which is compiled in."""


@functools.partial(jax.jit, static_argnames=("cfg", "plan", "length"), donate_argnames="state")
def decode_rounds(
    models: Models,
    state: DecodeState,
    rounds: jax.Array,
    least: jax.Array,
    *,
    cfg: DecodeConfig,
    length: int = ROUNDS_PER_CALL,
    plan: Plan | None = None,
) -> tuple[DecodeState, RoundLog, jax.Array]:
    """Runs up to `rounds` rounds, fewer when less than `least` rows are active any more.

    Args:
      rounds: how many, at most `length`; not compiled in.
      least: active rows, at least 1: as many as there are, to stop as soon as one is done; not
        compiled in.
      length: T, rounds that the log has room for.
      plan: of these rounds; default: all drafts of all rows. With an outlook the loop ends where it
        wants another plan.
    Returns:
      The state, the log, and how many rounds were run.
    """
    rows, size = state.anchor.shape[0], block_size(models, cfg)
    plan = plan or whole(rows, size)
    choices = plans_of(models, cfg, rows)
    constants = make_constants(models, state.target_cache)
    log = _create_log(models, length, rows, plan.drafts, cfg)

    def go_on(t: jax.Array, state: DecodeState) -> jax.Array:
        more = (t < rounds) & (state.active.sum() >= least)
        if state.outlook is not None:
            more &= state.outlook.plan == choices.index(plan)
        return more

    def one_round(carry):
        t, state, log = carry
        state, entry, seen = decode_round(models, constants, state, cfg=cfg, plan=plan)
        log = jax.tree.map(lambda all_, one: all_.at[t].set(one), log, entry)
        if size:
            state = take_in(models, constants, state, seen, drafting=bool(plan.drafts))
        return t + 1, state, log

    done, state, log = jax.lax.while_loop(
        lambda carry: go_on(carry[0], carry[1]), one_round, (jnp.int32(0), state, log)
    )
    return pinned(models, state), log, done


def run_plan(
    models: Models,
    state: DecodeState,
    rounds: jax.Array,
    least: jax.Array,
    *,
    cfg: DecodeConfig,
    plan: Plan,
) -> tuple[DecodeState, RoundLog, jax.Array]:
    """`decode_rounds`, without what idles where a lazy drafter has nothing to do.

    Rounds without drafts tell nothing about drafts: `look` is due when they have been many.
    """
    if state.backlog is None or plan.drafts:
        return decode_rounds(models, state, rounds, least, cfg=cfg, plan=plan)
    bare_models, bare = set_aside(models, state)
    bare, log, done = decode_rounds(bare_models, bare, rounds, least, cfg=cfg, plan=plan)
    return put_back(bare, state), log, done


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="outlook")
def look(
    models: Models,
    outlook: Outlook,
    active: jax.Array,
    newcomers: jax.Array,
    rounds: jax.Array,
    *,
    cfg: DecodeConfig,
) -> tuple[Outlook, jax.Array]:
    """Chooses the next plan behind rounds without drafts, which `run_plan` ran.

    Args:
      active: [R] rows of the next round.
      newcomers: [R] rows in which another request sits since the last look.
      rounds: since the last look.
    Returns:
      The outlook, and for how many more rounds without drafts it will want no other plan as long
      as the rows are the same.
    """
    choices = plans_of(models, cfg, len(active))
    outlook = plans.forget_rows(outlook, newcomers)
    outlook, quiet = plans.look_again(outlook, choices, active, rounds)
    return pinned(models, outlook), quiet


@functools.partial(jax.jit, donate_argnames="state")
def catch_up(models: Models, state: DecodeState) -> DecodeState:
    """In front of rounds with drafts: the drafter takes in what it has put off in all rows."""
    constants = make_constants(models, state.target_cache)
    held = jnp.where(state.active, state.position, 0)
    cache, backlog = take_backlog(models, constants, state.draft_cache, state.backlog, held)
    return pinned(models, dataclasses.replace(state, draft_cache=cache, backlog=backlog))


def _create_log(models: Models, length: int, rows: int, size: int, cfg: DecodeConfig) -> RoundLog:
    confident = logs_confidences(models, cfg)
    return RoundLog(
        tokens=jnp.zeros((length, rows, size + 1), jnp.int32),
        emitted=jnp.zeros((length, rows), jnp.int32),
        accepted=jnp.zeros((length, rows), jnp.int32),
        verified=jnp.zeros((length, rows), jnp.int32),
        drafts=jnp.zeros((length, rows, size), jnp.int32) if cfg.trace else None,
        confidence_logits=jnp.zeros((length, rows, size)) if confident else None,
        logprobs=jnp.zeros((length, rows, size + 1)) if cfg.logprobs else None,
    )


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def draft_rows(
    models: Models, state: DecodeState, sps: jax.Array | None, *, cfg: DecodeConfig
) -> tuple[DecodeState, Proposal, jax.Array]:
    """The first half of a round, for policies that decide from the drafts themselves.

    Args:
      sps: [R (1 + K) + 1] rounds a second by tokens of a pass, for `causal`.
    Returns:
      The state, the proposal for `verify_rows`, and the tokens that its pass must have room for.
    """
    constants = make_constants(models, state.target_cache)
    plan = whole(state.anchor.shape[0], block_size(models, cfg))
    state, proposal = propose(models, constants, state, cfg=cfg, plan=plan, sps=sps)
    return pinned(models, state), proposal, pass_counts(state, proposal).sum()


@functools.partial(jax.jit, static_argnames=("cfg", "capacity"), donate_argnames="state")
def verify_rows(
    models: Models, state: DecodeState, proposal: Proposal, *, cfg: DecodeConfig, capacity: int
) -> tuple[DecodeState, RoundLog]:
    """The second half: a pass with room for `capacity` tokens, and the commit."""
    constants = make_constants(models, state.target_cache)
    state, entry, seen = settle(models, constants, state, proposal, cfg=cfg, capacity=capacity)
    state = take_in(models, constants, state, seen, drafting=True)
    return pinned(models, state), jax.tree.map(lambda x: x[None], entry)
