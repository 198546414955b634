"""All implementations, on one device and on a mesh, against a loop over positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from dspark_jax import self_attention, sharding
from dspark_jax.config import InputError
from dspark_jax.self_attention import make_self_attention

B, S, G, M, H = 4, 256, 2, 2, 32

SEGMENTS = np.repeat([[0] * 256, [0, 1] * 128, [3] * 200 + [1] * 56, [2] * 256], 1, axis=0)
SEGMENTS[1] = np.sort(SEGMENTS[1])


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(0)
    shapes = (B, S, G, M, H), (B, S, G, H), (B, S, G, H)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def by_loop(q, k, v, segments, scale=H**-0.5, window=S):
    out = np.zeros_like(q)
    for b, s, g in np.ndindex(B, S, G):
        near = range(max(0, s + 1 - window), s + 1)
        seen = [t for t in near if segments is None or segments[b, t] == segments[b, s]]
        scores = q[b, s, g] @ k[b, seen, g].T * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b, s, g] = weights / weights.sum(-1, keepdims=True) @ v[b, seen, g]
    return out


@pytest.fixture(scope="module", params=[None, SEGMENTS], ids=["rows", "documents"])
def case(request, qkv):
    return request.param, by_loop(*qkv, request.param)


@pytest.mark.parametrize("kind", ["reference", "dot_product", "splash"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (2, 1, 4)])
def test_each_position_sees_what_is_before_it_in_its_document(qkv, case, kind, sizes):
    """On the last mesh the heads are too few to be split."""
    segments, expected = case
    mesh = sharding.make_mesh(
        int(np.prod(sizes)), data_parallel=sizes[0], fsdp=sizes[1], tensor_parallel=sizes[2]
    )
    attend = jax.jit(make_self_attention(kind, mesh, interpret=True))
    np.testing.assert_allclose(attend(*qkv, segments), expected, atol=2e-6)


@pytest.mark.parametrize("kind", ["reference", "dot_product", "splash"])
def test_a_window_and_a_scale(qkv, kind):
    mesh = sharding.make_mesh(2, tensor_parallel=2, fsdp=1)
    attend = make_self_attention(kind, mesh, interpret=True)
    found = jax.jit(lambda *x: attend(*x, scale=0.3, window=37))(*qkv, SEGMENTS)
    np.testing.assert_allclose(found, by_loop(*qkv, SEGMENTS, 0.3, 37), atol=2e-6)


def test_splash_lowers_for_tpus_under_shard_map():
    mesh = AbstractMesh((4, 1, 4), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    shapes = (4, 4096, 8, 4, 128), (4, 4096, 8, 128), (4, 4096, 8, 128)
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    segments = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
    traced = jax.jit(make_self_attention("splash", mesh)).trace(*inputs, segments)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    # A device's part: one row, two of the eight key/value heads.
    assert "tensor<1x8x4096x128xbf16>" in text
    assert "x4096x4096x" not in text


@pytest.mark.parametrize(
    ("length", "platform", "said"),
    [
        (256, "cpu", "attention='splash': expected TPUs, these devices: cpu"),
        (200, "tpu", "max_length=200: expected a multiple of 128"),
    ],
)
def test_where_splash_cannot_run(length, platform, said):
    with pytest.raises(InputError, match=said):
        self_attention.check("splash", length, platform)
    self_attention.check("reference", length, platform)
    self_attention.check("splash", 4096, "tpu")
