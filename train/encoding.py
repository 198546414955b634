"""Documents to tokens and loss mask.

Of a chat what the target itself would generate is learnt: from the end of the generation prompt to
the stop token, for every turn of the assistant. Prompts are those that the chat template makes for
the turns before; the answer's tokens are put behind them. So the mask is known from lengths, and
nothing is searched for in a text that the template has already been through.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dspark_jax.config import InputError, TargetConfig, require
from dspark_jax.io.tokenizer import Tokenizer, load_tokenizer
from train import corpus
from train.documents import Document
from train.records import Chat, Content, Generated, Message, Source, Text
from train.settings import DataSettings

STRUCTURED = ("tool_calls", "reasoning_content")
"""Parts of an answer that only the template can write down."""


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Tokens that are read one after the other, and which of them are learnt."""

    tokens: np.ndarray  # [N] int32
    loss_mask: np.ndarray  # [N] bool

    @property
    def useful(self) -> bool:
        """Whether a block could be anchored in it."""
        return bool((self.loss_mask[:-1] & self.loss_mask[1:]).any())


@dataclasses.dataclass(frozen=True)
class Turn:
    """How a chat template writes a turn of the assistant."""

    block: str
    """The empty thinking block that a prompt ends in when thinking is off, or nothing."""
    end: str
    """What follows an answer."""
    stop: int
    """The stop token that `end` begins with."""


