"""Prompts of a JSONL file, and what can be wrong with each line.

A line holds one of `prompt` (text as it stands), `messages` (a chat), `turns` (strings; the first
is asked as a chat) or `token_ids`; optionally `id`, and settings of its own that go before those of
the command line: those in `SETTINGS`, `stop` (a text or several) and `n` (completions of the
prompt). Other fields are left alone: data sets have plenty. But one that is nearly called as a
setting is an error, since that would be left alone too.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.config import InputError, require
from dspark_jax.generation import Pair, fit
from dspark_jax.io.tokenizer import Tokenizer
from dspark_jax.request import Request

Id = str | int

KINDS = ("prompt", "messages", "turns", "token_ids")
SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "max_new_tokens": int,
    "seed": int,
}

ALIKE = 0.9
"""Letters that two names share, as a part of all: temprature is temperature, speed is not seed."""

MOST_SAMPLES = 2**16
"""Of one prompt."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line as it was read: an object, or why it is none."""

    number: int
    """Counted from 1."""
    id: Id
    fields: Mapping[str, Any]
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One line as it will be decoded: a request, or the error that becomes its result."""

    id: Id
    request: Request | None
    error: str | None = None
    sample: int | None = None
    """Which of several completions of the line, from 0; None where one was asked for."""


def read_lines(path: Path) -> list[Line]:
    """All lines of a file that are not blank.

    Raises:
      InputError: the file cannot be read or holds nothing, or two lines have the same id. Whatever
        is wrong with a single line is said in that line's `error`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    raw = enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    lines = [_read_line(number, text) for number, text in raw if text.strip()]
    require(len(lines) > 0, f"{path}: no prompts in it, expected one JSON object a line")
    first: dict[Id, int] = {}
    for line in lines:
        other = first.setdefault(line.id, line.number)
        require(
            other == line.number,
            f"{path} line {line.number}: id {line.id!r} is that of line {other} (without an id it"
            " is the number of the line), expected different ids",
        )
    return lines


