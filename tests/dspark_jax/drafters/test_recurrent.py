"""Eagle3 and MTP-1: against loops, the reference's vectors, and the target whose text it is."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax import batch_shape, batching, generation, plans
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import Facts
from dspark_jax.config import Eagle3Config, InputError, MtpConfig
from dspark_jax.costs import CostTable
from dspark_jax.drafters import recurrent
from dspark_jax.flat import pack
from dspark_jax.io import hf
from dspark_jax.layers import ones, rope_angles
from dspark_jax.plans import ladder
from dspark_jax.request import Request
from dspark_jax.state import DecodeConfig, Models
from dspark_jax.vocabulary import reader
from tests.dspark_jax.test_verify import K as DRAFTS
from tests.dspark_jax.test_verify import Round, as_float64, settings
from tests.dspark_jax.test_verify import V as WORDS
from tests.dspark_jax.test_verify import schedule as schedule_lengths

pytestmark = pytest.mark.usefixtures("quick_compile")

append = jax.jit(recurrent.append_context, static_argnames="cfg")
draft = jax.jit(recurrent.draft, static_argnames=("cfg", "truncate", "mesh"))
train = jax.jit(recurrent.training_logits, static_argnames="cfg")


def make_models(tiny_pair, kind, *, vocab=32, block_size=3, confidence=True) -> Models:
    """A random target, and a drafter that knows something of which token follows which.

    The target's logits depend much on the last token's embedding, as those of the drafter here.
    """
    base = tiny_pair("vanilla", vocab=vocab, kv_heads=2)
    target_config, d = base.target_config, 16
    if kind == "eagle3":
        cfg = Eagle3Config.for_target(
            target_config,
            num_layers=1,
            block_size=block_size,
            target_layer_ids=(-1, 0),
            confidence_head=confidence,
        )
    else:
        cfg = MtpConfig.for_target(target_config, num_layers=1, confidence_head=confidence)
    rng = np.random.default_rng(5)

    def draw(spec):
        if spec.initializer is ones:
            return jnp.ones(spec.shape)
        fan_in = spec.shape[0] if spec.shape else 1
        return jnp.asarray(rng.normal(size=spec.shape) * fan_in**-0.5, jnp.float32)

    params = jax.tree.map(draw, recurrent.specs(cfg))
    params = params.replace(norm=0.3 * params.norm)
    layer = params.layer
    if kind == "eagle3":
        # Each place attends to itself, and brings its embedding along.
        same = layer.qkv[:, :, 0]
        heads = [same, same, jnp.eye(2 * d, d).reshape(2 * d, 2, 8)]
        layer = layer.replace(
            qkv=jnp.stack(heads, axis=2).at[d:].set(0),
            q_norm=3 * layer.q_norm,
            k_norm=3 * layer.k_norm,
            out=3 * jnp.eye(d),
        )
        return base.replace(
            drafter=params.replace(layer=layer, fc=0.5 * params.fc), drafter_config=cfg
        )
    join = jnp.concatenate([0.3 * params.join[:d], 2 * jnp.eye(d)])
    return base.replace(drafter=params.replace(join=join), drafter_config=cfg)


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def models(request, tiny_pair):
    return make_models(tiny_pair, request.param)


def norm(x, weight):
    return x / np.sqrt((x * x).mean() + 1e-6) * np.asarray(weight)


def rotate(x, position, cfg):
    half = len(x) // 2
    angles = position * np.array(cfg.rope.frequencies(cfg.head_dim))
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag])


class Loop:
    """Blocks one number after the other, with positions as the papers count them: i for the pair
    of the target's state at i and the token at i + 1."""

    def __init__(self, models: Models, features: np.ndarray, tokens: np.ndarray):
        self.p = jax.tree.map(np.float64, models.drafter)
        self.embed = np.float64(models.target.embed)
        self.head = np.float64(models.target.lm_head)
        self.cfg, self.features, self.tokens = models.drafter_config, features, tokens

    def inputs(self, hidden, token):
        p, e = self.p, self.embed[token]
        if isinstance(p, recurrent.Eagle3):
            return hidden, np.append(norm(e, p.layer.attn_norm), norm(hidden, p.hidden_norm))
        x = np.append(norm(hidden, p.hidden_norm), norm(e, p.embed_norm)) @ p.join
        return x, norm(x, p.layer.attn_norm)

    def heads(self, u, position):
        """q [G, M, H], k [G, H], v [G, H]."""
        qkv = np.einsum("w,wgmh->gmh", u, self.p.layer.qkv)
        q, k, v = qkv[:, :-2].copy(), qkv[:, -2].copy(), qkv[:, -1]
        for g in range(len(q)):
            k[g] = rotate(norm(k[g], self.p.layer.k_norm), position, self.cfg)
            for m in range(q.shape[1]):
                q[g, m] = rotate(norm(q[g, m], self.p.layer.q_norm), position, self.cfg)
        return q, k, v

    def state(self, i):
        """g_i of the target's states."""
        x = self.features[i]
        return x @ self.p.fc if isinstance(self.p, recurrent.Eagle3) else x

    def block(self, anchor, start, drafts):
        """Logits [K, V] of a block behind a document that begins at `start`."""
        seen = []
        for i in range(start, anchor - 1):
            _, u = self.inputs(self.state(i), self.tokens[i + 1])
            seen.append(self.heads(u, i - start)[1:])
        hidden, found = self.state(anchor - 1), []
        for step, token in enumerate(drafts):
            x, u = self.inputs(hidden, token)
            q, k, v = self.heads(u, anchor - 1 - start + step)
            seen.append((k, v))
            out = np.empty_like(q)
            for g, m in np.ndindex(q.shape[:2]):
                scores = np.array([q[g, m] @ k[g] for k, _ in seen]) / q.shape[-1] ** 0.5
                weights = np.exp(scores - scores.max())
                out[g, m] = weights @ np.array([v[g] for _, v in seen]) / weights.sum()
            x = x + out.reshape(-1) @ self.p.layer.out
            y = norm(x, self.p.layer.mlp_norm)
            gate, up = np.einsum("d,dcf->cf", y, self.p.layer.mlp.gate_up)
            hidden = x + (gate / (1 + np.exp(-gate)) * up) @ self.p.layer.mlp.down
            found.append(norm(hidden, self.p.norm) @ self.head)
        return np.array(found)


