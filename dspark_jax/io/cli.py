"""Command lines: typed settings from arguments, and errors as one line on stderr.

Settings are frozen dataclasses; each field is an option, its docstring the help. Nested groups keep
their heading in `--help`, and their options have no prefix.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import tyro

from dspark_jax.config import InputError

T = TypeVar("T")


def parse(
    kind: type[T], args: Sequence[str], *, default: T | None = None, prog: str, description: str
) -> T:
    """Settings of class `kind` from command-line arguments.

    Args:
      default: where arguments leave a field open; without it, the defaults of the class.
    Raises:
      InputError: what is wrong with the arguments, in one line.
      SystemExit: after `--help`.
    """
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    wanted: dict[str, Any] = {
        "prog": prog,
        "description": description,
        "config": (tyro.conf.OmitArgPrefixes,),
    }
    if default is not None:
        wanted["default"] = default
    if not {"-h", "--help"} & set(args):
        os.environ["COLUMNS"] = "10000"  # an error is not to be broken into lines
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, args=list(args), **wanted)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise InputError(_one_line(printed.getvalue())) from None
    finally:
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns


def _one_line(printed: str) -> str:
    """The message in what tyro prints: its first paragraph, and the option it is about.

    Paragraphs are separated by rules, in a box with the title in its frame; where the output is not
    known to be UTF-8 there is no frame, and the title is a paragraph of its own.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    lines = [line.strip("│ ") for line in plain.splitlines()]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line and set(line) <= set("─╰╯-"):
            parts.append([])
        elif line and not line.startswith("╭"):
            parts[-1].append(line)
    first = 0 if plain.startswith("╭") else 1
    message, about = parts[first], parts[first + 1 : first + 2]
    text = re.sub(r"^Error parsing (?!-)[^:]*: ", "", " ".join(message)).rstrip(".")
    match about:
        case [["Argument helptext:", option, *_]]:
            return f"{text}, expected {' '.join(option.split())}"
        case [["Perhaps you meant:", option, *_]]:
            return f"{text}; perhaps you meant {' '.join(option.split())}"
    return text


def run(main: Callable[[], int]) -> int:
    """Exit code of `main`: its own, 2 after an `InputError`, 1 after an `OSError` (a full disk).

    130 when it is interrupted before it looks after that itself. Each is said in one line.
    """
    try:
        return main()
    except InputError as error:
        code, message = 2, str(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        code = 1
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def until_interrupted(command: Callable[[], None], left: Callable[[], str]) -> int:
    """Exit code of a command: 0, or 130 where SIGINT or SIGTERM ended it.

    Args:
      left: says in a few words what there is of it then.
    """
    try:
        with terminated_like_interrupted():
            command()
    except KeyboardInterrupt:
        print(f"interrupted; {left()}", file=sys.stderr)
        return 130
    return 0


@contextlib.contextmanager
def terminated_like_interrupted() -> Generator[None, None, None]:
    """SIGTERM raises `KeyboardInterrupt`, as SIGINT does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def stop_signals() -> Generator[list[int], None, None]:
    """Notes SIGINT and SIGTERM instead of dying of them; a second one works as ever."""
    stopped: list[int] = []
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        stopped.append(number)
        for s, handler in before.items():
            signal.signal(s, handler)

    for s in before:
        signal.signal(s, note)
    try:
        yield stopped
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
