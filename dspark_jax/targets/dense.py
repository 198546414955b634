"""A dense decoder, Qwen3, Llama or Gemma4, frozen, with taps on its hidden states.

Two passes: `forward` over whole sequences (training), and `extend`, which adds flat tokens to
cached rows (prefill and verification).
"""

from __future__ import annotations

import dataclasses
import functools
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
    """Parameters of a target, and what goes with its embedding and LM head, which drafters use."""

    embed: jax.Array  # [V, D]
    layers: tuple[Layer, ...] | Stack
    norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [D, V]; None when tied to the embedding
    embed_scale: float = struct.field(pytree_node=False, default=1.0)
    logit_softcap: float | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class Stack:
    """Layers over which a pass scans.

    Their kinds recur with a period of p, which is 1 where all are of one kind. Entry j holds layers
    j, j + p, j + 2p .. on a leading axis.
    """

    period: tuple[Layer, ...]


@struct.dataclass
class Hidden:
    """What a pass gives: the hidden state after the final norm, and the tapped layers."""

    final: jax.Array  # [..., D]
    features: jax.Array | None  # [..., L * D], None when nothing is tapped

    @property
    def seen(self) -> jax.Array:
        """What a drafter sees: the tapped layers, or the final state where none is tapped."""
        return self.final if self.features is None else self.features


@struct.dataclass
class Angles:
    """RoPE angles of the layers that see all that is before, and of sliding ones."""

    full: RopeAngles
    sliding: RopeAngles | None

    def __getitem__(self, positions: jax.Array) -> Angles:
        """Of tables of all positions, those that are asked for."""
        sliding = None if self.sliding is None else self.sliding[positions]
        return Angles(self.full[positions], sliding)


def make_angles(cfg: TargetConfig, positions: jax.Array) -> Angles:
    """Angles of `positions` for all layers."""
    near = cfg.sliding
    return Angles(
        rope_angles(positions, cfg.rope, cfg.head_dim),
        None if near is None else rope_angles(positions, near.rope, near.head_dim),
    )


