"""Where parameters, batches and caches live on a mesh of devices.

A mesh has three axes. Along `data` and `fsdp` the batch is split; `fsdp` also splits every matrix
along its width, and a device fetches the rest of one while that is needed. Along `tensor` a matrix
is split by heads, by units of the MLP or by the vocabulary, and a device computes its part alone.

Arrays name their own dimensions (`params.ParamSpec` for parameters); a table of rules says which
mesh axes each of those names is split along. There is one for training and one for decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dspark_jax.config import require
from dspark_jax.params import ParamSpec

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)

LEFT = -1
"""Size of an axis that takes the devices which the others leave."""

AnyMesh = Mesh | AbstractMesh
Rules = Mapping[str, tuple[str, ...]]

TRAINING: Rules = {
    "batch": (DATA, FSDP),
    "embed": (FSDP,),
    "rank": (FSDP,),
    "heads": (TENSOR,),
    "mlp": (TENSOR,),
    "vocab": (TENSOR,),
}
# Whole along the width: how a matrix is used. Training fetches it so; decoding keeps it so.
DECODING: Rules = {
    "batch": (DATA, FSDP),
    "heads": (TENSOR,),
    "mlp": (TENSOR,),
    "vocab": (TENSOR,),
}


def make_mesh(
    devices: int | None = None,
    *,
    data_parallel: int = 1,
    fsdp: int = LEFT,
    tensor_parallel: int = 1,
) -> Mesh:
    """A mesh of the first `devices` devices, of all hosts; None: all of them.

    At most one of the sizes may be -1: what the others leave.

    Raises:
      InputError: sizes that do not make up the devices there are.
    """
    available = jax.devices()
    number = len(available) if devices is None else devices
    require(
        1 <= number <= len(available),
        f"devices={number}: expected a number in 1..{len(available)}, the devices there are",
    )
    require(
        jax.process_count() == 1 or number == len(available),
        f"devices={number}: expected all {len(available)} devices where there are several hosts",
    )
    sizes = mesh_sizes(number, data_parallel, fsdp, tensor_parallel)
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=auto, devices=available[:number])


def mesh_sizes(
    devices: int, data_parallel: int, fsdp: int, tensor_parallel: int
) -> tuple[int, int, int]:
    """Sizes of the axes, with -1 made a number; errors as for `make_mesh`."""
    sizes = (data_parallel, fsdp, tensor_parallel)
    said = f"data_parallel={data_parallel}, fsdp={fsdp}, tensor_parallel={tensor_parallel}"
    require(
        all(size == LEFT or size >= 1 for size in sizes) and sizes.count(LEFT) <= 1,
        f"{said}: expected numbers of at least 1, one of which may be {LEFT} (what is left)",
    )
    product = 1
    for size in sizes:
        product *= 1 if size == LEFT else size
    fits = devices % product == 0 if LEFT in sizes else devices == product
    require(
        fits,
        f"{said}: their product is {product}, expected"
        f" {'a divisor of ' if LEFT in sizes else ''}{devices}, the number of devices",
    )
    data, shards, tensor = (devices // product if size == LEFT else size for size in sizes)
    return data, shards, tensor


def partition(
    shape: Sequence[int], axes: Sequence[str | None], mesh: AnyMesh, rules: Rules
) -> PartitionSpec:
    """How an array is split whose dimensions have these names.

    A dimension stays whole where its mesh axes do not divide it, or are taken by an earlier one.
    """
    parts: list[tuple[str, ...] | None] = []
    taken: set[str] = set()
    for size, name in zip(shape, axes, strict=True):
        wanted = rules.get(name, ()) if name is not None else ()
        count = 1
        for axis in wanted:
            count *= mesh.shape[axis]
        fits = bool(wanted) and taken.isdisjoint(wanted) and size % count == 0
        taken |= {*wanted} if fits else set()
        parts.append(wanted if fits else None)
    return PartitionSpec(*parts)


def parameters(specs: Any, mesh: AnyMesh, rules: Rules = TRAINING) -> Any:
    """Shardings of a pytree of `ParamSpec`s."""

    def place(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, partition(spec.shape, spec.axes, mesh, rules))

    return jax.tree.map(place, specs)


def fetched(values: Any, specs: Any, mesh: AnyMesh) -> Any:
    """Parameters as they are used, from as they are kept in training.

    Without this XLA may leave a matrix split by its width, and exchange sums of activations.
    """
    if mesh.size == 1:
        return values
    return jax.lax.with_sharding_constraint(values, parameters(specs, mesh, DECODING))


def batch(mesh: AnyMesh) -> NamedSharding:
    """Sharding of arrays whose first dimension is the batch."""
    return NamedSharding(mesh, PartitionSpec(TRAINING["batch"]))


def batch_parts(mesh: AnyMesh) -> int:
    """Into how many parts a batch is split."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def agreed(values: Any, mesh: Mesh | None) -> Any:
    """Values that every device has, as the first device of the mesh has them.

    What the devices decide by themselves is the same only if they have the same numbers, and sums
    over their parts may differ in the last bit from one to the other. Devices that disagree about
    the next program would wait for one another for ever.
    """
    if mesh is None or mesh.size == 1:
        return values

    def of_first(x: jax.Array) -> jax.Array:
        first = sum(jax.lax.axis_index(axis) for axis in AXES) == 0
        return jax.lax.psum(jnp.where(first, x, jnp.zeros_like(x)), AXES)

    share = jax.shard_map(
        lambda tree: jax.tree.map(of_first, tree),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return share(values)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Every device holds the whole."""
    return NamedSharding(mesh, PartitionSpec())


def whole(values: Any, mesh: Mesh | None) -> Any:
    """Values that every device of the mesh holds whole, as they are without a mesh."""
    if mesh is None:
        return values
    return jax.lax.with_sharding_constraint(values, replicated(mesh))
