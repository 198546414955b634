"""The DSpark drafter: a parallel backbone whose layers attend to injected target features.

The target's tapped hidden states become one context H_ctx, from which every layer takes keys and
values beside those of the block's own slots. All slots of a block are computed in one pass, each
seeing the whole block; a sequential head (`heads`) then makes them depend on one another, and a
confidence head (`confidence`) says how far to trust them. With `head="none"` this is DFlash.

Slot k of a block anchored at position a has RoPE position a + k - 1 and predicts token a + k.
Embedding and LM head are the target's.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from dspark_jax import kv_cache, sharding
from dspark_jax.attention import anchor_attention, cached_attention
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import confidence, heads
from dspark_jax.flat import FlatTokens
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import RopeAngles, apply_rope, ones, rms_norm, rope_angles
from dspark_jax.params import spec
from dspark_jax.sampling import Draft, Sampling, choose
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target
from dspark_jax.transformer import Layer, block, layer_specs, values
from dspark_jax.vocabulary import Vocabulary, token_ids

KeyValue = tuple[jax.Array, jax.Array]


@struct.dataclass
class Drafter:
    """Trained parameters of a drafter."""

    fc: jax.Array  # [L * D, D]
    context_norm: jax.Array  # [D]
    layers: tuple[Layer, ...]
    norm: jax.Array  # [D]
    head: heads.Markov | None
    confidence: confidence.Confidence | None
    vocabulary: Vocabulary | None = None  # None: any token is drafted; not trained


def specs(cfg: DrafterConfig) -> Drafter:
    """Parameter specs of a drafter."""
    d = cfg.hidden_size
    return Drafter(
        fc=spec((len(cfg.target_layer_ids) * d, d), (None, "embed")),
        context_norm=spec((d,), (None,), ones),
        layers=(layer_specs(cfg, qk_norm=True),) * cfg.num_layers,
        norm=spec((d,), (None,), ones),
        head=heads.specs(cfg),
        confidence=confidence.specs(cfg),
    )


def start_from_target(params: Drafter, target: Target, cfg: DrafterConfig) -> Drafter:
    """Initial values that know the language: the layers are layers of the target.

    They are evenly spaced among those that see all that is before, the first and the last among
    them. A residual stream has one basis all the way, so that the mean of the tapped states can
    stand for the state that a layer had read its keys and values from. The heads stay as they are
    in `params`.
    """
    shapes = [layer.qkv.shape for layer in jax.eval_shape(dense.unstack_layers, target).layers]
    alike = [i for i, shape in enumerate(shapes) if shape == params.layers[0].qkv.shape]
    chosen = np.linspace(0, len(alike) - 1, cfg.num_layers) if cfg.num_layers > 1 else [-1]
    layers = tuple(copy_layer(target, alike[round(i)]) for i in chosen)
    taps, width = len(cfg.target_layer_ids), cfg.hidden_size
    return dataclasses.replace(
        params,
        fc=jnp.tile(jnp.eye(width), (taps, 1)) / taps,
        context_norm=sum(layer.attn_norm for layer in layers) / len(layers),
        layers=layers,
        norm=target.norm.astype(jnp.float32),
    )


def copy_layer(target: Target, index: int) -> Layer:
    """A layer as float32, with q/k norms that change little where the target has none."""
    layer = jax.tree.map(lambda x: x.astype(jnp.float32), dense.layer(target, index))
    if layer.q_norm is None:
        head_norm = jnp.ones(layer.qkv.shape[-1])
        layer = dataclasses.replace(layer, q_norm=head_norm, k_norm=head_norm)
    return layer


def create_cache(cfg: DrafterConfig, rows: int, length: int, dtype) -> tuple[KVCache, ...]:
    """Empty context caches for `rows` rows of `length` positions."""
    shape = (rows, cfg.num_kv_heads, length, cfg.head_dim)
    return kv_cache.create(cfg.num_layers, shape, dtype)


def context_weights(params: Drafter) -> jax.Array:
    """Key and value matrices of all N layers side by side, [D, N, G, 2, H].

    Where the key is the value there is one of them. Taking them out of the layers is a copy, which
    a decoding loop makes once, in front of it.
    """
    return jnp.stack([layer.keys_values for layer in params.layers], axis=1)


def context_key_values(
    params: Drafter,
    weights: jax.Array,
    features: jax.Array,
    angles: RopeAngles,
    cfg: DrafterConfig,
) -> list[KeyValue]:
    """Keys and values [..., G, H] of every layer from target features [..., L * D].

    `weights` are those of `context_weights`, `angles` those of the features' positions.
    """
    context = rms_norm(features @ params.fc, params.context_norm, cfg.norm_eps)
    kv = jnp.einsum("...d,dngch->...ngch", context, weights)
    norms = jnp.stack([layer.k_norm for layer in params.layers])[:, None]
    k = rms_norm(kv[..., 0, :], norms, cfg.norm_eps)
    k, v = apply_rope(k, angles), values(kv, cfg)
    return [(k[..., n, :, :], v[..., n, :, :]) for n in range(cfg.num_layers)]


def append_context(
    params: Drafter,
    target: Target,
    weights: jax.Array,
    features: jax.Array,
    flat: FlatTokens,
    position: jax.Array,
    cache: tuple[KVCache, ...],
    table: RopeAngles,
    *,
    cfg: DrafterConfig,
) -> tuple[KVCache, ...]:
    """Extends each row's context by the verified tokens of a target pass; features [C, L * D].

    `weights` are those of `context_weights`, `table` the angles [S, H/2] of all positions. Neither
    the target nor where the rows go on (`position`) is of any concern here.
    """
    context = context_key_values(params, weights, features, table[flat.positions], cfg)
    return tuple(
        kv_cache.append(old, flat.to_rows(k), flat.to_rows(v), flat.start)
        for old, (k, v) in zip(cache, context, strict=True)
    )


def block_inputs(target: Target, anchor: jax.Array, *, block_size: int, mask_id: int) -> jax.Array:
    """Embeddings [..., K, D] of blocks: the anchor token [...] and K - 1 mask tokens."""
    masks = jnp.full((*anchor.shape, block_size - 1), mask_id, anchor.dtype)
    return dense.embeddings(target, jnp.concatenate([anchor[..., None], masks], axis=-1))


def _backbone(params: Drafter, x: jax.Array, angles: RopeAngles, cfg: DrafterConfig, attend):
    """Layers and final norm; `attend(i, q, k, v)` is layer i's attention."""
    for i, layer in enumerate(params.layers):
        x = block(layer, x, angles, cfg, lambda q, k, v, i=i: attend(i, q, k, v))
    return rms_norm(x, params.norm, cfg.norm_eps)


