"""From settings to a run: all that can be wrong is found here, before anything is written."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax import self_attention, sharding
from dspark_jax.config import DraftingConfig, TargetConfig, require
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.io import files, hf, model_config
from dspark_jax.targets.dense import Target
from dspark_jax.vocabulary import columns
from train import documents, draft_tokens, hosts
from train.checkpoint import Checkpoints, steps
from train.data import own_place
from train.encoding import Encoder, make_encoder
from train.evaluation import HeldOut
from train.logs import check_wandb
from train.meter import Pool
from train.rows import make_batches, open_rows
from train.run import Run
from train.settings import Settings
from train.step import StepConfig, abstract_state, create_state
from train.target import load_target, target_folder
from train.workdir import CHECKPOINTS, check_data, check_workdir, write_workdir


def prepare(settings: Settings) -> Run:
    """Checks everything that can be wrong, then loads the target and the last checkpoint."""
    check_workdir(settings)
    check_wandb(settings)
    folder = target_folder(settings)
    target_config = model_config.load_target_config(folder)
    drafter_config = settings.drafter_config(target_config)
    mesh = make_mesh(settings)
    encoder = make_encoder(settings.data, folder, target_config)
    digests = {name: documents.digest(name) for name in settings.data.files}
    check_data(settings, digests)
    cfg = step_config(settings, target_config, drafter_config)
    begun = bool(steps(settings.workdir / CHECKPOINTS))
    params = None
    if settings.init_from is not None and not begun:
        ends = load_target(settings, folder, target_config, mesh, layers=False)
        params = initial_drafter(settings.init_from, drafter_config, ends, mesh)
    cfg = dataclasses.replace(cfg, draft_ids=draft_ids(settings, drafter_config, encoder, params))
    rows = open_rows(settings, cfg, folder, encoder, mesh)
    held_out = HeldOut(cfg, mesh, rows.held_out) if rows.held_out else None
    from_target = settings.start == "target" and params is None and not begun
    layers = cfg.features == "online" or from_target
    target = load_target(settings, folder, target_config, mesh, layers=layers)
    if hosts.writes():
        write_workdir(settings, digests)
        if cfg.draft_ids is not None:
            draft_tokens.write(settings.workdir, cfg.draft_ids)

    checkpoints = Checkpoints(
        settings.workdir / CHECKPOINTS, keep=settings.keep, keep_best=settings.keep_best
    )
    pool = Pool.start(drafter_config.block_size)
    if checkpoints.latest is None:
        state = create_state(cfg, mesh, target if from_target else None)
        if params is not None:
            params = own_parameters(settings, params, target)
            state = dataclasses.replace(state, params=params)
    else:
        state, place = checkpoints.restore(abstract_state(cfg, mesh))
        rows.batches.set_state(own_place(place["data"], *hosts.batch_share(mesh)))
        pool = Pool.of(place["pool"])
    if cfg.features == "stored":
        target = dataclasses.replace(target, layers=())
    return Run(
        settings, cfg, mesh, target, encoder.tokenizer, state, rows.batches, pool, held_out,
        checkpoints,
    )  # fmt: skip


def draft_ids(
    settings: Settings, cfg: DraftingConfig, encoder: Encoder, drafter: AnyDrafter | None
) -> tuple[int, ...] | None:
    """The tokens to draft: those of the run that goes on, those of the drafter that is trained
    further, or the most frequent ones of the data; None: all."""
    if cfg.draft_vocab_size is None:
        return None
    if drafter is not None and drafter.vocabulary is not None:
        return tuple(drafter.vocabulary.ids.tolist())
    found = draft_tokens.read(settings.workdir, cfg)
    if found is not None:
        return found
    begun = steps(settings.workdir / CHECKPOINTS)
    require(
        not begun, f"{settings.workdir / draft_tokens.FILE}: no such file, expected that of the run"
    )
    # All of each batch, so that every host counts the same.
    return draft_tokens.count(make_batches(settings, settings.data.files, encoder), cfg)


def initial_drafter(name: str, cfg: DraftingConfig, target: Target, mesh: Mesh) -> AnyDrafter:
    """The drafter to go on training, a folder or repository id, as float32 masters.

    Args:
      cfg: what the settings ask for.
      target: whose LM head it has if it is lean; no layers are needed.
    Raises:
      InputError: it is not what the settings ask for, with the first difference.
    """
    folder = files.resolve(name)
    there = model_config.load_drafter_config(folder)
    theirs, ours = type(there).__name__, type(cfg).__name__
    require(theirs == ours, f"{name}: it is a drafter of {theirs}; expected {ours}")
    for field in dataclasses.fields(cfg):
        theirs, ours = getattr(there, field.name), getattr(cfg, field.name)
        require(
            theirs == ours or field.name in ("num_anchors", "step_loss_decay"),
            f"{name}: {field.name} is {theirs} in the drafter and {ours} by the settings and the"
            " target; expected the same",
        )
    place = functools.partial(sharding.parameters, mesh=mesh)
    found, params = hf.load_drafter(folder, target=target, place=place)
    require(
        found.confidence_head == cfg.confidence_head,
        f"{name}: it has no weights of a confidence head; expected them, or confidence_head=False",
    )
    return params


def own_parameters(settings: Settings, drafter: AnyDrafter, target: Target) -> AnyDrafter:
    """What is trained of a drafter. The LM head of a pruned vocabulary is not: it must be the
    target's, or an `InputError` says so."""
    vocabulary = drafter.vocabulary
    if vocabulary is not None:
        expected = columns(target, vocabulary.ids).astype(jnp.float32)
        require(
            bool(jnp.allclose(vocabulary.lm_head, expected, rtol=1e-2, atol=1e-3)),
            f"{settings.init_from}: its LM head differs from that of the target, expected the same",
        )
    return dataclasses.replace(drafter, vocabulary=None)


def make_mesh(settings: Settings) -> Mesh:
    """The mesh that the settings ask for, over which batches can be split."""
    compute, data = settings.compute, settings.data
    mesh = sharding.make_mesh(
        compute.devices,
        data_parallel=compute.data_parallel,
        fsdp=compute.fsdp,
        tensor_parallel=compute.tensor_parallel,
    )
    self_attention.check(compute.attention, data.max_length, jax.default_backend())
    parts = sharding.batch_parts(mesh)
    require(
        data.batch_size // compute.microbatches % parts == 0,
        f"batch_size={data.batch_size} in {compute.microbatches} microbatches: expected a multiple"
        f" of {parts} in each, the devices that split the batch (data_parallel times fsdp)",
    )
    return mesh


def step_config(settings: Settings, target: TargetConfig, drafter: DraftingConfig) -> StepConfig:
    """What of the settings is compiled into a step."""
    return StepConfig(
        target=target,
        drafter=drafter,
        loss=settings.loss,
        optimizer=settings.optimizer,
        guard=settings.guard,
        seed=settings.seed,
        anchor_chunk=settings.compute.anchor_chunk,
        microbatches=settings.compute.microbatches,
        attention=settings.compute.attention,
        documents_per_row=settings.data.documents_per_row,
        features="online" if settings.features is None else "stored",
    )
