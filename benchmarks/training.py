"""What training's pipeline costs beside the bare step, and what stored features gain.

    python benchmarks/training.py [--target DIR --draft DIR] [--json FILE] [--hf-python PYTHON]

All cases are measured in turn in every repeat, and ratios are taken within a repeat:

    bare      the step of benchmarks/core.py on one batch, 4 rows of 192 tokens, 24 anchors a row
    packed    the same with rows of several documents, which share the 24 anchors, on one batch
    pipeline  the same on the batches that train.data makes of short chats, as train.main takes them
    saving    the same while a checkpoint is written, up to its end
    stored    the same batches from a cache, with the target's states

A small model is faster with `--devices 2`, a CPU device for each of two cores, which share the
batch, than with one device of which every small operation asks both cores.

As many batches lie ready when the clock stops as when it starts, wherever one is made faster than a
step is taken: while it runs, one is made for every step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import core
import grain
import jax
import parts
from jax.sharding import Mesh

from dspark_jax import generation
from dspark_jax.config import DrafterConfig
from dspark_jax.generation import EMBEDDED
from dspark_jax.io import cli
from dspark_jax.targets.dense import Target
from train import corpus
from train.cache import CacheSettings, write_cache
from train.checkpoint import Checkpoints
from train.encoding import make_encoder
from train.lookout import Lookout
from train.meter import Meter, Pool
from train.prepare import step_config
from train.resources import step_flops
from train.rows import open_rows
from train.settings import DataSettings, DrafterSettings
from train.settings import Settings as RunSettings
from train.step import StepConfig, create_state, make_step

HF, HF_TIMES = "transformers", 5
DOCUMENTS = 4  # of a row, between which its anchors are shared
CHARACTERS = 400  # of a document at most
CACHED = 64  # batches
PAUSE = 0.5  # seconds in front of a case: batches are made ahead, threads of the last one stop
SAVE_EVERY = (100, 500)  # steps between checkpoints for which their cost is given; 500 is usual


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measures one pair on this machine."""

    target: Path = EMBEDDED / "target"
    draft: Path = EMBEDDED / "drafter"
    repeats: int = 9
    steps: int = 32
    """Of each case in each repeat."""
    devices: Literal[1, 2, 4] = 1
    """Devices, of the CPU too, that share the rows of a batch."""
    json: Path | None = None
    """Write the figures here too."""
    hf_python: Path | None = None
    """Interpreter with torch and transformers: plain decoding by them is measured in turn."""

    def __post_init__(self):
        parts.check_settings(
            {"--repeats": [self.repeats], "--steps": [self.steps]}, self.json, self.hf_python
        )


def write_documents(path: Path) -> None:
    """Short functions of the standard library, as questions and answers; several fit a row."""
    texts = corpus.stdlib_texts()
    pairs = [pair for text in texts for pair in corpus.functions(text, CHARACTERS)]
    path.write_text("".join(json.dumps({"prompt": q, "response": a}) + "\n" for q, a in pairs))


