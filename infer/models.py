"""The models of a command, and the devices they are on."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax import generation, sharding
from dspark_jax.config import require
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import files
from dspark_jax.state import Models


def require_both(target: str | None, draft: str | None) -> None:
    """Raises `InputError` when only one of them is given."""
    require(
        (target is None) == (draft is None),
        "--target and --draft: expected both, or neither for the pair of the package",
    )


def tensor_mesh(tensor_parallel: int) -> Mesh | None:
    """The mesh of `--tensor-parallel`: that many devices, or none for one.

    Raises:
      InputError: there are not that many.
    """
    there = len(jax.devices())
    require(
        1 <= tensor_parallel <= there,
        f"--tensor-parallel {tensor_parallel}: expected a number in 1..{there}, the devices there"
        " are",
    )
    if tensor_parallel == 1:
        return None
    return sharding.make_mesh(tensor_parallel, fsdp=1, tensor_parallel=tensor_parallel)


def devices_of(models: Models) -> str:
    """The devices that the models are on, in words."""
    kind = jax.devices()[0].device_kind
    return kind if models.mesh is None else f"{models.mesh.size} x {kind}"


def load_both(
    target: str | None,
    draft: str | None,
    dtype: str,
    block_size: int | None,
    tensor_parallel: int = 1,
) -> tuple[Path, Path, Pair]:
    """Their folders, fetched where they are repositories, and the pair; None is the package's."""
    folders = (
        files.resolve(target or EMBEDDED / "target"),
        files.resolve(draft or EMBEDDED / "drafter"),
    )
    pair = generation.load(
        *folders,
        dtype=jnp.dtype(dtype),
        block_size=block_size,
        mesh=tensor_mesh(tensor_parallel),
    )
    return *folders, pair
