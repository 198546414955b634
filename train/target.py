"""The frozen target of a run."""

from __future__ import annotations

import functools
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


def target_folder(settings: Settings) -> Path:
    """Folder of the target, fetched if it is a repository."""
    if settings.target == EMBEDDED:
        return Path(dspark_jax.__path__[0]) / "embedded" / "target"
    return files.resolve(settings.target)


def load_target(settings: Settings, folder: Path, cfg: TargetConfig, mesh: Mesh) -> dense.Target:
    """The frozen target, its layers stacked where the settings say so."""
    place = functools.partial(sharding.parameters, mesh=mesh)
    dtype = jnp.dtype(settings.compute.dtype)
    _, target = hf.load_target(folder, dtype=dtype, place=place)
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