def sequence(models, length, seed=3):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(1, length, models.features_width)).astype(np.float32)
    return features, rng.integers(0, 32, (1, length))


def context_of(models, features, tokens, first=0):
    cfg = models.drafter_config
    angles = rope_angles(jnp.arange(tokens.shape[1])[None] - first, cfg.rope, cfg.head_dim)
    return recurrent.training_context(
        models.drafter, models.target, features, tokens, angles, cfg=cfg
    )


@pytest.mark.parametrize("start", [0, 4])
def test_training_is_that_of_a_loop(models, start):
    """Also where a document begins in the middle of a row."""
    features, tokens = sequence(models, 12)
    cfg, anchors = models.drafter_config, np.array([[start + 1, start + 5]])
    previous = np.stack([tokens[0, a : a + cfg.block_size] for a in anchors[0]])[None]
    found, _ = train(
        models.drafter,
        models.target,
        previous,
        anchors,
        context_of(models, features, tokens, start),
        None if start == 0 else np.full_like(anchors, start),
        cfg=cfg,
    )
    loop = Loop(models, features[0], tokens[0])
    for i, anchor in enumerate(anchors[0]):
        expected = loop.block(anchor, start, previous[0, i])
        np.testing.assert_allclose(found[0, i], expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "pieces",
    [
        [([2, 7, 4], 21)],  # at once, aligned
        [([2, 7, 4], 13)],  # at once, close-packed
        [([1, 3, 1], 9), ([1, 1, 3], 9), ([0, 3, 0], 9)],
    ],
    ids=["aligned", "close-packed", "pieces"],
)
def test_drafting_equals_training(models, pieces):
    """Whatever the caches held before, and whatever lies in a pass behind what counts."""
    cfg, rows = models.drafter_config, 3
    features = np.concatenate([sequence(models, 16, seed)[0] for seed in range(rows)])
    tokens = np.concatenate([sequence(models, 16, seed)[1] for seed in range(rows)])
    memory = recurrent.create_cache(cfg, rows, 20, jnp.float32)
    memory = jax.tree.map(lambda x: x + 1e9, memory)
    table = rope_angles(jnp.arange(20), cfg.rope, cfg.head_dim)
    weights = recurrent.context_weights(models.drafter)
    start = np.zeros(rows, int)
    for counts, capacity in pieces:
        width = max(counts)
        ahead = np.minimum(start[:, None] + np.arange(width), 15)
        text = np.take_along_axis(tokens, ahead, axis=1)
        flat = pack(jnp.array(text), jnp.array(counts), jnp.array(start), capacity)
        where = start[np.asarray(flat.row)] + np.asarray(flat.slot)
        shown = features[np.asarray(flat.row), np.minimum(where, 15)]
        start = start + counts
        memory = append(
            models.drafter, models.target, weights, shown, flat, jnp.array(start), memory, table,
            cfg=cfg,
        )  # fmt: skip
    anchor = jnp.asarray(tokens[np.arange(rows), start])
    found, _ = draft(
        models.drafter, models.target, anchor, jnp.array(start), memory, table, None, None,
        cfg=cfg, truncate=False, mesh=None,
    )  # fmt: skip
    previous = np.concatenate([anchor[:, None], found.tokens[:, :-1]], axis=1)
    logits, confidence = train(
        models.drafter,
        models.target,
        previous[:, None],
        start[:, None],
        context_of(models, features, tokens),
        cfg=cfg,
    )
    np.testing.assert_array_equal(found.tokens, np.argmax(logits[:, 0], axis=-1))
    np.testing.assert_allclose(found.confidence_logits, confidence[:, 0], atol=1e-4)


