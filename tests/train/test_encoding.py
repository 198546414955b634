"""Tokens and loss masks, against tables written by hand.

A table has a word for each token: · is a space, \\n a line break, and what is learnt begins with +.
"""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import tokenizers

from dspark_jax.config import InputError
from dspark_jax.io.tokenizer import load_tokenizer
from train.documents import Document
from train.encoding import Encoder, make_encoder
from train.records import Chat, Generated, Source, Text
from train.settings import DataSettings

GEMMA4_MARKS = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"]
# With thinking off the prompt ends in an empty thinking block that no later prompt shows again.
GEMMA4 = r"""
{%- set thinking = enable_thinking is defined and enable_thinking -%}
{%- set given = messages[0].role == 'system' -%}
{%- if given or thinking -%}
{{- '<|turn>system\n' -}}
{{- '<|think|>\n' if thinking -}}
{{- messages[0].content | trim if given -}}
{{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if given else messages) -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
{%- if message.reasoning_content -%}
{{- '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' -}}
{%- endif -%}
{{- message.content | trim + '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\n' -}}
{{- '<|channel>thought\n<channel|>' if not thinking -}}
{%- endif -%}
"""


def user(content):
    return {"role": "user", "content": content}


def answer(content, **extras):
    return {"role": "assistant", "content": content, **extras}


def system(content):
    return {"role": "system", "content": content}


TWO_TURNS = [user("ab"), answer("cd"), user("ef"), answer("gh")]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}

# What the templates put around "ab" and the like, in tokens of the golden tokenizer.
Q_USER = r"<|im_start|> u ser \n {} <|im_end|> \n"
Q_OPEN = r"<|im_start|> a ss ist ant \n"
Q_BLOCK = r"< th in k > \n \n < / th in k > \n\n"  # the empty thinking block
S_SYSTEM = (
    r"<|im_start|> s y ste m \n Y o u ·are ·a ·he l p f ul ·A I ·a ss ist ant ·name d ·S mo l L M ,"
    r" ·t ra in ed ·by ·H u g g ing ·F ace <|im_end|> \n"
)
G_USER = r"<|turn> u ser \n {} <turn|> \n"
G_OPEN = r"<|turn> m ode l \n"
G_BLOCK = r"<|channel> th o u g ht \n <channel|>"
G_THINK = r"<|turn> s y ste m \n <|think|> \n <turn|> \n"


def learnt(table: str) -> str:
    return re.sub(r"(?<!\S)(?=\S)", "+", table)


def table(*parts: str) -> list[str]:
    return " ".join(parts).split()


Q_AB, Q_EF = Q_USER.format("ab"), Q_USER.format("e f")
G_AB, G_EF = G_USER.format("ab"), G_USER.format("e f")

