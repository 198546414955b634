import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.anchors import sample_anchors, slot_labels


def candidates(row: np.ndarray) -> list[int]:
    return [a for a in range(len(row) - 1) if row[a] and row[a + 1]]


@pytest.fixture
def loss_mask() -> np.ndarray:
    mask = np.random.default_rng(0).random((4, 20)) < 0.7
    mask[2] = False
    mask[3] = np.arange(20) % 2 == 0  # no two neighbours
    return mask


@pytest.mark.parametrize("num_anchors", [1, 5, 19, 40])
@pytest.mark.parametrize("jit", [False, True])
def test_anchors_are_different_candidates_and_dummies_fill_up(loss_mask, num_anchors, jit):
    sample = jax.jit(sample_anchors, static_argnums=2) if jit else sample_anchors
    positions, valid = map(np.asarray, sample(jax.random.key(1), jnp.array(loss_mask), num_anchors))
    assert positions.shape == valid.shape == (4, num_anchors)
    assert positions.dtype == np.int32
    for row, p, v in zip(loss_mask, positions, valid, strict=True):
        possible = candidates(row)
        drawn = p[v].tolist()
        assert len(drawn) == min(num_anchors, len(possible))
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(possible)
        assert not p[~v].any()


def test_every_candidate_is_as_likely_as_another(loss_mask):
    draws = 4000
    keys = jax.random.split(jax.random.key(2), draws)
    positions, valid = jax.vmap(lambda k: sample_anchors(k, jnp.array(loss_mask[:1]), 3))(keys)
    possible = candidates(loss_mask[0])
    counts = np.bincount(np.asarray(positions).ravel(), minlength=20)
    assert np.asarray(valid).all()
    assert set(np.flatnonzero(counts)) == set(possible)
    share = 3 / len(possible)
    deviation = np.sqrt(draws * share * (1 - share))
    assert np.abs(counts[possible] - draws * share).max() < 4 * deviation


def test_keys_decide():
    mask = jnp.ones((2, 50), bool)
    first, _ = sample_anchors(jax.random.key(0), mask, 8)
    again, _ = sample_anchors(jax.random.key(0), mask, 8)
    other, _ = sample_anchors(jax.random.key(1), mask, 8)
    assert (first == again).all()
    assert (first != other).any()
    assert (first[0] != first[1]).any()


def test_labels_by_hand():
    #           0   1   2   3   4   5
    tokens = [[10, 11, 12, 13, 14, 15]]
    mask = [[0, 1, 1, 1, 0, 1]]
    positions, valid = jnp.array([[1, 2, 4, 0]]), jnp.array([[True, True, True, False]])
    slots = slot_labels(jnp.array(tokens), jnp.array(mask), positions, valid, 3)
    assert slots.labels.tolist() == [[[12, 13, 14], [13, 14, 15], [15, 15, 15], [11, 12, 13]]]
    assert slots.previous.tolist() == [[[11, 12, 13], [12, 13, 14], [14, 15, 15], [10, 11, 12]]]
    # Behind the gap at 4 nothing counts, nor behind the end, nor for the dummy.
    assert slots.counted.astype(int).tolist() == [[[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_labels_against_a_loop(loss_mask, size):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 99, loss_mask.shape)
    positions, valid = rng.integers(0, 20, (4, 9)), rng.random((4, 9)) < 0.8
    slots = jax.jit(slot_labels, static_argnums=4)(tokens, loss_mask, positions, valid, size)
    slots = jax.tree.map(np.asarray, slots)
    for b, i in np.ndindex(4, 9):
        a, going = positions[b, i], valid[b, i]
        for k in range(1, size + 1):
            going = going and a + k < 20 and loss_mask[b, a + k]
            assert slots.counted[b, i, k - 1] == going
            if going:
                assert slots.labels[b, i, k - 1] == tokens[b, a + k]
                assert slots.previous[b, i, k - 1] == tokens[b, a + k - 1]


SEGMENTS = np.array([[1] * 8 + [2] * 3 + [3] * 5 + [0] * 4, [4] * 2 + [9] * 18], np.int32)


@pytest.mark.parametrize("num_anchors", [1, 3, 7, 30])
def test_every_document_has_anchors_of_its_own(num_anchors):
    """As many as it would have in a row of its own, and none whose first slot is outside of it."""
    mask = SEGMENTS > 0
    mask[0, 3] = False
    positions, valid = map(
        np.asarray, sample_anchors(jax.random.key(4), mask, num_anchors, SEGMENTS, documents=3)
    )
    assert positions.shape == (2, 3 * num_anchors)
    for row in range(2):
        drawn = positions[row, valid[row]]
        assert len(set(drawn)) == len(drawn)
        assert not valid[row, len(drawn) :].any()  # dummies come last
        for document in set(SEGMENTS[row]) - {0}:
            inside = mask[row] & (SEGMENTS[row] == document)
            possible = candidates(inside)
            found = set(drawn) & set(np.flatnonzero(SEGMENTS[row] == document))
            assert len(found) == min(num_anchors, len(possible))
            assert found <= set(possible)


def test_of_too_many_documents_each_has_some_anchors():
    """A row with more documents than were announced: its anchors are shared out."""
    positions, valid = sample_anchors(jax.random.key(4), SEGMENTS[:1] > 0, 4, SEGMENTS[:1])
    assert valid.all()
    assert sorted(SEGMENTS[0, np.asarray(positions[0])]) == [1, 1, 2, 3]


def test_draws_of_one_document_do_not_depend_on_segments(loss_mask):
    key = jax.random.key(5)
    alone = sample_anchors(key, jnp.array(loss_mask), 6)
    one = sample_anchors(key, jnp.array(loss_mask), 6, jnp.full(loss_mask.shape, 3))
    jax.tree.map(np.testing.assert_array_equal, alone, one)


def test_labels_stay_in_the_anchors_document():
    tokens, mask = np.arange(10)[None], np.ones((1, 10), bool)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0, 0]])
    positions, valid = np.array([[1, 4, 2]]), np.array([[True, True, True]])
    slots = slot_labels(tokens, mask, positions, valid, 4, segments)
    assert slots.counted.astype(int).tolist() == [[[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]]
    assert slots.labels[0, 0, :2].tolist() == [2, 3]


def test_anchors_that_need_something_before_them():
    """The first position of a document is none of them; all others are drawn."""
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    mask = jnp.array([[1, 1, 1, 1, 1, 1, 1, 0]], bool)
    positions, valid = sample_anchors(jax.random.key(0), mask, 8, segments, documents=2, least=1)
    assert sorted(np.asarray(positions)[np.asarray(valid)].tolist()) == [1, 4, 5]
