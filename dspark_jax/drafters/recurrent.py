"""Drafters of one layer that make a token at a time: Eagle3 and MTP-1.

Place i of a row pairs the embedding of token i with a hidden state of place i - 1, and predicts
token i + 1:

    x_i, u_i = enter(g_{i-1}, E[t_i])
    g_i = x_i + attention(u_<=i) + MLP;   p_{i+1} = softmax(head(norm(g_i)))

Where the target has seen token i - 1, g_{i-1} is made of its hidden states there; behind the anchor
it is what the drafter itself has put out. Place 0 has nothing before it, and nobody attends to it.
RoPE sees differences alone, so that places stand for positions.

Eagle3 (EAGLE-3, arXiv 2503.01840): g is a projection of the tapped layers, and the attention reads
[norm(E[t]) ; norm(g)]. MTP-1 (DeepSeek-V3, arXiv 2412.19437, section 2.2): g is the target's state
behind its final norm, x = [norm(g) ; norm(E[t])] W, and the layer is a block of the target's kind.

As there is one layer, keys and values of a place need no attention before it. Letters: R rows,
K drafts, C flat tokens, B batch, S sequence, A anchors, D width, F width of what is seen.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from dspark_jax import kv_cache, sharding
from dspark_jax.attention import anchor_attention, cached_attention
from dspark_jax.config import MtpConfig, RecurrentConfig
from dspark_jax.drafters import confidence
from dspark_jax.drafters.confidence import Confidence
from dspark_jax.drafters.dspark import copy_layer
from dspark_jax.flat import FlatTokens
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import RopeAngles, apply_rope, ones, rms_norm, rope_angles
from dspark_jax.params import spec
from dspark_jax.sampling import Draft, Sampling, choose
from dspark_jax.targets import dense
from dspark_jax.targets.dense import Target
from dspark_jax.transformer import Layer, layer_specs, residual_block
from dspark_jax.vocabulary import Vocabulary, token_ids


@struct.dataclass
class Eagle3:
    """Parameters of an Eagle3 drafter; `layer.attn_norm` is that of the embedding."""

    fc: jax.Array  # [L * D, D]
    hidden_norm: jax.Array  # [D]
    layer: Layer  # reads 2 D
    norm: jax.Array  # [D]
    confidence: Confidence | None
    vocabulary: Vocabulary | None = None  # None: any token is drafted; not trained

    def project(self, seen: jax.Array) -> jax.Array:
        """g [..., D] of what the target shows [..., F]."""
        return seen @ self.fc

    def enter(
        self, hidden: jax.Array, embedded: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """(x, u) of a place from g before it [..., D] and its embedding [..., D]."""
        token = rms_norm(embedded, self.layer.attn_norm, eps)
        return hidden, jnp.concatenate([token, rms_norm(hidden, self.hidden_norm, eps)], axis=-1)


@struct.dataclass
class Mtp:
    """Parameters of an MTP-1 drafter."""

    hidden_norm: jax.Array  # [D]
    embed_norm: jax.Array  # [D]
    join: jax.Array  # [2 D, D] rows: hidden state, embedding
    layer: Layer
    norm: jax.Array  # [D]
    confidence: Confidence | None
    vocabulary: Vocabulary | None = None  # None: any token is drafted; not trained

    def project(self, seen: jax.Array) -> jax.Array:
        """As `Eagle3.project`: what the target shows is the state itself."""
        return seen

    def enter(
        self, hidden: jax.Array, embedded: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """As `Eagle3.enter`."""
        both = rms_norm(hidden, self.hidden_norm, eps), rms_norm(embedded, self.embed_norm, eps)
        x = jnp.concatenate(both, axis=-1) @ self.join
        return x, rms_norm(x, self.layer.attn_norm, eps)


Recurrent = Eagle3 | Mtp


@struct.dataclass
class Memory:
    """What a drafter remembers of its rows."""

    cache: KVCache  # of place i at position i
    hidden: jax.Array  # [R, D] g of the place before the anchor


@struct.dataclass
class Context:
    """What blocks of whole sequences start from, made of what the target has seen."""

    k: jax.Array  # [B, S, G, H]
    v: jax.Array  # [B, S, G, H]
    before: jax.Array  # [B, S, D] g of the place before each


def specs(cfg: RecurrentConfig) -> Recurrent:
    """Parameter specs of a drafter."""
    d = cfg.hidden_size
    norm = spec((d,), (None,), ones)
    if isinstance(cfg, MtpConfig):
        return Mtp(
            hidden_norm=norm,
            embed_norm=norm,
            join=spec((2 * d, d), (None, "embed")),
            layer=layer_specs(cfg, qk_norm=cfg.qk_norm),
            norm=norm,
            confidence=confidence.specs(cfg),
        )
    layer = layer_specs(cfg, qk_norm=True)
    heads = (2 * d, *layer.qkv.shape[1:])
    return Eagle3(
        fc=spec((len(cfg.target_layer_ids) * d, d), (None, "embed")),
        hidden_norm=norm,
        layer=dataclasses.replace(layer, qkv=spec(heads, ("embed", "heads", None, None))),
        norm=norm,
        confidence=confidence.specs(cfg),
    )


def start_from_target(params: Recurrent, target: Target, cfg: RecurrentConfig) -> Recurrent:
    """Initial values that know the language: the layer is the target's last.

    It reads the hidden states alone at first; the tapped ones enter as their mean.
    """
    width = cfg.hidden_size
    layer = copy_layer(target, cfg.num_target_layers - 1)
    norm = target.norm.astype(jnp.float32)
    if isinstance(params, Mtp):
        if params.layer.q_norm is None:
            layer = dataclasses.replace(layer, q_norm=None, k_norm=None)
        join = jnp.concatenate([jnp.eye(width), jnp.zeros((width, width))])
        return dataclasses.replace(params, join=join, layer=layer, norm=norm)
    taps = len(cfg.target_layer_ids)
    return dataclasses.replace(
        params,
        fc=jnp.tile(jnp.eye(width), (taps, 1)) / taps,
        hidden_norm=layer.attn_norm,
        layer=dataclasses.replace(
            layer,
            attn_norm=jnp.ones(width),
            qkv=jnp.concatenate([jnp.zeros_like(layer.qkv), layer.qkv]),
        ),
        norm=norm,
    )


def create_cache(cfg: RecurrentConfig, rows: int, length: int, dtype) -> Memory:
    """Nothing remembered of `rows` rows of `length` positions."""
    shape = (rows, cfg.num_kv_heads, length, cfg.head_dim)
    (cache,) = kv_cache.create(1, shape, dtype)
    return Memory(cache, jnp.zeros((rows, cfg.hidden_size), dtype))


def context_weights(params: Recurrent) -> jax.Array:
    """The layer's key and value matrices, [W, G, 2, H]; a decoding loop copies them once."""
    return params.layer.qkv[:, :, -2:]


