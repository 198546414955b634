"""Several hosts as one run: how they find each other, what they share, and what must agree.

Every host runs the same command on its own devices, and all of them together are one mesh. Each
takes its own rows of a batch; host 0 alone writes files. On one host all this costs nothing.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dspark_jax import sharding
from dspark_jax.config import InputError, require
from train.settings import HostSettings


def join(settings: HostSettings) -> None:
    """Joins the other hosts, if there are any; to be called before anything else asks for devices.

    Without settings they are found as the environment says: under Slurm, under Open MPI, and on
    TPUs, of one slice or of several.

    Raises:
      InputError: the hosts that are named or promised could not be joined.
    """
    given = (settings.coordinator, settings.num_processes, settings.process_id)
    promised = _promised(os.environ)
    if given == (None, None, None):
        if promised is None and not _on_tpu():
            return
        given = ()
    try:
        jax.distributed.initialize(*given)
    except (ValueError, RuntimeError) as error:
        if given or promised is not None:
            raise InputError(
                f"{promised or 'coordinator'}: the hosts could not be joined"
                f" ({str(error).partition(chr(10))[0]}); expected to reach the coordinator, or"
                " --coordinator HOST:PORT, --num-processes and --process-id"
            ) from error


def _promised(environment: Mapping[str, str]) -> str | None:
    """Who has started several processes, as far as the environment says."""

    def number(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdecimal() else 1

    if "SLURM_STEP_NODELIST" in environment and number("SLURM_NTASKS") > 1:
        return "Slurm"
    if number("OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    several = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    return "TPU" if several or number("MEGASCALE_NUM_SLICES") > 1 else None


def _on_tpu() -> bool:
    """Whether this may be a host of a TPU slice; JAX finds the others, or says that it is none."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def writes() -> bool:
    """Whether this host writes files."""
    return jax.process_index() == 0


# --- Values of all hosts ---------------------------------------------------------------------


def gather(value: Any) -> list[Any]:
    """The JSON value of every host, in their order, on every host."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.pad(data, (0, int(sizes.max()) - len(data)))
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def require_same(values: Mapping[str, object]) -> None:
    """Raises `InputError`, on every host, when a value is not the same on all of them."""
    first, *others = gather(dict(values))
    for host, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            require(
                first.get(name) == other.get(name),
                f"{name} is {json.dumps(first.get(name))} on host 0 and"
                f" {json.dumps(other.get(name))} on host {host}; expected the same on all hosts",
            )


# --- Arrays ----------------------------------------------------------------------------------


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """Which part of every batch this host reads, and of how many.

    Hosts whose devices work on the same rows read the same part.

    Raises:
      InputError: hosts share some of their rows.
    """
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    return share_of(jax.process_index(), hosts.reshape(sharding.batch_parts(mesh), -1))


def share_of(host: int, hosts: np.ndarray) -> tuple[int, int]:
    """`batch_share` of `host`; `hosts` [parts of the batch, devices a part] owns the devices."""
    parts = {h: tuple(np.flatnonzero((hosts == h).any(axis=1))) for h in np.unique(hosts)}
    distinct = sorted(set(parts.values()))
    require(
        sum(map(len, distinct)) == len(hosts) and len({*map(len, distinct)}) == 1,
        f"tensor_parallel={hosts.shape[1]}: expected a divisor or a multiple of the devices of a"
        " host",
    )
    return distinct.index(parts[host]), len(distinct)


def own_rows(mesh: Mesh, rows: Any) -> Any:
    """This host's part of a batch that is the same on all hosts."""
    part, parts = batch_share(mesh)
    return jax.tree.map(lambda x: np.split(x, parts)[part], rows)


def global_batch(mesh: Mesh, rows: Any) -> Any:
    """The batch of all hosts, on the mesh; `rows` are NumPy arrays of this host's part of it."""
    return jax.make_array_from_process_local_data(sharding.batch(mesh), rows)


def whole(arrays: Any) -> Any:
    """Arrays that lie on devices of several hosts, as NumPy arrays on each host."""
    if jax.process_count() == 1:
        return jax.device_get(arrays)
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), arrays)
