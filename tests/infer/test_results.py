"""The output file: what a line holds, and when and where a run may go on."""

import dataclasses
import errno
import json
import os

import pytest

from dspark_jax.config import InputError
from dspark_jax.request import Completion, Request
from infer import results
from infer.requests import Prompt

SETTINGS = {"temperature": 0.5, "target": "a/b"}
IDS = [1, "x", 3]
KEYS = [(name, None) for name in IDS]


def completion():
    return Completion(
        prompt_tokens=2,
        token_ids=[5, 6, 7, 8],
        text="é\n",
        finish_reason="length",
        accepted_lengths=[2, 1],
        verified_lengths=[3, 3],
        accepted_drafts=[1, 2],
        confidences=[[0.5, 0.25, 1.0], [0.5, 0.25, 1.0]],
        confidence_logits=[[0.0, -1.1, 9.0], [0.0, -1.1, 9.0]],
    )


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "id": "x"}\n{"prompt": "c"}\n')
    return path


@pytest.fixture
def output(tmp_path, prompts):
    """An output with the first two of three results."""
    path = tmp_path / "out.jsonl"
    size = results.begin(path, results.meta(SETTINGS, prompts), 0)
    results.append(path, [{"id": 1}, {"id": "x"}], size=size)
    return path


def append(path, lines):
    return results.append(path, lines, size=path.stat().st_size)


def test_a_result():
    line = results.result(Prompt("x", Request((1, 2))), completion())
    assert line == {
        "id": "x",
        "token_ids": [5, 6, 7, 8],
        "text": "é\n",
        "finish_reason": "length",
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "accepted_lengths": [2, 1],
    }
    traced = results.result(Prompt("x", Request((1, 2))), completion(), trace=True)
    assert traced == line | {
        "verified_lengths": [3, 3],
        "confidences": [[0.5, 0.25, 1.0], [0.5, 0.25, 1.0]],
        "confidence_logits": [[0.0, -1.1, 9.0], [0.0, -1.1, 9.0]],
    }


def test_a_sample_with_logprobs():
    made = dataclasses.replace(completion(), logprobs=[-0.5, -1.5, -0.25, 0.0])
    line = results.result(Prompt("x", Request((1, 2))), made)
    both = {"sample": 0, "logprobs": [-0.5, -1.5, -0.25, 0.0]}
    sample = Prompt("x", Request((1, 2)), sample=0)
    assert results.result(sample, made, logprobs=True) == line | both


def test_a_result_with_its_prompt():
    line = results.result(Prompt("x", Request((1, 2))), completion(), prompt_ids=True)
    assert (line["prompt_ids"], line["token_ids"]) == ([1, 2], [5, 6, 7, 8])


def test_an_error_has_the_same_fields():
    extras = {"trace": True, "logprobs": True, "prompt_ids": True}
    line = results.result(Prompt(7, None, "line 7: no"), None, **extras)
    whole = results.result(Prompt("x", Request((1, 2))), completion(), **extras)
    assert line.keys() == whole.keys() | {"error"}
    assert (line["id"], line["finish_reason"], line["error"]) == (7, "error", "line 7: no")
    assert not any(line[name] for name in line.keys() - {"id", "finish_reason", "error"})


def test_one_line_a_result_whatever_the_text(output):
    append(output, [{"id": 3, "text": "a\u2028b\x85c\nd"}])
    assert [json.loads(x)["id"] for x in output.read_text().splitlines()] == IDS


def test_goes_on_behind_the_results(output, prompts):
    assert results.finished(output, SETTINGS, prompts, KEYS) == 2
    append(output, [{"id": 3}])
    assert results.finished(output, SETTINGS, prompts, KEYS) == 3


def test_goes_on_between_the_samples_of_a_prompt(output, prompts):
    keys = [*KEYS[:2], (3, 0), (3, 1)]
    append(output, [{"id": 3, "sample": 0}])
    assert results.finished(output, SETTINGS, prompts, keys) == 3
    append(output, [{"id": 3, "sample": 1}])
    assert results.finished(output, SETTINGS, prompts, keys) == 4
    with pytest.raises(InputError, match="its 4 results are not the first of those"):
        results.finished(output, SETTINGS, prompts, [*keys[:2], (3, 1), (3, 0)])


def test_a_torn_line_is_dropped(output, prompts):
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"id": 3, "tex')
    assert results.finished(output, SETTINGS, prompts, KEYS) == 2
    assert output.read_bytes() != whole  # nothing is changed by asking
    assert results.begin(output, results.meta(SETTINGS, prompts), 2) == len(whole)
    assert output.read_bytes() == whole


def test_a_torn_first_line_is_dropped(output, prompts):
    output.write_bytes(b'{"id')
    assert results.finished(output, SETTINGS, prompts, KEYS) == 0
    assert results.begin(output, results.meta(SETTINGS, prompts), 0) == 0
    assert output.read_bytes() == b""


