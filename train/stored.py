"""Rows with their hidden states in files: what `train.cache` writes and `--features` reads.

A cache is a folder of shards and their manifest; a shard is an ArrayRecord file with a row in each
record. The rows are those that `train.data` makes, in the same order. ArrayRecord has checksums of
its own, so that each record is verified when it is read; those of whole files are for what would be
found too late.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
from array_record.python import array_record_module

from dspark_jax.config import InputError, require
from train import checksums, data
from train.data import Row
from train.manifest import Manifest, Shard, StorageType, damage

READ_AT_START = 8 << 30
"""Bytes up to which a whole cache is read before it is used."""
UNFINISHED = ".tmp"
"""Behind the name of a file that is being written."""
OPTIONS = "group_size:1,uncompressed"  # one row a record: states hardly compress


# --- What is stored --------------------------------------------------------------------------


def row_type(
    *, length: int, width: int, taps: int, packed: bool, storage: StorageType
) -> np.dtype[Any]:
    """A row as it lies in a record: S tokens, and hidden states of width D of L tapped layers."""
    state = np.dtype(jnp.dtype(storage))
    fields: list[Any] = [
        ("number", "<i8"),  # place among the rows of its part
        *([("features", state, (length, taps * width))] if taps else []),
        ("final", state, (length, width)),
        ("tokens", "<i4", (length,)),
        *([("segments", "<i4", (length,))] if packed else []),
        ("length", "<i4"),
        ("loss_mask", "?", (length,)),
    ]
    return np.dtype(fields)


# --- Writing ---------------------------------------------------------------------------------


def write_shard(
    path: Path, rows: Iterable[Row], row: np.dtype[Any], written: Callable[[], object]
) -> Shard:
    """Writes rows to a file beside `path`, with `UNFINISHED` behind its name.

    Args:
      written: is told of each row.

    Raises:
      OSError: it cannot be written.
    """
    beside, number = path.with_name(path.name + UNFINISHED), 0
    try:
        writer = array_record_module.ArrayRecordWriter(str(beside), OPTIONS)
        for found in rows:
            record = np.zeros((), row)
            for name in row.names or ():
                record[name] = found[name]
            writer.write(record.tobytes())
            number += 1
            written()
        writer.close()
    except RuntimeError as error:  # of ArrayRecord
        raise OSError(f"{path}: cannot be written ({str(error).partition(';')[0]})") from error
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    return Shard(number, beside.stat().st_size, checksums.crc32(beside))


# --- Reading ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Random access to the rows of one part of a cache."""

    folder: Path
    part: str
    row: np.dtype[Any]
    records: grain.sources.ArrayRecordDataSource
    columns: np.ndarray | None = None
    """Of `features`, those that are wanted; None: all of them."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Row:
        where = f"{self.folder}: row {index} of {self.part}"
        again = "expected it as it was written; train.cache --verify mends it"
        try:
            data = self.records[index]
        except RuntimeError as error:  # what ArrayRecord raises when a checksum differs
            raise InputError(f"{where} cannot be read ({error}); {again}") from error
        require(len(data) == self.row.itemsize, f"{where} has {len(data)} bytes; {again}")
        found = np.frombuffer(data, self.row)[0]
        require(found["number"] == index, f"{where} is row {found['number']}; {again}")
        row = {name: found[name] for name in self.row.names or () if name != "number"}
        if self.columns is not None:
            features = row.pop("features")
            if len(self.columns):
                row["features"] = features[:, self.columns]
        return row

    def batch(self, number: int, size: int) -> Row:
        """Rows number * size .. (number + 1) * size - 1, stacked."""
        rows = [self[i] for i in range(number * size, (number + 1) * size)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def open_rows(
    folder: Path,
    manifest: Manifest,
    part: str,
    row: np.dtype[Any],
    columns: np.ndarray | None = None,
) -> StoredRows:
    """The rows of a part of a cache, with those columns of their features that are wanted.

    Raises:
      InputError: shards are not written yet, or not as they were written. Whole files are read only
        when they are not too many; of others, a record that has changed is found when it is read.
    """
    require(
        manifest.row_bytes == row.itemsize,
        f"{folder}: rows have {manifest.row_bytes} bytes there, expected {row.itemsize}",
    )
    missing = list(manifest.missing(part))
    require(
        not missing,
        f"{folder}: {len(missing)} shards of {part} are not written yet, from {missing[:1]} on;"
        " expected a finished cache: the same train.cache command goes on",
    )
    names = manifest.places(part)
    thorough = sum(manifest.shards[name].bytes for name in names) <= READ_AT_START
    for name, span in names.items():
        reason = damage(folder / name, manifest.shards[name], thorough=thorough)
        if reason is None:
            number = _records(folder / name)
            reason = None if number == len(span) else f"it has {number} rows, expected {len(span)}"
        require(
            reason is None,
            f"{folder / name}: {reason}; the same train.cache command with --verify mends it",
        )
    paths = [f"{folder / name}[0:{len(span)}]" for name, span in names.items()]
    return StoredRows(folder, part, row, grain.sources.ArrayRecordDataSource(paths), columns)


def _records(path: Path) -> int:
    """Records of a file, 0 when it is none of ArrayRecord's."""
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        number = reader.num_records()
        reader.close()
    except RuntimeError:
        return 0
    return number


def make_batches(
    rows: StoredRows,
    *,
    batch_size: int,
    seed: int,
    part: int = 0,
    parts: int = 1,
    finish: Callable[[Row], Any] = data.as_it_is,
) -> grain.DatasetIterator:
    """Endless batches of stored rows: `data.make_batches`, with the states beside the tokens.

    First in the order in which they lie, which is that of the run they were made for; then again
    and again, in orders that the seed decides. Items have `features` [B, S, L * D] and `final`
    [B, S, D] too. Places are those of `data.make_batches`: of lanes, whoever reads them.

    Raises:
      InputError: the batch cannot be shared evenly.
    """
    own, lanes = data.own_lanes(batch_size, part, parts)
    each = batch_size // lanes
    # Rows are large. A lane reads those of the next batch in a thread of its own, no more.
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=each)
    datasets = [
        grain.MapDataset.source(_Lane(rows, seed, lane, each, batch_size))
        .to_iter_dataset(ahead)
        .batch(each)
        for lane in own
    ]
    return data.join_lanes(datasets, finish, ahead=1)


@dataclasses.dataclass(frozen=True)
class _Lane:
    """Rows of one lane: `each` of every batch, in endless passes over all that are stored."""

    rows: StoredRows
    seed: int
    lane: int
    each: int
    batch_size: int

    def __len__(self) -> int:
        return data.ENDLESS

    def __getitem__(self, index: int) -> Row:
        batch, place = divmod(index, self.each)
        number, at = divmod(batch * self.batch_size + self.lane * self.each + place, len(self.rows))
        if number:
            at = int(data.pass_order(len(self.rows), self.seed, number)[at])
        return self.rows[at]
