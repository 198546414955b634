"""Training losses of a drafter, over chunks of anchors, and what is measured on the way.

    L = a_ce CE + a_tv ||p_d - p_t||_1 + a_conf BCE(c, c*)             (paper, section 3)

Each term is a sum over slots weighted by w_k = exp(-(k-1)/decay), divided by the sum of the weights
of the whole batch, over all devices. c* = 1 - ||p_d - p_t||_1 / 2 is the probability that the
target accepts the slot's draft; no gradient flows into it.

Letters: B batch, S sequence, A anchors, K slots, D width, L tapped layers, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.anchors import Slots, slot_labels
from dspark_jax.config import DraftingConfig, require
from dspark_jax.drafters.kinds import AnyDrafter, kind_of
from dspark_jax.layers import rope_angles
from dspark_jax.segments import document_positions, document_starts
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target
from dspark_jax.vocabulary import pruned


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Losses."""

    ce_weight: float = 0.1
    """Weight of the cross-entropy with the text."""
    tv_weight: float = 0.9
    """Weight of the L1 distance between the drafter's and the target's distributions."""
    confidence_weight: float = 1.0
    """Weight of the confidence head's binary cross-entropy."""
    loss_decay: float = 4.0
    """Slot k weighs exp(-(k-1)/loss_decay)."""
    soft_targets: bool = False
    """Cross-entropy with the target's distribution in place of the text."""

    def __post_init__(self):
        weights = (self.ce_weight, self.tv_weight, self.confidence_weight)
        require(
            all(math.isfinite(w) and w >= 0 for w in weights) and max(weights) > 0,
            f"ce_weight, tv_weight, confidence_weight = {', '.join(map(str, weights))}: expected"
            " numbers of at least 0, and one above",
        )
        require(
            math.isfinite(self.loss_decay) and self.loss_decay > 0,
            f"loss_decay={self.loss_decay}: expected a number above 0",
        )


BINS = 20
"""Of equal width, for the expected calibration error of confidences."""


@struct.dataclass
class Sums:
    """Sums over slots and anchors; they add up over chunks, batches and steps."""

    weight: jax.Array  # [] of slot weights
    ce: jax.Array  # [] weighted
    tv: jax.Array  # [] weighted
    bce: jax.Array  # [] weighted
    slots: jax.Array  # [K] number of slots that count
    acceptance: jax.Array  # [K] of c*
    gaps: jax.Array  # [K, BINS] of c - c*, by c
    error: jax.Array  # [K] of |c - c*|
    survival: jax.Array  # [K] of c*_1 ... c*_k, over anchors whose whole block counts
    blocks: jax.Array  # [] number of those anchors

    @staticmethod
    def zeros(block_size: int) -> Sums:
        """Nothing yet."""
        number, by_slot = jnp.zeros(()), jnp.zeros(block_size)
        gaps = jnp.zeros((block_size, BINS))
        return Sums(
            weight=number,
            ce=number,
            tv=number,
            bce=number,
            slots=by_slot,
            acceptance=by_slot,
            gaps=gaps,
            error=by_slot,
            survival=by_slot,
            blocks=number,
        )


def add(a: Sums, b: Sums) -> Sums:
    """Both together."""
    return jax.tree.map(jnp.add, a, b)


