"""Files to documents; what is wrong with files, by way of the command that prints rows."""

import json
import os
from pathlib import Path

import pytest

from dspark_jax.config import InputError
from dspark_jax.io import cli
from dspark_jax.io.tokenizer import load_tokenizer
from train import corpus, data
from train.documents import BOM, Document, Documents
from train.encoding import Encoder
from train.records import Chat, Source, Text
from train.settings import DataSettings

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
FINE = {"messages": CHAT}


def encoded(line) -> bytes:
    return line if isinstance(line, bytes) else json.dumps(line).encode()


def write(folder: Path, *lines, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_bytes(b"".join(encoded(line) + b"\n" for line in lines))
    return str(path)


def test_kinds_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("one text\n")
    path = write(tmp_path, {"text": "t"}, b"", b"  ", FINE)
    documents = Documents([path, str(tmp_path / "a.txt")])
    assert [documents[i] for i in range(len(documents))] == [
        Document(f"{path}: line 1", Text("t")),
        Document(f"{path}: line 4", Chat(CHAT)),
        Document(str(tmp_path / "a.txt"), Text("one text\n")),
    ]
    with pytest.raises(IndexError):
        documents[3]


def test_marks_of_utf_8_are_no_part_of_the_text(tmp_path):
    path = write(tmp_path, BOM + encoded({"text": "é"}), {"text": "b"})
    (tmp_path / "a.txt").write_bytes(BOM + b"text")
    documents = Documents([path, str(tmp_path / "a.txt")])
    assert [documents[i].content.text for i in range(3)] == ["é", "b", "text"]


def test_long_texts_are_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("train.documents.PIECE", 8)
    text = "é1\n" + "a long line\n" + "2\n3\n4\n5\n6\n7\n" + "last"
    for name, mark in (("plain.txt", b""), ("marked.txt", BOM)):
        (tmp_path / name).write_bytes(mark + text.encode())
        documents = Documents([str(tmp_path / name)])
        found = [documents[i].content.text for i in range(len(documents))]
        assert found == ["é1\na long line\n", "2\n3\n4\n5\n6\n", "7\nlast"]
        assert documents[2].where == str(tmp_path / name)


def test_a_last_line_needs_no_end(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n{"text": "b"}')
    documents = Documents([str(tmp_path / "a.jsonl")])
    assert [documents[i].content.text for i in range(2)] == ["a", "b"]


def test_the_standard_library_is_the_default_data():
    documents = Documents(DataSettings().files)
    assert len(documents) == len(corpus.stdlib_texts()) > 100
    assert isinstance(documents[0].content, Source)


def test_bad_lines_are_counted_up_to_a_limit(tmp_path):
    path = write(tmp_path, b"{", FINE, b"[", {"text": "t"}, {"messages": 3})
    with pytest.raises(InputError, match="line 1: not valid JSON"):
        Documents([path])
    with pytest.raises(InputError, match=r"line 5: .*; bad record 3, bad_records=2 are allowed"):
        Documents([path], bad_records=2)
    documents = Documents([path], bad_records=3)
    assert [documents[i].where for i in range(2)] == [f"{path}: line 2", f"{path}: line 4"]
    named = [line.split(": ")[2] for line in documents.passed_over()]
    assert named == ["line 1", "line 3", "line 5"]
    assert len(documents.bad) == 3


def test_the_limit_is_for_all_files(tmp_path):
    paths = [write(tmp_path, b"{", FINE, name=f"{i}.jsonl") for i in range(2)]
    with pytest.raises(InputError, match=r"1\.jsonl: line 1"):
        Documents(paths, bad_records=1)
    assert len(Documents(paths, bad_records=2)) == 2


def test_many_bad_records_are_not_all_named(tmp_path):
    documents = Documents([write(tmp_path, FINE, *[b"{"] * 30)], bad_records=30)
    lines = list(documents.passed_over())
    assert len(lines) == 21
    assert lines[-1] == "passed over: 10 more bad records"


def test_prompts_without_an_answer_are_no_bad_records(tmp_path):
    failed = {"id": 1, "token_ids": [], "finish_reason": "error", "error": "line 1: no"}
    path = write(tmp_path, failed, {"prompt_ids": [1], "token_ids": [2, 3]}, failed)
    documents = Documents([path])
    assert [documents[i].where for i in range(len(documents))] == [f"{path}: line 2"]
    assert documents.bad == []
    said = "passed over: 2 prompts that the target could not answer"
    assert list(documents.passed_over()) == [said]
    with pytest.raises(InputError, match="no good record in them"):
        Documents([write(tmp_path, failed)])


def test_what_a_check_refuses_is_a_bad_record(tmp_path):
    def check(content):
        if isinstance(content, Text):
            raise InputError("no texts, please")

    path = write(tmp_path, FINE, {"text": "t"})
    with pytest.raises(InputError, match=r"data\.jsonl: line 2: no texts, please"):
        Documents([path], check=check)
    assert len(Documents([path], bad_records=1, check=check)) == 1


# --- Malformed files, by way of a command ------------------------------------------------------


def turns(*messages, name="messages"):
    return {name: list(messages)}


USER, ANSWER = CHAT

BAD_LINES = {
    "unclosed": (b'{"text": "a"', "not valid JSON"),
    "no JSON": (b"hello", "not valid JSON"),
    "single quotes": (b"{'text': 'a'}", "not valid JSON"),
    "two values": (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
    "trailing comma": (b'{"text": "a",}', "not valid JSON"),
    "half of a string": (b'{"text": "a', "not valid JSON"),
    "NUL bytes": (b"\0\0\0\0", "not valid JSON"),
    "NUL in a string": (b'{"text": "a\0b"}', "not valid JSON"),
    "mark in the middle": (BOM + b'{"text": "a"}', "not valid JSON"),
    "huge number": (b'{"text": "ab", "n": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    "nested deeply": (b"[" * 200_000, "not valid JSON (nested too deeply)"),
    "Latin 1": (b'{"text": "caf\xe9"}', "not UTF-8 text"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16-be"), "not valid JSON"),
    "half a character": (b'{"text": "\\ud800 a"}', "not text (half of a surrogate pair)"),
    "a list": ([1], "expected a JSON object"),
    "a string": ("text", "expected a JSON object"),
    "null": (None, "expected a JSON object"),
    "nothing in it": ({}, "expected messages or conversations"),
    "other keys": ({"question": "a", "answer": "b"}, "expected messages or conversations"),
    "text is a number": ({"text": 3}, "text: expected a string"),
    "text is null": ({"text": None}, "text: expected a string"),
    "text is empty": ({"text": ""}, "text: expected a string that is not empty"),
    "no response": ({"prompt": "a"}, "response: expected a string"),
    "no prompt": ({"response": "a"}, "prompt: expected a string"),
    "prompt is a list": ({"prompt": ["a"], "response": "b"}, "prompt: expected a string"),
    "messages are null": ({"messages": None}, "messages: expected a list of turns"),
    "messages are a string": ({"messages": "hi"}, "messages: expected a list of turns"),
    "messages are an object": ({"messages": USER}, "messages: expected a list of turns"),
    "no messages": ({"messages": []}, "messages: expected a list of turns"),
    "conversations are empty": ({"conversations": []}, "conversations: expected a list of turns"),
    "a turn is a string": (turns("a", ANSWER), "messages[0]: expected an object"),
    "a turn is null": (turns(USER, None), "messages[1]: expected an object"),
    "no role": (turns({"content": "a"}, ANSWER), "messages[0]: expected the strings role"),
    "role is a number": (turns({**USER, "role": 1}, ANSWER), "messages[0]: expected the strings"),
    "unknown role": (turns({**USER, "role": "wizard"}, ANSWER), "messages[0]: role 'wizard'"),
    "role in capitals": (turns(USER, {**ANSWER, "role": "Assistant"}), "role 'Assistant'"),
    "unknown sender": (
        turns({"from": "them", "value": "a"}, name="conversations"),
        "conversations[0]: role 'them'",
    ),
    "no content": (turns(USER, {"role": "assistant"}), "messages[1]: content: expected a string"),
    "content is null": (turns({**USER, "content": None}, ANSWER), "messages[0]: content"),
    "content is a list": (
        turns({**USER, "content": [{"type": "text", "text": "a"}]}, ANSWER),
        "messages[0]: content: expected a string",
    ),
    "no assistant": (turns(USER, USER), "messages: expected a turn of the assistant"),
    "assistant alone": (turns(ANSWER), "messages: expected a turn of the assistant"),
    "calls are a string": (
        turns(USER, {**ANSWER, "tool_calls": "f(1)"}),
        "messages[1]: tool_calls: expected a list of calls",
    ),
    "call without a name": (
        turns(USER, {**ANSWER, "tool_calls": [{"function": {"arguments": {}}}]}),
        "messages[1]: tool_calls[0]: expected a function",
    ),
    "call without arguments": (
        turns(USER, {**ANSWER, "tool_calls": [{"name": "f"}]}),
        "messages[1]: tool_calls[0]: expected a function",
    ),
    "call is null": (
        turns(USER, {**ANSWER, "tool_calls": [None]}),
        "messages[1]: tool_calls[0]: expected a function",
    ),
    "thoughts are a list": (
        turns(USER, {**ANSWER, "reasoning_content": ["r"]}),
        "messages[1]: reasoning_content: expected a string",
    ),
    "tools are a string": ({**FINE, "tools": "f"}, "tools: expected a list of objects"),
    "tools are names": ({**FINE, "tools": ["f"]}, "tools: expected a list of objects"),
    "ids without a prompt": ({"token_ids": [1, 2]}, "prompt_ids: expected a list of token ids"),
    "ids of a prompt alone": ({"prompt_ids": [1, 2]}, "token_ids: expected a list of token ids"),
    "ids are text": ({"prompt_ids": [1], "token_ids": ["a"]}, "token_ids: expected a list"),
    "ids are truths": ({"prompt_ids": [True], "token_ids": [1]}, "prompt_ids: expected a list"),
    "ids are fractions": ({"prompt_ids": [1.5], "token_ids": [1]}, "prompt_ids: expected a list"),
    "ids are negative": ({"prompt_ids": [-1], "token_ids": [1]}, "prompt_ids: expected a list"),
    "ids are not the target's": (
        {"prompt_ids": [1], "token_ids": [260]},
        "token id 260: expected ids below 260",
    ),
    "refused by the template": (
        turns({"role": "system", "content": "a"}, ANSWER),
        "the chat template refused: no user",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def strict_target(small_target, tmp_path_factory):
    """Its template wants a user's turn."""
    folder = tmp_path_factory.mktemp("strict")
    for path in small_target.iterdir():
        (folder / path.name).symlink_to(path)
    settings = json.loads((small_target / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no user') }}{% endif %}" + settings["chat_template"]
    )
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def strict_encoder(strict_target):
    return Encoder(load_tokenizer(strict_target), (2,), 128)


@pytest.fixture
def show(strict_target, capsys):
    """Runs the command: (exit code, what it printed, what it said of errors)."""

    def run(*args: str):
        settings = ["--inspect", "1", "--target", str(strict_target), "--batch-size", "1"]
        code = cli.run(lambda: data.main([*settings, *args]))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_are_named_or_counted(tmp_path, show, strict_encoder, name):
    line, expected = BAD_LINES[name]
    path = write(tmp_path, FINE, line)
    before = Path(path).read_bytes()
    code, out, err = show("--files", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {path}: line 2: ")
    assert expected in err
    documents = Documents([path], bad_records=1, check=strict_encoder.check)
    assert len(documents) == 1
    assert [*documents.passed_over()] == [err.strip().replace("error", "passed over", 1)]
    assert Path(path).read_bytes() == before


def folder(path: Path) -> None:
    path.mkdir()


def link(goal: str):
    return lambda path: path.symlink_to(goal)


def holding(content: bytes):
    return lambda path: path.write_bytes(content)


BAD_FILES = {
    "absent.txt": (lambda path: None, "no such file"),
    "absent.jsonl": (lambda path: None, "no such file"),
    "dangling.jsonl": (link("nowhere"), "no such file"),
    "folder": (folder, "a folder, expected text or JSONL files"),
    "folder.jsonl": (folder, "a folder, expected text or JSONL files"),
    "pipe.jsonl": (os.mkfifo, "not a file that can be read twice"),
    "failing.jsonl": (link("/proc/self/mem"), "cannot be read (Input/output error)"),
    "failing.txt": (link("/proc/self/mem"), "cannot be read (Input/output error)"),
    "empty.txt": (holding(b""), "no text in it"),
    "blank.txt": (holding(b" \n"), "no text in it"),
    "latin.txt": (holding(b"caf\xe9"), "not UTF-8 text"),
    "utf16.txt": (holding("text".encode("utf-16")), "not UTF-8 text"),
    "nul.txt": (holding(b"te\0xt"), "not text (a NUL at character 2)"),
    "binary.jsonl.gz": (holding(b"\x1f\x8b\x08\x00\x00"), "not UTF-8 text"),
    "list.json": (holding(b'[{"text": "a"}]'), "ends in .jsonl"),
    "empty.jsonl": (holding(b""), "no documents in it"),
    "blank.jsonl": (holding(b"\n \n"), "no documents in it"),
    "short.txt": (holding(b"x"), "long enough to learn from"),
    "short.jsonl": (holding(b'{"text": "x"}'), "long enough to learn from"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named(tmp_path, show, name):
    make, expected = BAD_FILES[name]
    path = tmp_path / name
    make(path)
    code, out, err = show("--files", str(path), "--bad-records", "9")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err
    assert expected in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--files"], "files is empty"),
        (["--files", "http://host/data.jsonl"], "expected a path, or one in a bucket (gs://)"),
        (["--files", "s3://bucket/data.jsonl"], "expected a path, or one in a bucket (gs://)"),
        (["--files", "x" * 300], "cannot be read (File name too long)"),
        (["--bad-records", "-1"], "bad_records=-1: expected at least 0"),
        (["--documents-per-row", "0"], "documents_per_row=0: expected a number above 0"),
        (["--max-length", "1"], "max_length=1: expected at least 2"),
    ],
)
def test_bad_settings_are_named(show, args, expected):
    code, out, err = show(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


def test_nothing_but_bad_records(tmp_path, show):
    path = write(tmp_path, b"{", b"{")
    code, _, err = show("--files", path, "--bad-records", "2")
    assert code == 2
    assert "no good record in them" in err
