"""Which round to run next: how many tokens are drafted, and how many one target pass has room for.

A plan is an executable, and the cost table knows how long a round of each takes. Under the policy
`delayed` the next plan is chosen from what earlier rounds said about their drafts, never from the
drafts of the round itself: whatever it is, the output has the target's distribution (paper, section
4.2). Drafting costs as well, so that plans differ in both numbers, down to no drafts at all.

Letters: R rows, K most drafts a round, P plans, C capacity of a target pass in tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

PATIENCE = 64
"""Until a plan that would win if the drafts were good is tried, at first. Counted in trials of
that plan, so that they take the same part of the time however long they are."""
CHANGE = 0.008
"""Seconds that a trial takes beside its round: a call that ends for it, one that brings the drafter
up to date, one of a single round, two looks. Measured on two slow cores at one row (docs/log.md);
where rounds are long it does not matter."""
MOST_PATIENCE = 1024
"""It doubles whenever that was in vain, up to this."""
PRIOR = 0.7
"""Confidence in drafts of which nothing is known."""
PERIOD = 16
"""Rounds between two looks at all plans: a look costs about as much as a layer of a small model.
For as long after a change of plan there is one every round, since a change may rest on little."""
MARGIN = 1.03
"""How much better another plan must be to be worth the change."""
MEMORY = 16
"""Rounds that a mean of confidences looks back on."""


@dataclasses.dataclass(frozen=True, order=True)
class Plan:
    """One kind of round."""

    drafts: int
    """k, drafted tokens of each row; without any the drafter is not run."""
    capacity: int
    """C, tokens of the target pass, the rows' anchors included."""


def whole(rows: int, drafts: int) -> Plan:
    """All drafts of all rows are verified."""
    return Plan(drafts, rows * (1 + drafts))


