import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.config import InputError
from dspark_jax.params import init, spec
from train.optimizer import learning_rate, make_optimizer
from train.settings import OptimizerSettings


def test_learning_rate_by_hand():
    settings = OptimizerSettings(steps=10, learning_rate=2.0, warmup_fraction=0.4)
    found = [float(learning_rate(settings, step)) for step in range(11)]
    falling = [1 + math.cos(math.pi * i / 6) for i in range(7)]
    np.testing.assert_allclose(found, [0.5, 1.0, 1.5, 2.0, *falling], atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.5, 0.99])
def test_learning_rate_never_exceeds_its_peak(steps, warmup):
    settings = OptimizerSettings(steps=steps, learning_rate=6e-4, warmup_fraction=warmup)
    rates = np.array(jax.vmap(lambda s: learning_rate(settings, s))(jnp.arange(steps)))
    assert rates.max() <= np.float32(6e-4)
    assert np.isclose(rates.max(), 6e-4)
    top = rates.argmax()
    assert (np.diff(rates[: top + 1]) >= 0).all()
    assert (np.diff(rates[top:]) <= 0).all()
    assert rates.min() > 0  # no update is wasted
    assert np.isclose(learning_rate(settings, steps), 0, atol=1e-10)


def test_first_updates_by_hand():
    """AdamW: the first update is the sign of the gradient times the rate, less the decay."""
    settings = OptimizerSettings(
        steps=100, learning_rate=0.1, warmup_fraction=0.0, weight_decay=0.5, clip_norm=1.0
    )
    optimizer = make_optimizer(settings, None)
    params = {"w": jnp.array([2.0, -4.0])}
    updates, _ = optimizer.update({"w": jnp.array([30.0, -40.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1 - 0.1, 0.1 + 0.2], rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_what_is_frozen_stays_in_spite_of_weight_decay(algorithm):
    settings = OptimizerSettings(
        algorithm=algorithm, learning_rate=0.1, warmup_fraction=0.0, weight_decay=0.5
    )
    specs = {"w": spec((2, 2), (None, None)), "scalar": spec((), (), frozen=True)}
    optimizer, params = make_optimizer(settings, specs), init(jax.random.key(0), specs)
    grads = {"w": jnp.ones((2, 2)), "scalar": jnp.zeros(())}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert updates["scalar"] == 0
    assert np.abs(updates["w"]).min() > 0


def test_gradients_are_clipped_by_global_norm():
    settings = OptimizerSettings(clip_norm=1.0, warmup_fraction=0.0)
    optimizer = make_optimizer(settings, None)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    state = optimizer.init(params)
    _, state = optimizer.update({"a": jnp.array([30.0]), "b": jnp.array([40.0])}, state, params)
    mean = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose([mean["a"][0], mean["b"][0]], [0.06, 0.08], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": 0}, "steps=0"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"warmup_fraction": 1.0}, "warmup_fraction"),
        ({"warmup_fraction": -0.1}, "warmup_fraction"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"beta2": 1.0}, "beta2"),
    ],
)
def test_impossible_settings(settings, named):
    with pytest.raises(InputError, match=named):
        OptimizerSettings(**settings)
