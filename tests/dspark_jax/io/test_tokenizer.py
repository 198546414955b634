"""Ids as tokenizer.json says, chats as the template says, and one line for what is wrong."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from dspark_jax.config import InputError
from dspark_jax.io.tokenizer import load_tokenizer

TEXT = "def f(x):\n\treturn x1234 + 'naïve'\n"
CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:"
    "{% if enable_thinking is false %}[no thoughts]{% endif %}{% endif %}"
)


@pytest.fixture
def backend():
    """Bytes as tokens, each digit alone; `<s>` (0) is put before every plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


@pytest.fixture
def folder(backend, tmp_path):
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def settings(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_encode_is_what_tokenizer_json_says(folder, backend):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(TEXT) == backend.encode(TEXT).ids
    assert tokenizer.encode(TEXT)[0] == 0  # by the post-processor
    assert tokenizer.encode(TEXT, special=False) == backend.encode(TEXT).ids[1:]
    assert tokenizer.encode("", special=False) == []


def test_half_of_a_surrogate_pair_is_no_text(folder):
    tokenizer = load_tokenizer(folder)
    for encode in (tokenizer.encode, tokenizer.encode_literally):
        with pytest.raises(InputError, match="half of a surrogate pair, expected text"):
            encode("a\ud800")


def test_special_tokens_in_a_text_are_read_as_such(folder):
    assert load_tokenizer(folder).encode("</s>", special=False) == [1]


def test_an_answer_has_no_special_tokens(folder, backend):
    """And encoding it changes nothing for the texts that may have them."""
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_literally("</s>12")
    assert len(ids) == 6
    assert 1 not in ids
    assert tokenizer.decode(ids) == "</s>12"
    assert tokenizer.encode("</s>", special=False) == [1]


def test_descriptions_of_tools_go_to_the_template(folder):
    settings(folder, chat_template="{{ tools[0].name if tools else 'none' }}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_text(CHAT, generation_prompt=True) == "none"
    assert tokenizer.chat_text(CHAT, generation_prompt=True, tools=[{"name": "f"}]) == "f"
    assert tokenizer.chat(CHAT, tools=[{"name": "f"}]) == tokenizer.encode("f", special=False)


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_class_name_and_model_type_do_not_change_the_ids(folder, backend, name):
    settings(folder, tokenizer_class=name)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_tokenizer(folder).encode(TEXT) == backend.encode(TEXT).ids


def test_decode(folder):
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer.encode(TEXT), 1]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, special=True) == f"<s>{TEXT}</s>"
    odd = "a , b ' t n't ."  # nothing is tidied up
    assert tokenizer.decode(tokenizer.encode(odd)) == odd


def test_eos_ids_and_size(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.vocab_size == 258
    settings(folder, eos_token=None)
    assert load_tokenizer(folder).eos_ids == ()


def test_chat(folder):
    tokenizer = load_tokenizer(folder)
    text = "<s>user:hi</s><s>assistant:[no thoughts]"
    assert tokenizer.chat_text(CHAT, generation_prompt=True) == text
    assert tokenizer.chat_text(CHAT, generation_prompt=False) == "<s>user:hi</s>"
    thinking = tokenizer.chat_text(CHAT, generation_prompt=True, thinking=True)
    assert thinking == "<s>user:hi</s><s>assistant:"
    # The template has put the special tokens in: the post-processor adds no second one.
    assert tokenizer.chat(CHAT) == tokenizer.encode(text, special=False)
    assert tokenizer.chat(CHAT)[:2] != [0, 0]
    assert tokenizer.chat(CHAT, thinking=True) == tokenizer.encode(thinking, special=False)


def test_template_in_a_file_of_its_own(folder):
    settings(folder, chat_template=None)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert load_tokenizer(folder).chat_text(CHAT, generation_prompt=True) == "hi!"


def one_line(error) -> str:
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


def test_no_tokenizer(tmp_path):
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert one_line(error) == f"{tmp_path}: no tokenizer.json in this folder"
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path / "absent")
    assert "no such folder" in one_line(error)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}'])
def test_tokenizer_that_is_none(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(InputError) as error:
        load_tokenizer(folder)
    assert str(folder / "tokenizer.json") in one_line(error)


def test_malformed_settings(folder):
    (folder / "tokenizer_config.json").write_text('{"eos_token": ')
    with pytest.raises(InputError) as error:
        load_tokenizer(folder)
    assert "tokenizer_config.json: not valid JSON" in one_line(error)


def test_no_chat_template(folder):
    settings(folder, chat_template=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a", special=False)  # plain prompts work
    with pytest.raises(InputError) as error:
        tokenizer.chat(CHAT)
    assert "no chat template" in one_line(error)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([*CHAT, {"role": "user"}], "messages[1]"),
        ([{"role": "user", "content": None}], "messages[0]"),
        ([{"content": "hi"}], "messages[0]"),
    ],
)
def test_bad_messages(folder, messages, where):
    with pytest.raises(InputError) as error:
        load_tokenizer(folder).chat(messages)
    assert one_line(error).startswith(f"{where}: expected")


def test_template_that_refuses(folder):
    settings(folder, chat_template="{{ raise_exception('roles\nmust alternate') }}")
    with pytest.raises(InputError) as error:
        load_tokenizer(folder).chat(CHAT)
    assert one_line(error).endswith("the chat template refused: roles must alternate")


def test_no_advice_to_install_pytorch(folder):
    code = f"from dspark_jax.io.tokenizer import load_tokenizer; load_tokenizer({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_golden_tokenizer(golden):
    tokenizer = load_tokenizer(golden / "qwen3_target")
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_text(CHAT, generation_prompt=True) == prompt
    assert tokenizer.chat(CHAT) == tokenizer.encode(prompt)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == 1024


def test_qwen3_template(golden, folder):
    template = golden.parent / "chat_templates" / "qwen3.jinja"
    if not template.exists():
        pytest.skip(f"no template at {template}")
    settings(folder, chat_template=template.read_text())
    tokenizer = load_tokenizer(folder)
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    quiet = tokenizer.chat_text(CHAT, generation_prompt=True)
    assert quiet == head + "<think>\n\n</think>\n\n"
    assert tokenizer.chat_text(CHAT, generation_prompt=True, thinking=True) == head
