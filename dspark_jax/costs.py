"""What a round costs: seconds for each plan, measured on the executables that will run.

Real tables are staircases, because executables have fixed shapes: a pass with one token more than
the last has room for costs as much as the next larger one.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import decode, plans
from dspark_jax.config import require
from dspark_jax.plans import Plan
from dspark_jax.sampling import Sampling
from dspark_jax.state import (
    DecodeConfig,
    DecodeState,
    Models,
    block_size,
    create_state,
    is_lazy,
    plans_of,
)

SECONDS_PER_CALL = 0.05
"""A timed call runs as many rounds as fill about this."""


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds of a whole round (draft, schedule, verify, commit) with all R rows occupied."""

    rows: int
    seconds: dict[Plan, float]

    def rates(self, wanted: tuple[Plan, ...]) -> np.ndarray:
        """Rounds a second [P] float32 of the plans.

        Raises:
          InputError: one of them was not measured.
        """
        for plan in wanted:
            require(
                plan in self.seconds,
                f"the cost table knows nothing of {plan.drafts} drafts a row in a pass of"
                f" {plan.capacity} tokens",
            )
        return np.array([1 / self.seconds[plan] for plan in wanted], np.float32)

    def sps(self, drafts: int) -> np.ndarray:
        """Rounds a second [R (1 + k) + 1] float32 by tokens B of the pass, with k drafts a row.

        That of the smallest executable that has room for B tokens; the first is not used.
        """
        sizes = plans.capacities(tuple(self.seconds), drafts)
        most = self.rows * (1 + drafts)
        require(
            bool(sizes) and sizes[-1] >= most,
            f"the cost table knows no pass of {most} tokens with {drafts} drafts a row",
        )
        which = np.searchsorted(sizes, np.arange(most + 1))
        seconds = np.array([self.seconds[Plan(drafts, size)] for size in sizes])
        return (1 / seconds[which]).astype(np.float32)


def monotone(table: CostTable) -> CostTable:
    """Without the noise that makes a larger pass look faster: each gets the least of all larger."""
    seconds = {}
    for plan, own in table.seconds.items():
        larger = [s for p, s in table.seconds.items() if p.drafts == plan.drafts and p > plan]
        seconds[plan] = min(own, *larger) if larger else own
    return dataclasses.replace(table, seconds=seconds)


def measure(
    models: Models,
    cfg: DecodeConfig,
    choices: Sequence[Plan],
    *,
    rows: int,
    length: int,
    context: int,
    repeats: int = 5,
    progress: Callable[[Sequence[Plan]], Iterable[Plan]] = iter,
) -> CostTable:
    """Times rounds of all the plans, in turn in every repeat; medians, `monotone`.

    Args:
      cfg: of decoding, whatever its policy: what is measured are the executables of `delayed`.
      choices: plans of `plans.ladder`.
      rows: R, all of them active.
      length: cache positions a row.
      context: tokens that each row holds before the rounds.
      repeats: timed calls for each plan, after one that compiles.
      progress: goes through the plans that are compiled, and may show how far it is.
    """
    timer = RoundTimer(models, cfg, rows=rows, length=length, context=context)
    rounds = {plan: timer.calibrate(plan) for plan in progress(choices)}
    times: dict[Plan, list[float]] = {plan: [] for plan in choices}
    for _ in range(repeats):
        for plan in choices:
            times[plan].append(timer.seconds_a_round(plan, rounds[plan]))
    return monotone(CostTable(rows, {p: statistics.median(t) for p, t in times.items()}))


def create_rows(models: Models, cfg: DecodeConfig, rows: int, length: int) -> DecodeState:
    """Rows to time something on, of the types that decoding has, so that it shares executables."""
    return create_state(
        models,
        length=length,
        sampling=Sampling(
            jnp.full(rows, 0.0 if cfg.greedy else 1.0, jnp.float32),
            jnp.zeros(rows, jnp.int32),
            jnp.ones(rows),
            jnp.zeros(rows),
        ),
        key=jax.random.split(jax.random.key(0), rows),
        limit=jnp.full(rows, length),
        lazy=is_lazy(cfg),
    )


class RoundTimer:
    """Times rounds of any plan on rows that hold nothing of interest.

    Args: as of `measure`.
    """

    def __init__(self, models: Models, cfg: DecodeConfig, *, rows: int, length: int, context: int):
        cfg = dataclasses.replace(cfg, policy="delayed")
        self._models, self._cfg, self._context = models, cfg, context
        self._anchors = np.random.default_rng(0)
        block = block_size(models, cfg)
        room = (length - context) // (1 + block)
        require(
            room >= 1, f"{context} tokens of context and a block in {length} positions: no room"
        )
        self._most = min(decode.ROUNDS_PER_CALL, room)
        self._state = create_rows(models, cfg, rows, length)

    def calibrate(self, plan: Plan) -> int:
        """Compiles; rounds that a timed call should run."""
        self.seconds_a_round(plan, 1)
        return min(self._most, max(1, round(SECONDS_PER_CALL / self.seconds_a_round(plan, 1))))

    def seconds_a_round(self, plan: Plan, rounds: int) -> float:
        """Of so many rounds in one call, fewer where all rows met a stop token."""
        rows, vocab = len(self._state.active), self._models.target_config.vocab_size
        block = block_size(self._models, self._cfg)
        choices = plans_of(self._models, self._cfg, rows)
        rates = jnp.array([other == plan for other in choices], jnp.float32)
        state = dataclasses.replace(
            self._state,
            anchor=jnp.array(self._anchors.integers(0, vocab, rows), jnp.int32),
            position=jnp.full(rows, self._context, jnp.int32),
            remaining=jnp.full(rows, 2**30, jnp.int32),
            active=jnp.ones(rows, bool),
            # Any other plan would be infinitely slow: the loop stays with this one.
            outlook=plans.create_outlook(rows, block, choices, rates),
        )
        jax.block_until_ready(state)
        start = time.perf_counter()
        self._state, _, done = decode.run_plan(
            self._models,
            state,
            np.int32(rounds),
            np.int32(1),
            cfg=self._cfg,
            plan=plan,
        )
        jax.block_until_ready(self._state)
        return (time.perf_counter() - start) / int(done)


def describe(table: CostTable) -> Iterator[str]:
    """Lines of a table: milliseconds a round by drafts and capacity."""
    yield f"{'drafts':>8}{'tokens':>8}{'ms':>10}{'tokens/s at most':>18}"
    for plan, seconds in sorted(table.seconds.items()):
        most = plan.capacity / seconds
        yield f"{plan.drafts:8}{plan.capacity:8}{1e3 * seconds:10.3f}{most:18,.0f}"
