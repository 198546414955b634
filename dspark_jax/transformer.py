"""The pre-norm block that targets and drafters share: Qwen3, Llama, Gemma4.

Which of their parts a layer has follows from its configuration; see `TransformerConfig`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import TransformerConfig
from dspark_jax.layers import Mlp, RopeAngles, apply_rope, mlp, ones, rms_norm, unit_norm
from dspark_jax.params import spec

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@struct.dataclass
class Layer:
    """One block. The M query heads of a key/value head lie beside its key and its value."""

    attn_norm: jax.Array  # [D]
    qkv: jax.Array  # [D, G, M + 2, H]; [D, G, M + 1, H] where the key is the value
    q_norm: jax.Array | None  # [H]
    k_norm: jax.Array | None  # [H]
    out: jax.Array  # [G * M * H, D]
    mlp_norm: jax.Array  # [D]
    mlp: Mlp
    attn_post_norm: jax.Array | None = None  # [D], of what attention adds (Gemma4)
    mlp_post_norm: jax.Array | None = None  # [D], of what the MLP adds
    scalar: jax.Array | None = None  # [], the block's output is multiplied with it; never trained

    @property
    def keys_values(self) -> jax.Array:
        """What makes keys and values, [D, G, 2, H], or keys that are values, [D, G, 1, H]."""
        g, h = self.qkv.shape[1], self.qkv.shape[3]
        return self.qkv[:, :, self.out.shape[0] // (g * h) :]


def layer_specs(cfg: TransformerConfig, *, qk_norm: bool) -> Layer:
    """Parameter specs of one layer."""
    d, h, g, m = cfg.hidden_size, cfg.head_dim, cfg.num_kv_heads, cfg.group_size
    head_norm = spec((h,), (None,), ones) if qk_norm else None
    post_norm = spec((d,), (None,), ones) if cfg.gemma else None
    return Layer(
        attn_norm=spec((d,), (None,), ones),
        qkv=spec((d, g, m + (1 if cfg.key_is_value else 2), h), ("embed", "heads", None, None)),
        q_norm=head_norm,
        k_norm=head_norm,
        out=spec((g * m * h, d), ("heads", "embed")),
        mlp_norm=spec((d,), (None,), ones),
        mlp=Mlp.specs(cfg),
        attn_post_norm=post_norm,
        mlp_post_norm=post_norm,
        scalar=spec((), (), ones, frozen=True) if cfg.gemma else None,
    )


def block(
    layer: Layer, x: jax.Array, angles: RopeAngles, cfg: TransformerConfig, attend: Attend
) -> jax.Array:
    """x [..., D] -> [..., D].

    `attend` maps q [..., G, M, H] and the tokens' own k, v [..., G, H] to [..., G, M, H]; what else
    is attended to, and what of it is seen, is the caller's affair.
    """
    return residual_block(layer, x, rms_norm(x, layer.attn_norm, cfg.norm_eps), angles, cfg, attend)


def residual_block(
    layer: Layer,
    x: jax.Array,
    inputs: jax.Array,
    angles: RopeAngles,
    cfg: TransformerConfig,
    attend: Attend,
) -> jax.Array:
    """A block whose queries, keys and values are made of `inputs`, whatever their width.

    `block` makes them of its normalised residual x [..., D].
    """
    m, eps = cfg.group_size, cfg.norm_eps

    def added(y: jax.Array, norm: jax.Array | None) -> jax.Array:
        return x + (y if norm is None else rms_norm(y, norm, eps))

    with jax.named_scope("attention"):
        qkv = jnp.einsum("...d,dgmh->...gmh", inputs, layer.qkv)
        qk = qkv[..., : m + 1, :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = rms_norm(qk, jnp.stack([layer.q_norm] * m + [layer.k_norm]), eps)
        qk = apply_rope(qk, angles)
        attended = attend(qk[..., :m, :], qk[..., m, :], values(qkv, cfg))
        x = added(attended.reshape(*x.shape[:-1], -1) @ layer.out, layer.attn_post_norm)
    with jax.named_scope("mlp"):
        activation = jax.nn.gelu if cfg.gemma else jax.nn.silu
        x = added(mlp(layer.mlp, rms_norm(x, layer.mlp_norm, eps), activation), layer.mlp_post_norm)
    return x if layer.scalar is None else x * jax.lax.stop_gradient(layer.scalar)


def values(kv: jax.Array, cfg: TransformerConfig) -> jax.Array:
    """Values from products [..., :, H] of which they, or the keys that they are, come last."""
    v = kv[..., -1, :]
    return unit_norm(v, cfg.norm_eps) if cfg.gemma else v