def run_settings(settings: Settings, cfg: DrafterConfig, folder: Path) -> RunSettings:
    """A run over packed rows of as many anchors as the bare step has."""
    fields = {field.name for field in dataclasses.fields(DrafterSettings)}
    names = fields & {field.name for field in dataclasses.fields(DrafterConfig)}
    values: dict[str, Any] = {name: getattr(cfg, name) for name in names}
    return RunSettings(
        workdir=folder,
        target=str(settings.target),
        drafter=DrafterSettings(**{**values, "num_anchors": core.ANCHORS // DOCUMENTS}),
        data=DataSettings(
            files=(str(folder / "documents.jsonl"),),
            max_length=core.LENGTH,
            documents_per_row=DOCUMENTS,
            batch_size=core.BATCH,
        ),
    )


class Training:
    """A run's loop without its logs: its state, and how long it waited for batches."""

    def __init__(
        self,
        settings: RunSettings,
        cfg: StepConfig,
        target: Target,
        batches: grain.DatasetIterator,
        mesh: Mesh,
    ):
        self.batches, self.target = batches, target
        self.placed = next(batches)
        self.step, self.state = make_step(cfg, mesh), create_state(cfg, mesh)
        self.meter = Meter(
            cfg,
            Pool.start(cfg.drafter.block_size),
            step_flops=step_flops(cfg, core.BATCH, core.LENGTH),
            peak_flops=None,
        )
        self.checkpoints = Checkpoints(settings.workdir / cfg.features, keep=1)
        self.lookout = Lookout(self.checkpoints, settings.guard.max_skipped)
        self.done, self.padding = 0, 0
        self.waited: list[float] = []

    def run(self, steps: int, *, fetch: bool = True, save: bool = False) -> float:
        """Tokens a second of some steps, padding included, on new batches or on the last one."""
        jax.block_until_ready(self.state)
        self.meter.read()
        start = time.perf_counter()
        for number in range(steps):
            if fetch:
                with self.meter.waiting():
                    self.placed = next(self.batches)
            self.state, report = self.step(self.state, self.target, self.placed.batch)
            self.done += 1
            self.padding += core.BATCH * core.LENGTH - self.placed.tokens
            self.meter.add(report, self.placed.tokens)
            self.lookout.add(self.done, report)
            if save and number == 0:
                self.lookout.settle()
                self.checkpoints.save(self.done, self.state, {"data": self.batches.get_state()})
        jax.block_until_ready(self.state)
        self.checkpoints.wait()
        seconds = time.perf_counter() - start
        if fetch and not save:
            self.waited.append(self.meter.read()["input_wait"])
        return steps * core.BATCH * core.LENGTH / seconds


def make_cases(settings: Settings, folder: Path) -> tuple[dict[str, Callable[[], float]], Any]:
    """What is measured, by name, and the two runs whose waiting is looked at."""
    pair = generation.load(settings.target, settings.draft)
    write_documents(folder / "documents.jsonl")
    run = run_settings(settings, core.drafter_config(pair), folder)
    target_config, steps = pair.models.target_config, settings.steps
    cfg = step_config(run, target_config, run.drafter_config(target_config))
    cfg = dataclasses.replace(cfg, anchor_chunk=core.ANCHORS)
    cache = CacheSettings(run=run, output=folder / "features", batches=CACHED)
    assert write_cache(cache, []) == 0
    from_cache = dataclasses.replace(run, features=str(cache.output))
    encoder = make_encoder(run.data, settings.target, target_config)
    mesh, target = core.place_pair(pair, settings.devices)

    def training(run: RunSettings, cfg: StepConfig, target: Target) -> Training:
        batches = open_rows(run, cfg, settings.target, encoder, mesh).batches
        return Training(run, cfg, target, batches, mesh)

    online = training(run, cfg, target)
    stored_cfg = dataclasses.replace(cfg, features="stored")
    stored = training(from_cache, stored_cfg, dataclasses.replace(target, layers=()))
    tokens = core.held_out_tokens(pair)
    cases = {
        "bare": core.train_case(pair, tokens, steps=steps, devices=settings.devices).run,
        "packed": lambda: online.run(steps, fetch=False),
        "pipeline": lambda: online.run(steps),
        "saving": lambda: online.run(steps, save=True),
        "stored": lambda: stored.run(steps),
    }
    if settings.hf_python:
        prompts = [tokens[: core.PROMPT].tolist()]
        once = core.hf_case(settings.hf_python, settings.target, prompts, core.NEW).run
        # a quarter of a second
        cases[HF] = lambda: statistics.median(once() for _ in range(HF_TIMES))
    return cases, (online, stored)


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="training", description=__doc__ or "")
    if settings.devices > 1:
        jax.config.update("jax_num_cpu_devices", settings.devices)
    with tempfile.TemporaryDirectory() as folder:
        cases, runs = make_cases(settings, Path(folder))
        for case in cases.values():
            case()
        for training in runs:
            training.waited.clear()
        speeds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(settings.repeats):
            for name, case in cases.items():
                time.sleep(PAUSE)
                speeds[name].append(case())
        waits = {n: t.waited for n, t in zip(("pipeline", "stored"), runs, strict=True)}
        found = summary(speeds, waits, settings.steps)
        found["padding"] = runs[0].padding / (runs[0].done * core.BATCH * core.LENGTH)
        for training in runs:
            training.checkpoints.close()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {settings.devices} devices,"
        f" jax {jax.__version__}, {date.today()}"
    )
    report(found)
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def summary(
    speeds: dict[str, list[float]], waits: dict[str, list[float]], steps: int
) -> dict[str, Any]:
    """Medians over repeats: speeds, their ratios within a repeat, waiting, cost of a checkpoint."""
    batch = core.BATCH * core.LENGTH
    found: dict[str, Any] = {
        name: {
            "tokens_per_second": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "times_bare": paired(values, speeds["bare"]),
        }
        for name, values in speeds.items()
    }
    for name, values in waits.items():
        found[name]["input_wait"] = statistics.median(values)
    for name, values in speeds.items():
        if HF in speeds:
            found[name]["times_transformers"] = paired(values, speeds[HF])
    extra = [
        steps * batch * (1 / saving - 1 / plain)
        for saving, plain in zip(speeds["saving"], speeds["pipeline"], strict=True)
    ]
    found["checkpoint_seconds"] = statistics.median(extra)
    step_seconds = batch / found["pipeline"]["tokens_per_second"]
    found["checkpoint_cost"] = {
        str(every): found["checkpoint_seconds"] / (every * step_seconds) for every in SAVE_EVERY
    }
    return found


def paired(values: list[float], yardstick: list[float]) -> float:
    """Median of the ratios, repeat by repeat."""
    return statistics.median(a / b for a, b in zip(values, yardstick, strict=True))


def report(found: dict[str, Any]) -> None:
    """Prints the figures."""
    print(f"{'':14}{'tokens/s':>10}{'least':>10}{'most':>10}{'cost':>9}{'waits':>9}{'x HF':>8}")
    for name, row in found.items():
        if isinstance(row, dict) and "least" in row:
            wait = row.get("input_wait")
            print(
                f"{name:14}{row['tokens_per_second']:10.0f}{row['least']:10.0f}{row['most']:10.0f}"
                f"{1 / row['times_bare'] - 1:9.1%}{'' if wait is None else format(wait, '.2%'):>9}"
                f"{row.get('times_transformers', float('nan')):8.1f}"
            )
    print(f"a checkpoint: {found['checkpoint_seconds']:.3f} s, which is", end=" ")
    print(", ".join(f"{v:.1%} every {n} steps" for n, v in found["checkpoint_cost"].items()))
    print(f"padding: {found['padding']:.1%} of the tokens")


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