def make_encoder(settings: DataSettings, folder: Path, target: TargetConfig) -> Encoder:
    """For the target in `folder`; raises `InputError` when its tokenizer cannot be used."""
    tokenizer = load_tokenizer(folder)
    require(
        tokenizer.vocab_size <= target.vocab_size,
        f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, expected at most the"
        f" {target.vocab_size} of the target",
    )
    stops = target.stop_token_ids or tokenizer.eos_ids
    return Encoder(tokenizer, stops, settings.max_length, settings.thinking)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Documents to sequences of at most `max_length` tokens in which something can be learnt."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    max_length: int
    thinking: bool = False
    """Whether the target may think in the prompts."""

    def encode(self, document: Document) -> list[Sequence]:
        """Texts are cut into several sequences.

        Chats end at `max_length`: what is behind it would be learnt without its prompt.

        Raises:
          InputError: the chat template refuses the messages; with the document's place.
        """
        try:
            found = list(self._sequences(document.content))
        except InputError as error:
            raise InputError(f"{document.where}: {error}") from error
        return [s for s in found if s.useful]

    def check(self, content: Content) -> None:
        """Raises `InputError` for a document that cannot be encoded.

        Templates refuse an order of roles, so that of all chats with the same roles one is enough.
        """
        match content:
            case Chat(messages, tools):
                if tools is not None or any(map(_structured, messages)):
                    list(self._chat(messages, tools))
                elif (refusal := self._refusal(messages)) is not None:
                    raise InputError(refusal)
            case Generated(prompt_ids, token_ids):
                size = self.tokenizer.vocab_size
                largest = max(*prompt_ids, *token_ids)
                require(largest < size, f"token id {largest}: expected ids below {size}")

    @functools.cached_property
    def _refusals(self) -> dict[tuple[str, ...], str | None]:
        return {}

    def _refusal(self, messages: list[Message]) -> str | None:
        """Why the template refuses plain messages with these roles, if it does."""
        roles = tuple(m["role"] for m in messages)
        if roles not in self._refusals:
            try:
                list(self._chat(messages, None))
                self._refusals[roles] = None
            except InputError as error:
                self._refusals[roles] = str(error)
        return self._refusals[roles]

    def _sequences(self, content: Content) -> Iterator[Sequence]:
        match content:
            case Text(text):
                tokens = self.tokenizer.encode(text)
                for start in range(0, len(tokens), self.max_length):
                    part = tokens[start : start + self.max_length]
                    yield self._sequence(part, [True] * len(part))
            case Source(text):
                yield from self._sequences(Text(text))
                for head, body in corpus.functions(text):
                    asked = {"role": "user", "content": head}
                    answer = {"role": "assistant", "content": body}
                    yield from self._sequences(Chat([asked, answer]))
            case Chat(messages, tools):
                for tokens, mask in self._chat(messages, tools):
                    yield self._sequence(tokens, mask)
            case Generated(prompt, answer):
                mask = [False] * len(prompt) + [True] * len(answer)
                yield self._sequence(prompt + answer, mask)

    def _sequence(self, tokens: list[int], mask: list[bool]) -> Sequence:
        size = self.max_length
        return Sequence(np.array(tokens[:size], np.int32), np.array(mask[:size], bool))

    # --- Chats ------------------------------------------------------------------------------

    def _chat(
        self, messages: list[Message], tools: list | None
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """Tokens and loss mask of a chat.

        As long as a prompt goes on from what came before, all is one sequence; a template that
        shows old answers in another form (without their thinking, for example) starts a new one.
        A first turn of the assistant answers nothing: it is read, not learnt.
        """
        tokens: list[int] = []
        mask: list[bool] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i == 0:
                continue
            prompt, answer = self._turn_tokens(messages[:i], message, tools)
            if prompt[: len(tokens)] != tokens:
                yield tokens, mask
                mask = []
            mask += [False] * (len(prompt) - len(mask)) + [True] * len(answer)
            tokens = prompt + answer
        yield tokens, mask

    def _turn_tokens(
        self, before: list[Message], message: Message, tools: list | None
    ) -> tuple[list[int], list[int]]:
        """What the target reads, and what it would generate.

        Marks of thinking and of tool calls are tokens of their own; in any other answer what looks
        like a special token is text.
        """
        block, content, lead = self._turn.block, message["content"], ""
        structured = _structured(message)
        if structured:
            content = self._shown(before, message, tools)
            # An empty thinking block is the prompt's, unless thinking is on.
            content = content if self.thinking else content.removeprefix(block)
        elif self.thinking and block and not _thinks(content, block):
            lead = block if self._shown(before, message, tools).startswith(block) else ""
        thinks = _thinks(content, block)
        prompt = self.tokenizer.chat(before, thinking=self.thinking or thinks, tools=tools)
        if structured or thinks:
            answer = self.tokenizer.encode(content, special=False)
            require(self._turn.stop not in answer, "an answer holds the target's stop token")
        else:
            answer = self.tokenizer.encode_literally(content)
        opening = self.tokenizer.encode(lead, special=False) if lead else []
        return prompt, [*opening, *answer, self._turn.stop]

    def _shown(self, before: list[Message], message: Message, tools: list | None) -> str:
        """An answer as the template writes it, when there may be thinking in it."""
        write = functools.partial(self.tokenizer.chat_text, thinking=True, tools=tools)
        prompt = write(before, generation_prompt=True)
        whole = write([*before, message], generation_prompt=False)
        end = self._turn.end
        require(
            whole.startswith(prompt) and whole.endswith(end),
            "the chat template does not write this answer behind its own generation prompt",
        )
        return whole[len(prompt) : len(whole) - len(end)]

    @functools.cached_property
    def _turn(self) -> Turn:
        """Found out from short chats, whose texts differ in nothing else."""
        user = {"role": "user", "content": "a"}

        def opening(thinking: bool) -> str:
            bare, prompt = (
                self.tokenizer.chat_text([user], generation_prompt=given, thinking=thinking)
                for given in (False, True)
            )
            return prompt.removeprefix(bare)

        texts = [
            self.tokenizer.chat_text(
                [user, {"role": "assistant", "content": answer}], generation_prompt=False
            )
            for answer in ("b", "c")
        ]
        end = _common_end(*texts)
        stops = [i for i in self.tokenizer.encode(end, special=False) if i in self.stop_token_ids]
        require(
            len(stops) > 0,
            f"{self.tokenizer.path}: the chat template ends no assistant turn with one of the"
            f" target's stop tokens {list(self.stop_token_ids)}",
        )
        with_thinking, without = opening(True), opening(False)
        block = without.removeprefix(with_thinking) if without != with_thinking else ""
        return Turn(block, end, stops[0])


def _common_end(a: str, b: str) -> str:
    pairs = zip(reversed(a), reversed(b), strict=False)
    size = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return a[len(a) - size :]


def _structured(message: Message) -> bool:
    return any(name in message for name in STRUCTURED)


def _thinks(text: str, block: str) -> bool:
    """Whether an answer begins as a thinking block does, on its first line."""
    return block != "" and text.startswith(block.split("\n")[0])
