"""One user on a small machine: drafters at several block lengths, plain decoding, transformers.

    python benchmarks/laptop.py --draft DIR DIR ... --block-sizes 1 3 5 --prompts FILE
                                [--target GGUF] [--hf-python PYTHON] [--json FILE]

Greedy, float32, one row: the prompts are decoded one after the other up to their stop token or the
limit, by all in turn in every repeat; ratios are taken within a repeat. Prefill is part of the
time, and compiling isn't. `generate` of transformers decodes the same prompts, in float32 and
in bfloat16, from a folder that the target's weights are written to for the time of the run.

Then the parts of a round (`parts` says how each is timed), in turn as well; beside each the part of
its time that reading its weights would take at the bandwidth of a jitted sum over a large array,
and, on a CPU, beside the whole round that of all weights at the bandwidth of a copy. More than
100 % is possible where weights stay in the caches.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import core
import jax
import parts

from configs import smollm2
from dspark_jax import batch_shape, generation
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import cli, hf
from dspark_jax.plans import whole
from dspark_jax.request import Request
from dspark_jax.state import Models, block_size
from infer import facts, load, loadtest, requests
from infer.engine import Engine, Run
from infer.summary import compare, mean_accepted_length

PLAIN = "plain"
HF_DTYPES = ("float32", "bfloat16")
PARTS = ("backbone", "lm_head", "head", "verify", "rest")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measures drafters of one target for one user on this machine."""

    target: Path = Path(smollm2.SETTINGS.target)
    draft: tuple[Path, ...] = (EMBEDDED / "smollm2",)
    """Folders of drafters; what tells them apart in their paths are the names of the table."""
    prompts: Path | None = None
    """JSONL file, as for infer.generate; default: those of infer.loadtest."""
    count: int = 8
    """Prompts that are decoded, the first of the file."""
    block_sizes: tuple[int, ...] = ()
    """Drafts a round; each drafter is run at those it was trained for. Default: all of its own."""
    max_new_tokens: int = 128
    repeats: int = 5
    hf_python: Path | None = None
    """Interpreter with torch and transformers: plain decoding by them is measured in turn."""
    json: Path | None = None
    """Write the figures here too."""

    def __post_init__(self):
        sizes = {"--block-sizes": self.block_sizes} if self.block_sizes else {}
        counts = {"--count": [self.count], "--repeats": [self.repeats]}
        parts.check_settings({**counts, **sizes}, self.json, self.hf_python)


def read_prompts(settings: Settings, pair: Pair) -> list[Request]:
    path = settings.prompts
    lines = loadtest.demo_pieces() if path is None else requests.read_lines(path)
    defaults = Request((0,), max_new_tokens=settings.max_new_tokens)
    return requests.build_alike(
        path or Path("prompts"), lines[: settings.count], pair, defaults=defaults
    )


def make_engines(pairs: Mapping[str, Pair], asked: Sequence[Request]) -> dict[str, Engine]:
    """One row for each system, all of one shape."""
    shapes = [batch_shape.plan(pair.models, asked, 1) for pair in pairs.values()]
    shape = max(shapes, key=lambda s: s.length)
    return {
        name: Engine(pair, shape, generation.decode_config(pair.models, asked))
        for name, pair in pairs.items()
    }


def decode_case(
    name: str, engine: Engine, asked: Sequence[Request], last: dict[str, Run]
) -> core.Case:
    """Decoding of all prompts; `last` keeps what came out."""

    def run() -> float:
        last[name] = engine.decode(asked)
        return last[name].tokens / last[name].seconds

    return core.Case(name, run)


def hf_cases(
    settings: Settings, models: Models, asked: Sequence[Request], folder: Path
) -> list[core.Case]:
    """Transformers in each type, on the target's weights, which are written to `folder`."""
    if settings.hf_python is None:
        return []
    cfg, target = models.target_config, models.target
    if cfg.tie_embeddings:
        target = dataclasses.replace(target, lm_head=None)
    hf.save_target(folder, cfg, target)
    python, prompts = settings.hf_python, [list(r.token_ids) for r in asked]
    return [
        core.hf_case(
            python,
            folder,
            prompts,
            settings.max_new_tokens,
            name=f"transformers, {dtype}",
            options=("--dtype", dtype, "--stop"),
        )
        for dtype in HF_DTYPES
    ]


def measure_speeds(
    settings: Settings, engines: Mapping[str, Engine], asked: Sequence[Request]
) -> list[dict[str, Any]]:
    """Speeds of all, their ratios to plain decoding and to the best of transformers."""
    last: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs = hf_cases(settings, engines[PLAIN].pair.models, asked, Path(folder))
        ours = [decode_case(name, engine, asked, last) for name, engine in engines.items()]
        for case in (*ours, *theirs):
            case.run()  # compiles
        speeds = core.in_turn([*ours, *theirs], settings.repeats)
    best = max((speeds[case.name] for case in theirs), key=statistics.median, default=None)
    found = []
    for name, values in speeds.items():
        row: dict[str, Any] = {
            "system": name,
            "tokens_per_second": statistics.median(values),
            "tokens_per_second_by_repeat": values,
            "times_plain": dataclasses.asdict(load.paired_ratio(values, speeds[PLAIN])),
            "times_transformers": None,
            "accepted_length": None,
            "other_completions": None,
        }
        if best is not None:
            row["times_transformers"] = dataclasses.asdict(load.paired_ratio(values, best))
        if name in last:
            row["accepted_length"] = mean_accepted_length(last[name].completions)
            differ = compare(last[name], last[PLAIN])["baseline_mismatches"]
            row["other_completions"] = differ
        found.append(row)
    return found


