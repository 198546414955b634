"""What the training step of a large target takes, and exchanges, found by compiling it."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, AxisType

from dspark_jax import sharding

SCRIPT = Path(__file__).with_name("compile_step.py")


def compiled(mode):
    done = subprocess.run([sys.executable, str(SCRIPT), mode], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_anchors():
    few, many = compiled("memory")
    assert many < 1.1 * few


def test_the_step_lowers_for_a_slice_of_tpus():
    """4 x 4 chips, none of which is there, with the Splash kernel."""
    functions = runpy.run_path(str(SCRIPT))
    mesh = AbstractMesh((1, 4, 4), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    cfg = functions["step_config"](attention="splash", microbatches=2)
    traced = functions["trace"](cfg, mesh, rows=8)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    # A device's part of it: one row of a micro-batch, 8 of 32 heads.
    assert "tensor<1x8x4096x128xbf16>" in text


@pytest.mark.slow
def test_sixteen_devices_exchange_parameters_and_sums_of_their_own_rows():
    """Of 4 rows in a micro-batch no device ever holds the hidden states of more than its own."""
    found = compiled("mesh")
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    exchanged = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", found["program"])
    assert len(exchanged) > 20
    assert not [shapes for shapes in exchanged if re.search(r"\[[48],4096,\d", shapes)]
    assert [shapes for shapes in exchanged if "[1,4096,2560]" in shapes]
