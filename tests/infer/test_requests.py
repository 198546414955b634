"""Prompts files: every kind of line, and every kind of bad line."""

import dataclasses
import json

import pytest

from dspark_jax import generation
from dspark_jax.config import InputError
from dspark_jax.request import Request
from infer import requests
from infer.requests import Line


@pytest.fixture(scope="module")
def pair(folders):
    return generation.load(folders.target, None)


@pytest.fixture
def lines(tmp_path):
    """Reads a file of these lines, each JSON or raw."""

    def read(*contents):
        path = tmp_path / "prompts.jsonl"
        raw = [c if isinstance(c, bytes) else json.dumps(c).encode() for c in contents]
        path.write_bytes(b"\n".join(raw))
        return requests.read_lines(path)

    return read


def build(pair, fields, number=1, **kwargs):
    defaults = kwargs.pop("defaults", Request((0,), max_new_tokens=5, temperature=0.5, seed=7))
    return requests.build(Line(number, number, fields), pair, defaults=defaults, **kwargs)


def test_lines_have_the_number_of_the_file_or_their_own_id(lines):
    found = lines({"prompt": "a"}, b"", {"prompt": "b", "id": "x"}, b"  ", {"prompt": "c", "id": 9})
    assert [(x.number, x.id) for x in found] == [(1, 1), (3, "x"), (5, 9)]
    assert [x.fields["prompt"] for x in found] == ["a", "b", "c"]


def test_marks_and_line_ends_of_other_systems_are_read(lines):
    (first, second) = lines(b'\xef\xbb\xbf{"prompt": "a"}\r', '{"prompt": "\u2028"}'.encode())
    assert first.fields == {"prompt": "a"}
    assert second.fields == {"prompt": "\u2028"}


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (b'{"prompt": "a"', "not valid JSON (Expecting ',' delimiter, column 15)"),
        (b"[1, 2]", "expected a JSON object"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (rb'{"prompt": "\ud800"}', "not text (half of a surrogate pair)"),
        ('{"prompt": "a"}'.encode("utf-16"), "not valid UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-be"), "not valid JSON (Expecting value, column 1)"),
        (b"[" * 100_000, "not valid JSON (too large)"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "not valid JSON (too large)"),
        (b'{"prompt": "a", "id": 1.5}', "id=1.5: expected a string or an integer"),
        (b'{"prompt": "a", "id": true}', "id=True: expected a string or an integer"),
    ],
)
def test_a_bad_line_keeps_its_place(lines, pair, bad, expected):
    before, line, after = lines({"prompt": "a"}, bad, {"prompt": "b"})
    assert (line.number, line.id, line.error) == (2, 2, expected)
    assert before.error is after.error is None
    prompt = requests.build(line, pair, defaults=Request((0,)))
    assert (prompt.id, prompt.request, prompt.error) == (2, None, f"line 2: {expected}")


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([{"id": "a"}, {"id": "b"}, {"id": "a"}], "line 3: id 'a' is that of line 1"),
        ([{"id": 2}, {"prompt": "a"}], "line 2: id 2 is that of line 1"),
        ([b"", b" "], "no prompts in it, expected one JSON object a line"),
    ],
)
def test_bad_files(lines, contents, expected):
    with pytest.raises(InputError) as error:
        lines(*contents)
    assert expected in str(error.value)


