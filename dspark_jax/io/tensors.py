"""Weights of a folder of safetensors files, or of a GGUF file, read tensor by tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dspark_jax.config import InputError, require
from dspark_jax.io import gguf
from dspark_jax.io.files import read_json

log = logging.getLogger(__name__)


class Tensors:
    """The safetensors files of a folder: one file, or shards with an index."""

    def __init__(self, folder: Path):
        self.path = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of = _weight_map(index)
        else:
            name = "model.safetensors"
            require((folder / name).exists(), f"{folder}: expected {name} or {index.name} in it")
            self._file_of = dict.fromkeys(self._open(name).keys(), name)
        self._files = {name: self._open(name) for name in sorted(set(self._file_of.values()))}

    def _open(self, name: str):
        path = self.path / name
        require(path.exists(), f"{path}: shard is missing, but the index names it")
        try:
            return safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise InputError(f"{path}: not a whole safetensors file ({error})") from error

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor, which must have this shape."""
        require(name in self, f"{self.path}: tensor {name} is missing")
        path = self.path / self._file_of[name]
        file = self._files[path.name]
        require(
            name in file.keys(),  # noqa: SIM118 (not a dict)
            f"{path}: tensor {name} is missing, but the index names it",
        )
        found = tuple(file.get_slice(name).get_shape())
        require(
            found == shape,
            f"{self.path}: tensor {name} has shape {list(found)}, expected {list(shape)}",
        )
        return file.get_tensor(name)


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor, all in the folder of the index itself."""
    found = read_json(index).get("weight_map")
    valid = isinstance(found, dict) and all(
        isinstance(file, str) and Path(file).name == file for file in found.values()
    )
    if not valid:
        raise InputError(f"{index}: expected a weight_map of tensors to files beside it")
    return found


def open_tensors(path: Path) -> Tensors | gguf.GgufFile:
    """What `load_parameters` reads from, for a folder or a GGUF file."""
    return gguf.open_file(path) if gguf.is_gguf(path) else Tensors(path)


Place = Callable[[Any], Any]
"""The shardings of a pytree of `ParamSpec`s."""


def load_parameters(
    tensors: Tensors | gguf.GgufFile, specs: Any, layout: Any, dtype: Any, place: Place | None
) -> Any:
    """Parameters one by one: the host never holds more than one of them beside the devices.

    Each device is given its own part only, also where others belong to other hosts.
    """

    def one(spec, codec, sharding):
        shapes = codec.shapes(spec.shape)
        parts = [tensors.read(n, s) for n, s in zip(codec.names, shapes, strict=True)]
        with np.errstate(over="ignore"):  # `require_finite` tells
            value = np.asarray(codec.join(parts), dtype=dtype, order="C")  # scalars stay scalars
        if sharding is None:
            return jax.device_put(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    leaves, treedef = jax.tree.flatten(specs)
    places = [None] * len(leaves) if place is None else treedef.flatten_up_to(place(specs))
    values = [one(*x) for x in zip(leaves, jax.tree.leaves(layout), places, strict=True)]
    return jax.tree.unflatten(treedef, values)


def require_finite(path: Path, params: Any, layout: Any) -> None:
    """Raises `InputError` with the name of a tensor that holds something else than numbers."""
    leaves = jax.tree.leaves(params)
    found = jax.device_get([*map(_all_finite, leaves)])
    for codec, leaf, finite in zip(jax.tree.leaves(layout), leaves, found, strict=True):
        require(
            bool(finite),
            f"{path}: {' and '.join(codec.names)}: NaN or infinity in it as {leaf.dtype},"
            " expected numbers",
        )


@jax.jit
def _all_finite(value: jax.Array) -> jax.Array:
    return jnp.isfinite(value).all()


def report_extra(
    tensors: Tensors | gguf.GgufFile, layout: Any, *, known: Iterable[str], within: str = ""
) -> None:
    """Warns once of the tensors that neither `layout` nor `known` names.

    Those whose names do not begin with `within` are another's affair.
    """
    used = {name for codec in jax.tree.leaves(layout) for name in codec.names}
    extra = sorted(tensors.names() - used - set(known))
    extra = [n for n in extra if n.startswith(within) and not n.endswith("rotary_emb.inv_freq")]
    if extra:
        log.warning("%s: ignoring unknown tensors %s", tensors.path, ", ".join(extra))
