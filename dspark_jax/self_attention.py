"""Attention of whole sequences to themselves, on a mesh: one function, three implementations.

`reference`    `attention.causal_attention`, whose scores are [S, S] a head, on every machine
`dot_product`  `jax.nn.dot_product_attention`, whatever that is made of
`splash`       the Splash kernel, on TPUs: scores are never stored

A device attends for its own rows and heads; nothing is exchanged. Letters: B batch, S sequence,
G key/value heads, M query heads a key/value head, H head size.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, Protocol

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from dspark_jax import sharding
from dspark_jax.attention import causal_attention
from dspark_jax.config import require
from dspark_jax.sharding import TRAINING, AnyMesh

AttentionKind = Literal["reference", "dot_product", "splash"]

SPLASH_BLOCKS = (512, 256, 128)
"""Positions that the kernel takes at a time: the first that divides the length."""


class SelfAttention(Protocol):
    """q [B, S, G, M, H], k, v [B, S, G, H], documents [B, S] or None -> [B, S, G, M, H].

    A position sees itself and what is before it in its own document, and of a `window` so many
    positions. Scores are multiplied by `scale`, H^-1/2 by default.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> jax.Array: ...


def check(kind: AttentionKind, length: int, platform: str) -> None:
    """Raises `InputError` when sequences of `length` cannot be attended to like this."""
    if kind == "splash":
        require(platform == "tpu", f"attention='splash': expected TPUs, these devices: {platform}")
        step = SPLASH_BLOCKS[-1]
        require(
            length % step == 0,
            f"attention='splash' with max_length={length}: expected a multiple of {step}",
        )


def make_self_attention(
    kind: AttentionKind, mesh: AnyMesh, *, interpret: bool = False
) -> SelfAttention:
    """The implementation for arrays that lie on `mesh` as the rules of training say.

    Args:
      interpret: whether Splash's kernel is run by JAX, on any device, slowly.
    """

    def splash_attention(q, k, v, segments=None, *, scale=None, window=None):
        return _splash(q, k, v, segments, scale, window, interpret)

    local: SelfAttention
    match kind:
        case "reference":
            local = causal_attention
        case "dot_product":
            local = _dot_product
        case "splash":
            local = splash_attention
    if mesh.size == 1:
        return local

    def attend(q, k, v, segments=None, *, scale=None, window=None):
        def place(x, *axes):
            return sharding.partition(x.shape, axes, mesh, TRAINING)

        heads = ("batch", None, "heads", None)
        one, group = place(k, *heads), place(q, *heads, None)
        rows = place(k[:, :, 0, 0], "batch", None)
        return jax.shard_map(
            functools.partial(local, scale=scale, window=window),
            mesh=mesh,
            in_specs=(group, one, one, rows),
            out_specs=group,
            check_vma=False,
        )(q, k, v, segments)

    return attend


def _dot_product(q, k, v, segments=None, *, scale=None, window=None):
    mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    near = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        heads, k, v, mask=mask, is_causal=True, scale=scale, local_window_size=near
    ).reshape(q.shape)


def _splash(q, k, v, segments, scale, window, interpret: bool):
    length, groups, size, width = q.shape[1:]
    step = next(block for block in SPLASH_BLOCKS if length % block == 0)
    whole = (length, length)
    mask = splash.CausalMask(whole)
    if window is not None:
        mask = splash.LocalMask(whole, (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * (groups * size)),
        block_sizes=splash.BlockSizes(block_q=step, block_kv=step, block_kv_compute=step),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # The kernel knows no scale; it wants heads first.
    scale = width**-0.5 if scale is None else scale
    heads = (q * scale).astype(q.dtype).reshape(*q.shape[:2], -1, width)
    heads, k, v = (x.swapaxes(1, 2) for x in (heads, k, v))
    ids = None if segments is None else splash.SegmentIds(q=segments, kv=segments)
    attend: Any = jax.vmap(kernel)
    return attend(heads, k, v, ids).swapaxes(1, 2).reshape(q.shape)
