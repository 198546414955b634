"""Continuous batching: R rows share one device loop, and a row is refilled as soon as it is done.

The host sees the batch between two calls of the device loop. While prompts are waiting, a call ends
with the first row that is done; the next prompt is read meanwhile (`prompt_reader`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import decode, plans, prefill, sharding
from dspark_jax.batch_shape import BatchShape
from dspark_jax.config import InputError, require
from dspark_jax.costs import CostTable
from dspark_jax.decode import ROUNDS_PER_CALL
from dspark_jax.plans import Plan
from dspark_jax.prefill import First
from dspark_jax.prompt_reader import PromptReader
from dspark_jax.request import Request
from dspark_jax.rounds import RoundLog
from dspark_jax.row import Decode, Row
from dspark_jax.sampling import Sampling
from dspark_jax.state import (
    DecodeConfig,
    DecodeState,
    Models,
    block_size,
    create_state,
    is_lazy,
    plans_of,
    put_back,
    set_aside,
    without_drafter,
)

T = TypeVar("T")

ROUNDS_BETWEEN = 4
"""Rounds of the others between two parts of a long prompt that a free row waits for."""

IDLE = Request(token_ids=[0], max_new_tokens=1)
"""Stands in a place where no request is, and is compiled with."""

ROWS_IN_HALVES = 8
"""Rows from which a pass as short as a threshold leaves it is worth a wait for its length."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was measured about a pair, for policies that weigh drafts."""

    costs: CostTable | None = None
    """For `causal` and `delayed`."""
    scale: Callable[[Request], Sequence[float]] | None = None
    """Temperatures [K] of a request's confidences."""


NO_FACTS = Facts()


def serve(
    models: Models,
    requests: Sequence[Request],
    shape: BatchShape,
    cfg: DecodeConfig,
    text_of: Decode,
    *,
    facts: Facts = NO_FACTS,
    rounds: int = ROUNDS_PER_CALL,
) -> Iterator[list[Row]]:
    """Decodes all requests, in order of their coming, as rows become free.

    Args:
      text_of: text of token ids, for stop strings.
      facts: what the policy needs.
      rounds: most rounds a step.
    Yields:
      After each step the rows that were in the batch; one that is done comes for the last time.
    """
    queue = collections.deque(Row(number, request) for number, request in enumerate(requests))
    if not queue:
        return
    batch = Batch(models, shape, cfg, text_of, _distinct(queue, shape.rows), facts)
    yield batch.settle()
    while queue or batch.rows:
        if queue and batch.free:
            if batch.admit(queue[0]):
                queue.popleft()
                yield batch.settle()
            elif batch.rows:
                yield batch.run(ROUNDS_BETWEEN)
        else:
            if queue:
                batch.reader.read_on(queue[0].request.token_ids)
            yield batch.run(rounds, until_free=bool(queue))


