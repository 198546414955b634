"""A closed loop of requests, which keeps every slot busy, and the figures of what it decoded."""

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
from dspark_jax.state import block_size
from infer.engine import Engine, Run


def closed_loop(engine: Engine, requests: Sequence[Request]) -> Run:
    """Decodes while all slots are busy.

    A slot that is done gets the next request at once. The run ends when the last request would be
    begun, so that no slot was empty before; what the rows have made until then counts. Prefill is
    part of its time, and compiling is not if the engine is warm.
    """
    rows: dict[int, Row] = {}
    left = len(requests)
    begin = time.perf_counter()
    for step in batching.serve(
        engine.pair.models,
        requests,
        engine.shape,
        engine.cfg,
        engine.pair.tokenizer.decode,
        facts=engine.facts,
    ):
        rows |= {row.number: row for row in step}
        left -= sum(row.finish_reason is not None for row in step)
        if left <= engine.shape.rows:
            break
    seconds = time.perf_counter() - begin
    ordered = [rows[number] for number in sorted(rows)]
    return Run(
        [row.request for row in ordered],
        [generation.completion(row, engine.pair, engine.cfg, engine.facts) for row in ordered],
        seconds,
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


def rounds_by_drafts(engine: Engine, completions: Iterable[Completion]) -> dict[int, Rounds]:
    """By drafts k of the round; under `delayed`, where k varies, the config must have `trace`."""
    always = block_size(engine.pair.models, engine.cfg)
    found: dict[int, list[int]] = collections.defaultdict(list)
    for c in completions:
        drafts = [always] * len(c.verified_lengths)
        if engine.cfg.policy == "delayed":
            drafts = [len(block) for block in c.confidence_logits or ()]
        for k, verified in zip(drafts, c.verified_lengths, strict=True):
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
