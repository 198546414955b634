"""The Python API: requests in, completions out, in one shape that compiles once."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import generation
from dspark_jax.config import InputError
from dspark_jax.generation import Pair
from dspark_jax.request import Request


@dataclasses.dataclass(frozen=True)
class Letters:
    """A tokenizer whose ids are the places of letters in the alphabet."""

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture(scope="module")
def pair(tiny_pair, quick_compile):
    return Pair(tiny_pair("vanilla"), Letters())


def full_pairs(c):
    return list(zip(c.accepted_lengths, c.accepted_drafts, strict=True))


PROMPTS = ["abc", "hello", "z", "speculative"]


def test_batches_give_each_prompt_what_it_gets_alone(pair):
    together = generation.generate(pair, PROMPTS, slots=3, max_new_tokens=12)
    alone = [generation.generate(pair, [p], max_new_tokens=12)[0] for p in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.accepted_lengths for c in together] == [c.accepted_lengths for c in alone]


def test_completion_adds_up(pair):
    for c in generation.generate(pair, PROMPTS, max_new_tokens=11, trace=True):
        assert 1 + sum(c.accepted_lengths) == len(c.token_ids) == 11
        assert c.finish_reason == "length"
        assert c.text == Letters().decode(c.token_ids)
        assert c.verified_lengths == [3] * len(c.accepted_lengths)
        assert np.shape(c.confidences) == (len(c.accepted_lengths), 3)
        assert all(n == d + 1 for n, d in full_pairs(c)[:-1])
        assert len(c.accepted_lengths) - len(c.full_rounds) in (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_has_every_draft(pair, temperature):
    """Accepted ones are the text; the first that is not was replaced, greedily by another."""
    settings = {"max_new_tokens": 24, "temperature": temperature, "trace": True}
    rejected = 0
    for c in generation.generate(pair, PROMPTS, **settings):
        assert np.shape(c.drafts) == (len(c.accepted_lengths), 3)
        place = 1
        for block, emitted, count in zip(
            c.drafts, c.accepted_lengths, c.accepted_drafts, strict=True
        ):
            made = c.token_ids[place : place + emitted]
            assert made[:count] == block[: min(count, emitted)]
            if count < 3 and emitted == count + 1:
                rejected += 1
                assert temperature > 0 or made[count] != block[count]
            place += emitted
    assert rejected > 0
    (plain,) = generation.generate(pair, ["abc"], max_new_tokens=4)
    assert plain.drafts is None


def test_a_trace_without_a_confidence_head(tiny_pair):
    """Drafts as ever, and no confidences that nobody has given."""
    pair = Pair(tiny_pair("none"), Letters())
    models = pair.models
    plain = dataclasses.replace(models.drafter_config, confidence_head=False)
    drafter = models.drafter.replace(confidence=None)
    headless = Pair(models.replace(drafter=drafter, drafter_config=plain), pair.tokenizer)
    (found,) = generation.generate(headless, ["abc"], max_new_tokens=8, trace=True)
    assert np.shape(found.drafts) == (len(found.accepted_lengths), 3)
    assert found.confidences is None
    assert found.confidence_logits is None


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_stream_yields_what_generate_returns(pair, settings):
    whole = generation.generate(pair, PROMPTS, max_new_tokens=9, **settings)
    pieces: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS))}
    sizes = []
    for row, tokens in generation.stream(pair, PROMPTS, max_new_tokens=9, **settings):
        pieces[row] += tokens
        sizes.append(len(tokens))
    assert [pieces[r] for r in pieces] == [c.token_ids for c in whole]
    assert max(sizes) > 1, "no round committed more than one token"


def test_token_ids_in_arrays(pair):
    """Also of two requests in a row, which are compared with each other."""
    ids = [0, 1, 2]
    arrays = [
        np.array(ids),
        np.array(ids, np.uint8),
        jnp.array(ids),
        tuple(ids),
        list(np.array(ids)),
    ]
    requests = [Request(each, max_new_tokens=12) for each in (ids, *arrays)]
    found = generation.generate(pair, requests)
    assert {tuple(c.token_ids) for c in found} == {tuple(found[0].token_ids)}
    assert found[0].token_ids == generation.generate(pair, ["abc"], max_new_tokens=12)[0].token_ids


def test_stop_token_ends_a_row(pair):
    free = generation.generate(pair, ["abc"], max_new_tokens=12)[0].token_ids
    stop = free[5]
    config = dataclasses.replace(pair.models.target_config, stop_token_ids=(stop,))
    stopping = Pair(pair.models.replace(target_config=config), pair.tokenizer)
    (found,) = generation.generate(stopping, ["abc"], max_new_tokens=12)
    assert found.token_ids == free[: free.index(stop) + 1]
    assert found.finish_reason == "stop"
    (ignored,) = generation.generate(stopping, ["abc"], max_new_tokens=12, ignore_stop=True)
    assert ignored.token_ids == free


def test_same_seed_same_text_and_streams_differ(pair):
    settings = {"max_new_tokens": 16, "temperature": 1.5}
    first = generation.generate(pair, ["abc", "abc"], seed=1, **settings)
    again = generation.generate(pair, ["abc", "abc"], seed=1, **settings)
    other = generation.generate(pair, ["abc", "abc"], seed=2, **settings)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert first[0].token_ids != first[1].token_ids
    assert first[0].token_ids != other[0].token_ids


def test_limit_is_cut_to_the_room_that_is_left(pair):
    config = dataclasses.replace(pair.models.target_config, max_position=10)
    small = Pair(pair.models.replace(target_config=config), pair.tokenizer)
    (found,) = generation.generate(small, ["abcdef"], max_new_tokens=50)
    assert len(found.token_ids) == 4


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request([]), "empty"),
        (Request([1, 99]), "token id 99: expected 0..31"),
        (Request([1, 2.5]), "token_ids=[1, 2.5]: expected whole numbers"),
        (Request([True]), "token_ids=[True]: expected whole numbers"),
        (Request("ab"), "token_ids=['a', 'b']: expected whole numbers"),
        (Request(np.ones((2, 2), int)), "token_ids=[[1, 1], [1, 1]]: expected whole numbers"),
        (Request(np.ones(2)), "token_ids=[1.0, 1.0]: expected whole numbers"),
        (Request([1], max_new_tokens=0), "max_new_tokens=0"),
        (Request([1] * 5000), "leaves no room"),
        (Request([1], temperature=-0.1), "temperature=-0.1"),
        (Request([1], temperature=float("nan")), "temperature=nan"),
        (Request([1], top_p=0.0), "top_p=0.0"),
        (Request([1], top_p=1.1), "top_p=1.1"),
        (Request([1], top_k=-1), "top_k=-1"),
        (Request([1], min_p=2.0), "min_p=2.0"),
    ],
)
def test_bad_requests_are_one_line_with_their_number(pair, request_, said):
    with pytest.raises(InputError, match="prompt 1: ") as error:
        generation.generate(pair, ["abc", request_])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_policies_that_do_not_fit(pair, tiny_pair):
    with pytest.raises(InputError, match="threshold"):
        generation.generate(pair, ["abc"], policy="threshold")
    plain = Pair(pair.models.replace(drafter=None, drafter_config=None), pair.tokenizer)
    with pytest.raises(InputError, match="needs a drafter"):
        generation.generate(plain, ["abc"], policy="fixed")
    with pytest.raises(InputError, match="expected a list of them, not a string"):
        generation.generate(pair, "abc")
    with pytest.raises(InputError, match="slots=0: expected a whole number above 0"):
        generation.generate(pair, ["abc"], slots=0)
    with pytest.raises(InputError, match="no prompts"):
        generation.generate(pair, [])
