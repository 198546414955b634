"""Training data: documents to padded windows of tokens, in an order that a seed decides.

A document is a text, all of whose tokens are learnt, or a conversation, of which only what the
target itself would generate is: from the end of the generation prompt to the stop token, for every
assistant turn. The pipeline is Grain's; the state of its iterator is a small JSON value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from dspark_jax.config import InputError, require
from dspark_jax.io.tokenizer import Tokenizer
from train import corpus
from train.settings import STDLIB, STDLIB_HELD_OUT, DataSettings

Message = dict[str, str]
Window = dict[str, np.ndarray]

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
SHUFFLED = 1024  # windows that are mixed, so that those of one document lie apart


# --- Documents -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python source; its functions are conversations too: signature asked, body answered."""

    text: str


Document = str | Source | list[Message]


@dataclasses.dataclass(frozen=True)
class _Line:
    """Where a line of a JSONL file is."""

    path: Path
    number: int
    offset: int
    size: int


class Documents:
    """Random access to the documents of files.

    JSONL files are checked line by line at the start, and read where they are needed.
    """

    def __init__(self, files: Sequence[str]):
        require(len(files) > 0, f"files is empty: expected text or JSONL files, or {STDLIB}")
        self._items: list[Source | Path | _Line] = []
        for name in files:
            path = Path(name)
            if name in (STDLIB, STDLIB_HELD_OUT):
                texts = corpus.stdlib_texts(held_out=name == STDLIB_HELD_OUT)
                self._items += map(Source, texts)
                continue
            require(path.is_file(), f"{path}: no such file, expected text, JSONL or {STDLIB}")
            found = list(_lines(path)) if path.suffix == ".jsonl" else [path]
            for item in found:
                _read(item)
            require(len(found) > 0, f"{path}: no documents in it")
            self._items += found

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Document:
        item = self._items[index]
        return item if isinstance(item, Source) else _read(item)


def _lines(path: Path) -> Iterator[_Line]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _Line(path, number, offset, len(line))
            offset += len(line)


def _read(item: Path | _Line) -> Document:
    if isinstance(item, Path):
        try:
            text = item.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{item}: not UTF-8 text ({error.reason})") from error
        require(text.strip() != "", f"{item}: no text in it")
        return text
    where = f"{item.path}: line {item.number}"
    with item.path.open("rb") as file:
        file.seek(item.offset)
        line = file.read(item.size)
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON ({error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text ({error.reason})") from error
    return _document(record, where)


def _document(record: Any, where: str) -> Document:
    require(isinstance(record, dict), f"{where}: expected a JSON object")
    if "text" in record:
        text = record["text"]
        require(isinstance(text, str) and text != "", f"{where}: text: expected a string")
        return text
    name = "messages" if "messages" in record else "conversations"
    turns = record.get(name)
    require(
        isinstance(turns, list) and len(turns) > 0,
        f"{where}: expected messages or conversations (a list of turns), or text (a string)",
    )
    messages = [_message(turn, f"{where}: {name}[{i}]") for i, turn in enumerate(turns)]
    require(
        any(m["role"] == "assistant" for m in messages),
        f"{where}: {name}: expected at least one turn of the assistant",
    )
    return messages


def _message(turn: Any, where: str) -> Message:
    require(isinstance(turn, dict), f"{where}: expected an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    require(
        isinstance(role, str) and isinstance(content, str),
        f"{where}: expected the strings role and content (or from and value)",
    )
    return {"role": ROLES.get(role, role), "content": content}


# --- Tokens ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Encoder(grain.experimental.FlatMapTransform):
    """Documents to windows of tokens.

    A window has `tokens` [S] int32, `loss_mask` [S] bool and `length` [] int32, the tokens that
    are not padding. Windows in which no block could be anchored are left out.
    """

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    max_length: int

    max_fan_out = 2**31 - 1

    def flat_map(self, element: Document) -> list[Window]:
        """Windows of one document, one after the other."""
        match element:
            case str():
                tokens = self.tokenizer.encode(element)
                return list(self._cut(tokens, [True] * len(tokens)))
            case Source():
                chats = corpus.functions(element.text)
                parts = [element.text] + [
                    [{"role": "user", "content": head}, {"role": "assistant", "content": body}]
                    for head, body in chats
                ]
                return [window for part in parts for window in self.flat_map(part)]
        return [w for tokens, mask in self._turns(element) for w in self._cut(tokens, mask)]

    def _turns(self, messages: list[Message]) -> Iterator[tuple[list[int], list[bool]]]:
        """Tokens and loss mask of a conversation.

        Each answer follows exactly the prompt that the target would have read. As long as a prompt
        goes on from what came before, all is one sequence; a template that shows old answers in
        another form (without their thinking, for example) starts a new one.
        """
        tokens: list[int] = []
        mask: list[bool] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.tokenizer.chat(messages[:i]) if i else []
            if prompt[: len(tokens)] != tokens:
                yield tokens, mask
                mask = []
            answer = [*self.tokenizer.encode(message["content"], special=False), self._stop]
            mask += [False] * (len(prompt) - len(mask)) + [True] * len(answer)
            tokens = prompt + answer
        yield tokens, mask

    @functools.cached_property
    def _stop(self) -> int:
        """The stop token that the chat template ends an assistant's turn with."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text = self.tokenizer.chat_text(chat, generation_prompt=False)
        ids = self.tokenizer.encode(text, special=False)
        found = [i for i in ids if i in self.stop_token_ids]
        require(
            len(found) > 0,
            f"{self.tokenizer.path}: the chat template ends no assistant turn with one of the"
            f" target's stop tokens {list(self.stop_token_ids)}",
        )
        return found[-1]

    def _cut(self, tokens: list[int], mask: list[bool]) -> Iterator[Window]:
        size = self.max_length
        for start in range(0, len(tokens), size):
            part = np.array(tokens[start : start + size], np.int32)
            learnt = np.array(mask[start : start + size], bool)
            if (learnt[:-1] & learnt[1:]).any():
                padding = (0, size - len(part))
                yield {
                    "tokens": np.pad(part, padding),
                    "loss_mask": np.pad(learnt, padding),
                    "length": np.array(len(part), np.int32),
                }


# --- Pipeline --------------------------------------------------------------------------------


def make_batches(
    settings: DataSettings, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], *, seed: int
) -> grain.DatasetIterator:
    """Endless batches; each pass over the documents has an order of its own.

    Items are dicts of `tokens` [B, S], `loss_mask` [B, S] and `length` [B]. `get_state` and
    `set_state` of the iterator take it back to any place.

    Raises:
      InputError: anything wrong with the files, with file and line.
    """
    source = Documents(settings.files)
    encoder = Encoder(tokenizer, stop_token_ids, settings.max_length)
    usable = any(encoder.flat_map(source[i]) for i in range(len(source)))
    require(
        usable, f"files={list(settings.files)}: no document in them is long enough to learn from"
    )
    items = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    # Little is read ahead: documents may be long, and the devices may be this machine's CPU.
    items = items.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16))
    windows = grain.experimental.FlatMapIterDataset(items, encoder)
    # The next windows are made while these are learnt from: a refill does not stop the training.
    windows = grain.experimental.ThreadPrefetchIterDataset(windows, prefetch_buffer_size=SHUFFLED)
    windows = grain.experimental.WindowShuffleIterDataset(windows, window_size=SHUFFLED, seed=seed)
    return iter(windows.batch(settings.batch_size, drop_remainder=True))