class Batch:
    """R rows on the device and the requests in them, as the host sees them between two calls."""

    def __init__(
        self,
        models: Models,
        shape: BatchShape,
        cfg: DecodeConfig,
        text_of: Decode,
        rows: Sequence[Row],
        facts: Facts = NO_FACTS,
    ):
        """Begins with at most R rows, whose prompts one call reads."""
        self.models, self.shape, self.cfg, self.text_of = models, shape, cfg, text_of
        self.rows = dict(enumerate(rows))
        self.syncs = 0
        """How often the host has waited for the device."""
        self._scale = facts.scale
        self._plans = plans_of(models, cfg, shape.rows)
        self._plan = self._plans[-1]
        self._in_halves = cfg.policy == "causal" or (
            cfg.policy == "threshold" and shape.rows >= ROWS_IN_HALVES
        )
        self._sps, rates = _tables(models, shape, cfg, facts.costs)
        if rates is not None:
            size = block_size(models, cfg)
            self._plan = self._plans[plans.first(shape.rows, size, self._plans, rates)]
        self._behind = is_lazy(cfg)  # the drafter, in some row
        self._lookout = Lookout(shape.rows)
        self._state, first = self._start(rates)
        first, self._active = self._get((first, self._state.active))
        for place, row in enumerate(rows):
            row.begin(*_of_row(first, place))

    @property
    def free(self) -> list[int]:
        """Places in which no request is."""
        return [place for place in range(self.shape.rows) if place not in self.rows]

    @functools.cached_property
    def reader(self) -> PromptReader:
        """Of the prompts of newcomers."""
        return PromptReader(self.models, self.shape, lazy=is_lazy(self.cfg))

    def admit(self, row: Row) -> bool:
        """Seats a newcomer in a free place, and returns True, unless its prompt is not read yet.

        The next part of the prompt is then under way.
        """
        if not self.reader.read_on(row.request.token_ids):
            return False
        if is_lazy(self.cfg):
            self._behind |= not self._plan.drafts
            if not self._behind:
                self.reader.catch_up()
        self._seat_in(self.free[0], row)
        return True

    def _seat_in(self, place: int, row: Row) -> None:
        """Puts a row whose prompt is read in a free place.

        If the drafter is behind, it will take in the prompt with all else.
        """
        models, state, reading = self.models, self._state, self.reader.reading
        if self._behind:
            _, reading = without_drafter(models, reading)
            models, state = set_aside(models, state)
            self._lookout.newcomers[place] = True
        state, first = _seat(
            models,
            state,
            reading,
            np.int32(place),
            self.reader.lengths,
            *self._columns([row.request]),
            cfg=self.cfg,
        )
        self._state = put_back(state, self._state) if self._behind else state
        first, self._active = self._get((first, self._state.active))
        row.begin(*_of_row(first, 0))
        self.rows[place] = row

    def run(self, rounds: int, *, until_free: bool = False) -> list[Row]:
        """Decodes at most `rounds` rounds, or until a row is done; returns the rows it had.

        Under `delayed` also until another plan is wanted.
        """
        least = len(self.rows) if until_free else 1
        if self._in_halves:
            self._run_halves(rounds, least)
        else:
            idle = is_lazy(self.cfg) and not self._plan.drafts
            if idle and self._lookout.is_due(len(self.rows)):
                self._look()
            self._run_whole(self._plan, rounds, least)
        return self.settle()

    def _run_whole(self, plan: Plan, rounds: int, least: int) -> None:
        """Rounds of one plan, in one call."""
        if self._behind and plan.drafts:
            self._state = decode.catch_up(self.models, self._state)
        self._behind = is_lazy(self.cfg) and not plan.drafts
        self._state, log, done = decode.run_plan(
            self.models,
            self._state,
            np.int32(rounds),
            np.int32(least),
            cfg=self.cfg,
            plan=plan,
        )
        outlook = self._state.outlook
        wanted = outlook.plan if outlook is not None and plan.drafts else None
        log, done, self._active, wanted = self._get((log, done, self._state.active, wanted))
        self._lookout.rounds += int(done)
        if wanted is not None:
            self._plan = self._plans[wanted]
            self._lookout = Lookout(self.shape.rows)
        self._take(jax.tree.map(lambda x: x[:done], log))

    def _look(self) -> None:
        """Finds out which plan comes next where nothing was drafted."""
        outlook, quiet = decode.look(
            self.models,
            self._state.outlook,
            self._active,
            self._lookout.newcomers,
            np.int32(self._lookout.rounds),
            cfg=self.cfg,
        )
        self._state = dataclasses.replace(self._state, outlook=outlook)
        wanted, quiet = self._get((outlook.plan, quiet))
        self._plan = self._plans[wanted]
        self._lookout = Lookout(self.shape.rows, int(quiet), len(self.rows))

    def _run_halves(self, rounds: int, least: int) -> None:
        """Rounds whose pass is picked when the drafts are known: two calls each."""
        for _ in range(rounds):
            self._state, proposal, tokens = decode.draft_rows(
                self.models, self._state, self._sps, cfg=self.cfg
            )
            sizes = [plan.capacity for plan in self._plans]
            capacity = sizes[np.searchsorted(sizes, self._get(tokens))]
            self._state, log = decode.verify_rows(
                self.models, self._state, proposal, cfg=self.cfg, capacity=capacity
            )
            log, self._active = self._get((log, self._state.active))
            self._take(log)
            if self._active.sum() < least:
                break

    def run_everything(self, *, refill: bool) -> None:
        """Runs every program that may run, without rounds where that can be.

        Args:
          refill: whether rows may be seated.
        """
        if refill:
            self.reader.read_on(IDLE.token_ids)
            self._seat_in(0, Row(0, IDLE))
        if refill and is_lazy(self.cfg):  # and with the drafter's caches
            self.reader.catch_up()
            self._state, self._behind = decode.catch_up(self.models, self._state), False
            self._seat_in(0, Row(0, IDLE))
        self._run_all_plans()

    def _run_all_plans(self) -> None:
        if self._in_halves:
            for plan in self._plans:
                self._state, proposal, _ = decode.draft_rows(
                    self.models, self._state, self._sps, cfg=self.cfg
                )
                self._state, _ = decode.verify_rows(
                    self.models, self._state, proposal, cfg=self.cfg, capacity=plan.capacity
                )
            return
        if not is_lazy(self.cfg):
            self._run_whole(self._plan, 0, 1)
            return
        self._look()
        for plan in self._plans:  # the first is without drafts
            self._run_whole(plan, 0, 1)

    def _take(self, log: RoundLog) -> None:
        for place, row in self.rows.items():
            row.take(log, place)

    def _get(self, values: T) -> T:
        self.syncs += 1
        return jax.device_get(values)

    def _start(self, rates: np.ndarray | None) -> tuple[DecodeState, First]:
        """Rows behind the prefill, and their first tokens; surplus rows are idle."""
        places = range(self.shape.rows)
        rows = [self.rows[p].request if p in self.rows else IDLE for p in places]
        tokens = np.zeros((self.shape.rows, self.shape.prompt_length), np.int32)
        for row, request in zip(tokens, rows, strict=True):
            row[: len(request.token_ids)] = request.token_ids
        lengths = np.array([len(r.token_ids) for r in rows], np.int32)
        columns = self._columns(rows)
        return _read_prompts(
            self.models, *columns, tokens, lengths, rates, shape=self.shape, cfg=self.cfg
        )

    def _columns(self, requests: Sequence[Request]):
        """Sampling settings, seeds, limits and scales of rows, as arrays."""

        def column(name, dtype):
            return np.array([getattr(r, name) for r in requests], dtype)

        sampling = Sampling(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
        )
        seeds = column("seed", np.uint32), column("stream", np.uint32)
        scale, drafter = None, self.models.drafter_config
        if self._scale is not None and drafter is not None:
            # What is idle needs none, and there may be none for its temperature.
            raw = [1.0] * drafter.block_size
            scales = [raw if r is IDLE else self._scale(r) for r in requests]
            scale = np.array(scales, np.float32)
        return sampling, seeds, column("max_new_tokens", np.int32), scale

    def settle(self) -> list[Row]:
        """Frees the places of rows that are done; returns all rows that were there."""
        rows, kept = list(self.rows.values()), np.ones(self.shape.rows, bool)
        for place, row in [*self.rows.items()]:
            row.end(bool(self._active[place]), self.cfg.stop_token_ids, self.text_of)
            if row.finish_reason is not None:
                del self.rows[place]
                kept[place] = False
        if (self._active & ~kept).any():  # a stop string, of which the device knows nothing
            self._active = self._active & kept
            active = jnp.array(self._active)
            if self.models.mesh is not None:
                active = jax.device_put(active, sharding.replicated(self.models.mesh))
            self._state = dataclasses.replace(self._state, active=active)
        return rows


