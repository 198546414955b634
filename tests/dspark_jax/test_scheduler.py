"""Verified lengths against loops, and against the distribution that they must not touch."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import scheduler
from dspark_jax.config import InputError
from dspark_jax.scheduler import best_capacity, schedule, survival

# Rows, drafts: the shapes of the random cases, so that few things are compiled.
SHAPES = [(1, 1), (1, 4), (2, 2), (3, 5), (8, 7)]


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


def candidates(confidence, active):
    """(chance, row, position from 1), best first; chances in float32, as the scheduler has them."""
    found = []
    for r, row in enumerate(confidence):
        chance = np.float32(1)
        for j, c in enumerate(row, start=1):
            chance = np.float32(chance * c)
            if active[r] and chance > 0:
                found.append((float(chance), r, j))
    return sorted(found, key=lambda x: (-x[0], x[1], x[2]))


def algorithm_1(confidence, sps, active, capacities=None):
    """The paper's loop in float64, then filling."""
    lengths, tokens, size = [0] * len(confidence), float(sum(active)), sum(active)
    best = tokens * sps[size]
    stopped = False
    for chance, r, j in candidates(confidence, active):
        raised = (tokens + chance) * sps[size + 1]
        if not stopped and raised > best:
            tokens, size, best = tokens + chance, size + 1, raised
            room = next((c for c in capacities or () if c >= size), size)
        else:
            if not stopped:
                room = next((c for c in capacities or () if c >= size), size)
            stopped = True
            if size >= room:
                break
            size += 1
        lengths[r] = j
    return lengths


def delayed(confidence, capacity, active):
    lengths = [0] * len(confidence)
    for _, r, j in candidates(confidence, active)[: max(0, capacity - sum(active))]:
        lengths[r] = j
    return lengths


def best(chances, sps, active):
    """The best number of tokens by trying all, smallest first."""
    gains = sorted((a for row, on in zip(chances, active, strict=True) if on for a in row if a > 0))
    tokens = base = sum(active)
    found, rate = base, tokens * sps[base]
    for size, gain in enumerate(reversed(gains), start=base + 1):
        tokens = tokens + float(gain)
        if tokens * sps[size] > rate:
            found, rate = size, tokens * sps[size]
    return found


