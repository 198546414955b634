"""Tokenizers and chat templates, by way of transformers and without PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from dspark_jax.config import InputError, require
from dspark_jax.io import gguf, gguf_tokenizer
from dspark_jax.io.files import read_json, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

ROLES = ("system", "user", "assistant", "tool")
"""Who speaks in a chat."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back, and chats as the model was trained to read them."""

    path: Path
    """Folder or GGUF file that it comes from."""
    backend: PreTrainedTokenizerFast

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence id of the tokenizer's own configuration, if it names one."""
        found = self.backend.eos_token_id
        return () if found is None else (found,)

    @property
    def vocab_size(self) -> int:
        """Ids that stand for text; a model's vocabulary may be padded beyond them."""
        return len(self.backend)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text as it stands.

        `special` lets the tokenizer's post-processor add its tokens (Llama's begin-of-text; Qwen3
        has none). The text of a chat already holds them: encode it with `special=False`.
        """
        return _ids(self.backend.backend_tokenizer, text, special=special)

    def encode_literally(self, text: str) -> list[int]:
        """Ids of a text as a model would write it: what looks like a special token is text in it.

        Nothing is added. Tokens of the vocabulary that are added but not special (Qwen3's tool call
        marks) are what they are.
        """
        return _ids(self._literal, text, special=False)

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy: the switch is part of a tokenizer's state."""
        copy = tokenizers.Tokenizer.from_str(self.backend.backend_tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`; stop tokens and the like are left out unless `special`."""
        text = self.backend.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def chat(self, messages: Messages, *, thinking: bool = False, tools: Tools = None) -> list[int]:
        """Ids of a chat up to and with the generation prompt."""
        text = self.chat_text(messages, generation_prompt=True, thinking=thinking, tools=tools)
        return self.encode(text, special=False)

    def chat_text(
        self,
        messages: Messages,
        *,
        generation_prompt: bool,
        thinking: bool = False,
        tools: Tools = None,
    ) -> str:
        """A chat as text, by the chat template.

        Args:
          messages: each with `role` and `content`.
          generation_prompt: whether the text ends in what the next assistant turn starts with.
          thinking: whether that turn may think (templates without the switch ignore it).
          tools: descriptions of the functions that may be called.
        Raises:
          InputError: no chat template, or messages that it does not take.
        """
        import jinja2

        require(
            self.backend.chat_template is not None,
            f"{self.path}: the tokenizer has no chat template, expected chat_template.jinja or"
            " chat_template in tokenizer_config.json (tokenizer.chat_template in a GGUF"
            " file); plain prompts need none",
        )
        _check_messages(messages)
        try:
            text = self.backend.apply_chat_template(
                [dict(m) for m in messages],
                tools=None if tools is None else [dict(t) for t in tools],
                tokenize=False,
                add_generation_prompt=generation_prompt,
                enable_thinking=thinking,
            )
        except jinja2.TemplateError as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{self.path}: the chat template refused: {reason}") from error
        return str(text)


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, special: bool) -> list[int]:
    """Without the places of the tokens in the text, which would take a quarter of the time."""
    try:
        (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    except TypeError as error:  # also where a string is none of UTF-8
        raise InputError(f"{text[:20]!r}: half of a surrogate pair, expected text") from error
    return found.ids


def _check_messages(messages: Messages) -> None:
    require(
        isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0,
        "messages: expected a list with at least one message",
    )
    for number, message in enumerate(messages):
        require(
            isinstance(message, Mapping)
            and all(isinstance(message.get(name), str) for name in ("role", "content")),
            f"messages[{number}]: expected an object with the strings role and content",
        )
        check_role(message["role"], f"messages[{number}]")


def check_role(role: str, where: str) -> None:
    """Raises `InputError` for one that is not known: templates pass it on, or leave it out."""
    require(role in ROLES, f"{where}: role {role!r}: expected one of {', '.join(ROLES)}")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder or repository, or in a GGUF file.

    tokenizer.json is taken as it stands. (`AutoTokenizer` picks a class by tokenizer_config.json
    or model type, and some of those replace the pre-tokenizer and post-processor by their own.)

    Raises:
      InputError: no such folder or file, or no readable tokenizer in it.
    """
    path = resolve(path)
    # Importing transformers without PyTorch logs advice to install it, which nobody here needs.
    logging.getLogger("transformers").addFilter(_is_not_about_torch)
    from transformers import PreTrainedTokenizerFast

    if gguf.is_gguf(path):
        backend, names = gguf_tokenizer.build(gguf.open_file(path))
        return Tokenizer(path, PreTrainedTokenizerFast(tokenizer_object=backend, **names))
    file, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    require(file.exists(), f"{path}: no tokenizer.json in this folder")
    require({"model", "added_tokens"} <= read_json(file).keys(), f"{file}: not a tokenizer")
    if settings.exists():
        read_json(settings)
    tokenizer = Tokenizer(path, PreTrainedTokenizerFast.from_pretrained(path))
    # Texts are encoded whole, whatever the file says.
    tokenizer.backend.backend_tokenizer.no_truncation()
    tokenizer.backend.backend_tokenizer.no_padding()
    return tokenizer


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
