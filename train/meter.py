"""Metrics of the steps between two lines of the log."""

from __future__ import annotations

import time

import jax

from dspark_jax import losses
from train.step import Report, StepConfig


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
