"""Confidence logits by hand, with and without the Markov embedding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import confidence
from dspark_jax.drafters.confidence import Confidence
from dspark_jax.drafters.heads import Markov

CFG = DrafterConfig(
    vocab_size=3,
    hidden_size=2,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    block_size=2,
    mask_token_id=0,
    target_layer_ids=(0,),
    num_target_layers=2,
    markov_rank=2,
)
HEAD = Markov(w1=jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0]]), w2=jnp.full((2, 3), jnp.nan))
HIDDEN = jnp.array([[[1.0, 2.0], [0.0, -1.0]]])
PREVIOUS = jnp.array([[2, 0]])


def test_specs():
    assert confidence.specs(CFG).weight.shape == (4,)
    alone = dataclasses.replace(CFG, confidence_with_markov=False)
    assert confidence.specs(alone).weight.shape == (2,)
    assert confidence.specs(dataclasses.replace(CFG, confidence_head=False)) is None


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_with_markov(transform):
    params = Confidence(weight=jnp.array([1.0, 10.0, 100.0, 1000.0]), bias=jnp.array(0.5))
    # Slot 1: h = (1, 2), token 2 is (2, 3). Slot 2: h = (0, -1), token 0 is (1, 0).
    expected = [[1 + 20 + 200 + 3000 + 0.5, -10 + 100 + 0.5]]
    found = transform(confidence.logits)(params, HEAD, HIDDEN, PREVIOUS)
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("head", [HEAD, None], ids=["head", "no head"])
def test_hidden_state_alone(head):
    params = Confidence(weight=jnp.array([1.0, 10.0]), bias=jnp.array(-0.5))
    found = confidence.logits(params, head, HIDDEN, PREVIOUS)
    np.testing.assert_allclose(found, [[20.5, -10.5]])


def test_logits_are_float32():
    low = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16),
        (Confidence(jnp.ones(4), jnp.array(0.0)), HEAD, HIDDEN),
    )
    assert confidence.logits(*low, PREVIOUS).dtype == jnp.float32
