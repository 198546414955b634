"""Continuous batching: every request gets what it gets alone, whoever sits beside it."""

import collections
import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dspark_jax import batching, decode, generation, plans, prefill, prompt_reader
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import NO_FACTS, Batch, Facts
from dspark_jax.config import InputError
from dspark_jax.costs import CostTable
from dspark_jax.generation import Pair
from dspark_jax.plans import Plan
from dspark_jax.request import Request
from dspark_jax.row import Row
from dspark_jax.state import cache_length
from dspark_jax.targets import dense

pytestmark = pytest.mark.usefixtures("quick_compile")

SHAPE = BatchShape(rows=3, length=64, chunk=8)


def text_of(ids):
    return "".join(chr(ord("a") + i) for i in ids)


def mixed_requests(**settings):
    rng = np.random.default_rng(1)
    sizes = zip(rng.integers(1, 30, 11), rng.integers(1, 25, 11), strict=True)
    return [
        Request(rng.integers(0, 32, prompt).tolist(), max_new_tokens=int(limit), **settings)
        for prompt, limit in sizes
    ]


def config(models, requests, **settings):
    return generation.decode_config(models, requests, **settings)


def pair(models):
    return Pair(models, SimpleNamespace(decode=text_of))


def decoded(models, requests, cfg, *, shape=SHAPE, facts=NO_FACTS):
    done = {}
    for rows in batching.serve(models, requests, shape, cfg, text_of, facts=facts):
        for row in rows:
            if row.finish_reason is not None:
                assert row.number not in done, "a request came to its end twice"
                done[row.number] = row
    assert sorted(done) == list(range(len(requests)))
    return [done[number] for number in range(len(requests))]


def tokens(rows):
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("policy", ["none", "fixed", "threshold"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 9, "seed": 4}])
def test_refilled_rows_get_what_each_gets_alone(tiny_pair, policy, settings):
    models = tiny_pair("vanilla")
    requests = mixed_requests(**settings)
    threshold = 0.5 if policy == "threshold" else None
    cfg = config(models, requests, policy=policy, threshold=threshold)
    together = decoded(models, requests, cfg)
    alone = [decoded(models, [request], cfg)[0] for request in requests]
    assert tokens(together) == tokens(alone)
    assert [r.accepted_lengths for r in together] == [r.accepted_lengths for r in alone]
    for request, row in zip(requests, together, strict=True):
        assert len(row.token_ids) == request.max_new_tokens == 1 + sum(row.accepted_lengths)
        assert row.finish_reason == "length"


def test_a_slot_used_again_by_a_shorter_prompt(tiny_pair):
    """Nothing of the longer prompt that sat there before is seen."""
    models = tiny_pair("gated")
    long, short = Request([7] * 30, max_new_tokens=20), Request([3], max_new_tokens=20)
    cfg = config(models, [long, short])
    shape = dataclasses.replace(SHAPE, rows=1)
    _, after = decoded(models, [long, short], cfg, shape=shape)
    assert after.token_ids == decoded(models, [short], cfg, shape=shape)[0].token_ids


@pytest.mark.slow
def test_a_block_may_pass_the_end_of_the_limit_but_not_of_the_cache(tiny_pair):
    """The smallest cache that `plan` allows: the last block ends where it does."""
    models = tiny_pair("vanilla")
    for limit in range(10, 14):
        request = Request([5] * 6, max_new_tokens=limit)
        cfg = config(models, [request])
        least = cache_length(6, limit, 3)
        tight = BatchShape(rows=1, length=least, chunk=least)
        wide = BatchShape(rows=1, length=64, chunk=8)
        assert tokens(decoded(models, [request], cfg, shape=tight)) == tokens(
            decoded(models, [request], cfg, shape=wide)
        )


