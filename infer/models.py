"""The two models of commands that always need both."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from dspark_jax import generation
from dspark_jax.config import require
from dspark_jax.generation import EMBEDDED, Pair
from dspark_jax.io import files


def require_both(target: str | None, draft: str | None) -> None:
    """Raises `InputError` when only one of them is given."""
    require(
        (target is None) == (draft is None),
        "--target and --draft: expected both, or neither for the pair of the package",
    )


def load_both(
    target: str | None, draft: str | None, dtype: str, block_size: int | None
) -> tuple[Path, Path, Pair]:
    """Their folders, fetched where they are repositories, and the pair; None is the package's."""
    folders = (
        files.resolve(target or EMBEDDED / "target"),
        files.resolve(draft or EMBEDDED / "drafter"),
    )
    pair = generation.load(*folders, dtype=jnp.dtype(dtype), block_size=block_size)
    return *folders, pair
