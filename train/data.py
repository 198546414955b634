"""Training data: documents to batches of rows, in an order that a seed decides.

    python -m train.data --inspect N [PRESET] [--setting value ...]

prints the first N rows of a run, with what is learnt in colour. The pipeline is Grain's:

    documents ─ shuffled, again in each pass ─┬ lane 0: encoded, packed, mixed ─┬─ batch
                                              ├ lane 1: ..                     ─┤
                                              └ ..                              ┘

Documents are dealt to lanes, and every batch takes the same number of rows from each. Hosts share
the lanes, whose number depends on the batch size alone: the batches are the same on any number of
hosts, and no host reads what another needs. The state of the iterator is a small JSON value, the
places of its lanes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Arguments
from typing import Any

import grain
import numpy as np

from dspark_jax.config import require
from dspark_jax.io import cli, model_config
from train import inspection
from train.documents import Document, Documents
from train.encoding import Encoder, make_encoder
from train.presets import parse_arguments
from train.settings import DataSettings
from train.target import target_folder

Row = dict[str, np.ndarray]
Place = dict[str, Any]

LANES = 64  # at most
MIXED = 1024  # rows that are filled together, over all lanes; those of one document lie apart then
BATCHES_AHEAD = 16
ENDLESS = sys.maxsize


def open_documents(settings: DataSettings, encoder: Encoder) -> Documents:
    """The documents that the settings name.

    Raises:
      InputError: anything wrong with the files, with file and line.
    """
    documents = Documents(settings.files, bad_records=settings.bad_records, check=encoder.check)
    require(
        any(encoder.encode(documents[i]) for i in range(len(documents))),
        f"files={list(settings.files)}: no document in them is long enough to learn from",
    )
    return documents


def as_it_is(batch: Row) -> Row:
    """Nothing is changed."""
    return batch


def make_batches(
    settings: DataSettings,
    documents: Documents,
    encoder: Encoder,
    *,
    seed: int,
    part: int = 0,
    parts: int = 1,
    finish: Callable[[Row], Any] = as_it_is,
) -> grain.DatasetIterator:
    """Endless batches, of which each host has its part (hosts.batch_share), or some the same.

    Items are dicts of `tokens` [B, S] int32, `loss_mask` [B, S] bool, `length` [B] int32 (tokens
    that are not padding) and, where documents share rows, `segments` [B, S] int32 (1, 2, .. for the
    documents of a row, 0 for padding); B is the part's share of the batch size. Where they are made
    ahead, `finish` turns them into what is wanted. `get_state` and `set_state` of the iterator take
    it back to any place.

    Raises:
      InputError: the batch cannot be shared evenly.
    """
    own, lanes = own_lanes(settings.batch_size, part, parts)
    items = grain.MapDataset.source(_Passes(documents, seed))
    rows = [
        # Lanes hold different numbers of rows, so that they are not all refilled at one time.
        _lane(
            items[lane::lanes],
            settings,
            encoder,
            seed=seed + lane,
            mixed=max(1, MIXED * (2 * lanes - lane) // (2 * lanes**2)),
        )
        for lane in own
    ]
    each = settings.batch_size // lanes
    return join_lanes([lane.batch(each) for lane in rows], finish, ahead=BATCHES_AHEAD)


def own_lanes(batch_size: int, part: int, parts: int) -> tuple[range, int]:
    """Numbers of the lanes that a part of the hosts reads, and how many there are in all.

    Raises:
      InputError: they cannot be shared evenly.
    """
    lanes = math.gcd(batch_size, LANES)
    require(
        lanes % parts == 0,
        f"batch_size={batch_size} read in {parts} parts by hosts: expected a batch size"
        f" that shares with {LANES} a divisor which is a multiple of {parts}",
    )
    own = lanes // parts
    return range(part * own, (part + 1) * own), lanes


def join_lanes(
    lanes: list[grain.IterDataset], finish: Callable[[Row], Any], *, ahead: int
) -> grain.DatasetIterator:
    """Batches of the rows that each lane gives at a time, one lane behind the other, and finished.

    Up to `ahead` of them are made while another is learnt from.
    """
    batches = grain.experimental.ZipIterDataset(lanes).map(_join).map(finish)
    return iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=ahead))


def join_places(places: Iterable[tuple[int, Place]]) -> list[Any]:
    """The places of all lanes, of (part, its iterator's place) of all hosts; JSON values."""
    return [lane for _, place in sorted(dict(places).items()) for lane in place["parents"]]


def own_place(lanes: list[Any], part: int, parts: int) -> Place:
    """The place of the iterator of a part, of those of all lanes, whoever had read them."""
    own = len(lanes) // parts
    return {"parents": lanes[part * own : (part + 1) * own]}


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Endless passes over documents, each in an order of its own.

    Grain's own shuffle takes up to 10 ms an item when there are few.
    """

    documents: Documents
    seed: int

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Document:
        number, place = divmod(index, len(self.documents))
        return self.documents[int(pass_order(len(self.documents), self.seed, number)[place])]


@functools.lru_cache(maxsize=4)
def pass_order(size: int, seed: int, number: int) -> np.ndarray:
    """Order [size] of the items in pass `number`."""
    return np.random.default_rng((seed, number)).permutation(size)


def _lane(
    documents: grain.MapDataset, settings: DataSettings, encoder: Encoder, *, seed: int, mixed: int
) -> grain.IterDataset:
    """Endless rows of one part of the documents, `mixed` of which are filled together."""
    size, several = settings.max_length, settings.documents_per_row > 1
    # All lanes are read by the one thread that reads batches ahead: each has little to do.
    items = documents.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    sequences = grain.experimental.FlatMapIterDataset(items, _Encode(encoder))
    # Rows come out in an order that is drawn. (Grain's window shuffle takes up to 10 ms an item.)
    packed = grain.experimental.BestFitPackIterDataset(
        sequences,
        length_struct={"tokens": size, "loss_mask": size},
        num_packing_bins=mixed,
        max_sequences_per_bin=None if several else 1,
        shuffle_bins=True,
        seed=seed,
    )
    return packed.map(_row if several else _row_of_one)


@dataclasses.dataclass(frozen=True)
class _Encode(grain.experimental.FlatMapTransform):
    encoder: Encoder

    max_fan_out = 2**31 - 1

    def flat_map(self, element: Document) -> list[Row]:
        found = self.encoder.encode(element)
        return [{"tokens": s.tokens, "loss_mask": s.loss_mask} for s in found]


def _row(packed: Row) -> Row:
    segments = packed["tokens_segment_ids"]
    return {
        "tokens": packed["tokens"],
        "loss_mask": packed["loss_mask"],
        "segments": segments,
        "length": np.array(np.count_nonzero(segments), np.int32),
    }


def _row_of_one(packed: Row) -> Row:
    return {name: value for name, value in _row(packed).items() if name != "segments"}


def _join(parts: tuple[Row, ...]) -> Row:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# --- Command ---------------------------------------------------------------------------------


def main(args: Arguments[str]) -> int:
    """Prints rows; returns the exit code."""
    number, args = _take_number(list(args))
    settings = parse_arguments(args, prog="train.data --inspect N", description=__doc__ or "")
    folder = target_folder(settings)
    encoder = make_encoder(settings.data, folder, model_config.load_target_config(folder))
    documents = open_documents(settings.data, encoder)
    for line in documents.passed_over():
        print(line, file=sys.stderr)
    batches = make_batches(settings.data, documents, encoder, seed=settings.seed)
    rows = [
        {name: value[i] for name, value in batch.items()}
        for batch in itertools.islice(batches, -(-number // settings.data.batch_size))
        for i in range(settings.data.batch_size)
    ][:number]
    colour = inspection.wants_colour(sys.stdout)
    for i, row in enumerate(rows):
        print(inspection.show(i, row, encoder.tokenizer, colour=colour))
    print(inspection.count(rows, documents))
    return 0


def _take_number(args: list[str]) -> tuple[int, list[str]]:
    """The N of `--inspect N`, and the other arguments."""
    if {"-h", "--help"} & set(args):
        return 0, args
    args = [part for arg in args for part in re.split("(?<=^--inspect)=", arg)]
    require("--inspect" in args, "expected --inspect N, and the settings of train.main")
    at = args.index("--inspect")
    value = "".join(args[at + 1 : at + 2])
    require(
        value.isascii() and value.isdigit() and int(value) > 0,
        f"--inspect {value}: expected a number of rows",
    )
    return int(value), args[:at] + args[at + 2 :]


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
