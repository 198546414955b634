"""Decoding against plain greedy text, against the reference's rounds, and what a round costs."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import params
from dspark_jax.config import HEADS, Eagle3Config, InputError
from dspark_jax.decode import catch_up, decode_rounds
from dspark_jax.drafters.kinds import kind_of
from dspark_jax.io import hf
from dspark_jax.plans import Plan
from dspark_jax.prefill import prefill
from dspark_jax.sampling import Sampling
from dspark_jax.state import DecodeConfig, Models, cache_length, create_state
from dspark_jax.targets import dense

pytestmark = pytest.mark.usefixtures("quick_compile")

CHUNK, LIMIT, BLOCK = 8, 40, 3
PROMPTS = [
    [int(t) for t in np.random.default_rng(length).integers(0, 31, length)]
    for length in (16, 1, 9, 8, 5, 13, 2, 7)
]
LENGTH = cache_length(16, LIMIT, BLOCK)


def rows_of(rows, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0):
    """`Sampling` from numbers, or from one number a row."""
    full = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (rows,))  # noqa: E731
    return Sampling(
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(min_p, jnp.float32),
    )


@dataclasses.dataclass
class Run:
    """What came out, row by row; per-round lists hold the rounds in which the row was active."""

    tokens: list[list[int]]
    emitted: list[list[int]]
    accepted: list[list[int]]
    verified: list[list[int]]
    confidence_logits: list[np.ndarray]
    state: object


def run(
    models,
    prompts,
    cfg,
    *,
    limits=LIMIT,
    length=LENGTH,
    chunk=CHUNK,
    sampling=None,
    keys=None,
    rounds=LIMIT,
    calls=1,
    stale=0.0,
    plan=None,
    lazy=False,
):
    """Decodes `prompts` in one batch; the log has room for `rounds` rounds a call.

    `stale` is what the caches hold at the start.
    """
    count = len(prompts)
    padded = -(-max(map(len, prompts)) // chunk) * chunk
    tokens = np.full((count, padded), 5, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    state = create_state(
        models,
        length=length,
        sampling=rows_of(count) if sampling is None else sampling,
        key=jax.random.split(jax.random.key(0), count) if keys is None else keys,
        limit=np.broadcast_to(limits, count),
        lazy=lazy,
    )
    caches = (state.target_cache, state.draft_cache)
    caches = jax.tree.map(lambda x: x + stale, caches)
    state = state.replace(target_cache=caches[0], draft_cache=caches[1])
    # The prompt is read in the same way whatever the policy: one executable for all.
    reading = dataclasses.replace(cfg, policy="fixed", threshold=None, trace=False)
    lengths = np.array([len(p) for p in prompts], np.int32)
    state, first = prefill(models, state, tokens, lengths, cfg=reading, chunk=chunk)
    logs = []
    for _ in range(calls):
        state, log, done = decode_rounds(
            models, state, np.int32(rounds), np.int32(1), cfg=cfg, length=rounds, plan=plan
        )
        logs.append(jax.tree.map(lambda x, n=int(done): np.asarray(x)[:n], log))
    log = jax.tree.map(lambda *x: np.concatenate(x), *logs)
    out = [[int(t)] for t in first.token]
    live = log.emitted > 0
    for t, r in zip(*np.nonzero(live), strict=True):
        out[r] += log.tokens[t, r, : log.emitted[t, r]].tolist()
    of_row = lambda x: [x[live[:, r], r].tolist() for r in range(count)]  # noqa: E731
    z = log.confidence_logits
    return Run(
        out,
        of_row(log.emitted),
        of_row(log.accepted),
        of_row(log.verified),
        [] if z is None else [z[live[:, r], r] for r in range(count)],
        state,
    )


@functools.partial(jax.jit, static_argnames="cfg")
def _next_tokens(target, tokens, lengths, *, cfg):
    final = dense.forward(target, tokens, cfg=cfg).final
    return jnp.argmax(dense.logits(target, final[jnp.arange(len(tokens)), lengths - 1]), axis=-1)


@pytest.fixture(scope="module")
def plain(tiny_pair):
    """`LIMIT` greedy tokens after each prompt, by whole passes without any cache."""
    models = tiny_pair("vanilla")
    tokens = np.zeros((len(PROMPTS), 16 + LIMIT), np.int32)
    lengths = np.array([len(p) for p in PROMPTS])
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    for step in range(LIMIT):
        new = _next_tokens(models.target, tokens, lengths + step, cfg=models.target_config)
        tokens[np.arange(len(tokens)), lengths + step] = new
    return [row[n : n + LIMIT].tolist() for row, n in zip(tokens, lengths, strict=True)]


FIXED = DecodeConfig(policy="fixed", greedy=True, trace=True)
PLAIN = DecodeConfig(policy="none", greedy=True)


def check_rounds(out):
    """What holds of every run: counts add up, and nothing unverified was accepted."""
    for tokens, emitted, accepted, verified in zip(
        out.tokens, out.emitted, out.accepted, out.verified, strict=True
    ):
        assert 1 + sum(emitted) == len(tokens)
        assert all(a <= v for a, v in zip(accepted, verified, strict=True))
        gained = [a + 1 for a in accepted]
        assert emitted[:-1] == gained[:-1]  # only the last round is cut
        assert not gained or 1 <= emitted[-1] <= gained[-1]


def test_plain_decoding_is_the_target_without_cache(tiny_pair, plain):
    models = tiny_pair("vanilla")
    alone = Models(models.target, None, models.target_config, None)
    out = run(alone, PROMPTS, PLAIN)
    assert out.tokens == plain
    check_rounds(out)
    assert all(v == [0] * (LIMIT - 1) for v in out.verified)
    # With a drafter that is not used it is the same.
    assert run(models, PROMPTS, PLAIN).tokens == plain


@pytest.fixture(scope="module", params=HEADS)
def greedy(request, tiny_pair):
    """(models, run with `fixed`, configuration of a threshold that sends blocks of all lengths)."""
    models = tiny_pair(request.param)
    out = run(models, PROMPTS, FIXED)
    z = np.concatenate(out.confidence_logits)
    threshold = float(1 / (1 + np.exp(-np.median(z[:, 0]))))
    cfg = dataclasses.replace(FIXED, policy="threshold", threshold=threshold)
    return models, out, cfg


def test_greedy_output_is_that_of_plain_decoding(greedy, plain):
    models, fixed, threshold = greedy
    assert fixed.tokens == plain
    check_rounds(fixed)
    accepted = np.concatenate(fixed.accepted)
    assert (accepted == 0).any()
    assert (accepted > 0).any()
    assert set(np.concatenate(fixed.verified)) == {BLOCK}
    # The same text when only confident drafts are sent; lengths are those of the logged numbers.
    out = run(models, PROMPTS, threshold)
    assert out.tokens == plain
    check_rounds(out)
    assert len(set(np.concatenate(out.verified))) > 1
    for z, verified in zip(out.confidence_logits, out.verified, strict=True):
        passes = np.asarray(jax.nn.sigmoid(z)) >= np.float32(threshold.threshold)
        assert np.cumprod(passes, axis=1).sum(1).tolist() == verified


def test_greedy_output_at_every_limit(greedy, plain):
    """All limits from 1 to 2K, in different rows each time; the rest of a block is cut off."""
    models, _, threshold = greedy
    limits = np.arange(len(PROMPTS)) % (2 * BLOCK) + 1
    cut = False
    for cfg in (FIXED, threshold):
        for turn in range(3):
            limit = np.roll(limits, turn)
            out = run(models, PROMPTS, cfg, limits=limit)
            assert out.tokens == [p[:n] for p, n in zip(plain, limit, strict=True)]
            check_rounds(out)
            for emitted, accepted in zip(out.emitted, out.accepted, strict=True):
                cut |= bool(emitted) and emitted[-1] < accepted[-1] + 1
    assert cut


def test_single_rows_are_those_of_the_ragged_batch(greedy):
    models, together, _ = greedy
    for row in (0, 1, 5):
        out = run(models, [PROMPTS[row]], FIXED)
        assert out.tokens == [together.tokens[row]]
        assert out.accepted == [together.accepted[row]]
        np.testing.assert_allclose(
            out.confidence_logits[0], together.confidence_logits[row], atol=1e-4
        )


def test_single_rows_with_a_threshold(greedy, plain):
    models, _, threshold = greedy
    for row in (0, 1, 5):
        assert run(models, [PROMPTS[row]], threshold).tokens == [plain[row]]


@pytest.mark.parametrize("policy", ["fixed", "threshold", "none"])
def test_stop_tokens_anywhere_in_a_block(tiny_pair, plain, policy):
    """The output ends with the first stop token, wherever in a block it falls."""
    models = tiny_pair("vanilla")
    # The tokens that come late in most rows.
    late = [t for text in plain for t in set(text) - set(text[:3])]
    stops = tuple(sorted(range(32), key=lambda t: -late.count(t))[:2])
    cfg = dataclasses.replace(FIXED, policy=policy, stop_token_ids=stops)
    if policy == "threshold":
        cfg = dataclasses.replace(cfg, threshold=0.3)
    places = set()
    for skip in range(6):
        prompts = [(p + text[:skip])[-16:] for p, text in zip(PROMPTS, plain, strict=True)]
        full = run(models, prompts, FIXED).tokens
        out = run(models, prompts, cfg)
        check_rounds(out)
        for tokens, whole, emitted in zip(out.tokens, full, out.emitted, strict=True):
            at = next((i for i, t in enumerate(whole) if t in stops), LIMIT)
            assert tokens == whole[: at + 1]
            if at < LIMIT:  # 0: the first token of all, which the prefill makes
                places.add(emitted[-1] if emitted else 0)
    assert places >= {"none": {0, 1}, "fixed": {0, 1, 2, 3}, "threshold": {0, 1, 2, 3, 4}}[policy]


def test_a_row_that_stops_leaves_the_others_alone(tiny_pair, plain):
    """Rows of limit 1, done before the first round, beside rows that go on."""
    limits = np.where(np.arange(len(PROMPTS)) % 2, LIMIT, 1)
    out = run(tiny_pair("vanilla"), PROMPTS, FIXED, limits=limits)
    assert out.tokens == [p[:n] for p, n in zip(plain, limits, strict=True)]
    assert [len(e) == 0 for e in out.emitted] == (limits == 1).tolist()


def test_what_the_caches_held_before_is_never_seen(tiny_pair, plain):
    models = tiny_pair("vanilla")
    out, clean = run(models, PROMPTS, FIXED, stale=100.0), run(models, PROMPTS, FIXED)
    assert out.tokens == plain
    assert out.accepted == clean.accepted
    for mine, theirs in zip(out.confidence_logits, clean.confidence_logits, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_blocks_smaller_than_trained(tiny_pair, plain):
    models = tiny_pair("vanilla")
    for size in (1, 2):
        cfg = dataclasses.replace(models.drafter_config, block_size=size)
        out = run(models.replace(drafter_config=cfg), PROMPTS, FIXED)
        assert out.tokens == plain
        assert set(np.concatenate(out.verified)) == {size}
        assert (np.concatenate(out.accepted) > 0).any()


def test_the_last_block_fits_into_a_cache_of_the_promised_length(tiny_pair, plain):
    """Rows that all fill the same cache, some with a whole block behind their last anchor."""
    limits = [17 - len(p) for p in PROMPTS]
    (length,) = {cache_length(len(p), n, BLOCK) for p, n in zip(PROMPTS, limits, strict=True)}
    out = run(tiny_pair("vanilla"), PROMPTS, FIXED, limits=limits, length=length)
    assert out.tokens == [text[:n] for text, n in zip(plain, limits, strict=True)]
    assert any(emitted[-1] == 1 for emitted in out.emitted[1:])


SAMPLED = DecodeConfig(policy="fixed", trace=True)
MIXED = {
    "temperature": [1.0, 0.0, 0.7, 1.3, 0.0, 1.0, 1.0, 2.0],
    "top_k": [0, 0, 10, 0, 3, 0, 5, 0],
    "top_p": [1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 0.95, 1.0],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.02, 0.0],
}


def test_sampled_rows_do_not_depend_on_their_neighbours(tiny_pair, plain):
    models, keys = tiny_pair("vanilla"), jax.random.split(jax.random.key(7), 8)
    count = len(PROMPTS)
    out = run(models, PROMPTS, SAMPLED, sampling=rows_of(count, **MIXED), keys=keys)
    check_rounds(out)
    accepted = np.concatenate(out.accepted)
    assert set(accepted) == set(range(BLOCK + 1))
    # Greedy rows are plain decoding, the others are not.
    for row, temperature in enumerate(MIXED["temperature"]):
        assert (out.tokens[row] == plain[row]) == (temperature == 0)
    # Every other row gets a new prompt, key, settings and limit; the rest stays as it was.
    kept = np.arange(count) % 2 == 0
    order = np.where(kept, np.arange(count), (np.arange(count) + 2) % count)
    others = run(
        models,
        [PROMPTS[i] for i in order],
        SAMPLED,
        sampling=rows_of(count, **{k: np.array(v)[order] for k, v in MIXED.items()}),
        keys=jnp.where(kept, keys, jax.random.split(jax.random.key(8), 8)),
        limits=np.where(kept, LIMIT, 11),
    )
    for row in np.flatnonzero(kept):
        assert others.tokens[row] == out.tokens[row]
        assert others.accepted[row] == out.accepted[row]
    # All rows at another place.
    turned = np.roll(np.arange(count), 3)
    moved = run(
        models,
        [PROMPTS[i] for i in turned],
        SAMPLED,
        sampling=rows_of(count, **{k: np.array(v)[turned] for k, v in MIXED.items()}),
        keys=keys[turned],
    )
    assert moved.tokens == [out.tokens[i] for i in turned]


def test_other_keys_draw_other_tokens(tiny_pair):
    models, count = tiny_pair("vanilla"), len(PROMPTS)
    sampling = rows_of(count, temperature=1.0)
    same_prompt = [PROMPTS[0]] * count
    out = run(models, same_prompt, SAMPLED, sampling=sampling)
    assert len({tuple(t) for t in out.tokens}) == count


def test_every_round_draws_fresh_noise(tiny_pair):
    """Target and drafter know nothing: tokens are the noise itself, and must be uniform."""
    models, count = tiny_pair("vanilla"), len(PROMPTS)
    target, drafter = models.target, models.drafter
    target = target.replace(lm_head=0 * target.lm_head)
    head = drafter.head.replace(w2=0 * drafter.head.w2)
    models = models.replace(target=target, drafter=drafter.replace(head=head))
    out = run(models, PROMPTS, SAMPLED, sampling=rows_of(count, temperature=1.0))
    assert set(np.concatenate(out.accepted)) == {BLOCK}  # p = q: nothing is rejected
    tokens = np.array(out.tokens)  # [rows, LIMIT]; the first is the prefill's
    counts = np.bincount(tokens.ravel(), minlength=32)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 70  # 31 degrees of freedom
    whole = (LIMIT - 1) // (BLOCK + 1)
    rounds = tokens[:, 1 : 1 + whole * (BLOCK + 1)].reshape(-1, BLOCK + 1)
    assert len({tuple(r) for r in rounds.tolist()}) == len(rounds) == count * whole
    for a in range(BLOCK + 1):  # no purpose or slot repeats another one's
        for b in range(a):
            assert (rounds[:, a] == rounds[:, b]).mean() < 0.15


LONG = 300


@pytest.fixture(scope="module")
def long_run(tiny_pair):
    """(compilations by name in each of three calls of 100 rounds, models, the run) of one row."""
    models = tiny_pair("rnn")
    limit = LONG * (BLOCK + 1) + 1
    compiled = []

    def listen(event, _, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    length = cache_length(16, limit, BLOCK)
    settings = {"limits": limit, "length": length, "rounds": 100}
    try:
        run(models, [PROMPTS[0]], FIXED, **settings)
        first = len(compiled)
        out = run(models, [PROMPTS[0]], FIXED, calls=3, **settings)
        again = len(compiled) - first
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return models, out, first, again


def test_three_hundred_rounds_compile_nothing_after_the_first(long_run):
    _, out, first, again = long_run
    assert len(out.emitted[0]) == LONG
    assert first > 0
    assert again == 0


def assert_same_caches(mine, anew, held):
    """Both models' caches of two states agree in the positions that each row holds."""
    caches = [(s.target_cache, s.draft_cache) for s in (mine, anew)]
    for a, b in zip(*map(jax.tree.leaves, caches), strict=True):
        for row, count in enumerate(held):
            x, y = a[row, :, :count], b[row, :, :count]
            np.testing.assert_allclose(x, y, atol=2e-4 * float(jnp.abs(y).max()))


