"""The choice of the next round: against loops, and as a story told by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import plans
from dspark_jax.plans import CHANGE, MOST_PATIENCE, PATIENCE, PERIOD, Plan


def test_ladder():
    assert plans.ladder(1, 1) == (Plan(0, 1), Plan(1, 2))
    assert plans.ladder(1, 3) == (
        *(Plan(0, 1), Plan(1, 2), Plan(2, 2), Plan(2, 3)),
        *(Plan(3, 2), Plan(3, 3), Plan(3, 4)),
    )
    assert plans.ladder(4, 2) == (
        *(Plan(0, 4), Plan(1, 6), Plan(1, 8)),
        *(Plan(2, 6), Plan(2, 8), Plan(2, 12)),
    )
    for rows, most in itertools.product((1, 2, 16, 64), (1, 3, 7, 15)):
        found = plans.ladder(rows, most)
        assert Plan(0, rows) in found
        assert plans.whole(rows, most) == found[-1]
        assert all(rows <= p.capacity <= rows * (1 + p.drafts) for p in found)
        assert len(found) <= 1 + 3 * (1 + most.bit_length())


def test_capacities_are_those_of_one_block_length():
    assert plans.capacities(plans.ladder(4, 2), 2) == (6, 8, 12)


def expected_tokens(chances, plan, active):
    """One at a time: the anchors, then the likeliest drafts for as long as there is room."""
    drafts = sorted(a for r in np.flatnonzero(active) for a in chances[r, : plan.drafts])[::-1]
    return active.sum() + sum(drafts[: plan.capacity - active.sum()])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_best_plan_compares_all(rows):
    rng = np.random.default_rng(rows)
    choices = plans.ladder(rows, 5)
    best_plan = jax.jit(plans.best_plan, static_argnames="plans")
    for _ in range(200):
        chances = np.cumprod(rng.uniform(0, 1, (rows, 5)), axis=1).astype(np.float32)
        active = rng.random(rows) < 0.7
        rates = rng.uniform(0.3, 1, len(choices)).astype(np.float32)
        speeds = [
            r * expected_tokens(chances, p, active) for r, p in zip(rates, choices, strict=True)
        ]
        index, found = best_plan(chances, rates, plans=choices, active=active)
        np.testing.assert_allclose(found, speeds, rtol=1e-5)
        assert speeds[int(index)] >= max(speeds) * (1 - 1e-5)


def test_it_begins_with_some_hope():
    """3 rows of 2 drafts that are accepted with probability .7: 6.57 tokens in place of 3."""
    choices = (Plan(0, 3), Plan(2, 9))
    for rate, chosen in ((0.46, Plan(2, 9)), (0.45, Plan(0, 3))):
        outlook = plans.create_outlook(3, 2, choices, jnp.array([1.0, rate]))
        assert choices[int(outlook.plan)] == chosen


def test_observe_is_a_running_mean():
    rng = np.random.default_rng(0)
    rounds = rng.uniform(0, 1, (10, 2, 3)).astype(np.float32)
    active = np.array([True, True])
    outlook = plans.create_outlook(2, 3, plans.ladder(2, 3), jnp.ones(len(plans.ladder(2, 3))))
    for c in rounds:
        outlook = plans.observe(outlook, jnp.array(c), active)
    np.testing.assert_allclose(outlook.confidence, rounds.mean(0), rtol=1e-5)
    np.testing.assert_allclose(outlook.typical, rounds.mean((0, 1)), rtol=1e-5)
    # Fewer drafts leave the rest as it was, and a row that is idle too.
    later = plans.observe(outlook, jnp.full((2, 1), 0.5), np.array([False, True]))
    np.testing.assert_array_equal(later.confidence[:, 1:], outlook.confidence[:, 1:])
    np.testing.assert_array_equal(later.confidence[0], outlook.confidence[0])
    assert later.seen.tolist() == [[10, 10, 10], [11, 10, 10]]
    assert plans.observe(outlook, jnp.ones((2, 0)), active) is outlook


def test_rows_are_forgotten():
    outlook = plans.create_outlook(2, 3, plans.ladder(2, 3), jnp.ones(len(plans.ladder(2, 3))))
    outlook = plans.observe(outlook, jnp.full((2, 3), 0.2), np.array([True, True]))
    forgotten = plans.forget_rows(outlook, np.array([False, True]))
    assert forgotten.seen.tolist() == [[1, 1, 1], [0, 0, 0]]


class Story:
    """Rounds of one row and at most 2 drafts, whose confidences are told from outside."""

    choices = (Plan(0, 1), Plan(2, 3))

    def __init__(self, rates, jit=True):
        self.outlook = plans.create_outlook(1, 2, self.choices, jnp.array(rates))
        step = lambda o, c: plans.observe(  # noqa: E731
            plans.look_ahead(o, self.choices, jnp.array([True])), c, jnp.array([True])
        )
        self.step = jax.jit(step) if jit else step

    def rounds(self, count, confidence):
        """Drafts of each round."""
        drafted = []
        for _ in range(count):
            drafts = self.choices[int(self.outlook.plan)].drafts
            drafted.append(drafts)
            self.outlook = self.step(self.outlook, jnp.full((1, drafts), confidence))
        return drafted


def test_a_story_is_the_same_without_jit():
    stories = [Story([1.0, 2 / 3], jit) for jit in (True, False)]
    for story in stories:
        story.outlook = story.outlook.replace(patience=jnp.int32(2))
    drafted = [story.rounds(8, 0.2) for story in stories]
    # Two trials, each of 1.5 rounds without drafts and a change of plan, are a little more than 3.
    assert drafted[0] == drafted[1] == [2, 2, 0, 0, 2, 0, 0, 0]
    jax.tree.map(np.testing.assert_array_equal, *(story.outlook for story in stories))


def test_bad_drafts_are_given_up_and_tried_again():
    """Drafting costs half of a round: 1.5 + as much is needed; with .2 it gains .24."""
    story = Story([1.0, 2 / 3])
    # The first look at what there is to see, as plans are compared every round at first.
    assert story.rounds(PERIOD, 0.2) == [2] * 2 + [0] * (PERIOD - 2)
    later = story.rounds(400, 0.2)
    trials = [i for i, drafts in enumerate(later) if drafts]
    gaps = np.diff(trials)
    # As long as so many trials, each of which takes 1.5 without drafts and a change of plan.
    due = (1.5 + CHANGE) * PATIENCE
    assert due - PERIOD - 2 <= trials[0] <= due
    # One round each, and ever more rarely.
    assert all(b >= 2 * a - PERIOD for a, b in itertools.pairwise(gaps))
    assert len(trials) == 2
    # Then the text becomes easy: the next trial finds that out, and drafting goes on.
    easy = story.rounds(3 * int(story.outlook.patience) // 2 + 3 * PERIOD, 0.95)
    start = easy.index(2)
    assert easy[start + 1 :][: PERIOD - 1] == [0] * (PERIOD - 1)
    assert set(easy[start + 1 + PERIOD :]) == {2}
    assert int(story.outlook.patience) == PATIENCE


def test_one_look_behind_many_rounds_finds_what_many_would():
    """With a trial on the very round on which it is due, which looks at a period miss by some."""
    story = Story([1.0, 2 / 3])
    story.rounds(PERIOD, 0.2)
    look = functools.partial(plans.look_again, plans=story.choices, active=jnp.array([True]))
    outlook, quiet = look(story.outlook, rounds=0)
    assert int(outlook.plan) == 0
    # As long as so many trials, since there was none before.
    assert int(quiet) == np.ceil((1.5 + CHANGE) * PATIENCE - PERIOD)
    outlook, left = look(outlook, rounds=quiet - 1)
    assert (int(outlook.plan), int(left)) == (0, 1)
    outlook, _ = look(outlook, rounds=1)
    assert (int(outlook.plan), int(outlook.waited), int(outlook.patience)) == (1, 0, 2 * PATIENCE)
    first = story.rounds(3 * PATIENCE, 0.2).index(2)
    assert int(quiet) <= first < int(quiet) + PERIOD


def test_where_no_trial_could_pay_none_is_waited_for():
    story = Story([1.0, 0.25])
    outlook, quiet = plans.look_again(story.outlook, story.choices, jnp.array([True]), 10**6)
    assert (int(outlook.plan), int(quiet)) == (0, MOST_PATIENCE)


def test_a_lucky_trial_is_found_out_at_once():
    """Drafts that looked good once are given up when they don't last, and trials stay rare."""
    story = Story([1.0, 2 / 3])
    story.rounds(PERIOD, 0.2)
    drafted = []
    for _ in range(2 * PATIENCE):
        drafted += story.rounds(1, 0.2 if sum(drafted) else 0.7)
    first = drafted.index(2)
    again = drafted.index(2, first + 1)
    # Means of .7, .45, .37 and .33: the last gains .43 for the half that it costs.
    assert drafted[again:] == [2] * 4 + [0] * (len(drafted) - again - 4)
    assert int(story.outlook.patience) == 2 * PATIENCE


