"""Closed loops of requests, which keep every slot busy, and the figures of what they decoded."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.stats

from dspark_jax import batching, generation
from dspark_jax.batching import Row
from dspark_jax.request import Completion, Request
from infer.engine import Engine, Run

TURN = 0.1
"""Seconds that an engine decodes before the next one does."""


def closed_loops(engines: Sequence[Engine], requests: Sequence[Request]) -> list[Run]:
    """Each engine decodes the requests while all of its slots are busy.

    A slot that is done gets the next request at once. All end when one of the engines would begin
    its last request, so that no slot was empty before; what the rows have made until then counts.
    Prefill is part of the time of a run, and compiling is not if the engine is warm.

    The engines take turns of `TURN` seconds: a moment in which the machine is slow hits all alike.
    """
    loops = [_Loop(engine, requests) for engine in engines]
    while not any(loop.done for loop in loops):
        for loop in loops:
            loop.go_on(TURN)
    return [loop.run() for loop in loops]


class _Loop:
    """One engine's requests, decoded a little at a time."""

    def __init__(self, engine: Engine, requests: Sequence[Request]):
        self._engine, self._left = engine, len(requests)
        self._steps = batching.serve(
            engine.pair.models,
            requests,
            engine.shape,
            engine.cfg,
            engine.pair.tokenizer.decode,
            facts=engine.facts,
        )
        self._rows: dict[int, Row] = {}
        self._seconds = 0.0
        self.done = False

    def go_on(self, seconds: float) -> None:
        """Decodes for so long, at least a step, and to the end of that."""
        begin = time.perf_counter()
        for step in self._steps:
            self._rows |= {row.number: row for row in step}
            self._left -= sum(row.finish_reason is not None for row in step)
            self.done = self._left <= self._engine.shape.rows
            if self.done or time.perf_counter() - begin >= seconds:
                break
        self._seconds += time.perf_counter() - begin

    def run(self) -> Run:
        """What has been decoded."""
        pair, cfg, facts = self._engine.pair, self._engine.cfg, self._engine.facts
        rows = [self._rows[number] for number in sorted(self._rows)]
        return Run(
            [row.request for row in rows],
            [generation.completion(row, pair, cfg, facts) for row in rows],
            self._seconds,
        )


def varied(prompts: Sequence[Request], count: int, seed: int) -> list[Request]:
    """So many requests: the prompts in turn, each with a limit of its own, from half of it.

    Rows of one length would all end at once.
    """
    made = []
    for stream, part in enumerate(np.random.default_rng(seed).uniform(0.5, 1, count)):
        request = prompts[stream % len(prompts)]
        limit = max(1, round(part * request.max_new_tokens))
        made.append(dataclasses.replace(request, max_new_tokens=limit, stream=stream))
    return made


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds of rows in which k drafts were made."""

    count: int
    verified: float
    """Mean tokens that the target read in such a round for a row, its anchor included."""


def rounds_by_drafts(completions: Iterable[Completion]) -> dict[int, Rounds]:
    """By drafts k of the round, which varies under `delayed`."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for c in completions:
        for k, verified in zip(c.drafted_lengths, c.verified_lengths, strict=True):
            found[k].append(1 + verified)
    return {k: Rounds(len(n), statistics.fmean(n)) for k, n in sorted(found.items())}


def mean_drafts(rounds: dict[int, Rounds]) -> float | None:
    """Drafts that a round made for a row."""
    count = sum(r.count for r in rounds.values())
    return sum(k * r.count for k, r in rounds.items()) / count if count else None


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times faster one policy is than another, paired by repeat."""

    mean: float
    low: float | None
    """Ends of the 95 % interval; None where one repeat says nothing about it."""
    high: float | None
    by_repeat: tuple[float, ...]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Mean over n repeats of ours / theirs, and its 95 % interval by Student's t, n - 1 degrees."""
    ratios = tuple(a / b for a, b in zip(ours, theirs, strict=True))
    mean, count = statistics.fmean(ratios), len(ratios)
    if count < 2:
        return Ratio(mean, None, None, ratios)
    reach = float(scipy.stats.t.ppf(0.975, count - 1)) * statistics.stdev(ratios) / count**0.5
    return Ratio(mean, mean - reach, mean + reach, ratios)
