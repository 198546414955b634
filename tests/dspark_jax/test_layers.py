"""Norm, RoPE, MLP and argmax against tables worked out by hand and loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Rope, TransformerConfig
from dspark_jax.layers import Mlp, apply_rope, argmax, mlp, rms_norm, rope_angles


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_rms_norm(transform):
    x = jnp.array([[3.0, 4.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]])
    weight = jnp.array([1.0, 2.0, 3.0, 4.0])
    # Root mean squares: sqrt(25 / 4) = 2.5, and 1. The weight multiplies as it is, not as 1 + w.
    expected = [[1.2, 3.2, 0.0, 0.0], [1.0, -2.0, 3.0, -4.0]]
    found = transform(lambda x, w: rms_norm(x, w, 0.0))(x, weight)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rms_norm_eps():
    np.testing.assert_array_equal(rms_norm(jnp.zeros(4), jnp.ones(4), 1e-6), np.zeros(4))
    # mean square 1e-6 + eps 3e-6: divided by 2e-3
    found = rms_norm(jnp.full(4, 1e-3), jnp.ones(4), 3e-6)
    np.testing.assert_allclose(found, np.full(4, 0.5), rtol=1e-6)


def test_rms_norm_statistics_are_float32():
    x = jnp.full(4096, 300.0, jnp.float16)  # its squares overflow float16
    found = rms_norm(x, jnp.ones(4096, jnp.float16), 1e-6)
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found.astype(np.float32), 1.0, rtol=1e-3)


def test_rope_by_hand():
    # theta 100, H = 4: frequencies 1 and 0.1; pairs are (x0, x2) and (x1, x3).
    angles = rope_angles(jnp.array([0, 2]), Rope(theta=100.0), 4)
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]] * 2)
    c, s = np.cos([2.0, 0.2]), np.sin([2.0, 0.2])
    turned = [1 * c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + 1 * s[0], 4 * c[1] + 2 * s[1]]
    np.testing.assert_allclose(apply_rope(x, angles), [[1, 2, 3, 4], turned], rtol=1e-5)


def test_rope_llama3_by_hand():
    rope = Rope(100.0, "llama3", 2.0, 1.0, 4.0, original_max_position=10)
    # Frequencies 1 (1.59 turns, between) and 0.1 (0.159 turns, halved).
    smooth = (10 / (2 * np.pi) - 1) / 3
    first = (1 - smooth) * 0.5 + smooth
    angles = rope_angles(jnp.array(3), rope, 4)
    np.testing.assert_allclose(angles.cos, np.cos([3 * first, 3 * 0.05]), rtol=1e-6)
    np.testing.assert_allclose(angles.sin, np.sin([3 * first, 3 * 0.05]), rtol=1e-5)


def test_rope_of_many_heads_and_relative_positions():
    key = jax.random.key(0)
    q, k = jax.random.normal(key, (2, 5, 2, 3, 8))
    near = rope_angles(jnp.arange(5), Rope(), 8)
    far = rope_angles(jnp.arange(5) + 1000, Rope(), 8)
    for head in np.ndindex(2, 3):
        alone = apply_rope(q[:, *head], near)
        np.testing.assert_allclose(apply_rope(q, near)[:, *head], alone, rtol=1e-6)

    def scores(angles):
        return jnp.einsum("tgmh,sgmh->gmts", apply_rope(q, angles), apply_rope(k, angles))

    np.testing.assert_allclose(scores(near), scores(far), atol=2e-3)


def test_rope_keeps_the_dtype():
    x = jnp.ones((3, 8), jnp.bfloat16)
    assert apply_rope(x, rope_angles(jnp.arange(3), Rope(), 8)).dtype == jnp.bfloat16


def test_mlp_by_hand():
    # D = 2, F = 1: gate x0, up x0 + x1, down (1, -2).
    params = Mlp(gate_up=jnp.array([[[1.0], [1.0]], [[0.0], [1.0]]]), down=jnp.array([[1.0, -2.0]]))
    x = jnp.array([[1.0, 2.0], [-1.0, 3.0]])
    silu = [1 / (1 + np.exp(-1)), -1 / (1 + np.exp(1))]
    expected = [[3 * silu[0], -6 * silu[0]], [2 * silu[1], -4 * silu[1]]]
    np.testing.assert_allclose(mlp(params, x), expected, rtol=1e-6)


def test_mlp_specs():
    cfg = TransformerConfig(32, 16, 24, 1, 4, 2, 4)
    specs = Mlp.specs(cfg)
    assert (specs.gate_up.shape, specs.down.shape) == ((16, 2, 24), (24, 16))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_argmax(transform):
    inf, nan = np.inf, np.nan
    rows = [
        ([1.0, 3.0, 2.0], 1),
        ([5.0, 5.0, 5.0], 0),  # the first among equals
        ([0.0, 7.0, 7.0], 1),
        ([-inf, -inf, -1.0], 2),
        ([-inf, -inf, -inf], 0),
        ([1.0, inf, 0.0], 1),
        ([-0.0, 0.0, -1.0], 0),
    ]
    values = jnp.array([row for row, _ in rows])
    found = transform(argmax)(values)
    assert found.dtype == jnp.int32
    assert found.tolist() == [index for _, index in rows]
    assert int(transform(argmax)(jnp.full(3, nan))) in range(3)  # nothing is right; stay inside


def test_argmax_agrees_with_numpy():
    values = jax.random.randint(jax.random.key(0), (50, 7, 40), 0, 12)
    np.testing.assert_array_equal(argmax(values), np.argmax(values, axis=-1))
