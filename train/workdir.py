"""The folder of a run: which settings it belongs to."""

from __future__ import annotations

import json
from typing import Any

from dspark_jax.config import require
from dspark_jax.io import files
from train.settings import Settings


def check_workdir(settings: Settings) -> None:
    """Raises `InputError` when the workdir holds a run with other settings."""
    path = settings.workdir / "config.json"
    if not path.exists():
        held = settings.workdir / "checkpoints"
        require(not held.exists(), f"{held}: checkpoints without {path.name}: expected both")
        return
    there, here = files.read_json(path), _described(settings)
    for name in sorted(there.keys() | here.keys()):
        require(
            there.get(name) == here.get(name),
            f"{path}: {name} is {json.dumps(there.get(name))} there and"
            f" {json.dumps(here.get(name))} now; expected the same, or another workdir",
        )


def write_workdir(settings: Settings) -> None:
    """Writes config.json into the workdir."""
    settings.workdir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_described(settings), indent=2) + "\n"
    files.write_whole(settings.workdir / "config.json", text)


def _described(settings: Settings) -> dict[str, Any]:
    """The settings, without the place of the workdir: a run may be moved."""
    return {name: value for name, value in settings.flat().items() if name != "workdir"}