def test_a_drafter_that_catches_up_has_the_caches_of_a_fresh_prefill(tiny_pair, plain):
    """Prompts and rounds that it has put off, by more than one stretch and by less."""
    models, limits = tiny_pair("vanilla"), [LIMIT, 6, 18]
    cfg = dataclasses.replace(FIXED, policy="delayed")
    out = run(
        models,
        PROMPTS[:3],
        cfg,
        limits=limits,
        rounds=10,
        calls=3,
        plan=Plan(0, 3),
        stale=1e9,
        lazy=True,
    )
    assert out.tokens == [plain[0][:31], plain[1][:6], plain[2][:18]]
    held = [int(n) for n in out.state.position]
    assert held == [16 + 30, 1 + 4, 9 + 16]
    texts = [p + t for p, t in zip(PROMPTS, out.tokens, strict=False)]
    fresh = run(models, [t[:n] for t, n in zip(texts, held, strict=True)], FIXED, limits=1)
    assert not out.state.backlog.taken.any()
    state = catch_up(models, out.state.replace(active=jnp.array([True, True, False])))
    assert state.backlog.taken.tolist() == [held[0], held[1], 0]  # idle rows are left alone
    state = catch_up(models, state.replace(active=jnp.ones(3, bool)))
    assert state.backlog.taken.tolist() == held
    assert_same_caches(state, fresh.state, held)