def test_a_long_prompt_does_not_hold_the_others_up(tiny_pair, monkeypatch):
    """It is read in parts, between which the rows beside it go on."""
    monkeypatch.setattr(prompt_reader, "CHUNKS_PER_CALL", 1)
    monkeypatch.setattr(batching, "ROUNDS_BETWEEN", 1)
    models = tiny_pair("vanilla")
    short = [Request([1, 2], max_new_tokens=40), Request([4], max_new_tokens=1)]
    long = Request(list(range(30)), max_new_tokens=5)
    cfg = config(models, [*short, long], policy="none")
    shape = BatchShape(rows=2, length=64, chunk=8)
    steps = [
        {row.number: len(row.token_ids) for row in rows}
        for rows in batching.serve(models, [*short, long], shape, cfg, text_of)
    ]
    begun = next(i for i, step in enumerate(steps) if 2 in step)
    # 30 positions are 4 chunks: three steps of the other row lie in between; the last is the seat.
    assert [step[0] for step in steps[: begun + 1] if 0 in step] == [1, 2, 3, 4, 4]
    assert steps[-1][0] == 40


def test_samples_of_a_prompt_share_its_prefill(tiny_pair, monkeypatch):
    models, calls = tiny_pair("vanilla"), []
    read = prefill.read
    monkeypatch.setattr(prefill, "read", lambda *a, **k: calls.append(1) or read(*a, **k))
    prompt = [3, 1, 4, 1, 5]
    samples = [Request(prompt, max_new_tokens=9, temperature=1.5, stream=n) for n in range(5)]
    cfg = config(models, samples)
    together = decoded(models, samples, cfg)
    assert calls == [1]
    assert tokens(together) == [decoded(models, [s], cfg)[0].token_ids for s in samples]
    assert len({tuple(t) for t in tokens(together)}) == 5


def test_rows_go_on_until_a_place_is_free(tiny_pair):
    """While prompts wait, a call ends with the first row that is done; otherwise with the last."""
    models = tiny_pair("vanilla")
    requests = [Request([n], max_new_tokens=limit) for n, limit in enumerate((5, 20, 30))]
    cfg = config(models, requests, policy="none")
    batch = Batch(models, SHAPE, cfg, text_of, [Row(n, r) for n, r in enumerate(requests)])
    batch.settle()
    batch.run(64, until_free=True)
    assert batch.free == [0]
    batch.run(64)
    assert batch.free == [0, 1, 2]


def test_stop_strings_end_a_completion(tiny_pair):
    models = tiny_pair("vanilla")
    free_run = Request([1, 2], max_new_tokens=30)
    cfg = config(models, [free_run])
    (free,) = decoded(models, [free_run], cfg)
    text = text_of(free.token_ids)
    stop = text[8:11]
    first = text.index(stop)
    request = dataclasses.replace(free_run, stop=("NOT THERE", stop))
    others = mixed_requests()
    found, *beside = decoded(models, [request, *others], cfg)
    assert found.token_ids == free.token_ids[: first + 3]
    assert (found.finish_reason, found.stopped_at) == ("stop", stop)
    assert 1 + sum(found.accepted_lengths) == len(found.token_ids)
    assert len(found.accepted_lengths) == len(found.verified_lengths) == len(found.accepted_drafts)
    assert found.drafted_lengths == [3] * len(found.accepted_lengths)
    assert all(found.accepted_lengths)
    assert tokens(beside) == tokens(decoded(models, others, cfg))
    done = generation.completion(found, pair(models), cfg)
    assert done.text == text[:first]


def test_of_several_stop_strings_the_first_that_is_complete_counts(tiny_pair):
    """Whatever the length of a round: plain decoding sees it first."""
    models = tiny_pair("vanilla")
    free_run = Request([1, 2], max_new_tokens=30)
    text = text_of(decoded(models, [free_run], config(models, [free_run]))[0].token_ids)
    start = next(i for i in range(4, 20) if text.index(text[i + 2]) == i + 2)
    stop = (text[start : start + 4], text[start + 2])
    request = dataclasses.replace(free_run, stop=stop)
    for policy in ("none", "fixed"):
        (found,) = decoded(models, [request], config(models, [request], policy=policy))
        assert found.stopped_at == stop[1]
        assert text_of(found.token_ids) == text[: start + 3]


