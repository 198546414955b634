"""The frozen target of a run."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

import dspark_jax
from dspark_jax import sharding
from dspark_jax.config import TargetConfig
from dspark_jax.io import files, hf
from dspark_jax.targets import dense
from train.settings import EMBEDDED, Settings

MANY_LAYERS = 8


def target_folder(settings: Settings) -> Path:
    """Folder of the target, fetched if it is a repository."""
    if settings.target == EMBEDDED:
        return Path(dspark_jax.__path__[0]) / "embedded" / "target"
    return files.resolve(settings.target)


def load_target(settings: Settings, folder: Path, cfg: TargetConfig, mesh: Mesh) -> dense.Target:
    """The frozen target, its layers stacked where the settings say so."""
    places = sharding.parameters(dense.specs(cfg), mesh)
    _, target = hf.load_target(folder, dtype=jnp.dtype(settings.compute.dtype), shardings=places)
    match settings.compute.stack_layers:
        case "auto":
            stacked = cfg.num_layers > MANY_LAYERS
        case choice:
            stacked = choice == "on"
    return dense.stack_layers(target) if stacked else target