def test_what_cannot_pay_is_never_tried():
    """Even if both drafts were sure to be accepted: 3 tokens in 4 times the time."""
    story = Story([1.0, 0.25])
    assert story.rounds(3 * PATIENCE, 1.0) == [0] * (3 * PATIENCE)


def test_patience_has_an_end():
    story = Story([1.0, 2 / 3])
    story.outlook = story.outlook.replace(patience=jnp.int32(MOST_PATIENCE))
    story.rounds(3 * MOST_PATIENCE // 2 + 5, 0.1)
    assert int(story.outlook.patience) == MOST_PATIENCE


def test_a_plan_is_kept_unless_another_is_clearly_better():
    """2 % are not worth a change."""
    choices = (Plan(1, 2), Plan(2, 3))
    outlook = plans.create_outlook(1, 2, choices, jnp.array([1.0, 1.0]))
    active = jnp.array([True])
    for _ in range(3):
        outlook = plans.observe(outlook, jnp.array([[0.5, 0.1]]), active)
    # 1.5 and 1.55 tokens a round.
    for rate, chosen in ((1.053, 1), (1.08, 0)):
        outlook = outlook.replace(rates=jnp.array([rate, 1.0]))
        assert int(plans.look_ahead(outlook, choices, active).plan) == chosen
