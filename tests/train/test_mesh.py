"""The same run on one device, on a mesh, and on a mesh of two hosts."""

import runpy
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark_jax import sharding

SCRIPT = Path(__file__).with_name("mesh_run.py")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mesh_run():
    return runpy.run_path(str(SCRIPT))["run"]


@pytest.fixture(scope="module")
def alone(mesh_run):
    return mesh_run(sharding.make_mesh(1))


def assert_same(found, expected):
    losses, gradient = found
    expected_losses, expected_gradient = expected
    assert losses[-1] < 0.98 * losses[0]
    for a, b in zip(gradient, expected_gradient, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)


def test_a_mesh_trains_as_one_device_does(mesh_run, alone):
    """Denominators are global: devices and micro-batches have very different numbers of slots."""
    mesh = sharding.make_mesh(data_parallel=2, fsdp=2, tensor_parallel=2)
    assert_same(mesh_run(mesh), alone)


def test_two_hosts_train_as_one_device_does(alone, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    output = tmp_path / "found.npz"
    processes = [
        subprocess.Popen([sys.executable, str(SCRIPT), coordinator, "2", str(i), str(output)])
        for i in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    with np.load(output) as saved:
        losses, *gradient = (saved[f"arr_{i}"] for i in range(len(saved.files)))
    assert_same((losses, gradient), alone)
