import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.guard import WINDOW, Guard, choose, judge
from train.settings import GuardSettings

SETTINGS = GuardSettings(spike_factor=3, spike_after=4)


@jax.jit
def step(guard, loss, norm, update=1.0):
    return judge(guard, loss, norm, jnp.float32(update), SETTINGS)


def after(values):
    """Verdicts on (loss, norm) pairs, and the guard after them."""
    guard, verdicts = Guard.start(), []
    for loss, norm in values:
        good, guard = step(guard, loss, norm)
        verdicts.append(bool(good))
    return verdicts, guard


def test_against_a_loop():
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 0.8, (400, 2)).astype(np.float32)
    values[[50, 60, 61], 0] = np.nan
    values[70, 1] = np.inf
    mean, taken, skipped, row, expected = np.zeros(2), 0, 0, 0, []
    for pair in values:
        good = np.isfinite(pair).all() and not (taken >= 4 and (pair > 3 * mean).any())
        expected.append(bool(good))
        if good:
            taken, row = taken + 1, 0
            mean = mean + (pair - mean) / min(taken, WINDOW)
        else:
            skipped, row = skipped + 1, row + 1
    verdicts, guard = after(values)
    assert verdicts == expected
    assert 4 < skipped < 300
    assert (guard.taken, guard.skipped, guard.skipped_in_a_row) == (taken, skipped, row)
    np.testing.assert_allclose(guard.mean, mean, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "norm", "update", "good"),
    [
        (2.0, 2.0, 1.0, True),
        (3.1, 2.0, 1.0, False),
        (2.0, 3.1, 1.0, False),
        (-np.inf, 2.0, 1.0, False),
        (2.0, np.nan, 1.0, False),
        (2.0, 2.0, np.inf, False),
    ],
)
def test_each_number_counts(loss, norm, update, good):
    _, guard = after([(1, 1)] * 4)
    verdict, new = step(guard, loss, norm, update)
    assert verdict == good
    assert (new.taken, new.skipped_in_a_row) == (4 + good, 1 - good)
    assert np.isfinite(new.mean).all()


def test_a_spike_is_none_before_the_mean_is_known():
    verdicts, guard = after([(1, 1)] * 3 + [(1e6, 1)])
    assert verdicts == [True] * 4
    assert guard.mean[0] == (3 + 1e6) / 4


def test_steps_in_a_row_begin_again_after_a_good_one():
    bad = (np.nan, 1)
    _, guard = after([(1, 1), bad, bad, (1, 1), bad])
    assert (guard.skipped, guard.skipped_in_a_row) == (3, 1)


def test_choose_leaves_nothing_of_the_other():
    old, new = {"a": jnp.ones(2)}, {"a": jnp.array([np.nan, 3])}
    np.testing.assert_array_equal(choose(jnp.array(False), new, old)["a"], [1, 1])
    np.testing.assert_array_equal(choose(jnp.array(True), new, old)["a"], [np.nan, 3])