def _read_line(number: int, text: bytes) -> Line:
    try:
        fields = json.loads(text.decode())
        json.dumps(fields, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return Line(number, number, {}, f"not valid JSON ({error.msg}, column {error.colno})")
    except UnicodeDecodeError:
        return Line(number, number, {}, "not valid UTF-8")
    except UnicodeEncodeError:
        return Line(number, number, {}, "not text (half of a surrogate pair)")
    except (ValueError, RecursionError):  # a number or a nesting beyond what Python reads
        return Line(number, number, {}, "not valid JSON (too large)")
    if not isinstance(fields, dict):
        return Line(number, number, {}, "expected a JSON object")
    name = number if fields.get("id") is None else fields["id"]
    if not isinstance(name, str | int) or isinstance(name, bool):
        return Line(number, number, {}, f"id={reprlib.repr(name)}: expected a string or an integer")
    return Line(number, name, fields)


def valid_samples(n: object) -> bool:
    return type(n) is int and 1 <= n <= MOST_SAMPLES


def samples(line: Line, default: int) -> list[int | None]:
    """Samples of a line: by its own `n` if that is valid, else `default` many; [None] for one."""
    n = line.fields.get("n")
    count = n if valid_samples(n) else default
    return [None] if count == 1 else list(range(count))


def build_samples(
    line: Line, pair: Pair, *, defaults: Request, thinking: bool = False, default: int = 1
) -> list[Prompt]:
    """A prompt for each of the `samples` of a line; arguments as for `build`.

    They differ in their random numbers only. A line with an error has it as often.
    """
    prompt = build(line, pair, defaults=defaults, thinking=thinking)
    made = []
    for sample in samples(line, default):
        request = prompt.request
        if request is not None and sample is not None:
            request = dataclasses.replace(request, stream=_stream(request.stream, sample))
        made.append(dataclasses.replace(prompt, request=request, sample=sample))
    return made


def _stream(first: int, sample: int) -> int:
    """The stream of a sample, in 32 bits; that of sample 0 is the `first` of its line.

    Lines count from the lowest bit up and samples from the highest down: no two are the same unless
    lines times samples, each rounded up to a power of two, are more than 2^32.
    """
    return first ^ int(f"{sample:032b}"[::-1], 2)


def build(line: Line, pair: Pair, *, defaults: Request, thinking: bool = False) -> Prompt:
    """The request of a line.

    A row's random numbers come from the command's seed and the number of the line, or from the
    line's own seed alone: equal seeds then give equal draws.

    Args:
      defaults: settings where the line has none; its prompt is not used.
      thinking: whether the answer to a chat may start with thinking, where the template knows that.
    """
    try:
        require(line.error is None, line.error or "")
        _check_names(line.fields)
        ids = _token_ids(line.fields, pair.tokenizer, thinking)
        given = {name: line.fields.get(name) for name in SETTINGS}
        own: dict[str, Any] = {
            name: _setting(name, x) for name, x in given.items() if x is not None
        }
        stream = 0 if "seed" in own else line.number
        if line.fields.get("stop") is not None:
            own["stop"] = _stop(line.fields["stop"])
        n = line.fields.get("n")
        require(
            n is None or valid_samples(n),
            f"n={reprlib.repr(n)}: expected a whole number in 1..{MOST_SAMPLES}",
        )
        request = dataclasses.replace(defaults, token_ids=ids, stream=stream, **own)
        return Prompt(line.id, fit(request, pair.models.target_config))
    except InputError as error:
        return Prompt(line.id, None, f"line {line.number}: {error}")


def build_alike(
    path: Path, lines: Sequence[Line], pair: Pair, *, defaults: Request, thinking: bool = False
) -> list[Request]:
    """The requests of a file's lines for a measurement: sampling, seed and stop texts are those of
    `defaults`, whatever a line says, but for its `max_new_tokens`.

    Raises:
      InputError: a line cannot be decoded.
    """
    made = []
    for line in lines:
        fields = {k: v for k, v in line.fields.items() if k in (*KINDS, "max_new_tokens")}
        plain = dataclasses.replace(line, fields=fields)
        prompt = build(plain, pair, defaults=defaults, thinking=thinking)
        if prompt.request is None:
            raise InputError(f"{path} {prompt.error}")
        made.append(prompt.request)
    return made


def _check_names(fields: Mapping[str, Any]) -> None:
    """Raises `InputError` for a field that must have been meant for a setting."""
    settings = {_letters(name): name for name in (*SETTINGS, "stop")}
    for name in fields.keys() - settings.values():
        meant = difflib.get_close_matches(_letters(name), settings, n=1, cutoff=ALIKE)
        require(
            not meant,
            f"{name}={reprlib.repr(fields[name])}: no such setting, perhaps you meant"
            f" {''.join(settings[m] for m in meant)}",
        )


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _setting(name: str, value: Any) -> float | int:
    kind = SETTINGS[name]
    valid = isinstance(value, int | kind) and not isinstance(value, bool)
    noun = "a whole number" if kind is int else "a number"
    require(valid, f"{name}={reprlib.repr(value)}: expected {noun}")
    require(not abs(value) > 1e18, f"{name}={reprlib.repr(value)}: expected {noun} in reason")
    return kind(value)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    valid = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    require(valid, f"stop={reprlib.repr(value)}: expected a string or a list of strings")
    return tuple(texts)


def _token_ids(fields: Mapping[str, Any], tokenizer: Tokenizer, thinking: bool) -> Sequence[int]:
    given = [name for name in KINDS if fields.get(name) is not None]
    found = " and ".join(given) or "none of them"
    require(len(given) == 1, f"expected one of {', '.join(KINDS)}; found {found}")
    kind = given[0]
    value = fields[kind]
    match kind:
        case "token_ids":
            valid = isinstance(value, list) and all(type(i) is int for i in value)
            require(valid, f"token_ids={reprlib.repr(value)}: expected a list of whole numbers")
            return value
        case "messages":
            return tokenizer.chat(value, thinking=thinking)
        case "turns":
            valid = isinstance(value, list) and all(isinstance(t, str) for t in value)
            require(valid, f"turns={reprlib.repr(value)}: expected a list of strings")
            require(len(value) > 0 and value[0] != "", "the first of turns is empty or absent")
            return tokenizer.chat([{"role": "user", "content": value[0]}], thinking=thinking)
    require(isinstance(value, str), f"prompt={reprlib.repr(value)}: expected a string")
    require(value != "", "the prompt is empty: expected some text")
    return tokenizer.encode(value)
