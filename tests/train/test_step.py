import dataclasses
import functools

import jax
import numpy as np
import pytest

from dspark_jax import losses, sharding
from dspark_jax.anchors import sample_anchors
from dspark_jax.drafters import dspark
from dspark_jax.losses import LossConfig
from dspark_jax.targets import dense
from train.optimizer import make_optimizer
from train.settings import DrafterSettings, OptimizerSettings
from train.step import Batch, StepConfig, init_state, make_step, state_shardings

B, S = 8, 24


@pytest.fixture(scope="module")
def cfg(small_config) -> StepConfig:
    drafter = DrafterSettings(
        num_layers=1, block_size=3, markov_rank=4, target_layer_ids=(0, 2), num_anchors=6
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
def batch() -> Batch:
    rng = np.random.default_rng(0)
    mask = np.ones((B, S), bool)
    mask[0, 10:] = mask[3, 4:] = mask[5] = False  # unequal counts on the devices
    segments = np.ones((B, S), np.int32)
    segments[1, 9:] = segments[6, 20:] = 2  # some rows are shared
    return Batch(rng.integers(0, 264, (B, S)).astype(np.int32), mask, segments)


@functools.cache
def compiled(cfg, mesh):
    """Shared by the tests: most of their time is compilation."""
    return make_step(cfg, mesh)


@functools.cache
def first_state(cfg):
    """On the host: steps take over the state that they are given."""
    return jax.device_get(jax.jit(lambda: init_state(cfg))())


def run(cfg, target, batch, *, steps=2, mesh=None):
    """State and report after some steps, on the host."""
    mesh = mesh or sharding.make_mesh(1)
    state = jax.device_put(first_state(cfg), state_shardings(cfg, mesh))
    places = sharding.parameters(dense.specs(cfg.target), mesh)
    target = jax.device_put(target, places)
    batch = jax.device_put(batch, sharding.batch(mesh))
    for _ in range(steps):
        state, report = compiled(cfg, mesh)(state, target, batch)
    assert state.params.fc.sharding == state_shardings(cfg, mesh).params.fc
    return jax.device_get((state, report))


@pytest.fixture(scope="module")
def plain(cfg, target, batch):
    return run(cfg, target, batch)


def assert_close(a, b, *, tolerance):
    """Parameters and sums; the moments follow from them."""
    for x, y in ((a[0].params, b[0].params), (a[1].sums, b[1].sums)):
        jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-4, atol=tolerance), x, y)


def test_one_step_is_the_optimizer_on_the_loss(cfg, target, batch):
    """Written out: forward, anchors of the step's key, mean loss, AdamW."""
    state = first_state(cfg)
    forward = jax.jit(
        lambda *x: dense.forward(target, *x, cfg=cfg.target, taps=cfg.drafter.target_layer_ids)
    )
    hidden = forward(batch.tokens, batch.segments)
    drawn = sample_anchors(
        jax.random.fold_in(jax.random.key(cfg.seed), 0), batch.loss_mask, cfg.drafter.num_anchors,
        batch.segments, documents=2,
    )  # fmt: skip

    def loss(params):
        return losses.drafter_loss(
            params, target, hidden.features, hidden.final, batch.tokens, batch.loss_mask, *drawn,
            batch.segments, cfg=cfg.drafter, loss=cfg.loss, chunk=12,
        )  # fmt: skip

    (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state.params)
    updates, _ = make_optimizer(cfg.optimizer, dspark.specs(cfg.drafter)).update(
        grads, state.opt_state, state.params
    )
    expected = jax.tree.map(lambda p, u: p + u, state.params, updates)
    after, report = run(cfg, target, batch, steps=1)
    assert after.step == 1
    sums = report.sums
    np.testing.assert_allclose(losses.objective(sums, cfg.loss) / sums.weight, value, rtol=1e-5)
    # Adam's first update is a sign: where a gradient is rounding alone, it may be either.
    same = jax.tree.map(lambda a, b: np.isclose(a, b, atol=1e-5).mean(), after.params, expected)
    assert min(jax.tree.leaves(same)) > 0.97


