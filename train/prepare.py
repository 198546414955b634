"""From settings to a run: all that can be wrong is found here, before anything is written."""

from __future__ import annotations

import functools

import jax

from dspark_jax import sharding
from dspark_jax.config import DrafterConfig, TargetConfig, require
from dspark_jax.io import model_config
from dspark_jax.io.tokenizer import load_tokenizer
from train.checkpoint import Checkpoints
from train.data import make_batches
from train.run import Run
from train.settings import Settings
from train.step import StepConfig, abstract_state, init_state, state_shardings
from train.target import load_target, target_folder
from train.workdir import check_workdir, write_workdir


def prepare(settings: Settings) -> Run:
    """Checks everything that can be wrong, then loads the target and the last checkpoint."""
    check_workdir(settings)
    folder = target_folder(settings)
    target_config = model_config.load_target_config(folder)
    drafter_config = settings.drafter.config(target_config)
    mesh = sharding.make_mesh(settings.compute.devices, settings.compute.model_parallel)
    part = settings.data.batch_size // settings.compute.microbatches
    require(
        part % mesh.shape[sharding.DATA] == 0,
        f"batch_size={settings.data.batch_size} in {settings.compute.microbatches} microbatches:"
        f" expected a multiple of the {mesh.shape[sharding.DATA]} devices that split the batch",
    )
    tokenizer = load_tokenizer(folder)
    require(
        tokenizer.vocab_size <= target_config.vocab_size,
        f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, expected at most the"
        f" {target_config.vocab_size} of the target",
    )
    stops = target_config.stop_token_ids or tokenizer.eos_ids
    batches = make_batches(settings.data, tokenizer, stops, seed=settings.seed)
    target = load_target(settings, folder, target_config, mesh)
    write_workdir(settings)

    cfg = step_config(settings, target_config, drafter_config)
    checkpoints = Checkpoints(settings.workdir / "checkpoints", keep=settings.keep)
    if checkpoints.latest is None:
        places = state_shardings(cfg, mesh)
        start = target if settings.start == "target" else None
        state = jax.jit(functools.partial(init_state, cfg), out_shardings=places)(start)
    else:
        state, place = checkpoints.restore(abstract_state(cfg, mesh))
        batches.set_state(place)
    return Run(settings, cfg, mesh, target, state, batches, checkpoints)


def step_config(settings: Settings, target: TargetConfig, drafter: DrafterConfig) -> StepConfig:
    """What of the settings is compiled into a step."""
    return StepConfig(
        target=target,
        drafter=drafter,
        loss=settings.loss,
        optimizer=settings.optimizer,
        seed=settings.seed,
        anchor_chunk=settings.compute.anchor_chunk,
        microbatches=settings.compute.microbatches,
    )
