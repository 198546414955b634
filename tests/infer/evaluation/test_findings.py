"""Figures of samples made by hand."""

import json

import numpy as np
import pytest

from infer.evaluation.findings import THRESHOLDS, depths, find, plain
from infer.evaluation.sample import largest, names_of
from infer.pictures import CURVE_BINS
from tests.infer.evaluation.conftest import (
    CONFIDENCES,
    ROUNDS,
    completion,
    drafter,
    sample,
)


def test_a_measurement(findings):
    """Full rounds of the first drafter: 3 and 1, 4 and 2; accepted by position 4 of 5, 3 of 4 and
    1 of 2, the cut round without its third draft."""
    m = findings.measurements[0]
    assert (m.draft, m.dataset, m.domain, m.block_size) == ("ours", "gsm8k", "math", 3)
    assert (m.requests, m.rounds) == (2, 4)
    assert m.accepted_length.value == 10 / 4
    assert (m.accepted_length.low, m.accepted_length.high) == (2, 3)
    assert m.conditional_acceptance.value.tolist() == [4 / 5, 3 / 4, 1 / 2]


def test_a_domain_is_the_mean_of_its_sets():
    """Sets of 4 and of 2 tokens a round count alike, however many rounds they have."""
    ours, theirs = drafter(), drafter("theirs")
    long, short = completion([(4, 3, 3)]), completion([(2, 3, 1)] * 9)
    whole = [
        sample(ours, "gsm8k", [long]),
        sample(ours, "aime25", [short]),
        sample(ours, "mbpp", [short]),
        sample(theirs, "gsm8k", [short]),
        sample(theirs, "aime25", [short]),
        sample(theirs, "mbpp", [long]),
    ]
    found = {(d.draft, d.domain): d for d in find(whole, []).domains}
    assert found["ours", "math"].accepted_length.value == 3
    assert found["ours", "math"].to_first.value == 1
    assert found["theirs", "math"].accepted_length.value == 2
    assert found["theirs", "math"].to_first.value == pytest.approx(2 / 3)
    assert found["theirs", "code"].to_first.value == 2


def test_the_quotient_is_paired():
    """Prompts differ much, and the second drafter is twice as good on each of them: nothing is left
    to chance."""
    first = [completion([(1 + n % 2, 3, n % 2)]) for n in range(20)]
    second = [completion([(2 * (1 + n % 2), 3, 2 * (1 + n % 2) - 1)]) for n in range(20)]
    whole = [
        sample(drafter(), "gsm8k", first),
        sample(drafter("theirs"), "gsm8k", second),
    ]
    found = find(whole, []).domains[1]
    assert found.accepted_length.high - found.accepted_length.low > 0.5
    assert (found.to_first.low, found.to_first.value, found.to_first.high) == (2, 2, 2)


def test_positions_pool_a_domain(findings):
    """Only at the largest block size: the second drafter's are 1 of 3 and none of 1."""
    found = {(p.draft, p.domain): p.conditional_acceptance.value for p in findings.positions}
    assert set(found) == {(d, c) for d in ("ours", "theirs") for c in ("math", "code")}
    assert found["ours", "math"].tolist() == [4 / 5, 3 / 4, 1 / 2]
    accepted = found["theirs", "code"]
    assert accepted[:2].tolist() == [1 / 3, 0]
    assert np.isnan(accepted[2])


def test_a_sweep():
    """The blocks of `test_counts`, and the same ones again."""
    made = [completion(ROUNDS, confidences=CONFIDENCES)] * 2
    (found,) = find([sample(drafter(), "gsm8k", made)], []).sweeps
    assert found.thresholds is THRESHOLDS
    at = {round(float(t), 2): k for k, t in enumerate(found.thresholds)}
    assert found.verified.value[[at[0], at[0.5], at[0.85]]].tolist() == [1, 8 / 9, 1 / 9]
    assert found.accepted.value[[at[0], at[0.5], at[0.85]]].tolist() == [5 / 9, 5 / 8, 1]
    assert found.verified.value[at[1]] == 0
    assert np.isnan(found.accepted.value[at[1]])


