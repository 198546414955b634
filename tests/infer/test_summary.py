"""Figures of a run against sums made by hand."""

import pytest

from dspark_jax.request import Completion, Request
from infer.engine import Run
from infer.summary import compare, conditional_acceptance, in_words, mean_accepted_length


def completion(rounds, tokens=None):
    """From (emitted, verified, accepted) of each round."""
    emitted, verified, accepted = [list(x) for x in zip(*rounds, strict=True)] or [[], [], []]
    ids = tokens or [0] * (1 + sum(emitted))
    return Completion(1, ids, "", "length", emitted, verified, accepted, None, None)


def test_mean_accepted_length_leaves_cut_rounds_out():
    one = completion([(3, 3, 2), (1, 3, 0), (2, 3, 3)])  # the last would have been 4
    two = completion([(4, 3, 3)])
    assert mean_accepted_length([one, two]) == pytest.approx((3 + 1 + 4) / 3)
    assert mean_accepted_length([completion([(2, 3, 3)])]) is None
    assert mean_accepted_length([]) is None


def test_conditional_acceptance_by_hand():
    rounds = [
        (3, 3, 2),  # accepted, accepted, rejected
        (1, 3, 0),  # rejected
        (2, 1, 1),  # accepted, and no more was verified
        (1, 0, 0),  # nothing was verified
        (2, 3, 3),  # accepted, accepted, and the rest cut off
    ]
    assert conditional_acceptance([completion(rounds)], 3) == [3 / 4, 2 / 2, 0 / 1]
    assert conditional_acceptance([completion([(1, 1, 0)])], 2) == [0.0, None]
    assert conditional_acceptance([], 2) == [None, None]


def run(completions, seconds, temperature=0.0):
    requests = [Request((1,), temperature=temperature)] * len(completions)
    return Run(requests, completions, seconds)


def test_speedup_is_a_ratio_of_rates():
    fast = run([completion([(3, 3, 2)], [1, 2, 3, 4])], 2.0)
    slow = run([completion([(1, 0, 0)], [1, 2])], 4.0)
    assert compare(fast, slow) == {
        "speedup": 4.0,
        "baseline_tokens_per_second": 0.5,
        "baseline_mismatches": 1,
    }
    assert compare(fast, fast)["baseline_mismatches"] == 0
    sampled = run(fast.completions, 2.0, temperature=1.0)
    assert compare(sampled, slow)["baseline_mismatches"] is None
    assert set(compare(Run(), Run()).values()) == {None}


def test_runs_add_up():
    total = Run(compile_seconds=3.0) + run([completion([(1, 3, 0)])], 0.5)
    total += run([completion([(3, 3, 2)]), completion([])], 1.5)
    assert (total.seconds, total.compile_seconds, total.tokens) == (2.0, 3.0, 2 + 4 + 1)
    assert total.tokens_per_second == 3.5
    assert len(total.requests) == 3


def test_in_words():
    figures = {"requests": 2, "completion_tokens": 1234, "tokens_per_second": 99.6}
    figures |= {"mean_accepted_length": None}
    assert in_words(figures) == "2 completions, 1,234 tokens, 100 tokens/s"
    figures |= {"mean_accepted_length": 2.345, "speedup": 0.5}
    assert in_words(figures).endswith(", accepted length 2.35, 0.50 times plain decoding")
    assert in_words({"requests": 0}) == "nothing was left to decode"
