"""Throughput and tokens/s per user against concurrency, for every policy.

python -m infer.loadtest --output DIR [--concurrencies 1 2 4 8]

A closed loop: as many slots as requests at once, and a slot that is done gets the next request, of
another length. All policies decode the same requests, in turns of a tenth of a second, so that a
slow moment of the machine hits all alike; every repeat has requests of its own. What the rounds of
the policies cost is measured once for each concurrency. Writes DIR/loadtest.json and two
pictures, and prints a table.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import jax
from tqdm import tqdm

from dspark_jax import batch_shape, generation
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import NO_FACTS, Facts
from dspark_jax.config import InputError, require
from dspark_jax.costs import CostTable
from dspark_jax.generation import Pair
from dspark_jax.io import cli, files
from dspark_jax.request import Request
from dspark_jax.scheduler import Policy
from dspark_jax.state import DecodeConfig, Models, plans_of
from infer import demo, facts, load, load_report, pictures, requests, stages
from infer.engine import Engine, Run
from infer.load_report import Ratio, Result
from infer.models import load_both, require_both
from infer.requests import Line
from infer.settings import COSTED
from infer.summary import mean_accepted_length

PIECES = (1.0, 0.75, 0.5)
"""Parts of the prompts of the package that are prompts of a load."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.loadtest`."""

    output: Path
    """Folder for loadtest.json, throughput.png and concurrency.png, both for a dark page too."""
    target: str | None = None
    """Hugging Face folder or repository id, or GGUF file, of the target; default: the one in the
    package."""
    draft: str | None = None
    """The same of its drafter; default: the one in the package."""
    prompts: Path | None = None
    """JSONL file, as for infer.generate; settings of a line are left alone. Default: pieces of the
    prompts of the package."""
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Requests that are decoded at once, as many as slots."""
    policies: tuple[Literal["none", "fixed", "threshold", "causal", "delayed"], ...] = (
        *("none", "fixed", "threshold"),
        *("causal", "delayed"),
    )
    """Those of infer.generate that are compared."""
    requests_per_slot: int = 4
    """Requests of a repeat, for each slot: enough for the fastest policy, with which it ends."""
    requests: int = 64
    """Least requests of a repeat, so that it is not too short to time where slots are few."""
    max_new_tokens: int = 64
    """Most tokens of a request; each has a limit of its own, from half of it."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    confidence_threshold: float = 0.5
    """Least confidence of a verified draft, in 0..1, for the policy threshold."""
    calibration: Path | None = None
    """What infer.calibrate wrote, for threshold, causal and delayed."""
    block_size: int | None = None
    """Drafts a round, at most what the drafter was trained for, which is the default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    repeats: int = 3
    """Runs of each policy, of which the median counts."""
    ignore_eos: bool = False
    """Go on behind stop tokens, so that all policies make the same number of tokens."""
    seed: int = 0

    def check(self) -> None:
        """Raises `InputError` for what is wrong whatever the models are."""
        for option, values in (
            ("--concurrencies", self.concurrencies),
            ("--policies", self.policies),
        ):
            require(
                0 < len(values) == len(set(values)), f"{option}: expected one or more different"
            )
        lowest = min(self.concurrencies)
        require(lowest >= 1, f"--concurrencies {lowest}: expected whole numbers above 0")
        require(
            self.requests_per_slot >= 2,
            f"--requests-per-slot {self.requests_per_slot}: expected 2 or more, as slots are to be"
            " refilled",
        )
        for name in ("repeats", "requests"):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value}: expected a whole number above 0")
        require_both(self.target, self.draft)
        require(
            0 <= self.confidence_threshold <= 1,
            f"--confidence-threshold {self.confidence_threshold}: expected a number in 0..1",
        )
        self.request.check(vocab_size=1, max_position=2)
        place = self.output
        require(place.parent.is_dir(), f"--output {place}: no such folder as {place.parent}")
        require(not place.exists() or place.is_dir(), f"--output {place}: expected a folder")
        pictures.require_matplotlib()

    def count(self, rows: int) -> int:
        """Requests of a repeat with so many slots."""
        return max(self.requests, self.requests_per_slot * rows)

    @property
    def request(self) -> Request:
        """A request with these settings, without its prompt."""
        names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed")
        return Request(token_ids=(0,), **{name: getattr(self, name) for name in names})


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.loadtest", description=__doc__ or "")
    settings.check()
    kept = f"whole concurrencies are in {settings.output}"
    return cli.until_interrupted(
        lambda: run(settings), lambda: kept if settings.output.exists() else "nothing was written"
    )


def run(settings: Settings) -> None:
    """Measures, and writes what there is after each concurrency."""
    lines = demo_pieces() if settings.prompts is None else requests.read_lines(settings.prompts)
    target, draft, pair = load_both(
        settings.target, settings.draft, settings.dtype, settings.block_size
    )
    asked = build_requests(settings, lines, pair)
    configs = {policy: config(settings, pair.models, asked, policy) for policy in settings.policies}
    scale = None
    if settings.calibration is not None:
        scale = facts.read_scale(settings.calibration, target, draft, pair.models)
    shape = batch_shape.plan(pair.models, asked, max(settings.concurrencies))
    facts.require_memory(
        pair.models, shape, lazy="delayed" in settings.policies, batches=len(settings.policies)
    )

    results: list[Result] = []
    ratios: list[Ratio] = []
    tables: dict[int, CostTable] = {}
    total = len(settings.concurrencies) * settings.repeats
    with tqdm(total=total, unit="repeat", disable=None) as bar:
        for rows in settings.concurrencies:
            bar.set_postfix(concurrency=rows)
            here = dataclasses.replace(shape, rows=rows)
            table = tables[rows] = measure_costs(pair.models, here, [*configs.values()])
            engines = [
                make_engine(pair, here, cfg, Facts(table, scale)) for cfg in configs.values()
            ]
            runs = measure(settings, engines, asked, bar)
            results += [summarise(*x, table) for x in zip(engines, runs, strict=True)]
            ratios = load_report.compare(results)
            write(settings, results, ratios, tables)
            # Executables of this many rows: a process has room for some thousands of them.
            jax.clear_caches()
    print("\n".join(load_report.describe(results, ratios)))
    print(f"{settings.output}: {', '.join(sorted(p.name for p in settings.output.iterdir()))}")


def demo_pieces() -> list[Line]:
    """Prompts of the package, and what is left of them after some of their ends were cut off."""
    texts = [fields.get("prompt") or fields["turns"][0] for fields in demo.PROMPTS]
    pieces = [text[: max(1, int(part * len(text)))] for part in PIECES for text in texts]
    return [Line(n, n, {"prompt": piece}) for n, piece in enumerate(pieces, start=1)]


def build_requests(settings: Settings, lines: Sequence[Line], pair: Pair) -> list[Request]:
    """Requests of all repeats at the highest concurrency; prompts are used in turn.

    Raises:
      InputError: one of the lines cannot be decoded.
    """
    prompts = []
    for line in lines:
        fields = {k: v for k, v in line.fields.items() if k in requests.KINDS}
        prompt = requests.build(
            dataclasses.replace(line, fields=fields), pair, defaults=settings.request
        )
        if prompt.request is None:
            raise InputError(f"{settings.prompts} {prompt.error}")
        prompts.append(prompt.request)
    count = settings.repeats * settings.count(max(settings.concurrencies))
    return load.varied(prompts, count, settings.seed)


def config(
    settings: Settings, models: Models, asked: Sequence[Request], policy: Policy
) -> DecodeConfig:
    """Of a policy."""
    return generation.decode_config(
        models,
        asked,
        policy=policy,
        threshold=settings.confidence_threshold if policy == "threshold" else None,
        ignore_stop=settings.ignore_eos,
    )


def measure_costs(models: Models, shape: BatchShape, configs: Sequence[DecodeConfig]) -> CostTable:
    """Costs of all rounds that one of the policies may run."""
    kinds = sorted({plan for cfg in configs for plan in plans_of(models, cfg, shape.rows)})
    print(f"{shape.rows} rows: timing {len(kinds)} kinds of rounds, then policies", file=sys.stderr)
    return facts.measure_costs(models, shape, configs[0], kinds)


def make_engine(pair: Pair, shape: BatchShape, cfg: DecodeConfig, known: Facts) -> Engine:
    """With what the policy needs to know; plain decoding does not have the drafter at all."""
    if cfg.policy == "none":
        return Engine(pair, shape, cfg).plain()
    weighs = cfg.policy in (*COSTED, "threshold")
    return Engine(pair, shape, cfg, known if weighs else NO_FACTS)


def measure(
    settings: Settings, engines: Sequence[Engine], asked: Sequence[Request], bar: tqdm
) -> list[list[Run]]:
    """Runs of each engine, one a repeat."""
    for engine in engines:
        engine.warm_up(refill=True)
    count = settings.count(engines[0].shape.rows)
    repeats = []
    for repeat in range(settings.repeats):
        own = asked[repeat * count : (repeat + 1) * count]
        repeats.append(load.closed_loops(engines, own))
        bar.update()
    return [list(runs) for runs in zip(*repeats, strict=True)]


def summarise(engine: Engine, runs: Sequence[Run], table: CostTable) -> Result:
    """The figures of a policy; times its drafting and its scheduling."""
    completions = [c for run in runs for c in run.completions]
    rounds = load.rounds_by_drafts(completions)
    models, cfg, shape = engine.pair.models, engine.cfg, engine.shape
    speeds = tuple(run.tokens / run.seconds for run in runs)
    verified = [1 + n for c in completions for n in c.verified_lengths]
    return Result(
        concurrency=shape.rows,
        policy=cfg.policy,
        tokens_per_second=statistics.median(speeds),
        tokens_per_second_by_repeat=speeds,
        tokens_per_second_per_user=statistics.median(speeds) / shape.rows,
        tokens=sum(run.tokens for run in runs),
        verified_tokens_per_request=statistics.fmean(verified) if verified else None,
        drafts_per_round=load.mean_drafts(rounds),
        mean_accepted_length=mean_accepted_length(completions),
        time_shares=stages.shares(
            stages.seconds(
                rounds,
                table,
                {k: stages.draft_seconds(models, cfg, shape, k) for k in rounds},
                {k: stages.schedule_seconds(models, cfg, shape.rows, table, k) for k in rounds},
            )
        ),
    )


def write(
    settings: Settings,
    results: Sequence[Result],
    ratios: Sequence[Ratio],
    tables: dict[int, CostTable],
) -> None:
    """The folder of results: each file whole or not at all."""
    values: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": date.today().isoformat(),
        "settings": dataclasses.asdict(settings),
        "results": [dataclasses.asdict(r) for r in results],
        "delayed_to_best_other": [dataclasses.asdict(r) for r in ratios],
        "costs": [
            {"concurrency": rows, "drafts": p.drafts, "capacity": p.capacity, "seconds": seconds}
            for rows, table in tables.items()
            for p, seconds in sorted(table.seconds.items())
        ],
    }
    settings.output.mkdir(exist_ok=True)
    path = settings.output / "loadtest.json"
    files.write_whole(path, json.dumps(values, indent=2, default=str) + "\n")
    for name, draw in load_report.drawings(results):
        pictures.save(settings.output / f"{name}.png", draw)


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