def random_case(rng, rows, size):
    """Confidences with ties, exact zeros and ones; tables of every kind; idle rows."""
    kind = rng.integers(4)
    confidence = {
        0: lambda: rng.random((rows, size)),
        1: lambda: rng.choice([0.0, 0.25, 0.5, 1.0], (rows, size)),
        2: lambda: rng.random((rows, size)) ** 0.1,
        3: lambda: rng.choice([1.0, 0.5], (rows, size)),
    }[int(kind)]()
    length = rows * (1 + size) + 1
    places = np.arange(length)
    steps = rng.integers(1, 5)
    table = {
        0: np.ones(length),
        1: 1 / (1 + places * rng.random()),
        2: 2.0 ** -(places // steps),  # a staircase of numbers that float32 holds exactly
        3: 1 + places / 64,  # rising
        4: rng.random(length) + 0.1,
    }[int(rng.integers(5))]
    active = rng.random(rows) < 0.8
    if kind in (0, 2):  # sums are rounded: keep off ties that rounding would decide
        table = table * (1 + 1e-3 * rng.random(length))
    return confidence.astype(np.float32), table.astype(np.float32), active


def cases(number, seed=0):
    """`number` random cases, in stacks of one shape."""
    rng = np.random.default_rng(seed)
    for shape in SHAPES:
        made = [random_case(rng, *shape) for _ in range(number // len(SHAPES))]
        yield tuple(np.stack(parts) for parts in zip(*made, strict=True))


def capacities_for(rows, size):
    most = rows * (1 + size)
    return tuple(sorted({rows, (rows + most) // 2, most}))


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


@pytest.mark.parametrize("filled", [False, True])
def test_causal_is_algorithm_1(filled):
    seen = set()
    for confidence, sps, active in cases(2000):
        sizes = capacities_for(*confidence.shape[1:]) if filled else None
        run = functools.partial(schedule, policy="causal", capacities=sizes)
        lengths = jax.jit(jax.vmap(lambda c, s, a, run=run: run(c, s, active=a)))(
            confidence, sps, active
        )
        for found, c, s, a in zip(lengths, confidence, sps, active, strict=True):
            expected = algorithm_1(c, s.astype(float), a, sizes)
            np.testing.assert_array_equal(found, expected)
            seen.add((sum(expected) == 0, sum(expected) == a.sum() * c.shape[1]))
    assert len(seen) >= 3  # nothing, something and everything was admitted


def test_delayed_takes_the_best_and_its_capacity_is_the_best_of_all():
    for confidence, sps, active in cases(2000, seed=1):
        rows, size = confidence.shape[1:]
        capacity = np.random.default_rng(2).integers(0, rows * (1 + size) + 3, len(sps))
        run = jax.vmap(lambda c, a, n: schedule(c, policy="delayed", active=a, capacity=n))
        lengths = jax.jit(run)(confidence, active, capacity)
        chances = jax.vmap(survival)(confidence)
        found = jax.jit(jax.vmap(best_capacity))(chances, sps, active)
        for i, (c, s, a) in enumerate(zip(confidence, sps, active, strict=True)):
            np.testing.assert_array_equal(lengths[i], delayed(c, int(capacity[i]), a))
            assert found[i] == best(np.asarray(chances[i], float), s.astype(float), a)


def test_without_jit_the_same():
    confidence, sps, active = random_case(np.random.default_rng(3), 3, 5)
    with jax.disable_jit():
        causal = schedule(confidence, sps, policy="causal", active=active)
        late = schedule(confidence, policy="delayed", active=active, capacity=9)
    np.testing.assert_array_equal(causal, algorithm_1(confidence, sps.astype(float), active))
    np.testing.assert_array_equal(late, delayed(confidence, 9, active))


def test_survival_never_rises():
    """Where products are rounded, and an associative scan would round them differently."""
    rng = np.random.default_rng(4)
    confidence = (1 - 1e-7 * rng.random((500, 15))).astype(np.float32)
    chances = np.asarray(jax.jit(survival)(confidence))
    assert (np.diff(chances, axis=1) <= 0).all()
    np.testing.assert_array_equal(chances, np.cumprod(confidence, axis=1, dtype=np.float32))


# Two tokens, two drafts: p_t = (.7, .3), p_d = (.5, .5); the second confidence gives away the
# first draft: .9 after token 0, 0 after token 1.
P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
TABLE = np.array([1, 1, 0.5, 0.45])


def first_token(lengths):
    """Chance of token 0 in the first place, when draft x_1 gives `lengths(c_2)` drafts."""
    chance = 0.0
    for x, q in enumerate(Q):
        if lengths(0.9 if x == 0 else 0.0) == 0:
            chance += q * P[0]
            continue
        accepted = min(1, P[x] / q)
        rest = np.maximum(P - Q, 0)
        chance += q * (accepted * (x == 0) + (1 - accepted) * rest[0] / rest.sum())
    return chance


def causal_lengths(c):
    return int(schedule(jnp.array([[0.8, c]]), jnp.array(TABLE), policy="causal")[0])


def argmax_lengths(c):
    """What must not be done: the best number of drafts for the confidences of this very round."""
    chances = survival(jnp.array([[0.8, c]]))
    return int(best_capacity(chances, jnp.array(TABLE), jnp.array([True]))) - 1


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_first_token_does_not_learn_of_itself(capacity):
    def late(c):
        confidence = jnp.array([[0.8, c]])
        return int(schedule(confidence, policy="delayed", capacity=capacity)[0])

    assert first_token(causal_lengths) == pytest.approx(0.7)
    assert first_token(late) == pytest.approx(0.7)
    assert first_token(argmax_lengths) == pytest.approx(0.85)


def test_threshold_takes_equality_and_stops_at_the_first_below():
    confidence = jnp.array([[0.5, 0.5, 0.5], [0.5, 0.4, 0.9], [0.4, 0.9, 0.9], [1.0, 1.0, 0.0]])
    lengths = schedule(confidence, policy="threshold", threshold=0.5)
    np.testing.assert_array_equal(lengths, [3, 1, 0, 2])


def test_without_active_all_rows_count():
    confidence = jnp.zeros((3, 4))
    np.testing.assert_array_equal(schedule(confidence, policy="fixed"), [4, 4, 4])
    np.testing.assert_array_equal(schedule(confidence, policy="none"), [0, 0, 0])


def test_ties_go_by_row_and_position():
    confidence = jnp.array([[0.5, 1.0], [1.0, 0.5]])
    for capacity, expected in ((3, [0, 1]), (4, [1, 1]), (5, [2, 1]), (6, [2, 2])):
        lengths = schedule(confidence, policy="delayed", capacity=capacity)
        np.testing.assert_array_equal(lengths, expected)


def test_no_drafts_no_lengths():
    for policy in ("none", "causal"):
        lengths = schedule(jnp.zeros((2, 0)), jnp.ones(3), policy=policy)
        np.testing.assert_array_equal(lengths, [0, 0])


def test_no_active_rows():
    idle = jnp.zeros(2, bool)
    confidence = jnp.ones((2, 3))
    lengths = schedule(confidence, jnp.ones(9), policy="causal", active=idle, capacities=(2, 8))
    np.testing.assert_array_equal(lengths, [0, 0])
    assert best_capacity(confidence, jnp.ones(9), idle) == 0


@pytest.mark.parametrize("policy", ["threshold", "causal", "delayed"])
def test_what_a_policy_lacks_is_an_error(policy):
    with pytest.raises(InputError, match=f"policy='{policy}': expected"):
        schedule(jnp.ones((2, 3)), policy=policy)


def test_an_unknown_policy_is_an_error():
    with pytest.raises(InputError, match="policy='all': expected one of none, fixed"):
        schedule(jnp.ones((2, 3)), policy="all")


def test_a_short_table_is_an_error():
    with pytest.raises(InputError, match="up to 7 tokens: expected 8, 2 rows of 4"):
        schedule(jnp.ones((2, 3)), jnp.ones(8), policy="causal")
    with pytest.raises(InputError, match="up to 7 tokens: expected 8, 2 rows of 4"):
        best_capacity(jnp.ones((2, 3)), jnp.ones(8), jnp.ones(2, bool))


def test_executables():
    sizes = (2, 5, 9)
    for tokens, expected in ((0, 2), (2, 2), (3, 5), (5, 5), (6, 9), (9, 9), (12, 9)):
        assert scheduler.executable(jnp.int32(tokens), sizes) == expected


# Two rows of two tokens, with coupled lengths: everything that can happen in a round, enumerated.
TARGET = np.array([[0.7, 0.3], [0.4, 0.6]])  # p_t of the next token, by the token before
DRAFTER = np.array([[0.5, 0.5], [0.8, 0.2]])
BELIEF = np.array([[0.9, 0.3], [0.15, 0.8]])  # c_k by (x_{k-1}, ...): gives earlier drafts away


def confidences(block, anchor):
    """c_1 from the anchor, c_k from the drafts before it."""
    before = (anchor, *block[:-1])
    return [BELIEF[x, k % 2] for k, x in enumerate(before)]


def outcomes(block, anchor, length):
    """(chance, tokens) of what a row emits, given its block and verified length."""
    alive, before, accepted = 1.0, anchor, ()
    for x in block[:length]:
        p, q = TARGET[before], DRAFTER[before]
        ok = min(1.0, p[x] / q[x])
        if ok < 1:
            rest = np.maximum(p - q, 0)
            for y, share in enumerate(rest / rest.sum()):
                yield alive * (1 - ok) * share, (*accepted, y)
        alive, before, accepted = alive * ok, x, (*accepted, x)
    for y, share in enumerate(TARGET[before]):
        yield alive * share, (*accepted, y)


def continued(tokens, anchor, depth):
    """Chances of all sequences of `depth` tokens that begin with `tokens`, by the target."""
    if len(tokens) >= depth:
        yield 1.0, tokens[:depth]
        return
    before = tokens[-1] if tokens else anchor
    for y, share in enumerate(TARGET[before]):
        for chance, whole in continued((*tokens, y), anchor, depth):
            yield share * chance, whole


def joint_distribution(lengths_of, anchors=(0, 1), size=2):
    """Chances of both rows' next `size` + 1 tokens, [2] * (2 (size + 1)), by enumeration."""
    depth = size + 1
    total = np.zeros([2] * (2 * depth))
    blocks = list(itertools.product(range(2), repeat=size))
    pairs = list(itertools.product(blocks, blocks))
    c = np.array(
        [[confidences(b, a) for b, a in zip(pair, anchors, strict=True)] for pair in pairs]
    )
    lengths = lengths_of(c.astype(np.float32))
    for pair, both in zip(pairs, lengths, strict=True):
        drawn = np.prod(
            [
                DRAFTER[before, x]
                for block, anchor in zip(pair, anchors, strict=True)
                for before, x in zip((anchor, *block), block, strict=False)
            ]
        )
        rows = [
            [
                (chance * more, whole)
                for chance, tokens in outcomes(block, anchor, int(n))
                for more, whole in continued(tokens, anchor, depth)
            ]
            for block, anchor, n in zip(pair, anchors, both, strict=True)
        ]
        for (p0, t0), (p1, t1) in itertools.product(*rows):
            total[t0 + t1] += drawn * p0 * p1
    return total


def exact_distribution(anchors=(0, 1), size=2):
    total = np.zeros([2] * (2 * (size + 1)))
    for (p0, t0), (p1, t1) in itertools.product(
        *[list(continued((), a, size + 1)) for a in anchors]
    ):
        total[t0 + t1] = p0 * p1
    return total


STAIRS = np.array([1, 1, 1, 0.62, 0.62, 0.45, 0.45], np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "causal"},
        {"policy": "causal", "capacities": (2, 4, 6)},
        {"policy": "causal", "capacities": (3, 6)},
        {"policy": "threshold", "threshold": 0.5},
        *({"policy": "delayed", "capacity": n} for n in range(2, 7)),
    ],
    ids=str,
)
def test_coupled_rows_keep_the_target_distribution(settings):
    for sps in (STAIRS, np.array([1, 1, 0.9, 0.8, 0.7, 0.55, 0.5], np.float32)):
        run = jax.jit(jax.vmap(lambda c, sps=sps: schedule(c, jnp.array(sps), **settings)))
        found = joint_distribution(run)
        assert abs(found - exact_distribution()).max() < 1e-9


def test_an_argmax_over_the_same_round_does_not():
    def lengths(c):
        def one(c):
            active = jnp.ones(2, bool)
            capacity = best_capacity(survival(c), jnp.array(STAIRS), active)
            return schedule(c, policy="delayed", capacity=capacity)

        return jax.jit(jax.vmap(one))(c)

    assert abs(joint_distribution(lengths) - exact_distribution()).max() > 1e-3