def test_three_hundred_rounds_leave_the_caches_of_a_fresh_prefill(long_run):
    """No position, rollback or context drifts: rejected tokens leave nothing behind."""
    models, out, _, _ = long_run
    tokens = PROMPTS[0] + out.tokens[0]
    held = int(out.state.position[0])
    assert held == len(tokens) - 1  # the anchor is in no cache
    assert int(out.state.anchor[0]) == tokens[-1]
    accepted = np.array(out.accepted[0])
    assert 0 < accepted.mean() < BLOCK
    length = out.state.target_cache[0].length
    fresh = run(models, [tokens[:-1]], FIXED, limits=1, length=length, chunk=64)
    assert fresh.tokens == [[tokens[-1]]]  # the same next token
    assert_same_caches(out.state, fresh.state, [held])
    # And the next round is the same from either.
    verdicts = []
    for state in (out.state, fresh.state.replace(active=jnp.array([True]))):
        state = jax.tree.map(jnp.copy, state.replace(remaining=jnp.array([9])))
        _, log, _ = decode_rounds(models, state, np.int32(1), np.int32(1), cfg=FIXED, length=100)
        verdicts.append((log.tokens[0], log.accepted[0], log.confidence_logits[0]))
    np.testing.assert_array_equal(verdicts[0][0], verdicts[1][0])
    np.testing.assert_array_equal(verdicts[0][1], verdicts[1][1])
    np.testing.assert_allclose(verdicts[0][2], verdicts[1][2], atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "greedy"), [("dspark", True), ("dspark", False), ("eagle3", False)]
)
def test_rounds_hold_no_second_copy_of_a_cache(tiny_pair, kind, greedy):
    """Caches that are large beside everything else: 8 rows of 2048 positions."""
    models = tiny_pair("vanilla")
    wide = {"num_kv_heads": 2, "head_dim": 64}
    target_config = dataclasses.replace(models.target_config, **wide)
    drafter_config = dataclasses.replace(models.drafter_config, **wide)
    if kind == "eagle3":
        drafter_config = Eagle3Config.for_target(
            target_config, num_layers=1, block_size=BLOCK, target_layer_ids=(-1, 0)
        )
    rows, length = 8, 2048
    shape = jax.ShapeDtypeStruct
    f32 = functools.partial(shape, dtype=jnp.float32)

    def abstract():
        key = jax.random.key(0)
        wide_models = Models(
            params.init(key, dense.specs(target_config)),
            params.init(key, kind_of(drafter_config).specs(drafter_config)),
            target_config,
            drafter_config,
        )
        state = create_state(
            wide_models,
            length=length,
            sampling=rows_of(rows),
            key=jax.random.split(key, rows),
            limit=jnp.ones(rows),
        )
        return wide_models, state

    wide_models, state = jax.eval_shape(abstract)
    cfg = DecodeConfig(policy="fixed", greedy=greedy)
    rounds = shape((), jnp.int32)
    compiled = decode_rounds.lower(wide_models, state, rounds, rounds, cfg=cfg, length=4).compile()
    cache = state.target_cache[0].k
    assert cache.shape == (rows, 2, length, 64)
    layer = 2 * cache.size * 4
    scores = f32((rows, 2, 1, BLOCK + 1, length)).size * 4
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < layer / 2 + 4 * scores
    assert memory.alias_size_in_bytes >= 3 * layer  # two target layers and one of the drafter
    dims = ",".join(map(str, cache.shape))
    copies = re.findall(rf"f32\[{dims}\]\S* (?:copy|transpose|copy-start)\(", compiled.as_text())
    assert copies == []


