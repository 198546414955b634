"""How the time of a round divides into drafting, scheduling and verifying.

In decoding they are one program, so that each is timed apart: drafting (with the confidences, where
the policy looks at them) in a loop of its own, scheduling in a loop over random confidences. What
is left of a whole round, as the cost table has it, is the pass of the target and the commit.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import costs, plans, rounds, scheduler
from dspark_jax.batch_shape import BatchShape
from dspark_jax.costs import CostTable
from dspark_jax.plans import Outlook, Plan, whole
from dspark_jax.state import DecodeConfig, DecodeState, Models, block_size, plans_of
from infer.load import Rounds

REPEATS = 5
SAMPLES = 16
"""Sets of random confidences that a timed call goes through."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """Seconds of the parts of a round, or the shares of its time."""

    draft: float
    schedule: float
    verify: float


def seconds(
    rounds: Mapping[int, Rounds],
    table: CostTable,
    draft: Mapping[int, float],
    schedule: Mapping[int, float],
) -> Stages:
    """Seconds of a round, in the mean over those that were run.

    Args:
      rounds: by drafts k. A round of k drafts that verifies n tokens of a row takes what the cost
        table says of R n tokens, linear between the capacities that it was measured at.
      table: whole rounds.
      draft, schedule: seconds by drafts k.
    """
    total = drafting = scheduling = 0.0
    for k, found in rounds.items():
        sizes = plans.capacities(tuple(table.seconds), k)
        costs = [table.seconds[Plan(k, size)] for size in sizes]
        total += found.count * float(np.interp(table.rows * found.verified, sizes, costs))
        drafting += found.count * draft[k]
        scheduling += found.count * schedule[k]
    count = sum(found.count for found in rounds.values())
    if not count:
        return Stages(0.0, 0.0, 0.0)
    # Timed apart they may add up to more than the whole, by noise.
    verifying = max(0.0, total - drafting - scheduling)
    return Stages(drafting / count, scheduling / count, verifying / count)


def shares(stages: Stages) -> Stages:
    """What part of the whole each is; of nothing all are 0."""
    total = stages.draft + stages.schedule + stages.verify
    if total == 0:
        return stages
    return Stages(stages.draft / total, stages.schedule / total, stages.verify / total)


def draft_seconds(models: Models, cfg: DecodeConfig, shape: BatchShape, drafts: int) -> float:
    """Time of drafting so many tokens for all rows, which are half full."""
    if drafts == 0:
        return 0.0
    state = half_full(models, cfg, shape, drafts)
    looks = cfg.policy in ("threshold", "causal", "delayed")
    cfg = dataclasses.replace(cfg, policy="fixed", threshold=None)

    def call(count: int) -> jax.Array:
        nonlocal state
        state, total = _draft(models, state, np.int32(count), cfg=cfg, drafts=drafts, looks=looks)
        return total

    return seconds_each(call)


def half_full(models: Models, cfg: DecodeConfig, shape: BatchShape, drafts: int) -> DecodeState:
    """Rows half of whose positions are taken, or less to have room for a block."""
    context = max(0, min(shape.length // 2, shape.length - drafts - 3))
    state = costs.create_rows(models, cfg, shape.rows, shape.length)
    return dataclasses.replace(state, position=jnp.full(shape.rows, context, jnp.int32))


@functools.partial(jax.jit, static_argnames=("cfg", "drafts", "looks"), donate_argnames="state")
def _draft(
    models: Models,
    state: DecodeState,
    count: jax.Array,
    *,
    cfg: DecodeConfig,
    drafts: int,
    looks: bool,
) -> tuple[DecodeState, jax.Array]:
    """Drafts `count` times, each from the last block; `looks`: at the confidences as well."""
    constants = rounds.make_constants(models, state.target_cache)
    plan, start = whole(state.anchor.shape[0], drafts), state.position

    def body(i, carry):
        state, total = carry
        # Another position each time, or the noise would be made once for all.
        state = dataclasses.replace(state, position=start + i % 2)
        state, proposal = rounds.propose(models, constants, state, cfg=cfg, plan=plan)
        draft = proposal.draft
        if looks and draft.confidence_logits is not None:
            total += draft.confidence_logits.sum()
        return dataclasses.replace(state, anchor=draft.tokens[:, -1]), total

    state, total = jax.lax.fori_loop(0, count, body, (state, jnp.float32(0)))
    return dataclasses.replace(state, position=start), total


def schedule_seconds(
    models: Models, cfg: DecodeConfig, rows: int, table: CostTable, drafts: int
) -> float:
    """Time of deciding which of R rows of `drafts` drafts are verified, and of planning ahead.

    Where nothing is drafted there is nothing to decide, and plans are looked at between calls.
    """
    if cfg.policy in ("none", "fixed") or drafts == 0:
        return 0.0
    size, choices = block_size(models, cfg), plans_of(models, cfg, rows)
    confidences = jax.random.uniform(jax.random.key(0), (SAMPLES, rows, drafts))
    sps = table.sps(size) if cfg.policy == "causal" else None
    outlook = None
    if cfg.policy == "delayed":
        outlook = plans.create_outlook(rows, size, choices, jnp.asarray(table.rates(choices)))

    def call(count: int) -> jax.Array:
        return _schedule(confidences, sps, outlook, np.int32(count), cfg=cfg, choices=choices)

    return seconds_each(call)


@functools.partial(jax.jit, static_argnames=("cfg", "choices"))
def _schedule(
    confidences: jax.Array,
    sps: jax.Array | None,
    outlook: Outlook | None,
    count: jax.Array,
    *,
    cfg: DecodeConfig,
    choices: tuple[Plan, ...],
) -> jax.Array:
    """Schedules `count` times; what comes out is of no use but to be waited for."""
    rows, drafts = confidences.shape[1:]
    active = jnp.ones(rows, bool)
    sizes = plans.capacities(choices, drafts)

    def body(i, carry):
        outlook, total = carry
        confidence = confidences[i % SAMPLES]
        lengths = scheduler.schedule(
            confidence,
            sps,
            policy=cfg.policy,
            active=active,
            threshold=cfg.threshold,
            capacity=sizes[len(sizes) // 2],
            capacities=sizes,
        )
        if outlook is not None:
            outlook = plans.look_ahead(outlook, choices, active)
            outlook = plans.observe(outlook, confidence, active)
        return outlook, total + lengths.sum()

    outlook, total = jax.lax.fori_loop(0, count, body, (outlook, jnp.int32(0)))
    return total if outlook is None else total + outlook.plan


def seconds_each(call: Callable[[int], jax.Array]) -> float:
    """Median time of one of the many that a call does, without compiling and dispatch."""

    def timed(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(call(count))
        return time.perf_counter() - start

    timed(1)
    count = 1
    for _ in range(2):  # of a single one most of the time may be dispatch
        count = max(1, round(count * costs.SECONDS_PER_CALL / timed(count)))
    return statistics.median(timed(count) / count for _ in range(REPEATS))