def _key_values(
    params: Recurrent,
    weights: jax.Array,
    before: jax.Array,
    embedded: jax.Array,
    angles: RopeAngles,
    cfg: RecurrentConfig,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., G, H] of places, from g before them and their embeddings [..., D]."""
    _, inputs = params.enter(before, embedded, cfg.norm_eps)
    kv = jnp.einsum("...d,dgch->...gch", inputs, weights)
    k = kv[..., 0, :]
    if params.layer.k_norm is not None:
        k = rms_norm(k, params.layer.k_norm, cfg.norm_eps)
    return apply_rope(k, angles), kv[..., 1, :]


def append_context(
    params: Recurrent,
    target: Target,
    weights: jax.Array,
    features: jax.Array,
    flat: FlatTokens,
    position: jax.Array,
    memory: Memory,
    table: RopeAngles,
    *,
    cfg: RecurrentConfig,
) -> Memory:
    """Takes in the tokens of a target pass, in the place of what was drafted there.

    Args:
      weights: those of `context_weights`.
      features: [C, F] what the target showed of the tokens.
      position: [R] where the rows go on: of the pass only what lies before counts.
      table: angles [S, H/2] of all positions.
    """
    states = flat.to_rows(params.project(features))
    shifted = jnp.concatenate([memory.hidden[:, None], states[:, :-1]], axis=1)
    before, embedded = flat.to_flat(shifted), dense.embeddings(target, flat.tokens)
    k, v = _key_values(params, weights, before, embedded, table[flat.positions], cfg)
    cache = kv_cache.append(memory.cache, flat.to_rows(k), flat.to_rows(v), flat.start)
    gained = position - flat.start
    last = states[jnp.arange(len(gained)), jnp.maximum(gained - 1, 0)]
    return Memory(cache, jnp.where(gained[:, None] > 0, last, memory.hidden))


def draft(
    params: Recurrent,
    target: Target,
    anchor: jax.Array,
    position: jax.Array,
    memory: Memory,
    table: RopeAngles,
    sampling: Sampling | None,
    noise: jax.Array | None,
    *,
    cfg: RecurrentConfig,
    truncate: bool,
    mesh: Mesh | None,
) -> tuple[Draft, Memory]:
    """Drafts K tokens of each row, one after the other.

    Keys and values of the drafts are written behind the context, where the next verified tokens
    will overwrite them.

    Args:
      anchor: [R] tokens that the target has emitted and no cache holds yet.
      position: [R] their positions, at least 1.
      table: angles [S, H/2] of all positions.
      sampling: settings of the rows; None drafts all of them greedily.
      noise: [R, K] uniform, needed with `sampling`.
      truncate: False promises that no row truncates its distribution.
      mesh: over which the logits are split; None: one device.
    """

    def step(carry, u):
        place, token, hidden, cache = carry
        x, inputs = params.enter(hidden, dense.embeddings(target, token), cfg.norm_eps)

        def attend(q, k, v):
            nonlocal cache
            cache = kv_cache.append(cache, k, v, place)
            return cached_attention(q, cache, place[:, None] + 1, first=1)

        angles = table[place[:, None]]
        x = residual_block(params.layer, x[:, None], inputs[:, None], angles, cfg, attend)[:, 0]
        final = rms_norm(x, params.norm, cfg.norm_eps)
        scores = dense.logits(target, final)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        scores = scores if u is None else sharding.whole(scores, mesh)
        token, probs = choose(scores, sampling, u, truncate=truncate)
        token = token_ids(params.vocabulary, token)
        return (place + 1, token, x, cache), (token, probs, final)

    start = (position, anchor, memory.hidden, memory.cache)
    by_slot = None if noise is None else noise.T
    (*_, cache), found = jax.lax.scan(step, start, by_slot, length=cfg.block_size)
    tokens, probs, final = jax.tree.map(lambda x: x.swapaxes(0, 1), found)
    z = None
    if params.confidence is not None:
        z = confidence.logits(params.confidence, None, final, tokens)
    return Draft(tokens, probs, z), dataclasses.replace(memory, cache=cache)


def training_context(
    params: Recurrent,
    target: Target,
    features: jax.Array,
    tokens: jax.Array,
    angles: RopeAngles,
    *,
    cfg: RecurrentConfig,
) -> Context:
    """What blocks start from, of whole sequences.

    Args:
      features: [B, S, F] what the target shows.
      tokens: [B, S].
      angles: those of their positions.
    """
    states = params.project(features)
    before = jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0)))
    embedded = dense.embeddings(target, tokens)
    weights = context_weights(params)
    return Context(*_key_values(params, weights, before, embedded, angles, cfg), before)


def training_logits(
    params: Recurrent,
    target: Target,
    previous: jax.Array,
    position: jax.Array,
    context: Context,
    first: jax.Array | None = None,
    *,
    cfg: RecurrentConfig,
) -> tuple[jax.Array, jax.Array | None]:
    """Logits of blocks whose true tokens are known: training-time test (EAGLE-3, section 3).

    Each slot reads what the one before has put out, and attends to what the target showed up to the
    anchor and to the block's own slots, as in drafting.

    Args:
      previous: [B, A, K] the token before each slot, the anchor first.
      position: [B, A] places of the anchors in the row, at least one behind `first`.
      first: [B, A] where in the row the blocks' documents begin; None: a row is one document.
    Returns:
      (logits [B, A, K, V], confidence logits [B, A, K] or None).
    """
    begin = jnp.zeros_like(position) if first is None else first
    hidden = jnp.take_along_axis(context.before, position[..., None], axis=1)
    embedded = dense.embeddings(target, previous)
    keys, values, states = [], [], []

    def attend(q, k, v):
        keys.append(k)
        values.append(v)
        own = jnp.stack(keys, axis=2), jnp.stack(values, axis=2)
        outer = context.k, context.v
        return anchor_attention(q[:, :, None], outer, own, position, begin + 1)[:, :, 0]

    for slot in range(cfg.block_size):
        angles = rope_angles(position - begin + slot, cfg.rope, cfg.head_dim)
        x, inputs = params.enter(hidden, embedded[:, :, slot], cfg.norm_eps)
        hidden = residual_block(params.layer, x, inputs, angles, cfg, attend)
        states.append(hidden)
    final = rms_norm(jnp.stack(states, axis=2), params.norm, cfg.norm_eps)
    scores = dense.logits(target, final)
    if params.confidence is None:
        return scores, None
    return scores, confidence.logits(params.confidence, None, final, previous)