@pytest.mark.parametrize(
    ("sizes", "chunk"), [((1, 8, 1), 12), pytest.param((2, 2, 2), 4, marks=pytest.mark.slow)]
)
def test_a_mesh_gives_what_one_device_gives(cfg, target, batch, plain, sizes, chunk):
    """In one chunk of anchors, and in several: some rows have no anchors in the last of them."""
    data, fsdp, tensor = sizes
    mesh = sharding.make_mesh(data_parallel=data, fsdp=fsdp, tensor_parallel=tensor)
    cfg = dataclasses.replace(cfg, anchor_chunk=chunk)
    assert_close(run(cfg, target, batch, mesh=mesh), plain, tolerance=1e-4)


def test_microbatches_give_what_the_whole_batch_gives(cfg, target, batch, plain):
    found = run(dataclasses.replace(cfg, microbatches=4), target, batch)
    assert_close(found, plain, tolerance=1e-4)


def test_stacked_layers_of_the_target_give_the_same(cfg, target, batch, plain):
    mesh = sharding.make_mesh(1)
    state = jax.device_put(first_state(cfg), state_shardings(cfg, mesh))
    stacked = dense.stack_layers(target, cfg.target)
    for _ in range(2):
        state, report = compiled(cfg, mesh)(state, stacked, batch)
    assert_close(jax.device_get((state, report)), plain, tolerance=1e-4)


def test_training_lowers_the_loss_and_leaves_the_target(cfg, target, batch):
    before = jax.tree.map(np.array, target)
    losses_at = [
        float(losses.objective(r.sums, cfg.loss) / r.sums.weight)
        for r in (run(cfg, target, batch, steps=n)[1] for n in (1, 10))
    ]
    assert losses_at[1] < 0.9 * losses_at[0]
    jax.tree.map(np.testing.assert_array_equal, target, before)


def test_a_batch_without_anchors_changes_nothing(cfg, target, batch):
    empty = batch.replace(loss_mask=np.zeros((B, S), bool))
    state, report = run(cfg, target, empty, steps=1)
    jax.tree.map(np.testing.assert_array_equal, state.params, first_state(cfg).params)
    assert report.grad_norm == 0


def poisoned(target):
    """A target whose token 7 has an embedding that is not a number."""
    return target.replace(embed=target.embed.at[7].set(np.nan))


def test_a_step_that_is_not_finite_changes_the_counters_alone(cfg, target, batch):
    good = batch.replace(tokens=np.where(batch.tokens == 7, 8, batch.tokens))
    bad = batch.replace(tokens=np.where(np.arange(S) == 3, 7, good.tokens))
    before = run(cfg, poisoned(target), good, steps=1)[0]
    mesh = sharding.make_mesh(1)
    state, report = compiled(cfg, mesh)(
        jax.device_put(before, state_shardings(cfg, mesh)), poisoned(target), bad
    )
    state, report = jax.device_get((state, report))
    for name in ("params", "opt_state"):
        after = getattr(state, name)
        jax.tree.map(np.testing.assert_array_equal, after, getattr(before, name))
    assert (state.step, state.guard.taken, state.guard.skipped) == (2, 1, 1)
    assert report.skipped_in_a_row == 1
    assert np.isnan(report.loss)
    assert all(np.all(x == 0) for x in jax.tree.leaves(report.sums))
    # The schedule counts the steps that were taken.
    after = compiled(cfg, mesh)(jax.device_put(state, state_shardings(cfg, mesh)), target, good)
    assert after[1].learning_rate == run(cfg, target, good, steps=2)[1].learning_rate


@pytest.mark.slow
def test_a_bfloat16_target_keeps_float32_masters(cfg, target, batch):
    """The pass runs in the dtype of the target."""
    target = jax.tree.map(lambda x: x.astype("bfloat16"), target)
    state, report = run(cfg, target, batch, steps=1)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    wide = jax.tree.map(lambda x: x.astype("float32"), target)
    expected = run(cfg, wide, batch, steps=1)[1].sums
    np.testing.assert_allclose(report.sums.ce, expected.ce, rtol=0.02)
    assert report.sums.ce != expected.ce
