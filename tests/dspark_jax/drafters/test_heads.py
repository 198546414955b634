"""Sequential heads against NumPy, slot by slot, and stepping against teacher forcing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import params as parameters
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import heads

V, R, D, K = 11, 3, 5, 4
KINDS = ("vanilla", "gated", "rnn")


def config(head):
    return DrafterConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        block_size=K,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=2,
        head=head,
        markov_rank=0 if head == "none" else R,
        confidence_head=head != "none",
    )


def random_head(kind):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.float32(rng.normal(size=s.shape)), heads.specs(config(kind)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(kind, head, hidden, previous):
    """B [K, V] of one block, hidden [K, D]; weights by part, torch's order of inputs."""
    head = jax.tree.map(lambda a: np.asarray(a, np.float64), head)
    out, state = np.zeros((K, V)), np.zeros(R)
    for k in range(K):
        token = head.w1[previous[k]]
        if kind == "vanilla":
            code = token
        elif kind == "gated":
            inputs = np.concatenate([hidden[k], token])
            code = sigmoid(inputs @ head.gate + head.gate_bias) * token
        else:
            inputs = np.concatenate([state, token, hidden[k]])
            gate, candidate, output = np.split(inputs @ head.joint + head.joint_bias, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            code = np.tanh(output)
        out[k] = code @ head.w2
    return out


@pytest.fixture
def blocks():
    """Hidden states and tokens before the slots, of 2 x 3 blocks."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(2, 3, K, D)).astype(np.float32), rng.integers(0, V, (2, 3, K))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forced(kind, blocks, transform):
    head = random_head(kind)
    found = transform(heads.teacher_forced)(head, *blocks)
    assert found.shape == (2, 3, K, V)
    for b in np.ndindex(2, 3):
        expected = reference(kind, head, blocks[0][b], blocks[1][b])
        np.testing.assert_allclose(found[b], expected, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_stepping_equals_teacher_forcing(kind, blocks):
    head, (hidden, previous) = random_head(kind), blocks
    slots, state = head.prepare(hidden), heads.initial_state(head, hidden)
    assert state.shape == (2, 3, R)
    assert not state.any()
    found = []
    for k in range(K):
        state, code = head.step(state, previous[..., k], slots[..., k, :])
        found.append(code @ head.w2)
    expected = heads.teacher_forced(head, hidden, previous)
    np.testing.assert_allclose(np.stack(found, axis=2), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_depends_on_nothing_after_it(kind, blocks):
    head, (hidden, previous) = random_head(kind), blocks
    expected = heads.teacher_forced(head, hidden, previous)
    hidden, previous = hidden.copy(), previous.copy()
    hidden[..., 2:, :] += 1
    previous[..., 2:] = (previous[..., 2:] + 1) % V
    found = heads.teacher_forced(head, hidden, previous)
    np.testing.assert_array_equal(found[..., :2, :], expected[..., :2, :])
    assert np.abs(found[..., 2, :] - expected[..., 2, :]).max() > 0.1


@pytest.mark.parametrize(("kind", "carried"), [("vanilla", False), ("gated", False), ("rnn", True)])
def test_what_earlier_tokens_change(kind, carried, blocks):
    head, (hidden, previous) = random_head(kind), blocks
    changed = previous.copy()
    changed[..., 0] = (changed[..., 0] + 1) % V
    found = heads.teacher_forced(head, hidden, changed)
    difference = np.abs(found - heads.teacher_forced(head, hidden, previous)).max(axis=(0, 1, 3))
    assert difference[0] > 0.1
    assert ((difference[1:] > 1e-3) == carried).all()


def test_specs():
    assert heads.specs(config("none")) is None
    sizes = {"vanilla": 0, "gated": (D + R) * R + R, "rnn": (2 * R + D) * 3 * R + 3 * R}
    for kind, own in sizes.items():
        specs = heads.specs(config(kind))
        assert parameters.count(specs) == 2 * V * R + own
        values = parameters.init(jax.random.key(0), specs)
        assert type(values) is type(specs)


def test_initial_state_without_a_head():
    assert heads.initial_state(None, jnp.zeros((2, K, D))).shape == (2, 0)
