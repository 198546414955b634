"""The frozen target of a run."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import dspark_jax
from dspark_jax import sharding
from dspark_jax.config import TargetConfig
from dspark_jax.io import files, hf
from dspark_jax.targets import dense
from train.settings import EMBEDDED, Settings

MANY_LAYERS = 8

DIGESTED = ("*.json", "*.jinja", "*.txt", "*.safetensors")
PIECE, PIECES = 1 << 18, 256  # bytes, and how many of them are read of a larger file


def target_folder(settings: Settings) -> Path:
    """Folder of the target, fetched if it is a repository."""
    if settings.target == EMBEDDED:
        return Path(dspark_jax.__path__[0]) / "embedded" / "target"
    return files.resolve(settings.target)


def digest(folder: Path) -> str:
    """Hash of a target: its configuration, its tokenizer, and pieces of its weights.

    It tells two trainings of the same architecture apart, and reads 64 MiB of a file at most.
    """
    found = hashlib.sha256(files.fingerprint(folder).encode())
    one = [folder] if folder.is_file() else []
    for path in one or sorted(p for kind in DIGESTED for p in folder.glob(kind)):
        size = path.stat().st_size
        found.update(f"{path.name if folder.is_dir() else ''} {size}\n".encode())
        between = max(PIECE, (size - PIECE) // (PIECES - 1))
        with path.open("rb") as file:
            for start in range(0, size, between):
                file.seek(start)
                found.update(file.read(PIECE))
    return found.hexdigest()


def load_target(
    settings: Settings, folder: Path, cfg: TargetConfig, mesh: Mesh, *, layers: bool = True
) -> dense.Target:
    """The frozen target, its layers stacked where the settings say so; or without any layers."""
    place = functools.partial(sharding.parameters, mesh=mesh)
    dtype = jnp.dtype(settings.compute.dtype)
    _, target = hf.load_target(folder, dtype=dtype, place=place, layers=layers)
    if not layers:
        return target
    match settings.compute.stack_layers:
        case "auto":
            stacked = cfg.num_layers > MANY_LAYERS
        case choice:
            stacked = choice == "on"
    if not stacked:
        return target
    places = place(dense.specs(cfg, stacked=True))
    stack = functools.partial(dense.stack_layers, cfg=cfg)
    return jax.jit(stack, out_shardings=places)(target)
