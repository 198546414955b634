"""The tokens that a drafter of a pruned vocabulary proposes: counted once, kept with the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dspark_jax.config import DraftingConfig, InputError
from dspark_jax.io import files
from dspark_jax.vocabulary import most_frequent

FILE = "draft_vocabulary.json"
COUNTED = 2**20
"""Learnt tokens that are counted, the first that the run reads."""


def count(batches: Iterable[Mapping[str, np.ndarray]], cfg: DraftingConfig) -> tuple[int, ...]:
    """The most frequent of the learnt tokens of the first of endless batches, ascending."""
    counts = np.zeros(cfg.vocab_size, np.int64)
    for items in batches:
        counts += np.bincount(items["tokens"][items["loss_mask"]], minlength=cfg.vocab_size)
        if counts.sum() >= COUNTED:
            break
    return tuple(most_frequent(counts, cfg.output_size).tolist())


def write(folder: Path, ids: tuple[int, ...]) -> None:
    """Writes them into a workdir."""
    files.write_whole(folder / FILE, json.dumps({"ids": ids}) + "\n")


def read(folder: Path, cfg: DraftingConfig) -> tuple[int, ...] | None:
    """Those of the run in a workdir; None when it may draft all, or has not begun.

    Raises:
      InputError: they are not what the drafter needs.
    """
    path = folder / FILE
    if cfg.draft_vocab_size is None or not path.exists():
        return None
    ids = files.read_json(path).get("ids")
    known = range(cfg.vocab_size)
    fits = isinstance(ids, list) and all(isinstance(i, int) and i in known for i in ids)
    if not fits or not len({*ids}) == len(ids) == cfg.draft_vocab_size:
        raise InputError(
            f"{path}: expected {cfg.draft_vocab_size} different ids in 0..{cfg.vocab_size - 1}"
        )
    return tuple(ids)
