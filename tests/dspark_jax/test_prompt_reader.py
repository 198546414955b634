"""Prompts read beside a batch: in parts, in order, from a thread of its own or on a mesh."""

import jax
import numpy as np
import pytest

from dspark_jax import batching, decode, prefill, prompt_reader
from dspark_jax.batch_shape import BatchShape
from dspark_jax.prompt_reader import PromptReader
from dspark_jax.request import Request

pytestmark = pytest.mark.usefixtures("quick_compile")

SHAPE = BatchShape(rows=2, length=48, chunk=8)
LONG, SHORT = [*range(1, 31)], [7, 3]


def read_at_once(models, prompt, *, lazy=False):
    """The reference: all chunks of a prompt in one call."""
    tokens = np.zeros((1, SHAPE.prompt_length), np.int32)
    tokens[0, : len(prompt)] = prompt
    return prefill.read(
        models,
        prefill.create_reading(models, 1, SHAPE.length, lazy=lazy),
        tokens,
        np.array([len(prompt)], np.int32),
        np.int32(0),
        np.int32(-(-len(prompt) // SHAPE.chunk)),
        chunk=SHAPE.chunk,
    )


def assert_same(reading, wanted, length):
    """The same last state, and the same caches as far as they hold the prompt."""
    np.testing.assert_array_equal(reading.last, wanted.last)
    for ours, theirs in zip(
        jax.tree.leaves(reading.target_cache), jax.tree.leaves(wanted.target_cache), strict=True
    ):
        np.testing.assert_array_equal(ours[:, :, :length], theirs[:, :, :length])


def test_parts_are_what_one_call_reads(tiny_pair, monkeypatch):
    monkeypatch.setattr(prompt_reader, "CHUNKS_PER_CALL", 1)
    models = tiny_pair("vanilla")
    reader = PromptReader(models, SHAPE, lazy=False)
    assert [reader.read_on(LONG) for _ in range(5)] == [False, False, False, True, True]
    assert_same(reader.reading, read_at_once(models, LONG), len(LONG))


def test_a_prompt_takes_the_place_of_one_that_was_not_read_to_its_end(tiny_pair, monkeypatch):
    monkeypatch.setattr(prompt_reader, "CHUNKS_PER_CALL", 1)
    models = tiny_pair("vanilla")
    reader = PromptReader(models, SHAPE, lazy=False)
    assert not reader.read_on(LONG)
    assert reader.read_on(SHORT)
    assert reader.lengths.tolist() == [2]
    assert_same(reader.reading, read_at_once(models, SHORT), len(SHORT))


def test_a_prompt_is_read_once(tiny_pair, monkeypatch):
    models, calls, read = tiny_pair("vanilla"), [], prefill.read
    monkeypatch.setattr(prefill, "read", lambda *a, **k: calls.append(1) or read(*a, **k))
    reader = PromptReader(models, SHAPE, lazy=False)
    assert [reader.read_on(same) for same in (SHORT, SHORT, np.array(SHORT))] == [True] * 3
    assert reader.reading.last.shape == (1, models.target.embed.shape[1])
    assert calls == [1]


def test_the_drafter_catches_up_with_what_was_put_off(tiny_pair):
    models = tiny_pair("vanilla")
    reader = PromptReader(models, SHAPE, lazy=True)
    assert reader.read_on(LONG)
    assert reader.reading.backlog.taken.tolist() == [0]
    reader.catch_up()
    assert reader.reading.backlog.taken.tolist() == [30]
    wanted = read_at_once(models, LONG)
    for ours, theirs in zip(reader.reading.draft_cache, wanted.draft_cache, strict=True):
        np.testing.assert_allclose(ours.k[:, :, :30], theirs.k[:, :, :30], atol=1e-5)


def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_waited_for(tiny_pair, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    reader = PromptReader(tiny_pair("vanilla"), SHAPE, lazy=False)
    monkeypatch.setattr(prefill, "read", fail)
    assert reader.read_on(SHORT)
    with pytest.raises(RuntimeError, match="out of memory"):
        _ = reader.reading
    monkeypatch.undo()
    reader.read_on(LONG)  # goes on from what is not there
    with pytest.raises(RuntimeError, match="out of memory"):
        _ = reader.reading


def test_the_thread_works_on_the_device_of_the_weights(tiny_pair):
    place = jax.devices()[3]
    models = jax.device_put(tiny_pair("vanilla"), place)
    reader = PromptReader(models, SHAPE, lazy=False)
    reader.read_on(SHORT)
    assert reader.reading.last.devices() == {place}


def test_the_next_prompt_is_read_before_a_row_is_free(tiny_pair, monkeypatch):
    """Three prompts and two rows: the third is sent in front of the first rounds."""
    models, events = tiny_pair("vanilla"), []
    read_on, decode_rounds = PromptReader.read_on, decode.decode_rounds

    def reading(self, prompt):
        events.append("read")
        return read_on(self, prompt)

    def decoding(*args, **kwargs):
        events.append("rounds")
        return decode_rounds(*args, **kwargs)

    monkeypatch.setattr(PromptReader, "read_on", reading)
    monkeypatch.setattr(decode, "decode_rounds", decoding)
    requests = [Request([n, n + 1], max_new_tokens=n + 3) for n in (1, 2, 3)]
    cfg = batching.DecodeConfig(policy="fixed", greedy=True)
    for _ in batching.serve(models, requests, SHAPE, cfg, lambda ids: ""):
        pass
    assert events[:2] == ["read", "rounds"]
