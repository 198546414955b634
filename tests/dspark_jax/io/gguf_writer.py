"""Writes the GGUF file of a small Llama: what llama.cpp's converter would make of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tokenizers import pre_tokenizers

from dspark_jax.config import Rope, TargetConfig
from dspark_jax.io import gguf, layouts
from dspark_jax.targets import dense

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
STOP, MASK = 2, 3
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ("he", "ll", "hell", "Ġhe", "Ġhell", "11", "<user>")
TOKENS = [*SPECIAL, *ALPHABET, *MERGED]
MERGES = ["h e", "l l", "he ll", "Ġ he", "Ġ hell", "1 1"]
TYPES = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4]
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)
CONFIG = TargetConfig(
    model_type="llama",
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=Rope(theta=50_000.0),
    norm_eps=1e-5,
    tie_embeddings=True,
    max_position=256,
    stop_token_ids=(STOP,),
)


def metadata() -> dict[str, Any]:
    """The keys of a file of `CONFIG`."""
    return {
        "llama.block_count": CONFIG.num_layers,
        "llama.context_length": CONFIG.max_position,
        "llama.embedding_length": CONFIG.hidden_size,
        "llama.feed_forward_length": CONFIG.intermediate_size,
        "llama.attention.head_count": CONFIG.num_heads,
        "llama.attention.head_count_kv": CONFIG.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.norm_eps,
        "llama.rope.freq_base": CONFIG.rope.theta,
        "llama.rope.dimension_count": CONFIG.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": STOP,
        "tokenizer.ggml.padding_token_id": STOP,
        "tokenizer.chat_template": TEMPLATE,
    }


def random_target(cfg: TargetConfig = CONFIG) -> dense.Target:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jnp.float32(rng.normal(len(s.shape) == 1, 0.2, s.shape)), dense.specs(cfg)
    )


def tensors(params: dense.Target, cfg: TargetConfig = CONFIG) -> dict[str, np.ndarray]:
    """The tensors of a file, rows of q and k reordered one by one."""
    theirs = {ours: name for name, ours in gguf.TENSORS.items()}
    found = {}
    for name, value in layouts.export(layouts.target_layout(cfg), params).items():
        if name in theirs:
            found[theirs[name]] = value
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        kind = {ours: name for name, ours in gguf.LAYER_TENSORS.items()}[part]
        if kind in ("attn_q", "attn_k"):
            value = neighbours(value, cfg.head_dim)
        found[f"blk.{layer}.{kind}.weight"] = value
    return found


def neighbours(rows: np.ndarray, size: int) -> np.ndarray:
    """Rows that rotate together side by side, instead of half a head apart."""
    found = np.empty_like(rows)
    for start in range(0, len(rows), size):
        for i in range(size // 2):
            found[start + 2 * i] = rows[start + i]
            found[start + 2 * i + 1] = rows[start + i + size // 2]
    return found


def write(path, values: dict[str, Any], arrays: dict[str, np.ndarray], *, kind="llama", packed=()):
    """Writes a file; the tensors named in `packed` are quantised to 8 bits."""
    writer = GGUFWriter(path, kind)
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, array in arrays.items():
        if name in packed:
            dtype = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(array, dtype), raw_dtype=dtype)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
