"""Checkpoints: training state and place in the run, saved together, whole or not at all.

A checkpoint is a folder named by its step, written by Orbax in the background while training goes
on, and renamed to its name when all of it is there. Then the checksums of its files are added. At
the start the newest checkpoint whose files are as they were written is taken; damaged ones are set
aside, not deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import textwrap
import warnings
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.experimental import multihost_utils

from dspark_jax.config import InputError, require
from train import checksums
from train.step import TrainState

STATE, PLACE = "state", "place"
NONE, ALL_DAMAGED = -1, -2  # in place of a step

log = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint could not be written; what was saved before is intact."""


# --- On the disk -----------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending; half-written ones have other names."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def newest_whole(folder: Path) -> tuple[int | None, dict[int, str]]:
    """Step of the newest whole checkpoint, None without any; and what is wrong with which others.

    Raises:
      InputError: there are checkpoints, and all of them are damaged.
    """
    found, wrong = None, {}
    for step in reversed(steps(folder)):
        reason = damage(folder / str(step), thorough=found is None)
        if reason is not None:
            wrong[step] = reason
        elif found is None:
            found = step
    require(
        found is not None or not wrong,
        f"{folder}: no checkpoint is whole"
        f" ({'; '.join(f'{step}: {reason}' for step, reason in wrong.items())});"
        " expected at least one as it was written; none of them was touched",
    )
    return found, wrong


def damage(folder: Path, *, thorough: bool) -> str | None:
    """What is wrong with a checkpoint; None when its files are as they were written.

    Killed in the moment before its checksums were added, it is taken as Orbax has finished it.

    Args:
      thorough: compare the checksums of large files too, which reads them.
    """
    for part in (STATE, PLACE):
        if not (folder / part).is_dir():
            return f"{part} is missing"
    return checksums.difference(folder, thorough=thorough)


def load(folder: Path, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
    """State and place of one checkpoint.

    Args:
      abstract: shapes, dtypes and shardings of the state; a dict of some of the fields of
        `TrainState` loads these alone.
    Raises:
      InputError: an array is absent or of another shape, with the first of them; or the files
        cannot be read, which only happens without checksums of them.
    """
    where = folder.absolute() / str(step)
    options = ocp.Context()
    options.pytree.loading.partial_load = isinstance(abstract, dict)
    try:
        with options:
            there = _shapes(ocp.metadata(where, STATE).metadata)
            for name, shape in _shapes(abstract).items():
                require(
                    there.get(name) == shape,
                    f"{where}: {name} has shape {there.get(name)}, expected {shape}",
                )
            found = ocp.load_checkpointables(where, {STATE: abstract, PLACE: None})
        return found[STATE], json.loads(found[PLACE]["json"])
    except InputError:
        raise
    except (OSError, ValueError, KeyError) as error:  # orbax raises any of them for torn files
        # It also drops what it has begun, of which Python would tell when it ends.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        raise InputError(
            f"{where}: the checkpoint cannot be read ({textwrap.shorten(_reason(error), 160)});"
            " expected it as it was written, or moved away to go on from that before it"
        ) from error


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# --- Of a run --------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of a run: its last ones, and its best by a score."""

    def __init__(self, folder: Path, *, keep: int, keep_best: int = 0):
        """Finds the newest whole checkpoint, and sets damaged ones aside as `damaged-STEP`.

        Raises:
          InputError: there are checkpoints, and all are damaged.
        """
        # Background writers log every failure with its traceback, and then raise it.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = folder
        self.latest = _settle(folder)
        """Step of the last checkpoint that is, or will be, whole; None without any."""
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics["score"],
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        self._checkpointer = ocp.training.Checkpointer(
            folder.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            cleanup_tmp_directories=True,
        )
        self._writer = ThreadPoolExecutor(1)
        self._saving: tuple[int, Future[None]] | None = None

    def save(
        self, step: int, state: TrainState, place: dict[str, Any], *, score: float | None = None
    ) -> None:
        """Starts to write a checkpoint, when that before is written; it counts once it is whole.

        The state's arrays are copied, or kept from being overwritten, before this returns: a step
        that takes them over may follow at once.

        Args:
          place: JSON values.
          score: by which the best are kept, the higher the better; not kept for it without one.
        Raises:
          SaveError: this checkpoint, or that before, could not be written, for want of space for
            example.
        """
        self.wait()
        metrics = None if score is None or not math.isfinite(score) else {"score": score}
        items = {STATE: state, PLACE: {"json": json.dumps(place)}}
        with self._errors(step):
            response = self._checkpointer.save_checkpointables_async(step, items, metrics=metrics)
        assert response is not None  # the policy is to save always

        def finish() -> None:
            response.result()
            if jax.process_index() == 0:
                checksums.write(self.folder / str(step))

        self._saving = (step, self._writer.submit(finish))

    def wait(self) -> None:
        """Returns when the last checkpoint is written; raises as `save` does."""
        if self._saving is not None:
            (step, future), self._saving = self._saving, None
            with self._errors(step):
                future.result()
            self.latest = step

    @contextlib.contextmanager
    def _errors(self, step: int) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # orbax raises ValueError for a full disk
            kept = "there is none before it"
            if self.latest is not None:
                kept = f"that of {self.latest} is intact"
            raise SaveError(
                f"{self.folder}: the checkpoint of step {step} could not be written"
                f" ({_reason(error)}); {kept}"
            ) from error

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """State and place of the newest whole checkpoint; there must be one. Raises as `load`."""
        assert self.latest is not None
        return load(self.folder, self.latest, abstract)

    def close(self) -> None:
        """Waits for what is being written; to be called once, at the end. Raises as `save`."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            # After a save that failed, closing would raise the same again.
            with contextlib.suppress(OSError, ValueError):
                self._checkpointer.close()


def _settle(folder: Path) -> int | None:
    """Step of the newest whole checkpoint, with damaged ones set aside.

    One process looks at the files, and the others do as it says.
    """
    found, wrong, error = None, {}, None
    if jax.process_index() == 0:
        try:
            found, wrong = newest_whole(folder)
        except InputError as raised:
            error = raised
        for step, reason in wrong.items():
            names = (folder / f"damaged-{step}{'' if n == 1 else f'-{n}'}" for n in count(1))
            aside = next(path for path in names if not path.exists())
            os.replace(folder / str(step), aside)
            log.warning(
                "%s: the checkpoint of step %d is damaged (%s), and now lies in %s; that of step"
                " %d is taken", folder, step, reason, aside.name, found,
            )  # fmt: skip
    if jax.process_count() > 1:
        answer = np.int32(ALL_DAMAGED if error else NONE if found is None else found)
        told = int(multihost_utils.broadcast_one_to_all(answer))
        require(told != ALL_DAMAGED, str(error or f"{folder}: no checkpoint is whole"))
        return None if told == NONE else told
    if error is not None:
        raise error
    return found


def _reason(error: Exception) -> str:
    """What the system said, without the tale of who was told it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='?(\d+)", str(error))
    if code:
        return os.strerror(int(code[1]))
    return str(error).partition("\n")[0]
