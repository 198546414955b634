"""A short run of the training step on a mesh; as a script, one host of several.

python mesh_run.py COORDINATOR PROCESSES PROCESS_ID OUTPUT
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import optax

from dspark_jax import losses, sharding
from dspark_jax import params as parameters
from dspark_jax.config import TargetConfig
from dspark_jax.losses import LossConfig
from dspark_jax.targets import dense
from train import hosts
from train.settings import DrafterSettings, HostSettings, OptimizerSettings
from train.step import Batch, StepConfig, create_state, make_step

B, S, STEPS = 8, 24, 30

TARGET = TargetConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8,
)  # fmt: skip
DRAFTER = DrafterSettings(
    num_layers=1, block_size=3, markov_rank=4, target_layer_ids=(0, 1), num_anchors=6
)
# The gradient is read off the first moment, so that it must not be clipped.
CONFIG = StepConfig(
    TARGET,
    DRAFTER.config(TARGET),
    LossConfig(),
    OptimizerSettings(steps=STEPS, learning_rate=2e-3, clip_norm=1e9),
    anchor_chunk=3,
    microbatches=2,
)


def batch_of(step):
    """Rows with very different numbers of anchors, none in some."""
    rng = np.random.default_rng(step)
    ends = rng.permutation([0, 2, 3, 5, 9, 14, 20, 24])
    mask = np.arange(S) < ends[:, None]
    return Batch(rng.integers(0, 96, (B, S)).astype(np.int32), mask)


def run(mesh):
    """Losses of all steps, and the gradient of the first."""
    init = parameters.init
    places = sharding.parameters(dense.specs(TARGET), mesh)
    target = jax.jit(lambda: init(jax.random.key(9), dense.specs(TARGET)), out_shardings=places)()
    state = create_state(CONFIG, mesh)
    step, found, gradient = make_step(CONFIG, mesh), [], None
    for number in range(STEPS):
        batch = hosts.global_batch(mesh, hosts.own_rows(mesh, batch_of(number)))
        state, report = step(state, target, batch)
        found.append(float(losses.objective(report.sums, CONFIG.loss) / report.sums.weight))
        if number == 0:
            moment = hosts.whole(optax.tree.get(state.opt_state, "mu"))
            gradient = [x / (1 - CONFIG.optimizer.beta1) for x in jax.tree.leaves(moment)]
    return np.array(found), gradient


if __name__ == "__main__":
    coordinator, processes, process_id, output = sys.argv[1:]
    hosts.join(HostSettings(coordinator, int(processes), int(process_id)))
    found, gradient = run(sharding.make_mesh(data_parallel=2, fsdp=2, tensor_parallel=2))
    if hosts.writes():
        np.savez(Path(output), found, *gradient)
