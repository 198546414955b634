"""Folders and JSON files, and what is wrong with them in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark_jax.config import InputError, require


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else in it is an `InputError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    require(isinstance(value, dict), f"{path}: expected a JSON object")
    return value


def resolve(name: str | Path) -> Path:
    """A local folder, or a repository id of the Hugging Face hub, downloaded into its cache."""
    path = Path(name)
    is_repository = (
        isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/"))
    )
    if path.exists() or not is_repository:
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