def round_parts(engine: Engine) -> dict[str, float]:
    """Seconds of the parts of a round, timed once."""
    models, cfg, shape = engine.pair.models, engine.cfg, engine.shape
    drafts = block_size(models, cfg)
    plan = whole(shape.rows, drafts)
    total = facts.measure_costs(models, shape, cfg, [plan]).seconds[plan]
    draft, head = parts.draft_seconds(models, cfg, shape, drafts)
    verify = parts.verify_seconds(models, cfg, shape, drafts)
    found = {"verify": verify, "rest": total - draft - (head or 0.0) - verify, "round": total}
    if head is not None:
        found["head"] = head
    if models.drafter is not None:
        found["lm_head"] = parts.lm_head_seconds(models, shape.rows, drafts)
        found["backbone"] = draft - found["lm_head"]
    return found


def measure_parts(
    engines: Mapping[str, Engine], repeats: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Bandwidths in bytes a second, and the parts of the rounds of all systems: medians.

    What part of the roof is reached is set against the bandwidth of the same repeat.
    """
    measures = {"sum": parts.bandwidth}
    if jax.default_backend() == "cpu":
        measures["copy"] = parts.copy_bandwidth
    rates: dict[str, list[float]] = {name: [] for name in measures}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(repeats):
        for kind, measure in measures.items():
            rates[kind].append(measure())
        for name, engine in engines.items():
            times[name].append(round_parts(engine))
    found = []
    for name, engine in engines.items():
        own, models = times[name], engine.pair.models
        read = parts.weight_bytes(models, block_size(models, engine.cfg))
        roof = {part: part_of_roof(part, n, rates["sum"], own) for part, n in read.items()}
        if "copy" in rates:
            roof["round"] = part_of_roof("round", sum(read.values()), rates["copy"], own)
        seconds = {part: statistics.median(t[part] for t in own) for part in own[0]}
        found.append({"system": name, "seconds": seconds, "weight_bytes": read, "roof": roof})
    return {name: statistics.median(values) for name, values in rates.items()}, found


def part_of_roof(
    part: str, read: float, rates: Sequence[float], times: Sequence[Mapping[str, float]]
) -> float:
    """What of a part's time so many bytes would take at the rates, a repeat each: a median."""
    return statistics.median(read / r / t[part] for r, t in zip(rates, times, strict=True))


def interval(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    if ratio["low"] is None:
        return f"{ratio['mean']:.2f}"
    return f"{ratio['mean']:.2f} ({ratio['low']:.2f}..{ratio['high']:.2f})"


def print_speeds(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"{'':32}{'tokens/s':>10}{'least':>9}{'most':>9}{'accepted':>10}{'differ':>8}"
        f"{'x plain (95 %)':>23}{'x transformers':>23}"
    )
    for row in rows:
        values, accepted = row["tokens_per_second_by_repeat"], row["accepted_length"]
        differ = row["other_completions"]
        print(
            f"{row['system']:32}{row['tokens_per_second']:10.1f}{min(values):9.1f}"
            f"{max(values):9.1f}{'-' if accepted is None else f'{accepted:.2f}':>10}"
            f"{'-' if differ is None else differ:>8}"
            f"{interval(row['times_plain']):>23}{interval(row['times_transformers']):>23}"
        )


def print_parts(rates: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
    rate, copy = (f"{rates.get(name, 0) / 1e9:.1f} GB/s" for name in ("sum", "copy"))
    print(f"a round in ms, and the part of it that reading weights takes at {rate}", end="")
    print(f"; of the whole round, at the {copy} of a copy" if "copy" in rates else "")
    print(f"{'':32}" + "".join(f"{name:>15}" for name in (*PARTS, "round")))

    def cell(row: Mapping[str, Any], part: str) -> str:
        if part not in row["seconds"]:
            return "-"
        ms = f"{1e3 * row['seconds'][part]:.2f}"
        return f"{ms} {row['roof'][part]:4.0%}" if part in row["roof"] else ms

    for row in rows:
        print(f"{row['system']:32}" + "".join(f"{cell(row, p):>15}" for p in (*PARTS, "round")))


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="laptop", description=__doc__ or "")
    plain, pairs = parts.load_systems(
        settings.target, settings.draft, settings.block_sizes, "float32"
    )
    asked = read_prompts(settings, plain)
    engines = make_engines({PLAIN: plain, **pairs}, asked)
    device = jax.devices()[0].device_kind
    print(
        f"{platform.machine()}, {device}, {os.cpu_count()} cores, jax {jax.__version__},"
        f" {date.today()}; {len(asked)} prompts"
    )
    speeds = measure_speeds(settings, engines, asked)
    print_speeds(speeds)
    rates, rounds = measure_parts(engines, settings.repeats)
    print_parts(rates, rounds)
    if settings.json is not None:
        values = {"machine": platform.machine(), "device": device, "jax": jax.__version__}
        values |= {"date": str(date.today()), "settings": dataclasses.asdict(settings)}
        values |= {"speeds": speeds, "bandwidths": rates, "rounds": rounds}
        settings.json.write_text(json.dumps(values, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