def test_ids_of_different_type_differ(lines):
    assert [x.id for x in lines({"id": "2"}, {"prompt": "a"})] == ["2", 2]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read \(No such file"):
        requests.read_lines(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        requests.read_lines(tmp_path)


def test_kinds_of_prompts(pair):
    tokenizer = pair.tokenizer
    chat = [{"role": "user", "content": "Hi"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    of_chat = tokenizer.encode(text)
    assert tokenizer.decode(of_chat, special=True) == text
    for fields, expected in (
        ({"prompt": "Hi", "turns": None}, tokenizer.encode("Hi")),
        ({"token_ids": [9, 0, 8]}, [9, 0, 8]),
        ({"messages": chat}, of_chat),
        ({"turns": ["Hi", "and then?"], "category": "writing"}, of_chat),
    ):
        prompt = build(pair, fields)
        assert prompt.error is None
        assert prompt.request is not None
        assert prompt.request.token_ids == expected
    thinking = build(pair, {"messages": chat}, thinking=True).request
    assert thinking is not None
    assert thinking.token_ids == [*of_chat, *tokenizer.encode("0")]


def test_settings_of_a_line_go_before_the_defaults(pair):
    plain = build(pair, {"prompt": "a"}, number=4).request
    ids = pair.tokenizer.encode("a")
    assert plain == Request(ids, max_new_tokens=5, temperature=0.5, seed=7, stream=4)
    own = {"temperature": 1, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "max_new_tokens": 2, "seed": 1}
    found = build(pair, {"prompt": "a", **own}, number=4).request
    assert found == Request(ids, stream=0, **own)
    assert isinstance(found.temperature, float)


def test_stop_strings_of_a_line(pair):
    defaults = Request((0,), stop=("x", "y"))
    for own, expected in (
        ({}, ("x", "y")),
        ({"stop": None}, ("x", "y")),
        ({"stop": "ab"}, ("ab",)),
        ({"stop": ["ab", "c"]}, ("ab", "c")),
        ({"stop": []}, ()),
    ):
        found = build(pair, {"prompt": "a", **own}, defaults=defaults).request
        assert found is not None
        assert found.stop == expected


def samples(pair, fields, number=5, default=1):
    defaults = Request((0,), temperature=1.0, seed=7)
    line = Line(number, "x", fields)
    return requests.build_samples(line, pair, defaults=defaults, default=default)


def test_samples_differ_in_their_stream_only(pair):
    (one,) = samples(pair, {"prompt": "a"})
    assert (one.sample, one.request.stream) == (None, 5)
    many = samples(pair, {"prompt": "a", "n": 3})
    assert many == samples(pair, {"prompt": "a"}, default=3)
    assert [(p.id, p.sample) for p in many] == [("x", 0), ("x", 1), ("x", 2)]
    assert [p.request.stream for p in many] == [5, 2**31 + 5, 2**30 + 5]
    for prompt in many:
        assert dataclasses.replace(prompt.request, stream=5) == one.request
    (alone,) = samples(pair, {"prompt": "a", "n": 1}, default=3)
    assert alone == one
    seeded = samples(pair, {"prompt": "a", "n": 2, "seed": 9})
    assert [(p.request.seed, p.request.stream) for p in seeded] == [(9, 0), (9, 2**31)]


def test_no_two_samples_have_one_stream():
    streams = {requests._stream(n, sample) for n in range(1, 1000) for sample in range(500)}
    assert len(streams) == 999 * 500
    assert max(streams) < 2**32
    assert requests._stream(2**32 - 1, requests.MOST_SAMPLES - 1) < 2**32


def test_an_error_comes_as_often_as_its_samples(pair):
    for fields, n in (({"prompt": "", "n": 3}, 3), ({"prompt": "", "n": 0}, 2), ({"n": "3"}, 2)):
        found = samples(pair, fields, default=2)
        assert [p.sample for p in found] == list(range(n))
        assert [p.sample for p in found] == requests.samples(Line(5, "x", fields), 2)
        assert {p.request for p in found} == {None}
        assert len({p.error for p in found}) == 1


def test_the_limit_is_cut_to_the_room(pair):
    found = build(pair, {"token_ids": [5] * 120, "max_new_tokens": 50}).request
    assert found.max_new_tokens == 8


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("maxNewTokens", "max_new_tokens"),
        ("max_new_token", "max_new_tokens"),
        ("top-p", "top_p"),
        ("topk", "top_k"),
        ("Stop", "stop"),
    ],
)
def test_settings_that_are_misspelt(pair, name, meant):
    prompt = build(pair, {"prompt": "a", name: 0.5}, number=3)
    expected = f"line 3: {name}=0.5: no such setting, perhaps you meant {meant}"
    assert (prompt.request, prompt.error) == (None, expected)


def test_fields_of_data_sets_are_left_alone(pair):
    names = (
        *("prompt_id", "prompts", "message", "turn", "ids", "idx", "text", "answer", "category"),
        *("speed", "step", "top", "temp", "tokens", "max", "N", "need", "prompt_tokens", ""),
    )
    fields = {"prompt": "a", **dict.fromkeys(names, 1)}
    assert build(pair, fields).request == build(pair, {"prompt": "a"}).request


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": ""}, "the prompt is empty: expected some text"),
        ({"token_ids": []}, "the prompt is empty: expected at least one token"),
        ({"turns": []}, "the first of turns is empty or absent"),
        ({"turns": ["", "b"]}, "the first of turns is empty or absent"),
        ({"turns": "abc"}, "turns='abc': expected a list of strings"),
        ({"prompt": 5}, "prompt=5: expected a string"),
        ({"messages": []}, "messages: expected a list with at least one message"),
        ({"messages": [{"role": "user"}]}, "messages[0]: expected an object with the strings"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "usr", "content": "b"}]},
            "messages[1]: role 'usr': expected one of system, user, assistant, tool",
        ),
        ({"token_ids": [5, 260]}, "token id 260: expected 0..259"),
        ({"token_ids": [-1]}, "token id -1: expected 0..259"),
        ({"token_ids": [1.0]}, "token_ids=[1.0]: expected a list of whole numbers"),
        ({"token_ids": [True]}, "token_ids=[True]: expected a list of whole numbers"),
        ({"token_ids": [5] * 128}, "leaves no room: the target holds 128 positions"),
        ({}, "expected one of prompt, messages, turns, token_ids; found none of them"),
        ({"prompt": "a", "turns": ["b"]}, "found prompt and turns"),
        ({"prompt": "a", "temperature": -0.5}, "temperature=-0.5: expected a number 0 or above"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature=nan: expected a number 0"),
        ({"prompt": "a", "temperature": float("inf")}, "temperature=inf: expected a number"),
        ({"prompt": "a", "temperature": "hot"}, "temperature='hot': expected a number"),
        ({"prompt": "a", "temperature": True}, "temperature=True: expected a number"),
        ({"prompt": "a", "temperature": 10**400}, "expected a number in reason"),
        ({"prompt": "a", "top_p": 0}, "top_p=0.0: expected a number above 0, at most 1"),
        ({"prompt": "a", "top_p": 1.5}, "top_p=1.5: expected a number above 0, at most 1"),
        ({"prompt": "a", "min_p": 2}, "min_p=2.0: expected a number in 0..1"),
        ({"prompt": "a", "top_k": -1}, "top_k=-1: expected a number 0 (off) or above"),
        ({"prompt": "a", "top_k": 2**31}, "expected a number 0 (off) or above, below 2^31"),
        ({"prompt": "a", "top_k": 2**31}, "top_k=2147483648: expected a number"),
        ({"prompt": "a", "top_k": 2.5}, "top_k=2.5: expected a whole number"),
        ({"prompt": "a", "seed": -1}, "seed=-1: expected a number in 0..2^32-1"),
        ({"prompt": "a", "stop": 5}, "stop=5: expected a string or a list of strings"),
        ({"prompt": "a", "stop": ["b", 5]}, "stop=['b', 5]: expected a string or a list"),
        ({"prompt": "a", "stop": ""}, "stop=('',): expected texts that are not empty"),
        ({"prompt": "a", "n": 0}, "n=0: expected a whole number in 1..65536"),
        ({"prompt": "a", "n": True}, "n=True: expected a whole number in 1..65536"),
        ({"prompt": "a", "n": 2.0}, "n=2.0: expected a whole number in 1..65536"),
        ({"prompt": "a", "n": 10**9}, "n=1000000000: expected a whole number in 1..65536"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens=0: expected a whole number above 0"),
    ],
)
def test_bad_fields(pair, fields, expected):
    prompt = build(pair, fields, number=12)
    assert prompt.request is None
    assert prompt.error is not None
    assert prompt.error.startswith("line 12: ")
    assert expected in prompt.error
    assert len(prompt.error) < 300
    assert "\n" not in prompt.error
