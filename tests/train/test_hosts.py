"""What several processes share, by tables; and two of them that run the command together."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from dspark_jax import sharding
from dspark_jax.config import InputError
from train import hosts
from train.settings import HostSettings, Settings

CASES = [
    # Hosts that own the devices of each part of the batch; each host's share.
    ([[0], [0], [1], [1]], [(0, 2), (1, 2)]),
    ([[0, 0], [1, 1]], [(0, 2), (1, 2)]),
    ([[0, 1], [0, 1]], [(0, 1), (0, 1)]),  # tensor axis across hosts: the same rows
    ([[0, 1], [2, 3]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ([[1], [0], [1], [0]], [(1, 2), (0, 2)]),  # interleaved: host 1 owns the first part
]


@pytest.mark.parametrize(("owners", "shares"), CASES)
def test_hosts_of_the_same_rows_read_the_same(owners, shares):
    assert [hosts.share_of(h, np.array(owners)) for h in range(len(shares))] == shares


def test_hosts_that_share_some_rows_only():
    with pytest.raises(InputError, match="tensor_parallel=3: expected a divisor or a multiple"):
        hosts.share_of(0, np.array([[0, 0, 1], [1, 2, 2]]))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, None),
        ({"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_NTASKS": "16"}, "Slurm"),
        ({"SLURM_STEP_NODELIST": "a1", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "16"}, None),  # a batch script: srun makes the step
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "t-0,t-1"}, "TPU"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "t-0"}, "TPU"),
    ],
)
def test_who_has_started_several_processes(environment, said):
    assert hosts._promised(environment) == said


def test_one_host_is_alone():
    hosts.join(HostSettings())
    hosts.require_same({"seed": 1})
    assert hosts.writes()
    assert hosts.gather({"a": 1}) == [{"a": 1}]
    mesh = sharding.make_mesh(data_parallel=2, fsdp=2, tensor_parallel=2)
    assert hosts.batch_share(mesh) == (0, 1)
    rows = np.arange(8)
    np.testing.assert_array_equal(hosts.own_rows(mesh, rows), rows)
    np.testing.assert_array_equal(hosts.whole(hosts.global_batch(mesh, rows)), rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("a:1", None, None), "expected all three, or none"),
        (("a:b", 1, 0), "coordinator='a:b': expected HOST:PORT, a port in 1..65535"),
        (("nonsense", 1, 0), "coordinator='nonsense': expected HOST:PORT"),
        (("localhost:99999999", 1, 0), "expected HOST:PORT"),
        (("a b:1", 1, 0), "expected HOST:PORT"),
        ((":5", 1, 0), "expected HOST:PORT"),
        (("a:1", 2, 2), "process_id=2 of num_processes=2: expected a number from 0 to below it"),
    ],
)
def test_impossible_hosts(given, said):
    with pytest.raises(InputError, match=said):
        HostSettings(*given)


def test_hosts_differ_in_their_number_alone():
    settings = Settings(hosts=HostSettings("a:1", 2, 1))
    assert settings.flat().keys() - settings.shared().keys() == {"process_id"}


SMALL = [
    *("--num-layers", "1", "--block-size", "2", "--markov-rank", "4"),
    *("--target-layer-ids", "0", "2", "--num-anchors", "4"),
    *("--max-length", "32", "--batch-size", "8"),
    *("--steps", "6", "--algorithm", "adamw", "--learning-rate", "0.002"),
    *("--log-every", "1", "--save-every", "4"),
    *("--data-parallel", "2", "--fsdp", "2", "--tensor-parallel", "2"),
]


def start(folder, target, text, *args, devices, program="train.main"):
    command = [sys.executable, "-m", program, "--workdir", str(folder)]
    command += ["--target", str(target), "--files", str(text), *SMALL, *args]
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def start_two(folder, target, text, first=(), second=()):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    joined = [
        ("--coordinator", coordinator, "--num-processes", "2", "--process-id", str(i))
        for i in range(2)
    ]
    return [
        start(folder, target, text, *joined[i], *own, devices=4)
        for i, own in enumerate((first, second))
    ]


def end(processes):
    errors = [process.communicate(timeout=300)[1] for process in processes]
    return [process.returncode for process in processes], errors


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_two_hosts_run_the_command(tmp_path, small_target, text_file):
    """They leave what one host on the same mesh leaves."""
    assert end([start(tmp_path / "one", small_target, text_file, devices=8)])[0] == [0]
    two = tmp_path / "two"
    codes, errors = end(start_two(two, small_target, text_file))
    assert codes == [0, 0], errors
    found, expected = losses(two), losses(tmp_path / "one")
    assert len(found) == 6
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (two / "drafter" / "model.safetensors").exists()


@pytest.mark.slow
def test_two_hosts_train_on_stored_states(tmp_path, small_target, text_file):
    """Each reads its own rows of a cache that one has written; it is what they would compute."""
    options = ("--storage", "float32", "--output", str(tmp_path / "cache"))
    written = start(tmp_path, small_target, text_file, *options, devices=8, program="train.cache")
    assert end([written])[0] == [0]
    stored = ("--features", str(tmp_path / "cache"))
    two = tmp_path / "two"
    codes, errors = end(start_two(two, small_target, text_file, stored, stored))
    assert codes == [0, 0], errors
    assert end([start(tmp_path / "one", small_target, text_file, devices=8)])[0] == [0]
    np.testing.assert_allclose(losses(two), losses(tmp_path / "one"), rtol=1e-4)


@pytest.mark.slow
def test_two_hosts_with_different_settings_say_which(tmp_path, small_target, text_file):
    codes, errors = end(
        start_two(tmp_path / "run", small_target, text_file, second=("--seed", "3"))
    )
    assert codes == [2, 2]
    for text in errors:
        said = "error: seed is 0 on host 0 and 3 on host 1; expected the same on all hosts"
        assert said in text.splitlines()
    assert not (tmp_path / "run").exists()
