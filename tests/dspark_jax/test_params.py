"""Specs give initial, abstract and counted parameters of one structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import params
from dspark_jax.params import ParamSpec, spec

SPECS = {
    "a": spec((64, 32), ("embed", None)),
    "b": (spec((64, 32), ("embed", None)), spec((5,), (None,), jax.nn.initializers.ones)),
    "c": spec((), (), jax.nn.initializers.zeros),
    "none": None,
}


def test_init():
    values = params.init(jax.random.key(0), SPECS)
    assert jax.tree.structure(values) == jax.tree.structure(SPECS)
    assert values["a"].shape == (64, 32)
    assert float(values["a"].std()) == pytest.approx(0.02, rel=0.05)
    np.testing.assert_array_equal(values["b"][1], np.ones(5))
    assert values["c"] == 0
    assert not np.array_equal(values["a"], values["b"][0])  # a key of its own each
    again = params.init(jax.random.key(0), SPECS)
    jax.tree.map(np.testing.assert_array_equal, values, again)


def test_dtype():
    values = params.init(jax.random.key(0), SPECS, jnp.bfloat16)
    shapes = params.abstract(SPECS, jnp.bfloat16)
    for value, shape in zip(jax.tree.leaves(values), jax.tree.leaves(shapes), strict=True):
        assert (value.shape, value.dtype) == (shape.shape, shape.dtype)
        assert value.dtype == jnp.bfloat16


def test_count():
    expected = 2 * 64 * 32 + 5 + 1
    assert params.count(SPECS) == expected
    assert params.count(params.init(jax.random.key(0), SPECS)) == expected


def test_an_axis_name_for_each_dimension():
    with pytest.raises(ValueError, match="axis names"):
        ParamSpec((2, 3), ("embed",), jax.nn.initializers.ones)
