"""The tokenizer in a GGUF file: byte-level BPE, rebuilt from its vocabulary and merges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_jax.config import require
from dspark_jax.io.gguf import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEY = "tokenizer.ggml"
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split and merged."""


def build(file: GgufFile) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a file.

    A byte that the vocabulary has no token for is dropped, as llama.cpp does.

    Returns:
      It, and what a Hugging Face folder has in tokenizer_config.json: special tokens and the chat
      template.
    Raises:
      InputError: a tokenizer of another kind, or one that contradicts itself.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    for name, expected in (("model", "gpt2"), ("pre", "smollm")):
        found = file.get(f"{KEY}.{name}", str)
        require(
            found == expected,
            f"{file.path}: {KEY}.{name}={found!r} is not known, expected {expected!r}",
        )
    tokens = file.get(f"{KEY}.tokens", list)
    ids = {token: i for i, token in enumerate(tokens)}
    require(len(ids) == len(tokens), f"{file.path}: {KEY}.tokens: expected different ones")
    backend = Tokenizer(models.BPE(vocab=ids, merges=_merges(file, ids)))
    # Each digit is a token; the rest is split as by GPT-2.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    types = file.get(f"{KEY}.token_type", list)
    require(
        len(types) == len(tokens),
        f"{file.path}: {KEY}.token_type: {len(types)} of them, expected one for each token",
    )
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        typed = zip(tokens, types, strict=True)
        add([AddedToken(token, normalized=False) for token, found in typed if found == kind])

    settings = _special_tokens(file, tokens)
    if file.get(f"{KEY}.add_bos_token", bool, False):
        require("bos_token" in settings, f"{file.path}: {KEY}.bos_token_id is missing")
        bos = settings["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, ids[bos])]
        )
    if (template := file.get("tokenizer.chat_template", str, None)) is not None:
        settings["chat_template"] = template
    return backend, settings


def _merges(file: GgufFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens in the order of their ranks."""
    merges = []
    for text in file.get(f"{KEY}.merges", list):
        first, _, second = text.partition(" ")
        require(
            first in ids and second in ids and first + second in ids,
            f"{file.path}: {KEY}.merges: {text!r}: expected two tokens that make up a third",
        )
        merges.append((first, second))
    return merges


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Those that the file names, by what transformers calls them."""
    found = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        number = file.get(f"{KEY}.{key}_token_id", int, None)
        if number is not None:
            require(
                0 <= number < len(tokens),
                f"{file.path}: {KEY}.{key}_token_id={number}, expected an id in"
                f" 0..{len(tokens) - 1}",
            )
            found[f"{name}_token"] = tokens[number]
    return found
