"""Appending to caches: at each row's own position, nothing else touched, nothing copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.kv_cache import KVCache

R, G, S, H, T = 3, 2, 10, 4, 3


@pytest.fixture
def cache():
    k, v = np.random.default_rng(0).normal(size=(2, R, G, S, H)).astype(np.float32)
    return KVCache(jnp.asarray(k), jnp.asarray(v))


@pytest.fixture
def new():
    return np.random.default_rng(1).normal(size=(2, R, T, G, H)).astype(np.float32)


def test_create():
    caches = kv_cache.create(2, (R, G, S, H), jnp.bfloat16)
    assert len(caches) == 2
    for one in caches:
        assert one.length == S
        assert one.k.shape == one.v.shape == (R, G, S, H)
        assert one.k.dtype == one.v.dtype == jnp.bfloat16
        assert not one.k.any()
    assert caches[0].k is not caches[0].v  # donated separately


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_append(cache, new, transform):
    start = np.array([0, 7, 4])
    found = transform(kv_cache.append)(cache, *new, start)
    k, v = np.array(cache.k), np.array(cache.v)
    for r, t in np.ndindex(R, T):
        k[r, :, start[r] + t], v[r, :, start[r] + t] = new[0, r, t], new[1, r, t]
    np.testing.assert_array_equal(found.k, k)
    np.testing.assert_array_equal(found.v, v)


def test_roll_back_is_an_append_further_back(cache, new):
    start = np.array([2, 0, 5])
    drafted = kv_cache.append(cache, new[0] + 9, new[1] + 9, start)
    again = kv_cache.append(drafted, *new, start)
    once = kv_cache.append(cache, *new, start)
    jax.tree.map(np.testing.assert_array_equal, again, once)


def test_append_casts_to_the_cache(new):
    (cache,) = kv_cache.create(1, (R, G, S, H), jnp.bfloat16)
    found = kv_cache.append(cache, *new, np.zeros(R, int))
    assert found.k.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.k[:, :, :T], new[0].swapaxes(1, 2).astype(jnp.bfloat16))


def test_a_donated_cache_is_written_in_place(cache, new):
    append = jax.jit(kv_cache.append, donate_argnums=0)
    memory = append.lower(cache, *new, np.zeros(R, int)).compile().memory_analysis()
    one = cache.k.nbytes
    assert memory.alias_size_in_bytes >= 2 * one
    assert memory.temp_size_in_bytes < one
