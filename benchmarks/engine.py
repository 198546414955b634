"""What scheduling costs and saves: the scheduler, pruned rounds, compiles, waits of the host.

    python benchmarks/engine.py [--target DIR --draft DIR] [--slots N] [--json FILE]

The scheduler is timed alone, on random confidences. A pruned round is one whose pass has room for
fewer tokens than were drafted: what it saves is measured in a batch that decodes real prompts, and
set against what the cost table says it would save. Then many rounds of changing length are run,
for every policy that prunes, with all compilations and waits counted.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import parts

from dspark_jax import batch_shape, batching, costs, decode, generation, scheduler
from dspark_jax.batching import Batch, Facts
from dspark_jax.costs import CostTable, RoundTimer
from dspark_jax.generation import EMBEDDED
from dspark_jax.io import cli
from dspark_jax.plans import Plan
from dspark_jax.request import Request
from dspark_jax.row import Row
from dspark_jax.state import DecodeConfig, block_size, plans_of
from infer.evaluation.estimates import RESAMPLES, Estimate
from train import corpus

COMPILES = "/jax/core/compile/backend_compile_duration"
PROMPT = 32
CONTEXT = 128
"""Tokens of a row whose rounds are timed."""
WINDOW, WINDOWS = 5, 9
"""Rounds that are timed together, and how often in a batch."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measures the engine on this machine."""

    target: Path = EMBEDDED / "target"
    draft: Path = EMBEDDED / "drafter"
    slots: int = 16
    temperature: float = 1.0
    rounds: int = 1000
    """Rounds in which compiles and waits are counted."""
    repeats: int = 25
    json: Path | None = None
    """Write the figures here too."""

    def __post_init__(self):
        parts.check_settings(
            {"--slots": [self.slots], "--rounds": [self.rounds], "--repeats": [self.repeats]},
            self.json,
        )


def schedule_seconds(rows: int, size: int, repeats: int) -> dict[str, float]:
    """Median time of one call of the scheduler, by policy; many calls run in one program."""
    rng = np.random.default_rng(0)
    confidence = jnp.array(rng.uniform(0.5, 1, (64, rows, size)), jnp.float32)
    sps = jnp.array(1 / (1 + 0.01 * np.arange(rows * (1 + size) + 1)), jnp.float32)
    found = {}
    for policy in ("threshold", "causal", "delayed"):

        @jax.jit
        def calls(confidence, policy=policy):
            one = lambda c: scheduler.schedule(  # noqa: E731
                c, sps, policy=policy, threshold=0.7, capacity=rows * (1 + size) // 2
            )
            return jax.lax.map(one, confidence)

        jax.block_until_ready(calls(confidence))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(calls(confidence))
            times.append((time.perf_counter() - start) / len(confidence))
        found[policy] = statistics.median(times)
    return found


@dataclasses.dataclass(frozen=True)
class Bench:
    """A pair, prompts for it, and what its rounds cost."""

    pair: generation.Pair
    settings: Settings
    shape: batch_shape.BatchShape
    prompts: list[list[int]]
    table: CostTable

    def timer(self) -> RoundTimer:
        """What the table is measured with."""
        models, shape = self.pair.models, self.shape
        cfg = config(self.pair, self.settings)
        return RoundTimer(models, cfg, rows=shape.rows, length=shape.length, context=CONTEXT)

    def batch(self, policy: str, table: CostTable) -> Batch:
        """A batch of prompts that is long at its work."""
        models = self.pair.models
        requests = [
            Request(
                prompt,
                max_new_tokens=self.shape.length - PROMPT - 8,
                temperature=self.settings.temperature,
                stream=number,
            )
            for number, prompt in enumerate(self.prompts)
        ]
        cfg = generation.decode_config(models, requests, policy=policy, ignore_stop=True)
        rows = [Row(number, request) for number, request in enumerate(requests)]
        return Batch(models, self.shape, cfg, self.pair.tokenizer.decode, rows, Facts(table))

    def pinned(self, plan: Plan) -> Batch:
        """A batch that stays with one plan, behind its first few rounds."""
        pinned = {p: 1.0 if p == plan else 1e9 for p in self.table.seconds}
        batch = self.batch("delayed", CostTable(self.table.rows, pinned))
        batch.run(WINDOW)
        return batch


def make_bench(settings: Settings) -> Bench:
    pair = generation.load(settings.target, settings.draft)
    text = "\n".join(corpus.stdlib_texts(held_out=True))
    ids = np.array(pair.tokenizer.encode(text))
    starts = np.random.default_rng(0).integers(0, len(ids) - PROMPT, settings.slots)
    prompts = [ids[s : s + PROMPT].tolist() for s in starts]
    cfg = config(pair, settings)
    # Room for the rounds whose savings are measured, however many tokens they accept.
    block = 1 + block_size(pair.models, cfg)
    room = PROMPT + block * WINDOW * (WINDOWS + 2)
    shape = batch_shape.BatchShape(settings.slots, max(512, room), PROMPT)
    table = costs.measure(
        pair.models,
        cfg,
        plans_of(pair.models, cfg, shape.rows),
        rows=shape.rows,
        length=shape.length,
        context=CONTEXT,
        repeats=9,
    )
    return Bench(pair, settings, shape, prompts, table)


def config(pair: generation.Pair, settings: Settings) -> DecodeConfig:
    request = Request([0], temperature=settings.temperature)
    return generation.decode_config(pair.models, [request], policy="delayed", ignore_stop=True)