def specs(cfg: TargetConfig, *, stacked: bool = False) -> Target:
    """Parameter specs of a target, or of what `stack_layers` makes of it."""
    d, v = cfg.hidden_size, cfg.vocab_size
    kinds = [cfg.layer(i) for i in range(cfg.num_layers)]
    layers = tuple(layer_specs(kind, qk_norm=kind.qk_norm) for kind in kinds)
    if stacked:
        period = _period(cfg)

        def repeated(s):
            return dataclasses.replace(
                s, shape=(cfg.num_layers // period, *s.shape), axes=(None, *s.axes)
            )

        layers = Stack(tuple(jax.tree.map(repeated, one) for one in layers[:period]))
    return Target(
        embed=spec((v, d), ("vocab", "embed")),
        layers=layers,
        norm=spec((d,), (None,), ones),
        lm_head=None if cfg.tie_embeddings else spec((d, v), ("embed", "vocab")),
        embed_scale=cfg.embed_scale,
        logit_softcap=cfg.logit_softcap,
    )


def _period(cfg: TargetConfig) -> int:
    """The smallest divisor of the number of layers after which their kinds recur."""
    count = cfg.num_layers
    windows = [cfg.window(i) for i in range(count)]
    return next(
        p for p in range(1, count + 1) if count % p == 0 and windows == windows[:p] * (count // p)
    )


def stack_layers(params: Target, cfg: TargetConfig) -> Target:
    """The same parameters with layers stacked, so that `forward` scans over them."""
    assert isinstance(params.layers, tuple)
    period = _period(cfg)
    alike = [params.layers[j::period] for j in range(period)]
    layers = Stack(tuple(jax.tree.map(lambda *a: jnp.stack(a), *layers) for layers in alike))
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
    if not isinstance(params.layers, Stack):
        return params
    period = params.layers.period
    number = period[0].attn_norm.shape[0] * len(period)
    return dataclasses.replace(params, layers=tuple(layer(params, i) for i in range(number)))


def layer(params: Target, index: int) -> Layer:
    """One layer of a target, stacked or not."""
    if not isinstance(params.layers, Stack):
        return params.layers[index]
    times, place = divmod(index, len(params.layers.period))
    return jax.tree.map(lambda x: x[times], params.layers.period[place])


def embeddings(params: Target, tokens: jax.Array) -> jax.Array:
    """What the first layer reads: [...] -> [..., D]."""
    x = params.embed[tokens]
    return x if params.embed_scale == 1 else x * jnp.asarray(params.embed_scale, x.dtype)


def logits(params: Target, hidden: jax.Array) -> jax.Array:
    """LM head on hidden states after the final norm: [..., D] -> [..., V]."""
    if params.lm_head is None:
        found = jnp.einsum("...d,vd->...v", hidden, params.embed)
    else:
        found = hidden @ params.lm_head
    cap = params.logit_softcap
    return found if cap is None else cap * jnp.tanh(found / cap)


def create_cache(cfg: TargetConfig, rows: int, length: int, dtype) -> tuple[KVCache, ...]:
    """Empty caches for `rows` rows of `length` positions; sliding layers keep all of them too."""

    def of_layer(cfg: TargetConfig) -> tuple[KVCache, ...]:
        return kv_cache.create(1, (rows, cfg.num_kv_heads, length, cfg.head_dim), dtype)

    return tuple(of_layer(cfg.layer(i))[0] for i in range(cfg.num_layers))


def forward(
    params: Target,
    tokens: jax.Array,
    segments: jax.Array | None = None,
    *,
    cfg: TargetConfig,
    taps: tuple[int, ...] = (),
    attend: SelfAttention = causal_attention,
    fetch: Callable[[Layer, int], Layer] = lambda layer, _: layer,
) -> Hidden:
    """Whole sequences, causal: tokens [B, S] at positions 0 .. S-1.

    Args:
      segments: [B, S] documents of the rows, each of which is read as if it were alone; None: a row
        is one.
      attend: attention of the sequences to themselves.
      fetch: brings the parameters of a layer, of which it is also given the number (or that of
        one of its kind), to where they are used, when it is their turn.
    """
    angles = make_angles(cfg, document_positions(tokens.shape[1], segments))

    def apply(x: jax.Array, layer: Layer, index: int) -> jax.Array:
        def attend_within(q, k, v, scale, window):
            return attend(q, k, v, segments, scale=scale, window=window)

        return _apply(fetch(layer, index), x, angles, cfg, index, attend_within)

    x = embeddings(params, tokens)
    if isinstance(params.layers, Stack):
        x, tapped = _scan_layers(apply, params.layers, x, taps)
    else:
        states = [x]
        for index, layer in enumerate(params.layers):
            states.append(apply(states[-1], layer, index))
        x, tapped = states[-1], [states[i + 1] for i in taps]
    return _hidden(params, x, tapped, cfg)


def _apply(
    layer: Layer, x: jax.Array, angles: Angles, cfg: TargetConfig, index: int, attend
) -> jax.Array:
    """Layer `index`; `attend(q, k, v, scale=, window=)` knows what else there is to attend to."""
    kind, window = cfg.layer(index), cfg.window(index)
    own = angles.full if window is None else angles.sliding
    assert own is not None
    attend = functools.partial(attend, scale=kind.score_scale, window=window)
    return block(layer, x, own, kind, attend)


def _scan_layers(apply, layers: Stack, x: jax.Array, taps: tuple[int, ...]):
    """Scans over stacked layers, keeping the tapped states only.

    Each layer writes the slot of the next tap at or after it, so that what stays in a slot is its
    own layer; layers past the last tap write a slot that nobody reads.
    """
    order, period = sorted(taps), len(layers.period)
    number = layers.period[0].attn_norm.shape[0]
    slots = jnp.array([sum(t < i for t in order) for i in range(number * period)])
    kept = jnp.zeros((len(order) + 1, *x.shape), x.dtype)
    if order and order[0] == -1:
        kept = kept.at[0].set(x)

    def step(carry, inputs):
        x, kept = carry
        for index, (layer, slot) in enumerate(zip(*inputs, strict=True)):
            x = apply(x, layer, index)
            kept = kept.at[slot].set(x)
        return (x, kept), None

    (x, kept), _ = jax.lax.scan(step, (x, kept), (layers.period, slots.reshape(number, period)))
    return x, [kept[order.index(t)] for t in taps]


def extend(
    params: Target,
    flat: FlatTokens,
    cache: tuple[KVCache, ...],
    table: Angles,
    *,
    cfg: TargetConfig,
    taps: tuple[int, ...] = (),
) -> tuple[Hidden, tuple[KVCache, ...]]:
    """Adds the flat tokens to their rows: each sees what its row holds up to itself.

    Layers are a tuple and unrolled: scanned caches would be copied.

    Args:
      table: angles [S, H/2] of all positions, from `make_angles`. A loop makes them in front of it:
        XLA would make those of the tokens anew for every layer.
    """
    assert isinstance(params.layers, tuple)
    angles = table[flat.positions]
    limit = flat.row_positions + 1
    caches, states = [], [embeddings(params, flat.tokens)]
    for index, (layer, old) in enumerate(zip(params.layers, cache, strict=True)):

        def attend(q, k, v, scale, window, old=old):
            new = kv_cache.append(old, flat.to_rows(k), flat.to_rows(v), flat.start)
            caches.append(new)
            rows = cached_attention(flat.to_rows(q), new, limit, scale=scale, window=window)
            return flat.to_flat(rows)

        states.append(_apply(layer, states[-1], angles, cfg, index, attend))
    tapped = [states[i + 1] for i in taps]
    return _hidden(params, states[-1], tapped, cfg), tuple(caches)


def _hidden(params: Target, x: jax.Array, tapped: list[jax.Array], cfg: TargetConfig) -> Hidden:
    features = jnp.concatenate(tapped, axis=-1) if tapped else None
    return Hidden(rms_norm(x, params.norm, cfg.norm_eps), features)
