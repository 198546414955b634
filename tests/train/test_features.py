"""Steps on stored states do what steps on computed ones do."""

import dataclasses

import jax
import numpy as np
import pytest

from dspark_jax import sharding
from dspark_jax.losses import LossConfig
from dspark_jax.targets import dense
from train.features import make_states
from train.settings import DrafterSettings, OptimizerSettings
from train.step import Batch, StepConfig, draw_anchors, init_state, make_step, make_sums

B, S, TAPS = 8, 24, (2, -1)

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def cfg(small_config) -> StepConfig:
    drafter = DrafterSettings(
        num_layers=1, block_size=3, markov_rank=4, target_layer_ids=TAPS, num_anchors=6
    )
    return StepConfig(
        small_config,
        drafter.config(small_config),
        LossConfig(),
        OptimizerSettings(steps=10, learning_rate=1e-2),
        anchor_chunk=12,
        documents_per_row=2,
    )


@pytest.fixture(scope="module")
def ends(target):
    """The target as it is without its layers."""
    return target.replace(layers=())


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    mask = np.ones((B, S), bool)
    mask[0, 10:] = mask[5] = False
    segments = np.ones((B, S), np.int32)
    segments[1, 9:] = segments[6, 20:] = 2
    return Batch(rng.integers(0, 264, (B, S)).astype(np.int32), mask, segments)


@pytest.fixture(scope="module")
def hidden(cfg, target, batch):
    mesh = sharding.make_mesh(1)
    states = make_states("online", cfg.target, TAPS, attention="reference", mesh=mesh)
    return jax.device_get(jax.jit(states)(target, batch.tokens, batch.segments, None))


def stored(cfg):
    return dataclasses.replace(cfg, features="stored")


def sums(cfg, target, batch, mesh=None):
    mesh = mesh or sharding.make_mesh(1)
    params = jax.jit(lambda: init_state(cfg).params)()

    def of(params, target, batch):
        anchors = draw_anchors(cfg, jax.random.key(3), batch)
        return make_sums(cfg, mesh)(params, target, batch, *anchors)

    batch = jax.device_put(batch, sharding.batch(mesh))
    return jax.device_get(jax.jit(of)(params, target, batch))


@pytest.fixture(scope="module")
def online_sums(cfg, target, batch):
    return sums(cfg, target, batch)


def test_online_states_are_those_of_each_document_alone(cfg, target, batch, hidden):
    """Of rows that two documents share, by a pass over each of them, with padding behind it."""
    documents = [(1, 0, 9), (1, 9, S), (6, 0, 20), (6, 20, S), (2, 0, S)]
    tokens = np.zeros((len(documents), S), np.int32)
    for place, (row, first, last) in enumerate(documents):
        tokens[place, : last - first] = batch.tokens[row, first:last]
    alone = jax.jit(lambda tokens: dense.forward(target, tokens, cfg=cfg.target))(tokens)
    for place, (row, first, last) in enumerate(documents):
        expected = alone.final[place, : last - first]
        np.testing.assert_allclose(hidden.final[row, first:last], expected, atol=2e-5)
    assert hidden.features.shape == (B, S, 2 * cfg.target.hidden_size)
    np.testing.assert_array_equal(
        hidden.features[..., cfg.target.hidden_size :], target.embed[batch.tokens]
    )


def test_stored_states_are_taken_as_they_are_in_the_targets_dtype(cfg, ends, batch, hidden):
    mesh = sharding.make_mesh(1)
    states = make_states("stored", cfg.target, TAPS, attention="reference", mesh=mesh)
    low = jax.tree.map(lambda x: x.astype("bfloat16"), hidden)
    found = states(ends, batch.tokens, batch.segments, low)
    assert found.final.dtype == found.features.dtype == np.float32
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), found, low)


def assert_close(found, expected, rtol):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), found, expected
    )


def test_the_losses_are_those_of_computed_states(cfg, ends, batch, hidden, online_sums):
    assert online_sums.weight > 10
    assert_close(sums(stored(cfg), ends, batch.replace(hidden=hidden)), online_sums, 1e-5)


def test_bfloat16_states_change_the_losses_by_less_than_their_own_rounding(
    cfg, ends, batch, hidden, online_sums
):
    """Eight significant bits: a state is off by 1 part in 512 at most, and most errors cancel."""
    low = jax.tree.map(lambda x: x.astype("bfloat16"), hidden)
    found = sums(stored(cfg), ends, batch.replace(hidden=low))
    for name in ("ce", "tv", "bce"):
        np.testing.assert_allclose(getattr(found, name), getattr(online_sums, name), rtol=1 / 512)
    assert found.tv != online_sums.tv


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives(cfg, ends, batch, hidden, online_sums):
    mesh = sharding.make_mesh(data_parallel=2, fsdp=2, tensor_parallel=2)
    places = sharding.parameters(dense.specs(cfg.target).replace(layers=()), mesh)
    found = sums(stored(cfg), jax.device_put(ends, places), batch.replace(hidden=hidden), mesh)
    assert_close(found, online_sums, 1e-4)


@pytest.mark.slow
def test_steps_in_parts_learn_the_same(cfg, target, ends, batch, hidden):
    """The update of a step in two parts, each with its part of the states."""
    mesh, in_parts = sharding.make_mesh(1), dataclasses.replace(stored(cfg), microbatches=2)
    init = jax.jit(lambda: init_state(cfg))
    _, online = jax.device_get(make_step(cfg, mesh)(init(), target, batch))
    with_states = batch.replace(hidden=hidden)
    _, parts = jax.device_get(make_step(in_parts, mesh)(init(), ends, with_states))
    np.testing.assert_allclose(parts.loss, online.loss, rtol=1e-5)
    np.testing.assert_allclose(parts.grad_norm, online.grad_norm, rtol=1e-4)