# Decoding.

SHAPE = BatchShape(rows=3, length=80, chunk=8)


def costs(most: int) -> CostTable:
    """Drafts cost about what they bring, so that rounds with and without them come in turn."""
    return CostTable(3, {p: 1.0 + 0.66 * p.drafts + 0.01 * p.capacity for p in ladder(3, most)})


def requests(**sampling):
    rng = np.random.default_rng(1)
    return [
        Request(rng.integers(0, 32, n).tolist(), max_new_tokens=m, stream=i, **sampling)
        for i, (n, m) in enumerate([(1, 40), (20, 30), (9, 1), (8, 44), (17, 25), (2, 40)])
    ]


def serve(models, asked, policy, threshold=None):
    """Rows of all requests, twice as many as there are places."""
    cfg = generation.decode_config(models, asked, policy=policy, threshold=threshold, trace=True)
    table = costs(models.drafter_config.block_size) if policy in ("causal", "delayed") else None
    facts = Facts(table)
    done = {}
    for rows in batching.serve(models, asked, SHAPE, cfg, lambda ids: "", facts=facts):
        done |= {row.number: row for row in rows if row.finish_reason}
    return [done[number] for number in range(len(asked))]


def plain(models, asked):
    alone = models.replace(drafter=None, drafter_config=None)
    cfg = generation.decode_config(alone, asked, policy="none")
    done = {}
    for rows in batching.serve(alone, asked, SHAPE, cfg, lambda ids: ""):
        done |= {row.number: row.token_ids for row in rows if row.finish_reason}
    return [done[number] for number in range(len(asked))]


SLOW = [pytest.param(policy, marks=pytest.mark.slow) for policy in ("none", "causal", "delayed")]


@pytest.mark.parametrize("policy", ["fixed", "threshold", *SLOW])
def test_greedy_text_is_that_of_plain_decoding(models, policy, monkeypatch):
    """Rows of unequal length, refilled; drafts are made, accepted and rejected."""
    for name in ("PATIENCE", "MOST_PATIENCE"):  # rounds with drafts are tried often
        monkeypatch.setattr(plans, name, 4)
    asked, threshold = requests(), None
    if policy == "delayed":
        unsure = models.drafter.confidence
        unsure = unsure.replace(bias=jnp.float32(-1), weight=unsure.weight / 4)
        models = models.replace(drafter=models.drafter.replace(confidence=unsure))
    if policy == "threshold":
        z = [z for row in serve(models, asked, "fixed") for z in row.confidence_logits]
        threshold = float(jax.nn.sigmoid(np.median(np.array(z)[:, 0])))
    rows = serve(models, asked, policy, threshold)
    assert [row.token_ids for row in rows] == plain(models, asked)
    accepted = [n for row in rows for n in row.accepted_drafts]
    verified = [n for row in rows for n in row.verified_lengths]
    if policy == "none":
        assert set(verified) == {0}
        return
    assert min(accepted) == 0 < max(accepted)
    assert sum(accepted) < sum(verified)
    if policy == "threshold":
        assert len(set(verified)) > 1
    if policy == "delayed":
        assert min(verified) == 0 < max(verified)