class Lookout:
    """What the host knows of rounds without drafts since it last looked for another plan.

    Args:
      rows: R.
      quiet: rounds in which nothing else was expected.
      seated: requests that there were.
    """

    def __init__(self, rows: int, quiet: int = 0, seated: int = 0):
        self.rounds = 0
        self.newcomers = np.zeros(rows, bool)
        self._quiet, self._seated = quiet, seated

    def is_due(self, seated: int) -> bool:
        """Whether to look again, with so many requests."""
        return self.rounds >= self._quiet or seated != self._seated


def warm_up(
    models: Models,
    shape: BatchShape,
    cfg: DecodeConfig,
    *,
    refill: bool,
    facts: Facts = NO_FACTS,
) -> float:
    """Compiles what a batch runs, by running it on idle rows; takes seconds, and returns them.

    Args:
      refill: whether rows will be refilled.
    """
    start = time.monotonic()
    batch = Batch(models, shape, cfg, lambda ids: "", [], facts)
    batch.run_everything(refill=refill)
    return time.monotonic() - start


def refills(requests: Sequence[Request], rows: int) -> bool:
    """Whether requests will come in beside others: more than rows, or samples of one prompt."""
    queue = collections.deque(Row(number, request) for number, request in enumerate(requests))
    _distinct(queue, rows)
    return bool(queue)


