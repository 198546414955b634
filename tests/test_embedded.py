"""The pair inside the package."""

import ast

import pytest

import dspark_jax
from dspark_jax.generation import EMBEDDED
from dspark_jax.request import Request
from train import corpus


@pytest.fixture(scope="module")
def pair():
    return dspark_jax.load()


def test_target_is_small_and_its_vocabulary_is_its_tokenizers(pair):
    assert (EMBEDDED / "target" / "model.safetensors").stat().st_size < 8e6
    assert pair.tokenizer.vocab_size == pair.models.target_config.vocab_size


def test_python_is_spelt_in_tokens_and_back(pair):
    for text in corpus.stdlib_texts(held_out=True)[:3]:
        ids = pair.tokenizer.encode(text)
        assert pair.tokenizer.decode(ids) == text
        assert len(ids) < len(text) / 1.5


def test_a_signature_is_continued_with_a_body(pair):
    (found,) = dspark_jax.generate(pair, ["def read_text(path, encoding=None):"], max_new_tokens=32)
    assert found.text.startswith("\n    "), found.text
    assert "return" in found.text or '"""' in found.text or "=" in found.text


def test_a_chat_is_answered_with_a_function_body(pair):
    heads = ("def count(items):\n", "def get_name(self):\n")
    questions = [[{"role": "user", "content": f"{corpus.REQUEST}\n{head}"}] for head in heads]
    asked = [Request(pair.tokenizer.chat(q, thinking=False), max_new_tokens=128) for q in questions]
    for head, found in zip(heads, dspark_jax.generate(pair, asked), strict=True):
        assert found.finish_reason == "stop"
        (function,) = ast.parse(head + found.text).body
        assert isinstance(function.body[-1], ast.Return), found.text


def test_speculation_gives_the_targets_own_text_in_fewer_rounds(pair):
    prompts = [
        "class Queue:\n    def __init__(self, maxsize=0):",
        "import os\nimport sys\n\n\ndef main(",
    ]
    plain = dspark_jax.generate(pair, prompts, policy="none", max_new_tokens=48)
    drafted = dspark_jax.generate(pair, prompts, max_new_tokens=48)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    rounds = sum(len(c.accepted_lengths) for c in drafted)
    assert rounds < 0.67 * sum(len(c.accepted_lengths) for c in plain)
