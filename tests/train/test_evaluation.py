import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dspark_jax import losses, sharding
from dspark_jax import params as parameters
from dspark_jax.drafters import dspark
from dspark_jax.io.tokenizer import load_tokenizer
from dspark_jax.losses import LossConfig
from dspark_jax.targets import dense
from train import evaluation
from train.evaluation import HeldOut, decode, prompts
from train.settings import DrafterSettings, OptimizerSettings
from train.step import Batch, StepConfig, draw_anchors, make_sums

B, S, K = 4, 24, 3

pytestmark = pytest.mark.usefixtures("quick_compile")

ONE = sharding.make_mesh(1)


@pytest.fixture(scope="module")
def cfg(small_config) -> StepConfig:
    drafter = DrafterSettings(
        num_layers=1, block_size=K, markov_rank=4, target_layer_ids=(0, 2), num_anchors=6
    )
    return StepConfig(
        small_config, drafter.config(small_config), LossConfig(), OptimizerSettings(), seed=5
    )


@pytest.fixture(scope="module")
def models(cfg):
    specs = dspark.specs(cfg.drafter), dense.specs(cfg.target)
    return jax.jit(lambda: tuple(parameters.init(jax.random.key(1), s) for s in specs))()


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    mask = np.ones((B, S), bool)
    mask[0, :7] = mask[1, 15:] = mask[2, :3] = False
    return Batch(rng.integers(4, 264, (B, S)).astype(np.int32), mask)


def test_held_out_rows_are_summed_over_batches(cfg, models):
    params, target = models
    mesh = sharding.make_mesh(4, tensor_parallel=2)
    batches = [batch(0), batch(1)]
    held_out = HeldOut(cfg, mesh, batches)
    found = held_out.metrics(params, target)
    sums_of = jax.jit(make_sums(cfg, mesh))
    total = losses.Sums.zeros(K)
    for i, rows in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(5), i)
        total = losses.add(total, sums_of(params, target, rows, *draw_anchors(cfg, key, rows)))
    expected = losses.metrics(total, cfg.drafter, cfg.loss)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    length = 1 + sum(found[f"survival_{k}"] for k in (1, 2, 3))
    np.testing.assert_allclose(found["expected_accepted_length"], length, rtol=1e-6)
    assert 0 < found["confidence_ece"] < 1
    assert held_out.metrics(params, target) == found  # the same anchors again


def test_prompts_end_where_answers_begin():
    rows = batch(0)
    found = prompts([rows, rows], 5)
    lengths = [7, 7, 3, 12, 7]  # the second is learnt up to 15, the fourth as a whole
    assert [len(p) for p in found] == lengths
    assert found[2] == rows.tokens[2, :3].tolist()


def test_prompts_are_of_one_document():
    rows = batch(0)
    segments = np.ones((B, S), np.int32)
    segments[0, 12:] = segments[3, 5:] = 2
    lengths = [len(p) for p in prompts([rows.replace(segments=segments)], 4)]
    assert lengths == [7, 7, 3, 2]


def test_decoding_is_like_that_of_the_library(cfg, models, small_target):
    params, target = models
    tokenizer = load_tokenizer(small_target)
    starts = prompts([batch(0)], 2)
    found = decode(cfg, ONE, params, target, tokenizer, starts, tokens=20)
    assert 1 <= found["decoding_accepted_length"] <= K + 1
    assert found["decoding_rounds"] >= 2 * 20 / (K + 1) - 2
    target = dense.stack_layers(target, cfg.target)
    stacked = decode(cfg, ONE, params, target, tokenizer, starts, tokens=20)
    assert stacked == found


@pytest.mark.parametrize(("rounds", "length"), [([[3, 1], [2]], 2.0), ([[], []], np.nan)])
def test_accepted_length_is_over_the_rounds_of_all_prompts(
    cfg, models, small_target, monkeypatch, rounds, length
):
    given = []

    def generate(pair, requests, **settings):
        given.append(pair.models)
        return [SimpleNamespace(full_rounds=r) for r in rounds]

    monkeypatch.setattr(evaluation.generation, "generate", generate)
    params, target = models
    bare = dataclasses.replace(cfg, target=dataclasses.replace(cfg.target, stop_token_ids=()))
    low = jax.tree.map(lambda x: x.astype("bfloat16"), target)
    found = decode(bare, ONE, params, low, load_tokenizer(small_target), [[5], [6]], tokens=4)
    np.testing.assert_equal(found["decoding_accepted_length"], length)
    assert found["decoding_rounds"] == sum(map(len, rounds))
    assert given[0].target_config.stop_token_ids == (2,)  # the tokenizer's
    assert {x.dtype for x in jax.tree.leaves(given[0].drafter)} == {np.dtype("bfloat16")}