def savings(bench: Bench) -> dict[str, dict[str, float | None]]:
    """Seconds saved a round against the whole block: by the table, and in a batch that decodes.

    All are timed in turn, a few rounds each, and differences taken of neighbours: a slow second of
    the machine hits all. The intervals (95 %) are of repeats that are drawn anew.
    """
    whole = max(bench.table.seconds)
    pruned = [p for p in bench.table.seconds if p.drafts == whole.drafts and p != whole]
    timer = bench.timer()
    calls = {plan: timer.calibrate(plan) for plan in (whole, *pruned)}
    found: dict[str, list[list[dict[Plan, float]]]] = {"table": [], "realised": []}
    for repeat in range(1 + bench.settings.repeats):
        batches = {plan: bench.pinned(plan) for plan in (whole, *pruned)}
        each = [
            (
                {plan: timer.seconds_a_round(plan, n) for plan, n in calls.items()},
                {plan: seconds_a_round(batch) for plan, batch in batches.items()},
            )
            for _ in range(WINDOWS)
        ]
        if repeat > 0:  # the first compiles
            for name, values in zip(found, zip(*each, strict=True), strict=True):
                found[name].append(list(values))
    return {
        f"{plan.capacity} of {whole.capacity} tokens": {
            f"{name}_ms": 1e3 * saved(repeats, whole, plan) for name, repeats in found.items()
        }
        | part_saved(found["realised"], found["table"], whole, plan)
        for plan in pruned
    }


def seconds_a_round(batch: Batch) -> float:
    """Of the next few rounds."""
    row = next(iter(batch.rows.values()))
    before = len(row.verified_lengths)
    start = time.perf_counter()
    batch.run(WINDOW)
    return (time.perf_counter() - start) / (len(row.verified_lengths) - before)


def saved(repeats: Sequence[Sequence[dict[Plan, float]]], whole: Plan, plan: Plan) -> float:
    """Median over all windows of all repeats of what `plan` needs less than `whole`."""
    return statistics.median(each[whole] - each[plan] for windows in repeats for each in windows)


def part_saved(
    realised: Sequence[Sequence[dict[Plan, float]]],
    table: Sequence[Sequence[dict[Plan, float]]],
    whole: Plan,
    plan: Plan,
) -> dict[str, float | None]:
    """What is realised of the table's saving, and its interval.

    None for all where the saving isn't clearly above 0: nothing could be said of a part of it.
    """
    size = len(table)
    drawn = np.random.default_rng(0).integers(0, size, (RESAMPLES, size)).tolist()
    saves = [
        [saved([values[n] for n in numbers], whole, plan) for values in (realised, table)]
        for numbers in (range(size), *drawn)
    ]
    real, tabled = np.array(saves).T
    if Estimate.of(tabled).low <= 0:
        return dict.fromkeys(("part", "low", "high"))
    part = Estimate.of(real / tabled)
    return {"part": float(part.value), "low": float(part.low), "high": float(part.high)}


@contextmanager
def counted_compiles() -> Generator[list[str], None, None]:
    """Names of what is compiled inside."""
    seen: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == COMPILES:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def changing_rounds(bench: Bench, policy: str) -> dict[str, float]:
    """Many rounds: what was compiled behind the warm-up, waits of the host, lengths that came."""
    cfg = bench.batch(policy, bench.table).cfg
    facts = Facts(bench.table)
    batching.warm_up(bench.pair.models, bench.shape, cfg, refill=False, facts=facts)
    rounds, syncs, lengths = 0, 0, collections.Counter()
    with counted_compiles() as compiled:
        while rounds < bench.settings.rounds:
            batch = bench.batch(policy, bench.table)
            before = batch.syncs
            while batch.rows and rounds < bench.settings.rounds:
                known = {row.number: len(row.verified_lengths) for row in batch.rows.values()}
                rows = batch.run(decode.ROUNDS_PER_CALL)
                new = [row.verified_lengths[known[row.number] :] for row in rows]
                rounds += max(map(len, new))
                lengths.update(n for row in new for n in row)
            syncs += batch.syncs - before
    return {
        "rounds": rounds,
        "compiles": len(compiled),
        "syncs_a_round": syncs / rounds,
        "lengths": len(lengths),
        "mean_verified_length": sum(n * c for n, c in lengths.items()) / lengths.total(),
    }


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="engine", description=__doc__ or "")
    bench, device = make_bench(settings), jax.devices()[0].device_kind
    print(f"{platform.machine()}, {device}, jax {jax.__version__}, {date.today()}")
    times = schedule_seconds(256, 15, settings.repeats)
    print("scheduler, 256 rows of 15 drafts: " + ", ".join(
        f"{policy} {1e3 * seconds:.3f} ms" for policy, seconds in times.items()
    ))  # fmt: skip
    print("\n".join(costs.describe(bench.table)))
    saved = savings(bench)
    for name, values in saved.items():
        print(
            f"pruned to {name}: {values['realised_ms']:.3f} ms saved a round of"
            f" {values['table_ms']:.3f} by the table",
            end="",
        )
        known = values["part"] is not None
        print(f", {values['part']:.0%} ({values['low']:.0%}..{values['high']:.0%})" * known)
    counts = {policy: changing_rounds(bench, policy) for policy in ("causal", "delayed")}
    for policy, values in counts.items():
        print(
            f"{policy}: {values['rounds']} rounds, {values['compiles']} compiles,"
            f" {values['syncs_a_round']:.3f} waits a round, {values['lengths']} verified lengths,"
            f" {values['mean_verified_length']:.2f} in the mean"
        )
    if settings.json is not None:
        figures = {
            "device": device,
            "jax": jax.__version__,
            "date": str(date.today()),
            "scheduler_seconds": times,
            "costs": [
                dataclasses.asdict(p) | {"seconds": s} for p, s in bench.table.seconds.items()
            ],
            "savings": saved,
            "rounds": counts,
        }
        settings.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
