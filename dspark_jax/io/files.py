"""Folders and JSON files, and what is wrong with them in one line."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from dspark_jax.config import InputError, require
from dspark_jax.io import gguf

HEADER_LENGTH = 8
"""Bytes in front of a safetensors header that say how long it is."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else in it is an `InputError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # too long a number, too many brackets
        raise InputError(f"{path}: not valid JSON ({error})") from error
    require(isinstance(value, dict), f"{path}: expected a JSON object")
    return value


Kind = TypeVar("Kind", int, float, str, bool)


def typed(value: Any, kind: type[Kind]) -> Kind:
    """A value of JSON of that kind; a whole number will do for a float, a truth for no number.

    Raises:
      TypeError: it is of another.
      OverflowError: a whole number that no float reaches.
    """
    if type(value) is int and kind is float:
        return kind(value)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, not {value!r:.40}")
    return value


def fault(error: Exception) -> str:
    """What was wrong with a value that was read, for people."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def require_room(folder: Path) -> None:
    """Raises `InputError` where no folder is or can be made, as a file is in its way."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    require(nearest.is_dir(), f"{folder}: expected a folder, {nearest} is a file")


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, whole or not at all; a text as UTF-8."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def fingerprint(folder: Path) -> str:
    """Hash of a model's config.json and of the headers of its safetensors files.

    Of a GGUF file it is that of all in front of the weights.

    Cheap whatever the size of the model; it tells architectures, shapes and dtypes apart, and not
    two trainings of the same.
    """
    if gguf.is_gguf(folder):
        return hashlib.sha256(gguf.open_file(folder).header).hexdigest()
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(HEADER_LENGTH), "little")
            digest.update(file.read(size))
    return digest.hexdigest()


def resolve(name: str | Path) -> Path:
    """A local folder or GGUF file, or a repository of the Hugging Face hub in its cache.

    What is not in the cache is downloaded.
    """
    path = Path(name)
    if gguf.is_gguf(path):
        require(path.is_file(), f"{name}: no such file")
        return path
    is_repository = (
        isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/"))
    )
    if path.exists() or not is_repository:
        require(not path.is_file(), f"{name}: a file, expected a folder")
        require(path.is_dir(), f"{name}: no such folder")
        return path
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name}: no such folder; to fetch it from the hub install dspark_jax[hub]"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{name}: no such folder, and the hub said: {reason}") from error
