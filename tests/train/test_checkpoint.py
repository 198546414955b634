import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sharding
from dspark_jax.losses import LossConfig
from train.checkpoint import Checkpoints
from train.settings import DrafterSettings, OptimizerSettings
from train.step import StepConfig, TrainState, abstract_state, init_state, state_shardings

PLACE = {"parent": {"next_index": 65, "none": None}, "window_index": 2}


def at(step: int) -> TrainState:
    """A state that says which step it is of."""
    return TrainState(jnp.int32(step), {"w": jnp.full(1000, step / 4)}, (jnp.int32(step),))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_was_saved_comes_back_in_its_place(tmp_path, small_config):
    cfg = StepConfig(
        small_config,
        DrafterSettings(num_layers=1, target_layer_ids=(0, 1)).config(small_config),
        LossConfig(),
        OptimizerSettings(),
    )
    saved = init_state(cfg).replace(step=jnp.int32(7))
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest is None
    checkpoints.save(7, saved, PLACE)
    checkpoints.close()

    mesh = sharding.make_mesh(8, model=2)
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest == 7
    state, place = checkpoints.restore(abstract_state(cfg, mesh))
    checkpoints.close()
    equal(state, saved)
    assert place == PLACE
    places = state_shardings(cfg, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, places))
    assert len({s.device for s in state.params.fc.addressable_shards}) == 8


def test_the_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, at(step), PLACE)
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


WITHOUT_ROOM = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from train.checkpoint import Checkpoints, SaveError
from train.step import TrainState

checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
for step in (1, 2):
    state = TrainState(jnp.int32(step), {"w": jnp.full(1000, step / 4)}, (jnp.int32(step),))
    try:
        checkpoints.save(step, state, {"step": step})
    except SaveError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
checkpoints.close()
"""


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (message,) = done.stdout.splitlines()
    assert "step 2 could not be written" in message
    assert "(File too large); that of 1 is intact" in message

    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest == 1
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), at(0))
    state, place = checkpoints.restore(abstract)
    checkpoints.close()
    equal(state, at(1))
    assert place == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["1"]  # what was half written is gone
