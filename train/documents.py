"""Documents in files: random access, and a limit to how many bad ones are passed over."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from dspark_jax.config import InputError, require
from train import corpus
from train.records import Content, Source, Text, Unanswered, parse
from train.settings import STDLIB, STDLIB_HELD_OUT

BOM = b"\xef\xbb\xbf"
BUCKETS = "gs://"
PIECE = 1 << 15  # bytes of a text that are a document at least
NAMED = 20  # bad records that are worth a line each


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, and where it is: `FILE`, or `FILE: line N`."""

    where: str
    content: Content


@dataclasses.dataclass(frozen=True)
class _Spans:
    """Where the documents of a file are: good lines of a JSONL file, or pieces of a text."""

    path: Path
    offsets: np.ndarray  # [N] bytes
    sizes: np.ndarray  # [N] bytes
    lines: np.ndarray | None  # [N] numbers of the lines, from 1; None for a text

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Document:
        with self.path.open("rb") as file:
            file.seek(int(self.offsets[index]))
            found = file.read(int(self.sizes[index]))
        if self.lines is None:
            return Document(str(self.path), Text(found.decode("utf-8")))
        return Document(f"{self.path}: line {self.lines[index]}", parse(found))


class Documents:
    """Random access to the documents of files.

    A file that ends in .jsonl has one on each line (see `records`). Any other is a text, which is
    cut at ends of lines when it is long, so that its parts can be shuffled. Everything is read and
    checked at the start; afterwards each document where it is needed.

    Args:
      files: paths, also of buckets (gs://), or `stdlib` for the standard library's sources.
      bad_records: how many bad lines are passed over at most.
      check: raises `InputError` for documents that cannot be used.
    Raises:
      InputError: a file that cannot be read, or one bad line too many.
    """

    def __init__(
        self,
        files: Sequence[str],
        *,
        bad_records: int = 0,
        check: Callable[[Content], None] = lambda _: None,
    ):
        require(len(files) > 0, f"files is empty: expected text or JSONL files, or {STDLIB}")
        self.bad: list[str] = []
        """What is wrong with each line that was passed over, and where it is."""
        self.unanswered = 0
        """Prompts without an answer, which are passed over however many there are."""
        self._allowed = bad_records
        self._parts: list[list[Document] | _Spans] = [self._open(f, check) for f in files]
        require(len(self) > 0, f"files={list(files)}: no good record in them")

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __getitem__(self, index: int) -> Document:
        for part in self._parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)

    def passed_over(self) -> Iterator[str]:
        """Lines for people that name the bad records."""
        for reason in self.bad[:NAMED]:
            yield f"passed over: {reason}"
        if len(self.bad) > NAMED:
            yield f"passed over: {len(self.bad) - NAMED} more bad records"
        if self.unanswered:
            yield f"passed over: {self.unanswered} prompts that the target could not answer"

    def _open(self, name: str, check: Callable[[Content], None]) -> list[Document] | _Spans:
        if name in (STDLIB, STDLIB_HELD_OUT):
            texts = corpus.stdlib_texts(held_out=name == STDLIB_HELD_OUT)
            return [Document(name, Source(text)) for text in texts]
        with _file(name) as path:
            return self._index(path, check) if path.suffix == ".jsonl" else _pieces(path)

    def _index(self, path: Path, check: Callable[[Content], None]) -> _Spans:
        numbers, offsets, sizes = (array.array("q") for _ in range(3))
        some = False
        for number, offset, line in _lines(path):
            some = True
            try:
                content = parse(line)
                check(content)
            except InputError as error:
                self._pass_over(f"{path}: line {number}: {error}")
                continue
            if isinstance(content, Unanswered):
                self.unanswered += 1
                continue
            numbers.append(number)
            offsets.append(offset)
            sizes.append(len(line))
        require(some, f"{path}: no documents in it")
        return _Spans(path, *map(np.array, (offsets, sizes, numbers)))

    def _pass_over(self, reason: str) -> None:
        self.bad.append(reason)
        if len(self.bad) > self._allowed:
            limit = f"; bad record {len(self.bad)}, bad_records={self._allowed} are allowed"
            raise InputError(reason + (limit if self._allowed else ""))


def digest(name: str) -> str:
    """Hash of what one of the files holds; errors as for `Documents`."""
    if name in (STDLIB, STDLIB_HELD_OUT):
        texts = corpus.stdlib_texts(held_out=name == STDLIB_HELD_OUT)
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()
    with _file(name) as path, path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _file(name: str) -> Generator[Path]:
    """Around what reads a file; raises `InputError` when it cannot be read."""
    require(
        "://" not in name or name.startswith(BUCKETS),
        f"{name}: expected a path, or one in a bucket ({BUCKETS})",
    )
    path: Any = epath.Path(name) if name.startswith(BUCKETS) else Path(name)
    try:
        _require_file(path)
        yield path
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path}: cannot be read ({reason})") from error
    except ImportError as error:
        raise InputError(f"{path}: to read from buckets install dspark_jax[gcs]") from error


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and text of the lines that are not blank; without the mark of UTF-8 files."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            mark = len(BOM) if number == 1 and line.startswith(BOM) else 0
            if line.strip():
                yield number, offset + mark, line[mark:]
            offset += len(line)


def _require_file(path: Path) -> None:
    require(not path.is_dir(), f"{path}: a folder, expected text or JSONL files")
    require(path.exists(), f"{path}: no such file, expected text, JSONL or {STDLIB}")
    require(path.is_file(), f"{path}: not a file that can be read twice")
    require(
        path.suffix != ".json",
        f"{path}: expected text, or a JSON object on each line in a file that ends in .jsonl",
    )


def _pieces(path: Path) -> _Spans:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason})") from error
    require("\0" not in text, f"{path}: not text (a NUL at character {text.find(chr(0))})")
    require(text.strip() != "", f"{path}: no text in it")
    bounds = [len(BOM) if data.startswith(BOM) else 0]
    while bounds[-1] < len(data):
        line_end = data.find(b"\n", bounds[-1] + PIECE)
        bounds.append(line_end + 1 if line_end >= 0 else len(data))
    return _Spans(path, np.array(bounds[:-1]), np.diff(bounds), None)
