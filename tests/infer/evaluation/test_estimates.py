"""Resamples of prompts, and intervals of what is computed from them."""

import numpy as np
import pytest

from infer.evaluation.estimates import RESAMPLES, Estimate, quotient, resample, weights


def mean_of(rounds, seed=0):
    """Accepted length of rounds by prompt."""
    sums = [(sum(each), len(each)) for each in rounds]
    return Estimate.of(quotient(*resample(sums, weights(len(sums), seed, "a")).T))


def test_the_first_draw_is_the_sample_and_all_have_its_size():
    often = weights(5, 0, "a")
    assert often.shape == (1 + RESAMPLES, 5)
    assert often[0].tolist() == [1] * 5
    assert set(often.sum(axis=1)) == {5}
    # A prompt is left out with a chance of (4/5)^5.
    assert (often[1:] == 0).mean() == pytest.approx(0.8**5, abs=0.01)


def test_sets_are_drawn_from_independently_and_drafters_alike():
    a, b = weights(50, 0, "a"), weights(50, 0, "b")
    assert np.array_equal(a, weights(50, 0, "a"))
    assert not np.array_equal(a, weights(50, 1, "a"))
    correlation = np.corrcoef(a[1:].ravel(), b[1:].ravel())[0, 1]
    assert abs(correlation) < 0.01


def test_totals_by_hand():
    sums = np.array([[[1, 2]], [[10, 20]]])  # [N, 1, 2]
    often = np.array([[1, 1], [0, 2], [2, 0]])
    assert resample(sums, often).tolist() == [[[11, 22]], [[20, 40]], [[2, 4]]]


def test_an_interval_is_over_prompts():
    """Of two prompts a resample has both, or one of them twice: means 5/3, 1 and 3, with chances
    of a half, a quarter and a quarter."""
    found = mean_of([[1, 1], [3]])
    assert (found.value, found.low, found.high) == (pytest.approx(5 / 3), 1, 3)
    same = mean_of([[2, 4], [4, 2]])
    assert (same.value, same.low, same.high) == (3, 3, 3)


@pytest.mark.parametrize("size", [100, 400])
def test_an_interval_narrows_with_prompts(size):
    """Its width is that of a normal distribution, 3.92 standard errors of the mean."""
    found = mean_of([[1], [3]] * (size // 2))
    assert found.high - found.low == pytest.approx(3.92 / size**0.5, rel=0.07)


def test_prompts_without_rounds_count_for_nothing():
    found = mean_of([[2], [2], []])
    assert (found.value, found.low, found.high) == (2, 2, 2)
    empty = mean_of([[], []])
    assert np.isnan([empty.value, empty.low, empty.high]).all()


def test_quantiles_by_hand():
    """Of 0 .. 100 the ends of the middle 95 % are 2.5 and 97.5; a column of its own each."""
    replicates = np.arange(101.0)
    values = np.stack([np.r_[50, replicates], np.r_[np.nan, replicates]], axis=1)
    found = Estimate.of(values)
    assert found[0].value == 50
    assert (found[0].low, found[0].high) == pytest.approx((2.5, 97.5))
    assert np.isnan([found[1].value, found[1].low, found[1].high]).all()
    partly = Estimate.of(np.array([1.0, np.nan, 2.0, 2.0]))
    assert (partly.low, partly.high) == (2, 2)


def test_a_quotient_by_nothing_is_unknown():
    found = quotient(np.array([1.0, 0.0]), np.array([2.0, 0.0]))
    assert found[0] == 0.5
    assert np.isnan(found[1])
