"""The manifest of a cache of hidden states: what it was made for, and what is there of it.

A shard is a file of rows that follow one another. The manifest names it when it is whole, with its
size and its checksum.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from dspark_jax.config import InputError, require
from dspark_jax.io import files
from train import checksums

MANIFEST, FORMAT = "manifest.json", 1
TRAINING, HELD_OUT = "training", "held_out"
PARTS = (TRAINING, HELD_OUT)

SHARD_BYTES = 1 << 30  # of a shard at least
MOST_SHARDS = 512  # of a part; each that is read is an open file
FOOTER = 1 << 17  # bytes that ArrayRecord adds to a file at most, and to each byte of it:
OVERHEAD = 0.001

StorageType = Literal["bfloat16", "float32"]


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
