"""Decoding and training speed of one pair, as medians of repeats with their spread.

    python benchmarks/core.py [--target DIR --draft DIR] [--json FILE] [--hf-python PYTHON]

Decoding: greedy, plain and with blocks of 1, 2, 3, 5 and 7, at 1 and at 16 rows. Training: whole
steps, the target's forward included, at batch 4 x 192 with 24 anchors. All cases are measured in
turn in every repeat, so that a slow minute of the machine hits them alike; ratios are taken within
a repeat. Compile time is given beside, and is in no figure.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import jax
import numpy as np
import parts
from jax.sharding import Mesh

from dspark_jax import batch_shape, batching, generation, sharding
from dspark_jax.config import DraftingConfig, InputError
from dspark_jax.generation import EMBEDDED
from dspark_jax.io import cli
from dspark_jax.losses import LossConfig
from dspark_jax.request import Request
from dspark_jax.targets import dense
from train import corpus, hosts, step
from train.settings import OptimizerSettings

BLOCKS = (1, 2, 3, 5, 7)
ROWS = (1, 16)
PROMPT, NEW = 32, 64
HF = "transformers, 1 row, plain"
BATCH, LENGTH, ANCHORS = 4, 192, 24


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measures one pair on this machine."""

    target: Path = EMBEDDED / "target"
    draft: Path = EMBEDDED / "drafter"
    repeats: int = 7
    json: Path | None = None
    """Write the figures here too."""
    hf_python: Path | None = None
    """Interpreter with torch and transformers: plain decoding by them is measured in turn."""

    def __post_init__(self):
        parts.check_settings({"--repeats": [self.repeats]}, self.json, self.hf_python)


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to time: `run` returns its tokens per second."""

    name: str
    run: Callable[[], float]


def timed(work: Callable[[], int]) -> Callable[[], float]:
    """Tokens per second of `work`, which waits for what it does and returns how many it did."""

    def run() -> float:
        start = time.perf_counter()
        tokens = work()
        return tokens / (time.perf_counter() - start)

    return run


def held_out_tokens(pair: generation.Pair) -> np.ndarray:
    texts = corpus.stdlib_texts(held_out=True)
    return np.array(pair.tokenizer.encode("\n".join(texts)), np.int32)


def drafter_config(pair: generation.Pair) -> DraftingConfig:
    config = pair.models.drafter_config
    if config is None:
        raise InputError("no drafter: expected --draft")
    return config


def decode_case(pair: generation.Pair, tokens: np.ndarray, rows: int, block: int) -> Case:
    """Greedy decoding of `rows` prompts; block 0 is plain decoding."""
    starts = np.random.default_rng(0).integers(0, len(tokens) - PROMPT, rows)
    requests = [Request(tokens[s : s + PROMPT].tolist(), max_new_tokens=NEW) for s in starts]
    models = dataclasses.replace(pair.models, drafter=None, drafter_config=None)
    if block:
        models = generation.with_block_size(pair, block).models
    cfg = generation.decode_config(models, requests, ignore_stop=True)
    shape = batch_shape.plan(models, requests, rows)

    def run() -> int:
        for _ in batching.serve(models, requests, shape, cfg, pair.tokenizer.decode):
            pass
        return rows * NEW

    return Case(f"decode, {rows} rows, {f'block {block}' if block else 'plain'}", timed(run))


def train_case(
    pair: generation.Pair, tokens: np.ndarray, *, steps: int = 8, devices: int = 1
) -> Case:
    """Some whole training steps of a fresh Markov drafter for the pair's target."""
    cfg = step.StepConfig(
        target=pair.models.target_config,
        drafter=dataclasses.replace(drafter_config(pair), num_anchors=ANCHORS),
        loss=LossConfig(),
        optimizer=OptimizerSettings(),
        anchor_chunk=ANCHORS,
    )
    mesh, target = place_pair(pair, devices)
    run_step, state = step.make_step(cfg, mesh), step.create_state(cfg, mesh)
    starts = np.random.default_rng(0).integers(0, len(tokens) - LENGTH, BATCH)
    batch = step.Batch(
        tokens=np.array([tokens[s : s + LENGTH] for s in starts]),
        loss_mask=np.ones((BATCH, LENGTH), bool),
    )
    batch = hosts.global_batch(mesh, batch)

    def run() -> int:
        nonlocal state
        for _ in range(steps):
            state, _ = run_step(state, target, batch)
        jax.block_until_ready(state)
        return steps * BATCH * LENGTH

    return Case("train, 4 x 192, 24 anchors", timed(run))


