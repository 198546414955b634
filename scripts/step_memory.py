"""Memory and operations of a training step, found by compiling it: no device, no weights needed.

    python scripts/step_memory.py --model qwen3_8b --fsdp 8

The step is that of the preset of this name, for one row of the batch on each part of the mesh. It
is compiled for CPUs, where attention stores its scores and bfloat16 matrices are multiplied as
float32 copies: what accelerators take is less.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dspark_jax import params, sharding
from dspark_jax.config import TargetConfig
from dspark_jax.drafters.kinds import kind_of
from dspark_jax.io import cli
from dspark_jax.self_attention import AttentionKind
from dspark_jax.sharding import AnyMesh
from dspark_jax.targets import dense
from train.prepare import step_config
from train.resources import step_flops
from train.step import Batch, StepConfig, abstract_state, make_step

LENGTH = 4096
"""Tokens of a row."""

_QWEN3 = TargetConfig(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, tie_embeddings=True,
)  # fmt: skip
TARGETS = {
    "qwen3_4b": _QWEN3,
    "qwen3_8b": dataclasses.replace(
        _QWEN3, hidden_size=4096, intermediate_size=12_288, tie_embeddings=False
    ),
    "qwen3_14b": dataclasses.replace(
        _QWEN3, hidden_size=5120, intermediate_size=17_408, num_layers=40, num_heads=40,
        tie_embeddings=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is compiled."""

    model: Literal["qwen3_4b", "qwen3_8b", "qwen3_14b"] = "qwen3_4b"
    """Preset whose step it is."""
    data_parallel: int = 1
    """As in `train.main`, and so the next two."""
    fsdp: int = 1
    tensor_parallel: int = 1
    rows: int = 1
    """Rows of a micro-batch on each part of the mesh."""
    anchors: int = 512
    """Blocks a document."""
    target_layers: int | None = None
    """Layers of the target; default: all."""
    draft_layers: int | None = None
    """Layers of the drafter; default: all."""


def make_config(settings: Settings, attention: AttentionKind = "reference") -> StepConfig:
    """The step's configuration, with one micro-batch."""
    preset = importlib.import_module(f"configs.{settings.model}").SETTINGS
    target = TARGETS[settings.model]
    drafter = dataclasses.replace(preset.drafter, num_anchors=settings.anchors)
    if settings.draft_layers is not None:
        drafter = dataclasses.replace(drafter, num_layers=settings.draft_layers)
    if settings.target_layers is not None:
        layers = tuple(min(i, settings.target_layers - 2) for i in range(5))
        drafter = dataclasses.replace(drafter, target_layer_ids=tuple(sorted({*layers})))
        target = dataclasses.replace(target, num_layers=settings.target_layers)
    compute = dataclasses.replace(preset.compute, attention=attention, microbatches=1)
    preset = dataclasses.replace(preset, drafter=drafter, compute=compute)
    return step_config(preset, target, drafter.config(target))


def trace(cfg: StepConfig, mesh: AnyMesh, *, rows: int, length: int = LENGTH):
    """The step, traced for a bfloat16 target with stacked layers and a batch of `rows`."""
    specs = dense.specs(cfg.target, stacked=True)
    target = jax.tree.map(
        lambda spec, place: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=place),
        specs,
        sharding.parameters(specs, mesh),
    )

    def column(dtype):
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding.batch(mesh))

    segments = column(jnp.int32) if cfg.documents_per_row > 1 else None
    batch = Batch(column(jnp.int32), column(jnp.bool_), segments)
    step: Any = make_step(cfg, mesh)
    return step.trace(abstract_state(cfg, mesh), target, batch)


def main(args: Sequence[str]) -> int:
    """Prints the bytes of each kind on one device."""
    settings = cli.parse(Settings, args, prog="step_memory", description=__doc__ or "")
    sizes = (settings.data_parallel, settings.fsdp, settings.tensor_parallel)
    devices = sizes[0] * sizes[1] * sizes[2]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = sharding.make_mesh(
        devices, data_parallel=sizes[0], fsdp=sizes[1], tensor_parallel=sizes[2]
    )
    cfg = make_config(settings)
    target, drafter = (
        params.count(dense.specs(cfg.target)),
        params.count(kind_of(cfg.drafter).specs(cfg.drafter)),
    )
    print(f"target: {target / 1e9:.2f} G parameters, {2 * target / 1e9:.1f} GB in bfloat16")
    print(f"drafter: {drafter / 1e9:.2f} G parameters, {12 * drafter / 1e9:.1f} GB with moments")
    print(f"a row: {step_flops(cfg, 1, LENGTH) / 1e12:.0f} T operations")
    rows = settings.rows * sharding.batch_parts(mesh)
    memory = trace(cfg, mesh, rows=rows).lower().compile().memory_analysis()
    print(f"on each of {devices} devices, with {settings.rows} rows of a micro-batch:")
    print(f"  models, moments and batch: {memory.argument_size_in_bytes / 1e9:.2f} GB")
    print(f"  temporary: {memory.temp_size_in_bytes / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
