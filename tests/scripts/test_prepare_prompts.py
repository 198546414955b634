"""Records of every data set, as they lie on the hub, to prompts; the hub itself is not asked."""

import json
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from dspark_jax.io import cli
from scripts import prepare_prompts
from scripts.prepare_prompts import SETS

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CHAT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Who?"},
    {"from": "gpt", "value": "I."},
    {"from": "human", "value": "Why?"},
]
RECORDS = {
    "open-perfectblend": (
        {"conversations": CHAT, "source": "x"},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Who?"},
            ]
        },
    ),
    "gsm8k": ({"question": "1+1 {?}", "answer": "2"}, {"turns": ["1+1 {?}" + BOXED]}),
    "math500": ({"problem": "$x$", "answer": "1"}, {"turns": ["$x$" + BOXED]}),
    "aime25": ({"problem": "$y$", "id": "0"}, {"turns": ["$y$" + BOXED]}),
    "mbpp": ({"prompt": "Write f.", "task_id": 11}, {"turns": ["Write f."]}),
    "humaneval": (
        {"prompt": "def f():\n", "test": "assert"},
        {
            "turns": [
                "Write a solution to the following problem and make sure that it passes the tests:"
                "\n```python\ndef f():\n\n```"
            ]
        },
    ),
    "mt-bench": ({"prompt": ["a", "b"], "category": "c"}, {"turns": ["a", "b"]}),
    "alpaca": (
        {"instruction": "Sort.", "input": "2, 1", "output": "1, 2"},
        {"turns": ["Sort.\n\nInput:\n2, 1"]},
    ),
    "arena-hard-v2": ({"uid": "u", "prompt": "Hi"}, {"turns": ["Hi"]}),
}


@pytest.fixture
def command(tmp_path, capsys):
    """Runs the script; gives code, output and error."""

    def run(*args):
        output = ("--output", str(tmp_path / "out.jsonl"))
        code = cli.run(lambda: prepare_prompts.main([*map(str, args), *output]))
        return code, *capsys.readouterr()

    return run


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record(command, tmp_path, name):
    record, expected = RECORDS[name]
    assert command(name, "--from", write(tmp_path / "in.jsonl", record))[0] == 0
    assert lines(tmp_path) == [{"id": 1, **expected}]


def test_programming_tasks(command, tmp_path):
    bare = {"question_content": "Add.", "starter_code": ""}
    given = {"question_content": "Add.", "starter_code": "def f():"}
    assert command("livecodebench", "--from", write(tmp_path / "in.jsonl", bare, given))[0] == 0
    (first,), (second,) = (line["turns"] for line in lines(tmp_path))
    form = "### Question:\nAdd.\n\n### Format: {}\n```python\n{}\n```\n\n### Answer:"
    assert form.format("Write your code in the following format:", "# YOUR CODE HERE") in first
    assert form.format("Use the following code structure:", "def f():") in second


def test_every_set_is_tested():
    assert RECORDS.keys() | {"livecodebench"} == SETS.keys()


def test_an_alpaca_without_input(command, tmp_path):
    source = write(tmp_path / "in.jsonl", {"instruction": "Sing.", "input": ""})
    assert command("alpaca", "--from", source)[0] == 0
    assert lines(tmp_path)[0]["turns"] == ["Sing."]


def test_records_without_a_prompt_are_counted(command, tmp_path):
    good = {"conversations": [{"from": "human", "value": "Hi"}]}
    bad = [
        {"conversations": [{"from": "gpt", "value": "Hi"}]},
        {"conversations": []},
        {"conversations": None},
        {"conversations": [{"from": "human", "value": " "}]},
        {"text": "no"},
        [1],
    ]
    source = write(tmp_path / "in.jsonl", bad[0], good, *bad[1:])
    code, out, err = command("open-perfectblend", "--from", source)
    assert code == 0
    assert out == f"{tmp_path / 'out.jsonl'}: 1 prompts of open-perfectblend\n"
    reason = "conversations: expected a turn of human (or user) before the first answer"
    assert err == f"6 records passed over; the first is {source} record 1: {reason}\n"
    assert [line["id"] for line in lines(tmp_path)] == [2]