def test_configurations_that_cannot_be_decoded(tiny_pair):
    models = tiny_pair("vanilla")
    alone = models.replace(drafter=None, drafter_config=None)
    DecodeConfig(policy="none").check(alone)
    DecodeConfig(policy="threshold", threshold=0.5).check(models)
    with pytest.raises(InputError, match="policy 'fixed' needs a drafter"):
        DecodeConfig(policy="fixed").check(alone)
    with pytest.raises(InputError, match=r"threshold -0\.1: expected a number in 0\.\.1"):
        DecodeConfig(policy="threshold", threshold=-0.1).check(models)
    with pytest.raises(InputError, match="threshold None"):
        DecodeConfig(policy="threshold").check(models)
    unsure = dataclasses.replace(models.drafter_config, confidence_head=False)
    with pytest.raises(InputError, match="needs a drafter with a confidence head"):
        DecodeConfig(policy="threshold", threshold=0.5).check(models.replace(drafter_config=unsure))


# Against the reference implementation.


QWEN3 = ["qwen3_dflash", "qwen3_vanilla", "qwen3_gated", "qwen3_rnn"]


@pytest.fixture(scope="module")
def reference(request, golden):
    """(models, folder) of the pair of each head and family."""
    folder = golden / f"dspark_{request.param}"
    target_config, target = hf.load_target(golden / f"{request.param.split('_')[0]}_target")
    drafter_config, drafter = hf.load_drafter(folder)
    return Models(target, drafter, target_config, drafter_config), folder


