"""Trains a drafter.

    python -m train.main [PRESET] [--setting value ...]

Without a preset it is `tiny`: a drafter for the small target that comes with the package. Writes
checkpoints, metrics.jsonl, TensorBoard events, config.json and at the end the exported drafter
under --workdir; started again with the same settings it goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from safetensors import SafetensorError

import configs
import dspark_jax
from dspark_jax import losses, sharding
from dspark_jax.config import DrafterConfig, TargetConfig, require
from dspark_jax.io import cli, files, hf, model_config
from dspark_jax.io.tokenizer import load_tokenizer
from dspark_jax.targets import dense
from train.checkpoint import Checkpoints
from train.data import make_batches
from train.logs import Logs
from train.settings import EMBEDDED, Settings
from train.step import (
    Batch,
    Report,
    StepConfig,
    TrainState,
    abstract_state,
    init_state,
    make_step,
    state_shardings,
)

MANY_LAYERS = 8


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = parse_arguments(args)
    try:
        return train(settings)
    except (OSError, SafetensorError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def parse_arguments(args: Sequence[str]) -> Settings:
    """The settings that `[PRESET] [--setting value ...]` asks for."""
    presets = sorted(m.name for m in pkgutil.iter_modules(configs.__path__))
    given = bool(args) and not args[0].startswith("-")
    preset = args[0] if given else "tiny"
    require(preset in presets, f"preset {preset!r}: expected one of {', '.join(presets)}")
    return cli.parse(
        Settings,
        args[1:] if given else args,
        default=importlib.import_module(f"configs.{preset}").SETTINGS,
        prog=f"train.main {preset}",
        description=f"{__doc__}\nPresets: {', '.join(presets)}.",
    )


def train(settings: Settings) -> int:
    """A whole run, or the rest of one."""
    with cli.stop_signals() as stopped:
        run = prepare(settings)
        code = run.loop(stopped)
        if code == 0:
            run.export()
        return code


def prepare(settings: Settings) -> Run:
    """Checks everything that can be wrong, then loads the target and the last checkpoint."""
    check_workdir(settings)
    folder = target_folder(settings)
    target_config = model_config.load_target_config(folder)
    drafter_config = settings.drafter.config(target_config)
    mesh = sharding.make_mesh(settings.compute.devices, settings.compute.model_parallel)
    part = settings.data.batch_size // settings.compute.microbatches
    require(
        part % mesh.shape[sharding.DATA] == 0,
        f"batch_size={settings.data.batch_size} in {settings.compute.microbatches} microbatches:"
        f" expected a multiple of the {mesh.shape[sharding.DATA]} devices that split the batch",
    )
    tokenizer = load_tokenizer(folder)
    require(
        tokenizer.vocab_size <= target_config.vocab_size,
        f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, expected at most the"
        f" {target_config.vocab_size} of the target",
    )
    stops = target_config.stop_token_ids or tokenizer.eos_ids
    batches = make_batches(settings.data, tokenizer, stops, seed=settings.seed)
    target = load_target(settings, folder, target_config, mesh)
    write_workdir(settings)

    cfg = step_config(settings, target_config, drafter_config)
    checkpoints = Checkpoints(settings.workdir / "checkpoints", keep=settings.keep)
    if checkpoints.latest is None:
        places = state_shardings(cfg, mesh)
        start = target if settings.start == "target" else None
        state = jax.jit(functools.partial(init_state, cfg), out_shardings=places)(start)
    else:
        state, place = checkpoints.restore(abstract_state(cfg, mesh))
        batches.set_state(place)
    return Run(settings, cfg, mesh, target, state, batches, checkpoints)


def step_config(settings: Settings, target: TargetConfig, drafter: DrafterConfig) -> StepConfig:
    """What of the settings is compiled into a step."""
    return StepConfig(
        target=target,
        drafter=drafter,
        loss=settings.loss,
        optimizer=settings.optimizer,
        seed=settings.seed,
        anchor_chunk=settings.compute.anchor_chunk,
        microbatches=settings.compute.microbatches,
    )


@dataclasses.dataclass
class Run:
    """A run between two steps."""

    settings: Settings
    cfg: StepConfig
    mesh: Mesh
    target: dense.Target
    state: TrainState
    batches: grain.DatasetIterator
    checkpoints: Checkpoints

    def loop(self, stopped: list[int]) -> int:
        """Trains to the end, or until a signal is in `stopped`; returns the exit code."""
        settings, steps = self.settings, self.settings.optimizer.steps
        step, done = make_step(self.cfg, self.mesh), int(self.state.step)
        logs = Logs(settings.workdir, step=done, steps=steps)
        meter = Meter(self.cfg)
        saved = self.checkpoints.latest
        try:
            while done < steps and not stopped:
                items = next(self.batches)
                batch = jax.device_put(
                    Batch(items["tokens"], items["loss_mask"]), sharding.batch(self.mesh)
                )
                self.state, report = step(self.state, self.target, batch)
                done += 1
                meter.add(report, int(items["length"].sum()))
                logs.advance()
                if done % settings.log_every == 0 or done == steps:
                    logs.write(done, meter.read())
                if done % settings.save_every == 0 or done == steps:
                    self.save(done)
                    saved = done
            if done < steps and saved != done:
                self.save(done)
        finally:
            logs.close()
            self.checkpoints.close()
        if done < steps:
            print(
                f"stopped at step {done} of {steps}; the same command goes on from there",
                file=sys.stderr,
            )
            return 128 + stopped[0]
        return 0

    def save(self, step: int) -> None:
        self.checkpoints.save(step, self.state, self.batches.get_state())

    def export(self) -> None:
        """Writes WORKDIR/drafter."""
        folder = self.settings.workdir / "drafter"
        hf.save_drafter(
            folder,
            self.cfg.drafter,
            self.state.params,
            target=(self.cfg.target, self.target),
            dtype=jnp.dtype(self.settings.compute.dtype),
        )
        print(f"drafter of {self.settings.optimizer.steps} steps: {folder}")


class Meter:
    """Pools what steps report; devices are waited for only when it is read."""

    def __init__(self, cfg: StepConfig):
        self._cfg = cfg
        self._reports: list[Report] = []
        self._tokens = 0
        self._started = time.monotonic()
        self._compile_seconds: float | None = None

    def add(self, report: Report, tokens: int) -> None:
        """One step on `tokens` tokens, padding not counted."""
        self._reports.append(report)
        if self._compile_seconds is None:
            # The first step compiles: it tells nothing of the speed.
            jax.block_until_ready(report)
            self._compile_seconds = time.monotonic() - self._started
            self._started = time.monotonic()
        else:
            self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Metrics of the steps since the last reading: means over all their slots and anchors."""
        reports = jax.device_get(self._reports)
        sums = reports[0].sums
        for report in reports[1:]:
            sums = losses.add(sums, report.sums)
        seconds = time.monotonic() - self._started
        found = {
            name: float(value)
            for name, value in losses.metrics(sums, self._cfg.drafter, self._cfg.loss).items()
        }
        found["grad_norm"] = sum(float(r.grad_norm) for r in reports) / len(reports)
        found["learning_rate"] = float(reports[-1].learning_rate)
        found["tokens_per_second"] = self._tokens / seconds
        found["first_step_seconds"] = self._compile_seconds or 0.0
        self._reports, self._tokens, self._started = [], 0, time.monotonic()
        return found