@pytest.mark.slow
def test_rows_are_those_that_each_gets_alone(models):
    asked = requests(temperature=0.9, top_k=9, seed=4)
    together = serve(models, asked, "fixed")
    for number in (1, 3, 5):
        (alone,) = serve(models, [asked[number]], "fixed")
        assert alone.token_ids == together[number].token_ids
        assert alone.accepted_lengths == together[number].accepted_lengths


def test_blocks_smaller_than_trained(tiny_pair):
    models, asked = make_models(tiny_pair, "eagle3"), requests()
    smaller = dataclasses.replace(models.drafter_config, block_size=2)
    rows = serve(models.replace(drafter_config=smaller), asked, "fixed")
    assert [row.token_ids for row in rows] == plain(models, asked)
    assert {n for row in rows for n in row.verified_lengths} == {2}


def test_policies_that_need_a_confidence_head(tiny_pair):
    for kind in ("eagle3", "mtp"):
        models = make_models(tiny_pair, kind, confidence=False)
        assert models.drafter.confidence is None
        DecodeConfig(policy="fixed").check(models)
        for policy in ("threshold", "causal", "delayed"):
            with pytest.raises(InputError, match="needs a drafter with a confidence head"):
                DecodeConfig(policy=policy, threshold=0.5).check(models)


class RecurrentRound(Round):
    """`Round` with drafts that are made one after the other, by a drafter that remembers."""

    def __init__(self, models, setting, rng):
        self.models = as_float64(models)
        memory = recurrent.create_cache(models.drafter_config, 1, 8, jnp.float64)
        self.memory = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), memory)
        super().__init__(models, setting, rng)

    def propose(self, noise):
        rows, cfg, drafter = len(self.drafts), self.models.drafter_config, self.models.drafter
        memory = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), self.memory)
        found, _ = draft(
            drafter,
            reader(drafter.vocabulary, self.models.target),
            jnp.full(rows, self.anchor, jnp.int32),
            jnp.full(rows, 4),
            memory,
            rope_angles(jnp.arange(8), cfg.rope, cfg.head_dim),
            settings(rows, *self.setting),
            jnp.asarray(noise),
            cfg=cfg,
            truncate=True,
            mesh=None,
        )
        assert found.probs.dtype == jnp.float64
        return found


@pytest.mark.parametrize("setting", [(1.0,), (2.0, 2, 0.97, 0.02)], ids=["plain", "warped"])
def test_one_round_of_mtp_has_the_distribution_of_the_target(tiny_pair, setting):
    models = make_models(tiny_pair, "mtp", vocab=WORDS)
    with jax.enable_x64(True):
        round_ = RecurrentRound(models, setting, np.random.default_rng(1))
        assert (round_.q > 0).sum() >= 2
        expected = round_.target()
        for length in range(2):
            error = np.abs(round_.output(np.full(WORDS, length)) - expected).max()
            assert error < 1e-9, f"verified length {length}"
        # Lengths that have seen x_1 itself: the enumeration finds that out.
        lengths = (round_.drafts[:, 0] == np.argmax(round_.q)).astype(int)
        assert np.abs(round_.output(lengths) - expected).max() > 1e-3


