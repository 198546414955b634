"""A row of several documents gives what its documents give in rows of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import losses
from dspark_jax.anchors import sample_anchors
from dspark_jax.losses import LossConfig
from dspark_jax.segments import document_positions, document_starts
from dspark_jax.targets import dense

LENGTHS = ((7, 12, 3), (9, 11, 0))  # of the documents of two rows, the rest is padding
LENGTH = 24


def segments_of(lengths) -> np.ndarray:
    row = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(row, (0, LENGTH - len(row))).astype(np.int32)


@pytest.fixture(scope="module")
def packed() -> dict[str, np.ndarray]:
    """Two rows of documents; everything is learnt, so that blocks could run on into the next."""
    segments = np.stack([segments_of(n) for n in LENGTHS])
    tokens = np.random.default_rng(0).integers(0, 31, segments.shape).astype(np.int32)
    loss_mask = segments > 0
    positions, valid = sample_anchors(jax.random.key(3), loss_mask, 4, segments, documents=3)
    return {
        "tokens": tokens,
        "loss_mask": loss_mask,
        "segments": segments,
        "positions": np.asarray(positions),
        "valid": np.asarray(valid),
    }


@pytest.fixture(scope="module")
def alone(packed) -> dict[str, np.ndarray]:
    """The same documents and anchors, a document a row."""
    rows = []
    for row, lengths in enumerate(LENGTHS):
        for start, size in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            inside = packed["valid"][row] & (packed["positions"][row] >= start)
            inside &= packed["positions"][row] < start + size
            padding = (0, LENGTH - size)
            rows.append(
                {
                    "tokens": np.pad(packed["tokens"][row, start : start + size], padding),
                    "loss_mask": np.arange(LENGTH) < size,
                    "positions": np.where(inside, packed["positions"][row] - start, 0),
                    "valid": inside,
                }
            )
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_starts_and_positions_by_hand():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [0, 0, 0, 5, 5, 5], [1, 2, 3, 4, 0, 0]])
    starts = [[0, 0, 2, 2, 2, 5], [0, 0, 0, 3, 3, 3], [0, 1, 2, 3, 4, 4]]
    positions = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(document_starts(segments), starts)
    np.testing.assert_array_equal(document_positions(6, segments), positions)
    np.testing.assert_array_equal(document_positions(4, None), [[0, 1, 2, 3]])


@pytest.mark.parametrize("stacked", [False, True])
def test_the_target_reads_each_document_as_if_it_were_alone(tiny_pair, packed, alone, stacked):
    models = tiny_pair("vanilla")
    target = dense.stack_layers(models.target, models.target_config) if stacked else models.target
    forward = jax.jit(lambda *a: dense.forward(target, *a, cfg=models.target_config, taps=(-1, 0)))
    together = forward(packed["tokens"], packed["segments"])
    apart = forward(alone["tokens"], None)
    number = 0
    for row, lengths in enumerate(LENGTHS):
        for start, size in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            for name in ("final", "features"):
                np.testing.assert_allclose(
                    getattr(together, name)[row, start : start + size],
                    getattr(apart, name)[number, :size],
                    atol=1e-5,
                )
            number += 1


@pytest.mark.parametrize("chunk", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_the_documents(tiny_pair, packed, alone, chunk):
    models = tiny_pair("rnn")
    cfg = models.drafter_config

    @jax.jit
    def differentiate(params, tokens, loss_mask, positions, valid, segments=None):
        hidden = dense.forward(
            models.target, tokens, segments, cfg=models.target_config, taps=cfg.target_layer_ids
        )

        def total(params):
            sums = losses.drafter_sums(
                params, models.target, hidden.features, hidden.final, tokens, loss_mask,
                positions, valid, segments, cfg=cfg, loss=LossConfig(), chunk=chunk,
            )  # fmt: skip
            return losses.objective(sums, LossConfig()) / sums.weight, sums

        return jax.grad(total, has_aux=True)(params)

    grads, sums = differentiate(models.drafter, **packed)
    expected_grads, expected = differentiate(models.drafter, **alone)
    assert sums.slots[0] == packed["valid"].sum()
    assert sums.slots[-1] < sums.slots[0]  # some blocks meet the end of their document
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums, expected)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected_grads))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest),
        grads,
        expected_grads,
    )


def test_padding_is_seen_by_nobody(tiny_pair, packed):
    models = tiny_pair("vanilla")
    forward = jax.jit(lambda *a: dense.forward(models.target, *a, cfg=models.target_config))
    other = np.where(packed["segments"] > 0, packed["tokens"], 7)
    before, after = (forward(t, packed["segments"]).final for t in (packed["tokens"], other))
    inside = packed["segments"] > 0
    np.testing.assert_array_equal(before[inside], after[inside])
    assert (before[~inside] != after[~inside]).any()
