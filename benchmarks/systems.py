"""Several drafters of one target against the number of rows: parts of a round, and throughput.

    python benchmarks/systems.py --target DIR --draft DIR DIR ... [--prompts FILE] [--json FILE]

Plain decoding and all drafters decode the same requests, in short turns, so that a slow moment of
the machine hits all alike; every repeat has requests of its own. As many slots as rows are kept
busy, and a repeat ends when the fastest would begin its last request (`infer.load.closed_loops`):
times hold prefill and rounds, and no compiling. Accepted lengths are those of all repeats.

A whole round is that of the cost table, with all rows half full; drafting, the sequential head and
scheduling are timed apart (`parts`, `infer.stages`), and the rest of the round is verifying, with
the commit and all else. All systems are timed in turn, as often as there are repeats; medians.
Where rounds differ, the times are means over those that were run. The head comes with the
confidences where the policy looks at them. A drafter without them decodes with the policy `fixed`
whatever was asked for.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import jax
import parts

from dspark_jax import batch_shape, generation
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import Facts
from dspark_jax.costs import CostTable
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import cli
from dspark_jax.request import Request
from dspark_jax.state import plans_of
from infer import facts, load, loadtest, requests, stages
from infer.engine import Engine, Run
from infer.settings import COSTED
from infer.summary import mean_accepted_length

PLAIN = "plain"
STAGES = ("draft", "head", "schedule", "verify")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measures drafters of one target on this machine."""

    target: Path = EMBEDDED / "target"
    draft: tuple[Path, ...] = (EMBEDDED / "drafter",)
    """Folders of drafters; what tells them apart in their paths are the names of the table."""
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

    def __post_init__(self):
        sizes = {"--block-sizes": self.block_sizes} if self.block_sizes else {}
        counts = {"--rows": self.rows, "--repeats": [self.repeats]}
        parts.check_settings({**counts, **sizes}, self.json)


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
) -> Engine:
    """With its policy and what that must know."""
    models, policy = pair.models, "none"
    if models.drafter_config is not None:
        policy = settings.policy if models.drafter_config.confidence_head else "fixed"
    cfg = generation.decode_config(
        models,
        asked,
        policy=policy,
        ignore_stop=settings.ignore_eos,
    )
    engine = Engine(pair, shape, cfg)
    if policy not in COSTED:
        return engine
    return dataclasses.replace(engine, facts=Facts(measure_costs(engine)))


def measure_costs(engine: Engine) -> CostTable:
    """Of the rounds that it may run."""
    models, cfg, shape = engine.pair.models, engine.cfg, engine.shape
    return facts.measure_costs(models, shape, cfg, plans_of(models, cfg, shape.rows))


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
        found = load.closed_loops([*engines.values()], own)
        for name, run in zip(engines, found, strict=True):
            runs[name].append(run)
    return runs


def stage_seconds(engine: Engine, runs: Sequence[Run]) -> dict[str, float]:
    """Seconds of the stages of a round, in the mean over those of the runs; timed once."""
    models, cfg, shape = engine.pair.models, engine.cfg, engine.shape
    rounds = load.rounds_by_drafts([c for run in runs for c in run.completions])
    table = measure_costs(engine)
    draft = {k: parts.draft_seconds(models, cfg, shape, k) for k in rounds}
    mean = stages.seconds(
        rounds,
        table,
        {k: bare + (head or 0.0) for k, (bare, head) in draft.items()},
        {k: stages.schedule_seconds(models, cfg, shape.rows, table, k) for k in rounds},
    )
    heads = [(head, rounds[k].count) for k, (_, head) in draft.items() if head is not None]
    found = {"verify": mean.verify}
    if models.drafter is not None:
        found |= {"draft": mean.draft, "schedule": mean.schedule}
    if heads:
        found["head"] = sum(s * n for s, n in heads) / sum(r.count for r in rounds.values())
        found["draft"] -= found["head"]
    return found


def summarise(
    engine: Engine,
    runs: Sequence[Run],
    plain: Sequence[Run],
    timed: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """The figures of a system; `timed` are its stages, as often as they were timed."""
    completions = [c for run in runs for c in run.completions]
    speeds = [run.tokens / run.seconds for run in runs]
    return {
        "rows": engine.shape.rows,
        "policy": engine.cfg.policy,
        "seconds": {stage: statistics.median(t[stage] for t in timed) for stage in timed[0]},
        "drafts_a_round": load.mean_drafts(load.rounds_by_drafts(completions)),
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
    times = (*map(seconds.get, STAGES), sum(seconds.values()))
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


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="systems", description=__doc__ or "")
    plain, pairs = parts.load_systems(
        settings.target, settings.draft, settings.block_sizes, settings.dtype
    )
    prompts = read_prompts(settings, plain)
    systems = {PLAIN: plain, **pairs}
    shapes = [batch_shape.plan(pair.models, prompts, 1) for pair in systems.values()]
    device = jax.devices()[0].device_kind
    print(f"{platform.machine()}, {device}, jax {jax.__version__}, {date.today()}")
    print(f"{settings.dtype}, temperature {settings.temperature}; a round in ms")
    print(
        f"{'rows':>4} {'':32}{'policy':>8}"
        + "".join(f"{name:>9}" for name in (*STAGES, "round"))
        + f"{'accepted':>10}{'tokens/s':>10}{'x plain':>9}{'95 %':>13}"
    )
    figures = []
    for rows in settings.rows:
        count = settings.repeats * max(settings.requests, settings.requests_per_row * rows)
        asked = load.varied(prompts, count, settings.seed)
        shape = dataclasses.replace(max(shapes, key=lambda s: s.length), rows=rows)
        engines = {
            name: make_engine(settings, pair, shape, asked) for name, pair in systems.items()
        }
        runs = decode_in_turn(engines, asked, settings.repeats)
        timed: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for _ in range(settings.repeats):
            for name, engine in engines.items():
                timed[name].append(stage_seconds(engine, runs[name]))
        for name, engine in engines.items():
            found = summarise(engine, runs[name], runs[PLAIN], timed[name])
            print_row(name, found)
            figures.append({"system": name} | found)
        # Executables of this many rows: a process has room for some thousands of them.
        jax.clear_caches()
    if settings.json is not None:
        values = {"machine": platform.machine(), "device": device, "jax": jax.__version__}
        values |= {"date": str(date.today()), "settings": dataclasses.asdict(settings)}
        values |= {"systems": figures}
        settings.json.write_text(json.dumps(values, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
