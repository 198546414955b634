"""Losslessness: by exact enumeration in float64, and by statistics of the real sampling code."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gammaincc

from dspark_jax.config import HEADS
from dspark_jax.drafters.dspark import draft_block
from dspark_jax.flat import pack
from dspark_jax.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    Draft,
    Sampling,
    round_noise,
    warp,
)
from dspark_jax.scheduler import schedule
from dspark_jax.verify import accepts, residual, verify_greedy, verify_sampled

pytestmark = pytest.mark.usefixtures("quick_compile")

jit_draft_block = jax.jit(draft_block)
jit_verify = jax.jit(verify_sampled)
jit_warp = jax.jit(warp)


def settings(rows, temperature, top_k=0, top_p=1.0, min_p=0.0):
    full = lambda x: jnp.full(rows, x)  # noqa: E731
    return Sampling(full(temperature), full(top_k), full(top_p), full(min_p))


# Exact enumeration: V = 3 tokens, K = 2 drafts, one round.

V, K = 3, 2
ALMOST_ONE = np.nextafter(1.0, 0.0)


def as_float64(tree):
    """Numbers in float64; ids stay ids."""

    def widen(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, jnp.float64) if floating else jnp.asarray(x)

    return jax.tree.map(widen, tree)


class Round:
    """One round of every possible draft, its noise chosen instead of drawn.

    The code under test is a function of its noise alone: which noise leads to which outcome is
    found by bisection, and lengths of intervals of uniform noise are probabilities.
    """

    def __init__(self, models, setting, rng):
        self.drafter = as_float64(models.drafter)
        self.setting, self.size = setting, models.drafter_config.block_size
        self.base, self.hidden = rng.normal(size=(self.size, V)), rng.normal(size=(self.size, 16))
        # A confident first slot, so that a threshold can tell second slots apart.
        weight = np.asarray(self.drafter.confidence.weight)[:16]
        self.hidden[0] += 8 * weight / (weight @ weight)
        self.anchor = 1
        self.drafts = np.array(list(itertools.product(range(V), repeat=self.size)))  # [V^K, K]
        # The target: any table of next-token logits by what was drafted so far.
        self.tables = [2 * rng.normal(size=(V,) * (k + 1)) for k in range(self.size + 1)]
        self.p = [self.warp(t) for t in self.tables]
        self.draft, self.q = self.force_drafts()

    def warp(self, logits):
        rows = logits.reshape(-1, V)
        return np.asarray(jit_warp(rows, settings(len(rows), *self.setting))).reshape(logits.shape)

    def propose(self, noise):
        rows = len(self.drafts)
        tile = lambda x: jnp.broadcast_to(x, (rows, *x.shape))  # noqa: E731
        draft = jit_draft_block(
            self.drafter,
            tile(self.base),
            tile(self.hidden),
            jnp.full(rows, self.anchor, jnp.int32),
            settings(rows, *self.setting),
            jnp.asarray(noise),
        )
        assert draft.probs.dtype == jnp.float64
        return draft

    def force_drafts(self):
        """The draft of each row, and its probability (0 where a token has none)."""
        noise = np.zeros(self.drafts.shape)
        rows = np.arange(len(self.drafts))
        for k in range(self.size):
            probs = np.asarray(self.propose(noise).probs)[:, k]
            own = probs[rows, self.drafts[:, k]]
            noise[:, k] = np.cumsum(probs, axis=1)[rows, self.drafts[:, k]] - own / 2
        draft = self.propose(np.clip(noise, 0, ALMOST_ONE))
        q = np.take_along_axis(np.asarray(draft.probs), self.drafts[..., None], 2)[..., 0].prod(1)
        np.testing.assert_array_equal(np.asarray(draft.tokens)[q > 0], self.drafts[q > 0])
        np.testing.assert_allclose(q.sum(), 1, atol=1e-12)
        return draft, q

    def output(self, lengths):
        """Joint distribution [V, .., V] of the next K + 1 tokens, the target completing them."""
        rows = np.arange(len(self.drafts))
        tokens = np.column_stack([np.full(len(rows), self.anchor), self.draft.tokens])
        flat = pack(
            jnp.asarray(tokens), jnp.asarray(1 + lengths), jnp.zeros(len(rows), int), tokens.size
        )
        x = np.asarray(self.draft.tokens).T
        judges = [np.broadcast_to(self.tables[0], (len(rows), V))]
        judges += [self.tables[k][tuple(x[:k])] for k in range(1, self.size + 1)]
        logits = jnp.asarray(np.stack(judges, axis=1).reshape(-1, V))

        sampling = settings(len(rows), *self.setting)
        chances, below, happens = map(np.asarray, bisect(logits, flat, self.draft, sampling))
        token = np.diff(below, axis=1, prepend=0, append=1)  # [K + 1, V, rows]
        joint = np.zeros((V,) * (self.size + 1))
        for k in range(self.size + 1):  # k accepted drafts
            weight = self.q * np.prod(chances[:k], axis=0)
            weight = weight * (1 - chances[k] if k < self.size else 1)
            assert (weight[~happens[k]] < 1e-12).all()
            for r, v in itertools.product(np.flatnonzero(happens[k]), range(V)):
                prefix = (*self.drafts[r, :k], v)
                rest = np.ones(())
                for known in range(len(prefix), self.size + 1):
                    rest = rest[..., None] * self.p[known][prefix]
                joint[prefix] += weight[r] * token[k, v, r] * rest
        return joint

    def target(self):
        joint = self.p[0]
        for k in range(1, self.size + 1):
            joint = joint[..., None] * self.p[k]
        return joint


@jax.jit
def bisect(logits, flat, draft, sampling):
    """Chances of what verification may do, as lengths of intervals of its noise.

    Returns:
      [K, rows] chance that draft k is accepted when those before it are;
      [K + 1, V - 1, rows] chance that the token behind k accepted drafts is at most v;
      [K + 1, rows] whether k drafts can be all that is accepted.
    """
    size = draft.tokens.shape[1]
    rows, slots = len(flat.offset), np.arange(size)
    decisions = [(k, -1) for k in range(size)]
    tokens = [(k, v) for k in range(size + 1) for v in range(V - 1)]
    k, v = np.array(decisions + tokens).T[:, :, None]  # [questions, 1] each

    def ask(u):
        at = jnp.where(v < 0, u, ALMOST_ONE)  # drafts before k are accepted, k by u or not
        accept = jnp.where(slots == k[..., None], at[..., None], 0.0)
        last = jnp.where(v < 0, 0.0, u)
        noise = jnp.full((len(k), 3, rows, size), jnp.nan).at[:, ACCEPT].set(accept)
        noise = noise.at[:, RESIDUAL].set(jnp.broadcast_to(last[..., None], accept.shape))
        judge = lambda noise: verify_sampled(logits, flat, draft, sampling, noise)  # noqa: E731
        out = jax.vmap(judge)(noise)
        return jnp.where(v < 0, out.accepted > k, out.token <= v), out.accepted

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        held, _ = ask(middle)
        return jnp.where(held, middle, low), jnp.where(held, high, middle)

    start = jnp.zeros((len(k), rows)), jnp.ones((len(k), rows))
    low, _ = jax.lax.fori_loop(0, 45, halve, start)
    happens = ask(start[0])[1][size :: V - 1] == np.arange(size + 1)[:, None]
    return low[:size], low[size:].reshape(size + 1, V - 1, rows), happens


@pytest.mark.parametrize("setting", [(1.0,), (2.0, 2, 0.97, 0.02)], ids=["plain", "warped"])
@pytest.mark.parametrize("head", HEADS)
def test_one_round_has_the_distribution_of_the_target(tiny_pair, head, setting):
    models = tiny_pair(head, vocab=V, block_size=K)
    with jax.enable_x64(True):
        round_ = Round(models, setting, np.random.default_rng(1))
        assert (round_.q > 0).sum() >= 4
        expected = round_.target()
        for length in range(K + 1):
            error = np.abs(round_.output(np.full(V**K, length)) - expected).max()
            assert error < 1e-9, f"verified length {length}"

        # Lengths by the drafter's own confidence, which has seen x_1 but not x_2.
        confidence = jax.nn.sigmoid(round_.draft.confidence_logits)
        least = float(np.mean(np.unique(confidence[:, 1])[:2]))
        lengths = np.asarray(schedule(confidence, policy="threshold", threshold=least))
        if head != "none":
            assert len(set(lengths[round_.q > 0])) > 1
        assert np.abs(round_.output(lengths) - expected).max() < 1e-9

        # Lengths that have seen x_2 itself: the enumeration would find that out.
        likely = np.argmax(round_.draft.probs[:, 1], axis=-1)
        lengths = np.where(round_.drafts[:, 1] == likely, 2, 1)
        assert np.abs(round_.output(lengths) - expected).max() > 1e-3


# Statistics: many rows, the real noise, everything in one call.

VOCAB, SLOTS, ROWS = 8, 3, 20_000
TRUNCATED = (0.8, 6, 0.95, 0.02)


@jax.jit
def play(drafter, base, hidden, table, keys, reuse):
    """One round of many rows with the same context. `reuse` draws the residual by draft noise."""
    rows = len(keys)
    tile = lambda x: jnp.broadcast_to(x, (rows, *x.shape))  # noqa: E731
    noise = round_noise(keys, jnp.full(rows, 17), SLOTS)
    anchor, sampling = jnp.zeros(rows, jnp.int32), settings(rows, *TRUNCATED)
    draft = draft_block(drafter, tile(base), tile(hidden), anchor, sampling, noise[DRAFT])
    tokens = jnp.concatenate([anchor[:, None], draft.tokens], axis=1)
    counts, start = jnp.full(rows, 1 + SLOTS), jnp.zeros(rows, int)
    flat = pack(tokens, counts, start, rows * (1 + SLOTS))
    noise = noise.at[RESIDUAL].set(jnp.where(reuse, noise[DRAFT], noise[RESIDUAL]))
    logits = table[flat.slot, flat.tokens]
    return draft.tokens, verify_sampled(logits, flat, draft, sampling, noise)


def p_value(counts, expected):
    """Of a chi-square test; cells that are expected fewer than 5 times are one cell."""
    assert counts[expected == 0].sum() == 0
    few = expected < 5
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], max(expected[few].sum(), 1e-9))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return gammaincc((len(expected) - 1) / 2, statistic / 2)


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_sampled_rounds_have_the_distribution_of_the_target(tiny_pair, head):
    drafter = tiny_pair(head, vocab=VOCAB, block_size=SLOTS).drafter
    rng = np.random.default_rng(2)
    base, hidden = rng.normal(size=(SLOTS, VOCAB)), rng.normal(size=(SLOTS, 16))
    table = rng.normal(size=(SLOTS + 1, VOCAB, VOCAB)).astype(np.float32)
    # The target is near the drafter's first distribution after the anchor, not equal to it.
    table[0, 0] += base[0]
    keys = jax.random.split(jax.random.key(3), ROWS)
    p = np.asarray(jit_warp(table.reshape(-1, VOCAB), settings(table[..., 0].size, *TRUNCATED)))
    p = np.float64(p).reshape(table.shape)
    expected = ROWS * p[0, 0][:, None] * p[1]

    def outcome(reuse):
        drafts, verdict = play(
            drafter, jnp.float32(base), jnp.float32(hidden), table, keys, np.bool_(reuse)
        )
        drafts, accepted, token = np.asarray(drafts), *map(np.asarray, jax.tree.leaves(verdict))
        assert (np.bincount(accepted, minlength=SLOTS + 1) > 100).all()  # rejected at every slot
        first = np.where(accepted > 0, drafts[:, 0], token)
        second = np.where(accepted > 1, drafts[:, 1], token)
        # Rounds of one token are continued by the target.
        draws = (rng.random((ROWS, 1)) > np.cumsum(p[1][first], axis=1)).sum(1)
        second = np.where(accepted > 0, second, np.minimum(draws, VOCAB - 1))
        return p_value(np.bincount(first * VOCAB + second, minlength=VOCAB**2), expected.ravel())

    assert outcome(reuse=False) > 1e-3
    assert outcome(reuse=True) < 1e-9  # the test would notice noise that is used twice


# Single decisions.


def make_round(rng, *, rows=120, size=3, vocab=12):
    """Random drafts, their distributions and target logits [rows, 1 + size, vocab], much alike."""
    scores = 2 * rng.normal(size=(rows, size + 1, vocab)).astype(np.float32)
    q = np.exp(scores[:, :size]) / np.exp(scores[:, :size]).sum(-1, keepdims=True)
    tokens = np.argmax(scores[:, :size], axis=-1).astype(np.int32)
    noisy = scores + 0.7 * rng.normal(size=scores.shape).astype(np.float32)
    return Draft(jnp.asarray(tokens), jnp.asarray(q), None), noisy


def test_verdicts_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    draft, scores = make_round(rng)
    rows, size = draft.tokens.shape
    lengths = rng.integers(0, size + 1, rows)
    tokens = jnp.pad(draft.tokens, ((0, 0), (1, 0)))
    flat = pack(tokens, jnp.asarray(1 + lengths), jnp.zeros(rows, int), tokens.size)
    noise = rng.random((3, rows, size)).astype(np.float32)
    sampling = settings(rows, 1.0)
    out = jit_verify(scores.reshape(tokens.size, -1), flat, draft, sampling, noise)
    out, drafts, q = jax.tree.map(np.asarray, (out, draft.tokens, draft.probs))
    p = np.exp(np.float64(scores))
    p /= p.sum(-1, keepdims=True)
    seen = set()
    for r in range(rows):
        k = 0
        while k < lengths[r]:
            x = drafts[r, k]
            if not noise[ACCEPT, r, k] < p[r, k, x] / q[r, k, x]:
                break
            k += 1
        weights = p[r, k]
        if k < lengths[r]:
            weights = np.maximum(p[r, k] - q[r, k], 0)
        sums = np.cumsum(weights)
        token = np.searchsorted(sums, noise[RESIDUAL, r, 0] * sums[-1], side="right")
        assert (out.accepted[r], out.token[r]) == (k, token)
        seen.add((lengths[r], k))
    assert seen == {(length, k) for length in range(size + 1) for k in range(length + 1)}


def test_greedy_verdicts_are_those_of_a_loop():
    rng = np.random.default_rng(1)
    draft, scores = make_round(rng)
    rows, size = draft.tokens.shape
    lengths = rng.integers(0, size + 1, rows)
    tokens = jnp.pad(draft.tokens, ((0, 0), (1, 0)))
    flat = pack(tokens, jnp.asarray(1 + lengths), jnp.zeros(rows, int), tokens.size)
    greedy = Draft(draft.tokens, None, None)
    out = jax.jit(verify_greedy)(scores.reshape(tokens.size, -1), flat, greedy)
    out, drafts = jax.tree.map(np.asarray, (out, draft.tokens))
    best = scores.argmax(-1)
    for r in range(rows):
        k = 0
        while k < lengths[r] and drafts[r, k] == best[r, k]:
            k += 1
        assert (out.accepted[r], out.token[r]) == (k, best[r, k])
    assert set(np.asarray(out.accepted)) == {0, 1, 2, 3}


def test_a_token_without_probability_is_never_accepted():
    assert not accepts(jnp.float32(0), jnp.float32(1), jnp.float32(0))
    assert not accepts(jnp.float32(0), jnp.float32(0), jnp.float32(0))
    assert accepts(jnp.float32(1e-30), jnp.float32(1), jnp.float32(0))
    # Through the whole of verification: top-k leaves the drafted token nothing.
    draft = Draft(jnp.array([[2]], jnp.int32), jnp.array([[[0, 0, 1.0, 0]]]), None)
    flat = pack(jnp.array([[0, 2]]), jnp.array([2]), jnp.array([0]), 2)
    logits = jnp.array([[3.0, 2.0, 1.0, 0.0]] * 2)
    for u in (0.0, 0.5):
        out = jit_verify(logits, flat, draft, settings(1, 1.0, 2), jnp.full((3, 1, 1), u))
        assert out.accepted[0] == 0
        assert out.token[0] == 0


def test_residual_falls_back_to_the_target_when_rounding_leaves_nothing():
    p, q = jnp.array([[0.5, 0.5], [0.7, 0.3]]), jnp.array([[0.5, 0.5], [0.2, 0.8]])
    np.testing.assert_allclose(residual(p, q), [[0.5, 0.5], [0.5, 0.0]], rtol=1e-6)


def test_equal_distributions_accept_every_draft():
    rng = np.random.default_rng(4)
    draft, scores = make_round(rng)
    draft = draft.replace(probs=jax.nn.softmax(scores[:, :3]))
    tokens = jnp.pad(draft.tokens, ((0, 0), (1, 0)))
    rows, size = draft.tokens.shape
    flat = pack(tokens, jnp.full(rows, 1 + size), jnp.zeros(rows, int), tokens.size)
    noise = rng.random((3, rows, size)).astype(np.float32)
    logits = scores.reshape(tokens.size, -1)
    out = jit_verify(logits, flat, draft, settings(rows, 1.0), noise)
    np.testing.assert_array_equal(out.accepted, 3)


def test_greedy_rows_of_a_mixed_batch_compare():
    rng = np.random.default_rng(5)
    draft, scores = make_round(rng)
    rows, size = draft.tokens.shape
    is_greedy = np.arange(rows) % 2 == 0
    one_hot = jax.nn.one_hot(draft.tokens, scores.shape[-1])
    draft = draft.replace(probs=jnp.where(is_greedy[:, None, None], one_hot, draft.probs))
    sampling = settings(rows, 1.0, 5, 0.9, 0.05)
    sampling = sampling.replace(temperature=jnp.where(is_greedy, 0.0, 1.0))
    tokens = jnp.pad(draft.tokens, ((0, 0), (1, 0)))
    flat = pack(tokens, jnp.full(rows, 1 + size), jnp.zeros(rows, int), tokens.size)
    logits = scores.reshape(tokens.size, -1)
    expected = jax.jit(verify_greedy)(logits, flat, draft)
    verdicts = []
    for _ in range(2):
        noise = rng.random((3, rows, size)).astype(np.float32)
        out = jit_verify(logits, flat, draft, sampling, noise)
        np.testing.assert_array_equal(out.accepted[is_greedy], expected.accepted[is_greedy])
        np.testing.assert_array_equal(out.token[is_greedy], expected.token[is_greedy])
        verdicts.append(np.asarray(out.token))
    assert (verdicts[0] != verdicts[1]).any()  # the others do draw
    assert 0 < expected.accepted[is_greedy].mean() < size


@pytest.mark.parametrize("spare", [0, 3])
def test_a_close_packed_buffer_gives_the_same_verdicts(spare):
    rng = np.random.default_rng(6)
    draft, scores = make_round(rng)
    rows, size = draft.tokens.shape
    counts = jnp.asarray(1 + np.arange(rows) % (size + 1))
    tokens, start = jnp.pad(draft.tokens, ((0, 0), (1, 0))), jnp.arange(rows)
    aligned = pack(tokens, counts, start, tokens.size)
    packed = pack(tokens, counts, start, int(counts.sum()) + spare)
    assert len(packed.tokens) < tokens.size
    noise = rng.random((3, rows, size)).astype(np.float32)
    mixed = settings(rows, 0.0).replace(temperature=jnp.asarray(np.arange(rows) % 3 / 2))
    for flat in (aligned, packed):
        logits = flat.to_flat(jnp.asarray(scores))
        verdicts = [
            jax.jit(verify_greedy)(logits, flat, draft),
            jit_verify(logits, flat, draft, mixed, noise),
        ]
        if flat is aligned:
            expected = verdicts
    jax.tree.map(np.testing.assert_array_equal, verdicts, expected)
    assert len(set(np.asarray(expected[1].accepted))) > 2


def test_without_drafts_the_token_is_the_targets():
    """Prefill and plain decoding: no drafts, no distributions of theirs."""
    logits = jnp.log(jnp.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]))
    nothing = Draft(jnp.zeros((2, 0), jnp.int32), None, None)
    flat = pack(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, int), jnp.zeros(2, int), 2)
    out = verify_greedy(logits, flat, nothing)
    np.testing.assert_array_equal(out.token, [1, 2])
    for u, token in ((0.1, [0, 1]), (0.74, [1, 2]), (0.76, [2, 2])):
        noise = jnp.full((3, 2, 1), u)
        out = jit_verify(logits, flat, nothing, settings(2, 1.0), noise)
        np.testing.assert_array_equal(out.accepted, 0)
        np.testing.assert_array_equal(out.token, token)
