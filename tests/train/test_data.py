"""Batches: what is in them, in which order, on how many hosts, and from where they go on."""

import json

import numpy as np
import pytest

from dspark_jax.config import InputError
from dspark_jax.io.tokenizer import load_tokenizer
from tests.train.conftest import assert_same, joined, take
from train import data
from train.data import make_batches, open_documents
from train.encoding import Encoder
from train.settings import DataSettings


@pytest.fixture(scope="module")
def tokenizer(small_target):
    """A byte a token."""
    return load_tokenizer(small_target)


@pytest.fixture
def make(tmp_path, tokenizer, monkeypatch):
    """Makes iterators over ten documents of 2 to 11 tokens, each of a letter of its own."""
    monkeypatch.setattr(data, "MIXED", 8)
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": chr(97 + i) * (i + 2)}) + "\n" for i in range(10)))

    def make(seed=0, part=0, parts=1, **changes):
        settings = DataSettings(
            **{"files": (str(path),), "max_length": 16, "batch_size": 2, **changes}
        )
        encoder = Encoder(tokenizer, (2,), settings.max_length)
        documents = open_documents(settings, encoder)
        return make_batches(
            settings, documents, encoder,
            seed=seed, part=part, parts=parts,
        )  # fmt: skip

    return make


def documents_of(batch) -> list[tuple[str, int]]:
    """Letter and number of tokens of each document in a batch, which are checked on the way."""
    found = []
    for tokens, mask, length, segments in zip(
        *(batch[name] for name in ("tokens", "loss_mask", "length", "segments")), strict=True
    ):
        assert (mask == (np.arange(len(tokens)) < length)).all()
        assert (segments > 0).tolist() == mask.tolist()
        assert not tokens[length:].any()
        number = segments.max()
        assert set(segments[:length]) == set(range(1, number + 1))
        assert (np.diff(segments[:length]) >= 0).all()
        for document in range(1, number + 1):
            inside = tokens[segments == document]
            assert (inside == inside[0]).all()
            found.append((inside[0], len(inside)))
    return found


def test_batches_hold_whole_documents_side_by_side(make, tokenizer):
    batches = take(make(), 40)
    assert {name: (x.shape, x.dtype) for name, x in batches[0].items()} == {
        "tokens": ((2, 16), np.int32),
        "loss_mask": ((2, 16), bool),
        "segments": ((2, 16), np.int32),
        "length": ((2,), np.int32),
    }
    found = [document for batch in batches for document in documents_of(batch)]
    sizes = {tokenizer.encode(chr(97 + i))[0]: i + 2 for i in range(10)}
    assert all(sizes[letter] == size for letter, size in found)
    assert {letter for letter, _ in found} == sizes.keys()
    assert len(found) > 2.2 * 40 > 80  # some rows are shared
    counts = np.bincount([size for _, size in found])[2:]
    assert counts.max() - counts.min() <= 6  # as often as one another, but for what is under way


def test_each_pass_has_an_order_of_its_own(make, monkeypatch):
    monkeypatch.setattr(data, "MIXED", 1)  # what is mixed lies across the ends of passes
    items = take(make(documents_per_row=1), 10)
    assert all("segments" not in item for item in items)
    lengths = np.concatenate([b["length"] for b in items])
    for item in items:
        assert (item["loss_mask"].sum(1) == item["length"]).all()
    assert sorted(lengths) == sorted([*range(2, 12)] * 2)
    assert (lengths[:10] != lengths[10:]).any()


def test_the_seed_decides_the_order(make):
    first, again, other = (take(make(seed), 5) for seed in (3, 3, 4))
    assert_same(first, again)
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("documents_per_row", [1, 4])
@pytest.mark.parametrize("consumed", [0, 1, 2, 3, 5, 7, 12, 31])
def test_a_saved_place_is_found_again(make, consumed, documents_per_row):
    """To the bit, within passes and across their ends."""
    iterator = make(documents_per_row=documents_per_row)
    take(iterator, consumed)
    place = json.loads(json.dumps(iterator.get_state()))
    rest = take(iterator, 12)
    restored = make(documents_per_row=documents_per_row)
    restored.set_state(place)
    assert_same(rest, take(restored, 12))
    # And in an iterator that has been used.
    restored.set_state(place)
    assert_same(rest, take(restored, 12))


def test_the_place_is_small(make):
    iterator = make(batch_size=8)
    before = len(json.dumps(iterator.get_state()))
    take(iterator, 30)
    assert len(json.dumps(iterator.get_state())) < before + 100 < 2500


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_hosts_share_the_batches_of_one(make, parts):
    whole = take(make(batch_size=8), 6)
    parts = [take(make(batch_size=8, part=i, parts=parts), 6) for i in range(parts)]
    assert_same(map(joined, zip(*parts, strict=True)), whole)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (8, 1)])
def test_a_place_is_found_again_by_another_number_of_hosts(make, before, after):
    whole = take(make(batch_size=8), 9)
    readers = [make(batch_size=8, part=i, parts=before) for i in range(before)]
    for reader in readers:
        take(reader, 5)
    # Two hosts whose devices work on the same rows have the same part.
    places = [(i, reader.get_state()) for i, reader in enumerate(readers)] * 2
    lanes = json.loads(json.dumps(data.join_places(places)))
    assert len(lanes) == 8
    parts = []
    for i in range(after):
        reader = make(batch_size=8, part=i, parts=after)
        reader.set_state(data.own_place(lanes, i, after))
        parts.append(take(reader, 4))
    assert_same(map(joined, zip(*parts, strict=True)), whole[5:])


def test_hosts_that_cannot_share_are_refused(make):
    with pytest.raises(InputError, match="batch_size=6 read in 4 parts by hosts: expected"):
        make(batch_size=6, parts=4)


def test_a_large_batch_has_several_rows_of_a_lane(make, monkeypatch):
    monkeypatch.setattr(data, "LANES", 4)
    (batch,) = take(make(batch_size=12), 1)
    assert batch["tokens"].shape == (12, 16)
    parts = [take(make(batch_size=12, part=i, parts=4), 1)[0] for i in range(4)]
    assert [part["tokens"].shape for part in parts] == [(3, 16)] * 4
    assert_same([batch], [joined(parts)])


def test_nothing_to_learn_from(tmp_path, tokenizer):
    (tmp_path / "short.txt").write_text("x")
    settings = DataSettings(files=(str(tmp_path / "short.txt"),))
    with pytest.raises(InputError, match="long enough"):
        open_documents(settings, Encoder(tokenizer, (2,), 16))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "expected --inspect N"),
        (["tiny"], "expected --inspect N"),
        (["--inspect"], "--inspect : expected a number of rows"),
        (["--inspect", "0"], "--inspect 0: expected a number of rows"),
        (["--inspect", "-1"], "--inspect -1: expected a number of rows"),
        (["--inspect=many"], "--inspect many: expected a number of rows"),
        (["--inspect", "two"], "--inspect two: expected a number of rows"),
        (["--inspect", "2", "none_such"], "preset 'none_such'"),
        (["--inspect", "2", "--no-such", "1"], "--no-such"),
    ],
)
def test_bad_arguments(args, expected):
    with pytest.raises(InputError) as error:
        data.main(args)
    assert expected in str(error.value)


def test_help_is_there(capsys):
    with pytest.raises(SystemExit) as stop:
        data.main(["--help"])
    assert stop.value.code == 0
    assert "--inspect N" in capsys.readouterr().out