def place_pair(pair: generation.Pair, devices: int) -> tuple[Mesh, dense.Target]:
    """A mesh of devices that share the rows of a batch, and the pair's target on all of them."""
    mesh = sharding.make_mesh(devices, data_parallel=devices, fsdp=1)
    places = sharding.parameters(dense.specs(pair.models.target_config), mesh)
    return mesh, jax.device_put(pair.models.target, places)


def hf_case(
    python: Path,
    target: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    name: str = HF,
    options: Sequence[str] = (),
) -> Case:
    """Plain decoding by transformers, a prompt at a time, in a process that stays alive.

    Args:
      python: an interpreter with torch and transformers.
      target: Hugging Face folder.
      options: of `hf_generate.py`.
    """
    command = [str(python), str(Path(__file__).with_name("hf_generate.py"))]
    command += [str(target), str(new_tokens), *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    line = json.dumps([list(prompt) for prompt in prompts])

    def run() -> float:
        assert process.stdin
        assert process.stdout
        print(line, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    return Case(name, run)


def in_turn(cases: Sequence[Case], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of every case in every repeat, by their names."""
    speeds: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            speeds[case.name].append(case.run())
    return speeds


def measure(cases: list[Case], repeats: int) -> list[dict[str, float | str]]:
    """Tokens per second of every case: median, least and most of the repeats."""
    compile_seconds = {}
    for case in cases:
        start = time.perf_counter()
        case.run()
        compile_seconds[case.name] = time.perf_counter() - start
    speeds = in_turn(cases, repeats)
    return [
        {
            "case": name,
            "tokens_per_second": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "compile_seconds": compile_seconds[name],
        }
        | ratio(values, speeds.get(HF))
        for name, values in speeds.items()
    ]


def ratio(values: list[float], yardstick: list[float] | None) -> dict[str, float]:
    """Median of the ratios to transformers, repeat by repeat."""
    if yardstick is None:
        return {}
    pairs = zip(values, yardstick, strict=True)
    return {"times_transformers": statistics.median(a / b for a, b in pairs)}


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="core", description=__doc__ or "")
    pair = generation.load(settings.target, settings.draft)
    tokens = held_out_tokens(pair)
    cases = [
        decode_case(pair, tokens, rows, block)
        for rows in ROWS
        for block in (0, *(b for b in BLOCKS if rows == 1 or b == max(BLOCKS)))
        if block <= drafter_config(pair).block_size
    ]
    cases.append(train_case(pair, tokens))
    if settings.hf_python:
        prompts = [tokens[:PROMPT].tolist()]
        cases.append(hf_case(settings.hf_python, settings.target, prompts, NEW))
    table = measure(cases, settings.repeats)
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, {date.today()}")
    print(f"{'':32}{'tokens/s':>10}{'least':>10}{'most':>10}{'compile s':>11}{'x HF':>10}")
    for row in table:
        print(
            f"{row['case']:32}{row['tokens_per_second']:10.0f}{row['least']:10.0f}"
            f"{row['most']:10.0f}{row['compile_seconds']:11.1f}"
            f"{row.get('times_transformers', float('nan')):10.1f}"
        )
    if settings.json:
        settings.json.write_text(json.dumps(table, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
