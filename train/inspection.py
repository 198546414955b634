"""Rows of training data as text for people: documents apart, and what is learnt in colour."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

import numpy as np

from dspark_jax.io.tokenizer import Tokenizer
from train.documents import Documents

COLOUR = ("\x1b[1;32m", "\x1b[0m")
MARKS = ("[+", "+]")

Row = Mapping[str, np.ndarray]


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def show(number: int, row: Row, tokenizer: Tokenizer, *, colour: bool) -> str:
    """A row of a batch: a line of numbers, and each document under a line of its bounds.

    Args:
      row: `tokens` [S], `loss_mask` [S], `length` [], and `segments` [S] where rows are shared.
      colour: learnt text is green; otherwise it stands between [+ and +].
    """
    length = int(row["length"])
    learnt = int(row["loss_mask"].sum())
    bounds = _bounds(row)
    lines = [
        f"=== row {number}: {_many(len(bounds), 'document')}, {_many(length, 'token')},"
        f" {learnt} learnt, {len(row['tokens']) - length} padding"
    ]
    for k, (start, end) in enumerate(bounds, start=1):
        lines.append(f"--- document {k}: tokens {start}..{end - 1}")
        lines.append(
            _text(row["tokens"][start:end], row["loss_mask"][start:end], tokenizer, colour)
        )
    return "\n".join(lines)


def count(rows: Sequence[Row], documents: Documents) -> str:
    """A line of counts: of the files, and of these rows."""
    places = sum(len(row["tokens"]) for row in rows)
    tokens = sum(int(row["length"]) for row in rows)
    learnt = sum(int(row["loss_mask"].sum()) for row in rows)
    held = sum(len(_bounds(row)) for row in rows)
    return (
        f"files: {_many(len(documents), 'document')}, {_many(len(documents.bad), 'bad record')};"
        f" these {_many(len(rows), 'row')}: {_many(held, 'document')}, {_many(tokens, 'token')},"
        f" {learnt / tokens:.1%} of them learnt, {1 - tokens / places:.1%} padding"
    )


def _many(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _bounds(row: Row) -> list[tuple[int, int]]:
    """First token of each document of a row, and the one after its last."""
    length = int(row["length"])
    if "segments" not in row:
        return [(0, length)]
    inside = row["segments"][:length]
    begins = [0, *(np.flatnonzero(np.diff(inside)) + 1).tolist(), length]
    return list(itertools.pairwise(begins))


def _text(tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer, colour: bool) -> str:
    before, after = COLOUR if colour else MARKS
    parts = []
    for learnt, run in itertools.groupby(zip(tokens.tolist(), mask.tolist(), strict=True), _second):
        text = _printable(tokenizer.decode([token for token, _ in run], special=True))
        parts.append(f"{before}{text}{after}" if learnt else text)
    return "".join(parts)


def _second(pair: tuple[int, bool]) -> bool:
    return pair[1]


def _printable(text: str) -> str:
    """Without characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
