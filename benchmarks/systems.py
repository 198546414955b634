"""Several drafters of one target against the number of rows: parts of a round, and throughput.

    python benchmarks/systems.py --target DIR --draft DIR DIR ... [--prompts FILE] [--json FILE]

Plain decoding and all drafters decode the same requests, in turn in every repeat, so that a slow
minute of the machine hits all alike; every repeat has requests of its own. As many slots as rows
are kept busy, and the run ends when the last request would begin (`infer.load.closed_loop`): its
time holds prefill and rounds, and no compiling. Accepted lengths are those of all repeats.

A whole round is that of the cost table, with all rows half full; drafting, the sequential head and
scheduling are timed apart (`parts`, `infer.stages`), and the rest of the round is verifying, with
the commit and all else. Where rounds differ, all are means over those that were run. A drafter
without confidences decodes with the policy `fixed` whatever was asked for.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import jax
import parts
import tyro

from dspark_jax import batching, generation
from dspark_jax.batching import NO_FACTS, BatchShape, Facts
from dspark_jax.costs import CostTable
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.request import Request
from dspark_jax.state import plans_of
from infer import facts, load, loadtest, requests, stages
from infer.engine import Engine, Run
from infer.settings import COSTED
from infer.summary import mean_accepted_length

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measures drafters of one target on this machine."""

    target: Path = EMBEDDED / "target"
    draft: tuple[Path, ...] = (EMBEDDED / "drafter",)
    """Folders of drafters, whose names are those of the table."""
    prompts: Path | None = None
    """JSONL file, as for infer.generate; default: those of infer.loadtest."""
    rows: tuple[int, ...] = (1, 4, 16, 64)
    block_sizes: tuple[int, ...] = ()
    """Drafts a round; each drafter is run at those it was trained for. Default: all of its own."""
    policy: Literal["fixed", "causal", "delayed"] = "fixed"
    requests_per_row: int = 3
    requests: int = 24
    """Least requests of a run, so that it isn't too short to time where rows are few."""
    max_new_tokens: int = 64
    """Most tokens of a request; each has a limit of its own, from half of it."""
    temperature: float = 0.0
    """0 is greedy."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    ignore_eos: bool = False
    """Go on behind stop tokens."""
    repeats: int = 5
    seed: int = 0
    json: Path | None = None
    """Write the figures here too."""


def read_prompts(settings: Settings, pair: Pair) -> list[Request]:
    """The prompts, with what was asked for in the command line."""
    path = settings.prompts
    lines = loadtest.demo_pieces() if path is None else requests.read_lines(path)
    defaults = Request(
        (0,),
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    return requests.build_alike(path or Path("prompts"), lines, pair, defaults=defaults)


def make_engine(
    settings: Settings, pair: Pair, shape: BatchShape, asked: Sequence[Request]
) -> tuple[Engine, CostTable]:
    """With its policy and what that must know, and the costs of the rounds that it may run."""
    models = pair.models
    drafter = models.drafter_config
    policy = "none"
    if drafter is not None:
        policy = settings.policy if drafter.confidence_head else "fixed"
    cfg = generation.decode_config(
        models,
        asked,
        policy=policy,
        ignore_stop=settings.ignore_eos,
        trace=policy == "delayed",
    )
    table = facts.measure_costs(models, shape, cfg, plans_of(models, cfg, shape.rows))
    known = Facts(table) if policy in COSTED else NO_FACTS
    return Engine(pair, shape, cfg, known), table


def decode_in_turn(
    engines: Mapping[str, Engine], asked: Sequence[Request], repeats: int
) -> dict[str, list[Run]]:
    """A run of every engine in every repeat, each on the repeat's part of the requests."""
    for engine in engines.values():
        engine.warm_up(refill=True)
    count = len(asked) // repeats
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for repeat in range(repeats):
        own = asked[repeat * count : (repeat + 1) * count]
        for name, engine in engines.items():
            runs[name].append(load.closed_loop(engine, own))
    return runs