CASES = {
    # --- Qwen3, thinking off: each turn is a sequence of its own, since later prompts show an
    # answer without the block it was written behind.
    "qwen3 two turns": ("qwen3", TWO_TURNS, [
        table(Q_AB, Q_OPEN, Q_BLOCK, "+c +d +<|im_end|>"),
        table(Q_AB, Q_OPEN, r"c d <|im_end|> \n", Q_EF, Q_OPEN, Q_BLOCK, "+g +h +<|im_end|>"),
    ]),
    "qwen3 system": ("qwen3", [system("s"), *TWO_TURNS[:2]], [
        table(r"<|im_start|> s y ste m \n s <|im_end|> \n", Q_AB, Q_OPEN, Q_BLOCK,
              "+c +d +<|im_end|>"),
    ]),
    "qwen3 marks as text": ("qwen3", [user("ab"), answer("x<|im_end|>y</think>z")], [
        table(Q_AB, Q_OPEN, Q_BLOCK, "+x +< +| +im +_ +end +| +> +y +< +/ +th +in +k +> +z",
              "+<|im_end|>"),
    ]),
    # A user's marks are what the target reads them as when it decodes.
    "qwen3 marks in a prompt": ("qwen3", [user("a<|im_end|>"), answer("cd")], [
        table(Q_USER.format("a <|im_end|>"), Q_OPEN, Q_BLOCK, "+c +d +<|im_end|>"),
    ]),
    "qwen3 empty answer": ("qwen3", [user("ab"), answer(""), user("ef"), answer("gh")], [
        table(Q_AB, Q_OPEN, Q_BLOCK, "+<|im_end|>"),
        table(Q_AB, Q_OPEN, r"<|im_end|> \n", Q_EF, Q_OPEN, Q_BLOCK, "+g +h +<|im_end|>"),
    ]),
    "qwen3 tools": (
        "qwen3", [user("ab"), answer("", tool_calls=[CALL]), {"role": "tool", "content": "1"},
                  answer("gh")], [
        table(Q_AB, Q_OPEN, Q_BLOCK,
              r'+< +to +ol +_ +call +> +\n +{ +" +name +" +: +·" +f +", +·" +arg +ument +s +" +:'
              r' +·{ +" +x +" +: +·1 +} +} +\n +< +/ +to +ol +_ +call +> +<|im_end|>'),
        table(Q_AB, Q_OPEN,
              r'< to ol _ call > \n { " name " : ·" f ", ·" arg ument s " :'
              r' ·{ " x " : ·1 } } \n < / to ol _ call > <|im_end|> \n',
              Q_USER.format(r"< to ol _ re sp on se > \n 1 \n < / to ol _ re sp on se >"),
              Q_OPEN, Q_BLOCK, "+g +h +<|im_end|>"),
    ]),
    "qwen3 first turn of the assistant": ("qwen3", [answer("hi"), *TWO_TURNS[:2]], [
        table(Q_OPEN, r"h i <|im_end|> \n", Q_AB, Q_OPEN, Q_BLOCK, "+c +d +<|im_end|>"),
    ]),
    # An answer that thinks was given where thinking was on, whatever the setting.
    "qwen3 thoughts": ("qwen3", [user("ab"), answer("<think>\nr\n</think>\n\ncd")], [
        table(Q_AB, Q_OPEN, learnt(r"< th in k > \n r \n < / th in k > \n \n c d <|im_end|>")),
    ]),
    "qwen3 thoughts apart": ("qwen3", [user("ab"), answer("cd", reasoning_content="r")], [
        table(Q_AB, Q_OPEN, learnt(r"< th in k > \n r \n < / th in k > \n \n c d <|im_end|>")),
    ]),
    # --- Qwen3, thinking on: the target writes its thinking block itself, an empty one as well.
    "qwen3 thinking, two turns": ("qwen3 thinking", TWO_TURNS, [
        table(Q_AB, Q_OPEN, learnt(Q_BLOCK), "+c +d +<|im_end|>"),
        table(Q_AB, Q_OPEN, r"c d <|im_end|> \n", Q_EF, Q_OPEN, learnt(Q_BLOCK),
              "+g +h +<|im_end|>"),
    ]),
    "qwen3 thinking, thoughts": (
        "qwen3 thinking", [user("ab"), answer("<think>\nr\n</think>\n\ncd")], [
        table(Q_AB, Q_OPEN, learnt(r"< th in k > \n r \n < / th in k > \n \n c d <|im_end|>")),
    ]),
    "qwen3 thinking, thoughts apart": (
        "qwen3 thinking", [user("ab"), answer("cd", reasoning_content="r")], [
        table(Q_AB, Q_OPEN, learnt(r"< th in k > \n r \n < / th in k > \n \n c d <|im_end|>")),
    ]),
    "qwen3 thinking, empty answer": ("qwen3 thinking", [user("ab"), answer("")], [
        table(Q_AB, Q_OPEN, learnt(Q_BLOCK), "+<|im_end|>"),
    ]),
    # --- SmolLM2: a default system prompt, and one sequence for all turns.
    "smollm2 two turns": ("smollm2", TWO_TURNS, [
        table(S_SYSTEM, Q_AB, Q_OPEN, r"+c +d +<|im_end|> \n", Q_EF, Q_OPEN, "+g +h +<|im_end|>"),
    ]),
    "smollm2 system": ("smollm2", [system("s"), *TWO_TURNS[:2]], [
        table(r"<|im_start|> s y ste m \n s <|im_end|> \n", Q_AB, Q_OPEN, "+c +d +<|im_end|>"),
    ]),
    "smollm2 tools": (
        "smollm2", [*TWO_TURNS[:2], {"role": "tool", "content": "1"}, answer("gh")], [
        table(S_SYSTEM, Q_AB, Q_OPEN, r"+c +d +<|im_end|> \n",
              r"<|im_start|> to ol \n 1 <|im_end|> \n", Q_OPEN, "+g +h +<|im_end|>"),
    ]),
    # The next prompt holds the mark as a token: it does not go on from what came before.
    "smollm2 marks as text": (
        "smollm2", [user("ab"), answer("x<|im_end|>y"), user("ef"), answer("gh")], [
        table(S_SYSTEM, Q_AB, Q_OPEN, "+x +< +| +im +_ +end +| +> +y +<|im_end|>"),
        table(S_SYSTEM, Q_AB, Q_OPEN, r"x <|im_end|> y <|im_end|> \n", Q_EF, Q_OPEN,
              "+g +h +<|im_end|>"),
    ]),
    "smollm2 empty answer": ("smollm2", [user("ab"), answer(""), user("ef"), answer("gh")], [
        table(S_SYSTEM, Q_AB, Q_OPEN, r"+<|im_end|> \n", Q_EF, Q_OPEN, "+g +h +<|im_end|>"),
    ]),
    "smollm2 two answers": ("smollm2", [user("ab"), answer("cd"), answer("gh")], [
        table(S_SYSTEM, Q_AB, Q_OPEN, r"+c +d +<|im_end|> \n", Q_OPEN, "+g +h +<|im_end|>"),
    ]),
    # --- Gemma4.
    "gemma4 two turns": ("gemma4", TWO_TURNS, [
        table(G_AB, G_OPEN, G_BLOCK, "+c +d +<turn|>"),
        table(G_AB, G_OPEN, r"c d <turn|> \n", G_EF, G_OPEN, G_BLOCK, "+g +h +<turn|>"),
    ]),
    "gemma4 system": ("gemma4", [system("s"), *TWO_TURNS[:2]], [
        table(r"<|turn> s y ste m \n s <turn|> \n", G_AB, G_OPEN, G_BLOCK, "+c +d +<turn|>"),
    ]),
    "gemma4 tools": ("gemma4", [*TWO_TURNS[:2], {"role": "tool", "content": "1"}, answer("gh")], [
        table(G_AB, G_OPEN, G_BLOCK, "+c +d +<turn|>"),
        table(G_AB, G_OPEN, r"c d <turn|> \n <|turn> to ol \n 1 <turn|> \n", G_OPEN, G_BLOCK,
              "+g +h +<turn|>"),
    ]),
    "gemma4 marks as text": ("gemma4", [user("ab"), answer("x<turn|>y")], [
        table(G_AB, G_OPEN, G_BLOCK, "+x +< +turn +| +> +y +<turn|>"),
    ]),
    "gemma4 empty answer": ("gemma4", [user("ab"), answer("")], [
        table(G_AB, G_OPEN, G_BLOCK, "+<turn|>"),
    ]),
    "gemma4 thoughts": ("gemma4", [user("ab"), answer("<|channel>thought\nr\n<channel|>cd")], [
        table(G_THINK, G_AB, G_OPEN, learnt(r"<|channel> th o u g ht \n r \n <channel|> c d"),
              "+<turn|>"),
    ]),
    "gemma4 thinking, two turns": ("gemma4 thinking", TWO_TURNS, [
        table(G_THINK, G_AB, G_OPEN, r"+c +d +<turn|> \n", G_EF, G_OPEN, "+g +h +<turn|>"),
    ]),
    "gemma4 thinking, thoughts apart": (
        "gemma4 thinking", [user("ab"), answer("cd", reasoning_content="r")], [
        table(G_THINK, G_AB, G_OPEN, learnt(r"<|channel> th o u g ht \n r \n <channel|> c d"),
              "+<turn|>"),
    ]),
}  # fmt: skip


