"""The folder of a run: which settings it belongs to."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from dspark_jax.config import require
from dspark_jax.io import files
from train.logs import check_logs
from train.settings import (
    ComputeSettings,
    EvaluationSettings,
    HostSettings,
    Settings,
    WatchSettings,
)

CONFIG, DATA, CHECKPOINTS = "config.json", "data.json", "checkpoints"


def _names(*groups: type) -> set[str]:
    return {field.name for group in groups for field in dataclasses.fields(group)}


# With which a run may go on in another way than it began: they decide where, how fast and how
# closely watched it runs, not what it learns. A run may be moved, too.
FREE = {
    *_names(ComputeSettings, EvaluationSettings, WatchSettings, HostSettings),
    *("workdir", "log_every", "save_every", "keep", "keep_best", "max_skipped"),
} - {"dtype"}


def check_workdir(settings: Settings) -> None:
    """Raises `InputError` when the workdir holds a run with other settings, or something else."""
    folder, path = settings.workdir, settings.workdir / CONFIG
    files.require_room(folder)
    if not path.exists():
        held = folder / CHECKPOINTS
        require(not held.exists(), f"{held}: checkpoints without {path.name}: expected both")
        return
    there, here = files.read_json(path), settings.flat()
    for name in sorted((there.keys() | here.keys()) - FREE):
        require(
            there.get(name) == here.get(name),
            f"{path}: {name} is {json.dumps(there.get(name))} there and"
            f" {json.dumps(here.get(name))} now; expected the same, or another workdir",
        )
    check_logs(folder)


def check_data(settings: Settings, digests: dict[str, str]) -> None:
    """Raises `InputError` when a file of the data is not what it was when the run began.

    A place in the data means nothing in another one.
    """
    path = settings.workdir / DATA
    there = files.read_json(path) if path.exists() else digests
    changed = [name for name in digests if there.get(name) != digests[name]]
    require(
        not changed,
        f"{', '.join(changed)}: changed since the run in {settings.workdir} began; expected the"
        " same, or another workdir (and --init-from, to go on from this drafter)",
    )


def write_workdir(settings: Settings, digests: dict[str, str]) -> None:
    """Writes the settings and the data's digests that a run begins with, unless they are there."""
    settings.workdir.mkdir(parents=True, exist_ok=True)
    described = {n: v for n, v in settings.flat().items() if n != "workdir"}
    for name, values in ((DATA, digests), (CONFIG, described)):
        path = settings.workdir / name
        if not path.exists():
            files.write_whole(path, json.dumps(values, indent=2) + "\n")


def read_workdir(folder: Path) -> Settings:
    """The settings that the run in a folder began with.

    Raises:
      InputError: there is no run, or its config.json is none.
    """
    path = folder / CONFIG
    require(path.is_file(), f"{path}: no such file, expected the workdir of a run")
    return _build(Settings, {**files.read_json(path), "workdir": str(folder)}, path)


def _build(kind: type, values: dict[str, Any], path: Path) -> Any:
    """An instance of a settings class; groups take theirs from the same values."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found[name] = _build(typing.cast(type, hint), values, path)
            continue
        require(name in values, f"{path}: {name} is missing")
        value = values[name]
        require(_fits(value, hint), f"{path}: {name} is {json.dumps(value)}: expected {hint}")
        found[name] = tuple(value) if isinstance(value, list) else value
    return kind(**{**found, **({"workdir": Path(found["workdir"])} if "workdir" in found else {})})


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is one of a settings field of this type."""
    parts = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType | typing.Union:
            return any(_fits(value, part) for part in parts)
        case typing.Literal:
            return value in parts
        case origin if origin is tuple:
            if not isinstance(value, list):
                return False
            wanted = [parts[0]] * len(value) if parts[-1] is ... else list(parts)
            return len(value) == len(wanted) and all(map(_fits, value, wanted))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, str if hint is Path else hint)