def test_logprobs_are_the_targets(tiny_pair):
    """Those of a whole pass over prompt and completion, at temperature 1 whatever the request's."""
    models = tiny_pair("vanilla")
    requests = [
        Request([1, 2, 3], max_new_tokens=12),
        Request([9], max_new_tokens=15, temperature=0.7, top_k=5),
    ]
    cfg = config(models, requests, logprobs=True)
    for request, row in zip(requests, decoded(models, requests, cfg), strict=True):
        ids = np.array([[*request.token_ids, *row.token_ids]])
        hidden = dense.forward(models.target, ids, cfg=models.target_config)
        logits = np.asarray(dense.logits(models.target, hidden.final), np.float64)[0]
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        start = len(request.token_ids)
        expected = [logits[start + i - 1, token] for i, token in enumerate(row.token_ids)]
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_nothing_compiles_after_warm_up(tiny_pair):
    models = tiny_pair("vanilla")
    requests = mixed_requests()
    cfg = config(models, requests)
    shape = BatchShape(rows=2, length=80, chunk=8)
    assert batching.warm_up(models, shape, cfg, refill=True) > 0
    programs = (decode.decode_rounds, prefill.read, batching._read_prompts, batching._seat)
    compiled = [program._cache_size() for program in programs]
    decoded(models, requests, cfg, shape=shape)
    assert [program._cache_size() for program in programs] == compiled


def test_no_requests(tiny_pair):
    models = tiny_pair("vanilla")
    cfg = config(models, [Request([1])])
    assert list(batching.serve(models, [], SHAPE, cfg, text_of)) == []


# --- Policies that weigh drafts ----------------------------------------------------------------


def facts(models, rows, cost):
    """Costs of every round by a function of its plan."""
    choices = plans.ladder(rows, models.drafter_config.block_size)
    return Facts(CostTable(rows, {plan: cost(plan) for plan in choices}))


def only(models, rows, chosen):
    """Facts by which one plan alone pays."""
    return facts(models, rows, lambda plan: 1.0 if plan == chosen else 1e9)


@pytest.mark.parametrize("drafts", [0, 3])
def test_nothing_compiles_after_warm_up_of_a_lazy_drafter(tiny_pair, drafts):
    models = tiny_pair("vanilla")
    requests = mixed_requests()
    cfg = config(models, requests, policy="delayed")
    shape = BatchShape(rows=2, length=96, chunk=8)
    known = only(models, 2, plans.whole(2, drafts))
    batching.warm_up(models, shape, cfg, refill=True, facts=known)
    programs = (
        *(decode.decode_rounds, decode.catch_up, prefill.read, prefill.catch_up),
        *(decode.look, batching._read_prompts, batching._seat),
    )
    compiled = [program._cache_size() for program in programs]
    rows = decoded(models, requests, cfg, shape=shape, facts=known)
    assert {n for row in rows for n in row.drafted_lengths} == {drafts}
    assert [program._cache_size() for program in programs] == compiled


@pytest.mark.parametrize("caught_up", [False, True])
def test_a_newcomer_of_a_lazy_drafter_is_taken_in_later(tiny_pair, caught_up):
    """Whether or not the drafter had seen its prompt, which other samples of it may have needed."""
    models = tiny_pair("vanilla")
    first, second, third = (
        Request([3, n, 5, *range(n)], max_new_tokens=limit)
        for n, limit in ((4, 3), (9, 40), (12, 40))
    )
    shape = BatchShape(rows=2, length=64, chunk=8)
    cfg = config(models, [first, second, third], policy="delayed")
    known = only(models, 2, Plan(0, 2))
    batch = Batch(models, shape, cfg, text_of, [Row(0, first), Row(1, second)], known)
    while not batch.free:
        batch.run(4, until_free=True)
    assert batch.free == [0]
    if caught_up:
        batch.reader.read_on(third.token_ids)
        batch.reader.catch_up()
    assert batch.admit(Row(2, third))
    batch.run(5)
    assert batch._state.backlog.taken.tolist() == [0, 0]
    found = decode.catch_up(models, batch._state)
    held = found.position.tolist()
    assert found.backlog.taken.tolist() == held
    texts = [[*row.request.token_ids, *row.token_ids] for _, row in sorted(batch.rows.items())]
    rows = [
        Row(n, Request(text[:size])) for n, (text, size) in enumerate(zip(texts, held, strict=True))
    ]
    fixed = config(models, [row.request for row in rows], policy="fixed")
    fresh = Batch(models, shape, fixed, text_of, rows)._state
    for a, b in zip(*map(jax.tree.leaves, (found.draft_cache, fresh.draft_cache)), strict=True):
        for row, size in enumerate(held):
            np.testing.assert_allclose(a[row, :, :size], b[row, :, :size], atol=2e-4)