@pytest.fixture(scope="module")
def encoders(golden, tmp_path_factory):
    """By name of the template, with the golden tokenizer, which is a byte-level one."""
    templates = golden.parent / "chat_templates"
    if not templates.is_dir():
        pytest.skip(f"no chat templates at {templates}")
    texts = {name: (templates / f"{name}.jinja").read_text() for name in ("qwen3", "smollm2")}
    found = {}
    for name, text in {**texts, "gemma4": GEMMA4}.items():
        folder = tmp_path_factory.mktemp(name)
        backend = tokenizers.Tokenizer.from_file(str(golden / "qwen3_target" / "tokenizer.json"))
        if name == "gemma4":
            backend.add_special_tokens(GEMMA4_MARKS)
        backend.save(str(folder / "tokenizer.json"))
        shutil.copy(golden / "qwen3_target" / "tokenizer_config.json", folder)
        (folder / "chat_template.jinja").write_text(text)
        tokenizer = load_tokenizer(folder)
        stop = backend.token_to_id("<turn|>" if name == "gemma4" else "<|im_end|>")
        found[name] = Encoder(tokenizer, (0, stop), 256)
        found[f"{name} thinking"] = dataclasses.replace(found[name], thinking=True)
    return found


def words(encoder, tokens, mask) -> list[str]:
    """A table of what was found."""
    texts = [encoder.tokenizer.decode([i], special=True) for i in tokens]
    shown = [text.replace(" ", "·").replace("\n", "\\n") for text in texts]
    return ["+" * bool(m) + text for m, text in zip(mask, shown, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_masks_of_chats(encoders, name):
    template, messages, expected = CASES[name]
    encoder = encoders[template]
    document = Document("here", Chat(messages))
    found = [words(encoder, s.tokens, s.loss_mask) for s in encoder.encode(document)]
    # Where a stop token is all that is learnt no block can be anchored.
    assert found == [rows for rows in expected if sum(row[0] == "+" for row in rows) > 1]
    everything = encoder._chat(messages, None)
    assert [words(encoder, *rows) for rows in everything] == expected


@pytest.mark.parametrize("length", range(10, 31))
def test_truncated_answers(encoders, length):
    """At any length: the table is cut, and a sequence without an anchor left out."""
    encoder = dataclasses.replace(encoders["qwen3"], max_length=length)
    whole = table(Q_AB, Q_OPEN, Q_BLOCK, "+c +d +<|im_end|>")
    assert len(whole) == 30
    found = encoder.encode(Document("here", Chat(TWO_TURNS[:2])))
    expected = [whole[:length]] if length >= 29 else []
    assert [words(encoder, s.tokens, s.loss_mask) for s in found] == expected


def test_descriptions_of_tools_are_read_and_not_learnt(encoders):
    tools = [{"type": "function", "function": {"name": "f"}}]
    encoder = dataclasses.replace(encoders["qwen3"], max_length=1024)
    messages = [user("ab"), answer("", tool_calls=[CALL])]
    (with_tools,) = encoder.encode(Document("here", Chat(messages, tools)))
    (without,) = encoder.encode(Document("here", Chat(messages)))
    prompt = encoder.tokenizer.chat(messages[:1], tools=tools)
    assert "# Tools" in encoder.tokenizer.decode(prompt)
    assert with_tools.tokens[: len(prompt)].tolist() == prompt
    assert not with_tools.loss_mask[: len(prompt)].any()
    assert with_tools.loss_mask[len(prompt) :].all()
    np.testing.assert_array_equal(
        with_tools.tokens[len(prompt) :], without.tokens[without.loss_mask]
    )


def test_prompts_are_those_of_decoding(encoders):
    """What is not learnt in front of an answer is what `infer` would give the target."""
    for encoder in encoders.values():
        *_, (tokens, mask) = encoder._chat(TWO_TURNS, None)
        prompt = encoder.tokenizer.chat(TWO_TURNS[:3], thinking=encoder.thinking)
        assert tokens[: len(prompt)] == prompt
        assert all(mask[len(prompt) :])
        assert not mask[len(prompt) - 1]


def test_an_answer_that_ends_itself_is_refused(encoders):
    chat = Chat([user("ab"), answer("<think>\na<|im_end|>\n</think>\n\ncd")])
    with pytest.raises(InputError, match="here: an answer holds the target's stop token"):
        encoders["qwen3"].encode(Document("here", chat))


def test_a_template_that_hides_an_answer_is_refused(encoders):
    chat = Chat([user("ab"), answer("cd", reasoning_content="r")])
    encoder = encoders["gemma4"]
    broken = GEMMA4.replace("'<|turn>model\\n'", "'<|turn>other\\n'")
    folder = encoder.tokenizer.path.parent / "broken"
    shutil.copytree(encoder.tokenizer.path, folder)
    (folder / "chat_template.jinja").write_text(broken)
    encoder = dataclasses.replace(encoder, tokenizer=load_tokenizer(folder))
    with pytest.raises(InputError, match="behind its own generation prompt"):
        encoder.check(chat)


# --- Other documents ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(small_target):
    """A byte a token."""
    return Encoder(load_tokenizer(small_target), (2, 0), 128)


def test_of_a_text_everything_is_learnt(encoder):
    (found,) = encoder.encode(Document("here", Text("hello")))
    assert encoder.tokenizer.decode(found.tokens) == "hello"
    assert found.loss_mask.all()
    assert (found.tokens.dtype, found.loss_mask.dtype) == (np.int32, bool)


def test_long_texts_are_cut_and_nothing_is_lost(encoder):
    text = "".join(chr(97 + i % 26) for i in range(300))
    found = encoder.encode(Document("here", Text(text)))
    assert [len(s.tokens) for s in found] == [128, 128, 44]
    assert "".join(encoder.tokenizer.decode(s.tokens) for s in found) == text
    assert encoder.encode(Document("here", Text("x"))) == []  # no block can be anchored in it


def test_long_chats_end_at_the_longest_length(encoder):
    messages = [user("a" * 40), answer("b" * 200), user("c"), answer("d")]
    (found,) = encoder.encode(Document("here", Chat(messages)))
    assert len(found.tokens) == 128
    prompt = len(encoder.tokenizer.chat(messages[:1]))
    assert found.loss_mask.tolist() == [False] * prompt + [True] * (128 - prompt)


def test_functions_of_a_source_are_chats(encoder):
    found = encoder.encode(Document("here", Source("def f():\n    return 1\n")))
    assert [encoder.tokenizer.decode(s.tokens[s.loss_mask], special=True) for s in found] == [
        "def f():\n    return 1\n",
        "    return 1\n<|im_end|>",
    ]


def test_generated_tokens_are_taken_as_they_are(encoder):
    (found,) = encoder.encode(Document("here", Generated([5, 6, 7], [8, 9, 2])))
    assert found.tokens.tolist() == [5, 6, 7, 8, 9, 2]
    assert found.loss_mask.tolist() == [False] * 3 + [True] * 3
    cut = dataclasses.replace(encoder, max_length=5)
    (found,) = cut.encode(Document("here", Generated([5, 6, 7], [8, 9, 2])))
    assert found.tokens.tolist() == [5, 6, 7, 8, 9]


def test_a_template_without_stop_token_is_refused(encoder):
    other = dataclasses.replace(encoder, stop_token_ids=(7,))
    with pytest.raises(InputError, match=r"here: .*stop tokens"):
        other.encode(Document("here", Chat(TWO_TURNS)))


def test_one_chat_stands_for_all_with_its_roles(encoder, monkeypatch):
    """The template is not asked about each: that would take as long as encoding."""
    checked = dataclasses.replace(encoder)
    checked.check(Chat(TWO_TURNS))
    monkeypatch.setattr(Encoder, "_chat", lambda *_: pytest.fail("asked again"))
    checked.check(Chat([{**m, "content": "other"} for m in TWO_TURNS]))


def test_encoders_of_targets(small_target, small_config):
    encoder = make_encoder(DataSettings(max_length=7, thinking=True), small_target, small_config)
    assert (encoder.stop_token_ids, encoder.max_length, encoder.thinking) == ((2, 0), 7, True)
    without = dataclasses.replace(small_config, stop_token_ids=())
    assert make_encoder(DataSettings(), small_target, without).stop_token_ids == (2,)
    small = dataclasses.replace(small_config, vocab_size=100)
    with pytest.raises(InputError, match="260 tokens, expected at most the 100 of the target"):
        make_encoder(DataSettings(), small_target, small)
