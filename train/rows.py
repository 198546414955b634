"""The rows that a run learns from: made from documents, or read from a cache with their states."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jax.sharding import Mesh

from dspark_jax.config import InputError, require
from dspark_jax.targets.dense import Hidden
from train import data, documents, hosts, stored
from train.data import Row
from train.encoding import Encoder
from train.manifest import (
    HELD_OUT,
    TRAINING,
    Manifest,
    StorageType,
    read_manifest,
    require_made_for,
)
from train.settings import Settings
from train.step import Batch, StepConfig
from train.stored import StoredRows
from train.target import digest


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a run."""

    batches: grain.DatasetIterator
    """Endless `Placed` batches."""
    held_out: Sequence[Batch]
    """Whole batches that are not trained on; none: no evaluation."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A batch of all hosts on the mesh."""

    batch: Batch
    tokens: int
    """Of this host's part, padding not counted."""


def batch_of(items: Row) -> Batch:
    """What of the data's items a step wants."""
    hidden = Hidden(items["final"], items.get("features")) if "final" in items else None
    return Batch(items["tokens"], items["loss_mask"], items.get("segments"), hidden)


def open_rows(
    settings: Settings, cfg: StepConfig, folder: Path, encoder: Encoder, mesh: Mesh
) -> Rows:
    """The rows that the settings ask for, from where the step wants its features.

    Batches are brought to the mesh as they are made, ahead of the steps.

    Args:
      folder: of the target.
    Raises:
      InputError: anything wrong with data files or cache.
    """

    def place(items: Row) -> Placed:
        batch = hosts.global_batch(mesh, batch_of(items))
        return Placed(batch, int(items["length"].sum()))

    share = hosts.batch_share(mesh)
    if settings.features is None:
        return _made(settings, encoder, share, place)
    return _stored(settings, Path(settings.features), cfg, folder, share, place)


# --- From documents --------------------------------------------------------------------------


def _made(
    settings: Settings, encoder: Encoder, share: tuple[int, int], finish: Callable[[Row], Placed]
) -> Rows:
    batches = make_batches(settings, settings.data.files, encoder, share, finish)
    return Rows(batches, [batch_of(items) for items in held_out_batches(settings, encoder)])


def make_batches(
    settings: Settings,
    files: tuple[str, ...],
    encoder: Encoder,
    share: tuple[int, int] = (0, 1),
    finish: Callable[[Row], Any] = data.as_it_is,
) -> grain.DatasetIterator:
    """This host's part of the batches of some files, whose bad records are named on stderr."""
    asked = dataclasses.replace(settings.data, files=files)
    found = data.open_documents(asked, encoder)
    if hosts.writes():
        for line in found.passed_over():
            print(line, file=sys.stderr)
    part, parts = share
    return data.make_batches(
        asked, found, encoder, seed=settings.seed, part=part, parts=parts, finish=finish
    )


def held_out_batches(settings: Settings, encoder: Encoder) -> list[Row]:
    """All of each batch to evaluate on; none where there are no files for it.

    Prompts of them are decoded on the whole mesh.
    """
    if not settings.held_out_files:
        return []
    batches = make_batches(settings, settings.held_out_files, encoder)
    return list(itertools.islice(batches, settings.evaluation.evaluate_batches))


# --- From a cache ----------------------------------------------------------------------------


def made_for(settings: Settings, cfg: StepConfig, folder: Path) -> dict[str, object]:
    """What decides stored rows and states, as JSON values; `folder` is that of the target.

    Seed and batch size decide which rows come first, and are not part of it.
    """
    asked = settings.data
    return {
        "target": digest(folder),
        "target_layer_ids": list(cfg.drafter.target_layer_ids),
        "dtype": settings.compute.dtype,
        "max_length": asked.max_length,
        "documents_per_row": asked.documents_per_row,
        "thinking": asked.thinking,
        "files": [documents.digest(name) for name in asked.files],
        "held_out_files": [documents.digest(name) for name in settings.held_out_files],
    }


def row_type(settings: Settings, cfg: StepConfig, taps: int, storage: StorageType) -> np.dtype[Any]:
    """How the rows of these settings are stored, with the states of so many tapped layers."""
    return stored.row_type(
        length=settings.data.max_length,
        width=cfg.target.hidden_size,
        taps=taps,
        packed=settings.data.documents_per_row > 1,
        storage=storage,
    )


def _stored(
    settings: Settings,
    cache: Path,
    cfg: StepConfig,
    folder: Path,
    share: tuple[int, int],
    finish: Callable[[Row], Placed],
) -> Rows:
    manifest = read_manifest(cache)
    here = made_for(settings, cfg, folder)
    if not settings.held_out_files:
        del here["held_out_files"]
    taps, columns = _wanted_columns(manifest, cfg, cache)
    here["target_layer_ids"] = taps
    require_made_for(manifest.made_for, here, cache, expected="a cache of the same target and data")
    row = row_type(settings, cfg, len(taps), manifest.storage)
    size, (part, parts) = settings.data.batch_size, share
    rows = stored.open_rows(cache, manifest, TRAINING, row, columns)
    require(len(rows) > 0, f"{cache}: no rows in it, expected some to train on")
    batches = stored.make_batches(
        rows, batch_size=size, seed=settings.seed, part=part, parts=parts, finish=finish
    )
    if not settings.held_out_files:
        return Rows(batches, [])
    number = settings.evaluation.evaluate_batches
    kept = manifest.rows[HELD_OUT]
    require(
        number * size <= kept,
        f"{cache}: {kept} held-out rows in it, expected those of evaluate_batches={number} batches"
        f" of {size}",
    )
    held_out = stored.open_rows(cache, manifest, HELD_OUT, row, columns)
    return Rows(batches, _StoredBatches(held_out, size, number))


def _wanted_columns(
    manifest: Manifest, cfg: StepConfig, cache: Path
) -> tuple[list[int], np.ndarray | None]:
    """The layers that a cache has, and where those of the drafter lie among them; None: all."""
    wanted, there = list(cfg.drafter.target_layer_ids), manifest.made_for.get("target_layer_ids")
    if not (isinstance(there, list) and all(layer in there for layer in wanted)):
        raise InputError(
            f"{cache}: target_layer_ids is {there} there and {wanted} now; expected a cache that"
            " has all of these layers"
        )
    if wanted == there:
        return there, None
    width = cfg.target.hidden_size
    places = [there.index(layer) * width + np.arange(width) for layer in wanted]
    return there, np.concatenate([np.zeros(0, int), *places])


@dataclasses.dataclass(frozen=True)
class _StoredBatches(Sequence[Batch]):
    """Batches that are read when they are wanted: they can be larger than memory."""

    rows: StoredRows
    size: int
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        return batch_of(self.rows.batch(range(self.number)[index], self.size))