def test_rounds_without_drafts_are_looked_at_when_a_trial_is_due(tiny_pair, monkeypatch):
    """Drafts of an untrained pair are given up at once, and tried again behind many rounds."""
    models = tiny_pair("vanilla")
    requests = [Request([3, n], max_new_tokens=41, seed=n) for n in range(8)]
    cfg = config(models, requests, policy="delayed")
    known = facts(models, 1, lambda plan: 2.0 if plan.drafts else 1.0)
    look, looks = decode.look, []

    def counted(*args, **kwargs):
        found, quiet = look(*args, **kwargs)
        looks.append((int(args[4]), int(found.waited), int(quiet)))
        return found, quiet

    monkeypatch.setattr(decode, "look", counted)
    shape = BatchShape(rows=1, length=64, chunk=8)
    rows = decoded(models, requests, cfg, shape=shape, facts=known)
    drafted = [n for row in rows for n in row.drafted_lengths]
    first = drafted.index(0)
    trial = next(i for i in range(first, len(drafted)) if drafted[i])
    # A round of drafts takes two: no sooner than that, and in the first call behind it.
    due = 2 * plans.PATIENCE
    assert due <= trial < due + 40
    assert drafted[trial + 1] == 0
    # Behind the first drafts, when the trial is due, and behind it; requests in between are none.
    assert len(looks) == 3
    assert looks[0][0] == looks[2][0] == 0
    assert looks[1][0] >= looks[0][2]


def test_a_look_forgets_rows_of_others(tiny_pair):
    models = tiny_pair("vanilla")
    first, second, third = (Request([3, n], max_new_tokens=n) for n in (4, 20, 20))
    cfg = config(models, [first, second, third], policy="delayed")
    shape = BatchShape(rows=2, length=64, chunk=8)
    known = only(models, 2, Plan(0, 2))
    batch = Batch(models, shape, cfg, text_of, [Row(0, first), Row(1, second)], known)
    while not batch.free:
        batch.run(4, until_free=True)
    outlook = batch._state.outlook
    outlook = dataclasses.replace(outlook, seen=jnp.full_like(outlook.seen, 7))
    batch._state = dataclasses.replace(batch._state, outlook=outlook)
    assert batch.admit(Row(2, third))
    batch._look()
    assert batch._state.outlook.seen.tolist() == [[0, 0, 0], [7, 7, 7]]


@pytest.mark.slow
def test_every_plan_leaves_greedy_text_alone(tiny_pair):
    """Each of them in turn is the only one that pays: rows take part in passes of any room."""
    models = tiny_pair("vanilla")
    requests = mixed_requests()
    plain = tokens(decoded(models, requests, config(models, requests, policy="none")))
    cfg = config(models, requests, policy="delayed", trace=True)
    verified = {}
    for chosen in plans.ladder(3, 3):
        rows = decoded(models, requests, cfg, facts=only(models, 3, chosen))
        assert tokens(rows) == plain
        assert {len(z) for row in rows for z in row.confidence_logits} <= {chosen.drafts}
        verified[chosen] = sum(sum(row.verified_lengths) for row in rows)
    assert verified[Plan(0, 3)] == 0 < verified[Plan(3, 6)] < verified[Plan(3, 12)]


@pytest.mark.parametrize(
    ("policy", "head"),
    [
        ("causal", "vanilla"),
        ("delayed", "vanilla"),
        ("causal", "rnn"),
        pytest.param("delayed", "rnn", marks=pytest.mark.slow),
        pytest.param("causal", "gated", marks=pytest.mark.slow),
        pytest.param("delayed", "gated", marks=pytest.mark.slow),
    ],
)
def test_policies_that_weigh_leave_greedy_text_alone(tiny_pair, policy, head):
    models = tiny_pair(head)
    requests = mixed_requests()
    plain = tokens(decoded(models, requests, config(models, requests, policy="none")))
    cfg = config(models, requests, policy=policy)
    known = facts(models, 3, lambda plan: 1 + 0.1 * plan.drafts + 0.15 * plan.capacity)
    rows = decoded(models, requests, cfg, facts=known)
    assert tokens(rows) == plain
    lengths = {n for row in rows for n in row.verified_lengths}
    assert len(lengths) > 1, "lengths never varied"


