"""A dense decoder, Qwen3 or Llama, frozen, with taps on its hidden states.

Two passes: `forward` over whole sequences (training), and `extend`, which adds flat tokens to
cached rows (prefill and verification).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import kv_cache
from dspark_jax.attention import cached_attention, causal_attention
from dspark_jax.config import TargetConfig
from dspark_jax.flat import FlatTokens
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import RopeAngles, ones, rms_norm, rope_angles
from dspark_jax.params import spec
from dspark_jax.segments import document_positions
from dspark_jax.self_attention import SelfAttention
from dspark_jax.transformer import Layer, block, layer_specs


@struct.dataclass
class Target:
    """Parameters of a target. `layers` is a tuple, or one `Layer` stacked on a leading axis."""

    embed: jax.Array  # [V, D]
    layers: tuple[Layer, ...] | Layer
    norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [D, V]; None when tied to the embedding


@struct.dataclass
class Hidden:
    """What a pass gives: the hidden state after the final norm, and the tapped layers."""

    final: jax.Array  # [..., D]
    features: jax.Array | None  # [..., L * D], None when nothing is tapped

    @property
    def seen(self) -> jax.Array:
        """What a drafter sees: the tapped layers, or the final state where none is tapped."""
        return self.final if self.features is None else self.features


def specs(cfg: TargetConfig, *, stacked: bool = False) -> Target:
    """Parameter specs of a target, or of what `stack_layers` makes of it."""
    d, v = cfg.hidden_size, cfg.vocab_size
    layer = layer_specs(cfg, qk_norm=cfg.qk_norm)
    if stacked:
        layers = jax.tree.map(
            lambda s: spec((cfg.num_layers, *s.shape), (None, *s.axes), s.initializer), layer
        )
    else:
        layers = (layer,) * cfg.num_layers
    return Target(
        embed=spec((v, d), ("vocab", "embed")),
        layers=layers,
        norm=spec((d,), (None,), ones),
        lm_head=None if cfg.tie_embeddings else spec((d, v), ("embed", "vocab")),
    )


def stack_layers(params: Target) -> Target:
    """The same parameters with layers stacked, so that `forward` scans over them."""
    assert isinstance(params.layers, tuple)
    layers = jax.tree.map(lambda *a: jnp.stack(a), *params.layers)
    return dataclasses.replace(params, layers=layers)


def untie(params: Target) -> Target:
    """The same parameters with an LM head of their own where it is tied to the embedding.

    A CPU multiplies a few tokens with [D, V] about twice as fast as with [V, D], and in a small
    target the LM head is a good part of a round; it costs the memory of another embedding.
    """
    if params.lm_head is not None:
        return params
    return dataclasses.replace(params, lm_head=params.embed.T)


def unstack_layers(params: Target) -> Target:
    """The same parameters with layers as a tuple, as decoding wants them."""
    if not isinstance(params.layers, Layer):
        return params
    number = params.layers.attn_norm.shape[0]
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], params.layers) for i in range(number))
    return dataclasses.replace(params, layers=layers)


def logits(params: Target, hidden: jax.Array) -> jax.Array:
    """LM head on hidden states after the final norm: [..., D] -> [..., V]."""
    if params.lm_head is None:
        return jnp.einsum("...d,vd->...v", hidden, params.embed)
    return hidden @ params.lm_head


def create_cache(cfg: TargetConfig, rows: int, length: int, dtype) -> tuple[KVCache, ...]:
    """Empty caches for `rows` rows of `length` positions."""
    shape = (rows, cfg.num_kv_heads, length, cfg.head_dim)
    return kv_cache.create(cfg.num_layers, shape, dtype)


def forward(
    params: Target,
    tokens: jax.Array,
    segments: jax.Array | None = None,
    *,
    cfg: TargetConfig,
    taps: tuple[int, ...] = (),
    attend: SelfAttention = causal_attention,
    fetch: Callable[[Layer], Layer] = lambda layer: layer,
) -> Hidden:
    """Whole sequences, causal: tokens [B, S] at positions 0 .. S-1.

    Args:
      segments: [B, S] documents of the rows, each of which is read as if it were alone; None: a row
        is one.
      attend: attention of the sequences to themselves.
      fetch: brings the parameters of a layer to where they are used, when it is their turn.
    """
    angles = rope_angles(document_positions(tokens.shape[1], segments), cfg.rope, cfg.head_dim)

    def attend_within(q, k, v):
        return attend(q, k, v, segments)

    def apply(x, layer):
        return block(fetch(layer), x, angles, cfg, attend_within)

    x = params.embed[tokens]
    if isinstance(params.layers, Layer):
        x, tapped = _scan_layers(apply, params.layers, x, cfg.num_layers, taps)
    else:
        states = [x]
        for layer in params.layers:
            states.append(apply(states[-1], layer))
        x, tapped = states[-1], [states[i + 1] for i in taps]
    return _hidden(params, x, tapped, cfg)


def _scan_layers(apply, layers: Layer, x: jax.Array, num_layers: int, taps: tuple[int, ...]):
    """Scans over stacked layers, keeping the tapped states only.

    Each layer writes the slot of the next tap at or after it, so that what stays in a slot is its
    own layer; layers past the last tap write a slot that nobody reads.
    """
    order = sorted(taps)
    slots = jnp.array([sum(t < i for t in order) for i in range(num_layers)])
    kept = jnp.zeros((len(order) + 1, *x.shape), x.dtype)
    if order and order[0] == -1:
        kept = kept.at[0].set(x)

    def step(carry, inputs):
        x, kept = carry
        layer, slot = inputs
        x = apply(x, layer)
        return (x, kept.at[slot].set(x)), None

    (x, kept), _ = jax.lax.scan(step, (x, kept), (layers, slots))
    return x, [kept[order.index(t)] for t in taps]


def extend(
    params: Target,
    flat: FlatTokens,
    cache: tuple[KVCache, ...],
    table: RopeAngles,
    *,
    cfg: TargetConfig,
    taps: tuple[int, ...] = (),
) -> tuple[Hidden, tuple[KVCache, ...]]:
    """Adds the flat tokens to their rows: each sees what its row holds up to itself.

    Layers are a tuple and unrolled: scanned caches would be copied.

    Args:
      table: angles [S, H/2] of all positions. A loop makes them in front of it: XLA would make
        those of the tokens anew for every layer.
    """
    assert isinstance(params.layers, tuple)
    angles = table[flat.positions]
    limit = flat.row_positions + 1
    caches, states = [], [params.embed[flat.tokens]]
    for layer, old in zip(params.layers, cache, strict=True):

        def attend(q, k, v, old=old):
            new = kv_cache.append(old, flat.to_rows(k), flat.to_rows(v), flat.start)
            caches.append(new)
            return flat.to_flat(cached_attention(flat.to_rows(q), new, limit))

        states.append(block(layer, states[-1], angles, cfg, attend))
    tapped = [states[i + 1] for i in taps]
    return _hidden(params, states[-1], tapped, cfg), tuple(caches)


def _hidden(params: Target, x: jax.Array, tapped: list[jax.Array], cfg: TargetConfig) -> Hidden:
    features = jnp.concatenate(tapped, axis=-1) if tapped else None
    return Hidden(rms_norm(x, params.norm, cfg.norm_eps), features)
