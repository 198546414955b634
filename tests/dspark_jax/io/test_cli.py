"""Command lines: settings in, one line on stderr out."""

import dataclasses
import errno
import io
import sys
from typing import Literal

import pytest

from dspark_jax.config import InputError
from dspark_jax.io import cli


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    """Of learning."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options."""

    steps: int = 3
    """How many."""
    kind: Literal["a", "b"] = "a"
    fast: bool = False
    inner: Inner = Inner()


def parse(*args, **kwargs):
    return cli.parse(Settings, args, prog="tool", description="Does it.", **kwargs)


@pytest.fixture(params=["utf-8", "ascii"])
def encoding(request, monkeypatch):
    """tyro draws boxes where the output is UTF-8, and lines of ASCII elsewhere."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=request.param)
    monkeypatch.setattr(sys, "stdout", stdout)
    return request.param


def test_settings():
    assert parse() == Settings()
    found = parse("--steps", "5", "--kind", "b", "--fast", "--rate", "0.25")
    assert found == Settings(5, "b", True, Inner(0.25))
    assert parse("--fast", default=Settings(steps=9)) == Settings(steps=9, fast=True)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--steps", "x"], "--steps: invalid literal for int() with base 10: 'x'"),
        (["--steps"], "Missing value for argument '--steps'. Expected 1 values"),
        (["--kind", "c"], "invalid choice 'c' for argument '--kind'. Expected one of ('a', 'b')"),
        (["--stops", "5"], "Unrecognized options: --stops, 5; perhaps you meant --steps INT"),
        (["more"], "Unrecognized options: more"),
        (["--rate", "x"], "could not convert string to float: 'x'"),
    ],
)
def test_bad_arguments_are_one_line(encoding, args, expected):
    with pytest.raises(InputError) as error:
        parse(*args)
    message = str(error.value)
    assert expected in message
    assert len(message) < 200
    assert not set("\n│─╭|") & set(message)


def test_help_is_not_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "Does it." in shown
    assert "--rate" in shown
    assert "How many." in shown


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code", "expected"),
    [
        (lambda: 0, 0, ""),
        (lambda: 3, 3, ""),
        (raising(InputError("a\n  b")), 2, "error: a b\n"),
        (
            raising(OSError(errno.ENOSPC, "No space left", "f.txt")),
            1,
            "error: f.txt: No space left\n",
        ),
        (raising(OSError("saving\nfailed")), 1, "error: saving failed\n"),
        (raising(KeyboardInterrupt()), 130, "interrupted\n"),
    ],
)
def test_exit_codes(capsys, main, code, expected):
    assert cli.run(main) == code
    assert capsys.readouterr().err == expected


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.run(raising(ZeroDivisionError()))