def drafter_loss(
    params: AnyDrafter,
    target: Target,
    features: jax.Array,
    final_hidden: jax.Array,
    tokens: jax.Array,
    loss_mask: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    segments: jax.Array | None = None,
    *,
    cfg: DraftingConfig,
    loss: LossConfig,
    chunk: int,
    draft_ids: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of a batch, and its metrics; arguments as for `drafter_sums`."""
    sums = drafter_sums(
        params, target, features, final_hidden, tokens, loss_mask, positions, valid, segments,
        cfg=cfg, loss=loss, chunk=chunk, draft_ids=draft_ids,
    )  # fmt: skip
    return _mean(objective(sums, loss), sums.weight), metrics(sums, cfg, loss)


def drafter_sums(
    params: AnyDrafter,
    target: Target,
    features: jax.Array,
    final_hidden: jax.Array,
    tokens: jax.Array,
    loss_mask: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    segments: jax.Array | None = None,
    *,
    cfg: DraftingConfig,
    loss: LossConfig,
    chunk: int,
    draft_ids: jax.Array | None = None,
) -> Sums:
    """The sums of a batch. What they take in memory does not depend on the number of anchors.

    Args:
      params: float32 masters; the pass runs in the dtype of `features`, gradients add up in
        float32.
      target: whose embedding and LM head are used.
      features: [B, S, F] what the drafter sees of the target (`Hidden.seen`). Rows at or after the
        last anchor are not used, whatever they hold.
      final_hidden: [B, S, D] its states after the final norm. Rows that no counted slot needs are
        not used, whatever they hold.
      tokens, loss_mask: [B, S].
      positions, valid: [B, A] from `anchors.sample_anchors`.
      segments: [B, S] documents of the rows; None: a row is one.
      chunk: anchors a row that are computed at a time. Several chunks are scanned, and made again
        in the backward pass; one of dummies alone is passed over.
      draft_ids: [Vd] tokens that may be drafted; None: all.
    """
    dtype, length = features.dtype, tokens.shape[1]
    last = jnp.max(jnp.where(valid, positions, 0), axis=1)
    used = jnp.arange(length) < last[:, None]
    features = jnp.where(used[..., None], features, 0)
    with jax.named_scope("context"):
        low = _cast(params, dtype)
        angles = rope_angles(document_positions(length, segments), cfg.rope, cfg.head_dim)
        context = kind_of(cfg).training_context(low, target, features, tokens, angles, cfg=cfg)
        context = _cast(context, jnp.promote_types(dtype, jnp.float32))

    starts = None if segments is None else document_starts(segments)
    reader = pruned(target, draft_ids)

    def of_chunk(params: AnyDrafter, context: Any, positions, valid) -> Sums:
        slots = slot_labels(tokens, loss_mask, positions, valid, cfg.block_size, segments)
        first = None if starts is None else jnp.take_along_axis(starts, positions, axis=1)
        outputs = block_outputs(
            _cast(params, dtype), target, final_hidden, slots, positions, first,
            _cast(context, dtype), cfg, reader,
        )  # fmt: skip
        return slot_sums(outputs, slots, loss, draft_ids)

    chunk = min(chunk, positions.shape[1])
    missing = -positions.shape[1] % chunk
    if missing == 0 and positions.shape[1] == chunk:
        return of_chunk(params, context, positions, valid)
    positions, valid = (
        jnp.pad(x, ((0, 0), (0, missing))).reshape(x.shape[0], -1, chunk).swapaxes(0, 1)
        for x in (positions, valid)
    )

    def unless_empty(params: AnyDrafter, context: Any, positions, valid) -> Sums:
        nothing = Sums.zeros(cfg.block_size)
        return jax.lax.cond(
            valid.any(), of_chunk, lambda *_: nothing, params, context, positions, valid
        )

    remade = jax.checkpoint(unless_empty, prevent_cse=False)

    def step(sums: Sums, inputs):
        return add(sums, remade(params, context, *inputs)), None

    return jax.lax.scan(step, Sums.zeros(cfg.block_size), (positions, valid))[0]


def _cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@struct.dataclass
class Outputs:
    """What the models say about the slots of blocks."""

    draft: jax.Array  # [B, A, K, V] the drafter's logits, U + B; Vd of a pruned vocabulary
    teacher: jax.Array  # [B, A, K, V] the target's logits for the same tokens
    confidence: jax.Array | None  # [B, A, K] logits


def block_outputs(
    params: AnyDrafter,
    target: Target,
    final_hidden: jax.Array,
    slots: Slots,
    positions: jax.Array,
    first: jax.Array | None,
    context: Any,
    cfg: DraftingConfig,
    reader: Target | None = None,
) -> Outputs:
    """Runs the drafter on blocks at `positions` [B, A], with the true tokens before each slot.

    `first` [B, A] is where their documents begin; None: a row is one document. `reader` is the
    target with the LM head of the drafts; None: they have its own.
    """
    with jax.named_scope("draft"):
        draft, certain = kind_of(cfg).training_logits(
            params, reader or target, slots.previous, positions, context, first, cfg=cfg
        )
    with jax.named_scope("teacher"):
        # Slot k predicts token a + k, which the target predicts at position a + k - 1.
        batch, length, width = final_hidden.shape
        index = jnp.minimum(positions[..., None] + jnp.arange(cfg.block_size), length - 1)
        needed = jnp.take_along_axis(final_hidden, index.reshape(batch, -1, 1), axis=1)
        needed = needed.reshape(*index.shape, width)
        needed = jnp.where(slots.counted[..., None], needed, 0)
        teacher = dense.logits(target, jax.lax.stop_gradient(needed))
    return Outputs(draft, teacher, certain)


def slot_sums(
    outputs: Outputs, slots: Slots, loss: LossConfig, draft_ids: jax.Array | None = None
) -> Sums:
    """Losses and measures of blocks; slots that do not count add nothing, whatever they hold.

    Of a drafter that proposes the tokens `draft_ids` [Vd] alone: a slot whose text is another token
    has no cross-entropy; soft targets are the target's distribution over these, renormalised; L1
    distance, and with it acceptance, is over all tokens, with draft probability 0 for the others.
    """
    with jax.named_scope("losses"):
        counted = slots.counted
        draft, teacher = (
            jnp.where(counted[..., None], x, 0).astype(jnp.promote_types(x.dtype, jnp.float32))
            for x in (outputs.draft, outputs.teacher)
        )
        decay = jnp.exp(-jnp.arange(counted.shape[-1]) / loss.loss_decay)
        weight = jnp.where(counted, decay.astype(draft.dtype), 0)

        total = jax.nn.logsumexp(draft, axis=-1)
        p_target = jax.nn.softmax(teacher, axis=-1)
        missed = 0.0
        if draft_ids is None:
            label = jax.lax.broadcasted_iota(jnp.int32, draft.shape, draft.ndim - 1)
        else:
            p_target, label = p_target[..., draft_ids], jnp.asarray(draft_ids)
            missed = jnp.maximum(1 - p_target.sum(-1), 0)
        if loss.soft_targets:
            shares = p_target
            if draft_ids is not None:
                shares = jax.nn.softmax(teacher[..., draft_ids], axis=-1)
            ce = total - (shares * draft).sum(-1)
        else:
            named = label == slots.labels[..., None]
            ce = total - jnp.where(named, draft, 0).sum(-1)
            if draft_ids is not None:
                ce = jnp.where(named.any(-1), ce, 0)
        log_p = draft - total[..., None]
        p_draft = jnp.exp(log_p if loss.tv_weight else jax.lax.stop_gradient(log_p))
        tv = jnp.abs(p_draft - p_target).sum(-1) + missed
        acceptance = jax.lax.stop_gradient(jnp.clip(1 - tv / 2, 0, 1))

        if outputs.confidence is None:
            bce = bias = jnp.zeros_like(ce)
            gaps = jnp.zeros((counted.shape[-1], BINS))
        else:
            z = jnp.where(counted, outputs.confidence, 0)
            bce = jax.nn.softplus(z) - acceptance * z
            certainty = jax.nn.sigmoid(z)
            bias = certainty - acceptance
            which = jnp.minimum((certainty * BINS).astype(jnp.int32), BINS - 1)
            binned = jnp.where(counted, bias, 0)[..., None] * (which[..., None] == jnp.arange(BINS))
            gaps = jax.lax.stop_gradient(binned).sum((0, 1))

        def by_slot(x):
            return jnp.where(counted, x, 0).sum((0, 1))

        whole = counted[..., -1]
        survival = jnp.cumprod(acceptance, axis=-1)
        return Sums(
            weight=weight.sum(),
            ce=(weight * ce).sum(),
            tv=(weight * tv).sum(),
            bce=(weight * bce).sum(),
            slots=by_slot(jnp.ones_like(acceptance)),
            acceptance=by_slot(acceptance),
            gaps=gaps,
            error=by_slot(jnp.abs(bias)),
            survival=jnp.where(whole[..., None], survival, 0).sum((0, 1)),
            blocks=whole.sum().astype(survival.dtype),
        )


def objective(sums: Sums, loss: LossConfig) -> jax.Array:
    """What is minimised, times the sum of the weights."""
    return loss.ce_weight * sums.ce + loss.tv_weight * sums.tv + loss.confidence_weight * sums.bce


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """total / count, and 0 where nothing was counted."""
    return total / jnp.where(count > 0, count, 1)


def metrics(sums: Sums, cfg: DraftingConfig, loss: LossConfig) -> dict[str, jax.Array]:
    """Means by name: losses, expected accepted length, acceptance by slot, confidence errors.

    `survival_k` is prod_{i<=k} c*_i over blocks that count whole, and `expected_accepted_length`
    1 (the bonus token) plus all of these. `confidence_bias` is the mean of c - c*,
    `confidence_error` that of |c - c*|, over slots; `confidence_ece` the expected calibration
    error, in `BINS` bins of c.
    """
    found = {
        "loss": _mean(objective(sums, loss), sums.weight),
        "ce_loss": _mean(sums.ce, sums.weight),
        "tv_loss": _mean(sums.tv, sums.weight),
        "expected_accepted_length": _mean(sums.blocks + sums.survival.sum(), sums.blocks),
    }
    for k in range(cfg.block_size):
        found[f"acceptance_{k + 1}"] = _mean(sums.acceptance[k], sums.slots[k])
        found[f"survival_{k + 1}"] = _mean(sums.survival[k], sums.blocks)
    if cfg.confidence_head:
        found["confidence_loss"] = _mean(sums.bce, sums.weight)
        found["confidence_bias"] = _mean(sums.gaps.sum(), sums.slots.sum())
        found["confidence_error"] = _mean(sums.error.sum(), sums.slots.sum())
        found["confidence_ece"] = _mean(jnp.abs(sums.gaps.sum(0)).sum(), sums.slots.sum())
    return found
