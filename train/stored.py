"""Rows with their hidden states in files: what `train.cache` writes and `--features` reads.

A cache is a folder. Its manifest says what it was made for and names its shards, each with its size
and checksum; a shard is an ArrayRecord file with a row in each record. The rows are those that
`train.data` makes, in the same order. ArrayRecord has checksums of its own, so that each record is
verified when it is read; those of whole files are for what would be found too late.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import grain
import jax.numpy as jnp
import numpy as np
from array_record.python import array_record_module

from dspark_jax.config import InputError, require
from dspark_jax.io import files
from train import checksums, data
from train.data import Row

MANIFEST, FORMAT = "manifest.json", 1
TRAINING, HELD_OUT = "training", "held_out"
PARTS = (TRAINING, HELD_OUT)

SHARD_BYTES = 1 << 30  # of a shard at least
MOST_SHARDS = 512  # of a part; each that is read is an open file
FOOTER = 1 << 17  # bytes that ArrayRecord adds to a file at most, and to each byte of it:
OVERHEAD = 0.001
READ_AT_START = 8 << 30
"""Bytes up to which a whole cache is read before it is used."""

StorageType = Literal["bfloat16", "float32"]


# --- What is stored --------------------------------------------------------------------------


def row_type(
    *, length: int, width: int, taps: int, packed: bool, storage: StorageType
) -> np.dtype[Any]:
    """A row as it lies in a record: S tokens, and hidden states of width D of L tapped layers."""
    state = np.dtype(jnp.dtype(storage))
    fields: list[Any] = [
        ("number", "<i8"),  # place among the rows of its part
        ("features", state, (length, taps * width)),
        ("final", state, (length, width)),
        ("tokens", "<i4", (length,)),
        *([("segments", "<i4", (length,))] if packed else []),
        ("length", "<i4"),
        ("loss_mask", "?", (length,)),
    ]
    return np.dtype(fields)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of rows that has been written."""

    rows: int
    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a cache is to hold, and what is there of it."""

    made_for: Mapping[str, object]
    """Target, taps and data, as JSON values (`rows.made_for`)."""
    order: Mapping[str, object]
    """What decides which rows come first: seed and batch size."""
    storage: StorageType
    row_bytes: int
    rows: Mapping[str, int]
    """Of each part."""
    shard_rows: Mapping[str, int]
    """Rows of a shard of each part; the last has what is left."""
    shards: Mapping[str, Shard] = dataclasses.field(default_factory=dict)
    """Those that are written, by name."""

    @classmethod
    def planned(
        cls,
        made_for: Mapping[str, object],
        order: Mapping[str, object],
        storage: StorageType,
        row_bytes: int,
        rows: Mapping[str, int],
    ) -> Manifest:
        """Of a cache that is to be written."""
        each = max(1, SHARD_BYTES // row_bytes)
        sizes = {part: max(each, -(-number // MOST_SHARDS)) for part, number in rows.items()}
        return cls(made_for, order, storage, row_bytes, rows, sizes)

    def places(self, part: str) -> dict[str, range]:
        """Names of the shards of a part, and which rows each holds."""
        rows, each = self.rows[part], self.shard_rows[part]
        return {
            f"{part}-{number:05}.array_record": range(first, min(first + each, rows))
            for number, first in enumerate(range(0, rows, each))
        }

    def missing(self, part: str) -> dict[str, range]:
        """Those of `places` that are still to be written."""
        return {n: span for n, span in self.places(part).items() if n not in self.shards}

    def missing_bytes(self) -> int:
        """Size of all files that are still to be written, at most."""
        spans = [span for part in PARTS for span in self.missing(part).values()]
        rows = sum(map(len, spans))
        return math.ceil(rows * self.row_bytes * (1 + OVERHEAD)) + FOOTER * len(spans)

    def write(self, folder: Path) -> None:
        """Writes it into the folder of the cache, whole or not at all."""
        in_order = dataclasses.replace(self, shards=dict(sorted(self.shards.items())))
        values = {"format": FORMAT, **dataclasses.asdict(in_order)}
        files.write_whole(folder / MANIFEST, json.dumps(values, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache; raises `InputError` when there is none, or it cannot be right."""
    path = folder / MANIFEST
    require(folder.is_dir(), f"{folder}: no such folder, expected one that train.cache has written")
    require(path.is_file(), f"{path}: no such file, expected a folder that train.cache has written")
    values = files.read_json(path)
    require(
        values.pop("format", None) == FORMAT,
        f"{path}: expected format {FORMAT}, as this version of train.cache writes it",
    )
    match values:
        case {
            "made_for": dict(),
            "order": dict(),
            "storage": "bfloat16" | "float32",
            "row_bytes": int(),
            "rows": {"training": int(), "held_out": int(), **more_rows},
            "shard_rows": {"training": int(), "held_out": int(), **more_sizes},
            "shards": dict(shards),
            **more,
        } if not (more_rows or more_sizes or more):
            numbers = (values["row_bytes"], *values["shard_rows"].values())
            require(
                min(numbers) > 0 <= min(values["rows"].values()),
                f"{path}: expected numbers above 0",
            )
        case _:
            raise InputError(
                f"{path}: expected made_for, order, storage, row_bytes, rows, shard_rows and"
                " shards, as train.cache writes them"
            )
    found = {}
    for name, entry in shards.items():
        match entry:
            case {"rows": int(rows), "bytes": int(size), "crc32": int(crc32)}:
                found[name] = Shard(rows, size, crc32)
            case _:
                raise InputError(f"{path}: {name}: expected its rows, bytes and crc32")
    manifest = Manifest(**{**values, "shards": found})
    for part in PARTS:
        for name, span in manifest.places(part).items():
            require(
                name not in found or found[name].rows == len(span),
                f"{path}: {name} has {found[name].rows if name in found else 0} rows, expected"
                f" {len(span)}",
            )
    return manifest


def require_made_for(
    there: Mapping[str, object], here: Mapping[str, object], folder: Path, *, expected: str
) -> None:
    """Raises `InputError` with the first thing in which a cache is not what is wanted."""
    for name, value in here.items():
        require(
            there.get(name) == value,
            f"{folder}: {name} is {json.dumps(there.get(name))} there and {json.dumps(value)} now;"
            f" expected {expected}",
        )


def damage(path: Path, shard: Shard, *, thorough: bool) -> str | None:
    """What is wrong with the file of a shard; None when it is as it was written.

    Args:
      thorough: read all of it.
    """
    if not path.is_file():
        return "it is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"it has {size} bytes, expected {shard.bytes}"
    if thorough and checksums.crc32(path) != shard.crc32:
        return "it has another checksum than when it was written"
    return None


# --- Reading ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Random access to the rows of one part of a cache."""

    folder: Path
    part: str
    row: np.dtype[Any]
    records: grain.sources.ArrayRecordDataSource

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
        return {name: found[name] for name in self.row.names or () if name != "number"}

    def batch(self, number: int, size: int) -> Row:
        """Rows number * size .. (number + 1) * size - 1, stacked."""
        rows = [self[i] for i in range(number * size, (number + 1) * size)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def open_rows(folder: Path, manifest: Manifest, part: str, row: np.dtype[Any]) -> StoredRows:
    """The rows of a part of a cache.

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
    return StoredRows(folder, part, row, grain.sources.ArrayRecordDataSource(paths))


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
