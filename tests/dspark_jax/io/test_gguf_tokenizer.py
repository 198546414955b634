"""The tokenizer in a GGUF file: ids by hand, every byte there and back, and what is refused."""

import pytest

from dspark_jax.io.tokenizer import load_tokenizer
from tests.dspark_jax.io.conftest import refused
from tests.dspark_jax.io.gguf_writer import MERGES, TEMPLATE, TOKENS, TYPES, metadata, write

IDS = {token: i for i, token in enumerate(TOKENS)}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def load(tmp_path):
    """The tokenizer of a file with other metadata (None: without it)."""

    def tokenizer(**changes):
        keys = {f"tokenizer.{name}": value for name, value in changes.items()}
        keys = {k: v for k, v in (metadata() | keys).items() if v is not None}
        return load_tokenizer(write(tmp_path / "model.gguf", keys, {}))

    return tokenizer


def key(name, value):
    return {f"ggml.{name}": value}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hell", "o"]),
        (" hello", ["Ġhell", "o"]),
        ("hehe", ["he", "he"]),
        ("11", ["1", "1"]),  # merged nowhere: each digit alone
        ("a\n", ["a", "Ċ"]),
        ("é", ["Ã", "©"]),
        ("<|im_end|>", ["<|im_end|>"]),
        ("<user> he", ["<user>", "Ġhe"]),
        ("", []),
    ],
)
def test_ids(load, text, tokens):
    assert load().encode(text) == [IDS[t] for t in tokens]


@pytest.mark.parametrize(
    "text",
    [
        "".join(map(chr, range(0x250))),
        "naïve 😀\u200d日本\ufffd\U0010ffff",
        "  two spaces \t\r\n\n end ",
        "it's 1234.5, isn't it ? ' , .",
        "\x00\x1b\x7f\x85\xa0",
    ],
)
def test_round_trip(load, text):
    tokenizer = load()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_byte_that_the_vocabulary_lacks_is_dropped(load):
    tokens = ["<none>" if t == "b" else t for t in TOKENS]
    tokenizer = load(**key("tokens", tokens))
    assert tokenizer.decode(tokenizer.encode("abc")) == "ac"


def test_special_tokens(load):
    tokenizer = load()
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == len(TOKENS)
    ids = [IDS["a"], 2, IDS["<user>"], 3]
    assert tokenizer.decode(ids) == "a<user>"  # of control tokens alone
    assert tokenizer.decode(ids, special=True) == "a<|im_end|><user><|mask|>"
    assert load(**key("eos_token_id", None)).eos_ids == ()


def test_begin_of_text(load):
    tokenizer = load(**key("add_bos_token", True))
    assert tokenizer.encode("a") == [1, IDS["a"]]
    assert tokenizer.encode("a", special=False) == [IDS["a"]]
    assert load(**key("add_bos_token", False)).encode("a") == [IDS["a"]]


def test_chat(load):
    tokenizer = load()
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_text(CHAT, generation_prompt=True) == text
    start, end, line = 1, 2, IDS["Ċ"]
    user, answer = ([IDS[c] for c in word] for word in ("user", "assistant"))
    hi = [IDS["h"], IDS["i"]]
    assert tokenizer.chat(CHAT) == [start, *user, line, *hi, end, line, start, *answer, line]


def test_no_chat_template(load):
    message = refused(lambda _: load(chat_template=None).chat(CHAT), "model.gguf")
    assert "tokenizer.chat_template in a GGUF file" in message
    assert load(chat_template=TEMPLATE + "!").chat_text(CHAT, generation_prompt=True)[-1] == "!"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "llama", "model='llama' is not known, expected 'gpt2'"),
        ("model", None, "tokenizer.ggml.model is missing"),
        ("pre", "llama-bpe", "pre='llama-bpe' is not known, expected 'smollm'"),
        ("tokens", [*TOKENS[:-1], "a"], "tokens: expected different ones"),
        ("token_type", TYPES[1:], "266 of them, expected one for each token"),
        ("token_type", None, "tokenizer.ggml.token_type is missing"),
        ("merges", [*MERGES, "a b"], "'a b': expected two tokens that make up a third"),
        ("merges", ["hell"], "'hell': expected two tokens that make up a third"),
        ("bos_token_id", 999, "bos_token_id=999, expected an id in 0..266"),
    ],
)
def test_refused(load, name, value, message):
    assert message in refused(lambda _: load(**key(name, value)), "model.gguf")


def test_begin_of_text_that_is_not_named(load):
    changes = key("add_bos_token", True) | key("bos_token_id", None)
    assert "bos_token_id is missing" in refused(lambda _: load(**changes), "model.gguf")