def draft_hidden(
    params: Drafter,
    target: Target,
    anchor: jax.Array,
    position: jax.Array,
    cache: tuple[KVCache, ...],
    table: RopeAngles,
    *,
    cfg: DrafterConfig,
) -> tuple[jax.Array, tuple[KVCache, ...]]:
    """One block a row, for decoding.

    The slots' keys and values are written behind the context, where the next verified tokens will
    overwrite them.

    Args:
      anchor: [R] tokens that the target has emitted and no cache holds yet.
      position: [R] their positions, which is also how much context each row has.
      cache: the context caches; position + K <= S.
      table: angles [S, H/2] of all positions.
    Returns:
      (h [R, K, D], cache).
    """
    rows, size = anchor.shape[0], cfg.block_size
    x = block_inputs(target, anchor, block_size=size, mask_id=cfg.mask_token_id)
    angles = table[position[:, None] + jnp.arange(size)]
    limit = jnp.broadcast_to(position[:, None] + size, (rows, size))
    caches = list(cache)

    def attend(i, q, k, v):
        caches[i] = kv_cache.append(caches[i], k, v, position)
        return cached_attention(q, caches[i], limit, scale=cfg.score_scale)

    return _backbone(params, x, angles, cfg, attend), tuple(caches)


def draft(
    params: Drafter,
    target: Target,
    anchor: jax.Array,
    position: jax.Array,
    cache: tuple[KVCache, ...],
    table: RopeAngles,
    sampling: Sampling | None,
    noise: jax.Array | None,
    *,
    cfg: DrafterConfig,
    truncate: bool,
    mesh: Mesh | None,
) -> tuple[Draft, tuple[KVCache, ...]]:
    """Drafts K tokens of each row; arguments as for `draft_hidden` and `draft_block`.

    Args:
      mesh: over which the logits are split; None: one device.
    """
    hidden, cache = draft_hidden(params, target, anchor, position, cache, table, cfg=cfg)
    logits = dense.logits(target, hidden)
    if noise is not None:
        logits = sharding.whole(logits, mesh)
    return draft_block(params, logits, hidden, anchor, sampling, noise, truncate=truncate), cache