def test_two_commands_do_not_write_to_one_file(output, prompts):
    mine = output.stat().st_size
    append(output, [{"id": 3}])  # by another
    before = output.read_bytes()
    with pytest.raises(InputError, match="written to by another command"):
        results.append(output, [{"id": 3}], size=mine)
    with pytest.raises(InputError, match="written to by another command"):
        results.begin(output, results.meta(SETTINGS, prompts), 2)
    assert output.read_bytes() == before


def test_sizes_add_up(output, prompts):
    size = results.begin(output, results.meta(SETTINGS, prompts), 2)
    for number in range(3):
        size = results.append(output, [{"id": number}], size=size)
        assert size == output.stat().st_size


def test_no_output_or_an_empty_one_is_a_beginning(tmp_path, output, prompts):
    assert results.finished(tmp_path / "new.jsonl", SETTINGS, prompts, KEYS) == 0
    output.write_bytes(b"")
    assert results.finished(output, {"temperature": 9}, prompts, KEYS) == 0


def test_prompts_may_be_added(output, prompts):
    with open(prompts, "a") as file:
        file.write('{"prompt": "d"}\n')
    assert results.finished(output, SETTINGS, prompts, [*KEYS, (4, None)]) == 2
    results.begin(output, results.meta(SETTINGS, prompts), 2)
    assert results.finished(output, SETTINGS, prompts, [*KEYS, (4, None)]) == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**SETTINGS, "temperature": 1.0}, "was begun with temperature=0.5, now it is 1.0"),
        ({"target": "a/b"}, "was begun with temperature=0.5, now it is None"),
        ({**SETTINGS, "top_k": 5}, "was begun with top_k=None, now it is 5"),
    ],
)
def test_other_settings(output, prompts, settings, expected):
    with pytest.raises(InputError) as error:
        results.finished(output, settings, prompts, KEYS)
    assert f"--output {output}: {expected}" in str(error.value)


def test_other_prompts(output, prompts):
    prompts.write_text(prompts.read_text().replace("b", "B"))
    with pytest.raises(InputError, match="begun with other prompts than those in"):
        results.finished(output, SETTINGS, prompts, KEYS)


def test_results_of_other_prompts(output, prompts):
    with pytest.raises(InputError, match="its 2 results are not the first of those"):
        results.finished(output, SETTINGS, prompts, [KEYS[1], KEYS[0], KEYS[2]])
    with pytest.raises(InputError, match="its 2 results are not the first of those"):
        results.finished(output, SETTINGS, prompts, KEYS[:1])
    with pytest.raises(InputError, match="its 2 results are not the first of those"):
        results.finished(output, SETTINGS, prompts, [KEYS[0], ("x", 0), ("x", 1)])


def test_other_files_are_left_alone(output, prompts):
    for text in ("my notes\n", "[1]\n", "7\n"):
        output.write_text(text)
        with pytest.raises(InputError, match="line 1: not a result; expected a new file"):
            results.finished(output, SETTINGS, prompts, KEYS)
    output.write_text("my notes\n")
    with pytest.raises(InputError, match="line 1: not a result; expected a new file"):
        results.finished(output, SETTINGS, prompts, KEYS)
    results.meta_path(output).unlink()
    with pytest.raises(InputError, match=r"without out\.jsonl\.meta\.json it cannot be continued"):
        results.finished(output, SETTINGS, prompts, KEYS)
    assert output.read_text() == "my notes\n"


@pytest.mark.parametrize("text", ["{}", '{"settings": 1, "prompts": {}}', "[]", "{"])
def test_a_meta_file_of_something_else(output, prompts, text):
    results.meta_path(output).write_text(text)
    with pytest.raises(InputError, match=r"out\.jsonl\.meta\.json"):
        results.finished(output, SETTINGS, prompts, KEYS)


def test_places_where_nothing_can_be_written(tmp_path):
    with pytest.raises(InputError, match=r"--summary .*: no such folder as .*absent"):
        results.check_place(tmp_path / "absent" / "s.json", "--summary")
    with pytest.raises(InputError, match=r"--output .*: is a folder, expected a file"):
        results.check_place(tmp_path, "--output")
    results.check_place(tmp_path / "new.jsonl", "--output")


def test_a_full_disk_names_the_file(output, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        append(output, [{"id": 3}])
    assert error.value.filename == str(output)


def test_a_full_disk_leaves_the_meta_file_as_it_was(output, prompts, monkeypatch):
    def full(old, new):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = results.meta_path(output).read_bytes()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        results.begin(output, results.meta({"other": 1}, prompts), 2)
    assert results.meta_path(output).read_bytes() == before
    assert sorted(p.name for p in output.parent.iterdir()) == [
        "out.jsonl",
        "out.jsonl.meta.json",
        "prompts.jsonl",
    ]
