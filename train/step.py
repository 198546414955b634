"""One training step, compiled as one program: target, anchors, drafter, losses, update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from dspark_jax import losses, sharding
from dspark_jax import params as parameters
from dspark_jax.anchors import sample_anchors
from dspark_jax.config import DraftingConfig, TargetConfig
from dspark_jax.drafters.kinds import AnyDrafter, kind_of
from dspark_jax.losses import LossConfig, Sums
from dspark_jax.self_attention import AttentionKind
from dspark_jax.sharding import AnyMesh
from dspark_jax.targets.dense import Hidden, Target
from train.features import FeatureSource, fetch_ends, make_states
from train.guard import Guard, choose, judge
from train.optimizer import learning_rate, make_optimizer
from train.settings import GuardSettings, OptimizerSettings


@struct.dataclass
class TrainState:
    """All that training changes."""

    step: jax.Array  # [] int32, steps done, skipped ones included
    params: AnyDrafter  # float32
    opt_state: Any
    guard: Guard


@struct.dataclass
class Batch:
    """Rows of documents, padded to the same length."""

    tokens: jax.Array  # [B, S] int32
    loss_mask: jax.Array  # [B, S] bool
    segments: jax.Array | None = None  # [B, S] int32, documents of a row; None: each is one
    hidden: Hidden | None = None  # [B, S, ..] states of the target, where they are stored


@struct.dataclass
class Report:
    """What a step says of itself."""

    sums: Sums  # zeros when it was skipped
    loss: jax.Array  # []
    grad_norm: jax.Array  # [] before clipping
    learning_rate: jax.Array  # []
    skipped_in_a_row: jax.Array  # [] int32, this one included; 0 when it was not skipped


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What is compiled into a step."""

    target: TargetConfig
    drafter: DraftingConfig
    loss: LossConfig
    optimizer: OptimizerSettings
    guard: GuardSettings = GuardSettings()
    seed: int = 0
    anchor_chunk: int = 32
    microbatches: int = 1
    attention: AttentionKind = "reference"
    documents_per_row: int = 1
    draft_ids: tuple[int, ...] | None = None
    """Tokens that may be drafted; None: all."""
    features: FeatureSource = "online"


Step = Callable[[TrainState, Target, Batch], tuple[TrainState, Report]]


def init_state(cfg: StepConfig, target: Target | None = None) -> TrainState:
    """The state before the first step; the same for a seed on any mesh.

    With a target the drafter starts as a part of it: `start_from_target` of its kind.
    """
    params = parameters.init(jax.random.key(cfg.seed), kind_of(cfg.drafter).specs(cfg.drafter))
    if target is not None:
        params = kind_of(cfg.drafter).start_from_target(params, target, cfg.drafter)
    return TrainState(jnp.int32(0), params, _optimizer(cfg).init(params), Guard.start())


def _optimizer(cfg: StepConfig) -> optax.GradientTransformation:
    return make_optimizer(cfg.optimizer, kind_of(cfg.drafter).specs(cfg.drafter))


def state_shardings(cfg: StepConfig, mesh: AnyMesh) -> TrainState:
    """Shardings of the state: moments lie where their parameters are."""
    specs, whole = kind_of(cfg.drafter).specs(cfg.drafter), sharding.replicated(mesh)
    params = sharding.parameters(specs, mesh)
    places = dict(jax.tree_util.tree_leaves_with_path(params))

    def place(path, _):
        # The path of a moment ends in that of its parameter.
        ends = (path[start:] for start in range(len(path)))
        return next((places[end] for end in ends if end in places), whole)

    moments = jax.eval_shape(_optimizer(cfg).init, parameters.abstract(specs))
    moments = jax.tree_util.tree_map_with_path(place, moments)
    return TrainState(whole, params, moments, Guard(*[whole] * 4))


def create_state(cfg: StepConfig, mesh: AnyMesh, target: Target | None = None) -> TrainState:
    """The state before the first step on a mesh; `target` as for `init_state`."""
    places = state_shardings(cfg, mesh)
    return jax.jit(functools.partial(init_state, cfg), out_shardings=places)(target)


