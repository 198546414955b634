"""Checkpoints: training state and place in the data, saved together, whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from train.step import TrainState

STATE, DATA = "state", "data"


class SaveError(OSError):
    """A checkpoint could not be written; what was saved before is intact."""


class Checkpoints:
    """The checkpoints of one run, each a folder named by its step."""

    def __init__(self, folder: Path, *, keep: int):
        # Background writers log every failure with its traceback, and then raise it.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = folder
        self._failed = False
        self._checkpointer = ocp.training.Checkpointer(
            folder.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """Step of the last whole checkpoint."""
        found = self._checkpointer.latest
        return None if found is None else found.step

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Writes a checkpoint and drops the oldest; it counts only once it is whole.

        Args:
          data: JSON values.
        Raises:
          SaveError: it could not be written, for want of space for example.
        """
        before = self.latest
        self._failed = True
        try:
            self._checkpointer.save_checkpointables(step, {STATE: state, DATA: data})
        except (OSError, ValueError) as error:  # orbax raises ValueError for a full disk
            kept = "there is none before it" if before is None else f"that of {before} is intact"
            raise SaveError(
                f"{self.folder}: the checkpoint of step {step} could not be written"
                f" ({_reason(error)}); {kept}"
            ) from error
        self._failed = False

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """State and place in the data of the last checkpoint; there must be one."""
        found = self._checkpointer.load_checkpointables(None, {STATE: abstract, DATA: None})
        return found[STATE], found[DATA]

    def close(self) -> None:
        """To be called once, at the end."""
        # After a save that failed, closing would raise the same again.
        with contextlib.suppress(*(OSError, ValueError) if self._failed else ()):
            self._checkpointer.close()


def _reason(error: Exception) -> str:
    """What the system said, without the tale of who was told it."""
    code = re.search(r"os_error_code='?(\d+)", str(error))
    if code:
        return os.strerror(int(code[1]))
    return str(error).partition("\n")[0]
