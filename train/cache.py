"""Stores the hidden states that training needs, so that the target runs over its rows once.

    python -m train.cache [PRESET] [--setting value ...] --output DIR

The settings are those of `train.main`. The target reads the very rows that a run of them would, in
its order: those of its first --batches steps, and those that it is evaluated on. `train.main` with
the same settings and --features DIR then trains on them without the target's layers, over and over
when it has more steps. What it takes on the disk is printed first. Interrupted, the command goes on
where it was.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError
from tqdm import tqdm

from dspark_jax.config import require
from dspark_jax.io import cli, files, model_config
from dspark_jax.targets.dense import Hidden, Target
from train import features, hosts
from train.data import Row
from train.encoding import make_encoder
from train.manifest import (
    HELD_OUT,
    MANIFEST,
    PARTS,
    TRAINING,
    Manifest,
    StorageType,
    damage,
    read_manifest,
    require_made_for,
)
from train.prepare import make_mesh, step_config
from train.presets import parse_around
from train.rows import batch_of, held_out_batches, made_for, make_batches, row_type
from train.settings import Settings
from train.step import Batch, StepConfig
from train.stored import UNFINISHED, write_shard
from train.target import load_target, target_folder

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """Cache."""

    run: Settings
    output: Path = Path("runs/features")
    """Folder of the cache; one that was begun with the same settings goes on."""
    batches: int | None = None
    """Batches to store; by default all of the run's steps."""
    storage: StorageType = "bfloat16"
    """Of the states on the disk. bfloat16 loses nothing of a target that computes in it."""
    verify: bool = False
    """Read shards that are there once more, and write those again that have changed."""

    def __post_init__(self):
        require(
            self.batches is None or self.batches > 0,
            f"batches={self.batches}: expected a number above 0",
        )
        require(
            self.run.features is None,
            f"features={self.run.features}: expected none, they are to be computed",
        )
        require(
            self.run.hosts.coordinator is None,
            f"coordinator={self.run.hosts.coordinator}: expected none, one process writes a cache",
        )


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = parse_around(args, CacheSettings, prog="train.cache", description=__doc__ or "")
    try:
        with cli.stop_signals() as stopped:
            return write_cache(settings, stopped)
    except SafetensorError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def write_cache(settings: CacheSettings, stopped: list[int]) -> int:
    """Writes a cache, or the rest of one, until a signal is in `stopped`; returns the exit code.

    Raises:
      InputError: anything wrong with the settings, no room on the disk, or something else in the
        folder; nothing has been written then.
    """
    run, output = settings.run, settings.output
    folder = target_folder(run)
    target_config = model_config.load_target_config(folder)
    cfg = step_config(run, target_config, run.drafter_config(target_config))
    mesh = make_mesh(run)
    encoder = make_encoder(run.data, folder, target_config)
    row = row_type(run, cfg, len(cfg.drafter.target_layer_ids), settings.storage)
    held_out = held_out_batches(run, encoder)
    batches = make_batches(run, run.data.files, encoder)
    number = run.optimizer.steps if settings.batches is None else settings.batches
    size = run.data.batch_size
    wanted = Manifest.planned(
        made_for(run, cfg, folder),
        {"seed": run.seed, "batch_size": size},
        settings.storage,
        row.itemsize,
        {TRAINING: number * size, HELD_OUT: len(held_out) * size},
    )
    manifest = begin(output, wanted, verify=settings.verify)
    check_space(output, manifest)
    target = load_target(run, folder, target_config, mesh)

    output.mkdir(parents=True, exist_ok=True)
    for path in output.glob(f"*{UNFINISHED}"):
        path.unlink()
    manifest.write(output)
    compute = make_compute(cfg, mesh, settings.storage)
    bar = tqdm(
        total=sum(len(span) for part in PARTS for span in manifest.missing(part).values()),
        unit="row", file=sys.stderr, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        for part, items in ((HELD_OUT, iter(held_out)), (TRAINING, batches)):
            missing = manifest.missing(part)
            chunks = chunks_with(items, size // run.compute.microbatches, missing.values())
            rows = rows_of(chunks, lambda x: compute(target, x), missing.values(), stopped)
            for name, span in missing.items():
                shard = write_shard(
                    output / name, itertools.islice(rows, len(span)), row, bar.update
                )
                if shard.rows < len(span):
                    (output / f"{name}{UNFINISHED}").unlink()
                    print("stopped; the same command goes on from there", file=sys.stderr)
                    return 0
                os.replace(output / f"{name}{UNFINISHED}", output / name)
                manifest = dataclasses.replace(manifest, shards={**manifest.shards, name: shard})
                manifest.write(output)
    total = sum(shard.bytes for shard in manifest.shards.values())
    print(f"{sum(manifest.rows.values())} rows, {readable(total)}: {output}")
    return 0


# --- Before it starts ------------------------------------------------------------------------


def begin(folder: Path, wanted: Manifest, *, verify: bool) -> Manifest:
    """What is there of the cache that is wanted, in a folder that may have been begun.

    Shards that are not as they were written are named on stderr and count as missing.

    Raises:
      InputError: the folder holds another cache, or something else.
    """
    files.require_room(folder)
    if not (folder / MANIFEST).exists():
        require(
            not folder.exists() or all(path.suffix == UNFINISHED for path in folder.iterdir()),
            f"{folder}: files in it and no {MANIFEST}; expected an empty folder, or a cache",
        )
        return wanted
    there = read_manifest(folder)
    require_made_for(
        described(there), described(wanted), folder, expected="the same, or another folder"
    )
    kept = {}
    for name, shard in there.shards.items():
        reason = damage(folder / name, shard, thorough=verify)
        if reason is None:
            kept[name] = shard
        else:
            print(f"{folder / name}: {reason}; it is written again", file=sys.stderr)
    return dataclasses.replace(there, shards=kept)


def described(manifest: Manifest) -> dict[str, object]:
    """All that decides what is in a cache."""
    return {
        **manifest.made_for,
        **manifest.order,
        "storage": manifest.storage,
        "row_bytes": manifest.row_bytes,
        **{f"rows of {part}": manifest.rows[part] for part in PARTS},
    }


def check_space(folder: Path, manifest: Manifest) -> None:
    """Prints what is still to be written; raises `InputError` when the disk has no room for it."""
    size = manifest.missing_bytes()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    torn = sum(path.stat().st_size for path in folder.glob(f"*{UNFINISHED}"))
    free = shutil.disk_usage(there).free + torn
    rows = sum(len(span) for part in PARTS for span in manifest.missing(part).values())
    print(
        f"{rows} of {sum(manifest.rows.values())} rows of {readable(manifest.row_bytes)} are to be"
        f" written: {readable(size)}, of {readable(free)} that are free",
        flush=True,
    )
    require(
        size <= free,
        f"{folder}: {readable(size)} are to be written and {readable(free)} are free; expected"
        " room for them, or fewer --batches",
    )


def readable(size: int) -> str:
    """Bytes for people."""
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.3g} {UNITS[unit]}"


# --- Rows and their states -------------------------------------------------------------------


def make_compute(
    cfg: StepConfig, mesh: Mesh, storage: StorageType
) -> Callable[[Target, Row], Hidden]:
    """Starts to compute the states of rows [N, S], by what the step computes them by."""
    states = features.make_states(
        "online", cfg.target, cfg.drafter.target_layer_ids, attention=cfg.attention, mesh=mesh
    )

    def of(target: Target, batch: Batch) -> Hidden:
        target = features.fetch_ends(target, cfg.target, mesh)
        hidden = states(target, batch.tokens, batch.segments, None)
        return jax.tree.map(lambda x: x.astype(storage), hidden)

    run = jax.jit(of)
    return lambda target, rows: run(target, hosts.global_batch(mesh, batch_of(rows)))


def chunks_with(
    batches: Iterator[Row], size: int, spans: Iterable[range]
) -> Iterator[tuple[int, Row]]:
    """Rows that lie side by side, `size` at a time, and the number of their first; only those of
    which some are in the spans, up to the last of them."""
    wanted, first = list(spans), 0
    while wanted:
        items = next(batches)
        for start in range(0, len(items["tokens"]), size):
            at = range(first + start, first + start + size)
            if any(span.start < at.stop and at.start < span.stop for span in wanted):
                yield at.start, {n: x[start : start + size] for n, x in items.items()}
        first += len(items["tokens"])
        wanted = [span for span in wanted if span.stop > first]


def rows_of(
    chunks: Iterable[tuple[int, Row]],
    compute: Callable[[Row], Hidden],
    spans: Iterable[range],
    stopped: list[int],
) -> Iterator[Row]:
    """The rows of the spans with their numbers and states, until a signal is in `stopped`.

    Devices work on a chunk while that before is written.
    """
    wanted = sorted(number for span in spans for number in (span.start, span.stop))
    started = ((first, chunk, compute(chunk)) for first, chunk in chunks)
    for first, chunk, hidden in _one_ahead(started):
        if stopped:
            return
        states = vars(jax.device_get(hidden))
        found = {**chunk, **{name: x for name, x in states.items() if x is not None}}
        for place in range(len(found["tokens"])):
            # Inside a span when an odd number of bounds lie at or before it.
            if bisect.bisect_right(wanted, first + place) % 2:
                number = np.array(first + place)
                yield {"number": number, **{n: x[place] for n, x in found.items()}}


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; the next is asked for before one is given."""
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
