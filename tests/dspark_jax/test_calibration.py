"""Calibration against hand-computed tables, loops, the reference, and rounds of known chances."""

import json

import numpy as np
import pytest

from dspark_jax import calibration
from dspark_jax.calibration import fit_sts, prefix_metrics, reliability, survival
from dspark_jax.config import InputError


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def simulated(rng, true_temperatures, rounds=20000):
    """Logits that are right once divided by the temperatures, and what became of the drafts."""
    z = rng.normal(1.0, 2.0, (rounds, len(true_temperatures)))
    each = rng.random(z.shape) < sigmoid(z / true_temperatures)
    return z, np.cumprod(each, axis=1).astype(bool)


def loop_ece(chances, accepted, bins=20):
    total = 0.0
    for b in range(bins):
        inside = [
            (c, a)
            for c, a in zip(chances, accepted, strict=True)
            if b / bins <= c and (c < (b + 1) / bins or b == bins - 1)
        ]
        if inside:
            total += abs(sum(c for c, _ in inside) - sum(a for _, a in inside))
    return total / len(chances)


def loop_auroc(chances, accepted):
    pairs = [
        1.0 if c > d else 0.5 if c == d else 0.0
        for c, yes in zip(chances, accepted, strict=True)
        if yes
        for d, no in zip(chances, accepted, strict=True)
        if not no
    ]
    return sum(pairs) / len(pairs)


def test_metrics_are_those_of_the_reference(golden):
    data = json.loads((golden / "confidence_metrics.json").read_text())
    assert data["ece_bins"] == calibration.ECE_BINS
    found = prefix_metrics(data["confidence_logits"], data["prefix_accepted"])
    for k, expected in enumerate(data["expected"]):
        assert found.ece[k] == pytest.approx(expected["ece"], abs=1e-6)
        # Its AUROC comes from 1000 bins, which join neighbours.
        assert found.auroc[k] == pytest.approx(expected["auc"], abs=5e-4)
        assert found.brier[k] == pytest.approx(expected["brier"], abs=1e-6)
        assert found.predicted[k] == pytest.approx(expected["pred_mean"], abs=1e-6)
        assert found.observed[k] == pytest.approx(expected["target_mean"], abs=1e-6)


def test_metrics_by_hand():
    """Chances .5 and .75, then times .5: one accepted of two, then none."""
    z = np.log([[1.0, 1.0], [3.0, 1.0]])
    found = prefix_metrics(z, [[False, False], [True, False]])
    np.testing.assert_allclose(found.ece, [(0.5 + 0.25) / 2, (0.25 + 0.375) / 2])
    np.testing.assert_allclose(found.brier, [(0.25 + 0.0625) / 2, (0.0625 + 0.140625) / 2])
    np.testing.assert_allclose(found.auroc, [1.0, np.nan])
    np.testing.assert_allclose(found.predicted, [0.625, 0.3125])
    np.testing.assert_allclose(found.observed, [0.5, 0.0])
    np.testing.assert_array_equal(found.count, [2, 2])


def test_metrics_are_those_of_loops():
    rng = np.random.default_rng(0)
    z = rng.choice([-1.0, 0.5, 2.0, 3.0], (120, 3))  # with ties
    accepted = np.cumprod(rng.random((120, 3)) < 0.7, axis=1).astype(bool)
    found, chances = prefix_metrics(z, accepted), survival(z)
    for k in range(3):
        column = chances[:, k], accepted[:, k]
        assert found.ece[k] == pytest.approx(loop_ece(*column))
        assert found.auroc[k] == pytest.approx(loop_auroc(*column))


def test_fit_finds_the_temperatures_that_were_used():
    truth = np.array([2.0, 0.7, 1.0, 3.0])
    found = fit_sts(*simulated(np.random.default_rng(1), truth, 60000))
    np.testing.assert_allclose(found, truth, rtol=0.15)


def test_fit_is_the_grid_search_written_out():
    z, accepted = simulated(np.random.default_rng(2), np.array([5.0, 1.0, 0.2]), 600)
    expected = []
    for k in range(3):
        errors = [
            (loop_ece(survival(z[:, : k + 1], np.array([*expected, t]))[:, k], accepted[:, k]), t)
            for t in calibration.GRID
        ]
        least = min(e for e, _ in errors)
        ties = [t for e, t in errors if e <= least + 1e-12]
        best = min(ties, key=lambda t: abs(np.log(t)))
        one = next(e for e, t in errors if abs(t - 1) < 1e-12)
        noise = max(
            sum(c * (1 - c) for c in survival(z[:, : k + 1], np.array([*expected, t]))[:, k]) ** 0.5
            for t in (1.0, best)
        ) / len(z)
        expected.append(best if least < one - 4 * noise else 1.0)
    assert expected[0] != 1.0
    assert expected[1] == 1.0
    np.testing.assert_allclose(fit_sts(z, accepted), expected)