@pytest.mark.parametrize(
    ("reference", "policy"),
    [*((name, policy) for name in QWEN3 for policy in ("fixed", "threshold")),
     ("gemma4_vanilla", "fixed")],
    indirect=["reference"],
)  # fmt: skip
def test_greedy_rounds_of_the_reference(reference, policy):
    models, folder = reference
    name = "greedy" if policy == "fixed" else "greedy_threshold_0.5"
    entries = json.loads((folder / "expected_decode.json").read_text())[name]
    cfg = dataclasses.replace(FIXED, policy=policy, threshold=0.5 if policy != "fixed" else None)
    if not entries:
        assert policy == "threshold"
        assert not models.drafter_config.confidence_head
        with pytest.raises(InputError, match="needs a drafter with a confidence head"):
            cfg.check(models)
        return
    out = run(
        models,
        [e["prompt"] for e in entries],
        cfg,
        limits=[len(e["output"]) for e in entries],
        length=cache_length(64, 64, 7),
        chunk=32,
        rounds=64,
    )
    check_rounds(out)
    for row, entry in enumerate(entries):
        assert out.tokens[row] == entry["output"]
        # The reference may count one more round, past its limit.
        rounds = len(out.accepted[row])
        assert 0 <= len(entry["accepted_draft_lengths"]) - rounds <= 1
        assert out.accepted[row] == entry["accepted_draft_lengths"][:rounds]
        assert out.verified[row] == entry["proposal_lengths"][:rounds]
        if not models.drafter_config.confidence_head:
            assert out.confidence_logits == []
            continue
        logged = out.confidence_logits[row]
        for z, expected in zip(logged, entry["confidence_logits"][:rounds], strict=True):
            np.testing.assert_allclose(z[: len(expected)], expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("reference", QWEN3, indirect=True)
def test_sampled_acceptance_of_the_reference(reference, golden):
    """Mean accepted length at temperature 1, pooled over rounds, and the first slot's rate."""
    models, folder = reference
    expected = json.loads((folder / "expected_sampling.json").read_text())
    held_out = np.load(golden / "heldout_tokens.npy")
    length, limit = expected["prompt_len"], expected["max_new_tokens"]
    starts = expected["prompt_starts_in_heldout"]
    prompts = [held_out[s : s + length].tolist() for s in starts]
    out = run(
        models,
        prompts,
        DecodeConfig(policy="fixed", truncate=False),
        limits=limit,
        length=cache_length(length, limit, 7),
        chunk=32,
        sampling=rows_of(len(prompts), temperature=1.0),
        rounds=limit,
    )
    accepted = np.concatenate(out.accepted)
    error = np.std([np.mean(a) for a in out.accepted]) / len(prompts) ** 0.5
    difference = accepted.mean() + 1 - expected["mean_accepted_length"]
    assert abs(difference) < 3 * np.hypot(error, expected["std_err"])
    rate, theirs = (accepted > 0).mean(), expected["conditional_acceptance"][0]
    assert abs(rate - theirs) < 4 * (2 * theirs * (1 - theirs) / len(accepted)) ** 0.5
