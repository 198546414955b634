"""A target small enough to train for in a moment, with a tokenizer and a chat template; batches."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax import params as parameters
from dspark_jax.config import TargetConfig
from dspark_jax.io import hf
from dspark_jax.targets import dense

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)
# Old answers are shown without the empty thinking block that the prompt of a new one ends in.
THINKING_TEMPLATE = TEMPLATE.replace(
    "assistant\\n'}}", "assistant\\n<think>\\n\\n</think>\\n\\n'}}"
)

CONFIG = TargetConfig(
    vocab_size=264, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=2,
    num_kv_heads=1, head_dim=16, stop_token_ids=(2, 0),
)  # fmt: skip


def take(iterator, number):
    return list(itertools.islice(iterator, number))


def assert_same(some, others):
    for a, b in zip(some, others, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def joined(parts):
    """A batch of those that hosts have read."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def write_tokenizer(folder: Path, template: str) -> None:
    """A byte-level tokenizer without merges: a byte a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compilation_cache(compiled):
    """Runs of the same settings compile once."""
    changes = {
        "jax_compilation_cache_dir": str(compiled),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="session")
def small_config() -> TargetConfig:
    return CONFIG


@pytest.fixture(scope="session")
def target(small_config) -> dense.Target:
    """Parameters drawn as for training."""
    specs = dense.specs(small_config)
    return jax.jit(lambda: parameters.init(jax.random.key(9), specs))()


@pytest.fixture(scope="session")
def small_target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: rng.normal(float(len(spec.shape) == 1), 0.1, spec.shape).astype(np.float32),
        dense.specs(CONFIG),
    )
    hf.save_target(folder, CONFIG, params)
    write_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def thinking_target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    write_tokenizer(folder, THINKING_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(200)))
    return path
