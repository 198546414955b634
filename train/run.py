"""A training run: the loop over steps, with metrics, evaluations, checkpoints and signals."""

from __future__ import annotations

import dataclasses
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dspark_jax.io import hf
from dspark_jax.io.tokenizer import Tokenizer
from dspark_jax.targets import dense
from dspark_jax.vocabulary import with_vocabulary
from train import data, hosts
from train.checkpoint import Checkpoints
from train.evaluation import SCORE, HeldOut, decode, prompts
from train.logs import Logs, NoLogs
from train.lookout import Lookout
from train.meter import Meter, Pool
from train.resources import peak_flops, step_flops
from train.settings import Settings
from train.step import StepConfig, TrainState, make_step
from train.trace import Trace

AGREE_EVERY = 8
"""Steps between two times at which processes tell each other of signals."""


@dataclasses.dataclass
class Run:
    """A run between two steps."""

    settings: Settings
    cfg: StepConfig
    mesh: Mesh
    target: dense.Target
    tokenizer: Tokenizer
    state: TrainState
    batches: grain.DatasetIterator
    pool: Pool  # of the steps since the last line of metrics
    held_out: HeldOut | None
    checkpoints: Checkpoints

    def loop(self, stopped: list[int]) -> bool:
        """Trains to the end, or until a signal is in `stopped`; returns whether it is the end.

        Raises:
          Diverged: too many steps in a row were skipped.
          SaveError: a checkpoint could not be written.
        """
        settings, steps = self.settings, self.settings.optimizer.steps
        step, done = make_step(self.cfg, self.mesh), int(self.state.step)
        rows, length = settings.data.batch_size, settings.data.max_length
        _, parts = hosts.batch_share(self.mesh)
        meter = Meter(
            self.cfg,
            self.pool,
            step_flops=step_flops(self.cfg, rows, length),
            peak_flops=peak_flops(self.mesh.devices.flatten().tolist(), settings.watch.peak_flops),
        )
        logs = Logs(settings, step=done) if hosts.writes() else NoLogs()
        trace = Trace(settings.workdir / "profile", settings.watch.profile)
        lookout = Lookout(self.checkpoints, settings.guard.max_skipped)
        saved = self.checkpoints.latest
        try:
            while done < steps and not _any_process(bool(stopped), done):
                with meter.waiting():
                    placed = next(self.batches)
                trace.before(done + 1)
                self.state, report = step(self.state, self.target, placed.batch)
                done += 1
                trace.after(done, report)
                # All parts have about as many tokens as this one.
                meter.add(report, placed.tokens * parts)
                lookout.add(done, report)
                logs.advance()
                if done % settings.log_every == 0 or done == steps:
                    logs.write("metrics", done, meter.read())
                score = self.evaluate(done, logs, meter)
                if done % settings.save_every == 0 or done == steps:
                    lookout.settle()
                    self.save(done, meter, score)
                    saved = done
            if done < steps and saved != done:
                lookout.settle()
                self.save(done, meter, None)
            self.checkpoints.wait()
        finally:
            trace.close()
            logs.close()
            self.checkpoints.close()
        if done < steps:
            print(
                f"stopped at step {done} of {steps}; the same command goes on from there",
                file=sys.stderr,
            )
        return done == steps

    def evaluate(self, step: int, logs: Logs, meter: Meter) -> float | None:
        """Evaluates and decodes where it is time; returns the score of what was evaluated."""
        asked, last = self.settings.evaluation, step == self.settings.optimizer.steps
        due = step % asked.evaluate_every == 0 or last
        decoding = asked.decode_every > 0 and (step % asked.decode_every == 0 or last)
        if self.held_out is None or not (due or decoding):
            return None
        found: dict[str, float] = {}
        with meter.aside():
            if due:
                found |= self.held_out.metrics(self.state.params, self.target)
            if decoding:
                starts = prompts(self.held_out.batches, asked.decode_prompts)
                found |= decode(
                    self.cfg, self.mesh, self.state.params, self.target, self.tokenizer, starts,
                    tokens=asked.decode_tokens,
                )  # fmt: skip
        logs.write("evaluation", step, found)
        return found.get(SCORE)

    def save(self, step: int, meter: Meter, score: float | None) -> None:
        part, _ = hosts.batch_share(self.mesh)
        places = hosts.gather([part, self.batches.get_state()])
        place = {"data": data.join_places(places), "pool": meter.place()}
        self.checkpoints.save(step, self.state, place, score=score)

    def export(self) -> None:
        """Writes WORKDIR/drafter."""
        folder = self.settings.workdir / "drafter"
        # Of the target's parameters these two are written.
        ends = hosts.whole({"embed": self.target.embed, "lm_head": self.target.lm_head})
        params, target = hosts.whole(self.state.params), dataclasses.replace(self.target, **ends)
        if not hosts.writes():
            return
        hf.save_drafter(
            folder,
            self.cfg.drafter,
            with_vocabulary(params, target, self.cfg.draft_ids),
            target=(self.cfg.target, target),
            dtype=jnp.dtype(self.settings.compute.dtype),
        )
        print(f"drafter of {self.settings.optimizer.steps} steps: {folder}")


def _any_process(stopped: bool, step: int) -> bool:
    """Whether a process of the run was told to stop: the same answer, at the same step, for all."""
    if jax.process_count() == 1:
        return stopped
    if step % AGREE_EVERY:
        return False
    return bool(multihost_utils.process_allgather(np.array(stopped)).any())
