"""Where parameters and batches live on a mesh of devices.

The mesh has two axes: `data`, along which batches are split, and `model`. Parameters name their own
dimensions (`params.ParamSpec`); a table of rules says which mesh axis each of those names is split
along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dspark_jax.config import require
from dspark_jax.params import ParamSpec

DATA, MODEL = "data", "model"

Rules = Mapping[str, str]

# In training every device holds a part of each matrix, and fetches the rest while it is needed.
TRAINING: Rules = {"embed": DATA, "heads": MODEL, "mlp": MODEL, "vocab": MODEL}


def make_mesh(devices: int | None = None, model: int = 1) -> Mesh:
    """A mesh of the first `devices` devices (None: all), `model` of them to a replica.

    Raises:
      InputError: more devices than there are, or not a multiple of `model`.
    """
    available = jax.devices()
    number = len(available) if devices is None else devices
    require(
        1 <= number <= len(available),
        f"devices={number}: expected a number in 1..{len(available)}, the devices of this machine",
    )
    require(
        model >= 1 and number % model == 0,
        f"model_parallel={model}: expected a divisor of the {number} devices",
    )
    return jax.make_mesh(
        (number // model, model),
        (DATA, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=available[:number],
    )


def parameter(spec: ParamSpec, mesh: Mesh, rules: Rules) -> NamedSharding:
    """Sharding of one parameter.

    A dimension stays whole where its mesh axis does not divide it, or is taken by an earlier one.
    """
    parts: list[str | None] = []
    for size, name in zip(spec.shape, spec.axes, strict=True):
        axis = rules.get(name) if name is not None else None
        fits = axis is not None and axis not in parts and size % mesh.shape[axis] == 0
        parts.append(axis if fits else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def parameters(specs: Any, mesh: Mesh, rules: Rules = TRAINING) -> Any:
    """Shardings of a pytree of `ParamSpec`s."""
    return jax.tree.map(lambda spec: parameter(spec, mesh, rules), specs)


def batch(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays whose first dimension is the batch."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole."""
    return NamedSharding(mesh, PartitionSpec())