def test_a_sample(command, tmp_path):
    parts = [
        write(tmp_path / f"{i}.jsonl", *({"prompt": f"{i} {j}"} for j in range(20)))
        for i in range(2)
    ]
    seen = set()
    for seed in range(8):
        assert command("arena-hard-v2", "--prompts=5", f"--seed={seed}", "--from", *parts)[0] == 0
        found = lines(tmp_path)
        ids = [line["id"] for line in found]
        assert len(set(ids)) == 5
        assert ids == sorted(ids)
        for line in found:
            part, place = divmod(line["id"] - 1, 20)
            assert line["turns"] == [f"{part} {place}"]
        seen |= set(ids)
    # Of 40 each is drawn with a chance of 1 - (7/8)^8 = .66.
    assert 18 <= len(seen) <= 36


def test_parquet(command, tmp_path):
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"conversations": [CHAT, CHAT[1:]]}), path)
    assert command("open-perfectblend", "--from", path)[0] == 0
    assert [len(line["messages"]) for line in lines(tmp_path)] == [2, 1]


def test_files_of_the_hub(command, tmp_path, monkeypatch):
    """They are fetched by pattern."""
    asked = []

    def download(repository, *, repo_type, allow_patterns):
        asked.append((repository, repo_type, allow_patterns))
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "hub").mkdir()
    assert command("math500")[0] == 2
    write(tmp_path / "hub" / "test.jsonl", RECORDS["math500"][0])
    assert command("math500")[0] == 0
    assert asked == [("HuggingFaceH4/MATH-500", "dataset", "test.jsonl")] * 2
    assert lines(tmp_path) == [{"id": 1, **RECORDS["math500"][1]}]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["gsm9k"], "gsm9k: expected one of open-perfectblend, gsm8k, math500, aime25, mbpp"),
        (["gsm8k", "--from", "absent.jsonl"], "--from absent.jsonl: no such file"),
        (["gsm8k", "--from", "{good}", "--prompts=0"], "--prompts 0: expected a number above 0"),
        (["gsm8k", "--from", "{torn}"], "torn.jsonl line 2: not valid JSON"),
        (["gsm8k", "--from", "{bytes}"], "bytes.jsonl line 1: not UTF-8 text"),
        (["gsm8k", "--from", "{empty}"], "no prompts found: the files are empty"),
        (["math500", "--from", "{good}"], "no prompts found: {good} record 1: problem: expected"),
        (["gsm8k", "--from", "{good}", "--output", "{good}"], "expected two files"),
        (["gsm8k", "--from", "{good}", "--output", "nowhere/x"], "no such folder as nowhere"),
        ([], "NAME"),
    ],
)
def test_refused(tmp_path, capsys, args, text):
    names = {name: tmp_path / f"{name}.jsonl" for name in ("good", "torn", "bytes", "empty")}
    good = json.dumps({"question": "?"}) + "\n"
    for name, data in zip(
        names, (good.encode(), good.encode() + b"{", b"\xff\xfe", b""), strict=True
    ):
        names[name].write_bytes(data)
    output = [] if "--output" in args else ["--output", str(tmp_path / "out.jsonl")]
    before = sorted(tmp_path.iterdir())
    filled = [arg.format(**names) for arg in args]
    assert cli.run(lambda: prepare_prompts.main([*filled, *output])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert text.format(**names) in err
    assert sorted(tmp_path.iterdir()) == before
    assert names["good"].read_text() == good


def test_broken_parquet(command, tmp_path):
    path = Path(tmp_path / "in.parquet")
    path.write_bytes(b"PAR1 no")
    code, _, err = command("gsm8k", "--from", path)
    assert code == 2
    assert err.startswith(f"error: {path}: not a Parquet file")
    assert err.count("\n") == 1