def draft_block(
    params: Drafter,
    logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    sampling: Sampling | None = None,
    noise: jax.Array | None = None,
    *,
    truncate: bool = True,
) -> Draft:
    """Samples x_1..x_K left to right: one scan over (token before, recurrent state).

    Args:
      params: the drafter; its sequential head adds B_k to the base logits.
      logits: U [R, K, V].
      hidden: h [R, K, D].
      anchor: x_0 [R].
      sampling: settings of the rows; None drafts all of them greedily.
      noise: [R, K] uniform, needed with `sampling`.
    """
    head = params.head
    slots = head.prepare(hidden) if head is not None else hidden[..., :0]
    wide = jnp.promote_types(logits.dtype, jnp.float32)

    def step(carry, inputs):
        previous, state = carry
        base, slot, u = inputs
        scores = base.astype(wide)
        if head is not None:
            state, code = head.step(state, previous, slot)
            scores = scores + (code @ head.w2).astype(wide)
        token, probs = choose(scores, sampling, u, truncate=truncate)
        token = token_ids(params.vocabulary, token)
        return (token, state), (token, probs)

    by_slot = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (logits, slots, noise))
    start = (anchor, heads.initial_state(head, hidden))
    _, (tokens, probs) = jax.lax.scan(step, start, by_slot)
    tokens = tokens.T
    z = None
    if params.confidence is not None:
        previous = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
        z = confidence.logits(params.confidence, head, hidden, previous)
    return Draft(tokens, None if probs is None else jnp.moveaxis(probs, 0, 1), z)


def training_context(
    params: Drafter,
    target: Target,
    features: jax.Array,
    tokens: jax.Array,
    angles: RopeAngles,
    *,
    cfg: DrafterConfig,
) -> list[KeyValue]:
    """What the blocks of whole sequences attend to; see `context_key_values`."""
    return context_key_values(params, context_weights(params), features, angles, cfg)


def training_logits(
    params: Drafter,
    target: Target,
    previous: jax.Array,
    position: jax.Array,
    context: list[KeyValue],
    first: jax.Array | None = None,
    *,
    cfg: DrafterConfig,
) -> tuple[jax.Array, jax.Array | None]:
    """Logits of the slots of blocks whose true tokens are known.

    Args:
      previous: [B, A, K] the token before each slot, the anchor first.
      position, context, first: as for `training_hidden`.
    Returns:
      (U + B [B, A, K, V], confidence logits [B, A, K] or None).
    """
    anchor = previous[..., 0]
    hidden = training_hidden(params, target, anchor, position, context, first, cfg=cfg)
    scores = dense.logits(target, hidden)
    if params.head is not None:
        scores = scores + heads.teacher_forced(params.head, hidden, previous)
    if params.confidence is None:
        return scores, None
    return scores, confidence.logits(params.confidence, params.head, hidden, previous)


def training_hidden(
    params: Drafter,
    target: Target,
    anchor: jax.Array,
    position: jax.Array,
    context: list[KeyValue],
    first: jax.Array | None = None,
    *,
    cfg: DrafterConfig,
) -> jax.Array:
    """Many blocks a sequence, for training.

    Args:
      anchor: [B, A] anchor tokens.
      position: [B, A] their places in the row; a block sees context below its own.
      context: keys and values [B, S, G, H] of each layer, from `context_key_values`.
      first: [B, A] where in the row the blocks' documents begin: they see context from there, and
        count positions from there. None: a row is one document.
    Returns:
      h [B, A, K, D].
    """
    x = block_inputs(target, anchor, block_size=cfg.block_size, mask_id=cfg.mask_token_id)
    inside = position if first is None else position - first
    slots = inside[..., None] + jnp.arange(cfg.block_size)
    angles = rope_angles(slots, cfg.rope, cfg.head_dim)

    def attend(i, q, k, v):
        return anchor_attention(q, context[i], (k, v), position, first, scale=cfg.score_scale)

    return _backbone(params, x, angles, cfg, attend)
