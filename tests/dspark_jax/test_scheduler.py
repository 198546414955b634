"""Verified lengths against a loop over each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduler import schedule


def loop(confidence, policy, threshold, active):
    lengths = []
    for row, is_active in zip(confidence, active, strict=True):
        length = 0
        if is_active and policy == "fixed":
            length = len(row)
        if is_active and policy == "threshold":
            while length < len(row) and row[length] >= np.float32(threshold):
                length += 1
        lengths.append(length)
    return lengths


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("policy", ["none", "fixed", "threshold"])
def test_lengths_are_those_of_a_loop(policy, jit):
    rng = np.random.default_rng(0)
    confidence = rng.random((40, 5)).astype(np.float32)
    active = rng.random(40) < 0.7
    run = jax.jit(schedule, static_argnames=("policy", "threshold")) if jit else schedule
    for threshold in (0.0, 0.3, 0.7, 1.0):
        lengths = run(confidence, policy=policy, active=active, threshold=threshold)
        assert lengths.dtype == jnp.int32
        expected = loop(confidence, policy, threshold, active)
        np.testing.assert_array_equal(lengths, expected)
        if policy == "threshold" and threshold == 0.3:
            assert set(expected) == {0, 1, 2, 3, 4, 5}


def test_threshold_takes_equality_and_stops_at_the_first_below():
    confidence = jnp.array([[0.5, 0.5, 0.5], [0.5, 0.4, 0.9], [0.4, 0.9, 0.9], [1.0, 1.0, 0.0]])
    lengths = schedule(confidence, policy="threshold", threshold=0.5)
    np.testing.assert_array_equal(lengths, [3, 1, 0, 2])


def test_without_active_all_rows_count():
    confidence = jnp.zeros((3, 4))
    np.testing.assert_array_equal(schedule(confidence, policy="fixed"), [4, 4, 4])
    np.testing.assert_array_equal(schedule(confidence, policy="none"), [0, 0, 0])


def test_no_drafts_no_lengths():
    np.testing.assert_array_equal(schedule(jnp.zeros((2, 0)), policy="none"), [0, 0])