def summarise(
    engine: Engine, table: CostTable, runs: Sequence[Run], plain: Sequence[Run]
) -> dict[str, Any]:
    """The figures of a system, seconds of the parts of its round among them."""
    models, cfg, shape = engine.pair.models, engine.cfg, engine.shape
    completions = [c for run in runs for c in run.completions]
    rounds = load.rounds_by_drafts(engine, completions)
    mean = stages.seconds(
        rounds,
        table,
        {k: stages.draft_seconds(models, cfg, shape, k) for k in rounds},
        {k: stages.schedule_seconds(models, cfg, shape.rows, table, k) for k in rounds},
    )
    head = None
    if parts.without_head(models) is not None:
        each = {k: parts.head_seconds(models, cfg, shape, k) or 0.0 for k in rounds}
        total = sum(r.count for r in rounds.values())
        head = sum(each[k] * r.count for k, r in rounds.items()) / total
    speeds = [run.tokens / run.seconds for run in runs]
    return {
        "rows": shape.rows,
        "policy": cfg.policy,
        "seconds": {
            "draft": mean.draft - (head or 0.0),
            "head": head,
            "schedule": mean.schedule,
            "verify": mean.verify,
        },
        "drafts_a_round": load.mean_drafts(rounds),
        "accepted_length": mean_accepted_length(completions),
        "tokens": sum(run.tokens for run in runs),
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_by_repeat": speeds,
        "times_plain": dataclasses.asdict(
            load.paired_ratio(speeds, [run.tokens / run.seconds for run in plain])
        ),
    }


def print_row(name: str, found: Mapping[str, Any]) -> None:
    seconds, ratio = found["seconds"], found["times_plain"]
    times = (*seconds.values(), sum(s or 0.0 for s in seconds.values()))
    accepted, interval = found["accepted_length"], "-"
    if ratio["low"] is not None:
        interval = f"{ratio['low']:.2f}..{ratio['high']:.2f}"
    print(
        f"{found['rows']:4} {name:32}{found['policy']:>8}"
        + "".join(f"{'-' if s is None else f'{1e3 * s:.2f}':>9}" for s in times)
        + f"{'-' if accepted is None else f'{accepted:.2f}':>10}"
        f"{found['tokens_per_second']:10,.1f}{ratio['mean']:9.2f}{interval:>13}",
        flush=True,
    )


def main(settings: Settings) -> None:
    plain, pairs = parts.load_systems(
        settings.target, settings.draft, settings.block_sizes, settings.dtype
    )
    prompts = read_prompts(settings, plain)
    systems = {PLAIN: plain, **pairs}
    shapes = [batching.plan(pair.models, prompts, 1) for pair in systems.values()]
    device = jax.devices()[0].device_kind
    print(f"{platform.machine()}, {device}, jax {jax.__version__}, {date.today()}")
    print(f"{settings.dtype}, temperature {settings.temperature}; a round in ms")
    columns = ("draft", "head", "schedule", "verify", "round")
    print(
        f"{'rows':>4} {'':32}{'policy':>8}"
        + "".join(f"{name:>9}" for name in columns)
        + f"{'accepted':>10}{'tokens/s':>10}{'x plain':>9}{'95 %':>13}"
    )
    figures = []
    for rows in settings.rows:
        count = settings.repeats * max(settings.requests, settings.requests_per_row * rows)
        asked = load.varied(prompts, count, settings.seed)
        shape = dataclasses.replace(max(shapes, key=lambda s: s.length), rows=rows)
        made = {name: make_engine(settings, pair, shape, asked) for name, pair in systems.items()}
        engines = {name: engine for name, (engine, _) in made.items()}
        runs = decode_in_turn(engines, asked, settings.repeats)
        for name, (engine, table) in made.items():
            found = summarise(engine, table, runs[name], runs[PLAIN])
            print_row(name, found)
            figures.append({"system": name} | found)
        # Executables of this many rows: a process has room for some thousands of them.
        jax.clear_caches()
    if settings.json is not None:
        values = {"machine": platform.machine(), "device": device, "jax": jax.__version__}
        values |= {"date": str(date.today()), "settings": dataclasses.asdict(settings)}
        values |= {"systems": figures}
        settings.json.write_text(json.dumps(values, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
