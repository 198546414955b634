"""A trace of some steps, for xprof or TensorBoard's profile plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax


class Trace:
    """Traces the steps first..last, counted from 1, into a folder; None traces nothing."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self._folder, self._steps = folder, steps
        self._running = False

    def before(self, step: int) -> None:
        """To be called before each step."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, outputs: Any) -> None:
        """To be called after each step, with something that it computes."""
        if self._running and self._steps is not None and step == self._steps[1]:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Ends a trace that still runs."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
