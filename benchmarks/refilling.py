"""Rows that are refilled against static batches: the same requests, the same engine.

    python benchmarks/refilling.py [--requests N] [--slots N] [--policy P] [--json FILE]

Requests have mixed prompts, temperatures and limits. Refilled, a row that is done gets the next
request at once; in static batches as many requests as there are slots are decoded to the end before
the next ones come. Greedy requests are decoded one by one as well, and must have the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import parts

from dspark_jax import batch_shape, batching, generation
from dspark_jax.batch_shape import BatchShape
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import cli
from dspark_jax.request import Request
from dspark_jax.row import Row
from dspark_jax.state import DecodeConfig
from train import corpus


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measures what refilling gains on this machine."""

    target: Path = EMBEDDED / "target"
    draft: Path = EMBEDDED / "drafter"
    requests: int = 500
    slots: int = 16
    policy: Literal["none", "fixed", "threshold"] = "fixed"
    repeats: int = 5
    seed: int = 0
    json: Path | None = None
    """Write the figures here too."""

    def __post_init__(self):
        parts.check_settings(
            {"--requests": [self.requests], "--slots": [self.slots], "--repeats": [self.repeats]},
            self.json,
        )


def make_requests(pair: Pair, settings: Settings) -> list[Request]:
    """Prompts of 1 to 128 tokens of held-out text, limits from 1 to 128, temperature 0, .7 or 1."""
    rng = np.random.default_rng(settings.seed)
    ids = pair.tokenizer.encode("\n".join(corpus.stdlib_texts(held_out=True)))
    made = []
    for stream in range(settings.requests):
        length, limit = (int(n) for n in rng.integers(1, 129, 2))
        start = int(rng.integers(0, len(ids) - length))
        prompt, temperature = ids[start : start + length], float(rng.choice([0.0, 0.7, 1.0]))
        made.append(Request(prompt, max_new_tokens=limit, temperature=temperature, stream=stream))
    return made


@dataclasses.dataclass(frozen=True)
class Bench:
    """A pair, and the one shape and configuration in which all requests are decoded."""

    pair: Pair
    shape: BatchShape
    cfg: DecodeConfig

    def rows(self, requests: Sequence[Request]) -> Iterator[Row]:
        """Rows of requests, as they are done."""
        for step in batching.serve(
            self.pair.models, requests, self.shape, self.cfg, self.pair.tokenizer.decode
        ):
            yield from (row for row in step if row.finish_reason is not None)

    def refilled(self, requests: Sequence[Request]) -> list[list[int]]:
        """Tokens of each request."""
        return [row.token_ids for row in sorted(self.rows(requests), key=lambda row: row.number)]

    def static(self, requests: Sequence[Request]) -> list[list[int]]:
        size = self.shape.rows
        parts = [requests[i : i + size] for i in range(0, len(requests), size)]
        return [tokens for part in parts for tokens in self.refilled(part)]


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="refilling", description=__doc__ or "")
    pair = generation.load(settings.target, settings.draft)
    device = jax.devices()[0].device_kind
    print(f"{platform.machine()}, {device}, jax {jax.__version__}, {date.today()}")
    requests = make_requests(pair, settings)
    cfg = generation.decode_config(
        pair.models,
        requests,
        policy=settings.policy,
        threshold=0.5 if settings.policy == "threshold" else None,
    )
    bench = Bench(pair, batch_shape.plan(pair.models, requests, settings.slots), cfg)
    batching.warm_up(pair.models, bench.shape, cfg, refill=True)

    speeds: dict[str, list[float]] = {"refilled": [], "static": []}
    tokens: list[list[int]] = []
    for _ in range(settings.repeats):
        for name, decode in (("refilled", bench.refilled), ("static", bench.static)):
            start = time.perf_counter()
            found = decode(requests)
            speeds[name].append(sum(map(len, found)) / (time.perf_counter() - start))
            tokens = found if name == "refilled" else tokens
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    for name, own in speeds.items():
        print(f"{name}: {statistics.median(own):,.0f} tokens/s")
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")

    greedy = [number for number, request in enumerate(requests) if request.temperature == 0]
    alone = Bench(pair, dataclasses.replace(bench.shape, rows=1), cfg)
    differ = [n for n in greedy if alone.refilled([requests[n]]) != [tokens[n]]]
    print(
        f"{len(greedy)} greedy requests, {len(differ)} with other tokens than alone {differ or ''}"
    )
    if settings.json is not None:
        figures = {
            **{"device": device, "jax": jax.__version__, "date": str(date.today())},
            "settings": dataclasses.asdict(settings),
            "tokens_per_second": speeds,
            "ratios": ratios,
            "greedy": len(greedy),
            "greedy_that_differ": differ,
        }
        settings.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
