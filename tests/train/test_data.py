import itertools
import json

import numpy as np
import pytest

from dspark_jax.config import InputError
from dspark_jax.io.tokenizer import load_tokenizer
from train import corpus, data
from train.data import Documents, Encoder, Source, make_batches
from train.settings import DataSettings

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "ef"},
    {"role": "assistant", "content": "gh"},
]


@pytest.fixture(scope="module")
def encoder(small_target):
    return Encoder(load_tokenizer(small_target), (2, 0), 128)


@pytest.fixture(scope="module")
def thinking_encoder(thinking_target):
    return Encoder(load_tokenizer(thinking_target), (2, 0), 128)


def texts(encoder, window):
    """The text of a window, and what of it is in the loss mask, runs apart by a bar."""
    tokens = window["tokens"][: window["length"]]
    learnt = [
        encoder.tokenizer.decode(tokens[[i for i, _ in run]], special=True)
        for inside, run in itertools.groupby(enumerate(window["loss_mask"]), key=lambda x: x[1])
        for run in [list(run)]
        if inside
    ]
    return encoder.tokenizer.decode(tokens, special=True), "|".join(learnt)


def test_answers_and_their_stop_tokens_are_learnt(encoder):
    (window,) = encoder.flat_map(CHAT)
    text, learnt = texts(encoder, window)
    assert text == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>\n"
        "<|im_start|>user\nef<|im_end|>\n<|im_start|>assistant\ngh<|im_end|>"
    )
    assert learnt == "cd<|im_end|>|gh<|im_end|>"
    assert not window["loss_mask"][window["length"] :].any()


def test_an_empty_thinking_block_belongs_to_the_prompt(thinking_encoder):
    """And where old answers are shown without it, each turn is a sequence of its own."""
    first, second = (texts(thinking_encoder, w) for w in thinking_encoder.flat_map(CHAT))
    think = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert first == (f"<|im_start|>user\nab<|im_end|>\n{think}cd<|im_end|>", "cd<|im_end|>")
    assert second == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>\n"
        f"<|im_start|>user\nef<|im_end|>\n{think}gh<|im_end|>",
        "gh<|im_end|>",
    )


def test_of_a_text_everything_is_learnt(encoder):
    (window,) = encoder.flat_map("hello")
    assert texts(encoder, window) == ("hello", "hello")
    assert window["tokens"].shape == window["loss_mask"].shape == (128,)


def test_long_documents_are_cut_and_nothing_is_lost(encoder):
    text = "".join(chr(97 + i % 26) for i in range(300))
    windows = encoder.flat_map(text)
    assert [int(w["length"]) for w in windows] == [128, 128, 44]
    assert "".join(texts(encoder, w)[0] for w in windows) == text
    assert encoder.flat_map("x") == []  # no block can be anchored in one token


def test_functions_of_a_source_are_conversations(encoder):
    windows = encoder.flat_map(Source("def f():\n    return 1\n"))
    assert [texts(encoder, w)[1] for w in windows] == [
        "def f():\n    return 1\n",
        "    return 1\n<|im_end|>",
    ]


def test_a_template_without_stop_token_is_refused(small_target):
    encoder = Encoder(load_tokenizer(small_target), (7,), 128)
    with pytest.raises(InputError, match="stop tokens"):
        encoder.flat_map(CHAT)


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return str(path)


def test_kinds_of_lines(tmp_path):
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = write(tmp_path, {"text": "t"}, "", {"messages": CHAT}, {"conversations": sharegpt})
    documents = Documents([path])
    assert [documents[i] for i in range(len(documents))] == [
        "t",
        CHAT,
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "a"', "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object"),
        ({"prompt": "a"}, "line 2: expected messages or conversations"),
        ({"text": 3}, "line 2: text"),
        ({"messages": []}, "line 2: expected messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: messages: .*assistant"),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\]"),
        ({"conversations": ["a"]}, r"line 2: conversations\[0\]"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, expected):
    path = write(tmp_path, {"text": "fine"}, line)
    with pytest.raises(InputError, match=expected) as error:
        Documents([path])
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_files_are_named(tmp_path, encoder):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("absent.txt", "empty.txt", "latin.txt", "empty.jsonl"):
        with pytest.raises(InputError, match=name):
            Documents([str(tmp_path / name)])
    with pytest.raises(InputError, match="files is empty"):
        Documents([])
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(InputError, match="long enough"):
        make_batches(
            DataSettings(files=(str(tmp_path / "short.txt"),)), encoder.tokenizer, (2,), seed=0
        )


@pytest.fixture
def batches(tmp_path, encoder, monkeypatch):
    """Makes an iterator over ten one-window documents of different length."""
    monkeypatch.setattr(data, "SHUFFLED", 4)
    path = write(tmp_path, *({"text": chr(97 + i) * (i + 2)} for i in range(10)))

    def make(seed=0, batch_size=2):
        settings = DataSettings(files=(path,), max_length=16, batch_size=batch_size)
        return make_batches(settings, encoder.tokenizer, (2,), seed=seed)

    return make


def take(iterator, number):
    return [next(iterator) for _ in range(number)]


def test_batches_go_over_everything_in_new_orders(batches):
    items = take(batches(), 10)
    assert items[0]["tokens"].shape == (2, 16)
    assert items[0]["tokens"].dtype == np.int32
    lengths = np.concatenate([b["length"] for b in items])
    for item in items:
        assert (item["loss_mask"].sum(1) == item["length"]).all()
    assert sorted(lengths) == sorted([*range(2, 12)] * 2)
    assert (lengths[:10] != lengths[10:]).any()


def test_the_seed_decides_the_order(batches):
    first, again, other = (take(batches(seed), 5) for seed in (3, 3, 4))
    assert all((a["tokens"] == b["tokens"]).all() for a, b in zip(first, again, strict=True))
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("consumed", [0, 1, 2, 3, 5, 7])
def test_a_saved_place_is_found_again(batches, consumed):
    iterator = batches()
    take(iterator, consumed)
    place = json.loads(json.dumps(iterator.get_state()))
    rest = take(iterator, 6)
    restored = batches()
    restored.set_state(place)
    for a, b in zip(rest, take(restored, 6), strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])


def test_the_standard_library_is_the_default_data():
    documents = Documents(DataSettings().files)
    assert len(documents) == len(corpus.stdlib_texts()) > 100
    assert isinstance(documents[0], Source)
