"""A training run: the loop over steps, with metrics, checkpoints and signals."""

from __future__ import annotations

import dataclasses
import sys

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax import sharding
from dspark_jax.io import hf
from dspark_jax.targets import dense
from train.checkpoint import Checkpoints
from train.logs import Logs
from train.meter import Meter
from train.settings import Settings
from train.step import Batch, StepConfig, TrainState, make_step


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
