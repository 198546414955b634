"""What one line of a JSONL file may hold, and what of it becomes a document.

The first of these shapes that a record has a key of is its shape:

    {"prompt_ids": [..], "token_ids": [..]}            what a target read, and what it generated:
                                                       nothing, where "finish_reason" is "error"
    {"messages": [{"role": .., "content": ..}, ..]}    a chat; "tools" beside it
    {"conversations": [{"from": .., "value": ..}, ..]} the same (ShareGPT's names)
    {"prompt": "..", "response": ".."}                 a chat of two turns
    {"text": ".."}                                     a text

Turns of either list may use either pair of names.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dspark_jax.config import InputError, require
from dspark_jax.io.tokenizer import check_role

Message = dict[str, Any]

OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
EXTRAS = ("reasoning_content", "tool_call_id", "name")
"""Strings of a message that a chat template may read, beside its content and tool calls."""


@dataclasses.dataclass(frozen=True)
class Text:
    """All of it is learnt."""

    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python source; its functions are chats too: signature asked, body answered."""

    text: str


@dataclasses.dataclass(frozen=True)
class Chat:
    """Turns, of which the assistant's are learnt. Messages have `role` and `content`, and
    may have `tool_calls` and `EXTRAS`."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Generated:
    """Tokens as a target generated them, so that no tokenizer can cut them otherwise."""

    prompt_ids: list[int]
    token_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Unanswered:
    """A prompt that could not be decoded. There is nothing to learn in it."""


Content = Text | Source | Chat | Generated | Unanswered


def parse(line: bytes) -> Content:
    """The document in a line of JSON.

    Raises:
      InputError: what is wrong with the line; the place is the caller's to add.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text ({error.reason})") from error
    except RecursionError as error:
        raise InputError("not valid JSON (nested too deeply)") from error
    except ValueError as error:
        raise InputError(f"not valid JSON ({error})") from error
    require(isinstance(record, dict), "expected a JSON object")
    # JSON can name halves of characters, by an escape only.
    require(b"\\u" not in line or _is_text(record), "not text (half of a surrogate pair)")
    if "prompt_ids" in record or "token_ids" in record:
        if record.get("finish_reason") == "error":
            return Unanswered()
        return Generated(_ids(record, "prompt_ids"), _ids(record, "token_ids"))
    for name in ("messages", "conversations"):
        if name in record:
            return Chat(_turns(record[name], name), _tools(record.get("tools")))
    if "prompt" in record or "response" in record:
        return Chat(
            [
                {"role": "user", "content": _text(record.get("prompt"), "prompt")},
                {"role": "assistant", "content": _text(record.get("response"), "response")},
            ]
        )
    require(
        "text" in record,
        "expected messages or conversations (a list of turns), prompt and response (strings), text"
        " (a string), or prompt_ids and token_ids (lists of ids)",
    )
    text = _text(record["text"], "text")
    require(text != "", "text: expected a string that is not empty")
    return Text(text)


def _is_text(record: dict[str, Any]) -> bool:
    """Whether its strings are characters."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _text(value: Any, where: str) -> str:
    require(isinstance(value, str), f"{where}: expected a string")
    return value


def _ids(record: dict[str, Any], name: str) -> list[int]:
    ids: Any = record.get(name)
    require(
        isinstance(ids, list) and len(ids) > 0 and all(type(i) is int and i >= 0 for i in ids),
        f"{name}: expected a list of token ids (prompt_ids are what was read, token_ids what was"
        " generated)",
    )
    return ids


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    require(
        tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)),
        "tools: expected a list of objects",
    )
    return tools or None


def _turns(turns: Any, name: str) -> list[Message]:
    require(isinstance(turns, list) and len(turns) > 0, f"{name}: expected a list of turns")
    messages = [_message(turn, f"{name}[{i}]") for i, turn in enumerate(turns)]
    require(
        any(m["role"] == "assistant" for m in messages[1:]),
        f"{name}: expected a turn of the assistant after another's",
    )
    return messages


def _message(turn: Any, where: str) -> Message:
    require(isinstance(turn, dict), f"{where}: expected an object with role and content")
    role = turn.get("role", turn.get("from"))
    require(
        isinstance(role, str),
        f"{where}: expected the strings role and content (or from and value)",
    )
    role = OTHER_NAMES.get(role, role)
    check_role(role, where)
    content = turn.get("content", turn.get("value"))
    message: Message = {"role": role}
    for name in EXTRAS:
        if turn.get(name):
            message[name] = _text(turn[name], f"{where}: {name}")
    if turn.get("tool_calls"):
        message["tool_calls"] = _tool_calls(turn["tool_calls"], f"{where}: tool_calls")
        content = "" if content is None else content
    return message | {"content": _text(content, f"{where}: content")}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    require(isinstance(calls, list), f"{where}: expected a list of calls")
    for i, call in enumerate(calls):
        named = call.get("function", call) if isinstance(call, dict) else None
        require(
            isinstance(named, dict)
            and isinstance(named.get("name"), str)
            and isinstance(named.get("arguments"), dict | str),
            f"{where}[{i}]: expected a function with its name and arguments",
        )
    return calls
