import json

import pytest

from dspark_jax.config import InputError
from train.records import Chat, Generated, Text, Unanswered, parse

ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def of(record) -> bytes:
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "t"}, Text("t")),
        ({"messages": ASKED}, Chat(ASKED)),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
         Chat(ASKED)),
        ({"conversations": ASKED}, Chat(ASKED)),
        ({"prompt": "a", "response": "b"}, Chat(ASKED)),
        ({"messages": ASKED, "tools": TOOLS}, Chat(ASKED, TOOLS)),
        ({"messages": ASKED, "tools": None}, Chat(ASKED)),
        ({"prompt_ids": [1, 2], "token_ids": [3]}, Generated([1, 2], [3])),
        # What else is in a record does not matter, and the first shape counts.
        ({"id": 3, "messages": ASKED, "prompt": "other", "text": "other"}, Chat(ASKED)),
        ({"prompt_ids": [1], "token_ids": [3], "text": "decoded"}, Generated([1], [3])),
        ({"prompt_ids": [], "token_ids": [], "finish_reason": "error"}, Unanswered()),
    ],
)  # fmt: skip
def test_shapes(record, expected):
    assert parse(of(record)) == expected


def test_what_a_template_may_read_is_kept():
    turns = [
        {"role": "user", "content": "a", "weight": 1},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"},
        {"from": "observation", "value": "2"},
        {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": ""},
    ]
    assert parse(of({"messages": turns})).messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": ""},
    ]


def test_a_bare_result_of_generate_is_not_a_text():
    """Its text is an answer without its prompt."""
    with pytest.raises(InputError, match="prompt_ids: expected a list of token ids"):
        parse(of({"id": 1, "token_ids": [3], "text": "answer", "prompt_tokens": 2}))


def test_pairs_of_surrogates_are_characters():
    assert parse(b'{"text": "\\ud83d\\ude00"}') == Text("\N{GRINNING FACE}")
