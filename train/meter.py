"""Metrics of the steps between two lines of the log, and how fast they went."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from dspark_jax import losses
from dspark_jax.losses import Sums
from train.resources import peak_memory
from train.step import Report, StepConfig


@dataclasses.dataclass
class Pool:
    """What steps reported, added up. It is saved with a checkpoint: a line of the log is the same
    whether or not the run was interrupted before it."""

    sums: Sums
    grad_norm: float = 0.0
    taken: int = 0
    skipped: int = 0
    learning_rate: float = 0.0

    @staticmethod
    def start(block_size: int) -> Pool:
        """Of no step yet."""
        return Pool(jax.tree.map(np.asarray, Sums.zeros(block_size)))

    @staticmethod
    def of(values: dict[str, Any]) -> Pool:
        """What `values` made."""
        sums = {name: np.asarray(x, np.float32) for name, x in values["sums"].items()}
        return Pool(**{**values, "sums": Sums(**sums)})

    def values(self) -> dict[str, Any]:
        """As JSON values, exactly."""
        sums = {name: np.asarray(x).tolist() for name, x in vars(self.sums).items()}
        return {**vars(self), "sums": sums}

    def add(self, report: Report) -> None:
        """One step more."""
        self.learning_rate = float(report.learning_rate)
        if report.skipped_in_a_row:
            self.skipped += 1
        else:
            self.sums = jax.tree.map(np.add, self.sums, report.sums)
            self.grad_norm += float(report.grad_norm)
            self.taken += 1


class Meter:
    """Pools what steps report, and times them; devices are waited for only when it is read."""

    def __init__(self, cfg: StepConfig, pool: Pool, *, step_flops: float, peak_flops: float | None):
        """Goes on from `pool`; a step takes `step_flops`, the devices do `peak_flops` a second."""
        self._cfg, self._pool = cfg, pool
        self._step_flops, self._peak_flops = step_flops, peak_flops
        self._reports: list[Report] = []
        self._first_step_seconds: float | None = None
        self._start_clock()

    def _start_clock(self) -> None:
        self._started = time.monotonic()
        self._waited = self._aside = 0.0
        self._tokens = self._steps = 0

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Around what fetches a batch.

        Steps are sent ahead of the devices. As long as these have one to do nothing waits for the
        batch, and the time does not count.
        """
        begin = time.monotonic()
        yield
        # Arrays have it, and only their annotations do not.
        idle = not self._reports or self._reports[-1].loss.is_ready()  # pyrefly: ignore
        if idle:
            self._waited += time.monotonic() - begin

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """Around what is not training, evaluation for example: its time does not count."""
        jax.block_until_ready(self._reports)
        begin = time.monotonic()
        yield
        self._aside += time.monotonic() - begin

    def add(self, report: Report, tokens: int) -> None:
        """One step on `tokens` tokens, padding not counted."""
        self._reports.append(report)
        if self._first_step_seconds is None:
            # The first step compiles: it tells nothing of the speed.
            jax.block_until_ready(report)
            self._first_step_seconds = time.monotonic() - self._started
            self._start_clock()
        else:
            self._tokens += tokens
            self._steps += 1

    def place(self) -> dict[str, Any]:
        """What has been pooled since the last line, as JSON values; waits for the devices."""
        self._settle()
        return self._pool.values()

    def _settle(self) -> None:
        for report in jax.device_get(self._reports):
            self._pool.add(report)
        self._reports = []

    def read(self) -> dict[str, float]:
        """Metrics of the steps since the last reading: means over all their slots and anchors.

        NaN where there is nothing to take a mean of, or no telling. `input_wait` is the part of the
        time in which a batch was waited for with no step left to do when it came, and so no less
        than what the devices stood still for it; `mfu` the model's operations a second, as a part
        of what the devices could do.
        """
        self._settle()
        pool, seconds = self._pool, time.monotonic() - self._started - self._aside
        means = losses.metrics(pool.sums, self._cfg.drafter, self._cfg.loss)
        found = {name: float(x) if pool.sums.weight else np.nan for name, x in means.items()}
        found["grad_norm"] = pool.grad_norm / pool.taken if pool.taken else np.nan
        found["skipped_steps"] = pool.skipped
        found["learning_rate"] = pool.learning_rate
        timed = self._steps > 0
        found["tokens_per_second"] = self._tokens / seconds if timed else np.nan
        found["input_wait"] = self._waited / seconds if timed else np.nan
        used = self._steps * self._step_flops / seconds
        found["mfu"] = used / self._peak_flops if timed and self._peak_flops else np.nan
        found["peak_memory_bytes"] = peak_memory()
        found["first_step_seconds"] = self._first_step_seconds or np.nan
        self._pool = Pool.start(self._cfg.drafter.block_size)
        self._start_clock()
        return found
