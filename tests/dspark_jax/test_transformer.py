"""The block against NumPy, one token and one head at a time."""

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


def head_norm(x, weight):
    return x if weight is None else norm(x, weight)


def reference(layer, x):
    """The block on x [S, D], causal."""
    normed = [norm(row, layer.attn_norm) for row in x]
    out = np.zeros_like(x)
    for t, g, m in np.ndindex(len(x), G, M):
        q = rotate(head_norm(normed[t] @ layer.qkv[:, g, m], layer.q_norm), t)
        seen = range(t + 1)
        keys = [rotate(head_norm(normed[s] @ layer.qkv[:, g, M], layer.k_norm), s) for s in seen]
        scores = np.array([q @ k for k in keys]) / np.sqrt(H)
        weights = np.exp(scores) / np.exp(scores).sum()
        value = sum(w * (normed[s] @ layer.qkv[:, g, M + 1]) for s, w in enumerate(weights))
        first = (g * M + m) * H
        out[t] += value @ layer.out[first : first + H]
    x = x + out
    for t in range(len(x)):
        h = norm(x[t], layer.mlp_norm)
        gate, up = h @ layer.mlp.gate_up[:, 0], h @ layer.mlp.gate_up[:, 1]
        x[t] += (gate / (1 + np.exp(-gate)) * up) @ layer.mlp.down
    return x


def random_layer(qk_norm):
    """Weights large enough for every part of the block to matter."""
    rng = np.random.default_rng(1)
    specs = layer_specs(CFG, qk_norm=qk_norm)
    return jax.tree.map(lambda s: jnp.float32(rng.normal(size=s.shape) * 0.6), specs)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_block(qk_norm):
    layer = random_layer(qk_norm)
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    angles = rope_angles(jnp.arange(5)[None], CFG.rope, H)
    found = jax.jit(lambda x: block(layer, x, angles, CFG, causal_attention))(x)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), layer)
    for b in range(2):
        np.testing.assert_allclose(found[b], reference(wide, x[b].astype(np.float64)), atol=2e-4)


def test_specs_without_head_norms():
    specs = layer_specs(CFG, qk_norm=False)
    assert specs.q_norm is None
    assert specs.k_norm is None
    assert specs.qkv.shape == (12, 2, 5, 4)
    assert specs.out.shape == (24, 12)