def _distinct(queue: collections.deque[Row], most: int) -> list[Row]:
    """Takes rows off the queue, up to samples of one prompt: that is read once for all of them."""
    taken: list[Row] = []
    while queue and len(taken) < most:
        if len(queue) > 1 and queue[0].request.token_ids == queue[1].request.token_ids:
            break
        taken.append(queue.popleft())
    return taken


def _of_row(first: First, row: int) -> tuple[int, float | None]:
    logprob = None if first.logprob is None else float(first.logprob[row])
    return int(first.token[row]), logprob


def _tables(
    models: Models, shape: BatchShape, cfg: DecodeConfig, costs: CostTable | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """What a policy knows of costs: rounds a second by tokens of a pass, or by plan."""
    if cfg.policy not in ("causal", "delayed"):
        return None, None
    if costs is None:
        raise InputError(f"policy {cfg.policy!r} needs a cost table")
    require(
        costs.rows == shape.rows,
        f"a cost table of {costs.rows} rows: expected one of {shape.rows}, as many as slots",
    )
    if cfg.policy == "causal":
        return costs.sps(block_size(models, cfg)), None
    return None, costs.rates(plans_of(models, cfg, shape.rows))


def _row_keys(seeds: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jax.vmap(lambda seed, stream: jax.random.fold_in(jax.random.key(seed), stream))(*seeds)


@functools.partial(jax.jit, static_argnames=("shape", "cfg"))
def _read_prompts(models, sampling, seeds, limit, scale, tokens, lengths, rates, *, shape, cfg):
    """The empty state and the prefill as one program: to start a batch is one call."""
    outlook = None
    if rates is not None:
        size = block_size(models, cfg)
        choices = plans_of(models, cfg, shape.rows)
        outlook = plans.create_outlook(shape.rows, size, choices, rates)
    state = create_state(
        models,
        length=shape.length,
        sampling=sampling,
        key=_row_keys(seeds),
        limit=limit,
        scale=scale,
        outlook=outlook,
        lazy=is_lazy(cfg),
    )
    return prefill.prefill(models, state, tokens, lengths, cfg=cfg, chunk=shape.chunk)


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def _seat(models, state, reading, row, lengths, sampling, seeds, limit, scale, *, cfg):
    key = _row_keys(seeds)
    return prefill.seat(models, state, reading, row, lengths, sampling, key, limit, scale, cfg=cfg)
