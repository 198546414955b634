"""Sums by prompt, by hand and against loops."""

import numpy as np
import pytest

from dspark_jax.calibration import ECE_BINS, reliability
from infer.evaluation import counts
from tests.infer.evaluation.conftest import CONFIDENCES, ROUNDS, completion

MADE = [completion(ROUNDS, confidences=CONFIDENCES), completion([])]


def test_lengths_leave_out_the_round_that_was_cut():
    assert counts.lengths(MADE).tolist() == [[4, 2], [0, 0]]


def test_positions_end_at_the_first_rejection_and_at_the_cut():
    passed, tried = counts.positions(MADE, 3)[0]
    assert tried.tolist() == [3, 2, 1]
    assert passed.tolist() == [2, 2, 0]
    assert not counts.positions(MADE, 3)[1].any()


def test_verified():
    assert counts.verified(MADE, 3).tolist() == [[5, 9, 9], [0, 0, 0]]


def test_thresholds_cut_blocks_by_hand():
    """At .5 the first block loses its last draft; at .85 it alone keeps one; at 1 none is left."""
    found = counts.by_threshold(MADE, np.array([0, 0.5, 0.85, 1]))
    accepted, verified, made = found[0].tolist()
    assert accepted == [5, 5, 1, 0]
    assert verified == [9, 8, 1, 0]
    assert made == [9, 9, 9, 9]
    assert not found[1].any()


def test_a_threshold_that_a_confidence_just_reaches():
    found = counts.by_threshold(MADE, np.array([0.3, 0.3001]))
    assert found[0, 1].tolist() == [9, 8]


@pytest.mark.parametrize("temperatures", [None, np.array([1.1, 2.3, 0.7])])
def test_reliability_has_the_bins_of_each_position(temperatures):
    """By a loop: chances multiplied one after the other."""
    found = counts.reliability(MADE, 3, temperatures)
    divisors = np.ones(3) if temperatures is None else temperatures
    z = np.array(MADE[0].confidence_logits)
    wanted = np.zeros((3, 3, ECE_BINS))
    for block, accepted in zip(z, MADE[0].accepted_drafts, strict=True):
        chance = 1.0
        for k in range(3):
            chance /= 1 + np.exp(-block[k] / divisors[k])
            bin_ = min(int(chance * ECE_BINS), ECE_BINS - 1)
            wanted[:, k, bin_] += (accepted > k, chance, 1)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-12)
    assert not found[1].any()


def test_reliability_agrees_with_that_of_one_position():
    """Which `calibration.reliability` tells as means."""
    accepted, predicted, count = counts.reliability(MADE, 3, None)[0, :, 1]
    chances = np.prod(np.array(CONFIDENCES)[:, :2], axis=1)
    wanted = reliability(chances, np.array([True, False, True]))
    assert count.tolist() == wanted.count.tolist()
    seen = count > 0
    np.testing.assert_allclose(predicted[seen] / count[seen], wanted.predicted[seen], rtol=1e-12)
    np.testing.assert_allclose(accepted[seen] / count[seen], wanted.observed[seen], rtol=1e-12)