@pytest.mark.parametrize("setting", [(1.0,), (2.0, 2, 0.97, 0.02)], ids=["plain", "warped"])
def test_one_round_has_the_distribution_of_the_target(tiny_pair, setting):
    models = make_models(tiny_pair, "eagle3", vocab=WORDS, block_size=DRAFTS)
    with jax.enable_x64(True):
        round_ = RecurrentRound(models, setting, np.random.default_rng(1))
        assert (round_.q > 0).sum() >= 4
        expected = round_.target()
        for length in range(DRAFTS + 1):
            error = np.abs(round_.output(np.full(WORDS**DRAFTS, length)) - expected).max()
            assert error < 1e-9, f"verified length {length}"
        # Lengths by the drafter's own confidence, which has seen x_1 but not x_2.
        confidence = jax.nn.sigmoid(round_.draft.confidence_logits)
        least = float(np.mean(np.unique(np.asarray(confidence)[round_.q > 0, 1])[:2]))
        lengths = np.asarray(schedule_lengths(confidence, policy="threshold", threshold=least))
        assert np.abs(round_.output(lengths) - expected).max() < 1e-9


# The reference.


@pytest.fixture(scope="module")
def reference(golden):
    target_config, target = hf.load_target(golden / "qwen3_target")
    cfg, drafter = hf.load_drafter(golden / "eagle3_qwen3")
    return Models(target, drafter, target_config, cfg), golden / "eagle3_qwen3"


def test_logits_of_the_reference(reference):
    """Teacher-forced: its pair i is the state at i and the token at i + 1."""
    models, folder = reference
    t = load_file(folder / "expected.safetensors")
    length = t["input_ids"].shape[1]
    tokens = np.concatenate([t["input_ids"][:, :1], t["shifted_ids"]], axis=1)
    features = np.pad(t["target_hidden_states"], ((0, 0), (0, 1), (0, 0)))
    cfg = dataclasses.replace(models.drafter_config, block_size=1)
    found, _ = train(
        models.drafter,
        models.target,
        tokens[:, 1:, None],
        np.arange(1, length + 1)[None],
        context_of(models, features, tokens),
        cfg=cfg,
    )
    expected = t["draft_logits"]
    np.testing.assert_allclose(found[:, :, 0], expected, atol=5e-4 * np.abs(expected).max())


def test_greedy_rounds_of_the_reference(reference, golden):
    models, folder = reference
    entries = json.loads((folder / "expected_decode.json").read_text())["greedy"]
    asked = [Request(e["prompt"], max_new_tokens=len(e["output"])) for e in entries]
    cfg = generation.decode_config(models, asked, ignore_stop=True)
    shape = batch_shape.plan(models, asked, slots=2)
    done = {}
    for rows in batching.serve(models, asked, shape, cfg, lambda ids: ""):
        done |= {row.number: row for row in rows if row.finish_reason}
    for number, entry in enumerate(entries):
        assert done[number].token_ids == entry["output"]
        # The reference may count one more round, past its limit.
        accepted = done[number].accepted_drafts
        assert 0 <= len(entry["accepted_draft_lengths"]) - len(accepted) <= 1
        assert accepted == entry["accepted_draft_lengths"][: len(accepted)]


def test_sampled_acceptance_of_the_reference(reference, golden):
    """Mean accepted length at temperature 1, over prompts."""
    models, folder = reference
    expected = json.loads((folder / "expected_decode.json").read_text())
    theirs = np.array(expected["temperature_1_mean_accepted_length_per_prompt"])
    held_out = np.load(golden / "heldout_tokens.npy")
    length = expected["temperature_1_prompt_len"]
    starts = expected["temperature_1_prompt_starts_in_heldout"]
    limit = expected["temperature_1_max_new_tokens"]
    asked = [
        Request(held_out[s : s + length].tolist(), max_new_tokens=limit, temperature=1.0, stream=i)
        for i, s in enumerate(starts)
    ]
    cfg = generation.decode_config(models, asked, ignore_stop=True)
    shape = batch_shape.plan(models, asked, slots=len(asked))
    means = np.zeros(len(asked))
    for rows in batching.serve(models, asked, shape, cfg, lambda ids: ""):
        for row in rows:
            if row.finish_reason:
                means[row.number] = np.mean([n + 1 for n in row.accepted_drafts])
    difference = means.mean() - theirs.mean()
    assert abs(difference) < 3 * np.hypot(means.std(), theirs.std()) / len(theirs) ** 0.5
