"""The pieces that targets and drafters are built of: norm, RoPE, gated MLP, argmax."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import Rope, TransformerConfig
from dspark_jax.params import spec

ones = jax.nn.initializers.ones


def unit_norm(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last axis; the statistics are taken in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis."""
    return unit_norm(x, eps) * weight


@struct.dataclass
class RopeAngles:
    """Cosines and sines of a set of positions, shared by all layers of a pass."""

    cos: jax.Array  # [..., H/2]
    sin: jax.Array  # [..., H/2]

    def __getitem__(self, positions: jax.Array) -> RopeAngles:
        """Of a table of all positions [S, H/2], those that are asked for."""
        return RopeAngles(self.cos[positions], self.sin[positions])


def rope_angles(positions: jax.Array, rope: Rope, head_dim: int) -> RopeAngles:
    """Angles of `positions` [...], computed where they are needed: no table can be too short."""
    frequencies = jnp.asarray(rope.frequencies(head_dim), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return RopeAngles(jnp.cos(angles), jnp.sin(angles))


def apply_rope(x: jax.Array, angles: RopeAngles) -> jax.Array:
    """Rotates x [positions..., heads..., H]; the halves of H are the coordinates of the pairs."""
    heads = range(angles.cos.ndim - 1, x.ndim - 1)
    cos, sin = (jnp.expand_dims(a, tuple(heads)) for a in (angles.cos, angles.sin))
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


@struct.dataclass
class Mlp:
    """Gated MLP; gate and up are one matrix, so that a pass reads x once."""

    gate_up: jax.Array  # [D, 2, F]
    down: jax.Array  # [F, D]

    @staticmethod
    def specs(cfg: TransformerConfig) -> Mlp:
        d, f = cfg.hidden_size, cfg.intermediate_size
        return Mlp(
            gate_up=spec((d, 2, f), ("embed", None, "mlp")),
            down=spec((f, d), ("mlp", "embed")),
        )


def mlp(
    params: Mlp, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """(activation(x W_gate) * (x W_up)) W_down: SwiGLU, or GeGLU with `jax.nn.gelu`."""
    both = jnp.einsum("...d,dcf->...cf", x, params.gate_up)
    return (activation(both[..., 0, :]) * both[..., 1, :]) @ params.down


def argmax(x: jax.Array) -> jax.Array:
    """Index of the largest value on the last axis, the first among equals, as int32.

    Two plain reductions; on CPUs several times faster than the variadic one of `jnp.argmax`.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    largest = jnp.max(x, axis=-1, keepdims=True)
    found = jnp.min(jnp.where(x == largest, indices, x.shape[-1]), axis=-1)
    return jnp.minimum(found, x.shape[-1] - 1)  # a row of NaNs has no largest value
