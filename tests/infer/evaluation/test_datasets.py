"""Sets of prompts by name and by file."""

import json

import pytest

from dspark_jax.config import InputError
from infer.evaluation.datasets import open_datasets


def write(path, count=1):
    path.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(count)))
    return path


def test_names_files_and_domains(tmp_path):
    """By domain, whatever the order; a file of a benchmark's name counts to its domain."""
    for name in ("mt-bench", "gsm8k"):
        write(tmp_path / f"{name}.jsonl", 3)
    own = tmp_path / "own"
    own.mkdir()
    mine = write(own / "mine.jsonl", 5)
    code = write(own / "mbpp.jsonl")
    found = open_datasets(("mt-bench", "gsm8k"), tmp_path, (mine, code), 2)
    assert [(d.name, d.domain, len(d.lines)) for d in found] == [
        ("gsm8k", "math", 2),
        ("mbpp", "code", 1),
        ("mt-bench", "chat", 2),
        ("mine", "other", 2),
    ]
    assert [line.fields["prompt"] for line in found[0].lines] == ["p0", "p1"]


def test_without_a_limit_all_are_taken(tmp_path):
    (found,) = open_datasets((), tmp_path, (write(tmp_path / "a.jsonl", 7),), None)
    assert len(found.lines) == 7


def test_refused(tmp_path):
    with pytest.raises(InputError, match=r"gsm8k.jsonl: no such file; python scripts/prepare_pro"):
        open_datasets(("gsm8k",), tmp_path, (), None)
    folder = tmp_path / "sub"
    folder.mkdir()
    two = write(tmp_path / "a.jsonl"), write(folder / "a.jsonl")
    with pytest.raises(InputError, match="there is another a, expected different names"):
        open_datasets((), tmp_path, two, None)
