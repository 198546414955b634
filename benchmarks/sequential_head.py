"""What the sequential head costs: its share of a whole round, by block length.

    python benchmarks/sequential_head.py [--shape qwen3_4b --rows 128 --dtype bfloat16]

Whole rounds (draft, schedule, verify, commit) of a target with random weights are timed with each
head and without one, in turn in every repeat. The share of a head is what its rounds take longer,
as a part of them. The confidence head reads the hidden state alone, so that all have the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import parts

from dspark_jax import costs, generation
from dspark_jax import params as parameters
from dspark_jax.config import DrafterConfig, HeadKind, Rope, TargetConfig
from dspark_jax.drafters import dspark
from dspark_jax.io import cli
from dspark_jax.plans import whole
from dspark_jax.request import Request
from dspark_jax.state import Models, cache_length
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target

QWEN3_4B = TargetConfig(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope(theta=1e6),
    tie_embeddings=True,
    max_position=40960,
)
SMALL = TargetConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
SHAPES = {"qwen3_4b": (QWEN3_4B, (1, 9, 17, 25, 33), 5), "small": (SMALL, (1, 3, 6), 2)}
"""Target, layers that are tapped, layers of the drafter."""
KINDS: tuple[HeadKind, ...] = ("none", "vanilla", "rnn")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Times the sequential head on this machine."""

    shape: Literal["qwen3_4b", "small"] = "small"
    """Of the target; qwen3_4b takes about 30 GB in bfloat16 with 128 rows."""
    rows: int = 16
    block_sizes: tuple[int, ...] = (3, 7, 11, 15)
    context: int = 256
    """Tokens that each row holds."""
    rank: int = 256
    """r, of the heads."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    repeats: int = 7
    json: Path | None = None
    """Write the figures here too."""

    def __post_init__(self):
        parts.check_settings(
            {"--block-sizes": self.block_sizes, "--rows": [self.rows], "--repeats": [self.repeats]},
            self.json,
        )


def make_models(settings: Settings, target: Target, size: int, head: HeadKind) -> Models:
    """The target with a drafter of random weights."""
    cfg, taps, layers = SHAPES[settings.shape]
    drafter_config = DrafterConfig.for_target(
        cfg,
        num_layers=layers,
        block_size=size,
        mask_token_id=cfg.vocab_size - 1,
        target_layer_ids=taps,
        head=head,
        markov_rank=0 if head == "none" else settings.rank,
        confidence_with_markov=False,
    )
    drafter = random_weights(settings, dspark.specs(drafter_config))
    return Models(target, drafter, cfg, drafter_config)


def random_weights(settings: Settings, specs):
    """Made where they stay, a whole tree at once."""
    dtype = jnp.dtype(settings.dtype)
    return jax.jit(functools.partial(parameters.init, specs=specs, dtype=dtype))(jax.random.key(0))


def round_seconds(settings: Settings, models: Models, size: int) -> float:
    """Of rounds that verify all drafts of all rows, sampled."""
    cfg = generation.decode_config(models, [Request((0,), temperature=1.0)], policy="fixed")
    plan = whole(settings.rows, size)
    length = cache_length(settings.context, 8 * (1 + size), size)
    table = costs.measure(
        models,
        cfg,
        [plan],
        rows=settings.rows,
        length=length,
        context=settings.context,
        repeats=3,
    )
    return table.seconds[plan]


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="sequential_head", description=__doc__ or "")
    device = jax.devices()[0].device_kind
    print(f"{platform.machine()}, {device}, jax {jax.__version__}, {date.today()}")
    print(f"{settings.shape}, {settings.dtype}, {settings.rows} rows")
    target = random_weights(settings, dense.specs(SHAPES[settings.shape][0]))
    figures = []
    for size in settings.block_sizes:
        pairs = {head: make_models(settings, target, size, head) for head in KINDS}
        times: dict[HeadKind, list[float]] = {head: [] for head in KINDS}
        for _ in range(settings.repeats):
            for head, models in pairs.items():
                times[head].append(round_seconds(settings, models, size))
        for head, own in times.items():
            shares = [1 - a / b for a, b in zip(times["none"], own, strict=True)]
            share = statistics.median(shares)
            seconds = statistics.median(own)
            print(f"K={size:2} {head:8} {1e3 * seconds:9.3f} ms a round, head {share:6.1%}")
            figures.append({"block_size": size, "head": head, "seconds": own, "share": share})
    if settings.json is not None:
        found = {"device": device, "jax": jax.__version__, "date": str(date.today())}
        found |= {"settings": dataclasses.asdict(settings), "rounds": figures}
        settings.json.write_text(json.dumps(found, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