def abstract_state(cfg: StepConfig, mesh: AnyMesh) -> TrainState:
    """Shapes and places of the state, to restore a checkpoint into."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(lambda: init_state(cfg)),
        state_shardings(cfg, mesh),
    )


def make_sums(cfg: StepConfig, mesh: AnyMesh) -> Callable[..., Sums]:
    """The losses' sums of (params, target, batch, *anchors), not jitted."""
    drafter_specs = kind_of(cfg.drafter).specs(cfg.drafter)
    draft_ids = None if cfg.draft_ids is None else jnp.array(cfg.draft_ids, jnp.int32)
    states = make_states(
        cfg.features, cfg.target, cfg.drafter.target_layer_ids, attention=cfg.attention, mesh=mesh
    )

    def sums(params: AnyDrafter, target: Target, batch: Batch, positions, valid) -> Sums:
        # Of the target only a layer at a time: the drafter is small.
        params = sharding.fetched(params, drafter_specs, mesh)
        target = fetch_ends(target, cfg.target, mesh)
        with jax.named_scope("target"):
            hidden = states(target, batch.tokens, batch.segments, batch.hidden)
        return losses.drafter_sums(
            params, target, hidden.seen, hidden.final, batch.tokens, batch.loss_mask,
            positions, valid, batch.segments, cfg=cfg.drafter, loss=cfg.loss,
            chunk=cfg.anchor_chunk, draft_ids=draft_ids,
        )  # fmt: skip

    return sums


def draw_anchors(cfg: StepConfig, key: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Anchors of a whole batch; see `sample_anchors`."""
    with jax.named_scope("anchors"):
        return sample_anchors(
            key, batch.loss_mask, cfg.drafter.num_anchors, batch.segments,
            documents=cfg.documents_per_row, least=cfg.drafter.least_context,
        )  # fmt: skip


def make_step(cfg: StepConfig, mesh: AnyMesh) -> Step:
    """The jitted step; it takes over (donates) the state it is given.

    Anchors are drawn from fold_in(key(seed), step): a resumed run draws what an uninterrupted one
    would have drawn. A step that `guard` rejects changes the counters alone.
    """
    optimizer = _optimizer(cfg)

    sums_of = make_sums(cfg, mesh)

    def weighted_sums(params: AnyDrafter, target: Target, *inputs):
        sums = sums_of(params, target, *inputs)
        return losses.objective(sums, cfg.loss), sums

    places = state_shardings(cfg, mesh)

    def differentiate(params: AnyDrafter, *inputs) -> tuple[AnyDrafter, Sums]:
        grads, sums = jax.grad(weighted_sums, has_aux=True)(params, *inputs)
        return jax.lax.with_sharding_constraint(grads, places.params), sums

    def accumulate(params: AnyDrafter, target: Target, *inputs):
        """Gradient of the weighted sum over the batch, part by part; it is divided at the end."""
        if cfg.microbatches == 1:
            return differentiate(params, target, *inputs)
        # Rows that follow one another go to different parts, so that each part has rows of every
        # device.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, cfg.microbatches, *x.shape[1:]).swapaxes(0, 1), inputs
        )

        def one(total, part):
            grads, sums = differentiate(params, target, *part)
            return jax.tree.map(jnp.add, total, (grads, sums)), None

        start = (jax.tree.map(jnp.zeros_like, params), Sums.zeros(cfg.drafter.block_size))
        return jax.lax.scan(one, start, parts)[0]

    def step(state: TrainState, target: Target, batch: Batch) -> tuple[TrainState, Report]:
        key = jax.random.fold_in(jax.random.key(cfg.seed), state.step)
        anchors = draw_anchors(cfg, key, batch)
        grads, sums = accumulate(state.params, target, batch, *anchors)
        scale = 1 / jnp.where(sums.weight > 0, sums.weight, 1)
        grads = jax.tree.map(lambda g: g * scale, grads)
        with jax.named_scope("update"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        with jax.named_scope("guard"):
            norm, rate = optax.tree.norm(grads), learning_rate(cfg.optimizer, state.guard.taken)
            loss = losses.objective(sums, cfg.loss) * scale
            good, guard = judge(state.guard, loss, norm, optax.tree.norm(updates), cfg.guard)
            params, opt_state, sums = choose(
                good,
                (params, opt_state, sums),
                (state.params, state.opt_state, Sums.zeros(cfg.drafter.block_size)),
            )
        report = Report(sums, loss, norm, rate, guard.skipped_in_a_row)
        return TrainState(state.step + 1, params, opt_state, guard), report

    return jax.jit(step, donate_argnums=0, out_shardings=(places, sharding.replicated(mesh)))
