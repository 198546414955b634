"""Packing rows into a flat buffer and back, against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.flat import pack

R, T = 4, 3
TOKENS = np.arange(10, 10 + R * T).reshape(R, T)
START = np.array([5, 0, 7, 2])
COUNTS = [
    [1, 1, 1, 1],
    [1, 3, 2, 1],
    [0, 2, 0, 3],  # rows without a token
    [3, 0, 1, 0],
    [0, 0, 0, 0],
    [2, 3, 1, 2],  # no place to spare
]


def loop(counts):
    """(row, slot, token) of every token, in order."""
    return [(r, t, TOKENS[r, t]) for r in range(R) for t in range(counts[r])]


@pytest.fixture(params=["plain", "jit"])
def packed(request):
    return pack if request.param == "plain" else jitted


jitted = jax.jit(pack, static_argnums=3)


@pytest.mark.parametrize("counts", COUNTS)
def test_close_packed(packed, counts):
    expected = loop(counts)
    flat = packed(TOKENS, np.array(counts), START, 8)
    assert flat.tokens.shape == (8,)
    found = list(zip(*(x.tolist() for x in (flat.row, flat.slot, flat.tokens)), strict=True))
    assert found[: len(expected)] == expected
    for row, slot, _ in found[len(expected) :]:  # spare places stay inside the arrays
        assert 0 <= row < R
        assert 0 <= slot < T
    np.testing.assert_array_equal(flat.offset, np.cumsum([0, *counts])[:-1])
    positions = [START[r] + t for r, t, _ in expected]
    assert flat.positions.tolist()[: len(expected)] == positions


@pytest.mark.parametrize("counts", [*COUNTS, [3, 3, 3, 3]])
def test_aligned(packed, counts):
    flat = packed(TOKENS, np.array(counts), START, R * T)
    assert flat.offset.tolist() == [0, T, 2 * T, 3 * T]
    row, slot, tokens, positions = (
        x.tolist() for x in (flat.row, flat.slot, flat.tokens, flat.positions)
    )
    for r, t, token in loop(counts):
        place = r * T + t
        assert (row[place], slot[place], tokens[place]) == (r, t, token)
        assert positions[place] == START[r] + t


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("capacity", [R * T, 8])
@pytest.mark.parametrize("shape", [(), (2, 5)])
def test_values_to_rows_and_back(packed, counts, capacity, shape):
    flat = packed(TOKENS, np.array(counts), START, capacity)
    x = np.random.default_rng(0).normal(size=(capacity, *shape)).astype(np.float32)
    rows = np.asarray(flat.to_rows(jnp.asarray(x)))
    back = np.asarray(flat.to_flat(jnp.asarray(rows)))
    assert rows.shape == (R, T, *shape)
    assert back.shape == x.shape
    assert np.isfinite(rows).all()
    offset = flat.offset.tolist()
    for place, (r, t, _) in enumerate(loop(counts)):
        here = offset[r] + t
        assert here == (r * T + t if capacity == R * T else place)
        np.testing.assert_array_equal(rows[r, t], x[here])
        np.testing.assert_array_equal(back[here], x[here])


def test_to_flat_picks_each_token_from_its_row():
    flat = pack(TOKENS, np.array([1, 3, 2, 1]), START, 8)
    x = np.arange(R * T).reshape(R, T)
    assert flat.to_flat(jnp.asarray(x))[:7].tolist() == [0, 3, 4, 5, 6, 7, 9]


def test_row_positions():
    flat = pack(TOKENS, np.array([1, 3, 2, 1]), START, 8)
    assert flat.row_positions.tolist() == [[5, 6, 7], [0, 1, 2], [7, 8, 9], [2, 3, 4]]


def test_width_is_static():
    flat = pack(TOKENS, np.array([1, 3, 2, 1]), START, 8)
    assert len(jax.tree.leaves(flat)) == 6
    assert jax.jit(lambda f: f.to_rows(f.tokens))(flat).shape == (R, T)
