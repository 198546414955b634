"""Pruned draft vocabularies: which tokens, what is lossless, what is learnt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import anchors, losses, vocabulary
from dspark_jax.config import InputError
from dspark_jax.losses import LossConfig
from dspark_jax.scheduler import schedule
from dspark_jax.state import Models
from dspark_jax.vocabulary import Vocabulary
from tests.dspark_jax.drafters.test_recurrent import (
    RecurrentRound,
    make_models,
    plain,
    requests,
    serve,
)
from tests.dspark_jax.test_verify import K, Round, V, jit_draft_block, settings

pytestmark = pytest.mark.usefixtures("quick_compile")

IDS = np.array([0, 2])


def prune(models: Models, ids) -> Models:
    """The same pair, with drafts of these tokens alone."""
    drafter = vocabulary.with_vocabulary(models.drafter, models.target, np.asarray(ids))
    head = getattr(drafter, "head", None)
    if head is not None:
        drafter = drafter.replace(head=head.replace(w2=head.w2[:, np.asarray(ids)]))
    cfg = dataclasses.replace(models.drafter_config, draft_vocab_size=len(ids))
    return models.replace(drafter=drafter, drafter_config=cfg)


def test_the_most_frequent_tokens():
    counts = np.array([3, 0, 7, 3, 0, 9])
    assert vocabulary.most_frequent(counts, 3).tolist() == [0, 2, 5]  # of equal ones the first
    assert vocabulary.most_frequent(counts, 5).tolist() == [0, 1, 2, 3, 5]


def test_offsets():
    assert vocabulary.from_offsets(np.array([2, 2, 4]), 8, "f").tolist() == [2, 3, 6]
    for offsets, said in (
        ([2, 1, 4], "f: d2t gives token 2 to several draft ids"),
        ([2.6, 2.6, 4.6], "f: d2t has fractions, expected whole numbers"),
        ([2, 2, 6], r"f: d2t gives draft id 2 the token 8, expected one in 0\.\.7"),
        ([-1, 2, 4], "f: d2t gives draft id 0 the token -1"),
    ):
        with pytest.raises(InputError, match=said):
            vocabulary.from_offsets(np.array(offsets), 8, "f")


class PrunedRound(Round):
    """`Round` with drafts of some tokens; the code under test sees what the target sees."""

    def propose(self, noise):
        rows = len(self.drafts)
        tile = lambda x: jnp.broadcast_to(x, (rows, *x.shape))  # noqa: E731
        draft = jit_draft_block(
            self.drafter,
            tile(self.base[:, IDS]),
            tile(self.hidden),
            jnp.full(rows, self.anchor, jnp.int32),
            settings(rows, *self.setting),
            jnp.asarray(noise),
        )
        return vocabulary.widened(draft, self.drafter.vocabulary, V)


class PrunedRecurrentRound(RecurrentRound):
    def propose(self, noise):
        return vocabulary.widened(super().propose(noise), self.models.drafter.vocabulary, V)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_one_round_has_the_distribution_of_the_target(tiny_pair, kind):
    """By enumeration; the token that is never drafted comes out as often as it should."""
    if kind == "dspark":
        models, make = tiny_pair("vanilla", vocab=V, block_size=K), PrunedRound
    else:
        models = make_models(tiny_pair, "eagle3", vocab=V, block_size=K)
        make = PrunedRecurrentRound
    with jax.enable_x64(True):
        round_ = make(prune(models, IDS), (1.0,), np.random.default_rng(1))
        assert (round_.q > 0).sum() == len(IDS) ** K
        expected = round_.target()
        assert expected[1].sum() > 0.05
        for length in range(K + 1):
            error = np.abs(round_.output(np.full(V**K, length)) - expected).max()
            assert error < 1e-9, f"verified length {length}"
        confidence = jax.nn.sigmoid(round_.draft.confidence_logits)
        least = float(np.mean(np.unique(np.asarray(confidence)[round_.q > 0, 1])[:2]))
        lengths = np.asarray(schedule(confidence, policy="threshold", threshold=least))
        assert np.abs(round_.output(lengths) - expected).max() < 1e-9


SLOW = [pytest.param(policy, marks=pytest.mark.slow) for policy in ("causal", "delayed")]


@pytest.mark.parametrize("policy", ["fixed", "threshold", *SLOW])
def test_greedy_text_is_that_of_plain_decoding(tiny_pair, policy):
    """With a vocabulary that some of the text lies outside of."""
    models, asked = tiny_pair("vanilla"), requests()
    text = plain(models, asked)
    ids = vocabulary.most_frequent(np.bincount(np.concatenate(text), minlength=32), 12)
    assert not set(np.concatenate(text).tolist()) <= set(ids.tolist())
    rows = serve(prune(models, ids), asked, policy, 0.2 if policy == "threshold" else None)
    assert [row.token_ids for row in rows] == text
    accepted = [n for row in rows for n in row.accepted_drafts]
    assert min(accepted) == 0 < max(accepted)


def test_sampled_rows_with_a_pruned_vocabulary(tiny_pair):
    """Tokens outside come by correction; no draft is one of them."""
    models, ids = tiny_pair("rnn"), np.arange(0, 32, 2)
    asked = requests(temperature=0.8, seed=3)
    rows = serve(prune(models, ids), asked, "fixed")
    outside = [t for row in rows for t in row.token_ids if t % 2]
    assert len(outside) > 10
    for row in rows:
        # Of each round's tokens all but the last are drafts.
        at = 1
        for gained in row.accepted_lengths[:-1]:
            assert all(t % 2 == 0 for t in row.token_ids[at : at + gained - 1])
            at += gained


@pytest.mark.parametrize("soft", [False, True])
def test_losses_by_hand(soft):
    rng = np.random.default_rng(0)
    ids, v = np.array([1, 4, 5]), 7
    draft = rng.normal(size=(2, 2, 2, 3)).astype(np.float32)
    teacher = rng.normal(size=(2, 2, 2, v)).astype(np.float32)
    labels = np.array([[[4, 0], [1, 5]], [[6, 1], [2, 2]]])
    counted = np.array([[[1, 1], [1, 0]], [[1, 1], [1, 1]]], bool)
    slots = anchors.Slots(labels, labels, counted)
    cfg = LossConfig(1, 1, 0, loss_decay=2.0, soft_targets=soft)
    found = losses.slot_sums(losses.Outputs(draft, teacher, None), slots, cfg, jnp.array(ids))
    ce = tv = 0.0
    acceptance = np.zeros(2)
    for b, a, k in zip(*np.nonzero(counted), strict=True):
        p = np.exp(teacher[b, a, k]) / np.exp(teacher[b, a, k]).sum()
        q = np.zeros(v)
        q[ids] = np.exp(draft[b, a, k]) / np.exp(draft[b, a, k]).sum()
        distance, weight = np.abs(p - q).sum(), np.exp(-k / 2)
        tv += weight * distance
        acceptance[k] += 1 - distance / 2
        if soft:
            ce -= weight * (p[ids] / p[ids].sum()) @ np.log(q[ids])
        elif labels[b, a, k] in ids:
            ce -= weight * np.log(q[labels[b, a, k]])
    np.testing.assert_allclose(found.ce, ce, rtol=1e-5)
    np.testing.assert_allclose(found.tv, tv, rtol=1e-5)
    np.testing.assert_allclose(found.acceptance, acceptance, rtol=1e-5)


def test_the_head_is_made_of_the_targets_columns(tiny_pair):
    models = tiny_pair("vanilla")
    target = models.target
    expected = np.asarray(target.lm_head)[:, IDS]
    np.testing.assert_array_equal(vocabulary.columns(target, IDS), expected)
    tied = target.replace(lm_head=None)
    np.testing.assert_array_equal(vocabulary.columns(tied, IDS), np.asarray(target.embed)[IDS].T)
    own = Vocabulary(jnp.array(IDS), jnp.ones((16, 2)))
    assert vocabulary.reader(own, target).lm_head is own.lm_head
    assert vocabulary.reader(None, target) is target