@pytest.mark.parametrize("rounds", [1, 10, 30, 100])
def test_few_rounds_say_nothing(rounds):
    """Of right chances of .95 or so, all drafts of few rounds are accepted more often than not."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        z = rng.normal(3, 0.5, (rounds, 1))
        assert fit_sts(z, rng.random(z.shape) < sigmoid(z)).tolist() == [1.0]


@pytest.mark.parametrize(("spread", "costs"), [(0.05, False), (0.1, True)])
def test_the_order_of_prefixes_is_kept(spread, costs, monkeypatch):
    """The second draft is accepted with .9 where about .57 is said, with some noise.

    The temperature that mends the mean makes the noise ten times as large.
    """
    rng, rounds = np.random.default_rng(7), 5000
    z = np.stack([rng.normal(1, 1.5, rounds), rng.normal(0.3, spread, rounds)], axis=1)
    each = rng.random(z.shape) < np.stack([sigmoid(z[:, 0]), np.full(rounds, 0.9)], axis=1)
    accepted = np.cumprod(each, axis=1).astype(bool)
    raw, found = prefix_metrics(z, accepted), fit_sts(z, accepted)
    fitted = prefix_metrics(z, accepted, temperatures=found)
    assert fitted.auroc[1] >= raw.auroc[1] - calibration.ORDER
    assert fitted.ece[1] < raw.ece[1] / 3
    monkeypatch.setattr(calibration, "ORDER", 1.0)
    free = fit_sts(z, accepted)
    assert (free[1] != found[1]) == costs
    if costs:
        spoilt = prefix_metrics(z, accepted, temperatures=free)
        assert spoilt.auroc[1] < raw.auroc[1] - 2 * 0.0025


def test_confidences_that_are_right_are_left_alone():
    z, accepted = simulated(np.random.default_rng(6), np.ones(4), 2000)
    assert fit_sts(z, accepted).tolist() == [1.0] * 4


def test_calibrated_chances_hold_on_rounds_that_were_not_fitted():
    truth = np.array([2.5, 1.8, 2.2])
    rng = np.random.default_rng(3)
    temperatures = fit_sts(*simulated(rng, truth))
    z, accepted = simulated(rng, truth)
    raw = prefix_metrics(z, accepted)
    fitted = prefix_metrics(z, accepted, temperatures=temperatures)
    assert raw.ece.mean() > 0.05
    # 20 bins of 1000 rounds: even right chances leave about .01 of sampling noise.
    assert fitted.ece.mean() < raw.ece.mean() / 3
    # The first position keeps its order exactly, later ones nearly.
    assert fitted.auroc[0] == pytest.approx(raw.auroc[0])
    assert (fitted.auroc > raw.auroc - 0.005).all()


def test_what_was_not_judged_changes_nothing():
    rng = np.random.default_rng(4)
    z, accepted = simulated(rng, np.array([2.0, 2.0]), 500)
    mask = rng.random(z.shape) < 0.6
    mask[:, 1] &= mask[:, 0]
    other_z = np.where(mask, z, np.nan)
    other = np.where(mask, accepted, ~accepted)
    np.testing.assert_array_equal(fit_sts(z, accepted, mask), fit_sts(other_z, other, mask))
    a, b = (prefix_metrics(*x, mask) for x in ((z, accepted), (other_z, other)))
    np.testing.assert_array_equal(a.ece, b.ece)
    np.testing.assert_array_equal(a.count, mask.sum(0))


def test_a_position_that_was_never_judged():
    z, accepted = simulated(np.random.default_rng(5), np.array([2.0, 2.0]), 200)
    mask = np.array([[True, False]] * 200)
    assert fit_sts(z, accepted, mask)[1] == 1
    found = prefix_metrics(z, accepted, mask)
    assert np.isnan(found.ece[1])
    assert found.count[1] == 0


def test_huge_logits_are_certain():
    np.testing.assert_array_equal(survival(np.array([[1e4, -1e4, 1e4]])), [[1, 0, 0]])


def test_reliability_bins():
    found = reliability(np.array([0.0, 0.04, 0.5, 1.0]), np.array([0, 1, 1, 1]), bins=4)
    np.testing.assert_array_equal(found.count, [2, 0, 1, 1])
    np.testing.assert_allclose(found.predicted, [0.02, np.nan, 0.5, 1.0])
    np.testing.assert_allclose(found.observed, [0.5, np.nan, 1.0, 1.0])


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.0), (1.0, -1.0), (np.nan, 1.0)])
def test_temperatures_that_do_not_fit(temperatures):
    with pytest.raises(InputError, match="expected 2 numbers above 0"):
        prefix_metrics(np.ones((3, 2)), np.ones((3, 2)), temperatures=np.array(temperatures))


@pytest.mark.parametrize(
    ("z", "accepted", "message"),
    [
        (np.ones(3), np.ones(3), r"shape \(3,\): expected \[N, K\]"),
        (np.ones((2, 3)), np.ones((2, 2)), r"prefix_accepted of shape \(2, 2\)"),
        (np.full((2, 3), np.nan), np.ones((2, 3)), "expected finite numbers"),
    ],
)
def test_arrays_that_do_not_fit(z, accepted, message):
    with pytest.raises(InputError, match=message):
        fit_sts(z, accepted)