def ladder(rows: int, most: int) -> tuple[Plan, ...]:
    """The plans that exist for R rows and up to K drafts: few, as each of them is compiled.

    Blocks of K, and of powers of two below; for each, room for all of its drafts, for half and for
    a quarter of them.
    """
    sizes = sorted({most, *(2**n for n in range(most.bit_length()) if 2**n < most)})
    plans = {Plan(0, rows)}
    for size in sizes:
        for part in (1, 2, 4):
            room = -(-rows * size // part)
            if part == 1 or room >= max(rows // 2, 1):
                plans.add(Plan(size, rows + room))
    return tuple(sorted(plans))


def capacities(plans: Sequence[Plan], drafts: int) -> tuple[int, ...]:
    """Of the plans with so many drafts a row, ascending."""
    return tuple(sorted(plan.capacity for plan in plans if plan.drafts == drafts))


@struct.dataclass
class Outlook:
    """What earlier rounds say about the next; R rows, K drafts."""

    confidence: jax.Array  # [R, K] mean over a row's recent rounds, where `seen`
    seen: jax.Array  # [R, K] in how many of its rounds the position was drafted
    typical: jax.Array  # [K] mean over rows and recent rounds; `PRIOR` before there is any
    observed: jax.Array  # [K] in how many rounds the position was drafted
    plan: jax.Array  # [] index of the plan of the next round
    best: jax.Array  # [] index of the best plan as far as is known, which a trial interrupts
    held: jax.Array  # [] rounds since the best plan became another
    waited: jax.Array  # [] rounds since the last trial
    base: jax.Array  # [] drafts of the best plan in front of that trial
    patience: jax.Array  # [] from one to the next; see `PATIENCE`
    rates: jax.Array  # [P] rounds a second of each plan


def create_outlook(rows: int, most: int, plans: Sequence[Plan], rates: jax.Array) -> Outlook:
    """Nothing known: it begins with the plan that is best for drafts of confidence `PRIOR`."""
    index = first(rows, most, plans, rates)
    return Outlook(
        rates=rates,
        confidence=jnp.ones((rows, most)),
        seen=jnp.zeros((rows, most), jnp.int32),
        typical=jnp.full(most, PRIOR),
        observed=jnp.zeros(most, jnp.int32),
        plan=index,
        best=jnp.array(index),  # a buffer of its own: states are donated
        held=jnp.int32(0),
        waited=jnp.int32(0),
        base=jnp.int32(most),
        patience=jnp.int32(PATIENCE),
    )


def first(rows: int, most: int, plans: Sequence[Plan], rates: jax.Array) -> jax.Array:
    """Index of the plan that is best for drafts of confidence `PRIOR`."""
    chances = jnp.cumprod(jnp.full((rows, most), PRIOR), axis=1)
    return best_plan(chances, rates, plans, jnp.ones(rows, bool))[0]


def forget_rows(outlook: Outlook, rows: jax.Array) -> Outlook:
    """Other requests sit in the rows [R] now."""
    return dataclasses.replace(outlook, seen=jnp.where(rows[:, None], 0, outlook.seen))


def best_plan(
    chances: jax.Array, rates: jax.Array, plans: Sequence[Plan], active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The plan of most expected tokens a second: all of them are compared.

    Args:
      chances: survival [R, K].
      rates: [P] rounds a second of each plan.
      plans: P plans.
      active: [R] rows of the next round.
    Returns:
      Its index, and the expected tokens a second [P] of all.
    """
    anchors = active.sum(dtype=jnp.int32)
    chances = jnp.where(active[:, None], chances, 0)
    sums = {}
    for size in {plan.drafts for plan in plans if plan.drafts}:
        gains = chances[:, :size].reshape(-1)
        if len(active) > 1:
            gains = -jnp.sort(-gains)
        sums[size] = jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])
    tokens = []
    for plan in plans:
        gained = jnp.float32(0)
        if plan.drafts:
            room = jnp.minimum(plan.capacity - anchors, len(active) * plan.drafts)
            gained = sums[plan.drafts][room]
        tokens.append(anchors + gained)
    speeds = jnp.stack(tokens) * rates
    return jnp.argmax(speeds).astype(jnp.int32), speeds


def look_ahead(outlook: Outlook, plans: Sequence[Plan], active: jax.Array) -> Outlook:
    """Chooses the plan of the next round from the rounds that `outlook` has seen.

    Called in front of `observe`, so that the last round's confidences are not among them and the
    choice could be made while that round still runs (paper, section 4.2: two rounds ago).

    A position that was not drafted lately is taken as in the past, and once in a while on trial as
    if its drafts were sure to be accepted: when that would change the plan, one round of that plan
    shows how it is. Trials become rarer, until one leads to longer drafts that last.

    Only every few rounds, behind a trial and for some rounds behind a change are plans compared.
    """
    outlook = _later(outlook, 1)
    young = outlook.held <= PERIOD
    due = young | (outlook.held % PERIOD == 0) | (outlook.plan != outlook.best)
    return jax.lax.cond(
        due, lambda old: _compare(old, plans, active)[0], lambda same: same, outlook
    )


def look_again(
    outlook: Outlook, plans: Sequence[Plan], active: jax.Array, rounds: jax.Array | int
) -> tuple[Outlook, jax.Array]:
    """`look_ahead` behind so many rounds without drafts at once.

    Returns also how many more of them may pass before a trial is due. Until then a look would find
    nothing else, unless other rows are active.
    """
    return _compare(_later(outlook, rounds), plans, active)


def _later(outlook: Outlook, rounds: jax.Array | int) -> Outlook:
    return dataclasses.replace(outlook, held=outlook.held + rounds, waited=outlook.waited + rounds)


def _compare(
    outlook: Outlook, plans: Sequence[Plan], active: jax.Array
) -> tuple[Outlook, jax.Array]:
    """The outlook with the plan that is best now, and how many rounds a trial has yet to wait."""
    confidence = jnp.where(outlook.seen > 0, outlook.confidence, outlook.typical)
    drafts = jnp.array([plan.drafts for plan in plans], jnp.int32)
    idle = jnp.arange(confidence.shape[1]) >= drafts[outlook.best]
    choose = functools.partial(best_plan, rates=outlook.rates, plans=plans, active=active)
    best, speeds = choose(jnp.cumprod(confidence, axis=1))
    best = jnp.where(speeds[best] > MARGIN * speeds[outlook.best], best, outlook.best)
    trial, hoped = choose(jnp.cumprod(jnp.where(idle, 1.0, confidence), axis=1))
    differs = (drafts[trial] > drafts[best]) & (hoped[trial] > MARGIN * hoped[best])
    rates = outlook.rates
    wait = outlook.patience * (1 / rates[trial] + CHANGE) * rates[best] - outlook.waited
    due = differs & (wait <= 0)
    quiet = jnp.ceil(jnp.where(differs, jnp.minimum(wait, MOST_PATIENCE), MOST_PATIENCE))
    held = jnp.where(best == outlook.best, outlook.held, 0)
    lasting = (held >= PERIOD) & (drafts[best] > outlook.base)
    patience = jnp.where(lasting, PATIENCE, outlook.patience)
    # What a trial shows counts alone, and not as one of many rounds.
    fresh = due & idle
    outlook = dataclasses.replace(
        outlook,
        seen=jnp.where(fresh, 0, outlook.seen),
        observed=jnp.where(fresh, 0, outlook.observed),
        plan=jnp.where(due, trial, best),
        best=best,
        held=held,
        waited=jnp.where(due, 0, outlook.waited),
        base=jnp.where(due, drafts[best], outlook.base),
        patience=jnp.where(due, jnp.minimum(2 * patience, MOST_PATIENCE), patience),
    )
    return outlook, quiet.astype(jnp.int32)


def observe(outlook: Outlook, confidence: jax.Array, active: jax.Array) -> Outlook:
    """Takes in the confidences [R, k] of a round's drafts, k <= K."""
    size = confidence.shape[1]
    if size == 0:
        return outlook
    rows = active[:, None]
    mean = jnp.sum(jnp.where(rows, confidence, 0), axis=0) / jnp.maximum(rows.sum(), 1)
    observed = outlook.observed[:size] + rows.any()
    seen = outlook.seen[:, :size] + rows
    step = 1 / jnp.clip(observed, 1, MEMORY)
    typical = outlook.typical[:size] + jnp.where(
        rows.any(), step * (mean - outlook.typical[:size]), 0
    )
    before = outlook.confidence[:, :size]
    step = 1 / jnp.clip(seen, 1, MEMORY)
    recent = before + jnp.where(rows, step * (confidence - before), 0)
    return dataclasses.replace(
        outlook,
        confidence=outlook.confidence.at[:, :size].set(recent),
        seen=outlook.seen.at[:, :size].set(seen),
        typical=outlook.typical.at[:size].set(typical),
        observed=outlook.observed.at[:size].set(observed),
    )
