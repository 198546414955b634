"""Parameters described before they exist: shape, logical axes and initialiser of each array.

A model lists its parameters once, as a pytree of `ParamSpec`; initial values, abstract values for
compilation and shardings on a mesh all follow from that list.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Initializer = Callable[..., jax.Array]

small = jax.nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: `axes` names each dimension for the rules in `dspark_jax.sharding`.

    A frozen one stays as it is in training.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initializer: Initializer
    frozen: bool = False

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.shape} has {len(self.axes)} axis names")


def spec(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    initializer: Initializer = small,
    *,
    frozen: bool = False,
) -> Any:
    """A `ParamSpec`, typed so that it may stand in the place of the array it describes."""
    return ParamSpec(shape, axes, initializer, frozen)


def init(key: jax.Array, specs: Any, dtype=jnp.float32) -> Any:
    """Initial values; each parameter draws from its own key."""
    leaves, treedef = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(leaves))
    values = [s.initializer(k, s.shape, dtype) for s, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, values)


def abstract(specs: Any, dtype=jnp.float32) -> Any:
    """`jax.ShapeDtypeStruct`s in place of arrays, for lowering without memory."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs)


def count(specs: Any) -> int:
    """Number of parameters, of specs or of arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(specs))
