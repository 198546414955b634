"""The block against NumPy, one token and one head at a time."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.attention import causal_attention
from dspark_jax.config import Rope, TransformerConfig
from dspark_jax.layers import rope_angles
from dspark_jax.transformer import block, layer_specs

CFG = TransformerConfig(
    vocab_size=8,
    hidden_size=12,
    intermediate_size=10,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    rope=Rope(theta=50.0),
    norm_eps=1e-3,
)
GEMMA4 = dataclasses.replace(CFG, model_type="gemma4")
KEY_IS_VALUE = dataclasses.replace(GEMMA4, key_is_value=True)
G, M, H = 2, 3, 4


def norm(x, weight):
    return x / np.sqrt((x * x).mean() + CFG.norm_eps) * weight


def rotate(x, position):
    half = H // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * 50.0 ** (-2 * i / H)
        c, s = np.cos(angle), np.sin(angle)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def maybe_norm(x, weight):
    return x if weight is None else norm(x, weight)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference(layer, x, cfg=CFG):
    """The block on x [S, D], causal."""
    value_norm = (lambda v: norm(v, 1)) if cfg.gemma else (lambda v: v)
    value_place = M if cfg.key_is_value else M + 1
    normed = [norm(row, layer.attn_norm) for row in x]
    out = np.zeros_like(x)
    for t, g, m in np.ndindex(len(x), G, M):
        q = rotate(maybe_norm(normed[t] @ layer.qkv[:, g, m], layer.q_norm), t)
        seen = range(t + 1)
        keys = [rotate(maybe_norm(normed[s] @ layer.qkv[:, g, M], layer.k_norm), s) for s in seen]
        scores = np.array([q @ k for k in keys]) * (1 if cfg.gemma else H**-0.5)
        weights = np.exp(scores) / np.exp(scores).sum()
        values = [value_norm(normed[s] @ layer.qkv[:, g, value_place]) for s in seen]
        value = sum(w * v for w, v in zip(weights, values, strict=True))
        first = (g * M + m) * H
        out[t] += value @ layer.out[first : first + H]
    x = x + np.array([maybe_norm(row, layer.attn_post_norm) for row in out])
    for t in range(len(x)):
        h = norm(x[t], layer.mlp_norm)
        gate, up = h @ layer.mlp.gate_up[:, 0], h @ layer.mlp.gate_up[:, 1]
        y = ((gelu if cfg.gemma else silu)(gate) * up) @ layer.mlp.down
        x[t] += maybe_norm(y, layer.mlp_post_norm)
    return x if layer.scalar is None else x * layer.scalar


def random_layer(qk_norm, cfg=CFG):
    """Weights large enough for every part of the block to matter."""
    rng = np.random.default_rng(1)
    specs = layer_specs(cfg, qk_norm=qk_norm)
    return jax.tree.map(lambda s: jnp.float32(rng.normal(size=s.shape) * 0.6), specs)


@pytest.mark.parametrize(
    ("cfg", "qk_norm"),
    [(CFG, True), (CFG, False), (GEMMA4, True), (KEY_IS_VALUE, True)],
    ids=["qwen3", "llama", "gemma4", "gemma4-key-is-value"],
)
def test_block(cfg, qk_norm):
    layer = random_layer(qk_norm, cfg)
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    angles = rope_angles(jnp.arange(5)[None], cfg.rope, H)
    attend = functools.partial(causal_attention, scale=cfg.score_scale)
    found = jax.jit(lambda x: block(layer, x, angles, cfg, attend))(x)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), layer)
    for b in range(2):
        expected = reference(wide, x[b].astype(np.float64), cfg)
        np.testing.assert_allclose(found[b], expected, atol=2e-4)


def test_the_scalar_of_a_layer_has_no_gradient():
    layer = random_layer(True, GEMMA4)
    x, angles = jnp.ones((1, 2, 12)), rope_angles(jnp.arange(2)[None], GEMMA4.rope, H)

    def total(layer):
        return (block(layer, x, angles, GEMMA4, causal_attention) ** 2).sum()

    grads = jax.jit(jax.grad(total))(layer)
    assert grads.scalar == 0
    assert np.abs(grads.mlp_post_norm).min() > 0


def test_specs_without_head_norms():
    specs = layer_specs(CFG, qk_norm=False)
    assert specs.q_norm is None
    assert specs.k_norm is None
    assert specs.qkv.shape == (12, 2, 5, 4)
    assert specs.out.shape == (24, 12)