def test_decoded_with_a_threshold(findings):
    assert [(d.draft, d.domain, d.threshold) for d in findings.decoded] == [
        ("ours", "math", 0.85),
        ("ours", "code", 0.85),
    ]
    found = findings.decoded[0]
    assert found.verified.value == 1 / 6
    assert found.accepted.value == 1
    assert found.accepted_length.value == 1.5


def test_reliability_by_hand():
    """The first position's chances are .9 four times, of which two are accepted: off by .4. The
    second's are .45, of which none is. By a temperature of 2 they are .75 and .375."""
    rounds = [(2, 3, 1), (1, 3, 0)] * 2
    made = [completion(rounds, confidences=[[0.9, 0.5, 0.5]] * 4)]
    of = drafter(temperatures=(2.0, 1.0, 1.0))
    (found,) = find([sample(of, "gsm8k", made)], []).reliabilities
    assert (found.draft, found.rounds) == ("ours", 4)
    assert found.survival.value.tolist() == [0.5, 0, 0]
    np.testing.assert_allclose(found.raw.error, [0.4, 0.45, 0.225], rtol=1e-12)
    np.testing.assert_allclose(found.scaled.error, [0.25, 0.375, 0.1875], rtol=1e-12)
    assert found.raw.predicted.shape == found.raw.observed.value.shape == (3, CURVE_BINS)
    assert found.raw.predicted[0, 9] == pytest.approx(0.9)
    assert found.raw.observed.value[0, 9] == 0.5
    assert found.raw.observed.value[1, 4] == 0
    assert np.isnan(np.delete(found.raw.predicted[0], 9)).all()


def test_a_drafter_without_a_head_has_no_confidences(findings):
    assert {s.draft for s in findings.sweeps} == {"ours"}
    assert [r.draft for r in findings.reliabilities] == ["ours"]
    assert findings.reliabilities[0].scaled is not None
    (raw,) = find([sample(drafter(), "gsm8k", [completion(ROUNDS)])], []).reliabilities
    assert raw.scaled is None


def test_nothing_but_cut_rounds():
    found = find([sample(drafter(), "gsm8k", [completion([])])], [])
    values = plain(found)
    json.dumps(values, allow_nan=False)
    (m,) = values["measurements"]
    assert m["rounds"] == 0
    assert m["accepted_length"] == {"value": None, "low": None, "high": None}
    assert m["conditional_acceptance"]["value"] == [None] * 3
    assert found.reliabilities[0].rounds == 0


def test_drafters_that_differ_in_layers():
    """One with another head is on a line of its own, and alone says nothing of layers."""
    ours = [drafter(f"d{n}", layers=n) for n in (3, 1)]
    other = drafter("other", layers=5, rank=8)
    whole = [sample(d, "gsm8k", [completion(ROUNDS)]) for d in (*ours, other)]
    groups = [[d.name for d in own] for own in depths(find(whole, []))]
    assert groups == [["d1", "d3"], ["other"]]
    assert depths(find(whole[1:], [])) == []


def test_the_largest_blocks():
    small, large = (sample(drafter(), "gsm8k", [], size=size) for size in (2, 3))
    assert largest([small, large]) == [large]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a/drafter"], ["drafter"]),
        (["runs/a/drafter", "runs/b/drafter/"], ["a", "b"]),
        (["a/x", "a/x/y"], ["x", "x/y"]),
        (["x", "y/z"], ["x", "y/z"]),
        (["one/a/d", "two/b/d"], ["one/a", "two/b"]),
        (["/abs/a", "rel/a"], ["/abs", "rel"]),
    ],
)
def test_short_names(paths, names):
    assert names_of(paths) == names