def test_without_costs_they_are_refused(tiny_pair):
    models = tiny_pair("vanilla")
    request = Request([1], max_new_tokens=4)
    cfg = config(models, [request], policy="delayed")
    with pytest.raises(InputError, match="needs a cost table"):
        decoded(models, [request], cfg)
    with pytest.raises(InputError, match="a cost table of 2 rows: expected one of 3"):
        decoded(models, [request], cfg, facts=facts(models, 2, lambda plan: 1.0))


def test_scaled_confidences_decide(tiny_pair):
    """Temperatures of a row's request: so hot that each confidence is a half, or as they are."""
    models = tiny_pair("vanilla")
    requests = [Request([n], max_new_tokens=12) for n in range(4)]
    cfg = config(models, requests, policy="threshold", threshold=0.49, trace=True)
    hot = Facts(scale=lambda request: [1e6] * 3)
    assert {
        n for row in decoded(models, requests, cfg, facts=hot) for n in row.verified_lengths
    } == {3}
    raw = decoded(models, requests, cfg)
    assert {n for row in raw for n in row.verified_lengths} > {0}
    (first, *_) = decoded(models, requests, cfg, facts=hot)
    shown = generation.completion(first, pair(models), cfg, hot)
    np.testing.assert_allclose(
        shown.confidences, np.full((len(first.accepted_lengths), 3), 0.5), atol=1e-4
    )


def test_rows_without_a_request_are_not_scaled(tiny_pair):
    """A calibration of sampled rows alone has nothing to say of them."""
    models, asked = tiny_pair("vanilla"), []
    requests = [Request([n], max_new_tokens=4, temperature=0.8) for n in range(2)]
    cfg = config(models, requests, policy="threshold", threshold=0.49)

    def scale(request):
        asked.append(request)
        return [2.0] * 3

    batching.warm_up(models, SHAPE, cfg, refill=True, facts=Facts(scale=scale))
    assert asked == []
    decoded(models, requests, cfg, facts=Facts(scale=scale))
    assert asked == requests


def chi_square_p(counts, expected):
    """Of a chi-square test; cells that are expected fewer than 5 times are one cell."""
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    keep = wanted > 0
    return stats.chisquare(observed[keep], wanted[keep]).pvalue


@pytest.mark.parametrize(
    "policy",
    [
        "delayed",
        pytest.param("causal", marks=pytest.mark.slow),
        pytest.param("threshold", marks=pytest.mark.slow),
    ],
)
def test_sampled_text_has_the_targets_distribution(tiny_pair, policy):
    """Three tokens of the real engine, through slots that are refilled all the time."""
    vocab, length, count = 6, 3, 4000
    models, prompt = tiny_pair("vanilla", vocab=vocab), [1, 4]
    shape = BatchShape(rows=8, length=16, chunk=8)
    every = np.array(list(itertools.product(range(vocab), repeat=length)))
    ids = np.concatenate([np.tile(prompt, (len(every), 1)), every], axis=1)
    hidden = dense.forward(models.target, ids, cfg=models.target_config)
    logits = np.asarray(dense.logits(models.target, hidden.final), np.float64)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    joint = np.ones(len(every))
    for k in range(length):
        joint *= probs[np.arange(len(every)), len(prompt) - 1 + k, every[:, k]]
    requests = [
        # One more than is looked at: a block is then cut by the limit as well.
        Request(prompt, max_new_tokens=length + n % 3, temperature=1.0, seed=5, stream=n)
        for n in range(count)
    ]
    cfg = config(models, requests, policy=policy, threshold=0.4 if policy == "threshold" else None)
    known = facts(models, 8, lambda plan: 1 + 0.02 * plan.drafts + 0.05 * plan.capacity)
    rows = decoded(models, requests, cfg, shape=shape, facts=known)
    found = np.array([row.token_ids[:length] for row in rows])
    counts = np.bincount(found @ vocab ** np.arange(length)[::-1], minlength=len(every))
    lengths = collections.Counter(n for row in rows for n in row.verified_lengths)
    assert len(lengths) > 1, "lengths never varied"
    assert chi_square_p(counts, count * joint) > 1e-3
    # The test can fail: it tells the target from itself at temperature 1.3.
    flat = joint ** (1 / 1.3)
    assert chi_square_p(counts, count * flat / flat.sum()) < 1e-6


