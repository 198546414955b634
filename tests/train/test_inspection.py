import io
import json

import numpy as np
import pytest

from dspark_jax.io import cli
from dspark_jax.io.tokenizer import load_tokenizer
from train import data, inspection


@pytest.fixture(scope="module")
def tokenizer(small_target):
    return load_tokenizer(small_target)


@pytest.fixture
def row(tokenizer):
    """Two documents, `abcd` and `e\\x1bf`, and two places of padding."""
    tokens = tokenizer.encode("abcde\x1bf")
    return {
        "tokens": np.array([*tokens, 0, 0], np.int32),
        "loss_mask": np.array([0, 1, 1, 0, 1, 1, 1, 0, 0], bool),
        "segments": np.array([1, 1, 1, 1, 2, 2, 2, 0, 0], np.int32),
        "length": np.array(7, np.int32),
    }


def test_marks(row, tokenizer):
    """Characters that a terminal would obey are shown, not sent."""
    assert inspection.show(3, row, tokenizer, colour=False) == (
        "=== row 3: 2 documents, 7 tokens, 5 learnt, 2 padding\n"
        "--- document 1: tokens 0..3\n"
        "a[+bc+]d\n"
        "--- document 2: tokens 4..6\n"
        "[+e\\x1bf+]"
    )


def test_colours(row, tokenizer):
    text = inspection.show(0, row, tokenizer, colour=True)
    assert "a\x1b[1;32mbc\x1b[0md" in text
    assert text.count("\x1b") == 4


def test_a_row_of_one_document(row, tokenizer):
    del row["segments"]
    text = inspection.show(0, row, tokenizer, colour=False)
    assert text == (
        "=== row 0: 1 document, 7 tokens, 5 learnt, 2 padding\n"
        "--- document 1: tokens 0..6\n"
        "a[+bc+]d[+e\\x1bf+]"
    )


def test_colours_are_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert inspection.wants_colour(Terminal())
    assert not inspection.wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not inspection.wants_colour(Terminal())


def test_the_command(small_target, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    chat = {"prompt": "ab", "response": "cd"}
    path.write_text("{\n" + f"{json.dumps(chat)}\n" * 3)
    args = ["--inspect", "2", "--target", str(small_target), "--files", str(path)]
    args += ["--max-length", "50", "--bad-records", "1", "--batch-size", "1"]
    assert cli.run(lambda: data.main(args)) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"passed over: {path}: line 1: not valid JSON")
    assert out == (
        "".join(
            f"=== row {i}: 1 document, 24 tokens, 3 learnt, 26 padding\n"
            "--- document 1: tokens 0..23\n"
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[+cd<|im_end|>+]\n"
            for i in range(2)
        )
        + "files: 3 documents, 1 bad record; these 2 rows: 2 documents, 48 tokens,"
        " 12.5% of them learnt, 52.0% padding\n"
    )
