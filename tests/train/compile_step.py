"""Compiles the training step of Qwen3-4B's shape, with few layers, from abstract values.

python compile_step.py MODE     memory | mesh; prints JSON

Nothing is executed, and no array is made.
"""

import json
import os
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"

import jax
import jax.numpy as jnp

from dspark_jax import sharding
from dspark_jax.config import TargetConfig
from dspark_jax.losses import LossConfig
from dspark_jax.targets import dense
from train.settings import DrafterSettings, OptimizerSettings
from train.step import Batch, StepConfig, abstract_state, make_step

LENGTH = 4096

TARGET = TargetConfig(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_layers=3, num_heads=32,
    num_kv_heads=8, head_dim=128, tie_embeddings=True,
)  # fmt: skip


def step_config(*, anchors=512, attention="reference", microbatches=1):
    drafter = DrafterSettings(
        num_layers=1, markov_rank=256, target_layer_ids=(0, 1), mask_token_id=151_669,
        num_anchors=anchors,
    )  # fmt: skip
    return StepConfig(
        TARGET,
        drafter.config(TARGET),
        LossConfig(),
        OptimizerSettings(),
        attention=attention,
        microbatches=microbatches,
    )


def trace(cfg, mesh, *, rows):
    """The step, traced for a bfloat16 target with stacked layers."""
    specs = dense.specs(cfg.target, stacked=True)
    target = jax.tree.map(
        lambda spec, place: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=place),
        specs,
        sharding.parameters(specs, mesh),
    )

    def column(dtype):
        return jax.ShapeDtypeStruct((rows, LENGTH), dtype, sharding=sharding.batch(mesh))

    batch = Batch(column(jnp.int32), column(jnp.bool_))
    return make_step(cfg, mesh).trace(abstract_state(cfg, mesh), target, batch)


def memory(anchors):
    """Bytes of temporary arrays with one row on one device."""
    compiled = trace(step_config(anchors=anchors), sharding.make_mesh(1), rows=1).lower().compile()
    return compiled.memory_analysis().temp_size_in_bytes


def on_mesh():
    """The program of 16 devices."""
    mesh = sharding.make_mesh(16, fsdp=4, tensor_parallel=4)
    return trace(step_config(microbatches=2), mesh, rows=8).lower().compile()


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        print(json.dumps([memory(64), memory(512)]))
    else:
        compiled = on_mesh()
        bytes_each = compiled.memory_analysis().temp_size_in_bytes
        print(json.dumps({"temporary": bytes_each, "program": compiled.as_text()}))