@pytest.fixture(scope="module")
def counter_example(tiny_pair):
    """A pair for which an argmax over the round's own confidences leaks the draft.

    At every place p_t = (.7, .3) and p_d = (.5, .5); c_1 = .8, and c_2 = .9 behind a draft of A
    (token 0), 0 behind B. Without layers a hidden state is 4 times the unit vector of its token:
    0 for A, 1 for the mask, 2 for B.
    """
    models = tiny_pair("vanilla", vocab=4, block_size=2)
    a, b, mask = 0, 1, 3
    width = models.target_config.hidden_size
    nothing = lambda tree: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    embed = jnp.zeros((4, width)).at[[a, b, mask], [0, 2, 1]].set(1)
    lm_head = jnp.full((width, 4), -10.0).at[:, a].set(np.log(0.7) / 4)
    lm_head = lm_head.at[:, b].set(np.log(0.3) / 4)
    target = models.target.replace(
        embed=embed, layers=nothing(models.target.layers), lm_head=lm_head,
        norm=jnp.ones_like(models.target.norm),
    )  # fmt: skip
    # Of the embedding in the head: 0 is always 1, 1 tells A from B.
    w1 = jnp.zeros((4, 16)).at[:, 0].set(1).at[a, 1].set(1).at[b, 1].set(-1)
    w2 = jnp.zeros((16, 4)).at[0, a].set(np.log(0.5 / 0.7)).at[0, b].set(np.log(0.5 / 0.3))
    logit = lambda p: np.log(p / (1 - p))  # noqa: E731
    second = logit(0.9)
    step = (second + 30) / 2
    weight = jnp.zeros(width + 16).at[width + 1].set(step)
    weight = weight.at[jnp.array([0, 2, 1])].set(
        jnp.array([logit(0.8) - step, logit(0.8) + step, second - step]) / 4
    )
    drafter = models.drafter.replace(
        layers=nothing(models.drafter.layers),
        norm=jnp.ones_like(models.drafter.norm),
        head=models.drafter.head.replace(w1=w1, w2=w2),
        confidence=models.drafter.confidence.replace(weight=weight, bias=jnp.zeros(())),
    )
    return models.replace(target=target, drafter=drafter)


def test_the_counter_example_is_what_it_says(counter_example):
    request = Request([0], max_new_tokens=40, temperature=1.0)
    cfg = config(counter_example, [request], trace=True)
    (row,) = decoded(counter_example, [request], cfg)
    c = 1 / (1 + np.exp(-np.array(row.confidence_logits)))
    np.testing.assert_allclose(c[:, 0], 0.8, atol=1e-4)
    assert set(np.round(c[:, 1], 4)) == {0.0, 0.9}


@pytest.mark.parametrize("policy", ["causal", "delayed"])
def test_counter_example_through_the_engine(counter_example, policy):
    """An argmax over the confidences of the round itself would give A with probability .85."""
    requests = [
        Request([0], max_new_tokens=500, temperature=1.0, seed=2, stream=n) for n in range(8)
    ]
    cfg = config(counter_example, requests, policy=policy)
    # One, two and three tokens of a pass: 1, .5 and .45 rounds a second.
    known = facts(counter_example, 1, lambda plan: {1: 1, 2: 1 / 0.5, 3: 1 / 0.45}[plan.capacity])
    shape = BatchShape(rows=1, length=512, chunk=8)
    rows = decoded(counter_example, requests, cfg, shape=shape, facts=known)
    text = np.concatenate([row.token_ids for row in rows])
    assert set(text) == {0, 1}
    deviation = (0.7 * 0.3 / len(text)) ** 0.5
    assert abs((text == 0).mean() - 0.7) < 4 * deviation
    assert 10 * deviation < 0.15  # far from .85
