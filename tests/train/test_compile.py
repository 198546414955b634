"""What the training step of Qwen3-4B's shape takes, and exchanges, found by compiling it.

Few layers, the real vocabulary and length; from abstract values, so that nothing is executed.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, AxisType

from dspark_jax import sharding

SCRIPT = Path(__file__).parents[2] / "scripts" / "step_memory.py"
SMALL = {"target_layers": 3, "draft_layers": 1}


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def config(script, **settings):
    return script["make_config"](script["Settings"](**SMALL, **settings))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_anchors(script):
    def temporary(anchors):
        cfg = config(script, anchors=anchors)
        compiled = script["trace"](cfg, sharding.make_mesh(1), rows=1).lower().compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(512) < 1.1 * temporary(64)


def test_the_step_lowers_for_a_slice_of_tpus(script):
    """4 x 4 chips, none of which is there, with the Splash kernel."""
    mesh = AbstractMesh((1, 4, 4), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    cfg = script["make_config"](script["Settings"](**SMALL), "splash")
    assert cfg.drafter.num_anchors == 512
    text = script["trace"](cfg, mesh, rows=4).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "tensor<1x8x4096x128xbf16>" in text  # a device's part: a row, 8 of 32 heads


ON_SIXTEEN = f"""
import json, runpy, jax
jax.config.update("jax_num_cpu_devices", 16)
from dspark_jax import sharding
script = runpy.run_path({str(SCRIPT)!r})
cfg = script["make_config"](script["Settings"](target_layers=3, draft_layers=1))
mesh = sharding.make_mesh(16, fsdp=4, tensor_parallel=4)
compiled = script["trace"](cfg, mesh, rows=4).lower().compile()
print(json.dumps(compiled.as_text()))
"""


@pytest.mark.slow
def test_sixteen_devices_exchange_parameters_and_sums_of_their_own_rows():
    """No device ever holds the hidden states of other rows than its own."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", ON_SIXTEEN]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env)
    program = json.loads(done.stdout)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    exchanged = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", program)
    assert [shapes for shapes in exchanged if "[1,4096,2560]" in shapes]
    assert not [shapes for shapes in exchanged if re.search(r"\[4,4096,\d", shapes)]