# --- Target ----------------------------------------------------------------------------------


def target_folder(settings: Settings) -> Path:
    """Folder of the target, fetched if it is a repository."""
    if settings.target == EMBEDDED:
        return Path(dspark_jax.__path__[0]) / "embedded" / "target"
    return files.resolve(settings.target)


def load_target(settings: Settings, folder: Path, cfg: TargetConfig, mesh: Mesh) -> dense.Target:
    """The frozen target, its layers stacked where the settings say so."""
    places = sharding.parameters(dense.specs(cfg), mesh)
    _, target = hf.load_target(folder, dtype=jnp.dtype(settings.compute.dtype), shardings=places)
    match settings.compute.stack_layers:
        case "auto":
            stacked = cfg.num_layers > MANY_LAYERS
        case choice:
            stacked = choice == "on"
    return dense.stack_layers(target) if stacked else target


# --- Working directory -----------------------------------------------------------------------


def check_workdir(settings: Settings) -> None:
    """Raises `InputError` when the workdir holds a run with other settings."""
    path = settings.workdir / "config.json"
    if not path.exists():
        held = settings.workdir / "checkpoints"
        require(not held.exists(), f"{held}: checkpoints without {path.name}: expected both")
        return
    there, here = files.read_json(path), _described(settings)
    for name in sorted(there.keys() | here.keys()):
        require(
            there.get(name) == here.get(name),
            f"{path}: {name} is {json.dumps(there.get(name))} there and"
            f" {json.dumps(here.get(name))} now; expected the same, or another workdir",
        )


def write_workdir(settings: Settings) -> None:
    """Writes config.json into the workdir."""
    settings.workdir.mkdir(parents=True, exist_ok=True)
    path = settings.workdir / "config.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_described(settings), indent=2) + "\n")
    os.replace(temporary, path)


def _described(settings: Settings) -> dict[str, Any]:
    """The settings, without the place of the workdir: a run may be moved."""
    return {name: value for name, value in settings.flat().items() if name != "workdir"}


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
