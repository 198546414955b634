"""An eye on the steps that are skipped: each is told, and too many in a row stop a run."""

from __future__ import annotations

import collections
import logging

from train.checkpoint import Checkpoints
from train.step import Report

LAG = 2
"""Steps after which a report is looked at: it is there by then, and nobody waits for it."""

log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """Too many steps in a row were skipped."""


class Lookout:
    """Says which steps were skipped, and stops the run when there are too many in a row."""

    def __init__(self, checkpoints: Checkpoints, most: int):
        self._checkpoints, self._most = checkpoints, most
        self._waiting: collections.deque[tuple[int, Report]] = collections.deque()

    def add(self, step: int, report: Report) -> None:
        """One step more. Raises `Diverged`."""
        self._waiting.append((step, report))
        if len(self._waiting) > LAG:
            self._look()

    def settle(self) -> None:
        """Looks at all steps so far. Raises `Diverged`."""
        while self._waiting:
            self._look()

    def _look(self) -> None:
        step, report = self._waiting.popleft()
        in_a_row = int(report.skipped_in_a_row)
        if not in_a_row:
            return
        loss, norm = float(report.loss), float(report.grad_norm)
        log.warning("step %d was skipped: loss %.4g, gradient norm %.4g", step, loss, norm)
        if in_a_row >= self._most:
            self._checkpoints.wait()
            latest = self._checkpoints.latest
            kept = "there is none" if latest is None else f"the last is of step {latest}"
            raise Diverged(
                f"training stopped at step {step}: {in_a_row} steps in a row were skipped, the last"
                f" with loss {loss:.4g} and gradient norm {norm:.4g} (max_skipped={self._most});"
                f" checkpoints: {kept}"
            )
